"""Group rank 0's side: this group's ranks on one side, the lighthouse on the other, `core.coordination.group` in between.

A rank whose connection closes is gone, and the group with it. One that is merely silent, for longer than the lighthouse's
patience, makes the group stay away from the lighthouse until it is heard again: the others go on without the group, and
it heals when it is back.

Rank 0 talks to it by method calls; ranks above 0 over WebSockets (`rank_session`), for which a port is only opened where
there are such ranks. All of it runs on one event-loop thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta

from aiohttp import web

from torchft_ckpt import config
from torchft_ckpt.coordination.channel import Channel, client_of, open_websocket, refuse_token, request_socket
from torchft_ckpt.coordination.lighthouse_connection import LighthouseConnection
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.coordination.group import (
    GroupEvent,
    GroupState,
    LighthouseMessage,
    LighthouseUp,
    RankLost,
    RankMessage,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.messages import (
    GroupToRank,
    Heartbeat,
    Hello,
    RankToGroup,
    Refused,
    decode_rank_hello,
    decode_rank_to_group,
    refuse_unreadable,
)
from torchft_ckpt.core.services.proofs import PROOF_HEADER, RankProof
from torchft_ckpt.errors import CoordinationError, JobFinishedError, ProtocolError
from torchft_ckpt.front.limits import FrontLimits, introduced, on_overrun
from torchft_ckpt.front.serving import Front
from torchft_ckpt.network import advertised_host, bind_for, join_host_port, listen_as
from torchft_ckpt.tls import Tls

logger = logging.getLogger(__name__)

DEAD_PEER_TIMEOUT_S = 10.0
_BACKLOG = 128
_MAX_STRANGERS = 64
_MAX_HELLO_BYTES = 4096
_MAX_PROOFS = 65_536


class GroupService:
    """The manager service of one replica group.

    Args:
        hello: makes the first message of each connection to the lighthouse.
        on_message: gets rank 0's messages, on the event-loop thread; must not block.
        on_refused: called when the lighthouse will not have this group any more.
        hostname: address to advertise to the other ranks, None: the interface that routes to the lighthouse.
        port: for the other ranks, 0 for any.
        token: shared secret, empty for none.
        replica_id: of the group; the other ranks prove under it that they know the token.
        heartbeat_interval, connect_timeout: towards the lighthouse.
        tls: None: plain HTTP is spoken.

    Raises:
        LighthouseUnreachableError, TlsError, AuthenticationError, ProtocolVersionError, RefusedError, AddressInUseError.
    """

    def __init__(
        self,
        *,
        world_size: int,
        lighthouse_addr: str,
        hello: Callable[[], Hello],
        on_message: Callable[[GroupToRank], None],
        on_refused: Callable[[CoordinationError], None],
        hostname: str | None,
        port: int,
        job: str,
        token: str,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        replica_id: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._state = GroupState(world_size)
        self._on_message = on_message
        self._user_on_refused = on_refused
        self._token = token
        self._replica_id = replica_id
        self._proofs_used: OrderedDict[str, None] = OrderedDict()
        """The latest `_MAX_PROOFS` of ranks, by their answers: who listens on the way cannot use one again."""
        self._channels: dict[int, Channel] = {}
        self._heard_at: dict[int, float] = {}
        self._watch: asyncio.Task[None] | None = None
        self._front: Front | None = None
        self._client = LighthouseConnection(
            lighthouse_addr,
            job=job,
            token=token,
            hello=lambda: self._state.introduce(hello()),
            on_message=lambda message: self._handle(LighthouseMessage(message)),
            on_up=lambda: self._handle(LighthouseUp()),
            on_refused=self._refused,
            heartbeat_interval=heartbeat_interval,
            connect_timeout=connect_timeout,
            tls=tls,
        )
        self._address = ""
        self._thread = LoopThread("torchft_ckpt-coordination")
        try:
            if world_size > 1:
                host = advertised_host(hostname, towards=self._client.address)
                listeners = listen_as("the manager service", bind_for(host), port, _BACKLOG, token)
                self._thread.run(self._serve(listeners, world_size + _MAX_STRANGERS))
                self._address = join_host_port(host, listeners[0].getsockname()[1])
            self._thread.run(self._client.start())
        except BaseException:  # an interrupt too: nobody else could end the thread
            self.shutdown("its manager service could not start")
            raise

    @property
    def address(self) -> str:
        """The address that ranks above 0 connect to, `host:port`; empty in a group of one."""
        return self._address

    def send(self, message: RankToGroup) -> None:
        """Take a message of rank 0. Any thread; returns at once."""
        self._thread.call_soon(self._handle, RankMessage(0, message))

    def store_address(self) -> str:
        """Return the store of the quorum that was there when this group connected; empty if there was none."""
        return self._client.store_address

    def waiting_for(self) -> str:
        """Say who has not asked for the next quorum yet. Any thread."""
        return self._state.waiting_for() or f"the lighthouse at {self._client.address} has not answered"

    @property
    def is_lighthouse_away(self) -> bool:
        """Whether there is no connection to the lighthouse. Any thread."""
        return self._client.is_away

    def schedule(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call a function on the event-loop thread after a while; it must not block. Any thread."""
        self._thread.call_later(delay_s, function)

    def shutdown(self, reason: str) -> None:
        """Leave the quorum, close everything, end the thread. May be called twice."""
        self._thread.finish(lambda: self._stop(reason))

    # --------------------------------------------------------------------------------------------------- on the loop

    async def _serve(self, listeners: list[socket.socket], max_connections: int) -> None:
        app = web.Application()
        limits = FrontLimits(
            max_connections=max_connections, max_connections_per_client=max_connections, max_strangers=_MAX_STRANGERS
        )
        self._front = front = Front(
            app,
            listeners,
            name="the manager service",
            token=self._token,
            limits=limits,
            ssl_context=None if self._tls is None else self._tls.server,
            without_certificate=(),
        )
        app.add_routes([web.get("/v1/ranks", functools.partial(self._serve_rank, front))])
        await front.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_ranks())

    async def _watch_ranks(self) -> None:
        """Stay away from the lighthouse while a rank is silent."""
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        is_held = False
        while True:
            patience_s = self._client.heartbeat_timeout_s
            await asyncio.sleep(patience_s / 4)
            now, last, checked_at = loop.time(), checked_at, loop.time()
            if now - last > patience_s / 2:  # this process slept itself: what the ranks said is yet to be read
                self._heard_at = dict.fromkeys(self._heard_at, now)
            silent = [rank for rank, heard_at in self._heard_at.items() if now - heard_at > patience_s]
            if silent and not is_held:
                is_held = True
                logger.warning(
                    "group ranks %s are silent for %.1f s: staying away until they are back", silent, patience_s
                )
                self._client.hold()
            elif is_held and not silent:
                is_held = False
                self._client.release()

    async def _stop(self, reason: str) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._client.stop(reason)
        channels = list(self._channels.values())
        for channel in channels:
            channel.close()
        await asyncio.gather(*(channel.wait_closed() for channel in channels))
        if self._front is not None:
            await self._front.close()

    def _refused(self, error: CoordinationError) -> None:
        self._user_on_refused(error)
        refused = Refused(code="lighthouse", reason=str(error)[:1000])
        if isinstance(error, JobFinishedError):
            refused = Refused(code="finished", reason=refused.reason, step=error.step)
        for channel in self._channels.values():
            channel.send(refused)

    def _handle(self, event: GroupEvent) -> None:
        for instruction in self._state.handle(event):
            if isinstance(instruction, SendToLighthouse):
                self._client.send(instruction.message)
            elif isinstance(instruction, SendToRank):
                if instruction.rank == 0:
                    self._on_message(instruction.message)
                elif instruction.rank in self._channels:
                    self._channels[instruction.rank].send(instruction.message)

    async def _serve_rank(self, front: Front, request: web.Request) -> web.StreamResponse:
        headers: dict[str, str] = {}
        if self._token:
            header = request.headers.get("Authorization", "")
            found = (RankProof.of(header, secret, self._replica_id) for secret in config.secrets(self._token))
            shown = next(filter(None, found), None)
            if shown is None or shown.answer in self._proofs_used:
                return refuse_token(request, front)
            self._proofs_used[shown.answer] = None
            if len(self._proofs_used) > _MAX_PROOFS:
                self._proofs_used.popitem(last=False)
            headers[PROOF_HEADER] = shown.answer
        websocket = await open_websocket(request, front, headers)
        party = f"a rank at {client_of(request)}"
        channel = Channel(websocket, request_socket(request), party, DEAD_PEER_TIMEOUT_S)
        rank: int | None = None
        reason = "its connection closed"
        channel.charge = on_overrun(
            request, lambda what: channel.end(Refused(code="rate", reason=f"{party} sent {what}"))
        )
        try:
            async for data in channel.messages():
                if rank is None:  # who has not said so is no rank: nothing else is read of it
                    if len(data) > _MAX_HELLO_BYTES:
                        raise ProtocolError(f"{party} sent {len(data)} bytes, and no RankHello", party)
                    hello = decode_rank_hello(data, party)
                    refusal = self._state.refusal(hello.group_rank, hello)
                    if refusal is not None or hello.group_rank in self._channels:
                        channel.send(refusal or Refused(code="config", reason=f"rank {hello.group_rank} is connected"))
                        break
                    introduced(request)
                    rank, party = hello.group_rank, f"group rank {hello.group_rank} at {client_of(request)}"
                    self._channels[rank] = channel
                    self._heard_at[rank] = asyncio.get_running_loop().time()
                    continue
                message = decode_rank_to_group(data, party)
                self._heard_at[rank] = asyncio.get_running_loop().time()
                if not isinstance(message, Heartbeat):
                    self._handle(RankMessage(rank, message))
        except ProtocolError as error:
            front.log.warning("%s", error)
            reason = "it broke the protocol"
            channel.send(refuse_unreadable(data, error, ours="the manager service", party=party))
        finally:
            channel.close()
            if rank is not None:
                self._channels.pop(rank, None)
                self._heard_at.pop(rank, None)
                self._handle(RankLost(rank, reason))
            await channel.wait_closed()
        return websocket
