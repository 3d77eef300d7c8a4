"""The command line of both scripts."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """See `--help`."""

    tensor_parallel: int
    steps: int
    batch_size: int
    min_replica_size: int
    same_batch: bool
    seed: int
    report: Path | None


def parse(description: str | None, *, tensor_parallel: bool = False) -> Options:
    """Read the command line.

    Args:
        description: of the script.
        tensor_parallel: whether the script has that option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tensor_parallel:
        parser.add_argument(
            "--tensor-parallel",
            type=int,
            default=0,
            help="ranks that share a matrix product; default 2 in a group of 4",
        )
    parser.add_argument("--steps", type=int, default=100, help="committed steps to train")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a rank in a step")
    parser.add_argument("--min-replica-size", type=int, default=1, help="commit only with this many groups")
    parser.add_argument(
        "--same-batch",
        action="store_true",
        help="all groups learn from the same batches: who contributed changes nothing",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--report", type=Path, help="write the final step, loss and digest here, as JSON")
    chosen = vars(parser.parse_args())
    chosen.setdefault("tensor_parallel", 1)
    options = Options(**{field.name: chosen[field.name] for field in fields(Options)})
    if options.batch_size < 1:
        parser.error("a batch has at least one sample")
    if "RANK" not in os.environ:
        parser.error(f"start it by `python -m torchft_ckpt run --groups 2 --nproc 2 -- {parser.prog}`, or by torchrun")
    return options
