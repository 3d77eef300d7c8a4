"""A dead writer's files fill a storage: they go, and nothing that anybody may still need or write."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from torchft_ckpt import Checkpointer, checkpoints_in
from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.checkpointing.durable.saving.leftovers import Leftovers
from torchft_ckpt.checkpointing.durable.storage.contract import OutputFile
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.errors import StorageError

LONG_S = 60.0
IN_FLIGHT = CheckpointName(9, "now")


def storage_error(number: int) -> StorageError:
    error = StorageError("of the test", "test")
    error.errno = number
    return error


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def place(tmp_path: Path) -> Callable[[int], Path]:
    """A whole checkpoint of step 1, and a function that copies it as one of another step that a dead run was to write."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"w": torch.zeros(20_000)}, step=1).result(LONG_S)
    checkpointer.shutdown()
    (whole,) = tmp_path.iterdir()

    def dead(step: int) -> Path:
        path = tmp_path / str(CheckpointName(step, "dead"))
        shutil.copytree(whole, path)
        (path / ".metadata").unlink()
        for manifest in path.glob("part-*"):
            text = manifest.read_text().replace('"step":1,', f'"step":{step},').replace(whole.name, path.name)
            manifest.write_text(text)
        return path

    return dead


def leftovers_of(directory: Path, clock: Clock, *, is_shared: bool = True) -> Leftovers:
    return Leftovers(LocalStorage(directory), is_shared=is_shared, settled_after_s=30, clock=clock)


def test_what_was_left_goes_and_what_is_being_written_stays(tmp_path: Path, place: Callable[[int], Path]) -> None:
    no_manifest, empty, written, damaged, ours = (place(step) for step in (2, 3, 4, 5, 9))
    for path in (no_manifest, written):
        next(path.glob("part-*")).unlink()
    for path in empty.iterdir():
        path.unlink()
    next(damaged.glob("part-*")).write_text("no manifest")
    clock = Clock()
    leftovers = leftovers_of(tmp_path, clock)
    leftovers.note_failure(storage_error(errno.ENOSPC))
    clock.now_s = 29.0
    leftovers.remove(IN_FLIGHT)
    assert all(path.exists() for path in (no_manifest, empty, written, damaged, ours))
    (written / "__r0_g0_f0.distcp.tmp-1").write_bytes(b"more")
    clock.now_s = 30.0
    leftovers.remove(CheckpointName(9, "dead"))
    assert [path.exists() for path in (no_manifest, empty, written, damaged, ours)] == [False, False, True, True, True]
    assert checkpoints_in(tmp_path) == [1]


def test_on_a_local_disk_whoever_wrote_its_part_is_left_alone(tmp_path: Path, place: Callable[[int], Path]) -> None:
    """Whether the others wrote theirs is not to be seen from here."""
    part, no_part = place(2), place(3)
    next(no_part.glob("part-*")).unlink()
    clock = Clock()
    leftovers = leftovers_of(tmp_path, clock, is_shared=False)
    leftovers.note_failure(storage_error(errno.EDQUOT))
    clock.now_s = 30.0
    leftovers.remove(IN_FLIGHT)
    assert (part.exists(), no_part.exists()) == (True, False)


@pytest.mark.parametrize("failure", [None, storage_error(errno.EIO), ValueError("another")])
def test_where_there_is_room_nothing_goes(
    tmp_path: Path, place: Callable[[int], Path], failure: BaseException | None
) -> None:
    left = place(2)
    next(left.glob("part-*")).unlink()
    clock = Clock()
    leftovers = leftovers_of(tmp_path, clock)
    leftovers.note_failure(failure)
    clock.now_s = 1000.0
    leftovers.remove(IN_FLIGHT)
    assert left.exists()


def test_a_job_that_found_its_storage_full_saves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two checkpoints, one of them kept; a writer died in the making of the next."""
    state = {"w": torch.zeros(100_000)}
    Checkpointer(tmp_path, keep_last=1).save(state, step=1).result(LONG_S)
    dead = tmp_path / str(CheckpointName(2, "dead"))
    dead.mkdir()
    (dead / "__r0_g0_f0.distcp.tmp-77").write_bytes(bytes(400_000))
    create = LocalStorage.create

    def create_where_there_is_room(self: LocalStorage, path: str) -> OutputFile:
        if sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) > 900_000:
            raise storage_error(errno.ENOSPC)
        return create(self, path)

    monkeypatch.setattr(LocalStorage, "create", create_where_there_is_room)
    checkpointer = Checkpointer(tmp_path, keep_last=1, fill_after=timedelta(microseconds=1))
    with pytest.raises(StorageError):
        checkpointer.save(state, step=2).result(LONG_S)
    checkpointer.wait()
    assert checkpoints_in(tmp_path) == [1]
    checkpointer.save(state, step=3).result(LONG_S)
    checkpointer.shutdown()
    assert checkpoints_in(tmp_path) == [3]
    assert len(list(tmp_path.iterdir())) == 1


def test_one_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, place: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As another user's is, or one in which a network file system keeps a deleted file that is still open."""
    paths = [place(step) for step in (2, 3, 4)]
    for path in paths:
        next(path.glob("part-*")).unlink()
    remove = LocalStorage.remove_checkpoint

    def refuse_the_first(self: LocalStorage, directory: str) -> bool:
        if directory == paths[0].name:
            raise storage_error(errno.EACCES)
        return remove(self, directory)

    monkeypatch.setattr(LocalStorage, "remove_checkpoint", refuse_the_first)
    clock = Clock()
    leftovers = leftovers_of(tmp_path, clock)
    leftovers.note_failure(storage_error(errno.ENOSPC))
    clock.now_s = 30.0
    leftovers.remove(IN_FLIGHT)
    assert [path.exists() for path in paths] == [True, False, False]
    assert f"{paths[0].name}, which its writers left, could not be removed" in caplog.text
