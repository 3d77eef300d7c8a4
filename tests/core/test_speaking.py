"""One group speaks for the job: the first of those that train, once the one before is known not to write any more."""

from __future__ import annotations

import pytest
from lighthouse_script import Job, Member, they_ask, they_connect, they_vote
from test_learning import trains

from torchft_ckpt.core.coordination.group import GroupState, RankMessage, SendToLighthouse
from torchft_ckpt.core.coordination.messages import Hello, QuorumRequest, StateVersion
from torchft_ckpt.core.coordination.replica import ReplicaSettings


def three() -> tuple[Job, Member, Member, Member]:
    """A job of a, b and c, which have made a step together; a speaks."""
    job, *members = Job.of("abc", 1, join_timeout_s=10.0)
    assert speak(*members) == ["a:1"]
    return job, *members


def speak(*members: Member) -> list[str]:
    return [member.replica_id for member in members if member.replica.speaks]


def go_on_without(job: Job, late: Member, *others: Member) -> None:
    """A group does not come to the next step, and its heart beats; the others wait until the join timeout, and make it."""
    they_ask(*others)
    job.passes(11.0)
    they_vote(*others)
    assert {member.step for member in others} == {late.step + 1}


def test_while_a_group_may_write_no_other_one_speaks() -> None:
    job, a, b, c = three()
    go_on_without(job, a, b, c)
    job.step(b, c)
    assert speak(a, b, c) == ["a:1"]
    assert (b.replica.silent_for, c.replica.silent_for) == ("a:1", "")
    assert [line for line in job.log if "speak" in line] == [
        "b:1 does not speak for the job yet: a:1 did so last, and may still write"
    ]


def test_a_group_speaks_until_it_votes_as_another_than_the_first() -> None:
    job, a, b, c = three()
    a.dies()
    job.step(b, c)
    assert speak(b, c) == ["b:1"]
    a = job.join("a", life=2)
    job.lets_in(a, others=[b, c])
    they_vote(a, b, c)
    assert speak(a, b, c) == ["b:1"], "what a has made of the state is not compared yet"
    they_ask(a, b, c)
    for member in (a, b, c):
        assert speak(a, b, c) == ([] if member is c else ["b:1"])
        member.votes()
    assert speak(a, b, c) == ["a:2"]


@pytest.mark.parametrize("end", ["dies", "leaves"])
def test_when_the_group_that_may_write_is_gone_the_next_one_speaks(end: str) -> None:
    job, a, b, c = three()
    go_on_without(job, a, b, c)
    a.dies() if end == "dies" else a.leaves()
    job.step(b, c)
    assert speak(b, c) == ["b:1"]
    assert b.replica.silent_for == ""


def test_one_that_hears_late_of_its_step_is_silent_for_nobody_who_is_gone_by_then() -> None:
    job, a, b, c = three()
    they_ask(b, c)
    job.passes(11.0)
    b.votes()
    b.is_stopped = True
    c.votes()
    b.is_cut_off()
    a.dies()
    b.connects()
    b.says_again()
    assert (b.step, b.replica.silent_for, speak(b, c)) == (2, "", [])
    job.step(b, c)
    assert speak(b, c) == ["b:1"]


def test_when_the_first_dies_the_next_one_speaks_from_the_next_step_that_counts() -> None:
    job, a, b, c = three()
    a.dies()
    job.step(b, c)
    assert speak(b, c) == ["b:1"]


def test_a_group_that_leaves_may_write_until_it_is_gone() -> None:
    """Its `save` runs when the others have gone on."""
    job, a, b, c = three()
    a.wishes_to_leave()
    job.step(a, b, c)
    assert a.replica.is_leaving and speak(a, b, c) == ["a:1"]
    job.step(b, c)
    assert speak(a, b, c) == ["a:1"]
    a.leaves()
    job.step(b, c)
    assert speak(b, c) == ["b:1"]


def test_a_group_beside_the_quorum_speaks_until_it_has_computed_its_step() -> None:
    """It computes what does not count, and says so when it asks again."""
    job, a, b, c = three()
    go_on_without(job, a, b, c)
    a.asks(reach_s=60.0)
    trains(job, b, c)
    assert a.formed is not None and a.formed.warms_up and speak(a, b, c) == ["a:1"]
    a.ends()
    a.asks(at_end=True, reach_s=60.0, can_follow=True)
    trains(job, b, c)
    assert a.formed.follows and speak(b, c) == ["b:1"]


def test_a_restarted_lighthouse_learns_who_may_write() -> None:
    job, a, b, c = three()
    job.restart()
    they_connect(b, c, a)
    they_ask(b, c)
    job.passes(120.0)
    they_vote(b, c)
    assert b.step == 2
    assert speak(a, b, c) == ["a:1"]


@pytest.mark.parametrize("asks", [False, True])
def test_one_that_nobody_told_to_speak_keeps_no_other_silent_for_long_by_its_word(asks: bool) -> None:
    job, a, b, c = three()
    x = job.members["x:1"] = Member(job, "x:1", 1, ReplicaSettings(min_replica_size=1))
    x.connects(speaks=True)
    job.step(a, b, c)
    assert speak(a, b, c) == [], "it may be true"
    if asks:  # it comes in, hangs, and is left behind
        x.says(QuorumRequest(request_id=1, version=StateVersion(), speaks=True))
        for member in (a, b, c):
            member.asks(can_serve=True)
            member.votes()
    for _ in range(3):
        job.passes(16.0)
        job.step(a, b, c)
    assert speak(a, b, c) == ["a:1"]


def test_of_two_that_may_write_none_goes_on_to_speak() -> None:
    """a was cut off, taken for dead, and is back: b speaks by then, and falls silent with its next step."""
    job, a, b, c = three()
    a.is_cut_off()
    job.step(b, c)
    assert speak(a, b, c) == ["a:1", "b:1"]
    a.connects()
    job.step(b, c)
    assert speak(a, b, c) == ["a:1"]


def test_the_first_that_gave_up_waiting_for_a_decision_may_write_all_the_same() -> None:
    """It has approved the step, and goes on before it hears that the step counts."""
    job, a, b, c = three()
    they_ask(a, b, c)
    they_vote(a, b)
    a.replica.decision_unknown()
    a.asks()
    c.votes()
    assert (b.step, c.step) == (2, 2)
    job.step(b, c)
    assert speak(a, b, c) == ["a:1"]


def test_a_discarded_step_changes_nothing() -> None:
    _, a, b, c = three()
    they_ask(a, b, c)
    a.votes()
    b.votes(error="it failed")
    c.votes()
    assert a.step == 1 and speak(a, b, c) == ["a:1"]


def test_a_group_speaks_while_one_of_its_ranks_may_write() -> None:
    group = GroupState(world_size=2)
    version = StateVersion(step=1, quorum_id=1, epoch="e")
    out = [
        instruction
        for rank in range(2)
        for instruction in group.handle(
            RankMessage(rank, QuorumRequest(request_id=1, version=version, speaks=rank == 1))
        )
    ]
    (asked,) = [i.message for i in out if isinstance(i, SendToLighthouse)]
    assert isinstance(asked, QuorumRequest) and asked.speaks
    assert group.introduce(Hello(protocol=1, replica_id="g", group_world_size=2)).speaks
