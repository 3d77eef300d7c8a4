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

import msgspec

from torchft_ckpt import config
from torchft_ckpt.core.training.goodput import BEGAN, ENDED
from torchft_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()


class EventFile:
    """Appends to a file, each line with one write. On one thread at a time. If a line cannot be written it is left out.

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
        self._num_left_out, self._is_torn = 0, False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"TORCHFT_CKPT_EVENTS={place!r} cannot be used: {self.path}: {error.strerror}; give a directory that this process"
                " may write to",
                party=config.EVENTS[0],
            ) from error
        self.write(BEGAN, time.time(), {})

    def write(self, event: str, at: float, fields: Mapping[str, object]) -> None:
        """Write a line of something that happened at a time; what goes wrong is logged, the first time."""
        line = _encoder.encode({"time": round(at, 6), "event": event, **self._said_by, **fields}) + b"\n"
        try:
            written = os.write(self._file.fileno(), b"\n" + line if self._is_torn else line)
            self._is_torn = written < len(line)
        except OSError as error:
            self._num_left_out += 1
            if self._num_left_out == 1:
                logger.warning("events are left out of %s, which cannot be written to: %s", self.path, error.strerror)

    def end(self, how: str, spent: Mapping[str, float]) -> None:
        """Write the last line, once."""
        if not self._file.closed:
            self.write(ENDED, time.time(), {"how": how, "spent": spent})
            self._file.close()
