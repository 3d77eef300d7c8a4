"""The life of an inner group, with a backend that misbehaves on purpose."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import Work

from torchft_ckpt.errors import CollectiveFailedError, ProcessGroupAbortedError, ProcessGroupConfigureError
from torchft_ckpt.process_group.session import Session, SessionPhase, settled

LONG = timedelta(seconds=60)
"""Nothing waits for so long; what does not happen within it raises a TimeoutError."""


class StubWork(Work):
    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future

    def is_success(self) -> bool:
        return self.future.done()

    def is_completed(self) -> bool:
        return True  # nothing of the backend waits for it any more


class StubGroup:
    """Notes which thread drops it."""

    def __init__(self, dropped_on: list[str]) -> None:
        self._dropped_on = dropped_on

    def __del__(self) -> None:
        self._dropped_on.append(threading.current_thread().name[:7])


def live_session(dropped_on: list[str] | None = None, *, ends_connections: bool = True) -> Session:
    dropped: list[str] = [] if dropped_on is None else dropped_on
    group: list[Any] = [StubGroup(dropped)]

    def connect(session: Session) -> Any:
        session.on_end(lambda: None, ends_connections=ends_connections)
        return group.pop()

    session = Session("stub", connect)
    session.connect(10.0)
    return session


def test_an_operation_that_the_backend_forgets_is_over_soon_after_the_end() -> None:
    session = live_session()
    work = session.run(lambda group: StubWork())
    session.end(ProcessGroupAbortedError("told to"))
    with pytest.raises(ProcessGroupAbortedError, match="told to"):
        work.wait(LONG)
    with pytest.raises(ProcessGroupAbortedError, match="told to"):
        work.get_future().wait()
    assert (work.is_completed(), work.is_success()) == (True, False)


def test_an_operation_is_not_over_while_the_backend_may_still_write_to_its_tensors() -> None:
    session = live_session(ends_connections=False)
    entered, leave = threading.Event(), threading.Event()

    class SlowGroup(StubGroup):
        def __del__(self) -> None:
            entered.set()
            leave.wait()

    session._slot[:] = [SlowGroup([])]  # type: ignore[list-item]
    work = session.run(lambda group: StubWork())
    session.end(ProcessGroupAbortedError("told to"))
    assert entered.wait(60)
    assert not work.is_completed()
    leave.set()
    with pytest.raises(ProcessGroupAbortedError, match="told to"):
        work.wait()


def test_a_backend_that_completes_a_forgotten_operation_late_changes_nothing() -> None:
    session = live_session()
    inner = StubWork()
    work = session.run(lambda group: inner)
    session.end(ProcessGroupAbortedError("told to"))
    assert session.join(60)
    inner.future.set_result([])
    with pytest.raises(ProcessGroupAbortedError, match="told to"):
        work.get_future().wait()


def test_an_operation_that_fails_ends_the_session() -> None:
    session = live_session()
    inner = StubWork()
    work = session.run(lambda group: inner)
    inner.future.set_exception(RuntimeError("peer is gone"))
    with pytest.raises(CollectiveFailedError, match="peer is gone"):
        work.wait()
    assert (session.phase, type(session.error)) == (SessionPhase.ENDED, CollectiveFailedError)


def test_what_is_made_of_the_end_is_in_the_one_future_of_the_work() -> None:
    inner = StubWork()
    work = live_session().run(lambda group: inner)
    ends: list[Exception | None] = []
    future = settled(work, lambda error: (ends.append(error), "made of it")[1])
    assert future is work.get_future()
    assert (ends, future.done()) == ([], False)
    inner.future.set_result(["tensors"])
    assert (future.value(), ends, work.is_success()) == ("made of it", [None], True)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_an_error_is_made_something_of_as_well(is_forgotten: bool) -> None:
    session, inner = live_session(), StubWork()
    work = session.run(lambda group: inner)
    ends: list[Exception | None] = []
    future = settled(work, lambda error: (ends.append(error), "made of it")[1])
    if is_forgotten:
        session.end(ProcessGroupAbortedError("told to"))
    else:
        inner.future.set_exception(RuntimeError("peer is gone"))
    assert future.wait() == "made of it"
    assert [type(error) for error in ends] == [ProcessGroupAbortedError if is_forgotten else CollectiveFailedError]
    assert not work.is_success()
    with pytest.raises((ProcessGroupAbortedError, CollectiveFailedError)):
        work.wait()


@pytest.mark.parametrize("fails", [False, True])
def test_of_what_is_over_already_something_is_made_at_once(fails: bool) -> None:
    inner = StubWork()
    if fails:
        inner.future.set_exception(RuntimeError("peer is gone"))
    else:
        inner.future.set_result([])
    work = live_session().run(lambda group: inner)
    for one in (work, inner):
        ends: list[Exception | None] = []
        assert settled(one, lambda error: (ends.append(error), "made of it")[1]).value() == "made of it"  # noqa: B023
        assert [error is not None for error in ends] == [fails]


def test_a_future_that_somebody_has_already_stays_as_the_backend_completes_it() -> None:
    """As where a user's group counts what its allreduce gives."""
    inner = StubWork()
    work = live_session().run(lambda group: inner)
    seen: list[object] = []
    work.get_future().add_done_callback(lambda done: seen.append(done.value()))
    future = settled(work, lambda error: "made of it")
    inner.future.set_result(["tensors"])
    assert (future.wait(), seen) == ("made of it", [["tensors"]])


def test_the_first_error_is_the_one_that_counts() -> None:
    session = live_session()
    assert [session.end(ProcessGroupAbortedError("first")), session.end(ProcessGroupAbortedError("second"))] == [
        True,
        False,
    ]
    assert str(session.error) == "first"


def test_the_inner_group_is_dropped_on_the_reaper_after_the_last_call_returned() -> None:
    dropped_on: list[str] = []
    session = live_session(dropped_on)
    entered, leave = threading.Event(), threading.Event()

    def call(group: object) -> Work:
        entered.set()
        leave.wait()
        return StubWork()

    caller = threading.Thread(target=lambda: session.run(call))
    caller.start()
    entered.wait()
    session.end(ProcessGroupAbortedError("told to"))
    assert not session.join(0.2)
    assert dropped_on == []
    leave.set()
    assert session.join(60)
    caller.join()
    assert dropped_on == ["pg-reap"]


def test_a_connect_that_does_not_return_is_left_behind() -> None:
    let_go = threading.Event()
    interrupted = threading.Event()

    def connect(session: Session) -> Any:
        session.on_end(interrupted.set)
        let_go.wait()
        return StubGroup([])

    session = Session("stub", connect)
    with pytest.raises(ProcessGroupConfigureError, match="not connected within"):
        session.connect(0.05)
    assert interrupted.is_set()
    assert not session.join(0.05)
    let_go.set()
    assert session.join(60)


def test_what_was_registered_is_closed_in_the_end() -> None:
    closed = threading.Event()

    def connect(session: Session) -> Any:
        session.on_end(lambda: None, closed.set)
        raise RuntimeError("no such network")

    session = Session("stub", connect)
    with pytest.raises(ProcessGroupConfigureError, match="no such network"):
        session.connect(10.0)
    assert session.join(60)
    assert closed.is_set()
