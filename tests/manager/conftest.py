"""What tests of a Manager have in common."""

from __future__ import annotations

import pytest
from support.replicas import all_end, lighthouse_of

from torchft_ckpt import LighthouseServer

__all__ = ["all_end", "lighthouse"]


@pytest.fixture
def lighthouse() -> LighthouseServer:
    """One that forms a quorum of any group; tests that want another kind have a fixture of this name themselves."""
    return lighthouse_of(1)
