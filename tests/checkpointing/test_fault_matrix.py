"""Every kind of fault at every sort of block boundary of a transfer, and at random bytes of it, in every way to receive.

One item for each kind and way; its cases run inside, and a failure names those that came out wrong. The seed is printed.
`scripts/test --thorough` takes every block and every edge in every way, and more random bytes.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
import xxhash
from fault_matrix import (
    BLOCK_BYTES,
    FRAME_BYTES,
    KINDS,
    LAST_STALL_S,
    MODES,
    NEEDED,
    NUM_BLOCKS,
    NUM_BYTES,
    PATIENT_STALL_S,
    SORTS_OF_BLOCKS,
    STALL_S,
    STATE,
    Case,
    Expect,
    Exploit,
    FaultBench,
    Mode,
    fault_bench,
    modes_for,
)
from faulty_proxy import Answer, RequestFault, Wire, kind_of, pass_on, set_headers
from support.thoroughness import THOROUGH, by_default

from torchft_ckpt.checkpointing.state.space import plan_space
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.errors import (
    CheckpointError,
    DigestMismatchError,
    SourceLostError,
    StateFormatError,
    TransferError,
    TransferStalledError,
    TransferTimeoutError,
)

SEED = int(os.environ.get("FAULT_MATRIX_SEED", "20261120"))
NUM_RANDOM = int(os.environ.get("FAULT_MATRIX_RANDOM", by_default(2, thorough=20)))
ANY = (TransferError, StateFormatError)
_DRIPS = 12
"""How many bytes drip before the deadline: fewer than a digest has, which is the least that is left of an answer."""
BLOCKS = by_default(SORTS_OF_BLOCKS, thorough={str(block): block for block in range(NUM_BLOCKS)})
EDGES = ("start", "body", "end")
Act = Callable[[Answer, int, Wire], Awaitable[None]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    with fault_bench(tmp_path_factory.mktemp("executed")) as bench:
        yield bench


# Where


class Place(Protocol):
    """A place in the answers of a transfer."""

    def find(self, answer: Answer) -> int | None:
        """Its position in the bytes of this answer, or None where it is not in it."""


@dataclass(frozen=True)
class AtBlock:
    """So many bytes after the beginning of a block; its digest follows the block."""

    block: int
    inside: int

    def find(self, answer: Answer) -> int | None:
        blocks = answer.blocks()
        if self.block not in blocks:
            return None
        # The last block is shorter: its digest stands for what would lie behind it.
        return min(answer.head_bytes + (self.block - blocks.start) * FRAME_BYTES + self.inside, len(answer.raw) - 16)


@dataclass(frozen=True)
class AtEdge:
    """The beginning or end of the head or body of the answers of one kind."""

    kind: str
    edge: str

    def find(self, answer: Answer) -> int | None:
        if answer.kind != self.kind:
            return None
        return {"start": 0, "body": answer.head_bytes, "end": len(answer.raw)}[self.edge]


@dataclass(frozen=True)
class Within:
    """Somewhere in the answers of one kind: so many thousandths of their length from their beginning."""

    kind: str
    thousandths: int

    def find(self, answer: Answer) -> int | None:
        return len(answer.raw) * self.thousandths // 1000 if answer.kind == self.kind else None


@dataclass(frozen=True)
class AtByte:
    """A byte of all answers of a case, in the order in which they came."""

    byte: int

    def find(self, answer: Answer) -> int | None:
        position = self.byte - answer.start
        return position if 0 <= position < len(answer.raw) else None


# What: each gets the answer, the position of the place in it, and the way to the destination


async def cut(answer: Answer, position: int, wire: Wire) -> None:
    await wire.send(answer.raw[:position])
    await wire.cut()


async def reset(answer: Answer, position: int, wire: Wire) -> None:
    await wire.send(answer.raw[:position])
    await wire.cut(reset=True)


async def stall(answer: Answer, position: int, wire: Wire) -> None:
    await wire.send(answer.raw[:position])
    await wire.hang()


async def drip(answer: Answer, position: int, wire: Wire) -> None:
    await wire.send(answer.raw[:position])
    await wire.drip(answer.raw[position:])
    await wire.hang()


async def fragment(answer: Answer, position: int, wire: Wire) -> None:
    """No fault: bytes may come in pieces of any size."""
    for start, stop in ((0, position - 1), (position - 1, position), (position, position + 1), (position + 1, None)):
        await wire.send(answer.raw[max(start, 0) : stop if stop is None else max(stop, 0)])


def flip(generator: random.Random) -> Act:
    bit = generator.randrange(8)

    async def act(answer: Answer, position: int, wire: Wire) -> None:
        damaged = bytearray(answer.raw)
        damaged[min(position, len(damaged) - 1)] ^= 1 << bit
        await wire.send(bytes(damaged))

    return act


def repeat(generator: random.Random) -> Act:
    length = generator.choice([1, 16, BLOCK_BYTES, FRAME_BYTES, generator.randrange(1, 9000)])
    keeps_length = generator.random() < 0.5

    async def act(answer: Answer, position: int, wire: Wire) -> None:
        raw = answer.raw[: position + length] + answer.raw[position:]
        await wire.send(raw[: len(answer.raw)] if keeps_length else raw)

    return act


def reorder(generator: random.Random) -> Act:
    length = generator.choice([4, 16, BLOCK_BYTES, FRAME_BYTES, generator.randrange(4, 9000)])

    async def act(answer: Answer, position: int, wire: Wire) -> None:
        raw = answer.raw
        size = min(length, (len(raw) - position) // 2)
        first, second = raw[position : position + size], raw[position + size : position + 2 * size]
        await wire.send(raw[:position] + second + first + raw[position + 2 * size :])

    return act


def leave_out(generator: random.Random) -> Act:
    length = generator.choice([1, 16, BLOCK_BYTES, FRAME_BYTES, generator.randrange(1, 9000)])

    async def act(answer: Answer, position: int, wire: Wire) -> None:
        await wire.send(answer.raw[:position] + answer.raw[position + length :])

    return act


async def truncate(answer: Answer, position: int, wire: Wire) -> None:
    """The body ends at the place, and the head says so."""
    if position < answer.head_bytes:
        await cut(answer, position, wire)
    await wire.send(answer.with_body(answer.raw[answer.head_bytes : position]))


def replace_by(body: bytes) -> Callable[[random.Random], Act]:
    """Put other bytes after the place, or in the place of the whole body, with a status of success or of failure."""

    def make(generator: random.Random) -> Act:
        way = generator.choice(["inside", "cut", "200", "404", "409", "416", "500", "503"])

        async def act(answer: Answer, position: int, wire: Wire) -> None:
            head = answer.raw[: answer.head_bytes]
            if way == "inside":
                rest = len(answer.raw) - position
                await wire.send(answer.raw[:position] + (body * (rest // len(body) + 1))[:rest])
            elif way == "cut":
                await wire.send(answer.raw[:position] + body)
                await wire.cut()
            else:
                digest = xxhash.xxh3_128_hexdigest(body)
                head = set_headers(head, Content_Length=str(len(body)), X_Ckpt_Digest=digest)
                await wire.send(b"HTTP/1.1 " + way.encode() + head[12:] + body)

        return act

    return make


def lie_about_length(generator: random.Random) -> Act:
    lie = generator.choice(
        ["short", "zero", "long", "double", "negative", "huge", "absent", "duplicate", "word", "float", "chunked"]
    )

    async def act(answer: Answer, position: int, wire: Wire) -> None:
        true = len(answer.body)
        text = {
            "short": str(max(true - 1, 0)),
            "zero": "0",
            "long": str(true + 1),
            "double": str(2 * true + 1),
            "negative": "-1",
            "huge": "1" + "0" * 30,
            "absent": None,
            "duplicate": f"{true + 5}\r\nContent-Length: {true}",
            "word": "many",
            "float": f"{true}.5",
            "chunked": str(true),
        }[lie]
        more = {"Transfer_Encoding": "chunked"} if lie == "chunked" else {}
        await wire.send(answer.with_head(lambda head: set_headers(head, Content_Length=text, **more)))

    return act


def lie_about_etag(generator: random.Random) -> Act:
    etag = generator.choice([None, '""', '"another"', "x", '"' + "e" * 60000 + '"', '"\x00\xff"'])

    async def act(answer: Answer, position: int, wire: Wire) -> None:
        await wire.send(answer.with_head(lambda head: set_headers(head, ETag=etag)))

    return act


def lie_about_digest(generator: random.Random) -> Act:
    """Change the digest that comes with what is at the place: of the manifest, of a block, of a list of digests."""
    kind = generator.choice(["zeros", "other", "short"])

    async def act(answer: Answer, position: int, wire: Wire) -> None:
        if answer.kind == "manifest":
            lie = {"zeros": "0" * 32, "other": xxhash.xxh3_128_hexdigest(b"other"), "short": ""}[kind]
            await wire.send(answer.with_head(lambda head: set_headers(head, X_Ckpt_Digest=lie)))
            return
        blocks = answer.blocks()
        if not blocks:
            await wire.send(answer.with_body(answer.body.replace(b"a", b"b")))
            return
        block = blocks.start + max(position - answer.head_bytes, 0) // FRAME_BYTES
        end = min(answer.head_bytes + (block - blocks.start + 1) * FRAME_BYTES, len(answer.raw))
        lie_bytes = bytes(16) if kind == "zeros" else xxhash.xxh3_128_digest(b"other")
        await wire.send(answer.raw[: end - 16] + lie_bytes + answer.raw[end:])

    return act


def replay(generator: random.Random) -> Act:
    """Answer with what was answered at the place before: the answer to another request."""
    seen: list[bytes] = []

    async def act(answer: Answer, position: int, wire: Wire) -> None:
        await wire.send(seen[-1] if seen else answer.raw[:position] + answer.raw)
        seen.append(answer.raw)

    return act


def plain(act: Act) -> Callable[[random.Random], Act]:
    return lambda generator: act


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `persistent`: the errors of which one must come where it is there at every attempt on one block."""

    name: str
    make: Callable[[random.Random], Act]
    persistent: tuple[type[CheckpointError], ...] | None = ANY
    waits: bool = False
    timeout_s: float = 20.0
    stall_s: float = PATIENT_STALL_S
    expect: Expect = Expect.EITHER

    def __str__(self) -> str:
        return self.name


PAGE = b"<!DOCTYPE html><html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


def kinds_of_faults(marker: Path) -> list[Kind]:
    """Return every kind; the marker is what appears where something is unpickled."""
    mismatch = (DigestMismatchError,)
    return [
        Kind("cut", plain(cut), (SourceLostError,)),
        Kind("reset", plain(reset), (SourceLostError,)),
        Kind("stall", plain(stall), (TransferStalledError,), waits=True, stall_s=STALL_S),
        Kind("drip", plain(drip), (TransferTimeoutError,), waits=True, timeout_s=0.6),
        Kind("fragment", plain(fragment), None, expect=Expect.STATE),
        Kind("flip", flip, mismatch),
        Kind("repeat", repeat, None, waits=True, stall_s=STALL_S),
        Kind("reorder", reorder, mismatch, waits=True, stall_s=STALL_S),
        Kind("leave_out", leave_out, waits=True, timeout_s=5.0, stall_s=STALL_S),
        Kind("truncate", plain(truncate)),
        Kind("error_page", replace_by(PAGE), waits=True, stall_s=STALL_S),
        Kind("pickle", replace_by(pickle.dumps(Exploit(marker))), waits=True, stall_s=STALL_S),
        Kind("length", lie_about_length, None, waits=True, stall_s=STALL_S),
        Kind("etag", lie_about_etag),
        Kind("digest", lie_about_digest, (*mismatch, StateFormatError)),
        Kind("replay", replay, None, waits=True, timeout_s=5.0, stall_s=STALL_S),
    ]


NAMES = [kind.name for kind in kinds_of_faults(Path())]


def make_case(kind: Kind, mode: Mode, place: Place, generator: random.Random, *, once: bool) -> Case:
    """Put a kind of fault at a place, at the first time that it passes by, or each time."""
    act = kind.make(generator)
    several = len(mode.sources) > 1
    case = Case(f"{kind} at {place} {'once' if once else 'always'}", stall_s=kind.stall_s, timeout_s=kind.timeout_s)
    case.expect = kind.expect
    if several:  # the healthy source must not seem to stall where the machine is busy
        case.expect, case.timeout_s, case.stall_s = Expect.STATE, 20.0, PATIENT_STALL_S
    elif isinstance(place, AtBlock) and not once and kind.persistent is not None:
        case.expect, case.errors = Expect.ERROR, kind.persistent
    case.must_fire = isinstance(place, AtBlock) and not mode.fetch

    async def fault(answer: Answer, wire: Wire) -> None:
        position = place.find(answer)
        if position is None or (once and case.num_fired):
            await pass_on(answer, wire)
            return
        case.num_fired += 1
        wire.byte_s = case.timeout_s / _DRIPS
        await act(answer, position, wire)

    case.fault = fault
    return case


def make_cases(kind: Kind, mode: Mode) -> list[Case]:
    """Return the cases of one kind in one mode.

    The plain mode gets a block of every sort, before the block and before its digest, and the edges of every kind of answer; by
    default once and at every attempt in turns; random bytes. The other modes get every sort of block too, with one of those
    variants each.
    """
    generator = random.Random(f"{SEED} {kind} {mode}")
    num_random = NUM_RANDOM if not mode.fetch else max(NUM_RANDOM // 5, 1)
    places: list[tuple[Place, bool]] = []
    # What ends a receive at once, or is no fault, cannot be there a second time.
    times = (False,) if kind.name in ("stall", "drip", "fragment") else (False, True)
    for number, block in enumerate(BLOCKS.values()):
        variants = [(AtBlock(block, inside), once) for inside in (0, BLOCK_BYTES) for once in times]
        in_turn = [variants[number % 2], variants[3 - number % 2]] if len(variants) == 4 and not THOROUGH else variants
        places += in_turn if not mode.fetch else [generator.choice(variants)]
    for number, place in enumerate(edges_of(mode)):
        both = [(place, once) for once in times]
        in_turn = both if THOROUGH else [both[number % len(both)]]
        places += in_turn if not mode.fetch else [generator.choice(both)]
    answers = [what for what in KINDS if what != "blocks" and (THOROUGH or what in mode.asks)]
    if mode.fetch and not THOROUGH:
        answers = [generator.choice(answers)]
    for what in answers:
        places += [(Within(what, generator.randrange(1000)), False) for _ in range(max(num_random // 4, 1))]
    places += [(AtByte(generator.randrange(NUM_BYTES)), True) for _ in range(num_random)]
    places += [
        (AtBlock(generator.randrange(NUM_BLOCKS), generator.randrange(FRAME_BYTES)), False)
        for _ in range(max(num_random // 2, 1))
    ]
    return [make_case(kind, mode, place, generator, once=once) for place, once in places]


def edges_of(mode: Mode) -> list[AtEdge]:
    """Return the edges of answers at which every kind of fault is put.

    By default, what is asked in this mode: all edges of what every receive needs, and those of the other answers divided
    between the modes; the plain one gets all.
    """
    edges = []
    for number, what in enumerate(KINDS):
        alike = [other for other in modes_for(what, mode) if other.fetch]
        for index, edge in enumerate(EDGES):
            is_our_turn = bool(alike) and alike[(index + number) % len(alike)] == mode
            if THOROUGH or (what in mode.asks and (what in NEEDED or not mode.fetch or is_our_turn)):
                edges.append(AtEdge(what, edge))
    return edges


def test_the_modes_together_have_faults_at_every_edge_of_what_is_asked() -> None:
    asked = {what for mode in MODES for what in mode.asks}
    assert {AtEdge(what, edge) for what in asked for edge in EDGES} <= {
        edge for mode in MODES for edge in edges_of(mode)
    }


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_receive_asks_for_what_its_mode_says(bench: FaultBench, mode: Mode) -> None:
    """Else faults would be put where nothing passes, or left out where something does.

    Nobody seems to stall: what is begun anew looks first at what it has.
    """
    slot = bench.slot(mode, LAST_STALL_S)
    asked: set[str] = set()
    for _ in range(30):  # one source of two may be done before it has asked the other for all
        assert bench.judge_one(slot, mode, Case("asks", stall_s=LAST_STALL_S)) == []
        asked |= {kind_of(path) for path in slot.gate.paths}
        if asked >= set(mode.asks):
            break
    assert asked - {"peers"} == set(mode.asks)


def test_the_blocks_of_a_default_run_are_of_every_sort() -> None:
    """What the names of `SORTS_OF_BLOCKS` say, and that a block of each sort is among them."""
    encoder = TreeEncoder()
    encoder.encode(STATE)
    space = plan_space(encoder.tensors)
    frozen = next(tensor for tensor in space.placed if tensor.path == "frozen").chunks[0].segment

    def sort_of(block: int) -> tuple[object, ...]:
        start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, space.total_bytes)
        parts = {
            segment: min(begin + length, stop) - max(begin, start)
            for segment, (begin, length) in enumerate(zip(space.starts, space.lengths, strict=True))
            if begin < stop and begin + length > start
        }
        is_last = block == NUM_BLOCKS - 1
        return min(len(parts), 3), sum(parts.values()) < stop - start, set(parts) == {frozen}, block == 0, is_last

    every = {sort_of(block) for block in range(NUM_BLOCKS)}
    assert -(-space.total_bytes // BLOCK_BYTES) == NUM_BLOCKS
    assert {sort_of(block) for block in SORTS_OF_BLOCKS.values()} == every


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_under_a_fault_anywhere_the_state_arrives_or_a_named_error(bench: FaultBench, name: str, mode: Mode) -> None:
    (kind,) = (kind for kind in kinds_of_faults(bench.marker) if kind.name == name)
    print(f"seed {SEED}")
    tally = bench.run(mode, make_cases(kind, mode), concurrency=16 if kind.waits else 2)
    assert tally.num_unfired < tally.num_cases
    if len(mode.sources) == 1:
        assert bool(tally.errors) is (kind.expect is not Expect.STATE)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_flipped_bit_in_a_request_gives_the_state_or_a_named_error(bench: FaultBench, mode: Mode) -> None:
    """The source gets what the destination did not ask: another step, other blocks, another method, no HTTP at all."""
    generator = random.Random(f"{SEED} request {mode}")
    print(f"seed {SEED}")
    num_bytes = 300 * 10  # ten requests of about 300 bytes

    def flip_at(byte: int, bit: int) -> RequestFault:
        def fault(before: int, request: bytes) -> bytes:
            if not before <= byte < before + len(request):
                return request
            damaged = bytearray(request)
            damaged[byte - before] ^= 1 << bit
            return bytes(damaged)

        return fault

    expect = Expect.STATE if len(mode.sources) > 1 else Expect.EITHER
    cases = []
    for _ in range(2 * NUM_RANDOM):
        byte, bit = generator.randrange(num_bytes), generator.randrange(8)
        cases.append(
            Case(
                f"bit {bit} of byte {byte} of the requests",
                request_fault=flip_at(byte, bit),
                expect=expect,
                timeout_s=1.5 if len(mode.sources) == 1 else 20.0,
                stall_s=STALL_S if len(mode.sources) == 1 else PATIENT_STALL_S,
            )
        )
    bench.run(mode, cases, concurrency=10)


def test_what_would_run_when_unpickled_does_leave_a_marker(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Exploit(tmp_path / "marker"))).close()  # noqa: S301 - this is the thing that is looked for
    assert (tmp_path / "marker").exists()
