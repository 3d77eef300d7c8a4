"""A state without a byte of tensors, plain values alone: can it be received, with and without progress, and pulled?

usage: python f23_empty_state.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from torchft_ckpt import HTTPTransport
from torchft_ckpt.__main__ import main as run_command
from torchft_ckpt.checkpointing.progress import TransferProgress

LONG = timedelta(seconds=60)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.getLogger("torchft_ckpt").setLevel(logging.CRITICAL)
    source, other = (HTTPTransport[object](hostname="127.0.0.1", bind="127.0.0.1", token="") for _ in range(2))
    escaped = 0

    def nothing(progress: TransferProgress) -> None:
        pass

    def pull(url: str) -> object:
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
            return run_command(["pull", url, "-o", str(Path(directory) / "state.safetensors"), "--timeout", "10"])

    for state in ({"step": 3, "lr": 0.1}, {"empty": torch.zeros(0), "lr": 0.1}):
        plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        ways: dict[str, Callable[[str], object]] = {
            "fetch_checkpoint": lambda url: other.fetch_checkpoint([url], 3, LONG),
            "with on_progress": lambda url: other.fetch_checkpoint([url], 3, LONG, on_progress=nothing),
            "in place": lambda url, plain=plain: other.fetch_checkpoint(  # type: ignore[misc]
                [url], 3, LONG, local_state=dict(plain), in_place=True, on_progress=nothing
            ),
            "fetch_sharded": lambda url, plain=plain: other.fetch_sharded(  # type: ignore[misc]
                [[url]], 0, 1, 3, LONG, local_state=dict(plain), on_progress=nothing
            ),
            "pull": pull,
        }
        for name, receive in ways.items():
            if len(plain) == len(state) or name in ("fetch_checkpoint", "with on_progress", "pull"):
                source.send_checkpoint([1], 3, state, LONG)
                try:
                    print(f"{name}: {receive(source.metadata())}")
                except Exception as error:
                    escaped += 1
                    print(f"{name}: ESCAPED {type(error).__name__}: {error}")
    source.shutdown()
    other.shutdown()
    if escaped:
        print(f"VULNERABLE: {escaped} ways to receive a state without tensor bytes raised")
        return 1
    print("held: a state without tensor bytes is received in every way")
    return 0


if __name__ == "__main__":
    sys.exit(main())
