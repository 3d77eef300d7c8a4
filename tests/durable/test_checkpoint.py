"""Which checkpoint counts as whole: what its manifests say together, and what is left aside."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.durable_parts import NAME, PartsDouble, flip_bit, rows, storage_in
from support.newest import newest_whole

from torchft_ckpt.checkpointing.durable.cooperative_read.lookup import Candidates
from torchft_ckpt.checkpointing.durable.cooperative_read.ranks import Ranks
from torchft_ckpt.checkpointing.durable.format.manifest import (
    BoxEntry,
    FileTensor,
    PartManifest,
    PieceEntry,
    PlainValue,
    encode_part,
)
from torchft_ckpt.checkpointing.durable.names import CheckpointName, PartName
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    PieceIndex,
    SavedPart,
    list_checkpoints,
    minimal_cover,
    read_checkpoint,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes import geometry
from torchft_ckpt.core.boxes.geometry import Box, contains, intersect, missing_boxes, refine, whole
from torchft_ckpt.errors import CheckpointNotFoundError, StorageError

STATE: dict[str, Any] = {"w": torch.arange(32.0).reshape(8, 4), "b": torch.ones(3), "step": 120}
HALVES = rows((8, 4), [0, 4])


class BrokenStorage(LocalStorage):
    """A disk that has died."""

    def names(self, directory: str = "") -> list[str]:
        raise StorageError(f"{self.location}: listing failed", self.location)


def two_ranks(storage: LocalStorage, name: CheckpointName = NAME) -> PartsDouble:
    """A checkpoint of two replicas of two ranks, each byte written once."""
    double = PartsDouble(STATE, storage, name, num_replicas=2, num_ranks=2)
    double.write(0, 0, pieces={"w": HALVES[:1]}, values=[])
    double.write(0, 1, pieces={"w": HALVES[1:]}, values=["step"])
    double.write(1, 0, pieces={"b": [whole((3,))]}, values=[])
    double.write(1, 1, pieces={}, values=[])
    return double


def path_of(tmp_path: Path, name: str) -> Path:
    return tmp_path / str(NAME) / name


# Whole or not


def test_a_checkpoint_whose_parts_cover_everything_is_whole(tmp_path: Path) -> None:
    checkpoint = newest_whole([two_ranks(storage_in(tmp_path)).storage])
    assert (checkpoint.name, len(checkpoint.parts), checkpoint.left_aside) == (NAME, 4, [])
    assert {fqn: tensor.shape for fqn, tensor in checkpoint.tensors.items()} == {"w": (8, 4), "b": (3,)}
    assert not checkpoint.holes()


def truncate(tmp_path: Path) -> None:
    with path_of(tmp_path, "__r0_g1_f0.distcp").open("r+b") as file:
        file.truncate(100)


def lengthen(tmp_path: Path) -> None:
    with path_of(tmp_path, "__r0_g1_f0.distcp").open("ab") as file:
        file.write(b"more")


def lose_data(tmp_path: Path) -> None:
    path_of(tmp_path, "__r0_g1_f0.distcp").unlink()


def lose_manifest(tmp_path: Path) -> None:
    path_of(tmp_path, "part-r0-g1-f0.json").unlink()


def cut_manifest(tmp_path: Path) -> None:
    path = path_of(tmp_path, "part-r0-g1-f0.json")
    path.write_bytes(path.read_bytes()[:-1])


def garble_manifest(tmp_path: Path) -> None:
    path_of(tmp_path, "part-r0-g1-f0.json").write_bytes(random.Random(1).randbytes(1000))


def foreign_manifest(tmp_path: Path) -> None:
    other = two_ranks(storage_in(tmp_path / "other"), CheckpointName(121, "q3-other"))
    source = tmp_path / "other" / str(other.name) / "part-r0-g1-f0.json"
    shutil.copy(source, path_of(tmp_path, "part-r0-g1-f0.json"))
    shutil.rmtree(tmp_path / "other")


def anothers_manifest(tmp_path: Path) -> None:
    shutil.copy(path_of(tmp_path, "part-r0-g0-f0.json"), path_of(tmp_path, "part-r0-g1-f0.json"))


def lose_rank(tmp_path: Path) -> None:
    path_of(tmp_path, "part-r0-g1-f0.json").unlink()
    path_of(tmp_path, "part-r1-g1-f0.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, "has 100 bytes"),
        (lengthen, "were written"),
        (lose_data, "__r0_g1_f0.distcp is not there"),
        (lose_manifest, r"missing are w \[4:8, 0:4\]"),
        (cut_manifest, "is damaged"),
        (garble_manifest, "part-r0-g1-f0.json"),
        (foreign_manifest, "step 121"),
        (anothers_manifest, "is that of part-r0-g0-f0.json"),
        (lose_rank, "no manifest of rank 1 of any replica"),
    ],
)
def test_the_newest_is_skipped_with_a_line_that_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], reason: str
) -> None:
    older = CheckpointName(110, "q2-0")
    double = two_ranks(storage_in(tmp_path))
    two_ranks(storage_in(tmp_path), older)
    spoil(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert newest_whole([double.storage]).name == older
    line = next(record.getMessage() for record in caplog.records if "is skipped" in record.getMessage())
    assert line.startswith(f"checkpoint {NAME} is skipped")
    with pytest.raises(CheckpointNotFoundError, match=reason):
        newest_whole([double.storage], step=120)


def test_every_flipped_bit_of_a_manifest_leaves_it_aside(tmp_path: Path) -> None:
    double = two_ranks(storage_in(tmp_path))
    path = path_of(tmp_path, "part-r0-g1-f0.json")
    rng = random.Random(5)
    size = path.stat().st_size
    taken = []
    for at in [*range(120), *rng.sample(range(120, size), 150)]:
        bit = rng.randrange(8)
        flip_bit(path, at, bit)
        if why_not_whole(read_checkpoint([double.storage], NAME)) is None:
            taken.append((at, bit))
        flip_bit(path, at, bit)
    assert taken == []


def test_a_replicas_part_that_is_not_needed_may_be_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = two_ranks(storage_in(tmp_path))
    flip_bit(path_of(tmp_path, "part-r1-g1-f0.json"), 300)
    with caplog.at_level(logging.WARNING):
        checkpoint = newest_whole([double.storage])
    assert len(checkpoint.parts) == 3
    assert "whole without a part" in caplog.text


def test_a_value_that_nobody_wrote_is_missed(tmp_path: Path) -> None:
    double = PartsDouble(STATE, storage_in(tmp_path))
    double.write(values=[])
    assert why_not_whole(read_checkpoint([double.storage], NAME)) == "no value of step"


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    storage = storage_in(tmp_path)
    storage.make_directory(str(NAME))
    with pytest.raises(CheckpointNotFoundError, match="no manifest is there"):
        newest_whole([storage])


def test_nothing_at_all_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=str(tmp_path)):
        newest_whole([LocalStorage(tmp_path / "none")])


def test_names_are_listed_newest_first_and_other_things_are_none(tmp_path: Path) -> None:
    storage = storage_in(tmp_path)
    names = [CheckpointName(step, f"q{step}-1") for step in (9, 100, 20)]
    for name in names:
        storage.make_directory(str(name))
    for other in ("step-1.x", "notes", f"{names[0]}.tmp-1"):
        storage.make_directory(other)
    assert list_checkpoints(storage) == sorted(names, reverse=True)


# Parts that contradict each other


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensors": "shape"}, r"w is torch.float32\[8, 4\].*\[9, 4\]"),
        ({"tensors": "dtype"}, "torch.int32"),
        ({"tensors": "path"}, "'v'"),
        ({"num_ranks": 3}, "groups of 2 ranks"),
    ],
)
def test_parts_that_contradict_each_other_are_no_checkpoint(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    double = two_ranks(storage_in(tmp_path))
    manifest = next(
        part.manifest for part in read_checkpoint([double.storage], NAME).parts if part.name == PartName(1, 1, 0)
    )
    if "tensors" in changes:
        entry = manifest.tensors[0]
        other: dict[str, Any] = {
            "shape": {"shape": [9, 4]},
            "dtype": {"dtype": "int32"},
            "path": {"path": ["v"]},
        }[changes["tensors"]]
        changes = {"tensors": [msgspec.structs.replace(entry, **other), *manifest.tensors[1:]]}
    double.write_manifest(msgspec.structs.replace(manifest, **changes))
    with pytest.raises(CheckpointNotFoundError, match=reason):
        newest_whole([double.storage])


@pytest.mark.parametrize("other", [torch.ones(8, 5), torch.ones(8), torch.ones(8, 4, dtype=torch.int32)])
def test_pieces_of_another_shape_are_never_taken_for_the_tensors_own(tmp_path: Path, other: torch.Tensor) -> None:
    storage = storage_in(tmp_path)
    PartsDouble(STATE, storage, num_replicas=2).write(0, pieces={"w": HALVES[:1], "b": [whole((3,))]})
    PartsDouble({**STATE, "w": other}, storage, num_replicas=2).write(1)
    checkpoint = read_checkpoint([storage], NAME)
    assert "w is torch.float32[8, 4]" in str(why_not_whole(checkpoint))
    assert [piece.box for piece in checkpoint.tensors["w"].pieces] == HALVES[:1]


def test_a_part_that_is_there_twice_with_other_contents_is_left_aside(tmp_path: Path) -> None:
    one, other = storage_in(tmp_path / "one"), storage_in(tmp_path / "other")
    double = two_ranks(one)
    double.write(1, 1, pieces={"b": [whole((3,))]}, values=[], storage=other)
    checkpoint = read_checkpoint([one, other], NAME)
    assert [part.name for part in checkpoint.parts] == [PartName(0, 0, 0), PartName(0, 1, 0), PartName(1, 0, 0)]
    assert checkpoint.left_aside == ["part-r1-g1-f0.json is there twice, with other contents"]


def test_replicas_that_differ_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = storage_in(tmp_path)
    PartsDouble(STATE, storage, num_replicas=2).write(0)
    PartsDouble({**STATE, "b": torch.zeros(3)}, storage, num_replicas=2).write(1)
    with caplog.at_level(logging.WARNING):
        checkpoint = newest_whole([storage])
    assert checkpoint.divergent == ["b"]
    assert "did not hold the same bytes of b" in caplog.text


# Several storages


def test_the_newest_step_that_is_whole_over_all_disks_together_counts(tmp_path: Path) -> None:
    disks = [storage_in(tmp_path / "0"), storage_in(tmp_path / "1")]
    newer = CheckpointName(130, "q4-1")
    for name, ranks in ((NAME, (0, 1)), (newer, (0,))):
        double = PartsDouble(STATE, disks[0], name, num_ranks=2)
        for rank in ranks:
            double.write(0, rank, pieces={"w": [HALVES[rank]], "b": [whole((3,))]}, storage=disks[rank])
    checkpoint = newest_whole(disks)
    assert checkpoint.name == NAME
    target = torch.zeros(8, 4)
    CheckpointReader(checkpoint).read([Want("w", whole((8, 4)), target)])
    assert torch.equal(target, STATE["w"])


def test_a_part_on_a_disk_that_is_not_here_counts(tmp_path: Path) -> None:
    double = PartsDouble(STATE, storage_in(tmp_path), num_ranks=2)
    here = double.write(0, 0, pieces={"w": HALVES[:1]}, values=[])
    there = double.write(0, 1, pieces={"w": HALVES[1:], "b": [whole((3,))]})
    checkpoint = Checkpoint(NAME, [SavedPart(here, double.storage), SavedPart(there, None)])
    assert why_not_whole(checkpoint) is None


def test_a_disk_that_has_died_is_left_aside_if_another_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double = two_ranks(storage_in(tmp_path))
    broken = BrokenStorage(tmp_path / "broken")
    with caplog.at_level(logging.WARNING):
        assert newest_whole([broken, double.storage]).name == NAME
    assert "broken is left aside" in caplog.text
    with pytest.raises(StorageError, match="listing failed"):
        newest_whole([broken])


@pytest.mark.parametrize("has_a_part", [False, True])
def test_a_rank_alone_reads_of_the_shared_storage_what_has_a_part_there(tmp_path: Path, has_a_part: bool) -> None:
    """A directory that a save began, and that has nothing yet, is no reason to believe what others say of the one here."""
    double, shared = two_ranks(storage_in(tmp_path / "own")), storage_in(tmp_path / "shared")
    shared.make_directory(str(NAME))
    if has_a_part:
        double.write(0, 0, pieces={"w": HALVES[:1]}, values=[], storage=shared)
    found = Candidates([shared, double.storage], Ranks(), step=None, shared=shared).newest()
    assert found.checkpoint.name == NAME and found.is_shared is has_a_part


# Holes


def test_holes_are_what_is_missing(tmp_path: Path) -> None:
    double = PartsDouble(STATE, storage_in(tmp_path), num_replicas=2, num_ranks=2)
    double.write(0, 0, pieces={"w": rows((8, 4), [0, 2, 6])[:2]}, values=[])
    holes = read_checkpoint([double.storage], NAME).holes()
    assert (holes.ranks, holes.values, holes.conflicts) == ([range(1, 2)], ["step"], [])
    assert holes.boxes == {"w": [Box((6, 0), (2, 4))], "b": [whole((3,))]}


@pytest.mark.parametrize("member", ["num_ranks", "num_replicas"])
def test_a_manifest_that_counts_more_ranks_than_there_are_machines_is_left_aside(tmp_path: Path, member: str) -> None:
    """What is missing was once listed: 2**62 ranks, until the kernel ended the process."""
    good = two_ranks(storage_in(tmp_path))
    newer = CheckpointName(NAME.step + 1, "q4")
    PartsDouble(STATE, good.storage, newer).write(**{member: 2**62})
    assert newest_whole([good.storage]).name == NAME
    (reason,) = read_checkpoint([good.storage], newer).left_aside
    assert f"Expected `int` <= 1048576 - at `$.{member}`" in reason


def test_ranks_that_are_missing_are_not_counted_one_by_one(tmp_path: Path) -> None:
    double = PartsDouble(STATE, storage_in(tmp_path), num_ranks=2**20)
    double.write(0, 0)
    double.write(0, 7, pieces={}, values=[])
    reason = why_not_whole(read_checkpoint([double.storage], NAME))
    assert reason == "no manifest of rank 1 to 6, 8 to 1048575 of any replica"


def test_a_tensor_that_no_machine_has_is_refused(tmp_path: Path) -> None:
    for shape in ([2**62, 2**62], [0, 2**62, 4]):
        double = PartsDouble(STATE, storage_in(tmp_path))
        entry = FileTensor(fqn="w", path=["w"], dtype="float32", shape=shape, boxes=[])
        double.write(tensors=[entry], pieces={}, tree={"d": [["w", {"x": 0}]]})
        (reason,) = read_checkpoint([double.storage], NAME).left_aside
        assert reason.endswith("has a tensor 'w' of more than 2**62 bytes")


def test_a_part_that_fills_the_holes_makes_it_whole(tmp_path: Path) -> None:
    double = PartsDouble(STATE, storage_in(tmp_path), num_replicas=2, num_ranks=2)
    double.write(0, 0, pieces={"w": HALVES[:1]}, values=[])
    double.write(1, 1, pieces={}, values=[])
    holes = read_checkpoint([double.storage], NAME).holes()
    double.write(1, 1, 1, pieces=holes.boxes, values=holes.values)
    assert newest_whole([double.storage]).name == NAME


# Covers


@pytest.mark.parametrize("seed", range(40))
def test_a_cover_takes_each_element_once_and_says_what_is_missing(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3)))

    def box() -> Box:
        lows = [rng.randrange(length) for length in shape]
        return Box(tuple(lows), tuple(rng.randint(1, length - low) for low, length in zip(lows, shape, strict=True)))

    pieces = [box() for _ in range(rng.randint(0, 8))]
    wanted = box()
    banned = set(rng.sample(range(len(pieces)), len(pieces) // 3))
    index = PieceIndex((piece, number) for number, piece in enumerate(pieces))
    taken, missing = index.cover(wanted, lambda number: number not in banned)
    assert all(contains(pieces[number], part) and number not in banned for number, part in taken)
    parts = [*(part for _, part in taken), *missing]
    assert sum(part.volume for part in parts) == wanted.volume
    assert all(contains(wanted, part) for part in parts)
    assert all(intersect(a, b) is None for at, a in enumerate(parts) for b in parts[at + 1 :])
    usable = [piece for number, piece in enumerate(pieces) if number not in banned]
    assert all(intersect(hole, piece) is None for hole in missing for piece in usable)


@pytest.mark.parametrize("seed", range(20))
def test_a_minimal_cover_covers_and_nothing_in_it_is_superfluous(seed: int) -> None:
    rng = random.Random(seed)
    shape = (12, 10)
    boxes = refine(whole(shape), [Box((rng.randrange(6), 0), (6, 5)), Box((0, rng.randrange(5)), (3, 5))])
    more = [Box((low, 0), (rng.randint(1, 12 - low), 10)) for low in (rng.randrange(12) for _ in range(4))]
    checkpoint = checkpoint_of(shape, [*boxes, *more, *boxes])
    cover = [piece.box for piece in minimal_cover(checkpoint.tensors["w"])]
    assert missing_boxes(shape, cover) == []
    assert all(missing_boxes(shape, [box for box in cover if box is not one]) for one in cover)


def checkpoint_of(shape: tuple[int, ...], boxes: list[Box]) -> Checkpoint:
    """A checkpoint of one tensor, of manifests alone: one rank wrote all of its pieces."""
    entries = [
        PieceEntry(
            tensor=0,
            offsets=list(box.offsets),
            sizes=list(box.sizes),
            file=0,
            offset=0,
            length=0,
            data_offset=0,
            digests_offset=0,
            digest="0" * 32,
        )
        for box in boxes
    ]
    return Checkpoint(NAME, [SavedPart(manifest_of(0, 1, {"w": shape}, entries), None)])


def manifest_of(
    rank: int, num_ranks: int, shapes: dict[str, tuple[int, ...]], pieces: list[PieceEntry]
) -> PartManifest:
    return PartManifest(
        checkpoint=str(NAME),
        step=NAME.step,
        replica=0,
        rank=rank,
        fill=0,
        num_replicas=1,
        num_ranks=num_ranks,
        replica_id="group_0",
        written_at_s=0.0,
        tensors=[
            FileTensor(
                fqn=fqn,
                path=[fqn],
                dtype="float32",
                shape=list(shape),
                boxes=[BoxEntry(offsets=[0] * len(shape), sizes=list(shape))],
            )
            for fqn, shape in shapes.items()
        ],
        holds_values=[],
        tree={},
        pieces=pieces,
        values=[],
        files=[],
        own=PlainValue(),
    )


@pytest.mark.slow
def test_the_checkpoint_of_a_thousand_ranks_is_seen_to_be_whole() -> None:
    shapes = {f"layer.{number}": (1000, 64) for number in range(20)}
    parts = []
    for rank in range(1000):
        pieces = [
            PieceEntry(
                tensor=number,
                offsets=[rank, 0],
                sizes=[1, 64],
                file=0,
                offset=0,
                length=0,
                data_offset=0,
                digests_offset=0,
                digest="0" * 32,
            )
            for number in range(len(shapes))
        ]
        parts.append(SavedPart(manifest_of(rank, 1000, shapes, pieces), None))
    assert why_not_whole(Checkpoint(NAME, parts)) is None
    assert why_not_whole(Checkpoint(NAME, parts[:-1])) is not None


def test_manifests_of_equal_bytes_in_two_storages_are_both_kept(tmp_path: Path) -> None:
    one, other = storage_in(tmp_path / "one"), storage_in(tmp_path / "other")
    double = two_ranks(one)
    shutil.copytree(tmp_path / "one" / str(NAME), tmp_path / "other" / str(NAME))
    checkpoint = read_checkpoint([one, other], NAME)
    assert len(checkpoint.parts) == 8
    assert checkpoint.left_aside == []
    assert encode_part(checkpoint.parts[0].manifest) == encode_part(checkpoint.parts[1].manifest)
    assert double.storage is one


def test_pieces_that_would_take_hours_to_put_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of ever fewer rows, every second one first: each is compared with all gaps that those before it left."""
    monkeypatch.setattr(geometry, "_FREE_COMPARISONS", 1000)
    height = 400
    boxes = [Box((0, column), (height - column // 2, 1)) for column in range(0, 400, 2)]
    boxes += [Box((0, column), (1, 1)) for column in range(1, 400, 2)]
    with pytest.raises(ValueError, match="400 pieces lie so that too many of them have to be compared"):
        PieceIndex([(box, None) for box in boxes]).cover(whole((height, 400)))


def test_shards_are_put_together_in_whatever_order_ranks_wrote_them() -> None:
    boxes = [Box((0, column), (9, 1)) for first in (0, 1) for column in range(first, 1000, 2)]
    taken, missing = PieceIndex([(box, None) for box in boxes]).cover(whole((9, 1000)))
    assert len(taken) == 1000 and missing == []


@pytest.mark.parametrize("second", [1, 1001], ids=["1 x 4000 ragged", "2 x 2000, the last column narrower"])
def test_any_number_of_pieces_that_do_not_overlap_is_taken(second: int) -> None:
    widths = [second] if second == 1 else [501, 500]
    heights = [10 + number % 2 for number in range(4000 // len(widths))]
    columns = [(sum(widths[:at]), width) for at, width in enumerate(widths)]
    boxes = [Box((low, left), (height, width)) for low, height in starts(heights) for left, width in columns]
    wanted = whole((sum(heights), second))
    taken, missing = PieceIndex([*((box, box) for box in boxes), *((box, None) for box in boxes)]).cover(wanted)
    assert not missing and sorted(box for box, _ in taken if box) == sorted(part for _, part in taken) == boxes


def starts(lengths: list[int]) -> list[tuple[int, int]]:
    return [*zip(accumulate(lengths, initial=0), lengths, strict=False)]
