"""A round is applied with the same settings of the outer optimizers in all groups, whatever their scripts have set."""

from __future__ import annotations

import pytest
import torch
from support.fake_outer_manager import FakeOuterManager, Hub, run_replicas
from torch import nn

from torchft_ckpt.core.training.outer_schedule import whose_settings_count
from torchft_ckpt.outer.averaging import RoundSettings


@pytest.mark.parametrize(
    ("num_rounds", "who"),
    [([], None), ([0, 0], None), ([1, 1], 0), ([1, 5, 5], 1), ([0, 1], 1)],
    ids=["nobody", "nobody says anything", "a job begins", "the first was here later", "one has no state"],
)
def test_who_is_longest_in_the_job_says_what_a_round_is_applied_with(num_rounds: list[int], who: int | None) -> None:
    assert whose_settings_count(num_rounds) == who


def agree(*groups: tuple[int, torch.optim.Optimizer], set_meanwhile: float | None = None) -> None:
    """Hold a round in groups that have been in the job for so many rounds."""
    hub = Hub(len(groups))

    def run(rank: int) -> None:
        manager = FakeOuterManager(hub, rank)
        num_rounds, optimizer = groups[rank]
        settings = RoundSettings(manager, [optimizer])
        settings.num_rounds = num_rounds
        settings.note()
        if set_meanwhile is not None:
            optimizer.param_groups[0]["lr"] = set_meanwhile
        for rows in settings.rows(torch.device("cpu")):
            hub.mean(rank, rows, is_sum=True)
        settings.take()

    run_replicas(len(groups), run)


def sgd(lr: float | torch.Tensor, **settings: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr, **settings)  # type: ignore[arg-type]


def test_a_group_that_came_later_takes_the_others_settings_bit_by_bit_and_is_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late, rate = sgd(torch.tensor(0.7), momentum=0), 0.1 + 0.2
    here = late.param_groups[0]["lr"]
    agree((2, late), (7, sgd(rate, momentum=0.9)), (7, other := sgd(0.5, momentum=0.9)))
    assert late.param_groups[0]["lr"] is here, "a captured graph reads this memory"
    assert (here, late.param_groups[0]["momentum"]) == (torch.tensor(rate), 0.9)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["nesterov"]) == (rate, False)
    assert "replica 0 sets its outer optimizer otherwise than the group that has been in the job longest" in caplog.text
    assert "outer optimizer 0.param_groups.0.lr is 0.7 here, and 0.3 there" in caplog.text


def test_what_all_begin_a_round_with_may_be_set_anew_while_it_is_on_its_way(caplog: pytest.LogCaptureFixture) -> None:
    one, other = sgd(0.5), sgd(0.5)
    agree((1, one), (1, other), set_meanwhile=0.25)
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"] == 0.25
    assert not caplog.records


def test_what_a_tuple_is_set_to_is_taken_too() -> None:
    one, late = (torch.optim.Adam(nn.Linear(2, 2).parameters(), betas=betas) for betas in ((0.8, 0.99), (0.9, 0.999)))
    agree((3, one), (0, late))
    assert one.param_groups[0]["betas"] == late.param_groups[0]["betas"] == (0.8, 0.99)
