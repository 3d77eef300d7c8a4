"""This file decides whether the ranks of one replica group load a state: all of them, or none.

rank       says                                      all ranks hear
---------  ----------------------------------------  --------------------------------------------------------------------
receives   `StateArrived`, from each                 `LoadState`: all have it
receives   `StateArrived(failure)`, from one         `LoadState(failure)`
came in    `StateArrived(again)`, from each          `LoadState`: all put back what their loops have changed, or none does
"""

from __future__ import annotations


class Arrivals:
    """Knows which ranks of a group have fetched the state of the open step: all load it, or none.

    One that held the new state where its neighbour holds the old one would know another step, and a loop that goes by the step
    calls other collectives of the group then (FSDP's) than its neighbour: they wait for each other for ever, or abort. So would
    a `load_state_dict` that calls collectives of the group, as DTensors' do: where one rank came to another state than the
    source, all of them load.

    Each method returns what all ranks are to be told, if anything: why none of them loads the state; empty: all do.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.begin()

    def begin(self) -> None:
        self._here: set[int] = set()
        self._told: str | None = None
        self.loads = False
        """Whether a rank that has the state loads it."""

    def begin_again(self) -> None:
        """The ranks have loaded the state, and may load it once more."""
        if self._told == "":
            self.begin()

    @property
    def is_given_up(self) -> bool:
        return bool(self._told)

    def arrived(self, rank: int, failure: str, *, loads: bool) -> str | None:
        """A rank has all of the state, and loads it or not; or, where there is a `failure`, will not have it."""
        if failure:
            return self.give_up(f"group rank {rank}: {failure}")
        self._here.add(rank)
        self.loads = self.loads or loads
        return self._tell("") if len(self._here) == self._world_size else None

    def give_up(self, reason: str) -> str | None:
        """The state will not be loaded in this step."""
        return self._tell(reason)

    def _tell(self, failure: str) -> str | None:
        if self._told is not None:
            return None
        self._told = failure
        return failure
