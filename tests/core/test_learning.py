"""A group that is further behind than a step receives the state outside of the quorum; nobody notices before it is close."""

from __future__ import annotations

import msgspec
import pytest
from lighthouse_script import Job, Member, they_ask, they_connect, they_vote
from support import answers

from torchft_ckpt.core.coordination.group import (
    GroupState,
    LighthouseMessage,
    RankMessage,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.learning import (
    MAX_ATTEMPTS,
    Distance,
    in_words,
    learner_in_words,
)
from torchft_ckpt.core.coordination.messages import (
    Given,
    JoinProgress,
    Need,
    Needed,
    Outcome,
    QuorumRequest,
    Receives,
    Role,
    Source,
    StateGiven,
    StateVersion,
    decode_from_lighthouse,
    encode,
)
from torchft_ckpt.errors import ProtocolError


def trains(job: Job, *members: Member, seconds: float = 1.0) -> None:
    """A step of these members that takes so long."""
    they_ask(*members, can_serve=True)
    job.passes(seconds)
    they_vote(*members)


def trained(least: int = 1, **settings: object) -> tuple[Job, Member, Member]:
    job, a, b = Job.of("ab", least=least, **settings)
    for _ in range(3):
        trains(job, a, b)
    return job, a, b


def follower(job: Job, a: Member, b: Member, name: str = "j", **settings: object) -> Member:
    """A group that needs a minute comes, and follows."""
    j = job.join(name, **settings)
    j.warms_up(reach_s=60.0, can_follow=True)
    they_ask(a, b, can_serve=True)
    assert j.formed is not None and j.formed.follows, j.hears()
    return j


def test_it_receives_the_state_while_the_others_train_on_and_comes_in_when_it_is_close() -> None:
    job, a, b = trained()
    quorum_id = a.formed.quorum_id
    j = follower(job, a, b)
    assert [source.replica_id for source in j.formed.sources] == ["a:1", "b:1"]
    assert (j.plan.load, j.plan.configure) == (True, False)
    assert a.formed.destinations == b.formed.destinations == [2] and a.replica.serves_learners
    followed = j.formed.version
    job.passes(1.0)
    they_vote(a, b)
    for _ in range(60):
        trains(job, a, b)
    assert (a.formed.quorum_id, a.outcomes) == (quorum_id, [Outcome.COMMIT] * 64)
    j.follows()
    assert j.replica.version == followed and j.replica.is_behind
    a.hears()
    j.asks(at_end=True, reach_s=0.6, can_follow=True)
    assert a.heard_joiner(), "so that somebody has captured the state at the next step"
    they_ask(a, b, can_serve=True)
    j.comes_in()
    j.asks()
    assert (j.formed.role, a.formed.replica_world_size, a.formed.quorum_id) == (Role.HEALTHY, 3, quorum_id + 1)


@pytest.mark.parametrize("case", ["within a step", "cannot", "does not say", "must not heal", "too few without it"])
def test_nobody_follows_whom_that_would_not_help(case: str) -> None:
    job, a, b = trained(min_replica_size=2 if case == "too few without it" else 1)
    if case == "too few without it":
        b.dies()
        b = a
    j = job.join("j")
    reach_s = None if case == "does not say" else 0.9 if case == "within a step" else 3.0
    if case == "must not heal":
        j.asks(reach_s=reach_s, can_follow=True, allow_heal=False)
    else:
        j.warms_up(reach_s=reach_s, can_follow=case != "cannot")
    they_ask(*{a.replica_id: a, b.replica_id: b}.values(), can_serve=True)
    assert j.formed is not None and (j.formed.role is Role.IDLE if case == "must not heal" else j.formed.held)


@pytest.mark.parametrize("guesses", [True, False])
def test_a_group_that_has_measured_nothing_follows_sooner(guesses: bool) -> None:
    job, a, b = trained(min_replica_size=1)
    j = job.join("j")
    j.warms_up(reach_s=0.3, can_follow=True, guesses=guesses)
    they_ask(a, b, can_serve=True)
    assert j.formed is not None and j.formed.follows and j.formed.held is not guesses


def test_one_that_turns_out_to_be_further_behind_than_the_others_wait_follows() -> None:
    job, a, b = trained(join_stall_limit_s=10.0)
    j = job.join("j")
    j.warms_up(reach_s=0.02, can_follow=True, guesses=True)
    they_ask(a, b, can_serve=True)
    assert j.formed is not None and j.formed.held
    j.still_needs(20.0)
    job.passes(0.3)
    assert a.formed is not None and a.formed.version == a.replica.version, (
        "the hold ends as soon as it has measured that"
    )
    j.comes_in(load=False)
    j.asks(at_end=True, reach_s=20.0, can_follow=True)
    for member in (a, b):
        member.votes()
        member.asks(can_serve=True)
    assert j.formed.follows and not j.formed.held and a.formed.replica_world_size == 2


def test_a_learner_that_dies_or_is_cut_off_costs_the_others_nothing() -> None:
    job, a, b = trained()
    j = follower(job, a, b)
    a.hears()
    j.dies()
    they_vote(a, b)
    trains(job, a, b)
    k = follower(job, a, b, "k")
    k.is_cut_off()
    k.connects()
    they_vote(a, b)
    trains(job, a, b)
    assert all(words.startswith(("quorum 1", "commit")) for words in a.hears())
    assert a.outcomes[3:] == [Outcome.COMMIT] * 4
    assert job.lighthouse.members["k:1"].is_beside


def test_at_first_nobody_follows() -> None:
    _, a, b = Job.of("ab", least=1)
    they_ask(a, b, reach_s=60.0, can_follow=True)
    assert [a.formed.role, b.formed.role] == [Role.HEALTHY, Role.HEALTHY]


def after_a_restart(num_learners: int, num_survivors: int, num_asking: int) -> tuple[float, int]:
    """The lighthouse restarts while groups follow. Return after how long there is a quorum, and of how many."""
    job = Job(least=min(2, num_asking), join_timeout_s=3.0)
    survivors = [job.join(name) for name in "abc"[:num_survivors]]
    for _ in range(3):
        trains(job, *survivors)
    learners = [job.join(f"j{number}") for number in range(num_learners)]
    for learner in learners:
        learner.warms_up(reach_s=60.0, can_follow=True)
    trains(job, *survivors)
    assert all(learner.formed is not None and learner.formed.follows for learner in learners)
    job.restart()
    they_connect(*learners, *survivors)
    began = job.now
    they_ask(*survivors[:num_asking], can_serve=True)
    while survivors[0].replica.phase.value == "asking" and job.now < began + 30.0:
        job.passes(0.1)
    return job.now - began, survivors[0].formed.replica_world_size


@pytest.mark.parametrize("num_learners", [1, 2, 3])
def test_after_a_restart_of_the_lighthouse_the_next_quorum_forms_as_fast_as_without_learners(num_learners: int) -> None:
    without = after_a_restart(0, 2, 2)
    assert after_a_restart(num_learners, 2, 2) == without and without[0] < 1.0


def test_learners_count_in_no_majority() -> None:
    """Two of three survivors ask, and the third lives and does not come."""
    assert after_a_restart(3, 3, 2) == after_a_restart(0, 3, 2)
    assert after_a_restart(3, 3, 2)[1] == 2


def test_it_receives_nothing_from_one_that_has_just_come_in() -> None:
    job, a, b = trained()
    n, j = job.join("n"), job.join("j")
    j.warms_up(reach_s=60.0, can_follow=True)
    job.lets_in(n, others=[a, b], can_serve=True)
    assert (n.formed.role, n.formed.replica_world_size) == (Role.HEALTHY, 3)
    assert [source.replica_id for source in j.formed.sources] == ["a:1", "b:1"]


def test_one_that_comes_later_waits_until_the_first_has_the_state_or_says_nothing_more() -> None:
    job, a, b = trained()
    j = follower(job, a, b)
    k = job.join("k")
    k.warms_up(reach_s=60.0, can_follow=True)
    for second in range(20):
        job.passes(1.0)
        they_vote(a, b)
        if second < 5:
            j.still_needs(50.0)
        if k.formed.follows:
            break
        they_ask(a, b, can_serve=True)
    assert 14 <= second <= 16


@pytest.mark.parametrize("has_it", [True, False])
def test_those_who_become_too_few_wait_for_the_rest_of_what_it_receives(has_it: bool) -> None:
    job, a, b = trained(least=2)
    j = follower(job, a, b)
    b.dies()
    a.votes()
    a.asks(can_serve=True)
    job.passes(10.0)
    if not has_it:
        j.replica.load_torn()  # half of the state has arrived, in place
    j.follows(load=has_it)
    j.asks(at_end=True, reach_s=55.0, can_follow=True)
    assert j.formed.held, "it follows nobody who stands still"
    job.passes(70.0)
    j.comes_in()
    j.asks()
    assert (j.formed.role, a.formed.replica_world_size) == (Role.HEALTHY, 2)
    they_vote(a, j)
    assert j.step == a.step


def test_what_it_says_on_the_way_is_kept_for_the_operator_and_decides_nothing() -> None:
    job, a, b = trained()
    j = follower(job, a, b)
    progress = JoinProgress(quorum_id=1, step=3, reach_s=30.0, done_bytes=3 * 10**8, total_bytes=9 * 10**8)
    for _ in range(20):
        j.says(progress)
        job.passes(1.0)
    said = "receives the state of step 3: 300.0 of 900.0 MB at 20.0 MB/s, 30.0 s are expected"
    assert in_words(progress) == said
    assert [line for line in job.log if said in line] == [f"j:1 follows: it {said}, 0 steps behind"] * 2
    assert job.lighthouse.members["j:1"].progress == progress
    assert learner_in_words(job.lighthouse.members["j:1"], 7) == f"follows: it {said}, 4 steps behind"
    assert learner_in_words(job.lighthouse.members["a:1"], 7) == ""
    j.says(j.replica.vote())  # of a script gone wrong
    they_vote(a, b)
    assert a.outcomes[-1] is Outcome.COMMIT


def test_attempts_that_fail_are_further_and_further_apart() -> None:
    job, a, b = trained()
    j = follower(job, a, b)
    count = 0
    for _ in range(100):
        if j.replica.phase.value == "training":
            count += 1
            j.follows(load=False)
            j.asks(at_end=True, reach_s=60.0, can_follow=True)
        job.passes(0.1)
        they_vote(a, b)
        they_ask(a, b, can_serve=True)
    assert 4 <= count <= 7


def test_all_ranks_of_a_group_follow_by_one_decision() -> None:
    group = GroupState(2)
    version, source = (
        StateVersion(step=3, quorum_id=1, epoch="e"),
        Source(replica_id="a", replica_rank=0, checkpoint_addresses=["x", "y"]),
    )
    for rank in (0, 1):
        asked = group.handle(
            RankMessage(
                rank, QuorumRequest(request_id=1, version=StateVersion(), need=Need(can_follow=True, gains=True))
            )
        )
    assert isinstance(asked[0], SendToLighthouse) and asked[0].message.need.can_follow
    formed = answers.given(1, version, Given.TO_FOLLOW, [source], quorum_id=1)
    group.handle(LighthouseMessage(formed))
    told = group.handle(LighthouseMessage(Needed(reason="b is gone")))
    assert told == [SendToRank(rank, Needed(reason="b is gone")) for rank in (0, 1)]
    for rank, mega in ((0, 1), (1, 2)):
        said = JoinProgress(quorum_id=1, step=3, reach_s=mega, done_bytes=mega, total_bytes=10)
        sent = group.handle(RankMessage(rank, said))
    assert sent == [SendToLighthouse(msgspec.structs.replace(said, reach_s=2.0, done_bytes=3, total_bytes=20))]
    keeps = JoinProgress(quorum_id=1, step=3, reach_s=0.0, does=Receives.NOTHING)
    for rank in (0, 1):
        sent = group.handle(RankMessage(rank, keeps))
    assert sent == [SendToLighthouse(keeps)], "all of them have it"
    for rank in (0, 1):
        group.handle(RankMessage(rank, QuorumRequest(request_id=2, version=version)))
    assert group.handle(LighthouseMessage(Needed(reason="b is gone"))) == [], "it has asked already"


def test_a_rank_that_waits_for_its_neighbours_is_still_beside_the_quorum_for_a_lighthouse_that_restarts() -> None:
    job, a, b = trained()
    j = follower(job, a, b)
    group = GroupState(2)
    requests = [QuorumRequest(request_id=1, version=StateVersion()) for _ in range(2)]
    for rank, request in enumerate(requests):
        group.handle(RankMessage(rank, request))
    group.handle(LighthouseMessage(msgspec.structs.replace(j.formed, request_id=1)))
    group.handle(RankMessage(0, QuorumRequest(request_id=2, version=j.formed.version)))
    j.follows()
    hello = group.introduce(j.replica.hello("j:1", 2))
    assert hello.is_beside
    group.handle(RankMessage(1, QuorumRequest(request_id=2, version=j.formed.version)))
    assert not group.introduce(j.replica.hello("j:1", 2)).is_beside


def test_a_state_that_nobody_gives_is_refused() -> None:
    job, a, b = trained()
    right = follower(job, a, b).formed
    assert isinstance(right, StateGiven) and decode_from_lighthouse(encode(right), "lighthouse") == right
    with pytest.raises(ProtocolError, match="of length >= 1"):
        decode_from_lighthouse(encode(msgspec.structs.replace(right, sources=[])), "lighthouse")


def test_following_pays_where_a_part_of_the_state_stays_as_it_is() -> None:
    distance = Distance()
    assert distance.lacking_bytes(100, 5) == 100 and distance.gains(100, 5) and not distance.gains(100, 90)
    distance.followed()
    assert distance.lacking_bytes(100, 5) == 5 and not distance.gains(100, 5)
    distance = Distance()
    for _ in range(MAX_ATTEMPTS):
        assert distance.gains(100, 3)
        distance.failed()
    assert not distance.gains(100, 3)
    distance.joined()
    assert distance.gains(100, 3)
    assert in_words(JoinProgress(quorum_id=1, step=3, reach_s=0.0, does=Receives.NOTHING)).startswith(
        "has received the state"
    )
    assert in_words(JoinProgress(quorum_id=1, step=3, reach_s=2.0, does=Receives.LOADS)).startswith(
        "loads the state of"
    )


def test_a_rank_of_a_spare_that_asks_ends_the_rest_of_the_others() -> None:
    """Each rests as long as its own transfer took: else one would wait for a quorum that the group does not ask for."""
    job = Job(least=1)
    a, spare = job.join("a"), job.join("s", spare=True)
    trains(job, a)
    spare.warms_up(reach_s=0.1, can_follow=True)
    trains(job, a)
    assert spare.formed is not None and spare.formed.why is Given.TO_STAY
    group = GroupState(2)
    for rank in (0, 1):
        group.handle(RankMessage(rank, QuorumRequest(request_id=1, version=StateVersion())))
    group.handle(LighthouseMessage(msgspec.structs.replace(spare.formed, request_id=1)))
    out = group.handle(RankMessage(1, QuorumRequest(request_id=2, version=spare.formed.version)))
    called = [i.rank for i in out if isinstance(i.message, Needed) and isinstance(i, SendToRank)]
    assert called == [0]
