"""One incarnation of a replica group: its ranks' processes, its rules at rank 0, and the connection to the lighthouse."""

from __future__ import annotations

from collections.abc import Callable
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
        lighthouse: where to connect.
        is_reachable: whether the network lets this group through at the moment.
        heartbeat_s: how often it says that it lives.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        *,
        replica_id: str,
        processes: list[Process],
        lighthouse: Lighthouse,
        is_reachable: Callable[[], bool],
        heartbeat_s: float,
        oracle: Oracle,
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
        self._lighthouse, self._is_reachable, self._oracle = lighthouse, is_reachable, oracle
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
        if not self._lighthouse.process.is_alive or not self._is_reachable():
            self._retry()
            return
        self._is_welcome = False
        self.connection = self._lighthouse.accept(self.processes[0], self._receive, self._closed)
        hello = self.trainers[0].replica.hello(self.replica_id, len(self.processes))
        self.connection.send_to_server(self.state.introduce(hello))
        this = self.connection

        def give_up() -> None:
            if self.connection is this and not self._is_welcome:
                this.close(by_server=False)
                self._closed()

        self._clock.after(1.0, self.processes[0], give_up)

    def _retry(self) -> None:
        pause = reconnect_delay_s(self._attempt, self._rng.random())
        self._attempt += 1
        self._clock.after(pause, self.processes[0], self._connect)

    def _closed(self) -> None:
        self.connection = None
        self._is_welcome = False
        self._retry()

    def _receive(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self._is_welcome = True
            self._attempt = 0
            self._handle(LighthouseUp())
        elif isinstance(message, Refused):
            self.is_refused = True
            for rank in range(len(self.processes)):
                self._local(rank, True, lambda rank=rank: self.trainers[rank].receive(message))  # type: ignore[misc]
        elif not isinstance(message, Dropped):
            self._handle(LighthouseMessage(message))

    def _beat(self) -> None:
        if self.connection is not None and self._is_welcome:
            self.connection.send_to_server(Heartbeat())
        self._clock.after(self._heartbeat_s, self.processes[0], self._beat)
