"""Lighthouses as processes, of which one leads by a lease in a real etcd: each may be killed or stopped, and so may etcd."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.ports import reserved_port
from support.processes import start
from support.services import make_group_service
from support.waiting import wait_until

from torchft_ckpt.coordination.asking import Lighthouse
from torchft_ckpt.coordination.etcd_store import EtcdStore
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    CommitDecided,
    CommitVote,
    Hello,
    Outcome,
    QuorumBroken,
    QuorumFormed,
    QuorumRequest,
    StateVersion,
)
from torchft_ckpt.errors import ConfigError, LighthouseUnreachableError

ETCD = shutil.which("etcd")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(ETCD is None, reason="there is no etcd here (Debian's etcd-server)"),
]
STEP_S = 0.02
_ports = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def _give_ports_back() -> Iterator[None]:
    with _ports:
        yield


def free_port() -> int:
    return _ports.enter_context(reserved_port())


class Etcd:
    """One etcd, of its own port and folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url, self._peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.start()

    def start(self) -> None:
        places = [
            *("--data-dir", str(self.folder), "--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self._peers, "--initial-advertise-peer-urls", self._peers),
            *("--initial-cluster", f"default={self._peers}"),
        ]
        self.process = start([ETCD or "", *places], "etcd")
        wait_until(lambda: self.answers("maintenance/status"), "etcd answers")

    def answers(self, path: str, **body: str) -> bool:
        try:
            self.ask(path, **body)
        except OSError:
            return False
        return True

    def ask(self, path: str, **body: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=5) as answer:
            said: dict[str, Any] = json.load(answer)
            return said

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Several:
    """Lighthouses `python -m torchft_ckpt lighthouse --etcd URL`."""

    def __init__(self, etcd: Etcd, number: int) -> None:
        self.by_address: dict[str, subprocess.Popen[Any]] = {}
        for _ in range(number):
            address = f"127.0.0.1:{free_port()}"
            command = [sys.executable, "-m", "torchft_ckpt", "lighthouse", "--min-replicas", "2", "--bind", address]
            self.by_address[address] = start([*command, "--hostname", "127.0.0.1", "--etcd", etcd.url], address)
        self.addresses = ",".join(self.by_address)
        wait_until(lambda: self.leader(), "one leads")

    def leader(self) -> str:
        """Return the address of the one that leads; empty: none does."""
        asked = Lighthouse(self.addresses, None)
        try:
            asked.status(None)
        except LighthouseUnreachableError:
            return ""
        return asked.address

    def end(self) -> None:
        for process in self.by_address.values():
            process.kill()
            process.wait()


class Member:
    """A group of one rank that trains: it asks, approves, and asks again."""

    def __init__(self, name: str, lighthouses: str) -> None:
        self.name = name
        self.version = StateVersion()
        self.commits: list[tuple[float, StateVersion]] = []
        self._formed: QuorumFormed | None = None
        self._outcome: Outcome | None = None
        self._number = 0
        self.service = make_group_service(
            lighthouses,
            world_size=1,
            hello=self._hello,
            replica_id=f"{name}:1",
            on_message=self._take,
            heartbeat_interval=timedelta(seconds=0.2),
        )
        self._ask()

    def _hello(self) -> Hello:
        if self._formed is None:
            return Hello(protocol=PROTOCOL_VERSION, replica_id=f"{self.name}:1")
        return Hello(
            protocol=PROTOCOL_VERSION,
            replica_id=f"{self.name}:1",
            version=self.version,
            newest_step=self.version.step,
            last_quorum_id=self._formed.quorum_id,
            last_quorum_size=self._formed.replica_world_size,
            last_step=self._formed.version.step,
            last_epoch=self._formed.epoch,
            last_outcome=self._outcome,
        )

    def _ask(self, *, needs_new_quorum: bool = False) -> None:
        self._number += 1
        self.service.send(
            QuorumRequest(
                request_id=self._number,
                version=self.version,
                needs_new_quorum=needs_new_quorum,
                init_sync=False,
                can_serve=True,
                checkpoint_addresses=[],
            )
        )

    def _take(self, message: object) -> None:
        if isinstance(message, QuorumFormed):
            self._formed, self._outcome, self.version = message, None, message.version
            vote = CommitVote(
                quorum_id=message.quorum_id,
                epoch=message.epoch,
                step=message.version.step,
                approve=True,
                num_voters=message.num_voters,
            )
            self.service.schedule(STEP_S, lambda: self.service.send(vote))
        elif isinstance(message, CommitDecided) and self._formed is not None:
            self._outcome = message.outcome
            if message.outcome is Outcome.COMMIT:
                step = message.step + 1
                self.version = StateVersion(step=step, quorum_id=message.quorum_id, epoch=message.epoch)
                self.commits.append((time.monotonic(), self.version))
            self._ask(needs_new_quorum=message.broken)
        elif isinstance(message, QuorumBroken) and self._outcome is not None:
            self._ask(needs_new_quorum=True)

    def trains_on(self, num_steps: int = 5) -> None:
        until = len(self.commits) + num_steps
        wait_until(lambda: len(self.commits) >= until, f"{self.name} makes {num_steps} steps more")

    @property
    def longest_gap_s(self) -> float:
        times = [at for at, _ in self.commits]
        return max(after - before for before, after in pairwise(times))


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path / "etcd")
    yield etcd
    etcd.stop()


@pytest.fixture
def several(etcd: Etcd) -> Iterator[Several]:
    several = Several(etcd, 2)
    yield several
    several.end()


@pytest.fixture
def members(several: Several) -> Iterator[list[Member]]:
    dead = f"127.0.0.1:{free_port()}"
    members = [Member(name, f"{dead},{several.addresses}") for name in "ab"]
    for member in members:
        member.trains_on()
    yield members
    for member in members:
        member.service.shutdown("the test is over")


def why_it_stands_by(address: str) -> str:
    with pytest.raises(LighthouseUnreachableError) as refusal:
        Lighthouse(address, None).status(None)
    return str(refusal.value)


def check_one_history(members: list[Member]) -> None:
    """All made all steps, each once, and equal."""
    steps = [[version for _, version in member.commits] for member in members]
    num = min(map(len, steps))
    assert steps[0][:num] == steps[1][:num]
    assert [version.step for version in steps[0]] == [*range(1, len(steps[0]) + 1)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_another_lighthouse_leads_when_the_leader_is_away_and_no_step_is_lost(
    several: Several, members: list[Member], how: signal.Signals
) -> None:
    first = several.leader()
    os.kill(several.by_address[first].pid, how)
    for member in members:
        member.trains_on()
    second = several.leader()
    assert second not in ("", first)
    if how is signal.SIGSTOP:
        os.kill(several.by_address[first].pid, signal.SIGCONT)
        wait_until(lambda: f"the one at http://{second} leads" in why_it_stands_by(first), "it stands by")
    for member in members:
        member.trains_on()
    check_one_history(members)
    print(f"{how.name}: longest gap {[round(member.longest_gap_s, 2) for member in members]} s")


def test_the_job_waits_while_etcd_is_gone_and_goes_on_when_it_is_back(
    etcd: Etcd, several: Several, members: list[Member]
) -> None:
    etcd.stop()
    wait_until(lambda: not several.leader(), "none leads")
    with pytest.raises(LighthouseUnreachableError, match="the store of the lease does not answer"):
        Lighthouse(several.addresses, None).status(None)
    waited_at = len(members[0].commits)
    etcd.start()
    wait_until(lambda: len(members[0].commits) > waited_at + 5, "it goes on")
    check_one_history(members)


def test_a_leader_that_is_told_to_end_gives_its_lease_up_and_the_next_one_knows_which_jobs_have_finished(
    etcd: Etcd, several: Several
) -> None:
    first = several.leader()
    key, value = (base64.b64encode(text).decode() for text in (b"torchft_ckpt/jobs", b'{"old":[7,0.0]}'))
    etcd.ask("kv/put", key=key, value=value)
    several.by_address[first].terminate()
    assert several.by_address[first].wait(30) == 0
    wait_until(lambda: several.leader() not in ("", first), "the other one leads")
    assert Lighthouse(several.addresses, None).status(None)["finished"]["old"]["step"] == 7


def test_an_etcd_that_wants_a_user_is_told_one_or_the_command_says_so(etcd: Etcd, tmp_path: Path) -> None:
    etcd.ask("auth/user/add", name="root", password="secret")
    etcd.ask("auth/role/add", name="root")
    etcd.ask("auth/user/grant", user="root", role="root")
    etcd.ask("auth/enable")
    command = [sys.executable, "-m", "torchft_ckpt", "lighthouse", "--min-replicas", "1", "--bind", "127.0.0.1:0"]
    command += ["--hostname", "127.0.0.1", "--etcd", f"http://127.0.0.1:{free_port()},{etcd.url}"]
    refused = subprocess.run([*command[:-1], etcd.url], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0 and "--etcd-user" in refused.stderr
    password = tmp_path / "password"
    password.write_text("secret\n")
    password.chmod(0o600)
    told = start(
        [*command, "--etcd-user", "root", "--etcd-password-file", str(password)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert told.stdout is not None
    assert any("this lighthouse leads, by lease" in line for line in told.stdout)
    told.kill()
    told.wait()


def test_addresses_that_cannot_be_used_are_errors_that_name_them() -> None:
    with pytest.raises(ConfigError, match="'localhost' cannot be used: it has no port"):
        Lighthouse("127.0.0.1:29510,localhost", None)
    with pytest.raises(ConfigError, match="'a' cannot be used: it has no port"):
        EtcdStore("http://127.0.0.1:2379,a", leader="x:1")
    with pytest.raises(ConfigError, match="its address is not https"):
        EtcdStore("http://127.0.0.1:2379", leader="x:1", authority="ca.pem")
