"""Interrupts at every point of a piece of code in turn, as Ctrl-C brings them at some."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

_ENDS = ("CALL", "RESUME", "JUMP_BACKWARD")
"""In these CPython looks whether a signal handler is to run, at their end."""


class Interrupted(BaseException):
    """As a signal handler of a script may raise."""


def _is_taken(code: CodeType, before: int, here: int) -> bool:
    """Whether CPython may raise in the opcode before this one, and it is as if it was raised in this one."""

    def handler(at: int) -> int | None:
        return next((entry.target for entry in entries if entry.start <= at < entry.end), None)

    if not dis.opname[code.co_code[before]].startswith(_ENDS):
        return False
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return handler(before) == handler(here)


def interrupted_at(
    point: int, work: Callable[[], object], *, files: Collection[str | None], only_taken: bool = False
) -> bool:
    """Do something, and raise before the opcode of this number; return whether it has as many.

    Args:
        point: counted in the functions of these files alone.
        files: as code objects name them.
        only_taken: count those points alone at which CPython takes an interrupt; from Python 3.11 on.
    """
    left = point
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            before, last[frame] = last.get(frame), frame.f_lasti
            left -= not only_taken or (before is not None and _is_taken(frame.f_code, before, frame.f_lasti))
            if left < 0:
                sys.settrace(None)
                last.clear()
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
        last.clear()
    return left < 0
