"""A manifest whose boxes take long to plan with: does a receive onto another layout still end at its deadline?

Each tensor has 64 boxes that one dimension tells apart, so that checking costs nothing, and that cut each other into thousands
of cells. It held if `pull` of two ranks, `fetch_sharded` and `PeerReader` end within three seconds of their deadline, by name,
and if a second group of that kind does not keep `fetch_sharded` from the state of an honest first one.

usage: python f17_planning_ignores_the_deadline.py [--tensors N] [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed.checkpoint as dcp
from support.http_servers import serve
from support.sources import STEP, signed, strips
from torch.distributed.checkpoint.api import CheckpointException

from torchft_ckpt import HTTPTransport, PeerReader
from torchft_ckpt.checkpointing.resharding.peers import JobPeers
from torchft_ckpt.errors import TorchftCkptError

SLACK_S = 3.0
ROWS, COLUMNS = 64, 200


def serve_strips(rank: int, num_tensors: int) -> str:
    manifest = strips(f"s{rank}", rows=ROWS, columns=COLUMNS, num_tensors=num_tensors)
    answer = signed(manifest, f"s{rank}")
    return serve(lambda path: answer if "manifest" in path else (200, b"{}", {}))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=1.0, metavar="SECONDS")
    options = parser.parse_args()
    logging.getLogger("torchft_ckpt").setLevel(logging.CRITICAL)
    urls = [serve_strips(rank, options.tensors) for rank in (0, 1)]
    timeout = timedelta(seconds=options.timeout)
    local: dict[str, torch.Tensor] = {
        f"t{number}": torch.zeros(ROWS, COLUMNS, dtype=torch.uint8) for number in range(options.tensors)
    }
    local["large"] = torch.zeros(ROWS * COLUMNS * options.tensors, dtype=torch.uint8)
    receiver = HTTPTransport[dict[str, torch.Tensor]](hostname="127.0.0.1", bind="127.0.0.1", token="")
    honest = HTTPTransport[dict[str, torch.Tensor]](hostname="127.0.0.1", bind="127.0.0.1", token="")
    state = {name: torch.ones_like(tensor) for name, tensor in local.items()}
    honest.send_checkpoint([1], STEP, state, timedelta(minutes=5))

    def load() -> object:
        reader = PeerReader(urls, step=STEP, root="", timeout=timeout)
        dcp.load({"t0": torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)}, storage_reader=reader, no_dist=True)
        return None

    def beside_an_honest_group() -> object:
        groups = [[honest.metadata()], urls]
        return receiver.fetch_sharded(groups, 0, 1, STEP, 12 * timeout, local_state=local)

    attempts: dict[str, tuple[Callable[[], object], float, bool]] = {
        "pull": (lambda: JobPeers([urls]).pull(STEP, timeout=timeout), options.timeout, False),
        "fetch_sharded": (
            lambda: receiver.fetch_sharded([urls], 0, 1, STEP, timeout, local_state=local),
            options.timeout,
            False,
        ),
        "PeerReader": (load, options.timeout, False),
        "fetch_sharded from an honest group, and these": (beside_an_honest_group, 12 * options.timeout, True),
    }
    late = []
    for name, (attempt, limit_s, must_succeed) in attempts.items():
        began = time.monotonic()
        try:
            got = attempt()
            is_right = isinstance(got, dict) and all(torch.equal(got[key], state[key]) for key in state)
            outcome = "the state" if is_right else "something"
            has_held = is_right
        except (TorchftCkptError, CheckpointException) as error:
            outcome, has_held = str(error).strip().splitlines()[-1][:140], not must_succeed
        took_s = time.monotonic() - began
        has_held = has_held and took_s < limit_s + SLACK_S
        print(f"{name}, limit {limit_s:g} s: {took_s:.1f} s: {outcome}", flush=True)
        late += [] if has_held else [name]
    receiver.shutdown()
    honest.shutdown()
    if late:
        print(f"VULNERABLE: {', '.join(late)} did not end in time, or not as they should")
        return 1
    print(f"held: all ended within {SLACK_S:g} s of their deadlines, and the honest group's state came")
    return 0


if __name__ == "__main__":
    sys.exit(main())
