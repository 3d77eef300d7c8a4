"""A state from one process to another by two functions, for those who have no Manager."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar, cast

from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.checkpointing.resharding.peers import JobPeers
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.errors import StateMismatchError

_T = TypeVar("_T")
_WITHOUT_END = timedelta(days=10_000)


@contextlib.contextmanager
def serve(
    state: object,
    *,
    bind: str | None = None,
    token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Serve a state, and yield the URL at which `fetch` gets it, while the block runs.

    Nothing is copied, so its tensors must not change within the block.

    Args:
        state: tensors and plain values in dicts, lists and tuples.
        bind: the address of this machine to listen at; default: all of them.
        token: shared secret; default: `TORCHFT_CKPT_TOKEN`, else everybody who can connect is served.
        ssl_context: of a server, for https; default: of `TORCHFT_CKPT_TLS_CERT`, `_KEY` and `_CA`, else plain http.

    Raises:
        UnsupportedValueError: the state holds something that cannot be carried.
        AddressInUseError: `bind` is no address of this machine.
    """
    transport = HTTPTransport[object](bind=bind, token=token, ssl_context=ssl_context)
    try:
        transport.send_checkpoint([], 0, state, _WITHOUT_END)
        yield transport.metadata()
    finally:
        transport.shutdown()


def fetch(
    url: str,
    into: _T | None = None,
    *,
    timeout: float | timedelta = 60.0,
    token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> _T:
    """Fetch the state that `serve` serves, verified, and return it. No port is opened for it.

    Args:
        into: a state like it, whose tensors receive the values; the rest is new in what is returned. Default: fresh memory.
        timeout: in which all of it has to be here; a number means seconds.
        token: as of `serve`.
        ssl_context: of a client, whom to believe; default: of the same variables.

    Raises:
        TransferError: a subclass says why it is not here. If `state_overwritten` is true, `into` holds parts of both states.
        StateMismatchError: it does not fit into `into`, or that has tensors which it has not.
    """
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    peers = JobPeers([[url]], token=token, ssl_context=ssl_context)
    state = peers.pull(None, timeout=limit, into=into).state
    if left_out := sorted(_names(into) - _names(state)):
        raise StateMismatchError(f"what {url} serves has no {', '.join(left_out[:5])}; all else was received", url)
    return cast(_T, state)


def _names(state: object) -> set[str]:
    """Return the paths of a state's tensors."""
    tree = TreeEncoder()
    tree.encode(state)
    return {path for path, _ in tree.tensors}
