"""A store, and groups whose members are threads of the test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from support.rings import PATIENCE, Ring
from support.stores import hosted_store
from torch.distributed import TCPStore

from torchft_ckpt.process_group import ProcessGroup, ProcessGroupGloo


@pytest.fixture(scope="session")
def store() -> TCPStore:
    return hosted_store()


@pytest.fixture
def new_address(store: TCPStore, request: pytest.FixtureRequest) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"127.0.0.1:{store.port}/{request.node.name}/{next(numbers)}"


@pytest.fixture
def gloo_ring(new_address: Callable[[], str]) -> Iterator[Callable[[int], Ring]]:
    rings = []

    def make(num_members: int) -> Ring:
        members: list[ProcessGroup] = [ProcessGroupGloo(PATIENCE) for _ in range(num_members)]
        rings.append(Ring(members, new_address))
        return rings[-1]

    yield make
    for ring in rings:
        ring.close()
