"""Fetches one state from one source, over a few connections, within a deadline.

The calling thread decides when it is over: all in, failed, cancelled, or too late. Worker threads move bytes; each has one
connection, which the calling thread closes to end it. Nothing of a fetch that failed is visible to the caller.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from torchft_ckpt.checkpointing.address import SourceAddress
from torchft_ckpt.checkpointing.blocks import DIGEST_BYTES, format_runs, plan_runs, start_digest
from torchft_ckpt.checkpointing.connection import SourceConnection
from torchft_ckpt.checkpointing.format import Manifest, decode_manifest
from torchft_ckpt.checkpointing.protocol import DIGEST_HEADER, MAX_WAIT_S, PREFIX, RECEIVED_HEADER, RECEIVER_HEADER
from torchft_ckpt.checkpointing.receive import BufferShelf, Destination, verify
from torchft_ckpt.errors import (
    CheckpointError,
    DigestMismatchError,
    SourceLostError,
    SourceRefusedError,
    StateFormatError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)

logger = logging.getLogger(__name__)
MAX_RUN_BYTES = 16 * 1024 * 1024
DEFAULT_STREAMS = 2
_RUNS_PER_STREAM = 4
_DONE_TIMEOUT_S = 1.0
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How to fetch. Durations in seconds, lengths in bytes; `num_streams` 0 leaves the choice here."""

    connect_timeout_s: float
    stall_timeout_s: float
    num_streams: int
    max_manifest_bytes: int
    max_total_bytes: int | None
    token: str | None
    receiver: str


class Fetch:
    """One fetch of one state. `run` is called once; `cancel` from any thread, at any time.

    Args:
        source: where the state is.
        step: the step wanted.
        deadline: on the monotonic clock.
        options: how to fetch.
        shelf: where memory comes from.
    """

    def __init__(
        self, source: SourceAddress, *, step: int, deadline: float, options: FetchOptions, shelf: BufferShelf
    ) -> None:
        self._source = source
        self._party = str(source)
        self._step = step
        self._deadline = deadline
        self._options = options
        self._shelf = shelf
        self._changed = threading.Condition()
        # All below belong to `_changed`.
        self._outcome: CheckpointError | None = None
        self._over = False
        self._connections: set[SourceConnection] = set()
        self._threads: list[threading.Thread] = []
        self._runs: deque[range] = deque()
        self._destination: Destination | None = None
        self._num_missing = 0
        self._last_refusal: SourceRefusedError | None = None

    def cancel(self, reason: str = "the receiver gave it up") -> None:
        """Make `run` raise `TransferCancelledError`."""
        self._end(TransferCancelledError(f"fetch of step {self._step} from {self._party}: {reason}", party="receiver"))

    def run(self) -> object:
        """Fetch and return the state.

        Raises:
            TransferError: a subclass says why there is none.
            StateFormatError: what the source sends is not a state.
        """
        self._spawn(self._first_stream)
        with self._changed:
            while not self._over:
                remaining_s = self._deadline - time.monotonic()
                if remaining_s <= 0:
                    self._end(self._too_late())
                    break
                self._changed.wait(remaining_s)
            outcome, destination = self._outcome, self._destination
        self._stop_streams()
        if outcome is None and destination is not None:
            return destination.assemble()
        if destination is not None:
            self._shelf.keep(destination.give_up())
        raise outcome or TransferError(
            f"fetch of step {self._step} from {self._party} ended without a state", self._party
        )

    def buffers(self) -> list[np.ndarray]:
        """The memory that the state was received into."""
        with self._changed:
            return [] if self._destination is None else list(self._destination.buffers)

    # The streams

    def _first_stream(self, connection: SourceConnection) -> None:
        """Fetch the manifest, prepare memory, start the other streams, then be one of them."""
        manifest = self._fetch_manifest(connection)
        destination = Destination(manifest, self._shelf)
        num_streams = self._options.num_streams or DEFAULT_STREAMS
        max_run = max(
            1, min(MAX_RUN_BYTES // manifest.block_bytes, destination.num_blocks // (num_streams * _RUNS_PER_STREAM))
        )
        runs = plan_runs(destination.num_blocks, max_run)
        with self._changed:
            self._destination = destination
            self._num_missing = destination.num_blocks
            self._runs.extend(runs)
        for _ in range(min(num_streams, len(runs)) - 1):
            self._spawn(self._stream)
        if runs:
            self._stream(connection)
        else:
            self._finish(connection, manifest)

    def _stream(self, connection: SourceConnection) -> None:
        """Fetch runs until there are none left."""
        with self._changed:
            destination = self._destination
        if destination is None:
            return
        received = ""
        while True:
            with self._changed:
                if self._over or not self._runs:
                    return
                run = self._runs.popleft()
            self._fetch_run(connection, destination, run, received)
            received = format_runs(run)
            with self._changed:
                self._num_missing -= len(run)
                last = self._num_missing == 0
            if last:
                self._finish(connection, destination.manifest)
                return

    def _fetch_manifest(self, connection: SourceConnection) -> Manifest:
        """Ask until the step is served; raises at the deadline by the closing of the connection."""
        while True:
            remaining_s = max(self._deadline - time.monotonic(), 0.0)
            wait_s = min(MAX_WAIT_S, self._options.stall_timeout_s / 2, remaining_s)
            answer = connection.get(f"{self._path('manifest')}?wait_s={wait_s:.3f}")
            if answer.status == 200:
                break
            refusal = answer.refusal()
            if answer.status != 404 or refusal.error != "not_yet":
                raise answer.refused(refusal)
            with self._changed:
                self._last_refusal = answer.refused(refusal)
                if self._over:
                    raise TransferCancelledError(f"fetch of step {self._step} from {self._party} is over")
                # The source holds the request up itself; a source that does not is not asked in a tight loop.
                self._changed.wait(min(0.02, remaining_s))
        digest = answer.header(DIGEST_HEADER)
        body = answer.read(self._options.max_manifest_bytes)
        if xxhash.xxh3_128_hexdigest(body) != digest:
            raise DigestMismatchError(
                f"the manifest from {self._party} does not have the digest that came with it", party=self._party
            )
        manifest = decode_manifest(body, max_total_bytes=self._options.max_total_bytes)
        if manifest.step != self._step or answer.header("ETag") != f'"{manifest.snapshot}"':
            raise StateFormatError(
                f"source {self._party} was asked for step {self._step} and sent step {manifest.step}", party=self._party
            )
        return manifest

    def _fetch_run(self, connection: SourceConnection, destination: Destination, run: range, received: str) -> None:
        manifest = destination.manifest
        headers = {"If-Match": f'"{manifest.snapshot}"'}
        if received:
            headers[RECEIVED_HEADER] = received
        answer = connection.get(self._path(f"blocks/{run.start}-{run.stop - 1}"), headers)
        if answer.status != 200:
            raise answer.refused(answer.refusal())
        stop = min(run.stop * manifest.block_bytes, manifest.total_bytes)
        expected = stop - run.start * manifest.block_bytes + DIGEST_BYTES * len(run)
        if answer.length != expected or answer.header("ETag") != headers["If-Match"]:
            raise StateFormatError(
                f"source {self._party} answered blocks {run.start} to {run.stop - 1} with {answer.length} bytes of "
                f"{answer.header('ETag')[:70]}, {expected} of {headers['If-Match']} were asked for",
                party=self._party,
            )
        announced = bytearray(DIGEST_BYTES)
        for block in run:
            hasher = start_digest(block)
            for piece in destination.pieces(block):
                answer.read_into(piece)
                hasher.update(piece)
            answer.read_into(memoryview(announced))
            verify(block, hasher.digest(), bytes(announced), self._party)

    def _finish(self, connection: SourceConnection, manifest: Manifest) -> None:
        """Every block is in: tell the source, so that it may free what it keeps, and end. The telling may fail."""
        connection.set_stall_timeout(min(_DONE_TIMEOUT_S, self._options.stall_timeout_s))
        try:
            connection.get(self._path("done"), {"If-Match": f'"{manifest.snapshot}"'}, method="POST").read(0)
        except CheckpointError as error:
            logger.info("could not tell %s that step %d has arrived: %s", self._party, self._step, error)
        self._end(None)

    # Beginning and ending

    def _spawn(self, work: Callable[[SourceConnection], None]) -> None:
        headers = {RECEIVER_HEADER: self._options.receiver, "Accept-Encoding": "identity"}
        if self._options.token is not None:
            headers["Authorization"] = f"Bearer {self._options.token}"
        connection = SourceConnection(
            self._source,
            headers=headers,
            connect_timeout_s=self._options.connect_timeout_s,
            stall_timeout_s=self._options.stall_timeout_s,
        )
        thread = threading.Thread(target=self._work, args=(work, connection), name="torchft_ckpt-fetch", daemon=True)
        with self._changed:
            if self._over:
                return
            self._connections.add(connection)
            self._threads.append(thread)
            thread.start()

    def _work(self, work: Callable[[SourceConnection], None], connection: SourceConnection) -> None:
        try:
            work(connection)
        except CheckpointError as error:
            _forget_locals(error)
            self._end(error)
        except Exception as error:  # noqa: BLE001 - becomes the outcome, with its cause
            _forget_locals(error)
            failure = SourceLostError(f"fetch from {self._party} failed: {type(error).__name__}: {error}", self._party)
            failure.__cause__ = error
            self._end(failure)
        finally:
            connection.release()

    def _end(self, outcome: CheckpointError | None) -> None:
        """Set the outcome; the first one counts."""
        with self._changed:
            if not self._over:
                self._over = True
                self._outcome = outcome
                self._changed.notify_all()

    def _stop_streams(self) -> None:
        with self._changed:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.close()
        until = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
            if thread.is_alive():  # resolving a name cannot be interrupted
                logger.warning("a connection attempt to %s is still in the resolver; it ends by itself", self._party)

    def _too_late(self) -> TransferTimeoutError:
        with self._changed:
            destination, num_missing = self._destination, self._num_missing
        arrived = "nothing"
        if destination is not None:
            arrived = f"{destination.num_blocks - num_missing} of {destination.num_blocks} blocks"
        elif self._last_refusal is not None:
            arrived = f"nothing ({self._last_refusal})"
        return TransferTimeoutError(
            f"fetch of step {self._step} from {self._party} reached its deadline with {arrived} received; "
            "give a longer timeout if the link is slow",
            party=self._party,
        )

    def _path(self, what: str) -> str:
        return f"{PREFIX}/{self._step}/{what}"


def _forget_locals(error: BaseException) -> None:
    """Keep the lines of an error's traceback, but not the views of received memory that its frames hold."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
