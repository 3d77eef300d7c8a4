"""Steps of a job are made once more in one process, and compared with what the job has said of them."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.exact_group import Group
from support.launched import fork_into
from support.replayed_trainer import SAVED_AT

from torchft_ckpt import Checkpointer, LighthouseServer
from torchft_ckpt.__main__ import main
from torchft_ckpt.cli.replay import compare
from torchft_ckpt.config import LIGHTHOUSE, REPLAY
from torchft_ckpt.errors import CheckpointNotFoundError, ConfigError

Make = Callable[..., Group]
Replays = Callable[[], tuple[Path, LighthouseServer]]
TESTS = Path(__file__).resolve().parents[1]


def command(folder: Path, *words: str) -> tuple[int, str]:
    """Run a command of the package in a folder; return its status and what it and its ranks have said."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "TORCHFT_CKPT_LOG_EVERY_SEC": "0", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torchft_ckpt", *words]
    ended = subprocess.run(
        run, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    return ended.returncode, ended.stdout


@pytest.mark.processes
@pytest.mark.slow
def test_the_steps_of_two_groups_are_replayed_in_one_and_a_wrong_product_is_found(tmp_path: Path) -> None:
    script = TESTS / "support" / "replayed_trainer.py"
    server = LighthouseServer("127.0.0.1:0", min_replicas=2)
    logs = [tmp_path / f"{group}.log" for group in (0, 1)]
    how = {LIGHTHOUSE[0]: server.address(), "NUM_REPLICA_GROUPS": "2"}
    groups = [fork_into(log, script, str(tmp_path / "saved"), REPLICA_GROUP_ID=log.stem, **how) for log in logs]
    assert [group.wait(240) for group in groups] == [0, 0], [log.read_text() for log in logs]
    server.shutdown()
    # As `run` marks its lines, which the test of groups of two ranks has said.
    said = [f"[g{log.stem}/r0] {line}" for log in logs for line in log.read_text().splitlines()]
    (tmp_path / "job.log").write_text("\n".join(said))
    saved = sorted((tmp_path / "saved").iterdir())
    replay = ("replay", "--step=10", "--log=job.log", "saved", "--", str(script), "elsewhere")
    status, said = command(tmp_path, *replay, "--wrong-at=8")
    # Step 8, of which all was compared, and those before it were equal.
    found = [f"group {group}, rank 0 differs: step 9 began with state=" for group in (0, 1)]
    *differ, known = said.splitlines()[-3:]
    assert status == 1 and all(map(str.startswith, sorted(differ), found)), said
    assert known == f"compared at {10 - SAVED_AT} steps, {SAVED_AT + 1} to 10: these differ"
    assert sorted((tmp_path / "saved").iterdir()) == saved and not (tmp_path / "elsewhere").exists()


@pytest.mark.processes
@pytest.mark.slow
def test_the_steps_of_groups_of_two_ranks_are_replayed_by_two_ranks(tmp_path: Path) -> None:
    script = str(TESTS / "support" / "replayed_trainer.py")
    how = ("--groups=2", "--nproc=2", "--min-replicas=2", "--restarts=0")
    status, said = command(tmp_path, "run", *how, "--", script, "saved")
    assert status == 0, said
    (tmp_path / "job.log").write_text(said)
    replay = ("replay", "--step=10", "--nproc=2", "--log=job.log", "saved", "--", script, "elsewhere", "--wrong-at=8")
    status, said = command(tmp_path, *replay)
    # A vote shows samples of a rank's shards, so what is wrong since step 8 may be seen a step later.
    differ = sorted(re.findall(r"(group \d, rank \d) differs: step (?:9|10) began with state=", said))
    assert status == 1 and differ == [f"group {group}, rank {rank}" for group in (0, 1) for rank in (0, 1)], said


def trained(group: Group, num_steps: int) -> list[torch.Tensor]:
    """Have a group train; return its weights."""
    for step in group.loader:
        group.optimizer.zero_grad()
        for batch in step:
            group.model(0.1 * batch).square().mean().backward()
        assert group.optimizer.step()
        if group.manager.current_step() == num_steps:
            break
    return [one.detach().clone() for one in group.model.parameters()]


def saved(make_group: Make, folder: Path) -> list[torch.Tensor]:
    """Have a group save step 3, and another group train to step 6; return the weights of the other one then."""
    for last in (3, 6):
        group = make_group(job=f"to-{last}")
        group.steps()
        weights = trained(group, last)
        if last == 3:
            with_checkpoints = Checkpointer(folder, manager=group.manager)
            assert with_checkpoints.save().result(60).is_closed
            with_checkpoints.shutdown()
    return weights


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], tuple[Path, LighthouseServer]]]:
    """Have what is made after a call replay steps 3 to 5 of a folder `saved`; return a folder and the lighthouse for it."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)

    def begin() -> tuple[Path, LighthouseServer]:
        (told := tmp_path / "told").mkdir()
        monkeypatch.setenv(REPLAY, json.dumps([str(tmp_path / "saved"), 3, 5, str(told)]))
        monkeypatch.setenv(LIGHTHOUSE[0], server.address())
        return told, server

    yield begin
    server.shutdown()


def test_a_script_that_is_replayed_joins_no_job_saves_nothing_and_ends_after_the_step(
    replays: Replays, make_group: Make, tmp_path: Path
) -> None:
    wanted = saved(make_group, folder := tmp_path / "saved")
    there = sorted(folder.iterdir())
    told, server = replays()
    group = make_group(job="to-6", spare=True, replica_id="taken")
    assert "to-6" not in repr(server) and not group.manager.replica_id().startswith("taken")
    loader = group.steps()
    checkpointer = Checkpointer(tmp_path / "elsewhere", manager=group.manager, local_location=tmp_path / "local")
    assert checkpointer.restore(step=1).step == 3
    assert all(torch.equal(one, other) for one, other in zip(trained(group, 100), wanted, strict=True))
    assert group.manager.current_step() == 6 and loader.num_steps is None
    assert not checkpointer.save().result().is_closed
    checkpointer.shutdown()
    assert sorted(folder.iterdir()) == there and not (tmp_path / "local").exists()
    assert [line.split(" ")[0] for line in (told / "0").read_text().splitlines()] == ["3", "4", "5"]


def test_a_checkpoint_says_which_leaves_are_common(replays: Replays, make_group: Make, tmp_path: Path) -> None:
    """Nobody sees in a replay what has moved before."""
    group = make_group()
    group.steps()
    group.manager.hooks.registry.register("scale", lambda _: None, lambda: 1.0)
    group.manager._parts.own.known.common.add("scale")
    trained(group, 3)
    checkpointer = Checkpointer(tmp_path / "saved", manager=group.manager)
    assert checkpointer.save().result(60).is_closed
    checkpointer.shutdown()
    replays()
    group = make_group()
    group.manager.hooks.registry.register("scale", lambda _: None, lambda: 1.0)
    group.steps()
    checkpointer = Checkpointer(tmp_path / "elsewhere", manager=group.manager)
    checkpointer.restore()
    checkpointer.shutdown()
    assert group.manager._parts.own.known.moved == {"scale"}


def test_a_loop_that_is_no_step_loaders_or_begins_elsewhere_is_refused_by_name(
    replays: Replays, make_group: Make
) -> None:
    replays()
    plain = make_group()
    with pytest.raises(ConfigError, match="only a loop of StepLoader is replayed"):
        plain.manager.start_quorum()
    other = make_group()
    with pytest.raises(ConfigError, match="begins at step 0, and the checkpoint that is replayed is of step 3"):
        next(iter(other.steps()))


def test_a_checkpoint_that_is_missing_too_new_or_damaged_is_named(
    replays: Replays, make_group: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(make_group, folder := tmp_path / "saved")
    (tmp_path / "empty").mkdir()

    def says(step: int, where: Path) -> tuple[int, str]:
        status = main(["replay", f"--step={step}", str(where), "script.py"])
        return status, capsys.readouterr().err

    assert says(5, tmp_path / "empty") == (2, f"torchft_ckpt: {tmp_path / 'empty'}: there is no checkpoint\n")
    assert says(2, folder) == (1, f"torchft_ckpt: {folder}: the oldest checkpoint is of step 3, and --step is 2\n")
    (data,) = folder.glob("*/*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    status, said = says(5, folder)
    assert status == 1 and "no checkpoint before step 5 is whole" in said
    data.write_bytes(bytes(byte ^ 1 for byte in content))
    replays()
    group = make_group()
    group.steps()
    with pytest.raises(CheckpointNotFoundError):
        Checkpointer(folder, manager=group.manager).restore()


def test_what_the_replay_has_shown_is_compared_with_what_each_group_has_said() -> None:
    made = {(0, 3): "", (0, 4): "a" * 16, (0, 5): "b" * 16 + "c" * 16, (1, 4): "d" * 16}
    same = {
        (0, 3): {"group 0": "e"},
        (0, 4): {"group 0": "a" * 16 + "f" * 16},
        (0, 5): {"group 1": "b" * 16 + "c" * 16},
    }
    assert compare(made, same) == (["compared at 2 steps, 4 to 5: equal"], True)
    other = {**same, (1, 4): {"group 0": "d" * 16, "group 1": "g" * 16}}
    lines, is_equal = compare(made, other)
    assert not is_equal and [line.split(":")[0] for line in lines[:-1]] == ["group 1, rank 1 differs"]
    full = {(0, 5): {"group 0": "b" * 16 + "d" * 16}}
    assert not compare(made, full)[1]
    assert not compare(made, {})[1]


def test_the_line_of_a_step_says_what_its_vote_has_shown(make_group: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchft_ckpt.manager")
    group = make_group()
    group.steps()
    trained(group, 3)
    lines = [line for line in caplog.messages if line.startswith("step=")]
    assert lines and all(" state=" in line or line.startswith("step=0 ") for line in lines)
