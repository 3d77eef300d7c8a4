"""What a worker tells the supervisor, one JSON object a line, and the one thing that the supervisor tells the workers.

Each life of a group has a file in one folder. Every line is one write to its end, so that a SIGKILL tears none. `at_s` is
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TypeAlias

import msgspec

from demo.lines import LineReader


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process runs; it has loaded nothing yet."""

    at_s: float
    pid: int


class Imported(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Python and torch are loaded, model and data are there; the next line of the worker is `Manager(...)`."""

    at_s: float


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`Manager(...)` returned."""

    at_s: float


class StateReceived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A state of other groups was received in `took_s` seconds, and loaded; said when the next step begins."""

    at_s: float
    took_s: float


class Computed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The group has computed what it had to of a step, after so many others: these samples. The vote follows."""

    at_s: float
    after: int
    samples: list[int]


class StepEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`optimizer.step()` returned.

    `step` counts committed steps, after this one; `contributed` says whether this group's gradients were in the
    average (they are not while it computes alone); `started_s` is when the step began; `loss` is the mean of the whole step, None
    if it does not count.
    """

    at_s: float
    started_s: float
    step: int
    committed: bool
    contributed: bool
    participants: int
    quorum_id: int
    loss: float | None


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker's last event: where it ended, the digest of its whole training state, of how many samples it was drawn, and what
    the model writes."""

    at_s: float
    step: int
    digest: str
    num_samples: int
    sample: str


Event: TypeAlias = Started | Imported | Connected | StateReceived | Computed | StepEnded | Finished

_STOP = "stop"
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class Recorder:
    """Writes the events of this process's life. One process of a group lives at a time.

    Attributes:
        number: how many lives the group had before.
    """

    def __init__(self, folder: Path, group: int) -> None:
        for self.number in itertools.count():
            try:
                self._file = _path_of(folder, group, self.number).open("xb", buffering=0)
                return
            except FileExistsError:
                continue

    def tell(self, event: Event) -> None:
        """Write one event; any thread may."""
        os.write(self._file.fileno(), _encoder.encode(event) + b"\n")


def read_life(folder: Path, group: int, number: int) -> LineReader[Event] | None:
    """Return a reader of a life's events; None before that life began."""
    path = _path_of(folder, group, number)
    return LineReader(path, _decoder.decode) if path.exists() else None


def order_stop(folder: Path, step: int) -> None:
    """Tell all workers to end after committing a step that none of them has come to."""
    new = folder / f"{_STOP}.new"
    new.write_text(f"{step}")
    new.replace(folder / _STOP)


def stop_step(folder: Path) -> int | None:
    """Return the step after which a worker ends; None: there is no order yet."""
    try:
        return int((folder / _STOP).read_text())
    except FileNotFoundError:
        return None


def _path_of(folder: Path, group: int, number: int) -> Path:
    return folder / f"group_{group}_life_{number}.jsonl"
