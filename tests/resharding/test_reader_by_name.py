"""A job is read by its name: its lighthouse says where its groups are now, over restarts and new ports."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.groups import Job, LighthouseProcess, Rank, all_reach, running_job
from support.ports import reserved_port
from support.trainer_process import digest_of, state_functions
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from torchft_ckpt import HTTPTransport, LighthouseServer, PeerReader
from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointing.resharding import peers
from torchft_ckpt.coordination import asking
from torchft_ckpt.coordination.asking import Lighthouse
from torchft_ckpt.errors import ConfigError, LighthouseUnreachableError, SourceLostError

LIMIT = timedelta(seconds=60)


def read(reader: PeerReader) -> dict[str, Any]:
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def digest_of_loaded(state: dict[str, Any]) -> str:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    load_state_dict, state_dict = state_functions(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    load_state_dict(state)
    return digest_of(state_dict())


def is_that_of_the_job(state: dict[str, Any], step: int, job: Job) -> bool:
    """Whether it is, bit for bit, the state of a step of which the job has told a digest; waits until it has."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        told = {event["digest"] for rank in job.ranks for event in rank.steps() if event["step"] == step}
        if told:
            return told == {digest_of_loaded(state)}
        time.sleep(0.01)
    return False


def newest(job: Job) -> int:
    return max((event["step"] for rank in job.ranks for event in rank.steps()), default=0)


@pytest.mark.processes
@pytest.mark.slow
def test_a_reader_follows_its_job_through_restarts_of_its_groups(tmp_path: Path) -> None:
    lighthouse = LighthouseProcess(min_replicas=1)
    with running_job(tmp_path, lighthouse=lighthouse, min_replica_size=1, digest_each_step=True, pause_s=0.02) as job:
        groups: dict[str, Rank] = {name: job.start(name)[0] for name in "ab"}
        all_reach(groups.values(), 3)
        reader, ports = PeerReader(lighthouse=job.lighthouse, timeout=LIMIT), set[str]()
        for name in "aba":
            before = newest(job)
            state = read(reader)
            assert reader.step is not None and reader.step >= before
            assert is_that_of_the_job(state, reader.step, job)
            ports.add(reader._peers.urls)
            groups[name].kill()
            state = read(reader)  # at once: the lighthouse may not know yet
            assert is_that_of_the_job(state, reader.step, job)
            groups[name] = job.start(name)[0]
            groups[name].wait_for_step(newest(job))
        assert len(ports) == 3
        lighthouse.kill()
        lighthouse.restart()
        before = newest(job)
        state = read(reader)  # at once: the lighthouse knows no job yet
        assert reader.step >= before and is_that_of_the_job(state, reader.step, job)
        file = tmp_path / "state.safetensors"
        assert main(["pull", "--lighthouse", job.lighthouse, "--job", "default", "-o", str(file), "--quiet"]) == 0
        assert load_file(file)["model.0.weight"].shape == (256, 64)
        job.finish()


@pytest.mark.processes
def test_status_says_where_the_states_are_and_inspect_finds_one(tmp_path: Path, capsys: Any) -> None:
    lighthouse = LighthouseProcess(min_replicas=1)
    with running_job(tmp_path, lighthouse=lighthouse, min_replica_size=1) as job:
        (rank,) = job.start("a")
        url = rank.wait_for_event("ready")["transport"]
        rank.wait_for_step(1)
        assert main(["status", "--lighthouse", job.lighthouse, "--job", "default"]) == 0
        assert [member["urls"] for member in json.loads(capsys.readouterr().out)["members"]] == [[url]]
        assert main(["inspect", "--lighthouse", job.lighthouse, "--wait", "20"]) == 0
        assert capsys.readouterr().out.startswith(f"{url} serves ")
        job.finish()


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    """As readers see one that has no job."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    try:
        yield Lighthouse(server.address(), None)
    finally:
        server.shutdown()


def status_of(newest_step: int, participants: list[str], **steps: int) -> dict[str, Any]:
    members = [{"replica_id": name, "step": step, "urls": [f"http://{name}:1"]} for name, step in steps.items()]
    return {"newest_step": newest_step, "participants": participants, "members": members}


def test_a_name_that_the_lighthouse_does_not_know_is_waited_for_some_seconds(
    lighthouse: Lighthouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have started again, and the groups may come back to it. A name that it never knew is a wrong one."""
    reader = PeerReader(lighthouse=lighthouse.address, job="mine", timeout=timedelta(seconds=4))
    began = time.monotonic()
    with pytest.raises(SourceLostError, match="knows no job mine"):
        reader.read_metadata()
    assert time.monotonic() - began > 0.9
    now = SimpleNamespace(monotonic=lambda: now.s, s=100.0)
    monkeypatch.setattr(asking, "time", now)
    for at, error in (
        (100.0, SourceLostError),
        (109.0, SourceLostError),
        (110.0, ConfigError),
        (111.0, SourceLostError),
    ):
        now.s = at
        with pytest.raises(error, match="knows no job mine"):
            lighthouse.urls("mine")
    with monkeypatch.context() as known:
        known.setattr(lighthouse, "status", lambda job: status_of(3, ["a"], a=3))
        assert lighthouse.urls("mine") == [["http://a:1"]]
    for at in (120.0, 10_000.0):
        now.s = at
        with pytest.raises(SourceLostError, match="knows no job mine"):
            lighthouse.urls("mine")


def test_who_holds_the_newest_step_is_read_and_before_all_who_trains(
    lighthouse: Lighthouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, chosen in (
        (status_of(7, ["a", "b"], a=7, b=7, c=7), "ab"),
        (status_of(7, ["a", "b"], a=7, b=3), "a"),
        (status_of(7, ["b"], a=7, b=3), "a"),
        (status_of(7, ["b"], b=3), ""),
    ):
        monkeypatch.setattr(lighthouse, "status", lambda job, status=status: status)
        if chosen:
            assert lighthouse.urls("mine") == [[f"http://{name}:1"] for name in chosen]
        else:
            with pytest.raises(SourceLostError, match="with step 7"):
                lighthouse.urls("mine")


def test_a_group_that_hangs_is_not_waited_for_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again where the state is: it may long be somewhere else."""
    monkeypatch.setattr(peers, "_PIECE_S", 0.2)
    transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    silent: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    try:
        transport.send_checkpoint([1], 7, {"w": torch.ones(3)}, LIMIT)
        for ask in (lambda job: job.pull(None, timeout=LIMIT), lambda job: job.hold(None, time.monotonic() + 60)):
            places = itertools.chain([silent], itertools.repeat(transport))
            job = peers.JobPeers(lambda places=places: [[next(places).metadata()]])
            assert ask(job).step == 7
            job.give_back()
    finally:
        transport.shutdown()
        silent.shutdown()


def test_a_job_has_one_name_alone(capsys: Any) -> None:
    with pytest.raises(ConfigError, match="two ways to say the same"):
        PeerReader(["http://127.0.0.1:1"], job="mine")
    assert main(["pull", "http://127.0.0.1:1", "--job", "mine", "-o", "x"]) == 2
    assert "not both" in capsys.readouterr().err


def test_a_lighthouse_that_is_away_is_asked_again_until_the_deadline() -> None:
    with reserved_port() as port:
        reader = PeerReader(lighthouse=f"127.0.0.1:{port}", timeout=timedelta(seconds=1.5))
        began = time.monotonic()
        with pytest.raises(LighthouseUnreachableError):
            reader.read_metadata()
        assert time.monotonic() - began > 0.9
