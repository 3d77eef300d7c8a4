"""docs/troubleshooting.md: who searches it for the words of a message that says what to do finds them."""

from __future__ import annotations

import pytest
from support.advice import Message, fits, messages, parts_of, quotes
from support.pages import REPO

PAGE = REPO / "docs/troubleshooting.md"
QUOTED = quotes(PAGE.read_text())


@pytest.fixture(scope="module")
def said() -> list[Message]:
    """What the package says. To read all of it takes a second, which is nobody's who only collects tests."""
    return messages(REPO / "torchft_ckpt")


def test_each_message_that_says_what_to_do_is_on_the_page_by_its_words(said: list[Message]) -> None:
    missing = [
        f"{message.place} says what to do: {message.text!r}. Add a row to {PAGE.name} under the symptom that brings it: first"
        " some of its words in backticks, three or more, with `...` for what the program fills in; then what to type"
        for message in said
        if message.advises and not any(fits(quote, message.text) for quote in QUOTED)
    ]
    assert missing == []


def test_each_quote_of_the_page_is_what_the_package_says(said: list[Message]) -> None:
    """A message may be put together from several strings, so each part of a quote by itself is looked for."""
    texts = "\n".join(message.text for message in said)
    old = [
        f"no message has {part!r} any more: mend {quote!r}"
        for quote in QUOTED
        for part in parts_of(quote)
        if part not in texts
    ]
    assert old == []


@pytest.mark.parametrize(
    ("text", "advises"),
    [
        ("no lighthouse address: pass --lighthouse or set TORCHFT_LIGHTHOUSE", True),
        ("others may read the token in …; `chmod 600` keeps it secret", True),
        ("the state has … plain values, most of them in …. Put them into a tensor", True),
        ("Where that group is slow, give all groups a longer timeout", True),
        ("lost the connection to the lighthouse at …; connecting again", False),
        ("…: step …, … tensors, … values", False),
        ("group … ended …; it starts again in … s", False),
    ],
)
def test_a_message_that_advises_is_told_from_one_that_does_not(text: str, advises: bool) -> None:
    assert Message("", text).advises is advises
