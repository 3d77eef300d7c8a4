"""The HTTP surface between a source and a receiver: paths, headers, and what a refusal looks like.

| request                                                   | answer                                                        |
|-----------------------------------------------------------|---------------------------------------------------------------|
| `GET /v1/checkpoint/{step}/manifest?wait_s=N`             | the manifest; held up to N s while the step is not served yet |
| `GET /v1/checkpoint/{step}/blocks/{first}-{last}`         | each block followed by its 16-byte digest                     |
| `GET /v1/checkpoint/{step}/bytes` with `Range`            | the raw byte space; any HTTP client can resume                |
| `GET /v1/checkpoint/{step}/digests?blocks=0-3,7`          | `{"0": "hex digest", ...}`                                    |
| `POST /v1/checkpoint/{step}/done`                         | 204; the receiver has everything                              |

`ETag` names the snapshot; `If-Match` asks for that one (412 where it is gone). `X-Ckpt-Receiver` identifies a receiver over
its connections; `X-Ckpt-Received: 0-3,7` says which blocks it holds, verified, so that the source may free them.
`X-Ckpt-Digest` of a manifest is its xxh3_128 in hex. A refusal has a JSON body `{error, message, serving_step}`:

| status | error            | may the receiver try again?                                    |
|--------|------------------|----------------------------------------------------------------|
| 401    | `unauthorized`   | no: other token                                                |
| 404    | `not_yet`        | yes, at once: the step may be served later                     |
| 404    | `not_found`      | no: no such path                                               |
| 409    | `over`           | no: the source has gone on to a later step                     |
| 410    | `gone`           | not this snapshot: parts of it have been freed                 |
| 412    | `other_snapshot` | from the manifest on: the step is served from another snapshot |
| 416    | `bad_range`      | no: bytes or blocks that do not exist                          |
"""

from __future__ import annotations

import msgspec

PREFIX = "/v1/checkpoint"
RECEIVER_HEADER = "X-Ckpt-Receiver"
RECEIVED_HEADER = "X-Ckpt-Received"
DIGEST_HEADER = "X-Ckpt-Digest"
MAX_WAIT_S = 10.0
MAX_REFUSAL_BYTES = 64 * 1024


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of every answer that is not the thing asked for."""

    error: str
    message: str
    serving_step: int | None = None
