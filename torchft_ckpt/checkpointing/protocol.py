"""The HTTP surface between a source and a receiver: paths, headers and refusals.

| request                                                   | answer                                                        |
|-----------------------------------------------------------|---------------------------------------------------------------|
| `GET /v1/checkpoint`                                      | `Index`: what is served now                                   |
| `GET /v1/checkpoint/proof?nonce=HEX`                      | 64 hex digits, which prove that it is the source of a         |
|                                                           | manifest (`proof_of`); to everybody, without a token          |
| `GET /v1/checkpoint/{step}/manifest?wait_s=N`             | the manifest; held up to N s while the step is not served yet |
| `GET /v1/checkpoint/latest/manifest?wait_s=N`             | that of the newest step; where none is served, or it was left |
|                                                           | long ago, the owner is asked to serve one when it next can    |
| `GET /v1/checkpoint/{step}/blocks/{first}-{last}`         | each block followed by its 16-byte digest                     |
| `GET /v1/checkpoint/{step}/digests?blocks=0-3,7`          | `{"0": "hex digest", ...}`                                    |
| `GET /v1/checkpoint/{step}/blake3?blocks=0-3,7`           | likewise, of BLAKE3: 64 hex digits each; by the source alone. |
|                                                           | Blocks that are there no longer are left out                  |
| `GET /v1/checkpoint/{step}/samples?blocks=0-3,7`          | likewise, of a few bytes of each block (`blocks.sample_range`) |
| `POST /v1/checkpoint/{step}/parts`                        | boxes of tensors, asked for by a `PartsRequest`: the elements  |
|                                                           | of each in C order, followed by its digest                    |
| `POST /v1/checkpoint/{step}/parts/digests`                | `["hex digest", ...]`, BLAKE3 of the same elements alone: to   |
|                                                           | compare with them what another source sent, or a lost one; of |
|                                                           | `MAX_DIGESTED_BYTES` at most, 416 beyond                      |
| `GET /v1/checkpoint/{step}/peers`                         | `Peers`: who else receives this snapshot, and holds what      |
| `POST /v1/checkpoint/{step}/done`                         | 204; the receiver has everything, or has given up             |
| `GET /v1/stacks`                                          | where the Python threads of the process are, in words         |

| header                   | sent with          | meaning                                                             |
|--------------------------|--------------------|---------------------------------------------------------------------|
| `ETag`                   | an answer          | names the snapshot                                                  |
| `If-Match`               | a request          | asks for that snapshot; 412 if it is gone                           |
| `X-Ckpt-Receiver`        | a request          | identifies a receiver over its connections                          |
| `X-Ckpt-Received: 0-3,7` | a request          | the blocks that the receiver holds, verified: the source may free   |
|                          |                    | them, and name the receiver to others. A receiver of parts also     |
|                          |                    | lists the blocks of which it needs nothing                          |
| `X-Ckpt-Address`         | a request          | where the receiver serves those blocks, under the id of the         |
|                          |                    | snapshot that it has them of                                        |
| `X-Ckpt-Group: 4`        | manifest's request | four ranks of the receiver's group come for this snapshot           |
| `X-Ckpt-Share: 2/8`      | a manifest         | the part of the blocks that a receiver, one of several, should ask  |
|                          |                    | for first                                                           |
| `X-Ckpt-Digest`          | a manifest         | its xxh3_128 in hex, taken before it was compressed. It is          |
|                          |                    | compressed if the request has `Accept-Encoding: deflate`            |

A refusal has a JSON body `{error, message, serving_step}`:

| status | error               | may the receiver try again?                                    |
|--------|---------------------|----------------------------------------------------------------|
| 400    | `https_only`        | with https                                                     |
| 400    | `lost`              | yes: the connection ended before the request was looked at     |
| 401    | `unauthorized`      | no: other token                                                |
| 403    | `certificate`       | with a certificate of the job's authority                      |
| 404    | `not_yet`           | yes, at once: the step may be served later                     |
| 404    | `not_found`         | no: no such path                                               |
| 409    | `over`              | no: the source has gone on to a later step                     |
| 409    | `cannot`            | no: its state of this step cannot be sent, and why             |
| 410    | `gone`              | not this snapshot: parts of it have been freed                 |
| 410    | `changed`           | not this snapshot: a tensor was written to without the lock    |
| 410    | `revoked`           | not this snapshot: it was too slow for the source's memory     |
| 412    | `other_snapshot`    | from the manifest on: the step is served from another snapshot |
| 413    | `too_large`         | no: the body is longer than a request may have; 431: the head  |
| 416    | `bad_range`         | no: bytes or blocks that do not exist                          |
| 429    | `too_many_requests` | yes, a moment later: the client asked too often                |

A peer's advertised address is `http://host:port` or `https://host:port`, and nothing else; `network` chooses it. A source's
manifest names further hosts. A server there proves that it is the source before it is told anything: by an HMAC (RFC 2104) of a
nonce of the receiver's and of the address that it was reached at, with a key that the manifest told the receiver. So another
machine that has the address in another network does not pass, nor does one that asks the source for its proof, which then is of
another address.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import msgspec

from torchft_ckpt.checkpointing.state.format import Count
from torchft_ckpt.errors import SourceLostError
from torchft_ckpt.network import join_host_port

_METADATA = re.compile(r"\A(https?)://(\[[0-9A-Fa-f:.%]{2,60}\]|[0-9A-Za-z._-]{1,253}):([0-9]{1,5})/?\Z")
Scheme = Literal["http", "https"]


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """The place where a source listens, and whether it speaks TLS there: its own address, or a further one."""

    host: str
    port: int
    scheme: Scheme = "http"
    known_by: str = ""
    """Of a further address: the host of the source's own, which has the same port."""
    key: str = ""
    """By it the source proves at a further address that it is the source."""

    @property
    def source(self) -> SourceAddress:
        """The source's own address."""
        return SourceAddress(self.known_by, self.port, self.scheme) if self.known_by else self

    def further(self, host: str, key: str) -> SourceAddress:
        """Return a further address of a source, given its own."""
        return replace(self, host=host, known_by=self.host, key=key)

    def __str__(self) -> str:
        return f"{self.scheme}://{join_host_port(self.host, self.port)}"


def proof_of(key: str, nonce: str, host: str, port: int) -> str:
    """Return in hex what a source that was reached at an address answers to a nonce."""
    return hmac.new(key.encode(), f"{nonce} {join_host_port(host, port)}".encode(), "sha256").hexdigest()


def parse_metadata(metadata: str) -> SourceAddress:
    """Read a peer's metadata: `http://host:port` or `https://host:port`, and nothing else.

    Raises:
        SourceLostError: it is anything else; nobody was contacted.
    """
    match = _METADATA.match(metadata)
    if match is None or not 0 < int(match[3]) < 65536:
        raise SourceLostError(
            f"metadata {metadata[:120]!r} of the source is neither http://HOST:PORT nor https://HOST:PORT; "
            "nobody was contacted",
            party=metadata[:120],
        )
    return SourceAddress(match[2].strip("[]"), int(match[3]), "https" if match[1] == "https" else "http")


_T = TypeVar("_T")
PREFIX = "/v1/checkpoint"
LATEST = "latest"
PROOF_PATH = f"{PREFIX}/proof"
STACKS_PATH = "/v1/stacks"
NONCE_DIGITS = 32
PROOF_DIGITS = 64
RECEIVER_HEADER = "X-Ckpt-Receiver"
RECEIVED_HEADER = "X-Ckpt-Received"
DIGEST_HEADER = "X-Ckpt-Digest"
ADDRESS_HEADER = "X-Ckpt-Address"
SHARE_HEADER = "X-Ckpt-Share"
GROUP_HEADER = "X-Ckpt-Group"
MAX_WAIT_S = 10.0
MAX_REFUSAL_BYTES = 64 * 1024
MAX_DIGESTS = 4096
MAX_PEERS = 16
MAX_PARTS = 128
MAX_DIGESTED_BYTES = 64 * 1024 * 1024
"""Of the parts of one request for digests, each counted as often as it is asked for."""
MAX_BODY_BYTES = 32 * 1024
"""Of a request; only a `PartsRequest` has one."""
MAX_ACKNOWLEDGED_RUNS = 256


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of every answer that is not the thing asked for."""

    error: str
    message: str
    serving_step: int | None = None


class SnapshotEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One state that is served now; lengths in bytes. `phase` is live, detaching, detached or relay.

    One that is not fresh is kept for those who receive it, while its owner went on long ago: it is nobody's newest.
    """

    step: int
    snapshot: str
    total_bytes: int
    num_tensors: int
    num_blocks: int
    phase: str
    num_receivers: int
    is_fresh: bool = True


class BoxRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box that is asked for: of which tensor and which of its chunks, by their places in the manifest.

    The box has global coordinates, lies within the chunk and is not empty. `seed` is the digest's: a number that the receiver
    gave it, so that a part that arrives in another's place does not verify.
    """

    tensor: Count
    chunk: Count
    seed: Count
    offsets: list[Count]
    sizes: list[Count]


class PartsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request for parts, as JSON. No more parts than `MAX_PARTS`, and no more bytes than `MAX_BODY_BYTES`."""

    parts: Annotated[list[BoxRequest], msgspec.Meta(min_length=1, max_length=MAX_PARTS)]


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The states that a server serves now, newest first. `newest_step` is the newest that it ever served."""

    format: str
    version: int
    newest_step: int | None
    snapshots: list[SnapshotEntry]


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver of a snapshot: where it serves, and the blocks that it holds as `0-3,7`."""

    address: str
    held: str


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """The other receivers of a snapshot, and the blocks that the source has sent to anybody or is sending."""

    peers: list[Peer]
    sent: str


def _decoder_of(kind: type[_T]) -> Callable[[bytes], _T]:
    """Return what decodes JSON from a peer; all that is wrong with it is a `msgspec.MsgspecError` or `UnicodeDecodeError`."""
    decode = msgspec.json.Decoder(kind).decode

    def decoded(data: bytes) -> _T:
        try:
            return decode(data)
        except RecursionError as error:
            raise msgspec.DecodeError("it is nested too deeply") from error

    return decoded


# Made here, on one thread: see `format`.
decode_refusal = _decoder_of(Refusal)
decode_parts_request = _decoder_of(PartsRequest)
decode_index = _decoder_of(Index)
decode_peers = _decoder_of(Peers)
decode_digests = _decoder_of(dict[str, str])
decode_part_digests = _decoder_of(list[str])
