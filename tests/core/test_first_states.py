"""A job's first state gets its name before the quorum, which is held until all who begin the job have received that state."""

from __future__ import annotations

import pytest
from lighthouse_script import Job, Member, they_ask, they_vote

from torchft_ckpt.core.coordination.hold import FIRST_WITHIN_S
from torchft_ckpt.core.coordination.joining import SILENT_S
from torchft_ckpt.core.coordination.messages import Given, Outcome, Receives, Role, StateVersion

HELD = "held up: all others have asked, and wait until {} has the state of step 0"


def begins(least: int = 2, names: str = "abc", **settings: object) -> tuple[Job, list[Member]]:
    """Groups that have asked for their first step: the first one holds the job's first state, and the others receive it."""
    job = Job(least=least)
    job.gives_first = False
    members = [job.join(name, **settings) for name in names]
    they_ask(*members, can_serve=True)
    return job, members


def receives(*members: Member) -> None:
    for member in members:
        member.follows()
        member.asks_again()


def in_quorum(job: Job) -> set[str]:
    return set() if job.lighthouse.round is None else set(job.lighthouse.round.tally.roles)


def test_all_who_begin_a_job_have_its_first_state_and_are_proved_as_its_first_quorum_forms() -> None:
    job, (a, b, c) = begins(names="abc")
    name = StateVersion(step=0, quorum_id=1, epoch=job.lighthouse.epoch)
    assert (a.replica.version, a.num_held, a.hears()) == (name, 2, [HELD.format("b:1, c:1")])
    for member in (b, c):
        assert member.formed is not None and (member.formed.held, member.formed.names_state) == (True, True)
        assert ([s.replica_id for s in member.formed.sources], member.formed.version) == (["a:1"], name)
    for does in [Receives.TRANSFER] * 30 + [Receives.LOADS] * 30:  # it may take long: no step could count without it
        for member in (b, c):
            member.still_needs(100.0, does)
        job.passes(10.0)
    assert not in_quorum(job)
    receives(c, b)
    assert in_quorum(job) == {"a:1", "b:1", "c:1"}
    for member in (a, b, c):
        formed = member.formed
        assert formed is not None and (formed.role, formed.version, formed.quorum_id) == (Role.HEALTHY, name, 1)
        assert (formed.num_contributors, formed.num_proved, member.replica.is_on_trial) == (3, 3, False)
        assert member.replica.num_writers == 3, "each of them writes its share of a save of this step"
        member.votes()
    assert a.outcomes == b.outcomes == c.outcomes == [Outcome.COMMIT]


def test_groups_that_say_that_they_begin_with_equal_states_wait_for_none() -> None:
    job, members = begins(names="ab", init_sync=False)
    assert in_quorum(job) == {"a:1", "b:1"} and [member.num_held for member in members] == [0, 0]


def test_all_begin_with_the_highest_step_that_one_of_them_has_restored() -> None:
    job = Job(least=2)
    job.gives_first = False
    a, b = job.join("a"), job.join("b")
    b.replica.restore(5)
    they_ask(a, b, can_serve=True)
    assert a.formed is not None and a.formed.held and b.replica.version.step == a.formed.version.step == 5
    receives(a)
    assert a.replica.is_on_trial, (
        "its loop has read another step at its top: it writes nothing before that was compared"
    )
    for member in (a, b):
        assert member.formed is not None and (member.formed.num_proved, member.replica.num_writers) == (1, 1)
        member.votes()
    assert (a.step, b.step) == (6, 6)
    b.asks(can_serve=True, shows="w", ema="as all")
    a.asks(can_serve=True, shows="w", ema="its own")
    assert a.formed is not None and a.formed.differs, "else this would count as each group's own for good"


@pytest.mark.parametrize("how", ["dies", "leaves", "could not receive it"])
def test_a_newcomer_that_does_not_get_the_first_state_is_waited_for_no_more(how: str) -> None:
    job, (a, b, c) = begins(names="abc")
    receives(b)
    assert not in_quorum(job)
    if how == "dies":
        c.dies()
    elif how == "leaves":
        c.leaves()
    else:
        c.follows(load=False)
        c.asks_again()
        assert c.replica.warms_up, "it comes in as all do that come later"
    assert in_quorum(job) == {"a:1", "b:1"}
    they_vote(a, b)
    assert a.outcomes == b.outcomes == [Outcome.COMMIT]


@pytest.mark.parametrize("after", ["it was told", "it has received it"])
def test_one_that_hangs_before_it_begins_the_job_keeps_the_others_for_a_minute_and_comes_in_later(after: str) -> None:
    job, (a, b, c) = begins(names="abc")
    receives(b)
    if after == "it has received it":
        for _ in range(2):
            c.still_needs(0.0, Receives.LOADS)
            job.passes(5.0)
    job.passes(FIRST_WITHIN_S - 11.0)
    assert not in_quorum(job)
    job.passes(12.0)
    assert in_quorum(job) == {"a:1", "b:1"}
    assert any("wait no longer for c:1: it has said nothing for 6" in line for line in job.log)
    receives(c)
    they_vote(a, b)
    assert (a.step, c.replica.warms_up) == (1, True)
    c.ends()
    c.asks(at_end=True, reach_s=0.1)
    they_ask(a, b, can_serve=True)
    c.comes_in()
    c.asks()
    assert in_quorum(job) == {"a:1", "b:1", "c:1"}


def test_one_without_which_no_step_counts_is_waited_for_as_long_as_it_hangs() -> None:
    job, (_, b) = begins(names="ab")
    job.passes(10 * FIRST_WITHIN_S)
    assert not in_quorum(job)
    receives(b)
    assert in_quorum(job) == {"a:1", "b:1"}


def test_if_the_job_goes_on_with_a_first_state_that_was_given_for_an_attempt_that_is_over_its_holder_has_another() -> (
    None
):
    job, (a, b) = begins(names="ab", least=1)
    b.follows()
    b.says(b.replica.locate(has_finished=True))
    job.passes(1.0)
    assert in_quorum(job) == {"a:1"}
    a.votes(error="its loss was not a number")
    a.says(a.replica.locate(has_finished=True))
    b.asks(can_serve=True)
    job.passes(1.0)
    assert in_quorum(job) == {"b:1"}, "nobody else is there"
    b.votes(error="nor was this one")
    a.asks(can_serve=True)
    assert a.replica.warms_up, "it has made an attempt of its own before that"


def test_where_none_can_be_connected_one_that_holds_the_first_state_is_tried_first_and_gives_it_to_others() -> None:
    job, (b, c) = begins(names="bc", least=1)
    a = job.join("a")
    a.warms_up(reach_s=0.1)
    a.comes_in()
    a.asks()
    receives(c)
    assert in_quorum(job) == {"a:1", "b:1", "c:1"}
    they_vote(a, b, c, connects=False)
    d = job.join("d")
    d.warms_up(reach_s=0.1)
    they_ask(a, b, c, can_serve=True)
    assert d.formed is not None and [source.replica_id for source in d.formed.sources] == ["b:1"], "a was just given it"


def test_that_steps_are_lost_is_said_and_noted_also_if_the_job_goes_on_with_a_first_state_that_has_its_name() -> None:
    job, a, b = Job.of("ab", 2, least=2)
    job.restart()
    b.dies()
    job.gives_first = False
    c, d = job.join("c"), job.join("d")
    they_ask(c, d, can_serve=True)
    a.connects()  # it has the state of an earlier life
    a.dies()
    receives(d)
    assert job.lighthouse.newest_step == 2 and not in_quorum(job)
    job.operator_allows_loss()
    assert in_quorum(job) == {"c:1", "d:1"}
    assert "steps 1 to 2 are lost, the job goes on from 0" in job.log
    assert job.lighthouse.newest_step == 0 and not job.lighthouse.allow_step_loss
    a.is_stopped = False
    a.connects()
    a.asks()
    assert a.replica.warms_up
    they_vote(c, d)
    assert (c.step, d.step, job.lighthouse.newest_step) == (1, 1, 1)


def test_it_is_said_for_whom_a_job_waits_that_cannot_begin() -> None:
    job, (a, b) = begins(names="ab")
    job.passes(2 * SILENT_S)
    assert job.lighthouse.reason.endswith(f"; b:1 has said nothing for {SILENT_S:g} s and more: look into its log")
    assert a.hears()[-1] == f"held up: {job.lighthouse.reason}"
    b.still_needs(3.0)
    job.passes(1.0)
    assert job.lighthouse.reason == HELD.format("b:1").removeprefix("held up: ")
    b.is_stopped = True
    job.passes(10.0)
    assert job.lighthouse.reason == "1 of at least 2 replica groups are here (a:1)"


def test_if_the_holder_of_the_first_state_is_lost_the_job_begins_with_that_of_another_under_another_name() -> None:
    job, (a, b, c) = begins(names="abc")
    first = a.replica.version
    a.dies()
    for member in (b, c):
        member.follows(load=False)
        member.asks_again()
    assert b.replica.version.proven and b.replica.version != first
    receives(c)
    assert in_quorum(job) == {"b:1", "c:1"}


def test_if_the_holder_is_lost_those_who_have_received_its_state_begin_with_that() -> None:
    job, (a, b, c) = begins(names="abc")
    receives(b)
    a.dies()
    c.follows(load=False)
    c.asks_again()
    assert c.replica.warms_up
    c.ends()
    c.asks(at_end=True)
    job.passes(3.0)
    c.comes_in()
    c.asks()
    assert in_quorum(job) == {"b:1", "c:1"} and c.replica.version == b.replica.version


def test_a_holder_whose_connection_breaks_meanwhile_comes_back_with_the_name_of_its_state() -> None:
    job, (a, b) = begins(names="ab")
    named = a.replica.version
    a.is_cut_off()
    a.connects()
    a.says_again()
    receives(b)
    assert in_quorum(job) == {"a:1", "b:1"} and a.replica.version == b.replica.version == named


def test_a_group_that_comes_while_the_first_state_is_given_is_none_of_those_who_begin_the_job() -> None:
    job, (a, b) = begins(names="ab")
    d = job.join("d")
    d.asks()
    assert d.replica.warms_up, "its loop has read what it likes by then"
    d.ends()
    d.asks(at_end=True)
    d.comes_in()
    d.asks()
    receives(b)
    assert in_quorum(job) == {"a:1", "b:1", "d:1"}
    assert a.formed is not None and (a.formed.num_proved, d.replica.is_on_trial) == (2, True)
    they_vote(a, b, d)
    they_ask(a, b, can_serve=True, shows="w", ema="as all")
    d.asks(can_serve=True, shows="w", ema="its own")
    assert d.formed is not None and d.formed.differs, "else this would count as each group's own for good"


@pytest.mark.parametrize("how", ["it was given that state at the end of its iteration", "it does not wait for quorums"])
def test_who_has_computed_an_iteration_alone_is_no_beginner_if_the_state_is_named_anew(how: str) -> None:
    job, (a, b) = begins(names="ab")
    d = job.join("d")
    d.asks(waits=False)
    d.ends()
    if how == "it was given that state at the end of its iteration":
        d.asks(at_end=True)
        assert d.formed is not None and (d.formed.held, d.formed.names_state) == (True, False)
        d.follows(load=False)
    a.dies()
    b.follows(load=False)
    b.asks_again()
    d.asks(can_serve=True)
    assert b.replica.version.proven
    receives(d)
    assert in_quorum(job) == {"b:1", "d:1"}
    assert b.formed is not None and (b.formed.num_proved, d.replica.is_on_trial) == (1, True)
    they_vote(b, d)
    b.asks(can_serve=True, shows="w", ema="as all")
    d.asks(can_serve=True, shows="w", ema="its own")
    assert d.formed is not None and d.formed.differs, "else this would count as each group's own for good"


def test_who_has_computed_alone_is_right_if_the_first_state_is_its_own() -> None:
    job, (z,) = begins(names="z", least=1)
    b = job.join("b")
    b.asks()
    z.dies()
    b.ends()
    b.asks(can_serve=True)
    a = job.join("a")
    a.asks()
    a.ends()
    b.votes(error="it is alone")
    a.asks(at_end=True)
    b.asks(can_serve=True)
    a.comes_in()
    a.asks()
    they_vote(a, b)
    b.asks(can_serve=True, shows="w")
    a.asks(can_serve=True, shows="another")
    assert a.formed is not None and a.formed.differs


def test_who_has_trained_and_restores_the_step_that_another_one_has_restored_is_no_beginner() -> None:
    """Its loop has read other steps, and may count by them: what it made of the state counted as each group's own for good."""
    job, a = Job.of("a", least=1)
    for _ in range(3):
        job.step(a)
    job.restart()
    a.replica.restore(2)
    a.connects()
    b = job.join("b")
    b.replica.restore(2)
    job.operator_allows_loss()
    they_ask(a, b, can_serve=True)
    assert in_quorum(job) == {"a:1", "b:1"}
    they_vote(a, b)
    a.asks(can_serve=True, shows="w", ema="as it counts")
    b.asks(can_serve=True, shows="w", ema="another")
    assert b.formed is not None and b.formed.differs, "the state is that of a"


def test_a_job_begins_without_those_that_connect_meanwhile_and_do_not_ask() -> None:
    job, (a, b) = begins(names="ab")
    job.join("x"), job.join("y"), job.join("z")  # they still build their models
    job.passes(30.0)
    assert a.pending is not None and (a.pending.held_s > 0.0, job.lighthouse.reason) == (
        True,
        f"{HELD.format('b:1').removeprefix('held up: ')}; b:1 has said nothing for {SILENT_S:g} s and more: look into its log",
    )
    receives(b)
    assert in_quorum(job) == {"a:1", "b:1"}


def test_who_comes_later_keeps_a_job_from_its_first_step_no_longer_than_from_any_other() -> None:
    job, (_, b) = begins(least=1, names="ab")
    d = job.join("d")
    d.warms_up(reach_s=0.1)
    assert d.formed is not None and d.formed.held
    receives(b)
    assert not in_quorum(job)
    job.passes(SILENT_S + 1.0)  # it hangs
    assert in_quorum(job) == {"a:1", "b:1"}


def test_a_row_of_those_who_come_later_keeps_a_job_from_its_first_step_for_one_allowance_at_most() -> None:
    job, (_, b) = begins(least=2, names="ab", join_stall_limit_s=60.0)
    before: Member | None = None
    for number in range(9):
        late = job.join(f"d{number}")
        late.warms_up(reach_s=20.0)
        receives(b) if number == 0 else None
        for _ in range(10):
            if late.formed is not None and late.formed.held:
                late.still_needs(15.0)
            job.passes(1.0)
        if before is not None and before.formed is not None and before.formed.held:
            before.comes_in()
            before.asks()
        before = late
        if in_quorum(job):
            break
    assert in_quorum(job) >= {"a:1", "b:1"} and job.now <= 61.0


def test_a_job_that_goes_back_to_a_checkpoint_begins_with_it_as_with_a_first_state() -> None:
    job, a, b = Job.of("ab", least=2, join_timeout_s=1.0)
    for _ in range(3):
        job.step(a, b)
    a.dies(), b.dies()
    job.gives_first = False
    a, b = job.join("a", life=2), job.join("b", life=2)
    a.replica.restore(2)
    a.asks(can_serve=True), b.asks(can_serve=True)
    job.passes(5.0)
    assert b.formed is not None and b.formed.held and b.formed.version == a.replica.version
    receives(b)
    they_vote(a, b)
    assert (a.step, b.step) == (3, 3)
    assert sum("steps 3 to 3 are lost" in line for line in job.log) == 1
    assert sum(line.startswith(f"quorum {a.replica.version.quorum_id} at step 2: ") for line in job.log) == 1


def test_a_spare_that_comes_while_the_first_state_is_given_stays_a_spare() -> None:
    job, (_, b) = begins(least=1, names="ab")
    spare = job.join("s", spare=True)
    spare.asks()
    spare.ends()
    spare.asks(at_end=True, reach_s=0.1, can_follow=True)
    receives(b)
    assert in_quorum(job) == {"a:1", "b:1"}
    assert spare.formed is not None and (spare.formed.held, spare.formed.why) == (False, Given.TO_STAY)


def test_a_group_that_does_not_wait_for_its_first_quorum_comes_in_at_the_end_of_its_iteration() -> None:
    job, a, b = Job.of("ab", least=2)
    a.asks(can_serve=True, waits=False)
    b.asks(waits=False)
    assert (a.replica.version.step, a.replica.version.proven, b.replica.warms_up) == (0, True, True)
    b.ends()
    b.asks(at_end=True)
    b.comes_in()
    b.asks(waits=False)
    assert in_quorum(job) == {"a:1", "b:1"}


def test_one_that_tells_of_an_earlier_life_while_the_first_state_is_given_moves_the_ids_and_no_more() -> None:
    job, (a, b) = begins(names="ab")
    old = job.join("old")
    old.replica.version = StateVersion(step=0, quorum_id=7, epoch="an earlier life")
    old.is_cut_off()
    old.connects()
    receives(b)
    assert in_quorum(job) == {"a:1", "b:1"} and a.formed is not None
    assert a.formed.quorum_id == job.lighthouse.quorum_id == 1000


def test_who_was_given_the_first_state_began_the_job_also_if_the_lighthouse_restarts_before_its_first_step() -> None:
    job = Job(least=2)
    job.gives_first = False
    a, z = job.join("a"), job.join("z")
    a.asks(can_serve=True)
    z.asks()
    z.follows()
    a.dies()
    job.restart()
    z.connects()
    z.asks(can_serve=True)
    b = job.join("b")
    b.asks()
    job.passes(12.0)
    b.ends()
    b.asks(at_end=True)
    b.comes_in()
    b.asks()
    assert in_quorum(job) == {"b:1", "z:1"} and z.replica.version.quorum_id == 1
    they_vote(b, z)
    z.asks(can_serve=True, shows="w")
    b.asks(can_serve=True, shows="of an older state")
    assert b.formed is not None and b.formed.differs, "else the one that has come in decides by its name"


def test_one_that_comes_back_with_a_state_that_is_void_computes_alone_with_none_of_that_name() -> None:
    """The others have gone back to a checkpoint, and begun no step since: one of them is yet to receive it."""
    job, a, b = Job.of("ab", 2)
    they_ask(a, b)
    b.leaves()
    a.is_cut_off()
    job.gives_first = False
    c, d = job.join("c"), job.join("d")
    c.replica.restore(1)
    they_ask(c, d)
    job.passes(61.0)
    assert d.formed is not None and d.formed.held and d.formed.version.step == 1
    a.connects()
    a.asks()
    assert a.replica.warms_up and a.formed is not None
    assert (a.step, a.formed.version) == (2, d.formed.version)
