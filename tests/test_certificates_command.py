"""`certificates`: an authority, what it signs, and what is refused."""

from __future__ import annotations

import ssl
import stat
import sys
import urllib.request
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from torchft_ckpt import LighthouseServer
from torchft_ckpt.__main__ import main
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.tls import Tls


def made(directory: Path, *hosts: str) -> int:
    return main(["certificates", str(directory), *(word for host in hosts for word in ("--host", *host.split()))])


def tls_of(directory: Path, name: str) -> Tls:
    return Tls(str(directory / f"{name}.pem"), str(directory / f"{name}.key"), str(directory / "ca.pem"))


def test_each_host_gets_a_certificate_for_all_its_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "tls"
    assert made(there, "lighthouse 192.0.2.1 ::1", "*.train.default") == 0
    assert sorted(path.name for path in there.iterdir()) == [
        "_.train.default.key",
        "_.train.default.pem",
        "ca.key",
        "ca.pem",
        "lighthouse.key",
        "lighthouse.pem",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in there.glob("*.key")} == {0o600}
    tls = tls_of(there, "lighthouse")
    for name in ("lighthouse", "192.0.2.1", "::1"):
        tls.check_is_for(name)
    tls_of(there, "_.train.default").check_is_for("pod-0.train.default")
    with pytest.raises(ConfigError, match="is not for elsewhere"):
        tls.check_is_for("elsewhere")
    found = x509.load_pem_x509_certificate((there / "lighthouse.pem").read_bytes()).extensions
    uses = found.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert f"{there / 'ca.key'} to none" in capsys.readouterr().out


def test_a_strict_client_believes_them(tmp_path: Path) -> None:
    """Python's default from 3.13 on."""
    assert made(tmp_path, "127.0.0.1") == 0
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    server = LighthouseServer("127.0.0.1:0", 1, ssl_context=tls_of(tmp_path, "127.0.0.1").server)
    try:
        with urllib.request.urlopen(f"{server.address()}/healthz", context=context, timeout=60) as answer:
            assert answer.read() == b"ok\n"
    finally:
        server.shutdown()


def test_a_machine_that_comes_later_is_of_the_same_authority_and_no_file_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made(tmp_path, "a") == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert made(tmp_path, "b") == 0
    tls_of(tmp_path, "b").check_is_for("b")
    assert made(tmp_path, "c", "a") == 2
    assert f"{tmp_path / 'a.pem'} is there already, and nothing is overwritten; move it away" in capsys.readouterr().err
    assert not (tmp_path / "c.pem").exists()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "a/b"], "--host 'a/b' is no name and no address"),
        (["--host", "*.too-wide"], "--host '*.too-wide' is no name and no address"),
        (["--host", ""], "--host '' is no name and no address"),
        (["--host", "a", "--days", "0"], "--days is 0; expected 1 to 3650"),
        (["--host", "a", "--host", "a"], "one of a, a is there already"),
        (["--host", "ca"], "one of ca is there already"),
    ],
)
def test_what_cannot_be_made_is_named_and_nothing_is_made(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "tls"
    assert main(["certificates", str(there), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not there.exists()


def test_an_authority_that_is_no_such_and_a_folder_that_is_none_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert made(file, "a") == 2
    assert f"{file} cannot be used: File exists" in capsys.readouterr().err
    assert made(tmp_path / "x", "a") == 0
    assert made(tmp_path / "y", "a") == 0
    (tmp_path / "x/ca.key").write_bytes((tmp_path / "y/ca.key").read_bytes())
    assert made(tmp_path / "x", "b") == 2
    assert "are no authority of this command: they do not belong together" in capsys.readouterr().err
    (tmp_path / "x/ca.key").write_text("nothing")
    assert made(tmp_path / "x", "b") == 2
    assert "are no authority of this command" in capsys.readouterr().err


def test_without_cryptography_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert made(tmp_path / "tls", "a") == 2
    assert "making certificates needs cryptography; install torchft_ckpt[tls]" in capsys.readouterr().err
    assert not (tmp_path / "tls").exists()
