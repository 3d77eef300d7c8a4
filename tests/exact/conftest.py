"""What tests of exact steps in one process have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.exact_group import Group
from torch import nn

from torchft_ckpt import LighthouseServer


@pytest.fixture
def make_group() -> Iterator[Callable[..., Group]]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    made: list[Group] = []

    def make(model: nn.Module | None = None, **more: Any) -> Group:
        torch.manual_seed(1)
        made.append(Group(server, nn.Linear(2, 1) if model is None else model, **more))
        return made[-1]

    yield make
    for group in made:
        group.manager.shutdown()
    server.shutdown()
