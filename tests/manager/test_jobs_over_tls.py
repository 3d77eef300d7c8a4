"""Jobs whose lighthouse, manager services and transports speak TLS: a kill, a renewal, the commands, and who is not believed."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trustme
from safetensors.torch import load_file
from support.certificates import VARIABLES, Files, client_context
from support.groups import LighthouseProcess, running_job
from support.replicas import Replica, Run, shutdown
from support.waiting import Heard
from torch.distributed import checkpoint as dcp

from torchft_ckpt import HTTPTransport
from torchft_ckpt.__main__ import main
from torchft_ckpt.errors import ConfigError, TlsError, TorchftCkptError
from torchft_ckpt.integrations.dcp.peer_reader import PeerReader

AUTHORITY, STRANGER = trustme.CA(), trustme.CA()
SECRET = "the-secret-of-the-job"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """What each process of the job has."""
    files = Files(tmp_path / "tls", AUTHORITY)
    for name, value in {**files.variables(), "TORCHFT_CKPT_TOKEN": SECRET}.items():
        monkeypatch.setenv(name, value)
    return files


@pytest.mark.processes
@pytest.mark.slow
def test_a_group_is_killed_comes_back_after_a_renewal_and_all_end_equal(files: Files, tmp_path: Path) -> None:
    with running_job(tmp_path, lighthouse=LighthouseProcess(min_replicas=1), pause_s=0.02, min_replica_size=1) as job:
        groups = [job.start(f"group_{number}", ranks=2) for number in range(2)]
        for ranks in groups:
            ranks[0].wait_for_step(3)
        for rank in groups[1]:
            rank.kill()
        files.renew(AUTHORITY)
        newest = groups[0][0].steps()[-1]["step"]
        groups[0][0].wait_for_step(newest + 3)
        groups[1] = job.start("group_1", ranks=2)
        for rank in groups[1]:
            rank.wait_for(lambda event: event["event"] == "step" and event["committed"] and event["contributed"])
        reports = job.finish()
        logs = [rank.log_path.read_text() for ranks in groups for rank in ranks]
    assert len(reports) == 4
    for first, second in zip(reports[:2], reports[2:], strict=True):  # of the same rank in both groups
        assert (first["step"], first["digest"]) == (second["step"], second["digest"]), reports
    for log in logs:
        assert (
            log.count("lighthouse, manager service and transport speak TLS. Gloo, NCCL and torch's stores do not") >= 1
        )
        assert "serves its state at https://127.0.0.1:" in log
    assert "the certificate in " in logs[0] and "was read again" in logs[0]


@pytest.fixture
def run(files: Files) -> Iterator[Run]:
    run = Run()
    yield run
    run.last_step = max(replica.manager.current_step() for replica in run.at_work) + 10
    for loop in run._loops:
        loop.result(60)


def test_the_commands_and_readers_find_a_job_over_tls(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", run.server.address())
    assert main(["status", "--job", "default"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert all(url.startswith("https://127.0.0.1:") for member in status["members"] for url in member["urls"])
    assert main(["inspect", "--job", "default", "--wait", "30"]) == 0
    assert "https://127.0.0.1:" in capsys.readouterr().out
    path = tmp_path / "state.safetensors"
    assert main(["pull", "--job", "default", "-o", str(path), "--quiet"]) == 0
    assert load_file(path)["model.weight"].shape == (8, 8)
    state = {"model.weight": torch.zeros(8, 8)}
    dcp.load(state, storage_reader=PeerReader(job="default"), no_dist=True)
    assert state["model.weight"].abs().sum() > 0
    assert main(["drain", "nobody"]) == 1
    assert "did not do it" in capsys.readouterr().err
    monkeypatch.setenv(VARIABLES[0], "")
    monkeypatch.setenv(VARIABLES[1], "")
    assert main(["status"]) == 0, "a reader needs no certificate"
    assert main(["drain", "a"]) == 1
    assert "set TORCHFT_CKPT_TLS_CERT and TORCHFT_CKPT_TLS_KEY" in capsys.readouterr().err
    assert main(["inspect", "--job", "default"]) == 1
    assert "(403 certificate): show a certificate of this job's authority" in capsys.readouterr().err


def test_a_group_that_believes_no_source_is_named_and_costs_the_others_nothing(run: Run) -> None:
    discarded = [replica.manager.statistics().num_discarded for replica in run.at_work]
    transport: HTTPTransport[object] = HTTPTransport(
        hostname="127.0.0.1", bind="127.0.0.1", client_ssl_context=client_context(STRANGER)
    )
    doubting = Replica(run.server, "c", seed=7, checkpoint_transport=transport)
    why, backed_off = Heard("does not verify"), Heard(": it could not receive or load the state; it is tried again in")
    logging.getLogger("torchft_ckpt").addHandler(why)
    logging.getLogger("torchft_ckpt").addHandler(backed_off)

    def train() -> None:
        with contextlib.suppress(TorchftCkptError):  # it waits until it is shut down
            while True:
                doubting.step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert why.there.wait(60) and backed_off.there.wait(60)
        run.wait_for_steps(10)
        assert [replica.manager.statistics().num_discarded for replica in run.at_work] == discarded
    finally:
        for heard in (why, backed_off):
            logging.getLogger("torchft_ckpt").removeHandler(heard)
        shutdown(doubting)
        thread.join(60)
    assert not thread.is_alive()


def test_a_group_with_a_bad_certificate_does_not_begin_and_disturbs_nobody(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discarded = [replica.manager.statistics().num_discarded for replica in run.at_work]
    bad = Files(tmp_path / "bad", STRANGER)
    for name, value in bad.variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TlsError, match=r"no TLS with the lighthouse at .*; set TORCHFT_CKPT_TLS_CA on this side"):
        Replica(run.server, "c")
    elsewhere = Files(tmp_path / "elsewhere", AUTHORITY, "192.0.2.7")
    for name, value in elsewhere.variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"is not for 127\.0\.0\.1, which peers are told as this process's address"):
        Replica(run.server, "c")
    for name in VARIABLES:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="no TLS is set up here"):
        Replica(run.server, "c")
    with pytest.raises(TlsError, match="it speaks TLS, and none is set up here"):
        Replica(run.server.address().removeprefix("https://"), "c")
    run.wait_for_steps(5)
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == discarded
