"""Fetches one state from one source or several, over a few connections each, within a deadline.

The calling thread decides when it is over: all in, failed, cancelled, or too late; it cuts streams that hold up the end, and
reports progress. Worker threads move bytes; each has one connection, which the calling thread closes to end it. What they
share is in `transfer_state`. Nothing of a fetch that failed is visible to the caller, but where it was received in place.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from torchft_ckpt.checkpointing.address import Route, SourceAddress
from torchft_ckpt.checkpointing.fetching.digests import BATCH_BLOCKS, fetch_digests, probe_local_blocks
from torchft_ckpt.checkpointing.fetching.options import MAX_STREAMS, FetchOptions
from torchft_ckpt.checkpointing.fetching.receive import BufferShelf, Destination
from torchft_ckpt.checkpointing.fetching.routes import Routes
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.fetching.streams import RunTakenBackError, Stream
from torchft_ckpt.checkpointing.fetching.swarm import run_swarm
from torchft_ckpt.checkpointing.fetching.transfer_state import TransferState
from torchft_ckpt.checkpointing.progress import ProgressCallback, TransferProgress, tell
from torchft_ckpt.checkpointing.protocol import MAX_DIGESTS
from torchft_ckpt.checkpointing.serving.relay import Relay
from torchft_ckpt.checkpointing.state.collector import collector_paused
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.core.paths import describe_paths
from torchft_ckpt.errors import (
    CheckpointError,
    ReplicaDivergenceWarning,
    SourceLostError,
    SourceRefusedError,
    StateFormatError,
    StateMismatchError,
    TransferCancelledError,
    TransferError,
    TransferStalledError,
    TransferTimeoutError,
)
from torchft_ckpt.threads import Thread

logger = logging.getLogger(__name__)
_TICK_S = 0.1
_SWARM_AFTER_S = 0.25
_TELL_TIMEOUT_S = 0.5
_ASK_AGAIN_S = 1.0
_BLAKE3_AT_ONCE_BYTES = 64 * 1024 * 1024
"""Of blocks whose digests are asked for at once: some 15 ms of the source's, after which others may give these blocks."""
_JOIN_TIMEOUT_S = 5.0


class Fetch:
    """One fetch of one state. `run` is called once; `cancel` from any thread, at any time.

    Args:
        sources: where the state is; the first is the primary, whose state counts.
        step: the step wanted, or None for the newest.
        deadline: on the monotonic clock.
        options: how to fetch.
        shelf: where memory comes from.
        local_state: the state that is here, or None: what is equal in it is not fetched.
        in_place: receive into the tensors of `local_state`.
        on_progress: called by the thread in `run`, a few times a second and at the end.
        serve_on: called with what serves the received blocks to other receivers, once there may be some.
    """

    def __init__(
        self,
        sources: Sequence[SourceAddress],
        *,
        step: int | None,
        deadline: float,
        options: FetchOptions,
        shelf: BufferShelf,
        local_state: object = None,
        in_place: bool = False,
        on_progress: ProgressCallback | None = None,
        serve_on: Callable[[Manifest, Destination], Relay] | None = None,
    ) -> None:
        self._sources = list(dict.fromkeys(sources))
        self._party = ", ".join(map(str, self._sources))
        self._step = step
        self._deadline = deadline
        self._options = options
        self._shelf = shelf
        self._local_state = local_state
        self._local: LocalState | None = None
        self._knows_local = threading.Event()
        self._in_place = in_place and local_state is not None
        self._on_progress = on_progress
        self._serve_on = serve_on
        self._started_at = time.monotonic()
        self._state = TransferState([str(source) for source in self._sources], seed=hash(options.receiver))
        self._routes = Routes(self._sources)
        self._lock = threading.Lock()
        # All below belong to `_lock`.
        self._clients: set[SourceClient] = set()
        self._streaming: dict[int, SourceClient] = {}
        self._cut: set[int] = set()
        self._finishing: set[SourceClient] = set()
        self._begun: list[Destination] = []
        self._threads: list[threading.Thread] = []
        self._has_swarm = False
        self._asks_for_blake3s = False
        self._to_touch: queue.SimpleQueue[tuple[Destination, range] | None] = queue.SimpleQueue()
        self._last_refusal: SourceRefusedError | None = None

    @property
    def _what(self) -> str:
        return "the newest step" if self._step is None else f"step {self._step}"

    def cancel(self, reason: str = "the receiver gave it up") -> None:
        """Make `run` raise `TransferCancelledError`."""
        self._state.end(TransferCancelledError(f"fetch of {self._what} from {self._party}: {reason}", party="receiver"))

    def run(self) -> object:
        """Fetch and return the state.

        Raises:
            TransferError: a subclass says why there is none.
            StateFormatError: what the source sends is not a state.
            StateMismatchError: the state does not fit the local one that it was to be received into.
        """
        try:
            return self._run()
        except BaseException as error:
            relay = self._state.relay
            if relay is not None:
                relay.close()
            with self._lock:
                is_overwritten = any(begun.is_overwritten for begun in self._begun)
            if is_overwritten and isinstance(error, CheckpointError):
                error.mark_torn()
            raise

    def _run(self) -> object:
        state = self._state
        for address in self._sources:
            self._spawn(functools.partial(self._run_source, address), str(address))
        self._spawn(self._touch_ahead, None)
        try:
            # While the sources are being asked.
            self._local = None if self._local_state is None else LocalState(self._local_state)
            self._knows_local.set()
            self._wait()
        finally:
            state.end(TransferCancelledError(f"fetch of {self._what} was interrupted", party="receiver"))
            self._knows_local.set()
            self._to_touch.put(None)
            self._stop_threads()
            self._report_progress()
            self._log_paths()
        destination, outcome, relay = state.destination, state.outcome, state.relay
        if relay is not None and not state.has_seen_peers:
            relay.close()
        if outcome is None and destination is not None:
            self._warn_of_divergence()
            try:
                return destination.assemble()
            except Exception as error:  # noqa: BLE001 - becomes the outcome, with its cause
                outcome = TransferError(f"what was received of {self._what} cannot be assembled: {error}", self._party)
                outcome.__cause__ = error
        if destination is None and self._begun:  # a source was lost while it was asked what is here already
            destination = self._begun[-1]
        if destination is not None:
            self._shelf.keep(destination.give_up())
        raise outcome or TransferError(f"fetch of {self._what} from {self._party} ended without a state", self._party)

    def _log_paths(self) -> None:
        for name in map(str, self._sources):
            paths = self._state.paths_to(name)
            if len(paths) > 1:
                logger.info(
                    "%s came from %s by %d of its addresses: %s", self._what, name, len(paths), describe_paths(paths)
                )

    def _warn_of_divergence(self) -> None:
        for name, what in self._state.divergences().items():
            warnings.warn(
                f"replicas have diverged at {self._what}: {name} differs from {self._state.primary}, whose state was received: "
                f"{what}",
                ReplicaDivergenceWarning,
                stacklevel=6,
            )

    @property
    def manifest(self) -> Manifest | None:
        """What the state that was received is described by, once that is known."""
        destination = self._state.destination
        return None if destination is None else destination.manifest

    def buffers(self) -> list[np.ndarray]:
        """The memory that the state was received into, but that of local tensors."""
        destination = self._state.destination
        return [] if destination is None else destination.buffers()

    # The calling thread

    def _wait(self) -> None:
        """Wait for the outcome; look after the transfer a few times a second."""
        state = self._state
        while True:
            with state.changed:
                remaining_s = self._deadline - time.monotonic()
                if not state.over and remaining_s > 0:
                    state.changed.wait(min(remaining_s, _TICK_S))
                if state.over:
                    return
            if self._deadline <= time.monotonic():
                state.end(self._too_late())
                return
            self._look_after()

    def _look_after(self) -> None:
        state = self._state
        for number in state.overdue():
            self._cut_stream(number, "%s is slow at the end of the transfer; its blocks are taken from others")
        slow, again = state.judge_paths()
        for path, numbers in slow.items():
            logger.info(
                "nothing more is asked at %s: another address of that source gives more than four times as much", path
            )
            for number in numbers:
                self._cut_stream(number, "closing a connection to %s")
        self._use_again(again)
        held_up_by = state.is_held_up_by(self._options.stall_timeout_s)
        if held_up_by is not None:
            what = f"source {held_up_by} has not brought a block for {self._options.stall_timeout_s:g} s, others are waiting"
            state.fail_source(held_up_by, TransferStalledError(what, held_up_by))
            self._close_clients(held_up_by)
        if state.destination is not None and time.monotonic() - state.ready_at > _SWARM_AFTER_S:
            self._start_swarm()
        heir = state.name_heir()
        if heir is not None:
            self._spawn(functools.partial(self._adopt, self._address_of(heir)), heir)
        self._report_progress()

    def _cut_stream(self, number: int, message: str) -> None:
        with self._lock:
            client = self._streaming.get(number)
            self._cut.add(number)
        if client is not None:
            logger.info(message, client.path)
            client.close()

    def _report_progress(self) -> None:
        if self._on_progress is None or self._state.destination is None:
            return
        total, received, skipped, wasted, num_sources = self._state.numbers()
        progress = TransferProgress(
            step=self._state.destination.manifest.step,
            total_bytes=total,
            received_bytes=received,
            skipped_bytes=skipped,
            resent_bytes=wasted,
            num_sources=num_sources,
            elapsed_s=time.monotonic() - self._started_at,
            brought_bytes=self._state.brought_bytes,
        )
        self._on_progress = tell(self._on_progress, progress)

    def _start_swarm(self) -> None:
        state, own = self._state, self._options.address
        primary, destination = state.primary, state.destination
        if self._has_swarm or primary is None or destination is None or own is None or self._serve_on is None:
            return
        manifest = state.manifest_of(primary)
        if manifest is None:
            return
        self._has_swarm = True
        state.attach(self._serve_on(manifest, destination))
        self._ask_for_blake3s()
        self._spawn(lambda: self._run_swarm(self._address_of(primary), manifest, own), None)

    # The worker threads

    def _run_source(self, address: SourceAddress) -> None:
        """Fetch the manifest; be the primary, or compare with it; then bring blocks."""
        state = self._state
        with self._connected(address) as client:
            manifest = client.fetch_manifest(deadline=self._deadline, pause=state.pause, on_refused=self._note_refusal)
            if not self._take_part(client, manifest):
                return
            self._open_routes(address, manifest)
            for _ in range(self._options.num_streams - 1):
                self._spawn(functools.partial(self._bring_more_blocks, address, manifest), client.name)
            with self._lock:
                self._finishing.add(client)
            try:
                if self._run_stream(client, manifest) and state.is_used(client.path):
                    self._tell_done(client, manifest)
                    return
            except (SourceLostError, TransferStalledError) as error:
                self._lose_path(client.path, error)
        while state.await_use(str(address), str(address)):
            self._bring_over(address, None, manifest)
        self._over_any(address, functools.partial(self._tell_done, manifest=manifest))

    def _open_routes(self, address: SourceAddress, manifest: Manifest) -> None:
        """Have blocks come over the further addresses that a source names, too."""
        routes = self._routes.learn(address, manifest)[: MAX_STREAMS - self._options.num_streams]
        if routes:
            self._state.add_path(str(address), str(address))
        for route in routes:
            self._spawn(functools.partial(self._try_route, route, manifest, len(routes) + 1), str(address))

    def _try_route(self, route: Route, manifest: Manifest, num_paths: int) -> None:
        """Connect to another address of a source; where it proves to be one, bring blocks over it."""
        address = route.source
        try:
            with self._connected(address, route) as client:
                client.connect()
        except TransferError as error:
            logger.info("source %s is not reached at its address %s: %s", address, route.host, error)
            return
        self._routes.proved(route)
        self._state.add_path(str(address), str(route))
        # All further addresses together get as many connections as the first, within what one receiver may have: a source has
        # some for each of its receivers.
        num_streams = min(self._options.num_streams, MAX_STREAMS - self._options.num_streams)
        for _ in range(num_streams // (num_paths - 1) - 1):
            self._spawn(functools.partial(self._bring_more_blocks, address, manifest, route), str(address))
        self._bring_over(address, route, manifest)

    def _bring_over(self, address: SourceAddress, route: Route | None, manifest: Manifest) -> None:
        """Bring blocks over one path until it is over, or the path is dropped or lost and others are left."""
        try:
            self._bring_blocks(address, manifest, route)
        except (SourceLostError, TransferStalledError) as error:
            self._lose_path(str(route or address), error)
        except TransferError as error:
            if route is None:
                raise
            self._lose_path(str(route), error)  # perhaps the network's fault; else all paths end so

    def _lose_path(self, path: str, error: TransferError) -> None:
        """Go on over the other paths to a source; raises the error where there is none."""
        self._use_again(self._routes.instead_of(path, self._state.lose_path(path), error))

    def _use_again(self, paths: Sequence[str]) -> None:
        """Bring blocks over paths that were dropped."""
        for route in self._routes.to_use_again(paths):
            manifest = self._state.manifest_of(str(route.source))
            if manifest is not None:
                self._spawn(functools.partial(self._bring_over, route.source, route, manifest), str(route.source))

    def _over_any(self, address: SourceAddress, work: Callable[[SourceClient], object]) -> None:
        """Do something over a connection to a source, at whichever of its addresses."""
        self._routes.try_each(address, functools.partial(self._connected, address), self._state.is_used, work)

    def _take_part(self, client: SourceClient, manifest: Manifest) -> bool:
        """Have blocks come from a source, as what it turns out to be; False where the fetch is over."""
        state = self._state
        is_elected = state.elect(client.name, manifest)
        destination = state.destination
        if state.over:
            return False
        if destination is None:
            self._begin(client, manifest)
        elif not _same_layout(manifest, destination.manifest):
            if not is_elected:
                state.note_divergence(client.name, "its tensors have other names, shapes or dtypes")
            # The one that began may be the one that lies: then this one begins again.
            if not state.await_restart(client.name):
                return False
            self._begin(client, manifest)
        elif is_elected:
            self._take_over(client, manifest)
        else:
            if manifest.tree != destination.manifest.tree:
                state.note_divergence(client.name, "values that are no tensors differ")
            state.add_replica(client.name)
            self._ask_for_blake3s()
            self._spawn(lambda: self._compare_digests(client.address, manifest), client.name)
        return True

    def _begin(self, client: SourceClient, manifest: Manifest) -> None:
        self._knows_local.wait()  # it is known, or this thread's work is not wanted any more
        with collector_paused():
            destination = Destination(manifest, self._shelf, local=self._local, in_place=self._in_place)
        with self._lock:
            self._begun.append(destination)
        digests, held = probe_local_blocks(client, manifest, destination, lambda: self._state.over)
        self._state.begin(client.name, destination, digests, held, client.share)

    def _take_over(self, client: SourceClient, manifest: Manifest) -> None:
        """Another source began it and is lost; go on with this one, if its tensors lie in the same places."""
        destination = self._state.destination
        if destination is None or not _same_layout(manifest, destination.manifest):
            raise SourceRefusedError(
                f"source {client.name} holds other tensors than the one that was lost", client.name
            )
        digests: dict[int, bytes] = {}
        for batch in fetch_digests(client, manifest, (1 << self._state.num_blocks()) - 1):
            digests.update(batch)
        self._state.adopt(client.name, digests)

    def _adopt(self, address: SourceAddress) -> None:
        manifest = self._state.manifest_of(str(address))
        if manifest is not None:
            self._over_any(address, functools.partial(self._take_over, manifest=manifest))

    def _compare_digests(self, address: SourceAddress, manifest: Manifest) -> None:
        """Fetch a source's digests and the primary's, batch by batch, each from its own."""
        state = self._state

        def compare(own: SourceClient) -> None:
            while not state.over and (blocks := state.unannounced(own.name, BATCH_BLOCKS)):
                for digests in fetch_digests(own, manifest, blocks):
                    state.learn_digests(own.name, digests)
                self._ask_primary(state.unknown_of(blocks))

        self._over_any(address, compare)

    def _ask_primary(self, blocks: int) -> None:
        """Fetch digests of a bit set of blocks from the primary, if there is one now."""
        state, primary = self._state, self._state.primary
        manifest = None if primary is None else state.manifest_of(primary)
        if not blocks or primary is None or manifest is None:
            return

        def ask(client: SourceClient) -> None:
            for digests in fetch_digests(client, manifest, blocks):
                state.learn_digests(primary, digests)

        try:
            self._over_any(self._address_of(primary), ask)
        except (TransferError, StateFormatError) as error:  # its own streams notice that, too, and say what it means
            logger.debug("the digests of %s cannot be compared: %s", primary, error)

    def _ask_for_blake3s(self) -> None:
        """Have a thread ask the primary for BLAKE3 digests from now on, of what others than it could give."""
        with self._lock:
            if self._asks_for_blake3s:
                return
            self._asks_for_blake3s = True
        self._spawn(self._learn_blake3s, None)

    def _learn_blake3s(self) -> None:
        while (primary := self._state.await_primary()) is not None:
            try:
                self._over_any(self._address_of(primary), functools.partial(self._learn_blake3s_of, primary))
            except (TransferError, StateFormatError) as error:  # what that means its own streams find out
                logger.info(
                    "nothing comes in place of source %s, which does not say what it must be: %s", primary, error
                )
                self._state.pause(_ASK_AGAIN_S)

    def _learn_blake3s_of(self, primary: str, client: SourceClient) -> None:
        """Ask until another source is the primary. Connects when there is something to ask."""
        manifest = self._state.manifest_of(primary)
        num_at_once = 1 if manifest is None else min(_BLAKE3_AT_ONCE_BYTES // manifest.block_bytes, MAX_DIGESTS)
        while manifest is not None and (blocks := self._state.await_uncheckable(primary, num_at_once)):
            self._state.learn_blake3s(primary, client.fetch_blake3s(manifest, blocks))

    def _run_swarm(self, address: SourceAddress, manifest: Manifest, own: str) -> None:
        def start(peer: SourceAddress) -> None:
            if peer.scheme != address.scheme:
                logger.warning("%s names %s as a peer: not over %s, left alone", address, peer, address.scheme)
                self._state.fail_peer(str(peer))
                return
            self._spawn(lambda: self._bring_blocks(peer, manifest), str(peer), is_peer=True)

        self._over_any(address, lambda client: run_swarm(self._state, client, manifest, own, start))

    def _bring_blocks(self, address: SourceAddress, manifest: Manifest, route: Route | None = None) -> None:
        """Bring blocks until it is over, or the path is; over another connection where one was cut that had brought some."""
        while not self._state.over and self._state.is_used(str(route or address)):
            with self._connected(address, route) as client:
                if self._run_stream(client, manifest):
                    return

    def _bring_more_blocks(self, address: SourceAddress, manifest: Manifest, route: Route | None = None) -> None:
        """Be another stream over a path; where it is lost, what that means is the first stream's to find out."""
        try:
            self._bring_blocks(address, manifest, route)
        except TransferError as error:
            if route is None and not isinstance(error, (SourceLostError, TransferStalledError)):
                raise
            logger.info("a further connection to %s ended: %s", route or address, error)

    def _run_stream(self, client: SourceClient, manifest: Manifest) -> bool:
        """Bring blocks over one connection; False where another one is to go on.

        Raises:
            CheckpointError: the source is lost without having brought anything since it was connected, or lies.
        """
        state, destination = self._state, self._state.destination
        if destination is None or state.over:
            return True
        num_before = state.num_arrived_over(client.path)
        numbers: list[int] = []

        def opened(number: int) -> None:
            numbers.append(number)
            with self._lock:
                self._streaming[number] = client

        try:
            stream = Stream(state, destination, on_asked=lambda run: self._to_touch.put((destination, run)))
            stream.run(client, manifest, opened)
            return True
        except SourceLostError as error:
            with self._lock:
                is_ours = isinstance(error, RunTakenBackError) or bool(self._cut.intersection(numbers))
            if not is_ours and state.num_arrived_over(client.path) == num_before:
                raise
            if state.is_used(client.path):
                logger.info("connecting to %s again: %s", client.path, error)
            return False
        finally:
            with self._lock:
                for number in numbers:
                    self._streaming.pop(number, None)

    def _touch_ahead(self) -> None:
        """Have memory ready for what was asked for, and for no more: what a source announces is only a claim."""
        while (work := self._to_touch.get()) is not None:
            destination, run = work
            for block in run:
                if self._state.over:
                    return
                destination.touch(block)

    def _tell_done(self, client: SourceClient, manifest: Manifest) -> None:
        """Every block is in: tell the source, so that it may free what it keeps. The telling may fail."""
        if self._state.outcome is not None:
            return
        with self._lock:
            self._finishing.add(client)
        try:
            client.tell_done(manifest)
        except CheckpointError as error:
            logger.info("could not tell %s that step %d has arrived: %s", client.name, manifest.step, error)

    # Beginning and ending

    @contextmanager
    def _connected(self, address: SourceAddress, route: Route | None = None) -> Iterator[SourceClient]:
        client = SourceClient(address, self._step, self._options, route)
        with self._lock:
            self._clients.add(client)
        try:
            yield client
        finally:
            client.release()
            with self._lock:
                self._clients.discard(client)
                self._finishing.discard(client)

    def _spawn(self, work: Callable[[], None], name: str | None, *, is_peer: bool = False) -> None:
        thread = Thread(self._work, "torchft_ckpt-fetch", (work, name, is_peer))
        with self._lock:
            if self._state.over:
                return
            self._threads.append(thread)
            thread.start()

    def _work(self, work: Callable[[], None], name: str | None, is_peer: bool) -> None:
        """Run a worker; what it raises is the end of its source, or of the fetch where the fault is on this side."""
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
        if isinstance(failure, StateMismatchError) or failure.party == "memory":
            self._state.end(failure)
        elif name is None:
            logger.info("the receivers of %s do not find each other: %s", self._what, failure)
        elif is_peer:
            logger.info("taking nothing more from receiver %s: %s", name, failure)
            self._state.fail_peer(name)
        else:
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

    def _address_of(self, name: str) -> SourceAddress:
        return next(address for address in self._sources if str(address) == name)

    def _note_refusal(self, refusal: SourceRefusedError) -> None:
        self._last_refusal = refusal

    def _too_late(self) -> TransferTimeoutError:
        arrived = self._state.arrived_text()
        if arrived == "nothing" and self._last_refusal is not None:
            arrived = f"nothing ({self._last_refusal})"
        return TransferTimeoutError(
            f"fetch of {self._what} from {self._party} reached its deadline with {arrived} received; "
            "give a longer timeout if the link is slow",
            party=self._party,
        )


def _same_layout(one: Manifest, other: Manifest) -> bool:
    """Whether the tensors of two states have the same names, and lie in the same places."""
    return (one.block_bytes, one.total_bytes, one.segments, one.tensors) == (
        other.block_bytes,
        other.total_bytes,
        other.segments,
        other.tensors,
    )


def _forget_locals(error: BaseException) -> None:
    """Keep the lines of an error's traceback, but not the views of received memory that its frames hold."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
