"""A source that notes its steps, and entries that go through the whole format without a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchft_ckpt.checkpointing.fetching.receive import BufferCache, Destination
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.state.format import decode_manifest
from torchft_ckpt.checkpointing.state.redo_entry import RedoEntry, check_entry, entry_of, state_of
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.manager.optimizer_settings import guard_steps
from torchft_ckpt.manager.redo_recording import RedoRecorder, parameters_of

BLOCK_BYTES = 4096


def version(step: int) -> StateVersion:
    return StateVersion(step=step, quorum_id=2, epoch="e")


def snapshot_of(entry: RedoEntry, block_bytes: int = BLOCK_BYTES) -> Snapshot:
    """Return an entry as it is served."""
    return Snapshot(
        state_of(entry),
        step=entry.version.step,
        lock=StateDictLock(),
        pool=BufferPool(block_bytes),
        num_expected=0,
    )


def received(manifest: bytes, content: bytes, parameters: list[list[torch.Tensor]], after: StateVersion) -> RedoEntry:
    """Return the entry that is made of a manifest and a byte space, for these parameters."""
    decoded = decode_manifest(manifest)
    check_entry(decoded, parameters, after)
    destination = Destination(decoded, BufferCache())
    at = 0
    for block in range(destination.num_blocks):
        for view in destination.views(block):
            view[:] = content[at : at + len(view)]
            at += len(view)
    return entry_of(destination.assemble())


def carried(entry: RedoEntry, optimizers: list[torch.optim.Optimizer]) -> RedoEntry:
    """Return an entry as it arrives at a learner with these optimizers."""
    snapshot = snapshot_of(entry)
    content = snapshot.read(0, snapshot.total_bytes) if snapshot.total_bytes else b""
    parameters = [parameters_of(optimizer) for optimizer in optimizers]
    return received(snapshot.manifest_bytes(), content, parameters, entry.after)


@dataclass
class Noted:
    """Takes what a recorder notes."""

    entries: list[RedoEntry] = field(default_factory=list)
    versions: list[StateVersions] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    is_kept: bool = False

    def begin(self, version: StateVersion, num_followers: int, now: float) -> None:
        self.is_kept = True

    def append(self, entry: RedoEntry, versions: StateVersions) -> None:
        self.entries.append(entry)
        self.versions.append(versions)

    def end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.is_kept = False


def bits(tensors: Iterable[Any]) -> list[bytes]:
    """Return values as what cannot compare equal where a bit differs."""
    found = []
    for value in tensors:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            found.append(str(value.dtype).encode() + flat.view(torch.uint8).numpy().tobytes())
        else:
            found.append(repr(value).encode())
    return found


class Source:
    """Optimizers whose steps are noted, as a Manager would have it."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        self.noted = Noted()
        self.is_apart = False
        self.recorder = RedoRecorder(self.noted, lambda: self.optimizers, lambda: self.is_apart)
        self.step = 0
        for optimizer in self.optimizers:
            guard_steps(optimizer, lambda: None, lambda: None, self.recorder)

    def begin(self) -> None:
        """Somebody follows from now on."""
        self.recorder.close()
        self.recorder.announce(version(self.step), 1, 0.0)

    def commit(self) -> None:
        """A step counts, and its optimizers step next."""
        self.recorder.step_counts(version(self.step), version(self.step + 1), 2 * self.step)
        self.step += 1

    def train(self, *, commits: bool = True, set_to_none: bool = True) -> None:
        """Make a step with made-up gradients."""
        self.recorder.close()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        for optimizer in self.optimizers:
            loss = sum((parameter * torch.randn_like(parameter)).sum() for parameter in parameters_of(optimizer))
            loss.backward()  # type: ignore[union-attr]
        if commits:
            self.commit()
            for optimizer in self.optimizers:
                optimizer.step()
