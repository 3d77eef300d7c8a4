"""Does a step count: the tally in every order of votes and losses, and what is decided anew after the lighthouse restarted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from torchft_ckpt.core.coordination.commit import CommitDecision, Tally, decide_forgotten
from torchft_ckpt.core.coordination.messages import CommitVote, Outcome, Role

HEALTHY, IDLE = Role.HEALTHY, Role.IDLE


def vote(
    approve: bool, *, broken: bool = False, counts: bool = True, num_voters: int = 0, reason: str = ""
) -> CommitVote:
    return CommitVote(
        quorum_id=1,
        epoch="e",
        step=4,
        approve=approve,
        broken=broken,
        counts=counts,
        num_voters=num_voters,
        reason=reason,
    )


YES, NO = vote(True), vote(False, reason="a collective failed")


# ------------------------------------------------------------------------------------------- every order of events


def oracle(
    roles: dict[str, Role], events: Sequence[tuple[str, str]]
) -> tuple[CommitDecision, str, dict[str, CommitVote]]:
    """Look at the whole history again after each event: verdict, reason, and the votes that count."""
    votes: dict[str, CommitVote] = {}
    for length in range(1, len(events) + 1):
        past = events[:length]
        votes = {}
        lost: set[str] = set()
        for member, what in past:
            if what == "dies":
                lost.add(member)
            elif member not in lost:
                votes.setdefault(member, YES if what == "yes" else NO)
        voters = [m for m, role in roles.items() if role is HEALTHY]
        against = [m for m in voters if votes.get(m) is NO]
        if against:
            return CommitDecision.DISCARD, f"{against[0]}: a collective failed", votes
        if all(m in lost for m in voters):
            return CommitDecision.DISCARD, f"no living voter is left, the last was {past[-1][0]}: it died", votes
        if all(m in votes or m in lost for m in voters):
            return CommitDecision.COMMIT, "all approved", votes
    return CommitDecision.PENDING, "", votes


@pytest.mark.parametrize(
    "roles",
    [
        {"a": HEALTHY, "b": HEALTHY},
        {"a": HEALTHY, "b": HEALTHY, "c": HEALTHY},
        {"a": HEALTHY, "i": IDLE},
        {"a": HEALTHY, "b": HEALTHY, "i": IDLE},
    ],
    ids=lambda roles: "".join(role.value[0] for role in roles.values()),
)
@pytest.mark.parametrize(
    "words", [("yes", "no", "dies", "yes, dies"), ("yes", "no", "yes, no")], ids=["dies", "says two"]
)
def test_agrees_with_the_oracle_in_every_order_of_votes_and_losses(
    roles: dict[str, Role], words: tuple[str, ...]
) -> None:
    for whats in itertools.product(words, repeat=len(roles)):
        events = [(m, what) for m, both in zip(roles, whats, strict=True) for what in both.split(", ")]
        for order in itertools.permutations(events):
            step = Tally(roles)
            for member, what in order:
                if what == "dies":
                    step.lose(member, "it died")
                else:
                    step.cast(member, YES if what == "yes" else NO)
            assert (step.verdict, step.reason, step.votes) == oracle(roles, order), order
            assert step.broken is any(what == "dies" for _, what in order), order
            if step.verdict is CommitDecision.COMMIT:
                followers = [m for m in roles if step.outcome(m) is Outcome.COMMIT]
                assert followers == [m for m in roles if step.votes.get(m) is YES], order
                assert all(step.outcome(m) is Outcome.LEFT_BEHIND for m in roles if m not in followers), order


# ------------------------------------------------------------------------------- after the lighthouse's own restart


def decide(
    *votes: CommitVote,
    committed: bool = False,
    refused: bool = False,
    training: bool = False,
    everyone: bool = False,
    over: bool = False,
) -> CommitDecision:
    return decide_forgotten(
        votes,
        committed_somewhere=committed,
        refused_somewhere=refused,
        someone_still_training=training,
        everyone_is_back=everyone,
        grace_over=over,
    )


FOR, AGAINST = vote(True, num_voters=3), vote(False, num_voters=3)
SAT_OUT = vote(False, counts=False, num_voters=3)


def test_forgotten_somebody_knows_of_the_commit() -> None:
    assert decide(FOR, AGAINST, committed=True) is CommitDecision.COMMIT


def test_forgotten_all_voters_approve_again() -> None:
    assert decide(FOR, FOR, FOR) is CommitDecision.COMMIT
    assert decide(FOR, FOR, SAT_OUT) is CommitDecision.PENDING
    assert decide(FOR, FOR, FOR, SAT_OUT) is CommitDecision.COMMIT


def test_forgotten_a_discard_waits_for_those_who_may_know_of_a_commit() -> None:
    assert decide(FOR, AGAINST) is CommitDecision.PENDING
    assert decide(FOR, AGAINST, everyone=True) is CommitDecision.DISCARD
    assert decide(FOR, AGAINST, over=True) is CommitDecision.DISCARD


def test_forgotten_those_who_approved_commit_when_the_missing_do_not_come() -> None:
    assert decide(FOR, FOR) is CommitDecision.PENDING
    assert decide(FOR, FOR, over=True, training=True) is CommitDecision.PENDING
    assert decide(FOR, FOR, over=True) is CommitDecision.COMMIT


def test_forgotten_who_sat_out_is_not_against() -> None:
    assert decide(FOR, SAT_OUT, over=True) is CommitDecision.COMMIT
    assert decide(SAT_OUT) is CommitDecision.PENDING
    assert decide(SAT_OUT, over=True) is CommitDecision.DISCARD


@pytest.mark.parametrize("num_idle", [0, 1])
def test_what_is_decided_anew_never_contradicts_what_somebody_here_has_done(num_idle: int) -> None:
    """All small histories: votes and losses in the old life, who heard the decision, who came back; then the new life."""
    roles = dict(zip("abc", [HEALTHY] * (3 - num_idle) + [IDLE] * num_idle, strict=True))
    words = {HEALTHY: ("yes", "no", "open"), IDLE: ("no", "open")}
    num_cases = 0
    for said in itertools.product(*(words[role] for role in roles.values())):
        for fate in itertools.product(("counted", "unheard", "lost"), repeat=len(roles)):
            old = Tally(roles)
            for member, word, what in zip(roles, said, fate, strict=True):
                if what == "lost":
                    old.lose(member, "cut off")
                elif what == "counted" and word != "open":
                    old.cast(member, YES if word == "yes" else NO)
            hearers = [m for m, what in zip(roles, fate, strict=True) if what != "lost"] if old.decided else []
            for num_heard in range(len(hearers) + 1):
                for heard in itertools.combinations(hearers, num_heard):
                    for back in itertools.product((True, False), repeat=len(roles)):
                        num_cases += 1
                        check_new_life(
                            old, dict(zip(roles, said, strict=True)), heard, dict(zip(roles, back, strict=True))
                        )
    assert num_cases > 5000


def check_new_life(old: Tally, said: dict[str, str], heard: Sequence[str], back: dict[str, bool]) -> None:
    here = [member for member in old.roles if back[member]]
    told = {member: old.outcome(member) for member in heard}
    followed = [member for member in told if told[member] is Outcome.COMMIT]
    in_doubt = [member for member in here if member not in told and said[member] != "open"]
    num_voters = sum(role is HEALTHY for role in old.roles.values())
    votes = [vote(said[m] == "yes", counts=old.roles[m] is HEALTHY, num_voters=num_voters) for m in in_doubt]
    verdict = decide(
        *votes,
        committed=any(m in here for m in followed) or any(told.get(m) is Outcome.LEFT_BEHIND for m in here),
        refused=any(told.get(m) is Outcome.DISCARD for m in here),
        everyone=len(here) == len(old.roles),
        over=True,
    )
    case = (old, said, heard, back, verdict)
    if any(member in here for member in followed):
        assert verdict is CommitDecision.COMMIT, case
    if any(told.get(member) is Outcome.DISCARD for member in here):
        assert verdict is CommitDecision.DISCARD, case
    if verdict is CommitDecision.COMMIT and old.verdict is CommitDecision.DISCARD:
        # Allowed where nobody here knows better: those who approved hold the sum, and nobody else has gone on.
        assert not any(member in here for member in heard), case
    if verdict is CommitDecision.DISCARD and followed:
        # The limit: all who know of the commit are away. They hold an older quorum's state when they come back.
        assert not any(member in here for member in followed), case
