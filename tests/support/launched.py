"""The examples' scripts as users start them, as processes that a nursery forks where it can: importing torch takes seconds."""

from __future__ import annotations

import os
from pathlib import Path

from support.nursery import ForkedIntoFile
from support.processes import note

REPO = Path(__file__).resolve().parents[2]


def fork_into(log: Path, script: Path, *arguments: str, **environment: str) -> ForkedIntoFile:
    """Start a Python script with its output in a file."""
    variables = {**os.environ, "PYTHONPATH": str(REPO), **environment}
    with log.open("wb") as output:
        process = ForkedIntoFile(script, list(arguments), variables, output.fileno())
    note(log.name, process, log)
    return process
