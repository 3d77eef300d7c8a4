"""The averaging of one round, on a thread of its own: it waits for the quorum and for the others, so inner steps go on.

When the averages are there it votes, so that at the round's end the decision is there as well, whoever else is late. What is
exchanged is known when the quorum is: a replica that turns out to be behind takes part in the others' round.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp
from torch.profiler import record_function

from torchft_ckpt.threads import in_background

if TYPE_CHECKING:
    from torchft_ckpt.outer.manager import OuterManager
    from torchft_ckpt.process_group.quantization import Quantization


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
        """Wait for the averages. Where something went wrong the vote will say so.

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
        self._manager.cast_vote()

    def _average(self, tensors: Iterable[torch.Tensor]) -> None:
        works = [
            self._manager.allreduce(tensor, should_quantize=self._should_quantize)
            if tensor.is_floating_point()
            else self._manager.allreduce(tensor, reduce_op=ReduceOp.SUM)
            for tensor in tensors
        ]
        for work in works:
            work.wait()
