"""Weights that a loop changes between `zero_grad` and `step` and puts back, as SAM does, while another group receives them.

The others stand still while they serve a group that comes in, but not for ever: who is slower than they wait reads on while
they compute.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.replicas import SHORT, Replica
from torch import nn

from torchft_ckpt import HTTPTransport, LighthouseServer

LONG_S = 60.0


class MeetingTransport(HTTPTransport[Any]):
    """Fetches for the first time while its source holds perturbed weights, which is later than the others wait for."""

    def __init__(self) -> None:
        super().__init__(timeout=SHORT, hostname="127.0.0.1", bind="127.0.0.1")
        self.is_about_to_fetch = threading.Event()
        self.source_is_perturbed = threading.Event()
        self.fetch_is_over = threading.Event()

    def fetch_checkpoint(self, sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        is_first, _ = not self.is_about_to_fetch.is_set(), self.is_about_to_fetch.set()
        if is_first:
            assert self.source_is_perturbed.wait(LONG_S)
        try:
            return super().fetch_checkpoint(sources, step, timeout, **how)
        finally:
            self.fetch_is_over.set()


class Group(Replica):
    """A replica group of one."""

    def __init__(self, lighthouse: LighthouseServer, name: str, seed: int, **options: Any) -> None:
        self.transport = MeetingTransport()
        short = timedelta(seconds=1)
        super().__init__(lighthouse, name, seed, checkpoint_transport=self.transport, join_stall_limit=short, **options)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(64, 64)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(self, around: contextlib.AbstractContextManager[None] | None = None) -> None:
        """One step; gradients are those of the weights as they are inside of `around`."""
        self.optimizer.zero_grad()
        self.manager.wait_quorum()
        with around or contextlib.nullcontext():
            self.model(torch.ones(2, 64)).square().mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        self.optimizer.step()

    @contextlib.contextmanager
    def perturbed(self, joiner: MeetingTransport, *, locked: bool) -> Iterator[None]:
        """Other weights meanwhile; if the joiner is about to read, until it has received some or has been refused."""
        lock = self.manager.state_dict_lock.write if locked else contextlib.nullcontext
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        with lock(), torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.5)
        if joiner.is_about_to_fetch.is_set():
            joiner.source_is_perturbed.set()
            assert joiner.fetch_is_over.wait(LONG_S)
        yield
        with lock(), torch.no_grad():
            for parameter, value in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(value)


@pytest.mark.slow
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_a_group_for_which_the_others_wait_no_longer_gets_the_weights_of_a_step_or_none(
    lighthouse: LighthouseServer,
    caplog: pytest.LogCaptureFixture,
    use_async_quorum: bool,
    locked: bool,
) -> None:
    caplog.set_level(logging.WARNING)
    source = Group(lighthouse, "source", 1, use_async_quorum=use_async_quorum)
    for _ in range(3):
        source.train()
    joiner = Group(lighthouse, "joiner", 2, use_async_quorum=use_async_quorum)
    loaded: list[str] = []
    load = joiner.load

    def note(state: dict[str, Any]) -> None:
        load(state)
        loaded.append(str(joiner.bits()))

    def run_joiner() -> None:
        with contextlib.suppress(RuntimeError):  # its Manager is shut down
            while True:
                joiner.train()

    joiner.manager.hooks.registry._load["default"] = note
    thread = threading.Thread(target=run_joiner)
    thread.start()
    held: set[str] = set()
    until = time.monotonic() + LONG_S
    while not (loaded or "healing to step" in caplog.text):
        assert time.monotonic() < until
        held.add(str(source.bits()))
        source.train(source.perturbed(joiner.transport, locked=locked))
    for group in (source, joiner):
        group.manager.shutdown()
    thread.join(LONG_S)
    assert held.issuperset(loaded) and bool(loaded) == locked
    named = [
        r
        for r in caplog.records
        if "written to in place" in r.getMessage() and "it is not served any" in r.getMessage()
    ]
    assert len(named) == (not locked), (
        "the weights of a step were copied before they were written to, or are refused by name"
    )
