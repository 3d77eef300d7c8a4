"""What a message costs the lighthouse does not grow with what others have said before, nor with a number that somebody names;
and a quorum costs as much for each of its members, however many these are.

Costs are calls of functions, and messages that are sent: they are the same on each machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType

import msgspec
import pytest

from torchft_ckpt.core.coordination import beside
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import Instruction, LighthouseSettings, Received, Send
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    CollectiveWait,
    CommitVote,
    Hello,
    JoinerWaiting,
    Outcome,
    QuorumFormed,
    QuorumRequest,
    StateVersion,
    ToLighthouse,
)

MOST_RANKS = 65536


class Counted:
    """A lighthouse that counts what its members cost it."""

    def __init__(self, num_groups: int, num_ranks: int) -> None:
        settings = LighthouseSettings(min_replicas=1, join_timeout_s=5.0, allow_step_loss=True)
        self.lighthouse = LighthouseState(settings, epoch="now")
        self.names = [f"g{number}" for number in range(num_groups)]
        for name in self.names:
            hello = Hello(
                protocol=PROTOCOL_VERSION, replica_id=f"{name}:1", group_world_size=num_ranks, init_sync=False
            )
            self.hears(name, hello)

    def hears(self, name: str, message: ToLighthouse) -> list[Instruction]:
        return self.lighthouse.handle(Received(name, message), 1.0)

    def costs(self, messages: Iterable[tuple[str, ToLighthouse]]) -> int:
        """Take messages; return how many calls, and messages to others, the last one cost."""
        num = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal num
            num += event == "call"

        for name, message in messages:
            num, before = 0, sys.getprofile()
            sys.setprofile(count)
            try:
                said = self.hears(name, message)
            finally:
                sys.setprofile(before)
        return num + sum(isinstance(one, Send) for one in said)

    def forms(self) -> QuorumFormed:
        """All ask, and are in a quorum."""
        for name in self.names:
            said = self.hears(name, asks())
        (formed,) = [one.message for one in said if isinstance(one, Send) and one.connection == self.names[0]]
        assert isinstance(formed, QuorumFormed)
        return formed


def asks(version: StateVersion | None = None, num_collectives: int = 0) -> QuorumRequest:
    version = version or StateVersion()
    return QuorumRequest(request_id=1, version=version, issued=[num_collectives])


def waits(formed: QuorumFormed, rank: int, index: int = 0) -> CollectiveWait:
    return CollectiveWait(
        quorum_id=formed.quorum_id, step=formed.version.step, group_rank=rank, index=index, digest="a"
    )


def votes(formed: QuorumFormed, num_collectives: int = 5, *, broken: bool = False) -> CommitVote:
    return CommitVote(
        quorum_id=formed.quorum_id,
        epoch=formed.epoch,
        step=formed.version.step,
        approve=True,
        issued=[num_collectives],
        broken=broken,
    )


def test_of_a_step_that_is_over_no_more_is_kept_than_who_votes_late_is_told_by() -> None:
    """Eight steps are remembered: some 40 MiB of each member whose votes are as long as a message may be."""
    job = Counted(1, 1000)
    long = msgspec.structs.replace(votes(job.forms()), state_digests=["d"] * 1000, issued=[1] * 1000)
    job.hears("g0", long)
    assert job.lighthouse.round is not None
    tally = job.lighthouse.round.tally
    assert tally.votes == {"g0:1": long}
    job.hears("g0", asks(StateVersion(step=1, quorum_id=1, epoch="now")))
    assert tally.votes == {"g0:1": msgspec.structs.replace(long, state_digests=[], issued=[1])}
    assert tally.outcome("g0:1") is Outcome.COMMIT


def test_nobody_has_those_at_work_told_again_and_again_that_he_is_about_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member had a thousand others told it with every second message, and so did one who connected again and again."""
    monkeypatch.setattr(beside, "TOLD_AT_ONCE", 12.0)
    job = Counted(3, 1)
    formed = job.forms()
    for name in job.names:
        job.hears(name, votes(formed))

    def num_told(messages: Iterable[tuple[str, ToLighthouse]]) -> int:
        said = [one for name, message in messages for one in job.hears(name, message)]
        return sum(isinstance(one, Send) and isinstance(one.message, JoinerWaiting) for one in said)

    comes = [(f"x{number}", Hello(protocol=PROTOCOL_VERSION, replica_id=f"x:{number}")) for number in range(10)]
    asks_in_turn = [("x9", asks()), ("x9", msgspec.structs.replace(asks(), at_end=True))] * 10
    assert num_told(comes[:2]) == 2 * len(job.names)
    assert num_told([*comes[2:], *asks_in_turn]) == 12 - 2 * len(job.names)


def goes_on_with_many_ranks(num: int) -> int:
    job = Counted(1, num * 100)
    job.forms()
    return job.costs([("g0", asks()), ("g0", asks())])


def waits_beside_many(num: int) -> int:
    job = Counted(3, MOST_RANKS)
    formed = job.forms()
    return job.costs((name, waits(formed, rank)) for rank in range(num) for name in ("g0", "g1"))


def votes_beside_many(num: int) -> int:
    job = Counted(3, MOST_RANKS)
    formed = job.forms()
    job.costs(("g0", waits(formed, rank)) for rank in range(num))
    return job.costs([("g1", votes(formed))])


def waits_late_beside_many(num: int) -> int:
    job = Counted(3, MOST_RANKS)
    formed = job.forms()
    job.costs((name, votes(formed)) for name in job.names)
    job.costs([("g2", asks(StateVersion(step=1, quorum_id=1, epoch="now"), num_collectives=100))])
    return job.costs(("g0", waits(formed, rank, 9)) for rank in range(num))


def forms_a_first_quorum(num: int) -> int:
    job = Counted(num, 1)
    return job.costs((name, asks()) for name in job.names) // num


def votes_again(num: int) -> int:
    job = Counted(num, 1)
    formed = job.forms()
    return job.costs(("g0", votes(formed, broken=True)) for _ in range(2))


@pytest.mark.parametrize(
    "cost",
    [
        goes_on_with_many_ranks,
        waits_beside_many,
        votes_beside_many,
        waits_late_beside_many,
        votes_again,
        forms_a_first_quorum,
    ],
)
def test_the_cost_of_a_message_is_the_same_however_much_there_is_beside_it(cost: Callable[[int], int]) -> None:
    """One connection, 200 bytes at a time, had a lighthouse loop over 65,536 ranks for each: 50 ms, in which all jobs stood."""
    assert cost(300) <= cost(10) + 5
