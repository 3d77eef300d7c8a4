"""A microbatch that several groups compute shows who computes something else than the others."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock, create_autospec

import numpy as np
import pytest
import torch
from support.exact_group import Group
from torch import nn

from torchft_ckpt import LighthouseServer
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.core.coordination.sequence import KnownSequences
from torchft_ckpt.core.training.microbatches import audited
from torchft_ckpt.errors import ReplicasDifferError
from torchft_ckpt.events import Event, MicrobatchDiffers
from torchft_ckpt.exact import Step
from torchft_ckpt.exact.audit import Audit
from torchft_ckpt.exact.captured import Layout

if TYPE_CHECKING:
    from torchft_ckpt import Manager
    from torchft_ckpt.core.coordination.messages import Answer

NUM_STEPS, NUM_MICROBATCHES = 7, 6
Computes = Callable[["Rank", Step, torch.Tensor], torch.Tensor]


class Rank:
    """A replica group on a thread of its own. `computes` gets each loss, and returns what the loop goes on with."""

    def __init__(
        self, server: LighthouseServer, name: str, computes: Computes, begins: Callable[[Rank, Step], None], **more: Any
    ) -> None:
        self.server, self.name, self.computes, self.begins = server, name, computes, begins
        self.found = list[MicrobatchDiffers]()
        self.computed = list[tuple[int, list[int]]]()
        """By attempt: of which step, and the microbatches."""
        self.differed = ""
        """In the lighthouse's status, as the last step began."""
        self.stopped: ReplicasDifferError | None = None
        self.random = np.random.default_rng(ord(name[-1]))
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.1 + 0.1 * number)
        every = more.pop("every", 1)
        self.group = Group(server, model, replica_id=name, on_event=self._hears, job="job", **more)
        sizes = {"global_batch_size": 2 * NUM_MICROBATCHES, "num_steps": NUM_STEPS}
        self.steps = self.group.steps(shuffle=False, check_microbatches_every=every, **sizes)

    def _hears(self, event: Event) -> None:
        if isinstance(event, MicrobatchDiffers):
            self.found.append(event)

    def trains(self) -> None:
        try:
            for step in self.steps:
                self.begins(self, step)
                with urllib.request.urlopen(f"{self.server.address()}/?job=job") as answer:
                    self.differed = json.load(answer)["differed"]
                self.group.optimizer.zero_grad()
                self.computed.append((step.number, []))
                for batch in step:
                    self.computed[-1][1].append(self.steps.microbatch or 0)
                    loss = self.computes(self, step, self.group.model(0.1 * batch).square().mean())
                    loss.backward()
                    step.log(loss=loss)
                self.group.optimizer.step()
        except ReplicasDifferError as error:
            self.stopped = error
        self.group.manager.shutdown()

    @property
    def weight(self) -> torch.Tensor:
        return self.group.model[2].weight.detach()  # type: ignore[index, no-any-return]


class Job:
    """Some groups, and what comes of them."""

    def __init__(
        self,
        names: Sequence[str],
        computes: Computes = lambda _, __, loss: loss,
        begins: Callable[[Rank, Step], None] = lambda _, __: None,
        **more: Any,
    ) -> None:
        server = LighthouseServer("127.0.0.1:0", min_replicas=len(names))
        ranks = [Rank(server, name, computes, begins, **more) for name in names]
        try:
            with ThreadPoolExecutor(len(ranks)) as pool:
                for trained in [pool.submit(rank.trains) for rank in ranks]:
                    trained.result(120)
        finally:
            for rank in ranks:
                rank.group.manager.shutdown()
            server.shutdown()
        self.ranks, self.differed = ranks, ranks[0].differed
        self.found = [(one.step, one.microbatch, *_without_lives(one)) for one in ranks[0].found]
        """By all groups alike: step, microbatch, who is wrong, all that have computed it."""
        assert all(
            [(o.step, o.microbatch, o.first) for o in rank.found]
            == [(o.step, o.microbatch, o.first) for o in ranks[0].found]
            for rank in ranks
        )
        assert all(torch.equal(rank.weight, ranks[0].weight) for rank in ranks)

    def computed(self, step: int) -> list[list[int]]:
        """Return what each group has computed in the attempts at a step."""
        return [[one for number, own in rank.computed if number == step for one in own] for rank in self.ranks]


def _without_lives(found: MicrobatchDiffers) -> tuple[str, str]:
    return (found.wrong or "").partition(":")[0], "".join(sorted(group.partition(":")[0] for group in found.groups))


def checked(step: int) -> int:
    number = audited(step, 1, NUM_MICROBATCHES)
    assert number is not None
    return number


def multiplies_wrongly(rank: Rank, _: Step, loss: torch.Tensor) -> torch.Tensor:
    return loss * (1 + 2**-20) if rank.name.endswith("b") else loss


def test_two_further_groups_compute_one_microbatch_of_each_second_step_and_equal_ones_say_nothing() -> None:
    job = Job("abc", every=2)
    for step in range(NUM_STEPS):
        all_computed = sorted(one for own in job.computed(step) for one in own)
        again = [checked(step)] * 2 if step % 2 else []
        assert all_computed == sorted([*range(NUM_MICROBATCHES), *again])
    assert job.found == [] and job.differed == ""
    assert torch.equal(job.ranks[0].weight, Job("abc", every=0).ranks[0].weight), "what is computed twice counts once"


def test_a_loader_that_checks_nothing_digests_nothing_and_issues_one_collective_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    issued: list[str] = []
    issue = KnownSequences.issue

    def notes(known: KnownSequences, signature: str) -> Any:
        issued.append(signature)
        return issue(known, signature)

    monkeypatch.setattr(KnownSequences, "issue", notes)
    monkeypatch.setattr("torchft_ckpt.exact.audit.digest_of", lambda _: pytest.fail("something is digested"))
    job = Job("abc", multiplies_wrongly, every=0)
    assert job.found == [] and len(issued) == 3 * NUM_STEPS
    assert all(len(own) == 2 for rank in job.ranks for _, own in rank.computed)


def test_one_wrong_product_is_found_by_group_microbatch_and_parameter() -> None:
    job = Job("abc", multiplies_wrongly)
    assert job.found == [(step, checked(step), "b", "abc") for step in range(NUM_STEPS)]
    assert job.ranks[0].found[0].first == "default.0.weight"
    assert f"microbatch {checked(NUM_STEPS - 2)} of step {NUM_STEPS - 2}: b:" in job.differed
    assert "has other bits than a:" in job.differed and "5 of 6 values differ" in job.differed
    assert [rank.group.manager.statistics().num_corrected for rank in job.ranks] == [0, 0, 0], "no state differs"


def test_a_flipped_bit_of_a_weight_is_found_and_loaded_from_the_others() -> None:
    """The votes show nothing here, as is likely of one bit of a large model."""

    def begins(rank: Rank, step: Step) -> None:
        rank.group.manager._parts.check.digest = lambda: "0" * 16  # type: ignore[method-assign]
        if rank.name == "b" and step.number == 5:  # no other comparison comes after it
            rank.weight.view(torch.int32)[0, 1] ^= 1 << 12

    job = Job("abc", begins=begins)
    assert job.found == [(5, checked(5), "b", "abc")]
    assert [rank.group.manager.statistics().num_corrected for rank in job.ranks] == [0, 1, 0]


def test_random_numbers_of_a_loops_own_are_nobodys_fault_alone() -> None:
    job = Job("abc", lambda rank, _, loss: loss * (1 + 1e-3 * rank.random.random()))
    assert job.found == [(step, checked(step), "", "abc") for step in range(NUM_STEPS)]
    assert "have other bits each" in job.differed and "what is logged differs too" in job.differed


def test_what_is_logged_alone_is_an_event_and_ends_no_job() -> None:
    """Such as how long a microbatch took."""

    def computes(rank: Rank, step: Step, loss: torch.Tensor) -> torch.Tensor:
        step.log(took=rank.random.random())
        return loss

    job = Job("abc", computes, on_replicas_differ="stop")
    assert [(one.step, one.first) for one in job.ranks[0].found] == [(n, "what is logged") for n in range(NUM_STEPS)]
    assert [rank.stopped for rank in job.ranks] == [None] * 3 and job.differed == ""


def test_groups_with_long_names_that_begin_alike_are_told_apart() -> None:
    names = [300 * "x" + name for name in "abc"]
    job = Job(names, multiplies_wrongly)
    assert job.found == [(step, checked(step), names[1], "".join(names)) for step in range(NUM_STEPS)]
    assert "the first is default.0.weight" in job.differed


def test_bytes_of_a_collective_that_was_broken_off_say_nothing() -> None:
    """On a device it is known only later that it was."""

    def fills(rows: torch.Tensor, **_: Any) -> Any:
        rows.copy_(torch.arange(rows.numel()).reshape(rows.shape) % 251)
        return SimpleNamespace(wait=lambda: True)

    errors: list[Exception | None] = [RuntimeError("a group died"), None]
    manager = SimpleNamespace(allreduce=fills, errored=lambda: errors.pop(0), replica_id=lambda: "a", hooks=MagicMock())
    audit, layout = Audit(cast("Manager", manager), 1, 4), create_autospec(Layout, names=["w"], device="cpu")
    formed = cast("Answer", SimpleNamespace(version=StateVersion(step=3), replica_rank=2, quorum_id=1))
    audit.compare(formed, layout, [0, 1])
    assert not manager.hooks.mock_calls
    audit.compare(formed, layout, [0, 1])
    assert manager.hooks.mock_calls, "else the test shows nothing"


class AddsAsItComes(torch.autograd.Function):
    """Its gradient is a sum of numbers in the order in which they come, as of a kernel that uses atomics."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, order: int) -> torch.Tensor:
        ctx.order = order
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = torch.zeros(())
        for part in torch.tensor([1e8, 1.0, -1e8, 1.0]).roll(ctx.order):
            total += part
        return gradients[0] * (1 + 1e-3 * total), None


def test_a_kernel_that_adds_in_another_order_each_time_is_found_in_one_group_or_another() -> None:
    job = Job("abc", lambda rank, _, loss: AddsAsItComes.apply(loss, int(rank.random.integers(4))))
    assert len({wrong for _, _, wrong, _ in job.found}) > 1
    assert "what is logged is equal" in job.differed


def test_of_two_groups_both_are_named_and_one_alone_is_not_checked() -> None:
    job = Job("ab", multiplies_wrongly)
    assert job.found == [(step, checked(step), "", "ab") for step in range(NUM_STEPS)]
    assert "no third group is there to say which is right" in job.differed
    assert Job("b", multiplies_wrongly).found == []


def test_an_audit_is_made_again_after_a_discard_of_what_was_computed_before_it() -> None:
    def computes(rank: Rank, step: Step, loss: torch.Tensor) -> torch.Tensor:
        if rank.name == "a" and step.number == 4 and [number for number, _ in rank.computed].count(4) == 1:
            rank.group.manager.report_error(RuntimeError("something went wrong"))
        return multiplies_wrongly(rank, step, loss)

    job = Job("abc", computes)
    assert job.found == [(step, checked(step), "b", "abc") for step in range(NUM_STEPS)]
    tries = [[own for number, own in rank.computed if number == 4] for rank in job.ranks]
    assert all(len(own) == 2 for own in tries)
    assert sorted(one for _, again in tries for one in again) == [checked(4)] * 2


def test_stop_ends_all_groups_and_the_step_does_not_count() -> None:
    job = Job("abc", multiplies_wrongly, on_replicas_differ="stop")
    for rank in job.ranks:
        assert "has other bits than" in str(rank.stopped)
        assert rank.group.manager.current_step() == 0


def test_groups_that_check_at_other_steps_do_not_train_together() -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    ranks = [
        Rank(server, name, *[lambda *_: None] * 2, every=every) for name, every in zip("abc", (0, 2, 3), strict=True)
    ]
    words = [rank.steps.in_words for rank in ranks]
    for rank in ranks:
        rank.group.manager.shutdown()
    server.shutdown()
    assert ["checked every 2 steps" in one for one in words] == [False, True, False] and len({*words}) == 3
