"""Which checkpoints may go: never the one that a job would resume from, nor what may be in the making."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.thoroughness import by_default

from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.core.durable.retention import plan_removals
from torchft_ckpt.errors import ConfigError


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1, "keep_every": 0}])
def test_less_than_one_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        plan_removals([1], whole=[1], **{"keep_every": None, **wrong})


def may_go(
    name: Any,
    present: list[Any],
    keep_last: int | None,
    keep_every: int | None,
    whole: set[Any],
    in_flight: set[Any],
) -> bool:
    """The rules as they are told, one after the other."""
    whole_here = sorted(whole & set(present))
    if keep_last is None or not whole_here:
        return False
    if name >= whole_here[-1]:
        return False
    if name in in_flight:
        return False
    if keep_every is not None and name.step % keep_every == 0:
        return False
    if name in whole_here[-keep_last:]:
        return False
    if name not in whole:
        return len([other for other in whole_here if other > name]) >= keep_last
    return True


@pytest.mark.parametrize("first", range(0, by_default(100, thorough=300), 10))
def test_random_ones_go_as_a_dumb_oracle_says(first: int) -> None:
    for seed in range(first, first + 10):
        dice = random.Random(seed)
        everything: list[Any] = [
            CheckpointName(dice.randrange(12), f"q{dice.randrange(3)}") for _ in range(dice.randrange(14))
        ]
        present = [name for name in everything if dice.random() < 0.9]
        whole = {name for name in everything if dice.random() < dice.choice([0.2, 0.6, 1.0])}
        in_flight = {name for name in everything if dice.random() < 0.1}
        keep_last, keep_every = dice.choice([None, 1, 1, 2, 3, 4]), dice.choice([None, 1, 2, 3, 5])
        planned = plan_removals(present, keep_last=keep_last, keep_every=keep_every, whole=whole, in_flight=in_flight)
        expected = [
            name for name in sorted(set(present)) if may_go(name, present, keep_last, keep_every, whole, in_flight)
        ]
        assert planned == expected, f"seed {seed}"
        left = [name for name in present if name not in planned]
        again = plan_removals(left, keep_last=keep_last, keep_every=keep_every, whole=whole, in_flight=in_flight)
        assert again == [], "what is planned is planned at once"
