"""Replica groups that leave on purpose: after their step, while the others go on as if nothing had happened."""

from __future__ import annotations

import pytest
from lighthouse_script import Job, they_ask, they_connect, they_vote

from torchft_ckpt.core.coordination.jobs import Jobs
from torchft_ckpt.core.coordination.lighthouse_events import LighthouseSettings, Opened, Received, Send
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    Done,
    Drain,
    Hello,
    LeaveWish,
    LocateState,
    Refused,
)


def three(least: int = 1) -> Job:
    """A job of a, b and c, which have made a step together."""
    job = Job(least)
    job.step(*(job.join(name) for name in "abc"))
    return job


def test_a_group_leaves_with_its_step_and_the_others_wait_for_it_no_more() -> None:
    job = three()
    a, b, c = job.members.values()
    they_ask(a, b, c)
    a.wishes_to_leave()
    they_vote(a, b, c)
    assert (a.hears(), b.hears()) == (
        ["quorum 1 step 1 healthy", "commit, leaving"],
        ["quorum 1 step 1 healthy", "commit"],
    )
    assert a.replica.is_leaving
    they_ask(b, c)
    assert b.hears() == c.hears()[-1:] == ["quorum 2 step 2 healthy"], "at once, while a saves"
    they_vote(b, c)
    a.leaves()
    assert b.hears() == c.hears() == ["commit"]
    assert b.step == c.step == 3


@pytest.mark.parametrize("when", ["between two steps", "when it has voted", "when the others have voted"])
def test_whenever_the_wish_comes_nobody_discards_a_step(when: str) -> None:
    job = three()
    a, b, c = job.members.values()
    if when == "between two steps":
        a.wishes_to_leave()
    they_ask(b, c, a)
    if when == "when it has voted":
        a.votes()
        a.wishes_to_leave()
    they_vote(b, c)
    if when == "when the others have voted":
        a.wishes_to_leave()
    a.votes()
    assert a.hears()[-1] == "commit, leaving"
    assert (b.step, c.step) == (2, 2)
    assert not any("discard" in line for line in job.log)


def test_a_discarded_step_is_the_last_one_too() -> None:
    job = three()
    a, b, c = job.members.values()
    they_ask(a, b, c)
    a.wishes_to_leave()
    b.votes(error="it failed")
    assert "discard" not in a.hears()[-1], "it has not voted yet"
    a.votes()
    assert a.hears()[-1] == "discard, leaving"


def test_a_group_that_would_wait_for_a_quorum_goes_without_one() -> None:
    _, a = Job.of("a", least=2)
    a.asks()
    a.wishes_to_leave()
    assert a.hears() == ["no quorum, leaving"]
    assert a.replica.is_learner
    a.replica.learned()
    assert a.replica.is_leaving


def test_a_loop_that_abandons_the_step_for_itself_alone_leaves_with_that() -> None:
    _, a = Job.of("a", least=2)
    a.asks()
    assert a.replica.may_begin(), "it is not told yet"
    a.wishes_to_leave()
    assert not a.replica.may_begin()
    assert a.replica.is_leaving and a.replica.is_between_steps


def test_a_group_that_the_others_count_on_waits_a_moment_for_them() -> None:
    job = three()
    a, b, c = job.members.values()
    a.wishes_to_leave()
    a.asks()
    assert a.hears() == []
    job.passes(1.5)
    assert a.hears()[-1] == "no quorum, leaving"
    they_ask(b, c)
    assert b.hears()[-1] == c.hears()[-1] == "quorum 2 step 1 healthy"


def test_one_that_comes_and_is_to_leave_loads_nothing_first() -> None:
    job = three()
    d = job.join("d")
    d.wishes_to_leave()
    d.asks()
    assert d.hears() == ["no quorum, leaving"]


def test_the_last_holder_of_the_newest_state_stays_while_another_group_heals() -> None:
    job, a = Job.of("a", 1, least=1)
    b = job.join("b")
    a.wishes_to_leave()
    b.asks()
    b.ends()
    b.asks(at_end=True)
    a.asks(can_serve=True)
    assert "letgo" not in a.hears() and b.formed is not None and b.formed.held
    b.comes_in()
    b.asks()
    they_vote(a, b)
    assert a.hears()[-1].startswith("commit, leaving"), "b holds it by now"
    assert b.step == 2


def test_the_last_holder_does_not_stay_for_ever() -> None:
    job, a = Job.of("a", 1, least=1)
    job.join("b")  # and it never asks
    a.wishes_to_leave()
    heard = []
    for _ in range(10):
        a.asks()
        job.passes(2.0)
        a.votes()
        heard += a.hears()
        if a.replica.phase.value == "training" or "leaving" in heard[-1]:
            break
    assert job.now >= 10.0
    assert "leaving" in heard[-1]


def test_groups_that_all_leave_wait_for_nobody() -> None:
    job = three()
    members = list(job.members.values())
    they_ask(*members)
    for member in members:
        member.wishes_to_leave()
    they_vote(*members)
    assert [member.hears()[-1] for member in members] == ["commit, leaving, as all do"] * 3
    assert all(member.replica.all_leave for member in members)


def test_groups_that_leave_while_another_stays_are_told_that_not_all_leave() -> None:
    job = three()
    a, b, _ = members = list(job.members.values())
    they_ask(*members)
    a.wishes_to_leave()
    b.wishes_to_leave()
    they_vote(*members)
    assert [member.hears()[-1] for member in members] == ["commit, leaving", "commit, leaving", "commit"]


def test_the_log_says_when_too_few_groups_stay() -> None:
    job = three(least=3)
    a, b, c = job.members.values()
    a.wishes_to_leave()
    job.step(a, b, c)
    assert "a:1 leaves at step 2: SIGTERM; 2 replica groups stay, at least 3 have to train" in "".join(job.log)
    they_ask(b, c)
    job.passes(2.0)
    assert "2 of at least 3 replica groups are here" in b.hears()[-1]


def test_a_restarted_lighthouse_does_not_wait_for_a_group_that_was_told_before() -> None:
    job = three()
    a, b, c = job.members.values()
    a.wishes_to_leave()
    job.step(a, b, c)
    job.restart()
    they_connect(a, b, c)
    a.wishes_to_leave(is_told=True)
    they_ask(b, c)
    job.passes(1.5)
    assert b.hears()[-1] == c.hears()[-1] == "quorum 1000 step 2 healthy"


def test_a_vote_in_doubt_is_answered_with_leaving_by_a_restarted_lighthouse() -> None:
    job = three()
    a, b, c = job.members.values()
    they_ask(a, b, c)
    they_vote(a, b)
    job.restart()
    c.votes()
    for member in (a, b, c):
        member.connects()
        if member is a:
            a.wishes_to_leave()
        member.says_again()
    assert (a.hears()[-1], b.hears()[-1]) == ("commit, leaving", "commit")


def test_a_group_that_was_told_to_leave_may_still_ask_where_the_state_is_and_nobody_waits_for_it() -> None:
    job = three()
    a, b, c = job.members.values()
    a.wishes_to_leave()
    job.step(a, b, c)
    a.says(LocateState(request_id=9, version=a.replica.version))
    they_ask(b, c)
    assert b.hears()[-1] == "quorum 2 step 2 healthy"


def drained(job_name: str | None, group: str) -> tuple[list[object], list[object], Jobs]:
    """Return what the operator and the group are told."""
    jobs = Jobs(LighthouseSettings(min_replicas=2), epoch="e")
    jobs.handle(Opened("c1", "gpt"), 0.0)
    jobs.handle(Received("c1", Hello(protocol=PROTOCOL_VERSION, replica_id="train_1:abc")), 0.0)
    jobs.handle(Opened("operator", job_name), 1.0)
    told = [i for i in jobs.handle(Received("operator", Drain(replica_id=group)), 1.0) if isinstance(i, Send)]
    to_operator, to_group = ([i.message for i in told if i.connection == party] for party in ("operator", "c1"))
    return to_operator, to_group, jobs


@pytest.mark.parametrize("group", ["train_1", "train_1:abc"])
@pytest.mark.parametrize("job_name", ["gpt", None])
def test_the_operator_has_a_group_leave_by_its_name(job_name: str | None, group: str) -> None:
    answers, told, jobs = drained(job_name, group)
    assert answers == [Done(text="job gpt: train_1:abc is to leave at the end of its step")]
    assert told == [LeaveWish(reason="the operator asked for it")], "so that it tells a lighthouse that is restarted"
    assert jobs.states["gpt"].members["train_1:abc"].wishes_to_leave == "the operator asked for it"


@pytest.mark.parametrize(
    ("job_name", "group", "reason"),
    [
        ("gpt", "train_2", "job gpt has no replica group train_2 here now; groups: train_1:abc"),
        ("other", "train_1", "no job other is here; known jobs: gpt"),
    ],
)
def test_a_group_that_is_not_here_is_not_drained(job_name: str, group: str, reason: str) -> None:
    answers, _, _ = drained(job_name, group)
    assert answers == [Refused(code="job", reason=reason)]


def test_a_drained_group_that_was_cut_off_is_still_to_leave() -> None:
    job = three()
    a, b, c = job.members.values()
    job.operator_drains("a")
    a.is_cut_off()
    a.connects()
    job.step(a, b, c)
    assert a.replica.is_leaving
    assert b.outcomes[-1].value == "commit"


def test_a_group_between_two_steps_that_are_far_apart_leaves_there() -> None:
    """As in an outer loop; what comes to its step within a moment leaves after that."""
    job = three()
    a, b, c = job.members.values()
    a.wishes_to_leave()
    job.passes(1.9)
    assert a.hears() == []
    job.passes(0.2)
    assert a.hears() == ["letgo"]
    they_ask(b, c)
    assert b.hears()[-1] == c.hears()[-1] == "quorum 2 step 1 healthy", "nobody waits for it"


def test_a_group_that_is_in_a_step_is_let_go_by_its_decision_alone() -> None:
    job = three()
    members = a, b, c = list(job.members.values())
    they_ask(*members)
    a.wishes_to_leave()
    job.passes(10.0)
    assert "letgo" not in a.hears()
    they_vote(*members)
    assert a.hears() == ["commit, leaving"]
    assert (b.step, c.step) == (2, 2)


def test_nobody_waits_for_one_that_was_let_go_before_the_decision_on_its_step() -> None:
    """Seed 892: it had approved the step, did not wait for the decision, and was told to leave when it asked for the next."""
    job, a = Job.of("a", 1)
    b = job.join("b")
    job.lets_in(b, others=[a])
    b.votes()
    b.asks()
    job.operator_drains("b")
    job.passes(1.5)
    assert b.hears()[-1] == "no quorum, leaving"
    a.votes()
    a.asks()
    assert a.hears()[-1] == "quorum 3 step 2 healthy", "at once, while b saves"


def test_nobody_waits_for_one_that_was_cut_off_in_a_step_and_let_go_before_that_is_discarded() -> None:
    """Seed 64742 of outer loops: it was in no open step any more when it had been cut off, and held what the others hold."""
    job = three()
    members = a, b, c = list(job.members.values())
    they_ask(*members)
    a.is_cut_off()
    a.connects()
    a.wishes_to_leave()
    job.passes(2.1)
    assert a.hears()[-1] == "letgo"
    b.votes()
    assert b.hears()[-1] == "discard"
    they_ask(b, c)
    assert b.hears()[-1] == c.hears()[-1] == "quorum 2 step 1 healthy", "at once, while a saves"
