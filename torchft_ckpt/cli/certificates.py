"""The command `certificates`: an authority for one job, and certificates of it. `cryptography` makes them (the extra `tls`)."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from torchft_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey as Key

_NAME = re.compile(r"\A(\*\.(?=[^.]+\.[^.]))?[0-9A-Za-z_]([0-9A-Za-z_.-]{0,250}[0-9A-Za-z])?\Z")
_DAYS_OF_AUTHORITY = 3650
_CLOCKS_DIFFER = datetime.timedelta(hours=1)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `certificates`; it sets `run`, which returns the exit status."""
    certificates = commands.add_parser(
        "certificates",
        help="make an authority and certificates for TLS",
        description="Makes an authority in DIR, ca.pem and ca.key, if it is not there, and a certificate of it for each --host:"
        " NAME.pem and NAME.key. No file is overwritten. Keep ca.key away from all machines of the job.",
    )
    certificates.add_argument("directory", type=Path, metavar="DIR", help="where to")
    certificates.add_argument(
        "--host",
        action="append",
        nargs="+",
        required=True,
        metavar="NAME_OR_ADDRESS",
        help="all names and addresses that one machine is reached at; the first one names its files. Again for each machine",
    )
    text = "how long the certificates are valid (default: %(default)s)"
    certificates.add_argument("--days", type=int, default=365, help=text)
    certificates.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "making certificates needs cryptography; install torchft_ckpt[tls]", "cryptography"
        ) from error
    if not 0 < options.days <= _DAYS_OF_AUTHORITY:
        raise ConfigError(f"--days is {options.days}; expected 1 to {_DAYS_OF_AUTHORITY}", "--days")
    for name in (name for names in options.host for name in names):
        if not _is_address(name) and not _NAME.match(name):
            raise ConfigError(f"--host {name!r} is no name and no address of a machine", "--host")
    folder: Path = options.directory
    stems = [names[0].replace("*", "_") for names in options.host]
    paths = [folder / f"{stem}{end}" for stem in stems for end in (".pem", ".key")]
    there = [path for path in paths if path.exists()]
    if there or len({*paths}) < len(paths) or "ca" in stems:
        which = there[0] if there else f"one of {', '.join(stems)}"
        raise ConfigError(
            f"{which} is there already, and nothing is overwritten; move it away, or choose another DIR", "DIR"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        authority = _authority_in(folder)
        for stem, names in zip(stems, options.host, strict=True):
            _make(folder / stem, names, options.days, authority)
            print(f"{folder / stem}.pem and .key: {', '.join(names)}, for {options.days} days")
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be used: {error.strerror or error}", "DIR") from error
    print(f"{folder / 'ca.pem'} goes to all machines, {folder / 'ca.key'} to none")
    return 0


def _authority_in(folder: Path) -> tuple[Key, x509.Certificate]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key_file, file = folder / "ca.key", folder / "ca.pem"
    if not key_file.exists() and not file.exists():
        return _make(folder / "ca", ["torchft_ckpt authority"], _DAYS_OF_AUTHORITY, None)
    try:
        key, authority = (
            load_pem_private_key(key_file.read_bytes(), None),
            x509.load_pem_x509_certificate(file.read_bytes()),
        )
        if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
            raise ValueError("they do not belong together")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key_file} and {file} are no authority of this command: {error}", "DIR") from error
    return key, authority


def _make(
    place: Path, names: list[str], days: int, authority: tuple[Key, x509.Certificate] | None
) -> tuple[Key, x509.Certificate]:
    """Make a key and its certificate, write both, and return them: those of an authority, if none is given to sign."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    signs, issuer = (key, subject) if authority is None else (authority[0], authority[1].subject)
    # What the key may do: sign what it says itself, or sign certificates and lists of revoked ones.
    may = [authority is not None, False, False, False, False, authority is None, authority is None, False, False]
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(authority is None, 0 if authority is None else None), critical=True)
        .add_extension(x509.KeyUsage(*may), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signs.public_key()), critical=False)
    )
    if authority is not None:
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        known_by = [
            x509.IPAddress(ipaddress.ip_address(name)) if _is_address(name) else x509.DNSName(name) for name in names
        ]
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(known_by), critical=False)
    made = builder.sign(signs, hashes.SHA256())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for end, text, mode in ((".key", secret, 0o600), (".pem", made.public_bytes(Encoding.PEM), 0o644)):
        with os.fdopen(os.open(f"{place}{end}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(text)
    return key, made


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
