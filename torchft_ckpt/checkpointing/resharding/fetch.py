"""Fetches boxes of one state from all ranks of one source group or several, within a deadline.

The calling thread asks every rank for its manifest, has the caller say what is wanted, and proves that it can be had before
a byte is asked for. What is wanted may be written to before all is here; who wants it uses it only when `run` has returned.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torchft_ckpt.checkpointing.fetching.connection import Answer, FetchOptions
from torchft_ckpt.checkpointing.fetching.engine import TICK_S, FetchEngine
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.fetching.streams import Stream
from torchft_ckpt.checkpointing.progress import ProgressCallback
from torchft_ckpt.checkpointing.protocol import (
    MAX_ACKNOWLEDGED_RUNS,
    MAX_BODY_BYTES,
    MAX_DIGESTED_BYTES,
    MAX_PARTS,
    SourceAddress,
)
from torchft_ckpt.checkpointing.resharding.plan import SAMPLE_ELEMENTS, Plan, SourceGroup, candidates_among, plan_parts
from torchft_ckpt.checkpointing.resharding.transfer import BoxTransfer
from torchft_ckpt.checkpointing.state.blocks import blocks_in, count_blocks, format_ranges
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.local_state import some_of, warn_of_values
from torchft_ckpt.checkpointing.state.regions import region_in_chunk
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.transfer.scheduler import blocks_of, mask_of, units_of
from torchft_ckpt.errors import (
    CheckpointError,
    SourceLostError,
    SourceRefusedError,
    StateFormatError,
    StateMismatchError,
    TransferError,
    TransferStalledError,
)
from torchft_ckpt.memory import gc_paused
from torchft_ckpt.threads import parallel_map

logger = logging.getLogger(__name__)
_GRACE_S = 0.5
_PRIMARY_PATIENCE_S = 2.0
_COMPARED_WITHIN_S = 5.0
"""From the begin on: whose ranks take longer to say what they hold is waited for no more, and they give no copies."""
_ACKNOWLEDGED_S = 0.5
"""Between two acknowledgements: working one out takes a while where there are many parts."""
_FEW_SAMPLES = 32
_MAX_ASKED = 16
_OF_COPY_ELEMENTS = 1024
"""So many ranks at once say what they hold of what several hold, by digests of so many elements: of statistics, all."""
_COMPARED_AT_ONCE_BYTES = 16 * 1024 * 1024
_NUMBER_BYTES = 20
"""Of JSON, with its comma: no number of a part is longer."""


class ShardedFetch(FetchEngine[BoxTransfer]):
    """One fetch of boxes of one state. `run` is called once; `cancel` from any thread, at any time.

    Args:
        groups: for each source group, the addresses of its ranks, in order; None of one that is not known. The first is the
            primary, whose state counts.
        deadline: on the monotonic clock.
        want: called with the primary group's manifests, says what is wanted; what it raises ends the fetch.
        rank: of this process: of what ranks of a source group hold otherwise, the same rank's is taken if the groups are of one
            size, else the first one's. Each such tensor is named in a WARNING.
        on_progress: called by the thread in `run`, a few times a second and at the end.
    """

    _retried = (SourceLostError, TransferStalledError)

    def __init__(
        self,
        groups: Sequence[Sequence[SourceAddress | None]],
        *,
        step: int,
        deadline: float,
        options: FetchOptions,
        want: Callable[[SourceGroup], Sequence[Want]],
        rank: int = 0,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self._names = [[_name(address, rank) for rank, address in enumerate(group)] for group in groups]
        super().__init__(
            {str(address): address for group in groups for address in group if address is not None},
            BoxTransfer(step),
            party=", ".join(name for names in self._names for name in names),
            step=step,
            deadline=deadline,
            options=options,
            on_progress=on_progress,
        )
        self._want = want
        self._rank = rank
        self._compared_by = 0.0
        self._is_comparing = False
        """Belongs to `_lock`."""
        self._needed: dict[str, dict[int, range]] = {}
        """By source, the blocks of its byte space that each part lies in."""
        self._acknowledged_at: dict[str, float] = {}
        self.has_written = False
        """Whether something was written to what is wanted."""

    def run(self) -> SourceGroup:
        """Fetch what is wanted; return the manifests of the group whose state it is.

        Raises:
            TransferError: a subclass says why it was not had.
            StateFormatError: what a source sends is not a state.
            StateMismatchError: the sources do not hold what is wanted.
        """
        state = self._state
        for name in (name for names in self._names for name in names if name not in self._sources):
            state.fail_source(name, SourceLostError(f"the address of {name} is not known", name))
        with self._running():
            groups, plan = self._choose_primary()
            first = self._rank if self._options.group_size == len(groups[0].names) else 0
            # Own first, then those of the own rows of meshes: where replicas have drifted, what they hold in shards is of one.
            names = [name for _, name in sorted((rank ^ first, name) for rank, name in enumerate(groups[0].names))]
            state.begin(plan, candidates_among(groups), max_units=_parts_at_once(plan), ranks=names)
            self._compared_by = time.monotonic() + _COMPARED_WITHIN_S
            if copies := plan.copies(names):
                self._spawn(functools.partial(self._compare_copies, names), None)
            self._spawn(functools.partial(self._take_from_here, copies), None)
            self._wait()
        if state.outcome is not None:
            raise state.outcome
        self._warn_of_divergence("the primary group", state.divergences())
        group = groups[state.primary]
        trees = [] if self._options.group_size == len(group.names) else [one.tree for one in group.manifests if one]
        warn_of_values(self._party, trees)
        return group

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
                with gc_paused():
                    wants = self._want(group)
                    plan = plan_parts(wants, [group], lambda: self._check_time(self._deadline))
            except Exception as error:
                if isinstance(error, CheckpointError) and not isinstance(error, (StateMismatchError, StateFormatError)):
                    raise
                failure = failure or StateFormatError.of(error, group.names[0])
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
                with gc_paused():
                    plan = plan_parts(wants, [*groups, *more], lambda: self._check_time(until))
                groups += more
            except Exception as error:  # noqa: BLE001 - they only help
                if len(more) > 1:
                    together = [[other] for other in more]
                else:
                    logger.warning("nothing is asked of %s: %s", more[0].names[0], error)
        return groups, plan

    def _check_time(self, until: float) -> None:
        if self._state.outcome is not None:
            raise self._state.outcome
        if time.monotonic() >= until:
            raise self._too_late("nothing (what the sources hold takes long to compare)")

    def _await_group(self, candidates: Sequence[int]) -> int:
        """Wait until the first of some groups has answered; after some patience any that has will do.

        Raises:
            CheckpointError: the fetch is over, or the deadline has passed.
        """
        patient_until = time.monotonic() + _PRIMARY_PATIENCE_S
        while True:
            for number in candidates[:1] if time.monotonic() < patient_until else candidates:
                if self._state.have_settled(self._names[number]):
                    return number
            self._await_manifests(self._names[candidates[0]], time.monotonic() + TICK_S)

    def _no_source(self, failure: CheckpointError | None) -> CheckpointError:
        failures = self._state.failures()
        if not failures:
            return failure or TransferError(f"nothing of step {self._step} is held by {self._party}", self._party)
        if failure is None:
            return self._state.why_hopeless()
        name, error = next(iter(failures.items()))
        # Of a group that did not answer whole: what does not fit may be for want of the rest.
        return type(error)(f"{failure} ({name}: {error})", party=error.party)

    def _await_manifests(self, names: Sequence[str], until: float) -> None:
        """Wait until each has answered or failed.

        Raises:
            CheckpointError: the fetch is over.
        """
        state = self._state
        with state.changed:
            while not state.have_settled(names):
                if state.outcome is not None:
                    raise state.outcome
                now = time.monotonic()
                if now >= self._deadline:
                    raise self._too_late("no manifest")
                if now >= until:
                    return
                state.changed.wait(min(until - now, TICK_S))
            if state.outcome is not None:
                raise state.outcome

    def _group(self, number: int) -> SourceGroup:
        names = self._names[number]
        return SourceGroup(names, [self._state.manifest_of(name) for name in names])

    def _look_after_sources(self) -> None:
        if time.monotonic() > self._compared_by:
            self._state.allow({}, self._state.primary)
        if self._state.to_confirm() is None:
            return
        with self._lock:
            is_comparing, self._is_comparing = self._is_comparing, True
        if not is_comparing:
            self._spawn(self._promote, None)

    # The worker threads

    def _take_part(self, client: SourceClient, manifest: Manifest) -> bool:
        if self._state.join(client.name, manifest):
            return True
        client.tell_done(manifest)  # else it would keep all of it for this receiver
        return False

    def _num_streams(self) -> int:
        # Sources share the connections that there would be to one of them: each keeps a core busy here.
        return max(self._options.num_streams // max(len(self._state.plan.holders), 1), 1)

    def _stream(self) -> Stream | None:
        plan = self._state.plan

        def ask(client: SourceClient, manifest: Manifest, parts: list[int]) -> Iterator[tuple[int, Answer]]:
            num_bytes = sum(plan.parts[part].region.num_bytes for part in parts)
            received = self._acknowledgement(client.name, manifest)
            answer = client.open_parts(manifest, plan.ask_for(client.name, parts), num_bytes, received)
            self.has_written = True
            return ((part, answer) for part in parts)

        return Stream(self._state, plan, ask, self._confirm)

    def _has_brought(self, stream: Stream, path: str, num_before: int) -> bool:
        return stream.num_batches > 0

    def _acknowledgement(self, name: str, manifest: Manifest) -> str:
        """Return the blocks of a source of which nothing is needed any more, as `0-3,7`; the longest runs, if there are
        many.

        Nothing of another group than the primary: it may have to give all, or its digests, when the primary is lost.
        """
        state, now = self._state, time.monotonic()
        if not state.is_primary(name) or now < self._acknowledged_at.get(name, 0.0) + _ACKNOWLEDGED_S:
            return ""
        self._acknowledged_at[name] = now
        if name not in self._needed:
            self._needed[name] = _blocks_by_part(state.plan, name, manifest)
        needed = self._needed[name]
        blocks = 0
        for part in state.missing():
            blocks |= mask_of(needed.get(part, range(0)))
        mask = ((1 << count_blocks(manifest.total_bytes, manifest.block_bytes)) - 1) & ~blocks
        runs = sorted(blocks_of(mask), key=len, reverse=True)[:MAX_ACKNOWLEDGED_RUNS]
        return format_ranges(sorted(runs, key=lambda run: run.start))

    def _confirm(self, stream: int, client: SourceClient, came: Mapping[int, bytes]) -> None:
        """Take what another group's rank sent as far as the primary has the same, by the BLAKE3 digest that it announces."""
        state = self._state
        primary = state.primary
        wanted = self._ask_primary(came)
        agreed = {part for part, digest in wanted.items() if (came[part] or state.plan.blake3_of(part)) == digest}
        differing = [part for part in wanted if part not in agreed]
        if differing:
            # It lies where the primary's is to go, and is not held.
            state.diverged(client.name, differing, primary)
        state.confirmed(stream, client.path, agreed, primary)

    def _promote(self) -> None:
        """Compare what is held with the group that is the primary from now on."""
        state = self._state
        try:
            while (held := state.to_confirm()) is not None:
                primary = state.primary
                wanted = self._ask_primary(held)
                differing = [part for part in held if wanted.get(part) != state.plan.blake3_of(part)]
                state.adopted(differing, primary)
                self._compare_copies([name for name in state.plan.holders if state.is_primary(name)])
        finally:
            with self._lock:
                self._is_comparing = False

    def _compare_copies(self, names: Sequence[str]) -> None:
        """Compare what several ranks of the primary group hold, and have it come from all that hold the same as the first."""
        state, plan = self._state, self._state.plan
        primary = state.primary
        twice = {part for parts in plan.copies(names).values() for part in units_of(parts)}

        def ask(name: str) -> dict[int, bytes]:
            asked = [part for part in plan.holders.get(name, ()) if part in twice]
            try:
                return self._ask_digests(name, asked, _OF_COPY_ELEMENTS) if asked else {}
            except Exception as error:  # noqa: BLE001 - what it sent may have raised it; it costs only its help
                logger.info("what %s holds is not compared with its neighbours: %s", name, error)
                return {}

        equal: dict[str, list[int]] = {}
        differing: dict[str, set[str]] = {}
        firsts: dict[int, bytes] = {}
        try:
            for name, told in zip(names, parallel_map(ask, names, _MAX_ASKED), strict=True):
                for part in twice.intersection(plan.holders.get(name, ())):
                    digest = told.get(part, b"")
                    first = firsts.setdefault(part, digest)
                    if first and first == digest:
                        equal.setdefault(name, []).append(part)
                    elif first and digest:
                        differing.setdefault(plan.parts[part].name, set()).add(name)
        finally:
            state.allow(equal, primary)
        if differing:
            what = (f"{name[:120]} ({some_of(sorted(others), ', ')})" for name, others in sorted(differing.items()))
            logger.warning(
                "ranks of a group do not hold alike what several of them hold: %s; of each, what %s holds is received, or the"
                " next of its ranks that holds some of it. If it was to be equal, find out why it drifted (are its gradients"
                " averaged in the group?) and copy one rank's to the others; else have it under a name for each rank",
                some_of(what),
                names[0],
            )

    def _take_from_here(self, copies: Mapping[str, int]) -> None:
        """Take what is equal here from here, beside what the sources bring.

        Of each rank of the primary group a few samples are compared first. The fetch does not need it: whatever goes wrong costs
        no source.
        """
        plan = self._state.plan
        tried: set[int] = set()
        for name in [name for name in plan.holders if self._state.is_primary(name)]:
            others = {*units_of(copies.get(name, 0)), *tried}
            parts = [part for part in plan.holders[name] if plan.parts[part].local is not None and part not in others]
            try:
                tried.update(self._compare_with(name, parts) if parts else ())
            except CheckpointError as error:
                logger.info("what is here is not compared with %s any more: %s", name, error)
            except Exception:
                logger.exception("comparing what is here with %s failed unexpectedly", name)
                return

    def _compare_with(self, name: str, parts: Sequence[int]) -> list[int]:
        """Take parts from here of which a source has the same; return those that were compared."""
        state, plan = self._state, self._state.plan
        group, manifest = plan.group_of[name], self._state.manifest_of(name)
        likely: list[int] = []

        def compare(client: SourceClient) -> None:
            if manifest is None or not self._equal_samples(client, manifest, parts[:: len(parts) // _FEW_SAMPLES + 1]):
                return
            likely[:] = self._equal_samples(client, manifest, parts)
            # From the end: the sources are asked from the beginning.
            for some in _to_digest_at_once(plan, likely[::-1], _COMPARED_AT_ONCE_BYTES):
                batch = [] if state.over else state.missing_of(some)
                if not batch:
                    continue
                digests = client.fetch_part_digests(manifest, plan.ask_for(name, batch))
                told = dict(zip(batch, digests, strict=True))
                equal: list[int] = []
                claimed = state.claim(batch, group)  # not before: nobody waits for an answer
                try:
                    equal += [part for part in claimed if plan.take_local(part) == told[part]]
                finally:
                    state.compared(equal, group)

        self._over_any(self._sources[name], compare)
        return likely

    def _equal_samples(self, client: SourceClient, manifest: Manifest, parts: Sequence[int]) -> list[int]:
        """Return the missing parts of which the sample that is here is the source's."""
        state, plan = self._state, self._state.plan
        at_once, found = _parts_at_once(plan), list[int]()
        for at in range(0, len(parts), at_once):
            batch = [] if state.over else state.missing_of(parts[at : at + at_once])
            if batch:
                digests = client.fetch_part_digests(manifest, plan.ask_for(client.name, batch, sample=SAMPLE_ELEMENTS))
                found += [part for part, told in zip(batch, digests, strict=True) if plan.sample_here(part) == told]
        return found

    def _ask_primary(self, parts: Iterable[int]) -> dict[int, bytes]:
        by_holder: dict[str, list[int]] = {}
        for part in parts:
            holder = self._state.primary_holder(part)
            if holder is not None:
                by_holder.setdefault(holder, []).append(part)
        found: dict[int, bytes] = {}
        for name, asked in by_holder.items():
            try:
                found.update(self._ask_digests(name, asked))
            except Exception as error:  # noqa: BLE001 - what it sent may have raised it
                # Its own threads may be idle and notice nothing.
                self._state.fail_source(name, StateFormatError.of(error, name))
                self._close_clients(name)
        return found

    def _ask_digests(self, name: str, asked: Sequence[int], sample: int = 0) -> dict[int, bytes]:
        """Return a source's BLAKE3 digests of parts, or of a sample of each, over a connection of its own."""
        manifest = self._state.manifest_of(name)
        if manifest is None:
            raise SourceRefusedError(f"{name} has no manifest", name)
        found: dict[int, bytes] = {}
        plan = self._state.plan

        def ask(client: SourceClient) -> None:
            for batch in _to_digest_at_once(plan, asked, MAX_DIGESTED_BYTES):
                digests = client.fetch_part_digests(manifest, plan.ask_for(name, batch, sample=sample))
                found.update(zip(batch, digests, strict=True))

        self._over_any(self._sources[name], ask)
        return found


def _name(address: SourceAddress | None, rank: int) -> str:
    return f"rank {rank} (no address)" if address is None else str(address)


def _parts_at_once(plan: Plan) -> int:
    """Return how many parts a request may have, so that its body is not too long where tensors have very many dimensions."""
    num_dims = max((len(part.box.sizes) for part in plan.parts), default=0)
    return min(MAX_PARTS, MAX_BODY_BYTES // (_NUMBER_BYTES * (2 * num_dims + 4)))


def _to_digest_at_once(plan: Plan, asked: Sequence[int], max_bytes: int) -> Iterator[list[int]]:
    """Yield parts in batches, the digests of which a source gives at once."""
    max_parts = _parts_at_once(plan)
    batch: list[int] = []
    num_bytes = 0
    for part in asked:
        size = plan.parts[part].region.num_bytes
        if batch and (len(batch) == max_parts or num_bytes + size > max_bytes):
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += size
    if batch:
        yield batch


def _blocks_by_part(plan: Plan, name: str, manifest: Manifest) -> dict[int, range]:
    """Return, for each part that a source can give, the blocks of its byte space that it lies in."""
    blocks = {}
    for part, place in plan.holders[name].items():
        entry = manifest.tensors[place.tensor]
        region = region_in_chunk(manifest, entry, entry.chunks[place.chunk], plan.parts[part].box)
        blocks[part] = blocks_in(region.start, region.stop, manifest.block_bytes)
    return blocks
