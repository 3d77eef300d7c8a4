"""The life of one rank's step: its table, what holds between two events, and what it must never do without the quorum's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import answers
from support.thoroughness import by_default

from torchft_ckpt.core.coordination.learning import should_follow
from torchft_ckpt.core.coordination.messages import (
    Answer,
    CommitDecided,
    Given,
    JoinerWaiting,
    Need,
    Outcome,
    QuorumBroken,
    QuorumRequest,
    Role,
    Shows,
    StateLocated,
    StateVersion,
    last_answer,
)
from torchft_ckpt.core.coordination.replica import (
    TRANSITIONS,
    ReplicaSettings,
    ReplicaState,
    StepEvent,
    StepFacts,
    StepPhase,
    StepPlan,
    StepWishes,
)

V4 = StateVersion(step=4, quorum_id=1, epoch="e")
V7 = StateVersion(step=7, quorum_id=3, epoch="e")


def replica(version: StateVersion = V4, **wants: object) -> ReplicaState:
    state = ReplicaState(ReplicaSettings(**{"min_replica_size": 1, **wants}))  # type: ignore[arg-type]
    state.version = version
    return state


def formed(
    request_id: int = 1,
    *,
    version: StateVersion = V4,
    role: Role = Role.HEALTHY,
    quorum_id: int = 5,
    names_state: bool = False,
    contributors: int = 2,
    destinations: Sequence[int] = (),
    warms_up: bool = False,
    follows: bool = False,
    held: bool = False,
    differs: bool = False,
) -> Answer:
    said = {"quorum_id": quorum_id, "num_contributors": contributors, "newest_step": version.step}
    if warms_up:
        return answers.alone(request_id, version, **said)
    if role is Role.LEARNER:
        why = Given.TO_CORRECT if differs else Given.TO_COME_IN if held else Given.TO_FOLLOW
        return answers.given(request_id, version, why if follows else Given.TO_LEARN, names_state=names_state, **said)
    return answers.formed(
        request_id, version, role=role, names_state=names_state, destinations=list(destinations), **said
    )


def test_a_view_says_what_the_state_says_and_stays_as_it_was() -> None:
    state = replica()
    begun(state)
    before = state.view()
    assert before._asdict() == {name: getattr(state, name) for name in before._fields}
    state.fail("a peer is gone")
    assert (before.error, before.can_reduce, state.view().error, state.view().can_reduce) == (
        None,
        True,
        "a peer is gone",
        False,
    )


def test_who_waits_for_a_state_has_it_captured() -> None:
    state = replica(V7)
    begun(state, version=V7)
    commit(state, 7)
    assert not state.wants_capture
    state.joiner_waits(JoinerWaiting())
    assert state.wants_capture


def test_the_first_state_gets_its_name_while_its_quorum_is_held_and_no_other_one_does() -> None:
    fresh = StateVersion(step=0)
    name = StateVersion(step=0, quorum_id=5, epoch="e")
    for request_id, step, expected in [(0, 0, name), (-1, 0, fresh), (0, 3, StateVersion(step=3))]:
        state = replica(StateVersion(step=step))
        asked = state.begin(StepWishes(), StepFacts())
        state.joiner_waits(JoinerWaiting(request_id=asked.request_id + request_id, names=name))
        assert (state.version, state.is_behind) == (expected, expected is not name)
        state.validate()


def test_who_is_given_the_first_state_is_proved_by_that_and_who_comes_in_is_on_trial() -> None:
    for names_state in (True, False):
        state = replica(StateVersion())
        plan = begun(
            state,
            version=V4,
            role=Role.LEARNER,
            follows=True,
            held=True,
            names_state=names_state,
        )
        assert plan.load and not plan.configure
        state.validate()
        state.load_finished(V4)
        state.learned()
        asked = state.begin(StepWishes(), StepFacts())
        assert (asked.version, asked.came_in, state.is_on_trial) == (V4, not names_state, not names_state)
        assert (state.shows is Shows.NOTHING) is names_state


def begun(state: ReplicaState, **wants: object) -> StepPlan:
    request = state.begin(StepWishes(), StepFacts())
    plan = state.formed(formed(request.request_id, **wants))  # type: ignore[arg-type]
    assert plan is not None
    if plan.configure:
        state.configure_finished()
    return plan


def decision(outcome: Outcome, *, step: int = 4, quorum_id: int = 5, epoch: str = "e") -> CommitDecided:
    return CommitDecided(quorum_id=quorum_id, epoch=epoch, step=step, outcome=outcome)


BROKEN = QuorumBroken(quorum_id=5, replica_id="x", lost=True, reason="x is gone")


def test_a_healthy_step_from_begin_to_commit() -> None:
    state = replica()
    phases = [state.phase]
    begun(state)
    phases.append(state.phase)
    vote = state.vote()
    phases.append(state.phase)
    outcome = state.decided(decision(Outcome.COMMIT))
    phases.append(state.phase)
    assert phases == [StepPhase.IDLE, StepPhase.TRAINING, StepPhase.VOTED, StepPhase.IDLE]
    assert (vote.approve, vote.counts, outcome) == (True, True, Outcome.COMMIT)
    assert state.version == StateVersion(step=5, quorum_id=5, epoch="e")


@pytest.mark.parametrize("outcome", [Outcome.DISCARD, Outcome.LEFT_BEHIND])
def test_no_other_outcome_moves_the_version(outcome: Outcome) -> None:
    state = replica()
    begun(state)
    state.vote()
    assert (state.decided(decision(outcome)), state.version, state.phase) == (outcome, V4, StepPhase.IDLE)


def test_the_quorum_of_an_older_request_is_ignored() -> None:
    state = replica()
    first = state.begin(StepWishes(), StepFacts())
    state.begin(StepWishes(), StepFacts())
    assert (state.formed(formed(first.request_id)), state.phase) == (None, StepPhase.ASKING)


@pytest.mark.parametrize(
    "stale",
    [
        decision(Outcome.COMMIT, step=3),
        decision(Outcome.COMMIT, quorum_id=4),
        decision(Outcome.COMMIT, epoch="other"),
    ],
)
def test_a_decision_on_another_step_changes_nothing(stale: CommitDecided) -> None:
    state = replica()
    begun(state)
    state.vote()
    assert (state.decided(stale), state.version, state.phase) == (None, V4, StepPhase.VOTED)


def test_a_decision_before_the_vote_or_after_giving_up_changes_nothing() -> None:
    state = replica()
    begun(state)
    assert state.decided(decision(Outcome.COMMIT)) is None
    state.vote()
    state.decision_unknown()
    assert (state.decided(decision(Outcome.COMMIT)), state.version) == (None, V4)
    assert state.begin(StepWishes(), StepFacts()).needs_new_quorum


def test_who_did_not_approve_does_not_commit_whatever_it_is_told() -> None:
    state = replica()
    begun(state)
    state.fail("loss is not a number")
    vote = state.vote()
    assert (vote.approve, vote.reason) == (False, "loss is not a number")
    assert (state.decided(decision(Outcome.COMMIT)), state.version) == (Outcome.LEFT_BEHIND, V4)


def test_whose_state_changed_after_its_vote_does_not_commit() -> None:
    state = replica()
    begun(state)
    state.vote()
    state.restore(2)
    assert (state.decided(decision(Outcome.COMMIT)), state.version) == (Outcome.LEFT_BEHIND, StateVersion(step=2))


def test_without_the_quorums_state_it_neither_contributes_nor_approves() -> None:
    state = replica()
    plan = begun(state, version=V7, role=Role.IDLE)
    assert (plan.load, state.healed, state.participating_rank) == (False, False, None)
    vote = state.vote()
    assert (vote.approve, vote.reason) == (False, "its state is not loaded yet")


def test_an_abandoned_step_leaves_it_healing_in_the_next() -> None:
    state = replica()
    begun(state, version=V7, role=Role.IDLE)
    request = state.begin(StepWishes(), StepFacts())
    assert (request.version, request.needs_new_quorum) == (V4, True)


def may_keep(state: ReplicaState, *, has_reduced: bool = False, is_loading: bool = False, **wishes: object) -> bool:
    asked = StepWishes(**wishes)  # type: ignore[arg-type]
    return state.keeps_step(asked, has_reduced=has_reduced, is_loading=is_loading)


def test_a_step_in_which_nothing_has_happened_may_be_kept_until_it_is_voted_on() -> None:
    state = replica()
    kept = [may_keep(state)]
    request = state.begin(StepWishes(), StepFacts())
    kept.append(may_keep(state))
    state.formed(formed(request.request_id))
    kept.append(may_keep(state))
    state.vote()
    kept.append(may_keep(state))
    state.decided(decision(Outcome.COMMIT))
    kept.append(may_keep(state))
    assert kept == [False, True, True, False, False]


@pytest.mark.parametrize("by", ["zero_grad", "a forward pass"])
@pytest.mark.parametrize("newcomers", [0, 1])
@pytest.mark.parametrize(
    ("attempts", "against"),
    [
        ("again", []),  # nothing is known of the loop yet
        ("counts, again", [1]),
        ("again counts, again", []),
        ("again counts, counts, again", [2]),
        ("counts, again, again counts", [1]),
        ("counts, again, once, again, again", [1]),
        ("counts, again, once counts, again", [1, 3]),
        ("counts, again alone, again", [2]),  # nobody came in with the attempt before
        ("counts, again fails, again", []),  # as a rule another rank was against that attempt
    ],
)
def test_a_step_that_a_loop_begins_again_now_and_then_does_not_count_if_a_group_comes_in_with_it(
    attempts: str, against: list[int], newcomers: int, by: str
) -> None:
    """It may have moved its place in the data since that group was given the state. A loop that does so in each step has not.

    One of two loops may leave out each third batch, and the other another one: they would be against in turns, for ever.
    """
    state, votes = replica(), []
    for attempt in attempts.split(", "):
        request = state.begin(StepWishes(), StepFacts())
        if "again" in attempt and by == "zero_grad":
            assert state.keeps_step(StepWishes(), has_reduced=False, is_loading=False)
        elif "again" in attempt:
            state.begins_again()
        answer = formed(request.request_id, version=state.version, contributors=3)
        num_new = 0 if "alone" in attempt else newcomers
        state.formed(msgspec.structs.replace(answer, num_proved=3 - num_new))
        if "fails" in attempt:
            state.fail("a loss that is not a number")
        votes.append(state.vote())
        outcome = Outcome.COMMIT if "counts" in attempt else Outcome.DISCARD
        state.decided(decision(outcome, step=state.version.step))
        state.took_step()
    those = [number for number, vote in enumerate(votes) if "begun this step again" in vote.reason]
    assert those == (against if newcomers else [])
    assert not any(votes[number].approve or votes[number].broken for number in those)


@pytest.mark.parametrize(
    "wishes",
    [{"allow_heal": False}, {"shrink_only": True}, {"contributes": False}, {"patience_s": 5.0}, {"waits": True}],
)
def test_a_step_that_is_asked_for_with_other_arguments_is_a_new_one(wishes: dict[str, object]) -> None:
    state = replica()
    begun(state)
    assert (may_keep(state), may_keep(state, **wishes)) == (True, False)


@pytest.mark.parametrize("wishes", [{"contributes": False}, {"waits": True}, {"waits": False}])
def test_an_outer_loop_gets_a_new_step_each_time_it_asks(wishes: dict[str, bool]) -> None:
    state = replica()
    request = state.begin(StepWishes(**wishes), StepFacts())  # type: ignore[arg-type]
    state.formed(formed(request.request_id))
    assert not may_keep(state, **wishes)


@pytest.mark.parametrize(
    "happen",
    [
        lambda state: state.fail("loss is not a number"),
        lambda state: state.collectives_failed(),
        lambda state: state.broken(BROKEN),
        lambda state: state.overtaken(decision(Outcome.COMMIT)),
        lambda state: state.restore(2),
        lambda state: state.load_torn(),
        lambda state: state.state_changed(),
        lambda state: state.locate(),
    ],
    ids=["error", "collective failed", "quorum broke", "others went on", "restored", "torn", "changed", "locate"],
)
@pytest.mark.parametrize("is_formed", [True, False])
def test_a_step_that_is_over_or_whose_state_has_changed_is_not_kept(
    happen: Callable[[ReplicaState], object], is_formed: bool, request: pytest.FixtureRequest
) -> None:
    state = replica()
    asked = state.begin(StepWishes(), StepFacts())
    if is_formed:
        state.formed(formed(asked.request_id))
    happen(state)
    is_of_the_formed = any(what in request.node.name for what in ("quorum broke", "others went on"))
    assert may_keep(state) == (is_of_the_formed and not is_formed)


@pytest.mark.parametrize(
    "happen",
    [
        lambda state: state.fail("loss is not a number"),
        lambda state: state.broken(BROKEN),
        lambda state: state.load_torn(),
        lambda state: state.state_changed(),
    ],
    ids=["error", "quorum broke", "torn", "changed"],
)
def test_a_step_that_a_forward_pass_has_begun_is_kept_by_zero_grad_whatever_has_gone_wrong(
    happen: Callable[[ReplicaState], object],
) -> None:
    """Another one would write to the weights between the forward and the backward pass."""
    state = replica()
    begun(state)
    happen(state)
    assert state.keeps_step(StepWishes(), has_reduced=False, is_loading=False, joins_open=True)


def test_a_step_with_a_collective_in_it_is_not_kept() -> None:
    state = replica()
    begun(state)
    assert not may_keep(state, has_reduced=True)


def test_a_step_is_kept_without_its_state_only_while_that_is_on_the_way() -> None:
    state = replica()
    begun(state, version=V7, role=Role.IDLE)
    assert (may_keep(state, is_loading=True), may_keep(state)) == (True, False)
    state.load_finished(V7)
    assert may_keep(state)


def test_a_torn_state_has_no_name_until_a_whole_one_is_loaded() -> None:
    state = replica()
    begun(state, version=V7, role=Role.LEARNER, follows=True, held=True)
    state.load_torn()
    state.learned()
    request = state.begin(StepWishes(), StepFacts())
    assert (request.version, request.torn, request.restored) == (StateVersion(), True, False)
    state.formed(formed(request.request_id, version=StateVersion(step=0, quorum_id=6, epoch="e"), names_state=True))
    assert (state.version.proven, state.vote().approve) == (False, False)


def test_a_first_state_gets_its_name() -> None:
    state = replica(StateVersion(step=2))
    named = StateVersion(step=2, quorum_id=5, epoch="e")
    begun(state, version=named, names_state=True)
    assert (state.version, state.healed) == (named, True)


def test_a_state_of_another_history_does_not_get_a_name_by_mistake() -> None:
    state = replica()
    begun(state, version=StateVersion(step=4, quorum_id=3, epoch="e"))
    assert (state.version, state.vote().approve) == (V4, False)


def test_a_quorum_that_breaks_fails_the_step_and_wants_a_new_process_group() -> None:
    state = replica()
    begun(state)
    assert state.broken(BROKEN)
    vote = state.vote()
    assert (vote.approve, vote.broken) == (False, True)
    state.decided(decision(Outcome.DISCARD))
    assert state.begin(StepWishes(), StepFacts()).needs_new_quorum


def test_a_quorum_that_breaks_after_the_vote_costs_no_step_and_wants_a_new_process_group() -> None:
    state = replica()
    begun(state)
    state.vote()
    assert state.broken(BROKEN), "what was issued after the vote is aborted"
    assert not state.can_reduce
    assert state.decided(decision(Outcome.COMMIT)) is Outcome.COMMIT
    assert state.begin(StepWishes(), StepFacts()).needs_new_quorum


def test_the_process_group_is_kept_while_nothing_breaks() -> None:
    state = replica()
    assert begun(state).configure
    state.vote()
    state.decided(decision(Outcome.COMMIT))
    v5 = StateVersion(step=5, quorum_id=5, epoch="e")
    assert not begun(state, version=v5).configure


def test_a_decision_without_its_vote_overtakes_one_that_sits_out() -> None:
    state = replica()
    begun(state, version=V7, role=Role.IDLE)
    state.overtaken(decision(Outcome.LEFT_BEHIND, step=7))
    assert state.error is not None and not state.vote().approve


def test_too_few_contributors_are_no_step() -> None:
    state = replica(min_replica_size=3)
    begun(state)
    assert "2 replica groups contribute, min_replica_size is 3" in state.vote().reason


def test_a_spare_contributes_nothing_and_its_vote_counts() -> None:
    state = replica(min_replica_size=1, fixed_with_spares=True)
    request = state.begin(StepWishes(), StepFacts())
    state.formed(answers.formed(request.request_id, V4, contributor_rank=1))
    assert (state.participating_rank, state.num_participants, state.vote().counts) == (None, 1, True)


def test_what_it_says_to_a_lighthouse_that_hears_of_it_for_the_first_time() -> None:
    state = replica()
    begun(state)
    hello = state.hello("a:1", 1)
    assert (hello.last_quorum_id, hello.last_epoch, hello.last_step, hello.last_outcome) == (5, "e", 4, None)
    state.vote()
    state.decided(decision(Outcome.COMMIT))
    assert state.hello("a:1", 1).last_outcome is Outcome.COMMIT


# --------------------------------------------------------------------------------- one that comes in, and what it shows


V8 = StateVersion(step=8, quorum_id=5, epoch="e")


def test_who_lacks_the_state_computes_an_iteration_alone_and_is_given_it_at_the_end_of_that() -> None:
    state = replica()
    plan = begun(state, version=V7, role=Role.LEARNER, warms_up=True)
    assert (plan.load, plan.configure, state.can_reduce, state.warms_up) == (False, False, False, True)
    assert (state.learned(), state.is_behind) == (Outcome.LEFT_BEHIND, True)
    asked = state.begin(StepWishes(), StepFacts(at_end=True))
    assert (asked.at_end, asked.waits_for_quorum) == (True, True)
    plan = state.formed(formed(asked.request_id, version=V7, role=Role.LEARNER, follows=True, held=True))
    assert plan is not None and plan.load and state.is_waited_for and not state.came_in
    state.load_finished(V7)
    state.learned()
    assert (state.came_in, state.is_behind, state.version) == (True, False, V7)
    begun(state, version=V7)
    assert state.participating_rank == 0 and not state.came_in


def test_a_rank_whose_neighbour_lacks_the_state_asks_at_the_end_of_its_iteration_although_it_holds_it() -> None:
    state = replica(V7)
    assert not begun(state, version=V7, role=Role.LEARNER, warms_up=True).load
    assert state.is_behind
    state.learned()
    assert state.is_behind


def test_who_has_received_a_state_that_nobody_waited_with_is_behind() -> None:
    state = replica()
    begun(state, version=V7, role=Role.LEARNER, follows=True)
    state.load_finished(V7)
    state.learned()
    assert (state.version, state.is_behind, state.came_in) == (V7, True, False)


@pytest.mark.parametrize("ends", [True, False])
def test_a_group_follows_only_from_the_end_of_an_iteration(ends: bool) -> None:
    """What its loop has read of the state before would go into a step otherwise."""
    asked = replica().begin(StepWishes(), StepFacts(at_end=ends, need=Need(reach_s=100.0, can_follow=True, gains=True)))
    assert should_follow(asked, usual_s=1.0) is ends


def test_nothing_is_loaded_in_a_step_whose_loop_goes_back_through_weights_as_they_were_before_it() -> None:
    assert replica().begin(StepWishes(), StepFacts()).allow_heal
    assert not replica().begin(StepWishes(), StepFacts(needs_weights=True)).allow_heal


def commit(state: ReplicaState, step: int) -> None:
    assert state.vote().approve
    assert state.decided(decision(Outcome.COMMIT, step=step)) is Outcome.COMMIT


def test_a_state_is_shown_as_the_decision_says_and_after_a_step_that_does_not_count() -> None:
    state = replica(V7)
    assert state.shows is Shows.SAMPLES  # it begins
    begun(state, version=V7)
    assert state.vote().approve
    state.decided(decision(Outcome.COMMIT, step=7))
    assert state.shows is Shows.NOTHING and not state.waits_for_quorum and not state.wants_capture
    begun(state, version=V8)
    state.vote()
    state.decided(msgspec.structs.replace(decision(Outcome.COMMIT, step=8), shows=Shows.ALL))
    assert state.shows is Shows.ALL and state.waits_for_quorum and state.wants_capture
    begun(state, version=state.version)
    state.vote()
    state.decided(decision(Outcome.DISCARD, step=9))
    assert state.shows is Shows.SAMPLES


def test_who_has_to_correct_its_state_loads_one_of_the_same_name_and_is_not_behind_afterwards() -> None:
    state = replica(V7)
    plan = begun(state, version=V7, role=Role.LEARNER, follows=True, differs=True)
    assert plan.load and not plan.configure and not state.version.proven
    state.load_finished(V7)
    assert state.follows and state.is_corrected
    state.learned()
    assert state.version == V7 and not state.is_behind


def test_an_answer_where_the_newest_state_is_that_comes_after_a_step_began_changes_nothing() -> None:
    state = replica()
    state.caught_up(V4)
    late = StateLocated(request_id=state.locate().request_id, version=V4)
    asked = state.begin(StepWishes(), StepFacts())
    state.formed(formed(asked.request_id, role=Role.LEARNER, version=V7, follows=True))
    state.located(late)
    assert state.is_behind
    state.validate()


def in_phase(phase: StepPhase) -> ReplicaState:
    state = replica()
    state.caught_up(V4)
    if phase is StepPhase.ASKING:
        state.begin(StepWishes(), StepFacts())
    elif phase is not StepPhase.IDLE:
        begun(state)
    if phase is StepPhase.VOTED:
        state.vote()
    return state


def cannot_connect(state: ReplicaState) -> None:
    """What is said of a process group that could not be made."""
    state.cannot_connect()
    state.fail("rank 2 never came")
    state.collectives_failed()


TELLS: dict[StepEvent, Callable[[ReplicaState], object]] = {
    StepEvent.BEGIN: lambda state: state.begin(StepWishes(), StepFacts()),
    StepEvent.LOCATE: lambda state: state.locate(),
    StepEvent.FORMED: lambda state: state.formed(formed(state._request_id)),
    StepEvent.CANNOT_CONNECT: cannot_connect,
    StepEvent.OVERTAKEN: lambda state: state.overtaken(decision(Outcome.LEFT_BEHIND)),
    StepEvent.BROKEN: lambda state: state.broken(BROKEN),
    StepEvent.VOTE: lambda state: state.vote(),
    StepEvent.DECIDED: lambda state: state.decided(decision(Outcome.COMMIT)),
    StepEvent.DECISION_UNKNOWN: lambda state: state.decision_unknown(),
    StepEvent.LEARNED: lambda state: state.learned(),
}


@pytest.mark.parametrize("phase", list(StepPhase), ids=lambda phase: phase.value)
@pytest.mark.parametrize("event", list(StepEvent), ids=lambda event: event.value)
def test_an_event_leads_where_the_table_says_and_changes_no_phase_where_it_is_not_in_it(
    event: StepEvent, phase: StepPhase
) -> None:
    state = in_phase(phase)
    if event is StepEvent.VOTE and (phase, event) not in TRANSITIONS:
        with pytest.raises(RuntimeError, match=f"internal error: there is no step to vote on in phase {phase.value}"):
            state.vote()
    else:
        TELLS[event](state)
    assert state.phase is TRANSITIONS.get((phase, event), phase)
    state.validate()


WORDS = (
    "begin begin formed formed formed loads votes votes decided decided takes took torn restored changed fails breaks"
    " cannot_connect overtaken unknown learned locates located catches_up goes waits"
)
STORY = st.lists(
    st.tuples(
        st.sampled_from(WORDS.split()),
        st.sampled_from(Role),
        st.sampled_from(Outcome),
        st.sampled_from([V4, V7, StateVersion(step=7, quorum_id=2, epoch="e")]),
        st.tuples(st.booleans(), st.booleans(), st.booleans()),
    ),
    min_size=10,
    max_size=60,
)


def answer(
    asked: QuorumRequest, role: Role, version: StateVersion, yes: tuple[bool, bool, bool], quorum_id: int
) -> Answer:
    """What a lighthouse may say to one that asks: a holder is one that holds the state, or whose state gets its name."""
    number = asked.request_id
    if role is Role.IDLE or yes == (True, True, True):
        return last_answer(asked, quorum_id=quorum_id, epoch="e", reason="it leaves", newest_step=asked.version.step)
    if role is Role.HEALTHY and (asked.version.proven or not asked.torn):
        names = not asked.version.proven
        held = StateVersion(step=asked.version.step, quorum_id=quorum_id, epoch="e") if names else asked.version
        return formed(number, role=role, version=held, quorum_id=quorum_id, names_state=names)
    role = Role.LEARNER if role is Role.HEALTHY else role
    follows = role is Role.LEARNER and yes[0]
    return formed(
        number,
        role=role,
        version=version,
        quorum_id=quorum_id,
        contributors=1 + yes[1],
        warms_up=role is Role.LEARNER and not follows,
        follows=follows,
        held=yes[2],
        differs=yes[1],
    )


@pytest.mark.slow
@settings(max_examples=by_default(250, thorough=2000), deadline=None)
@given(STORY)
def test_whatever_happens_to_a_step_what_its_replica_knows_agrees(
    story: list[tuple[str, Role, Outcome, StateVersion, tuple[bool, bool, bool]]],
) -> None:
    state = ReplicaState(ReplicaSettings(min_replica_size=2))
    asked, plan, quorum_id = QuorumRequest(request_id=0, version=state.version), None, 5
    for word, role, outcome, version, yes in story:
        if state.phase is StepPhase.IDLE and word in ("begin", "locates") and state.held != state.version:
            state.took_step()  # the manager sees to it before a step begins
        is_training, formed_now = state.phase is StepPhase.TRAINING, state.quorum
        match word:
            case "begin" if state.may_begin():
                wishes = StepWishes(waits=True if yes[0] else None)
                asked = state.begin(wishes, StepFacts(at_end=yes[2]))
            case "formed" if state.phase is StepPhase.ASKING or state.may_begin():
                if state.phase is not StepPhase.ASKING:
                    state.took_step()
                    asked = state.begin(StepWishes(), StepFacts(at_end=yes[2]))
                quorum_id += asked.needs_new_quorum
                plan = state.formed(answer(asked, role, version, yes, quorum_id))
                if plan is not None and plan.configure and state.error is None:
                    state.configure_finished()
            case "loads" if is_training and plan is not None and plan.load and formed_now is not None:
                state.load_finished(formed_now.version)
                plan = None
            case "votes" if is_training and not state.follows:  # who follows computes no step
                state.vote()
            case "decided" if formed_now is not None:
                told = decision(outcome, step=formed_now.version.step, quorum_id=quorum_id + all(yes))
                speaks, leaving = yes[0], yes[1] and yes[2]
                told = msgspec.structs.replace(told, speaks=speaks, leaving=leaving, all_leave=leaving, broken=yes[2])
                state.decided(told)
            case "takes":
                state.takes_step(again=yes[0])
            case "took":
                state.took_step()
            case "torn":
                state.load_torn()
            case "restored":
                state.restore(version.step)
            case "changed":
                state.state_changed()
            case "fails":
                state.fail("an error")
                if yes[0]:
                    state.collectives_failed()
            case "breaks":
                state.broken(msgspec.structs.replace(BROKEN, quorum_id=quorum_id - all(yes)))
            case "cannot_connect":
                cannot_connect(state)
            case "overtaken":
                state.overtaken(decision(outcome))
            case "unknown":
                state.decision_unknown()
            case "learned" if state.is_learner:
                state.learned()
            case "locates":
                state.locate()
            case "located":
                named = version if yes[0] else state.version
                state.located(StateLocated(request_id=state._request_id, version=named, is_held=yes[1]))
            case "catches_up" if state.phase is StepPhase.IDLE:
                state.caught_up(version)
            case "goes" if state.phase is StepPhase.IDLE or state.follows:
                state.left_between_steps()
            case "waits":
                state.joiner_waits(
                    JoinerWaiting(request_id=state._request_id, names=version if yes[0] else StateVersion())
                )
        state.validate()


EVENTS = st.lists(
    st.one_of(
        st.just("begin"),
        st.tuples(st.just("formed"), st.sampled_from(Role), st.sampled_from([V4, V7]), st.booleans()),
        st.just("torn"),
        st.tuples(st.just("loaded"), st.sampled_from([V4, V7])),
        st.just("fail"),
        st.just("broken"),
        st.just("vote"),
        st.tuples(st.just("decided"), st.sampled_from(Outcome), st.sampled_from([4, 7])),
        st.just("unknown"),
    ),
    max_size=40,
)


@settings(max_examples=by_default(150, thorough=500), deadline=None)
@given(EVENTS)
def test_whatever_happens_the_version_moves_only_with_the_state(events: list[object]) -> None:
    """`truth` is which state is really held: a name, or None where it is fresh or torn."""
    state = replica(StateVersion())
    truth: StateVersion | None = None
    is_torn = False
    for event in events:
        match event:
            case "begin":
                state.begin(StepWishes(), StepFacts())
            case ("formed", Role() as role, StateVersion() as version, bool() as names):
                if state.phase is StepPhase.ASKING and (role is not Role.HEALTHY or truth == version):
                    state.formed(formed(state._request_id, role=role, version=version, names_state=names))
            case "torn":
                state.load_torn()
                truth, is_torn = None, True
            case ("loaded", StateVersion() as version):
                state.load_finished(version)
                truth, is_torn = version, False
            case "fail":
                state.fail("an error")
            case "broken":
                state.broken(BROKEN)
            case "vote" if state.phase is StepPhase.TRAINING:
                vote = state.vote()
                assert not vote.approve or (state.quorum is not None and truth == state.quorum.version)
            case ("decided", Outcome() as outcome, int() as step):
                before = state.quorum.version if state.quorum is not None else None
                if state.decided(decision(outcome, step=step)) is Outcome.COMMIT:
                    assert truth == before
                    truth = state.version
            case "unknown":
                state.decision_unknown()
        assert state.version.proven == (truth is not None)
        assert truth is None or state.version == truth
        assert state.torn == is_torn
        if state.participating_rank is not None and state.phase is StepPhase.TRAINING:
            assert state.quorum is not None
            assert truth == state.quorum.version
