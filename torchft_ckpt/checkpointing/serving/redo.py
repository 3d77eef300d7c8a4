"""Keeps the redo log of one process: the entries that followers may still ask for, each as a snapshot that is served.

Which entries those are is `core/transfer/redo_log.py`'s decision; this file holds them, and their memory, and makes a snapshot of
one when it is first asked for. An entry refers to the gradients of its step where they are. They belong to nobody else by then,
so its snapshots have a lock that nobody writes under; who writes to one nevertheless is found out by its version
(`state/versions.py`).

From any thread: the trainer appends, the server's threads ask.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.checkpointing.state.redo_entry import RedoEntry, num_bytes_of, state_of
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.core.transfer.redo_log import Gone, Next, RedoLog, Wait
from torchft_ckpt.errors import UnsupportedValueError
from torchft_ckpt.threads import Thread

logger = logging.getLogger(__name__)
LEASE_S = 60.0
_BLOCKS_EACH = 32
"""An entry has so many blocks at least, so that several sources share it evenly, unless these would be very small."""
_LEAST_BLOCK_BYTES = 256 * 1024
MAX_STAGED_AT_ONCE = 2
"""Entries whose gradients are on their way from an accelerator to the host: so many steps of gradients stay there longer."""


@dataclass(slots=True)
class _Kept:
    content: tuple[RedoEntry, StateVersions] | Snapshot
    """The noted entry, and the versions of its gradients; from the first request on its snapshot, which keeps what it needs."""

    @property
    def snapshot(self) -> Snapshot | None:
        return self.content if isinstance(self.content, Snapshot) else None


class ServedRedoLog:
    """The redo log of one process.

    Args:
        block_bytes: unit of digests, at most; those of a small entry are smaller.
        budget_bytes: at most so much is kept.
        lease_s: a follower of which nothing is heard for so long is given up.
    """

    def __init__(self, *, block_bytes: int, budget_bytes: int, lease_s: float = LEASE_S) -> None:
        self._log: RedoLog[StateVersion] = RedoLog(budget_bytes=budget_bytes, lease_s=lease_s)
        self._lock = threading.Lock()
        self._kept: dict[StateVersion, _Kept] = {}
        self._unwritten = StateDictLock()
        self._block_bytes = block_bytes
        self._wake: Callable[[], None] = lambda: None
        self._num_staging = 0

    def __repr__(self) -> str:
        with self._lock:
            return f"Served{self._log!r}"

    @property
    def is_kept(self) -> bool:
        """Whether steps are to be noted."""
        return self._log.is_kept

    def on_change(self, wake: Callable[[], None]) -> None:
        """Have those woken that wait for an entry."""
        self._wake = wake

    def begin(self, version: StateVersion, num_followers: int, now: float) -> None:
        """Keep what follows on the version that is here for so many followers that are to come."""
        self._change(lambda: self._log.begin(version, num_followers, now))

    def append(self, entry: RedoEntry, versions: StateVersions) -> None:
        """Keep an entry, where somebody follows.

        Args:
            entry: its gradients are referred to; nobody changes them any more.
            versions: of the gradients now.

        Gradients on an accelerator are copied to the host, ordered after the stream that is current here, and let go.
        """
        num_bytes = _num_bytes(entry)
        gradients = (gradient for step in entry.steps for gradient in step.gradients if gradient is not None)
        is_on_device = any(not gradient.is_cpu for gradient in gradients)
        if is_on_device and self._num_staging >= MAX_STAGED_AT_ONCE:
            self.end("gradients are made faster than they can be copied to the host")
            return

        def append() -> None:
            self._kept[entry.version] = _Kept((entry, versions))
            self._log.append(entry.after, entry.version, num_bytes)

        self._change(append)
        if is_on_device:
            with contextlib.suppress(BlockGoneError, UnsupportedValueError):
                snapshot = self.snapshot_of(entry.version)
                with self._lock:
                    self._num_staging += 1
                Thread(self._stage, "torchft_ckpt-redo-staging", (snapshot,)).start()

    def _stage(self, snapshot: Snapshot) -> None:
        try:
            snapshot.stage()
        finally:
            with self._lock:
                self._num_staging -= 1

    def end(self, reason: str) -> None:
        """End the log; followers hear the reason. Without effect where there is none."""
        if self._log.is_kept:
            logger.info("the redo log ends: %s", reason)
        self._change(lambda: self._log.end(reason))

    def lapse(self, now: float) -> None:
        """Give up followers of which nothing was heard for long."""
        self._change(lambda: self._log.lapse(now))

    def ask(self, name: str, client: str, after: StateVersion, now: float) -> Next[StateVersion] | Wait | Gone:
        """See `RedoLog.ask`."""
        answers: list[Next[StateVersion] | Wait | Gone] = []
        self._change(lambda: answers.append(self._log.ask(name, client, after, now)), wakes=False)
        return answers[0]

    def leave(self, name: str) -> None:
        """A follower needs nothing more; the log ends with the last one."""
        self._change(lambda: self._log.leave(name), wakes=False)

    def hear(self, name: str, now: float) -> None:
        """See `RedoLog.hear`."""
        with self._lock:
            self._log.hear(name, now)

    def snapshot_of(self, version: StateVersion) -> Snapshot:
        """Return the entry that leads to a version, as a snapshot. Takes some milliseconds for thousands of parameters.

        Raises:
            BlockGoneError: it was freed.
            UnsupportedValueError: it holds what cannot be carried; the log has ended.
        """
        with self._lock:
            kept = self._kept.get(version)
            if kept is None:
                raise BlockGoneError(f"the redo entry of step {version.step} was freed", party="redo log")
            if isinstance(kept.content, Snapshot):
                return kept.content
            entry, versions = kept.content
        try:
            made = Snapshot(
                state_of(entry),
                step=version.step,
                lock=self._unwritten,
                pool=BufferPool(
                    self._block_bytes_of(entry)
                ),  # nothing is copied aside: nobody writes to noted gradients
                num_expected=1,  # so that staging begins now
                versions=versions,
            )
        except UnsupportedValueError as error:
            self.end(str(error))
            raise
        with self._lock:
            if self._kept.get(version) is not kept:
                made.close()
                raise BlockGoneError(f"the redo entry of step {version.step} was freed", party="redo log")
            if not isinstance(kept.content, Snapshot):
                kept.content = made
            return kept.content

    def _block_bytes_of(self, entry: RedoEntry) -> int:
        """Return a block's length: a power of two, the same at all sources that have `_block_bytes` alike."""
        even = 1 << max((_num_bytes(entry) // _BLOCKS_EACH).bit_length() - 1, 0)
        return min(max(even, _LEAST_BLOCK_BYTES), self._block_bytes)

    def find_by_id(self, snapshot_id: str) -> Snapshot | None:
        """Return the snapshot of an entry."""
        with self._lock:
            snapshots = [kept.snapshot for kept in self._kept.values() if kept.snapshot is not None]
        return next((snapshot for snapshot in snapshots if snapshot.id == snapshot_id and not snapshot.closed), None)

    def _change(self, change: Callable[[], object], *, wakes: bool = True) -> None:
        with self._lock:
            change()
            versions = set(self._log.versions)
            freed = [self._kept.pop(version) for version in list(self._kept) if version not in versions]
        for kept in freed:
            if kept.snapshot is not None:
                kept.snapshot.close()
        if wakes:
            self._wake()


def _num_bytes(entry: RedoEntry) -> int:
    return sum(num_bytes_of(step.gradients) for step in entry.steps)
