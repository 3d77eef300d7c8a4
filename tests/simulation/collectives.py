"""The training process group as a model: what an allreduce does when a member dies in it.

An allreduce completes when all members have entered it, for each of them at a moment of its own. Who dies or aborts in
between fails some of the others, at once (its neighbours in the ring) or not before they abort or time out; those that had
what they needed succeed. So one step succeeds for some members and fails for others: that is what the vote is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from simulation.clock import Action, Clock, Process


@dataclass(slots=True)
class Handle:
    """One member's end of a process group."""

    group: Group
    replica_rank: int
    process: Process
    failed: Action
    is_ready: bool = False
    is_aborted: bool = False
    num_ops: int = 0
    waiting: dict[int, Callable[[tuple[object, ...] | None], None]] = field(default_factory=dict)
    """By operation: called with the result, None where it failed."""


@dataclass(slots=True)
class _Operation:
    entered: dict[int, tuple[int, object]] = field(default_factory=dict)
    """By replica rank: step and contribution."""


@dataclass(slots=True)
class Group:
    """The process group of one quorum and group rank."""

    size: int
    handles: dict[int, Handle] = field(default_factory=dict)
    ready: dict[int, Action] = field(default_factory=dict)
    operations: dict[int, _Operation] = field(default_factory=dict)
    is_broken: bool = False


class Collectives:
    """All process groups of the job.

    Args:
        clock, rng: time and chance.
        fail: called with a text when members disagree on what they are doing.
        timeout_s: of one operation; configuring has the same.
    """

    def __init__(self, clock: Clock, rng: Random, fail: Callable[[str], None], timeout_s: float) -> None:
        self._clock, self._rng, self._fail = clock, rng, fail
        self._timeout_s = timeout_s
        self._groups: dict[tuple[object, str, int], Group] = {}
        self._meetings: dict[tuple[object, str, int], dict[int, tuple[Process, Callable[[str], None]]]] = {}
        self._made: set[tuple[tuple[object, str, int], str]] = set()
        """Places beside a quorum, and who is connected there."""
        self.stall_s = 0.0
        self.apart: dict[str, float] = {}
        """Groups that nobody can connect with, and until when. Who is connected with one stays so."""

    def _are_apart(self, processes: Iterable[Process]) -> bool:
        names = {process.name.partition(":")[0] for process in processes}
        return len(names) > 1 and any(self._clock.now < self.apart.get(name, 0.0) for name in names)

    def connect_beside(
        self, key: tuple[object, str, int], replica_rank: int, size: int, process: Process, done: Callable[[str], None]
    ) -> None:
        """Meet other members beside the group in use; `done` is called with why that went wrong, or with nothing."""
        meeting = self._meetings.setdefault(key, {})
        meeting[replica_rank] = process, done

        def give_up() -> None:
            if (key, process.name) not in self._made:
                done("not all of them came")

        self._clock.after(self._timeout_s, process, give_up)
        if len(meeting) == size and not self._are_apart(process for process, _ in meeting.values()):
            for member, answer in meeting.values():
                self._made.add((key, member.name))
                self._clock.after(self._rng.uniform(0.001, 0.01), member, lambda answer=answer: answer(""))  # type: ignore[misc]

    def configure(
        self,
        key: tuple[object, str, int],
        replica_rank: int,
        size: int,
        process: Process,
        ready: Action,
        failed: Action,
    ) -> Handle:
        """Meet the other members, or take what was connected under this key. `ready` or `failed` is called once."""
        if key in self._meetings and (key, process.name) not in self._made:
            self._fail(f"{process.name} takes what was not connected: {key}")
        group = self._groups.setdefault(key, Group(size))
        if group.size != size or replica_rank in group.handles:
            self._fail(f"two members meet in quorum {key} as rank {replica_rank} of {size}: {group}")
        handle = Handle(group, replica_rank, process, failed)
        group.handles[replica_rank] = handle

        def give_up() -> None:
            if not handle.is_ready and not handle.is_aborted:
                self.abort(handle)

        def become_ready() -> None:
            if not handle.is_aborted and not handle.is_ready:
                handle.is_ready = True
                ready()

        process.on_death.append(lambda: self._break(handle))
        group.ready[replica_rank] = become_ready
        self._clock.after(self._timeout_s, process, give_up)
        are_apart = key not in self._meetings and self._are_apart(member.process for member in group.handles.values())
        if len(group.handles) == size and not group.is_broken and not are_apart:
            for member in group.handles.values():
                delay = self._rng.uniform(0.001, 0.01)
                self._clock.after(delay, member.process, group.ready[member.replica_rank])
        return handle

    def allreduce(
        self,
        handle: Handle,
        step: int,
        contribution: object,
        done: Callable[[tuple[object, ...] | None], None],
        timeout_s: float | None = None,
    ) -> None:
        """Reduce. `done` is called once, with all contributions or None. `timeout_s`: if another one than usual."""
        number = handle.num_ops
        handle.num_ops += 1
        if handle.is_aborted or not handle.is_ready:
            self._clock.after(0.0, handle.process, lambda: done(None))
            return
        handle.waiting[number] = done
        self._clock.after(timeout_s or self._timeout_s, handle.process, lambda: self._time_out(handle, number))
        group = handle.group
        operation = group.operations.setdefault(number, _Operation())
        operation.entered[handle.replica_rank] = (step, contribution)
        if group.is_broken:
            self._may_fail(handle, number)
        elif len(operation.entered) == group.size:
            if len({step for step, _ in operation.entered.values()}) != 1:
                self._fail(f"an allreduce mixes steps: {operation.entered}")
            result = tuple(operation.entered[rank][1] for rank in sorted(operation.entered))
            for member in group.handles.values():
                delay = self._rng.uniform(0.001, 0.012) + self.stall_s
                self._clock.after(delay, member.process, lambda m=member: self._complete(m, number, result))  # type: ignore[misc]

    def abort(self, handle: Handle) -> None:
        """Give the process group up; what is in flight fails here at once."""
        if handle.is_aborted:
            return
        self._break(handle)
        if not handle.is_ready:
            self._clock.after(0.0, handle.process, handle.failed)
        waiting, handle.waiting = handle.waiting, {}
        for done in waiting.values():
            self._clock.after(0.0, handle.process, lambda done=done: done(None))  # type: ignore[misc]

    def _break(self, handle: Handle) -> None:
        if handle.is_aborted:
            return
        handle.is_aborted = True
        group = handle.group
        group.is_broken = True
        for member in group.handles.values():
            if member is not handle:
                for number in list(member.waiting):
                    self._may_fail(member, number)

    def _may_fail(self, handle: Handle, number: int) -> None:
        if self._rng.random() < 0.5:
            self._clock.after(self._rng.uniform(0.0005, 0.005), handle.process, lambda: self._time_out(handle, number))

    def _complete(self, handle: Handle, number: int, result: tuple[object, ...]) -> None:
        if handle.is_aborted or number not in handle.waiting:
            return
        if handle.group.is_broken and self._rng.random() < 0.5:
            return  # what it still needed was lost: it hangs until it aborts or times out
        handle.waiting.pop(number)(result)

    def _time_out(self, handle: Handle, number: int) -> None:
        if number in handle.waiting:
            handle.waiting.pop(number)(None)
