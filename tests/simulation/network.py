"""Connections: messages arrive late, in order, or never. Every message goes through its wire format.

A connection can be cut (both ends learn of it soon) or fall silent (nobody learns of anything until it is over). The end of
a process closes its connections.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from simulation.clock import Action, Clock, Process
from torchft_ckpt.core.coordination.messages import decode_from_lighthouse, decode_to_lighthouse, encode


class Connection:
    """One connection from a group (`client`) to the lighthouse (`server`).

    Args:
        clock, rng: time and chance.
        client, server: the processes.
        on_client, on_server: called with each message, in the receiver's process.
        on_client_closed, on_server_closed: called once when the other side or the network closed it.
        max_delay_s: of a message.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        client: Process,
        server: Process,
        *,
        name: str,
        on_client: Callable[[Any], None],
        on_server: Callable[[Any], None],
        on_client_closed: Action,
        on_server_closed: Action,
        max_delay_s: float,
    ) -> None:
        self.name = name
        self.client, self.server = client, server
        self.is_silent = False
        self._clock, self._rng = clock, rng
        self._max_delay_s = max_delay_s
        self._receive = {True: on_server, False: on_client}
        self._closed = {True: on_server_closed, False: on_client_closed}
        self._is_open = {True: True, False: True}
        """By end (True: the server's): it may receive."""
        self._last_at = {True: 0.0, False: 0.0}
        self._held: list[tuple[int, bool, Action]] = []
        self._number = 0

    def send_to_server(self, message: Any) -> None:
        text = encode(message)
        self._send(True, lambda: self._receive[True](decode_to_lighthouse(text, self.name)))

    def send_to_client(self, message: Any) -> None:
        text = encode(message)
        self._send(False, lambda: self._receive[False](decode_from_lighthouse(text, self.name)))

    def close(self, by_server: bool) -> None:
        """One end closes (or dies): the other learns of it after what was sent before."""
        self._is_open[by_server] = False
        other = not by_server
        self._send(other, lambda: self._end(other), at_any_rate=True)

    def cut(self) -> None:
        """The network breaks it: both ends learn of it, what is under way is lost."""
        for end in (True, False):
            if self._is_open[end]:
                process = self.server if end else self.client
                self._clock.after(self._rng.uniform(0, self._max_delay_s), process, lambda end=end: self._end(end))  # type: ignore[misc]
        self._last_at = {True: float("inf"), False: float("inf")}

    def fall_silent(self) -> None:
        self.is_silent = True

    def speak_again(self) -> None:
        """What was said in the silence arrives now (TCP sends it again)."""
        self.is_silent = False
        held, self._held = sorted(self._held, key=lambda item: item[0]), []
        for number, to_server, action in held:
            self._send(to_server, action, at_any_rate=True, number=number)

    def _end(self, end: bool) -> None:
        if self._is_open[end]:
            self._is_open[end] = False
            self._closed[end]()

    def _send(self, to_server: bool, action: Action, at_any_rate: bool = False, number: int | None = None) -> None:
        if number is None:
            self._number += 1
            number = self._number
        if self.is_silent:
            self._held.append((number, to_server, action))
            return
        if self._last_at[to_server] == float("inf"):
            return
        at = max(self._last_at[to_server], self._clock.now + self._rng.uniform(0.0002, self._max_delay_s))
        self._last_at[to_server] = at
        process = self.server if to_server else self.client
        self._clock.after(at - self._clock.now, process, lambda: self._arrive(number, to_server, action, at_any_rate))

    def _arrive(self, number: int, to_server: bool, action: Action, at_any_rate: bool) -> None:
        if self.is_silent:
            self._held.append((number, to_server, action))
        elif self._is_open[to_server] and (at_any_rate or self._last_at[to_server] != float("inf")):
            action()
