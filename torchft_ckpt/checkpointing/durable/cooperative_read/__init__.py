"""Ranks of a group that read one checkpoint: each byte leaves storage once."""
