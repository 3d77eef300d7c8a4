"""A `CheckpointTransport` in memory: no sockets, no files. For tests of what uses a transport.

It keeps the contract, and its failures can be ordered: `fail_next_receive`. It does not know the state format, so it
carries whatever can be deep-copied.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

from torchft_ckpt.checkpointing.transport import CheckpointTransport
from torchft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    SourceLostError,
    SourceRefusedError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)

T = TypeVar("T")


class FakeNetwork(Generic[T]):
    """A network of fake transports. Those of different networks cannot reach each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.transports: dict[str, FakeTransport[T]] = {}
        self._numbers = itertools.count()

    def transport(self) -> FakeTransport[T]:
        return FakeTransport(self, f"fake://{next(self._numbers)}")


class FakeTransport(CheckpointTransport[T]):
    """A replica's end of the network. `FakeNetwork.transport` makes it.

    The served state is deep-copied when it may be about to change, or when it is received, whichever comes first.
    """

    uses_memory_of_state = True

    def __init__(self, network: FakeNetwork[T], metadata: str) -> None:
        self._network = network
        self._metadata = metadata
        # All below belong to `network.changed`.
        self._read_state: Callable[[], T] | None = None
        self._step: int | None = None
        self._lease_ends = 0.0
        self._ordered_failure: TransferError | None = None
        self._cancelled: set[int] = set()
        self._receiving: set[int] = set()
        self._receive_numbers = itertools.count()
        self._shut_down = False
        with network.changed:
            network.transports[metadata] = self

    def __repr__(self) -> str:
        return f"FakeTransport({self._metadata}, step={self._step})"

    def fail_next_receive(self, error: TransferError) -> None:
        """Make the next `recv_checkpoint` of this transport raise `error`."""
        with self._network.changed:
            self._ordered_failure = error

    def metadata(self) -> str:
        """Return an address that is good on this network."""
        return self._metadata

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        with self._network.changed:
            if self._shut_down:
                raise CheckpointError("send_checkpoint after shutdown of the transport", party="transport")
            if step < 0:
                raise ConfigError(f"step={step} cannot be used; expected one that is not negative", party="step")
            self._read_state = lambda: copy.deepcopy(state_dict)
            self._step = step
            self._lease_ends = time.monotonic() + timeout.total_seconds()
            self._network.changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Copy the served state aside; it may be mutated afterwards."""
        with self._network.changed:
            if self._read_state is not None:
                kept = self._read_state()
                self._read_state = lambda: copy.deepcopy(kept)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return a copy of the source's state once it serves the step."""
        deadline = time.monotonic() + timeout.total_seconds()
        with self._network.changed:
            number = next(self._receive_numbers)
            self._receiving.add(number)
            try:
                while True:
                    self._raise_if_over(number)
                    state = self._look(metadata, step)
                    if state is not None:
                        return state()
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0:
                        raise TransferTimeoutError(
                            f"source {metadata} did not serve step {step} in time", party=metadata
                        )
                    self._network.changed.wait(remaining_s)
            finally:
                self._receiving.discard(number)
                self._cancelled.discard(number)

    def cancel_recv(self) -> None:
        with self._network.changed:
            self._cancelled |= self._receiving
            self._network.changed.notify_all()

    def shutdown(self, wait: bool = True) -> None:
        with self._network.changed:
            self._shut_down = True
            self._read_state = None
            self._network.transports.pop(self._metadata, None)
            self._cancelled |= self._receiving
            self._network.changed.notify_all()

    def _raise_if_over(self, number: int) -> None:
        if self._ordered_failure is not None:
            error, self._ordered_failure = self._ordered_failure, None
            raise error
        if number in self._cancelled:
            raise TransferCancelledError("the receive was given up", party="receiver")
        if self._shut_down:
            raise CheckpointError("recv_checkpoint after shutdown of the transport", party="transport")

    def _look(self, metadata: str, step: int) -> Callable[[], T] | None:
        """Return how to read the step from its source, or None if it has to be waited for."""
        source = self._network.transports.get(metadata)
        if source is None:
            raise SourceLostError(f"source {metadata} is not on this network", party=metadata)
        if source._step is not None and step < source._step:
            raise SourceRefusedError(f"source {metadata} has gone on to step {source._step}", party=metadata)
        if source._step != step or time.monotonic() >= source._lease_ends:
            return None
        return source._read_state
