"""What a worker tells the supervisor, one JSON object a line, and the one thing that the supervisor tells a worker.

`at_s` is CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


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


class StepEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`optimizer.step()` returned.

    `step` counts committed steps, after this one; `contributed` says whether this group's gradients were in the
    average (they are not while it heals); `started_s` is when the step began.
    """

    at_s: float
    started_s: float
    step: int
    committed: bool
    contributed: bool
    participants: int
    quorum_id: int
    loss: float


class StopAccepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker will end after the step `stop_step`; it had committed `step` when it heard of it."""

    at_s: float
    step: int
    stop_step: int


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker's last event: where it ended, the digest of its whole training state, and what the model writes."""

    at_s: float
    step: int
    digest: str
    sample: str


Event: TypeAlias = Imported | Connected | StateReceived | StepEnded | StopAccepted | Finished


class StopAt(msgspec.Struct, frozen=True, kw_only=True):
    """To a worker: end after committing this step."""

    stop_step: int


_encoder = msgspec.json.Encoder()
_event_decoder = msgspec.json.Decoder(Event)
_command_decoder = msgspec.json.Decoder(StopAt)


def encode_line(message: Event | StopAt) -> bytes:
    """Return the message as one line."""
    return _encoder.encode(message) + b"\n"


def decode_event(line: bytes) -> Event:
    """Read a worker's line; raises `msgspec.DecodeError` for anything else."""
    return _event_decoder.decode(line)


def decode_command(line: bytes) -> StopAt:
    """Read the supervisor's line; raises `msgspec.DecodeError` for anything else."""
    return _command_decoder.decode(line)
