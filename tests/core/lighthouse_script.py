"""A small language for scenarios of the lighthouse: members with real `ReplicaState`s, a real `LighthouseState`, no network.

    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    a.asks()
    b.asks()
    assert a.hears() == ["quorum 1 step 0 healthy"]

What a member hears is taken by its `ReplicaState`; `hears` returns it in short words, in order, since the last call. The job's
first state is received and loaded at once, and nothing is heard of that, unless `gives_first` is False.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from typing import Any

import msgspec

from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    Event,
    LighthouseSettings,
    Log,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.messages import (
    AllowStepLoss,
    Answer,
    CollectiveCleared,
    CollectiveWait,
    CommitDecided,
    CommitVote,
    ConnectBeside,
    ConnectedBeside,
    Drain,
    FromLighthouse,
    Heartbeat,
    JoinerWaiting,
    JoinProgress,
    Layout,
    Leaf,
    LeafDigests,
    Leave,
    LeavesWanted,
    LeaveWish,
    LostTold,
    Need,
    Needed,
    Outcome,
    QuorumBroken,
    QuorumPending,
    QuorumRequest,
    Receives,
    Refused,
    ReplicasDiffer,
    StateLocated,
    StateShown,
    StateVersion,
    ToLighthouse,
    decode_from_lighthouse,
    decode_to_lighthouse,
    encode,
)
from torchft_ckpt.core.coordination.replica import (
    ReplicaSettings,
    ReplicaState,
    StepFacts,
    StepPhase,
    StepPlan,
    StepWishes,
)
from torchft_ckpt.core.coordination.restart import NOTHING_UNTOLD, Untold

_epochs = itertools.count(1)


class Job:
    """A lighthouse and its members."""

    def __init__(self, least: int = 1, *, join_timeout_s: float = 60.0, allow_step_loss: bool = False) -> None:
        self.settings = LighthouseSettings(
            min_replicas=least, join_timeout_s=join_timeout_s, heartbeat_timeout_s=5.0, allow_step_loss=allow_step_loss
        )
        self.now = 0.0
        self.gives_first = True
        self._given: list[Member] = []
        """Were given the job's first state, and are about to ask again."""
        self.members: dict[str, Member] = {}
        self.log: list[str] = []
        self.closed: list[str] = []
        self._connections = itertools.count(1)
        self.start()

    def start(self, untold: Untold = NOTHING_UNTOLD) -> None:
        """The lighthouse starts, without memory but for this."""
        self.lighthouse = LighthouseState(self.settings, epoch=f"life{next(_epochs)}", untold=untold)
        self.by_connection: dict[str, Member] = {}

    def restart(self, *, with_store: bool = False) -> None:
        """It dies and comes back; the members' connections are gone. `with_store`: another one of several takes its place."""
        for member in self.members.values():
            member.connection = None
        self.start(self.lighthouse.untold if with_store else NOTHING_UNTOLD)

    def join(self, name: str, *, life: int = 1, ranks: int = 1, **settings: object) -> Member:
        """A process starts and connects."""
        usual = {"min_replica_size": 1, "store_address": f"store-{name}:{life}"}
        member = Member(self, f"{name}:{life}", ranks, ReplicaSettings(**usual | settings))  # type: ignore[arg-type]
        self.members[member.replica_id] = member
        member.connects()
        return member

    @classmethod
    def of(
        cls,
        names: Collection[str],
        num_steps: int = 0,
        *,
        least: int = 1,
        join_timeout_s: float = 60.0,
        allow_step_loss: bool = False,
        **settings: object,
    ) -> tuple[Any, ...]:
        """Return a job, and its groups, which have made so many steps together."""
        job = cls(least, join_timeout_s=join_timeout_s, allow_step_loss=allow_step_loss)
        members = [job.join(name, **settings) for name in names]  # type: ignore[arg-type]
        for _ in range(num_steps):
            job.step(*members)
        return job, *members

    def handle(self, event: Event) -> None:
        instructions = self.lighthouse.handle(event, self.now)
        self.lighthouse.validate()
        for instruction in instructions:
            if isinstance(instruction, Send):
                member = self.by_connection.get(instruction.connection)
                if member is not None:
                    text = encode(instruction.message)
                    member.receives(instruction.connection, decode_from_lighthouse(text, "lighthouse"))
            elif isinstance(instruction, Close):
                self.closed.append(instruction.connection)
                member = self.by_connection.pop(instruction.connection, None)
                if member is not None and member.connection == instruction.connection:
                    member.connection = None
            elif isinstance(instruction, Log):
                self.log.append(instruction.line)
        given, self._given = self._given, []
        for member in given:
            member.follows()
            member.asks_again()

    def passes(self, seconds: float, *, heartbeats: bool = True) -> None:
        """Time goes by; the members' hearts beat, but of those that are stopped."""
        until = self.now + seconds
        next_beat = self.now
        while True:
            deadline = self.lighthouse.next_deadline()
            at = min(until, next_beat, deadline if deadline is not None else until)
            self.now = max(self.now, at)
            if self.now >= until and (deadline is None or deadline > until):
                return
            if self.now == next_beat:
                next_beat += 1.0
                for member in list(self.members.values()):
                    if heartbeats and not member.is_stopped:
                        member.says(Heartbeat())
            if deadline is not None and self.now >= deadline:
                self.handle(Tick())

    def operator_allows_loss(self) -> None:
        self.handle(Received("operator", AllowStepLoss()))

    def operator_drains(self, group: str) -> None:
        self.handle(Received("operator", Drain(replica_id=group)))

    def lets_in(self, *newcomers: Member, others: Collection[Member], **facts: object) -> None:
        """Groups that lack the state come into the next quorum of the others, which wait until these have it."""
        for member in newcomers:
            member.warms_up(**facts)
        they_ask(*others, can_serve=True)
        for member in newcomers:
            member.comes_in()
            member.asks(**facts)  # type: ignore[arg-type]

    def step(self, *members: Member) -> None:
        """A step of these members that ends well."""
        they_ask(*members)
        they_vote(*members)
        for member in members:
            member.hears()


class Member:
    """One incarnation of a group."""

    def __init__(self, job: Job, replica_id: str, ranks: int, settings: ReplicaSettings) -> None:
        self.job, self.replica_id, self.ranks = job, replica_id, ranks
        self.replica = ReplicaState(settings)
        self.connection: str | None = None
        self.is_stopped = self.is_at_end = False
        self.asks_again = self.asks
        self.outcomes: list[Outcome] = []
        self.last_vote: CommitVote | None = None
        self.last_request: QuorumRequest | None = None
        self.formed: Answer | None = None
        self.plan: StepPlan | None = None
        self._heard: list[str] = []
        self.located: StateLocated | None = None
        self.pending: QuorumPending | None = None
        """What it was told last of a quorum that it waits for."""
        self.connect: ConnectBeside | None = None
        """What it was told last of being connected beside the quorum."""
        self.num_held = 0
        """So many groups the quorum that it waits for is held for, as it heard."""

    @property
    def step(self) -> int:
        return self.replica.version.step

    def connects(self, **hello: object) -> None:
        self.connection = f"c{next(self.job._connections)}"
        self.job.by_connection[self.connection] = self
        message = self.replica.hello(self.replica_id, self.ranks)
        self.says(msgspec.structs.replace(message, **hello))

    def says(self, message: ToLighthouse) -> None:
        if self.connection is not None:
            decoded = decode_to_lighthouse(encode(message), self.replica_id)
            self.job.handle(Received(self.connection, decoded))

    def asks(
        self,
        *,
        can_serve: bool | None = None,
        allow_heal: bool = True,
        shrink_only: bool = False,
        num_collectives: int = 0,
        by_rank: tuple[int, ...] = (),
        can_load: bool = True,
        reach_s: float | None = None,
        load_s: float = 0.0,
        stood_s: float = 0.0,
        can_follow: bool = False,
        gains: bool | None = None,
        guesses: bool = False,
        kind: str = "",
        at_end: bool = False,
        waits: bool | None = None,
        computes_alone: bool = False,
        top_s: float = 0.0,
        patience_s: float = 0.0,
        frozen: str = "",
        shows: str = "",
        still: Collection[str] = (),
        nodes: Collection[tuple[int, int]] = (),
        own: Collection[str] = (),
        **leaves: str,
    ) -> None:
        """Begins a step; one that is open is abandoned. `shows`: what optimizers own, after a slash what is common; then each of
        these leaves by itself; `still`: which of these have not moved; `own`: which are its own. `at_end`: an iteration ends
        instead, that did not count.
        """
        asked = {name: value for name, value in locals().items() if name not in ("self", "leaves")}
        self.is_at_end = at_end
        self.asks_again = functools.partial(self.asks, **asked, **leaves)
        serve = (self.replica.capture_wanted or bool(shows)) if can_serve is None else can_serve
        found = {name: Leaf(name=name, digest=leaves[name]) for name in sorted(leaves, key=lambda name: name in still)}
        of_own = [found.pop(name) for name in own]
        owned, _, common = shows.partition("/")
        of_rank = StateShown(owned=owned, common=common, open=[*found.values()], num_still=len(still), own=of_own)
        request = self.replica.begin(
            StepWishes(allow_heal=allow_heal, shrink_only=shrink_only, waits=waits, patience_s=patience_s),
            StepFacts(
                serve,
                need=Need(
                    reach_s=reach_s,
                    load_s=load_s,
                    can_follow=can_follow,
                    gains=can_follow if gains is None else gains,
                    guesses=guesses,
                ),
                stood_s=stood_s,
                kinds=kind.split(),
                at_end=at_end,
                computes_alone=computes_alone,
                top_s=top_s,
                shown=[of_rank] * self.ranks if shows else [],
                nodes=[*nodes],
            ),
        )
        self.last_request = msgspec.structs.replace(
            request, issued=list(by_rank) or [num_collectives], can_load=can_load, layout=Layout(frozen=frozen)
        )
        self.says(self.last_request)

    def loads(self) -> None:
        """Its transfer ends well."""
        assert self.formed is not None
        self.replica.load_finished(self.formed.version)

    def votes(
        self,
        *,
        load: bool = True,
        error: str | None = None,
        broken: bool = False,
        connects: bool = True,
        collectives: str = "",
        num_collectives: int = 0,
        state: str = "",
        computed_s: float = 0.0,
        reduced_s: float = 0.0,
    ) -> None:
        """Ends its part of the step. Who has to load has loaded, unless `load` is False. `state`: its state, where that is to be
        compared.
        """
        if self.replica.phase is not StepPhase.TRAINING:
            return
        if load and self.plan is not None and self.plan.load:
            self.loads()
        if not connects:
            self.replica.cannot_connect()
            self.replica.fail("rank 2 never came")
        if error is not None:
            self.replica.fail(error)
        if broken or not connects:
            self.replica.collectives_failed()
        digest = state if self.replica.is_checked else ""
        vote = self.replica.vote(collectives, num_collectives, digest)
        self.last_vote = msgspec.structs.replace(vote, computed_s=computed_s, reduced_s=reduced_s)
        self.says(self.last_vote)

    def waits_in(self, index: int, *, digest: str = "x", deviates: bool = False, rank: int = 0) -> None:
        """A collective takes long, or (`deviates`) is one that never came here."""
        assert self.formed is not None
        quorum_id, step = self.formed.quorum_id, self.formed.version.step
        self.says(
            CollectiveWait(
                quorum_id=quorum_id,
                step=step,
                group_rank=rank,
                index=index,
                digest=digest,
                deviates=deviates,
                what=f"sum of {digest}",
            )
        )

    def tells_leaves(self, version: StateVersion, **digests: str) -> None:
        """Says which digests the leaves of its state have."""
        leaves = [Leaf(name=name, digest=digest) for name, digest in digests.items()]
        self.says(LeafDigests(version=version, leaves=leaves))

    def has_the_sum(self) -> None:
        """Its collectives had finished before it could abort them."""
        self.replica.error, self.replica._is_broken = None, False

    def says_again(self) -> None:
        """What a group does on a new connection: the open question, or vote."""
        if self.replica.phase is StepPhase.ASKING and self.last_request is not None:
            self.says(msgspec.structs.replace(self.last_request, version=self.replica.version))
        if self.replica.phase is StepPhase.VOTED and self.last_vote is not None:
            self.says(self.last_vote)

    def is_connected(self, failure: str = "") -> None:
        """Says that it is connected beside the quorum, or why not."""
        assert self.connect is not None
        self.says(ConnectedBeside(place=self.connect.place, failure=failure))

    def still_needs(self, seconds: float, does: Receives = Receives.TRANSFER) -> None:
        """Says how far it is with receiving or loading the state."""
        assert self.formed is not None
        quorum_id, step = self.formed.quorum_id, self.formed.version.step
        self.says(JoinProgress(quorum_id=quorum_id, step=step, reach_s=seconds, does=does))

    def follows(self, *, load: bool = True) -> None:
        """It has received the state outside of the quorum, or (`load` False) was stopped."""
        if load:
            self.loads()
        self.replica.learned()

    def ends(self) -> None:
        """The iteration that it computes alone is over."""
        assert self.replica.warms_up
        self.replica.learned()

    def warms_up(self, **facts: object) -> None:
        """It asks, computes an iteration alone, and asks again at its end."""
        self.asks(**facts)  # type: ignore[arg-type]
        self.ends()
        self.asks(at_end=True, **facts)  # type: ignore[arg-type]

    def comes_in(self, *, load: bool = True) -> None:
        """It has received and loaded the state that a quorum is held for, or (`load` False) could not."""
        assert self.formed is not None and self.formed.held
        if load:
            self.still_needs(0.0, Receives.LOADS)
        self.follows(load=load)

    def goes_on(self, *, load: bool = True) -> None:
        """Does what its loop does next, if it does not wait: it votes, or ends its iteration alone or its transfer, and asks.
        `load`: it gets the state that it asked for, if a source of it lives.
        """
        at_end = False
        if self.replica.phase is StepPhase.TRAINING and not self.replica.is_learner:
            self.votes()
        elif self.replica.phase is StepPhase.TRAINING and self.replica.warms_up:
            at_end = not self.is_at_end
            self.ends()
        elif self.replica.phase is StepPhase.TRAINING and self.formed is not None:
            self.follows(load=load and any(s.replica_id in self.job.lighthouse.members for s in self.formed.sources))
            at_end = self.replica.is_behind
        if self.replica.phase is StepPhase.IDLE:
            self.asks(can_serve=True, at_end=at_end)

    def wishes_to_leave(self, *, is_told: bool = False) -> None:
        self.says(LeaveWish(is_told=is_told, reason="SIGTERM"))

    def leaves(self) -> None:
        self.says(Leave("it was shut down"))
        self.connection = None

    def dies(self) -> None:
        """SIGKILL: its connection closes."""
        connection, self.connection = self.connection, None
        self.is_stopped = True
        if connection is not None:
            self.job.by_connection.pop(connection, None)
            self.job.handle(ConnectionClosed(connection))

    def is_cut_off(self) -> None:
        """Its connection breaks; it lives."""
        self.dies()
        self.is_stopped = False

    def receives(self, connection: str, message: FromLighthouse) -> None:
        if connection != self.connection:
            return
        if self.is_stopped:
            return
        is_first = self.job.gives_first and self.job.lighthouse._job.first.proven
        is_of_first = isinstance(message, QuorumPending | Answer) and is_first
        if not is_of_first:
            self._heard.append(_words(message))
        if is_first and isinstance(message, Answer) and message.held:
            self.job._given.append(self)
        if isinstance(message, Answer):
            plan = self.replica.formed(message)
            if plan is not None:
                self.formed, self.plan = message, plan
                if plan.configure:
                    self.replica.configure_finished()
        elif isinstance(message, CommitDecided):
            outcome = self.replica.decided(message)
            if outcome is not None:
                self.outcomes.append(outcome)
            else:
                self.replica.overtaken(message)
        elif isinstance(message, QuorumBroken):
            self.replica.broken(message)
        elif isinstance(message, QuorumPending):
            self.pending = message
        elif isinstance(message, ConnectBeside):
            self.connect = message
        elif isinstance(message, StateLocated):
            self.located = message
            self.replica.located(message)
        elif isinstance(message, JoinerWaiting):
            self.replica.joiner_waits(message)
            self.num_held += 0 if is_first else message.num_held

    def hears(self) -> list[str]:
        """What it heard since the last call, `welcome` and notices of joiners apart."""
        heard, self._heard = self._heard, []
        return [words for words in heard if words not in ("welcome", "joiner waiting", "connectbeside")]

    def heard_joiner(self) -> bool:
        return "joiner waiting" in self._heard


def they_ask(*members: Member, **wishes: Any) -> None:
    """Each of them asks, one after another; so do they vote, and connect."""
    for member in members:
        member.asks(**wishes)


def they_vote(*members: Member, **how: Any) -> None:
    for member in members:
        member.votes(**how)


def they_connect(*members: Member, **hello: object) -> None:
    for member in members:
        member.connects(**hello)


def _words(message: FromLighthouse) -> str:
    if isinstance(message, Answer):
        if message.leaving:
            return "no quorum, leaving"
        return f"quorum {message.quorum_id} step {message.version.step} {message.role.value}"
    if isinstance(message, CommitDecided):
        more = ", as all do" if message.all_leave else ""
        return message.outcome.value + (f", leaving{more}" if message.leaving else "")
    if isinstance(message, QuorumBroken):
        return f"broken by {message.replica_id}" + (", lost" if message.lost else "")
    if isinstance(message, CollectiveCleared):
        return f"cleared collective {message.index}"
    if isinstance(message, QuorumPending):
        return f"held up: {message.reason}" if message.held_s else f"pending: {message.reason}"
    if isinstance(message, Refused):
        return f"refused: {message.code}"
    if isinstance(message, LeavesWanted):
        return f"leaves of rank {message.group_rank} wanted"
    if isinstance(message, ReplicasDiffer):
        return f"{'stop' if message.stops else 'differ'}: {message.reason}"
    if isinstance(message, LostTold):
        return f"gone: {message.contributors}"
    if isinstance(message, Needed):
        return f"needed: {message.reason}"
    return "joiner waiting" if isinstance(message, JoinerWaiting) else type(message).__name__.lower()
