"""This file decides at which moment the ranks of one replica group load a state: all of them, or none.

rank       says                                      all ranks hear
---------  ----------------------------------------  --------------------------------------------------------------------
joins      `StateArrived`, from each                 `LoadState(NOW)`: all have it
joins      `StateLate`, from one                     `LoadState(LATER)`: not before the forward pass, but at the vote
joins      `StateArrived(failure)`, from one         `LoadState(NEVER)`
came in    `StateArrived(again)`, from each          `LoadState(NOW)`: all put back what their loops have changed, or none does
"""

from __future__ import annotations

from torchft_ckpt.core.coordination.messages import Loading


class Arrivals:
    """Knows which ranks of a group have fetched the state of the open step: all load it at one place of their programs, or
    none.

    One that held the new state where its neighbour holds the old one would know another step, and a loop that goes by the step
    calls other collectives of the group then (FSDP's) than its neighbour: they wait for each other for ever, or abort. So would
    a `load_state_dict` that calls collectives of the group, as DTensors' do: where one rank came to another state than the
    source, all of them load.

    Each method returns what all ranks are to be told, if anything.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.begin()

    def begin(self) -> None:
        self._here: set[int] = set()
        self._told: Loading | None = None
        self.loads = False
        """Whether a rank that has the state loads it."""

    def begin_again(self) -> None:
        """The ranks have loaded the state, and may load it once more."""
        if self._told is Loading.NOW:
            self.begin()

    @property
    def is_given_up(self) -> bool:
        return self._told is Loading.NEVER

    def arrived(self, rank: int, failure: str, *, loads: bool) -> tuple[Loading, str] | None:
        """A rank has all of the state, and loads it or not; or, where there is a `failure`, will not have it."""
        if failure:
            return self.give_up(f"group rank {rank}: {failure}")
        self._here.add(rank)
        self.loads = self.loads or loads
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
