"""Which groups of a launched job start again, when, and with what status the launcher ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_ckpt.core.services.launching import LaunchedJob, LaunchPlan, shell_status
from torchft_ckpt.errors import ConfigError


def plan(num_groups: int = 3, *, all_groups: int | None = None, least: int = 1, restarts: int = 3) -> LaunchPlan:
    return LaunchPlan(
        num_groups=num_groups, num_all_groups=all_groups or num_groups, min_replicas=least, max_restarts=restarts
    )


def test_all_groups_start_at_once_and_a_job_whose_groups_end_well_ends_well() -> None:
    job = LaunchedJob(plan())
    assert job.to_start(0.0) == [0, 1, 2]
    assert job.to_start(9.0) == []
    for group in range(3):
        assert not job.is_over
        assert job.ended(group, 0, 10.0) is None
    assert job.is_over
    assert job.exit_status == 0


def test_a_group_that_fails_starts_again_ever_later_until_it_has_no_restart_left() -> None:
    job, now, delays = LaunchedJob(plan(restarts=7)), 100.0, []
    job.to_start(now)
    while (delay := job.ended(1, 1, now)) is not None:
        delays.append(delay)
        assert job.next_start() == now + delay
        assert job.to_start(now + delay - 0.001) == []
        now += delay
        assert job.to_start(now) == [1]
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    assert job.restarts_left(1) == 0
    assert not job.is_stopping


def test_the_others_go_on_without_a_failed_group_while_enough_are_left() -> None:
    job = LaunchedJob(plan(3, least=2, restarts=0))
    job.to_start(0.0)
    job.ended(2, -9, 1.0)
    assert not job.is_stopping
    job.ended(0, 0, 2.0)
    job.ended(1, 0, 3.0)
    assert job.is_over
    assert job.exit_status == 137, "as a shell shows SIGKILL"


def test_too_few_groups_stop_the_job_with_the_status_of_the_first_that_failed() -> None:
    job = LaunchedJob(plan(3, least=2, restarts=1))
    job.to_start(0.0)
    job.ended(0, 5, 1.0)
    job.to_start(2.0)
    job.ended(0, 6, 3.0)
    assert not job.is_stopping
    job.ended(1, 7, 4.0)
    assert job.ended(2, 8, 4.5) == 1.0
    assert job.to_start(5.0) == [1]
    job.ended(1, 7, 6.0)
    assert job.is_stopping
    assert job.is_over, "group 2 waited for its restart, which does not come"
    assert job.to_start(100.0) == []
    assert job.next_start() is None
    assert job.exit_status == 6


def test_a_group_that_is_ended_is_not_the_one_that_failed() -> None:
    job = LaunchedJob(plan(2, least=2, restarts=0))
    job.to_start(0.0)
    job.ended(0, 3, 1.0)
    assert job.is_stopping
    assert not job.is_over
    assert job.ended(1, -15, 2.0) is None
    assert job.is_over
    assert job.exit_status == 3


@pytest.mark.parametrize(("statuses", "expected"), [((0, 0), 0), ((0, -15), 130), ((1, 1), 130)])
def test_a_job_that_was_stopped_ends_well_only_if_all_its_groups_did(statuses: tuple[int, int], expected: int) -> None:
    job = LaunchedJob(plan(2))
    job.to_start(0.0)
    job.stop(130)
    job.stop(143)
    for group, status in enumerate(statuses):
        assert not job.is_over
        assert job.ended(group, status, 1.0) is None
    assert job.is_over
    assert job.exit_status == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((), (0, 0), 75),
        ((0,), (0,), 75),
        ((0, 0), (), 0),
        ((), (0, -9), 143),
        ((), (1, 0), 143),
    ],
)
def test_groups_that_leave_as_the_launcher_is_told_to_stop_have_a_status_of_their_own(
    before: tuple[int, ...], after: tuple[int, ...], expected: int
) -> None:
    """Nobody starts finished work again, so a group that left must not look finished."""
    job = LaunchedJob(LaunchPlan(num_groups=2, num_all_groups=2, min_replicas=1, left_status=75))
    job.to_start(0.0)
    for group, status in enumerate(before):
        job.ended(group, status, 1.0)
    job.stop(143)
    for group, status in enumerate(after, start=len(before)):
        job.ended(group, status, 2.0)
    assert job.is_over
    assert job.exit_status == expected


def test_a_failed_group_counts_for_more_than_those_that_leave() -> None:
    job = LaunchedJob(LaunchPlan(num_groups=2, num_all_groups=2, min_replicas=1, max_restarts=0, left_status=75))
    job.to_start(0.0)
    job.ended(0, 5, 1.0)
    job.stop(143)
    job.ended(1, 0, 2.0)
    assert job.exit_status == 5


def test_a_group_that_is_drained_alone_has_finished_for_its_launcher() -> None:
    job = LaunchedJob(LaunchPlan(num_groups=1, num_all_groups=4, min_replicas=3, left_status=75))
    job.to_start(0.0)
    job.ended(0, 0, 1.0)
    assert job.exit_status == 0


def test_groups_of_other_machines_count_as_left() -> None:
    job = LaunchedJob(plan(1, all_groups=4, least=3, restarts=0))
    job.to_start(0.0)
    job.ended(0, 1, 1.0)
    assert not job.is_stopping
    assert job.is_over


@given(
    num_groups=st.integers(1, 4),
    least=st.integers(1, 4),
    restarts=st.integers(0, 3),
    ends=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, -9]), st.floats(0, 50))),
)
def test_no_group_starts_more_often_than_it_may_nor_when_it_has_ended_well(
    num_groups: int, least: int, restarts: int, ends: list[tuple[int, int, float]]
) -> None:
    job = LaunchedJob(plan(num_groups, least=min(least, num_groups), restarts=restarts))
    running, starts, finished, now = set[int](), dict[int, int](), set[int](), 0.0
    for group, status, passed in [(0, 0, 0.0), *ends]:
        started = job.to_start(now)
        assert not (started and job.is_stopping)
        for number in started:
            starts[number] = starts.get(number, 0) + 1
        running |= set(started)
        if group in running:
            job.ended(group, status, now)
            running.discard(group)
            if status == 0:
                finished.add(group)
        assert not running & finished
        assert max(starts.values()) <= restarts + 1
        now += passed
        assert not job.is_over or not running
        assert (job.exit_status == 0) == (len(finished) == num_groups)


def test_each_group_has_gpus_of_its_own_in_the_machines_order() -> None:
    second_machine = LaunchPlan(
        first_group=4, num_groups=2, num_all_groups=6, ranks_per_group=2, min_replicas=1, max_restarts=0
    )
    names = ("0", "3", "GPU-5c", "7", "8")
    assert [second_machine.devices_of(group, names) for group in second_machine.groups] == [("0", "3"), ("GPU-5c", "7")]
    assert second_machine.devices_of(5, ()) == ()
    with pytest.raises(ConfigError, match=r"2 groups of 2 ranks need 4 GPUs, and this machine has 3"):
        second_machine.devices_of(4, names[:3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_groups": 0}, "--groups is 0; it has to be at least 1"),
        ({"ranks_per_group": 0}, "--nproc is 0"),
        ({"max_restarts": -1}, "--restarts is -1; it has to be at least 0"),
        ({"first_group": -1}, "--first-group is -1"),
        ({"min_replicas": 0}, "--min-replicas is 0"),
        ({"left_status": -1}, "--left-status is -1; it has to be at least 0"),
        ({"left_status": 256}, "--left-status is 256; a status is at most 255"),
        ({"min_replicas": 5}, "--min-replicas is 5, but the job has 3 groups"),
        ({"first_group": 2}, "--all-groups is 3, but this launcher starts the groups up to 4"),
    ],
)
def test_numbers_out_of_range_are_refused_by_their_options(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchPlan(**{"num_groups": 3, "num_all_groups": 3, "min_replicas": 2, **settings})


def test_a_status_is_written_as_a_shell_does() -> None:
    assert [shell_status(status) for status in (0, 3, -9)] == [0, 3, 137]
