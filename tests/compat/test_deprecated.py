"""Names of the release before this one work, warn in the line that uses them, and say what they are called now."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchft_ckpt import Checkpointer, CheckpointTransport, HTTPTransport, Manager
from torchft_ckpt.compat.deprecated import keep_old_methods, renamed_parameters
from torchft_ckpt.core.durable.restore_source import RestoreSource

LONG_S = 60


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """A name that is used by the library itself would raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        yield


@renamed_parameters(old="new")
def function(*, new: int = 0, other: int = 0) -> tuple[int, int]:
    return new, other


def test_an_argument_is_taken_by_its_old_name_with_a_warning_in_the_line_that_gave_it() -> None:
    with pytest.warns(DeprecationWarning, match=r"old= of function is now new=") as caught:
        assert function(old=1, other=2) == (1, 2)  # type: ignore[call-arg]
    assert [warning.filename for warning in caught] == [__file__]
    assert function(new=1, other=2) == (1, 2)


def test_an_argument_that_is_given_by_both_names_is_refused() -> None:
    with pytest.raises(TypeError, match="new= twice"):
        function(old=1, new=2)  # type: ignore[call-arg]


class Base:
    """What a library has, whose method `new` was `old`."""

    def __init_subclass__(cls) -> None:
        keep_old_methods(cls, old="new")

    def new(self) -> list[str]:
        return ["base"]


keep_old_methods(Base, old="new")


def test_a_method_is_called_by_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"Base.old is now new") as caught:
        assert Base().old() == ["base"]  # type: ignore[attr-defined]
    assert [warning.filename for warning in caught] == [__file__]


def test_a_subclass_that_overrides_the_old_name_is_called_by_the_new_one_and_reaches_the_class_above() -> None:
    with pytest.warns(DeprecationWarning, match=r"Theirs.old is now new"):

        class Theirs(Base):
            def old(self) -> list[str]:
                return [*super().old(), "theirs"]  # type: ignore[misc]

    with pytest.warns(DeprecationWarning, match=r"Base.old is now new"):
        assert Theirs().new() == ["base", "theirs"]


def test_an_old_method_looks_as_the_new_one_but_for_its_name() -> None:
    old = Base.old  # type: ignore[attr-defined]
    assert (old.__name__, old.__qualname__, old.__module__) == ("old", "Base.old", __name__)
    assert inspect.signature(old) == inspect.signature(Base.new)


def test_a_name_that_has_moved_and_is_called_otherwise_is_found_where_it_was() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"torchft_ckpt.checkpointer.Rung is now .*restore_source.RestoreSource"
    ):
        from torchft_ckpt.checkpointer import Rung
    assert Rung is RestoreSource


def test_a_transport_that_overrides_the_old_name_hears_of_the_step() -> None:
    heard: list[int] = []
    with pytest.warns(DeprecationWarning, match=r"Theirs.note_step is now advance_to"):

        class Theirs(CheckpointTransport[Any]):
            def note_step(self, step: int) -> None:
                heard.append(step)

    Theirs.advance_to(object(), 3)  # type: ignore[arg-type]
    assert heard == [3]


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("torchft_ckpt.checkpointing.planners", "ShardSavePlanner", "torchft_ckpt.integrations.dcp.planners"),
        ("torchft_ckpt.checkpointing.planners", "ShardLoadPlanner", "torchft_ckpt.integrations.dcp.planners"),
        ("torchft_ckpt.checkpointing", "XLAShardAdapter", "torchft_ckpt.integrations.xla"),
    ],
)
def test_a_name_that_has_moved_is_found_where_it_was(module: str, name: str, home: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{module}.{name} is now {home}.{name}") as caught:
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(home), name)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(module).no_such_name


def test_rank_state_is_saved_and_restored_under_its_old_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    checkpointer = Checkpointer(tmp_path, timeout=timedelta(seconds=LONG_S))
    with pytest.warns(DeprecationWarning, match=r"own= of Checkpointer.save is now rank_state="):
        checkpointer.save(state, step=1, own={"place": 7}).result(LONG_S)  # type: ignore[call-arg]
    restored = checkpointer.load(state)
    checkpointer.shutdown()
    assert restored.rank_state == {"place": 7}
    with pytest.warns(DeprecationWarning, match=r"Restored.own is now rank_state"):
        assert restored.own == {"place": 7}
    with pytest.warns(DeprecationWarning, match=r"Restored.rung is now source"):
        assert restored.rung is restored.source


def test_functions_are_registered_by_the_old_names_of_their_flags() -> None:
    given: dict[str, Any] = {}

    class Registry:
        def register(self, *_: object, **flags: Any) -> None:
            given.update(flags)

    manager: Any = Manager.__new__(Manager)
    manager._registry = Registry()
    manager._followers = SimpleNamespace(find_outer=lambda: None)
    with pytest.warns(DeprecationWarning, match="register_state_dict_fn") as caught:
        manager.register_state_dict_fn("outer", print, dict, kept_still=True, trains_apart=True)
    assert sorted(str(warning.message).partition(";")[0] for warning in caught) == [
        "kept_still= of Manager.register_state_dict_fn is now explicitly_locked=",
        "trains_apart= of Manager.register_state_dict_fn is now local_between_syncs=",
    ]
    assert (given["explicitly_locked"], given["local_between_syncs"]) == (True, True)


def test_a_managers_cold_start_is_called_by_its_old_name() -> None:
    asked: list[object] = []

    class BetweenSteps:
        def cold_start(self, limit: timedelta) -> None:
            asked.append(limit)

    manager: Any = Manager.__new__(Manager)
    manager._between_steps = BetweenSteps()
    with pytest.warns(DeprecationWarning, match=r"Manager.gather is now cold_start"):
        manager.gather(timedelta(seconds=3))
    assert asked == [timedelta(seconds=3)]


@pytest.mark.parametrize("kind", [HTTPTransport, type("Theirs", (HTTPTransport,), {})])
def test_an_argument_that_has_no_effect_any_more_is_said_and_taken(kind: type[HTTPTransport[Any]]) -> None:
    with pytest.warns(FutureWarning, match=r"redo_budget_bytes= of HTTPTransport.__init__ has no effect any more"):
        transport = kind(hostname="127.0.0.1", redo_budget_bytes=1)  # type: ignore[call-arg]
    transport.shutdown()
    assert "redo_budget_bytes" not in inspect.signature(kind).parameters
