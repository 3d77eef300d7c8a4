"""Receivers of one snapshot find each other through its source, and take from each other what they hold.

Every fraction of a second this receiver tells the source what it holds and where it serves it, and is told the same of
others. Nothing that a peer sends is trusted: a block counts only with the BLAKE3 digest that the source announces for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torchft_ckpt.checkpointing.address import SourceAddress, parse_metadata
from torchft_ckpt.checkpointing.fetching.block_transfer import BlockTransfer
from torchft_ckpt.checkpointing.fetching.receive import Destination
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.state.blocks import parse_runs
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.core.transfer.scheduler import mask_of
from torchft_ckpt.errors import SourceLostError, StateFormatError

logger = logging.getLogger(__name__)
POLL_S = 0.15
MAX_PEER_STREAMS = 8


def run_swarm(
    state: BlockTransfer,
    client: SourceClient,
    manifest: Manifest,
    destination: Destination,
    address: str,
    start_peer: Callable[[SourceAddress], None],
) -> None:
    """Poll the source until the fetch is over, or has begun anew.

    Args:
        state: of the fetch.
        client: a connection to the source that is polled.
        manifest: what it serves.
        destination: where that is received to.
        address: where this receiver serves.
        start_peer: called with each peer that blocks are to come from.

    Raises:
        CheckpointError: the source is lost, or does not know peers.
    """
    num_started = 0
    num_blocks = destination.num_blocks
    while not state.over and state.destination is destination:
        peers = client.fetch_peers(manifest, state.unreported(client.name), address)
        held_by: dict[str, int] = {}
        addresses: dict[str, SourceAddress] = {}
        for peer in peers.peers:
            try:
                where = parse_metadata(peer.address)
                held = sum(mask_of(run) for run in parse_runs(peer.held, num_blocks))
            except (SourceLostError, ValueError) as error:
                raise StateFormatError(
                    f"source {client.name} names a peer that is none: {error}", client.name
                ) from error
            addresses[str(where)] = where
            held_by[str(where)] = held
        sent = _runs(peers.sent, num_blocks, client.name)
        known = set(state.peer_names())
        room = max(MAX_PEER_STREAMS - num_started, 0)
        fresh = [name for name in held_by if name not in known][:room]
        for name in state.meet_peers({n: h for n, h in held_by.items() if n in known or n in fresh}, sent):
            logger.debug("taking blocks from %s as well, which receives the same state", name)
            start_peer(addresses[name])
            num_started += 1
        state.pause(POLL_S)


def _runs(text: str, num_blocks: int, party: str) -> int:
    try:
        return sum(mask_of(run) for run in parse_runs(text, num_blocks))
    except ValueError as error:
        raise StateFormatError(f"source {party} sent blocks that cannot be read: {error}", party) from error
