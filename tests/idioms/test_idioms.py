"""Each idiom of the table: some steps without a death, then one with a return, against the plain loop, bit by bit."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from idioms import harness, page
from idioms.models import error, mlp
from idioms.table import Category, Idiom, loops, table
from support.thoroughness import by_default

from torchft_ckpt import Checkpointer, SavedCheckpoint
from torchft_ckpt.core.coordination import beside
from torchft_ckpt.core.coordination.learning import Distance
from torchft_ckpt.core.coordination.messages import QuorumRequest

LOOPS = loops()
ALARMS = ("came to another state of step", "no registered state_dict returns", "sets its outer optimizer otherwise")
"""No loop gets one of these warnings, but those that it is made for."""
RESTARTS_ALWAYS = (
    "best_weights",
    "ema",
    "history",
    "grad_scaler",
    "optimizer_state_of_any_shape",
    "load_zeroes_first",
)
TAKE_TURNS = ("dcgan", "wgan", "sac")
"""Whose loops count their turns themselves."""
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with harness.torch_process_group():
        yield


def entries(*, restarts: bool = False) -> list[object]:
    """Return the idioms as parameters of a test, with what is not mended yet marked so."""
    return [
        pytest.param(
            entry, id=entry.key, marks=[pytest.mark.xfail(reason=entry.pending, strict=False)] if entry.pending else []
        )
        for entry in LOOPS
        if entry.restarts == restarts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries())
def test_a_group_dies_and_returns_and_all_compute_what_the_plain_loop_computes(
    entry: Idiom, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if entry.late:
        for name, step in (("DIES_AT_STEP", 9), ("IS_BACK_BEFORE_STEP", 11), ("NUM_STEPS", 18)):
            monkeypatch.setattr(harness, name, step)
    if entry.key in (*TAKE_TURNS, "stylegan"):
        monkeypatch.setattr(beside, "OUT_OF_TURN_S", harness.LIMIT_S)  # a step takes long here if others have the cores
    if entry.refused:
        errors = harness.run_groups(
            entry.loop, dies=False, num_groups=entry.num_groups, gloo=entry.gloo, refused=True
        ).errors
        assert {type(error).__name__ for error in errors} == {entry.refused}, errors
        assert any(re.search(entry.says, str(error)) for error in errors), errors
        return
    with caplog.at_level(logging.WARNING, "torchft_ckpt"):
        outcome = harness.check(entry, dies=entry.dies and entry.compare != "nothing")
    if entry.category is Category.OUTER and not entry.says:
        assert not any(life.current.statistics().num_corrected for life in outcome.lives), "a group's round is lost"
    assert not entry.says or re.search(entry.says, caplog.text), caplog.text
    for alarm in ALARMS:
        assert alarm not in caplog.text or alarm in entry.says, caplog.text


WAYS: dict[str, dict[str, Any]] = {
    "follows": {"follows": True},
    "spare": {"has_spare": True},
    "two_of_three_die": {"num_groups": 3, "num_dying": 2},
}
"""How a group comes back: it follows before it comes in; a spare takes its place; another one died in the same step."""
ALWAYS = {
    "follows": ("forward_before_zero_grad",),
    "spare": ("ema_decay_read_at_top", "count_after_zero_grad"),
    "two_of_three_die": ("ema_decay_read_at_top", "ema_after_zero_grad"),
}
"""Loops of which one was wrong once, if a group comes back so, and those that all newcomers get wrong alike."""


def loops_and_ways() -> list[object]:
    """Return in which way a group comes back in which loop: a few by default, all in a thorough run."""
    others = [e for e in LOOPS if not (e.restarts or e.refused or e.waits or e.pending or e.late)]
    back = [e for e in others if e.dies and e.compare != "nothing"]
    found = []
    for number, way in enumerate(WAYS):
        # Outer loops have no spares, and the samplers of a loop may be made for two groups.
        those = [e for e in back if way == "follows" or e.category not in (Category.OUTER, Category.DATA)]
        few = [e for place, e in enumerate(those) if place % (32, 48, 48)[number] == number or e.key in ALWAYS[way]]
        found += [pytest.param(way, e, id=f"{way}-{e.key}") for e in by_default(few, thorough=those)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("way", "entry"), loops_and_ways())
def test_groups_come_back_in_another_way_and_all_compute_what_the_plain_loop_computes(
    way: str, entry: Idiom, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "follows":

        def gets_closer(asked: QuorumRequest, *_: object, **__: object) -> bool:
            return asked.at_end and asked.need.can_follow and asked.need.gains

        monkeypatch.setattr(beside, "should_follow", gets_closer)
        monkeypatch.setattr(Distance, "gains", lambda self, *_, **__: not self._has_followed)
    harness.check(entry, dies=True, **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("is_back_before", [5, 6, 7, 8])
@pytest.mark.parametrize("key", TAKE_TURNS)
def test_a_group_whose_loop_takes_turns_by_a_counter_of_its_own_costs_one_step_as_it_dies_and_none_as_it_comes_back(
    key: str, is_back_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "IS_BACK_BEFORE_STEP", is_back_before)
    monkeypatch.setattr(harness, "NUM_STEPS", is_back_before + 4)
    monkeypatch.setattr(beside, "OUT_OF_TURN_S", harness.LIMIT_S)  # a step takes long here if others have the cores
    entry = next(entry for entry in LOOPS if entry.key == key)
    votes = harness.check(entry, dies=True).run.votes
    assert sum(not committed for _, committed in votes) <= 1, votes


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries(restarts=True))
def test_a_job_is_stopped_and_started_again_and_no_bit_differs(entry: Idiom, tmp_path: Path) -> None:
    harness.check_restart(entry, str(tmp_path))


def loops_that_save() -> list[object]:
    """Return each loop of a job that is started again, and whether the others go on without a group that dies in it."""
    saving = [e for e in LOOPS if e.restarts]
    few = [e for e in saving if e.key in ("save_between", "restore_diloco_before")]
    waiting = by_default(few, thorough=saving)
    those = [(e, True) for e in saving] + [(e, False) for e in waiting]
    return [pytest.param(e, goes, id=f"{e.key}-{'others_go_on' if goes else 'others_wait'}") for e, goes in those]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "goes_on_without"), loops_that_save())
def test_a_group_of_a_job_that_saves_dies_and_returns_and_no_bit_differs(
    entry: Idiom, goes_on_without: bool, tmp_path: Path
) -> None:
    harness.check(entry, dies=True, directory=str(tmp_path), goes_on_without=goes_on_without)


def loops_that_register() -> list[object]:
    """Return those that say "Register it" of something of their own: a few by default, all in a thorough run."""
    chapters = (Category.PRECISION, Category.WEIGHTS, Category.STATE)
    plain = [e for e in LOOPS if e.compare == "plain" and not (e.restarts or e.refused or e.waits or e.gloo)]
    few = [e for e in plain if e.key in RESTARTS_ALWAYS]
    return [pytest.param(e, id=e.key) for e in by_default(few, thorough=[e for e in plain if e.category in chapters])]


@pytest.mark.slow
@pytest.mark.parametrize("entry", loops_that_register())
def test_what_a_loop_has_registered_comes_back_from_storage_as_from_a_peer(entry: Idiom, tmp_path: Path) -> None:
    harness.check_restart(entry, str(tmp_path))


@pytest.mark.slow
def test_a_save_by_the_first_of_three_groups_alone_is_said_at_once_by_the_names_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`if rank == 0: checkpointer.save()`."""
    saved: list[Future[SavedCheckpoint]] = []
    has_ended = threading.Event()

    def loop(job: harness.Job) -> None:
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = job.manager(*harness.states(model=model, sgd=sgd), min_replica_size=3)
        ddp, optimizer = job.ddp(model), job.optimizer(sgd)
        checkpointer = Checkpointer(tmp_path, manager=manager, fill_after=timedelta(seconds=1))
        while job.goes_on():
            optimizer.zero_grad()
            error(ddp, job.batch()).backward()
            if optimizer.step() and job.group == 0 and manager.current_step() in (1, 3):
                saved.append(checkpointer.save())
                assert checkpointer._worker is not None and checkpointer._worker.wait_written(120)
        checkpointer.shutdown()
        has_ended.set() if job.group == 0 else has_ended.wait(120)  # who is gone is no one that has not called save

    outcome = harness.run_groups(loop, dies=False, num_groups=3, num_steps=harness.NUM_STEPS_UNDISTURBED)
    assert not outcome.errors
    first, last = (str(one.exception(120)) for one in saved)
    # A slow second step leaves the first group the time to write one of the two shares itself, which nobody lacks then.
    named = (
        "(group_1, group_2 have|group_1 has) written nothing for step 1: every replica group has to call save for it"
    )
    assert re.search(f"the next save began before this one was whole: {named}", first), first
    assert "given up before it was whole: group_1" in last
    assert re.search("cannot become whole: .*1.* written nothing for step 1: every replica group has to", caplog.text)
    assert "shutdown waits up to 13 s for a save: group_1" in caplog.text


def test_the_page_is_that_of_the_table() -> None:
    assert page.PAGE.read_text() == page.text(), "run scripts/idioms"


def test_each_line_has_a_name_of_its_own_and_those_of_one_loop_are_run_alike() -> None:
    lines = table()
    assert len({line.name for line in lines}) == len(lines)
    assert len({entry.key for entry in LOOPS}) == len(LOOPS)
    ways = {(line.loop, replace(line, name="", know="", was="")) for line in lines}
    assert len(ways) == len(LOOPS)
