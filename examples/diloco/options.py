"""The options, the same for the whole and for each of its groups; what is not given follows from `--quick`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is run. Rates are 10^6 bits a second; `context` is in characters."""

    groups: int = 4
    inner_steps: int = 3000
    kills: int = 3
    quantize: bool = False
    sync_every: int = 40
    fragments: int = 2
    delay: int = 4
    alpha: float = 0.5
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    learning_rate: float = 4e-3
    batch_size: int = 16
    width: int = 32
    blocks: int = 2
    context: int = 32
    seed: int = 1
    rate: float = 50.0
    throttle: bool = True
    ddp: bool = True
    out: Path = Path("diloco-out")
    records: Path | None = None
    interface: str | None = None
    end_with: int = 1
    begin_in: Path | None = None

    @property
    def num_planned(self) -> int:
        """Inner steps of all groups together."""
        return self.groups * self.inner_steps

    @property
    def period(self) -> int:
        """Inner steps of a round."""
        return self.sync_every // self.fragments

    @property
    def characters_a_step(self) -> int:
        """Characters that a group learns from in a step."""
        return self.batch_size * self.context


# A round takes 40 ms here: a group that comes back has to receive the state in less, or it is one round behind again and again.
QUICK = {"groups": 3, "inner_steps": 150, "kills": 1, "sync_every": 10, "delay": 1, "batch_size": 8, "rate": 200.0}


def parse(arguments: list[str], description: str) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: the whole in 15 seconds")
    whole = parser.add_argument_group("the whole")
    whole.add_argument("--groups", type=int, metavar="N", help=f"replica groups ({Options.groups})")
    whole.add_argument("--kills", type=int, metavar="N", help=f"SIGKILLs in the first job ({Options.kills})")
    whole.add_argument("--rate", type=float, metavar="MBIT", help=f"of each group's link ({Options.rate:g} Mbit/s)")
    whole.add_argument("--no-throttle", dest="throttle", action="store_false", help="no namespaces, no limited links")
    whole.add_argument("--no-ddp", dest="ddp", action="store_false", help="leave plain data-parallel training out")
    whole.add_argument("--out", type=Path, metavar="DIR", help=f"where picture and logs go ({Options.out})")
    outer = parser.add_argument_group("outer loop")
    outer.add_argument("--sync-every", type=int, metavar="N", help=f"inner steps a fragment ({Options.sync_every})")
    outer.add_argument("--fragments", type=int, metavar="N", help=f"fragments of the model ({Options.fragments})")
    outer.add_argument("--delay", type=int, metavar="N", help=f"inner steps beside a transfer ({Options.delay})")
    outer.add_argument("--alpha", type=float, help=f"of the local parameters that stays after it ({Options.alpha})")
    outer.add_argument("--outer-learning-rate", type=float, help=f"({Options.outer_learning_rate})")
    outer.add_argument("--outer-momentum", type=float, help=f"({Options.outer_momentum})")
    outer.add_argument("--quantize", action="store_true", help="send 8 bits a value")
    inner = parser.add_argument_group("training")
    inner.add_argument(
        "--inner-steps", type=int, metavar="N", help=f"of each group, if all live ({Options.inner_steps})"
    )
    inner.add_argument("--learning-rate", type=float, help=f"the highest ({Options.learning_rate})")
    inner.add_argument("--batch-size", type=int, metavar="N", help=f"of a group ({Options.batch_size})")
    inner.add_argument("--width", type=int, help=f"of the model ({Options.width})")
    inner.add_argument("--blocks", type=int, help=f"of the model ({Options.blocks})")
    inner.add_argument("--context", type=int, help=f"characters ({Options.context})")
    inner.add_argument("--seed", type=int, help=f"of weights, batches and kills ({Options.seed})")
    group = parser.add_argument_group("of a group (REPLICA_GROUP_ID is set)")
    group.add_argument("--records", type=Path, metavar="FILE", help="write a line for each inner step")
    group.add_argument("--interface", help="whose sent bytes are written down (all but loopback together)")
    group.add_argument("--end-with", type=int, metavar="N", help="do not end before so many groups are there (1)")
    group.add_argument(
        "--begin-in", type=Path, metavar="DIR", help="begin when this folder has a file `begin` (at once)"
    )
    given = vars(parser.parse_args(arguments))
    defaults = QUICK if given.pop("quick", False) else {}
    options = Options(**{**defaults, **given})
    if complaint := _complain(options):
        parser.error(complaint)
    return options


def _complain(options: Options) -> str:
    for field in fields(options):
        value = getattr(options, field.name)
        least = 0 if field.name in ("kills", "delay", "seed") else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            return f"--{field.name.replace('_', '-')} {value} is too small"
    if options.kills and options.groups < 2:
        return "1 group: somebody must survive a kill"
    if options.fragments > options.blocks:
        return f"{options.blocks} blocks cannot be {options.fragments} fragments"
    return ""
