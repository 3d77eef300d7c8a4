"""Finds what is trained here and is in no state: it comes apart between replica groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torchft_ckpt.checkpointing.state.shards import memory_of
from torchft_ckpt.manager.showing import CheckedLeaf
from torchft_ckpt.manager.volatile import leaves_in

_SAMPLE_ELEMENTS = 16


def left_out_of(state: Any, owned: Iterable[CheckedLeaf]) -> list[str]:
    """Return what optimizers train, and remember of it, that a state does not hold, neither as that memory nor as a copy.

    Nothing where that is not known, because the state has as many bytes in another form. Frozen parameters do not count, nor
    single numbers that are remembered, as Adam's steps are. On the training thread.

    Args:
        state: as the registered functions returned it.
        owned: what optimizers own among it, as `leaves_to_compare` found it beside this state.
    """
    trained = [
        (leaf, part)
        for leaf in owned
        if leaf.is_owned and isinstance(leaf.value, torch.Tensor)
        if (leaf.value.requires_grad if ".parameter " in leaf.place else leaf.value.numel() > 1)
        for part in memory_of(leaf.value)
    ]
    lacking = [
        (leaf.name, part) for leaf, part in trained if leaf.name == leaf.place
    ]  # else it is at a path of the state
    if not lacking:
        return []
    known = {part.data_ptr() for _, part in trained}
    leaves = list(leaves_in(state))
    parts = [part for leaf in leaves if isinstance(leaf, torch.Tensor) for part in memory_of(leaf)]
    parts = [part for part in parts if part.data_ptr() not in known]
    copies = {_sample(part) for part in parts}
    lacking = [(name, part) for name, part in lacking if _sample(part) not in copies]
    sizes = {part.numel() for _, part in lacking}
    others = [part.nbytes for part in parts if part.numel() not in sizes]
    others += [memoryview(leaf).nbytes for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return [name for name, _ in lacking] if sum(others) < sum(part.nbytes for _, part in lacking) else []


def _sample(part: torch.Tensor) -> tuple[int, str]:
    return part.numel(), str(part.detach().reshape(-1)[:_SAMPLE_ELEMENTS].tolist())
