"""A step of a StepLoader is whole, or it is refused by name; what it takes in, and what the loop finds after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.exact_group import Group
from torch import nn
from torch.utils.data import IterableDataset

from torchft_ckpt import DistributedDataParallel, Optimizer
from torchft_ckpt.errors import ConfigError, SampleError
from torchft_ckpt.manager.step_client import StepClient

Make = Callable[..., Group]


class Rows:
    """Samples of which one may fail."""

    def __init__(self, fails: int = -1) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails:
            raise KeyError("no such row")
        return torch.full((2,), float(index))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def computes(group: Group, step: Any) -> list[torch.Tensor]:
    batches = []
    for batch in step:
        group.model(batch).mean().backward()
        batches.append(batch)
    return batches


def test_each_step_has_its_samples_the_loop_ends_by_itself_and_the_job_is_finished(make_group: Make) -> None:
    group = make_group()
    seen, numbers = [], []
    loader = group.steps(num_epochs=2)
    assert len(loader) == 5
    for step in loader:
        group.optimizer.zero_grad()
        seen += torch.cat(computes(group, step))[:, 0].tolist()
        assert group.optimizer.step()
        numbers.append((step.number, step.epoch))
    assert numbers == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)]
    assert sorted(seen[:20]) == sorted(seen[20:]) == [2.0 * n for n in range(20)] and seen[:20] != seen[20:]
    assert group.manager.finish()


def test_gradients_and_what_is_logged_are_means_over_the_step(make_group: Make) -> None:
    group = make_group(nn.Linear(2, 1, bias=False))
    for step in group.steps(num_steps=1, shuffle=False):
        group.optimizer.zero_grad()
        for batch in step:
            loss = group.model(batch).mean()
            loss.backward()
            step.log(loss=loss, size=len(batch))
        with torch.no_grad():
            rows = torch.arange(16.0).view(8, 2)
            assert torch.allclose(group.model.weight.grad, rows.mean(0, keepdim=True))  # type: ignore[arg-type]
            wanted = group.model(rows).mean().item()
        with pytest.raises(ConfigError, match="after the vote"):
            _ = step.means
        assert group.optimizer.step()
        assert step.means == {"loss": pytest.approx(wanted, rel=1e-6), "size": 2.0}


def test_microbatches_that_weigh_unequally_count_by_their_weight(make_group: Make) -> None:
    group = make_group(nn.Linear(2, 1, bias=False))
    for step in group.steps(num_steps=1, shuffle=False, microbatch_size=4):
        for number, batch in enumerate(step):
            loss = group.model(batch).mean()
            loss.backward()
            step.weigh([3, 1][number])
            step.log(number=number)
        first, second = torch.arange(16.0).view(2, 4, 2).mean(1)
        assert torch.allclose(group.model.weight.grad, (3 * first + second)[None] / 4)  # type: ignore[arg-type]
        assert group.optimizer.step()
        assert step.means == {"number": 0.25}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"global_batch_size": 9}, "no multiple"),
        ({"microbatch_size": 0}, "no multiple"),
        ({"global_batch_size": 65537, "microbatch_size": 1}, "at most 65536"),
        ({"sampler": [1]}, "no sampler"),
        ({"batch_size": 3}, "no batch_size"),
        ({"drop_last": True}, "no drop_last"),
        ({"generator": torch.Generator()}, "no generator"),
        ({"dataset": Stream()}, "no access by index"),
        ({"dataset": iter([1])}, "no access by index"),
        ({"dataset": []}, "is empty"),
        ({"num_epochs": 1, "num_steps": 1}, "num_epochs"),
        ({"check_microbatches_every": -1}, "a number of steps, or 0"),
        ({"read": lambda step, number: 0, "num_epochs": 1}, "num_epochs"),
        ({"read": lambda step, number: 0, "dataset": Rows()}, "one of them"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make_group: Make, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_group().steps(options.pop("dataset", None), **options)


def test_a_manager_has_one_step_loader(make_group: Make) -> None:
    group = make_group()
    group.steps()
    with pytest.raises(ConfigError, match="has a StepLoader"):
        group.steps()


@pytest.mark.parametrize("what", ["zero_grad", "a collective over groups", "step()"])
def test_what_would_be_of_one_groups_microbatches_alone_is_refused_inside(make_group: Make, what: str) -> None:
    group = make_group()
    calls = {
        "zero_grad": lambda: group.optimizer.zero_grad(),
        "a collective over groups": lambda: group.manager.allreduce(torch.ones(2)),
        "step()": lambda: group.optimizer.step(),
    }
    step = next(iter(group.steps()))
    group.optimizer.zero_grad()
    next(batches := iter(step))
    with pytest.raises(ConfigError, match="in the inner loop of StepLoader") as refused:
        calls[what]()
    assert what in str(refused.value)
    batches.close()  # type: ignore[attr-defined]


def test_a_microbatch_without_a_gradient_and_a_sparse_gradient_are_refused(make_group: Make) -> None:
    group = make_group(nn.Sequential(nn.Embedding(50, 3, sparse=True)))
    steps = iter(group.steps())
    for _ in (batches := iter(next(steps))):
        break
    with pytest.raises(ConfigError, match="microbatch 0 of the step has no gradient"):
        next(batches)
    step = next(steps)
    with pytest.raises(ConfigError, match="sparse"):
        for batch in step:
            group.model(batch.long()).sum().backward()


def test_an_inner_loop_that_was_broken_off_is_not_voted_on_and_what_it_has_computed_stays(make_group: Make) -> None:
    group = make_group()
    group.model.register_buffer("moved", torch.zeros(1))
    steps = iter(group.steps())
    step = next(steps)
    for number, batch in enumerate(step):
        group.model(batch).mean().backward()
        group.model.moved.add_(1.0)  # type: ignore[operator, union-attr]
        if number == 2:
            break
    assert group.model.moved.item() == 0.0  # type: ignore[operator, union-attr]
    with pytest.raises(ConfigError, match="broken off"):
        group.optimizer.step()
    again = next(steps)
    assert len(computes(group, again)) == 2 and again.number == 0
    assert group.optimizer.step()


def test_an_exception_in_a_microbatch_that_is_caught_costs_that_microbatch(make_group: Make) -> None:
    group = make_group()
    counts, raised = [], 0
    for step in group.steps(num_steps=2):
        group.optimizer.zero_grad()
        num = 0
        try:
            for batch in step:
                group.model(batch).mean().backward()
                if step.number == 0 and not raised and num == 3:
                    raised += 1
                    raise RuntimeError("out of memory")
                num += 1
        except RuntimeError:
            counts.append(num)
            continue
        counts.append(num)
        assert group.optimizer.step()
    assert counts == [3, 1, 4]


def test_an_iteration_without_its_loop_or_its_vote_and_a_second_vote_are_refused(make_group: Make) -> None:
    group = make_group()
    steps = iter(group.steps())
    next(steps)
    with pytest.raises(ConfigError, match="inner loop has not run"):
        next(steps)
    steps = iter(group.loader)
    group.loader._now = None
    computes(group, next(steps))
    with pytest.raises(ConfigError, match="without a vote"):
        next(steps)
    assert group.optimizer.step()
    group.optimizer.zero_grad()
    with pytest.raises(ConfigError, match="one vote follows"):
        group.optimizer.step()


def test_means_of_an_attempt_that_does_not_count_are_refused(make_group: Make) -> None:
    group = make_group()
    counts = []
    for step in group.steps(num_steps=1):
        group.optimizer.zero_grad()
        num = 0
        for batch in step:
            loss = group.model(batch).mean()
            loss.backward()
            step.log(loss=loss)
            num += 1
        weights = group.model.weight.detach().clone()
        if not counts:
            group.manager.report_error(RuntimeError("something went wrong"))
        counts.append((num, group.optimizer.step()))
        if counts[-1][1]:
            assert step.means["loss"] and not torch.equal(weights, group.model.weight)
        else:
            with pytest.raises(ConfigError, match="if the step counts"):
                _ = step.means
    assert counts == [(4, False), (0, True)], "what was computed stays over a discard"


def test_what_was_computed_with_another_state_is_let_go(make_group: Make) -> None:
    group = make_group()
    counts = []
    for step in group.steps(num_steps=1):
        counts.append(len(computes(group, step)))
        if len(counts) == 1:
            group.manager.report_error(RuntimeError("something went wrong"))
        if not group.optimizer.step():
            group.manager.hooks.registry.load(group.manager.hooks.registry.capture())
    assert counts == [4, 4]


def test_what_is_logged_and_weighed_is_the_same_in_all_microbatches(make_group: Make) -> None:
    for logs, why in ((True, "same names"), (False, "were weighed")):
        group = make_group(nn.Linear(2, 1), job=f"job{logs}")
        step = next(iter(group.steps()))
        with pytest.raises(ConfigError, match=why):
            for number, batch in enumerate(step):
                group.model(batch).mean().backward()
                if logs:
                    step.log(**{"loss" if number < 3 else "other": 1.0})
                elif number == 1:
                    step.weigh(2)


def test_what_cannot_be_logged_is_refused_by_name(make_group: Make) -> None:
    group = make_group()
    step = next(iter(group.steps()))
    with pytest.raises(ConfigError, match="in the inner loop"):
        step.log(loss=1.0)
    next(batches := iter(step))
    for values, why in (
        ({"loss": torch.ones(2)}, "no scalar"),
        ({f"value {n}": 1.0 for n in range(33)}, "at most 32"),
        ({"x" * 400: 1.0}, "384"),
    ):
        with pytest.raises(ConfigError, match=why):
            step.log(**values)
    with pytest.raises(ConfigError, match="cannot weigh"):
        step.weigh(-1)
    batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named_with_its_step_and_not_tried_for_ever(
    make_group: Make, num_workers: int
) -> None:
    group = make_group()
    loader = group.steps(Rows(fails=11), shuffle=False, num_workers=num_workers)
    steps = iter(loader)
    assert len(computes(group, next(steps))) == 4 and group.optimizer.step()
    step = next(steps)
    with pytest.raises(SampleError, match="microbatch 1 of step 1 cannot be read: sample 11: KeyError"):
        computes(group, step)
    if num_workers:  # else it ends with the frames that the error holds
        loader._reader._batches._shutdown_workers()  # type: ignore[union-attr]


def test_data_sets_orders_and_readers_as_people_have_them(make_group: Make) -> None:
    class Many(Rows):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [100 + index for index in indices]

    found = []
    for number, options in enumerate(
        (
            {"dataset": Many(), "shuffle": False, "collate_fn": torch.tensor},
            {"dataset": {"a": 1, "b": 2}, "order": lambda position: "ab"[position % 2]},
            {"read": lambda step, one: torch.tensor([step, one])},
        )
    ):
        group = make_group(nn.Linear(2, 1), job=f"job{number}")
        step = next(iter(group.steps(options.pop("dataset", None), **options)))  # type: ignore[arg-type]
        batches = []
        for batch in step:
            group.model.weight.sum().backward()
            batches.append(batch.tolist())
        found.append(batches)
    assert found == [
        [[100, 101], [102, 103], [104, 105], [106, 107]],
        [[1, 2]] * 4,
        [[0, one] for one in range(4)],
    ]


def test_random_numbers_in_a_microbatch_and_after_it_are_of_the_step_alone(make_group: Make) -> None:
    found = []
    for job in ("one", "two"):
        group = make_group(nn.Linear(2, 1), job=job)
        torch.manual_seed(len(job) if job == "one" else 99)
        drawn: dict[tuple[int, int | None], float] = {}
        for step in group.steps(num_steps=2):
            for batch in step:
                drawn[step.number, group.loader.microbatch] = torch.rand(()).item()
                group.model(batch).mean().backward()
            drawn[step.number, None] = torch.rand(()).item()
            group.optimizer.step()
        found.append(drawn)
    assert found[0] == found[1] and len({*found[0].values()}) == 10


def test_a_wrapped_module_and_several_optimizers_train_as_a_plain_one(make_group: Make) -> None:
    found = []
    for job in ("plain", "wrapped"):
        torch.manual_seed(1)
        group = make_group(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), job=job)
        model: nn.Module = DistributedDataParallel(group.manager, group.model) if job == "wrapped" else group.model
        loader = group.steps(num_steps=3)
        other = Optimizer(group.manager, torch.optim.SGD(group.model[2].parameters(), lr=0.0))  # type: ignore[index]
        for step in loader:
            for optimizer in (group.optimizer, other):
                optimizer.zero_grad()
            for batch in step:
                model(batch).mean().backward()
            assert group.optimizer.step() and other.step()
            with torch.no_grad():
                model(torch.ones(2, 2))  # a look at the model between two steps begins none
        found.append([one.clone() for one in group.model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_buffer_that_the_forward_pass_binds_anew_begins_as_the_step_did(make_group: Make) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.register_buffer("center", torch.zeros(2))
            self.seen = list[float]()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.seen.append(self.center.sum().item())
            self.center = self.center + rows.mean(0)
            result: torch.Tensor = self.linear(rows)
            return result

    model = Centred()
    group = make_group(model)
    for step in group.steps(num_steps=1, shuffle=False):
        computes(group, step)
        assert group.optimizer.step()
    assert model.seen == [0.0] * 4
    assert torch.equal(model.center, torch.arange(16.0).view(8, 2).mean(0))


def test_a_large_buffer_that_nothing_moves_is_not_written_to(make_group: Make) -> None:
    group = make_group()
    group.model.register_buffer("table", torch.randn(1 << 20))
    before = group.model.table._version  # type: ignore[union-attr]
    for step in group.steps(num_steps=2):
        computes(group, step)
        assert group.optimizer.step()
    assert group.model.table._version == before  # type: ignore[union-attr]


def test_an_overflow_is_found_in_the_sum_and_costs_no_microbatch(make_group: Make) -> None:
    group = make_group()
    scaler = group.manager.grad_scaler(torch.amp.GradScaler("cpu", init_scale=2.0**100))
    outcomes = []
    for step in group.steps(num_steps=3):
        group.optimizer.zero_grad()
        for batch in step:
            scaler.scale(group.model(batch).mean() * (1e30 if step.number == 0 else 1.0)).backward()
        outcomes.append(scaler.step(group.optimizer))
        scaler.update()
    assert outcomes[0] is False and outcomes[1:] == [True, True]
    assert scaler.get_scale() == 2.0**99


def test_what_has_no_length_says_so(make_group: Make) -> None:
    with pytest.raises(TypeError, match="no length"):
        len(make_group().steps())


def test_an_iteration_that_began_as_another_step_is_discarded(make_group: Make) -> None:
    group = make_group()
    found = []
    for step in group.steps(num_steps=6):
        told = step.number
        if not found:
            group.manager.load_state_dict({"step": 5, "batches_committed": 5})
        group.optimizer.zero_grad()
        found.append((told, len(computes(group, step)), group.optimizer.step()))
    assert found == [(0, 0, False), (5, 4, True)]


def test_a_step_begins_with_a_microbatch_while_its_quorum_forms(
    make_group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    has_begun, is_held, await_plan = threading.Event(), threading.Event(), StepClient.await_plan

    def awaits(client: StepClient, *arguments: Any) -> Any:
        assert not is_held.is_set() or has_begun.wait(20), "the loop waits for the quorum"
        return await_plan(client, *arguments)

    monkeypatch.setattr(StepClient, "await_plan", awaits)
    seen = []
    for step in group.steps(num_steps=5, shuffle=False):
        has_begun.clear()
        if step.number >= 2:  # the first two are watched
            is_held.set()
        group.optimizer.zero_grad()
        for batch in step:
            has_begun.set()
            group.model(batch).mean().backward()
            seen += batch[:, 0].tolist()
        assert group.optimizer.step()
    assert seen == [2.0 * (n % 20) for n in range(40)]
