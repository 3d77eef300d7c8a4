"""For whom the others waited in each step and in which phase, and who is named because it is slow."""

from __future__ import annotations

import pytest
from lighthouse_script import Job, Member, they_ask

from torchft_ckpt.core.coordination import waiting as waiting_module
from torchft_ckpt.core.coordination.waiting import (
    MAX_GROUPS_COUNTED,
    NUM_SLOW,
    Phase,
    Timing,
    Waited,
    Waiting,
    find_late,
)

ALIKE = Timing(asked_at=10.0, computed_s=1.0, reduced_s=0.5, voted_at=12.0)


@pytest.mark.parametrize(
    ("late", "found"),
    [
        (ALIKE, None),
        (ALIKE._replace(asked_at=10.0005), None),
        (ALIKE._replace(asked_at=10.4), (Phase.QUORUM, 0.4)),
        # It asked later, and so it came to the collectives later: that is one delay, and not two.
        (ALIKE._replace(asked_at=10.4, reduced_s=0.1), (Phase.QUORUM, 0.4)),
        (ALIKE._replace(computed_s=1.4, reduced_s=0.1), (Phase.COMPUTE, 0.4)),
        (ALIKE._replace(reduced_s=0.1), (Phase.ALLREDUCE, 0.4)),
        (ALIKE._replace(computed_s=1.1, reduced_s=0.1), (Phase.ALLREDUCE, 0.3)),
        (ALIKE._replace(voted_at=12.4), (Phase.VOTE, 0.4)),
        # A round of an outer loop: it asks when it has computed.
        (ALIKE._replace(computed_s=1.4, asked_at=10.41), (Phase.COMPUTE, 0.4)),
        (ALIKE._replace(computed_s=1.1, asked_at=10.4), (Phase.QUORUM, 0.4)),
    ],
)
@pytest.mark.parametrize("num_others", [1, 2, 3, 6])
def test_the_others_wait_for_who_is_behind_the_median(
    late: Timing, found: tuple[Phase, float] | None, num_others: int
) -> None:
    others = {f"group{number}:1": ALIKE for number in range(num_others)}
    for timings in ({"b:1": late, **others}, {**others, "b:1": late}):
        answer = find_late(timings)
        assert (answer and (answer[0], answer[1], round(answer[2], 6))) == (found and ("b:1", *found))


def test_without_collectives_who_computes_longer_votes_later_for_that_reason() -> None:
    quick = Timing(10.0, 1.0, 0.0, 12.0)
    answer = find_late({"a:1": quick, "b:1": quick._replace(computed_s=1.4, voted_at=12.41)})
    assert answer is not None and answer[:2] == ("b:1", Phase.COMPUTE)


def test_nobody_waits_where_most_are_alike_slow_or_one_is_alone() -> None:
    slow = ALIKE._replace(computed_s=3.0)
    assert find_late({"a:1": ALIKE, "b:1": slow, "c:1": slow}) is None
    assert find_late({"a:1": slow}) is None
    assert find_late({}) is None


def make_step(job: Job, slow: Member, *others: Member, computed_s: float = 2.0, reduced_s: float = 0.0) -> None:
    they_ask(slow, *others)
    job.passes(2.0)
    slow.votes(computed_s=computed_s, reduced_s=reduced_s, num_collectives=1)
    for other in others:
        other.votes(computed_s=0.5, reduced_s=1.5, num_collectives=1)
    for member in (slow, *others):
        assert member.hears()[-1].startswith("commit")


def named(job: Job) -> list[str]:
    return [line for line in job.log if "slower than" in line]


def test_one_that_is_slow_for_many_steps_is_named_once_in_each_life() -> None:
    job, a, b, c = Job.of("abc", 1)
    for _ in range(NUM_SLOW - 1):
        make_step(job, b, a, c)
    assert named(job) == []
    assert job.lighthouse.job.waits.last == Waited("b:1", Phase.COMPUTE, 1.5, NUM_SLOW - 1, 2.0)
    assert job.lighthouse.job.waits.seconds == {
        "b": {Phase.COMPUTE: 1.5 * (NUM_SLOW - 1), Phase.QUORUM: 0.0, Phase.ALLREDUCE: 0.0, Phase.VOTE: 0.0}
    }
    for _ in range(NUM_SLOW + 1):
        make_step(job, b, a, c)
    assert named(job) == [
        "b:1 has been slower than the other groups for 20 steps: in step 20 they waited for it 1.500 of 2.000 s (forward and"
        " backward). Its machine may be slow or shared; `status --stacks GROUP` shows what it does"
    ]
    b.dies()
    job.step(a, c)
    b = job.join("b", life=2)
    job.lets_in(b, others=[a, c])
    job.step(a, b, c)
    for _ in range(NUM_SLOW):
        make_step(job, b, a, c)
    assert len(named(job)) == 2 and named(job)[1].startswith("b:2 has been slower")


def test_one_that_is_slow_in_one_phase_after_another_is_named_too() -> None:
    waiting, quick = Waiting(), Timing(asked_at=0.0, computed_s=0.0, reduced_s=0.0, voted_at=0.0)
    late = [quick._replace(computed_s=1.0), quick._replace(asked_at=1.0), quick._replace(voted_at=1.0)]
    said = [
        waiting.committed(step, {"a:1": quick, "b:1": late[step % 3], "c:1": quick}, 2.0 * step)
        for step in range(NUM_SLOW + 1)
    ]
    assert [bool(warning) for warning in said] == [False] * NUM_SLOW + [True]


def test_one_that_is_slow_now_and_then_is_not_named() -> None:
    job, a, b, c = Job.of("abc", 1)
    for number in range(3 * NUM_SLOW):
        make_step(job, *((a, b, c) if number % NUM_SLOW == 0 else (b, a, c)))
    assert named(job) == []


def test_what_a_hostile_member_says_of_itself_counts_for_no_more_than_the_step_took() -> None:
    job, a, b, c = Job.of("abc", 1)
    make_step(job, b, a, c, computed_s=1e9)
    assert job.lighthouse.job.waits.last == Waited("b:1", Phase.COMPUTE, 2.0, 1, 2.0)
    make_step(job, b, a, c, computed_s=0.0, reduced_s=1e9)
    assert job.lighthouse.job.waits.last is None


def test_a_step_that_does_not_count_is_nobodys() -> None:
    job, a, b = Job.of("ab", 1)
    they_ask(a, b)
    job.passes(5.0)
    a.votes(error="the loader is broken", broken=True)
    b.votes(computed_s=5.0)
    make_step(job, b, a)
    assert job.lighthouse.job.waits.seconds["b"][Phase.COMPUTE] == 1.5
    assert job.lighthouse.job.waits.last == Waited("b:1", Phase.COMPUTE, 1.5, 1, 2.0), (
        "the time of the other is not in it"
    )


def test_groups_of_ever_new_names_cost_no_more_memory() -> None:
    waiting = Waiting()
    for number in range(MAX_GROUPS_COUNTED + 10):
        waiting.committed(number, {f"g{number}:1": ALIKE._replace(computed_s=2.0), "a:1": ALIKE}, float(number))
    assert len(waiting.seconds) == MAX_GROUPS_COUNTED
    assert waiting.of_all[Phase.COMPUTE] == MAX_GROUPS_COUNTED + 9, "of the first step nobody knows how long it took"


def test_the_table_of_phases_has_a_row_for_each() -> None:
    rows = [line.split("|")[1].strip() for line in str(waiting_module.__doc__).splitlines() if line.startswith("| ")]
    assert {*rows} == {"phase", *(phase.value for phase in Phase)}
