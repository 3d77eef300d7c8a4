"""Removes what writers left that died or failed, where a storage is full: else no save would ever succeed again there.

What is not whole may be in the making, by anybody, so it is looked at twice: when a save found no room, and before a later one.
Only what has not changed in between is removed, and only if it lacks something for good.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable

from torchft_ckpt.checkpointing.durable.names import CheckpointName, parts_in
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    is_closed,
    list_checkpoints,
    read_checkpoint,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.core.durable.retention import plan_abandoned
from torchft_ckpt.errors import StorageError

logger = logging.getLogger(__name__)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_Look = dict[CheckpointName, tuple[tuple[str, int | None], ...]]


class Leftovers:
    """The checkpoints of one storage that are not whole. For one thread at a time.

    Args:
        storage: where.
        is_shared: all writers write there; else others' parts are elsewhere, and what has any part stays.
        settled_after_s: what nobody has written to for so long was left.
        clock: in seconds.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        is_shared: bool,
        settled_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._is_shared = is_shared
        self._settled_after_s = settled_after_s
        self._clock = clock
        self._seen: tuple[float, _Look] | None = None

    def note_failure(self, error: BaseException | None) -> None:
        """Take the first look, if that is why a save failed.

        Raises:
            StorageError: the storage failed.
        """
        if self._seen is None and isinstance(error, StorageError) and error.errno in _FULL:
            self._seen = self._clock(), self._look()

    def remove(self, in_flight: CheckpointName) -> None:
        """Take the second look, some time after the first, and remove what was left. Without effect if no save found it full.

        Raises:
            StorageError: the storage failed.
        """
        if self._seen is None or self._clock() < self._seen[0] + self._settled_after_s:
            return
        before, self._seen = self._seen[1], None
        for name in plan_abandoned(before, self._look(), in_flight=[in_flight]):
            try:
                if self._is_needed(name):
                    continue
                is_gone = self._storage.remove_checkpoint(str(name))
            except StorageError as error:  # another one may go, and make room
                logger.warning("checkpoint %s, which its writers left, could not be removed: %s", name, error)
            else:
                if is_gone:
                    logger.warning(
                        "checkpoint %s was removed: its writers left it before it was whole, and there was no room",
                        name,
                    )

    def _is_needed(self, name: CheckpointName) -> bool:
        """Whether somebody may have to look at it; or it is whole, and nobody has said so yet."""
        if not self._is_shared:
            return False
        checkpoint = read_checkpoint([self._storage], name)
        return bool(checkpoint.left_aside) or why_not_whole(checkpoint) is None

    def _look(self) -> _Look:
        found: _Look = {}
        for name in list_checkpoints(self._storage):
            entries = self._storage.names(str(name))
            is_kept = is_closed(self._storage, name) if self._is_shared else bool(parts_in(entries))
            if not is_kept:
                found[name] = tuple((entry, self._storage.size(f"{name}/{entry}")) for entry in entries)
        return found
