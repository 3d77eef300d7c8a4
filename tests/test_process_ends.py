"""A process that uses the library ends by itself, and with nothing but its own traceback, whatever is in flight then."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support import process_ends
from support.nursery import Forked
from support.process_ends import CLASSES, WAYS, Ends
from support.thoroughness import by_default

ROUNDS = by_default(1, thorough=67)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TORCHFT_CKPT_TOKEN": "of these processes"}

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


@pytest.mark.parametrize("name", CLASSES)
def test_a_process_ends_with_and_without_shutdown_and_by_an_exception(name: str, tmp_path: Path) -> None:
    for _ in range(ROUNDS):
        started = []
        for way in WAYS:
            with (tmp_path / way).open("wb") as said:
                script = Path(process_ends.__file__)
                started.append((way, Forked(script, [name, way], ENVIRONMENT, said.fileno(), ends_whole=True)))
        ends = []
        for way, process in started:
            try:
                status = process.wait(process_ends.LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            ends.append(Ends(way, status, (tmp_path / way).read_text(errors="replace")))
        assert [ended.wrong for ended in ends if ended.wrong] == []
