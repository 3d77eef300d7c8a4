"""Virtual time and the processes that live in it. A killed process does nothing any more; a stopped one does it later."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]


class Process:
    """Something that can be killed (SIGKILL) and stopped (SIGSTOP).

    Args:
        name: for the log.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.stopped_at = 0.0
        """Since when it is stopped, or was the last time."""
        self.stops: list[tuple[float, float]] = []
        """From when to when it was stopped; a stop that lasts is not in it."""
        self.backlog: list[Action] = []
        self.on_death: list[Action] = []
        """What the outside world does when it dies, such as closing its connections."""
        self.checks: list[Action] = []
        """What must hold after each of its actions."""

    def stopped_s(self, began: float, ended: float) -> float:
        """Return for how many of these seconds it was stopped."""
        return sum(max(0.0, min(ended, until) - max(began, since)) for since, until in self.stops)

    def __repr__(self) -> str:
        return f"Process({self.name}, alive={self.is_alive}, stopped={self.is_stopped})"


class Clock:
    """Runs actions in the order of their time; ties in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self.running: Process | None = None
        self._queue: list[tuple[float, int, Process | None, Action]] = []
        self._number = 0

    def after(self, delay_s: float, process: Process | None, action: Action) -> None:
        """Run an action in a process after a while; None: nobody's, it always runs."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, process, action))

    def step(self) -> bool:
        """Run the next action. False: there is none."""
        if not self._queue:
            return False
        at, _, process, action = heapq.heappop(self._queue)
        self.now = max(self.now, at)
        if process is not None:
            if not process.is_alive:
                return True
            if process.is_stopped:
                process.backlog.append(action)
                return True
        self.num_events += 1
        self.running = process
        action()
        for check in process.checks if process is not None else ():
            check()
        self.running = None
        return True

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if process.is_alive:
            process.is_alive = False
            process.backlog.clear()
            for action in process.on_death:
                action()

    def stop(self, process: Process) -> None:
        """SIGSTOP."""
        if not process.is_stopped:
            process.is_stopped, process.stopped_at = True, self.now

    def wake(self, process: Process) -> None:
        """SIGCONT: what piled up is done now, in order."""
        if process.is_stopped:
            process.stops.append((process.stopped_at, self.now))
        process.is_stopped = False
        backlog, process.backlog = process.backlog, []
        for action in backlog:
            self.after(0.0, process, action)
