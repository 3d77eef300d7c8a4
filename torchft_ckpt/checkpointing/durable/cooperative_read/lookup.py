"""Finds the newest checkpoint that the ranks of a group can read whole, over the storages of all of them together.

Each says which manifests it sees. Each manifest is read by one of those who see it, who tells the others, so that all of them
put together the same. It reads manifests; no tensor is read here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from torchft_ckpt.checkpointing.durable.cooperative_read.ranks import Ranks
from torchft_ckpt.checkpointing.durable.format.manifest import decode_part, encode_part
from torchft_ckpt.checkpointing.durable.names import CheckpointName, PartName, parse_checkpoint, parse_part, parts_in
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    SavedPart,
    list_checkpoints,
    read_checkpoint,
    read_part,
    tell_of,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, StorageError

logger = logging.getLogger(__name__)
MAX_CANDIDATES = 64
"""Checkpoints that a rank speaks of, the newest; retention keeps fewer."""


class Found(NamedTuple):
    """A whole checkpoint."""

    checkpoint: Checkpoint
    """All of its parts; without a storage those that cannot be read from here."""
    readers: Mapping[PartName, frozenset[int]] | None = None
    """The ranks that can read each part; None where all of them can read everything."""
    is_shared: bool = False
    """A rank sees something of it in the storage that all groups see."""


class _Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifests that a rank sees, by checkpoint; and why it could not list a storage."""

    checkpoints: dict[str, list[str]]
    shared: list[str] = []
    """The checkpoints of which it sees some in the storage that all groups see."""
    failure: str = ""
    is_blind: bool = False
    """It could list no storage."""


class _Shown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifests that a rank has read for all of them; and why parts do not count."""

    texts: dict[str, str]
    left_aside: list[str]


_decode_seen = msgspec.json.Decoder(_Seen).decode
_decode_shown = msgspec.json.Decoder(_Shown).decode


class Candidates:
    """The checkpoints that a start may go on from. All ranks of a group call the same methods.

    Args:
        storages: where to look: the storage that all share, this host's own disk, or both.
        step: only of this step.
        shared: the one that all groups see.
    """

    def __init__(
        self, storages: Sequence[Storage], ranks: Ranks, *, step: int | None, shared: Storage | None = None
    ) -> None:
        self._shared = shared
        self._storages = storages
        self._ranks = ranks
        self._step = step
        self._damaged: dict[str, str] = {}
        self._here: dict[str, dict[str, list[Storage]]] = {}
        """By checkpoint and manifest, the storages in which this rank sees it."""
        self.has_written = False
        """A damaged one was read in part, to where it is wanted."""

    def newest(self) -> Found:
        """Return the newest that is whole and that nothing is known against. Each that is skipped is logged in one line.

        Raises:
            CheckpointNotFoundError: there is none; the message says what was skipped, and why.
            StorageError: no storage could be listed.
        """
        failure, mine = self._look()
        seen = self._ranks.say("what it sees", mine, _decode_seen)
        names = {parsed for one in seen for name in one.checkpoints if (parsed := parse_checkpoint(name)) is not None}
        failures = [one.failure for one in seen if one.failure]
        if any(one.is_blind for one in seen) and not names:
            raise failure or StorageError(failures[0], "storage")
        skipped = sorted(set(failures))
        for name in sorted(names, reverse=True):
            if str(name) not in self._damaged:
                found = self._put_together(name, [one.checkpoints.get(str(name), ()) for one in seen])
                reason = why_not_whole(found.checkpoint)
                if reason is None and found.readers is not None and self._ranks.transport is None:
                    reason = "not all ranks can read all of it"
                if reason is None:
                    tell_of(found.checkpoint)
                    return found._replace(is_shared=found.is_shared or any(str(name) in one.shared for one in seen))
                logger.warning("checkpoint %s is skipped: %s", name, reason)
                skipped.append(f"{name}: {reason}")
        what = "no whole checkpoint" if self._step is None else f"no whole checkpoint of step {self._step}"
        where = ", ".join(storage.location for storage in self._storages) or "no storage"
        together = f", as {len(seen)} ranks together see it" if len(seen) > 1 else ""
        why = f" (skipped: {some_of(skipped)})" if skipped else ""
        damaged = "; ".join(f"{name}: {reason}" for name, reason in self._damaged.items())
        why += f"; damaged: {damaged}" if damaged else ""
        cause = failure or (StorageError(failures[0], "storage") if failures else None)
        raise CheckpointNotFoundError(f"there is {what} in {where}{together}{why}", where) from cause

    def leave_out(self, checkpoint: Checkpoint, error: CheckpointDamagedError) -> None:
        """Its bytes are not as they were written."""
        why = self._damaged[str(checkpoint.name)] = str(error).encode(errors="replace").decode()  # it may name files
        logger.warning("checkpoint %s is skipped: %s", checkpoint.name, why)
        self.has_written = self.has_written or error.state_overwritten

    def _look(self) -> tuple[StorageError | None, _Seen]:
        """Return what this rank sees; and the error of a storage that it could not list."""
        self._here.clear()
        is_alone = self._ranks.num_ranks == 1  # then manifests are listed when they are read
        shared: list[str] = []
        failures: list[StorageError] = []
        for storage in self._storages:
            try:
                wanted = [str(name) for name in list_checkpoints(storage) if self._step in (None, name.step)]
                for name in wanted if is_alone else wanted[:MAX_CANDIDATES]:
                    here = self._here.setdefault(name, {})
                    for part in () if is_alone else parts_in(storage.names(name)):
                        here.setdefault(part.manifest, []).append(storage)
                    shared += [name] if storage is self._shared and not is_alone else []
            except StorageError as error:
                failures.append(error)
                logger.warning("storage %s is left aside: %s", storage.location, error)
        newest = sorted(self._here, reverse=True)[: None if is_alone else MAX_CANDIDATES]
        listed = {name: sorted(self._here[name]) for name in newest}
        is_blind = bool(failures) and len(failures) == len(self._storages)
        why = str(failures[0]).encode(errors="replace").decode() if failures else ""
        return (failures[0] if failures else None), _Seen(listed, shared, why, is_blind)

    def _put_together(self, name: CheckpointName, seen: Sequence[Sequence[str]]) -> Found:
        """Return the parts of a checkpoint that any rank can read, and who can read which; `seen`: manifests, by rank."""
        if len(seen) == 1:
            alone = read_checkpoint(self._storages, name)
            return Found(alone, is_shared=any(part.storage is self._shared for part in alone.parts))
        seeing: dict[str, list[int]] = {}
        for rank, files in enumerate(seen):
            for file in files:
                seeing.setdefault(file, []).append(rank)
        places = {file: ranks[number % len(ranks)] for number, (file, ranks) in enumerate(sorted(seeing.items()))}
        here = self._here.get(str(name), {})
        texts: dict[str, str] = {}
        left_aside: list[str] = []
        for file in (file for file, rank in places.items() if rank == self._ranks.rank):
            part = parse_part(file)
            read = "it is gone" if part is None or file not in here else read_part(here[file][0], name, part)
            if isinstance(read, str):
                left_aside.append(f"{name}/{file}: {read}".encode(errors="replace").decode())
            else:
                texts[file] = encode_part(read.manifest).decode()
        shown = self._ranks.say(f"manifests of {name}", _Shown(texts, left_aside), _decode_shown)
        parts: list[SavedPart] = []
        readers: dict[PartName, frozenset[int]] = {}
        for file, text in sorted((file, text) for one in shown for file, text in one.texts.items()):
            if (part := parse_part(file)) is not None:
                manifest = decode_part(text.encode(), name, part)
                parts += [SavedPart(manifest, storage) for storage in here.get(file, ())] or [SavedPart(manifest, None)]
                readers[part] = frozenset(seeing[file])
        is_partial = any(len(able) < len(seen) for able in readers.values())
        checkpoint = Checkpoint(name, parts, [why for one in shown for why in one.left_aside])
        return Found(checkpoint, readers if is_partial else None)
