"""Imports every module and every public name of the package that is installed in a folder; `scripts/test-package` calls it."""

import importlib
import pkgutil
import sys
from importlib.metadata import version
from pathlib import Path

import torchft_ckpt

site = Path(sys.argv[1])
assert Path(torchft_ckpt.__file__).is_relative_to(site), (
    f"{torchft_ckpt.__file__} is not the package that was installed"
)
assert version("torchft_ckpt") == torchft_ckpt.__version__, "the wheel has another version than the package"
assert (site / "torchft_ckpt/py.typed").exists(), "py.typed is not in the wheel"
assert sorted(path.name for path in site.iterdir() if path.name.startswith(("test", "example", "doc"))) == []

for name in torchft_ckpt.__all__:
    getattr(torchft_ckpt, name)
modules = [module.name for module in pkgutil.walk_packages(torchft_ckpt.__path__, "torchft_ckpt.")]
left_out = []
for module in modules:
    if module.endswith((".__main__", "torchft_ckpt.compat.torchft")):  # they act when they are imported
        continue
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        needs_framework = module.startswith(("torchft_ckpt.integrations.", "torchft_ckpt.torchx"))
        if not needs_framework or str(error.name).startswith("torchft_ckpt"):
            raise
        left_out.append(f"{module} (needs {error.name})")
print(
    f"{len(torchft_ckpt.__all__)} public names and {len(modules) - len(left_out)} modules are there",
    *left_out,
    sep="; ",
)
