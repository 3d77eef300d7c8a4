"""A quorum is held for a group that lacks its state: it receives that, and is in the quorum as one that holds it."""

from __future__ import annotations

import itertools

import pytest
from lighthouse_script import Job, Member, they_ask, they_connect, they_vote

from torchft_ckpt.core.coordination.joining import SILENT_S
from torchft_ckpt.core.coordination.lighthouse import SHRINKS
from torchft_ckpt.core.coordination.messages import JoinProgress, Receives, Role, StateVersion

Scene = tuple[Job, Member, Member, Member]


def warms_up(job: Job, name: str, **settings: object) -> Member:
    """A group that has come, and has computed an iteration alone."""
    member = job.join(name, **settings)
    member.asks()
    assert member.hears()[-1].endswith("step 2 learner") and member.replica.warms_up
    member.ends()
    return member


def are_asked(members: list[Member]) -> None:
    """They make the step that is open, and ask for the next one with what they have captured."""
    for member in members:
        member.asks()
        member.hears()


def waits_for_c(*, reach_s: float = 0.5, least: int = 2, allow_step_loss: bool = False, **settings: object) -> Scene:
    """Two groups have made two steps, and a third has computed an iteration alone: now they wait until it has their state."""
    job, a, b = Job.of("ab", 2, least=least, allow_step_loss=allow_step_loss, **settings)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=reach_s)
    are_asked([a, b])
    return job, a, b, c


def test_a_group_that_lacks_the_state_gets_it_before_the_quorum_and_is_in_it_as_a_holder() -> None:
    job, a, b = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5)
    assert c.hears() == []
    are_asked([a])
    b.asks()
    held_up = "held up: all others have asked, and wait until c:1 has the state of step 2"
    assert (a.num_held, b.num_held) == (1, 1) and a.hears() == b.hears() == [held_up]
    assert c.formed is not None and c.formed.held and c.formed.version == a.replica.version
    assert [source.replica_id for source in c.formed.sources] == ["a:1", "b:1"]
    job.passes(0.4)
    c.still_needs(0.1)
    assert a.hears() == b.hears() == []
    c.comes_in()
    assert c.replica.came_in and not c.replica.is_behind
    c.asks()
    assert [m.hears()[-1] for m in (a, b, c)] == ["quorum 2 step 2 healthy"] * 3
    assert job.lighthouse.round is not None and job.lighthouse.round.tally.roles["c:1"] is Role.HEALTHY


def test_a_group_that_comes_while_the_others_are_in_a_long_step_hears_who_has_not_asked_and_since_when() -> None:
    job, a, b = Job.of("ab", 2, least=2)
    they_ask(a, b)
    job.passes(60.0)
    c = job.join("c")
    c.warms_up()
    c.hears()
    job.passes(8.0)
    waits = "it waits for a:1, b:1: their step began {} s ago, and they have not asked for the next one yet"
    assert c.hears() == [f"pending: {waits.format(s)}" for s in (61, 66)], "and again now and then"
    assert job.lighthouse.members["c:1"].notified_reason == waits.format(66), "status shows it"
    are_asked([a])
    job.passes(2.0)
    assert c.hears() == ["pending: 2 replica groups have asked, waiting at most 60 s for b:1"]


def trains(job: Job, members: list[Member]) -> None:
    """They make the open step, in a second, and ask for the next one with what they have captured."""
    job.passes(1.0)
    they_vote(*members)
    are_asked(members)


def test_those_who_wait_hear_at_once_when_a_hold_begins_and_ends_and_again_while_it_lasts() -> None:
    job, a, b = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    b.dies()
    a.asks()
    c.asks(at_end=True, reach_s=30.0)
    *_, held_up = a.hears()
    assert held_up.startswith("held up: ")
    told_at = []
    for _ in range(40):
        job.passes(0.5)
        told_at += [job.now] * len(a.hears())
    assert a.pending is not None
    assert max(later - before for before, later in itertools.pairwise([0.0, *told_at, job.now])) < a.pending.held_s
    c.dies()
    assert a.hears() == ["pending: 1 of at least 2 replica groups are here (a:1)"]


@pytest.mark.parametrize(
    "how", ["dies", "fails", "fails at one rank", "is silent", "does not begin", "is slower than allowed"]
)
def test_a_hold_that_fails_costs_its_own_time_and_no_step_and_no_quorum_id(how: str) -> None:
    job, a, b = Job.of("ab", 2, least=2, join_stall_limit_s=9.0)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5, top_s=1.0)
    are_asked([a, b])
    if how == "dies":
        c.dies()
    elif how == "fails":
        c.comes_in(load=False)
        c.asks(at_end=True, reach_s=0.5)
    elif how == "fails at one rank":
        c.comes_in()
        c.asks(at_end=True, reach_s=0.5)
    elif how == "is silent":
        c.still_needs(0.5)
        job.passes(5.1)
    elif how == "does not begin":
        c.still_needs(0.0, Receives.LOADS)
        job.passes(1.3)
        assert job.lighthouse._holds.is_on, "its loop takes a second to its next step"
        job.passes(0.5)
    else:
        job.passes(0.5)
        c.still_needs(20.0)
        job.passes(0.3)
    assert not job.lighthouse._holds.is_on
    assert [m.hears()[-1] for m in (a, b)] == ["quorum 1 step 2 healthy"] * 2
    assert a.outcomes[-1] == b.outcomes[-1] and a.step == 2
    assert job.lighthouse._joining._allowance.debts["c"].failures == 1


def test_a_group_is_held_for_once_at_a_boundary_and_later_again() -> None:
    job, a, b, c = waits_for_c(reach_s=0.1)
    c.comes_in(load=False)
    c.asks(at_end=True, reach_s=0.1)
    assert not job.lighthouse._holds.is_on and a.formed is not None and a.formed.version.step == 2
    trains(job, [a, b])
    assert not job.lighthouse._holds.is_on and a.formed.version.step == 3, "nobody has captured the state"
    trains(job, [a, b])
    assert job.lighthouse._holds.is_on
    c.comes_in()
    c.asks()
    assert c.hears()[-1] == "quorum 2 step 4 healthy"


def test_a_group_that_has_the_state_and_computes_by_itself_once_more_is_not_waited_for_and_owes_nothing() -> None:
    """It was given the state in the middle of an iteration, perhaps."""
    job, a, b = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5)
    are_asked([a])
    b.asks()
    c.comes_in()
    c.asks(computes_alone=True)
    assert c.replica.warms_up and c.replica.is_behind
    assert not job.lighthouse._holds.is_on
    assert [m.hears()[-1] for m in (a, b)] == ["quorum 1 step 2 healthy"] * 2
    they_vote(a, b)
    c.ends()
    c.asks(at_end=True, reach_s=0.1)
    are_asked([a, b])
    assert job.lighthouse._holds.is_on, "it owes nothing for the first time"
    c.comes_in()
    c.asks()
    assert c.hears()[-1] == "quorum 2 step 3 healthy"


@pytest.mark.parametrize("min_replica_size", [1, 2])
def test_a_group_that_computes_by_itself_with_a_state_that_nobody_else_holds_any_more_goes_on_with_it(
    min_replica_size: int,
) -> None:
    job, a, b, c = waits_for_c(least=1, min_replica_size=min_replica_size)
    c.comes_in()
    c.asks(computes_alone=True)
    a.dies()
    b.dies()
    c.ends()
    c.asks(at_end=True)
    c.ends()
    c.asks()
    job.passes(10.0)
    assert c.hears()[-1].endswith("step 2 healthy")


def test_those_who_are_too_few_wait_without_a_limit() -> None:
    job, a, b = Job.of("ab", 2, least=1, min_replica_size=2, join_stall_limit_s=1.0)
    b.dies()
    a.asks()
    c = warms_up(job, "c", min_replica_size=2)
    c.asks(at_end=True, reach_s=30.0)
    a.votes()
    a.asks()
    assert c.formed is not None and c.formed.held
    job.passes(30.0)
    assert job.lighthouse._holds.is_on
    c.comes_in()
    c.asks()
    assert c.hears()[-1].endswith("step 2 healthy")


def test_a_need_beyond_the_allowance_is_not_held_for() -> None:
    job, a, b, c = waits_for_c(reach_s=10.0, join_stall_limit_s=3.0)
    assert not job.lighthouse._holds.is_on
    for _ in range(3):
        job.passes(1.0)
        they_vote(a, b)
        are_asked([a, b])
    assert "join_stall_limit allows 3 s at most" in c.hears()[-1]


@pytest.mark.parametrize(
    "why", ["it needs too long", "it has just failed", "it is a spare", "nobody else is let in", ""]
)
def test_those_who_train_capture_their_state_only_if_somebody_may_come_in_next(why: str) -> None:
    job, a, b = Job.of("ab", 2, least=2, join_stall_limit_s=3.0)
    c = warms_up(job, "c", spare=why == "it is a spare")
    captured = [trains_capturing(job, [a, b]) for _ in range(2)]
    assert captured == [True, False], "it had come; and nobody knows when it is through with its iteration"
    if why == "it has just failed":
        c.asks(at_end=True, reach_s=0.1)
        are_asked([a, b])
        job.passes(0.9)
        c.comes_in(load=False)
        c.asks(at_end=True, reach_s=0.1)
    shrink_only = why == "nobody else is let in"
    they_vote(a, b)
    a.asks(shrink_only=shrink_only)
    c.asks(at_end=True, reach_s=10.0 if why == "it needs too long" else 0.1)
    b.asks(can_serve=False)
    assert a.formed.version.step == a.step and not job.lighthouse._holds.is_on
    captured = [trains_capturing(job, [a, b], shrink_only=shrink_only) for _ in range(3 if why else 1)]
    assert captured == ([False] * 3 if why else [True]) and job.lighthouse._holds.is_on is not bool(why)


def trains_capturing(job: Job, members: list[Member], *, shrink_only: bool = False) -> bool:
    """They make the open step, and ask for the next one. Return whether they have captured their state for that."""
    are_capturing = [member.replica.capture_wanted for member in members]
    they_vote(*members)
    they_ask(*members, shrink_only=shrink_only)
    return any(are_capturing)


@pytest.mark.parametrize("who", ["a:1", "c:1"])
def test_a_group_that_the_quorum_would_leave_out_is_not_held_for(who: str) -> None:
    job, a, b = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1, shrink_only=who == "c:1")
    for member in (a, b):
        member.asks(can_serve=True, shrink_only=member.replica_id == who)
    assert [m.hears()[-1] for m in (a, b)] == ["quorum 1 step 2 healthy"] * 2
    if who == "c:1":
        job.passes(1.0)
        assert c.hears() == [f"pending: {SHRINKS}"]
        c.asks(at_end=True, reach_s=0.1)
    they_vote(a, b)
    they_ask(a, b, can_serve=True)
    assert job.lighthouse._holds.is_on


def test_one_that_waits_for_the_allowance_comes_in_once_there_is_enough() -> None:
    job, a, b = Job.of("ab", 2, least=2, join_stall_limit_s=3.0)
    c, d = warms_up(job, "c"), warms_up(job, "d")
    c.asks(at_end=True, reach_s=2.0)
    are_asked([a, b])
    for left_s in (2.0, 1.5, 1.0, 0.5):
        c.still_needs(left_s)
        job.passes(0.5)
    c.comes_in()
    c.asks()
    d.asks(at_end=True, reach_s=1.5)
    num_steps = 0
    while not job.lighthouse._holds.is_on and num_steps < 20:
        trains(job, [a, b, c])
        num_steps += 1
    assert 10 < num_steps < 13, "a twentieth of the time makes up for what the first one took"


def test_what_holds_take_is_taken_from_the_allowance() -> None:
    job, _, _, c = waits_for_c(join_stall_limit_s=3.0)
    for _ in range(5):
        job.passes(0.5)
        c.still_needs(0.3)
    c.comes_in()
    c.asks()
    assert job.lighthouse._joining._allowance.purse_s(job.now) == pytest.approx(0.5, abs=0.15)


def test_five_groups_are_held_for_together_one_of_which_asks_meanwhile() -> None:
    job, *members = Job.of("ab", 2, least=2)
    newcomers = [warms_up(job, name) for name in "cdefg"]
    they_ask(*newcomers[:-1], at_end=True, reach_s=0.5)
    are_asked(members)
    newcomers[-1].asks(at_end=True, reach_s=0.5)
    assert all(m.formed is not None and m.formed.held for m in newcomers)
    for member in newcomers:
        member.comes_in()
        member.asks()
    assert [m.hears()[-1] for m in (*members, *newcomers)] == ["quorum 2 step 2 healthy"] * 7


def test_the_lighthouse_is_lost_in_a_hold_and_nobody_waits_for_it_afterwards() -> None:
    job, a, b, c = waits_for_c()
    job.restart()
    they_connect(a, b, c)
    they_ask(a, b)
    assert [m.hears()[-1] for m in (a, b)] == ["quorum 1000 step 2 healthy"] * 2


def test_a_survivor_dies_in_a_hold_and_the_others_go_on() -> None:
    job, a, b, c = waits_for_c(least=1)
    b.dies()
    assert job.lighthouse._holds.is_on
    c.comes_in()
    c.asks()
    assert [m.hears()[-1] for m in (a, c)] == ["quorum 2 step 2 healthy"] * 2


def test_one_that_was_not_waited_for_says_what_it_holds_and_asks_for_no_step_in_a_job_that_may_lose_steps() -> None:
    job, a, _, c = waits_for_c(least=1, allow_step_loss=True)
    assert job.lighthouse._holds.is_on
    job.passes(30.0)
    assert job.lighthouse._job.late == {"c": a.step}
    c.says(c.replica.locate())
    assert a.replica.phase.value == "training"


def test_a_loop_that_trains_another_network_than_the_others_comes_in_a_step_later() -> None:
    job, a, b = Job.of("ab", 2, least=2)
    for kind in ("0", "1"):
        they_ask(a, b, kind=kind)
        they_vote(a, b)
    c = job.join("c")
    c.asks()
    c.ends()
    c.asks(at_end=True, reach_s=0.1, kind="1")
    they_ask(a, b, kind="0")
    assert not job.lighthouse._holds.is_on
    they_vote(a, b)
    they_ask(a, b, kind="1")
    assert job.lighthouse._holds.is_on


def test_one_that_was_needed_is_waited_for_no_longer_than_allowed_once_another_has_come() -> None:
    job, a, b = Job.of("ab", 2, least=1, min_replica_size=2, join_stall_limit_s=1.0)
    b.dies()
    a.asks()
    c, d = (warms_up(job, name, min_replica_size=2) for name in "cd")
    they_ask(c, d, at_end=True, reach_s=0.1)
    a.votes()
    a.asks()
    job.passes(5.0)
    c.comes_in()
    c.asks()
    assert job.lighthouse._holds.is_on, "there is time left for the other one"
    job.passes(1.5)
    assert [m.hears()[-1].split()[-1] for m in (a, c)] == ["healthy", "healthy"]


def test_one_that_makes_another_needed_by_turns_does_not_stretch_the_time_for_that() -> None:
    job, a, b = Job.of("ab", 2, least=2, join_stall_limit_s=None)
    b.dies()
    a.asks()
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1)
    for life in range(1, 4):
        d = job.join("d", life=life)
        d.asks(allow_heal=False)
        job.passes(0.6 * SILENT_S)
        if not job.lighthouse._holds.is_on:
            break
        d.dies()
        job.passes(0.1)
    assert life == 2, "it was silent for so long while nobody needed it"


@pytest.mark.parametrize("top_s", [0.0, 0.1])
def test_a_group_whose_loop_takes_longer_than_anybody_knew_is_excused_for_that_once(top_s: float) -> None:
    job, a = Job.of("a", 2, least=1)
    outs = []
    for life in range(1, 4):
        c = job.join("c", life=life)
        c.asks()
        while not (c.formed is not None and c.formed.held):
            if c.replica.warms_up and c.replica.phase.value == "training":
                c.ends()
                c.asks(at_end=True, top_s=top_s)
            a.votes()
            a.asks(can_serve=True)
            job.passes(0.1)
        began = job.now
        c.still_needs(0.0, Receives.LOADS)
        job.passes(1.0)
        outs.append(job.lighthouse.why_failed(job.lighthouse.members[c.replica_id]) != "")
        c.dies()
        assert job.now == began + 1.0
    assert outs == [False, True, True]


def test_those_who_wait_know_from_their_own_loop_how_long_one_takes_from_the_state_to_its_step() -> None:
    """Else the state would be received twice."""
    job, a = Job.of("a", 2, least=1)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1)
    a.asks(can_serve=True, top_s=1.0)
    c.still_needs(0.0, Receives.LOADS)
    job.passes(1.4)
    c.follows()
    c.asks(can_serve=True)
    assert [m.hears()[-1] for m in (a, c)] == ["quorum 2 step 2 healthy"] * 2


def test_nobody_is_needed_any_more_once_one_has_come_that_must_not_load() -> None:
    job, a, b = Job.of("ab", 2, least=2, join_stall_limit_s=1.0)
    b.dies()
    a.asks()
    c = job.join("c")
    c.asks()
    c.ends()
    c.asks(at_end=True, reach_s=0.1)
    job.passes(5.0)
    assert job.lighthouse._holds.is_on and c.formed is not None and c.formed.held, "it is needed, and silent"
    d = job.join("d")
    d.asks(allow_heal=False)
    job.passes(1.5)
    assert [m.hears()[-1].split()[-1] for m in (a, d)] == ["healthy", "idle"]
    a.votes()
    assert a.step == 3


def test_what_a_loop_has_frozen_as_its_iteration_ends_does_not_keep_it_from_coming_in() -> None:
    job, a, b = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1, frozen="0 to 3")
    they_ask(a, b, can_serve=True, frozen="none")
    assert job.lighthouse._holds.is_on
    c.comes_in()
    c.asks(frozen="none")
    assert [m.hears()[-1] for m in (a, b, c)] == ["quorum 2 step 2 healthy"] * 3


def test_who_came_in_counts_for_nothing_but_its_gradients_before_it_is_compared() -> None:
    """It has the last number, and writes no checkpoint, also if its name comes first; and nobody receives a state from it."""
    job, b, c = Job.of("bc", 2, least=1)
    a, d = warms_up(job, "a"), warms_up(job, "d")
    a.asks(at_end=True, reach_s=0.1)
    are_asked([b, c])
    a.comes_in()
    a.asks(can_serve=True)
    assert [(m.replica.participating_rank, m.replica.num_writers) for m in (a, b, c)] == [(2, 2), (0, 2), (1, 2)]
    they_vote(a, b, c)
    assert a.step == 3 and a.replica.is_on_trial and not b.replica.is_on_trial
    assert [m.replica.writer_number for m in (a, b, c)] == [None, 0, 1], "it looks on as they write"
    d.asks(at_end=True, reach_s=0.1)
    are_asked([a, b, c])
    assert held_for(job) == ["d:1"] and d.formed is not None
    d.comes_in()
    d.asks()
    assert not a.replica.is_on_trial and d.replica.is_on_trial
    assert [(m.replica.participating_rank, m.replica.num_writers) for m in (a, b, c, d)] == [
        (0, 3),
        (1, 3),
        (2, 3),
        (3, 3),
    ]


def test_nobody_is_given_its_state_by_one_that_was_just_given_it_itself() -> None:
    job, b, c = Job.of("bc", 2, least=1)
    a, d = warms_up(job, "a"), warms_up(job, "d")
    a.asks(at_end=True, reach_s=0.1)
    are_asked([b, c])
    a.comes_in()
    e = warms_up(job, "e")
    e.asks(at_end=True, reach_s=0.1)
    a.asks(can_serve=True)
    d.asks(at_end=True, reach_s=0.1)
    for member in (d, e):
        assert member.formed is not None and [source.replica_id for source in member.formed.sources] == ["b:1", "c:1"]


def test_who_is_alone_with_the_state_that_it_was_given_is_the_state_of_the_job() -> None:
    job, a = Job.of("a", 2, least=1)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1)
    are_asked([a])
    c.comes_in()
    a.dies()
    assert c.replica.writer_number is None, "the other one writes what it was given"
    c.asks()
    assert (c.replica.participating_rank, c.replica.num_writers, c.replica.is_on_trial) == (0, 1, False)
    c.votes()
    assert c.step == 3 and c.replica.writer_number == 0, "nobody else would"


def held_for(job: Job) -> list[str]:
    return [member.replica_id for member in job.lighthouse._holds.awaited]


def in_hold(**settings: object) -> tuple[Job, list[Member], Member, Member]:
    """Two groups wait until a third has their state, which it says it needs 2.5 s for; a fourth has made its iteration alone."""
    job, *members = Job.of("ab", 2, least=2, **{"join_stall_limit_s": 3.0, **settings})
    c, d = warms_up(job, "c"), warms_up(job, "d")
    c.asks(at_end=True, reach_s=2.5, top_s=10.0)
    are_asked(members)
    c.still_needs(2.5)
    return job, members, c, d


def needed(*names: str, **settings: object) -> tuple[Job, Member, list[Member]]:
    """The only one of two that need each other, and newcomers that have asked for its state."""
    job, a, b = Job.of("ab", 2, least=2, **settings)
    newcomers = [warms_up(job, name) for name in names]
    b.dies()
    a.asks()
    they_ask(*newcomers, at_end=True, reach_s=0.1)
    assert held_for(job) == [member.replica_id for member in newcomers]
    return job, a, newcomers


def test_one_that_fails_is_needed_and_is_tried_again_after_a_pause_that_grows() -> None:
    job, _, (c,) = needed("c")
    pauses = []
    for _ in range(4):
        c.comes_in(load=False)
        c.asks(at_end=True, reach_s=0.1)
        assert not held_for(job)
        failed_at = job.now
        while not held_for(job) and job.now < 10.0:
            job.passes(0.1)
        pauses.append(job.now - failed_at)
    assert 0.2 <= pauses[0] < 1.6 <= pauses[-1] < 3.0


def test_what_a_needed_one_took_and_failed_is_not_held_against_it() -> None:
    job, a, (c, d) = needed("c", "d", join_stall_limit_s=3.0)
    job.passes(5.0)
    c.comes_in(load=False)
    c.asks(at_end=True, reach_s=0.1)
    d.comes_in()
    d.asks()
    for _ in range(2):
        trains(job, [a, d])
    assert held_for(job) == ["c:1"], (
        "those who waited had nothing else to do: it does not stay out for eight times as long"
    )


def test_one_that_cost_others_time_and_failed_stays_outside_for_eight_times_as_long() -> None:
    job, members, c, _ = in_hold()
    job.passes(0.8)
    c.comes_in(load=False)
    c.asks(at_end=True, reach_s=0.1)
    tried_at = []
    for _ in range(10):
        trains(job, members)
        tried_at += [job.now] * bool(held_for(job))
    assert tried_at[0] == pytest.approx(0.8 * 9 + 1.5, abs=1.0)


def pause_after_a_failure(job: Job, members: list[Member], newcomer: Member) -> float:
    """Have a newcomer fail to load in a hold and ask again; return the seconds until the others are held for it again."""
    newcomer.comes_in(load=False)
    newcomer.asks(at_end=True, reach_s=0.1)
    failed_at = job.now
    while not held_for(job):
        trains(job, members)
    return job.now - failed_at


def test_one_that_could_not_receive_the_state_again_and_again_costs_the_others_a_thirtieth_of_their_time() -> None:
    """A firewall that drops all packets cost the healthy groups an eighth of their time for ever."""
    job, members, c, _ = in_hold()
    pauses_s = []
    for _ in range(3):
        job.passes(0.8)
        pauses_s.append(pause_after_a_failure(job, members, c))
    assert pauses_s == pytest.approx([8 * 0.8, 2 * 0.8 / 0.03, 0.8 / 0.03], abs=3.0)


def test_one_whose_sources_die_each_time_is_not_taken_for_one_that_nobody_can_reach() -> None:
    job, *members = Job.of("abst", 2, least=1)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1)
    are_asked(members)
    pauses_s = []
    for source in reversed(members[2:]):
        job.passes(0.8)
        source.dies()
        members.remove(source)
        pauses_s.append(pause_after_a_failure(job, members, c))
    assert pauses_s == pytest.approx([8 * 0.8] * 2, abs=2.0)


def test_one_that_asked_when_others_had_stood_still_for_long_owes_its_own_time_alone() -> None:
    job, members, c, d = in_hold(join_stall_limit_s=30.0)
    for left_s in (2.5, 1.7, 0.9):
        c.still_needs(left_s)
        job.passes(0.8)
    d.asks(at_end=True, reach_s=0.1)
    job.passes(0.2)
    d.comes_in(load=False)
    d.asks(at_end=True, reach_s=0.1)
    c.comes_in()
    c.asks()
    failed_at = job.now
    while not held_for(job):
        trains(job, [*members, c])
    assert job.now - failed_at == pytest.approx(8 * 0.2, abs=1.5)


def test_one_that_turned_out_to_need_longer_than_it_had_said_is_expected_to_do_so_again() -> None:
    job, members, c, _ = in_hold(join_stall_limit_s=4.0)
    job.passes(0.9)
    c.still_needs(10.0)
    job.passes(0.3)
    assert not held_for(job)
    c.comes_in(load=False)
    c.asks(at_end=True, reach_s=2.5)
    for _ in range(11):
        trains(job, members)
    assert not held_for(job) and "waiting for 3.8 s, and 3.6 s are left" in c.hears()[-1], (
        "half as long again as it says"
    )


def test_one_whose_loop_takes_long_to_begin_is_forgiven_once_and_says_how_long_that_is_the_next_time() -> None:
    job, a, b, c = waits_for_c(reach_s=0.1)
    c.comes_in()
    job.passes(1.0)
    assert not held_for(job) and a.formed.version.step == 2
    for top_s in (1.0, 0.0):
        they_vote(a, b)
        c.asks()
        c.ends()
        c.asks(at_end=True, reach_s=0.1, top_s=top_s)
        are_asked([a, b])
        assert bool(held_for(job)) is bool(top_s)
        if top_s:
            c.comes_in()
            job.passes(2.0)


def test_a_limit_holds_from_the_first_quorum_of_a_lighthouse_that_was_started_again() -> None:
    job, a, b = Job.of("ab", 2, least=2, join_stall_limit_s=3.0)
    c = warms_up(job, "c")
    job.restart()
    they_connect(a, b, c)
    c.asks(at_end=True, reach_s=2.0)
    they_ask(a, b, can_serve=True)
    assert held_for(job) == ["c:1"]
    c.still_needs(20.0)
    job.passes(0.5)
    assert not held_for(job)


def test_one_that_asks_while_others_wait_with_an_older_state_gets_the_newest() -> None:
    job, _, _, d = in_hold()
    d.asks(at_end=True, reach_s=50.0)
    assert held_for(job) == ["c:1"]
    x = job.join("x")
    x.replica.version = StateVersion(step=2, quorum_id=5, epoch="an earlier life")
    x.connects()
    x.asks()
    assert held_for(job) == ["d:1"], "the others, who have waited with another state, compute by themselves"
    job.passes(0.3)
    assert held_for(job) == ["d:1"] and d.formed is not None and d.formed.version == x.replica.version


def test_who_has_the_state_is_not_waited_for_beyond_the_allowance() -> None:
    job, _, c, _ = in_hold()
    c.comes_in()
    for _ in range(2):
        job.passes(1.4)
        assert c.formed is not None and held_for(job) == ["c:1"]
        quorum_id, step = c.formed.quorum_id, c.formed.version.step
        c.says(JoinProgress(quorum_id=quorum_id, step=step, reach_s=0.0, does=Receives.LOADS))
    job.passes(0.5)
    assert not held_for(job), "its loop takes ten seconds to its next step, and three are allowed"


def test_that_it_has_the_state_counts_from_the_first_time_that_it_says_so() -> None:
    job, *members = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1, top_s=1.0)
    are_asked(members)
    for _ in range(4):
        c.still_needs(0.0, Receives.LOADS)
        job.passes(0.5)
    assert not held_for(job)


def test_one_that_does_more_once_it_has_the_state_says_so_and_is_waited_for_within_the_allowance() -> None:
    job, *members = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1)
    are_asked(members)
    for reach_s in (0.0, 0.5, 0.5, 0.5, 0.0):
        c.still_needs(reach_s, Receives.LOADS)
        job.passes(0.4)
    assert held_for(job) == ["c:1"]
    job.passes(0.3)
    assert not held_for(job), "it has not begun its next step within 0.5 s"
    job, _, c, _ = in_hold()
    for _ in range(9):
        c.still_needs(0.5, Receives.LOADS)
        job.passes(0.4)
    assert not held_for(job), "three seconds are allowed"


def test_one_that_asks_later_has_as_long_to_begin_as_the_first_had_and_no_longer_than_is_allowed() -> None:
    job, _, c, d = in_hold(join_stall_limit_s=30.0)
    job.passes(0.8)
    d.asks(at_end=True, reach_s=0.1)
    c.comes_in()
    c.asks()
    job.passes(SILENT_S - 0.2)
    assert held_for(job) == ["d:1"]
    job.passes(0.5)
    assert not held_for(job), "it has not said for so long that it receives anything"
    job, _, c, d = in_hold()
    for left_s in (2.5, 1.9, 1.3, 0.6):
        c.still_needs(left_s)
        job.passes(0.6)
    d.asks(at_end=True, reach_s=0.1)
    c.comes_in()
    c.asks()
    job.passes(0.5)
    assert held_for(job) == ["d:1"]
    job.passes(0.4)
    assert not held_for(job), "the allowance is over"


def test_one_that_asks_later_is_held_for_if_it_fits_with_what_has_passed() -> None:
    job, _, c, d = in_hold()
    for left_s in (2.5, 1.7):
        c.still_needs(left_s)
        job.passes(0.8)
    d.asks(at_end=True, reach_s=2.0)
    assert held_for(job) == ["c:1"], "it would fit alone"


def test_one_that_has_failed_is_not_held_for_again_while_others_are() -> None:
    job, _, c, d = in_hold()
    d.asks(at_end=True, reach_s=0.1)
    d.comes_in(load=False)
    d.asks(at_end=True, reach_s=0.1)
    for left_s in (2.0, 1.5):
        job.passes(0.5)
        c.still_needs(left_s)
        assert held_for(job) == ["c:1"]
    assert d.hears()[-1] == "pending: the others have waited for it before this step already"


def test_what_a_group_says_of_another_state_is_not_of_the_one_that_it_is_held_for() -> None:
    job, _, c, _ = in_hold()
    assert c.formed is not None
    c.says(JoinProgress(quorum_id=1, step=1, reach_s=50.0))
    job.passes(0.5)
    assert held_for(job) == ["c:1"]


def test_one_that_loads_may_be_silent_for_a_while() -> None:
    job, _, c, _ = in_hold(join_stall_limit_s=30.0)
    c.still_needs(2.5, Receives.LOADS)
    job.passes(SILENT_S - 0.2)
    assert held_for(job) == ["c:1"]
    job.passes(0.5)
    assert not held_for(job)


def test_what_has_passed_counts_together_with_what_a_group_measures_that_it_needs() -> None:
    job, _, c, _ = in_hold()
    job.passes(0.9)
    c.still_needs(2.5)
    job.passes(0.3)
    assert not held_for(job)


def test_of_those_that_could_not_come_in_one_is_tried_at_a_time_that_is_not_in_its_pause() -> None:
    job, *members = Job.of("ab", 2, least=2)
    c, d, e = (warms_up(job, name) for name in "cde")
    allowance = job.lighthouse._joining._allowance
    for name, cost_s in (("c", 10.0), ("d", 0.0), ("e", 0.0)):
        allowance.debt(name, job.now).could_not(cost_s, "it cannot connect", job.now, first_pause_s=None, is_alone=True)
    job.passes(1.0)
    they_ask(c, d, e, at_end=True, reach_s=0.1)
    trains(job, members)
    assert held_for(job) == ["d:1"]


def test_of_those_that_could_not_come_in_as_many_are_tried_at_once_as_a_step_needs_to_count() -> None:
    job, a, b, c = Job.of("abc", 2, least=3)
    others = [warms_up(job, name) for name in "def"]
    b.dies()
    c.dies()
    a.votes()
    for member in others:
        debt = job.lighthouse._joining._allowance.debt(member.replica_id[0], job.now)
        debt.could_not(0.0, "it cannot connect", job.now, first_pause_s=None, is_alone=True)
    job.passes(61.0)
    a.asks(can_serve=True)
    they_ask(*others, at_end=True, reach_s=0.1)
    assert held_for(job)[:2] == ["d:1", "e:1"]


def test_one_that_dies_each_time_when_it_has_the_state_stays_outside_for_longer_and_longer() -> None:
    job, *members = Job.of("ab", 2, least=2)
    stood_s = 0.0
    for life in range(1, 20):
        c = job.join("c", life=life)
        c.asks()
        c.ends()
        c.asks(at_end=True, reach_s=2.0)
        trains(job, members)
        if held_for(job):
            job.passes(2.0)
            c.still_needs(0.0, Receives.LOADS)
            stood_s += 2.0
        c.dies()
        trains(job, members)
    assert stood_s <= 0.15 * job.now


@pytest.mark.parametrize("how", ["its connection breaks", "it stays connected"])
def test_one_that_was_given_the_state_of_an_attempt_that_was_discarded_does_not_begin_the_next_attempt_with_it(
    how: str,
) -> None:
    job, a, b, c = waits_for_c()
    assert c.formed is not None and c.formed.held
    given = c.formed.version
    c.still_needs(0.0)
    if how == "its connection breaks":
        c.is_cut_off()
    else:
        job.passes(6.0)
    assert a.formed is not None and a.formed.role is Role.HEALTHY and not job.lighthouse._holds.is_on
    they_vote(a, b, error="a loss that is not a number")
    assert a.step == b.step == given.step
    c.loads()
    c.replica.learned()
    if how == "its connection breaks":
        c.connects()
    c.asks()
    assert c.replica.warms_up, "what the others have done in the attempt before is part of the state that it was given"
    are_asked([a, b])
    assert job.lighthouse.round is not None and "c:1" not in job.lighthouse.round.tally.roles


@pytest.mark.parametrize("is_late", [False, True], ids=["it has yet to come", "it has come, and another has not"])
def test_one_that_was_given_values_of_an_attempt_that_its_source_has_left_comes_in_with_those_of_the_next(
    is_late: bool,
) -> None:
    job, a, b = Job.of("ab", 2, least=2)
    c, d = (warms_up(job, name) for name in "cd")
    for member in (c, d) if is_late else (c,):
        member.asks(at_end=True, reach_s=0.5)
    are_asked([a, b])
    c.comes_in()
    if is_late:
        c.asks()
    a.asks(can_serve=True)  # its loss was not a number: it has gone on to its next batch
    if not is_late:
        c.asks()
    assert c.replica.warms_up, "a has moved what no step changes, its place in the data say"
    if is_late:
        d.comes_in()
        d.asks()
    assert [m.hears()[-1] for m in (a, b)] == ["quorum 1 step 2 healthy"] * 2
    they_vote(a, b)
    c.ends()
    c.asks(at_end=True, reach_s=0.5)
    are_asked([a, b])
    c.comes_in()
    c.asks()
    assert job.lighthouse.round is not None and job.lighthouse.round.tally.roles["c:1"] is Role.HEALTHY


def test_of_those_that_hold_values_of_attempts_that_are_over_one_gives_its_own_to_the_others_if_nobody_else_can() -> (
    None
):
    job, a, b = Job.of("ab", 2, least=2)
    newcomers = _, d = [warms_up(job, name) for name in "cd"]
    they_ask(*newcomers, at_end=True, reach_s=0.5)
    are_asked([a, b])
    for member in newcomers:
        member.comes_in()
    a.asks(can_serve=True)  # its loss was not a number
    b.dies()
    for member in newcomers:
        member.asks()
        member.ends()
        member.asks(at_end=True, reach_s=0.5)
    a.votes()
    a.asks(can_serve=True)
    assert held_for(job) == ["c:1", "d:1"]
    a.dies()
    for member in newcomers:
        member.comes_in(load=False)
        member.asks(at_end=True, reach_s=0.5)
    for member in newcomers:
        member.ends()
        member.asks(can_serve=True)
    assert d.replica.warms_up, "what it has is of no attempt of c"
    d.ends()
    d.asks(at_end=True, reach_s=0.5)
    assert held_for(job) == ["d:1"] and d.plan is not None and d.plan.load
    d.comes_in()
    d.asks()
    assert [m.hears()[-1] for m in newcomers] == ["quorum 2 step 2 healthy"] * 2


def c_has_values_of_an_attempt_that_is_over() -> tuple[Job, Member, Member]:
    """The attempt was a's, who is cut off; nobody else is there."""
    job, a, b, c = waits_for_c()
    c.comes_in()
    a.asks(can_serve=True)  # its loss was not a number
    a.is_cut_off()
    b.dies()
    return job, a, c


def test_one_with_values_of_an_attempt_that_is_over_asks_while_its_giver_is_cut_off_and_comes_in_when_that_is_back() -> (
    None
):
    job, a, c = c_has_values_of_an_attempt_that_is_over()
    c.asks()
    assert not c.replica.warms_up, "nobody else is there, so the job may go on from what it has"
    a.connects()
    a.asks(can_serve=True)
    assert c.replica.warms_up
    c.ends()
    c.asks(at_end=True, reach_s=0.5)
    assert held_for(job) == ["c:1"] and c.plan is not None and c.plan.load


def test_if_the_job_goes_on_with_values_of_an_attempt_that_was_over_its_giver_has_others_and_comes_in_as_all_do() -> (
    None
):
    job, a, c = c_has_values_of_an_attempt_that_is_over()
    c.asks(can_serve=True)
    d = job.join("d")
    d.warms_up(reach_s=0.5)
    assert held_for(job) == ["d:1"], "it receives what c has"
    a.connects()
    a.asks(can_serve=True)
    assert a.replica.warms_up, "what it has is of an attempt of its own, and c has made none of these"
    d.comes_in()
    d.asks()
    assert [m.hears()[-1] for m in (c, d)] == ["quorum 2 step 2 healthy"] * 2
    they_vote(c, d)
    a.ends()
    a.asks(at_end=True, reach_s=0.5)
    they_ask(c, d, can_serve=True)
    assert held_for(job) == ["a:1"] and a.plan is not None and a.plan.load


def test_one_of_an_outer_loop_asks_anew_with_the_state_that_it_had() -> None:
    job, a, b = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5)
    for _ in range(2):
        they_ask(a, b, can_serve=True, patience_s=9.0)
    c.comes_in()
    c.asks()
    assert job.lighthouse.round is not None and job.lighthouse.round.tally.roles["c:1"] is Role.HEALTHY


@pytest.mark.parametrize("patience_s", [0.0, 9.0], ids=["it makes each step", "it makes many steps between two rounds"])
def test_one_of_an_outer_loop_begins_a_later_attempt_with_the_state_that_it_was_given_for_the_first(
    patience_s: float,
) -> None:
    """Else it would stay outside for ever, as it holds the state between its rounds, if no round counts without it."""
    job, a, b = Job.of("ab", 2, least=2)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5, patience_s=patience_s)
    they_ask(a, b, can_serve=True, patience_s=patience_s)
    c.is_cut_off()
    they_vote(a, b, error="2 replica groups contribute, min_replica_size is 3")
    c.loads()
    c.replica.learned()
    c.connects()
    c.asks(patience_s=patience_s)
    they_ask(a, b, patience_s=patience_s)
    assert job.lighthouse.round is not None
    assert ("c:1" in job.lighthouse.round.tally.roles) == (patience_s > 0.0)


def test_one_with_values_of_an_attempt_that_is_over_waits_with_them_and_goes_on_when_the_others_have_died() -> None:
    """It asks with an iteration begun, so it is not sent to compute alone, and nobody else has the state any more."""
    _, a, b, c = waits_for_c(least=1)
    c.comes_in()
    a.asks(can_serve=True)  # its loss was not a number
    c.asks(allow_heal=False)
    assert c.replica.version == a.replica.version and not c.replica.warms_up
    b.dies()
    a.dies()
    assert c.hears()[-1] == "quorum 2 step 2 healthy"
