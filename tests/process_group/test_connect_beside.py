"""Members connect with a newcomer while their group is in use; a configure at the same place takes what was made."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from support.rings import FREED_WITHIN, Ring
from torch.distributed import ReduceOp

from torchft_ckpt.errors import ProcessGroupAbortedError, ProcessGroupConfigureError
from torchft_ckpt.process_group import ProcessGroup, ProcessGroupGloo


def connect(ring: Ring, address: str, ranks: list[int] | None = None) -> list[Exception | None]:
    """Connect all members (or those) there beside what they use; return what each raised."""
    size = len(ring.members)
    return ring.each(lambda rank, group: group.connect_beside(address, f"r{rank}", rank, size)(), ranks)  # type: ignore[return-value]


def reduced(ring: Ring, ranks: list[int]) -> list[object]:
    def reduce(rank: int, group: ProcessGroup) -> float:
        tensor = torch.ones(3)
        group.allreduce([tensor], ReduceOp.SUM).wait()
        return float(tensor[0])

    return ring.each(reduce, ranks)


def test_the_group_in_use_goes_on_and_a_configure_takes_what_was_made(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(3)
    ring.configure([0, 1])
    before, address = ring.members[0]._session, ring.new_address()  # type: ignore[attr-defined]
    assert connect(ring, address) == [None] * 3
    assert reduced(ring, [0, 1]) == [2.0, 2.0] and ring.members[0]._session is before  # type: ignore[attr-defined]
    made = [group._beside[1] for group in ring.members]  # type: ignore[attr-defined]
    taken = ring.each(lambda rank, group: group.configure(address, f"r{rank}", rank, 3, 8))
    assert taken == [None] * 3 and [group._session for group in ring.members] == made  # type: ignore[attr-defined]
    assert reduced(ring, [0, 1, 2]) == [3.0] * 3
    assert [(group.rank(), group.size(), group.errored()) for group in ring.members] == [(r, 3, None) for r in range(3)]
    before.join(60.0)
    assert before.phase.value == "ended"


def test_one_that_does_not_come_is_named_and_the_group_in_use_goes_on(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(3)
    ring.configure([0, 1])
    for group in ring.members:
        group._connect_timeout = timedelta(seconds=5)  # type: ignore[attr-defined]
    errors = connect(ring, ring.new_address(), [0, 1])
    assert all(isinstance(error, ProcessGroupConfigureError) and "rank 2 never came" in str(error) for error in errors)
    assert reduced(ring, [0, 1]) == [2.0, 2.0]


def test_another_meeting_ends_the_one_before_at_once(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)
    first, second = ring.new_address(), ring.new_address()
    with ThreadPoolExecutor() as pool:
        waits = ring.members[0].connect_beside(first, "r0", 0, 2)
        earlier = pool.submit(waits)
        assert connect(ring, second) == [None, None]
        assert isinstance(earlier.exception(FREED_WITHIN.total_seconds()), ProcessGroupAbortedError)


def test_what_was_made_and_has_ended_since_is_not_taken(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)
    address = ring.new_address()
    assert connect(ring, address) == [None, None]
    ring.members[0]._beside[1].end(ProcessGroupAbortedError("a test"))  # type: ignore[attr-defined]
    with pytest.raises(ProcessGroupConfigureError, match="has ended since"):
        ring.members[0].configure(address, "r0", 0, 2, 8)


def test_an_abort_of_the_group_in_use_leaves_what_was_made(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)
    ring.configure()
    address = ring.new_address()
    assert connect(ring, address) == [None, None]
    ring.members[0].abort()
    assert ring.each(lambda rank, group: group.configure(address, f"r{rank}", rank, 2, 8)) == [None, None]
    assert reduced(ring, [0, 1]) == [2.0, 2.0]


def test_nothing_is_made_after_a_shutdown() -> None:
    group = ProcessGroupGloo()
    group.shutdown()
    with pytest.raises(ProcessGroupAbortedError):
        group.connect_beside("127.0.0.1:1/with_another", "r0", 0, 2)()


def test_a_shutdown_ends_what_was_made() -> None:
    group = ProcessGroupGloo()
    group.connect_beside("127.0.0.1:1/alone", "r0", 0, 1)()
    made = group._beside[1] if group._beside is not None else None
    group.shutdown()
    assert made is not None and made.phase.value == "ended"
