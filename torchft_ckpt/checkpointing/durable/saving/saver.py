"""Carries one save out: copies ahead, writes this rank's share, waits for the others, fills what they left out, closes it.

One save at a time, on a thread of its own. What is to be done follows from `core/shares.py` (who writes what), `core/saving.py`
(wait, fill or close) and `core/filling.py` (who fills what); this file looks, asks them, and does it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from torchft_ckpt.checkpointing.durable.names import METADATA, TEMPORARY, CheckpointName, PartName, parts_in
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, read_checkpoint, why_not_whole
from torchft_ckpt.checkpointing.durable.reading.dcp_metadata import build_metadata
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.dividing import own_share
from torchft_ckpt.checkpointing.durable.saving.holes import share_of_holes
from torchft_ckpt.checkpointing.durable.saving.part_writer import PartShare, Writers, write_part
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.progress import ProgressCallback, TransferProgress, tell
from torchft_ckpt.core.saving import Act, Member, SaveWatch, Seen
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError, StateChangedError, StorageError
from torchft_ckpt.threads import Thread

logger = logging.getLogger(__name__)
_HEAD_START_S = 0.03
"""For a trainer that steps at once: what is worked out here in Python takes turns with its copying."""
_COPY_AHEAD_AFTER_S = 0.25
"""What is written by then needs no copy, unless the trainer steps sooner."""


class SaveMode(Enum):
    """Who writes what."""

    SHARED = "shared"
    """All replica groups share the work: every chunk is written once."""
    EVERY_GROUP = "every group"
    """Each group writes a whole copy, as disks that only one host can read want it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """What became of a save."""

    step: int
    name: str
    """Of its directory."""
    written_bytes: int
    """By this rank."""
    num_fills: int
    """How often this rank filled holes that others had left."""
    is_closed: bool
    """It was seen to be whole. Not known where only this host can read what it wrote, or where the next save began before."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTask:
    """One save of one rank."""

    storage: Storage
    name: CheckpointName
    member: Member
    writers: Writers
    mode: SaveMode
    is_storage_shared: bool
    """All ranks see the same files."""
    fill_after_s: float
    timeout_s: float


class SaveWorker:
    """Does one save. `run` on a thread of its own; `cancel` from any.

    Args:
        task: what to do.
        state: what to save; closed at the end, whatever happens.
        on_progress: told how far this rank's own share is; what it raises is logged, and does the save no harm.
        clock: monotonic.
    """

    def __init__(
        self,
        task: SaveTask,
        state: CapturedState,
        *,
        on_progress: ProgressCallback | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = task
        self._state = state
        self._on_progress = on_progress
        self._clock = clock
        self._cancelled = threading.Event()
        self._began_s = clock()
        self._written_bytes = 0
        self._share_bytes = 0
        self._progress_bytes = 0
        self._lock = threading.Lock()
        self._needs_state = True
        """This rank writes, its own share or what others left out."""
        self._leaves = False
        self._share_over = threading.Event()
        """This rank's share is written, or will not be."""
        self.future: Future[SavedCheckpoint] = Future()
        self.future.set_running_or_notify_cancel()  # nobody but this worker ends it: it reads live memory until it is done

    def cancel(self) -> None:
        """Have `run` end soon; what it has not written stays unwritten."""
        self._cancelled.set()

    def leave(self) -> bool:
        """Let the next save begin, if this rank has written its share: `run` ends soon. Return whether that is so. Any thread.

        Else one that waits for a lost writer, or hears late that the checkpoint is whole, would stay out of the next save, whose
        writers then waited for it, and so on for ever. Whoever writes the last share closes the checkpoint.
        """
        with self._lock:
            if self._needs_state:
                return False
            self._leaves = True
        self._state.close()
        return True

    def wait_written(self, timeout_s: float) -> bool:
        """Wait until this rank's share is written, or will not be. Return whether that is so. Any thread."""
        return self._share_over.wait(timeout_s)

    def run(self) -> None:
        """Do it; the outcome is in `future`."""
        task = self._task
        ahead = Thread(self._copy_ahead, "torchft_ckpt-stage")
        try:
            try:
                ahead.start()
                num_fills, is_closed = self._save()
            finally:
                self._share_over.set()
                self._state.close()
                if ahead.ident is not None:  # it began: no thread can be had where there are too many
                    ahead.join()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the outcome
            if self._cancelled.is_set() and isinstance(
                error, StateChangedError
            ):  # nobody is to be told of changes any more
                error = self._given_up()
            logger.warning("checkpoint %s was not saved by this rank: %s", task.name, error)
            self.future.set_exception(error)
            return
        took_s = self._clock() - self._began_s
        logger.info("checkpoint %s: %d bytes written in %.2f s", task.name, self._written_bytes, took_s)
        self.future.set_result(
            SavedCheckpoint(
                step=task.name.step,
                name=str(task.name),
                written_bytes=self._written_bytes,
                num_fills=num_fills,
                is_closed=is_closed,
                took_s=took_s,
            )
        )

    def _save(self) -> tuple[int, bool]:
        task = self._task
        task.storage.make_directory(str(task.name))
        self._check_not_there()
        self._cancelled.wait(_HEAD_START_S)
        self._write(0, self._own_share())
        if not task.is_storage_shared:
            return 0, False
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
        """Copy the rest aside for holes that are to be filled later; also what is not written soon, as the trainer steps then."""
        self._share_over.wait(_COPY_AHEAD_AFTER_S)
        try:
            self._state.copy_ahead()
        except (CheckpointError, MemoryError, OSError) as error:
            logger.info("not all of step %d was copied ahead, the trainer will: %s", self._task.name.step, error)

    # Own share

    def _own_share(self) -> PartShare:
        """Return what this rank writes in the first place."""
        task = self._task
        replicas = range(task.writers.num_replicas) if task.mode is SaveMode.SHARED else [task.member.replica]
        return own_share(self._state, task.writers, task.member, replicas)

    def _write(self, fill: int, share: PartShare) -> None:
        task = self._task
        sizes = [tensor.itemsize for tensor in self._state.holdings]
        self._share_bytes += sum(box.volume * sizes[tensor] for tensor, box in share.boxes)
        part = PartName(task.member.replica, task.member.rank, fill)
        self._written_bytes += write_part(
            task.storage, task.name, part, task.writers, self._state, share, self._note_written
        )

    def _given_up(self) -> CheckpointError:
        return CheckpointError(f"checkpoint {self._task.name}: the save was given up", party="save")

    def _note_written(self, num_bytes: int) -> None:
        self._progress_bytes += num_bytes
        if self._cancelled.is_set():
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

    def _see_to_the_others(self) -> tuple[int, bool]:
        task = self._task
        num_ranks = task.writers.num_ranks
        watch = SaveWatch(
            place=task.writers.number_of(*task.member),
            writers=frozenset(
                Member(replica, rank) for replica in range(task.writers.num_replicas) for rank in range(num_ranks)
            ),
            fill_after_s=task.fill_after_s,
            give_up_at_s=self._began_s + task.timeout_s,
        )
        num_written = 0
        while True:
            leaves = self._leaves  # asked for before it looks
            decision = watch.observe(self._look(watch), self._clock())
            if decision.act is Act.DONE:
                return num_written, True
            if leaves:
                return num_written, not watch.missing and self._close_if_whole()
            if decision.act is Act.WAIT:
                if self._cancelled.wait(decision.look_in_s):
                    raise self._given_up()
            elif decision.act is Act.CLOSE:
                if self._close_if_whole():
                    return num_written, True
                watch.not_whole()
            elif decision.act is Act.FILL:
                with self._lock:
                    if self._leaves:
                        continue
                    self._needs_state = True
                num_written += self._fill(watch, decision.reason)
                with self._lock:
                    self._needs_state = False
                watch.filled(self._clock())
            else:
                raise CheckpointDamagedError(
                    f"checkpoint {task.name} did not become whole within {task.timeout_s:g} s: {decision.reason}; "
                    "this rank's share is there",
                    str(task.name),
                )

    def _look(self, watch: SaveWatch) -> Seen:
        """Return what the directory shows now. Lengths are asked for only of what is not finished, of those who are missing."""
        task = self._task
        names = task.storage.names(str(task.name))
        parts = frozenset((part.replica, part.rank, part.fill) for part in parts_in(names))
        growth: dict[Member, int] = {}
        for name in names:
            if TEMPORARY in name or name.endswith(".distcp"):
                for member in watch.missing:
                    if name.startswith(f"__r{member.replica}_g{member.rank}_"):
                        try:
                            growth[member] = growth.get(member, 0) + 1 + (task.storage.size(f"{task.name}/{name}") or 0)
                        except StorageError:
                            continue  # it has just got its own name
        return Seen(METADATA in names, parts, growth)

    def _fill(self, watch: SaveWatch, reason: str) -> int:
        """Write what is missing and this rank's to write; return whether there was something."""
        task = self._task
        checkpoint = read_checkpoint([task.storage], task.name)
        share = share_of_holes(checkpoint, self._state, task.writers, task.member, alone=watch.num_fills > 0)
        if share is None:
            return 0
        parts = parts_in(task.storage.names(str(task.name)))
        fill = 1 + max((part.fill for part in parts if part[:2] == task.member), default=0)
        logger.warning(
            "checkpoint %s: %s; this rank writes %d boxes and %d values in their place",
            task.name,
            reason,
            len(share.boxes),
            len(share.values),
        )
        self._write(fill, share)
        return 1

    def _close_if_whole(self) -> bool:
        checkpoint = read_checkpoint([self._task.storage], self._task.name)
        why_not = why_not_whole(checkpoint)
        if why_not is None:
            close_checkpoint(self._task.storage, checkpoint)
        else:
            logger.info("checkpoint %s is not whole yet: %s", self._task.name, why_not)
        return why_not is None


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
