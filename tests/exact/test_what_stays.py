"""What an inner loop moves beside gradients and buffers would depend on which microbatches a group computes: it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.exact_group import Group
from torch import nn

from torchft_ckpt.errors import ConfigError

Make = Callable[..., Group]


class Student(nn.Module):
    """With a teacher, an average of the weights that begins as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(2, 1)
        nn.init.constant_(self.own.weight, 0.1)  # of most numbers nine tenths and a tenth are the same float again
        self.teacher = copy.deepcopy(self.own).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for average, weights in zip(self.teacher.parameters(), self.own.parameters(), strict=True):
                average.data.mul_(0.9).add_(weights.data, alpha=0.1)
        result: torch.Tensor = self.own(rows) * 1e-3 + self.teacher(rows)
        return result


class Clamped(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(rows)


class Late(nn.Module):
    """Makes a buffer as it sees data, or one of another shape."""

    def __init__(self, before: torch.Tensor | None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("center", before)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.center = rows.mean(0)
        result: torch.Tensor = self.linear(rows - self.center)
        return result


def train(group: Group, num_steps: int = 3) -> None:
    for step in group.steps(num_steps=num_steps):
        group.optimizer.zero_grad()
        for batch in step:
            group.model(batch).mean().backward()
        assert group.optimizer.step()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Student(), r"moves default\.model\.teacher\.weight, which is no buffer"),
        (Clamped(2, 1), r"moves default\.model\.weight, which is no buffer"),
        (Late(None), "makes the buffer 'center' of a Late anew"),
        (Late(torch.zeros(1)), "makes the buffer 'center' of a Late anew, or with another shape"),
    ],
    ids=["teacher", "clamp", "new buffer", "other shape"],
)
def test_what_a_forward_pass_moves_beside_buffers_is_refused_by_name(
    make_group: Make, model: nn.Module, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        train(make_group(model))


def test_a_buffer_that_is_made_between_two_steps_is_averaged_from_then_on(make_group: Make) -> None:
    model = Late(None)
    group = make_group(model)
    with torch.no_grad():
        model(torch.zeros(2, 2))
    for step in group.steps(num_steps=1, shuffle=False):
        for batch in step:
            model(batch).mean().backward()
        assert group.optimizer.step()
    assert torch.equal(model.center, torch.arange(16.0).view(8, 2).mean(0))


def test_a_parameter_that_needs_a_gradient_within_a_step_alone_is_refused_by_name(make_group: Make) -> None:
    group = make_group(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    group.model[0].requires_grad_(False)  # type: ignore[index]
    step = next(iter(group.steps()))
    with pytest.raises(ConfigError, match="needed none as the step began"):
        for batch in step:
            group.model.requires_grad_(True)
            group.model(batch).mean().backward()


def test_gradients_of_no_optimizer_are_dropped_with_a_word(make_group: Make, caplog: pytest.LogCaptureFixture) -> None:
    other = nn.Linear(2, 2)
    group = make_group(beside=(other,))
    for step in group.steps(num_steps=2):
        for batch in step:
            group.model(other(batch)).mean().backward()
        assert group.optimizer.step()
    assert len([one for one in caplog.records if "drops the gradients of 2 parameters" in one.getMessage()]) == 1


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_and_buffers_that_have_a_graph_leave_it_in_their_microbatch(make_group: Make) -> None:
    class Follows(nn.Linear):
        center: torch.Tensor

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result = super().forward(rows)
            self.center = self.center * 0.5 + result.mean(0)
            return result

    model = Follows(2, 1)
    model.register_buffer("center", torch.zeros(1))
    group = make_group(model)
    for step in group.steps(num_steps=2):
        for batch in step:
            model(batch).square().mean().mul(1e-4).backward(create_graph=True)
        assert model.weight.grad is not None and not model.weight.grad.requires_grad
        assert not model.center.requires_grad
        assert group.optimizer.step()
