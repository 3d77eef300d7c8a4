"""Ranks of a group, in one process, that save, load and serve states in which a name may stand for several things."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from support.newest import newest_whole
from support.resharding import imagined_rank
from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint
from torchft_ckpt.checkpointing.durable.reading.loading import load_into, load_state
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.dividing import ShareBook
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex
from torchft_ckpt.checkpointing.durable.saving.saver import SaveMode, SaveTask, SaveWorker
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.core.durable.saving import SavingRank, Writers
from torchft_ckpt.manager.volatile import capture_for_save

State = dict[str, Any]
StateOf = Callable[[int], State]
"""Makes the state of a rank, within `imagined_rank`."""


def cut(full: torch.Tensor, rank: int, ranks: Sequence[Any], *dims: int | None) -> torch.Tensor:
    """What a rank of a mesh holds of a tensor that is cut in these dimensions, one for each of the mesh's; None: replicated."""
    mesh = torch.tensor(ranks)
    at = (mesh == rank).nonzero()
    if not len(at):
        return torch.empty((0,) * full.dim())
    for place, dim in enumerate(dims):
        if dim is not None:
            step = -(-full.shape[dim] // mesh.shape[place])
            low = min(int(at[0][place]) * step, full.shape[dim])
            full = full.narrow(dim, low, max(min(step, full.shape[dim] - low), 0))
    return full


def on_mesh(full: torch.Tensor, rank: int, ranks: Sequence[Any], *dims: int | None) -> torch.Tensor:
    """The same as a DTensor, within `imagined_rank`."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    data = cut(full, rank, ranks, *dims).clone()
    return DTensor.from_local(data, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def made(state_of: StateOf, num_ranks: int) -> list[State]:
    """The states of all ranks of a group."""
    states = []
    for rank in range(num_ranks):
        with imagined_rank(rank, num_ranks):
            states.append(state_of(rank))
    return states


class Job:
    """A job that saves to a directory. Each rank of each group remembers what its Checkpointer would.

    Args:
        directory: where to.
        num_ranks: of each group.
        num_replicas: groups.
        is_replicated: as for `Checkpointer`.
        mode: as for `Checkpointer`.
    """

    def __init__(
        self,
        directory: Path,
        num_ranks: int,
        *,
        num_replicas: int = 1,
        is_replicated: bool = True,
        mode: SaveMode = SaveMode.SHARED,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.storage = LocalStorage(directory)
        self.num_ranks, self.num_replicas, self.mode = num_ranks, num_replicas, mode
        self.members = [SavingRank(replica, rank) for replica in range(num_replicas) for rank in range(num_ranks)]
        self.indexes = {
            member: HoldingsIndex(member.rank, num_ranks, is_replicated=is_replicated) for member in self.members
        }
        self.books = {member: ShareBook() for member in self.members}
        self._step = 0

    def save(
        self,
        state_of: StateOf,
        optimizers: Sequence[Any] = (),
        *,
        optimizers_of: Callable[[int], Any] | None = None,
        lost: Collection[int] = (),
    ) -> list[BaseException]:
        """Have all save; return what went wrong.

        `optimizers_of`: those of a rank, if not all have the same. `lost`: groups that died before they wrote anything.
        """
        self._step += 1
        workers: list[SaveWorker] = []
        for member in [member for member in self.members if member.replica not in lost]:
            with imagined_rank(member.rank, self.num_ranks):
                known = optimizers if optimizers_of is None else optimizers_of(member.rank)
                workers.append(self._worker(member, state_of(member.rank), known, lost))
        threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        workers[0].future.exception(60)  # it closes it
        for worker, thread in zip(workers, threads, strict=True):
            worker.leave()
            thread.join(60)
        found = [worker.future.exception(60) for worker in workers]
        return [error for error in found if error is not None]

    def _worker(self, member: SavingRank, state: State, optimizers: Sequence[Any], lost: Collection[int]) -> SaveWorker:
        held = capture_for_save(state, optimizers)
        captured = CapturedState(
            held.state,
            step=self._step,
            own={},
            lock=StateDictLock(),
            pool=BufferPool(64 * 1024),
            index=self.indexes[member],
            group_local_ids=held.group_local_ids,
            owned_ids=held.owned_ids,
            turn=self._step,
        )
        task = SaveTask(
            storage=self.storage,
            name=CheckpointName(self._step, "q1"),
            member=member,
            writers=Writers(self.num_replicas, self.num_ranks, f"group_{member.replica}", 1 + len(lost)),
            mode=self.mode,
            is_storage_shared=True,
            fill_after_s=0.3,
            timeout_s=60.0,
        )
        return SaveWorker(task, captured, self.books[member], who_is_lost=(lambda _: lost) if lost else None)

    @property
    def checkpoint(self) -> Checkpoint:
        return newest_whole([self.storage])

    def load(self, state_of: StateOf, num_ranks: int | None = None, *, restores: bool = False) -> list[State]:
        """Load into the states of all ranks of a group, of as many ranks as it had or of another number; return them.

        With `restores` as `Checkpointer.restore` does, else as `load`.
        """
        loaded: list[State] = []
        for rank in range(num_ranks or self.num_ranks):
            with imagined_rank(rank, num_ranks or self.num_ranks):
                state = state_of(rank)
                reader = CheckpointReader(self.checkpoint, num_threads=1)
                reader.read_as(rank, num_ranks or self.num_ranks)
                if restores:
                    loaded.append(
                        load_state(
                            reader.checkpoint,
                            reader.read_own,
                            LocalState(state),
                            replica_id="",
                            rank=rank,
                            in_place=True,
                        )
                    )
                    continue
                load_into(reader, state, reader.read_own)
                loaded.append(state)
        return loaded


def local(tensor: torch.Tensor) -> list[Any]:
    """What is here of a tensor."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).tolist()
