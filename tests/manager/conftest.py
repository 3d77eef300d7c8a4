"""What tests of a Manager have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchft_ckpt import LighthouseServer


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    """One that forms a quorum of any group; tests that want another kind have a fixture of this name themselves."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=30_000)
    yield server
    server.shutdown()
