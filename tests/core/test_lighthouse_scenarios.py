"""The lighthouse over time: what goes in, what has to come out."""

from __future__ import annotations

from lighthouse_script import Job, Member, they_ask, they_connect, they_vote

from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import ConnectionClosed, Log, Received, Send
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    Answer,
    Heartbeat,
    Hello,
    Outcome,
    Refused,
    StateVersion,
)
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES


def trained(*names: str, least: int = 1, steps: int = 1, **settings: float) -> tuple[Job, list[Member]]:
    """A job whose members have committed a few steps together."""
    job = Job(least=least, **settings)  # type: ignore[arg-type]
    members = [job.join(name) for name in names]
    for _ in range(steps):
        job.step(*members)
    assert {member.step for member in members} == {steps}
    for member in members:
        member.hears()
        member.outcomes.clear()
    return job, members


# ------------------------------------------------------------------------------------------------------ a job begins


def test_all_start_with_the_first_ones_weights() -> None:
    job, a, b, c = Job.of("abc", least=3)
    they_ask(a, b)
    assert (a.hears(), b.hears()) == ([], [])
    c.asks()
    assert a.hears() == ["quorum 1 step 0 healthy"]
    assert b.hears() == ["quorum 1 step 0 healthy"]
    assert c.hears() == ["quorum 1 step 0 healthy"]
    they_vote(a, b, c)
    assert (a.hears(), b.hears(), c.hears()) == (["commit"], ["commit"], ["commit"])
    assert {member.replica.version for member in (a, b, c)} == {
        StateVersion(step=1, quorum_id=1, epoch=job.lighthouse.epoch)
    }


def test_the_next_step_goes_on_in_the_same_quorum() -> None:
    _job, (a, b) = trained("a", "b", steps=2)
    assert (a.formed.quorum_id, a.formed.version.step, b.formed.quorum_id) == (1, 1, 1)


def test_fewer_than_min_replicas_are_told_who_is_waited_for_and_how_long() -> None:
    job, a = Job.of("a", least=2)
    a.asks()
    job.passes(2.0)
    assert a.hears() == ["pending: 1 of at least 2 replica groups are here (a:1)"]


# ------------------------------------------------------------------------------------------------------------ losses


def test_kill_in_the_step_is_pushed_at_once_and_survivors_discard_one_step() -> None:
    _job, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    first = a.formed.quorum_id
    a.hears(), b.hears()
    c.dies()
    assert a.hears() == b.hears() == ["broken by c:1, lost"]
    they_vote(a, b)
    assert (a.outcomes, b.outcomes) == ([Outcome.DISCARD], [Outcome.DISCARD])
    they_ask(a, b)
    assert a.formed.quorum_id > first
    they_vote(a, b)
    assert (a.step, b.step) == (2, 2)


def test_kill_after_all_survivors_voted_costs_nothing() -> None:
    _job, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    they_vote(a, b)
    c.dies()
    assert (a.outcomes, b.outcomes) == ([Outcome.COMMIT], [Outcome.COMMIT])


def test_a_survivor_that_has_the_sum_commits_with_those_that_have_it() -> None:
    _job, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    a.votes()
    c.dies()
    assert a.outcomes == []
    b.has_the_sum()
    b.votes()
    assert (a.outcomes, b.outcomes) == ([Outcome.COMMIT], [Outcome.COMMIT])


def test_one_that_leaves_on_purpose_is_gone_at_once() -> None:
    _job, (a, b) = trained("a", "b")
    they_ask(a, b)
    b.leaves()
    assert a.hears()[-1] == "broken by b:1, lost"
    a.votes()
    a.asks()
    assert a.hears()[-1].endswith("step 1 healthy")


def test_a_stopped_group_is_dropped_and_finds_itself_dead_when_it_wakes() -> None:
    job, (a, b) = trained("a", "b")
    they_ask(a, b)
    b.is_stopped = True
    b.hears()
    job.passes(6.0)
    assert "broken by b:1, lost" in a.hears()
    a.votes()
    a.asks()
    a.votes()
    assert a.step == 2
    b.is_stopped = False
    b.connects()
    assert b.hears() == ["broken by b:1, lost"]
    b.votes()
    assert b.outcomes == [Outcome.DISCARD]
    job.lets_in(b, others=[a])
    assert (b.formed.role.value, b.formed.version.step) == ("healthy", 2)
    they_vote(b, a)
    assert a.replica.version == b.replica.version


def test_who_lost_its_connection_after_its_vote_still_hears_the_decision() -> None:
    _job, (a, b) = trained("a", "b")
    they_ask(a, b)
    b.votes()
    b.is_cut_off()
    a.has_the_sum()
    a.votes()
    b.connects()
    b.says_again()
    assert (a.outcomes, b.outcomes) == ([Outcome.COMMIT], [Outcome.COMMIT])
    assert a.replica.version == b.replica.version


def test_a_late_approval_of_one_taken_for_dead_commits_only_what_was_committed() -> None:
    _job, (a, b) = trained("a", "b")
    they_ask(a, b)
    b.is_cut_off()
    a.votes()  # its collective was aborted
    b.votes()
    b.connects()
    b.says_again()
    assert (a.outcomes, b.outcomes) == ([Outcome.DISCARD], [Outcome.DISCARD])


def test_one_that_was_cut_off_and_asks_anew_does_not_spoil_the_others_step() -> None:
    _job, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    a.votes()
    c.is_cut_off()
    c.connects()
    c.asks()
    b.has_the_sum()
    b.votes()
    assert (a.outcomes, b.outcomes) == ([Outcome.COMMIT], [Outcome.COMMIT])


def test_a_lighthouse_that_slept_drops_nobody_for_its_own_silence() -> None:
    job, (a, b) = trained("a", "b")
    job.now += 60.0
    they_ask(a, b)
    assert len(job.lighthouse.members) == 2
    assert any("paused" in line for line in job.log)


# ----------------------------------------------------------------------------- who comes, and who sits out


def sits_out() -> tuple[Job, Member, Member, Member]:
    """Two healthy members in a step with one that lacks the state, and must not load it."""
    job, (a, b) = trained("a", "b")
    j = job.join("j")
    j.asks(allow_heal=False)
    they_ask(a, b)
    assert (a.formed.role.value, j.formed.role.value) == ("healthy", "idle")
    for member in (a, b, j):
        member.hears()
    return job, a, b, j


def test_a_newcomer_is_announced_so_that_somebody_captures_its_state() -> None:
    job, (a, _b) = trained("a", "b")
    job.join("j")
    assert a.heard_joiner()
    assert a.replica.capture_wanted


def test_the_death_of_one_that_sits_out_costs_one_step_at_most() -> None:
    job, a, b, j = sits_out()
    j.dies()
    assert a.hears() == ["broken by j:1, lost"]
    they_vote(a, b)
    job.step(a, b)
    assert (a.outcomes, a.step) == ([Outcome.DISCARD, Outcome.COMMIT], 2)


def test_nobody_waits_for_the_vote_of_one_that_sits_out() -> None:
    _job, a, b, j = sits_out()
    they_vote(a, b)
    assert (a.outcomes, b.outcomes, j.hears()) == ([Outcome.COMMIT], [Outcome.COMMIT], ["left_behind"])
    j.votes()
    assert j.outcomes == [Outcome.LEFT_BEHIND] and j.step == 0


def test_one_that_sits_out_and_abandons_the_step_breaks_the_collectives() -> None:
    _job, a, b, j = sits_out()
    j.asks()
    assert a.hears() == b.hears() == ["broken by j:1"] and j.formed.warms_up
    a.has_the_sum()
    b.has_the_sum()
    they_vote(a, b)
    assert (a.outcomes, b.outcomes) == ([Outcome.COMMIT], [Outcome.COMMIT]), "they had what they waited for"


def test_a_healthy_member_that_abandons_the_step_ends_it_for_all() -> None:
    _job, (a, b) = trained("a", "b")
    they_ask(a, b)
    a.hears()
    b.asks()
    assert a.hears() == ["broken by b:1"]
    a.votes()
    a.asks()
    assert (a.outcomes, a.formed.version.step, b.formed.version.step) == ([Outcome.DISCARD], 1, 1)


def test_one_that_could_not_connect_trains_where_it_alone_is_left_with_the_newest_state() -> None:
    job, (a, b) = trained("a", "b")
    j = job.join("j")
    job.lets_in(j, others=[a, b])
    for _ in range(2):
        job.passes(10.0)
        they_vote(a, b, j, connects=False)
        they_ask(a, b, j, can_serve=True)
    assert j.replica.phase.value == "asking" and a.formed.replica_world_size == 2, "it is not tried for a while"
    a.dies()
    b.dies()
    fresh = job.join("f")
    fresh.asks()
    job.passes(1.0)
    assert j.formed.role.value == "healthy" and fresh.formed.warms_up


# ------------------------------------------------------------------------------------------------- the newest step


def lost_newest_step() -> tuple[Job, Member, Member]:
    """`a` committed step 3 and is gone; `old` holds step 1."""
    job, (a, old) = trained("a", "old", join_timeout_s=10.0)
    they_ask(old, a)
    old.is_cut_off()
    a.votes()
    job.step(a)
    job.step(a)
    assert a.step == 3
    old.connects()
    a.dies()
    return job, a, old


def test_when_all_holders_are_gone_there_is_no_quorum_and_a_line_names_the_step_and_the_remedies() -> None:
    job, _a, old = lost_newest_step()
    fresh = job.join("f")
    they_ask(old, fresh)
    job.passes(120.0)
    pending = old.hears()[-1]
    assert old.formed.version.step == 1
    assert "step 3 was committed, but the newest whole state here is of step 1" in pending
    assert "a:1 is gone" in pending
    assert "allow-step-loss" in pending


def test_a_loss_is_said_at_once_while_there_are_too_few_groups_for_a_quorum() -> None:
    job, (a, b) = trained("a", "b", least=2, steps=2)
    a.dies()
    b.dies()
    fresh = job.join("f")
    fresh.asks()
    job.passes(2.0)
    (pending,) = fresh.hears()
    assert pending.startswith(
        "pending: 1 of at least 2 replica groups are here (f:1). No group here holds step 2, which"
    )
    assert pending.endswith("was committed; gone are: a:1, b:1")


def test_a_group_whose_own_state_is_torn_hears_that_nobody_else_is_to_blame() -> None:
    job, (a,) = trained("a", steps=2)
    fresh = job.join("f")
    a.replica.load_torn()
    they_ask(a, fresh)
    job.passes(120.0)
    assert "(the state of a:1 is torn, by an interrupt or an error)" in a.hears()[-1]


def test_the_job_goes_on_with_a_state_that_was_restored_on_purpose() -> None:
    job, _a, old = lost_newest_step()
    restored = job.join("r")
    restored.replica.restore(2)
    job.passes(11.0)
    they_ask(old, restored)
    assert (restored.formed.role.value, restored.formed.version.step) == ("healthy", 2)
    assert (old.formed.role.value, old.formed.version) == ("healthy", restored.formed.version)
    assert any("steps 3 to 3 are lost" in line for line in job.log)


def test_before_it_goes_back_it_waits_for_holders_that_were_cut_off_a_moment_ago() -> None:
    job, a, old = lost_newest_step()
    restored = job.join("r")
    restored.replica.restore(2)
    they_ask(old, restored)
    assert restored.formed is None
    job.passes(9.0)
    assert restored.formed is None
    assert any(
        "waiting at most 10 s for a, which held a newer state and was disconnected" in words
        for words in restored.hears()
    )
    a.is_stopped = False
    a.connects()
    a.asks(can_serve=True)
    assert (a.formed.role.value, a.formed.version.step, restored.formed.role.value) == ("healthy", 3, "learner")


def test_it_does_not_wait_for_a_holder_whose_group_has_started_anew() -> None:
    job, _a, old = lost_newest_step()
    again = job.join("a", life=2)
    again.replica.restore(2)
    they_ask(old, again)
    assert again.formed.role.value == "healthy"


def test_it_never_goes_back_while_a_holder_lives_and_trains() -> None:
    job, (a,) = trained("a", steps=3, join_timeout_s=2.0)
    a.asks()  # a long step
    restored = [job.join(f"r{i}") for i in range(3)]
    for member in restored:
        member.replica.restore(2)
        member.warms_up()
    job.passes(60.0)
    assert {member.replica.phase.value for member in restored} == {"asking"}
    a.votes()
    a.asks(can_serve=True)
    assert {member.formed.held and member.formed.version.step for member in restored} == {a.step} == {4}


def test_the_operators_word_lets_the_job_go_on_from_the_best_state_left() -> None:
    job, _a, old = lost_newest_step()
    fresh = job.join("f")
    they_ask(old, fresh)
    job.operator_allows_loss()
    assert (old.formed.role.value, old.formed.version.step) == ("healthy", 1)


def test_the_operators_word_is_for_one_quorum() -> None:
    job, _a, old = lost_newest_step()
    old.asks()
    job.operator_allows_loss()
    assert not job.lighthouse.allow_step_loss


def test_the_same_groups_go_back_in_a_new_quorum_so_that_lost_steps_have_other_names_than_those_that_come() -> None:
    job, (a, b) = trained("a", "b")
    before = a.replica.version
    a.asks(can_serve=True)
    b.asks()
    they_vote(a, b)
    b.replica.version = before  # it comes with the state of before, and does not load
    a.asks(can_serve=True)
    b.asks()
    a.votes()
    b.votes(load=False)
    lost, quorum_id = a.replica.version, a.formed.quorum_id
    b.replica.configured = quorum_id, a.formed.epoch
    a.replica.load_torn()
    a.asks()
    b.asks(can_serve=True)
    job.passes(60.0)
    job.operator_allows_loss()
    assert (b.formed.version, b.formed.quorum_id) == (before, quorum_id + 1)
    assert job.lighthouse._job.history.is_void(lost)


def test_a_holder_that_comes_back_after_the_job_went_back_heals_and_does_not_take_over() -> None:
    job, a, old = lost_newest_step()
    old.asks()
    job.operator_allows_loss()
    old.votes()
    a.is_stopped = False
    a.connects()
    old.asks(can_serve=True)
    a.asks()
    old.votes()
    old.asks(can_serve=True)
    assert (old.formed.role.value, a.formed.role.value) == ("healthy", "learner")


def test_nor_after_a_restart_of_the_lighthouse_in_between() -> None:
    job, a, old = lost_newest_step()
    old.asks()
    job.operator_allows_loss()
    old.votes()
    job.restart()
    a.is_stopped = False
    they_connect(a, old)
    a.asks()
    old.asks(can_serve=True)
    job.passes(6.0)
    assert (old.formed.role.value, a.formed.role.value) == ("healthy", "learner")


def test_a_commit_that_nobody_waited_for_is_none() -> None:
    job, (a,) = trained("a")
    a.asks()
    vote = a.replica.vote()
    a.replica.decision_unknown()  # the lighthouse took too long
    a.says(vote)
    assert job.lighthouse.newest_step == 2
    a.asks()
    assert (job.lighthouse.newest_step, a.formed.role.value, a.formed.version.step) == (1, "healthy", 1)


def test_a_commit_whose_last_missing_vote_is_of_one_that_died_is_none_if_the_others_gave_up_waiting() -> None:
    job, (a, b) = trained("a", "b", least=2)
    they_ask(a, b)
    a.votes()
    a.replica.decision_unknown()
    a.asks(can_serve=True)
    b.dies()
    again = job.join("b", life=2)
    again.asks()
    assert (job.lighthouse.newest_step, a.formed.role.value, a.formed.version.step) == (1, "healthy", 1)


def test_a_torn_state_is_not_trained_from_and_the_line_says_what_to_do() -> None:
    job, (a,) = trained("a", steps=0)
    a.replica.load_torn()
    a.asks()
    job.operator_allows_loss()
    job.passes(2.0)
    assert a.formed is None
    assert "no replica group here has a whole state (a:1" in a.hears()[-1]


def test_a_step_whose_collective_failed_names_the_group_that_had_not_come_to_it() -> None:
    job, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    a.waits_in(0)
    b.waits_in(0)
    a.votes(error="CollectiveFailedError: timed out", broken=True)
    said = "a:1: CollectiveFailedError: timed out; c:1 had not come to a collective that the others wait in"
    assert job.log[-1] == f"step 1 of quorum 1 is discarded: {said}"


def test_a_step_that_ended_by_a_death_blames_nobody_else() -> None:
    job, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    a.waits_in(0)
    c.dies()
    they_vote(a, b, error="c:1: its connection closed", broken=True)
    assert job.log[-1] == "step 1 of quorum 1 is discarded: a:1: c:1: its connection closed"


# ----------------------------------------------------------------------------------------------------------- refusals


def test_an_older_process_of_a_group_is_refused_once_a_newer_one_runs() -> None:
    job, (a, b) = trained("a", "b")
    newer = job.join("a", life=2)
    assert a.hears()[-1] == "refused: superseded"
    a.connects()
    assert a.hears()[-1] == "refused: superseded"
    newer.asks()
    b.asks(can_serve=True)
    assert newer.formed.warms_up


def test_two_groups_of_one_id_that_end_each_other_are_told_to_have_one_each() -> None:
    state, said = LighthouseState(Job().settings, "e"), []
    for life in range(1, 4):
        said += state.handle(Received(f"c{life}", Hello(protocol=PROTOCOL_VERSION, replica_id=f"g:{life}")), 0.0)
    own = "each group needs a replica id of its own (Manager(replica_id=...), which the examples make from REPLICA_GROUP_ID)"
    refusals = [i.message for i in said if isinstance(i, Send) and isinstance(i.message, Refused)]
    assert [own in refusal.reason for refusal in refusals] == [True, True]
    lines = [i.line for i in said if isinstance(i, Log) and i.is_warning]
    assert [line.partition(". ")[0] for line in lines] == [
        "g:2 takes the place of g:1, which was connected",
        "g:3 takes the place of g:2, which was connected",
    ]
    assert all(own in line for line in lines)


def test_an_older_process_that_was_away_when_the_newer_one_came_is_refused_too() -> None:
    job, (a, _b) = trained("a", "b")
    a.is_cut_off()
    job.join("a", life=2)
    a.connects()
    assert a.hears()[-1] == "refused: superseded"
    assert "a:2" in job.lighthouse.members


def test_another_protocol_is_refused_with_what_to_do() -> None:
    state = LighthouseState(Job().settings, "e")
    sent = state.handle(Received("c", Hello(protocol=99, replica_id="a:1")), 0.0)
    assert isinstance(sent[0], Send)
    assert isinstance(sent[0].message, Refused)
    assert sent[0].message.code == "version"
    assert "install the same version" in sent[0].message.reason


def test_who_does_not_say_hello_first_is_refused() -> None:
    state = LighthouseState(Job().settings, "e")
    sent = state.handle(Received("c", Heartbeat()), 0.0)
    assert isinstance(sent[0], Send)
    assert isinstance(sent[0].message, Refused)
    assert state.handle(ConnectionClosed("c"), 0.0) == []


# ----------------------------------------------------------------------------------------------------------- one step


def test_the_same_step_is_tried_again_in_the_same_quorum_after_an_unbroken_discard() -> None:
    _job, (a,) = trained("a")
    a.asks()
    first = a.formed
    a.votes(error="loss is not a number")
    a.replica.configured = (first.quorum_id, first.epoch)  # nothing was wrong with its collectives
    vote_of_the_first_try = a.last_vote
    a.asks()
    second = a.formed
    assert second.version == first.version
    a.votes()
    assert a.outcomes == [Outcome.DISCARD, Outcome.COMMIT]
    a.says(vote_of_the_first_try)
    assert a.step == 2


def test_min_replica_size_of_the_manager_keeps_a_step_from_counting() -> None:
    job = Job(least=1)
    a = job.join("a", min_replica_size=2)
    a.asks()
    a.votes()
    assert (a.outcomes, a.step) == ([Outcome.DISCARD], 0)


def test_answers_do_not_grow_with_the_number_of_members() -> None:
    _job, members = trained(*(f"m{i}" for i in range(40)), least=40)
    formed: Answer = members[-1].formed
    assert (formed.replica_world_size, formed.sources, formed.destinations) == (40, formed.sources[:MAX_SOURCES], [])


# --------------------------------------------------------------------------------------- what the simulation has found


def test_one_that_was_left_out_of_a_commit_that_nobody_followed_does_not_claim_it_later() -> None:
    job, (a,) = trained("a")
    j = job.join("j")
    j.asks(allow_heal=False)
    a.asks()
    vote = a.replica.vote()
    a.replica.decision_unknown()  # the lighthouse took too long
    a.says(vote)
    a.asks()
    j.votes()
    j.is_cut_off()
    j.connects()
    assert job.lighthouse.newest_step == 1


def test_what_a_member_claims_of_this_lighthouses_own_life_is_known_better_here() -> None:
    job, (a,) = trained("a")
    a.is_cut_off()
    a.connects(newest_step=9)
    assert job.lighthouse.newest_step == 1


def test_messages_on_a_connection_that_was_given_up_are_not_answered_with_a_refusal() -> None:
    job, (a,) = trained("a")
    old = a.connection
    a.is_stopped = True
    job.passes(6.0)
    assert "a:1" not in job.lighthouse.members
    assert job.lighthouse.handle(Received(old, Heartbeat()), job.now) == []
    assert job.lighthouse.handle(ConnectionClosed(old), job.now) == []
    assert isinstance(job.lighthouse.handle(Received(old, Heartbeat()), job.now)[0], Send), (
        "nothing is remembered of it"
    )


def test_one_that_sits_out_and_breaks_the_collectives_is_named_to_those_who_wait_in_them() -> None:
    job, a, b, j = sits_out()
    j.votes(error="a collective failed", broken=True)
    assert (a.hears(), b.hears()) == (["broken by j:1"], ["broken by j:1"])
    they_vote(a, b)
    job.step(a, b)
    assert a.outcomes == [Outcome.DISCARD, Outcome.COMMIT]


# ------------------------------------------------------------------------------------------------------ where they meet


def test_the_quorum_stays_at_its_store_while_the_host_lives_and_then_moves_to_the_one_that_stands_by() -> None:
    job, (b, c) = trained("b", "c")
    assert (b.formed.meets.store_address, b.formed.meets.standby_store_address) == ("store-b:1", "store-c:1")
    a = job.join("a")
    job.lets_in(a, others=[b, c])
    they_vote(a, b, c)
    job.step(a, b, c)
    assert {m.formed.meets.store_address for m in (a, b, c)} == {"store-b:1"}, "not the first one's, the one it was"
    b.dies()
    they_vote(a, c, error="aborted")
    job.step(a, c)
    assert (a.formed.meets.store_address, a.formed.meets.standby_store_address) == ("store-c:1", "store-a:1")


def test_one_that_came_in_and_asks_before_the_decision_holds_no_quorum_up_when_the_step_was_committed_with_it() -> None:
    job, (a,) = trained("a")
    j = job.join("j")
    job.lets_in(j, others=[a])
    job.join("x")  # it has not asked
    j.votes()
    j.asks()
    a.votes()
    a.asks(can_serve=True)
    assert a.hears()[1:] == ["quorum 2 step 1 healthy", "commit", "quorum 3 step 2 healthy"]


def test_several_groups_that_would_have_to_heal_and_can_load_nothing_are_refused_and_the_others_train_on() -> None:
    job, (a,) = trained("a")
    newcomers = [job.join(name) for name in "bc"]
    they_ask(*newcomers, can_load=False)
    a.asks(can_serve=True)
    assert [member.hears() for member in newcomers] == [["refused: no state"]] * 2
    assert a.hears() == ["quorum 1 step 1 healthy"]


def test_who_would_have_to_heal_and_can_load_nothing_is_refused_by_name_and_the_others_train_on() -> None:
    job, a = Job.of("a", least=1)
    a.asks(can_load=False)
    a.votes()
    assert a.hears() == ["quorum 1 step 0 healthy", "commit"]
    b = job.join("b")
    they_ask(b, a, can_load=False)
    assert b.hears() == ["refused: no state"]
    assert b.connection is None
    assert a.hears() == ["quorum 1 step 1 healthy"], "with its process group"


def test_groups_that_start_with_equal_weights_can_do_without_loading() -> None:
    _, a, b = Job.of("ab", least=2, init_sync=False)
    they_ask(a, b, can_load=False)
    assert a.hears() == b.hears() == ["quorum 1 step 0 healthy"]


def test_a_vote_costs_the_same_however_many_were_cast_before() -> None:
    class Votes(dict[str, object]):
        num_read = 0

        def items(self):  # type: ignore[no-untyped-def]
            type(self).num_read += len(self)
            return super().items()

    job, members = trained(*(f"g{number}" for number in range(40)))
    they_ask(*members)
    assert job.lighthouse.round is not None
    job.lighthouse.round.tally.votes = Votes()  # type: ignore[assignment]
    they_vote(*members)
    assert {member.hears()[-1] for member in members} == {"commit"}
    assert Votes.num_read <= len(members)
