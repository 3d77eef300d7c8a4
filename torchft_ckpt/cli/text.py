"""Text of others on this terminal: names of tensors and messages of peers may hold what is no text."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with what would move a terminal's cursor, or do more, written as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
