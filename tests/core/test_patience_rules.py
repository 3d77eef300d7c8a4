"""How long to wait before trying again."""

from __future__ import annotations

import pytest

from torchft_ckpt.core.coordination.patience import Debt, reconnect_delay_s, restart_patience_s


@pytest.mark.parametrize(("attempt", "longest"), [(0, 0.05), (1, 0.1), (3, 0.4), (6, 2.0), (1000, 2.0)])
def test_reconnecting_doubles_up_to_two_seconds_and_is_spread(attempt: int, longest: float) -> None:
    assert reconnect_delay_s(attempt, 0.0) == pytest.approx(longest / 2)
    assert reconnect_delay_s(attempt, 0.999999) == pytest.approx(longest, rel=1e-3)


@pytest.mark.parametrize("cost_s", [0.3, 10.0])
def test_a_group_that_cannot_come_in_costs_the_others_three_hundredths_of_their_time(cost_s: float) -> None:
    debt, now = Debt(), 0.0
    for attempt in range(50):
        now = debt.out_until if attempt else now
        now += cost_s
        debt.could_not(cost_s, "firewall", now, first_pause_s=None, is_alone=True)
    assert 50 * cost_s / debt.out_until == pytest.approx(0.03, rel=0.05)


def test_the_first_refusal_is_forgiven_where_it_may_be_anothers_fault_and_paid_with_the_second() -> None:
    debt = Debt()
    debt.could_not(6.0, "", 0.0, first_pause_s=6.0, is_alone=True)
    assert (debt.out_until, debt.hold_until) == (6.0, 0.0)
    debt.could_not(3.0, "", 10.0, first_pause_s=3.0, is_alone=True)
    assert debt.out_until == pytest.approx(10.0 + 9.0 / 0.03)


def test_failures_that_cost_nothing_are_tried_again_soon_and_less_and_less_often() -> None:
    debt = Debt()
    pauses = []
    for _ in range(8):
        debt.failed(0.0, "", 0.0)
        pauses.append(debt.out_until)
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 6.4, 6.4])


def test_a_restarted_lighthouse_waits_until_each_living_group_has_tried_to_connect_again() -> None:
    """However short the time after which a silent group is dead; never longer than groups wait for each other at all."""
    longest_pause_s = max(reconnect_delay_s(attempt, 0.999) for attempt in range(20))
    for heartbeat_timeout_s in (0.01, 1.0, 2.0, 5.0, 60.0):
        patience_s = restart_patience_s(60.0, heartbeat_timeout_s)
        assert patience_s >= max(heartbeat_timeout_s, longest_pause_s + 0.5)
    assert restart_patience_s(0.2, 5.0) == 0.2
