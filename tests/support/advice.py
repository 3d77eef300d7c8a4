"""The messages of the package that say what to do, and where the page Troubleshooting quotes them.

A message carries advice if a clause of it begins with an imperative of the list below ("...; pass --lighthouse or set ..."), or
if it says what a command in backticks does. Messages are all strings of the package but docstrings and the help of commands,
because many a warning is put together from several of them. `torchft_ckpt.testing` is left out: who writes a process group or a
transport reads it, and no operator.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GAP = "…"
_VERBS = (
    r"accept|add|apply|ask|average|begin|call|change|check|choose|clear|compute|connect|convert|copy|cut|do|drain|end|"
    r"find|free|give|hand|have|hold|import|install|keep|launch|leave|let|load|look|lower|make|mend|move|name|pass|put|"
    r"raise|read|register|remove|replace|restart|return|run|save|set|share|sort|start|step|store|take|train|try|turn|"
    r"unset|update|upgrade|use|wait|wrap|write"
)
_VERB = rf"(?:{_VERBS})\b(?! {GAP})"
_IMPERATIVE = re.compile(
    rf"[.;:] {_VERB}|\belse {_VERB}|\b(?:To|Where|If) [^.,]+, {_VERB}|`[a-z][\w -]+`.* (?:starts|keeps|sets)|"
    rf"^{_VERB} (?:a|an|the|it|one|them|another|all|to|each)\b",
    re.IGNORECASE,
)
_OF_COMMANDS = ("help", "description", "epilog")
_MIN_WORDS = 5
_MIN_QUOTED_WORDS = 3


class Message(NamedTuple):
    """A string of the package; `GAP` stands for what the program fills in."""

    place: str
    text: str

    @property
    def advises(self) -> bool:
        return len(self.text.split()) >= _MIN_WORDS and _IMPERATIVE.search(self.text) is not None


def messages(package: Path) -> list[Message]:
    """Return all strings of a package's modules that people may see when it runs."""
    found: list[Message] = []
    for path in sorted(package.rglob("*.py")):
        if path.parent.name == "testing":
            continue
        tree = ast.parse(path.read_text())
        found += [Message(f"{path.relative_to(package.parent)}:{line}", text) for line, text in _strings(tree)]
    return found


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    left_out: set[int] = set()
    for node in ast.walk(tree):  # a node comes before what is in it
        if id(node) in left_out:
            left_out.update(map(id, ast.iter_child_nodes(node)))
        elif isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg in _OF_COMMANDS):
            if isinstance(node.value, ast.Constant | ast.JoinedStr):
                left_out.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            left_out.update(map(id, node.values))
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            yield node.lineno, _said("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, _said(node.value)


def _said(text: str) -> str:
    """Without what is put in, and without line ends."""
    return " ".join(re.sub(r"%[-+.\d]*[a-z]|\{[\w.!:]*\}", GAP, text).split())


def quotes(page: str) -> list[str]:
    """Return what the first column of a page's tables has in backticks."""
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    return [quote for cell in cells for quote in re.findall(r"``? ?(.+?) ?``?(?=[,;]| *$)", cell)]


def parts_of(quote: str) -> list[str]:
    """Return the words of a quote, which has `...` for what the program fills in."""
    return [part.strip() for part in quote.split("...") if part.strip()]


def fits(quote: str, text: str) -> bool:
    """Whether the words of a quote stand in a message, in their order. One or two words fit none."""
    if sum(len(part.split()) for part in parts_of(quote)) < _MIN_QUOTED_WORDS:
        return False
    at = 0
    for part in parts_of(quote):
        if (at := text.find(part, at)) < 0:
            return False
        at += len(part)
    return True
