"""What must hold after every event, judged from outside: from messages and from the ranks' states, not from `core`'s mind.

- Equal versions are equal bits: whoever commits to, heals to or is given a version holds the same value for its group rank.
- Nobody is in a quorum without its state, but where it is a job's first, which all others load before they compute anything, and
  who asked not to heal, and has no part in the step. Nobody contributes, approves or commits without it, or trains from a torn
  one.
- Nobody loads a state between the beginning of a step and the decision on it, but such a first one, or what it was found to
  differ in when it asked for the step.
- A quorum id of one lighthouse life has one set of members. It never falls, neither in one life nor for one rank, and an id
  of an earlier life is not given again by a life that has heard of it.
- No two states that were committed differ at one step, but for histories that the job went back from on purpose, and for
  what a lighthouse without memory could not know: a commit of an earlier life none of whose holders has reached it.
- Below what a life has been told of no quorum is formed, unless a restored state or the operator's word is behind it. What
  it is told of earlier lives when it has formed a quorum counts while somebody is connected who shows it, also if it trains from
  that, but where it has committed nothing yet.
- Groups that show different states of one name are in no quorum together: one of them is told to load, and not one of a strict
  majority of those that were found equal since they joined.
- Who begins its first step with a state that it was given holds the values of that very attempt at the step of its source: what
  a loop changes itself moves with each.
- A rank loads the state of a quorum only if all ranks of its group have received it.
- The ranks of a group have committed the same steps whenever the group asks for the next.
- The ranks of a group that leaves leave after the same step.
- No group is told to speak for the job while another one that is connected may write, because it was told so.
- A learner neither contributes nor votes nor commits and is in no quorum. Without it the others' next quorum would form no
  sooner: nobody waits for it to ask. What it receives next is what came of the state that it holds.
- No quorum is held for a group that has not been connected with all others in it, unless no step could count without it.
- Who was just given a state gives it to no other group while one that had it before is waited for, and writes no checkpoint of
  what comes of it beside one that can.
- What a group beside the quorum does, be it that it dies, discards no step.
- Quorums are held for a group once at a boundary, and no longer than those who train allow: in any time for their limit, and a
  twentieth of that time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from simulation.beside import Beside
from torchft_ckpt.core.coordination.commit import CommitDecision
from torchft_ckpt.core.coordination.hold import LOOK_AGAIN_S
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import ConnectionClosed, Event, Instruction, Received, Send
from torchft_ckpt.core.coordination.lighthouse_records import Round
from torchft_ckpt.core.coordination.messages import (
    AllowStepLoss,
    Answer,
    CommitDecided,
    CommitVote,
    ConnectBeside,
    ConnectedBeside,
    Hello,
    LocateState,
    Outcome,
    QuorumFormed,
    QuorumRequest,
    Refused,
    Role,
    StateVersion,
    Welcome,
)

if TYPE_CHECKING:
    from simulation.clock import Process
    from simulation.group import ReplicaGroup
    from simulation.trainer import Trainer
    from simulation.transfers import Snapshot


STOOD_GRACE_S = 0.05
"""So much later the lighthouse may notice that the time is up."""


class InvariantError(AssertionError):
    """Something happened that must never happen."""


def must_hold(validate: Callable[[], None]) -> Callable[[], None]:
    """Return a check of what a state says of itself: what it finds is no crash."""

    def check() -> None:
        try:
            validate()
        except RuntimeError as error:
            raise InvariantError(str(error)) from error

    return check


class _Life:
    """What one life of the lighthouse has been told.

    Args:
        process: that it runs in.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.reported: set[StateVersion] = set()
        self.shown: dict[str, StateVersion] = {}
        """By connection: of an earlier life, shown when this one had formed a quorum."""
        self.has_formed = False
        self.told_to_commit: set[StateVersion] = set()
        self.highest_quorum_id = 0
        self.heard_quorum_id = 0
        self.may_lose_steps = False
        self.finished_step: int | None = None
        """Where the job was over before the present event."""
        self.finished: dict[str, int] = {}
        """By replica id: the step of which it said last that it is its last one."""
        self.beside = Beside()
        self.voices: dict[str, str] = {}
        """Members that were found equal to all others that showed their state, after a step."""
        self.told_to_load: dict[str, StateVersion] = {}
        self.held: set[str] = set()
        """Members that a quorum was held for since the last one formed."""
        self.met: set[frozenset[str]] = set()
        """Pairs that have trained in a step that counts, or were connected beside a quorum."""
        self.meetings: dict[str, tuple[set[str], set[str]]] = {}
        """By place: who was told to come, and who said that it is connected there."""
        self.open_round: Round | None = None
        """The step that was open before the present event."""
        self.hold_began: float | None = None
        self.stood: list[tuple[float, float]] = []
        """When those who train began to wait for others, and how long the lighthouse, which was not stopped, let them."""


class Oracle:
    """Watches one simulation."""

    def __init__(self) -> None:
        self.num_commits = 0
        self.newest: dict[tuple[str, int], StateVersion] = {}
        """By replica id and rank: the last version that it committed or healed to."""
        self._values: dict[tuple[StateVersion, int], object] = {}
        self._parents: dict[StateVersion, StateVersion] = {}
        self._committed: defaultdict[int, list[StateVersion]] = defaultdict(list)
        self._steps_of: defaultdict[tuple[str, int], list[StateVersion]] = defaultdict(list)
        self._lives: dict[str, _Life] = {}
        self._members: dict[tuple[int, str], frozenset[str]] = {}
        self._epochs: dict[int, str] = {}
        self._seen_quorum_id: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._requests: dict[str, QuorumRequest] = {}
        self._formed: set[tuple[int, str, StateVersion]] = set()
        self._named: set[tuple[int, str, StateVersion]] = set()
        self._rollbacks: list[StateVersion] = []
        self._named_anew: list[StateVersion] = []
        """States that were restored, or of groups that were told to load those of others, who were gone before they had."""
        self._asked: dict[str, QuorumRequest] = {}
        self._asked_on: dict[str, QuorumRequest] = {}
        """By connection, the latest."""
        self._names: dict[str, str] = {}
        """By connection: the replica id of who said Hello there last."""
        self._came_in: dict[str, StateVersion] = {}
        """Members that a quorum was held for, and the state that they got."""
        self._corrected: dict[str, StateVersion] = {}
        """By replica id: the state that it was told to load the last time, in whichever life of the lighthouse."""
        self.num_corrected = 0
        """So many groups were told to load a state before a quorum, as theirs was another."""
        self.num_held = 0
        self.num_followed = 0
        self.num_compared_without_learners = 0
        self._followed: dict[tuple[str, int], StateVersion] = {}
        """By replica id and rank: the last state that it received outside of the quorum."""
        self._fetched: defaultdict[tuple[str, StateVersion], set[int]] = defaultdict(set)
        """By replica id and version: the ranks that have received that state, or held it when it was given to their group."""
        self._asked_by: dict[tuple[str, int], dict[int, int]] = {}
        """By replica id and number of a group's request: those of the requests of its ranks that it stands for."""
        self._given: dict[tuple[str, int], tuple[str, int, str]] = {}
        """By replica id and rank: who gave it its state, in which request of that one, and the lighthouse's life then; until its
        first step with it."""
        self._left: dict[str, Answer] = {}
        """By replica id: the quorum of the step after which the first of its ranks left."""
        self._have_spoken: dict[tuple[str, int], Trainer] = {}
        """By replica id and rank: the latest that was told to speak for the job."""
        self.num_spoken = 0
        self.num_silent = 0
        self.on_formed: Callable[[LighthouseState, dict[str, QuorumRequest]], None] | None = None
        """Called when a quorum is formed, with what its members had asked for, by replica id."""

    def fail(self, what: str) -> None:
        """Raise."""
        raise InvariantError(what)

    @staticmethod
    def next_value(value: object, results: tuple[object, ...]) -> object:
        """Return the state after a step."""
        return int.from_bytes(blake2b(repr((value, results)).encode(), digest_size=8).digest(), "big")

    @property
    def num_rollbacks(self) -> int:
        return len(self._rollbacks)

    # ---------------------------------------------------------------------------------------------------------- ranks

    def formed(self, trainer: Trainer, formed: Answer) -> None:
        """A rank is in a quorum."""
        key = (trainer.replica_id, trainer.rank)
        if formed.leaving:
            return
        if formed.quorum_id < self._seen_quorum_id[key]:
            self.fail(f"{trainer.address} saw quorum {self._seen_quorum_id[key]}, now {formed.quorum_id}")
        self._seen_quorum_id[key] = formed.quorum_id
        may_heal = self._requests[trainer.replica_id].allow_heal
        if formed.role is Role.IDLE and may_heal:
            self.fail(f"{trainer.address} is in quorum {formed.quorum_id} without its state, as {formed.role}")
        if formed.role is Role.HEALTHY:
            if trainer.replica.version != formed.version:
                self.fail(f"{trainer.address} is healthy in {formed.version} with {trainer.replica.version}")
            self._holds(trainer, formed.version, trainer.value)

    def named(self, trainer: Trainer) -> None:
        """The state of a rank is the job's first one, and has its name before there is a quorum."""
        self._holds(trainer, trainer.replica.version, trainer.value)

    def follows(self, trainer: Trainer) -> None:
        """A rank receives a state outside of the quorum."""
        self.num_followed += 1

    def has_fetched(self, trainer: Trainer, version: StateVersion) -> None:
        """A rank has received all of a state that a quorum names, or needs nothing of it."""
        self._fetched[trainer.replica_id, version].add(trainer.rank)

    def healed(self, trainer: Trainer) -> None:
        """A rank has loaded the state of a version."""
        version, formed = trainer.replica.version, trainer.replica.quorum
        may_load = trainer.is_at_end or (formed is not None and (formed.held or formed.differs))
        if trainer.replica.is_in_step and not may_load:
            self.fail(f"{trainer.address} has loaded {version} in the middle of an iteration")
        ranks = self._fetched[trainer.replica_id, version]
        if trainer.replica.is_in_step and len(ranks) < trainer.num_ranks:
            self.fail(f"{trainer.address} has loaded {version}, and only ranks {ranks} of its group have received it")
        expected = self._expected(trainer, version)
        if expected is None or expected != trainer.value:
            self.fail(f"{trainer.address} healed to {version}, which nobody holds: {trainer.value} is not {expected}")
        self.newest[trainer.replica_id, trainer.rank] = version
        if not trainer.replica.is_in_step:  # it has caught up between two rounds
            self._came_in[trainer.replica_id] = version
        if trainer.replica.follows and not trainer.replica.is_corrected:
            self._check_chain(trainer, version)

    def was_given(self, trainer: Trainer, snapshot: Snapshot) -> None:
        """A rank has loaded what another one had captured."""
        if snapshot.request is not None:
            source, _, _ = snapshot.process.name.rpartition("/")
            epoch = "" if trainer.replica.quorum is None else trainer.replica.quorum.epoch
            self._given[trainer.replica_id, trainer.rank] = source, snapshot.request, epoch

    def _check_attempts(self, state: LighthouseState, instructions: Iterable[Instruction]) -> None:
        """Who begins its first step with a state that it was given holds the values of that very attempt of its source.

        One that is not in the step can tell nothing of it. A lighthouse that was started again since does not know who gave what
        to whom: the first step is compared then.
        """
        names = {m.connection: m.replica_id for m in state.members.values()}
        formed = {
            names[i.connection]: i.message.request_id
            for i in instructions
            if isinstance(i, Send)
            and isinstance(i.message, QuorumFormed)
            and i.message.role is Role.HEALTHY
            and i.connection in names  # else it is gone in the same moment
        }
        for replica_id, rank in [key for key in self._given if key[0] in formed]:
            source, given_in, epoch = self._given.pop((replica_id, rank))
            now_in = self._asked_by.get((source, formed.get(source, 0)), {}).get(rank)
            # If it has asked earlier, its group has asked anew since, and takes no answer to that.
            if now_in is not None and now_in > given_in and epoch == state.epoch:
                self.fail(
                    f"{replica_id}/{rank} holds values of another attempt than {source}: it has asked {now_in - given_in}"
                    " times since"
                )

    def _check_chain(self, trainer: Trainer, version: StateVersion) -> None:
        """A learner receives what came of the state that it received before, but for what a restart or a rollback lost."""
        before = self._followed.get((trainer.replica_id, trainer.rank))
        self._followed[trainer.replica_id, trainer.rank] = version
        # A lighthouse that hears of an earlier life goes on from that at the next thousand.
        is_same_life = before is not None and (before.epoch, before.quorum_id // 1000) == (
            version.epoch,
            version.quorum_id // 1000,
        )
        if before is None or not is_same_life or self._is_void(before):
            return
        if before not in self._parents and before not in self._parents.values():
            return  # a first state of which nothing came: the job may have begun once more, at another one
        history = self._history(version)
        # A state from which the job goes on without the holders of the newest has a new name: what it came of nobody can tell.
        if any(
            before.quorum_id < back.quorum_id
            for back in history.intersection([*self._rollbacks, *self._named_anew]).difference(self._parents)
        ):
            return
        # Who came back with more steps of an earlier life put an end to those that were made without it.
        is_overtaken = any(other.epoch != before.epoch and other.step >= before.step for other in history)
        if before not in history and not is_overtaken:
            self.fail(f"{trainer.address} follows {version}, which did not come of {before}")

    def leaves(self, trainer: Trainer, last: Answer) -> None:
        """A rank begins no step any more after that of a quorum."""
        first = self._left.setdefault(trainer.replica_id, last)
        is_same = (first.quorum_id, first.version.step) == (last.quorum_id, last.version.step)
        if not (first.leaving or last.leaving or is_same):  # else one of them was in no step of the job at last
            self.fail(f"{trainer.address} leaves after {last}, another rank of its group after {first}")

    def contributes(self, trainer: Trainer) -> None:
        """A rank puts gradients into the sum."""
        formed = trainer.replica.quorum
        if formed is not None and formed.role is Role.LEARNER:
            self.fail(f"{trainer.address} contributes, and is a learner")
        if formed is None or self._expected(trainer, formed.version) != trainer.value:
            self.fail(f"{trainer.address} contributes without the state of {formed}")

    def votes(self, trainer: Trainer, vote: CommitVote) -> None:
        """A rank says what its part in the step has come to."""
        formed = trainer.replica.quorum
        if vote.approve and (formed is None or self._expected(trainer, formed.version) != trainer.value):
            self.fail(f"{trainer.address} approves without the state of {formed}")

    def _expected(self, trainer: Trainer, version: StateVersion) -> object:
        """Return what a version stands for at a rank's place."""
        return self._values.get((version, trainer.rank))

    def may_hold(self, trainer: Trainer) -> None:
        """A rank is between two steps: what it holds is what its version names."""
        version = trainer.replica.version
        if version.proven and self._values.get((version, trainer.rank)) != trainer.value:
            self.fail(f"{trainer.address} holds {trainer.value} under the name {version}, which is another state")

    def commits(
        self, trainer: Trainer, before: StateVersion, value: object, sums: tuple[tuple[object, ...], ...]
    ) -> None:
        """A rank steps its optimizer, with what went into each sum."""
        formed, version = trainer.replica.quorum, trainer.replica.version
        if formed is not None and formed.role is Role.LEARNER:
            self.fail(f"{trainer.address} commits {version}, and is a learner")
        for parts in sums:
            if formed is not None and sum(isinstance(part, tuple) for part in parts) != formed.num_contributors:
                self.fail(f"{trainer.address} commits {version}: {parts} are divided by {formed.num_contributors}")
        is_exact = self._expected(trainer, before) == trainer.value
        if formed is None or before != formed.version or not is_exact:
            self.fail(f"{trainer.address} commits {version} from {before}, the quorum's state is {formed}")
        self._check_writer(trainer, version)
        self._holds(trainer, version, value)
        self.num_commits += 1
        self._steps_of[trainer.replica_id, trainer.rank].append(version)
        if version in self._parents:
            return
        self._parents[version] = before
        for other in self._committed[version.step]:
            deciders = [e for e, life in self._lives.items() if {version, other} <= life.told_to_commit]
            if deciders and not self._is_void(version) and not self._is_void(other):
                self.fail(f"lighthouse {deciders} committed both {version} and {other}")
        self._committed[version.step].append(version)

    def _check_writer(self, trainer: Trainer, version: StateVersion) -> None:
        """Who was just given a state writes no checkpoint of what came of that, if others who trained with it can."""
        rank, formed = trainer.replica.participating_rank, trainer.replica.quorum
        is_writer = rank is not None and rank < trainer.replica.num_writers
        if is_writer and formed is not None and formed.num_proved and self._asked[trainer.replica_id].came_in:
            self.fail(f"{trainer.address} writes a checkpoint of {version}, and was just given the state before it")

    def hears_decision(self, trainer: Trainer) -> None:
        """A rank has heard that its step counts."""
        if trainer.replica.speaks:
            self._have_spoken[trainer.replica_id, trainer.rank] = trainer
            self.num_spoken += 1
        self.num_silent += bool(trainer.replica.silent_for)

    def _check_speaks(self, state: LighthouseState, connection: str) -> None:
        told = next((m.replica_id for m in state.members.values() if m.connection == connection), None)
        for trainer in self._have_spoken.values():
            is_other = trainer.replica_id in state.members and trainer.replica_id != told
            if is_other and trainer.replica.speaks and trainer.process.is_alive:
                self.fail(f"{told} is told to speak for the job, and {trainer.address} may write")

    def _holds(self, trainer: Trainer, version: StateVersion, value: object) -> None:
        if isinstance(value, tuple):
            self.fail(f"{trainer.address} holds a torn state under the name {version}")
        known = self._values.setdefault((version, trainer.rank), value)
        if known != value:
            self.fail(f"two states are called {version}: {trainer.address} holds {value}, another {known}")
        self.newest[trainer.replica_id, trainer.rank] = version

    def group_asks(self, group: ReplicaGroup, request: QuorumRequest) -> None:
        """A group asks for the next step."""
        self._requests[group.replica_id] = request
        by_rank = {rank: asked.request_id for rank, asked in group.state._asked_by.items()}
        self._asked_by[group.replica_id, request.request_id] = by_rank
        steps = [self._steps_of[group.replica_id, trainer.rank] for trainer in group.trainers]
        if any(other != steps[0] for other in steps):
            self.fail(f"the ranks of {group.replica_id} committed different steps: {[s[-2:] for s in steps]}")

    # ----------------------------------------------------------------------------------------------------- lighthouse

    def new_life(self, epoch: str, process: Process) -> None:
        """The lighthouse starts."""
        self._lives[epoch] = _Life(process)

    def lighthouse_handled(self, state: LighthouseState, event: Event, instructions: Iterable[Instruction]) -> None:
        """The lighthouse took an event."""
        life = self._lives[state.epoch]
        if isinstance(event, Received):
            message = event.message
            if isinstance(message, Hello):
                self._names[event.connection] = message.replica_id
            if isinstance(message, Hello) and any(
                isinstance(i, Send) and isinstance(i.message, Welcome) for i in instructions
            ):
                self._learn(state, life, event.connection, message.version)
                if message.last_epoch != state.epoch:
                    life.heard_quorum_id = max(life.heard_quorum_id, message.last_quorum_id)
            elif isinstance(message, QuorumRequest):
                self._asked_on[event.connection] = message
                asker = next((m for m in state.members.values() if m.connection == event.connection), None)
                if asker is not None:
                    self._asked[asker.replica_id] = message
                self._learn(state, life, event.connection, message.version)
            elif isinstance(message, CommitVote):
                voter = next((m for m in state.members.values() if m.connection == event.connection), None)
                if voter is not None and voter.is_beside:
                    self.fail(f"{voter.replica_id} votes, and is a learner")
            elif isinstance(message, LocateState):
                self._learn(state, life, event.connection, message.version)
                who = next((m.replica_id for m in state.members.values() if m.connection == event.connection), None)
                # The word of a group that was in no quorum counts for nothing.
                if message.has_finished and who in state._job.finished_by and message.version.proven:
                    life.finished[who] = message.version.step
            elif isinstance(message, AllowStepLoss):
                life.may_lose_steps = True
        if state.quorum_id < life.highest_quorum_id:
            self.fail(f"quorum id fell from {life.highest_quorum_id} to {state.quorum_id}")
        life.highest_quorum_id = state.quorum_id
        if self.on_formed is not None and any(
            isinstance(i, Send) and isinstance(i.message, Answer) and i.message.role is not Role.LEARNER
            for i in instructions
        ):
            self.on_formed(state, self._asked)
        for instruction in instructions:
            if isinstance(instruction, Send):
                if isinstance(instruction.message, Answer) and not instruction.message.leaving:
                    self._check_goes_on(life, event, instruction.message)
                    self._check_formed(state, life, instruction.message)
                    self._check_trial(state, life, instruction.connection, instruction.message)
                elif isinstance(instruction.message, Refused) and instruction.message.code == "finished":
                    self._check_late(state, life, instruction.connection, instruction.message)
                elif isinstance(instruction.message, CommitDecided):
                    self._check_decided(state, life, instruction.message)
                    if instruction.message.speaks:
                        self._check_speaks(state, instruction.connection)
        life.finished_step = state.finished_step
        self._check_met(state, life, event, instructions)
        self._check_open_round(state, life, event)
        self._check_holds(state, life, instructions)
        self._check_attempts(state, instructions)
        life.beside.note(event, instructions)
        if isinstance(event, Received) and isinstance(event.message, QuorumRequest | Hello):
            before = life.beside.num_compared
            if wait := life.beside.who_waits_for_them(state, state._job.now):
                self.fail(wait)
            self.num_compared_without_learners += life.beside.num_compared - before

    def _check_holds(self, state: LighthouseState, life: _Life, instructions: Iterable[Instruction]) -> None:
        """A quorum is held for a group once at a boundary, but where no step can count without it, and not for too long."""
        now, names = state._job.now, {m.connection: m.replica_id for m in state.members.values()}
        for formed in (i for i in instructions if isinstance(i, Send) and isinstance(i.message, Answer)):
            told, message = names.get(formed.connection, ""), formed.message
            if isinstance(message, Answer) and message.held:
                self.num_held += 1
                if told in life.held and not state._holds._is_needed:
                    self.fail(f"the quorum of {message.version} is held for {told} again")
                new = [s.replica_id for s in message.sources if self._asked[s.replica_id].came_in]
                if new and any(self._is_waited_for(state, m, new) for m in state._job.quorum_members):
                    self.fail(f"{told} is given {message.version} by {new}, which were just given it themselves")
                life.held.add(told)
                life.voices.pop(told, None)
                if message.names_state:
                    self._came_in.pop(told, None)
                else:
                    self._came_in[told] = message.version
            elif isinstance(message, Answer) and message.role is not Role.LEARNER:
                life.held.clear()
                if self._came_in.get(told) == message.version and state._trials._joined.get(told) is False:
                    self.fail(
                        f"{told} was given {message.version} when it came in, and counts as one that began the job"
                    )
        is_on = state._holds.is_on and not state._holds._is_needed
        if is_on and life.hold_began is None:
            life.hold_began = now
        elif life.hold_began is not None:
            began, limits = life.hold_began, [m.join_stall_limit_s for m in state.members.values()]
            most_s = max(limits, default=float("inf")) + STOOD_GRACE_S + LOOK_AGAIN_S
            self._stood(life, began, now, most_s, is_over=not is_on)
            life.hold_began = began if is_on else None

    def _is_waited_for(self, state: LighthouseState, member: str, new: Sequence[str]) -> bool:
        """Whether a member had its state before these were given theirs, and the next quorum waits for it.

        Where that has waited as long as it does, who has not asked counts as gone; not if these only look on.
        """
        is_here = state.members[member].request is not None or not any(self._asked[m].contributes for m in new)
        return is_here and member in self._asked and not self._asked[member].came_in

    def _check_met(
        self, state: LighthouseState, life: _Life, event: Event, instructions: Iterable[Instruction]
    ) -> None:
        """A quorum is held for groups that have met all others in it, unless it could not do without them."""
        names = {m.connection: m.replica_id for m in state.members.values()}
        if isinstance(event, Received) and isinstance(event.message, ConnectedBeside) and not event.message.failure:
            told, came = life.meetings.get(event.message.place, (set(), set()))
            came.add(names.get(event.connection, ""))
            if told == came:
                life.met |= {frozenset((a, b)) for a in told for b in told}
        sent = [i for i in instructions if isinstance(i, Send) and i.connection in names]
        for connect in sent:
            if isinstance(connect.message, ConnectBeside):
                life.meetings.setdefault(connect.message.place, (set(), set()))[0].add(names[connect.connection])
        decided = [i.message for i in sent if isinstance(i.message, CommitDecided)]
        if any(one.outcome is Outcome.COMMIT for one in decided) and state.round is not None:
            trained = [m for m in state.round.tally.roles if state.round.tally.outcome(m) is Outcome.COMMIT]
            life.met |= {frozenset((a, b)) for a in trained for b in trained}
        held = [names[i.connection] for i in sent if isinstance(i.message, Answer) and i.message.held]
        if held and not state._holds._is_needed and all(state.members[m].hello.connects_beside for m in held):
            there = {*held, *state._holds._awaited, *state._job.quorum_members}
            apart = [m for m in there for new in held if m != new and frozenset((m, new)) not in life.met]
            if apart:
                self.fail(f"the quorum is held for {held}, and {apart} have not been connected with all of these")

    def _check_open_round(self, state: LighthouseState, life: _Life, event: Event) -> None:
        """What one does that is beside the quorum discards no step, and changes no quorum."""
        before, now = life.open_round, state.round
        life.open_round = now if now is not None and not now.tally.decided else None
        if before is None or not isinstance(event, Received | ConnectionClosed):
            return
        who = self._names.get(event.connection, "")
        is_outside = who not in before.tally.roles and isinstance(event, ConnectionClosed)
        if is_outside and before.tally.decided and before.tally.verdict is not CommitDecision.COMMIT:
            self.fail(f"{who} is gone, which was not in quorum {before.quorum_id}, and its step is discarded")

    def _stood(self, life: _Life, began: float, now: float, most_s: float, *, is_over: bool = True) -> None:
        """Those who train have stood still since then. `most_s`: are allowed, and a twentieth of the time."""
        stood = [*life.stood, (began, now - began - life.process.stopped_s(began, now))]
        life.stood = stood if is_over else life.stood
        for first, (began, _) in enumerate(stood):
            stood_s = sum(seconds for _, seconds in stood[first:])
            allowed_s = most_s + 0.05 * (now - began)
            if stood_s > allowed_s:
                self.fail(
                    f"those who train stood still for {stood_s:.2f} s since {began:.2f}, {allowed_s:.2f} s are allowed"
                )

    def _check_goes_on(self, life: _Life, event: Event, formed: Answer) -> None:
        """Where the job is over, a step begins only because somebody asks who has finished and goes on, or restored a state."""
        step = life.finished_step
        if step is None or formed.role is Role.LEARNER:
            return
        asked = event.message if isinstance(event, Received) else None
        if (
            not isinstance(asked, QuorumRequest)
            or not isinstance(event, Received)
            or not (
                asked.restored or (asked.version.proven and life.finished.get(self._names[event.connection]) == step)
            )
            or asked.version.step < step
        ):
            self.fail(
                f"the job was finished at step {step}, and quorum {formed.quorum_id} trains on from {formed.version}"
            )

    def _check_late(self, state: LighthouseState, life: _Life, connection: str, refused: Refused) -> None:
        """Who holds the last step is refused only where others have finished there, and it has not, and would train on alone."""
        version = self._asked_on[connection].version
        if not version.proven or version.step < refused.step or self._is_void(version):
            return
        said = {who for who, step in life.finished.items() if step == refused.step}
        others = [m.replica_id for m in state._job.staying() if m.version == version]
        if self._names[connection] in said or not said or others:
            self.fail(
                f"{self._names[connection]} holds {version} and is refused, {said} finished and {others} have not"
            )

    def _learn(self, state: LighthouseState, life: _Life, connection: str, version: StateVersion) -> None:
        life.shown.pop(connection, None)
        if version.proven and life.has_formed and version.epoch != state.epoch:
            life.shown[connection] = version
        elif version.proven:
            life.reported.add(version)

    @staticmethod
    def _told(state: LighthouseState, life: _Life) -> set[StateVersion]:
        """Return the states that a life has been told of and may not go back from."""
        here = {member.connection for member in state.members.values()}
        life.shown = {connection: version for connection, version in life.shown.items() if connection in here}
        return life.reported | set(life.shown.values())

    def _check_formed(self, state: LighthouseState, life: _Life, formed: Answer) -> None:
        key = (formed.quorum_id, formed.epoch)
        if formed.held and formed.version == state._job.first:  # before there is a quorum, the job goes on from there
            if (*key, formed.version) not in self._named:
                self._named.add((*key, formed.version))
                self._check_origin(state, life, formed, [source.replica_id for source in formed.sources])
            return
        current = None if state.round is None else state.round.assignment.version
        if formed.differs or ((formed.warms_up or formed.held) and formed.version != current):
            return  # it is in no quorum yet, nor beside one
        if state.round is None:
            self.fail(f"quorum {key} was announced, and there is no round")
            return
        if formed.role is Role.LEARNER and formed.quorum_id != state.round.quorum_id:
            # It warms up. Those who waited for it have formed the next quorum with this event, or a report of an earlier life has
            # moved the latest id since the last one.
            ids = (formed.quorum_id, state.round.quorum_id)
            is_known = any((quorum_id, formed.epoch, formed.version) in self._formed for quorum_id in ids)
            if is_known or formed.warms_up:
                return  # whom it is beside was judged when they were told
        members = frozenset(state.round.tally.roles)
        if self._members.setdefault(key, members) != members:
            self.fail(f"quorum {key} has two sets of members: {members} and {self._members[key]}")
        epoch = self._epochs.setdefault(formed.quorum_id, formed.epoch)
        if epoch != formed.epoch and life.heard_quorum_id >= formed.quorum_id:
            self.fail(f"quorum id {formed.quorum_id} of life {epoch} is given again by {formed.epoch}")
        if (*key, formed.version) in self._formed:
            return
        self._formed.add((*key, formed.version))
        holders = [m for m, role in state.round.tally.roles.items() if role is Role.HEALTHY]
        self._check_origin(state, life, formed, holders)

    def _check_origin(self, state: LighthouseState, life: _Life, formed: Answer, holders: Sequence[str]) -> None:
        """The job goes on from a state of these: from the newest one, unless the older one was restored, or steps may be lost."""
        followed = {version for version in life.told_to_commit if version in self._parents}
        told = self._told(state, life)
        known = max((v.step for v in told | followed if not self._is_void(v)), default=0)
        is_named = formed.names_state or formed.held
        is_restored = is_named and all(self._requests[holder].restored for holder in holders)
        if formed.version.step < known and not is_restored and not life.may_lose_steps:
            self.fail(f"quorum {formed.quorum_id} goes back to {formed.version}, step {known} was reported")
        to_load = {m for m, version in life.told_to_load.items() if version.step == formed.version.step}
        if is_restored or (is_named and to_load.intersection(holders)):
            self._named_anew.append(formed.version)
        if formed.rolled_back_to.quorum_id == formed.quorum_id:
            # On purpose, for all that was checked. Members may have told of more than they were seen to hold.
            self._rollbacks.append(formed.rolled_back_to)
        life.may_lose_steps = state.settings.allow_step_loss
        life.has_formed = True
        is_lasting = formed.version.epoch == formed.epoch or not life.told_to_commit
        if formed.version.proven and is_lasting:
            life.reported.add(formed.version)

    def _check_decided(self, state: LighthouseState, life: _Life, decided: CommitDecided) -> None:
        version = StateVersion(step=decided.step + 1, quorum_id=decided.quorum_id, epoch=decided.epoch)
        if decided.outcome is not Outcome.COMMIT or version in life.told_to_commit:
            return
        life.told_to_commit.add(version)
        if version in self._parents and not life.has_formed:
            return  # a rank has done so already: it was told to in an earlier life, which could not know of another state
        for known in self._told(state, life):
            if known.step >= version.step and not self._is_void(known) and version not in self._history(known):
                self.fail(f"{version} is committed, although {known} was reported")

    def _check_trial(self, state: LighthouseState, life: _Life, connection: str, formed: Answer) -> None:
        """Groups that show different states are in no quorum together, and who is told to load is not one of most."""
        here = {m.replica_id: m.connection for m in state.members.values()}
        life.voices = {m: at for m, at in life.voices.items() if here.get(m) == at}
        asked = {m: self._asked[m] for m in state.members if m in self._asked}
        shown = {
            m: request.shown for m, request in asked.items() if request.shown and request.version == formed.version
        }
        if formed.differs:
            told = next(m.replica_id for m in state.members.values() if m.connection == connection)
            self.num_corrected += 1
            life.told_to_load[told] = self._corrected[told] = formed.version
            theirs = [shown.get(source.replica_id) for source in formed.sources]
            if not theirs or any(one is None or one != theirs[0] or one == shown.get(told) for one in theirs):
                self.fail(f"{told} is told to load {formed.version} from {formed.sources}, who show {theirs}")
            last = state.round
            judges = {m for m in life.voices.keys() & shown.keys() if last is not None and m in last.living()}
            votes = [f"{shown[m]}" for m in judges if last is None or last.tally.outcome(m) is not Outcome.LEFT_BEHIND]
            if told in life.voices and 2 * votes.count(f"{shown[told]}") > len(votes):
                self.fail(f"{told} is told to load {formed.version}, and most hold what it holds")
        elif formed.role is Role.HEALTHY and state.round is not None:
            healthy = [m for m, role in state.round.tally.roles.items() if role is Role.HEALTHY and m in shown]
            able = [m for m in healthy if life.told_to_load.get(m) != formed.version]
            if any(shown[m] != shown[able[0]] for m in able):
                self.fail(f"{able} are in one quorum of {formed.version}, and show {[shown[m] for m in able]}")
            # Also one that says so of itself, after a correction in an earlier life.
            given = {m for m in able if formed.version in (self._came_in.get(m), self._corrected.get(m))}
            is_new = given | {m for m in able if asked[m].came_in}
            if not life.voices and is_new == {*able} and not any(asked[m].came_in for m in able):
                is_new = set()  # they have begun a step with it before, which nobody else has: it is the job's state
            if formed.rolled_back_to.quorum_id != formed.quorum_id:  # one that goes back is not judged
                life.voices.update({m: here[m] for m in able if m in here and m not in is_new})

    def _history(self, version: StateVersion) -> set[StateVersion]:
        history = {version}
        while version in self._parents:
            version = self._parents[version]
            history.add(version)
        return history

    def _is_void(self, version: StateVersion) -> bool:
        return any(version.quorum_id < back.quorum_id and version.step > back.step for back in self._rollbacks)
