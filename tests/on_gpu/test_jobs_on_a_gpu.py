"""Scenes of other tests, with the groups' models on a GPU that they share, over Gloo and over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from manager import test_learners_in_processes, test_leaving_processes, test_real_failures
from outer import test_real_rounds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.distributed.is_nccl_available()), reason="needs CUDA and NCCL"
    ),
]
Scene = Callable[[Path], None]
SCENES: list[Scene] = [
    test_real_failures.test_survivors_of_kills_discard_one_step_each_and_all_end_equal,
    lambda path: test_real_failures.test_a_stopped_group_is_dropped_and_heals_when_it_wakes(path, logs_loss=True),
    lambda path: test_real_failures.test_all_ranks_of_a_group_leave_and_come_back_together(path, use_async_quorum=True),
    test_learners_in_processes.test_processes_that_follow_come_to_the_same_bits_and_receive_the_frozen_weights_once,
    test_leaving_processes.test_groups_that_are_preempted_at_any_moment_save_and_go_and_the_others_lose_nothing,
    lambda path: test_real_rounds.test_survivors_of_kills_at_any_point_lose_no_inner_work_and_all_end_equal(
        path, "diloco"
    ),
]
NAMES = ["killed", "stopped", "two ranks", "learners", "preempted", "diloco"]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("scene", SCENES, ids=NAMES)
def test_what_holds_on_the_cpu_holds_on_a_gpu(
    scene: Scene, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_TEST_DEVICE", "cuda")
    monkeypatch.setenv("TORCHFT_CKPT_TEST_BACKEND", backend)
    scene(tmp_path)
