"""`inspect` and `pull` against a live transport: what people see, and what is in the file."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trustme
from safetensors import safe_open
from safetensors.torch import load_file
from support import command_line
from support.certificates import server_context
from support.nursery import Forked
from support.ports import reserved_port
from support.processes import note

from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.resharding.peers import JobPeers
from torchft_ckpt.cli.output import format_bytes
from torchft_ckpt.cli.safetensors_file import SafetensorsFile, flatten, unused_name
from torchft_ckpt.errors import CheckpointError, ConfigError, TransferTimeoutError
from torchft_ckpt.testing.transport_conformance import differences, example_state

LONG = timedelta(seconds=60)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def make_peer() -> Iterator[Callable[..., HTTPTransport[Any]]]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> HTTPTransport[Any]:
            transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", **options)
            stack.callback(transport.shutdown)
            return transport

        yield make


@pytest.fixture
def peer(make_peer: Callable[..., HTTPTransport[Any]]) -> HTTPTransport[Any]:
    """A peer that serves step 3 to one receiver."""
    transport = make_peer()
    transport.send_checkpoint([1], 3, example_state(3), LONG)
    return transport


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def metadata_of(path: Path) -> dict[str, Any]:
    """The metadata that is ours, decoded."""
    with safe_open(path, "pt") as file:
        found = file.metadata()
    return {key: json.loads(value) for key, value in found.items() if key.startswith("torchft_ckpt.")}


# inspect


def test_inspect_prints_a_page_about_the_newest_state(peer: HTTPTransport[Any], capsys: Capture) -> None:
    assert main(["inspect", peer.metadata(), "--tensors", "3"]) == 0
    first, *page = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{peer.metadata()} serves step 3 (state format 4, snapshot ")
    assert page == [
        "  size     1.14 MiB in 1 block of 4.00 MiB",
        "  served   to 0 receivers, out of the trainer's memory",
        "  tensors  6: 5 float32, 1 bfloat16",
        "    user.model.weight           float32  [300, 500]  585.94 KiB",
        "    user.optim.state.0.exp_avg  float32  [300, 500]  585.94 KiB",
        "    user.model.transposed       float32  [5, 6]           120 B",
        "    and 3 more, none larger",
        "  values   9, such as",
        "    torchft.step = 3",
        "    torchft.batches_committed = 6",
        "    user.optim.param_groups.0.lr = 0.001",
        "    user.optim.param_groups.0.foreach = None",
        "    user.optim.param_groups.0.fused = False",
        "    user.optim.param_groups.0.betas.0 = 0.9",
        "    user.optim.param_groups.0.betas.1 = 0.999",
        "    user.optim.param_groups.0.params.0 = 0",
    ]


def test_inspect_names_the_other_states_that_are_served(peer: HTTPTransport[Any], capsys: Capture) -> None:
    peer.disallow_checkpoint()
    peer.send_checkpoint([1], 4, {"weight": torch.zeros(4)}, LONG)
    assert main(["inspect", peer.metadata()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "serves step 4 " in lines[0]
    assert lines[-1] == "also step 3: 1.14 MiB, 6 tensors, to 0 receivers, out of copies, the trainer has gone on"


def test_names_of_a_peer_do_nothing_to_the_terminal(
    make_peer: Callable[..., HTTPTransport[Any]], capsys: Capture
) -> None:
    peer = make_peer()
    peer.send_checkpoint([1], 1, {"\x1b]0;owned\x07\nstep 9": torch.zeros(2), "a\rb": 1}, LONG)
    assert main(["inspect", peer.metadata()]) == 0
    page = capsys.readouterr().out
    assert all(line.isprintable() for line in page.splitlines())
    assert "\\x1b]0;owned\\x07\\nstep 9" in page and "a\\rb = 1" in page


def test_inspect_keeps_nothing_at_the_peer(peer: HTTPTransport[Any], capsys: Capture) -> None:
    for _ in range(2):
        assert main(["inspect", peer.metadata()]) == 0
        assert "to 0 receivers" in capsys.readouterr().out


def test_inspect_says_that_nothing_was_ever_served(
    make_peer: Callable[..., HTTPTransport[Any]], capsys: Capture
) -> None:
    url = make_peer().metadata()
    assert main(["inspect", url]) == 0
    assert capsys.readouterr().out.startswith(f"{url} serves no state now; it has served none yet.\n")


def test_inspect_says_which_step_was_the_newest(peer: HTTPTransport[Any], capsys: Capture) -> None:
    peer.withdraw_checkpoint()
    assert main(["inspect", peer.metadata()]) == 0
    assert "serves no state now; the newest it served was step 3.\n" in capsys.readouterr().out
    assert main(["inspect", peer.metadata(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"url": peer.metadata(), "newest_step": 3, "snapshots": []}


def test_inspect_can_wait_for_a_state(make_peer: Callable[..., HTTPTransport[Any]], capsys: Capture) -> None:
    transport = make_peer()
    with ThreadPoolExecutor(1) as pool:
        inspecting = pool.submit(main, ["inspect", transport.metadata(), "--wait", "30"])
        transport.send_checkpoint([1], 7, example_state(7), LONG)
        assert inspecting.result(30) == 0
    assert "serves step 7 " in capsys.readouterr().out


def test_inspect_that_waited_in_vain_fails(make_peer: Callable[..., HTTPTransport[Any]], capsys: Capture) -> None:
    url = make_peer().metadata()
    assert main(["inspect", url, "--wait", "0.2"]) == 1
    assert f"{url} did not serve a state within the timeout" in capsys.readouterr().err


def test_inspect_prints_json_for_programs(peer: HTTPTransport[Any], capsys: Capture) -> None:
    assert main(["inspect", peer.metadata(), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    state = told["state"]
    assert (told["url"], told["newest_step"], told["snapshots"][0]["step"]) == (peer.metadata(), 3, 3)
    assert (state["step"], state["num_tensors"], len(state["tensors"])) == (3, 6, 6)
    assert state["tensors"][0] == {
        "name": "user.model.weight",
        "dtype": "float32",
        "shape": [300, 500],
        "boxes": [{"offsets": [0, 0], "sizes": [300, 500]}],
        "bytes": 600_000,
    }
    assert state["values"]["torchft.batches_committed"] == 6


def test_a_token_is_wanted_where_there_is_one(make_peer: Callable[..., HTTPTransport[Any]], capsys: Capture) -> None:
    transport = make_peer(token="secret")
    transport.send_checkpoint([1], 3, example_state(3), LONG)
    assert main(["inspect", transport.metadata(), "--token", "guess"]) == 1
    assert "401 unauthorized" in capsys.readouterr().err
    assert main(["inspect", transport.metadata(), "--token", "secret"]) == 0


def test_the_token_may_come_from_the_environment(
    make_peer: Callable[..., HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_TOKEN", "secret")
    assert main(["inspect", make_peer().metadata()]) == 0


def test_a_certificate_is_checked_with_the_authority_that_is_named(
    make_peer: Callable[..., HTTPTransport[Any]], tmp_path: Path, capsys: Capture
) -> None:
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    transport = make_peer(ssl_context=server_context(authority, "127.0.0.1"))
    transport.send_checkpoint([1], 3, example_state(3), LONG)
    assert main(["inspect", transport.metadata()]) == 1
    assert "certificate" in capsys.readouterr().err
    assert main(["inspect", transport.metadata(), "--ca", str(ca)]) == 0
    path = tmp_path / "state.safetensors"
    assert main(["pull", transport.metadata(), "--ca", str(ca), "-o", str(path), "--quiet"]) == 0
    assert len(load_file(path)) == 6
    plain = transport.metadata().replace("https", "http")
    assert main(["inspect", plain, "--ca", str(ca)]) == 2
    assert f"{plain} is plain http, and TLS is set up here; use https://HOST:PORT" in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_named(tmp_path: Path, capsys: Capture) -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        for command in (["inspect", url], ["pull", url, "-o", str(tmp_path / "state.safetensors")]):
            assert main(command) == 1
            assert f"source {url} does not accept connections" in capsys.readouterr().err
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://127.0.0.1:1"], "url='ftp://127.0.0.1:1' cannot be used"),
        (["127.0.0.1"], "url='127.0.0.1' cannot be used"),
        (
            ["https://127.0.0.1:1", "--ca", "/no/such/ca.pem"],
            "the file /no/such/ca.pem cannot be used as TORCHFT_CKPT_TLS_CA",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["inspect", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_lengths_are_written_for_people() -> None:
    lengths = [0, 1023, 1024, 1536, 1024**2 - 1, 1024**2, 5 * 1024**3, 2000 * 1024**4]
    assert [format_bytes(length) for length in lengths] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 KiB",
        "1.00 MiB",
        "1.00 MiB",
        "5.00 GiB",
        "2000.00 TiB",
    ]


# pull


def test_pull_saves_every_tensor_and_value_by_its_path(
    peer: HTTPTransport[Any], tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "state.safetensors"
    assert main(["pull", peer.metadata(), "-o", str(path)]) == 0
    state = example_state(3)
    expected = {
        "model.weight": state["user"]["model"]["weight"],
        "model.bias": state["user"]["model"]["bias"],
        "model.empty": state["user"]["model"]["empty"],
        "model.transposed": state["user"]["model"]["transposed"],
        "optim.state.0.step": state["user"]["optim"]["state"][0]["step"],
        "optim.state.0.exp_avg": state["user"]["optim"]["state"][0]["exp_avg"],
    }
    loaded = load_file(path)
    assert differences({name: loaded[name] for name in expected}, expected) == []
    assert len(loaded) == len(expected)
    assert metadata_of(path) == {
        "torchft_ckpt.step": 3,
        "torchft_ckpt.tied": {},
        "torchft_ckpt.arrays": [],
        "torchft_ckpt.values": {
            "optim.param_groups.0.lr": 0.001,
            "optim.param_groups.0.betas.0": 0.9,
            "optim.param_groups.0.betas.1": 0.999,
            "optim.param_groups.0.params.0": 0,
            "optim.param_groups.0.params.1": 1,
            "optim.param_groups.0.foreach": None,
            "optim.param_groups.0.fused": False,
        },
    }
    told = capsys.readouterr()
    assert told.out == ""
    assert f"asking {peer.metadata()} for the newest state\n" in told.err
    assert "step 3: 100%" in told.err
    assert told.err.endswith(f"{path}: step 3, 6 tensors, 7 values, {format_bytes(path.stat().st_size)}\n")


def test_names_begin_where_pull_is_told_to_begin(peer: HTTPTransport[Any], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "state.safetensors"
    names = {}
    for root in ("user.model", ""):
        assert main(["pull", peer.metadata(), "-o", str(path), "--root", root, "--force", "--quiet"]) == 0
        names[root] = sorted(load_file(path))[:2]
    assert names == {"user.model": ["bias", "empty"], "": ["user.model.bias", "user.model.empty"]}
    assert metadata_of(path)["torchft_ckpt.values"]["torchft.batches_committed"] == 6
    assert main(["pull", peer.metadata(), "-o", str(path), "--root", "user.mine", "--force"]) == 1
    assert "nothing is at root='user.mine': below user there is model, optim" in capsys.readouterr().err
    assert sorted(load_file(path)), "what was there stays"


def test_a_quiet_pull_leaves_one_file_with_ordinary_permissions_and_prints_nothing(
    peer: HTTPTransport[Any], tmp_path: Path, capsys: Capture
) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert main(["pull", peer.metadata(), "-o", str(tmp_path / "state.safetensors"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert files_in(tmp_path) == ["ordinary", "state.safetensors"]
    assert stat.S_IMODE((tmp_path / "state.safetensors").stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_pull_waits_for_a_state(make_peer: Callable[..., HTTPTransport[Any]], tmp_path: Path) -> None:
    transport = make_peer()
    path = tmp_path / "state.safetensors"
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(main, ["pull", transport.metadata(), "-o", str(path), "--quiet"])
        transport.send_checkpoint([1], 7, example_state(7), LONG)
        assert pulling.result(30) == 0
    assert metadata_of(path)["torchft_ckpt.step"] == 7


def test_pull_of_a_step_that_is_over_is_refused(peer: HTTPTransport[Any], tmp_path: Path, capsys: Capture) -> None:
    assert main(["pull", peer.metadata(), "-o", str(tmp_path / "state.safetensors"), "--step", "2"]) == 1
    assert "409 over" in capsys.readouterr().err
    assert files_in(tmp_path) == []


def test_a_file_that_is_there_is_replaced_only_by_force(
    peer: HTTPTransport[Any], tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "state.safetensors"
    path.write_text("precious")
    assert main(["pull", peer.metadata(), "-o", str(path)]) == 2
    assert f"{path} is there already; --force replaces it" in capsys.readouterr().err
    assert path.read_text() == "precious"
    assert main(["pull", peer.metadata(), "-o", str(path), "--force"]) == 0
    assert len(load_file(path)) == 6


def test_a_file_that_comes_while_the_state_is_fetched_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(ConfigError, match="is there already"), SafetensorsFile(path, force=False) as file:
        path.write_text("precious")
        file.write(flatten({"weight": torch.zeros(4)}), 3)
    assert (files_in(tmp_path), path.read_text()) == (["state.safetensors"], "precious")


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_comes_at_the_last_moment_is_not_replaced(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    link = os.link

    def late(old: Path, new: Path) -> None:
        path.write_text("precious")
        if not links:
            raise PermissionError(1, "no links here")
        link(old, new)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ConfigError, match="is there already"), SafetensorsFile(path, force=False) as file:
        file.write(flatten({"weight": torch.zeros(4)}), 3)
    assert (files_in(tmp_path), path.read_text()) == (["state.safetensors"], "precious")


def test_a_file_system_needs_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(old: Path, new: Path) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", link)
    with SafetensorsFile(tmp_path / "state.safetensors", force=False) as file:
        file.write(flatten({"weight": torch.zeros(4)}), 3)
    assert load_file(tmp_path / "state.safetensors")["weight"].tolist() == [0.0] * 4


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_nothing_is_written_to_what_comes_to_the_place_of_the_temporary_file(
    tmp_path: Path, force: bool, kind: str
) -> None:
    """The state may come minutes after the file was made, and others may write to the directory."""
    (tmp_path / "out").mkdir()
    outside = tmp_path / "precious"
    outside.write_text("precious")
    with (
        pytest.raises(CheckpointError, match="somebody else has replaced"),
        SafetensorsFile(tmp_path / "out/state.safetensors", force=force) as file,
    ):
        (temporary,) = (tmp_path / "out").iterdir()
        temporary.unlink()
        temporary.symlink_to(outside) if kind == "link" else temporary.write_text("another")
        file.write(flatten({"weight": torch.zeros(4)}), 3)
    assert (outside.read_text(), files_in(tmp_path / "out")) == ("precious", [])


def test_a_pull_that_is_terminated_leaves_nothing_behind(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(
        functools.partial(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.SIG_DFL))
    )
    with pytest.raises(SystemExit) as ended, SafetensorsFile(tmp_path / "state.safetensors", force=False):
        assert len(files_in(tmp_path)) == 1
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)  # the signal comes before
    assert ended.value.code == 143 and files_in(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_place_that_cannot_be_written_to_is_known_before_anybody_is_asked(tmp_path: Path, capsys: Capture) -> None:
    with reserved_port() as port:
        nobody = f"http://127.0.0.1:{port}"
        assert main(["pull", nobody, "-o", str(tmp_path / "missing" / "state.safetensors")]) == 2
        assert "state.safetensors cannot be written: No such file or directory" in capsys.readouterr().err
        assert main(["pull", nobody, "-o", str(tmp_path)]) == 2
        assert "is a directory" in capsys.readouterr().err


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a length, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_leaves_nothing_behind(peer: HTTPTransport[Any], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "state.safetensors"
    with largest_file(300_000):
        code = main(["pull", peer.metadata(), "-o", str(path), "--quiet"])
    assert (code, files_in(tmp_path)) == (1, [])
    assert f"{path} could not be written" in capsys.readouterr().err


def test_a_dtype_that_safetensors_cannot_hold_is_named(
    make_peer: Callable[..., HTTPTransport[Any]], tmp_path: Path, capsys: Capture
) -> None:
    transport = make_peer()
    state = {"model": {"fine": torch.zeros(2), "rotary": torch.zeros(2, dtype=torch.complex128)}}
    transport.send_checkpoint([1], 3, state, LONG)
    assert main(["pull", transport.metadata(), "-o", str(tmp_path / "state.safetensors"), "--quiet"]) == 1
    assert "tensor 'model.rotary': safetensors cannot hold dtype complex128" in capsys.readouterr().err
    assert files_in(tmp_path) == []


def test_tied_tensors_are_stored_under_each_name_and_named(
    make_peer: Callable[..., HTTPTransport[Any]], tmp_path: Path, capsys: Capture
) -> None:
    transport, path = make_peer(), tmp_path / "state.safetensors"
    weight = torch.randn(8, 4)
    transport.send_checkpoint([1], 3, {"embed": weight, "head": weight, "rows": weight[2:4], "other": weight + 1}, LONG)
    assert main(["pull", transport.metadata(), "-o", str(path)]) == 0
    loaded = load_file(path)
    expected = {"embed": weight, "head": weight, "other": weight + 1, "rows": weight[2:4]}
    assert differences({name: loaded[name] for name in sorted(loaded)}, expected) == []
    assert metadata_of(path)["torchft_ckpt.tied"] == {"head": "embed"}
    assert "4 tensors (1 of them tied to another), 0 values" in capsys.readouterr().err


def test_a_peer_that_drips_its_answer_is_left_at_the_deadline() -> None:
    ended_by: list[str] = []

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
                for _ in range(500):
                    connection.sendall(b"a")
                    time.sleep(0.02)
                ended_by.append("itself")
            except OSError:
                ended_by.append("the client")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        client = JobPeers([[f"127.0.0.1:{listener.getsockname()[1]}"]])
        with pytest.raises(TransferTimeoutError, match="did not serve the index within the timeout"):
            client.index(timeout=timedelta(seconds=0.3))
        thread.join(60)
    assert ended_by == ["the client"]


@pytest.mark.processes
def test_whoever_reads_the_output_may_stop_early(peer: HTTPTransport[Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as errors:
        script = Path(command_line.__file__)
        process = Forked(script, ["inspect", peer.metadata()], dict(os.environ), errors.fileno(), ends_whole=True)
    note("inspect", process, log)
    process.stdout.close()
    assert process.wait(120) == 1
    assert log.read_text() == ""


# What a state becomes in a file


def test_values_that_json_does_not_know_are_nodes_of_the_state_format() -> None:
    state = {"loss": float("nan"), "data": b"\x00\xff", "dtype": torch.bfloat16, "shape": torch.Size([2]), "none": {}}
    assert flatten(state).values == {
        "loss": {"f": "7ff8000000000000"},
        "data": {"b": "AP8="},
        "dtype": {"y": "bfloat16"},
        "shape": {"s": [2]},
        "none": {"d": []},
    }


def test_arrays_are_stored_as_tensors_and_named() -> None:
    content = flatten({"history": np.arange(3), "weight": torch.zeros(2)})
    assert (content.arrays, sorted(content.tensors)) == (["history"], ["history", "weight"])


def test_no_leaf_is_lost_where_two_have_the_same_path() -> None:
    content = flatten({"a.b": 1, "a": {"b": 2}, 0: torch.zeros(1), "0": torch.ones(1)})
    assert (content.values, list(content.tensors)) == ({"a.b": 1, "a.b#2": 2}, ["0", "0#2"])


def test_a_tensor_that_has_safetensors_own_name_gets_another(
    make_peer: Callable[..., HTTPTransport[Any]], tmp_path: Path, capsys: Capture
) -> None:
    peer = make_peer()
    peer.send_checkpoint([1], 3, {"__metadata__": torch.ones(2), "b": torch.zeros(3)}, LONG)
    path = tmp_path / "state.safetensors"
    assert main(["pull", peer.metadata(), "-o", str(path), "--quiet"]) == 0
    assert {name: tensor.tolist() for name, tensor in load_file(path).items()} == {
        "__metadata__#2": [1.0, 1.0],
        "b": [0.0, 0.0, 0.0],
    }
    assert (
        capsys.readouterr().err
        == "__metadata__ is called __metadata__#2 in the file: __metadata__ is safetensors' own name\n"
    )


def test_paths_that_are_alike_are_numbered_without_counting_from_one_each_time() -> None:
    taken: dict[str, int] = {}
    names = [unused_name(path, taken) for path in ("a", "a#2", "a", "a", "b", "a#2", *["a"] * 200_000)]
    assert (names[:6], names[-1]) == (["a", "a#2", "a#3", "a#4", "b", "a#2#2"], "a#200004")


def test_a_state_that_is_one_tensor_has_a_name() -> None:
    assert list(flatten(torch.zeros(2)).tensors) == ["state"]


def test_empty_tensors_are_not_taken_for_tied_ones() -> None:
    content = flatten({"a": torch.empty(0), "b": torch.empty(0)})
    assert (list(content.tensors), content.tied) == (["a", "b"], {})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
    ids=str,
)
def test_dtypes_that_safetensors_holds_come_back_in_every_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).remainder(2).to(dtype)
    path = tmp_path / "state.safetensors"
    with SafetensorsFile(path, force=False) as file:
        file.write(flatten({"x": tensor, "scalar": tensor[0, 0, 1], "column": tensor[..., 1]}), 3)
    assert (
        differences(
            dict(sorted(load_file(path).items())), {"column": tensor[..., 1], "scalar": tensor[0, 0, 1], "x": tensor}
        )
        == []
    )
