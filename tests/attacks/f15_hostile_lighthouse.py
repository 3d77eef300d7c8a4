"""A lighthouse that says what no lighthouse should: a trainer that meets it ends with a named error, or waits without harm.

It must not die of a ConfigError about settings that nobody gave, nor by a traceback that is not ours, send heartbeats in a loop,
follow a redirect, or write escape sequences to its log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from hostile_lighthouse import Case, Seen, try_case

AHEAD = {"step": 3, "quorum_id": 1, "epoch": "e"}
SOURCE = {"replica_id": "x", "replica_rank": 0, "checkpoint_addresses": ["file:///etc/passwd"]}
PENDING = json.dumps({"type": "QuorumPending", "reason": "x" * 4000, "waited_s": 1.0})
CASES = {
    "heartbeat_0": Case(welcome={"heartbeat_timeout_s": 0.0}),
    "store_garbage": Case(formed={"store_address": "no port here"}),
    "rank_beyond": Case(formed={"replica_rank": 7, "replica_world_size": 2}),
    "redirect": Case(redirects=True),
    "refused_with_escapes": Case(refuses="\x1b[2J\nforged line"),
    "store_path": Case(formed={"store_address": "127.0.0.1:1/../../x"}),
    "heartbeat_1e9": Case(welcome={"heartbeat_timeout_s": 1e9}),
    "epoch_long": Case(welcome={"epoch": "e" * 65}),
    "another_protocol": Case(welcome={"protocol": 999}),
    "garbage": Case(first=[os.urandom(1000)]),
    "flood": Case(first=[PENDING] * 3000),
    "big": Case(first=[json.dumps({"type": "QuorumPending", "reason": "x" * (8 << 20), "waited_s": 1.0})]),
    "deep": Case(first=['{"type":"JoinerWaiting","x":' + "[" * 200_000 + "]" * 200_000 + "}"]),
    "world_size_3e6": Case(formed={"replica_world_size": 3_000_000}),
    "contributors_0": Case(formed={"num_contributors": 0, "contributor_rank": None}),
    "contributors_2**61": Case(formed={"num_contributors": 1 << 61}),
    "store_elsewhere": Case(formed={"store_address": "127.0.0.1:9", "replica_world_size": 2}),
    "source_is_a_file": Case(formed={"role": "inline", "version": AHEAD, "names_state": False, "sources": [SOURCE]}),
    "no_sources": Case(formed={"role": "inline", "version": AHEAD, "names_state": False}),
    "epoch_path": Case(formed={"epoch": "../../../x\x00y"}),
    "largest_step": Case(
        formed={"version": {"step": 2**62 - 1, "quorum_id": 2**62 - 1, "epoch": "e"}, "quorum_id": 2**62 - 1}
    ),
    "patience_1e9": Case(formed={"patience_s": 1e9}),
    "destinations_60000": Case(formed={"destinations": list(range(60_000))}),
    "wrong_request": Case(formed={"request_id": 10**9}),
}
BY_DEFAULT = 5
MOST_MESSAGES = 200
MOST_BYTES = 1 << 30


def what_is_wrong(seen: Seen) -> str:
    """Say what the lighthouse achieved; empty: nothing."""
    last = next((line for line in reversed(seen.log.splitlines()) if line.strip()), "")
    if seen.was_redirected:
        return "it followed a redirect"
    if seen.num_messages > MOST_MESSAGES:
        return f"it sent {seen.num_messages} messages"
    if seen.peak_bytes > MOST_BYTES:
        return f"it held {seen.peak_bytes >> 20} MiB"
    if "\x1b" in seen.log or "\nforged line" in seen.log:
        return "its log has escape sequences, or a forged line"
    is_ours = last.startswith("torchft_ckpt.errors.")
    if "errors.ConfigError" in seen.log or (seen.status not in (None, 0) and not is_ours):
        return f"it ended with {last[:150]!r}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help=f"of {', '.join(CASES)}; `all` (default: the first {BY_DEFAULT})")
    names = parser.parse_args().case or list(CASES)[:BY_DEFAULT]
    wrong = []
    for name in list(CASES) if names == ["all"] else names:
        seen = asyncio.run(try_case(CASES[name], most_s=8.0, patience_s=3.0))
        why = what_is_wrong(seen)
        last = (seen.log.strip().splitlines() or [""])[-1]
        how = "still running, ended by us" if seen.status is None else f"exit status {seen.status}"
        print(
            f"{name}: {how} after {seen.took_s:.0f} s, {seen.num_messages} messages; {why or 'as it should'}; {last[:120]!r}"
        )
        wrong += [f"{name}: {why}"] if why else []
    print(f"VULNERABLE: {'; '.join(wrong)}" if wrong else f"held: {len(names)} cases, each as it should")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
