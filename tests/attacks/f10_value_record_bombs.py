"""Records of values in DCP's directories that stand for more memory or time than there is: `bytearray(2**40)` in 395 bytes.

Each is loaded, verified and exported, in a process of 4 GiB of address space and 10 s of processor time. A process may end with
a named error, or with what the record says if that is small; and nothing may be executed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import resource
import shutil
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchft_ckpt import load_checkpoint
from torchft_ckpt.__main__ import main as command
from torchft_ckpt.errors import CheckpointError

GIB = 1 << 30
MAX_BYTES, MAX_CPU_S, MAX_GROWTH_MIB = 4 * GIB, 10, 200
NAMED_ERROR, OTHER_ERROR, GREW = 3, 4, 5


class Call:
    """The callables of a pickle."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def record(pickled: bytes) -> bytes:
    """Return a record with this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (
            ("data.pkl", pickled),
            ("byteorder", b"little"),
            ("data/0", bytes(4)),
            ("version", b"3\n"),
        ):
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def saved(value: object) -> bytes:
    """Return the record that torch makes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def bombs(marker: Path) -> dict[str, bytes]:
    """Return records by what they are."""
    text = b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20) + b"q\x00X\x06\x00\x00\x00latin1q\x01\x86q\x02"
    twice = b"N" + b"q\x00h\x00\x86" * 60
    lists = b"]q\x00(" + b"".join(b"]q%c(h%ch%ce" % (n + 1, n, n) for n in range(60)) + b"e"
    return {
        "as DCP wrote it": saved({"a": 1}),
        "bytearray(2 GiB)": record(pickle.dumps(Call(bytearray, 2 * GIB), 2)),
        "bytearray(1 TiB)": record(pickle.dumps(Call(bytearray, 1 << 40), 2)),
        "100 x bytearray(200 MiB)": record(pickle.dumps([Call(bytearray, 200 << 20) for _ in range(100)], 2)),
        "1 MiB of text as bytes, 2,000 times": record(
            b"\x80\x02](" + text + b"c_codecs\nencode\nq\x03" + b"h\x03h\x02R" * 2000 + b"e."
        ),
        "a storage of 2 GiB": record(b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x05\x00\x00\x00\x80\x00\x85R."),
        "a key of 2**60 values": record(b"\x80\x02}" + twice + b"Ns."),
        "a tensor expanded to 4 TiB": saved(torch.zeros(1).expand(1 << 40)),
        "20 tensors expanded to 1 GiB": saved([torch.zeros(1).expand(1 << 28) for _ in range(20)]),
        "60 lists that each hold the one before twice": record(b"\x80\x02" + lists + b"."),
        "nested 100,000 deep": record(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        "os.system": record(pickle.dumps(Call(os.system, f"touch {marker}"), 2)),
        "an array of objects": record(
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR."
        ),
    }


def directory(place: Path, content: bytes) -> None:
    """Have DCP save a tensor and a value there, and put another record in the place of the value's."""
    dcp.save({"w": torch.ones(10), "v": {"a": 1}}, checkpoint_id=str(place), no_dist=True)
    metadata = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301 - DCP wrote it just now
    for index, info in metadata.storage_data.items():
        if index.fqn.startswith("v"):
            (place / "evil.distcp").write_bytes(content)
            info.relative_path, info.offset, info.length = "evil.distcp", 0, len(content)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


def load(place: Path) -> int:
    """Load it into a state; return the status of the process."""
    try:
        load_checkpoint(place, {"w": torch.zeros(10), "v": {"a": 0}})
    except CheckpointError as error:
        print(f"{type(error).__name__}: {str(error)[:150]}")
        return NAMED_ERROR
    return 0


def within_limits(action: Callable[[], int]) -> tuple[int, str]:
    """Carry an action out in a process with little memory; return its status, and the last that it said."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            status = action()
        except BaseException:
            traceback.print_exc(limit=2)
            status = OTHER_ERROR
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        if grown > MAX_GROWTH_MIB:
            print(f"took {grown} MiB")
            status = GREW
        sys.stdout.flush()
        os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode(errors="replace").strip().splitlines()
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), (told or [""])[-1][:160]


def main() -> int:
    """Try each bomb in each way."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    work = Path(tempfile.mkdtemp(prefix="attack-"))
    marker = work / "executed"
    wrong: list[str] = []
    try:
        for number, (name, content) in enumerate(bombs(marker).items()):
            place, output = work / f"dcp{number}", str(work / f"{number}.safetensors")
            with contextlib.redirect_stdout(io.StringIO()):
                directory(place, content)
            tries: dict[str, Callable[[], int]] = {
                "load": lambda place=place: load(place),
                "verify": lambda place=place: command(["checkpoints", "verify", "--quiet", str(place)]),
                "export": lambda place=place, output=output: command(
                    ["checkpoints", "export", str(place), "-o", output, "--quiet"]
                ),
            }
            print(f"{name} ({len(content)} bytes)")
            for what, action in tries.items():
                status, told = within_limits(action)
                print(f"    {what}: {status} {told}", flush=True)
                if status not in (0, 1, NAMED_ERROR) or (number == 0 and status):
                    wrong.append(f"{name}, {what}")
        executed = marker.exists()
    finally:
        shutil.rmtree(work)
    if wrong or executed:
        print(f"VULNERABLE: {'something was executed; ' * executed}memory, time or a raw error: {'; '.join(wrong)}")
        return 1
    print("held: nothing was executed, and each record is refused by name or takes no more than it has")
    return 0


if __name__ == "__main__":
    sys.exit(main())
