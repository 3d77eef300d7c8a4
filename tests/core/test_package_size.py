"""The package does not grow unnoticed: `package_size.txt` has what it may have, and what a figure was raised for."""

from __future__ import annotations

import ast
from pathlib import Path

import torchft_ckpt

PACKAGE = Path(torchft_ckpt.__file__).parent
FIGURES = Path(__file__).with_name("package_size.txt")


def lines_of_code(text: str) -> int:
    """Return how many lines are no docstring, comment, blank or import."""
    others: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        is_doc = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if (is_import or is_doc) and isinstance(node, ast.stmt):
            others.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(number not in others and line.strip() != "" and line.strip()[0] != "#" for number, line in lines)


def test_the_package_is_not_larger_than_its_figures() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    size = {
        "lines": sum(text.count("\n") for text in texts),
        "code": sum(map(lines_of_code, texts)),
        "files": len(texts),
    }
    allowed = dict(line.split()[:2] for line in FIGURES.read_text().splitlines() if line and line[0] != "#")
    assert {name: int(number) for name, number in allowed.items()}.keys() == size.keys()
    larger = {name: f"{size[name]}, of {number}" for name, number in allowed.items() if size[name] > int(number)}
    assert not larger, (
        f"{larger}: make it smaller, or raise the figure in {FIGURES.name} with a line that says for what"
    )
