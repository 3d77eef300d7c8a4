"""A part of a state is received before there is a place for it: the receive into that place takes it from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.sources import STEP, make_transport
from test_in_place import LONG

from torchft_ckpt.checkpointing.fetching.receive import Destination
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.errors import SourceLostError, TransferCancelledError, TransferError

BLOCK = 64 * 1024
NUM_BLOCKS = 40


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": [torch.rand(BLOCK * 5 // 4, generator=generator) for _ in range(8)],
        "b": torch.rand(7, generator=generator),
        "step": seed,
    }


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_was_received_before_is_not_received_again(share: float, in_place: bool) -> None:
    theirs, ours = state_of(1), state_of(2)
    source, learner = make_transport(block_bytes=BLOCK), make_transport(block_bytes=BLOCK)
    said: list[TransferProgress] = []
    try:
        source.send_checkpoint([1], STEP, theirs, LONG)
        most = int(share * NUM_BLOCKS) * BLOCK + BLOCK
        if share < 1:
            with pytest.raises(TransferCancelledError):
                learner.prefetch([source.metadata()], STEP, LONG, most, said.append)
        else:
            learner.prefetch([source.metadata()], STEP, LONG, 2 * most, said.append)
        early = said[-1].received_bytes
        assert early <= most and early >= share * 0.7 * NUM_BLOCKS * BLOCK
        assert ours["w"][0].equal(state_of(2)["w"][0]), "nothing was written to the state that is here"

        got = learner.fetch_checkpoint(
            [source.metadata()], STEP, LONG, local_state=ours, in_place=in_place, on_progress=said.append
        )
        assert all(one.equal(other) for one, other in zip(got["w"], theirs["w"], strict=True))
        assert got["b"].equal(theirs["b"]) and got["step"] == 1
        assert (got["w"][0] is ours["w"][0]) == in_place
        assert said[-1].received_bytes <= said[-1].total_bytes - early
    finally:
        source.shutdown()
        learner.shutdown()


def test_a_state_that_was_taken_from_before_in_part_is_torn_where_the_rest_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(*_: object) -> None:
        raise SourceLostError("it was killed", party="source")

    theirs, ours = (
        state_of(3),
        state_of(4),
    )  # seen in no test before: memory that is used again may still hold that state
    source, learner = make_transport(block_bytes=BLOCK), make_transport(block_bytes=BLOCK)
    try:
        source.send_checkpoint([1], STEP, theirs, LONG)
        with pytest.raises(TransferCancelledError):
            learner.prefetch([source.metadata()], STEP, LONG, 20 * BLOCK, lambda progress: None)
        monkeypatch.setattr(Destination, "receive", lose)
        with pytest.raises(TransferError) as caught:
            learner.fetch_checkpoint([source.metadata()], STEP, LONG, local_state=ours, in_place=True)
        is_as_before = all(one.equal(other) for one, other in zip(ours["w"], state_of(4)["w"], strict=True))
        assert caught.value.state_overwritten and not is_as_before
    finally:
        source.shutdown()
        learner.shutdown()
