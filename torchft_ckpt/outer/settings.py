"""The settings of the outer optimizers in a round: all groups apply it with those of the group that has been in the job longest.

A script sets them, a learning rate above all, by the rounds that it has counted. One that comes into a running job has counted
none when its first round is applied, and may count otherwise than the others later. So each contributor says in the round what
its optimizers are set to: the numbers among what their classes have defaults for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from math import isnan, nan
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchft_ckpt.core.coordination.messages import name_some
from torchft_ckpt.core.training.outer_schedule import whose_settings_count
from torchft_ckpt.manager.optimizer_settings import set_value, with_inner

if TYPE_CHECKING:
    from torchft_ckpt.outer.manager import OuterManager

logger = logging.getLogger(__name__)


class _Setting(NamedTuple):
    name: str
    group: dict[str, Any]
    key: str
    place: int | None
    """In a sequence, as Adam's betas are one."""
    number: float
    """NaN where it is none."""


class RoundSettings:
    """What is exchanged of the settings: their bits as integers, which a sum keeps where all but one group bring zeros.

    Args:
        manager: of this rank.
        optimizers: the outer ones.
    """

    def __init__(self, manager: OuterManager, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._manager = manager
        self._optimizers = list(optimizers)
        self._own: list[float] | None = None
        self._rows: torch.Tensor | None = None
        self._said: set[str] = set()
        self.num_rounds = 0
        """That this group has applied since it came into the job."""

    def note(self) -> None:
        """A round begins with the settings of now. On the training thread."""
        self._own = [setting.number for setting in self._settings()]

    def rows(self, device: torch.device) -> list[torch.Tensor]:
        """Return what is to be summed once the quorum is known: a row for each contributor; nothing where nothing is set."""
        rank = self._manager.participating_rank()
        self._own = None if rank is None else self._own
        num_settings = sum(1 for _ in self._settings())
        rows = torch.zeros(self._manager.num_participants(), 1 + num_settings, dtype=torch.int64, device="cpu")
        if self._own is not None:
            rows[rank, 0] = 1 + self.num_rounds
            rows[rank, 1:] = torch.tensor(self._own, dtype=torch.float64, device="cpu").view(torch.int64)
        self._rows = rows.to(device)
        return [self._rows] if num_settings else []

    def take(self) -> None:
        """The round counts: set the optimizers to what it is applied with. The caller holds the write lock."""
        rows, own = self._rows, self._own
        self._rows = self._own = None
        who = None if rows is None else whose_settings_count(rows[:, 0].tolist())
        if rows is None or who is None:
            return
        theirs = rows[who, 1:].cpu().view(torch.float64).tolist()
        said = []
        for number, (setting, value) in enumerate(zip(list(self._settings()), theirs, strict=True)):
            is_taken = own is None or own[number] != value  # else it stays what the script has made of it in this round
            if not is_taken or isnan(value) or isnan(setting.number) or setting.number == value:
                continue
            _set(setting, value)
            if own is not None and setting.name not in self._said:
                self._said.add(setting.name)
                said.append(f"{setting.name} is {own[number]:g} here, and {value:g} there")
        if said:
            logger.warning(
                "%s sets its outer optimizer otherwise than the group that has been in the job longest: %s. Each round is applied"
                " with that group's settings, here too. Give the scheduler of an outer optimizer to Manager.scheduler, or set"
                " the value from manager.current_step() after each inner step",
                self._manager.replica_id(),
                name_some(said),
            )

    def _settings(self) -> Iterator[_Setting]:
        for number, optimizer in enumerate(with_inner(self._optimizers)):
            for place, group in enumerate(optimizer.param_groups):
                for key in sorted(optimizer.defaults):
                    value, name = group.get(key), f"outer optimizer {number}.param_groups.{place}.{key}"
                    for index, item in enumerate(value) if isinstance(value, tuple | list) else [(None, value)]:
                        yield _Setting(name, group, key, index, _number(item))


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, Real) else nan


def _set(setting: _Setting, value: float) -> None:
    here = setting.group[setting.key]
    old = here if setting.place is None else here[setting.place]
    new = type(old)(value) if isinstance(old, int) and value.is_integer() else value
    if setting.place is None:
        set_value(setting.group, setting.key, new)
    else:
        set_value(setting.group, setting.key, type(here)([*here[: setting.place], new, *here[setting.place + 1 :]]))
