"""Nobody is in a quorum who cannot be connected with the others: that is found out beside the quorum, and costs them nothing."""

from __future__ import annotations

from typing import Any

import pytest
from lighthouse_script import Job, Member, they_ask, they_vote

from torchft_ckpt.core.coordination.connecting import ANSWERS_WITHIN_S, PAUSE_S, TAKEN_WITHIN_S
from torchft_ckpt.core.coordination.messages import ConnectedBeside


def at_work(names: str, **settings: Any) -> tuple[Any, ...]:
    """Return a job, and its groups, which have made two steps together, and are in the third."""
    job, *members = Job.of(names, 2, connects_beside=True, **settings)
    for member in members:
        member.asks(can_serve=True)
        member.hears()
    return job, *members


def joins(job: Job, name: str, **settings: int) -> Member:
    return job.join(name, connects_beside=True, **settings)


def comes(job: Job, name: str, **settings: int) -> Member:
    """A group that computes its first iteration alone."""
    member = joins(job, name, **settings)
    member.asks()
    assert member.replica.warms_up
    return member


def ends_alone(*members: Member) -> None:
    """The iterations that they compute alone are over, and they ask for the state."""
    for member in members:
        if member.replica.warms_up:
            member.ends()
        member.asks(at_end=True, reach_s=0.1)


def are_asked(members: list[Member]) -> None:
    """They make the open step, and ask for the next one with what they have captured."""
    they_vote(*members)
    they_ask(*members, can_serve=True)


def comes_in(member: Member) -> str:
    member.comes_in()
    member.asks()
    return member.hears()[-1]


def test_a_newcomer_is_connected_while_it_computes_alone_and_the_quorum_takes_what_was_made() -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c")
    told = [m.connect for m in (a, b, c)]
    assert all(told) and len({one.place for one in told if one}) == 1
    assert [(one.replica_rank, one.replica_world_size) for one in told if one] == [(0, 3), (1, 3), (2, 3)]
    for member in (b, c, a):
        member.is_connected()
    ends_alone(c)
    are_asked([a, b])
    assert comes_in(c) == "quorum 2 step 3 healthy"
    assert [m.formed.meets.place for m in (a, b, c) if m.formed] == [a.connect.place] * 3 if a.connect else False
    assert a.outcomes[-1].value == b.outcomes[-1].value == "commit"
    are_asked([a, b, c])
    c.votes(error="its loop raised")
    they_vote(a, b, broken=True)
    they_ask(a, b, c)
    assert a.formed is not None and (a.formed.quorum_id, a.formed.meets.place) == (3, ""), (
        "none is made twice at one place"
    )


def test_no_quorum_is_held_for_one_that_is_not_connected_yet_and_those_who_train_go_on() -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c")
    ends_alone(c)
    for _ in range(3):
        are_asked([a, b])
        job.passes(1.0)
        assert a.hears()[-1].startswith("quorum 1 step") and not job.lighthouse._holds.is_on
    assert c.hears()[-1] == "pending: it is connected with a:1, b:1 first, while they train on"
    for member in (a, b, c):
        member.is_connected()
    are_asked([a, b])
    assert comes_in(c) == f"quorum 2 step {a.step} healthy"


@pytest.mark.parametrize(
    "who", ["the newcomer cannot", "one of the others cannot", "the newcomer says nothing", "all wait in vain"]
)
def test_one_that_cannot_be_connected_stays_outside_and_costs_the_others_neither_a_step_nor_time(who: str) -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c")
    ends_alone(c)
    num_tries, places = 0, {""}
    for _ in range(600):
        job.passes(0.5)
        if c.connect is not None and c.connect.place not in places:
            num_tries += 1
            places.add(c.connect.place)
            if who == "the newcomer cannot":
                c.is_connected("connect timeout")
            elif who == "one of the others cannot":
                c.is_connected()
                b.is_connected("no route to c")
            elif who == "the newcomer says nothing":
                a.is_connected()
                b.is_connected()
        job.passes(0.5)
        are_asked([a, b])
    assert {outcome.value for outcome in (*a.outcomes, *b.outcomes)} == {"commit"} and a.step == 602
    assert a.formed is not None and a.formed.quorum_id == 1
    assert job.lighthouse._joining._allowance.purse_s(job.now) == job.lighthouse._joining._allowance.limit_s
    assert 5 <= num_tries <= 16, "it is tried again, less and less often"
    assert "it cannot be connected with those who train" in c.hears()[-1]
    assert any("look for a firewall" in line for line in job.log)
    for _ in range(600):
        if c.connect is not None and c.connect.place not in places:
            break
        job.passes(0.5)
    are_asked([a, b])
    for member in (a, b, c):
        member.is_connected()
    are_asked([a, b])
    assert comes_in(c) == f"quorum 2 step {a.step} healthy", "the firewall is gone"


def test_one_whose_connections_hang_longer_than_an_answer_may_take_keeps_no_other_newcomer_outside() -> None:
    job, a, b = at_work("ab", least=2)
    c, d = (comes(job, name) for name in "cd")
    ends_alone(c)
    ends_alone(d)
    for _ in range(200):
        if d.connect is not None and (c.connect is None or d.connect.place != c.connect.place):  # it is tried without c
            break
        job.passes(1.0)
    for member in (a, b, d):
        member.is_connected()
    are_asked([a, b])
    assert comes_in(d) == f"quorum 2 step {a.step} healthy"


def test_one_that_comes_while_another_is_connected_is_next_also_if_the_other_dies() -> None:
    job, a, b = at_work("ab", least=2)
    c, d = comes(job, "c"), comes(job, "d")
    assert d.connect is None
    c.dies()
    job.passes(PAUSE_S)
    assert d.connect is not None and d.connect.replica_world_size == 3
    for member in (a, b, d):
        member.is_connected()
    ends_alone(d)
    are_asked([a, b])
    assert comes_in(d) == "quorum 2 step 3 healthy"


def test_newcomers_that_come_together_meet_each_other_too() -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c")
    d, e = comes(job, "d"), comes(job, "e")
    for member in (a, b, c):
        member.is_connected()
    job.passes(PAUSE_S)
    assert d.connect is not None and e.connect is not None and d.connect.replica_world_size == 4
    d.is_connected("connect timeout")
    job.passes(PAUSE_S)
    tried = [member for member in (d, e) if member.connect.replica_world_size == 3]
    assert len(tried) == 1
    for member in (a, b, tried[0]):
        member.is_connected()
    job.passes(PAUSE_S)
    (other,) = {d, e} - {*tried}
    for member in (a, b, other):
        member.is_connected()
    ends_alone(c, d, e)
    are_asked([a, b])
    held = [m for m in (c, d, e) if m.formed is not None and m.formed.held]
    assert held == [c], "the others have not met it"
    assert comes_in(c) == "quorum 2 step 3 healthy"
    job.passes(PAUSE_S)
    are_asked([a, b, c])
    assert d.connect.replica_world_size == 5, "both meet it, and each other"


def test_a_meeting_whose_party_dies_is_over_and_nobody_is_to_blame() -> None:
    job, a, b, x = at_work("abx", least=2)
    c = comes(job, "c")
    before = c.connect
    for member in (a, b, c):
        member.is_connected()
    x.dies()
    job.passes(PAUSE_S)
    are_asked([a, b])
    assert c.connect is not None and before is not None and c.connect.place != before.place
    assert c.connect.replica_world_size == 3
    for member in (a, b, c):
        member.is_connected()
    ends_alone(c)
    are_asked([a, b])
    assert comes_in(c).endswith("healthy")
    assert not job.lighthouse._joining._allowance.debts


def test_one_that_has_met_them_comes_in_without_meeting_those_who_are_left_again() -> None:
    job, a, b, x = at_work("abx", least=2)
    c = comes(job, "c")
    for member in (a, b, x, c):
        member.is_connected()
    met_at = c.connect
    ends_alone(c)
    x.dies()
    they_ask(a, b, can_serve=True)
    assert c.connect is met_at
    assert comes_in(c).endswith("healthy") and a.formed is not None and a.formed.meets.place == "", (
        "x is not among them"
    )


def test_who_is_left_behind_has_met_them() -> None:
    _, a, b, c = at_work("abc", least=2)
    they_vote(c, a)
    c.replica.decision_unknown()
    c.asks(at_end=True, reach_s=0.1)
    b.votes()
    assert (a.step, c.step) == (3, 2)
    they_ask(a, b, can_serve=True)
    assert c.connect is None and comes_in(c).endswith("step 3 healthy")


def test_one_that_has_caught_up_between_two_rounds_is_connected_before_it_is_in_a_quorum() -> None:
    job, a, b = at_work("ab", least=2)
    they_vote(a, b)
    c = joins(job, "c")
    c.says(c.replica.locate())
    assert c.connect is not None and a.connect is not None, "it has not asked for a step yet"
    c.replica.caught_up(a.replica.version)
    for member in (a, b, c):
        member.is_connected()
    they_ask(c, a, b, can_serve=True)
    assert [m.hears()[-1] for m in (a, b, c)] == ["quorum 2 step 3 healthy"] * 3
    they_vote(a, b, c)
    job.passes(PAUSE_S)
    d = joins(job, "d")
    d.says(d.replica.locate())
    d.replica.caught_up(a.replica.version)
    they_ask(d, a, b, c, can_serve=True)
    d.is_connected("connect timeout")
    assert [m.hears()[-1] for m in (a, b, c)] == ["quorum 2 step 4 healthy"] * 3
    assert any("d:1: it cannot be connected with those who train" in line for line in job.log)


def test_where_one_process_group_cannot_be_connected_beside_all_connect_as_the_quorum_begins() -> None:
    job, a, b = at_work("ab", least=2)
    c = job.join("c")
    c.asks()
    ends_alone(c)
    are_asked([a, b])
    assert c.connect is None and comes_in(c) == "quorum 2 step 3 healthy"


def test_those_who_are_too_few_wait_for_nobody_to_be_connected_first() -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c")
    b.dies()
    a.asks(can_serve=True)
    ends_alone(c)
    assert c.formed is not None and c.formed.held
    assert comes_in(c).endswith("healthy")


def test_a_meeting_that_one_at_work_does_not_answer_is_named_and_begun_anew_and_blames_nobody() -> None:
    job, _, b = at_work("ab", least=2)
    c = comes(job, "c")
    before = c.connect
    c.is_connected()
    b.is_connected()
    job.passes(ANSWERS_WITHIN_S + 1.0)
    assert c.connect is not before and not job.lighthouse._joining._allowance.debts
    assert any("c:1 stays outside" in line and "a:1 has not said" in line for line in job.log)


def test_those_who_have_made_no_step_that_counts_together_meet_nobody_as_it_could_be_one_of_them_who_is_cut_off() -> (
    None
):
    job = Job(least=2)
    a, b = joins(job, "a"), joins(job, "b")
    they_ask(a, b, can_serve=True)
    c = comes(job, "c")
    assert c.connect is None
    are_asked([a, b])
    assert c.connect is not None and c.connect.replica_world_size == 3


def test_one_that_could_not_be_connected_keeps_nobody_outside_who_comes_after_it() -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c")
    c.is_connected("connect timeout")
    job.passes(30.0)
    d = comes(job, "d")
    assert d.connect is not None and d.connect.replica_world_size == 3, "without the other"
    for member in (a, b, d):
        member.is_connected()
    ends_alone(c, d)
    are_asked([a, b])
    assert comes_in(d).endswith("healthy")


def test_one_that_comes_again_and_again_keeps_the_others_busy_only_now_and_then() -> None:
    job, a, _ = at_work("ab", least=2)
    places = set()
    for life in range(1, 101):
        member = joins(job, "c", life=life)
        member.asks()
        places.add(a.connect.place if a.connect is not None else "")
        job.passes(0.01)
        member.dies()
    assert len(places) <= 2 + 100 * 0.01 / PAUSE_S


def test_an_answer_that_nobody_was_asked_for_changes_nothing() -> None:
    job, a, b = at_work("ab", least=2)
    c, d = comes(job, "c"), comes(job, "d")
    assert c.connect is not None
    for place in (c.connect.place, "", "life1/beside-9"):
        for failure in ("", "they are all behind a firewall"):
            d.says(ConnectedBeside(place=place, failure=failure))
    b.says(ConnectedBeside(place="life1/beside-9", failure="of a life before"))
    for member in (a, b):
        member.is_connected()
    ends_alone(c)
    are_asked([a, b])
    assert not job.lighthouse._holds.is_on, "it has not said that it is connected"
    assert not job.lighthouse._joining._allowance.debts
    c.is_connected()
    are_asked([a, b])
    assert comes_in(c).endswith("healthy")


def test_a_group_of_another_number_of_ranks_is_not_connected_beside_and_is_not_kept_outside_for_that() -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c", ranks=2)
    ends_alone(c)
    are_asked([a, b])
    assert c.connect is None and comes_in(c) == "quorum 2 step 3 healthy"


def test_one_that_failed_alone_is_tried_again_after_those_that_have_not_been_tried_alone() -> None:
    job, a, b = at_work("ab", least=2)
    newcomers = [comes(job, name) for name in ("first", "x", "d", "e", "f")]
    for member in (a, b, newcomers.pop(0)):
        member.is_connected()
    tried: list[str] = []
    for _ in range(4):
        job.passes(30.0 if "x:1" in tried else PAUSE_S)
        place = a.connect.place if a.connect is not None else ""
        parties = [m for m in newcomers if m.connect is not None and m.connect.place == place]
        tried += [m.replica_id for m in parties]
        for member in parties:
            member.is_connected("connect timeout")
    assert sorted(tried[:4]) == ["d:1", "e:1", "f:1", "x:1"], "together"
    assert len(tried) == 7 and len({*tried[4:]}) == 3, "and then each alone, none of them twice"


def test_what_was_connected_long_ago_is_connected_anew_as_the_quorum_begins() -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c")
    for member in (a, b, c):
        member.is_connected()
    job.passes(TAKEN_WITHIN_S)
    ends_alone(c)
    are_asked([a, b])
    assert comes_in(c) == "quorum 2 step 3 healthy"
    assert [m.formed.meets.place for m in (a, b, c) if m.formed is not None] == [""] * 3


def test_a_lighthouse_that_starts_again_in_a_meeting_begins_another_one() -> None:
    job, a, b = at_work("ab", least=2)
    c = comes(job, "c")
    before = c.connect
    assert before is not None
    ends_alone(c)
    job.restart()
    for member in (a, b, c):
        member.connects()
        member.says(ConnectedBeside(place=before.place))
    are_asked([a, b])
    ends_alone(c)
    are_asked([a, b])
    assert not job.lighthouse._holds.is_on and c.connect is not None and c.connect.place != before.place
    for member in (a, b, c):
        member.is_connected()
    ends_alone(c)
    are_asked([a, b])
    assert comes_in(c).endswith("healthy")
