"""Groups that come in and do not do what they should: those who train lose no step by them, and stand still no longer than they
allow; one that does as it should comes in beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from lighthouse_script import Job, Member

from torchft_ckpt.core.coordination.messages import Outcome, Receives, Shows
from torchft_ckpt.core.coordination.replica import StepPhase

LIMIT_S = 9.0
TICK_S = 0.5
LASTS_S = 120.0


def asks(member: Member, state: str, **facts: object) -> None:
    member.asks(can_serve=True, shows=state if member.replica.shows is not Shows.NOTHING else "", **facts)  # type: ignore[arg-type]


def does_as_it_should(member: Member) -> None:
    member.comes_in()
    asks(member, "x")


def claims_the_state(member: Member) -> None:
    """It asks with the name of the state, and holds another one."""
    member.comes_in()
    asks(member, "y")


def asks_at_once(member: Member) -> None:
    member.comes_in(load=False)
    member.asks(at_end=True, reach_s=0.0)


BAD: Mapping[str, tuple[Callable[[Member], None], dict[str, float], str]] = {
    # what it does while the quorum is held for it; what it says of itself as it asks; what is said of it
    "it always needs a little longer": (lambda c: c.still_needs(0.1), {"reach_s": 0.1}, "keep the others waiting for"),
    "it needs far longer than it says": (
        lambda c: c.still_needs(100.0),
        {"reach_s": 0.0},
        "keep the others waiting for",
    ),
    "it says nothing": (lambda c: None, {"reach_s": 0.1}, "it has not begun to receive the state within 5 s"),
    "it asks again at once": (asks_at_once, {"reach_s": 0.0}, "it could not receive or load the state"),
    "its loop's top takes ten minutes": (
        lambda c: c.still_needs(0.0, Receives.LOADS),
        {"reach_s": 0.1, "top_s": 600.0},
        "keep the others waiting for",
    ),
    "it claims to hold the state": (claims_the_state, {"reach_s": 0.1}, "came to another state"),
}


def goes_on(member: Member, state: str, when_held: Callable[[Member], None], facts: Mapping[str, float]) -> None:
    """Do what its loop does next."""
    replica, formed = member.replica, member.formed
    if replica.phase is StepPhase.IDLE:
        asks(member, state)
    elif replica.phase is not StepPhase.TRAINING or formed is None:
        return
    elif replica.warms_up:
        member.ends()
        member.asks(at_end=True, **facts)  # type: ignore[arg-type]
    elif formed.differs:
        member.follows()
        asks(member, state)
    elif not replica.is_learner:
        member.votes()
    elif formed.held and replica.follows and member in waited_for(member.job):
        when_held(member)
    else:
        member.follows(load=False)
        member.asks(at_end=True, **facts)  # type: ignore[arg-type]


def waited_for(job: Job) -> list[Member]:
    return [job.members[member.replica_id] for member in job.lighthouse._holds.awaited]


@pytest.mark.parametrize("what", BAD)
def test_a_newcomer_that_does_not_do_what_it_should_costs_those_who_train_what_they_allow_and_no_step(
    what: str,
) -> None:
    when_held, facts, said = BAD[what]
    job, stood_s = Job(least=2), 0.0
    members = [job.join(name, join_stall_limit_s=LIMIT_S) for name in "ab"]
    job.step(*members)
    for member in members:
        asks(member, "x")
    bad, good = job.join("c"), None
    why: set[str] = set()
    while job.now < LASTS_S:
        if job.now >= LASTS_S / 2 and good is None:
            good = job.join("d")
        job.passes(TICK_S)
        stood_s += TICK_S if waited_for(job) else 0.0
        why.update(job.log)
        goes_on(bad, "y", when_held, facts)
        for member in [*members, *([] if good is None else [good])]:
            goes_on(member, "x", does_as_it_should, {"reach_s": 0.1})
    assert {outcome for member in members for outcome in member.outcomes} == {Outcome.COMMIT}
    assert stood_s <= LIMIT_S + 0.05 * LASTS_S + 2 * TICK_S
    assert members[0].step >= (LASTS_S - 2 * stood_s) / TICK_S / 3
    assert good is not None and good.outcomes.count(Outcome.COMMIT) > LASTS_S / TICK_S / 8
    assert any(said in line and "c:1" in line for line in why), why
