"""Several lighthouses: which of them decides, and how long its word is taken."""

from __future__ import annotations

from random import Random

import pytest
from simulation.chaos import draw_scenario_of_leases
from simulation.oracle import InvariantError
from simulation.run import Simulation
from simulation.several import Lighthouses
from support.thoroughness import by_default

from torchft_ckpt.core.coordination import leadership
from torchft_ckpt.core.coordination.leadership import (
    Call,
    Leadership,
    LeaseHeld,
    LeaseOf,
    StoreFailed,
    Trust,
)
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Heartbeat, Welcome, encode


def leader_since(began: float, data: bytes = b"") -> Leadership:
    """A lighthouse that asked for a lease of 2 s at a time, and has it."""
    one = Leadership(2.0)
    assert one.next_call(b"", began)[0] is Call.ACQUIRE
    one.answered(Call.ACQUIRE, LeaseHeld(7, 2.0, data), began, began + 0.1)
    one.validate(began + 0.1)
    assert one.data == data
    return one


def test_a_leader_decides_until_its_lease_less_the_margin_is_over_counted_from_before_it_asked() -> None:
    one = leader_since(10.0)
    assert [one.leads(now) for now in (10.1, 11.7, 11.81, 13.0)] == [True, True, False, False]
    assert one.answer(Heartbeat(4), 11.0) == Heartbeat(4, pytest.approx(0.8))  # type: ignore[arg-type]


def test_a_leader_asks_again_four_times_in_a_lease_and_sooner_if_the_store_does_not_answer() -> None:
    one = leader_since(10.0)
    assert one.next_call(b"", 10.1) == (Call.RENEW, pytest.approx(10.5))
    one.answered(Call.RENEW, LeaseHeld(7, 2.0), 10.2, 10.3)
    assert one.next_call(b"", 10.3) == (Call.RENEW, 10.7)
    one.answered(Call.RENEW, StoreFailed("nobody answers"), 10.7, 11.2)
    assert one.next_call(b"", 11.2) == (Call.RENEW, pytest.approx(11.3))
    one.look(12.0)
    assert (one.is_leading, one.reason) == (False, "the store of the lease does not answer: nobody answers")


def test_an_answer_that_comes_when_the_lease_is_over_changes_nothing() -> None:
    one = leader_since(10.0)
    one.answered(Call.RENEW, LeaseHeld(7, 2.0), 11.0, 11.9)
    assert (one.is_leading, one.leads(11.9)) == (False, False)
    assert one.next_call(b"", 11.9) == (Call.ACQUIRE, 12.0)


def test_who_finds_another_one_leading_says_which_and_looks_again() -> None:
    one = Leadership(2.0)
    one.answered(Call.ACQUIRE, LeaseOf("b:29510"), 1.0, 1.1)
    assert (one.leader, one.next_call(b"", 1.1)) == ("b:29510", (Call.ACQUIRE, pytest.approx(1.3)))


def test_what_is_to_outlive_the_leader_is_written_at_once_and_again_after_a_renewal_if_that_failed() -> None:
    one = leader_since(10.0, data=b"old")
    one.answered(Call.RENEW, LeaseHeld(7, 2.0), 10.2, 10.3)
    assert one.next_call(b"old", 10.3)[0] is Call.RENEW
    assert one.next_call(b"new", 10.3) == (Call.WRITE, 10.3)
    one.answered(Call.WRITE, StoreFailed("slow"), 10.3, 10.5, written=b"new")
    assert one.next_call(b"new", 10.5)[0] is Call.RENEW
    one.answered(Call.RENEW, LeaseHeld(7, 2.0), 10.7, 10.8)
    assert one.next_call(b"new", 10.8)[0] is Call.WRITE
    one.answered(Call.WRITE, LeaseHeld(7, 2.0), 10.8, 10.9, written=b"new")
    assert (one.data, one.next_call(b"new", 10.9)[0]) == (b"new", Call.RENEW)


def test_a_leader_that_may_not_write_leads_no_more() -> None:
    one = leader_since(10.0)
    one.answered(Call.WRITE, None, 10.2, 10.3, written=b"new")
    assert (one.is_leading, one.leads(10.3)) == (False, False)
    assert one.next_call(b"", 10.3) == (Call.ACQUIRE, 12.0)


def test_who_leads_no_more_takes_no_other_lease_before_its_last_one_has_ended_as_groups_may_take_its_word_so_long() -> (
    None
):
    one = leader_since(10.0)
    one.look(11.8)
    assert one.next_call(b"", 11.8) == (Call.ACQUIRE, 12.0)
    one.answered(Call.ACQUIRE, LeaseHeld(8, 2.0), 12.0, 12.1)
    assert one.leads(12.1)


def welcome(fence: int, leads_for_s: float | None) -> Welcome:
    return Welcome(protocol=PROTOCOL_VERSION, epoch="e", heartbeat_timeout_s=5.0, fence=fence, leads_for_s=leads_for_s)


def trust_of(for_s: float | None, *, asked_at: float) -> Trust:
    trust = Trust()
    assert trust.begins(welcome(7, for_s), asked_at)
    return trust


def test_a_member_goes_to_no_leader_with_a_lower_fence_than_it_has_met() -> None:
    trust = trust_of(1.5, asked_at=10.0)
    assert not trust.begins(welcome(6, 1.5), 20.0) and not trust.takes(20.1)
    assert trust.begins(welcome(8, 1.5), 20.0) and trust.takes(20.1)


def test_a_member_takes_what_comes_until_the_lease_that_it_heard_of_would_be_over_and_leaves_when_nobody_answers() -> (
    None
):
    trust = trust_of(1.5, asked_at=10.0)
    beat = trust.asks(10.5)
    trust.heard(Heartbeat(beat.number, 1.6))
    assert [trust.takes(now) for now in (12.0, 12.2)] == [True, False]
    assert trust.ask_at == pytest.approx(12.1)
    beat = trust.asks(12.2)
    assert [trust.is_over(now) for now in (12.6, 12.8)] == [False, True]
    trust.heard(Heartbeat(beat.number, 1.6))  # it had only been slow
    assert (trust.takes(12.8), trust.is_over(12.8)) == (True, False)


def test_an_old_answer_or_one_to_what_was_never_asked_gives_no_trust() -> None:
    trust = trust_of(1.0, asked_at=10.0)
    beat = trust.asks(10.2)
    trust.heard(Heartbeat(99, 100.0))
    trust.heard(Heartbeat(beat.number, 0.5))
    assert [trust.takes(now) for now in (10.9, 11.1)] == [True, False]


def test_without_a_store_a_member_trusts_its_only_lighthouse() -> None:
    trust = trust_of(None, asked_at=0.0)
    assert encode(trust.asks(5.0)) == '{"type":"Heartbeat"}'
    assert trust.takes(1e9) and not trust.is_over(1e9)


def test_one_without_a_lease_is_none_of_several_lighthouses() -> None:
    assert not Trust(1).begins(welcome(0, None), 0.0)


# ---------------------------------------------------------------------------------------------------- in the simulation


def run(seed: int) -> Lighthouses:
    simulation = Simulation(seed, draw_scenario_of_leases(Random(seed)))
    simulation.run()
    assert simulation.several is not None
    return simulation.several


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, by_default(100, thorough=400), 50))
def test_no_two_lighthouses_decide_at_once_and_all_recover(first: int) -> None:
    runs = [run(seed) for seed in range(first, first + 50)]
    assert sum(several.store.fence for several in runs) > 100
    assert sum(several.num_taken for several in runs) > 1000


def broken_lease(patch: pytest.MonkeyPatch) -> None:
    """A leader does not look at its lease before it decides."""
    patch.setattr(Leadership, "leads", lambda one, now: one.is_leading)
    patch.setattr(Leadership, "validate", lambda one, now: None)


def broken_margin(patch: pytest.MonkeyPatch) -> None:
    """A leader uses its lease to the end, by its own clock."""
    patch.setattr(leadership, "MARGIN", 0.0)


def broken_trust(patch: pytest.MonkeyPatch) -> None:
    """A member takes what a leader says however long ago that was known to lead."""
    patch.setattr(Trust, "takes", lambda trust, now: True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "first"),
    [(broken_lease, 1000), (broken_margin, 1004), (broken_trust, 1002)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_simulation_finds_a_rule_of_leases_that_was_broken_on_purpose(
    break_it: object, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)  # type: ignore[operator]
    with pytest.raises(InvariantError, match=r"is given fence|was given"):
        for seed in range(first, first + 100):
            run(seed)
