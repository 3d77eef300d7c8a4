"""The table of idioms: what users write, what was wrong with it, and what they have to know.

A loop enters it by the decorator `idiom`; `TABLE` holds all of them in the order of the page that is made of it. What differs in
a part alone (the optimizer, the model) is in one loop, side by side: it has a decorator for each of its lines.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from idioms.harness import Job


class Category(Enum):
    """The page's chapters, in their order."""

    STEP = "The step and the optimizer"
    RATE = "Learning rates and schedules"
    GRADIENT = "Gradients: accumulating, clipping, adding to them"
    PRECISION = "Mixed precision"
    MODEL = "Models"
    WEIGHTS = "Averaged weights, evaluation, copies"
    DISCARDED = "What a step changes before the vote, and steps that are discarded"
    FLOW = "Skipped batches, stopping, resuming"
    DATA = "Data, logging, random numbers"
    STATE = "What is registered"
    ORDER = "The order of the lines"
    SHARDED = "Sharded models"
    OUTER = "DiLoCo and LocalSGD"
    DURABLE = "Checkpoints: a job that is stopped and started again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idiom:
    """One way to write a training loop, or a part of it; a line of the page."""

    name: str
    """As a user would say it."""
    category: Category
    loop: Callable[[Job], None]
    know: str = ""
    """What to know about it; a sentence of the page."""
    was: str = "right"
    """How it was when it entered the table: "right", or what was wrong."""
    pending: str = ""
    """What still has to be mended before it holds."""
    refused: str = ""
    """The name of the error by which it is refused; then no bits are compared."""
    says: str = ""
    """A regular expression: what the error says, or a warning in the log."""
    waits: bool = False
    """Group 1 waits for ever, and is told why; group 0 trains alone."""
    own: tuple[str, ...] = ()
    """Parts of the paths in the registered state of which each group has its own value."""
    late: tuple[str, ...] = ()
    """Parts of the paths that differ some steps after a return until groups are compared: they are equal at the end of a longer
    run, in which a group dies later."""
    dies: bool = True
    """Whether a group dies and returns; never where it is refused, or nothing is compared."""
    restarts: bool = False
    """Whether it is run as a job that is stopped and started again, instead of the other runs."""
    compare: str = "plain"
    """"plain": with the plain loop; "groups": the groups with each other, where nothing plain computes the same bits;
    "nothing": where the loop is wrong, and a warning is all that it gets."""
    num_discards: int = 0
    """So many steps are discarded at least, and the plain loop, which makes those alone that count, knows nothing of them."""
    num_groups: int = 2
    gloo: bool = False
    """Real Gloo instead of the process group in memory."""

    @property
    def is_forbidden(self) -> bool:
        """Whether the page says that a loop may not do so."""
        return bool(self.refused) or self.waits or self.compare == "nothing"

    @property
    def key(self) -> str:
        return self.loop.__name__


_found: list[Idiom] = []


def idiom(
    name: str, category: Category, know: str = "", **options: object
) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    """Enter a loop into the table."""

    def enter(loop: Callable[[Job], None]) -> Callable[[Job], None]:
        first = next(
            (place for place, line in enumerate(_found) if line.loop is loop), len(_found)
        )  # the lowest enters first
        _found.insert(first, Idiom(name=name, category=category, loop=loop, know=know, **options))  # type: ignore[arg-type]
        return loop

    return enter


def _collect() -> tuple[Idiom, ...]:
    from idioms import loops

    for module in pkgutil.iter_modules(loops.__path__):
        importlib.import_module(f"idioms.loops.{module.name}")
    order = list(Category)
    return tuple(sorted(_found, key=lambda found: order.index(found.category)))


def table() -> tuple[Idiom, ...]:
    """Return all idioms, chapter by chapter."""
    return _collect()


def loops() -> tuple[Idiom, ...]:
    """Return one line of each loop, which says how the loop is run."""
    return tuple({line.loop: line for line in _collect()}.values())
