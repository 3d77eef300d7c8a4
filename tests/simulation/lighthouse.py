"""The lighthouse's process: drives `core.coordination.lighthouse`, and comes back without memory after a crash."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from simulation.clock import Action, Clock, Process
from simulation.network import Connection
from simulation.oracle import Oracle, must_hold
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    Event,
    Instruction,
    LighthouseSettings,
    Log,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.restart import NOTHING_UNTOLD, Untold


class Lighthouse:
    """One lighthouse over its lives.

    Args:
        log: gets what an operator would read.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        settings: LighthouseSettings,
        oracle: Oracle,
        log: Callable[[str], None],
        max_delay_s: float,
    ) -> None:
        self._clock, self._rng, self._settings = clock, rng, settings
        self._oracle, self._log = oracle, log
        self._max_delay_s = max_delay_s
        self._life = 0
        self._number = 0
        self.untold: Untold = NOTHING_UNTOLD
        """What it knows of earlier lives."""
        self.connections: dict[str, Connection] = {}
        self._start()

    def _start(self) -> None:
        self._life += 1
        self.process = Process(f"lighthouse:{self._life}")
        self._begin_life()

    def _begin_life(self) -> None:
        # Epochs are in no order: nothing may depend on one.
        epoch = f"{self._rng.getrandbits(16):04x}.{self._life}"
        self.state = LighthouseState(self._settings, epoch=epoch, untold=self.untold)
        self._armed: float | None = None
        self._oracle.new_life(self.state.epoch, self.process)

    def crash(self) -> None:
        """SIGKILL; `restart` brings it back without memory."""
        process = self.process
        self._clock.kill(process)
        for connection in list(self.connections.values()):
            connection.close(by_server=True)
        self.connections.clear()

    def restart(self) -> None:
        if not self.process.is_alive:
            self._start()

    def accept(self, client: Process, on_client: Callable[[Any], None], on_client_closed: Action) -> Connection:
        """A group connects."""
        self._number += 1
        name = f"c{self._number}"
        connection = Connection(
            self._clock,
            self._rng,
            client,
            self.process,
            name=name,
            on_client=on_client,
            on_server=lambda message: self.handle(Received(name, message)),
            on_client_closed=on_client_closed,
            on_server_closed=lambda: self._closed(name),
            max_delay_s=self._max_delay_s,
        )
        self.connections[name] = connection
        return connection

    def handle(self, event: Event) -> None:
        """Take an event, as the service does."""
        instructions = self.state.handle(event, self._clock.now)
        must_hold(self.state.validate)()
        self._oracle.lighthouse_handled(self.state, event, instructions)
        self._carry_out(instructions)
        self._arm()

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                if instruction.connection in self.connections:
                    self.connections[instruction.connection].send_to_client(instruction.message)
            elif isinstance(instruction, Close):
                connection = self.connections.pop(instruction.connection, None)
                if connection is not None:
                    connection.close(by_server=True)
            elif isinstance(instruction, Log):
                self._log(instruction.line)

    def _closed(self, name: str) -> None:
        if self.connections.pop(name, None) is not None:
            self.handle(ConnectionClosed(name))

    def _arm(self) -> None:
        deadline = self.state.next_deadline()
        if deadline is not None and deadline != self._armed:
            self._armed = deadline
            self._clock.after(max(0.0, deadline - self._clock.now), self.process, lambda: self._tick(deadline))

    def _tick(self, deadline: float) -> None:
        if deadline == self._armed:
            self._armed = None
            self.handle(Tick())
