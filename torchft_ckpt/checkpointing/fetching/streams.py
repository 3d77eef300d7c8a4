"""One stream of units, blocks or boxes: receives what the ledger says over one connection, and verifies each.

What comes from another party than the one whose state counts is digested by BLAKE3 as well. It decides nothing: what to ask
for, and whether to go on, is the ledger's to say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from torchft_ckpt.checkpointing.fetching.connection import Answer
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.fetching.transfer_state import TransferState
from torchft_ckpt.checkpointing.state.blocks import DIGEST_BYTES, start_blake3, start_digest
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.memory import SLICE_BYTES, ReadInto, Update
from torchft_ckpt.errors import DigestMismatchError, SourceLostError

Ask = Callable[[SourceClient, Manifest, list[int]], Iterator[tuple[int, Answer]]]
Settle = Callable[[int, SourceClient, Mapping[int, bytes]], None]


class StreamMemory(Protocol):
    """Where units are received to. Different units may be received on different threads."""

    def receive(self, unit: int, read_into: ReadInto, scratch: memoryview, update: Update) -> None:
        """Receive a unit.

        Args:
            scratch: for this thread alone; as long as what is received at a time.
            update: told of all bytes, in order.
        """

    def wipe(self, unit: int) -> None:
        """Write zeros over a unit that does not count: the next receive may look here for what it need not fetch."""


class RunTakenBackError(SourceLostError):
    """The rest of a batch was given to others: the connection has to be closed, the source is not to blame."""


class Stream:
    """A stream from one source. Used by one thread.

    Args:
        memory: where units are received to.
        ask: asks a source for units; yields each with the answer at its beginning.
        settle: called with the stream's number, the source, and what has come and does not count yet, with its BLAKE3 digests
            (empty if none was made); what it does not settle comes from others.
    """

    def __init__(
        self, state: TransferState, memory: StreamMemory, ask: Ask, settle: Settle = lambda number, client, came: None
    ) -> None:
        self._state = state
        self._memory = memory
        self._ask = ask
        self._settle = settle
        self._scratch = memoryview(bytearray(SLICE_BYTES))
        self._digest = memoryview(bytearray(DIGEST_BYTES))
        self._path = ""
        self._num_unfinished = 0
        self.num_batches = 0
        """Brought whole."""

    def run(self, client: SourceClient, manifest: Manifest, opened: Callable[[int], None]) -> None:
        """Bring units until the fetch is over.

        Raises:
            RunTakenBackError: bring more over another connection.
            CheckpointError: the source is lost or sends what it should not.
        """
        state = self._state
        number = state.open_stream(client.name, client.path)
        opened(number)
        self._path = client.path
        self._num_unfinished = 0
        try:
            if not state.receives_into(self._memory):  # as long as a stream is open, the fetch does not begin again
                return
            while (batch := state.next_batch(number, client.name, client.path)) is not None:
                self._bring(number, client, manifest, batch)
                self.num_batches += 1
        finally:
            state.close_stream(number, self._num_unfinished)

    def _bring(self, number: int, client: SourceClient, manifest: Manifest, batch: list[int]) -> None:
        from_others: dict[int, bytes] = {}
        try:
            for unit, answer in self._ask(client, manifest, batch):
                if not self._receive(number, client, unit, answer, from_others) and unit != batch[-1]:
                    raise RunTakenBackError(f"{unit + 1} to {batch[-1]} are not wanted any more", client.name)
            left = self._state.asked_of(number)
            if left:
                self._settle(number, client, {unit: from_others.get(unit, b"") for unit in left})
        finally:
            if from_others:
                # Of one that arrived and was invalidated since, another stream may have asked: what is there is not ours.
                for unit in self._state.asked_of(number) & from_others.keys():
                    self._memory.wipe(unit)
        if left:
            self._state.give_back(number)

    def _receive(
        self, number: int, client: SourceClient, unit: int, answer: Answer, from_others: dict[int, bytes]
    ) -> bool:
        state = self._state
        read_into = functools.partial(answer.read_into, on_bytes=self._came)
        hasher = start_digest(unit)
        also = None if state.is_primary(client.name) else start_blake3()
        blake3 = None
        if also is None:
            self._memory.receive(unit, read_into, self._scratch, hasher.update)
        else:
            from_others[unit] = b""
            self._memory.receive(unit, read_into, self._scratch, _both(hasher.update, also.update))
            blake3 = from_others[unit] = also.digest()
        answer.read_into(self._digest)
        digest = hasher.digest()
        if digest != self._digest:
            what = f"{state.name_of(unit)} from {client.name} does not have the digest that came with it"
            raise DigestMismatchError(f"{what}: it was changed on the way", client.name)
        goes_on = state.arrived(number, client.name, client.path, unit, digest, blake3)
        self._num_unfinished = 0
        return goes_on

    def _came(self, num_bytes: int) -> None:
        self._num_unfinished += num_bytes
        self._state.gave(self._path, num_bytes)


def _both(one: Update, other: Update) -> Update:
    def update(data: memoryview) -> None:
        one(data)
        other(data)

    return update
