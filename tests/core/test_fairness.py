"""Chooses whose work is done next where clients want more of it than there are threads."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from torchft_ckpt.core.services.fairness import FairQueue


def begin_all(queue: FairQueue[str]) -> list[str]:
    begun = []
    while (next_turn := queue.begin()) is not None:
        begun.append(next_turn[1])
    return begun


def test_a_client_that_asks_for_one_thing_waits_for_one_turn_of_another_that_asks_for_a_hundred() -> None:
    queue: FairQueue[str] = FairQueue(num_at_once=1, num_long_at_once=1)
    for number in range(100):
        queue.put("greedy", f"greedy {number}", is_long=True)
    assert begin_all(queue) == ["greedy 0"]
    queue.put("honest", "honest 0", is_long=False)
    queue.end("greedy", is_long=True)
    assert begin_all(queue) == ["honest 0"]
    queue.end("honest", is_long=False)
    assert begin_all(queue) == ["greedy 1"]


def test_who_asks_for_much_has_its_turns_among_many_who_ask_for_one_thing_after_another() -> None:
    """Eight clients ask again when their only turn is over. One that has eight turns waiting had one of 900 turns."""
    queue: FairQueue[str] = FairQueue(num_at_once=4, num_long_at_once=2)
    for number in range(8):
        queue.put("eight", "", is_long=False)
        queue.put(f"one {number}", "", is_long=False)
    turns: Counter[str] = Counter()
    doing: list[str] = []
    for _ in range(900):
        while (begun := queue.begin()) is not None:
            doing.append(begun[0])
        client = doing.pop(0)
        turns[client] += 1
        queue.end(client, is_long=False)
        queue.put(client, "", is_long=False)
    assert len(turns) == 9 and max(turns.values()) - min(turns.values()) <= 1


def test_who_has_left_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue(num_at_once=1, num_long_at_once=1)
    for number in range(100):
        queue.put(f"client {number}", "", is_long=False)
    while (begun := queue.begin()) is not None:
        queue.end(begun[0], is_long=False)
    assert not queue._last_begun and not queue._begun


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_list_that_is_searched_each_time_would_do(seed: int) -> None:
    """The oracle keeps all that waits in one list, and looks through it."""
    chance = random.Random(seed)
    num_at_once = chance.randint(1, 5)
    num_long_at_once = chance.randint(1, num_at_once)
    queue: FairQueue[int] = FairQueue(num_at_once, num_long_at_once)
    numbers = itertools.count()
    waiting: list[tuple[str, int, bool]] = []
    begun: list[tuple[str, int, bool]] = []
    last_begun: dict[str, int] = {}
    left: set[str] = set()
    for moment in range(600):
        if chance.random() < 0.55:
            client, is_long = chance.choice("abc"), chance.random() < 0.4
            waiting.append((client, moment, is_long))
            left.discard(client)
            queue.put(client, moment, is_long=is_long)
        elif begun:
            client, _, is_long = begun.pop(chance.randrange(len(begun)))
            queue.end(client, is_long=is_long)
            if not any(one[0] == client for one in [*waiting, *begun]):
                left.add(client)
        while True:
            here = [at for client, at in last_begun.items() if client not in left]
            last_begun = {client: at for client, at in last_begun.items() if at >= min(here, default=math.inf)}
            counts = Counter(one[0] for one in begun)
            num_long = sum(one[2] for one in begun)
            able = [one for one in waiting if not one[2] or num_long < num_long_at_once]
            expected = None
            if able and len(begun) < num_at_once:
                arrived = [one[0] for one in waiting]
                expected = min(
                    able, key=lambda one: (counts[one[0]], last_begun.get(one[0], -1), arrived.index(one[0]), one[1])
                )
            assert queue.begin() == expected, (seed, moment)
            if expected is None:
                break
            waiting.remove(expected)
            begun.append(expected)
            last_begun[expected[0]] = next(numbers)
