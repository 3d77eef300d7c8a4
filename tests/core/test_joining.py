"""For whom those who train wait, and who waits outside: all that they stand still for newcomers is from one allowance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lighthouse_script import Job, Member, they_ask, they_connect, they_vote

from torchft_ckpt.core.coordination.joining import FIRST_RATE, SILENT_S, Joining, Reception
from torchft_ckpt.core.coordination.messages import Outcome, Receives
from torchft_ckpt.core.coordination.patience import JoinAllowance

MINUTE = 60.0

# ------------------------------------------------------------------------------------------------------- the allowance


def test_a_need_fits_that_the_purse_holds_and_a_twentieth_of_the_time_fills_it():
    allowance = JoinAllowance()
    allowance.set_limit(MINUTE, 0.0)
    assert allowance.fits_in_s(MINUTE, 0.0) == 0.0 and allowance.fits_in_s(61.0, 0.0) is None
    allowance.spend(58.0, 0.0)
    assert allowance.fits_in_s(2.0, 0.0) == 0.0
    assert allowance.fits_in_s(10.0, 0.0) == pytest.approx(160.0)
    assert allowance.fits_in_s(10.0, 161.0) == 0.0
    allowance.spend(15.0, 161.0)
    assert allowance.fits_in_s(0.0, 161.0) == pytest.approx(20 * (15.0 - 2.0 - 0.05 * 161.0)), "it is below zero"


def test_without_a_limit_everything_fits():
    allowance = JoinAllowance()
    allowance.spend(1e6, 0.0)
    assert allowance.fits_in_s(1e9, 1.0) == 0.0
    allowance.set_limit(MINUTE, 1.0)
    assert allowance.purse_s(1.0) == MINUTE
    allowance.spend(50.0, 1.0)
    allowance.set_limit(float("inf"), 1.0)
    assert allowance.fits_in_s(1e6, 1.0) == 0.0


def test_a_lower_limit_holds_at_once_and_leaves_nothing_behind_when_who_wished_for_it_has_gone():
    """One that said 0 s, once, emptied it: nobody came in within the 20 minutes after he had left."""
    allowance = JoinAllowance()
    allowance.set_limit(MINUTE, 0.0)
    allowance.spend(8.0, 0.0)
    allowance.set_limit(10.0, 0.0)
    assert allowance.purse_s(0.0) == 10.0, "there is room for it"
    allowance.set_limit(0.0, 0.0)
    assert allowance.fits_in_s(0.1, 0.0) is None
    allowance.set_limit(MINUTE, 0.0)
    assert (allowance.purse_s(0.0), allowance.purse_s(100.0)) == (52.0, 57.0)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50), st.none() | st.floats(0, 100)), min_size=1, max_size=30),
)
def test_however_the_limit_changes_no_more_is_stood_still_than_the_highest_allows(events):
    allowance, now, stood_s = JoinAllowance(), 0.0, 0.0
    highest_s = max([100.0, *(limit_s or 0.0 for _, _, limit_s in events)])
    allowance.set_limit(highest_s, now)
    for pause_s, need_s, limit_s in events:
        now += pause_s
        if limit_s is not None:
            had_s, was_s = allowance.purse_s(now), allowance.limit_s
            allowance.set_limit(limit_s, now)
            if limit_s <= was_s:
                assert allowance.purse_s(now) == pytest.approx(min(had_s, limit_s)), (
                    "nobody who fits has to wait for it"
                )
        if allowance.fits_in_s(need_s, now) == 0.0:
            allowance.spend(need_s, now)
            stood_s += need_s
        assert stood_s <= highest_s + 0.05 * now + 1e-6
    before_s = allowance.purse_s(now)
    for limit_s in (0.0, allowance.limit_s):
        allowance.set_limit(limit_s, now)
    assert allowance.purse_s(now) <= before_s + 1e-6, "one that comes and goes does not fill it"


@given(
    st.floats(0, 100),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 200), st.floats(0, 1)), max_size=30),
)
def test_in_any_time_survivors_stand_still_no_longer_than_the_limit_and_a_twentieth(limit_s, joins):
    """Each is waited for as long as it fits, is looked at four times a second, and says less than the truth at first."""
    allowance = JoinAllowance()
    allowance.set_limit(limit_s, 0.0)
    now = 0.0
    stood: list[tuple[float, float]] = []
    for pause_s, need_s, share_told in joins:
        now += pause_s
        began, told_s, waited_s = now, need_s * share_told, 0.0
        while waited_s < need_s and allowance.fits_in_s(max(told_s, waited_s), began + waited_s) == 0.0:
            waited_s = min(waited_s + 0.25, need_s)
        now += waited_s
        allowance.spend(waited_s, now)
        stood.append((began, now))
    for first in range(len(stood)):
        for last in range(first, len(stood)):
            total_s = sum(end - began for began, end in stood[first : last + 1])
            assert total_s <= limit_s + 0.05 * (stood[last][1] - stood[first][0]) + 0.26


# ------------------------------------------------------------------------------------------------- what a newcomer says


def test_a_rate_is_that_of_the_last_seconds_and_of_none_sooner():
    reception = Reception()
    assert reception.expected_s(FIRST_RATE) == 1.0
    assert reception.progress(left_bytes=1000, done_bytes=0, elapsed_s=0.5) == 1000 / FIRST_RATE
    assert (
        reception.progress(left_bytes=1000, done_bytes=90, elapsed_s=0.7) == 1000 / FIRST_RATE
    )  # nothing is verified yet
    assert reception.progress(left_bytes=900, done_bytes=100, elapsed_s=1.0) == pytest.approx(4.5)
    for second in range(2, 6):
        told = reception.progress(left_bytes=500, done_bytes=100 + 10 * second, elapsed_s=float(second))
    assert told == pytest.approx(50.0)
    assert reception.is_measured
    reception.begin()
    assert not reception.is_measured, "of the next transfer nothing is known but the rate of this one"


def test_a_transfer_that_stands_needs_for_ever():
    reception = Reception()
    for tenth in range(int(SILENT_S * 10) + 21):
        told = reception.progress(left_bytes=1000, done_bytes=0, elapsed_s=tenth / 10)
    assert told == pytest.approx(2000.0)


def test_a_source_that_needs_two_seconds_to_its_first_byte_is_no_slow_link():
    """A state on a device is copied to its host before it is sent. From the first byte on it comes with 1 GB/s."""
    total, reception, allowance = 8_000_000_000, Reception(), JoinAllowance()
    allowance.set_limit(10.0, 0.0)
    needs = []
    for tenth in range(31):
        done = max(0, tenth - 20) * 100_000_000
        needs.append(reception.progress(left_bytes=total - done, done_bytes=done, elapsed_s=tenth / 10))
    assert {allowance.fits_in_s(need_s, 0.0) for need_s in needs} == {0.0}
    assert needs[-1] == pytest.approx(7.0, rel=0.15) and reception.is_measured


def test_what_an_attempt_found_out_is_what_the_next_one_expects():
    reception = Reception()
    reception.progress(left_bytes=1000, done_bytes=0, elapsed_s=0.0)
    reception.progress(left_bytes=600, done_bytes=400, elapsed_s=4.0)
    reception.begin()
    assert reception.expected_s(1000) == pytest.approx(6.0)
    assert reception.progress(left_bytes=1000, done_bytes=0, elapsed_s=0.1) == pytest.approx(10.0)


def test_a_load_is_expected_to_take_half_as_long_again_and_the_next_one_as_long_as_it_took():
    reception = Reception()
    assert [reception.loading(elapsed_s) for elapsed_s in (0.1, 4.0)] == [0.5, 2.0]
    reception.loaded(10.0)
    assert reception.load_s == 10.0
    assert reception.progress(left_bytes=FIRST_RATE, done_bytes=0, elapsed_s=0.1) == pytest.approx(11.0)
    assert [reception.loading(elapsed_s) for elapsed_s in (4.0, 9.9, 10.5, 16.0)] == [6.0, 0.5, 0.5, 3.0]
    reception.loaded(0.1)
    assert reception.load_s == 0.0


def test_after_a_whole_transfer_the_next_one_is_expected_to_be_as_large():
    reception = Reception()
    reception.progress(left_bytes=1000, done_bytes=0, elapsed_s=0.0)
    reception.progress(left_bytes=0, done_bytes=1000, elapsed_s=10.0)
    assert reception.expected_s(5) == pytest.approx(10.0)


# ------------------------------------------------------------------------------------------------------ at a lighthouse


def trained(limit_s: float | None = MINUTE, tau_s: float = 1.0, **settings: object) -> tuple[Job, Member, Member]:
    """Two groups whose steps take so long."""
    job, a, b = Job.of("ab", least=1, join_stall_limit_s=limit_s, **settings)
    for _ in range(3):
        ask(a, b)
        job.passes(tau_s)
        they_vote(a, b)
    return job, a, b


def ask(*members: Member) -> None:
    they_ask(*members, can_serve=True)


def newcomer(job: Job, name: str = "j", **facts: object) -> Member:
    """It has computed an iteration alone, and asks for the state."""
    member = job.join(name)
    member.warms_up(**facts)
    return member


def is_held(member: Member) -> bool:
    """Whether the others wait for it now."""
    return member.replica.follows and member.formed is not None and member.formed.held


def purse_s(job: Job) -> float:
    return job.lighthouse._joining._allowance.purse_s(job.now)


def why_outside(job: Job, member: Member, *others: Member) -> str:
    """What a member is told of its waiting while the others make two steps."""
    for _ in range(2):
        job.passes(1.0)
        they_vote(*others)
        ask(*others)
    assert others[0].formed is not None and others[0].formed.replica_world_size == len(others)
    return [words for words in member.hears() if words.startswith("pending: ")][-1]


@pytest.mark.parametrize("does", [Receives.TRANSFER, Receives.LOADS])
def test_a_state_that_takes_long_to_receive_or_to_load_comes_in_at_its_first_attempt_and_is_paid_for(does: Receives):
    job, a, b = trained()
    j = newcomer(job, reach_s=0.2)
    ask(a, b)
    for quarter in range(68):
        j.still_needs(17.0 - quarter / 4, does)
        job.passes(0.25)
    j.comes_in()
    j.asks()
    assert [m.formed.role.value for m in (a, b, j)] == ["healthy"] * 3
    assert purse_s(job) == pytest.approx(MINUTE - 17.0, abs=0.5)


def test_one_that_cannot_say_how_long_it_needs_is_waited_for_a_while():
    job, a, b = trained()
    newcomer(job)
    ask(a, b)
    job.passes(SILENT_S - 0.1)
    assert job.lighthouse._holds.is_on
    job.passes(0.4)
    assert not job.lighthouse._holds.is_on and a.formed.replica_world_size == 2


def test_one_that_cannot_say_is_not_waited_for_when_the_allowance_is_used_up():
    job, a, b = trained()
    job.lighthouse._joining._allowance.spend(MINUTE + 1.0, job.now)
    j = newcomer(job)
    ask(a, b)
    assert not is_held(j) and a.formed.replica_world_size == 2


def test_who_waits_outside_is_told_until_when_and_comes_in_then():
    job, a, b = trained(limit_s=20.0)
    job.lighthouse._joining._allowance.spend(15.0, job.now)
    j = newcomer(job, reach_s=11.0)
    ask(a, b)
    told = why_outside(job, j, a, b)
    assert "receiving and loading the state may keep the others waiting for 11 s, and 5." in told
    assert " are left of join_stall_limit (20 s): enough in " in told
    they_vote(a, b)
    job.passes(130.0)
    ask(a, b)
    assert is_held(j)


def test_who_needs_more_than_the_limit_is_told_what_decides_it():
    job, a, b = trained(limit_s=10.0)
    j = newcomer(job, reach_s=0.2)
    ask(a, b)
    j.still_needs(39.0)
    job.passes(0.3)
    assert a.formed.replica_world_size == 2 and a.replica.phase.value == "training", "the hold has ended at once"
    j.comes_in(load=False)
    j.asks(at_end=True, reach_s=39.0)
    job.passes(5.0)
    told = why_outside(job, j, a, b)
    assert "join_stall_limit allows 10 s at most: give the groups that train a longer one" in told


def test_one_that_measures_more_than_it_expected_costs_few_holds_until_the_allowance_holds_it():
    job, a, b = trained(limit_s=10.0)
    job.lighthouse._joining._allowance.spend(4.0, job.now)
    j = newcomer(job, reach_s=5.6)
    attempts = 0
    for _ in range(600):
        ask(a, b)
        if is_held(j):
            attempts += 1
            j.still_needs(8.2)
            job.passes(0.5)
            if job.lighthouse._holds.is_on:
                break  # it fits
            j.comes_in(load=False)
            j.asks(at_end=True, reach_s=5.6)
        job.passes(0.9)
        they_vote(a, b)
    else:
        pytest.fail("it never came in")
    assert attempts <= 3, attempts


def test_who_has_waited_outside_for_five_minutes_is_admitted_once_more():
    job, a, b = trained(limit_s=10.0)
    j = newcomer(job, reach_s=900.0)
    for until_s, is_admitted in ((290.0, False), (301.0, True)):
        job.passes(until_s - job.now + 3.0)
        ask(a, b)
        assert is_held(j) is is_admitted
        they_vote(a, b)


def test_nor_is_anybody_after_five_minutes_while_the_allowance_is_below_zero():
    job, a, b = trained(limit_s=10.0)
    job.lighthouse._joining._allowance.spend(100.0, job.now)
    j = newcomer(job, reach_s=0.1)
    job.passes(301.0)
    ask(a, b)
    assert not is_held(j)


def test_what_a_first_quorum_waits_for_is_not_taken_from_the_allowance():
    job, a, b = Job.of("ab", least=2, join_stall_limit_s=MINUTE)
    ask(a, b)
    cannot_connect(job, a, b)
    assert purse_s(job) == MINUTE


def test_one_that_has_lost_its_state_is_waited_for_as_one_that_comes():
    _job, a, b = trained()
    b.replica.load_torn()
    b.asks(at_end=True)
    ask(a)
    assert is_held(b)
    b.comes_in()
    b.asks()
    assert a.formed.replica_world_size == 2


@pytest.mark.parametrize(("reach_s", "fits"), [(6.0, True), (8.0, False)])
def test_one_that_asks_while_another_is_waited_for_has_what_is_left(reach_s: float, fits: bool):
    job, a, b = trained(limit_s=10.0)
    i = newcomer(job, "i", reach_s=5.0)
    ask(a, b)
    i.still_needs(5.0)
    job.passes(3.0)
    j = newcomer(job, reach_s=reach_s)
    assert is_held(i) and is_held(j) is fits


def test_deaths_say_nothing_of_how_long_one_needs_and_coming_in_makes_good_what_did():
    job, a, b = trained(limit_s=20.0)
    for _ in range(3):
        j = newcomer(job, reach_s=0.2)
        ask(a, b)
        assert is_held(j)
        j.dies()
        they_vote(a, b)
        job.passes(30.0)
    assert job.lighthouse._joining._allowance.debts["j"].factor_of_need == 1.0
    job.lighthouse._joining._allowance.debts["j"].times_underestimated = 4
    j = job.join("j")
    job.lets_in(j, others=[a, b])
    they_vote(a, b, j)
    assert j.outcomes == [Outcome.COMMIT] and "j" not in job.lighthouse._joining._allowance.debts


def test_what_a_load_takes_is_needed_however_long_a_step_is():
    job, a, b = trained(limit_s=5.0, tau_s=10.0)
    j = newcomer(job, reach_s=1.0, load_s=9.0)
    ask(a, b)
    told = why_outside(job, j, a, b)
    assert "keep the others waiting for 10 s, and join_stall_limit allows 5 s at most" in told


def test_what_those_who_train_stand_still_to_capture_their_state_is_taken_from_the_allowance_once():
    job, a, b = trained()
    job.passes(3.0)
    b.asks(stood_s=3.0)
    job.passes(11.0)
    a.asks(stood_s=14.0)
    assert purse_s(job) == pytest.approx(MINUTE - 14.0)
    they_vote(a, b)
    before_s = purse_s(job)
    job.step(a, b)
    assert purse_s(job) >= before_s


def test_who_comes_in_needs_what_the_others_stand_still_for_it_and_waits_outside_while_that_does_not_fit():
    """Without it a state that takes 14 s to capture holds up every step for good, for one that never comes in."""
    job, a, b = trained(limit_s=30.0)
    for _ in range(2):
        b.asks()
        job.passes(14.0)
        a.asks(stood_s=14.0)
        they_vote(a, b)
    j = newcomer(job, reach_s=0.1)
    ask(a, b)
    told = why_outside(job, j, a, b)
    assert "keep the others waiting for 14 s" in told and "join_stall_limit (30 s)" in told
    they_vote(a, b)
    job.passes(240.0)
    ask(a, b)
    assert is_held(j)


def test_nobody_empties_the_allowance_by_a_word():
    """One said that it had stood still for 1e9 s: nobody came in any more, also after it had left."""
    job, a, b = trained()
    x = newcomer(job, "x", reach_s=0.0)
    ask(a, b)
    x.comes_in()
    x.asks(stood_s=1e9)
    for _ in range(3):
        they_vote(a, b, x)
        job.passes(1.0)
        they_ask(a, b, stood_s=0.5)
        x.asks(stood_s=1e9)
    assert purse_s(job) == pytest.approx(MINUTE - 1.5, abs=0.2)
    x.dies()
    j = newcomer(job, reach_s=1.0)
    ask(a, b)
    assert is_held(j)


def test_two_who_lie_empty_it_and_leave_a_debt_of_one_limit_at_most():
    job, a, b = trained()
    for _ in range(5):
        they_vote(a, b)
        job.passes(100.0)
        they_ask(a, b, stood_s=1e9)
    assert purse_s(job) == pytest.approx(-MINUTE)


def test_one_that_trains_alone_pays_for_what_it_stands_still_for_a_group_that_dies_again_and_again():
    """The newcomer was the other one that confirms it, and says 0 s: the survivor stood still for a quarter of its time."""
    job, a, b = trained(limit_s=30.0)
    b.dies()
    ask(a)
    a.votes()
    began_at, stood_s = job.now, 0.0
    for life in range(2, 30):
        b = job.join("b", life=life, join_stall_limit_s=30.0)
        b.warms_up(reach_s=0.1)
        for _ in range(20):
            job.passes(45.0)
            if not a.replica.capture_wanted:
                a.asks()
            else:
                job.passes(14.0)
                stood_s += 14.0
                a.asks(can_serve=True, stood_s=14.0)
            if is_held(b):
                b.comes_in()
                b.asks()
                they_vote(b, a)
                break
            a.votes()
        b.dies()
    assert stood_s <= 30.0 + 0.05 * (job.now - began_at) + 2 * 14.0
    assert stood_s >= 10 * 14.0, "it is tried again and again"


def test_what_the_clock_confirms_is_owed_though_the_purse_held_less():
    job, a, b = trained(limit_s=30.0)
    b.dies()
    ask(a)
    a.votes()
    job.passes(40.0)
    a.asks(stood_s=40.0)
    assert purse_s(job) == pytest.approx(-10.0)
    a.votes()
    job.passes(2.0)
    a.asks(stood_s=1e9)
    assert purse_s(job) == pytest.approx(-12.0, abs=0.2), "it asked for a step two seconds ago"


def test_a_quorum_of_none_who_trained_already_stood_still_for_nobody():
    Joining().stood([], 100.0, now=100.0)


def test_groups_that_are_restarted_with_a_lower_limit_come_in_at_once():
    """What one had cost under the limit of before was more than the new one: nobody came in for a quarter of an hour."""
    job, a, b = trained()
    job.lighthouse._joining._allowance.spend(50.0, job.now)
    for name in "ab":
        other = b if name == "a" else a
        job.members[f"{name}:1"].dies()
        ask(other)
        other.votes()
        j = job.join(name, life=2, join_stall_limit_s=10.0)
        j.warms_up(reach_s=5.0)
        ask(other)
        assert is_held(j), name
        j.comes_in()
        j.asks()
        they_vote(other, j)
        a, b = (j, other) if name == "a" else (other, j)


def test_what_takes_long_for_another_reason_is_not_taken_from_the_allowance():
    job, a, b = trained()
    j = job.join("j")
    job.lets_in(j, others=[a, b])
    job.passes(200.0)  # one of them writes a checkpoint, say
    they_vote(a, j)
    b.votes(error="its data loader failed")
    assert a.outcomes[-1] is Outcome.DISCARD and purse_s(job) == MINUTE


@pytest.mark.slow
def test_five_beyond_the_limit_cost_the_others_nothing_after_their_first_attempts():
    job, a, b = trained(limit_s=10.0)
    newcomers = [newcomer(job, f"j{number}", reach_s=0.2) for number in range(5)]
    stood_s, steps = 0.0, 0
    while job.now < 600.0:
        before = job.now
        ask(a, b)
        while a.replica.phase.value == "asking":
            for member in newcomers:
                if is_held(member) and member.replica.phase.value == "training":
                    member.still_needs(900.0)
            job.passes(0.1)
        stood_s += job.now - before
        for member in newcomers:
            if member.replica.phase.value == "training":
                member.follows(load=False)
                member.asks(at_end=True, reach_s=900.0)
        job.passes(1.0)
        they_vote(a, b)
        steps += 1
    assert stood_s <= 0.01 * job.now
    assert steps > 580 and a.outcomes.count(Outcome.DISCARD) == 0


# ------------------------------------------------------------------------------------------------- the first iteration


def test_a_group_that_comes_into_a_running_job_computes_an_iteration_alone():
    job, a, b = trained(tau_s=0.5)
    ask(a, b)
    quorum_id = a.formed.quorum_id
    j = job.join("j")
    j.asks(reach_s=0.2)
    assert (j.formed.role.value, j.formed.warms_up, j.plan.load) == ("learner", True, False)
    for _ in range(3):  # its first forward pass takes long
        job.passes(0.5)
        they_vote(a, b)
        ask(a, b)
    assert (a.formed.quorum_id, a.outcomes) == (quorum_id, [Outcome.COMMIT] * 6)
    j.ends()
    j.asks(at_end=True, reach_s=0.2)
    assert a.heard_joiner(), "so that somebody has captured the state at the next step"


def test_nobody_is_waited_for_where_no_state_was_captured_and_those_who_train_are_told_to_do_so():
    job, a, b = trained()
    j = newcomer(job, reach_s=0.2)
    they_ask(a, b, can_serve=False)
    assert a.formed.replica_world_size == 2 and a.heard_joiner() and not is_held(j)
    they_vote(a, b)
    they_ask(a, b)
    assert is_held(j)


def test_where_too_few_train_without_it_a_state_is_served_that_was_not_captured_before():
    job, a, b = Job.of("ab", 1, least=2)
    b.dies()
    a.asks(can_serve=False)
    assert not is_held(a)
    j = newcomer(job)
    assert is_held(j)


def test_who_waits_for_a_group_trains_at_once_when_that_one_computes_an_iteration_alone():
    """Seed 15450: it waited until it would have been told why it waits, which is up to a second later."""
    job, a, b = trained()
    b.asks()
    assert b.replica.phase.value == "asking", "it waits for the other one of its quorum"
    job.passes(0.1)
    a.replica.load_torn()
    a.asks()
    assert a.formed.warms_up
    assert (b.formed.quorum_id, b.formed.replica_world_size) == (2, 1)


@pytest.mark.parametrize("case", ["first quorum", "must not load", "cannot load", "holds it", "finished"])
def test_a_group_computes_nothing_alone_where_that_helps_nobody(case: str):
    job, a, b = Job.of("ab", 1, least=1)
    if case == "first quorum":
        assert a.step == b.step == 1
        return
    c = job.join("c")
    if case == "holds it":
        c.replica.version = a.replica.version
    if case == "finished":
        a.says(a.replica.locate(has_finished=True))
        b.says(b.replica.locate(has_finished=True))
    c.asks(allow_heal=case != "must not load", can_load=case != "cannot load")
    assert c.formed is None or not c.formed.warms_up


def test_nobody_waits_for_a_group_that_computes_alone_when_the_lighthouse_restarts():
    job, a, b = trained()
    ask(a, b)
    j = job.join("j")
    j.asks(reach_s=0.2)
    assert j.formed.warms_up
    they_vote(a, b)
    job.restart()
    they_connect(a, b, j)
    ask(a, b)
    job.passes(5.0)
    assert a.formed.version.step == a.step and a.replica.phase.value == "training"


# ------------------------------------------------------------------------------------------- loops with several optimizers


def takes_turns(*turns: str) -> Iterator[str]:
    """Say before each step of a loop that has a step for each of these optimizers which one it trained last."""
    return itertools.chain([""], itertools.cycle(turns))


def two_networks(least: int = 1) -> tuple[Job, Member, Member, Iterator[str]]:
    """A job of two that have trained each of their networks."""
    job, a, b = Job.of("ab", least=least)
    turns = takes_turns("critic", "generator")
    for _ in range(3):
        one_step(job, a, b, kind=next(turns))
    return job, a, b, turns


def one_step(job: Job, *members: Member, kind: str) -> None:
    they_ask(*members, can_serve=True, kind=kind)
    job.passes(1.0)
    they_vote(*members)


def test_a_group_adds_nothing_in_its_first_step_if_its_loop_may_use_there_what_it_computed_in_the_one_before():
    """The critic learns from what the generator has made, with an older state."""
    job, a, b, turns = two_networks()
    kind = next(turns)
    j = newcomer(job, kind=kind)
    they_ask(a, b, can_serve=True, kind=kind)
    j.comes_in()
    j.asks(kind=kind)
    assert (j.formed.role.value, j.formed.contributor_rank, a.formed.num_contributors) == ("healthy", None, 2)
    they_vote(a, b, j)
    kind = next(turns)
    they_ask(a, b, j, can_serve=True, kind=kind)
    assert (j.formed.role.value, a.formed.num_contributors) == ("healthy", 3)


def test_a_group_that_is_needed_computes_alone_until_its_loop_trains_the_same_network_as_the_others():
    job, a, b, turns = two_networks(least=2)
    b.dies()
    kind = next(turns)
    a.asks(can_serve=True, kind=kind)
    other = next(turns)
    j = newcomer(job, kind=other)
    job.passes(0.1)
    assert j.replica.phase.value == "training" and j.replica.warms_up, "it goes on to its next iteration at once"
    j.ends()
    j.asks(at_end=True, kind=kind)
    assert is_held(j) and Outcome.DISCARD not in a.outcomes


@pytest.mark.parametrize("least", [1, 2])
def test_of_two_at_work_that_are_out_of_turn_one_goes_out_and_comes_back_in_turn(least: int) -> None:
    """Else they would average the gradients of different networks, and discard each step, for ever."""
    _, a, b, turns = two_networks(least)
    kind, other = next(turns), next(turns)
    a.asks(can_serve=True, kind=kind)
    b.asks(can_serve=True, kind=other)  # it has left its last step out
    assert b.replica.warms_up and (a.formed.replica_world_size == 1 or least == 2)
    kinds = itertools.cycle([other, kind])
    b.ends()
    b.asks(at_end=True, kind=kind)
    while not is_held(b):
        assert a.replica.phase.value == "training", "nothing else keeps it"
        a.votes()
        a.asks(can_serve=True, kind=next(kinds))
    b.comes_in()
    b.asks(kind=kind)
    assert (a.formed.replica_world_size, b.formed.role.value) == (2, "healthy")
    they_vote(a, b)
    assert a.step == b.step and Outcome.DISCARD not in a.outcomes + b.outcomes


def steps_of(turns: str, num_steps: int) -> str:
    """The last steps of a loop that has made so many, each of the next of its turns."""
    return " ".join(itertools.islice(itertools.cycle(turns), num_steps))[-63:]


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize(
    "turns", ["cg", "cgcc", "cgcccc", "ccg", "catatc"], ids=["GAN", "WGAN", "WGAN-GP", "TD3", "SAC"]
)
def test_a_group_comes_in_at_the_place_in_the_turns_at_which_its_own_loop_is(turns: str, least: int) -> None:
    """Its counter began anew, and a step of the critic may be at several places: it makes steps alone until that is told."""
    for place in range(len(turns)):
        job = Job(least=least)
        at_work = [job.join(name) for name in "ab"]
        theirs, mine = len(turns) + place, 1
        for num_steps in range(theirs):
            one_step(job, *at_work, kind=steps_of(turns, num_steps))
        if least == 2:
            at_work.pop().dies()
        j = newcomer(job, kind=steps_of(turns, mine))
        while not is_held(j):
            if j.replica.phase.value == "training":
                j.ends()
                mine += 1
                j.asks(at_end=True, kind=steps_of(turns, mine))
            for member in at_work:
                if member.replica.phase.value == "training":
                    member.votes()
                if member.replica.phase.value == "idle":
                    member.asks(can_serve=True, kind=steps_of(turns, member.step))
            theirs = at_work[0].step
            assert theirs + mine <= 4 * len(turns) + place
        assert (theirs - mine) % len(turns) == 0
        assert all(Outcome.DISCARD not in member.outcomes for member in at_work)


def test_most_of_those_at_work_say_whose_turn_it_is() -> None:
    job, *members = Job.of("abc", least=1)
    turns = takes_turns("critic", "generator")
    for _ in range(3):
        one_step(job, *members, kind=next(turns))
    kind, other = next(turns), next(turns)
    for member, trained in zip(members, (other, kind, kind), strict=True):
        member.asks(can_serve=True, kind=trained)
    assert [m.replica.warms_up for m in members] == [True, False, False]


def one_is_out_of_turn(job: Job) -> tuple[Member, Member, Member, str, str]:
    """Three ask for a step, the last one out of turn; return them, whose turn it is, and whose it is next."""
    members = a, b, c = [job.join(name) for name in "abc"]
    turns = takes_turns("critic", "generator")
    for _ in range(3):
        one_step(job, *members, kind=next(turns))
    kind, other = next(turns), next(turns)
    for member, trained in zip(members, (kind, kind, other), strict=True):
        member.asks(can_serve=True, kind=trained)
    return a, b, c, kind, other


def test_one_that_has_gone_out_and_still_holds_the_newest_state_comes_in_in_turn_alone() -> None:
    """The step that it was put out for was discarded: it lacks nothing but its turn."""
    job = Job(least=1)
    a, b, c, kind, other = one_is_out_of_turn(job)
    a.votes(error="a batch was of no use")
    b.votes()
    c.ends()
    c.asks(at_end=True, kind=kind)
    for trained, comes in ((other, False), (kind, True)):
        they_ask(a, b, can_serve=True, kind=trained)
        assert is_held(c) is comes
        if not comes:
            they_vote(a, b)


def test_one_that_was_put_out_of_turn_is_in_no_step_before_its_turn_though_it_holds_the_newest_state() -> None:
    """Else it would be in the others' next step at the wrong place, and be put out again for the one after it, for ever."""
    job = Job(least=3)
    a, b, c, kind, other = one_is_out_of_turn(job)
    c.asks(can_serve=True, kind=other)  # it has given that step up, and is where it was
    assert c.replica.warms_up and a.replica.phase.value == b.replica.phase.value == "asking"
    c.ends()
    c.asks(at_end=True, kind=kind)
    c.comes_in()
    c.asks(kind=kind)
    assert [m.formed.role.value for m in (a, b, c)] == ["healthy"] * 3
    they_vote(a, b, c)
    assert all(Outcome.DISCARD not in m.outcomes for m in (a, b, c))


def test_the_turns_of_a_group_that_is_gone_are_forgotten_with_it() -> None:
    job, a, b, other = Job.of("abc", least=1)
    one_step(job, a, b, other, kind="both")
    for member, kind in ((a, "both"), (b, "both"), (other, "one of them")):
        member.asks(can_serve=True, kind=kind)
    assert other.replica.warms_up
    other.leaves()
    they_vote(a, b)
    j = newcomer(job, kind="another name")
    they_ask(a, b, can_serve=True, kind="both")
    assert is_held(j), "else it would wait for a turn that never comes"


def test_a_group_whose_loop_never_does_what_the_others_did_is_kept_outside_for_some_steps_alone():
    """Who trains what may follow from the number of the step: then it is no matter what each trained last."""
    job, a, b, turns = two_networks()
    j = newcomer(job, kind="both")
    num_alone = 0
    while not is_held(j):
        kind = next(turns)
        they_ask(a, b, can_serve=True, kind=kind)
        job.passes(1.0)
        they_vote(a, b)
        num_alone += 1
        assert num_alone < 30
    assert 8 <= num_alone <= 12


# ------------------------------------------------------------------------------------------ who cannot come in, and pays


def cannot_connect(job: Job, *members: Member, after_s: float = 10.0) -> None:
    """All of a quorum have waited so long for each other: it is discarded."""
    job.passes(after_s)
    they_vote(*members, connects=False)


def test_who_cannot_connect_costs_those_who_train_a_thirtieth_of_their_time():
    job, a, b = trained()
    j = newcomer(job)
    step, tried, until = a.step, [], job.now + 600.0
    while job.now < until:
        ask(a, b)
        if j.replica.is_learner:
            j.goes_on()
        if a.formed.replica_world_size == 3:
            tried.append(job.now)
            cannot_connect(job, a, b, j)
            j.goes_on()
            continue
        job.passes(1.0)
        they_vote(a, b)
    assert len(tried) == 2, "each of 10 s"
    assert a.step - step >= 570
    said = [line for line in job.log if line.startswith("j:1 could not come in")]
    assert "cost the others 10 s" in said[0]
    assert "rank 2 never came" in said[0]
    assert "look for a firewall" in said[0]
    assert said[0].endswith("tried again in 333 s")
    (why,) = [line for line in job.log if line.startswith("j:1 is not admitted")][:1]
    assert "cannot connect with it among them" in why
    assert "cannot connect" in job.lighthouse.why_failed(job.lighthouse.members["j:1"]), (
        "for the operator, at all times"
    )


def test_whoever_has_trained_with_the_others_is_not_blamed_when_a_newcomer_cannot_connect():
    job, a, b = trained()
    j = job.join("j")
    job.lets_in(j, others=[a, b])
    assert a.formed.replica_world_size == 3
    cannot_connect(job, a, b, j)
    ask(a, b, j)
    assert a.formed.replica_world_size == b.formed.replica_world_size == 2
    assert a.formed.role.value == b.formed.role.value == "healthy"


def test_of_two_newcomers_that_cannot_connect_each_is_tried_alone_and_the_innocent_one_comes_in_soon():
    job, a, b = trained()
    c, d = job.join("c"), job.join("d")
    job.lets_in(c, d, others=[a, b])
    cannot_connect(job, a, b, c, d)
    job.passes(6.0)
    ask(c, d, a, b)
    assert (a.formed.replica_world_size, c.formed.replica_world_size) == (3, 3)
    cannot_connect(job, a, b, c)
    ask(c, a, b)
    assert (a.formed.replica_world_size, d.formed.replica_world_size) == (3, 3)
    they_vote(a, b, d)
    assert d.outcomes[-1] is Outcome.COMMIT
    job.passes(100.0)
    ask(a, b, d)
    assert a.formed.replica_world_size == 3, "c pays for both"


def test_where_those_who_have_trained_together_cannot_connect_any_more_they_find_who_can():
    job, a, b = trained()
    c = job.join("c")
    job.lets_in(c, others=[a, b])
    they_vote(a, b, c)
    job.step(a, b, c)
    c.replica.configured = None
    for _ in range(2):  # once, all of them are believed
        ask(a, b, c)
        assert a.formed.replica_world_size == 3
        cannot_connect(job, a, b, c)
    ask(c, b, a)
    job.passes(0.3)
    assert a.formed.replica_world_size == 1, "it trains at least"
    a.votes()
    assert a.outcomes[-1] is Outcome.COMMIT


def test_a_death_explains_that_a_quorum_cannot_connect():
    job, a, b = trained()
    j = job.join("j")
    job.lets_in(j, others=[a, b])
    a.is_stopped = True  # it has not heard of that when it votes
    b.dies()
    a.is_stopped = False
    job.passes(4.0)
    a.votes(connects=False)
    ask(a, j)
    assert (a.formed.replica_world_size, j.formed.role.value) == (2, "healthy")


def test_one_that_cannot_load_the_state_is_left_out_and_told_why():
    job, a, b = trained()
    j = newcomer(job)
    ask(a, b)
    job.passes(0.5)
    j.comes_in(load=False)
    j.asks(at_end=True)
    they_vote(a, b)
    ask(a, b)
    told = why_outside(job, j, a, b)
    assert "it could not receive or load the state; it is tried again in " in told
