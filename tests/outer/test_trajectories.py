"""What LocalSGD, DiLoCo and Streaming DiLoCo compute, bit by bit and inner step by inner step, beside the plain algorithms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_outer_manager import FakeOuterManager, Hub, run_replicas
from support.outer_reference import (
    Bits,
    adamw,
    bits_of,
    build_model,
    diloco,
    fragments_of,
    local_sgd,
    nesterov,
    train_step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchft_ckpt import DiLoCo, LocalSGD
from torchft_ckpt.errors import CheckpointError, StateMismatchError
from torchft_ckpt.outer.fragment import PseudoGradientFragment

pytestmark = pytest.mark.slow

SYNC_EVERY = 6
NUM_INNER_STEPS = 26
DELAYS = [(fragments, delay) for fragments in (1, 2, 3) for delay in range(SYNC_EVERY // fragments)]


def run_diloco(
    num_fragments: int,
    delay: int,
    alpha: float,
    *,
    num_replicas: int = 2,
    shares_outer: bool = False,
    outcomes: Sequence[bool] = (),
    retries: int = 0,
    build: Callable[[], nn.Sequential] = build_model,
    managers: list[FakeOuterManager] | None = None,
    **kwargs: Any,
) -> list[list[Bits]]:
    hub = Hub(num_replicas, outcomes)

    def run(rank: int) -> list[Bits]:
        model = build()
        manager = FakeOuterManager(hub, rank)
        if managers is not None:
            managers.append(manager)
        fragments = fragments_of(model, num_fragments)
        outer = nesterov(model.parameters()) if shares_outer else [nesterov(f.parameters()) for f in fragments]
        inner = adamw(model)
        history = []
        loop = DiLoCo(
            manager,
            fragments,
            inner,
            outer,
            SYNC_EVERY,
            fragment_sync_delay=delay,
            fragment_update_alpha=alpha,
            round_retries=retries,
            **kwargs,
        )
        with loop:
            for inner_step in range(NUM_INNER_STEPS):
                train_step(model, inner, rank, inner_step)
                history.append(bits_of_locals(model))
        return history

    return run_replicas(num_replicas, run)


def bits_of_locals(model: nn.Module) -> Bits:
    plain = [p.to_local() if isinstance(p, DTensor) else p for p in (q.detach() for q in model.parameters())]
    return [tensor.clone().view(torch.int64) for tensor in plain]


def expect_diloco(num_fragments: int, delay: int, alpha: float, **kwargs: Any) -> list[list[Bits]]:
    return diloco(
        num_replicas=kwargs.pop("num_replicas", 2),
        num_fragments=num_fragments,
        sync_every=SYNC_EVERY,
        delay=delay,
        alpha=alpha,
        num_inner_steps=NUM_INNER_STEPS,
        make_inner=adamw,
        make_outer=nesterov,
        **kwargs,
    )


def first_difference(one: list[list[Bits]], other: list[list[Bits]]) -> str:
    """Name the first inner step, replica and parameter that differ; empty where nothing does."""
    for inner_step in range(NUM_INNER_STEPS):
        for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            for index, (a, b) in enumerate(zip(mine[inner_step], theirs[inner_step], strict=True)):
                if not torch.equal(a, b):
                    return f"inner step {inner_step + 1}, replica {rank}, parameter {index}"
    return ""


@pytest.mark.parametrize("shares_outer", [False, True], ids=["outer each", "outer shared"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("num_fragments", "delay"), DELAYS)
def test_every_fragment_and_every_step_is_that_of_the_plain_algorithm(
    num_fragments: int, delay: int, alpha: float, shares_outer: bool
) -> None:
    actual = run_diloco(num_fragments, delay, alpha, shares_outer=shares_outer)

    assert first_difference(actual, expect_diloco(num_fragments, delay, alpha, shares_outer=shares_outer)) == ""


@pytest.mark.parametrize(("num_fragments", "delay"), DELAYS)
def test_a_discarded_round_takes_its_fragment_back_parameters_and_inner_optimizer(
    num_fragments: int, delay: int
) -> None:
    outcomes = [False, True, False, False, True]

    actual = run_diloco(num_fragments, delay, 0.5, outcomes=outcomes)

    assert first_difference(actual, expect_diloco(num_fragments, delay, 0.5, outcomes=outcomes)) == ""


@pytest.mark.parametrize(("num_fragments", "delay"), DELAYS)
def test_a_round_that_is_tried_again_loses_nothing(num_fragments: int, delay: int) -> None:
    outcomes = [False, True, True, False, True, False, False]

    actual = run_diloco(num_fragments, delay, 0.5, outcomes=outcomes, retries=1)

    assert first_difference(actual, expect_diloco(num_fragments, delay, 0.5, outcomes=outcomes, retries=1)) == ""


@pytest.mark.parametrize("cap_bytes", [1, 8, 100, 288, 289, 1000, 10**6])
def test_buckets_of_any_size_give_what_single_tensors_give(cap_bytes: int) -> None:
    managers: list[FakeOuterManager] = []

    actual = run_diloco(2, 1, 0.5, use_bucketization=True, bucket_cap_mb=cap_bytes / 2**20, managers=managers)

    assert first_difference(actual, expect_diloco(2, 1, 0.5)) == ""
    assert max(managers[0].num_reduced) <= max(1, cap_bytes // 8)


def test_three_replicas_agree_as_two_do() -> None:
    actual = run_diloco(3, 1, 0.5, num_replicas=3)

    assert first_difference(actual, expect_diloco(3, 1, 0.5, num_replicas=3)) == ""


@pytest.fixture
def mesh(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("num_fragments", [1, 2, 3])
def test_shards_of_dtensors_are_trained_as_plain_tensors_are(mesh: DeviceMesh, num_fragments: int) -> None:
    def build() -> nn.Sequential:
        model = build_model()
        for index, layer in enumerate(model):
            for name, param in list(layer.named_parameters()):
                placement = Shard(0) if index % 2 else Replicate()
                layer.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [placement])))
            layer.register_forward_pre_hook(lambda _, inputs: (as_dtensor(inputs[0], mesh),))
        model.register_forward_hook(lambda _, __, output: output.full_tensor())
        return model

    actual = run_diloco(num_fragments, 1, 0.5, num_replicas=1, outcomes=[True, False, True], build=build)

    expected = expect_diloco(num_fragments, 1, 0.5, num_replicas=1, outcomes=[True, False, True])
    assert first_difference(actual, expected) == ""


def as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return tensor if isinstance(tensor, DTensor) else distribute_tensor(tensor, mesh, [Replicate()])


@pytest.mark.parametrize("outcomes", [[], [True, False, True, False, False]], ids=["all commit", "some are discarded"])
def test_local_sgd_averages_parameters_and_discards_local_steps_with_the_round(outcomes: list[bool]) -> None:
    hub = Hub(2, outcomes)

    def run(rank: int) -> list[Bits]:
        model, history = build_model(), []
        inner = adamw(model)
        with LocalSGD(FakeOuterManager(hub, rank), model, inner, 4, round_retries=0):
            for inner_step in range(NUM_INNER_STEPS):
                train_step(model, inner, rank, inner_step)
                history.append(bits_of(model))
        return history

    expected = local_sgd(
        num_replicas=2, sync_every=4, num_inner_steps=NUM_INNER_STEPS, make_inner=adamw, outcomes=outcomes
    )
    assert first_difference(run_replicas(2, run), expected) == ""


def test_the_inner_gradients_are_where_they_were_after_a_round() -> None:
    model = build_model()
    inner = adamw(model)
    with DiLoCo(FakeOuterManager(Hub(1), 0), [model], inner, nesterov(model.parameters()), 1):
        train_step(model, inner, 0, 0)

    assert all(param.grad is not None and bool(param.grad.abs().sum()) for param in model.parameters())


def test_an_outer_step_that_fails_leaves_a_torn_state_and_a_lock_that_is_free() -> None:
    model = build_model()
    inner, outer = adamw(model), nesterov(model.parameters())
    manager = FakeOuterManager(Hub(1), 0)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    outer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), DiLoCo(manager, [model], inner, outer, 1):
        train_step(model, inner, 0, 0)

    assert manager.is_torn
    assert not manager.is_locked


@pytest.mark.parametrize("what", ["load_backup", "restore_parameters"])
def test_a_state_that_is_loaded_half_way_into_an_outer_loop_is_torn(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Refused before a parameter was written, as one of other fragments is, it tears nothing."""
    model = build_model()
    manager = FakeOuterManager(Hub(1), 0)
    loop = DiLoCo(manager, [model], adamw(model), nesterov(model.parameters()), 1)
    saved = loop.state_dict()
    with pytest.raises(StateMismatchError) as refused:
        loop.load_state_dict({**saved, "original_parameters": []})
    assert not refused.value.state_overwritten and not manager.is_torn

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PseudoGradientFragment, what, fail)
    with pytest.raises(CheckpointError, match="out of memory; the state that was here is torn") as caught:
        loop.load_state_dict(saved)
    assert caught.value.state_overwritten
    assert manager.is_torn
    assert not manager.is_locked


def test_dtypes_are_not_mixed_in_a_bucket() -> None:
    model = build_model()
    model[0].register_parameter("extra", nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
    manager, inner = FakeOuterManager(Hub(1), 0), adamw(model)
    outer = nesterov(model.parameters())
    with DiLoCo(manager, [model], inner, outer, 1, use_bucketization=True):
        train_step(model, inner, 0, 0)

    assert manager.dtypes == {torch.double, torch.bfloat16}
    assert sorted(manager.num_reduced) == [5, 6 * 36 + 3 * 6]


def test_what_is_in_the_model_when_the_loop_begins_are_the_global_parameters() -> None:
    model = build_model()
    inner = adamw(model)
    loop = DiLoCo(FakeOuterManager(Hub(1), 0), [model], inner, nesterov(model.parameters()), 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(5.0)  # a checkpoint is loaded after the loop was made
    with loop:
        for inner_step in range(2):
            train_step(model, inner, 0, inner_step)

    assert all(float((param.detach() - 5.0).abs().max()) < 0.1 for param in model.parameters())


class VotesBadlyOnce(FakeOuterManager):
    """Its first vote raises, as it does where `max_retries` is reached."""

    num_asked = 0

    def should_commit(self) -> bool:
        self.num_asked += 1
        if self.num_asked == 1:
            raise RuntimeError("too many steps in a row were discarded")
        return super().should_commit()


@pytest.mark.parametrize("delay", [0, 1])
def test_a_script_that_catches_an_error_of_a_round_takes_part_in_the_next(delay: int) -> None:
    model = build_model()
    inner = adamw(model)
    manager = VotesBadlyOnce(Hub(1), 0)
    outer = nesterov(model.parameters())
    with DiLoCo(manager, [model], inner, outer, 3, fragment_sync_delay=delay):
        for inner_step in range(9):
            with contextlib.suppress(RuntimeError):
                train_step(model, inner, 0, inner_step)

    assert (manager.num_asked, manager.current_step()) == (3, 2)


class ClipsFirst(torch.optim.SGD):
    """Does something before the step of its base class, which runs torch's hooks again once a plain SGD was made."""

    raises = False

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 1.0)
        loss = super().step(closure)
        if self.raises:
            raise RuntimeError("out of memory")
        return loss


def test_a_step_that_calls_that_of_its_base_class_is_one_inner_step_also_after_one_that_raised() -> None:
    model = build_model()
    nesterov(model.parameters())  # torch gives SGD.step its hooks
    inner, manager, num_hooks, rounds = ClipsFirst(model.parameters(), lr=0.1), FakeOuterManager(Hub(1), 0), 0, []

    def count(*_: object) -> None:
        nonlocal num_hooks
        num_hooks += 1

    inner.register_step_pre_hook(count)
    with LocalSGD(manager, model, inner, 3):
        for inner_step in range(7):
            inner.raises = inner_step == 1
            with pytest.raises(RuntimeError) if inner.raises else contextlib.nullcontext():
                train_step(model, inner, 0, inner_step)
            rounds.append(manager.current_step())
    assert num_hooks == 14
    assert rounds == [0, 0, 0, 1, 1, 1, 2]  # what raised is none
