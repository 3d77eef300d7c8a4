"""scripts/_env.sh installs when something changed and only then; Python and pip are played by a script that keeps a list."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.processes import run

REPO = Path(__file__).resolve().parents[2]
PRETENDER = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
    *"version_info[:2]"*) echo {version} ;;
    *"version_info <"*) exit {is_old} ;;
    "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *"-m pip install"*) exit ${{PIP_EXIT:-0}} ;;
esac
"""


class Checkout:
    """A copy of the script in a repository of its own, with a pretended Python."""

    def __init__(self, folder: Path, version: str = "3.11") -> None:
        self.folder = folder
        self.calls = folder / "calls"
        (folder / "scripts").mkdir()
        shutil.copy(REPO / "scripts" / "_env.sh", folder / "scripts")
        (folder / "pyproject.toml").write_text("[project]\n")
        self.python = folder / "python3"
        self.python.write_text(PRETENDER.format(version=version, is_old=int(version < "3.10")))
        self.python.chmod(0o755)

    def ensure(self, extras: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `ensure_env EXTRAS` from another folder."""
        self.calls.write_text("")
        command = f'set -eu; source "{self.folder}/scripts/_env.sh"; ensure_env "{extras}"; echo "$PYTHON"'
        given = {"CALLS": str(self.calls), "BASE_PYTHON": str(self.python), "PATH": os.environ["PATH"]}
        return run(
            ["bash", "-c", command],
            cwd="/",
            env=given | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def installed(self) -> list[str]:
        """What pip was asked to install in the last call."""
        lines = self.calls.read_text().splitlines()
        return [line.split()[-1] for line in lines if line.startswith("-m pip install")]


def test_the_first_call_installs_torch_and_then_the_project(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)

    result = checkout.ensure("demo")

    assert (result.returncode, result.stdout) == (0, f"{tmp_path}/.venv/bin/python\n")
    assert checkout.installed() == ["torch==2.13.0", f"{tmp_path}[demo]"]


def test_a_second_call_installs_nothing(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.ensure("demo")

    result = checkout.ensure("demo")

    assert (result.returncode, checkout.installed()) == (0, [])


@pytest.mark.parametrize("change", ["pyproject", "extras", "torch"])
def test_what_changes_the_outcome_installs_again(tmp_path: Path, change: str) -> None:
    checkout = Checkout(tmp_path)
    checkout.ensure("demo")
    if change == "pyproject":
        (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")

    checkout.ensure(
        "test" if change == "extras" else "demo",
        TORCH_REQUIREMENT="torch==2.12.0" if change == "torch" else "torch==2.13.0",
    )

    assert len(checkout.installed()) == 2


def test_a_failed_install_says_so_and_is_tried_again(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)

    failed = checkout.ensure("demo", PIP_EXIT="1")
    again = checkout.ensure("demo")

    assert (failed.returncode, "installing torch==2.13.0 failed" in failed.stderr) == (1, True)
    assert (again.returncode, len(checkout.installed())) == (0, 2)


def test_an_old_python_is_refused_by_its_version(tmp_path: Path) -> None:
    result = Checkout(tmp_path, version="3.09").ensure("demo")

    assert (result.returncode, "is Python 3.09, but 3.10 or newer is needed" in result.stderr) == (1, True)


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    result = Checkout(tmp_path).ensure("demo", BASE_PYTHON="/nowhere/python3")

    assert (result.returncode, "there is no /nowhere/python3" in result.stderr) == (1, True)
