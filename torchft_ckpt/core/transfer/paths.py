"""Decides over which of a source's addresses a receiver takes what it sends. It knows no sockets, threads or clock.

A path leads to a source by one of its addresses. All are used at once, and each is measured over seconds in which the source's
streams always had something to ask for. One that gives less than a quarter of the fastest to the same source, in two such seconds
in a row, is dropped, and a link that is silent is one. Those that were dropped for their rate are used again where no other path
to a source is left, or none gives anything.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum

SLOW_FACTOR = 4.0
_MEASURED_S = 1.0
_TIMES_SLOW = 2


class Use(Enum):
    """The state of a path."""

    USED = "used"
    SLOW = "dropped as slow"
    LOST = "lost"


@dataclass(slots=True)
class Path:
    """One path, with what it has given. Names of paths are unique over all sources."""

    source: str
    since: float
    use: Use = Use.USED
    num_bytes: int = 0
    last_at: float = 0.0
    measured_from: float = 0.0
    measured_bytes: int = 0
    measured_rate: float = 0.0
    """Bytes a second, in the last second or so that was measured."""
    times_slow: int = 0
    """In a row."""

    def rate(self) -> float:
        """Bytes a second while it gave any."""
        return self.num_bytes / max(self.last_at - self.since, 1e-6) if self.num_bytes else 0.0


class Paths:
    """The paths to the sources of one transfer.

    Args:
        grain_bytes: what a path may have sent that has not been counted yet: so much of it is taken for given.
    """

    def __init__(self, grain_bytes: int) -> None:
        self._grain_bytes = grain_bytes
        self._paths: dict[str, Path] = {}

    def add(self, source: str, name: str, now: float) -> None:
        """Use a path from now on; without effect where it is known."""
        self._paths.setdefault(name, Path(source, now, last_at=now, measured_from=now))

    def is_used(self, name: str) -> bool:
        """Whether more is to be asked for over a path; one that was never added is nobody's to drop."""
        path = self._paths.get(name)
        return path is None or path.use is Use.USED

    def gave(self, name: str, num_bytes: int, now: float) -> None:
        """Count what came over a path."""
        path = self._paths.get(name)
        if path is not None:
            path.num_bytes += num_bytes
            path.measured_bytes += num_bytes
            path.last_at = now

    def judge(self, now: float, idle: Container[str]) -> tuple[list[str], list[str]]:
        """Return the paths that are used no longer, and those that are used again.

        Args:
            now: seconds.
            idle: sources with a stream that has nothing to ask for: what their paths give now says nothing.
        """
        dropped: list[str] = []
        again: list[str] = []
        for source in {path.source for path in self._paths.values()}:
            used = {name: path for name, path in self._paths.items() if path.source == source and path.use is Use.USED}
            measured = []
            for name, path in used.items():
                seconds = now - path.measured_from
                if source in idle:
                    path.measured_rate, path.times_slow = 0.0, 0
                elif seconds < _MEASURED_S:
                    continue
                else:
                    path.measured_rate = path.measured_bytes / seconds
                    measured.append((name, path, (path.measured_bytes + self._grain_bytes) / seconds))
                path.measured_from, path.measured_bytes = now, 0
            fastest = max((path.measured_rate for path in used.values()), default=0.0)
            for name, path, at_most in measured:
                path.times_slow = path.times_slow + 1 if SLOW_FACTOR * at_most < fastest else 0
                if path.times_slow == _TIMES_SLOW:
                    path.use, path.times_slow = Use.SLOW, 0
                    dropped.append(name)
            if fastest == 0.0 and len(measured) == len(used):
                again += self._use_slow(source)
        return dropped, again

    def lose(self, name: str) -> list[str] | None:
        """Note that a path is broken; None where it was the last to its source, or is the only one ever.

        Returns:
            the paths to use again, which had been dropped as slow; most often none.
        """
        lost = self._paths.get(name)
        if lost is None:
            return None
        lost.use = Use.LOST
        if any(path.use is Use.USED for path in self.to(lost.source).values()):
            return []
        return self._use_slow(lost.source) or None

    def _use_slow(self, source: str) -> list[str]:
        again = {name: path for name, path in self.to(source).items() if path.use is Use.SLOW}
        for path in again.values():
            path.use = Use.USED
        return list(again)

    def to(self, source: str) -> dict[str, Path]:
        """Return the paths to a source, by name, in the order in which they were added."""
        return {name: path for name, path in self._paths.items() if path.source == source}


def describe_paths(paths: dict[str, Path]) -> str:
    """Say for people what each path gave, and how fast."""
    return ", ".join(
        f"{name}: {path.num_bytes / 2**20:.1f} MiB at {path.rate() / 1e6:.1f} MB/s"
        f"{'' if path.use is Use.USED else f' ({path.use.value})'}"
        for name, path in paths.items()
    )
