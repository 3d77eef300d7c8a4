"""Says which parameters are trained here and never exchanged: nothing else would, and the replica groups come apart in them.

An outer loop exchanges the parameters of its modules that need a gradient when it is made. Others can be trained beside these:
the inner optimizer has some that are in none of the modules, or some that were frozen are unfrozen later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from torchft_ckpt.outer.fragment import Fragment

logger = logging.getLogger(__name__)

_NUM_NAMED = 3


class LeftOut:
    """Compares what is trained with what is exchanged. Used by the training thread.

    Args:
        fragments: of the outer loop.
        inner_optimizer: trains them, and maybe more.
    """

    def __init__(self, fragments: Sequence[Fragment], inner_optimizer: torch.optim.Optimizer) -> None:
        self._fragments = list(fragments)
        self._inner_optimizer = inner_optimizer
        self._exchanged = {id(param) for fragment in fragments for param in fragment.trained.values()}
        self._unfrozen: set[int] = set()
        self._foreign: set[int] = set()

    def warn(self) -> None:
        """Name in the log what is trained and not exchanged, as far as that was not so when it was called last."""
        unfrozen = dict(self._find_unfrozen())
        foreign = dict(self._find_foreign())
        if new := [name for key, name in unfrozen.items() if key not in self._unfrozen]:
            logger.warning(
                "parameters that needed no gradient when the outer loop was made need one now (%d: %s): they are not exchanged,"
                " no other replica group gets what is trained of them; make the loop before they are frozen",
                len(new),
                _some(new),
            )
        if new := [name for key, name in foreign.items() if key not in self._foreign]:
            logger.warning(
                "the inner optimizer trains parameters that are in no module of the outer loop (%d: %s): they are not exchanged,"
                " each replica group keeps its own",
                len(new),
                _some(new),
            )
        self._unfrozen, self._foreign = set(unfrozen), set(foreign)

    def _find_unfrozen(self) -> Iterator[tuple[int, str]]:
        for number, fragment in enumerate(self._fragments):
            for name, param in fragment.params.items():
                if param.requires_grad and id(param) not in self._exchanged:
                    yield id(param), name if len(self._fragments) == 1 else f"{name} of fragment {number}"

    def _find_foreign(self) -> Iterator[tuple[int, str]]:
        held = {id(param) for fragment in self._fragments for param in fragment.params.values()}
        for number, group in enumerate(self._inner_optimizer.param_groups):
            names = group.get("param_names") or [f"{place} of group {number}" for place in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                if param.requires_grad and id(param) not in held:
                    yield id(param), f"{name}, of shape {tuple(param.shape)}"


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:_NUM_NAMED]) + ("; ..." if len(names) > _NUM_NAMED else "")
