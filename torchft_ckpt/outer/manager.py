"""The part of a Manager that an outer loop uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import ReduceOp, Work

if TYPE_CHECKING:
    from torchft_ckpt.checkpointing import StateDictLock
    from torchft_ckpt.core.training.outer_schedule import OuterSchedule, RoundPlace
    from torchft_ckpt.process_group.quantization import Quantization


class OuterHooks(Protocol):
    """What an outer loop tells its partner, and asks of it, beside what a script does: `Hooks` has what each method promises."""

    @property
    def is_restored(self) -> bool: ...

    @property
    def has_live_state(self) -> bool: ...

    place: RoundPlace
    """Where the script is with the state of now. It goes with the state to those who load it, and not into checkpoints."""

    outer_schedule: OuterSchedule | None
    """When the fragments are exchanged, so at which places others can be."""

    def took_step(self, optimizer: torch.optim.Optimizer, /) -> None: ...

    def cast_vote(self) -> None: ...

    def is_counted(self) -> bool: ...

    def first_inner_step(self) -> None: ...


class OuterManager(Protocol):
    """One rank's partner in an outer loop. `Manager` is one; its docstrings say what each method promises."""

    @property
    def hooks(self) -> OuterHooks: ...

    # The state

    @property
    def is_behind(self) -> bool: ...

    @property
    def state_dict_lock(self) -> StateDictLock: ...

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
    ) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...

    def report_torn_state(self) -> None: ...

    def taking_step(self) -> AbstractContextManager[None]: ...

    # A round, which is a step of the Manager

    def start_quorum(
        self, *, contributes: bool = True, patience: timedelta | None = None, wait: bool | None = None
    ) -> None: ...

    def wait_quorum(self) -> None: ...

    def allreduce(
        self,
        tensor: torch.Tensor,
        /,
        should_quantize: bool | Quantization = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work: ...

    def should_commit(self) -> bool: ...

    @property
    def is_leaving(self) -> bool: ...

    def replica_id(self) -> str: ...

    def current_step(self) -> int: ...

    def quorum_step(self) -> int: ...

    def is_participating(self) -> bool: ...

    def participating_rank(self) -> int | None: ...

    def num_participants(self) -> int: ...

    # Between two rounds

    def catch_up(self) -> bool: ...

    def offer_state(self) -> None: ...
