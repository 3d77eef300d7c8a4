"""The lighthouse dies and comes back without memory: nothing that was committed is lost, no step is committed twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lighthouse_script import Job, Member, they_ask, they_connect, they_vote
from test_lighthouse_scenarios import trained

from torchft_ckpt.core.coordination import restart
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, CommitVote, Hello, Outcome, StateVersion
from torchft_ckpt.core.coordination.replica import StepPhase


def in_doubt(*names: str) -> tuple[Job, list[Member]]:
    """All have voted for step 1, and the lighthouse is gone before anybody heard the decision."""
    job, members = trained(*names)
    they_ask(*members)
    job.restart()
    for member in members:
        member.votes()  # into the void
        member.hears()
    return job, members


def back(*members: Member) -> None:
    for member in members:
        member.connects()
        member.says_again()


def test_quorum_ids_rise_by_lives() -> None:
    job, (a, b) = trained("a", "b")
    first = a.formed.quorum_id
    for life in (1, 2, 3):
        job.restart()
        they_connect(a, b)
        job.step(a, b)
        assert a.formed.quorum_id == 1000 * life > first


def test_an_id_that_others_have_seen_is_not_given_again_though_who_is_back_first_never_saw_it() -> None:
    job, (a, b) = trained("a", "b")
    b.replica.quorum = None  # it saw no quorum but of a much earlier life
    job.lighthouse._job.quorum_ids._latest = 990
    job.step(a, b)
    job.restart()
    they_connect(a, b)
    job.step(a, b)
    assert a.formed.quorum_id == 2000


def test_who_comes_back_after_the_job_went_back_heals_though_only_a_group_beside_its_quorum_told_of_it() -> None:
    """Seed 2046: the quorum was named 1 again, so that going back in it did not concern the states of the old quorum 1."""
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    beside = job.join("c")
    beside.asks()
    assert beside.formed.warms_up
    they_vote(a, b)
    job.restart()
    beside.connects()
    beside.asks()
    assert beside.replica.phase is StepPhase.ASKING  # it knows that step 1 was committed
    job.operator_allows_loss()
    beside.votes()
    assert (beside.formed.quorum_id, beside.step) == (1000, 1)
    a.connects()
    beside.asks(can_serve=True)
    a.asks()
    beside.votes()
    beside.asks(can_serve=True)
    assert (beside.formed.role.value, a.formed.role.value) == ("healthy", "learner")


def test_nobody_heard_the_old_decision_and_all_approved() -> None:
    job, (a, b, c) = in_doubt("a", "b", "c")
    back(a, b)
    assert (a.outcomes, b.outcomes) == ([], [])
    back(c)
    assert [m.outcomes for m in (a, b, c)] == [[Outcome.COMMIT]] * 3
    job.step(a, b, c)
    assert {m.step for m in (a, b, c)} == {3}
    assert len({m.replica.version for m in (a, b, c)}) == 1


def test_some_heard_that_it_was_committed() -> None:
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    a.votes()
    b.is_stopped = True  # what it hears comes too late
    b.votes()
    job.restart()
    assert (a.outcomes, b.outcomes) == ([Outcome.COMMIT], [])
    b.is_stopped = False
    back(a, b)
    assert b.outcomes == [Outcome.COMMIT]
    assert a.replica.version == b.replica.version


def test_all_heard_the_old_decision() -> None:
    job, (a, b) = trained("a", "b")
    job.restart()
    back(a, b)
    job.step(a, b)
    assert (a.step, b.step) == (2, 2)


def test_some_heard_that_it_was_discarded() -> None:
    job, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    a.votes()
    a.is_stopped = True
    b.votes(error="a collective failed", broken=True)
    job.restart()
    a.is_stopped = False
    assert (a.outcomes, b.outcomes) == ([], [Outcome.DISCARD])
    back(a)
    assert a.outcomes == []
    back(b, c)
    assert a.outcomes == [Outcome.DISCARD]


def test_one_was_against_and_nobody_heard() -> None:
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    job.restart()
    a.votes()
    b.votes(error="a collective failed", broken=True)
    back(a, b)
    assert (a.outcomes, b.outcomes) == ([Outcome.DISCARD], [Outcome.DISCARD])
    job.step(a, b)
    assert (a.step, b.step) == (2, 2)


def test_a_member_died_with_the_lighthouse_and_those_who_have_the_sum_commit_after_the_grace() -> None:
    job, (a, b, _c) = in_doubt("a", "b", "c")
    back(a, b)
    job.passes(4.5)
    assert a.outcomes == []
    job.passes(1.0)
    assert (a.outcomes, b.outcomes) == ([Outcome.COMMIT], [Outcome.COMMIT])


def test_a_commit_that_was_heard_by_one_is_not_undone_by_one_that_was_taken_for_dead() -> None:
    job, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    a.votes()
    b.is_stopped = True
    b.votes()
    c.is_cut_off()  # the step is committed without it, b does not hear of it
    assert a.outcomes == [Outcome.COMMIT]
    job.restart()
    b.is_stopped = False
    c.votes(error="it was cut off", broken=True)
    back(c, b)
    assert b.outcomes == []
    back(a)
    assert b.outcomes == [Outcome.COMMIT]
    assert c.outcomes == [Outcome.LEFT_BEHIND]


# ------------------------------------------------------------------------- another one of several lighthouses goes on


def one_hears_that_it_is_discarded() -> tuple[Job, list[Member]]:
    """Two have approved, and it is discarded on account of a third one: that one alone hears of it."""
    job, members = trained("a", "b", "c")
    for member in members:
        member.asks()
    for member in members[1:]:
        member.is_stopped = True
        member.votes()
    members[0].votes(error="a collective failed", broken=True)
    assert members[0].outcomes == [Outcome.DISCARD]
    return job, members


def one_hears_that_it_counts() -> tuple[Job, list[Member]]:
    """It counts without a member that is cut off: one of those who approved hears of it, and the cut off one has not approved."""
    job, members = trained("a", "b", "c")
    for member in members:
        member.asks()
    members[0].votes()
    members[1].is_stopped = True
    members[1].votes()
    members[2].is_cut_off()
    assert members[0].outcomes == [Outcome.COMMIT]
    members[2].votes(error="it was cut off", broken=True)
    return job, members


@pytest.mark.parametrize("with_store", [True, False])
def test_a_discard_that_one_heard_who_is_away_stands_if_the_next_lighthouse_knows_of_it(with_store: bool) -> None:
    job, (_, b, c) = one_hears_that_it_is_discarded()
    for _ in range(2):  # and so it does if that one dies at once, too
        job.restart(with_store=with_store)
    b.is_stopped = c.is_stopped = False
    back(b, c)
    job.passes(6.0)
    decided = Outcome.DISCARD if with_store else Outcome.COMMIT  # all that came back have approved
    assert (b.outcomes, c.outcomes) == ([decided], [decided])


@pytest.mark.parametrize("with_store", [True, False])
def test_a_commit_that_one_heard_who_is_away_stands_if_the_next_lighthouse_knows_of_it(with_store: bool) -> None:
    job, (_, b, c) = one_hears_that_it_counts()
    job.restart(with_store=with_store)
    b.is_stopped = False
    back(c, b)
    job.passes(6.0)
    assert b.outcomes == [Outcome.COMMIT if with_store else Outcome.DISCARD]
    assert c.outcomes == [Outcome.LEFT_BEHIND if with_store else Outcome.DISCARD]
    assert b.step == (2 if with_store else 1)


@pytest.mark.parametrize("with_store", [True, False])
def test_one_that_was_last_in_an_older_quorum_is_not_all_of_the_last_one_if_the_next_lighthouse_knows_of_that(
    with_store: bool,
) -> None:
    """Simulated seed 200901: it began the job anew, and the votes of the others came too late."""
    job, _ = trained("a", "b")
    old = job.join("old")
    job.restart(with_store=with_store)
    old.connects(last_quorum_id=1, last_epoch="older", last_quorum_size=1)
    old.asks()
    assert (old.formed is None) is with_store
    job.passes(6.0)
    assert old.formed is not None


@pytest.mark.parametrize(("error", "outcome"), [("it was cut off", Outcome.LEFT_BEHIND), (None, Outcome.COMMIT)])
def test_who_votes_when_the_next_lighthouse_has_gone_on_hears_how_the_step_had_ended(
    error: str | None, outcome: Outcome
) -> None:
    job, (a, b, c) = trained("a", "b", "c")
    for member in (a, b, c):
        member.asks()
    a.votes(), b.votes()
    c.is_cut_off()
    assert a.outcomes == b.outcomes == [Outcome.COMMIT]
    job.restart(with_store=True)
    for member in (a, b):
        member.connects()
        member.asks()
    job.passes(6.0)
    assert a.formed is not None and a.formed.quorum_id == 1000
    c.votes(error=error)
    back(c)
    assert c.outcomes == [outcome]


def test_of_a_commit_that_all_voters_approved_nothing_is_left_as_each_of_their_votes_tells_it() -> None:
    assert trained("a", "b", "c")[0].lighthouse.untold.decided == ()
    job, (_, b, _) = in_doubt("a", "b", "c")
    back(b)
    job.passes(6.0)
    assert b.outcomes == [Outcome.COMMIT]
    assert [counts for _, counts in job.lighthouse.untold.decided] == [True]  # others might come and say another thing


def test_no_quorum_before_all_of_the_last_one_are_back_or_the_patience_is_over() -> None:
    job, (a, _b) = trained("a", "b")
    job.restart()
    a.connects()
    a.asks()
    fresh = job.join("f")
    fresh.asks()
    job.passes(4.9)
    assert a.replica.phase is StepPhase.ASKING and fresh.formed.warms_up
    assert any("1 of 2 replica groups are back since the lighthouse restarted" in words for words in a.hears())
    job.passes(0.2)
    assert (a.formed.version.step, a.formed.replica_world_size) == (1, 1)


def test_a_group_that_followed_takes_the_job_no_steps_back_because_it_is_the_first_that_is_back() -> None:
    job, (a, b) = trained("a", "b")
    c = job.join("c")
    c.warms_up(reach_s=30.0, can_follow=True)
    job.step(a, b)
    c.follows()
    assert (c.formed.follows, c.step) == (True, 1)
    job.step(a, b)
    job.restart()
    c.connects()
    c.asks(at_end=True, reach_s=30.0, can_follow=True)
    assert "only groups that were in no quorum are back" in job.log[-1]
    they_connect(a, b)
    job.step(a, b)
    assert (a.step, a.outcomes[-1]) == (4, Outcome.COMMIT)
    assert c.step == 1, "it is outside, as before"


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_job_that_fresh_groups_began_anew_does_not_outlast_the_one_that_is_back(has_trained: bool) -> None:
    """They knew of no other. Until they have made a step, who comes back from it says how far the job is."""
    job, (a,) = trained("a")
    job.step(a)
    job.restart()
    fresh = job.join("f")
    fresh.asks()
    assert (fresh.formed.role.value, fresh.formed.version.step) == ("healthy", 0)
    if has_trained:
        fresh.votes()
    a.connects()
    a.asks()
    if not has_trained:
        fresh.votes()
    fresh.asks()
    assert a.formed.version.step == 2
    a.dies()
    fresh.asks()
    job.passes(200.0)
    if (
        has_trained
    ):  # whoever comes with a later state and goes again does not stop a job that has made steps of its own
        assert fresh.formed.version.step == 1
    else:
        assert fresh.replica.phase is StepPhase.ASKING
        assert any("step 2 was committed, but the newest whole state here is of step 0" in line for line in job.log)


def test_a_member_that_dies_soon_after_is_pushed_to_those_who_share_a_collective_of_the_old_life() -> None:
    job, (a, b, c) = trained("a", "b", "c")
    for member in (a, b, c):
        member.asks()
        member.hears()
    job.restart()
    back(a, b, c)
    c.dies()
    assert "broken by a:1, lost" in a.hears()
    they_vote(a, b)
    assert (a.outcomes, b.outcomes) == ([Outcome.DISCARD], [Outcome.DISCARD])


def test_who_is_in_a_collective_with_one_that_does_not_come_back_is_told() -> None:
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    job.restart()
    back(a)
    a.hears()
    job.passes(5.1)
    assert a.hears() == ["broken by a:1, lost"]


@pytest.mark.parametrize("first", ["those that began it", "the one that did not"])
@pytest.mark.parametrize("is_too_late", [False, True], ids=["", "its collectives are over"])
def test_who_is_in_a_step_that_a_member_never_began_as_the_lighthouse_died_is_told_at_once(
    first: str, is_too_late: bool
) -> None:
    """Else they would wait in its collectives until these time out, and it would wait for them."""
    job, (a, b, c) = trained("a", "b", "c")
    c.is_stopped = True  # it asks, and the answer is lost
    for member in (a, b, c):
        member.asks()
        member.hears()
    assert a.formed is not None and c.formed is not None and a.formed.version.step == c.formed.version.step + 1
    job.restart()
    c.is_stopped = False
    back(*((a, b, c) if first.startswith("those") else (c, a, b)))
    for member in (a, b):
        assert f"broken by {member.replica_id}, lost" in member.hears()
    for member in (a, b):
        member.replica.error = None if is_too_late else member.replica.error
        member.votes()
    assert {a.outcomes[-1], b.outcomes[-1]} == {Outcome.DISCARD}
    a.asks(), b.asks()
    assert {member.hears()[-1] for member in (a, b, c)} == {f"quorum 1000 step {a.step} healthy"}


def test_a_vote_in_doubt_that_comes_when_the_job_has_gone_on_does_not_count() -> None:
    job, (a, b) = in_doubt("a", "b")
    a.replica.decision_unknown()
    a.connects()
    a.asks()
    job.passes(5.1)
    a.votes()
    assert a.step == 2
    back(b)
    assert b.outcomes == [Outcome.DISCARD]
    a.asks(can_serve=True)
    b.asks()
    a.votes()
    a.asks(can_serve=True)
    assert b.formed.role.value == "learner"


def test_one_that_comes_with_a_later_step_ends_the_open_round_that_would_commit_it_twice() -> None:
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    a.votes()
    b.is_stopped = True
    b.votes()  # committed; b does not hear of it
    b.is_stopped = False
    job.restart()
    b.replica.decision_unknown()
    b.connects()
    b.asks()
    job.passes(5.1)
    assert b.formed.version.step == 1
    a.connects()
    assert "broken by b:1" in b.hears()
    b.votes()
    a.asks(can_serve=True)
    b.asks()
    assert (a.formed.role.value, b.formed.role.value, a.formed.version.step) == ("healthy", "learner", 2)


def test_an_old_life_that_is_heard_of_late_raises_the_quorum_id_at_once() -> None:
    job, (a,) = trained("a", steps=3)
    job.restart()
    fresh = job.join("f")
    job.step(fresh)
    assert fresh.formed.quorum_id == 1
    a.connects()
    a.asks(can_serve=True)
    fresh.asks()
    assert (a.formed.quorum_id, a.formed.role.value, fresh.formed.role.value) == (1000, "healthy", "learner")


def test_an_id_that_an_earlier_life_gave_is_left_at_once_when_it_is_heard_of() -> None:
    job, (a,) = trained("a")
    job.restart()
    fresh = job.join("f")
    job.step(fresh)
    assert fresh.formed.quorum_id == a.formed.quorum_id == 1
    a.connects()
    they_ask(a, fresh, can_serve=True)
    assert [m.formed.quorum_id for m in (a, fresh) if m.formed.role.value == "healthy"] == [1000]


def test_a_vote_in_doubt_of_a_quorum_that_a_later_one_has_overtaken_does_not_count() -> None:
    job, a = Job.of("a")
    a.asks()
    a.is_cut_off()  # the step is discarded, nobody is left
    b = job.join("b")
    b.asks()
    a.votes()
    job.restart()
    b.connects()
    back(a)
    assert (a.formed.version.step, b.formed.version.step) == (0, 0)
    assert a.outcomes == [Outcome.DISCARD]


def test_of_two_quorums_that_are_in_doubt_about_one_step_only_one_is_committed() -> None:
    job, a = Job.of("a")
    a.asks()
    a.votes()  # nobody hears of it any more
    a.replica.version, a.replica.phase = a.formed.version, StepPhase.VOTED
    a.is_cut_off()
    job.start()
    b = job.join("b")
    b.asks()
    job.restart()
    b.votes()
    back(a)
    assert a.outcomes[-1] is Outcome.COMMIT
    back(b)
    assert b.outcomes == [Outcome.DISCARD]


def test_a_vote_in_doubt_does_not_count_where_somebody_is_past_the_step() -> None:
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    job.start()
    a.connects()
    a.replica.version = StateVersion(step=9, quorum_id=1, epoch="another life")
    b.votes()
    a.connects()
    back(b)
    job.passes(5.1)
    assert b.outcomes == [Outcome.DISCARD]


def test_after_a_restart_the_job_goes_back_only_when_a_holder_has_had_the_time_to_come() -> None:
    job, (a, b) = trained("a", "b", steps=3, join_timeout_s=20.0)
    job.restart()
    b.replica.version = StateVersion(step=1, quorum_id=1, epoch="e")  # left behind, it knows that step 3 was committed
    b.connects()
    restored = job.join("r")
    restored.replica.restore(2)
    they_ask(b, restored)
    job.passes(19.0)
    assert restored.formed is None
    assert any("waiting at most 20 s for a group that holds it" in words for words in restored.hears())
    a.connects()
    a.asks(can_serve=True)
    assert (a.formed.role.value, restored.formed.role.value) == ("healthy", "learner")


def test_a_decision_that_nobody_followed_takes_nothing_from_what_others_have_shown() -> None:
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    a.is_stopped = True  # what it hears comes too late
    they_vote(a, b)
    job.restart()
    a.is_stopped = False
    b.connects()
    b.dies()
    vote = a.last_vote
    a.connects()
    a.replica.decision_unknown()
    a.says(vote)  # on its way when it gave up
    a.asks()
    assert (b.step, a.step, job.lighthouse.newest_step) == (2, 1, 2)


def test_a_step_in_doubt_is_discarded_where_a_group_that_was_in_no_quorum_shows_a_later_state() -> None:
    """Seed 22433: it is overtaken, as an open step is, and was committed beside the later state of the same job."""
    job, (a, b) = in_doubt("a", "b")
    c = job.join("c")
    c.is_cut_off()
    c.replica.version = StateVersion(step=5, quorum_id=3, epoch="earlier")
    c.connects()
    back(a, b)
    assert (a.outcomes[-1], b.outcomes[-1]) == (Outcome.DISCARD, Outcome.DISCARD)
    they_ask(a, b, c, can_serve=True)
    assert c.formed is not None and c.formed.version.step == 5


def test_a_step_in_doubt_is_committed_where_a_group_that_was_in_no_quorum_shows_its_state() -> None:
    job, (a, b) = in_doubt("a", "b")
    c = job.join("c")
    c.is_cut_off()
    c.replica.version = StateVersion(step=2, quorum_id=a.formed.quorum_id, epoch=a.formed.epoch)
    c.connects()
    back(a)
    assert a.outcomes[-1] is Outcome.COMMIT, "it need not wait for the other one"
    back(b)
    assert b.outcomes[-1] is Outcome.COMMIT and (a.step, b.step) == (2, 2)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 4), st.sampled_from(["hello", "beside", "vote", "left", "settle"])),
        max_size=80,
    )
)
def test_what_is_remembered_of_those_who_come_say_something_and_go_is_bounded(
    said: list[tuple[int, int, str]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restart, "MAX_HEARD", 4)
        patch.setattr(restart, "MAX_DOUBTS", 2)
        recovery, here = restart.RestartRecovery(10.0), set[str]()
        for number, (who, step, what) in enumerate(said):
            name, now = f"x{who}:1", number / 100
            if what in ("hello", "beside"):
                here.add(name)
                size = 3 if what == "hello" else 0
                version = StateVersion(step=step, quorum_id=1, epoch="old")
                hello = Hello(
                    protocol=PROTOCOL_VERSION,
                    replica_id=name,
                    version=version,
                    last_quorum_id=1,
                    last_epoch="old",
                    last_quorum_size=size,
                    last_step=step,
                )
                recovery.left(name)
                recovery.heard(hello, now)
            elif what == "vote":
                digests = ["d" * 32] * 1000
                vote = CommitVote(quorum_id=1, epoch="old", step=step, approve=True, state_digests=digests, reason="r")
                recovery.voted(name, vote, now)
                assert not any(vote.state_digests or vote.reason for vote in recovery._doubts[1, "old", step].values())
            elif what == "left":
                here.discard(name)
                recovery.left(name)
            else:
                list(recovery.settle(now))
            recovery.validate(here)
