"""A rank above 0 towards its group's manager service. A connection that ends is the end of the group."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from datetime import timedelta

import aiohttp

from torchft_ckpt.coordination.channel import Channel, cause_of, client_session, raise_if_tls, secured, service_url
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.coordination.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    SAME_EVERYWHERE,
    GroupBroken,
    GroupToRank,
    Heartbeat,
    Leave,
    RankHello,
    RankToGroup,
    decode_group_to_rank,
)
from torchft_ckpt.core.services.proofs import PROOF_HEADER, RankProof
from torchft_ckpt.errors import AuthenticationError, GroupBrokenError, ProtocolError
from torchft_ckpt.tls import Tls

logger = logging.getLogger(__name__)

DEAD_PEER_TIMEOUT_S = 10.0


class RankSession:
    """The connection of one rank.

    Args:
        address: of the manager service, `host:port`.
        on_message: gets the messages, on the event-loop thread; must not block.
        token: shared secret, empty for none. It is proved to the service, and by it, and not sent: anybody may have written
            down the address.
        tls: None: plain HTTP is spoken.

    Raises:
        GroupBrokenError: rank 0 cannot be reached.
        TlsError: there is no TLS session with it.
        AuthenticationError: it refused our token, or does not prove that it knows it.
    """

    is_lighthouse_away = False
    """Not known here: rank 0 knows it."""

    def __init__(
        self,
        *,
        address: str,
        group_rank: int,
        on_message: Callable[[GroupToRank], None],
        token: str,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        replica_id: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._address = address
        self._tls = tls
        self._group_rank = group_rank
        self._on_message = on_message
        self._proof = RankProof(token, replica_id, secrets.token_hex(16)) if token else None
        self._interval_s = max(heartbeat_interval.total_seconds(), 0.1)
        self._connect_timeout_s = connect_timeout.total_seconds()
        self._channel: Channel | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_leaving = False
        self._thread = LoopThread("torchft_ckpt-coordination")
        try:
            self._thread.run(self._start())
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            self.shutdown("it could not connect")
            raise_if_tls(error, "the manager service (group rank 0)", address, tls)
            if isinstance(error, aiohttp.WSServerHandshakeError) and error.status == 401:
                message = f"the manager service at {address} refused the token of group rank {group_rank}"
                raise AuthenticationError(message, address) from error
            why = cause_of(error, tls)
            message = f"group rank {group_rank} cannot reach its manager service (group rank 0) at {address}: {why}"
            raise GroupBrokenError(message, address) from error
        except BaseException:  # an interrupt too: nobody else could end the thread
            self.shutdown("it could not connect")
            raise

    def send(self, message: RankToGroup) -> None:
        """Send a message. Any thread; returns at once."""
        self._thread.call_soon(self._send, message)

    def store_address(self) -> str:
        """Not known here: rank 0 knows it."""
        return ""

    def waiting_for(self) -> str:
        """Say who has not asked for the next quorum yet. Any thread."""
        return f"group rank 0 at {self._address} has not answered"

    def schedule(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call a function on the event-loop thread after a while; it must not block. Any thread."""
        self._thread.call_later(delay_s, function)

    def shutdown(self, reason: str) -> None:
        """Leave the group, end the thread. May be called twice."""
        self._thread.finish(lambda: self._stop(reason))

    # --------------------------------------------------------------------------------------------------- on the loop

    def _send(self, message: RankToGroup) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def _start(self) -> None:
        headers = {"Authorization": self._proof.authorization} if self._proof is not None else {}
        answers: list[str] = []

        async def note(session: object, context: object, ended: aiohttp.TraceRequestEndParams) -> None:
            answers.append(ended.response.headers.get(PROOF_HEADER, ""))

        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(note)
        self._session = client_session(traces=[trace])
        socket = await asyncio.wait_for(
            self._session.ws_connect(
                service_url(self._address, "/v1/ranks", self._tls),
                headers=headers,
                max_msg_size=MAX_MESSAGE_BYTES,
                compress=0,
                **secured(self._tls),
            ),
            self._connect_timeout_s,
        )
        if self._proof is not None and not (answers and self._proof.is_answer(answers[-1])):
            message = (
                f"who answers at {self._address} does not prove that it is the manager service of this group: group rank"
                f" {self._group_rank} told it nothing; that address was found at the group's store"
            )
            raise AuthenticationError(message, self._address)
        self._channel = Channel(
            socket, socket.get_extra_info("socket"), f"the manager service at {self._address}", DEAD_PEER_TIMEOUT_S
        )
        self._channel.send(RankHello(protocol=PROTOCOL_VERSION, group_rank=self._group_rank))
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read(self._channel)), loop.create_task(self._beat(self._channel))]

    async def _read(self, channel: Channel) -> None:
        reason = "its connection closed"
        try:
            async for data in channel.messages():
                self._on_message(decode_group_to_rank(data, f"the manager service at {self._address}"))
        except ProtocolError as error:
            reason = f"{error}; this rank speaks protocol {PROTOCOL_VERSION}, {SAME_EVERYWHERE}"
        if not self._is_leaving:
            self._on_message(GroupBroken(f"group rank 0 at {self._address} is gone: {reason}"[:1000]))

    async def _beat(self, channel: Channel) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            channel.send(Heartbeat())

    async def _stop(self, reason: str) -> None:
        self._is_leaving = True
        if self._channel is not None:
            self._channel.send(Leave(reason[:1000]))
            self._channel.close()
            await self._channel.wait_closed()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
