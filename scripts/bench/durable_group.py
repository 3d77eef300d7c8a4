"""The benchmark's end of `durable_worker` processes: what all of them do, at the same time, and where they write."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.durable_worker import GROUPS, OURS
from bench.processes import Child, Children, Event
from bench.run import Run
from bench.transport_peer import CommandFailedError

_START_TIMEOUT_S = 180.0
_COMMAND_TIMEOUT_S = 200.0
RELEASE_AFTER_S = 0.2


class Ranks:
    """Ranks 0, 1, ... of one job."""

    def __init__(self, children: list[Child]) -> None:
        self._children = children
        self._num_asked = 1
        for child in children:
            child.wait_for("answer", _START_TIMEOUT_S)
        self.held_bytes: list[int] = []
        self.unique_bytes = 0

    def all(self, do: str, **arguments: Any) -> list[Event]:
        """Have each do the same; return the answers.

        Raises:
            CommandFailedError: one could not.
            ChildEndedError, TimeoutError: there is no answer.
        """
        return self.each([{"do": do, **arguments} for _ in self._children])

    def each(self, commands: Sequence[dict[str, Any]]) -> list[Event]:
        """Give each its own command; return the answers. Raises as `all` does."""
        self._num_asked += 1
        for child, command in zip(self._children, commands, strict=True):
            child.tell(**command)
        answers = [child.wait_for("answer", _COMMAND_TIMEOUT_S, count=self._num_asked) for child in self._children]
        for child, answer in zip(self._children, answers, strict=True):
            if "error" in answer:
                raise CommandFailedError(f"{child.name}: {answer['error']}")
        return answers

    def hold(self, layout: str, *, dim: int = 0, quick: bool, version: int = 0, width: int = 0) -> None:
        """Have each hold its part of the state."""
        answers = self.all("hold", layout=layout, dim=dim, quick=quick, version=version, width=width)
        self.held_bytes = [int(answer["held_bytes"]) for answer in answers]
        self.unique_bytes = int(answers[0]["unique_bytes"])

    def save(self, how: str, location: Path, step: int, *, of_manager: bool = False) -> float:
        """Save; return the seconds until the last rank knew it to be closed. `of_manager`: for `restore`."""
        at = time.monotonic() + RELEASE_AFTER_S
        answers = self.all("save", how=how, location=str(location), step=step, at=at, of_manager=of_manager)
        return max(answer["ended"] for answer in answers) - at

    def load(self, how: str, location: Path, version: int) -> tuple[float, list[Event]]:
        """Load and check; return the seconds until the last rank had it, and the answers.

        Raises:
            CommandFailedError: one has loaded something else: a figure without the right state is none.
        """
        return self._loaded(how, "load", how=how, location=str(location), version=version)

    def restore(self, location: Path, version: int, *, lighthouse: str, job: str) -> tuple[float, list[Event]]:
        """Have all start together, each a group, and check; as `load`."""
        about = {"lighthouse": lighthouse, "job": job, "num_groups": len(self._children)}
        return self._loaded("restore", "restore", location=str(location), version=version, **about)

    def _loaded(self, what: str, do: str, **arguments: Any) -> tuple[float, list[Event]]:
        at = time.monotonic() + RELEASE_AFTER_S + (do == "restore")
        answers = self.all(do, at=at, **arguments)
        for child, answer in zip(self._children, answers, strict=True):
            if answer["wrong"]:
                raise CommandFailedError(f"{child.name}: {what} loaded other bits than were saved: {answer['wrong']}")
        return max(answer["ended"] for answer in answers) - at, answers


@contextmanager
def ranks(run: Run, world_size: int, name: str, *, num_groups: int = 1) -> Iterator[Ranks]:
    """Start the processes of a job, and end them.

    Args:
        run: where logs go.
        world_size: of the process group; of each, where there are several.
        name: of the job, in logs.
        num_groups: more than one: groups that do not communicate at all.
    """
    with Children(run.log_dir) as children, tempfile.TemporaryDirectory(prefix="bench_durable-") as meeting:
        started = [
            children.start(
                "bench.durable_worker",
                {
                    "rank": rank,
                    "world_size": world_size,
                    "init_method": f"file://{meeting}/rendezvous" if num_groups == 1 else "",
                    "replica": replica,
                },
                f"{name}-{replica}-{rank}",
            )
            for replica in range(num_groups)
            for rank in range(world_size)
        ]
        yield Ranks(started)


@contextmanager
def directory() -> Iterator[Path]:
    """Give an empty directory, and remove it."""
    path = Path(tempfile.mkdtemp(prefix="bench_durable-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def place_of(how: str, root: Path, step: int) -> Path:
    """Return what a rank is told as the place of a checkpoint: ours go side by side, each of DCP's has its own."""
    return root / "ours" if how in (OURS, GROUPS) else root / f"dcp-{step}"


def clean(root: Path) -> None:
    """Remove all checkpoints."""
    for path in root.iterdir():
        for entry in path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def sizes_of(root: Path) -> dict[str, int]:
    """Return the length of each file of the only checkpoint that there is."""
    return {path.name: path.stat().st_size for path in root.rglob("*") if path.is_file()}
