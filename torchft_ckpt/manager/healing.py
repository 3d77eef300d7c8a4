"""Fetches the state that a quorum, or the lighthouse, names, from all who hold it.

The state is {"user": {key: state_dict()}, "torchft": {"step", "batches_committed", "quorum_id", "epoch", "settings",
"groups", "owners"}}: torchft's layout, the name of the state, because a source may still hold another one of the same step, its
optimizers' settings, and which parameters these and the optimizers' state belong to.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

from torchft_ckpt.checkpointing import CheckpointTransport
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.state.parameters import StateHere
from torchft_ckpt.checkpointing.state.tree import in_words
from torchft_ckpt.core.coordination.joining import Reception
from torchft_ckpt.core.coordination.learning import Distance
from torchft_ckpt.core.coordination.messages import Answer, Receives, StateLocated
from torchft_ckpt.core.coordination.recovery import same_rank_peers
from torchft_ckpt.errors import (
    CheckpointError,
    LayoutMismatchError,
    SourceLostError,
    SourceRefusedError,
    StateFormatError,
    StateMismatchError,
    TransferCancelledError,
    torn_where_it_raises,
)
from torchft_ckpt.manager.comparing import Differences
from torchft_ckpt.manager.state_registry import OwnState
from torchft_ckpt.threads import Event, Threads, is_done

logger = logging.getLogger(__name__)
_CANCEL_TIMEOUT_S = 30.0
_SAY_S = 0.25
_SLOW_CALL_S = 0.5


def _left_bytes(progress: TransferProgress) -> int:
    return progress.total_bytes - progress.received_bytes - progress.skipped_bytes


def _done_bytes(progress: TransferProgress) -> int:
    return progress.brought_bytes + progress.skipped_bytes


def _tell_nobody(reach_s: float, does: Receives) -> None:
    """Nobody waits for what is received."""


class Healing:
    """One fetch at a time, on a thread of its own, from all sources that the quorum names.

    Args:
        timeout: overall deadline of a fetch.
        rank, world_size: in the replica group.
        own: this Manager's part of the state, which knows what a source's can be.
    """

    def __init__(
        self, transport: CheckpointTransport[Any], timeout: timedelta, *, rank: int, world_size: int, own: OwnState
    ) -> None:
        self._transport = transport
        self._own = own
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._worker = Threads("torchft_ckpt-heal")
        self._fetch: Future[Any] | None = None
        self._wanted: Answer | StateLocated | None = None
        self._is_cancelled = False
        self._is_in_place = False
        self.may_overwrite = True
        """False: states are received into fresh memory only, as a load function writes to what it is given."""
        self._differences: Differences | None = None
        self._reception = Reception()
        self.distance = Distance()
        self.progress: TransferProgress | None = None
        """Of the transfer that runs, or of the last one."""
        self._tell: Callable[[float, Receives], None] = _tell_nobody
        self._expected_s = self._reach_s = 0.0
        """How long a transfer takes, as it was expected when a state was last asked for; and as the one that runs told last."""
        self.took_s = 0.0
        self._calls = "", 0.0

    def start(
        self,
        wanted: Answer | StateLocated,
        local: dict[str, Any],
        in_place: bool,
        timeout: timedelta | None = None,
        compare: Callable[[object, bool], Differences] | None = None,
        on_end: Callable[[str], None] = lambda failure: None,
        tell: Callable[[float, Receives], None] = _tell_nobody,
    ) -> None:
        """Begin to fetch a state.

        Args:
            wanted: which, and who holds it.
            local: what the registered functions return here: what is equal in it is not fetched.
            in_place: receive into it; the training thread waits for `wait` before it does anything with it.
            timeout: instead of the one given to the constructor.
            compare: says what differs between what is here and what the registered functions returned there; told whether the
                digests of all tensors are equal.
            on_end: called on the thread when the fetch is over and compared, with the reason where it failed.
            tell: called on it a few times a second with the seconds that the transfer, or later the load, still takes; 0 at
                the end of each.
        """
        self._wanted = wanted
        self.cancel()
        self._is_cancelled = False
        can_overwrite = self.may_overwrite and self._transport.uses_memory_of_state
        self._is_in_place = in_place and can_overwrite
        limit = self._timeout if timeout is None else timeout
        self._differences = None
        self._tell = tell
        self._reception.begin()
        self._reach_s = self._expected_s
        self.progress = None

        def fetch() -> Any:
            self.progress = None  # the transfer before may have told how far it was when it was given up
            try:
                state = self._run(wanted, local, limit)
                tell(0.0, Receives.TRANSFER)
                if compare is not None:
                    is_equal = self.progress is not None and self.progress.is_equal
                    differences = compare(state.get("user") if isinstance(state, dict) else None, is_equal)
                    if self._wanted is wanted:
                        self._differences = differences
            except BaseException as error:
                on_end(str(error) or type(error).__name__)
                raise
            on_end("")
            return state

        self._fetch = self._worker.submit(fetch)

    @property
    def is_in_place(self) -> bool:
        """Whether the state that was fetched is in the tensors that were here."""
        return self._is_in_place

    def differences(self) -> Differences:
        """Return what was found to differ, where it was to be compared; call it after `wait`."""
        if self._differences is None:
            raise RuntimeError("internal error: nothing was to be compared")
        return self._differences

    @property
    def differs(self) -> bool:
        """Whether what was fetched is to be loaded: it was compared with nothing, or is not what is here."""
        return self._differences is None or bool(self._differences.paths)

    def expected_s(self, num_bytes: int) -> float:
        """Return how long receiving a state takes."""
        self._expected_s = self._reception.expected_s(num_bytes)
        return self._expected_s

    @property
    def guesses(self) -> bool:
        """Whether `expected_s` rests on no measurement."""
        return not self._reception.has_measured

    def followed(self) -> None:
        """The state that was received outside of the quorum is loaded: of the next one only what has changed is lacking."""
        self.distance.followed()
        self._reception.forget_left()

    @property
    def load_s(self) -> float:
        return self._reception.load_s

    def _note(self, progress: TransferProgress) -> None:
        self.progress = progress
        left_bytes = _left_bytes(progress)
        reach_s = self._reception.progress(
            left_bytes=left_bytes, done_bytes=_done_bytes(progress), elapsed_s=progress.elapsed_s
        )
        self._reach_s = reach_s
        if left_bytes and not self._is_cancelled:
            self._tell(reach_s, Receives.TRANSFER)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Tell how long loading still takes while the body, which loads what arrived and looks at the result, runs."""
        started = time.monotonic()
        with self.saying(lambda: self._tell(self._reception.loading(time.monotonic() - started), Receives.LOADS)):
            yield
            self._reception.loaded(time.monotonic() - started)
        self.calls("")
        self._tell(0.0, Receives.LOADS)

    def calls(self, function: str) -> None:
        """The training thread begins to call the registered functions of this name."""
        self._calls = function, time.monotonic()

    @property
    def takes(self) -> str:
        """What the call in progress, or the last one, has taken by now, in words; empty: next to nothing."""
        function, since = self._calls
        took_s = time.monotonic() - since
        return f"its {function} has taken {took_s:.1f} s" if function and took_s >= _SLOW_CALL_S else ""

    @contextlib.contextmanager
    def saying(self, say: Callable[[], None], after_s: float = 0.0) -> Iterator[None]:
        """Call something a few times a second while the body runs, on the thread that fetches; first after so long."""
        is_over = Event()

        def repeat() -> None:
            is_over.wait(after_s)
            while not is_over.is_set():
                say()
                is_over.wait(_SAY_S)

        said = self._worker.submit(repeat)
        try:
            yield
        finally:
            is_over.set()
            if not said.cancel():
                said.result()

    def wait(self, *, says: bool = False) -> dict[str, Any]:
        """Return the received state, whole and of the right step; its own part is what a Manager says of itself.

        Args:
            says: tell how long it takes also while nothing comes: a source may take long before the first byte.

        Raises:
            TransferError, StateFormatError: why it could not be had; a state of another name is refused.
        """
        if self._fetch is None or self._wanted is None:
            raise RuntimeError("internal error: no fetch was started")
        while not is_done(self._fetch, _SAY_S):
            if says and not self._is_cancelled:
                self._tell(max(self._reach_s, _SAY_S), Receives.TRANSFER)
            if self._is_cancelled:  # once more: it may not have begun when it was
                self._transport.cancel_recv()
        state = self._fetch.result()
        wanted = self._wanted.version
        own = state.get("torchft") if isinstance(state, dict) else None
        found = tuple(own.get(key) for key in ("step", "quorum_id", "epoch")) if isinstance(own, dict) else None
        if not isinstance(own, dict) or found != (wanted.step, wanted.quorum_id, wanted.epoch):
            raise SourceRefusedError(
                f"asked {self._source_name()} for {wanted}, got (step, quorum, epoch) {in_words(found)}"
            )
        if complaint := self._own.complaint_about(own):
            raise StateFormatError(f"{self._source_name()} sent {wanted} with {complaint}", self._source_name())
        return state

    def cancel(self) -> None:
        """Give up a fetch in progress; what it brings is thrown away. Any thread."""
        fetch = self._fetch
        if fetch is not None and not fetch.done():
            self._is_cancelled = True
            self._transport.cancel_recv()

    def has_overwritten(self) -> bool:
        """Whether the last fetch has written to the state that is here, or may have: until it is loaded, it is torn.

        Waits for a fetch that was cancelled, some milliseconds as a rule.
        """
        fetch = self._fetch
        if fetch is None or not self._is_in_place:
            return False
        try:
            error = fetch.exception(timeout=_CANCEL_TIMEOUT_S)
        except (TimeoutError, FutureTimeoutError, CancelledError):
            return True
        return not isinstance(error, CheckpointError) or error.state_overwritten

    def shutdown(self) -> None:
        self.cancel()
        self._worker.shutdown(timeout_s=5.0)

    def _run(self, wanted: Answer | StateLocated, local: dict[str, Any], limit: timedelta) -> Any:
        if self._is_cancelled or self._wanted is not wanted:
            raise TransferCancelledError("the step that this transfer was for is over")
        sources = [source for source in wanted.sources if any(source.checkpoint_addresses)]
        if not sources:
            raise SourceLostError(f"no source of {wanted.version} can be reached for this rank")
        names = ", ".join(source.replica_id for source in sources)
        step = wanted.version.step
        started = time.monotonic()
        logger.info("fetching step %d from %s", step, names)
        groups = [source.checkpoint_addresses for source in sources]
        local_state = {"user": local}
        if isinstance(local, StateHere):
            local_state = local.laid_out({"user": {**local}})
        state = self._fetch_state(groups, step, limit, local_state)
        self.took_s = time.monotonic() - started
        logger.info("fetched step %d from %s in %.3f s", step, names, self.took_s)
        return state

    def _fetch_state(self, groups: list[list[str]], step: int, limit: timedelta, local_state: dict[str, Any]) -> Any:
        """Fetch from the ranks of the same number, or, where their shards are not those of this rank, from all ranks."""
        until = time.monotonic() + limit.total_seconds()
        addresses = same_rank_peers(groups, self._rank, self._world_size)
        is_alike = bool(addresses)
        has_written = False
        with torn_where_it_raises(f"fetching step {step}", "local_state", lambda: has_written):
            while True:
                options: dict[str, Any] = {
                    "local_state": local_state,
                    "in_place": self._is_in_place,
                    "on_progress": self._note,
                }
                try:
                    if is_alike:
                        return self._transport.fetch_checkpoint(addresses, step, limit, **options)
                    return self._transport.fetch_sharded(groups, self._rank, self._world_size, step, limit, **options)
                except StateMismatchError as error:
                    # Of sources that differ an earlier one may have sent something.
                    has_written = has_written or error.state_overwritten
                    if is_alike and isinstance(error, LayoutMismatchError):
                        logger.info("re-sharding: %s", error)
                        is_alike = False
                    elif self._is_in_place and not has_written:
                        # A tensor of another shape: whether that can be loaded is for the user's function to say.
                        logger.info("not received in place: %s", error)
                        self._is_in_place = False
                    else:
                        raise
                limit = timedelta(seconds=max(until - time.monotonic(), 0.0))

    def _source_name(self) -> str:
        return self._wanted.sources[0].replica_id if self._wanted and self._wanted.sources else "the source"
