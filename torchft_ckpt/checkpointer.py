"""Durable checkpoints for a training loop: save without stopping it, restore from whatever holds the newest state.

It puts the parts together: what a Manager says of itself, the save's worker, the restore, the readers. Rules are elsewhere:
who writes what in `core/durable/assignment.py`, what to wait for in `core/durable/saving.py`, what to remove in
`core/durable/retention.py`, where to take a state from in `core/durable/restore_source.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from torchft_ckpt.checkpointing import HTTPTransport, StateDictLock
from torchft_ckpt.checkpointing.durable.cooperative_read.lookup import Candidates
from torchft_ckpt.checkpointing.durable.cooperative_read.ranks import Ranks, name_of_run
from torchft_ckpt.checkpointing.durable.cooperative_read.shared_read import SharedRead
from torchft_ckpt.checkpointing.durable.names import CheckpointName, checkpoint_name, plain_step
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    beside_whole_ones,
    is_closed,
    list_checkpoints,
    newest_step,
)
from torchft_ckpt.checkpointing.durable.reading.fresh_optimizers import (
    Template,
    owned_by_objects,
    state_of_value,
    template_of,
)
from torchft_ckpt.checkpointing.durable.reading.loading import give_back, load_into
from torchft_ckpt.checkpointing.durable.reading.reader import OWNERS_KEY, CheckpointReader, has_own
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState, get_random_state, set_random_state
from torchft_ckpt.checkpointing.durable.saving.dividing import ShareBook
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex
from torchft_ckpt.checkpointing.durable.saving.leftovers import Leftovers
from torchft_ckpt.checkpointing.durable.saving.saver import (
    Save,
    SavedCheckpoint,
    SaveMode,
    SaveOnlooker,
    SaveTask,
    SaveWorker,
    close_if_open,
)
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.progress import ProgressCallback
from torchft_ckpt.checkpointing.serving.buffers import HUGE_PAGE_BYTES, BufferPool
from torchft_ckpt.checkpointing.state.parameters import names_of, note_returned
from torchft_ckpt.checkpointing.state.tree import largest_value
from torchft_ckpt.config import not_negative, replay
from torchft_ckpt.core.durable.restore_source import RestoreSource, choose_restore_source
from torchft_ckpt.core.durable.retention import plan_removals
from torchft_ckpt.core.durable.saving import SavingRank, Writers
from torchft_ckpt.core.training.ledger import Waits
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    SaveInFlightError,
    StateChangedError,
    StorageError,
    torn_where_it_raises,
)
from torchft_ckpt.events import CheckpointSaved
from torchft_ckpt.manager.optimizer_settings import guard_steps
from torchft_ckpt.manager.restoring import Restoring
from torchft_ckpt.manager.saving import (
    LaterSave,
    NotSaving,
    Onlooking,
    SaveIdentity,
    check_optimizers_known,
    check_state,
    end_restore,
    group_name,
    save_identity,
    state_to_save,
)
from torchft_ckpt.manager.volatile import StateToSave, capture_for_save
from torchft_ckpt.memory import memory_bytes
from torchft_ckpt.threads import Thread

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)
_STAGING_SHARE = 2
_BLOCK_BYTES = HUGE_PAGE_BYTES
"""Memory is copied aside in blocks of this size. Smaller ones copy less beside the shares; below a huge page they are slow."""
_MANY_VALUES = 10_000
_NEVER_A_PLACE = (errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
_TO_SAY = timedelta(seconds=3)
_TO_CLOSE = timedelta(seconds=10)
_TO_GIVE_UP = timedelta(seconds=30)
_TO_FETCH = timedelta(minutes=30)


class Tier(Enum):
    """The storage that a save goes to."""

    STORAGE = "storage"
    """A storage that all ranks can read."""
    LOCAL = "local"
    """The disk of this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The place that a state came from, or is to come from."""

    source: RestoreSource
    step: int | None
    """None where there is no state yet."""
    reason: str
    rank_state: object = None
    """The `rank_state` that this rank gave to `save`; None where another rank saved it."""
    bytes_from_storage: int = 0
    bytes_from_peers: int = 0


def _is_answered_by(last: Save, identity: SaveIdentity | Onlooking) -> bool:
    """Whether what becomes of that save of the same state is what becomes of this one."""
    if isinstance(last, SaveOnlooker) and isinstance(identity, SaveIdentity):
        return last.saved is not None and last.saved.is_closed  # the others are gone since
    return not last.future.done() or last.saved is not None


class Checkpointer:
    """Saves and restores the state of one rank's job. Methods belong to the training thread, unless they say otherwise.

    With a Manager it saves what replicas heal from, and who saves is who committed the last step. Without one, every rank of
    torch.distributed's default group saves the state dict that it is given; the optimizers that change it are named by
    `guard_optimizer`, else each save copies the state at once.

    Args:
        location: a directory, or a URL of fsspec; all ranks see the same.
        manager: of this rank.
        local_location: a directory on this host's own disk, for saves of `Tier.LOCAL`.
        redundancy: how many replica groups hold each rank's share until it is written, so that the checkpoint survives the
            death of any `redundancy - 1` of them in the save. Each rank copies its own share aside and `redundancy - 1`
            others'. Of no effect with one group, without a Manager, and where each group writes all.
        mode: who writes what in `location`. On local disks each group writes a whole copy, so that the loss of one costs none.
        keep_last: how many whole checkpoints stay; None: all.
        keep_every: checkpoints of a multiple of this step stay for ever.
        fill_after: how long nothing may grow of what a writer writes until its backup writes its share. Too short costs bytes
            that are written twice, nothing else. Where a save finds no room, the next one after so long removes what dead
            writers left.
        timeout: of a save, in the background.
        staging_budget_bytes: at most so much is copied aside for a save; beyond it the save fails, training goes on. Default:
            half of the memory, this machine's or the container's.
        storage_options: for fsspec (credentials, endpoint).
        save_random_state: save and restore this rank's random number generators.
        is_replicated: whether plain values, and tensors that are not sharded, are the same on all ranks of a group. False: each
            rank writes its own, and gets it back on as many ranks; for the stages of a pipeline, and experts by local number.
        reuse_buffers: keep the copies' memory for the next save; False frees it after each.
        on_progress: told how far this rank's share of a save is, on the save's thread. If it raises, that is logged, the save
            goes on, and it is told nothing more of this save.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        manager: Manager | None = None,
        local_location: str | os.PathLike[str] | None = None,
        redundancy: int = 2,
        mode: SaveMode = SaveMode.SHARED,
        keep_last: int | None = None,
        keep_every: int | None = None,
        fill_after: timedelta = timedelta(seconds=30),
        timeout: timedelta = timedelta(minutes=30),
        staging_budget_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
        save_random_state: bool = True,
        is_replicated: bool = True,
        reuse_buffers: bool = True,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        for name, limit in (("fill_after", fill_after), ("timeout", timeout)):
            if limit <= timedelta(0):
                raise ConfigError(f"{name}={limit}: a positive duration was expected", name)
        if redundancy < 1:
            raise ConfigError(
                f"redundancy={redundancy}: at least 1, the group that writes a share, was expected", "redundancy"
            )
        plan_removals(list[CheckpointName](), keep_last=keep_last, keep_every=keep_every, whole=[])
        self._replay = replay()
        if self._replay is not None and manager is not None:
            location, local_location = self._replay.location, None
        self._storages = {Tier.STORAGE: open_storage(location, **(storage_options or {}))}
        if local_location is not None:
            self._storages[Tier.LOCAL] = open_storage(local_location)
        self._leftovers = {
            tier: Leftovers(storage, is_shared=tier is Tier.STORAGE, settled_after_s=fill_after.total_seconds())
            for tier, storage in self._storages.items()
        }
        self._manager = manager
        self._mode = mode
        self._redundancy = redundancy
        self._keep = (keep_last, keep_every)
        self._fill_after = fill_after
        self._timeout = timeout
        self._saves_random_state = save_random_state
        self._on_progress = on_progress
        self._alone = alone = _identity_alone() if manager is None else None
        self._place = (0, 1) if alone is None else (alone.rank, alone.num_ranks)
        """This rank's number in its group, and how many there are."""
        if manager is not None:
            self._place = manager.group_rank, manager.group_world_size
        self._index = HoldingsIndex(*self._place, is_replicated=is_replicated)
        self._book = ShareBook()
        self._lock = StateDictLock() if manager is None else manager.state_dict_lock
        budget = staging_budget_bytes
        if budget is None and (memory := memory_bytes()) is not None:
            budget = memory // _STAGING_SHARE
        self._pool = BufferPool(_BLOCK_BYTES, budget)
        if reuse_buffers:
            self._pool.open("checkpointer")
        self._guarded: list[torch.optim.Optimizer] = []
        self._worker: Save | None = None
        """Of the latest save; once that has ended, to detach it does nothing."""
        self._threads: list[Thread] = []
        self._last: dict[Tier, tuple[CheckpointName, Save]] = {}
        self._turns: dict[Tier, tuple[int, int]] = {}
        """The step of which the last save was asked for there, and the number of such steps: the same in all ranks of a group,
        whatever becomes of a save in one of them."""
        self._is_over = False
        self._said: set[str] = set()
        self._owner = os.getpid()
        """The process whose threads save."""
        self._num_saves = 0
        self._later: list[LaterSave] = []
        """Saves that were asked for in the middle of a step."""
        self._is_saving = self._copies_at_once = False
        """The state changes without the lock, as was found: each save copies it when it is called."""
        self._lock.add_before_write(self._detach)
        # Before handlers that were registered earlier, which may remove the directory, say.
        atexit.register(self.shutdown)

    def __repr__(self) -> str:
        what = "saving" if self._is_busy() else "idle"
        return f"Checkpointer({self._storages[Tier.STORAGE].location!r}, {what})"

    @property
    def state_dict_lock(self) -> StateDictLock:
        """The lock under which the state is changed; where there is a Manager, its own. See `Manager.state_dict_lock`."""
        return self._lock

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Say that this optimizer changes the state, where no Manager guards it: its steps wait for the copy of a save.

        State that no optimizer owns (BatchNorm's statistics) is copied at once.
        """
        if self._manager is not None:
            return
        self._guarded.append(optimizer)
        note_returned([optimizer])
        guard_steps(optimizer, self._lock.acquire_write, self._lock.release_write)

    # ---------------------------------------------------------------------------------------------------------- save

    def save(
        self,
        state_dict: dict[str, Any] | None = None,
        *,
        step: SupportsIndex | None = None,
        rank_state: object = None,
        tier: Tier = Tier.STORAGE,
    ) -> Future[SavedCheckpoint]:
        """Save the state of now, in the background. Every rank calls it between the same two steps.

        Within the `save` of `Manager.leave_on` the ranks of the group that leaves call it, and write all of it; where all
        groups leave after that step they share the work.

        A rank calls it as well where its group holds the state, and the others do not count on it in this save: it has just
        received the state, or did not contribute to the last step (a spare). It looks on. It writes nothing, and its `rank_state`
        is not kept. Its future is done when the others' checkpoint is whole. It is done with `is_closed` False when the next save
        begins before, if all who write it are gone, if nobody has written anything of that step for some seconds, and at once
        where each group writes a copy of its own (`Tier.LOCAL`, `SaveMode.EVERY_GROUP`).

        Nothing is copied before the state is about to change: what has not been written by then is copied aside, and the
        trainer waits for that copy alone. Whatever goes wrong with the writing is in the future and the log, not raised.

        Whoever changes weights outside of `optimizer.step`, as an evaluation with averaged weights does, holds
        `state_dict_lock.write()` around each change, or waits for the future first. Where torch's operations change a tensor in
        place without that, before it is written or copied, the save fails with `StateChangedError`, which names it, and later
        saves copy all at once. Changes that torch does not count (through `x.data`, numpy; see `Manager.state_dict_lock`) are
        not seen, and get into the save.

        Args:
            state_dict: nested dicts and lists of tensors and plain values, or objects with `state_dict()`; default: what the
                Manager's registered functions return.
            step: its step, a whole number of any kind (numpy's too); default: the Manager's. Without a Manager it is needed.
            rank_state: plain values that belong to this rank alone, such as its position in the data.
            tier: where to.

        Returns:
            what became of it; of a step that is saved already, what became of that save. With `SaveInFlightError` where this
            rank still writes its share of the save before (one that only waits for others is left to them), with
            `RanksDifferError` if the checkpoint is whole, and ranks of this group differ in what their optimizers own, with
            `CheckpointDamagedError` if it did not become whole within `timeout`, and with `CheckpointError` where nothing here
            can be saved: the state is not one that a quorum has committed, or the group leaves (`leave_on`) before what it has
            received was compared.

        Raises:
            UnsupportedValueError: the state holds something that cannot be carried.
            ConfigError: an argument is missing or cannot be used, or a scheduler has not followed the last step
                (`Manager.scheduler`).
            CheckpointError: `shutdown` was called.
        """
        if self._is_over:
            raise CheckpointError("nothing is saved any more: shutdown was called", "checkpointer")
        if self._manager is not None:
            self._manager.hooks.check_followed("the state is to be saved")
        if self._replay is not None:
            nothing: Future[SavedCheckpoint] = Future()
            at = 0 if self._manager is None else self._manager.current_step()
            nothing.set_result(
                SavedCheckpoint(step=at, name="", written_bytes=0, num_fills=0, is_closed=False, took_s=0.0)
            )
            return nothing
        if tier not in self._storages:
            raise ConfigError(f"tier={tier}: no local_location was given", "tier")
        step = plain_step(step)
        if self._is_in_step():
            return self._save_later(lambda: self.save(state_dict, step=step, rank_state=rank_state, tier=tier))
        self._is_saving = True
        try:
            if self._manager is None:
                return self._save(state_dict, step, rank_state, tier)
            with self._manager.hooks.timekeeper.waiting(Waits.SAVE):
                return self._save(state_dict, step, rank_state, tier)
        finally:
            self._is_saving = False

    def _save(
        self, state_dict: dict[str, Any] | None, step: int | None, rank_state: object, tier: Tier
    ) -> Future[SavedCheckpoint]:
        self._num_saves += 1
        future: Future[SavedCheckpoint] = Future()
        identity = self._identity(step)
        at = self._num_saves if self._manager is None else self._manager.view().held.step
        last_at, turn = self._turns.get(tier, (-1, at if step is None else step))
        turn += at != last_at
        self._turns[tier] = at, turn
        if isinstance(identity, NotSaving):
            logger.info("this rank has no part in a save: %s", identity.reason)
            future.set_exception(CheckpointError(f"this rank has no part in the save: {identity.reason}", "save"))
            return future
        # A name of its own, because it is put together with what is in other places: its parts are others than in storage.
        save_id = identity.save_id if tier is Tier.STORAGE else f"{identity.save_id}-{tier.value}"
        name = checkpoint_name(identity.step, save_id)
        last_name, last = self._last.get(tier, (None, None))
        if isinstance(identity, SaveIdentity) and identity.is_alone and self._worker is not None:
            self._worker.wait_written(
                self._timeout.total_seconds()
            )  # this rank's share in the save before is wanted too
        if self._manager and last and last_name == name and _is_answered_by(last, identity):
            return last.future  # a step that was discarded since has not changed the state
        if self._worker is not None and self._is_busy() and not self._worker.leave():
            logger.warning("step %s is not saved: the save before it has not ended", step if step is not None else "")
            future.set_exception(SaveInFlightError("this rank still writes its share of the save before", "save"))
            return future
        worker: Save
        removes = None
        if isinstance(identity, Onlooking):
            logger.info("checkpoint %s: this rank has no part in it, and looks on", name)
            is_seen = tier is Tier.STORAGE and self._mode is SaveMode.SHARED
            worker = SaveOnlooker(
                name,
                self._storages[tier] if is_seen else None,
                fill_after_s=self._fill_after.total_seconds(),
                timeout_s=self._timeout.total_seconds(),
                who_is_lost=self._who_is_lost(identity),
                group_names=self._group_names(identity),
            )
        else:
            worker, task = self._writer(identity, name, tier, state_dict, rank_state, turn)
            if not identity.is_alone and (not task.is_storage_shared or task.member == SavingRank(0, 0)):
                removes = task
        thread = Thread(self._run, "torchft_ckpt-save", (worker, removes))
        self._worker, self._owner = worker, os.getpid()
        try:
            thread.start()
        except RuntimeError as error:
            self._worker = None
            worker.drop()
            future.set_exception(CheckpointError(f"no thread could be started for the save: {error}", "save"))
        else:
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            self._last[tier] = name, worker
            future = worker.future
        if self._manager is not None:
            self._manager.hooks.timekeeper.saves(future)
        return future

    def _writer(
        self,
        identity: SaveIdentity,
        name: CheckpointName,
        tier: Tier,
        state_dict: dict[str, Any] | None,
        rank_state: object,
        turn: int,
    ) -> tuple[SaveWorker, SaveTask]:
        """Capture the state, for a worker that writes this rank's share."""
        held = self._state_of(state_dict)
        kept = {"user": rank_state, "random": get_random_state() if self._saves_random_state else None}
        kept |= {OWNERS_KEY: dict(held.owners)}
        mode = self._mode if tier is Tier.STORAGE else SaveMode.EVERY_GROUP
        redundancy = 1 if mode is SaveMode.EVERY_GROUP else self._redundancy
        task = SaveTask(
            storage=self._storages[tier],
            name=name,
            member=SavingRank(identity.replica, identity.rank),
            writers=Writers(identity.num_replicas, identity.num_ranks, identity.replica_id, redundancy),
            mode=mode,
            is_storage_shared=tier is Tier.STORAGE,
            fill_after_s=self._fill_after.total_seconds(),
            timeout_s=self._timeout.total_seconds(),
        )
        # Where a step that raised has kept the lock, nobody could read until it is given back.
        is_unannounced = self._lock.held_for_write() or held.unannounced_changes or self._copies_at_once
        with self._lock.read():
            captured = CapturedState(
                held.state,
                step=identity.step,
                own=kept,
                lock=self._lock,
                pool=self._pool,
                index=self._index,
                group_local_ids=held.group_local_ids,
                owned_ids=held.owned_ids,
                turn=turn,
                versions=held.versions,
            )
            self._say_of(captured, identity, task)
            worker = SaveWorker(
                task,
                captured,
                self._book,
                who_is_lost=self._who_is_lost(identity),
                group_names=self._group_names(identity),
                on_progress=self._on_progress,
            )
            if is_unannounced:
                worker.detach()
            elif held.unguarded_addresses and not worker.set_apart(held.unguarded_addresses):
                logger.warning(
                    "what no optimizer owns could not be copied aside (staging_budget_bytes?): if anything writes to it while"
                    " step %d is being saved, the save is not of one moment",
                    identity.step,
                )
        return worker, task

    def _is_in_step(self) -> bool:
        """Whether the state is on its way from one step to the next, or to a save: who does that has called what calls this."""
        if self._is_saving or self._manager is None:
            return self._is_saving or self._lock.held_for_step()
        now = self._manager.view()
        return self._lock.held_for_step() or (now.held != now.version and not now.held.proven)

    def _save_later(self, save: Callable[[], Future[SavedCheckpoint]]) -> Future[SavedCheckpoint]:
        """Save when this step is over and the next one begins, where a Manager knows that."""
        later = LaterSave(self._is_in_step, save)
        if self._manager is None:
            later.begin()
        else:
            logger.info("a save was asked for in the middle of a step: it is made before the next one begins")
            self._later = [*(save for save in self._later if not save.done()), later]
            self._manager.hooks.events.call_later(later.begin)
        return later

    def _run(self, worker: Save, removes: SaveTask | None) -> None:
        """On the save's thread. The next save may begin while old checkpoints are being removed.

        Args:
            worker: does the save.
            removes: the task beside which this rank removes old ones; None: others do.
        """
        if removes is not None:
            leftovers = self._leftovers[Tier.STORAGE if removes.is_storage_shared else Tier.LOCAL]
            with _logged("what is not whole stays for now"):
                leftovers.remove(removes.name)
        worker.run()
        failure = None if worker.saved is not None else worker.future.exception()
        if isinstance(failure, StateChangedError) and not self._copies_at_once:
            self._copies_at_once = True
            logger.warning("each save copies the whole state at once from now on, as it is changed without the lock")
        saved = worker.saved
        if self._manager is not None and saved is not None and (saved.is_closed or isinstance(worker, SaveWorker)):
            self._note_saved(self._manager, saved)
        if removes is not None:
            with _logged("old checkpoints stay for now"):
                if failure is None:
                    self._remove_old(removes)
                else:
                    leftovers.note_failure(failure)

    def _note_saved(self, manager: Manager, saved: SavedCheckpoint) -> None:
        formed = manager.view().quorum
        manager.hooks.events.add(
            CheckpointSaved(
                step=saved.step,
                quorum_id=formed.quorum_id if formed is not None else 0,
                replica_id=manager.replica_id(),
                name=saved.name,
                is_closed=saved.is_closed,
            )
        )

    def _remove_old(self, task: SaveTask) -> None:
        keep_last, keep_every = self._keep
        if keep_last is None:
            return
        storage = task.storage
        # Of later steps are those that a job left behind which went back on purpose: they count for nothing here.
        names = [name for name in list_checkpoints(storage) if name.step <= task.name.step]
        whole = [name for name in names if not task.is_storage_shared or is_closed(storage, name)]
        removals = plan_removals(names, keep_last=keep_last, keep_every=keep_every, whole=whole, in_flight=[task.name])
        if not task.is_storage_shared:
            # Whether others have their parts of these is not to be seen from here. So nothing goes but what is older than a
            # checkpoint that is known to be whole.
            newest = newest_step(self._storages[Tier.STORAGE], whole=True)
            removals = [name for name in removals if newest is not None and name.step <= newest]
        for name in removals:
            with _logged(f"checkpoint {name} stays for now"):
                if storage.remove_checkpoint(str(name)):
                    logger.info("checkpoint %s was removed", name)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until no save is in flight; return whether that is so. Any thread."""
        until = None if timeout is None else time.monotonic() + not_negative(timeout).total_seconds()
        for thread in self._threads:
            thread.join(None if until is None else max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def shutdown(self, *, wait: bool = True) -> None:
        """End: let this rank write its share, and others theirs, or give the save up. May be called twice; at exit it is.

        This rank's share may take as long as `timeout`, what others left out as long as it takes to fill it; a warning says who
        they are. A place that does not answer then is waited for half a minute more; what it was to write counts for nothing.
        Does nothing in a forked child.
        """
        if os.getpid() != self._owner:
            return
        later, self._later = self._later, []
        if self._manager is not None and any(not save.done() for save in later):
            self._manager.hooks.ends_step()  # no other one begins, which would make them
            for save in later:
                save.begin()
        self._is_over = True
        worker = self._worker
        if worker is not None and self._is_busy():
            if wait and worker.wait_written(self._timeout.total_seconds()):
                if self._manager is not None and self._manager.is_leaving:
                    worker.leave()  # the others see to it
                limit = (self._redundancy + 1) * self._fill_after + _TO_CLOSE
                if not self.wait(min(limit, _TO_SAY)):
                    logger.warning(
                        "shutdown waits up to %g s for a save: %s", limit.total_seconds(), worker.waits_for()
                    )
                    self.wait(limit)
            worker.cancel()
        if not self.wait(_TO_GIVE_UP):
            logger.error(
                "a save that was given up does not end, because its storage does not answer: its thread is left"
            )
        atexit.unregister(self.shutdown)
        self._lock.remove_before_write(self._detach)
        self._pool.close("checkpointer")

    def _is_busy(self) -> bool:
        return self._worker is not None and not self._worker.future.done()

    def _detach(self) -> None:
        if self._worker is not None:
            self._worker.detach()

    def _who_is_lost(self, identity: SaveIdentity | Onlooking) -> Callable[[bool], Sequence[int]] | None:
        if self._manager is None or identity.state is None:
            return None
        manager, state = self._manager, identity.state
        return lambda asks: manager.hooks.lost_contributors(state, asks=asks)

    def _group_names(self, identity: SaveIdentity | Onlooking) -> Callable[[], Sequence[str]]:
        manager, state = self._manager, identity.state
        return tuple if manager is None or state is None else lambda: manager.hooks.contributor_names(state)

    def _check_places(self) -> None:
        """See that nothing but a directory is, or can be, where saves go to; others' storages make what they need."""
        for storage in self._all_storages():
            if isinstance(storage, LocalStorage):
                try:
                    storage.make_directory("")
                except StorageError as error:
                    if error.errno in _NEVER_A_PLACE:
                        raise
                    logger.warning("nothing can be saved in %s now: %s", storage.location, error)

    def _say_of(self, captured: CapturedState, identity: SaveIdentity, task: SaveTask) -> None:
        """Say once what saves of this state cost, or do not keep."""
        if len(captured.values) > _MANY_VALUES and self._is_news("many values"):
            logger.warning(
                "the state has %d plain values, most of them in %r: each of them costs every save time on the training thread,"
                " and a record of its own. Put them into a tensor, or as bytes into rank_state",
                len(captured.values),
                largest_value(captured.manifest.tree),
            )
        is_nameless = identity.num_replicas > 1 and not identity.replica_id
        if is_nameless and has_own(captured.own) and self._is_news("nameless"):
            logger.warning(
                "what ranks save of their own (rank_state, random state) will not be restored: their group has no name to find it"
                " by. Give each Manager a replica_id that is the same after a restart"
            )
        if self._redundancy > 1 and task.writers.num_holders == 1 and self._is_news("no backups"):
            why = "there is one replica group" if task.mode is not SaveMode.EVERY_GROUP else "each group writes all"
            logger.info(
                "saves have no backups, because %s: a writer that dies in a save leaves it without its share", why
            )

    def _is_news(self, what: str) -> bool:
        is_news = what not in self._said
        self._said.add(what)
        return is_news

    def _state_of(self, state_dict: dict[str, Any] | None) -> StateToSave:
        state = None if state_dict is None else {key: state_of_value(value) for key, value in state_dict.items()}
        if self._manager is not None:
            held = state_to_save(self._manager, state)
        elif state is None:
            raise ConfigError("without a Manager, save needs a state_dict", "state_dict")
        else:
            held = capture_for_save(state, self._guarded)
        if state is None or state_dict is None:
            return held
        return held._replace(owners={**held.owners, **names_of(owned_by_objects(state_dict, state, self._guarded))})

    def _make_way(self) -> None:
        """The state is about to be overwritten: have whatever reads it copy it aside first."""
        with self._lock.write():
            return

    def _identity(self, step: int | None) -> SaveIdentity | Onlooking | NotSaving:
        if self._manager is not None:
            identity = save_identity(self._manager)
            if not isinstance(identity, NotSaving) and step is not None and step != identity.step:
                raise ConfigError(f"step={step}: the Manager's state is that of step {identity.step}", "step")
            return identity
        if step is None or self._alone is None:
            raise ConfigError("without a Manager, save needs a step", "step")
        # A number, because a step that is saved again, after a failure perhaps, may be of another state. All ranks have the same.
        return self._alone._replace(step=step, save_id=f"{self._alone.save_id}-{self._num_saves:06d}")

    # ---------------------------------------------------------------------------------------------------------- load

    def load(self, state_dict: MutableMapping[str, Any], *, step: SupportsIndex | None = None) -> Restored:
        """Load the newest whole checkpoint into a state dict, in place, as `torch.distributed.checkpoint.load` does.

        Names that the checkpoint has and the state dict has not are left out, but for the state of an optimizer that has none
        yet. Objects with `load_state_dict` are loaded by it: an optimizer, or what has its groups, with all that was saved of it.
        A damaged one is skipped with a reason. In a job of torch.distributed all ranks call it: they take the newest that they
        can read together, each byte once, and all of them load it, or none does.

        Args:
            state_dict: says what is wanted, on which layout.
            step: of that step only.

        Raises:
            ConfigError: there is a Manager: use `restore`, which has all ranks of all groups take the same one. Or `step`
                is none.
            CheckpointNotFoundError: there is none, or no undamaged one.
            StateMismatchError: what is wanted is not in it, or of another shape or dtype; or an optimizer's state is of other
                parameters, or of these in another order.
            StorageError: the storage failed.
            StateDictLoadError: the `load_state_dict` of an object in it raised.
            SourceLostError: another rank does not go on.
            In each, `state_overwritten` says whether the state dict is torn.
        """
        if self._manager is not None:
            raise ConfigError("with a Manager use restore: load would not tell it, nor the other groups", "manager")
        step = plain_step(step)
        template = template_of(state_dict)
        self._make_way()
        with _ranks_to_load() as ranks:
            return self._load(template, state_dict, step, ranks)

    def _load(
        self, template: Template, state_dict: MutableMapping[str, Any], step: int | None, ranks: Ranks
    ) -> Restored:
        candidates = Candidates(self._all_storages(), ranks, step=step, shared=self._storages[Tier.STORAGE])
        reader, has_written = None, False
        with torn_where_it_raises(
            "loading the newest checkpoint", "state_dict", lambda: candidates.has_written or has_written
        ):
            while reader is None:
                with ranks.all_go_on():
                    whole = candidates.newest()
                newest = CheckpointReader(whole.checkpoint)
                newest.read_as(*self._place)
                shared = SharedRead(whole, newest, ranks, timeout=_TO_FETCH)
                try:
                    with ranks.all_go_on():
                        load_into(newest, template.state_dict, shared.read, owned=template.owned)
                        has_written = True
                        ranks.say_done(f"that {newest.checkpoint.name} is loaded")
                    reader = newest
                except CheckpointDamagedError as error:
                    candidates.leave_out(newest.checkpoint, error)
        found = reader.checkpoint.name.step
        with torn_where_it_raises(f"loading step {found}", "state_dict"):
            with ranks.all_go_on():
                give_back(state_dict, template.state_dict)
                ranks.say_done(f"that all have step {found}")
            rank_state = reader.own_after_restart("", *self._place)
        source = RestoreSource.STORAGE if whole.is_shared else RestoreSource.LOCAL_DISK
        reason = f"step {found} from {source.value}"
        restored = Restored(
            source=source,
            step=found,
            reason=reason,
            bytes_from_storage=reader.bytes_read,
            bytes_from_peers=shared.bytes_from_peers,
        )
        return self._logged_restored(restored, rank_state)

    def restore(self, *, step: SupportsIndex | None = None, timeout: timedelta | None = None) -> Restored:
        """Find the newest state and load it, before the first step: of memory, peers, local disk and storage.

        Registered functions get what they would get from a peer: what came into being while training, or has another shape than
        here, arrives whole, in memory of its own.
        Where peers hold it nothing is loaded here: the first step heals from them. All ranks of all groups that start call it.
        Of groups that start together one that can read the newest checkpoint reads it, and the others receive it from that one.
        Where it is lost, stands still or finds damage, the next one reads.

        Args:
            step: load the checkpoint of this step, whatever else there is.
            timeout: for other groups that live and have not come yet; default: the Manager's `quorum_timeout`.

        Returns:
            where the state comes from; `RestoreSource.NOTHING` where there is none yet.

        Raises:
            ConfigError: there is no Manager: use `load`. Or the Manager has to be told of the optimizers first
                (`Optimizer(manager, ...)`), because parameters are sharded. Or `step` is none.
            StateMismatchError: the checkpoint was saved without a Manager, or with other state registered; or a sharded tensor
                of it has no counterpart here, or one of another shape; or an optimizer's state is of other parameters, or of
                these in another order; or there is no class for a named tuple or an enum in it
                (`register_state_class`). Nothing was loaded.
            UnsupportedValueError: what is registered here could not be saved: the message has the path of what cannot be carried.
            StorageError: the storage failed, or the place is no directory.
            CheckpointNotFoundError: there is none of that step; or there are checkpoints that were saved whole, and none can be
                read now: the job does not begin at step 0 beside them.
            SourceLostError: another rank of this group does not go on.
            StateDictLoadError: a registered function raised.
        """
        manager = self._manager
        if manager is None:
            raise ConfigError("restore needs a Manager; use load", "manager")
        with manager.hooks.timekeeper.waiting(Waits.STATE):
            return self._restore(manager, step, timeout)

    def _restore(self, manager: Manager, step: SupportsIndex | None, timeout: timedelta | None) -> Restored:
        step = plain_step(step) if self._replay is None else self._replay.step
        check_optimizers_known(manager)
        check_state(manager)
        self._check_places()
        in_memory = None if manager.is_behind or not manager.current_step() else manager.current_step()
        found = {tier: newest_step(storage, whole=tier is Tier.STORAGE) for tier, storage in self._storages.items()}

        def chosen(peers: int | None = None) -> Restored:
            choice = choose_restore_source(in_memory, peers, found.get(Tier.LOCAL), found[Tier.STORAGE])
            return Restored(source=choice.source, step=choice.step, reason=choice.reason)

        if step is None and chosen().source is RestoreSource.MEMORY:
            if (choice := chosen(manager.newest_step_of_peers(timeout) or None)).source is RestoreSource.PEERS:
                end_restore(manager, from_peers=True)
            return self._logged_restored(choice)
        self._make_way()
        restoring = Restoring(
            manager,
            self._all_storages(),
            shared=self._storages[Tier.STORAGE],
            step=step,
            limit=not_negative(timeout),
        )
        try:
            restoring.run()
            reader = restoring.reader
            if reader is None:
                if restoring.has_written:
                    manager.report_torn_state()
                end_restore(manager, from_peers=True)
                return self._logged_restored(chosen(restoring.others_hold))
            with torn_where_it_raises("restoring a checkpoint", "restore"):
                rank_state = reader.own_after_restart(
                    group_name(manager), manager.group_rank, manager.group_world_size, restoring.num_groups
                )
        except BaseException as error:
            if restoring.has_written:  # so that it is not taken for a state, should the script go on
                manager.report_torn_state()
            if step is not None or manager.view().torn or not isinstance(error, CheckpointNotFoundError):
                raise
            return self._logged_restored(self._nothing(error, found[Tier.STORAGE], restoring.named))
        read_step = reader.checkpoint.name.step
        if step is None and restoring.named:
            logger.warning(
                "the job goes on from %s: %s is newer, and nobody who is here can read it",
                reader.checkpoint.name,
                restoring.named,
            )
        is_later = step is not None and any(other is not None and other > step for other in found.values())
        if is_later and self._replay is None:
            logger.warning(
                "checkpoints of later steps than %d stay where they are, and the next restore takes the newest: remove those "
                "that the job is to forget",
                step,
            )
        if restoring.has_read and manager.group_rank == 0 and self._replay is None:
            close_if_open(self._storages[Tier.STORAGE], reader.checkpoint)
        end_restore(manager, from_peers=False)
        found[Tier.LOCAL if restoring.source is RestoreSource.LOCAL_DISK else Tier.STORAGE] = read_step
        restored = replace(
            chosen(),
            source=restoring.source,
            step=read_step,
            bytes_from_storage=restoring.bytes_from_storage,
            bytes_from_peers=restoring.bytes_from_peers,
        )
        return self._logged_restored(restored, rank_state)

    def _nothing(self, error: CheckpointNotFoundError, saved: int | None, named: str) -> Restored:
        """Begin at step 0, unless a step was saved whole, or may have been: a storage failed. `named`: as in `Restoring`."""
        if isinstance(error.__cause__, StorageError):
            raise error
        if saved is not None:
            raise CheckpointNotFoundError(
                f"{error}; step {saved} was saved whole and cannot be read now: mend it, name another by `step`, or remove "
                "what is there to begin at step 0",
                error.party,
            ) from error
        if named:
            raise CheckpointNotFoundError(
                f"{error}; a group that started has said that it can read {named}, and nobody who is here can: start that group"
                " again, or allow the loss of steps to begin at step 0 (python -m torchft_ckpt allow-step-loss)",
                error.party,
            ) from error
        reason = f"there is no state to go on from: {error}"
        if beside := beside_whole_ones(self._all_storages()):
            reason = f"{reason}; {beside}"
            logger.warning("the job begins at step 0 beside what is there: %s", reason)
        return Restored(source=RestoreSource.NOTHING, step=None, reason=reason)

    def _logged_restored(self, restored: Restored, rank_state: object = None) -> Restored:
        """Return it with what a rank has saved of its own, and its random state set."""
        kept = rank_state if isinstance(rank_state, dict) else {}
        if self._saves_random_state and kept.get("random") is not None:
            set_random_state(kept["random"])
        logger.info("restored: %s", restored.reason)
        return replace(restored, rank_state=kept.get("user"))

    def _all_storages(self) -> list[Storage]:
        return [self._storages[tier] for tier in (Tier.LOCAL, Tier.STORAGE) if tier in self._storages]


@contextlib.contextmanager
def _ranks_to_load() -> Iterator[Ranks]:
    """The ranks of torch.distributed's job, with a transport for what one of them reads for others."""
    ranks = Ranks.of_torch_distributed()
    transport: HTTPTransport[Any] | None = HTTPTransport() if ranks.num_ranks > 1 else None
    ranks.transport = transport
    try:
        yield ranks
    finally:
        if transport is not None:
            transport.shutdown()


@contextlib.contextmanager
def _logged(consequence: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("%s: %s", consequence, error)


def _identity_alone() -> SaveIdentity:
    """Return the place of this rank in torch.distributed's default group. Raises: as `name_of_run`."""
    ranks = Ranks.of_torch_distributed()
    return SaveIdentity(0, name_of_run(), 0, 1, ranks.rank, ranks.num_ranks, "")
