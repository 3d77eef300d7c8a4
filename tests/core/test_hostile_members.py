"""One who knows the token says once what cannot be: the job trains on, at the latest when he is gone."""

from __future__ import annotations

import pytest
from lighthouse_script import Job, Member
from test_lighthouse_scenarios import trained

from torchft_ckpt.core.coordination.group import GroupState, RankMessage, SendToLighthouse, SendToRank
from torchft_ckpt.core.coordination.messages import (
    MAX_ADDRESSES_BYTES,
    GroupBroken,
    Hello,
    Leave,
    LocateState,
    QuorumRequest,
    StateVersion,
)
from torchft_ckpt.core.coordination.quorum import MAX_FIRST_ID, MAX_IDS_AHEAD, QuorumIds
from torchft_ckpt.core.coordination.replica import ReplicaSettings

FAR = 2**52


def stranger(job: Job, **hello: object) -> Member:
    """Somebody connects and says this."""
    member = job.members["x:1"] = Member(job, "x:1", 1, ReplicaSettings(min_replica_size=1))
    member.connects(**hello)
    return member


def trains(job: Job, member: Member) -> bool:
    """Whether a group makes a step, within a few seconds and without the operator."""
    before = member.step
    member.asks(can_serve=True)
    job.passes(3.0)
    member.votes()
    return member.step == before + 1


@pytest.mark.parametrize(
    "hello",
    [
        {"last_quorum_id": 2**53 - 1, "last_epoch": "old"},
        {"last_quorum_id": 2 + MAX_IDS_AHEAD, "last_epoch": "old"},
        {"version": StateVersion(step=1, quorum_id=2**53 - 1, epoch="old")},
        {"rolled_back_to": StateVersion(step=0, quorum_id=2**53 - 1, epoch="old")},
    ],
    ids=["last quorum", "a little too far", "state", "went back to"],
)
def test_a_quorum_id_that_no_job_can_have_had_is_refused_by_name_and_the_ids_go_on(hello: dict[str, object]) -> None:
    job, (a,) = trained("a")
    x = stranger(job, **hello)
    assert x.hears() == ["refused: quorum id"]
    assert trains(job, a)
    assert a.formed is not None
    assert a.formed.quorum_id == 1


def test_nor_can_one_name_a_quorum_of_this_life_that_there_was_not() -> None:
    job, (a,) = trained("a")
    x = stranger(job, version=StateVersion(step=1, quorum_id=2, epoch=job.lighthouse.epoch))
    assert x.hears() == ["refused: quorum id"]
    assert trains(job, a)


def test_nor_where_he_is_welcome_and_says_so_when_he_asks() -> None:
    job, (a,) = trained("a")
    x = stranger(job)
    x.says(QuorumRequest(request_id=1, version=StateVersion(step=1, quorum_id=2**53 - 1, epoch="old")))
    assert x.hears()[-1] == "refused: quorum id"
    assert trains(job, a)
    assert a.formed is not None
    assert a.formed.quorum_id < 10


def test_nor_by_naming_a_little_more_each_time() -> None:
    """Nine million questions, three minutes of a lighthouse, brought the ids to 2**53, which no member may send."""
    job, (a,) = trained("a")
    x = stranger(job)
    for number in range(1, 4):
        named = job.lighthouse.quorum_id + MAX_IDS_AHEAD - 1000
        x.says(LocateState(request_id=number, version=StateVersion(step=1, quorum_id=named, epoch="old")))
    assert x.hears()[-1] == "refused: quorum id"
    assert job.lighthouse.quorum_id < 2 * MAX_IDS_AHEAD
    assert trains(job, a)


def test_a_restarted_lighthouse_takes_what_it_hears_first_within_what_it_can_count_on() -> None:
    ids = QuorumIds("now")
    assert [ids.why_never_given(n, "old") == "" for n in (10**12, MAX_FIRST_ID, MAX_FIRST_ID + 1)] == [
        True,
        True,
        False,
    ]
    assert (ids.begin_after(7, "old"), ids.latest) == (True, 999)
    assert [ids.why_never_given(999 + MAX_IDS_AHEAD + n, "old") == "" for n in (0, 1)] == [True, False]
    assert [ids.why_never_given(999 + n, "now") == "" for n in (0, 1)] == [True, False]


def test_the_mere_word_that_later_steps_were_committed_stops_no_job_that_trains() -> None:
    job, (a,) = trained("a")
    stranger(job, newest_step=FAR, last_epoch="old")
    assert job.lighthouse.newest_step == 1
    assert trains(job, a)


def test_nor_does_the_mere_word_that_the_job_went_back_once() -> None:
    """It would make all states void that are of earlier quorums and later steps: those of everybody."""
    job, (a,) = trained("a")
    assert trains(job, a)
    stranger(job, rolled_back_to=StateVersion(step=0, quorum_id=10**6, epoch="old")).dies()
    assert trains(job, a)
    assert trains(job, a)


def test_a_state_of_an_earlier_life_counts_for_as_long_as_somebody_is_here_to_give_it() -> None:
    """It may be true: a group that was cut off when the lighthouse restarted. Then the others heal from it."""
    job, (a,) = trained("a")
    x = stranger(job, version=StateVersion(step=FAR, quorum_id=1, epoch="old"))
    assert job.lighthouse.newest_step == FAR
    assert not trains(job, a)
    x.dies()
    job.passes(3.0)
    a.votes()
    assert (a.step, job.lighthouse.newest_step) == (2, 2)


def test_a_state_of_this_life_that_the_job_was_never_at_is_none() -> None:
    job, (a,) = trained("a")
    stranger(job, version=StateVersion(step=FAR, quorum_id=1, epoch=job.lighthouse.epoch))
    assert job.lighthouse.newest_step == 1
    assert trains(job, a)


def test_before_a_restarted_lighthouse_has_formed_a_quorum_a_groups_word_holds() -> None:
    """Nobody here knows better, and to go back is what must not happen without the operator."""
    job, (a,) = trained("a")
    job.restart()
    x = stranger(job, newest_step=7, last_quorum_id=1, last_epoch="old")
    x.dies()
    a.connects()
    assert not trains(job, a)
    assert "step 7 was committed" in a.hears()[-1]


def test_a_group_whose_addresses_are_too_many_to_be_sent_ends_and_says_why() -> None:
    group = GroupState(64)
    said = [
        instruction
        for rank in range(64)
        for instruction in group.handle(
            RankMessage(rank, QuorumRequest(request_id=1, version=StateVersion(), checkpoint_addresses=["\x01" * 4000]))
        )
    ]
    left = [i.message for i in said if isinstance(i, SendToLighthouse)]
    assert len(left) == 1
    assert isinstance(left[0], Leave)
    assert f"at most {MAX_ADDRESSES_BYTES} are sent" in left[0].reason
    told = {i.rank for i in said if isinstance(i, SendToRank) and isinstance(i.message, GroupBroken)}
    assert told == set(range(64))
    assert group.introduce(Hello(protocol=1, replica_id="g")).checkpoint_addresses == []


def test_64_ranks_with_eight_addresses_each_are_no_such_group() -> None:
    addresses = ",".join(f"http://[2001:db8:85a3:8d3:1319:8a2e:370:{n}]:65535" for n in range(7340, 7348))
    group = GroupState(64)
    said = [
        instruction
        for rank in range(64)
        for instruction in group.handle(
            RankMessage(rank, QuorumRequest(request_id=1, version=StateVersion(), checkpoint_addresses=[addresses]))
        )
    ]
    assert [type(i.message) for i in said] == [QuorumRequest]
