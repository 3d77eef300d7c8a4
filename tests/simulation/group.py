"""One incarnation of a replica group: its ranks' processes, its rules at rank 0, and the connection to the lighthouse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.clock import Clock, Process
from simulation.network import Connection
from simulation.oracle import Oracle, must_hold
from simulation.trainer import Trainer
from torchft_ckpt.core.coordination.group import (
    GroupEvent,
    GroupState,
    LighthouseMessage,
    LighthouseUp,
    RankLost,
    RankMessage,
    SendToRank,
)
from torchft_ckpt.core.coordination.leadership import Trust
from torchft_ckpt.core.coordination.messages import (
    Dropped,
    GroupBroken,
    Heartbeat,
    QuorumRequest,
    RankToGroup,
    Refused,
    Welcome,
    decode_group_to_rank,
    decode_rank_to_group,
    encode,
)
from torchft_ckpt.core.coordination.patience import reconnect_delay_s

if TYPE_CHECKING:
    from simulation.lighthouse import Lighthouse


class ReplicaGroup:
    """One incarnation.

    Args:
        replica_id: who it is.
        processes: one for each rank.
        lighthouses: where to connect: to whichever leads.
        is_reachable: whether the network lets this group through to a lighthouse at the moment.
        heartbeat_s: how often it says that it lives.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        *,
        replica_id: str,
        processes: list[Process],
        lighthouses: Sequence[Lighthouse],
        is_reachable: Callable[[Lighthouse], bool],
        heartbeat_s: float,
        oracle: Oracle,
        clock_rate: float = 1.0,
    ) -> None:
        self.replica_id = replica_id
        self.processes = processes
        self.state = GroupState(len(processes))
        self.trainers: list[Trainer] = []
        self.connection: Connection | None = None
        self.is_refused = False
        self._is_welcome = False
        self._attempt = 0
        self._clock, self._rng = clock, rng
        self._lighthouses, self._is_reachable, self._oracle = lighthouses, is_reachable, oracle
        self._lighthouse = lighthouses[0]
        """The one that it is connected to, or tries."""
        self._clock_rate = clock_rate
        self.on_taken: Callable[[Lighthouse, Any], None] = lambda lighthouse, message: None
        self.trust = Trust()
        self._held: list[Any] = []
        self._heartbeat_s = heartbeat_s
        processes[0].checks.append(must_hold(self.state.validate))
        self._last_at = {(rank, down): 0.0 for rank in range(len(processes)) for down in (False, True)}
        for rank, process in enumerate(processes):
            process.on_death.append(lambda rank=rank: self._died(rank))  # type: ignore[misc]

    @property
    def is_alive(self) -> bool:
        return any(process.is_alive for process in self.processes)

    def start(self) -> None:
        """All ranks run: connect, and begin to train."""
        home = self.processes[0]
        self._clock.after(0.0, home, self._connect)
        self._clock.after(self._heartbeat_s, home, self._beat)
        for trainer in self.trainers:
            self._clock.after(self._rng.uniform(0, 0.02), trainer.process, trainer.begin)

    def kill(self) -> None:
        """SIGKILL to all ranks."""
        for process in self.processes:
            self._clock.kill(process)

    # ---------------------------------------------------------------------------------------------------------- ranks

    def take(self, rank: int, message: RankToGroup) -> None:
        """A rank says something; rank 0 shares the process, the others are a connection away."""
        text = encode(message)
        self._local(rank, False, lambda: self._handle(RankMessage(rank, decode_rank_to_group(text, f"rank {rank}"))))

    def end_rank(self, rank: int, reason: str) -> None:
        """A rank's process ends by itself."""
        self._clock.after(0.0, None, lambda: self._clock.kill(self.processes[rank]))

    def _local(self, rank: int, down: bool, action: Callable[[], None]) -> None:
        delay = 0.0 if rank == 0 else self._rng.uniform(0.0001, 0.003)
        at = max(self._last_at[rank, down], self._clock.now + delay)
        self._last_at[rank, down] = at
        process = self.processes[rank if down else 0]
        self._clock.after(at - self._clock.now, process, action)

    def _died(self, rank: int) -> None:
        if rank == 0:
            if self.connection is not None:
                self.connection.close(by_server=False)
            broken = GroupBroken("group rank 0 is gone")
            for other in range(1, len(self.processes)):
                self._local(other, True, lambda other=other: self.trainers[other].receive(broken))  # type: ignore[misc]
        else:
            self._local(rank, False, lambda: self._handle(RankLost(rank, "its connection closed")))

    def _handle(self, event: GroupEvent) -> None:
        for instruction in self.state.handle(event):
            if isinstance(instruction, SendToRank):
                rank, text = instruction.rank, encode(instruction.message)
                self._local(
                    rank,
                    True,
                    lambda rank=rank, text=text: self.trainers[rank].receive(decode_group_to_rank(text, "group")),  # type: ignore[misc]
                )
            else:
                if isinstance(instruction.message, QuorumRequest):
                    self._oracle.group_asks(self, instruction.message)
                if self.connection is not None and self._is_welcome:
                    self.connection.send_to_server(instruction.message)

    # ------------------------------------------------------------------------------------------------------ lighthouse

    def _connect(self) -> None:
        if self.is_refused:
            return
        self._lighthouse = self._lighthouses[self._attempt % len(self._lighthouses)]
        if not self._lighthouse.process.is_alive or not self._is_reachable(self._lighthouse):
            self._retry()
            return
        self._is_welcome = False
        self._held = []
        asked_at = self._now
        lighthouse = self._lighthouse
        this = self.connection = lighthouse.accept(
            self.processes[0],
            lambda message: self._receive(lighthouse, message, asked_at),
            lambda: self._closed(this),
        )
        hello = self.trainers[0].replica.hello(self.replica_id, len(self.processes))
        self.connection.send_to_server(self.state.introduce(hello))

        def give_up() -> None:
            if self.connection is this and not self._is_welcome:
                self._leave()

        self._clock.after(1.0, self.processes[0], give_up)

    @property
    def _now(self) -> float:
        """By its own clock."""
        return self._clock.now * self._clock_rate

    def trusts_a_lease_before(self, fence: int) -> bool:
        """Whether it would take now what a lighthouse says by an older lease than this."""
        is_here = self.processes[0].is_alive and self.connection is not None and self._is_welcome
        return is_here and self.trust.fence < fence and self.trust.takes(self._now)

    def _retry(self) -> None:
        num = len(self._lighthouses)
        pause = reconnect_delay_s(self._attempt // num, self._rng.random())
        self._attempt += 1
        self._clock.after(0.0 if self._attempt % num else pause, self.processes[0], self._connect)

    def _leave(self) -> None:
        if self.connection is not None:
            self.connection.close(by_server=False)
        self._closed(self.connection)

    def _closed(self, connection: Connection | None) -> None:
        if self.connection is connection:
            self.connection = None
            self._is_welcome = False
            self._retry()

    def _receive(self, lighthouse: Lighthouse, message: Any, asked_at: float) -> None:
        if isinstance(message, Welcome):
            if not self.trust.begins(message, asked_at):
                self._leave()
                return
            self._is_welcome = True
            self._attempt = self._lighthouses.index(lighthouse)
            self._handle(LighthouseUp())
            self._watch_lease()
        elif isinstance(message, Refused) and message.code == "standby":
            self._leave()
        elif isinstance(message, Heartbeat):
            self.trust.heard(message)
            self._watch_lease()
            held, self._held = self._held, []
            for each in held:
                self._take(lighthouse, each)
        else:
            self._take(lighthouse, message)

    def _take(self, lighthouse: Lighthouse, message: Any) -> None:
        if isinstance(message, Dropped):
            return
        if not self.trust.takes(self._now):
            self._held.append(message)
            return
        self.on_taken(lighthouse, message)
        if isinstance(message, Refused):
            self.is_refused = True
            for rank in range(len(self.processes)):
                self._local(rank, True, lambda rank=rank: self.trainers[rank].receive(message))  # type: ignore[misc]
        else:
            self._handle(LighthouseMessage(message))

    def _watch_lease(self) -> None:
        ask_at, connection = self.trust.ask_at, self.connection
        if ask_at != float("inf"):
            delay_s = max(0.0, ask_at - self._now) / self._clock_rate
            self._clock.after(delay_s, self.processes[0], lambda: self._doubt(connection, ask_at))

    def _doubt(self, connection: Connection | None, ask_at: float) -> None:
        if self.connection is not connection or connection is None or self.trust.ask_at != ask_at:
            return
        if self.trust.is_over(self._now):
            self._leave()
        else:
            connection.send_to_server(self.trust.asks(self._now))
            self._watch_lease()

    def _beat(self) -> None:
        if self.connection is not None and self._is_welcome:
            self.connection.send_to_server(self.trust.asks(self._now))
        self._clock.after(self._heartbeat_s, self.processes[0], self._beat)
