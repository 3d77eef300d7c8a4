"""Reads the newest checkpoint that can be read, alone or together with others, going back to older ones where one is damaged.

A checkpoint whose manifests are whole may still hold other bytes than were written. Who notices that says so to all, and all
go on with the next older one, so that no two ranks hold states of different steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
from torch.distributed import PrefixStore, Store

from torchft_ckpt.checkpointing.durable.names import parse_checkpoint
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    newest_whole,
    read_checkpoint,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.reading.loading import ReadWants
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.together.exchange import Meeting, StoreExchange
from torchft_ckpt.checkpointing.durable.together.shared_read import SharedRead
from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    SourceLostError,
    SourceRefusedError,
    torn_where_it_raises,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
_VERDICT_PATIENCE_S = 60.0
_MAX_REASON = 2000
_FINE, _DAMAGED = "fine", "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """Where members meet, and this one's place among them."""

    store: Store
    run: str
    """Names this time that they meet, over all jobs and stores."""
    member: int
    num_members: int
    transport: HTTPTransport[Any]
    """Serves what this member read to the others. Its token is what the members prove to each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTogether(Generic[T]):
    """What was made of a checkpoint."""

    made: T
    checkpoint_reader: CheckpointReader
    bytes_from_storage: int
    bytes_from_peers: int

    @property
    def checkpoint(self) -> Checkpoint:
        """The one that was read."""
        return self.checkpoint_reader.checkpoint

    @property
    def step(self) -> int:
        """Its step."""
        return self.checkpoint.name.step


class _Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member found; empty: all was as it was written."""

    damage: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)]


_decode_verdict = msgspec.json.Decoder(_Verdict).decode


def read_newest(
    storages: Sequence[Storage],
    make: Callable[[CheckpointReader, ReadWants], T],
    *,
    step: int | None,
    place: MeetingPlace | None,
) -> ReadTogether[T]:
    """Read the newest checkpoint that is whole and undamaged; all members of a place call it.

    Args:
        storages: where to look.
        make: makes something of it, by reading what it wants once.
        step: only of this step.
        place: where the others are; None: this process reads alone.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError, and what `make` raises. Of all, `state_overwritten` says whether something was written to before.
    """
    damaged: dict[str, str] = {}
    bytes_from_storage = bytes_from_peers = 0
    settled: str | None = None
    has_written = False
    with torn_where_it_raises("reading the newest checkpoint", "checkpoint", lambda: has_written):
        while True:
            shared, meeting = _meet(storages, None if settled else place, len(damaged))
            reader = _find(storages, shared, step=step, damaged=damaged, settled=settled)
            reading = _Reading(reader, shared)
            damage: CheckpointDamagedError | None = None
            made: T | None = None
            try:
                made = make(reader, reading.read)
            except CheckpointDamagedError as error:
                if settled:
                    raise  # the others go on with it
                damage = error
            finally:
                if shared is not None:
                    shared.leave()
            has_written = has_written or damage is None or damage.state_overwritten
            bytes_from_storage += reader.bytes_read
            bytes_from_peers += reading.bytes_from_peers
            outcome = _settle(meeting, shared, str(reader.checkpoint.name), damage)
            if outcome.name == str(reader.checkpoint.name) and not outcome.damage:
                return ReadTogether(
                    made=made,  # type: ignore[arg-type]
                    checkpoint_reader=reader,
                    bytes_from_storage=bytes_from_storage,
                    bytes_from_peers=bytes_from_peers,
                )
            if not outcome.damage:
                logger.warning(
                    "the others took %s, while %s was read here: it is read again", outcome.name, reader.location
                )
                settled = outcome.name
            else:
                logger.warning("checkpoint %s is skipped: %s", outcome.name, outcome.damage)
                damaged[outcome.name] = outcome.damage


def _find(
    storages: Sequence[Storage],
    shared: SharedRead | None,
    *,
    step: int | None,
    damaged: Mapping[str, str],
    settled: str | None,
) -> CheckpointReader:
    """Return a reader of the newest one, or of the one that the others have settled on.

    Raises:
        CheckpointNotFoundError: see `read_newest`.
    """
    try:
        if settled is not None:
            name = parse_checkpoint(settled)
            checkpoint = None if name is None else read_checkpoint(storages, name)
            if checkpoint is None or (why_not := why_not_whole(checkpoint)) is not None:
                raise CheckpointNotFoundError(
                    f"the others read {settled[:200]}, which is not whole here: {why_not}", settled
                )
            return CheckpointReader(checkpoint)
        if shared is None:
            return CheckpointReader(newest_whole(storages, step=step, but=damaged.keys()))
        return shared.agree(step, but=damaged.keys())
    except CheckpointNotFoundError as error:
        if not damaged and settled is None:
            raise
        reasons = "; ".join(f"{name}: {reason}" for name, reason in damaged.items())
        raise CheckpointNotFoundError(f"{error}; damaged: {reasons or 'none'}", error.party) from error


class _Reading:
    """One attempt's way to the bytes."""

    def __init__(self, reader: CheckpointReader, shared: SharedRead | None) -> None:
        self._reader = reader
        self._shared = shared
        self.bytes_from_peers = 0

    def read(self, wants: Sequence[Want]) -> None:
        if self._shared is None:
            self._reader.read(wants)
        else:
            self._shared.read(wants)
            self.bytes_from_peers = self._shared.statistics().bytes_from_peers


def _meet(
    storages: Sequence[Storage], place: MeetingPlace | None, attempt: int
) -> tuple[SharedRead | None, tuple[StoreExchange, Meeting] | None]:
    if place is None or place.num_members < 2:
        return None, None

    def exchange_of(what: str) -> StoreExchange:
        name = f"{what}/{attempt}"
        token = place.transport.token or ""
        return StoreExchange(PrefixStore(name, place.store), token=token, run=f"{place.run}/{name}")

    shared = SharedRead(
        storages,
        exchange=exchange_of("read"),
        member=place.member,
        num_members=place.num_members,
        transport=place.transport,
    )
    exchange = exchange_of("verdict")
    return shared, (exchange, Meeting(exchange, place.member, place.num_members, _VERDICT_PATIENCE_S))


class _Outcome(NamedTuple):
    """What all members go on with; or what they skip, and why."""

    name: str
    damage: str = ""


def _settle(
    place: tuple[StoreExchange, Meeting] | None,
    shared: SharedRead | None,
    name: str,
    damage: CheckpointDamagedError | None,
) -> _Outcome:
    """Return what the first who had heard all says for all: this checkpoint is fine, or damaged for somebody.

    Raises:
        CheckpointDamagedError: the others did not wait for this member, and go on with what is damaged for it.
    """
    own = "" if damage is None else str(damage)[:_MAX_REASON] or "damaged"
    if place is None or shared is None:
        return _Outcome(name, own)
    exchange, meeting = place
    meeting.addresses.update(shared.addresses)
    try:
        meeting.say("found", _Verdict(damage=own))
        others = meeting.hear("found", _decode_verdict, shared.members) if not own else {}
        reason = own or next((one.damage for one in others.values() if one.damage), "")
        told = exchange.settle("outcome", f"{_DAMAGED if reason else _FINE} {name}".encode()).decode(errors="replace")
    except (SourceLostError, SourceRefusedError) as error:
        logger.warning("whether the others could read it as well is not known: %s", error)
        if damage is not None:
            raise damage from error
        return _Outcome(name)
    verdict, _, settled = told.partition(" ")
    if verdict == _DAMAGED:
        return _Outcome(settled, reason or "another member could not read it")
    if damage is not None and settled == name:
        raise damage
    return _Outcome(settled)
