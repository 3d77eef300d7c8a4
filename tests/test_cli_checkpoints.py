"""`checkpoints ls`, `verify` and `export`: what people see, what the exit status says, and what is in the file."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from support import processes
from support.durable_parts import PartsDouble

from torchft_ckpt import Checkpointer
from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointing.durable.format.manifest import PieceEntry
from torchft_ckpt.checkpointing.durable.names import CheckpointName, parse_checkpoint
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, read_checkpoint
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving.dcp_metadata import build_metadata
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.cli import checkpoint_content, safetensors_file
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.errors import StorageError

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def example(step: int) -> dict[str, Any]:
    """A state with tensors of several kinds, and values with tensors inside."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(300, 500, generator=generator),
            "half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
            "transposed": torch.randn(6, 5, generator=generator).T,
            "scalar": torch.tensor(step, dtype=torch.int64),
            "mask": torch.tensor([True, False, True]),
            "empty": torch.empty(0, 3),
        },
        "optim": {"lr": 1e-3, "betas": (0.9, 0.999), "inf": float("inf"), "pair": (torch.ones(2) * step, "a")},
        "array": np.arange(5) + step,
        "text": "Grüße",
    }


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """What of the example is tensors, by name."""
    state = example(step)
    model = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    return {**model, "optim.pair.0": state["optim"]["pair"][0]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 10, 20 and 30. Copied before it is damaged."""
    root = tmp_path_factory.mktemp("saved")
    checkpointer = Checkpointer(root, save_random_state=False)
    for step in (10, 20, 30):
        checkpointer.save(example(step), step=step).result(60)
    checkpointer.shutdown()
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


def save(root: Path, state: dict[str, Any]) -> None:
    checkpointer = Checkpointer(root, save_random_state=False)
    checkpointer.save(state, step=1).result(60)
    checkpointer.shutdown()


def directory_of(root: Path, step: int) -> Path:
    return next(path for path in root.iterdir() if (name := parse_checkpoint(path.name)) and name.step == step)


def opened(root: Path, step: int) -> Checkpoint:
    name = parse_checkpoint(directory_of(root, step).name)
    assert name is not None
    return read_checkpoint([open_storage(root)], name)


def piece_of(root: Path, step: int, fqn: str) -> PieceEntry:
    return opened(root, step).tensors[fqn].pieces[0].entry


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def damage(root: Path, step: int, fqn: str = "model.weight") -> str:
    """Flip a bit of a tensor; return the path of the file."""
    path = directory_of(root, step) / "__r0_g0_f0.distcp"
    flip(path, piece_of(root, step, fqn).data_offset + 3)
    return f"{path.parent.name}/{path.name}"


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """Return exit status, output and errors of `checkpoints ...`."""
    status = main(["checkpoints", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


def metadata_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        found = file.metadata()
    return {key: json.loads(value) for key, value in found.items() if key.startswith("torchft_ckpt.")}


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    def plain(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        flat = tensor.contiguous().reshape(-1)
        return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""

    return ours.keys() == theirs.keys() and all(plain(ours[name]) == plain(theirs[name]) for name in ours)


# ls


def test_ls_prints_the_newest_first(root: Path, capsys: Capture) -> None:
    storage = LocalStorage(root)
    state = {"w": torch.arange(64.0).reshape(8, 8), "x": torch.ones(3), "lr": 0.1}
    upper, lower = Box((0, 0), (4, 8)), Box((4, 0), (4, 8))
    filled = PartsDouble(state, storage, CheckpointName(60, "q3-1a2b3c4d"), num_replicas=2, num_ranks=2)
    filled.write(0, 0, pieces={"w": [upper]}, values=["lr"])
    filled.write(0, 1, pieces={"w": [lower]}, values=[], written_at_s=1.8e9)
    filled.write(0, 1, fill=1, pieces={"x": [Box((0,), (3,))]}, values=[])
    begun = PartsDouble(state, storage, CheckpointName(70, "q3-1a2b3c4d"), num_replicas=2, num_ranks=2)
    begun.write(0, 0, pieces={"w": [upper]}, values=["lr"], written_at_s=1.8e9)
    status, out, err = run(capsys, "ls", root)
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert [first for first, _ in lines] == ["step", "70", "no", "60", "plain", "30", "20", "10"]
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows[0] == "step whole tensors bytes on disk parts written name"
    assert rows[1].startswith("70 no 2 268 B ")
    assert rows[1].endswith(" 1 of 2x2 2027-01-15 08:00:00 step-000000000070.q3-1a2b3c4d")
    assert rows[2] == "no manifest of rank 1 of any replica; missing are w [4:8, 0:8]; x [0:3]"
    assert " 2 of 2x2, 1 filled 2027-01-15 08:00:00 " in rows[3]
    assert rows[4] == "plain DCP cannot read it: its .metadata was not written"
    assert rows[5].startswith("30 yes 8 586.15 KiB 6") and " 1x1 " in rows[5]
    starts = {line.index(name) for line in out.splitlines() for name in line.split()[-1:] if name.startswith("step-")}
    assert len(starts) == 1  # a table


def test_ls_prints_json_for_programs(root: Path, capsys: Capture) -> None:
    for part in directory_of(root, 30).glob("part-*"):
        part.unlink()
    status, out, _ = run(capsys, "ls", root, "--json")
    told = json.loads(out)
    newest, second, _ = told["checkpoints"]
    assert (status, told["location"]) == (0, str(root))
    assert (newest["step"], newest["is_whole"], newest["why_not_whole"]) == (30, False, "no manifest is there")
    assert {key: second[key] for key in ("step", "is_whole", "why_not_whole", "num_tensors", "bytes")} == {
        "step": 20,
        "is_whole": True,
        "why_not_whole": None,
        "num_tensors": 8,
        "bytes": sum(tensor.nbytes for tensor in tensors_of(20).values()) + 5 * 8,
    }
    assert second["bytes_on_disk"] == sum(path.stat().st_size for path in directory_of(root, 20).iterdir())
    assert [second[key] for key in ("num_replicas", "num_ranks", "num_parts", "num_filled", "num_files")] == [
        1,
        1,
        1,
        0,
        1,
    ]


@pytest.mark.parametrize("written_at_s", [1e300, -1e300])
def test_a_clock_that_was_wrong_keeps_nothing_from_being_listed(
    written_at_s: float, root: Path, capsys: Capture
) -> None:
    name = CheckpointName(40, "clock")
    PartsDouble(example(40), LocalStorage(root), name).write(written_at_s=written_at_s)
    status, out, _ = run(capsys, "ls", root)
    assert status == 0
    (row,) = (line.split() for line in out.splitlines() if str(name) in line)
    assert row[1] == "yes" and row[-2] == "?"
    assert run(capsys, "ls", root, "--json")[0] == 0


def test_one_checkpoint_can_be_named(root: Path, tmp_path: Path, capsys: Capture) -> None:
    directory = directory_of(root, 20)
    (tmp_path / "latest").symlink_to(directory)
    for location in (directory, f"{directory}/", f"file://{directory}", tmp_path / "latest"):
        assert [line.split()[0] for line in run(capsys, "ls", location)[1].splitlines()] == ["step", "20"]


def test_one_that_was_copied_under_another_name_is_verified_and_listed(root: Path, capsys: Capture) -> None:
    shutil.copytree(directory_of(root, 20), root / "best")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root / "of-dcp", no_dist=True)
    names = [line.split()[-1] for line in run(capsys, "ls", root)[1].splitlines()[1:]]
    assert names == [directory_of(root, 30).name, directory_of(root, 20).name, "best", directory_of(root, 10).name]
    for location in (root / "best", f"file://{root / 'best'}/"):
        status, out, err = run(capsys, "verify", location, "--quiet")
        assert (status, out, err) == (0, "", "")
        assert run(capsys, "verify", location)[1].startswith("best: right: 8 tensors")
    assert run(capsys, "export", root / "best", "-o", root / "file")[0] == 0
    assert load_file(root / "file")["model.scalar"] == 20
    flip(root / "best" / "__r0_g0_f0.distcp", piece_of(root, 20, "model.weight").data_offset + 3)
    status, out, _ = run(capsys, "verify", root)
    assert status == 1 and "best: damaged\n" in out and out.endswith("4 checkpoints: 3 right, 1 damaged\n")
    for manifest in (root / "best").glob("part-*"):
        manifest.write_text("no manifest")
    status, out, _ = run(capsys, "verify", root / "best")
    assert status == 1 and "no manifest is there" in out


def test_what_dcp_wrote_is_named_as_such(tmp_path: Path, capsys: Capture) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    for location, it in ((tmp_path / "step-7", "it"), (tmp_path, "step-7")):
        told = f"torchft_ckpt: {location}: torch.distributed.checkpoint wrote {it}; its format_utils read it\n"
        assert run(capsys, "verify", location) == (2, "", told)


@pytest.mark.parametrize("action", [["ls"], ["verify"], ["export", "-o", "state.safetensors"]])
def test_a_place_without_checkpoints_is_named(
    action: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no checkpoint")
    for location in (tmp_path, tmp_path / "nowhere", tmp_path / "file", tmp_path / "step-000000000001.a"):
        expected = (2, "", f"torchft_ckpt: {location}: there is no checkpoint\n")
        assert run(capsys, action[0], location, *action[1:]) == expected
    for location, message in (("", "DIR is empty"), ("nix://x", "location='nix://x' cannot be used")):
        status, _, err = run(capsys, action[0], location, *action[1:])
        assert (status, err.startswith(f"torchft_ckpt: {message}")) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_step_that_is_not_there_is_named_beside_those_that_are(root: Path, capsys: Capture) -> None:
    expected = (2, "", f"torchft_ckpt: {root}: there is no checkpoint of step 21; its steps are 30, 20, 10\n")
    assert run(capsys, "verify", root, "--step", 21) == expected


# verify


def test_verify_finds_that_all_is_right(root: Path, capsys: Capture) -> None:
    status, out, err = run(capsys, "verify", root)
    names = [directory_of(root, step).name for step in (30, 20, 10)]
    assert (status, out.splitlines()) == (
        0,
        [*(f"{name}: right: 8 tensors, 586.15 KiB" for name in names), "3 checkpoints: 3 right"],
    )
    assert err.count("100%") == 3
    assert run(capsys, "verify", root, "--quiet") == (0, "", "")


def test_verify_names_file_tensor_and_box_of_what_is_damaged(root: Path, capsys: Capture) -> None:
    path = damage(root, 20)
    damage(root, 20, "model.scalar")
    status, out, _ = run(capsys, "verify", root)
    lines = out.splitlines()
    assert status == 1
    assert lines[1:5] == [
        f"{directory_of(root, 20).name}: damaged",
        f"    {path} does not hold the bytes that were written, of model.weight [0:300, 0:500]",
        f"    {path} does not hold the bytes that were written, of model.scalar []",
        "    (it cannot be loaded as a whole)",
    ]
    assert lines[-1] == "3 checkpoints: 2 right, 1 damaged"
    assert run(capsys, "verify", root, "--step", 30, "--quiet") == (0, "", "")


def test_verify_tells_what_is_damaged_from_what_cannot_be_loaded(root: Path, capsys: Capture) -> None:
    entry = piece_of(root, 20, "model.weight")
    flip(directory_of(root, 20) / "__r0_g0_f0.distcp", entry.digests_offset)
    status, out, _ = run(capsys, "verify", root, "--step", 20)
    assert (status, out.splitlines()[1:]) == (
        1,
        [
            f"    {directory_of(root, 20).name}/__r0_g0_f0.distcp has another table of digests than was written, "
            "of model.weight [0:300, 0:500]",
            "    (it can be loaded all the same: what is damaged is also elsewhere, or is read by DCP alone)",
        ],
    )


@pytest.mark.parametrize("name", ["part-r0-g0-f0.json", ".metadata", "__r0_g0_f0.distcp"])
def test_verify_notices_a_file_that_is_gone_or_cut(name: str, root: Path, capsys: Capture) -> None:
    path = directory_of(root, 20) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert run(capsys, "verify", root, "--step", 20)[0] == 1
    path.unlink()
    status, out, _ = run(capsys, "verify", root, "--step", 20)
    if name == ".metadata":  # it is DCP's alone
        assert (status, out.splitlines()[1:]) == (0, ["    (plain DCP cannot read it: its .metadata was not written)"])
    else:
        assert (status, out.splitlines()[0]) == (1, f"{directory_of(root, 20).name}: damaged")


def test_verify_tells_a_save_that_never_ended_from_damage(root: Path, capsys: Capture) -> None:
    for path in directory_of(root, 20).iterdir():
        if path.suffix != ".distcp":
            path.unlink()
    status, out, _ = run(capsys, "verify", root, "--step", 20)
    assert (status, out) == (1, f"{directory_of(root, 20).name}: not whole\n    no manifest is there\n")


def test_verify_notices_every_bit_of_what_was_saved(root: Path, capsys: Capture) -> None:
    directory = directory_of(root, 20)
    manifest = opened(root, 20).parts[0].manifest
    spans = [(piece.data_offset, piece.data_offset + 6) for piece in manifest.pieces]
    spans += [(piece.digests_offset, piece.digests_offset + 16) for piece in manifest.pieces]
    spans += [(value.offset, value.offset + value.length) for value in manifest.values]
    chooser = random.Random(6)
    places = [("__r0_g0_f0.distcp", chooser.randrange(*span)) for span in spans]
    length = (directory / "part-r0-g0-f0.json").stat().st_size
    places += [("part-r0-g0-f0.json", at) for at in chooser.sample(range(length), 20)]
    missed: list[tuple[str, int]] = []
    for name, at in places:
        flip(directory / name, at)
        if run(capsys, "verify", directory, "--quiet")[0] != 1:
            missed.append((name, at))
        flip(directory / name, at)
    assert missed == []
    assert run(capsys, "verify", directory, "--quiet") == (0, "", "")


@pytest.mark.slow
def test_verify_tells_of_every_bit_of_the_metadata(root: Path, capsys: Capture) -> None:
    """Some mean nothing: the sum of these is no more than a note."""
    path = directory_of(root, 20) / ".metadata"
    right = run(capsys, "verify", path.parent)[1]
    chooser = random.Random(6)
    told: list[tuple[int, int]] = []
    for at in chooser.sample(range(path.stat().st_size), 60):
        flip(path, at)
        status, out, _ = run(capsys, "verify", path.parent)
        told += [(at, status)] if out != right else []
        flip(path, at)
    assert (len(told), sum(status for _, status in told) > 40) == (60, True)


def test_metadata_by_which_dcp_would_load_other_tensors_is_noticed(tmp_path: Path, capsys: Capture) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    values = [("a", torch.ones(9)), ("b", torch.zeros(9))]
    for root, state in ((here, dict(values)), (there, dict(values[::-1]))):
        checkpointer = Checkpointer(root, save_random_state=False)
        checkpointer.save(state, step=20).result(60)
        checkpointer.shutdown()
    path = directory_of(here, 20) / ".metadata"
    shutil.copy(directory_of(there, 20) / ".metadata", path)
    status, out, _ = run(capsys, "verify", here)
    where = f"{path.parent.name}/.metadata"
    assert (status, out.splitlines()[1:3]) == (
        1,
        [f"    {where} refers to a record of {name} that no manifest has" for name in "ba"],
    )


def test_metadata_that_knows_of_fewer_parts_is_right(tmp_path: Path, capsys: Capture) -> None:
    storage = LocalStorage(tmp_path)
    double = PartsDouble({"w": torch.arange(64.0).reshape(8, 8)}, storage, CheckpointName(20, "a"), num_replicas=2)
    double.write(0, pieces={"w": [Box((0, 0), (4, 8)), Box((4, 0), (4, 8))]})
    metadata = build_metadata(opened(tmp_path, 20))
    double.write(1)
    assert metadata != build_metadata(opened(tmp_path, 20))
    (directory_of(tmp_path, 20) / ".metadata").write_bytes(metadata)
    assert run(capsys, "verify", tmp_path)[:2] == (0, "step-000000000020.a: right: 1 tensor, 256 B\n")


def test_a_part_that_is_damaged_is_told_of_where_others_have_all_of_it(tmp_path: Path, capsys: Capture) -> None:
    double = PartsDouble({"w": torch.ones(9)}, LocalStorage(tmp_path), CheckpointName(20, "a"), num_replicas=2)
    double.write(0)
    double.write(1)
    path = directory_of(tmp_path, 20) / "part-r1-g0-f0.json"
    path.write_bytes(path.read_bytes()[:-1])
    reason = f"{path.parent.name}/{path.name} is damaged: "
    row, remark, _ = run(capsys, "ls", tmp_path)[1].splitlines()[1:]
    assert (row.split()[1], remark.strip().startswith(f"left aside: {reason}")) == ("yes", True)
    status, out, _ = run(capsys, "verify", tmp_path)
    lines = out.splitlines()
    assert (status, lines[0], lines[1].startswith(f"    {reason}")) == (1, "step-000000000020.a: damaged", True)
    assert lines[3] == "    (it can be loaded all the same: what is damaged is also elsewhere, or is read by DCP alone)"


def test_verify_prints_so_many_problems(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path, {f"w{number}": torch.ones(100) for number in range(30)})
    for number in range(30):
        damage(tmp_path, 1, f"w{number}")
    lines = run(capsys, "verify", tmp_path)[1].splitlines()
    assert (len(lines), lines[21]) == (23, "    and 10 more; --all prints them")
    assert len(run(capsys, "verify", tmp_path, "--all")[1].splitlines()) == 32


# export


def test_export_saves_the_newest_whole_checkpoint(root: Path, tmp_path: Path, capsys: Capture) -> None:
    for part in directory_of(root, 30).glob("part-*"):
        part.unlink()
    path = tmp_path / "state.safetensors"
    status, out, err = run(capsys, "export", root, "-o", path)
    lines = err.splitlines()
    assert (status, out) == (0, "")
    assert lines[0] == f"skipped: {directory_of(root, 30).name} is not whole: no manifest is there"
    assert lines[-1].startswith(f"{path}: {directory_of(root, 20).name}, 8 tensors, 6 values, 58")
    array = torch.from_numpy(example(20)["array"])
    assert same_bits(load_file(path), {**tensors_of(20), "array": array})
    assert metadata_of(path) == {
        "torchft_ckpt.step": 20,
        "torchft_ckpt.tied": {},
        "torchft_ckpt.arrays": ["array"],
        "torchft_ckpt.values": {
            "optim.lr": 1e-3,
            "optim.betas.0": 0.9,
            "optim.betas.1": 0.999,
            "optim.inf": {"f": "7ff0000000000000"},
            "optim.pair.1": "a",
            "text": "Grüße",
        },
    }


def test_export_saves_a_step(root: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "state.safetensors"
    assert run(capsys, "export", root, "--step", 10, "-o", path, "--quiet") == (0, "", "")
    assert torch.equal(load_file(path)["model.weight"], tensors_of(10)["model.weight"])


def test_export_leaves_out_a_leaf_and_not_its_siblings(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_VALUE_BYTES", 5000)
    save(tmp_path / "saved", {"w": torch.ones(3), "v": (1, "x" * 10_000, torch.ones(2), "last")})
    path = tmp_path / "state.safetensors"
    status, _, err = run(capsys, "export", tmp_path / "saved", "-o", path, "--quiet")
    assert (status, err.startswith("left out: v.1: it takes more than"), err.count("\n")) == (0, True, 1)
    assert metadata_of(path)["torchft_ckpt.values"] == {"v.0": 1, "v.3": "last"}
    assert load_file(path)["v.2"].tolist() == [1.0] * 2


def test_a_header_that_is_too_long_is_refused(
    root: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_MAX_HEADER_BYTES", 100)
    status, _, err = run(capsys, "export", root, "-o", tmp_path / "state.safetensors", "--quiet")
    assert (status, "more than the 100 that a safetensors header holds; nothing was written" in err) == (1, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_export_takes_what_is_nested_and_shared_as_people_do_it(tmp_path: Path, capsys: Capture) -> None:
    betas, weight = (0.9, 0.99), torch.ones(3)
    groups = {f"g{number}": {"betas": betas, "mean": (weight, weight.expand(2, 3))} for number in range(3)}
    save(tmp_path / "saved", {"groups": [[groups]], "order": list(range(2000))})
    path = tmp_path / "state.safetensors"
    assert run(capsys, "export", tmp_path / "saved", "-o", path, "--quiet") == (0, "", "")
    read = load_file(path)
    assert sorted({tuple(tensor.shape) for tensor in read.values()}) == [(2, 3), (3,)]
    assert len(metadata_of(path)["torchft_ckpt.values"]) == 2000 + 3 * 2


def test_export_of_what_is_damaged_fails_and_leaves_nothing(root: Path, tmp_path: Path, capsys: Capture) -> None:
    file = damage(root, 20)
    path = tmp_path / "state.safetensors"
    status, out, err = run(capsys, "export", root, "--step", 20, "-o", path, "--quiet")
    assert (status, out, err) == (
        1,
        "",
        f"torchft_ckpt: {file} does not hold the bytes that were written, of model.weight [0:300, 0:500]; "
        "nothing was exported\n",
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_a_storage_that_fails_is_not_taken_for_the_file_that_is_written(
    root: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = LocalStorage.read_into

    def fail(storage: LocalStorage, path: str, start: int, memory: memoryview) -> None:
        if len(memory) > 100_000:  # not the array, which is read before anything is written
            raise StorageError("the disk is on fire")
        read_into(storage, path, start, memory)

    monkeypatch.setattr(LocalStorage, "read_into", fail)
    status, _, err = run(capsys, "export", root, "-o", tmp_path / "state.safetensors", "--quiet")
    assert (status, err) == (1, "torchft_ckpt: the disk is on fire; nothing was exported\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_export_replaces_a_file_only_if_it_is_told_to(root: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "state.safetensors"
    path.write_text("mine")
    expected = (2, "", f"torchft_ckpt: {path} is there already; --force replaces it\n")
    assert run(capsys, "export", root, "-o", path, "--quiet") == expected
    damage(root, 30)
    assert run(capsys, "export", root, "-o", path, "--quiet", "--force")[0] == 1
    assert path.read_text() == "mine"
    assert run(capsys, "export", root, "--step", 20, "-o", path, "--quiet", "--force") == (0, "", "")
    assert len(load_file(path)) == 8


def test_export_where_no_checkpoint_is_whole_says_why(root: Path, tmp_path: Path, capsys: Capture) -> None:
    for part in directory_of(root, 20).glob("part-*"):
        part.unlink()
    status, _, err = run(capsys, "export", root, "--step", 20, "-o", tmp_path / "state.safetensors")
    name = directory_of(root, 20).name
    assert (status, err) == (
        1,
        f"torchft_ckpt: {root}: there is no whole checkpoint: {name} is not whole: no manifest is there\n",
    )


def test_export_takes_memory_for_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_content, "_BATCH_BYTES", 100)
    state = {"a": torch.ones(5), "b": torch.ones(5), "c": torch.ones(20), "d": torch.arange(400.0), "e": torch.ones(6)}
    save(tmp_path, state)
    reader = CheckpointReader(opened(tmp_path, 1))
    parts = checkpoint_content.read_in_order(reader, checkpoint_content.outlines_of(reader))
    assert [len(part) for part in parts] == [40, 80, 1600, 24]


# The command


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [[], ["ls"], ["verify"], ["export"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom torchft_ckpt.__main__ import main\n"
        f"try: main(['checkpoints', *{arguments}, '--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = processes.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert (done.stdout.startswith("usage: "), done.stdout.splitlines()[-1]) == (True, "False")
