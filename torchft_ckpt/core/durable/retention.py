"""This file decides which durable checkpoints may be removed. It removes nothing, and does not know what makes one whole.

What is newer than the newest whole checkpoint is never removed: it may be in the making, and nobody can say by whom. Nor is
that one itself. Of the older ones, a checkpoint that is not whole is treated as one that is: it may be a hole that somebody
is about to fill, or one that cannot be read today. The exception is a full storage (`plan_abandoned`): what dead writers left
there would keep all later saves from becoming whole.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from torchft_ckpt.errors import ConfigError


class HasStep(Hashable, Protocol):
    """The name of a checkpoint. Names are ordered as their checkpoints are, by step first."""

    @property
    def step(self) -> int:
        """The step that was saved."""

    def __lt__(self, other: Any, /) -> bool: ...


Name = TypeVar("Name", bound=HasStep)


def plan_removals(
    checkpoints: Iterable[Name],
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    whole: Collection[Name],
    in_flight: Collection[Name] = (),
) -> list[Name]:
    """Return the checkpoints that may be removed, oldest first: those than which `keep_last` whole ones are newer.

    Args:
        checkpoints: the names of all that are there, in any order.
        keep_last: how many of the newest whole ones stay, at least 1; None keeps all.
        keep_every: what is of a multiple of this step stays for ever; None: nothing does.
        whole: those that are whole, as far as is known. What is not in `checkpoints` does not count.
        in_flight: those that are being written or read, which stay too.

    Raises:
        ConfigError: `keep_last` or `keep_every` is less than 1.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: at least 1 was expected, or None", name)
    if keep_last is None:
        return []
    num_newer_whole = 0
    removals: list[Name] = []
    for checkpoint in sorted(set(checkpoints), reverse=True):
        is_kept = checkpoint in in_flight or (keep_every is not None and checkpoint.step % keep_every == 0)
        if num_newer_whole >= keep_last and not is_kept:
            removals.append(checkpoint)
        num_newer_whole += checkpoint in whole
    return removals[::-1]


def plan_abandoned(
    before: Mapping[Name, object], after: Mapping[Name, object], *, in_flight: Collection[Name] = ()
) -> list[Name]:
    """Return the checkpoints that nobody writes any more, oldest first: those in which nothing changed between two looks.

    Args:
        before: what is in those that are not whole, in any form that can be compared.
        after: the same, so much later that a writer that lives would have written something.
        in_flight: those that are being written, which are not meant.
    """
    return sorted(
        name for name, content in before.items() if name not in in_flight and name in after and after[name] == content
    )
