"""What torch.distributed.checkpoint wrote is read: ordinary saves, and rank-local ones, which it does not put together itself."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.durable_parts import flip_bit, rows
from support.nursery import Forked
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.state.local_state import view_of
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    StateMismatchError,
    UnsupportedValueError,
)
from torchft_ckpt.integrations.dcp import reader as dcp_reader
from torchft_ckpt.integrations.dcp.reader import DCPReader, load_record

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
UNTOUCHED = 77.0


class Ranks:
    """Writes what the ranks of a job would, as DCP does it: a file for each, and one metadata or one for each rank."""

    def __init__(self, directory: Path, num_ranks: int, *, rank_local: bool) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.rank_local = rank_local
        self.metadata = [Metadata({}, {}, {}) for _ in range(num_ranks if rank_local else 1)]
        self.ends = [0] * num_ranks

    def file(self, rank: int) -> Path:
        return self.directory / f"__{rank}_0.distcp"

    def add(self, rank: int, fqn: str, tensor: torch.Tensor, box: Box, record: object = None) -> _StorageInfo:
        metadata = self.metadata[rank if self.rank_local else 0]
        properties = TensorProperties(tensor.dtype)
        described = metadata.state_dict_metadata.setdefault(fqn, TensorStorageMetadata(properties, tensor.shape, []))
        assert isinstance(described, TensorStorageMetadata)
        described.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
        metadata.planner_data[fqn] = tuple(fqn.split("."))
        content = view_of(tensor, box).contiguous().clone() if record is None else record
        info = metadata.storage_data[MetadataIndex(fqn, torch.Size(box.offsets))] = self._record(rank, content)
        return info

    def add_value(self, rank: int, fqn: str, value: object) -> _StorageInfo:
        metadata = self.metadata[rank if self.rank_local else 0]
        metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
        metadata.planner_data[fqn] = tuple(fqn.split("."))
        info = metadata.storage_data[MetadataIndex(fqn)] = self._record(rank, value)
        return info

    def done(self) -> DCPReader:
        for rank, metadata in enumerate(self.metadata):
            name = f"__{rank}.metadata" if self.rank_local else ".metadata"
            (self.directory / name).write_bytes(pickle.dumps(metadata))
        return DCPReader(LocalStorage(self.directory))

    def _record(self, rank: int, content: object) -> _StorageInfo:
        with self.file(rank).open("ab") as file:
            start = file.tell()
            torch.save(content, file)
            return _StorageInfo(self.file(rank).name, start, file.tell() - start)


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def read_whole(reader: DCPReader, name: str, like: torch.Tensor) -> torch.Tensor:
    target = torch.zeros(like.shape, dtype=like.dtype)
    reader.read([Want(name, whole(tuple(like.shape)), target)])
    return target


def sharded(tmp_path: Path, tensor: torch.Tensor, cuts: Sequence[int], *, rank_local: bool) -> Ranks:
    ranks = Ranks(tmp_path / "dcp", len(cuts), rank_local=rank_local)
    for rank, box in enumerate(rows(tensor.shape, cuts)):
        ranks.add(rank, "w", tensor, box)
    return ranks


# What DCP writes


def test_an_ordinary_save_is_read_back_in_every_bit(tmp_path: Path) -> None:
    model = {
        "w": torch.randn(300, 40),
        "big": torch.randn(1000, 400),
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
        "turned": torch.randn(5, 7).t(),
        "wide": torch.randn(4, dtype=torch.complex128),
        "eight": torch.arange(8.0).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "part": torch.arange(100.0)[10:20],
        "empty": torch.empty(0, 3),
    }
    dcp.save({"model": model, "step": 4, "lrs": [0.5, {"x": "y"}]}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    reader = DCPReader(LocalStorage(tmp_path), "dcp")
    wrong = []
    for name, tensor in model.items():
        loaded, given = read_whole(reader, f"model.{name}", tensor), tensor.detach().contiguous()
        if loaded.reshape(-1).view(torch.uint8).tolist() != given.reshape(-1).view(torch.uint8).tolist():
            wrong.append(name)
    assert wrong == []
    assert reader.values() == {
        "step": (("step",), 4),
        "lrs.0": (("lrs", 0), 0.5),
        "lrs.1.x": (("lrs", 1, "x"), "y"),
    }
    assert reader.tensors["model.w"][:4] == ("model.w", ("model", "w"), torch.float32, (300, 40))


@pytest.mark.parametrize("rank_local", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_any_boxes_are_read_from_the_shards_of_all_ranks(tmp_path: Path, seed: int, rank_local: bool) -> None:
    rng = random.Random(seed)
    tensor = torch.arange(40 * rng.choice((7, 9000)), dtype=torch.float32).reshape(40, -1)
    cuts = [0, *sorted(rng.sample(range(1, 40), 3))]
    reader = sharded(tmp_path, tensor, cuts, rank_local=rank_local).done()
    wants = []
    for _ in range(6):
        low, column = rng.randrange(40), rng.randrange(tensor.shape[1])
        box = Box((low, column), (rng.randint(1, 40 - low), rng.randint(1, tensor.shape[1] - column)))
        wants.append(Want("w", box, torch.zeros(tuple(reversed(box.sizes))).t()))
    reader.read(wants)
    assert [want.box for want in wants if not torch.equal(want.target, view_of(tensor, want.box))] == []


def test_what_every_rank_saved_is_read_once(tmp_path: Path) -> None:
    tensor = torch.randn(1000, 300)
    ranks = Ranks(tmp_path / "dcp", 3, rank_local=True)
    for rank in range(3):
        ranks.add(rank, "w", tensor, whole((1000, 300)))
        ranks.add_value(rank, "step", 7)
    reader = ranks.done()
    assert torch.equal(read_whole(reader, "w", tensor), tensor)
    assert reader.bytes_read <= 1.05 * tensor.nbytes
    assert reader.values() == {"step": (("step",), 7)}


def test_only_the_records_that_are_needed_are_read_and_each_once(tmp_path: Path) -> None:
    tensor = torch.arange(4 * 1024 * 1024, dtype=torch.int32).reshape(1024, -1)
    reader = sharded(tmp_path, tensor, [0, 256, 512, 768], rank_local=True).done()
    targets = [torch.zeros(200, tensor.shape[1], dtype=torch.int32) for _ in range(2)]
    reader.read([Want("w", Box((200 * number, 0), (200, tensor.shape[1])), to) for number, to in enumerate(targets)])
    assert torch.equal(torch.cat(targets), tensor[:400])
    assert reader.bytes_read <= 1.05 * tensor.nbytes / 2


def test_large_records_are_loaded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is loaded it takes three times its length."""
    tensor = torch.arange(8 * 1000).reshape(8, -1)
    reader = sharded(tmp_path, tensor, range(8), rank_local=False).done()
    now, most = [0], [0]

    def load(record: bytes, what: str) -> object:
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.01)
        now[0] -= 1
        return load_record(record, what)

    monkeypatch.setattr(dcp_reader, "load_record", load)
    monkeypatch.setattr(dcp_reader, "_LARGE_BYTES", 1000)
    assert torch.equal(read_whole(reader, "w", tensor), tensor)
    assert most == [1]


# What is not whole


def test_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=str(tmp_path)):
        DCPReader(LocalStorage(tmp_path))


@pytest.mark.parametrize(
    ("lost", "reason"),
    [(0, "no __0.metadata"), (1, "no __1.metadata"), (2, r"no rank saved w \[6:8, 0:4\]")],
)
def test_the_metadata_of_a_rank_is_missed(tmp_path: Path, lost: int, reason: str) -> None:
    ranks = sharded(tmp_path, torch.ones(8, 4), [0, 3, 6], rank_local=True)
    ranks.done()
    (ranks.directory / f"__{lost}.metadata").unlink()
    with pytest.raises(CheckpointDamagedError, match=reason):
        DCPReader(LocalStorage(ranks.directory))


def test_two_kinds_of_saves_in_one_directory_are_refused(tmp_path: Path) -> None:
    ranks = sharded(tmp_path, torch.ones(8, 4), [0, 3], rank_local=True)
    ranks.done()
    (ranks.directory / ".metadata").write_bytes(pickle.dumps(Metadata({}, {}, {})))
    with pytest.raises(CheckpointDamagedError, match="two saves are mixed"):
        DCPReader(LocalStorage(ranks.directory))


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "dcp", 2, rank_local=True)
    ranks.add(0, "w", torch.ones(8, 4), whole((8, 4)))
    ranks.add(1, "w", torch.ones(9, 4), whole((9, 4)))
    with pytest.raises(CheckpointDamagedError, match=r"\[8, 4\].*\[9, 4\] in __1.metadata"):
        ranks.done()


def test_a_chunk_without_a_record_is_a_hole(tmp_path: Path) -> None:
    ranks = sharded(tmp_path, torch.ones(8, 4), [0, 3], rank_local=False)
    del ranks.metadata[0].storage_data[MetadataIndex("w", torch.Size((3, 0)))]
    with pytest.raises(CheckpointDamagedError, match=r"no rank saved w \[3:8, 0:4\]"):
        ranks.done()


@pytest.mark.parametrize("cut_to", [None, 100])
def test_a_file_that_is_missing_or_short_is_named(tmp_path: Path, cut_to: int | None) -> None:
    ranks = sharded(tmp_path, torch.ones(8, 4), [0, 3], rank_local=False)
    if cut_to is None:
        ranks.file(1).unlink()
    else:
        os.truncate(ranks.file(1), cut_to)
    with pytest.raises(CheckpointDamagedError, match=r"__1_0\.distcp (is not there|has 100 bytes)"):
        ranks.done()


def test_a_tensor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    reader = sharded(tmp_path, torch.ones(8, 4), [0], rank_local=False).done()
    with pytest.raises(StateMismatchError, match="v is not in"):
        reader.read([Want("v", whole((8, 4)), torch.zeros(8, 4))])


# Damage and malice


@pytest.mark.parametrize("num_columns", [30, 30_000])
def test_a_flipped_bit_is_noticed_where_the_record_is_read_whole(tmp_path: Path, num_columns: int) -> None:
    tensor = torch.arange(12 * num_columns, dtype=torch.int32).reshape(12, -1)
    ranks = sharded(tmp_path, tensor, [0], rank_local=False)
    reader = ranks.done()
    size = ranks.file(0).stat().st_size
    rng = random.Random(num_columns)
    outcomes = set()
    for _ in range(40):
        at, bit = rng.randrange(size), rng.randrange(8)
        flip_bit(ranks.file(0), at, bit)
        try:
            outcomes.add(torch.equal(read_whole(reader, "w", tensor), tensor))
        except CheckpointDamagedError as error:
            outcomes.add("__0_0.distcp" in str(error) and "w [0:12" in str(error))
        flip_bit(ranks.file(0), at, bit)
    assert outcomes == {True}


def test_what_another_rank_saved_too_stands_for_a_damaged_record(tmp_path: Path) -> None:
    tensor = torch.randn(30, 20)
    ranks = Ranks(tmp_path / "dcp", 2, rank_local=True)
    infos = [ranks.add(rank, "w", tensor, whole((30, 20))) for rank in range(2)]
    reader = ranks.done()
    flip_bit(ranks.file(0), infos[0].offset + infos[0].length // 2)
    assert torch.equal(read_whole(reader, "w", tensor), tensor)


def test_a_record_of_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    for record in (torch.ones(4, 8), torch.ones(8, 4, dtype=torch.float64), torch.ones(4, 8).t()[:, :2]):
        ranks = Ranks(tmp_path / f"dcp{id(record)}", 1, rank_local=False)
        ranks.add(0, "w", torch.ones(8, 4), whole((8, 4)), record)
        reader = ranks.done()
        target = torch.full((8, 4), UNTOUCHED)
        with pytest.raises(CheckpointDamagedError, match="holds a torch"):
            reader.read([Want("w", whole((8, 4)), target)])
        assert (target == UNTOUCHED).all()


def test_tensors_whose_bytes_are_not_their_elements_are_loaded_by_torch(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "dcp", 1, rank_local=False)
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    turned = torch.randn(7, 5).t()
    ranks.add(0, "conjugate", conjugate, whole((2,)), conjugate)
    ranks.add(0, "turned", turned, whole((5, 7)), turned)
    reader = ranks.done()
    assert torch.equal(read_whole(reader, "conjugate", conjugate), conjugate)
    assert torch.equal(read_whole(reader, "turned", turned), turned)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((1,), 3.0).expand(1000),
        torch.arange(4.0).expand(300, 4),
        torch.arange(9.0)[::2],
        torch.tensor([1j]).conj().expand(5),
    ],
    ids=["expanded", "expanded rows", "sliced", "conjugate"],
)
def test_what_dcp_writes_of_a_view_is_read(tmp_path: Path, tensor: torch.Tensor) -> None:
    dcp.save({"w": tensor}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read_whole(DCPReader(LocalStorage(tmp_path)), "w", tensor), tensor)


def test_a_record_that_stands_for_more_bytes_than_it_has_is_damaged(tmp_path: Path) -> None:
    """DCP writes none; read, a few bytes would take as much memory as they say."""
    ranks = Ranks(tmp_path / "dcp", 1, rank_local=False)
    expanded = torch.ones(1).expand(2**29)
    ranks.add(0, "w", expanded, whole((2**29,)), expanded)
    reader = ranks.done()
    with pytest.raises(CheckpointDamagedError, match=r"w \[0:536870912\].*has 4 bytes for 2147483648"):
        reader.read([Want("w", Box((0,), (4,)), torch.zeros(4))])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_record_of_a_tensor_without_elements_of_its_own_is_refused(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for name, record in (("meta", torch.empty(8, 4, device="meta")), ("nested", nested)):
        ranks = Ranks(tmp_path / name, 1, rank_local=False)
        ranks.add(0, "w", torch.ones(8, 4), whole((8, 4)), record)
        with pytest.raises(UnsupportedValueError, match=r"no dense tensor|needs torch._utils._rebuild_nested_tensor"):
            read_whole(ranks.done(), "w", torch.ones(8, 4))


def test_a_record_that_would_execute_something_is_refused_by_name(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    ranks = Ranks(tmp_path / "dcp", 1, rank_local=False)
    ranks.add(0, "w", torch.ones(8, 4), whole((8, 4)), Touches(marker))
    ranks.add_value(0, "step", Touches(marker))
    reader = ranks.done()
    with pytest.raises(UnsupportedValueError, match=r"w \[0:8, 0:4\].*mkdir"):
        read_whole(reader, "w", torch.ones(8, 4))
    with pytest.raises(UnsupportedValueError, match=r"the value step.*mkdir"):
        reader.values()
    assert not marker.exists()


def test_what_an_extension_of_dcp_wrote_is_refused_by_name(tmp_path: Path) -> None:
    ranks = sharded(tmp_path, torch.ones(8, 4), [0], rank_local=False)
    ranks.metadata[0].storage_data[MetadataIndex("w", torch.Size((0, 0)))].transform_descriptors = ["stream.zstd"]
    with pytest.raises(UnsupportedValueError, match=r"stream\.zstd"):
        ranks.done()


# Real ranks

_RANK = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

rank, directory, rendezvous = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
full = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
state = {
    "rows": distribute_tensor(full, mesh, [Shard(0)]),
    "columns": distribute_tensor(full, mesh, [Shard(1)]),
    "same": distribute_tensor(full, mesh, [Replicate()]),
    "plain": full,
    "step": 9,
}
dcp.save(state, checkpoint_id=f"{directory}/collectives")
dcp.save(state, checkpoint_id=f"{directory}/rank-local", use_collectives=False)
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_what_two_real_ranks_saved_is_read_whole(tmp_path: Path) -> None:
    script, log = tmp_path / "rank.py", tmp_path / "log"
    script.write_text(_RANK)
    ranks: list[Forked] = []
    try:
        with log.open("ab") as errors:
            for rank in range(2):
                arguments = [str(rank), str(tmp_path), str(tmp_path / "rendezvous")]
                ranks.append(Forked(script, arguments, dict(os.environ), errors.fileno()))
        assert [rank.wait(120) for rank in ranks] == [0, 0], log.read_text()[-3000:]
    finally:
        for started in ranks:
            started.kill()
    full = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    for directory in ("collectives", "rank-local"):
        reader = DCPReader(LocalStorage(tmp_path), directory)
        assert sorted(reader.tensors) == ["columns", "plain", "rows", "same"]
        assert [name for name in reader.tensors if not torch.equal(read_whole(reader, name, full), full)] == []
        assert reader.values() == {"step": (("step",), 9)}
