"""This file decides at which moment the ranks of one replica group load a state, and apply redo entries: all of them, or none.

rank       says                                      all ranks hear
---------  ----------------------------------------  --------------------------------------------------------------------
joins      `StateArrived`, from each                 `LoadState(NOW)`: all have it
joins      `StateLate`, from one                     `LoadState(LATER)`: not before the forward pass, but at the vote
joins      `StateArrived(failure)`, from one         `LoadState(NEVER)`
follows    `RedoFetched`, from each                  `ApplyRedo(step)`: all have the entries so far
follows    `RedoFetched(is_newest)`, from each       `ApplyRedo(step, is_last)`: up to the newest that all have
follows    `RedoFetched(failure)`, from one          `ApplyRedo(failure)`: none replays any more
"""

from __future__ import annotations

from torchft_ckpt.core.coordination.messages import ApplyRedo, Loading, RedoFetched


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


class Replaying:
    """Knows up to which step the ranks of a group apply the redo entries that they fetch, each from its counterparts.

    The step of an optimizer whose tensors are sharded may call collectives of the group, so a rank applies an entry when all of
    them have it, and all bring the state to the same step: else one would wait for a rank that does something else.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.begin()

    def begin(self) -> None:
        self._said: dict[int, RedoFetched] = {}
        self._told = ApplyRedo(request_id=0, step=0)

    def fetched(self, rank: int, said: RedoFetched) -> ApplyRedo | None:
        """Return what all ranks are to be told, if anything, but for the number of their requests."""
        told = self._told
        if told.failure or told.is_last:
            return None
        before = self._said.get(rank)
        if before is not None and before.is_newest:  # once it was at the newest; the others come to that
            said = RedoFetched(request_id=said.request_id, step=said.step, is_newest=True, failure=said.failure)
        self._said[rank] = said
        if said.failure:
            why = f"group rank {rank}: {said.failure}" if self._world_size > 1 else said.failure
            return self._tell(ApplyRedo(request_id=0, step=told.step, failure=why))
        if len(self._said) < self._world_size:
            return None
        step = min(one.step for one in self._said.values())
        is_last = all(one.is_newest for one in self._said.values())
        return self._tell(ApplyRedo(request_id=0, step=step, is_last=is_last)) if step > told.step or is_last else None

    def give_up(self, reason: str) -> ApplyRedo | None:
        """A rank does not replay any more: none does."""
        if self._told.failure or self._told.is_last or not self._said:
            return None
        return self._tell(ApplyRedo(request_id=0, step=self._told.step, failure=reason))

    def _tell(self, told: ApplyRedo) -> ApplyRedo:
        self._told = told
        return told
