"""What a writer does once its share is there: wait, take over, close. As stories, and with many writers that die and dawdle."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from support.thoroughness import THOROUGH, by_default

from torchft_ckpt.core.durable.saving import Act, Decision, PartKey, SaveView, SaveWatch, SavingRank, Writers, look_on

FILL_AFTER_S = 10.0
GIVE_UP_S = 1000.0
A, B, C = SavingRank(0, 0), SavingRank(1, 0), SavingRank(2, 0)
LOOK_S = 1.0
"""The longest that is waited between two looks."""
TWO = Writers(2, 1, redundancy=2)
THREE = Writers(3, 1, redundancy=3)


def watch_of(
    member: SavingRank = A, writers: Writers = TWO, give_up_at_s: float = GIVE_UP_S, *, asks: bool = False
) -> SaveWatch:
    return SaveWatch(
        me=member, writers=writers, fill_after_s=FILL_AFTER_S, give_up_at_s=give_up_at_s, has_lighthouse=asks
    )


def seen(*parts: SavingRank | PartKey, closed: bool = False, lost: tuple[int, ...] = (), **growth: int) -> SaveView:
    """Parts that are there, those of a member's own share by its name; growth by the letter of a member."""
    letters = {"a": A, "b": B, "c": C}
    keys = frozenset((*part, 0) if isinstance(part, SavingRank) else part for part in parts)
    return SaveView(closed, keys, {letters[letter]: num_bytes for letter, num_bytes in growth.items()}, lost=lost)


def acts(watch: SaveWatch, moments: Mapping[float, SaveView]) -> list[Act]:
    return [watch.observe(what, now).act for now, what in moments.items()]


# Who backs whom up


@pytest.mark.parametrize("redundancy", [1, 2, 3, 5])
def test_each_share_has_holders_in_as_many_groups_as_there_may_be_and_each_rank_as_many_shares(redundancy: int) -> None:
    for num_replicas in range(1, 30):
        writers = Writers(num_replicas, 2, redundancy=redundancy)
        assert writers.num_holders == min(redundancy, num_replicas)
        numbers = range(writers.num_holders)
        held: Counter[SavingRank] = Counter()
        for replica in range(num_replicas):
            share = SavingRank(replica, 1)
            holders = [writers.holder_of(share, number) for number in numbers]
            assert holders[0] == share
            assert len({holder.replica for holder in holders}) == len(holders)
            assert {holder.rank for holder in holders} == {1}
            assert [writers.share_of(holder, number) for number, holder in enumerate(holders)] == [share] * len(holders)
            held.update(holders)
        assert set(held.values()) == {writers.num_holders}


def test_no_two_writers_of_any_shares_have_one_part() -> None:
    for num_replicas in range(1, 20):
        writers = Writers(num_replicas, 1, redundancy=4)
        shares = [SavingRank(replica, 0) for replica in range(num_replicas)]
        parts = [part for share in shares for part in watch_of(share, writers).parts_of(share)]
        assert len(set(parts)) == len(parts)


# Stories


def test_the_first_closes_at_once_when_all_parts_are_there() -> None:
    assert watch_of(A).observe(seen(A, B), 5.0).act is Act.CLOSE


def test_the_next_one_closes_when_the_first_has_not_for_so_long() -> None:
    there = seen(A, B)
    assert acts(watch_of(B), {5.0: there, 14.9: there, 15.0: there}) == [Act.WAIT, Act.WAIT, Act.CLOSE]


def test_the_next_one_closes_at_once_when_the_first_is_known_to_be_lost() -> None:
    assert acts(watch_of(B), {5.0: seen(A, B), 6.0: seen(A, B, lost=(0,))}) == [Act.WAIT, Act.CLOSE]


def test_the_task_passes_on_through_the_first_ranks_of_all_groups_and_then_to_the_next_ones() -> None:
    writers = Writers(3, 2, redundancy=2)
    everybody = [SavingRank(replica, rank) for rank in range(2) for replica in range(3)]
    there = seen(*everybody)
    for place, member in enumerate(everybody[1:], 1):
        moments = {0.0: there, place * FILL_AFTER_S - 0.1: there, place * FILL_AFTER_S: there}
        assert acts(watch_of(member, writers), moments) == [Act.WAIT, Act.WAIT, Act.CLOSE]


def test_a_group_of_which_another_wrote_a_share_is_not_waited_for_to_close() -> None:
    """Its first rank had written its own share; a group dies as a whole."""
    writers = Writers(2, 2, redundancy=2)
    watch = watch_of(B, writers)
    taken_over = (1, 1, 1)
    assert watch.observe(seen(A, B, SavingRank(1, 1), taken_over), 0.0).act is Act.CLOSE


def test_it_is_done_when_somebody_has_closed_it() -> None:
    watch = watch_of(B, give_up_at_s=1.0)
    assert acts(watch, {0.0: seen(A), 2.0: seen(A, B, closed=True)}) == [Act.WAIT, Act.DONE]


def test_a_share_that_does_not_come_is_waited_for_then_taken_over_then_closed() -> None:
    watch = watch_of(A)
    assert watch.backs_up == {1: B}
    assert acts(watch, {0.0: seen(A), FILL_AFTER_S - 0.1: seen(A)}) == [Act.WAIT, Act.WAIT]
    decision = watch.observe(seen(A), FILL_AFTER_S)
    assert decision == Decision(Act.TAKE_OVER, 0.0, "nothing came of replica 1 rank 0 for 10.0 s", 1)
    watch.took_over(1)
    assert watch.observe(seen(A, (0, 0, 1)), FILL_AFTER_S + 2).act is Act.CLOSE


def test_a_share_of_a_group_that_is_known_to_be_lost_is_taken_over_at_once() -> None:
    watch = watch_of(A)
    assert acts(watch, {0.0: seen(A), 1.0: seen(A, lost=(1,))}) == [Act.WAIT, Act.TAKE_OVER]


@pytest.mark.parametrize("last", [9.9, 50.0, 500.0])
def test_who_still_writes_is_not_taken_for_lost(last: float) -> None:
    watch = watch_of(A)
    now, num_bytes = 0.0, 0
    while now < last:
        num_bytes += 1
        assert watch.observe(seen(A, b=num_bytes), now).act is Act.WAIT
        now += FILL_AFTER_S * 0.9
    assert watch.observe(seen(A, B), now).act is Act.CLOSE


def test_the_second_backup_waits_for_the_first_as_long_as_it_writes() -> None:
    """B is the first backup of A's share, C the second."""
    watch = watch_of(C, THREE)
    assert watch.backs_up == {1: B, 2: A}
    moments: dict[float, SaveView] = {0.0: seen(B, C, a=1, b=1), 10.0: seen(B, C, a=1, b=1), 15.0: seen(B, C, a=1, b=2)}
    moments |= {24.9: seen(B, C, a=1, b=2), 25.0: seen(B, C, a=1, b=2)}
    assert acts(watch, moments) == [Act.WAIT] * 4 + [Act.TAKE_OVER]


def test_the_second_backup_does_not_write_what_the_first_has_written() -> None:
    watch = watch_of(C, THREE)
    taken_over = (1, 0, 1)
    assert acts(watch, {0.0: seen(B, C), 11.0: seen(B, C, taken_over)}) == [Act.WAIT, Act.WAIT]
    assert watch.backs_up == {}


def test_the_first_backup_has_time_from_when_the_owner_is_known_to_be_lost() -> None:
    watch = watch_of(C, THREE)
    still = {"a": 1, "b": 1}
    moments: dict[float, SaveView] = {0.0: seen(B, C, **still)}
    for now in range(5, 60, 5):  # the owner writes
        moments[float(now)] = seen(B, C, a=now, b=1)
    moments |= {60.0: seen(B, C, lost=(0,), a=55, b=1), 69.9: seen(B, C, lost=(0,), a=55, b=1)}
    moments |= {70.0: seen(B, C, lost=(0,), a=55, b=1)}
    assert acts(watch, moments)[-3:] == [Act.WAIT, Act.WAIT, Act.TAKE_OVER]
    watch = watch_of(C, THREE)
    assert acts(watch, {0.0: seen(B, C, **still), 1.0: seen(B, C, lost=(0, 1), **still)})[1] is Act.TAKE_OVER


def test_a_part_that_does_not_count_is_written_again_at_once() -> None:
    watch = watch_of(A)
    damaged = SaveView(False, frozenset([(*A, 0), (*B, 0)]), damaged=[(*B, 0)])
    assert watch.observe(damaged, 3.0).act is Act.TAKE_OVER
    watch.took_over(1)
    assert watch.observe(damaged._replace(parts=frozenset([(*A, 0), (*B, 0), (0, 0, 1)])), 4.0).act is Act.CLOSE


def test_what_was_not_whole_is_looked_at_again_when_something_came() -> None:
    watch = watch_of(A)
    assert watch.observe(seen(A, B), 0.0).act is Act.CLOSE
    watch.not_whole(0.0)
    assert acts(watch, {0.1: seen(A, B), 9.0: seen(A, B)}) == [Act.WAIT, Act.WAIT]
    assert watch.observe(seen(A, B, (0, 0, 1)), 9.1).act is Act.CLOSE


def test_what_was_not_whole_is_looked_at_again_later_and_less_and_less_often() -> None:
    """A manifest could not be read: that may pass, or not."""
    watch = watch_of(A)
    closes_at_s = []
    for now in range(100):
        if watch.observe(seen(A, B), float(now)).act is Act.CLOSE:
            closes_at_s.append(now)
            watch.not_whole(float(now))
    assert closes_at_s == [0, 10, 30, 70]


def test_where_nobody_can_write_what_is_missing_it_is_seen_whether_it_is_whole_without() -> None:
    """Each group writes a whole copy, and one of two is lost."""
    writers = Writers(2, 1, redundancy=1)
    watch = watch_of(B, writers)
    assert not watch.backs_up
    assert acts(watch, {0.0: seen(B), 9.9: seen(B), 10.0: seen(B)}) == [Act.WAIT, Act.WAIT, Act.CLOSE]
    assert acts(watch_of(B, writers), {0.0: seen(B), 1.0: seen(B, lost=(0,))}) == [Act.WAIT, Act.CLOSE]


def test_parts_that_are_none_of_this_save_count_for_nothing() -> None:
    watch = watch_of(A)
    others = [(0, 0, 7), (9, 0, 0), (1, 5, 0), (9, 0, 1)]
    assert watch.observe(seen(A, *others), 0.0).act is Act.WAIT
    assert watch.missing() == [B]


def test_it_is_given_up_in_time_and_says_who_was_missing() -> None:
    watch = watch_of(A, Writers(2, 8, redundancy=1), give_up_at_s=7.0)
    there = [SavingRank(0, rank) for rank in range(8)] + [B]
    decision = watch.observe(seen(*there), 6.5)
    assert (decision.act, decision.look_in_s <= 0.5) == (Act.WAIT, True)
    decision = watch.observe(seen(*there), 7.0)
    assert decision.act is Act.GIVE_UP
    assert "replica 1 rank 1" in decision.reason
    assert "and 2 more" in decision.reason


def test_looks_are_far_between_while_nothing_happens_and_soon_after_something_did() -> None:
    watch = watch_of(A)
    waits = [watch.observe(seen(A, b=0), now / 10).look_in_s for now in range(90)]
    assert waits == sorted(waits)
    assert waits[0] <= 0.02
    assert waits[1] <= 0.021, "nobody is late who looks a tenth of a second after"
    assert 0.2 < waits[-1] <= LOOK_S
    assert watch.observe(seen(A, b=1), 9.0).look_in_s <= 0.02


def test_who_has_nothing_to_see_to_lists_the_directory_the_less_the_later_its_turn() -> None:
    num_listings = {}
    for replica in (0, 1, 10, 200):
        watch = watch_of(SavingRank(replica, 0), Writers(256, 1, redundancy=2))
        now, count = 0.0, 0
        parts = frozenset((other, 0, 0) for other in range(255))
        while now < 1.9 * FILL_AFTER_S:
            count += watch.lists(now)
            now += watch.observe(SaveView(False, parts if watch.lists(now) else None), now).look_in_s
        num_listings[replica] = count
    assert num_listings[0] < 60
    assert num_listings[200] == 1 < num_listings[10] < 5 < num_listings[1] <= num_listings[0]


# Many of them

READ_S = 0.006
"""Of a manifest."""


@dataclass
class World:
    """A directory, and members that save to it at random speeds. Some die, some are silent for a while.

    Args:
        writers: who saves.
        seed: of all that is random.
        dead: when each member that dies does so.
        silent: when each member that is silent falls silent, and for how long.
        word_after_s: so long after all of a group died the lighthouse says so; None: there is none.
    """

    writers: Writers
    seed: int = 0
    dead: dict[SavingRank, float] = field(default_factory=dict)
    silent: dict[SavingRank, tuple[float, float]] = field(default_factory=dict)
    word_after_s: float | None = None
    closed_at_s: float | None = None
    written_at_s: float = 0.0
    """When the last writer that was not lost had written its own share."""
    now: float = 0.0
    done: dict[SavingRank, float] = field(default_factory=dict)
    gave_up: set[SavingRank] = field(default_factory=set)
    takeovers: list[SavingRank] = field(default_factory=list)
    """The shares that were taken over."""
    num_looks: Counter[SavingRank] = field(default_factory=Counter)
    num_listings: int = 0
    told: dict[SavingRank, frozenset[int]] = field(default_factory=dict)
    """What the lighthouse has answered to each."""
    num_questions: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.parts: frozenset[PartKey] = frozenset()
        self.growth: Counter[SavingRank] = Counter()
        self.members = members_of(self.writers)
        of_group: dict[int, list[float]] = {}
        for member in self.members:
            of_group.setdefault(member.replica, []).append(self.dead.get(member, float("inf")))
        self.lost_at_s = {replica: max(times) for replica, times in of_group.items()}

    def runs(self) -> World:
        queue = [(self.dice.uniform(0.0, 1.0), place, member) for place, member in enumerate(self.members)]
        lives = {member: self.life(member) for member in self.members}
        heapq.heapify(queue)
        tickets = len(queue)
        while queue:
            self.now, _, member = heapq.heappop(queue)
            if self.now >= self.dead.get(member, float("inf")):
                continue
            at_s, for_s = self.silent.get(member, (float("inf"), 0.0))
            if self.now >= at_s:
                del self.silent[member]
                pause: float | None = for_s
            else:
                pause = next(lives[member], None)
            if pause is not None:
                tickets += 1
                heapq.heappush(queue, (self.now + pause, tickets, member))
        return self

    def write(self, member: SavingRank, number: int) -> Iterator[float]:
        for _ in range(5):
            self.growth[member] += 1
            yield self.dice.uniform(0.1, 0.4)
        self.parts |= {(*member, number)}

    def look(self, watch: SaveWatch) -> SaveView:
        self.num_looks[watch.me] += 1
        is_closed = self.closed_at_s is not None
        if not watch.lists(self.now):
            return SaveView(is_closed)
        self.num_listings += 1
        lost = self.told.get(watch.me, frozenset())
        if watch.asks(self.now):
            self.num_questions += 1
            after_s = self.word_after_s or 0.0
            known = frozenset(replica for replica, at_s in self.lost_at_s.items() if self.now >= at_s + after_s)
            self.told[watch.me] = known  # is heard before the next look
        growth = {member: self.growth[member] for member in watch.watched(self.now)}
        return SaveView(is_closed, self.parts, growth, lost=lost)

    def life(self, member: SavingRank) -> Iterator[float]:
        yield self.dice.uniform(0.1, 1.0)
        yield from self.write(member, 0)
        if member not in self.dead and member not in self.silent:
            self.written_at_s = max(self.written_at_s, self.now)
        watch = watch_of(member, self.writers, asks=self.word_after_s is not None)
        while True:
            decision = watch.observe(self.look(watch), self.now)
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
                is_whole = not watch_missing(self.parts, self.writers)
                yield READ_S * len(self.parts)
                if is_whole:
                    yield self.dice.uniform(0.0, 0.1)
                    self.closed_at_s = self.now if self.closed_at_s is None else self.closed_at_s
                    self.done[member] = self.now
                    return
                watch.not_whole(self.now)
            else:
                self.takeovers.append(watch.backs_up[decision.number])
                yield from self.write(member, decision.number)
                watch.took_over(decision.number)


def members_of(writers: Writers) -> list[SavingRank]:
    return [SavingRank(replica, rank) for replica in range(writers.num_replicas) for rank in range(writers.num_ranks)]


def watch_missing(parts: frozenset[PartKey], writers: Writers) -> set[SavingRank]:
    return {*members_of(writers)} - {writers.share_of(SavingRank(*part[:2]), part[2]) for part in parts}


SHAPES = [(2, 1), (2, 2), (2, 16), (3, 2), (8, 1), (5, 3), (16, 4), (256, 1)]
SHAPES += [(2, 64), (3, 8), (7, 1), (33, 3), (64, 2), (64, 16), (128, 4), (256, 8), (256, 64)] if THOROUGH else []
SPARE_S = 10.0


def cases_of(shape: tuple[int, int], num: int) -> Iterator[tuple[int, Writers, list[SavingRank], float]]:
    """Seeds, writers, who is in trouble (one group, or one rank), and when."""
    for seed in range(max(by_default(1, thorough=4) * num // (shape[0] * shape[1]), 1)):
        dice = random.Random(f"{shape} {seed}")
        writers = Writers(*shape, redundancy=dice.choice([2, 2, 3]))
        replica = dice.choice([0, 0, 1, shape[0] - 1])
        group = [member for member in members_of(writers) if member.replica == replica]
        yield seed, writers, group if dice.random() < 0.6 else [dice.choice(group)], dice.uniform(0.0, 4.0)


def check_closed(world: World, seed: int, wait_s: float) -> None:
    troubled = {*world.dead}
    reading_s = READ_S * len(world.parts)
    assert world.closed_at_s is not None, seed
    assert not world.gave_up, seed
    limit_s = world.written_at_s + wait_s + SPARE_S + reading_s
    assert world.closed_at_s <= limit_s, (seed, world.writers, world.closed_at_s, limit_s)
    assert {*world.done} >= {*world.members} - troubled, seed
    assert max(Counter(world.takeovers).values(), default=0) <= 1, (seed, world.takeovers)
    assert max(world.num_looks.values()) < 2000, seed


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_death_or_a_delay_nobody_writes_anything_twice_and_one_reads(shape: tuple[int, int]) -> None:
    for seed in range(2 if shape[0] * shape[1] < 100 else 1):
        world = World(Writers(*shape, redundancy=2), seed).runs()
        check_closed(world, seed, 0.0)
        assert not world.takeovers, seed
        assert {part[2] for part in world.parts} == {0}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shares_of_one_group_or_one_rank_that_dies_are_taken_over_in_time(shape: tuple[int, int]) -> None:
    num_taken = 0
    for seed, writers, troubled, at_s in cases_of(shape, 60):
        world = World(writers, seed, dead=dict.fromkeys(troubled, at_s)).runs()
        check_closed(world, seed, max(at_s - world.written_at_s, 0.0) + FILL_AFTER_S)
        missing = [member for member in troubled if (*member, 0) not in world.parts]
        assert Counter(world.takeovers) == Counter(missing), seed
        num_taken += bool(missing)
    assert num_taken or shape not in SHAPES[:3]


@pytest.mark.parametrize("shape", SHAPES)
def test_at_the_lighthouses_word_nobody_waits(shape: tuple[int, int]) -> None:
    for seed, writers, troubled, at_s in cases_of(shape, 60):
        replica = troubled[0].replica
        dead = {member: at_s for member in members_of(writers) if member.replica == replica}
        world = World(writers, seed, dead=dead, word_after_s=0.5).runs()
        wait_s = max(at_s + 0.5 - world.written_at_s, 0.0)
        check_closed(world, seed, wait_s)
        if shape[0] * shape[1] < 100:
            assert world.closed_at_s is not None
            assert world.closed_at_s < world.written_at_s + wait_s + 5.0, seed


def test_the_lighthouse_is_asked_only_while_a_share_that_is_backed_up_is_missing_or_nobody_closes() -> None:
    watch = watch_of(A, THREE, asks=True)
    for now, what in {0.0: seen(A), 0.2: seen(A)}.items():
        assert not watch.asks(now)
        watch.observe(what, now)
    assert watch.asks(0.3)
    assert watch.observe(seen(A), 0.3).look_in_s <= 0.1, "the answer will be there"
    assert not watch.asks(0.4)
    assert watch.asks(0.9)
    watch = watch_of(C, THREE, asks=True)
    watch.observe(seen(A, B, C), 0.0)
    assert watch.asks(0.5), "it waits for the others to close it"
    watch = watch_of(C, Writers(4, 1, redundancy=2), asks=True)
    watch.observe(seen(A, C, SavingRank(3, 0)), 0.0)
    assert not watch.asks(0.5), "who is missing is another's to replace"
    assert not watch_of(A, THREE).asks(5.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_group_or_one_rank_that_was_silent_and_comes_back_does_no_harm(shape: tuple[int, int]) -> None:
    for seed, writers, troubled, at_s in cases_of(shape, 60):
        silent = dict.fromkeys(troubled, (at_s, 2 * FILL_AFTER_S))
        world = World(writers, seed, silent=silent).runs()
        check_closed(world, seed, max(at_s - world.written_at_s, 0.0) + FILL_AFTER_S)


@pytest.mark.slow
def test_as_many_groups_may_die_at_any_moments_as_there_are_backups() -> None:
    for seed in range(by_default(60, thorough=1500)):
        dice = random.Random(seed)
        redundancy = dice.choice([2, 3, 4])
        writers = Writers(dice.randint(redundancy, 9), dice.randint(1, 3), redundancy=redundancy)
        groups = dice.sample(range(writers.num_replicas), redundancy - 1)
        at_s = {replica: dice.uniform(0.0, 5 * FILL_AFTER_S) for replica in groups}
        dead = {member: at_s[member.replica] for member in members_of(writers) if member.replica in at_s}
        world = World(writers, seed, dead=dead, word_after_s=dice.choice([None, 1.0])).runs()
        assert world.closed_at_s is not None, seed
        assert not world.gave_up, seed
        last_s = max(world.written_at_s, *(at for at in at_s.values() if at < world.closed_at_s), 0.0)
        assert world.closed_at_s <= last_s + 2 * redundancy * FILL_AFTER_S + SPARE_S, (seed, world.closed_at_s)
        assert max(Counter(world.takeovers).values(), default=0) < redundancy, seed


def test_who_looks_for_long_does_not_keep_the_storage_busy() -> None:
    """Many writers, one of which writes for long while all others wait."""
    writers = Writers(64, 2, redundancy=2)
    world = World(writers, dead={SavingRank(5, 1): 0.0}).runs()
    assert world.closed_at_s is not None
    assert world.num_listings <= 60 * writers.num_members


def test_a_look_that_the_storage_did_not_answer_ends_a_backups_duty_only_when_its_time_is_over() -> None:
    watch = SaveWatch(
        me=SavingRank(1, 0),
        writers=Writers(2, 1, redundancy=2),
        fill_after_s=30.0,
        give_up_at_s=60.0,
        has_lighthouse=False,
    )
    assert [watch.look_failed(now).act for now in (0.0, 59.9, 60.0)] == [Act.WAIT, Act.WAIT, Act.GIVE_UP]
    assert watch.look_failed(0.0).look_in_s == 1.0
    assert list(watch.backs_up.values()) == [SavingRank(0, 0)]


# Who holds the state, and is none of its writers


def looks_on(
    waited_s: float,
    *,
    is_closed: bool = False,
    has_begun: bool = True,
    are_gone: bool = False,
    leaves: bool = False,
    timeout_s: float = 60.0,
) -> Decision:
    return look_on(
        is_closed=is_closed,
        has_begun=has_begun,
        are_gone=are_gone,
        leaves=leaves,
        waited_s=waited_s,
        fill_after_s=FILL_AFTER_S,
        timeout_s=timeout_s,
    )


def test_an_onlooker_waits_until_the_checkpoint_is_closed_however_long_nothing_changes() -> None:
    waits = [looks_on(waited_s) for waited_s in (0.0, 1.0, 4.0, 59.9)]
    assert {decision.act for decision in waits} == {Act.WAIT}
    assert [decision.look_in_s for decision in waits] == pytest.approx([0.01, 0.2, 0.8, 1.0])
    assert [looks_on(waited_s, is_closed=True).act for waited_s in (0.0, 99.0)] == [Act.DONE] * 2
    assert looks_on(60.0).act is Act.GIVE_UP


def test_an_onlooker_of_what_nobody_has_begun_does_not_wait_for_ever() -> None:
    """It was given a state that the others had restored, say: none of them saves it."""
    assert [looks_on(waited_s, has_begun=False).act for waited_s in (0.0, 4.9, 5.0)] == [Act.WAIT, Act.WAIT, Act.LEAVE]
    assert looks_on(3.0, has_begun=False, timeout_s=3.0).act is Act.LEAVE


def test_an_onlooker_of_what_the_dead_have_begun_goes_on_unless_they_had_ended_it() -> None:
    assert looks_on(1.0, are_gone=True).act is Act.LEAVE
    assert looks_on(1.0, are_gone=True, is_closed=True).act is Act.DONE


def test_an_onlookers_next_save_ends_its_wait_and_what_is_closed_by_then_counts() -> None:
    assert looks_on(0.0, leaves=True).act is looks_on(60.0, leaves=True).act is Act.LEAVE
    assert looks_on(0.0, leaves=True, is_closed=True).act is Act.DONE
