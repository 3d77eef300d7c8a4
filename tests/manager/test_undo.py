"""What goes back at a discard, what stays, and what it costs: `Undo` with a registry, without other groups."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import nn

from torchft_ckpt import LighthouseServer
from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.manager import undo
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.undo import _MAX_IN_A_ROW, Undo
from torchft_ckpt.manager.volatile import MAX_COPIED_BYTES

count = 7
"""A variable of the script."""


class Loop:
    """A loop's objects, registered."""

    def __init__(self, **parts: object) -> None:
        self.model = nn.Linear(2, 2)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.num_asked = 0
        self.__dict__.update(parts)
        self._names = [*parts]
        self.registry = StateRegistry(StateDictLock(timedelta(seconds=60)))
        self.registry.register("loop", self.load, self.state)
        self.registry.guard(self.sgd)
        self.undo = Undo(self.registry, "group")

    def state(self) -> dict[str, object]:
        self.num_asked += 1
        parts = {name: getattr(self, name) for name in self._names}
        return {"model": self.model.state_dict(), "sgd": self.sgd.state_dict(), **parts}

    def load(self, state: dict[str, object]) -> None: ...

    def step(self, write: Callable[[Loop], object], *, counts: bool = False) -> None:
        self.undo.begin()
        self.undo.forward_begins(is_in_step=True)
        write(self)
        self.undo.end(counts=counts)

    def trains(self) -> None:
        """Make a step that counts, and that leaves state in the optimizer."""
        self.step(lambda _: None, counts=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.sgd.step()


@torch.no_grad()
def write_all(loop: Loop) -> None:
    loop.center = loop.center + 1
    loop.queue.add_(1)
    loop.mean, loop.count = 2.5, loop.count + 1
    loop.norms.append(2.0)
    loop.kept[0].add_(1)
    loop.kept[1] = torch.ones(1)


def test_what_a_discarded_step_wrote_or_bound_anew_goes_back() -> None:
    kept = [torch.zeros(1), torch.zeros(2)]
    loop = Loop(center=torch.zeros(3), queue=torch.zeros(4), mean=1.5, count=7, norms=deque([1.0], 3), kept=kept)
    center, norms = loop.center, loop.norms
    loop.trains()
    for _ in range(2):
        loop.step(write_all)
        assert loop.center is center and not center.any() and not loop.queue.any()
        assert (loop.mean, loop.count, loop.norms) == (1.5, 7, deque([1.0])) and loop.norms is norms
        assert [item.tolist() for item in loop.kept] == [[0.0], [0.0, 0.0]]
    loop.step(write_all, counts=True)
    assert (loop.mean, loop.count, loop.norms, loop.center[0]) == (2.5, 8, deque([1.0, 2.0]), 1.0)


def test_what_a_service_of_this_library_holds_is_not_taken_for_a_part_of_the_loop() -> None:
    """A value of its own that looks like the loop's, say; and all that an event loop leads to is not looked through."""
    loop = Loop(count=7)
    loop.lighthouse = object.__new__(LighthouseServer)
    loop.lighthouse.count = 7
    loop.trains()
    loop.step(lambda it: setattr(it, "count", 8))
    assert (loop.count, loop.lighthouse.count) == (7, 7)


def test_what_this_library_notes_of_optimizers_is_not_taken_for_a_part_of_the_loop() -> None:
    """Copies of what their `state_dict` has returned, of all optimizers of the process."""
    loop = Loop()
    (group,) = loop.sgd.param_groups
    group["boost"] = 3.0
    loop.trains()
    loop.step(lambda _: group.update(boost=4.0))
    assert group["boost"] == 3.0


@pytest.mark.parametrize("theirs", [nn.Module.state_dict, StateRegistry.capture], ids=["torch", "this library"])
def test_a_variable_of_the_script_goes_back_if_its_state_function_says_that_it_is_another_ones(
    theirs: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`functools.wraps` gives a function the name and the module of the one that it calls."""
    monkeypatch.setitem(globals(), "count", 7)

    @functools.wraps(theirs)
    def state() -> dict[str, object]:
        return {"count": count}

    loop = Loop()
    loop.registry.register("script", loop.load, state)
    loop.trains()
    loop.step(lambda _: globals().update(count=8))
    assert globals()["count"] == 7


def test_the_state_functions_are_called_twice_and_at_discards_not_in_each_step() -> None:
    loop = Loop(center=torch.zeros(3))
    for _ in range(4):
        loop.step(lambda _: None, counts=True)
    assert loop.num_asked == 2
    for counts, num_asked in ((False, 2), (True, 3), (True, 3)):
        loop.step(lambda _: None, counts=counts)
        assert loop.num_asked == num_asked


def test_what_came_into_being_in_a_discarded_first_step_is_taken_out_of_dicts_of_the_state_alone() -> None:
    """Not an entry of the same name and value elsewhere; nor a buffer, beside which a flag may say that it is there."""
    loop = Loop(center=torch.zeros(3), averages={}, history={})
    loop.meters = {}

    def first(_: object) -> None:
        loop.averages["w"] = torch.ones(3)
        loop.history["loss"] = loop.meters["loss"] = 0.5
        loop.model.register_buffer("mask", torch.ones(2))

    loop.step(first, counts=False)
    assert loop.averages == {} and loop.meters == {"loss": 0.5}
    assert torch.equal(loop.model.mask, torch.ones(2))


def test_what_changed_after_zero_grad_and_before_the_forward_pass_stays() -> None:
    loop = Loop(mean=1.0)
    loop.trains()
    loop.step(lambda _: None, counts=True)
    loop.undo.begin()
    loop.mean = 2.0
    loop.undo.forward_begins(is_in_step=True)
    loop.mean = 3.0
    loop.undo.end(counts=False)
    assert loop.mean == 2.0


def test_a_look_at_the_model_between_two_steps_is_not_the_forward_pass_of_the_next_one() -> None:
    loop = Loop(mean=1.0)
    loop.trains()
    loop.step(lambda _: None, counts=True)
    loop.undo.forward_begins(is_in_step=False)
    loop.mean = 2.0
    loop.step(lambda loop: loop.__dict__.update(mean=3.0))
    assert loop.mean == 2.0


def test_weights_that_are_written_to_before_a_vote_go_back_from_the_first_step_on() -> None:
    loop = Loop()
    before = loop.model.weight.detach().clone()
    for _ in range(3):
        loop.step(lambda _: loop.model.weight.data.add_(1))  # which autograd does not count
        assert torch.equal(loop.model.weight, before)


def test_a_loop_may_go_back_in_its_next_step_through_what_a_discarded_one_has_computed() -> None:
    """As DCGAN's generator, which learns from the samples of the critic's step. torch counts no write of BatchNorm's."""
    norm = nn.BatchNorm1d(2)
    loop = Loop(mean=norm.running_mean, variance=norm.running_var)
    outputs: list[torch.Tensor] = []
    for counts in (False, True, False):  # all is copied at first
        mean = norm.running_mean.clone()
        loop.step(lambda loop: outputs.append(norm(loop.model(torch.randn(3, 2)))), counts=counts)
        outputs.pop().sum().backward()
        assert torch.equal(norm.running_mean, mean) is not counts


def test_a_parameter_with_gaps_in_memory_goes_back_as_any_other() -> None:
    """As one of every second number of a buffer; torch cannot look at it as bytes where it lies."""
    model = nn.Linear(2, 2)
    model.gate = nn.Parameter(torch.zeros(8)[::2])
    loop = Loop(model=model, sgd=torch.optim.SGD(model.parameters(), lr=0.1))
    for counts in (False, True, False):  # whether the loop writes to it is known from the first step that counts
        before = model.gate.detach().clone()
        loop.step(lambda _: model.gate.data.add_(1), counts=counts)
        assert torch.equal(model.gate, before + counts)


def test_parameters_that_the_loop_replaces_are_those_that_are_compared_and_go_back() -> None:
    """As many, and of another shape: a cloud of points that grows. The layout stayed that of the first ones."""
    loop = Loop()
    loop.trains()
    before = loop.registry.layout()
    loop.model = nn.Linear(2, 3)
    loop.sgd.param_groups[0]["params"][:] = loop.model.parameters()
    loop.sgd.state.clear()
    assert loop.registry.layout() != before
    for counts in (True, False):  # whether the loop writes to them is known from the first step that counts
        weight = loop.model.weight.detach().clone()
        loop.step(lambda loop: loop.model.weight.data.add_(1), counts=counts)
    assert torch.equal(loop.model.weight, weight)


@torch.no_grad()
def perturb(loop: Loop) -> None:
    loop.model.weight.add_(1)


@torch.no_grad()
def perturb_and_restore(loop: Loop) -> None:
    loop.model.weight.add_(1).sub_(1)


def test_weights_that_a_loop_writes_to_and_restores_go_back_though_the_first_step_has_left_no_trace() -> None:
    """As ASAM does it; what it adds and takes away is rounded."""
    loop = Loop()
    loop.model.weight.data.fill_(0.5)
    loop.step(perturb_and_restore, counts=True)
    loop.trains()
    loop.model.weight.data.fill_(1e-9)
    loop.step(perturb_and_restore)
    assert torch.equal(loop.model.weight, torch.full((2, 2), 1e-9))


def test_dicts_and_objects_that_hold_a_part_of_the_state_go_back_as_they_were_bound() -> None:
    """As `best = copy.deepcopy(model)` does it, or `averages = {name: ...}`."""
    loop = Loop(best={"w": torch.zeros(3)}, kept=nn.BatchNorm1d(2), mean=1.0)
    loop.state = lambda: {"best": loop.best, "kept": loop.kept.state_dict()}
    loop.registry.register("more", loop.load, lambda: loop.state())
    loop.trains()
    best, kept = loop.best, loop.kept

    def bind(loop: Loop) -> None:
        loop.best, loop.kept = {"w": torch.ones(3)}, nn.BatchNorm1d(2)
        best["w"].add_(1)

    for _ in range(2):
        loop.step(bind)
        assert loop.best is best and loop.kept is kept and not best["w"].any()
    loop.step(bind, counts=True)
    del loop.best
    loop.step(lambda loop: loop.__dict__.update(best={}))
    assert not hasattr(loop, "best")


def test_weights_without_a_copy_stay_which_is_said_and_go_back_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    loop.trains()
    with caplog.at_level(logging.INFO, "torchft_ckpt"):
        loop.step(perturb)
        perturbed = loop.model.weight.detach().clone()
        for _ in range(3):
            loop.step(perturb)
            assert torch.equal(loop.model.weight, perturbed)
            loop.registry.load({"loop": {}})  # after which the state is looked for anew
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "loop.model.weight" in record.getMessage(), record.getMessage()


@torch.no_grad()
def test_a_large_base_that_nobody_trains_is_not_copied_before_the_first_step_but_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No optimizer state is to come in whose place it would fit. A target as large as what is trained is copied."""
    target = nn.Parameter(torch.zeros(2 * MAX_COPIED_BYTES, dtype=torch.uint8), requires_grad=False)
    for num_trained, is_copied in ((100, False), (MAX_COPIED_BYTES, True)):
        model = nn.Linear(1, num_trained)
        loop = Loop(model=model, target=target, sgd=torch.optim.SGD([*model.parameters(), target], lr=0.1))
        caplog.clear()
        before = target.clone()
        loop.step(lambda loop: loop.target.add_(1))
        assert torch.equal(target, before) == is_copied
        assert ("loop.target" in caplog.text) != is_copied
        before = target.clone()
        loop.step(lambda loop: loop.target.add_(1))
        assert torch.equal(target, before), "it is copied from then on"


def test_what_was_loaded_in_a_step_does_not_go_back() -> None:
    loop = Loop(center=torch.zeros(3))
    loop.trains()

    def load(loop: Loop) -> None:
        loop.center.add_(5)
        loop.registry.load({"loop": {}})

    loop.step(load)
    assert loop.center.tolist() == [5.0, 5.0, 5.0]


def test_a_number_that_makes_each_step_be_discarded_may_change_in_the_end() -> None:
    loop = Loop(scale=4.0)
    loop.trains()
    for _ in range(_MAX_IN_A_ROW + 1):
        assert loop.scale == 4.0
        loop.step(lambda loop: setattr(loop, "scale", 2.0))
    assert loop.scale == 2.0


def test_a_count_that_goes_on_behind_the_vote_goes_back_once_more_as_the_next_try_begins() -> None:
    """Else the loop counts one batch more at each discard: its windows begin at another one, and in each group at its own."""

    def counts(loop: Loop) -> None:
        loop.batches += 1

    loop = Loop(batches=-1, skipped=0)
    loop.trains()
    loop.batches += 1
    for _ in range(3):
        loop.step(counts)
        assert loop.batches == 0
        loop.batches += 1
        loop.skipped += 1  # it moves there alone: so many tries there were
    loop.step(lambda loop: counts(loop) or counts(loop), counts=True)
    assert (loop.batches, loop.skipped) == (2, 3)


def test_what_the_loop_sets_in_answer_to_a_discard_stays_if_it_does_not_move_behind_a_vote_that_counts() -> None:
    """A loss scale of one's own grows after so many good steps in a row: counted in the step, and begun anew at a discard."""

    def counts(loop: Loop) -> None:
        loop.good += 1
        loop.batches += 1

    loop = Loop(good=1000, batches=2000)
    loop.trains()
    for number in range(2):
        loop.step(counts, counts=True)
        loop.batches += 1
        assert (loop.good, loop.batches) == (1001 + number, 2002 + 2 * number)
    loop.step(counts)
    assert loop.good == 1002
    loop.good = 0
    loop.batches += 1
    loop.step(counts, counts=True)
    assert (loop.good, loop.batches) == (1, 2005)


def test_the_place_in_the_data_stays() -> None:
    class Loader:
        def __init__(self) -> None:
            self.place = 3

        def __next__(self) -> int:
            self.place += 1
            return self.place

    class Reads(Loop):
        def __init__(self) -> None:
            self.loader = Loader()
            super().__init__()

        def state(self) -> dict[str, object]:
            return {**super().state(), "place": self.loader.place}

    loop = Reads()
    loop.trains()
    loop.step(lambda _: next(loop.loader))
    assert loop.loader.place == 4


@pytest.mark.parametrize("module", ["logging_utils", "asyncio_trainer", "threading_loop"])
def test_a_class_of_a_script_is_no_service_for_the_beginning_of_its_modules_name(module: str) -> None:
    """What it has is state of a loop, and goes back."""
    assert not undo._is_apart(type("Tracker", (), {"__module__": module}))
    assert undo._is_apart(type("Handler", (), {"__module__": "logging.handlers"}))
