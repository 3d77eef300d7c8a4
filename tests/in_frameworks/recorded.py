"""Runs the script of a replica group, and writes of each step that counted what the script's loop left, and what it had read.

    python recorded.py SCRIPT ARGUMENTS

A line of JSON in `$RECORD/group_N.jsonl` for each such step: the step, how many groups contributed, whether this one did, the
numbers that its data loaders read for it, and a digest of every value that is registered, by its path. That is what another group
would get: what there is as the next forward pass begins, or as the Manager is shut down.

`$GATES` are of the form `30:file`: before the first forward pass after step 30 the script stands still until the file is there.
`$HELD=1:12` has group 1, in its first life, say HELD in the first step after 12 with two groups, and never go on to its backward
pass: the other group waits there for its gradients. Behind a gate the script goes slowly until another group trains with it.

The script knows nothing of this: it is the one that a page shows.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fingerprints import leaves, say
from gates import Gates
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from torchft_ckpt import DistributedDataParallel, Manager


class Recorder:
    """Stands between a script and this library; one for a process, whose script has one Manager."""

    def __init__(self, path: Path, gates: Gates, held_at: int | None) -> None:
        self._path, self._gates, self._held_at = path, gates, held_at
        self._read: list[int] = []
        self._counted: dict[str, Any] | None = None
        self._has_begun = False

    def watch(self) -> None:
        """Have all that happens from now on recorded."""
        forward, vote, shutdown = DistributedDataParallel.forward, Manager.should_commit, Manager.shutdown
        fetch = _MapDatasetFetcher.fetch

        def forward_recorded(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._has_begun = True
                if num_groups := self._write(ddp._manager):
                    self._gates.go_on(ddp._manager.current_step(), num_groups)
            output = forward(ddp, *inputs, **kwargs)
            if torch.is_grad_enabled():
                self._hold(ddp._manager)
            return output

        def vote_recorded(manager: Manager, *args: Any, **kwargs: Any) -> bool:
            before, counts = manager.current_step(), vote(manager, *args, **kwargs)
            if manager.current_step() > before or not counts:  # otherwise another optimizer shares the step
                self._counted = None
                if counts:
                    view = manager.view()
                    who = {
                        "num_participants": view.num_participants,
                        "contributes": view.participating_rank is not None,
                    }
                    self._counted = {"step": manager.current_step(), **who, "read": self._read}
                self._read = []
            return counts

        def shutdown_recorded(manager: Manager, *args: Any, **kwargs: Any) -> None:
            self._write(manager)
            shutdown(manager, *args, **kwargs)

        def fetch_recorded(fetcher: _MapDatasetFetcher, numbers: Any) -> Any:
            self._read = [*self._read, *numbers] if self._has_begun else numbers  # it was passed over before that
            return fetch(fetcher, numbers)

        DistributedDataParallel.forward, Manager.should_commit = forward_recorded, vote_recorded
        Manager.shutdown, _MapDatasetFetcher.fetch = shutdown_recorded, fetch_recorded

    def _write(self, manager: Manager) -> int:
        """Write the line of a step that counted; return how many groups made it, 0 if there is none."""
        if self._counted is None:
            return 0
        line, self._counted = self._counted, None
        line["values"] = dict(leaves("", manager.hooks.registry.capture()))
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return int(line["num_participants"])

    def _hold(self, manager: Manager) -> None:
        if self._held_at is not None and manager.current_step() >= self._held_at and manager.num_participants() == 2:
            say("HELD")
            time.sleep(1000)


def main() -> None:
    """Run the script that the command line names, as the main module, and record it."""
    group = os.environ["REPLICA_GROUP_ID"]
    path = Path(os.environ["RECORD"], f"group_{group}.jsonl")
    gates = Gates(gate.split(":", 1) for gate in os.environ.get("GATES", "").split())
    held_group, _, held_at = os.environ.get("HELD", "").partition(":")
    is_held = group == held_group and not path.exists()
    Recorder(path, gates, int(held_at) if is_held else None).watch()
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
