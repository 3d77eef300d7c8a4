"""One of two sources lies in a way that raises none of the library's errors: does the fetch still get the honest one's state?

The lies: a refusal that nests 30,000 deep; one key twice that is an integer of more digits than Python writes out; an integer of
5000 digits in JSON; peers that nest. The liar comes first and second. Then `inspect` and `pull` meet each liar alone, and honest
states with such an integer as value and as key: no traceback. It held if the state always came, and every failure was named.

usage: python f07_one_liar_ends_the_fetch.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from support.http_servers import Answer, Server, serve
from support.sources import STEP, manifest_of, signed

from torchft_ckpt import HTTPTransport
from torchft_ckpt.__main__ import main as run_command
from torchft_ckpt.checkpointing.state.format import FORMAT_NAME, FORMAT_VERSION
from torchft_ckpt.errors import TorchftCkptError

BIG = {"i": "f" * 4000}
DEPTH = 30_000


def nested(head: str) -> bytes:
    return head.encode() + b',"more":' + b"[" * DEPTH + b"]" * DEPTH + b"}"


INDEX = json.dumps(
    {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "newest_step": STEP,
        "snapshots": [
            {
                "step": STEP,
                "snapshot": "s",
                "total_bytes": 0,
                "num_tensors": 0,
                "num_blocks": 0,
                "phase": "live",
                "num_receivers": 0,
            }
        ],
    }
).encode()


def serves(tree: object) -> Callable[[str], Answer]:
    return lambda path: signed(manifest_of(tree)) if "manifest" in path else (200, INDEX, {})


LIARS: dict[str, Callable[[str], Answer]] = {
    f"a refusal that nests {DEPTH} deep": lambda path: (403, nested('{"error":"x","message":"y"'), {}),
    "an integer key of 4816 digits, twice": serves({"d": [[BIG, 1], [BIG, 2]]}),
    "a tuple key with such an integer, twice": serves({"d": [[{"t": [BIG]}, 1], [{"t": [BIG]}, 2]]}),
    "an integer of 5000 digits in JSON": lambda path: (
        signed(manifest_of("INT").replace(b'"INT"', b"9" * 5000)) if "manifest" in path else (200, INDEX, {})
    ),
    f"a manifest that nests {DEPTH} deep": lambda path: (
        signed(manifest_of("INT").replace(b'"INT"', b"[" * DEPTH + b"]" * DEPTH))
        if "manifest" in path
        else (200, INDEX, {})
    ),
}
ALONE: dict[str, Callable[[str], Answer]] = {
    f"an index that nests {DEPTH} deep": lambda path: (
        200,
        nested(f'{{"format":"f","version":{FORMAT_VERSION},"newest_step":null,"snapshots":[]'),
        {},
    ),
}
HONEST: dict[str, object] = {
    "a value of 4816 digits": {"n": 16**4000 - 1},
    "a set with it": {"n": frozenset({16**4000 - 1})},
    "a key of 4816 digits": {16**4000 - 1: 1},
    "a tuple key with it": {(16**4000 - 1, "x"): torch.ones(2)},
}


def fetch_beside(honest: str, liar: str, state: dict[str, torch.Tensor], *, sharded: bool, first: bool) -> str:
    """Return what came of a fetch from both."""
    sources = [liar, honest] if first else [honest, liar]
    receiver = HTTPTransport[dict[str, torch.Tensor]](hostname="127.0.0.1", bind="127.0.0.1", token="")
    began = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if sharded:
                local = {"w": torch.zeros_like(state["w"])}
                groups = [[source] for source in sources]
                got = receiver.fetch_sharded(groups, 0, 1, STEP, timedelta(seconds=15), local_state=local)
            else:
                got = receiver.fetch_checkpoint(sources, STEP, timedelta(seconds=15))
        outcome = "the state" if torch.equal(got["w"], state["w"]) else "ANOTHER STATE"
    except TorchftCkptError as error:
        outcome = f"{type(error).__name__}: {str(error)[:100]}"
    except Exception as error:
        outcome = f"ESCAPED {type(error).__name__}: {str(error)[:100]}"
    finally:
        receiver.shutdown()
    return f"{outcome} ({time.monotonic() - began:.1f} s)"


def command(*arguments: str) -> str:
    """Run a command of the command line in this process; return its last words, and its traceback where it had one."""
    out = io.StringIO()
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        try:
            status = run_command(arguments)
        except Exception:
            return f"TRACEBACK: {traceback.format_exc().strip().splitlines()[-1][:120]}"
    last = (out.getvalue().strip().splitlines() or [""])[-1]
    return f"exit {status}: {last[:110]}"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.getLogger("torchft_ckpt").setLevel(logging.CRITICAL)
    fallen = 0
    state = {"w": torch.randn(1 << 20)}
    honest = HTTPTransport[dict[str, torch.Tensor]](hostname="127.0.0.1", bind="127.0.0.1", token="")
    servers: list[Server] = []
    for name, make in LIARS.items():
        liar, server = serve(make)
        servers.append(server)
        for sharded in (False, True):
            for first in (False, True):
                honest.send_checkpoint([1], STEP, state, timedelta(seconds=100))
                outcome = fetch_beside(honest.metadata(), liar, state, sharded=sharded, first=first)
                fallen += not outcome.startswith("the state")
                print(
                    f"{'re-sharded, ' if sharded else ''}the liar {'first' if first else 'second'}, {name}: {outcome}"
                )
    honest.shutdown()
    with tempfile.TemporaryDirectory() as directory:
        file = str(Path(directory) / "state.safetensors")

        def look(name: str, url: str) -> int:
            escaped = 0
            for arguments in (
                ("inspect", url),
                ("inspect", url, "--json"),
                ("pull", url, "-o", file, "--force", "--quiet", "--timeout", "3"),
            ):
                words = command(*arguments)
                escaped += words.startswith("TRACEBACK")
                print(f"{' '.join(arguments[:1] + arguments[2:3])}, {name}: {words}")
            return escaped

        for name, make in {**LIARS, **ALONE}.items():
            url, server = serve(make)
            servers.append(server)
            fallen += look(name, url)
        for name, content in HONEST.items():
            source = HTTPTransport[object](hostname="127.0.0.1", bind="127.0.0.1", token="")
            try:
                source.send_checkpoint([], STEP, content, timedelta(seconds=100))
                fallen += look(f"honest: {name}", source.metadata())
            except TorchftCkptError as error:
                print(f"honest: {name}: refused by the source: {str(error)[:100]}")
            except Exception as error:
                fallen += 1
                print(f"honest: {name}: ESCAPED at the source: {type(error).__name__}: {str(error)[:80]}")
            finally:
                source.shutdown()
    for server in servers:
        server.end()
    if fallen:
        print(f"VULNERABLE: {fallen} lies or large integers ended what they should not, or were not named")
        return 1
    print(f"held: {len(LIARS)} liars beside an honest source cost nothing, and every failure was named")
    return 0


if __name__ == "__main__":
    sys.exit(main())
