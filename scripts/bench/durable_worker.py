"""One rank of the durable benchmark: holds its part of the state, saves it, loads it, and does what the benchmark tells it.

Each command is a method; its keyword arguments and its answer are plain values. `durable_group` is the other end.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bench.durable_counting import CountingReader, counting_ours
from bench.durable_model import Model
from bench.wire import Reporter, serve
from torchft_ckpt import Checkpointer, Manager, ProcessGroupGloo
from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.checkpointing.durable.cooperative_read.lookup import Candidates
from torchft_ckpt.checkpointing.durable.cooperative_read.ranks import Ranks
from torchft_ckpt.checkpointing.durable.names import checkpoint_name
from torchft_ckpt.checkpointing.durable.reading.loading import load_into
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.checkpointing.durable.saving.dividing import ShareBook
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex
from torchft_ckpt.checkpointing.durable.saving.saver import SaveMode, SaveTask, SaveWorker
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import open_storage
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.state.blocks import DEFAULT_BLOCK_BYTES
from torchft_ckpt.core.durable.saving import SavingRank, Writers

Answer = dict[str, Any]
TIMEOUT = timedelta(seconds=120)
OURS = "ours"
GROUPS = "ours, two groups"
ALONE = "ours, each rank alone"
DCP = "dcp"
DCP_LOCAL = "dcp, rank-local"
DCP_ASYNC = "dcp async"
DCP_ASYNC_LOCAL = "dcp async, rank-local"
DCP_ASYNC_KEPT = "dcp async, buffers kept"


class Worker:
    """Runs in the process of one rank.

    Args:
        rank, world_size: of this one in its process group.
        init_method: where that group meets; empty: nobody is there, which does where nothing is communicated.
        replica: the number of its group, where there are two.
    """

    def __init__(self, rank: int, world_size: int, init_method: str, replica: int = 0) -> None:
        if init_method:
            dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=TIMEOUT)
        else:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        self._rank = rank
        self._replica = replica
        self._model: Model | None = None
        self._checkpointer: Checkpointer | None = None
        self._guarded: torch.optim.Optimizer | None = None
        self._hook_s: list[float] = []
        self._copies: list[torch.Tensor] = []
        self._stager: DefaultStager | None = None

    @property
    def model(self) -> Model:
        """What is held."""
        assert self._model is not None
        return self._model

    # What is held

    def hold(self, layout: str, dim: int, quick: bool, version: int, width: int = 0) -> Answer:
        """Hold a model, filled with a version."""
        self._model = Model(layout, dim=dim, quick=quick, width=width)
        self.model.fill(version)
        return {"held_bytes": self.model.held_bytes, "unique_bytes": self.model.unique_bytes}

    def fill(self, version: int) -> Answer:
        """Give every element another value."""
        self.model.fill(version)
        return {}

    # Saving

    def open(self, location: str, num_groups: int = 1, redundancy: int = 2) -> Answer:
        """Make a Checkpointer, and an optimizer that it guards. Where there are more groups, it saves as the second of them."""
        self._checkpointer = Checkpointer(location, timeout=TIMEOUT, save_random_state=False, redundancy=redundancy)
        if num_groups > 1:
            alone = self._checkpointer._alone
            assert alone is not None
            self._checkpointer._alone = alone._replace(replica=1, num_replicas=num_groups)
        self._guarded = optimizer = self.model.optimizer()
        began: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: began.append(time.perf_counter()))
        self._checkpointer.guard_optimizer(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._hook_s.append(time.perf_counter() - began.pop()))
        return {}

    def save(self, how: str, location: str, step: int, at: float, of_manager: bool = False) -> Answer:
        """Save, and wait until the checkpoint is closed. `of_manager`: as a Manager's state, for `restore`."""
        state = self.model.state_dict()
        if of_manager:
            state = {**state, "torchft": {"step": step, "batches_committed": 0}}
        time.sleep(max(at - time.monotonic(), 0.0))
        self._begin(how, location, step, state)()
        return {"ended": time.monotonic()}

    def hold_up(
        self, how: str, location: str, step: int, copy_at: float, save_at: float, busy_s: float, closes: bool = True
    ) -> Answer:
        """Copy what is held; and begin a save, run a forward and backward pass, and step. Say how long each took.

        Args:
            how, location, step: of the save.
            copy_at: when to copy, CLOCK_MONOTONIC; before or after the save.
            save_at: when to save.
            busy_s: how long the passes take.
            closes: False: others would have to write their shares; the save is given up, and it is said what was staged.
        """
        copied = self._copy(copy_at) if copy_at < save_at else None
        self._step()
        idle_s = self._hook_s[-1]
        state = self.model.state_dict()
        time.sleep(max(save_at - time.monotonic(), 0.0))
        before = time.perf_counter()
        finish = self._begin(how, location, step, state)
        save_s = time.perf_counter() - before
        _be_busy(busy_s)
        self._step()
        hook_s = self._hook_s[-1] - idle_s
        staged = {} if closes else self._staged()
        if closes:
            finish()
        copied = copied or self._copy(copy_at)
        return {"save_s": save_s, "hook_s": hook_s, **copied, **staged}

    def _staged(self) -> Answer:
        """Say what the save in flight has copied aside, and end it."""
        checkpointer = self._checkpointer
        assert checkpointer is not None and checkpointer._worker is not None
        worker = checkpointer._worker
        snapshot = worker._state.snapshot
        staged_bytes = snapshot.statistics().num_blocks_copied_aside * snapshot.block_bytes
        shares = worker.stage()
        worker.cancel()
        checkpointer.wait()
        return {
            "staged_bytes": staged_bytes,
            "share_bytes": sum(share.num_bytes for share in shares),
            "held_bytes": self.model.held_bytes,
            "num_tensors": len(self.model.held),
        }

    def _copy(self, at: float) -> Answer:
        if not self._copies:
            self._copies = [torch.ones_like(held.local) for held in self.model.held]
        time.sleep(max(at - time.monotonic(), 0.0))
        before = time.perf_counter()
        for copy, held in zip(self._copies, self.model.held, strict=True):
            copy.copy_(held.local)
        copy_s = time.perf_counter() - before
        before = time.perf_counter()
        clones = [held.local.clone() for held in self.model.held]
        clone_s = time.perf_counter() - before
        del clones
        return {"copy_s": copy_s, "clone_s": clone_s}

    def _step(self) -> None:
        assert self._guarded is not None
        self._guarded.step()

    def _begin(self, how: str, location: str, step: int, state: dict[str, Any]) -> Callable[[], object]:
        """Begin a save; return what waits for its end."""
        if how == OURS:
            assert self._checkpointer is not None
            return self._checkpointer.save(state, step=step).result
        if how == GROUPS:
            return self._save_in_groups(location, step, state).result
        writer = dcp.FileSystemWriter(location, sync_files=True)
        with_collectives = how not in (DCP_LOCAL, DCP_ASYNC_LOCAL)
        if how in (DCP, DCP_LOCAL):
            dcp.save(state, storage_writer=writer, use_collectives=with_collectives)
            return lambda: None
        stager = self._stager if how == DCP_ASYNC_KEPT else None
        if stager is None:
            stager = DefaultStager(StagingOptions(False, False, False, False))
        if how == DCP_ASYNC_KEPT:
            self._stager = stager
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager, use_collectives=with_collectives)
        assert isinstance(future, Future)
        if stager is not self._stager:
            future.add_done_callback(lambda _: stager.close())
        return future.result

    def _save_in_groups(self, location: str, step: int, state: dict[str, Any]) -> Future[Any]:
        world_size = dist.get_world_size()
        captured = CapturedState(
            state,
            step=step,
            own={},
            lock=StateDictLock(),
            pool=BufferPool(DEFAULT_BLOCK_BYTES),
            index=HoldingsIndex(self._rank, world_size),
        )
        task = SaveTask(
            storage=open_storage(location),
            name=checkpoint_name(step, "q1-bench"),
            member=SavingRank(self._replica, self._rank),
            writers=Writers(2, world_size, f"group-{self._replica}", redundancy=2),
            mode=SaveMode.SHARED,
            is_storage_shared=True,
            fill_after_s=30.0,
            timeout_s=TIMEOUT.total_seconds(),
        )
        worker = SaveWorker(task, captured, ShareBook())
        worker.run()
        return worker.future

    # Loading

    def load(self, how: str, location: str, at: float, version: int) -> Answer:
        """Forget what is held, load it, and check it.

        Args:
            how: `OURS`, as `ALONE`, or `DCP`.
            location: of all checkpoints with ours, of the one with DCP.
            at: when to begin, CLOCK_MONOTONIC.
            version: that is expected.
        """
        self.model.clear()
        state = self.model.state_dict()
        time.sleep(max(at - time.monotonic(), 0.0))
        if how == DCP:
            reader = CountingReader(location)
            dcp.load(state, storage_reader=reader)
            num_bytes = reader.count.num_bytes
        else:
            with counting_ours() as count:
                newest = Candidates([open_storage(location)], Ranks(), step=None).newest().checkpoint
                load_into(CheckpointReader(newest), state)
            num_bytes = count.num_bytes
        ended = time.monotonic()
        return {
            "ended": ended,
            "read_bytes": num_bytes,
            "wrong": self.model.wrong(version, state)[:5],
        }

    def restore(self, location: str, at: float, version: int, lighthouse: str, job: str, num_groups: int) -> Answer:
        """Forget what is held, restore it as one of groups that start together, and check it.

        Args:
            location, at, version: as of `load`.
            lighthouse: its address.
            job: another one each time.
            num_groups: so many start.
        """
        self.model.clear()
        state = self.model.state_dict()

        def load(received: dict[str, Any], into: dict[str, Any] = state) -> None:
            for name, value in received.items():
                if isinstance(value, dict):
                    load(value, into[name])
                elif not isinstance(value, torch.Tensor):
                    into[name] = value
                elif value is not into[name]:
                    into[name].copy_(value)

        manager = Manager(
            ProcessGroupGloo(timeout=TIMEOUT),
            load,
            lambda: state,
            min_replica_size=num_groups,
            lighthouse_addr=lighthouse,
            replica_id=f"group-{self._rank}",
            rank=0,
            world_size=1,
            job=job,
            hostname="127.0.0.1",
            timeout=TIMEOUT,
        )
        checkpointer = Checkpointer(location, manager=manager, save_random_state=False)
        try:
            time.sleep(max(at - time.monotonic(), 0.0))
            with counting_ours() as count:
                restored = checkpointer.restore()
            ended = time.monotonic()
        finally:
            checkpointer.shutdown()
            manager.shutdown()
        return {
            "ended": ended,
            "read_bytes": count.num_bytes,
            "peer_bytes": restored.bytes_from_peers,
            "wrong": self.model.wrong(version, state)[:5],
        }


def _be_busy(for_s: float) -> None:
    """Multiply matrices, as a forward and backward pass does."""
    matrix = torch.ones(256, 256)
    until = time.perf_counter() + for_s
    while time.perf_counter() < until:
        matrix = matrix @ matrix * 1e-3


def main() -> None:
    """Say hello, do as told until the parent is gone."""
    reporter = Reporter()
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as torchrun does where a machine has several ranks
    worker = Worker(**json.loads(sys.argv[1]))
    serve(worker, reporter)


if __name__ == "__main__":
    main()
