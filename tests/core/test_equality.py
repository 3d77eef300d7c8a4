"""Groups whose votes show different states under one name are named, compared before the next step, or stopped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lighthouse_script import Job, Member

from torchft_ckpt.core.coordination.equality import alike, differing, is_checked, runs_of
from torchft_ckpt.core.coordination.messages import (
    MAX_LEAF_CHARS,
    MAX_LEAVES,
    MAX_MESSAGE_BYTES,
    Leaf,
    LeafDigests,
    OnReplicasDiffer,
    Outcome,
    Shows,
    StateVersion,
    encode,
)


def test_the_state_after_each_nth_committed_step_is_compared_and_the_first_one_is_not():
    assert [step for step in range(7) if is_checked(step, 3)] == [3, 6]
    assert not any(is_checked(step, 0) for step in range(7))


@pytest.mark.parametrize(
    ("states", "groups"),
    [
        ("aaa", [["0", "1", "2"]]),
        ("aba", [["0", "2"], ["1"]]),
        ("aabb", [["0", "1"], ["2", "3"]]),
        ("bbbac", [["0", "1", "2"], ["3"], ["4"]]),
    ],
)
def test_those_that_are_the_most_come_first(states, groups):
    assert alike({str(number): [state] for number, state in enumerate(states)}) == groups


def test_groups_differ_where_one_of_their_ranks_does():
    assert alike({"a": ["x", "y"], "b": ["x", "z"], "c": ["x", "y"]}) == [["a", "c"], ["b"]]


@given(st.integers(0, 300), st.integers(1, 40))
def test_an_answer_is_bounded_and_names_the_run_that_differs(count, most):
    leaves = [(f"layer.{number}", f"{number:x}") for number in range(count)]
    runs = runs_of(leaves, ",".join, most)
    assert len(runs) <= most
    assert ",".join(run.digest for run in runs) == ",".join(digest for _, digest in leaves)
    for number in range(0, count, 37):
        other = [*leaves[:number], (leaves[number][0], "!"), *leaves[number + 1 :]]
        found = differing(runs, runs_of(other, ",".join, most))
        assert len(found) == 1 and (count > most or found == [f"layer.{number}"])


def test_the_longest_answer_fits_into_a_message():
    leaves = [(f"{number:06d}" + "\U0001f600" * 300, "f" * 32) for number in range(3 * MAX_LEAVES)]
    runs = runs_of(leaves, lambda digests: digests[0])
    message = LeafDigests(version=StateVersion(), leaves=runs)
    assert max(len(leaf.name) for leaf in runs) <= MAX_LEAF_CHARS and len(encode(message).encode()) < MAX_MESSAGE_BYTES
    assert runs[0].name.startswith("000000") and " to 000002" in runs[0].name


def test_a_leaf_that_only_one_of_them_has_differs():
    one, other = [Leaf(name="a", digest="1")], [Leaf(name="a", digest="1"), Leaf(name="b", digest="2")]
    assert (differing(one, other), differing(other, one), differing(one, one)) == (["b"], ["b"], [])


# ------------------------------------------------------------------------------------------------------ at the lighthouse


def started(policy: OnReplicasDiffer, names: str = "abc", *, every: int = 2) -> tuple[Job, list[Member]]:
    """A job whose groups have committed step 1, and compare their states of each second step."""
    job = Job(least=1)
    members = [job.join(name, check_equal_every=every, on_replicas_differ=policy) for name in names]
    job.step(*members)
    job.step(*members)
    assert [member.step for member in members] == [2] * len(names)
    for member in members:
        member.hears()
    return job, members


def compares(members: list[Member], states: Sequence[str]) -> None:
    """They make the step that begins with the state to be compared, and that state is this."""
    for member in members:
        member.asks()
    for member, state in zip(members, states, strict=True):
        member.votes(state=state)


def test_equal_groups_commit_and_nobody_hears_of_it():
    job, members = started(OnReplicasDiffer.STOP)
    compares(members, "xxx")
    assert [member.hears()[1:] for member in members] == [["commit"]] * 3
    assert not any("different states" in line for line in job.log)


def test_the_first_tensors_that_differ_are_asked_for_once_and_named_to_all():
    job, members = started(OnReplicasDiffer.WARN)
    compares(members, "xyx")
    a, b, c = members
    assert "leaves of rank 0 wanted" in a.hears() and "leaves of rank 0 wanted" in b.hears()
    assert "leaves of rank 0 wanted" not in c.hears()
    version = StateVersion(step=2, quorum_id=1, epoch=job.lighthouse.epoch)
    a.tells_leaves(version, weight="1", bias="2", lr="3")
    assert a.hears() == []
    b.tells_leaves(version, weight="1", bias="4", lr="3")
    (said,) = c.hears()
    assert said.startswith("differ: replica groups hold different states of step 2: a:1, c:1 one, b:1 another.")
    assert said.endswith("b:1 and a:1 differ in bias")
    assert a.hears() == b.hears() == [said]
    b.tells_leaves(version, weight="5")
    assert a.hears() == []


def test_groups_that_are_to_heal_are_named_and_show_all_of_their_states_before_the_next_step():
    job, members = started(OnReplicasDiffer.HEAL, "ab")
    compares(members, "xy")
    assert [member.step for member in members] == [3, 3]
    assert [member.replica.shows for member in members] == [Shows.ALL] * 2
    assert any("They are compared before the next step" in line for line in job.log)
    assert not any("leaves" in words for member in members for words in member.hears())


def test_groups_of_other_layouts_are_not_compared_and_of_those_that_show_more_only_what_all_show():
    job, members = started(OnReplicasDiffer.WARN, "ab")
    compares(members, ["xy", "x"])
    assert not any("different states" in line for line in job.log)
    compares(members, "xx")
    for member in members:
        member.asks()
    job.lighthouse.members["a:1"].layout = "another"
    for member, state in zip(members, "xy", strict=True):
        member.votes(state=state)
    assert not any("different states" in line for line in job.log)


def test_what_stays_different_is_named_once_a_minute():
    job, members = started(OnReplicasDiffer.WARN, "ab", every=1)
    for _ in range(5):
        compares(members, "xy")
    assert sum("different states" in line for line in job.log) == 1
    job.passes(61.0)
    compares(members, "xy")
    assert sum("different states" in line for line in job.log) == 2
    compares(members, "xx")
    compares(members, "xy")
    assert sum("different states" in line for line in job.log) == 3


def test_stop_discards_the_step_and_ends_the_groups_that_were_compared():
    """Others hold nothing that was found to differ: nobody ends them by settings of his own."""
    job, members = started(OnReplicasDiffer.STOP)
    late = job.join("late")
    compares(members, "xyx")
    assert [member.outcomes[-1] for member in members] == [Outcome.DISCARD] * 3
    assert [member.step for member in members] == [2, 2, 2]
    version = members[0].replica.version
    members[0].tells_leaves(version, weight="1")
    members[1].tells_leaves(version, weight="2")
    for member in members:
        assert member.hears()[-1].startswith("stop: ") and member.hears() == []
    assert late.hears() == []


def test_stop_ends_all_groups_although_one_that_is_asked_for_its_tensors_dies():
    _, (a, b, c) = started(OnReplicasDiffer.STOP)
    compares([a, b, c], "xyx")
    b.dies()
    for member in (a, c):
        (said,) = (words for words in member.hears() if words.startswith("stop: "))
        assert said.endswith("which tensors differ is not known, because not all groups have answered")


def test_stop_ends_all_groups_although_nobody_names_the_tensors():
    _, (a, b, c) = started(OnReplicasDiffer.STOP)
    compares([a, b, c], "xyx")
    assert not any(words.startswith("stop: ") for words in a.hears())
    compares([a, b, c], "xyx")  # the discarded step again
    assert any(words.startswith("stop: ") for words in a.hears())


def test_a_group_with_another_wish_is_named_once():
    job = Job(least=1)
    for life in (1, 2):
        job.join("a", life=life, check_equal_every=100, on_replicas_differ=OnReplicasDiffer.HEAL)
        job.join("b", life=life, check_equal_every=100)
        job.join("c", life=life)
    said = [line for line in job.log if "strictest setting" in line]
    assert len(said) == 2 and "b:1 has check_equal_every=100, on_replicas_differ='warn', and a:1" in said[0]
    assert "c:1 has check_equal_every=0" in said[1]


def test_the_strictest_wish_of_those_who_compare_holds():
    job = Job(least=1)
    policies = [OnReplicasDiffer.WARN, OnReplicasDiffer.STOP, OnReplicasDiffer.HEAL]
    members = [
        job.join(name, check_equal_every=1, on_replicas_differ=policy)
        for name, policy in zip("abc", policies, strict=True)
    ]
    job.step(*members)
    compares(members, "xxy")
    assert [member.step for member in members] == [1, 1, 1]


def test_the_dead_are_not_compared():
    _, (a, b, c) = started(OnReplicasDiffer.HEAL)
    for member in (a, b, c):
        member.asks()
    a.votes(state="x")
    a.dies()
    for member, state in ((b, "x"), (c, "y")):
        member.has_the_sum()
        member.votes(state=state)
    assert [b.outcomes[-1], c.outcomes[-1]] == [Outcome.COMMIT, Outcome.COMMIT]


# ------------------------------------------------------------------------------------------- what votes have found


def have_found(members: list[Member], what: str) -> None:
    for member in members:
        member.asks()
    for member in members:
        member.replica.found = what
        member.votes(state="x")


@pytest.mark.parametrize(
    ("policy", "after", "shows"),
    [
        (OnReplicasDiffer.WARN, "They train on (on_replicas_differ is 'warn')", Shows.SAMPLES),
        (OnReplicasDiffer.HEAL, "Their states are compared before the next step", Shows.ALL),
    ],
)
def test_what_groups_have_found_of_what_they_compute_is_told_to_all_once_and_the_step_counts(
    policy: OnReplicasDiffer, after: str, shows: Shows
):
    job, members = started(policy)
    have_found(members, "b computes 4 for 2 + 1")
    assert [member.step for member in members] == [3] * 3
    assert [member.replica.shows for member in members] == [shows] * 3
    said = f"b computes 4 for 2 + 1. {after}"
    assert [line for line in job.log if "computes" in line] == [said]
    assert all(f"differ: {said}" in member.hears() for member in members)
    assert job.lighthouse.last_said_to_differ == said
    have_found(members, "c computes 5 for 2 + 1")
    assert not any("c computes" in line for line in job.log), "whole states are not compared in each step"
    assert job.lighthouse.last_said_to_differ == "c computes 5 for 2 + 1"
    for passes, times in ((61.0, 1), (61.0, 1), (61.0, 2), (61.0, 2), (2 * 3600.0, 3), (61.0, 4)):
        job.passes(passes)
        have_found(members, "c computes 5 for 2 + 1")
        assert sum("c computes" in line for line in job.log) == times, "after 1, 2, 4 minutes; anew after hours without"
    for member in members:
        member.asks()
    assert [member.replica.found for member in members] == [""] * 3


def test_stop_discards_a_step_in_which_groups_have_found_that_they_compute_differently():
    job, members = started(OnReplicasDiffer.STOP)
    have_found(members, "b computes 4 for 2 + 1")
    assert [member.outcomes[-1] for member in members] == [Outcome.DISCARD] * 3
    said = "stop: b computes 4 for 2 + 1. None of them trains on (on_replicas_differ is 'stop')"
    assert all(said in member.hears() for member in members)
    assert sum("None of them trains on" in line for line in job.log) == 1


def test_a_step_that_counts_for_nobody_says_nothing_of_what_was_found():
    job, (a, b, c) = started(OnReplicasDiffer.STOP)
    for member in (a, b, c):
        member.asks()
    a.replica.found = "b computes 4 for 2 + 1"
    a.votes(state="x")
    b.votes(error="it went wrong")
    assert not any("computes" in line for line in job.log)
