"""The blocks of code on the pages that people read, and how each is run.

A comment before a block says what it needs. Without one it runs by itself: Python in a namespace of its own, a shell in the
repository.

    <!-- block: in one-group -->          the names, the directory and the services of a situation (`support.situations`)
    <!-- block: seconds -->               takes more than a second: `scripts/test --fast` leaves it out
    <!-- block: slow -->                  takes more than a few seconds: `scripts/docs --run` alone runs it
    <!-- block: slow, in short-job -->    both
    <!-- block: needs a GPU -->           is not run, only parsed; so "a cluster", "another host", "a network", and "another
                                          environment" where `scripts/test-integrations` runs what it shows, and
                                          `scripts/test-docs` its commands
    <!-- block: from examples/a.py -->    lines of that script, as they stand there one after another; they run with the script
    <!-- block: story -->                 the page is one story, run from its beginning to its end by `run_story`
    <!-- block: file train.py -->         of such a story: the text of a file
"""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support.situations import SITUATIONS, Situation, shell_environment

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPO.glob("*.md"), *(page for page in REPO.glob("docs/**/*.md") if "_build" not in page.parts)])
NEEDS = {"a GPU", "a cluster", "another host", "another environment", "a network"}
LANGUAGES = ("python", "sh")
SLOWEST_S = 1200.0
_FENCE = re.compile(
    r"(?:^<!-- block: ([^\n]*?) -->\n+)?^(`{3,})([^\n`]*)\n(.*?)^\2 *$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of a page; `how` is what the comment before it says."""

    page: Path
    line: int
    language: str
    how: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"

    @property
    def needs(self) -> str:
        """What this machine may not have; the block is not run."""
        return self.how.removeprefix("needs ") if self.how.startswith("needs ") else ""

    @property
    def script(self) -> str:
        """The script that the block is a part of."""
        return self.how.removeprefix("from ") if self.how.startswith("from ") else ""

    @property
    def is_slow(self) -> bool:
        return "slow" in self.how.split(", ")

    @property
    def takes_seconds(self) -> bool:
        return "seconds" in self.how.split(", ")

    @property
    def is_of_story(self) -> bool:
        return self.how == "story" or self.how.startswith("file ")

    @property
    def situation(self) -> str:
        found = [part.removeprefix("in ") for part in self.how.split(", ") if part.startswith("in ")]
        return found[0] if found else ""


def without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield every block of a page, of any language."""
    text = page.read_text()
    for match in _FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, match.start(2)) + 1, match[3].strip(), match[1] or "", match[4])


def code_blocks() -> list[Block]:
    """Return the blocks of all pages that can be run."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in LANGUAGES]


def problem_of(block: Block) -> str:
    """Say why a block cannot be parsed, or why its comment says nothing; empty where all is well."""
    known = re.fullmatch(
        r"(needs .*|from examples/\w+\.py|slow|seconds|story|file [\w./-]+|((slow|seconds), )?in [\w-]+|)", block.how
    )
    if not known:
        return f"<!-- block: {block.how} --> is none of those that support/pages.py lists"
    if block.needs and block.needs not in NEEDS:
        return f"it needs {block.needs}, which is none of {sorted(NEEDS)}"
    script = (REPO / block.script).read_text() if block.script else ""
    if script and not any(textwrap.indent(block.text, depth * " ") in script for depth in range(0, 20, 4)):
        return f"{block.script} has other lines"
    if block.situation and block.situation not in SITUATIONS:
        return f"there is no situation {block.situation}"
    if block.language == "python":
        try:
            ast.parse(block.text)
        except SyntaxError as error:
            return str(error)
        return ""
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    return done.stderr.strip()


def run_block(block: Block) -> float:
    """Run a block in its situation; return the seconds that it took.

    Raises:
        AssertionError: a command failed; with what it said.
        Exception: what a Python block raised.
    """
    began = time.monotonic()
    with SITUATIONS[block.situation]() as situation:
        text = block.text
        for old, new in situation.replaced.items():
            assert old in text, f"{block.name} has no {old!r} any more, which its situation replaces"
            text = text.replace(old, new)
        if block.language == "python":
            names: dict[str, Any] = {"__name__": "page", **situation.names}
            # Lines count as on the page.
            exec(compile("\n" * block.line + text, block.name, "exec"), names)  # noqa: S102 - our own pages
            situation.after(names)
        else:
            _run_shell(block, text, situation)
    return time.monotonic() - began


def _run_shell(block: Block, text: str, situation: Situation) -> None:
    if situation.serves:
        situation.serve(text)
        return
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=situation.directory or REPO,
        env=situation.environment or shell_environment(),
        capture_output=True,
        text=True,
        timeout=SLOWEST_S,
        check=False,
    )
    said = f"{block.name} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, said
    situation.after({"stdout": done.stdout})


def run_story(page: Path, directory: Path, **shorter: Mapping[str, str]) -> str:
    """Run all blocks of a story in one directory, as its reader does, in one shell; return what they printed.

    Args:
        page: which has the story.
        directory: where to.
        shorter: what is replaced in which of its files, by the file's name without `.py`; it has to stand there.

    Raises:
        AssertionError: a command failed; with what all of them said.
    """
    lines = ["set -euo pipefail"]
    for block in blocks_of(page):
        if block.how.startswith("file "):
            path, text = directory / block.how.removeprefix("file "), block.text
            for old, new in shorter.get(path.stem, {}).items():
                assert old in text, f"{path.name} has no {old!r} any more"
                text = text.replace(old, new)
            path.write_text(text)
        elif block.how == "story" and block.language == "python":
            cell = f"cell_{block.line}.py"
            (directory / cell).write_text("\n" * block.line + block.text)
            lines += [f"echo '== {block.name}'", f"python {cell}"]
        elif block.how == "story":
            lines += [f"echo '== {block.name}'", block.text]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=directory,
        env=shell_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SLOWEST_S,
        check=False,
    )
    assert done.returncode == 0, f"{page.name} ended with {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout
