"""Imagined groups of ranks in one process, models on random layouts, and an oracle that knows indices only.

A group's ranks are made one after the other over a process group that does nothing. Which elements a rank holds is worked out
here by cutting an array of indices, as the definition of the placements has it, so it does not depend on the library.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import http.server
import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from support import sources
from support.http_servers import Server
from torchft_ckpt.checkpointing.http_transport import HTTPTransport

LONG = timedelta(seconds=90)
SPARE_DESCRIPTORS = 4
State = dict[str, Any]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float64,
    torch.complex128,
]


@contextmanager
def imagined_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a group, the others imagined: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Layout:
    """How one tensor lies on a mesh of the group's first ranks; None where it is a plain tensor, whole on every rank.

    `cuts` are (mesh dimension, tensor dimension) in the order in which the tensor is cut.
    """

    mesh: tuple[int, ...] | None = None
    cuts: tuple[tuple[int, int], ...] = ()

    def placements(self) -> list[Placement]:
        """As torch has them. A mesh dimension that is cut after a later one of the same tensor dimension is strided."""
        assert self.mesh is not None
        found: list[Placement] = [Replicate() for _ in self.mesh]
        for place, (mesh_dim, dim) in enumerate(self.cuts):
            before = [self.mesh[other] for other, its in self.cuts[:place] if its == dim and other > mesh_dim]
            found[mesh_dim] = _StridedShard(dim, split_factor=math.prod(before)) if before else Shard(dim)
        return found

    def local(self, full: torch.Tensor, rank: int) -> torch.Tensor | None:
        """What a rank holds of a tensor, as a view of it; None outside of the mesh. By cutting, again and again."""
        if self.mesh is None:
            return full
        if rank >= math.prod(self.mesh):
            return None
        coordinate = [int(at) for at in torch.unravel_index(torch.tensor(rank), self.mesh)]
        for mesh_dim, dim in self.cuts:
            size = full.shape[dim]
            step = -(-size // self.mesh[mesh_dim])
            low = min(coordinate[mesh_dim] * step, size)
            full = full.narrow(dim, low, min(step, size - low))
        return full

    def make(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Make the tensor of this rank, with memory of its own; within `imagined_rank`."""
        local = self.local(full, rank)
        if self.mesh is None:
            return full.clone()
        mesh = DeviceMesh("cpu", torch.arange(math.prod(self.mesh)).reshape(self.mesh))
        if local is None:  # from_local takes a shape without dimensions for none
            data = torch.empty((0,) if full.shape else (), dtype=full.dtype)
        else:
            data = local.clone(memory_format=torch.contiguous_format)
        return DTensor.from_local(
            data, mesh, self.placements(), run_check=False, shape=full.shape, stride=_c_strides(full.shape)
        )


PLAIN = Layout()


def _c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta").stride())


def random_mesh(chance: random.Random, world_size: int) -> tuple[int, ...]:
    """A mesh of at most so many ranks; now and then some are left out."""
    while True:
        num_dims = chance.choice([1, 1, 2, 2, 3])
        mesh = tuple(chance.randint(1, world_size) for _ in range(num_dims))
        size = math.prod(mesh)
        if size == world_size or (size < world_size and chance.random() < 0.3):
            return mesh


def random_layout(chance: random.Random, world_size: int, shape: Sequence[int]) -> Layout:
    """A layout as torch can express it, for a tensor of this shape."""
    if chance.random() < 0.15:
        return PLAIN
    mesh = random_mesh(chance, world_size)
    cuts: list[tuple[int, int]] = []
    for mesh_dim in range(len(mesh)):
        if shape and chance.random() < 0.75:
            cuts.append((mesh_dim, chance.randrange(len(shape))))
    by_dim = {dim for _, dim in cuts}
    for dim in by_dim:
        mine = [mesh_dim for mesh_dim, its in cuts if its == dim]
        even = shape[dim] % math.prod(mesh[mesh_dim] for mesh_dim in mine) == 0
        if len(mine) == 2 and even and chance.random() < 0.7:  # FSDP2 over tensor parallelism: the later is cut first
            others = [cut for cut in cuts if cut[1] != dim]
            cuts = [*others, (mine[1], dim), (mine[0], dim)]
    return Layout(mesh, tuple(cuts))


def random_tensor(chance: random.Random, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    num_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def random_shape(chance: random.Random) -> tuple[int, ...]:
    """0 to 3 dimensions; uneven ones, and empty ones now and then."""
    return tuple(
        chance.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 0, 9, 24]) for _ in range(chance.choice([0, 1, 1, 2, 2, 3]))
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor in C order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=torch.uint8).to(tensor.dtype)


def fill(tensor: torch.Tensor, byte: int = 0) -> None:
    """Overwrite what this rank holds, so that what is not received is seen."""
    bits_of_it = plain(tensor).detach()
    bits_of_it.copy_(
        torch.full((bits_of_it.nbytes,), byte, dtype=torch.uint8).view(bits_of_it.dtype).reshape(bits_of_it.shape)
    )


def snapshot_of(state: object) -> dict[str, torch.Tensor]:
    """A copy of the bits of all tensors of a nested state, by path; to see whether anything was touched."""
    found: dict[str, torch.Tensor] = {}

    def visit(value: object, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = bits(plain(value)).clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                visit(item, f"{path}.{index}")

    visit(state, "")
    return found


def untouched(before: dict[str, torch.Tensor], state: object) -> bool:
    after = snapshot_of(state)
    return before.keys() == after.keys() and all(torch.equal(before[path], after[path]) for path in before)


class Group:
    """The transports of one source group's ranks, each serving its part of a state."""

    def __init__(self, states: Sequence[State], step: int, *, num_receivers: int = 1, **options: Any) -> None:
        self.states = list(states)
        self.transports = [make_transport(**options) for _ in states]
        for transport, state in zip(self.transports, self.states, strict=True):
            transport.send_checkpoint(list(range(num_receivers)), step, state, LONG)

    @property
    def urls(self) -> list[str]:
        return [transport.metadata() for transport in self.transports]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for transport in self.transports:
            transport.shutdown()


def make_transport(**options: Any) -> HTTPTransport[State]:
    """Return a transport on loopback with small blocks and as many connections as it takes by itself."""
    return sources.make_transport(**{"num_chunks": 0, **options})


@dataclass
class Model:
    """Tensors by path, as they are as a whole, and how the tree of a state is made of them."""

    fulls: dict[str, torch.Tensor]
    tied: dict[str, str]
    """Paths under which another one's tensor is found once more."""

    @classmethod
    def random(cls, chance: random.Random, num_tensors: int) -> Model:
        """Weights, optimizer state beside them, buffers."""
        fulls: dict[str, torch.Tensor] = {}
        for number in range(num_tensors):
            dtype = chance.choice(DTYPES)
            shape = random_shape(chance)
            if number % 3:
                fulls[f"model.w{number}"] = random_tensor(chance, shape, dtype)
            else:
                fulls[f"optim.state.{number}.exp_avg"] = random_tensor(chance, shape, dtype)
        weights = [path for path in fulls if path.startswith("model")]
        tied = {f"tied.{path}": path for path in weights if chance.random() < 0.15}
        return cls(fulls, tied)

    def layouts(self, chance: random.Random, world_size: int) -> dict[str, Layout]:
        """A layout for each tensor: one for all on most, another one for each on some groups."""
        what = chance.random()
        if what < 0.15:
            return dict.fromkeys(self.fulls, PLAIN)  # DDP
        return {path: random_layout(chance, world_size, tuple(full.shape)) for path, full in self.fulls.items()}

    def state(self, layouts: dict[str, Layout], rank: int, *, lr: float = 0.5) -> State:
        """The state of one rank; within `imagined_rank`."""
        state: State = {"optim": {"state": {}, "param_groups": [{"lr": lr, "betas": (0.9, 0.99), "params": [0]}]}}
        for path, full in self.fulls.items():
            *parents, last = path.split(".")
            place = state
            for name in parents:
                place = place.setdefault(int(name) if name.isdigit() else name, {})
            place[last] = layouts[path].make(full, rank)
        for path, other in self.tied.items():
            section, _, name = path.partition(".")
            state.setdefault(section, {})[name] = lookup(state, other)
        state["step"] = 7
        return state

    def states(self, layouts: dict[str, Layout], world_size: int, *, lr: float = 0.5) -> list[State]:
        """The states of all ranks of a group."""
        states = []
        for rank in range(world_size):
            with imagined_rank(rank, world_size):
                states.append(self.state(layouts, rank, lr=lr))
        return states

    def wrong(self, state: State, layouts: dict[str, Layout], rank: int) -> list[str]:
        """The paths of what a rank's state has not as it should have it."""
        found = []
        for path, layout in layouts.items():
            for place in (path, *(name for name, other in self.tied.items() if other == path)):
                held = lookup(state, place)
                local = layout.local(self.fulls[path], rank)
                if isinstance(held, DTensor) != (layout.mesh is not None):
                    found.append(f"{place}: {type(held).__name__}")
                elif local is not None and not same_bits(plain(held), local):
                    found.append(place)
        return found

    def num_bytes(self, layouts: dict[str, Layout], rank: int) -> int:
        """Bytes that a rank holds of all tensors."""
        locals_ = (layout.local(self.fulls[path], rank) for path, layout in layouts.items())
        return sum(local.nbytes for local in locals_ if local is not None)


def lookup(state: State, path: str) -> torch.Tensor:
    """What is at a path, where names of keys may have dots."""
    place: Any = state
    rest = path
    while rest:
        if rest in place:
            return place[rest]
        name, _, rest = rest.partition(".")
        place = place[int(name) if name.isdigit() else name]
    return place


def overwrite(state: State) -> None:
    """Fill all that a rank holds with other bits."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            fill(value, 0x01)
        elif isinstance(value, dict):
            overwrite(value)


class LyingSource:
    """A server before a source: it forwards each request, and `change` may send another answer, a part of it, or none.

    `change` gets the answer and sends it: see `Reply`. Leaving the context ends whatever still hangs.
    """

    def __init__(self, url: str, change: Callable[[Reply], None]) -> None:
        port = int(url.rpartition(":")[2])
        self.ended = threading.Event()
        self.kinds: list[str] = []
        lying = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _forward(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                source = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    source.request(self.command, self.path, body=body or None, headers=dict(self.headers))
                    answer = source.getresponse()
                    reply = Reply(lying, self, answer.status, dict(answer.getheaders()), answer.read(), body)
                except (OSError, http.client.HTTPException):  # the source is gone
                    self.close_connection = True
                    return
                finally:
                    source.close()
                lying.kinds.append(reply.kind)
                try:
                    change(reply)
                except OSError:  # the receiver went away
                    self.close_connection = True

            do_GET = do_POST = _forward

            def log_message(self, *_: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = self._server.start()

    def close(self) -> None:
        """Accept nothing more. May be called again."""
        self.ended.set()
        self._server.end()

    def __enter__(self) -> LyingSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Reply:
    """An answer of a source, not passed on yet."""

    source: LyingSource
    handler: http.server.BaseHTTPRequestHandler
    status: int
    headers: dict[str, str]
    body: bytes
    asked: bytes
    """The body of the request."""

    @property
    def kind(self) -> str:
        """The last words of what was asked for: `manifest`, `parts`, `parts/digests`, `done`."""
        path = self.handler.path.partition("?")[0]
        return "parts/digests" if path.endswith("parts/digests") else path.rpartition("/")[2]

    def send(self, num_bytes: int | None = None) -> None:
        """Send it on; with a number, only so many bytes of the body."""
        self.handler.send_response(self.status)
        for name, value in self.headers.items():
            if name.lower() not in ("content-length", "date", "server", "transfer-encoding"):
                self.handler.send_header(name, value)
        if self.status != 204:
            self.handler.send_header("Content-Length", str(len(self.body)))
        self.handler.end_headers()
        self.handler.wfile.write(self.body[:num_bytes])
        self.handler.wfile.flush()

    def send_raw(self, data: bytes) -> None:
        self.handler.wfile.write(data)
        self.cut()

    def cut(self) -> None:
        """End the connection."""
        self.handler.close_connection = True
        with contextlib.suppress(OSError):
            self.handler.connection.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """Send nothing more until all is over."""
        self.source.ended.wait(60)
        self.cut()


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """Threads and descriptors are those of before, in the end, but for a few that other tests' leavings may open meanwhile."""
    threads, descriptors = set(threading.enumerate()), num_descriptors()
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = set(threading.enumerate()) - threads
        if not left and num_descriptors() <= descriptors + SPARE_DESCRIPTORS:
            return
        gc.collect()
        time.sleep(0.02)
    raise AssertionError(f"left over: {left}, descriptors {descriptors} -> {num_descriptors()}")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
