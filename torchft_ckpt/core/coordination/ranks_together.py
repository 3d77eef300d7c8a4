"""This file decides whether the ranks of one replica group load a state: all of them, or none; and whether they begin one
iteration, or some are behind in it.

rank       says                                      all ranks hear
---------  ----------------------------------------  --------------------------------------------------------------------
receives   `StateArrived`, from each                 `StateArrived`: all have it
receives   `StateArrived(failure)`, from one         `StateArrived(failure)`
came in    `StateArrived(again)`, from each          `StateArrived`: all put back what their loops have changed, or none does
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchft_ckpt.core.coordination.messages import MAX_TURNS, QuorumRequest

MAX_ALONE = MAX_TURNS // 2
"""So many turns are compared, and so many a rank may be behind."""


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


def those_behind(by_rank: Mapping[int, QuorumRequest], num_alone: int = 0) -> set[int]:
    """Return the ranks that are behind the others in their loops, which wait with theirs until all begin the same iteration.

    One that is at the end of an iteration is behind those that begin one. Where loops train several networks in turn, so is one
    that has to make a turn yet which others have made: one that did not hear the answer to what it asked begins its iteration
    anew, while the others end theirs. Else it would be at another network than they for ever.

    `num_alone`: so often in a row the others have waited already. Who has not caught up by then never will.
    """
    ending = {rank for rank, request in by_rank.items() if request.at_end}
    if ending:
        return ending if len(ending) < len(by_rank) else set()
    if num_alone >= MAX_ALONE:
        return set()
    furthest = max((by_rank[rank].kinds for rank in sorted(by_rank)), key=len)
    # Many times the same are said as one, and all ranks have begun together.
    times = MAX_TURNS if len(furthest) > MAX_ALONE else 1
    last = {r: q.kinds * times if len(q.kinds) == 1 else q.kinds for r, q in by_rank.items()}
    return {rank for rank, kinds in last.items() if _was_at(furthest, kinds[-MAX_ALONE:])}


def _was_at(theirs: Sequence[str], mine: Sequence[str]) -> bool:
    """Whether others have been where this one is, and have gone on from there; not if it goes another way than they."""
    ends = [end for end in range(len(mine), len(theirs) + 1) if theirs[end - len(mine) : end] == mine]
    return bool(ends) and ends[-1] < len(theirs)
