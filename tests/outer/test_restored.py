"""A checkpoint that is restored is what an outer loop begins from: its global parameters, in model and backup, bit for bit.

Real managers on threads, one or two groups of one rank. Each checkpoint was saved in the middle of a round, as training moved
the model away from the global parameters.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from support.fake_outer_manager import FakeOuterManager, Hub
from support.replicas import manager_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchft_ckpt import (
    Checkpointer,
    DiLoCo,
    LighthouseServer,
    LocalSGD,
    Restored,
    load_checkpoint,
)
from torchft_ckpt.core.durable.restore_source import RestoreSource

T = TypeVar("T")
LONG_S = 60.0
SYNC_EVERY = 4
NUM_BEFORE_SAVE = 2 * SYNC_EVERY + 3
KINDS = ["diloco", "streaming", "local_sgd"]


class Group:
    """A replica group of one rank with an outer loop and a checkpointer.

    Args:
        functions: the script's own state functions (model and inner optimizer): "none", or registered "before" or "after" the
            loop's; those return copies, as of a model on a device.
        mesh: shard the model over it.
        is_frozen: the first layer is, when the loop is made.
    """

    def __init__(
        self,
        address: str,
        storage: Path,
        *,
        kind: str = "diloco",
        functions: str = "none",
        number: int = 0,
        seed: int = 0,
        num_groups: int = 1,
        mesh: DeviceMesh | None = None,
        is_frozen: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self._batches = torch.Generator().manual_seed(seed)
        self._mesh = mesh
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        if mesh is not None:
            for layer in self.model:
                for name, param in list(layer.named_parameters()):
                    layer.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
        self.model[0].requires_grad_(not is_frozen)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.manager = manager_of(
            address,
            self._load if functions == "before" else None,
            self._state if functions == "before" else None,
            name=f"group_{number}",
            min_replica_size=num_groups,
            use_async_quorum=False,
        )
        self.loop: Any
        if kind == "local_sgd":
            self.loop = LocalSGD(self.manager, self.model, self.inner, SYNC_EVERY)
        else:
            fragments: list[nn.Module] = [self.model[:1], self.model[1:]] if kind == "streaming" else [self.model]
            self.loop = DiLoCo(
                self.manager,
                fragments,
                self.inner,
                [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments],
                SYNC_EVERY,
                fragment_sync_delay=1 if kind == "streaming" else 0,
                fragment_update_alpha=0.5 if kind == "streaming" else 0.0,
            )
        if functions == "after":
            self.manager.register_state_dict_fn("mine", self._load, lambda: copy.deepcopy(self._state()))
        self.checkpointer = Checkpointer(storage, manager=self.manager)

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.inner.zero_grad()
            batch = torch.randn(8, 4, generator=self._batches)
            inputs = batch if self._mesh is None else DTensor.from_local(batch, self._mesh, run_check=False)
            output = self.model(inputs)
            (output if self._mesh is None else output.full_tensor()).sub(batch.flip(1)).square().mean().backward()
            self.inner.step()

    def save(self) -> Saved:
        name = self.checkpointer.save().result(LONG_S).name
        return Saved(name, self.manager.current_step(), self.global_bits(), self.outer_bits())

    def model_bits(self) -> list[list[int]]:
        return [bits_of(param) for param in self.model.parameters()]

    def global_bits(self) -> list[list[int]]:
        backup = {
            id(param): fragment.original_parameters[name]
            for fragment in self.loop._fragments
            for name, param in fragment.params.items()
        }
        return [bits_of(backup[id(param)]) for param in self.model.parameters()]

    def outer_bits(self) -> list[list[int]]:
        return [
            bits_of(state["momentum_buffer"])
            for optimizer in self.loop._outer_optimizers
            for state in optimizer.state.values()
        ]

    def assert_begins_from(self, saved: Saved) -> None:
        found = Saved(saved.name, self.manager.current_step(), self.global_bits(), self.outer_bits())
        assert found == saved
        assert self.model_bits() == saved.globals

    def end(self) -> None:
        self.checkpointer.shutdown()
        self.manager.shutdown()


class Saved(NamedTuple):
    """What a checkpoint has to give back."""

    name: str
    step: int
    globals: list[list[int]]
    outer: list[list[int]]


def bits_of(tensor: torch.Tensor) -> list[int]:
    local = tensor.detach()
    plain = local.to_local() if isinstance(local, DTensor) else local
    bits: list[int] = plain.contiguous().reshape(-1).view(torch.int32).tolist()
    return bits


@contextmanager
def lighthouse(num_groups: int = 1) -> Iterator[str]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=num_groups, heartbeat_timeout_ms=5000)
    yield server.address()
    server.shutdown()


@contextmanager
def group_in(storage: Path, **options: Any) -> Iterator[Group]:
    """A job of one group."""
    with lighthouse() as address:
        group = Group(address, storage, **options)
        try:
            yield group
        finally:
            group.end()


def save_in_the_middle_of_a_round(storage: Path, **options: Any) -> Saved:
    with group_in(storage, **options) as group, group.loop:
        group.train(NUM_BEFORE_SAVE)
        assert group.model_bits() != group.global_bits()
        return group.save()


def together(num_groups: int, run: Callable[[Group], T], storage: Path, **options: Any) -> list[T]:
    """Run a job of several groups, each on a thread and with weights of its own; return what they return."""
    with lighthouse(num_groups) as address, ThreadPoolExecutor(num_groups) as pool:

        def live(number: int) -> T:
            group = Group(address, storage, number=number, seed=100 + number, num_groups=num_groups, **options)
            try:
                return run(group)
            finally:
                group.end()

        return [future.result(LONG_S) for future in [pool.submit(live, number) for number in range(num_groups)]]


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Saved]]:
    """Returns where a job has saved, and what; the same of each kind for all tests, which only read it."""
    known: dict[tuple[str, str], tuple[Path, Saved]] = {}

    def save(kind: str, functions: str = "none") -> tuple[Path, Saved]:
        if (kind, functions) not in known:
            storage = tmp_path_factory.mktemp("storage")
            known[kind, functions] = storage, save_in_the_middle_of_a_round(storage, kind=kind, functions=functions)
        return known[kind, functions]

    return save


@pytest.mark.slow
@pytest.mark.parametrize("functions", ["none", "before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_and_backup_are_the_saved_global_parameters_before_the_first_inner_step(
    saved_by: Callable[..., tuple[Path, Saved]], kind: str, functions: str
) -> None:
    storage, saved = saved_by(kind, functions)
    for is_within in (False, True):
        with group_in(storage, kind=kind, functions=functions, seed=1) as group:
            if not is_within:
                assert group.checkpointer.restore().step == saved.step
            with group.loop:
                if is_within:
                    assert group.checkpointer.restore().step == saved.step
                group.assert_begins_from(saved)
                group.train(SYNC_EVERY)
            assert group.manager.current_step() > saved.step


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["streaming", "local_sgd"])
def test_shards_are_restored_as_whole_parameters_are(tmp_path: Path, mesh: DeviceMesh, kind: str) -> None:
    saved = save_in_the_middle_of_a_round(tmp_path, kind=kind, mesh=mesh)
    with group_in(tmp_path, kind=kind, mesh=mesh, seed=1) as group:
        group.checkpointer.restore()
        with group.loop:
            group.assert_begins_from(saved)
            group.train(SYNC_EVERY)


@pytest.mark.parametrize("is_within", [False, True], ids=["before the loop", "within the loop"])
def test_groups_that_start_together_begin_from_it_and_stay_equal(
    saved_by: Callable[..., tuple[Path, Saved]], is_within: bool
) -> None:
    storage, saved = saved_by("streaming")

    def run(group: Group) -> tuple[int, list[list[int]]]:
        if not is_within:
            group.checkpointer.restore()
        with group.loop:
            if is_within:
                group.checkpointer.restore()
            group.assert_begins_from(saved)
            group.train(SYNC_EVERY)
            return group.manager.current_step(), group.global_bits()

    ends = together(2, run, storage, kind="streaming")
    assert ends[0] == ends[1]
    assert ends[0][0] == saved.step + 2


def test_one_that_restores_within_the_loop_when_another_has_already_takes_that_ones_state(
    saved_by: Callable[..., tuple[Path, Saved]],
) -> None:
    """Both have begun a job of fresh weights by then, which are not to win over the checkpoint."""
    storage, saved = saved_by("diloco")
    asks = threading.Event()

    def run(group: Group) -> RestoreSource:
        with group.loop:
            is_late = group.manager.replica_id().startswith("group_1")
            if is_late:
                assert asks.wait(LONG_S)
            else:
                begin = group.manager._client.begin
                group.manager._client.begin = lambda *args: (begin(*args), asks.set())[0]  # type: ignore[method-assign]
            restored: Restored = group.checkpointer.restore(timeout=timedelta(seconds=60 if is_late else 0.5))
            group.assert_begins_from(saved)
            group.train(SYNC_EVERY)
        return restored.source

    assert together(2, run, storage) == [RestoreSource.STORAGE, RestoreSource.PEERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "functions", "unfreezes"),
    [("diloco", "none", False), ("diloco", "before", False), ("local_sgd", "none", True)],
)
def test_a_group_that_comes_back_alone_takes_the_newest_of_the_others(
    tmp_path: Path, kind: str, functions: str, unfreezes: bool
) -> None:
    """Also where these have unfrozen layers since, that are frozen in the loop that it makes."""
    options: dict[str, Any] = {"kind": kind, "functions": functions, "is_frozen": unfreezes}
    saved = save_in_the_middle_of_a_round(tmp_path, **options)
    history: dict[int, list[list[int]]] = {}
    is_back = threading.Event()
    with lighthouse() as address:

        def survive() -> None:
            group = Group(address, tmp_path, seed=1, **options)
            try:
                group.checkpointer.restore()
                with group.loop:
                    group.model.requires_grad_(True)
                    while not is_back.is_set() or group.manager.num_participants() < 2:
                        group.train(SYNC_EVERY)
                        history[group.manager.current_step()] = group.global_bits()
                        may_come.set()
            finally:
                group.end()

        may_come = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            survivor = pool.submit(survive)
            assert may_come.wait(LONG_S)
            group = Group(address, tmp_path, number=1, seed=2, **options)
            try:
                restored = group.checkpointer.restore()
                with group.loop:
                    group.model(torch.zeros(1, 4))  # the loop begins
                    entered_at, found, model = group.manager.current_step(), group.global_bits(), group.model_bits()
                    is_back.set()
                    # The others handed a state of the script's own out within an iteration, whose rest is made here first.
                    group.train(SYNC_EVERY + (functions != "none"))
            finally:
                is_back.set()
                group.end()
            survivor.result(LONG_S)
    assert restored.source is RestoreSource.PEERS
    assert entered_at > saved.step
    assert model == found == history[entered_at]


def test_a_job_goes_back_to_a_checkpoint_in_the_middle_of_a_round_that_is_in_flight(tmp_path: Path) -> None:
    with group_in(tmp_path, kind="streaming") as group, group.loop:
        group.train(NUM_BEFORE_SAVE)
        saved = group.save()
        group.train(SYNC_EVERY)
        assert group.loop._exchange.in_flight
        remembered = copy.deepcopy(group.inner.state_dict()["state"])
        group.checkpointer.restore(step=saved.step)
        group.assert_begins_from(saved)
        assert str(group.inner.state_dict()["state"]) == str(remembered), "it was not saved, and stays as it is"
        group.train(SYNC_EVERY)
        assert group.manager.current_step() == saved.step + 2


# By hand


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_within", [False, True], ids=["before the loop", "within the loop"])
def test_a_checkpoint_loaded_by_hand_into_the_loop_and_the_manager_is_what_it_begins_from(
    saved_by: Callable[..., tuple[Path, Saved]], kind: str, is_within: bool
) -> None:
    storage, saved = saved_by(kind)
    key = "local_sgd" if kind == "local_sgd" else "diloco"
    with group_in(storage, kind=kind, seed=1) as group:
        if not is_within:
            load_checkpoint(storage / saved.name, {key: group.loop, "torchft": group.manager})
        with group.loop:
            if is_within:
                load_checkpoint(storage / saved.name, {key: group.loop, "torchft": group.manager})
            group.assert_begins_from(saved)
            group.train(SYNC_EVERY)
        assert group.manager.current_step() > saved.step


@pytest.mark.parametrize("when", ["before the loop", "within the loop", "between two loops"])
def test_a_model_loaded_by_hand_is_what_the_loop_begins_from(
    saved_by: Callable[..., tuple[Path, Saved]], when: str
) -> None:
    storage, saved = saved_by("diloco", "before")
    with group_in(storage, seed=1) as group:
        state = {"model": group.model.state_dict()}

        def load() -> list[list[int]]:
            load_checkpoint(storage / saved.name, state)
            group.model.load_state_dict(state["model"])
            group.manager.load_state_dict({"step": saved.step, "batches_committed": saved.step})
            return group.model_bits()

        if when == "between two loops":
            with group.loop:
                group.train(1)
        loaded = [] if when == "within the loop" else load()
        with group.loop:
            loaded = loaded or load()
            noted: list[list[list[int]]] = []
            group.inner.register_step_pre_hook(lambda *_: noted.append(group.global_bits()))
            group.train(1)
            assert noted == [loaded]
            group.train(SYNC_EVERY - 1)
        assert group.manager.current_step() == saved.step + 1


# What is saved


def test_global_parameters_put_into_the_model_do_not_get_into_a_save_that_is_in_flight(tmp_path: Path) -> None:
    """Where the script has registered the model, what `save` found in it is what is in the checkpoint."""
    with group_in(tmp_path, functions="before") as group, group.loop:
        group.train(NUM_BEFORE_SAVE)
        before = group.model_bits()
        future = group.checkpointer.save()
        group.loop.restore_parameters()
        assert group.model_bits() != before
        read = {"model": {name: torch.zeros_like(value) for name, value in group.model.state_dict().items()}}
        load_checkpoint(tmp_path / future.result(LONG_S).name, read)
    assert [bits_of(value) for value in read["model"].values()] == before


def test_a_backup_on_another_device_than_the_model_is_saved_as_the_part_that_it_is(mesh: DeviceMesh) -> None:
    """Taken for a whole tensor, one rank's part would be stored for all of them."""
    model = nn.Linear(4, 8)
    model.register_parameter("weight", nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)])))
    inner = torch.optim.SGD(model.parameters())
    loop = LocalSGD(FakeOuterManager(Hub(1), 0), model, inner, 2)
    (fragment,) = loop._fragments
    elsewhere = DTensor.from_local(torch.empty(8, 4, device="meta"), mesh, [Shard(0)], run_check=False)
    fragment.params["weight"] = nn.Parameter(elsewhere)

    held = loop.state_dict()["original_parameters"][0]["weight"]

    assert isinstance(held, DTensor) and held.placements == (Shard(0),)
    assert held.to_local().data_ptr() == fragment.original_parameters["weight"].data_ptr()
