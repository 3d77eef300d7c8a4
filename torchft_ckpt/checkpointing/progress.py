"""The progress of a transfer, as a fetch or a save tells it, and a bar for people who watch.

It counts and shows. It does not know blocks, sources or sockets, and it decides nothing.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

logger = logging.getLogger(__name__)
_TERMINAL_INTERVAL_S = 0.1
_FILE_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProgress:
    """The progress of one transfer. A byte counts once it has been verified.

    Args:
        step: the step whose state is fetched.
        total_bytes: length of the state.
        received_bytes: came from a source and will not be asked for again.
        skipped_bytes: were here already, equal, and are not fetched.
        resent_bytes: came more than once, because a source was dropped or a block did not verify; in no other count.
        num_sources: how many sources are being fetched from now.
        elapsed_s: since the transfer began.
        brought_bytes: came from sources, verified or not: of a slow transfer it says soonest how fast it is.
        is_equal: the digests of all tensors were found to be those of the local state.
    """

    step: int
    total_bytes: int
    received_bytes: int
    skipped_bytes: int
    resent_bytes: int
    num_sources: int
    elapsed_s: float
    brought_bytes: int = 0
    is_equal: bool = False

    @property
    def bytes_per_s(self) -> float:
        """Mean rate of what was received, since the beginning; 0.0 if no time has passed."""
        return self.received_bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def fraction(self) -> float:
        """The share of the state that is here, 0.0 to 1.0. An empty state is all here."""
        return (self.received_bytes + self.skipped_bytes) / self.total_bytes if self.total_bytes else 1.0


ProgressCallback = Callable[[TransferProgress], None]
"""Told of the progress of a transfer, on one of the transfer's threads: it should return at once and not raise (see `tell`)."""


def tell(callback: ProgressCallback | None, progress: TransferProgress) -> ProgressCallback | None:
    """Tell a callback how far it is, and return the one to tell next time.

    Whatever it raises is logged and goes no further: the transfer goes on, and the callback is called no more (None).
    """
    if callback is None:
        return None
    try:
        callback(progress)
    except Exception:
        logger.exception("on_progress raised at step %d; it is not called again", progress.step)
        return None
    return callback


def together(*callbacks: ProgressCallback | None) -> ProgressCallback | None:
    """Return one callback that tells several; None for none. One that raises is told no more, the others are."""
    told = [callback for callback in callbacks if callback is not None]

    def tell_all(progress: TransferProgress) -> None:
        told[:] = [callback for callback in told if tell(callback, progress) is not None]

    return tell_all if len(told) > 1 else next(iter(told), None)


class ProgressBar:
    """A `tqdm` bar that is a `ProgressCallback`: bytes, rate, time left, number of sources.

    It appears with the first call and closes itself with the last one; another transfer gets another bar. A transfer that
    fails leaves its bar open: `close` it, or use the object as a context manager. From any thread.

    Args:
        file: where to draw; default: standard error. If that is no terminal, a line is drawn every few seconds at most.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._bar: Any = None
        self._step: int | None = None
        self._ended_step: int | None = None

    def __call__(self, progress: TransferProgress) -> None:
        with self._lock:
            done_bytes = progress.received_bytes + progress.skipped_bytes
            is_whole = done_bytes >= progress.total_bytes
            if self._bar is None and is_whole and progress.step == self._ended_step:
                return  # the end, told twice
            if self._bar is not None and (progress.step != self._step or done_bytes < self._bar.n):
                self._close()  # another transfer, or the same from the beginning
            if self._bar is None:
                title, out = f"step {progress.step}", self._file or sys.stderr
                self._bar = make_bar(title, progress.total_bytes, out, done_bytes=progress.skipped_bytes)
                self._bar.start_t -= progress.elapsed_s  # the transfer began before its bar
                self._step = progress.step
            self._bar.total = progress.total_bytes
            self._bar.set_postfix_str(_describe(progress), refresh=False)
            self._bar.update(done_bytes - self._bar.n)
            if is_whole:
                self._ended_step = progress.step
                self._close()

    def close(self) -> None:
        """Leave the bar as it is and draw no more of this transfer. May be called again."""
        with self._lock:
            self._close()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _describe(progress: TransferProgress) -> str:
    what = "1 source" if progress.num_sources == 1 else f"{progress.num_sources} sources"
    if progress.resent_bytes:
        what += f", {progress.resent_bytes / 2**20:.0f}M resent"
    return what


def make_bar(title: str, total_bytes: int, file: TextIO, *, done_bytes: int = 0, stays: bool = True) -> Any:
    """Return a `tqdm` bar of bytes.

    Args:
        file: where it is drawn. If that is no terminal, a line is drawn every few seconds at most.
        done_bytes: what is done already, which says nothing about the rate.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):
        monitor_interval = 0  # else tqdm starts a thread that outlives the bar

    size = shutil.get_terminal_size() if file.isatty() else None
    return Bar(
        desc=title,
        total=total_bytes,
        initial=done_bytes,
        unit="iB",
        unit_scale=True,
        unit_divisor=1024,
        miniters=1,
        mininterval=_TERMINAL_INTERVAL_S if size else _FILE_INTERVAL_S,
        ncols=size.columns if size else None,  # told, because tqdm draws nothing if a terminal says 0
        nrows=size.lines if size else None,
        leave=stays,
        file=file,
    )
