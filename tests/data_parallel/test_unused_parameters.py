"""Groups that use other parameters than each other have the same gradients, those of PyTorch's own DDP, bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.averaging import Averaging, connect
from support.fake_outer_manager import run_replicas
from support.fake_process_group import FakeFabric
from torch import nn
from torch.distributed import Work
from torch.nn import parallel
from torch.utils.checkpoint import checkpoint

from torchft_ckpt import DistributedDataParallel
from torchft_ckpt.ddp import BackwardAverage, GradientAverage, PureDistributedDataParallel
from torchft_ckpt.errors import CollectiveFailedError
from torchft_ckpt.manager.collectives import done_work

Wrap = Callable[[Averaging, nn.Module], nn.Module]
Bits = list[list[int] | None]
# For each step what each group does: the expert of each backward pass, all but the last in no_sync. None: none of them.
Plan = list[list[list[int | None]]]

# Expert 1 is used late and by one group, expert 2 by none in the last step.
PLAN: Plan = [[[0], [1]], [[0], [0]], [[None], [2]], [[1, 0], [None, 2]], [[0], [None]]]


class Experts(nn.Module):
    """One of three experts, or none, after a layer that all use."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.after = nn.Linear(4, 2)

    def forward(self, batch: torch.Tensor, expert: int | None) -> torch.Tensor:
        hidden = self.before(batch)
        return self.after(hidden if expert is None else hidden + self.experts[expert](hidden))


def models(count: int) -> list[Experts]:
    made = []
    for _ in range(count):
        torch.manual_seed(11)
        made.append(Experts())
    return made


def ours(manager: Averaging, module: nn.Module) -> nn.Module:
    return DistributedDataParallel(manager, module)


def as_views(manager: Averaging, module: nn.Module) -> nn.Module:
    return DistributedDataParallel(manager, module, gradient_as_bucket_view=True)


def in_batches(manager: Averaging, module: nn.Module) -> nn.Module:
    return DistributedDataParallel(manager, module, batched_grad_copy=True)


def in_small_buckets(manager: Averaging, module: nn.Module) -> nn.Module:
    return DistributedDataParallel(manager, module, bucket_cap_mb=1e-4)


def with_a_map_apart(manager: Averaging, module: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(manager, module)
    wrapped._reduction.max_carrier_bytes = 0
    return wrapped


def pure(manager: Averaging, module: nn.Module) -> nn.Module:
    return PureDistributedDataParallel(manager, module)


class Averaged(nn.Module):
    """Averages after the backward pass, as what cannot wrap a module does."""

    def __init__(self, manager: Averaging, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.average = GradientAverage(manager, module.parameters)
        self._is_last = True
        self._backward = BackwardAverage(module, self.average.take, is_wanted=lambda: self._is_last)

    def forward(self, *args: Any) -> torch.Tensor:
        output = self.module(*args)
        self._backward.watch(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_last = False
        yield
        self._is_last = True


def in_its_own_time(manager: Averaging, module: nn.Module) -> nn.Module:
    return Averaged(manager, module)


WRAPS = [ours, as_views, in_batches, in_small_buckets, with_a_map_apart, pure, in_its_own_time]


def train(
    model: nn.Module, wrapped: nn.Module, plan: Plan, rank: int, *, set_to_none: bool = True, first_step: int = 0
) -> tuple[Bits, Bits]:
    """Return the bits of the parameters, and of the gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step, of_groups in list(enumerate(plan))[first_step:]:
        optimizer.zero_grad(set_to_none)
        experts = of_groups[rank]
        for number, expert in enumerate(experts):
            generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
            batch = torch.randn(3, 4, generator=generator)
            is_last = number == len(experts) - 1
            with contextlib.nullcontext() if is_last else wrapped.no_sync():  # type: ignore[operator]
                wrapped(batch, expert).square().sum().backward()
        optimizer.step()
    return bits(model.parameters()), bits(parameter.grad for parameter in model.parameters())


def bits(tensors: Any) -> Bits:
    return [None if tensor is None else tensor.detach().view(torch.int32).flatten().tolist() for tensor in tensors]


def train_groups(wrap: Wrap, plan: Plan, contributes: list[bool], **options: Any) -> tuple[list[Any], list[Averaging]]:
    fabric, made = FakeFabric(), models(len(contributes))

    def run(rank: int) -> tuple[tuple[Bits, Bits], Averaging]:
        manager = connect(fabric, rank, contributes)
        return train(made[rank], wrap(manager, made[rank]), plan, rank, **options), manager

    results = run_replicas(len(contributes), run)
    return [result for result, _ in results], [manager for _, manager in results]


def train_torchs(plan: Plan, **options: Any) -> list[Any]:
    store, made = dist.HashStore(), models(2)

    def run(rank: int) -> tuple[Bits, Bits]:
        group = dist.ProcessGroup(store, rank, 2)
        gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        wrapped = parallel.DistributedDataParallel(
            made[rank], process_group=group, find_unused_parameters=True, init_sync=False
        )
        result = train(made[rank], wrapped, plan, rank, **options)
        # Before the group: torch's reducer would drop it with the interpreter lock held, for which the group's thread may wait.
        del wrapped
        return result

    return run_replicas(2, run)


@pytest.fixture(scope="module")
def torchs() -> dict[bool, Any]:
    return {set_to_none: train_torchs(PLAN, set_to_none=set_to_none) for set_to_none in (True, False)}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("wrap", WRAPS)
def test_two_groups_compute_what_torchs_ddp_computes(wrap: Wrap, set_to_none: bool, torchs: dict[bool, Any]) -> None:
    results, managers = train_groups(wrap, PLAN, [True, True], set_to_none=set_to_none)
    assert results == torchs[set_to_none]
    assert managers[0].asked == managers[1].asked


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_group_that_adds_zeros_ends_as_the_others_do_and_changes_nothing(wrap: Wrap, set_to_none: bool) -> None:
    plan = [[*of_groups, [1]] for of_groups in PLAN]  # what it uses, others do not
    results, managers = train_groups(wrap, plan, [True, True, False], set_to_none=set_to_none)
    assert results[2] == results[0] == results[1]
    assert results[:2] == train_groups(wrap, PLAN, [True, True], set_to_none=set_to_none)[0]
    assert managers[2].asked == managers[0].asked


@pytest.mark.parametrize("wrap", [ours, as_views, with_a_map_apart, pure, in_its_own_time])
def test_a_group_without_gradients_has_zeros_where_the_others_kept_zeros(wrap: Wrap) -> None:
    """As after `zero_grad(set_to_none=False)`, in the first step of one that comes back: optimizers step what has zeros."""
    fabric, made = FakeFabric(), models(2)
    for parameter in made[0].parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run(rank: int) -> Bits:
        wrapped = wrap(connect(fabric, rank, [True, False]), made[rank])
        wrapped(torch.ones(1, 4), None).sum().backward()
        return bits(parameter.grad for parameter in made[rank].parameters())

    first, second = run_replicas(2, run)
    assert first == second
    assert None not in first


@pytest.mark.parametrize("wrap", [ours, as_views, with_a_map_apart, pure, in_its_own_time])
def test_a_step_that_failed_leaves_nothing_for_the_next(wrap: Wrap) -> None:
    fabric, made = FakeFabric(), models(2)

    def run(rank: int) -> tuple[Bits, Bits]:
        manager = connect(fabric, rank, [True, True])
        wrapped = wrap(manager, made[rank])
        manager.errors.append(CollectiveFailedError("a peer was lost"))
        wrapped(torch.ones(1, 4), rank).sum().backward()
        manager.errors.clear()
        return train(made[rank], wrapped, PLAN, rank)

    assert run_replicas(2, run) == train_groups(wrap, PLAN, [True, True])[0]


@pytest.mark.parametrize("wrap", [ours, with_a_map_apart, pure, in_its_own_time])
def test_a_group_that_joins_has_gradients_where_the_count_of_them_fails(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has entered zeros, and a gradient scaler asks for the gradients before it hears that the step is discarded."""
    manager, made = connect(FakeFabric(), 0, [False]), models(1)

    def fail(tensor: torch.Tensor, **_: object) -> Work:
        return done_work(tensor.zero_(), lambda: True)

    monkeypatch.setattr(manager, "allreduce", fail)
    wrapped = wrap(manager, made[0])
    wrapped(torch.ones(1, 4), 0).sum().backward()
    assert [name for name, parameter in made[0].named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("wrap", [ours, pure, in_its_own_time])
def test_two_averaged_backward_passes_add_up(wrap: Wrap) -> None:
    fabric, made = FakeFabric(), models(2)

    def run(rank: int) -> Bits:
        wrapped = wrap(connect(fabric, rank, [True, True]), made[rank])
        for number in (0, 1):
            wrapped(torch.full((1, 4), rank + number + 1.0), number).sum().backward()
        return bits(parameter.grad for parameter in made[rank].parameters())

    first, second = run_replicas(2, run)
    plain = models(1)[0]
    for number in (0, 1):
        sum(plain(torch.full((1, 4), rank + number + 1.0), number).sum() / 2 for rank in (0, 1)).backward()
    assert first == second
    assert [got is None for got in first] == [parameter.grad is None for parameter in plain.parameters()]
    for got, parameter in zip(first, plain.parameters(), strict=True):
        if got is not None:
            tensor = torch.tensor(got, dtype=torch.int32).view(torch.float32).view_as(parameter)
            torch.testing.assert_close(tensor, parameter.grad)


@pytest.mark.parametrize("wrap", [ours, pure, in_its_own_time])
def test_layers_that_are_unfrozen_are_averaged_from_then_on(wrap: Wrap) -> None:
    fabric, made = FakeFabric(), models(2)

    def run(rank: int) -> Bits:
        made[rank].before.requires_grad_(False)
        wrapped = wrap(connect(fabric, rank, [True, True]), made[rank])
        wrapped(torch.full((1, 4), rank + 1.0), 0).sum().backward()
        made[rank].before.requires_grad_(True)
        wrapped(torch.full((1, 4), rank + 1.0), 1).sum().backward()
        return bits(parameter.grad for parameter in made[rank].parameters())

    first, second = run_replicas(2, run)
    assert first == second
    assert [gradient is not None for gradient in first] == [True] * 6 + [False] * 2 + [True] * 2


class Checkpointed(nn.Module):
    """Its middle is computed again in the backward pass, in a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.after(checkpoint(self.inside, self.before(batch), use_reentrant=True))


def test_without_the_reducer_a_reentrant_checkpoint_is_averaged_once() -> None:
    fabric = FakeFabric()
    torch.manual_seed(11)
    made = [Checkpointed(), Checkpointed()]
    made[1].load_state_dict(made[0].state_dict())

    def run(rank: int) -> tuple[Bits, int]:
        manager = connect(fabric, rank, [True, True])
        PureDistributedDataParallel(manager, made[rank])(torch.full((1, 4), rank + 1.0)).sum().backward()
        return bits(parameter.grad for parameter in made[rank].parameters()), len(manager.asked)

    first, second = run_replicas(2, run)
    assert first == second
    assert first[1] == 7  # six parameters and the map


def test_without_the_reducer_gradients_of_inputs_alone_average_nothing() -> None:
    """As a gradient penalty takes them."""
    manager, (model,) = connect(FakeFabric(), 0, [True]), models(1)
    batch = torch.ones(1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(pure(manager, model)(batch, 0).sum(), batch)
    assert (gradient.shape, manager.asked) == (batch.shape, [])


def test_gradients_that_were_kept_are_averaged_again_after_a_step_that_failed() -> None:
    """As many backward passes as it likes may have come before; what was done to the average since is not in it."""
    fabric, made = FakeFabric(), models(2)

    def run(rank: int) -> tuple[Bits, Bits]:
        manager = connect(fabric, rank, [True, True])
        wrapped = Averaged(manager, made[rank])
        with wrapped.no_sync():
            wrapped(torch.full((1, 4), rank + 1.0), 0).sum().backward()
        wrapped(torch.full((1, 4), rank + 2.0), rank).sum().backward()
        first = bits(parameter.grad for parameter in made[rank].parameters())
        nn.utils.clip_grad_norm_(made[rank].parameters(), 1e-3)
        manager.errors.append(CollectiveFailedError("a peer was lost"))
        wrapped.average.again()
        manager.errors.clear()
        wrapped.average.again()
        return first, bits(parameter.grad for parameter in made[rank].parameters())

    first, second = run_replicas(2, run)
    assert first == second
    assert first[0] == first[1]


def test_a_parameter_alone_and_many_in_a_bucket_have_the_same_average(monkeypatch: pytest.MonkeyPatch) -> None:
    together = train_groups(in_its_own_time, PLAN, [True, True])[0]
    monkeypatch.setattr("torchft_ckpt.ddp._MAX_BUCKET_BYTES", 1)
    assert train_groups(in_its_own_time, PLAN, [True, True])[0] == together


@pytest.mark.parametrize("wrap", [pure, in_its_own_time])
def test_the_average_comes_after_that_of_torchs_ddp_within(wrap: Wrap) -> None:
    """torch's DDP of the ranks of a group writes into the gradients when the backward pass is over."""
    fabric, store, made = FakeFabric(), dist.HashStore(), models(2)

    def run(rank: int) -> Bits:
        group = dist.ProcessGroup(store, 0, 1)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore(str(rank), store), 0, 1, timedelta(seconds=20))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        inner = parallel.DistributedDataParallel(
            made[rank], process_group=group, find_unused_parameters=True, init_sync=False
        )
        wrapped = wrap(connect(fabric, rank, [True, True]), inner)
        wrapped(torch.full((1, 4), rank + 1.0), 0).sum().backward()
        del wrapped, inner
        return bits(parameter.grad for parameter in made[rank].parameters())

    plain = models(1)[0]
    sum(plain(torch.full((1, 4), rank + 1.0), 0).sum() / 2 for rank in (0, 1)).backward()
    first, second = run_replicas(2, run)
    assert first == second == bits(parameter.grad for parameter in plain.parameters())


class Holder:
    """An output that nobody can search for tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_without_the_reducer_an_output_of_any_kind_is_averaged() -> None:
    manager, (model,) = connect(FakeFabric(), 0, [True]), models(1)
    model.register_forward_hook(lambda *call: Holder(call[-1]))
    pure(manager, model)(torch.ones(1, 4), 0).tensor.sum().backward()
    assert len(manager.asked) == 11  # ten parameters and the map
