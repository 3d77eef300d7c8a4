"""A transport that is slow to ask, on purpose."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from support.waiting import wait_until
from torchft_ckpt import HTTPTransport, LighthouseServer


class AsksLate(HTTPTransport[Any]):
    """Asks for its first state once another group waits for a quorum again.

    Args:
        lighthouse: of the one job.
        source: that group's name begins so.
    """

    def __init__(self, lighthouse: LighthouseServer, source: str) -> None:
        super().__init__(timeout=timedelta(seconds=20), num_chunks=0, hostname="127.0.0.1")
        self._lighthouse = lighthouse
        self._source = source
        self.num_received = 0

    def fetch_checkpoint(self, *arguments: Any, **how: Any) -> Any:
        waiting = self._lighthouse._jobs.states["default"]._job.waiting
        source, self._source = self._source, ""
        if source:
            wait_until(lambda: any(name.startswith(source) for name in waiting), f"{source} asks again", 60)
        state = super().fetch_checkpoint(*arguments, **how)
        self.num_received += 1
        return state
