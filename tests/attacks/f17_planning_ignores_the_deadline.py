"""A manifest whose boxes take long to plan with: does a receive onto another layout still end at its deadline?

Each tensor has 64 boxes that one dimension tells apart, so that checking costs nothing, and that cut each other into thousands
of cells. It held if `pull` of two ranks, `fetch_sharded` and `PeerReader` end within three seconds of their deadline, by name,
and if a second group of that kind does not keep `fetch_sharded` from the state of an honest first one.

usage: python f17_planning_ignores_the_deadline.py [--tensors N] [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import http.server
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from torchft_ckpt import HTTPTransport, PeerReader
from torchft_ckpt.checkpointing.protocol import DIGEST_HEADER
from torchft_ckpt.checkpointing.resharding.peers import JobPeers
from torchft_ckpt.checkpointing.state.format import FORMAT_NAME, FORMAT_VERSION
from torchft_ckpt.errors import TorchftCkptError

STEP = 3
SLACK_S = 3.0
ROWS, COLUMNS = 64, 200


def manifest(rank: int, num_tensors: int) -> bytes:
    # Strips of dimension 0, so that none has to be compared with another, each cut elsewhere in dimension 1.
    chunks = [
        {"offsets": [row, row], "sizes": [1, COLUMNS - 2 * row], "segment": 0, "byte_offset": 0, "strides": None}
        for row in range(ROWS)
    ]
    tensors = [
        {"fqn": f"t{number}", "dtype": "uint8", "shape": [ROWS, COLUMNS], "chunks": chunks}
        for number in range(num_tensors)
    ]
    # All boxes together may have 4 times the bytes of the byte space: one more tensor, that nobody comes to fetch.
    large = ROWS * COLUMNS * num_tensors
    whole = {"offsets": [0], "sizes": [large], "segment": 1, "byte_offset": 0, "strides": None}
    tensors.append({"fqn": "large", "dtype": "uint8", "shape": [large], "chunks": [whole]})
    content = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "step": STEP,
        "snapshot": f"s{rank}",
        "block_bytes": 4096,
        "total_bytes": 256 + large,
        "segments": [[0, COLUMNS], [256, large]],
        "tensors": tensors,
        "tree": {"d": [[tensor["fqn"], {"x": number}] for number, tensor in enumerate(tensors)]},
    }
    return json.dumps(content, separators=(",", ":")).encode()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:  # receivers cut connections
        pass


def serve(rank: int, num_tensors: int) -> str:
    body_of_manifest = manifest(rank, num_tensors)
    headers_of_manifest = {DIGEST_HEADER: xxhash.xxh3_128_hexdigest(body_of_manifest), "ETag": f'"s{rank}"'}

    class Slow(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body, headers = (body_of_manifest, headers_of_manifest) if "manifest" in self.path else (b"{}", {})
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=1.0, metavar="SECONDS")
    options = parser.parse_args()
    logging.getLogger("torchft_ckpt").setLevel(logging.CRITICAL)
    urls = [serve(rank, options.tensors) for rank in (0, 1)]
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
