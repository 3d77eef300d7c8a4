"""Replicas that train for long between two steps: where the newest state is, who is waited for, and who only looks on."""

from __future__ import annotations

import functools

import pytest
from lighthouse_script import Job, Member, they_vote

from torchft_ckpt.core.coordination.group import (
    GroupState,
    LighthouseMessage,
    RankMessage,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.messages import (
    LocateState,
    QuorumRequest,
    Source,
    StateLocated,
    StateVersion,
    StepAlone,
)
from torchft_ckpt.core.coordination.quorum import Asked, decide_quorum
from torchft_ckpt.core.coordination.recovery import Assignment, Holder, assign_recovery
from torchft_ckpt.core.coordination.replica import ReplicaSettings, ReplicaState, StepFacts, StepWishes

NEWEST = StateVersion(step=4, quorum_id=2, epoch="e")


class Looker(Member):
    """A member that can look for the newest state between steps."""

    located: StateLocated | None = None

    def looks(self) -> StateLocated:
        self.located = None
        self.says(self.replica.locate())
        assert self.located is not None
        return self.located

    def receives(self, connection: str, message: object) -> None:  # type: ignore[override]
        if isinstance(message, StateLocated):
            self.located = message
            self.replica.located(message)
        else:
            super().receives(connection, message)  # type: ignore[arg-type]

    def catches_up(self) -> None:
        self.replica.caught_up(self.looks().version)
        assert self.looks().is_held

    def asks_as(self, *, contributes: bool = True, patience_s: float = 0.0) -> None:
        self.asks_again = functools.partial(self.asks_as, contributes=contributes, patience_s=patience_s)
        request = self.replica.begin(
            StepWishes(contributes=contributes, patience_s=patience_s, waits=not self.replica.version.proven),
            StepFacts(can_serve=True),
        )
        self.says(_with_address(request, self.replica_id))


def _with_address(request: QuorumRequest, replica_id: str) -> QuorumRequest:
    fields = {field: getattr(request, field) for field in request.__struct_fields__}
    return QuorumRequest(**{**fields, "checkpoint_addresses": [f"http://{replica_id}"]})


def look(job: Job, name: str) -> Looker:
    member = Looker(job, f"{name}:1", 1, ReplicaSettings(min_replica_size=1))
    job.members[member.replica_id] = member
    member.connects()
    return member


def job_in_a_phase(*names: str, **settings: float) -> tuple[Job, list[Looker]]:
    """A job whose members have committed two rounds and train."""
    job = Job(**settings)  # type: ignore[arg-type]
    members = [look(job, name) for name in names]
    for _ in range(2):
        for member in members:
            member.asks_as()
        they_vote(*members)
    for member in members:
        member.hears()
    return job, members


# ----------------------------------------------------------------------------------------------- where the state is


def test_a_newcomer_is_told_who_holds_the_newest_state_in_the_middle_of_a_phase() -> None:
    job, (a, _b) = job_in_a_phase("a", "b")

    located = look(job, "c").looks()

    assert located.version == a.replica.version
    assert not located.is_held
    assert [(s.replica_id, s.checkpoint_addresses) for s in located.sources] == [
        ("a:1", ["http://a:1"]),
        ("b:1", ["http://b:1"]),
    ]


def test_nobody_offers_a_first_state_that_a_lighthouse_finds_that_has_started_again() -> None:
    job = Job(least=3)
    for name in ("a", "b"):  # were given it, and wait for a third one
        member = look(job, name)
        member.is_cut_off()
        member.replica.version = StateVersion(step=0, quorum_id=1, epoch="of a life before")
        member.connects(checkpoint_addresses=[f"http://{name}"])

    located = look(job, "c").looks()

    assert located.version.proven and not located.is_held and located.sources == []


def test_nothing_is_known_where_nothing_has_a_name() -> None:
    job = Job()
    look(job, "a")

    located = look(job, "b").looks()

    assert (located.version.proven, located.sources) == (False, [])


def test_an_older_state_is_not_named_when_the_newest_is_gone() -> None:
    job, (a, b) = job_in_a_phase("a", "b")
    late = look(job, "late")
    late.catches_up()
    for member in (a, b):
        member.asks_as()
    they_vote(a, b)
    a.dies()
    b.dies()

    assert not look(job, "c").looks().version.proven


def test_who_caught_up_is_a_source_and_keeps_the_state_when_all_others_die() -> None:
    job, (a, b) = job_in_a_phase("a", "b")
    c = look(job, "c")
    c.catches_up()
    c.asks_as(contributes=False)
    a.dies()
    b.dies()

    assert [source.replica_id for source in look(job, "d").looks().sources] == ["c:1"]


def test_nobody_waits_for_one_that_looks_for_the_newest_state() -> None:
    _job, (a, b) = job_in_a_phase("a", "b")
    b.replica.load_torn()
    b.looks()
    a.asks_as()

    assert a.hears() == ["quorum 2 step 2 healthy"]


# ---------------------------------------------------------------------------------------------------------- spectators


def test_who_caught_up_enters_with_the_next_round_adds_nothing_and_ends_equal() -> None:
    job, (a, b) = job_in_a_phase("a", "b")
    c = look(job, "c")
    c.catches_up()
    c.asks_as(contributes=False)
    assert c.hears() == []
    for member in (a, b):
        member.asks_as()
    assert (a.formed.num_contributors, c.formed.contributor_rank, c.formed.sources) == (2, None, [])  # type: ignore[union-attr]
    they_vote(a, b, c)
    assert {member.replica.version for member in (a, b, c)} == {a.replica.version}

    for member in (a, b, c):
        member.asks_as()
    assert c.formed is not None
    assert (c.formed.num_contributors, c.formed.contributor_rank) == (3, 2)


def test_spectators_form_no_quorum_while_those_who_train_live_however_long() -> None:
    job, (a, b) = job_in_a_phase("a", "b", join_timeout_s=10.0)
    lookers = [look(job, name) for name in "cde"]
    for looker in lookers:
        looker.catches_up()
        looker.asks_as(contributes=False)
    job.passes(3000.0)
    assert all(looker.formed is None for looker in lookers)
    a.dies()
    b.dies()

    assert {looker.formed is not None and looker.formed.num_contributors for looker in lookers} == {3}


def test_where_those_who_trained_are_too_few_a_spectator_is_one_of_them() -> None:
    trained = Holder(replica_id="a", version=NEWEST, min_contributors=2)
    spectator = Holder(replica_id="b", version=NEWEST, contributes=False, min_contributors=2)

    def contributors(*members: Holder) -> list[str]:
        result = assign_recovery(members, newest_step=4, allow_step_loss=False, quorum_id=9, epoch="e")
        assert isinstance(result, Assignment)
        return [part.replica_id for part in result.parts if part.contributor_rank is not None]

    other = Holder(replica_id="c", version=NEWEST, min_contributors=2)
    assert contributors(trained, spectator) == ["a", "b"]
    assert contributors(trained, spectator, other) == ["a", "c"]


@pytest.mark.parametrize("has_trained", [True, False])
def test_a_stale_spectator_is_in_no_quorum_whoever_trained(has_trained: bool) -> None:
    holder = Holder(replica_id="a", version=NEWEST, contributes=has_trained)
    stale = Holder(replica_id="b", version=StateVersion(), contributes=False)
    result = assign_recovery([holder, stale], newest_step=4, allow_step_loss=False, quorum_id=9, epoch="e")
    assert isinstance(result, Assignment)
    assert (result.lacking, result.parts[0].contributor_rank) == (("b",), 0)


# ------------------------------------------------------------------------------------------------------------ patience


@pytest.mark.parametrize(("patience_s", "formed_at"), [(0.0, 60.0), (30.0, 60.0), (2400.0, 2400.0)])
def test_a_living_member_is_waited_for_as_long_as_the_others_phase_took(patience_s: float, formed_at: float) -> None:
    def decide(now: float) -> bool:
        return decide_quorum(
            alive="abc",
            asked={name: Asked(at=0.0, patience_s=patience_s) for name in "ab"},
            last_quorum="abc",
            min_replicas=1,
            join_timeout_s=60.0,
            now=now,
        ).formed

    assert (decide(formed_at - 0.1), decide(formed_at)) == (False, True)


def test_all_members_learn_how_long_the_longest_phase_was() -> None:
    _job, (a, b) = job_in_a_phase("a", "b")
    a.asks_as(patience_s=5.0)
    b.asks_as(patience_s=7.0)

    assert [member.formed is not None and member.formed.patience_s for member in (a, b)] == [7.0, 7.0]


def test_one_that_dies_in_the_phase_is_not_waited_for() -> None:
    _job, (a, b, c) = job_in_a_phase("a", "b", "c")
    c.dies()
    a.asks_as(patience_s=2400.0)
    b.asks_as(patience_s=2400.0)

    assert a.hears() == ["broken by c:1, lost", "quorum 2 step 2 healthy"]


# ---------------------------------------------------------------------------------------------------- ranks of a group


def locate(number: int, version: StateVersion = NEWEST) -> LocateState:
    return LocateState(request_id=number, version=version)


def ups(group: GroupState, rank: int, message: LocateState | QuorumRequest) -> list[object]:
    return [i.message for i in group.handle(RankMessage(rank, message)) if isinstance(i, SendToLighthouse)]


def test_a_group_looks_when_all_ranks_want_to_and_each_is_told_all_addresses() -> None:
    group = GroupState(2)
    assert ups(group, 1, locate(7)) == []
    (asked,) = ups(group, 0, locate(3))
    assert isinstance(asked, LocateState)
    source = Source(replica_id="x", replica_rank=0, checkpoint_addresses=["x0", "x1"])
    answer = StateLocated(request_id=asked.request_id, version=NEWEST, sources=[source])

    told = {i.rank: i.message for i in group.handle(LighthouseMessage(answer)) if isinstance(i, SendToRank)}

    assert {rank: message.request_id for rank, message in told.items()} == {0: 3, 1: 7}
    assert {rank: m.sources[0].checkpoint_addresses for rank, m in told.items()} == {0: ["x0", "x1"], 1: ["x0", "x1"]}  # type: ignore[union-attr]


def test_ranks_that_hold_different_states_hold_none_when_they_look() -> None:
    group = GroupState(2)
    ups(group, 0, locate(1))
    (asked,) = ups(group, 1, locate(1, StateVersion()))

    assert isinstance(asked, LocateState)
    assert not asked.version.proven


@pytest.mark.parametrize("looks_first", [True, False])
def test_where_one_rank_asks_for_a_quorum_the_one_that_looks_is_told_to_ask_too(looks_first: bool) -> None:
    group = GroupState(2)
    said = [RankMessage(0, locate(5)), RankMessage(1, QuorumRequest(request_id=1, version=NEWEST))]
    out = [i for event in (said if looks_first else said[::-1]) for i in group.handle(event)]

    assert out == [SendToRank(0, StateLocated(request_id=5))]
    assert isinstance(ups(group, 0, QuorumRequest(request_id=6, version=NEWEST))[0], QuorumRequest)


def test_a_spectator_rank_makes_its_group_one_and_the_slowest_rank_its_patience() -> None:
    group = GroupState(2)
    ups(group, 0, QuorumRequest(request_id=1, version=NEWEST, patience_s=3.0))
    (asked,) = ups(group, 1, QuorumRequest(request_id=1, version=NEWEST, patience_s=8.0, contributes=False))

    assert isinstance(asked, QuorumRequest)
    assert (asked.contributes, asked.patience_s) == (False, 8.0)


# ------------------------------------------------------------------------------------------------------------ a replica


def test_a_replica_is_behind_until_it_holds_the_newest_state_that_it_heard_of() -> None:
    replica = ReplicaState(ReplicaSettings(min_replica_size=1))
    assert replica.is_behind
    replica.locate()
    replica.caught_up(NEWEST)
    assert not replica.is_behind
    replica.load_torn()
    assert replica.is_behind


@pytest.mark.parametrize("is_held", [False, True])
def test_a_rank_whose_group_has_yet_to_load_the_state_is_behind_although_it_holds_it(is_held: bool) -> None:
    """One rank had failed to load the job's first state. Nobody names a source of that, so the one came in with an iteration's
    end, and the others, which held it, with a beginning: the group computed iterations alone for ever (outer seed 8387)."""
    replica = ReplicaState(ReplicaSettings(min_replica_size=1))
    replica.caught_up(NEWEST)
    asked = replica.begin(StepWishes(), StepFacts())
    warms_up = StepAlone(request_id=asked.request_id, quorum_id=NEWEST.quorum_id, epoch=NEWEST.epoch, version=NEWEST)
    assert replica.formed(warms_up) is not None
    replica.learned()
    looks = replica.locate()
    replica.located(StateLocated(request_id=looks.request_id, version=NEWEST, is_held=is_held))
    assert replica.is_behind is not is_held


def test_looking_abandons_an_open_step() -> None:
    _job, (a, b) = job_in_a_phase("a", "b")
    for member in (a, b):
        member.asks_as()
    a.looks()

    assert b.hears()[-1].startswith("broken by a:1")
    assert a.replica.phase.value == "idle"


def test_nobody_offers_a_jobs_first_state_which_is_given_in_a_hold() -> None:
    """In an outer loop a newcomer looks first. It would fetch from a group that serves nobody but those that it is held for."""
    job = Job(least=2)
    job.gives_first = False
    a, b = job.join("a"), look(job, "b")
    a.asks(can_serve=True)
    b.asks_as()
    assert a.replica.version.proven and b.formed is not None and b.formed.held
    b.follows()
    a.dies()
    b.asks_again()
    located = look(job, "c").looks()
    assert (located.version, located.sources) == (b.replica.version, [])
