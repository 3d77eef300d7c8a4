"""What goes wrong, and how often: drawn from the seed, so that some runs have one kind of fault and some have all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

from simulation.several import LeasePlan


class Fault(Enum):
    """One thing that goes wrong."""

    KILL_GROUP = "kill all ranks of a group"
    KILL_RANK = "kill one rank"
    STOP_GROUP = "stop all ranks of a group for a while"
    STOP_RANK = "stop one rank for a while"
    CUT = "break a group's connection to the lighthouse"
    SILENCE = "a group's network swallows everything for a while"
    FIREWALL = "nobody can connect with a group for a while"
    CRASH_LIGHTHOUSE = "kill the lighthouse; it comes back without memory"
    STOP_LIGHTHOUSE = "stop the lighthouse for a while"
    DRAIN = "SIGTERM to a rank, or all ranks, of a group, or the operator has it leave"


TOP_S = 0.01


@dataclass(slots=True)
class Moods:
    """Rates of what a training loop does by itself; each in [0, 1] but `slowness`."""

    abandon: float = 0.0
    step_error: float = 0.0
    no_heal: float = 0.0
    impatience: float = 0.0
    """Gives up waiting for the decision early."""
    skips_late: float = 0.0
    """A group goes on without a collective that others issue between two steps: loops that differ, not a trouble."""
    finishes: float = 0.0
    """Says that it has finished, and after a while goes on nevertheless."""
    slowness: float = 1.0
    drift: float = 0.0
    """A committed step leaves a rank with another state than it should."""
    uses_state: float = 0.0
    """Its first step after it came in leads a rank to another state, as its loop used what it had read before: not a trouble."""
    top_s: float = TOP_S
    """From the end of an iteration that did not count to the next step."""
    moves_state: float = 0.0
    """Between the end of an iteration that did not count and the next step the loop changes the state: not a trouble."""
    leaves_out: float = 0.0
    """In a step after one that counts the loop leaves out a batch that it has read, and goes on with the next: not a trouble."""

    def calm_down(self, slowness: float) -> None:
        """Nothing goes wrong from now on."""
        self.abandon = self.step_error = self.no_heal = self.impatience = self.finishes = self.drift = 0.0
        self.slowness, self.top_s = slowness, min(self.top_s, TOP_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterPlan:
    """The replicas run outer loops: long phases between two rounds. Durations in seconds."""

    phase_s: float = 1.0
    """Of the fastest."""
    spread: float = 1.8
    """The slowest takes so many times as long, at most."""
    delay: float = 0.0
    """The part of a phase during which averages are on their way."""
    retries: int = 2
    late_vote_rate: float = 0.0
    catch_up_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run's job and its troubles. Durations in seconds."""

    num_groups: int = 3
    group_world_size: int = 1
    min_replicas: int = 1
    min_replica_size: int = 1
    join_stall_limit_s: float | None = 60.0
    tells_reach: bool = False
    """Ranks say how long their transfers and loads still take."""
    connects_beside: bool = True
    """Process groups can be connected beside the one in use."""
    changing: float | None = None
    """Training changes this part of the state, and who is further behind than a step can follow; None: nobody can."""
    shows: bool = True
    """Transports give a state between two steps, so groups show theirs before a quorum and load what differs."""
    num_spares: int = 0
    """So many of the groups, the last ones, are spares."""
    load_s: tuple[float, float] = (0.0, 0.0)
    turns: str = "0"
    """The networks that the loops train in turn."""
    staging_s: float = 0.0
    """A source needs so long before its first byte."""
    num_allreduces: int = 1
    max_delay_s: float = 0.005
    join_timeout_s: float = 2.0
    heartbeat_timeout_s: float = 1.0
    restore_rate: float = 0.0
    """How often a restarted group loads a checkpoint."""
    transfer_s: tuple[float, float] = (0.02, 0.15)
    rejoin_s: tuple[float, float] | None = None
    """How long transfers take from the first fault on, if it is another time."""
    transfer_failure_rate: float = 0.0
    torn_rate: float = 0.0
    collective_stall_rate: float = 0.0
    num_late: int = 0
    """Collectives of each rank between two steps."""
    fault_rate: float = 0.0
    """Faults per event."""
    faults: dict[Fault, float] = field(default_factory=dict)
    """Their weights."""
    chaos_s: float = 6.0
    moods: Moods = field(default_factory=Moods)
    decision_timeout_s: float = 2.0
    outer: OuterPlan | None = None
    check_equal_every: int = 0
    """Not of outer loops; the minority heals."""
    leases: LeasePlan | None = None
    """There are several lighthouses."""


def draw_scenario(rng: Random) -> Scenario:
    """Draw a run."""
    plan = _draw_scenario(rng)
    tells_reach = rng.random() < 0.7
    plan = replace(
        plan,
        faults=_with_drains(rng, plan),
        tells_reach=tells_reach,
        changing=rng.choice((0.0, 0.05, 0.5)) if tells_reach and rng.random() < 0.7 else None,
        num_spares=_drawn_spares(rng, plan.num_groups),
        shows=rng.random() < 0.4,
    )
    return _with_firewalls(rng, plan)


def _drawn_spares(rng: Random, num_groups: int) -> int:
    """Return how many of the groups are spares, in a third of the plans."""
    return rng.randint(1, num_groups - 2) if num_groups > 2 and rng.random() < 0.3 else 0


def _with_drains(rng: Random, plan: Scenario) -> dict[Fault, float]:
    """Return a plan's faults, with drains in half of the plans."""
    return {**plan.faults, Fault.DRAIN: rng.uniform(0.2, 1.0)} if rng.random() < 0.5 else plan.faults


def _with_firewalls(rng: Random, plan: Scenario) -> Scenario:
    """Return a plan in which groups cannot be connected for a while, in a third of them; in a few not beside a quorum either."""
    faults = {**plan.faults, Fault.FIREWALL: rng.uniform(0.2, 1.0)} if rng.random() < 0.3 else plan.faults
    return replace(plan, faults=faults, connects_beside=rng.random() < 0.8)


def _draw_scenario(rng: Random) -> Scenario:
    num_groups = rng.choice((1, 2, 3, 3, 3, 4, 5))
    kinds = [kind for kind in Fault if kind not in (Fault.DRAIN, Fault.FIREWALL)]
    chosen = kinds if rng.random() < 0.4 else rng.sample(kinds, rng.randint(1, 4))

    def sometimes(rate: float, value: float) -> float:
        return value if rng.random() < rate else 0.0

    return Scenario(
        num_groups=num_groups,
        group_world_size=rng.choice((1, 1, 1, 2, 3)),
        min_replicas=rng.randint(1, max(1, num_groups - 1)),
        min_replica_size=rng.randint(1, max(1, num_groups - 1)),
        join_stall_limit_s=rng.choice((0.5, 2.0, 60.0, None)),
        num_allreduces=rng.choice((1, 1, 2)),
        max_delay_s=rng.choice((0.002, 0.01, 0.05)),
        restore_rate=sometimes(0.3, 0.5),
        staging_s=rng.choice((0.0, 0.0, 0.5)),
        transfer_s=rng.choice(((0.02, 0.15), (0.02, 0.15), (0.1, 2.0), (1.0, 6.0))),
        transfer_failure_rate=sometimes(0.3, 0.3),
        torn_rate=sometimes(0.3, 0.2),
        collective_stall_rate=sometimes(0.2, 0.02),
        fault_rate=rng.choice((0.002, 0.006, 0.02)),
        faults={kind: rng.uniform(0.2, 1.0) for kind in chosen},
        chaos_s=rng.uniform(2.0, 8.0),
        moods=Moods(
            abandon=sometimes(0.3, 0.05),
            step_error=sometimes(0.3, 0.05),
            no_heal=sometimes(0.15, 0.3),
            impatience=sometimes(0.3, 0.5),
            uses_state=rng.choice((0.0, 0.5, 1.0)),
            skips_late=sometimes(0.3, 0.05),
            finishes=sometimes(0.3, 0.1),
            drift=sometimes(0.3, 0.02),
            moves_state=rng.choice((0.0, 0.3, 1.0)),
            top_s=rng.choice((TOP_S, TOP_S, 0.7)),
        ),
        decision_timeout_s=rng.choice((0.5, 2.0)),
        num_late=rng.choice((0, 0, 1, 3)),
        check_equal_every=rng.choice((1, 2, 5)),
    )


def draw_learning_scenario(rng: Random) -> Scenario:
    """Draw a run in which those who come back need longer than a step, and follow. The lighthouse dies as often as they."""
    num_groups = rng.choice((3, 4, 5))
    return Scenario(
        num_groups=num_groups,
        group_world_size=rng.choice((1, 1, 2)),
        min_replicas=rng.choice((1, 1, 2)),
        min_replica_size=rng.choice((1, 1, 2)),
        join_stall_limit_s=rng.choice((0.5, 2.0, 60.0, None)),
        join_timeout_s=rng.choice((0.5, 2.0)),
        tells_reach=True,
        changing=rng.choice((0.0, 0.05, 0.5)),
        max_delay_s=rng.choice((0.002, 0.01)),
        transfer_s=(0.4, rng.choice((1.0, 3.0, 6.0))),
        transfer_failure_rate=rng.choice((0.0, 0.0, 0.3)),
        torn_rate=rng.choice((0.0, 0.0, 0.2)),
        fault_rate=rng.choice((0.002, 0.005)),
        faults={
            Fault.KILL_GROUP: 1.0,
            Fault.KILL_RANK: 0.3,
            Fault.CRASH_LIGHTHOUSE: 1.0,
            Fault.CUT: 0.3,
            Fault.STOP_GROUP: 0.2,
        },
        chaos_s=rng.uniform(4.0, 10.0),
        check_equal_every=rng.choice((0, 2)),
        num_spares=_drawn_spares(rng, num_groups),
        staging_s=rng.choice((0.0, 0.0, 0.5)),
        moods=Moods(moves_state=rng.choice((0.0, 0.3, 1.0)), top_s=rng.choice((TOP_S, TOP_S, 0.7))),
    )


def draw_scenario_of_leases(rng: Random) -> Scenario:
    """Draw a run with several lighthouses, of which each may be parted from any group and from the store of their lease."""
    plan = draw_scenario(rng)
    leases = LeasePlan(
        num_lighthouses=rng.choice((2, 3, 3)),
        lease_s=rng.choice((0.5, 1.0, 2.0)),
        drift=rng.choice((0.0, 0.02, 0.04)),
        fault_rate=rng.choice((0.003, 0.01, 0.02)),
    )
    errors = replace(plan.moods, step_error=rng.choice((plan.moods.step_error, 0.1)))
    return replace(plan, leases=leases, moods=errors, fault_rate=plan.fault_rate * rng.choice((0.0, 0.5)))


def draw_scenario_of_turns(rng: Random) -> Scenario:
    """Draw a run whose loops train several networks, each in a step of its own."""
    return replace(draw_scenario(rng), turns=rng.choice(("01", "0100", "012")))


def draw_scenario_of_skips(rng: Random) -> Scenario:
    """Draw a run whose loops leave batches out."""
    plan = draw_scenario(rng)
    return replace(plan, moods=replace(plan.moods, leaves_out=rng.choice((0.3, 1.0))))


def draw_outer_scenario(rng: Random) -> Scenario:
    """Draw a run of outer loops."""
    phase_s = rng.choice((0.3, 1.0, 1.0, 3.0, 6.0))
    plan = _draw_scenario(rng)
    return replace(
        plan,
        faults=_with_drains(rng, plan),
        num_groups=max(plan.num_groups, 2) if rng.random() < 0.9 else plan.num_groups,
        join_timeout_s=rng.choice((0.3, 2.0, 2.0)),
        transfer_s=rng.choice(((0.02, 0.15), (0.1, 0.5), (0.1, 2.0))),
        fault_rate=plan.fault_rate * rng.choice((0.3, 1.0)),
        chaos_s=rng.uniform(4.0, 12.0) * max(1.0, phase_s / 2),
        num_late=0,
        outer=OuterPlan(
            phase_s=phase_s,
            spread=rng.choice((1.0, 1.7, 1.7, 3.0)),
            delay=rng.choice((0.0, 0.0, 0.1, 0.5)),
            retries=rng.choice((0, 1, 2)),
            late_vote_rate=rng.choice((0.0, 0.0, 0.3)),
            catch_up_s=max(10.0, 3 * phase_s),
        ),
    )
