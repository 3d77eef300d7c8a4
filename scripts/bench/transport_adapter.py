"""The two transports behind one set of verbs. What differs in use between the libraries is here, and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from bench import sides

TIMEOUT = timedelta(seconds=120)
_HOMES = {sides.OURS: "torchft_ckpt.checkpointing", sides.REFERENCE: "torchft.checkpointing"}
State = dict[str, Any]


class Transport:
    """One transport of either library.

    Args:
        side: which library.
        num_chunks: the reference's setting; ours chooses its streams itself.
        host: address to advertise; ours listens on it alone, the reference always listens everywhere. Empty: ours chooses.
    """

    def __init__(self, side: str, num_chunks: int, host: str) -> None:
        kind = importlib.import_module(_HOMES[side]).HTTPTransport
        self.is_ours = side == sides.OURS
        if self.is_ours:
            self._transport = kind(timeout=TIMEOUT, hostname=host or None, bind=host or None)
            self.metadata: str = self._transport.metadata()
        else:
            self._transport = kind(timeout=TIMEOUT, num_chunks=num_chunks)
            port = self._transport.metadata().rsplit(":", 1)[1]
            self.metadata = f"http://{host}:{port}"

    @property
    def num_streams(self) -> int:
        """How many connections a receive of ours uses at once."""
        return int(getattr(self._transport, "num_streams", 1))

    def send(self, num_receivers: int, step: int, state: State) -> None:
        """Begin to serve."""
        self._transport.send_checkpoint(list(range(1, num_receivers + 1)), step, state, TIMEOUT)

    def disallow(self) -> None:
        """Return once the state may be mutated; whoever is receiving gets it nevertheless."""
        self._transport.disallow_checkpoint()

    def withdraw(self) -> None:
        """Return once the state may be mutated, and keep nothing for anybody."""
        if self.is_ours:
            self._transport.withdraw_checkpoint()
        else:
            self._transport.disallow_checkpoint()

    def writing(self) -> AbstractContextManager[None]:
        """What the optimizer's pre-step hook does: hold the write side of the lock. Ours only."""
        return self._transport.lock.write()

    def receive(
        self,
        sources: Sequence[str],
        step: int,
        local_state: Callable[[], State],
        on_progress: Callable[[Any], None] | None = None,
        *,
        in_place: bool = True,
    ) -> State:
        """Receive a state: ours into the local state's own memory and from all sources, the reference's from the first.

        Without `in_place` both do what torchft's Manager asks for: ours is told of no local state either.
        """
        if not self.is_ours or not in_place:
            return self._transport.recv_checkpoint(0, sources[0], step, TIMEOUT)
        return self._transport.fetch_checkpoint(
            sources, step, TIMEOUT, local_state=local_state(), in_place=True, on_progress=on_progress
        )

    def shutdown(self) -> None:
        """Stop serving."""
        self._transport.shutdown()
