"""A state from one process to another by two functions, for who has no Manager."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from torchft_ckpt import fetch, serve
from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.errors import CheckpointError, SourceLostError, SourceRefusedError, StateMismatchError
from torchft_ckpt.testing.transport_conformance import differences, example_state

HERE = "127.0.0.1"


def test_each_who_fetches_has_the_state_and_who_names_memory_has_it_there() -> None:
    state = example_state(3)
    with serve(state, bind=HERE) as url:
        assert not differences(fetch(url), state)
        into = example_state(4)
        fetched = fetch(url, into=into, timeout=timedelta(seconds=20))
    assert not differences(fetched, state)
    given, received = into["user"]["model"]["weight"], fetched["user"]["model"]["weight"]
    assert received is given


@pytest.mark.parametrize(
    ("into", "why"),
    [({"weight": torch.zeros(4)}, r"weight is float32\[4\] here"), ({"w": torch.zeros(3)}, "serves has no w;")],
)
def test_memory_that_does_not_fit_is_named(into: dict[str, torch.Tensor], why: str) -> None:
    with serve({"weight": torch.ones(3)}, bind=HERE) as url, pytest.raises(StateMismatchError, match=why):
        fetch(url, into, timeout=20)


def test_who_fetches_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    listening: list[Any] = []
    listen: Callable[..., None] = socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", lambda self, *more: (listening.append(self), listen(self, *more))[1])
    with serve({"weight": torch.ones(3)}, bind=HERE) as url:
        served = len(listening)
        assert served > 0
        fetch(url, timeout=20)
        assert len(listening) == served


def test_who_has_not_the_token_is_refused() -> None:
    with serve({"weight": torch.ones(3)}, bind=HERE, token="secret") as url:
        with pytest.raises(SourceRefusedError, match="token"):
            fetch(url, token="guess", timeout=20)
        assert fetch(url, token="secret", timeout=20)["weight"].tolist() == [1, 1, 1]


def test_nothing_is_served_after_the_block_nor_if_the_state_cannot_be_carried() -> None:
    with serve({"weight": torch.ones(3)}, bind=HERE) as url:
        pass
    with pytest.raises(SourceLostError):
        fetch(url, timeout=5)
    ended: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        shutdown = HTTPTransport.shutdown
        patch.setattr(HTTPTransport, "shutdown", lambda self: (ended.append(self.metadata()), shutdown(self))[1])
        with pytest.raises(CheckpointError), serve({"file": object()}, bind=HERE):
            pass
    assert len(ended) == 1
