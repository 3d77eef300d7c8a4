"""Where a rank that starts takes its state from: the newest step, and the nearest of those who hold it."""

from __future__ import annotations

from itertools import product

import pytest

from torchft_ckpt.core.durable.restore_source import RestoreSource, choose_restore_source


@pytest.mark.parametrize(
    ("held", "source", "step"),
    [
        ((120, 120, 120, 120), RestoreSource.MEMORY, 120),
        ((None, 120, 120, 120), RestoreSource.PEERS, 120),
        ((None, None, 120, 120), RestoreSource.LOCAL_DISK, 120),
        ((None, None, None, 120), RestoreSource.STORAGE, 120),
        ((100, None, 102, 103), RestoreSource.STORAGE, 103),
        ((100, None, 103, 102), RestoreSource.LOCAL_DISK, 103),
        ((100, 103, 101, 102), RestoreSource.PEERS, 103),
        ((103, 100, 101, 102), RestoreSource.MEMORY, 103),
        ((0, None, None, None), RestoreSource.MEMORY, 0),
        ((None, None, None, None), RestoreSource.NOTHING, None),
    ],
)
def test_the_newest_step_wins_and_among_equals_the_nearest(
    held: tuple[int | None, int | None, int | None, int | None], source: RestoreSource, step: int | None
) -> None:
    assert choose_restore_source(*held)[:2] == (source, step)


def test_what_disks_have_beyond_a_living_job_is_of_a_history_that_it_left() -> None:
    assert choose_restore_source(None, 390, 400, 500)[:2] == (RestoreSource.PEERS, 390)


def test_the_reason_names_what_the_others_hold() -> None:
    assert choose_restore_source(None, None, 120, 100).reason == (
        "step 120 from local disk: nothing is in memory, no living peer holds any, storage has 100"
    )
    assert choose_restore_source(90, 120, None, 100).reason == (
        "step 120 from peers: memory holds 90, no local disk has any, storage has 100"
    )
    assert choose_restore_source(None, None, None, None).reason == (
        "there is no state to go on from: nothing is in memory, no living peer holds any, no local disk has any, "
        "storage has none"
    )


def test_no_source_holds_more_than_the_chosen_one_and_no_nearer_one_as_much() -> None:
    sources = [RestoreSource.MEMORY, RestoreSource.PEERS, RestoreSource.LOCAL_DISK, RestoreSource.STORAGE]
    for held in product([None, 0, 1, 2], repeat=4):
        choice = choose_restore_source(*held)
        if choice.source is RestoreSource.NOTHING:
            assert held == (None,) * 4
            continue
        if held[1] is not None:  # a job lives: disks do not count
            assert choice.source in (RestoreSource.MEMORY, RestoreSource.PEERS)
            held = (*held[:2], None, None)
        place = sources.index(choice.source)
        assert choice.step == held[place]
        assert all(step is None or step < held[place] for step in held[:place])
        assert all(step is None or step <= held[place] for step in held[place:])
