"""The demo as a user starts it: real processes, a real kill, and no process left behind.

How it ends is tested with small groups (`demo_of_small_groups.py`); the one that trains is killed and comes back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from demo import cli
from support.processes import note

REPO = Path(__file__).resolve().parents[2]
DEMO = REPO / "examples" / "demo"
OF_SMALL_GROUPS = Path(__file__).with_name("demo_of_small_groups.py")

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def start_demo(out: Path, script: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    demo = subprocess.Popen(
        [sys.executable, str(script), "--out", str(out), *arguments],
        cwd=out,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    note("demo, with its groups", demo, lambda: (out / "log.txt").read_text()[-4000:])
    return demo


def read_until(demo: subprocess.Popen[str], text: str) -> str:
    """Read the demo's output up to a line that holds the text; all that was read."""
    lines: list[str] = []
    assert demo.stdout is not None
    for line in demo.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"the demo ended without {text!r}:\n{''.join(lines)}")


def groups_in(out: Path) -> list[int]:
    """Return the process of each group, in their order."""
    lives = sorted((out / "events").glob("group_*_life_0.jsonl"))
    return [json.loads(life.read_text().splitlines()[0])["pid"] for life in lives]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(pids: list[int], *, timeout_s: float) -> list[int]:
    """Wait until none of these processes runs; those that still do after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return alive


@pytest.mark.longest
def test_a_killed_group_comes_back_and_all_end_bit_equal(tmp_path: Path) -> None:
    figures_path = tmp_path / "figures.json"
    how = ["--groups", "2", "--steps", "60", "--kills", "1", "--seed", "7", "--json", str(figures_path)]
    demo = start_demo(tmp_path, DEMO, *how)

    output, _ = demo.communicate(timeout=480)

    assert demo.returncode == 0, output
    figures = json.loads(figures_path.read_text())
    (kill,) = figures["kills"]
    assert figures["verdict"]["is_bit_equal"]
    assert len(set(figures["verdict"]["digests"].values())) == 1 and len(figures["verdict"]["digests"]) == 2
    assert kill["rejoined_step"] > kill["step"]
    assert max(kill["discarded"].values()) <= 1
    assert figures["last_loss"] < 3.3 < figures["first_loss"]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert "OK: all 2 groups ended bit-equal" in output
    accounts = figures["accounts"]
    wall_s = sum(sum(one.values()) for one in accounts.values())
    assert sum(one["unaccounted"] for one in accounts.values()) <= 0.005 * wall_s
    assert accounts[f"group_{kill['group']}"]["down"] >= 0.9 * kill["start_s"]
    assert 0.0 < figures["goodput"] < 1.0 and ": goodput " in output
    plain = figures["without_kills"]
    assert {plain["digest"]} == {*figures["verdict"]["digests"].values()} and plain["ledger"] == figures["ledger"]
    assert (plain["ledger"]["num_missing"], plain["ledger"]["num_twice"]) == (0, 0)


def test_an_interrupt_ends_every_group(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, OF_SMALL_GROUPS, "--steps", "5000", "--kills", "0", "--groups", "2")
    read_until(demo, "starts contributing")
    groups = groups_in(tmp_path)

    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=200)

    assert (len(groups), demo.returncode, wait_until_ended(groups, timeout_s=0)) == (2, 130, []), output


def test_a_group_that_dies_by_itself_ends_the_demo_with_its_name(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, OF_SMALL_GROUPS, "--steps", "5000", "--kills", "0", "--groups", "2")
    read_until(demo, "starts contributing")
    groups = groups_in(tmp_path)

    os.kill(groups[1], signal.SIGKILL)
    output, _ = demo.communicate(timeout=200)

    assert demo.returncode == 1
    assert "group_1 ended by itself" in output
    assert wait_until_ended(groups, timeout_s=0) == []


def test_groups_leave_when_the_demo_itself_is_killed(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, OF_SMALL_GROUPS, "--steps", "5000", "--kills", "0", "--groups", "2")
    read_until(demo, "starts contributing")
    groups = groups_in(tmp_path)

    demo.kill()
    demo.communicate(timeout=200)

    assert wait_until_ended(groups, timeout_s=120) == []


def test_a_plan_that_cannot_be_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["--groups", "1"])

    assert (error.value.code, "somebody must survive a kill" in capsys.readouterr().err) == (2, True)
