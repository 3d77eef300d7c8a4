"""Whatever well-formed messages come in whatever order: the lighthouse never raises, and sends only what can be read."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.thoroughness import by_default

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
    AllowStepLoss,
    CollectiveWait,
    CommitVote,
    Heartbeat,
    Hello,
    JoinProgress,
    Leave,
    LocateState,
    Outcome,
    QuorumFormed,
    QuorumRequest,
    Receives,
    StateVersion,
    ToLighthouse,
    decode_from_lighthouse,
    encode,
)

EPOCHS = st.sampled_from(["now", "old"])
SMALL = st.integers(0, 3)
NUMBERS = SMALL | SMALL | SMALL | st.sampled_from([10**9, 10**9 + 3, 2**40, 2**52, 2**53 - 1])
VERSIONS = st.builds(StateVersion, step=NUMBERS, quorum_id=NUMBERS, epoch=EPOCHS)
REASONS = st.sampled_from(["", "r" * 4096])
NAMES = st.sampled_from(["a:1", "a:2", "b:1", "c:1", "d" * 510 + ":1"])
MESSAGES = st.one_of(
    st.builds(
        Hello,
        protocol=st.sampled_from([PROTOCOL_VERSION] * 3 + [1]),
        replica_id=NAMES,
        version=VERSIONS,
        newest_step=NUMBERS,
        last_quorum_id=NUMBERS,
        last_quorum_size=NUMBERS,
        last_step=NUMBERS,
        last_epoch=EPOCHS,
        rolled_back_to=VERSIONS,
        last_outcome=st.none() | st.sampled_from(Outcome),
    ),
    st.just(Heartbeat()),
    st.builds(
        QuorumRequest,
        request_id=SMALL,
        version=VERSIONS,
        restored=st.booleans(),
        torn=st.sampled_from([False, False, True]),
        init_sync=st.booleans(),
        shrink_only=st.sampled_from([False, False, True]),
        allow_heal=st.booleans(),
        waits_for_quorum=st.booleans(),
        can_serve=st.booleans(),
        needs_new_quorum=st.booleans(),
        contributes=st.booleans(),
        min_contributors=SMALL,
        patience_s=st.sampled_from([0.0, 0.5, 1e9]),
        at_end=st.booleans(),
        top_s=st.sampled_from([0.0, 0.5, 1e9]),
        reach_s=st.sampled_from([None, 0.0, 0.5, 1e9]),
        can_follow=st.booleans(),
        gains=st.booleans(),
        join_stall_limit_s=st.sampled_from([None, 0.0, 5.0]),
    ),
    st.builds(LocateState, request_id=SMALL, version=VERSIONS),
    st.builds(
        CommitVote,
        quorum_id=NUMBERS,
        epoch=EPOCHS,
        step=NUMBERS,
        approve=st.booleans(),
        broken=st.booleans(),
        counts=st.booleans(),
        num_voters=NUMBERS,
        reason=REASONS,
    ),
    st.builds(
        JoinProgress,
        quorum_id=SMALL,
        step=NUMBERS,
        reach_s=st.sampled_from([0.0, 0.5, 1e9]),
        does=st.sampled_from(Receives),
        done_bytes=NUMBERS,
    ),
    st.builds(
        CollectiveWait, quorum_id=SMALL, step=NUMBERS, index=NUMBERS, digest=st.just("x"), deviates=st.booleans()
    ),
    st.builds(Leave, REASONS),
    st.just(AllowStepLoss()),
)
CONNECTIONS = st.sampled_from(["c1", "c2", "c3", "c4"])


def steps_of(messages: st.SearchStrategy[ToLighthouse]) -> st.SearchStrategy[list[tuple[Event, float, bool]]]:
    event = st.one_of(
        st.builds(Received, CONNECTIONS, messages), st.builds(ConnectionClosed, CONNECTIONS), st.just(Tick())
    )
    return st.lists(st.tuples(event, st.sampled_from([0.0, 0.01, 1.0, 20.0]), st.booleans()), min_size=5, max_size=60)


@settings(max_examples=by_default(60, thorough=300), deadline=None)
@given(steps=steps_of(MESSAGES), least=st.integers(1, 2))
def test_it_never_raises_and_says_nothing_that_cannot_be_read(
    steps: list[tuple[Event, float, bool]], least: int
) -> None:
    """The last part of a step: answer a quorum that was formed with a vote that fits it."""
    state = LighthouseState(LighthouseSettings(min_replicas=least, join_timeout_s=5.0), epoch="now")
    now, highest = 0.0, 0
    hellos = [
        (Received(f"c{number}", Hello(protocol=PROTOCOL_VERSION, replica_id=name)), 0.0, False)
        for number, name in enumerate(("a:1", "b:1", "c:1"), 1)
    ]
    for event, pause, answers in (*hellos, *steps):
        now += pause
        out = state.handle(event, now)
        for instruction in list(out):
            if not isinstance(instruction, Send):
                continue
            message = instruction.message
            assert decode_from_lighthouse(encode(message), "lighthouse") == message
            if isinstance(message, QuorumFormed):
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
