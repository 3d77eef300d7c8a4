"""Chooses which names keep a place, where names cost nothing to make and places do."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from torchft_ckpt.core.services.fairness import Places


def test_who_comes_gets_a_place_however_many_names_another_client_has() -> None:
    places = Places(4)
    assert [places.admit(f"made up {number}", "stranger") for number in range(4)] == [None] * 4
    assert places.admit("joiner", "honest") == "made up 0"
    assert [places.admit(f"more {number}", "stranger") for number in range(4)] == [
        "made up 1",
        "made up 2",
        "made up 3",
        "more 0",
    ]
    assert "joiner" in places


def test_of_one_clients_names_those_stay_that_something_is_heard_of() -> None:
    places = Places(3)
    for name in "abc":
        places.admit(name, "all of them")
    places.hear("a")
    assert [places.admit(name, "all of them") for name in "de"] == ["b", "c"]
    assert ("a" in places, len(places)) == (True, 3)


def test_who_has_as_many_as_others_makes_room_among_its_own() -> None:
    places = Places(4)
    for name, client in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("b1", "b")):
        places.admit(name, client)
    assert places.admit("b2", "b") == "b0"


def test_a_place_that_was_left_is_free() -> None:
    places = Places(1)
    places.admit("a", "one")
    places.drop("a")
    places.drop("a")
    places.hear("a")
    assert (places.admit("b", "two"), "a" in places, len(places)) == (None, False, 1)


@pytest.mark.parametrize("seed", range(20))
def test_it_keeps_whom_a_list_that_is_searched_each_time_would_keep(seed: int) -> None:
    """The oracle is a list of names, in the order in which they were heard last. No client loses what is its equal share."""
    chance = random.Random(seed)
    num_places = chance.randint(1, 8)
    places = Places(num_places)
    kept: list[tuple[str, str]] = []
    for moment in range(500):
        name, client = f"n{chance.randrange(30)}", chance.choice("aaaabbc")
        known = next((one for one in kept if one[0] == name), None)
        action = chance.choice(["admit", "admit", "hear", "drop"])
        lost = None
        if action == "admit" or (action == "hear" and known is not None):
            if known is not None:
                kept.remove(known)
            kept.append(known or (name, client))
            if len(kept) > num_places:
                counts = Counter(of for _, of in kept)
                most = [of for of, count in counts.items() if count == max(counts.values())]
                loser = client if client in most else most[0]
                if client not in most and len(most) > 1:  # any of them
                    told = places.admit(name, client)
                    assert told in [next(one for one, of in kept if of == each) for each in most], (seed, moment)
                    kept = [one for one in kept if one[0] != told]
                    continue
                lost = next(one for one, of in kept if of == loser)
                assert counts[loser] > num_places // len(counts)
                kept = [one for one in kept if one[0] != lost]
        elif action == "drop" and known is not None:
            kept.remove(known)
        if action == "admit":
            assert places.admit(name, client) == lost, (seed, moment)
        elif action == "hear":
            places.hear(name)
        else:
            places.drop(name)
        assert len(places) == len(kept) and all(one in places for one, _ in kept), (seed, moment)
