"""Durable checkpoints that are there: what they contain, whether they are whole, and states made of them."""
