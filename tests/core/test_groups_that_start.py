"""Groups that start without a state: one reads, and the others receive that, whoever dies, stands still or finds damage."""

from __future__ import annotations

import msgspec
import pytest
from lighthouse_script import Job, Member

from torchft_ckpt.core.coordination.group import (
    GroupState,
    LighthouseMessage,
    RankMessage,
    SendToLighthouse,
    SendToRank,
)
from torchft_ckpt.core.coordination.messages import (
    LocateState,
    QuorumRequest,
    RankWord,
    Start,
    Starts,
    StartTold,
    StateLocated,
    StateVersion,
)
from torchft_ckpt.core.coordination.starting import STALLS_S

OLD, NEW = "step-000000000004.q1-a", "step-000000000008.q1-a"


def says(member: Member, readable: str = NEW, **more: object) -> str:
    """A group says how far it is; return what it is told, with the step and the sources where it is to load one."""
    said = Starts(readable=readable, checkpoint_addresses=[f"at-{member.replica_id}"], **more)  # type: ignore[arg-type]
    member.says(member.replica.locate(starts=said))
    located = member.located
    assert located is not None and located.starts is not None
    step = f" step {located.version.step}" if located.version.step else ""
    sources = "".join(f" from {source.replica_id}" for source in located.sources)
    return f"{located.starts.does.value}{step}{sources}"


def told(member: Member) -> StartTold:
    assert member.located is not None and member.located.starts is not None
    return member.located.starts


def reads(member: Member, step: int = 8, name: str = NEW) -> str:
    """A group has read, or received, the state of a step."""
    member.replica.restore(step)
    return says(member, name, holds=True)


def test_the_first_that_can_read_the_newest_reads_it_and_the_others_receive_it_from_that_one() -> None:
    job = Job(least=2)
    a, b, c = job.join("a"), job.join("b"), job.join("c")
    assert says(a, OLD) == "meets"
    assert says(b) == "meets"
    assert says(c) == "waits"
    assert says(a, OLD) == "waits"
    assert says(b) == "reads"
    assert says(c) == says(a, OLD) == "waits"
    assert reads(b) == "waits"
    assert says(a, OLD) == "receives step 8 from b:1"
    assert told(a).checkpoint == NEW
    assert reads(a) == "waits"
    assert says(c) == "receives step 8 from a:1 from b:1"
    assert reads(c) == reads(a) == reads(b) == "begins"
    for member in (a, b, c):
        member.asks()
    job.passes(1.0)
    assert {member.replica.version.step for member in (a, b, c)} == {8}
    assert job.lighthouse.round is not None and len(job.lighthouse.round.tally.roles) == 3


def test_a_reader_that_dies_is_followed_by_the_next_one() -> None:
    job = Job(least=2)
    a, b, c = (job.join(name) for name in "abc")
    for member in (a, b, c):
        says(member)
    assert says(a) == "reads"
    a.dies()
    assert says(c) == "waits"
    assert says(b) == "reads"


def test_a_reader_that_dies_after_it_has_read_is_followed_by_those_who_have_the_state_or_by_the_next_one() -> None:
    job = Job(least=2)
    a, b, c = (job.join(name) for name in "abc")
    for member in (a, b, c):
        says(member)
    says(a), reads(a)
    assert says(b) == "receives step 8 from a:1"
    a.dies()
    assert says(c) == "waits"  # b may have it all
    assert reads(b) == "waits"
    assert says(c) == "receives step 8 from b:1"
    b.dies()
    assert says(c) == "reads"


def test_a_reader_that_has_no_more_bytes_is_followed_by_the_next_one_and_heals_when_it_is_back() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    says(a), says(b)
    assert says(a) == "reads"
    for number in range(3):
        job.passes(STALLS_S - 1.0)
        says(a, is_at_work=True, done_bytes=number + 1)
        assert says(b) == "waits"
    job.passes(STALLS_S - 1.0)
    says(a, is_at_work=True, done_bytes=3)
    assert says(b) == "waits"
    job.passes(1.0)
    assert says(b) == "reads"
    assert reads(b) == "begins"
    b.asks()
    assert reads(a) == "begins"  # of the same step; the first quorum compares them
    a.asks()
    job.passes(2.0)
    assert a.replica.version == b.replica.version


def test_one_that_receives_and_stands_still_keeps_nobody_from_beginning() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    says(a), says(b), says(a)
    assert reads(a) == "waits"
    assert says(b).startswith("receives")
    assert reads(a) == "waits"
    job.passes(STALLS_S)
    assert reads(a) == "begins"


def test_damage_is_told_to_the_others_who_do_not_read_it_and_all_go_back_to_the_one_before() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    says(a), says(b)
    assert says(a) == "reads"
    damaged = {NEW: "a bit is flipped"}
    assert says(a, OLD, damaged=damaged) == "waits"  # b says that it can read the newest one
    assert says(b) == "meets" and told(b).damaged == damaged
    assert says(b, OLD, damaged=damaged) == "waits"
    assert says(a, OLD, damaged=damaged) == "reads"
    # A copy of its own may be whole.
    assert says(b, NEW, damaged=damaged) == "waits"
    assert reads(a, 4, OLD) == "waits"
    assert says(b, NEW, damaged=damaged) == "receives step 4 from a:1"


def test_where_nobody_can_read_anything_all_begin_also_when_one_is_gone() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    says(a, ""), says(b, "")
    assert says(a, "") == "begins"
    a.dies()
    assert says(b, "") == "begins"


def test_who_is_late_is_not_waited_for_beyond_the_join_timeout() -> None:
    job = Job(least=2, join_timeout_s=60.0)
    a, b, _ = job.join("a"), job.join("b"), job.join("c")
    says(a), says(b)
    for _ in range(3):
        job.passes(19.0)
        assert says(a) == says(b) == "meets"
    job.passes(4.0)
    assert says(a) == "reads"


def test_who_comes_after_the_others_have_a_state_is_told_so_and_costs_them_no_step() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    job.step(a, b)
    a.asks(), b.asks()
    a.hears(), b.hears()
    c = job.join("c")
    assert says(c) == "heals step 1"
    a.votes(), b.votes()
    assert (a.hears(), b.hears()) == (["commit"], ["commit"])


def test_who_comes_while_others_ask_with_a_restored_state_heals_from_that() -> None:
    job = Job(least=3)
    a = job.join("a")
    a.replica.restore(120)
    a.asks()
    assert says(job.join("c")) == "heals step 120"


def test_who_comes_while_others_ask_with_fresh_weights_reads_and_they_heal_from_it() -> None:
    job = Job(least=3)
    a, b, c = job.join("a"), job.join("b"), job.join("c")
    a.asks(), b.asks()
    assert says(c) == "reads"
    assert reads(c) == "begins"
    c.asks()
    job.passes(2.0)
    assert [member.replica.version.step for member in (a, b, c)] == [8] * 3


def test_a_lighthouse_that_restarts_is_told_again_and_gives_nobody_away_before_the_others_may_be_back() -> None:
    job = Job(least=2)
    a, b = job.join("a"), job.join("b")
    job.step(a, b)
    c = job.join("c")
    job.restart()
    c.connects()
    a.connects()
    assert says(c) == "waits"
    b.connects()
    job.passes(60.0)
    assert says(c) == "heals step 1"


def test_a_job_that_is_finished_refuses_who_starts() -> None:
    job = Job(least=1)
    a = job.join("a")
    job.step(a)
    a.says(a.replica.locate(has_finished=True))
    late = job.join("b")
    late.says(late.replica.locate(starts=Starts()))
    assert any("finished" in word for word in late.hears())


# The ranks of a group


def ask(group: GroupState, rank: int, **says: object) -> list[object]:
    starts = Starts(**{"readable": NEW, "checkpoint_addresses": [f"at-{rank}"], **says})  # type: ignore[arg-type]
    return list(group.handle(RankMessage(rank, LocateState(request_id=7, version=StateVersion(step=8), starts=starts))))


@pytest.mark.parametrize(
    ("second", "together"),
    [
        ({}, {"readable": NEW}),
        ({"readable": OLD}, {"readable": ""}),
        ({"holds": True}, {"holds": False}),
        ({"is_at_work": True, "done_bytes": 5}, {"is_at_work": True, "done_bytes": 5}),
    ],
)
def test_a_group_is_as_far_as_the_last_of_its_ranks(second: dict[str, object], together: dict[str, object]) -> None:
    group = GroupState(2)
    assert ask(group, 0) == []
    (up,) = ask(group, 1, **second)
    assert isinstance(up, SendToLighthouse) and isinstance(up.message, LocateState) and up.message.starts is not None
    said = msgspec.structs.asdict(up.message.starts)
    assert said["checkpoint_addresses"] == ["at-0", "at-1"]
    assert {name: said[name] for name in together} == together
    located = StateLocated(request_id=up.message.request_id, starts=StartTold(does=Start.WAITS))
    down = group.handle(LighthouseMessage(located))
    assert [one.message.starts for one in down if isinstance(one, SendToRank)] == [located.starts] * 2


def test_what_ranks_say_to_each_other_is_told_when_all_have_said_something() -> None:
    group = GroupState(2)
    assert group.handle(RankMessage(1, RankWord(number=5, words=["b"]))) == []
    down = group.handle(RankMessage(0, RankWord(number=9, words=["a"])))
    assert down == [
        SendToRank(1, RankWord(number=5, words=["a", "b"])),
        SendToRank(0, RankWord(number=9, words=["a", "b"])),
    ]
    assert group.handle(RankMessage(0, RankWord(number=10, words=["a"]))) == []


def test_a_rank_that_asks_for_a_step_is_waited_for_by_no_word() -> None:
    group = GroupState(2)
    group.handle(RankMessage(1, RankWord(number=5, words=["b"])))
    (down,) = group.handle(RankMessage(0, QuorumRequest(request_id=1, version=StateVersion())))
    assert (
        isinstance(down, SendToRank)
        and isinstance(down.message, RankWord)
        and "asks for a step" in down.message.failure
    )
    (down,) = group.handle(RankMessage(1, RankWord(number=6, words=["b"])))
    assert isinstance(down, SendToRank) and isinstance(down.message, RankWord) and down.message.failure
