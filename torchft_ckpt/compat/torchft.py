"""Puts this package in torchft's place: `import torchft` and all its modules are ours, each class once.

    import torchft_ckpt.compat.torchft                            # before anything imports torchft
    python -m torchft_ckpt.compat.torchft [-m] SCRIPT ARGS        # runs an unmodified script so
    torchrun ... -m torchft_ckpt.compat.torchft SCRIPT ARGS
    ray.init(runtime_env={"worker_process_setup_hook": "torchft_ckpt.compat.torchft.install"})

Processes that `multiprocessing` starts anew for such a script have the alias as well. Others, that a script starts by a command
line, do not. torchft itself, if it is installed, is never imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any

from torchft_ckpt.errors import AliasError

ALIAS = "torchft"
PACKAGE = "torchft_ckpt"

_SCRIPT = "TORCHFT_CKPT_COMPAT_SCRIPT"
"""Environment variable for the processes that `multiprocessing` starts: the script's path, or `-m ` and a module."""

_USAGE = f"usage: python -m {PACKAGE}.compat.torchft [-m] SCRIPT [ARGS ...]"


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchft.x` as `torchft_ckpt.x`, the very module: nothing is executed a second time."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(f"{ALIAS}."):
            return None
        ours = importlib.util.find_spec(_ours(fullname))
        if ours is None:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=ours.origin, is_package=ours.submodule_search_locations is not None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Put ours in the place of the empty module that the import system has made."""
        sys.modules[module.__name__] = importlib.import_module(_ours(module.__name__))


def install() -> None:
    """Let `torchft` be this package, in this process, from now on. May be called again.

    Raises:
        AliasError: torchft itself has been imported in this process: classes of both would meet.
    """
    known = sys.modules.get(ALIAS)
    if known is not None and known is not sys.modules.get(PACKAGE):
        raise AliasError(
            f"torchft itself was imported before, from {getattr(known, '__file__', None)}: import {PACKAGE}.compat.torchft"
            " before all that imports torchft",
            party=ALIAS,
        )
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())


def _ours(name: str) -> str:
    return PACKAGE + name.removeprefix(ALIAS)


def main(arguments: Sequence[str]) -> None:
    """Run a script, or with `-m` a module, as `__main__`, with the alias installed. This module has to be `__main__` itself.

    What it raises goes through, `SystemExit` as well.
    """
    is_module = arguments[:1] == ["-m"]
    script, *rest = arguments[is_module:] or [""]
    if not script or script.startswith("-"):
        sys.exit(_USAGE)
    install()
    os.environ[_SCRIPT] = f"-m {script}" if is_module else os.path.abspath(script)
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))
    path, package, code = _code_of_module(script) if is_module else (script, None, _compile(script))
    sys.argv[:] = [path, *rest]
    # In place of this module, not in one of its own as runpy has it: by its `__spec__`, new processes come back here.
    namespace = sys.modules["__main__"].__dict__
    kept = {name: namespace.get(name) for name in ("__name__", "__spec__", "__loader__", "__builtins__")}
    namespace.clear()
    namespace.update(kept, __file__=path, __package__=package, __doc__=None)
    exec(code, namespace)  # noqa: S102  # what a Python interpreter does with the script it was told to run


def _compile(path: str) -> types.CodeType:
    try:
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec")
    except OSError as error:
        sys.exit(f"{PACKAGE}.compat.torchft: {path} cannot be read: {error.strerror}")


def _code_of_module(name: str) -> tuple[str, str, types.CodeType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None:
        sys.exit(f"{PACKAGE}.compat.torchft: there is no module {name} that can be run")
    return str(spec.origin), spec.parent or "", code


def run_in_child() -> dict[str, Any]:
    """Return the names of the script, run as `__mp_main__` in a process that `multiprocessing` has started anew."""
    install()
    script = os.environ[_SCRIPT]
    if script.startswith("-m "):
        return runpy.run_module(script.removeprefix("-m "), run_name="__mp_main__", alter_sys=True)
    return runpy.run_path(script, run_name="__mp_main__")


if __name__ in ("__main__", "__mp_main__"):  # a second copy of this module: the alias is the first one's
    from torchft_ckpt.compat import torchft as first

    if __name__ == "__main__":
        first.main(sys.argv[1:])
    else:
        globals().update(first.run_in_child())
else:
    install()
