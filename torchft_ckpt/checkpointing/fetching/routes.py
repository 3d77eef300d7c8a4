"""The addresses at which the sources of one fetch were said to be, beside those that the fetch was given.

It knows which there are; `core.paths` decides which are used, and a connection over one has the source prove itself first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from torchft_ckpt.checkpointing.address import Route, SourceAddress
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.errors import SourceLostError, TransferStalledError

logger = logging.getLogger(__name__)


class Routes:
    """Every method may be called from any thread.

    Args:
        sources: the addresses that the fetch was given; none of them becomes a route to another source.
    """

    def __init__(self, sources: Iterable[SourceAddress]) -> None:
        self._lock = threading.Lock()
        self._taken = set(map(str, sources))
        self._routes: dict[str, Route] = {}

    def learn(self, source: SourceAddress, manifest: Manifest) -> list[Route]:
        """Return the routes that a source's manifest names, and that lead nowhere else that is known."""
        if manifest.elsewhere is None:
            return []
        named = [Route(source, host, manifest.elsewhere.key) for host in manifest.elsewhere.hosts]
        with self._lock:
            fresh = {str(route): route for route in named if str(route) not in self._taken}
            self._taken.update(fresh)
            self._routes.update(fresh)
        return list(fresh.values())

    def find(self, path: str) -> Route | None:
        """Return the route of a path's name; None where that is a source's own address."""
        with self._lock:
            return self._routes.get(path)

    def try_each(
        self,
        source: SourceAddress,
        connected: Callable[[Route | None], AbstractContextManager[SourceClient]],
        is_used: Callable[[str], bool],
        work: Callable[[SourceClient], object],
    ) -> None:
        """Do something over a connection to a source: at its own address, or, where it is lost there, over a route.

        Args:
            source: which one.
            connected: gives a connection, over a route or to the source's own address.
            is_used: whether a path is, by its name; those go first.
            work: may be done again from the beginning.

        Raises:
            CheckpointError: what `work` raised over the last of them.
        """
        with self._lock:
            ways = [None, *(route for route in self._routes.values() if route.source == source)]
        ways.sort(key=lambda route: not is_used(str(route or source)))
        for number, route in enumerate(ways, 1):
            try:
                with connected(route) as client:
                    work(client)
                return
            except (SourceLostError, TransferStalledError) as error:
                if number == len(ways):
                    raise
                logger.info("trying another address of source %s: %s", source, error)
