"""The ranks of a running job, seen from outside, without a Manager or a training loop: what they serve, and their state.

It finds a step that all of them can serve, and keeps it from going. A job that trains serves nothing until somebody wants it,
and its ranks do not hear of that in the same step. So a step is chosen that is still to come, and each rank is asked for it
ahead. Where all of them have one step open already, as outer loops have, that one is taken.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple, TypeVar

from torchft_ckpt.checkpointing.fetching.connection import (
    FetchOptions,
    default_num_streams,
)
from torchft_ckpt.checkpointing.fetching.fetch import Fetch
from torchft_ckpt.checkpointing.fetching.receive import BufferCache
from torchft_ckpt.checkpointing.fetching.source import DONE_TIMEOUT_S, SourceClient
from torchft_ckpt.checkpointing.progress import ProgressCallback
from torchft_ckpt.checkpointing.protocol import Index, SourceAddress, parse_metadata
from torchft_ckpt.checkpointing.resharding.fetch import ShardedFetch
from torchft_ckpt.checkpointing.resharding.plan import SourceGroup
from torchft_ckpt.checkpointing.state.format import MAX_MANIFEST_BYTES, Manifest, names_of_parts
from torchft_ckpt.checkpointing.state.target import StateTarget
from torchft_ckpt.config import TOKEN, not_negative, resolve
from torchft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    LighthouseUnreachableError,
    SourceLostError,
    SourceRefusedError,
    StateMismatchError,
    TransferCancelledError,
    TransferError,
    TransferStalledError,
    TransferTimeoutError,
)
from torchft_ckpt.memory import memory_bytes
from torchft_ckpt.threads import Threads, parallel_map
from torchft_ckpt.tls import Tls, resolve_tls

logger = logging.getLogger(__name__)
_MAX_THREADS = 32
_MAX_LEAD = 4096
_LEAD_FACTOR = 4
_GRACE_S = 0.5
_ANSWER_TIMEOUT = timedelta(seconds=30)
_CONNECT_TIMEOUT_S = 10.0
_AGAIN_S = 1.0
_PIECE_S = 15.0
"""So long groups are waited for until it is asked for the first time whether they are still those that have the state."""

_T = TypeVar("_T")
FindGroups = Callable[[], Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledState:
    """A state, and the step that it is the state of."""

    step: int
    state: object


class JobPeers:
    """All ranks of one replica group of a running job, or of several. One thread at a time; it keeps no connections.

    What ranks keep for us they copy aside when they train on, so whatever is not used is given back.

    Args:
        groups: for each replica group, what the `HTTPTransport.metadata()` of each rank returned, in the order of ranks:
            `http://HOST:PORT`; `HOST:PORT` is taken for it. Or a function that says which they are now: it is asked before each
            `pull` and `hold`, and until they have it whole, as groups end and come back elsewhere.
        token: shared secret of the job; default: `TORCHFT_CKPT_TOKEN`, else none.
        ssl_context: for clients; whom to believe, and who we are: only `https` is spoken then. Default: of
            `TORCHFT_CKPT_TLS_CA`, `_CERT` and `_KEY`, else the system's certificates, where the urls are `https`.
        stall_timeout: limit for each wait for a byte.

    Raises:
        ConfigError: the timeout or a url cannot be used, or a url is there twice.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]] | FindGroups,
        *,
        token: str | None = None,
        ssl_context: ssl.SSLContext | Tls | None = None,
        stall_timeout: timedelta = timedelta(seconds=15),
    ) -> None:
        if stall_timeout <= timedelta(0):
            raise ConfigError(
                f"stall_timeout={stall_timeout!r} cannot be used; expected a positive duration", "stall_timeout"
            )
        self._find = groups if callable(groups) else None
        self._groups: list[list[SourceAddress]] = []
        self.options = FetchOptions(
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            stall_timeout_s=stall_timeout.total_seconds(),
            num_streams=default_num_streams(),
            max_manifest_bytes=MAX_MANIFEST_BYTES,
            max_total_bytes=memory_bytes(),
            token=resolve(token, TOKEN, "", str) or None,
            receiver=uuid.uuid4().hex,
            ssl_context=ssl_context or resolve_tls(),
            deflated_manifests=True,
        )
        self._kept_lock = threading.Lock()
        self._kept: list[tuple[SourceAddress, Manifest]] = []
        """What ranks keep for us."""
        if not callable(groups):
            self._take(groups)

    @property
    def urls(self) -> str:
        """All of them, for messages."""
        return ", ".join(map(str, self._ranks))

    @property
    def _ranks(self) -> list[SourceAddress]:
        return [address for group in self._groups for address in group]

    def _take(self, groups: Sequence[Sequence[str]]) -> None:
        scheme = "http" if self.options.ssl_context is None else "https"
        self._groups = [[_parse_url(url, scheme) for url in group] for group in groups]
        if not self._groups or not self._groups[0]:
            raise ConfigError("urls is empty; name the ranks of a replica group", party="urls")
        urls = list(map(str, self._ranks))
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ConfigError(f"urls names {', '.join(twice[:5])} more than once", party="urls")

    def _following(self, get: Callable[[float], _T], deadline: float) -> _T:
        """Return what `get` does; while the groups are not to be had that a function names, ask it again which they are.

        `get` gets the time until which it may wait for them: each such piece is longer, for a job whose steps are.
        """
        piece_s = _PIECE_S
        while self._find is not None:
            try:
                self._take(self._find())
                return get(min(deadline, time.monotonic() + piece_s))
            except TransferTimeoutError as error:
                if time.monotonic() >= deadline:
                    raise
                logger.info("%s; looking for the job's groups again", error)
                piece_s *= 2
            except (SourceLostError, TransferStalledError, LighthouseUnreachableError) as error:
                if time.monotonic() + _AGAIN_S >= deadline:
                    raise
                logger.info("%s; looking for the job's groups again", error)
                time.sleep(_AGAIN_S)
        return get(deadline)

    def index(self, *, timeout: timedelta = _ANSWER_TIMEOUT) -> Index:
        """Return what the first rank serves now. Asks it for nothing more and keeps nothing there.

        Raises:
            TransferError: a subclass says why there is no answer.
            StateFormatError: the answer is none.
        """
        deadline = _deadline(timeout)
        return self._following(lambda until: self._index_of(self._ranks[0], until), deadline)

    def stacks(self, *, timeout: timedelta = _ANSWER_TIMEOUT) -> Iterator[tuple[str, str]]:
        """Yield the url of each rank, and where its threads are, in words; or why it does not say."""
        for address in self._ranks:
            try:
                with self._asking(address, None, _deadline(timeout), "its stacks") as client:
                    yield str(address), client.fetch_stacks()
            except CheckpointError as error:
                yield str(address), f"{error}\n"

    def manifest(self, step: int | None = None, *, timeout: timedelta = _ANSWER_TIMEOUT) -> Manifest:
        """Return all of the first rank's state but its bytes. Keeps nothing there.

        Args:
            step: the step; None for the newest that is served. If none is, the rank is asked to serve its next one.
            timeout: the overall deadline; a step that is not served yet is waited for until then.

        Raises:
            TransferError: a subclass says why there is none.
            StateFormatError: what the rank sends is not a manifest.
        """
        deadline = _deadline(timeout)
        return self._following(lambda until: self._manifest_of(self._ranks[0], step, until), deadline)

    def pull(
        self,
        step: int | None,
        *,
        timeout: timedelta,
        on_progress: ProgressCallback | None = None,
        into: object = None,
    ) -> PulledState:
        """Fetch the state of a step whole, every tensor put together from the ranks that hold parts of it.

        It is on the CPU, in fresh memory; what is one tensor there is one here. Values that are no tensors are those of the
        first rank.

        Args:
            step: the step; None for one that all ranks can serve soon: of one rank alone, the newest that it serves, or its next.
            into: of one rank alone: a state whose tensors are filled.

        Raises:
            TransferError: a subclass says why there is no state.
            StateMismatchError: the ranks do not hold all of it.
            StateFormatError: what a rank sends is not a state.
        """
        deadline = _deadline(timeout)
        return self._following(lambda until: self._pull(step, until, deadline, on_progress, into), deadline)

    def _pull(
        self, step: int | None, until: float, deadline: float, on_progress: ProgressCallback | None, into: object
    ) -> PulledState:
        """Fetch a state that is there by `until`."""
        if len(self._ranks) == 1:
            if until < deadline:
                self._manifest_of(self._ranks[0], step, until)
            return self._pull_alone(step, deadline, on_progress, into)
        held = self._hold(step, until)
        target = StateTarget(None)
        try:
            source = ShardedFetch(
                held.addresses,
                step=held.step,
                deadline=deadline,
                options=self.options,
                want=lambda group: target.wants(group.description(0)),
                on_progress=on_progress,
            ).run()
        finally:
            self.give_back()
        return PulledState(step=held.step, state=target.finish(source.description(0)))

    def _pull_alone(
        self, step: int | None, deadline: float, on_progress: ProgressCallback | None, into: object
    ) -> PulledState:
        """Fetch the state of the only rank, which has to hold all of it, as blocks."""
        fetch = Fetch(
            self._ranks,
            step=step,
            deadline=deadline,
            options=self.options,
            cache=BufferCache(),
            local_state=into,
            in_place=into is not None,
            on_progress=on_progress,
        )
        state, manifest = fetch.run(), fetch.manifest
        parts = names_of_parts(manifest)
        if parts:
            raise StateMismatchError(
                f"{self.urls} holds only parts of {len(parts)} tensors, such as {parts[0][:120]}: name all ranks of its replica "
                "group, in their order; nothing was saved",
                party=self.urls,
            )
        return PulledState(step=manifest.step, state=state)

    def give_back(self) -> None:
        """Tell ranks that nothing they keep for us is needed any more; without effect if nothing is. Any thread.

        Waits for a rank that does not answer for `DONE_TIMEOUT_S` at most; that one finds out by itself, as we are silent.
        """
        with self._kept_lock:
            kept, self._kept = self._kept, []
        if not kept:
            return
        options = replace(self.options, connect_timeout_s=DONE_TIMEOUT_S)

        def tell(one: tuple[SourceAddress, Manifest]) -> None:
            address, manifest = one
            source = SourceClient(address, manifest.step, options)
            source.tell_done(manifest)
            source.release()

        parallel_map(tell, kept, _MAX_THREADS, "torchft_ckpt-peers")

    def hold(self, step: int | None, deadline: float) -> HeldStep:
        """Have all ranks of one group, and of others as far as they can, keep the state of one step for us.

        What they kept before is given back. Whoever does not fetch this one calls `give_back`.

        Args:
            step: the step; None for one that all ranks can serve.
            deadline: on the monotonic clock.

        Raises:
            TransferError: a subclass says why it is not to be had.
            StateFormatError: what a rank sends is not a manifest.
        """
        return self._following(lambda until: self._hold(step, until), deadline)

    def _hold(self, step: int | None, deadline: float) -> HeldStep:
        self.give_back()
        if step is not None:
            return self._ask_all(step, deadline)
        opened = self._open_step(deadline)
        if opened is not None:
            try:
                return self._ask_all(opened, deadline)
            except SourceRefusedError as error:
                logger.info("step %d is gone: %s", opened, error)
        lead = 1
        while True:
            ahead = self._present_step(deadline) + lead
            try:
                return self._ask_all(ahead, deadline)
            except SourceRefusedError as error:
                if lead >= _MAX_LEAD:
                    raise
                logger.info("step %d was over before all ranks had heard that it is wanted: %s", ahead, error)
                lead *= _LEAD_FACTOR

    def _present_step(self, deadline: float) -> int:
        failure: CheckpointError | None = None
        for address in self._ranks:
            try:
                return self._manifest_of(address, None, deadline).step
            except (SourceLostError, TransferStalledError) as error:
                failure = failure or error
        raise failure or TransferError("no rank answers", party=self.urls)

    def _open_step(self, deadline: float) -> int | None:
        """Return the newest step that all ranks of a group serve now, if there is one.

        What is passed on does not count, nor what is only kept for others, and was left by its owner long ago.
        """
        for group in self._groups:
            served: list[set[int]] = []
            try:
                for address in group:
                    entries = self._index_of(address, deadline).snapshots
                    served.append({entry.step for entry in entries if entry.phase != "relay" and entry.is_fresh})
            except (SourceLostError, TransferStalledError) as error:
                logger.info("a rank does not answer: %s", error)
                continue
            common = set.intersection(*served)
            if common:
                return max(common)
        return None

    def _ask_all(self, step: int, deadline: float) -> HeldStep:
        """Ask every rank of every group at once, in our name: from then on they keep that state for us.

        The first group of which all ranks have answered comes first; the others are waited for a little longer.
        """
        over = threading.Event()
        sources: list[SourceClient] = []

        def ask(address: SourceAddress) -> Manifest:
            with self._asking(address, step, deadline, f"step {step}", self.options) as source:
                sources.append(source)
                if over.is_set():
                    source.close()
                manifest = _wait_for_manifest(source, deadline)
            with self._kept_lock:
                self._kept.append((address, manifest))
            return manifest

        with Threads("torchft_ckpt-peers", min(len(self._ranks), _MAX_THREADS)) as threads:
            asked = [[threads.submit(ask, address) for address in group] for group in self._groups]
            try:
                first = _first_whole(asked)
                if first is not None:
                    wait([future for group in asked for future in group], timeout=_GRACE_S)
            finally:
                over.set()
                for source in list(sources):
                    source.close()
        if first is None:
            self.give_back()
            raise _why_none(asked)
        order = [first, *(number for number in range(len(asked)) if number != first)]
        addresses = [
            [
                None if future.exception() is not None else address
                for address, future in zip(self._groups[number], asked[number], strict=True)
            ]
            for number in order
        ]
        manifests: list[Manifest | None] = [future.result() for future in asked[first]]
        return HeldStep(step, addresses, SourceGroup(list(map(str, self._groups[first])), manifests))

    def _index_of(self, address: SourceAddress, deadline: float) -> Index:
        with self._asking(address, None, deadline, "the index") as client:
            return client.fetch_index()

    def _manifest_of(self, address: SourceAddress, step: int | None, deadline: float) -> Manifest:
        what = "a state" if step is None else f"step {step}"
        with self._asking(address, step, deadline, what) as client:
            return _wait_for_manifest(client, deadline)

    @contextlib.contextmanager
    def _asking(
        self, address: SourceAddress, step: int | None, deadline: float, what: str, options: FetchOptions | None = None
    ) -> Iterator[SourceClient]:
        """Give a client that is closed at the deadline, however the rank drips its bytes.

        By default it asks as nobody, so that nothing is kept for us there, and of a state of any length.
        """
        client = SourceClient(address, step, options or replace(self.options, receiver="", max_total_bytes=None))
        alarm = threading.Timer(min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX), client.close)
        alarm.daemon = True
        alarm.start()
        try:
            yield client
        except (SourceLostError, TransferStalledError, TransferCancelledError) as error:
            if time.monotonic() < deadline:
                raise
            said = f": {error.__cause__}" if isinstance(error.__cause__, SourceRefusedError) else ""
            raise TransferTimeoutError(
                f"source {address} did not serve {what} within the timeout{said}; is it training?", str(address)
            ) from error
        finally:
            alarm.cancel()
            client.release()
            alarm.join()


class HeldStep(NamedTuple):
    """A step that ranks keep for us."""

    step: int
    addresses: list[list[SourceAddress | None]]
    """By group, the whole one first; None of a rank that does not keep it."""
    group: SourceGroup
    """What the first group holds."""


def _first_whole(asked: Sequence[Sequence[Future[Manifest]]]) -> int | None:
    """Wait for a group of which all ranks have answered; None if each has one that failed."""
    left = {future for group in asked for future in group}
    while True:
        for number, group in enumerate(asked):
            if all(future.done() and future.exception() is None for future in group):
                return number
        if all(any(future.done() and future.exception() is not None for future in group) for group in asked):
            return None
        _, left = wait(left, return_when=FIRST_COMPLETED)


def _why_none(asked: Sequence[Sequence[Future[Manifest]]]) -> BaseException:
    """Return why no group is whole: that the step is over somewhere, if it is, for another one may do then."""
    failures = [error for group in asked for future in group if (error := future.exception()) is not None]
    return next((error for error in failures if isinstance(error, SourceRefusedError)), failures[0])


def _wait_for_manifest(client: SourceClient, deadline: float) -> Manifest:
    """Ask until it is served, or the client is closed: then what the rank said last is the cause of the error."""
    refusals: deque[SourceRefusedError] = deque(maxlen=1)
    try:
        return client.fetch_manifest(deadline=deadline, pause=client.pause, on_refused=refusals.append)
    except TransferCancelledError as error:
        raise error from (refusals[-1] if refusals else None)


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
