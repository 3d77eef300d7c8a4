"""From the decision on a step until the optimizers have taken it, the state is not the one that the step's number names."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.every_line import AtLine
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.replicas import ends, lighthouse_of, manager_of
from support.thoroughness import by_default
from torch.distributed.checkpoint.state_dict import _init_optim_state

from torchft_ckpt import Checkpointer, Optimizer
from torchft_ckpt.checkpointing.durable.reading.loading import load_checkpoint
from torchft_ckpt.errors import CheckpointError, ConfigError

STRIDE = by_default(29, thorough=1)
"""Of the lines of a step at which something happens, every so manyth is tried."""


class Group:
    """A lone replica group, of which the weights say how many steps they hold."""

    def __init__(self, address: str, directory: Path | None = None, **options: Any) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.bias = torch.nn.Parameter(torch.zeros(2))
        self.sgd = torch.optim.SGD([self.weight, self.bias], lr=1.0, foreach=False)
        self.other = torch.nn.Parameter(torch.zeros(2))
        self.second = torch.optim.SGD([self.other], lr=1.0, foreach=False)
        self.manager = ends(
            manager_of(
                address,
                lambda _: None,
                lambda: {"weight": self.weight.data, "bias": self.bias.data, "other": self.other.data},
                pg=FakeProcessGroup(FakeFabric(), timedelta(seconds=20)),
                use_async_quorum=False,
                **options,
            )
        )
        if directory is not None:
            self.checkpointer = Checkpointer(directory, manager=self.manager, redundancy=1)

    def backward(self) -> None:
        """Leave gradients that take one from each weight."""
        for parameter in (self.weight, self.bias, self.other):
            parameter.grad = torch.ones_like(parameter)

    def start_anew(self) -> None:
        """Restore step 0, whatever was here."""
        with torch.no_grad():
            for parameter in (self.weight, self.bias, self.other):
                parameter.zero_()
        self.manager.load_state_dict({"step": 0, "batches_committed": 0})

    def held(self) -> set[float]:
        """Return how many steps each of the first optimizer's weights holds."""
        return {-value for value in (*self.weight.tolist(), *self.bias.tolist())}


@pytest.fixture
def address() -> str:
    return lighthouse_of(1).address()


def wrapped(group: Group) -> Callable[[], None]:
    """A loop with `Optimizer`."""
    optimizer = Optimizer(group.manager, group.sgd)

    def step() -> None:
        optimizer.zero_grad()
        group.backward()
        optimizer.step()

    return step


def raw(group: Group) -> Callable[[], None]:
    """A loop that steps a guarded optimizer itself."""
    group.manager.guard_optimizer(group.sgd)

    def step() -> None:
        group.manager.start_quorum()
        group.backward()
        with group.manager.taking_step():
            if group.manager.should_commit():
                group.sgd.step()

    return step


@pytest.mark.parametrize("loop", [wrapped, raw])
def test_a_step_that_is_interrupted_anywhere_is_whole_or_torn(
    address: str, loop: Callable[[Group], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(address)
    step, num_torn, wrong, line = loop(group), 0, [], 0
    caplog.set_level(logging.CRITICAL)

    def interrupt() -> None:
        raise KeyboardInterrupt

    while True:
        line += STRIDE
        group.start_anew()
        step()
        at = AtLine(line, interrupt)
        try:
            with at.watching():
                step()
        except KeyboardInterrupt:
            torch.set_grad_enabled(True)  # torch may have been about to do so, at the end of its own step
        if not at.where:
            break
        group.manager.newest_step_of_peers()  # the step is over, as the next one begins
        if group.manager.view().torn:
            num_torn += 1
        elif group.held() != {float(group.manager.current_step())}:
            wrong.append((at.where, group.held(), group.manager.current_step()))
    group.manager.shutdown()
    assert wrong == []
    assert num_torn * STRIDE >= 200, (num_torn, line)


def saved_steps(directory: Path) -> tuple[list[int], list[str]]:
    """Return the steps of the checkpoints, and what is wrong with any of them."""
    steps, wrong = [], []
    for path in directory.glob("step-*"):
        state: dict[str, Any] = {
            "weight": torch.zeros(3),
            "bias": torch.zeros(2),
            "torchft": {"step": 0, "batches_committed": 0},
        }
        load_checkpoint(path, state)
        step = state["torchft"]["step"]
        held = {-value for value in (*state["weight"].tolist(), *state["bias"].tolist())}
        if held != {float(step)} or state["torchft"]["batches_committed"] != step:
            wrong.append(f"{path.name} has {held} of step {step}, {state['torchft']}")
        steps.append(step)
    return steps, wrong


@pytest.mark.parametrize("loop", [wrapped, raw])
def test_a_save_at_any_line_is_of_one_step(
    address: str, tmp_path: Path, loop: Callable[[Group], Callable[[], None]]
) -> None:
    group = Group(address, tmp_path)
    step, line = loop(group), 0
    step()
    futures: list[Future[Any]] = []

    def save() -> None:
        futures.append(group.checkpointer.save())
        if len(group.held()) > 1:  # the optimizer is between two parameters
            with pytest.raises(CheckpointError, match=r"in the middle of a step.*use Manager.leave_on"):
                futures[-1].result()

    at = AtLine(1, save)
    while at.where or not line:
        line += STRIDE
        at = AtLine(line, save)
        with at.watching():
            step()
        step()
        group.checkpointer.wait()
    group.manager.shutdown()
    assert saved_steps(tmp_path)[1] == []
    assert [future.exception(20) for future in futures] == [None] * len(futures)


def test_a_handler_of_a_signal_saves_when_the_step_is_over(address: str, tmp_path: Path) -> None:
    group = Group(address, tmp_path)
    group.sgd.register_step_post_hook(lambda *_: signal.raise_signal(signal.SIGALRM))
    futures: list[Future[Any]] = []
    before = signal.signal(signal.SIGALRM, lambda *_: futures.append(group.checkpointer.save()))
    step = wrapped(group)
    try:
        step()
        assert not futures[0].done(), "the save waits for the end of the step"
        step()
        assert futures[0].result(60).step == 1
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(CheckpointError, match="in the middle of a step"):
        group.sgd.register_step_pre_hook(lambda *_: group.manager.state_dict() and None)
        step()


def test_a_handler_that_interrupts_a_save_gets_what_becomes_of_that_one(address: str, tmp_path: Path) -> None:
    """Else two would write one checkpoint, and a step would wait for the second alone before it changes the state."""
    group = Group(address, tmp_path)
    futures: list[Future[Any]] = []
    group.manager.register_state_dict_fn(
        "more", lambda _: None, lambda: {"saved": saves and (signal.raise_signal(signal.SIGALRM) or 1)}
    )
    before = signal.signal(signal.SIGALRM, lambda *_: futures.append(group.checkpointer.save()))
    step, saves = wrapped(group), False
    try:
        step()
        saves = True
        saved = group.checkpointer.save()
        saves = False
        assert not futures[0].done() and saved.result(60).step == 1
        step()
        assert futures[0].result(60) is saved.result()
    finally:
        signal.signal(signal.SIGALRM, before)
        group.manager.shutdown()


def test_a_save_in_a_step_that_is_never_ended_says_so(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(address, tmp_path)
    futures: list[Future[Any]] = []

    def interrupt(*_: object) -> None:
        futures.append(group.checkpointer.save())
        raise KeyboardInterrupt

    step = wrapped(group)
    group.sgd.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step()
    assert "was interrupted in step 0, which counts" in caplog.text
    group.manager.shutdown()
    assert isinstance(futures[0].exception(20), CheckpointError)
    assert "a save that was asked for in the middle of a step: this rank has no part in the save" in caplog.text
    assert saved_steps(tmp_path) == ([], [])


def test_a_save_within_the_users_own_write_is_made_at_once(address: str, tmp_path: Path) -> None:
    group = Group(address, tmp_path)
    wrapped(group)()
    with group.manager.state_dict_lock.write():
        future = group.checkpointer.save()
    assert future.result(60).step == 1


def test_a_loop_that_skips_after_the_vote_goes_on_and_saves_what_is_here(address: str, tmp_path: Path) -> None:
    """As one does whose averaged gradients have overflowed: all groups do it alike."""
    group = Group(address, tmp_path)
    group.manager.guard_optimizer(group.sgd)
    for skips in (False, True, False):
        group.manager.start_quorum()
        group.backward()
        if group.manager.should_commit() and not skips:
            group.sgd.step()
        if skips:  # no optimizer has stepped, so these are the weights of step 1
            assert group.manager.state_dict() == {"step": 1, "batches_committed": 1}
        group.checkpointer.save().result(60)
    assert (group.manager.current_step(), group.held(), group.manager.view().torn) == (3, {2.0}, False)


def test_two_guarded_optimizers_take_a_step_together(address: str, tmp_path: Path) -> None:
    """The second time it is known that a step is not taken before both have ended."""
    group = Group(address, tmp_path)
    both = (group.sgd, group.second)
    for optimizer in both:
        group.manager.guard_optimizer(optimizer)
    for _ in range(2):
        group.manager.start_quorum()
        group.backward()
        assert group.manager.should_commit()
        group.sgd.step()
        future = group.checkpointer.save()
        group.checkpointer.wait()
        is_early = future.done()
        group.second.step()
    assert not is_early
    group.manager.start_quorum()
    assert future.result(60).step == 2


# --------------------------------------------------------------- optimizers that step without a decision, and loops that spin


def test_an_optimizer_that_steps_before_the_vote_is_refused_in_the_first_step(address: str) -> None:
    group = Group(address)
    optimizer = Optimizer(group.manager, group.sgd)
    group.backward()
    group.sgd.step()  # before the first step of the job it may: torch makes its state so
    optimizer.zero_grad()
    group.backward()
    with pytest.raises(ConfigError, match=r"SGD steps, and step 0 is not decided yet.*train by itself"):
        group.sgd.step()
    assert group.held() == {1.0}


def test_an_optimizer_that_steps_in_a_discarded_step_is_refused(address: str) -> None:
    group = Group(address)
    group.manager.guard_optimizer(group.sgd)
    group.manager.start_quorum()
    group.backward()
    group.manager.report_error(ValueError("a bad batch"))
    group.manager.should_commit()
    with pytest.raises(ConfigError, match="SGD steps, and step 0 was discarded"):
        group.sgd.step()
    assert group.held() == {0.0}
    group.manager.shutdown()
    group.sgd.step()  # a script may train on without the job


def test_a_wrapper_is_known_by_its_optimizer_whatever_object_calls(address: str) -> None:
    """As Lightning's Fabric does: its object calls the wrapper's `zero_grad` as its own, and `step` of the wrapper."""
    group = Group(address)
    both = [Optimizer(group.manager, optimizer) for optimizer in (group.sgd, group.second)]
    twins = [object.__new__(Optimizer) for _ in both]
    for twin, optimizer in zip(twins, both, strict=True):
        twin.__dict__ = optimizer.__dict__
    for _ in range(3):
        for twin in twins:
            twin.zero_grad()
        group.backward()
        assert [optimizer.step() for optimizer in both] == [True, True]
    assert (group.manager.current_step(), group.held(), set(group.other.tolist())) == (3, {3.0}, {-3.0})


def test_torch_makes_an_optimizers_first_state_in_any_step(address: str) -> None:
    group = Group(address)
    adam = torch.optim.AdamW([group.weight])
    Optimizer(group.manager, adam).zero_grad()
    _init_optim_state(adam)
    assert adam.state and group.held() == {0.0}


def test_a_step_that_was_discarded_is_asked_for_once(address: str) -> None:
    group = Group(address)
    optimizer = Optimizer(group.manager, group.sgd)
    optimizer.zero_grad()
    group.backward()
    group.manager.report_error(ValueError("a bad batch"))
    assert not optimizer.step()
    with pytest.raises(
        ConfigError, match=r"step 0 was discarded, and its optimizer steps again.*zero_grad in each iter"
    ):
        optimizer.step()
    group.manager.start_quorum()
    group.manager.report_error(ValueError("a bad batch"))
    group.manager.should_commit()
    group.manager.allreduce(torch.ones(1))
    with pytest.raises(ConfigError, match=r"was discarded, and 1 collectives were issued since.*start_quorum"):
        group.manager.should_commit()
