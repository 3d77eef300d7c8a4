"""The ledger of parts, simulated: holders that fail, lie, lose interest and come late, against what must hold at each moment."""

from __future__ import annotations

import random

import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.parts import PartLedger

MB = 1024 * 1024


def deal(ledger: PartLedger, names: list[str]) -> dict[str, int]:
    return {name: ledger.queued_bytes(name) for name in names}


def drain(ledger: PartLedger, name: str, max_parts: int = 128) -> list[int]:
    """Have one holder give everything that it is asked for, and nobody else anything."""
    given: list[int] = []
    while batch := ledger.next_batch(name, 64 * MB, max_parts):
        given += batch
        for part in batch:
            ledger.arrived(part)
    return given


class Simulation:
    """Random holders of random parts; whatever happens, what was asked of whom is checked."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        num_parts = self.random.choice([1, 2, 5, 20, 60])
        self.names = [f"rank {number}" for number in range(self.random.randint(1, 5))]
        self.sizes = [self.random.choice([1, 4, 100, MB, 4 * MB]) for _ in range(num_parts)]
        density = self.random.choice([0.3, 0.7, 1.0])
        self.able = {name: {part for part in range(num_parts) if self.random.random() < density} for name in self.names}
        self.ledger = PartLedger(self.sizes, {name: sorted(parts) for name, parts in self.able.items()})
        self.flying: dict[str, list[int]] = {}
        self.held: set[int] = set()
        self.check()

    def check(self) -> None:
        self.ledger.validate()
        missing = set(range(len(self.sizes))) - self.held
        flying = {part for parts in self.flying.values() for part in parts}
        can_give = set().union(*self.able.values()) if self.able else set()
        assert set(self.ledger.orphans()) == missing - can_give - flying
        assert self.ledger.num_missing == len(missing)
        assert self.ledger.is_done == (not missing)

    def step(self) -> None:
        name = self.random.choice(self.names)
        flying = self.flying.get(name)
        if flying is None:
            batch = self.ledger.next_batch(name, self.random.choice([1, MB, 64 * MB]), self.random.choice([1, 3, 128]))
            elsewhere = {part for parts in self.flying.values() for part in parts}
            assert not set(batch) & (self.held | elsewhere), "asked for twice"
            assert set(batch) <= self.able.get(name, set()), "asked of who cannot give"
            assert batch == sorted(batch)
            if batch:
                self.flying[name] = batch
        elif flying:
            part = flying.pop(0)
            what = self.random.random()
            if what < 0.8:
                self.ledger.arrived(part)
                self.held.add(part)
            elif what < 0.9:
                self.ledger.give_back([part])
            else:  # what it has is not what is wanted
                self.able.get(name, set()).discard(part)
                self.ledger.forbid(name, part)
                self.ledger.give_back([part])
        else:
            del self.flying[name]

    def disturb(self) -> None:
        name = self.random.choice(self.names)
        what = self.random.random()
        if what < 0.3 and len(self.able) > 1:
            self.ledger.drop(name)
            self.able.pop(name, None)
            # Its stream goes on for a while: what it brings counts, what it does not is given back.
        elif what < 0.5:
            self.ledger.give_back(self.flying.pop(name, []))
        elif what < 0.7 and self.held:
            gone = self.random.sample(sorted(self.held), self.random.randint(1, len(self.held)))
            self.held.difference_update(gone)
            self.ledger.invalidate(gone)
        elif what < 0.8 and name in self.able:
            part = self.random.randrange(len(self.sizes))
            self.able[name].add(part)
            self.ledger.allow(name, [part])
        elif self.able.get(name):
            part = self.random.choice(sorted(self.able[name]))
            if part not in self.flying.get(name, []):
                self.able[name].discard(part)
                self.ledger.forbid(name, part)


@pytest.mark.parametrize("first_seed", range(0, by_default(100, thorough=300), 50))
def test_whatever_happens_to_holders_each_part_arrives_or_is_an_orphan(first_seed):
    for seed in range(first_seed, first_seed + 50):
        print("seed", seed)
        simulation = Simulation(seed)
        for _ in range(simulation.random.randint(0, 150)):
            simulation.step()
            if simulation.random.random() < 0.1:
                simulation.disturb()
            simulation.check()
        for _ in range(100_000):  # from now on nobody fails
            if simulation.ledger.num_missing == len(simulation.ledger.orphans()):
                break
            simulation.step()
            simulation.check()
        missing = set(range(len(simulation.sizes))) - simulation.held
        assert missing == set(simulation.ledger.orphans()), f"seed {seed}"


@pytest.mark.parametrize("seed", range(by_default(6, thorough=30)))
def test_holders_of_everything_are_dealt_about_the_same_bytes(seed):
    print("seed", seed)
    chance = random.Random(seed)
    names = [f"rank {number}" for number in range(chance.randint(2, 8))]
    sizes = [chance.randint(1, 4 * MB) for _ in range(chance.randint(20 * len(names), 100 * len(names)))]
    ledger = PartLedger(sizes, dict.fromkeys(names, range(len(sizes))))
    loads = deal(ledger, names)
    assert max(loads.values()) <= 1.2 * sum(sizes) / len(names), loads


@pytest.mark.parametrize("seed", range(by_default(6, thorough=20)))
def test_streams_of_one_rate_are_done_at_about_the_same_time(seed):
    """Each gives its batch, then asks for the next: the most that one has sent is little more than the mean."""
    print("seed", seed)
    chance = random.Random(seed)
    names = [f"rank {number}" for number in range(chance.randint(2, 6))]
    sizes = [chance.randint(1, 4 * MB) for _ in range(40 * len(names))]
    ledger = PartLedger(sizes, dict.fromkeys(names, range(len(sizes))))
    sent = dict.fromkeys(names, 0)
    while not ledger.is_done:
        name = min(names, key=lambda name: sent[name])
        batch = ledger.next_batch(name, 8 * MB, 128)
        assert batch, "a stream without work while another one has a queue"
        for part in batch:
            ledger.arrived(part)
            sent[name] += sizes[part]
    assert max(sent.values()) <= 1.2 * sum(sizes) / len(names) + 4 * MB


def test_what_only_one_can_give_does_not_burden_it_with_more():
    """One rank has a part of its own, two have the rest."""
    ledger = PartLedger([6, 2, 2, 2], {"a": [0, 1, 2, 3], "b": [1, 2, 3]})
    assert deal(ledger, ["a", "b"]) == {"a": 6, "b": 6}


def test_a_lost_holders_parts_come_from_those_that_have_them_too():
    ledger = PartLedger([1, 1, 1, 1], {"a": [0, 1, 2, 3], "b": [0, 1, 2]})
    batch = ledger.next_batch("a", 100, 100)
    ledger.drop("a")
    assert drain(ledger, "a") == []
    assert not set(batch) & set(drain(ledger, "b")), "a stream may still be writing them"
    ledger.give_back(batch)
    drain(ledger, "b")
    assert (ledger.orphans(), ledger.num_missing) == ([3], 1)
    ledger.validate()


def test_an_idle_holder_takes_over_half_of_what_the_busiest_has_left():
    ledger = PartLedger([1] * 8, {"slow": range(8), "fast": range(8)})
    mine = drain(ledger, "fast")
    assert sorted(mine) == list(range(8))
    assert ledger.next_batch("slow", 100, 100) == []
    assert ledger.is_done


def test_a_holder_of_other_parts_is_not_asked_for_those_of_a_busy_one():
    ledger = PartLedger([1, 1], {"a": [0], "b": [1]})
    assert drain(ledger, "a") == [0]
    assert ledger.next_batch("a", 100, 100) == []
    assert drain(ledger, "b") == [1]


def test_a_part_that_is_longer_than_a_batch_is_asked_for_alone():
    ledger = PartLedger([100, 1], {"a": [0, 1]})
    assert [ledger.next_batch("a", 1, 10) for _ in range(3)] == [[0], [1], []]


def test_a_batch_has_no_more_parts_than_allowed():
    ledger = PartLedger([0] * 10, {"a": range(10)})
    assert len(ledger.next_batch("a", 100, 4)) == 4


def test_a_holder_that_is_not_known_gives_nothing():
    ledger = PartLedger([1], {"a": [0]})
    assert ledger.next_batch("b", 100, 100) == []
    assert ledger.queued_bytes("b") == 0
    ledger.drop("b")
    ledger.forbid("b", 0)
    ledger.validate()


def test_what_arrives_after_it_was_given_back_is_held_once():
    ledger = PartLedger([1, 1], {"a": [0, 1], "b": [0, 1]})
    batch = ledger.next_batch("a", 100, 100)
    ledger.give_back(batch)
    ledger.give_back(batch)
    ledger.validate()
    for part in batch:
        ledger.arrived(part)
        ledger.validate()
    assert drain(ledger, "b") and ledger.is_done
    ledger.invalidate([0, 0, 1])
    ledger.validate()
    assert ledger.num_missing == 2


def test_an_orphan_that_a_holder_may_give_after_all_is_dealt_to_it():
    ledger = PartLedger([1, 1], {"a": [0, 1]})
    ledger.forbid("a", 1)
    assert (drain(ledger, "a"), ledger.orphans()) == ([0], [1])
    ledger.allow("a", [0, 1])
    ledger.validate()
    assert (drain(ledger, "a"), ledger.orphans(), ledger.is_done) == ([1], [], True)


def test_a_transfer_of_nothing_is_done():
    ledger = PartLedger([], {"a": []})
    assert ledger.is_done and ledger.next_batch("a", 1, 1) == []
