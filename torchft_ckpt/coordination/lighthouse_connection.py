"""A group's one connection to the lighthouse: opened once with a deadline, then kept up for ever, with back-off.

A lighthouse that is gone is no reason to end a training job: after the first connection nothing here raises. When `on_up` is
called, `core.coordination.group` sends the requests again that were not answered.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from datetime import timedelta

import aiohttp

from torchft_ckpt import config
from torchft_ckpt.coordination.channel import Channel, cause_of, client_session, raise_if_tls, secured, service_url
from torchft_ckpt.core.coordination.jobs import DEFAULT_JOB, JOB_NAME_RULE, is_job_name
from torchft_ckpt.core.coordination.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    SAME_EVERYWHERE,
    Dropped,
    FromLighthouse,
    Heartbeat,
    Hello,
    Leave,
    Refused,
    ToLighthouse,
    Welcome,
    decode_from_lighthouse,
    other_version,
)
from torchft_ckpt.core.coordination.patience import reconnect_delay_s
from torchft_ckpt.errors import (
    AuthenticationError,
    ConfigError,
    CoordinationError,
    JobFinishedError,
    LighthouseUnreachableError,
    ProtocolError,
    ProtocolVersionError,
    RefusedError,
    TlsError,
)
from torchft_ckpt.network import join_host_port
from torchft_ckpt.tls import Tls

logger = logging.getLogger(__name__)

DEAD_PEER_TIMEOUT_S = 10.0
_PROTOCOL_PAUSE_S = 1.0

_RETRIABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError, LighthouseUnreachableError)


def resolve_job(argument: str | None) -> str:
    """Return the name of this job: the argument, else the environment's, else `default`.

    Raises:
        ConfigError: it is no name of a job.
    """
    name = config.resolve(argument, config.JOB, DEFAULT_JOB, str)
    if not is_job_name(name):
        raise ConfigError(f"job={name!r} cannot be used: expected {JOB_NAME_RULE} (job, TORCHFT_CKPT_JOB)", party="job")
    return name


class LighthouseConnection:
    """Use on its event loop only.

    Args:
        address: of the lighthouse, `host:port` or with the scheme that is spoken; another is a ConfigError.
        job: its name.
        token: shared secret, empty for none.
        hello: makes the first message of each connection.
        on_message: gets what the lighthouse says, in order, `Welcome` excepted.
        on_up: called when a new connection has been welcomed.
        on_refused: called when the lighthouse will not have this group any more; there will be no further attempt.
        heartbeat_interval: a heartbeat is sent when nothing else was for so long.
        connect_timeout: of one attempt.
        tls: None: plain HTTP is spoken.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        token: str,
        hello: Callable[[], Hello],
        on_message: Callable[[FromLighthouse], None],
        on_up: Callable[[], None],
        on_refused: Callable[[CoordinationError], None],
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        tls: Tls | None = None,
    ) -> None:
        place = config.parse_host_port(address, what="lighthouse address", has_tls=tls is not None)
        self.address = join_host_port(*place)
        self._tls = tls
        self._job = job
        self._token = token
        self._hello = hello
        self._on_message = on_message
        self._on_up = on_up
        self._on_refused = on_refused
        self._interval_s = heartbeat_interval.total_seconds()
        self._pause_s = self._interval_s
        self.store_address = ""
        """The store of the present quorum, as the lighthouse named it in its last welcome."""
        self._connect_timeout_s = connect_timeout.total_seconds()
        self._session: aiohttp.ClientSession | None = None
        self._channel: Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_leaving = False
        self.heartbeat_timeout_s = 5.0
        """The lighthouse's patience, as it said at the last welcome."""
        self._may_connect = asyncio.Event()
        self._may_connect.set()

    async def start(self) -> None:
        """Connect, and keep the connection up from then on.

        Raises:
            LighthouseUnreachableError: nobody answered within the connect timeout.
            TlsError, AuthenticationError, ProtocolVersionError, RefusedError: somebody did, and refused.
        """
        loop = asyncio.get_running_loop()
        self._session = client_session()
        deadline = loop.time() + self._connect_timeout_s
        attempt = 0
        while True:
            try:
                channel = await self._connect()
                break
            except _RETRIABLE as error:
                pause = reconnect_delay_s(attempt, random.random())
                attempt += 1
                if loop.time() + pause >= deadline:
                    await self._session.close()
                    why = cause_of(error, self._tls)
                    message = (
                        f"no lighthouse answers at {self.address} after {self._connect_timeout_s:g} s ({why});"
                        " start one with `python -m torchft_ckpt lighthouse`, or mend the address"
                        " (lighthouse_addr, TORCHFT_LIGHTHOUSE)"
                    )
                    raise LighthouseUnreachableError(message, self.address) from error
                await asyncio.sleep(pause)
            except CoordinationError:
                await self._session.close()
                raise
        self._task = loop.create_task(self._keep(channel))

    @property
    def is_away(self) -> bool:
        """Whether there is no connection. Any thread."""
        return self._channel is None

    def send(self, message: ToLighthouse) -> None:
        """Send, or drop if there is no connection. After a `Leave` this group does not connect again."""
        if self._channel is not None:
            self._is_leaving = self._is_leaving or isinstance(message, Leave)
            self._channel.send(message)

    def hold(self) -> None:
        """Drop the connection and stay away until `release`: for the others this group is dead meanwhile."""
        self._may_connect.clear()
        if self._channel is not None:
            self._channel.abort()

    def release(self) -> None:
        self._may_connect.set()

    async def stop(self, reason: str) -> None:
        """Leave the quorum, close the connection. May be called twice."""
        self._is_leaving = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.send(Leave(reason[:1000]))
            channel.close()
            await channel.wait_closed()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _connect(self) -> Channel:
        if self._session is None:
            raise RuntimeError("internal error: not started")
        headers = {"Authorization": f"Bearer {config.secrets(self._token)[0]}"} if self._token else {}
        url = service_url(self.address, f"/v1/groups?job={self._job}", self._tls)
        try:
            socket = await asyncio.wait_for(
                self._session.ws_connect(
                    url, headers=headers, max_msg_size=MAX_MESSAGE_BYTES, compress=0, **secured(self._tls)
                ),
                self._connect_timeout_s,
            )
        except aiohttp.ClientError as error:
            raise_if_tls(error, "the lighthouse", self.address, self._tls)
            if not isinstance(error, aiohttp.WSServerHandshakeError):
                raise
            if error.status in (401, 403):
                message = (
                    f"the lighthouse at {self.address} refused our token; set the same TORCHFT_CKPT_TOKEN on both sides"
                )
                raise AuthenticationError(message, self.address) from error
            message = f"what answers at {self.address} is no lighthouse of ours (HTTP status {error.status})"
            raise LighthouseUnreachableError(message, self.address) from error
        channel = Channel(
            socket, socket.get_extra_info("socket"), f"the lighthouse at {self.address}", DEAD_PEER_TIMEOUT_S
        )
        try:
            channel.send(self._hello())
            await self._be_welcomed(socket)
        except BaseException:
            channel.abort()
            raise
        self._channel = channel
        self._on_up()
        return channel

    async def _be_welcomed(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        answer = await socket.receive(timeout=self._connect_timeout_s)
        if answer.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            raise LighthouseUnreachableError(f"the lighthouse at {self.address} closed the connection", self.address)
        party = f"the lighthouse at {self.address}"
        other = other_version(answer.data)
        if other is not None:
            message = f"{party} speaks protocol {other[0]}, this replica group {PROTOCOL_VERSION}; {SAME_EVERYWHERE}"
            raise ProtocolVersionError(message, self.address)
        try:
            welcome = decode_from_lighthouse(answer.data, party)
        except ProtocolError as error:
            message = f"{error}; this replica group speaks protocol {PROTOCOL_VERSION}, {SAME_EVERYWHERE}"
            raise ProtocolError(message, self.address) from error
        if isinstance(welcome, Refused):
            raise _refused(welcome, self.address)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"{party} did not answer a hello, but sent {type(welcome).__name__}", self.address)
        self.store_address = welcome.store_address
        self.heartbeat_timeout_s = welcome.heartbeat_timeout_s
        # A third of the lighthouse's patience at most, whatever interval was asked for.
        self._pause_s = min(self._interval_s, welcome.heartbeat_timeout_s / 3)

    async def _keep(self, channel: Channel) -> None:
        while True:
            heart = asyncio.get_running_loop().create_task(self._beat(channel))
            is_explained = is_pausing = False
            try:
                async for data in channel.messages():
                    message = decode_from_lighthouse(data, f"the lighthouse at {self.address}")
                    if isinstance(message, Refused):
                        self._on_refused(_refused(message, self.address))
                        return
                    if isinstance(message, Dropped):
                        logger.warning("the lighthouse dropped this group: %s; connecting again", message.reason)
                        is_explained = True
                    else:
                        self._on_message(message)
            except ProtocolError as error:
                logger.warning("%s; connecting again", error)
                is_explained = is_pausing = True
            finally:
                heart.cancel()
                channel.close()
                self._channel = None
            if self._is_leaving:
                return
            if not is_explained and self._may_connect.is_set():
                logger.warning("lost the connection to the lighthouse at %s; connecting again", self.address)
            if is_pausing:  # what it cannot be asked without it will say again
                await asyncio.sleep(_PROTOCOL_PAUSE_S)
            again = await self._reconnect()
            if again is None:
                return
            channel = again

    async def _reconnect(self) -> Channel | None:
        """Return the next connection; None where this group leaves or is refused."""
        attempt = 0
        loop = asyncio.get_running_loop()
        lost_at = loop.time()
        # Being cancelled is not enough: up to Python 3.11 `wait_for` forgets that where an attempt ends in the same instant.
        while not self._is_leaving:
            await self._may_connect.wait()
            try:
                channel = await self._connect()
            except (*_RETRIABLE, TlsError) as error:  # certificates are renewed without a restart
                pause = reconnect_delay_s(attempt, random.random())
                attempt += 1
                if attempt in (1, 5) or attempt % 15 == 0:
                    logger.warning(
                        "the lighthouse at %s has been gone for %.1f s (%s); training goes on when it is back",
                        self.address,
                        loop.time() - lost_at,
                        cause_of(error, self._tls),
                    )
                await asyncio.sleep(pause)
            except CoordinationError as error:
                self._on_refused(error)
                return None
            else:
                if self._is_leaving or not self._may_connect.is_set():  # told to stay away while it was connecting
                    channel.abort()
                    continue
                logger.info("connected to the lighthouse at %s again after %.1f s", self.address, loop.time() - lost_at)
                return channel
        return None

    async def _beat(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = channel.sent_at + self._pause_s
            now = loop.time()
            if now >= due:
                channel.send(Heartbeat())
                due = now + self._pause_s
            await asyncio.sleep(due - now)


def _refused(message: Refused, address: str) -> CoordinationError:
    if message.code == "finished":
        return JobFinishedError(message.reason, address, message.step)
    text = f"the lighthouse at {address} refused this replica group: {message.reason}"
    return ProtocolVersionError(text, address) if message.code == "version" else RefusedError(text, address)
