"""`scripts/docs --run`: runs every block of code on the pages, and counts those that need more than this machine."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.pages import PAGES, blocks_of, code_blocks, problem_of, run_block, run_story


def main() -> int:
    """Run the blocks of all pages, or of those whose path holds one of the arguments; return how many failed."""
    chosen = sys.argv[1:]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for block in code_blocks():
        if block.script or block.is_of_story or (chosen and not any(part in block.name for part in chosen)):
            continue
        failure = problem_of(block)
        if not failure and block.needs:
            counts[f"need {block.needs}, parsed only"] += 1
            continue
        if not failure:
            try:
                took_s = run_block(block)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            else:
                counts["ran"] += 1
                print(f"{took_s:6.1f} s  {block.name}", flush=True)
        if failure:
            failures.append(block.name)
            print(f"FAILED    {block.name}: {failure}", flush=True)
    for page in PAGES:
        story = [block for block in blocks_of(page) if block.is_of_story]
        if not story or (chosen and not any(part in str(page) for part in chosen)):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                run_story(page, Path(directory))
            except AssertionError as error:
                failures.append(str(page))
                print(f"FAILED    {error}", flush=True)
            else:
                counts["ran"] += len(story)
                print(f"{time.monotonic() - began:6.1f} s  {page.name}, {len(story)} blocks in one story", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()) or "nothing to run", end="")
    print(f"; {len(failures)} failed: {', '.join(failures)}" if failures else "; none failed")
    return min(len(failures), 100)


if __name__ == "__main__":
    sys.exit(main())
