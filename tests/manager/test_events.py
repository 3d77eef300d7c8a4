"""`Manager(on_event=...)`: what happened is told in order, on the training thread; what the listener does ends no step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replicas import Replica
from torch.profiler import ProfilerActivity, profile

from torchft_ckpt import Checkpointer, LighthouseServer, LocalSGD
from torchft_ckpt.events import (
    CheckpointSaved,
    Event,
    Healed,
    PeerLost,
    QuorumChanged,
    StepCommitted,
    StepDiscarded,
)
from torchft_ckpt.manager.event_queue import EventQueue


class Group(Replica):
    """A group of one, and the events that it was told, each with the thread that told it."""

    def __init__(
        self, lighthouse: LighthouseServer, name: str, *, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self.told: list[Event] = []
        self.threads: set[int] = set()
        super().__init__(lighthouse, name, use_async_quorum=False, on_event=on_event or self.note)

    def note(self, event: Event) -> None:
        self.told.append(event)
        self.threads.add(threading.get_ident())

    def begin(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()

    def end(self) -> None:
        for parameter in self.model.parameters():
            self.manager.allreduce(parameter.grad).wait()
        self.optimizer.step()

    def told_of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]


def test_each_step_is_told_after_its_quorum_with_its_outcome(lighthouse: LighthouseServer) -> None:
    group = Group(lighthouse, "alone")
    group.step()
    group.begin()
    group.manager.report_error(RuntimeError("the loader is broken"))
    group.end()
    group.step()
    group.manager.shutdown()

    assert [type(event) for event in group.told] == [
        QuorumChanged,
        StepCommitted,
        StepDiscarded,
        QuorumChanged,
        StepCommitted,
    ]
    formed, first, discarded, _, last = group.told
    assert formed == QuorumChanged(
        step=0,
        quorum_id=first.quorum_id,
        replica_id=group.manager.replica_id(),
        num_groups=1,
        num_participants=1,
        participating_rank=0,
    )
    assert isinstance(first, StepCommitted)
    assert (first.step, first.num_participants, last.step) == (0, 1, 1)
    assert 0 < first.took_s < 60
    assert isinstance(discarded, StepDiscarded)
    assert discarded.step == 1
    assert "the loader is broken" in discarded.reason
    assert group.threads == {threading.get_ident()}


def test_a_group_that_joins_heals_and_one_that_leaves_in_a_step_is_lost(lighthouse: LighthouseServer) -> None:
    first = Group(lighthouse, "first")
    first.step()
    second = Group(lighthouse, "second")
    dies_in_next_step, has_died = threading.Event(), threading.Event()

    def train_on() -> None:
        while not first.told_of(PeerLost):
            first.begin()
            if first.manager.num_participants() == 2 and dies_in_next_step.is_set():
                has_died.wait(20)
            first.end()

    def join_and_die() -> None:
        while not second.told_of(StepCommitted):
            second.step()
        dies_in_next_step.set()
        second.begin()
        second.manager.shutdown()
        has_died.set()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(train_on), pool.submit(join_and_die)]:
            future.result()
    first.step()
    first.manager.shutdown()

    (healed,) = second.told_of(Healed)
    assert healed.sources == (first.manager.replica_id(),)
    assert healed.step >= 1
    (lost,) = first.told_of(PeerLost)
    assert lost.peer == second.manager.replica_id()
    of_the_loss = first.told_of(StepDiscarded)[-1]
    assert first.told.index(lost) < first.told.index(of_the_loss)
    assert [event.num_groups for event in first.told_of(QuorumChanged)] == [1, 2, 1]


def test_a_save_that_has_ended_is_told_at_the_next_step(lighthouse: LighthouseServer, tmp_path: Path) -> None:
    group = Group(lighthouse, "alone")
    group.step()
    checkpointer = Checkpointer(tmp_path, manager=group.manager)
    saved = checkpointer.save().result(timeout=60)
    checkpointer.wait()
    assert not group.told_of(CheckpointSaved), "the training thread was elsewhere"
    group.step()
    assert group.told_of(CheckpointSaved) == [
        CheckpointSaved(
            step=1,
            quorum_id=group.told_of(QuorumChanged)[0].quorum_id,
            replica_id=group.manager.replica_id(),
            name=saved.name,
            is_closed=True,
        )
    ]
    checkpointer.shutdown()


def test_a_listener_that_saves_saves_the_last_step_too(lighthouse: LighthouseServer, tmp_path: Path) -> None:
    saved: list[str] = []

    def save(event: Event) -> None:
        if isinstance(event, StepCommitted):
            saved.append(checkpointer.save().result(timeout=60).name)

    group = Group(lighthouse, "alone", on_event=save)
    checkpointer = Checkpointer(tmp_path, manager=group.manager)
    group.step()
    group.step()
    group.manager.finish()
    checkpointer.shutdown()
    group.manager.shutdown()
    assert len(set(saved)) == 2


def test_a_step_that_is_open_is_not_interrupted_by_events(lighthouse: LighthouseServer) -> None:
    group = Group(lighthouse, "alone")
    group.optimizer.zero_grad()
    group.begin()  # goes on with the step
    assert not group.told
    group.end()
    group.manager.shutdown()
    assert [type(event) for event in group.told] == [QuorumChanged, StepCommitted]


def test_a_listener_that_raises_is_logged_once_and_ends_no_step(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(event: Event) -> None:
        raise ValueError("the disk of the logger is full")

    group = Group(lighthouse, "alone", on_event=refuse)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            group.step()
    assert group.manager.current_step() == 3
    (record,) = [record for record in caplog.records if "on_event raised" in record.message]
    assert "QuorumChanged" in record.message
    assert "the disk of the logger is full" in str(record.exc_info)


def test_a_listener_sees_the_weights_of_the_step_and_holds_up_no_reader_of_them(lighthouse: LighthouseServer) -> None:
    seen: list[tuple[type[Event], int, bool, torch.Tensor]] = []

    def look(event: Event) -> None:
        is_locked = group.manager.state_dict_lock.held_for_write()
        seen.append((type(event), group.manager.current_step(), is_locked, group.model.weight.detach().clone()))

    group = Group(lighthouse, "alone", on_event=look)
    weights = []
    for _ in range(2):
        group.step()
        weights.append(group.model.weight.detach().clone())
    group.manager.shutdown()
    assert [row[:3] for row in seen] == [
        (QuorumChanged, 1, False),
        (StepCommitted, 1, False),
        (StepCommitted, 2, False),
    ]
    for (_, step, _, weight), later in zip(seen[1:], weights, strict=True):
        assert weight.view(torch.int32).equal(later.view(torch.int32)), f"step {step}"


def test_what_a_listener_causes_is_told_after_what_it_was_told_of() -> None:
    def committed(step: int) -> StepCommitted:
        return StepCommitted(step=step, quorum_id=1, replica_id="g", num_participants=1, took_s=0.1)

    told: list[Event] = []

    def cause(event: Event) -> None:
        told.append(event)
        if event.step < 3:
            queue.add(committed(event.step + 1))
            queue.deliver()

    queue = EventQueue(cause, "g")
    queue.add(committed(0))
    queue.deliver()
    assert [event.step for event in told] == [0, 1, 2, 3]


def test_without_a_listener_nothing_is_kept() -> None:
    queue = EventQueue(None, "g")
    queue.add(StepCommitted(step=0, quorum_id=1, replica_id="g", num_participants=1, took_s=0.1))
    assert not queue._pending


def test_a_profile_shows_where_a_step_waits(lighthouse: LighthouseServer) -> None:
    group = Group(lighthouse, "alone")
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads) as profiled:
        group.step()
    names = {event.name for event in profiled.events()}
    ranges = ("wait_quorum", "allreduce", "should_commit", "_client::_quorum", "_pg::configure")
    assert {f"torchft::manager::{name}" for name in ranges} <= names


def test_a_profile_shows_where_a_round_waits(lighthouse: LighthouseServer) -> None:
    group = Group(lighthouse, "alone")
    with LocalSGD(group.manager, group.model, group.sgd, sync_every=1):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            group.model(torch.ones(2, 8)).square().mean().backward()
            group.sgd.step()
    names = {event.name for event in profiled.events()}
    assert {
        f"torchft::local_sgd::{name}" for name in ("prepare_sync", "wait", "perform_sync", "save_parameters")
    } <= names
