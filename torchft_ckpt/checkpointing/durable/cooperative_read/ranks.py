"""What the ranks of a group say to each other while they read a checkpoint: all of them say something, and all hear all of it.

So each knows the same, and works out alone what all do (`lookup`, `shared_read`). Words go the way of the group's votes. A rank
that dies ends the group, and with it whoever waits for a word.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch

from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.config import TOKEN, resolve
from torchft_ckpt.core.services.proofs import is_proof, key_for, proof
from torchft_ckpt.errors import CheckpointDamagedError, SourceLostError, SourceRefusedError

MAX_WORD_BYTES = 256 * 1024 * 1024
_MAX_REASON = 2000
_Said = TypeVar("_Said", bound=msgspec.Struct)


class _Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    about: str
    data: bytes = b""
    """JSON, compressed (RFC 1950)."""
    damage: str = ""
    """The bytes that are not as they were written."""
    failure: str = ""
    """It does not go on, for a reason that is not the checkpoint's."""


class _Done(msgspec.Struct, frozen=True):
    """Something is done."""


_decode_done = msgspec.json.Decoder(_Done).decode
_decode = msgspec.json.Decoder(_Word).decode


@dataclass(slots=True, kw_only=True)
class Ranks:
    """The ranks of a group, as one of them sees them; without arguments it is alone."""

    rank: int = 0
    num_ranks: int = 1
    exchange: Callable[[str], list[str]] = lambda text: [text]
    """Tells all of them something, and returns what all have said, in their order; empty texts where one does not go on."""
    say_why_not: Callable[[str, bool], object] = lambda text, waits: None
    """Tells them why this rank does not go on; waits until they have heard, if it is to."""
    transport: HTTPTransport[Any] | None = None
    """Serves what this rank has read to the others; None: each reads by itself."""
    is_known: bool = False
    """That one does not go on all have heard."""

    @classmethod
    def of_torch_distributed(cls) -> Ranks:
        """Return the ranks of the job of torch.distributed that this process is in; alone where it is in none."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return cls()
        num_ranks = torch.distributed.get_world_size()
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"

        def gathered(mine: torch.Tensor) -> list[torch.Tensor]:
            of_all = [torch.zeros_like(mine, device=device) for _ in range(num_ranks)]
            torch.distributed.all_gather(of_all, mine.to(device))
            return [of_one.cpu() for of_one in of_all]

        def exchange(text: str) -> list[str]:
            said = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            lengths = [int(length) for length in gathered(torch.tensor([len(said)], device=device))]
            if (longest := max(lengths)) > MAX_WORD_BYTES:
                raise SourceLostError(f"a rank says {longest} bytes at once, more than {MAX_WORD_BYTES}", "ranks")
            texts = gathered(torch.nn.functional.pad(said, (0, longest - len(said))))
            return [bytes(told[:length].numpy()).decode() for told, length in zip(texts, lengths, strict=True)]

        return cls(
            rank=torch.distributed.get_rank(),
            num_ranks=num_ranks,
            exchange=exchange,
            say_why_not=lambda text, waits: exchange(text),
        )

    def say_done(self, about: str) -> None:
        """Say that something is done here, and wait until all ranks have said so. Raises: as `say`."""
        self.say(about, _Done(), _decode_done)

    def say(self, about: str, message: _Said, decode: Callable[[bytes], _Said]) -> list[_Said]:
        """Say something, and return what all ranks say about it, in their order; `decode` reads that from JSON.

        Raises:
            CheckpointDamagedError: a rank has found damage; all of them raise that.
            SourceLostError: a rank does not go on.
        """
        self.is_known = True  # also where the words do not come
        data = zlib.compress(msgspec.json.encode(message), 1)
        words = [_decode(text) if text else None for text in self.exchange(_text_of(_Word(about, data)))]
        for rank, word in enumerate(words):
            if word is not None and word.damage:
                raise CheckpointDamagedError(f"as rank {rank} of this group has found: {word.damage}", f"rank {rank}")
            if word is not None and (word.failure or word.about != about):
                why = word.failure or f"it speaks of {word.about[:80]!r}, and not of {about[:80]!r}"
                raise SourceLostError(f"rank {rank} of this group does not go on: {why}", f"rank {rank}")
        self.is_known = False
        return [decode(_unpacked(word.data)) for word in words if word is not None]

    @contextmanager
    def all_go_on(self) -> Iterator[None]:
        """What is raised within it, on this rank, the others raise where they wait for a word; they have heard of damage then."""
        self.is_known = False
        try:
            yield
        except BaseException as error:
            if not self.is_known:
                self.is_known = True
                is_damage = isinstance(error, CheckpointDamagedError)
                reason = str(error) if is_damage else f"{type(error).__name__}: {error}"
                reason = reason[:_MAX_REASON].encode(errors="replace").decode()  # names of files may be no UTF-8
                word = _Word("", damage=reason) if is_damage else _Word("", failure=reason)
                self.say_why_not(_text_of(word), is_damage)
            raise


def _text_of(word: _Word) -> str:
    return msgspec.json.encode(word).decode()


def _unpacked(data: bytes) -> bytes:
    inflate = zlib.decompressobj()
    unpacked = inflate.decompress(data, MAX_WORD_BYTES)
    if inflate.unconsumed_tail:
        raise SourceLostError(f"a rank of this group says more than {MAX_WORD_BYTES} bytes at once", "ranks")
    return unpacked


def _default_store() -> torch.distributed.Store | None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


_num_runs = 0


def name_of_run() -> str:
    """Return a name for this run that all ranks of torch.distributed's default group share; each call gives another one.

    Raises:
        SourceRefusedError: there is a token, and the name in the store is of somebody who does not know it.
        SourceLostError: the store is gone.
    """
    global _num_runs
    store = _default_store()
    if store is None:
        return f"run-{secrets.token_hex(6)}"
    _num_runs += 1
    proposal = f"run-{int(time.time()):x}-{secrets.token_hex(4)}"
    return _settle(store, f"torchft_ckpt/run/{_num_runs}", proposal, resolve(None, TOKEN, "", str))


def _settle(store: torch.distributed.Store, key: str, proposal: str, token: str) -> str:
    """Propose something small; return what the first who proposed something under that key did, the same for all.

    Raises: as `name_of_run`.
    """
    proof_key = key_for(token, "run") if token else b""

    def proved(value: str) -> str:
        return proof(proof_key, key, value) if token else ""

    try:
        settled = store.compare_set(key, "", proved(proposal) + proposal).decode(errors="replace")
    except torch.distributed.DistError as error:
        raise SourceLostError(f"the store of torch.distributed cannot be reached any more: {error}", "store") from error
    claimed, value = settled[: len(proved(""))], settled[len(proved("")) :]
    if token and not is_proof(claimed, proof_key, key, value):
        raise SourceRefusedError(
            f"what is settled about {key} is not believed: it was not put into the store by who knows our token",
            "store",
        )
    return value
