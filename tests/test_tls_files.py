"""The files that the configuration names: what is said of each that cannot be used, and that a renewed one is taken up."""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from support.certificates import VARIABLES, Files

from torchft_ckpt.errors import ConfigError
from torchft_ckpt.tls import Tls, resolve_tls

LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
AUTHORITY, STRANGER = trustme.CA(), trustme.CA()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, AUTHORITY)


def tls_of(files: Files) -> Tls:
    return Tls(*files.variables().values())


def served(tls: Tls, client: ssl.SSLContext | None = None) -> bytes:
    """Return the certificate that a server of these files shows now to one that connects."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with contextlib.suppress(OSError):  # the client does not believe it
            tls.server().wrap_socket(theirs, server_side=True).close()

    with ours, theirs:
        thread = threading.Thread(target=serve)
        thread.start()
        with (client or tls.client()).wrap_socket(ours, server_hostname="127.0.0.1") as secured:
            shown = secured.getpeercert(binary_form=True)
        thread.join(60)
    assert shown is not None
    return shown


def der(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def test_without_variables_nothing_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert resolve_tls() is None


def test_the_variables_are_those_of_an_argument_that_is_not_given(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in files.variables().items():
        monkeypatch.setenv(name, value)
    found = resolve_tls()
    assert found is not None and found is resolve_tls(*files.variables().values())
    assert found.environment() == files.variables()


# ------------------------------------------------------------------------------------------------------- bad input


def without(files: Files, name: str) -> Tls:
    named = {**files.variables(), name: ""}
    return Tls(*(named[variable] for variable in VARIABLES))


def replaced(files: Files, path: Path, text: bytes) -> Tls:
    path.write_bytes(text)
    return tls_of(files)


BAD: dict[str, tuple[Callable[[Files], object], str]] = {
    "no key": (
        lambda files: without(files, VARIABLES[1]),
        "TORCHFT_CKPT_TLS_CERT is set and TORCHFT_CKPT_TLS_KEY is not; set both",
    ),
    "no certificate": (
        lambda files: without(files, VARIABLES[0]),
        "TORCHFT_CKPT_TLS_KEY is set and TORCHFT_CKPT_TLS_CERT is not",
    ),
    "the key is not there": (
        lambda files: (files.key.unlink(), tls_of(files)),
        r"host.key cannot be used as TORCHFT_CKPT_TLS_KEY \(--tls-[a-z]+\): No such file",
    ),
    "the authority is a directory": (
        lambda files: Tls(str(files.certificate), str(files.key), str(files.key.parent)),
        r"cannot be used as TORCHFT_CKPT_TLS_CA \(--tls-[a-z]+\): Is a directory",
    ),
    "the certificate is binary": (
        lambda files: replaced(files, files.certificate, b"\x30\x82\xff\xfe"),
        r"host.pem cannot be used as TORCHFT_CKPT_TLS_CERT \(--tls-[a-z]+\): it holds no certificate in PEM",
    ),
    "the key is a certificate": (
        lambda files: replaced(files, files.key, files.certificate.read_bytes()),
        r"host.key cannot be used as TORCHFT_CKPT_TLS_KEY \(--tls-[a-z]+\): it holds no private key in PEM",
    ),
    "the key is encrypted": (
        lambda files: replaced(files, files.key, b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n"),
        "it is encrypted, and nobody is asked for a password",
    ),
    "the key is of another certificate": (
        lambda files: replaced(files, files.key, AUTHORITY.issue_cert("127.0.0.1").private_key_pem.bytes()),
        r"host.key cannot be used as TORCHFT_CKPT_TLS_KEY \(--tls-[a-z]+\): it is not that of .*host.pem; give the one",
    ),
    "the authority is cut off": (
        lambda files: replaced(files, files.authority, files.authority.read_bytes()[:200]),
        "ca.pem cannot be used as TORCHFT_CKPT_TLS_CA",
    ),
    "expired": (
        lambda files: (files.renew(AUTHORITY, not_after=LONG_AGO), tls_of(files)),
        r"host.pem \(TORCHFT_CKPT_TLS_CERT\) does not verify with .*ca.pem .*expired; make a new one",
    ),
    "of another authority": (
        lambda files: (files.renew(STRANGER), tls_of(files)),
        r"host.pem \(TORCHFT_CKPT_TLS_CERT\) does not verify with .*ca.pem .*signed by that authority",
    ),
    "a server without a certificate": (
        lambda files: Tls("", "", str(files.authority)).server(),
        "TORCHFT_CKPT_TLS_CA is set, and this process serves, too; set TORCHFT_CKPT_TLS_CERT and",
    ),
    "for another address": (
        lambda files: tls_of(files).check_is_for("192.0.2.7"),
        r"host.pem \(TORCHFT_CKPT_TLS_CERT\) is not for 192.0.2.7, which peers are told .* set TORCHFT_CKPT_HOSTNAME",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_used_is_named_with_its_variable_and_what_to_do(files: Files, what: str) -> None:
    make, said = BAD[what]
    with pytest.raises(ConfigError, match=said) as raised:
        make(files)
    assert (raised.value.party or "").startswith("TORCHFT_CKPT_TLS_")


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(files: Files) -> None:
    files.key.chmod(0)
    with pytest.raises(
        ConfigError, match=r"host.key cannot be used as TORCHFT_CKPT_TLS_KEY \(--tls-[a-z]+\): Permission denied"
    ):
        tls_of(files)


def test_a_key_that_others_may_read_is_warned_of(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.key.chmod(0o640)
    tls_of(files)
    assert f"others than its owner may read the private key in {files.key}; `chmod 600`" in caplog.text


def test_a_certificate_of_an_authority_that_only_others_know_is_served_with(tmp_path: Path) -> None:
    files = Files(tmp_path, AUTHORITY)
    tls = Tls(str(files.certificate), str(files.key), "")
    tls.check_is_for("192.0.2.7")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    AUTHORITY.configure_trust(client)
    assert served(tls, client) == der(files.certificate.read_bytes())


# --------------------------------------------------------------------------------------------------------- renewal


def test_a_renewed_certificate_is_shown_to_the_next_that_connects(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    tls = tls_of(files)
    first = served(tls)
    with caplog.at_level(logging.INFO, "torchft_ckpt.tls"):
        renewed = der(files.renew(AUTHORITY))
        assert served(tls) == renewed != first
        assert served(tls) == renewed
    assert caplog.text.count("was read again: new connections use it") == 1


def test_a_certificate_is_renewed_by_a_link_as_kubernetes_does_it(tmp_path: Path) -> None:
    """The files of a mounted Secret are links through `..data`, a link to a directory that is replaced by another."""
    for number in (1, 2):
        Files(tmp_path / f"..{number}", AUTHORITY)
    (tmp_path / "..data").symlink_to("..1")
    for name in ("host.pem", "host.key", "ca.pem"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    tls = Tls(*(str(tmp_path / name) for name in ("host.pem", "host.key", "ca.pem")))
    assert served(tls) == der((tmp_path / "..1/host.pem").read_bytes())
    (tmp_path / "..data_tmp").symlink_to("..2")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    assert served(tls) == der((tmp_path / "..2/host.pem").read_bytes())


@pytest.mark.parametrize("half", ["cut off", "the key comes later", "it is not there for a while", "expired"])
def test_while_files_are_written_the_old_ones_count_with_one_warning(
    files: Files, half: str, caplog: pytest.LogCaptureFixture
) -> None:
    tls = tls_of(files)
    first = served(tls)
    key = files.key.read_bytes()
    if half == "expired":
        files.renew(AUTHORITY, not_after=LONG_AGO)
    elif half == "the key comes later":
        files.renew(AUTHORITY)
        new_key = files.key.rename(files.key.with_suffix(".later"))
        files.key.write_bytes(key)
    elif half == "cut off":
        files.certificate.write_bytes(files.certificate.read_bytes()[:100])
    else:
        files.certificate.unlink()
    assert [served(tls) for _ in range(3)] == [first] * 3
    files.authority.write_bytes(
        files.authority.read_bytes() + b"\n"
    )  # it is looked at again, and still it is not whole
    assert served(tls) == first
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "connections are made with the certificate that was read last" in warnings[0]
    if half == "the key comes later":
        new_key.replace(files.key)
        renewed = der(files.certificate.read_bytes())
    else:
        renewed = der(files.renew(AUTHORITY))
    assert served(tls) == renewed != first


@pytest.mark.parametrize(("hours", "is_soon"), [(3, False), (2, True)])  # of a day
def test_a_certificate_that_expires_soon_is_warned_of_until_it_is_renewed(
    tmp_path: Path, hours: int, is_soon: bool, caplog: pytest.LogCaptureFixture
) -> None:
    not_after = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=hours)
    files = Files(tmp_path, AUTHORITY, not_after=not_after)
    tls = tls_of(files)
    for _ in range(3):
        served(tls)
    told = [record.getMessage() for record in caplog.records if "expires on" in record.getMessage()]
    assert len(told) == is_soon and all(f"{not_after:%b}" in line and str(files.certificate) in line for line in told)
    caplog.clear()
    files.renew(AUTHORITY)
    served(tls)
    assert not any("expires on" in record.getMessage() for record in caplog.records)


def test_files_that_could_not_be_used_are_read_again_though_they_are_the_same(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There were too many open files, say, or the certificate was not valid yet."""
    tls, now = tls_of(files), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    first = served(tls)
    renewed = der(files.renew(AUTHORITY))
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(ssl.SSLContext, "load_cert_chain", full)
        assert served(tls) == first
        now += 60
        assert served(tls) == first
    assert served(tls) == first, "it is not tried at each connection"
    now += 60
    assert served(tls) == renewed
    assert caplog.text.count("Too many open files") == 1


def test_a_certificate_that_is_not_valid_yet_is_a_matter_of_the_clock(files: Files) -> None:
    far = datetime.datetime(2124, 1, 1, tzinfo=datetime.timezone.utc)
    files.renew(AUTHORITY, not_after=far)
    with pytest.raises(ConfigError, match=r"not yet valid; set this machine's clock"):
        tls_of(files)


def test_a_client_believes_a_new_authority_and_shows_a_new_certificate(files: Files, tmp_path: Path) -> None:
    """First all believe both authorities, then each has a certificate of the new one, then the old one goes."""
    other = Files(tmp_path / "other", STRANGER)
    server, client = tls_of(other), tls_of(files)
    with pytest.raises(ssl.SSLCertVerificationError):
        served(server, client.client())
    for each in (files, other):
        each.authority.write_bytes(AUTHORITY.cert_pem.bytes() + STRANGER.cert_pem.bytes())
    assert served(server, client.client()) == der(other.certificate.read_bytes())
    files.renew(STRANGER)
    for each in (files, other):
        each.authority.write_bytes(STRANGER.cert_pem.bytes())
    assert served(server, client.client()) == der(other.certificate.read_bytes())
    assert served(client, server.client()) == der(files.certificate.read_bytes())
