"""What microbatches leave behind is what they leave in a plain loop, of any memory format, dtype and module; or it is refused."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact_group import Group
from torch import nn
from torch._dynamo.testing import CompileCounter

from torchft_ckpt import Checkpointer, Optimizer
from torchft_ckpt.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import plain_steps

Make = Callable[..., Group]
NUM_STEPS = 3


def trained_plainly(
    model: nn.Module, rows: Any, loss_of: Callable[..., torch.Tensor], make_optimizer: Callable[..., Any]
) -> list[torch.Tensor]:
    """Return parameters and buffers after some steps of a plain loop in torch alone."""
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    sizes = {"steps": NUM_STEPS, "global_batch_size": 8, "microbatch_size": 2, "seed": 0}
    with torch.random.fork_rng():
        plain_steps.train(model, loss_of, rows, optimizer, schedule, clip=1.0, **sizes)
    return [*model.parameters(), *model.buffers()]


def trained(group: Group, rows: Any, loss_of: Callable[..., torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    for step in group.steps(rows, num_steps=NUM_STEPS):
        group.optimizer.zero_grad()
        for batch in step:
            loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(group.model.parameters(), 1.0)
        assert group.optimizer.step()
    return [*group.model.parameters(), *group.model.buffers()]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_model_in_channels_last_trains_by_a_fused_optimizer_as_in_a_plain_loop(make_group: Make) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 2)).to(  # type: ignore[call-overload]
        memory_format=torch.channels_last
    )
    rows, plain = torch.randn(20, 3, 5, 5), copy.deepcopy(model)
    fused = functools.partial(torch.optim.AdamW, fused=True)

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch.to(memory_format=torch.channels_last)).square().mean()
        return result

    group = make_group(model, optimizer=fused)
    assert equal(trained(group, rows, loss_of, model), trained_plainly(plain, rows, loss_of, fused))
    assert model[0].weight.grad.stride() == model[0].weight.stride() != (27, 9, 3, 1)  # type: ignore[union-attr, operator]


def test_a_parameter_with_gaps_gets_a_gradient_as_autograd_makes_it(make_group: Make) -> None:
    model = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(torch.randn(3, 4)[:, ::2])
    for batch in next(iter(make_group(model).steps())):
        model(batch).mean().backward()
        made = model.weight.grad
    assert made is not None and model.weight.grad is not None
    assert model.weight.grad is not made and model.weight.grad.stride() == made.stride() != model.weight.stride()


def test_groups_whose_memory_or_buffers_differ_have_other_layouts_in_words(make_group: Make) -> None:
    words = []
    for job, kind in (("a", nn.BatchNorm2d), ("b", nn.BatchNorm2d), ("c", nn.BatchNorm2d), ("d", nn.InstanceNorm2d)):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), kind(4, affine=True))
        if job == "c":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        group = make_group(model, job=job)
        words.append((group.steps(), group.manager.hooks.registry.layout())[1])
    assert words[0] == words[1] and len({one.digest for one in words}) == 3
    assert "buffers default.1.running_mean[4] " in words[0].text and "buffers none" in words[3].text


def test_parameters_that_some_microbatches_do_not_use_train_as_in_a_plain_loop(make_group: Make) -> None:
    class Experts(nn.ModuleList):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self[int(rows[0, 0] > 0)](rows)
            return result

    torch.manual_seed(2)
    model, rows = Experts([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)]), torch.randn(20, 2)
    plain = copy.deepcopy(model)

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        return result

    group = make_group(model, optimizer=torch.optim.AdamW)
    found = trained(group, rows, loss_of, model)
    assert equal(found, trained_plainly(plain, rows, loss_of, torch.optim.AdamW))
    assert not torch.equal(found[0], found[2]) and model[2].weight.grad is None


def test_a_model_in_bfloat16_with_float64_and_single_numbers_trains_as_in_a_plain_loop(make_group: Make) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(2, 3).double(), nn.BatchNorm1d(3).bfloat16()
            self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.norm(self.first(rows.double()).bfloat16()).float() * self.scale
            return result

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (model(batch) - 1.0).square().mean()
        return result

    torch.manual_seed(3)
    model, rows = Mixed(), torch.randn(20, 2)
    plain, one_by_one = copy.deepcopy(model), functools.partial(torch.optim.SGD, foreach=False)
    found = trained(make_group(model, optimizer=one_by_one), rows, loss_of, model)
    assert equal(found, trained_plainly(plain, rows, loss_of, one_by_one))


class Keeps(nn.Module):
    """Without a parameter. It keeps a mean of what it sees in buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("small", torch.tensor([250, 3], dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.wave += torch.complex(rows.mean(0), -rows.mean(0))
        self.small += torch.tensor([4, -2], dtype=torch.int8).to(torch.uint8)
        result: torch.Tensor = self.norm(rows) * self.mask
        return result


def test_buffers_of_modules_that_nothing_trains_are_averaged_whatever_the_collector_knows(make_group: Make) -> None:
    keeps, plain = Keeps(), nn.BatchNorm1d(2, affine=False)
    rows = torch.arange(40.0).view(20, 2)
    gc.freeze()
    try:
        group = make_group(beside=(keeps,))
        for step in group.steps(num_steps=1, shuffle=False):
            for batch in step:
                group.model(keeps(batch)).mean().backward()
            assert group.optimizer.step()
    finally:
        gc.unfreeze()
    means = []
    for batch in rows[:8].split(2):
        plain.reset_running_stats()
        plain(batch)
        means.append(plain.running_mean.clone())  # type: ignore[union-attr]
    assert torch.equal(keeps.norm.running_mean, plain_steps.tree(means) / 4)
    assert keeps.norm.num_batches_tracked == 1
    center = rows[:8].mean(0)
    assert torch.equal(keeps.wave, torch.complex(center, -center))
    assert keeps.small.tolist() == [254, 1] and keeps.mask.tolist() == [True, False]


def test_a_buffer_that_moves_and_has_no_mean_is_refused_by_name(make_group: Make) -> None:
    keeps = Keeps()
    group = make_group(beside=(keeps,))
    step = next(iter(group.steps()))
    with pytest.raises(ConfigError, match=r"moves the buffer default\.mask, and there is no mean of bool"):
        for batch in step:
            group.model(keeps(batch)).mean().backward()
            keeps.mask.fill_(True)
    assert keeps.mask.tolist() == [True, False]


def test_a_buffer_that_moves_in_a_module_whose_state_nobody_returns_is_refused_by_name(make_group: Make) -> None:
    torch._dynamo.utils.counters.pop(
        "frames", None
    )  # of another test: nothing is looked for where anything is compiled
    norm, still = nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(1).eval()
    group = make_group()
    step = next(iter(group.steps()))
    with pytest.raises(ConfigError, match="'num_batches_tracked' of a BatchNorm1d, whose state_dict"):
        for batch in step:
            still(group.model(norm(batch))).mean().backward()


def test_a_compiled_model_trains_as_a_plain_one_and_is_not_compiled_again_after_the_first_step(
    make_group: Make,
) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    plain, counter, frames = copy.deepcopy(model), CompileCounter(), list[int]()
    rows = torch.randn(20, 2)
    compiled = torch.compile(model, backend=counter)

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        frames.append(counter.frame_count)
        return result

    found = trained(make_group(model), rows, loss_of, compiled)  # type: ignore[arg-type]
    assert frames[-1] == frames[3] > 0
    assert equal(found, trained_plainly(plain, rows, loss_of, torch.optim.SGD))


def test_what_no_optimizer_trains_has_no_gradient_after_the_inner_loop(make_group: Make) -> None:
    group = make_group(nn.Sequential(nn.Linear(2, 1)), beside=(other := nn.Linear(2, 2),))
    for step in group.steps(num_steps=2):
        for batch in step:
            group.model(other(batch)).mean().backward()
            assert other.weight.grad is not None
        assert other.weight.grad is None
        assert group.optimizer.step()


@pytest.mark.parametrize("weights", [None, 257.0])
def test_a_mean_of_many_gradients_in_bfloat16_is_rounded_once(make_group: Make, weights: float | None) -> None:
    torch.manual_seed(3)
    group = make_group(nn.Linear(1, 64, bias=False).bfloat16())
    number = 257
    rows = torch.ones(number, 1, dtype=torch.bfloat16)
    for step in group.steps(rows, global_batch_size=number, microbatch_size=1, num_steps=1):
        leaves = []
        for batch in step:
            (group.model(batch) * torch.arange(64.0).bfloat16()).sum().backward()
            leaves.append(group.model.weight.grad.clone() * (weights or 1.0))  # type: ignore[union-attr, operator]
            if weights is not None:
                step.weigh(weights)
        wanted = (plain_steps.tree(leaves).float() / (number * (weights or 1.0))).bfloat16()
        assert torch.equal(group.model.weight.grad, wanted)  # type: ignore[arg-type]
        assert group.optimizer.step()


def scaled(group: Group, scaler: torch.amp.GradScaler, step: Any) -> int:
    computed = 0
    for batch in step:
        scaler.scale(group.model(batch).mean()).backward()
        computed += 1
    return computed


def test_a_gradient_scaler_that_the_manager_does_not_know_is_refused_by_name(make_group: Make) -> None:
    group, scaler = make_group(), torch.amp.GradScaler("cpu")
    step = next(iter(group.steps()))
    scaled(group, scaler, step)
    with pytest.raises(ConfigError, match="needs to know the gradient scaler"):
        scaler.step(group.optimizer)


def test_what_was_computed_at_another_scale_is_computed_again(make_group: Make) -> None:
    group = make_group()
    scaler = group.manager.grad_scaler(torch.amp.GradScaler("cpu", init_scale=8.0))
    counts = []
    for step in group.steps(num_steps=2):
        group.optimizer.zero_grad()
        counts.append(scaled(group, scaler, step))
        if len(counts) in (1, 2):
            group.manager.report_error(RuntimeError("something went wrong"))
        if len(counts) == 1:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
        before = group.model.weight.detach().clone()
        if scaler.step(group.optimizer):
            assert not torch.equal(before, group.model.weight)
        scaler.update()
    assert counts == [4, 4, 0, 4]


def test_a_scaler_is_there_in_a_process_that_scales_nothing_in_its_first_step(make_group: Make) -> None:
    group = make_group()
    scaler = group.manager.grad_scaler(torch.amp.GradScaler("cpu"))
    counts = []
    for step in group.steps(num_steps=1):
        group.optimizer.zero_grad()
        if not counts:
            for batch in step:
                group.model(batch).mean().backward()
            group.manager.report_error(RuntimeError("something went wrong"))
            counts.append((4, group.optimizer.step()))
        else:
            computed = scaled(group, scaler, step)
            scaler.unscale_(group.optimizer)
            counts.append((computed, scaler.step(group.optimizer)))
            scaler.update()
    assert counts == [(4, False), (0, True)]


def test_a_closure_is_refused(make_group: Make) -> None:
    group = make_group()
    step = next(iter(group.steps()))
    for batch in step:
        group.model(batch).mean().backward()
    with pytest.raises(ConfigError, match="closure"):
        group.optimizer.step(lambda: 0.0)


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused_and_has_changed_nothing(make_group: Make) -> None:
    group = make_group()
    group.model.weight.register_post_accumulate_grad_hook(lambda _: group.inner.step())  # type: ignore[union-attr, operator]
    step, before = next(iter(group.steps())), group.model.weight.detach().clone()  # type: ignore[union-attr, operator]
    with pytest.raises(ConfigError, match=r"step\(\) of an optimizer in the inner loop of StepLoader"):
        for batch in step:
            group.model(batch).mean().backward()
    assert torch.equal(before, group.model.weight)  # type: ignore[arg-type]


def test_a_checkpoint_of_a_plain_loop_goes_on_at_its_place_in_the_data_and_says_so_once(
    make_group: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_group(job="plain")
    optimizer = Optimizer(plain.manager, plain.inner)
    for _ in range(3):
        optimizer.zero_grad()
        plain.model(torch.ones(1, 2)).mean().backward()
        assert optimizer.step()
    saver = Checkpointer(tmp_path, manager=plain.manager)
    saver.save()
    saver.shutdown()
    assert plain.manager.state_dict() == {"step": 3, "batches_committed": 3}
    told = []
    for order in ("loads-later", "loads-first"):
        group = make_group(job=order)
        loader = group.steps(num_steps=4, shuffle=False) if order == "loads-later" else None
        caplog.clear()
        restorer = Checkpointer(tmp_path, manager=group.manager)
        restorer.restore()
        restorer.shutdown()
        loader = loader or group.steps(num_steps=4, shuffle=False)
        told.append([r.getMessage() for r in caplog.records if "without StepLoader" in r.getMessage()])
        seen = []
        for step in loader:
            group.optimizer.zero_grad()
            for batch in step:
                seen += batch[:, 0].tolist()
                group.model(batch).mean().backward()
            assert group.optimizer.step()
        assert seen == [8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0]
    assert (
        told
        == [
            ["the state of step 3 was made by a loop without StepLoader: the data go on at position 24 of their stream"]
        ]
        * 2
    )


def test_a_state_of_other_samples_is_refused_by_name(make_group: Make) -> None:
    group = make_group()
    group.steps()
    saved = group.manager.state_dict()
    with pytest.raises(ConfigError, match="no Manager's state"):
        group.manager.load_state_dict({})
    for order in ("loads-later", "loads-first"):
        other = make_group(job=order)
        with pytest.raises(ConfigError, match="seed=0, here 4"):
            if order == "loads-later":
                other.steps(seed=4)
            other.manager.load_state_dict(saved)
            other.steps(seed=4)
