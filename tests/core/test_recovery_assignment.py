"""From which state a quorum trains, and who lacks it: a scenario for each rule, and what holds for all inputs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.thoroughness import by_default

from torchft_ckpt.core.coordination.messages import Role, StateVersion
from torchft_ckpt.core.coordination.recovery import Assignment, Holder, StepLost, assign_recovery

HEALTHY, IDLE = Role.HEALTHY, Role.IDLE


def at(step: int, quorum_id: int = 0) -> StateVersion:
    return StateVersion(step=step, quorum_id=quorum_id, epoch="e" if quorum_id else "")


def holder(name: str, step: int, quorum_id: int = 0, **wants: bool) -> Holder:
    return Holder(replica_id=name, version=at(step, quorum_id), **wants)


def assign(
    *members: Holder, newest: int = 0, allow: bool = False, first: StateVersion | None = None
) -> Assignment | StepLost:
    return assign_recovery(members, newest_step=newest, allow_step_loss=allow, quorum_id=9, epoch="e", first=first)


def formed(*members: Holder, newest: int = 0, allow: bool = False) -> Assignment:
    result = assign(*members, newest=newest, allow=allow)
    assert isinstance(result, Assignment)
    return result


def roles(assignment: Assignment) -> dict[str, Role]:
    """Of those that are in the quorum: who lacks its state is not."""
    return {part.replica_id: part.role for part in assignment.parts if part.replica_id not in assignment.lacking}


# ---------------------------------------------------------------------------------------------------- rule by rule


def test_1_the_newest_proven_state_wins_and_all_others_lack_it() -> None:
    result = formed(holder("a", 7, 3), holder("b", 6, 3), holder("c", 0), newest=7)
    assert (result.version, roles(result), result.lacking) == (at(7, 3), {"a": HEALTHY}, ("b", "c"))


def test_1_of_one_step_the_later_quorums_state_wins_and_the_other_lacks_it() -> None:
    result = formed(holder("a", 7, 3), holder("b", 7, 4), newest=7)
    assert (result.version, roles(result), result.lacking) == (at(7, 4), {"b": HEALTHY}, ("a",))


def test_1_a_proven_state_wins_over_a_restored_one_of_a_higher_step() -> None:
    result = formed(holder("a", 7, 3), holder("b", 50, restored=True), newest=7)
    assert (result.version, result.lacking) == (at(7, 3), ("b",))


def test_1_fresh_weights_that_a_quorum_has_named_lose_against_a_restored_state() -> None:
    result = formed(holder("a", 0, 3), holder("b", 5, restored=True), holder("c", 0, 3))
    assert (result.version, roles(result), result.lacking) == (at(5, 9), {"b": HEALTHY}, ("a", "c"))


def test_1_and_not_against_a_restored_state_of_step_0() -> None:
    result = formed(holder("a", 0, 3), holder("b", 0, restored=True))
    assert (result.version, roles(result), result.lacking) == (at(0, 3), {"a": HEALTHY}, ("b",))


def test_2_below_the_newest_committed_step_there_is_no_quorum() -> None:
    assert assign(holder("a", 6, 3), newest=7) == StepLost(newest_step=7, best_step=6)


def test_2_nor_with_fresh_weights() -> None:
    assert assign(holder("a", 0), newest=7) == StepLost(newest_step=7, best_step=0)


def test_2_a_state_restored_on_purpose_may_be_trained_from() -> None:
    result = formed(holder("a", 6, 3), holder("b", 4, restored=True), newest=7)
    assert (result.version, roles(result), result.lacking) == (at(4, 9), {"b": HEALTHY}, ("a",))
    assert result.is_first


def test_2_of_restored_states_the_highest_step_is_taken() -> None:
    result = formed(holder("a", 4, restored=True), holder("b", 5, restored=True), newest=7)
    assert (result.version, roles(result), result.lacking) == (at(5, 9), {"b": HEALTHY}, ("a",))


def test_2_the_operators_word_lets_the_best_proven_state_go_on() -> None:
    result = formed(holder("a", 6, 3), holder("b", 0), newest=7, allow=True)
    assert (result.version, roles(result), result.lacking) == (at(6, 3), {"a": HEALTHY}, ("b",))


def test_2_the_operators_word_loses_no_more_than_it_must() -> None:
    proven = formed(holder("a", 6, 3), holder("b", 4, restored=True), newest=7, allow=True)
    restored = formed(holder("a", 6, 3), holder("b", 7, restored=True), newest=9, allow=True)
    assert (proven.version, restored.version) == (at(6, 3), at(7, 9))


def test_2_the_operators_word_lets_fresh_weights_go_on() -> None:
    assert formed(holder("a", 0), newest=7, allow=True).version == at(0, 9)


def test_3_the_first_state_is_the_first_members_and_all_others_lack_it() -> None:
    result = formed(holder("a", 0), holder("b", 0), holder("c", 0))
    assert (result.version, roles(result), result.lacking) == (at(0, 9), {"a": HEALTHY}, ("b", "c"))


def test_3_a_first_state_that_has_its_name_is_one_until_a_quorum_has_begun_with_it() -> None:
    members = [holder(name, 0, 8) for name in "abc"]
    result = assign(*members, first=at(0, 8))
    assert isinstance(result, Assignment) and result.is_first and not formed(*members).is_first
    assert (result.version, result.num_contributors, result.num_proved) == (at(0, 8), 3, 3)


def test_3_the_highest_step_is_the_first_state() -> None:
    assert roles(formed(holder("a", 0), holder("b", 3))) == {"b": HEALTHY}


def test_3_without_init_sync_states_of_one_step_are_taken_for_equal() -> None:
    result = formed(holder("a", 0, init_sync=False), holder("b", 0, init_sync=False))
    assert roles(result) == {"a": HEALTHY, "b": HEALTHY}


def test_4_a_torn_state_is_no_ones_source_even_where_nothing_else_was_committed() -> None:
    result = formed(holder("a", 0, torn=True), holder("b", 0))
    assert (roles(result), result.lacking) == ({"b": HEALTHY}, ("a",))


def test_4_with_torn_states_alone_there_is_no_quorum_not_even_by_the_operators_word() -> None:
    lost = assign(holder("a", 0, torn=True), newest=3, allow=True)
    assert lost == StepLost(newest_step=3, best_step=0, is_torn=True)


def test_4_a_group_that_is_torn_has_no_proven_state_whatever_it_says() -> None:
    result = formed(holder("a", 5, 2, torn=True), holder("b", 5, 2), newest=5)
    assert (roles(result), result.lacking) == ({"b": HEALTHY}, ("a",))


def test_a_member_that_must_not_load_sits_out_and_contributes_nothing() -> None:
    result = formed(holder("a", 5, 2), holder("b", 4, 2, allow_heal=False), newest=5)
    assert not result.lacking
    assert [(part.role, part.contributor_rank) for part in result.parts] == [(HEALTHY, 0), (IDLE, None)]


# ----------------------------------------------------------------------------------------------- for all inputs

HOLDERS = st.builds(
    Holder,
    replica_id=st.just(""),
    version=st.builds(at, st.integers(0, 3), st.integers(0, 2)),
    restored=st.booleans(),
    torn=st.sampled_from([False, False, False, True]),
    init_sync=st.sampled_from([True, True, False]),
    allow_heal=st.sampled_from([True, True, False]),
    contributes=st.sampled_from([True, True, False]),
    is_corrected=st.sampled_from([False, False, True]),
    min_contributors=st.integers(0, 3),
)


@settings(max_examples=by_default(150, thorough=600), deadline=None)
@given(
    drawn=st.lists(HOLDERS, min_size=1, max_size=7),
    newest=st.integers(0, 4),
    allow=st.booleans(),
)
def test_what_holds_for_every_assignment(drawn: list[Holder], newest: int, allow: bool) -> None:
    members = [
        Holder(**{name: getattr(h, name) for name in Holder.__slots__ if name != "replica_id"}, replica_id=f"r{i}")
        for i, h in enumerate(drawn)
    ]
    by_id = {member.replica_id: member for member in members}
    result = assign(*members, newest=newest, allow=allow)
    whole = [member for member in members if not member.torn]
    restored = [member for member in whole if member.restored and not member.version.proven]
    if isinstance(result, StepLost):
        assert not whole or (not allow and not restored)
        assert all(not m.version.proven or m.version.step < newest for m in whole)
        return
    parts = result.parts
    healthy = [part for part in parts if part.role is HEALTHY]
    assert [part.replica_id for part in parts] == list(by_id)
    # Who is healthy holds the quorum's state, and holds it whole.
    assert healthy
    for part in healthy:
        member = by_id[part.replica_id]
        assert not member.torn
        assert member.version == result.version or (result.is_first and member.version.step == result.version.step)
    # Nobody loads in a quorum: who lacks its state is not in it, and who must not load sits out.
    lacking = [part for part in parts if part.replica_id in result.lacking]
    assert len(lacking) == len(result.lacking)
    assert all(by_id[part.replica_id].allow_heal and part.role is not HEALTHY for part in lacking)
    assert all(part in lacking or not by_id[part.replica_id].allow_heal for part in parts if part.role is IDLE)
    assert {part.role for part in parts} <= {HEALTHY, IDLE}
    if not result.is_first:
        assert len(healthy) == sum(member.version == result.version for member in whole)
    # Contributors are numbered without gaps, in the order of ranks.
    assert [p.contributor_rank for p in parts if p.contributor_rank is not None] == list(range(result.num_contributors))
    assert {p.role for p in parts if p.contributor_rank is not None} <= {HEALTHY}
    # Who did not train adds something only where those who did are too few, and so does who may have used an older state.
    adds = {part.replica_id for part in parts if part.contributor_rank is not None}
    trained = [part.replica_id for part in healthy if by_id[part.replica_id].contributes]
    if not result.is_first and len(trained) >= max([1, *(by_id[m].min_contributors for m in trained)]):
        assert adds <= set(trained)
    unspoilt = [m for m in adds if not by_id[m].is_corrected]
    assert len(unspoilt) == len(adds) or len(unspoilt) < max([1, *(m.min_contributors for m in members)])
    # Never below the newest committed step but on purpose; never past a proven state without need, if anybody trained it.
    if result.version.step < newest:
        assert allow or (result.is_first and restored)
    counts_from = int(any(member.version.step for member in restored))
    proven = [member.version for member in whole if member.version.proven and member.version.step >= counts_from]
    if proven and max(proven).step >= newest:
        assert result.version == max(proven)
