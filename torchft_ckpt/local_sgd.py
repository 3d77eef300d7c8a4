"""LocalSGD, DiLoCo and Streaming DiLoCo: replicas train by themselves and agree on the parameters now and then.

    with DiLoCo(manager, [model], inner_optimizer, outer_optimizer, sync_every=50):
        for batch in data:
            inner_optimizer.zero_grad()
            loss(model, batch).backward()
            inner_optimizer.step()      # every 50th exchanges what the replicas moved

Names and parameters are those of torchft 0.2.0. The loop begins, and waits for others, in the first forward pass of what it
trains (in the first inner step, if none is seen), not in the `with` statement. The manager needs no state functions of its
own: what a replica that comes in has to know is registered here. If others are registered, their state is served as in any other
loop, behind the lock of each inner step. A newcomer then begins with the rest of the iteration in which it was served:
the inner step in that changes nothing.

A checkpoint (`Checkpointer`) holds the global parameters and the outer optimizers of the last committed round, also if it is
saved in the middle of the next. Restored before the loop or within it, before the first inner step, these are what all groups
begin from, and the round begins anew: what was local when it was saved is not part of it. The model has the global parameters
then, whatever functions of the script have loaded into it. The inner optimizer's state is in a checkpoint only if the script
registers it, as the first group had it; else it stays what it is in the new process.

Parameters that need no gradient when the loop is made are global as well, and are not exchanged; a warning says so of those
that need one later, and of those that the inner optimizer trains and no module here holds.

Sources: LocalSGD arXiv 1805.09767, DiLoCo 2311.08105, Streaming DiLoCo 2501.18512.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn, optim

from torchft_ckpt import config
from torchft_ckpt.compat.names import lookup
from torchft_ckpt.core.training.outer_schedule import OuterSchedule
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.outer.fragment import AveragedFragment, PseudoGradientFragment
from torchft_ckpt.outer.loop import OuterLoop
from torchft_ckpt.outer.memory import FlatBuffers

if TYPE_CHECKING:
    from torchft_ckpt.outer.manager import OuterManager

DEFAULT_BUCKET_CAP_MB = 32.0
_CPU = torch.device("cpu")


class LocalSGD(OuterLoop[AveragedFragment]):
    """Average the parameters over the replica groups every `sync_every` inner steps.

    If the round is discarded, after its retries, the local steps since the last one are discarded with it, in all replicas:
    parameters and inner optimizer go back to where they were then.

    Args:
        manager: of this rank.
        model: its parameters are averaged, those that need a gradient. Buffers are not.
        optimizer: of the inner steps.
        sync_every: inner steps between two exchanges.
        backup_device: where the copy is that a discarded round goes back to, and that others join from; default: the host.
        pin_memory: pin it, if it is on the host and there is an accelerator.
        round_retries: how often a round that failed is tried again at once, with those who are left, before it is discarded.
        restore_inner_optimizer: keep a copy of the inner optimizer's state for discarded rounds. False saves its memory; the
            optimizer then remembers the steps that were discarded.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        manager: OuterManager,
        model: nn.Module,
        optimizer: optim.Optimizer,
        sync_every: int,
        *,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        round_retries: int = 3,
        restore_inner_optimizer: bool = True,
    ) -> None:
        fragment = AveragedFragment(
            model,
            optimizer,
            FlatBuffers(),
            backup_device=backup_device or _CPU,
            pin_memory=pin_memory,
            keep_inner_state=restore_inner_optimizer,
        )
        super().__init__(
            manager,
            optimizer,
            [fragment],
            OuterSchedule(sync_every),
            key="local_sgd",
            outer_optimizers=[],
            should_quantize=False,
            bucket_cap_bytes=int(DEFAULT_BUCKET_CAP_MB * 2**20),
            round_retries=round_retries,
        )

    def sync(self) -> None:
        """Average now, and count inner steps anew. All replica groups have to, at the same place; within the `with` block only.

        Returns when the round is decided, as `sync_every` inner steps do.

        Raises:
            RuntimeError: the loop is not entered.
            Also the errors of an inner step that ends a round.
        """
        self._sync_now()


class DiLoCo(OuterLoop[PseudoGradientFragment]):
    """Exchange pseudo-gradients (how far each replica moved from the global parameters) and step an outer optimizer.

    With several fragments it is Streaming DiLoCo: one of them is exchanged every `sync_every / len(model_fragments)` inner
    steps, in turn. With `fragment_sync_delay` the exchange goes on beside as many inner steps; what the fragment's parameters
    became in them is merged: `alpha * local + (1 - alpha) * global`.

    If a round is discarded, after its retries, its fragment goes back to the global parameters, and the inner optimizer's
    state of it to what that was when the round began; the other fragments, and later inner steps, are not affected.

    Args:
        manager: of this rank; with either setting of `use_async_quorum`, inner steps never wait for a quorum.
        model_fragments: modules without parameters in common. Buffers are not exchanged.
        inner_optimizer: trains all of them.
        outer_optimizer: of the global parameters, the same `Parameter` objects: one for all, or one for each fragment.
        sync_every: inner steps in which each fragment is exchanged once; a multiple of the number of fragments.
        backup_device: where the global parameters are kept, from which others join as well; default: the host.
        pin_memory: pin them, if they are on the host and there is an accelerator.
        use_bucketization: exchange buckets instead of single parameters; default: the environment variable
            TORCHFT_CKPT_USE_BUCKETIZATION, or TORCHFT_USE_BUCKETIZATION.
        bucket_cap_mb: MiB of a bucket at most; default 32.
        should_quantize: send 8 bits for each value: True or "int8", or "fp8" (see `Manager.allreduce`).
        fragment_sync_delay: inner steps from the beginning of an exchange to its end; below the steps between two exchanges.
        fragment_update_alpha: 0 to 1, see above.
        round_retries: how often a round that failed is tried again at once, with those who are left, before it is discarded.
        restore_inner_optimizer: keep a copy of the inner optimizer's state for discarded rounds. False saves its memory; the
            optimizer then remembers the steps that were discarded.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        manager: OuterManager,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: optim.Optimizer,
        outer_optimizer: optim.Optimizer | Sequence[optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool | None = None,
        bucket_cap_mb: float | None = None,
        should_quantize: bool | Literal["int8", "fp8"] = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        *,
        round_retries: int = 3,
        restore_inner_optimizer: bool = True,
    ) -> None:
        schedule = OuterSchedule(sync_every, len(model_fragments), fragment_sync_delay)
        if not 0.0 <= fragment_update_alpha <= 1.0:
            raise ConfigError(
                f"fragment_update_alpha={fragment_update_alpha} is not between 0 and 1", party="fragment_update_alpha"
            )
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ConfigError(f"bucket_cap_mb={bucket_cap_mb} is no size", party="bucket_cap_mb")
        outer_optimizers = _one_for_each(outer_optimizer, len(model_fragments))
        use_buckets = config.resolve(use_bucketization, config.USE_BUCKETIZATION, False, config.parse_bool)
        cap_bytes = int((bucket_cap_mb or DEFAULT_BUCKET_CAP_MB) * 2**20)
        buffers = FlatBuffers()
        super().__init__(
            manager,
            inner_optimizer,
            [
                PseudoGradientFragment(
                    module,
                    inner_optimizer,
                    buffers,
                    outer_optimizer=outer,
                    update_alpha=fragment_update_alpha,
                    backup_device=backup_device or _CPU,
                    pin_memory=pin_memory,
                    keep_inner_state=restore_inner_optimizer,
                )
                for module, outer in zip(model_fragments, outer_optimizers, strict=True)
            ],
            schedule,
            key="diloco",
            outer_optimizers=list(dict.fromkeys(outer_optimizers)),
            should_quantize=should_quantize,
            bucket_cap_bytes=cap_bytes if use_buckets else None,
            round_retries=round_retries,
        )


def _one_for_each(
    outer_optimizer: optim.Optimizer | Sequence[optim.Optimizer], num_fragments: int
) -> list[optim.Optimizer]:
    if isinstance(outer_optimizer, optim.Optimizer):
        return [outer_optimizer] * num_fragments
    if len(outer_optimizer) != num_fragments:
        raise ConfigError(
            f"there are {len(outer_optimizer)} outer optimizers for {num_fragments} fragments: pass one, or one for each",
            party="outer_optimizer",
        )
    return list(outer_optimizer)


__getattr__ = lookup(__name__)
