"""A spare follows those that train, and takes the place of one that is lost. Nobody waits for it before."""

from __future__ import annotations

import pytest
from lighthouse_script import Job, Member, they_ask, they_vote
from test_learning import trains

from torchft_ckpt.core.coordination.messages import Given, JoinProgress, Receives, Role, StateVersion


def with_spares(
    num_spares: int = 1, *, num_training: int = 2, least: int = 1
) -> tuple[Job, list[Member], list[Member]]:
    """A job whose groups have trained three steps, and whose spares have received the state."""
    job = Job(least=least)
    at_work = [job.join(name) for name in "abc"[:num_training]]
    spares = [job.join(f"s{number}", spare=True) for number in range(num_spares)]
    trains(job, *at_work)
    for spare in spares:
        spare.warms_up(reach_s=0.1, can_follow=True)
    for _ in range(2):
        trains(job, *at_work)
    for spare in spares:
        if spare.formed is not None and not spare.formed.follows:  # it waits for the first one to have the state
            trains(job, *at_work)
        rests(spare)
    for member in (*at_work, *spares):
        member.hears()
    return job, at_work, spares


def rests(spare: Member, step: int = 3) -> None:
    """It has received the state, and keeps it."""
    formed = spare.formed
    assert formed is not None and formed.why is Given.TO_STAY
    spare.says(JoinProgress(quorum_id=formed.quorum_id, step=step, reach_s=0.0, does=Receives.NOTHING))


def steps_in(spare: Member) -> None:
    """It asks for what has changed since it received its state."""
    spare.follows()
    spare.asks(at_end=True, reach_s=0.1)


def comes_in(job: Job, newcomer: Member, *at_work: Member) -> None:
    """One that has asked is given the state, and trains with the others from then on."""
    they_ask(*at_work, can_serve=True)
    job.passes(0.1)  # so long they wait for a spare that was called
    newcomer.comes_in()
    trains(job, newcomer)
    they_vote(*at_work)


def receives_newest(spare: Member, *at_work: Member) -> None:
    """It begins to receive the state of the step that these begin."""
    spare.follows()
    spare.asks(at_end=True, reach_s=0.1, can_follow=True)
    they_ask(*at_work, can_serve=True)
    assert spare.formed is not None and spare.formed.follows and spare.formed.version == at_work[0].replica.version


def needed(member: Member) -> list[str]:
    return [words for words in member.hears() if words.startswith("needed")]


@pytest.mark.parametrize("has_asked", [False, True])
def test_the_first_quorum_forms_without_a_spare_and_a_spare_follows_from_there(has_asked: bool) -> None:
    job = Job()
    a, b, spare = job.join("a"), job.join("b"), job.join("s", spare=True)
    if has_asked:
        spare.asks()
    they_ask(a, b)
    assert a.formed is not None and a.formed.replica_world_size == 2
    they_vote(a, b)
    if not has_asked:
        spare.asks()
    trains(job, a, b)
    spare.ends()
    spare.asks(at_end=True, reach_s=0.1, can_follow=True)
    trains(job, a, b)
    assert spare.formed is not None and (spare.formed.role, spare.formed.why) == (Role.LEARNER, Given.TO_STAY)
    assert (a.formed.quorum_id, len(a.outcomes)) == (1, 3), "nothing happens to the others"


def test_it_is_called_at_once_when_a_group_is_lost_and_contributes_when_its_step_is_repeated() -> None:
    _, (a, b), (spare,) = with_spares()
    they_ask(a, b)
    b.dies()
    assert needed(spare) == ["needed: 1 of 2 replica groups train (a:1), and it is a spare"]
    steps_in(spare)
    a.votes()
    a.asks(can_serve=True)
    spare.comes_in()
    spare.asks()
    assert spare.formed is not None and spare.formed.role is Role.HEALTHY
    assert (spare.formed.version.step, spare.formed.num_contributors) == (3, 2)


def test_what_it_received_is_of_an_attempt_that_is_over_when_it_is_waited_for_so_it_is_given_the_state_of_now() -> None:
    _, (a, b), (spare,) = with_spares()
    receives_newest(spare, a, b)
    b.dies()
    steps_in(spare)
    a.votes()
    received = spare.replica.version
    a.asks(can_serve=True)  # the same step, with the batch after the one that it had captured
    assert spare.formed is not None and spare.formed.held and spare.formed.version == received == a.replica.version
    assert spare.plan is not None and spare.plan.load
    spare.follows(load=False)
    assert spare.replica.is_behind and not spare.replica.came_in, "it could not receive that, so it lacks the state"


def test_nor_does_it_begin_that_step_by_itself_with_what_it_received() -> None:
    _, (a, b), (spare,) = with_spares(least=2)
    receives_newest(spare, a, b)
    b.votes(error="its loss is not a number")
    a.votes()
    spare.follows()
    b.dies()
    spare.asks()
    assert spare.replica.warms_up
    spare.ends()
    spare.asks(at_end=True, reach_s=0.1)
    a.asks(can_serve=True)
    spare.comes_in()
    spare.asks()
    assert spare.formed is not None and (spare.formed.role, spare.formed.num_contributors) == (Role.HEALTHY, 2)


def test_one_whose_givers_die_goes_on_from_what_it_received_before_and_gives_that_to_others() -> None:
    """Nobody who is not on trial makes that step with it, so what it has is the state of the job."""
    job, (a, b), (spare,) = with_spares()
    receives_newest(spare, a, b)
    b.dies()
    steps_in(spare)
    a.votes()
    a.asks(can_serve=True)
    assert spare.replica.is_on_trial, "from when it is given a state on, also if it cannot load that"
    a.dies()
    spare.follows(load=False)
    spare.asks(at_end=True)
    spare.ends()
    spare.asks()
    assert spare.formed is not None and (spare.formed.role, spare.formed.num_contributors) == (Role.HEALTHY, 1)
    assert not spare.replica.is_on_trial
    spare.votes()
    assert spare.step == 4 and spare.replica.writer_number == 0
    c = job.join("c")
    job.lets_in(c, others=[spare])
    assert c.formed is not None and c.formed.role is Role.HEALTHY
    assert c.replica.is_on_trial and not spare.replica.is_on_trial


def test_it_stays_when_the_lost_group_comes_back_and_no_other_is_called_for_the_next_one() -> None:
    job, (a, b), (spare, other) = with_spares(2)
    b.dies()
    assert len(needed(spare)) == 1 and needed(other) == []
    steps_in(spare)
    comes_in(job, spare, a)
    b = job.join("b", life=2)
    b.warms_up(reach_s=0.1)
    comes_in(job, b, a, spare)
    assert a.formed is not None and a.formed.num_contributors == 3
    b.dies()
    assert needed(other) == [], "two train, as at first"
    trains(job, a, spare)
    a.dies()
    assert len(needed(other)) == 1


def test_as_many_are_called_as_are_missing_and_another_one_for_one_that_dies_on_its_way() -> None:
    job, (_, b, c), (first, second, third) = with_spares(3, num_training=3)
    first.says(JoinProgress(quorum_id=1, step=1, reach_s=0.0, does=Receives.NOTHING))
    b.dies()
    assert (needed(first), len(needed(second)), needed(third)) == ([], 1, []), "the closest"
    second.dies()
    assert (needed(first), len(needed(third))) == ([], 1)
    c.dies()
    assert len(needed(first)) == 1
    assert any("s0:1 is called: 1 of 3 replica groups train" in line for line in job.log)


def test_a_call_is_taken_back_where_the_lost_group_is_in_before_the_spare_is_close() -> None:
    job, (a, b), (spare,) = with_spares()
    b.dies()
    assert len(needed(spare)) == 1
    b = job.join("b", life=2)
    b.warms_up(reach_s=0.1)
    comes_in(job, b, a)
    steps_in(spare)
    for _ in range(3):
        trains(job, a, b)
    assert any("it is a spare" in words for words in spare.hears())
    assert a.formed is not None and a.formed.replica_world_size == 2


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_where_the_others_are_too_few_to_train_a_spare_trains(when: str) -> None:
    if when == "at the start":
        job = Job(least=2)
        a, spare = job.join("a"), job.join("s", spare=True)
        they_ask(a, spare)
    else:
        job, (a, b), (spare,) = with_spares(least=2)
        b.dies()
        a.asks(can_serve=True)
        assert needed(spare)
        steps_in(spare)
        spare.comes_in()
        spare.asks()
    assert spare.formed is not None and a.formed is not None
    assert (a.formed.replica_world_size, spare.formed.role) == (2, Role.HEALTHY)


def test_a_spare_that_may_load_nothing_in_a_step_computes_it_alone_and_follows_after_it() -> None:
    """Its loop owes a backward pass through the weights that are here, as that of a GAN: it waited in that step for ever."""
    job, a, b = Job.of("ab", 1, least=1)
    spare = job.join("s", spare=True)
    spare.asks(can_follow=True, reach_s=1.0)
    spare.ends()
    spare.asks(allow_heal=False)
    assert spare.replica.phase.value == "training" and spare.replica.warms_up
    spare.ends()
    spare.asks(at_end=True, can_follow=True, reach_s=1.0)
    job.step(a, b)
    they_ask(a, b, can_serve=True)
    assert spare.formed is not None and spare.formed.why is Given.TO_STAY


def test_it_learns_that_the_job_is_over() -> None:
    _, (a, b), (spare,) = with_spares()
    for member in (a, b):
        member.says(member.replica.locate(has_finished=True))
    assert needed(spare) == ["needed: the job is over"]
    steps_in(spare)
    assert spare.hears()[-1] == "refused: finished"


def test_beside_a_spare_that_has_its_state_another_group_receives_one() -> None:
    job, (a, b), _ = with_spares()
    late = job.join("j")
    late.warms_up(reach_s=60.0, can_follow=True)
    trains(job, a, b)
    assert late.formed is not None and late.formed.follows and late.formed.why is not Given.TO_STAY


def test_the_operator_sees_what_a_spare_does() -> None:
    job, _, (spare,) = with_spares()
    job.passes(11.0)
    spare.says(JoinProgress(quorum_id=1, step=3, reach_s=0.0, does=Receives.NOTHING))
    said = "s0:1 is a spare, and follows: it has received the state of step 3, and keeps it"
    assert any(line.startswith(said) for line in job.log)


@pytest.mark.parametrize("asks", [True, False])
def test_a_quorum_waits_a_tenth_of_a_second_for_a_called_spare_that_is_close(asks: bool) -> None:
    job, (a, b), (spare,) = with_spares()
    a.asks(can_serve=True)
    b.dies()
    assert a.hears() == []
    if asks:
        job.passes(0.02)
        steps_in(spare)
        spare.comes_in()
        spare.asks()
    else:
        job.passes(0.1)
    assert a.hears()[-1].startswith("quorum 2 step 3")
    assert (spare.formed is not None and spare.formed.role is Role.HEALTHY) == asks


def test_a_spare_that_is_still_receiving_holds_no_other_group_up() -> None:
    job = Job()
    a, b, spare = job.join("a"), job.join("b"), job.join("s", spare=True)
    trains(job, a, b)
    spare.warms_up(reach_s=600.0, can_follow=True)
    trains(job, a, b)
    spare.still_needs(500.0)
    back = job.join("c")
    back.warms_up(reach_s=60.0, can_follow=True)
    trains(job, a, b)
    assert back.formed is not None and back.formed.follows


@pytest.mark.parametrize("restored", [(None, 100), (90, 100), (100, 100), (100, 90)])
def test_a_job_is_started_from_the_newest_checkpoint_also_where_a_spare_has_it(
    restored: tuple[int | None, int],
) -> None:
    job = Job()
    a, b, spare = job.join("a"), job.join("b"), job.join("s", spare=True)
    if restored[0] is not None:
        a.replica.restore(restored[0])
        b.replica.restore(restored[0])
    spare.replica.restore(restored[1])
    they_ask(spare, a, b, can_serve=True)
    newest = max(restored[0] or 0, restored[1])
    assert a.formed is not None and a.formed.version.step == newest
    assert a.formed.replica_world_size == (3 if restored[1] > (restored[0] or 0) else 2)


def test_a_job_goes_on_from_a_spare_that_alone_holds_the_newest_state() -> None:
    """The lighthouse restarted, and a group committed a step from a checkpoint before the spare was back that had trained."""
    job = Job()
    a, spare = job.join("a"), job.join("s", spare=True)
    spare.replica.version = StateVersion(step=8, quorum_id=1, epoch="earlier")
    job.restart()
    a.connects()
    a.replica.restore(1)
    a.asks(can_serve=True)
    a.votes()
    spare.connects()
    job.lighthouse._job.quorum_members["a:1"] = (
        None  # where its vote came at last, as in plain seed 1034 of the simulation
    )
    they_ask(spare, a, can_serve=True)
    job.passes(10.0)
    assert spare.formed is not None and (spare.formed.role, spare.formed.version.step) == (Role.HEALTHY, 8)
    assert a.formed is not None and a.formed.warms_up


def test_a_spare_whose_call_was_taken_back_follows_again() -> None:
    job, (a, b), (spare,) = with_spares()
    b.is_cut_off()
    assert len(needed(spare)) == 1
    b.connects()
    b.asks()
    a.asks(can_serve=True)
    spare.follows()
    spare.asks(at_end=True, reach_s=0.1, can_follow=True)
    they_vote(a, b)
    for _ in range(3):
        job.passes(30.0)
        trains(job, a, b)
    assert spare.formed is not None and spare.formed.why is Given.TO_STAY


def test_a_called_spare_that_is_still_starting_counts_in_no_majority() -> None:
    job, a, b, c, d = Job.of("abcd", join_timeout_s=10.0)
    for _ in range(3):
        trains(job, a, b, c, d)
    job.join("s", spare=True)
    d.dies()
    they_ask(a, b, can_serve=True)
    job.passes(11.0)  # c hangs, with its heart beating
    assert a.formed is not None and (a.formed.replica_world_size, a.formed.quorum_id) == (2, 2)


def test_a_spare_that_stepped_in_and_comes_back_with_the_newest_state_trains_on() -> None:
    """Seed 20982: the others waited for it, who had asked, for ever, as a spare waits until a group is lost."""
    job, (a, b), (spare,) = with_spares()
    b.dies()
    steps_in(spare)
    comes_in(job, spare, a)
    a.is_cut_off()
    for _ in range(2):
        trains(job, spare)
    assert spare.step == a.step + 2
    job.restart()
    a.connects()
    a.asks(can_serve=True)
    job.passes(10.0)
    assert a.formed is not None and a.formed.version.step == a.step, "it is the first that comes back"
    spare.connects()
    they_ask(a, spare, can_serve=True)
    assert spare.formed is not None and spare.formed.role is Role.HEALTHY
    assert (spare.formed.version.step, a.formed.warms_up) == (spare.step, True)


def test_a_spare_that_asks_after_a_group_was_lost_comes_in_with_the_next_step() -> None:
    """Seed 20679: it was called only when the quorum without it was formed already, or was said to be impossible."""
    _, (a, b), (spare,) = with_spares()
    spare.is_cut_off()
    b.dies()
    spare.follows()
    spare.connects()
    spare.asks(at_end=True, reach_s=0.1, can_follow=True)
    a.asks(can_serve=True)
    spare.comes_in()
    spare.asks()
    assert a.formed is not None and a.formed.replica_world_size == 2


def test_a_spare_that_says_it_is_further_than_the_job_is_no_closer_than_one_that_has_the_newest() -> None:
    _, (_, b), (honest, liar) = with_spares(2)
    rests(liar, step=2**53 - 1)
    b.dies()
    assert (len(needed(honest)), needed(liar)) == (1, [])


def test_where_a_called_spare_does_not_come_the_next_one_is_called_and_both_may_join() -> None:
    job, (a, b), (slow, other) = with_spares(2)
    a.asks(can_serve=True)
    b.dies()
    a.votes()
    assert (len(needed(slow)), needed(other)) == (1, [])
    for _ in range(3):
        job.passes(5.0)
        trains(job, a)
    assert (needed(slow), len(needed(other))) == ([], 1)
    trains(job, a)
    assert (needed(slow), needed(other)) == ([], []), "nobody is called twice"
    steps_in(other)
    steps_in(slow)
    a.asks(can_serve=True)
    for spare in (other, slow):
        spare.comes_in()
        spare.asks()
    assert a.formed is not None and a.formed.num_contributors == 3


def test_one_that_did_not_come_when_it_was_called_is_called_after_all_others() -> None:
    job, (a, b, c), (slow, other, third) = with_spares(3, num_training=3)
    b.dies()
    job.passes(11.0)
    trains(job, a, c)
    assert (len(needed(slow)), len(needed(other))) == (1, 1)
    steps_in(other)
    comes_in(job, other, a, c)
    c.dies()
    assert (needed(slow), len(needed(third))) == ([], 1)


def test_a_called_spare_whose_state_all_changes_joins_at_once_however_long_that_takes() -> None:
    """It could follow again without end: what it receives is old by then."""
    job, (a, b), (spare,) = with_spares()
    b.dies()
    spare.follows()
    spare.asks(at_end=True, reach_s=5.0, can_follow=True, gains=False)
    trains(job, a)
    assert spare.formed is not None and spare.formed.held
