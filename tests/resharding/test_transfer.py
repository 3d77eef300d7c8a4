"""The moments at which a re-sharded transfer decides whose state counts, one after the other, without threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from support.waiting import wait_until

from torchft_ckpt.checkpointing.resharding.plan import Place, Plan, PlannedPart
from torchft_ckpt.checkpointing.resharding.transfer import BoxTransfer
from torchft_ckpt.checkpointing.state.regions import Region
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.errors import SourceLostError


def transfer_of(
    holders: dict[str, list[int]],
    groups: dict[str, int],
    num_parts: int,
    candidates: list[int] | None = None,
    *,
    ranks: Sequence[str] = (),
    failed: Sequence[str] = (),
) -> BoxTransfer:
    """Parts of 10 bytes; `holders` is what each source can give, and who has `failed` did so before there was a plan."""
    target = torch.empty(10 * num_parts, dtype=torch.uint8)
    boxes = [Box((10 * number,), (10,)) for number in range(num_parts)]
    parts = [
        PlannedPart(f"t{number}", box, target, memoryview(b""), Region(10 * number, (), 10))
        for number, box in enumerate(boxes)
    ]
    places = {
        name: {number: Place(0, number, 0, boxes[number]) for number in numbers} for name, numbers in holders.items()
    }
    transfer = BoxTransfer()
    candidates = sorted(set(groups.values())) if candidates is None else candidates
    for name in failed:
        transfer.fail_source(name, lost(name))
    transfer.begin(Plan(parts, places, groups), candidates, max_units=10, ranks=ranks)
    return transfer


def ask(transfer: BoxTransfer, name: str, at_most: int = 10) -> list[int]:
    """What a source is asked for next. That there is nothing is no reason to wait here."""
    guard = threading.Timer(5.0, transfer.end, [lost("the test")])
    guard.start()
    try:
        return (transfer.next_batch(stream_of(transfer, name), name, name) or [])[:at_most]
    finally:
        guard.cancel()


def stream_of(transfer: BoxTransfer, name: str) -> int:
    """The one stream of a source."""
    return next(iter(transfer._ledger.streams_over(name)), 0) or transfer.open_stream(name, name)


def bring(transfer: BoxTransfer, name: str, *parts: int) -> None:
    """Have a source bring parts; of another group than the primary they come, and do not count yet."""
    for part in parts:
        transfer.arrived(stream_of(transfer, name), name, name, part, bytes(16))


def confirm(transfer: BoxTransfer, name: str, part: int, group: int) -> None:
    """A group says that it has the same as a source sent."""
    transfer.confirmed(stream_of(transfer, name), name, [part], group)


def is_held(transfer: BoxTransfer, part: int) -> bool:
    return part not in transfer.missing()


def lost(name: str) -> SourceLostError:
    return SourceLostError(f"{name} is gone", name)


def test_the_primarys_parts_are_held_and_the_last_one_ends_it():
    transfer = transfer_of({"a": [0, 1]}, {"a": 0}, 2)
    assert ask(transfer, "a") == [0]
    bring(transfer, "a", 0)
    assert ask(transfer, "a") == [1]
    assert not transfer.over
    bring(transfer, "a", 1)
    assert (transfer.over, transfer.outcome, transfer.received_bytes) == (True, None, 20)


def test_what_agreed_with_a_primary_that_is_lost_meanwhile_is_not_held():
    """The primary's digest came; before the part was noted, another group had been adopted, and compared."""
    transfer = transfer_of({"a": [0, 1], "b": [0, 1], "c": [0, 1]}, {"a": 0, "b": 1, "c": 2}, 2)
    (part,) = ask(transfer, "c", 1)
    bring(transfer, "c", part)
    transfer.fail_source("a", lost("a"))
    assert (transfer.primary, transfer.to_confirm()) == (1, [])
    transfer.adopted([], 1)
    confirm(transfer, "c", part, 0)
    transfer.diverged("c", [part], 0)
    assert not is_held(transfer, part) and transfer.divergences() == {}
    confirm(transfer, "c", part, 1)
    assert is_held(transfer, part)


def test_a_group_that_differed_from_a_lost_primary_can_give_everything_when_it_is_adopted():
    transfer = transfer_of({"a": [0, 1, 2], "b": [0, 1, 2]}, {"a": 0, "b": 1}, 3)
    bring(transfer, "a", 0)
    transfer.diverged("b", [1, 2], 0)
    assert transfer.divergences() == {"b": "differences in t1, t2"}
    transfer.fail_source("a", lost("a"))
    assert transfer.to_confirm() == [0]
    transfer.adopted([0], 1)
    assert not is_held(transfer, 0) and transfer.divergences() == {}
    given: list[int] = []
    while not transfer.over:
        batch = ask(transfer, "b")
        assert batch
        given += batch
        bring(transfer, "b", *batch)
    assert sorted(given) == [0, 1, 2]
    assert transfer.outcome is None


def test_nothing_is_asked_for_while_what_is_held_is_compared():
    transfer = transfer_of({"a": [0, 1], "b": [0, 1]}, {"a": 0, "b": 1}, 2)
    bring(transfer, "a", 0)
    transfer.fail_source("a", lost("a"))
    asked = threading.Thread(target=ask, args=(transfer, "b"))
    asked.start()
    wait_until(lambda: transfer._ledger.num_streams() == 2, "the other source asks")
    assert transfer._ledger.in_flight() == 0
    transfer.adopted([], 1)
    asked.join(60)
    assert transfer._ledger.in_flight() == 0b10


def test_a_transfer_whose_last_part_came_during_the_comparison_ends_with_it():
    transfer = transfer_of({"a": [0, 1], "b": [0, 1]}, {"a": 0, "b": 1}, 2)
    batch = ask(transfer, "b", 1)
    (other,) = {0, 1} - set(batch)
    bring(transfer, "a", other)
    transfer.fail_source("a", lost("a"))
    bring(transfer, "b", *batch)
    assert not transfer.over
    transfer.adopted([], 1)
    assert transfer.over and transfer.outcome is None


def test_a_heir_that_is_lost_too_gives_way_to_the_next():
    transfer = transfer_of({"a": [0], "b": [0], "c": [0]}, {"a": 0, "b": 1, "c": 2}, 1)
    transfer.fail_source("a", lost("a"))
    transfer.fail_source("b", lost("b"))
    assert transfer.primary == 2
    transfer.adopted([], 2)
    transfer.fail_source("c", lost("c"))
    assert isinstance(transfer.outcome, SourceLostError)
    assert str(transfer.outcome) == "no source is left for t0. a: a is gone; b: b is gone; c: c is gone"


def test_a_group_whose_state_could_not_stand_for_the_primarys_is_no_heir():
    transfer = transfer_of({"a": [0], "b": [0]}, {"a": 0, "b": 1}, 1, candidates=[0])
    transfer.fail_source("a", lost("a"))
    assert transfer.over and isinstance(transfer.outcome, SourceLostError)


def test_a_group_that_cannot_give_everything_is_no_heir():
    transfer = transfer_of({"a": [0, 1], "b": [1]}, {"a": 0, "b": 1}, 2)
    transfer.fail_source("a", lost("a"))
    assert transfer.over


def test_the_primary_stays_as_long_as_it_can_give_what_is_missing():
    transfer = transfer_of({"a0": [0], "a1": [1], "b": [0, 1]}, {"a0": 0, "a1": 0, "b": 1}, 2)
    bring(transfer, "a0", 0)
    transfer.fail_source("a0", lost("a0"))
    assert (transfer.primary, transfer.to_confirm(), transfer.over) == (0, None, False)


def test_a_transfer_of_nothing_is_over_at_once():
    assert transfer_of({}, {}, 0).over


def test_what_a_source_sent_in_vain_is_counted_apart():
    transfer = transfer_of({"a": [0], "b": [0]}, {"a": 0, "b": 1}, 1)
    transfer.diverged("b", [0], 0)
    bring(transfer, "a", 0)
    assert (transfer.received_bytes, transfer.wasted_bytes, transfer.total_bytes) == (10, 10, 10)


def test_failures_are_told_once_and_the_first_counts():
    transfer = transfer_of({"a": [0], "b": [0]}, {"a": 0, "b": 0}, 1)
    transfer.fail_source("a", lost("a"))
    transfer.fail_source("a", lost("another"))
    assert {name: str(error) for name, error in transfer.failures().items()} == {"a": "a is gone"}
    assert transfer.num_sources() == 1


def test_a_comparison_with_a_group_that_is_lost_meanwhile_counts_for_nothing():
    transfer = transfer_of({"a": [0, 1], "b": [0, 1], "c": [0, 1]}, {"a": 0, "b": 1, "c": 2}, 2)
    bring(transfer, "a", 0)
    transfer.fail_source("a", lost("a"))
    transfer.fail_source("b", lost("b"))
    transfer.adopted([], 1)
    assert (transfer.primary, transfer.to_confirm()) == (2, [0])


def test_what_is_equal_here_is_skipped_and_the_rest_comes_from_the_sources() -> None:
    transfer = transfer_of({"a": [0, 1, 2]}, {"a": 0}, 3)
    assert transfer.claim([0, 1], 0) == [0, 1]
    assert (ask(transfer, "a"), transfer.missing()) == ([2], [0, 1, 2])  # nobody is asked for what is compared
    transfer.compared([1], 0)
    assert (transfer.missing(), transfer.skipped_bytes) == ([0, 2], 10)
    bring(transfer, "a", 2)
    assert ask(transfer, "a") == [0]
    bring(transfer, "a", 0)
    assert (transfer.over, transfer.outcome, transfer.received_bytes, transfer.skipped_bytes) == (True, None, 20, 10)


def test_the_last_part_that_is_compared_ends_it() -> None:
    transfer = transfer_of({"a": [0, 1]}, {"a": 0}, 2)
    bring(transfer, "a", 0)
    assert transfer.claim([0, 1], 0) == [1]  # what is here need not be compared
    assert not transfer.over
    transfer.compared([1], 0)
    assert (transfer.over, transfer.outcome) == (True, None)


def test_what_is_compared_with_a_primary_that_is_lost_meanwhile_does_not_count() -> None:
    transfer = transfer_of({"a": [0, 1, 2], "b": [0, 1, 2]}, {"a": 0, "b": 1}, 3)
    transfer.claim([0], 0)
    transfer.compared([0], 0)
    assert transfer.claim([1], 0) == [1]
    transfer.fail_source("a", lost("a"))
    assert transfer.to_confirm() is None, "what is being compared is not known"
    transfer.compared([1], 0)
    assert transfer.to_confirm() == [0]
    assert transfer.claim([1], 1) == [], "what is held is compared first"
    transfer.adopted([0], 1)
    assert transfer.claim([1], 0) == [], "the digests are those of a group that does not count any more"
    assert (transfer.missing(), transfer.skipped_bytes, transfer.received_bytes) == ([0, 1, 2], 0, 0)
    bring(transfer, "b", 0, 1, 2)
    assert (transfer.outcome, transfer.received_bytes, transfer.over) == (None, 30, True)


def test_copies_come_from_who_is_first_and_from_others_once_they_are_known_to_hold_the_same() -> None:
    transfer = transfer_of({"b": [0, 1, 2], "a": [0, 1, 2]}, dict.fromkeys("ab", 0), 3, ranks="ab")
    asked = threading.Thread(target=ask, args=(transfer, "b"))
    asked.start()
    wait_until(lambda: transfer._ledger.num_streams() == 1, "the other source asks")
    assert transfer._ledger.in_flight() == 0
    assert [transfer.primary_holder(part) for part in range(3)] == ["a", "a", "a"]
    transfer.allow({"b": [1]}, 0)
    asked.join(60)
    assert transfer._ledger.in_flight() == 0b10
    bring(transfer, "b", 1)
    bring(transfer, "a", 0, 2)
    assert transfer.over and transfer.outcome is None


def test_a_transfer_ends_when_copies_are_compared_and_not_before() -> None:
    """Else nobody would be told that they differ."""
    transfer = transfer_of({"a": [0], "b": [0]}, dict.fromkeys("ab", 0), 1, ranks="ab")
    bring(transfer, "a", 0)
    assert not transfer.over
    transfer.allow({}, 1)
    assert not transfer.over
    transfer.allow({}, 0)
    assert transfer.over and transfer.outcome is None


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_copy_takes_the_place_of_one_that_is_lost_if_it_is_known_to_be_equal(is_equal: bool) -> None:
    """What is here of the other would not be of one state with it."""
    transfer = transfer_of({"a": [0, 1], "b": [0, 1]}, dict.fromkeys("ab", 0), 2, ranks="ab")
    bring(transfer, "a", 0)
    transfer.fail_source("a", lost("a"))
    assert not transfer.over
    transfer.allow({"b": [0, 1] if is_equal else [0]}, 0)
    if is_equal:
        bring(transfer, "b", *ask(transfer, "b"))
        assert transfer.over and transfer.outcome is None
    else:
        assert isinstance(transfer.outcome, SourceLostError) and "no source is left for t1. a: " in str(
            transfer.outcome
        )


def test_copies_of_a_group_that_takes_the_place_of_a_lost_one_come_from_one_of_its_ranks() -> None:
    groups = {"a": 0, "b": 1, "c": 1}
    transfer = transfer_of({name: [0, 1] for name in groups}, groups, 2, ranks="a")
    bring(transfer, "a", 0)
    transfer.fail_source("a", lost("a"))
    transfer.adopted([0], 1)
    assert [transfer.primary_holder(part) for part in range(2)] == ["b", "b"]
    transfer.allow({"c": [1]}, 1)
    assert ask(transfer, "c") == [1]
    bring(transfer, "c", 1)
    bring(transfer, "b", 0)
    assert transfer.over and transfer.outcome is None


def test_copies_of_a_rank_that_was_lost_before_all_was_planned_come_from_its_neighbour() -> None:
    transfer = transfer_of({"a": [0], "b": [0]}, dict.fromkeys("ab", 0), 1, ranks="ab", failed=["a"])
    bring(transfer, "b", *ask(transfer, "b"))
    assert transfer.over and transfer.outcome is None
