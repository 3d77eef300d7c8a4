"""Answers the HTTP requests of a checkpoint server. Runs on the server's event loop only.

The paths, headers and refusals are those of `protocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor

import msgspec
import xxhash
from aiohttp import web

from torchft_ckpt.checkpointing.protocol import (
    ADDRESS_HEADER,
    DIGEST_HEADER,
    GROUP_HEADER,
    LATEST,
    MAX_BODY_BYTES,
    MAX_DIGESTED_BYTES,
    MAX_DIGESTS,
    MAX_PEERS,
    MAX_WAIT_S,
    NONCE_DIGITS,
    PREFIX,
    PROOF_PATH,
    RECEIVED_HEADER,
    RECEIVER_HEADER,
    SHARE_HEADER,
    STACKS_PATH,
    Peer,
    Peers,
    Refusal,
    decode_parts_request,
    parse_metadata,
    proof_of,
)
from torchft_ckpt.checkpointing.serving.relay import Served
from torchft_ckpt.checkpointing.serving.sending import (
    SLICE_BYTES,
    Body,
    FairThreads,
    Pace,
    Turn,
    Turns,
    body_of_blocks,
    body_of_parts,
    digest_blocks,
    digest_burst,
    digest_parts,
    neighbours,
    note_blake3s,
    regions_of,
    sample_blocks,
    send_burst,
)
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.checkpointing.serving.snapshot_registry import Availability, SnapshotRegistry
from torchft_ckpt.checkpointing.state.blocks import format_ranges, parse_mask, parse_runs
from torchft_ckpt.checkpointing.state.regions import Region
from torchft_ckpt.core.services.admission import client_of_address
from torchft_ckpt.core.transfer.scheduler import blocks_of
from torchft_ckpt.errors import CheckpointError, SourceLostError, StateChangedError
from torchft_ckpt.front.limits import acknowledged_bytes
from torchft_ckpt.network import bearer_matches, keep_from_forked_children, without_mapping
from torchft_ckpt.threads import stacks_in_words

logger = logging.getLogger(__name__)
_FIRST_BYTES = 16 * 1024
_PIECE_BYTES = 128 * 1024
MAX_GROUP = 4096
_MAX_TOLD_RUNS = 4096
_LONG_LOOK_S = 0.001
_LOOK_PAUSES = 10.0
_DIGESTED_AT_ONCE_BYTES = 64 * 1024 * 1024
_BLAKE3_AT_ONCE_BYTES = 16 * 1024 * 1024
"""Some 4 ms on one thread; what is computed for a client that has left ends with them."""
_NONCE = re.compile(rf"\A[0-9a-f]{{{NONCE_DIGITS}}}\Z")
_RECEIVER = re.compile(r"\A[0-9A-Za-z._-]{1,64}\Z")
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE}
_STATUS = {
    "unauthorized": 401,
    "not_yet": 404,
    "not_found": 404,
    "over": 409,
    "cannot": 409,
    "gone": 410,
    "changed": 410,
    "revoked": 410,
    "other_snapshot": 412,
}


class CheckpointHandlers:
    """The application of one checkpoint server.

    Args:
        executor: sends, and computes digests: whatever has to wait for a lock or for a device.
        token: what clients must present or prove, or None.
        proof_key: by which it proves at other addresses that it is the server of its manifests.
        on_registered: called on the loop when a receiver has started on a snapshot.
        max_bytes_per_s: of all bodies of blocks and parts together; None: no bound.
    """

    def __init__(
        self,
        registry: SnapshotRegistry,
        executor: Executor,
        *,
        num_threads: int,
        token: str | None,
        proof_key: str,
        on_registered: Callable[[Snapshot], None],
        patience_s: float,
        max_bytes_per_s: float | None = None,
    ) -> None:
        self._snapshots = registry
        self._threads = FairThreads(executor, num_threads)
        self._token = token or ""
        self._proof_key = proof_key
        self._on_registered = on_registered
        self._patience_s = patience_s
        self._pace = Pace(max_bytes_per_s)
        self._waiting: set[asyncio.Future[None]] = set()
        self._sending: dict[asyncio.Task[object], Served] = {}
        self._logged_changed: set[str | None] = set()
        self._looks_again_at: weakref.WeakKeyDictionary[Snapshot, float] = weakref.WeakKeyDictionary()
        self._lacks_descriptors = False
        self._computing_blake3 = asyncio.Lock()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        step = PREFIX + r"/{step:[0-9]{1,18}}"
        app.router.add_get(PREFIX, self._index)
        app.router.add_get(PROOF_PATH, self._prove, allow_head=False)
        app.router.add_get(STACKS_PATH, _stacks, allow_head=False)
        app.router.add_get(f"{PREFIX}/{LATEST}/manifest", self._latest_manifest)
        app.router.add_get(step + "/manifest", self._manifest)
        app.router.add_get(step + r"/blocks/{runs:[0-9]{1,18}-[0-9]{1,18}}", self._blocks, allow_head=False)
        app.router.add_get(step + "/digests", functools.partial(self._digests, digest_blocks))
        app.router.add_get(step + "/samples", functools.partial(self._digests, sample_blocks))
        app.router.add_get(step + "/blake3", self._blake3s)
        app.router.add_post(step + "/parts", self._parts)
        app.router.add_post(step + "/parts/digests", self._part_digests)
        app.router.add_get(step + "/peers", self._peers)
        app.router.add_post(step + "/done", self._done)
        return app

    def wake_waiting(self) -> None:
        """Let requests that wait for a step look again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def cancel_closed(self) -> None:
        """Cut the requests whose snapshot has been closed; their clients may be reading nothing at all."""
        for task, snapshot in list(self._sending.items()):
            if snapshot.closed:
                task.cancel()

    def cancel_all(self) -> None:
        for task in list(self._sending):
            task.cancel()
        for future in self._waiting:
            future.cancel()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # It is asked for a proof before it is told the token.
        if request.match_info.handler == self._prove:
            return await handler(request)
        if not bearer_matches(request.headers.get("Authorization"), self._token):
            return self._refuse("unauthorized", "the token is missing or another one").answer
        return await self._answer(request, handler)

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except _RefusedError as refused:
            return refused.answer
        except web.HTTPException as error:
            if error.status >= 500:
                raise
            return self._refuse("not_found", f"{error.status}: no such request here", status=error.status).answer
        except BlockGoneError as error:
            return self._gone(request, str(error)).answer
        except StateChangedError as error:
            self._warn_of_change(error)
            return self._refuse("changed", f"{error}; ask for a later step").answer
        except CheckpointError as error:
            logger.warning("a request for %s failed: %s", request.path, error)
            return self._refuse("failed", str(error), status=500).answer

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return _json(msgspec.json.encode(self._snapshots.index(time.monotonic())))

    async def _prove(self, request: web.Request) -> web.StreamResponse:
        nonce = request.query.get("nonce", "")
        if not _NONCE.match(nonce) or request.transport is None:
            return self._refuse("bad_range", f"a nonce of {NONCE_DIGITS} hex digits is wanted", status=416).answer
        host, port = request.transport.get_extra_info("sockname")[:2]
        return web.Response(text=proof_of(self._proof_key, nonce, without_mapping(host), port))

    async def _latest_manifest(self, request: web.Request) -> web.StreamResponse:
        """Wait for whatever is served first; the owner is told that somebody waits."""
        deadline = time.monotonic() + _wait_s(request)
        while True:
            snapshot = self._snapshots.find_latest(time.monotonic())
            if snapshot is not None:
                return await self._begin(request, snapshot.step)
            if not await self._woken(deadline):
                raise self._refuse("not_yet", "nothing is served now")

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        return await self._begin(request, int(request.match_info["step"]))

    async def _begin(self, request: web.Request, step: int) -> web.StreamResponse:
        """Answer with the manifest, once the receiver has been registered."""
        snapshot = await self._wait_for(request, step)
        self._note_contact(request, snapshot)
        if request.headers.get(GROUP_HEADER, "").isdecimal():
            snapshot.expect(min(int(request.headers[GROUP_HEADER][:6]), MAX_GROUP))
        return await self._answer_manifest(request, snapshot)

    async def _answer_manifest(self, request: web.Request, snapshot: Snapshot) -> web.StreamResponse:
        client = _client(request)
        body = await self._threads.run(client, snapshot.manifest_bytes)
        headers = {DIGEST_HEADER: xxhash.xxh3_128_hexdigest(body), "ETag": _etag(snapshot)}
        if "deflate" in request.headers.get("Accept-Encoding", ""):
            body = await self._threads.run(client, snapshot.deflated_manifest_bytes)
            headers["Content-Encoding"] = "deflate"
        receiver = _receiver(request)
        if receiver is not None:
            headers[SHARE_HEADER] = "{}/{}".format(*snapshot.share_of(receiver))
        return _json(body, headers) if request.method == "HEAD" else await self._send_manifest(request, body, headers)

    async def _blocks(self, request: web.Request) -> web.StreamResponse:
        served = self._chosen(request)
        (run,) = self._runs(request.match_info["runs"], served)
        self._note_contact(request, served)
        start, stop = run.start * served.block_bytes, min(run.stop * served.block_bytes, served.total_bytes)
        self._check_unchanged(served, start, stop)
        if not served.holds(start, stop):
            raise self._gone(request, f"step {served.step}: blocks {run.start} to {run.stop - 1} have been freed")
        return await self._send(request, served, body_of_blocks(served, run))

    async def _digests(
        self, of: Callable[[Served, Sequence[int]], dict[int, bytes]], request: web.Request
    ) -> web.StreamResponse:
        served, blocks = self._asked_blocks(request)
        digests: dict[str, str] = {}
        num_at_once = max(_DIGESTED_AT_ONCE_BYTES // served.block_bytes, 1)
        for first in range(0, len(blocks), num_at_once):
            batch = blocks[first : first + num_at_once]
            found = await self._threads.run(_client(request), of, served, batch, is_long=True)
            digests.update((str(block), digest.hex()) for block, digest in found.items())
        return _json(msgspec.json.encode(digests), {"ETag": _etag(served)})

    async def _blake3s(self, request: web.Request) -> web.StreamResponse:
        """Answer with BLAKE3 digests: each is computed once for all receivers, on one thread at a time, whoever asks."""
        served, blocks = self._asked_blocks(request)
        if not isinstance(served, Snapshot):
            raise self._refuse("not_found", "BLAKE3 digests are announced by the source alone")
        num_at_once = max(_BLAKE3_AT_ONCE_BYTES // served.block_bytes, 1)
        unknown = [block for block in blocks if block not in served.blake3s]
        for first in range(0, len(unknown), num_at_once):
            async with self._computing_blake3:
                batch = unknown[first : first + num_at_once]
                if not all(block in served.blake3s for block in batch):  # else another request had them computed
                    await self._threads.run(_client(request), note_blake3s, served, batch, is_long=True)
        known = {str(block): served.blake3s[block].hex() for block in blocks if block in served.blake3s}
        return _json(msgspec.json.encode(known), {"ETag": _etag(served)})

    def _asked_blocks(self, request: web.Request) -> tuple[Served, list[int]]:
        served = self._chosen(request)
        runs = self._runs(request.query.get("blocks", ""), served)
        if sum(len(run) for run in runs) > MAX_DIGESTS:
            raise self._refuse("bad_range", f"at most {MAX_DIGESTS} digests at once", status=416)
        self._note_contact(request, served)
        return served, [block for run in runs for block in run]

    async def _parts(self, request: web.Request) -> web.StreamResponse:
        snapshot, regions, seeds = await self._asked_parts(request)
        return await self._send(request, snapshot, body_of_parts(snapshot, regions, seeds))

    async def _part_digests(self, request: web.Request) -> web.StreamResponse:
        snapshot, regions, _ = await self._asked_parts(request)
        num_bytes = sum(region.num_bytes for region in regions)
        if num_bytes > MAX_DIGESTED_BYTES:
            message = f"digests of {num_bytes} bytes were asked for; at most {MAX_DIGESTED_BYTES} at once"
            raise self._refuse("bad_range", message, status=416)
        digests, found, stop = digest_parts(snapshot, regions), list[bytes](), threading.Event()
        try:
            while not await self._threads.run(_client(request), digest_burst, digests, found, stop, is_long=True):
                pass
        finally:
            stop.set()  # where the client has left, at its next slice
        return _json(msgspec.json.encode([digest.hex() for digest in found]), {"ETag": _etag(snapshot)})

    async def _asked_parts(self, request: web.Request) -> tuple[Snapshot, list[Region], list[int]]:
        """Return the snapshot, and where the parts lie that a request asks for, with the seeds of their digests."""
        served = self._chosen(request)
        if not isinstance(served, Snapshot):
            raise self._refuse("not_found", "parts are served by the source alone")
        try:
            parts = decode_parts_request(await request.read()).parts
            regions = regions_of(served.manifest, parts)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise self._refuse("bad_range", str(error)[:400], status=416) from error
        self._note_contact(request, served)
        runs = [(some[0].start, some[-1].stop) for some in neighbours(regions, SLICE_BYTES)]
        for start, stop in runs:
            self._check_unchanged(served, start, stop)
        if not all(served.holds(start, stop) for start, stop in runs):
            raise self._gone(request, f"step {served.step}: parts of it have been freed")
        return served, regions, [part.seed for part in parts]

    async def _peers(self, request: web.Request) -> web.StreamResponse:
        served = self._chosen(request)
        self._note_contact(request, served)
        receiver = _receiver(request)
        if not isinstance(served, Snapshot) or receiver is None:
            raise self._refuse("not_found", "peers are known to the source alone, and told to its receivers")
        peers = [Peer(address=peer.address, held=_runs_text(peer.held)) for peer in served.peers_of(receiver)]
        return _json(msgspec.json.encode(Peers(peers=peers, sent=_runs_text(served.sent()))))

    async def _done(self, request: web.Request) -> web.StreamResponse:
        receiver = _receiver(request)
        with contextlib.suppress(_RefusedError):
            snapshot = self._chosen(request)
            if isinstance(snapshot, Snapshot) and receiver is not None:
                snapshot.finish(receiver)
        return web.Response(status=204)

    # Choosing

    async def _wait_for(self, request: web.Request, step: int) -> Snapshot:
        """Return a snapshot on which the receiver has been registered; refuse once the wait is over."""
        loop = asyncio.get_running_loop()
        receiver = _receiver(request)
        deadline = loop.time() + _wait_s(request)
        while True:
            answer, snapshot = self._snapshots.find(step, receiver)
            if snapshot is not None:
                self._check_unchanged(snapshot, 0, snapshot.total_bytes)
            if snapshot is not None and receiver is None:
                return snapshot
            if snapshot is not None and receiver is not None:
                if self._snapshots.register(snapshot, receiver, loop.time(), _client(request)):
                    self._on_registered(snapshot)
                    return snapshot
                if snapshot.is_revoked(receiver):
                    raise self._refuse("revoked", _REVOKED.format(step))
            if answer is Availability.OVER:
                raise self._refuse("over", f"step {step} is over, this source has gone on")
            if snapshot is None and (why := self._snapshots.why_not(step)):
                raise self._refuse("cannot", f"its state of step {step} cannot be sent: {why}")
            self._snapshots.request_snapshot(step, time.monotonic())
            if not await self._woken(deadline):
                message = f"step {step} is not served {'any more' if snapshot else 'yet'}"
                raise self._refuse("not_yet", message)

    async def _woken(self, deadline: float) -> bool:
        """Wait until something is published; False if the deadline came first."""
        loop = asyncio.get_running_loop()
        remaining_s = deadline - loop.time()
        if remaining_s <= 0:
            return False
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting.add(woken)
        try:
            await asyncio.wait({woken}, timeout=remaining_s)
        finally:
            self._waiting.discard(woken)
        if woken.cancelled():
            raise asyncio.CancelledError
        return True

    def _runs(self, text: str, served: Served) -> list[range]:
        try:
            return parse_runs(text, served.num_blocks)
        except ValueError as error:
            raise self._refuse("bad_range", str(error), status=416) from error

    def _chosen(self, request: web.Request) -> Served:
        """Return the snapshot that a request names: by If-Match, else the newest of its step."""
        step = int(request.match_info["step"])
        wanted = request.headers.get("If-Match")
        if wanted is not None:
            snapshot = self._snapshots.find_by_id(wanted.strip('"'))
            if snapshot is None and self._snapshots.was_revoked(wanted.strip('"'), _receiver(request)):
                raise self._refuse("revoked", _REVOKED.format(step))
            if snapshot is None or snapshot.step != step:
                message = f"that snapshot of step {step} is not served any more"
                raise self._refuse("other_snapshot", message)
            return snapshot
        answer, snapshot = self._snapshots.find(step, _receiver(request))
        if snapshot is None:
            what = "over" if answer is Availability.OVER else "not_yet"
            message = f"step {step} is not served {'any more' if what == 'over' else 'yet'}"
            raise self._refuse(what, message)
        return snapshot

    def _check_unchanged(self, served: Served, start: int, stop: int) -> None:
        """Raise `StateChangedError` where bytes [start, stop) were written to without the lock: before anything is sent.

        Each tensor is looked at, and there may be thousands: where that takes long, it takes a tenth of this thread's time at
        most. What is written to in between is seen when it is sent.
        """
        if not isinstance(served, Snapshot):
            return
        looks = time.monotonic() >= self._looks_again_at.get(served, 0.0)
        began_s = time.thread_time()
        served.raise_if_changed(start, stop, looks=looks)
        took_s = time.thread_time() - began_s
        if looks and took_s > _LONG_LOOK_S:
            self._looks_again_at[served] = time.monotonic() + _LOOK_PAUSES * took_s

    def _note_contact(self, request: web.Request, served: Served) -> None:
        receiver = _receiver(request)
        if receiver is None:
            return
        received = 0
        # What cannot be read only means that less is freed, and that nobody is sent there.
        with contextlib.suppress(ValueError):
            received = parse_mask(request.headers.get(RECEIVED_HEADER, ""), served.num_blocks)
        address = None
        with contextlib.suppress(SourceLostError):
            address = (
                str(parse_metadata(request.headers[ADDRESS_HEADER])) if ADDRESS_HEADER in request.headers else None
            )
        served.contact(receiver, time.monotonic(), received=received, address=address)

    def _gone(self, request: web.Request, message: str) -> _RefusedError:
        with contextlib.suppress(_RefusedError):
            served = self._chosen(request)
            if served.is_revoked(_receiver(request)):
                return self._refuse("revoked", _REVOKED.format(served.step))
        return self._refuse("gone", message)

    def _refuse(self, error: str, message: str, *, status: int | None = None) -> _RefusedError:
        refusal = Refusal(error=error, message=message, serving_step=self._snapshots.serving_step())
        headers = {"WWW-Authenticate": "Bearer"} if error == "unauthorized" else None
        answer = web.Response(
            status=status or _STATUS[error],
            body=msgspec.json.encode(refusal),
            content_type="application/json",
            headers=headers,
        )
        return _RefusedError(answer)

    def _warn_of_change(self, error: StateChangedError) -> None:
        """Say it once of each tensor: who receives gets it each time."""
        if error.party not in self._logged_changed:
            self._logged_changed.add(error.party)
            logger.warning(
                "%s: it is not served any more, training goes on. Hold Manager.state_dict_lock.write() while you change it, and "
                "what receivers need is copied first",
                error,
            )

    # Sending

    async def _send_manifest(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """Send it in pieces, so that who reads none of it has one piece copied for it, not all, and is given up after a while."""
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/json"
        response.content_length = len(body)
        transport = request.transport
        if transport is None:
            raise web.HTTPInternalServerError
        try:
            await response.prepare(request)
            with _giving_up(transport, self._patience_s):
                for at in range(0, len(body), _PIECE_BYTES):
                    await response.write(body[at : at + _PIECE_BYTES])
            await response.write_eof()
        except OSError as error:
            logger.debug("a receiver did not take a manifest: %s", error)
            transport.abort()
        return response

    async def _send(self, request: web.Request, served: Served, body: Body) -> web.StreamResponse:
        """Send a body; where it ends early the connection is cut, so that the client cannot take it for the end."""
        response = web.StreamResponse(headers={"ETag": _etag(served)})
        response.content_type = "application/octet-stream"
        response.content_length = body.length
        receiver = _receiver(request)
        client = _client(request)
        task = asyncio.current_task()
        transport = request.transport
        if task is None or transport is None:  # aiohttp runs every handler in a task, on a connection
            raise web.HTTPInternalServerError
        self._sending[task] = served
        sock = None
        turns = Turns(self._pace, body.length)

        def taken() -> None:
            if receiver is not None:
                served.contact(receiver, time.monotonic())

        try:
            sock = None if transport.get_extra_info("sslcontext") is not None else self._duplicate(transport)
            await response.prepare(request)
            if sock is None:
                await self._write(client, response, body, turns, taken)
            else:
                await self._write(client, response, body, turns, taken, _FIRST_BYTES, max_parts=1)
                while transport.get_write_buffer_size():
                    await asyncio.sleep(0.001)
                await self._send_from_threads(client, sock, body, turns, taken)
            await response.write_eof()
        except OSError as error:
            logger.debug("a receiver of %r closed its connection: %s", served, error)
            transport.abort()  # where it has not, it must not wait for the rest
        except CheckpointError as error:
            if isinstance(error, StateChangedError):
                self._warn_of_change(error)
            logger.info("%r: a response was cut: %s", served, error)
            transport.abort()
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            if sock is not None:
                sock.close()
            turns.end()
            del self._sending[task]
        return response

    def _duplicate(self, transport: asyncio.BaseTransport) -> socket.socket | None:
        """Return a socket object of its own over the same connection; None if this process may open no more descriptors."""
        try:
            sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
            if not self._lacks_descriptors:
                logger.warning(
                    "this process has no descriptor left to serve states with (%s): what it sends is copied and slower until it "
                    "has; raise its limit of open files (ulimit -n)",
                    error,
                )
            self._lacks_descriptors = True
            return None
        self._lacks_descriptors = False
        keep_from_forked_children(sock)
        sock.setblocking(False)
        return sock

    async def _write(
        self,
        client: str,
        response: web.StreamResponse,
        body: Body,
        turns: Turns,
        taken: Callable[[], None],
        max_bytes: int = 256 * 1024,
        max_parts: int | None = None,
    ) -> None:
        """Send copies of parts through aiohttp: the head with the first one, and all that cannot be sent from threads."""
        parts: list[bytes] = []

        def copy(views: list[memoryview]) -> int:
            parts.append(b"".join(views))
            return len(parts[-1])

        while not body.done and max_parts != 0:
            max_parts = None if max_parts is None else max_parts - 1
            while wait_s := turns.wait_s():
                await asyncio.sleep(wait_s)
            await self._threads.run(client, body.advance, copy, min(max_bytes, turns.left))
            turns.sent(len(parts[-1]))
            await response.write(parts.pop())
            taken()

    async def _send_from_threads(
        self, client: str, sock: socket.socket, body: Body, turns: Turns, taken: Callable[[], None]
    ) -> None:
        """Send straight from the lent memory, on a socket object of its own over the connection.

        Nothing else writes meanwhile: what aiohttp had to write is out, and it writes again after the body.
        """
        stop = threading.Event()
        turn: asyncio.Future[Turn] | None = None
        try:
            while not body.done:
                turn = self._threads.run(client, send_burst, body, sock, stop, turns)
                ended = await asyncio.shield(turn)
                if ended is Turn.FULL:
                    await _writable(sock)
                elif ended is Turn.AHEAD:
                    await asyncio.sleep(turns.wait_s())
                taken()
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # the receiver learns it now, whatever the burst still waits for
            raise
        finally:
            stop.set()
            while turn is not None and not turn.done():
                # A burst does not wait for the network, so this is short. It goes on, or has yet to begin, when this task is
                # cancelled once more, as it is where the server ends: its socket has to be there until then.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({turn})
            if turn is not None and not turn.cancelled():
                turn.exception()  # it was raised above, or the response is being given up


class _RefusedError(Exception):
    """A request is refused, with this answer."""

    def __init__(self, answer: web.Response) -> None:
        super().__init__(answer)
        self.answer = answer


_REVOKED = (
    "this receiver was the slowest of step {} when the copies for it would have exceeded the source's staging_budget_bytes: "
    "its lease was revoked; ask for a later step"
)


@contextlib.contextmanager
def _giving_up(transport: asyncio.Transport, patience_s: float) -> Iterator[None]:
    """End the connection of a client that has taken nothing for so long. The kernel is asked: what it holds it passes on late."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def look(before: int | None) -> None:
        nonlocal timer
        now = acknowledged_bytes(transport)
        if now is not None and now == before:
            transport.abort()
        else:
            timer = loop.call_later(patience_s, look, now)

    timer = loop.call_later(patience_s, look, None)
    try:
        yield
    finally:
        timer.cancel()


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    writable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not writable.done():
            writable.set_result(None)

    loop.add_writer(sock, wake)
    try:
        await writable
    finally:
        loop.remove_writer(sock)


async def _stacks(request: web.Request) -> web.StreamResponse:
    return web.Response(text=stacks_in_words())


def _json(body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=headers)


@functools.lru_cache(maxsize=4 * MAX_PEERS)
def _runs_text(mask: int) -> str:
    """Return the blocks of a set, as far as they are told: a receiver that learns of fewer only asks elsewhere for the others."""
    return format_ranges(blocks_of(mask, _MAX_TOLD_RUNS))


def _etag(served: Served) -> str:
    return f'"{served.id}"'


def _receiver(request: web.Request) -> str | None:
    name = request.headers.get(RECEIVER_HEADER, "")
    return name if _RECEIVER.match(name) else None


def _client(request: web.Request) -> str:
    """Return whose request it is, as the front counts clients: of IPv6 all of a network, which one host may have, are one."""
    return client_of_address(request.remote or "")


def _wait_s(request: web.Request) -> float:
    try:
        wait_s = float(request.query.get("wait_s", "0"))
    except ValueError:
        return 0.0
    return min(max(wait_s, 0.0), MAX_WAIT_S) if math.isfinite(wait_s) else 0.0
