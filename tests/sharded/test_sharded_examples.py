"""examples/train_hsdp.py and examples/train_fsdp.py as a user starts them, and a rank that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from torchft_ckpt import LighthouseServer

REPO = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.processes


class Group:
    """A replica group as its launcher runs it."""

    def __init__(self, number: int, script: str, size: int, lighthouse: str, folder: Path, *options: str) -> None:
        self.log_path = folder / f"group_{number}.log"
        self.report_path = folder / f"group_{number}.json"
        environment = os.environ | {
            "PYTHONPATH": str(REPO),
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "REPLICA_GROUP_ID": str(number),
        }
        command = [sys.executable, str(REPO / "examples" / script), f"--group-size={size}", *options]
        with self.log_path.open("wb") as log:
            self.launcher = subprocess.Popen(
                [*command, f"--report={self.report_path}"], env=environment, stdout=log, stderr=log
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


@pytest.fixture
def cleanup() -> Any:
    with ExitStack() as stack:
        yield stack


def start(cleanup: ExitStack, folder: Path, script: str, sizes: list[int], *options: str) -> list[Group]:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=len(sizes))
    cleanup.callback(lighthouse.shutdown)
    groups = []
    for number, size in enumerate(sizes):
        least = f"--min-replica-size={len(sizes)}"
        groups.append(Group(number, script, size, lighthouse.address(), folder, least, *options))
        cleanup.callback(groups[-1].close)
    return groups


def test_hsdp_groups_end_equal_although_a_rank_is_killed(tmp_path: Path, cleanup: ExitStack) -> None:
    first, second = start(cleanup, tmp_path, "train_hsdp.py", [2, 2], "--steps=40", "--max-restarts=1")
    second.wait_for_step(3)
    os.kill(second.ranks()[1], signal.SIGKILL)
    second_report, first_report = second.end(), first.end()

    assert second.log().count("its group is ended") == 1
    assert first_report["step"] == second_report["step"] == 40
    assert first_report["digest"] == second_report["digest"]
    assert first_report["loss"] < 0.6


def test_fsdp_with_tensor_parallelism_in_a_group_of_four(tmp_path: Path, cleanup: ExitStack) -> None:
    (group,) = start(cleanup, tmp_path, "train_fsdp.py", [4], "--steps=10")
    report = group.end()

    assert report["step"] == 10
    assert len(re.findall(r"\] step \d+ loss [\d.]+ participants 1$", group.log(), re.MULTILINE)) == 10
