"""A replica group without a Manager, over real sockets: its ranks' quorums, votes and metadata by its manager server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.ports import reserved_port
from support.waiting import wait_until

from torchft_ckpt import LighthouseServer
from torchft_ckpt.coordination import LighthouseClient, ManagerClient, ManagerServer, QuorumResult, manager_server
from torchft_ckpt.core.coordination.messages import Refused
from torchft_ckpt.errors import (
    AddressInUseError,
    AuthenticationError,
    CallTimeoutError,
    ConfigError,
    LighthouseUnreachableError,
    ManagerUnreachableError,
    QuorumTimeoutError,
    RefusedError,
)
from torchft_ckpt.front.limits import FrontLimits

LONG = timedelta(seconds=20)
SHORT = timedelta(milliseconds=50)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=60_000)
    yield server
    server.shutdown()


def serve(
    lighthouse: LighthouseServer,
    name: str,
    ranks: int = 2,
    bind: str = "[::]:0",
    hostname: str = "127.0.0.1",
    **options: str,
) -> ManagerServer:
    return ManagerServer(
        replica_id=name,
        lighthouse_addr=lighthouse.address(),
        hostname=hostname,
        bind=bind,
        store_addr=f"{name}:29500",
        world_size=ranks,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=LONG,
        quorum_retries=0,
        **options,
    )


class Job:
    """Groups a and b of two ranks."""

    def __init__(self, lighthouse: LighthouseServer) -> None:
        self.servers = {name: serve(lighthouse, name) for name in "ab"}
        self.ranks = {
            (name, rank): ManagerClient(server.address(), LONG)
            for name, server in self.servers.items()
            for rank in range(2)
        }

    def all(self, call: Callable[[ManagerClient, str, int], object]) -> dict[tuple[str, int], object]:
        with ThreadPoolExecutor(4) as pool:
            calls = {key: pool.submit(call, client, *key) for key, client in self.ranks.items()}
            return {key: future.result() for key, future in calls.items()}


@pytest.fixture
def job(lighthouse: LighthouseServer) -> Iterator[Job]:
    job = Job(lighthouse)
    yield job
    for server in job.servers.values():
        server.shutdown()


@pytest.mark.slow
def test_who_calls_from_an_address_with_many_others_is_answered_late_and_not_refused(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = functools.partial(FrontLimits, max_requests_per_s=2)
    monkeypatch.setattr(manager_server, "FrontLimits", limits)
    monkeypatch.setattr(manager_server, "_PAUSE_S", 0.05)
    server = serve(lighthouse, "a", ranks=1)
    client = ManagerClient(server.address(), LONG)
    assert [client.should_commit(0, step, True, LONG) for step in range(8)] == [True] * 8
    with pytest.raises(CallTimeoutError, match="called too often from this address"):
        for step in range(8):
            client.should_commit(0, step, True, timedelta(milliseconds=200))
    server.shutdown()


def test_a_step_of_two_groups(job: Job) -> None:
    steps = {"a": 3, "b": 1}
    results = job.all(lambda client, name, rank: client._quorum(rank, steps[name], f"{name}{rank}", False, LONG))
    for (name, rank), result in results.items():
        assert isinstance(result, QuorumResult)
        assert (result.quorum_id, result.replica_ids, result.max_step) == (1, ["a", "b"], 3)
        assert result.heal is (name == "b")
        if result.heal:
            source = ManagerClient(result.recover_src_manager_address, LONG)
            assert source._checkpoint_metadata(rank, timeout=LONG) == f"a{rank}"
    decided = job.all(lambda client, name, rank: client.should_commit(rank, 3, (name, rank) != ("b", 1), LONG))
    assert decided == {("a", 0): True, ("a", 1): True, ("b", 0): False, ("b", 1): False}


def test_what_one_rank_gave_up_does_not_count_until_it_calls_again(job: Job) -> None:
    first, second = job.ranks["a", 0], job.ranks["a", 1]
    with pytest.raises(CallTimeoutError, match=r"has not answered within 0\.05 s"):
        first.should_commit(0, 3, True, SHORT)
    with pytest.raises(TimeoutError):
        second.should_commit(1, 3, True, SHORT)
    with pytest.raises(QuorumTimeoutError, match="no quorum for group rank 0"):
        first._quorum(0, 3, "", False, SHORT)
    with pytest.raises(TimeoutError):
        second._quorum(1, 3, "", False, SHORT)
    job.all(lambda client, name, rank: client._quorum(rank, 3, "", False, LONG))


def test_groups_and_other_callers_are_of_one_kind(job: Job, lighthouse: LighthouseServer) -> None:
    client = LighthouseClient(lighthouse.address(), LONG)
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(job.ranks["a", rank]._quorum, rank, 2, "", False, LONG) for rank in range(2)]
        with pytest.raises(TimeoutError):
            client.quorum("c", SHORT)  # the group b lives, and is waited for
        job.servers["b"].shutdown()
        quorum = client.quorum("c", LONG)
        assert [rank.result().replica_ids for rank in ranks] == [["a", "c"], ["a", "c"]]
    member = quorum.participants[0]
    assert (member.address, member.store_address, member.world_size) == (job.servers["a"].address(), "a:29500", 2)


@pytest.mark.parametrize("bind", ["[::]:0", "0.0.0.0:0"])
def test_a_server_is_reached_where_it_says(lighthouse: LighthouseServer, bind: str) -> None:
    """A name may be of either family, and the first that is tried need not be that of `bind`."""
    server = serve(lighthouse, "a", ranks=1, bind=bind, hostname="localhost")
    assert server.address().startswith("http://localhost:")
    port = server.address().rpartition(":")[2]
    for address in (server.address(), f"127.0.0.1:{port}"):
        assert ManagerClient(address, LONG).should_commit(0, 0, True, LONG)
    server.shutdown()


def test_ranks_hear_that_the_lighthouse_refuses_their_group(job: Job, lighthouse: LighthouseServer) -> None:
    lighthouse._thread.run(refuse(lighthouse))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(job.ranks["a", rank]._quorum, rank, 2, "", False, LONG) for rank in range(2)]
        for call in calls:
            with pytest.raises(RefusedError, match=r"refused: .* not wanted here"):
                call.result()


async def refuse(lighthouse: LighthouseServer) -> None:
    for channel in lighthouse._channels.values():
        channel.send(Refused(code="test", reason="not wanted here"))


def test_who_is_not_there_or_goes_away_is_a_connection_error(job: Job) -> None:
    with reserved_port() as port, pytest.raises(ManagerUnreachableError, match="no manager server answers"):
        ManagerClient(f"127.0.0.1:{port}", timedelta(seconds=1))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(job.ranks["a", 0].should_commit, 0, 1, True, LONG)
        wait_until(lambda: bool(job.servers["a"]._answers))
        job.servers["a"].shutdown()
        with pytest.raises(ConnectionError):
            waits.result()


def test_what_cannot_be_answered_is_refused_by_name(job: Job, lighthouse: LighthouseServer) -> None:
    client = job.ranks["a", 0]
    for rank, reason in ((7, "there is no group rank 7: a has 2 ranks"), (1, "group rank 1 of a has not called")):
        with pytest.raises(RefusedError, match=reason):
            client._checkpoint_metadata(rank, timeout=LONG)
    with pytest.raises(RefusedError, match="cannot be read"):
        client.should_commit(-1, 0, True, LONG)
    with pytest.raises(ManagerUnreachableError, match="no manager server of ours"):
        ManagerClient(lighthouse.address(), LONG).should_commit(0, 0, True, LONG)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(lighthouse: LighthouseServer) -> None:
    address = lighthouse.address().removeprefix("http://")
    with pytest.raises(AddressInUseError, match=address):
        serve(lighthouse, "a", bind=address)
    with pytest.raises(ConfigError, match="world_size=0"):
        serve(lighthouse, "a", ranks=0)
    guarded = LighthouseServer("127.0.0.1:0", min_replicas=1, token="secret")
    with pytest.raises(AuthenticationError):
        serve(guarded, "a", token="guess")
    server = serve(guarded, "a", ranks=1, token="secret")
    with pytest.raises(AuthenticationError):
        ManagerClient(server.address(), LONG, token="guess").should_commit(0, 0, True, LONG)
    assert ManagerClient(server.address(), LONG, token="secret").should_commit(0, 0, True, LONG)
    server.shutdown()
    guarded.shutdown()
    with reserved_port() as port, pytest.raises(LighthouseUnreachableError):
        ManagerServer("a", f"127.0.0.1:{port}", "", "[::]:0", "", 1, LONG, timedelta(milliseconds=10), 0)
