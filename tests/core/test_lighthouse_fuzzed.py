"""Whatever can be read comes in whatever order: neither the lighthouse nor a group raises, breaks what holds of it, or says what
cannot be read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_messages import any_message
from support.thoroughness import by_default

from torchft_ckpt.core.coordination.group import (
    GroupEvent,
    GroupState,
    LighthouseMessage,
    LighthouseUp,
    RankLost,
    RankMessage,
    SendToRank,
)
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import (
    ConnectionClosed,
    Event,
    LighthouseSettings,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    Answer,
    CommitVote,
    FromLighthouse,
    Hello,
    RankToGroup,
    ToLighthouse,
    decode_from_lighthouse,
    decode_group_to_rank,
    decode_rank_to_group,
    decode_to_lighthouse,
    encode,
)

CONNECTIONS = st.sampled_from(["c1", "c2", "c3", "c4"])
TO_LIGHTHOUSE = any_message(ToLighthouse, decode_to_lighthouse, encode)
EVENTS = (
    st.builds(Received, CONNECTIONS, TO_LIGHTHOUSE)
    | st.builds(Received, CONNECTIONS, TO_LIGHTHOUSE)
    | st.builds(ConnectionClosed, CONNECTIONS)
    | st.just(Tick())
)
STEPS = st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.01, 1.0, 20.0]), st.booleans()), min_size=5, max_size=60)
"""Events of a lighthouse, each with seconds before it, and whether a quorum that it forms is answered with a vote that fits."""

RANKS = st.integers(0, 2)
GROUP_EVENTS = st.lists(
    st.builds(RankMessage, RANKS, any_message(RankToGroup, decode_rank_to_group, encode))
    | st.builds(RankMessage, RANKS, any_message(RankToGroup, decode_rank_to_group, encode))
    | st.builds(LighthouseMessage, any_message(FromLighthouse, decode_from_lighthouse, encode))
    | st.builds(RankLost, RANKS, st.just("gone"))
    | st.just(LighthouseUp()),
    min_size=5,
    max_size=60,
)


@settings(max_examples=by_default(60, thorough=300), deadline=None)
@given(steps=STEPS, least=st.integers(1, 2))
def test_a_lighthouse_never_raises_and_says_nothing_that_cannot_be_read(
    steps: list[tuple[Event, float, bool]], least: int
) -> None:
    state = LighthouseState(LighthouseSettings(min_replicas=least, join_timeout_s=5.0), epoch="now")
    now, highest = 0.0, 0
    hellos = [
        (Received(f"c{number}", Hello(protocol=PROTOCOL_VERSION, replica_id=name)), 0.0, False)
        for number, name in enumerate(("a:1", "b:1", "c:1"), 1)
    ]
    for event, pause, answers in (*hellos, *steps):
        now += pause
        for instruction in list(state.handle(event, now)):
            if not isinstance(instruction, Send):
                continue
            message = instruction.message
            assert decode_from_lighthouse(encode(message), "lighthouse") == message
            if isinstance(message, Answer):
                assert message.quorum_id >= highest
                highest = message.quorum_id
                if answers:
                    vote = CommitVote(
                        quorum_id=message.quorum_id,
                        epoch=message.epoch,
                        step=message.version.step,
                        approve=True,
                        num_voters=message.num_voters,
                    )
                    state.handle(Received(instruction.connection, vote), now)
        deadline = state.next_deadline()
        assert deadline is None or isinstance(deadline, float)
        state.validate()


@pytest.mark.slow
@settings(max_examples=by_default(60, thorough=300), deadline=None)
@given(events=GROUP_EVENTS, num_ranks=st.integers(1, 3))
def test_a_group_never_raises_and_says_nothing_that_cannot_be_read(events: list[GroupEvent], num_ranks: int) -> None:
    state = GroupState(num_ranks)
    for event in events:
        if isinstance(event, RankMessage | RankLost) and event.rank >= num_ranks:
            continue
        for instruction in state.handle(event):
            message = instruction.message
            decode = decode_group_to_rank if isinstance(instruction, SendToRank) else decode_to_lighthouse
            assert decode(encode(message), "group") == message
        state.validate()
