"""Applies entries of a redo log with the optimizers that are here: the same settings, the same gradients, their own `step`.

An optimizer steps by its guarded `step`, so what hangs on it is replayed, too: an average of the weights that is kept by a hook.
Whether the state is then the source's to the last bit is not assumed: the join compares.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Protocol

import torch

from torchft_ckpt.checkpointing.state.local_state import copy_to
from torchft_ckpt.checkpointing.state.redo_entry import OptimizerStep, RedoEntry, num_bytes_of
from torchft_ckpt.checkpointing.state.shards import adapter_of
from torchft_ckpt.core.coordination.learning import chase_limit_s, keeps_up
from torchft_ckpt.core.coordination.messages import ApplyRedo, QuorumFormed, Source, StateKept, StateVersion
from torchft_ckpt.core.coordination.recovery import same_rank_peers
from torchft_ckpt.errors import (
    CheckpointError,
    SourceRefusedError,
    StateMismatchError,
    TorchftCkptError,
    torn_where_it_raises,
)
from torchft_ckpt.manager.optimizer_settings import take_settings, with_inner
from torchft_ckpt.manager.redo_recording import parameters_of
from torchft_ckpt.manager.state_registry import OwnState
from torchft_ckpt.threads import Threads

logger = logging.getLogger(__name__)
_SAY_S = 0.25
_ALIVE_S = 3.0
_STALE_S = 30.0
"""Half a lease of a source's log."""
_WITH_OTHERS_S = 0.05
"""So long at most an entry waits that is here, once all ranks have it, and for a spare."""
_ENOUGH = 4
"""Entries that say how long one takes."""


class Follower(Protocol):
    """Fetches entries one after another, on one thread: `checkpointing/fetching/redo.py`."""

    def next_entry(self, after: StateVersion, timeout_s: float) -> RedoEntry | None:
        """Return the entry that leads on from a version; None: there was none within the time."""

    def tell_held(self, version: StateVersion) -> None:
        """Tell the sources which version is here."""

    def close(self) -> None:
        """Wake and fail whoever waits. Any thread."""

    def release(self) -> None:
        """Free all, and say so to the sources."""


class Beside(Protocol):
    """Those who train, and the other ranks of this group, while this rank replays: `recovery.py`."""

    def may_go_on(self) -> bool:
        """Whether to fetch more entries. Asked a few times a second."""

    def stays(self) -> bool:
        """Whether this group is a spare that was not called: it goes on following when it is close. Asked as often."""

    def rest(self, seconds: float) -> None:
        """Wait so long at most, or until this group hears something."""

    def tell(self, step: int) -> None:
        """Say to which step the state was brought. Called as often, or more."""

    def agree(self, step: int, is_newest: bool, failure: str, wait_s: float) -> ApplyRedo:
        """Say up to which step entries are here, and whether there are no later ones, or none are to be fetched, or why none can
        be; return up to which step all ranks apply them. Waits so long for news of that."""


class _Early:
    """Entries that are fetched while the group warms up, before the state that they lead on from is in its place.

    Args:
        max_bytes: so much of them.
    """

    def __init__(self, version: StateVersion, max_bytes: int) -> None:
        self.version = self.fetched_to = version
        self.left_bytes = max_bytes
        self.entries: deque[RedoEntry] = deque()
        self.took_s: deque[float] = deque(maxlen=_ENOUGH)
        """How long the last entries took to come, or a little less than that and `_SAY_S`."""
        self.follower: Follower | None = None
        self.is_wanted = threading.Event()
        """The state is in its place: what is on its way comes, and no more is asked for."""
        self.is_over: Future[None] = Future()

    def run(self, follow: Callable[[], Follower], tell: Callable[[int], None]) -> None:
        try:
            self.follower = follow()
            size = 0
            while not self.is_wanted.is_set():
                tell(self.fetched_to.step)
                if size >= self.left_bytes:
                    self.follower.tell_held(self.fetched_to)  # else they free what is kept for this group
                    self.is_wanted.wait(_ALIVE_S)
                    continue
                began = time.monotonic()
                entry = self.follower.next_entry(self.fetched_to, _SAY_S)
                if entry is not None:
                    self.took_s.append(time.monotonic() - began)
                    size = _num_bytes(entry)
                    self.left_bytes -= size
                    self.entries.append(entry)
                    self.fetched_to = entry.version
        except TorchftCkptError as error:
            logger.info("no redo entry after step %d is received in advance: %s", self.fetched_to.step, error)
            if self.follower is not None:
                self.follower.release()
                self.follower = None


class Replay:
    """Brings the state that a learner has received to that of now, by the redo logs of those that sent it.

    Entries are fetched on a thread of its own and applied on the training thread, one while the next one comes.

    Args:
        follow: returns what fetches the entries, from sources with these addresses, for optimizers with these parameters.
            None: the transport has no redo logs.
        optimizers: returns those that are guarded, in the order in which all replicas guard them.
        rank, world_size: in the replica group.
        own: gets the number of committed batches of each entry.
        mark_torn: called before the first entry is applied: from then on the state has no name until the join has compared it.
    """

    def __init__(
        self,
        follow: Callable[[Sequence[str], Sequence[Sequence[torch.Tensor]]], Follower] | None,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        *,
        rank: int,
        world_size: int,
        own: OwnState,
        mark_torn: Callable[[], None],
    ) -> None:
        self._follow = follow
        self._optimizers = optimizers
        self._rank = rank
        self._world_size = world_size
        self._mark_torn = mark_torn
        self._own = own
        self.step: int | None = None
        """While an entry is applied: the step that hooks of the optimizers see."""
        self._heard_at = 0.0
        """When a source said last what it has."""
        self._worker = Threads("torchft_ckpt-redo")
        self._follower: Follower | None = None
        self._held = StateVersion()
        """The state here was brought to this version."""
        self._fetched_to = StateVersion()
        self._ready: deque[RedoEntry] = deque()
        """Entries that are here and not applied yet."""
        self._fetch: Future[bool] | None = None
        self._took_s: deque[float] = deque(maxlen=_ENOUGH)
        """How long it took to fetch each of the last entries."""
        self._early: _Early | None = None
        self._is_joining = False
        self._began = 0.0
        self._tell: Callable[[float], None] = lambda reach_s: None
        self.was_current = False
        """The state was brought to that of now since the last transfer."""
        self.entry_bytes = 0
        """The size of the largest entry so far."""
        self.num_replayed = 0

    @property
    def is_able(self) -> bool:
        """Whether entries can be fetched and applied here."""
        return self._follow is not None and bool(self._optimizers())

    @property
    def is_stale(self) -> bool:
        """Whether the sources may have given this follower up: it has asked for nothing for long."""
        return self.is_on and time.monotonic() - self._heard_at > _STALE_S

    @property
    def is_on(self) -> bool:
        """A state is here that is, or can be, brought forward."""
        return self._follower is not None

    def receive_early(self, kept: StateKept, max_bytes: int, tell: Callable[[int], None]) -> None:
        """Begin to fetch the entries that lead on from a state, while this group warms up; `chase` goes on from there.

        On any thread; it does not block.

        Args:
            kept: the state, and who holds it.
            max_bytes: fetch so much at most.
            tell: called a few times a second with the step up to which there are entries.
        """
        self._drop_early()
        early = _Early(kept.version, max_bytes)
        try:
            early.is_over = self._worker.submit(early.run, lambda: self._follow_those(kept.sources), tell)
        except RuntimeError as error:
            logger.info("no redo entry is received in advance: %s", error)
        else:
            self._early = early

    def _follow_those(self, sources: Sequence[Source]) -> Follower:
        if self._follow is None:
            raise SourceRefusedError("this transport has no redo logs", party="redo log")
        own = same_rank_peers([source.checkpoint_addresses for source in sources], self._rank, self._world_size)
        if sources and not own:
            raise SourceRefusedError(
                "the groups that train have another number of ranks, whose gradients are cut otherwise",
                party="redo log",
            )
        return self._follow(own, [parameters_of(optimizer) for optimizer in self._optimizers()])

    def _drop_early(self) -> None:
        early, self._early = self._early, None
        if early is None:
            return
        early.is_wanted.set()
        self._worker.submit(lambda: None if early.follower is None else early.follower.release())

    def _take_early(self, version: StateVersion, beside: Beside) -> _Early | None:
        """Return what was fetched early, where it leads on from this version. Waits for the entry that is on its way."""
        early = self._early
        if early is not None and early.version == version:
            early.is_wanted.set()
            while beside.may_go_on():
                beside.tell(version.step)
                if wait([early.is_over], _SAY_S).done:
                    self._early = None
                    return early
        self._drop_early()
        return None

    def chase(self, formed: QuorumFormed, took_s: float, beside: Beside) -> str:
        """Apply entries until the state is that of now, a step at most behind. On the training thread.

        Args:
            formed: named the state that was received, and loaded just now.
            took_s: the transfer took so long.
            beside: the other ranks of this group, and those who train.

        Returns:
            Why the state cannot be brought forward; empty: it was, or it was not to go on.
        """
        if self._follow is None:
            return ""
        self._held = self._fetched_to = formed.version
        self._took_s.clear()
        self._ready.clear()
        self.was_current = False
        began, before = time.monotonic(), self.num_replayed
        try:
            early = self._take_early(formed.version, beside)
            if early is not None:
                self._ready, self._fetched_to = early.entries, early.fetched_to
                self._follower = early.follower
                self._took_s.extend(early.took_s)
                self.entry_bytes = max([self.entry_bytes, *map(_num_bytes, early.entries)])
            self._follower = self._follower or self._follow_those(formed.sources)
            self._heard_at = time.monotonic()
            self._chase(formed, chase_limit_s(took_s), beside)
        except TorchftCkptError as error:
            self.end()
            if not isinstance(error, CheckpointError):
                raise
            return str(error)
        except Exception as error:  # noqa: BLE001 - memory, threads: the state is received anew
            self.end()
            return f"{type(error).__name__}: {error}"
        logger.info(
            "replayed %d steps in %.1f s, the state is that of step %d",
            self.num_replayed - before,
            time.monotonic() - began,
            self._held.step,
        )
        return ""

    def _chase(self, formed: QuorumFormed, limit_s: float, beside: Beside) -> None:
        """Apply entries as `chase` does, so long at most, and of a spare so long at most until it is current again."""
        began, before, stops, failure, wait_s = time.monotonic(), self.num_replayed, False, "", 0.0
        while True:
            stops = stops or not beside.may_go_on()
            beside.tell(self._held.step)
            is_newest = stops or (self.was_current and not beside.stays())
            told = beside.agree(self._fetched_to.step, is_newest, failure, wait_s)
            wait_s = 0.0
            goes_on = not (told.is_last or told.failure or failure)
            if (
                self._ready and self._ready[0].version.step <= told.step
            ):  # all ranks apply it, also if one has failed since
                if len(self._ready) == 1 and goes_on:  # the next one comes meanwhile
                    self._fetch = self._fetch or self._worker.submit(self._fetch_next, 0.0)
                self._apply(self._ready.popleft())
                continue
            if told.failure:
                raise SourceRefusedError(told.failure, party="redo log")
            if told.is_last and self._held.step >= told.step:
                return
            failure = failure or self._why_hopeless(formed, began, before, limit_s)
            if failure or len(self._ready) > 1:  # another rank of this group does not have the first of them yet
                wait_s = _SAY_S
                continue
            offer_s = _SAY_S if self.was_current else 0.0
            fetch = self._fetch = self._fetch or self._worker.submit(self._fetch_next, offer_s)
            if self.was_current and not fetch.done():
                beside.rest(_WITH_OTHERS_S)
            if wait([fetch], 0.0 if self.was_current else _WITH_OTHERS_S if self._ready else _SAY_S).done:
                self._fetch = None
                error = fetch.exception()
                if error is not None and not isinstance(error, CheckpointError):
                    raise error
                if error is not None:
                    failure = str(error)
                elif not fetch.result():
                    if not self.was_current and beside.stays():
                        logger.info("this spare is ready: its state is that of step %d", self._held.step)
                    self.was_current, began, before = True, time.monotonic(), self.num_replayed

    def _why_hopeless(self, formed: QuorumFormed, began: float, before: int, limit_s: float) -> str:
        """Say why this rank will not come close; empty: it may. It was not close since a moment, with so many steps replayed."""
        if len(self._took_s) == _ENOUGH and not keeps_up(min(self._took_s), formed.step_s):
            return (
                f"the gradients of a step take {min(self._took_s):.1f} s to arrive, and a step takes the others"
                f" {formed.step_s:.1f} s"
            )
        if time.monotonic() > began + limit_s:
            return (
                f"{self.num_replayed - before} steps were replayed in {time.monotonic() - began:.0f} s, and the others are still"
                " ahead: they train as fast as their gradients arrive"
            )
        return ""

    def fetch_to(
        self, version: StateVersion, limit_s: float, tell: Callable[[float], None], on_end: Callable[[str], None]
    ) -> None:
        """Begin to fetch the entries up to a version, beside a forward pass. They are not applied. Any thread but its own.

        Args:
            limit_s: for each entry to be offered.
            tell: called a few times a second with the seconds that are still expected.
            on_end: called on the thread that fetches when they are here, or with the reason why they will not be.
        """
        before = self._fetch

        def fetch() -> bool:
            try:
                if before is not None:
                    before.result()
                while self._fetched_to != version:
                    if self._fetched_to.step >= version.step or not self._fetch_next(limit_s):
                        raise SourceRefusedError(
                            f"the redo log led to {self._fetched_to}, and not to {version}", party="redo log"
                        )
            except BaseException as error:
                on_end(str(error) or type(error).__name__)
                raise
            on_end("")
            return True

        self._is_joining = True
        self._fetch = self._worker.submit(fetch)
        self._began, self._tell = time.monotonic(), tell

    def cancel(self) -> None:
        """What `fetch_to` fetches is of no use any more. Any thread."""
        follower = self._follower
        if self._is_joining and follower is not None:
            follower.close()

    def likely_s(self, within_s: float) -> float:
        """Return how long to wait before a forward pass for what `fetch_to` fetches: 0 where no entry ever came so soon."""
        return within_s if min(self._took_s, default=0.0) <= within_s else 0.0

    def has_arrived(self, within_s: float) -> bool:
        """Wait so long at most for what `fetch_to` fetches; whether it is over, and did not fail."""
        return self._wait(within_s) and self._fetch is not None and self._fetch.exception() is None

    def apply(self, check: Callable[[], None], await_others: Callable[[], None]) -> None:
        """Wait for what `fetch_to` fetches, and apply it. On the training thread.

        Args:
            check: called a few times a second; it raises where this group has to end.
            await_others: waits until the other ranks of this group have what they fetch, too; raises where one will not.

        Raises:
            CheckpointError: it could not be fetched, or not be applied.
        """
        while not self._wait(_SAY_S):
            check()
        fetch, self._fetch = self._fetch, None
        self._is_joining = False
        if fetch is not None:
            fetch.result()
        await_others()
        while self._ready:
            self._apply(self._ready.popleft())

    def end(self, *, also_early: bool = True) -> None:
        """Follow no longer; the sources hear so. On the training thread, or while it waits.

        `also_early`: of what is fetched while this group warms up, too.
        """
        if also_early:
            self._drop_early()
        follower, self._follower = self._follower, None
        self._is_joining = False
        fetch, self._fetch = self._fetch, None
        self._ready.clear()
        if follower is None:
            return
        if fetch is not None and not fetch.done():
            follower.close()
        self._worker.submit(follower.release)

    def shutdown(self) -> None:
        self.end()
        self._worker.shutdown(timeout_s=5.0)

    def _wait(self, within_s: float) -> bool:
        """Wait for the fetch in progress, and tell how long it may take."""
        until = time.monotonic() + within_s
        while self._fetch is not None and not self._fetch.done():
            elapsed_s, left_s = time.monotonic() - self._began, until - time.monotonic()
            if left_s <= 0:
                return False
            beyond_s = elapsed_s - max(self._took_s, default=0.0)
            self._tell(max(-beyond_s, beyond_s / 2, _SAY_S))
            wait([self._fetch], min(left_s, _SAY_S))
        return True

    def _fetch_next(self, timeout_s: float) -> bool:
        """Fetch the next entry; False: there is none yet. On its own thread."""
        follower = self._follower
        if follower is None:
            return False
        began = time.monotonic()
        entry = follower.next_entry(self._fetched_to, timeout_s)
        self._heard_at = time.monotonic()
        if entry is None:
            return False
        if not timeout_s or self._is_joining:  # else it may have waited for the others' step
            self._took_s.append(time.monotonic() - began)
        self.entry_bytes = max(self.entry_bytes, _num_bytes(entry))
        self._ready.append(entry)
        self._fetched_to = entry.version
        return True

    def _apply(self, entry: RedoEntry) -> None:
        if entry.after != self._held:
            raise SourceRefusedError(f"an entry after {entry.after} came, and {self._held} is here", party="redo log")
        self._mark_torn()
        self._own.batches_committed = entry.batches_committed
        self.step = entry.version.step
        try:
            apply_entry(entry, self._optimizers())
        finally:
            self.step = None
        self._held = entry.version
        self.num_replayed += 1


def _num_bytes(entry: RedoEntry) -> int:
    return sum(num_bytes_of(step.gradients) for step in entry.steps)


def apply_entry(entry: RedoEntry, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Bring the state from `entry.after`, which is here, to `entry.version`. On the training thread.

    The gradients that are here stay what they are, and settings become those that the source had in this step.

    Args:
        entry: that was checked for these optimizers.
        optimizers: that are guarded, in the order in which all replicas guard them.

    Raises:
        StateMismatchError: an optimizer has other parameter groups here; nothing was applied.
        CheckpointError: an optimizer raised in its step; the state is torn.
    """
    for step in entry.steps:
        _check_groups(step, optimizers[step.optimizer])
    with torn_where_it_raises(f"the replay of step {entry.version.step}", "optimizer"):
        for step in entry.steps:
            _replay(step, optimizers[step.optimizer])


def _check_groups(step: OptimizerStep, optimizer: torch.optim.Optimizer) -> None:
    there = [len(groups) for groups in step.settings]
    here = [len(member.param_groups) for member in with_inner([optimizer])]
    if there != here:
        raise StateMismatchError(
            f"optimizer {step.optimizer} and those in it have {there} parameter groups at the source, and {here} here",
            party="optimizer",
        )


def _replay(step: OptimizerStep, optimizer: torch.optim.Optimizer) -> None:
    take_settings(with_inner([optimizer]), step.settings)
    parameters = parameters_of(optimizer)
    with _gradients(parameters, step.gradients), _attributes(optimizer, step, parameters[0].device):
        optimizer.step()


@contextlib.contextmanager
def _gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Iterator[None]:
    own = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else _like(parameter, gradient)
        yield
    finally:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a gradient on the device and in the layout of its parameter, of which a part may be here."""
    adapter = adapter_of(parameter)
    if adapter is not None:
        boxes = adapter.boxes(parameter, "a parameter")
        return adapter.rebuild(parameter, [local.view(box.sizes) for box in boxes])
    if parameter.is_contiguous():
        return local.to(parameter.device)
    gradient = torch.empty_like(parameter, dtype=local.dtype, requires_grad=False)
    copy_to(gradient, local)
    return gradient


@contextlib.contextmanager
def _attributes(optimizer: torch.optim.Optimizer, step: OptimizerStep, device: torch.device) -> Iterator[None]:
    """Give the optimizer the attributes that a gradient scaler sets, on its device, for the time of its step."""
    for name, value in step.attributes.items():
        setattr(optimizer, name, value.to(device) if isinstance(value, torch.Tensor) else value)
    try:
        yield
    finally:
        for name in step.attributes:
            delattr(optimizer, name)
