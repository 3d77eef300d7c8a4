"""Who trains together next: by scenarios, and against an oracle that knows the rule and nothing clever."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.thoroughness import by_default

from torchft_ckpt.core.coordination.quorum import Asked, QuorumVerdict, decide_quorum


def decide(
    asked: str, *, alive: str = "", last: str = "", least: int = 1, now: float = 1.0, shrink: str = ""
) -> QuorumVerdict:
    """Each letter is a member; all who asked did so at time 0."""
    return decide_quorum(
        alive=alive or asked,
        asked={name: Asked(at=0.0, shrink_only=name in shrink) for name in asked},
        last_quorum=last,
        min_replicas=least,
        join_timeout_s=60.0,
        now=now,
    )


def test_nobody_asked() -> None:
    verdict = decide("", alive="ab")
    assert (verdict.formed, verdict.reason) == (False, "no replica group has asked for a quorum")


def test_first_quorum_waits_for_the_living_until_the_join_timeout() -> None:
    early, late = decide("ab", alive="abc", now=59.9), decide("ab", alive="abc", now=60.0)
    assert (early.members, early.deadline, late.members) == ((), 60.0, ("a", "b"))
    assert "waiting at most 60 s for c" in early.reason
    assert "join timeout of 60 s passed without c" in late.reason


def test_survivors_need_not_wait_for_anybody() -> None:
    verdict = decide("ab", alive="abd", last="abc")
    assert (verdict.members, verdict.reason) == (("a", "b"), "all living members of the last quorum are back")


def test_fewer_than_the_least_say_who_is_here() -> None:
    verdict = decide("a", alive="a", last="ab", least=2)
    assert (verdict.formed, verdict.reason) == (False, "1 of at least 2 replica groups are here (a)")
    assert verdict.is_below_minimum


def test_one_that_is_slow_is_waited_for_and_does_not_make_them_too_few() -> None:
    verdict = decide("a", alive="ab", last="ab", least=2)
    assert (verdict.formed, verdict.is_below_minimum) == (False, False)
    assert verdict.reason == "1 of at least 2 replica groups are here (a); waiting for b"
    assert decide("ad", alive="ad", last="ab", least=2, shrink="a").is_below_minimum, "nobody else will come in"


def test_one_of_two_waits_for_one_that_hangs_until_it_is_dead() -> None:
    verdict = decide("a", alive="ab", last="ab", now=1e6)
    assert (verdict.formed, verdict.deadline) == (False, None), "time alone changes nothing"
    assert verdict.reason == "1 of 2 living replica groups have asked, more than half are needed; waiting for b"
    assert decide("a", alive="a", last="ab", now=1e6).members == ("a",)


def test_long_lists_of_names_are_cut() -> None:
    names = "abcdefgh"
    assert decide("abcdefgh" + "x", alive=names + "xyz", now=1.0).reason.endswith("for y, z")
    assert "b, c, d, e, f and 2 more" in decide("a", alive=names).reason


def dumb_oracle(
    alive: set[str], asked: dict[str, Asked], last: set[str], least: int, timeout: float, now: float
) -> set[str]:
    """The rule read aloud."""
    living_askers = {a for a in asked if a in alive}
    if last and any(asked[a].shrink_only for a in living_askers):
        living_askers = {a for a in living_askers if a in last}
    if not living_askers or len(living_askers) < least:
        return set()
    survivors = last & alive
    if survivors and survivors <= set(asked):
        return living_askers
    if len(living_askers) <= len(alive) / 2:
        return set()
    if alive <= set(asked):
        return living_askers
    first = min(asked[a].at for a in living_askers)
    return living_askers if now - first >= timeout else set()


NAMES = st.sets(st.sampled_from("abcdefg"))


@settings(max_examples=by_default(150, thorough=500), deadline=None)
@given(
    alive=NAMES,
    asked=st.dictionaries(
        st.sampled_from("abcdefg"), st.builds(Asked, at=st.integers(0, 20).map(float), shrink_only=st.booleans())
    ),
    last=NAMES,
    least=st.integers(1, 5),
    now=st.integers(20, 40).map(float),
)
@example(
    alive=set("abcdef"),
    asked={name: Asked(at=0.0, shrink_only=name == "c") for name in "abce"},
    last=set("abcd"),
    least=1,
    now=20.0,
)
@example(alive={"a"}, asked={"a": Asked(at=0.0, shrink_only=True)}, last={"b"}, least=1, now=20.0)
def test_agrees_with_the_dumb_oracle(
    alive: set[str], asked: dict[str, Asked], last: set[str], least: int, now: float
) -> None:
    verdict = decide_quorum(
        alive=alive, asked=asked, last_quorum=last, min_replicas=least, join_timeout_s=16.0, now=now
    )
    assert set(verdict.members) == dumb_oracle(alive, asked, last, least, 16.0, now)
    assert verdict.reason
    if verdict.deadline is not None:
        later = decide_quorum(
            alive=alive, asked=asked, last_quorum=last, min_replicas=least, join_timeout_s=16.0, now=verdict.deadline
        )
        assert now < verdict.deadline
        assert later.formed
