"""The fuzzer of durable checkpoints, in short; `python tests/attacks/fuzz_durable.py --count 20000` is the long run."""

from __future__ import annotations

import random

import pytest
from attacks import fuzz_durable


@pytest.mark.filterwarnings("ignore")
def test_hostile_checkpoints_are_refused_by_name_and_execute_nothing() -> None:
    fuzz_durable.WATCH.install()
    rng = random.Random(0)
    tallies = [
        *fuzz_durable.fuzz_metadata(rng, 200),
        *fuzz_durable.fuzz_records(rng, 400),
        *fuzz_durable.fuzz_manifests(rng, 3),
    ]
    assert [case for tally in tallies for case in tally.wrong] == []
    assert [tally.results.total() for tally in tallies] == [100, 100, 200, 200, 3, 3, 3, 3, 3]
