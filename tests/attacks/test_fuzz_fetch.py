"""A few of what `fuzz_fetch.py` sends, for each run of the suite; many thousands are in docs and in its own runs."""

from __future__ import annotations

import fuzz_fetch


def test_a_few_mutated_manifests_and_lying_wires_come_to_a_right_end() -> None:
    rows, wrong = fuzz_fetch.run(60, seed=20261123)
    assert not wrong
    assert len(rows) == 3
