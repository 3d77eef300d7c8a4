"""Fetching a state: blocks from one source or several, over connections that are not trusted, within a deadline."""
