"""Makes sure that all groups issue the same collective before one starts; the rule is in `core.coordination.sequence`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions

from torchft_ckpt.core.coordination.sequence import Clearance, KnownSequences
from torchft_ckpt.errors import CollectiveFailedError, CollectivesDifferError

if TYPE_CHECKING:
    from torchft_ckpt.manager.collectives import Way
    from torchft_ckpt.process_group import ProcessGroup

_DIGEST_CHARS = 16
_HEX = re.compile(rb"[0-9a-f]*")
_HEADER_BYTES = 192
"""Members compare the digest, then the name of the group and the collective in words, as UTF-8, filled up with zeros."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective of the step."""

    index: int
    digest: str
    what: str
    clearance: Clearance


class Clearing:
    """Which collectives this rank has issued in the step, and whether they may start. Any thread may call it.

    Args:
        process_group: where members compare.
        name: of this replica group, for the other groups' messages.
        ask: asks the lighthouse whether a collective may start, and blocks until it may; raises if the step fails.
    """

    def __init__(self, process_group: ProcessGroup, *, name: str, ask: Callable[[Issued, timedelta], None]) -> None:
        self._process_group = process_group
        self._name = name
        self._ask = ask
        self._lock = threading.Lock()
        self._sequences = KnownSequences()
        self._issued: list[Issued] = []

    def begin_step(self, *, is_new_quorum: bool) -> None:
        """A step begins. In a new quorum nothing is known of what its members have in common."""
        with self._lock:
            self._issued.clear()
            self._sequences.begin_step()
            if is_new_quorum:
                self._sequences.forget()

    def vote(self) -> tuple[str, int]:
        """The step is voted on: return a word for its collectives in their order, and how many they are."""
        with self._lock:
            self._sequences.voted()
            return self._sequences.digest, self._sequences.count

    def decided(self, *, committed: bool) -> None:
        """The step is over; if it counts, what was issued in it is known to all members from now on."""
        with self._lock:
            self._sequences.decided(committed=committed)

    @property
    def count(self) -> int:
        return self._sequences.count

    def issued(self, index: int) -> Issued | None:
        """Return a collective of the step, counted from 0; None where the step has not so many."""
        with self._lock:
            return self._issued[index] if index < len(self._issued) else None

    def issue(
        self, tensor: torch.Tensor, op: ReduceOp | ReduceOp.RedOpType, divisor: int | None, way: Way | None
    ) -> Issued:
        kind = "average" if divisor is not None else getattr(op, "name", None) or op.op.name  # type: ignore[union-attr]
        how = f" in {way.name}" if way is not None else ""
        what = f"{str(kind).lower()} of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{how}"
        with self._lock:
            clearance = self._sequences.issue(what)
            issued = Issued(self._sequences.count - 1, self._sequences.digest, what, clearance)
            self._issued.append(issued)
        return issued

    def clear(self, issued: Issued, device: torch.device, timeout: timedelta) -> None:
        """Return when the collective may start. Blocks until the other groups have come to it.

        Raises:
            CollectivesDifferError: another group issues another one.
            CollectiveFailedError: what came of the comparison is none: the process group was aborted.
            ProcessGroupError: the others could not be asked.
        """
        if issued.clearance is Clearance.ASK:
            self._ask(issued, timeout)
        elif issued.clearance is Clearance.COMPARE:
            self._compare(issued, device, timeout)

    def _compare(self, issued: Issued, device: torch.device, timeout: timedelta) -> None:
        text = f"{issued.digest}{self._name}\n{issued.what}".encode()[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        theirs = [torch.empty_like(mine) for _ in range(self._process_group.size())]
        options = AllgatherOptions()
        options.timeout = timeout
        self._process_group.allgather([theirs], [mine], options).wait()
        headers = [bytes(header.cpu().numpy()) for header in theirs]
        other = next((header for header in headers if header[:_DIGEST_CHARS] != text[:_DIGEST_CHARS]), None)
        if other is not None:
            if not _HEX.fullmatch(other[:_DIGEST_CHARS]):
                raise CollectiveFailedError(
                    f"collective {issued.index + 1} of the step could not be compared: the group was aborted"
                )
            name, what = _words(other)
            raise CollectivesDifferError(
                f"collective {issued.index + 1} of the step is an {issued.what} in {self._name}, and an {what} in {name}:"
                " the loops of the groups differ",
                party=name,
            )


def _words(header: bytes) -> tuple[str, str]:
    text = header[_DIGEST_CHARS:].rstrip(b"\0").decode(errors="replace")
    name, _, what = "".join(c if c.isprintable() else "\n" for c in text).partition("\n")
    return name, what
