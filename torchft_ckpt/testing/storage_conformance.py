"""Checks of a place that holds durable checkpoints: a file system of fsspec's, reached by its URL.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_file_system_conforms(check, tmp_path):
        check(f"mine://{tmp_path}")

A `Checkpointer` reaches every file system that fsspec knows, one of your own too once it is registered there
(`fsspec.register_implementation`). Each check takes the URL of a directory of its own, which need not be there; what it writes
stays. It raises `ConformanceError` with a sentence about the promise that was broken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchft_ckpt.checkpointer import Checkpointer
from torchft_ckpt.checkpointing.durable.names import TEMPORARY
from torchft_ckpt.checkpointing.durable.reading.loading import load_checkpoint
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.errors import StorageError
from torchft_ckpt.testing.conformance import ConformanceError, bits_of, require, require_raises

Check = Callable[[str], None]
_PARTY = "storage"
_OURS = (".metadata", "part-r0-g0-f0.json", "__r0_g0_f0.distcp", "__r0_g1_f0.distcp.tmp-000000000001")


def _put(storage: Storage, path: str, content: bytes) -> None:
    storage.make_directory(path.rpartition("/")[0])
    with storage.create(path) as file:
        file.write(content)
        file.commit()


def check_what_was_written_is_read(location: str) -> None:
    storage = open_storage(location)
    content = bytes(range(256)) * 50
    _put(storage, "step/a", content)
    require(_PARTY, storage.size("step/a") == len(content), "a file has another length than was written")
    require(_PARTY, storage.read("step/a") == content, "a file holds other bytes than were written")
    require(_PARTY, storage.read("step/a", 3, 12_001) == content[3:12_001], "a part of a file is not what was written")
    memory = bytearray(10_000)
    storage.read_into("step/a", 77, memoryview(memory))
    require(_PARTY, bytes(memory) == content[77:10_077], "a part that was read into memory is not what was written")


def check_an_empty_file_is_one(location: str) -> None:
    storage = open_storage(location)
    _put(storage, "step/a", b"")
    found = (storage.names("step"), storage.size("step/a"), storage.read("step/a"))
    require(_PARTY, found == (["a"], 0, b""), f"an empty file is seen as {found}")


def check_a_file_is_there_whole_or_not_at_all(location: str) -> None:
    storage = open_storage(location)
    _put(storage, "step/a", b"an older and longer one")
    with storage.create("step/a") as file:
        file.write(b"x" * 3000)
        require(_PARTY, storage.read("step/a") == b"an older and longer one", "a file changed before it was committed")
        names = [name for name in storage.names("step") if TEMPORARY not in name]
        require(_PARTY, names == ["a"], f"before a file is committed the directory holds {names}")
    require(_PARTY, storage.read("step/a") == b"an older and longer one", "a file that was abandoned replaced another")
    require(_PARTY, storage.names("step") == ["a"], "a file that was abandoned left something")
    _put(storage, "step/a", b"new")
    require(_PARTY, storage.read("step/a") == b"new", "a file that was committed did not replace the one before")


def check_names_are_sorted_and_nothing_is_known_of_what_is_not_there(location: str) -> None:
    storage = open_storage(location)
    found = (storage.names(), storage.names("step"), storage.size("step/a"))
    require(_PARTY, found == ([], [], None), f"of an empty place it says {found}")
    for name in ("step/b", "step/.metadata", "step/a", "other/x"):
        _put(storage, name, b"x")
    require(_PARTY, storage.names() == ["other", "step"], f"the directories are {storage.names()}")
    require(_PARTY, storage.names("step") == [".metadata", "a", "b"], f"the files are {storage.names('step')}")


def check_another_process_sees_at_once_what_was_committed_and_removed(location: str) -> None:
    storage, other = open_storage(location), open_storage(location)
    require(_PARTY, other.names("step") == [], "a directory that was not made yet holds something")
    for count, name in enumerate(_OURS[:2], 1):
        _put(storage, f"step/{name}", b"x")
        require(_PARTY, len(other.names("step")) == count, "a second client does not see a file that was committed")
    storage.remove_checkpoint("step")
    require(_PARTY, other.names("step") == [], "a second client still sees what was removed")


def check_what_cannot_be_read_is_an_error(location: str) -> None:
    storage = open_storage(location)
    _put(storage, "step/a", b"abc")
    for what, read in (
        ("a read beyond the end of a file", lambda: storage.read("step/a", 1, 4)),
        (
            "a read into more memory than the file has bytes",
            lambda: storage.read_into("step/a", 1, memoryview(bytearray(3))),
        ),
        ("a read of a file that is not there", lambda: storage.read("step/none")),
    ):
        require_raises(_PARTY, StorageError, read, what)


def check_a_checkpoint_is_removed_and_what_others_put_there_stays(location: str) -> None:
    storage = open_storage(location)
    for name in (*(f"one/{name}" for name in _OURS), *(f"two/{name}" for name in (*_OURS, "thesis.tex"))):
        _put(storage, name, b"x")
    require(
        _PARTY, storage.remove_checkpoint("one") and storage.remove_checkpoint("one"), "a checkpoint was not removed"
    )
    require(_PARTY, not storage.remove_checkpoint("two"), "a file of another was removed, or is said to be")
    require(_PARTY, storage.names() == ["two"], f"after the removal there are {storage.names()}")
    require(_PARTY, storage.names("two") == ["thesis.tex"], f"after the removal there are {storage.names('two')}")


def check_a_checkpoint_comes_back_in_every_bit(location: str) -> None:
    state: dict[str, Any] = {
        "weights": torch.arange(70_000, dtype=torch.float32, device="cpu").view(100, 700),
        "lr": 0.1,
    }
    checkpointer = Checkpointer(location)
    try:
        checkpointer.save(state, step=3).result()
    finally:
        checkpointer.shutdown()
    (name,) = open_storage(location).names()
    here: dict[str, Any] = {"weights": torch.zeros(100, 700, device="cpu"), "lr": 0.0}
    load_checkpoint(f"{location}/{name}", here)
    is_equal = here["lr"] == 0.1 and torch.equal(bits_of(here["weights"]), bits_of(state["weights"]))
    require(_PARTY, is_equal, "a checkpoint came back with other bits than were saved")


__all__ = ["CHECKS", "Check", "ConformanceError", "check_storage"]

CHECKS: list[Check] = [check for name, check in list(globals().items()) if name.startswith("check_")]
"""Every check, for a parametrized test."""


def check_storage(location: str) -> None:
    """Run every check, each in a directory of its own below this URL.

    Raises:
        ConformanceError: a promise was broken.
    """
    for check in CHECKS:
        check(f"{location}/{check.__name__}")
