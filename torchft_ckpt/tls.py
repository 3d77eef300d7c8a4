"""TLS of all that is ours, lighthouse, manager service and transport: the contexts of both sides, from the three files that the
configuration names. Who names none makes no context, and speaks plain HTTP.

Each connection is made with the files as they are then: a renewed certificate is taken up without a restart, and connections that
are open go on. Where an authority is named, both sides show a certificate of it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any

from torchft_ckpt import config
from torchft_ckpt.core.services.handshakes import NOT_YET, OTHER_NAMES, why_no_session
from torchft_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)
_ENDS_SOON, _ENDS_SOON_S = 0.1, 30 * 86400.0
"""Of the time for which a certificate is valid, and at most: with no more of it left, it should have been renewed."""
_AGAIN_AFTER_S = 10.0
"""Files that cannot be used are read again then, though nobody has written to them: a certificate may not be valid yet."""


class Tls:
    """Who this process is, and whom it believes. Any thread.

    Args:
        certificate: file with the certificate, and those between it and the authority's, PEM; empty: this process is a client,
            and shows none.
        key: file with its private key, PEM, not encrypted.
        authority: file with the certificates of the authorities that others are believed by, PEM; empty: those of this machine,
            and clients are asked for none.

    Raises:
        ConfigError: a file cannot be used, or they do not belong together.
    """

    def __init__(self, certificate: str, key: str, authority: str) -> None:
        if bool(certificate) != bool(key):
            given, lacks = ("TORCHFT_CKPT_TLS_CERT", "_KEY") if certificate else ("TORCHFT_CKPT_TLS_KEY", "_CERT")
            told = f"{given} is set and TORCHFT_CKPT_TLS{lacks} is not; set both, they belong together"
            raise ConfigError(told, party=f"TORCHFT_CKPT_TLS{lacks}")
        self.certificate = certificate
        self.authority = authority
        self._key = key
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._ends, self._warn_at = "", math.inf
        self._contexts = self._load()
        self._again_at = math.inf
        if key and os.stat(key).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            config.warn_once(f"others than its owner may read the private key in {key}; `chmod 600` keeps it secret")

    def client(self) -> ssl.SSLContext:
        """Return the context for the next connection that this process opens."""
        return self._now()[0]

    def server(self) -> ssl.SSLContext:
        """Return the context for the next connection that is accepted; clients are asked for a certificate, and may have none.

        Raises:
            ConfigError: there is no certificate to serve with.
        """
        context = self._now()[1]
        if context is None:
            raise ConfigError(
                "TORCHFT_CKPT_TLS_CA is set, and this process serves, too; set TORCHFT_CKPT_TLS_CERT and TORCHFT_CKPT_TLS_KEY",
                party="TORCHFT_CKPT_TLS_CERT",
            )
        return context

    def check_is_for(self, host: str) -> None:
        """See whether the certificate is for the address that peers are told.

        Raises:
            ConfigError: it is for others: nobody would believe it. Or there is none.
        """
        server = self.server()
        try:
            self._try_out(server, host.partition("%")[0])
        except ssl.SSLCertVerificationError as error:
            if error.verify_code not in OTHER_NAMES:  # of an authority that only others know
                return
            raise ConfigError(
                f"the certificate {self.certificate} (TORCHFT_CKPT_TLS_CERT) is not for {host}, which peers are told as this"
                f" process's address: {error.verify_message.rstrip('.')}; make one that names it, or set"
                " TORCHFT_CKPT_HOSTNAME to a name that it has",
                party="TORCHFT_CKPT_TLS_CERT",
            ) from error

    def environment(self) -> dict[str, str]:
        """Return the variables by which another process has the same."""
        return {config.TLS_CERT[0]: self.certificate, config.TLS_KEY[0]: self._key, config.TLS_CA[0]: self.authority}

    def why_not(self, error: BaseException, *, was_closed: bool = False) -> str:
        """Say of the other side, "it", why a connection to it came to nothing, where that lies in TLS; else return nothing.

        Args:
            was_closed: it closed a new connection without a word, as a server does that does not believe our certificate.
        """
        told = why_not(error, self.authority, self.certificate)
        if told or not was_closed:
            return told
        try:
            self._load()
        except ConfigError as own:
            return f"it closed the connection: {own}"
        return ""

    def _now(self) -> tuple[ssl.SSLContext, ssl.SSLContext | None]:
        stamps = self._look()
        if stamps != self._stamps or time.monotonic() >= self._again_at:
            with self._lock:
                if stamps != self._stamps or time.monotonic() >= self._again_at:
                    self._renew()
                    self._stamps = stamps
        if time.time() >= self._warn_at:
            config.warn_once(
                f"the certificate {self.certificate} (TORCHFT_CKPT_TLS_CERT) expires on {self._ends}, and no new one is there;"
                " renew it, which needs no restart: after that day nobody connects to this process"
            )
        return self._contexts

    def _renew(self) -> None:
        try:
            self._contexts = self._load()
        except ConfigError as error:  # it is being written, perhaps
            if self._again_at == math.inf:
                logger.warning("%s; connections are made with the certificate that was read last", error)
            self._again_at = time.monotonic() + _AGAIN_AFTER_S
        else:
            self._again_at = math.inf
            logger.info(
                "the certificate in %s was read again: new connections use it", self.certificate or self.authority
            )

    def _look(self) -> tuple[object, ...]:
        return tuple(map(_stamp, filter(None, (self.certificate, self._key, self.authority))))

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext | None]:
        client = self._load_side(ssl.PROTOCOL_TLS_CLIENT)
        if not self.certificate:
            return client, None
        server = self._load_side(ssl.PROTOCOL_TLS_SERVER)
        if self.authority:
            server.verify_mode = ssl.CERT_OPTIONAL
            try:
                shown = self._try_out(server, None)
            except ssl.SSLError as error:
                why = getattr(error, "verify_message", "") or error.reason
                is_early = getattr(error, "verify_code", 0) == NOT_YET
                do = "set this machine's clock" if is_early else "make a new one, signed by that authority"
                raise ConfigError(
                    f"the certificate {self.certificate} (TORCHFT_CKPT_TLS_CERT) does not verify with {self.authority}"
                    f" (TORCHFT_CKPT_TLS_CA): {why}; {do}",
                    party="TORCHFT_CKPT_TLS_CERT",
                ) from error
            self._ends = shown["notAfter"]
            begins, ends = map(ssl.cert_time_to_seconds, (shown["notBefore"], self._ends))
            self._warn_at = ends - min(_ENDS_SOON * (ends - begins), _ENDS_SOON_S)
        return client, server

    def _load_side(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        if self.authority:
            try:
                context.load_verify_locations(_there(self.authority, "TORCHFT_CKPT_TLS_CA", "CERTIFICATE"))
            except OSError as error:
                why = f"no certificates in it: {_reason(error)}"
                raise _unusable(self.authority, "TORCHFT_CKPT_TLS_CA", why) from error
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        elif protocol == ssl.PROTOCOL_TLS_CLIENT:
            context.load_default_certs()
        if self.certificate:
            _there(self.certificate, "TORCHFT_CKPT_TLS_CERT", "CERTIFICATE")
            _there(self._key, "TORCHFT_CKPT_TLS_KEY", "PRIVATE KEY")
            try:
                context.load_cert_chain(self.certificate, self._key, password="")  # else a terminal would be asked
            except OSError as error:
                why = f"{_reason(error)}; write both files again"
                if _reason(error) == "KEY_VALUES_MISMATCH":
                    why = f"it is not that of {self.certificate}; give the one that was made with it"
                raise _unusable(self._key, "TORCHFT_CKPT_TLS_KEY", why) from error
        return context

    def _try_out(self, server: ssl.SSLContext, host: str | None) -> dict[str, Any]:
        """Have a client of these files shake hands with a server, in memory; return what it learns of the certificate.

        Raises:
            ssl.SSLError: they do not come to a session.
        """
        client = self._load_side(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = host is not None
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        shown: dict[str, Any] = {}
        sides = [
            client.wrap_bio(to_client, to_server, server_hostname=host),
            server.wrap_bio(to_server, to_client, server_side=True),
        ]
        while sides:
            side = sides.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                sides.append(side)
            else:
                shown = shown or side.getpeercert() or {}
        return shown


def resolve_tls(certificate: str | None = None, key: str | None = None, authority: str | None = None) -> Tls | None:
    """Return what the arguments name, each else by its variable; None: plain HTTP is spoken.

    Raises: as `Tls`.
    """
    given = ((certificate, config.TLS_CERT), (key, config.TLS_KEY), (authority, config.TLS_CA))
    paths = [config.resolve(path or None, variable, "", str) for path, variable in given]
    return _made(*(path and os.path.abspath(path) for path in paths)) if any(paths) else None


_made = functools.lru_cache(maxsize=16)(Tls)


def check_serves(ssl_context: object) -> None:
    """Raise a ConfigError if a context that a server was given is one for clients: it would refuse everybody."""
    if isinstance(ssl_context, ssl.SSLContext) and ssl_context.protocol == ssl.PROTOCOL_TLS_CLIENT:
        raise ConfigError("ssl_context is one for clients; a server needs PROTOCOL_TLS_SERVER", party="ssl_context")


@functools.cache
def say_what_stays_plain() -> None:
    """Say, once for this process, what of a job does not speak TLS."""
    logger.info(
        "lighthouse, manager service and transport speak TLS. Gloo, NCCL and torch's stores do not: what groups average crosses"
        " the network in the clear"
    )


def why_not(error: BaseException, authority: str | None = None, certificate: str = "") -> str:
    """Say of the other side, "it", why there is no TLS session; empty where it was no matter of TLS. See `why_no_session`."""
    for one in _causes(error):
        reason = getattr(one, "reason", None)  # what aiohttp makes of an SSLError is one, and has none
        if isinstance(one, ssl.SSLError) and reason and not isinstance(one, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            code, verified = getattr(one, "verify_code", 0), getattr(one, "verify_message", "")
            return why_no_session(reason, code, verified, authority=authority, certificate=certificate)
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _stamp(path: str) -> object:
    try:
        return config.stamp_of(path)
    except OSError:
        return None


def _there(path: str, what: str, holds: str) -> str:
    """Return the path of a file that can be read, and seems to hold such a thing."""
    try:
        with open(path, encoding="latin-1") as file:  # comments may be in any encoding
            text = file.read()
    except OSError as error:
        raise _unusable(path, what, error.strerror or type(error).__name__) from error
    if f"{holds}-----" not in text:
        raise _unusable(path, what, f"it holds no {holds.lower()} in PEM")
    if "ENCRYPTED" in text and holds != "CERTIFICATE":
        raise _unusable(path, what, "it is encrypted, and nobody is asked for a password")
    return path


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)


def _unusable(path: str, what: str, why: str) -> ConfigError:
    option = what.removeprefix("TORCHFT_CKPT_").lower().replace("_", "-")
    return ConfigError(f"the file {path} cannot be used as {what} (--{option}): {why}", party=what)
