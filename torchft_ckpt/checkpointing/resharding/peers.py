"""The ranks of a running job, seen from outside: finds a step that all of them can serve, and keeps it from going.

A job that trains serves nothing until somebody wants it, and its ranks do not hear of that in the same step. So a step is
chosen that is still to come, and each rank is asked for it ahead. Where all of them have one step open already, as outer
loops have, that one is taken.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torchft_ckpt.checkpointing.address import SourceAddress
from torchft_ckpt.checkpointing.client import CheckpointClient, PulledState
from torchft_ckpt.checkpointing.format import Manifest
from torchft_ckpt.checkpointing.options import (
    MAX_MANIFEST_BYTES,
    FetchOptions,
    default_num_streams,
    physical_memory_bytes,
)
from torchft_ckpt.checkpointing.progress import ProgressCallback
from torchft_ckpt.checkpointing.resharding.destination import ShardedDestination
from torchft_ckpt.checkpointing.resharding.fetch import ShardedFetch
from torchft_ckpt.checkpointing.resharding.plan import SourceGroup
from torchft_ckpt.checkpointing.source import SourceClient
from torchft_ckpt.errors import (
    ConfigError,
    SourceRefusedError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)

logger = logging.getLogger(__name__)
_MAX_THREADS = 32
_MAX_LEAD = 4096
_LEAD_FACTOR = 4


class JobPeers:
    """All ranks of one replica group of a running job, or of several. One thread at a time; it keeps no connections.

    Args:
        groups: for each replica group, what the `HTTPTransport.metadata()` of each rank returned, in the order of ranks.
        token: shared secret of the job; default: `TORCHFT_CKPT_TOKEN`, else none.
        ssl_context: for clients; whom to believe, and who we are, where the urls are `https`.
        connect_timeout: limit for a connection to be accepted.
        stall_timeout: limit for each wait for a byte.

    Raises:
        ConfigError: a url cannot be used, or is there twice.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        *,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout: timedelta = timedelta(seconds=10),
        stall_timeout: timedelta = timedelta(seconds=15),
    ) -> None:
        self._clients = [
            [
                CheckpointClient(
                    url,
                    token=token,
                    ssl_context=ssl_context,
                    connect_timeout=connect_timeout,
                    stall_timeout=stall_timeout,
                )
                for url in group
            ]
            for group in groups
        ]
        urls = [client.url for group in self._clients for client in group]
        if not urls or not self._clients[0]:
            raise ConfigError("urls is empty; name the ranks of a replica group", party="urls")
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ConfigError(f"urls names {', '.join(twice[:5])} more than once", party="urls")
        self.options = FetchOptions(
            connect_timeout_s=connect_timeout.total_seconds(),
            stall_timeout_s=stall_timeout.total_seconds(),
            num_streams=default_num_streams(),
            max_manifest_bytes=MAX_MANIFEST_BYTES,
            max_total_bytes=physical_memory_bytes(),
            token=self._clients[0][0].token,
            receiver=uuid.uuid4().hex,
            ssl_context=ssl_context,
            deflated_manifests=True,
        )

    @property
    def addresses(self) -> list[list[SourceAddress | None]]:
        """Where the ranks are, by group."""
        return [[client.address for client in group] for group in self._clients]

    @property
    def urls(self) -> str:
        """All of them, for messages."""
        return ", ".join(client.url for group in self._clients for client in group)

    def pull(self, step: int | None, *, timeout: timedelta, on_progress: ProgressCallback | None = None) -> PulledState:
        """Fetch the state of a step whole, every tensor put together from the ranks that hold parts of it.

        Values that are no tensors are those of the first rank.

        Args:
            step: the step; None for one that all ranks can serve soon.
            timeout: the overall deadline.
            on_progress: told how far it is.

        Raises:
            TransferError: a subclass says why there is no state.
            StateMismatchError: the ranks do not hold all of it.
            StateFormatError: what a rank sends is not a state.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        step, _ = self.hold(step, deadline)
        destination = ShardedDestination(None, 0, in_place=False)
        source = ShardedFetch(
            self.addresses,
            step=step,
            deadline=deadline,
            options=self.options,
            want=destination.want,
            on_progress=on_progress,
        ).run()
        return PulledState(step=step, state=destination.assemble(source))

    def hold(self, step: int | None, deadline: float) -> tuple[int, SourceGroup]:
        """Have all ranks of the first group keep the state of one step for us; return the step, and what they hold.

        Args:
            step: the step; None for one that all ranks can serve.
            deadline: on the monotonic clock.

        Raises:
            TransferError: a subclass says why it is not to be had.
            StateFormatError: what a rank sends is not a manifest.
        """
        group = self._clients[0]
        if step is None:
            opened = self._open_step(deadline)
            if opened is not None:
                try:
                    return opened, self._ask_all(group, opened, deadline)
                except SourceRefusedError as error:
                    logger.info("step %d is gone: %s", opened, error)
        else:
            return step, self._ask_all(group, step, deadline)
        lead = 1
        while True:
            now_at = group[0].manifest(None, timeout=_left(deadline, group[0].url)).step
            try:
                return now_at + lead, self._ask_all(group, now_at + lead, deadline)
            except SourceRefusedError as error:
                if lead >= _MAX_LEAD:
                    raise
                logger.info("step %d was over before all ranks had heard that it is wanted: %s", now_at + lead, error)
                lead *= _LEAD_FACTOR

    def _open_step(self, deadline: float) -> int | None:
        """Return the newest step that all ranks serve now, if there is one. What is only passed on does not count."""
        served: list[set[int]] = []
        for client in self._clients[0]:
            index = client.index(timeout=_left(deadline, client.url))
            served.append({entry.step for entry in index.snapshots if entry.phase != "relay"})
        return max(set.intersection(*served), default=None)

    def _ask_all(self, group: Sequence[CheckpointClient], step: int, deadline: float) -> SourceGroup:
        """Ask every rank at once, in our name: from then on they keep that state for us."""
        over = threading.Event()

        def pause(seconds: float) -> bool:
            return not over.wait(seconds) and time.monotonic() < deadline

        def ask(client: CheckpointClient) -> Manifest:
            source = SourceClient(client.address, step, self.options)
            try:
                return source.fetch_manifest(deadline=deadline, pause=pause, on_refused=lambda error: None)
            except TransferCancelledError as error:
                raise TransferTimeoutError(
                    f"{client.url} did not serve step {step} within the timeout; is it training?", client.url
                ) from error
            except TransferError:
                over.set()
                raise
            finally:
                source.release()

        with ThreadPoolExecutor(min(len(group), _MAX_THREADS), thread_name_prefix="torchft_ckpt-peers") as threads:
            asked = [threads.submit(ask, client) for client in group]
        failures = [error for future in asked if (error := future.exception()) is not None]
        for failure in failures:
            if isinstance(failure, SourceRefusedError):
                raise failure
        if failures:
            raise failures[0]
        return SourceGroup([client.url for client in group], [future.result() for future in asked])


def _left(deadline: float, party: str) -> timedelta:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TransferTimeoutError(f"{party} did not answer within the timeout", party)
    return timedelta(seconds=left_s)
