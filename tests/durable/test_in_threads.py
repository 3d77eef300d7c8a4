"""Work on a few threads, or on one where there are no more."""

from __future__ import annotations

import threading

import pytest

from torchft_ckpt.threads import in_threads


@pytest.mark.parametrize("num_threads", [1, 3, 50])
@pytest.mark.parametrize("num_items", [0, 1, 2, 20])
def test_all_is_done_once_and_in_order(num_threads: int, num_items: int) -> None:
    called: list[int] = []

    def square(number: int) -> int:
        called.append(number)
        return number * number

    assert in_threads(square, range(num_items), num_threads) == [number * number for number in range(num_items)]
    assert sorted(called) == list(range(num_items))


def test_it_is_done_at_once() -> None:
    barrier = threading.Barrier(4, timeout=30)
    places = in_threads(lambda _: barrier.wait(), range(4), 4)
    assert sorted(places) == [0, 1, 2, 3], "each has waited for all the others"


def test_where_no_thread_can_be_had_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert in_threads(str, range(5), 4) == ["0", "1", "2", "3", "4"]


def test_the_first_error_is_raised_and_no_more_is_begun() -> None:
    called: list[int] = []

    def fail(number: int) -> None:
        called.append(number)
        raise ValueError(str(number))

    with pytest.raises(ValueError, match="0"):
        in_threads(fail, range(1000), 1)
    assert called == [0]


def test_an_interrupt_is_not_taken_for_an_error_of_the_work() -> None:
    def fail(number: int) -> None:
        raise KeyboardInterrupt if number else ValueError

    with pytest.raises(KeyboardInterrupt):
        barrier = threading.Barrier(2, timeout=30)

        def both(number: int) -> None:
            barrier.wait()
            fail(number)

        in_threads(both, range(2), 2)
