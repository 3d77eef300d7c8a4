"""This file decides where a rank that starts takes its state from. It looks at step numbers alone; nobody is asked here.

The newest step wins, wherever it is; but where peers live and hold a state the job goes on from that one, and what disks have of
later steps is of a history that it left. Where several hold it, the nearest does: what is in memory costs nothing, peers cost the
network, a local disk its own speed, and storage is shared by everybody.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Rung(Enum):
    """Where a state can be, the nearest first."""

    MEMORY = "memory"
    PEERS = "peers"
    LOCAL_DISK = "local disk"
    STORAGE = "storage"
    NOTHING = "nothing"
    """Nobody holds a state: the job begins."""


class Choice(NamedTuple):
    """Where to take the state from, and why."""

    rung: Rung
    step: int | None
    """None where there is nothing."""
    reason: str
    """One sentence that names what the others hold."""


_HELD = {
    Rung.MEMORY: "memory holds {}",
    Rung.PEERS: "living peers hold {}",
    Rung.LOCAL_DISK: "the local disk has {}",
    Rung.STORAGE: "storage has {}",
}
_NOT_HELD = {
    Rung.MEMORY: "nothing is in memory",
    Rung.PEERS: "no living peer holds any",
    Rung.LOCAL_DISK: "no local disk has any",
    Rung.STORAGE: "storage has none",
}


def choose_rung(
    own_step: int | None, peers_step: int | None, local_step: int | None, storage_step: int | None
) -> Choice:
    """Choose the newest step, and the nearest of those who hold it.

    Args:
        own_step: of the state in this process's memory; None where there is no whole one.
        peers_step: the newest that a living peer holds; None where none does.
        local_step: the newest that is whole over the local disks of all members; None where none is.
        storage_step: the newest that is whole in storage; None where none is.

    Returns:
        the rung, the step, and a sentence for the log.
    """
    held = {
        Rung.MEMORY: own_step,
        Rung.PEERS: peers_step,
        Rung.LOCAL_DISK: local_step,
        Rung.STORAGE: storage_step,
    }
    alive = {rung: step for rung, step in held.items() if peers_step is None or rung in (Rung.MEMORY, Rung.PEERS)}
    newest = max((step for step in alive.values() if step is not None), default=None)
    chosen = next((rung for rung, step in alive.items() if step is not None and step == newest), Rung.NOTHING)
    others = ", ".join(
        _NOT_HELD[rung] if step is None else _HELD[rung].format(step) for rung, step in held.items() if rung != chosen
    )
    what = "there is no state to go on from" if newest is None else f"step {newest} from {chosen.value}"
    return Choice(chosen, newest, f"{what}: {others}")
