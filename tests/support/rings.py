"""Groups whose members are threads of the test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from support.fake_process_group import FakeProcessGroup
from torchft_ckpt.process_group import ProcessGroup, ProcessGroupGloo
from torchft_ckpt.process_group.session import SessionPhase

T = TypeVar("T")
PATIENCE = timedelta(seconds=300)
"""How long an operation of a Gloo ring may take: far longer than FREED_WITHIN, within which an abort or a loss ends it."""
FREED_WITHIN = timedelta(seconds=60)
"""Far longer than that takes, as the machine may be busy."""


def is_connecting(group: ProcessGroup) -> bool:
    """Whether a configure of this group is in progress."""
    if isinstance(group, ProcessGroupGloo):
        return group._session is not None and group._session.phase is SessionPhase.CONNECTING
    assert isinstance(group, FakeProcessGroup)
    return group._ring is not None and len(group._ring.members) < group._ring.world_size


class Ring:
    """Members of one group, each driven by its own thread."""

    def __init__(self, members: list[ProcessGroup], new_address: Callable[[], str]) -> None:
        self.members = members
        self.new_address = new_address
        self._pool = ThreadPoolExecutor(len(members))

    def each(self, action: Callable[[int, ProcessGroup], T], ranks: list[int] | None = None) -> list[T | Exception]:
        """Do it on every member (of `ranks`) at once; return what each returned or raised."""

        def attempt(rank: int) -> T | Exception:
            try:
                return action(rank, self.members[rank])
            except Exception as error:
                return error

        return list(self._pool.map(attempt, range(len(self.members)) if ranks is None else ranks))

    def configure(self, ranks: list[int] | None = None) -> None:
        """Connect all members (or those, with new ranks in that order) under a fresh prefix."""
        ranks = list(range(len(self.members))) if ranks is None else ranks
        address = self.new_address()
        outcomes = self.each(lambda r, pg: pg.configure(address, f"r{r}", ranks.index(r), len(ranks), 7), ranks)
        assert outcomes == [None] * len(ranks)

    def close(self) -> None:
        for member in self.members:
            member.shutdown()
        self._pool.shutdown()
