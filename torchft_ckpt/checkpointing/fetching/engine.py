"""Brings the units of one fetch, blocks or boxes, from its sources, over a few connections each, within a deadline.

The calling thread decides when it is over: all in, failed, cancelled, or too late; it cuts streams that hold up the end, and
reports progress. Worker threads move bytes; each has one connection, which the calling thread closes to end it. What they
share is in `transfer_state`. What is fetched, whose state counts and what becomes of it is said by `fetch.Fetch` for the blocks
of a whole state, and by `resharding.fetch.ShardedFetch` for boxes.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from torchft_ckpt.checkpointing.fetching.connection import MAX_STREAMS, FetchOptions
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.fetching.streams import RunTakenBackError, Stream
from torchft_ckpt.checkpointing.fetching.transfer_state import TransferState
from torchft_ckpt.checkpointing.progress import ProgressCallback, TransferProgress, tell
from torchft_ckpt.checkpointing.protocol import SourceAddress
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.core.transfer.paths import describe_paths
from torchft_ckpt.errors import (
    CheckpointError,
    ReplicaDivergenceWarning,
    SourceLostError,
    SourceRefusedError,
    StateMismatchError,
    TransferCancelledError,
    TransferError,
    TransferStalledError,
    TransferTimeoutError,
)
from torchft_ckpt.threads import Thread

logger = logging.getLogger(__name__)
TICK_S = 0.1
_TELL_TIMEOUT_S = 0.5
_JOIN_TIMEOUT_S = 5.0
State = TypeVar("State", bound=TransferState)


class FetchEngine(ABC, Generic[State]):
    """One fetch of one state. It is run once; `cancel` from any thread, at any time.

    Args:
        sources: where the state is, by the names of the sources.
        state: what the threads share.
        step: the step wanted, or None for the newest.
        deadline: on the monotonic clock.
        on_progress: called by the thread that runs it, a few times a second and at the end.
    """

    _retried: tuple[type[TransferError], ...] = (SourceLostError,)
    """By these a connection over which something came is given up, and another one tried."""

    def __init__(
        self,
        sources: Mapping[str, SourceAddress],
        state: State,
        *,
        party: str,
        step: int | None,
        deadline: float,
        options: FetchOptions,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._sources = sources
        self._state = state
        self._party = party
        self._step = step
        self._deadline = deadline
        self._options = options
        self._on_progress = on_progress
        self._started_at = time.monotonic()
        self._last_refusal: SourceRefusedError | None = None
        self._lock = threading.Lock()
        # All below belong to `_lock`.
        self._addresses = {str(address): address for address in sources.values()}
        """By their names, all that are known of the sources, their further ones as well; they stay."""
        self._clients: set[SourceClient] = set()
        self._streaming: dict[int, SourceClient] = {}
        self._cut: set[int] = set()
        self._finishing: set[SourceClient] = set()
        self._threads: list[threading.Thread] = []

    @property
    def _what(self) -> str:
        return "the newest step" if self._step is None else f"step {self._step}"

    def cancel(self, reason: str = "the receiver gave it up") -> None:
        """Make the fetch raise `TransferCancelledError`."""
        self._state.end(TransferCancelledError(f"fetch of {self._what} from {self._party}: {reason}", party="receiver"))

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            for name, address in self._sources.items():
                self._spawn(functools.partial(self._run_source, address), name)
            yield
        finally:
            self._state.end(TransferCancelledError(f"fetch of {self._what} was interrupted", party="receiver"))
            self._release_threads()
            self._stop_threads()
            self._report_progress()
            self._log_paths()

    def _release_threads(self) -> None:
        """Wake what waits neither for a connection nor for the state; the fetch is over."""

    def _log_paths(self) -> None:
        for name in self._sources:
            paths = self._state.paths_to(name)
            if len(paths) > 1:
                logger.info(
                    "%s came from %s by %d of its addresses: %s", self._what, name, len(paths), describe_paths(paths)
                )

    def _warn_of_divergence(self, primary: str, found: Mapping[str, str]) -> None:
        for name, what in found.items():
            warnings.warn(
                f"replicas have diverged at {self._what}, or each has this of its own, as BatchNorm's statistics: {name} differs"
                f" from {primary}, whose state was received: {what}",
                ReplicaDivergenceWarning,
                stacklevel=6,
            )

    # The calling thread

    def _wait(self) -> None:
        state = self._state
        while True:
            with state.changed:
                remaining_s = self._deadline - time.monotonic()
                if not state.over and remaining_s > 0:
                    state.changed.wait(min(remaining_s, TICK_S))
                if state.over:
                    return
            if self._deadline <= time.monotonic():
                state.end(self._too_late(state.arrived_text()))
                return
            self._look_after()

    def _look_after(self) -> None:
        for number in self._state.overdue():
            self._cut_stream(number, "%s is slow at the end of the transfer; what it was to bring is taken from others")
        slow, again = self._state.judge_paths()
        for path, numbers in slow.items():
            logger.info(
                "nothing more is asked at %s: another address of that source gives more than four times as much", path
            )
            for number in numbers:
                self._cut_stream(number, "closing a connection to %s")
        self._use_again(again)
        self._look_after_sources()
        self._report_progress()

    @abstractmethod
    def _look_after_sources(self) -> None:
        """See whether another source has to take the place of the primary."""

    def _cut_stream(self, number: int, message: str) -> None:
        with self._lock:
            client = self._streaming.get(number)
            self._cut.add(number)
        if client is not None:
            logger.info(message, client.path)
            client.close()

    def _report_progress(self) -> None:
        state = self._state
        if self._on_progress is None or not state.is_ready:
            return
        with state.changed:
            progress = TransferProgress(
                step=state.step,
                total_bytes=state.total_bytes,
                received_bytes=state.received_bytes,
                skipped_bytes=state.skipped_bytes,
                resent_bytes=state.wasted_bytes,
                num_sources=state.num_sources(),
                elapsed_s=time.monotonic() - self._started_at,
                brought_bytes=state.brought_bytes,
                is_equal=state.is_equal,
            )
        self._on_progress = tell(self._on_progress, progress)

    def _too_late(self, arrived: str) -> TransferTimeoutError:
        if arrived == "nothing" and self._last_refusal is not None:
            arrived = f"nothing ({self._last_refusal})"
        failures = "; ".join(f"{name}: {error}" for name, error in self._state.failures().items())
        why = f" ({failures[:600]})" if failures else ""
        return TransferTimeoutError(
            f"fetch of {self._what} from {self._party} reached its deadline with {arrived} received{why}; "
            "give a longer timeout if the link is slow",
            party=self._party,
        )

    # The worker threads

    def _run_source(self, address: SourceAddress) -> None:
        """Ask a source for its manifest, then bring from it what it can give."""
        state = self._state
        with self._connected(address) as client:
            manifest = client.fetch_manifest(deadline=self._deadline, pause=state.pause, on_refused=self._note_refusal)
            if not self._take_part(client, manifest):
                return
            self._open_further(address, manifest)
            for _ in range(self._num_streams() - 1):
                self._spawn(functools.partial(self._bring, address, manifest, is_first=False), client.name)
            with self._lock:
                self._finishing.add(client)
            try:
                if self._run_stream(client, manifest) and state.is_used(client.path):
                    self._tell_done(client, manifest)
                    return
            except (SourceLostError, TransferStalledError) as error:
                self._lose_path(address, error)
        while state.await_use(str(address), str(address)):
            self._bring(address, manifest)
        self._over_any(address, functools.partial(self._tell_done, manifest=manifest))

    @abstractmethod
    def _take_part(self, client: SourceClient, manifest: Manifest) -> bool:
        """Have units come from a source, as what it turns out to be; False if none are to."""

    def _num_streams(self) -> int:
        return self._options.num_streams

    @abstractmethod
    def _stream(self) -> Stream | None:
        """Return what brings units over a connection; None if nothing is to be brought."""

    def _open_further(self, own: SourceAddress, manifest: Manifest) -> None:
        """Have units come over the further addresses that a source names, too."""
        if manifest.elsewhere is None:
            return
        named = [own.further(host, manifest.elsewhere.key) for host in manifest.elsewhere.hosts]
        with self._lock:  # none that leads to another source, or to the same over another network
            fresh = {str(address): address for address in named if str(address) not in self._addresses}
            self._addresses.update(fresh)
        further = list(fresh.values())[: MAX_STREAMS - self._num_streams()]
        if further:
            self._state.add_path(str(own), str(own))
        for address in further:
            self._spawn(functools.partial(self._try_further, address, manifest, len(further)), str(own))

    def _try_further(self, address: SourceAddress, manifest: Manifest, num_further: int) -> None:
        """Connect to another address of a source; where it proves to be one, bring units over it."""
        try:
            with self._connected(address) as client:
                client.connect()
        except TransferError as error:
            logger.info("source %s is not reached at its address %s: %s", address.source, address.host, error)
            return
        self._state.add_path(str(address.source), str(address))
        # All further addresses together get as many connections as the first, within what one receiver may have: a source has
        # some for each of its receivers.
        num_streams = min(self._num_streams(), MAX_STREAMS - self._num_streams())
        for _ in range(num_streams // num_further - 1):
            self._spawn(functools.partial(self._bring, address, manifest, is_first=False), str(address.source))
        self._bring(address, manifest)

    def _bring(self, address: SourceAddress, manifest: Manifest, *, is_first: bool = True) -> None:
        """Bring units over one path until it is over, or the path is dropped, or lost and others are left.

        Over another connection where one was cut that had brought some. What it means that a further stream over the path is lost
        is the first one's to find out.
        """
        try:
            while not self._state.over and self._state.is_used(str(address)):
                with self._connected(address) as client:
                    if self._run_stream(client, manifest):
                        return
        except TransferError as error:
            # At a further address it is perhaps the network's fault; else all paths end so.
            if not address.known_by and not isinstance(error, (SourceLostError, TransferStalledError)):
                raise
            if is_first:
                self._lose_path(address, error)
            else:
                logger.info("a further connection to %s ended: %s", address, error)

    def _lose_path(self, address: SourceAddress, error: TransferError) -> None:
        """Go on over the other paths to a source; raises the error if there is none."""
        again = self._state.lose_path(str(address))
        if again is None:
            raise error
        logger.warning("going on without %s, over other addresses of its source: %s", address, error)
        self._use_again(again)

    def _use_again(self, paths: Sequence[str]) -> None:
        """Bring units over paths that were dropped; a source's own address has a thread that waits for it."""
        for path in paths:
            logger.info("asking at %s again", path)
            address = self._addresses[path]
            manifest = self._state.manifest_of(str(address.source))
            if address.known_by and manifest is not None:
                self._spawn(functools.partial(self._bring, address, manifest), str(address.source))

    def _over_any(self, own: SourceAddress, work: Callable[[SourceClient], object]) -> None:
        """Do something over a connection to a source: at its own address, or, if it is lost there, at a further one of it.

        At those that have led to it alone. It may be done again from the beginning.

        Raises:
            CheckpointError: what it raised over the last of them.
        """
        known = [self._addresses[path] for path in self._state.paths_to(str(own))] or [own]
        known.sort(key=lambda address: not self._state.is_used(str(address)))
        for number, address in enumerate(known, 1):
            try:
                with self._connected(address) as client:
                    work(client)
                return
            except TransferError as error:
                is_lost = address.known_by or isinstance(error, (SourceLostError, TransferStalledError))
                if number == len(known) or not is_lost:
                    raise
                logger.info("trying another address of source %s: %s", own, error)

    def _run_stream(self, client: SourceClient, manifest: Manifest) -> bool:
        """Bring units over one connection; False if another one is to go on.

        Raises:
            CheckpointError: the source is lost without having brought anything since it was connected, or lies.
        """
        state = self._state
        stream = None if state.over else self._stream()
        if stream is None:
            return True
        num_before = state.num_arrived_over(client.path)
        numbers: list[int] = []

        def opened(number: int) -> None:
            numbers.append(number)
            with self._lock:
                self._streaming[number] = client

        try:
            stream.run(client, manifest, opened)
            return True
        except self._retried as error:
            with self._lock:
                is_ours = isinstance(error, RunTakenBackError) or bool(self._cut.intersection(numbers))
            if not is_ours and not self._has_brought(stream, client.path, num_before):
                raise
            if state.is_used(client.path):
                logger.info("connecting to %s again: %s", client.path, error)
            return False
        finally:
            with self._lock:
                for number in numbers:
                    self._streaming.pop(number, None)

    def _has_brought(self, stream: Stream, path: str, num_before: int) -> bool:
        """Whether a stream that was lost, or another one over its path, has brought something meanwhile."""
        return self._state.num_arrived_over(path) != num_before

    def _tell_done(self, client: SourceClient, manifest: Manifest) -> None:
        """All is in: tell the source, so that it may free what it keeps."""
        if self._state.outcome is not None:
            return
        with self._lock:
            self._finishing.add(client)
        client.tell_done(manifest)

    # Beginning and ending

    @contextmanager
    def _connected(self, address: SourceAddress) -> Iterator[SourceClient]:
        client = SourceClient(address, self._step, self._options)
        with self._lock:
            self._clients.add(client)
        if self._state.outcome is not None:
            client.close()
        try:
            yield client
        finally:
            client.release()
            with self._lock:
                self._clients.discard(client)
                self._finishing.discard(client)

    def _spawn(self, work: Callable[[], None], name: str | None) -> None:
        thread = Thread(self._work, "torchft_ckpt-fetch", (work, name))
        with self._lock:
            if self._state.over:
                return
            thread.start()
            self._threads.append(thread)

    def _work(self, work: Callable[[], None], name: str | None) -> None:
        """Run a worker of a source, a peer or neither; what it raises is the end of that, or of the fetch if it is our fault."""
        failure: CheckpointError
        try:
            work()
            return
        except CheckpointError as error:
            failure = error
        except Exception as error:  # what a source sent may have raised it: that costs no other source
            logger.exception("fetching %s%s failed unexpectedly", self._what, "" if name is None else f" from {name}")
            failure = TransferError(f"fetch of {self._what} failed: {type(error).__name__}: {error}", name)
            failure.__cause__ = error
            if name is None:
                _forget_locals(failure)
                self._state.end(failure)
                return
        _forget_locals(failure)
        if isinstance(failure, StateMismatchError) or failure.party in ("memory", "device"):
            self._state.end(failure)
        elif name is None:
            logger.info("a helper of the fetch of %s ended: %s", self._what, failure)
        elif name not in self._sources:
            logger.info("taking nothing more from receiver %s: %s", name, failure)
            self._state.fail_peer(name)
        else:
            logger.info("asking %s for nothing more: %s", name, failure)
            self._state.fail_source(name, failure)
        if name is not None:
            self._close_clients(name)

    def _close_clients(self, name: str) -> None:
        """End what other streams of a source are waiting for: nothing of it is wanted any more."""
        with self._lock:
            clients = [client for client in self._clients if client.name == name]
        for client in clients:
            client.close()

    def _stop_threads(self) -> None:
        is_success = self._state.outcome is None
        with self._lock:
            # Where all is here, the streams are idle, and tell their sources so.
            busy = [client for client in self._clients if not is_success or client not in self._finishing]
            threads = list(self._threads)
        for client in busy:
            client.close()
        until = time.monotonic() + (_TELL_TIMEOUT_S if is_success else 0.0)
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        with self._lock:
            late = list(self._clients)
        for client in late:
            client.close()
        until = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
            if thread.is_alive():  # resolving a name cannot be interrupted
                logger.warning("a connection attempt to %s is still in the resolver; it ends by itself", self._party)

    def _note_refusal(self, refusal: SourceRefusedError) -> None:
        self._last_refusal = refusal


def _forget_locals(error: BaseException) -> None:
    """Keep the lines of an error's traceback, but not the views of received memory that its frames hold."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
