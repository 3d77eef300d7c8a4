"""Carries one save out: copies ahead, writes this rank's share, waits for the others, writes what lost ones left out, closes
it.

One save at a time, on a thread of its own. What is to be done follows from `core/durable/assignment.py` (who writes what) and
`core/durable/saving.py` (wait, take a share over, or close; look on); this file looks, asks them, and does it.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from torchft_ckpt.checkpointing.durable.names import METADATA, CheckpointName, PartName, parse_part, parts_in, writer_in
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    drifted_replicas,
    is_closed,
    read_checkpoint,
    read_part,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.dcp_metadata import build_metadata
from torchft_ckpt.checkpointing.durable.saving.dividing import ShareBook, StagedShare
from torchft_ckpt.checkpointing.durable.saving.part_writer import write_part
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.progress import ProgressCallback, TransferProgress, tell
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.core.durable.saving import Act, PartKey, SaveView, SaveWatch, SavingRank, Writers, look_on
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    RanksDifferError,
    StateChangedError,
    StorageError,
)
from torchft_ckpt.threads import Thread

logger = logging.getLogger(__name__)
_HEAD_START_S = 0.03
"""For a trainer that steps at once: what is worked out here in Python takes turns with its copying."""
_COPY_AHEAD_AFTER_S = 0.25
"""A share that is written by then needs no copy, unless the trainer steps sooner."""


class SaveMode(Enum):
    """A way to divide the work among replica groups."""

    SHARED = "shared"
    """All replica groups share the work: every chunk is written once."""
    EVERY_GROUP = "every group"
    """Each group writes a whole copy, as disks that only one host can read want it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """The outcome of a save."""

    step: int
    name: str
    """Of its directory."""
    written_bytes: int
    """By this rank."""
    num_fills: int
    """The number of shares that this rank wrote in the place of writers that were lost."""
    is_closed: bool
    """It was seen to be whole. Not known where only this host can read what it wrote, or where the next save began while others
    still wrote; if a group had written nothing by then, the save has failed. Not known, either, to a rank that only looks on
    (`Checkpointer.save`) where nobody has written anything for some seconds, or where each group writes its own copy."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTask:
    """One save of one rank."""

    storage: Storage
    name: CheckpointName
    member: SavingRank
    writers: Writers
    """With `redundancy` 1 where nobody could write a share in its owner's place: each group writes all, or the disk is local."""
    mode: SaveMode
    is_storage_shared: bool
    """All ranks see the same files."""
    fill_after_s: float
    timeout_s: float


class Save(ABC):
    """One save of one rank, on its way. `run` on a thread of its own; all else from any.

    Args:
        name: of the checkpoint.
        who_is_lost: returns which groups are gone, as far as the lighthouse has said; True: asks it as well. None: there is
            none.
        group_names: returns the names of the groups that save, by their numbers, as far as they are known.
        clock: monotonic.
    """

    _written_bytes = _num_fills = 0
    _failed = "was not saved by this rank"

    def __init__(
        self,
        name: CheckpointName,
        who_is_lost: Callable[[bool], Collection[int]] | None,
        group_names: Callable[[], Sequence[str]],
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._who_is_lost = who_is_lost
        self._group_names = group_names
        self._clock = clock
        self._began_s = clock()
        self._leaves = self._is_cancelled = self._has_logged_failure = False
        self._woken = threading.Event()
        """It is to do something else than to wait: to end, for one."""
        self.saved: SavedCheckpoint | None = None
        """Known before the future is done, which may hold a `RanksDifferError` all the same."""
        self.future: Future[SavedCheckpoint] = Future()
        self.future.set_running_or_notify_cancel()  # nobody but `run` ends it: it reads live memory until it is done

    def cancel(self) -> None:
        """Have `run` end soon; what it has not written stays unwritten."""
        self._is_cancelled = True
        self._woken.set()

    @abstractmethod
    def leave(self) -> bool:
        """Let the next save begin, if this rank has nothing more to write: `run` ends soon. Return whether that is so."""

    def drop(self) -> None:  # noqa: B027 - not each save keeps something
        """It will not run: nothing of the state is kept for it."""

    def detach(self) -> None:  # noqa: B027
        """The state is about to change: copy aside what is still to be written. On the trainer's thread: nothing is raised."""

    @abstractmethod
    def waits_for(self) -> str:
        """Say who has written nothing, or what is waited for."""

    def wait_written(self, timeout_s: float) -> bool:
        """Wait until this rank's share is written, or will not be. Return whether that is so."""
        return True

    def run(self) -> None:
        """Do it; the outcome is in `future`."""
        try:
            is_closed = self._carry_out()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the outcome
            logger.warning("checkpoint %s %s: %s", self._name, self._failed, error)
            self.future.set_exception(error)
            return
        saved = self.saved = SavedCheckpoint(
            step=self._name.step,
            name=str(self._name),
            written_bytes=self._written_bytes,
            num_fills=self._num_fills,
            is_closed=is_closed,
            took_s=self._clock() - self._began_s,
        )
        if (difference := self._difference(saved)) is not None:
            self.future.set_exception(difference)
        else:
            self.future.set_result(saved)

    @abstractmethod
    def _carry_out(self) -> bool:
        """Do it; return whether the checkpoint was seen to be whole."""

    def _difference(self, saved: SavedCheckpoint) -> CheckpointError | None:
        """Return what is wrong all the same with a checkpoint that is saved."""
        return None

    def _looks_again(self, error: StorageError) -> None:
        if not self._has_logged_failure:
            logger.warning("checkpoint %s: %s; it is looked at again", self._name, error)
            self._has_logged_failure = True


class SaveWorker(Save):
    """Writes this rank's share, and what is left out of those that it backs up.

    Args:
        state: what to save; closed at the end, whatever happens.
        who_is_lost, group_names, clock: as of `Save`.
        on_progress: told how far this rank's own share is; what it raises is logged, and does the save no harm.
    """

    def __init__(
        self,
        task: SaveTask,
        state: CapturedState,
        book: ShareBook,
        *,
        who_is_lost: Callable[[bool], Collection[int]] | None = None,
        group_names: Callable[[], Sequence[str]] = tuple,
        on_progress: ProgressCallback | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(task.name, who_is_lost, group_names, clock)
        self._task = task
        self._state = state
        self._book = book
        self._names: Sequence[str] = ()
        self._watch: SaveWatch | None = None
        self._staged: list[StagedShare] | None = None
        """The shares that are kept, by the number of this rank among their holders. An empty one needs nothing to be kept."""
        self._staging = threading.Lock()
        self._damaged: dict[PartKey, bool] = {}
        """Of the parts whose manifests this rank has read: whether they do not count."""
        self._on_progress = on_progress
        self._share_bytes = self._progress_bytes = 0
        self._lock = threading.Lock()
        self._needs_state = True
        """This rank writes, its own share or that of another."""
        self._share_over = threading.Event()
        """This rank's share is written, or will not be."""

    def leave(self) -> bool:
        """As `Save.leave`.

        Else one that waits for a lost writer, or hears late that the checkpoint is whole, would stay out of the next save,
        whose writers then waited for it, and so on for ever. Whoever writes the last share closes the checkpoint.
        """
        with self._lock:
            if self._needs_state:
                return False
            self._leaves = True
        self._state.close()
        return True

    def drop(self) -> None:
        self._state.close()

    def stage(self) -> list[StagedShare]:
        """Have the state keep this rank's share and those that it backs up; return them. Any thread; it does so once."""
        task = self._task
        with self._staging:
            if self._staged is None:
                replicas = {
                    SaveMode.SHARED: range(task.writers.num_replicas),
                    SaveMode.EVERY_GROUP: range(task.member.replica, task.member.replica + 1),
                }[task.mode]
                self._staged = self._book.staged_by(self._state, task.writers, task.member, replicas)
                self._state.stage(_blocks_of(self._staged))
            return self._staged

    def set_apart(self, addresses: Collection[int]) -> bool:
        """Copy at once what of the staged shares has these addresses, because it may change though nobody announces it.

        On the trainer's thread: nothing is raised. Return whether all of it could be copied.
        """
        return self._stages() and self._state.set_apart(addresses)

    def detach(self) -> None:
        if not self._state.snapshot.closed and self._stages():
            self._state.detach()

    def _stages(self) -> bool:
        try:
            self.stage()
        except Exception as error:  # noqa: BLE001 - the trainer is not to pay for a save
            logger.warning("checkpoint %s cannot be saved by this rank: %s", self._task.name, error)
            self._state.close()
            return False
        return True

    def waits_for(self) -> str:
        watch = self._watch
        absent = [] if watch is None or self._task.mode is SaveMode.EVERY_GROUP else watch.absent()
        if watch is None or not absent:
            return "not all parts are there yet"
        names = dict(enumerate(self._names))
        groups = some_of(
            (
                names.get(replica, f"replica {replica}") + (" (gone)" if watch.is_lost(replica) else "")
                for replica in absent
            ),
            ", ",
        )
        return (
            f"{groups} {'has' if len(absent) == 1 else 'have'} written nothing for step {self._task.name.step}: every replica"
            " group has to call save for it, into the same directory"
        )

    def wait_written(self, timeout_s: float) -> bool:
        return self._share_over.wait(timeout_s)

    def _carry_out(self) -> bool:
        ahead = Thread(self._copy_ahead, "torchft_ckpt-stage")
        try:
            self.stage()
            ahead.start()
            return self._save()
        except StateChangedError as error:
            if self._is_cancelled:  # nobody is to be told of changes any more
                raise self._given_up() from error
            raise
        finally:
            self._share_over.set()
            self._state.close()
            if ahead.ident is not None:  # it began: no thread can be had where there are too many
                ahead.join()

    def _difference(self, saved: SavedCheckpoint) -> CheckpointError | None:
        name, path = self._name, self._name.differs(self._task.member.replica)
        logger.info("checkpoint %s: %d bytes written in %.2f s", name, saved.written_bytes, saved.took_s)
        try:
            if saved.is_closed and self._state.owned_replicas and (size := self._task.storage.size(path)):
                told = self._task.storage.read(path, 0, size).decode(errors="replace")
                again = "They are compared again at the next step's save"
                return RanksDifferError(f"checkpoint {name} is whole and stays, but {told}. {again}", path)
        except StorageError as error:
            logger.warning("checkpoint %s: it is not known whether ranks differ: %s", name, error)
        return None

    def _save(self) -> bool:
        task = self._task
        task.storage.make_directory(str(task.name))
        self._check_not_there()
        self._woken.wait(_HEAD_START_S)
        self._write(0)
        self._release({*range(1, task.writers.num_holders)})
        if not task.is_storage_shared:
            return False
        with self._lock:
            self._needs_state = False
        self._share_over.set()
        return self._see_to_the_others()

    def _check_not_there(self) -> None:
        """See that no other save has this name: its parts may be of another state."""
        task = self._task
        for part in parts_in(task.storage.names(str(task.name))):
            if part[:2] == task.member:
                raise CheckpointError(
                    f"checkpoint {task.name}: {part.manifest} of this rank is there already, from a save of the same name; "
                    "nothing was written",
                    party="save",
                )

    def _copy_ahead(self) -> None:
        """Copy aside what this rank backs up, and what of its own share is not written soon, as the trainer steps then."""
        self._share_over.wait(_COPY_AHEAD_AFTER_S)
        try:
            while self._state.snapshot.copy_ahead():
                pass
        except (CheckpointError, MemoryError, OSError) as error:
            logger.info("not all of step %d was copied ahead, the trainer will: %s", self._task.name.step, error)

    # Shares

    def _write(self, number: int) -> None:
        """Write the share of which this rank is the holder of that number: its own (0), or one that it backs up."""
        task = self._task
        staged = self.stage()[number]
        self._share_bytes += staged.num_bytes
        part = PartName(task.member.replica, task.member.rank, number)
        self._written_bytes += write_part(
            task.storage, task.name, part, task.writers, self._state, staged.share, self._note_written
        )

    def _release(self, numbers: set[int]) -> None:
        staged = self.stage()
        self._state.release(_blocks_of(staged) & ~_blocks_of([staged[number] for number in numbers]))

    def _given_up(self) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self._task.name}: the save was given up"
            + (f" before it was whole: {self.waits_for()}" if self._watch is not None else ""),
            party="save",
        )

    def _note_written(self, num_bytes: int) -> None:
        self._progress_bytes += num_bytes
        if self._woken.is_set():
            raise self._given_up()
        progress = TransferProgress(
            step=self._task.name.step,
            total_bytes=self._share_bytes,
            received_bytes=self._progress_bytes,
            skipped_bytes=0,
            resent_bytes=0,
            num_sources=1,
            elapsed_s=self._clock() - self._began_s,
        )
        self._on_progress = tell(self._on_progress, progress)

    # The others

    def _see_to_the_others(self) -> bool:
        task = self._task
        watch = self._watch = SaveWatch(
            me=task.member,
            writers=task.writers,
            fill_after_s=task.fill_after_s,
            give_up_at_s=self._began_s + task.timeout_s,
            has_lighthouse=self._who_is_lost is not None,
            took_s=self._clock() - self._began_s,
        )
        has_said = False
        num_kept = task.writers.num_holders
        while True:
            leaves = self._leaves  # asked for before it looks
            try:
                seen = self._look(watch, lists=leaves or watch.lists(self._clock()))
            except StorageError as error:
                decision = watch.look_failed(self._clock())
                if leaves or decision.act is not Act.WAIT:
                    raise
                self._looks_again(error)
                self._pause(decision.look_in_s)
                continue
            decision = watch.observe(seen, self._clock())
            if decision.act is Act.DONE:
                return True
            absent = watch.absent() if task.mode is SaveMode.SHARED else []
            is_told = bool(absent) and watch.is_absence_told(self._clock())
            if is_told and not has_said and not all(map(watch.is_lost, absent)):
                has_said = True
                logger.warning("checkpoint %s cannot become whole: %s", task.name, self.waits_for())
            if leaves and absent:
                if is_told:
                    raise CheckpointError(
                        f"the next save began before this one was whole: {self.waits_for()}", party=str(task.name)
                    )
                self._pause(decision.look_in_s)
                continue
            if leaves:
                return not watch.missing() and self._close_if_whole()
            if len(watch.backs_up) < num_kept:
                num_kept = len(watch.backs_up)
                self._release({*watch.backs_up})
            if decision.act is Act.WAIT:
                self._pause(decision.look_in_s)
            elif decision.act is Act.CLOSE:
                if self._close_if_whole():
                    return True
                watch.not_whole(self._clock())
            elif decision.act is Act.TAKE_OVER:
                with self._lock:
                    if self._leaves:
                        continue
                    self._needs_state = True
                logger.warning("checkpoint %s: %s; this rank writes it in their place", task.name, decision.reason)
                self._write(decision.number)
                with self._lock:
                    self._needs_state = False
                self._num_fills += 1
                watch.took_over(decision.number)
            else:
                who = f"{self.waits_for()}; " if absent else ""
                raise CheckpointDamagedError(
                    f"checkpoint {task.name} did not become whole within {task.timeout_s:g} s: {who}{decision.reason}; "
                    "this rank's share is there",
                    str(task.name),
                )

    def _pause(self, seconds: float) -> None:
        if self._woken.wait(seconds):
            raise self._given_up()

    def _look(self, watch: SaveWatch, *, lists: bool) -> SaveView:
        """Return what there is to be seen now. Lengths are asked for only of what is not finished, of those who matter."""
        task = self._task
        if not lists:
            return SaveView(task.storage.size(f"{task.name}/{METADATA}") is not None)
        names = task.storage.names(str(task.name))
        watched = watch.watched(self._clock())
        growth: dict[SavingRank, int] = dict.fromkeys(watched, 0)
        for name in names:
            writer = writer_in(name)
            if writer is None or (member := SavingRank(*writer)) not in watched:
                continue
            growth[member] += 1
            if parse_part(name) is None:
                try:
                    growth[member] += task.storage.size(f"{task.name}/{name}") or 0
                except StorageError:
                    continue  # it has just got its own name
        parts = frozenset((part.replica, part.rank, part.fill) for part in parts_in(names))
        for share in watch.backs_up.values():
            for key in parts.intersection(watch.parts_of(share)):
                self._note_part(key)
        self._names = self._group_names() or self._names  # the answer of another save may have come since
        lost = () if self._who_is_lost is None else self._who_is_lost(watch.asks(self._clock()))
        damaged = [key for key, is_damaged in self._damaged.items() if is_damaged]
        present = {writer[0] for name in names if (writer := writer_in(name)) is not None}
        return SaveView(METADATA in names, parts, growth, damaged, lost, present)

    def _note_part(self, key: PartKey) -> None:
        """Read a part of a share that this rank backs up, once: what is kept for it is freed only if it counts."""
        if key in self._damaged:
            return
        part = read_part(self._task.storage, self._task.name, PartName(*key))
        self._damaged[key] = isinstance(part, str)
        if isinstance(part, str):
            logger.warning("checkpoint %s: a part does not count, and is written again: %s", self._task.name, part)

    def _close_if_whole(self) -> bool:
        """Write the metadata, if the checkpoint is whole; return whether it is.

        Raises:
            CheckpointDamagedError: all shares are there, and still it is not whole: nothing that is written can mend that.
        """
        task = self._task
        checkpoint = read_checkpoint([task.storage], task.name)
        why_not = why_not_whole(checkpoint)
        if why_not is None:
            if told := drifted_replicas(checkpoint):
                logger.warning("checkpoint %s: %s", task.name, told)
                for replica in {name.replica for names in checkpoint.drifted(owned=True).values() for name in names}:
                    with task.storage.create(task.name.differs(replica)) as file:
                        file.write(drifted_replicas(checkpoint, owned=True).encode(errors="replace"))
                        file.commit()
            close_checkpoint(task.storage, checkpoint)
            return True
        shares = {task.writers.share_of(SavingRank(*part.name[:2]), part.name.fill) for part in checkpoint.parts}
        if not checkpoint.left_aside and len(shares) == task.writers.num_members:
            advice = " (stages of a pipeline need is_replicated=False)" if self._state.is_replicated else ""
            raise CheckpointDamagedError(
                f"checkpoint {task.name} is not whole although all shares are there, so the ranks of a group did not divide it"
                f" alike{advice}: {why_not}",
                str(task.name),
            )
        logger.info("checkpoint %s is not whole yet: %s", task.name, why_not)
        return False


_ASKS_AFTER_S = 0.5
"""An onlooker asks the lighthouse for the writers from then on, each time that it looks."""


class SaveOnlooker(Save):
    """Waits for a checkpoint that others write, of a state that is here.

    Args:
        storage: where; None where nothing is to be seen of what others write.
        fill_after_s: a writer of which nothing has come for so long has not begun.
        timeout_s: so long it waits.
        name, who_is_lost, group_names, clock: as of `Save`.
    """

    _failed = "was not seen whole by this rank, which looks on"

    def __init__(
        self,
        name: CheckpointName,
        storage: Storage | None,
        *,
        fill_after_s: float,
        timeout_s: float,
        who_is_lost: Callable[[bool], Collection[int]] | None = None,
        group_names: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, who_is_lost, group_names, clock)
        self._storage = storage
        self._limits_s = fill_after_s, timeout_s

    def leave(self) -> bool:
        """As `Save.leave`: it has nothing to write, so that is always so."""
        self._leaves = True
        self._woken.set()
        return True

    def waits_for(self) -> str:
        return "the groups that write it have not closed it"

    def _carry_out(self) -> bool:
        return self._storage is not None and self._is_closed_by_others(self._storage)

    def _are_writers_gone(self) -> bool:
        """Whether all of them are lost, as far as the lighthouse has said. It is asked."""
        lost = () if self._who_is_lost is None else self._who_is_lost(True)
        return bool(lost) and len(lost) == len(self._group_names())

    def _is_closed_by_others(self, storage: Storage) -> bool:
        fill_after_s, timeout_s = self._limits_s
        is_closed = has_begun = False
        while True:
            leaves, failure = self._leaves, None  # asked for before it looks
            try:
                is_closed = storage.size(f"{self._name}/{METADATA}") is not None
                has_begun = has_begun or bool(storage.names(str(self._name)))
            except StorageError as error:
                failure, has_begun = error, True  # for all that is known
                self._looks_again(error)
            waited_s = self._clock() - self._began_s
            decision = look_on(
                is_closed=is_closed,
                has_begun=has_begun,
                are_gone=waited_s >= _ASKS_AFTER_S and self._are_writers_gone(),
                leaves=leaves,
                waited_s=waited_s,
                fill_after_s=fill_after_s,
                timeout_s=timeout_s,
            )
            if decision.act is Act.GIVE_UP:
                raise failure or CheckpointDamagedError(
                    f"checkpoint {self._name} did not become whole within {timeout_s:g} s: {decision.reason}; this rank had no"
                    " part in it",
                    str(self._name),
                )
            if decision.act is not Act.WAIT:
                if decision.reason:
                    logger.info("checkpoint %s was not seen whole by this rank: %s", self._name, decision.reason)
                return decision.act is Act.DONE
            if self._woken.wait(decision.look_in_s) and self._is_cancelled:
                raise CheckpointError(
                    f"checkpoint {self._name}: {self.waits_for()}, and it is waited for no more", "save"
                )


def _blocks_of(staged: Sequence[StagedShare]) -> int:
    return functools.reduce(operator.or_, (share.blocks for share in staged), 0)


def close_checkpoint(storage: Storage, checkpoint: Checkpoint) -> None:
    """Write DCP's metadata of a whole checkpoint. Others may do the same at the same time: they write the same.

    Raises:
        StorageError: it could not be written.
    """
    try:
        metadata = build_metadata(checkpoint)
    except CheckpointDamagedError as error:
        logger.warning("checkpoint %s is whole, but only this library can read it: %s", checkpoint.name, error)
        return
    with storage.create(f"{checkpoint.name}/{METADATA}") as file:
        file.write(metadata)
        file.commit()
    logger.info("checkpoint %s is whole: %d parts", checkpoint.name, len(checkpoint.parts))


def close_if_open(storage: Storage, checkpoint: Checkpoint) -> None:
    """Close what is whole, and whose writers died before they saw it: else it would not count for retention, nor for DCP."""
    try:
        if not is_closed(storage, checkpoint.name) and all(part.storage is storage for part in checkpoint.parts):
            close_checkpoint(storage, checkpoint)
    except StorageError as error:
        logger.info("checkpoint %s stays without DCP's metadata: %s", checkpoint.name, error)
