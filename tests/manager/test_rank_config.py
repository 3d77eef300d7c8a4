"""Which store replica groups meet at, and how the ranks of one group find each other, whatever `MASTER_PORT` shells name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta

import msgspec
import pytest
from support.ports import reserved_port
from support.stores import hosted_store
from torch.distributed import TCPStore

from torchft_ckpt.core.coordination.meeting import Claim, encode_claim, with_proof
from torchft_ckpt.errors import AuthenticationError, ConfigError, GroupBrokenError
from torchft_ckpt.manager import group_store
from torchft_ckpt.manager.rank_config import RankConfig, resolve_rank_config

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port at which nobody listens, that every shell names."""
    with reserved_port() as number:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(number))
        for variable in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(variable, raising=False)
        yield number


def launch(
    name: str | None,
    rank: int = 0,
    world_size: int = 2,
    *,
    timeout: timedelta = TIMEOUT,
    token: str | None = None,
    job: str | None = None,
) -> RankConfig:
    return resolve_rank_config(
        rank=rank,
        world_size=world_size,
        store_addr=None,
        store_port=None,
        lighthouse_addr="127.0.0.1:1",
        replica_id=name,
        port=None,
        hostname="127.0.0.1",
        job=job,
        token=token,
        connect_timeout=timeout,
        beside_nccl=False,
    )


def test_the_name_of_the_group_is_not_that_of_the_job() -> None:
    for name in ("g0", None):
        assert launch(name, world_size=1).job == "default"


def announces(started: RankConfig) -> socket.socket:
    """Stand for the manager service of a rank 0; it listens until it is closed."""
    service = socket.create_server(("127.0.0.1", 0))
    assert started.group_store is not None
    started.group_store.announce(f"127.0.0.1:{service.getsockname()[1]}")
    return service


def rank_0_found_by(started: RankConfig) -> str:
    assert started.group_store is not None
    return started.group_store.find_rank_0(started.name).replica_id


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=60).close()
    except OSError:
        return False
    return True


def test_groups_of_one_rank_host_a_store_each_although_all_name_one_port(port: int) -> None:
    groups = {name: launch(name, world_size=1) for name in "abc"}
    addresses = {name: group.store_address for name, group in groups.items()}
    assert len(set(addresses.values())) == 3
    assert not listens(f"127.0.0.1:{port}"), "it is left to the script, as for init_process_group"
    del groups["a"]  # it died
    assert {name: listens(address) for name, address in addresses.items()} == {"a": False, "b": True, "c": True}


@pytest.mark.parametrize("hosted_by", ["rank 0", "a launcher"])
def test_a_rank_finds_rank_0_of_its_group_and_groups_meet_at_a_store_that_rank_0_hosts(
    port: int, hosted_by: str
) -> None:
    launcher = hosted_store(port) if hosted_by == "a launcher" else None
    rank_0 = launch("group")
    rank_1 = launch("group", 1)
    with closing(announces(rank_0)):
        assert rank_0_found_by(rank_1) == rank_0.replica_id
    assert (rank_0.store_address.endswith(f":{port}"), rank_1.store_address) == (False, "")
    assert listens(rank_0.store_address)
    del launcher


@pytest.mark.slow
def test_the_ranks_of_two_groups_at_one_port_do_not_mix(port: int) -> None:
    rank_0 = launch("g0")
    with closing(announces(rank_0)):
        with pytest.raises(
            ConfigError, match=rf"127.0.0.1:{port} is that of replica group 'g0', which lives.*MASTER_PORT"
        ):
            launch("g1")
        with pytest.raises(
            ConfigError, match=rf"one of replica group 'g1', and at the store at 127.0.0.1:{port} is .*'g0'"
        ):
            rank_0_found_by(launch("g1", 1))
        assert rank_0_found_by(launch("g0", 1)) == rank_0.replica_id


def test_a_rank_that_was_given_no_name_takes_its_groups(port: int) -> None:
    rank_0 = launch("group")
    with closing(announces(rank_0)):
        assert rank_0_found_by(launch(None, 1)) == rank_0.replica_id


def test_what_a_dead_rank_0_has_left_is_written_over_and_waited_out(port: int) -> None:
    launcher = hosted_store(port)
    announces(launch("group")).close()  # it lived, and is gone
    rank_1 = launch("group", 1)
    with ThreadPoolExecutor(1) as pool:
        finding = pool.submit(rank_0_found_by, rank_1)
        again = launch("group")
        with closing(announces(again)):
            assert finding.result(60) == again.replica_id
    assert launch("another").name == "another", "nobody of the first lives any more"
    del launcher


def test_a_manager_that_could_not_be_made_does_not_stand_in_the_way_of_the_next_attempt(port: int) -> None:
    failed = launch("group")  # its store is held yet, as by a traceback
    again = launch("group")
    with closing(announces(again)):
        assert rank_0_found_by(launch("group", 1)) == again.replica_id != failed.replica_id


def test_ranks_find_each_other_where_their_launchers_have_counted_different_restarts(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose rank failed counts a restart; another, whose rank was only ended with it, does not."""
    launcher = hosted_store(port)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for restarts in ("1", "0"), ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts[0])
        rank_0 = launch("group")
        with closing(announces(rank_0)):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts[1])
            assert rank_0_found_by(launch("group", 1)) == rank_0.replica_id
    del launcher


@pytest.mark.slow
def test_each_run_of_a_launcher_is_a_group_of_its_own(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = hosted_store(port)  # of two runs: torchrun's agents share one where they name one endpoint
    with ExitStack() as living:
        for number in range(2):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", str(number))
            rank_0 = launch(f"group_{number}")
            living.enter_context(announces(rank_0))
            assert rank_0_found_by(launch(f"group_{number}", 1)) == rank_0.replica_id
    del launcher


@pytest.mark.parametrize("first", ["the Manager", "the script"])
def test_the_script_may_use_the_port_for_a_process_group_of_its_own(port: int, first: str) -> None:
    """As `init_process_group` does: rank 0 hosts a store at MASTER_PORT, unless this process hosts one there."""

    def by_script() -> TCPStore:
        return TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False, multi_tenant=True)

    of_script = by_script() if first == "the script" else None
    rank_0 = launch("group")
    of_script = of_script or by_script()
    of_script.set("default_pg/0", "here")
    with closing(announces(rank_0)):
        rank_1 = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
        assert rank_1.get("default_pg/0") == b"here"
        assert rank_0_found_by(launch("group", 1)) == rank_0.replica_id


@pytest.mark.slow
def test_rank_0_that_does_not_come_is_named(port: int) -> None:
    launcher = hosted_store(port)
    with pytest.raises(
        GroupBrokenError, match=rf"group rank 1 .* 127.0.0.1:{port} within 0.5 s: group rank 0 has not created"
    ):
        rank_0_found_by(hasty(launch("group", 1)))
    del launcher


def test_what_is_no_claim_of_this_version_is_named(port: int) -> None:
    launcher = hosted_store(port)
    launcher.set("torchft_ckpt//group", "what?")
    with pytest.raises(ConfigError, match=rf"the store at 127.0.0.1:{port} holds of its group is of another version"):
        launch("group")


STRANGER = Claim(
    name="group", replica_id="group:x", process="x", store_address="127.0.0.1:9", manager_address="127.0.0.1:9"
)


@pytest.mark.parametrize(
    "claim",
    [
        STRANGER,
        with_proof(STRANGER, "guess", "default", "torchft_ckpt//group"),
        with_proof(STRANGER, "secret", "another", "torchft_ckpt//group"),
        with_proof(STRANGER, "secret", "default", "torchft_ckpt/an earlier run/group"),
        msgspec.structs.replace(
            with_proof(STRANGER, "secret", "default", "torchft_ckpt//group"), manager_address="127.0.0.1:8"
        ),
    ],
    ids=["no token", "another token", "another job", "another run", "altered"],
)
def test_a_rank_goes_to_no_address_that_a_stranger_wrote_down(
    port: int, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = hosted_store(port)
    rank_0 = launch("group", token="secret")
    announced = announces(rank_0)
    right = launcher.get("torchft_ckpt//group")
    launcher.set("torchft_ckpt//group", encode_claim(claim).decode())
    asked: list[tuple[str, int]] = []
    listens_at = group_store._listens
    monkeypatch.setattr(group_store, "_listens", lambda *place: asked.append(place) or listens_at(*place))
    with closing(announced):
        with pytest.raises(
            AuthenticationError, match=r"names 'group'.*knows this rank's token.*somebody else writes to"
        ):
            rank_0_found_by(hasty(launch("group", 1, token="secret")))
        with ThreadPoolExecutor(1) as pool:
            finding = pool.submit(rank_0_found_by, launch("group", 1, token="secret"))
            assert not finding.done()
            launcher.set("torchft_ckpt//group", right.decode())
            assert finding.result(60) == rank_0.replica_id
    assert all(place[1] not in (8, 9) for place in asked), "nobody is asked anything there"
    del launcher


def test_where_there_is_no_token_every_claim_is_believed(port: int) -> None:
    rank_0 = launch("group", token="")
    with closing(announces(rank_0)):
        assert rank_0_found_by(launch("group", 1, token="")) == rank_0.replica_id


def test_a_rank_without_the_token_of_its_group_is_told_so_and_not_led_on(port: int) -> None:
    rank_0 = launch("group", token="secret")
    with closing(announces(rank_0)), pytest.raises(AuthenticationError, match="Set the same TORCHFT_CKPT_TOKEN"):
        rank_0_found_by(hasty(launch("group", 1, token="guess")))


def hasty(started: RankConfig) -> RankConfig:
    """A rank that does not wait for its rank 0; to connect it has had all the time that it took."""
    assert started.group_store is not None
    started.group_store._timeout = timedelta(seconds=0.5)
    return started
