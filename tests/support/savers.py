"""Members of a job that save one checkpoint together, in one process and in imagined time. What happens when is always the
same.

Each member is a thread with a file system of its own (`scripted_fs`) over one disk. One of them runs at a time: it hands over
where it waits, and before each operation of its file system, which takes as long as the test says. So a member can die at any
operation, or be slow, while the others go on; hours pass in milliseconds, and the same case gives the same story.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.newest import newest_whole
from support.resharding import Layout, imagined_rank
from support.scripted_fs import Disk, Fault, File, ScriptedSystem
from support.spmd_double import bits_of
from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.dividing import ShareBook
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex
from torchft_ckpt.checkpointing.durable.saving.saver import (
    SavedCheckpoint,
    SaveMode,
    SaveOnlooker,
    SaveTask,
    SaveWorker,
)
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.core.durable.saving import SavingRank, Writers

LOCATION = "/c"
FILL_AFTER_S = 5.0
TIMEOUT_S = 600.0
_STUCK_S = 60.0
_OPERATION_S = 0.0005
MANIFEST_S = 0.006
"""To read one."""

SHARDED = {
    "model.weight": Layout((2,), ((0, 0),)),
    "model.columns": Layout((2,), ((0, 1),)),
    "model.uneven": Layout((2,), ((0, 0),)),
}
"""How tensors lie on two ranks; the others are whole on both."""


def state_of(step: int) -> dict[str, Any]:
    """The whole state of a step: large enough that boxes are cut between members, and with things that are no tensors."""
    generator = torch.Generator().manual_seed(step)

    def bits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        size = torch.empty(shape, dtype=dtype)
        raw = torch.randint(0, 256, (size.numel() * size.element_size(),), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).view(shape)

    return {
        "model": {
            "weight": bits(512, 128),
            "table": bits(320, 128),
            "columns": bits(3, 10, dtype=torch.bfloat16),
            "uneven": bits(3, 5, dtype=torch.int64),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {"step": torch.tensor(step), "lr": 0.1 * step, "betas": (0.9, 0.99), 7: None},
        "name": f"step {step}",
        "array": np.arange(5) + step,
    }


@cache
def _states(step: int, num_ranks: int) -> list[dict[str, Any]]:
    """The state as each rank of a group has it; replicas share its memory, nobody writes to it."""
    layouts = SHARDED if num_ranks == 2 else {}
    made = []
    for rank in range(num_ranks):
        state = state_of(step)
        with imagined_rank(rank, num_ranks):
            for path, layout in layouts.items():
                key = path.removeprefix("model.")
                state["model"][key] = layout.make(state["model"][key], rank)
        made.append(state)
    return made


class ImaginedTime:
    """A clock that moves when all wait, and the threads that it wakes one by one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, threading.Lock]] = []
        """When whose turn is. A turn is a lock that is let go when it comes, and taken by the thread that waited for it."""
        self._tickets = itertools.count()
        self._here = threading.local()
        self._done = threading.Event()

    def __call__(self) -> float:
        return self.now_s

    def run(self, jobs: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """Run each job from its time on, until all have ended."""
        threads = []
        for start_s, job in jobs:
            turn = threading.Lock()
            turn.acquire()
            heapq.heappush(self._queue, (self.now_s + start_s, next(self._tickets), turn))
            threads.append(threading.Thread(target=self._run, args=(turn, job), daemon=True))
        for thread in threads:
            thread.start()
        self._done.clear()
        self._next()
        assert self._done.wait(_STUCK_S), "a member does not end"
        for thread in threads:
            thread.join(_STUCK_S)

    def has_turns(self) -> bool:
        """Whether this thread is one of `run`'s."""
        return hasattr(self._here, "turn")

    def wait(self, seconds: float) -> None:
        """Let the others go first for so long. Only on a thread of `run`'s."""
        turn = self._here.turn
        heapq.heappush(self._queue, (self.now_s + max(seconds, 0.0), next(self._tickets), turn))
        self._next()
        assert turn.acquire(timeout=_STUCK_S), "nobody hands over"

    def _run(self, turn: threading.Lock, job: Callable[[], None]) -> None:
        self._here.turn = turn
        assert turn.acquire(timeout=_STUCK_S), "nobody hands over"
        try:
            job()
        finally:
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._done.set()
            return
        self.now_s, _, turn = heapq.heappop(self._queue)
        turn.release()


class ImaginedEvent(threading.Event):
    """An event that is waited for in imagined time."""

    def __init__(self, time: ImaginedTime) -> None:
        super().__init__()
        self._time = time

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._time.wait(timeout)
        return self.is_set()


class TimedSystem(ScriptedSystem):
    """A process whose operations take time; `costs` says how long the one of a number takes, where it is not the usual."""

    def __init__(
        self,
        time: ImaginedTime,
        faults: Mapping[int, Fault] | None = None,
        *,
        disk: Disk,
        costs: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__(faults, disk=disk)
        self._time = time
        self._costs = dict(costs or {})
        self._owed_s = 0.0
        """What threads that have no turn have waited for; the member makes up for it at its next operation."""
        self._owed_lock = threading.Lock()

    def _operation(
        self, name: str, path: str, detail: str = "", file: File | None = None, data: memoryview | None = None
    ) -> Any:
        usual_s = MANIFEST_S if name == "open_existing" and "/part-" in path else _OPERATION_S
        with self._owed_lock:
            self._owed_s += self._costs.get(len(self.log), usual_s)
            seconds = self._owed_s
            if self._time.has_turns():
                self._owed_s = 0.0
        if self._time.has_turns():
            self._time.wait(seconds)
        return super()._operation(name, path, detail, file, data)


@dataclass(frozen=True)
class Plan:
    """Who saves, and how."""

    num_replicas: int = 1
    num_ranks: int = 1
    step: int = 120
    save_id: str = "q3-1a2b3c4d"
    redundancy: int = 2
    mode: SaveMode = SaveMode.SHARED
    fill_after_s: float = FILL_AFTER_S
    timeout_s: float = TIMEOUT_S
    absent: frozenset[int] = frozenset()
    """Members that do not even begin."""

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(self.step, self.save_id)

    @property
    def writers(self) -> Writers:
        redundancy = 1 if self.mode is SaveMode.EVERY_GROUP else self.redundancy
        return Writers(self.num_replicas, self.num_ranks, redundancy=redundancy)

    @property
    def members(self) -> list[int]:
        return [member for member in range(self.num_replicas * self.num_ranks) if member not in self.absent]


def worker_of(
    plan: Plan,
    member: int,
    storage: Storage,
    time: ImaginedTime | None = None,
    state_of_rank: dict[str, Any] | None = None,
) -> SaveWorker:
    """Return the worker of a member that has captured its state; without a time, in that of the clock."""
    replica, rank = divmod(member, plan.num_ranks)
    state = CapturedState(
        _states(plan.step, plan.num_ranks)[rank] if state_of_rank is None else state_of_rank,
        step=plan.step,
        own={"user": [plan.step, member], "random": None},
        lock=StateDictLock(),
        pool=BufferPool(64 * 1024),
        index=HoldingsIndex(rank, plan.num_ranks),
    )
    task = SaveTask(
        storage=storage,
        name=plan.name,
        member=SavingRank(replica, rank),
        writers=plan.writers._replace(replica_id=f"group_{replica}"),
        mode=plan.mode,
        is_storage_shared=True,
        fill_after_s=plan.fill_after_s,
        timeout_s=plan.timeout_s,
    )
    if time is None:
        return SaveWorker(task, state, ShareBook())
    worker = SaveWorker(task, state, ShareBook(), clock=time)
    worker._woken = ImaginedEvent(time)
    return worker


@dataclass
class Story:
    """What became of a save."""

    plan: Plan
    time: ImaginedTime
    systems: dict[int, TimedSystem] = field(default_factory=dict)
    workers: dict[int, SaveWorker] = field(default_factory=dict)
    onlooker: SaveOnlooker | None = None

    @property
    def disk(self) -> Disk:
        return next(iter(self.systems.values())).disk

    def future(self, member: int) -> Future[SavedCheckpoint]:
        return self.workers[member].future

    def errors(self) -> dict[int, BaseException]:
        """Of those that failed."""
        found = {member: worker.future.exception(0) for member, worker in self.workers.items()}
        return {member: error for member, error in found.items() if error is not None}

    def saved(self) -> dict[int, SavedCheckpoint]:
        """Of those that did not."""
        failed = self.errors()
        return {member: self.future(member).result(0) for member in self.workers if member not in failed}

    def log(self) -> str:
        """Every operation of everybody, for a message."""
        lines = [f"{self.plan} ended at {self.time.now_s:.2f} s"]
        for member, system in self.systems.items():
            error = self.workers[member].future.exception(0)
            lines += [f"member {member}: {type(error).__name__}: {error}", *map(str, system.log)]
        return "\n".join(lines)


def save(
    plan: Plan,
    disk: Disk | None = None,
    *,
    faults: Mapping[int, Mapping[int, Fault]] | None = None,
    costs: Mapping[int, Mapping[int, float]] | None = None,
    starts_s: Mapping[int, float] | None = None,
    leaves_s: Mapping[int, float] | None = None,
    onlooker: tuple[float, float | None] | None = None,
    storage_class: type[LocalStorage] = LocalStorage,
) -> Story:
    """Have all members save; return when each has ended, one way or another.

    Args:
        plan: who saves what.
        disk: where to.
        faults: by member, what happens at which of its operations.
        costs: by member, how long which of its operations takes.
        starts_s: by member, when it begins.
        leaves_s: by member, from when on it would rather go on to its next save.
        onlooker: there is one: when it begins, and when it goes on to its next save.
        storage_class: what it is written by.
    """
    disk = disk or Disk()
    story = Story(plan, ImaginedTime())
    for member in plan.members:
        system = TimedSystem(story.time, (faults or {}).get(member), disk=disk, costs=(costs or {}).get(member))
        story.systems[member] = system
        story.workers[member] = worker_of(plan, member, storage_class(LOCATION, system), story.time)
    starts = starts_s or {}
    jobs = [(starts.get(member, 0.0), worker.run) for member, worker in story.workers.items()]
    jobs += [(at, partial(_leave, story, member)) for member, at in (leaves_s or {}).items()]
    if onlooker is not None:
        jobs += _look_on(story, storage_class(LOCATION, TimedSystem(story.time, disk=disk)), *onlooker)
    story.time.run(jobs)
    return story


def _look_on(
    story: Story, storage: Storage, begins_s: float, leaves_s: float | None
) -> list[tuple[float, Callable[[], None]]]:
    """What an onlooker does, and when."""
    plan = story.plan

    def run() -> None:
        looks = story.onlooker = SaveOnlooker(
            plan.name, storage, fill_after_s=plan.fill_after_s, timeout_s=plan.timeout_s, clock=story.time
        )
        looks._woken = ImaginedEvent(story.time)
        looks.run()

    def leave() -> None:
        assert story.onlooker is not None and story.onlooker.leave(), "it holds no save up"

    return [(begins_s, run), *([] if leaves_s is None else [(leaves_s, leave)])]


def _leave(story: Story, member: int) -> None:
    worker = story.workers[member]
    while not worker.future.done() and not worker.leave():
        story.time.wait(0.003)


def plain_storage(disk: Disk) -> LocalStorage:
    """Return what a process that starts now sees."""
    return LocalStorage(LOCATION, ScriptedSystem(disk=disk))


def newest_step(disk: Disk) -> int:
    """Return the step of the newest whole checkpoint, having seen that all of it is what was saved, bit by bit."""
    checkpoint = newest_whole([plain_storage(disk)])
    check_state(CheckpointReader(checkpoint, num_threads=1), checkpoint.name.step)
    return checkpoint.name.step


_expected = cache(state_of)


def check_state(reader: CheckpointReader, step: int) -> None:
    """See that a checkpoint holds the state of a step."""
    expected = _expected(step)
    tensors = {
        **{f"model.{key}": tensor for key, tensor in expected["model"].items()},
        "optimizer.step": expected["optimizer"]["step"],
        "array": torch.from_numpy(expected["array"]),
    }
    assert set(reader.tensors) == set(tensors)
    wants = [Want(fqn, whole(tuple(tensor.shape)), torch.zeros_like(tensor)) for fqn, tensor in tensors.items()]
    reader.read([want for want in wants if want.box.volume])
    for want in wants:
        # numpy: torch would wake its threads for each, thousands of times.
        assert np.array_equal(bits_of(want.target).numpy(), bits_of(tensors[want.name]).numpy()), want.name
    values = {fqn: value for fqn, (_, value) in reader.values().items()}
    assert values.pop("array").tolist() == expected["array"].tolist()
    rest = expected["optimizer"]
    assert values == {
        "optimizer.lr": rest["lr"],
        "optimizer.betas": rest["betas"],
        "optimizer.7": None,
        "name": expected["name"],
    }


def put_on(disk: Disk, directory: Path) -> Path:
    """Write the files of a disk to a real directory; return that of the checkpoints."""
    for path, content in disk.files().items():
        target = directory / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return directory / LOCATION.lstrip("/")


@contextmanager
def no_threads_left() -> Iterator[None]:
    """See that no thread is there afterwards that was not there before."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    for thread in left:
        thread.join(60)
    assert not [thread for thread in left if thread.is_alive()]
