"""Chooses which names keep a place, where names cost nothing to make and places do."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from torchft_ckpt.core.services.fairness import Places


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
