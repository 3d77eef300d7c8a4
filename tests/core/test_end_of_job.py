"""A job is over where its groups have finished: one that counts by itself hears so, and does not train on alone."""

from __future__ import annotations

import pytest
from lighthouse_script import Job, Member, they_ask, they_connect


def trained(*names: str, least: int = 1) -> tuple[Job, list[Member]]:
    """A job whose groups have made three steps."""
    job = Job(least=least)
    members = [job.join(name) for name in names]
    for _ in range(3):
        job.step(*members)
    return job, members


def finishes(member: Member) -> None:
    member.says(member.replica.locate(has_finished=True))
    member.hears()


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("has_asked", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_who_would_train_on_alone_hears_that_the_job_is_finished(has_asked: bool, stays: bool, least: int) -> None:
    """In a trial it trained 250 steps on, and overwrote the checkpoints of the others."""
    job, (a, b) = trained("a", "b", least=least)
    if has_asked:
        b.asks()
    finishes(a)
    if not stays:
        a.leaves()
    if not has_asked:
        b.asks()
    assert b.hears()[-1] == "refused: finished"
    assert job.lighthouse.finished_step == 3
    late = job.join("late")
    late.asks()
    assert late.hears() == ["refused: finished"]


def test_it_is_told_what_to_do_about_it() -> None:
    _, (a, b) = trained("a", "b")
    finishes(a)
    said: list[str] = []
    b.receives = lambda connection, message: said.append(message.reason)  # type: ignore[method-assign, union-attr]
    b.asks()
    (reason,) = said
    assert "finished at step 3, and b:1, which holds that step too, asks for another" in reason
    assert "each loop ends at the same step of the job" in reason


def test_a_group_of_its_own_counts_the_discarded_iteration_and_the_others_end_with_it() -> None:
    _, (a, b, c) = trained("a", "b", "c")
    finishes(b)
    finishes(c)
    a.asks()
    assert a.hears() == ["refused: finished"]


def test_of_two_that_go_on_one_that_waits_with_values_of_an_attempt_that_is_over_goes_on_too() -> None:
    job, (a, b, c) = trained("a", "b", "c")
    finishes(a)
    b.asks(can_serve=True, shows="w")
    c.asks(can_serve=True, shows="of its own")
    b.asks(can_serve=True, shows="w")  # its loss was not a number
    c.follows()
    c.asks()
    assert c.replica.warms_up and job.lighthouse.finished_step is None
    job.passes(1.0)
    assert b.hears()[-1].startswith("quorum")


def test_of_two_that_go_on_one_that_loads_what_differs_before_its_step_goes_on_too() -> None:
    job, (a, b, c) = trained("a", "b", "c")
    finishes(a)
    b.asks(can_serve=True, shows="w")
    c.asks(can_serve=True, shows="of its own")
    assert c.formed is not None and c.formed.differs and job.lighthouse.finished_step is None
    job.passes(1.0)
    assert "refused: finished" not in b.hears()
    c.follows()
    c.asks(can_serve=True, shows="w")
    assert [m.hears()[-1] for m in (b, c)] == ["quorum 2 step 3 healthy"] * 2


def test_two_groups_that_go_on_train_on_and_the_operator_hears_so() -> None:
    job, (a, b, c) = trained("a", "b", "c")
    finishes(a)
    assert job.lighthouse.finished_step is None
    for _ in range(2):  # the first is discarded
        they_ask(b, c)
        assert (b.formed.version.step, b.formed.replica_world_size) == (3, 2)  # type: ignore[union-attr]
        b.votes(error="its loss is not finite")
        c.votes()
    (line,) = [line for line in job.log if "train on" in line]
    assert line == "b:1, c:1 train on from step 3, at which a:1 finished"
    job.step(b, c)
    assert b.step == c.step == 4
    finishes(b)
    c.asks()
    assert c.hears() == ["refused: finished"]


def test_of_two_that_go_on_one_may_be_lost_and_the_other_does_not_wait_for_it() -> None:
    _, (a, b, c) = trained("a", "b", "c")
    finishes(a)
    b.asks()
    c.dies()
    assert b.formed is not None and (b.formed.version.step, b.formed.replica_world_size) == (3, 1)


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_who_has_finished_and_asks_again_goes_on_alone(is_cut_off: bool) -> None:
    job, (a, b) = trained("a", "b")
    finishes(a)
    finishes(b)
    b.leaves()
    assert job.lighthouse.finished_step == 3
    a.asks()
    a.votes(error="discarded")
    if is_cut_off:
        a.is_cut_off()
        a.connects()
    job.step(a)
    assert (a.step, job.lighthouse.finished_step) == (4, None)
    assert "a:1 train on from step 3, at which b:1 finished" in job.log


def test_that_a_group_has_finished_is_remembered_when_another_is_lost_before_a_restarted_lighthouse_forms_a_quorum() -> (
    None
):
    job, (a, b, c) = trained("a", "b", "c")
    job.restart()
    they_connect(a, b, c)
    finishes(a)
    b.leaves()
    finishes(c)
    a.asks()
    job.passes(10.0)
    assert a.hears()[-1] == "quorum 1000 step 3 healthy", "it may go on from there, as it has finished itself"


def test_who_has_gone_on_is_not_ended_by_another_that_finishes_then() -> None:
    job, (a, b) = trained("a", "b")
    finishes(a)
    a.asks()
    finishes(b)
    job.passes(1.0)
    a.votes()
    assert a.step == 4


def test_a_spare_that_has_the_last_state_does_not_keep_the_job_alive() -> None:
    job, (a, b) = trained("a", "b")
    spare = job.join("s", spare=True)
    spare.replica.version = b.replica.version
    spare.is_cut_off()
    spare.connects()
    finishes(a)
    b.asks()
    assert b.hears() == ["refused: finished"]


def test_one_that_trains_with_a_spare_goes_on_with_it_also_if_the_lighthouse_is_started_again() -> None:
    job = Job(least=3)
    a, b, spare = members = job.join("a"), job.join("b"), job.join("s", spare=True)
    job.step(*members)
    job.restart()
    for member in members:
        member.connects()
    finishes(a)
    b.asks()
    spare.asks()
    assert "refused: finished" not in b.hears() + spare.hears()


def test_a_group_that_was_lost_before_the_end_comes_too_late() -> None:
    job, (a, b) = trained("a", "b")
    b.dies()
    job.step(a)
    finishes(a)
    again = job.join("b", life=2)
    again.asks()
    assert again.hears() == ["refused: finished"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_restarted_lighthouse_hears_it_again_from_who_is_there(is_there: bool) -> None:
    job, (a, b) = trained("a", "b")
    finishes(a)
    job.restart()
    b.connects()
    if is_there:
        a.connects()
        finishes(a)  # its group says so again
    b.asks()
    job.passes(10.0)
    assert (b.hears()[-1] == "refused: finished") is is_there
