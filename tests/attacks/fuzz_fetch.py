"""A seeded fuzzer of what a receiver takes from others: whole fetches through a wire that lies.

They run against a real source behind a proxy that tells one of `LIES` at each few answers; a third of them have an honest second
source. Right are: the honest state, a named error (`TorchftCkptError`), and what a primary that lies consistently says, in a
manifest with the right digest or in blocks that verify. VULNERABLE are: any other state, an error of another kind, a state that
is overwritten without a word, and what takes too long. Manifests are mutated by `tests/checkpointing/test_fuzz_manifest.py`.

usage: python fuzz_fetch.py [--count N] [--seed S]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import xxhash
from support.resharding import LyingSource, Reply

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.protocol import DIGEST_HEADER
from torchft_ckpt.errors import TorchftCkptError

STEP = 3
SLOW_S = 10.0
"""So long nothing may take, on a busy machine."""
TIMEOUT_S = 4.0
STALL_S = 0.4
MAX_TOTAL_BYTES = 1 << 24
State = dict[Any, Any]
LONG = timedelta(minutes=30)


def state_of(seed: int) -> State:
    """A state of some blocks, with every kind of node."""
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 70, generator=chance)
    return {
        "model": {"weight": weight, "tied": weight, "view": weight[3:9, ::2], "half": torch.randn(9).bfloat16() * 0},
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3000, generator=chance)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "array": np.arange(11, dtype=np.int64),
        "plain": [1, -1.5, None, True, "text", b"bytes", {1, 2}, 2**70, float("inf"), torch.float32, range(3), 1 + 2j],
        (1, "tuple"): {"deep": [[[[seed]]]]},
        "empty": torch.zeros(0),
    }


def zeros_like(state: State) -> State:
    def visit(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        if isinstance(value, np.ndarray):
            return np.zeros_like(value)
        if isinstance(value, dict):
            return {key: visit(item) for key, item in value.items()}
        return [visit(item) for item in value] if isinstance(value, list) else value

    made: State = visit(state)
    made["model"]["tied"] = made["model"]["weight"]
    made["model"]["view"] = made["model"]["weight"][3:9, ::2]
    return made


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal in types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and bool(torch.equal(bits(one), bits(other)))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ------------------------------------------------------------------------------------------------ whole fetches


class Answer:
    """An answer of the honest source, on its way through the proxy."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes, kind: str) -> None:
        self.status, self.headers, self.body, self.kind = status, headers, body, kind
        self.length: int | None = None
        """What is announced, where it is not the body's."""
        self.cut_after: int | None = None
        self.hangs = False
        self.verifies = False
        """Other bytes come with a digest that verifies, as a source sends whose state is another one."""

    def sign(self) -> None:
        """Give a changed manifest the digest that it has."""
        if self.kind == "manifest":
            self.headers.pop("Content-Encoding", None)
            self.headers[DIGEST_HEADER] = xxhash.xxh3_128_hexdigest(self.body)


def flip(chance: random.Random, answer: Answer) -> None:
    body = bytearray(answer.body)
    for _ in range(chance.choice([1, 1, 5])):
        if body:
            body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    answer.body = bytes(body)


def flip_signed(chance: random.Random, answer: Answer) -> None:
    flip(chance, answer)
    answer.sign()


def other_block(chance: random.Random, answer: Answer) -> None:
    """Blocks that verify, in each other's places: their digests have other seeds."""
    half = len(answer.body) // 2
    answer.body = answer.body[half:] + answer.body[:half]


def zeros_that_verify(chance: random.Random, answer: Answer) -> None:
    """Other bytes, each few with the digest of some block."""
    if answer.kind in ("parts", "blocks") and len(answer.body) > 16:
        size = len(answer.body) - 16
        answer.body = bytes(size) + xxhash.xxh3_128_digest(bytes(size), seed=chance.randrange(8))
        answer.verifies = True


def short(chance: random.Random, answer: Answer) -> None:
    answer.body = answer.body[: chance.randrange(len(answer.body) + 1)]


def longer(chance: random.Random, answer: Answer) -> None:
    answer.body += bytes(chance.choice([1, 16, 100_000]))


def length_lie(chance: random.Random, answer: Answer) -> None:
    answer.length = chance.choice([0, len(answer.body) + 7, 2**40, 2**63])


def cut(chance: random.Random, answer: Answer) -> None:
    answer.cut_after = chance.randrange(len(answer.body) + 1)


def hang(chance: random.Random, answer: Answer) -> None:
    cut(chance, answer)
    answer.hangs = True


def refuse(chance: random.Random, answer: Answer) -> None:
    answer.status = chance.choice([400, 401, 403, 404, 409, 410, 412, 429, 500, 503])
    error = chance.choice(["not_yet", "over", "gone", "changed", "too_many_requests", "revoked", "x" * 1000])
    deep = "[" * 30_000 + "]" * 30_000
    answer.body = chance.choice(
        [
            json.dumps({"error": error, "message": "m" * chance.choice([1, 5000])}).encode(),
            b'{"error":"x","message":"y","more":' + deep.encode() + b"}",
            b"<html>\xff\xfe</html>",
            b"",
        ]
    )


def other_headers(chance: random.Random, answer: Answer) -> None:
    name = chance.choice(["ETag", DIGEST_HEADER, "X-Ckpt-Share", "Content-Encoding", "X-Ckpt-Group"])
    answer.headers[name] = chance.choice(["", '"s"', "0" * 32, "deflate", "9/3", "1/999999", "x" * 9000])


def other_step(chance: random.Random, answer: Answer) -> None:
    if answer.kind == "manifest" and "Content-Encoding" not in answer.headers:
        document = json.loads(answer.body)
        document["step"] += chance.choice([-1, 1])
        answer.body = json.dumps(document).encode()
    answer.sign()


def lying_digests(chance: random.Random, answer: Answer) -> None:
    """Digests of other blocks, of blocks that were not asked for, or none."""
    with contextlib.suppress(ValueError):
        document = json.loads(answer.body)
        if answer.kind in ("digests", "samples") and isinstance(document, dict) and "peers" not in document:
            keys, values = list(document), list(document.values())
            chance.shuffle(values)
            document = dict(zip(keys, values, strict=True)) | chance.choice([{}, {"99999": "0" * 32}, {"-1": "zz"}])
            answer.body = json.dumps(document).encode()
        elif isinstance(document, list):
            chance.shuffle(document)
            answer.body = json.dumps(document).encode()


def strange_peers(chance: random.Random, answer: Answer) -> None:
    if answer.kind == "peers":
        held = chance.choice(["0-3", "0-99999999", "-1", "3-0", "0-" + "9" * 5000, "é", ""])
        address = chance.choice(
            ["http://127.0.0.1:1", "http://[::1", "ftp://x", "", "http://127.0.0.1:99999", "\x1b[2J"]
        )
        answer.body = json.dumps({"peers": [{"address": address, "held": held}] * 3, "sent": held}).encode()


def garbage(chance: random.Random, answer: Answer) -> None:
    answer.body = chance.randbytes(len(answer.body))


LIES: dict[str, Callable[[random.Random, Answer], None]] = {
    "bits flipped": flip,
    "bits flipped, right digest": flip_signed,
    "blocks in each other's places": other_block,
    "zeros with a digest that verifies": zeros_that_verify,
    "too short": short,
    "too long": longer,
    "another length announced": length_lie,
    "cut": cut,
    "hangs": hang,
    "refuses": refuse,
    "other headers": other_headers,
    "manifest of another step": other_step,
    "digests of others": lying_digests,
    "strange peers": strange_peers,
    "garbage": garbage,
}


class Liar:
    """Tells lies about some answers of a source."""

    def __init__(self, chance: random.Random, lies: list[str], often: float) -> None:
        self.may_be_consistent = False
        """It told something that a source with another state would have told: who has no other source cannot find out."""
        self._chance, self._lies, self._often = chance, lies, often
        self._lock = threading.Lock()

    def __call__(self, reply: Reply) -> None:
        kind = reply.kind.rpartition("/")[2]
        answer = Answer(reply.status, reply.headers, reply.body, "blocks" if kind[:1].isdigit() else kind)
        with self._lock:
            if self._chance.random() < self._often:
                LIES[self._chance.choice(self._lies)](self._chance, answer)
            if answer.verifies or (kind == "manifest" and answer.body != reply.body):
                self.may_be_consistent = True
        is_as_it_was = answer.cut_after is answer.length is None and len(answer.body) == len(reply.body)
        reply.status, reply.body = answer.status, answer.body
        reply.send(answer.cut_after, announced=answer.length)
        if answer.hangs:
            reply.source.ended.wait(TIMEOUT_S)
        if not is_as_it_was:
            reply.cut()


@contextmanager
def transport() -> Iterator[HTTPTransport[State]]:
    made = HTTPTransport[State](
        hostname="127.0.0.1",
        bind="127.0.0.1",
        token="",
        block_bytes=4096,
        num_chunks=2,
        stall_timeout=timedelta(seconds=STALL_S),
        connect_timeout=timedelta(seconds=2),
        max_total_bytes=MAX_TOTAL_BYTES,
    )
    try:
        yield made
    finally:
        made.shutdown()


def fuzz_fetches(chance: random.Random, count: int, state: State) -> tuple[Counter[str], Counter[str], list[str]]:
    """Fetch through the lying wire; return what came of it alone and beside an honest source, and what is wrong."""
    alone: Counter[str] = Counter()
    beside: Counter[str] = Counter()
    wrong: list[str] = []
    with transport() as source, transport() as receiver:
        source.send_checkpoint([], STEP, state, LONG)
        for number in range(count):
            lies = [chance.choice(list(LIES))] if chance.random() < 0.7 else list(LIES)
            liar = Liar(chance, lies, chance.choice([0.1, 0.4, 1.0]))
            proxy = LyingSource(source.metadata(), liar)
            has_second = number % 3 == 0
            sources = [proxy.url, source.metadata()] if has_second else [proxy.url]
            if chance.random() < 0.5:
                sources.reverse()
            is_sharded, in_place = chance.random() < 0.3, chance.random() < 0.3
            local = zeros_like(state) if is_sharded or in_place or chance.random() < 0.3 else None
            began = time.monotonic()
            name = f"fetch {number} ({lies[0] if len(lies) == 1 else 'all lies'}{', sharded' if is_sharded else ''}"
            name += f"{', in place' if in_place else ''}{', with an honest source' if has_second else ''})"
            limit = timedelta(seconds=TIMEOUT_S)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if is_sharded:
                        groups = [[one] for one in sources]
                        got = receiver.fetch_sharded(groups, 0, 1, STEP, limit, local_state=local, in_place=in_place)
                    else:
                        got = receiver.fetch_checkpoint(sources, STEP, limit, local_state=local, in_place=in_place)
                if same(got, state):
                    outcome = "the state"
                elif liar.may_be_consistent and sources[0] == proxy.url:
                    outcome = "what a consistent liar said"
                else:
                    outcome = "WRONG STATE"
                    wrong.append(f"{name}: a wrong state, and what it was made of was the honest source's")
            except TorchftCkptError as error:
                outcome = "a named error"
                is_torn = in_place and local is not None and not same(local, zeros_like(state))
                if is_torn and not (getattr(error, "state_overwritten", False) and "torn" in str(error)):
                    wrong.append(f"{name}: overwritten, and not said to be torn: {str(error)[:120]}")
            except Exception as error:
                outcome = "UNNAMED"
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
            finally:
                proxy.close()
            took_s = time.monotonic() - began
            if took_s > TIMEOUT_S + SLOW_S:
                wrong.append(f"{name} took {took_s:.1f} s")
            (beside if has_second else alone)[outcome] += 1
    return alone, beside, wrong


# ------------------------------------------------------------------------------------------------------ the run


def run(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Fuzz; return the rows of the table, and what is wrong."""
    alone, beside, wrong = fuzz_fetches(random.Random(seed), count, state_of(seed))

    def row(what: str, found: Counter[str]) -> str:
        told = ", ".join(f"{number} {outcome}" for outcome, number in found.most_common())
        return f"whole fetches | {what} | {found.total()} | {told}"

    rows = [row(f"a wire with {len(LIES)} kinds of lies", alone), row("the same, an honest source beside it", beside)]
    return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="fetches")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("torchft_ckpt").setLevel(logging.CRITICAL)
    began = time.monotonic()
    rows, wrong = run(options.count, options.seed)
    for line in [*(f"  {what}" for what in wrong[:50]), *rows]:
        print(line)
    if wrong:
        print(f"VULNERABLE: {len(wrong)} of what was sent came to a wrong end (seed {options.seed})")
        return 1
    print(f"held: no wrong state, no hang, no unnamed error in {time.monotonic() - began:.0f} s (seed {options.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
