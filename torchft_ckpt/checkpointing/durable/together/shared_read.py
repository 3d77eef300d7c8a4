"""Reading a checkpoint once in the whole job: each member reads a share from storage, the rest travels between them.

What several members want is cut into equal shares by arithmetic (`core/shares.py`), each read by one of those who want it and
can read it. A share is read straight into this member's own tensors where it wants it itself, and served from there; what others
have read is fetched by the transport. So no byte is read twice, and none is kept twice.

Nobody is waited for without end. What a member does not have in time, because it died, failed or is slow, is read from storage by
those who want it, with a warning. A member that cannot meet the others reads by itself.

It knows members, boxes and who reads what; which checkpoint it is, is settled in `agreement`.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import xxhash

from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.checkpointing.durable.format.manifest import BoxEntry, table_of
from torchft_ckpt.checkpointing.durable.reading.checkpoint import NUM_THREADS, Checkpoint, SavedTensor, newest_whole
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.together.agreement import Agreement, agree
from torchft_ckpt.checkpointing.durable.together.boxed import BoxedTensor
from torchft_ckpt.checkpointing.durable.together.dealing import Boxes, deal_reading
from torchft_ckpt.checkpointing.durable.together.exchange import Exchange, Meeting
from torchft_ckpt.checkpointing.fetching.options import (
    MAX_MANIFEST_BYTES,
    FetchOptions,
    default_num_streams,
    physical_memory_bytes,
)
from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.checkpointing.resharding.fetch import ShardedFetch
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes import Box, contains, fits
from torchft_ckpt.core.coverage import subtract
from torchft_ckpt.errors import CheckpointError, SourceLostError, SourceRefusedError, torn_where_it_raises
from torchft_ckpt.threads import Threads, in_threads

logger = logging.getLogger(__name__)
_MAX_SOURCES_AT_ONCE = 16
_PATIENCE_FACTOR = 3.0
_LEASE = timedelta(days=1)
"""Longer than any read: what is served ends with the read, or with the transport."""


class _Wants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member wants: the digest of a list that several of them may have alike. Empty: it is gone."""

    digest: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32})?\Z")]


class _Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member serves its share; or it has failed, and serves nothing."""

    is_served: bool


class _Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member needs nobody any more."""


_decode_wants = msgspec.json.Decoder(_Wants).decode
_decode_list = msgspec.json.Decoder(dict[str, list[BoxEntry]]).decode
_decode_ready = msgspec.json.Decoder(_Ready).decode
_decode_done = msgspec.json.Decoder(_Done).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStatistics:
    """Where the bytes of tensors came from."""

    bytes_from_storage: int
    bytes_from_peers: int
    num_members: int
    """Who read together; 1: this one alone."""


class SharedRead:
    """One member's part in reading one checkpoint. `agree`, then `read`, each once, on one thread; all members do the same.

    Args:
        storages: what this member can read: the storage that all share, its own disk, or both.
        exchange: where the members meet; another key space for each read.
        member: this one's number, from 0.
        num_members: how many there are.
        transport: serves what is read here. It is the caller's to shut down, after `read`; nothing else may be served by it
            meanwhile.
        patience: how long a member is waited for that says nothing. One that is slow at reading is waited for three times as
            long as this member took, if that is longer.
        timeout: how long fetching from the others may take.
        token: shared secret of the job, which is proved to the others, not sent; default: the transport's.
        stall_timeout: a member is given up when a connection to it gets no byte for so long.
        client_ssl_context: whom to believe where members speak https.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        *,
        exchange: Exchange,
        member: int,
        num_members: int,
        transport: HTTPTransport[Any],
        patience: timedelta = timedelta(seconds=30),
        timeout: timedelta = timedelta(minutes=30),
        token: str | None = None,
        stall_timeout: timedelta = timedelta(seconds=15),
        connect_timeout: timedelta = timedelta(seconds=10),
        client_ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._storages = storages
        self._exchange = exchange
        self._meeting = Meeting(exchange, member, num_members, patience.total_seconds())
        self._transport = transport
        self._timeout_s = timeout.total_seconds()
        self._options = FetchOptions(
            connect_timeout_s=connect_timeout.total_seconds(),
            stall_timeout_s=stall_timeout.total_seconds(),
            num_streams=default_num_streams(),
            max_manifest_bytes=MAX_MANIFEST_BYTES,
            max_total_bytes=physical_memory_bytes(),
            token=(transport.token if token is None else token) or None,
            receiver=uuid.uuid4().hex,
            ssl_context=client_ssl_context,
        )
        self._agreement: Agreement | None = None
        self._reader: CheckpointReader | None = None
        self._has_said_wants = False
        self._lock = threading.Lock()
        self._bytes_from_peers = 0
        self._num_members = 1

    def agree(self, step: int | None = None, *, but: Collection[str] = ()) -> CheckpointReader:
        """Find the newest checkpoint that is whole over all members together; alone, where they cannot be met.

        Args:
            step: only checkpoints of this step.
            but: names of checkpoints that are known to be damaged; the same for all members.

        Returns:
            a reader of it: for values, what is own, and what tensors there are. Parts that only others can read have no
            storage there; `read` gets them.

        Raises:
            CheckpointNotFoundError: there is none.
            StorageError: nothing could be listed.
        """
        checkpoint: Checkpoint
        try:
            self._agreement = agree(
                self._storages,
                self._meeting,
                address=self._transport.metadata(),
                identity=self._transport.identity,
                step=step,
                but=but,
            )
            checkpoint = self._agreement.checkpoint
        except (SourceLostError, SourceRefusedError) as error:
            logger.warning("member %d looks for a checkpoint by itself: %s", self._meeting.member, error)
            checkpoint = newest_whole(self._storages, step=step, but=but)
        self._reader = CheckpointReader(checkpoint)
        return self._reader

    def read(self, wants: Sequence[Want]) -> None:
        """Fill targets. Returns when all is here and the others need nothing of this member any more, or are not waited for.

        Args:
            wants: boxes of tensors, and memory on the CPU for each. It must not change meanwhile: it is served.

        Raises:
            CheckpointError: as `CheckpointReader.read`; the others are told, and read what they wanted of this member.
        """
        reader = self._reader
        if reader is None:
            raise CheckpointError("there is nothing agreed on to read: call agree first", party="agree")
        dealt = None
        if self._agreement is not None and len(self._agreement.members) > 1:
            try:
                dealt = self._deal(self._agreement, reader, wants)
            except (SourceLostError, SourceRefusedError) as error:
                logger.warning("member %d reads by itself: %s", self._meeting.member, error)
        if self._agreement is None or dealt is None:
            reader.read(wants)
        else:
            self._num_members = len(dealt.wanted)
            self._read_dealt(self._agreement, dealt, reader)

    def leave(self) -> None:
        """Tell the others that this member wants nothing, where it has not said what it wants: it may have raised before."""
        if self._agreement is not None and not self._has_said_wants:
            self._say_wants("")

    @property
    def members(self) -> tuple[int, ...]:
        """Who agreed on the checkpoint, this member included, ascending."""
        return (self._meeting.member,) if self._agreement is None else self._agreement.members

    @property
    def addresses(self) -> dict[int, str]:
        """Where the others listen, once it was agreed on: for `Meeting.addresses`, so that a dead one is not waited for."""
        return dict(self._meeting.addresses)

    def statistics(self) -> ReadStatistics:
        """Return where the bytes came from so far."""
        return ReadStatistics(
            bytes_from_storage=0 if self._reader is None else self._reader.bytes_read,
            bytes_from_peers=self._bytes_from_peers,
            num_members=self._num_members,
        )

    def _deal(self, agreement: Agreement, reader: CheckpointReader, wants: Sequence[Want]) -> _Dealt:
        """Hear what the others want, and return who reads what.

        Raises:
            SourceLostError, SourceRefusedError: this member is not with the others any more.
            StateMismatchError: the checkpoint has not what is wanted here.
        """
        misfits = [want for want in wants if not _is_there(want, reader)]
        if misfits:
            self._say_wants("")
            reader.read(misfits)
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
        self._exchange.put(f"list/{digest}", data)
        self._say_wants(digest)
        heard = self._meeting.hear("wants", _decode_wants, agreement.members)
        members, _ = self._meeting.settle("wants settled", [member for member, one in heard.items() if one.digest])
        late = [member for member in members if member not in heard]
        heard.update(self._meeting.hear("wants", _decode_wants, late))
        wanted: dict[int, Boxes] = {}
        lists: dict[str, Boxes] = {digest: boxes}
        for member in members:
            theirs = digest if member == self._meeting.member else heard[member].digest if member in heard else ""
            if theirs not in lists:
                lists[theirs] = self._list_of(theirs)
            wanted[member] = lists[theirs]
        shares = deal_reading(reader.tensors, wanted, agreement.readers, self._meeting.num_members)
        return _Dealt(_OwnWants(wants), wanted, shares)

    def _list_of(self, digest: str) -> Boxes:
        """Return a list of what is wanted; an empty one where it cannot be had: then nothing is read for who wants it."""
        data = self._exchange.get(f"list/{digest}", self._meeting.patience_s) if digest else None
        if data is None or xxhash.xxh3_128_hexdigest(data) != digest:
            return {}
        try:
            return {name: [entry.box for entry in entries] for name, entries in _decode_list(data).items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("a list of what members want cannot be read: %s", error)
            return {}

    def _read_dealt(self, agreement: Agreement, dealt: _Dealt, reader: CheckpointReader) -> None:
        me = self._meeting.member
        mine = dealt.shares[me]
        takers = [member for member in dealt.wanted if member != me and _have_common(dealt.wanted[member], mine)]
        started_at = time.monotonic()
        try:
            state = _read_share(reader, dealt.own, mine)
        except CheckpointError:
            self._say("ready", _Ready(False))
            self._say("done", _Done())
            raise
        patience_s = max(self._meeting.patience_s, _PATIENCE_FACTOR * (time.monotonic() - started_at))
        try:
            with torn_where_it_raises(f"reading {reader.location} with others", reader.location):
                self._transport.send_checkpoint([], agreement.checkpoint.name.step, state, _LEASE)
                self._say("ready", _Ready(True))
                left = self._take(agreement, dealt, patience_s)
                if left:
                    reader.read(left)
                self._check_pieces(dealt, reader)
                dealt.own.copy_doubles()
        finally:
            self._say("done", _Done())
            try:
                self._meeting.hear("done", _decode_done, takers, patience_s=patience_s)
            except SourceLostError as error:
                logger.warning("member %d does not wait for the others: %s", me, error)
            self._transport.disallow_checkpoint()
            # Who comes later is told that it is over; else it would wait for it to be served again.
            self._transport.note_step(agreement.checkpoint.name.step + 1)

    def _check_pieces(self, dealt: _Dealt, reader: CheckpointReader) -> None:
        """Compare whole pieces that others gave with the manifests, and read again those that are not as they were written.

        Raises:
            CheckpointError: as `CheckpointReader.read`, of what is read again.
        """
        me = self._meeting.member
        given = {name for member, share in enumerate(dealt.shares) if member != me for name, _ in share}
        checks = dealt.own.checks_of(given - {*reader.checkpoint.divergent}, reader.tensors)
        wrong = [want for want in in_threads(lambda check: check(), checks, NUM_THREADS) if want is not None]
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

    def _say_wants(self, digest: str) -> None:
        self._has_said_wants = True
        self._meeting.say("wants", _Wants(digest))

    def _say(self, topic: str, message: msgspec.Struct) -> None:
        """Say something that others can do without."""
        try:
            self._meeting.say(topic, message)
        except SourceLostError as error:
            logger.warning("member %d cannot tell the others that it is %s: %s", self._meeting.member, topic, error)

    def _take(self, agreement: Agreement, dealt: _Dealt, patience_s: float) -> list[Want]:
        """Fetch what others have read; return what could not be had."""
        me = self._meeting.member
        needed = {
            member: wants
            for member in (*range(me + 1, self._meeting.num_members), *range(me))
            if (wants := dealt.own.wants_of(dealt.shares[member]))
        }
        left = dealt.own.outside(dealt.shares)
        if left:
            logger.warning("nobody else can read %d boxes that member %d wants", len(left), me)
        fetched: dict[int, Future[bool]] = {}
        with Threads("torchft_ckpt-together", _MAX_SOURCES_AT_ONCE) as threads:

            def begin(member: int, ready: _Ready) -> None:
                if ready.is_served:
                    fetched[member] = threads.submit(self._fetch, agreement, member, needed[member])

            try:
                self._meeting.hear("ready", _decode_ready, needed, patience_s=patience_s, on_heard=begin)
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

    def _fetch(self, agreement: Agreement, member: int, wants: list[Want]) -> bool:
        """On a thread of its own: fetch what a member has read for this one; whether all of it is here."""
        address = self._meeting.addresses.get(member, "")
        try:
            ShardedFetch(
                [[parse_metadata(address)]],
                step=agreement.checkpoint.name.step,
                deadline=time.monotonic() + self._timeout_s,
                options=replace(
                    self._options,
                    receiver=uuid.uuid4().hex,
                    server_identity=agreement.identities.get(member, "unknown"),
                ),
                want=lambda group: wants,
            ).run()
        except CheckpointError as error:
            logger.warning(
                "member %d reads %d bytes by itself that member %d was to give it: %s",
                self._meeting.member,
                sum(want.target.nbytes for want in wants),
                member,
                error,
            )
            return False
        with self._lock:
            self._bytes_from_peers += sum(want.target.nbytes for want in wants)
        return True


class _OwnWants:
    """What this member wants, by name; each box once.

    Args:
        wants: as they were given.
    """

    def __init__(self, wants: Sequence[Want]) -> None:
        self._by_name: dict[str, dict[Box, Want]] = {}
        self._doubles: list[tuple[Want, Want]] = []
        for want in wants:
            first = self._by_name.setdefault(want.name, {}).setdefault(want.box, want)
            if first.target is not want.target:
                self._doubles.append((first, want))

    def wants_of(self, share: Sequence[tuple[str, Box]]) -> list[Want]:
        """Return what of a share is wanted here, and where it goes."""
        return [
            want.part(box)
            for name, box in share
            for want in self._by_name.get(name, {}).values()
            if contains(want.box, box)
        ]

    def outside(self, shares: Sequence[Sequence[tuple[str, Box]]]) -> list[Want]:
        """Return what is wanted here and in no share."""
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
        """Return a check for each piece that lies within a box that is wanted here; it returns the piece where that is wrong.

        Args:
            names: of the tensors that are looked at.
            tensors: of the checkpoint.
        """
        checks: list[Callable[[], Want | None]] = []
        for name in sorted(names):
            for want in self._by_name.get(name, {}).values():
                written = {
                    piece.box: piece.entry.digest for piece in tensors[name].pieces if contains(want.box, piece.box)
                }
                checks += [partial(_unless_as_written, want.part(box), digest) for box, digest in written.items()]
        return checks

    def copy_doubles(self) -> None:
        """Fill the targets of boxes that are wanted more than once."""
        with torch.no_grad():
            for first, other in self._doubles:
                other.target.copy_(first.target)


class _Dealt(NamedTuple):
    own: _OwnWants
    wanted: dict[int, Boxes]
    """What each member wants that takes part."""
    shares: list[list[tuple[str, Box]]]
    """What each member reads."""


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
