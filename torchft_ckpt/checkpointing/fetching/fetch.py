"""Fetches one state whole, as blocks, from one source or several that hold it in the same layout.

What is equal here is not fetched, and receivers of the same state give each other what they hold. Nothing of a fetch that
failed is visible to the caller, but where it was received in place.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import compress

from torchft_ckpt.checkpointing.fetching.block_transfer import BlockTransfer, PassedOn
from torchft_ckpt.checkpointing.fetching.connection import Answer, FetchOptions
from torchft_ckpt.checkpointing.fetching.engine import FetchEngine
from torchft_ckpt.checkpointing.fetching.receive import BufferCache, Destination
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.fetching.streams import Stream
from torchft_ckpt.checkpointing.progress import ProgressCallback
from torchft_ckpt.checkpointing.protocol import MAX_DIGESTS, SourceAddress
from torchft_ckpt.checkpointing.state.format import Manifest, has_same_layout
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.core.transfer.scheduler import blocks_of, mask_of_each
from torchft_ckpt.errors import (
    CheckpointError,
    SourceRefusedError,
    StateMismatchError,
    TransferError,
    TransferStalledError,
)
from torchft_ckpt.memory import gc_paused
from torchft_ckpt.threads import NUM_COPY_THREADS, parallel_map

logger = logging.getLogger(__name__)
_SWARM_AFTER_S = 0.25
_POLL_S = 0.15
_MAX_PEER_STREAMS = 8
_ASK_AGAIN_S = 1.0
_BATCH_BLOCKS = 64
_BLAKE3_AT_ONCE_BYTES = 64 * 1024 * 1024
"""Of blocks whose digests are asked for at once: some 15 ms of the source's, after which others may give these blocks."""


class Fetch(FetchEngine[BlockTransfer]):
    """One fetch of one state. `run` is called once; `cancel` from any thread, at any time.

    Args:
        sources: where the state is; the first is the primary, whose state counts.
        step: the step wanted, or None for the newest.
        deadline: on the monotonic clock.
        cache: where memory comes from.
        local_state: the state that is here, or None: what is equal in it is not fetched.
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
        cache: BufferCache,
        local_state: object = None,
        in_place: bool = False,
        on_progress: ProgressCallback | None = None,
        serve_on: Callable[[Manifest, Destination], PassedOn] | None = None,
    ) -> None:
        by_name = {str(source): source for source in sources}
        super().__init__(
            by_name,
            BlockTransfer([*by_name], seed=hash(options.receiver)),
            party=", ".join(by_name),
            step=step,
            deadline=deadline,
            options=options,
            on_progress=on_progress,
        )
        self._cache = cache
        self._local_state = local_state
        self._local: LocalState | None = None
        self._knows_local = threading.Event()
        self._in_place = in_place and local_state is not None
        self._serve_on = serve_on
        self._served_on: Destination | None = None
        self._begun: list[Destination] = []
        """Belongs to `_lock`."""
        self._to_touch: queue.SimpleQueue[tuple[Destination, list[int]] | None] = queue.SimpleQueue()

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
                begun = [*self._begun]
            for destination in begun:
                with contextlib.suppress(TransferError):
                    destination.settle()  # nothing is written any more once this is raised
            is_overwritten = any(destination.is_overwritten for destination in begun)
            if is_overwritten and isinstance(error, CheckpointError):
                error.mark_torn()
            raise

    def _run(self) -> object:
        state = self._state
        with self._running():
            self._spawn(self._touch_ahead, None)
            self._spawn(self._learn_blake3s, None)
            # While the sources are being asked.
            self._local = None if self._local_state is None else LocalState(self._local_state)
            self._knows_local.set()
            self._wait()
        destination, outcome, relay = state.destination, state.outcome, state.relay
        if relay is not None and not state.has_seen_peers:
            relay.close()
        if outcome is None and destination is not None:
            self._warn_of_divergence(str(state.primary), state.divergences())
            try:
                return destination.assemble()
            except StateMismatchError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - becomes the outcome, with its cause
                outcome = TransferError(f"what was received of {self._what} cannot be assembled: {error}", self._party)
                outcome.__cause__ = error
        if destination is None and self._begun:  # a source was lost while it was asked what is here already
            destination = self._begun[-1]
        if destination is not None:
            self._cache.keep(destination.give_up())
        raise outcome or TransferError(f"fetch of {self._what} from {self._party} ended without a state", self._party)

    def _release_threads(self) -> None:
        self._knows_local.set()
        self._to_touch.put(None)

    @property
    def manifest(self) -> Manifest:
        """What the state that was received is described by."""
        if self._state.destination is None:
            raise TransferError(f"nothing of {self._what} was received from {self._party}", self._party)
        return self._state.destination.manifest

    def received_in_words(self) -> str:
        """Say what came of a state most of which was here; empty: all of it came, or nothing."""
        return self._state.received_in_words()

    # The calling thread

    def _look_after_sources(self) -> None:
        state = self._state
        held_up_by = state.is_held_up_by(self._options.stall_timeout_s)
        if held_up_by is not None:
            what = f"source {held_up_by} has not brought a block for {self._options.stall_timeout_s:g} s, others are waiting"
            state.fail_source(held_up_by, TransferStalledError(what, held_up_by))
            self._close_clients(held_up_by)
        self._start_swarm()
        candidate = state.next_candidate()
        if candidate is not None:
            self._spawn(functools.partial(self._promote, self._sources[candidate]), candidate)

    def _start_swarm(self) -> None:
        begun, own = self._state.begun(), self._options.address
        if begun is None or own is None or self._serve_on is None:
            return
        primary, manifest, destination = begun
        if destination is self._served_on or time.monotonic() - self._state.ready_at <= _SWARM_AFTER_S:
            return
        self._served_on = destination
        self._state.attach(self._serve_on(manifest, destination), destination)
        poll = functools.partial(self._poll_peers, manifest, destination, own)
        self._spawn(functools.partial(self._over_any, self._sources[primary], poll), None)

    # The worker threads

    def _stream(self) -> Stream | None:
        destination = self._state.destination
        if destination is None:
            return None

        def ask(client: SourceClient, manifest: Manifest, blocks: list[int]) -> Iterator[tuple[int, Answer]]:
            self._to_touch.put((destination, blocks))
            run = range(blocks[0], blocks[-1] + 1)
            return client.open_blocks(manifest, run, self._state.unreported(client.name))

        return Stream(self._state, destination, ask)

    def _take_part(self, client: SourceClient, manifest: Manifest) -> bool:
        """Have blocks come from a source, as what it turns out to be; False if the fetch is over."""
        state = self._state
        is_chosen = state.choose_primary(client.name, manifest)
        destination = state.destination
        if state.over:
            return False
        if destination is None:
            self._begin(client, manifest)
        elif not has_same_layout(manifest, destination.manifest):
            if not is_chosen:
                state.note_divergence(client.name, "its tensors have other names, shapes or dtypes")
            # The one that began may be the one that lies: then this one begins again.
            if not state.await_restart(client.name):
                return False
            self._begin(client, manifest)
        elif is_chosen:
            self._take_over(client, manifest)
        else:
            if manifest.tree != destination.manifest.tree:
                state.note_divergence(client.name, "values that are no tensors differ")
            state.add_replica(client.name)
            self._spawn(lambda: self._compare_digests(client.address, manifest), client.name)
        return True

    def _begin(self, client: SourceClient, manifest: Manifest) -> None:
        self._knows_local.wait()  # it is known, or this thread's work is not wanted any more
        with gc_paused():
            destination = Destination(manifest, self._cache, local=self._local, in_place=self._in_place)
        with self._lock:
            self._begun.append(destination)
        digests, held = _probe_local_blocks(client, manifest, destination, lambda: self._state.over)
        self._state.begin(client.name, destination, digests, held, client.share)

    def _take_over(self, client: SourceClient, manifest: Manifest) -> None:
        """Another source began it and is lost; go on with this one, if its tensors lie in the same places."""
        destination = self._state.destination
        if destination is None or not has_same_layout(manifest, destination.manifest):
            raise SourceRefusedError(
                f"source {client.name} holds other tensors than the one that was lost", client.name
            )
        digests: dict[int, bytes] = {}
        for batch in _fetch_digests(client, manifest, (1 << self._state.num_blocks()) - 1):
            digests.update(batch)
        self._state.promote(client.name, digests)

    def _promote(self, address: SourceAddress) -> None:
        manifest = self._state.manifest_of(str(address))
        if manifest is not None:
            self._over_any(address, functools.partial(self._take_over, manifest=manifest))

    def _compare_digests(self, address: SourceAddress, manifest: Manifest) -> None:
        """Fetch a source's digests and the primary's, batch by batch, each from its own."""
        state = self._state

        def compare(own: SourceClient) -> None:
            while not state.over and (blocks := state.unannounced(own.name, _BATCH_BLOCKS)):
                for digests in _fetch_digests(own, manifest, blocks):
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
            for digests in _fetch_digests(client, manifest, blocks):
                state.learn_digests(primary, digests)

        try:
            self._over_any(self._sources[primary], ask)
        except Exception as error:  # noqa: BLE001 - its own streams notice that, too, and say what it means
            logger.debug("the digests of %s cannot be compared: %s", primary, error)

    def _learn_blake3s(self) -> None:
        while (primary := self._state.await_primary()) is not None:
            try:
                self._over_any(self._sources[primary], functools.partial(self._learn_blake3s_of, primary))
            except Exception as error:  # noqa: BLE001 - what that means its own streams find out
                logger.info(
                    "nothing comes in place of source %s, which does not say what it must be: %s", primary, error
                )
                self._state.pause(_ASK_AGAIN_S)

    def _learn_blake3s_of(self, primary: str, client: SourceClient) -> None:
        """Ask until another source is the primary. Connects when there is something to ask."""
        manifest = self._state.manifest_of(primary)
        num_at_once = 1 if manifest is None else min(_BLAKE3_AT_ONCE_BYTES // manifest.block_bytes, MAX_DIGESTS)
        while manifest is not None and (blocks := self._state.await_uncheckable(primary, num_at_once)):
            self._state.learn_blake3s(primary, client.fetch_digests(manifest, blocks, "blake3"))

    def _poll_peers(self, manifest: Manifest, destination: Destination, own: str, client: SourceClient) -> None:
        """Tell the source what is held and served here, and hear the same of others, until it is over or has begun anew.

        Nothing that a peer sends is trusted: a block counts only with the BLAKE3 digest that the source announces for it.
        """
        state, num_started = self._state, 0
        while not state.over and state.destination is destination:
            held_by, sent = client.fetch_peers(manifest, state.unreported(client.name), own)
            peers = {str(peer): peer for peer in held_by}
            known = set(state.peer_names())
            fresh = [name for name in peers if name not in known][: max(_MAX_PEER_STREAMS - num_started, 0)]
            for name in state.meet_peers({n: held_by[peers[n]] for n in peers if n in known or n in fresh}, sent):
                num_started += 1
                if peers[name].scheme == client.address.scheme:
                    logger.debug("taking blocks from %s as well, which receives the same state", name)
                    self._spawn(functools.partial(self._bring, peers[name], manifest), name)
                else:
                    logger.warning("%s names %s as a peer: not over its scheme, left alone", client.name, name)
                    state.fail_peer(name)
            state.pause(_POLL_S)

    def _touch_ahead(self) -> None:
        """Have memory ready for what was asked for, and for no more: what a source announces is only a claim."""
        while (work := self._to_touch.get()) is not None:
            destination, blocks = work
            for block in blocks:
                if self._state.over:
                    return
                destination.touch(block)


def _fetch_digests(client: SourceClient, manifest: Manifest, mask: int) -> Iterator[dict[int, bytes]]:
    """Yield the digests of a bit set of blocks, in batches. A source computes one once, at the speed of memory."""
    blocks = [block for run in blocks_of(mask) for block in run]
    for first in range(0, len(blocks), _BATCH_BLOCKS):
        batch = blocks[first : first + _BATCH_BLOCKS]
        yield client.fetch_digests(manifest, batch)


def _probe_local_blocks(
    client: SourceClient, manifest: Manifest, destination: Destination, is_over: Callable[[], bool]
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the digests that were learnt, and those of the blocks that are here already.

    A sample of each block is compared first, a few bytes long; only of blocks whose samples are equal the digests are asked for.
    """
    digests: dict[int, bytes] = {}
    held: dict[int, bytes] = {}
    if not destination.may_hold_blocks:
        return digests, held

    likely: list[int] = []
    for first in range(0, destination.num_blocks, MAX_DIGESTS):
        batch = range(first, min(first + MAX_DIGESTS, destination.num_blocks))
        samples = client.fetch_digests(manifest, batch, "samples")
        likely += [block for block in batch if samples[block] in destination.samples(block)]

    def take(block: int) -> bool:
        return not is_over() and destination.take_local(block, digests[block])

    for found in _fetch_digests(client, manifest, mask_of_each(likely)):
        digests.update(found)
        is_held = parallel_map(take, list(found), NUM_COPY_THREADS, "torchft_ckpt-compare")
        held.update(compress(found.items(), is_held))
    return digests, held
