"""Whatever is said that can be taken: what is sent because of it can be taken too, by its receiver, in kind and in size.

What is said is random and of every kind, with the largest numbers and the longest texts that are allowed, from members that
otherwise take their part in the quorums: else little of it would come to anything. Others say the same who have no part in the
step, and the lighthouse forgets all now and then. Nothing breaks what holds between two events.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.coordination import messages
from torchft_ckpt.core.coordination.group import (
    GroupState,
    LighthouseMessage,
    LighthouseUp,
    RankLost,
    RankMessage,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.jobs import Jobs
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    LighthouseSettings,
    Log,
    Opened,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.messages import (
    MAX_ADDRESSES_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_NODES,
    PROTOCOL_VERSION,
    CommitDecided,
    CommitVote,
    FromLighthouse,
    Hello,
    LocateState,
    Outcome,
    QuorumFormed,
    QuorumRequest,
    RankToGroup,
    Role,
    StateLocated,
    StateVersion,
    ToLighthouse,
    decode_from_lighthouse,
    decode_group_to_rank,
    decode_rank_to_group,
    decode_to_lighthouse,
    encode,
)
from torchft_ckpt.errors import ProtocolError

NUM_EVENTS = by_default(5_000, thorough=1_000_000)
WIDE = "\N{GRINNING FACE}"
"""A character that takes four bytes."""
MOST_ADDRESSES = ["\x01" * 680] * 64
assert len(msgspec.json.encode(MOST_ADDRESSES)) <= MAX_ADDRESSES_BYTES


class Chatter:
    """Makes up messages of given classes, of fields that are allowed each by itself.

    Args:
        rng: makes them.
        pools: by the name of a field, what it is chosen from; called anew for each.
    """

    def __init__(self, rng: random.Random, pools: dict[str, Callable[[], Any]]) -> None:
        self.rng = rng
        self.pools = pools
        self._fields: dict[type, list[tuple[str, Any]]] = {}

    def message(self, kind: type) -> Any:
        fields = self._fields.get(kind)
        if fields is None:
            described = msgspec.inspect.type_info(kind)
            fields = self._fields[kind] = [(field.name, field.type) for field in described.fields]  # type: ignore[attr-defined]
        made = {name: self.pools[name]() if name in self.pools else self.value(about) for name, about in fields}
        if kind is QuorumFormed:
            size = made["replica_world_size"]
            made["nodes"] = [made["nodes"]] * size if size <= 2 else []
        try:
            return kind(**made)
        except ValueError:  # fields that do not fit each other
            return self.message(kind)

    def value(self, about: Any) -> Any:
        rng = self.rng
        if isinstance(about, msgspec.inspect.UnionType):
            return self.value(rng.choice(about.types))
        if isinstance(about, msgspec.inspect.IntType):
            most = min(value for value in (about.le, about.lt and about.lt - 1, 2**53 - 1) if value is not None)
            return rng.choice([about.ge or 0, min(1, most), min(2, most), most - 1, most])
        if isinstance(about, msgspec.inspect.FloatType):
            return rng.choice([about.ge or 0.0, 0.5, about.le or 1.0])
        if isinstance(about, msgspec.inspect.StrType):
            most = about.max_length or 8
            return rng.choice(["", "a", "b"]) if rng.random() < 0.9 else rng.choice(["a", WIDE, "\x1b", "\n"]) * most
        if isinstance(about, msgspec.inspect.ListType):
            length = rng.choice([0, 1, 2]) if rng.random() < 0.999 else about.max_length or 2
            return [self.value(about.item_type)] * length
        if isinstance(about, msgspec.inspect.DictType):
            return {f"step-{number}": self.value(about.value_type) for number in range(rng.choice([0, 1, 2, 64]))}
        if isinstance(about, msgspec.inspect.StructType):
            return self.message(about.cls)
        if isinstance(about, msgspec.inspect.EnumType):
            return rng.choice(list(about.cls))
        if isinstance(about, msgspec.inspect.BoolType):
            return rng.random() < 0.5
        return None


def check(message: Any, decode: Callable[[str, str], Any]) -> None:
    text = encode(message)
    assert len(text.encode()) <= MAX_MESSAGE_BYTES, type(message).__name__
    assert decode(text, "the sender") == message


NAMES = ["a:1", "a:2", "b:1", "c:1", WIDE * 510 + ":1", "d:" + "1" * 510]


def pools_of(rng: random.Random, epochs: list[str], ids: list[int], steps: list[int]) -> dict[str, Callable[[], Any]]:
    """What a few fields are chosen from, so that they refer to each other now and then."""

    def step() -> int:
        near = rng.choice(steps)
        far = [near + 10**9, near + 10**9 + 1, 2**40, 2**52, 2**53 - 1]
        return rng.choice([0, 1, near, near, near + 1, near + 2] if rng.random() < 0.97 else far)

    def number() -> int:
        near = rng.choice(ids)
        far = [min(near + 10**9, 2**53 - 1), 2**52, 2**53 - 1]
        return rng.choice([0, 0, 1, 1, 2, near, near + 1] if rng.random() < 0.95 else far)

    def version() -> StateVersion:
        return StateVersion(step=step(), quorum_id=number(), epoch=rng.choice(epochs))

    return {
        "number": lambda: 0,
        "protocol": lambda: PROTOCOL_VERSION if rng.random() < 0.95 else 1,
        "replica_id": lambda: rng.choice(NAMES),
        "metrics_address": lambda: "",
        "computed_s": lambda: 0.5,
        "reduced_s": lambda: 0.5,
        "store_address": lambda: rng.choice(["", "host:1", "h" * 500 + ":65535"]),
        "checkpoint_addresses": lambda: MOST_ADDRESSES if rng.random() < 0.02 else rng.choice([[], ["x"], ["x", "y"]]),
        "version": version,
        "rolled_back_to": lambda: StateVersion() if rng.random() < 0.9 else version(),
        "epoch": lambda: rng.choice(epochs),
        "last_epoch": lambda: rng.choice(epochs),
        "quorum_id": number,
        "step": step,
        "last_step": step,
        "newest_step": step,
        "last_quorum_id": number,
        "group_world_size": lambda: rng.choice([1, 2, 3]),
        "last_quorum_size": lambda: rng.choice([0, 1, 2, 2**53 - 1]),
        "min_contributors": lambda: rng.choice([0, 1, 2]),
        "allow_heal": lambda: rng.random() < 0.9,
        "torn": lambda: rng.random() < 0.1,
        "leads_for_s": lambda: None,
        "nodes": lambda: rng.choice([[], [], [(0, 1)], [(1, 3), (7, 8)], [(n, n + 1) for n in range(MAX_NODES)]]),
    }


ENDING = (Hello, messages.Leave)
"""Whoever says one of these again is sent away, or goes."""
ANSWERS = (QuorumFormed, messages.StateGiven, messages.StepAlone)
OF_MEMBERS = {"StepAlone", "CommitDecided", "QuorumBroken", "StateLocated", "Refused", "QuorumPending"}


@pytest.mark.parametrize("seed", range(3))
def test_what_the_lighthouse_sends_can_be_taken_whatever_its_members_say(seed: int) -> None:
    rng = random.Random(40 + seed)
    jobs = Jobs(LighthouseSettings(min_replicas=1 + seed % 2, join_timeout_s=5.0), epoch="now")
    epochs, ids, steps = ["now.1", "old", "older", ""], [0, 0], [0, 0]
    chatter = Chatter(rng, pools_of(rng, epochs, ids, steps))
    kinds = [*get_args(ToLighthouse), *[QuorumRequest] * 6, CommitVote, LocateState]
    # `LostAsked` is said below. Where nobody is to leave, steps are committed often enough for it to be answered.
    kinds = [kind for kind in kinds if kind not in (messages.ForgetJob, messages.LostAsked)]
    if seed == 0:
        kinds = [kind for kind in kinds if kind not in (messages.Drain, messages.LeaveWish)]
    now, seen, highest = 0.0, set[str](), 0
    connections: list[str] = []
    for number in range(NUM_EVENTS // 4):
        now += rng.choice([0.0, 0.0, 0.01, 0.01, 0.5, 4.0])
        event: Any
        pending: list[Any] = []
        if rng.random() < 0.002:
            jobs = Jobs(jobs.settings, epoch=f"life{number}")  # it was restarted
            connections, epochs[1:3], ids[1], steps[1], highest = [], epochs[:2], ids[0], steps[0], 0
        if len(connections) < 4 or rng.random() < 0.02:
            connections = [*connections[-7:], f"c{number}"]
            pending = [
                Opened(connections[-1], None),
                Received(connections[-1], Hello(protocol=PROTOCOL_VERSION, replica_id=rng.choice(NAMES))),
            ]
            if rng.random() < 0.5:
                said = chatter.message(Hello)
                if rng.random() < 0.5:  # of a quorum that the lighthouse has forgotten
                    said = msgspec.structs.replace(
                        said, last_quorum_id=ids[1], last_epoch=epochs[1], last_quorum_size=2, last_step=steps[1]
                    )
                try:
                    pending[-1] = Received(connections[-1], decode_to_lighthouse(encode(said), "a member"))
                except ProtocolError:
                    seen.add("refused at the door")
        elif rng.random() < 0.02:
            pending = [ConnectionClosed(connections.pop(rng.randrange(len(connections))))]
        elif rng.random() < 0.05:
            pending = [Tick()]
        else:
            kind = rng.choice(kinds)
            if kind in ENDING and rng.random() < 0.9:
                kind = QuorumRequest
            said = chatter.message(kind)
            if rng.random() < 0.1:  # whoever says it
                quorum_id, epoch, step = rng.choice(list(zip(ids, epochs, steps, strict=False)))
                said = msgspec.structs.replace(chatter.message(CommitVote), quorum_id=quorum_id, epoch=epoch, step=step)
            try:
                pending = [Received(rng.choice(connections), decode_to_lighthouse(encode(said), "a member"))]
            except ProtocolError:
                seen.add("refused at the door")
        while pending:
            event = pending.pop(0)
            for done in jobs.handle(event, now):
                if isinstance(done, Log):
                    assert done.line.isprintable()
                if isinstance(done, Close) and done.connection in connections:
                    connections.remove(done.connection)
                    pending.append(ConnectionClosed(done.connection))
                if not isinstance(done, Send):
                    continue
                message = done.message
                seen.add(type(message).__name__)
                check(message, decode_from_lighthouse)
                if isinstance(message, messages.Answer):
                    assert message.quorum_id >= highest
                    ids[0] = highest = message.quorum_id
                    epochs[0] = message.epoch
                    steps[0] = min(message.version.step, 2**52)
                    if message.role is not Role.LEARNER and rng.random() < 0.8:
                        vote = msgspec.structs.replace(
                            chatter.message(CommitVote),
                            quorum_id=message.quorum_id,
                            epoch=message.epoch,
                            step=message.version.step,
                            num_voters=message.num_voters,
                        )
                        if rng.random() < 0.8:
                            digests = [rng.choice("aaab")] if seed else []
                            vote = msgspec.structs.replace(
                                vote, approve=True, broken=False, collectives="", state_digests=digests
                            )
                        with contextlib.suppress(ProtocolError):  # it is too long
                            pending.append(Received(done.connection, decode_to_lighthouse(encode(vote), "a member")))
                elif isinstance(message, CommitDecided) and message.outcome is Outcome.COMMIT and rng.random() < 0.8:
                    version = StateVersion(step=message.step + 1, quorum_id=message.quorum_id, epoch=message.epoch)
                    asked = msgspec.structs.replace(chatter.message(QuorumRequest), version=version)
                    if version.step < 2**53:
                        with contextlib.suppress(ProtocolError):
                            pending.append(Received(done.connection, decode_to_lighthouse(encode(asked), "a member")))
                        lost = encode(messages.LostAsked(version=version))
                        pending.append(Received(done.connection, decode_to_lighthouse(lost, "a member")))
            for state in jobs.states.values():
                state.validate()
    assert not OF_MEMBERS - seen
    assert {"QuorumFormed", "StateGiven", "LostTold"} <= seen or seed


@pytest.mark.parametrize("seed", range(2))
def test_what_a_group_sends_can_be_taken_whatever_its_ranks_and_the_lighthouse_say(seed: int) -> None:
    rng = random.Random(seed)
    pools = pools_of(rng, ["now", "old"], [3], [0, 1])
    pools["checkpoint_addresses"] = lambda: ["x"] if rng.random() < 0.97 else ["\x01" * 4096]
    pools["quorum_id"] = lambda: rng.choice([1, 1, 1, 2**53 - 1])
    pools["step"] = lambda: rng.choice([0, 0, 1])
    pools["leaving"] = lambda: rng.random() < 0.02
    pools["replica_rank"] = lambda: 0
    pools["contributor_rank"] = lambda: rng.choice([None, 0])
    chatter = Chatter(rng, pools)
    kinds_of_ranks, kinds_of_lighthouse = get_args(RankToGroup), get_args(FromLighthouse)
    seen = set[str]()
    state, formed, life = GroupState(3), None, 0
    for _ in range(NUM_EVENTS // 4):
        life += 1
        if (state.broken is not None and rng.random() < 0.2) or life > 200:
            state, formed, life = GroupState(3), None, 0
        chance, event = rng.random(), None
        try:
            if chance < 0.02:
                event = LighthouseUp()
                check(state.introduce(Hello(protocol=PROTOCOL_VERSION, replica_id="g:1")), decode_to_lighthouse)
            elif chance < 0.03:
                event = RankLost(rng.randrange(3), "r" * 4096)
            elif chance < 0.5 and state._asked is not None:
                said = chatter.message(rng.choice(ANSWERS if rng.random() < 0.8 else kinds_of_lighthouse))
                if isinstance(said, messages.Answer):
                    formed = said = msgspec.structs.replace(said, request_id=state._asked.request_id)
                event = LighthouseMessage(decode_from_lighthouse(encode(said), "the lighthouse"))
            elif chance < 0.1:
                said = chatter.message(rng.choice(kinds_of_lighthouse))
                if isinstance(said, StateLocated) and state._located_for is not None:
                    said = msgspec.structs.replace(said, request_id=state._located_for.request_id)
                event = LighthouseMessage(decode_from_lighthouse(encode(said), "the lighthouse"))
            else:
                asks = rng.random() < 0.5
                votes = not asks and formed is not None and rng.random() < 0.7
                said = chatter.message(QuorumRequest if asks else CommitVote if votes else rng.choice(kinds_of_ranks))
                if isinstance(said, CommitVote) and formed is not None:
                    said = msgspec.structs.replace(
                        said, quorum_id=formed.quorum_id, epoch=formed.epoch, step=formed.version.step
                    )
                if isinstance(said, messages.Leave) and rng.random() < 0.9:
                    continue
                event = RankMessage(rng.randrange(3), decode_rank_to_group(encode(said), "a rank"))
        except ProtocolError:
            seen.add("refused at the door")
            continue
        for done in state.handle(event):
            seen.add(type(done.message).__name__)
            if isinstance(done, SendToLighthouse):
                check(done.message, decode_to_lighthouse)
            elif isinstance(done, SendToRank):
                check(done.message, decode_group_to_rank)
        state.validate()
    missing = {
        "QuorumRequest",
        "CommitVote",
        *(a.__name__ for a in ANSWERS),
        "Leave",
        "GroupBroken",
        "CommitUnknown",
    } - seen
    assert not missing
