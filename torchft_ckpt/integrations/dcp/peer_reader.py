"""A `StorageReader` of torch.distributed.checkpoint whose storage is a running job: its live weights, re-sharded on the way.

    state_dict = {"model": model.state_dict()}
    dcp.load(state_dict, storage_reader=PeerReader(lighthouse="host:29510", job="name"), no_dist=True)

DCP's planner says which boxes go where; this reader says what there is, and fetches all of it at once, verified, when every
box is known to be covered. Nothing that comes from the network is unpickled: plain values are JSON.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import ssl
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchft_ckpt.checkpointing.durable.saving.dcp_metadata import described_as
from torchft_ckpt.checkpointing.progress import ProgressCallback
from torchft_ckpt.checkpointing.resharding.fetch import ShardedFetch
from torchft_ckpt.checkpointing.resharding.peers import FindGroups, HeldStep, JobPeers
from torchft_ckpt.checkpointing.resharding.plan import GoOn, SourceGroup, cells_of, tensors_of
from torchft_ckpt.checkpointing.state.classes import KnownClasses, refuse_unmade, unmade_in
from torchft_ckpt.checkpointing.state.containers import Path, below_root
from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.checkpointing.state.format import Manifest, WireTensor
from torchft_ckpt.checkpointing.state.local_state import HeldTensor, box_of, some_of, why_unfillable
from torchft_ckpt.checkpointing.state.outline import Outline
from torchft_ckpt.checkpointing.state.target import Filling, Want, is_same_memory, memory_for, wants_of
from torchft_ckpt.config import not_negative
from torchft_ckpt.coordination.asking import Lighthouse
from torchft_ckpt.core.boxes.geometry import Box, contains, missing_boxes, whole
from torchft_ckpt.errors import (
    ConfigError,
    StateFormatError,
    StateMismatchError,
    TransferTimeoutError,
    torn_where_it_raises,
)

_NAMED = 5


class PeerReader(StorageReader):
    """Reads the state of a running job from all ranks of a replica group, or of several at once.

    Each `load` takes one step of the job, whole: by default one that all ranks can serve soon, while they train on. Names are
    DCP's: keys of nested dicts joined by dots, below the root.

    Args:
        urls: what the `HTTPTransport.metadata()` of each rank returned, in the order of ranks: of one group, or a list of
            these for several. The first group is the primary: the state is its own, others give what is equal. Without urls
            the lighthouse is asked for them before each load, so the reader follows the job over restarts and new ports, also of
            the lighthouse. A job that it never found there is waited for ten seconds.
        lighthouse: its address; default: `TORCHFT_LIGHTHOUSE`.
        job: the job's name there; default: `TORCHFT_CKPT_JOB`, else `default`.
        step: the step wanted; default: one that can be had soon. Programs of several ranks that load without `no_dist`
            must pass one, so that all of them read the same.
        root: dotted path in the job's state where names begin; default: what the Manager's `state_dict` returned
            (`user.default`), or all of the state where no Manager made it.
        token: shared secret of the job; default: `TORCHFT_CKPT_TOKEN`, else none.
        ssl_context: for clients; whom to believe, and who we are: only `https` is spoken then with the ranks. Default: of
            `TORCHFT_CKPT_TLS_CA`, `_CERT` and `_KEY`, with the lighthouse, too.
        timeout: overall deadline of a load.
        stall_timeout: a rank is given up when a connection gets no byte for so long.
        on_progress: told how far it is.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        lighthouse: str | None = None,
        job: str | None = None,
        step: int | None = None,
        root: str | None = None,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        timeout: timedelta = timedelta(minutes=10),
        stall_timeout: timedelta = timedelta(seconds=15),
        on_progress: ProgressCallback | None = None,
    ) -> None:
        if isinstance(urls, str):
            raise ConfigError(f"urls={urls!r} cannot be used; expected a list of urls", party="urls")
        if step is not None and step < 0:
            raise ConfigError(f"step={step!r} cannot be used; expected a step that is not negative", party="step")
        groups: Sequence[Sequence[str]] | FindGroups
        if urls is None:
            asked = Lighthouse(lighthouse, token)
            groups, token = functools.partial(asked.urls, job), asked.token
        elif lighthouse is not None or job is not None:
            raise ConfigError("urls and a job's name are two ways to say the same; give one of them", party="urls")
        else:
            groups = [[url] if isinstance(url, str) else list(url) for url in urls]
            if all(isinstance(url, str) for url in urls):
                groups = [[url for group in groups for url in group]]
        self._peers = JobPeers(groups, token=token, ssl_context=ssl_context, stall_timeout=stall_timeout)
        self._wanted_step = step
        self._root = root
        self._timeout_s = not_negative(timeout).total_seconds()
        self._on_progress = on_progress
        self._deadline = 0.0
        self._content: _Content | None = None
        self._held: HeldStep | None = None
        self.step: int | None = None
        """The step that the last load read."""
        # DCP's planner does not tell us where it raises: then the reader is dropped, or used again.
        weakref.finalize(self, self._peers.give_back)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the last load. There is no other job in a `checkpoint_id`, so it is ignored."""
        self._forget()

    def _forget(self) -> None:
        self._content = self._held = None
        self._peers.give_back()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Choose a step, have the ranks keep it, and say what there is.

        They keep it until it is read, the reader is used again, or is gone; at most for half a minute in which it does nothing.

        Raises:
            TransferError: a subclass says why it is not to be had.
            StateMismatchError: the ranks do not hold one state, or nothing is at `root`.
        """
        peers, timeout_s = self._peers, self._timeout_s
        self._deadline = deadline = time.monotonic() + timeout_s

        def check_time() -> None:  # knows no reader: one that refers to itself is not gone when it is dropped
            if time.monotonic() >= deadline:
                message = f"what {peers.urls} hold could not be compared in {timeout_s:g} s; give a longer timeout"
                raise TransferTimeoutError(message, peers.urls)

        self._held = peers.hold(self._wanted_step, deadline)
        self.step = self._held.step
        with self._giving_back():
            self._content = _Content(self._held.group, self._root, check_time)
            return self._content.metadata()

    @contextlib.contextmanager
    def _giving_back(self) -> Iterator[None]:
        """Where it raises, have the ranks keep nothing for us any more."""
        try:
            yield
        except BaseException:
            self._forget()
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in the plan which step it is of."""
        return replace(plan, storage_data=self.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that all ranks read one step.

        Raises:
            StateMismatchError: they do not.
        """
        steps = {plan.storage_data for plan in plans}
        if len(steps) > 1:
            self._forget()
            raise StateMismatchError(
                f"the ranks of this program chose the steps {sorted(map(str, steps))}: pass one to PeerReader(step=...), or load "
                "with no_dist=True",
                party="step",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch what the plan names, into the tensors that the planner gives: no memory is taken for a second copy of them.

        Raises:
            StateMismatchError: the ranks do not hold all of it; before anything is written.
            CheckpointError: a subclass says why it was not had. Where tensors were written to before, `state_overwritten` is
                true, and the message, which DCP's `CheckpointException` shows, says that the state is torn.
        """
        content, held = self._content, self._held
        if content is None or held is None:
            raise ConfigError("read_metadata comes before read_data", party="PeerReader")
        items = _PlannedItems(content, plan.items, planner)
        fetch = ShardedFetch(
            held.addresses,
            step=held.step,
            deadline=self._deadline,
            options=self._peers.options,
            want=items.wants,
            on_progress=self._on_progress,
        )
        with torn_where_it_raises(
            f"reading step {held.step}", "planner", lambda: items.is_overwritten(fetch.has_written)
        ):
            try:
                fetch.run()
            finally:
                self._peers.give_back()
            items.finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """None is: a job is named by the urls of its ranks."""
        return False


class _Content:
    """What a group holds, by DCP's names.

    Args:
        root: where names begin.
    """

    def __init__(self, group: SourceGroup, root: str | None, go_on: GoOn) -> None:
        self.go_on = go_on
        tensors_of(group)  # refuses ranks that do not hold one state
        self.group = group
        self.tensors: dict[str, WireTensor] = {}
        self.values: dict[str, Outline] = {}
        """What is no tensor to DCP, in the outline of the first rank that lists it."""
        self.paths: dict[str, Path] = {}
        for manifest in group.manifests:
            if manifest is not None:
                self._add(manifest, root)

    def _add(self, manifest: Manifest, root: str | None) -> None:
        """Add what one rank lists and those before it do not: of a pipeline, each has layers of its own."""
        outline = Outline(manifest.tree, manifest.tensors, KnownClasses(), lambda state: below_root(state, root))
        for name, path in outline.paths.items():
            if name in self.paths:
                continue
            self.paths[name] = path
            if name in outline.tensors:
                self.tensors[name] = manifest.tensors[outline.tensors[name]]
            else:
                self.values[name] = outline

    def metadata(self) -> Metadata:
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        boxes = self.boxes()
        for name in self.paths:
            entry = self.tensors.get(name)
            if entry is None:
                described[name] = BytesStorageMetadata()
                continue
            chunks = disjoint(boxes[entry.fqn], whole(tuple(entry.shape)), self.go_on)
            described[name] = described_as(parse_dtype(entry.dtype), entry.shape, chunks)
        return Metadata(state_dict_metadata=described, planner_data=self.paths)

    def boxes(self) -> dict[str, list[Box]]:
        return {
            path: [box_of(chunk) for _, _, entry in held for chunk in entry.chunks]
            for path, held in self.group.entries().items()
        }


class _PlannedItems:
    """The items that DCP's planner asks for: as wants, and, once these are filled, as the planner takes them."""

    def __init__(self, content: _Content, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        self._content = content
        self._planner = planner
        self._boxes = content.boxes()
        self._bytes = [item for item in items if item.type is LoadItemType.BYTE_IO]
        self._reads = [item for item in items if item.type is not LoadItemType.BYTE_IO]
        self._received: list[tuple[ReadItem, HeldTensor, list[torch.Tensor]]] = []
        self._is_finishing = False

    def is_overwritten(self, has_received: bool) -> bool:
        """Whether something that the planner gave was written to, where something was received or not."""
        into_place = any(is_same_memory(held.given, part) for _, held, (part,) in self._received)
        return self._is_finishing or (has_received and into_place)

    def wants(self, group: SourceGroup) -> list[Want]:
        """Return what is to be fetched; raise if the ranks do not hold all of each tensor that is named."""
        self._check_whole()
        self._received = []
        wants: list[Want] = []
        for item in self._reads:
            entry = self._content.tensors[item.dest_index.fqn]
            base = item.storage_index.offset or torch.Size([0] * len(item.lengths))
            low = tuple(int(a) + int(b) for a, b in zip(base, item.storage_offsets, strict=True))
            box = Box(low, tuple(int(length) for length in item.lengths))
            dtype = parse_dtype(entry.dtype)
            given = self._planner.resolve_tensor(item).detach()
            if why := why_unfillable(given):
                raise StateMismatchError(
                    f"{item.dest_index.fqn[:120]} {why}; nothing was read", item.dest_index.fqn[:120]
                )
            held = HeldTensor(given, None, [box], [given])
            parts = memory_for(held.data, held.boxes, dtype)
            self._received.append((item, held, parts))
            wants += wants_of(entry.fqn, held.boxes, parts)
        for outline, names in self._values_of().items():
            wants += outline.wants_in(names)
        return wants

    def finish(self) -> None:
        """All is here: give it to the planner."""
        self._is_finishing = True
        filling = Filling()
        with torch.no_grad():
            for item, held, parts in self._received:
                filling.fill(held, parts)
                self._planner.commit_tensor(item, held.given)
            filling.end()
        values = {
            name: value for outline, names in self._values_of().items() for name, value in outline.made(names).items()
        }
        for item in self._bytes:
            # The planner unpickles it: what we pickled here, of plain values that were read as JSON.
            stream = io.BytesIO()
            torch.save(values[item.dest_index.fqn], stream)
            stream.seek(0)
            self._planner.load_bytes(item, stream)

    def _values_of(self) -> dict[Outline, list[str]]:
        """Return which values are asked for, by the outline that has them."""
        found: dict[Outline, list[str]] = {}
        for item in self._bytes:
            found.setdefault(self._content.values[item.dest_index.fqn], []).append(item.dest_index.fqn)
        return found

    def _check_whole(self) -> None:
        wanted = getattr(self._planner, "state_dict", None) or {}
        values = [
            item.dest_index.fqn[:120]
            for item in self._bytes
            if isinstance(wanted.get(item.dest_index.fqn), torch.Tensor)
        ]
        if values:
            raise StateMismatchError(
                f"{some_of(values, ', ')}: a tensor was asked for, the job has a value there; nothing was read",
                values[0],
            )
        refuse_unmade(
            [
                unmade
                for outline, names in self._values_of().items()
                for name in names
                for unmade in unmade_in(outline.values[name])
            ],
            party="state_dict",
        )
        holes = []
        for name in sorted({item.dest_index.fqn for item in self._reads}):
            entry = self._content.tensors.get(name)
            if entry is None:
                holes.append(f"{name[:120]} is no tensor there")
                continue
            self._content.go_on()  # each of these takes a moment, and there may be many
            try:
                missing = missing_boxes(entry.shape, self._boxes[entry.fqn])
            except ValueError as error:
                raise StateFormatError(f"tensor {name[:120]}: {error}", party="source") from error
            holes += [f"{name[:120]} {missing[0]}"] if missing else []
        if holes:
            raise StateMismatchError(
                f"no rank of {', '.join(self._content.group.names[:_NAMED])} holds {some_of(holes)}: name all "
                "ranks of the replica group; nothing was read",
                party="urls",
            )


def disjoint(boxes: Sequence[Box], everything: Box, go_on: GoOn) -> list[Box]:
    """Return boxes that cover the same elements, each of them once; `go_on` as for `plan_parts`."""
    distinct = list(dict.fromkeys(box for box in boxes if box.volume))
    if len(distinct) < 2:
        return distinct
    cells = []
    for cell in cells_of("", everything, distinct):
        go_on()
        if any(contains(box, cell) for box in distinct):
            cells.append(cell)
    return distinct if sum(box.volume for box in distinct) == sum(cell.volume for cell in cells) else cells
