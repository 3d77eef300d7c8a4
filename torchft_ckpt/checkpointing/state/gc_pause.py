"""Keeps Python's cyclic collector out of bursts that make many small objects, none of them in cycles.

A state of some thousand tensors makes tens of thousands of them within milliseconds. Without this, each burst set off full
collections over everything that torch has imported, and took two to three times as long; the trainer waits for some of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector for the whole process. Where another thread has paused it, that one starts it again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
