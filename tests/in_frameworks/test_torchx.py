"""The TorchX component: `torchx run` starts the groups on this machine; the ranks of one are killed and come back."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fingerprints import MARK
from framework_jobs import Group, assert_equal_states
from support.launched import REPO
from support.waiting import wait_until

from torchft_ckpt import LighthouseServer
from torchft_ckpt.errors import ConfigError

if importlib.util.find_spec("torchx") is None:
    pytest.skip("torchx is not installed; scripts/test-integrations runs this", allow_module_level=True)

from torchx.specs import RetryPolicy

from torchft_ckpt.torchx import hsdp

COMPONENT = REPO / "torchft_ckpt" / "torchx.py"
PLAIN = Path(__file__).with_name("plain_group.py")


def test_each_group_is_a_role_that_is_started_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://far:29510")
    monkeypatch.delenv("TORCHFT_CKPT_JOB", raising=False)
    app = hsdp(
        "--steps", "9", replicas=3, workers_per_replica=2, max_restarts=1, script="train.py", env={"X": "y"}, gpu=2
    )
    assert [role.env["REPLICA_GROUP_ID"] for role in app.roles] == ["0", "1", "2"]
    one = app.roles[1]
    assert (one.num_replicas, one.max_retries, one.retry_policy) == (1, 1, RetryPolicy.REPLICA)
    assert " ".join(one.args) == "--standalone --nnodes=1 --nproc_per_node=2 --max_restarts=1 train.py --steps 9"
    assert (one.env["NUM_REPLICA_GROUPS"], one.env["TORCHFT_LIGHTHOUSE"], one.env["X"]) == (
        "3",
        "http://far:29510",
        "y",
    )
    assert len({role.env["TORCHFT_CKPT_JOB"] for role in app.roles}) == 1
    assert "CUDA_VISIBLE_DEVICES" not in one.env
    assert one.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # pytorch #135712


def test_each_start_is_a_job_of_its_own_without_gpus_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_CKPT_JOB", raising=False)
    first, second = (hsdp(replicas=1).roles[0] for _ in range(2))
    assert first.env["TORCHFT_CKPT_JOB"] != second.env["TORCHFT_CKPT_JOB"]
    assert first.env["CUDA_VISIBLE_DEVICES"] == ""
    assert hsdp(replicas=1, env={"TORCHFT_CKPT_JOB": "mine"}).roles[0].env["TORCHFT_CKPT_JOB"] == "mine"


def test_a_job_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        hsdp(replicas=0)


@pytest.mark.processes
@pytest.mark.slow
def test_a_group_that_was_killed_comes_back_and_ends_bit_equal(tmp_path: Path) -> None:
    """`torchx run`, as its user types it. The survivor stands still at step 200 until the other group is there again.

    So does a group at step 1 until both are there: one may start much sooner, and be at step 200 before the other begins.
    """
    are_here, is_back = tmp_path / "are_here", tmp_path / "is_back"
    (tmp_path / "run_torchx.py").write_text("from torchx.cli.main import main\n\nmain()\n")
    (tmp_path / "bin").mkdir()
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    logs = tmp_path / "logs"
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    command = [
        *("run", "--scheduler=local_cwd", f"--scheduler_args=log_dir={logs}", "--wait"),
        *(f"{COMPONENT}:hsdp", "--replicas=2", "--workers_per_replica=2", f"--script={PLAIN}"),
        *("--", "--steps=400", "--begin", str(are_here), "--wait", "200", str(is_back)),
    ]
    environment = {
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "PATH": f"{torchrun.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPO}{os.pathsep}{PLAIN.parent}",
        "OMP_NUM_THREADS": "1",
    }
    runner = Group(tmp_path / "torchx.log", tmp_path / "run_torchx.py", command, environment)
    try:
        wait_until(lambda: all("serves its state" in _log(logs, group) for group in range(2)), "both groups start", 180)
        are_here.touch()
        wait_until(lambda: _trains(runner, logs), "both groups train", 180)
        killed = _processes(logs, 1)
        for pid in killed:
            with suppress(ProcessLookupError):  # torchrun ends the second rank when the first one dies, maybe before us
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(_processes(logs, 1)) == 4, "torchrun starts the ranks again", 240)
        is_back.touch()
        assert runner.process.wait(timeout=300) == 0
    finally:
        runner.close()
        lighthouse.shutdown()
    assert "heal=yes" in _log(logs, 1).rpartition("is process")[2], "it did not heal in its second life"
    first, second = (_states(logs, group) for group in range(2))
    assert len(first) == len(second) == 2
    assert_equal_states(*first, *second)


def _trains(runner: Group, logs: Path) -> bool:
    assert runner.process.poll() is None, f"torchx ended: {runner.log()}"
    return _log(logs, 1).count("participants=2/2 verdict=commit") > 20


def _log(logs: Path, group: int) -> str:
    return "".join(path.read_text() for path in logs.glob(f"**/replica_{group}/0/combined.log"))


def _processes(logs: Path, group: int) -> list[int]:
    return [int(pid) for pid in re.findall(rf"group {group} rank \d is process (\d+)", _log(logs, group))]


def _states(logs: Path, group: int) -> list[dict[str, object]]:
    return [json.loads(line.partition(MARK)[2]) for line in _log(logs, group).splitlines() if MARK in line]
