"""Steps of many microbatches with deaths, returns and cut-offs: the arithmetic of `core.training.microbatches` alone.

A microbatch's gradient is its name, and a sum is a digest of its two operands: so the sum of a step is the expression itself, and
two that were added otherwise differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from torchft_ckpt.core.training.microbatches import Node, accept, cover, deal, family, fold, members


def add(left: bytes, right: bytes) -> bytes:
    return hashlib.blake2b(left + right, digest_size=8).digest()


@dataclass(slots=True)
class Held:
    """What a group has computed of a step."""

    num_microbatches: int
    nodes: dict[Node, bytes] = field(default_factory=dict)

    def compute(self, state: object, one: int) -> None:
        """Compute a microbatch with a state, or in a step."""
        node, value = (one, one + 1), hashlib.blake2b(f"{state}/{one}".encode(), digest_size=8).digest()
        while (kin := family(node, self.num_microbatches)) is not None and kin[1] in self.nodes:
            other = self.nodes.pop(kin[1])
            node, value = kin[0], add(value, other) if node < kin[1] else add(other, value)
        self.nodes[node] = value


def check_whole(brought: list[dict[Node, bytes]], num_microbatches: int, state: object) -> str:
    """Say what is wrong with what groups bring to a sum; empty: each microbatch is there once, and the sum is the expression."""
    counts = Counter(one for nodes in brought for one in members(nodes))
    if counts != Counter(range(num_microbatches)):
        return f"microbatches are there so often: {dict(counts)}"
    whole = Held(num_microbatches)
    for one in range(num_microbatches):
        whole.compute(state, one)
    total = fold({node: value for nodes in brought for node, value in nodes.items()}, num_microbatches, add)
    return "" if whole.nodes == {(0, num_microbatches): total} else "the sum is another expression"


@dataclass(slots=True)
class Tally:
    """What a run has come to."""

    num_computed: int = 0
    num_discarded: int = 0
    most_held: int = 0
    longest: int = 0
    """The sum over all attempts of the microbatches that the slowest group computed in it."""


def run(num_steps: int, num_groups: int, num_microbatches: int, *, death_rate: float, seed: int) -> Tally:
    """Run so many steps.

    Args:
        death_rate: of a group in an attempt. Four of five die; the fifth is cut off, and comes back with what it has computed.

    Raises:
        AssertionError: a microbatch was not counted once, or a sum was another expression.
    """
    rng, tally = Random(seed), Tally()
    here, away = list(range(num_groups)), list[int]()
    for step in range(num_steps):
        held = {group: Held(num_microbatches) for group in range(num_groups)}
        whole = Held(num_microbatches)
        for one in range(num_microbatches):
            whole.compute(step, one)
        while True:
            for group in [group for group in away if rng.random() < 0.3]:
                away.remove(group)
                here.insert(rng.randint(0, len(here)), group)
            accepted = accept([held[group].nodes for group in here], num_microbatches)
            deals = deal(num_microbatches, accepted)
            dead = [group for group in here if rng.random() < death_rate][: len(here) - 1]
            slowest = 0
            for group, mine, kept in zip(here, deals, accepted, strict=True):
                own = held[group]
                own.nodes = {node: own.nodes[node] for node in kept}
                todo = [one for one in mine if one not in members(kept)]
                slowest = max(slowest, len(todo))
                for one in todo[: rng.randint(0, len(todo)) if group in dead else None]:
                    own.compute(step, one)
                    tally.num_computed += 1
                    tally.most_held = max(tally.most_held, len(own.nodes))
            tally.longest += slowest
            if not dead:
                break
            tally.num_discarded += 1
            for group in dead:
                here.remove(group)
                away.append(group)
                if rng.random() < 0.8:
                    held[group] = Held(num_microbatches)
        assert Counter(one for mine in deals for one in mine) == Counter(range(num_microbatches)), (seed, step, deals)
        nodes: dict[Node, bytes] = {}
        for group, mine in zip(here, deals, strict=True):
            assert sorted(held[group].nodes) == cover(mine, num_microbatches), (seed, step, mine)
            nodes.update(held[group].nodes)
        total = fold(nodes, num_microbatches, add)
        assert {(0, num_microbatches): total} == whole.nodes, f"seed {seed}, step {step}: another expression"
    return tally
