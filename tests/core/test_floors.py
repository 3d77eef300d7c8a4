"""Imports point down only, `core` is pure, and what needs no torch does not import it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import torchft_ckpt

PACKAGE = Path(torchft_ckpt.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))

FLOORS = {
    "errors": 0,
    "events": 0,
    "config": 0,
    "network": 1,
    "tls": 1,
    "threads": 0,
    "memory": 0,
    "compat": 0,
    "core": 1,
    "front": 1,
    "coordination": 2,
    "checkpointing": 2,
    "process_group": 2,
    "integrations": 3,
    "integrations/accelerate": 5,
    "integrations/transformers": 5,
    "integrations/lightning": 5,
    "manager": 3,
    "optimizer": 4,
    "checkpointer": 4,
    "ddp": 4,
    "exact": 4,
    "data": 4,
    "fsdp": 4,
    "local_sgd": 4,
    "outer": 4,
    "launcher": 4,
    "torchx": 5,
    "testing": 5,
    "cli": 5,
    "__init__": 5,
    "__main__": 5,
}
BESIDE = {
    # Of one floor, who may use whom, apart from a package its own modules.
    "config": {"errors"},
    "compat": {"errors"},
    "network": {"core"},
    "tls": {"core"},
    "front": {"core", "network", "tls"},
    "optimizer": set(),
    "exact": {"data"},
    "local_sgd": {"outer"},
    "__init__": {"testing"},
    "__main__": {"__init__", "testing", "cli"},
    "testing": set(),
}
STANDARD_BUT_NOT_PURE = {
    "asyncio",
    "concurrent",
    "contextvars",
    "datetime",
    "http",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
}


@cache
def imports(module: str) -> frozenset[str]:
    """Return the full names of what a module imports.

    Imports under TYPE_CHECKING are none. Nor are those of an integration inside of a function: it is found when it is needed.
    """
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            before = {*found}
            for child in ast.iter_child_nodes(node):
                visit(child)
            found.difference_update(name for name in found - before if name.startswith("torchft_ckpt.integrations"))
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            if node.module == "torchft_ckpt":
                found.update(f"torchft_ckpt.{alias.name}" for alias in node.names)
            elif node.module:
                found.add(node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return frozenset(found)


def top(name: str) -> str:
    """`torchft_ckpt.core.coordination.messages` to `core`; the package itself is `__init__`."""
    return name.split(".")[1] if "." in name else "__init__"


def imports_inside(folder: str) -> list[tuple[str, str]]:
    """Return each module whose path begins so, with each name that it imports."""
    return [(module, name) for module in MODULES if module.startswith(folder) for name in sorted(imports(module))]


def test_core_knows_decisions_only() -> None:
    allowed = {"msgspec", "torchft_ckpt"}
    found = imports_inside("core/")
    assert found
    for module, name in found:
        root = name.split(".")[0]
        is_pure = root in allowed or (root in sys.stdlib_module_names and root not in STANDARD_BUT_NOT_PURE)
        assert is_pure, f"{module} imports {name}"
        assert root != "torchft_ckpt" or top(name) in {"core", "errors"}, f"{module} imports {name}"


CORE_PACKAGES = sorted({module.split("/")[1] for module in MODULES if re.fullmatch(r"core/[a-z]\w*/.*", module)})
MAPS = ["core", *(f"core/{package}" for package in CORE_PACKAGES), "integrations", "integrations/dcp"]


@pytest.mark.parametrize("package", MAPS)
def test_the_map_of_a_package_has_a_line_for_each_module(package: str) -> None:
    lines = (ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or "").splitlines()
    named = [name for line in lines for name in re.findall(r"^([a-z_]+) {2,}\S", line)]
    inside = {
        module.removeprefix(f"{package}/").split("/")[0] for module in MODULES if module.startswith(f"{package}/")
    }
    assert sorted(named) == sorted(inside - {"__init__"})


def test_packages_of_core_import_each_other_in_one_direction() -> None:
    uses: dict[str, set[str]] = {}
    for module, name in imports_inside("core/"):
        if name.startswith("torchft_ckpt.core."):
            uses.setdefault(module.split("/")[1], set()).add(name.split(".")[2])
    TopologicalSorter({package: used - {package} for package, used in uses.items()}).prepare()


def test_integrations_are_imported_where_they_are_needed() -> None:
    """But by the commands, which are imported one by one, and by the package's own table of names."""
    users = {module for module, name in imports_inside("") if name.startswith("torchft_ckpt.integrations")}
    assert {module for module in users if not module.startswith(("integrations/", "cli/"))} == set()


def test_imports_point_down_only() -> None:
    without = {module.split("/")[0] for module in MODULES} - FLOORS.keys()
    assert not without, f"{sorted(without)} have no floor yet: add them to DESIGN and here"
    for module, name in imports_inside(""):
        mine = module.split("/")[0]
        if mine == "__init__" or name.split(".")[0] != "torchft_ckpt" or top(name) == mine:
            continue
        other = top(name)
        if other not in FLOORS:
            continue  # a name of the package itself, such as __version__
        is_down = FLOORS[other] < FLOORS.get(module, FLOORS[mine])
        assert is_down or other in BESIDE.get(mine, set()), f"{module} imports {name}"


@pytest.mark.processes
@pytest.mark.parametrize(
    "statement",
    [
        "import torchft_ckpt",
        "from torchft_ckpt.core.coordination import group, lighthouse, replica",
        "import torchft_ckpt.coordination.lighthouse_server",
        "import sys; sys.path.insert(0, 'tests'); import simulation.run",
        "from torchft_ckpt import LighthouseServer",
        "import runpy, sys; sys.argv = ['torchft_ckpt', '--help']; runpy.run_module('torchft_ckpt', run_name='__main__')",
    ],
)
def test_what_needs_no_torch_does_not_import_it(statement: str) -> None:
    program = (
        f"import sys\ntry:\n    exec({statement!r})\nexcept SystemExit:\n    pass\n"
        "sys.exit(9 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]


INNER_FLOORS = ["state", "serving", "fetching", "resharding", "durable"]


@pytest.mark.parametrize("folder", INNER_FLOORS)
def test_inside_of_checkpointing_imports_point_down_too(folder: str) -> None:
    above = INNER_FLOORS[INNER_FLOORS.index(folder) + 1 :]
    inside = [module for module in MODULES if module.startswith(f"checkpointing/{folder}")]
    assert inside
    for module in inside:
        for name in imports(module):
            parts = name.split(".")
            assert parts[:2] != ["torchft_ckpt", "checkpointing"] or parts[2:3] == [] or parts[2] not in above, (
                f"{module} imports {name}"
            )


@pytest.mark.parametrize("folder", ["fetching", "resharding"])
def test_who_receives_does_not_import_who_serves(folder: str) -> None:
    for module, name in imports_inside(f"checkpointing/{folder}/"):
        assert not name.startswith("torchft_ckpt.checkpointing.serving"), f"{module} imports {name}"


DURABLE_FLOORS = [["names"], ["storage"], ["format"], ["reading"], ["saving", "cooperative_read"]]


@pytest.mark.parametrize("floor", range(len(DURABLE_FLOORS)))
def test_inside_of_durable_imports_point_down_too(floor: int) -> None:
    prefix = "torchft_ckpt.checkpointing.durable."
    for mine in DURABLE_FLOORS[floor]:
        inside = [module for module in MODULES if module.startswith(f"checkpointing/durable/{mine}")]
        assert inside
        above = {other for others in DURABLE_FLOORS[floor:] for other in others} - {mine}
        for module in inside:
            for name in imports(module):
                assert not name.startswith(prefix) or name.removeprefix(prefix).split(".")[0] not in above, (
                    f"{module} imports {name}"
                )


def test_disk_does_not_import_the_network() -> None:
    network = {*INNER_FLOORS[1:-1], "http_transport", "transport", "protocol", "address"}
    for folder in ("storage", "format", "reading"):
        found = imports_inside(f"checkpointing/durable/{folder}/")
        assert found
        for module, name in found:
            parts = name.split(".")
            is_network = parts[:2] == ["torchft_ckpt", "checkpointing"] and parts[2] in network
            assert not is_network, f"{module} imports {name}"


def test_decoders_are_made_when_a_module_is_imported() -> None:
    """msgspec looks at a class when it first decodes one; two threads that do so at once crash the process."""
    assert not [module for module in MODULES if "msgspec.json.decode(" in (PACKAGE / f"{module}.py").read_text()]


def test_no_collective_carries_pickles() -> None:
    """Those of torch that take any object unpickle what they receive."""
    objects = re.compile(r"\.(all_gather|gather|scatter|broadcast|send|recv)_object")
    assert not [module for module in MODULES if objects.search((PACKAGE / f"{module}.py").read_text())]


def test_all_threads_are_of_the_class_that_ends_before_the_interpreter_does() -> None:
    """But in `testing`, whose threads are those of a test."""
    others = [module for module in MODULES if module.split("/")[0] not in ("threads", "testing")]
    for module in others:
        text = (PACKAGE / f"{module}.py").read_text()
        assert not re.search(r"threading\.Thread\(|(Thread|Process)PoolExecutor", text), module
