"""What happens in a job, for dashboards: listeners for `Manager(on_event=...)`.

    manager = Manager(..., on_event=to_tensorboard(SummaryWriter("runs/job")))
    manager = Manager(..., on_event=to_wandb(wandb.init(project="job")))

The arguments are the loggers' own objects, so this file needs neither of them installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torchft_ckpt.events import Event, StepCommitted


def to_tensorboard(writer: Any) -> Callable[[Event], None]:
    """Write with a `torch.utils.tensorboard.SummaryWriter`: a curve of each number of committed steps, a text for all else."""

    def on_event(event: Event) -> None:
        name = type(event).__name__
        if isinstance(event, StepCommitted):
            writer.add_scalar(f"{name}/took_s", event.took_s, event.step)
            writer.add_scalar(f"{name}/num_participants", event.num_participants, event.step)
        else:
            writer.add_text(name, str(event), event.step)

    return on_event


def to_wandb(run: Any) -> Callable[[Event], None]:
    """Log with a run of Weights & Biases: each event's fields under its name."""

    def on_event(event: Event) -> None:
        fields = dataclasses.asdict(event)
        run.log({f"{type(event).__name__}/{name}": value for name, value in fields.items()})

    return on_event
