"""What a Manager says of its replica is of one moment, whoever changes the replica meanwhile."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from torchft_ckpt.core.coordination.messages import LeafDigests, LeavesWanted
from torchft_ckpt.core.coordination.replica import ReplicaSettings
from torchft_ckpt.manager.event_queue import EventQueue
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.manager.timekeeping import Timekeeper


def no_leaves(wanted: LeavesWanted) -> LeafDigests:
    return LeafDigests(version=wanted.version, group_rank=wanted.group_rank, leaves=[])


def client() -> StepClient:
    return StepClient(
        ReplicaSettings(min_replica_size=1),
        "group",
        job="default",
        abort=lambda: None,
        cancel=lambda: None,
        events=EventQueue(None, "group"),
        answer_leaves=no_leaves,
        timekeeper=Timekeeper(),
    )


def test_a_view_that_is_held_does_not_change() -> None:
    one = client()
    before = one.view()
    one.restored(7)
    after = one.view()
    assert (before.version.step, before.restored, after.version.step, after.restored) == (0, False, 7, True)


def test_who_reads_beside_a_writer_sees_one_moment() -> None:
    """A state that is torn has no name, and a restored one has: no mixture is ever seen."""
    one = client()
    has_ended = threading.Event()

    def write() -> None:
        for number in range(3000):
            one.restored(number + 1)
            one.load_torn()
        has_ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not has_ended.is_set():
        now = one.view()
        seen.add((now.version.step > 0, now.restored, now.torn, now.is_behind))
    writer.join()
    named, torn, fresh = (True, True, False, True), (False, False, True, True), (False, False, False, True)
    assert seen <= {named, torn, fresh}


def test_an_interrupt_at_any_moment_leaves_the_lock_free() -> None:
    """An interrupt may be lost: a finaliser swallows it, and CPython 3.11 may forget a signal that meets a request for its lock.

    So the timer fires again until one has come through.
    """
    one = client()
    num_interrupts = 0

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal num_interrupts
        signal.setitimer(signal.ITIMER_REAL, 0)
        num_interrupts += 1
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4, 0.5)
                while num_interrupts == number:
                    one.load_torn()
            except KeyboardInterrupt:
                pass
            assert not one._lock._is_owned()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
