"""What pages take from the code, so that nothing is written twice.

`{module-text} MODULE`      the docstring of a module, which is Markdown: a specification, a table
`{command-options}`         the help of every command
`.. summary::`              a table of what a page of the reference documents: each name, what it is, and its methods
`name`                      the role of what stands in backticks in a docstring: code, and a link where the name is on a page
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from typing import Any, TypeVar

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.inspect import signature as sphinx_signature
from sphinx.util.inspect import stringify_signature

OURS = "torchft_ckpt"
AS_IF_INSTALLED = ["accelerate", "lightning", "transformers"]
"""What integrations are for: their reference needs none of it."""
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
_ERRORS = re.compile(r"[A-Z][\w.]*(Error|Exception|Interrupt)(, [A-Z][\w.]*(Error|Exception|Interrupt))*:")
_NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")


def joined_rows(text: str) -> str:
    """Return Markdown whose table rows are one line each: one that begins with an empty cell goes on with that before."""
    lines: list[str] = []
    for line in text.splitlines():
        if re.match(r"\|\s+\|", line) and lines and lines[-1].startswith("|"):
            before, more = (row.strip().strip("|").split("|") for row in (lines[-1], line))
            cells = (f"{a.strip()} {b.strip()}".strip() for a, b in zip(before, more, strict=True))
            lines[-1] = f"| {' | '.join(cells)} |"
        else:
            lines.append(line)
    return "\n".join(lines)


class ModuleText(SphinxDirective):
    """The docstring of a module, without its first line if `:body:` is given."""

    required_arguments = 1
    option_spec = {"body": lambda given: True}

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        text = joined_rows(inspect.getdoc(module) or "")
        if "body" in self.options:
            text = text.partition("\n\n")[2]
        return _markdown(self, text)


class CommandOptions(SphinxDirective):
    """The help of every command, as argparse prints it."""

    def run(self) -> list[nodes.Node]:
        from torchft_ckpt.__main__ import _parser

        return _markdown(self, "\n".join(_help(_parser(), level=2)))


def _help(parser: argparse.ArgumentParser, level: int) -> list[str]:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)  # type: ignore[assignment]
    found: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                command.prog = f"{parser.prog} {name}"
                subcommands = _help(command, level + 1)
                found += [f"{'#' * level} {command.prog.removeprefix('torchft-ckpt ')}", ""]
                found += ["```text", command.format_help().rstrip(), "```", "", *subcommands]
    return found


def _markdown(directive: SphinxDirective, text: str) -> list[nodes.Node]:
    return directive.parse_text_to_nodes(text, allow_section_headings=True)


def prepare_docstring(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Say in reStructuredText what the docstrings of this library leave to the eye; before napoleon reads their sections.

    What is indented and in no section stands as it is: code, a tree, a table. A colon in the text of an attribute, or of what is
    returned, does not end a type. A sentence among the errors that names none comes behind them.
    """
    if elsewhere := _written_elsewhere(what, name, of):
        lines[:] = [f"As `{elsewhere}`."]
        return
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"
        return
    found: list[str] = []
    of_all: list[str] = []
    section, is_verbatim, is_joined, is_of_all = "", False, False, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        is_after_blank = not found or not found[-1].strip()
        if line and not indent:
            match = _SECTION.fullmatch(line)
            section, is_verbatim = match[1] if match else "", False
        elif line and not section and indent >= 4 and is_after_blank and not is_verbatim:
            is_verbatim = True
            found += ["::", ""]
        elif section in ("Returns", "Yields") and found[-1] == f"{section}:":
            line = f"{line[:indent]}: {line[indent:]}"
        elif section == "Raises" and indent == 4 and line:
            if is_joined:
                line = f"{found.pop()} {line.strip()}"
            is_joined = line.endswith(",") and ":" not in line
            is_of_all = not is_joined and not _ERRORS.match(line.strip())
        if section == "Raises" and indent >= 4 and is_of_all:
            of_all.append(line.strip())
        else:
            found.append(line)
    lines[:] = [*found, "", *of_all, ""] if of_all else found


def _written_elsewhere(what: str, name: str, of: object) -> str:
    """Name the method of another library whose docstring autodoc would copy, as the method here has none; else empty."""
    if what != "method" or inspect.unwrap(of).__doc__ or not name.startswith(OURS):  # type: ignore[arg-type]
        return ""
    path, _, method = name.rpartition(".")
    module, _, class_name = path.rpartition(".")
    found = getattr(importlib.import_module(module), class_name, None)
    for base in inspect.getmro(found) if inspect.isclass(found) else ():
        if method in vars(base) and vars(base)[method].__doc__:
            return "" if base.__module__.startswith(OURS) else f"{base.__module__}.{base.__qualname__}.{method}"
    return ""


def signature_of_ours(
    app: Sphinx, what: str, name: str, of: object, options: object, signature: str, returned: str
) -> tuple[str, str] | None:
    """Give a class the arguments of its own `__init__` if it extends one that is not installed, whose stand-in takes anything."""
    own = vars(of).get("__init__") if what == "class" else None
    if own is None or not any(base.__module__.startswith(tuple(AS_IF_INSTALLED)) for base in inspect.getmro(of)):  # type: ignore[arg-type]
        return None
    arguments = sphinx_signature(own, bound_method=True)
    return stringify_signature(arguments, show_return_annotation=False, unqualified_typehints=True), returned


_DOCUMENTED = re.compile(
    r"^\.\. auto(class|exception|function|data|module):: (\S+)\n((?:   .*\n|\n(?=   ))*)", re.MULTILINE
)


class Summary(SphinxDirective):
    """A table of what the page documents, in its order: name, the first sentence of its docstring, its methods."""

    def run(self) -> list[nodes.Node]:
        page = self.env.doc2path(self.env.docname).read_text()  # type: ignore[attr-defined]
        rows = [row for kind, name, options in _DOCUMENTED.findall(page) for row in _rows(kind, name, options)]
        lines = [".. list-table::", "   :header-rows: 1", "   :class: summary", ""]
        for name, what, methods in [("name", "what it is", ""), *rows]:
            lines += [f"   * - {name}", f"     - {what}", "", f"       {methods}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def _rows(kind: str, name: str, options: str) -> list[tuple[str, str, str]]:
    if kind != "module":
        module, _, last = name.rpartition(".")
        with mock(AS_IF_INSTALLED):
            return [_row(f"{module}.{last}", getattr(importlib.import_module(module), last), options)]
    if ":no-members:" in options:
        return []
    module_itself = importlib.import_module(name)
    listed = getattr(module_itself, "__all__", vars(module_itself))
    own = [(f"{name}.{last}", vars(module_itself)[last]) for last in listed if not last.startswith("_")]
    left_out = _names(options, "exclude-members")
    return [
        _row(full, of, "")
        for full, of in own
        if getattr(of, "__module__", "") == name
        and callable(of)
        and of.__doc__
        and full.rpartition(".")[2] not in left_out
    ]


def _names(options: str, option: str) -> list[str]:
    found = re.search(rf":{option}: (.*)", options)
    return found[1].replace(",", " ").split() if found else []


def _row(full: str, of: Any, options: str) -> tuple[str, str, str]:
    chosen = re.findall(r"\.\. auto(?:method|property):: (\w+)", options)
    left_out = _names(options, "exclude-members")
    methods = chosen or [
        name
        for name, member in (vars(of).items() if inspect.isclass(of) and ":no-members:" not in options else ())
        if not name.startswith("_")
        and name not in left_out
        and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod))
        and inspect.getdoc(member)
    ]
    module, _, last = full.rpartition(".")
    below = ModuleAnalyzer.for_module(module).find_attr_docs()  # what the source says of a value stands below it
    written = below.get(("", last), [])
    text = " ".join(written) or (inspect.getdoc(of) if inspect.isclass(of) or callable(of) else "")
    sentence = re.split(r"(?<=\.)\s", " ".join((text or "").partition("\n\n")[0].split()), maxsplit=1)[0]
    links = ", ".join(f":member:`{name} <{full}.{name}>`" for name in methods)
    return f":member:`{full.rpartition('.')[2]} <{full}>`", sentence.rstrip(":"), links


class Name(SphinxRole):
    """Code that is a link where it names something that a page documents."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        shown, target = self.shown_and_target()
        code = nodes.literal(self.rawtext, shown, classes=["py"])
        if not _NAME.fullmatch(target):
            return [code], []
        link = addnodes.pending_xref(
            "",
            code,
            refdomain="py",
            reftype="obj",
            reftarget=target.removesuffix("()"),
            refdoc=self.env.docname,
            in_backticks=True,
            **{key: self.env.ref_context.get(key) for key in ("py:module", "py:class")},
        )
        return [link], []

    def shown_and_target(self) -> tuple[str, str]:
        return self.text, self.text


class Member(Name):
    """The same, of `what is shown <its name>`."""

    def shown_and_target(self) -> tuple[str, str]:
        shown, _, target = self.text.partition(" ")
        return shown, target.strip("<>")


def resolve(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Node) -> nodes.Node | None:
    """Find what a docstring calls by a part of its name, or by that of the module where it is defined."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    found = _find(env, target, node.get("py:class"))
    if found is None:
        return text if node.get("in_backticks") or _is_type_variable(target) else None
    entry = env.domains.python_domain.objects[found]
    uri = app.builder.get_relative_uri(node["refdoc"], entry.docname) + f"#{entry.node_id}"
    link = nodes.reference("", "", text, internal=True, refuri=uri, reftitle=found)
    return link


def _is_type_variable(target: str) -> bool:
    """Whether a name stands for a type that the user chooses: there is nothing to lead to."""
    module, _, name = target.rpartition(".")
    modules = [
        loaded for full, loaded in sys.modules.items() if full == module or (not module and full.startswith(OURS))
    ]
    return any(isinstance(getattr(loaded, name, None), TypeVar) for loaded in modules)


def _find(env: BuildEnvironment, target: str, of_class: str | None) -> str | None:
    objects = env.domains.python_domain.objects
    names = [target]
    if target.startswith(f"{OURS}."):
        names.append(target.rpartition(".")[2])
    if of_class:
        names.insert(0, f"{of_class}.{target}")
    for name in names:
        found = [full for full in objects if full == name or full.endswith(f".{name}")]
        own = [full for full in found if not objects[full].aliased]
        if len(found) == 1 or len(own) == 1:
            return (own or found)[0]
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("module-text", ModuleText)
    app.add_directive("command-options", CommandOptions)
    app.add_directive("summary", Summary)
    app.add_role("name", Name())
    app.add_role("member", Member())
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("autodoc-process-signature", signature_of_ours)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
