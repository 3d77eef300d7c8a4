"""The check of storages that `torchft_ckpt.testing` ships: our own places pass, and a broken promise is named."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import FsspecStorage
from torchft_ckpt.testing import storage_conformance
from torchft_ckpt.testing.conformance import ConformanceError


@pytest.mark.parametrize("check", storage_conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_places_for_checkpoints_conform(check: storage_conformance.Check, kind: str, tmp_path: Path) -> None:
    check(str(tmp_path / "place") if kind == "directory" else f"memory://{uuid.uuid4().hex}")


def test_a_place_that_shows_half_a_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FsspecStorage, "read", lambda self, path, start=0, stop=None: b"x")
    with pytest.raises(ConformanceError, match="a file holds other bytes"):
        storage_conformance.check_storage(f"memory://{uuid.uuid4().hex}")
