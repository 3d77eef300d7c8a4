"""One entry of a redo log: what the optimizers of a healthy replica saw in one committed step, as a state of the state format.

So it has a manifest, a byte space and digests like any state, and is served and received by what serves and receives states. Its
tree is, and MUST be:

    {"after": [step, quorum, epoch], "version": [step, quorum, epoch], "batches_committed": integer,
     "steps": [step of an optimizer, ...]}

and a step of an optimizer, in the order in which they were made:

    {"optimizer": its number among those that are guarded,
     "settings": for it and each optimizer in it, for each parameter group, {name: scalar},
     "attributes": {name: scalar},
     "gradients": for each parameter null or a tensor}

A scalar is null, a boolean, a number, a string, a tensor of one element, or a tuple or list of scalars, 4 levels at most. A
gradient has the shape and the dtype of the parameter, and the boxes of it that are here; its bytes are in C order. `version` is
one step after `after`, and the step of the manifest.

Whoever receives an entry has the parameters. What does not fit them is refused before memory is taken, so an entry never takes
more than they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch

from torchft_ckpt.checkpointing.state.dtypes import CARRIED_DTYPES, DTYPES, dtype_name
from torchft_ckpt.checkpointing.state.format import Count, Manifest, WireTensor
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.checkpointing.state.tree import TensorPlace, as_places, decode_tree
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.errors import StateFormatError, StateMismatchError

ATTRIBUTES = ("grad_scale", "found_inf")
"""What a `GradScaler` gives an optimizer that unscales gradients in its own step, for the time of that step."""
_MAX_DEPTH = 4
_MANIFEST_BYTES = 256 * 1024
_MANIFEST_BYTES_PER_PARAMETER = 4 * 1024

Scalar = Any
"""None, a bool, a number, a string, a tensor of one element, or a tuple or list of these."""
Settings = list[list[dict[str, Scalar]]]
"""Of an optimizer and those in it, of each parameter group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """What one optimizer saw in one step.

    `gradients` are for each of its parameters its gradient, or None where it had none. At the source these are what `p.grad` was;
    at the receiver the local shard of it, a plain tensor on the CPU.
    """

    optimizer: int
    settings: Settings
    attributes: dict[str, Scalar]
    gradients: list[torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedoEntry:
    """One committed step: which version it led from and to, and what each optimizer saw that stepped in it."""

    after: StateVersion
    version: StateVersion
    batches_committed: int
    steps: list[OptimizerStep]


_Version = tuple[Count, Count, Annotated[str, msgspec.Meta(max_length=64)]]


class _WireStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    optimizer: Count
    settings: list[list[dict[str, object]]]
    attributes: dict[str, object]
    gradients: list[object]


class _WireEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    after: _Version
    version: _Version
    batches_committed: Count
    steps: list[_WireStep]


def is_scalar(value: object, depth: int = 0) -> bool:
    """Whether a value of a parameter group travels."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if isinstance(value, torch.Tensor):
        return adapter_of(value) is None and value.numel() == 1 and value.dtype in CARRIED_DTYPES
    return type(value) in (tuple, list) and depth < _MAX_DEPTH and all(is_scalar(item, depth + 1) for item in value)  # type: ignore[attr-defined]


def state_of(entry: RedoEntry) -> dict[str, object]:
    """Return an entry as the state that travels."""
    return {
        "after": _as_list(entry.after),
        "version": _as_list(entry.version),
        "batches_committed": entry.batches_committed,
        "steps": [
            {
                "optimizer": step.optimizer,
                "settings": step.settings,
                "attributes": step.attributes,
                "gradients": step.gradients,
            }
            for step in entry.steps
        ],
    }


def entry_of(state: object) -> RedoEntry:
    """Return the entry that a received state is, whose manifest was checked by `check_entry`."""
    wire = _convert(state)
    return RedoEntry(
        after=_version(wire.after),
        version=_version(wire.version),
        batches_committed=wire.batches_committed,
        steps=[
            OptimizerStep(
                optimizer=step.optimizer,
                settings=step.settings,
                attributes=step.attributes,
                gradients=step.gradients,  # type: ignore[arg-type]  # it was checked
            )
            for step in wire.steps
        ],
    )


def max_manifest_bytes(parameters: Sequence[Sequence[torch.Tensor]]) -> int:
    """Return how long the manifest of an entry may be, for these parameters of each optimizer."""
    return _MANIFEST_BYTES + _MANIFEST_BYTES_PER_PARAMETER * sum(len(own) for own in parameters)


def check_entry(manifest: Manifest, parameters: Sequence[Sequence[torch.Tensor]], after: StateVersion) -> StateVersion:
    """See that a checked manifest is that of an entry which follows on a version, for these parameters; return where it leads.

    Args:
        manifest: checked as that of a state.
        parameters: of each guarded optimizer, in its order.
        after: the version that is here.

    Raises:
        StateFormatError: it is none, or that of another step.
        StateMismatchError: it is one of other parameters.
    """
    places = as_places(len(manifest.tensors))
    entry = _convert(decode_tree(manifest.tree, places))
    version = _version(entry.version)
    if _version(entry.after) != after:
        raise StateFormatError(
            f"an entry that leads from {_version(entry.after)} came, what follows on {after} was asked for", "source"
        )
    if version.step != after.step + 1 or version.step != manifest.step or not version.proven:
        raise StateFormatError(
            f"an entry leads from {after} to {version}, and is said to be of step {manifest.step}", "source"
        )
    used: set[int] = set()
    for step in entry.steps:
        if step.optimizer >= len(parameters):
            raise StateMismatchError(
                f"optimizer {step.optimizer} stepped at the source, and {len(parameters)} are guarded here",
                party="optimizer",
            )
        if not set(step.attributes) <= set(ATTRIBUTES):
            raise StateFormatError(f"an entry sets attributes {sorted(step.attributes)[:4]}", party="source")
        scalars = [value for groups in step.settings for group in groups for value in group.values()]
        for value in (*scalars, *step.attributes.values()):
            _check_scalar(value, manifest, used)
        _check_gradients(step, parameters[step.optimizer], manifest, used)
    if len(used) != len(manifest.tensors):
        raise StateFormatError(f"an entry has {len(manifest.tensors) - len(used)} tensors of no use", party="source")
    return version


def _convert(state: object) -> _WireEntry:
    try:
        return msgspec.convert(state, _WireEntry, strict=True)
    except Exception as error:  # a tensor in the place of a dict is asked for items and attributes
        raise StateFormatError(f"this is no entry of a redo log: {error}", party="source") from error


def _as_list(version: StateVersion) -> list[object]:
    return [version.step, version.quorum_id, version.epoch]


def _version(wire: tuple[int, int, str]) -> StateVersion:
    return StateVersion(step=wire[0], quorum_id=wire[1], epoch=wire[2])


def _check_scalar(value: object, manifest: Manifest, used: set[int], depth: int = 0) -> None:
    if isinstance(value, TensorPlace):
        entry = manifest.tensors[value.number]
        if sum(box_of(chunk).volume for chunk in entry.chunks) != 1 or len(entry.chunks) != 1 or _is_spread(entry):
            raise StateFormatError("an entry has a setting that is a tensor of several elements", party="source")
        used.add(value.number)
    elif type(value) in (tuple, list) and depth < _MAX_DEPTH:
        for item in value:  # type: ignore[attr-defined]
            _check_scalar(item, manifest, used, depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise StateFormatError(f"an entry has a setting of {type(value).__name__}", party="source")


def _check_gradients(step: _WireStep, parameters: Sequence[torch.Tensor], manifest: Manifest, used: set[int]) -> None:
    if len(step.gradients) != len(parameters):
        raise StateMismatchError(
            f"optimizer {step.optimizer} has {len(step.gradients)} parameters at the source, {len(parameters)} here",
            party="optimizer",
        )
    for number, (place, parameter) in enumerate(zip(step.gradients, parameters, strict=True)):
        if place is None:
            continue
        if not isinstance(place, TensorPlace) or place.number in used:
            raise StateFormatError("an entry has a gradient that is no tensor, or that of two parameters", "source")
        used.add(place.number)
        entry = manifest.tensors[place.number]
        if _is_spread(entry):
            raise StateFormatError("an entry has a gradient whose bytes are not in C order", party="source")
        boxes = [box_of(chunk) for chunk in entry.chunks]
        own = boxes_here(parameter)
        if entry.shape != list(parameter.shape) or boxes != own or not takes_dtype(parameter, entry.dtype):
            raise StateMismatchError(
                f"the gradient of parameter {number} of optimizer {step.optimizer} is {entry.dtype}{entry.shape} in boxes"
                f" {boxes[:4]} at the source, the parameter here is {dtype_name(parameter.dtype)}{[*parameter.shape]} in boxes"
                f" {own[:4]}",
                party="optimizer",
            )


def _is_spread(entry: WireTensor) -> bool:
    """Whether a segment may be longer than what lies in it: then a few bytes could take any memory."""
    return any(chunk.strides is not None or chunk.byte_offset for chunk in entry.chunks)


def boxes_here(parameter: torch.Tensor) -> list[Box]:
    """Return the boxes of a parameter that this process holds."""
    adapter = adapter_of(parameter)
    return [whole(tuple(parameter.shape))] if adapter is None else adapter.boxes(parameter, "a parameter")


def takes_dtype(parameter: torch.Tensor, name: str) -> bool:
    """Whether a parameter takes gradients of this dtype; torch 2.10 and later let it say so itself."""
    dtype = DTYPES.get(name)
    wanted: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return dtype is not None and (dtype is wanted if wanted is not None else dtype.is_floating_point)


def num_bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of gradients that are here."""
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors if tensor is not None)


def parse_version(text: str) -> StateVersion:
    """Read `STEP.QUORUM.EPOCH`.

    Raises:
        ValueError: it is none.
    """
    step, _, rest = text.partition(".")
    quorum_id, found, epoch = rest.partition(".")
    if (
        not found
        or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in (step, quorum_id))
        or len(epoch) > 64
    ):
        raise ValueError(f"{text[:40]!r} is no version STEP.QUORUM.EPOCH")
    return StateVersion(step=int(step), quorum_id=int(quorum_id), epoch=epoch)


def format_version(version: StateVersion) -> str:
    """Write a version as `STEP.QUORUM.EPOCH`."""
    return f"{version.step}.{version.quorum_id}.{version.epoch}"


def scalars_of(groups: Iterable[Mapping[str, Any]], without: Iterable[str]) -> list[dict[str, Scalar]]:
    """Return what travels of parameter groups, as it is now: what is changed later does not appear in it."""
    left_out = frozenset(without)
    return [
        {key: _now(value) for key, value in group.items() if key not in left_out and is_scalar(value)}
        for group in groups
    ]


def _now(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(map(_now, value)) if type(value) in (tuple, list) else value
