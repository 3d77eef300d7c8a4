"""A client of a live peer: asks what it serves, and pulls a state, without a server, a Manager or a training loop.

It asks and waits. What the answers mean is `protocol`'s and `format`'s business, how blocks travel is `fetch`'s.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from torchft_ckpt.checkpointing.address import SourceAddress, parse_metadata
from torchft_ckpt.checkpointing.fetching.connection import Answer, SourceConnection
from torchft_ckpt.checkpointing.fetching.fetch import Fetch
from torchft_ckpt.checkpointing.fetching.options import (
    FetchOptions,
    default_num_streams,
)
from torchft_ckpt.checkpointing.fetching.receive import BufferCache
from torchft_ckpt.checkpointing.fetching.source import read_manifest, request_headers
from torchft_ckpt.checkpointing.progress import ProgressCallback, TransferProgress
from torchft_ckpt.checkpointing.protocol import LATEST, MAX_WAIT_S, PREFIX, Index, decode_index
from torchft_ckpt.checkpointing.state.format import MAX_MANIFEST_BYTES, Manifest, names_of_parts
from torchft_ckpt.config import TOKEN, not_negative, resolve
from torchft_ckpt.errors import (
    ConfigError,
    SourceLostError,
    StateFormatError,
    TransferStalledError,
    TransferTimeoutError,
)
from torchft_ckpt.memory import memory_bytes

_MAX_INDEX_BYTES = 1024 * 1024
_ANSWER_S = 0.5
_MIN_PAUSE_S = 0.05
_MAX_PAUSE_S = 5.0
_CAN_COME_YET = ("not_yet", "too_many_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledState:
    """A state, and the step that it is the state of."""

    step: int
    state: object
    parts_of: tuple[str, ...] = ()
    """Names of the tensors of which this peer holds only a part, which is then what is in the state."""


class CheckpointClient:
    """Reads from one live peer. Each call opens connections of its own and ends them; from any thread.

    Args:
        url: what the peer's `HTTPTransport.metadata()` returns, `http://HOST:PORT`; `HOST:PORT` is taken for it.
        token: shared secret of the job; default: `TORCHFT_CKPT_TOKEN`, else none.
        ssl_context: for clients; whom to believe, and who we are, where the url is `https`; default: the system's certificates.
        connect_timeout: limit for a connection to be accepted.
        stall_timeout: limit for each wait for a byte.

    Raises:
        ConfigError: the url or a timeout cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout: timedelta = timedelta(seconds=10),
        stall_timeout: timedelta = timedelta(seconds=15),
    ) -> None:
        for name, value in (("connect_timeout", connect_timeout), ("stall_timeout", stall_timeout)):
            if value <= timedelta(0):
                raise ConfigError(f"{name}={value!r} cannot be used; expected a positive duration", party=name)
        self._source = _parse_url(url, "http" if ssl_context is None else "https")
        self._token = resolve(token, TOKEN, "", str) or None
        self._ssl_context = ssl_context
        self._connect_timeout_s = connect_timeout.total_seconds()
        self._stall_timeout_s = stall_timeout.total_seconds()

    def __repr__(self) -> str:
        return f"CheckpointClient({self._source})"

    @property
    def url(self) -> str:
        """The peer's address as it is connected to."""
        return str(self._source)

    @property
    def address(self) -> SourceAddress:
        """The same, taken apart."""
        return self._source

    @property
    def token(self) -> str | None:
        """What it presents."""
        return self._token

    def index(self, *, timeout: timedelta = timedelta(seconds=30)) -> Index:
        """Return what the peer serves now. Asks it for nothing more and keeps nothing there.

        Raises:
            TransferError: a subclass says why there is no answer.
            StateFormatError: the answer is none.
        """
        with self._connection(_deadline(timeout), "the index") as connection:
            answer = connection.get(PREFIX)
            if answer.status != 200:
                raise answer.refused(answer.refusal())
            body = answer.read(_MAX_INDEX_BYTES)
        try:
            return decode_index(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StateFormatError(f"source {self._source}: its index cannot be read: {error}", self.url) from error

    def manifest(self, step: int | None = None, *, timeout: timedelta = timedelta(seconds=30)) -> Manifest:
        """Return all of a state but its bytes.

        Args:
            step: the step; None for the newest that is served. Where none is, the peer is asked to serve its next one.
            timeout: the overall deadline; a step that is not served yet is waited for until then.

        Raises:
            TransferError: a subclass says why there is none.
            StateFormatError: what the peer sends is not a manifest.
        """
        return self._wait_for_manifest(step, _deadline(timeout))

    def pull(self, step: int | None, *, timeout: timedelta, on_progress: ProgressCallback | None = None) -> PulledState:
        """Fetch a state whole and return it: on the CPU, in fresh memory, tensors that share memory tied.

        Args:
            step: the step; None for the newest that is served. Where none is, the peer is asked to serve its next one.
            timeout: the overall deadline.
            on_progress: told how far it is.

        Raises:
            TransferError: a subclass says why there is no state.
            StateFormatError: what the peer sends is not a state.
        """
        steps: list[int] = []

        def note(progress: TransferProgress) -> None:
            steps.append(progress.step)
            if on_progress is not None:
                on_progress(progress)

        fetch = self._fetch(step, _deadline(timeout), note)
        state = fetch.run()
        manifest = fetch.manifest
        return PulledState(
            step=steps[-1], state=state, parts_of=() if manifest is None else tuple(names_of_parts(manifest))
        )

    def _fetch(self, step: int | None, deadline: float, on_progress: ProgressCallback) -> Fetch:
        """Return what moves the bytes; its progress is told at least once, at the end. The one place that makes one."""
        options = FetchOptions(
            connect_timeout_s=self._connect_timeout_s,
            stall_timeout_s=self._stall_timeout_s,
            num_streams=default_num_streams(),
            max_manifest_bytes=MAX_MANIFEST_BYTES,
            max_total_bytes=memory_bytes(),
            token=self._token,
            receiver=uuid.uuid4().hex,
            ssl_context=self._ssl_context,
        )
        return Fetch(
            [self._source],
            step=step,
            deadline=deadline,
            options=options,
            cache=BufferCache(),
            on_progress=on_progress,
        )

    def _wait_for_manifest(self, step: int | None, deadline: float) -> Manifest:
        """Ask until it is served or the deadline has passed. Asks as nobody, so that nothing is kept for us there."""
        wanted = LATEST if step is None else str(step)
        what = "a state" if step is None else f"step {step}"
        with self._connection(deadline, what) as connection:
            while True:
                remaining_s = max(deadline - time.monotonic(), 0.0)
                # The last refusal should arrive before the deadline: it says more than that does.
                wait_s = min(MAX_WAIT_S, self._stall_timeout_s / 2, remaining_s - min(remaining_s / 4, _ANSWER_S))
                answer = connection.get(f"{PREFIX}/{wanted}/manifest?wait_s={wait_s:.3f}")
                if answer.status == 200:
                    return self._read_manifest(answer, step)
                refusal = answer.refusal()
                if refusal.error not in _CAN_COME_YET:
                    raise answer.refused(refusal)
                # The peer holds the request up itself; one that does not is not asked in a tight loop.
                pause_s = max(_retry_after_s(answer), _MIN_PAUSE_S)
                if time.monotonic() + pause_s >= deadline:
                    raise TransferTimeoutError(
                        f"source {self._source} did not serve {what} within the timeout: {refusal.message[:400]}",
                        self.url,
                    ) from answer.refused(refusal)
                time.sleep(pause_s)

    def _read_manifest(self, answer: Answer, step: int | None) -> Manifest:
        manifest = read_manifest(answer, self.url, MAX_MANIFEST_BYTES)
        if step is not None and manifest.step != step:
            raise StateFormatError(
                f"source {self._source} was asked for step {step} and sent step {manifest.step}", self.url
            )
        return manifest

    @contextlib.contextmanager
    def _connection(self, deadline: float, what: str) -> Iterator[SourceConnection]:
        """Give a connection that is closed at the deadline, however the peer drips its bytes."""
        connection = SourceConnection(
            self._source,
            headers=request_headers(self._token),
            connect_timeout_s=self._connect_timeout_s,
            stall_timeout_s=self._stall_timeout_s,
            ssl_context=self._ssl_context,
        )
        alarm = threading.Timer(max(deadline - time.monotonic(), 0.0), connection.close)
        alarm.daemon = True
        alarm.start()
        try:
            yield connection
        except (SourceLostError, TransferStalledError) as error:
            if time.monotonic() < deadline:
                raise
            raise TransferTimeoutError(
                f"source {self._source} had not sent {what} when the timeout was over", self.url
            ) from error
        finally:
            alarm.cancel()
            connection.release()
            alarm.join()


def _parse_url(url: str, default_scheme: str) -> SourceAddress:
    text = url.strip()
    try:
        return parse_metadata(text if "://" in text else f"{default_scheme}://{text}")
    except SourceLostError as error:
        raise ConfigError(
            f"url={url[:120]!r} cannot be used; expected http://HOST:PORT or https://HOST:PORT", party="url"
        ) from error


def _deadline(timeout: timedelta) -> float:
    return time.monotonic() + not_negative(timeout).total_seconds()


def _retry_after_s(answer: Answer) -> float:
    """Seconds that the peer wants to be left alone for; 0.0 where it does not say."""
    text = answer.header("Retry-After")
    return min(float(text), _MAX_PAUSE_S) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
