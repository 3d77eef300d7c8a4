"""The only place that reads the environment. One precedence everywhere: argument, then environment, then default.

| variable                            | also read                     | meaning                                          |
|-------------------------------------|-------------------------------|--------------------------------------------------|
| `TORCHFT_CKPT_LIGHTHOUSE`           | `TORCHFT_LIGHTHOUSE`          | address of the lighthouse                        |
| `TORCHFT_CKPT_JOB`                  |                               | name of the job at the lighthouse; `default`     |
| `TORCHFT_CKPT_TOKEN`                |                               | shared secret of all parties of a job            |
| `TORCHFT_CKPT_TOKEN_FILE`           |                               | file that holds the secret, if that is not set;  |
|                                     |                               | read again when it has changed                   |
| `TORCHFT_CKPT_TLS_CERT`             |                               | certificate of this process, PEM: TLS is spoken  |
| `TORCHFT_CKPT_TLS_KEY`              |                               | its private key, PEM                             |
| `TORCHFT_CKPT_TLS_CA`               |                               | authorities that peers' certificates are of, PEM |
| `TORCHFT_CKPT_HOSTNAME`             |                               | address that this process tells its peers        |
| `NCCL_SOCKET_IFNAME`                |                               | NCCL's interface; beside NCCL it gives that      |
|                                     |                               | address, if nothing above does                   |
| `GLOO_SOCKET_IFNAME`                |                               | Gloo's interface; it does so everywhere else     |
| `TORCHFT_CKPT_MANAGER_PORT`         | `TORCHFT_MANAGER_PORT`        | port of the manager service (group rank 0)       |
| `TORCHFT_CKPT_TIMEOUT_SEC`          | `TORCHFT_TIMEOUT_SEC`         | collectives, commit votes; seconds               |
| `TORCHFT_CKPT_QUORUM_TIMEOUT_SEC`   | `TORCHFT_QUORUM_TIMEOUT_SEC`  | one attempt at a quorum; seconds                 |
| `TORCHFT_CKPT_CONNECT_TIMEOUT_SEC`  | `TORCHFT_CONNECT_TIMEOUT_SEC` | connecting to lighthouse and peers; seconds      |
| `TORCHFT_CKPT_QUORUM_RETRIES`       | `TORCHFT_QUORUM_RETRIES`      | attempts at a quorum after the first             |
| `TORCHFT_CKPT_LOG_EVERY_SEC`        |                               | fewest seconds between lines of committed steps  |
|                                     |                               | that tell nothing new; 2; with 0 each has a line |
| `TORCHFT_CKPT_EVENTS`               |                               | where each rank writes its events: a directory,  |
|                                     |                               | or a path with `{replica_id}` and `{rank}`       |
| `TORCHFT_CKPT_METRICS_PORT`         |                               | where group rank 0 serves metrics; 0: any port;  |
|                                     |                               | by default it serves none                        |
| `TORCHFT_CKPT_USE_BUCKETIZATION`    | `TORCHFT_USE_BUCKETIZATION`   | DiLoCo exchanges buckets, not single parameters  |
| `MASTER_ADDR`, `MASTER_PORT`        |                               | TCPStore at which the ranks of one replica group |
|                                     |                               | find each other, as torchrun sets them           |
| `RANK`, `WORLD_SIZE`                |                               | rank and size inside this replica group          |
| `TORCHELASTIC_RUN_ID`               |                               | torchrun's name of the run                       |
| `TORCHFT_CKPT_REPLAY`               |                               | what the command `replay` has a script do        |

`NOT_READ` lists further variables, which the library does not read. A `Manager` warns if one of them is set.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple, ParamSpec, TypeVar

from torchft_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

LIGHTHOUSE = ("TORCHFT_CKPT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE")
JOB = ("TORCHFT_CKPT_JOB",)
TOKEN = ("TORCHFT_CKPT_TOKEN",)
TOKEN_FILE = "TORCHFT_CKPT_TOKEN_FILE"
MAX_SECRET_BYTES = 4096
TLS_CERT = ("TORCHFT_CKPT_TLS_CERT",)
TLS_KEY = ("TORCHFT_CKPT_TLS_KEY",)
TLS_CA = ("TORCHFT_CKPT_TLS_CA",)
HOSTNAME = ("TORCHFT_CKPT_HOSTNAME",)
NCCL_INTERFACE = ("NCCL_SOCKET_IFNAME",)
GLOO_INTERFACE = ("GLOO_SOCKET_IFNAME",)
MANAGER_PORT = ("TORCHFT_CKPT_MANAGER_PORT", "TORCHFT_MANAGER_PORT")
TIMEOUT = ("TORCHFT_CKPT_TIMEOUT_SEC", "TORCHFT_TIMEOUT_SEC")
QUORUM_TIMEOUT = ("TORCHFT_CKPT_QUORUM_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC")
CONNECT_TIMEOUT = ("TORCHFT_CKPT_CONNECT_TIMEOUT_SEC", "TORCHFT_CONNECT_TIMEOUT_SEC")
QUORUM_RETRIES = ("TORCHFT_CKPT_QUORUM_RETRIES", "TORCHFT_QUORUM_RETRIES")
LOG_EVERY = ("TORCHFT_CKPT_LOG_EVERY_SEC",)
EVENTS = ("TORCHFT_CKPT_EVENTS",)
METRICS_PORT = ("TORCHFT_CKPT_METRICS_PORT",)
USE_BUCKETIZATION = ("TORCHFT_CKPT_USE_BUCKETIZATION", "TORCHFT_USE_BUCKETIZATION")
STORE_ADDR = ("MASTER_ADDR",)
STORE_PORT = ("MASTER_PORT",)
RUN_ID = ("TORCHELASTIC_RUN_ID",)
RANK = ("RANK",)
WORLD_SIZE = ("WORLD_SIZE",)
REPLAY = "TORCHFT_CKPT_REPLAY"

_JOINS = "those who train wait for a group that comes in as long as join_stall_limit allows"
_NO_REDO = "a group that lacks a step receives the state, and no log of the steps before it"
_NO_OTEL = "nothing is sent to OpenTelemetry; what happens is in the log, under the loggers below torchft_ckpt"
NOT_READ = {
    "TORCHFT_CKPT_JOIN_BUDGET_SEC": _JOINS,
    "TORCHFT_WATCHDOG_TIMEOUT_SEC": "there is no watchdog that ends the process; what hangs is ended by its own timeout",
    "TORCHFT_TRIGGER_FR_ON_ABORT": "an abort does not make torch's flight recorder write a dump",
    "TORCHFT_USE_OTEL": _NO_OTEL,
    "TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON": _NO_OTEL,
}
"""Environment variables that torchft reads, or this library once did, and why they change nothing here."""
NOT_TAKEN = {
    "Manager.__init__": {
        "follow": "a group follows if that helps; with join_stall_limit=None the others stand still for all of its state",
        "follow_budget_bytes": _NO_REDO,
        "heal_in_place": "a load_state_dict that writes to what it was given before it has read it is found",
        "join_budget": _JOINS,
        "warm_up": "each group that lacks the state computes one iteration for itself before it receives it",
    },
    "HTTPTransport.__init__": {
        "redo_budget_bytes": _NO_REDO,
        "reuse_buffers": "only the memory of a failed receive is kept; a receive in place needs none",
    },
}
"""Arguments that functions of this library once took, and why they change nothing."""


class Replay(NamedTuple):
    """What `python -m torchft_ckpt replay` has a script do: go on from a checkpoint in one group, and save nothing."""

    location: str
    step: int
    """Of the checkpoint."""
    last: int
    """The step after which the loop ends."""
    told_in: str
    """A folder: each rank writes there what its vote on each step shows."""


def replay() -> Replay | None:
    """Return what is replayed; None: nothing, as almost always.

    Raises:
        ConfigError: the variable was not set by the command.
    """
    text = os.environ.get(REPLAY)
    if not text:
        return None
    try:
        location, step, last, told_in = json.loads(text)
        return Replay(str(location), int(step), int(last), str(told_in))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{REPLAY} is {text!r}, which the command replay has not given", REPLAY) from error


def resolve(
    argument: T | None,
    variables: tuple[str, ...],
    default: T,
    parse: Callable[[str], T],
    environ: Mapping[str, str] | None = None,
) -> T:
    """Return the argument if it was given, else the first variable that is set, else the default.

    The token, without a newline at its end, is also looked for in the file that `TORCHFT_CKPT_TOKEN_FILE` names.

    Raises:
        ConfigError: the variable that would be used cannot be parsed; it names the variable and its value. Or the file
            cannot be used: see `read_secret`. Or no header can hold the token, which is not quoted.
    """
    if argument is not None:
        return parse(_secret(argument, "token")) if variables is TOKEN and isinstance(argument, str) else argument
    environ = os.environ if environ is None else environ
    for variable in variables:
        value = environ.get(variable, "")
        if value != "":
            if variables is TOKEN:
                return parse(_secret(value, variable))
            try:
                return parse(value)
            except ValueError as error:
                raise ConfigError(
                    f"environment variable {variable}={value!r} cannot be used: {error}", party=variable
                ) from error
    if variables is TOKEN and (path := environ.get(TOKEN_FILE, "")):
        return parse(read_secret(path, TOKEN_FILE))
    return default


_said: set[str] = set()
"""Warnings that were given, once for this process."""


def warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)


def _secret(text: str, what: str) -> str:
    secret = text.removesuffix("\n").removesuffix("\r")
    if text and not (secret and secret.isascii() and secret.isprintable()):
        raise ConfigError(f"{what} cannot be used: a token is one line of printable ASCII; it is not shown", party=what)
    return secret


_secret_files: dict[str, tuple[str, list[str]]] = {}
"""By the secret that was read first: the file that it was in, and what that held when it could be read last."""


def secrets(token: str) -> list[str]:
    """Return what is accepted for a token, and first what is shown: what the file holds now from which the token was read."""
    path, found = _secret_files.get(token, ("", [token]))
    if path:
        try:
            found, _ = _secrets_in(path, stamp_of(path))
            _secret_files[token] = path, found
        except (OSError, ValueError) as error:  # it is being written, or gone
            warn_once(f"the token's file {path} cannot be read ({_why(error)}); what it held last counts on")
    return found


def environment_of(token: str) -> dict[str, str]:
    """Return the variables by which another process has a token: its file, if it was read from one, so that it may change."""
    path, _ = _secret_files.get(token, ("", []))
    return {TOKEN_FILE: path, TOKEN[0]: ""} if path else {TOKEN[0]: token}


def stamp_of(path: str) -> tuple[int, ...]:
    """Return what is another when the file at a path is another, or has been written to."""
    status = os.stat(path)
    return status.st_ino, status.st_ctime_ns, status.st_size


@functools.lru_cache(maxsize=16)
def _secrets_in(path: str, stamp: tuple[int, ...]) -> tuple[list[str], int]:
    """Return the secret in a file, or two while it is changed, and the file's mode."""
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        text = file.read(MAX_SECRET_BYTES + 1).decode().removesuffix("\n")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not any(lines):
        raise ValueError("it is empty")
    if (
        len(text) > MAX_SECRET_BYTES
        or len(lines) > 2
        or not all(line and line.isprintable() and line.isascii() for line in lines)
    ):
        raise ValueError("it holds more than one line of printable ASCII, or two while the token is changed")
    return lines, mode


def read_secret(path: str, what: str) -> str:
    """Return the secret that a file holds; of two the first. A warning names it where others than its owner may read it.

    Raises:
        ConfigError: it cannot be read, is empty, or holds what is no secret: more than two lines, or more than 4 KiB.
    """
    try:
        found, mode = _secrets_in(path, stamp_of(path))
        _secret_files[found[0]] = os.path.abspath(path), found  # the script may go to another directory
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file {path!r} that {what} names cannot be used: {_why(error)}", party=what) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        warn_once(f"others than its owner may read the token in {path}; `chmod 600` keeps it secret")
    return found[0]


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is no text" if isinstance(error, UnicodeError) else str(error)


def token_file_of_run(lighthouse: str) -> str:
    """Return where `run` keeps the token that it made for its lighthouse, `HOST:PORT`; this user alone reads it."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")  # set, and not there, after `su` or in a container
    folder = own if os.access(own, os.W_OK) else tempfile.gettempdir()
    return os.path.join(folder, f"torchft_ckpt-{os.getuid()}-{lighthouse.replace(':', '-')}.token")


def token_for(lighthouse: str, argument: str | None) -> str:
    """Return the token to show to a lighthouse: the argument, else the environment's, else that of a `run` of this user."""
    path = token_file_of_run(lighthouse)
    is_of_run = os.path.exists(path) and os.lstat(path).st_uid == os.getuid()
    return resolve(argument, TOKEN, "", str) or (read_secret(path, "run") if is_of_run else "")


def not_read() -> dict[str, str]:
    """Return those of `NOT_READ` that are set and ask for something, with the reason."""
    return {name: why for name, why in NOT_READ.items() if os.environ.get(name, "").lower() not in ("", "false")}


def warns_of_removed(function: Callable[P, T]) -> Callable[P, T]:
    """Let callers of a function still give what `NOT_TAKEN` names for it: each gives a `FutureWarning`, in the caller's line."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, why in NOT_TAKEN[function.__qualname__].items():
            if name in kwargs:
                del kwargs[name]
                told = f"{name}= of {function.__qualname__} has no effect any more: {why}"
                warnings.warn(told, FutureWarning, stacklevel=2)
        return function(*args, **kwargs)

    return call


D = TypeVar("D", bound="timedelta | None")


def not_negative(duration: D, argument: str = "timeout") -> D:
    """Return a duration that was given as an argument.

    Raises:
        ConfigError: it is negative.
    """
    if duration is not None and duration < timedelta(0):
        raise ConfigError(
            f"{argument}={duration!r} cannot be used; expected a duration that is not negative", party=argument
        )
    return duration


def parse_seconds(text: str) -> timedelta:
    """Parse a positive number of seconds."""
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError("expected a positive number of seconds")
    return timedelta(seconds=seconds)


def parse_pause(text: str) -> timedelta:
    """Parse a number of seconds that may be 0."""
    return parse_seconds(text) if float(text) else timedelta(0)


def parse_port(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose."""
    port = int(text)
    if not 0 <= port < 65536:
        raise ValueError("expected a port between 0 and 65535")
    return port


def parse_count(text: str) -> int:
    """Parse a whole number that is not negative."""
    count = int(text)
    if count < 0:
        raise ValueError("expected a whole number that is not negative")
    return count


def parse_bool(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return known[text.strip().lower()]
    except KeyError:
        raise ValueError("expected true or false") from None


def parse_host_port(address: str, *, what: str, default_host: str = "", has_tls: bool | None = None) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port`, `:port` or `http://host:port` into host and port.

    Args:
        default_host: the host of `:port`.
        has_tls: of a service that speaks TLS or plain HTTP: which of them is set up here. None: it never speaks TLS.

    Raises:
        ConfigError: there is no port or it is out of range, or the scheme is another than what is spoken there.
    """
    scheme, has_scheme, text = address.strip().rpartition("://")
    host, colon, port_text = text.rstrip("/").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if has_scheme and scheme.lower() in ("https", "wss"):
            if has_tls is None:
                raise ValueError("TLS is not spoken there, and without it the token would travel in the clear")
            if not has_tls:
                raise ValueError(
                    "no TLS is set up here; set TORCHFT_CKPT_TLS_CA, and in ranks TORCHFT_CKPT_TLS_CERT and _KEY"
                )
        elif has_scheme and scheme.lower() not in ("http", "ws"):
            raise ValueError(f"{scheme}:// is not spoken there")
        elif has_scheme and has_tls:
            raise ValueError("that is plain http, and TLS is set up here: nothing is sent there in the clear")
        if not colon:
            raise ValueError("it has no port")
        if "/" in host:
            raise ValueError(f"{host!r} is no host")
        port = parse_port(port_text)
    except ValueError as error:
        expected = f"{'https' if has_tls else 'http'}://HOST:PORT"
        message = f"{what} {address!r} cannot be used: {error}; expected HOST:PORT or {expected}"
        raise ConfigError(message, party=what) from error
    return host or default_host, port
