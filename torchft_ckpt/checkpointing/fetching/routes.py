"""The addresses at which the sources of one fetch were said to be, beside those that the fetch was given.

It knows which there are; `core.transfer.paths` decides which are used, and a connection over one has the source prove itself
first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from torchft_ckpt.checkpointing.address import Route, SourceAddress
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.errors import SourceLostError, TransferError, TransferStalledError

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
        self._proven: set[str] = set()

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

    def proved(self, route: Route) -> None:
        """A route has led to its source."""
        with self._lock:
            self._proven.add(str(route))

    def to_use_again(self, paths: Iterable[str]) -> list[Route]:
        """Return the routes among paths that were dropped; a source's own address has a thread that waits for it."""
        for path in paths:
            logger.info("asking at %s again", path)
        with self._lock:
            return [route for path in paths if (route := self._routes.get(path)) is not None]

    def instead_of(self, path: str, again: list[str] | None, error: TransferError) -> list[str]:
        """Return the paths to use again when one is lost.

        Args:
            path: it.
            again: what its source's paths are to be; None: none is left.
            error: by which it was lost.

        Raises:
            TransferError: the error, where no path is left.
        """
        if again is None:
            raise error
        logger.warning("going on without %s, over other addresses of its source: %s", path, error)
        return again

    def try_each(
        self,
        source: SourceAddress,
        connected: Callable[[Route | None], AbstractContextManager[SourceClient]],
        is_used: Callable[[str], bool],
        work: Callable[[SourceClient], object],
    ) -> None:
        """Do something over a connection to a source: at its own address, or, where it is lost there, over a route.

        Routes that have not led to the source yet are left out.

        Args:
            source: which one.
            connected: gives a connection, over a route or to the source's own address.
            is_used: whether a path is, by its name; those go first.
            work: may be done again from the beginning.

        Raises:
            CheckpointError: what `work` raised over the last of them.
        """
        with self._lock:
            proven = [route for path, route in self._routes.items() if route.source == source and path in self._proven]
        ways = [None, *proven]
        ways.sort(key=lambda route: not is_used(str(route or source)))
        for number, route in enumerate(ways, 1):
            try:
                with connected(route) as client:
                    work(client)
                return
            except TransferError as error:
                is_lost = route is not None or isinstance(error, (SourceLostError, TransferStalledError))
                if number == len(ways) or not is_lost:
                    raise
                logger.info("trying another address of source %s: %s", source, error)
