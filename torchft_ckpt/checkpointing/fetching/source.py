"""What a receiver asks one source, over one connection, and how it takes the answers: checked, or as a named error.

It knows the protocol of `protocol`; it does not know which blocks are wanted, nor other sources. One thread uses a client;
`close` may come from any.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import xxhash

from torchft_ckpt.checkpointing.fetching.connection import Answer, FetchOptions, SourceConnection, UnansweredError
from torchft_ckpt.checkpointing.protocol import (
    ADDRESS_HEADER,
    DIGEST_HEADER,
    GROUP_HEADER,
    LATEST,
    MAX_DIGESTS,
    MAX_PEERS,
    MAX_WAIT_S,
    PREFIX,
    RECEIVED_HEADER,
    RECEIVER_HEADER,
    SHARE_HEADER,
    STACKS_PATH,
    BoxRequest,
    Index,
    PartsRequest,
    Refusal,
    SourceAddress,
    decode_digests,
    decode_index,
    decode_part_digests,
    decode_peers,
    parse_metadata,
)
from torchft_ckpt.checkpointing.state.blocks import BLAKE3_BYTES, DIGEST_BYTES, count_blocks, format_runs, parse_mask
from torchft_ckpt.checkpointing.state.format import Manifest, decode_manifest
from torchft_ckpt.config import secrets
from torchft_ckpt.errors import (
    CheckpointError,
    DigestMismatchError,
    LeaseRevokedError,
    SourceLostError,
    SourceRefusedError,
    StateFormatError,
    TransferCancelledError,
)

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
DONE_TIMEOUT_S = 1.0
_PAUSE_S = 0.1
_UNANSWERED_PAUSES_S = (0.1, 0.2, 0.4, 0.8)
_BUSY_S = 0.5
_MAX_ATTEMPTS = 20
_MARGIN_S = 0.2
_SHARE = re.compile(r"\A([0-9]{1,6})/([0-9]{1,6})\Z")
_MAX_DIGESTS_BYTES = 96 * MAX_DIGESTS
_MAX_PEERS_BYTES = _MAX_STACKS_BYTES = 4 * 1024 * 1024
_MAX_INDEX_BYTES = 1024 * 1024


class SourceClient:
    """One connection to one source.

    Args:
        address: where to connect to.
        step: the step wanted, or None for the newest.
    """

    def __init__(self, address: SourceAddress, step: int | None, options: FetchOptions) -> None:
        self.address = address.source
        self.path = str(address)
        """Names the address over all sources."""
        self.share = (0, 1)
        """Which receiver of the state this is, from 0 on, and of how many; known with the manifest."""
        self.name = str(address.source)
        self._step = step
        self._manifest_headers = {GROUP_HEADER: str(options.group_size)} if options.group_size > 1 else {}
        if options.deflated_manifests:
            self._manifest_headers["Accept-Encoding"] = "deflate"
        self._options = options
        self._closed = threading.Event()
        headers = {RECEIVER_HEADER: options.receiver}
        if options.token is not None:
            headers["Authorization"] = f"Bearer {secrets(options.token)[0]}"
        self._connection = SourceConnection(
            address,
            headers=headers,
            connect_timeout_s=options.connect_timeout_s,
            stall_timeout_s=options.stall_timeout_s,
            ssl_context=options.ssl_context,
            needs_tls=options.ssl_context is not None or (options.address or "").startswith("https:"),
        )

    def connect(self) -> None:
        """Connect now, and have the source prove who it is where it was to; else the first request does."""
        self._connection.open()

    def close(self) -> None:
        """Wake and fail whatever waits on the connection. From any thread."""
        self._closed.set()
        self._connection.close()

    def release(self) -> None:
        """Close the socket. By the thread that uses it."""
        self._connection.release()

    def pause(self, seconds: float) -> bool:
        """Wait for some seconds; return False, at once, where it was closed."""
        return not self._closed.wait(seconds)

    def fetch_index(self) -> Index:
        """Return what the source serves now."""
        answer = self._connection.get(PREFIX)
        if answer.status != 200:
            raise _as_error(answer, answer.refusal())
        return self._decoded(answer, decode_index, "an index", _MAX_INDEX_BYTES)

    def fetch_stacks(self) -> str:
        """Return where the threads of the source are, in words."""
        answer = self._connection.get(STACKS_PATH)
        if answer.status != 200:
            raise _as_error(answer, answer.refusal())
        return answer.read(_MAX_STACKS_BYTES).decode(errors="replace")

    def fetch_manifest(
        self, *, deadline: float, pause: Callable[[float], bool], on_refused: Callable[[SourceRefusedError], None]
    ) -> Manifest:
        """Return the checked manifest of the step; wait while the source does not serve it yet.

        A source that is flooded with connections may close ours before it has read what we ask: then it is asked again, at most
        four times.

        Args:
            deadline: on the monotonic clock; a source is not made to wait longer.
            pause: waits for some seconds; returns False if the fetch is over.
            on_refused: told each time that the step is not there yet.

        Raises:
            SourceRefusedError: it will not serve it.
            StateFormatError, DigestMismatchError: what it sent is not a manifest.
            SourceLostError, TransferStalledError: the connection failed.
            TransferCancelledError: `pause` returned False.
        """
        step = LATEST if self._step is None else self._step
        pause_s = 0.0
        pauses_s = iter(_UNANSWERED_PAUSES_S)
        while pause(pause_s):
            asked_at = time.monotonic()
            wait_s = max(min(MAX_WAIT_S, self._options.stall_timeout_s / 2, deadline - asked_at - _MARGIN_S), 0.0)
            try:
                answer = self._connection.get(f"{PREFIX}/{step}/manifest?wait_s={wait_s:.3f}", self._manifest_headers)
            except SourceLostError as error:
                again_s = next(pauses_s, None) if isinstance(error.__cause__, UnansweredError) else None
                if again_s is None:
                    raise
                pause_s = again_s
                continue
            if answer.status == 200:
                return self._read_manifest(answer)
            refusal = answer.refusal()
            refused = _as_error(answer, refusal)
            if (answer.status, refusal.error) not in ((404, "not_yet"), (429, "too_many_requests")):
                raise refused
            on_refused(refused)
            # A source that does not hold the request until there is something to say is not asked all the time.
            pause_s = _PAUSE_S if time.monotonic() - asked_at < max(wait_s / 2, _PAUSE_S) else 0.0
        raise TransferCancelledError(f"fetch from {self.name}: it is over", party="receiver")

    def fetch_digests(self, manifest: Manifest, blocks: Sequence[int], what: str = "digests") -> dict[int, bytes]:
        """Return the digests of blocks, or of their `samples`, or of all of them by `blake3`; at most `MAX_DIGESTS`.

        Of the latter, those of blocks that the source has freed are left out.
        """
        answer = self._get(manifest, f"{what}?blocks={format_runs(blocks)}")
        found = self._decoded(answer, _read_digests, "digests", _MAX_DIGESTS_BYTES + 4096)
        wanted, is_blake3 = set(blocks), what == "blake3"
        num_bytes = BLAKE3_BYTES if is_blake3 else DIGEST_BYTES
        are_those = found.keys() <= wanted if is_blake3 else found.keys() == wanted
        if not are_those or any(len(digest) != num_bytes for digest in found.values()):
            raise StateFormatError(f"source {self.name} sent {len(found)} digests, not those asked for", self.name)
        return found

    def fetch_peers(
        self, manifest: Manifest, received: str, address: str | None
    ) -> tuple[dict[SourceAddress, int], int]:
        """Tell what this receiver holds and where it serves it; return who else holds what, and what was sent to anybody.

        Blocks are bit sets.
        """
        headers = {RECEIVED_HEADER: received} if received else {}
        if address is not None:
            headers[ADDRESS_HEADER] = address
        peers = self._decoded(self._get(manifest, "peers", headers), decode_peers, "peers", _MAX_PEERS_BYTES)
        if len(peers.peers) > MAX_PEERS:
            raise StateFormatError(f"source {self.name} named {len(peers.peers)} peers", self.name)
        num_blocks = count_blocks(manifest.total_bytes, manifest.block_bytes)
        try:
            held_by = {parse_metadata(peer.address): parse_mask(peer.held, num_blocks) for peer in peers.peers}
            return held_by, parse_mask(peers.sent, num_blocks)
        except (SourceLostError, ValueError) as error:
            raise StateFormatError(f"source {self.name} sent peers that cannot be read: {error}", self.name) from error

    def open_blocks(self, manifest: Manifest, run: range, received: str = "") -> Iterator[tuple[int, Answer]]:
        """Ask for a run of blocks; yield each with the answer at its beginning. The caller reads block and digest."""
        headers = {RECEIVED_HEADER: received} if received else {}
        answer = self._get(manifest, f"blocks/{run.start}-{run.stop - 1}", headers)
        stop = min(run.stop * manifest.block_bytes, manifest.total_bytes)
        num_bytes = stop - run.start * manifest.block_bytes
        self._check_follows(answer, manifest, num_bytes, len(run), f"blocks {run.start} to {run.stop - 1}")
        return ((block, answer) for block in run)

    def open_parts(self, manifest: Manifest, parts: Sequence[BoxRequest], num_bytes: int, received: str = "") -> Answer:
        """Ask for parts of `num_bytes` in all; the caller reads each part and its digest from the answer, in order."""
        answer = self._post(manifest, "parts", parts, received)
        self._check_follows(answer, manifest, num_bytes, len(parts), f"{len(parts)} parts")
        return answer

    def _check_follows(self, answer: Answer, manifest: Manifest, num_bytes: int, num_digests: int, what: str) -> None:
        expected = num_bytes + DIGEST_BYTES * num_digests
        if answer.length != expected or answer.header("ETag") != f'"{manifest.snapshot}"':
            raise StateFormatError(
                f"source {self.name} answered {what} with {answer.length} bytes of "
                f'{answer.header("ETag")[:70]}, {expected} of "{manifest.snapshot}" were asked for',
                party=self.name,
            )

    def fetch_part_digests(self, manifest: Manifest, parts: Sequence[BoxRequest]) -> list[bytes]:
        """Return the BLAKE3 digests of parts."""
        answer = self._post(manifest, "parts/digests", parts, "")
        digests = self._decoded(answer, _read_part_digests, "digests", _MAX_DIGESTS_BYTES)
        if len(digests) != len(parts) or any(len(digest) != BLAKE3_BYTES for digest in digests):
            raise StateFormatError(f"source {self.name} sent {len(digests)} digests for {len(parts)} parts", self.name)
        return digests

    def _post(self, manifest: Manifest, what: str, parts: Sequence[BoxRequest], received: str) -> Answer:
        headers = {RECEIVED_HEADER: received} if received else {}
        return self._get(manifest, what, headers, body=msgspec.json.encode(PartsRequest(parts=list(parts))))

    def tell_done(self, manifest: Manifest) -> None:
        """Say that this receiver needs nothing more. That may fail: the source finds out by itself, as we are silent."""
        self._connection.set_stall_timeout(min(DONE_TIMEOUT_S, self._options.stall_timeout_s))
        path = self._path(manifest, "done")
        try:
            self._connection.get(path, {"If-Match": f'"{manifest.snapshot}"'}, method="POST").read(0)
        except CheckpointError as error:
            logger.info("could not tell %s that nothing more of step %d is needed: %s", self.name, manifest.step, error)

    def _get(
        self, manifest: Manifest, what: str, headers: dict[str, str] | None = None, *, body: bytes | None = None
    ) -> Answer:
        headers = {"If-Match": f'"{manifest.snapshot}"', **(headers or {})}
        for attempt in range(_MAX_ATTEMPTS):
            answer = self._connection.get(
                self._path(manifest, what), headers, method="GET" if body is None else "POST", body=body
            )
            if answer.status == 200:
                return answer
            refusal = answer.refusal()
            is_last = attempt == _MAX_ATTEMPTS - 1
            if (answer.status, refusal.error) != (429, "too_many_requests") or is_last or self._closed.wait(_BUSY_S):
                break
        raise _as_error(answer, refusal)

    def _decoded(self, answer: Answer, decode: Callable[[bytes], _T], what: str, max_bytes: int) -> _T:
        body = answer.read(max_bytes)
        try:
            return decode(body)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StateFormatError(f"source {self.name} sent {what} that cannot be read: {error}", self.name) from error

    def _path(self, manifest: Manifest, what: str) -> str:
        return f"{PREFIX}/{manifest.step}/{what}"

    def _read_manifest(self, answer: Answer) -> Manifest:
        max_bytes = self._options.max_manifest_bytes
        if (answer.length or 0) > max_bytes:
            raise StateFormatError(
                f"the manifest from {self.name} has {answer.length} bytes, the limit is {max_bytes}: put large values that are "
                "no tensors into tensors, or give all groups a larger HTTPTransport(max_manifest_bytes=...)",
                self.name,
            )
        body = _inflated(answer.read(max_bytes), answer.header("Content-Encoding"), self.name, max_bytes)
        announced = answer.header(DIGEST_HEADER)
        if xxhash.xxh3_128_hexdigest(body) != announced:
            raise DigestMismatchError(
                f"the manifest from {self.name} does not have the digest {announced[:40]!r} that came with it",
                self.name,
            )
        manifest = decode_manifest(body, max_total_bytes=self._options.max_total_bytes)
        match = _SHARE.match(answer.header(SHARE_HEADER))
        if match is not None and int(match[1]) < int(match[2]):
            self.share = (int(match[1]), int(match[2]))
        if self._step is not None and manifest.step != self._step:
            raise SourceRefusedError(
                f"source {self.name} answered a request for step {self._step} with step {manifest.step}", self.name
            )
        return manifest


def _read_digests(body: bytes) -> dict[int, bytes]:
    return {int(block): bytes.fromhex(digest) for block, digest in decode_digests(body).items()}


def _read_part_digests(body: bytes) -> list[bytes]:
    return [bytes.fromhex(digest) for digest in decode_part_digests(body)]


def _inflated(body: bytes, encoding: str, party: str, max_bytes: int) -> bytes:
    """Undo the encoding of a body; never make more than `max_bytes` of it."""
    if encoding != "deflate":
        return body
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(body, max_bytes)
    except zlib.error as error:
        raise StateFormatError(f"the manifest from {party} cannot be inflated: {error}", party) from error
    if not inflater.eof:
        raise StateFormatError(f"the manifest from {party} is cut, or has more than {max_bytes} bytes", party)
    return plain


def _as_error(answer: Answer, refusal: Refusal) -> SourceRefusedError:
    refused = answer.refused(refusal)
    return LeaseRevokedError(str(refused), refused.party) if refusal.error == "revoked" else refused
