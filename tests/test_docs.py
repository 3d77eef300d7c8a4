"""The pages that people read: their links lead somewhere, their code is of this library, their commands are taken."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
from support import framework_pages
from support.pages import (
    LANGUAGES,
    PAGES,
    REPO,
    Block,
    blocks_of,
    code_blocks,
    problem_of,
    run_block,
    run_story,
    without_blocks,
)

import torchft_ckpt
from torchft_ckpt import config, errors
from torchft_ckpt.__main__ import _parser
from torchft_ckpt.checkpointing.state.format import FORMAT_VERSION
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Role

OUR_OWN_EXTRAS = {"demo", "examples", "metrics", "tls", "test", "docs", "site", "package", "bench"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(without_blocks(page))}


def has(module: str, name: str) -> bool:
    """Whether a name can be imported from a module, also where the framework that the module is for is not installed."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        if not module.startswith(("torchft_ckpt.integrations.", "torchft_ckpt.torchx")):
            raise
        tree = ast.parse((REPO / f"{module.replace('.', '/')}.py").read_text())
        return name in [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


@each_page
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    for target in LINK.findall(without_blocks(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors_of(there), target


@each_page
def test_blocks_are_code_and_import_what_there_is(page: Path) -> None:
    for block in blocks_of(page):
        if block.language not in LANGUAGES:
            assert not block.how, f"{block.name} is no code, and so is not run"
            continue
        assert problem_of(block) == "", block.name
        for node in ast.walk(ast.parse(block.text if block.language == "python" else "")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchft_ckpt"):
                assert [alias.name for alias in node.names if not has(str(node.module), alias.name)] == [], block.name


@each_page
def test_a_wait_up_to_the_join_timeout_has_its_condition_beside_it(page: Path) -> None:
    """Half of the living groups wait for the others without end, whatever the timeout is."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|])", page.read_text()):
        if re.search(r"--join-timeout-ms|join timeout", paragraph) and "wait" in paragraph:
            assert re.search(r"more\s+than\s+half", paragraph), paragraph


@each_page
def test_commands_of_the_library_are_taken(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = re.compile(r"python -m torchft_ckpt (?!\.)([^`\n]+)")
    lines = [
        line
        for block in blocks_of(page)
        if block.language == "sh"
        for line in command.findall(block.text.replace("\\\n", " "))
    ]
    for line in [*lines, *command.findall(without_blocks(page))]:
        if "|" not in line and "COMMAND" not in line:
            _parser().parse_args(shlex.split(re.split(r" [>&]", line)[0], comments=True))


def entries_of(page: Path) -> list[Path]:
    """Return the pages that a page puts into the sidebar."""
    tables = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    entries = [line for table in tables for line in table.splitlines() if line and not line.startswith(":")]
    return [(page.parent / f"{entry.rpartition('<')[2].strip('>')}.md").resolve() for entry in entries]


def test_two_tutorials_on_one_machine_never_meet() -> None:
    """Each has a lighthouse at a port of its own, or of `run`, and kills no process of another."""
    pages: dict[str, set[str]] = {}
    for block in code_blocks():
        assert not re.search(r"\bp(grep|kill)\b", block.text), f"{block.name} looks for a process on the whole machine"
        for port in re.findall(r"lighthouse .*--bind 127\.0\.0\.1:(\d+)", block.text):
            pages.setdefault(port, set()).add(block.page.name)
    assert len(pages) >= 3
    assert {port: names for port, names in pages.items() if len(names) > 1} == {}


def test_what_is_typed_of_a_frameworks_page_is_all_of_it_but_the_installation() -> None:
    page = REPO / "docs" / "guides" / "fabric.md"
    typed = framework_pages.script_of(page)
    shown = [block.text for block in blocks_of(page) if block.language == "sh" and block.needs]
    assert [text in typed for text in shown] == [not text.startswith("pip install") for text in shown]
    assert {"fabric", "lightning", "ray", "transformers"} <= set(framework_pages.names())
    digest, other = "0123456789abcdef", "fedcba9876543210"
    for states, is_right in [((digest, digest), True), ((digest, other), False), ((digest,), False), ((), False)]:
        said = "\n".join(["--- a block", f"state {other}", "--- the last", *(f"[0] state {one}" for one in states)])
        assert (framework_pages.problem_of(said) == "") is is_right


def test_each_page_is_in_the_sidebar_once() -> None:
    door = REPO / "docs/index.md"
    listed = [entry for page in (door, REPO / "docs/reference/index.md") for entry in entries_of(page)]
    assert sorted(listed) == [page for page in PAGES if page != door]


def test_the_door_takes_its_story_from_the_readme() -> None:
    readme = (REPO / "README.md").read_text()
    parts = re.findall(r':start-after: "(.*)"\n:end-before: "(.*)"', (REPO / "docs/index.md").read_text())
    benefit, code, figures, whom = (readme.partition(begin)[2].partition(end)[0] for begin, end in parts)
    assert benefit.strip().startswith("**")
    assert code.count("```") == 2
    assert figures.count("\n|") == 5
    assert whom.count("\n## ") == 2


def test_the_figures_of_the_readme_are_measured() -> None:
    pages = (REPO / name for name in ("README.md", "docs/benchmarks.md"))
    readme, measured = (re.sub(r"(\d),(\d{3})", r"\1\2", page.read_text()) for page in pages)
    rows = re.findall(r"^\| .* \| (\d[\d.]*(?: ms| s|x)) \| (.*) \|$", readme.partition("## Figures")[2], re.MULTILINE)
    assert len(rows) == 5 and [row for row in rows if not all(figure in measured for figure in row)] == []


def test_the_glossary_has_the_parts_that_logs_and_status_name() -> None:
    glossary = (REPO / "docs/glossary.md").read_text()
    assert [role.value for role in Role if f"**{role.value}**" not in glossary] == []


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


# Blocks that are run


def short_blocks(language: str) -> list[object]:
    return [
        pytest.param(block, id=block.name, marks=[pytest.mark.slow] if block.takes_seconds else [])
        for block in code_blocks()
        if block.language == language and not (block.is_slow or block.needs or block.script or block.is_of_story)
    ]


@pytest.mark.parametrize("block", short_blocks("python"))
def test_a_block_of_python_runs(block: Block) -> None:
    run_block(block)


@pytest.mark.processes
@pytest.mark.parametrize("block", short_blocks("sh"))
def test_a_block_of_commands_runs(block: Block) -> None:
    run_block(block)


# What is taken from the code


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(page.read_text() for page in (REPO / "docs/reference/api").glob("*.md"))
    documented = set(re.findall(r"\.\. auto\w+:: torchft_ckpt\.(\w+)$", pages, re.MULTILINE))
    assert documented >= set(torchft_ckpt.__all__)


def test_the_page_about_deploying_names_the_variables_that_are_read() -> None:
    page = (REPO / "docs/deploy.md").read_text()
    names = {
        name for value in vars(config).values() if isinstance(value, tuple) for name in value if isinstance(name, str)
    }
    assert sorted(name for name in names if name.startswith("TORCHFT_CKPT_") and f"`{name}`" not in page) == []


def test_the_reference_has_what_the_guides_import_for_frameworks() -> None:
    reference = (REPO / "docs/reference/api/integrations.md").read_text()
    imported = {
        f"{node.module}.{alias.name}"
        for block in code_blocks()
        if block.language == "python"
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchft_ckpt.integrations.")
        for alias in node.names
        if not str(node.module).startswith("torchft_ckpt.integrations.dcp")
    }
    assert imported and [name for name in imported if f".. autoclass:: {name}\n" not in reference] == []


def test_the_versions_of_the_compatibility_page_are_those_of_the_code() -> None:
    page = (REPO / "docs/compatibility.md").read_text()
    for what, version in (("messages between", PROTOCOL_VERSION), ("a state on its way", FORMAT_VERSION)):
        assert re.findall(rf"^\| {what}[^|]*\| (\d+) \|", page, re.MULTILINE) == [str(version)]


def test_the_versions_of_frameworks_are_those_of_the_project() -> None:
    project = (REPO / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    wanted = {
        extra: re.findall(r'"([^"]+)"', needs)
        for extra, needs in re.findall(r"^(\w+) = \[(.*?)\]$", project, re.M | re.S)
    }
    page = (REPO / "docs/compatibility.md").read_text().partition("## Versions of frameworks")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE)
    assert {extra: re.findall(r"`([^`]+)`", versions) for extra, versions in rows} == {
        extra: needs for extra, needs in wanted.items() if extra not in OUR_OWN_EXTRAS
    }


def test_the_diagrams_are_those_that_the_tables_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "docs/_sphinx"))
    diagrams = importlib.import_module("diagrams")
    for name, draw in diagrams.DIAGRAMS.items():
        assert (REPO / "docs/diagrams" / name).read_text() == draw(), f"{name} is old: run scripts/diagrams"


# The package


def test_the_readme_tells_what_each_extra_is_for() -> None:
    readme = (REPO / "README.md").read_text()
    project = (REPO / "pyproject.toml").read_text()
    section = project[project.index("[project.optional-dependencies]") : project.index("[project.scripts]")]
    extras = re.findall(r"^(\w+) = \[", section, re.MULTILINE)
    assert extras and [extra for extra in extras if f"`{extra}`" not in readme] == []


def test_the_readme_shows_no_picture_that_the_package_index_cannot() -> None:
    assert re.findall(r"!\[[^\]]*\]\((?!https://)[^)]*\)", (REPO / "README.md").read_text()) == []


# The story


@pytest.mark.longest
@pytest.mark.processes
@pytest.mark.slow
def test_the_tutorial_goes_as_it_is_written(tmp_path: Path) -> None:
    """But for fewer steps; `scripts/docs --run` makes all of them."""
    said = run_story(REPO / "docs/tutorial.md", tmp_path, train={"< 1000": "< 300", "% 100": "% 30"})
    assert re.search(r"group 0 discarded [01] steps", said), said
    assert (tmp_path / "picture.png").stat().st_size > 10_000
