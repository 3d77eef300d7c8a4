"""One replica group in a test's process that trains by a `StepLoader`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from torchft_ckpt import LighthouseServer, Manager, Optimizer, ProcessGroupGloo, StepLoader


class Group:
    """One replica group in this process, with a small model, and other modules that its loop calls."""

    def __init__(
        self,
        lighthouse: LighthouseServer,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        beside: tuple[nn.Module, ...] = (),
        **more: Any,
    ) -> None:
        self.model, self.beside = model, beside
        self.inner = optimizer(model.parameters(), lr=0.1)
        self.manager = Manager(
            ProcessGroupGloo(timeout=timedelta(seconds=10)),
            self._load,
            lambda: {
                "beside": [one.state_dict() for one in beside],
                "model": model.state_dict(),
                "optimizer": self.inner.state_dict(),
            },
            1,
            lighthouse_addr=lighthouse.address(),
            timeout=timedelta(seconds=10),
            **{"replica_id": "g", **more},
        )

    def _load(self, state: dict[str, Any]) -> None:
        for one, its_state in zip(self.beside, state["beside"], strict=True):
            one.load_state_dict(its_state)
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def steps(self, dataset: Any = None, **more: Any) -> StepLoader:
        rows = torch.arange(40.0).view(20, 2) if dataset is None and "read" not in more else dataset
        sizes: dict[str, Any] = {"global_batch_size": 8, "microbatch_size": 2, **more}
        self.loader = StepLoader(self.manager, rows, **sizes)
        self.optimizer = Optimizer(self.manager, self.inner)
        return self.loader
