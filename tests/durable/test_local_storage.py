"""A directory as a place for checkpoints: whatever fails, and wherever a crash comes, a file is the old one or the new one."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.scripted_fs import DEATHS, ERRORS, Disk, Fault, ProcessDied, ScriptedSystem

from torchft_ckpt.checkpointing.durable.names import TEMPORARY
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage, OsSystem
from torchft_ckpt.errors import StorageError

OLD = {"/c/step/.metadata": b"old" * 700}
PARTS = [b"new" * 500, b"", b"x" * 3000, b"end"]
NEW = b"".join(PARTS)
CRASHES = range(12)

Scenario = Callable[[LocalStorage], None]


def replace(storage: LocalStorage) -> None:
    with storage.create("step/.metadata") as file:
        for part in PARTS:
            file.write(part)
        file.commit()


def begin(storage: LocalStorage) -> None:
    storage.make_directory("step")
    replace(storage)


def start(before: Mapping[str, bytes], faults: Mapping[int, Fault] | None = None) -> ScriptedSystem:
    system = ScriptedSystem(faults, seed=7)
    for path, content in before.items():
        system.disk.put(path, content)
    return system


def count_operations(scenario: Scenario, before: Mapping[str, bytes]) -> int:
    system = start(before)
    scenario(LocalStorage("/c", system))
    assert system.num_open == 0
    return system.num_operations


def seen(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Without temporary files."""
    return {path: content for path, content in files.items() if TEMPORARY not in path}


def whats_left(system: ScriptedSystem) -> list[dict[str, bytes]]:
    """After a kill of the process alone, and after crashes of the machine."""
    return [seen(system.after_kill().files()), *(seen(system.after_crash(seed).files()) for seed in CRASHES)]


# Wherever it dies


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize(("scenario", "before"), [(replace, OLD), (begin, {}), (begin, OLD)])
def test_death_at_any_operation_leaves_the_old_file_or_the_new_one(
    scenario: Scenario, before: Mapping[str, bytes], death: Fault
) -> None:
    for number in range(count_operations(scenario, before)):
        system = start(before, {number: death})
        with pytest.raises(ProcessDied):
            scenario(LocalStorage("/c", system))
        for left in whats_left(system):
            assert left in (before, {"/c/step/.metadata": NEW}), str(system.log[-1])


@pytest.mark.parametrize(("scenario", "before"), [(replace, OLD), (begin, {})])
def test_what_was_committed_outlives_every_crash(scenario: Scenario, before: Mapping[str, bytes]) -> None:
    system = start(before)
    scenario(LocalStorage("/c", system))
    assert all(left == {"/c/step/.metadata": NEW} for left in whats_left(system))


def test_a_directory_that_was_made_outlives_every_crash() -> None:
    system = ScriptedSystem()
    LocalStorage("/some/where/c", system).make_directory("a/b")
    for seed in CRASHES:
        assert LocalStorage("/some/where/c", system.after_crash(seed)).names("a") == ["b"]


def test_a_directory_whose_maker_died_at_once_is_made_durable_by_the_next_who_needs_it() -> None:
    system = start({"/c/x": b""})
    system.mkdir("/c/step")
    LocalStorage("/c", system).make_directory("step")
    assert all("step" in LocalStorage("/c", system.after_crash(seed)).names() for seed in CRASHES)


def test_death_at_any_operation_of_a_removal_leaves_no_whole_checkpoint_but_the_untouched_one() -> None:
    before = {
        f"/c/step/{name}": b"x"
        for name in (".metadata", "part-r0-g0-f0.json", "part-r1-g0-f0.json", "__r0_g0_f0.distcp", "__r1_g0_f0.distcp")
    }

    def remove(storage: LocalStorage) -> None:
        storage.remove_checkpoint("step")

    for number in range(count_operations(remove, before)):
        for death in DEATHS:
            system = start(before, {number: death})
            with pytest.raises(ProcessDied):
                remove(LocalStorage("/c", system))
            for left in whats_left(system):
                has_metadata = "/c/step/.metadata" in left
                num_manifests = sum("part-" in path for path in left)
                num_data = sum("part-" not in path and ".metadata" not in path for path in left)
                assert not has_metadata or num_manifests == 2, "DCP would read a checkpoint that is going"
                assert not num_manifests or num_data == 2, str(system.log[-1])
            again = system.after_crash(number)
            remove(LocalStorage("/c", again))
            assert again.files() == {} and LocalStorage("/c", again).names() == []


def test_a_removal_that_was_done_outlives_every_crash() -> None:
    system = start({**OLD, "/c/other/x": b""})
    assert LocalStorage("/c", system).remove_checkpoint("step")
    assert all(LocalStorage("/c", system.after_crash(seed)).names() == ["other"] for seed in CRASHES)


# Whatever fails


@pytest.mark.parametrize("fault", ERRORS)
@pytest.mark.parametrize(("scenario", "before"), [(replace, OLD), (begin, {}), (begin, OLD)])
def test_an_error_at_any_operation_is_said_and_leaves_the_old_file_or_the_new_one(
    scenario: Scenario, before: Mapping[str, bytes], fault: Fault
) -> None:
    for number in range(count_operations(scenario, before)):
        system = start(before, {number: fault})
        storage = LocalStorage("/c", system)
        with pytest.raises(StorageError, match="/c") as caught:
            scenario(storage)
        what = str(system.log[number])
        assert caught.value.errno == (errno.ENOSPC if fault is Fault.ENOSPC else errno.EIO), what
        for left in whats_left(system):
            assert left in (before, {"/c/step/.metadata": NEW}), what
        assert system.num_open == 0 or (fault is Fault.EIO_DONE and ("open_new" in what or "open_directory" in what))
        if not (fault is Fault.EIO_DONE and "open_new" in what):
            assert system.files() == seen(system.files()), "something temporary is left"
        system.faults.clear()
        begin(storage)
        assert all(left == {"/c/step/.metadata": NEW} for left in whats_left(system)), "tried again"


def test_two_errors_in_a_row_leave_at_most_a_temporary_file(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(count_operations(replace, OLD)):
        system = start(OLD, {at: Fault.EIO for at in range(number, number + 5)})
        with pytest.raises(StorageError):
            replace(LocalStorage("/c", system))
        assert all(left in (OLD, {"/c/step/.metadata": NEW}) for left in whats_left(system))
        if len(system.files()) > 1:
            assert "/c/step/.metadata: removing" in caplog.text
        caplog.clear()


def test_short_writes_and_short_reads_are_gone_on_with() -> None:
    num_operations = count_operations(replace, OLD)
    system = start(OLD, dict.fromkeys(range(num_operations + 1000), Fault.SHORT))
    storage = LocalStorage("/c", system)
    replace(storage)
    assert system.num_operations > num_operations
    assert storage.read("step/.metadata") == NEW
    assert storage.read("step/.metadata", 5, 2000) == NEW[5:2000]
    memory = memoryview(bytearray(1000))
    storage.read_into("step/.metadata", 1490, memory)
    assert bytes(memory) == NEW[1490:2490]
    assert system.num_open == 0


@pytest.mark.parametrize("capacity_bytes", [2100, 2101, 3599, 3600, 4000, 2100 + len(NEW) - 1])
def test_a_disk_that_fills_up_in_mid_file_leaves_nothing_of_it(capacity_bytes: int) -> None:
    system = ScriptedSystem(disk=Disk(capacity_bytes))
    system.disk.put("/c/step/.metadata", OLD["/c/step/.metadata"])
    storage = LocalStorage("/c", system)
    with pytest.raises(StorageError, match="No space left") as caught:
        replace(storage)
    assert caught.value.errno == errno.ENOSPC
    assert system.files() == OLD
    system.disk.capacity_bytes = 2100 + len(NEW)
    replace(storage)
    assert storage.read("step/.metadata") == NEW


def test_a_write_that_failed_cannot_be_committed_over() -> None:
    system = start(OLD, {1: Fault.EIO})
    with LocalStorage("/c", system).create("step/new") as file:
        with pytest.raises(StorageError, match="writing"):
            file.write(b"abc")
        with pytest.raises(StorageError, match="only be abandoned"):
            file.write(b"abc")
        with pytest.raises(StorageError, match="only be abandoned"):
            file.commit()
    assert system.files() == OLD


def test_an_fsync_that_failed_is_not_tried_again() -> None:
    system = start(OLD, {2: Fault.EIO})
    with LocalStorage("/c", system).create("step/new") as file:
        file.write(b"abc")
        with pytest.raises(StorageError, match="committing"):
            file.commit()
        with pytest.raises(StorageError, match="before"):
            file.commit()
    assert [line.name for line in system.log].count("fsync") == 1
    assert system.files() == OLD


def test_reading_fails_by_name_whatever_fails() -> None:
    system = start(OLD)
    LocalStorage("/c", system).read("step/.metadata")
    for number in range(system.num_operations):
        faulty = start(OLD, {number: Fault.EIO})
        with pytest.raises(StorageError, match=r"/c/step/\.metadata: .* failed: .*Input/output error"):
            LocalStorage("/c", faulty).read("step/.metadata")
        assert faulty.num_open == 0


# Two at once


def test_two_who_write_one_file_do_not_mix() -> None:
    system = start(OLD)
    storage = LocalStorage("/c", system)
    with storage.create("step/.metadata") as one, storage.create("step/.metadata") as other:
        one.write(b"one")
        other.write(b"other")
        one.commit()
        assert storage.read("step/.metadata") == b"one"
        other.commit()
    assert system.files() == {"/c/step/.metadata": b"other"}


class WritesMeanwhile(ScriptedSystem):
    """Somebody adds a file just before the directory is removed, so often."""

    times = 1

    def rmdir(self, path: str) -> None:
        if self.times:
            self.times -= 1
            self.disk.put(f"{path}/.metadata{TEMPORARY}1", b"")
        super().rmdir(path)


def test_a_file_that_appears_during_a_removal_is_removed_too() -> None:
    system = WritesMeanwhile()
    system.disk.put("/c/step/.metadata", b"")
    assert LocalStorage("/c", system).remove_checkpoint("step")
    assert LocalStorage("/c", system).names() == []


def test_a_removal_does_not_go_on_for_ever() -> None:
    system = WritesMeanwhile()
    system.times = 99
    system.disk.put("/c/step/.metadata", b"")
    with pytest.raises(StorageError, match=r"removing failed.*not empty"):
        LocalStorage("/c", system).remove_checkpoint("step")


# On the real file system


def test_a_relative_location_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("c")
    storage.make_directory("step")
    monkeypatch.chdir("/")
    replace(storage)
    assert (tmp_path / "c/step/.metadata").read_bytes() == NEW
    assert os.listdir(tmp_path / "c/step") == [".metadata"]


def ours_in(directory: Path) -> list[Path]:
    """Files as a checkpoint has them."""
    directory.mkdir(parents=True)
    paths = [directory / name for name in (".metadata", "part-r0-g0-f0.json", "__r0_g0_f0.distcp", ".metadata.tmp-1")]
    for path in paths:
        path.write_bytes(b"x")
    return paths


def test_a_link_in_the_place_of_a_checkpoint_is_left_alone_with_all_that_it_leads_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archived = ours_in(tmp_path / "archive")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/step").symlink_to(tmp_path / "archive")
    storage = LocalStorage(tmp_path / "c")
    assert not storage.remove_checkpoint("step") and not storage.remove_checkpoint("step")
    assert all(path.exists() for path in archived) and (tmp_path / "c/step").is_symlink()
    assert caplog.text.count("c/step is a link or no directory: it is left alone") == 1, "each save tries it again"


def test_what_others_put_into_a_checkpoint_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = ours_in(tmp_path / "c/step")
    theirs = ours_in(tmp_path / "kept")
    (tmp_path / "c/step/thesis.tex").write_text("years of work")
    (tmp_path / "c/step/part-r0-g0-f0.json.bak").write_text("a copy")
    (tmp_path / "c/step/__r0_g1_f0.distcp").symlink_to(theirs[0])
    (tmp_path / "c/step/__r0_g2_f0.distcp").symlink_to(tmp_path / "kept")
    (tmp_path / "c/step/part-r1-g0-f0.json").mkdir()
    assert not LocalStorage(tmp_path / "c").remove_checkpoint("step")
    assert not any(path.exists() for path in ours) and all(path.exists() for path in theirs)
    assert len(os.listdir(tmp_path / "c/step")) == 5
    assert (
        "this library did not write '__r0_g1_f0.distcp', '__r0_g2_f0.distcp', 'part-r0-g0-f0.json.bak'" in caplog.text
    )


def test_a_link_that_comes_while_a_checkpoint_is_removed_is_not_followed(tmp_path: Path) -> None:
    archived = ours_in(tmp_path / "archive")
    ours_in(tmp_path / "c/step")

    class Swapping(OsSystem):
        def listdir(self, directory: str | int) -> list[str]:
            (tmp_path / "c/step").rename(tmp_path / "c/moved")
            (tmp_path / "c/step").symlink_to(tmp_path / "archive")
            return super().listdir(directory)

    with pytest.raises(StorageError, match="Not a directory"):
        LocalStorage(tmp_path / "c", Swapping()).remove_checkpoint("step")
    assert all(path.exists() for path in archived)
    assert os.listdir(tmp_path / "c/moved") == [], "what was opened is what was emptied"


@pytest.mark.parametrize("when", ["before", "after the directory is made", "after the file is begun"])
def test_nothing_is_written_through_a_link_in_the_place_of_a_directory(tmp_path: Path, when: str) -> None:
    """Its name follows from the checkpoint before. Another run's data were replaced."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "data").write_bytes(b"of another run")
    storage = LocalStorage(tmp_path / "c")
    storage.make_directory("")

    def swap() -> None:
        if (tmp_path / "c/step").exists():
            (tmp_path / "c/step").rename(tmp_path / "c/moved")
        (tmp_path / "c/step").symlink_to(other)

    if when == "before":
        swap()
        with pytest.raises(StorageError, match="Not a directory"):
            storage.make_directory("step")
    storage.make_directory("x") if when == "before" else storage.make_directory("step")
    if when == "after the directory is made":
        swap()
    if when != "after the file is begun":
        with pytest.raises(StorageError, match="Not a directory"):
            storage.create("step/data")
    else:
        file = storage.create("step/data")
        file.write(NEW)
        swap()
        with pytest.raises(StorageError, match="Not a directory"):
            file.commit()
    assert {path.name: path.read_bytes() for path in other.iterdir()} == {"data": b"of another run"}


def test_the_place_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "disk")
    storage = LocalStorage(tmp_path / "c")
    storage.make_directory("step")
    for path in ("step/.metadata", "data"):
        with storage.create(path) as file:
            file.write(NEW)
            file.commit()
    assert storage.remove_checkpoint("step")
    assert (tmp_path / "disk/data").read_bytes() == NEW


def test_a_file_where_a_directory_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory"):
        LocalStorage(tmp_path / "c").make_directory("step")


def test_a_parent_that_may_not_be_listed_does_not_matter(tmp_path: Path) -> None:
    class Forbidding(OsSystem):
        def fsync_directory(self, path: str) -> None:
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            super().fsync_directory(path)

    (tmp_path / "given").mkdir()
    LocalStorage(tmp_path / "given", Forbidding()).make_directory("step")
    with pytest.raises(StorageError, match="Permission denied"):
        LocalStorage(tmp_path / "made", Forbidding()).make_directory("step")


def test_a_file_system_without_fsync_of_directories_is_used_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numbers = [errno.EINVAL, errno.EIO]

    def fsync(handle: int) -> None:
        raise OSError(numbers.pop(0), "from fsync")

    monkeypatch.setattr(os, "fsync", fsync)
    OsSystem().fsync_directory(str(tmp_path))
    with pytest.raises(OSError, match="from fsync"):
        OsSystem().fsync_directory(str(tmp_path))
    assert numbers == [], "it was asked for both times"


def test_an_error_keeps_its_words_when_it_crosses_processes(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        LocalStorage(tmp_path).read("step/none")
    assert str(copy.copy(caught.value)) == str(caught.value)
    assert caught.value.errno == errno.ENOENT and str(tmp_path / "step/none") == caught.value.party
