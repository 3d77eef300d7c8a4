"""The wrappers of this package tell a Manager this, and ask it this: optimizers, DDP, loaders, outer loops, checkpointers.

A script calls none of it, and none of it is promised to stay: what scripts call is `Manager`. What a part of the Manager does is
that part's method here, under the name by which wrappers know it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp, Work
from torch.profiler import record_function

from torchft_ckpt.core.coordination.replica import ReplicaView
from torchft_ckpt.core.training.outer_schedule import OuterSchedule, RoundPlace
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.manager.collectives import Way
from torchft_ckpt.manager.parts import Parts
from torchft_ckpt.manager.starting import StartingRank
from torchft_ckpt.manager.state_registry import PlainLoop

if TYPE_CHECKING:
    from torchft_ckpt.exact import StepLoader


class Hooks:
    """The other side of a `Manager`: `manager.hooks`. On the training thread, unless a part says otherwise.

    Args:
        parts: of the Manager.
        start_quorum, load_state_dict: its methods.
    """

    def __init__(
        self, parts: Parts, start_quorum: Callable[[], None], load_state_dict: Callable[[dict[str, int]], None]
    ) -> None:
        self._start_quorum = start_quorum
        self._load_state_dict = load_state_dict
        self._steps = steps = parts.steps
        self._client = parts.client
        self._followers = parts.followers
        self._own = parts.own
        self._way_out = parts.way_out
        self._starting = parts.starting
        self.registry = parts.registry
        """It holds what is registered, for what saves and restores it."""
        self.timekeeper = parts.timekeeper
        self.events = parts.events
        """The queue of events to listeners, for what adds to it."""
        self.transport = parts.transport
        """The one that the Manager was given, or made."""
        self.open_graphs = steps.graphs
        """The forward passes whose backward passes are still to come: no state is loaded meanwhile."""
        self.last_forward: object = None
        """The DDP that computed it. A load function that was called in it may have put another one in its place, and the backward
        pass is through this one."""
        # A step of several optimizers
        self.begins_step = steps.clears_gradients
        self.takes_step = steps.takes
        self.ends_step = steps.end_taking
        self.wraps_optimizer = parts.followers.wraps
        self.check_followed = parts.followers.check
        # A step by microbatches
        self.note_found = parts.client.note_found
        # An outer loop
        self.first_inner_step = steps.first_inner_step
        # A save
        self.lost_contributors = parts.client.lost_contributors
        self.contributor_names = parts.client.contributor_names
        self.leaves_on = parts.way_out.leaves_on

    # ------------------------------------------------------------------------------------------------ a step's optimizers

    @property
    def is_in_state_dict_fn(self) -> bool:
        """Whether the calling thread is in one of the registered functions."""
        return bool(self.registry.in_function)

    def clears_gradients(self) -> None:
        """An optimizer clears its gradients, and a step has to begin with that (`begins_step`), or with what is computed next."""
        if not self._steps.defers():
            self._start_quorum()

    def begin_deferred(self, *, asks: bool = False, has_computed: bool = False) -> None:
        """Something is computed, or asked for: begin the step that was to begin with that. See `Steps.begins_here`."""
        if self._steps.begins_here(asks=asks, has_computed=has_computed):
            self._start_quorum()

    def took_step(self, optimizer: torch.optim.Optimizer, *, has_stepped: bool = True) -> None:
        """A wrapped optimizer has taken the step that counts, or has skipped it: its schedulers follow, or do not."""
        self._followers.optimizer_ended(optimizer, has_stepped=has_stepped)
        self._steps.ends_taking((optimizer,))

    def check_scaler(self) -> None:
        """A gradient scaler steps. Raises `ConfigError` if a `StepLoader` computes the steps and the scaler is not known.

        By its own it would move in a step that is discarded: the next try would have another scale than what is kept of this one.
        """
        if self.computes_by_microbatches and not self._followers.is_scaler_stepping:
            raise ConfigError(
                "StepLoader needs to know the gradient scaler: scaler = manager.grad_scaler(scaler)", party="GradScaler"
            )

    # ------------------------------------------------------------------------------------------- a step by microbatches

    def compute_by(self, microbatches: StepLoader) -> None:
        """Say what computes the steps by microbatches, before the first one. It calls `begin_microbatches` and `reduce_by`.

        Raises:
            ConfigError: there is one.
        """
        if self.computes_by_microbatches:
            raise ConfigError("this Manager has a StepLoader", party="StepLoader")
        if self._own.restored is not None:
            microbatches.check_restored(self._own.restored)
        self.registry.microbatches = microbatches

    @property
    def computes_by_microbatches(self) -> bool:
        """Whether a `StepLoader` computes the steps: then no backward pass averages gradients."""
        return not isinstance(self.registry.microbatches, PlainLoop)

    def begin_microbatches(self, *, waits: bool = False) -> ReplicaView:
        """Begin a step, if none is open, with the microbatches that are computed now; return what this replica is in it.

        `waits`: until it is known who trains together. The process group is connected beside the microbatches.

        Raises: as `start_quorum`.
        """
        self.begin_deferred()
        if not self._client.view().is_in_step:
            self._steps.begins_by_forward()
            self._start_quorum()
        self._steps.note_forward()
        if waits:
            self._steps.wait_plan()
        return self._client.view()

    def loss_scales(self) -> list[float]:
        """Return the scales of all gradient scalers that are known."""
        return [scaler.get_scale() for scaler in self._followers.scalers]

    def prepare_scalers(self, device: torch.device) -> None:
        """Have gradient scalers be there for a step in which nothing is scaled here."""
        for scaler in self._followers.scalers:
            scaler.scale(torch.zeros((), device=device))

    def reduce_by(self, way: Way, tensor: torch.Tensor) -> Work:
        """Sum a tensor over the groups in a way of its own, as a collective of the step. As `allreduce` otherwise."""
        with record_function("torchft::manager::allreduce"):
            return self._steps.allreduce(tensor, way, ReduceOp.SUM)

    # ------------------------------------------------------------------------------------------------------ outer loops

    def cast_vote(self) -> None:
        """Vote on the step already, if all of its collectives are done; `should_commit` then only asks for the decision.

        For loops that go on training beside the exchange: nobody waits then for the slowest to come and take what is decided.
        Call it on any thread, when the results of the collectives are there and before `should_commit`.

        Raises: as `wait_quorum`.
        """
        self.begin_deferred()
        self._steps.cast_vote()

    def is_counted(self) -> bool:
        """Return whether the open quorum counts this group among those that contribute; the same for all ranks of a group.

        A rank that could not load what it has to hold does not participate then (`is_participating`).
        """
        self.begin_deferred(asks=True)
        formed = self._client.view().quorum
        return formed is not None and formed.contributor_rank is not None

    @property
    def is_restored(self) -> bool:
        """Whether this replica's state was restored on purpose (`load_state_dict`), and no quorum has named it since."""
        return self._client.view().restored

    @property
    def has_live_state(self) -> bool:
        """Whether state is registered that the steps of optimizers change."""
        return not self.registry.is_explicitly_locked

    @property
    def place(self) -> RoundPlace:
        """Where the script is in a round of its outer loop, which sets it. It goes with the state to those who load that."""
        return self._own.place

    @place.setter
    def place(self, place: RoundPlace) -> None:
        self._own.place = place

    @property
    def outer_schedule(self) -> OuterSchedule | None:
        """When the outer loop exchanges its fragments; it sets this. A state of a place that no such loop has is refused."""
        return self._own.outer_schedule

    @outer_schedule.setter
    def outer_schedule(self, schedule: OuterSchedule | None) -> None:
        self._own.outer_schedule = schedule

    # ------------------------------------------------------------------------------------------------------ checkpoints

    @property
    def saves_alone(self) -> bool:
        """Whether the `save` of `leave_on` runs, and the other groups do not save this step, because they stay."""
        return self._way_out.is_saving and not self._client.view().all_leave

    def starting_rank(self) -> StartingRank:
        """Begin to start without a state, with other groups that do; a step that is open is abandoned."""
        self._steps.leave()
        return self._starting

    def restored(self, step: int) -> None:
        """A state of this step was received whole, and loaded, as if from a checkpoint."""
        self._load_state_dict(self._own.saved(step))
