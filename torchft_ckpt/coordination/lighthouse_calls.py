"""Calls to the lighthouse, for trainers that go without a `Manager`: a question, one answer, a time limit for each.

`OpenCalls` is the asynchronous part, for whoever has an event loop; `LighthouseClient` is for all others.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import weakref
from datetime import timedelta
from typing import Any

import msgspec

from torchft_ckpt import config
from torchft_ckpt.coordination.lighthouse_connection import LighthouseConnection, resolve_job
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    CallerHeard,
    CallerHeartbeat,
    CallerHello,
    CallGivenUp,
    FromLighthouse,
    Quorum,
    QuorumCall,
    QuorumCalled,
    QuorumMember,
    QuorumPending,
)
from torchft_ckpt.errors import (
    CallTimeoutError,
    ConfigError,
    CoordinationError,
    LighthouseUnreachableError,
    QuorumTimeoutError,
)
from torchft_ckpt.threads import end_at_exit

_BEAT = timedelta(seconds=1)


class OpenCalls:
    """The calls of one connection to the lighthouse. They outlive the connection: a new one says them again.

    Use on one event loop only.

    Args:
        alive: a caller that lives for as long as this process does; others live while they call.
        heartbeat_interval: how often to say who lives; the lighthouse's patience may ask for more often.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        token: str,
        connect_timeout: timedelta,
        alive: str | None = None,
        heartbeat_interval: timedelta = _BEAT,
    ) -> None:
        self._alive = set() if alive is None else {alive}
        self._open: dict[int, tuple[QuorumCall | CallerHeartbeat, asyncio.Future[Any]]] = {}
        """By request id: what was asked, and what is told the answer."""
        self._numbers = itertools.count(1)
        self._last_quorum_id, self._last_epoch = 0, ""
        self._reason = ""
        self._refusal: CoordinationError | None = None
        self._connection = LighthouseConnection(
            address,
            job=job,
            token=token,
            hello=lambda: CallerHello(protocol=PROTOCOL_VERSION),
            on_message=self._hears,
            on_up=self._says_again,
            on_refused=self._is_refused,
            heartbeat_interval=heartbeat_interval,
            connect_timeout=connect_timeout,
            heartbeats=self._beats,
        )
        self.address = self._connection.address

    async def start(self) -> None:
        """Connect. Raises as `LighthouseConnection.start`."""
        await self._connection.start()

    async def stop(self, reason: str) -> None:
        """Leave, and close the connection. May be called twice."""
        await self._connection.stop(reason)

    async def quorum(self, member: QuorumMember, timeout_s: float) -> Quorum:
        """Wait for a quorum with this caller in it. Cancelled, or late, it is in none.

        Raises:
            ConfigError: that caller called again meanwhile.
            QuorumTimeoutError: none was formed in time; the message says why.
            LighthouseUnreachableError: there was no connection when the time was over.
            RefusedError: the lighthouse will have no calls on this connection any more.
        """
        name = member.replica_id
        for earlier, answer in self._open.values():
            if isinstance(earlier, QuorumCall) and earlier.member.replica_id == name and not answer.done():
                answer.set_exception(ConfigError(f"{name} called again before this call was answered", party=name))
        number, self._reason = next(self._numbers), ""
        call = QuorumCall(
            request_id=number, member=member, last_quorum_id=self._last_quorum_id, last_epoch=self._last_epoch
        )
        try:
            called: QuorumCalled = await self._ask(call, timeout_s)
        except asyncio.TimeoutError:
            self._check_connected(name, timeout_s)
            why = self._reason or "the lighthouse did not say why"
            raise QuorumTimeoutError(f"no quorum for {name} within {timeout_s:g} s: {why}", name) from None
        self._last_quorum_id, self._last_epoch = called.quorum.quorum_id, called.epoch
        return called.quorum

    async def heartbeat(self, replica_id: str, timeout_s: float) -> None:
        """Say that a caller lives. Raises as `quorum`; `CallTimeoutError` where there is no answer in time."""
        try:
            await self._ask(CallerHeartbeat(request_id=next(self._numbers), replica_id=replica_id), timeout_s)
        except asyncio.TimeoutError:
            self._check_connected(replica_id, timeout_s)
            message = f"the lighthouse at {self.address} has not answered {replica_id} within {timeout_s:g} s"
            raise CallTimeoutError(message, self.address) from None

    def _check_connected(self, name: str, timeout_s: float) -> None:
        if not self._connection.is_up:
            message = f"the lighthouse at {self.address} cannot be reached; {name} has waited for {timeout_s:g} s"
            raise LighthouseUnreachableError(message, self.address) from None

    async def _ask(self, message: QuorumCall | CallerHeartbeat, timeout_s: float) -> Any:
        if self._refusal is not None:
            raise copy.copy(self._refusal)
        number = message.request_id
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = message, answer
        try:
            self._connection.send(message)
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            del self._open[number]
            if isinstance(message, QuorumCall) and (answer.cancelled() or not answer.done()):
                self._connection.send(CallGivenUp(request_id=number, replica_id=message.member.replica_id))

    def _hears(self, message: FromLighthouse) -> None:
        if isinstance(message, QuorumPending):
            self._reason = message.reason
        elif isinstance(message, QuorumCalled | CallerHeard) and message.request_id in self._open:
            _, answer = self._open[message.request_id]
            if not answer.done():
                answer.set_result(message)

    def _says_again(self) -> None:
        for message in (*self._beats(), *(message for message, _ in self._open.values())):
            self._connection.send(message)

    def _is_refused(self, error: CoordinationError) -> None:
        self._refusal = error
        for _, answer in self._open.values():
            if not answer.done():
                answer.set_exception(copy.copy(error))

    def _beats(self) -> list[CallerHeartbeat]:
        calling = {call.member.replica_id for call, _ in self._open.values() if isinstance(call, QuorumCall)}
        return [CallerHeartbeat(request_id=0, replica_id=name) for name in sorted(self._alive | calling)]


class LighthouseClient:
    """A trainer's own way to the lighthouse: who is together, without a `Manager`, its state or its votes.

        client = LighthouseClient("lighthouse:29510", connect_timeout=timedelta(seconds=10))
        step, last, group, loss = 0, None, None, 0.0
        while step < 1000:
            quorum = client.quorum("trainer-3", timedelta(minutes=5), store_address=store, step=step, data={"loss": loss})
            if quorum.quorum_id != last:  # others are here, or one was gone in between
                last, members = quorum.quorum_id, quorum.participants
                group = connect(members[0].store_address, [member.replica_id for member in members])
                step = load_from(max(members, key=lambda member: member.step))
            loss = train(group)  # where a collective fails, the next quorum says who is left
            step += 1

    A job is of such callers or of Managers, never of both: the lighthouse refuses the other kind by name. Callers do with a
    quorum what they like; nobody votes, and nobody is told of a loss. A caller is taken for dead when this process
    ends or its connection is lost, and when it neither called nor waited nor sent a `heartbeat` for the lighthouse's heartbeat
    timeout; then the others get a quorum without it. Any thread may call. The connection has a thread of its own, which ends
    with this object.

    Args:
        addr: of the lighthouse, `host:port` or `http://host:port`.
        connect_timeout: how long to try to reach it at first; from then on it may restart.
        token: shared secret of the job; default `TORCHFT_CKPT_TOKEN`, else none.

    Raises:
        ConfigError: the address cannot be used.
        LighthouseUnreachableError: nobody answered within the connect timeout.
        AuthenticationError, ProtocolVersionError: somebody did, and refused.
    """

    def __init__(self, addr: str, connect_timeout: timedelta, *, token: str | None = None) -> None:
        self._calls = OpenCalls(
            addr,
            job=resolve_job(None),
            token=config.resolve(token, config.TOKEN, "", str),
            connect_timeout=connect_timeout,
        )
        self._thread = LoopThread("torchft_ckpt-coordination")
        try:
            self._thread.run(self._calls.start())
        except BaseException:  # an interrupt too: nobody else could end the thread
            self._thread.stop()
            raise
        calls = self._calls
        weakref.finalize(self, self._thread.finish_soon, lambda: calls.stop("its client is gone")).atexit = False
        end_at_exit(self.shutdown)

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: dict[Any, Any] | None = None,
    ) -> Quorum:
        """Wait until a quorum is formed that this caller is in. All of its members are told the same.

        Args:
            replica_id: the caller's name; no two callers of a job have the same at a time.
            timeout: how long to wait; whoever has given up is in no quorum.
            address, store_address, step, world_size: what the others shall know of it; empty or 0 by default.
            shrink_only: let nobody in who was not in the last quorum.
            data: whatever else they shall know, as JSON: 64 KiB at most, keys become texts. All that the callers of a job say
                has to fit into one message of 4 MiB.

        Raises:
            ConfigError: an argument cannot be sent, or the caller called again meanwhile.
            QuorumTimeoutError: no quorum in time; the message says what was missing.
            LighthouseUnreachableError: no connection to the lighthouse when the time was over.
            RefusedError: the job is one of Managers, say; each later call raises it too.
        """
        try:
            fields = {
                "replica_id": replica_id,
                "address": address or "",
                "store_address": store_address or "",
                "step": step or 0,
                "world_size": world_size or 0,
                "shrink_only": bool(shrink_only),
                "data": None if data is None else json.loads(json.dumps(data, allow_nan=False)),
            }
            member = msgspec.convert(fields, QuorumMember)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise ConfigError(f"the call for a quorum of {replica_id!r} cannot be sent: {error}", "quorum") from error
        return self._thread.run(self._calls.quorum(member, timeout.total_seconds()))

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Say that a caller lives, between its quorums. While it waits for one that is said by itself.

        Args:
            replica_id: its name. It is waited for from now on, also where it has not called yet.
            timeout: how long to wait for the lighthouse's answer.

        Raises:
            CallTimeoutError: no answer in time.
            LighthouseUnreachableError, RefusedError: as `quorum`.
        """
        self._thread.run(self._calls.heartbeat(replica_id, timeout.total_seconds()))

    def shutdown(self) -> None:
        """Leave, end the connection and its thread. May be called twice; who drops the client need not."""
        self._thread.finish(lambda: self._calls.stop("it was shut down"))

    def __repr__(self) -> str:
        return f"LighthouseClient(addr={self._calls.address!r})"
