"""One microbatch in each so many steps is computed by two further groups too, and what they have is compared bit by bit.

Which one, and by whom, follows from the step and from who is there (`core.training.microbatches`). It is computed among the other
microbatches of a group, as each of them is: a quiet machine gives bits twice that a busy one does not. What counts is what the
group has computed that it was dealt to, whatever is found.

Digests travel in one sum of bytes, after that of the step, in which each of the three groups has a row. So all groups find the
same. Their votes say it, and the lighthouse does what `on_replicas_differ` says (`core.coordination.equality`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

from torchft_ckpt.core.coordination.equality import alike
from torchft_ckpt.core.coordination.messages import clip
from torchft_ckpt.core.training.microbatches import Node, audited, auditors
from torchft_ckpt.events import MicrobatchDiffers
from torchft_ckpt.manager.showing import digest_of

if TYPE_CHECKING:
    from torchft_ckpt.core.coordination.messages import Answer
    from torchft_ckpt.exact.captured import Layout, Left
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)
_NAME_BYTES, _DIGEST_BYTES = 512, 8
_SAID, _LOGGED = "its weight", "what is logged"


class Audit:
    """The audits of one rank.

    Args:
        every: a microbatch of each so many steps; 0: of none.
    """

    def __init__(self, manager: Manager, every: int, num_microbatches: int) -> None:
        self._manager, self.every, self._num_microbatches = manager, every, num_microbatches
        self._shown: tuple[int, bytes] = (-1, b"")
        """A step, and digests of what its audited microbatch left behind here. They stay over a discard, as that does."""
        self._has_told_of_logs = False

    def microbatch(self, step: int) -> int | None:
        """Return which microbatch of a step is audited."""
        return audited(step, self.every, self._num_microbatches)

    def groups(self, formed: Answer, nodes: Sequence[Sequence[Node]]) -> list[int]:
        """Return the replica ranks that compute it: first the one that it is dealt to, by `nodes`. Empty: it is not audited."""
        number = self.microbatch(formed.version.step)
        if number is None:
            return []
        owner = next(rank for rank, own in enumerate(nodes) if any(first <= number < end for first, end in own))
        said = formed.nodes or [[]] * formed.replica_world_size
        found = auditors(formed.version.step, owner, [rank for rank, own in enumerate(said) if own is not None])
        return found if len(found) > 1 else []

    def note(self, step: int, left: Left) -> None:
        """A microbatch was computed, and nobody has taken what it leaves behind."""
        if left.number == self.microbatch(step):
            tensors = [*left.gradients, *left.layout.buffers(), left.said, left.values]
            digests = (bytes(_DIGEST_BYTES) if one is None else bytes.fromhex(digest_of(one)) for one in tensors)
            self._shown = step, b"".join(digests)

    def compare(self, formed: Answer, layout: Layout, groups: Sequence[int]) -> None:
        """Compare what the groups have left behind that have computed it. All ranks of the process group call this."""
        step, rank = formed.version.step, formed.replica_rank
        size = _NAME_BYTES + _DIGEST_BYTES * len([*layout.names, _SAID, _LOGGED])
        rows = torch.zeros(len(groups), size, dtype=torch.uint8, device=layout.device)
        if rank in groups and self._shown[0] == step:
            # Of a longer name its end, which no other group has.
            name = self._manager.replica_id().encode()[-_NAME_BYTES:].ljust(_NAME_BYTES, b"\0")
            rows[groups.index(rank)] = torch.frombuffer(bytearray(name + self._shown[1]), dtype=torch.uint8)
        is_there = self._manager.allreduce(rows, reduce_op=ReduceOp.SUM).wait()
        rows = rows.cpu()  # on a device the bytes may be anything if the collective was broken off meanwhile
        if not is_there or self._manager.errored() is not None:
            return
        shown = {
            clip(row[:_NAME_BYTES].rstrip(b"\0").decode(errors="replace")): [
                row[at : at + _DIGEST_BYTES].hex() for at in range(_NAME_BYTES, size, _DIGEST_BYTES)
            ]
            for row in (one.numpy().tobytes() for one in rows)
            if any(row)
        }
        if len(alike(shown)) > 1:
            self._tell(formed, layout, shown)

    def _tell(self, formed: Answer, layout: Layout, shown: dict[str, list[str]]) -> None:
        (right, *others), number = alike(shown), self.microbatch(formed.version.step) or 0
        wrong, said = others[0][0] if len(right) > 1 else None, [clip(name, 100) for name in shown]
        if wrong is not None:
            who = f"{clip(wrong, 100)} has other bits than {' and '.join(clip(name, 100) for name in right)}"
        elif len(shown) > 2:
            who = f"{', '.join(said)} have other bits each"
        else:
            who = f"{' and '.join(said)} have other bits, and no third group is there to say which is right"
        differs = [n for n, of in enumerate(zip(*shown.values(), strict=True)) if len({*of}) > 1]
        names = [*layout.names, _SAID, _LOGGED]
        logs = f"{_LOGGED} {'differs too' if names[differs[-1]] == _LOGGED else 'is equal'}"
        told = f"{len(differs)} of {len(names)} values differ, the first is {clip(names[differs[0]], 100)}; {logs}"
        if names[differs[0]] != _LOGGED:
            self._manager.hooks.note_found(
                f"microbatch {number} of step {formed.version.step}: {who}. {told}. A weight has changed, a machine computes"
                " wrongly, kernels do not repeat their bits, or random numbers do not follow from the step"
            )
        elif not self._has_told_of_logs:  # a time, say: nothing that is trained depends on it
            self._has_told_of_logs = True
            logger.warning("microbatch %d of step %d: %s in %s alone", number, formed.version.step, who, _LOGGED)
        self._manager.hooks.events.add(
            MicrobatchDiffers(
                step=formed.version.step,
                quorum_id=formed.quorum_id,
                replica_id=self._manager.replica_id(),
                microbatch=number,
                groups=tuple(shown),
                wrong=wrong,
                first=names[differs[0]],
            )
        )
