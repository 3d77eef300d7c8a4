"""A launcher whose groups run a small program instead of torchrun: `launched_groups.py SETTINGS`, a JSON object.

The program is a Python file that gets torchrun's arguments. It says in files of `folder` what it did.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from torchft_ckpt.core.services.launching import LaunchPlan
from torchft_ckpt.launcher.supervisor import Launch, Supervisor


def main(settings: str) -> int:
    """Run the job; return its exit status."""
    given = json.loads(settings)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    launch = Launch(
        plan=LaunchPlan(**given["plan"]),
        command=["train.py", "--option"],
        lighthouse="http://127.0.0.1:1",
        job="job",
        log_folder=Path(given["folder"]),
        devices=given.get("devices", ()),
        torchrun=[sys.executable, "-S", given["program"]],
        end_patience_s=given.get("end_patience_s", 60.0),
    )
    return asyncio.run(Supervisor(launch).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
