"""What a group's script says of its state at its end, for a comparison bit by bit. Scripts beside this file import it.

    print_state(step=manager.current_step(), model=model.state_dict(), optimizer=optimizer.state_dict(), scheduler=...)

The line says of each tensor its dtype, shape and a digest of its bits, and of each plain value its exact value, each by its path
in the state dicts: what differs has a name. Param groups of optimizers hold the learning rates, so these are in it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

MARK = "STATE "


def print_state(*, step: int, **states: Any) -> None:
    """Print one line of the committed step and of all that is in the state dicts. A DTensor counts with what is on this rank."""
    say(MARK + json.dumps({"step": step, "values": dict(leaves("", states))}))


def say(line: str) -> None:
    """Print a line in one call: `print` writes its parts and its end apart, and threads and ranks of a group have one output."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def digest(**states: Any) -> str:
    """Return a digest of all that `print_state` would print of these, for people who compare by eye."""
    return xxhash.xxh3_64_hexdigest(json.dumps(dict(leaves("", states)), sort_keys=True).encode())


def leaves(path: str, node: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each tensor and value that is in a node, and what says which it is."""
    if isinstance(node, torch.Tensor):
        yield path, _digest(node)
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from leaves(f"{path}/{key}", child)
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from leaves(f"{path}/{index}", child)
    elif isinstance(node, float):
        yield path, node.hex()
    elif node is None or isinstance(node, str | bool | int):
        yield path, repr(node)
    else:
        raise TypeError(f"{path} is a {type(node).__name__}, which nobody knows how to compare")


def _digest(tensor: torch.Tensor) -> str:
    here = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    bits = here.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{here.dtype} {tuple(here.shape)} {xxhash.xxh3_128_hexdigest(bits.numpy())}"
