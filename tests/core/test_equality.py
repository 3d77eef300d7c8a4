"""Groups that hold different states under one name are found, named, healed or stopped, and never served from meanwhile."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lighthouse_script import Job, Member

from torchft_ckpt.core.coordination.equality import alike, differing, is_checked, minority, runs_of, with_those_served
from torchft_ckpt.core.coordination.messages import (
    MAX_LEAF_CHARS,
    MAX_LEAVES,
    MAX_MESSAGE_BYTES,
    FollowWish,
    Leaf,
    LeafDigests,
    OnReplicasDiffer,
    Outcome,
    Role,
    StateVersion,
    encode,
)
from torchft_ckpt.core.coordination.recovery import Assignment, MemberRole


def test_the_state_after_each_nth_committed_step_is_compared_and_the_first_one_is_not():
    assert [step for step in range(7) if is_checked(step, 3)] == [3, 6]
    assert not any(is_checked(step, 0) for step in range(7))


@pytest.mark.parametrize(
    ("states", "groups", "few"),
    [
        ("aaa", [["0", "1", "2"]], []),
        ("aba", [["0", "2"], ["1"]], ["1"]),
        ("ab", [["0"], ["1"]], []),
        ("abc", [["0"], ["1"], ["2"]], []),
        ("aabb", [["0", "1"], ["2", "3"]], []),
        ("aabc", [["0", "1"], ["2"], ["3"]], []),
        ("bbbac", [["0", "1", "2"], ["3"], ["4"]], ["3", "4"]),
    ],
)
def test_a_strict_majority_is_right_and_without_one_nobody_is(states, groups, few):
    found = alike({str(number): [state] for number, state in enumerate(states)})
    assert (found, minority(found)) == (groups, few)


def test_groups_differ_where_one_of_their_ranks_does():
    assert alike({"a": ["x", "y"], "b": ["x", "z"], "c": ["x", "y"]}) == [["a", "c"], ["b"]]


def test_who_loads_from_one_that_differs_in_the_same_step_differs_too():
    roles = {"a": (Role.HEALTHY, ()), "b": (Role.HEALTHY, ()), "c": (Role.JOINER, (0,)), "d": (Role.JOINER, (1, 0))}
    parts = tuple(
        MemberRole(replica_id=m, role=role, contributor_rank=None, sources=s) for m, (role, s) in roles.items()
    )
    step = Assignment(version=StateVersion(), parts=parts, deferred=(), is_first=False, reason="")
    assert with_those_served(["b"], step) == {"b", "d"}
    assert with_those_served(["a"], step) == {"a", "c", "d"}


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


def compares(members: list[Member], states: str) -> None:
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


def test_who_differs_from_most_does_not_commit_and_heals_from_the_others():
    _, (a, b, c) = started(OnReplicasDiffer.HEAL)
    compares([a, b, c], "xyx")
    assert [member.outcomes[-1] for member in (a, b, c)] == [Outcome.COMMIT, Outcome.LEFT_BEHIND, Outcome.COMMIT]
    assert (b.replica.version, b.replica.is_behind) == (StateVersion(step=2), True)
    for member in (a, b, c):
        member.asks()
    assert [m.formed.role for m in (a, b, c) if m.formed] == [Role.HEALTHY, Role.JOINER, Role.HEALTHY]
    assert b.formed is not None and b.formed.contributor_rank is None
    assert {source.replica_id for source in b.formed.sources} <= {"a:1", "c:1"}
    for member in (a, b, c):
        member.votes()
    assert [member.step for member in (a, b, c)] == [4, 4, 4]


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


def test_two_groups_that_differ_are_named_and_train_on():
    job, members = started(OnReplicasDiffer.HEAL, "ab")
    compares(members, "xy")
    assert [member.step for member in members] == [3, 3]
    assert any("No state has a majority" in line for line in job.log)


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


def test_stop_discards_the_step_and_ends_all_groups_also_those_that_compare_nothing():
    job, members = started(OnReplicasDiffer.STOP)
    late = job.join("late")
    compares(members, "xyx")
    assert [member.outcomes[-1] for member in members] == [Outcome.DISCARD] * 3
    assert [member.step for member in members] == [2, 2, 2]
    version = members[0].replica.version
    members[0].tells_leaves(version, weight="1")
    members[1].tells_leaves(version, weight="2")
    for member in [*members, late]:
        assert member.hears()[-1].startswith("stop: ") and member.hears() == []


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


def test_the_memory_of_who_differs_outlives_its_connection_and_ends_when_it_has_healed():
    job, (a, b, c) = started(OnReplicasDiffer.HEAL)
    for member in (a, b, c):
        member.asks()
    a.votes(state="x")
    b.votes(state="y")
    vote, held = b.replica._vote, b.replica.version
    deaf, b.connection = b.connection, "nowhere"  # what the lighthouse decides does not reach it
    c.votes(state="x")
    assert (b.replica.version, deaf in job.by_connection) == (held, True)
    b.replica.decision_unknown()
    b.connects()
    assert job.lighthouse.members["b:1"].version == StateVersion(step=2)
    assert vote is not None and vote.state_digests == ["y"]
    b.says(vote)
    assert b.hears()[-1] == "left_behind"
    for member in (a, b, c):
        member.asks()
    assert b.formed is not None and (b.formed.role, b.formed.differs) == (Role.JOINER, True)
    assert b.plan is not None and b.plan.load
    b.loads()
    for member in (a, b, c):
        member.votes()
        member.hears()
    b.asks()
    assert job.lighthouse.members["b:1"].version.proven


def learns(job: Job, members: list[Member]) -> Member:
    """A group warms up, and a state is kept for it that the others begin the step with which they compare."""
    j = job.join("j", warm_up=True)
    j.asks(reach_s=0.2, can_follow=True)
    assert j.formed is not None and j.formed.warms_up
    j.says(FollowWish(quorum_id=j.formed.quorum_id, step=j.formed.version.step, reach_s=60.0))
    for member in members:
        member.asks(can_serve=True)
    assert j.hears()[-1] == "statekept"
    return j


def receives_what_was_kept(j: Member) -> list[str]:
    """It has warmed up, and asks. Returns from whom it is to receive the state that was kept for it."""
    j.votes()
    j.replica.learned()
    j.asks(reach_s=0.0, can_follow=True)
    assert j.formed is not None and j.plan is not None and j.formed.follows and j.plan.load
    return [source.replica_id for source in j.formed.sources]


def test_a_group_that_warms_up_measures_no_way_to_one_that_differs():
    job, members = started(OnReplicasDiffer.HEAL)
    compares(members, "yxx")
    j = job.join("j", warm_up=True)
    j.asks()
    assert j.formed is not None and j.formed.warms_up
    assert [source.replica_id for source in j.formed.sources] == ["b:1", "c:1"]


def test_nobody_receives_from_one_that_differs_what_was_kept_before_that_was_known():
    job, members = started(OnReplicasDiffer.HEAL)
    j = learns(job, members)
    for member, state in zip(members, "yxx", strict=True):
        member.votes(state=state)
    assert receives_what_was_kept(j) == ["b:1", "c:1"]
    j.follows()
    assert not job.lighthouse._equality.differs("j:1", j.replica.version)


@pytest.mark.parametrize("has_asked", [False, True])
def test_a_learner_that_had_one_that_differs_as_a_source_holds_nothing_of_that_name(has_asked):
    job, (a, b, c) = started(OnReplicasDiffer.HEAL)
    j = learns(job, [a, b, c])
    assert receives_what_was_kept(j) == ["a:1", "b:1", "c:1"]
    j.follows()
    if has_asked:
        j.asks()
        assert job.lighthouse.members["j:1"].version == a.replica.version
    for member, state in zip((a, b, c), "yxx", strict=True):
        member.votes(state=state)
    assert (b.step, c.step, j.step) == (3, 3, 2) and j.replica.version.proven
    if not has_asked:
        j.asks()
    assert job.lighthouse.members["j:1"].version == StateVersion(step=2)
    for member in (a, b, c):
        member.dies()
    job.operator_allows_loss()
    assert j.formed is not None and j.formed.names_state, "it may be trained from only as a state that is new"
    assert j.formed.version.quorum_id == job.lighthouse.quorum_id


@pytest.mark.parametrize(
    ("cut_off", "back"),
    [("before", "before"), ("before", "after"), ("after", "after")],
    ids=["before it", "in it", "after it"],
)
def test_so_does_one_that_was_cut_off_while_it_received_that_state(cut_off, back):
    job, members = started(OnReplicasDiffer.HEAL)
    j = learns(job, members)
    assert "a:1" in receives_what_was_kept(j)
    for moment in ("before", "after"):
        if cut_off == moment:
            j.is_cut_off()
        if back == moment:
            j.connects()
        for member, state in zip(members, "yxx", strict=True):
            member.votes(state=state)
    assert [member.step for member in members] == [2, 3, 3]
    j.follows()
    j.asks()
    assert (j.step, j.replica.version.proven) == (2, True)
    assert job.lighthouse.members["j:1"].version == StateVersion(step=2)


def test_who_is_told_at_the_very_step_that_it_differs_loads_what_it_has_the_name_of():
    _, (a, b, _) = started(OnReplicasDiffer.HEAL)
    b.asks()
    a.asks()
    held = b.replica.version
    formed = a.formed
    assert formed is not None
    plan = b.replica.formed(
        msgspec.structs.replace(
            formed, request_id=b.replica._request_id, version=held, role=Role.INLINE, differs=True, contributor_rank=0
        )
    )
    assert plan is not None and plan.load and plan.load_before_forward
    assert b.replica.participating_rank is None


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
