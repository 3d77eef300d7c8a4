"""TLS contexts for tests: authorities made up on the spot, and what they sign."""

from __future__ import annotations

import datetime
import ssl

import trustme


def server_context(
    authority: trustme.CA,
    *names: str,
    not_after: datetime.datetime | None = None,
    clients: trustme.CA | None = None,
) -> ssl.SSLContext:
    """A server that `authority` vouches for under these names; with `clients`, it asks for a certificate of that one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    not_before = None if not_after is None else not_after - datetime.timedelta(days=1)
    authority.issue_cert(*names, not_before=not_before, not_after=not_after).configure_cert(context)
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
