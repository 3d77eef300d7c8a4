"""The manager against a real lighthouse, in this process: groups of one, each on a thread where there are several."""

from __future__ import annotations

import enum
import gc
import logging
import re
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from support import replicas as of_tests
from support.ports import reserved_port
from support.replicas import SHORT, Replica, ends, lighthouse_of, shutdown, together

from torchft_ckpt import HTTPTransport, LighthouseServer, Manager, Optimizer, WorldSizeMode
from torchft_ckpt.checkpointing.serving.snapshot_registry import SnapshotRegistry
from torchft_ckpt.errors import (
    AddressInUseError,
    AuthenticationError,
    ConfigError,
    LighthouseUnreachableError,
    MaxRetriesExceededError,
    QuorumTimeoutError,
    RefusedError,
    StateDictLoadError,
    UnsupportedValueError,
)
from torchft_ckpt.manager import rank_config, step_client
from torchft_ckpt.manager.step import Steps


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_different_weights_are_equal_after_the_first_quorum(use_async_quorum: bool) -> None:
    server = lighthouse_of(3)
    options: dict[str, Any] = {"min_replica_size": 3, "use_async_quorum": use_async_quorum}
    with ThreadPoolExecutor(3) as pool:
        replicas = list(pool.map(lambda seed: Replica(server, f"group_{seed}", seed, **options), range(3)))
    assert len({str(replica.bits()) for replica in replicas}) == 3
    committed = together(replicas, Replica.step)
    assert committed == [True, True, True]
    assert len({str(replica.bits()) for replica in replicas}) == 1
    assert [replica.manager.current_step() for replica in replicas] == [1, 1, 1]
    assert [replica.manager.batches_committed() for replica in replicas] == [3, 3, 3]


def test_a_manager_that_the_script_has_let_go_of_stays_in_the_job() -> None:
    """As of a main() that returns: at exit it leaves the job by its own word."""
    server = lighthouse_of(1)
    replica = Replica(server, "group")
    assert replica.step()
    manager = weakref.ref(replica.manager)
    of_tests.made.remove(replica.manager)
    del replica
    gc.collect()
    kept = manager()
    assert kept is not None
    kept.shutdown()


def test_without_init_sync_weights_are_taken_for_equal() -> None:
    server = lighthouse_of(2)
    with ThreadPoolExecutor(2) as pool:
        replicas = list(pool.map(lambda n: Replica(server, n, min_replica_size=2, init_sync=False), ["a", "b"]))
    assert together(replicas, Replica.step) == [True, True]
    assert [replica.manager.statistics().num_healed for replica in replicas] == [0, 0]


def test_a_spare_trains_along_and_contributes_nothing() -> None:
    server = lighthouse_of(3)
    with ThreadPoolExecutor(3) as pool:
        mode = WorldSizeMode.FIXED_WITH_SPARES
        replicas = list(
            pool.map(lambda n: Replica(server, n, min_replica_size=2, world_size_mode=mode), ["a", "b", "c"])
        )
    assert together(replicas, Replica.step) == [True, True, True]
    ranks = [replica.manager.participating_rank() for replica in replicas]
    assert sorted(ranks, key=str) == [0, 1, None]
    assert [replica.manager.num_participants() for replica in replicas] == [2, 2, 2]
    assert len({str(replica.bits()) for replica in replicas}) == 1


def test_a_later_group_heals_all_registered_states(lighthouse: LighthouseServer) -> None:
    first = Replica(lighthouse, "first")
    extra = {"first": {"tokens": 7}, "second": {"tokens": 0}}
    first.manager.register_state_dict_fn("extra", extra["first"].update, lambda: dict(extra["first"]))
    for _ in range(3):
        assert first.step()
    second = Replica(lighthouse, "second", seed=1)
    second.manager.register_state_dict_fn("extra", extra["second"].update, lambda: dict(extra["second"]))
    stop = threading.Event()

    def train(replica: Replica) -> None:
        while not stop.is_set():
            replica.step()
            if replica is second and replica.manager.statistics().num_committed >= 2:
                stop.set()
                replica.manager.shutdown()

    together([first, second], train)
    assert second.manager.statistics().num_healed == 1
    assert extra["second"] == {"tokens": 7}


def test_fewer_than_min_replica_size_never_commit(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "alone", min_replica_size=2)
    assert [replica.step() for _ in range(3)] == [False, False, False]
    assert replica.manager.current_step() == 0


def test_too_many_discarded_steps_in_a_row_raise_when_asked_to(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "alone", min_replica_size=2, max_retries=1)
    assert replica.step() is False
    with pytest.raises(MaxRetriesExceededError, match=r"max_retries is 1.*min_replica_size is 2"):
        replica.step()


def test_steps_discarded_for_one_cause_are_warned_of_once_in_a_row(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica(lighthouse, "alone")
    assert replica.step()

    def discards() -> list[str]:
        caplog.clear()
        for number in range(5):
            replica.manager.start_quorum()
            replica.manager.report_error(ValueError(f"batch {number} is torn"))
            assert not replica.manager.should_commit()
        return [line for line in caplog.messages if "in a row" in line]

    with caplog.at_level(logging.WARNING, "torchft_ckpt.manager"):
        first = discards()
        assert replica.step()
        again = discards()
    told = r"alone:.*: 3 steps in a row did not count here for one cause: alone:.*: ValueError: batch 2 is torn"
    assert [re.fullmatch(told, line) is not None for line in first + again] == [True, True]


@pytest.mark.slow
def test_waiting_for_a_quorum_says_what_for_and_how_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_client, "PENDING_LOG_S", 1.0)
    server = lighthouse_of(2)
    replica = Replica(server, "alone", quorum_timeout=timedelta(seconds=5), quorum_retries=0)
    with caplog.at_level(logging.WARNING, "torchft_ckpt.manager"), pytest.raises(QuorumTimeoutError) as error:
        replica.step()
    assert "1 of at least 2 replica groups are here (alone:" in str(error.value)
    said = [line for line in caplog.messages if re.search(r"has waited \d+\.\d s for a quorum at step 0: ", line)]
    assert any("1 of at least 2 replica groups" in line for line in said)
    assert len(said) <= 6, "at a fifth of PENDING_LOG_S, and then each time that it has passed"


def test_an_error_in_the_step_discards_it_and_the_next_one_counts(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "alone")
    replica.optimizer.zero_grad()
    replica.manager.report_error(RuntimeError("a bad batch"))
    work = replica.manager.allreduce(torch.ones(3))
    assert work.wait() is False
    assert "a bad batch" in str(replica.manager.errored())
    assert replica.manager.should_commit() is False
    assert replica.step() is True
    assert replica.manager.errored() is None


def test_a_loop_that_does_not_see_the_answer_asks_whether_the_last_step_counted(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "alone")
    manager, answers = replica.manager, []
    for fails in (None, False, True, False):
        if fails is not None:
            replica.optimizer.zero_grad()
            assert manager.last_step_counted() == answers[-1], "a step that is open says nothing of the last one"
            replica.model(torch.ones(2, 8)).sum().backward()
            if fails:
                manager.report_error(RuntimeError("a bad batch"))
            replica.optimizer.step()
        answers.append(manager.last_step_counted())
    assert answers == [False, True, False, True]
    shutdown(replica)
    assert manager.last_step_counted()


def test_a_group_that_comes_in_hears_that_its_iteration_did_not_count(lighthouse: LighthouseServer) -> None:
    first = Replica(lighthouse, "first")
    assert first.step() and first.step()
    late = Replica(lighthouse, "late", seed=1)
    has_come = threading.Event()

    def train(replica: Replica) -> bool:
        """Returns whether the late group's first iteration counted."""
        if replica is late:
            replica.step()
            has_come.set()
            return replica.manager.last_step_counted()
        while not has_come.is_set():
            replica.step()
        return replica.manager.last_step_counted()

    assert together([first, late], train) == [True, False]
    assert late.manager.current_step() > 0


def test_a_failed_or_late_future_is_the_steps_error(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "alone")
    replica.optimizer.zero_grad()
    never: torch.futures.Future[int] = torch.futures.Future()
    assert replica.manager.wrap_future(never, default=5, timeout=timedelta(milliseconds=50)).wait() == 5
    assert "did not complete within 0.05 s" in str(replica.manager.errored())
    assert replica.manager.should_commit() is False


def test_averages_of_integers_are_refused(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "alone")
    replica.optimizer.zero_grad()
    with pytest.raises(ValueError, match="floating point"):
        replica.manager.allreduce(torch.ones(3, dtype=torch.int64))


def test_an_optimizer_step_that_raises_leaves_a_torn_state_and_gives_the_lock_back(
    lighthouse: LighthouseServer,
) -> None:
    replica = Replica(lighthouse, "alone")
    replica.optimizer.zero_grad()

    def fail(*_: object) -> None:
        raise ArithmeticError("no step")

    hook = replica.sgd.register_step_pre_hook(fail)
    assert not replica.manager.view().torn
    with pytest.raises(ArithmeticError):
        replica.optimizer.step()
    hook.remove()
    assert replica.manager.view().torn and replica.manager.is_behind
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(replica.manager.disallow_state_dict_read).result(timeout=60)
        other_thread.submit(replica.manager.allow_state_dict_read).result(timeout=60)


def test_a_replica_that_could_not_take_a_committed_step_heals_instead_of_going_on() -> None:
    server = lighthouse_of(2)
    with ThreadPoolExecutor(2) as pool:
        replicas = list(pool.map(lambda n: Replica(server, n, min_replica_size=1), ["a", "b"]))
    assert together(replicas, Replica.step) == [True, True]
    broken = replicas[0]
    step, raised = broken.sgd.step, []

    def fail_once(*_: object, **__: object) -> None:
        if not raised:
            raised.append(True)
            raise MemoryError("no room for the step")
        step()

    broken.sgd.step = fail_once  # type: ignore[method-assign]

    def go_on(replica: Replica) -> None:
        while replica.manager.current_step() < 5:
            try:
                replica.step()
            except MemoryError:
                assert replica is broken

    together(replicas, go_on)
    assert raised and broken.manager.statistics().num_healed >= 1
    assert broken.manager.current_step() == replicas[1].manager.current_step()
    assert broken.bits() == replicas[1].bits()


class Phase(enum.Enum):
    WARM_UP = 1
    DECAY = 2


class Progress(NamedTuple):
    phase: Phase
    seen: set[int]


def test_named_tuples_and_enums_heal_by_the_classes_of_the_state_that_is_here() -> None:
    server = lighthouse_of(2)
    progress = {"a": Progress(Phase.DECAY, {1, 2}), "b": Progress(Phase.WARM_UP, set())}
    replicas = [Replica(server, name, min_replica_size=2) for name in ("a", "b")]
    for name, replica in zip(progress, replicas, strict=True):
        replica.manager.register_state_dict_fn(
            "progress", lambda state, name=name: progress.update({name: state}), lambda name=name: progress[name]
        )
    assert together(replicas, Replica.step) == [True, True]
    assert progress["a"] == progress["b"]
    assert {(type(each), type(each.phase)) for each in progress.values()} == {(Progress, Phase)}


@pytest.mark.slow
def test_a_state_that_cannot_be_moved_is_refused_by_its_path_when_the_job_starts() -> None:
    server = lighthouse_of(2)
    replicas = [Replica(server, name, state_dict=lambda: {"odd": object()}, min_replica_size=2) for name in ("a", "b")]

    def start(replica: Replica) -> str:
        try:
            replica.step()
        except UnsupportedValueError as error:
            replica.manager.shutdown()
            return str(error)
        return "went on"

    messages_ = together(replicas, start)
    assert all("odd" in message for message in messages_), "who holds the first state says so, and who is to receive it"


@pytest.mark.slow
def test_collectives_of_an_abandoned_step_do_not_end_in_the_next() -> None:
    server = lighthouse_of(2)
    with ThreadPoolExecutor(2) as pool:
        replicas = list(pool.map(lambda n: Replica(server, n, min_replica_size=2), ["a", "b"]))
    assert together(replicas, Replica.step) == [True, True]
    quitter, other = replicas

    def go_on(replica: Replica) -> list[bool]:
        if replica is quitter:
            replica.optimizer.zero_grad()
            # The step's first collective, of the same size as the other's (Gloo ends the process where sizes differ); then
            # something raises before the step ends.
            replica.manager.allreduce(torch.ones(8, 8))
            return [replica.step() for _ in range(2)]
        return [replica.step() for _ in range(3)]

    of_quitter, of_other = together(replicas, go_on)
    assert (of_quitter, of_other) == ([True, True], [False, True, True])
    assert quitter.bits() == other.bits()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
def test_groups_heal_over_ipv6_too() -> None:
    server = ends(LighthouseServer("[::1]:0", min_replicas=2))
    with ThreadPoolExecutor(2) as pool:
        replicas = list(pool.map(lambda seed: Replica(server, "ab"[seed], seed, hostname=None), range(2)))
    assert replicas[0].bits() != replicas[1].bits()
    assert together(replicas, Replica.step) == [True, True]
    assert replicas[0].bits() == replicas[1].bits()


def test_a_closure_is_called_once_before_the_vote_and_outside_of_the_write_lock(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "alone")
    manager, seen = replica.manager, []

    def closure() -> torch.Tensor:
        replica.optimizer.zero_grad()
        loss = replica.model(torch.ones(2, 8)).square().mean()
        loss.backward()
        seen.append((manager.statistics().num_committed, manager.state_dict_lock.held_for_step()))
        return loss

    with torch.no_grad():  # torch's optimizers give a closure gradients
        assert replica.optimizer.step(closure) is True
    before = replica.bits()

    def failing() -> None:
        closure()
        manager.report_error(RuntimeError("a bad batch"))

    assert replica.optimizer.step(closure=failing) is False
    assert (seen, replica.bits()) == ([(0, False), (1, False)], before)


def test_what_a_closure_raises_leaves_the_step_open_and_the_state_whole(lighthouse: LighthouseServer) -> None:
    replica = Replica(lighthouse, "alone")
    assert replica.step()
    before = replica.bits()

    def closure() -> None:
        replica.optimizer.zero_grad()
        raise ArithmeticError("the loss is not finite")

    with pytest.raises(ArithmeticError):
        replica.optimizer.step(closure)
    assert (replica.bits(), replica.manager.current_step()) == (before, 1)
    assert replica.step()


class ByClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class QuietLBFGS(torch.optim.LBFGS):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, QuietLBFGS, ByClosure])
def test_an_optimizer_that_calls_its_closure_itself_is_refused_by_name(
    lighthouse: LighthouseServer, kind: type[torch.optim.Optimizer]
) -> None:
    replica = Replica(lighthouse, "alone")
    optimizer = Optimizer(replica.manager, kind(replica.model.parameters()))  # type: ignore[call-arg]
    for closure in (None, lambda: pytest.fail("it is called")):
        with pytest.raises(ConfigError, match=f"{kind.__name__} calls its closure itself"):
            optimizer.step(closure)


@pytest.mark.slow
def test_a_job_never_starts_over_when_its_newest_state_is_gone(lighthouse: LighthouseServer) -> None:
    first = Replica(lighthouse, "group")
    for _ in range(4):
        assert first.step()
    shutdown(first)

    fresh = Replica(lighthouse, "group", quorum_timeout=timedelta(seconds=5), quorum_retries=0)
    with pytest.raises(QuorumTimeoutError, match=r"step 4 was committed.*Manager.load_state_dict.*allow-step-loss"):
        fresh.step()
    assert fresh.manager.current_step() == 0
    shutdown(fresh)

    restored = Replica(lighthouse, "group")
    restored.manager.load_state_dict({"step": 3, "batches_committed": 3})
    assert restored.step()
    assert restored.manager.current_step() == 4


def test_the_operator_may_accept_the_loss_of_steps(lighthouse: LighthouseServer) -> None:
    from torchft_ckpt.__main__ import main

    first = Replica(lighthouse, "group")
    assert first.step()
    shutdown(first)
    fresh = Replica(lighthouse, "group")
    with ThreadPoolExecutor(1) as pool:
        committed = pool.submit(fresh.step)
        assert main(["allow-step-loss", "--lighthouse", lighthouse.address()]) == 0
        assert committed.result(timeout=60) is True
    assert fresh.manager.current_step() == 1


def test_a_load_function_that_raises_leaves_the_replica_unhealed(lighthouse: LighthouseServer) -> None:
    first = Replica(lighthouse, "first")
    assert first.step()
    calls: list[int] = []
    failures: list[tuple[str, int]] = []
    discarded: list[int] = []

    def break_once(state: dict[str, Any]) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("half loaded")
        second.load(state)

    second = Replica(lighthouse, "second", seed=1, load_state_dict=break_once)
    stop = threading.Event()

    def train(replica: Replica) -> None:
        while not stop.is_set():
            try:
                replica.step()
            except StateDictLoadError as error:
                said, _, torn = str(error).partition("; the state that was here is ")
                failures.append((f"{said}: {torn[:4]}", replica.manager.current_step()))
            if replica is second and replica.manager.statistics().num_committed >= 2:
                discarded.append(first.manager.statistics().num_discarded)
                stop.set()
                replica.manager.shutdown()

    together([first, second], train)
    assert (len(calls), discarded) == (2, [0]), "who is healthy pays nothing for it"
    assert failures == [("load_state_dict of 'default' raised KeyError: 'half loaded': torn", 0)]


# ------------------------------------------------------------------------------------------------- bad input, clear error


@pytest.mark.parametrize(
    "call", [lambda m: m.wait_quorum(), lambda m: m.allreduce(torch.ones(2))], ids=["wait", "allreduce"]
)
def test_what_needs_a_quorum_says_that_start_quorum_was_not_called(
    lighthouse: LighthouseServer, call: Callable[[Manager], object]
) -> None:
    replica = Replica(lighthouse, "group")
    with pytest.raises(RuntimeError, match="before the first start_quorum"):
        call(replica.manager)
    assert replica.step()


def test_an_unreachable_lighthouse_is_named() -> None:
    with reserved_port() as port:
        with pytest.raises(LighthouseUnreachableError, match=f"no lighthouse answers at 127.0.0.1:{port}"):
            Replica(f"127.0.0.1:{port}", "group", connect_timeout=timedelta(seconds=0.5))


def test_a_wrong_token_is_refused_before_anything_is_said() -> None:
    server = lighthouse_of(1, token="right")
    with pytest.raises(AuthenticationError, match="refused our token"):
        Replica(server, "group", token="wrong")
    replica = Replica(server, "group", token="right")
    assert replica.step()


def test_a_taken_port_is_named(lighthouse: LighthouseServer) -> None:
    taken = lighthouse.address().removeprefix("http://")
    with pytest.raises(AddressInUseError, match=f"cannot listen on {taken}"):
        LighthouseServer(taken, min_replicas=1)


def test_the_older_of_two_processes_of_one_name_is_refused(lighthouse: LighthouseServer) -> None:
    older = Replica(lighthouse, "group")
    assert older.step()
    Replica(lighthouse, "group")
    with pytest.raises(
        RefusedError, match=r"another process runs as replica group 'group' now.*own \(Manager\(replica_id"
    ):
        for _ in range(100):
            older.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replica_size": 0}, "min_replica_size=0"),
        ({"rank": 2, "world_size": 2}, "0 <= rank < world_size"),
        ({"world_size": 2, "rank": 0}, "needs a store"),
        ({"store_addr": "127.0.0.1"}, "has no port"),
        ({"load_state_dict": None}, "belong together"),
    ],
)
def test_bad_arguments_are_named(
    lighthouse: LighthouseServer, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match=message):
        Replica(lighthouse, "group", **options)


def test_no_lighthouse_address_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCHFT_CKPT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="pass lighthouse_addr or set TORCHFT_LIGHTHOUSE"):
        Replica("", "group")


def test_an_argument_wins_over_the_environment(lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "127.0.0.1:1")
    monkeypatch.setenv("TORCHFT_QUORUM_TIMEOUT_SEC", "never")
    with pytest.raises(ConfigError, match="TORCHFT_QUORUM_TIMEOUT_SEC='never'"):
        Replica(lighthouse, "group")
    replica = Replica(lighthouse, "group", quorum_timeout=SHORT)
    assert replica.step()


def test_what_torchft_reads_and_we_do_not_is_named_once(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_config, "_named", set())
    monkeypatch.setenv("TORCHFT_WATCHDOG_TIMEOUT_SEC", "30")
    monkeypatch.setenv("TORCHFT_USE_OTEL", "false")
    with caplog.at_level(logging.WARNING, rank_config.__name__):
        shutdown(Replica(lighthouse, "first"), Replica(lighthouse, "second"))
    said = [record.getMessage() for record in caplog.records if record.name == rank_config.__name__]
    assert [line.partition(":")[0] for line in said] == [
        "TORCHFT_WATCHDOG_TIMEOUT_SEC is set, but torchft_ckpt does not read it"
    ]


# ------------------------------------------------------------------------------------------------------------ the end


def test_shutdown_leaves_no_thread_and_can_be_repeated(lighthouse: LighthouseServer) -> None:
    before = set(threading.enumerate())
    replica = Replica(lighthouse, "group")
    assert replica.step()
    replica.manager.shutdown()
    replica.manager.shutdown()
    left = set(threading.enumerate()) - before
    for thread in left:  # the process group drops its sockets on a thread of its own, which ends by itself
        thread.join(timeout=60)
    assert [thread.name for thread in left if thread.is_alive()] == []


@pytest.mark.parametrize("what", ["a variable", "the process group"])
def test_a_manager_that_cannot_be_made_leaves_nothing_running(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no store here")

    if what == "a variable":
        monkeypatch.setenv("TORCHFT_CKPT_LOG_EVERY_SEC", "now and then")
    else:
        monkeypatch.setattr(Steps, "prepare_store", fails)
    before = set(threading.enumerate())
    with pytest.raises((ConfigError, RuntimeError)):
        Replica(lighthouse, "group")
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(timeout=60)
    assert [thread.name for thread in left if thread.is_alive()] == []


def test_shutdown_frees_a_thread_that_waits_for_a_quorum() -> None:
    server = lighthouse_of(2)
    replica = Replica(server, "group")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replica.step)
        replica.manager.shutdown()
        with pytest.raises(Exception, match="was shut down"):
            waiting.result(timeout=60)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_step_of_the_optimizer_copies_aside_once(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    times: list[bool] = []
    detach_all = SnapshotRegistry.detach_all
    monkeypatch.setattr(SnapshotRegistry, "detach_all", lambda registry: (times.append(True), detach_all(registry))[1])
    given: HTTPTransport[Any] | None = HTTPTransport(timeout=SHORT, hostname="127.0.0.1") if is_given else None
    replica = Replica(lighthouse, "group", checkpoint_transport=given)
    assert replica.step()
    times.clear()
    assert [replica.step(), replica.step()] == [True, True]
    assert len(times) == 2


def test_a_transport_that_was_given_is_used(lighthouse: LighthouseServer) -> None:
    transport: HTTPTransport[Any] = HTTPTransport(timeout=SHORT, num_chunks=0, hostname="127.0.0.1")
    replica = Replica(lighthouse, "group", checkpoint_transport=transport)
    assert transport.address() == transport.metadata()
    assert replica.step()
    shutdown(replica)
    transport.shutdown()
