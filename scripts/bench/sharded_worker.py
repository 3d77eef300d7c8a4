"""One rank of a group: holds its part of a model, serves it or receives it, and does what the benchmark tells it.

Each command is a method; its keyword arguments and its answer are plain values. `sharded_group` is the other end.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from bench import sharded_layouts
from bench.sharded_layouts import Held, Layout
from bench.wire import Reporter, serve
from torchft_ckpt.checkpointing import HTTPTransport

Answer = dict[str, Any]
State = dict[str, Tensor]
TIMEOUT = timedelta(seconds=120)
_NUM_TRANSPORTS = 2


class Worker:
    """Runs in the process of one rank. It has two transports, so that it can give two parts of what it holds at one time."""

    def __init__(self) -> None:
        self._transports: list[HTTPTransport[State]] = [
            HTTPTransport(timeout=TIMEOUT, hostname="127.0.0.1", bind="127.0.0.1") for _ in range(_NUM_TRANSPORTS)
        ]
        self._models: dict[str, list[Held]] = {}

    def hello(self) -> Answer:
        """Say where it is reached."""
        return {"addresses": [transport.metadata() for transport in self._transports]}

    # What is held

    def hold(
        self, model: str, mesh: list[int], placements: list[list[str]], rank: int, shapes: list[list[int]]
    ) -> Answer:
        """Make a model, or what this rank has of it, instead of the one that had its name."""
        self._withdraw()
        self._models.pop(model, None)
        layout = Layout(mesh=tuple(mesh), placements=tuple(tuple(of_tensor) for of_tensor in placements))
        held = sharded_layouts.hold(layout, rank, [(rows, columns) for rows, columns in shapes])
        self._models[model] = held
        return {"num_bytes": sum(tensor.local.nbytes for tensor in held)}

    def drop(self) -> Answer:
        """Stop serving, and forget every model."""
        self._withdraw()
        self._models.clear()
        return {}

    def fill(self, model: str, seed: int) -> Answer:
        """Stop serving, and give every element another value."""
        self._withdraw()
        sharded_layouts.fill(self._models[model], seed)
        return {}

    def check(self, model: str, seed: int) -> Answer:
        """Say which tensors do not have the bits of a seed."""
        return {"wrong": sharded_layouts.wrong(self._models[model], seed)}

    # Transfers

    def send(self, model: str, step: int, plain_parts: int, num_receivers: int) -> Answer:
        """Begin to serve.

        Args:
            model: which.
            step: its number.
            plain_parts: 0 serves what is held as it is; n serves its memory as plain tensors, the first n-th of each from the
                first transport, and so on.
            num_receivers: of each transport.
        """
        self._withdraw()
        receivers = list(range(num_receivers))
        for part in range(max(plain_parts, 1)):
            state = _plain(self._models[model], part, plain_parts) if plain_parts else self._state(model)
            self._transports[part].send_checkpoint(receivers, step, state, TIMEOUT)
        return {}

    def receive(
        self, model: str, groups: list[list[str]], rank: int, world_size: int, step: int, at: float, how: str
    ) -> Answer:
        """Receive into what is held.

        Args:
            model: which.
            groups: addresses of the ranks of the source groups.
            rank, world_size: of this one.
            step: the step wanted.
            at: when to begin, CLOCK_MONOTONIC.
            how: `reshard`; `same`, from the rank of the same number; or `plain`, the same with plain tensors.
        """
        transport = self._transports[0]
        state = _plain(self._models[model], 0, 1) if how == "plain" else self._state(model)
        time.sleep(max(at - time.monotonic(), 0.0))
        started = time.monotonic()
        cpu_s = time.process_time()
        if how == "reshard":
            transport.fetch_sharded(groups, rank, world_size, step, TIMEOUT, local_state=state, in_place=True)
        else:
            sources = [group[rank] for group in groups]
            transport.fetch_checkpoint(sources, step, TIMEOUT, local_state=state, in_place=True)
        return {"started": started, "ended": time.monotonic(), "cpu_s": time.process_time() - cpu_s}

    def cpu(self) -> Answer:
        """Say how many processor seconds were used so far."""
        return {"cpu_s": time.process_time()}

    def _withdraw(self) -> None:
        for transport in self._transports:
            transport.withdraw_checkpoint()

    def _state(self, model: str) -> State:
        return {_name(tensor): tensor.given for tensor in self._models[model]}


def _plain(held: list[Held], part: int, num_parts: int) -> State:
    """Return the memory of a model, or one of equal parts of each tensor, as plain tensors of one dimension."""
    return {_name(tensor): tensor.local.view(-1).chunk(num_parts)[part] for tensor in held}


def _name(tensor: Held) -> str:
    return f"layers.{tensor.index}.weight"


def main() -> None:
    """Say hello, do as told until the parent is gone."""
    reporter = Reporter()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)  # threads that have filled a tensor would spin into the transfer that follows
    worker = Worker()
    serve(worker, reporter, **worker.hello())


if __name__ == "__main__":
    main()
