"""What tests of a Manager have in common."""

from __future__ import annotations

import pytest
from support.replicas import all_end, lighthouse_of

from torchft_ckpt import LighthouseServer
from torchft_ckpt.core.coordination import hold

__all__ = ["all_end", "lighthouse"]


@pytest.fixture
def lighthouse() -> LighthouseServer:
    """One that forms a quorum of any group; tests that want another kind have a fixture of this name themselves."""
    return lighthouse_of(1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that comes in may stand still for some seconds, as on a busy machine; without this half a second is too long."""
    monkeypatch.setattr(hold, "BEGINS_WITHIN_S", 15.0)
    monkeypatch.setattr(hold, "SILENT_S", 60.0)
