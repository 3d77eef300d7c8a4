"""A few of what `fuzz_fetch.py` sends, for each run of the suite; hundreds are in docs and in its own runs."""

from __future__ import annotations

import fuzz_fetch


def test_fetches_through_a_wire_that_lies_come_to_a_right_end() -> None:
    rows, wrong = fuzz_fetch.run(3, seed=20261123)
    assert not wrong
    assert len(rows) == 2
