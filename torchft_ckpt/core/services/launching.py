"""A job whose replica groups one launcher starts: which groups start again and when, when the job ends, and with what status.

A launcher may start some of a job's groups only: further machines start the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from torchft_ckpt.errors import ConfigError

MAX_RESTART_DELAY_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """The groups that one launcher starts, of all that the job has.

    Args:
        first_group: number of the launcher's first group; the others follow it.
        num_all_groups: how many groups the whole job has, on all machines.
        left_status: the launcher's status where it was told to stop and its groups then ended with 0, 0 to 255.

    Raises:
        ConfigError: a number is out of its range.
    """

    first_group: int = 0
    num_groups: int
    num_all_groups: int
    ranks_per_group: int = 1
    min_replicas: int
    max_restarts: int = 3
    left_status: int = 0

    def __post_init__(self) -> None:
        for number, least, option in (
            (self.num_groups, 1, "--groups"),
            (self.ranks_per_group, 1, "--nproc"),
            (self.max_restarts, 0, "--restarts"),
            (self.first_group, 0, "--first-group"),
            (self.min_replicas, 1, "--min-replicas"),
            (self.left_status, 0, "--left-status"),
        ):
            if number < least:
                raise ConfigError(f"{option} is {number}; it has to be at least {least}", party=option)
        if self.left_status > 255:
            raise ConfigError(f"--left-status is {self.left_status}; a status is at most 255", party="--left-status")
        last = self.first_group + self.num_groups
        if self.num_all_groups < last:
            raise ConfigError(
                f"--all-groups is {self.num_all_groups}, but this launcher starts the groups up to {last - 1}",
                party="--all-groups",
            )
        if self.min_replicas > self.num_all_groups:
            raise ConfigError(
                f"--min-replicas is {self.min_replicas}, but the job has {self.num_all_groups} groups",
                party="--min-replicas",
            )

    @property
    def groups(self) -> range:
        """The numbers of the launcher's groups."""
        return range(self.first_group, self.first_group + self.num_groups)

    def devices_of(self, group: int, devices: Sequence[str]) -> tuple[str, ...]:
        """Return the GPUs of a group: as many as it has ranks, in the machine's order.

        Args:
            devices: the names of this machine's GPUs, as CUDA_VISIBLE_DEVICES has them; none for training on the CPU.

        Raises:
            ConfigError: the machine has GPUs, but too few for all groups.
        """
        needed = self.num_groups * self.ranks_per_group
        if devices and len(devices) < needed:
            raise ConfigError(
                f"{self.num_groups} groups of {self.ranks_per_group} ranks need {needed} GPUs, and this machine has"
                f" {len(devices)}; start fewer groups, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU",
                party="CUDA_VISIBLE_DEVICES",
            )
        first = (group - self.first_group) * self.ranks_per_group
        return tuple(devices[first : first + self.ranks_per_group])


class _State(Enum):
    RUNNING = "running"
    TO_START = "to start"
    FINISHED = "finished"
    FAILED = "failed"


class LaunchedJob:
    """The groups of a launcher, as they ended so far: it says which start again, and how the job ends. One thread uses it.

    A group that ends with status 0 has finished, or has left its job as it was asked to (`Manager.leave_on`), and stays away. One
    that ends with a status other than 0 starts again, up to `max_restarts` times, after 1, 2, 4, ... 30 s. A group
    that has no restart left has failed. Once fewer than `min_replicas` groups are left, or `stop` was called, the job stops:
    no group starts again, and the launcher ends those that run. Groups of other machines count as left.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._states = dict.fromkeys(plan.groups, _State.TO_START)
        self._start_at = dict.fromkeys(plan.groups, -math.inf)
        self._num_restarts = dict.fromkeys(plan.groups, 0)
        self._first_failure: int | None = None
        self._stop_status: int | None = None
        self._has_one_left = False

    @property
    def is_stopping(self) -> bool:
        """Whether the groups that run have to end."""
        return self._stop_status is not None or not self._are_enough_left

    @property
    def is_over(self) -> bool:
        """Whether no group runs, and none will."""
        pending = {_State.RUNNING} if self.is_stopping else {_State.RUNNING, _State.TO_START}
        return not pending.intersection(self._states.values())

    @property
    def num_left(self) -> int:
        """The number of groups of the whole job that have not failed."""
        return self._plan.num_all_groups - sum(state is _State.FAILED for state in self._states.values())

    @property
    def exit_status(self) -> int:
        """Status of the launcher: 0 if all its groups ended with 0; else that of the first that failed, or of `stop`.

        It is the plan's `left_status` if all ended with 0, and not all of them before `stop`. Those that were running then
        have left, as far as anybody can tell: a group that has made its last step ends alike.
        """
        if all(state is _State.FINISHED for state in self._states.values()):
            return self._plan.left_status if self._has_one_left else 0
        return next((status for status in (self._first_failure, self._stop_status) if status is not None), 1)

    def restarts_left(self, group: int) -> int:
        """Return how often a group may start again."""
        return self._plan.max_restarts - self._num_restarts[group]

    def to_start(self, now: float) -> list[int]:
        """Return the groups to start now; each is running from then on."""
        due = [] if self.is_stopping else [group for group in self._waiting() if self._start_at[group] <= now]
        for group in due:
            self._states[group] = _State.RUNNING
        return due

    def next_start(self) -> float | None:
        """Return when the next group starts; None: none does."""
        return None if self.is_stopping else min((self._start_at[group] for group in self._waiting()), default=None)

    def ended(self, group: int, status: int, now: float) -> float | None:
        """Note that a group ended.

        Args:
            status: of its launcher process; below 0 where a signal ended it, as `subprocess` has it.
            now: in seconds, on a clock that never goes back.

        Returns:
            In how many seconds it starts again; None: not at all.
        """
        if status == 0:
            self._states[group] = _State.FINISHED
            self._has_one_left = self._has_one_left or self._stop_status is not None
            return None
        if self.is_stopping:
            self._states[group] = _State.TO_START  # it was ended, and is neither finished nor at fault
            return None
        if self.restarts_left(group) == 0:
            self._states[group] = _State.FAILED
            if self._first_failure is None:
                self._first_failure = shell_status(status)
            return None
        delay_s = min(2.0 ** min(self._num_restarts[group], 5), MAX_RESTART_DELAY_S)
        self._num_restarts[group] += 1
        self._states[group] = _State.TO_START
        self._start_at[group] = now + delay_s
        return delay_s

    def stop(self, status: int) -> None:
        """Stop the job; `status` is the launcher's if a group has not finished. Only the first call counts."""
        if self._stop_status is None:
            self._stop_status = status

    @property
    def _are_enough_left(self) -> bool:
        return self.num_left >= self._plan.min_replicas

    def _waiting(self) -> Iterable[int]:
        return (group for group, state in self._states.items() if state is _State.TO_START)


def shell_status(status: int) -> int:
    """Return a process's status as a shell shows it: 128 and the signal's number where a signal ended it."""
    return 128 - status if status < 0 else status
