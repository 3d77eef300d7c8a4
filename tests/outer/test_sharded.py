"""DiLoCo over shards: two ranks that hold a model as DTensors compute what one process computes that holds it whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import support
import torch
from support.launched import REPO, fork_into
from support.outer_reference import adamw, diloco, nesterov

RANK = Path(support.__file__).with_name("sharded_rank.py")
PYTHONPATH = os.pathsep.join([str(REPO), str(RANK.parents[1])])


@pytest.mark.processes
def test_ranks_that_shard_a_model_train_it_as_one_that_has_it_whole(tmp_path: Path) -> None:
    out = tmp_path / "history.pt"
    ranks = [
        fork_into(
            tmp_path / f"rank_{rank}.log", RANK, str(rank), str(tmp_path / "store"), str(out), PYTHONPATH=PYTHONPATH
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    actual = torch.load(out, weights_only=True)
    (expected,) = diloco(
        num_replicas=1,
        num_fragments=2,
        sync_every=6,
        delay=1,
        alpha=0.5,
        num_inner_steps=len(actual),
        make_inner=adamw,
        make_outer=nesterov,
        outcomes=[True, False, True],
    )

    different = [
        (inner_step, index)
        for inner_step, (mine, theirs) in enumerate(zip(actual, expected, strict=True))
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True))
        if not torch.equal(a, b)
    ]
    assert different == []
