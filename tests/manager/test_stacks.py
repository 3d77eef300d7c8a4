"""`status --stacks GROUP` shows where the threads of each rank of a group are, to who has the token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.replicas import Replica, lighthouse_of
from support.waiting import wait_until

from torchft_ckpt.__main__ import main
from torchft_ckpt.coordination.asking import Lighthouse


def test_a_group_that_stands_says_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_TOKEN", "secret")
    server = lighthouse_of(2)
    address = server.address()
    one, other = Replica(server, "a"), Replica(server, "b")
    with ThreadPoolExecutor(1) as pool:
        stands = pool.submit(one.step)
        asked = Lighthouse(address, None)
        wait_until(
            lambda: any(
                member["urls"] and member["replica_id"] == one.manager.replica_id()
                for member in asked.status("default")["members"]
            ),
            "it has asked for the step",
        )

        def stacks(group: str, *arguments: str) -> str:
            assert main(["status", "--lighthouse", address, "--stacks", group, *arguments]) == 0
            return capsys.readouterr().out

        wait_until(lambda: "in await_plan\n" in stacks("a"), "it waits")
        said = stacks(one.manager.replica_id(), "--job", "default")
        assert said.startswith(f"{one.manager.replica_id()} rank 0 at http://") and "in await_plan\n" in said
        assert main(["status", "--lighthouse", address, "--stacks", "c"]) == 2
        assert "job default has no group c that has told its addresses" in capsys.readouterr().err
        other.step()
        stands.result(60)


def test_without_a_job_there_is_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--lighthouse", lighthouse_of(1).address(), "--stacks", "a"]) == 2
    assert "knows no job default" in capsys.readouterr().err
