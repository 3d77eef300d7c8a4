"""A process that holds one live model and one transport, and does what the benchmark tells it, one command after another.

Each command is a method; its keyword arguments and its answer are plain values. `transport_peer` is the other end.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import Any

from bench import transport_links, transport_raw, transport_states
from bench.transport_adapter import Transport
from bench.transport_memory import PeakMemory
from bench.transport_trainer import BY_HOOK, Trainer
from bench.wire import Reporter, serve

Answer = dict[str, Any]
_AFTER_ALL_STEPS = 1 << 20


class Worker:
    """Runs in the process of the benchmark's peer.

    Args:
        reporter: where progress goes, between the answers.
        side: which library.
        num_chunks: the reference's setting.
        host: address to advertise.
        num_tensors: of the model.
        tensor_bytes: of each.
    """

    def __init__(
        self, reporter: Reporter, *, side: str, num_chunks: int, host: str, num_tensors: int, tensor_bytes: int
    ) -> None:
        self._reporter = reporter
        self._transport = Transport(side, num_chunks, host)
        self._model = transport_states.Model(num_tensors, tensor_bytes)
        self._tensors = self._model.tensors()
        transport_states.fill(self._tensors, 0)

    def hello(self) -> Answer:
        """Say where it is reached."""
        return {"metadata": self._transport.metadata, "num_streams": self._transport.num_streams}

    # Values

    def fill(self, seed: int) -> Answer:
        """Stop serving, then give every parameter other values."""
        self._transport.withdraw()
        transport_states.fill(self._tensors, seed)
        return {}

    def digest(self) -> Answer:
        """Say which bits the model has."""
        return {"digest": transport_states.digest(self._tensors)}

    # Transfers

    def send(self, step: int, num_receivers: int = 1) -> Answer:
        """Begin to serve."""
        state = self._state()
        started = time.monotonic()
        self._transport.send(num_receivers, step, state)
        return {"seconds": time.monotonic() - started}

    def receive(
        self, sources: list[str], step: int, at: float = 0.0, tell_at: float = 2.0, in_place: bool = True
    ) -> Answer:
        """Receive a state and load it.

        Args:
            sources: metadata of the sources.
            step: the step wanted.
            at: when to begin, CLOCK_MONOTONIC.
            tell_at: report when this part of the bytes has arrived; at the end, with 0, where that was not seen.
            in_place: ours receives into the model's own memory.
        """
        latest: list[Any] = []
        told = threading.Event()

        def on_progress(progress: Any) -> None:
            latest[:] = [progress]
            if progress.received_bytes >= tell_at * progress.total_bytes and not told.is_set():
                told.set()
                self._reporter.emit("reached", received_bytes=progress.received_bytes)

        time.sleep(max(at - time.monotonic(), 0.0))
        started = time.monotonic()
        try:
            report = on_progress if tell_at < 1 else None
            state = self._transport.receive(sources, step, self._state, report, in_place=in_place)
        finally:
            if not told.is_set():
                self._reporter.emit("reached", received_bytes=0)
        received = time.monotonic()
        self._model.load_state_dict(state["model"])
        ended = time.monotonic()
        del state
        answer = {"started": started, "ended": ended, "receive_s": received - started, "load_s": ended - received}
        if latest:
            answer["resent_bytes"] = latest[0].resent_bytes
        return answer

    def mutate_after(self, by: str, clone_bytes: int, clone_first: bool) -> Answer:
        """Time how long the trainer is held before it may mutate, beside `clone()` of as many bytes; then mutate."""
        clone_s = self._time_clone(clone_bytes) if clone_first else 0.0
        started = time.monotonic()
        if by == BY_HOOK:
            with self._transport.writing():
                held_s = time.monotonic() - started
                transport_states.fill(self._tensors, _AFTER_ALL_STEPS)
        else:
            self._transport.disallow()
            held_s = time.monotonic() - started
            transport_states.fill(self._tensors, _AFTER_ALL_STEPS)
        if not clone_first:
            clone_s = self._time_clone(clone_bytes)
        return {"held_s": held_s, "clone_s": clone_s}

    def _time_clone(self, num_bytes: int) -> float:
        parts = []
        left = num_bytes // transport_states.FLOAT_BYTES
        for tensor in self._tensors:
            if left > 0:
                parts.append(tensor[: min(left, tensor.numel())])
                left -= parts[-1].numel()
        started = time.monotonic()
        clones = [part.clone() for part in parts]
        took_s = time.monotonic() - started
        del clones
        return took_s

    # The yardstick

    def raw_listen(self, num_streams: int) -> Answer:
        """Be the source of raw transfers of the model's own memory."""
        buffers = [transport_states.byte_view(tensor) for tensor in self._tensors]
        self._raw_source = transport_raw.RawSource(buffers, num_streams)
        return {"port": self._raw_source.port}

    def raw_connect(self, port: int, num_streams: int) -> Answer:
        """Be the receiver of raw transfers, into the model's own memory."""
        buffers = [transport_states.byte_view(tensor) for tensor in self._tensors]
        self._raw_receiver = transport_raw.RawReceiver(port, buffers, num_streams)
        return {}

    def raw_receive(self) -> Answer:
        """Receive once."""
        return {"seconds": self._raw_receiver.receive()}

    # The trainer

    def train(self, guard: str) -> Answer:
        """Begin to step flat out."""
        self._trainer = Trainer(self._transport, self._tensors, self._state, guard)
        return {}

    def serve(self, ahead: int) -> Answer:
        """Have a step to come served."""
        return {"step": self._trainer.serve(ahead)}

    def steps(self) -> Answer:
        """Say how many steps the trainer has done."""
        return {"steps": self._trainer.steps()}

    def rest(self) -> Answer:
        """Stop the trainer."""
        self._trainer.stop()
        self._transport.withdraw()
        return {"steps": self._trainer.steps()}

    def values(self) -> Answer:
        """Say which values of steps are in the model."""
        return {"values": transport_states.values_in(self._tensors)}

    # Watching

    def watch_memory(self) -> Answer:
        """Begin to watch the memory of this process."""
        self._memory = PeakMemory()
        return {}

    def memory(self) -> Answer:
        """Say how much it grew at most since."""
        return {"growth_bytes": self._memory.growth_bytes()}

    def received(self) -> Answer:
        """Say what has come in over this process's link so far."""
        num_bytes, num_packets = transport_links.received()
        return {"bytes": num_bytes, "packets": num_packets}

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict()}


def main() -> None:
    """Enter the namespace where there is one, build everything, say hello, do as told until the parent is gone."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    reporter = Reporter()
    logging.basicConfig(level=logging.WARNING)
    os.environ["no_proxy"] = "*"
    namespace = options.pop("namespace", "")
    if namespace:
        transport_links.enter(namespace)
    worker = Worker(reporter, **options)
    serve(worker, reporter, **worker.hello())


if __name__ == "__main__":
    main()
