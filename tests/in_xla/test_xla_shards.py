"""torch_xla's sharded tensors on four devices: as boxes, through DCP's files, and from one process to another over HTTP."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

if importlib.util.find_spec("torch_xla") is None:
    pytest.skip("torch_xla is not installed; scripts/test-xla runs this", allow_module_level=True)

import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as xs
from meshes import LAYOUTS, SHAPES, Layout, bits_of, on_devices, spec_of
from support.spmd_double import random_bits
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from torchft_ckpt import Checkpointer, HTTPTransport
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex, layout_of
from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.errors import StateMismatchError
from torchft_ckpt.integrations.dcp.planners import ShardLoadPlanner, ShardSavePlanner
from torchft_ckpt.integrations.xla import XLAShardAdapter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
_TIMEOUT = timedelta(seconds=30)


def bytes_moved() -> int:
    """How many bytes went from a device to the host so far."""
    data = metrics.metric_data("InboundData")
    return 0 if data is None else int(data[1])


def work_done() -> dict[str, Any]:
    """What torch_xla has compiled, executed and moved so far."""
    names = ("CompileTime", "ExecuteTime", "ExecuteReplicatedTime", "TransferFromDeviceTime", "TransferToDeviceTime")
    return {name: (metrics.metric_data(name) or (0,))[0] for name in names}


# --- the adapter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_boxes_and_data_make_up_the_tensor_each_element_once(layout, shape):
    full = random_bits(shape, torch.float32, seed=2)
    tensor, adapter = layout.of(full), XLAShardAdapter()
    assembled, times = torch.zeros(shape), torch.zeros(shape, dtype=torch.int)
    for box, part in zip(adapter.boxes(tensor, "w"), adapter.data(tensor, "w"), strict=True):
        at = tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
        assert (type(part), part.device.type, part.is_contiguous()) == (torch.Tensor, "cpu", True)
        assembled[at] = part
        times[at] += 1
    assert torch.equal(bits_of(assembled), bits_of(full))
    assert torch.equal(times, torch.ones_like(times))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rebuilt_tensor_has_the_layout_and_the_bits_on_every_device(layout, shape):
    source = layout.of(random_bits(shape, torch.float32, seed=3))
    template = layout.of(torch.zeros(shape))
    adapter = XLAShardAdapter()
    rebuilt = adapter.rebuild(template, adapter.data(source, "w"))
    assert type(rebuilt) is xs.XLAShardedTensor
    assert (rebuilt.mesh_shape, rebuilt.partition_spec) == (template.mesh_shape, template.partition_spec)
    assert spec_of(rebuilt) == spec_of(template)
    assert on_devices(rebuilt) == on_devices(source)
    assert torch.equal(template.cpu(), torch.zeros(shape))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.complex64,
    ],
)
def test_every_dtype_keeps_its_bits(dtype):
    full = torch.tensor([True, False] * 4) if dtype is torch.bool else random_bits((8,), dtype, seed=4)
    if dtype is torch.float16:
        full = full.nan_to_num()  # torch_xla makes them all the same NaN
    adapter = XLAShardAdapter()
    source = Layout((4,), (0,)).of(full)
    (first, *_) = adapter.data(source, "w")
    rebuilt = adapter.rebuild(Layout((4,), (0,)).of(torch.zeros(8, dtype=dtype)), adapter.data(source, "w"))
    assert first.dtype == dtype
    assert torch.equal(torch.cat([s.data for s in rebuilt.local_shards]).view(torch.uint8), full.view(torch.uint8))


def test_a_tensor_without_dimensions_is_one_box():
    tensor, adapter = Layout((4,), ()).of(torch.tensor(3.5)), XLAShardAdapter()
    assert [tuple(box) for box in adapter.boxes(tensor, "step")] == [((), ())]
    assert adapter.data(tensor, "step")[0].item() == 3.5
    assert adapter.rebuild(tensor, [torch.tensor(4.5)]).cpu().item() == 4.5


def test_boxes_move_compile_and_execute_nothing_and_data_moves_once():
    tensor, adapter = LAYOUTS["partially replicated"].of(torch.ones(6, 2)), XLAShardAdapter()
    before = work_done()
    adapter.boxes(tensor, "w")
    assert work_done() == before
    adapter.data(tensor, "w")
    after = work_done()
    assert after["TransferFromDeviceTime"] - before["TransferFromDeviceTime"] == 1  # all shards in one transfer
    adapter.rebuild(tensor, [torch.ones(3, 2)] * 2)
    executed = {name: value for name, value in work_done().items() if "Transfer" not in name}
    assert executed == {name: value for name, value in before.items() if "Transfer" not in name}


def test_a_replicated_tensor_is_moved_once():
    tensor = LAYOUTS["replicated"].of(torch.ones(6, 2))
    before = bytes_moved()
    XLAShardAdapter().data(tensor, "w")
    assert bytes_moved() - before == tensor.nbytes


def test_a_marked_parameter_is_sharded_although_its_class_is_that_of_any_other():
    parameter = torch.nn.Parameter(torch.arange(8.0).to("xla"))
    xs.mark_sharding(parameter, xs.get_1d_mesh("x"), ("x",))
    adapter = adapter_of(parameter)
    assert isinstance(adapter, XLAShardAdapter)
    assert len(adapter.boxes(parameter, "w")) == 4
    rebuilt = adapter.rebuild(parameter, adapter.data(parameter, "w"))
    assert type(rebuilt) is torch.Tensor
    assert on_devices(rebuilt) == on_devices(parameter)


def test_wrapped_tensors_are_not_taken_for_dtensors_although_their_class_derives_from_it():
    assert isinstance(adapter_of(LAYOUTS["rows"].of(torch.ones(4, 2))), XLAShardAdapter)


def test_a_tensor_of_the_host_is_none_of_its_business():
    assert not XLAShardAdapter().handles(torch.ones(2))
    assert adapter_of(torch.nn.Parameter(torch.ones(2))) is None


def test_a_tensor_without_annotation_is_whole():
    full = random_bits((3, 2), torch.float32, seed=7)
    tensor, adapter = full.to("xla"), XLAShardAdapter()
    assert adapter.handles(tensor)
    assert [tuple(box) for box in adapter.boxes(tensor, "w")] == [((0, 0), (3, 2))]
    data = adapter.data(tensor, "w")
    rebuilt = adapter.rebuild(torch.zeros(3, 2).to("xla"), data)
    data[0].zero_()
    assert (type(rebuilt), rebuilt.device.type, spec_of(rebuilt)) == (torch.Tensor, "xla", "")
    assert torch.equal(bits_of(rebuilt.cpu()), bits_of(full))


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_result_that_is_still_pending_has_the_shards_of_its_execution(is_synced):
    result = LAYOUTS["rows"].of(torch.ones(4, 2)) * 2
    if is_synced:
        torch_xla.sync()  # does not wait for the devices
    adapter = XLAShardAdapter()
    assert [box.offsets for box in adapter.boxes(result, "w")] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [part.tolist() for part in adapter.data(result, "w")] == [[[2.0, 2.0]]] * 4


@pytest.mark.parametrize("data", [[torch.ones(2, 2)] * 3, [torch.ones(1, 2)] * 4, [torch.ones(2, 2).double()] * 4])
def test_data_that_does_not_fit_is_refused(data):
    with pytest.raises(StateMismatchError, match="nothing was applied"):
        XLAShardAdapter().rebuild(LAYOUTS["rows"].of(torch.ones(8, 2)), data)


# --- who holds what --------------------------------------------------------------------------------------------------


def as_processes(monkeypatch: pytest.MonkeyPatch, num_processes: int, process: int, mine: list[str]) -> None:
    """Imagine that there are several processes, and that these devices are of this one."""
    monkeypatch.setattr(torch_xla.runtime, "process_count", lambda: num_processes)
    monkeypatch.setattr(torch_xla.runtime, "process_index", lambda: process)
    monkeypatch.setattr(torch_xla._XLAC, "_xla_get_runtime_devices", lambda: mine)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_one_process_holds_all_and_a_group_of_more_ranks_is_another(layout):
    tensor, adapter = layout.of(random_bits((7, 5), torch.float32, seed=2)), XLAShardAdapter()
    holdings = HoldingsIndex(0, 1).holdings_of(layout_of("w", tensor, num_ranks=1), adapter.boxes(tensor, "w"))
    assert holdings.is_derivable
    assert [held.box for held in holdings.local] == sorted(adapter.boxes(tensor, "w"))
    assert adapter.holders(tensor, 2) is None


def test_seeing_the_holders_moves_compiles_and_executes_nothing(monkeypatch):
    tensor = LAYOUTS["grid"].of(torch.ones(6, 2))
    before = work_done()
    XLAShardAdapter().holders(tensor, 1)
    as_processes(monkeypatch, 2, 0, ["CPU:0", "CPU:1"])
    XLAShardAdapter().holders(tensor, 2)
    assert work_done() == before


def test_among_several_processes_only_what_all_hold_is_known(monkeypatch):
    """XLA does not say which process a device is of."""
    as_processes(monkeypatch, 3, 0, ["CPU:0", "CPU:1"])
    adapter = XLAShardAdapter()
    assert adapter.holders(LAYOUTS["replicated"].of(torch.ones(6, 2)), 3) == [(whole((6, 2)), range(3))]
    assert adapter.holders(torch.ones(3).to("xla"), 3) == [(whole((3,)), range(3))]
    assert adapter.holders(LAYOUTS["partially replicated"].of(torch.ones(6, 2)), 3) is None


def test_without_spmd_each_process_has_tensors_of_its_own(monkeypatch):
    as_processes(monkeypatch, 2, 0, ["CPU:0", "CPU:1"])
    monkeypatch.setattr(torch_xla.runtime, "is_spmd", lambda: False)
    assert XLAShardAdapter().holders(torch.ones(3).to("xla"), 2) is None


def test_a_durable_save_is_read_back_into_another_layout(tmp_path):
    full = random_bits((256, 512), torch.float32, seed=9)
    checkpointer = Checkpointer(tmp_path)
    saved = checkpointer.save({name: layout.of(full) for name, layout in LAYOUTS.items()}, step=1).result(30)
    assert saved.is_closed
    assert saved.written_bytes <= 1.02 * len(LAYOUTS) * full.nbytes
    target = {name: LAYOUTS["grid the other way"].of(torch.zeros(256, 512)) for name in LAYOUTS}
    checkpointer.load(target)
    checkpointer.shutdown()
    wanted = on_devices(LAYOUTS["grid the other way"].of(full))
    assert all(on_devices(tensor) == wanted for tensor in target.values())


# --- DCP's files -----------------------------------------------------------------------------------------------------


def save(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path), planner=ShardSavePlanner(), no_dist=True)


def load(path: Path, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=FileSystemReader(path), planner=ShardLoadPlanner(), no_dist=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("saved", "loaded"), list(zip(LAYOUTS, [*list(LAYOUTS)[3:], *list(LAYOUTS)[:3]], strict=True)))
def test_a_tensor_is_bit_equal_after_it_was_saved_and_loaded(tmp_path, saved, loaded, shape):
    full = random_bits(shape, torch.float32, seed=5)
    save(tmp_path, {"w": LAYOUTS[saved].of(full)})
    target = LAYOUTS[loaded].of(torch.zeros(shape))
    spec, same = spec_of(target), {"w": target}
    load(tmp_path, same)
    assert same["w"] is target
    assert (spec_of(target), on_devices(target)) == (spec, on_devices(LAYOUTS[loaded].of(full)))


def test_saving_moves_each_tensor_once(tmp_path):
    state = {name: LAYOUTS["grid"].of(torch.ones(6, 2)) for name in "abc"}
    before = bytes_moved()
    save(tmp_path, state)
    assert bytes_moved() - before == 3 * 6 * 2 * 4


def test_from_plain_tensors_to_sharded_ones_and_back(tmp_path):
    full = random_bits((7, 5), torch.bfloat16, seed=6)
    save(tmp_path / "plain", {"w": full})
    sharded = LAYOUTS["grid"].of(torch.zeros(7, 5, dtype=torch.bfloat16))
    load(tmp_path / "plain", {"w": sharded})
    save(tmp_path / "sharded", {"w": sharded})
    target = torch.zeros(7, 5, dtype=torch.bfloat16)
    load(tmp_path / "sharded", {"w": target})
    assert torch.equal(bits_of(target), bits_of(full))


def trained(seed: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """A layer whose weight is sharded by columns and bias replicated, after a step of AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 6)
    model = model.to("xla")
    mesh = xs.Mesh([0, 1, 2, 3], (4,), ("x",))
    xs.mark_sharding(model.weight, mesh, (None, 0))
    xs.mark_sharding(model.bias, mesh, (None,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 8).to("xla")).square().sum().backward()
    optimizer.step()
    torch_xla.sync()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "moments": [dict(slots) for slots in optimizer.state_dict()["state"].values()]}


def bits_of_state(state: dict[str, Any]) -> list[list[int]]:
    tensors = [*state["model"].values(), *(slot for slots in state["moments"] for slot in slots.values())]
    return [bits_of(tensor.cpu()).tolist() for tensor in tensors]


def test_a_models_parameters_and_moments_are_loaded_in_place(tmp_path):
    source, target = trained(1), trained(2)
    wanted = bits_of_state(state_of(*source))
    assert bits_of_state(state_of(*target)) != wanted
    save(tmp_path, state_of(*source))
    load(tmp_path, state_of(*target))
    assert bits_of_state(state_of(*target)) == wanted
    assert [spec_of(parameter) for parameter in target[0].parameters()] == [
        spec_of(parameter) for parameter in source[0].parameters()
    ]


# --- from a process that trains to one that joins --------------------------------------------------------------------


def test_a_joiner_receives_into_its_own_layout():
    full = random_bits((8, 4), torch.float32, seed=8)
    states = [
        {
            "sharded": {name: layout.of(full if at == 0 else torch.zeros(8, 4)) for name, layout in LAYOUTS.items()},
            "plain": torch.full((3,), 1.0 - at),
            "step": 5 * (1 - at),
        }
        for at in range(2)
    ]
    source, joiner = HTTPTransport(timeout=_TIMEOUT), HTTPTransport(timeout=_TIMEOUT)
    try:
        before = bytes_moved()
        source.send_checkpoint([1], step=5, state_dict=states[0], timeout=_TIMEOUT)
        replicas = [2 if "partially" in name or "beside" in name else 1 for name in LAYOUTS]
        assert bytes_moved() - before == sum(replicas) * full.nbytes
        received = joiner.fetch_checkpoint([source.metadata()], 5, _TIMEOUT, local_state=states[1])
    finally:
        source.shutdown()
        joiner.shutdown()
    assert received["step"] == 5
    assert torch.equal(received["plain"], torch.ones(3))
    for name, tensor in received["sharded"].items():
        assert type(tensor) is xs.XLAShardedTensor
        assert (name, spec_of(tensor)) == (name, spec_of(states[1]["sharded"][name]))
        assert on_devices(tensor) == on_devices(states[0]["sharded"][name])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_and_its_moments_are_received_as_marked_tensors(in_place):
    source_state, local_state = state_of(*trained(1)), state_of(*trained(2))
    source, joiner = HTTPTransport(timeout=_TIMEOUT), HTTPTransport(timeout=_TIMEOUT)
    try:
        source.send_checkpoint([1], step=1, state_dict=source_state, timeout=_TIMEOUT)
        received = joiner.fetch_checkpoint([source.metadata()], 1, _TIMEOUT, local_state=local_state, in_place=in_place)
    finally:
        source.shutdown()
        joiner.shutdown()
    assert bits_of_state(received) == bits_of_state(source_state)
    assert spec_of(received["model"]["weight"]) == spec_of(source_state["model"]["weight"])
