"""Boxes are read out of a checkpoint: the right bits of them, few other bytes, and a named error where that cannot be."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.durable_parts import NAME, PartsDouble, flip_bit, rows, storage_in
from support.newest import newest_whole

from torchft_ckpt.checkpointing.durable.format.manifest import PartManifest
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, SavedPart, read_checkpoint
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.state.local_state import view_of
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, refine, whole
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError, StateMismatchError, StorageError

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64, torch.float8_e4m3fn, torch.uint16)
UNTOUCHED = 77


class CountingStorage(LocalStorage):
    """Counts its reads."""

    num_reads = 0

    def read_into(self, path: str, start: int, memory: memoryview) -> None:
        self.num_reads += 1
        super().read_into(path, start, memory)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(as_bytes(one.contiguous().clone()), as_bytes(other.contiguous().clone()))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    num_elements = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(num_elements)], dtype=dtype).reshape(shape)
    data = bytearray(rng.randbytes(max(num_elements, 1) * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype)[:num_elements].reshape(shape)


def random_box(shape: Iterable[int], rng: random.Random) -> Box:
    lows, sizes = [], []
    for length in shape:
        low = rng.randrange(length)
        lows.append(low)
        sizes.append(rng.randint(1, length - low))
    return Box(tuple(lows), tuple(sizes))


def random_pieces(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    """Boxes that make up a tensor, as the cuts of a few random ones."""
    return refine(whole(shape), [random_box(shape, rng) for _ in range(rng.randint(0, 3))])


def random_target(box: Box, dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """Memory of any strides."""
    order = list(range(len(box.sizes)))
    rng.shuffle(order)
    wide = torch.zeros([box.sizes[dim] + rng.randint(0, 2) for dim in order], dtype=dtype)
    view = wide.permute([order.index(dim) for dim in range(len(order))])
    return view_of(view, Box((0,) * len(box.sizes), box.sizes))


def one_tensor(tmp_path: Path, tensor: torch.Tensor, boxes: list[Box]) -> tuple[PartsDouble, PartManifest]:
    double = PartsDouble({"w": tensor}, storage_in(tmp_path))
    return double, double.write(pieces={"w": boxes})


def data_file(tmp_path: Path, replica: int = 0, rank: int = 0) -> Path:
    return tmp_path / str(NAME) / f"__r{replica}_g{rank}_f0.distcp"


@pytest.mark.parametrize("seed", range(30))
def test_random_boxes_have_the_bits_of_the_full_tensor(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shapes = {
        f"t{number}": tuple(rng.randint(1, 12) for _ in range(rng.randint(0, 4))) for number in range(rng.randint(1, 5))
    }
    shapes["wide"] = (rng.randint(1, 5), rng.randint(20_000, 120_000))  # of several blocks
    state = {name: random_tensor(shape, rng.choice(DTYPES), rng) for name, shape in shapes.items()}
    double = PartsDouble(state, storage_in(tmp_path), num_replicas=2, num_ranks=2)
    for replica in range(2):
        dealt: list[dict[str, list[Box]]] = [{name: [] for name in state} for _ in range(2)]
        for name, tensor in state.items():
            for box in random_pieces(tuple(tensor.shape), rng):
                dealt[rng.randrange(2)][name].append(box)
        for rank in range(2):
            double.write(replica, rank, pieces=dealt[rank])
    reader = CheckpointReader(newest_whole([double.storage]), num_threads=rng.choice((1, 4)))
    wants = []
    for _ in range(12):
        name = rng.choice([*state])
        box = random_box(state[name].shape, rng)
        wants.append(Want(name, box, random_target(box, state[name].dtype, rng)))
    reader.read(wants)
    wrong = [want[:2] for want in wants if not same_bits(want.target, view_of(state[want.name], want.box))]
    assert wrong == []


@pytest.mark.parametrize("num_pieces", [1, 2, 4])
@pytest.mark.parametrize("num_readers", [2, 4])
def test_rows_of_large_tensors_cost_at_most_five_percent_more_than_they_have(
    tmp_path: Path, num_pieces: int, num_readers: int
) -> None:
    tensor = torch.arange(3 * 1024 * 1024, dtype=torch.int32).reshape(-1, 1000 + 24)  # 12 MiB
    cuts = [tensor.shape[0] * number // num_pieces for number in range(num_pieces)]
    double, _ = one_tensor(tmp_path, tensor, rows(tensor.shape, cuts))
    reader = CheckpointReader(newest_whole([double.storage]))
    for number, box in enumerate(rows(tensor.shape, [tensor.shape[0] * n // num_readers for n in range(num_readers)])):
        target = torch.zeros(box.sizes, dtype=torch.int32)
        reader.read([Want("w", box, target)])
        assert torch.equal(target, view_of(tensor, box)), number
    assert reader.bytes_read <= 1.05 * tensor.nbytes


def test_a_few_columns_of_wide_rows_do_not_cost_the_whole_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(4 * 1024 * 1024, dtype=torch.int32).reshape(4, -1)  # rows of 4 MiB
    double, _ = one_tensor(tmp_path, tensor, [whole(tuple(tensor.shape))])
    reader = CheckpointReader(newest_whole([double.storage]))
    target = torch.zeros(4, 10, dtype=torch.int32)
    reader.read([Want("w", Box((0, 500_000), (4, 10)), target)])
    assert torch.equal(target, tensor[:, 500_000:500_010])
    assert reader.bytes_read < 10 * 64 * 1024


def test_pieces_larger_than_what_is_read_at_once_are_read_in_parts(tmp_path: Path) -> None:
    tensor = torch.arange(10 * 1024 * 1024 + 17, dtype=torch.int32)  # 40 MiB
    double, _ = one_tensor(tmp_path, tensor, [whole(tuple(tensor.shape))])
    reader = CheckpointReader(newest_whole([double.storage]))
    target = torch.zeros_like(tensor)
    reader.read([Want("w", whole(tuple(tensor.shape)), target)])
    assert torch.equal(target, tensor)
    assert reader.bytes_read <= 1.01 * tensor.nbytes


def test_small_tensors_that_lie_beside_each_other_are_read_together(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((64,), number) for number in range(200)}
    storage = CountingStorage(tmp_path)
    double = PartsDouble(state, storage)
    double.write()
    reader = CheckpointReader(newest_whole([storage]))
    wants = [Want(name, whole((64,)), torch.zeros(64, dtype=torch.int64)) for name in state]
    storage.num_reads = 0
    reader.read(wants)
    assert all(torch.equal(want.target, state[want.name]) for want in wants)
    assert storage.num_reads == 1


def test_values_come_from_the_tree_and_arrays_from_the_files(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": {"w": torch.ones(3)},
        "step": 120,
        "lr": [0.1, {"warm": True}],
        "seen": np.arange(5),
    }
    double = PartsDouble(state, storage_in(tmp_path))
    double.write(own={"rng": [1, 2]})
    reader = CheckpointReader(newest_whole([double.storage]))
    values = reader.values()
    assert {fqn: path for fqn, (path, _) in values.items()} == {
        "step": ("step",),
        "lr.0": ("lr", 0),
        "lr.1.warm": ("lr", 1, "warm"),
        "seen": ("seen",),
    }
    assert (values["step"][1], values["lr.0"][1], values["lr.1.warm"][1]) == (120, 0.1, True)
    np.testing.assert_array_equal(values["seen"][1], np.arange(5))
    assert reader.own("group_0", 0) == {"rng": [1, 2]}
    assert reader.own("group_1", 0) is None


# What does not fit


@pytest.mark.parametrize(
    ("want", "message"),
    [
        (Want("v", whole((8, 4)), torch.zeros(8, 4)), "v is not in"),
        (Want("w", whole((9, 4)), torch.zeros(9, 4)), "of shape"),
        (Want("w", whole((8,)), torch.zeros(8)), "of shape"),
        (Want("w", whole((8, 4)), torch.zeros(8, 4, dtype=torch.float64)), "float64"),
        (Want("w", whole((8, 4)), torch.zeros(8, 3)), "target"),
        (Want("w", whole((8, 4)), torch.empty(8, 4, device="meta")), "plain memory"),
    ],
)
def test_a_want_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, want: Want, message: str) -> None:
    double, _ = one_tensor(tmp_path, torch.ones(8, 4), [whole((8, 4))])
    reader = CheckpointReader(newest_whole([double.storage]))
    with pytest.raises(StateMismatchError, match=message):
        reader.read([want])
    assert reader.bytes_read == 0


def test_empty_and_zero_dimensional_tensors_are_read(tmp_path: Path) -> None:
    double = PartsDouble({"e": torch.empty(0, 3), "s": torch.tensor(2.5)}, storage_in(tmp_path))
    double.write()
    reader = CheckpointReader(newest_whole([double.storage]))
    scalar = torch.tensor(0.0)
    reader.read([Want("e", whole((0, 3)), torch.empty(0, 3)), Want("s", whole(()), scalar)])
    assert scalar.item() == 2.5


def test_what_no_piece_covers_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    double, _ = one_tensor(tmp_path, torch.ones(8, 4), rows((4, 4), [0]))
    double.state["w"] = torch.ones(8, 4)
    reader = CheckpointReader(read_checkpoint([double.storage], NAME))
    target = torch.full((8, 4), UNTOUCHED, dtype=torch.float32)
    there = torch.full((2, 4), UNTOUCHED, dtype=torch.float32)
    with pytest.raises(CheckpointDamagedError, match=r"w \[4:8, 0:4\]") as caught:
        reader.read([Want("w", Box((0, 0), (2, 4)), there), Want("w", whole((8, 4)), target)])
    assert (caught.value.state_overwritten, reader.bytes_read) == (False, 0)
    assert (target == UNTOUCHED).all() and (there == UNTOUCHED).all()


def test_parts_whose_storage_is_not_here_are_not_read(tmp_path: Path) -> None:
    _, manifest = one_tensor(tmp_path, torch.ones(8, 4), [whole((8, 4))])
    reader = CheckpointReader(Checkpoint(NAME, [SavedPart(manifest, None)]))
    with pytest.raises(CheckpointDamagedError, match="can be read from here"):
        reader.read([Want("w", whole((8, 4)), torch.zeros(8, 4))])


# Damage


def regions_of(manifest: PartManifest) -> dict[str, tuple[int, int]]:
    """The kinds of bytes that a file of records has."""
    piece = manifest.pieces[0]
    num_bytes = int(np.prod(piece.sizes)) * 4
    value = manifest.values[0]
    return {
        "head of the record": (piece.offset, piece.data_offset),
        "data": (piece.data_offset, piece.data_offset + num_bytes),
        "end of the record": (piece.data_offset + num_bytes, piece.offset + piece.length),
        "table of digests": (piece.digests_offset, piece.digests_offset + -(-num_bytes // 65536) * 16),
        "value": (value.offset, value.offset + value.length),
    }


def damage_of(reader: CheckpointReader, want: Want) -> CheckpointDamagedError | None:
    """Read; return the error that says what is damaged."""
    try:
        reader.read([want])
    except CheckpointDamagedError as error:
        return error
    return None


KINDS = ("head of the record", "data", "end of the record", "table of digests", "value")


@pytest.mark.parametrize("part_of_it", ["whole", "some rows"])
@pytest.mark.parametrize("rows_of_it", [40, 40_000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_never_gives_a_wrong_tensor(tmp_path: Path, kind: str, rows_of_it: int, part_of_it: str) -> None:
    rng = random.Random(f"{kind} {rows_of_it}")
    tensor = torch.arange(rows_of_it * 13, dtype=torch.int32).reshape(-1, 13)  # 2 kB, or 2 MB
    double = PartsDouble({"w": tensor, "step": 3}, storage_in(tmp_path))
    manifest = double.write()
    box = whole(tuple(tensor.shape)) if part_of_it == "whole" else Box((7, 0), (rows_of_it // 2, 13))
    for _ in range(8):
        at, bit = rng.randrange(*regions_of(manifest)[kind]), rng.randrange(8)
        flip_bit(data_file(tmp_path), at, bit)
        reader = CheckpointReader(newest_whole([double.storage]))
        target = torch.full(box.sizes, UNTOUCHED, dtype=torch.int32)
        expected = view_of(tensor, box)
        damage = damage_of(reader, Want("w", box, target))
        if damage is None:
            assert torch.equal(target, expected)
        else:
            assert kind == "data"
            assert "__r0_g0_f0.distcp does not hold the bytes that were written" in str(damage)
            assert str(whole(tuple(tensor.shape))) in str(damage)
            assert damage.state_overwritten or (target == UNTOUCHED).all()
            assert ((target == UNTOUCHED) | (target == expected)).all()  # never a wrong element
        problems = reader.verify()
        assert problems or kind in ("head of the record", "end of the record")  # these have bytes that nothing reads
        flip_bit(data_file(tmp_path), at, bit)
    assert CheckpointReader(newest_whole([double.storage])).verify() == []


@pytest.mark.parametrize("kind", KINDS)
def test_with_another_replica_a_flipped_bit_costs_nothing(tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind)
    tensor = torch.arange(80_000, dtype=torch.int32).reshape(-1, 10)
    double = PartsDouble({"w": tensor, "step": 3}, storage_in(tmp_path), num_replicas=2)
    manifest = double.write(0, pieces={"w": rows(tensor.shape, [0, 3000])})
    double.write(1, pieces={"w": rows(tensor.shape, [0, 1500, 2000, 5000])})
    for _ in range(8):
        at, bit = rng.randrange(*regions_of(manifest)[kind]), rng.randrange(8)
        flip_bit(data_file(tmp_path), at, bit)
        reader = CheckpointReader(newest_whole([double.storage]))
        target = torch.zeros_like(tensor)
        reader.read([Want("w", whole(tuple(tensor.shape)), target)])
        assert torch.equal(target, tensor)
        flip_bit(data_file(tmp_path), at, bit)


@pytest.mark.parametrize("seed", range(10))
def test_of_many_damaged_pieces_each_is_replaced_or_named(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    state = {f"t{number}": torch.arange(number * 1000, number * 1000 + 4000) for number in range(6)}
    double = PartsDouble(state, storage_in(tmp_path), num_replicas=3)
    for replica in range(3):
        manifest = double.write(
            replica,
            pieces={name: rows((4000,), [0, *sorted(rng.sample(range(1, 4000), 3))]) for name in state},
        )
        for piece in rng.sample(manifest.pieces, 8):
            num_bytes = piece.sizes[0] * 8
            flip_bit(data_file(tmp_path, replica), piece.data_offset + rng.randrange(num_bytes), rng.randrange(8))
    reader = CheckpointReader(newest_whole([double.storage]), num_threads=4)
    outcomes = {}
    for name, tensor in state.items():
        target = torch.full_like(tensor, UNTOUCHED)
        damage = damage_of(reader, Want(name, whole((4000,)), target))
        if damage is None:
            outcomes[name] = torch.equal(target, tensor)
        else:
            outcomes[name] = name in str(damage) and bool(((target == UNTOUCHED) | (target == tensor)).all())
    assert outcomes == dict.fromkeys(state, True)


def test_a_file_that_is_cut_off_after_it_was_listed_is_a_storage_error(tmp_path: Path) -> None:
    double, _ = one_tensor(tmp_path, torch.arange(1000.0), [whole((1000,))])
    reader = CheckpointReader(newest_whole([double.storage]))
    with data_file(tmp_path).open("r+b") as file:
        file.truncate(1000)
    target = torch.full((1000,), float(UNTOUCHED))
    with pytest.raises(StorageError, match=r"__r0_g0_f0\.distcp"):
        reader.read([Want("w", whole((1000,)), target)])
    assert (target == UNTOUCHED).all()


def test_a_file_that_is_gone_is_replaced_by_another_replicas(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    double = PartsDouble({"w": tensor}, storage_in(tmp_path), num_replicas=2)
    double.write(0)
    double.write(1)
    reader = CheckpointReader(newest_whole([double.storage]))
    data_file(tmp_path).unlink()
    target = torch.zeros(1000)
    reader.read([Want("w", whole((1000,)), target)])
    assert torch.equal(target, tensor)


def test_an_error_says_whether_targets_were_written_to(tmp_path: Path) -> None:
    good, bad = torch.arange(100.0), torch.arange(100.0, 200.0)
    double = PartsDouble({"good": good, "bad": bad}, storage_in(tmp_path))
    manifest = double.write()
    flip_bit(data_file(tmp_path), manifest.pieces[1].data_offset)
    reader = CheckpointReader(newest_whole([double.storage]))
    wants = [Want(name, whole((100,)), torch.zeros(100)) for name in ("good", "bad")]
    with pytest.raises(CheckpointError) as both:
        reader.read(wants)
    with pytest.raises(CheckpointError) as one:
        reader.read(wants[1:])
    assert (both.value.state_overwritten, one.value.state_overwritten) == (True, False)


def test_a_copy_of_a_part_in_another_storage_stands_for_it(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    one, other = storage_in(tmp_path / "one"), storage_in(tmp_path / "other")
    double = PartsDouble({"w": tensor}, one)
    manifest = double.write()
    double.write(storage=other)
    flip_bit(data_file(tmp_path / "one"), manifest.pieces[0].data_offset)
    reader = CheckpointReader(newest_whole([one, other]))
    target = torch.zeros(1000)
    reader.read([Want("w", whole((1000,)), target)])
    assert torch.equal(target, tensor)
