"""Every tensor that the library makes names its device: else a script's `torch.set_default_device` would choose it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import torchft_ckpt

PACKAGE = Path(torchft_ckpt.__file__).parent
MAKERS = frozenset(
    {
        *(
            "arange",
            "as_tensor",
            "asarray",
            "empty",
            "empty_permuted",
            "empty_strided",
            "eye",
            "full",
            "linspace",
            "logspace",
        ),
        *("ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
    }
)
"""Of torch's functions those that heed the default device; `torch.frombuffer` and `..._like` do not."""


@pytest.mark.slow
def test_every_tensor_that_is_made_names_its_device() -> None:
    without = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MAKERS
        and ast.unparse(node.func.value) == "torch"
        and all(argument.arg != "device" for argument in node.keywords)
    ]
    assert without == []
