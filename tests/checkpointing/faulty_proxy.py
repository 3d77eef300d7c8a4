"""Proxies that damage what passes between a source and a destination.

`FaultyProxy` knows bytes only: its faults are pure functions of how many bytes were passed on, and it has threads. For
single stories. `ScriptedProxy` knows where an HTTP answer begins and ends and which blocks it carries, and is cheap enough to
be armed with another fault thousands of times. Neither knows the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

Fault = Callable[["Connection", int, bytes], bytes]
"""Called with the connection, how many bytes were passed on before, and the next bytes; returns what to pass on."""


class Connection:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, source: socket.socket) -> None:
        self._client = client
        self._source = source
        self.ended = threading.Event()

    def cut(self) -> None:
        """Close both sides at once."""
        self.ended.set()
        for side in (self._client, self._source):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


class FaultyProxy:
    """Forwards connections to a port on this machine, with a fault on the way back; where it listens may be chosen."""

    def __init__(
        self,
        port: int,
        fault: Fault = lambda connection, passed, data: data,
        listens_at: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.fault = fault
        self._port = port
        self._listener = socket.create_server(listens_at)
        self.url = f"http://{listens_at[0]}:{self._listener.getsockname()[1]}"
        self._connections: list[Connection] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(60)
        self._listener.close()
        for connection in self._connections:
            connection.cut()
        for thread in self._threads:
            thread.join(60)
        for connection in self._connections:
            connection._client.close()
            connection._source.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                source = socket.create_connection(("127.0.0.1", self._port))
            except OSError:  # the source is gone
                client.close()
                continue
            connection = Connection(client, source)
            self._connections.append(connection)
            for work in (self._forward, self._back):
                self._threads.append(threading.Thread(target=work, args=(connection, client, source)))
                self._threads[-1].start()

    def _forward(self, connection: Connection, client: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                source.sendall(data)
        connection.cut()

    def _back(self, connection: Connection, client: socket.socket, source: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                client.sendall(self.fault(connection, passed, data))
                passed += len(data)
        connection.cut()


def cut_after(num_bytes: int) -> Fault:
    """Pass on so many bytes, then close the connection."""

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        if passed + len(data) <= num_bytes:
            return data
        connection._client.sendall(data[: max(num_bytes - passed, 0)])
        connection.cut()
        return b""

    return fault


def flip_bit_at(byte: int, bit: int = 0) -> Fault:
    """Flip one bit of one byte."""

    def fault(connection: Connection, passed: int, data: bytes) -> bytes:
        if not passed <= byte < passed + len(data):
            return data
        damaged = bytearray(data)
        damaged[byte - passed] ^= 1 << bit
        return bytes(damaged)

    return fault


# What follows understands HTTP: it hands whole answers to a fault, which sends on of them what it likes.

_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_BLOCKS = re.compile(r"/blocks/([0-9]+)-([0-9]+)")
_TIMEOUT_S = 20.0
DIGEST_BYTES = 16


@dataclass
class Answer:
    """One answer of the source, whole, before anything of it was passed on."""

    request: bytes
    """The head of the request that it answers."""
    raw: bytes
    """Head and body."""
    head_bytes: int
    start: int
    """How many bytes of answers came before it in this case, over all connections."""

    @property
    def path(self) -> str:
        """What was asked for."""
        return _path(self.request)

    @property
    def status(self) -> int:
        """The status in the head."""
        return int(self.raw[9:12])

    @property
    def kind(self) -> str:
        """The last word of the path: `manifest`, `blocks`, `digests`, `blake3`, `samples`, `peers` or `done`."""
        return kind_of(self.path)

    @property
    def body(self) -> bytes:
        """The body."""
        return self.raw[self.head_bytes :]

    def blocks(self) -> range:
        """The blocks that were asked for; none where the answer is something else."""
        match = _BLOCKS.search(self.path)
        return range(int(match[1]), int(match[2]) + 1) if match and self.status == 200 else range(0)

    def with_head(self, change: Callable[[bytes], bytes]) -> bytes:
        """The bytes of the answer with another head."""
        return change(self.raw[: self.head_bytes]) + self.body

    def with_body(self, body: bytes, **headers: str | None) -> bytes:
        """The bytes of the answer with another body of honest length, and with other headers."""
        return set_headers(self.raw[: self.head_bytes], Content_Length=str(len(body)), **headers) + body


def set_headers(head: bytes, **headers: str | None) -> bytes:
    """Return the head of an answer with headers replaced, added, or (None) removed; `_` stands for `-`."""
    first, *lines = head.rstrip(b"\r\n").split(b"\r\n")
    names = {name.replace("_", "-").lower().encode() for name in headers}
    kept = [line for line in lines if line.partition(b":")[0].strip().lower() not in names]
    added = [f"{name.replace('_', '-')}: {value}".encode() for name, value in headers.items() if value is not None]
    return b"\r\n".join([first, *kept, *added]) + b"\r\n\r\n"


def kind_of(path: str) -> str:
    """The last word of a path; `blocks` where blocks are asked for."""
    return "blocks" if "/blocks/" in path else path.partition("?")[0].rpartition("/")[2]


def _path(request: bytes) -> str:
    words = request.split(b" ", 2)
    return words[1].decode("latin-1") if len(words) > 1 else ""


class Wire:
    """The way back to one destination. To be used on the proxy's loop, by one fault at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.byte_s = 0.1
        """How long a byte takes where they drip."""

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self._writer.write(data)
        await self._writer.drain()

    async def drip(self, data: bytes) -> None:
        """Send bytes one at a time, as long as somebody listens."""
        for index in range(len(data)):
            await self.send(data[index : index + 1])
            await asyncio.sleep(self.byte_s)

    async def flood(self, data: bytes) -> None:
        """Send the same bytes again and again, as long as somebody listens."""
        while True:
            await self.send(data)

    async def wait_for(self, future: Future[None]) -> None:
        """Send nothing until another thread has done something."""
        await asyncio.wrap_future(future)

    async def hang(self) -> None:
        """Send nothing more, until the destination goes away."""
        while await self._reader.read(65536):
            pass
        raise ConnectionResetError

    async def cut(self, *, reset: bool = False) -> None:
        """Close the connection: in good order, or with a reset."""
        if reset:
            with contextlib.suppress(OSError):
                self._writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            self._writer.transport.abort()
        else:
            self._writer.close()
        raise ConnectionResetError


AnswerFault = Callable[[Answer, Wire], Awaitable[None]]
RequestFault = Callable[[int, bytes], bytes]
"""Called with how many bytes of requests came before and the next request; returns what the source gets instead."""


async def pass_on(answer: Answer, wire: Wire) -> None:
    """The fault that is none."""
    await wire.send(answer.raw)


class Gate:
    """A port that forwards to one source, under one fault at a time. Made by `ScriptedProxy.gate`."""

    def __init__(self, proxy: ScriptedProxy, source_port: int) -> None:
        self._proxy = proxy
        self._source_port = source_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._tasks: set[asyncio.Task[None]] = set()
        self._spare: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._fault: AnswerFault = pass_on
        self._request_fault: RequestFault | None = None
        self._requested = 0
        self.passed = 0
        """Bytes of answers that were handed to the fault."""
        self.paths: list[str] = []
        """What was asked for, in order."""

    def arm(self, fault: AnswerFault = pass_on, request_fault: RequestFault | None = None) -> None:
        """Close all connections and start the next case. From outside the proxy's loop."""
        self._proxy.run(self._arm(fault, request_fault))

    def hang_up(self) -> None:
        """Close all connections: the case is over. From outside the proxy's loop."""
        self._proxy.run(self._end_tasks())

    async def _arm(self, fault: AnswerFault, request_fault: RequestFault | None) -> None:
        await self._end_tasks()
        self._fault, self._request_fault = fault, request_fault
        self._requested = self.passed = 0
        self.paths = []

    async def start(self) -> None:
        """Listen. On the loop."""
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=1 << 20)

    async def stop(self) -> None:
        """Stop listening and close everything. On the loop."""
        self._server.close()
        await self._end_tasks()
        await self.drop_spare()

    async def drop_spare(self) -> None:
        """Close idle connections to the source. On the loop."""
        for _, writer in self._spare:
            writer.close()
        self._spare = []

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        wire = Wire(reader, writer)
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                self.paths.append(_path(request))
                raw, head_bytes = await self._ask(request)
                answer = Answer(request, raw, head_bytes, self.passed)
                self.passed += len(raw)
                await self._fault(answer, wire)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            if writer.transport.get_write_buffer_size():  # to somebody who does not read
                writer.transport.abort()

    async def _ask(self, request: bytes) -> tuple[bytes, int]:
        """Ask the source; return its answer and the length of the head."""
        damaged = request if self._request_fault is None else self._request_fault(self._requested, request)
        self._requested += len(request)
        while damaged == request and self._spare:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # it may have been closed meanwhile
                return await self._ask_on(*self._spare.pop(), request, spare=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._source_port, limit=1 << 20)
        return await self._ask_on(reader, writer, damaged, spare=damaged == request)

    async def _ask_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, *, spare: bool
    ) -> tuple[bytes, int]:
        whole = False
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            match = _LENGTH.search(head)
            body = await reader.readexactly(int(match[1])) if match else b""
            whole = b"\r\nconnection: close" not in head.lower()
            return head + body, len(head)
        finally:
            if whole and spare:
                self._spare.append((reader, writer))
            else:
                writer.close()


class ScriptedProxy:
    """A thread with an event loop for any number of gates: thousands of cases cost no thread and no port each."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-proxy")
        self._thread.start()
        self._gates: list[Gate] = []

    def __enter__(self) -> ScriptedProxy:
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self._gates:
            self.run(gate.stop())
        self.run(asyncio.sleep(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TIMEOUT_S)
        self._loop.close()

    def gate(self, source_port: int) -> Gate:
        """Open a port that forwards to a source on this machine."""
        gate = Gate(self, source_port)
        self.run(gate.start())
        self._gates.append(gate)
        return gate

    def drop_spare(self) -> None:
        """Close what is kept open between cases, so that descriptors can be counted."""
        for gate in self._gates:
            self.run(gate.drop_spare())

    def run(self, work: Coroutine[object, object, None]) -> None:
        """Run something on the loop, from outside of it."""
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)
        except TimeoutError:
            raise AssertionError(f"the proxy did nothing for {_TIMEOUT_S} s; busiest threads:\n{busiest()}") from None


def busiest(*, num_threads: int = 3, during_s: float = 0.5) -> str:
    """The threads of this process that run most of a short time, with their CPU seconds and where they are."""

    def cpu_s() -> dict[threading.Thread, float]:
        found = {}
        for thread in threading.enumerate():
            with contextlib.suppress(OSError):  # it has ended
                times = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(") ")[2].split()
                found[thread] = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
        return found

    before = cpu_s()
    time.sleep(during_s)
    frames = sys._current_frames()
    spent = {thread: after - before.get(thread, 0.0) for thread, after in cpu_s().items() if thread.ident in frames}
    return "\n".join(
        f"{thread.name} took {spent[thread]:.2f} s of {during_s} s\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}"
        for thread in sorted(spent, key=spent.__getitem__, reverse=True)[:num_threads]
    )
