"""Restores a rank's state before the first step: its group reads a checkpoint, or receives what another group has read.

All ranks of a group go the same way: what they go by, the lighthouse tells all of them, or all of them have said to each other
(`Ranks`). A checkpoint whose manifests are whole may still hold other bytes than were written: then the group says so, and the
next one to be read is the checkpoint before it, by whoever can read that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.durable.cooperative_read.lookup import Candidates, Found
from torchft_ckpt.checkpointing.durable.cooperative_read.ranks import Ranks
from torchft_ckpt.checkpointing.durable.cooperative_read.shared_read import SharedRead
from torchft_ckpt.checkpointing.durable.names import parse_checkpoint
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, read_checkpoint
from torchft_ckpt.checkpointing.durable.reading.loading import keys_of, load_state
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.coordination.messages import (
    MAX_FAILED,
    Start,
    Starts,
    StartTold,
    StateLocated,
    clip,
)
from torchft_ckpt.core.durable.restore_source import RestoreSource
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, torn_where_it_raises
from torchft_ckpt.manager.saving import check_keys, group_name, load_saved, template_to_load
from torchft_ckpt.manager.step_client import PENDING_LOG_S

if TYPE_CHECKING:
    from torchft_ckpt.manager.manager import Manager

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.1
"""Between two words of a group that waits: the first, half as long again each time until the last."""
_GROUPS_PER_S = 200
"""More do not ask in a second, all together: a question costs the lighthouse 0.7 us for each group that starts."""
_ANSWERS_WITHIN_S = 5.0
_RECEIVES_WITHIN = timedelta(minutes=30)
_MAX_REASON, _MAX_DAMAGED = 600, 64
_MAX_FAILED_BY_ONE = 2
_COMPUTES_S = 0.1
"""A thread that computes for so long has done something. One that waits computes less in the time in which others give it up."""


class _Waited(msgspec.Struct, frozen=True):
    is_over: bool


class _Holds(msgspec.Struct, frozen=True):
    checkpoint: str
    """Empty: it holds none."""


_decode_waited = msgspec.json.Decoder(_Waited).decode
_decode_holds = msgspec.json.Decoder(_Holds).decode


class Restoring:
    """One restore of a rank. `run` once; all ranks of the group do the same.

    Args:
        storages: where to look, the nearest first.
        shared: the one of them that all groups see.
        step: only of this step.
        limit: how long others are waited for that live and have not come yet; None: as long as for a quorum.
    """

    def __init__(
        self,
        manager: Manager,
        storages: Sequence[Storage],
        *,
        shared: Storage,
        step: int | None,
        limit: timedelta | None,
    ) -> None:
        self._manager = manager
        self._start = manager.hooks.starting_rank()
        transport = manager.hooks.transport
        self._ranks = Ranks(
            rank=manager.group_rank,
            num_ranks=manager.group_world_size,
            exchange=self._start.client.exchange,
            say_why_not=self._start.client.say_why_not,
            transport=transport if isinstance(transport, HTTPTransport) else None,
        )
        self._storages = storages
        self._step = step
        self._limit_s = (self._start.limit if limit is None else limit).total_seconds()
        self._candidates = Candidates(storages, self._ranks, step=step, shared=shared)
        self._found: Found | None = None
        self._not_found: CheckpointNotFoundError | None = None
        self._says = Starts()
        self._elsewhere: dict[str, str] = {}
        """Checkpoints that other groups have found damaged in the storage that all see."""
        self._num_failed: Counter[str] = Counter()
        """By group, how often it was to give a state, and has not."""
        self.reader: CheckpointReader | None = None
        """Of the checkpoint whose state this rank has now. Parts that only others can read have no storage there."""
        self.source = RestoreSource.NOTHING
        self.others_hold: int | None = None
        """Others train from this step, or are about to: the first step of this group heals from them."""
        self.named = ""
        """A newer checkpoint than the one whose state this is, which a group has said it can read; empty: none."""
        self.num_groups: int | None = None
        """So many groups start together; None: not known."""
        self.has_read = False
        """This group, and none of the others, has read it."""
        self._has_written = False
        self.bytes_from_storage = self.bytes_from_peers = 0

    def run(self) -> None:
        """Load what there is.

        Raises:
            CheckpointNotFoundError: neither this group nor another one that starts can read a checkpoint.
            StorageError: no storage could be listed, or one failed while it was read.
            StateMismatchError, UnsupportedValueError, StateDictLoadError: the state cannot be loaded here.
            SourceLostError: another rank of this group does not go on.
            Of all, `state_overwritten` says whether something was written to before.
        """
        with torn_where_it_raises("restoring the newest checkpoint", "restore", lambda: self.has_written):
            with self._ranks.all_go_on():
                self._look()
                self._begin()
                if self.others_hold is None:
                    self._settle()
            if self.named <= self._says.holds:
                self.named = ""
            if self.reader is None and self.others_hold is None and self._not_found is not None:
                raise self._not_found

    @property
    def has_written(self) -> bool:
        """Whether memory of a target was written to, or may have been."""
        return self._has_written or self._candidates.has_written

    # ------------------------------------------------------------------------------------------------- with the others

    def _begin(self) -> None:
        """Do what this group is told until it begins."""
        if self._ranks.transport is None:  # another library's cannot serve what is here
            self.others_hold = None if self._step is not None else self._manager.newest_step_of_peers() or None
            return
        until, pause_s = time.monotonic() + self._limit_s, _FIRST_PAUSE_S
        started = time.monotonic()
        say_at = started + PENDING_LOG_S / 5
        while True:
            located = self._start.says(self._says, until + _ANSWERS_WITHIN_S)
            told = None if located is None else located.starts
            if located is None or told is None:
                logger.warning("%s starts with nobody: the lighthouse does not answer", self._manager.replica_id())
                return
            self.num_groups, self.named = told.num_groups or None, told.named
            self._says = msgspec.structs.replace(self._says, named=max(self._says.named, told.named))
            if told.does in (Start.BEGINS, Start.HEALS):
                if told.does is Start.HEALS and self._step is None:
                    self.others_hold = located.version.step
                return
            if told.damaged:
                self._elsewhere.update(told.damaged)
                self._look()
            elif told.does is Start.READS:
                self._try_to_read(is_alone=False)
            elif told.does is Start.RECEIVES:
                if self._step not in (None, located.version.step):
                    return
                self._receive(located, told)
            elif told.does is Start.MEETS and self._has_waited(until):
                logger.warning("%s starts with nobody: %s", self._manager.replica_id(), told.reason)
                return
            else:
                if (now := time.monotonic()) >= say_at:
                    waited = now - started
                    logger.warning("%s has waited %.1f s to start: %s", self._manager.replica_id(), waited, told.reason)
                    say_at = now + PENDING_LOG_S
                self._start.client.pause(pause_s)
                pause_s = min(1.5 * pause_s, max(_LAST_PAUSE_S, told.num_groups / _GROUPS_PER_S))
                if told.does is Start.WAITS:
                    until = time.monotonic() + self._limit_s
                continue
            until, pause_s = time.monotonic() + self._limit_s, _FIRST_PAUSE_S

    def _has_waited(self, until: float) -> bool:
        """Whether the first rank has waited for others for as long as it is to: it decides for all."""
        return self._ranks.say("whether it waits", _Waited(time.monotonic() >= until), _decode_waited)[0].is_over

    def _settle(self) -> None:
        """Have all ranks of this group one checkpoint's state: that which all of them hold, or one that they read alone."""
        holds = self._ranks.say("what it holds", _Holds(self._says.holds), _decode_holds)
        if len({one.checkpoint for one in holds}) > 1:
            self._holds_nothing()
        while self.reader is None and self._found is not None:
            self._try_to_read(is_alone=True)

    def _receive(self, located: StateLocated, told: StartTold) -> None:
        """Receive the state of a checkpoint from others. Those who fail twice are asked for none any more."""
        name, step = parse_checkpoint(told.checkpoint), located.version.step
        failure: Exception | None = None
        if name is None or name.step != step:
            failure = CheckpointError(f"{told.checkpoint[:80]!r} is no checkpoint of step {step}", told.reason)
        else:
            with self._at_work(lambda: self._start.received_bytes):
                failure = self._start.receive(located, _RECEIVES_WITHIN)
        if name is None or failure is not None:
            logger.warning("step %d was not received: %s", step, failure)
            if self._manager.view().torn:
                self._has_written = True
                self._holds_nothing()
            elif self.reader is not None:
                self._start.serve(self.reader.checkpoint.name.step)
            self._num_failed.update(source.replica_id for source in located.sources)
            failed = sorted(m for m, number in self._num_failed.items() if number >= _MAX_FAILED_BY_ONE)
            self._says = msgspec.structs.replace(self._says, failed=failed[:MAX_FAILED])
            self._start.client.pause(_FIRST_PAUSE_S)
            return
        self._manager.hooks.restored(step)
        self.bytes_from_peers += self._start.received_bytes
        is_found = self._found is not None and self._found.checkpoint.name == name
        checkpoint = self._found.checkpoint if self._found and is_found else read_checkpoint(self._storages, name)
        is_local = told.place == RestoreSource.LOCAL_DISK.value
        self._has(checkpoint, RestoreSource.LOCAL_DISK if is_local else RestoreSource.STORAGE)

    def _has(self, checkpoint: Checkpoint, source: RestoreSource) -> None:
        """This rank has the state of a checkpoint: it serves that, and says so."""
        self.reader, self.source = CheckpointReader(checkpoint), source
        self.reader.read_as(self._manager.group_rank, self._manager.group_world_size)
        self._start.serve(checkpoint.name.step)
        self._says = msgspec.structs.replace(self._says, holds=str(checkpoint.name), place=source.value)

    def _holds_nothing(self) -> None:
        self.reader, self._says = None, msgspec.structs.replace(self._says, holds="")

    def _at_work(self, done_bytes: Callable[[], int]) -> AbstractContextManager[None]:
        """Say how far this rank is: by bytes, and by what its thread computes, as a state function does that loads them."""
        clock, begin = time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()

        def done() -> int:
            computes_s = min(time.clock_gettime(clock) - begin, _RECEIVES_WITHIN.total_seconds())
            return done_bytes() + int(computes_s / _COMPUTES_S)

        return self._start.at_work(self._says, done)

    # ------------------------------------------------------------------------------------------------- from a storage

    def _look(self) -> None:
        """Find the newest checkpoint that this group can read whole."""
        while True:
            try:
                self._found = found = self._candidates.newest()
            except CheckpointNotFoundError as error:
                self._found, self._not_found, name, source = None, error, "", RestoreSource.NOTHING
                break
            name, source = str(found.checkpoint.name), _source_of(found)
            if name not in self._elsewhere or not found.is_shared:
                break
            why = f"as other groups have found: {self._elsewhere[name]}"
            self._candidates.leave_out(found.checkpoint, CheckpointDamagedError(why, name))
        damaged = dict(sorted({**self._says.damaged, **self._elsewhere}.items())[-_MAX_DAMAGED:])
        self._says = msgspec.structs.replace(self._says, readable=name, place=source.value, damaged=damaged)

    def _try_to_read(self, *, is_alone: bool) -> None:
        """Read what was found last; if that is damaged, find the one before it."""
        found = self._found
        if found is None:
            return
        try:
            self._read(found, is_alone=is_alone)
        except CheckpointDamagedError as error:
            self._candidates.leave_out(found.checkpoint, error)
            if found.is_shared:
                told = {**self._says.damaged, str(found.checkpoint.name): clip(str(error), _MAX_REASON)}
                self._says = msgspec.structs.replace(self._says, damaged=told)
            self._look()
            return
        self.has_read = True
        self._has(found.checkpoint, _source_of(found))

    def _read(self, found: Found, *, is_alone: bool) -> None:
        manager, checkpoint = self._manager, found.checkpoint
        rank, name = manager.group_rank, group_name(manager)
        reader = CheckpointReader(checkpoint)
        reader.read_as(rank, manager.group_world_size)
        shared = SharedRead(found, reader, self._ranks, timeout=_RECEIVES_WITHIN)

        def fill(wants: Sequence[Want]) -> None:
            try:
                shared.read(wants)
            except CheckpointError as error:
                self._has_written = self._has_written or error.state_overwritten
                raise
            except BaseException:
                self._has_written = True
                raise
            self._has_written = True

        self._holds_nothing()
        saying = contextlib.nullcontext() if is_alone else self._at_work(lambda: reader.bytes_read + shared.done_bytes)
        with self._ranks.all_go_on(), saying:
            check_keys(manager, keys_of(checkpoint, replica_id=name, rank=rank), checkpoint.name)
            local = LocalState(template_to_load(manager))
            state = load_state(checkpoint, fill, local, replica_id=name, rank=rank, in_place=True)
            self.bytes_from_storage += reader.bytes_read
            self.bytes_from_peers += shared.bytes_from_peers
            self._ranks.say_done("that it can be loaded")

            def read_again() -> dict[str, Any]:  # alone: the others' shares may be gone
                return load_state(checkpoint, reader.read_own, local, replica_id=name, rank=rank, in_place=False)

            load_saved(manager, state, read_again)


def _source_of(found: Found) -> RestoreSource:
    return RestoreSource.STORAGE if found.is_shared else RestoreSource.LOCAL_DISK
