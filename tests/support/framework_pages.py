"""`scripts/test-docs`: types what a framework's page says, in its environment, until the groups end with equal states.

All blocks of the page are one shell, so that its variables hold. A block that looks at the last lines is repeated until these
have `participants=2/2`, as the page says; the page's last block prints each group's state.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.pages import REPO, blocks_of

LIMIT_S = 1800


def names() -> list[str]:
    """Return the pages that such commands are on."""
    return [page.stem for page in sorted((REPO / "docs" / "guides").glob("*.md")) if "kill -9" in script_of(page)]


def script_of(page: Path) -> str:
    """Return what a reader types, without the installation."""
    lines = ["set -euo pipefail"]
    for block in blocks_of(page):
        if block.language != "sh" or block.needs != "another environment" or block.text.startswith("pip install"):
            continue
        lines.append(f"echo '--- {block.name}'")
        if "participants=" in block.text:
            lines += ["until { ", block.text, "} | tee /dev/stderr | grep -q participants=2/2; do sleep 2; done"]
        else:
            lines.append(block.text)
    return "\n".join(lines)


def problem_of(said: str) -> str:
    """Say what is wrong with the states that the page's last block printed; empty: each is there twice at least."""
    states = Counter(re.findall(r"state ([0-9a-f]{16,})", said.rpartition("--- ")[2]))
    return "" if states and min(states.values()) > 1 else f"the states at the end are {dict(states)}"


def type_page(name: str) -> str:
    """Type a page; return what is wrong, and print what was seen."""
    page = REPO / "docs" / "guides" / f"{name}.md"
    python = REPO / f".venv-{name}" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        for part in ("examples", "tests", "CONTRIBUTING.md"):
            (Path(folder) / part).symlink_to(REPO / part)
        # This environment has its torch from another one, and so not the command that torch brings.
        commands = Path(folder) / "commands"
        commands.mkdir()
        (commands / "torchrun").write_text('#!/bin/sh\nexec python -m torch.distributed.run "$@"\n')
        (commands / "torchrun").chmod(0o755)
        environment = {**os.environ, "PATH": f"{python}:{commands}:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}
        process = subprocess.Popen(
            ["bash", "-c", script_of(page)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            said += f"\nnot done after {LIMIT_S} s"
        print(said)
        if process.returncode:
            logs = [f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(Path(folder).glob("*.log"))]
            print(*logs, sep="\n")
            return f"a command ended with {process.returncode}"
    return problem_of(said)


def main() -> int:
    if sys.argv[1:] == ["--names"]:
        print(*names())
        return 0
    began = time.monotonic()
    problem = type_page(sys.argv[1])
    print(f"{sys.argv[1]}: {problem or 'as the page says'}, {time.monotonic() - began:.0f} s")
    return bool(problem)


if __name__ == "__main__":
    sys.exit(main())
