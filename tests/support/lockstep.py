"""Replicas on threads whose managers agree by script: what an outer loop computes, without processes and sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from torchft_ckpt.checkpointing import StateDictLock

T = TypeVar("T")
WAIT_S = 30.0


class Hub:
    """Where the replicas' collectives meet; the sum is taken in the order of ranks.

    Args:
        num_replicas: how many meet.
        outcomes: how the votes end, one after another; committed where none is left.
    """

    def __init__(self, num_replicas: int, outcomes: Sequence[bool] = ()) -> None:
        self.num_replicas = num_replicas
        self.outcomes = list(outcomes)
        self._barrier = threading.Barrier(num_replicas, timeout=WAIT_S)
        self._brought: list[torch.Tensor | None] = [None] * num_replicas

    def mean(self, rank: int, tensor: torch.Tensor) -> None:
        self._brought[rank] = tensor.clone()
        self._barrier.wait()
        brought = [tensor for tensor in self._brought if tensor is not None]
        self._barrier.wait()
        tensor.copy_(mean_of(brought))

    def outcome(self, number: int) -> bool:
        return self.outcomes[number] if number < len(self.outcomes) else True


def mean_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


class DoneWork(Work):
    """Work that is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class ScriptedManager:
    """One replica's manager; all are healthy, always."""

    is_behind = False
    is_restored = False
    has_live_state = False

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._step = 0
        self._num_votes = 0
        self.state_dict_lock = StateDictLock()
        self.num_reduced: list[int] = []
        self.dtypes: set[torch.dtype] = set()
        self.is_torn = False
        self.state: Callable[[], Any] | None = None

    @property
    def is_locked(self) -> bool:
        return self.state_dict_lock.held_for_write()

    def replica_id(self) -> str:
        return f"replica {self._rank}"

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
        *,
        explicitly_locked: bool,
        optimizers: Sequence[torch.optim.Optimizer],
        local_between_syncs: bool,
        after_restore: Callable[[], None] | None,
    ) -> None:
        self.state = state_dict

    def start_quorum(self, **_: object) -> None: ...

    def wait_quorum(self) -> None: ...

    def cast_vote(self) -> None: ...

    def offer_state(self) -> None: ...

    def catch_up(self) -> bool:
        return True

    def is_participating(self) -> bool:
        return True

    is_counted = is_participating
    is_leaving = False

    def current_step(self) -> int:
        return self._step

    quorum_step = current_step

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool | str = False) -> DoneWork:
        self.num_reduced.append(tensor.numel())
        self.dtypes.add(tensor.dtype)
        self._hub.mean(self._rank, tensor)
        return DoneWork()

    def should_commit(self) -> bool:
        committed = self._hub.outcome(self._num_votes)
        self._num_votes += 1
        self._step += committed
        return committed

    def disallow_state_dict_read(self) -> None:
        self.state_dict_lock.acquire_write()

    def allow_state_dict_read(self) -> None:
        self.state_dict_lock.release_write()

    def report_torn_state(self) -> None:
        self.is_torn = True


def run_replicas(num_replicas: int, run: Callable[[int], T]) -> list[T]:
    """Run one function a replica, each on a thread; return what they return."""
    with ThreadPoolExecutor(num_replicas) as pool:
        return [
            future.result(timeout=2 * WAIT_S) for future in [pool.submit(run, rank) for rank in range(num_replicas)]
        ]
