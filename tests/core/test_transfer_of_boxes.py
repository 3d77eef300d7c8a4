"""A transfer of boxes, simulated: sources that fail, lie, lose interest and come late, against what must hold at each moment."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.transfer.scheduler import Batches, TransferLedger, mask_of_each, units_of

MB = 1024 * 1024


class Ledger(TransferLedger):
    """A ledger of boxes with a stream for each source, by the source's name; nothing takes any time."""

    def __init__(
        self, sizes: Sequence[int], able: Mapping[str, Iterable[int]], *, max_bytes: int = 64 * MB, max_units: int = 128
    ) -> None:
        batches = Batches(first_bytes=max_bytes, max_bytes=max_bytes, max_units=max_units)
        super().__init__(sizes, batches=batches, pick=random.Random(1).randrange)
        self.streams: dict[str, int] = {}
        for name, units in able.items():
            self.add_source(name, mask_of_each(units))
            self.streams[name] = self.open_stream(name, 0.0)

    def ask(self, name: str) -> list[int]:
        return self.next_batch(self.streams[name], 0.0)

    def bring(self, name: str, units: Iterable[int]) -> None:
        for unit in units:
            self.came(self.streams[name], unit, 0.0)
            self.arrived(self.streams[name], unit)

    def lose(self, name: str) -> None:
        """A source is lost, and its stream with it."""
        self.drop_source(name)
        self.close_stream(self.streams[name])

    def left(self) -> list[int]:
        """What is not held."""
        return [unit for unit in range(len(self._sizes)) if not self.held >> unit & 1]


def drain(ledger: Ledger, name: str) -> list[int]:
    """Have one source bring everything that it is asked for, and no other one anything."""
    brought: list[int] = []
    while batch := ledger.ask(name):
        brought += batch
        ledger.bring(name, batch)
    return brought


class Simulation:
    """Random sources of random boxes; whatever happens, what was asked of whom is checked."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        num_units = self.random.choice([1, 2, 5, 20, 60])
        self.names = [f"rank {number}" for number in range(self.random.randint(1, 5))]
        self.sizes = [self.random.choice([1, 4, 100, MB, 4 * MB]) for _ in range(num_units)]
        density = self.random.choice([0.3, 0.7, 1.0])
        self.able = {name: {unit for unit in range(num_units) if self.random.random() < density} for name in self.names}
        max_bytes, max_units = self.random.choice([1, MB, 64 * MB]), self.random.choice([1, 3, 128])
        self.ledger = Ledger(self.sizes, self.able, max_bytes=max_bytes, max_units=max_units)
        self.streams = dict(self.ledger.streams)
        self.flying: dict[str, list[int]] = {}
        self.held: set[int] = set()
        self.check()

    def lost(self) -> set[int]:
        """What can not be had any more."""
        flying = {unit for units in self.flying.values() for unit in units}
        return set(range(len(self.sizes))) - self.held - flying - set().union(*self.able.values())

    def check(self) -> None:
        self.ledger.validate()
        assert set(units_of(self.ledger.held)) == self.held
        assert self.ledger.is_done == (len(self.held) == len(self.sizes))
        assert self.ledger.is_hopeless() == bool(self.lost())

    def step(self) -> None:
        name = self.random.choice(self.names)
        if name not in self.streams:
            self.streams[name] = self.ledger.streams[name] = self.ledger.open_stream(name, 0.0)
        flying = self.flying.get(name)
        if flying is None:
            batch = self.ledger.ask(name)
            elsewhere = {unit for units in self.flying.values() for unit in units}
            assert not set(batch) & (self.held | elsewhere), "asked for twice"
            assert set(batch) <= self.able.get(name, set()), "asked of who cannot give"
            assert batch == sorted(batch)
            if batch:
                self.flying[name] = batch
        elif flying:
            unit = flying.pop(0)
            what = self.random.random()
            if what < 0.8:
                self.ledger.bring(name, [unit])
                self.held.add(unit)
            elif what < 0.9:
                self.give_back(name)
            else:  # what it has is not what is wanted
                self.able.get(name, set()).discard(unit)
                self.ledger.forbid(name, 1 << unit)
                self.give_back(name)
        else:
            del self.flying[name]

    def give_back(self, name: str) -> None:
        self.flying.pop(name, None)
        if name in self.streams:
            self.ledger.give_back(self.streams[name])

    def disturb(self) -> None:
        name = self.random.choice(self.names)
        what = self.random.random()
        if what < 0.3 and len(self.able) > 1:
            self.ledger.drop_source(name)
            self.able.pop(name, None)
            # Its stream goes on for a while: what it brings counts, what it does not is given back.
        elif what < 0.4:
            self.give_back(name)
        elif what < 0.5 and name in self.streams:
            self.flying.pop(name, None)
            self.ledger.close_stream(self.streams.pop(name))
        elif what < 0.7 and self.held:
            gone = self.random.sample(sorted(self.held), self.random.randint(1, len(self.held)))
            self.held.difference_update(gone)
            self.ledger.invalidate(mask_of_each(gone))
        elif what < 0.8 and name in self.able:
            unit = self.random.randrange(len(self.sizes))
            self.able[name].add(unit)
            self.ledger.allow(name, 1 << unit)
        elif self.able.get(name):
            unit = self.random.choice(sorted(self.able[name]))
            if unit not in self.flying.get(name, []):
                self.able[name].discard(unit)
                self.ledger.forbid(name, 1 << unit)


@pytest.mark.parametrize("first_seed", range(0, by_default(100, thorough=300), 50))
def test_whatever_happens_to_sources_each_box_arrives_or_cannot_be_had(first_seed):
    for seed in range(first_seed, first_seed + 50):
        print("seed", seed)
        simulation = Simulation(seed)
        for _ in range(simulation.random.randint(0, 150)):
            simulation.step()
            if simulation.random.random() < 0.1:
                simulation.disturb()
            simulation.check()
        for _ in range(100_000):  # from now on nobody fails
            if set(simulation.ledger.left()) == simulation.lost():
                break
            simulation.step()
            simulation.check()
        assert set(simulation.ledger.left()) == simulation.lost(), f"seed {seed}"


@pytest.mark.parametrize("seed", range(by_default(6, thorough=20)))
def test_streams_of_one_rate_are_done_at_about_the_same_time(seed):
    """Each brings its batch, then asks for the next: the most that one has sent is little more than the mean."""
    print("seed", seed)
    chance = random.Random(seed)
    names = [f"rank {number}" for number in range(chance.randint(2, 6))]
    sizes = [chance.randint(1, 4 * MB) for _ in range(40 * len(names))]
    ledger = Ledger(sizes, dict.fromkeys(names, range(len(sizes))), max_bytes=8 * MB)
    assert busiest(ledger, sizes) <= 1.2 * sum(sizes) / len(names) + 4 * MB


@pytest.mark.parametrize("seed", range(by_default(6, thorough=20)))
def test_who_has_boxes_of_its_own_gives_less_of_what_others_have_too(seed):
    """Each has as many bytes that only it can give as all have in common, but for the first, which has nothing of its own."""
    print("seed", seed)
    chance = random.Random(seed)
    names = [f"rank {number}" for number in range(chance.randint(2, 6))]
    num_each = 40
    sizes = [chance.randint(1, 4 * MB) for _ in range(num_each * len(names))]
    shared = range(num_each)
    own = {name: range(num_each * at, num_each * (at + 1)) if at else range(0) for at, name in enumerate(names)}
    ledger = Ledger(sizes, {name: [*shared, *own[name]] for name in names}, max_bytes=8 * MB)
    assert busiest(ledger, sizes) <= 1.2 * sum(sizes) / len(names) + 4 * MB


def busiest(ledger: Ledger, sizes: Sequence[int]) -> int:
    """Have streams of one rate bring everything; return the bytes of the one that brought most."""
    sent = dict.fromkeys(ledger.streams, 0)
    idle: set[str] = set()
    while not ledger.is_done:
        name = min(sent.keys() - idle, key=lambda name: (sent[name], name))
        batch = ledger.ask(name)
        if not batch:
            idle.add(name)
        ledger.bring(name, batch)
        sent[name] += sum(sizes[unit] for unit in batch)
    return max(sent.values())


def test_what_only_one_can_give_comes_from_it_first():
    """One rank has a box of its own, two have the rest."""
    ledger = Ledger([2, 2, 2, 6], {"a": [0, 1, 2, 3], "b": [0, 1, 2]})
    assert ledger.ask("a") == [3]
    assert drain(ledger, "b") == [0, 1, 2]


def test_a_lost_sources_boxes_come_from_those_that_have_them_too():
    ledger = Ledger([1, 1, 1, 1], {"a": [0, 1, 2, 3], "b": [0, 1, 2]})
    batch = ledger.ask("a")
    ledger.drop_source("a")
    assert not set(batch) & set(drain(ledger, "b")), "a stream may still be writing them"
    ledger.lose("a")
    drain(ledger, "b")
    assert (ledger.left(), ledger.is_hopeless()) == ([3], True)
    ledger.validate()


def test_an_idle_source_brings_what_a_slow_one_was_not_asked_for_yet():
    ledger = Ledger([1] * 8, {"slow": range(8), "fast": range(8)})
    assert sorted(drain(ledger, "fast")) == list(range(8))
    assert ledger.ask("slow") == [] and ledger.is_done


def test_a_source_of_other_boxes_is_not_asked_for_those_of_a_busy_one():
    ledger = Ledger([1, 1], {"a": [0], "b": [1]})
    assert drain(ledger, "a") == [0]
    assert ledger.ask("a") == []
    assert drain(ledger, "b") == [1]


def test_a_box_that_is_longer_than_a_batch_is_asked_for_alone():
    ledger = Ledger([100, 1], {"a": [0, 1]}, max_bytes=1)
    asked = [ledger.ask("a")]
    ledger.bring("a", asked[0])
    asked.append(ledger.ask("a"))
    assert asked == [[0], [1]]


def test_a_batch_has_no_more_boxes_than_allowed():
    assert len(Ledger([0] * 10, {"a": range(10)}, max_units=4).ask("a")) == 4


def test_a_source_that_is_not_known_gives_nothing():
    ledger = Ledger([1], {"a": [0]})
    stream = ledger.open_stream("b", 0.0)
    assert ledger.next_batch(stream, 0.0) == []
    ledger.drop_source("b")
    ledger.forbid("b", 1)
    ledger.allow("b", 1)
    ledger.validate()
    assert ledger.next_batch(stream, 0.0) == []


def test_what_arrives_after_it_was_given_back_is_held_once():
    ledger = Ledger([1, 1], {"a": [0, 1], "b": [0, 1]})
    batch = ledger.ask("a")
    ledger.give_back(ledger.streams["a"])
    ledger.give_back(ledger.streams["a"])
    ledger.validate()
    for unit in batch:
        ledger.bring("a", [unit])
        ledger.validate()
    assert drain(ledger, "b") and ledger.is_done
    ledger.invalidate(0b11)
    ledger.validate()
    assert ledger.left() == [0, 1]


def test_a_box_that_a_source_may_give_after_all_comes_from_it():
    ledger = Ledger([1, 1], {"a": [0, 1]})
    ledger.forbid("a", 0b10)
    assert (drain(ledger, "a"), ledger.is_hopeless()) == ([0], True)
    ledger.allow("a", 0b11)
    ledger.validate()
    assert (drain(ledger, "a"), ledger.is_hopeless(), ledger.is_done) == ([1], False, True)


def test_a_transfer_of_nothing_is_done():
    ledger = Ledger([], {"a": []})
    assert ledger.is_done and ledger.ask("a") == []


@pytest.mark.parametrize("units", [[], [0], [1023, 1024, 1025], [5, 70, 5000], [1 << 17]])
def test_a_bit_set_is_made_of_units_and_taken_apart_again(units):
    assert list(units_of(mask_of_each(units))) == units
