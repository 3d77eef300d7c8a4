"""What a writer does once its share is there: wait, fill, close. As stories, and with many writers that die and dawdle."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.boxes import Box, intersect, whole
from torchft_ckpt.core.coverage import missing_boxes
from torchft_ckpt.core.filling import deal_holes
from torchft_ckpt.core.saving import Act, Member, SaveWatch, Seen
from torchft_ckpt.core.shares import Item, deal_shares

FILL_AFTER_S = 10.0
GIVE_UP_S = 1000.0
A, B, C = Member(0, 0), Member(1, 0), Member(2, 0)
LOOK_S = 1.0
"""The longest that is waited between two looks."""


def watch_of(member: Member = A, *, writers: tuple[Member, ...] = (A, B), give_up_at_s: float = GIVE_UP_S) -> SaveWatch:
    return SaveWatch(
        place=sorted(writers).index(member) if member in writers else len(writers),
        writers=frozenset(writers),
        fill_after_s=FILL_AFTER_S,
        give_up_at_s=give_up_at_s,
    )


def seen(*parts: Member, fills: Mapping[Member, int] | None = None, closed: bool = False, **growth: int) -> Seen:
    """Parts that are there; growth by the letter of a member."""
    numbers = {(*part, 0) for part in parts} | {(*part, fill) for part, fill in (fills or {}).items()}
    letters = {"a": A, "b": B, "c": C}
    return Seen(closed, frozenset(numbers), {letters[letter]: num_bytes for letter, num_bytes in growth.items()})


# Stories


def test_the_first_closes_at_once_when_all_parts_are_there() -> None:
    assert watch_of(A).observe(seen(A, B), 5.0).act is Act.CLOSE


def test_the_next_one_closes_a_second_later_if_the_first_has_not() -> None:
    watch = watch_of(B)
    assert watch.observe(seen(A, B), 5.0).act is Act.WAIT
    assert watch.observe(seen(A, B), 5.9).act is Act.WAIT
    assert watch.observe(seen(A, B), 6.0).act is Act.CLOSE


def test_of_a_thousand_one_after_the_other_reads_what_is_there_and_nobody_beside_it() -> None:
    writers = tuple(Member(replica, 0) for replica in range(1000))
    for place, turn_s in ((0, 0.0), (1, 20.0), (2, 40.0)):
        watch = watch_of(writers[place], writers=writers)
        if turn_s:
            assert watch.observe(seen(*writers), 0.0).act is Act.WAIT
            assert watch.observe(seen(*writers), turn_s - 0.1).act is Act.WAIT
        assert watch.observe(seen(*writers), turn_s).act is Act.CLOSE


def test_it_is_done_when_somebody_has_closed_it() -> None:
    watch = watch_of(B, give_up_at_s=1.0)
    assert watch.observe(seen(A), 0.0).act is Act.WAIT
    assert watch.observe(seen(A, B, closed=True), 2.0).act is Act.DONE


def test_a_part_that_does_not_come_is_waited_for_then_filled_then_closed() -> None:
    watch = watch_of(A)
    assert watch.observe(seen(A), 0.0).act is Act.WAIT
    assert watch.observe(seen(A), FILL_AFTER_S - 0.1).act is Act.WAIT
    decision = watch.observe(seen(A), FILL_AFTER_S)
    assert (decision.act, decision.reason) == (Act.FILL, "nothing came of replica 1 rank 0 for 10.0 s")
    watch.filled(FILL_AFTER_S + 2)
    assert watch.observe(seen(A, fills={A: 1}), FILL_AFTER_S + 2).act is Act.CLOSE


@pytest.mark.parametrize("last", [9.9, 50.0, 500.0])
def test_who_still_writes_is_not_taken_for_lost(last: float) -> None:
    watch = watch_of(A)
    now, num_bytes = 0.0, 0
    while now < last:
        num_bytes += 1
        assert watch.observe(seen(A, b=num_bytes), now).act is Act.WAIT
        now += FILL_AFTER_S * 0.9
    assert watch.observe(seen(A, B), now).act is Act.CLOSE


def test_whoever_looks_later_fills_its_own_part_all_the_same() -> None:
    """Another one's fill is there already; the work is divided, so this one's part is still missing."""
    watch = watch_of(A, writers=(A, B, C))
    assert watch.observe(seen(A, C), 0.0).act is Act.WAIT
    assert watch.observe(seen(A, C, fills={C: 1}), FILL_AFTER_S).act is Act.FILL


def test_what_is_still_not_whole_after_a_fill_is_filled_again_later() -> None:
    watch = watch_of(A)
    watch.observe(seen(A), 0.0)
    assert watch.observe(seen(A), 10.0).act is Act.FILL
    watch.filled(10.0)
    assert watch.observe(seen(A), 10.0).act is Act.CLOSE
    watch.not_whole()
    assert watch.observe(seen(A), 19.0).act is Act.WAIT
    assert watch.observe(seen(A, fills={C: 1}), 19.5).act is Act.CLOSE  # another one filled something
    watch.not_whole()
    assert watch.observe(seen(A, fills={C: 1}), 29.0).act is Act.WAIT
    assert watch.observe(seen(A, fills={C: 1}), 29.5).act is Act.FILL
    watch.filled(30.0)
    assert watch.num_fills == 2


def test_where_all_parts_are_there_and_it_is_not_whole_it_is_filled_at_once() -> None:
    """A part is damaged, or somebody holds what it should not: nobody is to be waited for."""
    watch = watch_of(A)
    assert watch.observe(seen(A, B), 0.0).act is Act.CLOSE
    watch.not_whole()
    decision = watch.observe(seen(A, B), 0.1)
    assert (decision.act, decision.reason) == (Act.FILL, "a hole")


def test_it_is_given_up_in_time_and_says_who_was_missing() -> None:
    watch = watch_of(A, writers=(A, *(Member(9, rank) for rank in range(7))), give_up_at_s=7.0)
    decision = watch.observe(seen(A), 6.5)
    assert (decision.act, decision.look_in_s <= 0.5) == (Act.WAIT, True)
    decision = watch.observe(seen(A), 7.0)
    assert decision.act is Act.GIVE_UP
    assert "replica 9 rank 0" in decision.reason
    assert "and 2 more" in decision.reason


def test_looks_are_far_between_while_nothing_happens_and_soon_after_something_did() -> None:
    watch = watch_of(A)
    waits = [watch.observe(seen(A), now / 10).look_in_s for now in range(90)]
    assert waits == sorted(waits)
    assert waits[0] <= 0.02
    assert waits[1] <= 0.021, "nobody is late who looks a tenth of a second after"
    assert 0.2 < waits[-1] <= LOOK_S
    assert watch.observe(seen(A, b=1), 9.0).look_in_s <= 0.02


def test_a_group_that_does_not_write_closes_last() -> None:
    watch = watch_of(C)
    assert watch.observe(seen(A, B), 0.0).act is Act.WAIT
    assert watch.observe(seen(A, B), 2.0).act is Act.CLOSE


# Many of them


@dataclass
class World:
    """A directory, and members that save to it at random speeds. Some die, some stop for a while."""

    seed: int
    faults: bool
    parts: dict[tuple[int, int, int], dict[str, list[Box]]] = field(default_factory=dict)
    growth: dict[Member, int] = field(default_factory=dict)
    closed_at_s: float | None = None
    now: float = 0.0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.num_replicas, self.num_ranks = self.dice.randint(1, 4), self.dice.randint(1, 3)
        self.members = [Member(replica, rank) for replica in range(self.num_replicas) for rank in range(self.num_ranks)]
        self.is_one_group = self.dice.random() < 0.3
        self.writers = [member for member in self.members if member.replica == 0 or not self.is_one_group]
        rows = 300_000
        self.shapes = {"sharded": (rows * self.num_ranks,), "plain": (2 * rows,)}
        replicas = range(1) if self.is_one_group else range(self.num_replicas)
        items = [
            Item("sharded", box, 1, self.shapes["sharded"], tuple(r * self.num_ranks + rank for r in replicas))
            for rank in range(self.num_ranks)
            for box in self.held(Member(0, rank))["sharded"]
        ]
        everybody = tuple(sorted(self.number(member) for member in self.writers))
        items.append(Item("plain", whole(self.shapes["plain"]), 1, self.shapes["plain"], everybody))
        self.shares: list[dict[str, list[Box]]] = []
        for dealt in deal_shares(items, len(self.members)):
            share: dict[str, list[Box]] = {"sharded": [], "plain": []}
            for one in dealt:
                share[items[one.item].name].append(one.box)
            self.shares.append(share)
        self.dies_at: dict[Member, float] = {}
        self.dawdles: dict[Member, list[float]] = {}
        if self.faults:
            for member in self.members:
                if self.dice.random() < 0.35:
                    self.dies_at[member] = self.dice.uniform(0.0, 4 * FILL_AFTER_S)
                if self.dice.random() < 0.3:
                    self.dawdles[member] = [self.dice.uniform(0.0, 4 * FILL_AFTER_S)]
        self.done: dict[Member, float] = {}
        self.gave_up: set[Member] = set()
        self.num_fills: dict[Member, int] = {}
        self.num_looks: dict[Member, int] = {}
        self.troubled_until_s = 0.0

    def number(self, member: Member) -> int:
        return member.replica * self.num_ranks + member.rank

    def held(self, member: Member) -> dict[str, list[Box]]:
        rows = self.shapes["sharded"][0] // self.num_ranks
        return {"sharded": [Box((member.rank * rows,), (rows,))], "plain": [whole(self.shapes["plain"])]}

    def seen(self, watch: SaveWatch) -> Seen:
        growth = {member: self.growth[member] for member in watch.missing if member in self.growth}
        return Seen(self.closed_at_s is not None, frozenset(self.parts), growth)

    def holes(self, parts: dict[tuple[int, int, int], dict[str, list[Box]]]) -> dict[str, list[Box]]:
        there = {name: [box for part in parts.values() for box in part[name]] for name in self.shapes}
        return {name: missing for name, shape in self.shapes.items() if (missing := missing_boxes(shape, there[name]))}

    def lacks_a_rank(self) -> set[int]:
        return set(range(self.num_ranks)) - {rank for _, rank, _ in self.parts}

    def runs(self) -> None:
        queue = [(0.0, place, member, self.life(member)) for place, member in enumerate(self.members)]
        heapq.heapify(queue)
        tickets = len(queue)
        while queue:
            self.now, _, member, life = heapq.heappop(queue)
            if self.now >= self.dies_at.get(member, float("inf")):
                self.troubled_until_s = max(self.troubled_until_s, self.dies_at[member])
                continue
            pause = next(life, None)
            if pause is not None:
                tickets += 1
                heapq.heappush(queue, (self.now + pause, tickets, member, life))

    def works(self, usual_s: float, member: Member) -> float:
        """How long something takes."""
        more = 0.0
        if self.dawdles.get(member) and self.dice.random() < 0.1:
            more = self.dawdles[member].pop()
            self.troubled_until_s = max(self.troubled_until_s, self.now + usual_s + more)
        return self.dice.uniform(0.2, 1.0) * usual_s + more

    def life(self, member: Member) -> Iterator[float]:
        yield self.works(3.0, member)
        if member in self.writers:
            for written in range(1, 6):
                self.growth[member] = written
                yield self.works(2.0, member)
            self.parts[(*member, 0)] = self.shares[self.number(member)]
        self.troubled_until_s = max(self.troubled_until_s, self.now)
        watch = SaveWatch(
            place=self.number(member),
            writers=frozenset(self.writers),
            fill_after_s=FILL_AFTER_S,
            give_up_at_s=GIVE_UP_S,
        )
        while True:
            self.num_looks[member] = self.num_looks.get(member, 0) + 1
            decision = watch.observe(self.seen(watch), self.now)
            if decision.act is Act.DONE:
                self.done[member] = self.now
                return
            if decision.act is Act.GIVE_UP:
                self.gave_up.add(member)
                return
            if decision.act is Act.WAIT:
                assert decision.look_in_s > 0
                yield decision.look_in_s
            elif decision.act is Act.CLOSE:
                is_whole = not self.holes(self.parts) and not self.lacks_a_rank()
                yield self.works(0.1, member)
                if is_whole:
                    yield self.works(0.2, member)
                    self.closed_at_s = self.now if self.closed_at_s is None else self.closed_at_s
                    self.done[member] = self.now
                    return
                watch.not_whole()
            else:
                yield self.works(0.1, member)
                share = self.share_of_holes(member, alone=watch.num_fills > 0)
                if any(share.values()) or member.rank in self.lacks_a_rank():
                    yield self.works(3.0, member)
                    self.num_fills[member] = self.num_fills.get(member, 0) + 1
                    self.parts[(*member, self.num_fills[member])] = share
                watch.filled(self.now)

    def share_of_holes(self, member: Member, *, alone: bool) -> dict[str, list[Box]]:
        missing = self.holes(self.parts)
        mine = self.held(member)
        share: dict[str, list[Box]] = {"sharded": [], "plain": []}
        if alone:
            for name, boxes in missing.items():
                share[name] = [shared for box in boxes for own in mine[name] if (shared := intersect(box, own))]
            return share
        known = {Member(replica, rank) for replica, rank, _ in self.parts} | {member}
        held = {name: {self.number(one): self.held(one)[name] for one in known} for name in self.shapes}
        own_parts = {key: part for key, part in self.parts.items() if key[2] == 0}
        sizes = {name: (shape, 1) for name, shape in self.shapes.items()}
        for name, box in deal_holes(self.holes(own_parts), held, sizes, len(self.members))[self.number(member)]:
            share[name] += [shared for hole in missing.get(name, ()) if (shared := intersect(box, hole))]
        return share


NUM_SEEDS = by_default(300, thorough=1500)


def bytes_written(world: World) -> int:
    return sum(box.volume for part in world.parts.values() for boxes in part.values() for box in boxes)


def test_without_a_death_or_a_delay_nobody_writes_anything_twice() -> None:
    for seed in range(by_default(150, thorough=600)):
        world = World(seed, faults=False)
        world.runs()
        assert world.closed_at_s is not None, seed
        assert len(world.done) == len(world.members), seed
        assert not world.num_fills, (seed, world.num_fills)
        assert bytes_written(world) == sum(shape[0] for shape in world.shapes.values()), seed


def test_while_each_rank_lives_on_somewhere_the_checkpoint_is_closed_in_time() -> None:
    """Three rounds of `fill_after` and the turns of those who close are the most that anybody waits after the last mishap."""
    num_closed = num_filled = 0
    for seed in range(NUM_SEEDS):
        world = World(seed, faults=True)
        world.runs()
        alive = [member for member in world.members if member not in world.dies_at]
        if {member.rank for member in alive} == set(range(world.num_ranks)):
            assert world.closed_at_s is not None, seed
            assert not world.gave_up, seed
            assert set(alive) <= set(world.done), seed
            turns_s = 1.0 * min(len(world.members), 10)
            limit = world.troubled_until_s + 3 * FILL_AFTER_S + turns_s
            assert world.closed_at_s <= limit, (seed, world.closed_at_s, limit, world.troubled_until_s)
            assert max(world.done[member] for member in alive) <= limit + LOOK_S, seed
            num_closed += 1
            num_filled += bool(world.num_fills)
        elif world.closed_at_s is None:
            assert world.gave_up == set(alive), seed
        assert max(world.num_looks.values(), default=0) < 2000, seed
    assert num_closed > 0.4 * NUM_SEEDS
    assert num_filled > 0.2 * NUM_SEEDS


def test_a_dead_writers_share_is_written_again_once() -> None:
    """With nobody else in trouble its holders divide it, whoever looks first."""
    num_worlds = 0
    for seed in range(NUM_SEEDS):
        world = World(seed, faults=False)
        if world.num_replicas < 3 or world.is_one_group:
            continue
        lost = world.dice.choice(world.members)
        world.dies_at = {lost: 0.0}
        world.runs()
        assert world.closed_at_s is not None, seed
        assert all(num == 1 for num in world.num_fills.values()), seed
        assert bytes_written(world) == sum(shape[0] for shape in world.shapes.values()), seed
        num_worlds += 1
    assert num_worlds > 0.15 * NUM_SEEDS
