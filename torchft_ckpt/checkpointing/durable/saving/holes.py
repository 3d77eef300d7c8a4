"""What this rank writes of what others left out: `core/filling.py` asked with what the manifests say. It writes nothing."""

from __future__ import annotations

from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.part_writer import PartShare, Writers
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.core.boxes import Box, contains, intersect
from torchft_ckpt.core.filling import deal_holes, deal_names
from torchft_ckpt.core.saving import Member


def share_of_holes(
    checkpoint: Checkpoint, state: CapturedState, writers: Writers, member: Member, *, alone: bool
) -> PartShare | None:
    """Return what this rank writes of the holes of a checkpoint; None where there is nothing for it to do.

    A share without boxes or values is still to be written: its manifest says what a rank holds of which there is none.

    Args:
        checkpoint: as its manifests are now.
        state: what this rank holds.
        writers: who saves.
        member: this rank.
        alone: write all that this rank can, whoever else may do so; else only its part of it.

    Raises:
        ValueError: boxes of the manifests are those of no mesh.
    """
    me = writers.number_of(*member)
    numbers = {tensor.fqn: number for number, tensor in enumerate(state.holdings)}
    values = {value.fqn: number for number, value in enumerate(state.values)}
    mine = {entry.fqn: [box_of(chunk) for chunk in entry.chunks] for entry in state.manifest.tensors}
    missing, lost_values = _missing(checkpoint, state)
    if alone:
        boxes = [
            (numbers[fqn], shared)
            for fqn, of_tensor in missing.items()
            for box in of_tensor
            for own in mine[fqn]
            if (shared := intersect(box, own)) is not None
        ]
        share = PartShare(boxes, [values[fqn] for fqn in lost_values])
    else:
        # What another one has filled by now is dealt as well: so all deal the same, whoever of them looks first.
        unfilled = Checkpoint(checkpoint.name, [part for part in checkpoint.parts if not part.name.fill])
        to_deal, values_to_deal = _missing(unfilled, state)
        held, holds_value = _known_holders(checkpoint, writers)
        for fqn, own_boxes in mine.items():
            held.setdefault(fqn, {})[me] = own_boxes
        for fqn in values:
            holds_value.setdefault(fqn, set()).add(me)
        sizes = {fqn: (state.holdings[numbers[fqn]].shape, state.holdings[numbers[fqn]].itemsize) for fqn in to_deal}
        dealt = deal_holes(to_deal, held, sizes, writers.num_members)[me]
        writer_of = deal_names(values_to_deal, {fqn: sorted(members) for fqn, members in holds_value.items()})
        share = PartShare(
            [
                (numbers[fqn], shared)
                for fqn, box in dealt
                if any(contains(own, box) for own in mine[fqn])
                for hole in missing.get(fqn, ())
                if (shared := intersect(box, hole)) is not None
            ],
            [values[fqn] for fqn in lost_values if writer_of.get(fqn) == me],
        )
    if not share.boxes and not share.values and not any(member.rank in run for run in checkpoint.holes().ranks):
        return None
    return share


def _missing(checkpoint: Checkpoint, state: CapturedState) -> tuple[dict[str, list[Box]], list[str]]:
    """Return the boxes, by fqn, and the values that are missing of what this rank knows."""
    holes = checkpoint.holes()
    values = {value.fqn for value in state.values}
    boxes: dict[str, list[Box]] = {}
    for tensor in state.holdings:
        if tensor.fqn not in checkpoint.tensors:  # no manifest names it yet
            boxes[tensor.fqn] = [held.box for held in tensor.held]
        elif tensor.fqn in holes.boxes:
            boxes[tensor.fqn] = holes.boxes[tensor.fqn]
    return boxes, sorted({*holes.values, *(fqn for fqn in values if fqn not in checkpoint.values)} & values)


def _known_holders(
    checkpoint: Checkpoint, writers: Writers
) -> tuple[dict[str, dict[int, list[Box]]], dict[str, set[int]]]:
    """Return who is known to hold what: those whose manifests are there got as far as writing them."""
    held: dict[str, dict[int, list[Box]]] = {}
    holds_value: dict[str, set[int]] = {}
    for part in checkpoint.parts:
        manifest = part.manifest
        if manifest.rank >= writers.num_ranks or manifest.replica >= writers.num_replicas:
            continue
        member = writers.number_of(manifest.replica, manifest.rank)
        for entry in manifest.tensors:
            held.setdefault(entry.fqn, {})[member] = [box.box for box in entry.boxes]
        for fqn in manifest.holds_values:
            holds_value.setdefault(fqn, set()).add(member)
    return held, holds_value
