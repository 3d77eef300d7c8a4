"""The averaging of one round, on a thread of its own: it waits for the quorum and for the others, so inner steps go on.

When the averages are there it votes, so that at the round's end the decision is there as well, whoever else is late. What is
exchanged is known when the quorum is: a replica that turns out to be behind takes part in the others' round.

All groups apply it with the outer optimizers' settings of the group that has been in the job longest. A script sets them, a
learning rate above all, by the rounds that it has counted. One that comes into a running job has counted none when its first
round is applied, and may count otherwise than the others later. So each contributor says in the round what its optimizers are
set to: the numbers among what they have defaults for, those in tuples too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp
from torch.profiler import record_function

from torchft_ckpt.core.coordination.messages import name_some
from torchft_ckpt.core.training.outer_schedule import whose_settings_count
from torchft_ckpt.manager.optimizer_settings import set_value, with_inner
from torchft_ckpt.threads import in_background

if TYPE_CHECKING:
    from torchft_ckpt.outer.manager import OuterManager
    from torchft_ckpt.process_group.quantization import Quantization

logger = logging.getLogger(__name__)


class RoundSettings:
    """What is exchanged of the settings: their bits as integers, which a sum keeps where all but one group bring zeros."""

    def __init__(self, manager: OuterManager, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._manager = manager
        self._optimizers = list(optimizers)
        self._own: list[float] | None = None
        self._rows: torch.Tensor | None = None
        self._has_warned = False
        self.num_rounds = 0
        """That this group has applied since it came into the job."""

    def note(self) -> None:
        """A round begins with the settings of now. On the training thread."""
        self._own = [_number(group[key], index) for _, group, key, index in self._settings()]

    def rows(self, device: torch.device) -> list[torch.Tensor]:
        """Return what is to be summed once the quorum is known: a row for each contributor; nothing if nothing is set."""
        rank, num_settings = self._manager.participating_rank(), len(self._settings())
        self._own = None if rank is None else self._own
        rows = torch.zeros(self._manager.num_participants(), 1 + num_settings, dtype=torch.int64, device="cpu")
        if self._own is not None:
            rows[rank, 0] = 1 + self.num_rounds
            rows[rank, 1:] = torch.tensor(self._own, dtype=torch.float64, device="cpu").view(torch.int64)
        self._rows = rows.to(device)
        return [self._rows] if num_settings else []

    def take(self) -> None:
        """The round counts: set the optimizers to what it is applied with. The caller holds the write lock."""
        rows, own = self._rows, self._own
        self._rows = self._own = None
        who = None if rows is None else whose_settings_count(rows[:, 0].tolist())
        if rows is None or who is None:
            return
        settings, said = self._settings(), []
        theirs = rows[who, 1:].cpu().view(torch.float64).tolist()
        for (name, group, key, index), here, there in zip(settings, own or [nan] * len(settings), theirs, strict=True):
            # Who began the round with the same value keeps what the script has made of it since.
            now = group[key]
            if there not in (here, _number(now, index)):
                new = int(there) if isinstance(now, int) and there.is_integer() else there
                set_value(group, key, new if index is None else (*now[:index], new, *now[index + 1 :]))
                said.append(f"{name} is {here:g} here, and {there:g} there")
        if said and own is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s sets its outer optimizer otherwise than the group that has been in the job longest: %s. Each round is applied"
                " with that group's settings, here too. Give the scheduler of an outer optimizer to Manager.scheduler, or set"
                " the value from manager.current_step() after each inner step",
                self._manager.replica_id(),
                name_some(said),
            )

    def _settings(self) -> list[tuple[str, dict[str, Any], str, int | None]]:
        return [
            (f"outer optimizer {number}.param_groups.{place}.{key}", group, key, index)
            for number, optimizer in enumerate(with_inner(self._optimizers))
            for place, group in enumerate(optimizer.param_groups)
            for key, default in sorted(optimizer.defaults.items())
            for index, value in (enumerate(default) if isinstance(default, tuple) else [(None, default)])
            if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
        ]


def _number(value: Any, index: int | None) -> float:
    return float(value if index is None else value[index])


class RoundAverager:
    """Averages one round at a time, beside the inner steps. The training thread calls `start` and `wait`."""

    def __init__(self, manager: OuterManager, should_quantize: bool | Quantization) -> None:
        self._manager = manager
        self._should_quantize = should_quantize
        self._round: Future[None] | None = None
        self._stream = torch.Stream() if torch.accelerator.is_available() else None
        self._done: torch.Event | None = None

    @property
    def in_flight(self) -> bool:
        return self._round is not None

    def start(self, choose: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Average tensors in place, and sum those of integers, once the quorum that was asked for is there.

        Args:
            choose: returns them; called on the thread of the exchange.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())
        self._round = in_background(lambda: self._run(choose), "torchft_ckpt-outer")

    def wait(self) -> None:
        """Wait for the averages. If something went wrong the vote will say so.

        Raises:
            What `Manager.wait_quorum` raises.
        """
        exchange = self._round
        if exchange is not None:
            with record_function("torchft::local_sgd::wait"):
                concurrent.futures.wait([exchange])  # if that is interrupted, the round is still in flight
            self._round = None
            exchange.result()
        if self._done is not None:
            torch.accelerator.current_stream().wait_event(self._done)
            self._done = None

    def abandon(self) -> None:
        """Wait until the round that is in flight is over, however it ends: nobody wants it any more."""
        with contextlib.suppress(Exception):
            self.wait()

    def _run(self, choose: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._manager.wait_quorum()
        if self._stream is None:
            self._average(choose())
        else:
            with self._stream:
                self._average(choose())
                self._done = torch.Event()
                self._done.record(self._stream)
            self._stream.synchronize()
        self._manager.hooks.cast_vote()

    def _average(self, tensors: Iterable[torch.Tensor]) -> None:
        works = [
            self._manager.allreduce(tensor, should_quantize=self._should_quantize)
            if tensor.is_floating_point()
            else self._manager.allreduce(tensor, reduce_op=ReduceOp.SUM)
            for tensor in tensors
        ]
        for work in works:
            work.wait()
