"""Outer loops: training that exchanges parameters now and then, beside inner steps that exchange nothing."""
