"""Lighthouses as processes, of which one leads by a lease in a real etcd: each may be killed or stopped, and so may etcd."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.certificates import Files, server_context
from support.ports import reserved_port
from support.processes import start
from support.services import make_group_service
from support.thoroughness import by_default
from support.waiting import Heard, wait_until

from torchft_ckpt import LighthouseServer
from torchft_ckpt.coordination import lighthouse_server
from torchft_ckpt.coordination.asking import Lighthouse
from torchft_ckpt.coordination.etcd_store import EtcdStore
from torchft_ckpt.core.coordination.leadership import LeaseHeld, LeaseOf
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
from torchft_ckpt.errors import AuthenticationError, ConfigError, LighthouseUnreachableError

ETCD = shutil.which("etcd")
STEP_S = 0.02
COMMAND = [sys.executable, "-m", "torchft_ckpt", "lighthouse", "--min-replicas", "1"]
COMMAND += ["--bind", "127.0.0.1:0", "--hostname", "127.0.0.1"]
_ports = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def _give_ports_back() -> Iterator[None]:
    with _ports:
        yield


def free_port() -> int:
    return _ports.enter_context(reserved_port())


class Etcd:
    """etcd, of one member or more, each with ports and a folder of its own. `files`: of TLS."""

    def __init__(self, folder: Path, number: int = 1, files: Files | None = None) -> None:
        self._folder, self._files = folder, files
        self.context = None if files is None else ssl.create_default_context(cafile=str(files.authority))
        scheme = "http" if files is None else "https"
        self.urls = [f"{scheme}://127.0.0.1:{free_port()}" for _ in range(number)]
        self._peers = [f"http://127.0.0.1:{free_port()}" for _ in range(number)]
        self.url = ",".join(self.urls)
        self.start()

    def start(self) -> None:
        self.processes = [self._start(number) for number in range(len(self.urls))]
        for number in range(len(self.urls)):
            wait_until(lambda at=number: self.answers(at), f"member {number} of etcd answers")  # type: ignore[misc]

    def _start(self, number: int) -> subprocess.Popen[Any]:
        url, peers = self.urls[number], self._peers[number]
        cluster = ",".join(f"m{other}={its}" for other, its in enumerate(self._peers))
        command = [
            *(ETCD or "", "--name", f"m{number}", "--data-dir", str(self._folder / str(number))),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", cluster),
        ]
        if self._files is not None:
            command += ["--cert-file", str(self._files.certificate), "--key-file", str(self._files.key)]
        return start(command, f"etcd-{number}")

    def answers(self, number: int) -> bool:
        try:
            return "leader" in self.ask("maintenance/status", at=number)
        except OSError:
            return False

    def ask(self, path: str, *, at: int = 0, **body: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.urls[at]}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=5, context=self.context) as answer:
            said: dict[str, Any] = json.load(answer)
            return said

    def stop(self, *numbers: int) -> None:
        """SIGKILL; without numbers to all."""
        for number in numbers or range(len(self.processes)):
            self.processes[number].kill()
            self.processes[number].wait()

    def leader(self) -> int:
        """Return which of the members leads the others."""
        said = [self.ask("maintenance/status", at=number) for number in range(len(self.urls))]
        return next(number for number, one in enumerate(said) if one["leader"] == one["header"]["member_id"])


class Several:
    """Lighthouses `python -m torchft_ckpt lighthouse --etcd URL`."""

    def __init__(self, etcd: Etcd, number: int, *options: str) -> None:
        self.by_address: dict[str, subprocess.Popen[Any]] = {}
        for _ in range(number):
            address = f"127.0.0.1:{free_port()}"
            command = [sys.executable, "-m", "torchft_ckpt", "lighthouse", "--min-replicas", "2", "--bind", address]
            # However slow this machine is, both members are waited for.
            command += ["--heartbeat-timeout-ms", "60000", "--hostname", "127.0.0.1", "--etcd", etcd.url, *options]
            self.by_address[address] = start(command, address)
        self.addresses = ",".join(self.by_address)
        self.leader()

    def status(self) -> dict[str, Any]:
        """Return what the one says that leads, with its address; or only why none does."""
        asked = Lighthouse(self.addresses, None)
        try:
            return asked.status(None) | {"address": asked.address}
        except LighthouseUnreachableError as error:
            return {"why": str(error)}

    def leader(self) -> str:
        """Return the address of the one that leads, once one does: on a slow machine a lease may end."""
        found: list[str] = []

        def leads() -> bool:
            found[:] = [self.status().get("address", "")]
            return found != [""]

        wait_until(leads, "one leads")
        return found[0]

    def end(self) -> None:
        for process in self.by_address.values():
            process.kill()
            process.wait()


class Member:
    """A group of one rank that trains: it asks, approves, and asks again."""

    def __init__(self, name: str, lighthouses: str) -> None:
        self.name = name
        self.approves = True
        self.on_outcome: Callable[[Outcome], None] = lambda outcome: None
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
            return Hello(protocol=PROTOCOL_VERSION, replica_id=f"{self.name}:1", init_sync=False)
        return Hello(
            protocol=PROTOCOL_VERSION,
            replica_id=f"{self.name}:1",
            init_sync=False,
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
                approve=self.approves,
                num_voters=message.num_voters,
            )
            self.service.schedule(STEP_S, lambda: self.service.send(vote))
        elif isinstance(message, CommitDecided) and self._formed is not None:
            self._outcome = message.outcome
            self.on_outcome(message.outcome)
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
def etcd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Etcd]:
    """etcd, of as many members as the test says."""
    if ETCD is None:
        pytest.skip("there is no etcd here (Debian's etcd-server)")
    etcd = Etcd(tmp_path / "etcd", getattr(request, "param", 1))
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


def refusal_of(*options: str) -> str:
    """Return what a lighthouse says that ends at once as it cannot use what it was told of etcd."""
    ended = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    return ended.stderr


def check_one_history(members: list[Member]) -> None:
    """All made all steps, each once, and equal."""
    steps = [[version for _, version in member.commits] for member in members]
    num = min(map(len, steps))
    assert steps[0][:num] == steps[1][:num]
    assert [version.step for version in steps[0]] == [*range(1, len(steps[0]) + 1)]


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_another_lighthouse_leads_when_the_leader_is_away_and_no_step_is_lost(
    several: Several, members: list[Member], how: signal.Signals
) -> None:
    first = several.leader()
    os.kill(several.by_address[first].pid, how)
    for member in members:
        member.trains_on()
    print(f"{how.name}: longest gap {[round(member.longest_gap_s, 2) for member in members]} s")
    os.kill(several.by_address[first].pid, signal.SIGCONT)  # to one that is dead it does nothing
    for member in members:
        member.trains_on()
    check_one_history(members)


@pytest.mark.processes
@pytest.mark.parametrize("away_s", [0.0, *by_default([], thorough=[60.0])])
def test_the_job_waits_while_etcd_is_gone_and_goes_on_when_it_is_back(
    etcd: Etcd, several: Several, members: list[Member], away_s: float
) -> None:
    etcd.stop()
    wait_until(lambda: "the store of the lease does not answer" in several.status().get("why", ""), "none leads")
    waited_at = len(members[0].commits)
    time.sleep(away_s)
    assert len(members[0].commits) <= waited_at + 1  # which was on its way
    etcd.start()
    wait_until(lambda: len(members[0].commits) > waited_at + 5, "it goes on")
    check_one_history(members)


@pytest.mark.processes
@pytest.mark.parametrize("etcd", [3], indirect=True)
def test_the_job_goes_on_without_the_one_of_three_members_of_etcd_that_led_the_others(
    etcd: Etcd, members: list[Member]
) -> None:
    etcd.stop(etcd.leader())
    for member in members:
        member.trains_on(100)
    check_one_history(members)


@pytest.mark.processes
def test_a_leader_that_is_told_to_end_gives_its_lease_up_and_the_next_one_knows_which_jobs_have_finished(
    etcd: Etcd, several: Several
) -> None:
    first = several.leader()
    key, value = (base64.b64encode(text).decode() for text in (b"torchft_ckpt/jobs", b'{"finished":{"old":[7,0.0]}}'))
    etcd.ask("kv/put", key=key, value=value)
    several.by_address[first].terminate()
    assert several.by_address[first].wait(30) == 0
    wait_until(lambda: several.status().get("finished", {}).get("old", {}).get("step") == 7, "the other one knows")


@pytest.mark.processes
def test_an_etcd_that_wants_a_user_is_told_one_or_the_command_says_so(etcd: Etcd, tmp_path: Path) -> None:
    etcd.ask("auth/user/add", name="root", password="secret")
    etcd.ask("auth/role/add", name="root")
    etcd.ask("auth/user/grant", user="root", role="root")
    etcd.ask("auth/enable")
    password = tmp_path / "password"
    password.touch(0o600)
    with_user = ["--etcd-user", "root", "--etcd-password-file", str(password)]
    dead = f"http://127.0.0.1:{free_port()},{etcd.url}"
    assert "--etcd-user" in refusal_of("--etcd", dead)
    password.write_text("wrong\n")
    assert "mend --etcd-user or --etcd-password-file" in refusal_of("--etcd", dead, *with_user)
    password.write_text("secret\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = f"http://127.0.0.1:{silent.getsockname()[1]},{etcd.url}"
        told = start(
            [*COMMAND, "--etcd", urls, *with_user], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert told.stdout is not None
        assert any("this lighthouse leads, by lease" in line for line in told.stdout)
        told.kill()
        told.wait()


@pytest.mark.processes
@pytest.mark.skipif(ETCD is None, reason="there is no etcd here (Debian's etcd-server)")
def test_an_etcd_of_another_authority_is_refused_by_the_command_and_the_right_one_is_believed(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    etcd = Etcd(tmp_path / "etcd", files=Files(tmp_path / "files", authority))
    try:
        assert "mend --etcd-ca" in refusal_of("--etcd", etcd.url, "--etcd-ca", str(stranger))
        several = Several(etcd, 1, "--etcd-ca", str(tmp_path / "files" / "ca.pem"))  # which waits until it leads
        several.end()
    finally:
        etcd.stop()


# ------------------------------------------------------------------------------------------ without etcd, in this process


class Memory:
    """A store of a lease that one lighthouse has, for ever, and that may take its time to write."""

    lease_s = 1000.0

    def __init__(self, fence: int, data: bytes = b"") -> None:
        self.number, self.data = fence, data
        self.may_write, self.is_writing = threading.Event(), threading.Event()
        self.may_write.set()

    async def acquire(self) -> LeaseHeld | LeaseOf | None:
        return LeaseHeld(self.number, self.lease_s, self.data)

    async def renew(self) -> LeaseHeld | None:
        return LeaseHeld(self.number, self.lease_s)

    async def write(self, data: bytes) -> LeaseHeld | None:
        self.is_writing.set()
        await asyncio.to_thread(self.may_write.wait)
        self.data = data
        return LeaseHeld(self.number, self.lease_s)

    async def release(self) -> None:
        self.may_write.set()


@contextmanager
def leading(store: Memory | None = None, *, port: int = 0, token: str | None = None) -> Iterator[LighthouseServer]:
    """A lighthouse; without a store it is the only one."""
    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        hostname="127.0.0.1",
        min_replicas=1,
        token=token,
        store=None if store is None else lambda address: store,
    )
    try:
        yield server
    finally:
        server.shutdown()


def test_a_step_that_not_all_approved_is_written_down_before_anybody_hears_how_it_ended() -> None:
    store, heard = Memory(7), threading.Event()
    with leading(store) as server:
        member = Member("a", server.address())
        member.trains_on(2)
        store.may_write.clear()
        store.is_writing.clear()
        member.on_outcome = lambda outcome: heard.set() if outcome is Outcome.DISCARD else None
        member.approves = False
        assert store.is_writing.wait(60)
        assert Lighthouse(server.address(), None).status(None)["leads"]  # it serves others meanwhile
        assert not heard.is_set()
        store.may_write.set()
        assert heard.wait(60)
        member.service.shutdown("the test is over")
    assert b"false" in store.data


def test_a_group_that_starts_passes_by_those_that_are_none_of_several_lighthouses() -> None:
    with leading() as alone, leading(token="another") as stranger, leading(Memory(7)) as leader:
        member = Member("a", ",".join(one.address() for one in (alone, stranger, leader)))
        member.trains_on(2)
        assert Lighthouse(leader.address(), None).status(None)["jobs"]
        member.service.shutdown("the test is over")
        with pytest.raises(AuthenticationError, match="refused our token"):
            Member("a", f"{stranger.address()},{stranger.address()}")


def test_a_lighthouse_for_whose_store_too_much_waits_begins_anew_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, line = Memory(7), Heard("messages wait for the store: forgetting all")
    log = logging.getLogger("torchft_ckpt.coordination.lighthouse_server")
    with leading(store) as server:
        member = Member("a", server.address())
        member.trains_on(2)
        monkeypatch.setattr(lighthouse_server, "MAX_UNSAID", 0)
        log.addHandler(line)
        store.may_write.clear()
        member.approves = False
        assert line.there.wait(60)
        log.removeHandler(line)
        member.approves = True
        monkeypatch.undo()
        store.may_write.set()
        member.trains_on(2)
        member.service.shutdown("the test is over")


def test_a_store_that_is_not_understood_is_asked_again() -> None:
    store, heard = Memory(7), threading.Event()
    store.lease_s = 2.0
    acquire = store.acquire

    async def answers_nonsense_first() -> LeaseHeld | LeaseOf | None:
        if not heard.is_set():
            heard.set()
            raise KeyError("TTL")
        return await acquire()

    store.acquire = answers_nonsense_first  # type: ignore[method-assign]
    with leading(store) as server:
        member = Member("a", server.address())
        member.trains_on(2)
        member.service.shutdown("the test is over")
    assert heard.is_set()


@pytest.mark.processes
def test_a_write_that_reaches_etcd_after_a_later_one_changes_nothing(etcd: Etcd) -> None:
    asyncio.run(a_write_comes_late(etcd))


async def a_write_comes_late(etcd: Etcd) -> None:
    store = EtcdStore(etcd.url, leader="a:1")
    await store.acquire()
    assert await store.write(b"first") is not None
    send = store._send
    late: list[tuple[str, dict[str, Any]]] = []

    async def loses(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        late.append((path, body))
        raise ConnectionError("it was sent, and no answer came")

    for _ in range(2):
        store._send = loses  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await store.write(b"late")
        store._send = send  # type: ignore[method-assign]
        assert await store.renew() is not None
    assert await store.write(b"later") is not None
    await send(*late[0])
    lease = await store.acquire()
    assert isinstance(lease, LeaseHeld) and lease.data == b"later"
    etcd.ask("kv/put", key=base64.b64encode(b"torchft_ckpt/jobs").decode(), value="")  # as if it came just now
    with pytest.raises(ConnectionError, match="carried out just now"):
        await store.write(b"last")
    assert await store.write(b"last") is not None
    await store.release()


def test_a_renewed_certificate_is_shown_to_etcd_without_a_restart(tmp_path: Path) -> None:
    shown = asyncio.run(shown_before_and_after_a_renewal(tmp_path, trustme.CA()))
    assert len(shown) == 3 and shown[0] == shown[1] != shown[2]


async def shown_before_and_after_a_renewal(folder: Path, authority: trustme.CA) -> list[str]:
    """Return which certificates what plays etcd sees: twice the first one, also while files are written, and the new one."""
    files, shown = Files(folder, authority), list[str]()
    context = server_context(authority, "127.0.0.1", clients=authority)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.append(writer.get_extra_info("peercert")["serialNumber"])
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        address = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ca, certificate, key = map(str, (files.authority, files.certificate, files.key))
        store = EtcdStore(address, leader="a:1", authority=ca, certificate=certificate, key=key)
        await store._get(store._leader_key)
        files.key.write_text("half of a")
        await store._get(store._leader_key)
        files.renew(authority, "127.0.0.1")
        await store._get(store._leader_key)
        await store.release()
    return shown


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"store": Memory(3)}, "leads by lease 3, not 7 or later"),
        ({}, "leads by lease 0, not 7 or later"),
        ({"token": "another"}, "refused our token"),
    ],
    ids=["older lease", "no lease", "another token"],
)
def test_a_member_goes_on_to_the_next_lighthouse_if_one_is_none_of_those_that_lead_in_turn(
    other: dict[str, Any], line: str
) -> None:
    later = free_port()
    heard = Heard(line)
    with leading(Memory(7)) as first, leading(**other) as stranger:
        member = Member("a", f"{first.address()},{stranger.address()},127.0.0.1:{later}")
        member.trains_on(2)
        log = logging.getLogger("torchft_ckpt.coordination.lighthouse_connection")
        log.addHandler(heard)
        first.shutdown()
        assert heard.there.wait(60)
        log.removeHandler(heard)
        with leading(Memory(8), port=later):
            member.trains_on(2)
            member.service.shutdown("the test is over")


def test_addresses_that_cannot_be_used_are_errors_that_name_them() -> None:
    with pytest.raises(ConfigError, match="'localhost' cannot be used: it has no port"):
        Lighthouse("127.0.0.1:29510,localhost", None)
    with pytest.raises(ConfigError, match="'a' cannot be used: it has no port"):
        EtcdStore("http://127.0.0.1:2379,a", leader="x:1")
    with pytest.raises(ConfigError, match="its address is not https"):
        EtcdStore("http://127.0.0.1:2379", leader="x:1", authority="ca.pem")
