"""One group's ranks towards the lighthouse: all of them take part in a step, or none does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import answers
from support.thoroughness import by_default

from torchft_ckpt.core.coordination.group import (
    GroupInstruction,
    GroupState,
    LighthouseMessage,
    LighthouseUp,
    RankLost,
    RankMessage,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    Answer,
    CommitDecided,
    CommitUnknown,
    CommitVote,
    ConnectBeside,
    ConnectedBeside,
    GroupBroken,
    JoinerWaiting,
    JoinProgress,
    Leave,
    LeaveAt,
    LeaveWish,
    LetGo,
    LocateState,
    Outcome,
    QuorumBroken,
    QuorumRequest,
    RankHello,
    Role,
    Source,
    StateArrived,
    StateLocated,
    StateVersion,
)

PROVEN = StateVersion(step=4, quorum_id=1, epoch="e")
UNNAMED = StateVersion(step=PROVEN.step)


def request(number: int = 1, *, version: StateVersion = PROVEN, address: str = "", **wants: Any) -> QuorumRequest:
    return QuorumRequest(
        request_id=number, version=version, checkpoint_addresses=[address] if address else None, **wants
    )


def formed(request_id: int, *, role: Role = Role.HEALTHY, quorum_id: int = 2, sources: int = 1) -> Answer:
    if role is Role.LEARNER:
        source = Source(replica_id="x", replica_rank=1, checkpoint_addresses=[f"x{rank}" for rank in range(sources)])
        return answers.given(request_id, PROVEN, sources=[source], quorum_id=quorum_id)
    return answers.formed(request_id, PROVEN, role=role, quorum_id=quorum_id)


def vote(
    approve: bool = True, *, broken: bool = False, quorum_id: int = 2, step: int = 4, epoch: str = "e"
) -> CommitVote:
    return CommitVote(quorum_id=quorum_id, epoch=epoch, step=step, approve=approve, broken=broken, num_voters=2)


def decided(outcome: Outcome = Outcome.COMMIT, quorum_id: int = 2) -> CommitDecided:
    return CommitDecided(quorum_id=quorum_id, epoch="e", step=4, outcome=outcome)


GIVE_UP = CommitUnknown(quorum_id=2, epoch="e", step=4)


def up(instructions: list[GroupInstruction]) -> list[object]:
    return [i.message for i in instructions if isinstance(i, SendToLighthouse)]


def told(instructions: list[GroupInstruction]) -> list[tuple[int, str]]:
    return [
        (i.rank, i.message.outcome.value if isinstance(i.message, CommitDecided) else type(i.message).__name__)
        for i in instructions
        if isinstance(i, SendToRank)
    ]


def open_step(world_size: int = 2, role: Role = Role.HEALTHY) -> GroupState:
    """A group whose ranks have begun a step."""
    group = GroupState(world_size)
    asked: list[object] = []
    for rank in range(world_size):
        asked = up(group.handle(RankMessage(rank, request(address=f"addr{rank}"))))
    assert isinstance(asked[0], QuorumRequest)
    out = group.handle(LighthouseMessage(formed(asked[0].request_id, role=role)))
    name = "StateGiven" if role is Role.LEARNER else "QuorumFormed"
    assert told(out) == [(rank, name) for rank in range(world_size)]
    return group


def voted_step(world_size: int = 2) -> GroupState:
    group = open_step(world_size)
    for rank in range(world_size):
        group.handle(RankMessage(rank, vote()))
    return group


def test_the_group_asks_when_all_ranks_have_asked() -> None:
    group = GroupState(2)
    assert group.handle(RankMessage(1, request(7))) == []
    (asked,) = up(group.handle(RankMessage(0, request(3))))
    assert isinstance(asked, QuorumRequest)
    assert asked.version == PROVEN
    answers = {i.rank: i.message for i in group.handle(LighthouseMessage(formed(asked.request_id)))}
    assert {rank: message.request_id for rank, message in answers.items()} == {0: 3, 1: 7}


def test_what_one_rank_needs_all_get_and_what_one_rank_cannot_none_does() -> None:
    group = GroupState(2)
    group.handle(RankMessage(0, request(can_serve=True, allow_heal=True, needs_new_quorum=True)))
    (asked,) = up(group.handle(RankMessage(1, request(can_serve=False, allow_heal=False, shrink_only=True))))
    assert (asked.can_serve, asked.allow_heal, asked.needs_new_quorum, asked.shrink_only) == (False, False, True, True)


def test_ranks_that_hold_different_states_hold_none_as_a_group() -> None:
    group = GroupState(2)
    group.handle(RankMessage(0, request()))
    (asked,) = up(group.handle(RankMessage(1, request(version=StateVersion(step=3, quorum_id=1, epoch="e")))))
    assert (asked.version, asked.torn) == (StateVersion(step=3), True)


def test_each_rank_gets_the_addresses_of_all_ranks_of_the_sources() -> None:
    group = GroupState(2)
    group.handle(RankMessage(0, request()))
    (asked,) = up(group.handle(RankMessage(1, request())))
    out = group.handle(LighthouseMessage(formed(asked.request_id, role=Role.LEARNER, sources=2)))
    assert [i.message.sources[0].checkpoint_addresses for i in out] == [["x0", "x1"]] * 2


def test_addresses_are_sent_once_on_a_connection() -> None:
    group = voted_step()
    group.handle(LighthouseMessage(decided()))
    group.handle(RankMessage(0, request(2)))
    (asked,) = up(group.handle(RankMessage(1, request(2))))
    assert asked.checkpoint_addresses is None
    (again,) = up(group.handle(LighthouseUp()))
    assert again.checkpoint_addresses == ["addr0", "addr1"]


def test_the_group_approves_when_all_ranks_have() -> None:
    group = open_step()
    assert group.handle(RankMessage(1, vote())) == []
    (cast,) = up(group.handle(RankMessage(0, vote())))
    assert cast.approve


def test_one_rank_against_is_enough_and_is_named_and_the_others_stop() -> None:
    group = open_step()
    out = group.handle(RankMessage(1, msgspec.structs.replace(vote(False, broken=True), reason="timed out")))
    (cast,) = up(out)
    assert (cast.approve, cast.broken, cast.reason) == (False, True, "group rank 1: timed out")
    assert told(out) == [(0, "QuorumBroken")]


def test_what_one_rank_has_found_goes_with_the_vote_of_its_group() -> None:
    group = open_step()
    group.handle(RankMessage(0, vote()))
    (cast,) = up(group.handle(RankMessage(1, msgspec.structs.replace(vote(), reason="b computes 4 for 2 + 1"))))
    assert isinstance(cast, CommitVote) and cast.approve and cast.reason == "group rank 1: b computes 4 for 2 + 1"
    group = open_step()
    group.handle(RankMessage(0, msgspec.structs.replace(vote(), reason="b computes 4 for 2 + 1")))
    (cast,) = up(group.handle(RankMessage(1, vote())))
    assert isinstance(cast, CommitVote) and cast.reason == "group rank 0: b computes 4 for 2 + 1"


def test_votes_of_another_step_quorum_or_life_do_not_count() -> None:
    group = open_step()
    for other in (vote(step=3), vote(quorum_id=1), vote(epoch="old")):
        assert group.handle(RankMessage(0, other)) == []
    group.handle(RankMessage(1, vote()))
    assert up(group.handle(RankMessage(0, vote())))


def test_the_decision_goes_to_all_ranks_once() -> None:
    group = voted_step()
    assert told(group.handle(LighthouseMessage(decided()))) == [(0, "commit"), (1, "commit")]
    assert group.handle(LighthouseMessage(decided(Outcome.DISCARD))) == []


def test_a_rank_that_votes_late_is_told_what_was_decided() -> None:
    group = open_step(role=Role.IDLE)
    out = group.handle(LighthouseMessage(decided(Outcome.LEFT_BEHIND)))
    assert told(out) == [(0, "left_behind"), (1, "left_behind")]
    assert told(group.handle(RankMessage(1, vote()))) == [(1, "left_behind")]


def test_a_discard_releases_ranks_that_are_still_in_a_collective() -> None:
    group = open_step()
    group.handle(RankMessage(0, vote(False)))
    assert told(group.handle(LighthouseMessage(decided(Outcome.DISCARD)))) == [
        (1, "QuorumBroken"),
        (0, "discard"),
        (1, "discard"),
    ]


def test_one_rank_that_begins_anew_ends_the_step_for_all() -> None:
    group = open_step()
    group.handle(RankMessage(0, vote()))
    out = group.handle(RankMessage(1, request(2)))
    (cast,) = up(out)
    assert (cast.approve, cast.broken, cast.counts) == (False, True, True)
    assert told(out) == []  # rank 0 waits for the decision already
    assert told(group.handle(LighthouseMessage(decided(Outcome.DISCARD))))[-2:] == [(0, "discard"), (1, "discard")]


def test_one_that_sits_out_and_gives_up_says_that_its_vote_does_not_count() -> None:
    group = open_step(role=Role.IDLE)
    (cast,) = up(group.handle(RankMessage(1, request(2))))
    assert not cast.counts


def test_a_rank_that_asks_anew_before_the_answer_makes_it_a_new_question() -> None:
    group = GroupState(2)
    group.handle(RankMessage(0, request(1)))
    (first,) = up(group.handle(RankMessage(1, request(1))))
    (second,) = up(group.handle(RankMessage(0, request(2))))
    assert second.request_id > first.request_id
    assert group.handle(LighthouseMessage(formed(first.request_id))) == []
    out = group.handle(LighthouseMessage(formed(second.request_id)))
    assert [(i.rank, i.message.request_id) for i in out] == [(0, 2), (1, 1)]


def test_a_rank_that_does_not_want_to_wait_takes_all_with_it_and_a_later_decision_reaches_none() -> None:
    group = voted_step()
    assert told(group.handle(RankMessage(1, GIVE_UP))) == [(0, "CommitUnknown"), (1, "CommitUnknown")]
    assert group.handle(LighthouseMessage(decided())) == []
    assert group.handle(LighthouseUp()) == []


def test_a_rank_that_gives_up_too_late_is_told_the_decision() -> None:
    group = voted_step()
    group.handle(LighthouseMessage(decided()))
    assert told(group.handle(RankMessage(1, GIVE_UP))) == [(1, "commit")]


def test_a_rank_that_gives_up_while_another_has_not_voted_ends_the_step() -> None:
    group = open_step()
    group.handle(RankMessage(1, vote()))
    out = group.handle(RankMessage(1, GIVE_UP))
    assert [message.approve for message in up(out)] == [False]
    assert (1, "CommitUnknown") in told(out)


def test_a_rank_that_begins_anew_without_waiting_keeps_the_others_from_committing() -> None:
    group = voted_step()
    assert told(group.handle(RankMessage(0, request(2)))) == [(1, "CommitUnknown")]
    assert group.handle(LighthouseMessage(decided())) == []


def test_what_was_asked_is_said_again_on_a_new_connection() -> None:
    group = GroupState(1)
    (asked,) = up(group.handle(RankMessage(0, request())))
    (again,) = up(group.handle(LighthouseUp()))
    assert (again.request_id, again.version) == (asked.request_id, asked.version)


def test_a_vote_in_doubt_is_said_again_and_a_decided_one_is_not() -> None:
    group = voted_step()
    assert up(group.handle(LighthouseUp())) == [vote()]
    group.handle(LighthouseMessage(decided()))
    assert group.handle(LighthouseUp()) == []


def test_a_rank_that_is_gone_takes_the_group_with_it() -> None:
    group = voted_step(3)
    out = group.handle(RankLost(2, "its connection closed"))
    assert up(out) == [Leave("group rank 2 is gone: its connection closed")]
    assert told(out) == [(rank, "GroupBroken") for rank in range(3)]
    assert group.handle(LighthouseMessage(decided())) == []
    assert told(group.handle(RankMessage(0, request(9)))) == [(0, "GroupBroken")]


def test_ranks_that_are_not_of_this_group_are_refused_by_name() -> None:
    group = GroupState(2)
    assert group.refusal(1, RankHello(protocol=PROTOCOL_VERSION, group_rank=1)) is None
    wrong_rank, wrong_version = (
        group.refusal(2, RankHello(protocol=PROTOCOL_VERSION, group_rank=2)),
        group.refusal(1, RankHello(protocol=99, group_rank=1)),
    )
    assert (wrong_rank.code, wrong_version.code) == ("config", "version")


RANK_MESSAGES = st.one_of(
    st.builds(request, st.integers(1, 3)),
    st.builds(vote, st.booleans(), broken=st.booleans(), quorum_id=st.integers(1, 3)),
    st.just(GIVE_UP),
)
EVENTS = st.one_of(
    st.builds(RankMessage, st.integers(0, 2), RANK_MESSAGES),
    st.builds(LighthouseMessage, st.builds(formed, st.integers(1, 4), quorum_id=st.integers(1, 3))),
    st.builds(LighthouseMessage, st.builds(decided, st.sampled_from(Outcome), st.integers(1, 3))),
    st.just(LighthouseMessage(QuorumBroken(quorum_id=2, replica_id="x", lost=True, reason=""))),
    st.just(LighthouseUp()),
)


@settings(max_examples=by_default(100, thorough=400), deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_whatever_comes_no_two_ranks_are_told_different_outcomes_and_no_one_commits_what_not_all_approved(
    events: list[RankMessage | LighthouseMessage | LighthouseUp],
) -> None:
    group = GroupState(3)
    outcomes: dict[tuple[int, str, int], set[str]] = {}
    approvals: set[int] = set()
    for event in events:
        if isinstance(event, RankMessage) and isinstance(event.message, CommitVote) and event.message.approve:
            approvals.add(event.rank)
        for instruction in group.handle(event):
            message = instruction.message
            if isinstance(message, Answer):
                outcomes.pop((message.quorum_id, message.epoch, 4), None)
            elif isinstance(message, CommitDecided | CommitUnknown) and isinstance(instruction, SendToRank):
                word = message.outcome.value if isinstance(message, CommitDecided) else "unknown"
                key = (message.quorum_id, message.epoch, message.step)
                if group._quorum is not None and key[0] == group._quorum.quorum_id:
                    outcomes.setdefault(key, set()).add(word)
                    assert len({w for w in outcomes[key] if w != "unknown"}) <= 1
                    assert not {"commit", "unknown"} <= outcomes[key]
            elif isinstance(message, CommitVote) and isinstance(instruction, SendToLighthouse) and message.approve:
                assert approvals == {0, 1, 2}


def test_a_group_that_is_broken_says_so_to_every_rank_that_speaks() -> None:
    group = GroupState(2)
    group.handle(RankMessage(1, Leave("done")))
    assert [type(i.message) for i in group.handle(RankMessage(0, vote()))] == [GroupBroken]


# ------------------------------------------------------------------------------------------- ranks load at one place


def loading(instructions: list[GroupInstruction]) -> list[tuple[int, str]]:
    """Which ranks are told to load (""), or why not."""
    return [
        (i.rank, i.message.failure)
        for i in instructions
        if isinstance(i, SendToRank) and isinstance(i.message, StateArrived)
    ]


def arrived(failure: str = "", request_id: int = 1) -> StateArrived:
    return StateArrived(request_id=request_id, failure=failure)


def test_ranks_load_a_state_when_all_of_them_have_fetched_it() -> None:
    group = open_step(role=Role.LEARNER)
    assert loading(group.handle(RankMessage(1, arrived()))) == []
    assert loading(group.handle(RankMessage(0, arrived()))) == [(0, ""), (1, "")]


def came_in_again(rank: int, *, loads: bool = False, failure: str = "") -> RankMessage:
    return RankMessage(rank, StateArrived(request_id=1, loads=loads, failure=failure, again=True))


def test_ranks_that_have_loaded_a_state_load_it_again_where_one_of_them_has_changed_it() -> None:
    group = open_step(role=Role.LEARNER)
    for rank in (0, 1):
        group.handle(RankMessage(rank, arrived()))
    for moved in (True, False):
        assert group.handle(came_in_again(1, loads=moved)) == []
        told = [i.message for i in group.handle(came_in_again(0)) if isinstance(i, SendToRank)]
        assert [(m.failure, m.loads) for m in told if isinstance(m, StateArrived)] == [("", moved)] * 2


def test_no_rank_loads_again_where_one_cannot_or_has_asked_for_the_next_step() -> None:
    group = open_step(role=Role.LEARNER)
    for rank in (0, 1):
        group.handle(RankMessage(rank, arrived()))
    why = "group rank 1: it has written to it"
    assert loading(group.handle(came_in_again(1, failure="it has written to it"))) == [
        (0, why),
        (1, why),
    ]
    ((rank, failure),) = loading(group.handle(came_in_again(0, loads=True)))
    assert rank == 0 and failure, "it is answered, though it came late"

    group = open_step(role=Role.LEARNER)
    for rank in (0, 1):
        group.handle(RankMessage(rank, arrived()))
    group.handle(RankMessage(1, request(2)))
    ((rank, failure),) = loading(group.handle(came_in_again(0, loads=True)))
    assert rank == 0 and "asks for the next step already" in failure


@pytest.mark.parametrize("loads", [(False, False), (True, False), (False, True)])
def test_where_one_rank_came_to_another_state_than_the_source_all_load_that(loads: tuple[bool, bool]) -> None:
    group = open_step(role=Role.LEARNER)
    group.handle(RankMessage(0, StateArrived(request_id=1, loads=loads[0])))
    told = group.handle(RankMessage(1, StateArrived(request_id=1, loads=loads[1])))
    messages = [i.message for i in told if isinstance(i, SendToRank)]
    assert [message.loads for message in messages if isinstance(message, StateArrived)] == [any(loads)] * 2


def test_where_one_rank_does_not_get_the_state_none_loads_it() -> None:
    group = open_step(role=Role.LEARNER)
    group.handle(RankMessage(0, arrived()))
    reason = "group rank 1: the source is gone"
    assert loading(group.handle(RankMessage(1, arrived("the source is gone")))) == [
        (0, reason),
        (1, reason),
    ]


def test_where_one_rank_begins_anew_the_others_wait_for_its_state_no_longer() -> None:
    group = open_step(role=Role.LEARNER)
    group.handle(RankMessage(0, arrived()))
    reason = "group rank 1 gave the step up"
    assert (0, reason) in loading(group.handle(RankMessage(1, request(2))))


def test_what_was_fetched_for_a_step_that_is_over_counts_for_nothing() -> None:
    group = open_step(role=Role.LEARNER)
    group.handle(RankMessage(0, arrived()))
    for rank in range(2):
        asked = up(group.handle(RankMessage(rank, request(2))))
    assert isinstance(asked[-1], QuorumRequest)
    group.handle(LighthouseMessage(formed(asked[-1].request_id, role=Role.LEARNER)))
    assert group.handle(RankMessage(1, arrived(request_id=1))) == []
    group.handle(RankMessage(1, arrived(request_id=2)))
    assert len(loading(group.handle(RankMessage(0, arrived(request_id=2))))) == 2


def test_a_group_that_has_finished_says_so_again_to_a_lighthouse_that_forgot() -> None:
    group = GroupState(1)
    finished = LocateState(request_id=4, version=StateVersion(), has_finished=True)
    (asked,) = up(group.handle(RankMessage(0, finished)))
    assert isinstance(asked, LocateState) and asked.has_finished
    group.handle(LighthouseMessage(StateLocated(request_id=asked.request_id)))
    assert up(group.handle(LighthouseUp())) == [asked]
    group.handle(RankMessage(0, request()))
    assert not any(isinstance(said, LocateState) for said in up(group.handle(LighthouseUp())))


def leaving_group(world_size: int = 2) -> GroupState:
    """A group that was told to leave with the decision on its step."""
    group = voted_step(world_size)
    group.handle(RankMessage(1, LeaveWish(reason="SIGTERM")))
    out = group.handle(LighthouseMessage(msgspec.structs.replace(decided(), leaving=True)))
    assert all(i.message.leaving for i in out if isinstance(i, SendToRank) and isinstance(i.message, CommitDecided))
    return group


def test_the_wish_of_one_rank_to_leave_is_the_groups_and_is_said_once() -> None:
    group = open_step()
    assert up(group.handle(RankMessage(1, LeaveWish(reason="SIGTERM")))) == [LeaveWish(reason="group rank 1: SIGTERM")]
    assert group.handle(RankMessage(0, LeaveWish(reason="SIGTERM"))) == []


def test_a_group_that_leaves_has_left_when_all_of_its_ranks_have() -> None:
    group = leaving_group()
    assert group.handle(RankMessage(0, Leave("SIGTERM", as_wished=True))) == []
    out = group.handle(RankMessage(1, Leave("SIGTERM", as_wished=True)))
    assert up(out) == [Leave("it left: group rank 1: SIGTERM")]
    assert [i.message.has_left for i in out if isinstance(i, SendToRank) and isinstance(i.message, GroupBroken)] == [
        True
    ] * 2


def test_a_rank_that_dies_while_its_group_leaves_takes_nobody_with_it() -> None:
    group = leaving_group()
    assert group.handle(RankLost(1, "its connection closed")) == []
    assert up(group.handle(RankMessage(0, Leave()))) == [Leave("it left: group rank 1: SIGTERM")]


def test_a_rank_whose_time_to_leave_is_over_takes_its_group_with_it() -> None:
    group = open_step()
    group.handle(RankMessage(0, LeaveWish(reason="SIGTERM")))
    out = group.handle(RankMessage(0, Leave("it goes as it is", as_wished=True)))
    assert up(out) == [Leave("group rank 0 left: it goes as it is")]
    assert [i.message for i in out if isinstance(i, SendToRank)] == [
        GroupBroken("group rank 0 left: it goes as it is", has_left=True)
    ] * 2


def test_a_rank_that_is_gone_before_its_group_is_told_to_leave_breaks_it() -> None:
    group = open_step()
    group.handle(RankMessage(0, LeaveWish(reason="SIGTERM")))
    out = group.handle(RankLost(1, "its connection closed"))
    reason = "group rank 1 is gone: its connection closed"
    assert [i.message for i in out if isinstance(i, SendToRank)] == [GroupBroken(reason)] * 2


def test_a_wish_is_said_again_to_a_new_lighthouse_before_the_vote_and_with_what_was_told() -> None:
    group = voted_step()
    group.handle(RankMessage(0, LeaveWish(reason="SIGTERM")))
    wish, vote_again = up(group.handle(LighthouseUp()))
    assert wish == LeaveWish(reason="group rank 0: SIGTERM")
    assert isinstance(vote_again, CommitVote)
    assert up(leaving_group().handle(LighthouseUp())) == [LeaveWish(is_told=True, reason="group rank 1: SIGTERM")]


def test_a_rank_that_asks_for_a_step_of_a_group_that_leaves_gets_one_for_itself_alone() -> None:
    [answer] = leaving_group().handle(RankMessage(1, request(7)))
    assert isinstance(answer, SendToRank)
    assert isinstance(answer.message, Answer)
    assert (answer.rank, answer.message.request_id, answer.message.leaving) == (1, 7, True)
    assert answer.message.role is Role.LEARNER


def test_a_group_that_the_operator_has_leave_says_so_to_a_new_lighthouse() -> None:
    group = voted_step()
    group.handle(LighthouseMessage(msgspec.structs.replace(decided(), leaving=True)))
    assert up(group.handle(LighthouseUp())) == [LeaveWish(is_told=True, reason="it was asked to leave")]


@pytest.mark.parametrize(
    ("of_ranks", "of_group"),
    [([[4], [4]], [4]), ([[4], [6]], [4, 6]), ([[3, 9], [9]], [9]), ([[], [0]], [0]), ([[], []], [])],
)
def test_a_group_says_what_each_rank_issued_or_one_number_for_all(
    of_ranks: list[list[int]], of_group: list[int]
) -> None:
    asking, leaving = GroupState(2), voted_step()
    leaving.handle(LighthouseMessage(msgspec.structs.replace(decided(), leaving=True)))
    said: list[object] = []
    for rank, issued in enumerate(of_ranks):
        said += up(asking.handle(RankMessage(rank, request(issued=issued))))
        said += up(leaving.handle(RankMessage(rank, LeaveWish(is_told=True, issued=issued))))
    assert [message.issued for message in said if isinstance(message, QuorumRequest | LeaveWish)] == [of_group] * 2


def test_a_wish_of_the_operator_is_the_groups_own_from_then_on() -> None:
    """A lighthouse that restarts before the step ends has forgotten it."""
    group = voted_step()
    wish = LeaveWish(reason="the operator asked for it")
    assert group.handle(LighthouseMessage(wish)) == []
    assert wish in up(group.handle(LighthouseUp()))


def test_ranks_that_leave_between_two_steps_do_so_at_the_last_call_that_one_of_them_may_have_come_to() -> None:
    group = voted_step()
    group.handle(LighthouseMessage(decided()))
    group.handle(RankMessage(0, LeaveWish(reason="SIGTERM")))
    assert told(group.handle(LighthouseMessage(LetGo(reason="SIGTERM")))) == [(0, "LetGo"), (1, "LetGo")]
    assert group.handle(RankMessage(1, LeaveAt(call=18))) == []
    out = group.handle(RankMessage(0, LeaveAt(call=17)))
    assert out == [SendToRank(0, LeaveAt(call=18)), SendToRank(1, LeaveAt(call=18))]
    assert group.handle(RankMessage(0, Leave(as_wished=True))) == [], "the other one saves still"


def test_a_group_that_was_let_go_and_takes_its_question_back_answers_the_ranks_that_have_asked() -> None:
    """One of its ranks asks where the newest state is instead: no other step begins, and the others would wait for it."""
    group = GroupState(2)
    for rank in (0, 1):
        group.handle(RankMessage(rank, request()))
    group.handle(LighthouseMessage(LetGo(reason="SIGTERM")))
    out = group.handle(RankMessage(1, LocateState(request_id=2, version=PROVEN)))
    assert told(out) == [(1, "StateLocated"), (0, "StepAlone")]
    group.validate()


def says(group: GroupState, rank: int, reach_s: float) -> list[float]:
    """Return what the lighthouse hears when a rank says how long it still needs."""
    sent = up(group.handle(RankMessage(rank, JoinProgress(quorum_id=2, step=4, reach_s=reach_s))))
    return [message.reach_s for message in sent if isinstance(message, JoinProgress)]


def test_a_rank_that_is_silent_while_it_receives_is_not_hidden_by_one_that_speaks() -> None:
    group = open_step(role=Role.LEARNER)
    assert says(group, 0, 30.0) == [30.0]
    assert says(group, 1, 9.0) == [30.0]  # the group needs as long as its slowest rank
    assert says(group, 0, 29.7) == [29.7]
    assert says(group, 1, 8.7) == [29.7]
    # Rank 0 is held up from here on. What it said last would count as new each time.
    assert [says(group, 1, reach_s) for reach_s in (8.5, 8.2, 0.0)] == [[], [], []]
    assert says(group, 0, 25.0) == [25.0]
    assert says(group, 0, 0.0) == [0.0]  # all of it is there at all ranks


def test_of_four_ranks_of_which_one_never_gets_its_part_none_loads_and_nothing_hides_that() -> None:
    group = open_step(4, role=Role.LEARNER)
    assert [says(group, rank, 1.0) for rank in range(3)] == [[1.0]] * 3
    for rank in range(3):
        says(group, rank, 0.0)
        assert loading(group.handle(RankMessage(rank, arrived()))) == []
    assert [says(group, rank, 0.0) for rank in range(3)] == [[]] * 3, "who waits for it counts how long it is silent"
    reason = "group rank 0 gave the step up"  # it has waited for as long as it wanted to
    assert loading(group.handle(RankMessage(0, request(2)))) == [(rank, reason) for rank in range(4)]
    asked = [up(group.handle(RankMessage(rank, request(2)))) for rank in (1, 2, 3)]
    assert asked[:2] == [[], []] and isinstance(asked[2][0], QuorumRequest)


def test_what_its_ranks_say_they_have_received_is_summed_up_to_what_the_lighthouse_takes() -> None:
    group, most = open_step(role=Role.LEARNER), 2**53 - 1
    progress = JoinProgress(quorum_id=2, step=4, reach_s=1.0, done_bytes=most, total_bytes=most)
    (said,) = up([done for rank in range(2) for done in group.handle(RankMessage(rank, progress))])[-1:]
    assert isinstance(said, JoinProgress) and (said.done_bytes, said.total_bytes) == (most, most)


@pytest.mark.parametrize("restored", [False, True])
def test_a_rank_that_asks_anew_while_the_name_of_its_state_is_on_the_way_gets_the_name_again(restored: bool) -> None:
    group, unnamed = GroupState(2), StateVersion(step=4)
    for rank in (0, 1):
        sent = up(group.handle(RankMessage(rank, request(version=unnamed, restored=restored))))
    (asked,) = sent
    assert isinstance(asked, QuorumRequest) and not asked.torn
    group.handle(LighthouseMessage(JoinerWaiting(request_id=asked.request_id, names=PROVEN)))
    out = group.handle(RankMessage(1, request(2, version=unnamed, restored=restored)))
    assert [i.message for i in out if isinstance(i, SendToRank)] == [JoinerWaiting(request_id=2, names=PROVEN)]
    (again,) = up(out)
    assert isinstance(again, QuorumRequest) and (again.version, again.torn, again.restored) == (PROVEN, False, False)
    group.validate()


@pytest.mark.parametrize("versions", [(UNNAMED, StateVersion()), (UNNAMED, PROVEN), (StateVersion(), StateVersion())])
def test_a_state_that_not_all_ranks_hold_gets_no_name(versions: tuple[StateVersion, StateVersion]) -> None:
    """The ranks would not have taken it, and the group said that they hold it."""
    group = GroupState(2)
    for rank, version in enumerate(versions):
        sent = up(group.handle(RankMessage(rank, request(version=version))))
    (asked,) = sent
    assert isinstance(asked, QuorumRequest)
    assert group.handle(LighthouseMessage(JoinerWaiting(request_id=asked.request_id, names=PROVEN))) == []
    group.validate()


@pytest.mark.parametrize("other", ["torn", "of another step", "restored meanwhile"])
def test_a_rank_that_asks_anew_with_another_state_than_the_one_that_was_named_does_not_get_that_name(
    other: str,
) -> None:
    group, unnamed = GroupState(2), StateVersion(step=4)
    for rank in (0, 1):
        (asked,) = up(group.handle(RankMessage(rank, request(version=unnamed)))) or [None]
    assert isinstance(asked, QuorumRequest)
    group.handle(LighthouseMessage(JoinerWaiting(request_id=asked.request_id, names=PROVEN)))
    version = StateVersion() if other == "of another step" else unnamed
    anew = request(2, version=version, torn=other == "torn", restored=other == "restored meanwhile")
    (again,) = up(group.handle(RankMessage(1, anew)))
    assert isinstance(again, QuorumRequest) and again.torn


def test_ranks_that_have_the_state_wait_with_their_step_for_one_that_asks_for_it_once_more() -> None:
    """It could not load that: so the group is in no quorum before all of its ranks begin the same iteration, as they like it."""
    group = GroupState(2)
    group.handle(RankMessage(0, request(allow_heal=False)))
    (asked,) = up(group.handle(RankMessage(1, request(version=StateVersion(), torn=True, at_end=True))))
    assert isinstance(asked, QuorumRequest)
    assert (asked.at_end, asked.warms_up, asked.allow_heal) == (False, True, True)
    alone = answers.alone(asked.request_id, PROVEN)
    assert told(group.handle(LighthouseMessage(alone))) == [(1, "StepAlone")]
    (asked,) = up(group.handle(RankMessage(1, request(2, version=StateVersion(), torn=True))))
    assert isinstance(asked, QuorumRequest) and not (asked.warms_up or asked.allow_heal)


def told_to_connect(group: GroupState, place: str) -> list[GroupInstruction]:
    connect = ConnectBeside(place=place, replica_rank=0, replica_world_size=2, store_address="a:1")
    return group.handle(LighthouseMessage(connect))


def test_a_group_is_connected_beside_the_quorum_when_all_of_its_ranks_are() -> None:
    group = GroupState(2)
    assert [(i.rank, type(i.message)) for i in told_to_connect(group, "p1") if isinstance(i, SendToRank)] == [
        (0, ConnectBeside),
        (1, ConnectBeside),
    ]
    answer = ConnectedBeside(place="p1")
    assert group.handle(RankMessage(1, answer)) == [] and group.handle(RankMessage(1, answer)) == []
    assert group.handle(RankMessage(0, answer)) == [SendToLighthouse(answer)]
    assert group.handle(RankMessage(0, answer)) == [], "it has answered"


def test_one_rank_that_cannot_be_connected_is_enough_against_it_and_answers_of_an_earlier_place_count_for_nothing() -> (
    None
):
    group = GroupState(2)
    told_to_connect(group, "p1")
    group.handle(RankMessage(0, ConnectedBeside(place="p1")))
    told_to_connect(group, "p2")
    assert group.handle(RankMessage(1, ConnectedBeside(place="p1"))) == []
    failed = group.handle(RankMessage(1, ConnectedBeside(place="p2", failure="no route")))
    assert failed == [SendToLighthouse(ConnectedBeside(place="p2", failure="group rank 1: no route"))]
    assert group.handle(RankMessage(0, ConnectedBeside(place="p2"))) == []


def test_ranks_wait_with_their_turn_for_one_that_has_made_fewer() -> None:
    """It asked anew as the answer came, and left an iteration out. Else it would stay at another network for ever."""
    group = GroupState(2)
    group.handle(RankMessage(0, request(kinds=["0", "1"])))
    for number, ending in enumerate((False, True), 1):
        last = request(number, kinds=["0", "1"] if ending else ["0"], at_end=ending)
        (asked,) = up(group.handle(RankMessage(1, last)))
        assert isinstance(asked, QuorumRequest) and asked.warms_up and not asked.at_end
        alone = answers.alone(asked.request_id, PROVEN)
        assert told(group.handle(LighthouseMessage(alone))) == [(1, "StepAlone")]
    (asked,) = up(group.handle(RankMessage(1, request(3, kinds=["0", "1"]))))
    assert isinstance(asked, QuorumRequest) and not asked.warms_up


@pytest.mark.parametrize(
    ("kinds", "others"),
    [("0", "00000"), ("0" * 20, "01" * 10), ("011", "01" * 10), ("0", "01" * 16)],
    ids=["the same", "one optimizer", "another order", "one optimizer, said once for all its turns"],
)
def test_ranks_do_not_wait_for_one_whose_loop_goes_another_way(kinds: str, others: str) -> None:
    """A rank of another part of a model may own one optimizer alone: it will never be where the others are."""
    group = GroupState(2)
    group.handle(RankMessage(0, request(kinds=[*others])))
    (asked,) = up(group.handle(RankMessage(1, request(kinds=[*kinds]))))
    assert isinstance(asked, QuorumRequest) and not asked.warms_up


def test_ranks_do_not_wait_for_ever_for_one_that_makes_turn_after_turn_and_does_not_come_to_where_they_are() -> None:
    """It owns the one network of two that is trained many times in a row."""
    group = GroupState(2)
    group.handle(RankMessage(0, request(kinds=["0"] * 20 + ["1"])))
    for number in range(1, 30):
        (asked,) = up(group.handle(RankMessage(1, request(number, kinds=["0"] * 20))))
        assert isinstance(asked, QuorumRequest)
        if not asked.warms_up:
            break
        alone = answers.alone(asked.request_id, PROVEN)
        assert told(group.handle(LighthouseMessage(alone))) == [(1, "StepAlone")]
    assert number == 17
    assert told(group.handle(LighthouseMessage(formed(asked.request_id)))) == [(0, "QuorumFormed"), (1, "QuorumFormed")]


def test_a_group_has_computed_as_long_as_its_slowest_rank_and_came_to_collectives_with_its_last() -> None:
    group = open_step()
    spent = [{"computed_s": 1.0, "reduced_s": 0.25}, {"computed_s": 0.5, "reduced_s": 0.75}]
    (voted,) = [
        message
        for rank, times in enumerate(spent)
        for message in up(group.handle(RankMessage(rank, msgspec.structs.replace(vote(), **times))))
    ]
    assert isinstance(voted, CommitVote) and (voted.computed_s, voted.reduced_s) == (1.0, 0.25)
