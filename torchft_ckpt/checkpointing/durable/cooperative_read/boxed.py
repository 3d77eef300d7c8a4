"""Boxes of a tensor that belong to no mesh, so that the transport can serve them: what a member has read for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchft_ckpt.checkpointing.state.shards import ShardAdapter, register_shard_adapter
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.errors import UnsupportedValueError


class BoxedTensor(torch.Tensor):
    """Stands for some boxes of a tensor. Nothing can be computed with it.

    Args:
        shape: of the whole tensor.
    """

    pieces: list[tuple[Box, torch.Tensor]]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[tuple[Box, torch.Tensor]]
    ) -> BoxedTensor:
        tensor: BoxedTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        tensor.pieces = list(pieces)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: only boxes of this tensor are here, to be served")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BoxedTensor({[*self.shape]}, {self.dtype}, {len(self.pieces)} boxes)"


class _BoxedAdapter(ShardAdapter):
    shares_memory = True

    def handles(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, BoxedTensor)

    def boxes(self, tensor: torch.Tensor, path: str) -> list[Box]:
        return [box for box, _ in _pieces_of(tensor, path)]

    def data(self, tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
        return [data for _, data in _pieces_of(tensor, path)]

    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        raise UnsupportedValueError("nothing is received for boxes that are served", "BoxedTensor")


def _pieces_of(tensor: torch.Tensor, path: str) -> list[tuple[Box, torch.Tensor]]:
    if not isinstance(tensor, BoxedTensor):
        raise UnsupportedValueError(f"state dict at {path!r}: not boxes to be served", path)
    return tensor.pieces


register_shard_adapter(_BoxedAdapter())
