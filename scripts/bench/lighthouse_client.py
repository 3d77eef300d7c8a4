"""A process that plays many replica groups towards one lighthouse, over one socket each, and reports when rounds ended.

Towards torchft each group is a `LighthouseClient` in a thread of its own (its calls block); a round is one `quorum` call.
Towards ours each group is a bare WebSocket of the lighthouse's protocol on one event loop, so that the client costs little;
a round is a whole step: a quorum request and its answer, then a vote and its decision.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

from bench import sides
from bench.wire import Commands, Reporter

_PATIENCE = timedelta(seconds=300)
_PATH = "/v1/groups?job="


# ---------------------------------------------------------------------------------------------------------- torchft


class _TorchftGroups:
    """Threads that call `quorum` as often as they are told, all of them once more for each round."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._address = options["address"]
        self._condition = threading.Condition()
        self._target = 0
        self._ended: Counter[int] = Counter()
        self._ended_at: dict[int, float] = {}
        self.count = options["count"]
        threading.stack_size(256 * 1024)
        for number in range(options["first"], options["first"] + options["count"]):
            threading.Thread(target=self._play, args=(number,), name=f"group {number}", daemon=True).start()

    def _play(self, number: int) -> None:
        from torchft.coordination import LighthouseClient

        client = LighthouseClient(self._address, connect_timeout=_PATIENCE)
        step = 0
        while True:
            with self._condition:
                while self._target <= step:
                    self._condition.wait()
            client.quorum(
                replica_id=f"group_{number}:0b9cf4e2-6d1c-4a53-8a0c-{number:012d}",
                timeout=_PATIENCE,
                address=f"http://10.0.{number // 250}.{number % 250}:29600",
                store_address=f"10.0.{number // 250}.{number % 250}:29500",
                step=step,
                world_size=1,
            )
            ended_at = time.monotonic()
            with self._condition:
                self._ended[step] += 1
                self._ended_at[step] = ended_at
                step += 1
                if self._ended[step - 1] == self.count:
                    self._condition.notify_all()

    def play(self, rounds: int) -> dict[str, list[float]]:
        """Play some rounds; return when the last of these groups had its answer in each."""
        with self._condition:
            first = self._target
            self._target += rounds
            self._condition.notify_all()
            while self._ended[self._target - 1] < self.count:
                self._condition.wait()
            return {"ended": [self._ended_at[step] for step in range(first, self._target)]}


def _serve_torchft(options: dict[str, Any], reporter: Reporter, commands: Commands) -> None:
    groups = _TorchftGroups(options)
    reporter.emit("ready")
    while True:
        reporter.emit("rounds", **groups.play(commands.next()["rounds"]))


# ------------------------------------------------------------------------------------------------------------- ours


class _Group(asyncio.Protocol):
    """One replica group's connection: HTTP upgrade, then frames. Frames are masked with zeros, which costs nothing."""

    def __init__(self, groups: _OurGroups, number: int) -> None:
        from torchft_ckpt.core.coordination import messages

        self._messages = messages
        self._groups = groups
        self._number = number
        self._host = f"10.0.{number // 250}.{number % 250}"
        self._replica_id = f"group_{number}:0b9cf4e2-6d1c-4a53-8a0c-{number:012d}"
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._upgraded = False
        self._version = messages.StateVersion()
        self._requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(
            f"GET {_PATH}{self._groups.job_of(self._number)} HTTP/1.1\r\nHost: {self._groups.host}:{self._groups.port}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._upgraded:
            head, blank, rest = self._buffer.partition(b"\r\n\r\n")
            if not blank:
                return
            if b" 101 " not in head.split(b"\r\n")[0]:
                raise ConnectionError(f"the lighthouse did not upgrade: {head!r}")
            self._upgraded, self._buffer = True, rest
            m = self._messages
            self._send(m.Hello(protocol=m.PROTOCOL_VERSION, replica_id=self._replica_id, **self._settings(m.Hello)))
        while len(self._buffer) >= 2:
            size, start = self._buffer[1] & 0x7F, 2
            if size == 126:
                size, start = int.from_bytes(self._buffer[2:4], "big"), 4
            elif size == 127:
                size, start = int.from_bytes(self._buffer[2:10], "big"), 10
            if len(self._buffer) < start + size:
                return
            opcode, payload = self._buffer[0] & 0x0F, self._buffer[start : start + size]
            self._buffer = self._buffer[start + size :]
            self._frame(opcode, payload)

    def connection_lost(self, error: Exception | None) -> None:
        raise ConnectionError(f"the lighthouse closed the connection of {self._replica_id}: {error}")

    def _frame(self, opcode: int, payload: bytes) -> None:
        m = self._messages
        if opcode == 9:
            self._write(0x8A, payload)
            return
        if opcode not in (1, 2):
            raise ConnectionError(f"the lighthouse ended {self._replica_id}: {payload!r}")
        message = m.decode_from_lighthouse(payload, "the lighthouse")
        if isinstance(message, m.Welcome):
            self._groups.welcomed()
        elif isinstance(message, m.QuorumFormed):
            self._groups.formed(message.version.step)
            self._send(
                m.CommitVote(
                    quorum_id=message.quorum_id,
                    epoch=message.epoch,
                    step=message.version.step,
                    approve=True,
                    num_voters=message.num_voters,
                )
            )
        elif isinstance(message, m.CommitDecided):
            if message.outcome is not m.Outcome.COMMIT:
                raise RuntimeError(f"step {message.step} was not committed: {message}")
            self._version = m.StateVersion(step=message.step + 1, quorum_id=message.quorum_id, epoch=message.epoch)
            if self._groups.decided(message.step):
                self.ask()
        elif isinstance(message, m.Refused):
            raise RuntimeError(f"the lighthouse refused {self._replica_id}: {message}")

    def _settings(self, message: Any) -> dict[str, Any]:
        """Return what is said of this group in the message that has it in the revision that is measured."""
        settings = {"init_sync": False, "store_address": f"{self._host}:29500"}
        return {name: value for name, value in settings.items() if name in message.__struct_fields__}

    def ask(self) -> None:
        """Send the quorum request of the next step."""
        self._requests += 1
        self._send(
            self._messages.QuorumRequest(
                request_id=self._requests,
                version=self._version,
                **self._settings(self._messages.QuorumRequest),
                checkpoint_addresses=[f"http://{self._host}:29600"] if self._requests == 1 else None,
            )
        )

    def _send(self, message: Any) -> None:
        self._write(0x81, self._messages.encode(message).encode())

    def _write(self, first: int, payload: bytes) -> None:
        size = len(payload)
        length = bytes([0x80 | size]) if size < 126 else bytes([0x80 | 126]) + size.to_bytes(2, "big")
        assert self._transport is not None
        self._transport.write(bytes([first]) + length + b"\0\0\0\0" + payload)


def _same(member: _Group) -> _Group:
    return member


class _OurGroups:
    """All connections of this process, and when the last of them had each answer."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.host, _, port = options["address"].rpartition("://")[2].rstrip("/").rpartition(":")
        self.host = self.host.strip("[]")
        self.port = int(port)
        self._first, self._count = options["first"], options["count"]
        self._num_jobs = options.get("num_jobs", 0)
        self._members: list[_Group] = []
        self._target = 0
        self._num_welcomed = 0
        self._formed_at: dict[int, float] = {}
        self._decided_at: dict[int, float] = {}
        self._num_decided: Counter[int] = Counter()
        self._done = asyncio.Event()

    def job_of(self, number: int) -> str:
        """Return the job of a group: with `num_jobs` they are dealt to so many, else all are of one."""
        return f"job-{number % self._num_jobs}" if self._num_jobs else "default"

    async def connect(self) -> None:
        """Open all connections, one after the other, and wait for every welcome."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._fail)
        for number in range(self._first, self._first + self._count):
            member = _Group(self, number)
            await loop.create_connection(partial(_same, member), self.host, self.port)
            self._members.append(member)
        await asyncio.wait_for(self._done.wait(), _PATIENCE.total_seconds())

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        loop.stop()

    def welcomed(self) -> None:
        self._num_welcomed += 1
        if self._num_welcomed == self._count:
            self._done.set()

    def formed(self, step: int) -> None:
        self._formed_at[step] = time.monotonic()

    def decided(self, step: int) -> bool:
        """Note a member's decision; return whether it goes on with the next step."""
        self._decided_at[step] = time.monotonic()
        self._num_decided[step] += 1
        if step + 1 == self._target and self._num_decided[step] == self._count:
            self._done.set()
        return step + 1 < self._target

    async def play(self, rounds: int) -> dict[str, list[float]]:
        """Play some rounds; return when the last of these groups had its quorum, and its decision, in each."""
        first, self._target = self._target, self._target + rounds
        self._done.clear()
        for member in self._members:
            member.ask()
        await self._done.wait()
        steps = range(first, self._target)
        return {"formed": [self._formed_at[s] for s in steps], "ended": [self._decided_at[s] for s in steps]}


async def _serve_ours(options: dict[str, Any], reporter: Reporter, commands: Commands) -> None:
    groups = _OurGroups(options)
    await groups.connect()
    reporter.emit("ready")
    loop = asyncio.get_running_loop()
    while True:
        command = await loop.run_in_executor(None, commands.next)
        reporter.emit("rounds", **await groups.play(command["rounds"]))


def main() -> None:
    """Connect all groups of this process, report `ready`, then play rounds as told."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    reporter, commands = Reporter(), Commands()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options["side"] == sides.OURS:
        asyncio.run(_serve_ours(options, reporter, commands))
    else:
        _serve_torchft(options, reporter, commands)


if __name__ == "__main__":
    main()
