"""Groups whose ranks hold other parts of the tensors are never in one quorum: one of them waits, and takes over at the end."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from lighthouse_script import Job, Member, they_vote

from torchft_ckpt.core.coordination.layouts import (
    combine_layouts,
    is_part_of,
    of_another_layout,
    trains_in,
    what_differs,
)
from torchft_ckpt.core.coordination.messages import Layout, Outcome
from torchft_ckpt.core.coordination.replica import StepFacts, StepWishes


def asks_as(member: Member, layout: str, *, frozen: str = "", at_end: bool = False) -> None:
    request = member.replica.begin(StepWishes(), StepFacts(can_serve=True, at_end=at_end))
    member.says(msgspec.structs.replace(request, layout=Layout(digest=layout, text=layout, frozen=frozen)))


def job_of_two() -> tuple[Job, Member, Member]:
    """Two groups that have trained a step together."""
    job, a, b = Job.of("ab")
    for member in (a, b):
        asks_as(member, "two ranks")
    for member in (a, b):
        member.votes()
        member.hears()
    return job, a, b


def test_a_group_of_another_layout_waits_and_the_others_do_not_notice() -> None:
    job, a, b = job_of_two()
    c = job.join("c")
    asks_as(c, "four ranks")
    asks_as(a, "two ranks")
    asks_as(b, "two ranks")
    assert a.hears()[-1] == "quorum 1 step 1 healthy"
    assert b.hears()[-1] == "quorum 1 step 1 healthy"
    assert "quorum" not in " ".join(c.hears())
    assert c.formed is None


def test_it_is_told_why_it_waits() -> None:
    job, a, b = job_of_two()
    c = job.join("c")
    asks_as(c, "four ranks")
    job.passes(2.0)
    for member in (a, b):
        asks_as(member, "two ranks")
    assert c.hears()[-1].startswith("pending: c:1 cannot train with a:1: it has four ranks, they have two ranks")


def test_one_that_holds_the_newest_state_takes_over_when_the_others_are_gone() -> None:
    job, a, b = job_of_two()
    c = job.join("c")
    c.replica.caught_up(a.replica.version)
    asks_as(c, "four ranks")
    a.leaves()
    assert c.formed is None
    b.leaves()
    assert c.hears()[-1] == "quorum 2 step 1 healthy"


def test_at_the_start_most_decide_and_the_first_of_equals() -> None:
    layouts = {"a": "x", "b": "y", "c": "y", "d": ""}
    assert trains_in(layouts, last_quorum=[], holders=[], candidates=["a", "b", "c", "d"]) == "y"
    assert trains_in(layouts, last_quorum=[], holders=[], candidates=["b", "a"]) == "x"
    assert trains_in(layouts, last_quorum=[], holders=["a"], candidates=["b", "c"]) == "x"
    assert trains_in(layouts, last_quorum=["d", "c"], holders=["a"], candidates=["a"]) == "y"
    assert of_another_layout(layouts, "y") == {"a"}
    assert of_another_layout(layouts, "") == set()


def test_the_odd_one_of_the_last_quorum_does_not_shut_the_others_out() -> None:
    layouts = {"a": "odd", "b": "x", "c": "x"}
    assert trains_in(layouts, last_quorum=["a", "b", "c"], holders=["a", "b", "c"], candidates=["a", "b", "c"]) == "x"


def test_layouts_of_groups_are_equal_exactly_where_those_of_their_ranks_are() -> None:
    of_ranks = [
        ranks for number in (1, 2, 3) for ranks in itertools.product(("", "0", "1", "01", "0;1:1"), repeat=number)
    ]
    assert len({combine_layouts(ranks) for ranks in of_ranks}) == len(of_ranks)


@pytest.mark.parametrize("layout", ["", "two ranks"])
def test_one_that_does_not_say_is_taken_for_alike(layout: str) -> None:
    _, a, b = job_of_two()
    asks_as(a, "two ranks")
    asks_as(b, layout)
    assert a.hears()[-1] == b.hears()[-1] == "quorum 1 step 1 healthy"


def test_a_layout_that_changes_in_all_groups_splits_nobody_off() -> None:
    """Another optimizer is guarded, say: one group asks with the new layout while the others are on their way."""
    job, a, b = job_of_two()
    asks_as(a, "two ranks, and more")
    job.passes(3.0)
    assert "quorum" not in " ".join(a.hears())
    asks_as(b, "two ranks, and more")
    assert a.hears()[-1] == b.hears()[-1] == "quorum 1 step 1 healthy"


def test_who_cannot_be_in_a_quorum_is_named_while_there_is_none() -> None:
    job, a, b = Job.of("ab", least=2)
    for member in (a, b):
        asks_as(member, "two ranks")
    for member in (a, b):
        member.votes()
        member.hears()
    b.leaves()
    c = job.join("c")
    asks_as(c, "four ranks")
    asks_as(a, "two ranks")
    job.passes(10.0)
    assert a.hears()[-1] == "pending: 1 of at least 2 replica groups are here (a:1); of another layout: c:1"
    assert c.hears()[-1].startswith("pending: c:1 cannot train with a:1: it has four ranks")


def test_what_differs_is_the_first_item_that_does() -> None:
    assert (
        what_differs("1 ranks; p 0: 4x4; p 1: 4", "1 ranks; p 0: 8x4; p 1: 8") == "it has p 0: 4x4, they have p 0: 8x4"
    )
    assert (
        what_differs("1 ranks; p 0: 4x4", "1 ranks; p 0: 4x4; p 1: 4") == "it has no more parameters, they have p 1: 4"
    )


def test_a_group_that_has_yet_to_add_parameters_to_its_optimizer_trains_part_of_them() -> None:
    assert is_part_of("1 ranks; p 0: 4x4", "1 ranks; p 0: 8; p 1: 4x4")
    assert not is_part_of("1 ranks; p 0: 4x4; p 1: 4x4", "1 ranks; p 0: 8; p 1: 4x4")
    assert not is_part_of("1 ranks; p 0: 4x4", "1 ranks; p 0: 4x5; p 1: 4")
    assert not is_part_of("2 ranks; p 0: 4x4", "1 ranks; p 0: 4x4")


def test_the_same_parameters_in_another_order_are_no_part_that_a_state_could_mend() -> None:
    own = "1 ranks; parameter 0, a.w: 4x4 float32; parameter 1, b.w: 4x4 float32"
    theirs = "1 ranks; parameter 0, b.w: 4x4 float32; parameter 1, a.w: 4x4 float32"
    assert not is_part_of(own, theirs)
    assert is_part_of(own, own)
    assert is_part_of("1 ranks; parameter 0, b.w: 4x4 float32", own), "its optimizer has yet to get the other one"
    assert what_differs(own, theirs) == (
        "it has parameter 0, a.w: 4x4 float32, they have parameter 0, b.w: 4x4 float32"
    )


# --------------------------------------------------------------------------------- the same parameters, others of them frozen


def job_that_has_unfrozen() -> tuple[Job, Member, Member]:
    job, a, b = Job.of("ab")
    for member in (a, b):
        asks_as(member, "p", frozen="none")
    for member in (a, b):
        member.votes()
        member.hears()
    return job, a, b


def test_a_group_that_comes_back_with_frozen_layers_learns_the_step_and_comes_in_when_it_has_unfrozen_them() -> None:
    job, a, b = job_that_has_unfrozen()
    c = job.join("c")
    asks_as(c, "p", frozen="layer 1")
    asks_as(a, "p", frozen="none")
    asks_as(b, "p", frozen="none")
    assert c.hears()[-1] == "quorum 1 step 1 learner"
    assert a.hears()[-1] == b.hears()[-1] == "quorum 1 step 1 healthy"
    c.loads()
    assert c.step == 1
    they_vote(a, b)
    assert a.hears() == b.hears() == ["commit"]
    asks_as(c, "p", frozen="none")
    c.ends()
    asks_as(c, "p", frozen="none", at_end=True)
    for member in (a, b):
        asks_as(member, "p", frozen="none")
    c.comes_in()
    asks_as(c, "p", frozen="none")
    assert c.hears()[-1] == "quorum 2 step 2 healthy"
    assert [a.outcomes, b.outcomes] == [[Outcome.COMMIT, Outcome.COMMIT]] * 2


def test_a_group_that_still_has_frozen_layers_learns_again_less_and_less_often_and_is_told_why() -> None:
    job, a, b = job_that_has_unfrozen()
    c = job.join("c")
    heard = []
    for _ in range(60):
        if c.replica.phase.value != "asking":
            if c.formed is not None and c.replica.version != c.formed.version:
                c.loads()
            asks_as(c, "p", frozen="layer 1")
        for member in (a, b):
            asks_as(member, "p", frozen="none")
        job.passes(0.5)
        they_vote(a, b)
        assert a.hears()[-1] == b.hears()[-1] == "commit"
        heard += c.hears()
    assert heard.count("quorum 1 step 1 learner") == 1
    assert 3 <= sum("learner" in words for words in heard) <= 8
    assert any("it has layer 1, they have none" in words for words in heard)


def test_a_member_that_freezes_something_by_itself_waits_and_the_others_go_on() -> None:
    job, a, b = job_that_has_unfrozen()
    asks_as(a, "p", frozen="none")
    asks_as(b, "p", frozen="layer 1")
    job.passes(2.0)
    assert a.hears()[-1] == "quorum 2 step 1 healthy"
    assert b.hears()[-1].startswith("pending: b:1 cannot train with a:1: it has layer 1, they have none")


def test_a_group_that_does_not_know_that_it_is_behind_learns_as_well() -> None:
    """It was stopped while the others went on and unfroze layers, and asks with the state that it holds."""
    job, a, b = job_that_has_unfrozen()
    c = job.join("c")
    c.replica.caught_up(a.replica.version)
    for _ in range(2):
        for member in (a, b):
            asks_as(member, "p", frozen="none")
        for member in (a, b):
            member.votes()
            member.hears()
    asks_as(c, "p", frozen="layer 1")
    for member in (a, b):
        asks_as(member, "p", frozen="none")
    assert c.hears()[-1].endswith("step 3 learner")


def test_one_of_another_layout_that_waits_is_nobody_to_train_with() -> None:
    """Else the quorum would be held for the other one as for one that could be done without: once, and with a limit."""
    job = Job(least=2)
    a, b = job.join("a", join_stall_limit_s=1.0), job.join("b")
    for _ in range(2):
        for member in (a, b):
            asks_as(member, "x")
        they_vote(a, b)
    c = job.join("c")
    asks_as(c, "x")
    b.dies()
    asks_as(a, "x")
    asks_as(job.join("d"), "y")
    c.ends()
    for _ in range(2):
        asks_as(c, "x", at_end=True)
        job.passes(3.0)
        assert job.lighthouse._holds.is_on
        c.comes_in(load=False)
    asks_as(c, "x", at_end=True)
    job.passes(3.0)
    assert job.lighthouse._holds.is_on
    c.comes_in()
    asks_as(c, "x")
    assert [m.hears()[-1].split()[-1] for m in (a, c)] == ["healthy"] * 2
