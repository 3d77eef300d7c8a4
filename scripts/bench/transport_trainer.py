"""A trainer that does nothing but step, as fast as it can: each step writes every parameter. It serves when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bench.transport_adapter import Transport
from bench.transport_states import fill_uniform

BY_DISALLOW = "disallow"
BY_HOOK = "hook"
BY_NOTHING = "nothing"


class Trainer:
    """Steps on a thread of its own until `stop`.

    Args:
        transport: what serves the state.
        tensors: the parameters; after step n every element of them is n.
        state: what is served.
        guard: what is done before each mutation: `disallow_checkpoint`, the optimizer's hook, or nothing.
    """

    def __init__(
        self, transport: Transport, tensors: list[Tensor], state: Callable[[], dict[str, Any]], guard: str
    ) -> None:
        self._transport = transport
        self._tensors = tensors
        self._state = state
        self._guard = guard
        self._changed = threading.Condition()
        self._step = 0
        self._serve_at: int | None = None
        self._stopped = False
        self._error: BaseException | None = None
        fill_uniform(tensors, 0)
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    def serve(self, ahead: int) -> int:
        """Have the state served at a step boundary to come; return its step.

        Args:
            ahead: so many steps from now, without waiting for them; 0 waits until it is served.
        """
        with self._changed:
            self._serve_at = step = self._step + max(ahead, 1)
            while ahead == 0 and self._serve_at == step and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise RuntimeError("the trainer died") from self._error
            return step

    def steps(self) -> int:
        """Return how many steps it has done."""
        with self._changed:
            return self._step

    def stop(self) -> None:
        """End it."""
        with self._changed:
            self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped:
                with self._changed:
                    if self._serve_at == self._step:
                        self._transport.send(1, self._step, self._state())
                        self._serve_at = None
                        self._changed.notify_all()
                with self._guarded():
                    fill_uniform(self._tensors, self._step + 1)
                with self._changed:
                    self._step += 1
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._guard == BY_HOOK:
            with self._transport.writing():
                yield
            return
        if self._guard == BY_DISALLOW:
            self._transport.disallow()
        yield
