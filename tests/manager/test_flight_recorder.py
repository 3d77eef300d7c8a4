"""Each quorum's dumps of the flight recorder have a folder of their own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchft_ckpt.manager import flight_recorder

FILE, IS_READ_AT_EACH_DUMP = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_DYNAMIC_FILE_NAME"


@pytest.fixture(autouse=True)
def as_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(FILE, str(tmp_path / "trace"))
    monkeypatch.setenv(IS_READ_AT_EACH_DUMP, "0")
    flight_recorder._base.cache_clear()
    yield
    flight_recorder._base.cache_clear()


def test_a_quorum_does_not_overwrite_the_dumps_of_the_one_before(tmp_path: Path) -> None:
    for quorum_id in (3, 12):
        flight_recorder.name_dumps(quorum_id, 5)
        assert os.environ[FILE] == f"{tmp_path}/trace_quorum_{quorum_id}/5"
        assert Path(os.environ[FILE]).parent.is_dir()
    assert os.environ[IS_READ_AT_EACH_DUMP] == "1"


def test_where_nobody_asked_for_dumps_nothing_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FILE)
    flight_recorder.name_dumps(3, 0)
    assert FILE not in os.environ
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_ends_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FILE, str(tmp_path / "file" / "trace"))
    with caplog.at_level(logging.WARNING):
        flight_recorder.name_dumps(3, 0)
    assert os.environ[FILE] == str(tmp_path / "file" / "trace")
    assert f"dumps of the flight recorder stay in {tmp_path}/file/trace" in caplog.text
