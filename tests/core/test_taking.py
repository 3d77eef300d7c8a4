"""When a step that counts is taken: the table of `core.training.taking`."""

from __future__ import annotations

import pytest

from torchft_ckpt.core.training.taking import StepTaking


def told(story: str) -> str:
    """Where a step is taken (`!`), or torn (`x`). `a` begins and `A` ends; at `|` the next step begins."""
    taking, words = StepTaking(), []
    for letter in story:
        words.append(letter)
        if letter == "|":
            words += ["x"] if taking.is_inside else []
            taking.closes()
        elif letter.islower():
            taking.enters(letter.upper())
        else:
            taking.ends(letter)
            words += ["!"] if taking.is_taken() else []
    return "".join(words)


@pytest.mark.parametrize(
    "steps",
    [
        "aA!|aA!|",
        "aA!bB!|aAbB!|",  # from the second step on it is known that both step
        "aA!bB!|aA|aA!|",  # B was left out once
        "aA!|bB!|aA!|bB!|",  # in turns
        "abBA!|",  # one within the other
        "a|xaA!|",  # broken off
        "aA!bB!|aAb|x",
        "||",  # nobody has stepped: all groups have found that the averages are of no use
        "A|aA!",  # of one who has not begun it means nothing
    ],
)
def test_where_a_step_is_taken(steps: str) -> None:
    assert told(steps.replace("!", "").replace("x", "")) == steps


def test_a_step_is_taken_when_those_have_ended_that_are_known_to_take_it_whoever_took_the_last_one() -> None:
    taking = StepTaking()
    for who in "AB":
        taking.enters(who)
        taking.ends(who)
    taking.closes()
    taking.enters("A")
    taking.ends("A")
    assert taking.is_taken(["A"]) and not taking.is_taken(["A", "B"]) and not taking.is_taken()
