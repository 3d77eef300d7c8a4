"""train_hsdp.py and train_fsdp.py of the examples as a user starts them, with their launcher or torchrun; one rank is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.launched import REPO, fork_into
from support.stores import hosted_store

from torchft_ckpt import LighthouseServer

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Group:
    """A replica group as its launcher runs it."""

    def __init__(self, number: int, script: str, size: int, lighthouse: str, folder: Path, *options: str) -> None:
        self.log_path = folder / f"group_{number}.log"
        self.report_path = folder / f"group_{number}.json"
        self.launcher = fork_into(
            self.log_path,
            REPO / "examples" / script,
            f"--group-size={size}",
            f"--report={self.report_path}",
            *options,
            TORCHFT_LIGHTHOUSE=lighthouse,
            REPLICA_GROUP_ID=str(number),
        )

    def log(self) -> str:
        return self.log_path.read_text()

    def ranks(self) -> list[int]:
        """Process ids of its ranks."""
        pid = self.launcher.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.log()[-4000:]
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: re.search(rf"\] step {step} ", self.log()) is not None)

    def end(self) -> dict[str, Any]:
        assert self.launcher.wait(timeout=90) == 0, self.log()[-4000:]
        return json.loads(self.report_path.read_text())

    def close(self) -> None:
        self.launcher.terminate()  # it ends its ranks
        self.launcher.wait(timeout=30)


class RanksOfTorchrun:
    """A replica group whose ranks find in their environment what torchrun puts there."""

    def __init__(self, number: int, script: str, size: int, lighthouse: str, folder: Path, *options: str) -> None:
        self.store = hosted_store()
        self.report_path = folder / f"group_{number}.json"
        self.log_path = folder / f"group_{number}_rank_0.log"
        self.ranks = [
            fork_into(
                folder / f"group_{number}_rank_{rank}.log",
                REPO / "examples" / script,
                f"--report={self.report_path}",
                *options,
                TORCHFT_LIGHTHOUSE=lighthouse,
                REPLICA_GROUP_ID=str(number),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT="0",
            )
            for rank in range(size)
        ]

    def log(self) -> str:
        return self.log_path.read_text()

    def end(self) -> dict[str, Any]:
        assert [rank.wait(timeout=90) for rank in self.ranks] == [0] * len(self.ranks)
        return json.loads(self.report_path.read_text())

    def close(self) -> None:
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
    """One group is torchrun's; the other's launcher starts it again."""
    lighthouse = start_lighthouse(cleanup, 2)
    options = ["--steps=40", "--min-replica-size=2"]
    first = RanksOfTorchrun(0, "train_hsdp.py", 2, lighthouse, tmp_path, *options)
    cleanup.callback(first.close)
    second = Group(1, "train_hsdp.py", 2, lighthouse, tmp_path, *options, "--max-restarts=1")
    cleanup.callback(second.close)
    second.wait_for_step(3)
    os.kill(second.ranks()[1], signal.SIGKILL)
    second_report, first_report = second.end(), first.end()

    assert second.log().count("its group is ended") == 1
    assert first_report["step"] == second_report["step"] == 40
    assert first_report["digest"] == second_report["digest"]
    assert first_report["loss"] < 0.6


def test_fsdp_with_tensor_parallelism_in_a_group_of_four(tmp_path: Path, cleanup: ExitStack) -> None:
    lighthouse = start_lighthouse(cleanup, 1)
    group = RanksOfTorchrun(0, "train_fsdp.py", 4, lighthouse, tmp_path, "--steps=10", "--min-replica-size=1")
    cleanup.callback(group.close)
    report = group.end()

    assert report["step"] == 10
    assert len(re.findall(r"\] step \d+ loss [\d.]+ participants 1$", group.log(), re.MULTILINE)) == 10
