"""What a replica group writes down: one JSON object a line, at every inner step and at its end.

`at_s` is CLOCK_MONOTONIC, which all processes of a machine share. Every line is one write to the end of the file: a SIGKILL
tears none, and the next life of the group writes on where the last one ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import msgspec
from demo.lines import LineReader


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An inner step has ended (of plain data-parallel training: a step).

    Attributes:
        took_s: the step, with what the outer loop does in it.
        round: rounds that are committed, after this step.
        num_counted: inner steps of all groups together that went into committed rounds.
        participants: groups that were in the last round; 0 before there was one.
        contributed: whether what was learned in this step may go into a round; not in the first round of a group that comes in.
        loss: of this step's batch, nats a character.
        sent_bytes: by this machine's interface so far.
    """

    at_s: float
    took_s: float
    round: int
    num_counted: int
    participants: int
    contributed: bool
    loss: float
    sent_bytes: int


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The group has ended its training.

    Attributes:
        digest: of everything that all groups have in common.
        held_out_loss: of the global parameters, on text that nobody trained on, nats a character.
    """

    at_s: float
    round: int
    num_counted: int
    digest: str
    held_out_loss: float
    sent_bytes: int


Record: TypeAlias = Step | Finished

BEGIN = "begin"
"""File of the folder `begin_in` that lets the groups begin; the one who made the folder makes it."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class Recorder:
    """Writes a group's records, and which process it is.

    Args:
        path: where to; None: nowhere.
        interface: whose sent bytes count; None: all but loopback.
        begin_in: folder in which groups wait for each other, so that none trains alone while others still start; None: nobody
            waits.
    """

    def __init__(self, path: Path | None, interface: str | None, begin_in: Path | None = None) -> None:
        self._interface = interface
        self._begin_in = begin_in
        self._file = path.open("ab", buffering=0) if path is not None else None
        if path is not None:
            new = path.with_suffix(".pid.new")
            new.write_text(f"{os.getpid()}")
            new.replace(pid_file(path))
        self._last_s = time.monotonic()

    def __enter__(self) -> Recorder:
        if self._begin_in is not None:
            (self._begin_in / f"ready_{os.getpid()}").touch()
            while not (self._begin_in / BEGIN).exists():
                time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def begin(self) -> None:
        """A step begins now."""
        self._last_s = time.monotonic()

    def step(self, *, round: int, num_counted: int, participants: int, loss: float, contributed: bool = True) -> None:
        """The step that began last has ended."""
        now = time.monotonic()
        self._write(
            Step(
                at_s=now,
                took_s=now - self._last_s,
                round=round,
                num_counted=num_counted,
                participants=participants,
                contributed=contributed,
                loss=loss,
                sent_bytes=sent_bytes(self._interface),
            )
        )

    def finish(self, *, round: int, num_counted: int, digest: str, held_out_loss: float) -> None:
        """The training has ended."""
        self._write(
            Finished(
                at_s=time.monotonic(),
                round=round,
                num_counted=num_counted,
                digest=digest,
                held_out_loss=held_out_loss,
                sent_bytes=sent_bytes(self._interface),
            )
        )

    def _write(self, record: Record) -> None:
        if self._file is not None:
            os.write(self._file.fileno(), _encoder.encode(record) + b"\n")


class Reader:
    """Reads a group's records while it writes them; begins with an empty file."""

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        path.write_bytes(b"")
        self._lines = LineReader(path, _decoder.decode)

    def read_on(self) -> list[Record]:
        """Take in what was written since; return it."""
        new = self._lines.read_on()
        self.records += new
        return new


def pid_file(records: Path) -> Path:
    """Return the file with the id of the process that writes these records now."""
    return records.with_suffix(".pid")


def sent_bytes(interface: str | None = None, table: Path = Path("/proc/net/dev")) -> int:
    """Return how many bytes an interface of this network namespace has sent, or all but loopback together.

    0 where the system has no such table.
    """
    if not table.exists():
        return 0
    total = 0
    for line in table.read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() == interface or (interface is None and name.strip() != "lo"):
            total += int(counters.split()[8])
    return total
