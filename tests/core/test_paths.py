"""Over which of a source's addresses a receiver takes what it sends."""

from __future__ import annotations

from collections.abc import Container

from torchft_ckpt.core.transfer.paths import Paths, Use, describe_paths

MIB = 2**20


def paths(*names: str, source: str = "a", grain_bytes: int = 0) -> Paths:
    known = Paths(grain_bytes)
    for name in names:
        known.add(source, name, 0.0)
    return known


def dropped(known: Paths, now: float, idle: Container[str] = ()) -> list[str]:
    slow, again = known.judge(now, idle)
    assert again == []
    return slow


def uses(known: Paths, source: str = "a") -> dict[str, Use]:
    return {name: path.use for name, path in known.to(source).items()}


def test_a_path_that_gives_less_than_a_quarter_of_the_fastest_is_dropped_after_two_seconds() -> None:
    known = paths("ethernet", "ib0", "ib1")
    for second in (0, 1):
        for name, num_bytes in [("ethernet", 24), ("ib0", 100), ("ib1", 26)]:
            known.gave(name, num_bytes, second + 0.9)
        assert dropped(known, second + 0.9) == []
        assert dropped(known, second + 1.0) == (["ethernet"] if second else [])
    assert [known.is_used(name) for name in ("ethernet", "ib0", "ib1")] == [False, True, True]


def test_a_link_that_falls_silent_is_slow_whatever_it_gave_before() -> None:
    known = paths("one", "two", grain_bytes=5)
    for second in range(10):
        for name in ("one", "two"):
            known.gave(name, 100, second + 0.5)
        assert dropped(known, second + 1.0) == []
    for second, slow in [(10, []), (11, ["one"])]:
        known.gave("two", 100, second + 0.5)
        assert dropped(known, second + 1.0) == slow


def test_one_slow_second_is_forgiven() -> None:
    known = paths("one", "two")
    for second in range(20):
        known.gave("one", 1 if second % 2 else 100, second + 0.5)
        known.gave("two", 100, second + 0.5)
        assert dropped(known, second + 1.0) == []


def test_what_may_be_on_its_way_into_a_block_is_taken_for_given() -> None:
    known = paths("slow", "fast", grain_bytes=20)
    for now in (1.0, 2.0, 3.0):
        known.gave("fast", 100, now)
        known.gave("slow", 10, now)
        assert dropped(known, now) == []


def test_paths_are_not_judged_while_there_is_nothing_to_ask_for() -> None:
    known = paths("slow", "fast")
    known.gave("fast", 100, 1.0)
    assert dropped(known, 1.5, idle={"a"}) == []
    for now, idle, slow in [(2.5, "", []), (3.5, "a", []), (4.5, "", []), (5.5, "", ["slow"])]:
        known.gave("fast", 100, now)
        assert dropped(known, now, idle) == slow


def test_where_nothing_comes_over_any_path_all_are_kept() -> None:
    known = paths("one", "two")
    assert dropped(known, 5.0) == []


def test_a_path_that_came_later_is_measured_from_then_on() -> None:
    known = paths("early")
    known.gave("early", 100, 1.0)
    known.add("a", "late", 0.8)
    assert dropped(known, 1.0) == []
    for now, slow in [(1.9, []), (2.9, ["late"])]:
        known.gave("early", 100, now)
        known.gave("late", 20, now)
        assert dropped(known, now) == slow, "the seconds of two paths need not be the same"


def test_a_slow_source_is_not_dropped_for_a_fast_one() -> None:
    known = paths("slow")
    known.add("b", "fast", 0.0)
    for now in (1.0, 2.0, 3.0):
        known.gave("fast", 100, now)
        assert dropped(known, now) == []


def test_the_slow_paths_are_used_again_where_no_other_is_left() -> None:
    known = paths("slow", "fast", "other")
    for now, slow in [(1.0, []), (2.0, ["slow"])]:
        known.gave("fast", 100, now)
        known.gave("other", 100, now)
        assert dropped(known, now) == slow
    assert known.lose("fast") == []
    assert known.lose("other") == ["slow"]
    assert uses(known) == {"slow": Use.USED, "fast": Use.LOST, "other": Use.LOST}
    assert known.lose("slow") is None


def test_the_slow_paths_are_used_again_where_the_fast_ones_fall_silent() -> None:
    known = paths("slow", "fast")
    for now, slow in [(1.0, []), (2.0, ["slow"])]:
        known.gave("fast", 100, now)
        assert known.judge(now, ()) == (slow, [])
    assert known.judge(2.9, ()) == ([], [])
    assert known.judge(3.0, ()) == ([], ["slow"])
    for now, slow in [(4.0, []), (5.0, ["fast"])]:
        known.gave("slow", 1, now)
        assert known.judge(now, ()) == (slow, [])
    assert uses(known) == {"slow": Use.USED, "fast": Use.SLOW}


def test_a_source_of_one_path_loses_all_with_it() -> None:
    known = paths("one")
    known.add("a", "one", 5.0)
    assert known.lose("one") is None and not known.is_used("one")
    assert known.is_used("a peer that was never added") and known.lose("a peer that was never added") is None


def test_what_each_path_gave_is_said_with_its_rate() -> None:
    known = paths("http://10.0.0.1:4", "http://10.1.0.1:4")
    for now in (1.0, 2.0):
        known.gave("http://10.0.0.1:4", 10 * MIB, now)
        known.gave("http://10.1.0.1:4", 100 * MIB, now)
        dropped(known, now)
    assert describe_paths(known.to("a")) == (
        "http://10.0.0.1:4: 20.0 MiB at 10.5 MB/s (dropped as slow), http://10.1.0.1:4: 200.0 MiB at 104.9 MB/s"
    )
