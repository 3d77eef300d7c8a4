"""Everything can be imported: on the oldest versions too, where syntax, typing or torch's own names may be others."""

from __future__ import annotations

import importlib
import pkgutil

import torchft_ckpt

_TAKES_OVER = ("torchft_ckpt.__main__", "torchft_ckpt.compat")
"""Importing these is meant to change the process."""
_FRAMEWORKS = ("accelerate", "transformers", "lightning", "torchx")
"""Modules of these names need the framework; `scripts/test-integrations` imports them."""


def problem(module: str, name: str | None = None) -> str | None:
    try:
        imported = importlib.import_module(module)
        if name is not None:
            getattr(imported, name)
    except Exception as error:
        return f"{name or module}: {error!r}"
    return None


def test_every_public_name_and_every_module_can_be_imported() -> None:
    found = [module.name for module in pkgutil.walk_packages(torchft_ckpt.__path__, "torchft_ckpt.")]
    modules = [name for name in found if not name.startswith(_TAKES_OVER) and not name.endswith(_FRAMEWORKS)]
    tried = [problem("torchft_ckpt", name) for name in torchft_ckpt.__all__] + [problem(name) for name in modules]
    assert (len(tried) > 100, [said for said in tried if said]) == (True, [])
