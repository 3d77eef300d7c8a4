"""The lighthouse as a service: an aiohttp shell around `core.coordination.lighthouse`, in a thread of its own.

    GET /v1/groups?job=NAME    WebSocket of one replica group, messages of `core.coordination.messages`
    GET /                      status as JSON, for people: all jobs in short; with ?job=NAME that one
    GET /metrics               for Prometheus
    GET /healthz               200, for probes

Of several lighthouses one leads (`store`); the others say so to whoever comes.

All but the last want `Authorization: Bearer TOKEN` where a token is set. The first wants a certificate, too, where TLS is set
up with an authority.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from aiohttp import web
from msgspec.structs import replace

from torchft_ckpt import __version__, config
from torchft_ckpt.coordination.channel import Channel, client_of, open_websocket, refuse_token, request_socket
from torchft_ckpt.coordination.lease_keeper import LeaseKeeper
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.coordination.jobs import Jobs
from torchft_ckpt.core.coordination.leadership import LeaseStore
from torchft_ckpt.core.coordination.learning import learner_in_words
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    Event,
    Instruction,
    LighthouseSettings,
    Opened,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.messages import (
    MAX_GROUPS,
    MIN_HEARTBEAT_TIMEOUT_S,
    PROTOCOL_VERSION,
    Dropped,
    Heartbeat,
    Hello,
    Refused,
    ToLighthouse,
    Welcome,
    decode_to_lighthouse,
    group_name,
    refuse_unreadable,
)
from torchft_ckpt.core.services.metrics import Samples
from torchft_ckpt.errors import ConfigError, ProtocolError
from torchft_ckpt.front.limits import FrontLimits, introduced, on_overrun
from torchft_ckpt.front.metrics import Exporter
from torchft_ckpt.front.serving import Front
from torchft_ckpt.network import advertised_host, bearer_matches, join_host_port, listen_as
from torchft_ckpt.threads import end_at_exit
from torchft_ckpt.tls import check_serves, resolve_tls

logger = logging.getLogger(__name__)

_BACKLOG = 4096
MAX_UNSAID = 4 * MAX_GROUPS
"""Messages that wait for the store."""
# A thousand groups may stand behind one address, and come at once: each has one connection for its life, and perhaps an old one.
_LIMITS = FrontLimits(max_connections=4096, max_connections_per_client=4096, max_strangers=2048)


class LighthouseServer:
    """A lighthouse, embedded in this process.

    Args:
        bind: `host:port` to listen on; port 0 takes any free one. `[::]:0` listens everywhere, by IPv6 and by IPv4 (by IPv4
            alone where there is no IPv6), `0.0.0.0:0` by IPv4.
        min_replicas: the fewest replica groups that may train.
        join_timeout_ms: how long those who ask for a quorum wait for living groups that have not asked, once they are more than
            half of the living; until then without end. 60000.
        quorum_tick_ms: accepted for torchft's sake, not used: the lighthouse acts on events, not on ticks.
        heartbeat_timeout_ms: a group that is silent for so long is dead; 5000. One whose connection closes is dead at once.
        token: shared secret of the job; default `TORCHFT_CKPT_TOKEN`, else none.
        hostname: address to advertise; default as in `network.advertised_host`.
        allow_step_loss: let the job go on from an older state when all holders of the newest committed step are gone.
        store: of the lease, made from the address to advertise, if this is one of several lighthouses; it begins to lead when
            it has the lease.
        ssl_context: of a server, for https, or a function that returns the one for the next connection. Where it asks for
            certificates, groups need one. Default: of `TORCHFT_CKPT_TLS_CERT`, `_KEY` and `_CA`, else plain http.
        has_group_label: metrics tell groups apart. Without it their label is empty, and they say what is so of all together.

    Raises:
        ConfigError: an argument cannot be used.
        AddressInUseError: the port is taken, or it is no address of this machine.
        AuthenticationError: the store refuses us.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
        *,
        token: str | None = None,
        hostname: str | None = None,
        allow_step_loss: bool = False,
        store: Callable[[str], LeaseStore] | None = None,
        ssl_context: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None,
        has_group_label: bool = True,
    ) -> None:
        if min_replicas < 1:
            raise ConfigError(f"min_replicas={min_replicas}: at least one replica group has to train", "min_replicas")
        join_timeout_ms = 60_000 if join_timeout_ms is None else join_timeout_ms
        heartbeat_timeout_ms = 5_000 if heartbeat_timeout_ms is None else heartbeat_timeout_ms
        for name, value in (("join_timeout_ms", join_timeout_ms), ("heartbeat_timeout_ms", heartbeat_timeout_ms)):
            if value <= 0:
                raise ConfigError(f"{name}={value}: expected a positive number of milliseconds", party=name)
        if heartbeat_timeout_ms < MIN_HEARTBEAT_TIMEOUT_S * 1000:
            message = f"heartbeat_timeout_ms={heartbeat_timeout_ms}: groups could not say so often that they live"
            least = f"expected at least {MIN_HEARTBEAT_TIMEOUT_S * 1000:g}"
            raise ConfigError(f"{message}; {least}", "heartbeat_timeout_ms")
        host, port = config.parse_host_port(bind, what="lighthouse bind address", default_host="0.0.0.0")
        self._token = config.resolve(token, config.TOKEN, "", str)
        check_serves(ssl_context)
        tls = resolve_tls() if ssl_context is None else None
        self._ssl_context = ssl_context if tls is None else tls.server
        if tls is not None:
            tls.server()  # without a certificate nothing is begun
        self._settings = LighthouseSettings(
            min_replicas=min_replicas,
            join_timeout_s=join_timeout_ms / 1000,
            heartbeat_timeout_s=heartbeat_timeout_ms / 1000,
            allow_step_loss=allow_step_loss,
        )
        self._unix_time_of_zero = time.time() - time.monotonic()
        self._jobs = self._new_jobs()
        self._exporter, self._has_group_label = Exporter(self._samples), has_group_label
        self._lease: LeaseKeeper | None = None
        self._unsaid: deque[Instruction] = deque()
        """What is carried out once what has to outlive this lighthouse is in the store."""
        self._channels: dict[str, Channel] = {}
        self._names = (f"connection-{number}" for number in itertools.count(1))
        self._timer: asyncio.TimerHandle | None = None
        advertised = advertised_host(hostname, bound=host)
        listeners = listen_as("the lighthouse", host, port, _BACKLOG, self._token)
        scheme = "http" if self._ssl_context is None else "https"
        self._address = f"{scheme}://" + join_host_port(advertised, listeners[0].getsockname()[1])
        self._thread = LoopThread("torchft_ckpt-lighthouse")
        try:
            self._thread.run(self._start(listeners, store))
        except BaseException:
            self.shutdown()
            raise
        end_at_exit(self.shutdown)
        logger.info("lighthouse listens on %s, min_replicas=%d", self._address, min_replicas)

    def address(self) -> str:
        """Return the address that replica groups connect to, `http://host:port` or `https://host:port`."""
        return self._address

    def groups_leaving(self) -> list[str]:
        """Return the replica groups that are here and were asked to leave (`Manager.leave_on`, `drain`)."""
        return self._thread.run(self._groups_leaving())

    def shutdown(self) -> None:
        """Close all connections and the port, end the thread. May be called twice."""
        self._thread.finish(self._stop)

    def __repr__(self) -> str:
        return f"LighthouseServer(address={self._address!r}, jobs={sorted(self._jobs.states)})"

    # ------------------------------------------------------------------------------------------------- on the loop

    def _new_jobs(self) -> Jobs:
        return Jobs(self._settings, epoch=uuid.uuid4().hex[:8])

    async def _start(self, listeners: list[socket.socket], store: Callable[[str], LeaseStore] | None) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/groups", self._serve_group),
                web.get("/", self._serve_status),
                web.get("/metrics", self._serve_metrics),
                web.get("/healthz", _serve_health),
            ]
        )
        self._front = Front(
            app,
            listeners,
            name="the lighthouse",
            token=self._token,
            limits=_LIMITS,
            ssl_context=self._ssl_context,
            without_certificate=("/", "/metrics", "/healthz"),
        )
        await self._front.start()
        if store is not None:
            of_lease = store(self._address)
            self._lease = LeaseKeeper(of_lease, on_change=self._lead, data=self._what_lasts, on_written=self._carry_out)
            await self._lease.start()

    def _lead(self, data: bytes | None) -> None:
        """Begin to lead, with what the last leader wrote; or, with None, forget all, as one that starts again."""
        if data is not None:
            if not self._jobs.remember(data, self._unix_time_of_zero, asyncio.get_running_loop().time()):
                logger.warning("what the last leader wrote is not understood: it counts as if nothing was written")
            return
        self._jobs = self._new_jobs()
        self._unsaid.clear()
        for channel in list(self._channels.values()):
            channel.send(Dropped(reason="this lighthouse leads no more"))
            channel.close()

    def _what_lasts(self) -> bytes:
        return self._jobs.what_lasts(self._unix_time_of_zero)

    def _answer_for_lease(self, lease: LeaseKeeper, channel: Channel, message: ToLighthouse) -> bool:
        """Say to a member that this lighthouse does not lead, or for how long it does yet; return whether that was all."""
        if not lease.leads():
            channel.send(Refused(code="standby", reason=lease.state.reason))
            channel.close()
        elif isinstance(message, Heartbeat):
            channel.send(lease.state.answer(message, asyncio.get_running_loop().time()))
        return not lease.leads()

    async def _groups_leaving(self) -> list[str]:
        members = [member for state in self._jobs.states.values() for member in state.members.values()]
        return [member.replica_id for member in members if member.wishes_to_leave]

    async def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for channel in list(self._channels.values()):
            channel.close()
        if self._lease is not None:
            await self._lease.stop()
        await self._front.close()

    async def _serve_group(self, request: web.Request) -> web.StreamResponse:
        if not bearer_matches(request.headers.get("Authorization"), self._token):
            return refuse_token(request, self._front)
        websocket = await open_websocket(request, self._front)
        name, party = next(self._names), f"the group at {client_of(request)}"
        channel = Channel(websocket, request_socket(request), party, self._settings.heartbeat_timeout_s)
        self._channels[name] = channel
        self._handle(Opened(name, request.query.get("job")))
        reason = "its connection closed"
        channel.charge = on_overrun(
            request, lambda what: channel.end(Dropped(f"it sent {what}; its connection was closed"))
        )
        try:
            async for data in channel.messages():
                message = decode_to_lighthouse(data, party)
                if isinstance(message, Hello):
                    introduced(request)
                if self._lease is not None and self._answer_for_lease(self._lease, channel, message):
                    continue
                self._handle(Received(name, message))
        except ProtocolError as error:
            self._front.log.warning("%s", error)
            reason = "it broke the protocol"
            channel.send(refuse_unreadable(data, error, ours="the lighthouse", party=party))
        finally:
            channel.close()
            del self._channels[name]
            self._handle(ConnectionClosed(name, reason))
            await channel.wait_closed()
        return websocket

    def _handle(self, event: Opened | Event) -> None:
        loop, lease = asyncio.get_running_loop(), self._lease
        if lease is not None and not lease.leads() and isinstance(event, Received | Tick):
            return
        self._unsaid.extend(self._jobs.handle(event, loop.time()))
        self._carry_out()
        deadline = self._jobs.next_deadline()
        if self._timer is not None and (deadline is None or self._timer.when() != deadline):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and deadline is not None:
            self._timer = loop.call_at(deadline, self._tick)

    def _carry_out(self) -> None:
        """Do what the jobs have said, if what must outlive this lighthouse is in the store; else that is written, and then."""
        lease = self._lease
        if lease is not None and not lease.leads():
            self._unsaid.clear()
        if not self._unsaid or (lease is not None and not lease.has_written()):
            if lease is not None and len(self._unsaid) > MAX_UNSAID:
                logger.warning(
                    "%d messages wait for the store: forgetting all, as one that starts again", len(self._unsaid)
                )
                self._lead(None)
                self._lead(lease.state.data)
            return
        while self._unsaid:
            instruction = self._unsaid.popleft()
            if isinstance(instruction, Send):
                channel, message = self._channels.get(instruction.connection), instruction.message
                if lease is not None and isinstance(message, Welcome):
                    left_s = lease.state.left_s(asyncio.get_running_loop().time())
                    message = replace(message, fence=lease.state.fence, leads_for_s=left_s)
                if channel is not None:
                    channel.send(message)
            elif isinstance(instruction, Close):
                channel = self._channels.get(instruction.connection)
                if channel is not None:
                    channel.close()
            else:
                logger.log(logging.WARNING if instruction.is_warning else logging.INFO, "%s", instruction.line)

    def _tick(self) -> None:
        self._timer = None
        self._handle(Tick())

    def _samples(self) -> Samples:
        leads, now = self._lease is None or self._lease.leads(), asyncio.get_running_loop().time()
        jobs = {name: (state, state.job.waits) for name, state in self._jobs.states.items() if leads}
        return {
            "build_info": {(__version__, str(PROTOCOL_VERSION)): 1.0},
            "lighthouse_leads": {(): float(leads)},
            "job_groups": {(job,): len(s.members) for job, (s, _) in jobs.items()},
            "job_participants": {(job,): len(s.round.tally.roles) if s.round else 0 for job, (s, _) in jobs.items()},
            "job_step": {(job,): s.newest_step for job, (s, _) in jobs.items()},
            "job_quorum_id": {(job,): s.quorum_id for job, (s, _) in jobs.items()},
            "job_quorum_age_seconds": {(job,): now - s.job.quorum_since for job, (s, _) in jobs.items() if s.round},
            "job_steps_committed_total": {(job,): waits.num_committed for job, (_, waits) in jobs.items()},
            "job_steps_discarded_total": {
                (job, cause): num for job, (_, waits) in jobs.items() for cause, num in waits.num_discarded.items()
            },
            "job_waited_for_seconds_total": {
                (job, group, phase.value): seconds
                for job, (_, waits) in jobs.items()
                for group, of_group in (waits.seconds if self._has_group_label else {"": waits.of_all}).items()
                for phase, seconds in of_group.items()
            },
        }

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        if not bearer_matches(request.headers.get("Authorization"), self._token):
            return refuse_token(request, self._front)
        return await self._exporter.serve(request)

    async def _serve_status(self, request: web.Request) -> web.Response:
        if not bearer_matches(request.headers.get("Authorization"), self._token):
            return refuse_token(request, self._front)
        now, name = asyncio.get_running_loop().time(), request.query.get("job")
        if self._lease is not None and not self._lease.leads():
            state = self._lease.state
            return web.json_response({"leads": False, "leader": state.leader, "reason": state.reason})
        finished = {
            job: {"step": over.step, "finished_at": round(over.finished_at + self._unix_time_of_zero, 3)}
            for job, over in self._jobs.finished.items()
        }
        if name is None:
            jobs = {job: _in_short(state) for job, state in self._jobs.states.items()}
            lease, unsaid = self._lease, len(self._unsaid)
            leads = {} if lease is None else {"leads": True, "lease": lease.state.fence, "unsaid": unsaid}
            return web.json_response(leads | {"jobs": jobs, "finished": finished, "settings": asdict(self._settings)})
        if name in self._jobs.states:
            return web.json_response(_at_length(self._jobs.states[name], now) | {"settings": asdict(self._settings)})
        if name in finished:
            return web.json_response(finished[name])
        return web.json_response({"error": f"no job {name[:64]} is here"}, status=404)


async def _serve_health(_: web.Request) -> web.Response:
    """Say that the lighthouse answers, and nothing else; probes have no token."""
    return web.Response(text="ok\n")


def _in_short(state: LighthouseState) -> dict[str, object]:
    return {
        "groups": sorted(state.members),
        "quorum_id": state.quorum_id,
        "newest_step": state.newest_step,
        "finished_step": state.finished_step,
        "reason": state.reason if state.members else "no group is here",
    }


def _at_length(state: LighthouseState, now: float) -> dict[str, object]:
    waits = state.job.waits
    members = [
        {
            "replica_id": member.replica_id,
            "step": member.version.step,
            "urls": member.checkpoint_addresses,
            "metrics": member.hello.metrics_address,
            "waiting_s": round(now - member.asked_at, 3) if member.request else None,
            "reason": member.notified_reason or learner_in_words(member, state.newest_step) or state.why_failed(member),
            "silent_s": round(now - member.last_seen, 3),
            "waited_for_s": {
                phase.value: round(seconds, 3)
                for phase, seconds in waits.seconds.get(group_name(member.replica_id), {}).items()
            },
            "leaving": member.wishes_to_leave,
        }
        for member in state.members.values()
    ]
    return _in_short(state) | {
        "participants": list(state.round.tally.roles) if state.round else [],
        "members": members,
        "waited_for": waits.last
        and waits.last._asdict() | {"phase": waits.last.phase.value, "slow_for_steps": waits.num_slow},
        "lost": _lost(state, now),
        "allows_step_loss": state.allow_step_loss,
        "differed": state.last_said_to_differ,
    }


def _lost(state: LighthouseState, now: float) -> dict[str, str]:
    """Return who is away, as of the last life of each group, and why. One that is back has lost nothing that is of use."""
    last = {group_name(one): (one, *gone) for one, gone in state.lost_members.items()}
    here = {group_name(replica_id) for replica_id in state.members}
    return {one: f"{why} ({now - heard:.0f} s ago)" for name, (one, why, heard) in last.items() if name not in here}
