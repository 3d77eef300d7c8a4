"""The examples of docs/guides/training-loop.md, run as they stand: each by a group alone, whose third step is discarded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchft_ckpt import DistributedDataParallel, LighthouseServer, Manager, Optimizer
from torchft_ckpt.testing.fake_process_group import FakeFabric, FakeProcessGroup

PAGE = Path(__file__).parent.parent / "docs/guides/training-loop.md"
EXAMPLES = dict(re.findall(r"^##+ ([^\n]+)\n+```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
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
    "What else belongs to a step": lambda names: names["tokens"] == NUM_STEPS * ROWS * 3,
    "Without the wrapper": lambda names: names["scheduler"].last_epoch == NUM_STEPS,
}


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the page takes for granted."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    torch.manual_seed(7)
    model = nn.Linear(3, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(
        FakeProcessGroup(FakeFabric()),
        lambda state: model.load_state_dict(state),
        model.state_dict,
        min_replica_size=1,
        lighthouse_addr=lighthouse.address(),
        replica_id="alone",
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
    )
    num_losses, evaluated = 0, []

    def loss(ddp: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal num_losses
        num_losses += 1
        if num_losses == 3:
            manager.report_error(RuntimeError("a group died"))
        return ddp(batch).square().mean()

    batches = [torch.randn(ROWS, 3) for _ in range(NUM_BATCHES)]
    yield {
        "torch": torch,
        "manager": manager,
        "model": model,
        "at_first": model.weight.detach().clone(),
        "ddp": DistributedDataParallel(manager, model),
        "inner": inner,
        "loss": loss,
        "batches": batches,
        "windows": [batches[:2], batches[2:4], batches[4:]],
        "steps_per_epoch": 2,
        "device": "cpu",
        "evaluate": lambda _: evaluated.append(manager.current_step()),
        "evaluated": evaluated,
    }
    manager.shutdown()
    lighthouse.shutdown()


@pytest.mark.parametrize("heading", CHECKS)
def test_an_example_of_the_page_does_what_the_page_says(heading: str, names: dict[str, Any]) -> None:
    code = EXAMPLES[heading]
    if "optimizer" in code.replace("guard_optimizer", ""):
        names["optimizer"] = Optimizer(names["manager"], names["inner"])
    exec(compile(code, f"{PAGE.name}: {heading}", "exec"), names)  # noqa: S102 - our own page
    num_steps = 2 if "windows" in code else NUM_STEPS
    assert (names["manager"].current_step(), names["manager"].statistics().num_discarded) == (num_steps, 1)
    assert CHECKS[heading](names)


def test_each_example_of_the_page_is_run() -> None:
    assert (list(EXAMPLES), PAGE.read_text().count("```python")) == (list(CHECKS), len(CHECKS))
