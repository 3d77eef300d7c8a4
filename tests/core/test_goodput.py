"""A job's accounts follow from the lines of its ranks: what was lost, who was down, and what nobody speaks of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchft_ckpt.core.training.goodput import GOOGLES, JobGoodput, Line, account_for
from torchft_ckpt.core.training.ledger import Account


def line(time: float, life: str, event: str = "StepCommitted", **rest: Any) -> Line:
    return Line(event=event, time=time, replica_id=life, **rest)


def steps(life: str, began: float, numbers: range, quorum_id: int, each_s: float = 1.0) -> list[Line]:
    """A life whose steps count, one after the other."""
    return [line(began, life, "Began")] + [
        line(began + each_s * count, life, step=number, quorum_id=quorum_id, spent={"productive": each_s})
        for count, number in enumerate(numbers, 1)
    ]


def accounts(lines: list[Line], group: str) -> dict[str, float]:
    (job,) = account_for(lines)
    return {account.value: seconds for account, seconds in job.groups[group].items() if seconds}


def test_every_account_has_a_category_of_googles_and_the_page_says_which() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "goodput.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in page.splitlines() if line.startswith("| ")]
    assert rows[1:] == [[account.value, GOOGLES[account]] for account in Account]


def test_a_group_that_was_lost_is_down_until_its_next_life_speaks_and_its_step_in_flight_was_for_nothing() -> None:
    lines = [
        *steps("a:1", 0.0, range(12), 1),
        *steps("a:1", 12.0, range(12, 20), 2),
        *steps("b:1", 0.0, range(5), 1),
        line(2.5, "a:1", "PeerLost", peer="b:1"),  # it has connected anew
        line(5.5, "a:1", "PeerLost", peer="b:1"),
        *steps("b:2", 12.0, range(12, 20), 2),
    ]
    assert accounts(lines, "a") == {"productive": 20.0}
    assert accounts(lines, "b") == {"productive": 13.0, "discarded": 0.5, "down": 6.5}
    assert account_for(lines)[0].goodput == pytest.approx(33.0 / 40.0)
    assert account_for(reversed(lines)) == account_for(lines), "files are read in any order"


def test_a_group_that_does_not_come_back_is_down_to_the_end_of_the_job_and_one_that_left_is_not() -> None:
    lines = [*steps("a:1", 0.0, range(10), 1), *steps("b:1", 0.0, range(4), 1)]
    assert accounts(lines, "b") == {"productive": 4.0}, "it may be alive: nobody has seen its loss"
    lost = line(4.0, "a:1", "PeerLost", peer="b:1")
    assert accounts([*lines, lost], "b") == {"productive": 4.0, "down": 6.0}
    for how in ("left", "finished", "shut down"):
        assert accounts([*lines, lost, line(4.0, "b:1", "Ended", how=how)], "b") == {"productive": 4.0}


def test_who_left_and_comes_back_was_not_down_and_who_just_ended_was() -> None:
    for how, down in (("left", {}), ("shut down", {"down": 5.0})):
        lines = [
            *steps("a:1", 0.0, range(3), 1),
            line(3.0, "a:1", "Ended", how=how),
            *steps("a:2", 8.0, range(3, 5), 2),
        ]
        assert accounts(lines, "a") == {"productive": 5.0, **down}


def test_steps_that_a_later_quorum_makes_again_were_lost() -> None:
    lines = [*steps("a:1", 0.0, range(10), 1), *steps("b:1", 0.0, range(8), 1), *steps("b:1", 8.0, range(8, 12), 2)]
    assert accounts(lines, "a") == {"productive": 8.0, "lost": 2.0}, "the others made steps 8 and 9 without it"
    assert accounts(lines, "b") == {"productive": 12.0}


def test_a_job_that_starts_again_from_a_checkpoint_has_lost_what_came_after_it_though_quorums_count_anew() -> None:
    lines = [*steps("a:1", 0.0, range(10), 7), *steps("a:2", 20.0, range(6, 12), 1)]
    assert accounts(lines, "a") == {"productive": 12.0, "lost": 4.0, "down": 10.0}


def test_clocks_that_differ_lose_no_step_of_one_quorum() -> None:
    lines = [*steps("a:1", 0.0, range(10), 1), *steps("b:1", 5.0, range(10), 1), *steps("a:1", 10.0, range(10, 12), 2)]
    assert accounts(lines, "a") == {"productive": 12.0}
    assert accounts(lines, "b") == {"productive": 10.0}


def test_what_no_line_speaks_of_is_said_to_be_so() -> None:
    some = steps("a:1", 0.0, range(10), 1)
    assert accounts(some[:4] + some[6:], "a") == {"productive": 8.0, "unaccounted": 2.0}
    assert accounts([*some, line(11.0, "a:1", "Ended", spent={"of another version": 1.0})], "a") == {
        "productive": 10.0,
        "unaccounted": 1.0,
    }


def test_a_group_of_several_ranks_is_its_first_one() -> None:
    lines = [*steps("a:1", 0.0, range(3), 1), line(9.0, "a:1", rank=1, spent={"quorum": 9.0})]
    assert accounts(lines, "a") == accounts(lines[::-1], "a") == {"productive": 3.0}


def test_jobs_are_apart_and_a_job_of_nothing_has_no_goodput() -> None:
    lines = [line(0.0, "a:1", "Began", job="two"), line(0.0, "a:2", "Began", job="one")]
    assert [job.job for job in account_for(lines)] == ["one", "two"]
    assert account_for([]) == []
    assert JobGoodput(job="", groups={}).goodput == 0.0
