"""The events that go into the lighthouse's state and the instructions that come out of it. Nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torchft_ckpt.core.coordination.messages import FromLighthouse, ToLighthouse


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseSettings:
    """The operator's choices. Durations in seconds."""

    min_replicas: int
    join_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 5.0
    allow_step_loss: bool = False


# ------------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection was opened for a job. `job`: as it was named, None where it was not. For `jobs` alone."""

    connection: str
    job: str | None


@dataclass(frozen=True, slots=True)
class Received:
    """A message came in on a connection."""

    connection: str
    message: ToLighthouse


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """A connection ended, from whichever side."""

    connection: str
    reason: str = "its connection closed"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed `next_deadline`."""


Event: TypeAlias = Received | ConnectionClosed | Tick


# ------------------------------------------------------------------------------------------------------ instructions


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message on the connection; a connection that is gone is not an error."""

    connection: str
    message: FromLighthouse


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection after what was sent on it."""

    connection: str


@dataclass(frozen=True, slots=True)
class Log:
    """Something an operator wants to read."""

    line: str
    is_warning: bool = False


Instruction: TypeAlias = Send | Close | Log
