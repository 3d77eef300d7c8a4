"""Which forward passes of a loop still wait for their backward passes.

A story is a line: `a` is a forward pass of A, `A` its backward pass, `|` begins a step, `-` clears gradients in it,
`?` asks.
"""

from __future__ import annotations

import pytest

from torchft_ckpt.core.training.graphs import OpenGraphs


def told(story: str) -> str:
    """The answers, `y` or `n`."""
    graphs, answers = OpenGraphs(lambda: None), []
    for letter in story:
        if letter == "|":
            graphs.begins()
        elif letter == "-":
            graphs.clears()
        elif letter == "?":
            answers.append("y" if graphs.is_open else "n")
        elif letter.islower():
            graphs.opens(letter)
        else:
            graphs.closes(letter.lower())
    return "".join(answers)


@pytest.mark.parametrize(
    ("loop", "answers"),
    [
        ("|aA?|aA?|aA?", "nnn"),
        ("|aa?A?|aA?", "ynn"),  # two forward passes, one backward pass
        ("|cCgcC?|cCG?|cCgcC?|cCG?", "ynyn"),  # DCGAN
        ("|gG?|gGl?|l?gG?|l?", "nynnn"),  # a look that nobody goes back through
        ("|aA?b|?B?|?aA?b|?B?", "nynnnyn"),  # computed between two steps
        ("|aA?|aAl?|aA?|aAl?|aA?|aAl?", "nyynnn"),  # the same of every second step
        ("g|cCgcC?|cCG?|cCgcC?|cCG?", "ynyn"),  # DCGAN, and a look before training
        ("|cCgcCl?|cCG?|cCgcCl?|cCG?|cCgcCl?|cCG?", "yyynyn"),  # DCGAN, and a look in each of its critic's steps
        ("|g?|?|?|?", "yynn"),  # what was computed before the last step is over
        ("|a-?Aa-?Aa-?A?", "yyyn"),  # clears gradients before each of several backward passes
        ("|a-?b-?A?B?", "ynnn"),  # the same of two networks, which are not told from two that were skipped
        ("|-a-?a-?-aA?", "ynn"),  # skips what overflows, before its backward pass
    ],
)
def test_where_the_loop_may_go_back_through_weights_of_before(loop: str, answers: str) -> None:
    assert told(loop) == answers


def begun_again(steps: list[str]) -> list[int]:
    """By its forward (`a`, `b`) and backward passes (`A`, `B`), in which of its steps a loop is said to begin one again."""
    told: list[int] = []
    begun: list[str] = []
    graphs = OpenGraphs(lambda: told.append(len(begun) - 1))
    for step in steps:
        graphs.begins()
        begun.append(step)
        for letter in step:
            (graphs.opens if letter.islower() else graphs.closes)(letter.lower())
    return told


def test_a_forward_pass_begins_a_step_again_if_one_of_the_same_module_in_it_waits_for_its_backward_pass() -> None:
    assert begun_again(["aabAB", "aAaA"]) == [0], "accumulated gradients are gone back through one by one"
    assert begun_again(["aA", "a", "aA"]) == [], "it was let go with its step"
    assert begun_again(["aA", "aaA", *["aA"] * 20, "aaA", "aaaA"]) == [1, 22]


@pytest.mark.parametrize("turn", [["aaA", "baBA"], ["aaA"] * 5 + ["baBA"], ["aaaA"] * 3 + ["aA"]])
def test_a_module_that_often_computes_twice_before_one_backward_pass_leaves_nothing_out(turn: list[str]) -> None:
    """A critic of a real batch and a false one; microbatches of which the last step of an epoch has one only."""
    assert begun_again(turn * 8) == [0]


def test_a_loop_that_was_seen_to_go_back_into_the_step_before_is_known_for_that() -> None:
    assert told("|g?|Gg?|g?|?") == "yyyy", "a look later on does not change that"
