"""train_hsdp.py and train_fsdp.py of the examples, with what torchrun puts into their environment; one rank is killed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.launched import REPO, fork_into
from support.stores import hosted_store
from support.waiting import wait_until

from torchft_ckpt import LighthouseServer

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Group:
    """A replica group whose ranks find in their environment what torchrun puts there."""

    def __init__(self, number: int, script: str, size: int, lighthouse: str, folder: Path, *options: str) -> None:
        self.report_path = folder / f"group_{number}.json"
        self._number = number
        self._size = size
        self._folder = folder
        self._command = [REPO / "examples" / script, f"--report={self.report_path}", *options]
        self._lighthouse = lighthouse
        self.logs: list[Path] = []
        self.start()

    def start(self) -> None:
        """Start all ranks, which meet at a store of their own."""
        self._store = hosted_store()
        life = len(self.logs)
        logs = [self._folder / f"group_{self._number}_life_{life}_rank_{rank}.log" for rank in range(self._size)]
        self.logs.append(logs[0])
        self.ranks = [
            fork_into(
                log,
                *self._command,
                TORCHFT_LIGHTHOUSE=self._lighthouse,
                REPLICA_GROUP_ID=str(self._number),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(self._size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self._store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT="0",
            )
            for rank, log in enumerate(logs)
        ]

    def log(self) -> str:
        """Return what rank 0 said in its last life."""
        return self.logs[-1].read_text()

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: re.search(rf"\] step {step} ", self.log()) is not None, f"step {step}", 240)

    def end(self) -> dict[str, Any]:
        assert [rank.wait(timeout=240) for rank in self.ranks] == [0] * len(self.ranks)
        return json.loads(self.report_path.read_text())

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait(timeout=30)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_lighthouse(cleanup: ExitStack, min_replicas: int) -> str:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=min_replicas)
    cleanup.callback(lighthouse.shutdown)
    return lighthouse.address()


def test_hsdp_groups_end_equal_although_a_rank_is_killed(tmp_path: Path, cleanup: ExitStack) -> None:
    lighthouse = start_lighthouse(cleanup, 2)
    options = ["--steps=40", "--min-replica-size=2"]
    first, second = (Group(number, "train_hsdp.py", 2, lighthouse, tmp_path, *options) for number in range(2))
    cleanup.callback(first.kill)
    cleanup.callback(second.kill)
    second.wait_for_step(3)
    second.ranks[1].kill()
    second.kill()  # the whole group, as a launcher does
    second.start()
    second_report, first_report = second.end(), first.end()

    assert first_report["step"] == second_report["step"] == 40
    assert first_report["digest"] == second_report["digest"]
    assert first_report["loss"] < 0.6


def test_fsdp_with_tensor_parallelism_in_a_group_of_four(tmp_path: Path, cleanup: ExitStack) -> None:
    lighthouse = start_lighthouse(cleanup, 1)
    group = Group(0, "train_fsdp.py", 4, lighthouse, tmp_path, "--steps=10", "--min-replica-size=1")
    cleanup.callback(group.kill)
    report = group.end()

    assert report["step"] == 10
    assert len(re.findall(r"\] step \d+ loss [\d.]+ participants 1$", group.log(), re.MULTILINE)) == 10
