"""One replica group that trains by a `StepLoader`; a process of its own. Told so by a file `die`, it kills itself.

The places: `microbatch N`, `sum`, `exchange`, `gather`, `audit`, `summed`, `vote`, `voted`, `decided`;
or `after S`, in so many seconds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from support.exact_models import CLIP, GLOBAL_BATCH_SIZE, MICROBATCH_SIZE, SEED, Noisy, digest, loss_of, make
from support.trainer_process import begin, is_over, make_manager, report, state_functions
from torchft_ckpt import Checkpointer, HTTPTransport, Optimizer, StepLoader
from torchft_ckpt.events import MicrobatchDiffers
from torchft_ckpt.exact import tree_sum
from torchft_ckpt.exact.audit import Audit
from torchft_ckpt.manager.step import Steps

place = ""
"""Where it is to die in this step."""


def dies(here: str) -> None:
    if here == place:
        os.kill(os.getpid(), signal.SIGKILL)


def watch() -> None:
    """Have the places in the sum and in the vote looked at."""
    exchange, gather, wait, send_vote, compare = (
        tree_sum.TreeSum._exchange,
        tree_sum.TreeSum._gather,
        tree_sum._wait,
        Steps._send_vote,
        Audit.compare,
    )
    now = ["exchange"]

    def exchanges(*arguments: Any) -> Any:
        now[0] = "exchange"
        dies("sum")
        return exchange(*arguments)

    def gathers(*arguments: Any) -> None:
        now[0] = "gather"
        gather(*arguments)

    def waits(*arguments: Any) -> None:
        dies(now[0])
        wait(*arguments)

    def compares(*arguments: Any) -> None:
        dies("audit")
        compare(*arguments)

    def votes(steps: Steps) -> Any:
        dies("vote")
        vote = send_vote(steps)
        dies("voted")
        return vote

    tree_sum.TreeSum._exchange, tree_sum.TreeSum._gather, tree_sum._wait = exchanges, gathers, waits  # type: ignore[method-assign]
    Steps._send_vote, Audit.compare = votes, compares  # type: ignore[method-assign]


def main() -> None:
    global place
    options = begin()
    control = Path(options["control"])
    watch()
    model, inner, schedule = make(options["model"])
    if options.get("other_weights"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    transport = HTTPTransport(timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1")
    differ: list[str] = []
    hear = {"on_event": lambda event: differ.append(repr(event)) if isinstance(event, MicrobatchDiffers) else None}
    manager = make_manager(options, transport, *state_functions(model, inner), job=options.get("job"), **hear)
    num_groups, num_computed = options["num_groups"], 0
    steps = StepLoader(
        manager,
        Noisy(kills=options.get("worker_dies", False)),
        global_batch_size=options.get("global_batch_size", GLOBAL_BATCH_SIZE),
        microbatch_size=MICROBATCH_SIZE,
        seed=SEED,
        num_workers=options.get("workers", 0),
        check_microbatches_every=options.get("checks_every", 0),
    )
    optimizer = Optimizer(manager, inner)
    scheduler = manager.scheduler(schedule)
    saver = None
    if "checkpoints" in options:
        saver = Checkpointer(options["checkpoints"], manager=manager, fill_after=timedelta(seconds=1))
        saver.restore()
        report("restored", step=manager.current_step())
    inner.register_step_pre_hook(lambda *_: dies("decided"))
    report("ready")
    for step in steps:
        if is_over(options, manager.current_step()):
            break
        order = control / "die"
        with suppress(FileNotFoundError):  # another rank of this group may have taken it
            order.rename(taken := control / f"die {os.getpid()}")
            place = taken.read_text()
            if place.startswith("after"):
                threading.Timer(float(place.split()[1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        optimizer.zero_grad()
        try:
            for number, batch in enumerate(step):
                dies(f"microbatch {number}")
                loss = loss_of(model, batch)
                if place == "raises" and number == 1:
                    place = ""
                    raise ArithmeticError("out of range")
                loss.backward()
                step.log(loss=loss)
                num_computed += 1
        except ArithmeticError as error:
            report("raised", error=str(error))
            continue
        dies("summed")
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        is_warming_up = manager.is_warming_up()
        counts = optimizer.step()
        scheduler.step()
        loss_text = step.means["loss"].hex() if counts else ""
        num = 0 if is_warming_up else manager.num_participants()
        report(
            "step",
            step=manager.current_step(),
            committed=counts,
            loss=loss_text,
            participants=num,
            computed=num_computed,
        )
        if saver is not None and counts and manager.current_step() % 4 == 0:
            saver.wait()
            saver.save()
        if num < num_groups:
            time.sleep(0.03)  # a pace at which those who come back find the job still at work
    report("done", step=manager.current_step(), digest=digest(model, inner), differ=differ)
    if saver is not None:
        saver.shutdown()
    manager.shutdown()


if __name__ == "__main__":
    main()
