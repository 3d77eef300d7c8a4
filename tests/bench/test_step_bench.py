"""The benchmark of StepLoader's steps: its arithmetic, on made-up times, and what it says if links cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import step, step_bytes, transport_links
from bench.run import Run
from bench.stats import Verdict


def test_a_step_is_put_over_the_one_beside_it_and_one_slow_pair_is_no_figure() -> None:
    walls = {"ddp": [1.0, 2.0, 1.0], "exact": [1.1, 2.0, 9.0]}
    found = {side: [{"wall_s": wall} for wall in walls[side]] for side in walls}

    assert step.over(found, "wall_s") == pytest.approx(1.1)


def test_figures_that_need_links_say_so_if_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transport_links.os, "geteuid", lambda: 1000)
    run = Run(quick=True, repeat=None, seed=1, log_dir=tmp_path, say=lambda _: None)

    for section in (step.measure_on_links(run), step_bytes.measure(run)):
        assert [row.verdict for row in section.rows] == [Verdict.NOT_RUN]
        assert "needs root" in section.notes[0]
