"""What a kill cost, from a run written down by hand: steps of a second, one kill between 3 and 4."""

from __future__ import annotations

import pytest
from demo import events
from demo.timeline import Kill, KillFigures, Ledger, Life, Timeline, judge, keep_ledger, measure_kills


def step(
    at_s: float, number: int, *, committed: bool = True, contributed: bool = True, loss: float = 2.0
) -> events.StepEnded:
    return events.StepEnded(
        at_s=at_s,
        started_s=at_s - 0.9,
        step=number,
        committed=committed,
        contributed=contributed,
        participants=2,
        quorum_id=1,
        loss=loss,
    )


def finished(at_s: float, number: int, digest: str = "d") -> events.Finished:
    return events.Finished(at_s=at_s, step=number, digest=digest, num_samples=100, sample="def f")


def make_timeline() -> Timeline:
    """Group 1 dies at 3.4 s; group 0 discards a step at 3.6 s and commits again at 5 s; group 1 is back at 8.1 s."""
    survivor = Life(group=0, number=0, spawned_s=0.0, imported_s=0.5, connected_s=0.6)
    survivor.steps = [step(1, 1), step(2, 2), step(3, 3), step(3.6, 3, committed=False)]
    survivor.steps += [step(5, 4), step(6, 5), step(7.5, 6), step(8.1, 7)]
    first = Life(group=1, number=0, spawned_s=0.0, imported_s=0.5, connected_s=0.6, ended_s=3.41)
    first.steps = [step(1, 1), step(2, 2), step(3, 3)]
    second = Life(group=1, number=1, spawned_s=4.5, imported_s=6.5, connected_s=6.6)
    second.steps = [step(7.5, 6, contributed=False), step(8.1, 7)]
    for life in (survivor, second):
        life.record(finished(8.5, 7))
        life.ended_s = 9.0
    kills = [Kill(at_s=3.4, group=1, step=3)]
    return Timeline(num_groups=2, started_s=0.0, lives=[survivor, first, second], kills=kills)


def test_a_kill_is_measured_on_both_sides() -> None:
    (figures,) = measure_kills(make_timeline())

    assert figures == KillFigures(
        group=1,
        step=3,
        at_s=3.4,
        discarded={0: 1},
        gap_s=2.0,
        rejoin_gap_s=1.5,
        start_s=2.0,
        rejoin_s=pytest.approx(1.6),
        rejoined_step=7,
    )


def test_the_next_kill_ends_what_is_counted_for_this_one() -> None:
    timeline = make_timeline()
    timeline.kills.append(Kill(at_s=7.0, group=1, step=5))

    first, second = measure_kills(timeline)

    assert (first.gap_s, first.rejoin_gap_s, second.discarded) == (2.0, None, {0: 0})


@pytest.mark.parametrize(
    ("ends", "num_planned_kills", "is_bit_equal", "reason"),
    [
        ([finished(9, 7), finished(9, 7)], 1, True, "all 2 groups ended bit-equal at step 7, after 1 kill"),
        ([finished(9, 7), finished(9, 7, "e")], 1, False, "groups ended at step 7 with 2 different states"),
        ([finished(9, 7), finished(9, 8)], 1, False, "groups ended at different steps: 7, 8"),
        ([finished(9, 7), None], 1, False, "groups that never finished: 1"),
        ([finished(9, 7), finished(9, 7)], 2, False, "only 1 of 2 planned kills were carried out"),
    ],
)
def test_the_verdict_holds_only_for_equal_states_at_one_step_after_all_kills(
    ends: list[events.Finished | None], num_planned_kills: int, is_bit_equal: bool, reason: str
) -> None:
    timeline = make_timeline()
    timeline.lives[0].finished, timeline.lives[2].finished = ends

    verdict = judge(timeline, num_planned_kills=num_planned_kills)

    assert (verdict.is_bit_equal, verdict.reason) == (is_bit_equal, reason)


def keep(computed: dict[tuple[int, int], list[list[int]]], losses: tuple[float, float] = (2.0, 2.0)) -> Ledger:
    """Return the ledger of two lives after two steps of 4 samples each: what each has computed of a step, attempt by attempt."""
    lives = [Life(group=group, number=0, spawned_s=0.0) for group in (0, 1)]
    for (group, number), attempts in computed.items():
        for samples in attempts:
            lives[group].record(events.Computed(at_s=number, after=number - 1, samples=samples))
    for life, loss in zip(lives, losses, strict=True):
        for number in (1, 2):
            if life.group == 0 or number == 1 or (1, 2) not in computed:
                life.record(step(number, number, loss=loss))
        life.record(finished(3, 2))
    return keep_ledger(Timeline(num_groups=2, started_s=0.0, lives=lives), num_in_step=4)


def test_the_ledger_has_each_sample_once_whoever_was_killed() -> None:
    first = {(0, 1): [[0, 1]], (1, 1): [[2, 3]]}
    alone = keep({**first, (0, 2): [[4, 5], [6, 7]]})  # the other one died before it had computed anything
    in_time = keep({**first, (0, 2): [[4, 5], [6, 7]], (1, 2): [[6]]})  # it had, and that went with it
    late = keep({**first, (0, 2): [[4, 5]], (1, 2): [[6, 7]]})  # it died after its vote, which counts

    assert str(alone) == "8 samples in 2 steps: none missing, none twice" and alone.is_whole
    assert alone == in_time == late


def test_the_ledger_tells_what_is_missing_or_twice_and_losses_that_differ() -> None:
    first = {(0, 1): [[0, 1]], (1, 1): [[2, 3]]}

    assert "2 missing, none twice" in str(keep({**first, (0, 2): [[4, 5]]}))
    assert "none missing, 1 twice" in str(keep({**first, (0, 2): [[4, 5, 6, 0]]}))
    split = keep({**first, (0, 2): [[4, 5, 6, 7]]}, losses=(2.0, 2.5))
    assert "2 steps with several losses" in str(split) and not split.is_whole
