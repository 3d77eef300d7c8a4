"""A process that uses one public class and then ends, in one of three ways: `process_ends.py CLASS WAY`.

It goes through the whole end of its interpreter, which is held up for a moment on purpose: a thread that is still in C++ then
comes back while the interpreter ends, which aborts the process.
"""

from __future__ import annotations

import atexit
import functools
import logging
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ReduceOp, TCPStore

import torchft_ckpt
from support.ports import reserved_port
from torchft_ckpt import (
    Checkpointer,
    DiLoCo,
    DistributedDataParallel,
    HTTPTransport,
    LighthouseServer,
    LocalSGD,
    Manager,
    Optimizer,
    PeerReader,
    ProcessGroup,
    ProcessGroupGloo,
)
from torchft_ckpt.process_group import ManagedProcessGroup, ProcessGroupDummy
from torchft_ckpt.threads import in_background

WAYS = ["shutdown", "return", "raise"]
MESSAGE = "the training loop failed"
LIMIT_S = 90
LONG = timedelta(seconds=60)
_OF_TORCH = re.compile(r"\[[WE]\d{4} |Exception raised from |frame #\d+|<omitting python frames>")
"""What torch writes to stderr by itself."""
_kept: list[Any] = []
"""What a script holds in its globals until its end."""


def keep(thing: Any) -> Any:
    _kept.append(thing)
    return thing


class Ends(NamedTuple):
    """How one process ended, and why that is wrong; empty where it is not."""

    way: str
    status: int
    stderr: str

    @property
    def wrong(self) -> str:
        said = [line for line in self.stderr.splitlines() if line and not _OF_TORCH.match(line)]
        if self.way != "raise":
            return (
                ""
                if self.status == 0 and not said
                else f"{self.way}: ended with {self.status}, {self.stderr[-3000:]!r}"
            )
        own = len(said) > 1 and said[0].startswith("Traceback") and said[-1] == f"RuntimeError: {MESSAGE}"
        is_alone = self.stderr.count("Traceback") == 1
        return (
            "" if self.status == 1 and own and is_alone else f"raise: ended with {self.status}, {self.stderr[-3000:]!r}"
        )


# ------------------------------------------------------------------------------------------- what the processes do
# Each yields where the training loop ends; what follows is its shutdown. Something is in flight then.


def group(name: str, lighthouse: LighthouseServer, num_groups: int = 1, **options: Any) -> Manager:
    state = {"weights": torch.zeros(8)}
    return keep(
        Manager(
            ProcessGroupGloo(timeout=LONG),
            options.pop("load", state.update),
            options.pop("state", lambda: state),
            min_replica_size=num_groups,
            replica_id=name,
            hostname="127.0.0.1",
            lighthouse_addr=lighthouse.address(),
            timeout=LONG,
            **options,
        )
    )


def at_once(*works: Callable[[], object]) -> None:
    """Do all on a thread each; none of them is a daemon, so what they leave behind is the library's."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def a_lighthouse() -> Iterator[None]:
    server = keep(LighthouseServer("127.0.0.1:0", min_replicas=2))
    manager = group("alone", server)
    in_background(manager.start_quorum, "waits for another group")
    yield
    manager.shutdown()
    server.shutdown()


def managers() -> Iterator[None]:
    server = keep(LighthouseServer("127.0.0.1:0", min_replicas=2))
    models = [nn.Linear(256, 256) for _ in range(2)]
    both = [
        group(f"group_{i}", server, 2, load=model.load_state_dict, state=model.state_dict, use_async_quorum=True)
        for i, model in enumerate(models)
    ]
    optimizers = [Optimizer(m, torch.optim.SGD(model.parameters())) for m, model in zip(both, models, strict=True)]

    def train(i: int) -> None:
        for should_quantize in (False, True):
            optimizers[i].zero_grad()
            models[i](torch.ones(4, 256)).sum().backward()
            for parameter in models[i].parameters():
                both[i].allreduce(parameter.grad, should_quantize=should_quantize)  # type: ignore[arg-type]
            optimizers[i].step()

    at_once(lambda: train(0), lambda: train(1))
    for manager in both:
        manager.start_quorum()
    both[0].allreduce(torch.ones(1 << 16))  # the other does not come
    yield
    for manager in both:
        manager.shutdown()


def managers_that_average() -> Iterator[None]:
    server = keep(LighthouseServer("127.0.0.1:0", min_replicas=2))
    both = [group(f"group_{i}", server, 2) for i in range(2)]
    tensors = [keep(torch.ones(1 << 22)) for _ in both]

    def average(i: int) -> None:
        both[i].start_quorum()
        both[i].wait_quorum()
        both[i].allreduce(tensors[i], should_quantize=True)

    at_once(lambda: average(0), lambda: average(1))
    yield
    for manager in both:
        manager.shutdown()


def averaged_modules() -> Iterator[None]:
    server = keep(LighthouseServer("127.0.0.1:0", min_replicas=1))
    model = nn.Linear(64, 64)
    manager = group("group_0", server, load=model.load_state_dict, state=model.state_dict)
    ddp = keep(DistributedDataParallel(manager, model))
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    ddp(torch.ones(4, 64)).sum().backward()
    yield
    manager.shutdown()


def process_groups(members: list[ProcessGroup]) -> Iterator[None]:
    store = keep(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    size = len(members)

    def meet(rank: int) -> None:
        members[rank].configure(f"127.0.0.1:{store.port}/ring", f"group_{rank}", rank, size, 1)
        members[rank].allreduce([torch.ones(1 << 16)], ReduceOp.SUM).wait()

    at_once(*(functools.partial(meet, rank) for rank in range(size)))
    keep(members[0].allreduce([torch.ones(1 << 16)], ReduceOp.SUM))  # the others do not come
    yield
    for member in members:
        member.shutdown()


def a_managed_group() -> Iterator[None]:
    server = keep(LighthouseServer("127.0.0.1:0", min_replicas=1))
    manager = group("group_0", server)
    managed = keep(ManagedProcessGroup(manager))
    manager.start_quorum()
    managed.allreduce([torch.ones(8)], ReduceOp.SUM).wait()
    assert manager.should_commit()
    yield
    manager.shutdown()


def a_transport() -> Iterator[None]:
    state = {"weights": torch.ones(1 << 20), "bias": torch.zeros(7)}
    source = keep(HTTPTransport(timeout=LONG, num_chunks=0, hostname="127.0.0.1"))
    target = keep(HTTPTransport(timeout=LONG, num_chunks=0, hostname="127.0.0.1"))
    source.send_checkpoint([1], 7, state, LONG)
    target.recv_checkpoint(0, source.metadata(), 7, LONG)
    source.send_checkpoint([1], 8, state, LONG)
    begun = threading.Event()

    def fetch() -> None:  # of a step that never comes: until the transport ends
        begun.set()
        try:
            target.recv_checkpoint(0, source.metadata(), 9, LONG)
        except Exception:
            return

    in_background(fetch, "fetch")
    begun.wait()
    yield
    target.shutdown()
    source.shutdown()


def outer_loops(kind: type[DiLoCo] | type[LocalSGD]) -> Iterator[None]:
    server = keep(LighthouseServer("127.0.0.1:0", min_replicas=2))
    models = [nn.Linear(2048, 2048) for _ in range(2)]  # to average it takes longer than to end
    inner = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    both = [group(f"group_{i}", server, 2, use_async_quorum=False) for i in range(2)]
    loops: list[Any] = []
    for i in range(2):
        if kind is DiLoCo:
            outer = torch.optim.SGD(models[i].parameters(), lr=0.7, momentum=0.9, nesterov=True)
            loops.append(DiLoCo(both[i], [models[i]], inner[i], outer, 2, fragment_sync_delay=1))
        else:
            loops.append(LocalSGD(both[i], models[i], inner[i], 2))

    def train(i: int, num_steps: int) -> None:
        with loops[i]:
            for _ in range(num_steps):
                inner[i].zero_grad()
                models[i](torch.ones(4, 2048)).square().mean().backward()
                inner[i].step()

    at_once(lambda: train(0, 5), lambda: train(1, 5))  # DiLoCo's last step begins a round
    with loops[0]:
        yield
    for manager in both:
        manager.shutdown()


def a_checkpointer() -> Iterator[None]:
    directory = keep(tempfile.TemporaryDirectory())  # it goes after the last save, by weakref.finalize
    checkpointer = keep(Checkpointer(Path(directory.name)))
    state = {"weights": torch.ones(1 << 20)}
    checkpointer.save(state, step=1).result()
    checkpointer.save(state, step=2)
    yield
    checkpointer.shutdown()


def a_checkpointer_and_a_handler_at_exit() -> Iterator[None]:
    directory = Path(tempfile.mkdtemp())

    def look() -> None:
        found = torchft_ckpt.checkpoints_in(directory)
        shutil.rmtree(directory)
        assert len(found) == 1, "the last save is not whole when the handlers run that were there before"

    atexit.register(look)
    checkpointer = keep(Checkpointer(directory))
    checkpointer.save({"weights": torch.ones(1 << 20)}, step=1)
    yield
    checkpointer.shutdown()


def a_transport_that_was_dropped() -> Iterator[None]:
    transport: HTTPTransport[Any] = HTTPTransport(timeout=LONG, num_chunks=0, hostname="127.0.0.1")
    transport.send_checkpoint([1], 7, {"weights": torch.ones(8)}, LONG)
    yield
    del transport


def a_group_whose_store_is_gone() -> Iterator[None]:
    port = keep(ExitStack()).enter_context(reserved_port())
    group = keep(ProcessGroupGloo(timeout=LONG))
    in_background(lambda: group.configure(f"127.0.0.1:{port}/ring", "group_0", 0, 2, 1), "connects")
    time.sleep(0.1)  # until it has begun to
    yield
    group.shutdown()


def a_save_that_waits_for_another() -> Iterator[None]:
    directory = keep(tempfile.TemporaryDirectory())
    server = keep(LighthouseServer("127.0.0.1:0", min_replicas=2))
    both = [group(f"group_{i}", server, 2) for i in range(2)]
    savers = [keep(Checkpointer(Path(directory.name), manager=m, fill_after=timedelta(seconds=0.5))) for m in both]

    def step(i: int) -> None:
        both[i].start_quorum()
        both[i].allreduce(torch.ones(8)).wait()
        both[i].should_commit()

    at_once(lambda: step(0), lambda: step(1))
    savers[0].save()
    yield
    for saver in savers:
        saver.shutdown()
    for manager in both:
        manager.shutdown()


def a_peer_reader() -> Iterator[None]:
    import torch.distributed.checkpoint as dcp

    state = {"user": {"default": {"weights": torch.ones(1 << 18)}}, "torchft": {"step": 7}}
    source = keep(HTTPTransport(timeout=LONG, num_chunks=0, hostname="127.0.0.1"))
    source.send_checkpoint([1], 7, state, LONG)
    reader = keep(PeerReader([source.metadata()], timeout=timedelta(seconds=10)))
    into = {"weights": torch.zeros(1 << 18)}
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert into["weights"].sum() == 1 << 18
    keep(
        PeerReader([source.metadata()], timeout=timedelta(seconds=10))
    ).read_metadata()  # holds the step, and never reads
    yield
    source.shutdown()


CLASSES: dict[str, Callable[[], Iterator[None]]] = {
    "LighthouseServer": a_lighthouse,
    "Manager": managers,
    "Manager, averaging": managers_that_average,
    "DistributedDataParallel": averaged_modules,
    "ProcessGroupGloo": lambda: process_groups([keep(ProcessGroupGloo(timeout=LONG)) for _ in range(2)]),
    "ProcessGroupDummy": lambda: process_groups([keep(ProcessGroupDummy(0, 1))]),
    "ManagedProcessGroup": a_managed_group,
    "HTTPTransport": a_transport,
    "DiLoCo": lambda: outer_loops(DiLoCo),
    "LocalSGD": lambda: outer_loops(LocalSGD),
    "Checkpointer": a_checkpointer,
    "Checkpointer, waiting for another group": a_save_that_waits_for_another,
    "Checkpointer, beside a handler at exit": a_checkpointer_and_a_handler_at_exit,
    "HTTPTransport, dropped": a_transport_that_was_dropped,
    "ProcessGroupGloo, whose store is gone": a_group_whose_store_is_gone,
    "PeerReader": a_peer_reader,
}


class _Lingers:
    """Holds up the interpreter's end, when no thread may go on any more but this one."""

    def __init__(self) -> None:
        self._sleep = time.sleep

    def __del__(self) -> None:
        self._sleep(0.1)


def end(name: str, way: str) -> None:
    """Use a class, and come back to the caller, who is to end the process, or raise."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("torchft_ckpt").setLevel(logging.ERROR)
    logging.getLogger("torchft_ckpt.threads").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep(_Lingers())
    scene = keep(CLASSES[name]())
    next(scene)
    if way == "raise":
        scene.throw(RuntimeError(MESSAGE))
    if way == "shutdown":
        next(scene, None)


if __name__ == "__main__":
    # By this name it stays until the interpreter ends, as a script does.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support import process_ends

    process_ends.end(*sys.argv[1:])
