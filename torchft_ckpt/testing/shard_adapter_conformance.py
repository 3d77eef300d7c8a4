"""The check of the promises of a `ShardAdapter`: what it says of a tensor is right, and the tensor travels and comes back.

def test_my_adapter_conforms():
    check_shard_adapter(MyAdapter(), make_tensor=lambda seed: my_tensor_of(seed))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from torchft_ckpt.checkpointing import HTTPTransport, register_shard_adapter
from torchft_ckpt.checkpointing.state.shards import ShardAdapter, unregister_shard_adapter
from torchft_ckpt.core.boxes.geometry import Box, fits, intersect, missing_boxes
from torchft_ckpt.testing.conformance import ConformanceError, bits_of, require

__all__ = ["ConformanceError", "check_shard_adapter"]
_PARTY = "shard adapter"
_LIMIT = timedelta(seconds=20)


def check_shard_adapter(
    adapter: ShardAdapter, make_tensor: Callable[[int], torch.Tensor], *, rank: int = 0, num_ranks: int = 1
) -> None:
    """Check all that can be seen in one process. The adapter is registered meanwhile.

    Args:
        adapter: one that is not registered.
        make_tensor: returns a tensor of the adapter's class: the same for the same seed, with other values and the same layout
            for another one.
        rank: of this process in its replica group.
        num_ranks: of the group.

    Raises:
        ConformanceError: a promise was broken.
    """
    tensor, other = make_tensor(1), make_tensor(2)
    require(_PARTY, adapter.handles(tensor), "handles() does not know a tensor of the class")
    plain = torch.zeros(2, device="cpu")
    require(_PARTY, not adapter.handles(plain), "handles() takes a plain tensor for one of the class")
    _check_boxes(adapter, tensor)
    _check_rebuild(adapter, tensor, other)
    _check_holders(adapter, tensor, rank, num_ranks)
    register_shard_adapter(adapter)
    try:
        _check_travels(adapter, tensor, other)
    finally:
        unregister_shard_adapter(adapter)


def _check_boxes(adapter: ShardAdapter, tensor: torch.Tensor) -> None:
    boxes, parts = adapter.boxes(tensor, "tensor"), adapter.data(tensor, "tensor")
    require(_PARTY, len(boxes) == len(parts), f"there are {len(boxes)} boxes and {len(parts)} parts with data")
    both, both_parts = adapter.boxes_and_data(tensor, "tensor")
    is_same = list(both) == list(boxes) and _are_equal(both_parts, parts)
    require(_PARTY, is_same, "boxes_and_data() says something else than boxes() and data()")
    for box, part in zip(boxes, parts, strict=True):
        require(_PARTY, fits(box, tensor.shape), f"{box} does not lie in a tensor of shape {tuple(tensor.shape)}")
        is_plain = type(part) in (torch.Tensor, torch.nn.Parameter)
        require(_PARTY, is_plain, f"the data of {box} are a {type(part).__name__}, no plain tensor")
        found = (tuple(part.shape), part.dtype)
        require(_PARTY, found == (tuple(box.sizes), tensor.dtype), f"the data of {box} are {found}")
    _require_apart(boxes)


def _check_rebuild(adapter: ShardAdapter, tensor: torch.Tensor, other: torch.Tensor) -> None:
    parts = [part.clone() for part in adapter.data(tensor, "tensor")]
    rebuilt = adapter.rebuild(other, [part.clone() for part in parts])
    is_of_class = type(rebuilt) is type(tensor) and adapter.handles(rebuilt)
    require(_PARTY, is_of_class, f"rebuild() made a {type(rebuilt).__name__} of a {type(tensor).__name__}")
    has_layout = adapter.boxes(rebuilt, "tensor") == adapter.boxes(other, "tensor")
    require(_PARTY, has_layout, "what rebuild() made has other boxes than the tensor that it is to be like")
    require(
        _PARTY, _are_equal(adapter.data(rebuilt, "tensor"), parts), "what rebuild() made holds other bits than its data"
    )


def _check_holders(adapter: ShardAdapter, tensor: torch.Tensor, rank: int, num_ranks: int) -> None:
    holders = adapter.holders(tensor, num_ranks)
    if holders is None:
        return
    boxes = [box for box, _ in holders]
    _require_apart(boxes)
    missing = missing_boxes(tensor.shape, boxes)
    require(_PARTY, missing == [], f"holders() says of {', '.join(map(str, missing))} that nobody holds it")
    wrong = sorted({who for _, ranks in holders for who in ranks if not 0 <= who < num_ranks})
    require(_PARTY, wrong == [], f"holders() names ranks {wrong} of a group of {num_ranks}")
    here = {box for box in adapter.boxes(tensor, "tensor") if box.volume}
    said = {box for box, ranks in holders if rank in ranks and box.volume}
    require(_PARTY, here == said, "holders() says something else of this rank than boxes()")


def _check_travels(adapter: ShardAdapter, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """A receiver gets the sender's bits, on its own layout."""
    wanted = [part.clone() for part in adapter.data(tensor, "tensor")]
    source: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    receiver: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    try:
        source.send_checkpoint([1], 1, {"tensor": tensor}, _LIMIT)
        here = {"tensor": other}
        received = receiver.fetch_checkpoint([source.metadata()], 1, _LIMIT, local_state=here)["tensor"]
    finally:
        source.shutdown()
        receiver.shutdown()
    require(
        _PARTY,
        type(received) is type(tensor),
        f"a {type(received).__name__} arrived instead of a {type(tensor).__name__}",
    )
    require(
        _PARTY,
        _are_equal(adapter.data(received, "tensor"), wanted),
        "the tensor arrived with other bits than were sent",
    )


def _require_apart(boxes: Sequence[Box]) -> None:
    for index, box in enumerate(boxes):
        for later in boxes[index + 1 :]:
            require(_PARTY, intersect(box, later) is None, f"{box} and {later} have elements in common")


def _are_equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits_of(one), bits_of(other))
        for one, other in zip(found, wanted, strict=True)
    )
