"""States whose tensors are on a GPU: what is equal is not fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.state.dtypes import CARRIED_DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = timedelta(seconds=30)
MIB = 1024 * 1024


def bits(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """Return tensors as what cannot compare equal where a bit differs."""
    flat = [tensor.detach().cpu().contiguous().view(-1) for tensor in tensors]
    return [str(one.dtype).encode() + one.view(torch.uint8).numpy().tobytes() for one in flat]


def transport() -> Iterator[HTTPTransport[Any]]:
    made: HTTPTransport[Any] = HTTPTransport(timeout=LIMIT, hostname="127.0.0.1", block_bytes=64 * 1024)
    yield made
    made.shutdown()


source, receiver = (pytest.fixture(transport, name=name) for name in ("source", "receiver"))


def fetch(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any], state: Any, **how: Any
) -> tuple[Any, TransferProgress]:
    seen: list[TransferProgress] = []
    source.send_checkpoint([], 1, state, LIMIT)
    received = receiver.fetch_checkpoint([source.metadata()], 1, LIMIT, on_progress=seen.append, **how)
    source.disallow_checkpoint()
    return received, seen[-1]


def test_every_dtype_and_layout_arrives_to_the_last_bit(source: Any, receiver: Any) -> None:
    base = torch.randint(0, 255, (96, 64), dtype=torch.uint8, device="cuda")
    state = {
        str(dtype): base.view(-1).view(dtype) if dtype.itemsize > 1 else base.view(dtype) for dtype in CARRIED_DTYPES
    }
    floats = torch.randn(33, 65, device="cuda")
    state |= {
        "t": floats.t(),
        "step": floats[::2, 1::3],
        "one": torch.tensor(3.0, device="cuda"),
        "host": torch.ones(3),
    }
    state |= {"tied": floats, "none": torch.empty(0, 4, device="cuda")}
    received, _ = fetch(source, receiver, state)
    assert received.keys() == state.keys()
    assert bits(received.values()) == bits(state.values())


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_equal_here_is_not_fetched(source: Any, receiver: Any, in_place: bool) -> None:
    state = {name: torch.randn(MIB, device="cuda") for name in "abc"}
    local = {name: tensor.clone() for name, tensor in state.items()}
    local["b"].add_(1)
    received, progress = fetch(source, receiver, state, local_state=local, in_place=in_place)
    assert bits(received.values()) == bits(state.values())
    assert 4 * MIB <= progress.received_bytes < 5 * MIB
    assert progress.skipped_bytes >= 7 * MIB
    if in_place:
        assert all(received[name] is local[name] for name in local)
