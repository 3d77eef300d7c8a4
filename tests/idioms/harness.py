"""Runs a training loop, as a user writes it, as replica groups that die and come back, and compares its bits with the plain
loop.

A loop is a function of a `Job`. It is run

- by replica groups, each a thread with a real Manager, on a real lighthouse and a process group in memory: some steps without a
  death, then group 1 dies in the middle of one, its objects are thrown away, and it comes back with other random weights;
- as the plain loop (`plain.py`): torch's own DDP and optimizer, which replays who contributed to which step.

After each committed step everything that the loop has registered must be bit-equal to the plain loop's, in all groups, from
the step on to which they first contribute. A batch is a function of step and group, so it is the same in all runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from idioms.plain import Hub, Iteration, PlainDDP, PlainManager, step_as_planned
from idioms.plain_outer import PlainOuterLoop
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.waiting import wait_until
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from torchft_ckpt import (
    Checkpointer,
    DiLoCo,
    DistributedDataParallel,
    LighthouseServer,
    LocalSGD,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    set_all_reduce_hook,
)
from torchft_ckpt.ddp import PureDistributedDataParallel
from torchft_ckpt.manager import rank_config

if TYPE_CHECKING:
    from idioms.table import Idiom

NUM_STEPS = 9
NUM_STEPS_UNDISTURBED = 4
"""Where nobody dies."""
MAX_STEPS = 60
"""Of a run in which the group that died does not come to contribute."""
DIES_AT_STEP = 3
IS_BACK_BEFORE_STEP = 5
SAVED_STEP = 4
"""Of a job that is stopped there and started again."""
LIMIT_S = 120.0
LIMIT_WHILE_PENDING_S = 4.0
REFUSED_TOO_S = 0.2
"""How long the others have, once one is refused, to be refused too."""
_building = threading.Lock()
"""torch has one random generator for all threads: whoever draws from it holds this lock."""


class Died(BaseException):
    """A replica group dies here."""


class MortalManager(Manager):
    """A Manager that notes who contributed to what, and that dies in the middle of a step where it is told to."""

    life: Life
    _is_numbered = False
    """The open step's batches are numbered since its gradients were cleared."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        defers = self._steps.defers

        def number_and_defer() -> bool:
            if is_deferred := defers():
                self._is_numbered = True
                self.life.begin_step()
            return is_deferred

        self._steps.defers = number_and_defer  # type: ignore[method-assign]

    def start_quorum(self, *args: Any, **options: Any) -> None:
        is_numbered, self._is_numbered = self._is_numbered, False
        num_corrected = self.statistics().num_corrected
        super().start_quorum(*args, **options)
        if self.statistics().num_corrected > num_corrected:
            self.life.history.pop(self.current_step(), None)  # what was here before is not what it trains from
        if not options and not is_numbered:  # an outer loop's rounds begin in the middle of inner steps
            self.life.begin_step()
        if self.life.has_to_die():
            self.wait_quorum()  # the others count on it
            raise Died

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        is_again = self._steps._is_committed is not None
        committed = super().should_commit(timeout)
        if not is_again:
            self.life.note_vote(self, committed)
        return committed


Vote = tuple[int, int]
"""Step and quorum."""


@dataclass
class Run:
    """What happens in one run of replica groups."""

    num_groups: int
    num_steps: int
    lighthouse: LighthouseServer
    limit_s: float
    gloo: bool = False
    directory: str = ""
    saves: bool = False
    """Whatever the loop does, the job is restored as it begins, and saved at one step."""
    fabric: FakeFabric = field(default_factory=FakeFabric)
    lock: threading.Lock = field(default_factory=threading.Lock)
    contributors: dict[Vote, set[int]] = field(default_factory=dict)
    silent: dict[Vote, set[int]] = field(default_factory=dict)
    """Who was there and added zeros."""
    votes: list[tuple[Vote, bool]] = field(default_factory=list)
    """What group 0, which never dies, voted on, and the outcome."""
    returns: bool = False
    """A group dies and has a second life."""
    follows: bool = False
    """In that it receives the state outside of the quorum first."""
    has_spare: bool = False
    """Its second life is a spare, which is there from the start, and follows when the first one ends."""
    goes_on_without: bool = True
    """Those who stay make steps without it, whatever `min_replica_size` the loop gives. Else they wait for it."""
    second: list[Life] = field(default_factory=list)
    """The second lives of those that died."""
    has_ended: threading.Event = field(default_factory=threading.Event)
    """A life has ended, whichever."""
    is_awaited: threading.Event = field(default_factory=threading.Event)
    """The others have come to the step at which it returns."""

    def __post_init__(self) -> None:
        self.max_steps = 5 * MAX_STEPS if self.follows else MAX_STEPS
        self.stops_at = self.max_steps if self.returns else self.num_steps

    def decide_when_to_stop(self, step: int) -> None:
        """Stop two steps on, once the group that came back contributes; the others cannot be further than this step."""
        is_open = self.returns and self.stops_at == self.max_steps and step >= self.num_steps - 2
        if is_open and self.second and all(life.contributed or life.error is not None for life in self.second):
            self.stops_at = step + 2

    def wait_for_return(self) -> None:
        """Return when the second lives have asked for a quorum: so they enter at the same step in each run."""
        self.is_awaited.set()
        if self.returns:
            wait_until(self._has_asked, "the group that died comes back", self.limit_s)

    def wait_for_all(self) -> None:
        """Return when the lighthouse knows all groups."""
        wait_until(
            lambda: (
                self.has_ended.is_set()
                or sum(len(job.members) for job in list(self.lighthouse._jobs.states.values())) >= self.num_groups
            ),
            "all groups have started",
            self.limit_s,
        )

    def _has_asked(self) -> bool:
        jobs = list(self.lighthouse._jobs.states.values())
        waiting = {replica_id for job in jobs for replica_id in job._job.waiting}
        return bool(self.second) and all(
            life.error is not None or (life.current is not None and life.current.replica_id() in waiting)
            for life in self.second
        )

    def begun_by(self) -> int:
        """Return the group whose weights the job began with: the first that contributed to the first step."""
        return min(self.contributors[min(self.contributors)], default=0) if self.contributors else 0

    def plan(self) -> list[Iteration]:
        return [
            Iteration(
                committed=committed,
                contributors=frozenset(self.contributors.get(vote, set())),
                silent=frozenset(self.silent.get(vote, set())),
            )
            for vote, committed in self.votes
        ]


Snapshot = Mapping[str, Any]


class Job:
    """What a loop is written against: the objects of this library, or those of plain torch."""

    group: int
    num_steps: int
    current: Any
    """The manager, once the loop has made it."""

    def __init__(self) -> None:
        self.history: dict[int, Snapshot] = {}
        """What was registered after each committed step."""
        self._num_batches = 0
        self._batches_at_step = -1
        self._is_building = False

    # ------------------------------------------------------------------------------------------------ the loop calls this

    def manager(
        self,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Any:
        raise NotImplementedError

    def ddp(self, module: nn.Module, **options: Any) -> Any:
        raise NotImplementedError

    def pure_ddp(self, module: nn.Module) -> Any:
        raise NotImplementedError

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        raise NotImplementedError

    def average_shards(self, model: nn.Module) -> None:
        """Average the gradients of a model that `fully_shard` was applied to (`set_all_reduce_hook`)."""
        raise NotImplementedError

    def local_sgd(self, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int) -> Any:
        raise NotImplementedError

    def diloco(
        self,
        fragments: Sequence[nn.Module],
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        **options: Any,
    ) -> Any:
        raise NotImplementedError

    def outer_scheduler(self, scheduler: Any) -> Any:
        """Return `manager.scheduler` of the scheduler of an outer optimizer."""
        return self.current.scheduler(scheduler)

    def checkpointer(self) -> Any:
        """Return a `Checkpointer` of the job, for loops that are stopped and started again."""
        raise NotImplementedError

    @property
    def mesh(self) -> DeviceMesh:
        """A mesh of one rank: this group's."""
        return one_rank_mesh()

    def goes_on(self) -> bool:
        raise NotImplementedError

    @property
    def step(self) -> int:
        """The step that is trained."""
        return int(self.current.current_step())

    def batch(self, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch: the first, second, ... of this step for this group. One that is tried again has the same."""
        x = self.randn(rows, 6)
        return x, torch.tanh(x[:, :3] - 0.5 * x[:, 3:])

    def randn(self, *shape: int) -> torch.Tensor:
        """Return numbers that are a function of step, group and how many were drawn in this step."""
        if self._batches_at_step != self.step:
            self._batches_at_step, self._num_batches = self.step, 0
        self._num_batches += 1
        seed = (self.step * 16 + self.group) * 64 + self._num_batches
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    @contextmanager
    def random(self) -> Iterator[None]:
        """Seed torch's generator by step and group, and keep other threads from it."""
        with _building:
            torch.default_generator.manual_seed(self.step * 16 + self.group)
            yield

    # --------------------------------------------------------------------------------------------------------- inside

    def begin_step(self) -> None:
        self._num_batches = 0

    def begin(self, seed: int) -> None:
        _building.acquire()
        self._is_building = True
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes 3 ms, for devices that are not here

    def built(self) -> None:
        if self._is_building:
            self._is_building = False
            _building.release()

    def look(self) -> None:
        if self.step > 0 and self.step not in self.history:
            self.history[self.step] = bits_of(self.registered())

    def registered(self) -> dict[str, Any]:
        raise NotImplementedError


class Life(Job):
    """One life of a replica group."""

    def __init__(
        self, run: Run, group: int, *, seed: int, dies_at: int | None = None, comes_back: bool = False
    ) -> None:
        super().__init__()
        self.seed = seed
        self.run = run
        self.group = group
        self.num_steps = run.num_steps
        self.dies_at = dies_at
        self.comes_back = comes_back
        self.error: BaseException | None = None
        self.current: MortalManager | None = None  # type: ignore[assignment]
        self.contributed: list[int] = []
        self.is_discarded = False
        """The step that was voted on last."""
        self._checkpointer: Checkpointer | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._loop: Callable[[Job], None]

    def has_to_die(self) -> bool:
        """Whether it dies in this step."""
        is_due = self.dies_at is not None and self.step >= self.dies_at
        return is_due and (not self.run.has_spare or any(life.follows for life in self.run.second))

    @property
    def follows(self) -> bool:
        """It has received a state outside of the quorum."""
        now = self.current and self.current.view()
        return now is not None and now.follows and now.version.proven

    def start(self, loop: Callable[[Job], None]) -> None:
        self._loop = loop
        self._thread.start()

    def join(self, limit_s: float) -> bool:
        """Return whether it has ended by itself."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def end(self) -> None:
        if self.current is not None:
            self.current.shutdown()

    def _live(self) -> None:
        try:
            self.begin(self.seed)
            self._loop(self)
            self.look()
        except Died:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.built()
            self.run.has_ended.set()
            if self.group == 0:
                self.run.is_awaited.set()
            if self.current is not None:
                self.current.shutdown(wait=False)

    def manager(
        self,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        **options: Any,
    ) -> MortalManager:
        self.built()
        if self.comes_back and self.run.has_spare:
            self.run.wait_for_all()
            options = {**options, "spare": True}
        elif self.comes_back and self.run.goes_on_without:
            self.run.is_awaited.wait(self.run.limit_s)
        limit = timedelta(seconds=self.run.limit_s)
        min_replica_size = self.run.num_groups if self.run.saves else 1
        options = {"min_replica_size": min_replica_size, "timeout": limit, "follow": self.run.follows, **options}
        if self.run.returns and self.run.goes_on_without:
            options["min_replica_size"] = 1
        self.current = MortalManager(
            ProcessGroupGloo(timeout=limit) if self.run.gloo else FakeProcessGroup(self.run.fabric, limit),
            load_state_dict,
            state_dict,
            lighthouse_addr=self.run.lighthouse.address(),
            replica_id=f"group_{self.group}{'_spare' * (self.comes_back and self.run.has_spare)}",
            hostname="127.0.0.1",
            **options,
        )
        self.current.life = self
        if not self.comes_back:
            self.run.wait_for_all()
        return self.current

    def ddp(self, module: nn.Module, **options: Any) -> nn.Module:
        return DistributedDataParallel(self.current, module, **options)

    def pure_ddp(self, module: nn.Module) -> nn.Module:
        return PureDistributedDataParallel(self.current, module)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return Optimizer(self.current, optimizer)

    def average_shards(self, model: nn.Module) -> None:
        set_all_reduce_hook(self.current, model)

    def local_sgd(self, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int) -> LocalSGD:
        return begins_at_once(LocalSGD(self.current, model, optimizer, sync_every), [model])

    def diloco(
        self,
        fragments: Sequence[nn.Module],
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        **options: Any,
    ) -> DiLoCo:
        return begins_at_once(DiLoCo(self.current, fragments, inner, outer, sync_every, **options), fragments)

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.run.directory, manager=self.current, save_random_state=False)

    def randn(self, *shape: int) -> torch.Tensor:
        late_by = self.step - self.num_steps - 2
        if self.group == 0 and late_by > 0:  # who is not waited for can only come in where a step takes some time
            time.sleep(0.05 if self.run.follows else 0.05 * late_by)
        return super().randn(*shape)

    def _save(self) -> None:
        if self._checkpointer is None:
            self._checkpointer = self.checkpointer()
            self._checkpointer.restore()
        elif self.step == SAVED_STEP:
            self._checkpointer.save()
        if self.step >= self.run.stops_at:
            self._checkpointer.shutdown()

    @contextmanager
    def random(self) -> Iterator[None]:
        self.current.ensure_step()  # others wait for a thread that begins its step, which must not wait for their lock
        with super().random():
            yield

    def goes_on(self) -> bool:
        if self.run.saves:
            self._save()
        # What the loop has changed since it came in goes back; and in a discarded step it has set what it sets in each.
        if not self.current.view().came_in and not self.is_discarded:
            self.look()
        if self.group == 0:
            is_alone = self.run.has_ended.is_set() or not self.run.returns  # the other may not have come in yet
            waits = self.step >= IS_BACK_BEFORE_STEP and not self.run.has_spare
            if waits and is_alone and not self.run.is_awaited.is_set():
                self.run.wait_for_return()
            if self.run.follows and (self.step >= IS_BACK_BEFORE_STEP or self.run.has_spare):
                time.sleep(0.02)  # a learner is close for a part of a step
            self.run.decide_when_to_stop(self.step)
        return self.step < self.run.stops_at

    def registered(self) -> dict[str, Any]:
        return dict(self.current.hooks.registry.capture())

    def note_vote(self, manager: Manager, committed: bool) -> None:
        self.is_discarded = not committed
        step = manager.current_step() - committed
        vote = step, manager.statistics().quorum_id
        with self.run.lock:
            kind = self.run.contributors if manager.is_participating() else self.run.silent
            kind.setdefault(vote, set()).add(self.group)
            if committed and manager.is_participating():
                self.contributed.append(step)
            if self.group == 0:
                self.run.votes.append((vote, committed))
        if not committed:
            self.begin_step()  # who comes in has tried none


class _Look(nn.Module):
    """A forward pass of what holds all fragments."""

    def __init__(self, fragments: Sequence[nn.Module]) -> None:
        super().__init__()
        self.fragments = nn.ModuleList(fragments)

    def forward(self) -> None: ...


L = TypeVar("L", DiLoCo, LocalSGD)


def begins_at_once(loop: L, fragments: Sequence[nn.Module]) -> L:
    """Return the loop, which begins where it is entered: batches are a function of the step, and drawn before a forward pass."""

    class Begun(type(loop)):  # type: ignore[misc]
        def __enter__(self) -> Any:
            super().__enter__()
            _Look(fragments)()
            return self

    loop.__class__ = Begun
    return loop


class NoCheckpointer:
    """The plain loop is never stopped."""

    def restore(self) -> None: ...

    def save(self, **_: Any) -> None: ...

    def shutdown(self) -> None: ...


class PlainLife(Job):
    """One group of the plain loop."""

    def __init__(self, hub: Hub, group: int, plan: list[Iteration], num_steps: int, begun_by: int = 0) -> None:
        super().__init__()
        self.group = group
        self._seed = 100 + begun_by
        self.num_steps = num_steps
        self.current = PlainManager(hub, group, plan, on_begin=self.begin_step)
        self._state_dict: Callable[[], Any] | None = None

    def live(self, loop: Callable[[Job], None]) -> None:
        try:
            self.begin(self._seed)  # all begin with the weights of one group
            loop(self)
            self.look()
        finally:
            self.built()

    def manager(
        self,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        **options: Any,
    ) -> PlainManager:
        self.built()
        self._state_dict = state_dict
        return self.current

    def ddp(self, module: nn.Module, **options: Any) -> nn.Module:
        return PlainDDP(self.current, module, **options)

    def pure_ddp(self, module: nn.Module) -> nn.Module:
        return PlainDDP(self.current, module)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return step_as_planned(self.current, optimizer)

    def average_shards(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda gradients: self.current.allreduce(gradients) and None)

    def local_sgd(self, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int) -> PlainOuterLoop:
        has_own_state = self._state_dict is not None
        return PlainOuterLoop(
            self.current, [model], optimizer, [], sync_every, has_own_state=has_own_state, key="local_sgd"
        )

    def diloco(
        self,
        fragments: Sequence[nn.Module],
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        **options: Any,
    ) -> PlainOuterLoop:
        outers = [outer] * len(fragments) if isinstance(outer, torch.optim.Optimizer) else outer
        delay, alpha = options.get("fragment_sync_delay", 0), options.get("fragment_update_alpha", 0.0)
        return PlainOuterLoop(
            self.current,
            fragments,
            inner,
            outers,
            sync_every,
            delay=delay,
            alpha=alpha,
            has_own_state=self._state_dict is not None,
            key="diloco",
        )

    def outer_scheduler(self, scheduler: Any) -> Any:
        return self.current.outer_scheduler(scheduler)

    def checkpointer(self) -> NoCheckpointer:
        return NoCheckpointer()

    def goes_on(self) -> bool:
        self.look()
        return not self.current.is_over

    def registered(self) -> dict[str, Any]:
        own = {} if self._state_dict is None else {"default": self._state_dict()}
        return {**own, **{key: get() for key, get in self.current.extras.items()}}


def one_rank_mesh() -> DeviceMesh:
    """Return a mesh of one rank, for groups that are threads; needs a process group of torch (`torch_process_group`)."""
    return _mesh[0]


_mesh: list[DeviceMesh] = []


@contextmanager
def torch_process_group() -> Iterator[None]:
    """torch.distributed with one rank, which FSDP wants, and one TCPStore for all groups.

    Each group of one rank would host its own, and where no name server answers, torch takes 5 s now and then to connect.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _mesh.append(init_device_mesh("cpu", (1,)))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    host_store, rank_config._host_store = rank_config._host_store, lambda: store
    try:
        yield
    finally:
        rank_config._host_store = host_store
        _mesh.clear()
        dist.destroy_process_group()


def states(**parts: Any) -> tuple[Callable[[Any], None], Callable[[], Any]]:
    """Return the pair of functions that most loops register: those of each part, by name."""

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    return load_state_dict, lambda: {name: part.state_dict() for name, part in parts.items()}


def bits_of(value: Any, path: str = "") -> dict[str, Any]:
    """Return copies of all leaves of a state by their paths, tensors as their bytes."""
    found: dict[str, Any] = {}
    _add_bits(found, value, path)
    return found


_PLAIN = (int, float, str, bytes, bool, type(None))


def _add_bits(found: dict[str, Any], value: Any, path: str) -> None:
    # The commonest first: this is called for every leaf after every step of every loop.
    if isinstance(value, _PLAIN):
        found[path] = value
    elif isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value).detach().cpu().contiguous()
        found[path] = (str(local.dtype), tuple(local.shape), local.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add_bits(found, item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            _add_bits(found, item, f"{path}/{key}")
    else:
        found[path] = repr(value)


# --------------------------------------------------------------------------------------------------------------- running it


@dataclass
class Outcome:
    """What came of a run of replica groups."""

    run: Run
    lives: list[Life]
    errors: list[BaseException]
    """What the loops raised, before anything was ended from outside."""


def run_groups(
    loop: Callable[[Job], None],
    *,
    dies: bool,
    num_groups: int = 2,
    gloo: bool = False,
    waits: bool = False,
    refused: bool = False,
    num_steps: int = NUM_STEPS,
    directory: str = "",
    saves: bool = False,
    seed: int = 100,
    limit_s: float = LIMIT_S,
    follows: bool = False,
    has_spare: bool = False,
    goes_on_without: bool = True,
    num_dying: int = 1,
) -> Outcome:
    """Run a loop as replica groups; nothing of it is left running. `num_dying`: so many die in the same step, if one does.

    `goes_on_without`: see `Run`.

    Raises:
        AssertionError: a group did not come to its end.
    """
    lighthouse = LighthouseServer(
        "127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=60_000
    )  # all live in this process
    run = Run(
        num_groups,
        num_steps,
        lighthouse,
        limit_s,
        gloo=gloo,
        directory=directory,
        saves=saves,
        returns=dies,
        follows=follows or has_spare,
        has_spare=has_spare,
        goes_on_without=goes_on_without,
    )
    lives = [
        Life(run, group, seed=seed + group, dies_at=DIES_AT_STEP if dies and 1 <= group <= num_dying else None)
        for group in range(num_groups)
    ]
    stuck: list[Life] = []
    try:
        for life in lives:
            life.start(loop)
        dying = range(1, 1 + num_dying) if dies else ()
        if has_spare or all(lives[group].join(limit_s) for group in dying):
            run.second = [Life(run, group, seed=seed + num_groups + group, comes_back=True) for group in dying]
            lives += run.second
            for life in run.second:
                life.start(loop)
        if refused:
            wait_until(lambda: run.has_ended.is_set(), "somebody refuses it", limit_s)
            for life in lives:
                life.join(REFUSED_TOO_S)
            return Outcome(run, lives, [life.error for life in lives if life.error is not None])
        stuck = [life for life in lives if not life.join(0.1 if waits and life.group else limit_s)]
        if waits:
            assert [life.group for life in stuck] == [1], "group 1 should wait, and group 0 should not"
            return Outcome(run, lives[:1], [])
    finally:
        for life in lives:
            life.end()
        lighthouse.shutdown()
    errors = [life.error for life in lives if life.error is not None]
    assert not stuck, (
        f"after {limit_s} s these have not come to their end: {[life.group for life in stuck]}; errors: {errors}"
    )
    return Outcome(run, lives, [life.error for life in lives if life.error is not None])


def run_plain(
    loop: Callable[[Job], None], plan: list[Iteration], num_groups: int, num_steps: int, begun_by: int = 0
) -> list[PlainLife]:
    """Run the plain loop as a plan says, from the weights of the group that `Run.begun_by` names."""
    hub = Hub(num_groups)
    lives = [PlainLife(hub, group, plan, num_steps, begun_by) for group in range(num_groups)]
    errors: list[BaseException] = []

    def live(plain: PlainLife) -> None:
        try:
            plain.live(loop)
        except BaseException as error:
            errors.append(error)
            hub.give_up()

    threads = [threading.Thread(target=live, args=(plain,), daemon=True) for plain in lives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    return lives


def differences(life: Life, plain: Job, own: tuple[str, ...], late: tuple[str, ...] = ()) -> list[str]:
    """Say where a life's registered state differs from another run's; `own`, `late`: see `Idiom`."""
    found = []
    last = max(life.history.keys() & plain.history.keys(), default=0)
    # Who contributes holds the state; what one that came back holds before is nobody's business.
    begins = min(life.contributed, default=MAX_STEPS)
    for step, mine in life.history.items():
        if step < begins:
            continue
        theirs = plain.history.get(step)
        if theirs is None:
            continue
        for path in sorted(set(mine) | set(theirs)):
            if any(part in path for part in (own if step == last else own + late)):
                continue
            if mine.get(path) != theirs.get(path):
                found.append(
                    f"group {life.group}, step {step}: {path}: {_show(mine, path)} is not {_show(theirs, path)}"
                )
    return found


def _show(snapshot: Snapshot, path: str) -> str:
    if path not in snapshot:
        return "missing"
    value = snapshot[path]
    return f"{value[0]}{list(value[1])} {value[2][:8].hex()}" if isinstance(value, tuple) else repr(value)


def check(entry: Idiom, *, dies: bool, **options: Any) -> Outcome:
    """Run an idiom as groups, and compare what `Idiom.compare` says. `options`: more of `run_groups`.

    Raises:
        AssertionError: a bit differs, or the run was not what it should be.
        Whatever a group's loop raised.
    """
    loop, num_groups = entry.loop, options.pop("num_groups", entry.num_groups)
    limit_s = LIMIT_WHILE_PENDING_S if entry.pending else LIMIT_S
    outcome = run_groups(
        loop,
        dies=dies,
        num_groups=num_groups,
        num_steps=NUM_STEPS if dies else NUM_STEPS_UNDISTURBED,
        gloo=entry.gloo,
        waits=entry.waits,
        limit_s=limit_s,
        **options,
    )
    _raise_errors(outcome)
    if dies:
        for back in outcome.run.second:
            assert back.current is not None and back.current.statistics().num_healed >= 1, "the group did not heal"
            assert back.contributed, "the group that came back contributed to no step"
    if entry.compare != "nothing":
        others = None
        if entry.compare == "plain":
            plan = outcome.run.plan()
            if entry.num_discards:
                num_discarded = sum(not iteration.committed for iteration in plan)
                assert num_discarded >= entry.num_discards, f"only {num_discarded} steps were discarded"
                plan = [iteration for iteration in plan if iteration.committed]
            others = run_plain(loop, plan, num_groups, outcome.run.num_steps, outcome.run.begun_by())
        _compare(entry, outcome, others)
    return outcome


def check_restart(entry: Idiom, directory: str) -> None:
    """Run an idiom to the middle, start the whole job again in new threads with other weights, and compare its end.

    Args:
        entry: its loop saves and restores by `Job.checkpointer`; for any other that is done for it.
        directory: where to.

    Raises: as `check`.
    """
    limit_s = LIMIT_WHILE_PENDING_S if entry.pending else LIMIT_S
    plan: list[Iteration] = []
    outcomes = []
    for num_steps, seed in ((SAVED_STEP, 100), (NUM_STEPS, 500)):
        outcomes.append(
            run_groups(
                entry.loop,
                dies=False,
                num_steps=num_steps,
                seed=seed,
                directory=directory,
                saves=not entry.restarts,
                limit_s=limit_s,
            )
        )
        _raise_errors(outcomes[-1])
        plan += outcomes[-1].run.plan()
    plains = run_plain(entry.loop, plan, entry.num_groups, NUM_STEPS, outcomes[0].run.begun_by())
    for outcome in outcomes:
        _compare(entry, outcome, plains)


def _raise_errors(outcome: Outcome) -> None:
    for error in outcome.errors:
        raise error


def _compare(entry: Idiom, outcome: Outcome, plains: Sequence[Job] | None) -> None:
    """Compare the lives of a run with the plain loop's, or with the first of them where there is none."""
    others: Sequence[Job] = plains if plains is not None else [outcome.lives[0]] * outcome.run.num_groups
    found = [line for life in outcome.lives for line in differences(life, others[life.group], entry.own, entry.late)]
    about = f"votes {outcome.run.votes}, contributors {outcome.run.contributors}"
    assert not found, "\n".join([f"{len(found)} differences; {about}", *found[:12]])
    num_compared = sum(len(life.history.keys() & others[life.group].history.keys()) for life in outcome.lives)
    assert num_compared >= entry.num_groups * 2, f"too little was compared; {about}"
