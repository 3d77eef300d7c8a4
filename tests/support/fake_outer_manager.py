"""A manager in memory for outer loops: replicas are threads of one process, and agree by a script.

It shows what an outer loop computes, without processes and sockets. All replicas are healthy, always: none heals or joins. A
loop's `allreduce` blocks until all replicas have come to it. Nobody may change the state while its lock is not held.

    hub = Hub(2, outcomes=[True, False])  # the second vote discards its round, later ones commit
    run_replicas(2, lambda rank: train(FakeOuterManager(hub, rank)))
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp, Work

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.core.training.outer_schedule import OuterSchedule, RoundPlace
from torchft_ckpt.process_group import CompletedWork
from torchft_ckpt.process_group.quantization import Quantization
from torchft_ckpt.testing.conformance import differences

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

    def mean(self, rank: int, tensor: torch.Tensor, *, is_sum: bool = False) -> None:
        """Replace a tensor by the mean, or the sum, of what all replicas bring; returns when all have."""
        self._brought[rank] = tensor.clone()
        self._barrier.wait()
        brought = [tensor for tensor in self._brought if tensor is not None]
        self._barrier.wait()
        tensor.copy_(sum(brought) if is_sum else mean_of(brought))  # type: ignore[arg-type]

    def outcome(self, number: int) -> bool:
        """Whether the vote of this number commits."""
        return self.outcomes[number] if number < len(self.outcomes) else True


def mean_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors, added up in their order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


class FakeOuterManager:
    """One replica's `OuterManager`.

    Args:
        hub: the same for all replicas.
        rank: of this one.
    """

    is_behind = False
    is_restored = False
    has_live_state = False
    is_leaving = False

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._step = 0
        self.num_votes = 0
        self.hooks = self
        self.place = RoundPlace()
        self.outer_schedule: OuterSchedule | None = None
        self.state_dict_lock = StateDictLock()
        self.num_reduced: list[int] = []
        self.dtypes: set[torch.dtype] = set()
        self.is_torn = False
        """The loop has reported that its state is torn."""
        self.state: Callable[[], Any] | None = None
        """What the loop has registered."""
        self._at_release: Any = None

    @property
    def is_locked(self) -> bool:
        """Whether the calling thread holds the lock of the state."""
        return self.state_dict_lock.held_for_write()

    def replica_id(self) -> str:
        return f"replica {self._rank}"

    def guard_optimizer(self, optimizer: torch.optim.Optimizer, /) -> None: ...

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
        /,
        *,
        explicitly_locked: bool,
        optimizers: Sequence[torch.optim.Optimizer],
        local_between_syncs: bool,
        after_restore: Callable[[], None] | None,
    ) -> None:
        self.state = state_dict

    def start_quorum(
        self, *, contributes: bool = True, patience: timedelta | None = None, wait: bool | None = None
    ) -> None: ...

    def wait_quorum(self) -> None: ...

    def cast_vote(self) -> None: ...

    def first_inner_step(self) -> None: ...

    def offer_state(self) -> None: ...

    def catch_up(self) -> bool:
        return True

    def is_participating(self) -> bool:
        return True

    def participating_rank(self) -> int:
        return self._rank

    def num_participants(self) -> int:
        return self._hub.num_replicas

    def is_counted(self) -> bool:
        return True

    def current_step(self) -> int:
        return self._step

    def quorum_step(self) -> int:
        return self._step

    def allreduce(
        self,
        tensor: torch.Tensor,
        /,
        should_quantize: bool | Quantization = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work:
        if reduce_op == ReduceOp.AVG:
            self.num_reduced.append(tensor.numel())
            self.dtypes.add(tensor.dtype)
        self._hub.mean(self._rank, tensor, is_sum=reduce_op != ReduceOp.AVG)
        return CompletedWork([tensor])

    def should_commit(self) -> bool:
        committed = self._hub.outcome(self.num_votes)
        self.num_votes += 1
        self._step += committed
        return committed

    def disallow_state_dict_read(self) -> None:
        """The state has not changed since the lock was let go."""
        self.state_dict_lock.acquire_write()
        if self.state is not None and self._at_release is not None:
            assert differences(self.state(), self._at_release) == []

    def allow_state_dict_read(self) -> None:
        if self.state is not None and self.is_locked:
            self._at_release = copy.deepcopy(self.state())
        self.state_dict_lock.release_write()

    def report_torn_state(self) -> None:
        self.is_torn = True

    def took_step(self, optimizer: torch.optim.Optimizer, /) -> None: ...

    @contextmanager
    def taking_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.report_torn_state()
            raise
        finally:
            self.allow_state_dict_read()


def run_replicas(num_replicas: int, run: Callable[[int], T]) -> list[T]:
    """Run one function a replica, each on a thread; return what they return."""
    with ThreadPoolExecutor(num_replicas) as pool:
        return [
            future.result(timeout=2 * WAIT_S) for future in [pool.submit(run, rank) for rank in range(num_replicas)]
        ]
