"""Which collectives may start without asking, and when those of a step are seen to be apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from lighthouse_script import Job, Member, they_ask, they_connect, they_vote

from torchft_ckpt.core.coordination.messages import CollectiveWait
from torchft_ckpt.core.coordination.sequence import Clearance, KnownSequences, may_start, why_apart

KNOWN, COMPARE, ASK = Clearance.KNOWN, Clearance.COMPARE, Clearance.ASK


def step(known: KnownSequences, *signatures: str, commits: bool = True) -> list[Clearance]:
    known.begin_step()
    clearances = [known.issue(signature) for signature in signatures]
    known.decided(committed=commits)
    return clearances


def test_the_first_step_of_a_quorum_is_compared_and_the_same_again_is_known() -> None:
    known = KnownSequences()
    assert step(known, "a", "b") == [COMPARE, COMPARE]
    assert step(known, "a", "b") == [KNOWN, KNOWN]
    known.forget()
    assert step(known, "a", "b") == [COMPARE, COMPARE]


def test_a_discarded_step_teaches_nothing() -> None:
    known = KnownSequences()
    step(known, "a", "b", commits=False)
    assert step(known, "a", "b") == [COMPARE, COMPARE]


def test_another_collective_than_ever_is_asked_for_once_and_compared_from_then_on() -> None:
    known = KnownSequences()
    step(known, "a", "b")
    assert step(known, "a", "c") == [KNOWN, ASK]
    assert step(known, "a", "c") == step(known, "a", "b") == [KNOWN, COMPARE]


def test_one_more_than_ever_is_compared_because_nobody_can_have_started_another_there() -> None:
    known = KnownSequences()
    step(known, "a")
    assert step(known, "a", "metric") == [KNOWN, COMPARE]
    assert step(known, "a", "metric") == [KNOWN, KNOWN]
    assert step(known, "a") == [KNOWN]


def test_what_comes_between_two_steps_is_compared_and_not_learned() -> None:
    known = KnownSequences()
    step(known, "a", "b")
    step(known, "a")
    assert known.issue("metric") is COMPARE
    assert step(known, "a", "b") == [KNOWN, KNOWN]


def test_what_is_issued_after_an_early_vote_is_compared_and_not_learned() -> None:
    known = KnownSequences()
    step(known, "a")
    known.begin_step()
    known.issue("a")
    known.voted()
    assert known.issue("metric") is COMPARE
    known.decided(committed=True)
    assert step(known, "a", "other") == [KNOWN, COMPARE]


@given(st.lists(st.tuples(st.lists(st.sampled_from("abc"), max_size=4), st.booleans()), max_size=8), st.data())
def test_what_starts_without_a_word_is_what_every_member_expects(
    steps: list[tuple[list[str], bool]], data: st.DataObject
) -> None:
    """Two members with one history: where one starts unasked, the other one, whatever it does, starts no other unasked."""
    mine, theirs = KnownSequences(), KnownSequences()
    for signatures, commits in steps:
        assert step(mine, *signatures, commits=commits) == step(theirs, *signatures, commits=commits)
    mine.begin_step()
    theirs.begin_step()
    for _ in range(3):
        ours, other = data.draw(st.sampled_from("abc")), data.draw(st.sampled_from("abc"))
        clearances = {mine.issue(ours), theirs.issue(other)}
        if ours != other:
            assert clearances in ({KNOWN, ASK}, {ASK}, {COMPARE})
            return
        assert len(clearances) == 1
        assert mine.digest == theirs.digest


def wait(index: int, digest: str = "x", *, deviates: bool = False) -> CollectiveWait:
    return CollectiveWait(quorum_id=1, step=0, index=index, digest=digest, deviates=deviates, what=digest)


def test_who_waits_for_more_than_another_issued_in_all_waits_in_vain() -> None:
    assert why_apart({"a": wait(2)}, {"b": 2}) is not None
    assert why_apart({"a": wait(2)}, {"b": 3}) is None
    assert why_apart({"a": wait(2)}, {"a": 2}) is None


def test_two_in_different_collectives_are_apart_where_one_has_not_started() -> None:
    assert why_apart({"a": wait(2, "x"), "b": wait(2, "y", deviates=True)}, {}) is not None
    assert why_apart({"a": wait(2, "x", deviates=True), "b": wait(2, "x", deviates=True)}, {}) is None
    assert why_apart({"a": wait(1, "x"), "b": wait(2, "y", deviates=True)}, {}) is None


def test_a_collective_that_was_never_there_starts_when_all_ask_for_it() -> None:
    both = {"a": wait(2, "y", deviates=True), "b": wait(2, "y", deviates=True)}
    assert may_start(both, ["a", "b"])
    assert not may_start(both, ["a", "b", "c"])
    assert not may_start({**both, "b": wait(2, "y")}, ["a", "b"])


# ------------------------------------------------------------------------------------------------- in the lighthouse


def three_in_a_step(*, least: int = 3) -> tuple[Job, list[Member]]:
    job, *members = Job.of("abc", least=least)
    they_ask(*members)
    for member in members:
        member.hears()
    return job, members


def test_a_group_that_votes_after_fewer_collectives_ends_the_step_for_those_who_wait_for_it() -> None:
    job, (a, b, c) = three_in_a_step()
    a.votes(num_collectives=2)
    b.waits_in(2)
    assert a.hears() == ["discard"]
    assert b.hears() == c.hears() == ["broken by a:1"]
    assert "b:1 waits in collective 3 of the step (sum of x), and a:1 has ended the step after 2" in " ".join(job.log)


def test_it_is_all_the_same_whether_the_vote_comes_first_or_the_wait() -> None:
    _, (a, b, _) = three_in_a_step()
    b.waits_in(2)
    assert b.hears() == []
    a.votes(num_collectives=2)
    assert a.hears() == ["discard"]


def test_different_collectives_of_voters_discard_the_step_and_name_both() -> None:
    job, (a, b, c) = three_in_a_step()
    they_vote(a, c, collectives="one")
    b.votes(collectives="other")
    assert a.hears() == b.hears() == c.hears() == ["discard"]
    assert "a:1 and b:1 issued different collectives" in " ".join(job.log)


def test_all_are_cleared_when_the_last_of_them_asks() -> None:
    _, (a, b, c) = three_in_a_step()
    a.waits_in(1, deviates=True)
    b.waits_in(1, deviates=True)
    assert a.hears() == b.hears() == []
    c.waits_in(1, deviates=True)
    assert a.hears() == b.hears() == c.hears() == ["cleared collective 1"]


def test_one_that_asks_ahead_and_says_later_that_it_waits_in_an_earlier_one_has_asked() -> None:
    """Else all stand still until their collectives time out, as nobody asks twice."""
    _, (a, b, c) = three_in_a_step()
    a.waits_in(1, deviates=True)
    a.waits_in(0)
    b.waits_in(1, deviates=True)
    c.waits_in(1, deviates=True)
    assert a.hears() == b.hears() == c.hears() == ["cleared collective 1"]


def test_of_one_that_asks_ahead_both_collectives_are_compared_with_those_of_the_others() -> None:
    for index in (0, 1):
        job, (a, b, _) = three_in_a_step()
        a.waits_in(1, deviates=True)
        a.waits_in(0)
        b.waits_in(index, digest="y", deviates=True)
        assert "issues another collective" in " ".join(job.log)


# ------------------------------------------------------------------------------- between the decision and the next step


def three_after_a_step(*, least: int = 3) -> tuple[Job, list[Member]]:
    job, members = three_in_a_step(least=least)
    they_vote(*members, num_collectives=2)
    for member in members:
        assert member.hears() == ["commit"]
    return job, members


def test_who_goes_on_without_a_collective_ends_it_for_those_who_wait_in_it_and_no_step_is_lost() -> None:
    _, (a, b, c) = three_after_a_step()
    a.waits_in(2)
    b.asks(num_collectives=2)
    assert a.hears() == c.hears() == ["broken by b:1"]
    assert not a.replica.can_reduce
    a.asks(num_collectives=3)
    c.asks(num_collectives=2)
    assert a.hears() == b.hears() == c.hears() == ["quorum 2 step 1 healthy"], "with a new process group"


def test_it_is_all_the_same_whether_the_wait_comes_first_or_the_request() -> None:
    _, (a, b, _) = three_after_a_step()
    b.asks(num_collectives=2)
    a.waits_in(2)
    assert a.hears() == ["broken by b:1"]


def test_who_has_finished_a_collective_first_and_goes_on_is_not_to_blame_for_those_who_are_still_in_it() -> None:
    _, (a, b, c) = three_after_a_step()
    b.asks(num_collectives=3)
    a.waits_in(2)
    assert a.hears() == []
    they_ask(a, c, num_collectives=3)
    assert a.hears() == ["quorum 1 step 1 healthy"], "with the same process group"


def test_whose_process_group_failed_meets_nobody_in_it_any_more() -> None:
    _, (a, b, _) = three_after_a_step()
    b.replica.collectives_failed()
    a.waits_in(2)
    b.asks(num_collectives=3)
    assert a.hears() == ["broken by b:1"]


def test_what_was_waited_for_before_the_vote_is_forgotten_after_it() -> None:
    _, (a, b, c) = three_in_a_step()
    a.waits_in(1)
    they_vote(a, b, c, num_collectives=2)
    b.asks(num_collectives=2)
    assert a.hears() == ["commit"]


def test_one_that_waits_in_a_collective_after_its_vote_blames_nobody_before_the_decision() -> None:
    _, (a, b, c) = three_in_a_step()
    they_vote(a, b, num_collectives=2)
    a.waits_in(2)
    assert a.hears() == []
    c.votes(num_collectives=2)
    assert a.hears() == b.hears() == c.hears() == ["commit"]
    b.asks(num_collectives=2)
    assert a.hears() == ["broken by b:1"], "what it said before the decision holds after it"


def test_one_that_dies_or_falls_silent_after_the_decision_ends_what_the_others_wait_for() -> None:
    for dies in (True, False):
        job, (a, b, c) = three_after_a_step()
        a.asks(num_collectives=2)
        if dies:
            c.dies()
        else:
            c.is_stopped = True
            job.passes(job.settings.heartbeat_timeout_s + 1.0)
        assert [words for words in b.hears() if "broken" in words] == ["broken by c:1, lost"]
        assert [words for words in a.hears() if "broken" in words] == [], "it is in no collective"
        assert (b.replica.can_reduce, b.replica.version.step) == (False, 1)


def test_who_was_cut_off_after_the_decision_hears_that_nobody_waits_for_it() -> None:
    _, (a, b, _) = three_after_a_step()
    a.is_cut_off()
    assert b.hears() == ["broken by a:1, lost"]
    a.connects()
    assert a.hears() == ["broken by a:1, lost"]


def test_a_decision_says_whether_collectives_can_follow_it() -> None:
    _, (a, b, c) = three_after_a_step()
    assert a.replica.can_reduce
    they_ask(a, b, c)
    they_vote(a, b)
    c.votes(error="the loss is not a number")
    assert a.hears()[-1] == b.hears()[-1] == "discard"
    assert not a.replica.can_reduce, "its sums would be waited for in vain: c has left them"


def test_each_rank_is_compared_with_the_same_rank_of_the_others() -> None:
    """Rank 1 averages something after each step, rank 0 nothing."""
    _, a, b = Job.of("ab", least=2, ranks=2)
    they_ask(a, b)
    they_vote(a, b, num_collectives=2)
    a.hears()
    a.waits_in(2, rank=1)
    b.asks(num_collectives=3, by_rank=(2, 3))
    assert a.hears() == [], "b has been in it"
    a.waits_in(2, rank=0)
    assert a.hears() == ["broken by b:1"]


def test_a_report_of_a_quorum_that_others_have_replaced_is_answered() -> None:
    job, (a, b, c) = three_after_a_step(least=2)
    for member in (b, c):
        member.replica.collectives_failed()
        member.asks()
    job.passes(70.0)
    assert b.hears()[-1].startswith("quorum 2")
    a.hears()
    a.waits_in(2)
    assert a.hears() == ["broken by a:1, lost"]
    assert not a.replica.can_reduce


def test_after_a_restart_of_the_lighthouse_who_waits_between_two_steps_hears_of_those_who_are_lost() -> None:
    job, (a, b, c) = three_after_a_step()
    job.restart()
    they_connect(a, b, c)
    assert [words for words in (*a.hears(), *b.hears(), *c.hears()) if "broken" in words] == []
    c.dies()
    assert [words for words in a.hears() if "broken" in words] == ["broken by a:1, lost"]
    assert not a.replica.can_reduce
