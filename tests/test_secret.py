"""Where the token comes from, who may read it, and what is said where there is none."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from torchft_ckpt import LighthouseServer, config, network
from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointing.fetching.connection import SourceConnection
from torchft_ckpt.checkpointing.protocol import SourceAddress
from torchft_ckpt.errors import ConfigError, SourceLostError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("from the file\n")
    return path


def token(argument: str | None, **environ: str) -> str:
    return config.resolve(argument, config.TOKEN, "", str, environ)


def test_the_argument_is_taken_then_the_variable_then_the_file(file: Path) -> None:
    both = {"TORCHFT_CKPT_TOKEN": "variable", "TORCHFT_CKPT_TOKEN_FILE": str(file)}
    assert token("argument", **both) == "argument"
    assert token(None, **both) == "variable"
    assert token(None, TORCHFT_CKPT_TOKEN_FILE=str(file)) == "from the file"
    assert token(None, TORCHFT_CKPT_TOKEN="", TORCHFT_CKPT_TOKEN_FILE=str(file)) == "from the file"
    assert token(None) == ""
    assert config.resolve(None, config.JOB, "default", str, {"TORCHFT_CKPT_TOKEN_FILE": str(file)}) == "default"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (b"one\ntwo\nthree\n", "more than one line"),
        (b"one\n\n", "more than one line"),
        (b"a" * 5000, "more than one line"),
        ("schl\u00fcssel".encode(), "printable ASCII"),
        (b"\xff\xfe", "it is no text"),
        (None, "No such file"),
    ],
    ids=["empty", "a newline", "three lines", "an empty line", "long", "not ASCII", "bytes", "absent"],
)
def test_a_file_that_cannot_be_used_is_named_with_what_named_it(file: Path, content: bytes | None, why: str) -> None:
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as raised:
        token(None, TORCHFT_CKPT_TOKEN_FILE=str(file))
    assert str(file) in str(raised.value)
    assert "TORCHFT_CKPT_TOKEN_FILE" in str(raised.value)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_newline_at_the_end_is_no_part_of_it_as_a_secret_of_kubernetes_has_one(end: str) -> None:
    assert token(None, TORCHFT_CKPT_TOKEN=f"hidden{end}") == token(f"hidden{end}") == "hidden"


@pytest.mark.parametrize("text", ["hidden\nword", "hidden\n\n", "hidden\x00", "hidden\u00fc", "\n"])
def test_one_that_no_header_can_hold_is_refused_and_not_quoted(text: str) -> None:
    for said in ({"TORCHFT_CKPT_TOKEN": text}, {}):
        with pytest.raises(ConfigError, match="cannot be used") as raised:
            token(None if said else text, **said)
        assert "hidden" not in str(raised.value)


def test_what_no_header_can_hold_is_quoted_by_no_error_of_a_transfer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = SourceAddress("127.0.0.1", listener.getsockname()[1])
        connection = SourceConnection(
            where, headers={"Authorization": "Bearer hidden\n"}, connect_timeout_s=5, stall_timeout_s=60
        )
        with pytest.raises(SourceLostError, match="ValueError") as raised:
            connection.get("/v1/checkpoint")
        connection.release()
    assert "hidden" not in str(raised.value)


def test_a_file_that_others_may_read_is_named_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert config.read_secret(str(file), "--token-file") == "from the file"
    assert not caplog.records
    file.chmod(0o640)
    for _ in range(2):
        assert config.read_secret(str(file), "--token-file") == "from the file"
    (record,) = caplog.records
    assert f"others than its owner may read the token in {file}" in record.message


def test_a_token_changes_while_the_process_runs(file: Path) -> None:
    first = token(None, TORCHFT_CKPT_TOKEN_FILE=str(file))
    for content, shown, accepted in [
        ("from the file\nnew\n", "from the file", ["from the file", "new"]),
        ("new\r\nfrom the file\r\n", "new", ["new", "from the file"]),
        ("", "new", ["new", "from the file"]),  # it is being written
        (None, "new", ["new", "from the file"]),
        ("new\n", "new", ["new"]),
    ]:
        if content is None:
            file.unlink()
        else:
            file.with_name("next").write_text(content)
            file.with_name("next").replace(file)
        assert config.secrets(first) == accepted and accepted[0] == shown
        of_all = ["from the file", "new", "other"]
        assert [secret for secret in of_all if network.bearer_matches(f"Bearer {secret}", first)] == sorted(accepted)
    assert token(None, TORCHFT_CKPT_TOKEN_FILE=str(file)) == "new"
    assert config.secrets("argument") == ["argument"]


def test_a_file_is_followed_into_another_directory_and_named_once_when_it_is_gone(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    first = token(None, TORCHFT_CKPT_TOKEN_FILE="token")
    assert config.environment_of(first) == {"TORCHFT_CKPT_TOKEN": "", "TORCHFT_CKPT_TOKEN_FILE": str(file)}
    assert config.environment_of("argument") == {"TORCHFT_CKPT_TOKEN": "argument"}
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    file.write_text("changed\n")
    assert config.secrets(first) == ["changed"]
    file.unlink()
    assert config.secrets(first) == config.secrets(first) == ["changed"]
    (record,) = caplog.records
    assert f"the token's file {file} cannot be read (No such file or directory)" in record.message


def test_a_command_reads_it_from_a_file_and_says_that_ps_shows_an_argument(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, token="from the file")
    asks = ["status", "--lighthouse", server.address()]
    assert main([*asks, "--token-file", str(file)]) == 0
    assert main(asks) == 1
    capsys.readouterr()
    for arguments in (["--token-file", os.devnull], ["--token-file", str(file), "--token", "x"]):
        with pytest.raises(SystemExit) as ended:
            main([*asks, *arguments])
        assert ended.value.code == 2
    assert f"argument --token-file: the file {os.devnull!r} that --token-file names" in (
        said := capsys.readouterr().err
    )
    assert "it is empty" in said
    for command in ("lighthouse", "status", "inspect"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "sees it in `ps`" in " ".join(capsys.readouterr().out.split())
    server.shutdown()


def test_a_service_that_is_open_to_all_is_named_once_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "_has_logged_open", False)
    caplog.set_level(logging.WARNING)
    for host, secret in (("127.0.0.1", ""), ("::1", None), ("localhost", ""), ("0.0.0.0", "secret")):
        network.warn_if_open("the lighthouse", host, secret)
    assert not caplog.records
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "trainer-7"):
        network.warn_if_open("the lighthouse", host, "")
    (record,) = caplog.records
    assert "the lighthouse listens on 0.0.0.0 without a token: whoever can connect" in record.message
    assert "TORCHFT_CKPT_TOKEN_FILE" in record.message


def test_any_open_address_of_a_name_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where a hosts file gives the machine's name 127.0.0.1 first."""
    monkeypatch.setattr(network, "_has_logged_open", False)
    with socket.socket() as local, socket.socket() as everywhere:
        local.bind(("127.0.0.1", 0))
        everywhere.bind(("0.0.0.0", 0))
        monkeypatch.setattr(network, "listen", lambda *_: [local, everywhere])
        network.listen_as("the lighthouse", "node7", 0, 8, "")
    assert "the lighthouse listens on 0.0.0.0 without a token" in caplog.text


def test_a_lighthouse_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(network, "_has_logged_open", False)
    monkeypatch.delenv("TORCHFT_CKPT_TOKEN", raising=False)
    LighthouseServer("127.0.0.1:0", min_replicas=1).shutdown()
    assert "without a token" not in caplog.text
    LighthouseServer("0.0.0.0:0", min_replicas=1).shutdown()
    assert "the lighthouse listens on 0.0.0.0 without a token" in caplog.text
