"""What a forward pass may change is copied when a state is captured for others; what the optimizer owns is not."""

from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch
from support.resharding import imagined_rank
from support.spmd_double import Layout, SpmdAdapter, SpmdTensor, registered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.manager.volatile import Unsteady, capture_for_save, copy_volatile, tensors_in

LONG = timedelta(seconds=20)


def trained_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_parameters_and_optimizer_state_stay_the_live_tensors():
    model, optimizer = trained_model()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    held = copy_volatile(state, [optimizer], Unsteady()).state
    assert held["model"]["0.weight"] is state["model"]["0.weight"]
    assert held["optimizer"]["state"][0]["exp_avg"] is state["optimizer"]["state"][0]["exp_avg"]


def test_running_statistics_keep_their_values_while_the_model_runs_on():
    model, optimizer = trained_model()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    held = copy_volatile(model.state_dict(), [optimizer], Unsteady()).state
    model(torch.randn(4, 8))
    assert all(torch.equal(held[name], value) for name, value in before.items())
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


def test_a_buffer_that_is_there_twice_is_one_tensor_afterwards():
    model, optimizer = trained_model()
    buffer = model[1].running_mean
    held = copy_volatile({"a": buffer, "b": [buffer], "c": (buffer.view(2, 4),)}, [optimizer], Unsteady()).state
    assert held["a"] is held["b"][0]
    assert held["a"] is not buffer


def test_without_a_guarded_optimizer_nothing_is_copied():
    state = {"buffer": torch.ones(3)}
    assert copy_volatile(state, [], Unsteady()).state is state


def test_large_tensors_that_no_optimizer_owns_are_not_copied():
    _, optimizer = trained_model()
    state = {"backup": torch.zeros(1024 * 1024)}
    assert copy_volatile(state, [optimizer], Unsteady()).state["backup"] is state["backup"]


def test_of_what_optimizers_own_and_of_small_buffers_nothing_is_loose():
    """Others may have other statistics, and hold the parameters alike."""
    model, optimizer = trained_model()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "table": np.zeros(4)}
    held = capture_for_save(state, [optimizer])
    assert (held.unannounced_changes, held.unguarded_addresses) == (False, frozenset())
    statistics = [held.state["model"][name] for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked")]
    assert held.group_local_ids == {id(tensor) for tensor in statistics}


@pytest.mark.parametrize("other", [torch.zeros(1024 * 1024), nn.Parameter(torch.zeros(3)), np.zeros(1024 * 1024)])
def test_what_nobody_guards_and_is_not_copied_is_loose(other):
    model, optimizer = trained_model()
    held = capture_for_save({"model": model.state_dict(), "other": [other]}, [optimizer])
    address = other.ctypes.data if isinstance(other, np.ndarray) else other.data_ptr()
    assert (held.unannounced_changes, held.unguarded_addresses) == (False, {address})
    assert all(id(tensor) in held.group_local_ids for tensor in tensors_in(held.state["other"]))


def test_shards_are_known_by_where_their_bytes_are_and_empty_ones_are_nobodys():
    with imagined_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
        one_row = nn.Parameter(distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)]))  # it is the other rank's
        optimizer = torch.optim.SGD([weight, one_row], momentum=0.9)
        buffer = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
        state = {"weight": weight.detach(), "one_row": one_row.detach()}
        owned = capture_for_save(state, [optimizer])
        both = capture_for_save({**state, "buffer": buffer}, [optimizer])
    assert (owned.unguarded_addresses, owned.group_local_ids) == (frozenset(), frozenset())
    assert (both.unguarded_addresses, both.group_local_ids) == ({buffer._local_tensor.data_ptr()}, {id(buffer)})
    assert not both.unannounced_changes


def test_tensors_of_an_adapter_are_taken_to_be_guarded():
    """Where their bytes are is not known; the groups of a job divide them among each other."""
    _, optimizer = trained_model()
    with registered(SpmdAdapter()):
        tensor = SpmdTensor((8, 4), torch.float32, Layout((1, 1)))
        held = capture_for_save({"spmd": tensor}, [optimizer])
    assert (held.unannounced_changes, held.unguarded_addresses, held.group_local_ids) == (
        False,
        frozenset(),
        frozenset(),
    )


class Boxed(torch.Tensor):
    """A class of which an adapter shows the memory."""

    def __init__(self, data):
        self.memory = data


class BoxedAdapter(SpmdAdapter):
    shares_memory = True

    def handles(self, tensor):
        return isinstance(tensor, Boxed)

    def data(self, tensor, path):
        return [tensor.memory]


def test_memory_that_an_adapter_shows_is_known_by_who_owns_it():
    owned, buffer = Boxed(torch.zeros(3)), Boxed(torch.zeros(3))
    with registered(BoxedAdapter()):
        optimizer = torch.optim.SGD([owned.requires_grad_()])
        held = capture_for_save({"owned": owned, "buffer": buffer}, [optimizer])
    assert (held.unguarded_addresses, held.group_local_ids) == ({buffer.memory.data_ptr()}, {id(buffer)})


def test_a_source_whose_model_runs_on_serves_the_state_of_its_step():
    """Blocks are hashed and sent at different moments: with live statistics an honest source would seem to lie."""
    model, optimizer = trained_model()
    source = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=4096)
    destination = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    over = threading.Event()

    def run_forward() -> None:
        while not over.is_set():
            model(torch.randn(4, 8))

    trainer = threading.Thread(target=run_forward)
    trainer.start()
    try:
        for step in range(10):
            state = copy_volatile(model.state_dict(), [optimizer], Unsteady()).state
            source.send_checkpoint([1], step, state, LONG)
            received = destination.recv_checkpoint(0, source.metadata(), step, LONG)
            assert all(torch.equal(received[name], value) for name, value in state.items())
    finally:
        over.set()
        trainer.join(60)
        source.shutdown()
        destination.shutdown()
