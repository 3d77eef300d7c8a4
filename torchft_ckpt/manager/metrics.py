"""The metrics of a replica group: its rank 0 counts what happens, and serves it at a port of its own, on a thread of its own.

If the port cannot be had, or a client for Prometheus is not installed, it says so, and the group trains without metrics.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from aiohttp import web

from torchft_ckpt import __version__, config
from torchft_ckpt.coordination.channel import refuse_token
from torchft_ckpt.coordination.loop_thread import LoopThread
from torchft_ckpt.core.coordination.causes import CAUSES, cause_of
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, group_label
from torchft_ckpt.core.services.metrics import Samples
from torchft_ckpt.errors import AddressInUseError
from torchft_ckpt.events import Event, Healed, QuorumChanged, StepCommitted, StepDiscarded
from torchft_ckpt.front.limits import FrontLimits
from torchft_ckpt.front.metrics import MISSING, PATH, Exporter, is_installed
from torchft_ckpt.front.serving import Front
from torchft_ckpt.manager.outcomes import ManagerStatistics
from torchft_ckpt.manager.rank_config import RankConfig
from torchft_ckpt.manager.timekeeping import Timekeeper
from torchft_ckpt.network import bearer_matches, bind_for, join_host_port, listen_as

logger = logging.getLogger(__name__)

_NAME, _BACKLOG = "the metrics port", 32
_LIMITS = FrontLimits(max_connections=32, max_connections_per_client=32, max_strangers=32)


class GroupMetrics:
    """Counts from the beginning; serves from `start` until `shutdown`. Any thread may note an event."""

    def __init__(self, rank_config: RankConfig, keeper: Timekeeper, counted: Callable[[], ManagerStatistics]) -> None:
        self._rank_config, self._keeper, self._counted = rank_config, keeper, counted
        self._labels = rank_config.job, group_label(rank_config.replica_id)
        self._lock = threading.Lock()
        self._healed_bytes, self._healed_s = 0, 0.0
        self._discarded = dict.fromkeys(CAUSES, 0)
        self._quorum_id, self._quorum_since = 0, time.monotonic()
        self._thread: LoopThread | None = None

    def note(self, event: Event) -> None:
        """Count an event. Waits for nothing."""
        with self._lock:
            if isinstance(event, StepCommitted | StepDiscarded | QuorumChanged) and event.quorum_id != self._quorum_id:
                self._quorum_id, self._quorum_since = event.quorum_id, time.monotonic()
            if isinstance(event, StepDiscarded):
                self._discarded[cause_of(event.reason)] += 1
            elif isinstance(event, Healed):
                self._healed_bytes += event.received_bytes
                self._healed_s += event.took_s

    def start(self, port: int) -> str:
        """Serve them, and return where; or say why not. `port`: 0 for any."""
        if not is_installed():
            logger.warning("%s is set, and this group has no metrics: %s", config.METRICS_PORT[0], MISSING)
            return ""
        host, token = self._rank_config.host.address, self._rank_config.token
        try:
            listeners = listen_as(_NAME, bind_for(host), port, _BACKLOG, token)
        except AddressInUseError as error:
            logger.warning(
                "this group has no metrics: %s. Groups that share a machine need a port each: with %s=0 each takes a free"
                " one, and `status` tells which",
                error,
                config.METRICS_PORT[0],
            )
            return ""
        thread = LoopThread("torchft_ckpt-metrics")
        self._front = thread.run(self._serve(listeners))
        self._thread = thread
        return join_host_port(host, listeners[0].getsockname()[1])

    def shutdown(self) -> None:
        """Close the port, end the thread. May be called twice."""
        if self._thread is not None:
            self._thread.finish(lambda: self._front.close())

    async def _serve(self, listeners: list[socket.socket]) -> Front:
        app, tls, token = web.Application(), self._rank_config.tls, self._rank_config.token
        context, exporter = None if tls is None else tls.server, Exporter(self._samples)
        front = Front(
            app, listeners, name=_NAME, token=token, limits=_LIMITS, ssl_context=context, without_certificate=(PATH,)
        )

        async def serve(request: web.Request) -> web.Response:
            may_ask = bearer_matches(request.headers.get("Authorization"), token)
            return await exporter.serve(request) if may_ask else refuse_token(request, front)

        app.add_routes([web.get(PATH, serve)])
        await front.start()
        return front

    def _samples(self) -> Samples:
        us, keeper, counted = self._labels, self._keeper, self._counted()
        with self._lock:
            age_s = time.monotonic() - self._quorum_since if self._quorum_id else 0.0
            return {
                "build_info": {(__version__, str(PROTOCOL_VERSION)): 1.0},
                "step": {us: counted.step},
                "quorum_id": {us: self._quorum_id},
                "quorum_age_seconds": {us: age_s},
                "steps_committed_total": {us: counted.num_committed},
                "heals_total": {us: counted.num_healed},
                "heal_bytes_total": {us: self._healed_bytes},
                "heal_seconds_total": {us: self._healed_s},
                "steps_discarded_total": {(*us, cause): num for cause, num in self._discarded.items()},
                "ledger_seconds_total": {(*us, account.value): s for account, s in keeper.seconds().items()},
                "phase_seconds_total": {(*us, phase.value): s for phase, s in keeper.phases().items()},
                "saves_total": {(*us, outcome): num for outcome, num in keeper.num_ended_saves.items()},
            }
