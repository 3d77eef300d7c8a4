"""Accelerator memory of an offer that nobody takes is not copied; of one that is taken, before the trainer overwrites it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from torchft_ckpt import HTTPTransport

SHORT = timedelta(seconds=90)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_offer_on_an_accelerator_is_copied_when_it_is_taken_and_not_before() -> None:
    source: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(timeout=SHORT, hostname="127.0.0.1")
    receiver: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(timeout=SHORT, hostname="127.0.0.1")
    weights = torch.randn(1 << 20, device="cuda")
    expected = weights.cpu()
    try:
        source.send_checkpoint([], 1, {"weights": weights}, SHORT)
        (offered,) = source._snapshots.open_snapshots()
        assert offered._staging is not None
        assert not offered._staging.ready()
        received = receiver.recv_checkpoint(0, source.metadata(), 1, SHORT)
        source.disallow_checkpoint()
        weights.zero_()
        assert torch.equal(received["weights"].view(torch.int32), expected.view(torch.int32))

        source.send_checkpoint([], 2, {"weights": weights}, SHORT)
        source.disallow_checkpoint()
        assert source._snapshots.open_snapshots() == []
    finally:
        source.shutdown()
        receiver.shutdown()
