"""What is trained beside an outer loop and never exchanged is named in the log, once for each change."""

from __future__ import annotations

import pytest
import torch
from support.fake_outer_manager import FakeOuterManager, Hub
from torch import nn

from torchft_ckpt import DiLoCo, LocalSGD

SYNC_EVERY = 2


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def local_sgd(model: nn.Module, inner: torch.optim.Optimizer) -> LocalSGD:
    return LocalSGD(FakeOuterManager(Hub(1), 0), model, inner, SYNC_EVERY)


def diloco(fragments: list[nn.Module], inner: torch.optim.Optimizer) -> DiLoCo:
    outer = [torch.optim.SGD([p for p in f.parameters() if p.requires_grad], lr=1.0) for f in fragments]
    return DiLoCo(FakeOuterManager(Hub(1), 0), fragments, inner, outer, SYNC_EVERY)


def train(model: nn.Module, inner: torch.optim.Optimizer, num_steps: int = SYNC_EVERY) -> None:
    for _ in range(num_steps):
        inner.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        inner.step()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "torchft_ckpt.outer.loop"]
    caplog.clear()
    return found


def test_parameters_in_no_fragment_that_the_inner_optimizer_trains_are_named_when_the_loop_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco([model[0]], inner):
        (warning,) = warnings(caplog)
        train(model, inner, 2 * SYNC_EVERY)
    assert "trains parameters that are in no module of the outer loop" in warning
    assert "(4: 2 of group 0, of shape (4, 4); 3 of group 0, of shape (4,); 4 of group 0, of shape (2, 4);" in warning
    assert warnings(caplog) == []


def test_they_have_their_names_where_the_inner_optimizer_knows_them(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    diloco([model[:2]], torch.optim.SGD(model.named_parameters(), lr=0.1))  # type: ignore[arg-type]
    assert ["(2: 2.weight, of shape (2, 4); 2.bias, of shape (2,))" in warning for warning in warnings(caplog)] == [
        True
    ]


def test_parameters_that_are_unfrozen_are_named_at_the_next_round_once_for_each_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with local_sgd(model, inner):
        train(model, inner)
        assert warnings(caplog) == []
        model[1].requires_grad_(True)
        train(model, inner, 3 * SYNC_EVERY)
        (warning,) = warnings(caplog)
        assert "need one now (2: 1.weight; 1.bias)" in warning
        model[0].bias.requires_grad_(True)
        train(model, inner, 2 * SYNC_EVERY)
        (warning,) = warnings(caplog)
        assert "need one now (1: 0.bias)" in warning
        model[1].requires_grad_(False)
        train(model, inner)
        assert warnings(caplog) == []
        model[1].bias.requires_grad_(True)
        train(model, inner)
        assert ["(1: 1.bias)" in warning for warning in warnings(caplog)] == [True]


def test_an_unfrozen_parameter_of_one_of_several_fragments_is_named_with_it(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    model[2].bias.requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco([model[:2], model[2:]], inner):
        model[2].bias.requires_grad_(True)
        train(model, inner)
    assert ["(1: 2.bias of fragment 1)" in warning for warning in warnings(caplog)] == [True]


def test_parameters_that_the_inner_optimizer_is_given_later_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    inner = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    with local_sgd(model[:2], inner):
        assert warnings(caplog) == []
        inner.add_param_group({"params": list(model[2].parameters())})
        train(model, inner)
    (warning,) = warnings(caplog)
    assert "(2: 0 of group 1, of shape (2, 4); 1 of group 1, of shape (2,))" in warning


def test_nothing_is_said_of_what_is_frozen_or_exchanged(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco([model[:2]], inner):
        train(model, inner, 2 * SYNC_EVERY)
        model[1].requires_grad_(False)
        model[1].requires_grad_(True)
        train(model, inner, 2 * SYNC_EVERY)
    assert warnings(caplog) == []


def test_parameters_that_need_no_gradient_are_named_once_if_the_script_gives_them_other_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A codebook, or a target network: each round of DiLoCo puts back what it was."""
    model = build()
    model[1].requires_grad_(False)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with diloco([model[:2], model[2:]], inner), torch.no_grad():
        before = model[1].weight.clone()
        model[1].weight.add_(1)
        model[1].weight.copy_(before)  # averaged weights were swapped in, to evaluate
        with torch.enable_grad():
            train(model, inner)
        assert warnings(caplog) == []
        for _ in range(2):
            model[1].weight.add_(1)
            with torch.enable_grad():
                train(model, inner)
        (warning,) = warnings(caplog)
        assert "need no gradient were written to (1: 1.weight)" in warning
        assert torch.equal(model[1].weight, before)
