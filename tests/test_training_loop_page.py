"""The examples of docs/guides/training-loop.md, run as they stand: each by a group alone, whose third step is discarded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.situations import SITUATIONS

PAGE = Path(__file__).parent.parent / "docs/guides/training-loop.md"
EXAMPLES = {
    heading: (situation, code)
    for heading, situation, code in re.findall(
        r"^##+ ([^\n]+)\n+<!-- block: in ([\w-]+) -->\n```python\n(.*?)^```$",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
}
NUM_BATCHES = 6
NUM_STEPS = NUM_BATCHES - 1
ROWS = 2


def has_learned(names: dict[str, Any]) -> bool:
    return not torch.equal(names["model"].weight, names["at_first"])


CHECKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "A schedule of the learning rate": lambda names: names["scheduler"].last_epoch == NUM_STEPS,
    "Several schedulers": lambda names: [one.last_epoch for one in names["schedulers"]] == [NUM_STEPS, NUM_STEPS],
    "Once an epoch, and schedulers that take turns": lambda names: names["scheduler"].last_epoch == NUM_STEPS // 2,
    "GradScaler": lambda names: names["scaler"]._get_growth_tracker() == NUM_STEPS,
    "Averaged weights": lambda names: names["average"].n_averaged == NUM_STEPS,
    "Gradient accumulation": has_learned,
    "Evaluation between steps": lambda names: names["evaluated"] == [2, 4],
    "A trainer that drops the answer": lambda names: names["average"].n_averaged == NUM_STEPS,
    "What else belongs to a step": lambda names: names["tokens"] == NUM_STEPS * ROWS * 3,
    "Without the wrapper": lambda names: names["scheduler"].last_epoch == NUM_STEPS,
}


@pytest.mark.slow
@pytest.mark.parametrize("heading", CHECKS)
def test_an_example_of_the_page_does_what_the_page_says(heading: str) -> None:
    situation, code = EXAMPLES[heading]
    with SITUATIONS[situation]() as found:
        names = found.names
        exec(compile(code, f"{PAGE.name}: {heading}", "exec"), names)  # noqa: S102 - our own page
        found.after(names)
        assert CHECKS[heading](names)


def test_each_example_of_the_page_is_run() -> None:
    assert (list(EXAMPLES), PAGE.read_text().count("```python")) == (list(CHECKS), len(CHECKS))
