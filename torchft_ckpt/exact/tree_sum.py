"""The sum of a step's microbatches over the groups of a quorum: bits that depend on the microbatches alone.

Each rank owns a shard of the flat tensors. It gets that shard of each node that another rank holds, adds them all as the tree
says, and gives the sum to all. With one node a rank this sends the bytes that a ring's allreduce sends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllToAllOptions

from torchft_ckpt.core.training.microbatches import Node, fold
from torchft_ckpt.process_group import ProcessGroup


class TreeSum:
    """One sum. It is a way for `Hooks.reduce_by` to reduce over the process group.

    Args:
        nodes: of each rank of the process group: the nodes that it holds; together they cover the tree.
        held: this rank's, by node: flat tensors, the same number and sizes in all ranks. They are left as they are.
        out: flat tensors as these, that get the sum.
    """

    def __init__(
        self,
        num_microbatches: int,
        nodes: Sequence[Sequence[Node]],
        held: Mapping[Node, Sequence[torch.Tensor]],
        out: Sequence[torch.Tensor],
    ) -> None:
        self._num_microbatches, self._nodes, self._held, self._out = num_microbatches, nodes, held, out
        dealt = " | ".join(" ".join(f"{first}-{end}" for first, end in one) for one in nodes)
        self.name = f"a tree of {num_microbatches} ({dealt}), {[(str(one.dtype), one.numel()) for one in out]}"
        """In words: equal in all ranks that may start it together."""

    def reduce(self, group: ProcessGroup, tensor: torch.Tensor, *, divisor: int | None, timeout: timedelta) -> None:
        """Sum into `out`, of which `tensor` is the first. Call it on a thread that may block.

        Raises:
            Exception: what a send or receive raised. The group was aborted then, and `out` may be written to yet.
        """
        deadline, sends_together = time.monotonic() + timeout.total_seconds(), "nccl" in group.getBackendName().lower()
        if self._out[0].device.type != "cpu" and not sends_together:
            here = [torch.empty_like(flat, device="cpu") for flat in self._out]
            held = {node: [flat.cpu() for flat in flats] for node, flats in self._held.items()}
            TreeSum(self._num_microbatches, self._nodes, held, here).reduce(
                group, tensor, divisor=None, timeout=timeout
            )
            for flat, summed in zip(self._out, here, strict=True):
                flat.copy_(summed)
            return
        try:
            if sends_together:
                self._reduce_by_alltoall(group, timeout)
            else:
                self._gather(group, self._exchange(group, deadline), deadline)
        except Exception:
            group.abort()
            raise

    def _reduce_by_alltoall(self, group: ProcessGroup, timeout: timedelta) -> None:
        """Sum where sends and receives are to be started together, as with NCCL. Both exchanges are all-to-all."""
        options, rank, size = AllToAllOptions(), group.rank(), group.size()
        options.timeout = timeout
        for place, out in enumerate(self._out):
            cuts = _cuts(out.numel(), size)
            lengths = [end - first for first, end in cuts]
            own = self._nodes[rank]
            sent = torch.cat([self._held[node][place][slice(*cut)] for cut in cuts for node in own] or [out[:0]])
            num_nodes = [len(nodes) for nodes in self._nodes]
            space = torch.empty(sum(num_nodes) * lengths[rank], dtype=out.dtype, device=out.device)
            received, given = [num * lengths[rank] for num in num_nodes], [len(own) * length for length in lengths]
            group.alltoall_base(space, sent, received, given, options).wait()
            parts = space.split(lengths[rank]) if lengths[rank] else [space] * sum(num_nodes)
            mine = dict(zip([node for nodes in self._nodes for node in nodes], parts, strict=True))
            total = _added(mine, set(), self._num_microbatches)
            group.alltoall_base(out, total.repeat(size), lengths, [lengths[rank]] * size, options).wait()
            if out.is_cuda:
                out.record_stream(torch.cuda.current_stream(out.device))

    def _exchange(self, group: ProcessGroup, deadline: float) -> list[dict[Node, torch.Tensor]]:
        """Return this rank's shard of each node, for each of the flat tensors."""
        rank, others = group.rank(), [other for other in range(group.size()) if other != group.rank()]
        shards, works = list[dict[Node, torch.Tensor]](), list[Work]()
        for place, out in enumerate(self._out):
            cuts = _cuts(out.numel(), group.size())
            mine = {node: self._held[node][place][slice(*cuts[rank])] for node in self._nodes[rank]}
            for other in others:
                for number, node in enumerate(self._nodes[other]):
                    mine[node] = torch.empty(cuts[rank][1] - cuts[rank][0], dtype=out.dtype, device=out.device)
                    works += _start(group.recv, mine[node], other, self._tag(place, number))
            for number, node in enumerate(self._nodes[rank]):
                for other in others:
                    part = self._held[node][place][slice(*cuts[other])]
                    works += _start(group.send, part, other, self._tag(place, number))
            shards.append(mine)
        _wait(works, deadline)
        return shards

    def _gather(self, group: ProcessGroup, shards: list[dict[Node, torch.Tensor]], deadline: float) -> None:
        works, rank = list[Work](), group.rank()
        own = {*self._nodes[rank]}
        for place, (out, mine) in enumerate(zip(self._out, shards, strict=True)):
            cuts = _cuts(out.numel(), group.size())
            for other in range(group.size()):
                if other != rank:
                    works += _start(group.recv, out[slice(*cuts[other])], other, self._tag(place, -1))
            total = out[slice(*cuts[rank])]
            total.copy_(_added(mine, own, self._num_microbatches))
            for other in range(group.size()):
                if other != rank:
                    works += _start(group.send, total, other, self._tag(place, -1))
        _wait(works, deadline)

    def _tag(self, place: int, number: int) -> int:
        return 2 + number + place * (1 + max(map(len, self._nodes)))


def _added(parts: dict[Node, torch.Tensor], own: set[Node], num_microbatches: int) -> torch.Tensor:
    """Add by the tree, in the memory of what was received; what is `own` stays as it is."""
    kept = {parts[node].data_ptr() for node in own}

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.data_ptr() not in kept:
            return left.add_(right)
        return right.add_(left) if right.data_ptr() not in kept else left + right  # a + b is b + a, to the bit

    return fold(parts, num_microbatches, add)


def _cuts(num_elements: int, num_ranks: int) -> list[tuple[int, int]]:
    size = -(-num_elements // num_ranks)
    return [(min(num_elements, rank * size), min(num_elements, (rank + 1) * size)) for rank in range(num_ranks)]


def _start(how: object, tensor: torch.Tensor, other: int, tag: int) -> list[Work]:
    return [how([tensor], other, tag)] if tensor.numel() else []  # type: ignore[operator]


def _wait(works: Sequence[Work], deadline: float) -> None:
    for work in works:
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
