"""Which checkpoint a job goes on from, and reading it: alone, or together with others that start from it at the same time.

Five lines of a caller: for each attempt, make a target of its checkpoint, let the attempt fill what the target wants, and
finish the target. A checkpoint whose manifests are whole may still hold other bytes than were written: then the next attempt
is the checkpoint before it.

Members that start together are led by the first one. It names the checkpoint (`plan`), all read it (`shared_read`), each
reports whether it could, and the first member decides for all: go on from it, or from the one before. So no two of them ever
begin from different checkpoints. A member that cannot know what the others begin from raises:

- The first member fails, or it or the store is gone, before it has decided: `SourceLostError`, for all others. A new start is
  led by another.
- The first member says nothing for four times `patience`: a member reads the newest whole checkpoint by itself, and so does one
  that came too late to be counted in. It goes on when the first member has decided for this very checkpoint, and raises else.
  It never goes back to an older one by itself.
- Another member that is gone, or silent for `patience`, is left out by the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Annotated, Any

import msgspec
from torch.distributed import Store

from torchft_ckpt.checkpointing.durable.cooperative_read.plan import Planner
from torchft_ckpt.checkpointing.durable.cooperative_read.rendezvous import MAX_REASON, KeyValueStore, Rendezvous, told
from torchft_ckpt.checkpointing.durable.cooperative_read.shared_read import SharedRead
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, newest_whole, tell_of
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    SourceLostError,
    SourceRefusedError,
    torn_where_it_raises,
)

logger = logging.getLogger(__name__)
_REPORTS_FACTOR = 2.0
"""So many times as long as for another word a member is waited for that reads, or brings its state to where it is used."""
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """The store at which members meet, and this member's place among them."""

    store: Store
    run: str
    """Names this time that they meet, over all jobs and stores."""
    member: int
    """Its number; 0 leads."""
    num_members: int
    transport: HTTPTransport[Any]
    """Serves what this member read to the others. Its token is what the members prove to each other."""
    has_gathered: bool = False
    """Whether all of them were there a moment ago. Else the first one may be late, and is waited for as long as a decision."""


class _ReadReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a member could read the checkpoint of an attempt."""

    damage: _Reason = ""
    """The bytes that are not as they were written; empty: there are none."""
    has_failed: bool = False
    """It does not start, for a reason that is not the checkpoint's."""


class _Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the first member, for all: without a reason against it they go on from this checkpoint."""

    checkpoint: Annotated[str, msgspec.Meta(max_length=256)] = ""
    damage: _Reason = ""
    """Why they go back to the one before."""
    failure: _Reason = ""
    """Why the first member cannot go on."""
    is_not_found: bool = False
    """It cannot, because there is no checkpoint."""


_decode_report = msgspec.json.Decoder(_ReadReport).decode
_decode_decision = msgspec.json.Decoder(_Decision).decode


class Attempt:
    """One checkpoint that is being read.

    Args:
        reader: of it: for values, what belongs to one rank, and what tensors there are. Parts that only others can read have no
            storage there; `fill` gets them.
        shared: reads it with others; None: it is read alone.
    """

    def __init__(self, reader: CheckpointReader, shared: SharedRead | None = None) -> None:
        self.reader = reader
        self.damage: CheckpointDamagedError | None = None
        self.has_filled = False
        """Whether targets were written to, or may have been."""
        self.shared = shared

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that is read."""
        return self.reader.checkpoint

    def fill(self, wants: Sequence[Want]) -> None:
        """Fill targets, once, with all that is wanted. See `CheckpointReader.read` for what it raises."""
        try:
            (self.reader.read_own if self.shared is None else self.shared.read)(wants)
        except CheckpointError as error:
            self.has_filled = error.state_overwritten
            raise
        except BaseException:
            self.has_filled = True
            raise
        self.has_filled = True


class ColdStart:
    """Finds and reads the newest checkpoint that is whole and undamaged. Used once, on one thread; all members of a place do
    so.

    Args:
        storages: where to look: the storage that all share, this host's own disk, or both.
        step: only of this step.
        place: where the others are; None: this process starts alone.
        patience: how long a member is waited for that says nothing.
        timeout: how long the first member may take to decide while it lives, and fetching from the others.
        stall_timeout: a member is given up when a connection to it gets no byte for so long.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        *,
        step: int | None = None,
        place: MeetingPlace | None = None,
        patience: timedelta = timedelta(seconds=30),
        timeout: timedelta = timedelta(minutes=30),
        stall_timeout: timedelta = timedelta(seconds=15),
    ) -> None:
        self._storages = storages
        self._step = step
        self._timeout_s = timeout.total_seconds()
        self._stall_timeout_s = stall_timeout.total_seconds()
        self._place = place if place is not None and place.num_members > 1 else None
        self._damaged: dict[str, str] = {}
        self._members: tuple[int, ...] = ()
        self._is_counted_in: bool | None = None
        """Whether the first member leads this one; None: it has not been asked."""
        self.has_written = False
        """Whether memory of a target was written to, or may have been."""
        self._num_told = 0
        """So many times this member has told the others about an attempt."""
        self._has_failed = False
        self.bytes_from_storage = self.bytes_from_peers = 0
        if self._place is not None:
            store = KeyValueStore(
                self._place.store, "cold start/", token=self._place.transport.token or "", run=self._place.run
            )
            self._rendezvous = Rendezvous(store, self._place.member, self._place.num_members, patience.total_seconds())
            self._planner = Planner(
                storages,
                self._rendezvous,
                address=self._place.transport.metadata(),
                identity=self._place.transport.identity,
                step=step,
            )

    def attempts(self) -> Iterator[AbstractContextManager[Attempt]]:
        """Yield attempts, until one is what all go on from: the last. The caller reads the checkpoint within each of them.

        Damage that is raised within an attempt ends that attempt alone. Whatever else is raised there passes through.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or no undamaged one.
            StorageError: no storage could be listed.
            CheckpointDamagedError: the others go on from a checkpoint that is damaged for this member.
            SourceLostError, SourceRefusedError: what the others begin from is not known, or is another one than was read here.
            Of all, and of what is raised within an attempt, `state_overwritten` says whether something was written to before.
        """
        try:
            if self._place is not None and self._rendezvous.leads:
                self._rendezvous.start_leading()
            while True:
                with self._torn_if_written():
                    attempt = self._choose()
                yield self._reading(attempt)
                with self._torn_if_written():
                    if self._is_decided_for(attempt):
                        return
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            if self._place is not None:
                self._rendezvous.stop_leading()

    def _torn_if_written(self) -> AbstractContextManager[None]:
        return torn_where_it_raises("reading the newest checkpoint", "checkpoint", lambda: self.has_written)

    @contextmanager
    def _reading(self, attempt: Attempt) -> Iterator[Attempt]:
        with self._torn_if_written():
            try:
                yield attempt
            except CheckpointDamagedError as error:
                attempt.damage = error
                self.has_written = self.has_written or error.state_overwritten
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                if attempt.shared is not None:
                    attempt.shared.leave()
                    self.bytes_from_peers += attempt.shared.bytes_from_peers
                self.has_written = self.has_written or attempt.has_filled
                self.bytes_from_storage += attempt.reader.bytes_read

    @property
    def _is_alone(self) -> bool:
        """Whether this member reads by itself, though others start with it."""
        return self._place is not None and self._is_counted_in is False

    # Which checkpoint

    def _choose(self) -> Attempt:
        try:
            attempt = None if self._place is None else self._choose_together(self._place)
            if attempt is None:
                attempt = Attempt(
                    CheckpointReader(newest_whole(self._storages, step=self._step, exclude=self._damaged.keys()))
                )
        except CheckpointNotFoundError as error:
            if self._is_alone:
                self._compare("", self._learn_decision())
            self._fail(error, is_not_found=True)
            if not self._damaged:
                raise
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._damaged.items())
            raise CheckpointNotFoundError(f"{error}; damaged: {reasons}", error.party) from error
        return attempt

    def _choose_together(self, place: MeetingPlace) -> Attempt | None:
        if self._is_counted_in is None:
            self._is_counted_in = self._planner.meet()
        agreement = self._planner.choose(self._damaged.keys()) if self._is_counted_in else None
        if agreement is None:
            self._is_counted_in = False
            logger.warning(
                "member %d looks for a checkpoint by itself: the first member has not said in time what all of them read",
                place.member,
            )
            return None
        tell_of(agreement.checkpoint)
        reader = CheckpointReader(agreement.checkpoint)
        self._members = agreement.members
        if len(agreement.members) < 2:
            return Attempt(reader)
        shared = SharedRead(
            agreement,
            reader,
            self._rendezvous,
            number=len(self._damaged),
            transport=place.transport,
            timeout_s=self._timeout_s,
            stall_timeout_s=self._stall_timeout_s,
        )
        return Attempt(reader, shared)

    # Whether all have read it

    def _is_decided_for(self, attempt: Attempt) -> bool:
        """Whether all go on from the checkpoint of an attempt; else they go back.

        Raises:
            CheckpointDamagedError: the others go on from what is damaged here.
            SourceLostError, SourceRefusedError: what the others go on from is not known, or is another one.
        """
        name = str(attempt.checkpoint.name)
        own = "" if attempt.damage is None else told(str(attempt.damage)) or "damaged"
        if self._is_alone:
            if attempt.damage is not None:
                raise attempt.damage
            self._compare(name, self._learn_decision())
            return True
        decision = _Decision(name, own) if self._place is None else self._decide(name, own)
        if decision.damage:
            logger.warning("checkpoint %s is skipped: %s", name, decision.damage)
            self._damaged[name] = decision.damage
            return False
        self._compare(name, decision)
        if attempt.damage is not None:
            raise attempt.damage
        return True

    def _decide(self, name: str, own: str) -> _Decision:
        meeting = self._rendezvous
        number = len(self._damaged)
        decision = _Decision(name, self._find_damage(name, own, number)) if meeting.leads else None
        self._num_told = number + 1  # before it is said: nothing that is raised from here on takes it back
        if not meeting.leads:
            meeting.publish(f"report {number}", _ReadReport(own))
        return meeting.agree(f"decision {number}", _decode_decision, decision, patience_s=self._timeout_s)

    def _find_damage(self, name: str, own: str, number: int) -> str:
        """Return the damage that any member reports to the first one; empty: none. A member that reports nothing is left out."""
        if own:
            return own
        meeting = self._rendezvous
        limit_s = _REPORTS_FACTOR * meeting.patience_s
        reports = meeting.collect(f"report {number}", _decode_report, self._members, patience_s=limit_s)
        for member in self._members:
            if member != meeting.member and (member not in reports or reports[member].has_failed):
                logger.warning("member %d does not start from %s with the others", member, name)
        return next((report.damage for report in reports.values() if report.damage), "")

    def _learn_decision(self) -> _Decision:
        """Return what the others go on from, for a member that has read by itself.

        Raises:
            SourceLostError: it is not known.
        """
        is_expected = self._place is None or self._place.has_gathered
        self._planner.learn_start(patience_s=None if is_expected else self._timeout_s)
        for number in count():
            decision = self._rendezvous.agree(f"decision {number}", _decode_decision, patience_s=self._timeout_s)
            if not decision.damage:
                break
        return decision

    def _compare(self, name: str, decision: _Decision) -> None:
        """See that the others go on from what this member has read, empty: nothing.

        Raises:
            SourceLostError, SourceRefusedError: they do not.
        """
        if decision.failure and (name or not decision.is_not_found):
            raise SourceLostError(
                f"the first member, which leads the cold start, failed: {decision.failure}", "member 0"
            )
        if decision.checkpoint != name:
            raise SourceRefusedError(
                f"the others go on from checkpoint {decision.checkpoint or 'none'}, and this member has read {name or 'none'}",
                "members",
            )

    def _fail(self, error: BaseException, *, is_not_found: bool = False) -> None:
        """Tell the others that this member does not start, once; nothing where it starts alone. Raises nothing."""
        if self._place is None or self._is_alone or self._has_failed:
            return
        self._has_failed = True
        try:
            if not self._rendezvous.leads:
                self._rendezvous.publish(f"report {self._num_told}", _ReadReport(has_failed=True))
                return
            reason = told("it found no checkpoint" if is_not_found else f"{type(error).__name__}: {error}")
            decision = _Decision(failure=reason, is_not_found=is_not_found)
            self._rendezvous.publish(f"decision {self._num_told}", decision)
            self._rendezvous.fail(reason)
        except Exception as problem:  # noqa: BLE001 - what is raised is why this member does not start
            logger.warning("the others are not told that this member does not start: %s", problem)
