"""Text of others on this terminal: see `core.text`, which what is logged passes through as well."""

from __future__ import annotations

from torchft_ckpt.core.text import one_line, printable

__all__ = ["one_line", "printable"]
