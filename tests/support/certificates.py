"""TLS for tests: authorities made up on the spot, and what they sign, as contexts and as files."""

from __future__ import annotations

import datetime
import os
import ssl
from pathlib import Path

import trustme

VARIABLES = ("TORCHFT_CKPT_TLS_CERT", "TORCHFT_CKPT_TLS_KEY", "TORCHFT_CKPT_TLS_CA")


def server_context(
    authority: trustme.CA,
    *names: str,
    not_after: datetime.datetime | None = None,
    clients: trustme.CA | None = None,
) -> ssl.SSLContext:
    """A server that `authority` vouches for under these names; with `clients`, it asks for a certificate of that one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _issue(authority, *names, not_after=not_after).configure_cert(context)
    if clients is not None:
        clients.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authority: trustme.CA, *, vouched_for_by: trustme.CA | None = None) -> ssl.SSLContext:
    """A client that believes `authority`; with `vouched_for_by`, it has a certificate of that one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    if vouched_for_by is not None:
        vouched_for_by.issue_cert("receiver.example").configure_cert(context)
    return context


class Files:
    """The three files of one process in a directory, as its variables name them.

    Args:
        believes: the authority whose certificates this process believes; default: the one that has signed its own.
    """

    def __init__(
        self,
        directory: Path,
        authority: trustme.CA,
        *names: str,
        believes: trustme.CA | None = None,
        not_after: datetime.datetime | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate, self.key, self.authority = (directory / name for name in ("host.pem", "host.key", "ca.pem"))
        (believes or authority).cert_pem.write_to_path(str(self.authority))
        self.renew(authority, *names or ("127.0.0.1",), not_after=not_after)

    def renew(self, authority: trustme.CA, *names: str, not_after: datetime.datetime | None = None) -> bytes:
        """Put a new certificate and its key in the place of those that are there; return the certificate."""
        made = _issue(authority, *names or ("127.0.0.1",), not_after=not_after)
        for path, text in ((self.certificate, made.cert_chain_pems[0]), (self.key, made.private_key_pem)):
            new = path.with_suffix(".new")
            new.write_bytes(text.bytes())
            new.chmod(0o600)
            os.replace(new, path)
        return made.cert_chain_pems[0].bytes()

    def variables(self) -> dict[str, str]:
        return dict(zip(VARIABLES, map(str, (self.certificate, self.key, self.authority)), strict=True))


def _issue(authority: trustme.CA, *names: str, not_after: datetime.datetime | None) -> trustme.LeafCert:
    not_before = None if not_after is None else not_after - datetime.timedelta(days=1)
    return authority.issue_cert(*names, not_before=not_before, not_after=not_after)
