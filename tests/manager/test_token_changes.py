"""The token of a job is changed while it trains: no process is started again for it, and one that does start comes in."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.groups import LighthouseProcess, running_job
from support.waiting import wait_until

from torchft_ckpt.__main__ import main


@pytest.mark.processes
@pytest.mark.slow
def test_a_token_is_changed_without_stopping_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of three machines has a file of its own, which is changed at another moment than the others."""
    files = {name: tmp_path / f"token-{name}" for name in ("lighthouse", "a", "b")}

    def write(name: str, *secrets: str) -> None:
        new = tmp_path / "token.new"
        new.touch(mode=0o600)
        new.write_text("".join(f"{secret}\n" for secret in secrets))
        new.replace(files[name])

    for name in files:
        write(name, "old")
    monkeypatch.setenv("TORCHFT_CKPT_TOKEN_FILE", str(files["lighthouse"]))
    lighthouse = LighthouseProcess(min_replicas=1)
    with running_job(tmp_path, lighthouse=lighthouse, min_replica_size=1, pause_s=0.02) as job:
        urls: dict[str, str] = {}

        def start(name: str) -> None:
            (rank,) = job.start(name, environment={"TORCHFT_CKPT_TOKEN_FILE": str(files[name])})
            urls[name] = rank.wait_for_event("ready")["transport"]
            rank.wait_for(lambda event: event["event"] == "step" and event["participants"] == 2)

        def accepts(name: str, secret: str) -> bool:
            asked = ["status", "--lighthouse", job.lighthouse] if name == "lighthouse" else ["inspect", urls[name]]
            return main([*asked, "--token", secret]) == 0

        def all_accept(secret: str, is_so: bool = True) -> bool:
            return all(accepts(name, secret) is is_so for name in files)

        for name in ("a", "b"):
            (rank,) = job.start(name, environment={"TORCHFT_CKPT_TOKEN_FILE": str(files[name])})
            urls[name] = rank.wait_for_event("ready")["transport"]
        for rank in job.ranks:
            rank.wait_for(lambda event: event["event"] == "step" and event["participants"] == 2)
        assert all_accept("old") and all_accept("new", False)
        for name in files:
            write(name, "old", "new")
        wait_until(lambda: all_accept("new"), "the new token is accepted")
        write("b", "new", "old")
        job.ranks[-1].kill()
        start("b")  # it shows the new one, and the others the old one
        for name in files:
            write(name, "new", "old")
        for name in files:
            write(name, "new")
        wait_until(lambda: all_accept("old", False), "the old token is refused")
        assert all_accept("new")
        lighthouse.kill()
        lighthouse.restart()
        before = job.ranks[0].steps()[-1]["step"]
        job.ranks[0].wait_for_step(before + 20)  # it was started with the old one, and shows the new one now
        job.ranks[0].kill()
        start("a")
        assert "refused our token" in capsys.readouterr().err
        job.finish()
