"""The commands about durable checkpoints: `ls` lists them, `verify` reads all of them, `export` makes a safetensors file of
one.

None of them changes a checkpoint. torch is imported when they run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
from typing import TYPE_CHECKING

from torchft_ckpt.cli.options import add_file, count
from torchft_ckpt.core.text import one_line
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, StorageError

if TYPE_CHECKING:
    from torchft_ckpt.cli.checkpoint_content import OpenedCheckpoint, VerifyResult

_MAX_PROBLEMS = 20


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `checkpoints`, which has commands of its own; each sets `run`, which returns the exit status."""
    parser = commands.add_parser("checkpoints", help="list, verify or export durable checkpoints")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    listing = actions.add_parser("ls", help="list the checkpoints of a directory, the newest first")
    _add_location(listing)
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_run_ls, log_level=logging.ERROR)

    verify = actions.add_parser(
        "verify",
        help="read everything and check every digest",
        epilog="Exit status: 0 all is right, 1 something is not, 2 there is no checkpoint or an argument cannot be used.",
    )
    _add_location(verify)
    verify.add_argument("--step", type=count, default=None, help="only the checkpoints of this step (default: all)")
    verify.add_argument(
        "--all", action="store_true", help=f"print all problems (default: {_MAX_PROBLEMS} of a checkpoint)"
    )
    verify.add_argument("--quiet", action="store_true", help="no progress bar; only what is wrong")
    verify.set_defaults(run=_run_verify, log_level=logging.ERROR)

    export = actions.add_parser("export", help="save the newest whole checkpoint as one safetensors file")
    _add_location(export)
    export.add_argument("--step", type=count, default=None, help="the step wanted (default: the newest that is whole)")
    add_file(export)
    export.set_defaults(run=_run_export, log_level=logging.ERROR)


def _add_location(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "location",
        metavar="DIR",
        help="a directory with checkpoints, or of one checkpoint; a path or an fsspec URL",
    )


# ls


def _run_ls(options: argparse.Namespace) -> int:
    from torchft_ckpt.cli.checkpoint_content import describe, find_checkpoints, open_checkpoint, table

    rows = [describe(open_checkpoint(place)) for place in find_checkpoints(options.location)]
    if options.json:
        told = {"location": options.location, "checkpoints": [dataclasses.asdict(row) for row in rows]}
        print(json.dumps(told, indent=2))
    else:
        print(table(rows))
    return 0


# verify


def _run_verify(options: argparse.Namespace) -> int:
    from torchft_ckpt.cli.checkpoint_content import (
        Condition,
        bytes_to_verify,
        find_checkpoints,
        open_checkpoint,
        verify,
    )
    from torchft_ckpt.cli.output import reading_bar

    counts = dict.fromkeys(Condition, 0)
    for place in find_checkpoints(options.location, options.step):
        opened = open_checkpoint(place)
        with contextlib.ExitStack() as stack:
            if not options.quiet:
                stack.enter_context(reading_bar(place.shown, bytes_to_verify(opened), opened.reader))
            result = verify(opened)
        counts[result.condition] += 1
        if result.problems or not options.quiet:
            print("\n".join(_lines_of(opened, result, None if options.all else _MAX_PROBLEMS)), flush=True)
    if not options.quiet and sum(counts.values()) > 1:
        parts = (f"{count} {condition.value}" for condition, count in counts.items() if count)
        print(f"{sum(counts.values())} checkpoints: {', '.join(parts)}")
    return 0 if counts[Condition.RIGHT] == sum(counts.values()) else 1


def _lines_of(opened: OpenedCheckpoint, result: VerifyResult, max_problems: int | None) -> list[str]:
    from torchft_ckpt.cli.output import format_bytes, format_count

    what = ""
    if not result.problems:
        what = f": {format_count(len(opened.reader.tensors), 'tensor')}, {format_bytes(opened.num_bytes)}"
    lines = [one_line(f"{opened.place.shown}: {result.condition.value}{what}")]
    lines += [f"    {one_line(problem)}" for problem in result.problems[:max_problems]]
    more = len(result.problems) - len(result.problems[:max_problems])
    if more:
        lines.append(f"    and {more} more; --all prints them")
    return lines + [f"    ({one_line(note)})" for note in result.notes]


# export


def _run_export(options: argparse.Namespace) -> int:
    from torchft_ckpt.cli.checkpoint_content import content_of, read_in_order, reason_of
    from torchft_ckpt.cli.output import reading_bar
    from torchft_ckpt.cli.safetensors_file import SafetensorsFile

    with SafetensorsFile(options.output, force=options.force) as file:
        opened = _newest_whole(options)
        name, reader = opened.place.name, opened.reader
        try:
            content, left_out = content_of(reader)
            with contextlib.ExitStack() as stack:
                if not options.quiet:
                    stack.enter_context(reading_bar(str(name), opened.num_bytes, reader))
                chunks = read_in_order(reader, content.outlines(), content.tensors)
                num_bytes = file.write(content, name.step, chunks)
        except (CheckpointDamagedError, StorageError) as error:
            raise type(error)(f"{reason_of(error)}; nothing was exported", str(name)) from error
    for reason in left_out:
        print(one_line(f"left out: {reason}"), file=sys.stderr)
    content.tell(options.output, str(name), num_bytes, quiet=options.quiet)
    return 0


def _newest_whole(options: argparse.Namespace) -> OpenedCheckpoint:
    from torchft_ckpt.checkpointing.state.local_state import some_of
    from torchft_ckpt.cli.checkpoint_content import find_checkpoints, open_checkpoint

    skipped: list[str] = []
    for place in find_checkpoints(options.location, options.step):
        opened = open_checkpoint(place)
        if opened.why_not_whole is None:
            for reason in skipped:
                print(one_line(f"skipped: {reason}"), file=sys.stderr)
            return opened
        skipped.append(f"{place.shown} is not whole: {opened.why_not_whole}")
    raise CheckpointNotFoundError(
        f"{options.location}: there is no whole checkpoint: {some_of(skipped)}", options.location
    )
