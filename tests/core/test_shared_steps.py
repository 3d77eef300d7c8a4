"""Which optimizers of a loop share a step. A story is a line: `a` clears A's gradients, `A` steps it, `|` marks a beginning."""

from __future__ import annotations

import pytest

from torchft_ckpt.core.optimizers import SharedStep


def told(story: str) -> str:
    """Where steps begin in a loop. A step is decided by the first optimizer that steps."""
    shared, is_decided, words = SharedStep(), True, []
    for letter in story:
        if letter == "+":  # something is averaged
            if shared.is_due:
                shared.begins()
                words.append("|")
                is_decided = False
        elif letter.islower():
            if shared.clears(letter.upper(), is_decided=is_decided):
                words.append("|")
                is_decided = False
        else:
            if shared.steps(letter):
                words.append("|")
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
        "|ab+Aa|+A|ab+AB",  # B was cleared once and never stepped: A goes on by itself
        "|ab+Aa|A",
    ],
)
def test_where_steps_begin(loop: str) -> None:
    assert told(loop.replace("|", "")) == loop
