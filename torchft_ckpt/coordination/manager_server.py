"""torchft's manager service, for trainers that go without a `Manager`: one server for each replica group, a client for each
rank.

    POST /v1/calls    one call of a rank, answered when all of its group have called; messages of `core.coordination.messages`

They work among themselves. The lighthouse takes a group for a caller of quorums (`core.coordination.callers`): whether a step
counts each group decides for itself, and a survivor may be a step behind another. `Manager` decides for all at once, and
recovers by itself.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import itertools
import logging
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

from aiohttp import web

from torchft_ckpt import config
from torchft_ckpt.coordination.channel import client_of, refuse_token
from torchft_ckpt.coordination.lighthouse_calls import OpenCalls
from torchft_ckpt.coordination.lighthouse_connection import resolve_job
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.coordination.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    FromManagerServer,
    GroupDecision,
    MetadataCall,
    QuorumMember,
    QuorumResult,
    RankMetadata,
    RankQuorumCall,
    RankVote,
    Refused,
    ToManagerServer,
    clip,
    decode_from_manager_server,
    decode_to_manager_server,
    encode,
)
from torchft_ckpt.core.coordination.rank_calls import CallAnswer, CallInstruction, CallQuorum, RankCalls
from torchft_ckpt.errors import (
    AuthenticationError,
    CallTimeoutError,
    ConfigError,
    CoordinationError,
    ManagerUnreachableError,
    ProtocolError,
    ProtocolVersionError,
    QuorumTimeoutError,
    RefusedError,
)
from torchft_ckpt.front.limits import FrontLimits
from torchft_ckpt.front.serving import Front
from torchft_ckpt.network import bearer_matches, choose_host, join_host_port, listen_as
from torchft_ckpt.threads import end_at_exit

logger = logging.getLogger(__name__)

_PATH = "/v1/calls"
_BACKLOG = 1024
_MAX_CALL_BYTES = 64 << 10
_MAX_STRANGERS = 256
_MAX_OTHERS = 1024
_FOR_EVER_S = 1e9
_TOO_MANY = 429
_PAUSE_S = 0.5
_A = TypeVar("_A", bound=FromManagerServer)


class ManagerServer:
    """The server that the ranks of one replica group call through `ManagerClient`; one of them, as a rule rank 0, runs it.

    Args:
        replica_id: of the group; a group that starts anew has another one.
        lighthouse_addr: `host:port` or `http://host:port`.
        hostname: address to advertise; empty: as `network.choose_host` says, at last the interface that routes to the
            lighthouse.
        bind: `host:port` to listen on, as `LighthouseServer`'s.
        store_addr: of the group's store; what the others are told.
        world_size: ranks in the group.
        heartbeat_interval: how often to tell the lighthouse that the group lives; its patience may ask for more often.
        connect_timeout: towards the lighthouse.
        quorum_retries: accepted for torchft's sake, not used: the lighthouse is asked until the ranks give up.
        token: shared secret of the job; default `TORCHFT_CKPT_TOKEN`, else none.

    Raises:
        ConfigError: an argument cannot be used.
        AddressInUseError: the port is taken.
        LighthouseUnreachableError, AuthenticationError, ProtocolVersionError: as `LighthouseClient`.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int = 0,
        *,
        token: str | None = None,
    ) -> None:
        if not 1 <= world_size <= 65536:
            raise ConfigError(f"world_size={world_size}: a replica group has 1 to 65536 ranks", "world_size")
        if heartbeat_interval <= timedelta(0):
            raise ConfigError(
                f"heartbeat_interval={heartbeat_interval}: expected a positive time", "heartbeat_interval"
            )
        host, port = config.parse_host_port(bind, what="manager server bind address", default_host="0.0.0.0")
        self._replica_id, self._world_size, self._store_address = replica_id, world_size, store_addr
        self._token = config.resolve(token, config.TOKEN, "", str)
        self._ranks = RankCalls(replica_id, world_size)
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[FromManagerServer]] = {}
        """By number: what an open call's answer is told."""
        self._asking: asyncio.Task[None] | None = None
        self._front: Front | None = None
        self._calls = OpenCalls(
            lighthouse_addr,
            job=resolve_job(None),
            token=self._token,
            connect_timeout=connect_timeout,
            alive=replica_id,
            heartbeat_interval=heartbeat_interval,
        )
        advertised = choose_host(hostname, bound=host, towards=self._calls.address).address
        listeners = listen_as(f"the manager server of {replica_id}", host, port, _BACKLOG, self._token)
        self._address = f"http://{join_host_port(advertised, listeners[0].getsockname()[1])}"
        self._thread = LoopThread("torchft_ckpt-coordination")
        try:
            self._thread.run(self._serve(listeners))
            self._thread.run(self._calls.start())
        except BaseException:  # an interrupt too: nobody else could end the thread
            self.shutdown()
            raise
        end_at_exit(self.shutdown)

    def address(self) -> str:
        """Return where ranks and other groups call, `http://host:port`."""
        return self._address

    def shutdown(self) -> None:
        """Leave the job, close the port, end the thread; open calls fail. May be called twice."""
        self._thread.finish(self._stop)

    def __repr__(self) -> str:
        return f"ManagerServer(replica_id={self._replica_id!r}, address={self._address!r})"

    # ------------------------------------------------------------------------------------------------- on the loop

    async def _serve(self, listeners: list[socket.socket]) -> None:
        app = web.Application(client_max_size=_MAX_CALL_BYTES)
        # Each call is a connection: a rank's next may come before its last is closed, and ranks of all groups may ask at once
        # where the state is.
        most = 2 * self._world_size + _MAX_OTHERS
        limits = FrontLimits(
            max_connections=most,
            max_connections_per_client=most,
            max_strangers=_MAX_STRANGERS,
            max_body_bytes=_MAX_CALL_BYTES,
        )
        # A call whose rank has gone away is cancelled, so that it does not count.
        self._front = front = Front(
            app, listeners, name="the manager server", token=self._token, limits=limits, handler_cancellation=True
        )
        app.add_routes([web.post(_PATH, functools.partial(self._serve_call, front))])
        await front.start()

    async def _stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        for answer in self._answers.values():
            answer.cancel()
        await self._calls.stop("its manager server was shut down")
        if self._front is not None:
            await self._front.close()

    async def _serve_call(self, front: Front, request: web.Request) -> web.Response:
        if not bearer_matches(request.headers.get("Authorization"), self._token):
            return refuse_token(request, front)
        try:
            message = decode_to_manager_server(await request.read(), f"a rank at {client_of(request)}")
        except ProtocolError as error:
            front.log.warning("%s", error)
            return web.Response(text=encode(Refused(code="protocol", reason=clip(str(error)))))
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._carry_out(self._ranks.called(number, message))
            return web.Response(text=encode(await answer))
        finally:
            del self._answers[number]
            self._carry_out(self._ranks.gave_up(number))

    def _carry_out(self, instructions: Iterable[CallInstruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, CallAnswer):
                answer = self._answers.get(instruction.number)
                if answer is not None and not answer.done():
                    answer.set_result(instruction.message)
                continue
            before = self._asking
            if before is not None:
                before.cancel()
            if isinstance(instruction, CallQuorum):
                self._asking = asyncio.get_running_loop().create_task(self._ask(instruction, before))

    async def _ask(self, call: CallQuorum, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        member = QuorumMember(
            replica_id=self._replica_id,
            address=self._address,
            store_address=self._store_address,
            step=call.step,
            world_size=self._world_size,
            shrink_only=call.shrink_only,
            commit_failures=call.commit_failures,
        )
        try:
            quorum = await self._calls.quorum(member, _FOR_EVER_S)
        except CoordinationError as error:
            self._carry_out(self._ranks.refused(str(error)[:4000]))
        else:
            self._carry_out(self._ranks.formed(quorum))


class ManagerClient:
    """A rank's way to a `ManagerServer`: to that of its group, and to that of the group that it recovers from.

    Each call is a connection of its own. Any thread may call.

    Args:
        addr: of the server, as its `address()` says.
        connect_timeout: how long a connection may take to be made.
        token: shared secret of the job; default `TORCHFT_CKPT_TOKEN`, else none.

    Raises:
        ConfigError: the address cannot be used.
        ManagerUnreachableError: nobody answers there.
    """

    def __init__(self, addr: str, connect_timeout: timedelta, *, token: str | None = None) -> None:
        self._host, self._port = config.parse_host_port(addr, what="manager server address")
        self._address = join_host_port(self._host, self._port)
        self._connect_timeout_s = connect_timeout.total_seconds()
        token = config.resolve(token, config.TOKEN, "", str)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connect(self._connect_timeout_s).close()

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int = 0,
        init_sync: bool = True,
    ) -> QuorumResult:
        """Wait until all ranks of the group have asked and a quorum with it is formed.

        Args:
            group_rank: this rank.
            step: of its state; all ranks of a group ask with the same.
            checkpoint_metadata: what others need to load from this rank: see `_checkpoint_metadata`.
            shrink_only: let nobody in who was not in the last quorum.
            timeout: how long to wait; where one rank gives up, the group is in no quorum until it asks again.
            commit_failures: steps in a row that it could not commit; with any, the quorum gets a new id.
            init_sync: at step 0, all groups recover from one of them.

        Raises:
            QuorumTimeoutError: none in time.
            ManagerUnreachableError, RefusedError, AuthenticationError: as they say.
        """
        call = RankQuorumCall(
            protocol=PROTOCOL_VERSION,
            group_rank=group_rank,
            step=step,
            checkpoint_metadata=checkpoint_metadata,
            shrink_only=shrink_only,
            init_sync=init_sync,
            commit_failures=commit_failures,
        )
        try:
            return self._call(call, QuorumResult, timeout)
        except CallTimeoutError as error:
            raise QuorumTimeoutError(f"no quorum for group rank {group_rank}: {error}", self._address) from error

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Vote on a step, and wait for the votes of all ranks of the group on that step. True where all of them said so.

        Args:
            group_rank: this rank.
            step: what is voted on.
            should_commit: this rank's vote.
            timeout: how long to wait for the others.

        Raises:
            CallTimeoutError: not all have voted in time, and this vote does not count any more; or the decision was on its way,
                and the others have it.
            ManagerUnreachableError, RefusedError, AuthenticationError: as they say.
        """
        vote = RankVote(protocol=PROTOCOL_VERSION, group_rank=group_rank, step=step, should_commit=should_commit)
        return self._call(vote, GroupDecision, timeout).should_commit

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """Return what a rank of the server's group said when it asked for a quorum last; RefusedError where it has not yet."""
        call = MetadataCall(protocol=PROTOCOL_VERSION, group_rank=rank)
        return self._call(call, RankMetadata, timeout).checkpoint_metadata

    def __repr__(self) -> str:
        return f"ManagerClient(addr={self._address!r})"

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.connect()
        except OSError as error:
            message = f"no manager server answers at {self._address} within {timeout_s:g} s: {error}"
            raise ManagerUnreachableError(message, self._address) from error
        return connection

    def _call(self, call: ToManagerServer, kind: type[_A], timeout: timedelta) -> _A:
        until = time.monotonic() + timeout.total_seconds()
        status, data = self._ask(call, timeout.total_seconds())
        while (
            status == _TOO_MANY and time.monotonic() + _PAUSE_S < until
        ):  # it was not looked at: many call from one address
            time.sleep(_PAUSE_S)
            status, data = self._ask(call, until - time.monotonic())
        return self._take(status, data, kind)

    def _ask(self, call: ToManagerServer, timeout_s: float) -> tuple[int, bytes]:
        until = time.monotonic() + timeout_s
        connection = self._connect(min(self._connect_timeout_s, timeout_s))
        try:
            connection.sock.settimeout(max(until - time.monotonic(), 0.001))
            connection.request("POST", _PATH, encode(call), self._headers)
            response = connection.getresponse()
            data = response.read(MAX_MESSAGE_BYTES + 1)
        except TimeoutError as error:
            message = f"the manager server at {self._address} has not answered within {timeout_s:g} s"
            raise CallTimeoutError(message, self._address) from error
        except (OSError, http.client.HTTPException) as error:
            message = f"the manager server at {self._address} went away before it answered: {error}"
            raise ManagerUnreachableError(message, self._address) from error
        finally:
            connection.close()
        return response.status, data

    def _take(self, status: int, data: bytes, kind: type[_A]) -> _A:
        party = f"the manager server at {self._address}"
        if status == 401:
            message = f"{party} refused our token; set the same TORCHFT_CKPT_TOKEN on both sides"
            raise AuthenticationError(message, self._address)
        if status == _TOO_MANY:
            raise CallTimeoutError(
                f"{party} is called too often from this address to have answered in time", self._address
            )
        if status != 200:
            raise ManagerUnreachableError(
                f"what answers at {self._address} is no manager server of ours", self._address
            )
        answer = decode_from_manager_server(data, party)
        if isinstance(answer, Refused):
            error = ProtocolVersionError if answer.code == "version" else RefusedError
            raise error(f"{party} refused: {answer.reason}", self._address)
        if not isinstance(answer, kind):
            raise ProtocolError(f"{party} answered with {type(answer).__name__}", self._address)
        return answer
