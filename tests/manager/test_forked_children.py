"""What a forked child inherits is its parent's: to shut it down there returns at once, and the parent goes on with it.

As a data loader's worker may that runs the handlers of its parent's end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nursery import Forked
from torch import nn

from torchft_ckpt import Checkpointer, HTTPTransport, LighthouseServer, Manager, Optimizer, ProcessGroupGloo, threads

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]
SHORT = timedelta(seconds=60)
LIMIT_S = 60


class Group:
    """A group of one rank, and all that it has open."""

    def __init__(self, lighthouse: LighthouseServer, name: str, storage: Path) -> None:
        self.lighthouse = lighthouse
        self.model = nn.Linear(8, 8)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.process_group = ProcessGroupGloo(timeout=SHORT)
        self.transport: HTTPTransport[Any] = HTTPTransport(timeout=SHORT, num_chunks=0, hostname="127.0.0.1")
        self.manager = Manager(
            self.process_group,
            self.model.load_state_dict,
            self.model.state_dict,
            min_replica_size=2,
            lighthouse_addr=lighthouse.address(),
            replica_id=name,
            hostname="127.0.0.1",
            timeout=SHORT,
            checkpoint_transport=self.transport,
        )
        self.optimizer = Optimizer(self.manager, self.sgd)
        self.checkpointer = Checkpointer(storage, manager=self.manager)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            self.manager.allreduce(parameter.grad)  # type: ignore[arg-type]
        self.optimizer.step()

    def shutdown(self) -> None:
        self.checkpointer.shutdown()
        self.manager.shutdown()
        self.transport.shutdown()


def each(groups: list[Group], act: Callable[[Group], object]) -> None:
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(act, groups))


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Group]]:
    """Two groups that train."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2)
    storage = tmp_path_factory.mktemp("storage")
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda name: Group(lighthouse, name, storage), "ab"))
    each(groups, Group.step)
    yield groups
    each(groups, Group.shutdown)
    lighthouse.shutdown()


def run_in_forked_child(act: Callable[[], object]) -> int:
    """Return how a child ended that does something, and no more."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    "shut_down",
    [
        lambda group: group.manager.shutdown(),
        lambda group: group.manager.shutdown(wait=False),
        lambda group: group.transport.shutdown(),
        lambda group: group.process_group.shutdown(),
        lambda group: group.process_group.abort(),
        lambda group: group.process_group.__del__(),
        lambda group: threads._end_all(),
        lambda group: group.lighthouse.shutdown(),
    ],
    ids=[
        "manager",
        "manager at once",
        "transport",
        "process group",
        "abort",
        "process group dropped",
        "process groups at exit",
        "lighthouse",
    ],
)
def test_a_forked_child_shuts_down_nothing_of_its_parent_and_does_not_wait(
    groups: list[Group], shut_down: Callable[[Group], object]
) -> None:
    before = [group.manager.statistics() for group in groups]
    assert run_in_forked_child(lambda: shut_down(groups[0])) == 0
    for _ in range(2):
        each(groups, Group.step)
    after = [group.manager.statistics() for group in groups]
    assert [(s.num_committed, s.num_discarded, s.quorum_id) for s in after] == [
        (s.num_committed + 2, s.num_discarded, s.quorum_id) for s in before
    ]


def test_a_forked_child_waits_for_no_save_of_its_parent(groups: list[Group]) -> None:
    first, second = groups
    save = first.checkpointer.save()  # it waits for the other's part
    assert run_in_forked_child(first.checkpointer.shutdown) == 0
    assert not save.done()
    second.checkpointer.save()
    assert save.result(LIMIT_S).is_closed


CONFIGURES_ITSELF = """
import gc, os, torch
from datetime import timedelta
from torch.distributed import TCPStore
from torchft_ckpt import ProcessGroupGloo

group = ProcessGroupGloo(timedelta(seconds=20))
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group.configure(f"127.0.0.1:{store.port}/parent", "a", 0, 1, 1)
child = os.fork()
if child == 0:
    group.configure(f"127.0.0.1:{store.port}/child", "a", 0, 1, 2)
    assert group.allreduce([torch.ones(2)]).wait()
    group.shutdown()
    assert group.errored() is not None
    gc.collect()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert group.allreduce([torch.ones(2)]).wait()
group.shutdown()
"""


def test_what_a_forked_child_configures_itself_it_shuts_down(tmp_path: Path) -> None:
    """A process group object may be made before the ranks are forked. In a process of its own: a child that collects garbage ends
    what other tests have left."""
    script, log = tmp_path / "configures_itself.py", tmp_path / "log"
    script.write_text(CONFIGURES_ITSELF)
    with log.open("wb") as stderr:
        process = Forked(script, [], dict(os.environ), stderr.fileno(), ends_whole=True)
    try:
        assert process.wait(240) == 0, log.read_text()
    finally:
        process.kill()
