"""Catching up beside votes in flight, restarts of the lighthouse, and spectators that are needed or many."""

from __future__ import annotations

from lighthouse_script import Job, they_connect
from test_catching_up import NEWEST, Looker, job_in_a_phase, look

from torchft_ckpt.core.coordination.group import GroupState, RankMessage
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Hello, QuorumRequest, Role
from torchft_ckpt.core.coordination.quorum import Asked, decide_quorum
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES


def test_one_that_looked_after_its_vote_is_not_taken_for_a_holder_of_what_is_committed_then() -> None:
    job, (a, b) = job_in_a_phase("a", "b")
    for member in (a, b):
        member.asks_as()
    a.votes()
    a.looks()
    b.votes()
    located = look(job, "c").looks()

    assert (b.step, a.step) == (3, 2)
    assert (located.version, [source.replica_id for source in located.sources]) == (b.replica.version, ["b:1"])


def test_a_spectator_that_looked_after_its_vote_has_no_part_in_the_commit() -> None:
    job, (a,) = job_in_a_phase("a")
    b = look(job, "b")
    b.catches_up()
    b.asks_as(contributes=False)
    a.asks_as()
    b.votes()
    b.looks()
    a.votes()

    assert a.step == 3
    assert job.lighthouse.newest_step == 3
    assert not b.looks().is_held


def test_a_round_is_not_committed_for_nobody_where_its_only_voter_looks() -> None:
    job, (a,) = job_in_a_phase("a")
    a.asks_as()
    a.looks()

    assert job.lighthouse.newest_step == 2
    assert a.looks().is_held


def test_ids_of_an_earlier_life_that_are_known_by_a_state_alone_are_not_given_again() -> None:
    job, (a,) = job_in_a_phase("a")
    c = look(job, "c")
    c.catches_up()
    held = c.replica.version
    assert c.replica.quorum is None  # it was in no quorum, and yet holds the state of one
    job.restart()
    a.dies()
    c.connects()
    c.asks_as(contributes=False)
    assert c.formed is None, "one that trained may come back with a newer state"
    job.passes(5.1)

    assert c.formed is not None
    assert c.formed.quorum_id >= 1000 > held.quorum_id


def test_ids_are_not_given_again_either_where_the_state_came_after_the_restart() -> None:
    job, (a,) = job_in_a_phase("a")
    c = look(job, "c")
    version = a.replica.version
    job.restart()
    a.dies()
    c.connects()
    c.replica.caught_up(version)  # a transfer that had begun before
    assert c.looks().is_held
    c.asks_as(contributes=False)

    assert c.formed is not None
    assert c.formed.quorum_id >= 1000


def test_spectators_wait_for_who_holds_the_state_also_when_the_lighthouse_forgot_the_last_quorum() -> None:
    job, (a, b) = job_in_a_phase("a", "b", join_timeout_s=10.0)
    lookers = [look(job, name) for name in "cdefg"]
    for looker in lookers:
        looker.catches_up()
    job.restart()
    they_connect(a, b, *lookers)
    for looker in lookers:
        looker.asks_as(contributes=False)
    job.passes(3000.0)
    assert all(looker.formed is None for looker in lookers)
    for member in (a, b):
        member.asks_as()

    formed = [member.formed for member in (a, b, *lookers)]
    assert [f and (f.role, f.contributor_rank) for f in formed] == [
        (Role.HEALTHY, rank) for rank in (0, 1, None, None, None, None, None)
    ]


def test_a_spectator_that_waits_long_makes_nobody_late() -> None:
    def decide(now: float) -> bool:
        return decide_quorum(
            alive="abc",
            asked={"a": Asked(at=1000.0), "c": Asked(at=0.0, contributes=False)},
            last_quorum="",
            min_replicas=1,
            join_timeout_s=60.0,
            now=now,
        ).formed

    assert not decide(1000.0), "one of two that train is no majority, whoever looks on"

    def decide_with_majority(now: float) -> bool:
        return decide_quorum(
            alive="abcd",
            asked={"a": Asked(at=1000.0), "b": Asked(at=1010.0), "c": Asked(at=0.0, contributes=False)},
            last_quorum="",
            min_replicas=1,
            join_timeout_s=60.0,
            now=now,
        ).formed

    assert (decide_with_majority(1059.0), decide_with_majority(1060.0)) == (False, True)


def test_all_who_look_have_one_primary_and_the_other_sources_are_spread() -> None:
    job, _members = job_in_a_phase(*"abcdefgh")
    lookers: list[Looker] = [look(job, f"looker{i}") for i in range(12)]
    named = [[source.replica_id for source in looker.looks().sources] for looker in lookers]

    assert {names[0] for names in named} == {"a:1"}
    assert {len(set(names)) for names in named} == {MAX_SOURCES}
    assert {name for names in named for name in names[1:]} == {f"{name}:1" for name in "bcdefgh"}


def test_a_new_lighthouse_knows_sources_before_they_ask_for_a_quorum() -> None:
    job, (a,) = job_in_a_phase("a")
    c = look(job, "c")
    job.restart()
    a.connects(checkpoint_addresses=["http://a:1"])
    c.connects()
    located = c.looks()

    assert located.version == a.replica.version
    assert [source.checkpoint_addresses for source in located.sources] == [["http://a:1"]]


def test_a_group_introduces_itself_with_the_addresses_that_it_knows() -> None:
    group = GroupState(2)
    hello = Hello(protocol=PROTOCOL_VERSION, replica_id="a:1", group_world_size=2)
    assert group.introduce(hello) == hello
    for rank in range(2):
        request = QuorumRequest(request_id=1, version=NEWEST, checkpoint_addresses=[f"http://{rank}"])
        group.handle(RankMessage(rank, request))

    assert group.introduce(hello).checkpoint_addresses == ["http://0", "http://1"]


def test_the_first_state_is_known_before_its_first_commit() -> None:
    job = Job()
    a = look(job, "a")
    a.asks_as()

    located = look(job, "b").looks()

    assert located.version == a.replica.version
    assert located.version.proven


def test_one_that_is_fetching_is_not_waited_for_where_the_last_quorum_is_forgotten() -> None:
    job, (a,) = job_in_a_phase("a")
    c = look(job, "c")
    job.restart()
    they_connect(a, c)
    assert not c.looks().is_held
    a.asks_as()
    job.passes(1.5)

    assert a.formed is not None
    assert a.formed.quorum_id >= 1000, "it would wait for a majority as long as the transfer takes"
