"""The command `replay`: the steps of a job of `StepLoader` once more, in one group, from a checkpoint on.

The bits of a step are a function of the step alone. So what the replay's votes show of the state is what the job's have shown, as
far as its log has that, or a host has computed something else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torchft_ckpt import config
from torchft_ckpt.cli import run
from torchft_ckpt.cli.options import count
from torchft_ckpt.errors import CheckpointNotFoundError, ConfigError

_LINE = re.compile(r"(?:\[g(\d+)/r(\d+)\] )?.*\bstep=(\d+) quorum=\d+ .* verdict=commit .* state=([0-9a-f.]+)\s*$")
_NUM_CHARS = 16
"""Of the digest of some samples, which each vote shows; that of a part of the state may follow."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `replay`; it sets `run`, which returns the exit status."""
    replay = commands.add_parser(
        "replay",
        help="make steps of a job of StepLoader once more, in one group",
        usage="%(prog)s --step N [options] DIR SCRIPT [arguments]",
        description="Runs SCRIPT as one replica group, from the newest whole checkpoint in DIR before step N to the end"
        " of step N. Nothing is saved. Exit status: 0; 1 if the state differs at a step from what LOG says, or LOG says nothing"
        " of these steps; else SCRIPT's.",
    )
    replay.add_argument("location", metavar="DIR", help="a directory with checkpoints; a path or an fsspec URL")
    replay.add_argument("--step", type=count, required=True, metavar="N", help="the last step to make")
    replay.add_argument("--nproc", type=int, default=1, metavar="R", help="ranks of a group (default: %(default)s)")
    replay.add_argument(
        "--log", type=Path, metavar="LOG", help="what the job has said: lines of steps, of `run` or of one group"
    )
    replay.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")
    replay.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    said = {} if options.log is None else _read(options.log)
    location, begins = _find(options.location, options.step)
    print(f"steps {begins} to {options.step} are made once more", flush=True)
    with tempfile.TemporaryDirectory(prefix="torchft_ckpt_replay_") as folder:
        os.environ[config.REPLAY] = json.dumps([location, begins, options.step, folder])
        parser = argparse.ArgumentParser()
        run.add_commands(parser.add_subparsers())
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        how = ["run", "--groups=1", f"--nproc={options.nproc}", "--restarts=0", "--", *command]
        told = parser.parse_args(how)
        status = int(told.run(told))
        made = {
            (int(file.name), int(step)): digest
            for file in Path(folder).iterdir()
            for step, _, digest in (line.partition(" ") for line in file.read_text().splitlines())
        }
    if status:
        return status
    if (last := max((step for _, step in made), default=begins - 1)) < options.step:
        print(f"the script has ended before step {options.step}: the last one that it made is {last}")
        return 1
    lines, is_equal = compare(made, said)
    print("\n".join(lines) if options.log else f"step {options.step} began with state={made[0, options.step]}")
    return 0 if is_equal or options.log is None else 1


def compare(
    made: Mapping[tuple[int, int], str], said: Mapping[tuple[int, int], Mapping[str, str]]
) -> tuple[list[str], bool]:
    """Return in words what differs, and whether all is equal. By rank number and step: what was shown, and by which group.

    What only one side shows is not compared.
    """
    differs, steps = dict[str, str](), set[int]()
    for (rank, step), own in sorted(made.items(), key=lambda item: item[0][1]):
        for group, other in said.get((rank, step), {}).items() if own else ():
            steps.add(step)
            parts = [(own[:_NUM_CHARS], other[:_NUM_CHARS]), (own[_NUM_CHARS:], other[_NUM_CHARS:])]
            if any(one != another for one, another in parts if one and another):
                differs.setdefault(
                    f"{group}, rank {rank}",
                    f"{group}, rank {rank} differs: step {step} began with state={other}, and here with state={own}",
                )
    if not steps:
        return ["the log has no line of a step that was made here, with verdict=commit and state=..."], False
    known = f"compared at {len(steps)} steps, {min(steps)} to {max(steps)}"
    return [*differs.values(), f"{known}: {'these differ' if differs else 'equal'}"], not differs


def _find(location: str, step: int) -> tuple[str, int]:
    """Return the directory, and the step of the newest whole checkpoint in it before a step; or of the one that was named.

    Raises:
        ConfigError, CheckpointNotFoundError: there is none.
    """
    from torchft_ckpt.checkpointing.durable.names import parse_checkpoint
    from torchft_ckpt.cli.checkpoint_content import find_checkpoints, open_checkpoint

    why: list[str] = []
    for place in (places := find_checkpoints(location)):
        if place.name.step < step and (reason := open_checkpoint(place).why_not_whole) is None:
            break
        why += [] if place.name.step >= step else [reason or ""]
    else:
        oldest = f"the oldest checkpoint is of step {places[-1].name.step}, and --step is {step}"
        raise CheckpointNotFoundError(
            f"{location}: {f'no checkpoint before step {step} is whole: {why[0]}' if why else oldest}", location
        )
    where = location if "://" in location else os.path.abspath(location)
    above, _, last = where.rstrip("/").rpartition("/")
    return above if parse_checkpoint(last) else where, place.name.step


def _read(log: Path) -> dict[tuple[int, int], dict[str, str]]:
    """Return what each rank's votes have shown: by rank number and step, for each group that has said it."""
    said: dict[tuple[int, int], dict[str, str]] = {}
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"--log {log} cannot be read: {error.strerror}", "--log") from error
    for line in lines:
        if (found := _LINE.match(line)) is not None:
            group, rank, step, digest = found.groups()
            said.setdefault((int(rank or 0), int(step)), {})[f"group {group or '?'}"] = digest
    return said
