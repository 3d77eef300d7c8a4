"""Whole jobs from seeds: what must never happen does not, and once faults stop all groups come together and commit on.

A seed that fails is printed with its log; `Simulation(seed).run()` replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from simulation import run
from simulation.chaos import Fault, Moods, OuterPlan, Scenario
from simulation.run import CrashError, InvariantError, Report, Simulation, main, run_seeds, simulate
from simulation.trainer import Trainer
from simulation.transfers import Transfers
from support.thoroughness import by_default

from torchft_ckpt.core.coordination import equality, hold, lighthouse, recovery, replica, trial
from torchft_ckpt.core.coordination.beside import Beside
from torchft_ckpt.core.coordination.commit import Tally
from torchft_ckpt.core.coordination.connecting import Connecting
from torchft_ckpt.core.coordination.deciding import Deciding
from torchft_ckpt.core.coordination.group import (
    GroupInstruction,
    GroupState,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.history import StateHistory
from torchft_ckpt.core.coordination.hold import Holds
from torchft_ckpt.core.coordination.joining import Joining
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import Instruction
from torchft_ckpt.core.coordination.lighthouse_records import Member, MemberPhase
from torchft_ckpt.core.coordination.messages import (
    Answer,
    CommitDecided,
    CommitVote,
    FromLighthouse,
    Hello,
    Outcome,
    QuorumRequest,
    StateLocated,
    StateVersion,
    group_name,
)
from torchft_ckpt.core.coordination.patience import JoinAllowance
from torchft_ckpt.core.coordination.quorum import Asked, QuorumIds
from torchft_ckpt.core.coordination.ranks_together import Arrivals
from torchft_ckpt.core.coordination.replica import ReplicaState, StepEvent, StepFacts, StepPhase, StepPlan, StepWishes
from torchft_ckpt.core.coordination.roster import Roster
from torchft_ckpt.core.coordination.trial import Trials, Verdict
from torchft_ckpt.core.training.outer_schedule import OuterSchedule

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, by_default(150, thorough=400), 50))
def test_nothing_that_must_never_happen_happens_and_all_recover(first: int) -> None:
    reports = run_seeds(range(first, first + 50))
    assert sum(report.num_commits for report in reports) > 1000
    assert sum(report.num_faults for report in reports) > 100
    assert sum(report.num_held for report in reports) > 100


@pytest.mark.parametrize("first", range(0, by_default(100, thorough=300), 50))
def test_outer_loops_recover_as_well_and_leave_nobody_out_who_is_merely_slow(first: int) -> None:
    reports = run_seeds(range(first, first + 50), outer=True)
    assert sum(report.num_commits for report in reports) > 500
    assert sum(report.num_faults for report in reports) > 100


@pytest.mark.parametrize("first", range(0, by_default(20, thorough=200), 20))
def test_loops_that_train_several_networks_in_turn_come_together_again(first: int) -> None:
    reports = run_seeds(range(first, first + 20), kind="turns")
    assert sum(report.num_commits for report in reports) > 400
    assert sum(report.num_faults for report in reports) > 40


@pytest.mark.parametrize("first", range(0, by_default(20, thorough=200), 20))
def test_who_comes_in_reads_what_the_others_read_though_they_leave_batches_out(first: int) -> None:
    reports = run_seeds(range(first, first + 20), kind="skips")
    assert sum(report.num_commits for report in reports) > 400
    assert sum(report.num_held for report in reports) > 40


def test_outer_loops_without_faults_commit_every_round_with_all_however_long_their_phases_are() -> None:
    for seed in range(by_default(6, thorough=10)):
        outer = OuterPlan(phase_s=20.0, spread=1.7, delay=(0.0, 0.1, 0.5)[seed % 3])
        report = Simulation(seed, Scenario(num_groups=4, join_timeout_s=0.5, chaos_s=300.0, outer=outer)).run()
        assert max(report.discarded.values()) == 0, f"seed {seed}: {report}"


def test_one_seed_gives_one_run() -> None:
    assert Simulation(12).run() == Simulation(12).run()
    assert simulate(12, outer=True) == simulate(12, outer=True)


def test_the_command_line_runs_seeds_and_says_by_its_status_whether_all_went_well() -> None:
    assert main(["--seeds", "5", "--first", "7"]) == 0


def run_with_one_fault(fault: Fault, seed: int, **settings: object) -> tuple[Report, str]:
    """A job that trains in peace but for one fault at some event. Returns the report and the victim's group."""
    rng = Random(seed)
    num_groups, world_size = int(settings.get("num_groups", rng.randint(3, 5))), rng.choice((1, 1, 2))  # type: ignore[call-overload]
    plan = {
        "num_groups": num_groups,
        "group_world_size": world_size,
        "num_allreduces": rng.choice((1, 2)),
        "max_delay_s": rng.choice((0.002, 0.01)),
        "rejoin_s": rng.choice(((0.02, 0.15), (0.1, 1.5), (1.0, 3.0))),
        **settings,
    }
    per_second = 60 * num_groups * world_size
    at, victim = rng.randint(per_second, 4 * per_second), rng.randrange(num_groups)
    scenario = Scenario(**plan)  # type: ignore[arg-type]
    return Simulation(seed, scenario, [(at, fault, victim)]).run(), f"g{victim}:"


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name.lower())
def test_one_fault_costs_a_survivor_at_most_one_step_however_slow_the_rejoining_is(fault: Fault) -> None:
    for seed in range(by_default(5, thorough=25)):
        report, victim = run_with_one_fault(fault, seed)
        survivors = {name: cost for name, cost in report.discarded.items() if not name.startswith(victim)}
        assert max(survivors.values()) <= 1, f"seed {seed}: {report}"
        assert (report.num_rollbacks, report.num_operator_words) == (0, 0), f"seed {seed}: {report}"


def test_two_groups_that_need_each_other_recover_from_a_kill_though_the_transfer_is_slow() -> None:
    for seed in range(by_default(6, thorough=15)):
        plan = {"num_groups": 2, "min_replicas": 2, "min_replica_size": 2, "rejoin_s": (1.0, 3.0)}
        report, victim = run_with_one_fault(Fault.KILL_GROUP, seed, **plan)
        survivors = {name: cost for name, cost in report.discarded.items() if not name.startswith(victim)}
        # Alone it may try a step more, which cannot be committed either.
        assert report.num_faults == 1 and max(survivors.values()) <= 2, f"seed {seed}: {report}"
        assert (report.num_rollbacks, report.num_operator_words) == (0, 0), f"seed {seed}: {report}"


def test_a_joiner_whose_transfers_all_fail_does_not_keep_the_others_from_training() -> None:
    plan = Scenario(num_groups=3, transfer_failure_rate=1.0, chaos_s=8.0)
    report = Simulation(3, plan, [(400, Fault.KILL_GROUP, 1)]).run()
    assert max(report.discarded.values()) <= 1
    assert report.num_commits > 7 * (plan.chaos_s + report.recovered_after_s)


def discards_beside_drains(seeds: range, num_late: int) -> tuple[int, int]:
    """Return how many groups were asked to leave in these runs, and how many steps were discarded."""
    num_asked = num_discarded = 0
    for seed in seeds:
        plan = Scenario(
            num_groups=3,
            group_world_size=2,
            min_replicas=1 + seed % 3,
            faults={Fault.DRAIN: 1.0},
            fault_rate=0.003,
            num_late=num_late,
        )
        report = Simulation(seed, plan).run()
        num_asked += report.num_faults
        if not report.num_operator_words:  # else all holders left at once, and a fresh job began
            num_discarded += sum(report.discarded.values())
    return num_asked, num_discarded


@pytest.mark.parametrize("num_late", [0, 2], ids=["", "collectives between two steps"])
def test_groups_that_leave_cost_the_others_nothing(num_late: int) -> None:
    num_asked, num_discarded = discards_beside_drains(range(by_default(12, thorough=300)), num_late)
    assert num_asked > 20
    assert num_discarded == 0


def test_lighthouse_crashes_alone_lose_no_step_of_a_quiet_job() -> None:
    for seed in range(by_default(8, thorough=20)):
        plan = Scenario(num_groups=3, faults={Fault.CRASH_LIGHTHOUSE: 1.0}, fault_rate=0.002, chaos_s=6.0)
        report = Simulation(seed, plan).run()
        assert (report.num_rollbacks, report.num_operator_words) == (0, 0), f"seed {seed}: {report}"


def run_with_cuts(seed: int, delay: float = 0.0) -> Report:
    """A job of outer loops whose members lose their connections in the middle of long phases."""
    outer = OuterPlan(phase_s=8.0, spread=1.2, delay=delay)
    plan = Scenario(num_groups=3, fault_rate=0.003, faults={Fault.CUT: 1.0}, chaos_s=60.0, outer=outer)
    return Simulation(seed, plan).run()


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_outer_loops_that_are_cut_off_in_a_phase_and_come_back_are_not_left_out(delay: float) -> None:
    num_seeds = by_default(8, thorough=20)
    assert sum(run_with_cuts(seed, delay).num_faults for seed in range(num_seeds)) > num_seeds


def run_with_drift(seed: int, **settings: object) -> Report:
    """A job whose groups drift apart, are cut off and killed, do not wait for decisions, and heal by majority."""
    rng = Random(seed)
    plan = Scenario(
        num_groups=rng.choice((3, 4, 5)),
        group_world_size=rng.choice((1, 1, 2)),
        check_equal_every=rng.choice((1, 1, 3)),
        transfer_failure_rate=0.2,
        fault_rate=0.004,
        faults={Fault.CUT: 1.0, Fault.KILL_GROUP: 0.3, Fault.CRASH_LIGHTHOUSE: 0.3, Fault.SILENCE: 0.3},
        decision_timeout_s=0.5,
        moods=Moods(drift=0.03, impatience=rng.choice((0, 0.5, 1.0)), uses_state=rng.choice((0.0, 0.5))),
    )
    return Simulation(seed, replace(plan, **settings)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"tells_reach": True, "changing": 0.05}], ids=["", "beside learners"])
def test_groups_that_drift_apart_load_before_a_step_and_all_are_equal_in_the_end(settings: dict[str, object]) -> None:
    num_seeds = by_default(16, thorough=300)
    assert sum(run_with_drift(seed, **settings).num_corrected for seed in range(num_seeds)) > num_seeds


def run_with_slow_transfers(seed: int) -> Report:
    """A job whose groups are killed, and whose states take longer to receive than a step, and maybe than the others wait."""
    rng = Random(seed)
    limit_s = rng.choice((0.5, 0.5, 2.0))
    plan = Scenario(
        num_groups=rng.choice((3, 4)),
        join_stall_limit_s=limit_s,
        tells_reach=True,
        rejoin_s=(0.3, 3.0),
        load_s=(0.0, rng.choice((0.0, 0.75 * limit_s))),
        fault_rate=0.004,
        faults={Fault.KILL_GROUP: 1.0, Fault.STOP_GROUP: 0.3},
        chaos_s=8.0,
    )
    return Simulation(seed, plan).run()


def test_those_who_train_stand_still_for_joiners_no_longer_than_they_allow() -> None:
    for seed in range(by_default(10, thorough=100)):
        run_with_slow_transfers(seed)


def test_moods_calm_down() -> None:
    moods = Moods(abandon=1.0, step_error=1.0, no_heal=1.0, impatience=1.0, drift=1.0)
    moods.calm_down(slowness=2.0)
    assert moods == Moods(slowness=2.0)


@pytest.mark.parametrize("first", range(0, by_default(20, thorough=200), 20))
def test_learners_cost_the_others_no_wait_for_a_quorum(first: int) -> None:
    reports = run_seeds(range(first, first + 20), kind="learners")
    assert sum(report.num_followed for report in reports) > 30
    assert sum(report.num_compared_without_learners for report in reports) > 100


def run_with_holds(seed: int, **settings: object) -> Report:
    """A job whose groups are killed and come back while its quorums are held, and change their states before they begin."""
    rng = Random(seed)
    plan = Scenario(
        num_groups=rng.choice((3, 4)),
        group_world_size=rng.choice((1, 1, 2)),
        join_stall_limit_s=rng.choice((0.5, 2.0)),
        tells_reach=True,
        rejoin_s=(0.1, 1.0),
        staging_s=rng.choice((0.0, 0.3)),
        fault_rate=0.004,
        faults={Fault.KILL_GROUP: 1.0, Fault.STOP_GROUP: 0.3},
        moods=Moods(moves_state=0.5),
    )
    return Simulation(seed, replace(plan, **settings)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("turns", ["0", "01", "0100", "012100"])
def test_a_group_that_comes_in_by_a_hold_costs_the_others_the_step_that_it_died_in_and_no_more(turns: str) -> None:
    for seed in range(by_default(5, thorough=60)):
        plan = {"tells_reach": True, "turns": turns, "moods": Moods(moves_state=0.5)}
        report, victim = run_with_one_fault(Fault.KILL_GROUP, seed, **plan)
        survivors = {name: cost for name, cost in report.discarded.items() if not name.startswith(victim)}
        assert report.num_held >= 1 and max(survivors.values()) <= 1, f"seed {seed}: {report}"


def run_behind_a_firewall(seed: int) -> tuple[Report, str]:
    """A group dies and comes back, and nobody can connect with it for a while. Returns the report and that group."""
    rng = Random(seed)
    at, victim = rng.randint(300, 700), rng.randrange(3)
    scenario = Scenario(num_groups=3, tells_reach=True, group_world_size=rng.choice((1, 2)), chaos_s=10.0)
    script = [(at, Fault.FIREWALL, victim), (at + 1, Fault.KILL_GROUP, victim)]
    return Simulation(seed, scenario, script).run(), f"g{victim}:"


def test_a_group_that_cannot_be_connected_costs_the_others_nothing() -> None:
    for seed in range(by_default(4, thorough=60)):
        report, victim = run_behind_a_firewall(seed)
        survivors = {name: cost for name, cost in report.discarded.items() if not name.startswith(victim)}
        assert max(survivors.values()) <= 1, f"seed {seed}: the step in which it died, and no more: {report}"


def run_with_spares(seed: int) -> Report:
    """A job whose steps are often discarded, and whose spares take the places of groups that are killed."""
    moods = Moods(step_error=0.2, abandon=0.2, moves_state=0.5)
    return run_with_holds(seed, num_groups=4, num_spares=2, changing=0.05, staging_s=0.0, moods=moods)


def run_with_too_few(seed: int) -> Report:
    """A job that can do without one of its groups, which are killed and cut off while they come in."""
    return run_with_holds(
        seed,
        num_groups=4,
        min_replicas=3,
        min_replica_size=3,
        connects_beside=False,
        changing=0.05,
        staging_s=0.0,
        transfer_failure_rate=0.2,
        fault_rate=0.01,
        faults={Fault.KILL_GROUP: 1.0, Fault.CUT: 0.5},
        moods=Moods(moves_state=0.5, slowness=3.0),
    )


def run_with_turns(seed: int) -> Report:
    return simulate(seed, kind="turns")


def run_outer(seed: int) -> Report:
    return simulate(seed, outer=True)


@pytest.mark.parametrize("simulates", [run_with_spares, run_with_too_few], ids=lambda value: value.__name__)
def test_all_begin_a_step_with_the_values_of_the_same_attempt(simulates: Callable[[int], Report]) -> None:
    assert sum(simulates(seed).num_held for seed in range(by_default(6, thorough=60))) > 6


# ------------------------------------------------------------------------------------- it finds what is broken on purpose

Break = Callable[[pytest.MonkeyPatch], None]


def sets(owner: Any, name: str, value: object) -> Break:
    def break_it(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, value)

    break_it.__name__ = f"{owner.__name__.rpartition('.')[2]}.{name}"
    return break_it


def run_twice(seed: int) -> None:
    simulate(seed)
    run_with_holds(seed, group_world_size=2, torn_rate=0.3, moods=Moods())


def run_in_holds(seed: int) -> Report:
    return run_with_holds(seed, transfer_failure_rate=0.3)


def run_in_two_turns(seed: int) -> tuple[Report, str]:
    return run_with_one_fault(Fault.KILL_GROUP, seed, tells_reach=True, turns="01")


def run_with_learners(seed: int) -> Report:
    return simulate(seed, kind="learners")


def run_that_skips(seed: int) -> Report:
    return simulate(seed, kind="skips")


def run_with_discards(seed: int) -> Report:
    plan = {"fault_rate": 0.02, "faults": {Fault.KILL_GROUP: 1.0}, "connects_beside": False}
    return run_with_drift(seed, num_groups=3, moods=Moods(uses_state=1.0, step_error=0.6), **plan)


def broken_step_begun_again(patch: pytest.MonkeyPatch) -> None:
    """A step counts that a loop began again."""
    right = ReplicaState.vote

    def vote(state: ReplicaState, *args: str, **others: object) -> CommitVote:
        state._is_again = False
        return right(state, *args, **others)  # type: ignore[arg-type]

    patch.setattr(ReplicaState, "vote", vote)


def broken_voice(patch: pytest.MonkeyPatch) -> None:
    right = ReplicaState.begin

    def begin(replica: ReplicaState, wishes: StepWishes, facts: StepFacts) -> QuorumRequest:
        return msgspec.structs.replace(right(replica, wishes, facts), came_in=False)

    patch.setattr(ReplicaState, "begin", begin)


# Who computes a step beside the quorum puts its gradients into the sum.
broken_contribution = sets(ReplicaState, "participating_rank", property(lambda state: state.quorum.replica_rank))
# Nobody remembers the newest step.
broken_newest_step = sets(StateHistory, "note", lambda history, replica_id, version: setattr(history, "_own_step", 0))
# A load that failed half-way counts as a load.
broken_torn_state = sets(ReplicaState, "load_torn", lambda state: state.load_finished(state.quorum.version))
# A member that speaks counts as silent for as long as before.
broken_order_of_silence = sets(Roster, "hear", lambda roster, member, now: setattr(member, "last_seen", now))
# Patience does not reach beyond the way to the exchange.
broken_patience = sets(OuterSchedule, "patience_s", lambda schedule, elapsed_s: elapsed_s)
# Who was cut off for a moment is forgotten.
broken_return = sets(Deciding, "is_still_in_quorum", lambda state, member: False)
# What groups show is taken for the same.
broken_trial = sets(trial, "_known", lambda shown: "the same")
# The few are right.
broken_majority_of_voices = sets(trial, "alike", lambda digests: equality.alike(digests)[::-1])
# Every need fits.
broken_allowance = sets(JoinAllowance, "fits_in_s", lambda *_: 0.0)
# What joins cost is not counted.
broken_purse = sets(JoinAllowance, "spend", lambda *_: None)
# A process group is used again after a collective failed in it.
broken_process_group = sets(ReplicaState, "collectives_failed", lambda state: setattr(state, "_is_broken", True))
# The next step is asked for before the last one is taken.
broken_order_of_taking = sets(ReplicaState, "took_step", lambda state: None)
# The open step goes on for the other ranks when one of them begins anew.
broken_question = sets(GroupState, "_leave_open_step", lambda group, rank: iter(()))
# A quorum is held for those who have not met the others in it.
broken_meeting = sets(Connecting, "_unmet", lambda *_: [])
# Who was just given the state writes checkpoints of what comes of it, as all do who contribute.
broken_savers = sets(ReplicaState, "num_writers", property(lambda state: state.num_participants))
# A hold goes on until the group comes.
broken_end_of_holds = sets(Holds, "_end", lambda *_: (None, ""))
# What a loop changes after it has loaded the state stays.
broken_putting_back = sets(Trainer, "_put_back", lambda trainer, then: then())
# What was captured for one attempt at a step is given out in the next one, too.
broken_tickets_of_sources = sets(Transfers, "retire", lambda *_: None)
# A source's request is not looked at: who has its state begins the step with that, though the source has asked since.
broken_tickets_in_holds = sets(Holds, "asks", lambda *_: iter(()))
# Who was given the state and did not begin the step with the others begins the next attempt at it.
broken_tickets_of_late_ones = sets(Holds, "_are_late", lambda *_: None)
# Who has received the state beside the job may begin that step by itself, in a later attempt.
broken_lateness_of_followers = sets(Holds, "teaches", lambda *_: None)
# A group that could not be waited for is waited for again at once.
broken_once_at_a_boundary = sets(Holds, "why_not", lambda *_: "")
# What holds take is not counted.
broken_cost_of_holds = sets(Joining, "stood_for_hold", lambda *_: None)
# Who comes in trains another network than the others.
broken_turns = sets(Beside, "out_of_turn", lambda *_: {})


def broken_row(patch: pytest.MonkeyPatch) -> None:
    """Who has voted is still at work on the step."""
    patch.setitem(replica.TRANSITIONS, (StepPhase.TRAINING, StepEvent.VOTE), StepPhase.TRAINING)  # type: ignore[arg-type]


def broken_lineage(patch: pytest.MonkeyPatch) -> None:
    """Equal steps are taken for equal states."""

    right = recovery._go_on_from

    def by_step(members: list[recovery.Holder], version: StateVersion, *, is_first: bool) -> recovery.Assignment:
        of_step = [m.version.proven and m.version.step == version.step for m in members]
        alike = [replace(m, version=version) if is_it else m for m, is_it in zip(members, of_step, strict=True)]
        return right(alike, version, is_first=is_first)

    patch.setattr(recovery, "_go_on_from", by_step)


def broken_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Who was left behind commits."""
    right = Tally.outcome
    patch.setattr(
        Tally,
        "outcome",
        lambda tally, name: Outcome.COMMIT if right(tally, name) is not Outcome.DISCARD else Outcome.DISCARD,
    )
    patch.setattr(ReplicaState, "healed", property(lambda state: True))


def broken_quorum_id(patch: pytest.MonkeyPatch) -> None:
    """A new life of the lighthouse counts from 1."""
    right = QuorumIds.begin_after

    def forget(ids: QuorumIds, quorum_id: int, epoch: str) -> bool:
        before = ids.latest
        is_news = right(ids, quorum_id, epoch)
        ids._latest = before
        return is_news

    patch.setattr(QuorumIds, "begin_after", forget)


def broken_giving_up(patch: pytest.MonkeyPatch) -> None:
    """A rank that gives up waiting does so alone."""
    right = GroupState._forget_decision

    def forget(group: GroupState, reason: str, exclude: int | None = None) -> list[object]:
        return [i for i in right(group, reason, exclude) if group._decided.clear() or i.rank == 0]

    patch.setattr(GroupState, "_forget_decision", forget)


def broken_vote(patch: pytest.MonkeyPatch) -> None:
    """A step counts though a voter is against."""
    right = Tally.cast
    patch.setattr(
        Tally, "cast", lambda tally, name, vote: right(tally, name, msgspec.structs.replace(vote, approve=True))
    )


def broken_second_look(patch: pytest.MonkeyPatch) -> None:
    """Nothing looks again at groups that wait for a quorum."""
    right = LighthouseState._reconsider

    def reconsider(state: LighthouseState, now: float) -> Iterator[Instruction]:
        yield from right(state, now)
        state._evaluate_at = None

    patch.setattr(LighthouseState, "_reconsider", reconsider)


def broken_leaving_together(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone hears that its group leaves, and the others hear it no more when they ask for the next step."""
    right = GroupState._on_lighthouse_message

    def tell_one(group: GroupState, message: FromLighthouse) -> Iterator[GroupInstruction]:
        for done in right(group, message):
            if isinstance(done, SendToRank) and done.rank and isinstance(done.message, CommitDecided):
                done = SendToRank(done.rank, msgspec.structs.replace(done.message, leaving=False))
            yield done

    def go_on(group: GroupState, request: QuorumRequest) -> Answer:
        return msgspec.structs.replace(last_step(group, request), leaving=False)

    last_step = GroupState._last_step
    patch.setattr(GroupState, "_on_lighthouse_message", tell_one)
    patch.setattr(GroupState, "_last_step", go_on)


def broken_spectator(patch: pytest.MonkeyPatch) -> None:
    """Who looks on is counted."""
    right = recovery._assignment
    patch.setattr(recovery, "_assignment", lambda *how, spectators=(), **others: right(*how, **others))


def broken_wait_for_work(patch: pytest.MonkeyPatch) -> None:
    """Those who look on do not wait for those who are at work."""
    right = lighthouse.decide_quorum

    def decide(*, asked: dict[str, Asked], **others: object) -> object:
        if not any(wish.contributes for wish in asked.values()):
            asked = {name: replace(wish, contributes=True) for name, wish in asked.items()}
        return right(asked=asked, **others)  # type: ignore[arg-type]

    patch.setattr(lighthouse, "decide_quorum", decide)


def broken_holders(patch: pytest.MonkeyPatch) -> None:
    """Who holds the newest state and is at work is waited for only where it was in the last quorum."""
    right = lighthouse.decide_quorum
    patch.setattr(lighthouse, "decide_quorum", lambda *, holders, **others: right(**others))


def broken_catching_up(patch: pytest.MonkeyPatch) -> None:
    """Whatever is named is taken for what is held."""
    right = ReplicaState.located

    def located(state: ReplicaState, message: StateLocated) -> None:
        right(state, message)
        if message.version.proven:
            state.caught_up(message.version)

    patch.setattr(ReplicaState, "located", located)


def broken_voices(patch: pytest.MonkeyPatch) -> None:
    """Who has just joined has a voice as all others."""
    patch.setattr(Trials, "lost", lambda trials, replica_id: None)
    right = Trials._judge_alike

    def judge(trials: Trials, members: dict[str, Member], silent: set[str], step: int, verdict: Verdict) -> None:
        trials._voices |= dict.fromkeys(members)
        trials._joined = {m: moved for m, moved in trials._joined.items() if m not in members}
        right(trials, members, silent, step, verdict)

    patch.setattr(Trials, "_judge_alike", judge)


def broken_speaker(patch: pytest.MonkeyPatch) -> None:
    """Who spoke for the job does so after its vote, whatever its part is by now."""
    right = ReplicaState.vote

    def vote(state: ReplicaState, *args: str, **others: object) -> CommitVote:
        before = state.speaks
        cast = right(state, *args, **others)  # type: ignore[arg-type]
        state.speaks = before
        return cast

    patch.setattr(ReplicaState, "vote", vote)


def broken_old_outcome(patch: pytest.MonkeyPatch) -> None:
    """A lighthouse that was restarted is told how the step before the open one ended."""
    right = ReplicaState.formed

    def form(state: ReplicaState, formed: Answer) -> object:
        before = state._last_outcome
        plan = right(state, formed)
        state._last_outcome = before if plan is not None else state._last_outcome
        return plan

    patch.setattr(ReplicaState, "formed", form)


def broken_first_vote(patch: pytest.MonkeyPatch) -> None:
    """A rank's vote is its group's, before the others have voted."""
    right = GroupState._votes_on

    def votes_on(group: GroupState, rank: int, vote: CommitVote) -> Iterator[GroupInstruction]:
        yield from right(group, rank, vote)
        if group._voted is None and group._votes.keys() == {rank}:
            group._voted = vote
            yield SendToLighthouse(vote)

    patch.setattr(GroupState, "_votes_on", votes_on)


def broken_names_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """A group holds what its first rank holds."""
    right = GroupState._combine

    def combine(group: GroupState, by_rank: dict[int, QuorumRequest]) -> QuorumRequest:
        return msgspec.structs.replace(right(group, by_rank), version=by_rank[0].version, torn=by_rank[0].torn)

    patch.setattr(GroupState, "_combine", combine)


def broken_memory_of_learners(patch: pytest.MonkeyPatch) -> None:
    """A lighthouse that was restarted waits for those who say that they are beside the quorum."""
    right = LighthouseState._on_hello

    def on_hello(state: LighthouseState, connection: str, hello: Hello, now: float) -> Iterator[Instruction]:
        yield from right(state, connection, hello, now)
        member = state._roster.on(connection)
        if member is not None and member.is_beside:
            member.phase = MemberPhase.BETWEEN

    patch.setattr(LighthouseState, "_on_hello", on_hello)


def broken_majority(patch: pytest.MonkeyPatch) -> None:
    """Learners are among those who have to ask before a quorum is looked for at once."""
    right = LighthouseState._reconsider

    def reconsider(state: LighthouseState, now: float) -> Iterator[Instruction]:
        beside = [(member, member.phase) for member in state.members.values() if member.is_beside]
        for member, _ in beside:
            member.phase = MemberPhase.AWAY
        instructions = list(right(state, now))
        for member, phase in beside:
            member.phase = phase
        yield from instructions

    patch.setattr(LighthouseState, "_reconsider", reconsider)


def broken_taking(patch: pytest.MonkeyPatch) -> None:
    """A quorum takes what was connected for others."""

    def take(connecting: Connecting, members: list[str], now: float) -> str:
        return "" if connecting._meeting is None else connecting._meeting.place

    patch.setattr(Connecting, "take", take)


def broken_sources(patch: pytest.MonkeyPatch) -> None:
    """Who was just given the state gives it to others, though there are some who had it before."""
    right = Beside.give_held

    def give(beside: Beside, newcomers: object, proved: object, assignment: object) -> object:
        holding = [beside._job.members[part.replica_id] for part in assignment.parts]  # type: ignore[attr-defined]
        return right(beside, newcomers, Beside.giving(holding), assignment)  # type: ignore[arg-type]

    patch.setattr(Beside, "give_held", give)


def broken_admission(patch: pytest.MonkeyPatch) -> None:
    """Who lacks the state is admitted."""
    patch.setattr(Beside, "should_warm_up", lambda *_: False)
    right = lighthouse.assign_recovery

    def assign(members: list[recovery.Holder], **others: object) -> object:
        assignment = right(members, **others)  # type: ignore[arg-type]
        return replace(assignment, lacking=()) if isinstance(assignment, recovery.Assignment) else assignment

    patch.setattr(lighthouse, "assign_recovery", assign)


def broken_name(patch: pytest.MonkeyPatch, *, is_first: bool = False) -> None:
    """Who could not load the state of a hold asks as one that has it. `is_first`: of the job's first state alone."""
    right = ReplicaState.learned

    def learned(state: ReplicaState) -> Outcome:
        formed = state.quorum
        if formed is not None and (formed.names_state if is_first else formed.held) and state.version != formed.version:
            state.load_finished(formed.version)
        return right(state)

    patch.setattr(ReplicaState, "learned", learned)


def broken_first_name(patch: pytest.MonkeyPatch) -> None:
    """Who could not load the job's first state asks as one that has it."""
    broken_name(patch, is_first=True)


def broken_beginners(patch: pytest.MonkeyPatch) -> None:
    """Who comes while the first state is given counts as one of those who begin the job."""
    right = Trials.begins

    def begins(trials: Trials, assignment: recovery.Assignment, members: list[Member], beginners: object) -> None:
        right(trials, assignment, members, {member.replica_id: True for member in members})

    patch.setattr(Trials, "begins", begins)


def broken_place_of_loading(patch: pytest.MonkeyPatch) -> None:
    """Quorums are held for those who begin an iteration."""
    right = LighthouseState._on_quorum_request

    def on_request(state: LighthouseState, member: Member, request: QuorumRequest, now: float) -> Iterator[Instruction]:
        begins = not state._job.holds_newest(request.version) and state.newest_step > 0
        yield from right(state, member, msgspec.structs.replace(request, at_end=request.at_end or begins), now)

    patch.setattr(LighthouseState, "_on_quorum_request", on_request)


def broken_ranks_together(patch: pytest.MonkeyPatch) -> None:
    """A rank loads a state as soon as it has it."""
    right = Arrivals.arrived

    def arrived(arrivals: Arrivals, rank: int, failure: str, *, loads: bool) -> str | None:
        arrivals._here |= set(range(arrivals._world_size))
        return right(arrivals, rank, failure, loads=loads)

    patch.setattr(Arrivals, "arrived", arrived)


def broken_tickets_of_followers(patch: pytest.MonkeyPatch) -> None:
    """Who has received the state beside the job is given nothing when the quorum is held for it at the same step, and may begin
    that without it."""
    broken_lateness_of_followers(patch)
    right = ReplicaState.formed

    def formed(state: ReplicaState, message: Answer) -> StepPlan | None:
        is_here = message.held and message.version == state.version
        plan = right(state, message)
        if plan is None or not is_here:
            return plan
        state._is_stale = False
        return replace(plan, load=False)

    patch.setattr(ReplicaState, "formed", formed)


def broken_lateness_in_a_hold(patch: pytest.MonkeyPatch) -> None:
    """Who is held for has the values of now from then on, also if it does not receive them."""
    right = Holds.begin

    def begin(holds: Holds, newcomers: list[Member], *given: object) -> None:
        right(holds, newcomers, *given)  # type: ignore[arg-type]
        for member in newcomers:
            holds._job.late.pop(group_name(member.replica_id), None)

    patch.setattr(Holds, "begin", begin)


def broken_lateness_of_corrected_ones(patch: pytest.MonkeyPatch) -> None:
    """Who was given the state before a step, and did not begin that with the others, may begin a later attempt with it."""
    right = Holds.gives

    def gives(holds: Holds, members: Collection[Member], giving: Collection[Member]) -> None:
        right(holds, [member for member in members if member.asked.at_end], giving)

    patch.setattr(Holds, "gives", gives)


def broken_lateness_of_outer_loops(patch: pytest.MonkeyPatch) -> None:
    """What was given for one attempt at a round is another state than that of the next attempt."""
    patch.setattr(hold, "_moves_between_attempts", lambda _: True)
    patch.setattr(run, "QUIET_LIMIT_S", 10.0)  # it would be as it is for ever
    patch.setattr(run, "QUIET_PHASES", 0)


FOUND_BY: dict[Break, int] = {
    broken_leaving_together: 57,
    broken_lineage: 140,
    broken_giving_up: 4,
    broken_vote: 3,
    broken_patience: 68,
    broken_question: 28,
    broken_names_of_ranks: 23,
    broken_tickets_of_sources: 86,
    broken_tickets_in_holds: 10,
    broken_tickets_of_late_ones: 19,
}
"""The first seed that finds what was broken, of those that take seconds to come to it."""
BROKEN: list[tuple[Break, str, Callable[[int], object], Sequence[int]]] = [
    (broken_leaving_together, "not well", simulate, range(260)),
    (broken_lineage, "is healthy in|two states are called", simulate, range(260)),
    (broken_left_behind, "the quorum's state is|approves without the state", simulate, range(260)),
    (broken_quorum_id, "is given again by|saw quorum", simulate, range(260)),
    (broken_contribution, "it contributes, and has another state", simulate, range(260)),
    (broken_newest_step, "is the newest", simulate, range(260)),
    (broken_giving_up, "a rank has gone on", simulate, range(260)),
    (broken_torn_state, "'torn'|a torn state", simulate, range(260)),
    (broken_vote, "committed different steps|not well", simulate, range(260)),
    (broken_order_of_silence, "was heard before a member that counts as silent for longer", simulate, range(260)),
    (broken_second_look, "nothing looks at them again", simulate, range(260)),
    (broken_sources, "which were just given it themselves", simulate, range(60)),
    (broken_spectator, "did not train, and are counted in", run_outer, range(300)),
    (broken_wait_for_work, "did not train and form a quorum", run_outer, range(300)),
    (broken_patience, "is merely slow, and left out", run_outer, range(300)),
    (broken_holders, "did not train and form a quorum", run_outer, range(300)),
    (broken_catching_up, "which is another state", run_outer, range(300)),
    (broken_return, "left out", run_with_cuts, range(20)),
    (broken_allowance, "stood still", run_with_slow_transfers, range(40)),
    (broken_purse, "stood still", run_with_slow_transfers, range(40)),
    (broken_trial, "are in one quorum of", run_with_drift, range(100)),
    (broken_majority_of_voices, "most hold what it holds", run_with_drift, range(100)),
    (broken_voices, "most hold what it holds", run_with_drift, range(100)),
    (broken_voice, "most hold what it holds", run_with_discards, range(40)),
    (broken_speaker, "it has voted, and may write", run_twice, range(60)),
    (broken_process_group, "a process group that is broken can be used again", run_twice, range(60)),
    (broken_order_of_taking, "a step begins with a state that is another than it says", run_twice, range(60)),
    (broken_old_outcome, "the last step's outcome is told beside a later one", run_twice, range(60)),
    (broken_row, "there is a vote in another phase", run_twice, range(60)),
    (broken_first_vote, "the group approves, and not all of its ranks do", run_twice, range(60)),
    (broken_question, "a rank has gone on", run_twice, range(60)),
    (broken_names_of_ranks, "the group holds a state that not all of its ranks hold", run_twice, range(60)),
    (broken_memory_of_learners, "without them a quorum forms after", run_with_learners, range(40)),
    (broken_majority, "without them a quorum forms after", run_with_learners, range(40)),
    (broken_tickets_of_sources, "holds values of another attempt than", simulate, range(120)),
    (broken_tickets_in_holds, "holds values of another attempt than", simulate, range(120)),
    (broken_tickets_of_late_ones, "holds values of another attempt than", simulate, range(120)),
    (broken_tickets_of_followers, "holds values of another attempt than", run_with_spares, range(12)),
    (broken_lateness_in_a_hold, "holds values of another attempt than", run_with_turns, [64212]),
    (broken_lateness_of_followers, "holds values of another attempt than", simulate, [61257]),
    (broken_lateness_of_corrected_ones, "holds values of another attempt than", simulate, [61280]),
    (broken_lateness_of_outer_loops, "not well", run_outer, [62188]),
    (broken_end_of_holds, "stood still", run_in_holds, range(100)),
    (broken_admission, "without its state", run_in_holds, range(100)),
    (broken_name, "goes back|takes|two states are called", run_in_holds, range(100)),
    (broken_first_name, "and show|takes|two states are called", run_in_holds, range(100)),
    (broken_beginners, "counts as one that began the job", run_in_holds, range(100)),
    (broken_place_of_loading, "in the middle of an iteration|not well", run_in_holds, range(100)),
    (broken_putting_back, "nobody holds|takes|two states are called", run_in_holds, range(100)),
    (broken_ranks_together, "of its group have received it", run_in_holds, range(100)),
    (
        broken_once_at_a_boundary,
        "again|stood still|have not been connected|has two sets of members",
        run_in_holds,
        range(100),
    ),
    (broken_cost_of_holds, "stood still", run_in_holds, range(100)),
    (broken_meeting, "have not been connected", run_in_holds, range(100)),
    (broken_taking, "takes what was not connected|two members meet", run_in_holds, range(100)),
    (broken_savers, "writes a checkpoint of", run_in_holds, range(100)),
    (broken_step_begun_again, "have read another batch", run_that_skips, range(20)),
    (broken_turns, "not well", run_in_two_turns, range(20)),
]
"""What is broken, and how it is said by which simulation with one of these seeds at least."""


@pytest.mark.parametrize(
    ("break_it", "what", "runs", "seeds"), BROKEN, ids=[break_it.__name__ for break_it, *_ in BROKEN]
)
def test_the_simulation_finds_a_rule_that_was_broken_on_purpose(
    break_it: Break, what: str, runs: Callable[[int], object], seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FOUND_BY.get(break_it, 0)
    break_it(monkeypatch)
    with pytest.raises(InvariantError, match=what):
        for seed in [*seeds[first:], *seeds[:first]]:
            runs(seed)


def test_the_simulation_finds_that_groups_go_without_being_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deciding, "as_told", lambda state, member, decided, now, **how: decided)
    assert discards_beside_drains(range(4), 0)[1] > 0


def test_an_error_that_is_none_of_an_invariant_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holds, "look", lambda holds: iter(()))
    with pytest.raises(CrashError, match="seed 0: TypeError"):
        simulate(0)
