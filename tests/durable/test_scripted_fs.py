"""The scripted file system: without faults it does what the real one does; with them, what a bad day does."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.scripted_fs import Disk, Fault, ProcessDied, ScriptedSystem

from torchft_ckpt.checkpointing.durable.storage.local_storage import OsSystem

NUM_OPERATIONS = 60
KINDS = ["new", "write", "read", "close", "rename", "mkdir", "list", "kind", "size", "unlink", "rmdir", "sync"]


def outcome(action: Callable[..., object], *arguments: object) -> object:
    try:
        return action(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def content(system: OsSystem, path: str) -> bytes:
    handle = system.open_existing(path)
    memory = memoryview(bytearray(system.file_size(path) or 0))
    done = 0
    while count := system.read_into(handle, memory[done:], done) if done < len(memory) else 0:
        done += count
    system.close(handle)
    return bytes(memory)


def write(system: OsSystem, path: str, data: bytes, *, fsync: bool = False) -> None:
    handle = system.open_new(path)
    system.write(handle, memoryview(data))
    if fsync:
        system.fsync(handle)
    system.close(handle)


def random_sequence(dice: random.Random, system: OsSystem, root: str) -> list[object]:
    """Carry out one random sequence, the same one for the same dice, and return what came of each operation."""
    names = ["a", "b", "d", "d/a", "d/e", "d/e/a", "a/x", "d/"]
    seen: list[object] = []
    handles: list[int] = []
    for _ in range(NUM_OPERATIONS):
        path = f"{root}/{dice.choice(names)}"
        beside = os.path.join(os.path.dirname(path.rstrip("/")), dice.choice("abe"))
        data = dice.randbytes(dice.choice([0, 1, 600, 2000]))
        kind = dice.choice(
            ["new", "write", "read", "close", "rename", "mkdir", "list", "kind", "size", "unlink", "rmdir", "sync"]
        )
        which = dice.randrange(8)
        if kind == "new" and not path.endswith("/"):
            made = outcome(system.open_new, path)
            if isinstance(made, int):
                handles.append(made)
            seen.append(made if isinstance(made, str) else "open")
        elif kind == "write" and handles:
            handle = handles[which % len(handles)]
            seen += [outcome(system.write, handle, memoryview(data))]
            seen.append(outcome(system.fsync, handle))
        elif kind == "read" and outcome(system.is_file, path) is not False:
            seen.append(outcome(content, system, path))
        elif kind == "close" and handles:
            handle = handles.pop(which % len(handles))
            seen.append(outcome(system.close, handle))
        elif kind == "rename" and outcome(system.is_file, path) is True:
            seen.append(outcome(system.rename, path, beside))
        elif kind == "mkdir":
            seen.append(outcome(system.mkdir, path))
        elif kind == "list":
            found = outcome(system.listdir, path)
            seen.append(sorted(found) if isinstance(found, list) else found)
        elif kind == "kind":
            seen.append(outcome(system.is_file, path))
        elif kind == "size":
            seen.append(outcome(system.file_size, path))
        elif kind == "unlink":
            seen.append(outcome(system.unlink, path))
        elif kind == "rmdir":
            seen.append(outcome(system.rmdir, path))
        elif kind == "sync":
            seen.append(outcome(system.fsync_directory, path))
    for handle in handles:
        system.close(handle)
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_without_faults_it_does_what_the_real_one_does(seed: int, tmp_path: Path) -> None:
    scripted = ScriptedSystem()
    scripted.mkdir("/root")
    assert random_sequence(random.Random(seed), scripted, "/root") == random_sequence(
        random.Random(seed), OsSystem(), str(tmp_path)
    )
    files = {f"/root/{path.relative_to(tmp_path)}": path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert scripted.files() == files
    assert scripted.num_open == 0


def test_a_sequence_that_was_fsynced_survives_every_crash() -> None:
    system = ScriptedSystem()
    system.mkdir("/d")
    system.fsync_directory("/")
    write(system, "/d/a", b"x" * 5000, fsync=True)
    system.rename("/d/a", "/d/b")
    system.fsync_directory("/d")
    assert {tuple(system.after_crash(seed).files().items()) for seed in range(50)} == {(("/d/b", b"x" * 5000),)}


def test_a_crash_may_lose_or_keep_each_thing_that_was_not_fsynced() -> None:
    system = ScriptedSystem(disk=Disk())
    system.disk.put("/a", b"old")
    write(system, "/a.tmp", b"new" * 1000)
    system.rename("/a.tmp", "/a")
    left = [system.after_crash(seed).files() for seed in range(300)]
    assert {"/a": b"old"} in left
    assert {"/a": b"new" * 1000} in left
    assert {"/a": b""} in left
    assert any(0 < len(files["/a"]) < 3000 for files in left)
    assert any(b"\0" in files["/a"] for files in left)
    assert any("/a.tmp" in files for files in left)
    assert left == [system.after_crash(seed).files() for seed in range(300)]
    assert system.files() == {"/a": b"new" * 1000}


def test_a_removal_that_was_not_fsynced_may_come_back() -> None:
    system = ScriptedSystem()
    for name in ("/a", "/b"):
        system.disk.put(name, b"")
        system.unlink(name)
    left = {tuple(system.after_crash(seed).files()) for seed in range(100)}
    assert left == {(), ("/a",), ("/b",), ("/a", "/b")}


def test_a_killed_process_leaves_all_that_it_wrote_and_does_nothing_more() -> None:
    system = ScriptedSystem({1: Fault.DEATH_AFTER})
    handle = system.open_new("/a")
    with pytest.raises(ProcessDied):
        system.write(handle, memoryview(b"abc"))
    for action in (lambda: system.close(handle), lambda: system.listdir("/"), lambda: system.fsync(handle)):
        with pytest.raises(ProcessDied):
            action()
    assert system.after_kill().files() == {"/a": b"abc"}


def test_an_fsync_that_failed_cannot_be_made_good() -> None:
    system = ScriptedSystem({2: Fault.EIO})
    handle = system.open_new("/a")
    system.write(handle, memoryview(b"x" * 100))
    with pytest.raises(OSError):
        system.fsync(handle)
    system.fsync(handle)
    system.fsync_directory("/")
    assert any(system.after_crash(seed).files() == {"/a": b""} for seed in range(50))
