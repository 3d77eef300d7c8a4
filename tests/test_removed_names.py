"""An argument or variable that was removed is never just ignored; one that never was is a `TypeError`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from torchft_ckpt import HTTPTransport, Manager, ProcessGroupGloo, config
from torchft_ckpt.errors import ConfigError


class Theirs(HTTPTransport[Any]):
    """A user's."""


@pytest.mark.parametrize("kind", [HTTPTransport, Theirs])
def test_a_transport_says_in_the_callers_line_why_an_argument_changes_nothing(kind: type[HTTPTransport[Any]]) -> None:
    told = r"redo_budget_bytes= of HTTPTransport.__init__ has no effect any more: a group that lacks a step receives"
    with pytest.warns(FutureWarning, match=told) as caught:
        kind(hostname="127.0.0.1", redo_budget_bytes=1).shutdown()  # type: ignore[call-arg]
    assert [warning.filename for warning in caught] == [__file__]
    assert "redo_budget_bytes" not in inspect.signature(kind).parameters


@pytest.mark.parametrize("name", ["follow", "follow_budget_bytes", "heal_in_place", "join_budget", "warm_up"])
def test_a_manager_says_so_too(name: str) -> None:
    given: Any = {name: None}
    with pytest.warns(FutureWarning, match=rf"{name}= of Manager.__init__ has no effect any more: ") as caught:
        with pytest.raises(ConfigError, match="min_replica_size=0"):
            Manager(ProcessGroupGloo(), None, None, 0, **given)
    assert [warning.filename for warning in caught] == [__file__]


def test_one_that_it_never_had_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="join_budget"):
        HTTPTransport(hostname="127.0.0.1", join_budget=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="redo_budget_bytes"):
        Manager(ProcessGroupGloo(), None, None, 0, redo_budget_bytes=1)  # type: ignore[call-arg]


def test_a_variable_that_is_not_read_any_more_is_named_with_what_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_JOIN_BUDGET_SEC", "5")
    assert "join_stall_limit" in config.not_read()["TORCHFT_CKPT_JOIN_BUDGET_SEC"]
