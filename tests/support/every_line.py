"""Does something at one line of a training step, and then at the next one, until each has had its turn.

The lines are those of this library's step and of torch's optimizers, as the training thread runs them. A signal's handler runs at
one of them.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import torchft_ckpt

_PLACES = tuple(
    str(path)
    for path in (
        Path(torchft_ckpt.__file__).parent / "optimizer.py",
        Path(torchft_ckpt.__file__).parent / "manager",
        Path(torchft_ckpt.__file__).parent / "core",
        Path(torch.optim.__file__).parent,
    )
)


class AtLine:
    """Calls `act` at the n-th line that is run within `watching`, once."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act
        self.where = ""
        """The line at which it was; empty: there were not so many."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count lines."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(_PLACES) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        # At the end of a `with` block its first line comes again, before `__exit__`: no signal's handler runs there.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(
            "with "
        ):
            self._left -= 1
            if self._left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                self._act()
        return self._line
