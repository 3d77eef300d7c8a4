"""Follows the redo log of others: fetches one entry after another, each from several sources at once, checked.

The entries of a version are alike at all healthy sources. One is asked for the next entry, and they take turns at that. Then the
others are asked for it, too, and each that has it brings a run of blocks after the other. All hear how far this follower is, so
that they free what it has. One that is lost, stalls or lies is left out from then on; what it was sending is asked for anew
elsewhere. One that is late is asked again in its turn. Blocks are as the source that sent them says: whether the state is right
in the end is found out at the join.

On one thread, but `close`; what comes from the other sources comes on threads of their own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.checkpointing.fetching.memory import SLICE_BYTES
from torchft_ckpt.checkpointing.fetching.options import FetchOptions
from torchft_ckpt.checkpointing.fetching.receive import BufferCache, Destination
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.state.blocks import DIGEST_BYTES, start_digest
from torchft_ckpt.checkpointing.state.format import Manifest, has_same_layout
from torchft_ckpt.checkpointing.state.redo_entry import (
    RedoEntry,
    check_entry,
    entry_of,
    format_version,
    max_manifest_bytes,
)
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.errors import (
    CheckpointError,
    DigestMismatchError,
    SourceRefusedError,
    StateFormatError,
    TransferCancelledError,
)
from torchft_ckpt.threads import parallel_map

logger = logging.getLogger(__name__)
_RUN_BYTES = 16 * 1024 * 1024
"""Asked of a source at a time, at most."""
_RUNS_EACH = 4
"""So many for each source, so that a slow one does not hold up the end of an entry."""
_PAUSE_S = 0.05
"""Between two times that all sources were asked: some answer at once that they have nothing."""
_POLL_S = 0.25
"""At one of several sources: another may be ahead of it."""


class RedoFollower:
    """Fetches entries for the optimizers that are here.

    Args:
        sources: addresses as `HTTPTransport.metadata` returns them.
        parameters: of each guarded optimizer, in its order. What does not fit them is refused before memory is taken for it.
        options: how to fetch; `receiver` names this follower.
    """

    def __init__(
        self, sources: Sequence[str], parameters: Sequence[Sequence[torch.Tensor]], options: FetchOptions
    ) -> None:
        self._parameters = parameters
        self._options = options
        self._max_manifest_bytes = min(max_manifest_bytes(parameters), options.max_manifest_bytes)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._clients = [SourceClient(parse_metadata(source), None, options) for source in dict.fromkeys(sources)]
        """Those that may still help, the one whose turn it is first."""
        self._failures: dict[str, CheckpointError] = {}
        self._cache = BufferCache()
        self.received_bytes = 0
        """Of the bodies of entries, whether they counted or not."""

    def __repr__(self) -> str:
        return f"RedoFollower({[client.name for client in self._clients]}, received_bytes={self.received_bytes})"

    def next_entry(self, after: StateVersion, timeout_s: float) -> RedoEntry | None:
        """Return the entry that leads on from a version, whole and checked; None: none was committed within the time.

        Its gradients are on the CPU, in memory that is used again once nobody refers to them.

        Args:
            after: the version that is here.
            timeout_s: for the entry to begin to come. Then it may take long, as long as some comes within each stall timeout;
                `close` ends it.

        Raises:
            SourceRefusedError: no source has it or will have it; the message has each one's reason.
            TransferCancelledError: this was closed.
        """
        until = time.monotonic() + timeout_s
        num_asked = 0
        while True:
            client = self._turn()
            try:
                wait_s = until - time.monotonic()
                if len(self._clients) > 1:
                    wait_s = min(wait_s, _POLL_S)
                manifest = client.fetch_redo_manifest(format_version(after), wait_s, self._max_manifest_bytes)
                if manifest is not None:
                    check_entry(manifest, self._parameters, after)
                    entry = self._receive(client, manifest, after)
                    if entry is None:
                        continue
                    self._move_to_end(client)
                    self.tell_held(entry.version)
                    return entry
                num_asked += 1
                self._move_to_end(client)
                # All of them have to say so: one may be behind another.
                if time.monotonic() >= until and num_asked >= len(self._clients):
                    return None
                if num_asked >= len(self._clients):
                    self._closed.wait(_PAUSE_S)
            except Exception as error:  # noqa: BLE001 - what a source sent may have raised it
                self._drop(client, StateFormatError.of(error, client.name))

    def close(self) -> None:
        """Wake and fail whoever waits here. From any thread; the thread that follows still calls `release`."""
        with self._lock:
            self._closed.set()
            clients = list(self._clients)
        for client in clients:
            client.close()

    def release(self) -> None:
        """Free connections and memory, and say so to the sources. By the thread that follows."""
        if not self._closed.is_set():
            for client in self._clients:
                with contextlib.suppress(CheckpointError):
                    client.tell_redo_done()
        self.close()
        for client in self._clients:
            client.release()
        self._cache.clear()

    def tell_held(self, version: StateVersion) -> None:
        """Have all sources free the entry that led to a version, and know that this follower is alive."""
        for client in list(self._clients):
            try:
                client.tell_redo_held(format_version(version))
            except Exception as error:  # noqa: BLE001 - what a source sent may have raised it
                self._drop(client, StateFormatError.of(error, client.name))

    def _turn(self) -> SourceClient:
        with self._lock:
            if self._closed.is_set():
                raise TransferCancelledError("following the redo log was given up by this side", party="receiver")
            if self._clients:
                return self._clients[0]
        reasons = "; ".join(str(error)[:400] for error in self._failures.values())
        raise SourceRefusedError(f"no source is left whose redo log can be followed: {reasons}", party="redo log")

    def _move_to_end(self, client: SourceClient) -> None:
        with self._lock:
            if client in self._clients:
                self._clients = [*(other for other in self._clients if other is not client), client]

    def _drop(self, client: SourceClient, error: CheckpointError) -> None:
        client.release()
        with self._lock:
            self._clients = [other for other in self._clients if other is not client]
            if self._closed.is_set():
                return
        self._failures[client.name] = error
        logger.warning("the redo log of %s is not followed any more: %s", client.name, error)

    def _receive(self, first: SourceClient, manifest: Manifest, after: StateVersion) -> RedoEntry | None:
        """Receive an entry from all that have it; None where those that have it were lost before all of it was here."""
        destination = Destination(manifest, self._cache)
        self._cache.keep(destination.buffers())
        with self._lock:
            clients = list(self._clients)
        blocks = range(destination.num_blocks)
        at_once = max(1, min(-(-len(blocks) // (_RUNS_EACH * len(clients))), _RUN_BYTES // manifest.block_bytes))
        runs = deque(blocks[at : at + at_once] for at in range(0, len(blocks), at_once))

        given_by = {first: manifest}

        def bring(client: SourceClient) -> None:
            try:
                own = given_by.get(client) or self._ask_too(client, manifest, first.name, after)
                if own is None:
                    return
                given_by[client] = own
                scratch = memoryview(bytearray(SLICE_BYTES))
                while (run := _next_of(runs)) is not None:
                    try:
                        self._receive_run(client, own, destination, run, scratch)
                    except BaseException:
                        runs.append(run)
                        raise
            except Exception as error:  # noqa: BLE001 - what a source sent may have raised it
                self._drop(client, StateFormatError.of(error, client.name))

        while runs:
            if not clients:
                return None
            parallel_map(bring, clients, len(clients), "torchft_ckpt-redo")
            self._turn()  # raises where this was closed, or none is left
            with self._lock:
                clients = [client for client in self._clients if client in given_by]
        return entry_of(destination.assemble())

    def _ask_too(self, client: SourceClient, manifest: Manifest, name: str, after: StateVersion) -> Manifest | None:
        """Ask another source for an entry; None where it has none yet, or another one."""
        own = client.fetch_redo_manifest(format_version(after), _POLL_S, self._max_manifest_bytes)
        if own is None:
            return None
        check_entry(own, self._parameters, after)
        if not has_same_layout(own, manifest) or own.tree != manifest.tree:
            logger.warning(
                "the redo entries of step %d of %s and %s differ in settings or in which gradients there are: it comes from the"
                " first alone",
                manifest.step,
                name,
                client.name,
            )
            return None
        return own

    def _receive_run(
        self, client: SourceClient, manifest: Manifest, destination: Destination, run: range, scratch: memoryview
    ) -> None:
        digest = memoryview(bytearray(DIGEST_BYTES))
        for block, answer in client.open_blocks(manifest, run):
            hasher = start_digest(block)
            destination.receive(block, answer.read_into, scratch, hasher.update)
            answer.read_into(digest)
            if hasher.digest() != digest:
                raise DigestMismatchError(
                    f"block {block} of the redo entry of step {manifest.step} from {client.name} does not have the digest"
                    " that came with it",
                    client.name,
                )
        start, stop = run.start * manifest.block_bytes, min(run.stop * manifest.block_bytes, manifest.total_bytes)
        with self._lock:
            self.received_bytes += stop - start


def _next_of(runs: deque[range]) -> range | None:
    try:
        return runs.popleft()
    except IndexError:  # another thread took the last one
        return None
