"""A quorum is held for a group that lacks its state: it receives that, and is in the quorum as one that holds it."""

from __future__ import annotations

import pytest
from lighthouse_script import Job, Member

from torchft_ckpt.core.coordination.messages import Receives, Role


def at_work(job: Job, *names: str, **settings: object) -> list[Member]:
    """Groups that have made two steps together."""
    members = [job.join(name, loads_at_end=True, **settings) for name in names]
    job.step(*members)
    job.step(*members)
    return members


def warms_up(job: Job, name: str, **settings: object) -> Member:
    """A group that has come, and has computed an iteration alone."""
    member = job.join(name, loads_at_end=True, **settings)
    member.asks()
    assert member.hears()[-1].endswith("step 2 learner") and member.replica.warms_up
    member.ends()
    return member


def are_asked(members: list[Member]) -> None:
    """They make the step that is open, and ask for the next one with what they have captured."""
    for member in members:
        member.asks()
        member.hears()


def test_a_group_that_lacks_the_state_gets_it_before_the_quorum_and_is_in_it_as_a_holder() -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b")
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5)
    assert c.hears() == []
    are_asked([a])
    b.asks()
    assert (a.num_held, b.num_held) == (1, 1)
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


@pytest.mark.parametrize("how", ["dies", "fails", "is silent", "does not begin", "is slower than allowed"])
def test_a_hold_that_fails_costs_its_own_time_and_no_step_and_no_quorum_id(how: str) -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b", join_stall_limit_s=3.0, join_budget_s=1.0)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5, top_s=1.0)
    are_asked([a, b])
    if how == "dies":
        c.dies()
    elif how == "fails":
        c.comes_in(load=False)
        c.asks(at_end=True, reach_s=0.5)
    elif how == "is silent":
        c.still_needs(0.5)
        job.passes(1.3)
    elif how == "does not begin":
        c.still_needs(0.0, Receives.LOAD_FIRST)
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


def test_a_group_is_held_for_once_at_a_boundary_and_later_again() -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b")
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1)
    are_asked([a, b])
    c.comes_in(load=False)
    c.asks(at_end=True, reach_s=0.1)
    assert not job.lighthouse._holds.is_on and a.formed is not None and a.formed.version.step == 2
    for member in (a, b):
        member.votes()
    job.passes(1.0)
    are_asked([a, b])
    assert job.lighthouse._holds.is_on
    c.comes_in()
    c.asks()
    assert c.hears()[-1] == "quorum 2 step 3 healthy"


def test_those_who_are_too_few_wait_without_a_limit() -> None:
    job = Job(least=1)
    a, b = at_work(job, "a", "b", min_replica_size=2, join_stall_limit_s=1.0, join_budget_s=0.5)
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
    job = Job(least=2)
    a, b = at_work(job, "a", "b", join_stall_limit_s=3.0, join_budget_s=1.0)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=10.0)
    are_asked([a, b])
    assert not job.lighthouse._holds.is_on
    for _ in range(3):
        job.passes(1.0)
        for member in (a, b):
            member.votes()
        are_asked([a, b])
    assert "join_stall_limit allows 3 s at most" in c.hears()[-1]


def test_what_holds_take_is_taken_from_the_allowance() -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b", join_stall_limit_s=3.0, join_budget_s=1.0)
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5)
    are_asked([a, b])
    for _ in range(5):
        job.passes(0.5)
        c.still_needs(0.3)
    c.comes_in()
    c.asks()
    assert job.lighthouse._joining._allowance.purse_s(job.now) == pytest.approx(0.5, abs=0.15)


def test_several_groups_are_held_for_together_and_one_that_asks_meanwhile() -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b")
    c, d, e = (warms_up(job, name) for name in "cde")
    c.asks(at_end=True, reach_s=0.5)
    d.asks(at_end=True, reach_s=0.5)
    are_asked([a, b])
    e.asks(at_end=True, reach_s=0.5)
    assert all(m.formed is not None and m.formed.held for m in (c, d, e))
    for member in (c, d, e):
        member.comes_in()
        member.asks()
    assert [m.hears()[-1] for m in (a, b, c, d, e)] == ["quorum 2 step 2 healthy"] * 5


def test_the_lighthouse_is_lost_in_a_hold_and_nobody_waits_for_it_afterwards() -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b")
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5)
    are_asked([a, b])
    job.restart()
    for member in (a, b, c):
        member.connects()
    for member in (a, b):
        member.asks()
    assert [m.hears()[-1] for m in (a, b)] == ["quorum 1000 step 2 healthy"] * 2


def test_a_survivor_dies_in_a_hold_and_the_others_go_on() -> None:
    job = Job(least=1)
    a, b = at_work(job, "a", "b")
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.5)
    are_asked([a, b])
    b.dies()
    assert job.lighthouse._holds.is_on
    c.comes_in()
    c.asks()
    assert [m.hears()[-1] for m in (a, c)] == ["quorum 2 step 2 healthy"] * 2


def test_a_loop_that_trains_another_network_than_the_others_comes_in_a_step_later() -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b")
    for kind in ("0", "1"):
        for member in (a, b):
            member.asks(kind=kind)
        for member in (a, b):
            member.votes()
    c = job.join("c", loads_at_end=True)
    c.asks()
    c.ends()
    c.asks(at_end=True, reach_s=0.1, kind="1")
    for member in (a, b):
        member.asks(kind="0", can_serve=True)
    assert not job.lighthouse._holds.is_on
    for member in (a, b):
        member.votes()
    for member in (a, b):
        member.asks(kind="1", can_serve=True)
    assert job.lighthouse._holds.is_on


def test_one_that_was_needed_is_waited_for_no_longer_than_allowed_once_another_has_come() -> None:
    job = Job(least=1)
    a, b = at_work(job, "a", "b", min_replica_size=2, join_stall_limit_s=1.0, join_budget_s=0.5)
    b.dies()
    a.asks()
    c, d = (warms_up(job, name, min_replica_size=2) for name in "cd")
    for member in (c, d):
        member.asks(at_end=True, reach_s=0.1)
    a.votes()
    a.asks()
    job.passes(5.0)
    c.comes_in()
    c.asks()
    assert job.lighthouse._holds.is_on, "there is time left for the other one"
    job.passes(1.0)
    assert [m.hears()[-1].split()[-1] for m in (a, c)] == ["healthy", "healthy"]


def first_holder_dies(*names: str) -> tuple[Job, list[Member]]:
    """Groups that have received the first state after their forward pass, from one that is gone, and may hold it or not."""
    job = Job(least=3)
    members = [job.join(name, loads_at_end=True) for name in names]
    for member in members:
        member.asks()
    first, *others = members
    for member in others:
        member.replica.load_finished(first.replica.version, before_forward=False)
    first.dies()
    for member in others:
        member.votes(load=False)
    assert all(m.replica.unverified and m.replica.version.proven for m in others)
    return job, others


def test_those_who_have_taken_the_state_of_one_that_stands_in_are_holders_as_it_is() -> None:
    job, (b, c) = first_holder_dies("a", "b", "c")
    d = job.join("d", loads_at_end=True)
    for member in (b, c, d):
        member.asks()
    for member in (d, c):
        assert member.replica.warms_up
        member.ends()
        member.asks(at_end=True, reach_s=0.1)
    assert job.lighthouse._holds.is_on and [source.replica_id for source in d.formed.sources] == ["b:1"]
    for member in (c, d):
        member.comes_in()
        member.asks()
    assert [m.hears()[-1].split()[-1] for m in (b, c, d)] == ["healthy"] * 3
    assert all(m.formed.unverified for m in (b, c, d))
    for member in (b, c, d):
        member.votes()
    assert not any(m.replica.unverified for m in (b, c, d))


def test_who_took_the_state_of_one_that_stood_in_loads_again_when_a_known_holder_is_back() -> None:
    job, (b, c, e) = first_holder_dies("a", "b", "c", "e")
    a = job.members["a:1"]
    for member in (b, c, e):
        member.asks()
    for member in (c, e):
        member.ends()
        member.asks(at_end=True, reach_s=0.1)
    c.comes_in()
    c.asks()
    assert job.lighthouse._holds.is_on, "the other one has not come yet"
    a.is_stopped = False
    a.connects()
    a.asks()
    e.dies()
    assert b.replica.warms_up and c.replica.warms_up
    for member in (b, c):
        member.ends()
        member.asks(at_end=True, reach_s=0.1)
    assert [source.replica_id for source in c.formed.sources] == ["a:1"]


def test_nobody_is_needed_any_more_once_one_has_come_that_must_not_load() -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b", join_stall_limit_s=1.0, join_budget_s=0.5)
    b.dies()
    a.asks()
    c = job.join("c", loads_at_end=True)
    c.asks()
    c.ends()
    c.asks(at_end=True, reach_s=0.1)
    job.passes(5.0)
    assert job.lighthouse._holds.is_on and c.formed is not None and c.formed.held, "it is needed, and silent"
    d = job.join("d", loads_at_end=True)
    d.asks(allow_heal=False)
    job.passes(1.0)
    assert [m.hears()[-1].split()[-1] for m in (a, d)] == ["healthy", "idle"]
    a.votes()
    assert a.step == 3


def test_what_a_loop_has_frozen_as_its_iteration_ends_does_not_keep_it_from_coming_in() -> None:
    job = Job(least=2)
    a, b = at_work(job, "a", "b")
    c = warms_up(job, "c")
    c.asks(at_end=True, reach_s=0.1, frozen="0 to 3")
    for member in (a, b):
        member.asks(can_serve=True, frozen="none")
    assert job.lighthouse._holds.is_on
    c.comes_in()
    c.asks(frozen="none")
    assert [m.hears()[-1] for m in (a, b, c)] == ["quorum 2 step 2 healthy"] * 3
