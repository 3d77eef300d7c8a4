"""Members of a cold start as threads: each has storages, a transport and a connection to the store of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.durable.cooperative_read.cold_start import Attempt, ColdStart, MeetingPlace
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import SourceLostError

PATIENCE = timedelta(seconds=20)


class KilledError(BaseException):
    """The process was killed here."""


class Member:
    """One member."""

    def __init__(
        self,
        job: Job,
        number: int,
        storages: Sequence[Storage],
        *,
        transport_token: str | None = None,
        start: str = "read",
        run: str = "run",
        **options: Any,
    ) -> None:
        self.number = number
        self.storages = storages
        self.transport: HTTPTransport[Any] = HTTPTransport(
            hostname="127.0.0.1", block_bytes=64 * 1024, token=transport_token
        )
        self.store = TCPStore("127.0.0.1", job.store.port, is_master=False, wait_for_workers=False)
        place = MeetingPlace(
            store=PrefixStore(start, self.store),
            run=run,
            member=number,
            num_members=job.num_members,
            transport=self.transport,
        )
        self.cold_start = ColdStart(
            storages,
            place=place,
            **{"patience": PATIENCE, "stall_timeout": timedelta(seconds=2), **options},
        )
        self.boxes: dict[str, list[Box]] = {}
        self.got: dict[tuple[str, Box], torch.Tensor] = {}
        self.attempt: Attempt | None = None

    def reads(self, fill: Callable[[Member], object] | None = None) -> None:
        """Take part; `fill`: instead of filling what is wanted here."""
        for reading in self.cold_start.attempts():
            with reading as attempt:
                self.attempt = attempt
                (fill or Member.fills)(self)

    def fills(self) -> None:
        assert self.attempt is not None
        self.attempt.fill(self.wants())

    def wants(self) -> list[Want]:
        for name, tensor in self.reader.tensors.items():
            for box in self.boxes.get(name, [whole(tensor.shape)]):
                self.got[name, box] = torch.full(box.sizes, 77, dtype=tensor.dtype)
        return [Want(name, box, target) for (name, box), target in self.got.items()]

    def dies(self) -> None:
        """As a process does: its sockets close, and it says nothing more."""
        self.transport.shutdown()
        self.cold_start._rendezvous.store = _Closed()  # type: ignore[assignment]

    def is_killed(self, *_: object) -> None:
        self.dies()
        raise KilledError

    def check(self, state: dict[str, Any]) -> None:
        """What it got is what was saved, bit by bit."""
        assert self.got
        for (name, box), target in self.got.items():
            saved = state["model"][name.removeprefix("model.")]
            expected = saved[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(bytes_of(target), bytes_of(expected)), (self.number, name, box)

    @property
    def reader(self) -> CheckpointReader:
        assert self.attempt is not None
        return self.attempt.reader

    @property
    def step(self) -> int:
        return self.reader.checkpoint.name.step

    @property
    def num_read(self) -> int:
        return self.cold_start.bytes_from_storage

    @property
    def num_members(self) -> int:
        """Who read together at last."""
        assert self.attempt is not None
        return self.attempt.shared.num_members if self.attempt.shared is not None else 1


class _Closed:
    """A store to which the connection is closed."""

    def put(self, key: str, data: bytes) -> None:
        raise SourceLostError("closed", "store")

    def get(self, key: str, timeout_s: float) -> bytes | None:
        raise SourceLostError("closed", "store")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Job:
    """Members that meet."""

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.members: list[Member] = []

    def starts(self, storages_of: Callable[[int], Sequence[Storage]], **options: Any) -> list[Member]:
        self.members = [Member(self, number, storages_of(number), **options) for number in range(self.num_members)]
        return self.members

    def reads(self, *members: Member) -> None:
        self.do(lambda member: member.reads(), *members)

    def do(self, act: Callable[[Member], object], *members: Member) -> list[object]:
        chosen = members or self.members
        with ThreadPoolExecutor(len(chosen)) as pool:
            return [future.result(60) for future in [pool.submit(act, member) for member in chosen]]

    def close(self) -> None:
        for member in self.members:
            member.transport.shutdown()
