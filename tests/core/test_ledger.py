"""Each moment of the training thread is in one account, by what the rank is in and what it waits for; and they add up."""

from __future__ import annotations

import random

import pytest

from torchft_ckpt.core.coordination.messages import Outcome
from torchft_ckpt.core.coordination.waiting import Phase
from torchft_ckpt.core.training import ledger as ledger_module
from torchft_ckpt.core.training.ledger import ACCOUNTS, Account, Ledger, State, Waits, decide_fate


def spent(ledger: Ledger) -> dict[str, float]:
    ledger.validate()
    return {name: round(seconds, 9) for name, seconds in ledger.take().items()}


def wait(ledger: Ledger, what: Waits, begins: float, ends: float) -> None:
    ledger.waits(what, what, begins)
    ledger.ends(what, ends)


def test_each_account_but_those_that_others_know_of_has_a_moment() -> None:
    assert ACCOUNTS.keys() == {(state, waits) for state in State for waits in Waits}
    settled = {decide_fate(outcome, is_learner=False, contributes=True, has_enough=True) for outcome in Outcome}
    found = {account for account in ACCOUNTS.values() if account is not None} | settled
    assert {*Account} - found == {Account.LOST, Account.DOWN}


def test_a_step_goes_where_its_fate_says_and_its_waits_where_they_belong() -> None:
    ledger = Ledger(100.0)
    ledger.goes(State.STEP, 101.0)
    wait(ledger, Waits.QUORUM, 101.0, 103.0)
    wait(ledger, Waits.COLLECTIVE, 105.0, 106.0)
    assert spent(ledger) == {"starting": 1.0, "quorum": 2.0}
    ledger.settles(Account.PRODUCTIVE, 107.0)
    ledger.goes(State.TAKING, 107.0)
    ledger.goes(State.BETWEEN, 107.5)
    ledger.goes(State.STEP, 110.0)
    wait(ledger, Waits.VOTE, 110.0, 111.0)
    ledger.settles(Account.DISCARDED, 111.0)
    assert spent(ledger) == {"productive": 4.5, "between": 2.5, "discarded": 1.0}
    assert ledger.age_s == 11.0


def test_who_waits_for_the_quorum_waits_for_what_its_thread_is_at_and_what_is_beside_counts_apart() -> None:
    ledger = Ledger(0.0)
    ledger.goes(State.STEP, 0.0)
    ledger.quorum_is_at(Waits.QUORUM, 0.0)
    ledger.waits("loop", Waits.QUORUM, 2.0)
    for second, what in enumerate((Waits.LIGHTHOUSE, Waits.MINIMUM, Waits.NEWCOMER, Waits.CONNECTION), 3):
        ledger.quorum_is_at(what, second)
    ledger.quorum_is_at(None, 7.0)
    ledger.ends("loop", 7.0)
    assert spent(ledger) == {
        "quorum": 1.0,
        "lighthouse away": 1.0,
        "below minimum": 1.0,
        "held": 1.0,
        "connecting": 1.0,
    }
    assert ledger.open_s == ledger.beside[Waits.QUORUM] == 2.0


def test_what_a_step_has_computed_by_itself_is_apart_from_its_time_in_collectives_and_other_waits() -> None:
    ledger = Ledger(0.0)
    ledger.goes(State.STEP, 1.0)
    ledger.reduces(True, 3.0)
    wait(ledger, Waits.COMPARISON, 4.0, 5.0)
    wait(ledger, Waits.MICROBATCH, 5.0, 6.0)
    ledger.reduces(False, 6.0)
    wait(ledger, Waits.MICROBATCH, 7.0, 10.0)
    wait(ledger, Waits.COLLECTIVE, 10.0, 10.5)
    wait(ledger, Waits.VOTE, 10.5, 12.0)
    assert ledger.phases_of_step() == {
        Phase.COMPUTE: 6.0,
        Phase.QUORUM: 0.0,
        Phase.ALLREDUCE: 2.5,
        Phase.VOTE: 1.5,
    }
    ledger.settles(Account.PRODUCTIVE, 12.0)
    ledger.goes(State.STEP, 15.0)
    wait(ledger, Waits.QUORUM, 15.0, 16.0)
    assert [ledger.phases_of_step()[phase] for phase in (Phase.COMPUTE, Phase.QUORUM)] == [0.0, 1.0]
    assert ledger.phases[Phase.COMPUTE] == 6.0
    ledger.validate()


def test_waits_of_several_threads_end_in_any_order() -> None:
    ledger = Ledger(0.0)
    ledger.goes(State.STEP, 0.0)
    ledger.waits("first", Waits.QUORUM, 0.0)
    ledger.waits("second", Waits.QUORUM, 1.0)
    ledger.ends("first", 2.0)
    ledger.ends("second", 3.0)
    ledger.settles(Account.PRODUCTIVE, 7.0)
    assert spent(ledger) == {"quorum": 3.0, "productive": 4.0}


def test_the_time_of_one_beside_the_quorum_is_outside_but_for_what_others_wait_for_too() -> None:
    for state, name in ((State.OUTSIDE, "outside"), (State.SPARE, "spare")):
        ledger = Ledger(0.0)
        ledger.goes(state, 0.0)
        wait(ledger, Waits.QUORUM, 1.0, 2.0)
        wait(ledger, Waits.STATE_BESIDE, 2.0, 4.0)
        wait(ledger, Waits.STATE, 4.0, 5.0)
        ledger.goes(State.BETWEEN, 5.0)
        assert spent(ledger) == {name: 4.0, "loading": 1.0}


def test_microbatches_that_are_kept_are_productive_when_their_step_counts() -> None:
    ledger = Ledger(0.0)
    ledger.goes(State.STEP, 0.0)
    wait(ledger, Waits.MICROBATCH, 0.0, 4.0)
    ledger.settles(Account.DISCARDED, 5.0)
    assert spent(ledger) == {"discarded": 1.0}
    ledger.goes(State.STEP, 5.0)
    ledger.keeps(0.75)
    ledger.settles(Account.PRODUCTIVE, 7.0)
    assert spent(ledger) == {"discarded": 1.0, "productive": 5.0}
    wait(ledger, Waits.MICROBATCH, 7.0, 8.0)


def test_a_step_that_is_abandoned_or_cut_off_was_for_nothing() -> None:
    ledger = Ledger(0.0)
    ledger.goes(State.STEP, 0.0)
    ledger.goes(State.BETWEEN, 1.0)
    ledger.goes(State.STEP, 1.0)
    wait(ledger, Waits.MICROBATCH, 1.0, 3.0)
    ledger.closes(4.0)
    assert spent(ledger) == {"discarded": 4.0}


@pytest.mark.parametrize(
    ("outcome", "facts", "fate"),
    [
        (Outcome.COMMIT, {}, Account.PRODUCTIVE),
        (Outcome.COMMIT, {"contributes": False}, Account.OUTSIDE),
        (Outcome.COMMIT, {"contributes": False, "is_spare": True}, Account.SPARE),
        (Outcome.DISCARD, {}, Account.DISCARDED),
        (Outcome.DISCARD, {"has_enough": False}, Account.BELOW_MINIMUM),
        (Outcome.LEFT_BEHIND, {}, Account.DISCARDED),
        (Outcome.LEFT_BEHIND, {"is_learner": True}, Account.OUTSIDE),
        (Outcome.LEFT_BEHIND, {"is_learner": True, "is_spare": True}, Account.SPARE),
    ],
)
def test_the_fate_of_a_step(outcome: Outcome, facts: dict[str, bool], fate: Account) -> None:
    assert decide_fate(outcome, **({"is_learner": False, "contributes": True, "has_enough": True} | facts)) is fate


def test_whatever_happens_in_whatever_order_the_accounts_add_up() -> None:
    for seed in range(200):
        rng, now, told = random.Random(seed), 0.0, 0.0
        ledger = Ledger(now)
        for _ in range(60):
            before = dict(ledger.seconds)
            now += rng.choice([0.0, rng.random()])
            match rng.randrange(6):
                case 0:
                    ledger.goes(rng.choice([*State]), now)
                case 1:
                    ledger.waits(rng.randrange(3), rng.choice([*Waits]), now)
                case 2:
                    ledger.ends(rng.randrange(3), now)
                case 3:
                    ledger.quorum_is_at(rng.choice([*Waits, None]), now)
                case 4:
                    ledger.settles(rng.choice([Account.PRODUCTIVE, Account.DISCARDED, Account.OUTSIDE]), now)
                case _:
                    ledger.keeps(rng.random())
            ledger.validate()
            assert all(ledger.seconds[account] >= before[account] for account in Account), "an account has fallen"
            told += sum(ledger.take().values())
            ledger.validate()
        ledger.closes(now)
        told += sum(ledger.take().values())
        assert told == pytest.approx(now), seed


def test_a_ledger_that_does_not_add_up_says_so() -> None:
    ledger = Ledger(0.0)
    ledger.passes(3.0)
    ledger.seconds[Account.QUORUM] += 1.0
    with pytest.raises(RuntimeError, match="the accounts do not add up"):
        ledger.validate()


def test_the_table_of_accounts_has_a_row_for_each_in_their_order() -> None:
    rows = [line.split("|")[1].strip() for line in (ledger_module.__doc__ or "").splitlines() if line.startswith("| ")]
    assert rows == ["account", *(account.value for account in Account)]
