"""Every public name that a module of torchft's wheel defines is in the module of that name here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

SPEC = importlib.util.find_spec("torchft")
if SPEC is None or not SPEC.submodule_search_locations:
    pytest.skip("torchft is not installed; scripts/test-torchft runs this", allow_module_level=True)
WHEEL = Path(SPEC.submodule_search_locations[0])
NO_PART_OF_IT = ("_test.py", "_bench.py", "_test_utils.py")
EVERYWHERE = {"T", "S", "logger"}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(WHEEL.rglob("*.py")):
        place = path.relative_to(WHEEL)
        if not path.name.endswith(NO_PART_OF_IT) and place.parts[0] not in ("_test", "examples"):
            yield ".".join(place.with_suffix("").parts).removesuffix("__init__").removesuffix("."), path


def public_names(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in found - EVERYWHERE if not name.startswith("_")}


def without(module: str, names: set[str]) -> set[str]:
    """Return the names that our module lacks; it is only read where the framework that it is for is not installed."""
    try:
        ours = importlib.import_module(module)
    except ModuleNotFoundError as error:
        spec = importlib.util.find_spec(module)
        if error.name != module.rpartition(".")[2] or spec is None or spec.origin is None:
            raise
        return names - public_names(Path(spec.origin))
    return {name for name in names if not hasattr(ours, name)}


@pytest.mark.parametrize(("module", "path"), modules())
def test_every_public_name_is_in_the_module_of_that_name(module: str, path: Path) -> None:
    assert not without(f"torchft_ckpt.{module}".removesuffix("."), public_names(path))


def test_what_the_package_and_the_compiled_module_offer_is_here() -> None:
    import torchft_ckpt._torchft as compiled

    import torchft_ckpt

    package = ast.parse((WHEEL / "__init__.py").read_text())
    offered = [node.value for node in package.body if isinstance(node, ast.Assign)]
    assert all(hasattr(torchft_ckpt, name) for value in offered for name in ast.literal_eval(value))
    stubs = ast.parse((WHEEL / "_torchft.pyi").read_text())
    assert all(hasattr(compiled, node.name) for node in stubs.body if isinstance(node, ast.ClassDef))
