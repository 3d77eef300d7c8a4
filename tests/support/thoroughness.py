"""How many of the cases that differ only in size, seed or place are run: a few by default, all by `scripts/test --thorough`.

What is left out by default never is the only case of its kind, mode or boundary class.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

THOROUGH = os.environ.get("TORCHFT_CKPT_TESTS") == "thorough"


def by_default(few: T, *, thorough: T) -> T:
    """Return the first by default, the second in a thorough run."""
    return thorough if THOROUGH else few
