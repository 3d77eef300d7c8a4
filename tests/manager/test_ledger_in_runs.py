"""Waits of known length in each place of real runs are found in their accounts.

The clock of a ledger here stands still, but for what a test lets pass: what was put in is found to the millisecond, however busy
the machine is. The last test has processes, and the real one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.groups import Job
from support.replicas import Replica, Run
from support.waiting import wait_until

from torchft_ckpt import Checkpointer, LighthouseServer, LocalSGD, ProcessGroupGloo, StepLoader
from torchft_ckpt.__main__ import main
from torchft_ckpt.cli.goodput import read_accounts
from torchft_ckpt.config import Replay
from torchft_ckpt.coordination.asking import Lighthouse
from torchft_ckpt.core.training.ledger import Account, Waits
from torchft_ckpt.errors import ConfigError, CoordinationError
from torchft_ckpt.events import StepCommitted
from torchft_ckpt.manager import event_file
from torchft_ckpt.manager.event_file import EventFile
from torchft_ckpt.manager.timekeeping import Timekeeper


@pytest.fixture(autouse=True)
def files_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads a file of events once it has ended reads all of it, whatever its thread has to wait for."""
    monkeypatch.setattr(event_file, "_END_S", 60.0)


class Timed(Replica):
    """Its clock goes on by `passes` alone."""

    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        self.in_state = self.in_load = lambda: None
        super().__init__(*arguments, seed=seed, **options)
        self.keeper = self.manager.hooks.timekeeper
        self.now = time.monotonic()
        self.keeper._clock = lambda: self.now
        self.told = self.keeper.seconds()

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def state(self) -> dict[str, Any]:
        called, self.in_state = self.in_state, lambda: None
        called()
        return super().state()

    def load(self, state: dict[str, Any]) -> None:
        self.in_load()
        super().load(state)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 8)).square().mean()
        meanwhile()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad)
        self.optimizer.step()
        return self.manager.statistics().num_committed > before

    def waits_for(self, what: Waits) -> bool:
        waits = self.keeper._ledger._waits
        return bool(waits) and what in (waits[-1][1], self.keeper._ledger._quorum if waits else None)

    def spent(self) -> dict[str, float]:
        """By account, since it was asked last."""
        before, self.told = self.told, self.keeper.seconds()
        self.keeper._ledger.validate()
        spent = {account.value: round(at - before[account], 3) for account, at in self.told.items()}
        return {name: seconds for name, seconds in spent.items() if seconds}


@contextmanager
def lighthouse(min_replicas: int = 1, port: int = 0) -> Iterator[LighthouseServer]:
    server = LighthouseServer(f"127.0.0.1:{port}", min_replicas=min_replicas, join_timeout_ms=60_000)
    try:
        yield server
    finally:
        server.shutdown()


def while_it_waits(
    group: Timed, what: Waits, act: Callable[[], object], seconds: float, ends: Callable[[], object]
) -> None:
    """Let seconds pass for a group that waits for something in `act`, and end that."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(act)
        wait_until(lambda: group.waits_for(what), f"it waits for {what}")
        group.passes(seconds)
        ends()
        done.result(60)


def test_a_group_starts_computes_and_does_other_things_between_its_steps() -> None:
    with lighthouse() as server:
        one = Timed(server, "a")
        one.passes(5.0)
        one.step(lambda: one.passes(7.0))
        assert one.spent() == {"starting": 5.0, "productive": 7.0}
        one.passes(3.0)
        one.sgd.register_step_pre_hook(lambda *_: one.passes(2.0))
        one.step()
        assert one.spent() == {"between": 3.0, "productive": 2.0}

        def fails() -> None:
            one.passes(4.0)
            one.manager.report_error(RuntimeError("the loader is broken"))

        one.step(fails)
        one.optimizer.zero_grad()
        one.passes(1.5)
        one.manager.report_error(RuntimeError("so that it is not kept"))
        one.step()
        assert one.spent() == {"discarded": 5.5, "productive": 2.0}
        one.manager.shutdown()


def test_a_step_of_too_few_groups_is_below_the_minimum() -> None:
    with lighthouse() as server:
        one = Timed(server, "a", min_replica_size=2)
        one.step(lambda: one.passes(4.0))
        assert one.spent() == {"below minimum": 4.0}
        one.manager.shutdown()


def test_a_quorum_is_waited_for_that_another_group_has_not_come_to() -> None:
    with lighthouse(min_replicas=2) as server, ThreadPoolExecutor(2) as pool:
        one, other = Timed(server, "a"), Timed(server, "b")
        [*pool.map(Timed.step, (one, other))]
        one.spent()

        def comes() -> None:
            reason = f"1 of at least 2 replica groups are here ({one.manager.replica_id()}); waiting for"
            wait_until(lambda: reason in str(one.manager._client._pending), "it is told for whom it waits")
            one.passes(9.0)
            other.step()

        while_it_waits(one, Waits.QUORUM, one.step, 1.0, comes)
        assert one.spent() == {"quorum": 10.0}
        assert other.spent() == {}
        one.manager.shutdown()
        other.manager.shutdown()


def test_a_vote_says_how_long_a_group_has_computed_and_the_status_for_whom_the_others_waited() -> None:
    with lighthouse(min_replicas=2) as server, ThreadPoolExecutor(2) as pool:
        one, other = Timed(server, "a"), Timed(server, "b")
        [*pool.map(Timed.step, (one, other))]
        [*pool.map(lambda group: group.step(lambda: group.passes(5000.0 if group is other else 2.0)), (one, other))]
        assert [group.manager.hooks._steps._vote.computed_s for group in (one, other)] == [2.0, 5000.0]
        status = Lighthouse(server.address(), None).status("default")
        late = other.manager.replica_id()
        assert (status["waited_for"]["replica_id"], status["waited_for"]["phase"]) == (late, "forward and backward")
        assert {member["replica_id"] for member in status["members"] if member["waited_for_s"]} >= {late}
        one.manager.shutdown()
        other.manager.shutdown()


def test_too_few_groups_for_a_quorum_and_a_lighthouse_that_is_away_have_their_own() -> None:
    with ThreadPoolExecutor(1) as pool:
        with lighthouse(min_replicas=2) as server:
            one, others = Timed(server, "a"), list[Timed]()
            port = int(server.address().rpartition(":")[2])

            def come() -> None:
                others.append(Timed(server, "b"))
                others[0].step()

            while_it_waits(one, Waits.MINIMUM, one.step, 6.0, come)
            assert one.spent() == {"below minimum": 6.0}
        (other,), back = others, list[LighthouseServer]()

        def comes_back() -> None:
            back.append(LighthouseServer(f"127.0.0.1:{port}", min_replicas=2, join_timeout_ms=60_000))
            pool.submit(other.step).result(60)

        while_it_waits(one, Waits.LIGHTHOUSE, one.step, 8.0, comes_back)
        assert one.spent()["lighthouse away"] == 8.0
        one.manager.shutdown()
        other.manager.shutdown()
        back[0].shutdown()


@pytest.mark.usefixtures("patient")
def test_a_newcomer_is_outside_and_loads_and_the_others_are_held() -> None:
    run = Run(Timed)
    held = run.at_work[0]
    assert isinstance(held, Timed)
    joined = Timed(run.server, "c", seed=7)

    def loads() -> None:
        joined.passes(11.0)
        wait_until(lambda: held.waits_for(Waits.NEWCOMER), "the others are held")
        held.passes(5.0)

    joined.in_load = loads
    assert not joined.step(lambda: joined.passes(3.0))
    run.end(joined)
    assert joined.spent() == {"outside": 3.0, "loading": 11.0}
    assert held.spent() == {"held": 5.0}


def test_a_process_group_that_connects_is_waited_for() -> None:
    class Slow(ProcessGroupGloo):
        meanwhile: Callable[[], None] = lambda self: None

        def configure(self, *arguments: Any) -> None:
            self.meanwhile()
            super().configure(*arguments)

    group = Slow(timeout=timedelta(seconds=20))
    with lighthouse() as server:
        one = Timed(server, "a", pg=group)

        def connects() -> None:
            wait_until(lambda: one.waits_for(Waits.CONNECTION), "it waits for the connection")
            one.passes(4.0)

        group.meanwhile = connects  # type: ignore[method-assign]
        one.step()
        assert one.spent() == {"connecting": 4.0}
        assert one.keeper._ledger.beside[Waits.CONNECTION] == 0.0
        one.manager.shutdown()


def test_a_state_is_captured_to_compare_it_and_to_save_it_and_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    with lighthouse() as server:
        one = Timed(server, "a", check_equal_every=1)
        one.step()
        one.in_state = lambda: one.passes(2.0)
        one.step()
        assert one.spent() == {"comparing": 2.0}
        checkpointer = Checkpointer(tmp_path, manager=one.manager)
        one.in_state = lambda: one.passes(3.0)
        saved = checkpointer.save()
        assert one.spent() == {"saving": 3.0}
        saved.result(60)
        checkpointer.shutdown()
        one.manager.shutdown()
    with lighthouse() as server:
        again = Timed(server, "a")
        checkpointer = Checkpointer(tmp_path, manager=again.manager)
        again.in_load = lambda: again.passes(6.0)
        checkpointer.restore()
        assert again.spent() == {"loading": 6.0}
        checkpointer.shutdown()
        again.manager.shutdown()


def test_the_copy_that_an_optimizers_step_waits_for_is_the_saves() -> None:
    with lighthouse() as server:
        one = Timed(server, "a")
        one.step()
        one.manager.state_dict_lock.add_before_write(lambda: one.passes(2.0))
        one.step()
        assert one.spent() == {"held": 2.0}, "nobody saves, so it is served to somebody"
        one.keeper._num_saves += 1
        one.step()
        assert one.spent() == {"saving": 2.0}
        one.manager.shutdown()


def test_the_steps_that_a_spare_takes_along_are_not_productive() -> None:
    now = 0.0
    keeper = Timekeeper(is_spare=True, clock=lambda: now)
    keeper.begins_step()
    now = 3.0
    keeper.ends_step(Account.SPARE, is_to_take=True)
    now = 5.0
    keeper.took_step()
    assert {account for account, seconds in keeper.seconds().items() if seconds} == {Account.SPARE, Account.BETWEEN}


def test_a_spare_stands_by() -> None:
    run = Run(Timed)
    spare = Timed(run.server, "c", seed=7, spare=True)

    def stands_by() -> None:
        with pytest.raises(CoordinationError):
            while True:
                spare.step()

    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(stands_by)
        wait_until(lambda: spare.waits_for(Waits.CALL), "the spare is ready")
        spare.passes(20.0)
        spare.manager.shutdown()
        loop.result(60)
    assert spare.spent() == {"spare": 20.0}
    run.last_step = max(replica.manager.current_step() for replica in run.at_work) + 10
    for of_group in run._loops:
        of_group.result(60)


def test_a_round_of_an_outer_loop_is_all_of_its_inner_steps() -> None:
    with lighthouse() as server:
        one = Timed(server, "a")
        with LocalSGD(one.manager, one.model, one.sgd, sync_every=2):
            for _ in range(4):
                one.passes(1.0)
                one.sgd.zero_grad()
                one.model(torch.ones(2, 8)).square().mean().backward()
                one.sgd.step()
        assert one.manager.current_step() == 2
        assert one.spent() == {"starting": 1.0, "productive": 3.0}
        one.manager.shutdown()


def test_microbatches_that_a_discarded_attempt_keeps_are_productive_with_the_next_one() -> None:
    with lighthouse() as server:
        one = Timed(server, "a")
        samples = [torch.ones(8) * number for number in range(8)]
        is_first = True
        for step in StepLoader(one.manager, samples, global_batch_size=4, microbatch_size=1, num_steps=2):
            one.optimizer.zero_grad()
            for batch in step:
                one.passes(1.0)
                one.model(batch).square().mean().backward()
            one.passes(0.5)
            if is_first:
                one.manager.report_error(RuntimeError("the first attempt fails"))
            is_first = False
            one.optimizer.step()
        assert one.spent() == {"productive": 9.0, "discarded": 0.5}
        one.manager.shutdown()


def test_an_event_of_a_step_says_what_was_spent_until_then() -> None:
    told: list[Any] = []
    with lighthouse() as server:
        one = Timed(server, "a", on_event=told.append)
        for _ in range(2):
            one.passes(1.0)
            one.step(lambda: one.passes(2.0))
        one.manager.shutdown()
    spent = [event.spent for event in told if isinstance(event, StepCommitted)]
    assert spent[1] == pytest.approx({"between": 1.0, "productive": 2.0})


def test_steps_are_lost_that_the_next_life_makes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_EVENTS", str(tmp_path))
    with lighthouse() as server:
        one = Timed(server, "a")
        for _ in range(2):
            one.step(lambda: one.passes(1.0))
        state, step = one.state(), one.manager.state_dict()
        for _ in range(3):
            one.step(lambda: one.passes(1.0))
        one.manager.shutdown()
        again = Timed(server, "a")
        again.load(state)
        again.manager.load_state_dict(step)
        again.step(lambda: again.passes(5.0))
        again.manager.shutdown(finished=True)
    (job,) = read_accounts([tmp_path])
    assert job.groups["a"][Account.PRODUCTIVE] == pytest.approx(7.0)
    assert job.groups["a"][Account.LOST] == pytest.approx(3.0)
    ends = [json.loads(path.read_text().splitlines()[-1]) for path in tmp_path.iterdir()]
    assert sorted((end["event"], end["how"]) for end in ends) == [("Ended", "finished"), ("Ended", "shut down")]


# ----------------------------------------------------------------------------------------------------- files of events


def test_a_place_with_names_in_it_is_a_path_and_one_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    names = {"replica_id": "team/a:1", "rank": 3, "job": "default"}
    there = EventFile(str(tmp_path / "{rank}" / "of-{replica_id}.log"), **names)
    assert there.path == tmp_path / "3" / "of-team_a:1.log"
    beside = EventFile(str(tmp_path), **names)
    assert beside.path == tmp_path / "team_a:1-3.jsonl"
    for file in (there, beside):  # else it writes its first line while the next test says how that goes
        file.end("shut down", {})
    with pytest.raises(
        ConfigError, match=r"TORCHFT_CKPT_EVENTS=.* cannot be used: .*give a directory that this process"
    ):
        EventFile("/dev/null", **names)


def writes_by(patch: pytest.MonkeyPatch, write: Callable[[int, bytes], int]) -> None:
    """Have files of events written so, and nothing else of this process."""
    patch.setattr(event_file, "os", SimpleNamespace(path=os.path, sep=os.sep, write=write))


def test_a_full_disk_leaves_lines_out_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = [None, 10, None, None]

    def write(where: int, data: bytes) -> int:
        left = room.pop(0) if room else len(data)
        if left is None and len(room) < 3:
            raise OSError(28, "No space left on device")
        return os.write(where, data[:left])

    writes_by(monkeypatch, write)
    file = EventFile(str(tmp_path), replica_id="a:1", rank=0, job="default")
    for number in range(4):
        file.add("StepCommitted", {"step": number, "spent": {"productive": 1.0}})
    file.end("finished", {})
    lines = file.path.read_text().splitlines()
    assert [json.loads(lines[at])["event"] for at in (0, -2, -1)] == ["Began", "StepCommitted", "Ended"]
    assert caplog.text.count("No space left on device") == 1


def test_a_line_that_lacks_but_its_end_is_ended_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = [40, 1, 1]  # the first one is torn, and then each lacks its end
    writes_by(monkeypatch, lambda where, data: os.write(where, data[: -cut.pop(0)] if cut else data))
    file = EventFile(str(tmp_path), replica_id="a:1", rank=0, job="default")
    file.add("Healed", {})
    file.end("finished", {})
    lines = file.path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[1:]] == ["Healed", "Ended"]


def test_what_is_no_json_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = EventFile(str(tmp_path), replica_id="a:1", rank=0, job="default")
    file.add("CheckpointSaved", {"name": "not-utf-8-\udcff"})
    file.end("finished", {})
    file.end("finished", {})
    file.add("Healed", {})
    assert [json.loads(line)["event"] for line in file.path.read_text().splitlines()] == ["Began", "Ended"]
    assert caplog.text.count("events are left out of") == 1


def test_a_disk_that_hangs_holds_up_no_step_and_costs_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()

    def write(where: int, data: bytes) -> int:
        assert hangs.wait(60)
        return os.write(where, data)

    writes_by(monkeypatch, write)
    monkeypatch.setattr(event_file, "_MOST_WAITING", 3)
    monkeypatch.setenv("TORCHFT_CKPT_EVENTS", str(tmp_path))
    with lighthouse() as server:
        one = Timed(server, "a")
        try:
            for _ in range(6):
                assert one.step()
        finally:
            hangs.set()
        one.manager.shutdown()
    (path,) = tmp_path.iterdir()
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert events[0] == "Began" and 1 <= events.count("StepCommitted") <= 4
    assert caplog.text.count("3 lines wait for it") == 1


def test_a_replay_writes_no_events_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_EVENTS", str(tmp_path))
    monkeypatch.setattr(event_file.config, "replay", lambda: Replay(str(tmp_path), 0, 1, str(tmp_path / "told")))
    with lighthouse() as server:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", server.address())  # a replay has one of its own
        Timed(server, "a").manager.shutdown()
    assert not [*tmp_path.glob("*.jsonl")]


def test_the_command_prints_accounts_beside_googles_and_leaves_out_what_is_no_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    said = {"job": "j", "replica_id": "a:1", "rank": 0, "time": 0.0}
    lines: list[dict[str, Any]] = [
        {**said, "event": "Began"},
        {**said, "event": "StepCommitted", "time": 10.0, "quorum_id": 1, "spent": {"productive": 8.0, "quorum": 2.0}},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"torn')
    assert main(["goodput", str(tmp_path)]) == 0
    said_out, said_err = capsys.readouterr()
    assert "job j: goodput 80.0 % of 10.0 s, which 1 replica groups had" in said_out
    assert [line.split() for line in said_out.splitlines()][2:4] == [
        ["productive", "8.0", "80.0", "%", "(goodput)"],
        ["quorum", "2.0", "20.0", "%", "OTHER"],
    ]
    assert "1 lines are no events" in said_err
    assert main(["goodput", "--json", str(path)]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert job["groups"]["a"]["quorum"] == job["ml_goodput"]["OTHER"] == 2.0
    for nothing in (tmp_path / "nowhere.jsonl", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert main(["goodput", str(nothing)]) == 2


# ---------------------------------------------------------------------------------------------------------- processes


def test_a_group_that_is_killed_is_down_until_its_next_life_speaks_and_all_time_is_accounted_for(
    tmp_path: Path,
) -> None:
    events = tmp_path / "events"
    with lighthouse(min_replicas=1) as server:
        job = Job(tmp_path, server.address())
        try:
            variables = {"TORCHFT_CKPT_EVENTS": str(events)}
            (a,), (b,) = (job.start(name, environment=variables) for name in ("a", "b"))
            for rank in (a, b):
                rank.wait_for_step(3)
            b.kill()
            killed_at = time.time()
            threading.Event().wait(1.0)
            started_at = time.time()
            (again,) = job.start("b", environment=variables)
            again.wait_for_step(1)
            joined_at = time.time()
            job.finish()
        finally:
            job.close()
    (found,) = read_accounts([events])
    down = found.groups["b"][Account.DOWN]
    assert 0.9 * (started_at - killed_at) <= down <= 1.1 * (joined_at - killed_at)
    assert found.groups["a"][Account.DOWN] == 0.0
    assert found.total[Account.UNACCOUNTED] <= 0.005 * found.wall_s
    assert 0.0 < found.goodput < 1.0
