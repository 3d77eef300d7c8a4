"""Several jobs at one lighthouse, each with a name and an end, by managers in this process."""

from __future__ import annotations

import json
import logging
from datetime import timedelta

import pytest
from support.replicas import Replica, lighthouse_of, shutdown, together
from support.stores import hosted_store

from torchft_ckpt import LighthouseServer
from torchft_ckpt.__main__ import main
from torchft_ckpt.errors import ConfigError, JobFinishedError


def test_the_same_script_started_again_is_another_job(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in range(3):
        monkeypatch.setenv("TORCHFT_CKPT_JOB", f"run-{run}")
        replica = Replica(lighthouse, "group")
        for _ in range(run + 1):
            assert replica.step()
        shutdown(replica)
    assert main(["status", "--lighthouse", lighthouse.address()]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert {name: job["newest_step"] for name, job in jobs.items()} == {"run-0": 1, "run-1": 2, "run-2": 3}


def test_what_is_no_name_of_a_job_is_refused_before_anything_starts(lighthouse: LighthouseServer) -> None:
    with pytest.raises(ConfigError, match="job='my job' cannot be used: expected 1 to 64 characters"):
        Replica(lighthouse, "group", job="my job")


def test_a_group_that_comes_late_ends_on_all_of_its_ranks(lighthouse: LighthouseServer) -> None:
    on_time = Replica(lighthouse, "on_time")
    assert on_time.step() and on_time.step()
    assert on_time.manager.finish()
    store = hosted_store(0)

    def come_late(rank: int) -> int:
        late = Replica(lighthouse, "late", rank=rank, world_size=2, store_addr="127.0.0.1", store_port=store.port)
        with pytest.raises(JobFinishedError, match="job is finished at step 2") as caught:
            late.step()
        shutdown(late)
        return caught.value.step

    assert together([0, 1], come_late) == [2, 2]  # type: ignore[list-item]


def test_a_group_that_counts_its_own_iterations_does_not_train_on_alone(lighthouse: LighthouseServer) -> None:
    """It overwrote the checkpoints of the others, with 250 steps that they did not make."""
    on_time, counting = replicas = [Replica(lighthouse, name) for name in ("on_time", "counting")]

    said: list[str] = []

    def train(replica: Replica) -> int:
        last = 4 if replica is on_time else 250
        try:
            for _ in range(last):
                replica.step()
        except JobFinishedError as over:
            said.append(str(over))
            return over.step
        replica.manager.shutdown(finished=True)
        return replica.manager.current_step()

    ends = together(replicas, train)
    assert ["counting" in reason and "holds that step too, asks for another" in reason for reason in said] == [True]
    assert ends[0] == ends[1] == counting.manager.current_step()
    assert on_time.bits() == counting.bits()


def test_the_end_is_known_when_all_have_left(lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]) -> None:
    on_time = Replica(lighthouse, "on_time", job="short")
    assert on_time.step()
    on_time.manager.shutdown(finished=True)
    late = Replica(lighthouse, "late", job="short")
    with pytest.raises(JobFinishedError):
        late.step()
    shutdown(late)
    assert main(["status", "--job", "short", "--lighthouse", lighthouse.address()]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert main(["forget-job", "--job", "short", "--lighthouse", lighthouse.address()]) == 0
    assert "starts it over" in capsys.readouterr().out
    assert main(["status", "--job", "short", "--lighthouse", lighthouse.address()]) == 2
    assert "knows no job short" in capsys.readouterr().err


def test_all_ranks_of_a_group_finish_together(lighthouse: LighthouseServer) -> None:
    store = hosted_store(0)

    def train(rank: int) -> bool:
        replica = Replica(lighthouse, "group", rank=rank, world_size=2, store_addr="127.0.0.1", store_port=store.port)
        assert replica.step()
        is_finished = replica.manager.finish()
        shutdown(replica)
        return is_finished

    assert together([0, 1], train) == [True, True]  # type: ignore[list-item]


@pytest.mark.slow
def test_a_lighthouse_that_is_gone_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    server = lighthouse_of(1)
    replica = Replica(server, "group", connect_timeout=timedelta(seconds=3))
    assert replica.step()
    server.shutdown()
    with caplog.at_level(logging.WARNING):
        replica.manager.shutdown(finished=True)
    assert "did not answer within 3 s" in caplog.text


@pytest.mark.slow
def test_the_operator_is_told_what_was_not_done(
    lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = [Replica(lighthouse, "group", job=job) for job in ("left", "right")]
    assert all(replica.step() for replica in replicas)
    address = lighthouse.address()
    assert main(["allow-step-loss", "--lighthouse", address]) == 1
    assert "several: left, right; name one by --job" in capsys.readouterr().err
    assert main(["forget-job", "--job", "left", "--lighthouse", address]) == 1
    assert "groups of it are connected (group:" in capsys.readouterr().err
    assert main(["allow-step-loss", "--job", "left", "--lighthouse", address]) == 1
    assert "job left has lost no step: all groups that are here hold step 1" in capsys.readouterr().err
