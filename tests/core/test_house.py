"""The house keeps its measure: what one class may ask of its readers. Counted in the source, as it is written."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import torchft_ckpt
from torchft_ckpt.core.coordination import messages

PACKAGE = Path(torchft_ckpt.__file__).parent
MAX_ARGUMENTS, TORCHFTS_ARGUMENTS, MAX_MEMBERS = 30, 22, 48
MAX_ASKED, MAX_ANSWERED, MAX_MESSAGES = 26, 20, 40
"""Fields of a request for a step, fields of an answer to it, and messages."""


def class_in(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((PACKAGE / path).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def members(found: ast.ClassDef) -> set[str]:
    """Return the methods, properties and attributes that a class has for others."""
    methods = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    attributes = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if isinstance(node.ctx, ast.Store)
    }
    return {name for name in methods | attributes if not name.startswith("_")}


def test_a_manager_has_few_arguments_and_few_members() -> None:
    manager = class_in("manager/manager.py", "Manager")
    init = next(node for node in manager.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert len(init.args.args) - 1 == TORCHFTS_ARGUMENTS
    assert len(init.args.args) - 1 + len(init.args.kwonlyargs) <= MAX_ARGUMENTS
    assert len(members(manager)) <= MAX_MEMBERS, sorted(members(manager))


def test_there_are_few_messages_and_those_of_a_step_are_short() -> None:
    assert len(messages.QuorumRequest.__struct_fields__) <= MAX_ASKED
    for answer in get_args(messages.Answer):
        assert len(answer.__struct_fields__) <= MAX_ANSWERED, answer.__name__
    assert len({*get_args(messages.Message)}) <= MAX_MESSAGES


def test_the_parts_of_a_manager_are_built_of_those_that_are_there() -> None:
    """A function in a constructor would reach for what comes later."""
    for path, name in (("manager/parts.py", "Parts"), ("manager/manager.py", "Manager"), ("manager/step.py", "Steps")):
        init = next(n for n in class_in(path, name).body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        assert not [node for node in ast.walk(init) if isinstance(node, ast.Lambda)], name


def test_the_lock_of_the_client_is_nobody_elses() -> None:
    users = {
        path.name
        for path in (PACKAGE / "manager").glob("*.py")
        if re.search(r"client\.(_?lock|_?replica|_changed)\b", path.read_text())
    }
    assert not users
