"""This file decides where a rank that starts takes its state from. It looks at step numbers alone; nobody is asked here.

The newest step wins, wherever it is; but where peers live and hold a state the job goes on from that one, and what disks have of
later steps is of a history that it left. Where several hold it, the nearest does: what is in memory costs nothing, peers cost the
network, a local disk its own speed, and storage is shared by everybody.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RestoreSource(Enum):
    """Where a state can be, the nearest first."""

    MEMORY = "memory"
    PEERS = "peers"
    LOCAL_DISK = "local disk"
    STORAGE = "storage"
    NOTHING = "nothing"
    """Nobody holds a state: the job begins."""


class Choice(NamedTuple):
    """Where to take the state from, and why."""

    source: RestoreSource
    step: int | None
    """None where there is nothing."""
    reason: str
    """One sentence that names what the others hold."""


_HELD = {
    RestoreSource.MEMORY: "memory holds {}",
    RestoreSource.PEERS: "living peers hold {}",
    RestoreSource.LOCAL_DISK: "the local disk has {}",
    RestoreSource.STORAGE: "storage has {}",
}
_NOT_HELD = {
    RestoreSource.MEMORY: "nothing is in memory",
    RestoreSource.PEERS: "no living peer holds any",
    RestoreSource.LOCAL_DISK: "no local disk has any",
    RestoreSource.STORAGE: "storage has none",
}


def choose_restore_source(
    own_step: int | None, peers_step: int | None, local_step: int | None, storage_step: int | None
) -> Choice:
    """Choose the newest step, and the nearest of those who hold it.

    Args:
        own_step: of the state in this process's memory; None where there is no whole one.
        peers_step: the newest that a living peer holds; None where none does.
        local_step: the newest that is whole over the local disks of all members; None where none is.
        storage_step: the newest that is whole in storage; None where none is.

    Returns:
        the place, the step, and a sentence for the log.
    """
    held = {
        RestoreSource.MEMORY: own_step,
        RestoreSource.PEERS: peers_step,
        RestoreSource.LOCAL_DISK: local_step,
        RestoreSource.STORAGE: storage_step,
    }
    alive = {
        source: step
        for source, step in held.items()
        if peers_step is None or source in (RestoreSource.MEMORY, RestoreSource.PEERS)
    }
    newest = max((step for step in alive.values() if step is not None), default=None)
    chosen = next(
        (source for source, step in alive.items() if step is not None and step == newest), RestoreSource.NOTHING
    )
    others = ", ".join(
        _NOT_HELD[source] if step is None else _HELD[source].format(step)
        for source, step in held.items()
        if source != chosen
    )
    what = "there is no state to go on from" if newest is None else f"step {newest} from {chosen.value}"
    return Choice(chosen, newest, f"{what}: {others}")
