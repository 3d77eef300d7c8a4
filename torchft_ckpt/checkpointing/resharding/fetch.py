"""Fetches boxes of one state from all ranks of one source group or several, within a deadline.

The calling thread asks every rank for its manifest, has the caller say what is wanted, and proves that it can be had before
a byte is asked for. Then one thread for each source brings parts; the calling thread decides when it is over, as `fetch.Fetch`
does. What is wanted may be written to before all is here; who wants it uses it only when `run` has returned.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torchft_ckpt.checkpointing.address import Route, SourceAddress
from torchft_ckpt.checkpointing.fetching.connection import Answer
from torchft_ckpt.checkpointing.fetching.options import FetchOptions
from torchft_ckpt.checkpointing.fetching.routes import Routes
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.progress import ProgressCallback, TransferProgress, tell
from torchft_ckpt.checkpointing.protocol import MAX_ACKNOWLEDGED_RUNS, MAX_BODY_BYTES, MAX_DIGESTED_BYTES, MAX_PARTS
from torchft_ckpt.checkpointing.resharding.plan import (
    Plan,
    PlannedPart,
    SourceGroup,
    heirs_among,
    plan_parts,
)
from torchft_ckpt.checkpointing.resharding.transfer import PartTransfer
from torchft_ckpt.checkpointing.serving.parts import regions_of
from torchft_ckpt.checkpointing.state.blocks import DIGEST_BYTES, count_blocks, format_ranges, start_blake3
from torchft_ckpt.checkpointing.state.collector import collector_paused
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.regions import gather, scatter, slices
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.paths import describe_paths
from torchft_ckpt.core.transfer import blocks_of
from torchft_ckpt.errors import (
    CheckpointError,
    DigestMismatchError,
    ReplicaDivergenceWarning,
    SourceLostError,
    SourceRefusedError,
    StateFormatError,
    StateMismatchError,
    TransferCancelledError,
    TransferError,
    TransferStalledError,
    TransferTimeoutError,
)
from torchft_ckpt.threads import Thread

logger = logging.getLogger(__name__)
_TICK_S = 0.1
_GRACE_S = 0.5
_PRIMARY_PATIENCE_S = 2.0
_JOIN_TIMEOUT_S = 5.0
_ACKNOWLEDGED_S = 0.5
"""Between two acknowledgements: working one out takes a while where there are many parts."""
_TELL_TIMEOUT_S = 0.5
_SLICE_BYTES = 1024 * 1024
_NUMBER_BYTES = 20
"""Of JSON, with its comma: no number of a part is longer."""


class ShardedFetch:
    """One fetch of boxes of one state. `run` is called once; `cancel` from any thread, at any time.

    Args:
        groups: for each source group, the addresses of its ranks, in order; None of one that is not known. The first is the
            primary, whose state counts.
        step: the step wanted.
        deadline: on the monotonic clock.
        options: how to fetch.
        want: called with the primary group's manifests, says what is wanted; what it raises ends the fetch.
        on_progress: called by the thread in `run`, a few times a second and at the end.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[SourceAddress | None]],
        *,
        step: int,
        deadline: float,
        options: FetchOptions,
        want: Callable[[SourceGroup], Sequence[Want]],
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self._groups = [list(group) for group in groups]
        self._names = [[_name(address, rank) for rank, address in enumerate(group)] for group in groups]
        self._party = ", ".join(name for names in self._names for name in names)
        self._step = step
        self._deadline = deadline
        self._options = options
        self._want = want
        self._on_progress = on_progress
        self._started_at = time.monotonic()
        self._routes = Routes(address for group in self._groups for address in group if address is not None)
        self._changed = threading.Condition()
        # All below belong to `_changed`.
        self._manifests: dict[str, Manifest] = {}
        self._failures: dict[str, CheckpointError] = {}
        self._clients: dict[str, list[SourceClient]] = {}
        self._trying: set[SourceClient] = set()
        """Connections that nothing waits for."""
        self._threads: list[threading.Thread] = []
        self._over: CheckpointError | None = None
        self._transfer: PartTransfer | None = None
        self.has_written = False
        """Whether something was written to what is wanted."""

    def cancel(self, reason: str = "the receiver gave it up") -> None:
        """Make `run` raise `TransferCancelledError`."""
        self._end(TransferCancelledError(f"fetch of step {self._step} from {self._party}: {reason}", party="receiver"))

    def run(self) -> SourceGroup:
        """Fetch what is wanted; return the manifests of the group whose state it is.

        Raises:
            TransferError: a subclass says why it was not had.
            StateFormatError: what a source sends is not a state.
            StateMismatchError: the sources do not hold what is wanted.
        """
        addresses = dict(
            item
            for names, group in zip(self._names, self._groups, strict=True)
            for item in zip(names, group, strict=True)
        )
        try:
            for name, address in addresses.items():
                if address is None:
                    self._failures[name] = SourceLostError(f"the address of {name} is not known", name)
                else:
                    self._spawn(functools.partial(self._work, address, name), name)
            groups, plan = self._choose_primary()
            transfer = PartTransfer(plan, heirs_among(groups))
            with self._changed:
                self._transfer = transfer
                self._changed.notify_all()
                failures = dict(self._failures)
            for name, error in failures.items():
                if name in plan.holders:
                    transfer.fail(name, error)
            self._watch(transfer)
            if transfer.outcome is not None:
                raise transfer.outcome
            self._warn_of_divergence(transfer)
            return groups[transfer.primary]
        finally:
            self._end(TransferCancelledError(f"fetch of step {self._step} is over", party="receiver"))
            self._stop_threads()
            self._report_progress()
            self._log_paths()

    # The calling thread

    def _choose_primary(self) -> tuple[list[SourceGroup], Plan]:
        """Wait for manifests; return the groups that answered, the primary first, and the plan of what is wanted of it."""
        failure: CheckpointError | None = None
        left = list(range(len(self._names)))
        while left:
            number = self._await_group(left)
            left.remove(number)
            group = self._group(number)
            if not any(group.manifests):
                continue
            try:
                with collector_paused():
                    wants = self._want(group)
                    plan = plan_parts(wants, [group], lambda: self._check_time(self._deadline))
            except (StateMismatchError, StateFormatError) as error:
                failure = failure or error
                if all(group.manifests) and isinstance(error, StateMismatchError):
                    raise  # it is whole, so it is what it is
                logger.info("%s cannot be the source: %s", group.names[0], error)
                continue
            # The others are waited for a little: what they can give need not come from this one.
            self._await_manifests([name for names in self._names for name in names], time.monotonic() + _GRACE_S)
            others = [self._group(other) for other in range(len(self._names)) if other != number]
            others = [other for other in others if any(other.manifests)]
            return self._plan_with(others, wants, group, plan)
        raise self._no_source(failure)

    def _plan_with(
        self, others: Sequence[SourceGroup], wants: Sequence[Want], primary: SourceGroup, plan: Plan
    ) -> tuple[list[SourceGroup], Plan]:
        """Return the groups that are used, and the plan with them: others only help, so one that cannot be used is left aside."""
        groups = [primary]
        until = (time.monotonic() + self._deadline) / 2
        together = [[*others]] if others else []
        while together:
            more = together.pop(0)
            try:
                with collector_paused():
                    plan = plan_parts(wants, [*groups, *more], lambda: self._check_time(until))
                groups += more
            except (StateFormatError, TransferTimeoutError) as error:
                if len(more) > 1:
                    together = [[other] for other in more]
                else:
                    logger.warning("nothing is asked of %s: %s", more[0].names[0], error)
        return groups, plan

    def _check_time(self, until: float) -> None:
        """Raise why the fetch is over, if it is, or that it is too late."""
        if self._over is not None:
            raise self._over
        if time.monotonic() >= until:
            raise self._too_late("nothing (what the sources hold takes long to compare)")

    def _await_group(self, candidates: Sequence[int]) -> int:
        """Wait until the first of some groups has answered; after some patience any that has will do.

        Raises:
            CheckpointError: the fetch is over, or the deadline has passed.
        """
        patient_until = time.monotonic() + _PRIMARY_PATIENCE_S
        while True:
            is_patient = time.monotonic() < patient_until
            for number in candidates[:1] if is_patient else candidates:
                if self._has_settled(self._names[number]):
                    return number
            names = self._names[candidates[0]]
            self._await_manifests(names, patient_until if is_patient else time.monotonic() + _TICK_S)

    def _has_settled(self, names: Sequence[str]) -> bool:
        with self._changed:
            return all(name in self._manifests or name in self._failures for name in names)

    def _no_source(self, failure: CheckpointError | None) -> CheckpointError:
        with self._changed:
            failures = dict(self._failures)
        if not failures:
            return failure or TransferError(f"nothing of step {self._step} is held by {self._party}", self._party)
        (first, error), *others = failures.items()
        if failure is not None:  # of a group that did not answer whole: what does not fit may be for want of the rest
            return type(error)(f"{failure} ({first}: {error})", party=error.party)
        also = "".join(f"; {name}: {str(other)[:300]}" for name, other in others)
        return type(error)(f"no source is left. {first}: {error}{also}", party=error.party)

    def _await_manifests(self, names: Sequence[str], until: float) -> None:
        """Wait until each has answered or failed.

        Raises:
            CheckpointError: the fetch is over.
        """
        with self._changed:
            while any(name not in self._manifests and name not in self._failures for name in names):
                if self._over is not None:
                    raise self._over
                now = time.monotonic()
                if now >= self._deadline:
                    raise self._too_late("no manifest")
                if now >= until:
                    return
                self._changed.wait(min(until - now, _TICK_S))
            if self._over is not None:
                raise self._over

    def _group(self, number: int) -> SourceGroup:
        names = self._names[number]
        with self._changed:
            return SourceGroup(names, [self._manifests.get(name) for name in names])

    def _watch(self, transfer: PartTransfer) -> None:
        """Wait for the outcome; look after the transfer a few times a second."""
        adopter: threading.Thread | None = None
        while True:
            with transfer.changed:
                remaining_s = self._deadline - time.monotonic()
                if not transfer.over and remaining_s > 0:
                    transfer.changed.wait(min(remaining_s, _TICK_S))
                if transfer.over:
                    return
            with self._changed:
                if self._over is not None:
                    transfer.end(self._over)
                    return
            if self._deadline <= time.monotonic():
                arrived = f"{transfer.received_bytes} of {transfer.total_bytes} bytes"
                transfer.end(self._too_late(arrived))
                return
            for path in transfer.overdue():
                error = TransferStalledError(f"{path} is much slower than others at the end of the transfer", path)
                logger.info("%s", error)
                transfer.cut_path(path, error)
                self._close_clients(transfer.source_of(path), path)
            slow, again = transfer.judge_paths()
            for path in slow:
                logger.info(
                    "nothing more is asked at %s: another address of that source gives more than four times as much",
                    path,
                )
                self._close_clients(transfer.source_of(path), path)
            self._use_again(transfer, again)
            if transfer.to_confirm() is not None and (adopter is None or not adopter.is_alive()):
                adopter = self._spawn(functools.partial(self._adopt, transfer), None)
            self._report_progress()

    def _too_late(self, arrived: str) -> TransferTimeoutError:
        with self._changed:
            waiting = [f"{name}: {error}" for name, error in self._failures.items()]
        why = f" ({'; '.join(waiting)[:600]})" if waiting else ""
        return TransferTimeoutError(
            f"fetch of step {self._step} from {self._party} reached its deadline with {arrived} received{why}; "
            "give a longer timeout if the link is slow",
            party=self._party,
        )

    def _report_progress(self) -> None:
        transfer = self._transfer
        if self._on_progress is None or transfer is None:
            return
        progress = TransferProgress(
            step=self._step,
            total_bytes=transfer.total_bytes,
            received_bytes=transfer.received_bytes,
            skipped_bytes=0,
            resent_bytes=transfer.wasted_bytes,
            num_sources=transfer.num_sources(),
            elapsed_s=time.monotonic() - self._started_at,
            brought_bytes=transfer.brought_bytes,
        )
        self._on_progress = tell(self._on_progress, progress)

    def _log_paths(self) -> None:
        if self._transfer is None:
            return
        for name in self._transfer.plan.holders:
            paths = self._transfer.paths_to(name)
            if len(paths) > 1:
                logger.info("%s gave its part by %d of its addresses: %s", name, len(paths), describe_paths(paths))

    def _warn_of_divergence(self, transfer: PartTransfer) -> None:
        for name, tensors in transfer.divergences().items():
            warnings.warn(
                f"replicas have diverged at step {self._step}: {name} differs from the primary group, whose state was "
                f"received, in {', '.join(tensors[:5])}",
                ReplicaDivergenceWarning,
                stacklevel=6,
            )

    # The worker threads

    def _work(self, address: SourceAddress, name: str) -> None:
        """Ask a source for its manifest, then bring parts from it; over a new connection where one is lost that brought some."""
        with self._connected(address, name) as client:
            manifest = client.fetch_manifest(deadline=self._deadline, pause=self._pause, on_refused=lambda error: None)
            transfer = self._note_manifest(name, manifest)
            if transfer is None:
                self._tell_done(client, manifest)  # else it would keep all of it for this receiver
                return
            if name not in transfer.plan.holders:
                self._tell_done(client, manifest)
                return
            self._open_routes(transfer, address, manifest)
            try:
                if self._bring(transfer, client, manifest) and transfer.is_used(name):
                    self._tell_done(client, manifest)
                    return
            except (SourceLostError, TransferStalledError) as error:
                self._lose_path(transfer, name, error)
        while transfer.await_use(name, name):
            self._bring_over(transfer, address, None, manifest)

    def _open_routes(self, transfer: PartTransfer, address: SourceAddress, manifest: Manifest) -> None:
        """Have parts come over the further addresses that a source names, too."""
        routes = self._routes.learn(address, manifest)
        if routes:
            transfer.add_path(str(address), str(address))
        for route in routes:
            self._spawn(functools.partial(self._try_route, transfer, route, manifest), str(address))

    def _try_route(self, transfer: PartTransfer, route: Route, manifest: Manifest) -> None:
        """Connect to another address of a source; where it proves to be one, bring parts over it."""
        try:
            with self._connected(route.source, str(route.source), route) as client:
                with self._changed:
                    self._trying.add(client)
                try:
                    client.connect()
                finally:
                    with self._changed:
                        self._trying.discard(client)
        except TransferError as error:
            logger.info("source %s is not reached at its address %s: %s", route.source, route.host, error)
            return
        self._routes.proved(route)
        transfer.add_path(str(route.source), str(route))
        self._bring_over(transfer, route.source, route, manifest)

    def _bring_over(
        self, transfer: PartTransfer, address: SourceAddress, route: Route | None, manifest: Manifest
    ) -> None:
        """Bring parts over one path until it is over, or the path is dropped or lost and others are left."""
        path = str(route or address)
        try:
            while not transfer.over and transfer.is_used(path):
                with self._connected(address, str(address), route) as client:
                    if self._bring(transfer, client, manifest) and transfer.over:
                        if route is None or not transfer.is_used(str(address)):  # else the source's own thread tells it
                            self._tell_done(client, manifest)
                        return
        except (SourceLostError, TransferStalledError) as error:
            self._lose_path(transfer, path, error)
        except TransferError as error:
            if route is None:
                raise
            self._lose_path(transfer, path, error)  # perhaps the network's fault; else all paths end so

    def _lose_path(self, transfer: PartTransfer, path: str, error: TransferError) -> None:
        """Go on over the other paths to a source; raises the error where there is none."""
        self._use_again(transfer, self._routes.instead_of(path, transfer.lose_path(path), error))

    def _use_again(self, transfer: PartTransfer, paths: Sequence[str]) -> None:
        """Bring parts over paths that were dropped."""
        for route in self._routes.to_use_again(paths):
            manifest = self._manifest_of(str(route.source))
            if manifest is not None:
                bring = functools.partial(self._bring_over, transfer, route.source, route, manifest)
                self._spawn(bring, str(route.source))

    def _over_any(self, transfer: PartTransfer, address: SourceAddress, work: Callable[[SourceClient], object]) -> None:
        """Do something over a connection to a source, at whichever of its addresses."""
        connected = functools.partial(self._connected, address, str(address))
        self._routes.try_each(address, connected, transfer.is_used, work)

    def _note_manifest(self, name: str, manifest: Manifest) -> PartTransfer | None:
        """Hand the manifest over and wait for the plan; None where there will be none, or this source came too late for it."""
        with self._changed:
            self._manifests[name] = manifest
            is_late = self._transfer is not None
            self._changed.notify_all()
            while self._transfer is None and self._over is None:
                self._changed.wait(1.0)
            return None if is_late else self._transfer

    def _bring(self, transfer: PartTransfer, client: SourceClient, manifest: Manifest) -> bool:
        """Bring parts over one connection; False where another one is to go on.

        Raises:
            CheckpointError: the source is lost without having brought anything over this connection, or lies.
        """
        name = client.name
        needed = _blocks_by_part(transfer.plan, name, manifest)
        scratch = memoryview(bytearray(_SLICE_BYTES))
        has_brought = False
        acknowledged_at = 0.0
        max_parts = _parts_at_once(transfer.plan)
        while (batch := transfer.next_batch(name, max_parts, client.path)) is not None:
            left = list(batch)
            try:
                planned = [transfer.plan.parts[part] for part in batch]
                num_bytes = sum(part.region.num_bytes for part in planned)
                started_at = time.monotonic()
                received = ""
                if transfer.plan.group_of[name] == transfer.primary and started_at >= acknowledged_at + _ACKNOWLEDGED_S:
                    # The others may have to give it again, or its digests, when the primary is lost.
                    received, acknowledged_at = _acknowledgement(needed, transfer, manifest), started_at
                answer = client.open_parts(manifest, transfer.plan.ask_for(name, batch), num_bytes, received)
                unconfirmed: list[int] = []
                for part, where in zip(batch, planned, strict=True):
                    self._receive(transfer, client, answer, part, where, scratch)
                    if transfer.arrived(client.path, [part], transfer.plan.group_of[name]):
                        left.remove(part)
                    else:
                        unconfirmed.append(part)
                transfer.took(client.path, num_bytes, time.monotonic() - started_at)
                has_brought = True
                if unconfirmed:
                    confirmed = self._confirm(transfer, name, unconfirmed)
                    left = [part for part in left if part not in confirmed]
            except Exception as error:
                self._give_back(transfer, client, left)
                transfer.raise_if_cut(client.path)
                if not isinstance(error, CheckpointError):
                    raise
                if not transfer.is_used(client.path):
                    return False
                is_lost = isinstance(error, (SourceLostError, TransferStalledError))
                if not is_lost or not has_brought or transfer.over:
                    raise
                logger.info("connecting to %s again: %s", client.path, error)
                return False
            if left:
                self._give_back(transfer, client, left)
        return True

    def _give_back(self, transfer: PartTransfer, client: SourceClient, left: Sequence[int]) -> None:
        """Have others bring parts that were asked for. What another group than the primary sent of them is wiped out.

        It may be forged, and the next fetch may look there for what it need not bring.
        """
        if self.has_written and transfer.plan.group_of[client.name] != transfer.primary:
            for part in left:
                where = transfer.plan.parts[part]
                for piece in slices(where.region, _SLICE_BYTES, 1 << 62):
                    scatter(memoryview(bytes(piece.num_bytes)), where.memory[piece.start : piece.stop], piece)
        transfer.return_batch(client.path, left)

    def _receive(
        self,
        transfer: PartTransfer,
        client: SourceClient,
        answer: Answer,
        part: int,
        where: PlannedPart,
        scratch: memoryview,
    ) -> None:
        """Receive one part to where it belongs, with the digest that was sent with it."""

        def came(num_bytes: int) -> None:
            transfer.gave(client.path, num_bytes)

        hasher = answer.start_part_digest(part)
        self.has_written = True
        for piece in slices(where.region, _SLICE_BYTES, 1 << 62):
            memory = where.memory[piece.start : piece.stop]
            if piece.steps:
                data = scratch[: piece.num_bytes]
                answer.read_into(data, came)
                scatter(data, memory, piece)
            else:
                data = memory
                answer.read_into(data, came)
            hasher.update(data)
        announced = bytearray(DIGEST_BYTES)
        answer.read_into(memoryview(announced))
        if hasher.digest() != announced:
            raise DigestMismatchError(
                f"source {client.path} sent {where.box} of {where.name[:120]} with another digest than it announced",
                client.name,
            )

    def _confirm(self, transfer: PartTransfer, name: str, received: Sequence[int]) -> set[int]:
        """Take what another group's rank sent as far as the primary has the same, by the BLAKE3 digest that it announces.

        Returns:
            What was taken: others may have been asked for it again since, so its memory is not this thread's any more.
        """
        primary = transfer.primary
        wanted = self._ask_primary(transfer, received)
        agreed = {part for part, digest in wanted.items() if _blake3_of(transfer.plan.parts[part]) == digest}
        differing = [part for part in wanted if part not in agreed]
        if differing:
            # It lies where the primary's is to go, and is not held.
            transfer.diverged(name, differing, primary)
        return agreed if transfer.arrived(name, agreed, primary) else set()

    def _adopt(self, transfer: PartTransfer) -> None:
        """Compare what is held with the group that is the primary from now on."""
        while (held := transfer.to_confirm()) is not None:
            primary = transfer.primary
            wanted = self._ask_primary(transfer, held)
            differing = [part for part in held if wanted.get(part) != _blake3_of(transfer.plan.parts[part])]
            transfer.adopted(differing, primary)

    def _ask_primary(self, transfer: PartTransfer, parts: Iterable[int]) -> dict[int, bytes]:
        """Return the BLAKE3 digests that the primary group has for parts, as far as it can be asked."""
        by_holder: dict[str, list[int]] = {}
        for part in parts:
            holder = transfer.primary_holder(part)
            if holder is not None:
                by_holder.setdefault(holder, []).append(part)
        found: dict[int, bytes] = {}
        for name, asked in by_holder.items():
            try:
                found.update(self._ask_digests(transfer, name, asked))
            except CheckpointError as error:
                # Its own thread may be idle and notice nothing.
                transfer.cut(name, error)
                self._close_clients(name)
        return found

    def _ask_digests(self, transfer: PartTransfer, name: str, asked: Sequence[int]) -> dict[int, bytes]:
        """Return a source's BLAKE3 digests of parts, over a connection of its own."""
        address, manifest = self._address_of(name), self._manifest_of(name)
        if address is None or manifest is None:
            raise SourceRefusedError(f"{name} has no manifest", name)
        found: dict[int, bytes] = {}
        plan = transfer.plan

        def ask(client: SourceClient) -> None:
            for batch in _to_digest_at_once(plan, asked):
                digests = client.fetch_part_digests(manifest, plan.ask_for(name, batch))
                found.update(zip(batch, digests, strict=True))

        self._over_any(transfer, address, ask)
        return found

    def _tell_done(self, client: SourceClient, manifest: Manifest) -> None:
        """Nothing more is needed of a source: tell it, so that it may free what it keeps. The telling may fail."""
        try:
            client.tell_done(manifest)
        except CheckpointError as error:
            logger.info("could not tell %s that step %d has arrived: %s", client.name, manifest.step, error)

    # Beginning and ending

    @contextmanager
    def _connected(self, address: SourceAddress, name: str, route: Route | None = None) -> Iterator[SourceClient]:
        client = SourceClient(address, self._step, self._options, route)
        with self._changed:
            self._clients.setdefault(name, []).append(client)
            is_over = self._over is not None
        if is_over:
            client.close()
        try:
            yield client
        finally:
            client.release()
            with self._changed:
                self._clients[name].remove(client)

    def _address_of(self, name: str) -> SourceAddress | None:
        for names, group in zip(self._names, self._groups, strict=True):
            if name in names:
                return group[names.index(name)]
        return None

    def _manifest_of(self, name: str) -> Manifest | None:
        with self._changed:
            return self._manifests.get(name)

    def _pause(self, seconds: float) -> bool:
        with self._changed:
            if self._over is None and seconds > 0:
                self._changed.wait(seconds)
            return self._over is None

    def _spawn(self, work: Callable[[], None], name: str | None) -> threading.Thread:
        thread = Thread(self._guarded, "torchft_ckpt-fetch-parts", (work, name))
        with self._changed:
            self._threads.append(thread)
        thread.start()
        return thread

    def _guarded(self, work: Callable[[], None], name: str | None) -> None:
        """Run a worker; what it raises is the end of its source, or of the fetch where the fault is on this side."""
        failure: CheckpointError
        try:
            work()
            return
        except CheckpointError as error:
            failure = error
        except Exception as error:  # what a source sent may have raised it: that costs no other source
            logger.exception("fetching step %d%s failed unexpectedly", self._step, f" from {name}" if name else "")
            failure = TransferError(f"fetch of step {self._step} failed: {type(error).__name__}: {error}", name)
            failure.__cause__ = error
        if name is None or isinstance(failure, StateMismatchError):
            self._end(failure)
            return
        with self._changed:
            self._failures.setdefault(name, failure)
            transfer = self._transfer
            self._changed.notify_all()
        if transfer is not None and not transfer.over:
            logger.info("asking %s for nothing more: %s", name, failure)
            if name in transfer.plan.holders:
                transfer.fail(name, failure)
        self._close_clients(name)

    def _end(self, outcome: CheckpointError) -> None:
        with self._changed:
            if self._over is None:
                self._over = outcome
            transfer = self._transfer
            self._changed.notify_all()
        if transfer is not None:
            transfer.end(outcome)

    def _close_clients(self, name: str, path: str = "") -> None:
        """End what the threads of a source, or of one path to it, are waiting for."""
        with self._changed:
            clients = [client for client in self._clients.get(name, ()) if path in ("", client.path)]
        for client in clients:
            client.close()

    def _stop_threads(self) -> None:
        transfer = self._transfer
        is_success = transfer is not None and transfer.over and transfer.outcome is None
        with self._changed:
            threads, trying = list(self._threads), list(self._trying)
        for client in trying:
            client.close()
        until = time.monotonic() + (_TELL_TIMEOUT_S if is_success else 0.0)
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        with self._changed:
            clients = [client for of_source in self._clients.values() for client in of_source]
        for client in clients:
            client.close()
        until = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
            if thread.is_alive():  # resolving a name cannot be interrupted
                logger.warning("a connection attempt to %s is still in the resolver; it ends by itself", self._party)


def _name(address: SourceAddress | None, rank: int) -> str:
    return f"rank {rank} (no address)" if address is None else str(address)


def _parts_at_once(plan: Plan) -> int:
    """Return how many parts a request may have, so that its body is not too long where tensors have very many dimensions."""
    num_dims = max((len(part.box.sizes) for part in plan.parts), default=0)
    return min(MAX_PARTS, MAX_BODY_BYTES // (_NUMBER_BYTES * (2 * num_dims + 4)))


def _to_digest_at_once(plan: Plan, asked: Sequence[int]) -> Iterator[list[int]]:
    """Yield parts in batches, the digests of which a source gives at once."""
    max_parts = _parts_at_once(plan)
    batch: list[int] = []
    num_bytes = 0
    for part in asked:
        size = plan.parts[part].region.num_bytes
        if batch and (len(batch) == max_parts or num_bytes + size > MAX_DIGESTED_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += size
    if batch:
        yield batch


def _blake3_of(where: PlannedPart) -> bytes:
    """Return the BLAKE3 digest of a part that is here, over its elements in C order."""
    hasher = start_blake3()
    scratch = memoryview(bytearray(min(where.region.num_bytes, _SLICE_BYTES)))
    for piece in slices(where.region, _SLICE_BYTES, 1 << 62):
        memory = where.memory[piece.start : piece.stop]
        if piece.steps:
            gather(memory, piece, scratch[: piece.num_bytes])
            memory = scratch[: piece.num_bytes]
        hasher.update(memory)
    return hasher.digest()


def _blocks_by_part(plan: Plan, name: str, manifest: Manifest) -> dict[int, range]:
    """Return, for each part that a source can give, the blocks of its byte space that it lies in."""
    parts = list(plan.holders[name])
    blocks = {}
    for part, region in zip(parts, regions_of(manifest, plan.ask_for(name, parts)), strict=True):
        first = region.start // manifest.block_bytes
        blocks[part] = range(first, count_blocks(region.stop, manifest.block_bytes))
    return blocks


def _acknowledgement(needed: dict[int, range], transfer: PartTransfer, manifest: Manifest) -> str:
    """Return the blocks of which nothing is needed any more, as `0-3,7`; the longest runs, where there are many."""
    num_blocks = count_blocks(manifest.total_bytes, manifest.block_bytes)
    mask = (1 << num_blocks) - 1
    for part, blocks in needed.items():
        if not transfer.is_held(part):
            mask &= ~(((1 << len(blocks)) - 1) << blocks.start)
    runs = sorted(blocks_of(mask), key=len, reverse=True)[:MAX_ACKNOWLEDGED_RUNS]
    return format_ranges(sorted(runs, key=lambda run: run.start))
