"""`StepLoader`: a training loop whose steps are functions of their number alone, whoever is there to compute them.

    outer loop   a step of the job, or another try of it                     `StepLoader.__iter__`
    inner loop   the microbatches that this group has to compute of it       `Step.__iter__`
    its end      all groups' gradients are summed; buffers and logged values too

An attempt that is discarded keeps what was computed, as long as the state's name stays. With its next request this rank says what
it has, and what nobody has is dealt anew. After a step that counts it says which microbatch it computes while the quorum forms.
A warm-up iteration computes one microbatch of the open step, and drops it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from torchft_ckpt import config
from torchft_ckpt.core.coordination.messages import MAX_MICROBATCHES, Answer, Role, StateVersion
from torchft_ckpt.core.training.ledger import Waits
from torchft_ckpt.core.training.microbatches import Node, accept, cover, deal, members, slowdown
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.exact.audit import Audit
from torchft_ckpt.exact.captured import (
    MAX_LOGGED,
    MAX_NAME_BYTES,
    Buffers,
    Layout,
    Left,
    Nodes,
    Summed,
    give_zeros,
    places_of_buffers,
)
from torchft_ckpt.exact.kernels import prepare_cublas, same_bits
from torchft_ckpt.exact.reading import Reader, Samples, check_source, set_random_state
from torchft_ckpt.exact.staying import Still, check_kinds, kinds_of, strangers_stay
from torchft_ckpt.exact.tree_sum import TreeSum

if TYPE_CHECKING:
    from torchft_ckpt.core.coordination.replica import ReplicaView
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)
_WATCHED = 2
"""Steps in which it is looked at what else the inner loop moves: in the first one an average of weights may be the weights."""


class _Phase(Enum):
    """How far an iteration of the outer loop is."""

    BEGUN = "its inner loop has not run"
    BROKEN_OFF = "its inner loop was broken off"
    SUMMED = "its inner loop is over"
    VOTED = "it was voted on"


class StepLoader:
    """Yields the steps of a job, each with the microbatches that this group computes.

    Args:
        manager: of this rank. A Manager has one StepLoader at most, made before its first step.
        dataset: with `__getitem__`, or `__getitems__`, and `__len__`. None: `read` reads.
        global_batch_size: samples in a step, whoever is there.
        microbatch_size: samples in a microbatch; it divides `global_batch_size`.
        seed: of the order of samples, and of all random numbers in the inner loop and in what reads samples.
        num_epochs, num_steps: the outer loop ends then, and has called `Manager.finish`; neither: it does not end.
        shuffle: each epoch is another permutation of the data set; False: its own order.
        order: which sample is at a position of the endless stream of samples, for mixtures, curricula, weights.
        read: returns the batch of a microbatch, by step and number; in workers, too.
        rank_in_microbatch: this rank's number among the ranks of its group that read different samples of a microbatch, and how
            many these are: with FSDP all. What they log, average in the group before.
        deterministic: on an accelerator, run the inner loop under torch's deterministic algorithms. False, for whom these are too
            slow: samples, order and sums are the same, and bits are as the kernels give them.
        check_microbatches_every: in each so many steps two further groups compute one of the microbatches too, and all three are
            compared bit by bit; 0: in none. All groups give the same. What follows from a difference is `on_replicas_differ`'s.
        collate_fn: makes a batch of a list of samples, or of what `__getitems__` returned.
        options: further ones of `DataLoader`: `num_workers`, `pin_memory`, `prefetch_factor`, ...

    Raises:
        ConfigError: an argument cannot be used; the message says which, and why.
    """

    def __init__(
        self,
        manager: Manager,
        dataset: Any = None,
        *,
        global_batch_size: int,
        microbatch_size: int,
        seed: int = 0,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        shuffle: bool = True,
        order: Callable[[int], Any] | None = None,
        read: Callable[[int, int], Any] | None = None,
        rank_in_microbatch: tuple[int, int] = (0, 1),
        deterministic: bool = True,
        check_microbatches_every: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> None:
        num_samples = check_source(dataset, read, order, options)
        if microbatch_size < 1 or global_batch_size < 1 or global_batch_size % microbatch_size:
            raise ConfigError(
                f"global_batch_size={global_batch_size} is no multiple of microbatch_size={microbatch_size}: each microbatch of a"
                " step has as many samples",
                party="global_batch_size",
            )
        if not 0 <= rank_in_microbatch[0] < rank_in_microbatch[1] or microbatch_size % rank_in_microbatch[1]:
            raise ConfigError(
                f"rank_in_microbatch={rank_in_microbatch}: a rank below the number of ranks, which divides microbatch_size",
                party="rank_in_microbatch",
            )
        if num_epochs is not None and (num_samples is None or num_steps is not None):
            raise ConfigError(
                "num_epochs needs a data set with a length, and no num_steps beside it", party="num_epochs"
            )
        if check_microbatches_every < 0:
            raise ConfigError(
                f"check_microbatches_every={check_microbatches_every}: a number of steps, or 0",
                party="check_microbatches_every",
            )
        self.num_microbatches = global_batch_size // microbatch_size
        if self.num_microbatches > MAX_MICROBATCHES:
            raise ConfigError(
                f"a step of {self.num_microbatches} microbatches: it has at most {MAX_MICROBATCHES}, so make them larger",
                party="microbatch_size",
            )
        self.num_steps = num_epochs * num_samples // global_batch_size if num_epochs and num_samples else num_steps
        self._manager, self._is_deterministic = manager, deterministic
        self._audit = Audit(manager, check_microbatches_every, self.num_microbatches)
        if deterministic:
            prepare_cublas()
        sizes = num_samples, global_batch_size, microbatch_size
        self._samples = Samples(dataset, *sizes, seed, shuffle, order, read, rank_in_microbatch, collate_fn)
        self._reader = Reader(self._samples, options)
        self._nodes = Nodes()
        self._state: tuple[StateVersion, int, list[float]] = StateVersion(), 0, []
        """With which they were computed: the name of the state, how often one was loaded, and the scales of losses."""
        self._layout: Layout | None = None
        self._marks: list[object] = []
        self._buffers: Buffers | None = None
        self._formed: Answer | None = None
        self._usual: list[int] = []
        """What this rank computes of a step of which nobody has anything yet, with the groups of now."""
        self._early: int | None = None
        """Of these, what it computes first of the open step, or the next one. All ranks of a group have the same."""
        self._most_groups, self._has_told = 0, False
        self._now: Step | None = None
        self.microbatch: int | None = None
        """The one that the loop computes now."""
        self._others: list[torch.Tensor] = []
        """Parameters beside those of the optimizers: what loops clip and log with the others has no gradients of theirs."""
        self._modules: list[torch.nn.Module] = []
        """Whose state registered functions return, with those in them; and which buffers they have."""
        self._kinds = kinds_of(())
        self._num_watched, self._has_told_of_dropped = 0, False
        self._num_computed = 0
        """By this process."""
        manager.hooks.compute_by(self)

    # ------------------------------------------------------------------------------------------------- the outer loop

    def __iter__(self) -> Iterator[Step]:
        replay, ends_at = config.replay(), math.inf if self.num_steps is None else self.num_steps
        if replay is not None and self._manager.current_step() < replay.step:
            raise ConfigError(
                f"the loop begins at step {self._manager.current_step()}, and the checkpoint that is replayed is of step"
                f" {replay.step}: call Checkpointer.restore before it",
                party="restore",
            )
        if replay is not None:
            ends_at = min(ends_at, replay.last + 1)
        while self._manager.current_step() < ends_at:
            self._check_last()
            set_random_state(self._samples.random_key(self._manager.current_step(), "before"))
            self._now = Step(self, self._manager.current_step())
            yield self._now
        self._check_last()
        self._manager.finish()

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError("a StepLoader without num_epochs or num_steps has no length")
        return self.num_steps

    def _check_last(self) -> None:
        last = self._now
        if last is not None and last.phase in (_Phase.BEGUN, _Phase.SUMMED):
            raise ConfigError(
                f"step {last.number} ends without a vote, and {last.phase.value}: iterate over `step`, and call step() of an"
                " Optimizer after it, in each iteration",
                party="StepLoader",
            )

    # ---------------------------------------------------------------------------------- what the Manager asks and tells

    @property
    def in_words(self) -> str:
        """What has to be the same in all groups, beside the parameters."""
        samples, parameters = self._samples, self._parameters()
        source = f"{samples.num_samples} samples" if samples.read is None else "samples of its own"
        how = "shuffled" if samples.shuffle and samples.order is None else "in order"
        where = parameters[0].device if parameters else torch.device("cpu")
        kind = torch.cuda.get_device_name(where) if where.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        parts = f", read in {samples.part[1]} parts" if samples.part[1] > 1 else ""
        bits = "" if self._is_deterministic else ", any kernels"
        bits += f", checked every {self._audit.every} steps" if self._audit.every else ""
        memory = f"; {self._find_layout().in_words}" if parameters else ""
        return (
            f"steps of {self.num_microbatches} microbatches of {samples.microbatch_size} of {source} {how}, seed {samples.seed}"
            f"{parts}, torch {torch.__version__}, {torch.get_num_threads()} threads, {kind}{bits}{memory}"
        )

    def held(self, version: StateVersion) -> list[Node]:
        """Return which nodes of the step that begins with a state are here, or will be before the quorum is needed."""
        if self._early is not None and version.proven:
            return [(self._early, self._early + 1)]
        nodes = [*self._nodes.by_node] if version.proven else []
        return nodes if nodes and self._state_of(version) == self._state else []

    def _state_of(self, version: StateVersion) -> tuple[StateVersion, int, list[float]]:
        return version, self._manager.hooks.registry.num_changes, self._manager.hooks.loss_scales()

    def refuse(self, what: str) -> None:
        """Raise `ConfigError` if the loop computes a microbatch, in which that cannot be."""
        if self.microbatch is not None:
            raise ConfigError(
                f"{what} in the inner loop of StepLoader, in microbatch {self.microbatch}: each microbatch is computed by itself,"
                " by whichever group; do it before the inner loop, or after it",
                party=what,
            )

    def votes(self) -> None:
        """The step is about to be voted on. Raises `ConfigError` if it is not whole."""
        self.refuse("step() of an Optimizer")
        phase = None if self._now is None else self._now.phase
        if phase is not _Phase.SUMMED:
            why = "no step of StepLoader was begun" if phase is None else phase.value
            raise ConfigError(
                f"a step is to be voted on, and {why}: the inner loop runs to its end once in each iteration, and one vote"
                " follows",
                party="StepLoader",
            )

    def decided(self, *, counts: bool) -> None:
        """The step was voted on and decided."""
        if self._now is not None:
            self._now.phase, self._now.counts = _Phase.VOTED, counts
        self._early = self._usual[0] if counts and self._usual and self._num_watched == _WATCHED else None
        if counts:
            self._nodes.keep(())
        elif self._buffers is not None:
            self._buffers.put_back()
        self._buffers = None

    # ------------------------------------------------------------------------------------------------- one inner loop

    def run(self, step: Step) -> Iterator[Any]:
        """Yield the batches of a step's microbatches; capture what each leaves behind, and sum it."""
        if step is not self._now or step.phase is not _Phase.BEGUN:
            raise ConfigError(
                "a step of StepLoader is iterated over once, before the next one begins", party="StepLoader"
            )
        step.phase = _Phase.BROKEN_OFF
        try:
            yield from self._run(step)
        finally:
            if step.phase is not _Phase.SUMMED and self._buffers is not None:
                self._buffers.put_back()
                self._buffers = None

    def _run(self, step: Step) -> Iterator[Any]:
        now, told, layout = self._manager.hooks.begin_microbatches(), step.number, self._find_layout()
        self._buffers = before = Buffers(layout)
        early = self._early
        if early is not None:
            # Whatever was heard since: the others of the group compute it, too, and the ranks may wait for each other in it.
            left = yield from self._compute(step, early, layout, before, keeps=True)
            self._early = None
            if now.version.step == told:
                self._state = self._state_of(now.version)
                self._nodes.take(left, before.values, self.num_microbatches)
        now = self._manager.hooks.begin_microbatches(waits=True)
        formed = now.quorum
        if formed is None:
            raise RuntimeError("internal error: there is a quorum, and nobody knows it")
        step.number = formed.version.step
        # Who lacks the state and may not load it is in the group of those who sum, and adds nothing.
        is_alone = now.is_learner or (now.version != formed.version and formed.role is Role.HEALTHY)
        todo, nodes, auditors, checked = [0], list[list[Node]](), list[int](), None
        self._usual = []
        if told != step.number and not is_alone:
            # The state was loaded just now. What the loop has set at its top, by number or by chance, is of another step.
            self._manager.report_error(
                RuntimeError(f"the state of step {step.number} came in an iteration that began as step {told}")
            )
            give_zeros(layout)
            step.phase = _Phase.SUMMED
            return
        if not is_alone:
            nodes = self._deal(formed, now, early)
            here = {*members(self._nodes.by_node)}
            todo = [number for number in members(nodes[formed.replica_rank]) if number not in here]
            auditors = self._audit.groups(formed, nodes)
            checked = self._audit.microbatch(step.number) if formed.replica_rank in auditors[1:] else None
            todo[len(todo) // 2 : len(todo) // 2] = [] if checked is None else [checked]
        self._reader.will_want(step.number, todo, self._usual)
        if not todo:
            self._manager.hooks.prepare_scalers(layout.device)
        registry, still = self._manager.hooks.registry, None
        if todo and not is_alone and self._num_watched < _WATCHED:
            still = Still(registry.capture(), [place.tensor() for place in layout.places])
        for number in todo:
            keeps = not is_alone and number != checked
            left = yield from self._compute(step, number, layout, before, keeps=keeps)
            if keeps:
                self._nodes.take(left, before.values, self.num_microbatches)
        before.check_moved()
        if still is not None:
            still.check(registry.capture())
            self._num_watched += 1
        self._drop_others()
        if not is_alone:
            self._sum(step, layout, nodes)
        if auditors:
            self._audit.compare(formed, layout, auditors)
        set_random_state(self._samples.random_key(step.number, "after"))
        step.phase = _Phase.SUMMED

    def _compute(
        self, step: Step, number: int, layout: Layout, before: Buffers, *, keeps: bool
    ) -> Generator[Any, None, Left]:
        """Yield the batch of a microbatch; return what the loop leaves behind.

        `before`: the buffers as the step began. `keeps`: a discard does not take that.
        """
        computes = self._manager.hooks.timekeeper.waiting(Waits.MICROBATCH) if keeps else nullcontext()
        batch = self._reader.get(step.number, number)
        before.put_back()
        for parameter in (*layout.parameters, *self._others):
            parameter.grad = None
        set_random_state(self._samples.random_key(step.number, number))
        step._weight, step._logged = None, {}
        self.microbatch = number
        try:
            with same_bits(layout.device if self._is_deterministic else torch.device("cpu")):
                # The first one shows whether anything is compiled.
                known = {*map(id, self._modules)} if self._num_computed == 1 else None
                with computes, nullcontext() if known is None else strangers_stay(known):
                    yield batch
            self._num_computed += 1
        finally:
            self.microbatch = None
        check_kinds(self._kinds, self._modules)
        before.note_moved()
        left = Left(layout, number, step._weight, step._logged)
        self._audit.note(step.number, left)
        return left

    def _drop_others(self) -> None:
        dropped = [parameter for parameter in self._others if parameter.grad is not None]
        for parameter in dropped:
            parameter.grad = None
        if {*map(id, dropped)} & {*map(id, self._all_parameters())}:
            raise ConfigError(
                "a parameter of an Optimizer needs a gradient in the inner loop of StepLoader, and needed none as the step began:"
                " set requires_grad before the inner loop",
                party="requires_grad",
            )
        if dropped and not self._has_told_of_dropped:
            self._has_told_of_dropped = True
            logger.warning(
                "StepLoader drops the gradients of %d parameters of registered modules: wrap the optimizer that trains them in an"
                " Optimizer, or set requires_grad_(False)",
                len(dropped),
            )

    def _deal(self, formed: Answer, now: ReplicaView, early: int | None) -> list[list[Node]]:
        """Return which nodes each rank of the process group has or computes; let go of what does not count.

        `early`: the microbatch that was computed before. In a quorum that stays nobody is told of those.
        """
        num_groups = formed.replica_world_size
        if now.num_participants != formed.num_contributors:
            raise ConfigError(
                "StepLoader knows no FIXED_WITH_SPARES: pass Manager(spare=True) in the spares", party="StepLoader"
            )
        said = formed.nodes or [[]] * num_groups
        accepted = accept([nodes or [] for nodes in said], self.num_microbatches)
        has = [None if nodes is None else tuple(own) for nodes, own in zip(said, accepted, strict=True)]
        nodes = _dealt(self.num_microbatches, tuple(has))
        usual = _dealt(self.num_microbatches, tuple(None if one is None else () for one in has))
        self._usual = members(usual[formed.replica_rank])
        if formed is not self._formed:
            kept, own = self.held(now.version), accepted[formed.replica_rank]
            if early is not None and early in members(nodes[formed.replica_rank]):
                own = [*own, (early, early + 1)]
            num_held = len(members(self._nodes.by_node))
            self._nodes.keep([node for node in own if node in kept])
            if num_held:
                self._manager.hooks.timekeeper.keeps(len(members(self._nodes.by_node)) / num_held)
        self._formed, self._state = formed, self._state_of(now.version)
        self._tell_of_absent(num_groups)
        return nodes

    def _tell_of_absent(self, num_groups: int) -> None:
        is_absent, self._most_groups = num_groups < self._most_groups, max(num_groups, self._most_groups)
        cost, less = slowdown(self.num_microbatches, num_groups + 1), 4 * self.num_microbatches
        if is_absent and cost > 1.0 and not self._has_told:
            self._has_told = True
            lower = slowdown(less, num_groups + 1)
            logger.warning(
                "a replica group is away: a step of %d microbatches takes %.2f times as long. %sA spare group avoids it",
                self.num_microbatches,
                cost,
                f"With {less} it would be {lower:.2f}. " if lower < cost else "",
            )

    def _sum(self, step: Step, layout: Layout, nodes: Sequence[Sequence[Node]]) -> None:
        total = layout.new()
        if len(nodes) == 1:
            for out, root in zip(total.flats, self._nodes.by_node[0, self.num_microbatches].flats, strict=True):
                out.copy_(root)
        held = {node: captured.flats for node, captured in self._nodes.by_node.items()}
        way = TreeSum(self.num_microbatches, nodes, held, total.flats)
        if not self._manager.hooks.reduce_by(way, total.flats[0]).wait() or self._buffers is None:
            give_zeros(layout)
            return
        step._summed = Summed(total, self.num_microbatches)
        step._summed.give(self._buffers)

    def _all_parameters(self) -> list[torch.Tensor]:
        optimizers = self._manager.hooks.registry.guarded()
        found = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return [*found.values()]

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._all_parameters() if parameter.requires_grad]

    def _find_layout(self) -> Layout:
        parameters = self._parameters()
        if not parameters:
            raise ConfigError("StepLoader finds no parameters: wrap each optimizer in an Optimizer", party="StepLoader")
        registry, own = self._manager.hooks.registry, [*map(id, parameters)]
        marks = [*own, *registry.keys()]
        if self._layout is None or marks != self._marks or kinds_of(self._modules) != self._kinds:
            named = registry.modules()
            self._modules = [*{id(module): module for _, root in named for module in root.modules()}.values()]
            self._kinds = kinds_of(self._modules)
            others = [one for _, root in named for one in root.parameters()] + self._all_parameters()
            self._others = [*{id(one): one for one in others if id(one) not in {*own}}.values()]
            # A module comes before those in it.
            paths = {id(one): f"{key}.{path}" for key, root in reversed(named) for path, one in root.named_parameters()}
            names = [paths.get(id(one), f"parameter {n}") for n, one in enumerate(parameters)]
            self._marks, self._layout = marks, Layout(parameters, places_of_buffers(named), names)
        self._nodes.of(self._layout)
        return self._layout

    # ------------------------------------------------------------------------------------------------------- the state

    def geometry(self) -> dict[str, int]:
        """Return what is saved beside the step, as it says where in the data that is."""
        samples = self._samples
        return {
            "global_batch_size": samples.global_batch_size,
            "microbatch_size": samples.microbatch_size,
            "seed": samples.seed,
            "num_samples": samples.num_samples or 0,
            "shuffle": int(samples.shuffle),
        }

    def check_restored(self, saved: Mapping[str, int]) -> None:
        """A Manager's state was restored. Raises `ConfigError` if a StepLoader with other samples has made it."""
        own = self.geometry()
        if not own.keys() & saved:
            logger.warning(
                "the state of step %d was made by a loop without StepLoader: the data go on at position %d of their stream",
                saved["step"],
                saved["step"] * self._samples.global_batch_size,
            )
        elif differs := [
            f"{name}={saved.get(name)}, here {one}" for name, one in own.items() if saved.get(name) != one
        ]:
            raise ConfigError(
                f"the state was made by a StepLoader with {'; '.join(differs)}: its steps have other samples",
                party="StepLoader",
            )


@functools.lru_cache(maxsize=4)
def _dealt(num_microbatches: int, has: tuple[tuple[Node, ...] | None, ...]) -> list[list[Node]]:
    """Return the nodes that each group has or computes, as `deal` deals them."""
    return [cover(mine, num_microbatches) for mine in deal(num_microbatches, has)]


class Step:
    """A step of the job, or another try of it: iterate over it once, for its microbatches."""

    def __init__(self, loader: StepLoader, number: int) -> None:
        self.number = number
        """How many steps come before it, whoever made them."""
        self.phase, self.counts = _Phase.BEGUN, False
        self._loader = loader
        self._weight: float | None = None
        self._logged: dict[str, Any] = {}
        self._summed: Summed | None = None

    @property
    def epoch(self) -> int:
        """In which pass over the data set its first sample is."""
        samples = self._loader._samples
        return self.number * samples.global_batch_size // samples.num_samples if samples.num_samples else 0

    def __iter__(self) -> Iterator[Any]:
        return self._loader.run(self)

    def log(self, **values: float | torch.Tensor) -> None:
        """Log scalars of the microbatch that is computed: `means` has their means over all microbatches of the step.

        Raises:
            ConfigError: no microbatch is computed; a value is no scalar; there are too many names.
        """
        self._check_inside("log")
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ConfigError(f"{name} is no scalar, but has shape {tuple(value.shape)}", party="log")
                value = value.detach().reshape(())
            self._logged[name] = value
        if len(self._logged) > MAX_LOGGED or len("\n".join(self._logged).encode()) > MAX_NAME_BYTES:
            raise ConfigError(
                f"at most {MAX_LOGGED} values are logged, with names of {MAX_NAME_BYTES} bytes", party="log"
            )

    def weigh(self, weight: float) -> None:
        """Say how much the microbatch counts in gradients and logged values, as its number of tokens; else all count alike.

        The loss stays a mean over the microbatch.

        Raises:
            ConfigError: no microbatch is computed; the weight is negative or no number.
        """
        self._check_inside("weigh")
        if not 0 <= float(weight) < float("inf"):
            raise ConfigError(f"a microbatch cannot weigh {weight}", party="weigh")
        self._weight = float(weight)

    def _check_inside(self, what: str) -> None:
        if self._loader.microbatch is None or self._loader._now is not self:
            raise ConfigError(
                f"step.{what} is called in the inner loop, for the microbatch that it computes", party=what
            )

    @property
    def means(self) -> dict[str, float]:
        """What was logged, as means over all microbatches of the step: the same bits in all groups.

        Raises:
            ConfigError: it was not voted on, or does not count: `if optimizer.step(): ...`.
        """
        if self._summed is None or not self.counts:
            raise ConfigError("step.means is there after the vote, if the step counts", party="means")
        return dict(self._summed.means)
