"""A rank's events as lines of JSON, for who reads them later: `python -m torchft_ckpt goodput`.

The first line of a life is `Began`, the last one `Ended` (how: finished, left, shut down), and between them are the events of
`torchft_ckpt.events`. Each has the `time` in seconds since 1970, `event`, `job`, `replica_id`, `rank`, and the event's fields.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from torchft_ckpt import config
from torchft_ckpt.core.training.goodput import BEGAN, ENDED
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.threads import Thread, end_at_exit

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_MOST_WAITING = 10_000
"""Lines that a disk which hangs has not taken; later ones are left out."""
_END_S = 5.0
"""So long the end of a life waits for its last lines to be written."""


class EventFile:
    """Appends to a file, each line with one write, on a thread of its own: a disk that hangs holds up no step.

    A line that cannot be written is left out.

    Args:
        place: a directory; or a path, if `{replica_id}` or `{rank}` is in it.
        replica_id, rank, job: who writes.

    Raises:
        ConfigError: no file can be opened there.
    """

    def __init__(self, place: str, *, replica_id: str, rank: int, job: str) -> None:
        self._said_by: dict[str, object] = {"job": job, "replica_id": replica_id, "rank": rank}
        path = place if "{" in place else os.path.join(place, "{replica_id}-{rank}.jsonl")
        name = replica_id.replace(os.sep, "_")
        self.path = Path(path.replace("{replica_id}", name).replace("{rank}", str(rank)))
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        """None: it was the last one."""
        self._has_ended = self._has_warned = self._is_torn = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"TORCHFT_CKPT_EVENTS={place!r} cannot be used: {self.path}: {error.strerror}; give a directory that this process"
                " may write to",
                party=config.EVENTS[0],
            ) from error
        self._writer = Thread(self._write, "torchft_ckpt-events")
        self._writer.start()
        end_at_exit(self._stop)
        self.add(BEGAN, {})

    def add(self, event: str, fields: Mapping[str, object]) -> None:
        """Have a line written of what happens now. Any thread; waits for nothing. After `end` it does nothing."""
        if self._has_ended:
            return
        if self._lines.qsize() >= _MOST_WAITING:
            self._leave_out(f"{_MOST_WAITING} lines wait for it")
        else:
            self._lines.put({"time": round(time.time(), 6), "event": event, **self._said_by, **fields})

    def end(self, how: str, spent: Mapping[str, float]) -> None:
        """Add the last line, once, and wait until it is written, or a while."""
        if not self._has_ended:
            self.add(ENDED, {"how": how, "spent": spent})
            self._stop()
            self._writer.join(_END_S)
            self._writer.let_go()

    def _stop(self) -> None:
        self._has_ended = True
        self._lines.put(None)

    def _write(self) -> None:
        with self._file:
            while (line := self._lines.get()) is not None:
                try:
                    text = b"\n" * self._is_torn + _encoder.encode(line) + b"\n"
                    self._is_torn = os.write(self._file.fileno(), text) < len(text)
                except Exception as error:  # noqa: BLE001 - it cannot be written, or has no place in JSON
                    self._leave_out(error)

    def _leave_out(self, why: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("events are left out of %s, which cannot be written to: %s", self.path, why)
