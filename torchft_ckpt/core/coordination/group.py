"""Speaks for one replica group to the lighthouse: all of its ranks take part in a step, or none does.

It gathers the ranks' requests into the group's request and their votes into the group's vote, and hands what the
lighthouse says to each of them. It runs at group rank 0. It knows no sockets and no clock.

- The group asks when all of its ranks have asked. If one asks anew while the step is open, the step is given up for all;
  if one asks anew before the answer, the group asks anew, and the answer to its earlier question is ignored.
- The group approves when all of its ranks approve; one that does not is enough against.
- The group waits for the decision as one. A rank that does not want to wait any longer says so here (`CommitUnknown`). If
  the decision is there, it is told; if not, all ranks are told that it is not known (`CommitUnknown`), and what the
  lighthouse decides later reaches no rank. A rank that gave up on its own could do so in the instant in which another
  hears of a commit.
- It asks where the newest state is when all of its ranks want to know; where some of them ask for a quorum instead, the
  others are told that nothing is known, and ask for one too.
- Ranks that hold different states (one of them failed to load, say) hold none as a group: it is torn, and all heal.
- Ranks that fetch a state load it at one place of their programs, or none of them does (`ranks_together`).
- Ranks that are behind in their loops go on alone, and the others wait until all begin the same iteration.
- A rank that is gone takes the group with it: the group leaves, and is restarted as a whole by its launcher.
- The wish of one rank to leave is the group's. What the lighthouse answers goes to all ranks with the end of one step, so all of
  them leave after the same one. From then on a rank that goes takes nobody with it, and the group has left when all have.
- Where the group leaves between two steps, all ranks leave at one call of `should_leave`: each says in which one it waits at the
  latest, and they leave at the last of these.
- What was asked or voted and is not answered is said again when a connection to a lighthouse comes up anew.
- Whatever the ranks say, the lighthouse can take what becomes of it. Ranks whose addresses are together more than it takes
  of one group end the group, with a reason that says so: without them nobody could be healed by it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from torchft_ckpt.core.coordination.layouts import SEPARATOR, combine_layouts, combine_ranks
from torchft_ckpt.core.coordination.messages import (
    MAX_ADDRESSES_BYTES,
    MAX_COUNT,
    MAX_FAILED,
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    Answer,
    CollectiveCleared,
    CollectiveWait,
    CommitDecided,
    CommitUnknown,
    CommitVote,
    ConnectBeside,
    ConnectedBeside,
    FromLighthouse,
    Given,
    GroupBroken,
    GroupToRank,
    Hello,
    JoinerWaiting,
    JoinProgress,
    Layout,
    LeafDigests,
    Leave,
    LeaveAt,
    LeavesWanted,
    LeaveWish,
    LetGo,
    LocateState,
    LostAsked,
    LostTold,
    Need,
    Needed,
    Outcome,
    QuorumBroken,
    QuorumPending,
    QuorumRequest,
    RankHello,
    RankToGroup,
    RankWord,
    Receives,
    Refused,
    ReplicasDiffer,
    Role,
    Starts,
    StateArrived,
    StateLocated,
    StateVersion,
    StepAlone,
    ToLighthouse,
    clip,
    last_answer,
    refuse_version,
    size_of,
)
from torchft_ckpt.core.coordination.ranks_together import Arrivals, those_behind

MAX_DECIDED = 4
"""How the latest steps ended is remembered for so many."""


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A message of one of the group's ranks."""

    rank: int
    message: RankToGroup


@dataclass(frozen=True, slots=True)
class RankLost:
    """The connection of a rank ended without `Leave`."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class LighthouseMessage:
    """A message of the lighthouse."""

    message: FromLighthouse


@dataclass(frozen=True, slots=True)
class LighthouseUp:
    """A new connection to a lighthouse is up, `Hello` was sent on it."""


GroupEvent: TypeAlias = RankMessage | RankLost | LighthouseMessage | LighthouseUp


@dataclass(frozen=True, slots=True)
class SendToRank:
    """Hand the message to a rank."""

    rank: int
    message: GroupToRank


@dataclass(frozen=True, slots=True)
class SendToLighthouse:
    """Send the message to the lighthouse; without a connection it is dropped (and said again later)."""

    message: ToLighthouse


GroupInstruction: TypeAlias = SendToRank | SendToLighthouse


class GroupState:
    """The open request and vote of a group of `world_size` ranks. Not thread-safe: one caller at a time."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.broken: str | None = None
        """Why the group cannot go on, once a rank is gone, or all have left."""
        self._wish: LeaveWish | None = None
        """Of one of the ranks."""
        self._is_told_to_leave = False
        """All ranks have been told after which step, or that no other step begins."""
        self._calls: dict[int, int] = {}
        """Of ranks that may leave between two steps: the call of `should_leave` in which each waits."""
        self._last_collectives: dict[int, list[int]] = {}
        """Of ranks that save, or have saved: how many they issued in their last step."""
        self._ranks_left: set[int] = set()
        self._has_left = False
        """It is broken because it has left on purpose."""
        self._addresses: dict[int, str] = {}
        self._announced_addresses: list[str] | None = None
        self._announced_layout: str | None = None
        self._requests: dict[int, QuorumRequest] = {}
        """Of ranks that asked for the next step, while not all of them have."""
        self._arrivals = Arrivals(world_size)
        """Of the state that the open step is to begin with."""
        self._request_id = 0
        self._asked: QuorumRequest | None = None
        """What the group asked and has no answer to."""
        self._unnamed: QuorumRequest | None = None
        """The same before the state that it names got its name, if it did."""
        self._asked_by: dict[int, QuorumRequest] = {}
        """The ranks' requests that `_asked`, or the open quorum, goes back to."""
        self._locating: dict[int, LocateState] = {}
        """Of ranks that want to know where the newest state is."""
        self._num_alone = 0
        """So often in a row some ranks were behind in their loops when the group was answered."""
        self._located_for: LocateState | None = None
        """The group's question, once all of them want to know, until it is answered."""
        self._finished: LocateState | None = None
        """That question, where it says that the group has finished and has not asked for a step since."""
        self._quorum: Answer | None = None
        self._words: dict[int, RankWord] = {}
        """Of ranks that have told all others something, while not all of them have."""
        self._votes: dict[int, CommitVote] = {}
        self._voted: CommitVote | None = None
        self._reach: dict[int, JoinProgress] = {}
        """How far each rank is that receives the state of the open step."""
        self._repeated_by: dict[int, set[int]] = {}
        """Of what each rank said last: the other ranks with whose reports it was sent once more."""
        self._connects_at = ""
        """The place of the last `ConnectBeside` that is not answered yet."""
        self._connected: set[int] = set()
        """Ranks that are connected there."""
        self._decided: OrderedDict[tuple[int, str, int], CommitDecided | CommitUnknown] = OrderedDict()
        """How the latest steps ended for this group, by quorum id, epoch and step."""

    def handle(self, event: GroupEvent) -> list[GroupInstruction]:
        """Take an event, return what to do, in order."""
        if isinstance(event, RankMessage):
            return list(self._on_rank_message(event.rank, event.message))
        if isinstance(event, RankLost):
            return list(self._loses(event.rank, f"group rank {event.rank} is gone: {event.reason}"))
        if isinstance(event, LighthouseUp):
            return list(self._say_again())
        return list(self._on_lighthouse_message(event.message))

    def introduce(self, hello: Hello) -> Hello:
        """Return rank 0's first message on a connection as the group's."""
        addresses = self._all_addresses() if self._addresses and self.broken is None else []
        # Rank 0 may have asked for the next step already, and the group has not.
        is_beside = hello.is_beside or (self._quorum is not None and self._quorum.role is Role.LEARNER)
        speaks = hello.speaks or self._may_write()
        return msgspec.structs.replace(hello, checkpoint_addresses=addresses, is_beside=is_beside, speaks=speaks)

    def _may_write(self) -> bool:
        """Whether a rank that has not voted since said in its last request that it speaks for the job."""
        unvoted = {rank: request for rank, request in self._asked_by.items() if rank not in self._votes}
        return any(request.speaks for request in {**unvoted, **self._requests}.values())

    def _all_addresses(self) -> list[str]:
        return [self._addresses.get(rank, "") for rank in range(self.world_size)]

    def waiting_for(self) -> str:
        """Name the ranks that the group's next request, or word, waits for; empty when it waits for none of them."""
        asked = {*self._requests} or {*self._words}
        absent = [str(rank) for rank in range(self.world_size) if rank not in asked]
        what = "asked yet" if self._requests else "come to where all ranks restore, or are not done with their part"
        return f"group ranks {', '.join(absent)} have not {what}" if asked and absent else ""

    # ---------------------------------------------------------------------------------------------------------- ranks

    def _on_rank_message(self, rank: int, message: RankToGroup) -> Iterator[GroupInstruction]:
        if self.broken is not None:
            yield SendToRank(rank, self._broken_message())
        elif isinstance(message, QuorumRequest):
            yield from self._asks(rank, message)
        elif isinstance(message, LocateState):
            yield from self._locates(rank, message)
        elif isinstance(message, CommitVote):
            yield from self._votes_on(rank, message)
        elif isinstance(message, CommitUnknown):
            yield from self._gives_up_waiting(rank, message)
        elif isinstance(message, CollectiveWait):
            if self._is_of_open_step(message):
                yield SendToLighthouse(msgspec.structs.replace(message, group_rank=rank))
        elif isinstance(message, LostAsked):
            yield SendToLighthouse(message)
        elif isinstance(message, LeafDigests):
            yield SendToLighthouse(msgspec.structs.replace(message, group_rank=rank))
        elif isinstance(message, JoinProgress):
            if self._is_of_open_step(message):
                yield from self._receives(rank, message)
        elif isinstance(message, StateArrived):
            yield from self._fetches(rank, message)
        elif isinstance(message, ConnectedBeside):
            yield from self._connects(rank, message)
        elif isinstance(message, RankWord):
            yield from self._says(rank, message)
        elif isinstance(message, LeaveAt):
            self._calls[rank] = message.call
            if len(self._calls) == self.world_size:
                for other in range(self.world_size):
                    yield SendToRank(other, LeaveAt(call=max(self._calls.values())))
        elif isinstance(message, LeaveWish) and message.is_told:
            self._last_collectives[rank] = message.issued
            if len(self._last_collectives) == self.world_size:
                yield SendToLighthouse(self._wish_now())
        elif isinstance(message, LeaveWish):
            if self._wish is None:
                reason = f"group rank {rank}: {message.reason}" if self.world_size > 1 else message.reason
                self._wish = LeaveWish(reason=clip(reason))
                yield SendToLighthouse(self._wish_now())
        elif isinstance(message, Leave):
            self._has_left = message.as_wished
            yield from self._loses(rank, f"group rank {rank} left: {message.reason or 'it was shut down'}")

    def _wish_now(self) -> LeaveWish:
        wish = self._wish or LeaveWish(reason="it was asked to leave")
        counts = self._last_collectives
        issued = _by_rank([counts[rank] for rank in range(self.world_size)]) if len(counts) == self.world_size else []
        return msgspec.structs.replace(wish, is_told=self._is_told_to_leave, issued=issued)

    def _loses(self, rank: int, reason: str) -> Iterator[GroupInstruction]:
        """A rank is gone. Before the group was told to leave nobody goes on without it."""
        if not self._is_told_to_leave:
            yield from self._break(reason)
            return
        self._ranks_left.add(rank)
        if len(self._ranks_left) == self.world_size:
            self._has_left = True
            yield from self._break(f"it left: {self._wish_now().reason}")

    def refusal(self, rank: int, hello: RankHello) -> Refused | None:
        """Whether a rank may connect as `rank`."""
        if hello.protocol != PROTOCOL_VERSION:
            return refuse_version("the manager service", f"group rank {rank}", hello.protocol)
        if not 0 < rank < self.world_size:
            return Refused(code="config", reason=f"group rank {rank} is not in 1..{self.world_size - 1} of this group")
        return None

    def _asks(self, rank: int, request: QuorumRequest) -> Iterator[GroupInstruction]:
        for address in request.checkpoint_addresses or []:
            self._addresses[rank] = address
            num_bytes = size_of(self._all_addresses())
            if num_bytes > MAX_ADDRESSES_BYTES:
                reason = f"the checkpoint addresses of its ranks are {num_bytes} bytes, at most {MAX_ADDRESSES_BYTES} are sent"
                yield from self._break(f"group rank {rank} cannot be taken: {reason}")
                return
        if self._is_told_to_leave:
            yield SendToRank(rank, self._last_step(request))
            return
        if self._asked is not None:
            # It does not wait for the answer any longer: the group's question becomes a new one.
            if (before := self._unnamed) is not None and _state_of(request) == _state_of(before):
                named = self._asked.version  # the name is on its way to this rank
                yield SendToRank(rank, JoinerWaiting(request_id=request.request_id, names=named))
                request = msgspec.structs.replace(request, version=named, restored=False)
            self._asked_by[rank] = request
        else:
            if self._quorum is not None and rank not in self._requests:
                yield from self._leave_open_step(rank)
            self._requests[rank] = request
            yield from self._answer_words([], f"group rank {rank} asks for a step")
            self._locating.pop(rank, None)
            self._located_for = None
            if len(self._requests) < self.world_size:
                yield from self._answer_locating()
                return
            self._asked_by, self._requests, self._unnamed = self._requests, {}, None
        self._request_id += 1
        self._asked = self._combine(self._asked_by)
        self._finished = None
        self._quorum = None
        self._votes.clear()
        self._voted = None
        yield SendToLighthouse(self._asked)

    def _begin_no_step(self) -> Iterator[GroupInstruction]:
        """The group leaves: ranks that have asked, while others have not, are answered now."""
        self._is_told_to_leave = True
        waiting, self._requests = self._requests, {}
        for rank, request in waiting.items():
            yield SendToRank(rank, self._last_step(request))

    def _last_step(self, request: QuorumRequest) -> StepAlone:
        """Return what a rank is told that asks for a step although its group leaves; it has missed the answer to the others."""
        last = self._quorum
        return last_answer(
            request,
            quorum_id=0 if last is None else last.quorum_id,
            epoch="" if last is None else last.epoch,
            reason="this replica group leaves",
        )

    def _says(self, rank: int, word: RankWord) -> Iterator[GroupInstruction]:
        self._words[rank] = word
        if len(self._words) == self.world_size:
            words = [said for other in range(self.world_size) for said in self._words[other].words[:1]]
            yield from self._answer_words(words)
        elif self._requests or self._asked is not None:
            yield from self._answer_words([], "another rank of this group asks for a step")

    def _answer_words(self, words: list[str], failure: str = "") -> Iterator[GroupInstruction]:
        said, self._words = self._words, {}
        for rank, word in said.items():
            yield SendToRank(rank, RankWord(number=word.number, words=words, failure=failure))

    def _locates(self, rank: int, message: LocateState) -> Iterator[GroupInstruction]:
        if self._asked is not None:
            # The group's question for a quorum has no answer yet, and this rank does not wait for it any longer.
            self._asked, self._requests = None, self._asked_by
            self._asked_by = {}
        elif self._quorum is not None and rank not in self._requests and rank not in self._locating:
            yield from self._leave_open_step(rank)
        self._requests.pop(rank, None)
        self._locating[rank] = message
        yield from self._answer_locating()
        if self._is_told_to_leave:
            yield from self._begin_no_step()
        if len(self._locating) == self.world_size and self._located_for is None:
            self._request_id += 1
            versions = {located.version for located in self._locating.values()}
            version = message.version if len(versions) == 1 else StateVersion()
            has_finished = all(located.has_finished for located in self._locating.values())
            self._located_for = LocateState(
                request_id=self._request_id,
                version=version,
                has_finished=has_finished,
                hands_over=all(located.hands_over for located in self._locating.values()),
                takes_over=any(located.takes_over for located in self._locating.values()),
                starts=_starting_together([self._locating[other].starts for other in range(self.world_size)]),
            )
            self._finished = self._located_for if has_finished else None
            self._quorum = None
            self._votes.clear()
            self._voted = None
            yield SendToLighthouse(self._located_for)

    def _answer_locating(self) -> Iterator[GroupInstruction]:
        """Some ranks ask for a quorum: the others shall do so as well."""
        if self._requests and len(self._requests) + len(self._locating) == self.world_size:
            for rank, message in self._locating.items():
                yield SendToRank(rank, StateLocated(request_id=message.request_id))
            self._locating.clear()

    def _receives(self, rank: int, progress: JoinProgress) -> Iterator[GroupInstruction]:
        """The group needs as long as the slowest of its ranks; it has the state when all of them have it.

        Each other rank repeats once what the slowest said: the lighthouse has to find that a rank is silent, whoever else speaks.
        """
        self._reach[rank], self._repeated_by[rank] = progress, set()
        slowest = max(self._reach, key=lambda other: self._reach[other].reach_s)
        reach_s = self._reach[slowest].reach_s
        if progress.reach_s < reach_s:
            if rank in self._repeated_by[slowest]:
                return
            self._repeated_by[slowest].add(rank)
        if reach_s or len(self._reach) == self.world_size:
            loads = [said.does is Receives.LOADS for said in self._reach.values()]
            does = Receives.LOADS if (any(loads) if reach_s else all(loads)) else Receives.TRANSFER
            yield SendToLighthouse(
                msgspec.structs.replace(
                    progress,
                    reach_s=reach_s,
                    does=progress.does if progress.does is Receives.NOTHING else does,
                    done_bytes=min(sum(said.done_bytes for said in self._reach.values()), MAX_COUNT),
                    total_bytes=min(sum(said.total_bytes for said in self._reach.values()), MAX_COUNT),
                )
            )

    def _connects(self, rank: int, message: ConnectedBeside) -> Iterator[GroupInstruction]:
        """The group is connected beside the quorum when all of its ranks are; one that cannot be is enough against."""
        if message.place != self._connects_at:
            return
        self._connected.add(rank)
        if message.failure or len(self._connected) == self.world_size:
            self._connects_at = ""
            failure = (
                f"group rank {rank}: {message.failure}" if message.failure and self.world_size > 1 else message.failure
            )
            yield SendToLighthouse(msgspec.structs.replace(message, failure=clip(failure)))

    def _fetches(self, rank: int, message: StateArrived) -> Iterator[GroupInstruction]:
        asked = self._asked_by.get(rank)
        is_open = self._quorum is not None and asked is not None and asked.request_id == message.request_id
        if message.again:
            self._arrivals.begin_again()
            if not is_open or self._requests or self._arrivals.is_given_up:
                reason = "another rank of this group asks for the next step already, or holds another state"
                yield SendToRank(rank, StateArrived(request_id=message.request_id, failure=reason))
                return
        elif not is_open:
            return  # of a step that is over
        yield from self._tell_loading(self._arrivals.arrived(rank, message.failure, loads=message.loads))

    def _tell_loading(self, failure: str | None) -> Iterator[GroupInstruction]:
        """Tell all ranks to load, or why not, each with the number of its own request."""
        if failure is None:
            return
        load = StateArrived(request_id=0, failure=clip(failure), loads=self._arrivals.loads)
        for rank, asked in self._asked_by.items():
            yield SendToRank(rank, msgspec.structs.replace(load, request_id=asked.request_id))

    def _leave_open_step(self, rank: int) -> Iterator[GroupInstruction]:
        """A rank began anew. Where the step is not over, it is over for all of them now."""
        if self._quorum is not None and self._quorum.role is not Role.HEALTHY:
            reason = f"group rank {rank} gave the step up"
            yield from self._tell_loading(self._arrivals.give_up(reason))
        if self._quorum is not None and self._quorum.role is Role.LEARNER:
            if self._quorum.why is Given.TO_STAY:  # it asks again when one of its ranks does
                for other in set(range(self.world_size)) - {rank}:
                    yield SendToRank(other, Needed(reason=f"group rank {rank} asks again"))
            return  # it is in no collective and has no vote
        if self._voted is None:
            yield from self._give_up(rank)
        elif _key(self._voted) not in self._decided:
            yield from self._forget_decision(
                f"group rank {rank} went on without waiting for the decision", exclude=rank
            )

    def _gives_up_waiting(self, rank: int, message: CommitUnknown) -> Iterator[GroupInstruction]:
        known = self._decided.get(_key(message))
        if known is None and self._voted is not None and _key(self._voted) == _key(message):
            yield from self._forget_decision(f"group rank {rank} waited as long as it wanted to")
        elif known is None:
            # This step has not been voted on by all ranks, or is an old one: it cannot count any more.
            if self._quorum is not None and self._voted is None and _key_of(self._quorum) == _key(message):
                yield from self._give_up(rank)
            known = CommitUnknown(
                quorum_id=message.quorum_id, epoch=message.epoch, step=message.step, reason="not all ranks have voted"
            )
        if known is not None:
            yield SendToRank(rank, known)

    def _forget_decision(self, reason: str, exclude: int | None = None) -> Iterator[GroupInstruction]:
        """Whatever is decided on the step that was voted on: no rank of this group will follow it."""
        if self._voted is None:
            return
        unknown = CommitUnknown(
            quorum_id=self._voted.quorum_id, epoch=self._voted.epoch, step=self._voted.step, reason=reason
        )
        self._remember(unknown)
        for other in range(self.world_size):
            if other != exclude:
                yield SendToRank(other, unknown)

    def _give_up(self, rank: int) -> Iterator[GroupInstruction]:
        """One rank began anew while the step is open: it is over for all of them."""
        formed = self._quorum
        if formed is None:
            return
        reason = f"group rank {rank} gave the step up"
        self._voted = CommitVote(
            quorum_id=formed.quorum_id,
            epoch=formed.epoch,
            step=formed.version.step,
            approve=False,
            broken=True,
            counts=formed.role is Role.HEALTHY,
            num_voters=formed.num_voters,
            reason=reason,
        )
        yield SendToLighthouse(self._voted)
        yield from self._break_off(formed.quorum_id, reason, exclude=rank)

    def _break_off(self, quorum_id: int, reason: str, exclude: int | None = None) -> Iterator[GroupInstruction]:
        """Ranks that have not voted may be in a collective that cannot end, or need not."""
        for rank in range(self.world_size):
            if rank != exclude and rank not in self._votes and rank not in self._requests:
                yield SendToRank(
                    rank, QuorumBroken(quorum_id=quorum_id, replica_id="this group", lost=False, reason=reason)
                )

    def _combine(self, by_rank: dict[int, QuorumRequest]) -> QuorumRequest:
        requests = [by_rank[rank] for rank in range(self.world_size)]
        versions = {request.version for request in requests}
        awaits_some = bool(those_behind(by_rank, self._num_alone))  # to begin this iteration: see `_formed`
        first = requests[0]
        version = first.version if len(versions) == 1 else StateVersion(step=min(v.step for v in versions))
        addresses = self._all_addresses()
        told = None if addresses == self._announced_addresses else addresses
        self._announced_addresses = addresses
        text = clip(f"{self.world_size} ranks{SEPARATOR}{first.layout.text or ''}", MAX_TEXT_CHARS)
        news = None if text == self._announced_layout else text
        self._announced_layout = text
        frozen = [request.layout.frozen for request in requests]
        word = combine_layouts(frozen)
        return msgspec.structs.replace(
            first,
            request_id=self._request_id,
            version=version,
            restored=all(request.restored for request in requests),
            torn=len(versions) > 1 or any(request.torn for request in requests),
            shrink_only=any(request.shrink_only for request in requests),
            allow_heal=awaits_some or all(request.allow_heal for request in requests),
            can_load=all(request.can_load for request in requests),
            waits_for_quorum=all(request.waits_for_quorum for request in requests),
            can_serve=all(request.can_serve for request in requests),
            needs_new_quorum=any(request.needs_new_quorum for request in requests),
            speaks=any(request.speaks for request in requests),
            issued=_by_rank([request.issued for request in requests]),
            contributes=all(request.contributes for request in requests),
            patience_s=max(request.patience_s for request in requests),
            warms_up=awaits_some or any(request.warms_up for request in requests),
            came_in=any(request.came_in for request in requests),
            given_at=max(request.given_at for request in requests),
            at_end=all(request.at_end for request in requests),
            top_s=max(request.top_s for request in requests),
            need=_needed_together([request.need for request in requests]),
            stood_s=max(request.stood_s for request in requests),
            nodes=[node for node in first.nodes if all(node in request.nodes for request in requests)],
            layout=Layout(
                digest=combine_ranks([request.layout.digest for request in requests]),
                text=news,
                frozen=frozen[0] if len(set(frozen)) == 1 else f"frozen parameters: not the same on all ranks ({word})",
            ),
            checkpoint_addresses=told,
            shown=[shown for r in requests for shown in r.shown] if all(len(r.shown) == 1 for r in requests) else [],
        )

    def _votes_on(self, rank: int, vote: CommitVote) -> Iterator[GroupInstruction]:
        if self._quorum is None or _key_of(self._quorum) != _key(vote) or self._voted is not None:
            known = self._decided.get(_key(vote))
            if known is not None:
                yield SendToRank(rank, known)
            return
        if rank in self._requests:
            return  # it began anew, this vote is of a step that it left
        self._votes[rank] = vote
        if vote.approve and len(self._votes) < self.world_size:
            return
        self._voted = msgspec.structs.replace(
            vote,
            broken=any(cast.broken for cast in self._votes.values()),
            issued=_by_rank([self._votes[rank].issued for rank in range(self.world_size) if rank in self._votes]),
            collectives=self._collectives(),
            state_digests=self._state_digests(),
            computed_s=max(cast.computed_s for cast in self._votes.values()),
            reduced_s=min(cast.reduced_s for cast in self._votes.values()),
            reason=clip(self._reason_of(rank, vote)),
        )
        yield SendToLighthouse(self._voted)
        if self._voted.broken and self._voted.counts:
            yield from self._break_off(vote.quorum_id, self._voted.reason)

    def _reason_of(self, rank: int, vote: CommitVote) -> str:
        if vote.approve:  # as all ranks do: what one of them has found
            rank, vote = next(((one, its) for one, its in sorted(self._votes.items()) if its.reason), (rank, vote))
        is_silent = vote.approve and not vote.reason
        return vote.reason if self.world_size == 1 or is_silent else f"group rank {rank}: {vote.reason}"

    def _collectives(self) -> str:
        """Return a word for what all ranks issued; empty where none issued anything."""
        words = [self._votes[rank].collectives for rank in sorted(self._votes)]
        return words[0] if self.world_size == 1 else combine_layouts(words) if any(words) else ""

    def _state_digests(self) -> list[str]:
        """Return one digest of each rank's state; empty where one of them has none."""
        digests = [self._votes[rank].state_digests[:1] for rank in range(self.world_size) if rank in self._votes]
        return [digest for of_rank in digests for digest in of_rank] if all(map(len, digests)) else []

    def _is_of_open_step(self, report: CollectiveWait | JoinProgress) -> bool:
        formed = self._quorum
        return formed is not None and (formed.quorum_id, formed.version.step) == (report.quorum_id, report.step)

    def _break(self, reason: str) -> Iterator[GroupInstruction]:
        if self.broken is not None:
            return
        self.broken = clip(reason)
        yield SendToLighthouse(Leave(self.broken))
        for rank in range(self.world_size):
            yield SendToRank(rank, self._broken_message())

    def _broken_message(self) -> GroupBroken:
        return GroupBroken(self.broken or "", has_left=self._has_left)

    # ------------------------------------------------------------------------------------------------------ lighthouse

    def _on_lighthouse_message(self, message: FromLighthouse) -> Iterator[GroupInstruction]:
        if self.broken is not None:
            return
        if isinstance(message, Answer):
            yield from self._formed(message)
        elif isinstance(message, StateLocated):
            yield from self._located(message)
        elif isinstance(message, CommitDecided):
            if _key(message) in self._decided:
                return
            if self._voted is None or _key(self._voted) != _key(message):
                if self._quorum is None or _key_of(self._quorum) != _key(message):
                    return
                # It was decided without this group's vote.
                key, why = _key(message), "decided without it"
                self._voted = CommitVote(quorum_id=key[0], epoch=key[1], step=key[2], approve=False, reason=why)
            self._remember(message)
            if message.outcome is Outcome.DISCARD:
                yield from self._break_off(message.quorum_id, clip(message.reason))
            for rank in range(self.world_size):
                yield SendToRank(rank, message)
            if message.leaving:
                yield from self._begin_no_step()
        elif isinstance(message, Needed):
            if self._quorum is not None and self._quorum.follows:
                for rank in range(self.world_size):
                    yield SendToRank(rank, message)
        elif isinstance(message, LeaveWish):
            self._wish = self._wish or LeaveWish(reason=clip(message.reason))
        elif isinstance(message, LetGo):
            for rank in range(self.world_size):
                yield SendToRank(rank, message)
            yield from self._begin_no_step()
        elif isinstance(message, CollectiveCleared | LeavesWanted):
            if message.group_rank < self.world_size:
                yield SendToRank(message.group_rank, message)
        elif isinstance(message, ReplicasDiffer) and not message.stops:
            yield SendToRank(0, message)
        elif isinstance(message, JoinerWaiting) and message.names.proven:
            yield from self._named(message)
        elif isinstance(message, ConnectBeside):
            self._connects_at, self._connected = message.place, set()
            for rank in range(self.world_size):
                yield SendToRank(rank, message)
        elif isinstance(message, QuorumPending | QuorumBroken | JoinerWaiting | Refused | ReplicasDiffer | LostTold):
            for rank in range(self.world_size):
                yield SendToRank(rank, message)

    def _formed(self, formed: Answer) -> Iterator[GroupInstruction]:
        if self._asked is None or formed.request_id != self._asked.request_id:
            return
        self._asked = None
        self._quorum = formed
        self._reach.clear()
        self._repeated_by.clear()
        self._arrivals.begin()
        self._decided.pop(_key_of(formed), None)
        behind = those_behind(self._asked_by, self._num_alone) if formed.warms_up else set()
        self._num_alone = self._num_alone + 1 if those_behind(self._asked_by) else 0
        for rank in range(self.world_size):
            asked = self._asked_by[rank]
            if behind and rank not in behind:
                self._requests[rank] = asked  # it waits until all ranks begin this iteration
            else:
                yield SendToRank(rank, msgspec.structs.replace(formed, request_id=asked.request_id))
        if formed.leaving or self._is_told_to_leave:
            yield from self._begin_no_step()

    def _named(self, message: JoinerWaiting) -> Iterator[GroupInstruction]:
        """The state with which the group has asked gets its name, at all ranks, if all of them hold it."""
        if self._asked is None or message.request_id != self._asked.request_id:
            return
        if self._asked.torn or self._asked.version.step != message.names.step:
            return
        self._unnamed = self._asked
        self._asked = msgspec.structs.replace(self._asked, version=message.names, restored=False)
        for rank, asked in self._asked_by.items():
            self._asked_by[rank] = msgspec.structs.replace(asked, version=message.names, restored=False)
            yield SendToRank(rank, msgspec.structs.replace(message, request_id=asked.request_id))

    def _located(self, located: StateLocated) -> Iterator[GroupInstruction]:
        if self._located_for is None or located.request_id != self._located_for.request_id:
            return
        asked, self._locating, self._located_for = self._locating, {}, None
        for rank, message in asked.items():
            yield SendToRank(rank, msgspec.structs.replace(located, request_id=message.request_id))

    def _remember(self, decided: CommitDecided | CommitUnknown) -> None:
        self._decided[_key(decided)] = decided
        while len(self._decided) > MAX_DECIDED:
            self._decided.popitem(last=False)

    def _say_again(self) -> Iterator[GroupInstruction]:
        self._announced_addresses = self._all_addresses()
        if self.broken is None and (self._wish is not None or self._is_told_to_leave):
            yield SendToLighthouse(self._wish_now())
        if self.broken is not None:
            yield SendToLighthouse(Leave(self.broken))
        elif self._asked is not None:
            layout = msgspec.structs.replace(self._asked.layout, text=self._announced_layout)
            self._asked = msgspec.structs.replace(
                self._asked, checkpoint_addresses=self._announced_addresses, layout=layout
            )
            yield SendToLighthouse(self._asked)
        else:
            self._announced_addresses = self._announced_layout = None  # a new lighthouse has not heard them
            if (located_for := self._located_for or self._finished) is not None:
                yield SendToLighthouse(located_for)
            if self._voted is not None and _key(self._voted) not in self._decided:
                yield SendToLighthouse(self._voted)

    # ------------------------------------------------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check what holds between two events, for tests; a `RuntimeError` says what does not."""
        for what in (*self._wrong_in_questions(), *self._wrong_in_step(), *self._wrong_in_leaving()):
            raise RuntimeError(f"{what}: {vars(self)}")

    def _wrong_in_questions(self) -> Iterator[str]:
        """Say what is wrong with what the ranks, and the group for them, ask."""
        ranks = set(range(self.world_size))
        asks, locates, by_rank = self._requests.keys(), self._locating.keys(), self._asked_by
        if not asks | locates | by_rank.keys() | self._addresses.keys() | self._reach.keys() <= ranks:
            yield "a rank asks that this group does not have"
        if asks & locates:
            yield "a rank asks for a step, and where the newest state is"
        if asks and asks | locates == ranks:
            yield "all ranks have asked, and none is answered"
        if (self._located_for is not None) != (locates == ranks):
            yield "all ranks want to know where the newest state is, and the group does not ask, or the other way around"
        asked, numbers = self._asked, {self._request_id}
        if {open.request_id for open in (asked, self._located_for, self._quorum) if open is not None} - numbers:
            yield "an older question counts as open, or as answered"
        if (asked is not None) + (self._located_for is not None) + (self._quorum is not None) > 1:
            yield "two questions are open, or one beside an answer"
        if asked is not None and (asks or locates or self._finished is not None):
            yield "the group asks for a step, and for another, or has finished"
        if (asked is not None or self._quorum is not None) and by_rank.keys() != ranks:
            yield "the group has asked for a step, and not all of its ranks had"
        if asked is None or by_rank.keys() != ranks:
            return
        requests = by_rank.values()
        versions = {request.version for request in requests}
        if versions != {asked.version} and (asked.version.proven or not asked.torn):
            yield "the group holds a state that not all of its ranks hold"
        if (asked.torn, asked.restored) != (
            len(versions) > 1 or any(request.torn for request in requests),
            all(request.restored for request in requests),
        ):
            yield "the group's state is whole, or restored, and one of its ranks' is not"
        if asked.contributes != all(request.contributes for request in requests):
            yield "the group contributes, and one of its ranks does not, or the other way around"
        if asked.speaks < any(request.speaks for request in requests):
            yield "a rank may write for the job, and the group does not say so"

    def _wrong_in_step(self) -> Iterator[str]:
        """Say what is wrong with the open step: the ranks' votes on it, the group's, and how it ended."""
        formed, votes, voted = self._quorum, self._votes, self._voted
        if len(self._decided) > MAX_DECIDED or any(_key(ended) != key for key, ended in self._decided.items()):
            yield "more steps are remembered than may be, or under another name than theirs"
        if self._repeated_by.keys() != self._reach.keys() or any(r in by for r, by in self._repeated_by.items()):
            yield "a rank's report counts as repeated by another that said nothing, or by itself"
        if formed is None:
            if votes or voted is not None:
                yield "a step was voted on that is not open"
            return
        key = _key_of(formed)
        if any(_key(vote) != key for vote in (*votes.values(), *([] if voted is None else [voted]))):
            yield "a step was voted on that is another than the open one"
        is_against = any(not vote.approve for vote in votes.values())
        if voted is None and (is_against or len(votes) == self.world_size):
            yield "all ranks have voted, or one is against, and the group has not voted"
        if voted is not None and voted.approve and (is_against or len(votes) < self.world_size):
            yield "the group approves, and not all of its ranks do"
        if voted is None and key in self._decided:
            yield "the step was decided, and a vote on it still counts"
        has_left = (self._requests.keys() | self._locating.keys()) and formed.role is not Role.LEARNER
        if has_left and (voted is None or (voted.approve and key not in self._decided)):
            yield "a rank has gone on, and what the lighthouse decides on the step still counts for the others"

    def _wrong_in_leaving(self) -> Iterator[str]:
        """Say what is wrong with how the group leaves."""
        if self._ranks_left and not self._is_told_to_leave:
            yield "a rank has left, and the group goes on"
        if self._is_told_to_leave and self._requests:
            yield "no other step begins, and a rank waits for one"
        if len(self._ranks_left) == self.world_size and not (self.broken is not None and self._has_left):
            yield "all ranks have left, and the group has not"
        if self._has_left and self.broken is None and not self._ranks_left:
            yield "the group has left, and all of its ranks are here"


def _starting_together(said: list[Starts | None]) -> Starts | None:
    """Return what a group says whose ranks say so: it can read what all of them can, and is as far as the last of them.

    None where one of them does not start.
    """
    starts = [one for one in said if one is not None]
    if len(starts) < len(said):
        return None
    return msgspec.structs.replace(
        starts[0],
        readable=starts[0].readable if len({one.readable for one in starts}) == 1 else "",
        holds=starts[0].holds if len({one.holds for one in starts}) == 1 else "",
        failed=sorted({name for one in starts for name in one.failed})[:MAX_FAILED],
        named=max(one.named for one in starts),
        is_at_work=any(one.is_at_work for one in starts),
        done_bytes=min(sum(one.done_bytes for one in starts), MAX_COUNT),
        checkpoint_addresses=[address for one in starts for address in one.checkpoint_addresses[:1]],
    )


def _needed_together(needs: list[Need]) -> Need:
    """Return what a group needs whose ranks need this: as long as the slowest of them, if each knows how long."""
    known = [need.reach_s for need in needs if need.reach_s is not None]
    return Need(
        reach_s=max(known) if len(known) == len(needs) else None,
        guesses=any(need.guesses for need in needs),
        can_follow=all(need.can_follow for need in needs),
        gains=all(need.gains for need in needs),
        load_s=max(need.load_s for need in needs),
    )


def _state_of(request: QuorumRequest) -> tuple[StateVersion, bool, bool]:
    return request.version, request.restored, request.torn


def _by_rank(issued: list[list[int]]) -> list[int]:
    """Return what a group says of which each rank says so many."""
    numbers = [max(of_rank, default=0) for of_rank in issued]
    return numbers if len(set(numbers)) > 1 else numbers[:1] if any(issued) else []


def _key(message: CommitVote | CommitDecided | CommitUnknown) -> tuple[int, str, int]:
    return message.quorum_id, message.epoch, message.step


def _key_of(formed: Answer) -> tuple[int, str, int]:
    return formed.quorum_id, formed.epoch, formed.version.step
