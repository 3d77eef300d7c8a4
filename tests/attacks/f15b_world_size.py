"""A quorum of 2**61 groups: the trainer that is told so made a list of their names, until there was no memory left."""

from __future__ import annotations

import argparse
import asyncio
import sys

from hostile_lighthouse import Case, try_case

WORLD = Case(formed={"replica_world_size": 1 << 61})
MOST_BYTES = 1 << 30
"""A trainer that has imported torch and trains something small holds a third of it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=12.0, help="how long the trainer is watched")
    seconds = parser.parse_args().seconds
    seen = asyncio.run(try_case(WORLD, most_s=seconds, patience_s=seconds))
    what = f"the trainer held {seen.peak_bytes >> 20} MiB at most in {seen.took_s:.0f} s"
    if not seen.num_asked:
        print(f"no result, as the trainer did not come to ask: {seen.log[-1000:]}")
        return 1
    if seen.peak_bytes > MOST_BYTES or "cannot be read" not in seen.log:
        print(f"VULNERABLE: {what}")
        return 1
    print(f"held: {what}, and named the message that it would not take")
    return 0


if __name__ == "__main__":
    sys.exit(main())
