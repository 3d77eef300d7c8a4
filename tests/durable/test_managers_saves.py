"""A Manager's job saves: what is its own, what is every group's, and the same step in two places."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.replicas import ends, lighthouse_of, manager_of
from torch import nn

from torchft_ckpt import Checkpointer, Manager, Optimizer, Tier, load_checkpoint
from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.core.durable.restore_source import RestoreSource
from torchft_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    StateDictLoadError,
    StateMismatchError,
    StorageError,
    UnsupportedValueError,
)
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.volatile import tensors_in

SHORT = timedelta(seconds=20)
LONG_S = 60.0


def make_manager(address: str, load: Callable[[Any], None], state: Callable[[], object]) -> Manager:
    """Return the Manager of a group of one rank."""
    return ends(manager_of(address, load, state, name="group_0", use_async_quorum=False))


class Group:
    """A replica group of one, with buffers that its forward pass changes."""

    def __init__(self, address: str) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.manager = make_manager(
            address,
            lambda state: self.model.load_state_dict(state["model"]),
            lambda: {"model": self.model.state_dict()},
        )
        self.optimizer = Optimizer(self.manager, self.sgd)

    def forward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 4)).square().mean().backward()

    def step(self) -> None:
        self.forward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        self.optimizer.step()

    def bits(self) -> dict[str, list[int]]:
        return bits_of(self.model.state_dict())


def bits_of(state: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: tensor.detach().reshape(-1).view(torch.uint8).tolist() for name, tensor in state.items()}


@pytest.fixture
def address() -> str:
    return lighthouse_of(1).address()


@pytest.mark.parametrize("given", [False, True])
def test_statistics_that_the_next_forward_pass_changes_are_those_of_the_save(
    tmp_path: Path, address: str, given: bool
) -> None:
    group = Group(address)
    checkpointer = ends(Checkpointer(tmp_path, manager=group.manager))
    group.step()
    before = group.bits()
    future = checkpointer.save({"model": group.model.state_dict()} if given else None)
    group.forward()
    saved = future.result(LONG_S)
    read = {"model": {name: torch.zeros_like(value) for name, value in group.model.state_dict().items()}}
    load_checkpoint(tmp_path / saved.name, read)
    assert bits_of(read["model"]) == before


def test_a_large_buffer_that_forward_passes_write_is_that_of_the_save(tmp_path: Path, address: str) -> None:
    """As the codebook of a quantizer, or a queue of keys, many times over while it is being written."""
    group = Group(address)
    group.model.register_buffer("codebook", torch.zeros(8 * 1024 * 1024))
    checkpointer = ends(Checkpointer(tmp_path, manager=group.manager))
    group.step()
    group.model.codebook.fill_(3)
    future = checkpointer.save()
    while not future.done():
        group.model.codebook.data.add_(1)
    read = {"model": {"codebook": torch.zeros(8 * 1024 * 1024)}}
    load_checkpoint(tmp_path / future.result(LONG_S).name, read)
    assert read["model"]["codebook"].unique().tolist() == [3.0]


def test_steps_of_an_optimizer_that_nobody_guards_do_not_get_into_the_save(tmp_path: Path, address: str) -> None:
    """As in torchft's plain loop: `if manager.should_commit(): optimizer.step()`."""
    weights = torch.nn.Parameter(torch.zeros(2_000_000))
    sgd = torch.optim.SGD([weights], lr=1.0)
    manager = make_manager(address, lambda state: None, lambda: {"weights": weights.detach()})
    checkpointer = ends(Checkpointer(tmp_path, manager=manager))

    def step() -> None:
        manager.start_quorum()
        weights.grad = torch.full_like(weights, -1.0)
        manager.allreduce(weights.grad).wait()
        assert manager.should_commit()
        sgd.step()

    step()
    future = checkpointer.save()
    for _ in range(3):
        step()
    read = {"weights": torch.zeros_like(weights)}
    load_checkpoint(tmp_path / future.result(LONG_S).name, read)
    assert read["weights"].unique().tolist() == [1.0]


def test_a_step_that_is_saved_to_disk_and_to_storage_is_restored_from_the_nearer_one(
    tmp_path: Path, address: str
) -> None:
    """Its parts are other ones here and there; taken for one checkpoint they would be of no use."""
    places: dict[str, Any] = {"location": tmp_path / "storage", "local_location": tmp_path / "local", "keep_last": 1}
    group = Group(address)
    checkpointer = ends(Checkpointer(manager=group.manager, **places))
    group.step()
    checkpointer.save().result(LONG_S)
    group.step()
    checkpointer.save(tier=Tier.LOCAL).result(LONG_S)
    last = checkpointer.save()
    assert last.result(LONG_S).is_closed
    assert checkpointer.save() is last, "of a step that is saved already"
    assert checkpointer.save(tier=Tier.LOCAL).result(LONG_S).name.endswith("-local")
    before = group.bits()
    checkpointer.shutdown()
    group.manager.shutdown()
    for source in (RestoreSource.LOCAL_DISK, RestoreSource.STORAGE):
        again = Group(address)
        checkpointer = ends(Checkpointer(manager=again.manager, **places))
        restored = checkpointer.restore()
        assert (restored.source, restored.step, again.bits()) == (source, 2, before)
        checkpointer.shutdown()
        again.manager.shutdown()
        for left in tmp_path.glob("local/*/*"):
            left.unlink()


def test_a_manager_restores_whatever_the_default_device_is(tmp_path: Path, address: str) -> None:
    """What is here and cannot be read into, as on a GPU, is read into memory that is made for it."""

    def job() -> tuple[dict[str, Any], Manager, Checkpointer]:
        state = {"w": torch.zeros(3), "z": torch.zeros(2, dtype=torch.complex64).conj()}
        manager = make_manager(address, state.update, lambda: state)
        return state, manager, Checkpointer(tmp_path, manager=manager)

    state, manager, checkpointer = job()
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    assert manager.should_commit()
    state.update(w=torch.ones(3), z=torch.tensor([1j, 2.0]))
    checkpointer.save().result(LONG_S)
    checkpointer.shutdown()
    manager.shutdown()
    again, manager, checkpointer = job()
    with torch.device("meta"):
        restored = checkpointer.restore(step=1)
    assert (restored.source, restored.step) == (RestoreSource.STORAGE, 1)
    assert all(again[name].tolist() == value.tolist() for name, value in state.items())
    checkpointer.shutdown()


@pytest.mark.parametrize("why", ["its bytes are damaged", "load_state_dict raises", "the Manager's own part is none"])
def test_a_restore_that_dies_half_way_says_torn_and_its_manager_knows(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    group = Group(address)
    checkpointer = ends(Checkpointer(tmp_path, manager=group.manager))
    group.step()
    checkpointer.save().result(LONG_S)
    (directory,) = tmp_path.iterdir()
    if why == "its bytes are damaged":
        (file,) = directory.glob("*.distcp")
        data = bytearray(file.read_bytes())
        at = data.index(group.model[0].weight.detach().numpy().tobytes())
        data[at] ^= 1
        file.write_bytes(data)
    elif why == "load_state_dict raises":
        monkeypatch.setattr(group.model, "load_state_dict", lambda state: state["a layer too many"])
    else:
        monkeypatch.setattr(Manager, "load_state_dict", lambda self, state: int(state["a step"]))
    with pytest.raises(CheckpointError, match="the state that was here is torn") as caught:
        checkpointer.restore(step=group.manager.current_step())
    assert caught.value.state_overwritten and group.manager.is_behind


def test_no_job_begins_at_step_0_beside_a_checkpoint_that_was_whole_and_cannot_be_read(
    tmp_path: Path, address: str
) -> None:
    group = Group(address)
    checkpointer = ends(Checkpointer(tmp_path, manager=group.manager))
    group.step()
    checkpointer.save().result(LONG_S)
    checkpointer.shutdown()
    group.manager.shutdown()
    again = Group(address)
    checkpointer = ends(Checkpointer(tmp_path, manager=again.manager))
    (directory,) = tmp_path.iterdir()
    for file in directory.glob("*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="step 1 was saved whole and cannot be read now") as caught:
        checkpointer.restore()
    assert not caught.value.state_overwritten
    (directory / ".metadata").unlink()  # as it is left by a job that died in its first save
    assert checkpointer.restore().source is RestoreSource.NOTHING


@pytest.mark.parametrize("step", [1.0, -1])
def test_a_step_to_restore_that_is_none_is_refused_at_the_call(tmp_path: Path, address: str, step: Any) -> None:
    group = Group(address)
    checkpointer = ends(Checkpointer(tmp_path, manager=group.manager))
    with pytest.raises(ConfigError, match="step="):
        checkpointer.restore(step=step)


# What is every group's own


def registry_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, with_rounds: bool) -> StateRegistry:
    registry = StateRegistry(StateDictLock())
    registry.register("default", lambda _: None, lambda: {"model": model.state_dict()})
    if with_rounds:
        registry.register(
            "rounds", lambda _: None, lambda: [torch.zeros(4)], explicitly_locked=True, local_between_syncs=True
        )
    registry.guard(optimizer)
    return registry


def test_what_a_forward_pass_changes_is_each_groups_own_and_parameters_are_not() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    registry = registry_of(model, torch.optim.SGD(model.parameters()), with_rounds=False)
    for by_key in (True, False):
        state = registry.capture() if by_key else {"model": model.state_dict()}
        held = registry.capture_for_save(state, by_key=by_key)
        saved = held.state["default"]["model"] if by_key else held.state["model"]
        own = {name for name, tensor in saved.items() if id(tensor) in held.group_local_ids}
        assert own == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        assert not held.unannounced_changes


def test_where_groups_train_apart_all_is_their_own_but_what_they_agreed_on() -> None:
    model = nn.Linear(4, 8)
    registry = registry_of(model, torch.optim.SGD(model.parameters()), with_rounds=True)
    held = registry.capture_for_save(registry.capture(), by_key=True)
    assert {id(tensor) for tensor in tensors_in(held.state["default"])} == held.group_local_ids
    assert not held.unannounced_changes


def test_what_inner_steps_change_without_the_lock_is_to_be_copied_at_once() -> None:
    model = nn.Linear(4, 8)
    registry = StateRegistry(StateDictLock())
    registry.register(
        "rounds", lambda _: None, lambda: [torch.zeros(4)], explicitly_locked=True, local_between_syncs=True
    )
    registry.guard(torch.optim.SGD(model.parameters()))
    given = registry.capture_for_save({"model": model.state_dict()}, by_key=False)
    assert given.unannounced_changes and len(given.group_local_ids) == 2
    agreed_on = registry.capture_for_save(registry.capture(), by_key=True)
    assert not agreed_on.unannounced_changes and not agreed_on.group_local_ids


# What else is in the place


def test_a_checkpoint_that_was_saved_without_a_manager_is_refused_before_anything_is_touched(
    tmp_path: Path, address: str
) -> None:
    group = Group(address)
    alone = ends(Checkpointer(tmp_path))
    alone.save({"model": group.model.state_dict()}, step=7).result(LONG_S)
    alone.shutdown()
    with torch.no_grad():
        group.model[0].weight.fill_(3)
    before = group.bits()
    checkpointer = ends(Checkpointer(tmp_path, manager=group.manager))
    with pytest.raises(StateMismatchError, match=r"without a Manager.*load_checkpoint.*'step': 7") as caught:
        checkpointer.restore()
    assert not caught.value.state_overwritten and group.bits() == before


def test_a_checkpoint_of_other_registered_functions_is_refused_before_anything_is_touched(
    tmp_path: Path, address: str
) -> None:
    group = Group(address)
    checkpointer = ends(Checkpointer(tmp_path, manager=group.manager))
    group.step()
    checkpointer.save().result(LONG_S)
    group.manager.register_state_dict_fn("average", lambda state: None, lambda: {"decay": 0.9})
    with torch.no_grad():
        group.model[0].weight.fill_(3)
    before = group.bits()
    with pytest.raises(StateMismatchError, match=r"\['average', 'default'\] are registered here") as caught:
        checkpointer.restore(step=1)
    assert not caught.value.state_overwritten and group.bits() == before


@pytest.mark.parametrize("kind", ["of DCP itself", "torchtitan's", "begun and left"])
def test_a_job_that_begins_at_step_0_beside_other_checkpoints_is_warned_by_their_names(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    named = {"of DCP itself": str(tmp_path), "torchtitan's": f"{tmp_path}/step-7"}.get(kind)
    if named is not None:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=named, no_dist=True)
        expected = f"{named} was not written by a Checkpointer: load_checkpoint reads it"
    else:
        (tmp_path / "step-000000000005.q1-a").mkdir()
        (tmp_path / "notes.txt").write_text("mine")
        expected = "of 1 checkpoints that were begun none is whole, the newest is step-000000000005.q1-a"
    group = Group(address)
    checkpointer = ends(Checkpointer(tmp_path, manager=group.manager))
    restored = checkpointer.restore()
    assert restored.source is RestoreSource.NOTHING and expected in restored.reason
    (warning,) = [record for record in caplog.records if "begins at step 0 beside" in record.message]
    assert warning.levelname == "WARNING" and expected in warning.message


# What could never be saved


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"best": object()}, "at 'best'"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, r"a\.b"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "1"),
    ],
)
def test_a_state_that_could_not_be_saved_is_refused_before_the_first_step(
    tmp_path: Path, address: str, state: dict[Any, Any], named: str
) -> None:
    manager = make_manager(address, lambda state: None, lambda: state)
    checkpointer = ends(Checkpointer(tmp_path, manager=manager))
    with pytest.raises(UnsupportedValueError, match=named):
        checkpointer.restore()


def test_a_place_that_is_no_directory_is_refused_before_the_first_step(tmp_path: Path, address: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    group = Group(address)
    checkpointer = ends(Checkpointer(tmp_path / "file", manager=group.manager))
    with pytest.raises(StorageError, match="file"):
        checkpointer.restore()


@pytest.mark.parametrize("adds", [False, True])
def test_a_load_function_that_clears_what_it_is_given_is_called_again_and_refused_if_it_adds_to_what_is_here(
    tmp_path: Path, address: str, adds: bool
) -> None:
    """A list of losses had each of them twice, and nothing was said. A time that is rounded moves by itself meanwhile."""
    weight, losses = torch.ones(2), [3.0]
    now = began = 7.0
    num_loads = 0

    def load(state: dict[str, Any]) -> None:
        nonlocal now, began, num_loads
        began = now - state["took_s"]
        now += num_loads * 1.5  # in place it takes none
        num_loads += 1
        weight.zero_().add_(state["weight"])
        if not adds:
            losses.clear()
        losses.extend(state["losses"])

    def state_dict() -> dict[str, Any]:
        return {"weight": weight, "losses": [*losses], "took_s": int(now - began)}

    manager = make_manager(address, load, state_dict)
    checkpointer = ends(Checkpointer(tmp_path, manager=manager))
    manager.start_quorum()
    assert manager.should_commit()
    checkpointer.save().result(LONG_S)
    weight.zero_()
    losses.clear()
    if adds:
        with pytest.raises(StateDictLoadError, match=r"returns something else since \(default\.losses") as caught:
            checkpointer.restore(step=1)
        assert caught.value.state_overwritten
    else:
        checkpointer.restore(step=1)
    assert (weight.tolist(), losses, num_loads) == ([1.0, 1.0], [3.0] * (1 + adds), 2)


# What came into being while training


def test_storage_gives_back_what_a_peer_would_give(tmp_path: Path, address: str) -> None:
    """A value that came into being, one that grew, one that was a number, and one that is here alone."""
    state: dict[str, Any] = {"best": None, "history": torch.zeros(0), "count": 0, "weight": torch.zeros(2), "old": 1}
    manager = make_manager(address, state.update, lambda: dict(state))
    checkpointer = ends(Checkpointer(tmp_path, manager=manager))

    def step() -> None:
        manager.start_quorum()
        assert manager.should_commit()

    step()
    saved = {
        "best": {"weight": torch.ones(3)},
        "history": torch.arange(3.0),
        "count": torch.tensor(5),
        "weight": torch.full((2,), 7.0),
        "old": 1,
    }
    state.update(saved)
    checkpointer.save().result(LONG_S)
    weight = torch.zeros(2)
    state.update(best=None, history=torch.zeros(0), count=0, weight=weight, old=torch.zeros(1))
    checkpointer.restore(step=1)
    assert {key: bits_of({"": torch.as_tensor(value)}) for key, value in state.items() if key != "best"} == {
        key: bits_of({"": torch.as_tensor(value)}) for key, value in saved.items() if key != "best"
    }
    assert state["best"]["weight"].tolist() == [1.0, 1.0, 1.0]
    assert state["weight"] is weight, "what fits is loaded in place"
