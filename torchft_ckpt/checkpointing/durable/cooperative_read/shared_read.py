"""Reading a checkpoint once in the whole job: each member reads a share from storage, the rest travels between them.

What several members want is cut into equal shares by arithmetic (`core/durable/assignment.py`), each read by one of those who
want it and can read it. A share is read straight into this member's own tensors where it wants it itself, and served from
there; what others have read is fetched by the transport. So no byte is read twice, and none is kept twice. What ranks have
saved otherwise under one name is not shared: each member reads what its own rank saved.

Nobody is waited for without end. What a member does not have in time, because another died, failed or is slow, is read from
storage by those who want it, with a warning. A member that cannot meet the others reads all that it wants by itself.

It knows members, boxes and who reads what (`deal_reading`, which each member works out alone, from what all of them said); which
checkpoint it is, is chosen in `plan`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import xxhash

from torchft_ckpt.checkpointing.durable.cooperative_read.plan import Agreement
from torchft_ckpt.checkpointing.durable.cooperative_read.rendezvous import Rendezvous
from torchft_ckpt.checkpointing.durable.format.manifest import BoxEntry, table_of
from torchft_ckpt.checkpointing.durable.names import PartName
from torchft_ckpt.checkpointing.durable.reading.checkpoint import NUM_THREADS, SavedTensor
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.fetching.connection import (
    FetchOptions,
    default_num_streams,
)
from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.checkpointing.resharding.fetch import ShardedFetch
from torchft_ckpt.checkpointing.state.format import MAX_MANIFEST_BYTES
from torchft_ckpt.checkpointing.state.shards import ShardAdapter, register_shard_adapter
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, are_told_apart, contains, fits, refine, subtract, whole
from torchft_ckpt.core.durable.assignment import Item, assign_writes
from torchft_ckpt.errors import (
    CheckpointError,
    SourceLostError,
    SourceRefusedError,
    UnsupportedValueError,
    torn_where_it_raises,
)
from torchft_ckpt.memory import memory_bytes
from torchft_ckpt.threads import Threads, parallel_map

Boxes = Mapping[str, Sequence[Box]]
"""By the name of a tensor, boxes of it."""


def deal_reading(
    tensors: Mapping[str, SavedTensor],
    wanted: Mapping[int, Boxes],
    readers: Mapping[PartName, frozenset[int]] | None,
    num_members: int,
) -> list[list[tuple[str, Box]]]:
    """Return what each member reads: everything that is wanted once, as far as anybody can read it.

    A share lies wholly inside or outside of every box that is wanted. Names and boxes that the checkpoint has not are nobody's.

    Args:
        wanted: by member, what it wants.
        readers: who can read which part; None where all members can read all of them.
        num_members: members are numbered from 0.
    """
    everybody = frozenset(wanted)
    by_name: dict[str, dict[Box, set[int]]] = {}
    for member, boxes in wanted.items():
        for name, of_name in boxes.items():
            if name in tensors:
                known = by_name.setdefault(name, {})
                for box in of_name:
                    if box.volume and fits(box, tensors[name].shape):
                        known.setdefault(box, set()).add(member)
    items: list[Item] = []
    for name in sorted(by_name):
        tensor = tensors[name]
        for box, wanting in _apart(tensor.shape, by_name[name]):
            for cell, able in _by_readers(tensor, box, readers, everybody):
                holders = (wanting & able) or able
                if holders:
                    items.append(Item(name, cell, tensor.dtype.itemsize, tensor.shape, tuple(sorted(holders))))
    shares = assign_writes(items, num_members)
    return [[(items[share.item].name, share.box) for share in of_member] for of_member in shares]


def _apart(shape: Sequence[int], wanted: Mapping[Box, set[int]]) -> Iterable[tuple[Box, frozenset[int]]]:
    """Return boxes that do not overlap and make up all that is wanted, each with those who want it."""
    boxes = sorted(wanted)
    if not are_told_apart(boxes):
        try:
            cells = refine(whole(shape), boxes)
        except ValueError:
            cells = boxes  # no mesh's: what overlaps is read more than once
        around = ((cell, [box for box in boxes if contains(box, cell)]) for cell in cells)
        return [(cell, frozenset().union(*(wanted[box] for box in outer))) for cell, outer in around if outer]
    return [(box, frozenset(wanted[box])) for box in boxes]


def _by_readers(
    tensor: SavedTensor, box: Box, readers: Mapping[PartName, frozenset[int]] | None, everybody: frozenset[int]
) -> Iterable[tuple[Box, frozenset[int]]]:
    """Cut a box where those who can read it change."""
    if readers is None:
        return [(box, everybody)]
    pieces = [(piece.box, readers.get(piece.part.name, frozenset()) & everybody) for piece in tensor.pieces]
    try:
        cells = refine(box, [piece for piece, _ in pieces])
    except ValueError:
        return []
    return [(cell, frozenset().union(*(able for piece, able in pieces if contains(piece, cell)))) for cell in cells]


class BoxedTensor(torch.Tensor):
    """Stands for some boxes of a tensor. Nothing can be computed with it.

    Args:
        shape: of the whole tensor.
    """

    pieces: list[tuple[Box, torch.Tensor]]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[tuple[Box, torch.Tensor]]
    ) -> BoxedTensor:
        tensor: BoxedTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        tensor.pieces = list(pieces)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: only boxes of this tensor are here, to be served")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BoxedTensor({[*self.shape]}, {self.dtype}, {len(self.pieces)} boxes)"


class _BoxedAdapter(ShardAdapter):
    shares_memory = True

    def handles(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, BoxedTensor)

    def boxes(self, tensor: torch.Tensor, path: str) -> list[Box]:
        return [box for box, _ in _pieces_of(tensor, path)]

    def data(self, tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
        return [data for _, data in _pieces_of(tensor, path)]

    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        raise UnsupportedValueError("nothing is received for boxes that are served", "BoxedTensor")


def _pieces_of(tensor: torch.Tensor, path: str) -> list[tuple[Box, torch.Tensor]]:
    if not isinstance(tensor, BoxedTensor):
        raise UnsupportedValueError(f"state dict at {path!r}: not boxes to be served", path)
    return tensor.pieces


register_shard_adapter(_BoxedAdapter())


logger = logging.getLogger(__name__)
_MAX_SOURCES_AT_ONCE = 16
_PATIENCE_FACTOR = 3.0
_CONNECT_TIMEOUT_S = 10.0
_LEASE = timedelta(days=1)
"""Longer than any read: what is served ends with the read, or with the transport."""


class _Wants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member wants: the digest of a list that several of them may have alike. Empty: it is gone."""

    digest: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32})?\Z")]


class _Readers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the first member: among whom the reading is dealt."""

    members: list[Annotated[int, msgspec.Meta(ge=0)]]


class _Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member serves its share; or it has failed, and serves nothing."""

    is_served: bool


class _Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member needs nobody any more."""


_decode_wants = msgspec.json.Decoder(_Wants).decode
_decode_readers = msgspec.json.Decoder(_Readers).decode
_decode_list = msgspec.json.Decoder(dict[str, list[BoxEntry]]).decode
_decode_ready = msgspec.json.Decoder(_Ready).decode
_decode_done = msgspec.json.Decoder(_Done).decode


class SharedRead:
    """One member's part in reading one checkpoint. `read` once, on one thread; all members do the same.

    Args:
        number: of this reading; another one for each checkpoint that these members read.
        transport: serves what is read here. It is the caller's to shut down, after `read`; nothing else may be served by it
            meanwhile. Its token is proved to the others, not sent.
        timeout_s: how long fetching from the others may take. A member that is slow at reading is waited for three times as
            long as this member took, or as the rendezvous waits for one that says nothing, if that is longer.
        stall_timeout_s: a member is given up when a connection to it gets no byte for so long.
    """

    def __init__(
        self,
        agreement: Agreement,
        reader: CheckpointReader,
        rendezvous: Rendezvous,
        *,
        number: int,
        transport: HTTPTransport[Any],
        timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._agreement = agreement
        self._reader = reader
        self._rendezvous = rendezvous
        self._number = number
        self._transport = transport
        self._timeout_s = timeout_s
        self._options = FetchOptions(
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            stall_timeout_s=stall_timeout_s,
            num_streams=default_num_streams(),
            max_manifest_bytes=MAX_MANIFEST_BYTES,
            max_total_bytes=memory_bytes(),
            token=transport.token or None,
            receiver=uuid.uuid4().hex,
        )
        self._has_met = False
        self._lock = threading.Lock()
        self.bytes_from_peers = 0
        self.num_members = 1
        """Who read together; 1: this one alone."""

    def read(self, wants: Sequence[Want]) -> None:
        """Fill targets. Returns when all is here and the others need nothing of this member any more, or are not waited for.

        Args:
            wants: boxes of tensors, and memory on the CPU for each. It must not change meanwhile: it is served.

        Raises:
            CheckpointError: as `CheckpointReader.read`; the others are told, and read what they wanted of this member.
        """
        try:
            dealt = self._deal(wants)
        except (SourceLostError, SourceRefusedError) as error:
            logger.warning("member %d reads by itself: %s", self._rendezvous.member, error)
            self._reader.read_own(wants)
            return
        self.num_members = len(dealt.wanted)
        self._read_dealt(dealt)

    def leave(self) -> None:
        """Tell the others that this member wants nothing, where it has not said what it wants: it may have raised before."""
        if not self._has_met:
            with contextlib.suppress(SourceLostError):
                self._say_wants("")

    def _deal(self, wants: Sequence[Want]) -> _Dealt:
        """Learn what the others want, and return who reads what.

        Raises:
            SourceLostError, SourceRefusedError: this member is not with the others any more.
            StateMismatchError: the checkpoint has not what is wanted here.
        """
        meeting, reader = self._rendezvous, self._reader
        misfits = [want for want in wants if not _is_there(want, reader)]
        if misfits:
            self._say_wants("")
            reader.read(misfits)
        own = [want for want in wants if reader.is_own(want)]
        mine = {id(want) for want in own}
        wants = [want for want in wants if id(want) not in mine]
        boxes: dict[str, list[Box]] = {}
        for want in wants:
            boxes.setdefault(want.name, []).append(want.box)
        data = msgspec.json.encode(
            {
                name: [BoxEntry(offsets=[*box.offsets], sizes=[*box.sizes]) for box in of_name]
                for name, of_name in boxes.items()
            }
        )
        digest = xxhash.xxh3_128_hexdigest(data)
        meeting.store.put(f"list/{digest}", data)
        said = self._say_wants(digest)
        if not meeting.leads:
            members = meeting.agree(self._topic("readers"), _decode_readers).members
            if meeting.member not in members:
                raise SourceRefusedError(
                    f"the others did not wait for member {meeting.member} any longer, and go on without it", "members"
                )
            said = meeting.collect(self._topic("wants"), _decode_wants, members)
            said = {member: one for member, one in said.items() if member in self._agreement.members}
        lists: dict[str, Boxes] = {digest: boxes}
        wanted: dict[int, Boxes] = {}
        for member, theirs in sorted({**said, meeting.member: _Wants(digest)}.items()):
            if theirs.digest not in lists:
                lists[theirs.digest] = self._list_of(theirs.digest)
            wanted[member] = lists[theirs.digest]
        shares = deal_reading(reader.tensors, wanted, self._agreement.readers, meeting.num_members)
        return _Dealt(_OwnWants(wants), wanted, shares, own)

    def _say_wants(self, digest: str) -> dict[int, _Wants]:
        """Say what this member wants. The first member also says among whom the reading is dealt, and returns what they want."""
        self._has_met = True
        meeting = self._rendezvous
        meeting.publish(self._topic("wants"), _Wants(digest))
        if not meeting.leads:
            return {}
        said = meeting.collect(self._topic("wants"), _decode_wants, self._agreement.members)
        said = {member: one for member, one in said.items() if one.digest}
        readers = _Readers(sorted({*said, *([meeting.member] if digest else ())}))
        meeting.agree(self._topic("readers"), _decode_readers, readers)
        return said

    def _topic(self, what: str) -> str:
        return f"{what} {self._number}"

    def _list_of(self, digest: str) -> Boxes:
        """Return a list of what is wanted; an empty one where it cannot be had: then nothing is read for who wants it."""
        data = self._rendezvous.store.get(f"list/{digest}", self._rendezvous.patience_s) if digest else None
        if data is None or xxhash.xxh3_128_hexdigest(data) != digest:
            return {}
        try:
            return {name: [entry.box for entry in entries] for name, entries in _decode_list(data).items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("a list of what members want cannot be read: %s", error)
            return {}

    def _read_dealt(self, dealt: _Dealt) -> None:
        me, reader = self._rendezvous.member, self._reader
        mine = dealt.shares[me]
        takers = [member for member in dealt.wanted if member != me and _have_common(dealt.wanted[member], mine)]
        started_at = time.monotonic()
        try:
            state = _read_share(reader, dealt.own, mine)
            with torn_where_it_raises(f"reading {reader.location}", reader.location, lambda: bool(state)):
                if dealt.alone:
                    reader.read_own(dealt.alone)
        except CheckpointError:
            self._say("ready", _Ready(False))
            self._say("done", _Done())
            raise
        patience_s = max(self._rendezvous.patience_s, _PATIENCE_FACTOR * (time.monotonic() - started_at))
        try:
            with torn_where_it_raises(f"reading {reader.location} with others", reader.location):
                self._transport.send_checkpoint([], self._agreement.checkpoint.name.step, state, _LEASE)
                self._say("ready", _Ready(True))
                left = self._take(dealt, patience_s)
                if left:
                    reader.read(left)
                self._check_pieces(dealt)
                dealt.own.copy_doubles()
        finally:
            self._say("done", _Done())
            try:
                self._rendezvous.collect(self._topic("done"), _decode_done, takers, patience_s=patience_s)
            except SourceLostError as error:
                logger.warning("member %d does not wait for the others: %s", me, error)
            self._transport.disallow_checkpoint()
            # Who comes later is told that it is over; else it would wait for it to be served again.
            self._transport.advance_to(self._agreement.checkpoint.name.step + 1)

    def _check_pieces(self, dealt: _Dealt) -> None:
        """Compare whole pieces that others gave with the manifests, and read again those that are not as they were written.

        Raises:
            CheckpointError: as `CheckpointReader.read`, of what is read again.
        """
        me, reader = self._rendezvous.member, self._reader
        given = {name for member, share in enumerate(dealt.shares) if member != me for name, _ in share}
        checks = dealt.own.checks_of(given - {*reader.checkpoint.divergent}, reader.tensors)
        wrong = [want for want in parallel_map(lambda check: check(), checks, NUM_THREADS) if want is not None]
        if wrong:
            logger.warning(
                "member %d was given %d pieces by others that are not as they were written, and reads them by itself: %s %s%s",
                me,
                len(wrong),
                wrong[0].name[:120],
                wrong[0].box,
                ", ..." if len(wrong) > 1 else "",
            )
            reader.read(wrong)

    def _say(self, topic: str, message: msgspec.Struct) -> None:
        try:
            self._rendezvous.publish(self._topic(topic), message)
        except SourceLostError as error:
            logger.warning("member %d cannot tell the others that it is %s: %s", self._rendezvous.member, topic, error)

    def _take(self, dealt: _Dealt, patience_s: float) -> list[Want]:
        """Fetch what others have read; return what could not be had."""
        me = self._rendezvous.member
        needed = {
            member: wants
            for member in (*range(me + 1, self._rendezvous.num_members), *range(me))
            if (wants := dealt.own.wants_of(dealt.shares[member]))
        }
        left = dealt.own.outside(dealt.shares)
        if left:
            logger.warning("nobody else can read %d boxes that member %d wants", len(left), me)
        fetched: dict[int, Future[bool]] = {}
        with Threads("torchft_ckpt-cold-start", _MAX_SOURCES_AT_ONCE) as threads:

            def begin(member: int, ready: _Ready) -> None:
                if ready.is_served:
                    fetched[member] = threads.submit(self._fetch, member, needed[member])

            try:
                self._rendezvous.collect(
                    self._topic("ready"), _decode_ready, needed, patience_s=patience_s, on_message=begin
                )
            except SourceLostError as error:
                logger.warning("member %d waits for nobody any longer: %s", me, error)
        for member, wants in needed.items():
            if member in fetched and fetched[member].result():
                continue
            num_bytes = sum(want.target.nbytes for want in wants)
            if member not in fetched:
                logger.warning("member %d reads %d bytes that member %d did not serve in time", me, num_bytes, member)
            left += wants
        return left

    def _fetch(self, member: int, wants: list[Want]) -> bool:
        """On a thread of its own: fetch what a member has read for this one; whether all of it is here."""
        address = self._rendezvous.addresses.get(member, "")
        try:
            ShardedFetch(
                [[parse_metadata(address)]],
                step=self._agreement.checkpoint.name.step,
                deadline=time.monotonic() + self._timeout_s,
                options=replace(
                    self._options,
                    receiver=uuid.uuid4().hex,
                    server_identity=self._agreement.identities.get(member, "unknown"),
                ),
                want=lambda group: wants,
            ).run()
        except CheckpointError as error:
            logger.warning(
                "member %d reads %d bytes by itself that member %d was to give it: %s",
                self._rendezvous.member,
                sum(want.target.nbytes for want in wants),
                member,
                error,
            )
            return False
        with self._lock:
            self.bytes_from_peers += sum(want.target.nbytes for want in wants)
        return True


class _OwnWants:
    """What this member wants, by name; each box once."""

    def __init__(self, wants: Sequence[Want]) -> None:
        self._by_name: dict[str, dict[Box, Want]] = {}
        self._doubles: list[tuple[Want, Want]] = []
        for want in wants:
            first = self._by_name.setdefault(want.name, {}).setdefault(want.box, want)
            if first.target is not want.target:
                self._doubles.append((first, want))

    def wants_of(self, share: Sequence[tuple[str, Box]]) -> list[Want]:
        return [
            want.part(box)
            for name, box in share
            for want in self._by_name.get(name, {}).values()
            if contains(want.box, box)
        ]

    def outside(self, shares: Sequence[Sequence[tuple[str, Box]]]) -> list[Want]:
        dealt: dict[str, list[Box]] = {}
        for share in shares:
            for name, box in share:
                if name in self._by_name:
                    dealt.setdefault(name, []).append(box)
        return [
            want.part(box)
            for name, wants in self._by_name.items()
            for want in wants.values()
            for box in subtract([want.box], dealt.get(name, ()))
        ]

    def checks_of(self, names: Collection[str], tensors: Mapping[str, SavedTensor]) -> list[Callable[[], Want | None]]:
        """Return a check for each piece that lies within a box that is wanted here; it returns the piece where that is wrong."""
        checks: list[Callable[[], Want | None]] = []
        for name in sorted(names):
            for want in self._by_name.get(name, {}).values():
                written = {
                    piece.box: piece.entry.digest for piece in tensors[name].pieces if contains(want.box, piece.box)
                }
                checks += [partial(_unless_as_written, want.part(box), digest) for box, digest in written.items()]
        return checks

    def copy_doubles(self) -> None:
        with torch.no_grad():
            for first, other in self._doubles:
                other.target.copy_(first.target)


class _Dealt(NamedTuple):
    own: _OwnWants
    wanted: dict[int, Boxes]
    """What each member wants that takes part."""
    shares: list[list[tuple[str, Box]]]
    """What each member reads."""
    alone: list[Want]
    """What this member reads by itself, because others may have other things under these names."""


def _read_share(reader: CheckpointReader, own: _OwnWants, share: Sequence[tuple[str, Box]]) -> dict[str, BoxedTensor]:
    """Read a share, to where it is wanted here, and return it as a state to serve."""
    wants: list[Want] = []
    pieces: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, box in share:
        here = own.wants_of([(name, box)]) or [
            Want(name, box, torch.empty(box.sizes, dtype=reader.tensors[name].dtype, device="cpu"))
        ]
        wants += here
        pieces.setdefault(name, []).append((box, here[0].target))
    if wants:
        reader.read(wants)
    return {
        name: BoxedTensor(reader.tensors[name].shape, reader.tensors[name].dtype, of_name)
        for name, of_name in pieces.items()
    }


def _unless_as_written(want: Want, digest: str) -> Want | None:
    """Return a piece that does not hold what the digest of its table is of; None where it does."""
    table = table_of(as_bytes(want.target.contiguous()).numpy().data)
    return None if xxhash.xxh3_128_hexdigest(table) == digest else want


def _is_there(want: Want, reader: CheckpointReader) -> bool:
    tensor = reader.tensors.get(want.name)
    return tensor is not None and fits(want.box, tensor.shape) and tensor.dtype == want.target.dtype


def _have_common(wanted: Boxes, share: Sequence[tuple[str, Box]]) -> bool:
    return any(contains(box, piece) for name, piece in share for box in wanted.get(name, ()))
