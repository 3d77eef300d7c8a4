"""From which state a quorum trains, who heals and from whom: a scenario for each rule, and what holds for all inputs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.thoroughness import by_default

from torchft_ckpt.core.coordination.messages import Role, StateVersion
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES, Assignment, Holder, StepLost, assign_recovery

HEALTHY, INLINE, JOINER, IDLE = Role.HEALTHY, Role.INLINE, Role.JOINER, Role.IDLE


def at(step: int, quorum_id: int = 0) -> StateVersion:
    return StateVersion(step=step, quorum_id=quorum_id, epoch="e" if quorum_id else "")


def holder(name: str, step: int, quorum_id: int = 0, **wants: bool) -> Holder:
    return Holder(replica_id=name, version=at(step, quorum_id), **wants)


def assign(*members: Holder, newest: int = 0, allow: bool = False, least: int = 1) -> Assignment | StepLost:
    return assign_recovery(
        members, newest_step=newest, allow_step_loss=allow, min_replicas=least, quorum_id=9, epoch="e"
    )


def formed(*members: Holder, newest: int = 0, allow: bool = False, least: int = 1) -> Assignment:
    result = assign(*members, newest=newest, allow=allow, least=least)
    assert isinstance(result, Assignment)
    return result


def roles(assignment: Assignment) -> dict[str, Role]:
    return {part.replica_id: part.role for part in assignment.parts}


# ---------------------------------------------------------------------------------------------------- rule by rule


def test_1_the_newest_proven_state_wins_and_all_others_heal() -> None:
    result = formed(holder("a", 7, 3), holder("b", 6, 3), holder("c", 0), newest=7)
    assert (result.version, roles(result)) == (at(7, 3), {"a": HEALTHY, "b": JOINER, "c": JOINER})


def test_1_of_one_step_the_later_quorums_state_wins_and_the_other_heals() -> None:
    result = formed(holder("a", 7, 3), holder("b", 7, 4), newest=7)
    assert (result.version, roles(result)) == (at(7, 4), {"a": JOINER, "b": HEALTHY})


def test_1_a_proven_state_wins_over_a_restored_one_of_a_higher_step() -> None:
    result = formed(holder("a", 7, 3), holder("b", 50, restored=True), newest=7)
    assert (result.version, roles(result)["b"]) == (at(7, 3), JOINER)


def test_1_fresh_weights_that_a_quorum_has_named_lose_against_a_restored_state() -> None:
    result = formed(holder("a", 0, 3), holder("b", 5, restored=True), holder("c", 0, 3))
    assert (result.version, roles(result)) == (at(5, 9), {"a": INLINE, "b": HEALTHY, "c": INLINE})


def test_1_and_not_against_a_restored_state_of_step_0() -> None:
    result = formed(holder("a", 0, 3), holder("b", 0, restored=True))
    assert (result.version, roles(result)) == (at(0, 3), {"a": HEALTHY, "b": JOINER})


def test_2_below_the_newest_committed_step_there_is_no_quorum() -> None:
    assert assign(holder("a", 6, 3), newest=7) == StepLost(newest_step=7, best_step=6)


def test_2_nor_with_fresh_weights() -> None:
    assert assign(holder("a", 0), newest=7) == StepLost(newest_step=7, best_step=0)


def test_2_a_state_restored_on_purpose_may_be_trained_from() -> None:
    result = formed(holder("a", 6, 3), holder("b", 4, restored=True), newest=7)
    assert (result.version, roles(result)) == (at(4, 9), {"a": INLINE, "b": HEALTHY})
    assert result.is_first


def test_2_of_restored_states_the_highest_step_is_taken() -> None:
    result = formed(holder("a", 4, restored=True), holder("b", 5, restored=True), newest=7)
    assert (result.version, roles(result)) == (at(5, 9), {"a": INLINE, "b": HEALTHY})


def test_2_the_operators_word_lets_the_best_proven_state_go_on() -> None:
    result = formed(holder("a", 6, 3), holder("b", 0), newest=7, allow=True)
    assert (result.version, roles(result)) == (at(6, 3), {"a": HEALTHY, "b": JOINER})


def test_2_the_operators_word_loses_no_more_than_it_must() -> None:
    proven = formed(holder("a", 6, 3), holder("b", 4, restored=True), newest=7, allow=True)
    restored = formed(holder("a", 6, 3), holder("b", 7, restored=True), newest=9, allow=True)
    assert (proven.version, restored.version) == (at(6, 3), at(7, 9))


def test_2_the_operators_word_lets_fresh_weights_go_on() -> None:
    assert formed(holder("a", 0), newest=7, allow=True).version == at(0, 9)


def test_3_the_first_state_is_the_first_members_and_all_others_load_before_their_forward_pass() -> None:
    result = formed(holder("a", 0), holder("b", 0), holder("c", 0))
    assert (result.version, roles(result)) == (at(0, 9), {"a": HEALTHY, "b": INLINE, "c": INLINE})
    assert result.num_contributors == 3


def test_3_the_highest_step_is_the_first_state() -> None:
    assert roles(formed(holder("a", 0), holder("b", 3))) == {"a": INLINE, "b": HEALTHY}


def test_3_without_init_sync_states_of_one_step_are_taken_for_equal() -> None:
    result = formed(holder("a", 0, init_sync=False), holder("b", 0, init_sync=False))
    assert roles(result) == {"a": HEALTHY, "b": HEALTHY}


def test_4_sources_serve_evenly_many() -> None:
    result = formed(*(holder(f"h{i}", 5, 2) for i in range(3)), *(holder(f"j{i}", 0) for i in range(6)), newest=5)
    assert [len(part.destinations) for part in result.parts[:3]] == [6, 6, 6]
    result = formed(*(holder(f"h{i}", 5, 2) for i in range(7)), *(holder(f"j{i}", 0) for i in range(4)), newest=5)
    assert [len(part.destinations) for part in result.parts[:7]] == [4, 2, 2, 2, 2, 2, 2]


def test_4_all_who_heal_have_one_primary_through_which_they_find_each_other() -> None:
    result = formed(*(holder(f"h{i}", 5, 2) for i in range(3)), *(holder(f"j{i}", 0) for i in range(6)), newest=5)
    assert {part.sources[0] for part in result.parts[3:]} == {0}


def test_4_no_more_sources_are_named_than_will_be_used() -> None:
    result = formed(*(holder(f"h{i:02}", 5, 2) for i in range(10)), holder("j", 0), newest=5)
    assert [len(part.sources) for part in result.parts if part.sources] == [MAX_SOURCES]


def test_4_who_has_captured_its_state_serves_first() -> None:
    result = formed(
        holder("a", 5, 2, can_serve=False), holder("b", 5, 2, can_serve=True), holder("c", 0), holder("d", 0), newest=5
    )
    assert [part.destinations for part in result.parts] == [(), (2, 3), (), ()]


def test_5_a_torn_state_is_no_ones_source_even_where_nothing_else_was_committed() -> None:
    result = formed(holder("a", 0, torn=True), holder("b", 0))
    assert roles(result) == {"a": INLINE, "b": HEALTHY}


def test_5_with_torn_states_alone_there_is_no_quorum_not_even_by_the_operators_word() -> None:
    lost = assign(holder("a", 0, torn=True), newest=3, allow=True)
    assert lost == StepLost(newest_step=3, best_step=0, is_torn=True)


def test_5_a_group_that_is_torn_has_no_proven_state_whatever_it_says() -> None:
    result = formed(holder("a", 5, 2, torn=True), holder("b", 5, 2), newest=5)
    assert roles(result) == {"a": JOINER, "b": HEALTHY}


def test_6_a_joiner_is_deferred_while_nobody_can_serve_without_stopping() -> None:
    result = formed(holder("a", 5, 2, can_serve=False), holder("b", 0), newest=5)
    assert (result.deferred, roles(result)) == (("b",), {"a": HEALTHY})


def test_6_it_is_not_deferred_where_those_who_remain_would_be_too_few() -> None:
    result = formed(holder("a", 5, 2, can_serve=False), holder("b", 0), newest=5, least=2)
    assert (result.deferred, roles(result)["b"]) == ((), JOINER)


def test_a_member_that_must_not_heal_is_idle_and_contributes_nothing() -> None:
    result = formed(holder("a", 5, 2), holder("b", 4, 2, allow_heal=False), newest=5)
    assert [(part.role, part.contributor_rank, part.sources) for part in result.parts] == [
        (HEALTHY, 0, ()),
        (IDLE, None, ()),
    ]


def test_where_holders_are_too_few_a_waiting_member_heals_before_its_forward_pass() -> None:
    waiting = holder("b", 0, waits_for_quorum=True)
    assert roles(formed(holder("a", 5, 2), waiting, newest=5, least=2))["b"] is INLINE
    assert roles(formed(holder("a", 5, 2), waiting, newest=5, least=1))["b"] is JOINER


def test_8_who_made_the_step_while_it_healed_compares_its_state_and_contributes_nothing() -> None:
    result = formed(holder("a", 5, 2), holder("b", 5, 2, unverified=True), holder("c", 5, 2), newest=5)
    assert [(part.role, part.contributor_rank, part.sources) for part in result.parts] == [
        (HEALTHY, 0, ()),
        (JOINER, None, (0, 2)),
        (HEALTHY, 1, ()),
    ]
    assert not result.unverified


def test_8_where_all_holders_did_so_the_first_stands_in() -> None:
    result = formed(holder("a", 4, 2), *(holder(name, 5, 2, unverified=True) for name in "bc"), newest=5)
    assert roles(result) == {"a": JOINER, "b": HEALTHY, "c": JOINER}
    assert (result.unverified, [part.sources for part in result.parts]) == (True, [(1,), (), (1,)])


def test_8_where_too_few_contribute_without_it_it_compares_before_its_forward_pass() -> None:
    waiting = holder("b", 5, 2, unverified=True, waits_for_quorum=True)
    assert roles(formed(holder("a", 5, 2), waiting, newest=5, least=2))["b"] is INLINE
    needs_two = replace(holder("a", 5, 2), min_contributors=2)
    assert roles(formed(needs_two, waiting, newest=5))["b"] is INLINE
    assert formed(needs_two, waiting, newest=5).num_contributors == 2


def test_8_where_nobody_can_serve_it_goes_along_unless_it_is_needed() -> None:
    busy = holder("a", 5, 2, can_serve=False)
    unverified = holder("b", 5, 2, unverified=True, waits_for_quorum=True)
    result = formed(busy, unverified, holder("c", 0), newest=5)
    assert (roles(result), result.deferred, result.parts[1].sources) == ({"a": HEALTHY, "b": JOINER}, ("c",), ())
    result = formed(replace(busy, min_contributors=2), unverified, newest=5)
    assert (roles(result)["b"], result.parts[1].sources) == (INLINE, (0,))


# ----------------------------------------------------------------------------------------------- for all inputs

HOLDERS = st.builds(
    Holder,
    replica_id=st.just(""),
    version=st.builds(at, st.integers(0, 3), st.integers(0, 2)),
    restored=st.booleans(),
    torn=st.sampled_from([False, False, False, True]),
    init_sync=st.sampled_from([True, True, False]),
    allow_heal=st.sampled_from([True, True, False]),
    heal_inline=st.booleans(),
    waits_for_quorum=st.booleans(),
    can_serve=st.booleans(),
    unverified=st.sampled_from([False, False, True]),
    min_contributors=st.integers(0, 3),
    stands_in=st.booleans(),
)


@settings(max_examples=by_default(150, thorough=600), deadline=None)
@given(
    drawn=st.lists(HOLDERS, min_size=1, max_size=7),
    newest=st.integers(0, 4),
    allow=st.booleans(),
    least=st.integers(1, 4),
)
def test_what_holds_for_every_assignment(drawn: list[Holder], newest: int, allow: bool, least: int) -> None:
    members = [
        Holder(**{name: getattr(h, name) for name in Holder.__slots__ if name != "replica_id"}, replica_id=f"r{i}")
        for i, h in enumerate(drawn)
    ]
    by_id = {member.replica_id: member for member in members}
    result = assign(*members, newest=newest, allow=allow, least=least)
    whole = [member for member in members if not member.torn]
    restored = [member for member in whole if member.restored and not member.version.proven]
    if isinstance(result, StepLost):
        assert not whole or (not allow and not restored)
        assert all(not m.version.proven or m.version.step < newest for m in whole)
        return
    parts = result.parts
    healthy = [part for part in parts if part.role is HEALTHY]
    # Everybody is in it or deferred, once; the deferred only while enough remain.
    assert sorted([*(part.replica_id for part in parts), *result.deferred]) == sorted(by_id)
    assert not result.deferred or len(healthy) >= least
    # Who is healthy holds the quorum's state, and holds it whole.
    assert healthy
    for part in healthy:
        member = by_id[part.replica_id]
        assert not member.torn
        assert member.version == result.version or (result.is_first and member.version.step == result.version.step)
    # An unverified one is healthy only where no verified one holds the state, and alone or with those of its very state.
    if not result.is_first:
        verified = [m for m in whole if m.version == result.version and not m.unverified]
        assert result.unverified == (not verified)
        alike = [m for m in whole if m.version == result.version and m.stands_in]
        assert len(healthy) == (max(1, len(alike)) if result.unverified else len(verified))
        assert result.unverified == any(by_id[part.replica_id].unverified for part in healthy)
    # Who has to heal has a source that is healthy and knows of it, and so has who compares, if there is one that can serve;
    # nobody else has one.
    for rank, part in enumerate(parts):
        member = by_id[part.replica_id]
        is_named = member.version == result.version and not member.torn
        is_along = part.role is JOINER and is_named and not any(by_id[p.replica_id].can_serve for p in healthy)
        assert bool(part.sources) == (part.role in (INLINE, JOINER) and not is_along)
        assert not is_named or part.replica_id not in result.deferred
        assert all(parts[source].role is HEALTHY for source in part.sources)
        assert all(rank in parts[source].destinations for source in part.sources)
        assert all(rank in parts[destination].sources for destination in part.destinations)
        assert part.role is not IDLE or not by_id[part.replica_id].allow_heal
    able = [part for part in healthy if by_id[part.replica_id].can_serve] or healthy
    loads = [len(part.destinations) for part in able]
    assert max(loads[1:], default=0) - min(loads[1:], default=0) <= 1
    assert sum(loads) == sum(len(part.sources) for part in parts)
    # Contributors are numbered without gaps, in the order of ranks.
    assert [p.contributor_rank for p in parts if p.contributor_rank is not None] == list(range(result.num_contributors))
    assert {p.role for p in parts if p.contributor_rank is not None} <= {HEALTHY, INLINE}
    # Never below the newest committed step but on purpose; never past a proven state without need, if anybody trained it.
    if result.version.step < newest:
        assert allow or (result.is_first and restored)
    counts_from = int(any(member.version.step for member in restored))
    proven = [member.version for member in whole if member.version.proven and member.version.step >= counts_from]
    if proven and max(proven).step >= newest:
        assert result.version == max(proven)
