"""The demo with groups that write the events of groups that train, and do nothing else: `demo_of_small_groups.py OPTIONS`.

They need no torch, which takes each of them, and its torchrun, seconds to import.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS.parent / "examples"))

from demo import cli, supervisor  # noqa: E402

PROGRAM = """
import json, os, time
from pathlib import Path

life = Path({events!r}) / f"group_{{os.environ['REPLICA_GROUP_ID']}}_life_0.jsonl"

def tell(event, **values):
    with life.open("a") as file:
        file.write(json.dumps({{"type": event, "at_s": time.monotonic(), **values}}) + "\\n")

tell("Started", pid=os.getpid())
tell("Imported")
tell("Connected")
while sum(other.stat().st_size > 0 for other in life.parent.glob("group_*_life_0.jsonl")) < {num_groups}:
    time.sleep(0.01)  # they contribute together
together = {{"committed": True, "contributed": True, "participants": 2, "quorum_id": 1, "loss": 3.0}}
for step in range(1, 2000):
    time.sleep(0.05)
    tell("StepEnded", started_s=time.monotonic() - 0.05, step=step, **together)
"""


class SmallGroups(supervisor.RunOptions):
    """The launcher of `support`, with the program above in place of torchrun."""

    def command(self) -> list[str]:
        program = self.folder / "program.py"
        program.write_text(PROGRAM.format(events=str(self.events), num_groups=self.num_groups))
        numbers = {"num_groups": self.num_groups, "num_all_groups": self.num_groups}
        plan = {**numbers, "min_replicas": max(1, self.num_groups - 1), "max_restarts": 0}
        settings = {"plan": plan, "folder": str(self.folder / "ranks"), "program": str(program)}
        return [sys.executable, str(TESTS / "support" / "launched_groups.py"), json.dumps(settings)]


if __name__ == "__main__":
    cli.RunOptions = SmallGroups
    sys.exit(cli.main(sys.argv[1:]))
