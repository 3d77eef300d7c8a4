"""A manager server's ranks: when their group asks, what it decides, and who recovers from whom."""

from __future__ import annotations

import pytest

from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    GroupDecision,
    MetadataCall,
    Quorum,
    QuorumMember,
    QuorumResult,
    RankMetadata,
    RankQuorumCall,
    RankVote,
    Refused,
    Timestamp,
)
from torchft_ckpt.core.coordination.rank_calls import CallAnswer, CallQuorum, GiveUpQuorum, RankCalls, recovery_of

YES, NO = GroupDecision(should_commit=True), GroupDecision(should_commit=False)


def asks(rank: int, step: int = 3, **call: object) -> RankQuorumCall:
    return RankQuorumCall(protocol=PROTOCOL_VERSION, group_rank=rank, step=step, **call)  # type: ignore[arg-type]


def votes(rank: int, approves: bool = True, step: int = 3) -> RankVote:
    return RankVote(protocol=PROTOCOL_VERSION, group_rank=rank, step=step, should_commit=approves)


def quorum(*steps: int) -> Quorum:
    """Groups g0, g1, ... of these steps."""
    members = [
        QuorumMember(replica_id=f"g{place}", address=f"m{place}", store_address=f"s{place}", step=step)
        for place, step in enumerate(steps)
    ]
    return Quorum(quorum_id=7, participants=members, created=Timestamp(seconds=0, nanos=0))


def refusals(instructions: object) -> list[tuple[int, str]]:
    return [
        (answer.number, answer.message.reason)
        for answer in instructions  # type: ignore[attr-defined]
        if isinstance(answer, CallAnswer) and isinstance(answer.message, Refused)
    ]


def test_the_group_asks_when_all_of_its_ranks_have_and_each_gets_its_answer() -> None:
    group = RankCalls("g1", 2)
    assert list(group.called(1, asks(1, shrink_only=True))) == []
    assert list(group.called(2, asks(0, commit_failures=2))) == [
        CallQuorum(step=3, shrink_only=True, commit_failures=2)
    ]
    answers = list(group.formed(quorum(3, 3)))
    assert [(answer.number, answer.message.store_address) for answer in answers] == [(1, "s1"), (2, "s0")]  # type: ignore[union-attr]
    assert list(group.called(3, asks(0))) == []


def test_ranks_that_are_at_several_steps_are_told_so() -> None:
    group = RankCalls("g", 2)
    assert list(group.called(1, asks(0, step=3))) == []
    reason = "the ranks of g are not at one step: rank 0 step 3, rank 1 step 4"
    assert refusals(group.called(2, asks(1, step=4))) == [(1, reason), (2, reason)]


def test_a_call_that_nobody_waits_for_does_not_count() -> None:
    group = RankCalls("g", 2)
    assert list(group.called(1, asks(0))) == list(group.gave_up(1)) == list(group.called(2, asks(1))) == []
    assert len(list(group.called(3, asks(0)))) == 1
    assert list(group.gave_up(3)) == [GiveUpQuorum()]
    assert len(list(group.called(4, asks(0)))) == 1
    assert list(group.called(5, votes(0))) == list(group.gave_up(5)) == list(group.called(6, votes(1))) == []
    assert list(group.called(7, votes(0))) == [CallAnswer(6, YES), CallAnswer(7, YES)]


def test_a_rank_that_calls_again_takes_the_place_of_its_first_call() -> None:
    group = RankCalls("g", 2)
    again = "group rank 0 called again before this call was answered"
    for call in (asks(0), votes(0)):
        assert list(group.called(1, call)) == []
        assert refusals(group.called(2, call)) == [(1, again)]


def test_a_step_counts_where_all_ranks_say_so() -> None:
    group = RankCalls("g", 3)
    list(group.called(1, votes(0)))
    list(group.called(2, votes(2, approves=False)))
    assert list(group.called(3, votes(1, step=4))) == []  # of another step
    assert list(group.called(4, votes(1))) == [CallAnswer(1, NO), CallAnswer(2, NO), CallAnswer(4, NO)]
    list(group.called(5, votes(0, step=4)))
    assert list(group.called(6, votes(2, step=4))) == [CallAnswer(3, YES), CallAnswer(5, YES), CallAnswer(6, YES)]


def test_metadata_is_what_the_rank_said_last() -> None:
    group = RankCalls("g", 2)
    ask = MetadataCall(protocol=PROTOCOL_VERSION, group_rank=1)
    assert refusals(group.called(1, ask)) == [(1, "group rank 1 of g has not called for a quorum yet")]
    list(group.called(2, asks(1, checkpoint_metadata="http://there")))
    assert list(group.called(3, ask)) == [CallAnswer(3, RankMetadata(checkpoint_metadata="http://there"))]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (asks(2), "there is no group rank 2: g has 2 ranks"),
        (
            RankVote(protocol=0, group_rank=0, step=0, should_commit=True),
            f"speaks protocol {PROTOCOL_VERSION}, group rank",
        ),
    ],
)
def test_who_cannot_be_of_the_group_is_refused(call: RankVote, reason: str) -> None:
    (refusal,) = refusals(RankCalls("g", 2).called(1, call))
    assert reason in refusal[1]


def roles(steps: tuple[int, ...], rank: int, init_sync: bool = True) -> list[str]:
    """Of each group in turn: `<-2` where it recovers from group 2, `->0,1` to whom it gives."""
    views = [recovery_of(quorum(*steps), f"g{place}", rank, init_sync=init_sync) for place in range(len(steps))]
    assert all(view.recover_src_manager_address == f"m{view.recover_src_replica_rank}" for view in views if view.heal)
    return [
        f"<-{view.recover_src_replica_rank}" if view.heal else "->" + ",".join(map(str, view.recover_dst_replica_ranks))
        for view in views
    ]


@pytest.mark.parametrize(
    ("steps", "rank", "expected"),
    [
        ((3, 3), 0, ["->", "->"]),
        ((1, 3), 0, ["<-1", "->0"]),
        ((3, 1, 3, 2), 0, ["->1", "<-0", "->3", "<-2"]),
        ((3, 1, 3, 2), 1, ["->3", "<-2", "->1", "<-0"]),
        ((0, 0, 0), 0, ["->1,2", "<-0", "<-0"]),
        ((0, 0, 0), 1, ["<-1", "->0,2", "<-1"]),
    ],
)
def test_who_is_behind_recovers_from_those_who_are_not_in_turn(
    steps: tuple[int, ...], rank: int, expected: list
) -> None:
    assert roles(steps, rank) == expected


def test_equal_first_states_are_not_moved() -> None:
    assert roles((0, 0), 1, init_sync=False) == ["->", "->"]


def test_a_view_names_the_places_among_all_and_among_the_newest() -> None:
    assert recovery_of(quorum(3, 1, 3), "g2", 0, init_sync=True) == QuorumResult(
        quorum_id=7,
        replica_rank=2,
        replica_world_size=3,
        store_address="s0",
        max_step=3,
        max_replica_rank=1,
        max_world_size=2,
        heal=False,
        replica_ids=["g0", "g1", "g2"],
    )
