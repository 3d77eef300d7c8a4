"""Text of others, made fit for a terminal and a log: names of tensors, reasons and messages of peers may hold what is no text."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text as one line, with what would move a terminal's cursor, or do more, written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def one_line(text: str) -> str:
    """Return a text of several lines as one, with blanks for what is no text: a reason, a path."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
