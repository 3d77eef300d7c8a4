"""One who knows the token says once what cannot be: the job trains on, at the latest when he is gone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lighthouse_script import Job, Member, they_ask, they_connect, they_vote
from test_learning import trains as train_together
from test_lighthouse_scenarios import trained

from torchft_ckpt.core.coordination.group import GroupState, RankMessage, SendToLighthouse, SendToRank
from torchft_ckpt.core.coordination.history import MAX_FIRST_STEP, MAX_STEPS_AHEAD, StateHistory
from torchft_ckpt.core.coordination.messages import (
    MAX_ADDRESSES_BYTES,
    CommitVote,
    GroupBroken,
    Hello,
    Leave,
    LocateState,
    Outcome,
    QuorumRequest,
    StateVersion,
)
from torchft_ckpt.core.coordination.quorum import MAX_FIRST_ID, MAX_IDS_AHEAD, QuorumIds
from torchft_ckpt.core.coordination.replica import ReplicaSettings

FAR = 2**52
LATER = MAX_STEPS_AHEAD
"""As far beyond the job as anybody may be."""


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
    member.goes_on()
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


def test_who_says_again_in_an_open_step_what_it_voted_of_an_earlier_one_holds_what_it_makes_that_step_with() -> None:
    job, (a, b) = trained("a", "b")
    job.step(a, b)
    version = StateVersion(step=2, quorum_id=1, epoch=job.lighthouse.epoch)
    they_ask(a, b)
    a.says(CommitVote(quorum_id=1, epoch=job.lighthouse.epoch, step=0, approve=True))
    assert job.lighthouse.members["a:1"].version == job.lighthouse.members["b:1"].version == version
    they_vote(a, b)
    assert a.step == b.step == job.lighthouse.newest_step == 3


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
    """It may be true: a group that was cut off when the lighthouse restarted. Then the others get its state."""
    job, (a,) = trained("a")
    x = stranger(job, version=StateVersion(step=LATER, quorum_id=1, epoch="old"))
    assert job.lighthouse.newest_step == LATER
    assert not trains(job, a)
    x.dies()
    job.passes(3.0)
    a.goes_on()
    assert trains(job, a) and (a.step, job.lighthouse.newest_step) == (2, 2)


def of_old(step: int) -> StateVersion:
    return StateVersion(step=step, quorum_id=1, epoch="old")


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("restored", [False, True], ids=["named", "restored"])
def test_nor_does_a_quorum_that_trains_from_it_make_it_one_that_the_job_waits_for(least: int, restored: bool) -> None:
    """One who was there for a moment stood for all that came after: the job, and its members after a restart, told each other."""
    job, groups = trained("a", "b", least=least if least < 3 else 2)
    if restored:  # it needs another one, whose state makes all others too old
        stranger(job, version=of_old(LATER - 1))
    x = job.members["y:1"] = Member(job, "y:1", 1, ReplicaSettings(min_replica_size=1))
    version = StateVersion(step=LATER) if restored else of_old(LATER)
    x.connects(version=version)
    x.says(QuorumRequest(request_id=1, version=version, restored=restored, can_serve=True))
    they_ask(*groups, can_serve=True)
    for _ in range(3):
        job.passes(61.0)
        for member in groups:
            member.goes_on(load=False)
    assert {m.formed.version.step >= LATER - 1 for m in groups if m.formed} == {True}, "they would get such a state"
    for member in [m for name, m in job.members.items() if name[0] in "xy"]:
        member.dies()
    for _ in range(12):
        job.passes(61.0)
        for member in groups:
            member.goes_on()
    (step,) = {member.step for member in groups}
    assert 3 <= step < 12
    job.restart()
    they_connect(*groups)
    job.step(*groups)
    assert {member.step for member in groups} == {job.lighthouse.newest_step} == {step + 1}


def test_a_quorum_meets_at_the_store_of_one_that_hosts_one_whoever_holds_the_state() -> None:
    """The others were sent to no store at all, and their trainers ended."""
    job, (a,) = trained("a")
    x = stranger(job, version=of_old(LATER))
    a.warms_up()
    x.says(QuorumRequest(request_id=1, version=of_old(LATER), can_serve=True))
    a.comes_in()
    a.asks()
    assert a.formed is not None
    assert (a.formed.replica_world_size, a.formed.meets.store_address) == (2, "store-a:1")
    assert a.formed.meets.standby_store_address == ""


def test_the_others_carry_such_a_step_to_no_restarted_lighthouse() -> None:
    job, (a, b) = trained("a", "b")
    x = stranger(job, version=of_old(LATER))
    a.warms_up()
    b.warms_up()
    x.says(QuorumRequest(request_id=1, version=of_old(LATER), can_serve=True))
    assert a.formed is not None
    assert (a.formed.held, a.formed.version.step) == (True, LATER)
    x.dies()
    job.restart()
    they_connect(a, b)
    assert job.lighthouse.newest_step == 1
    they_ask(a, b)
    job.passes(61.0)  # the last quorum had one more
    they_vote(a, b)
    assert (a.step, b.step) == (2, 2)


def test_where_one_has_loaded_such_a_state_the_job_goes_on_from_it() -> None:
    """It was none of a liar's: a group that was cut off when the lighthouse restarted came back with it, and died again."""
    job, (a, b) = trained("a", "b")
    x = stranger(job, version=of_old(7))
    a.warms_up()
    b.warms_up()
    x.says(QuorumRequest(request_id=1, version=of_old(7), can_serve=True))
    a.comes_in()
    x.dies()
    a.asks(can_serve=True)
    b.goes_on(load=False)
    job.passes(1.0)
    a.votes()
    a.asks(can_serve=True)
    assert b.formed is not None
    assert (b.formed.version.step, [source.replica_id for source in b.formed.sources]) == (8, ["a:1"])
    b.comes_in()
    b.asks()
    they_vote(a, b)
    assert (a.step, b.step, job.lighthouse.newest_step) == (9, 9, 9)


def test_a_commit_from_it_that_nobody_followed_leaves_nothing() -> None:
    job, (a,) = trained("a")
    x = stranger(job, version=of_old(LATER))
    x.replica.version = of_old(LATER)
    x.asks(can_serve=True)
    a.asks()
    x.votes()
    a.goes_on()
    assert job.lighthouse.newest_step == LATER + 1
    x.says(QuorumRequest(request_id=9, version=StateVersion()))
    x.dies()
    assert trains(job, a)
    assert job.lighthouse.newest_step == a.step == 2


def test_two_commits_of_one_step_have_two_names_where_nobody_followed_the_first() -> None:
    job, (a, b) = trained("a", "b")
    job.step(a, b)
    before = a.replica.version
    they_ask(a, b)
    formed = a.formed
    a.is_stopped = b.is_stopped = True  # what they hear comes too late: they have given up
    they_vote(a, b)
    assert job.lighthouse.newest_step == 3
    a.is_stopped = b.is_stopped = False
    for member in (a, b):
        member.says(QuorumRequest(request_id=99, version=before))
    again = job.lighthouse.round
    assert formed is not None and again is not None
    assert (again.step, again.quorum_id) == (formed.version.step, formed.quorum_id + 1)


@pytest.mark.parametrize(
    "hello",
    [{"version": of_old(2 + LATER)}, {"version": StateVersion(step=FAR)}, {"newest_step": FAR, "last_epoch": "old"}],
    ids=["state", "without a name", "word"],
)
def test_a_step_that_no_job_can_have_made_since_is_refused_by_name(hello: dict[str, object]) -> None:
    job, (a,) = trained("a")
    x = stranger(job, **hello)
    assert x.hears() == ["refused: step"]
    assert trains(job, a)


def test_nor_may_one_say_so_in_a_request_or_in_a_vote() -> None:
    for message in (
        QuorumRequest(request_id=1, version=of_old(FAR)),
        LocateState(request_id=1, version=of_old(FAR)),
        CommitVote(quorum_id=1, epoch="old", step=FAR, approve=True),
    ):
        job, (a,) = trained("a")
        x = stranger(job)
        x.says(message)
        assert x.hears()[-1] == "refused: step"
        assert trains(job, a)


def test_a_fresh_lighthouse_believes_no_more_steps_than_a_job_can_make() -> None:
    job = Job(1)
    assert stranger(job, version=of_old(MAX_FIRST_STEP + 1)).hears() == ["refused: step"]
    a = job.join("a")
    job.step(a)
    assert a.step == 1


def test_a_state_of_this_life_that_the_job_has_gone_back_behind_is_tied_to_who_shows_it() -> None:
    job, (a,) = trained("a")
    for _ in range(3):
        assert trains(job, a)
    a.dies()
    b = job.join("b")
    b.replica.restore(2)
    b.asks(can_serve=True)
    job.passes(61.0)
    b.votes()
    x = stranger(job, version=StateVersion(step=4, quorum_id=job.lighthouse.quorum_id, epoch=job.lighthouse.epoch))
    x.dies()
    assert job.lighthouse.newest_step == 3
    assert trains(job, b)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=12))
def test_a_state_that_the_job_has_gone_back_behind_stays_void_however_often_it_goes_back(
    goes: list[tuple[int, int]],
) -> None:
    """It went back to 1 and on to 3, then back to 2: what it had made of step 2 before the first time counted again."""
    history, backs = StateHistory("now"), []
    history.goes_on_from(StateVersion(quorum_id=1, epoch="now"), 1, "now", ["a"])
    for quorum_id, (step, num_steps) in enumerate(goes, start=2):
        for _ in range(num_steps):
            history.committed((quorum_id - 1, "now", history.newest_step), ["a"])
        if step < history.newest_step:
            backs.append((step, quorum_id))
            history.goes_on_from(StateVersion(step=step, quorum_id=quorum_id, epoch="now"), quorum_id, "now", ["a"])
    for step, quorum_id in itertools.product(range(history.newest_step + 1), range(1, len(goes) + 2)):
        is_void = any(quorum_id < back and step > to for to, back in backs)
        assert history.is_void(StateVersion(step=step, quorum_id=quorum_id, epoch="now")) == is_void


def test_a_vote_in_doubt_about_a_quorum_that_cannot_have_been_is_refused() -> None:
    job, (a,) = trained("a")
    job.restart()
    x = stranger(job)
    x.says(CommitVote(quorum_id=2**53 - 1, epoch="old", step=3, approve=True))
    assert x.hears()[-1] == "refused: quorum id"
    a.connects()
    assert trains(job, a)


def test_the_state_that_comes_of_a_vote_in_doubt_is_of_no_later_quorum_than_the_next_one() -> None:
    """The operator lets the job go back behind it: then it is void."""
    job = Job(1)
    x = stranger(job, last_quorum_id=77, last_quorum_size=1, last_epoch="old")
    x.says(CommitVote(quorum_id=77, epoch="old", step=3, approve=True, num_voters=1, counts=True))
    assert job.lighthouse.newest_step == 4
    a, b = job.join("a"), job.join("b")
    job.operator_allows_loss()
    for member in (a, b):
        member.warms_up()
    job.passes(61.0)
    for member in (a, b):
        member.goes_on()
    for _ in range(2):
        job.passes(61.0)
        for member in (a, b):
            member.goes_on()
    assert a.formed is not None and a.formed.quorum_id > 77
    assert 0 < job.lighthouse.newest_step == max(a.step, b.step) < 4


def test_a_step_that_was_decided_here_counts_on_where_somebody_says_that_the_job_went_back_but_not_behind_it() -> None:
    """Who voted on it stays away meanwhile. Another one that votes late is told the decision, and holds that state then."""
    job = Job(1)
    vote = CommitVote(quorum_id=77, epoch="old", step=3, approve=True, num_voters=1, counts=True)
    x, late = (Member(job, name, 1, ReplicaSettings(min_replica_size=1)) for name in ("x:1", "late:1"))
    for member in (late, x):
        member.connects(last_quorum_id=77, last_quorum_size=1, last_epoch="old", last_step=3)
    x.says(vote)
    x.dies()
    stranger(job, rolled_back_to=StateVersion(step=4, quorum_id=78, epoch="old"), last_quorum_id=77, last_epoch="old")
    assert job.lighthouse.newest_step == 4
    late.says(vote)
    assert (late.hears()[-1], job.lighthouse.newest_step) == ("commit", 4)


def test_who_has_no_part_in_the_open_step_does_not_break_its_collectives_by_a_vote() -> None:
    job, (a, b) = trained("a", "b")
    x = stranger(job)
    they_ask(a, b)
    a.hears(), b.hears()
    assert a.formed is not None
    says = CommitVote(quorum_id=a.formed.quorum_id, epoch=a.formed.epoch, step=1, approve=False, broken=True)
    x.says(says)
    they_vote(a, b)
    assert (a.hears(), b.hears(), x.hears()) == (["commit"], ["commit"], [])
    x.says(says)
    assert x.hears() == ["left_behind"]


def test_nor_those_of_a_step_that_is_in_doubt_after_a_restart() -> None:
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    job.restart()
    they_connect(a, b)
    x = stranger(job)
    assert a.formed is not None
    vote = CommitVote(quorum_id=a.formed.quorum_id, epoch=a.formed.epoch, step=1, approve=False, broken=True)
    a.hears(), b.hears()
    x.says(vote)
    they_vote(a, b)
    assert (a.hears(), b.hears()) == (["commit"], ["commit"])


def test_a_state_of_this_life_that_the_job_was_never_at_is_none() -> None:
    job, (a,) = trained("a")
    stranger(job, version=StateVersion(step=FAR, quorum_id=1, epoch=job.lighthouse.epoch))
    assert job.lighthouse.newest_step == 1
    assert trains(job, a)


def test_nor_does_it_become_one_when_another_one_brings_the_job_to_its_step_and_leaves() -> None:
    """It counted as held then, without having been shown since."""
    job, (a, b) = trained("a", "b")
    x = stranger(job, version=StateVersion(step=2, quorum_id=1, epoch=job.lighthouse.epoch))
    y, z = job.join("y"), job.join("z")
    for member in (y, z):
        member.connects(version=of_old(4))
        member.says(QuorumRequest(request_id=1, version=of_old(4), can_serve=True))
    they_ask(a, b)
    job.passes(61.0)
    assert job.lighthouse.round is not None and job.lighthouse.round.step == 4
    y.dies()
    z.dies()
    assert (job.lighthouse.newest_step, x.replica_id in job.lighthouse.members) == (1, True)


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


def test_a_word_that_the_job_went_back_in_a_quorum_that_never_was_makes_no_later_state_void() -> None:
    """He says so before the first quorum, and goes. All that was committed after it counted as lost."""
    job, a, b = Job.of("ab", least=1)
    liar = job.join("liar")
    liar.is_cut_off()
    liar.connects(rolled_back_to=StateVersion(step=0, quorum_id=2**40, epoch="another life"))
    liar.dies()
    for _ in range(3):
        train_together(job, a, b)
    assert (a.step, b.step, a.outcomes) == (3, 3, [Outcome.COMMIT] * 3)
    assert a.formed is not None and a.formed.quorum_id > 2**39
