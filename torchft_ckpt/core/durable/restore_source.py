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


_SAID = {
    RestoreSource.MEMORY: ("memory holds {}", "nothing is in memory"),
    RestoreSource.PEERS: ("living peers hold {}", "no living peer holds any"),
    RestoreSource.LOCAL_DISK: ("the local disk has {}", "no local disk has any"),
    RestoreSource.STORAGE: ("storage has {}", "storage has none"),
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
    held = dict(zip(_SAID, (own_step, peers_step, local_step, storage_step), strict=True))
    alive = [*held.items()][: len(held) if peers_step is None else 2]  # memory and peers
    newest = max((step for _, step in alive if step is not None), default=None)
    chosen = next((source for source, step in alive if step is not None and step == newest), RestoreSource.NOTHING)
    others = ", ".join(
        _SAID[source][step is None].format(step) for source, step in held.items() if source is not chosen
    )
    what = "there is no state to go on from" if newest is None else f"step {newest} from {chosen.value}"
    return Choice(chosen, newest, f"{what}: {others}")
