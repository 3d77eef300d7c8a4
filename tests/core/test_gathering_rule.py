"""Groups that start without a state look for one together: who is told what, and that no step or state comes of it."""

from __future__ import annotations

from lighthouse_script import Job, Member

from torchft_ckpt.core.coordination.group import (
    GroupState,
    LighthouseMessage,
    RankMessage,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.messages import QuorumFormed, QuorumRequest, Role, StateVersion
from torchft_ckpt.core.coordination.replica import ReplicaSettings, ReplicaState, StepFacts, StepPhase, StepWishes


def gathers(*members: Member) -> None:
    for member in members:
        member.formed = None
        member.says(
            member.replica.begin(
                StepWishes(allow_heal=False), StepFacts(store_address=f"store-{member.replica_id}", gathers=True)
            )
        )


def place(member: Member) -> tuple[Role, int, int, int] | None:
    """What it was told: role, rank, size, step."""
    formed = member.formed
    return (
        None if formed is None else (formed.role, formed.replica_rank, formed.replica_world_size, formed.version.step)
    )


def test_all_who_start_gather_and_nothing_gets_a_name() -> None:
    job = Job(least=2)
    a, b, c = job.join("a"), job.join("b"), job.join("c")
    gathers(b, a)
    assert place(a) is None and place(b) is None
    gathers(c)
    assert [place(member) for member in (a, b, c)] == [(Role.IDLE, rank, 3, 0) for rank in range(3)]
    assert {member.formed.store_address for member in (a, b, c) if member.formed} == {"store-a:1"}
    assert len({member.formed.quorum_id for member in (a, b, c) if member.formed}) == 1
    assert [member.replica.version for member in (a, b, c)] == [StateVersion()] * 3
    assert [member.replica.phase for member in (a, b, c)] == [StepPhase.IDLE] * 3
    assert job.lighthouse.round is None


def test_a_state_that_is_restored_after_it_is_what_the_job_goes_on_from() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    gathers(a, b)
    assert a.formed is not None
    number = a.formed.quorum_id
    a.hears(), b.hears()
    b.replica.restore(120)  # a found nothing it could read
    a.asks(), b.asks()
    assert a.hears() == [f"quorum {number + 1} step 120 healthy"]
    assert b.hears() == [f"quorum {number + 1} step 120 healthy"]
    a.votes(), b.votes()
    assert (a.hears(), b.hears(), a.step, b.step) == (["commit"], ["commit"], 121, 121)


def test_who_is_late_is_not_waited_for_beyond_the_join_timeout() -> None:
    job = Job(least=2, join_timeout_s=60.0)
    a, b, c = job.join("a"), job.join("b"), job.join("c")
    gathers(a, b)
    job.passes(59.0)
    assert place(a) is None
    job.passes(2.0)
    assert (place(a), place(b), place(c)) == ((Role.IDLE, 0, 2, 0), (Role.IDLE, 1, 2, 0), None)


def test_who_comes_after_the_others_have_a_state_is_told_so_and_costs_them_no_step() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    job.step(a, b)
    a.asks(), b.asks()
    a.hears(), b.hears()
    c = job.join("c")
    gathers(c)
    job.passes(2.0)
    assert place(c) == (Role.LEARNER, 0, 1, 1)
    assert c.replica.version == StateVersion()
    a.votes(), b.votes()
    assert (a.hears(), b.hears()) == (["commit"], ["commit"])


def test_who_comes_while_the_others_read_heals_from_what_they_restored() -> None:
    job = Job(least=3)
    a, b, c = job.join("a"), job.join("b"), job.join("c")
    gathers(a, b, c)
    c.dies()
    c = job.join("c", life=2)
    gathers(c)
    job.passes(10.0)
    assert place(c) is None  # the others may have something soon
    a.replica.restore(120)
    a.asks()
    job.passes(2.0)
    assert place(c) == (Role.LEARNER, 0, 1, 120)
    b.replica.restore(120)
    b.asks(), c.asks()
    assert [member.hears()[-1].split(" ", 2)[2] for member in (a, b, c)] == [
        "step 120 healthy",
        "step 120 healthy",
        "step 120 healthy",
    ]


def test_who_comes_after_the_others_found_nothing_looks_alone() -> None:
    job = Job(least=3)
    a, b, c = job.join("a"), job.join("b"), job.join("c")
    a.asks(), b.asks()
    gathers(c)
    job.passes(2.0)
    assert place(c) == (Role.IDLE, 0, 1, 0)


def test_who_gathers_while_others_ask_for_a_quorum_keeps_nobody_waiting_for_its_gathering() -> None:
    job = Job(least=2)
    a, b, c = job.join("a"), job.join("b"), job.join("c")
    gathers(c)
    a.asks(), b.asks()
    job.passes(2.0)
    assert place(c) == (Role.IDLE, 0, 1, 0)
    c.asks()
    assert [member.hears()[-1].split(" ", 2)[2] for member in (a, b, c)] == [
        "step 0 healthy",
        "step 0 healthy",
        "step 0 healthy",
    ]


def test_a_lighthouse_that_restarts_is_asked_again_and_gives_no_number_twice() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    gathers(a)
    job.restart()
    for member in (a, b):
        member.connects()
    gathers(a, b)
    assert (place(a), place(b)) == ((Role.IDLE, 0, 2, 0), (Role.IDLE, 1, 2, 0))
    assert a.formed is not None
    assert a.formed.epoch == job.lighthouse.epoch


def test_all_ranks_of_a_group_gather_or_none_does() -> None:
    group = GroupState(2)
    ask = QuorumRequest(request_id=7, version=StateVersion(), gathers=True)
    assert group.handle(RankMessage(0, ask)) == []
    (up,) = group.handle(RankMessage(1, ask))
    assert isinstance(up, SendToLighthouse) and isinstance(up.message, QuorumRequest) and up.message.gathers
    (up,) = group.handle(RankMessage(1, QuorumRequest(request_id=8, version=StateVersion())))
    assert isinstance(up, SendToLighthouse) and isinstance(up.message, QuorumRequest) and not up.message.gathers


def test_what_a_group_gathered_with_is_no_step_that_it_would_have_to_give_up() -> None:
    group = GroupState(1)
    group.handle(RankMessage(0, QuorumRequest(request_id=7, version=StateVersion(), gathers=True)))
    formed = QuorumFormed(
        request_id=1,
        quorum_id=5,
        epoch="e",
        version=StateVersion(),
        role=Role.IDLE,
        replica_rank=0,
        replica_world_size=2,
        contributor_rank=None,
        num_contributors=0,
        num_voters=0,
        store_address="s",
        gathers=True,
    )
    (told,) = group.handle(LighthouseMessage(formed))
    assert isinstance(told, SendToRank)
    (up,) = group.handle(RankMessage(0, QuorumRequest(request_id=8, version=StateVersion())))
    assert isinstance(up, SendToLighthouse) and isinstance(up.message, QuorumRequest)


def test_a_replica_that_gathers_keeps_what_it_knows() -> None:
    replica = ReplicaState(ReplicaSettings(min_replica_size=1))
    assert replica.capture_wanted
    replica.begin(StepWishes(allow_heal=False), StepFacts(store_address="s", gathers=True))
    assert replica.capture_wanted
    assert replica.phase is StepPhase.ASKING
