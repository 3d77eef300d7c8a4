"""The events of a Manager on their way to the training thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from torchft_ckpt.events import Event
from torchft_ckpt.manager.event_file import EventFile

logger = logging.getLogger(__name__)


class EventQueue:
    """Events that happened, until the training thread hands them over to `on_event`. Any thread may add one.

    If there is a file, each is written to it as it happens, and `count` is called with each. What `on_event` raises is logged the
    first time, and ends no step.
    """

    def __init__(self, on_event: Callable[[Event], None] | None, party: str, file: EventFile | None = None) -> None:
        self.count: Callable[[Event], None] = lambda event: None
        self._on_event = on_event
        self._party = party
        self.file = file
        self._pending: deque[Event] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._is_delivering = False
        self._has_warned = False

    @property
    def is_heard(self) -> bool:
        """Whether what happens is handed over to a user's function."""
        return self._on_event is not None

    def call_later(self, call: Callable[[], None]) -> None:
        """Have something called when events are handed over next: between two steps. It must not raise."""
        self._later.append(call)

    def add(self, event: Event) -> None:
        """Note that something happened. Waits for nothing."""
        if self.file is not None:
            self.file.add(type(event).__name__, asdict(event))
        self.count(event)
        if self._on_event is not None:
            self._pending.append(event)

    def deliver(self) -> None:
        """Hand over what happened, in order. On the training thread, under no lock."""
        if self._is_delivering:  # on_event began or ended a step itself
            return
        self._is_delivering = True
        try:
            while self._later:
                self._later.popleft()()
            while self._pending and self._on_event is not None:
                self._hand_over(self._on_event, self._pending.popleft())
        finally:
            self._is_delivering = False

    def _hand_over(self, on_event: Callable[[Event], None], event: Event) -> None:
        try:
            on_event(event)
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                logger.exception(
                    "%s: on_event raised for %s; training goes on, and what it raises from now on is not logged",
                    self._party,
                    event,
                )
