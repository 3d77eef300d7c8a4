"""A group's one connection to the lighthouse: opened once with a deadline, then kept up for ever, with back-off.

Of several lighthouses one leads: they are tried in turn. What comes from it is taken while `core.coordination.leadership` allows.

A lighthouse that is gone is no reason to end a training job: after the first connection nothing here raises. When `on_up` is
called, `core.coordination.group` sends the requests again that were not answered.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from datetime import timedelta
from typing import TypeGuard

import aiohttp

from torchft_ckpt import config
from torchft_ckpt.coordination.channel import Channel, cause_of, client_session, raise_if_tls, secured, service_url
from torchft_ckpt.core.coordination.jobs import DEFAULT_JOB, JOB_NAME_RULE, is_job_name
from torchft_ckpt.core.coordination.leadership import MAX_HELD, Trust
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
from torchft_ckpt.network import parse_addresses
from torchft_ckpt.tls import Tls

logger = logging.getLogger(__name__)

DEAD_PEER_TIMEOUT_S = 10.0
_PROTOCOL_PAUSE_S = 1.0
_ATTEMPT_S = 0.5
"""For the first attempt at each of several lighthouses, any of which may be off; each next one has twice as long."""
_LEAST_PAUSE_S = 0.1
_LEASE_PAUSE_S, _NUM_HASTY = 0.25, 20
"""Another one may lead as soon as a lease is over: so soon all are tried again, for the first so many times."""

_RETRIABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError, LighthouseUnreachableError)
_OF_ONE = (AuthenticationError, ProtocolVersionError, ProtocolError)
"""One of several that has another token, or is of another version, ends no job: only if all are so does a group end."""


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
        address: of the lighthouse, `host:port` or with the scheme that is spoken; another is a ConfigError. Of several, all of
            them with commas between.
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
        self._addresses = parse_addresses(address, what="lighthouse address", has_tls=tls is not None)
        self._num_tried = self._num_refused = 0
        self._trust = Trust(int(len(self._addresses) > 1))
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

    @property
    def address(self) -> str:
        """Of the lighthouse that it is connected to, or tries."""
        return self._addresses[self._num_tried % len(self._addresses)]

    def _go_on(self, attempt: int) -> float:
        """Have the next lighthouse tried, after that many failures; return after which pause: none before all were tried."""
        self._num_tried += 1
        num_rounds, in_round = divmod(attempt + 1, len(self._addresses))
        if in_round:
            return 0.0
        pause = reconnect_delay_s(num_rounds - 1, random.random())
        return min(pause, _LEASE_PAUSE_S) if len(self._addresses) > 1 and num_rounds <= _NUM_HASTY else pause

    def _is_refused_by_all(self, error: BaseException) -> TypeGuard[CoordinationError]:
        """Note why an attempt failed; whether each of the lighthouses has refused this group, one after the other."""
        self._num_refused = self._num_refused + 1 if isinstance(error, _OF_ONE) else 0
        return self._num_refused >= len(self._addresses)

    def _attempt_s(self, attempt: int) -> float:
        if len(self._addresses) == 1:
            return self._connect_timeout_s
        return min(self._connect_timeout_s, _ATTEMPT_S * 2.0 ** min(attempt // len(self._addresses), 16))

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
                channel = await self._connect(self._attempt_s(attempt))
                break
            except (*_RETRIABLE, *_OF_ONE) as error:
                if self._is_refused_by_all(error):
                    await self._session.close()
                    raise
                pause = self._go_on(attempt)
                attempt += 1
                if loop.time() + pause >= deadline:
                    await self._session.close()
                    why = cause_of(error, self._tls)
                    message = (
                        f"no lighthouse answers at {', '.join(self._addresses)} after {self._connect_timeout_s:g} s ({why});"
                        " start one with `python -m torchft_ckpt lighthouse`, or mend the address"
                        " (lighthouse_addr, TORCHFT_LIGHTHOUSE)"
                    )
                    raise LighthouseUnreachableError(message, ",".join(self._addresses)) from error
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

    async def _connect(self, attempt_s: float) -> Channel:
        if self._session is None:
            raise RuntimeError("internal error: not started")
        headers = {"Authorization": f"Bearer {config.secrets(self._token)[0]}"} if self._token else {}
        url = service_url(self.address, f"/v1/groups?job={self._job}", self._tls)
        try:
            socket = await asyncio.wait_for(
                self._session.ws_connect(
                    url, headers=headers, max_msg_size=MAX_MESSAGE_BYTES, compress=0, **secured(self._tls)
                ),
                attempt_s,
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
            asked_at = asyncio.get_running_loop().time()
            channel.send(self._hello())
            await self._be_welcomed(socket, asked_at, attempt_s)
        except BaseException:
            channel.abort()
            raise
        self._channel, self._num_refused = channel, 0
        self._on_up()
        return channel

    async def _be_welcomed(self, socket: aiohttp.ClientWebSocketResponse, asked_at: float, attempt_s: float) -> None:
        answer = await socket.receive(timeout=attempt_s)
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
        if isinstance(welcome, Refused) and welcome.code == "standby":
            raise LighthouseUnreachableError(f"{party} does not lead: {welcome.reason}", self.address)
        if isinstance(welcome, Refused):
            raise _refused(welcome, self.address)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"{party} did not answer a hello, but sent {type(welcome).__name__}", self.address)
        if not self._trust.begins(welcome, asked_at):
            message = f"{party} leads by lease {welcome.fence}, not {self._trust.fence} or later; do all have the same --etcd?"
            raise LighthouseUnreachableError(message, self.address)
        self.store_address = welcome.store_address
        self.heartbeat_timeout_s = welcome.heartbeat_timeout_s
        # A third of the lighthouse's patience at most, whatever interval was asked for.
        self._pause_s = min(self._interval_s, welcome.heartbeat_timeout_s / 3)
        if welcome.leads_for_s is not None:
            self._pause_s = min(self._pause_s, max(_LEAST_PAUSE_S, welcome.leads_for_s / 4))

    async def _keep(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        while True:
            trust, waiting = self._trust, list[FromLighthouse]()
            heart = loop.create_task(self._beat(channel))
            is_explained = is_pausing = False
            try:
                async for data in channel.messages():
                    message = decode_from_lighthouse(data, f"the lighthouse at {self.address}")
                    if isinstance(message, Heartbeat):
                        trust.heard(message)
                    elif isinstance(message, Dropped):
                        logger.warning("the lighthouse dropped this group: %s; connecting again", message.reason)
                        is_explained = True
                    else:
                        waiting.append(message)
                    if not trust.takes(loop.time()):
                        if len(waiting) > MAX_HELD:
                            channel.abort()
                        continue
                    taken, waiting = waiting, []
                    for each in taken:
                        if isinstance(each, Refused):
                            self._on_refused(_refused(each, self.address))
                            return
                        self._on_message(each)
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
            if len(self._addresses) > 1:
                self._num_tried += 1
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
                channel = await self._connect(self._attempt_s(attempt))
            except (*_RETRIABLE, *_OF_ONE) as error:
                if self._is_refused_by_all(error) and not isinstance(error, TlsError):  # certificates are renewed
                    self._on_refused(error)
                    return None
                address, pause = self.address, self._go_on(attempt)
                attempt += 1
                if attempt in (1, 5) or attempt % 15 == 0:
                    logger.warning(
                        "the lighthouse at %s has been gone for %.1f s (%s); training goes on when it is back",
                        address,
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
        loop, trust = asyncio.get_running_loop(), self._trust
        asked_at = loop.time()
        while True:
            now = loop.time()
            if trust.is_over(now):
                logger.warning("the lighthouse at %s does not say any more that it leads; leaving it", self.address)
                channel.abort()
                return
            due = min((asked_at if trust.is_for_a_time else channel.sent_at) + self._pause_s, trust.ask_at)
            if now >= due:
                channel.send(trust.asks(now))
                asked_at = now
                due = min(now + self._pause_s, trust.ask_at)
            await asyncio.sleep(max(0.0, due - now))


def _refused(message: Refused, address: str) -> CoordinationError:
    if message.code == "finished":
        return JobFinishedError(message.reason, address, message.step)
    text = f"the lighthouse at {address} refused this replica group: {message.reason}"
    return ProtocolVersionError(text, address) if message.code == "version" else RefusedError(text, address)
