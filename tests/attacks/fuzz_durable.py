"""Fuzzes what is read of durable checkpoints: DCP's metadata, records of values, and our own manifests in every command.

Each case must end with a named error or a harmless result, within some seconds of processor time and some memory. Nothing may
be executed: an audit hook watches for what a pickle could do (exec, import, open, subprocess, socket and others).

usage: python fuzz_durable.py [--count N] [--seed S]      N pickles, N / 2 records, N / 20 manifests
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import encodings.cp437  # noqa: F401 - zipfile imports it late
import io
import json
import logging
import os
import pickle
import pickletools
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from support.newest import newest_whole

from torchft_ckpt import Checkpointer, load_checkpoint
from torchft_ckpt.__main__ import main as command
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.errors import TorchftCkptError
from torchft_ckpt.integrations.dcp.reader import load_metadata, load_record

MAX_BYTES = 4 << 30
MAX_CASE_S = 5.0
MAX_GROWTH_MIB = 600
WATCHED = ("exec", "compile", "import", "open", "pickle.find_class", "ctypes.dlopen")
WATCHED += ("os.", "subprocess.", "socket.", "shutil.")
HOSTILE = [
    f"{module} {name}"
    for module, names in {
        "os": "system",
        "posix": "system",
        "builtins": "eval exec getattr open __import__ bytearray complex",
        "__builtin__": "eval bytearray set",
        "subprocess": "Popen",
        "socket": "socket",
        "torch.hub": "load",
        "torch": "load Size device FloatStorage Tensor FloatTensor float32",
        "_codecs": "encode",
        "collections": "OrderedDict Counter",
        "torch.storage": "UntypedStorage _load_from_bytes",
        "torch._utils": "_rebuild_tensor_v2 _rebuild_tensor _rebuild_qtensor _rebuild_sparse_tensor _rebuild_parameter"
        " _rebuild_device_tensor_from_cpu_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage",
        "torch._tensor": "_rebuild_from_type_v2",
        "numpy.core.multiarray": "_reconstruct",
        "numpy": "ndarray dtype",
        "pathlib": "PosixPath",
        "copyreg": "_reconstructor",
        "torch.nn.parameter": "Parameter",
        "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata ChunkStorageMetadata"
        " MetadataIndex TensorProperties",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    }.items()
    for name in names.split()
]
NUMBERS = [
    -1,
    0,
    1,
    2,
    255,
    65536,
    2**20,
    2**31 - 1,
    2**63 - 1,
    -(2**63),
    *(2**n for n in (31, 40, 53, 61, 62, 63, 64)),
]
LEAVES: list[Any] = [*NUMBERS, 1e300, -1e300, 0.5, True, None, [], {}, [[]]]
LEAVES += ["", "x", "../x", "a\0b", "\x1b[2J", "é" * 300]
READ_FROM = tuple(
    os.path.realpath(place) for place in (sys.prefix, sys.base_prefix, *map(str, [Path(torch.__file__).parent]))
)


class OutOfTimeError(BaseException):
    """A case took too much processor time."""


@dataclass
class Watch:
    """What an audit hook sees while a case is read. A hook stays for good, so there is one."""

    is_installed: bool = False
    is_on: bool = False
    places: tuple[str, ...] = ()
    """Files below these may be opened."""
    seen: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Have Python tell it of events; may be called again."""
        if not self.is_installed:
            self.is_installed = True
            sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event.startswith(WATCHED) and not self._is_allowed(event, arguments):
            self.seen.append(f"{event} {arguments!r}"[:160])

    def _is_allowed(self, event: str, arguments: tuple[Any, ...]) -> bool:
        of_files = ("listdir", "scandir", "remove", "rename", "link", "chmod")
        if not self.places or event not in ("open", *(f"os.{name}" for name in of_files)):
            return False
        path = arguments[0]
        return isinstance(path, int) or str(path).startswith(self.places)


WATCH = Watch()


@dataclass
class Tally:
    """What came of the cases of one target."""

    target: str
    what: str
    results: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.results.most_common(8))
        told += f"; {len(self.wrong)} WRONG" if self.wrong else ""
        return f"{self.target} | {self.what} | {self.results.total()} | {told or 'none'}"

    def run(self, name: str, action: Callable[[], object], *, places: tuple[str, ...] = ()) -> None:
        """Carry a case out, and note how it ended."""
        WATCH.places, WATCH.seen[:] = places, []
        started = time.process_time()
        try:
            with _alarm():
                WATCH.is_on = True
                try:
                    result = action()
                finally:
                    WATCH.is_on = False
            self.results["harmless" if not isinstance(result, str) else result] += 1
        except TorchftCkptError as error:
            self.results[type(error).__name__] += 1
            if len(str(error)) > 5000:
                self.wrong.append(f"{name}: a message of {len(str(error))} characters")
        except OutOfTimeError:
            self.wrong.append(f"{name}: more than {MAX_CASE_S} s of processor time")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:120]} at {where.filename}:{where.lineno}")
        if time.process_time() - started > MAX_CASE_S:
            self.wrong.append(f"{name}: {time.process_time() - started:.1f} s")
        self.wrong += [f"{name}: {event}" for event in WATCH.seen]


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CASE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# Pickles


def random_program(rng: random.Random, length: int, pool: list[bytes]) -> bytes:
    """Return a pickle of random opcodes; some of them of real ones."""
    body = b"".join(rng.choice(pool) if rng.random() < 0.3 else random_opcode(rng) for _ in range(length))
    return b"\x80" + bytes([rng.choice((2, 2, 4, 5))]) + body + b"."


def random_opcode(rng: random.Random) -> bytes:
    """Return an opcode with an argument."""
    kind = rng.randrange(12)
    if kind == 0:
        module, _, name = rng.choice(HOSTILE).partition(" ")
        return f"c{module}\n{name}\n".encode()
    if kind == 1:
        data = pickle.encode_long(rng.choice(NUMBERS))
        return b"\x8a" + bytes([len(data)]) + data
    if kind == 2:
        text = rng.choice(
            ["latin1", "storage", "cpu", "0", "w", "state_dict_metadata", "x" * 300, "touch executed"]
        ).encode()
        return b"X" + struct.pack("<I", len(text)) + text
    if kind == 3:
        return b"K" + bytes([rng.randrange(256)])
    if kind == 4:
        return rng.choice((b"q", b"h")) + bytes([rng.randrange(6)])
    if kind == 5:
        return rng.choice((b"r", b"j")) + struct.pack("<I", rng.choice((0, 1, 2**31, 2**32 - 1)))
    if kind == 6:
        return rng.choice(
            (b"\x8d" + struct.pack("<Q", 2**62), b"B" + struct.pack("<I", 2**31), b"\x82\x01", b"i", b"G" + b"\xff" * 8)
        )
    if kind == 7:
        return rng.choice((b"R", b"R", b"b", b"\x81", b"Q", b"\x93", b"o", b"\x92"))
    return bytes([rng.choice(b"(t)\x85\x86\x87]}eausN\x8802\x94")])


def opcodes_of(data: bytes) -> list[bytes]:
    """Return a pickle, opcode by opcode."""
    starts = [position for _, _, position in pickletools.genops(data) if position is not None]
    return [data[start:stop] for start, stop in zip(starts, [*starts[1:], len(data)], strict=True)]


def mutated(rng: random.Random, data: bytes, opcodes: list[bytes]) -> bytes:
    """Return a real pickle with bytes or opcodes changed."""
    if rng.random() < 0.4:
        spoiled = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            spoiled[rng.randrange(len(spoiled))] = rng.choice((rng.randrange(256), 0, 255, *b"RbQc.\x81"))
        return bytes(spoiled[: rng.randrange(len(spoiled))] if rng.random() < 0.1 else spoiled)
    changed = [*opcodes]
    for _ in range(rng.randint(1, 5)):
        at, other = rng.randrange(len(changed)), rng.randrange(len(changed))
        action = rng.randrange(5)
        if action == 0:
            changed.insert(at, random_opcode(rng))
        elif action == 1:
            changed[at] = random_opcode(rng)
        elif action == 2:
            changed[at], changed[other] = changed[other], changed[at]
        elif action == 3:
            changed[at:at] = changed[other : other + rng.randint(1, 30)] * rng.choice((1, 1, 3, 50))
        elif len(changed) > 2:
            del changed[at]
    return b"".join(changed)


def fuzz_metadata(rng: random.Random, count: int) -> list[Tally]:
    """Read `.metadata` pickles."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        dcp.save({"w": torch.ones(4, 3), "v": {"a": [1, "x"]}, "step": 3}, checkpoint_id=str(place), no_dist=True)
        real = (place / ".metadata").read_bytes()
    finally:
        shutil.rmtree(place)
    load_metadata(real)  # imports
    opcodes = opcodes_of(real)
    tallies = [Tally(".metadata", "random opcodes"), Tally(".metadata", "a real one, mutated")]
    for number in range(count):
        is_real, length = number % 2, rng.choice((3, 10, 40, 200))
        data = mutated(rng, real, opcodes) if is_real else random_program(rng, length, opcodes)
        tallies[number % 2].run(f"{number}: {data[:60].hex()}", lambda data=data: load_metadata(data))  # type: ignore[misc]
    return tallies


# Records


def values() -> list[object]:
    """Return values of all kinds that records have."""
    state = torch.nn.Linear(2, 2).state_dict()
    return [
        {"a": [1, "x", (2.5, None)], 5: True, (1, "b"): b"bytes"},
        [
            {1, 2},
            bytearray(b"abc"),
            1 + 2j,
            torch.Size([2]),
            torch.device("cpu"),
            torch.bfloat16,
            collections.Counter("ab"),
        ],
        (torch.arange(6.0).reshape(2, 3).t(), torch.nn.Parameter(torch.ones(2)), torch.zeros(1).expand(9)),
        [torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta")],
        state,
    ]


def record_of(pickled: bytes, rng: random.Random) -> bytes:
    """Return a record with this pickle, in an archive that is odd at times."""
    buffer = io.BytesIO()
    odd = rng.random()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore")
        names = ["data.pkl", "byteorder", *(f"data/{key}" for key in range(5)), "version"]
        if odd < 0.05:
            names += [rng.choice(("DATA.PKL", "data.pkl", "data/0", "data/x", "constants.pkl", "a" * 5000))]
        if odd > 0.97:
            names.remove(rng.choice(names))
        for name in names:
            small = {"byteorder": rng.choice((b"little", b"little", b"big", b"odd")), "version": b"3\n"}
            content = (
                pickled if name.lower() == "data.pkl" else small.get(name, bytes(rng.choice((0, 24, 4096, 4096, 4096))))
            )
            archive.writestr(f"archive/{name}", content)
    data = bytearray(buffer.getvalue())
    if rng.random() < 0.1:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def fuzz_records(rng: random.Random, count: int) -> list[Tally]:
    """Load records of values."""
    pickles: list[bytes] = []
    for value in values():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        load_record(buffer.getvalue(), "a record")
        with zipfile.ZipFile(buffer) as archive:
            pickles.append(archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl"))))
    real = [(data, opcodes_of(data)) for data in pickles]
    tallies = [Tally("value record", "random opcodes"), Tally("value record", "a real one, mutated")]
    for number in range(count):
        data, opcodes = rng.choice(real)
        pickled = mutated(rng, data, opcodes) if number % 2 else random_program(rng, rng.choice((3, 10, 40)), opcodes)
        record = record_of(pickled, rng)

        def load(record: bytes = record) -> None:
            load_record(record, "a record")

        tallies[number % 2].run(f"{number}: {pickled[:60].hex()}", load)
    return tallies


# Manifests


def save(place: Path) -> dict[str, Any]:
    """Save two checkpoints; return the state."""
    state = {
        "model": {"w": torch.arange(12.0).reshape(4, 3), "half": torch.ones(3).bfloat16(), "empty": torch.empty(0, 2)},
        "lr": 0.5,
        "pair": (torch.ones(2), "a"),
        "names": ["x", {"y": 1}],
    }
    checkpointer = Checkpointer(str(place), save_random_state=False)
    for step in (1, 2):
        checkpointer.save(state, step=step).result(60)
    checkpointer.shutdown()
    return state


def nodes_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each node of a JSON value."""
    if path:
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes_of(item, (*path, key))


def spoil(rng: random.Random, body: Any) -> str:
    """Change a node of a manifest; return what was changed."""
    path = rng.choice([*nodes_of(body)])
    container = body
    for key in path[:-1]:
        container = container[key]
    key, old = path[-1], container[path[-1]]
    action = rng.randrange(5)
    if action == 0 and isinstance(container, dict):
        del container[key]
    elif action == 1 and isinstance(container, list):
        container.insert(key, json.loads(json.dumps(rng.choice((old, *container)))))
    elif action == 2 and isinstance(old, (int, float)) and not isinstance(old, bool):
        container[key] = rng.choice((old + 1, old - 1, old * 2, -old, *NUMBERS))
    elif action == 3:
        other = rng.choice([*nodes_of(body)])
        item = body
        for step in other:
            item = item[step]
        container[key] = json.loads(json.dumps(item))
    else:
        container[key] = rng.choice(LEAVES)
    return ".".join(map(str, path))


def write(part: Path, body: Any) -> None:
    """Write a manifest with the right digest."""
    data = json.dumps(body).encode()
    head = {
        "format": "torchft_ckpt.durable",
        "version": 2,
        "bytes": len(data),
        "digest": xxhash.xxh3_128_hexdigest(data),
    }
    part.write_bytes(json.dumps(head).encode() + b"\n" + data)


def fuzz_manifests(rng: random.Random, count: int) -> list[Tally]:
    """Read checkpoints with one spoiled manifest in every way."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    tallies = {name: Tally("manifest", name) for name in ("ls", "verify", "export", "load", "the older one is found")}
    try:
        place, output = root / "place", root / "out.safetensors"
        state = save(place)
        newest = sorted(place.iterdir())[-1]
        part = next(newest.glob("part-*.json"))
        good = part.read_bytes().partition(b"\n")[2]
        commands = {
            "ls": ["ls", str(place), "--json"],
            "verify": ["verify", "--quiet", str(newest)],
            "export": ["export", "--quiet", "--force", "-o", str(output), str(place)],
        }

        def run(arguments: list[str]) -> str:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                return f"exit {command(['checkpoints', *arguments])}"

        def load() -> str:
            load_checkpoint(newest, state)
            return "loaded"

        def find() -> str:
            return f"step {newest_whole([LocalStorage(place)]).name.step}"

        for arguments in commands.values():
            run(arguments)  # imports
        load()
        for number in range(count):
            body = json.loads(good)
            what = ", ".join(spoil(rng, body) for _ in range(rng.choice((1, 1, 2, 4))))
            write(part, body)
            for name, arguments in commands.items():
                places = (str(root), *READ_FROM)
                tallies[name].run(f"{number}: {what}", lambda arguments=arguments: run(arguments), places=places)  # type: ignore[misc]
            tallies["load"].run(f"{number}: {what}", load, places=(str(root),))
            tallies["the older one is found"].run(f"{number}: {what}", find, places=(str(root),))
    finally:
        shutil.rmtree(root)
    return [*tallies.values()]


def fuzz(seed: int, count: int) -> list[Tally]:
    """Fuzz all targets; return what came of it."""
    rng = random.Random(seed)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        WATCH.install()
        return [*fuzz_metadata(rng, count), *fuzz_records(rng, count // 2), *fuzz_manifests(rng, max(count // 20, 1))]
    finally:
        logging.disable(logging.NOTSET)


def main() -> int:
    """Fuzz with little memory; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="pickles; half as many records, a twentieth manifests")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tallies = fuzz(options.seed, options.count)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print("target | what | count | result")
    for tally in tallies:
        print(tally)
    wrong = [case for tally in tallies for case in tally.wrong]
    if grown > MAX_GROWTH_MIB:
        wrong.append(f"it took {grown} MiB")
    for case in wrong[:20]:
        print(f"    {case}")
    if wrong:
        print(f"VULNERABLE: {len(wrong)} cases of seed {options.seed} ended otherwise: {wrong[0]}")
        return 1
    print(
        f"held: seed {options.seed}: nothing was executed, each case ended by name or harmlessly; {grown} MiB were taken"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
