"""scripts/test-versions names tests of the suite: a name that is gone would end continuous integration after half an hour."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_each_test_that_it_names_is_there() -> None:
    named = re.findall(
        r"^ +(tests/\S+\.py)(?:::(\w+))?$", (REPO / "scripts" / "test-versions").read_text(), re.MULTILINE
    )
    assert named
    for file, test in named:
        there = [node.name for node in ast.parse((REPO / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert not test or test in there, f"{file} has no {test}"
