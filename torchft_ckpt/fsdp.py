"""HSDP whose replicate dimension is the manager's: FSDP2 shards inside a replica group, the manager averages across groups.

`fully_shard` knows the mesh of its own group alone. After each reduce-scatter the gradients' shards are averaged with those
that the same rank of the other groups holds, so groups may die and come back without FSDP noticing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)


def set_all_reduce_hook(manager: Manager, model: nn.Module) -> None:
    """Average the gradients of all FSDP2 modules in a model over the replica groups, from the next backward pass on.

    Call it once, after `fully_shard`. FSDP calls the hook in its backward pass, on the stream for allreduces where there are
    streams, with the reduce-scattered gradients of a module: flat, of `MixedPrecisionPolicy.reduce_dtype`, divided by the
    number of ranks in the group. The backward pass goes on when they are averaged: what FSDP does with them next
    (accumulate, cast, offload) needs their values.

    A step that fails is discarded and needs nothing: `Manager.allreduce` never raises for what other groups do, so the
    backward pass comes to its end and FSDP is ready for the next forward pass. A script that catches an error of its own
    forward or backward pass and goes on calls `manager.report_error` with it, and `reset_iter_state` of the root module. To
    accumulate gradients of several batches use `FSDPModule.set_requires_gradient_sync`.

    Args:
        manager: of this rank. All ranks of the group have one each.
        model: holds modules that `fully_shard` was applied to, or is one. Parameters that none of them manages are not
            averaged, which a warning in the log says: DTensors of tensor parallelism that `fully_shard` was not applied to
            as well.

    Raises:
        ConfigError: there is none, or one of them spreads its parameters over several meshes, which has no such hook.
    """
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not sharded:
        message = (
            "the model holds no module that fully_shard was applied to; apply it first, or use DistributedDataParallel"
        )
        raise ConfigError(message, party="model")

    def average(gradients: torch.Tensor) -> None:
        if manager.hooks.computes_by_microbatches:
            return  # the step sums the gradients of its microbatches
        if gradients.is_cuda:
            # FSDP allocated it on another stream and frees it once it is cast, which may be before we are done with it.
            gradients.record_stream(torch.cuda.current_stream(gradients.device))
        manager.allreduce(gradients).wait()

    for name, module in sharded.items():
        try:
            module.set_all_reduce_hook(average)
        except ValueError as error:
            message = f"gradients of the module {name or type(module).__name__!r} cannot be averaged: {error}"
            raise ConfigError(message, party=name) from error
    left_out = _not_managed(model, sharded.values())
    if left_out:
        logger.warning(
            "gradients of %d parameters that FSDP does not manage are not averaged over the replica groups: %s",
            len(left_out),
            some_of(left_out, ", "),
        )


def _not_managed(model: nn.Module, sharded: Iterable[FSDPModule]) -> list[str]:
    """Return the names of the parameters that require a gradient and that none of the FSDP modules manages."""
    managed = set()
    for module in sharded:
        state = module._get_fsdp_state()
        # A module had one group of parameters at most in older PyTorch.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            # By its place: the parameter itself is another one while it is unsharded, and after `load_state_dict(assign=True)`.
            place = parameter._module_info
            managed.add((place.module, place.param_name))
            managed.update(zip(place.shared_modules, place.shared_param_names, strict=True))
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in module.named_parameters(recurse=False)
        if value.requires_grad and (module, name) not in managed
    ]
