"""Checks of the promises of an outer loop, for a loop of your own.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_loop_conforms(check):
        check(lambda manager, model, inner_optimizer: MyLoop(manager, model, inner_optimizer, ...))

Each check runs the loop in two replicas, threads of this process, whose votes it decides. The loop has to end a round within a
thousand inner steps. It raises `ConformanceError` with a sentence about the promise that was broken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from torchft_ckpt.outer.loop import OuterLoop
from torchft_ckpt.outer.manager import OuterManager
from torchft_ckpt.testing.conformance import ConformanceError, differences, require, require_equal
from torchft_ckpt.testing.fake_outer_manager import FakeOuterManager, Hub, run_replicas

MakeLoop = Callable[[OuterManager, nn.Module, torch.optim.Optimizer], OuterLoop[Any]]
Check = Callable[[MakeLoop], None]
NUM_REPLICAS = 2
_MAX_INNER_STEPS = 1000
_MAX_VOTES = 100
_PARTY = "outer loop"


class _Vote(NamedTuple):
    """After a vote: the committed rounds, what all replicas have in common, and the model."""

    step: int
    state: dict[str, Any]
    model: dict[str, torch.Tensor]


class _WatchedManager(FakeOuterManager):
    """Sees to it that the state changes under the lock alone."""

    _at_release: Any = None

    def disallow_state_dict_read(self) -> None:
        super().disallow_state_dict_read()
        if self.state is not None and self._at_release is not None:
            require_equal(_PARTY, self.state(), self._at_release, "the state changed while the lock was not held")

    def allow_state_dict_read(self) -> None:
        if self.state is not None and self.is_locked:
            self._at_release = copy.deepcopy(self.state())
        super().allow_state_dict_read()


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    generator = torch.Generator(device="cpu").manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.double, device="cpu") / 4)
    return model


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    generator = torch.Generator(device="cpu").manual_seed(1000 * rank + number)
    batch = torch.randn(3, 4, generator=generator, dtype=torch.double, device="cpu")
    optimizer.zero_grad()
    (model(batch) - batch.flip(1)).square().mean().backward()
    optimizer.step()


def _histories(make: MakeLoop, num_votes: int, outcomes: Sequence[bool] = ()) -> list[list[_Vote]]:
    hub = Hub(NUM_REPLICAS, outcomes)

    def run(rank: int) -> list[_Vote]:
        model, manager = _model(), _WatchedManager(hub, rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loop = make(manager, model, inner)

        def seen() -> _Vote:
            return copy.deepcopy(_Vote(manager.current_step(), loop.state_dict(), dict(model.state_dict())))

        history, seen_votes = [seen()], 0
        with loop:
            for number in range(_MAX_INNER_STEPS):
                _train_step(model, inner, rank, number)
                if manager.num_votes > seen_votes:
                    seen_votes = manager.num_votes
                    history.append(seen())
                if seen_votes >= num_votes:
                    break
        require(_PARTY, not manager.is_torn, "the loop reported a torn state, and nothing has failed")
        return history

    histories = run_replicas(NUM_REPLICAS, run)
    found = [[vote.step for vote in history] for history in histories]
    require(_PARTY, found[0] == found[1], f"the replicas held votes at different rounds: {found}")
    require(_PARTY, len(found[0]) > 1, f"no round ended within {_MAX_INNER_STEPS} inner steps")
    return histories


def check_a_committed_round_leaves_all_replicas_equal(make: MakeLoop) -> None:
    one, other = _histories(make, num_votes=4)
    for mine, theirs in zip(one, other, strict=True):
        require_equal(_PARTY, mine.state, theirs.state, f"after round {mine.step} the replicas differ")
    require(_PARTY, differences(one[0].state, one[-1].state) != [], "four committed rounds changed nothing")


def check_a_round_that_is_discarded_changes_nothing_that_is_global(make: MakeLoop) -> None:
    """However often a round is tried again: the first commits, and so does the last; all between are discarded."""
    one, other = _histories(make, num_votes=_MAX_VOTES, outcomes=[True, *[False] * (_MAX_VOTES - 2), True])
    for before, after in pairwise(one):
        if before.step == after.step and before.step:
            require_equal(_PARTY, before.state, after.state, "a discarded round changed what is global")
    require_equal(
        _PARTY, one[-1].state, other[-1].state, "after a round that followed on discarded ones the replicas differ"
    )


def check_a_replica_that_loads_the_state_goes_on_with_it(make: MakeLoop) -> None:
    trained = _histories(make, num_votes=2)[0][-1].state

    def run(rank: int) -> None:
        model = _model()
        manager = FakeOuterManager(Hub(1), 0)
        loop = make(manager, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loop.load_state_dict(copy.deepcopy(trained))
        require_equal(_PARTY, loop.state_dict(), trained, "what was loaded is another state")
        loop.restore_parameters()
        weights = {id(param) for param in model.parameters()}
        require(_PARTY, len(weights) == len(list(_model().parameters())), "the load replaced the model's parameters")

    run_replicas(1, run)


__all__ = ["CHECKS", "Check", "ConformanceError", "check_outer_loop"]

CHECKS: list[Check] = [check for name, check in list(globals().items()) if name.startswith("check_")]
"""Every check, for a parametrized test."""


def check_outer_loop(make: MakeLoop) -> None:
    """Run every check.

    Raises:
        ConformanceError: a promise was broken.
    """
    for check in CHECKS:
        check(make)
