"""DCP metadata of some hundred kilobytes, all of it allowed objects, that kept the reader busy for minutes: quadratic work.

N tensors share one list of N chunks, N chunks have one dict of N members, N offsets have one hash. Processor time is measured.

usage: python f09_metadata_cpu_bomb.py [N]
"""

from __future__ import annotations

import argparse
import io
import pickle
import resource
import signal
import sys
import time
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchft_ckpt.errors import CheckpointDamagedError
from torchft_ckpt.integrations.dcp.metadata import load_metadata

SECONDS_FOR_A_MEGABYTE = 30.0
MAX_S = 20


class OutOfTimeError(BaseException):
    """It took too long."""


def shared_list(count: int) -> bytes:
    """N distinct tensors over one list of N references to one chunk."""
    chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((1,)))
    chunks = [chunk] * count
    size, properties = torch.Size((1,)), TensorProperties(torch.float32)
    described: dict[str, Any] = {str(n): TensorStorageMetadata(properties, size, chunks) for n in range(count)}
    return pickle.dumps(Metadata(described, None, {}), protocol=4)


def shared_members(count: int) -> bytes:
    """N chunks that all have one dict of N members."""
    members = {"offsets": torch.Size((0,)), "sizes": torch.Size((1,)), **{f"m{n}": None for n in range(count)}}
    chunks = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((1,))) for _ in range(count)]
    for chunk in chunks:
        object.__setattr__(chunk, "__dict__", members)
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((1,)), chunks)
    return pickle.dumps(Metadata({"w": tensor}, None, {}), protocol=4)


def shared_names(count: int) -> bytes:
    """N records that share one list of N transforms."""
    names = ["x"] * count
    stored: dict[MetadataIndex, Any] = {}
    for number in range(count):
        info = _StorageInfo("file", 0, 1)
        info.transform_descriptors = names
        stored[MetadataIndex(str(number))] = info
    return pickle.dumps(Metadata({}, None, stored), protocol=4)


def one_hash(count: int) -> bytes:
    """N offsets of one hash: a tuple's has no seed, so the second number can be solved for."""
    one, two, five, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64 - 1

    def after(lane: int) -> int:
        mixed = (five + lane * two) & mask
        return ((mixed << 31 | mixed >> 33) & mask) * one & mask

    inverse, target = pow(two, -1, 2**64), (after(0) + 5 * two) & mask
    stored: list[tuple[MetadataIndex, Any]] = []
    info, lane = _StorageInfo("file", 0, 1), 0
    while len(stored) < count:
        other = (target - after(lane)) * inverse & mask
        if other < 2**61 - 1:
            stored.append((MetadataIndex("w", torch.Size((lane, other))), info))
        lane += 1
    # A dict of them would take as long to make here: the same pickle, with a dict's opcodes put together by hand.
    whole = pickle.dumps(Metadata({}, None, {}), protocol=2)
    place = whole.index(b"storage_data")
    empty = whole.index(b"}", place)
    items = b"(" + b"".join(_bare(index) + _bare(value) for index, value in stored) + b"u"
    return whole[: empty + 1] + items + whole[empty + 1 :]


def _bare(value: object) -> bytes:
    """Return the opcodes that make a value, without a memo, beginning or end."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


def seconds(data: bytes) -> tuple[float | None, str]:
    """Return the processor time that reading takes, None where it is more than `MAX_S`; and what came of it."""

    def ring(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_S)
    started = time.process_time()
    try:
        load_metadata(data)
        told = "was read"
    except CheckpointDamagedError as error:
        told = str(error)[:110]
    except OutOfTimeError:
        return None, "out of time"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return time.process_time() - started, told


def main() -> int:
    """Read each kind of metadata."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", metavar="N", nargs="?", type=int, default=3000)
    count = parser.parse_args().count
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    slow: list[str] = []
    load_metadata(shared_list(2))
    for kind in (shared_list, shared_members, shared_names, one_hash):
        data = kind(count)
        took, told = seconds(data)
        print(f"{kind.__name__}: {len(data)} bytes, {'more than 20' if took is None else f'{took:.2f}'} s: {told}")
        if took is None or took > 0.5 + SECONDS_FOR_A_MEGABYTE * len(data) / 1e6:
            slow.append(kind.__name__)
    print(
        f"VULNERABLE: {', '.join(slow)} took minutes for a megabyte"
        if slow
        else "held: each takes seconds for a megabyte"
    )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
