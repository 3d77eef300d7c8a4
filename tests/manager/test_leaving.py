"""A rank that is asked to leave, by a signal or from outside: what its training thread sees, and what becomes of its save."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replicas import Replica, lighthouse_of, shutdown, together
from support.stores import hosted_store
from support.waiting import wait_until

from torchft_ckpt import Checkpointer, LighthouseServer, checkpoints_in, load_checkpoint
from torchft_ckpt.__main__ import main
from torchft_ckpt.core.coordination.messages import GroupBroken
from torchft_ckpt.errors import ConfigError, GroupLeftError, JobFinishedError
from torchft_ckpt.manager.leaving import WayOut

ASKED = signal.SIGUSR1


@pytest.fixture
def lighthouse() -> LighthouseServer:
    return lighthouse_of(1, heartbeat_timeout_ms=20_000)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals are handled after each test as before it: who was asked to leave ignores further ones."""
    before = signal.getsignal(ASKED)
    yield
    signal.signal(ASKED, before)


def test_a_signal_ends_the_loop_after_its_step_with_a_save(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "group")
    saved: list[int] = []
    replica.manager.leave_on(ASKED, lambda: saved.append(replica.manager.current_step()))
    assert replica.step()
    assert not replica.manager.should_leave()
    signal.raise_signal(ASKED)
    assert not replica.manager.should_leave(), "it makes one more step, with the others"
    assert replica.step()
    assert replica.manager.should_leave()
    signal.raise_signal(ASKED)
    assert replica.manager.should_leave()
    assert saved == [2]
    with pytest.raises(GroupLeftError, match="has left its job") as left:
        replica.optimizer.zero_grad()
    assert left.value.code == 0


def test_a_loop_that_does_not_ask_saves_before_the_error(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "group")
    saved: list[int] = []
    replica.manager.leave_on(ASKED, lambda: saved.append(replica.manager.current_step()))
    replica.step()
    signal.raise_signal(ASKED)
    replica.step()
    with pytest.raises(GroupLeftError):
        replica.step()
    assert saved == [2]


def test_a_group_that_has_left_is_not_the_jobs_end(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "group")
    replica.manager.leave_on(ASKED)
    replica.step()
    signal.raise_signal(ASKED)
    replica.step()
    assert replica.manager.should_leave()
    replica.manager.shutdown(finished=True)
    again = Replica(lighthouse, "group")
    again.manager.load_state_dict({"step": 2, "batches_committed": 2})
    try:
        assert again.step()
    except JobFinishedError as error:
        pytest.fail(f"the job went on elsewhere, or would have: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raises", "fails later", "hangs"])
def test_a_save_that_goes_wrong_keeps_nobody(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def save() -> Future[int]:
        if what == "raises":
            raise OSError("no space")
        future: Future[int] = Future()
        if what == "fails later":
            future.set_exception(OSError("no space"))
        return future

    replica = Replica(lighthouse, "group")
    replica.manager.leave_on(ASKED, save, timedelta(seconds=3 if what == "hangs" else 600))
    replica.step()
    signal.raise_signal(ASKED)
    replica.step()
    assert replica.manager.should_leave()
    assert ("its save is not done" if what == "hangs" else "no space") in caplog.text


def test_after_the_deadline_the_main_thread_is_interrupted_wherever_it_is(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "group")
    replica.manager.leave_on(ASKED, deadline=timedelta(seconds=0.2))
    replica.step()
    with pytest.raises(GroupLeftError):
        signal.raise_signal(ASKED)
        threading.Event().wait(60)
    assert replica.manager.should_leave()
    with pytest.raises(GroupLeftError):
        replica.step()


@pytest.mark.parametrize("learns", ["by the error of a call", "by should_leave"])
def test_a_script_that_knows_is_not_interrupted_in_its_cleanup(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, learns: str
) -> None:
    """The group goes at its deadline; what it has in flight takes long to abort, so the interrupt comes late."""
    replica = Replica(lighthouse, "group")
    in_cleanup, was_interrupted = threading.Event(), threading.Event()
    abort, interrupt = replica.manager._client._abort, WayOut._interrupt

    def abort_late() -> None:
        in_cleanup.wait(20)
        abort()

    def interrupt_and_say_so(way_out: WayOut) -> None:
        interrupt(way_out)
        was_interrupted.set()

    monkeypatch.setattr(replica.manager._client, "_abort", abort_late)
    monkeypatch.setattr(WayOut, "_interrupt", interrupt_and_say_so)
    replica.manager.leave_on(ASKED, deadline=timedelta(seconds=0.3))
    replica.step()
    lighthouse.shutdown()
    signal.raise_signal(ASKED)
    if learns == "by should_leave":
        wait_until(replica.manager.should_leave)
    else:
        with pytest.raises(GroupLeftError):
            while True:
                replica.step()
    in_cleanup.set()
    try:
        wait_until(was_interrupted.is_set)
        was_interrupted.clear()
        replica.manager._way_out.heard(GroupBroken(reason="it left", has_left=True))
        assert was_interrupted.is_set(), "the word of its own rank 0 comes late as well"
    except GroupLeftError as error:
        pytest.fail(f"the cleanup was broken off: {error}")


def test_all_ranks_of_a_group_leave_after_one_step_whichever_was_asked(lighthouse: LighthouseServer) -> None:
    store = hosted_store(0)

    def make(rank: int) -> Replica:
        return Replica(lighthouse, "group", rank=rank, world_size=2, store_addr="127.0.0.1", store_port=store.port)

    ranks = together([0, 1], make)  # type: ignore[list-item]
    together(ranks, lambda rank: rank.step())
    ranks[1].manager.leave_on(ASKED)
    signal.raise_signal(ASKED)

    def train(rank: Replica) -> int:
        while not rank.manager.should_leave():
            rank.step()
        return rank.manager.current_step()

    assert len(set(together(ranks, train))) == 1


@pytest.mark.slow
def test_ranks_between_two_steps_that_are_far_apart_leave_at_the_same_call(lighthouse: LighthouseServer) -> None:
    """As in an outer loop; one of them is ahead of the other."""
    store = hosted_store(0)

    def make(rank: int) -> Replica:
        return Replica(lighthouse, "group", rank=rank, world_size=2, store_addr="127.0.0.1", store_port=store.port)

    ranks = together([0, 1], make)  # type: ignore[list-item]
    together(ranks, lambda rank: rank.step())
    ranks[1].manager.leave_on(ASKED)
    signal.raise_signal(ASKED)

    def train(rank: Replica) -> int:
        num_calls = 1
        while not rank.manager.should_leave():
            num_calls += 1
            time.sleep(0.001 if rank is ranks[0] else 0.002)
        return num_calls

    assert len(set(together(ranks, train))) == 1


def test_the_operator_asks_from_outside(lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]) -> None:
    replica = Replica(lighthouse, "group")
    replica.step()
    assert main(["drain", "group", "--lighthouse", lighthouse.address()]) == 0
    assert "is to leave at the end of its step" in capsys.readouterr().out
    main(["status", "--job", "default", "--lighthouse", lighthouse.address()])
    assert '"leaving": "the operator asked for it"' in capsys.readouterr().out
    replica.step()
    assert replica.manager.should_leave()
    members = lighthouse._jobs.states["default"].members
    wait_until(lambda: not members, "the group's last word arrives")
    assert main(["drain", "group", "--lighthouse", lighthouse.address()]) == 1
    assert "has no replica group group here now" in capsys.readouterr().err
    assert main(["drain", "\n", "--lighthouse", lighthouse.address()]) == 2


def test_a_save_of_a_group_that_leaves_is_whole_without_the_others(
    lighthouse: LighthouseServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group trains along, and does not save."""
    monkeypatch.setattr("torchft_ckpt.checkpointer._TO_CLOSE", timedelta(minutes=4))
    leaving, staying = Replica(lighthouse, "a"), Replica(lighthouse, "b", seed=1)
    checkpointer = Checkpointer(tmp_path, manager=leaving.manager)
    together([leaving, staying], Replica.step)
    while leaving.manager.num_participants() < 2:
        together([leaving, staying], Replica.step)
    leaving.manager.leave_on(ASKED, checkpointer.save)
    signal.raise_signal(ASKED)
    together([leaving, staying], Replica.step)
    assert leaving.manager.should_leave()
    step = leaving.manager.current_step()
    assert list(checkpoints_in(tmp_path)) == [step]
    state: dict[str, Any] = {"model": torch.nn.Linear(8, 8).state_dict()}
    [saved] = tmp_path.glob("step-*")
    load_checkpoint(saved, state)
    assert torch.equal(state["model"]["weight"], leaving.model.weight)
    started_at = time.monotonic()
    checkpointer.shutdown()
    assert time.monotonic() - started_at < 120.0, "it waited for what is closed"
    assert staying.step(), "the other goes on, and discards nothing"


def test_what_cannot_be_used_is_refused_by_its_name(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "group")
    with pytest.raises(ConfigError, match="deadline"):
        replica.manager.leave_on(ASKED, deadline=timedelta(0))
    with pytest.raises(ConfigError, match="cannot be handled"):
        replica.manager.leave_on(signal.SIGKILL)

    def elsewhere(one: Replica) -> None:
        with pytest.raises(ConfigError, match="main thread"):
            one.manager.leave_on(ASKED)

    together([replica], elsewhere)


@pytest.mark.parametrize("asks", ["first signal", "second signal", "operator"])
def test_each_signal_has_its_own_save_and_what_comes_from_outside_that_of_the_last(
    lighthouse: LighthouseServer, asks: str
) -> None:
    other = signal.SIGUSR2
    before = signal.getsignal(other)
    replica = Replica(lighthouse, "group")
    saved: list[str] = []
    try:
        replica.manager.leave_on(ASKED, lambda: saved.append("first"), timedelta(seconds=600))
        replica.manager.leave_on(other, lambda: saved.append("last"))
        replica.step()
        if asks == "operator":
            assert main(["drain", "group", "--lighthouse", lighthouse.address()]) == 0
        else:
            for number in [ASKED, other] if asks == "first signal" else [other, ASKED]:
                signal.raise_signal(number)
        replica.step()
        assert replica.manager.should_leave()
    finally:
        signal.signal(other, before)
    assert saved == ["first" if asks == "first signal" else "last"]


def test_a_handler_that_was_there_is_called_too_and_is_there_again_afterwards(lighthouse: LighthouseServer) -> None:
    heard: list[int] = []

    def before(number: int, frame: object) -> None:
        heard.append(number)

    signal.signal(ASKED, before)
    replica = Replica(lighthouse, "group")
    replica.manager.leave_on(ASKED)
    replica.step()
    shutdown(replica)
    assert signal.getsignal(ASKED) is before
    replica = Replica(lighthouse, "group", job="another")
    replica.manager.leave_on(ASKED)
    signal.raise_signal(ASKED)
    assert heard == [ASKED]


def test_ctrl_c_leaves_once_and_interrupts_the_second_time(lighthouse: LighthouseServer) -> None:
    before = signal.getsignal(signal.SIGINT)
    replica = Replica(lighthouse, "group")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        replica.manager.leave_on(signal.SIGINT)
        replica.step()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        replica.step()
        assert replica.manager.should_leave()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_dies_of_the_signal_as_it_did_before(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "group")
    replica.manager.leave_on(ASKED)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, b"!")
        while True:
            time.sleep(1)
    os.read(readable, 1)  # Python forgets signals that come before it is done with the fork
    os.kill(child, ASKED)
    assert os.waitpid(child, 0)[1] == ASKED
    assert not replica.manager.should_leave()


def test_a_group_that_waits_for_others_goes_without_a_step() -> None:
    lighthouse = lighthouse_of(2, heartbeat_timeout_ms=20_000)
    replica = Replica(lighthouse, "group")
    replica.manager.leave_on(ASKED)
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident or 0, ASKED))
    timer.start()
    assert not replica.step(), "a step for itself alone"
    assert replica.manager.should_leave()
    shutdown(replica)
    lighthouse.shutdown()
    timer.join()


def test_who_stays_hears_of_the_leaving_group_and_discards_nothing(lighthouse: LighthouseServer) -> None:
    """A collective after the step, for a metric, does not wait for the save of a group that has left the loop."""
    leaving, staying = Replica(lighthouse, "a"), Replica(lighthouse, "b", seed=1)
    together([leaving, staying], Replica.step)
    while leaving.manager.num_participants() < 2:
        together([leaving, staying], Replica.step)
    may_end = threading.Event()
    is_saving = threading.Event()

    def save() -> None:
        is_saving.set()
        may_end.wait(60)

    leaving.manager.leave_on(ASKED, save)
    signal.raise_signal(ASKED)
    together([leaving, staying], Replica.step)

    def ends(replica: Replica) -> bool:
        if replica is leaving:
            return replica.manager.should_leave()
        wait_until(is_saving.is_set)
        is_good = replica.manager.allreduce(torch.ones(1)).wait()
        committed = replica.step()
        may_end.set()
        return committed and not is_good

    assert together([leaving, staying], ends) == [True, True]
    assert staying.manager.statistics().num_discarded == 0
