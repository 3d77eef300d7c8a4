"""Who computes which microbatches, and in which order they are summed, does not depend on who is there."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.microbatches import run
from support.thoroughness import by_default

from torchft_ckpt.core.training.microbatches import (
    Node,
    accept,
    audited,
    auditors,
    cover,
    deal,
    family,
    fold,
    is_node,
    members,
    random_key,
    sample_at,
    slowdown,
    split,
)


def all_nodes(num_microbatches: int) -> list[Node]:
    """Return all nodes of a tree, written down by hand: the left half is the largest power of two below the size."""
    found, todo = [], [(0, num_microbatches)]
    while todo:
        first, end = todo.pop()
        found.append((first, end))
        if end - first > 1:
            half = max(power for power in (1 << n for n in range(20)) if power < end - first)
            todo += [(first, first + half), (first + half, end)]
    return sorted(found)


def expression(node: Node) -> str:
    return str(node[0]) if node[1] - node[0] == 1 else f"({expression(split(node)[0])}+{expression(split(node)[1])})"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12, 33])
def test_a_tree_has_one_root_and_each_other_node_has_a_parent_and_a_sibling(size: int) -> None:
    nodes = all_nodes(size)
    assert len(nodes) == 2 * size - 1
    for node in itertools.product(range(size + 2), repeat=2):
        assert is_node(node, size) == (node in nodes)
    kin = {node: family(node, size) for node in nodes}
    assert [node for node, family_of in kin.items() if family_of is None] == [(0, size)]
    for node, found in kin.items():
        if found is not None:
            assert sorted((node, found[1])) == list(split(found[0]))


@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_a_cover_has_the_largest_nodes_and_nothing_else(case: tuple[int, set[int]]) -> None:
    size, microbatches = case
    within = [node for node in all_nodes(size) if microbatches.issuperset(range(*node))]
    largest = [n for n in within if not any(n != o and o[0] <= n[0] and n[1] <= o[1] for o in within)]
    assert cover(microbatches, size) == largest


@st.composite
def claims(draw: st.DrawFn) -> tuple[int, list[list[Node]]]:
    """What groups say that they have computed; two may say so of the same."""
    size = draw(st.integers(1, 24))
    of_one = st.lists(st.sampled_from(all_nodes(size)), max_size=4)
    return size, draw(st.lists(of_one, min_size=1, max_size=6))


@given(claims())
def test_every_microbatch_is_dealt_once_what_is_computed_stays_and_loads_are_as_equal_as_can_be(
    case: tuple[int, list[list[Node]]],
) -> None:
    size, said = case
    has = accept(said, size)
    deals = deal(size, has)
    assert Counter(one for mine in deals for one in mine) == Counter(range(size))
    assert all(set(members(kept)) <= set(mine) for kept, mine in zip(has, deals, strict=True))
    most_kept, loads = max(len(members(kept)) for kept in has), [len(mine) for mine in deals]
    if max(loads) > most_kept:  # somebody had to take more: then nobody could have taken one for the most loaded
        assert max(loads) - min(loads) <= 1
    assert deals == deal(size, has)
    computed = {node: expression(node) for mine in deals for node in cover(mine, size)}
    assert fold(computed, size, lambda a, b: f"({a}+{b})") == expression((0, size))


@given(claims())
def test_of_two_that_claim_a_microbatch_the_first_has_it_and_what_is_no_node_nobody(
    case: tuple[int, list[list[Node]]],
) -> None:
    size, said = case
    has = accept([[*nodes, (0, size + 1), (1, size), (size, size)] for nodes in said], size)
    taken = Counter(one for nodes in has for one in members(nodes))
    assert set(taken.values()) <= {1} and all(is_node(node, size) for nodes in has for node in nodes)
    for group, nodes in enumerate(said):
        before = {one for others in has[:group] for one in members(others)}
        for node in nodes:
            is_beside = node not in has[group] and before.isdisjoint(range(*node))
            assert not is_beside or any(node != o and o[0] < node[1] and node[0] < o[1] for o in has[group])


def test_who_takes_none_is_dealt_none() -> None:
    assert deal(4, [None, [], None, []]) == [[], [0, 1], [], [2, 3]]
    assert deal(2, [[], [], []]) == [[0], [1], []]


def test_groups_of_equal_shares_send_a_node_each() -> None:
    for size, groups in ((8, 8), (32, 8), (12, 3), (64, 16)):
        assert [len(cover(mine, size)) for mine in deal(size, [[]] * groups)] == [1] * groups
    assert max(len(cover(mine, 32)) for mine in deal(32, [[]] * 7)) <= 2


def test_only_what_a_dead_group_had_is_computed_again() -> None:
    deals = deal(32, [[]] * 8)
    left = [cover(mine, 32) for mine in deals[1:]]
    again = deal(32, accept(left, 32))
    assert sum(len(mine) for mine in again) - sum(len(mine) for mine in deals[1:]) == 4
    assert max(map(len, again)) == 5
    assert slowdown(32, 8) == 1.25 and slowdown(3, 3) == 2.0 and slowdown(2, 3) == 1.0 and slowdown(4, 1) == 1.0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 4097])
def test_each_epoch_has_each_sample_once_in_an_order_of_its_own(size: int) -> None:
    epochs = [[sample_at(epoch * size + place, size, 5) for place in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size > 50:
        assert len({tuple(epoch) for epoch in epochs}) == 3 and epochs[0] != sorted(epochs[0])
        assert epochs[0] != [sample_at(place, size, 6) for place in range(size)]


def test_keys_and_permutations_are_the_same_in_every_version() -> None:
    assert [random_key(0, 0, 0), random_key(1, 2, "read 3")] == [4808561972376111626, 3896964380075286193]
    assert [sample_at(position, 10, 7) for position in range(12)] == [7, 8, 0, 5, 6, 2, 4, 1, 9, 3, 1, 9]


@pytest.mark.slow
def test_with_deaths_returns_and_cut_offs_each_microbatch_is_counted_once_and_the_sum_is_the_same_expression() -> None:
    steps = by_default(3_000, thorough=100_000)
    tally = run(steps, 8, 32, death_rate=0.01, seed=5)
    assert tally.num_discarded > steps / 20
    assert tally.num_computed <= 1.01 * steps * 32
    rough = run(by_default(500, thorough=20_000), 5, 16, death_rate=0.1, seed=6)
    assert rough.most_held <= 5


@given(st.integers(0, 10**9), st.integers(1, 50), st.integers(1, 300))
def test_one_microbatch_of_one_in_so_many_steps_is_audited(first: int, every: int, size: int) -> None:
    found = [audited(step, every, size) for step in range(first, first + 2 * every)]
    assert sum(one is not None for one in found) == 2
    assert all(one is None or 0 <= one < size for one in found)
    assert audited(first, 0, size) is None


@given(st.integers(0, 10**9), st.integers(0, 20), st.sets(st.integers(0, 20)))
def test_who_has_a_microbatch_is_audited_by_two_others_or_as_many_as_there_are(
    step: int, owner: int, able: set[int]
) -> None:
    first, *others = auditors(step, owner, able)
    assert first == owner and {*others} <= able - {owner}
    assert len({*others}) == len(others) == min(2, len(able - {owner}))


def test_each_microbatch_and_each_pair_of_groups_has_its_turn() -> None:
    size, groups = 12, 4
    dealt = {one: group for group, own in enumerate(deal(size, [[]] * groups)) for one in own}
    seen = Counter(
        (one, auditors(step, dealt[one], range(groups))[1])
        for step in range(4000)
        for one in [audited(step, 1, size)]
        if one is not None
    )
    assert len(seen) == size * (groups - 1) and min(seen.values()) > 50
