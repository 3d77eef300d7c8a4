"""torchft's names are here, in torchft's places; those that do not exist say so when they are used."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Optional

import pytest

import torchft_ckpt
from torchft_ckpt.compat import names
from torchft_ckpt.compat.names import Absent
from torchft_ckpt.errors import AbsentNameError

ALL = [(module, name) for module, entries in names.TABLE.items() for name in entries]
MODULES = [
    *("checkpointing.http_transport", "checkpointing.transport", "checkpointing", "data", "ddp"),
    *(module for module in names.TABLE if module),
]


def import_module(module: str) -> object:
    return importlib.import_module(f"torchft_ckpt.{module}".removesuffix("."))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_of_torchft_can_be_imported(module: str) -> None:
    assert import_module(module)


@pytest.mark.parametrize(("module", "name"), ALL)
def test_every_name_of_the_table_is_there_and_stays_the_same(module: str, name: str) -> None:
    found = getattr(import_module(module), name)
    assert found is getattr(import_module(module), name)


@pytest.mark.parametrize("module", ["process_group", "futures", ""])
def test_a_name_that_is_not_torchfts_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = import_module(module).no_such_name  # type: ignore[attr-defined]


def test_a_module_that_is_not_torchfts_cannot_be_imported() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_module("no_such_module")


def test_what_torchfts_example_scripts_import_is_here() -> None:
    from torchft_ckpt.optim import OptimizerWrapper

    from torchft_ckpt import ProcessGroupBabyNCCL, ProcessGroupXCCL
    from torchft_ckpt.process_group import ProcessGroupBabyNCCL as SameBaby

    assert OptimizerWrapper is torchft_ckpt.Optimizer
    assert ProcessGroupBabyNCCL is SameBaby
    assert isinstance(ProcessGroupXCCL, Absent)


@pytest.mark.parametrize("name", ["LighthouseClient", "ManagerClient", "ManagerServer", "Quorum", "Timestamp"])
def test_who_would_vote_by_hand_hears_what_to_use_in_one_sentence(name: str) -> None:
    from torchft_ckpt import _torchft, coordination

    bare = getattr(coordination, name)
    assert bare is getattr(_torchft, name)
    with pytest.raises(
        AbsentNameError, match=rf"^torchft_ckpt\.coordination\.{name} is torchft's and is not here: .*Manager"
    ) as caught:
        bare("127.0.0.1:29510")
    assert ". " not in str(caught.value)


class TestAbsent:
    """A script names what it uses on other machines only; whatever it does with it here says what to use."""

    here = Absent("torchft_ckpt.process_group", "ProcessGroupXCCL", "use another")

    def test_it_says_what_to_use_instead_when_it_is_called(self) -> None:
        with pytest.raises(AbsentNameError, match=r"process_group\.ProcessGroupXCCL .* use another") as caught:
            self.here(timeout=3)
        assert caught.value.party == "ProcessGroupXCCL"

    def test_it_says_so_when_it_is_derived_from_or_looked_into(self) -> None:
        with pytest.raises(AbsentNameError):
            types.new_class("Derived", (self.here,))
        with pytest.raises(AbsentNameError):
            _ = self.here.parent
        with pytest.raises(AbsentNameError):
            f"{self.here}"

    def test_it_may_stand_in_annotations_and_be_asked_what_is_one(self) -> None:
        assert not isinstance(3, self.here)  # type: ignore[arg-type]
        assert not issubclass(int, self.here)  # type: ignore[arg-type]
        assert self.here | None == Optional[self.here]  # type: ignore[comparison-overlap]  # noqa: UP045
        assert None | self.here == Optional[self.here]  # type: ignore[comparison-overlap]  # noqa: UP045
        assert not hasattr(self.here, "__wrapped__")
        assert repr(self.here) == "<torchft_ckpt.process_group.ProcessGroupXCCL: not here>"


def test_a_module_that_is_added_as_a_file_takes_the_place_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "futures.py").write_text("future_wait = 'the real one'\n")
    monkeypatch.setattr(torchft_ckpt, "__path__", [*torchft_ckpt.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torchft_ckpt.futures", raising=False)
    monkeypatch.delattr(torchft_ckpt, "futures", raising=False)
    try:
        assert importlib.import_module("torchft_ckpt.futures").future_wait == "the real one"
    finally:
        sys.modules.pop("torchft_ckpt.futures", None)
