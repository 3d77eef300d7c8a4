"""The benchmark's end of a group of `sharded_worker` processes: what all of its ranks do, at the same time."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench.processes import Child, Children, Event
from bench.run import Run
from bench.sharded_layouts import Layout
from bench.transport_peer import CommandFailedError

_START_TIMEOUT_S = 180.0
_COMMAND_TIMEOUT_S = 150.0
_RELEASE_AFTER_S = 0.1
Shapes = Sequence[tuple[int, int]]


class Rank:
    """One worker process."""

    def __init__(self, children: Children, name: str) -> None:
        self.name = name
        self.addresses: list[str] = []
        self._child: Child = children.start("bench.sharded_worker", {}, name)
        self._num_asked = 1

    def ready(self) -> None:
        """Wait until it listens."""
        self.addresses = [*self._child.wait_for("answer", _START_TIMEOUT_S, count=1)["addresses"]]

    def begin(self, do: str, **arguments: Any) -> None:
        """Give a command and don't wait for its answer; `answer` does."""
        self._num_asked += 1
        self._child.tell(do=do, **arguments)

    def answer(self) -> Event:
        """Wait for the answer to the latest command.

        Raises:
            CommandFailedError: it could not be done.
            ChildEndedError, TimeoutError: there is none.
        """
        answer = self._child.wait_for("answer", _COMMAND_TIMEOUT_S, count=self._num_asked)
        if "error" in answer:
            raise CommandFailedError(f"{self.name}: {answer['error']}")
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a group's receive took in seconds: from its release to the last rank's end, and processor time of both sides."""

    wall_s: float
    receivers_cpu_s: float
    sources_cpu_s: float = 0.0


class Group:
    """Ranks 0, 1, ... of one group; a model of it may be held by the first of them only.

    Args:
        ranks: that are ready.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = list(ranks)

    def first(self, num_ranks: int) -> Group:
        """Return the group of the first ranks of this one."""
        return Group(self._ranks[:num_ranks])

    @property
    def num_ranks(self) -> int:
        """How many ranks it has."""
        return len(self._ranks)

    def addresses(self) -> list[str]:
        """Return where each rank is reached."""
        return [rank.addresses[0] for rank in self._ranks]

    def all_addresses(self, num_parts: int) -> list[str]:
        """Return where each part of each rank is reached, in order."""
        return [address for rank in self._ranks for address in rank.addresses[:num_parts]]

    def drop(self) -> None:
        """Have all ranks forget every model."""
        self._all(do="drop")

    def hold(self, model: str, layout: Layout, shapes: Shapes) -> int:
        """Have all ranks hold a model; return how many bytes they hold of it together."""
        answers = self._each(
            [
                {
                    "do": "hold",
                    "model": model,
                    "mesh": layout.mesh,
                    "placements": layout.placements,
                    "rank": rank,
                    "shapes": shapes,
                }
                for rank in range(len(self._ranks))
            ]
        )
        return sum(int(answer["num_bytes"]) for answer in answers)

    def serve(self, model: str, seed: int, step: int, *, plain_parts: int = 0, num_receivers: int) -> None:
        """Have all ranks give every element another value and serve it; see `Worker.send`."""
        self._all(do="fill", model=model, seed=seed)
        self._all(do="send", model=model, step=step, plain_parts=plain_parts, num_receivers=num_receivers)

    def receive(self, model: str, groups: Sequence[Sequence[str]], step: int, how: str) -> Received:
        """Release all ranks at one time to receive; see `Worker.receive`."""
        at = time.monotonic() + _RELEASE_AFTER_S
        common = {"do": "receive", "model": model, "groups": groups, "world_size": len(self._ranks)}
        answers = self._each(
            [{**common, "rank": rank, "step": step, "at": at, "how": how} for rank in range(len(self._ranks))]
        )
        return Received(
            wall_s=max(answer["ended"] for answer in answers) - at,
            receivers_cpu_s=sum(answer["cpu_s"] for answer in answers),
        )

    def check(self, model: str, seed: int) -> None:
        """Check that every element has the bits of the seed.

        Raises:
            CommandFailedError: one has not; a figure without the right state is none.
        """
        for rank, answer in zip(self._ranks, self._all(do="check", model=model, seed=seed), strict=True):
            if answer["wrong"]:
                raise CommandFailedError(f"{rank.name}: tensors {answer['wrong'][:5]} are not those of the source")

    def cpu_s(self) -> float:
        """Return the processor seconds that the ranks used so far."""
        return float(sum(answer["cpu_s"] for answer in self._all(do="cpu")))

    def _all(self, **command: Any) -> list[Event]:
        return self._each([command for _ in self._ranks])

    def _each(self, commands: Sequence[dict[str, Any]]) -> list[Event]:
        for rank, command in zip(self._ranks, commands, strict=True):
            rank.begin(**command)
        return [rank.answer() for rank in self._ranks]


_pool = ExitStack()
"""Ends the processes that are kept from one figure to the next: starting them takes longer than most figures."""
atexit.register(_pool.close)
_ranks: dict[str, list[Rank]] = {"source": [], "receiver": []}


@contextmanager
def groups(run: Run, num_sources: int, num_receivers: int) -> Iterator[tuple[Group, Group]]:
    """Give a group of sources and one of receivers that hold nothing yet.

    Their processes are started where there are not enough, and kept until the benchmark ends or a figure fails.
    """
    try:
        children = _pool.enter_context(Children(run.log_dir))
        for role, size in (("source", num_sources), ("receiver", num_receivers)):
            started = range(len(_ranks[role]), size)
            _ranks[role] += [Rank(children, f"{role}-{number}") for number in started]
        for rank in (*_ranks["source"], *_ranks["receiver"]):
            rank.ready()
        for role in _ranks:
            Group(_ranks[role]).drop()
        yield Group(_ranks["source"][:num_sources]), Group(_ranks["receiver"][:num_receivers])
    except BaseException:
        for role in _ranks:
            _ranks[role] = []
        _pool.close()
        raise
