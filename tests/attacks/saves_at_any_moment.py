"""Saves that are asked for at any moment of a step: does a whole one hold half a step, or another than it says?

By a timer's signals, by Ctrl-C that the script catches, by `on_event`, in hooks of the optimizer, and between two steps. Each
save is either of one step, bit by bit, or its future, or the call, says why not.

usage: python saves_at_any_moment.py [--saves N]
"""

from __future__ import annotations

import argparse
import collections
import logging
import random
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from support.fake_process_group import FakeFabric, FakeProcessGroup

from torchft_ckpt import Checkpointer, LighthouseServer, Manager, Optimizer, load_checkpoint

WHAT = ("a signal", "Ctrl-C", "on_event", "a hook", "between steps")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saves", type=int, default=250)
    num_saves = parser.parse_args().saves
    logging.disable(logging.CRITICAL)
    random.seed(7)
    lighthouse, directory = LighthouseServer("127.0.0.1:0", min_replicas=1), Path(tempfile.mkdtemp())
    weights = [torch.nn.Parameter(torch.zeros(64)) for _ in range(60)]
    sgd = torch.optim.SGD(weights, lr=1.0, foreach=False)
    futures: list[tuple[str, Future[Any]]] = []
    counts: collections.Counter[str] = collections.Counter()
    due = ""

    def save(what: str) -> None:
        nonlocal due
        due = ""
        try:
            futures.append((what, checkpointer.save()))
        except Exception as error:
            counts[f"{what}: raised {error}"] += 1

    def save_if(what: str) -> Callable[..., None]:
        return lambda *_: save(what) if due == what else None

    manager = Manager(
        FakeProcessGroup(FakeFabric(), timedelta(seconds=20)),
        lambda _: None,
        lambda: dict(enumerate(weight.data for weight in weights)),
        min_replica_size=1,
        replica_id="alone",
        lighthouse_addr=lighthouse.address(),
        hostname="127.0.0.1",
        on_event=save_if("on_event"),
    )
    checkpointer = Checkpointer(directory, manager=manager, redundancy=1)
    optimizer = Optimizer(manager, sgd)
    sgd.register_step_pre_hook(save_if("a hook"))
    sgd.register_step_post_hook(save_if("a hook"))

    def interrupt(*_: object) -> None:
        if due == "Ctrl-C":
            raise KeyboardInterrupt
        save(due)

    signal.signal(signal.SIGALRM, interrupt)

    def train(*, moment_s: float = 0.0) -> None:
        if moment_s:
            signal.setitimer(signal.ITIMER_REAL, moment_s)
        optimizer.zero_grad()
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()

    num_torn = 0
    for number in range(num_saves):
        for _ in range(2):
            train()
        due = WHAT[number % len(WHAT)]
        if due in ("a signal", "Ctrl-C"):
            try:
                train(moment_s=random.uniform(1e-4, 6e-3))
                while due:
                    train()
            except KeyboardInterrupt:
                save("Ctrl-C")
        elif due == "between steps":
            save(due)
        else:
            while due:
                train()
        manager.newest_step_of_peers()
        if manager.view().torn:  # nobody else holds it: go on from what the script knows
            num_torn += 1
            with torch.no_grad():
                for weight in weights:
                    weight.fill_(-3.0 * number)
            manager.load_state_dict({"step": 3 * number, "batches_committed": 3 * number})
        train()
        checkpointer.wait()
    checkpointer.shutdown()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for what, future in futures:
        error = future.exception(60)
        counts[f"{what}: " + ("whole" if error is None else str(error))] += 1
    whole = sum(count for name, count in counts.items() if name.endswith(": whole"))
    wrong = []
    for path in sorted(directory.glob("step-*")):
        state: dict[Any, Any] = {number: torch.zeros(64) for number in range(len(weights))}
        state["torchft"] = {"step": 0, "batches_committed": 0}
        load_checkpoint(path, state)
        held = {-value for number in range(len(weights)) for value in state[number].tolist()}
        if held != {float(state["torchft"]["step"])} or int(path.name[5:17]) != state["torchft"]["step"]:
            wrong.append(f"{path.name}: weights of {sorted(held)[:3]}, not of step {state['torchft']['step']}")
    manager.shutdown()
    lighthouse.shutdown()
    for name, count in sorted(counts.items()):
        print(f"{count:4} {name}")
    print(f"{num_saves} saves: {whole} whole, {len(wrong)} of them wrong; {num_torn} steps broken off")
    for line in wrong[:5]:
        print(line)
    is_good = not wrong and whole >= 0.8 * num_saves and sum(counts.values()) == num_saves
    print("held" if is_good else "BROKEN")
    raise SystemExit(not is_good)


if __name__ == "__main__":
    main()
