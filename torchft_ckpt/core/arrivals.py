"""When the ranks of a group load a state that each of them fetches: all at one place of their programs, or none of them.

One that held the new state where its neighbour holds the old one would know another step, and a loop that goes by the step calls
other collectives of the group then (FSDP's) than its neighbour: they wait for each other for ever, or abort.
"""

from __future__ import annotations

from enum import Enum


class Loading(str, Enum):
    """Tells the ranks of a group when to load a state that they fetch."""

    NOW = "now"
    """All of them have it: load it. Whoever was told `LATER` before loads it before the vote."""
    LATER = "later"
    """One of them does not wait any longer: go on without it."""
    NEVER = "never"
    """One of them does not get it: none of them loads it."""


class Arrivals:
    """Knows which ranks of a group have fetched the state of the open step.

    Each method returns what all ranks are to be told, if anything.

    Args:
        world_size: number of ranks in the group.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.begin()

    def begin(self) -> None:
        """Another step is open."""
        self._here: set[int] = set()
        self._told: Loading | None = None

    def arrived(self, rank: int, failure: str) -> tuple[Loading, str] | None:
        """A rank has all of the state, or, where there is a `failure`, will not have it."""
        if failure:
            return self.give_up(f"group rank {rank}: {failure}")
        self._here.add(rank)
        return self._tell(Loading.NOW, "") if len(self._here) == self._world_size else None

    def late(self) -> tuple[Loading, str] | None:
        """A rank does not wait for the others any longer before its forward pass."""
        return self._tell(Loading.LATER, "") if self._told is None else None

    def give_up(self, reason: str) -> tuple[Loading, str] | None:
        """The state will not be loaded in this step."""
        return self._tell(Loading.NEVER, reason)

    def _tell(self, loading: Loading, reason: str) -> tuple[Loading, str] | None:
        if self._told in (Loading.NOW, Loading.NEVER):
            return None
        self._told = loading
        return loading, reason
