"""Checks of the promises of a `CheckpointTransport`, for any implementation.

    from torchft_ckpt.testing.transport_conformance import CHECKS, TransportPair

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_transport_conforms(check):
        check(lambda: MyTransport(...))

Each check takes a function that makes a new transport, and shuts down what it made. It raises `ConformanceError` with a
sentence about the promise that was broken. It knows nothing of how a transport works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from torchft_ckpt.checkpointing.transport import CheckpointTransport
from torchft_ckpt.errors import (
    CheckpointError,
    SourceRefusedError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from torchft_ckpt.testing.conformance import (
    ConformanceError,
    differences,
    require_equal,
    require_raises,
)

State = dict[str, Any]
MakeTransport = Callable[[], CheckpointTransport[State]]
Check = Callable[[MakeTransport], None]
LONG = timedelta(seconds=20)
SHORT = timedelta(seconds=0.2)


class TransportPair:
    """A source and a destination, and a thread to receive on."""

    def __init__(self, source: CheckpointTransport[State], destination: CheckpointTransport[State]) -> None:
        self.source = source
        self.destination = destination
        self._executor = ThreadPoolExecutor(max_workers=1)

    def receive(self, step: int, timeout: timedelta = LONG) -> State:
        return self.destination.recv_checkpoint(0, self.source.metadata(), step, timeout)

    def start_receive(self, step: int, timeout: timedelta = LONG) -> Future[State]:
        started = threading.Event()

        def work() -> State:
            started.set()
            return self.receive(step, timeout)

        future = self._executor.submit(work)
        started.wait(LONG.total_seconds())
        return future

    def close(self) -> None:
        self.source.shutdown(wait=True)
        self.destination.shutdown(wait=True)
        self._executor.shutdown(wait=True)


@contextmanager
def transport_pair(make: MakeTransport) -> Iterator[TransportPair]:
    source = make()
    try:
        pair = TransportPair(source, make())
    except BaseException:
        source.shutdown(wait=True)
        raise
    try:
        yield pair
    finally:
        pair.close()


def example_state(seed: int = 0) -> State:
    """Return a state as training scripts have them, the same for the same seed."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return {
        "user": {
            "model": {
                "weight": torch.randn(300, 500, generator=generator, device="cpu"),
                "bias": torch.randn(7, generator=generator, device="cpu").to(torch.bfloat16),
                "empty": torch.empty(0, 4, device="cpu"),
                "transposed": torch.randn(6, 5, generator=generator, device="cpu").t(),
            },
            "optim": {
                "state": {
                    0: {
                        "step": torch.tensor(3.0, device="cpu"),
                        "exp_avg": torch.randn(300, 500, generator=generator, device="cpu"),
                    }
                },
                "param_groups": [
                    {"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None, "fused": False}
                ],
            },
        },
        "torchft": {"step": seed, "batches_committed": 2 * seed},
    }


def check_a_state_arrives_equal_in_every_bit(make: MakeTransport) -> None:
    with transport_pair(make) as pair:
        pair.source.send_checkpoint([1], 3, example_state(3), LONG)
        require_equal("transport", pair.receive(3), example_state(3), "the received state differs from the one sent")


def check_a_received_state_is_the_receivers_own(make: MakeTransport) -> None:
    with transport_pair(make) as pair:
        state = example_state(3)
        pair.source.send_checkpoint([1], 3, state, LONG)
        pair.receive(3)["user"]["model"]["weight"].zero_()
        require_equal("transport", state, example_state(3), "the received state shares memory with the sent one")


def check_a_state_mutated_after_disallow_is_still_the_old_one(make: MakeTransport) -> None:
    """A receiver that comes after `disallow_checkpoint` gets the state of the step or an error, never a newer one."""
    with transport_pair(make) as pair:
        state = example_state(3)
        pair.source.send_checkpoint([1], 3, state, LONG)
        pair.source.disallow_checkpoint()
        for tensor in (state["user"]["model"]["weight"], state["user"]["optim"]["state"][0]["step"]):
            tensor.add_(1)
        try:
            received = pair.receive(3, timedelta(seconds=2))
        except TransferError:
            return
        require_equal("transport", received, example_state(3), "a state that was mutated after disallow was received")


def check_a_step_that_is_not_served_yet_is_waited_for(make: MakeTransport) -> None:
    with transport_pair(make) as pair:
        future = pair.start_receive(3)
        pair.source.send_checkpoint([1], 3, example_state(3), LONG)
        received = future.result(LONG.total_seconds())
        require_equal("transport", received, example_state(3), "the received state differs from the one sent")


def check_a_step_that_never_comes_is_an_error_at_the_deadline(make: MakeTransport) -> None:
    with transport_pair(make) as pair:
        require_raises(
            "transport",
            TransferTimeoutError,
            lambda: pair.receive(3, SHORT),
            "a receive of a step that is never served",
        )


def check_a_step_that_is_over_is_refused(make: MakeTransport) -> None:
    """A source that has gone on does not send the newer state under the older step."""
    with transport_pair(make) as pair:
        pair.source.send_checkpoint([1], 4, example_state(4), LONG)
        require_raises("transport", SourceRefusedError, lambda: pair.receive(3), "a receive of a step that is over")


def check_the_newest_state_of_a_step_is_received(make: MakeTransport) -> None:
    with transport_pair(make) as pair:
        for step in range(4):
            pair.source.send_checkpoint([1], step, example_state(step), LONG)
            require_equal("transport", pair.receive(step), example_state(step), f"step {step} arrived changed")
            pair.source.disallow_checkpoint()


def check_cancel_ends_a_receive(make: MakeTransport) -> None:
    with transport_pair(make) as pair:
        future = pair.start_receive(3)
        while not future.done():  # the receive may begin a moment after its thread
            pair.destination.cancel_recv()
            threading.Event().wait(0.005)
        require_raises("transport", TransferCancelledError, future.result, "a cancelled receive")


def check_cancel_does_not_touch_the_next_receive(make: MakeTransport) -> None:
    with transport_pair(make) as pair:
        pair.destination.cancel_recv()
        pair.source.send_checkpoint([1], 3, example_state(3), LONG)
        require_equal("transport", pair.receive(3), example_state(3), "the received state differs from the one sent")


def check_a_source_that_is_gone_is_an_error(make: MakeTransport) -> None:
    """A receive from a source that was shut down fails by name."""
    with transport_pair(make) as pair:
        pair.source.send_checkpoint([1], 3, example_state(3), LONG)
        pair.source.shutdown(wait=True)
        require_raises(
            "transport", TransferError, lambda: pair.receive(3, timedelta(seconds=5)), "a receive from a dead source"
        )


def check_metadata_of_nobody_is_an_error(make: MakeTransport) -> None:
    """Metadata that no transport gave out is refused by name."""
    with transport_pair(make) as pair:
        for metadata in ("", "nobody", "file:///etc/passwd"):
            require_raises(
                "transport",
                TransferError,
                lambda metadata=metadata: pair.destination.recv_checkpoint(0, metadata, 3, SHORT),  # type: ignore[misc]
                f"a receive from {metadata!r}",
            )


def check_shutdown_and_disallow_may_be_called_again(make: MakeTransport) -> None:
    """Both are idempotent, and nothing is served after a shutdown."""
    with transport_pair(make) as pair:
        pair.source.disallow_checkpoint()
        pair.source.disallow_checkpoint()
        pair.source.shutdown()
        pair.source.shutdown()
        pair.source.disallow_checkpoint()
        require_raises(
            "transport",
            CheckpointError,
            lambda: pair.source.send_checkpoint([1], 3, example_state(3), LONG),
            "a send after shutdown",
        )


__all__ = ["CHECKS", "Check", "ConformanceError", "TransportPair", "check_transport", "differences", "example_state"]

CHECKS: list[Check] = [check for name, check in list(globals().items()) if name.startswith("check_")]
"""Every check, for a parametrized test."""


def check_transport(make: MakeTransport) -> None:
    """Run every check.

    Raises:
        ConformanceError: a promise was broken.
    """
    for check in CHECKS:
        check(make)
