"""Runs thousands of receives through a proxy, each under a fault, and judges what came of each.

A case has two good outcomes: the state, equal in every bit, or a named error with what the destination had before untouched
(or, received in place, owned up to by `state_overwritten`). Always: within the deadline, nothing executed, and after a batch
no thread, no descriptor and no memory is left. It knows the public interface of the transport and nothing of its insides, so
the judgement holds whatever requests a receive makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import re
import resource
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from faulty_proxy import DIGEST_BYTES, Answer, AnswerFault, Gate, RequestFault, ScriptedProxy, Wire, pass_on

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.errors import StateFormatError, TransferError, TransferStalledError, TransferTimeoutError
from torchft_ckpt.testing.transport_conformance import differences

State = dict[str, Any]
BLOCK_BYTES = 4096
FRAME_BYTES = BLOCK_BYTES + DIGEST_BYTES
STEP = 7
LEASE = timedelta(minutes=30)
STALL_S = 0.3
PATIENT_STALL_S = 1.2
LAST_STALL_S = 15.0
"""Of a case that is run again alone, because its time was over before its fault was there."""
GIVE_WAY_S = 0.2
TIMEOUT_S = 20.0
SLACK_S = 10.0
"""How much later than its deadline a receive may end: scheduling on a busy machine, nothing that the library waits for."""
MEMORY_BYTES = 128 * 1024 * 1024
"""How much memory a batch may take: what several threads at once take from the allocator, and nothing that faults announce."""
SETTLE_S = 15.0
_OF_TIME = ("the fault's place never passed by", "the state must arrive", "another error than")
"""How complaints begin that a busy machine alone may be the cause of, if the error is that of a time that is over."""
_POOL_WORKER = re.compile(r"_[0-9]+\Z")


def make_state(seed: int) -> State:
    """Return a state of 17 blocks, whose segments begin and end within blocks; `frozen` is the same for every seed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(50, 100, generator=generator)
    return {
        "model": {"weight": weight, "tied": weight, "half": torch.randn(7, generator=generator).bfloat16()},
        "optim": {
            "exp_avg": torch.randn(5000, generator=generator),
            "count": torch.randint(2**40, (1000,), generator=generator),
            "flag": torch.tensor(bool(seed % 2)),
        },
        "frozen": torch.arange(4096, dtype=torch.float32),
        "last": torch.randn(1000, generator=generator),
        "step": seed,
    }


KINDS = ("manifest", "digests", "blake3", "peers", "blocks", "done", "samples")
"""The kinds of requests that a receive may make, by the last word of the path; it need not make each."""
NEEDED = ("manifest", "blocks")
"""Those without whose answers there is no state."""
NUM_BYTES = 76_000
"""About how many bytes of answers a receive gets."""
STATE = make_state(STEP)
OLD = make_state(STEP - 4)
NUM_BLOCKS = 17
SORTS_OF_BLOCKS = {
    "the first": 0,
    "within one tensor": 2,
    "two tensors, a whole one between them, padding": 4,
    "two tensors with padding between them": 9,
    "three tensors with padding between them": 11,
    "equal to what is here": 13,
    "two tensors without padding between them": 15,
    "the last, shorter": 16,
}
"""A block of every sort."""


@dataclass(frozen=True)
class Mode:
    """A way to receive. `sources` are told in this order: `faulty` is behind the proxy."""

    name: str
    sources: tuple[str, ...] = ("faulty",)
    fetch: bool = True
    local: bool = False
    in_place: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def asks(self) -> tuple[str, ...]:
        """The kinds of requests that such a receive makes where nothing is wrong and nothing slow."""
        several = len(self.sources) > 1
        samples = ("samples",) if self.local and not several else ()
        digests = ("digests",) if self.local or several else ()
        blake3 = (
            ("blake3",) if several and self.sources[0] == "faulty" else ()
        )  # of the first, for what the others give
        return ("manifest", "blocks", "done", *digests, *blake3, *samples)


RECV = Mode("recv", fetch=False)
MODES = [
    RECV,
    Mode("fetch_with_a_local_state", local=True),
    Mode("in_place", local=True, in_place=True),
    Mode("faulty_then_healthy", ("faulty", "healthy")),
    Mode("healthy_then_faulty_in_place", ("healthy", "faulty"), local=True, in_place=True),
]


def modes_for(kind: str, mode: Mode) -> list[Mode]:
    """Return the modes, this one among them or none, between which faults in answers of a kind are divided by default.

    Each has faults in what every receive needs: only modes that differ in where the state goes, and are alike in what they ask
    and whom, share them. What else is asked is shared by all that ask it.
    """
    if kind not in mode.asks:
        return []
    if kind in NEEDED:
        return [other for other in MODES if (other.fetch, len(other.sources)) == (mode.fetch, len(mode.sources))]
    return [other for other in MODES if kind in other.asks]


class Expect(Enum):
    """What must come of a case."""

    EITHER = "the state or a named error"
    STATE = "the state"
    ERROR = "a named error"


@dataclass
class Case:
    """One receive under one fault; the name says all that is needed to do it again."""

    name: str
    fault: AnswerFault = pass_on
    request_fault: RequestFault | None = None
    expect: Expect = Expect.EITHER
    errors: tuple[type[BaseException], ...] = (TransferError, StateFormatError)
    timeout_s: float = TIMEOUT_S
    stall_s: float = PATIENT_STALL_S
    must_fire: bool = False
    num_fired: int = 0
    ran_out_of_time: bool = False
    passed: list[str] = field(default_factory=list)
    """The answers that came by, in words."""
    _gives_way_until: float | None = None

    def may_have_more_time(self, found: Sequence[str]) -> bool:
        """Whether all that was found wrong is that its time was over too soon, and there is more to give."""
        is_short = self.timeout_s < TIMEOUT_S or self.stall_s < LAST_STALL_S
        return bool(found) and self.ran_out_of_time and is_short and all(text.startswith(_OF_TIME) for text in found)

    def give_more_time(self) -> None:
        """Four times the deadline, and a patience that a healthy source does not use up however busy the machine is."""
        self.timeout_s, self.stall_s = min(4 * self.timeout_s, TIMEOUT_S), LAST_STALL_S
        self.num_fired, self._gives_way_until = 0, None

    async def give_way(self, answer: Answer, wire: Wire) -> None:
        """What the proxy does with an answer of a healthy source that is the first: its blocks wait a moment for the fault.

        Else it would have brought so small a state before the faulty one is asked for anything.
        """
        if self._gives_way_until is None:
            self._gives_way_until = time.monotonic() + GIVE_WAY_S
        while answer.kind == "blocks" and not self.num_fired and time.monotonic() < self._gives_way_until:
            await asyncio.sleep(0.005)
        await pass_on(answer, wire)

    async def apply(self, answer: Answer, wire: Wire) -> None:
        """What the proxy does with an answer."""
        self.passed.append(f"{answer.kind} {list(answer.blocks())}" if answer.blocks() else answer.kind)
        await self.fault(answer, wire)


@dataclass
class Tally:
    """What became of the cases of one batch."""

    num_cases: int = 0
    num_states: int = 0
    num_unfired: int = 0
    num_again: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    took_s: float = 0.0

    def add(self, other: Tally) -> None:
        self.num_cases += other.num_cases
        self.num_states += other.num_states
        self.num_unfired += other.num_unfired
        for name, number in other.errors.items():
            self.errors[name] = self.errors.get(name, 0) + number

    def __str__(self) -> str:
        return (
            f"{self.num_cases} cases in {self.took_s:.1f} s: {self.num_states} states, {self.errors or 'no errors'}, "
            f"{self.num_unfired} without the fault, {self.num_again} again with more time"
        )


def make_transport(stall_s: float = PATIENT_STALL_S, **arguments: object) -> HTTPTransport:
    """Return a transport on loopback with small blocks and no limit on requests."""
    defaults: dict[str, object] = {
        "hostname": "127.0.0.1",
        "bind": "127.0.0.1",
        "block_bytes": BLOCK_BYTES,
        "stall_timeout": timedelta(seconds=stall_s),
        "max_total_bytes": 16 * 1024 * 1024,
        "max_requests_per_s": 1e6,
        "max_connections": 1000,
        "max_connections_per_client": 1000,
    }
    return HTTPTransport(**{**defaults, **arguments})  # type: ignore[arg-type]


class Exploit:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.marker), "w")


class Slot:
    """A source behind a gate, a healthy source of the same state, and destinations: for one case at a time."""

    def __init__(self, proxy: ScriptedProxy) -> None:
        self.source, self.healthy = make_transport(), make_transport()
        for transport in (self.source, self.healthy):
            transport.send_checkpoint([], STEP, STATE, LEASE)
        self.gate: Gate = proxy.gate(parse_metadata(self.source.metadata()).port)
        self.healthy_gate: Gate = proxy.gate(parse_metadata(self.healthy.metadata()).port)
        self._destinations: dict[float, HTTPTransport] = {}
        self.local = make_state(OLD["step"])
        self.received: State | None = None
        """What was received before: a failure later must not reach into it."""

    def close(self) -> None:
        """Shut everything down."""
        for transport in (self.source, self.healthy, *self._destinations.values()):
            transport.shutdown()

    def receive(self, mode: Mode, case: Case) -> State:
        """Receive as the mode says."""
        destination = self.destination(case.stall_s)
        destination._buffer_cache.clear()  # else what the case before brought is not asked for, and its fault not met
        for other in self._destinations.values():
            with other.lock.write():  # else it goes on to serve what it received, and blocks come past the gate
                pass
        timeout = timedelta(seconds=case.timeout_s)
        if not mode.fetch:
            return destination.recv_checkpoint(0, self.gate.url, STEP, timeout)
        urls = {"faulty": self.gate.url, "healthy": self.healthy.metadata()}
        if mode.sources[0] == "healthy":
            self.healthy_gate.arm(case.give_way)
            urls["healthy"] = self.healthy_gate.url
        local = self.local if mode.local else None
        return destination.fetch_checkpoint(  # type: ignore[attr-defined]
            [urls[name] for name in mode.sources], STEP, timeout, local_state=local, in_place=mode.in_place
        )

    def destination(self, stall_s: float) -> HTTPTransport:
        """Return this slot's destination with that stall timeout."""
        if stall_s not in self._destinations:
            self._destinations[stall_s] = make_transport(stall_s)
        return self._destinations[stall_s]

    def restore_local(self) -> None:
        """Give the destination its old state back."""
        for tensor, old in zip(_tensors(self.local), _tensors(OLD), strict=True):
            tensor.copy_(old)


def _tensors(state: State) -> list[torch.Tensor]:
    return [
        state["model"]["weight"],
        state["model"]["half"],
        *[state["optim"][name] for name in ("exp_avg", "count", "flag")],
        state["frozen"],
        state["last"],
    ]


class FaultBench:
    """Slots, made as they are needed, and the judgement."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker
        """A file that appears when somebody unpickles what the faults send."""
        self._proxy = ScriptedProxy()
        self._slots: list[Slot] = []
        self._is_warm: set[tuple[Mode, float, int]] = set()

    def close(self) -> None:
        """Shut everything down."""
        for slot in self._slots:
            slot.close()
        self._proxy.__exit__()

    def warm(self, mode: Mode, num_slots: int, stall_s: float) -> None:
        """Make slots, and receive with each that has not received so yet."""
        while len(self._slots) < num_slots:
            self._slots.append(Slot(self._proxy))
        for number, slot in enumerate(self._slots[:num_slots]):
            if (mode, stall_s, number) not in self._is_warm:
                assert self.judge_one(slot, mode, Case("warm up", stall_s=stall_s)) == []
                self._is_warm.add((mode, stall_s, number))

    def run(self, mode: Mode, cases: Sequence[Case], *, concurrency: int) -> Tally:
        """Run cases, several at once; raise AssertionError with the names of those that came out wrong.

        A case whose time was over before its fault was there, or before a healthy source was done, has shown nothing, but that
        the machine was busy: it is run again alone, with more time.
        """
        for stall_s in {case.stall_s for case in cases}:
            self.warm(mode, concurrency, stall_s)
        self.warm(mode, 1, LAST_STALL_S)
        free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._slots[:concurrency]:
            free.put(slot)
        tally, complaints = Tally(), []
        hasty: list[Case] = []
        before = self.census()

        def work(case: Case, slot: Slot) -> None:
            tried = Tally()
            found = self._run(slot, mode, case, tried)
            if case.may_have_more_time(found):
                hasty.append(case)
            else:
                tally.add(tried)
                complaints.extend(f"{mode}: {case.name}: {text}" for text in found)

        def work_on_any(case: Case) -> None:
            slot = free.get()
            try:
                work(case, slot)
            finally:
                free.put(slot)

        started = time.monotonic()
        with peak_memory() as peak, ThreadPoolExecutor(concurrency, "fault-matrix") as executor:
            list(executor.map(work_on_any, cases))
            while hasty:
                case = hasty.pop()
                case.give_more_time()
                tally.num_again += 1
                executor.submit(work, case, self._slots[0]).result()
        tally.took_s = time.monotonic() - started
        print(f"{mode}: {tally}")
        if self.marker.exists():
            complaints.append(f"{mode}: something was unpickled")
            self.marker.unlink()
        if peak[0] > MEMORY_BYTES:
            complaints.append(f"{mode}: memory grew by {peak[0]} bytes")
        complaints.extend(f"{mode}: left behind: {text}" for text in self.settle(before))
        assert not complaints, f"{len(complaints)} complaints:\n" + "\n".join(complaints[:8])
        return tally

    def _run(self, slot: Slot, mode: Mode, case: Case, tally: Tally) -> list[str]:
        slot.restore_local()
        slot.gate.arm(case.apply, case.request_fault)
        started = time.monotonic()
        state: State | None = None
        error: Exception | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state = slot.receive(mode, case)
        except Exception as raised:  # which one is what is judged
            error = raised
        took_s = time.monotonic() - started
        slot.gate.hang_up()  # an answer that is late must not meet its fault while the case is judged
        case.ran_out_of_time = isinstance(error, (TransferTimeoutError, TransferStalledError))
        tally.num_cases += 1
        tally.num_unfired += not case.num_fired
        if error is None:
            tally.num_states += 1
        else:
            name = type(error).__name__
            tally.errors[name] = tally.errors.get(name, 0) + 1
        complaints = judge(slot, mode, case, state, error)
        if took_s > case.timeout_s + SLACK_S:
            complaints.append(f"took {took_s:.1f} s with a deadline of {case.timeout_s} s")
        slot.received = None if state is None or mode.in_place else state
        return complaints

    def slot(self, mode: Mode, stall_s: float) -> Slot:
        """Return the first slot, warm."""
        self.warm(mode, 1, stall_s)
        return self._slots[0]

    def judge_one(self, slot: Slot, mode: Mode, case: Case) -> list[str]:
        """Run one case alone, with more time if that was over too soon; return what is wrong with its outcome."""
        found = self._run(slot, mode, case, Tally())
        if case.may_have_more_time(found):
            case.give_more_time()
            found = self._run(slot, mode, case, Tally())
        return found

    def census(self) -> tuple[int, int]:
        """How many threads and descriptors there are, without those that the proxy keeps for the next case."""
        for slot in self._slots:
            slot.gate.arm()
            slot.healthy_gate.arm()
        self._proxy.drop_spare()
        return len(thread_names()), len(os.listdir("/proc/self/fd"))

    def settle(self, before: tuple[int, int]) -> list[str]:
        """Wait until there are no more threads and descriptors than before; return what there is too much."""
        until = time.monotonic() + SETTLE_S
        while True:
            now = self.census()
            if now[0] <= before[0] and now[1] <= before[1]:
                return []
            if time.monotonic() > until:
                return [f"{before} threads and descriptors before, {now} after: {thread_names()}"]
            threading.Event().wait(0.05)  # sockets close on other threads


@contextlib.contextmanager
def fault_bench(directory: Path) -> Iterator[FaultBench]:
    """Give a bench, and see afterwards that nothing of it is left."""
    gc.collect()
    before = (thread_names(), len(os.listdir("/proc/self/fd")))
    bench = FaultBench(directory / "marker")
    try:
        yield bench
    finally:
        bench.close()
    assert (thread_names(), len(os.listdir("/proc/self/fd"))) == before


def judge(slot: Slot, mode: Mode, case: Case, state: State | None, error: Exception | None) -> list[str]:
    """Return what is wrong with the outcome of a case."""
    complaints = []
    if case.must_fire and not case.num_fired:
        complaints.append(f"the fault's place never passed by, but {case.passed}; it ended with {error!r}")
    if slot.received is not None and differences(slot.received, STATE):
        complaints.append("a state that was received earlier has changed")
    untouched = not differences(slot.local, OLD)
    if error is None:
        found = differences(state, STATE)
        if found:
            complaints.append(f"a wrong state was returned: {found[:3]}")
        if case.expect is Expect.ERROR and case.num_fired:
            complaints.append("a state came where only an error can be right")
        if mode.in_place and state is not None and not found:
            pairs = zip(_tensors(state), _tensors(slot.local), strict=True)
            if any(a.data_ptr() != b.data_ptr() for a, b in pairs):
                complaints.append("received in place, but not into the memory of the local state")
        elif not untouched:
            complaints.append("the local state was changed, though not received in place")
        return complaints
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, (TransferError, StateFormatError)):
        complaints.append("no named error: " + "".join(traceback.format_exception(error))[-1500:])
    elif case.num_fired and case.expect is Expect.ERROR and not isinstance(error, case.errors):
        complaints.append(f"another error than {[kind.__name__ for kind in case.errors]}: {text}")
    if case.expect is Expect.STATE or (not case.num_fired and case.request_fault is None):
        complaints.append(f"the state must arrive: {text}")
    overwritten = bool(getattr(error, "state_overwritten", False))
    if not untouched and not (mode.in_place and overwritten):
        complaints.append(f"the old state was changed and the error does not own up to it: {text}")
    if overwritten != ("the state that was here is torn" in text):
        complaints.append(f"what the error says is not what its flag says: {text}")
    return complaints


def thread_names() -> list[str]:
    """The threads that there are, but for the workers of thread pools: those are few, and stay as long as their owner."""
    return sorted(thread.name for thread in threading.enumerate() if not _POOL_WORKER.search(thread.name))


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Give a list whose first item is, after the block, by how many bytes the resident memory had grown at most."""
    gc.collect()
    result = [0]
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not allowed here: the peak of all times is all that is known
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        yield result
        result[0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        return
    before = _status_bytes("VmRSS")
    yield result
    result[0] = _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
