"""Trainers without a Manager, over real sockets: quorums by `LighthouseClient`, what they raise, and what a watcher reads."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.ports import reserved_port
from support.processes import run, start
from support.services import make_group_service
from support.waiting import wait_until

from torchft_ckpt import LighthouseServer
from torchft_ckpt.coordination import GroupService, LighthouseClient, Quorum, QuorumMember
from torchft_ckpt.core.coordination.lighthouse_events import Tick
from torchft_ckpt.errors import (
    AuthenticationError,
    ConfigError,
    LighthouseUnreachableError,
    QuorumTimeoutError,
    RefusedError,
)

LONG = timedelta(seconds=20)
SHORT = timedelta(milliseconds=50)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=60_000)
    yield server
    server.shutdown()


@pytest.fixture
def pair() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=60_000)
    yield server
    server.shutdown()


def client_of(server: LighthouseServer, **options: str) -> LighthouseClient:
    return LighthouseClient(server.address(), LONG, **options)


def test_callers_learn_of_each_other(pair: LighthouseServer) -> None:
    one, two = client_of(pair), client_of(pair)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(one.quorum, "a", LONG, address="here", step=3, world_size=2, data={"x": (1, None), 2: "y"})
        quorum = two.quorum("b", LONG, store_address="host:1")
        assert waits.result() == quorum
    assert isinstance(quorum, Quorum)
    assert quorum.quorum_id == 1
    assert quorum.created.seconds > 1_700_000_000
    assert quorum.participants == [
        QuorumMember(replica_id="a", address="here", step=3, world_size=2, data={"x": [1, None], "2": "y"}),
        QuorumMember(replica_id="b", store_address="host:1"),
    ]


def test_a_quorum_that_is_not_formed_in_time_says_why_and_is_formed_without_who_gave_up(pair: LighthouseServer) -> None:
    client = client_of(pair)
    with pytest.raises(
        QuorumTimeoutError, match=r"no quorum for a within 0\.05 s: 1 of at least 2 replica groups are here"
    ):
        client.quorum("a", SHORT)
    with pytest.raises(TimeoutError):
        client.quorum("b", SHORT)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.quorum, "a", LONG)
        assert [member.replica_id for member in client.quorum("b", LONG).participants] == ["a", "b"]
        waits.result()


def test_who_calls_again_before_the_answer_takes_the_place_of_the_first_call(pair: LighthouseServer) -> None:
    client, other = client_of(pair), client_of(pair)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.quorum, "a", LONG)
        wait_until(lambda: bool(client._calls._open))
        second = pool.submit(client.quorum, "a", LONG)
        with pytest.raises(ConfigError, match="a called again"):
            first.result()
        assert other.quorum("b", LONG) == second.result()


@pytest.mark.processes
def test_a_process_ends_without_a_word_whatever_it_left_open(pair: LighthouseServer) -> None:
    program = (
        "from datetime import timedelta; from torchft_ckpt.coordination import LighthouseClient, ManagerServer;"
        f"address, time = {pair.address()!r}, timedelta(seconds=20); client = LighthouseClient(address, time);"
        "client.heartbeat('a'); server = ManagerServer('b', address, '127.0.0.1', '127.0.0.1:0', '', 1, time, time, 0)"
    )
    ended = run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.processes
def test_a_killed_caller_is_out_at_once() -> None:
    """The heartbeat and join timeouts are beyond the test's patience."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=60_000, join_timeout_ms=60_000)
    client = client_of(server)
    program = (
        "import sys; from datetime import timedelta; from torchft_ckpt.coordination import LighthouseClient;"
        f"client = LighthouseClient({server.address()!r}, timedelta(seconds=20)); client.heartbeat('b');"
        "print('torch' in sys.modules, flush=True); sys.stdin.read()"
    )
    process = start([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "False\n"
    with pytest.raises(TimeoutError):
        client.quorum("a", SHORT)  # b lives
    process.kill()
    process.wait()
    assert [member.replica_id for member in client.quorum("a", LONG).participants] == ["a"]
    server.shutdown()


def test_a_caller_that_is_silent_between_its_calls_is_out(lighthouse: LighthouseServer) -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=100)
    client = client_of(server)
    client.heartbeat("silent")
    assert [member.replica_id for member in client.quorum("a", LONG).participants] == ["a"]
    client.shutdown()
    server.shutdown()


def test_a_lighthouse_that_restarts_while_one_waits_goes_on_with_higher_ids() -> None:
    with reserved_port() as port:
        server = LighthouseServer(f"127.0.0.1:{port}", min_replicas=1)
        client = client_of(server)
        assert client.quorum("a", LONG).quorum_id == 1
        server.shutdown()
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(client.quorum, "a", LONG)
            server = LighthouseServer(f"127.0.0.1:{port}", min_replicas=1)
            assert waits.result().quorum_id == 1000
        server.shutdown()
        wait_until(lambda: not client._calls._connection.is_up)
        for call in (client.quorum, client.heartbeat):
            with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} cannot be reached; a has waited"):
                call("a", SHORT)
        client.shutdown()


def test_one_that_was_taken_for_dead_while_it_waits_calls_again(pair: LighthouseServer) -> None:
    client, other = client_of(pair), client_of(pair)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.quorum, "a", LONG)
        wait_until(lambda: any(state.callers.members for state in list(pair._jobs.states.values())))
        pair._thread.run(fall_silent(pair))
        assert other.quorum("b", LONG) == waits.result()


async def fall_silent(server: LighthouseServer) -> None:
    (caller,) = server._jobs.states["default"].callers.members.values()
    caller.last_seen -= 60.0
    server._handle(Tick())


def test_nobody_answers() -> None:
    with reserved_port() as port:
        with pytest.raises(LighthouseUnreachableError) as raised:
            LighthouseClient(f"127.0.0.1:{port}", timedelta(milliseconds=10))
    assert isinstance(raised.value, ConnectionError)


def test_a_token_guards_quorums() -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, token="secret")
    with pytest.raises(AuthenticationError):
        client_of(server, token="guess")
    assert client_of(server, token="secret").quorum("a", LONG).quorum_id == 1
    server.shutdown()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"data": {"set": {1}}}, "set is not JSON"),
        ({"data": {"nan": float("nan")}}, "not JSON compliant"),
        ({"data": [1]}, r"\$.data"),
        ({"data": {"text": "\ud800"}}, r"\$.data|surrogates"),
        ({"data": {"big": "x" * (64 << 10)}}, "at most 65536 are sent"),
        ({"step": -1}, r"\$.step"),
        ({"replica_id": ""}, r"\$.replica_id"),
    ],
)
def test_what_cannot_be_sent_is_named_and_harms_nothing(
    lighthouse: LighthouseServer, arguments: dict, what: str
) -> None:
    client = client_of(lighthouse)
    with pytest.raises(ConfigError, match=what):
        client.quorum(**{"replica_id": "a", "timeout": LONG, **arguments})
    assert client.quorum("a", LONG).quorum_id == 1


def test_each_kind_of_job_refuses_the_other_by_name(lighthouse: LighthouseServer) -> None:
    client = client_of(lighthouse)
    group = manager_of(lighthouse)
    for _ in range(2):
        with pytest.raises(
            RefusedError, match=r"a is a caller of LighthouseClient, but Managers run this job \(group:1\)"
        ):
            client.quorum("a", LONG)
    group.shutdown("the test is over")
    client_of(lighthouse).quorum("a", LONG)
    with pytest.raises(
        RefusedError, match=r"group:1 is a Manager's, .* callers of LighthouseClient.quorum run this job \(a\)"
    ):
        manager_of(lighthouse)


def manager_of(server: LighthouseServer) -> GroupService:
    return make_group_service(server.address(), world_size=1, connect_timeout=LONG)


def test_a_watcher_reads_who_is_here_and_the_last_quorum(lighthouse: LighthouseServer) -> None:
    client = client_of(lighthouse)
    client.quorum("a", LONG, step=5)
    client.heartbeat("b")
    with urllib.request.urlopen(f"{lighthouse.address()}/?job=default") as answer:
        status = json.load(answer)
    assert (status["kind"], status["quorum_id"], status["participants"]) == ("callers", 1, ["a"])
    members = [(member["replica_id"], member["step"], member["waiting_s"]) for member in status["members"]]
    assert members == [("a", 5, None), ("b", 0, None)]


def test_a_client_that_is_dropped_leaves_and_ends_its_thread(pair: LighthouseServer) -> None:
    client = client_of(pair)
    thread = client._calls, client._thread._thread
    client.heartbeat("a")
    del client
    gc.collect()
    thread[1].join(20)
    assert thread[1] not in threading.enumerate()
    wait_until(lambda: not pair._jobs.states)  # it had no quorum
