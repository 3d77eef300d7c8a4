"""examples/train_ray.py, whose groups stand still before some steps until a file exists.

python ray_job.py STEP:FILE,STEP:FILE [the example's options]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train_ray
from torch import Tensor


def behind_gates(gates: dict[int, str]) -> Callable[[dict[str, Any]], None]:
    """Return what Ray runs in each worker in place of the example's `train`."""

    def train(options: dict[str, Any]) -> None:
        draw_batch = train_ray.draw_batch

        def draw_batch_behind_the_gate(text: Tensor, step: int, group: int) -> tuple[Tensor, Tensor]:
            while step in gates and not Path(gates[step]).exists():
                time.sleep(0.05)
            return draw_batch(text, step, group)

        train_ray.draw_batch = draw_batch_behind_the_gate
        train_ray.train(options)  # the example's own: a worker imports its module anew

    return train


if __name__ == "__main__":
    _, gates, *sys.argv[1:] = sys.argv
    train_ray.train = behind_gates(
        {int(step): path for step, _, path in (one.partition(":") for one in gates.split(","))}
    )
    train_ray.main()
