"""Every kind of place keeps one contract: a directory, fsspec's memory, stores that rename or upload."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from support.scripted_fs import ScriptedSystem

from torchft_ckpt.checkpointing.durable.names import TEMPORARY
from torchft_ckpt.checkpointing.durable.storage import fsspec_storage, local_storage
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import FsspecStorage, open_storage
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.errors import ConfigError, StorageError
from torchft_ckpt.testing import storage_conformance
from torchft_ckpt.testing.conformance import ConformanceError

KINDS = ["directory", "scripted", "renaming", "memory", "objects"]


class ClientFailure(Exception):
    """Of a client library that has its own tree of errors."""


class ObjectStore(AbstractFileSystem):
    """As s3fs and gcsfs are: flat keys, no rename, an object appears when its upload is closed, listings are cached."""

    protocol = "objects"
    cachable = False
    keys: dict[str, bytes] = {}
    uploads: set[int] = set()
    fail_at: str | None = None

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Upload:
        assert mode == "wb"
        return Upload(self, path, mode, block_size=1000)

    def _check(self, what: str) -> None:
        if self.fail_at == what:
            raise ClientFailure(f"{what}: Slow Down")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self._check("ls")
        path = self._strip_protocol(path)
        if path not in self.dircache:
            below = [key[len(path) + 1 :] for key in self.keys if key.startswith(f"{path}/")]
            if not below:
                if path not in self.keys:
                    raise FileNotFoundError(path)
                return [self.info(path)] if detail else [path]
            self.dircache[path] = [
                {"name": f"{path}/{name}", "type": "directory", "size": 0}
                if f"{path}/{name}" not in self.keys
                else {"name": f"{path}/{name}", "type": "file", "size": len(self.keys[f"{path}/{name}"])}
                for name in sorted({name.split("/")[0] for name in below})
            ]
        return self.dircache[path] if detail else [entry["name"] for entry in self.dircache[path]]

    def invalidate_cache(self, path: str | None = None) -> None:
        if path is None:
            self.dircache.clear()
        else:
            self.dircache.pop(self._strip_protocol(path), None)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._check("info")
        path = self._strip_protocol(path)
        if path in self.keys:
            return {"name": path, "type": "file", "size": len(self.keys[path])}
        return super().info(path, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._check("cat_file")
        if path not in self.keys:
            raise FileNotFoundError(path)
        return self.keys[path][start:end]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._check("makedirs")

    def rm_file(self, path: str) -> None:
        self._check("rm_file")
        if path in self.keys:
            del self.keys[path]


class Upload(AbstractBufferedFile):
    """A multipart upload."""

    def _initiate_upload(self) -> None:
        self.fs._check("initiate")
        self.parts: list[bytes] = []
        self.fs.uploads.add(id(self))

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs._check("final" if final else "part")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.keys[self.path] = b"".join(self.parts)
            self.fs.uploads.discard(id(self))
        return True

    def discard(self) -> None:
        self.fs._check("discard")
        self.fs.uploads.discard(id(self))


fsspec.register_implementation("objects", ObjectStore, clobber=True)


def renaming(path: Path) -> FsspecStorage:
    """Return what fsspec knows as local files: they stand for a remote file system that renames."""
    return FsspecStorage(f"file://{path}")


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "scripted":
        yield LocalStorage("/c", ScriptedSystem())
    elif request.param == "renaming":
        yield renaming(tmp_path / "c")
    else:
        yield open_storage(
            {
                "directory": str(tmp_path / "c"),
                "memory": f"memory://{tmp_path}/c",
                "objects": f"objects://bucket{tmp_path}/c",
            }[request.param]
        )
    memory = fsspec.filesystem("memory")
    for path in memory.find(str(tmp_path)):
        memory.rm_file(path)
    ObjectStore.keys.clear()


@pytest.fixture
def objects() -> Iterator[FsspecStorage]:
    yield FsspecStorage("objects://bucket/c")
    ObjectStore.fail_at = None
    ObjectStore.keys.clear()
    ObjectStore.uploads.clear()


def put(storage: Storage, path: str, content: bytes) -> None:
    storage.make_directory(path.rpartition("/")[0])
    with storage.create(path) as file:
        file.write(content)
        file.commit()


# Of all kinds


IN_PLACE = storage_conformance.check_a_checkpoint_comes_back_in_every_bit
"""Opens its place itself, by a URL."""


@pytest.mark.parametrize(
    "check", [check for check in storage_conformance.CHECKS if check is not IN_PLACE], ids=lambda check: check.__name__
)
def test_a_place_conforms(
    storage: Storage, check: storage_conformance.Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Read and written in pieces that are shorter than the files, by clients that know of each other nothing but the place."""

    def opened(location: str) -> Storage:
        if isinstance(storage, LocalStorage):
            return LocalStorage(storage.location, storage._system)
        return FsspecStorage(storage.location)

    monkeypatch.setattr(storage_conformance, "open_storage", opened)
    monkeypatch.setattr(fsspec_storage, "_READ_BYTES", 1500)
    monkeypatch.setattr(fsspec_storage, "_WRITE_BYTES", 1700)
    monkeypatch.setattr(local_storage, "_MAX_TRANSFER_BYTES", 1600)
    check("the storage of this test")


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_a_checkpoint_comes_back_from_a_place(kind: str, tmp_path: Path) -> None:
    IN_PLACE(str(tmp_path / "place") if kind == "directory" else f"memory://{tmp_path}/c")


def test_a_place_that_shows_half_a_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FsspecStorage, "read", lambda self, path, start=0, stop=None: b"x")
    with pytest.raises(ConformanceError, match="a file holds other bytes"):
        storage_conformance.check_storage(f"memory://{tmp_path}/c")


def test_whatever_has_bytes_is_written(storage: Storage) -> None:
    storage.make_directory("step")
    with storage.create("step/a") as file:
        assert [file.write(b"abc"), file.write(b""), file.write(memoryview(b"defg").cast("B", (2, 2)))] == [3, 0, 4]
        assert file.write(memoryview(b"hijklmno").cast("H")) == 8
        assert file.position == 15
        file.commit()
    assert storage.read("step/a") == b"abcdefghijklmno"
    assert storage.read("step/a", 12) == b"mno"
    assert storage.read("step/a", 5, 5) == storage.read("step/a", 15) == b""


@pytest.mark.parametrize("length", [0, 10, 3000])
def test_an_abandoned_file_leaves_nothing_and_what_was_there_stays(storage: Storage, length: int) -> None:
    put(storage, "step/a", b"old")
    with pytest.raises(KeyError):
        with storage.create("step/a") as file:
            file.write(b"x" * length)
            raise KeyError
    with storage.create("step/b") as file:
        file.write(b"x" * length)
        assert storage.size("step/b") is None
    file.abandon()
    del file
    gc.collect()
    assert storage.names("step") == ["a"] and storage.read("step/a") == b"old"


def test_a_file_is_committed_once(storage: Storage) -> None:
    storage.make_directory("step")
    with storage.create("step/a") as file:
        file.write(b"a")
        file.commit()
        file.abandon()
        for again in (file.commit, lambda: file.write(b"b")):
            with pytest.raises(StorageError, match="step/a: it was committed or abandoned before"):
                again()
    assert storage.read("step/a") == b"a"


def test_what_is_no_file_is_one_of_nothing_and_cannot_be_read(storage: Storage) -> None:
    put(storage, "step/a", b"abc")
    assert storage.names("step/a") == [] and storage.size("step") is None and storage.size("step/a/b") is None
    for read in (
        lambda: storage.read("step/a", 5),
        lambda: storage.read("step/a", 5, 6),
        lambda: storage.read("step/none", 0, 1),
        lambda: storage.read_into("step/none", 0, memoryview(bytearray(1))),
        lambda: storage.read("step"),
    ):
        with pytest.raises(StorageError, match="c/step"):
            read()


def test_what_this_library_did_not_write_stays(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    for name in (".metadata", "thesis.tex", "data/raw.bin", "part-r0-g0-f0.json.old"):
        put(storage, f"step/{name}", b"x")
    for _ in range(2):
        assert not storage.remove_checkpoint("step")
    assert storage.names("step") == ["data", "part-r0-g0-f0.json.old", "thesis.tex"]
    assert storage.read("step/data/raw.bin") == b"x"
    assert caplog.text.count("this library did not write 'data', 'part-r0-g0-f0.json.old', 'thesis.tex'") == 1
    put(storage, "file", b"x")
    assert not storage.remove_checkpoint("file") and storage.read("file") == b"x"


def test_a_directory_may_be_made_again(storage: Storage) -> None:
    for _ in range(2):
        storage.make_directory("a/b")
    put(storage, "a/b/c", b"x")
    storage.make_directory("a/b")
    assert storage.read("a/b/c") == b"x"


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "a//x", "./x", "a/", "a\\..\\x", "a\0b", "\ud800"]
)
def test_no_path_leads_out_of_the_place(storage: Storage, path: str) -> None:
    for action in (
        storage.names,
        storage.size,
        storage.read,
        storage.create,
        storage.make_directory,
        storage.remove_checkpoint,
    ):
        with pytest.raises(StorageError, match="is no path within it"):
            action(path)
    with pytest.raises(StorageError, match="only what is in it"):
        storage.remove_checkpoint("")


def test_several_threads_write_and_read_at_once(storage: Storage) -> None:
    storage.make_directory("step")
    wrong: list[str] = []

    def work(number: int) -> None:
        for at in range(5):
            content = f"{number} {at}".encode() * 300
            put(storage, f"step/{number}-{at}", content)
            if storage.read(f"step/{number}-{at}") != content:
                wrong.append(f"{number}-{at}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and len(storage.names("step")) == 20


# Of object stores


@pytest.mark.parametrize("fail_at", ["initiate", "part", "final"])
def test_an_upload_that_fails_leaves_what_was_there(objects: FsspecStorage, fail_at: str) -> None:
    put(objects, "step/a", b"old")
    ObjectStore.fail_at = fail_at
    with pytest.raises(StorageError, match=r"objects://bucket/c/step/a: .* ClientFailure: .*Slow Down") as caught:
        put(objects, "step/a", b"x" * 3000)
    assert isinstance(caught.value.__cause__, ClientFailure)
    ObjectStore.fail_at = None
    gc.collect()
    assert ObjectStore.keys == {"bucket/c/step/a": b"old"} and not ObjectStore.uploads


@pytest.mark.parametrize(
    ("fail_at", "action"),
    [
        ("ls", lambda storage: storage.names("step")),
        ("ls", lambda storage: storage.remove_checkpoint("step")),
        ("info", lambda storage: storage.size("step/.metadata")),
        ("cat_file", lambda storage: storage.read("step/.metadata")),
        ("cat_file", lambda storage: storage.read("step/.metadata", 1, 2)),
        ("makedirs", lambda storage: storage.make_directory("step")),
        ("rm_file", lambda storage: storage.remove_checkpoint("step")),
    ],
)
def test_whatever_a_client_raises_is_a_storage_error(
    objects: FsspecStorage, fail_at: str, action: Callable[[Storage], object]
) -> None:
    put(objects, "step/.metadata", b"x" * 3000)
    ObjectStore.fail_at = fail_at
    with pytest.raises(StorageError, match=r"objects://bucket/c/step.*Slow Down") as caught:
        action(objects)
    assert isinstance(caught.value.__cause__, ClientFailure)


def test_an_upload_that_cannot_be_discarded_is_logged(objects: FsspecStorage, caplog: pytest.LogCaptureFixture) -> None:
    with objects.create("step/a") as file:
        file.write(b"x" * 3000)
        ObjectStore.fail_at = "discard"
    assert "objects://bucket/c/step/a: it was abandoned, and something may be left" in caplog.text
    assert ObjectStore.keys == {}


def test_a_store_that_kept_less_than_was_written_is_found_out(
    objects: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Upload, "write", lambda self, data: AbstractBufferedFile.write(self, data[:-1]) + 1)
    with pytest.raises(StorageError, match="3000 bytes were written, it has 2999"):
        put(objects, "step/a", b"x" * 3000)


def test_a_listing_may_name_the_directory_itself(objects: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"name": "bucket/c/step", "type": "directory"}, {"name": "bucket/c/step/a", "type": "file"}]
    monkeypatch.setattr(ObjectStore, "ls", lambda self, path, detail=True: entries)
    assert objects.names("step") == ["a"]


def test_metadata_goes_first_and_manifests_before_data(objects: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__r0_g0_f0.distcp", "part-r0-g0-f0.json", ".metadata"):
        put(objects, f"step/{name}", b"x")
    removed: list[str] = []
    remove = ObjectStore.rm_file

    def rm_file(self: ObjectStore, path: str) -> None:
        removed.append(path.rpartition("/")[2])
        remove(self, path)

    monkeypatch.setattr(ObjectStore, "rm_file", rm_file)
    objects.remove_checkpoint("step")
    assert removed[:3] == [".metadata", "part-r0-g0-f0.json", "__r0_g0_f0.distcp"]


# Of local files


def test_a_url_of_files_is_a_directory_and_they_are_fsynced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fsynced: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        fsynced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path).split(TEMPORARY)[0])
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    storage = open_storage(f"file://{tmp_path}/c")
    storage.make_directory("step")
    assert set(fsynced) == {"c", "."}
    fsynced.clear()
    put(storage, "step/a", b"abc")
    assert fsynced[-2:] == ["c/step/a", "c/step"]


def test_an_fsync_that_failed_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/c")
    put(storage, "step/a", b"old")

    def fsync(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with storage.create("step/a") as file:
        file.write(b"new")
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError, match="committing failed") as caught:
            file.commit()
    assert caught.value.errno == errno.EIO
    assert storage.names("step") == ["a"] and storage.read("step/a") == b"old"


def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    storage = renaming(tmp_path / "c")
    put(storage, "step/a", b"old")
    opened = storage._fs.open

    class Full:
        """What was written is in a buffer, and cannot leave it."""

        def __init__(self, path: str, mode: str) -> None:
            self.file = opened(path, mode)

        def write(self, data: memoryview) -> int:
            return len(data)

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            self.file.close()
            self.flush()

    monkeypatch.setattr(storage._fs, "open", Full)
    with pytest.raises(StorageError, match="No space left") as caught:
        put(storage, "step/a", b"new")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "c/step") == ["a"] and (tmp_path / "c/step/a").read_bytes() == b"old"


# Which place a location means


def test_a_path_is_a_directory_and_another_url_is_fsspecs(tmp_path: Path) -> None:
    assert repr(open_storage(tmp_path)) == f"LocalStorage({str(tmp_path)!r})"
    assert repr(open_storage("memory://x/y/")) == "FsspecStorage('memory://x/y')"
    assert repr(open_storage(f"file://{tmp_path}", auto_mkdir=True)) == f"LocalStorage({str(tmp_path)!r})"


@pytest.mark.parametrize(
    ("location", "options", "says"),
    [
        ("nowhere://x", {}, "nowhere"),
        ("", {}, "a path or a URL"),
        ("/a/path", {"key": "x"}, "takes no options.*key"),
        ("memory://a[b]", {}, "pattern"),
    ],
)
def test_a_location_that_cannot_be_used_is_refused(location: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_storage(location, **options)


def test_a_password_is_in_no_message() -> None:
    storage = FsspecStorage("objects://me:secret@bucket/c")
    with pytest.raises(StorageError) as caught:
        storage.read("step/none")
    assert str(caught.value).startswith("objects://***@bucket/c/step/none: reading failed")
    assert repr(storage) == "FsspecStorage('objects://***@bucket/c')"
