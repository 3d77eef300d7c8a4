"""A group that healed beside its forward pass contributes once its state is known to be the others', whatever its loop does."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from test_manager_in_process import SHORT, Replica, together

from torchft_ckpt import HTTPTransport, LighthouseServer
from torchft_ckpt.errors import SourceLostError
from torchft_ckpt.manager.healing import Healing

pytestmark = pytest.mark.slow

SETTLED = 5
"""Steps that a group that came back has to contribute to before a test ends."""


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=5000)
    yield server
    server.shutdown()


class Loop(Replica):
    """A training loop that notes what it holds after each committed step, and whether it contributed to it."""

    def __init__(self, lighthouse: LighthouseServer, name: str, seed: int = 0, **options: Any) -> None:
        super().__init__(lighthouse, name, seed, **options)
        self.extra: dict[str, Any] = self.first_extra()
        self.manager.register_state_dict_fn("extra", self.load_extra, self.get_extra)
        self.after: dict[int, list[list[int]]] = {}
        self.contributed: list[int] = []
        self.committed: list[int] = []

    def first_extra(self) -> dict[str, Any]:
        return {}

    def load_extra(self, extra: dict[str, Any]) -> None:
        self.extra = extra

    def get_extra(self) -> dict[str, Any]:
        return self.extra

    def quorum_size(self) -> int:
        quorum = self.manager.view().quorum
        return quorum.replica_world_size if quorum is not None else 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def between_backward_and_step(self) -> None: ...

    def after_step(self, committed: bool) -> None: ...

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        batch = torch.linspace(-1, 1, 16).view(2, 8) * (1 + self.manager.current_step() % 3)
        self.scaled(self.model(batch).square().mean()).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad).wait()
        self.between_backward_and_step()
        contributes = self.manager.is_participating()
        self.optimizer.step()
        committed = self.manager.statistics().num_committed > before
        self.after_step(committed)
        if committed:
            step = self.manager.current_step()
            self.after[step] = self.bits()
            self.committed.append(step)
            if contributes:
                self.contributed.append(step)
        return committed


class Plain(Loop):
    """All that a step depends on is read within it."""


class Scaler(Loop):
    """Scales the loss, unscales the gradients, and lets the scale grow, as `GradScaler` does."""

    def first_extra(self) -> dict[str, Any]:
        return {"scale": 3.0, "growth": 0}

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.extra["scale"]

    def between_backward_and_step(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.extra["scale"]

    def after_step(self, committed: bool) -> None:
        if committed:
            growth = (self.extra["growth"] + 1) % 2
            self.extra = {"scale": self.extra["scale"] * (1.7 if growth == 0 else 1.0), "growth": growth}
            if self.extra["scale"] > 1000:
                self.extra["scale"] = 3.0


class AdaptiveClipping(Loop):
    """Clips at what norms were lately; the history changes between `zero_grad` and `step`."""

    def first_extra(self) -> dict[str, Any]:
        return {"norms": torch.full((4,), 0.01)}

    def between_backward_and_step(self) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        norms = self.extra["norms"]
        limit = float(norms.mean())
        norms.copy_(torch.cat([norms[1:], norm[None]]))
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, limit / (float(norm) + 1e-6))


class L2ByHand(Loop):
    """Adds weight decay to the averaged gradients."""

    def between_backward_and_step(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.05 * parameter.detach()


class RateByHand(Loop):
    """Sets the learning rate of each step from the manager's step."""

    def between_backward_and_step(self) -> None:
        for group in self.sgd.param_groups:
            group["lr"] = 0.1 / (1 + self.manager.current_step() % 11)


LOOPS = [Plain, Scaler, AdaptiveClipping, L2ByHand, RateByHand]


def come_back(
    lighthouse: LighthouseServer, kind: Callable[..., Loop], *, survivors: int = 2, **options: Any
) -> tuple[list[Loop], Loop]:
    """Some groups train; one comes that begins with nothing, and they go on until it has contributed for a while."""
    stayed = [kind(lighthouse, f"stays_{number}") for number in range(survivors)]
    together(stayed, lambda replica: [replica.step() for _ in range(3)])
    back = kind(lighthouse, "comes_back", seed=1, **options)
    last_step: list[int] = []

    def train(replica: Loop) -> None:
        while not last_step or replica.manager.current_step() < last_step[0]:
            replica.step()
            if replica is back and len(back.contributed) >= SETTLED and not last_step:
                last_step.append(back.manager.current_step() + 2)  # nobody is further than one step ahead

    together([*stayed, back], train)
    for replica in [*stayed, back]:
        replica.manager.shutdown()
    return stayed, back


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a replica's first transfer ends beside its forward pass, and the next ones before it.

    A transport's `late_at` has the numbers of the transfers that end beside it.
    """
    has_arrived = Healing.has_arrived
    num_waits: collections.Counter[Healing] = collections.Counter()

    def in_time(self: Healing, within_s: float) -> bool:
        num_waits[self] += 1
        is_late = num_waits[self] in getattr(self._transport, "late_at", [1])
        return not is_late and has_arrived(self, 60.0)

    monkeypatch.setattr(Healing, "has_arrived", in_time)


class Timed(HTTPTransport[Any]):
    """Its receives end beside a forward pass, or fail.

    The first is the one that heals, the second corrects what its loop made of that.
    """

    def __init__(self, *, late_at: Sequence[int] = (1,), fail_at: Sequence[int] = ()) -> None:
        super().__init__(timeout=SHORT, hostname="127.0.0.1")
        self.late_at = late_at
        self.fail_at = fail_at
        self.num_receives = 0

    def fetch_checkpoint(self, sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        self.num_receives += 1
        if self.num_receives in self.fail_at:
            raise SourceLostError("the source is gone", "source")
        return super().fetch_checkpoint(sources, step, timeout, **how)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_group_that_has_its_state_before_its_forward_pass_contributes_to_the_next_step(
    lighthouse: LighthouseServer, kind: type[Loop]
) -> None:
    stayed, back = come_back(lighthouse, kind, checkpoint_transport=Timed(late_at=[]))
    assert back.contributed == back.committed[1:]
    assert all(back.after[step] == stayed[0].after[step] for step in back.committed)
    assert back.manager.statistics().num_healed == 1
    assert back.manager.statistics().num_corrected == 0
    assert all(replica.manager.statistics().num_discarded == 0 for replica in stayed)


def test_a_transfer_that_fails_before_the_forward_pass_costs_nobody_a_step(lighthouse: LighthouseServer) -> None:
    stayed, back = come_back(lighthouse, Plain, checkpoint_transport=Timed(late_at=[], fail_at=[1]))
    assert back.contributed == back.committed[1:]
    assert all(replica.manager.statistics().num_discarded == 0 for replica in stayed)


@pytest.mark.parametrize("kind", LOOPS)
def test_it_is_bit_equal_to_the_survivors_from_its_first_contribution_on(
    lighthouse: LighthouseServer, kind: type[Loop]
) -> None:
    stayed, back = come_back(lighthouse, kind)
    assert len(back.contributed) >= SETTLED
    assert all(back.after[step] == stayed[0].after[step] for step in back.contributed)
    assert back.manager.statistics().num_healed == 1
    assert back.manager.statistics().num_corrected == (kind is not Plain)
    first = 1 if kind is Plain else 2
    assert back.contributed == back.committed[first:], (
        "it is compared before the next step, and adds nothing if corrected"
    )
    assert all(replica.manager.statistics().num_discarded == 0 for replica in stayed)


def test_what_differs_before_the_second_step_is_named_with_what_to_look_for(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torchft_ckpt.manager"):
        come_back(lighthouse, L2ByHand)
    (line,) = [line for line in caplog.messages if "It has loaded theirs" in line]
    assert line.startswith("comes_back") and "default.model.weight" in line and "before this step is computed" in line


def test_a_correction_that_fails_costs_nobody_a_step_and_the_group_comes_in_once_more(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    stayed, back = come_back(lighthouse, L2ByHand, checkpoint_transport=Timed(fail_at=[2]))
    assert any("and could not load theirs" in line for line in caplog.messages)
    assert all(back.after[step] == stayed[0].after[step] for step in back.contributed)
    assert all(replica.manager.statistics().num_discarded == 0 for replica in stayed)


class Foreign:
    """A transport of torchft's: it knows no local state, and moves all of it."""

    needs_process_group = False

    def __init__(self) -> None:
        self._own: HTTPTransport[Any] = HTTPTransport(timeout=SHORT, hostname="127.0.0.1")
        for name in ("metadata", "send_checkpoint", "disallow_checkpoint", "recv_checkpoint", "shutdown"):
            setattr(self, name, getattr(self._own, name))


@pytest.mark.parametrize("kind", [Plain, AdaptiveClipping])
def test_with_a_transport_of_torchft_the_whole_state_is_received_and_compared(
    lighthouse: LighthouseServer, kind: type[Loop]
) -> None:
    stayed, back = come_back(lighthouse, kind, checkpoint_transport=Foreign())
    assert back.contributed == back.committed[2:]
    assert all(back.after[step] == stayed[0].after[step] for step in back.contributed)
    assert back.manager.statistics().num_corrected == (kind is not Plain)


def test_where_nobody_is_left_who_is_known_to_hold_the_state_the_job_goes_on_with_its_own(
    lighthouse: LighthouseServer,
) -> None:
    stayed = Plain(lighthouse, "dies")
    for _ in range(3):
        assert stayed.step()
    back = Plain(lighthouse, "comes_back", seed=1)

    def until_both_have_committed(replica: Plain) -> None:
        while not back.committed:
            replica.step()
            if replica is stayed and replica.quorum_size() == 2:
                replica.manager.shutdown()
                return

    together([stayed, back], until_both_have_committed)
    for _ in range(3):
        assert back.step()
    assert back.contributed == back.committed[1:]
    assert back.manager.statistics().num_healed == 1
    back.manager.shutdown()


class Connecting(Plain):
    """Its process group connects when a forward pass has begun, not before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.computes = threading.Event()
        self.num_late = 0
        group = self.manager._steps._process_group
        configure = group.configure

        def configure_late(*wanted: Any) -> None:
            if self.manager.is_behind:
                assert self.computes.wait(20)
                self.num_late += 1
            configure(*wanted)

        group.configure = configure_late  # type: ignore[method-assign]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        self.computes.set()
        return loss


def test_a_joiner_computes_while_its_process_group_connects(lighthouse: LighthouseServer) -> None:
    stayed, back = come_back(lighthouse, Connecting, warm_up=False)
    assert back.num_late >= 1  # type: ignore[attr-defined]
    assert all(back.after[step] == stayed[0].after[step] for step in back.committed)


def test_a_group_that_loads_before_its_forward_pass_contributes_at_once(lighthouse: LighthouseServer) -> None:
    stayed, back = come_back(lighthouse, AdaptiveClipping, use_async_quorum=False)
    assert back.contributed == back.committed
    assert all(back.after[step] == stayed[0].after[step] for step in back.committed)
    assert back.manager.statistics().num_corrected == 0
