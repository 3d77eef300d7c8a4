"""Who is waited for between two rounds: members that are slow or were cut off for a moment, not those who were left behind."""

from __future__ import annotations

import pytest
from test_catching_up import Looker, job_in_a_phase, look

from torchft_ckpt.core.coordination.messages import CommitDecided, Outcome
from torchft_ckpt.core.coordination.quorum import Asked, decide_quorum
from torchft_ckpt.core.training.outer_schedule import OuterSchedule


def test_one_that_was_left_behind_and_asks_long_before_makes_nobody_late() -> None:
    def decide(now: float) -> bool:
        return decide_quorum(
            alive=["a", "b", "c", "stale"],
            asked={"a": Asked(at=100.0), "b": Asked(at=101.0), "stale": Asked(at=0.0)},
            last_quorum="abc",
            holders="abc",
            min_replicas=1,
            join_timeout_s=60.0,
            now=now,
        ).formed

    assert (decide(159.0), decide(160.0)) == (False, True)


def test_spectators_that_were_a_quorum_by_themselves_wait_for_one_that_is_at_work() -> None:
    verdict = decide_quorum(
        alive="ab",
        asked={"b": Asked(at=0.0, contributes=False)},
        last_quorum="b",
        holders="ab",
        min_replicas=1,
        join_timeout_s=60.0,
        now=3000.0,
    )

    assert verdict.reason == "b did not train for this step; waiting for a"


def test_a_spectator_of_a_discarded_round_holds_the_state_and_is_waited_for() -> None:
    job, (a,) = job_in_a_phase("a")
    c = look(job, "c")
    c.catches_up()
    c.asks_as(contributes=False)
    a.asks_as()
    a.votes(error="a collective failed")
    c.votes()
    assert c.hears()[-1] == "discard" and not c.replica.is_behind
    assert not asks_first(a)


def test_a_spectator_begins_no_round_with_one_that_lacks_the_state_while_who_gave_it_that_is_at_work() -> None:
    """Nobody has seen yet what its loop makes of what it was given: it is no source before that, also if it is needed as one."""
    job, (a, b) = job_in_a_phase("a", "b", least=2, join_timeout_s=1.0)
    b.dies()
    c, d = look(job, "c"), look(job, "d")
    c.catches_up()
    d.warms_up()
    c.asks_as(contributes=False)
    job.passes(10.0)
    assert c.hears()[-1] == "pending: c:1, d:1 did not train for this step; waiting for a:1"
    a.asks_as()
    assert d.formed is not None and d.formed.held
    assert [source.replica_id for source in d.formed.sources] == ["a:1"]


def asks_first(member: Looker) -> bool:
    """Whether a member that asks is told to go on at once, without the others."""
    before = member.formed
    member.asks_as()
    return member.formed is not before


def test_one_that_was_cut_off_in_its_phase_is_waited_for_when_it_is_back() -> None:
    _job, (a, b) = job_in_a_phase("a", "b")
    b.is_cut_off()
    b.connects()

    assert not asks_first(a)
    assert asks_first(b)
    assert a.formed is not None
    assert (a.formed.replica_world_size, a.formed.num_contributors) == (2, 2)


def test_one_that_does_not_come_back_is_not_waited_for() -> None:
    _job, (a, b) = job_in_a_phase("a", "b")
    b.is_cut_off()

    assert asks_first(a)


def test_one_that_comes_back_with_an_older_state_is_not_waited_for() -> None:
    job, (a, b) = job_in_a_phase("a", "b")
    b.is_cut_off()
    job.step(a)
    b.connects()

    assert asks_first(a)


def test_one_that_comes_back_after_a_round_that_it_did_not_follow_is_not_waited_for() -> None:
    _job, (a, b) = job_in_a_phase("a", "b")
    for member in (a, b):
        member.asks_as()
    b.is_cut_off()
    b.votes(error="its collectives failed")
    a.has_the_sum()
    a.votes()
    b.connects()
    b.says_again()
    assert (a.step, b.step) == (3, 2)

    assert asks_first(a)


@pytest.mark.parametrize("comes_back_first", [True, False])
def test_one_that_was_cut_off_in_the_round_and_follows_its_commit_is_waited_for(comes_back_first: bool) -> None:
    _job, (a, b) = job_in_a_phase("a", "b")
    for member in (a, b):
        member.asks_as()
    b.is_cut_off()
    b.votes()
    a.has_the_sum()
    if comes_back_first:
        b.connects()
        b.says_again()
        a.votes()
    else:
        a.votes()
        b.connects()
        b.says_again()
    assert (a.step, b.step) == (3, 3)

    assert not asks_first(a)


def test_one_that_was_cut_off_with_a_commit_that_it_takes_at_the_end_of_its_phase_is_waited_for() -> None:
    """Its group was told of the decision, and does not vote again."""
    job, (a, b) = job_in_a_phase("a", "b")
    for member in (a, b):
        member.asks_as()
    b.votes()
    b.is_stopped = True
    a.votes()
    b.is_cut_off()
    b.connects()
    assert (a.step, b.step) == (3, 2)

    assert not asks_first(a)
    b.replica.decided(
        CommitDecided(quorum_id=1, epoch=job.lighthouse.epoch, step=2, outcome=Outcome.COMMIT, broken=True)
    )
    assert asks_first(b)
    assert a.formed is not None
    assert (a.formed.replica_world_size, a.formed.num_contributors) == (2, 2)


def test_one_that_was_cut_off_in_a_round_that_is_discarded_is_waited_for() -> None:
    _job, (a, b, c) = job_in_a_phase("a", "b", "c")
    for member in (a, b, c):
        member.asks_as()
    b.is_cut_off()
    b.connects()
    c.dies()
    a.votes()

    assert not asks_first(a)


@pytest.mark.parametrize(("sync_delay", "patience_s"), [(0, 60.0), (10, 88.0), (50, 180.0)])
def test_patience_covers_a_round_and_the_time_by_which_a_slower_one_begins_it_later(
    sync_delay: int, patience_s: float
) -> None:
    assert (
        OuterSchedule(sync_every=100, sync_delay=sync_delay).patience_s(60.0 if sync_delay != 10 else 72.0)
        == patience_s
    )


def test_nobody_goes_on_without_one_that_connects_again_before_its_old_connection_is_known_to_be_broken() -> None:
    _job, (a, b) = job_in_a_phase("a", "b")
    assert not asks_first(a)
    b.connects()

    assert a.formed is not None
    assert a.formed.version.step == 1
    b.asks_as()
    assert (a.formed.version.step, a.formed.num_contributors) == (2, 2)
