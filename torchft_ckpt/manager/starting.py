"""The start of a rank that has no state: it says how far it is, hears what its group is to do, and gives or receives a state.

Which group reads a checkpoint is decided by the lighthouse (`core/coordination/starting.py`); what a rank does to read one is in
`restoring`. No step is open meanwhile, no quorum is formed and no state is named. On the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import msgspec

from torchft_ckpt.core.coordination.messages import Starts, StateLocated, StateVersion
from torchft_ckpt.core.coordination.starting import STALLS_S
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.recovery import Recovery
from torchft_ckpt.manager.serving import StateServing
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.threads import Event, Thread

logger = logging.getLogger(__name__)
_SAY_EVERY_S = 1.0


class StartingRank:
    """What a rank that starts says, hears, gives and receives.

    Args:
        address: of this rank's transport.
        limit: how long a quorum is waited for.
    """

    def __init__(
        self,
        client: StepClient,
        *,
        registry: StateRegistry,
        serving: StateServing,
        healing: Healing,
        recovery: Recovery,
        address: str,
        limit: timedelta,
    ) -> None:
        self.client = client
        self._registry = registry
        self._serving = serving
        self._healing = healing
        self._recovery = recovery
        self._address = address
        self.limit = limit

    def says(self, starts: Starts, until: float) -> StateLocated | None:
        """Say how far this rank is; return what its group is told; None: there was no answer in time."""
        return self.client.locate(until, starts=msgspec.structs.replace(starts, checkpoint_addresses=[self._address]))

    @contextlib.contextmanager
    def at_work(self, starts: Starts, done_bytes: Callable[[], int]) -> Iterator[None]:
        """Say now and then, meanwhile, how far this rank is with what its group was told to do.

        If nothing more is done for as long as the others look for it, what it receives is given up: nobody sends it.
        """
        is_over = Event()

        def say() -> None:
            most, moved_at = -1, time.monotonic()
            while not is_over.wait(_SAY_EVERY_S):
                with contextlib.suppress(Exception):  # the training thread hears of it when it says something
                    done, now = done_bytes(), time.monotonic()
                    most, moved_at = max(done, most), now if done > most else moved_at
                    if now > moved_at + STALLS_S:
                        self._healing.cancel()
                    said = msgspec.structs.replace(starts, is_at_work=True, done_bytes=done)
                    self.says(said, now + _SAY_EVERY_S)

        thread = Thread(say, "torchft_ckpt-starting")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def serve(self, step: int) -> None:
        """Serve the state that is here, of a checkpoint of that step, to those that start as well, until it changes.

        Raises:
            UnsupportedValueError: it holds something that cannot be carried.
        """
        self._serving.end_offer()
        self._serving.offer(StateVersion(step=step), moving=True)

    def receive(self, located: StateLocated, limit: timedelta) -> Exception | None:
        """Receive and load a state from others that start. See `Recovery.receive`."""
        self._serving.end_offer()
        in_place = not self._registry.trains_apart
        failure = self._recovery.receive(located, in_place, limit)
        if failure is None:
            self._recovery.note_healed(located)
        return failure

    @property
    def received_bytes(self) -> int:
        """How many bytes of the state that is received are here."""
        progress = self._healing.progress
        return 0 if progress is None else progress.received_bytes
