"""How Sphinx makes the pages; `scripts/docs` calls it.

Its source directory is the repository, not docs/: so each link leads where it leads on GitHub. It fetches nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_sphinx"), str(DOCS.parent)]

from from_code import AS_IF_INSTALLED  # noqa: E402

import torchft_ckpt  # noqa: E402

project = "torchft_ckpt"
version = release = torchft_ckpt.__version__
copyright = "the authors of torchft_ckpt, Apache 2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "from_code"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "docs/_*", "examples", "scripts", "tests", "torchft_ckpt"]

myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a docstring that is a specification begins below the heading of its page

# Docstrings are in Google's style. One backtick is code, and a link where it is a name of ours.
default_role = "name"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
autodoc_mock_imports = AS_IF_INSTALLED
add_module_names = False
python_maximum_signature_line_length = 60
toc_object_entries_show_parents = "hide"

highlight_language = "text"

nitpicky = True
# Names of others, which are documented elsewhere, and no page of theirs is fetched.
OTHERS = (
    "timedelta|ReduceOp|Work|abc|asyncio|collections|concurrent|contextlib|dataclasses|datetime|enum|fsspec|io|logging|msgspec|numpy|os|pathlib|signal|ssl"
    "|threading|torch|types|typing|typing_extensions|dist|nn|optim"
    "|accelerate|lightning|transformers|TrainerCallback"
)
nitpick_ignore_regex = [("py:.*", rf"({OTHERS})(\..*)?")]

html_theme = "furo"
html_title = f"torchft_ckpt {release}"
html_extra_path = ["_root"]
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["pages.js"]
html_logo = html_favicon = "_static/logo.svg"
_QUIET = {"color-sidebar-link-text--top-level": "var(--color-sidebar-link-text)"}
html_theme_options = {"light_css_variables": _QUIET, "dark_css_variables": _QUIET}
html_copy_source = False
html_show_sphinx = False
