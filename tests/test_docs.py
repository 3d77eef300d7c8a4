"""The pages that people read: their links lead somewhere, their code is of this library, their commands are taken."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchft_ckpt import errors
from torchft_ckpt.__main__ import _parser

REPO = Path(__file__).parent.parent
PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))


def text_of(page: Path) -> str:
    """Without blocks of code."""
    return BLOCK.sub("", page.read_text())


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text_of(page))}


def has(module: str, name: str) -> bool:
    """Whether a name can be imported from a module, also where the framework that the module is for is not installed."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        if not module.startswith(("torchft_ckpt.integrations.", "torchft_ckpt.torchx")):
            raise
        tree = ast.parse((REPO / f"{module.replace('.', '/')}.py").read_text())
        return name in [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def blocks_of(page: Path, language: str) -> Iterator[str]:
    return (body for found, body in BLOCK.findall(page.read_text()) if found == language)


@each_page
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    for target in LINK.findall(text_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors_of(there), target


@each_page
def test_code_is_python_and_imports_what_there_is(page: Path) -> None:
    for block in blocks_of(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchft_ckpt"):
                assert [alias.name for alias in node.names if not has(str(node.module), alias.name)] == []


@each_page
def test_commands_of_the_library_are_taken(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = re.compile(r"python -m torchft_ckpt (?!\.)([^`\n]+)")
    lines = [line for block in blocks_of(page, "sh") for line in command.findall(block)]
    for line in [*lines, *command.findall(text_of(page))]:
        if "|" not in line and "COMMAND" not in line:
            _parser().parse_args(shlex.split(line, comments=True))


def test_every_error_is_explained() -> None:
    page = (REPO / "docs/errors.md").read_text()
    tree = [
        error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.TorchftCkptError)
    ]
    bases = {base for error in tree for base in error.__mro__[1:]}
    assert [error.__name__ for error in tree if error not in bases and f"`{error.__name__}`" not in page] == []


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len((REPO / "README.md").read_bytes()) <= 10_000
