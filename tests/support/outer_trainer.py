"""One rank of a replica group that trains a tiny model with an outer loop; a process of its own. It reports as JSON lines.

Its options come as one JSON object on the command line; files in `control` steer it as they do `trainer.py`. `die` says where
it kills itself: {"groups": once so many trained in a round, "at": "inner" | "prepare" | "allreduce" | "vote"}.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.device import DEVICE
from support.trainer import SteeredTransport
from support.trainer_process import begin, digest_of, is_over, make_manager, report
from torchft_ckpt import DiLoCo, LocalSGD, Manager
from torchft_ckpt.core.coordination.messages import CommitVote
from torchft_ckpt.errors import SourceLostError
from torchft_ckpt.outer.fragment import Fragment


class FailsOnce(SteeredTransport):
    """A transport whose first fetch fails."""

    has_failed = False

    def fetch_checkpoint(self, sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise SourceLostError("told to fail once", party="test")
        return super().fetch_checkpoint(sources, step, timeout, **how)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Suicide:
    """Kills the process at one point of one round."""

    def __init__(self, manager: Manager, plan: dict[str, Any] | None) -> None:
        self._plan = plan or {}
        self._num_rounds = 0
        if self._plan.get("at") == "prepare":
            self._after(manager, "start_quorum", lambda *_, **options: options.get("contributes", True))
        if self._plan.get("at") == "allreduce":
            self._after(manager, "allreduce", lambda *_, **__: manager.is_participating())
        if self._plan.get("at") == "vote":
            self._after(manager._client.link, "send", lambda message: isinstance(message, CommitVote))

    def inner_step(self, number: int) -> None:
        if self._plan.get("at") == "inner" and self._is_due() and number == 2:
            die()

    def round_ended(self, num_participants: int) -> None:
        self._num_rounds = self._num_rounds + 1 if num_participants == self._plan.get("groups") else 0

    def _is_due(self) -> bool:
        return self._num_rounds >= 2

    def _after(self, owner: Any, name: str, condition: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._is_due() and condition(*args, **kwargs):
                die()
            return result

        setattr(owner, name, wrapped)


def count_restores() -> list[int]:
    """Count how often a fragment went back to its backup."""
    count = [0]
    original = Fragment.restore

    def restore(self: Fragment) -> None:
        count[0] += 1
        original(self)

    Fragment.restore = restore  # type: ignore[method-assign]
    return count


def main() -> None:
    options = begin()
    generator = torch.Generator().manual_seed(options["seed"])
    torch.manual_seed(options["seed"])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(DEVICE)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fails = os.environ.get("RANK") == str(options.get("first_fetch_fails_at_rank"))
    kind = FailsOnce if fails else SteeredTransport
    transport = kind(timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1")
    transport.control, transport.cancelled = Path(options["control"]), threading.Event()
    manager = make_manager(
        options,
        transport,
        None,
        None,
        min_replica_size=options.get("min_replica_size", 2),
        use_async_quorum=False,
    )
    report("ready", replica_id=manager.replica_id())
    suicide = Suicide(manager, options.get("die"))
    restores = count_restores()
    sync_every = options.get("sync_every", 8)
    common = {"round_retries": options.get("round_retries", 3)}
    if options.get("kind") == "local_sgd":
        loop: Any = LocalSGD(manager, model, inner, sync_every, **common)
    else:
        fragments: list[nn.Module] = [model[:2], model[2:]]
        outer = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
        loop = DiLoCo(
            manager,
            fragments,
            inner,
            outer,
            sync_every,
            fragment_sync_delay=options.get("delay", 1),
            fragment_update_alpha=0.25,
            use_bucketization=True,
            bucket_cap_mb=0.05,
            should_quantize=options.get("quantize", False),
            **common,
        )
    # What a script keeps of the rounds, registered: an average of the global parameters.
    average: dict[str, Any] = {"weights": torch.zeros(sum(p.numel() for p in model.parameters())), "rounds": 0}
    if follows := options.get("average"):
        manager.register_state_dict_fn("average", lambda state: average.update(copy.deepcopy(state)), lambda: average)

    def follow_round() -> None:
        flat = [w.reshape(-1).cpu() for f in loop.state_dict()["original_parameters"] for w in f.values()]
        average["weights"].lerp_(torch.cat(flat), 0.1)
        average["rounds"] += 1

    number = 0
    try:
        with loop:
            with torch.no_grad():
                model(torch.zeros(1, 64, device=DEVICE))  # the first forward pass, in which the loop begins
            report("entered", step=manager.current_step(), healed=manager.statistics().num_healed)
            before, restored = manager.statistics(), restores[0]
            while not is_over(options, manager.current_step()):
                batch = torch.randn(8, 64, generator=generator).to(DEVICE)
                step = manager.current_step()
                inner.zero_grad()
                (model(batch) - batch).square().mean().backward()
                inner.step()
                if loop.round_counted() if follows == "asks" else manager.current_step() > step:
                    follow_round()
                number += 1
                time.sleep(options.get("pause_s", 0.01))
                after = manager.statistics()
                suicide.inner_step(number)
                if (after.num_committed, after.num_discarded, after.num_left_behind) != (
                    before.num_committed,
                    before.num_discarded,
                    before.num_left_behind,
                ):
                    suicide.round_ended(manager.num_participants())
                    report(
                        "step",
                        step=manager.current_step(),
                        committed=after.num_committed > before.num_committed,
                        discarded=after.num_discarded - before.num_discarded,
                        restores=restores[0] - restored,
                        participants=manager.num_participants(),
                        contributed=manager.is_participating(),
                        inner_steps=number,
                        healed=after.num_healed,
                        digest=digest_of(loop.state_dict()),
                    )
                    before, restored, number = after, restores[0], 0
        report(
            "done",
            step=manager.current_step(),
            digest=f"{digest_of(loop.state_dict())} {digest_of(average) if follows else ''}",
            corrected=manager.statistics().num_corrected,
        )
    finally:
        manager.shutdown()
        transport.shutdown()


if __name__ == "__main__":
    main()
