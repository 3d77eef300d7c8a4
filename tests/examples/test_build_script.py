"""scripts/build refuses a commit whose tag names another version than the package."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.processes import run

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("tags", "refused"),
    [(["v9.9.9"], "v9.9.9"), (["v0.1.0", "v9.9.9"], "v9.9.9"), (["v0.1.0"], ""), (["other"], ""), ([], "")],
)
def test_a_tag_for_another_version_is_refused_before_anything_is_built(
    tmp_path: Path, tags: list[str], refused: str
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "torchft_ckpt").mkdir()
    shutil.copy(REPO / "scripts" / "build", tmp_path / "scripts")
    (tmp_path / "scripts" / "_env.sh").write_text(
        f'REPO="{tmp_path}"; PYTHON=true; fail() {{ echo "$*" >&2; exit 1; }}; ensure_env() {{ echo "builds"; }}\n'
    )
    (tmp_path / "torchft_ckpt" / "__init__.py").write_text('"""A package."""\n\n__version__ = "0.1.0"\n')

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "A version")
    for tag in tags:
        git("tag", tag)
    done = run(
        [str(tmp_path / "scripts" / "build"), str(tmp_path / "dist")],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ("builds" in done.stdout) is not bool(refused)
    if refused:
        assert done.returncode == 1
        assert f"has the tag {refused}, and __version__ is 0.1.0" in done.stderr
