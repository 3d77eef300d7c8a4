"""What the blocks of code on the pages find when they are run: names, a directory, a lighthouse, and shorter jobs.

A situation is a context manager in `SITUATIONS`. What it replaces in a block has to stand there: numbers that are right for a
reader and too large for a test, and addresses.
"""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.fake_transport import FakeNetwork
from support.ports import reserved_port
from torchft_ckpt import (
    Checkpointer,
    DistributedDataParallel,
    DistributedSampler,
    HTTPTransport,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft_ckpt.cli.checkpoint_content import find_checkpoints, open_checkpoint
from torchft_ckpt.coordination import LighthouseServer
from torchft_ckpt.errors import GroupLeftError
from torchft_ckpt.manager.event_file import EventFile
from torchft_ckpt.process_group import ProcessGroupDummy

REPO = Path(__file__).resolve().parents[2]
LIMIT = timedelta(seconds=30)


def _nothing(names: dict[str, Any]) -> None: ...


@dataclass
class Situation:
    """What a block finds, and what is looked at when it is over."""

    names: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    after: Callable[[dict[str, Any]], None] = _nothing
    """Gets the block's names, or `stdout`."""
    directory: Path | None = None
    environment: dict[str, str] | None = None
    serves: bool = False
    """The command runs until it is told to end."""

    def serve(self, text: str) -> None:
        """Start the command, wait for the line with its address, and end it by SIGTERM."""
        process = subprocess.Popen(
            ["bash", "-c", text],
            env=self.environment or shell_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        said = []
        try:
            for line in process.stdout:
                said.append(line)
                if re.search(r"http://\S+:\d+", line):
                    break
            else:
                raise AssertionError(f"it ended without an address: {''.join(said)}")
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM), "".join(said)


def shell_environment(**more: str) -> dict[str, str]:
    """Return the variables of a reader who has installed the library: `python` is this one."""
    binaries = Path(sys.executable).parent
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    found = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": ":".join(paths), **more}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "CUDA_VISIBLE_DEVICES"):
        found.pop(name, None)
    return {**found, "CUDA_VISIBLE_DEVICES": "", **more}


SITUATIONS: dict[str, Callable[[], AbstractContextManager[Situation]]] = {}


def _situation(function: Callable[[], Iterator[Situation]]) -> None:
    SITUATIONS[function.__name__.strip("_").replace("_", "-")] = contextmanager(function)


@contextmanager
def _plain() -> Iterator[Situation]:
    yield Situation()


SITUATIONS[""] = _plain


@contextmanager
def _lighthouse(min_replicas: int = 1) -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=min_replicas)
    try:
        with mock.patch.dict(
            os.environ, {"TORCHFT_LIGHTHOUSE": server.address(), "TORCHFT_CKPT_HOSTNAME": "127.0.0.1"}
        ):
            yield server.address()
    finally:
        server.shutdown()


@contextmanager
def _workplace() -> Iterator[Path]:
    """A directory with the examples, as the repository has them."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "examples").symlink_to(REPO / "examples")
        yield Path(name)


def _model_names() -> dict[str, Any]:
    model = nn.Linear(4, 2)
    adamw = torch.optim.AdamW(model.parameters())

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optim"])

    return {
        "torch": torch,
        "model": model,
        "batch": torch.ones(3, 4),
        "loss": lambda output: output.square().mean(),
        "state_dict": lambda: {"model": model.state_dict(), "optim": adamw.state_dict()},
        "load_state_dict": load_state_dict,
        "name": "group_0",
        "adamw": adamw,
    }


def _shut_down(names: dict[str, Any]) -> None:
    names["manager"].shutdown()


@contextmanager
def _training(num_steps: int = 2, job: str | None = None) -> Iterator[dict[str, Any]]:
    """A Manager that has trained some steps, its model, and its wrapped optimizer."""
    names = _model_names()
    model = names["model"]
    with _lighthouse():
        manager = Manager(
            ProcessGroupDummy(0, 1),
            names["load_state_dict"],
            names["state_dict"],
            min_replica_size=1,
            replica_id="group_0",
            job=job,
            checkpoint_transport=HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1"),
        )
        optimizer = Optimizer(manager, names["adamw"])

        def train_one_step() -> None:
            optimizer.zero_grad()
            names["loss"](model(names["batch"])).backward()
            optimizer.step()

        try:
            for _ in range(num_steps):
                train_one_step()
            yield {**names, "manager": manager, "optimizer": optimizer, "train_one_step": train_one_step}
        finally:
            manager.shutdown()


@_situation
def _one_group() -> Iterator[Situation]:
    """A script makes its Manager and trains; it is the only group, and three steps are enough."""
    with _lighthouse():

        def after(names: dict[str, Any]) -> None:
            assert names["manager"].current_step() == 3
            _shut_down(names)

        yield Situation(_model_names(), {"min_replica_size=2": "min_replica_size=1", "10_000": "3"}, after)


@_situation
def _group_that_saves() -> Iterator[Situation]:
    """Between two steps of a script that trains."""
    with _training(0) as names, tempfile.TemporaryDirectory() as directory:
        names |= {"loader": mock.Mock(state_dict=lambda: {"position": 3})}
        yield Situation(names, {"/mnt/checkpoints": directory}, lambda names: names["checkpointer"].shutdown())


@_situation
def _group_that_reads_data() -> Iterator[Situation]:
    """Before a group's first step: its data set and sampler. A position that was taken leads to the same samples again."""
    with _training(0) as names:
        dataset = list(range(64))
        names |= {"dataset": dataset, "sampler": DistributedSampler(dataset, 0, 1, seed=3)}

        def after(names: dict[str, Any]) -> None:
            next(names["batches"])
            position = names["position"]()
            rest = torch.cat(list(names["batches"])).tolist()
            assert len(rest) == 56
            names["load_position"](position)
            assert torch.cat(list(names["batches"])).tolist() == rest

        yield Situation(names, after=after)


@_situation
def _group_that_makes_exact_steps() -> Iterator[Situation]:
    """Before a group's first step: its data set, and a schedule."""
    with _training(0) as names:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(names["adamw"], 10)
        names |= {"dataset": torch.randn(96, 4), "loss_fn": names["loss"]}
        names |= {"scheduler": names["manager"].scheduler(schedule)}

        def after(names: dict[str, Any]) -> None:
            assert names["manager"].current_step() == 3

        yield Situation(names, after=after)


@_situation
def _loop_that_saves() -> Iterator[Situation]:
    """A script that trains and saves every second step, four steps long."""
    with _training(0) as names, tempfile.TemporaryDirectory() as directory:
        names |= {"loader": mock.Mock(state_dict=lambda: {"position": 3})}

        def after(names: dict[str, Any]) -> None:
            assert any(Path(directory).iterdir())

        yield Situation(names, {"/mnt/checkpoints": directory, "10_000": "4", "% 500": "% 2"}, after)


@_situation
def _open_step() -> Iterator[Situation]:
    """A backward pass is over, and the optimizer's step comes next."""
    with _training() as names:
        names["optimizer"].zero_grad()
        names["loss"](names["model"](names["batch"])).backward()
        names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["adamw"], 1)
        names["CosineAnnealingLR"] = torch.optim.lr_scheduler.CosineAnnealingLR
        names["average"] = torch.optim.swa_utils.AveragedModel(names["model"])
        yield Situation(names)


@contextmanager
def _six_batches(*, is_wrapped: bool) -> Iterator[Situation]:
    """A group alone, and six batches; the third loss finds that a group has died, so its step is discarded."""
    with _lighthouse() as address:
        torch.manual_seed(7)
        model = nn.Linear(3, 3)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = Manager(
            FakeProcessGroup(FakeFabric()),
            lambda state: model.load_state_dict(state),
            model.state_dict,
            min_replica_size=1,
            lighthouse_addr=address,
            replica_id="alone",
            hostname="127.0.0.1",
            timeout=LIMIT,
        )
        num_losses, evaluated = 0, []

        def loss(ddp: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            nonlocal num_losses
            num_losses += 1
            if num_losses == 3:
                manager.report_error(RuntimeError("a group died"))
            return ddp(batch).square().mean()

        def after(names: dict[str, Any]) -> None:
            num_steps = 2 if "window" in names else 5
            assert (manager.current_step(), manager.statistics().num_discarded) == (num_steps, 1)

        batches = [torch.randn(2, 3) for _ in range(6)]
        names = {
            "torch": torch,
            "manager": manager,
            "model": model,
            "at_first": model.weight.detach().clone(),
            "ddp": DistributedDataParallel(manager, model),
            "inner": inner,
            "loss": loss,
            "batches": batches,
            "windows": [batches[:2], batches[2:4], batches[4:]],
            "steps_per_epoch": 2,
            "device": "cpu",
            "evaluate": lambda _: evaluated.append(manager.current_step()),
            "evaluated": evaluated,
        }
        if is_wrapped:
            names["optimizer"] = Optimizer(manager, inner)
        try:
            yield Situation(names, after=after)
        finally:
            manager.shutdown()


SITUATIONS["loop-with-a-discarded-step"] = lambda: _six_batches(is_wrapped=True)
SITUATIONS["unwrapped-loop-with-a-discarded-step"] = lambda: _six_batches(is_wrapped=False)


@_situation
def _group_that_is_told_to_leave() -> Iterator[Situation]:
    """The only group; SIGTERM comes to it in its third step."""
    with _training(0) as names, tempfile.TemporaryDirectory() as directory:
        manager = names["manager"]
        checkpointer = Checkpointer(directory, manager=manager)

        def batch() -> torch.Tensor:
            if manager.current_step() == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return torch.ones(3, 4)

        def after(names: dict[str, Any]) -> None:
            assert 3 <= manager.current_step() < names["steps"]
            saved = [open_checkpoint(place) for place in find_checkpoints(directory)]
            assert [(one.place.name.step, one.why_not_whole) for one in saved] == [(manager.current_step(), None)]

        try:
            yield Situation({**names, "batch": batch, "steps": 1000, "checkpointer": checkpointer}, after=after)
        finally:
            checkpointer.shutdown()


@_situation
def _group_to_drain() -> Iterator[Situation]:
    """A group of the job NAME, between two steps."""
    with _training(job="NAME") as names:

        def after(_: dict[str, Any]) -> None:
            latest = time.monotonic() + LIMIT.total_seconds()
            with suppress(GroupLeftError):  # it left between the two calls
                while not names["manager"].should_leave():
                    assert time.monotonic() < latest, "it was not told to leave"
                    names["train_one_step"]()

        lighthouse = shell_environment(TORCHFT_LIGHTHOUSE=os.environ["TORCHFT_LIGHTHOUSE"])
        yield Situation(replaced={"drain GROUP": "drain group_0"}, environment=lighthouse, after=after)


@_situation
def _fragments() -> Iterator[Situation]:
    """A model of two fragments, and batches for three rounds."""
    names = _model_names()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    names |= {
        "model": model,
        "fragments": list(model),
        "inner_optimizer": torch.optim.AdamW(model.parameters()),
        "data": [torch.ones(3, 4)] * 24,
    }
    with _lighthouse():

        def after(names: dict[str, Any]) -> None:
            assert names["manager"].current_step() >= 3
            _shut_down(names)

        shorter = {"min_replica_size=2": "min_replica_size=1", "sync_every=100": "sync_every=8"}
        yield Situation(names, shorter | {"fragment_sync_delay=5": "fragment_sync_delay=1"}, after)


@_situation
def _mesh() -> Iterator[Situation]:
    """A process that is a mesh of one, with a model to shard."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with _lighthouse(), tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (1,))
        names = _model_names() | {"fully_shard": fully_shard, "mesh_of_this_group": mesh}

        def after(names: dict[str, Any]) -> None:
            names["optimizer"].zero_grad()
            names["loss"](names["model"](names["batch"])).backward()
            names["optimizer"].step()
            assert names["manager"].current_step() == 1
            _shut_down(names)

        yield Situation(names, after=after)


@_situation
def _two_layouts() -> Iterator[Situation]:
    """An old group and a new one: what each calls, the old one on a thread of its own."""
    with _training() as old:
        fresh = _model_names()
        new = Manager(
            ProcessGroupDummy(0, 1),
            fresh["load_state_dict"],
            fresh["state_dict"],
            min_replica_size=1,
            replica_id="group_1",
            checkpoint_transport=HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1"),
        )
        handed: list[bool] = []
        thread = threading.Thread(target=lambda: handed.append(old["manager"].hand_over(LIMIT)))
        both = mock.Mock(hand_over=thread.start, take_over=lambda: new.take_over(LIMIT))

        def after(names: dict[str, Any]) -> None:
            thread.join()
            old["manager"].shutdown()
            new.start_quorum()
            assert handed == [True] and torch.equal(fresh["model"].weight, old["model"].weight)

        try:
            yield Situation({"manager": both}, after=after)
        finally:
            new.shutdown()


@contextmanager
def _served() -> Iterator[tuple[str, nn.Module]]:
    """A peer that serves the state of a model under the names that a Manager gives it."""
    names = _model_names()
    transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    try:
        state = {
            "user": {"default": {"model": names["model"].state_dict()}},
            "torchft": {"step": 7, "batches_committed": 7},
        }
        transport.send_checkpoint([1], 7, state, timedelta(minutes=5))
        yield transport.metadata(), names["model"]
    finally:
        transport.shutdown()


@contextmanager
def _trains_on(job: str | None) -> Iterator[dict[str, Any]]:
    """A job of one rank that trains, and somebody beside it."""
    over = threading.Event()
    with _training(job=job) as names:

        def train() -> None:
            while not over.is_set():
                names["train_one_step"]()
                time.sleep(0.02)

        loop = threading.Thread(target=train)
        loop.start()
        try:
            yield names
        finally:
            over.set()
            loop.join()


@_situation
def _reader() -> Iterator[Situation]:
    """Another program, beside a job that trains."""
    with _trains_on(None):
        model = nn.Linear(4, 2)
        before = model.weight.clone()

        def after(names: dict[str, Any]) -> None:
            assert names["reader"].step >= 2 and not torch.equal(model.weight, before)

        yield Situation({"model": model, "lighthouse_address": os.environ["TORCHFT_LIGHTHOUSE"]}, after=after)


@_situation
def _job_that_trains() -> Iterator[Situation]:
    with _trains_on("NAME"), _workplace() as directory:
        address = os.environ["TORCHFT_LIGHTHOUSE"].removeprefix("http://")
        yield Situation(replaced={"host:29510": address}, directory=directory)


@_situation
def _served_peer() -> Iterator[Situation]:
    with _served() as (url, _), _workplace() as directory:
        yield Situation(replaced={"http://HOST:PORT": url}, directory=directory)


@_situation
def _tls() -> Iterator[Situation]:
    """What a transport with TLS is made with."""
    import trustme

    from support.certificates import client_context, server_context
    from torchft_ckpt import ProgressBar

    authority = trustme.CA()
    contexts: dict[str, ssl.SSLContext] = {
        "server_context": server_context(authority, "127.0.0.1"),
        "client_context": client_context(authority),
    }
    with _lighthouse():
        names = {"HTTPTransport": HTTPTransport, "ProgressBar": ProgressBar, "Manager": Manager, **contexts}
        names["pg"] = ProcessGroupDummy(0, 1)
        yield Situation(names, {"Manager(...,": "Manager(pg, None, None, 1,"}, _shut_down)


@_situation
def _certificates() -> Iterator[Situation]:
    """Files of an authority and of a certificate for this host; the transport then serves its own receiver."""
    import trustme

    with tempfile.TemporaryDirectory() as directory:
        files = {name: f"{directory}/{name}" for name in ("ca.pem", "host.pem", "host.key")}
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(files["ca.pem"])
        certificate.cert_chain_pems[0].write_to_path(files["host.pem"])
        certificate.private_key_pem.write_to_path(files["host.key"])

        def after(names: dict[str, Any]) -> None:
            transport: HTTPTransport[Any] = names["transport"]
            try:
                assert transport.metadata().startswith("https://")
                transport.send_checkpoint([1], 7, {"weight": torch.ones(3)}, LIMIT)
                received = transport.recv_checkpoint(0, transport.metadata(), 7, LIMIT)
                assert torch.equal(received["weight"], torch.ones(3))
            finally:
                transport.shutdown()

        names = {"HTTPTransport": HTTPTransport}
        replaced = {
            **files,
            "HTTPTransport(ssl": 'HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", ssl',
        }
        yield Situation(names, replaced, after)


@_situation
def _under_torchfts_name() -> Iterator[Situation]:
    import torchft_ckpt

    with _lighthouse():
        names = {"torchft": torchft_ckpt, "pg": ProcessGroupGloo()}
        yield Situation(names, {"Manager(...,": "Manager(pg, None, None, 1,"}, _shut_down)


@_situation
def _transport_of_ones_own() -> Iterator[Situation]:
    """In a file of tests, beside a function that makes the transport."""
    from torchft_ckpt.testing.transport_conformance import CHECKS

    make = FakeNetwork[dict[str, Any]]().transport

    def after(names: dict[str, Any]) -> None:
        for check in CHECKS:
            names["test_my_transport_conforms"](check)

    yield Situation({"make_my_transport": make}, after=after)


@_situation
def _tensors_of_ones_own() -> Iterator[Situation]:
    """What is registered carries a state from one process to another."""
    from torchft_ckpt.checkpointing.state import shards

    def after(names: dict[str, Any]) -> None:
        halved = names["HalvedTensor"]
        sent, into = (halved(torch.full((3, 4), value), torch.full((2, 4), -value)) for value in (1.0, 7.0))
        transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
        try:
            transport.send_checkpoint([1], 7, {"w": sent}, LIMIT)
            state = transport.fetch_sharded([[transport.metadata()]], 0, 1, 7, LIMIT, local_state={"w": into})
        finally:
            transport.shutdown()
        received = state["w"]
        assert isinstance(received, halved)
        assert [half.unique().tolist() for half in received.halves] == [[1.0], [-1.0]]

    with mock.patch.object(shards, "_adapters", shards._adapters):
        yield Situation(after=after)


@_situation
def _outer_loop_of_ones_own() -> Iterator[Situation]:
    """Two replicas go to -2 and to -4 in a round: half of the way to the average is -1.5."""
    from support.fake_outer_manager import FakeOuterManager, Hub, run_replicas

    def after(names: dict[str, Any]) -> None:
        hub = Hub(2)

        def train(rank: int) -> list[float]:
            model = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(model.weight)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            with names["Halfway"](FakeOuterManager(hub, rank), model, inner, sync_every=2):
                for _ in range(2):
                    inner.zero_grad()
                    (model(torch.ones(2)) * (rank + 1)).sum().backward()
                    inner.step()
            return model.weight.flatten().tolist()

        assert run_replicas(2, train) == [[-1.5, -1.5]] * 2

    yield Situation(after=after)


# Commands


@_situation
def _server() -> Iterator[Situation]:
    """A lighthouse on a port of its own."""
    with reserved_port() as port:
        yield Situation(replaced={"--min-replicas 2": f"--min-replicas 2 --bind 127.0.0.1:{port}"}, serves=True)


@_situation
def _server_at_an_address() -> Iterator[Situation]:
    with reserved_port() as port:
        yield Situation(replaced={":29510": f":{port}"}, serves=True)


@contextmanager
def _forgettable_job() -> Iterator[str]:
    """A lighthouse that knows a job NAME, whose group has left."""
    with _lighthouse() as address:
        manager = Manager(ProcessGroupDummy(0, 1), None, None, 1, replica_id="group_0", job="NAME")
        manager.start_quorum()
        manager.should_commit()
        manager.shutdown()
        yield address


@_situation
def _job_that_was() -> Iterator[Situation]:
    with _forgettable_job() as address:
        yield Situation(environment=shell_environment(TORCHFT_LIGHTHOUSE=address))


@_situation
def _job_at_host() -> Iterator[Situation]:
    """The same, for a shell that does not know the lighthouse's address."""
    with _forgettable_job() as address:
        environment = shell_environment(TORCHFT_LIGHTHOUSE="", TORCHFT_CKPT_TOKEN="")
        yield Situation(replaced={"host:29510": address.removeprefix("http://")}, environment=environment)


@_situation
def _empty_directory() -> Iterator[Situation]:
    with tempfile.TemporaryDirectory() as name:
        yield Situation(directory=Path(name))


@_situation
def _directory_of_events() -> Iterator[Situation]:
    """A rank has lived there."""
    with tempfile.TemporaryDirectory() as name:
        EventFile(name, replica_id="group_0:1", rank=0, job="default").end("finished", {"starting": 0.1})
        yield Situation(replaced={"/shared/job-7/events": name}, directory=Path(name))


@_situation
def _checkpoints() -> Iterator[Situation]:
    """A directory with a checkpoint of step 1000."""
    with _workplace() as directory:
        checkpointer = Checkpointer(directory / "ckpt")
        checkpointer.save({"model": _model_names()["model"].state_dict()}, step=1000).result()
        checkpointer.shutdown()
        yield Situation(replaced={" DIR": f" {directory}/ckpt"}, directory=directory)


TRAIN = """
import argparse, os, torch
from torchft_ckpt import Manager, Optimizer
from torchft_ckpt.errors import JobFinishedError
from torchft_ckpt.process_group import ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
steps = min(parser.parse_args().steps, 3)
model = torch.nn.Linear(4, 2)
adamw = torch.optim.AdamW(model.parameters())
manager = Manager(
    ProcessGroupGloo(),
    lambda state: (model.load_state_dict(state["model"]), adamw.load_state_dict(state["optim"])),
    lambda: {"model": model.state_dict(), "optim": adamw.state_dict()},
    min_replica_size=1,
    replica_id=f"group_{os.environ.get('REPLICA_GROUP_ID', '0')}",
)
optimizer = Optimizer(manager, adamw)
try:
    while manager.current_step() < steps:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
    manager.shutdown(finished=True)
except JobFinishedError:
    pass
"""


@_situation
def _script() -> Iterator[Situation]:
    """Beside train.py, which trains three steps."""
    with _workplace() as directory:
        (directory / "train.py").write_text(TRAIN)
        yield Situation(directory=directory)


@_situation
def _torchft_script() -> Iterator[Situation]:
    """Beside train.py as torchft's users write it, and a lighthouse."""
    with _lighthouse() as address, _workplace() as directory:
        (directory / "train.py").write_text(
            TRAIN.replace("torchft_ckpt", "torchft").replace("from torchft.errors", "from torchft_ckpt.errors")
        )
        yield Situation(directory=directory, environment=shell_environment(TORCHFT_LIGHTHOUSE=address))


@_situation
def _short_job() -> Iterator[Situation]:
    """Twenty steps of the example instead of its own number."""
    with _workplace() as directory:
        yield Situation(replaced={"examples/train_ddp.py": "examples/train_ddp.py --steps 20"}, directory=directory)


@_situation
def _shorter_job() -> Iterator[Situation]:
    with _workplace() as directory:
        yield Situation(replaced={"--steps 20000": "--steps 20"}, directory=directory)


@_situation
def _lighthouse_at_host() -> Iterator[Situation]:
    """A lighthouse; the group is alone, and trains twenty steps."""
    with _lighthouse() as address, _workplace() as directory:
        replaced = {
            "host:29510": address.removeprefix("http://"),
            "examples/train_ddp.py": "examples/train_ddp.py --steps 20 --min-replica-size 1",
        }
        yield Situation(replaced=replaced, directory=directory)


@_situation
def _lighthouse_first() -> Iterator[Situation]:
    """The first line starts the lighthouse, and goes on beside the second."""
    with reserved_port() as port, _workplace() as directory:
        replaced = {
            "lighthouse --min-replicas 2": f"lighthouse --min-replicas 1 --bind 127.0.0.1:{port} &\ntrap 'kill $!' EXIT",
            "host:29510": f"127.0.0.1:{port}",
            "examples/train_ddp.py": "examples/train_ddp.py --steps 20 --min-replica-size 1",
        }
        yield Situation(replaced=replaced, directory=directory)


@_situation
def _lighthouse_of_the_quickstart() -> Iterator[Situation]:
    with _lighthouse() as address, _workplace() as directory:
        replaced = {"http://127.0.0.1:29510": address, "--steps 20000": "--steps 20 --min-replica-size 1"}
        yield Situation(replaced=replaced, directory=directory)


@_situation
def _sharded_group() -> Iterator[Situation]:
    with _workplace() as directory:
        yield Situation(replaced={"--steps 400": "--steps 10"}, directory=directory)


@_situation
def _process_to_kill() -> Iterator[Situation]:
    process = subprocess.Popen(["sleep", "600"])

    def after(names: dict[str, Any]) -> None:
        assert process.wait(120) == -signal.SIGKILL

    try:
        yield Situation(replaced={"27582": str(process.pid)}, after=after)
    finally:
        process.kill()
        process.wait()


@_situation
def _narrow_links() -> Iterator[Situation]:
    """300 inner steps on four links; needs root for the links."""
    yield Situation(replaced={"--inner-steps 5000": "--inner-steps 300"})


@_situation
def _this_python() -> Iterator[Situation]:
    yield Situation(replaced={".venv/bin/python": sys.executable})
