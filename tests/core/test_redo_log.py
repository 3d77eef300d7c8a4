"""The log of committed steps at a source: what is kept, for whom, and why a follower is given up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.thoroughness import by_default

from torchft_ckpt.core.transfer.redo_log import MAX_FOLLOWERS, Gone, Next, RedoLog, Wait

LEASE_S = 30.0


def log_from(version: int = 0, *, followers: int = 1, budget_bytes: int = 100) -> RedoLog[int]:
    log: RedoLog[int] = RedoLog(budget_bytes=budget_bytes, lease_s=LEASE_S)
    log.begin(version, followers, 0.0)
    return log


def appended(log: RedoLog[int], first: int, last: int, num_bytes: int = 10) -> None:
    for version in range(first, last + 1):
        log.append(version - 1, version, num_bytes)
        log.validate()


def why(answer: object) -> str:
    assert isinstance(answer, Gone), answer
    return answer.reason


def test_nothing_is_kept_before_somebody_is_announced_and_who_is_early_waits() -> None:
    log: RedoLog[int] = RedoLog(budget_bytes=100, lease_s=LEASE_S)
    log.append(0, 1, 10)
    assert not log.is_kept
    assert log.ask("a", "", 0, 0.0) == Wait()
    log.begin(0, 1, 0.0)
    appended(log, 1, 1)
    assert log.ask("a", "", 0, 0.0) == Next(1)


def test_who_is_ahead_of_this_source_waits_until_it_has_come_so_far() -> None:
    """It has the entry from another source, whose step was over a moment before."""
    log = log_from()
    appended(log, 1, 1)
    assert log.ask("a", "", 2, 0.0) == Wait()
    assert log.versions == ()
    appended(log, 2, 3)
    assert log.ask("a", "", 2, 0.0) == Next(3)


def test_a_follower_goes_along_the_chain_and_what_it_has_is_freed() -> None:
    log = log_from(5)
    appended(log, 6, 8)
    assert [log.ask("a", "", after, 1.0) for after in (5, 6, 7, 8)] == [Next(6), Next(7), Next(8), Wait()]
    assert log.versions == ()
    appended(log, 9, 9)
    assert (log.ask("a", "", 8, 2.0), log.versions) == (Next(9), (9,))


def test_an_entry_is_kept_for_the_slowest_of_two() -> None:
    log = log_from(followers=2)
    appended(log, 1, 3)
    log.ask("fast", "", 0, 1.0)
    log.ask("fast", "", 3, 1.0)
    assert log.versions == (1, 2, 3), "the other one has not come yet"
    log.ask("slow", "", 1, 1.0)
    assert log.versions == (2, 3)


def test_a_second_one_is_announced_later_and_finds_what_follows_on_its_own_snapshot() -> None:
    log = log_from()
    appended(log, 1, 2)
    log.begin(2, 1, 1.0)
    appended(log, 3, 3)
    assert log.ask("first", "", 0, 1.0) == Next(1)
    assert log.ask("first", "", 3, 1.0) == Wait()
    assert log.versions == (3,)
    assert log.ask("second", "", 2, 1.0) == Next(3)


def test_who_is_too_slow_for_the_memory_is_given_up_and_hears_why() -> None:
    log = log_from(followers=2, budget_bytes=35)
    log.ask("slow", "", 0, 0.0)
    log.ask("fast", "", 0, 0.0)
    appended(log, 1, 3)
    log.ask("fast", "", 3, 1.0)
    appended(log, 4, 4)
    assert log.versions == (4,)
    answer = log.ask("slow", "", 0, 1.0)
    assert answer == Gone(
        "it was 4 steps behind, of 40 bytes, and this source may keep 35 for followers: what it still needed was freed",
        is_revoked=True,
    )
    assert log.ask("fast", "", 3, 1.0) == Next(4)


def test_one_entry_beyond_the_memory_ends_the_log() -> None:
    log = log_from(budget_bytes=35)
    log.append(0, 1, 36)
    assert not log.is_kept
    assert "an entry of one step has 36 bytes, and this source may keep 35" in why(log.ask("a", "", 0, 0.0))


def test_who_is_silent_is_given_up_and_the_log_ends_with_the_last_one() -> None:
    log = log_from()
    log.ask("a", "", 0, 10.0)
    log.hear("a", 20.0)
    assert log.next_deadline() == 20.0 + LEASE_S
    log.lapse(49.0)
    assert log.is_kept
    log.lapse(50.0)
    assert not log.is_kept
    assert why(log.ask("a", "", 0, 51.0)) == "nothing was heard of follower a for 30 s: its lease has ended"


def test_who_was_announced_and_does_not_come_is_not_waited_for_for_ever() -> None:
    log = log_from()
    appended(log, 1, 2)
    log.lapse(LEASE_S)
    assert (log.is_kept, log.versions) == (False, ())


def test_a_state_that_went_back_ends_the_log() -> None:
    log = log_from()
    appended(log, 1, 2)
    log.append(1, 3, 10)
    assert "from 2 to 1 otherwise than by a committed step" in why(log.ask("a", "", 2, 0.0))


def test_a_version_that_is_not_on_the_way_is_refused_with_what_is() -> None:
    log = log_from(3)
    appended(log, 4, 5)
    assert "leads from 3 to 5; 2 is not on its way" in why(log.ask("a", "", 2, 0.0))
    assert log.num_followers == 1, "it did not take the place of the one that was announced"


def test_names_that_are_made_up_push_each_other_out_and_nobody_else() -> None:
    log = log_from()
    log.ask("honest", "one", 0, 0.0)
    for number in range(200):
        log.ask(f"made-up-{number}", "another", 0, 0.0)
        log.validate()
    assert log.num_followers == MAX_FOLLOWERS
    log.end("it was told to")
    assert "it was told to" in why(log.ask("honest", "one", 0, 0.0)), "it is known, and no other pushed it out"


@dataclass
class Oracle:
    """The same, dumb: it never frees, and works out all that is asked from what has happened."""

    budget_bytes: int
    chain: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    needs: dict[str, int] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    num_announced: int = 0
    has_ended: bool = False

    def begin(self, version: int, number: int, now: float) -> None:
        if not self.chain or self.chain[-1] != version:
            self.stop()
            self.chain, self.sizes, self.gone, self.has_ended = [version], [], set(), False
        for _ in range(number):
            self.num_announced += 1
            self.needs[f"announced {self.num_announced}"] = len(self.chain) - 1
            self.until[f"announced {self.num_announced}"] = now + LEASE_S
        self.settle()

    def append(self, version: int, num_bytes: int) -> None:
        if self.chain:
            self.chain.append(version)
            self.sizes.append(num_bytes)
            while self.chain and sum(self.sizes[min(self.needs.values()) :]) > self.budget_bytes:
                first = min(self.needs.values())
                for name in [name for name in self.needs if self.needs[name] == first]:
                    self.give_up(name)
                self.settle()

    def ask(self, name: str, after: int, now: float) -> object:
        if not self.chain:
            return "gone" if name in self.gone or self.has_ended else Wait()
        reachable = self.chain[min(self.needs.values()) :]
        if after not in reachable and after < self.chain[-1]:
            return "gone"
        self.gone.discard(name)
        place = self.chain.index(min(after, self.chain[-1]))
        if name not in self.needs:
            waiting = [one for one in self.needs if one.startswith("announced") and self.needs[one] <= place]
            if waiting:
                taken = max(waiting, key=lambda one: self.needs[one])
                taken = next(one for one in waiting if self.needs[one] == self.needs[taken])
                del self.needs[taken], self.until[taken]
        self.needs[name], self.until[name] = place, now + LEASE_S
        return Wait() if place == len(self.chain) - 1 else Next(self.chain[place + 1])

    def leave(self, name: str) -> None:
        self.needs.pop(name, None)
        self.until.pop(name, None)
        self.settle()

    def lapse(self, now: float) -> None:
        for name in [name for name in self.needs if self.until[name] <= now]:
            self.give_up(name)
        self.settle()

    def give_up(self, name: str) -> None:
        del self.needs[name], self.until[name]
        if not name.startswith("announced"):
            self.gone.add(name)

    def stop(self) -> None:
        self.has_ended = self.has_ended or bool(self.chain)
        self.gone |= {name for name in self.needs if not name.startswith("announced")}
        self.chain, self.sizes, self.needs, self.until = [], [], {}, {}

    def settle(self) -> None:
        if not self.needs:
            self.stop()

    def versions(self) -> tuple[int, ...]:
        return tuple(self.chain[min(self.needs.values()) + 1 :]) if self.chain else ()


NAMES = st.sampled_from("abc")
EVENTS = st.one_of(
    st.tuples(st.just("begin"), st.booleans(), st.integers(0, 2)),
    st.tuples(st.just("append"), st.integers(0, 40)),
    st.tuples(st.just("ask"), NAMES, st.integers(-1, 6)),
    st.tuples(st.just("on"), NAMES),
    st.tuples(st.just("leave"), NAMES),
    st.tuples(st.just("lapse")),
    st.tuples(st.just("time"), st.sampled_from([1.0, 13.0, LEASE_S])),
    st.tuples(st.just("end")),
)


@settings(max_examples=by_default(300, thorough=5000), derandomize=True, database=None, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.sampled_from([35, 100]))
def test_it_says_what_a_log_says_that_forgets_nothing(events: list[tuple[object, ...]], budget_bytes: int) -> None:
    log: RedoLog[int] = RedoLog(budget_bytes=budget_bytes, lease_s=LEASE_S)
    oracle = Oracle(budget_bytes)
    now, newest = 0.0, 0
    held: dict[str, int] = {}
    for event in events:
        match event:
            case ("begin", bool(goes_back), int(number)):
                newest += 100 if goes_back else 0
                log.begin(newest, number, now)
                oracle.begin(newest, number, now)
            case ("append", int(num_bytes)):
                log.append(newest, newest + 1, num_bytes)
                newest += 1
                oracle.append(newest, num_bytes)
            case ("ask" | "on", str(name), *back):
                after = newest - int(str(back[0])) if back else held.get(name, newest)
                answer, expected = log.ask(name, name, after, now), oracle.ask(name, after, now)
                assert ("gone" if isinstance(answer, Gone) else answer) == expected
                if isinstance(answer, Gone):
                    assert len(answer.reason) > 20
                elif isinstance(answer, Next):
                    held[name] = answer.version
            case ("leave", str(name)):
                log.leave(name)
                oracle.leave(name)
            case ("lapse",):
                log.lapse(now)
                oracle.lapse(now)
            case ("time", float(seconds)):
                now += seconds
            case ("end",):
                log.end("it was told to")
                oracle.stop()
        log.validate()
        assert log.versions == oracle.versions()
        assert log.is_kept == bool(oracle.chain)
        assert log.next_deadline() == min(oracle.until.values(), default=None)


@pytest.mark.parametrize("end", ["end", "lapse", "leave"])
def test_a_log_that_has_ended_can_be_begun_again(end: str) -> None:
    log = log_from()
    log.ask("a", "", 0, 0.0)
    appended(log, 1, 2)
    if end == "end":
        log.end("the step of Adam raised")
    elif end == "lapse":
        log.lapse(100.0)
    else:
        log.leave("a")
    assert not log.is_kept
    log.begin(7, 1, 200.0)
    appended(log, 8, 8)
    assert log.ask("a", "", 7, 200.0) == Next(8)


def test_one_that_receives_a_state_for_long_finds_the_log_and_one_that_was_silent_hears_that_it_has_ended() -> None:
    log: RedoLog[int] = RedoLog(budget_bytes=100, lease_s=LEASE_S)
    log.begin(0, 1, 0.0)
    log.append(0, 1, 10)
    for minute in range(1, 6):
        log.hear("receives", 0.9 * minute * LEASE_S)
        log.lapse(0.9 * minute * LEASE_S)
    assert log.ask("receives", "c", 0, 4.6 * LEASE_S) == Next(1)
    log.leave("receives")
    log.begin(1, 1, 5 * LEASE_S)
    log.lapse(7 * LEASE_S)
    answer = log.ask("silent", "c", 1, 7 * LEASE_S)
    assert isinstance(answer, Gone) and "nobody follows" in answer.reason
    log.begin(1, 1, 8 * LEASE_S)
    assert log.ask("silent", "c", 1, 8 * LEASE_S) == Wait()
