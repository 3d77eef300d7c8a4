"""Which optimizers of a loop share a step.

A story is a line: `a` clears A's gradients, `+` averages, `A` steps A, `|` marks a beginning and `!` what is refused.
"""

from __future__ import annotations

import pytest

from torchft_ckpt.core.training.shared_step import SharedStep


def told(story: str) -> str:
    """Where steps begin in a loop. A step is decided by the first optimizer that steps."""
    shared, is_decided, words = SharedStep(), True, []
    for letter in story:
        if letter.islower():
            if shared.clears(letter.upper(), is_decided=is_decided):
                words.append("|")
                is_decided = False
        elif letter.isupper():
            if not shared.steps(letter):
                return "".join([*words, "!"])
            is_decided = True
        words.append(letter)
    return "".join(words)


@pytest.mark.parametrize(
    "loop",
    [
        "|a+A|a+A|a+A",
        "|ab+AB|ab+AB",
        "|a+b+AB|a+b+AB",
        "|a+A|b+B|a+A|b+B",
        "|a+A|a+A|a+A|b+B|a+A",  # five of one for each of the other
        "|ab+AaB|b+AaB|b+AaB",  # one is stepped and cleared after the other
        "|abc+AaBbC|c+AaBbC|c+A",
        "|a|a+A",  # a batch was skipped
        "|ab|ab+AB",
        "|ab+Aa+!",  # B was cleared and never stepped: A's step cannot begin
        "|ab+Aa+B|b",  # what is averaged in between is of the step just decided
    ],
)
def test_where_steps_begin(loop: str) -> None:
    assert told(loop.replace("|", "").replace("!", "A")) == loop


def test_a_step_in_place_of_a_discarded_one_is_of_the_same_optimizers() -> None:
    shared = SharedStep()
    for optimizer in "ab":
        shared.clears(optimizer, is_decided=optimizer == "a")
    assert (shared.steps("a"), shared.has_stepped("a"), shared.has_stepped("b")) == (True, True, False)
    assert shared.clears("a", is_decided=True) is False, "it is ahead of the other"
    assert shared.again() == {"a", "b"}
    assert (shared.steps("a"), shared.clears("a", is_decided=True)) == (True, False)


def test_who_stepped_in_a_first_step_that_a_forward_pass_began_takes_part_in_the_one_in_its_place() -> None:
    shared = SharedStep()
    shared.begins()
    assert shared.steps("a")
    assert shared.again() == {"a"}, "its gradients are those of a discarded step"


@pytest.mark.parametrize("begins_by", ["clearing", "forward pass", "again"])
def test_which_optimizers_ended_the_last_step_is_known_when_the_next_one_begins(begins_by: str) -> None:
    shared = SharedStep()
    assert not shared.last
    shared.clears("a", is_decided=True)
    shared.steps("a")
    if begins_by == "clearing":
        shared.clears("b", is_decided=True)
    elif begins_by == "again":
        shared.again()
    else:
        shared.begins()
    assert [*shared.last] == [{"a"}]
    shared.begins()
    assert [*shared.last] == [{"a"}], "no optimizer has stepped since"


def test_a_loop_that_clears_first_is_one_still_if_a_forward_pass_begins_a_step_in_place_of_a_discarded_one() -> None:
    shared = SharedStep()
    for is_discarded in (False, True, False):
        if is_discarded:
            shared.again()
        shared.clears("a", is_decided=not is_discarded)
        assert shared.clears_first
        shared.steps("a")
    shared.begins()
    shared.clears("a", is_decided=False)
    assert not shared.clears_first


def test_one_that_the_loop_has_put_another_in_place_of_holds_up_no_step() -> None:
    shared = SharedStep()
    shared.clears("old", is_decided=True)
    assert shared.steps("new"), "it was made as a state was loaded, in the middle of the old one's step"
    shared.keep(["new"])
    assert shared.clears("new", is_decided=True) and shared.joined == {"new"}
