"""A group around another one: every call goes to that one, but for what a subclass changes."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch.distributed import Work

from torchft_ckpt.errors import ProcessGroupError
from torchft_ckpt.process_group.base import ProcessGroup


class ProcessGroupWrapper(ProcessGroup):
    """A process group around another one.

    Args:
        timeout: there for torchft's sake: the operations' timeouts are those of `pg`.
        pg: the group to pass everything on to. A subclass that is given none has to do everything itself.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), pg: ProcessGroup | None = None) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # rank and size; the stub lacks this constructor
        self._pg = pg

    @property
    def parent(self) -> ProcessGroup:
        """The group that was handed in.

        Raises:
            ProcessGroupError: none was.
        """
        if self._pg is None:
            raise ProcessGroupError(f"{self!r} is around no group that was handed in")
        return self._pg

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        self.parent.configure(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        )

    def _start_collective(self, collective: str, *arguments: Any) -> Work:
        return getattr(self.parent, collective)(*arguments)

    def abort(self, errored: bool = True) -> None:
        self.parent.abort(errored)

    def shutdown(self) -> None:
        self.parent.shutdown()

    def errored(self) -> Exception | None:
        return self.parent.errored()

    def prepare_store(self, store_addr: str) -> threading.Event:
        return self.parent.prepare_store(store_addr)

    def set_timeout(self, timeout: timedelta) -> None:
        self.parent.set_timeout(timeout)

    def use_hostname(self, hostname: str) -> None:
        self.parent.use_hostname(hostname)

    def size(self) -> int:
        return self.parent.size()

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.parent.rank()

    def getBackendName(self) -> str:
        return self.parent.getBackendName()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg!r})"
