"""Ranks of a group that read a checkpoint, as threads: each has storages and a transport of its own, and they hear each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.durable.cooperative_read.lookup import Candidates
from torchft_ckpt.checkpointing.durable.cooperative_read.ranks import Ranks
from torchft_ckpt.checkpointing.durable.cooperative_read.shared_read import SharedRead
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import CheckpointDamagedError

LIMIT_S = 30.0


class Words:
    """Stands for the group's service: when each rank has said something, each hears all of it."""

    def __init__(self, num_ranks: int) -> None:
        self._changed = threading.Condition()
        self._said: dict[int, str] = {}
        self._heard: dict[int, list[str]] = {}
        self._num_ranks = num_ranks

    def exchange(self, rank: int, text: str, *, waits: bool = True) -> list[str]:
        with self._changed:
            self._heard.pop(rank, None)
            self._said[rank] = text
            if len(self._said) == self._num_ranks:
                words = [self._said[other] for other in range(self._num_ranks)]
                fails = [word[1:] if word.startswith("!") else "" for word in words]
                self._heard = dict.fromkeys(self._said, fails if any(fails) else words)
                self._said = {}
                self._changed.notify_all()
            if waits and not self._changed.wait_for(lambda: rank in self._heard, LIMIT_S):
                raise TimeoutError(f"rank {rank} waits in vain for {text[:80]}")
            return self._heard.pop(rank, [])


class Member:
    """One rank."""

    def __init__(
        self, group: Group, rank: int, storages: Sequence[Storage], *, step: int | None = None, token: str | None = None
    ) -> None:
        self.rank = rank
        self.storages = storages
        self.transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", block_bytes=64 * 1024, token=token)
        self.ranks = Ranks(
            rank=rank,
            num_ranks=group.num_ranks,
            exchange=lambda text: group.words.exchange(rank, text),
            say_why_not=lambda text, waits: group.words.exchange(rank, f"!{text}", waits=waits),
            transport=self.transport,
        )
        self.candidates = Candidates(storages, self.ranks, step=step)
        self.boxes: dict[str, list[Box]] = {}
        self.got: dict[tuple[str, Box], torch.Tensor] = {}
        self.num_read = self.bytes_from_peers = 0
        self.reader: CheckpointReader
        self.shared: SharedRead

    def reads(self, fill: Callable[[Member], object] | None = None) -> int:
        """Read the newest that all ranks can read, and return its step; `fill`: instead of filling what is wanted here."""
        with self.ranks.all_go_on():
            while True:
                found = self.candidates.newest()
                self.reader = CheckpointReader(found.checkpoint)
                self.shared = SharedRead(found, self.reader, self.ranks, timeout=timedelta(seconds=LIMIT_S))
                try:
                    with self.ranks.all_go_on():
                        (fill or Member.fills)(self)
                except CheckpointDamagedError as error:
                    self.candidates.leave_out(found.checkpoint, error)
                    continue
                finally:
                    self.num_read += self.reader.bytes_read
                    self.bytes_from_peers += self.shared.bytes_from_peers
                return found.checkpoint.name.step

    def fills(self) -> None:
        self.shared.read(self.wants())

    def wants(self) -> list[Want]:
        self.got = {
            (name, box): torch.full(box.sizes, 77, dtype=tensor.dtype)
            for name, tensor in self.reader.tensors.items()
            for box in self.boxes.get(name, [whole(tensor.shape)])
        }
        return [Want(name, box, target) for (name, box), target in self.got.items()]

    def check(self, state: dict[str, Any]) -> None:
        """What it got is what was saved, bit by bit."""
        assert self.got
        for (name, box), target in self.got.items():
            saved = state["model"][name.removeprefix("model.")]
            expected = saved[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(bytes_of(target), bytes_of(expected)), (self.rank, name, box)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Group:
    """The ranks of a group."""

    def __init__(self, num_ranks: int, storages_of: Callable[[int], Sequence[Storage]], **options: Any) -> None:
        self.num_ranks = num_ranks
        self.words = Words(num_ranks)
        self.members = [Member(self, rank, storages_of(rank), **options) for rank in range(num_ranks)]

    def do(self, act: Callable[[Member], object] = Member.reads) -> list[Any]:
        """Return for each rank what it returns, or what it raises."""

        def run(member: Member) -> object:
            try:
                return act(member)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return [future.result(2 * LIMIT_S) for future in [pool.submit(run, member) for member in self.members]]

    def close(self) -> None:
        for member in self.members:
            member.transport.shutdown()
