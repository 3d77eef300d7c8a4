"""Who of those that saved a step is gone: what the lighthouse remembers of its last quorums."""

from __future__ import annotations

from lighthouse_script import Job, Member, they_vote

from torchft_ckpt.core.coordination.group import (
    GroupState,
    LighthouseMessage,
    RankMessage,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.history import NUM_REMEMBERED, RecentContributors
from torchft_ckpt.core.coordination.messages import LostAsked, LostTold, StateVersion

EPOCH = "life"


def version_of(step: int, quorum_id: int = 1, epoch: str = EPOCH) -> StateVersion:
    return StateVersion(step=step, quorum_id=quorum_id, epoch=epoch)


def lost_of(known: RecentContributors, version: StateVersion, *alive: str) -> list[int] | None:
    told = known.answer(LostAsked(version=version), EPOCH, alive)
    assert told is None or told.version == version
    return None if told is None else told.contributors


def test_those_who_are_not_connected_are_gone_whatever_quorum_it_is_now() -> None:
    known = RecentContributors()
    known.note(1, 0, {0: "a:1", 1: "b:1", 2: "c:1"})
    known.note(2, 5, {0: "a:1", 1: "c:1"})
    assert lost_of(known, version_of(5), "a:1", "c:1") == [1]
    assert lost_of(known, version_of(6, quorum_id=2), "a:1", "c:1") == []
    assert lost_of(known, version_of(5), "a:1", "b:2", "c:1") == [1], "started again it has not what it had"
    assert lost_of(known, version_of(5)) == [0, 1, 2]


def test_their_names_are_told_by_number_without_their_incarnations() -> None:
    known = RecentContributors()
    known.note(1, 0, {1: "b:1", 0: "host:a:1", 2: "c"})
    told = known.answer(LostAsked(version=version_of(5)), EPOCH, ())
    assert told is not None and told.group_names == ["host:a", "b", "c"]


def test_within_a_quorum_numbers_count_from_the_step_on_that_they_were_given() -> None:
    """A joiner has loaded the state and contributes."""
    known = RecentContributors()
    known.note(1, 0, {0: "b:1"})
    for step in (3, 4, 5):
        known.note(1, step, {0: "a:1", 1: "b:1"})
    assert lost_of(known, version_of(3), "a:1") == [0]
    assert lost_of(known, version_of(4), "a:1") == [1]
    assert lost_of(known, version_of(6), "a:1") == [1]


def test_what_is_not_remembered_is_not_answered() -> None:
    known = RecentContributors()
    assert lost_of(known, version_of(1)) is None
    for quorum_id in range(1, NUM_REMEMBERED + 2):
        known.note(quorum_id, quorum_id, {0: f"a:{quorum_id}"})
    assert lost_of(known, version_of(2, quorum_id=1)) is None
    assert lost_of(known, version_of(3, quorum_id=2)) == [0]
    assert lost_of(known, version_of(2, quorum_id=2)) is None, "nothing was committed in it yet"
    assert lost_of(known, version_of(3, quorum_id=2, epoch="before")) is None


def asks(member: Member) -> list[str]:
    member.hears()
    member.says(LostAsked(version=member.replica.version))
    return member.hears()


def test_a_member_is_told_who_of_its_step_is_gone() -> None:
    job, a, b, c = Job.of("abc", 1, least=2)
    assert asks(a) == ["gone: []"]
    b.dies()
    assert asks(a) == ["gone: [1]"]
    job.join("b", life=2)
    assert asks(c) == ["gone: [1]"]


def test_who_came_in_for_a_step_writes_nothing_of_it_so_nobody_is_told_of_its_loss() -> None:
    job, b, c = Job.of("bc", 1, least=1)
    a = job.join("a")
    job.lets_in(a, others=[b, c])
    they_vote(a, b, c)
    a.dies()
    assert asks(b) == ["gone: []"]
    job.step(b, c)
    c.dies()
    assert asks(b) == ["gone: [1]"]


def test_a_lighthouse_that_was_restarted_says_nothing() -> None:
    job, a, _ = Job.of("ab", 1, least=2)
    job.restart()
    a.connects()
    assert asks(a) == []


def test_a_group_passes_the_question_on_and_the_answer_to_all_of_its_ranks() -> None:
    group = GroupState(3)
    asked, told = LostAsked(version=version_of(4)), LostTold(version=version_of(4), contributors=[2])
    assert group.handle(RankMessage(2, asked)) == [SendToLighthouse(asked)]
    assert group.handle(LighthouseMessage(told)) == [SendToRank(rank, told) for rank in range(3)]
