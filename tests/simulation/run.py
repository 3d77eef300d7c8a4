"""A whole job in one thread and virtual time: `core`'s real states, a model of all that is around them, one seed.

    report = Simulation(seed=7).run()        # raises InvariantError, with the seed and the last lines of its log
    scripts/simulate --seeds 100000

A run has two parts: troubles at any event, then quiet. In the quiet all groups have to end at equal states and commit on, but
where they have drifted apart and no strict majority of them holds one state.
What is checked is in `simulation.oracle`; what can go wrong in `simulation.chaos`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from simulation import microbatches
from simulation.chaos import (
    Fault,
    OuterPlan,
    Scenario,
    draw_learning_scenario,
    draw_outer_scenario,
    draw_scenario,
    draw_scenario_of_leases,
    draw_scenario_of_skips,
    draw_scenario_of_turns,
)
from simulation.clock import Clock, Process
from simulation.collectives import Collectives
from simulation.group import ReplicaGroup
from simulation.lighthouse import Lighthouse
from simulation.oracle import InvariantError, Oracle, must_hold
from simulation.outer_rank import OuterPace, OuterRank
from simulation.outer_watch import SLOWEST, OuterWatch
from simulation.several import Lighthouses
from simulation.trainer import Trainer, TrainerSettings
from simulation.transfers import Transfers
from torchft_ckpt.core.coordination.lighthouse_events import LighthouseSettings, Received
from torchft_ckpt.core.coordination.messages import AllowStepLoss, Drain, OnReplicasDiffer
from torchft_ckpt.core.coordination.replica import ReplicaSettings, StepPhase

logger = logging.getLogger(__name__)

QUIET_LIMIT_S = 150.0
"""Simulated time within which all must be well again. The longest wait in it is a joiner's back-off."""
QUIET_COMMITS = 3
QUIET_PHASES = 15
"""As long again as so many of the slowest outer loop's phases."""
OPERATOR_PATIENCE_S = 5.0
LATE_LIMIT_S = 1.5
"""Where groups are killed and no more, nobody waits longer for those who do not come to a collective between two steps."""
RECONNECT_S = 4.0
"""A connection is up again within this, once it can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a run went."""

    seed: int
    num_events: int
    num_commits: int
    num_faults: int
    num_rollbacks: int
    num_operator_words: int
    num_corrected: int
    """Times that a group was found to hold another state than most."""
    recovered_after_s: float
    num_held: int
    """Times that a group was told to receive the state of a step whose quorum was held for it."""
    num_followed: int
    """Times that a rank began to receive a state outside of the quorum."""
    num_compared_without_learners: int
    """Times that the lighthouse was compared with what it would do without learners."""
    discarded: dict[str, int]
    """By replica id: the steps that it was healthy in and that were discarded, at rank 0."""


class CrashError(Exception):
    """An error that is none of an invariant came up in a run: `core`'s, or the simulation's own."""


class Simulation:
    """One run.

    Args:
        seed: of all chance.
        scenario: what to run; drawn from the seed by default.
        script: faults at given event numbers, besides those drawn; each names its victim's group.
    """

    def __init__(
        self, seed: int, scenario: Scenario | None = None, script: Sequence[tuple[int, Fault, int]] = ()
    ) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.scenario = scenario or draw_scenario(self.rng)
        self.script = {number: (fault, group) for number, fault, group in script}
        self.clock = Clock()
        self.oracle = Oracle()
        self.lines: deque[str] = deque(maxlen=400)
        plan = self.scenario
        self.collectives = Collectives(self.clock, self.rng, self.oracle.fail, timeout_s=3.0)
        self.transfers = Transfers(self.clock, self.rng, stall_timeout_s=0.5)
        self.transfers.duration_s = plan.transfer_s
        self.transfers.staging_s = plan.staging_s
        self.transfers.failure_rate, self.transfers.torn_rate = plan.transfer_failure_rate, plan.torn_rate
        settings = LighthouseSettings(
            min_replicas=plan.min_replicas,
            join_timeout_s=plan.join_timeout_s,
            heartbeat_timeout_s=plan.heartbeat_timeout_s,
        )
        around = (self.clock, self.rng, settings, self.oracle, self.log, plan.max_delay_s)
        self.several = Lighthouses(*around, plan.leases) if plan.leases is not None else None
        self._only = Lighthouse(*around) if self.several is None else None
        self.groups: list[ReplicaGroup] = []
        if self.several is not None:
            self.several.groups = lambda: self.groups
        self.past: list[ReplicaGroup] = []
        self._lives = [0] * plan.num_groups
        self._paces = [_pace(plan.outer, self.rng) for _ in range(plan.num_groups)] if plan.outer else []
        self._silent_until = [0.0] * plan.num_groups
        self._troubled_until = [0.0] * plan.num_groups
        self._cuts: list[list[tuple[float, float]]] = [[] for _ in range(plan.num_groups)]
        if plan.outer is not None:
            watch = OuterWatch(lambda: self.groups, self._troubled_until, self._cuts, self.oracle.fail)
            self.oracle.on_formed = watch.formed
        self._is_restarting = [False] * plan.num_groups
        self._checkpoint: tuple[int, list[object]] | None = None
        self._num_faults = 0
        self._num_words = 0
        for index in range(plan.num_groups):
            self.groups.append(self._new_group(index))
            self.clock.after(self.rng.uniform(0, 0.2), None, self.groups[index].start)

    @property
    def lighthouse(self) -> Lighthouse:
        """The only one; of several that which leads."""
        return self._only or self.several.leader  # type: ignore[union-attr]

    def log(self, line: str) -> None:
        self.lines.append(f"{self.clock.now:9.4f} #{self.clock.num_events} {line}")

    def run(self) -> Report:
        """Run. Raises `InvariantError`, or `CrashError`, naming the seed."""
        try:
            self._run_chaos()
            recovered_after_s = self._run_quiet()
        except Exception as error:
            text = "\n".join(self.lines)
            what = f"{type(error).__name__}: {error}"
            raise (InvariantError if isinstance(error, InvariantError) else CrashError)(
                f"seed {self.seed}: {what}\n{self.scenario}\n{text}\nseed {self.seed}: {what}"
            ) from error
        discarded = {g.replica_id: g.trainers[0].num_discarded for g in [*self.past, *self.groups]}
        return Report(
            seed=self.seed,
            num_events=self.clock.num_events,
            num_commits=self.oracle.num_commits,
            num_faults=self._num_faults,
            num_rollbacks=self.oracle.num_rollbacks,
            num_operator_words=self._num_words,
            num_corrected=self.oracle.num_corrected,
            recovered_after_s=recovered_after_s,
            num_held=self.oracle.num_held,
            num_followed=self.oracle.num_followed,
            num_compared_without_learners=self.oracle.num_compared_without_learners,
            discarded=discarded,
        )

    # -------------------------------------------------------------------------------------------------------- the job

    def _new_group(self, index: int) -> ReplicaGroup:
        plan = self.scenario
        self._lives[index] += 1
        replica_id = f"g{index}:{self._lives[index]}"
        processes = [Process(f"{replica_id}/{rank}") for rank in range(plan.group_world_size)]
        group = ReplicaGroup(
            self.clock,
            self.rng,
            replica_id=replica_id,
            processes=processes,
            lighthouses=[self._only] if self._only is not None else self.several.each,  # type: ignore[union-attr]
            is_reachable=lambda lighthouse: self._is_reachable(index, lighthouse),
            heartbeat_s=plan.heartbeat_timeout_s / 3,
            oracle=self.oracle,
            clock_rate=self.several.draw_rate() if self.several is not None else 1.0,
        )
        if self.several is not None:
            group.on_taken = partial(self.several.taken, group)
        only_kills = set(plan.faults) <= {Fault.KILL_GROUP, Fault.KILL_RANK} and plan.leases is None
        settings = TrainerSettings(
            replica=ReplicaSettings(
                min_replica_size=plan.min_replica_size,
                join_stall_limit_s=plan.join_stall_limit_s,
                spare=self._is_spare(index),
                check_equal_every=plan.check_equal_every,
                on_replicas_differ=OnReplicasDiffer.HEAL,
                connects_beside=plan.connects_beside,
                store_address="store:1",
            ),
            tells_reach=plan.tells_reach,
            changing=plan.changing,
            load_s=plan.load_s,
            turns=plan.turns,
            shows=plan.shows,
            num_allreduces=plan.num_allreduces,
            num_late=plan.num_late,
            late_limit_s=LATE_LIMIT_S if only_kills else None,
            decision_timeout_s=plan.decision_timeout_s,
        )
        restored = self._checkpoint if self.rng.random() < plan.restore_rate else None
        for rank, process in enumerate(processes):
            trainer = (Trainer if plan.outer is None else OuterRank)(
                self.clock,
                self.rng,
                process,
                replica_id=replica_id,
                rank=rank,
                value=restored[1][rank] if restored is not None else self.rng.getrandbits(60),
                settings=settings,
                collectives=self.collectives,
                transfers=self.transfers,
                oracle=self.oracle,
                moods=plan.moods,
                send=lambda message, rank=rank: group.take(rank, message),  # type: ignore[misc]
                stop=lambda reason, rank=rank: group.end_rank(rank, reason),  # type: ignore[misc]
            )
            if restored is not None:
                trainer.replica.restore(restored[0])
            trainer.num_ranks = len(processes)
            if isinstance(trainer, OuterRank):
                trainer.pace = self._paces[index]
            group.trainers.append(trainer)
            process.checks.append(must_hold(trainer.replica.validate))
            process.on_death.append(lambda: self._notice_death(index, group))
        return group

    def _is_reachable(self, index: int, lighthouse: Lighthouse) -> bool:
        is_parted = self.several is not None and not self.several.is_reachable(index, lighthouse)
        return self.clock.now >= self._silent_until[index] and not is_parted

    def _is_spare(self, index: int) -> bool:
        return index >= self.scenario.num_groups - self.scenario.num_spares

    def _notice_death(self, index: int, group: ReplicaGroup) -> None:
        """The launcher ends what is left of the group, and starts it again as a whole."""
        if self._is_restarting[index] or self.groups[index] is not group:
            return
        self._is_restarting[index] = True

        def restart() -> None:
            group.kill()
            self._is_restarting[index] = False
            self.past.append(group)
            self.groups[index] = self._new_group(index)
            self.log(f"{self.groups[index].replica_id} starts")
            self.groups[index].start()

        self.clock.after(self.rng.uniform(0.1, 1.0), None, restart)

    def _save_checkpoint(self) -> None:
        for group in self.groups:
            versions = {trainer.replica.version for trainer in group.trainers}
            is_exact = not any(trainer.replica.came_in for trainer in group.trainers)
            if len(versions) == 1 and group.trainers[0].replica.version.proven and is_exact:
                step = group.trainers[0].replica.version.step
                self._checkpoint = (step, [trainer.value for trainer in group.trainers])
                return

    # --------------------------------------------------------------------------------------------------------- faults

    def _run_chaos(self) -> None:
        plan = self.scenario
        while self.clock.now < plan.chaos_s and self.clock.step():
            scripted = self.script.pop(self.clock.num_events, None)
            if scripted is not None:
                self._do(scripted[0], scripted[1])
            if plan.faults and self.rng.random() < plan.fault_rate:
                fault = self.rng.choices(list(plan.faults), list(plan.faults.values()))[0]
                self._do(fault, self.rng.randrange(plan.num_groups))
            if self.several is not None and self.rng.random() < plan.leases.fault_rate:  # type: ignore[union-attr]
                self._num_faults += 1
                self.several.trouble()
            if plan.collective_stall_rate:
                is_stalling = self.rng.random() < plan.collective_stall_rate
                self.collectives.stall_s = self.rng.uniform(0.1, 1.5) if is_stalling else 0.0
            if plan.restore_rate and self.rng.random() < 0.002:
                self._save_checkpoint()

    def _do(self, fault: Fault, index: int) -> None:
        rng, clock, group = self.rng, self.clock, self.groups[index]
        self._num_faults += 1
        self.transfers.duration_s = self.scenario.rejoin_s or self.transfers.duration_s
        self.log(f"--- {fault.value}: {group.replica_id}")
        if fault is Fault.KILL_GROUP:
            group.kill()
        elif fault is Fault.KILL_RANK:
            clock.kill(rng.choice(group.processes))
        elif fault in (Fault.STOP_GROUP, Fault.STOP_RANK):
            victims = group.processes if fault is Fault.STOP_GROUP else [rng.choice(group.processes)]
            for process in victims:
                clock.stop(process)
            duration_s = rng.uniform(0.1, 4.0)
            self._note_trouble([index], duration_s)
            clock.after(duration_s, None, lambda: self._wake(victims))
        elif fault is Fault.CUT:
            self._cuts[index].append((clock.now, clock.now + RECONNECT_S))
            if group.connection is not None:
                group.connection.cut()
        elif fault is Fault.SILENCE:
            duration_s = rng.uniform(0.1, 4.0)
            self._note_trouble([index], duration_s)
            self._silence(index, group, duration_s)
        elif fault is Fault.FIREWALL:
            duration_s = rng.uniform(0.5, 8.0)
            self._note_trouble([index], duration_s)
            self.collectives.apart[f"g{index}"] = clock.now + duration_s
        elif fault is Fault.CRASH_LIGHTHOUSE:
            self.lighthouse.crash()
            duration_s = rng.choice((0.02, rng.uniform(0.05, 3.0)))
            self._note_trouble(range(len(self.groups)), duration_s)
            clock.after(duration_s, None, self._restart_lighthouse)
        elif fault is Fault.DRAIN:
            who = rng.choice(("operator", "rank", "all"))
            if who == "operator" and self.lighthouse.process.is_alive:
                self._tell_lighthouse(Drain(replica_id=group.replica_id))
            else:
                for trainer in [rng.choice(group.trainers)] if who == "rank" else group.trainers:
                    clock.after(rng.uniform(0.0, 0.2), trainer.process, trainer.wish_to_leave)
        elif fault is Fault.STOP_LIGHTHOUSE:
            process = self.lighthouse.process
            clock.stop(process)
            duration_s = rng.uniform(0.1, 4.0)
            self._note_trouble(range(len(self.groups)), duration_s)
            clock.after(duration_s, None, lambda: self._wake([process]))

    def _tell_lighthouse(self, word: AllowStepLoss | Drain) -> None:
        """The operator says something. A lighthouse that is stopped hears it when it wakes."""
        lighthouse = self.lighthouse
        self.clock.after(0.0, lighthouse.process, lambda: lighthouse.handle(Received("operator", word)))

    def _note_trouble(self, indices: Iterable[int], duration_s: float) -> None:
        """These groups cannot be blamed, or relied on, until they are connected again."""
        until = self.clock.now + duration_s + RECONNECT_S
        for index in indices:
            self._troubled_until[index] = max(self._troubled_until[index], until)

    def _wake(self, processes: Sequence[Process]) -> None:
        for process in processes:
            if process.is_stopped:
                self.log(f"{process.name} wakes")
                self.clock.wake(process)

    def _restart_lighthouse(self) -> None:
        self.log("the lighthouse is back")
        self.lighthouse.restart()

    def _silence(self, index: int, group: ReplicaGroup, duration_s: float) -> None:
        connection = group.connection
        self._silent_until[index] = max(self._silent_until[index], self.clock.now + duration_s)
        if connection is not None and not connection.is_silent:
            connection.fall_silent()
            self.clock.after(duration_s, None, connection.speak_again)

    # ---------------------------------------------------------------------------------------------------------- quiet

    def _run_quiet(self) -> float:
        self.log("--- quiet")
        plan = self.scenario
        plan.moods.calm_down(slowness=3.0)
        # No transfer takes longer than the others grant, be it that a rank measures half as much again.
        self.transfers.duration_s = (0.02, 0.1)
        self.transfers.failure_rate = self.transfers.torn_rate = self.collectives.stall_s = 0.0
        self.transfers.staging_s = 0.0
        self.collectives.apart.clear()
        self._keep_pace()
        began = self.clock.now
        limit_s = QUIET_LIMIT_S + QUIET_PHASES * max((outer.phase_s for outer in self._paces), default=0.0)
        stuck_since: float | None = None
        check_at = began
        while self.clock.step():
            if self.clock.now < check_at:
                continue
            check_at = self.clock.now + 0.25
            if self._all_is_well():
                return self.clock.now - began
            if self.clock.now > began + limit_s:
                break
            reasons = [t.pending.reason for g in self.groups for t in g.trainers if t.pending is not None]
            needs_word = [r for r in reasons if "accept the loss" in r]
            is_torn = [r for r in reasons if "whole state" in r]
            is_over = self.lighthouse.process.is_alive and self.lighthouse.state.finished_step is not None
            if not needs_word and not is_torn and not is_over:
                stuck_since = None
            elif stuck_since is None:
                stuck_since = self.clock.now
            elif self.clock.now > stuck_since + OPERATOR_PATIENCE_S and self.lighthouse.process.is_alive:
                stuck_since = None
                self._num_words += 1
                if needs_word or is_over:
                    self.log("the operator allows the loss")
                    self._tell_lighthouse(AllowStepLoss())
                else:
                    self.log("the operator restarts a group")
                    self.groups[0].kill()
        states = [
            (t.address, t.replica.version, t.replica.phase.value, t.pending) for g in self.groups for t in g.trainers
        ]
        raise InvariantError(f"not well {self.clock.now - began:.1f} s after the last fault: {states}")

    def _keep_pace(self) -> None:
        """No outer loop is slower from now on than the others wait for."""
        for index, pace in enumerate(self._paces):
            slowest_s = min(pace.phase_s for pace in self._paces) * SLOWEST / (1.0 + pace.jitter)
            self._paces[index] = replace(pace, phase_s=min(pace.phase_s, slowest_s))
            for trainer in self.groups[index].trainers:
                if isinstance(trainer, OuterRank):
                    trainer.pace = self._paces[index]

    def _all_is_well(self) -> bool:
        """All live, hold equal versions after the same commits, and have trained together several times. A spare need not."""
        if not all(trainer.process.is_alive for group in self.groups for trainer in group.trainers):
            return False
        working = [g for index, g in enumerate(self.groups) if not (self._is_spare(index) and _is_idle(g))]
        trainers = [trainer for group in working for trainer in group.trainers]
        latest = [trainer.last_commits for trainer in trainers]
        if any(len(commits) < QUIET_COMMITS for commits in latest):
            return False
        newest = max(commits[-1].step for commits in latest)
        shared = {tuple(commits)[-QUIET_COMMITS:] for commits in latest if commits[-1].step == newest}
        behind = [commits for commits in latest if commits[-1].step != newest]
        if len(shared) != 1 or any(commits[-1] not in next(iter(shared)) for commits in behind):
            return False
        held = Counter(tuple(trainer.held for trainer in group.trainers) for group in working)
        if self.scenario.check_equal_every and self.scenario.shows and len(held) > 1:
            return False  # one of them has to load yet
        return all(
            trainer.replica.quorum.num_contributors == len(working) for trainer in trainers if trainer.replica.quorum
        )


def _is_idle(spare: ReplicaGroup) -> bool:
    """Whether a spare waits to be called, or follows."""
    replica = spare.trainers[0].replica
    return replica.is_learner or replica.phase is StepPhase.ASKING


def _pace(plan: OuterPlan, rng: Random) -> OuterPace:
    """Draw one group's share of a plan: how slow it is."""
    return OuterPace(
        phase_s=plan.phase_s * rng.uniform(1.0, plan.spread),
        delay=plan.delay,
        retries=plan.retries,
        late_vote_rate=plan.late_vote_rate,
        catch_up_s=plan.catch_up_s,
    )


KINDS: dict[str, Callable[[Random], Scenario]] = {
    "plain": draw_scenario,
    "outer": draw_outer_scenario,
    "learners": draw_learning_scenario,
    "turns": draw_scenario_of_turns,
    "skips": draw_scenario_of_skips,
    "leases": draw_scenario_of_leases,
}
"""What draws a run."""


def simulate(seed: int, *, outer: bool = False, kind: str = "plain") -> Report:
    """Run the simulation of a seed, of a kind of `KINDS`. `outer`: of outer loops. Raises as `Simulation.run` does."""
    kind = "outer" if outer else kind
    return Simulation(seed, None if kind == "plain" else KINDS[kind](Random(seed))).run()


def run_seeds(seeds: Sequence[int], *, outer: bool = False, kind: str = "plain") -> list[Report]:
    """Run one simulation a seed. Raises at the first that fails."""
    return [simulate(seed, outer=outer, kind=kind) for seed in seeds]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the number of failed seeds, at most 1."""
    parser = argparse.ArgumentParser(description="Simulate jobs with faults, from seeds.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--outer", action="store_true", help="replicas run outer loops")
    parser.add_argument(
        "--learners", action="store_true", help="those who come back follow the others before they join"
    )
    parser.add_argument("--leases", action="store_true", help="several lighthouses, of which one leads")
    parser.add_argument("--turns", action="store_true", help="loops train several networks in turn")
    parser.add_argument("--skips", action="store_true", help="loops leave batches out, in the middle of a step")
    parser.add_argument(
        "--microbatches", action="store_true", help="who computes what, 100,000 steps a seed, and no more"
    )
    parser.add_argument("--keep-going", action="store_true", help="report all failures, not only the first")
    options = parser.parse_args(arguments)
    if options.microbatches:
        for seed in range(options.first, options.first + options.seeds):
            tally = microbatches.run(100_000, 8, 32, death_rate=0.01, seed=seed)
            logger.info("seed %d: %s", seed, tally)
        return 0
    kind = next((kind for kind in KINDS if getattr(options, kind, False)), "plain")
    failures = events = commits = followed = compared = 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            report = simulate(seed, kind=kind)
        except (InvariantError, CrashError) as error:
            failures += 1
            text = str(error)
            logger.error("%s", text.splitlines()[0] if options.keep_going else text)
            if not options.keep_going:
                break
        else:
            events += report.num_events
            commits += report.num_commits
            followed += report.num_followed
            compared += report.num_compared_without_learners
        if (seed + 1) % 500 == 0:
            logger.info(
                "%d seeds, %d failed, %d events, %d commits", seed + 1 - options.first, failures, events, commits
            )
    logger.info("done: %d failed, %d events, %d commits", failures, events, commits)
    logger.info(
        "%d times a rank followed, %d times the next quorum was compared with that without learners", followed, compared
    )
    return min(failures, 1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main())
