"""What docs/torchft-tests.md says of torchft's own tests is what `scripts/test-torchft` holds it to."""

from __future__ import annotations

import re
from pathlib import Path

from in_torchft.own_tests import name_of, read_known

REPO = Path(__file__).resolve().parents[2]


def test_the_table_counts_the_tests_that_are_listed() -> None:
    rows = re.findall(
        r"^\| `([\w/]+\.py)` \| (\d+) \| (\d+) \|", (REPO / "docs/torchft-tests.md").read_text(), re.MULTILINE
    )
    listed = {file: len(tests) for file, tests in read_known().items()}
    assert {file: int(passing) for file, _, passing in rows if int(passing)} == listed
    assert sum(int(on_cpu) for _, on_cpu, _ in rows) == 151


def test_a_test_is_listed_once_and_in_its_order() -> None:
    for tests in read_known().values():
        assert tests == sorted(set(tests))


def test_names_do_not_hang_on_the_order_of_a_set() -> None:
    assert name_of("f.py::C::test_collective_3_send_recv") == name_of("f.py::C::test_collective_0_send_recv")
    assert name_of("f.py::C::test_updates_1") != name_of("f.py::C::test_updates_2")
