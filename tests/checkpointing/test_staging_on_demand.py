"""Accelerator memory of an offer that nobody takes is not copied; of one that is taken, before the trainer overwrites it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.serving.staging import Staging
from torchft_ckpt.errors import CheckpointError

SHORT = timedelta(seconds=90)


def test_what_was_overwritten_before_anybody_wanted_it_is_not_staged_any_more() -> None:
    staging = Staging([], starts_now=False)
    staging.order_mutation_after(SHORT)
    staging.start()

    with pytest.raises(CheckpointError, match="overwritten before anybody wanted it"):
        staging.wait(SHORT)


def test_who_waits_for_copies_starts_them_and_a_mutation_afterwards_changes_nothing() -> None:
    staging = Staging([], starts_now=False)
    assert not staging.ready()
    copies = staging.wait(SHORT)
    staging.order_mutation_after(SHORT)

    assert staging.ready()
    assert staging.wait(SHORT) is copies


def test_copies_that_are_expected_start_at_once() -> None:
    staging = Staging([])
    staging.order_mutation_after(SHORT)

    assert staging.wait(SHORT) == []


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
