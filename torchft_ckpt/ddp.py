"""Data parallel training across replica groups: PyTorch's DDP, its gradients averaged by the manager.

The reducer's buckets are reduced as they fill, while the backward pass goes on. PyTorch's own process group is a dummy:
nothing but the buckets and a map of used parameters crosses replicas, so a group that dies leaves DDP itself
untouched.

The rule for both modules here: after a backward pass a parameter has a gradient in every group or in none. It has one where
a group that contributes has one; groups that have none add zeros. (To an optimizer, a gradient of zeros is not the same as
none.) And all groups start the same collectives in the same order: the gradients, then the map, or both in one.

(PyTorch reads the hook's annotations, so they are not postponed here.)
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch._dynamo  # DDP's constructor imports it, which takes a second: better now than while others wait
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import ReduceOp, Work
from torch.distributed.tensor import DTensor
from torch.nn import parallel

from torchft_ckpt.errors import ConfigError
from torchft_ckpt.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager

_MAX_CARRIER_BYTES = 4 << 20
"""The size of a last bucket that is copied together with the map."""
_MAX_BUCKET_BYTES = 25 << 20
"""As in PyTorch's DDP."""
_ONLY_REPLICAS = "it averages over the manager's replica groups alone; for several ranks in a group use fully_shard"
_OWN_BUFFERS = "buffers are each group's own; put what must be equal into the state dict"
_REFUSED = {
    "static_graph": "it rebuilds the buckets after the first step, and a group that returns would have other ones",
    "skip_all_reduce_unused_params": "groups that use other parameters would start other collectives",
    "delay_all_reduce_named_params": "it averages inside of this replica group alone; leave their parameters to DDP",
    "param_to_hook_all_reduce": "it belongs to delay_all_reduce_named_params",
    "mixed_precision": "it brings a communication hook of its own; use torch.autocast",
    "process_group": _ONLY_REPLICAS,
    "device_mesh": _ONLY_REPLICAS,
    "forward_sync_buffers": _OWN_BUFFERS,
    "broadcast_buffers": _OWN_BUFFERS,
}
"""Arguments of PyTorch's DDP that would leave groups apart, and why; None and False are what they are without."""


class DistributedDataParallel(parallel.DistributedDataParallel):
    """DDP over replica groups that come and go.

    Initial weights are made equal by the manager (`init_sync`), not by a broadcast. Buffers are not broadcast at all:
    what must be equal belongs into the state dict. A group may use other parameters in a step than another does, and parameters
    may be frozen and unfrozen, by all groups in the same step. What the backward pass reaches counts as used, whatever the
    module returns, and whether a parameter is used in its forward pass or elsewhere.

    Args:
        manager: of this rank.
        module: to train.
        kwargs: of PyTorch's DDP. `find_unused_parameters` is always on: without it the reducer rebuilds its buckets
            after the first step, and a replica that comes in later would have other ones than the rest. The bucket sizes
            are the same in all groups.

    Raises:
        ConfigError: an argument would leave the groups apart; the message says why.
    """

    def __init__(self, manager: "Manager", module: nn.Module, **kwargs: Any) -> None:
        for name, why in _REFUSED.items():
            if kwargs.get(name) is not None and kwargs[name] is not False:
                _refuse(name, why)
        kwargs["find_unused_parameters"] = True
        kwargs["init_sync"] = False  # it would copy all parameters through the dummy group
        kwargs["process_group"] = reduction = _BucketReduction(manager)
        super().__init__(module, **kwargs)
        self.broadcast_buffers = False  # likewise, before each forward pass
        self._reduction = reduction
        self._manager = manager
        self._is_known_to_work = False
        self._reached: _ReachedParameters | None = None
        self._connect()

    def _connect(self) -> None:
        """Tell the reducer how to average, and find out which parameters it has."""
        self._reduction.parameters = self._build_params_for_reducer()[0]
        if self._reached is not None:
            self._reached.leave()
        self._reached = _ReachedParameters(self, self._reduction.parameters)
        known = set(self._reduction.parameters)
        ignored = self.parameters_to_ignore
        self._frozen = [p for name, p in self.module.named_parameters() if p not in known and name not in ignored]
        super().register_comm_hook(self._reduction, _BucketReduction.average)

    def _rebuild(self) -> None:
        parameters, expect_sparse_gradient = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, expect_sparse_gradient, names, False)
        self._connect()

    @torch.compiler.disable(recursive=False)  # as PyTorch's is: the module is compiled, what surrounds it is not
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; begin a step where none is open: see `Manager.ensure_step`.

        Raises:
            ConfigError: it checkpoints activations in the way that DDP cannot follow, or another DDP holds this one.
            Also as `Manager.start_quorum`.
        """
        outer = parallel.DistributedDataParallel._get_active_ddp_module()
        if outer is not None and outer is not self and any(module is self for module in outer.modules()):
            _refuse_inside_another()
        if self._manager.hooks.computes_by_microbatches:
            return self.module(*inputs, **kwargs)  # the step sums the gradients of its microbatches
        if torch.is_grad_enabled():
            self._manager.ensure_step(is_training=self.training)
        if any(parameter.requires_grad for parameter in self._frozen):
            self._rebuild()
        output = super().forward(*inputs, **kwargs)
        if not self._is_known_to_work and torch.is_grad_enabled():
            _refuse_reentrant_checkpoints(output)
            self._is_known_to_work = True
        if torch.is_grad_enabled():
            self._manager.hooks.open_graphs.opens(id(self._reduction))
            self._manager.hooks.last_forward = self
            if self._reached is not None and self.require_backward_grad_sync:
                self._reached.is_awaited = True
            elif self._reached is not None:
                self._reached.accumulates = True
        return output

    def register_comm_hook(self, state: object, hook: object) -> NoReturn:
        """Refuse: the manager's average is the communication hook."""
        _refuse("register_comm_hook", "the manager's average is the communication hook, and DDP has one")

    def join(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: it asks the ranks of the process group, and the manager knows who is there."""
        _refuse("join", "it knows nothing of groups that come and go; let all groups make the same number of steps")

    def _set_static_graph(self) -> NoReturn:
        _refuse("_set_static_graph", _REFUSED["static_graph"])

    def __getstate__(self) -> NoReturn:
        message = (
            "DistributedDataParallel is not copied or pickled: it belongs to this process's Manager; take its `module`"
        )
        raise ConfigError(message, party="DistributedDataParallel")


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigError(f"DistributedDataParallel takes no {name}: {why}", party=name)


def _refuse_inside_another() -> NoReturn:
    message = (
        "torch's DistributedDataParallel holds this one, and writes gradients of this group alone over the average (accelerate"
        " and Fabric wrap a model so under a launcher): wrap in the other order,"
        " DistributedDataParallel(manager, accelerator.prepare(model))"
    )
    raise ConfigError(message, party="DistributedDataParallel")


class _ReachedParameters:
    """Tells a reducer which parameters a backward pass reaches, as the pass reaches the first of them.

    torch looks for them in the forward pass's output, and takes all others for unused: where a module returns an object, or a
    parameter is used outside of the forward pass, it would get a gradient after its bucket has gone. The pass itself knows.

    Args:
        parameters: of the reducer, in its order.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        self.is_awaited = False
        """A forward pass has ended, and the backward pass to average has not begun."""
        self.accumulates = False
        """It has ended within `no_sync`: the backward pass averages nothing."""
        self._ddp = weakref.ref(ddp)  # what hooks of autograd refer to is not collected
        self._parameters = parameters
        self._nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]
        self._lock = threading.Lock()
        self._graph_task = -1
        self._is_over = True
        self._unused: frozenset[int] = frozenset()
        this = weakref.ref(self)
        self._hooks = [node.register_prehook(partial(_reach, this, number)) for number, node in enumerate(self._nodes)]
        self._all = _Touched.apply(*parameters)

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def reach(self, number: int) -> None:
        """A backward pass is about to accumulate into this parameter. On a thread of autograd's.

        Raises:
            ConfigError: the pass is one within another, and neither knows what the other one reaches.
        """
        if self.is_awaited:
            with self._lock:  # of several devices' threads
                if self.is_awaited:
                    self._find()
                    self.is_awaited = False
        if self.accumulates:
            self.accumulates = False
            self._end_accumulating()
        if self._unused and number in self._unused:
            task = torch._C._current_graph_task_id()
            if task < self._graph_task or (task > self._graph_task and not self._is_over):
                message = (
                    "a backward pass within the backward pass (of a checkpoint, or of an autograd.Function) reaches parameters"
                    " that DistributedDataParallel could not find: use PureDistributedDataParallel"
                )
                raise ConfigError(message, party="DistributedDataParallel")

    def _end_accumulating(self) -> None:
        if (ddp := self._ddp()) is not None:
            ddp._manager.hooks.open_graphs.closes(id(ddp._reduction))

    def _find(self) -> None:
        ddp = self._ddp()
        if ddp is None:
            return
        will_execute = torch._C._will_engine_execute_node
        self._unused = frozenset(number for number, node in enumerate(self._nodes) if not will_execute(node))
        self._graph_task = torch._C._current_graph_task_id()
        reached = self._all
        if self._unused:
            self._is_over = False
            Variable._execution_engine.queue_callback(self._note_over)
            with torch.enable_grad():
                used = [one for number, one in enumerate(self._parameters) if number not in self._unused]
                reached = _Touched.apply(*used)
        ddp.reducer.prepare_for_backward([reached])

    def _note_over(self) -> None:
        self._is_over = True


def _reach(reached: "weakref.ref[_ReachedParameters]", number: int, _: object) -> None:
    if (there := reached()) is not None:
        there.reach(number)


class _Touched(torch.autograd.Function):
    """A tensor in whose graph a reducer finds the parameters that it was made of. Nobody goes back through it."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.empty((), device="cpu")


class _BucketReduction(ProcessGroupDummy):
    """The work of a reducer across replicas: the buckets, as its hook, and the map of used parameters, as its process group.

    The reducer starts the buckets in their order; when it starts the last one, all gradients of the backward pass are there.
    Then it reduces its map of the parameters that were used. It gives a gradient to what was used here at once, and looks at
    the map for what was not. What is entered instead is which parameters have a gradient, be it of an earlier pass. That goes
    with the last bucket, where this is small, as a collective of its own costs a millisecond of processor time.
    """

    def __init__(self, manager: "Manager") -> None:
        super().__init__(0, 1)
        self._manager = manager
        self.parameters: Sequence[nn.Parameter] = ()
        self.max_carrier_bytes = _MAX_CARRIER_BYTES
        self._counting: tuple[Work, torch.Tensor] | None = None

    @torch.compiler.disable
    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket, and with the last one to count the groups in which each parameter has a gradient."""
        gradients = bucket.buffer()
        if not bucket.is_last():
            return self._manager.allreduce(gradients).get_future()
        self._manager.hooks.open_graphs.closes(id(self))
        have_gradient = [parameter.grad is not None for parameter in self.parameters]
        is_carried = not gradients.is_sparse and gradients.nbytes <= self.max_carrier_bytes
        counts = torch.tensor(
            have_gradient, dtype=gradients.dtype if is_carried else torch.int32, device=gradients.device
        )
        if is_carried:
            num = gradients.numel()
            both = torch.cat([gradients, counts])
            work, counts = self._manager.allreduce(both), both[num:]
            future = work.get_future().then(lambda _: both[:num])
        else:
            future = self._manager.allreduce(gradients).get_future()
            work = self._manager.allreduce(counts, reduce_op=ReduceOp.SUM)
        self._counting = work, counts
        if not self._manager.is_participating():
            # What was used here alone has zeros when the reducer is done, which is after what is queued now.
            queue = Variable._execution_engine.queue_callback
            dropping = torch.compiler.disable(lambda: _drop_unused(self.parameters, counts, [work]))
            queue(torch.compiler.disable(lambda: queue(dropping)))
        return future

    @torch.compiler.disable
    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> Work:
        """Reduce the reducer's map, which is started after the last bucket."""
        if self._counting is None:
            raise ConfigError("PyTorch's reducer started its map before the last bucket: this PyTorch is not supported")
        (used,), (work, counts) = tensors, self._counting
        self._counting = None
        return _MapWork(work, counts, used)


class _MapWork(Work):
    """The reduction of a reducer's map: where no group has a gradient, nobody used the parameter. If the count has failed, each
    has one: the step does not count, and a script may ask for the gradients before it hears of that.

    Args:
        counts: of groups that have a gradient, of any dtype and scale.
        used: the map, int32.
    """

    def __init__(self, work: Work, counts: torch.Tensor, used: torch.Tensor) -> None:
        super().__init__()
        self._work, self._counts, self._used = work, counts, used

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._used.copy_(self._counts != 0) if self._work.wait() else self._used.fill_(1)
        return True


def _drop_unused(parameters: Sequence[nn.Parameter], counts: torch.Tensor, works: Sequence[Work]) -> None:
    """Take the gradient of what no group used; of nothing, if the works that counted have failed."""
    if not all([work.wait() for work in works]):
        return
    for parameter, count in zip(parameters, counts.tolist(), strict=True):
        if count == 0:
            parameter.grad = None


@torch.compiler.disable
def _refuse_reentrant_checkpoints(output: object) -> None:
    """Raise if the graph behind an output has nodes of reentrant checkpoints, which hide the parameters in them."""
    todo = [tensor.grad_fn for tensor in _tensors_in(output)]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            message = (
                "the module calls torch.utils.checkpoint with use_reentrant=True, which hides parameters from"
                " DistributedDataParallel; pass use_reentrant=False, or use PureDistributedDataParallel"
            )
            raise ConfigError(message, party="use_reentrant")
        seen.add(node)
        todo += [following for following, _ in node.next_functions]


def _tensors_in(output: object) -> Iterator[torch.Tensor]:
    return (tensor for tensor in parallel.distributed._find_tensors(output))


class BackwardAverage:
    """Averages what a module has accumulated, at the end of each backward pass through it.

    Who owns one calls `watch` after each forward pass. The average is the last that happens in the backward pass: PyTorch's DDP,
    where that wraps the module or is in it, has then written its own result into the gradients.

    Args:
        average: does it, on a thread of autograd's. It is not called if no parameter got a gradient since the last time.
        is_wanted: whether the backward pass that ends is one to average after, and not one that only accumulates.
    """

    def __init__(self, module: nn.Module, average: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        self._average = average
        self._is_wanted = is_wanted
        self._graph_task: int | None = None
        self._has_accumulated = False
        self._not_watched = list(module.parameters())

    def watch(self, output: object) -> None:
        """A forward pass has ended with this output; find the end of the backward pass through it."""
        self._graph_task = None
        for parameter in [p for p in self._not_watched if p.requires_grad]:
            parameter.register_post_accumulate_grad_hook(self._note_accumulated)
        self._not_watched = [p for p in self._not_watched if not p.requires_grad]
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._enter_backward)

    def _enter_backward(self, *_: torch.Tensor) -> None:
        """The backward pass reached an output: average at its end. A pass within it, of a checkpoint, has an end of its own."""
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            # What DDP queues in this pass comes before what is queued when the pass is over.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._leave_backward))

    def _note_accumulated(self, _: torch.Tensor) -> None:
        self._has_accumulated = True
        if self._graph_task is None:  # the output is in nothing that could be searched for tensors
            self._enter_backward()

    def _leave_backward(self) -> None:
        self._graph_task = None
        if self._has_accumulated and self._is_wanted():
            self._has_accumulated = False
            self._average()


class GradientAverage:
    """The average of a module's gradients over the replica groups, beside this group's own, from which it can be had again.

    All groups have the same parameters that require a gradient, and call `take` and `again` in the same order. Of DTensors it
    averages what is on this rank. It costs the memory of the gradients once more, as the buckets of PyTorch's DDP do.

    Args:
        parameters: returns those whose gradients, in `grad`, are averaged, if they require one.
    """

    def __init__(self, manager: "Manager", parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._manager = manager
        self._all = parameters
        self._own: list[torch.Tensor | None] = []

    def take(self) -> None:
        """Put the averages in place of the gradients that are there, and keep these until `forget`."""
        self._own = [parameter.grad for parameter in self._parameters()]
        self.again()

    def again(self) -> None:
        """Average what `take` has found once more, in another step; nothing if it was not called in this one."""
        parameters, own = self._parameters(), self._own
        if not own:
            return
        here = [_on_this_rank(parameter) for parameter in parameters]
        device = here[0].device if here else None
        counts = torch.tensor([gradient is not None for gradient in own], dtype=torch.int32, device=device)
        works, averages = [], []
        for bucket in _buckets(here):
            flat = torch.cat([_flat_gradient(parameters[number], own[number]) for number in bucket])
            works.append(self._manager.allreduce(flat))
            averages += flat.split([here[number].numel() for number in bucket])
        works.append(self._manager.allreduce(counts, reduce_op=ReduceOp.SUM))
        is_counted = all([work.wait() for work in works])
        for parameter, average, count in zip(parameters, averages, counts.tolist(), strict=True):
            parameter.grad = _gradient_of(parameter, average) if count or not is_counted else None

    def put_back(self) -> None:
        """Put the group's own gradients in place of the averages, for another backward pass to add to; then `take` once more."""
        for parameter, own in zip(self._parameters(), self._own, strict=False):
            parameter.grad = own
        self._own = []

    def forget(self) -> None:
        """Let go of the group's own gradients: the step is decided."""
        self._own = []

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._all() if parameter.requires_grad]


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Group neighbours of one dtype and device, by number: one parameter, or as many as have `_MAX_BUCKET_BYTES`."""
    bucket: list[int] = []
    num_bytes, kind = 0, None
    for number, parameter in enumerate(parameters):
        is_another = (parameter.dtype, parameter.device) != kind
        if bucket and (is_another or num_bytes + parameter.nbytes > _MAX_BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(number)
        num_bytes += parameter.nbytes
        kind = parameter.dtype, parameter.device
    if bucket:
        yield bucket


def _flat_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(_on_this_rank(parameter)).reshape(-1)
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)  # it has partial sums else
    return _on_this_rank(gradient).reshape(-1)


def _gradient_of(parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return flat.view_as(parameter)
    return DTensor.from_local(
        flat.view_as(_on_this_rank(parameter)),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class PureDistributedDataParallel(nn.Module):
    """One allreduce per gradient at the end of the backward pass, without DDP's reducer.

    Slower than `DistributedDataParallel`; for modules that its reducer cannot handle. All groups have the same parameters that
    require a gradient. Each backward pass averages all that has accumulated, but for those of forward passes in `no_sync`.

    Args:
        manager: of this rank.
        module: to train.
    """

    def __init__(self, manager: "Manager", module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._manager = manager
        self._averages_next = True
        self._averages = True
        self._backward = BackwardAverage(module, self._average, is_wanted=self._ends_backward)

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; begin a step where none is open: see `Manager.ensure_step`. Raises as `Manager.start_quorum`."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._manager.ensure_step(is_training=self.training)
        self._averages = self._averages_next
        output = self.module(*args, **kwargs)
        self._manager.hooks.open_graphs.opens(id(self))
        self._backward.watch(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: the backward passes of forward passes in it average nothing."""
        before, self._averages_next = self._averages_next, False
        try:
            yield
        finally:
            self._averages_next = before

    def _ends_backward(self) -> bool:
        self._manager.hooks.open_graphs.closes(id(self))
        return self._averages

    def _average(self) -> None:
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        works = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(self._manager.allreduce(parameter.grad))
        works.append(self._manager.allreduce(used, reduce_op=ReduceOp.SUM))
        _drop_unused(parameters, used, works)
