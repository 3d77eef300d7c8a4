"""One stream of blocks: asks the ledger for runs, receives them over one connection, verifies each block.

What comes from another party than the primary is digested by BLAKE3 as well. It decides nothing: what to ask for, and
whether to go on, is the ledger's to say.
"""

from __future__ import annotations

from collections.abc import Callable

from torchft_ckpt.checkpointing.fetching.connection import Answer
from torchft_ckpt.checkpointing.fetching.receive import SLICE_BYTES, Destination
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.fetching.transfer_state import TransferState
from torchft_ckpt.checkpointing.state.blocks import DIGEST_BYTES, start_blake3
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.errors import SourceLostError


class RunTakenBackError(SourceLostError):
    """The rest of a run was given to others: the connection has to be closed, the source is not to blame."""


class Stream:
    """A stream from one source. Used by one thread.

    Args:
        state: of the fetch.
        destination: where blocks are received to.
        on_asked: told of each run of blocks before it is asked for.
    """

    def __init__(self, state: TransferState, destination: Destination, on_asked: Callable[[range], None]) -> None:
        self._state = state
        self._on_asked = on_asked
        self._destination = destination
        self._scratch = memoryview(bytearray(SLICE_BYTES))
        self._digest = memoryview(bytearray(DIGEST_BYTES))
        self._num_unfinished = 0

    def run(self, client: SourceClient, manifest: Manifest, opened: Callable[[int], None]) -> None:
        """Bring blocks until the fetch is over.

        Raises:
            RunTakenBackError: bring more over another connection.
            CheckpointError: the source is lost or sends what it should not.
        """
        state = self._state
        number = state.open_stream(client.name, client.path)
        opened(number)
        self._num_unfinished = 0
        try:
            while True:
                work = state.next_run(number, client.name, client.path)
                if work is None:
                    return
                run, received = work
                self._on_asked(run)
                for block, answer in client.open_blocks(manifest, run, received):
                    goes_on = self._receive(number, client, block, answer)
                    if not goes_on and block != run[-1]:
                        raise RunTakenBackError(f"blocks {block + 1} to {run[-1]} are not wanted any more", client.name)
        finally:
            state.close_stream(number, self._num_unfinished)

    def _receive(self, number: int, client: SourceClient, block: int, answer: Answer) -> bool:
        def came(num_bytes: int) -> None:
            self._num_unfinished += num_bytes
            self._state.gave(client.path, num_bytes)

        def read_into(target: memoryview) -> None:
            answer.read_into(target, came)

        also = None if self._state.is_primary(client.name) else start_blake3()
        try:
            actual = self._destination.receive(block, read_into, self._scratch, also)
            answer.read_into(self._digest)
            strong = None if also is None else also.digest()
            self._state.check_digest(client.name, block, actual, bytes(self._digest), strong)
            self._num_unfinished = 0
            return self._state.arrived(number, client.name, client.path, block, actual, strong)
        finally:
            # Of one that arrived and was invalidated since, another stream may have asked: what is there is not ours.
            if also is not None and self._state.is_asked_for(number, block):
                self._destination.wipe(block)
