"""What each HTTP request on a checkpoint server does. Runs on the server's event loop only.

The paths, headers and refusals are those of `protocol`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor

import msgspec
import xxhash
from aiohttp import web

from torchft_ckpt.checkpointing.blocks import DIGEST_BYTES, block_range, parse_runs, start_digest
from torchft_ckpt.checkpointing.protocol import (
    DIGEST_HEADER,
    MAX_WAIT_S,
    PREFIX,
    RECEIVED_HEADER,
    RECEIVER_HEADER,
    Refusal,
)
from torchft_ckpt.checkpointing.shelf import Answer, Shelf
from torchft_ckpt.checkpointing.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.errors import CheckpointError
from torchft_ckpt.network import bearer_matches

logger = logging.getLogger(__name__)
SLICE_BYTES = 1024 * 1024
_MAX_DIGESTS = 4096
_RANGE = re.compile(r"\Abytes=([0-9]{1,19})-([0-9]{0,19})\Z")
_RECEIVER = re.compile(r"\A[0-9A-Za-z._-]{1,64}\Z")
_STATUS = {"unauthorized": 401, "not_yet": 404, "not_found": 404, "over": 409, "gone": 410, "other_snapshot": 412}


class CheckpointHandlers:
    """The application of one checkpoint server.

    Args:
        shelf: what is served.
        executor: runs reads that have to wait for a lock or for a device.
        token: what clients must present, or None.
        on_registered: called on the loop when a receiver has started on a snapshot.
    """

    def __init__(
        self,
        shelf: Shelf,
        executor: Executor,
        *,
        token: str | None,
        on_registered: Callable[[Snapshot], None],
    ) -> None:
        self._shelf = shelf
        self._executor = executor
        self._token = token or ""
        self._on_registered = on_registered
        self._waiting: set[asyncio.Future[None]] = set()
        self._sending: dict[asyncio.Task[object], Snapshot] = {}

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        step = PREFIX + r"/{step:[0-9]{1,18}}"
        app.router.add_get(step + "/manifest", self._manifest)
        app.router.add_get(step + r"/blocks/{runs:[0-9]{1,18}-[0-9]{1,18}}", self._blocks)
        app.router.add_get(step + "/bytes", self._bytes)
        app.router.add_get(step + "/digests", self._digests)
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
        """Cut every request."""
        for task in list(self._sending):
            task.cancel()
        for future in self._waiting:
            future.cancel()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not bearer_matches(request.headers.get("Authorization"), self._token):
            return self._refuse("unauthorized", "the token is missing or another one")
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status >= 500:
                raise
            return self._refuse("not_found", f"{error.status}: no such request here", status=error.status)
        except BlockGoneError as error:
            return self._refuse("gone", str(error))
        except CheckpointError as error:
            logger.warning("a request for %s failed: %s", request.path, error)
            return self._refuse("failed", str(error), status=500)

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        step = int(request.match_info["step"])
        snapshot = await self._wait_for(step, _receiver(request), _wait_s(request))
        if isinstance(snapshot, web.Response):
            return snapshot
        body = snapshot.manifest_bytes()
        headers = {DIGEST_HEADER: xxhash.xxh3_128_hexdigest(body), "ETag": _etag(snapshot)}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _blocks(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._chosen(request)
        if isinstance(snapshot, web.Response):
            return snapshot
        try:
            (run,) = parse_runs(request.match_info["runs"], snapshot.num_blocks)
        except ValueError as error:
            return self._refuse("bad_range", str(error), status=416)
        self._acknowledge(request, snapshot)
        block_bytes = snapshot.manifest.block_bytes
        start, stop = run.start * block_bytes, min(run.stop * block_bytes, snapshot.total_bytes)
        if not snapshot.holds(start, stop):
            return self._refuse("gone", f"step {snapshot.step}: blocks {run.start} to {run.stop - 1} have been freed")
        response = _stream(snapshot, 200, stop - start + DIGEST_BYTES * len(run))
        await response.prepare(request)
        return await self._send(request, response, snapshot, self._framed(snapshot, run))

    async def _bytes(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._chosen(request)
        if isinstance(snapshot, web.Response):
            return snapshot
        start, stop, status = 0, snapshot.total_bytes, 200
        if "Range" in request.headers:
            match = _RANGE.match(request.headers["Range"])
            start = int(match[1]) if match else -1
            stop = min(int(match[2]) + 1, stop) if match and match[2] else stop
            status = 206
            if not 0 <= start < stop:
                refusal = self._refuse("bad_range", f"the state has {snapshot.total_bytes} bytes", status=416)
                refusal.headers["Content-Range"] = f"bytes */{snapshot.total_bytes}"
                return refusal
        if not snapshot.holds(start, stop):
            return self._refuse("gone", f"step {snapshot.step}: bytes {start} to {stop} have been freed")
        response = _stream(snapshot, status, stop - start)
        if status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{snapshot.total_bytes}"
        await response.prepare(request)
        return await self._send(request, response, snapshot, self._slices(snapshot, start, stop))

    async def _digests(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._chosen(request)
        if isinstance(snapshot, web.Response):
            return snapshot
        try:
            runs = parse_runs(request.query.get("blocks", ""), snapshot.num_blocks)
        except ValueError as error:
            return self._refuse("bad_range", str(error), status=416)
        if sum(len(run) for run in runs) > _MAX_DIGESTS:
            return self._refuse("bad_range", f"at most {_MAX_DIGESTS} digests at once", status=416)
        digests = {str(block): (await self._digest(snapshot, block)).hex() for run in runs for block in run}
        body = msgspec.json.encode(digests)
        return web.Response(body=body, content_type="application/json", headers={"ETag": _etag(snapshot)})

    async def _done(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._chosen(request)
        receiver = _receiver(request)
        if isinstance(snapshot, Snapshot) and receiver is not None:
            snapshot.finish(receiver)
        return web.Response(status=204)

    # Choosing

    async def _wait_for(self, step: int, receiver: str | None, wait_s: float) -> Snapshot | web.Response:
        """Return a snapshot on which the receiver has been registered, or the refusal once the wait is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            answer, snapshot = self._shelf.find(step)
            if snapshot is not None and receiver is None:
                return snapshot
            if snapshot is not None and receiver is not None and self._shelf.register(snapshot, receiver):
                self._on_registered(snapshot)
                return snapshot
            if answer is Answer.OVER:
                return self._refuse("over", f"step {step} is over, this source has gone on")
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                return self._refuse("not_yet", f"step {step} is not served {'any more' if snapshot else 'yet'}")
            woken: asyncio.Future[None] = loop.create_future()
            self._waiting.add(woken)
            try:
                await asyncio.wait({woken}, timeout=remaining_s)
            finally:
                self._waiting.discard(woken)
            if woken.cancelled():
                raise asyncio.CancelledError

    def _chosen(self, request: web.Request) -> Snapshot | web.Response:
        """Return the snapshot that a request names: by If-Match, else the newest of its step."""
        step = int(request.match_info["step"])
        wanted = request.headers.get("If-Match")
        if wanted is not None:
            snapshot = self._shelf.find_by_id(wanted.strip('"'))
            if snapshot is None or snapshot.step != step:
                return self._refuse("other_snapshot", f"that snapshot of step {step} is not served any more")
            return snapshot
        answer, snapshot = self._shelf.find(step)
        if snapshot is None:
            what = "over" if answer is Answer.OVER else "not_yet"
            return self._refuse(what, f"step {step} is not served {'any more' if what == 'over' else 'yet'}")
        return snapshot

    def _acknowledge(self, request: web.Request, snapshot: Snapshot) -> None:
        receiver = _receiver(request)
        text = request.headers.get(RECEIVED_HEADER, "")
        if receiver is None or not text:
            return
        try:
            runs = parse_runs(text, snapshot.num_blocks)
        except ValueError:
            return  # an acknowledgement that cannot be read only means that less is freed
        for run in runs:
            snapshot.acknowledge(receiver, run)

    def _refuse(self, error: str, message: str, *, status: int | None = None) -> web.Response:
        refusal = Refusal(error=error, message=message, serving_step=self._shelf.serving_step())
        headers = {"WWW-Authenticate": "Bearer"} if error == "unauthorized" else None
        return web.Response(
            status=status or _STATUS[error],
            body=msgspec.json.encode(refusal),
            content_type="application/json",
            headers=headers,
        )

    # Sending

    async def _send(
        self, request: web.Request, response: web.StreamResponse, snapshot: Snapshot, parts: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        """Write parts; where they end early the connection is cut, so that the client cannot take it for the end."""
        task = asyncio.current_task()
        if task is None:  # aiohttp runs every handler in a task
            raise web.HTTPInternalServerError
        self._sending[task] = snapshot
        try:
            async for part in parts:
                await response.write(part)
            await response.write_eof()
        except ConnectionError:
            logger.debug("a receiver of %r closed its connection", snapshot)
        except CheckpointError as error:
            logger.info("%r: a response was cut: %s", snapshot, error)
            _cut(request)
        except asyncio.CancelledError:
            _cut(request)
            raise
        finally:
            del self._sending[task]
        return response

    async def _framed(self, snapshot: Snapshot, run: range) -> AsyncIterator[bytes]:
        for block in run:
            start, stop = block_range(block, snapshot.total_bytes, snapshot.manifest.block_bytes)
            known = snapshot.digests.get(block)
            hasher = start_digest(block)
            async for part in self._slices(snapshot, start, stop):
                if known is None:
                    hasher.update(part)
                yield part
            if known is None:
                known = snapshot.digests[block] = hasher.digest()
            yield known

    async def _slices(self, snapshot: Snapshot, start: int, stop: int) -> AsyncIterator[bytes]:
        for at in range(start, stop, SLICE_BYTES):
            end = min(at + SLICE_BYTES, stop)
            part = snapshot.try_read(at, end)
            if part is None:
                part = await asyncio.get_running_loop().run_in_executor(self._executor, snapshot.read, at, end)
            yield part

    async def _digest(self, snapshot: Snapshot, block: int) -> bytes:
        known = snapshot.digests.get(block)
        if known is None:
            hasher = start_digest(block)
            start, stop = block_range(block, snapshot.total_bytes, snapshot.manifest.block_bytes)
            async for part in self._slices(snapshot, start, stop):
                hasher.update(part)
                await asyncio.sleep(0)
            known = snapshot.digests[block] = hasher.digest()
        return known


def _stream(snapshot: Snapshot, status: int, length: int) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers={"ETag": _etag(snapshot), "Accept-Ranges": "bytes"})
    response.content_type = "application/octet-stream"
    response.content_length = length
    return response


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _etag(snapshot: Snapshot) -> str:
    return f'"{snapshot.id}"'


def _receiver(request: web.Request) -> str | None:
    name = request.headers.get(RECEIVER_HEADER, "")
    return name if _RECEIVER.match(name) else None


def _wait_s(request: web.Request) -> float:
    try:
        wait_s = float(request.query.get("wait_s", "0"))
    except ValueError:
        return 0.0
    return min(max(wait_s, 0.0), MAX_WAIT_S) if math.isfinite(wait_s) else 0.0
