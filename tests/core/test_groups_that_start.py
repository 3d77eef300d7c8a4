"""Groups that start without a state: one reads, and the others receive that, whoever dies, stands still or finds damage."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from lighthouse_script import Job, Member, they_ask, they_connect

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


class Starter:
    """What a group knows that starts."""

    def __init__(self, readable: str) -> None:
        self.readable, self.holds = readable, ""
        self.failed: set[str] = set()
        self.damaged: set[str] = set()


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
    return says(member, name, holds=name)


def test_the_first_that_can_read_the_newest_reads_it_and_the_others_receive_it_from_that_one() -> None:
    job, a, b, c = Job.of("abc", least=2)
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
    they_ask(a, b, c)
    job.passes(1.0)
    assert {member.replica.version.step for member in (a, b, c)} == {8}
    assert job.lighthouse.round is not None and len(job.lighthouse.round.tally.roles) == 3


def test_a_reader_that_dies_is_followed_by_the_next_one() -> None:
    _, a, b, c = Job.of("abc", least=2)
    for member in (a, b, c):
        says(member)
    assert says(a) == "reads"
    a.dies()
    assert says(c) == "waits"
    assert says(b) == "reads"


def test_a_reader_that_dies_after_it_has_read_is_followed_by_those_who_have_the_state_or_by_the_next_one() -> None:
    _, a, b, c = Job.of("abc", least=2)
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
    job, a, b = Job.of("ab", least=2)
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


def test_bytes_that_come_again_are_no_progress() -> None:
    job, a, b = Job.of("ab", least=2)
    says(a), says(b), says(a)
    for number in range(2):
        says(a, is_at_work=True, done_bytes=7 - number)
        job.passes(STALLS_S / 2)
    assert says(b) == "reads"


def test_one_that_receives_and_stands_still_keeps_nobody_from_beginning() -> None:
    job, a, b = Job.of("ab", least=2)
    says(a), says(b), says(a)
    assert reads(a) == "waits"
    assert says(b).startswith("receives")
    assert reads(a) == "waits"
    job.passes(STALLS_S)
    assert reads(a) == "begins"


def test_damage_is_told_to_the_others_who_do_not_read_it_and_all_go_back_to_the_one_before() -> None:
    _, a, b, c = Job.of("abc", least=2)
    says(a), says(b), says(c)
    assert says(a) == "reads"
    damaged = {NEW: "a bit is flipped"}
    assert says(a, OLD, damaged=damaged) == "waits"
    assert says(b) == "reads"  # it was one that said so
    assert says(b, OLD, damaged=damaged) == "waits"
    assert says(c) == "meets" and told(c).damaged == damaged
    assert says(c, OLD, damaged=damaged) == "waits"
    assert says(a, OLD, damaged=damaged) == "reads"
    assert reads(a, 4, OLD) == "waits"
    assert says(b, OLD, damaged=damaged) == "receives step 4 from a:1"
    # A copy of its own may be whole.
    assert reads(b, 4, OLD) == "waits"
    assert says(c, NEW, damaged=damaged) == "reads"


def test_damage_that_one_alone_finds_is_its_own() -> None:
    _, a, b = Job.of("ab", least=2)
    says(a), says(b)
    every = {f"step-{step:012d}.q1-a": "they are all damaged" for step in range(60)}
    assert says(a, "", damaged=every) == "waits"
    assert says(b) == "reads" and not told(b).damaged
    assert reads(b) == "waits"
    assert says(a, "", damaged=every) == "receives step 8 from b:1"


def test_one_that_gets_a_state_from_nobody_who_has_it_reads_it_or_begins() -> None:
    _, a, b, c = Job.of("abc", least=2)
    says(a), says(b), says(c)
    assert says(a) == "reads"
    reads(a)
    assert says(b) == "receives step 8 from a:1"
    assert says(b, failed=["a:1"]) == "reads"  # nothing comes to it through the firewall
    assert says(c, OLD, failed=["a:1"]) == "waits"
    b.replica.restore(8)
    assert says(b, holds=NEW, failed=["a:1"]) == "waits"  # c lacks it
    assert says(c, OLD, failed=["a:1"]) == "receives step 8 from b:1"
    assert (
        says(c, OLD, failed=["a:1", "b:1"]) == "reads"
    )  # the older one: it goes on from the others' in the first quorum
    c.replica.restore(4)
    assert says(c, OLD, holds=OLD, failed=["a:1", "b:1"]) == "begins"
    assert reads(a) == says(b, holds=NEW, failed=["a:1"]) == "begins"


def test_one_that_says_it_has_a_later_state_and_gives_it_to_nobody_holds_nobody_up() -> None:
    _, a, b, liar = Job.of("abz", least=2)
    late = f"step-{2**39:012d}.q1-a"
    says(a), says(b), reads(liar, 2**39, late)
    assert says(a).startswith("receives") and says(b).startswith("receives")
    for member in (a, b):
        assert says(member, failed=["z:1"]) in ("reads", "waits")
    a.replica.restore(8)
    assert says(a, holds=NEW, failed=["z:1"]) == "waits"
    assert says(b, failed=["z:1"]) == "receives step 8 from a:1"
    b.replica.restore(8)
    assert says(b, holds=NEW, failed=["z:1"]) == says(a, holds=NEW, failed=["z:1"]) == "begins"


@pytest.mark.parametrize("is_at_work", [False, True])
def test_one_that_is_told_to_read_and_never_has_anything_holds_the_others_up_for_a_time_only(is_at_work: bool) -> None:
    """It says that it can read one that nobody else has, or goes on to report the bytes that it had before."""
    job, a, b = Job.of("ab", least=2)
    late = "step-000000000099.q1-a"
    says(a, late), says(b)
    heard = []
    for _ in range(20):
        says(a, late)
        if is_at_work:
            says(a, late, is_at_work=True, done_bytes=7)
        heard.append(says(b))
        if heard[-1] == "reads":
            break
        job.passes(10.0)
    assert heard[-1] == "reads" and told(b).named == late


def test_a_checkpoint_whose_only_owner_dies_is_not_forgotten_also_by_a_lighthouse_that_restarts() -> None:
    job, a, b = Job.of("ab", least=1)
    says(a), says(b, "")
    a.dies()
    assert says(b, "") == "begins" and told(b).named == NEW
    job.restart()
    b.connects()
    assert says(b, "", named=NEW) == "begins" and told(b).named == NEW
    c = job.join("c")
    assert says(c, OLD) == "reads" and told(c).named == NEW
    job.operator_allows_loss()
    assert says(b, "", named=NEW) == "waits" and told(b).named == ""


def test_no_quorum_begins_with_fresh_weights_while_one_reads_a_checkpoint_or_has_just_read_it() -> None:
    job, a, b, c = Job.of("abc", least=1, join_timeout_s=2.0)
    a.asks(), b.asks()
    assert says(c) == "reads"
    for number in range(4):
        job.passes(STALLS_S - 1.0)
        says(c, is_at_work=True, done_bytes=number)
        assert job.lighthouse.round is None and "c:1 reads a checkpoint" in job.lighthouse.reason
    assert reads(c) == "begins"
    job.passes(STALLS_S - 1.0)
    assert job.lighthouse.round is None
    c.asks()
    job.passes(4.0)
    assert [member.replica.version.step for member in (a, b, c)] == [8] * 3


def test_who_reads_a_checkpoint_and_stands_still_keeps_no_job_from_beginning() -> None:
    job, a, b, c = Job.of("abc", least=1, join_timeout_s=2.0)
    a.asks(), b.asks()
    assert says(c) == "reads"
    job.passes(STALLS_S + 1.0)
    assert job.lighthouse.round is not None


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_those_who_are_left_begin_with_one_state(seed: int) -> None:
    """Some die, stand still, find damage or get nothing from each other; the lighthouse checks what it knows at each word."""
    chance = random.Random(seed)
    job = Job(least=1)
    names = [f"step-{step:012d}.q1-a" for step in (4, 8, 12)]
    sees = {name: chance.sample(names, chance.randint(0, 3)) for name in "abcd"[: chance.randint(2, 4)]}
    groups = {name: Starter(max(sees[name], default="")) for name in sees}
    members = {name: job.join(name) for name in groups}
    is_damaged = {name for name in names if chance.random() < 0.3}
    cut = {(one, other) for one in groups for other in groups if one != other and chance.random() < 0.15}
    begun: dict[str, str] = {}
    raised: set[str] = set()
    lives = itertools.count(2)

    def again(name: str) -> None:
        members[name] = job.join(name, life=next(lives))
        groups[name] = Starter(max(sees[name], default=""))

    for _ in range(600):
        name = chance.choice([*members])
        member, group = members[name], groups[name]
        if name in begun:
            continue
        if chance.random() < 0.004:
            member.dies()
            again(name)
            continue
        if chance.random() < 0.02:
            job.passes(chance.choice([1.0, STALLS_S]))
        more = {"holds": group.holds, "failed": sorted(group.failed), "damaged": dict.fromkeys(group.damaged, "it is")}
        does = says(member, group.readable, **more).partition(" ")[0]
        if does == "reads":
            if group.readable in is_damaged:
                group.damaged.add(group.readable)
            else:
                group.holds = group.readable
        elif does == "receives":
            sources = [source.replica_id for source in member.located.sources if member.located]
            if any((name, source[0]) in cut for source in sources):
                group.failed |= {*sources}
            else:
                group.holds = told(member).checkpoint
        group.damaged |= told(member).damaged.keys()
        while group.readable in group.damaged:
            group.readable = max((one for one in sees[name] if one < group.readable), default="")
        if group.holds:
            member.replica.restore(int(group.holds[5:17]))
        if does == "begins" and not group.holds and (told(member).named or group.damaged):
            raised.add(name)
            member.dies()  # it raises that name
            again(name)
        elif does == "begins" or does == "heals":
            begun[name] = group.holds if does == "begins" else "others'"
            raised.discard(name)
            member.asks()
    assert begun.keys() | raised == members.keys(), (begun, is_damaged, sees)
    assert not raised or not any(begun.values()), (begun, raised, sees)
    assert cut or len({*begun.values()} - {"others'"}) <= 1, (begun, is_damaged, sees)


def test_where_all_are_damaged_everybody_hears_of_it() -> None:
    _, a, b = Job.of("ab", least=2)
    damaged = {NEW: "a bit is flipped"}
    says(a), says(b, "")
    assert says(a) == "reads"
    assert says(a, "", damaged=damaged) == "begins" and told(a).named == ""
    assert says(b, "") == "begins" and told(b).named == NEW  # it has not looked itself


def test_where_nobody_can_read_anything_all_begin_also_when_one_is_gone() -> None:
    _, a, b = Job.of("ab", least=2)
    says(a, ""), says(b, "")
    assert says(a, "") == "begins"
    a.dies()
    assert says(b, "") == "begins"


def test_who_is_late_is_not_waited_for_beyond_the_join_timeout() -> None:
    job, a, b, _ = Job.of("abc", least=2, join_timeout_s=60.0)
    says(a), says(b)
    for _ in range(3):
        job.passes(19.0)
        assert says(a) == says(b) == "meets"
    job.passes(4.0)
    assert says(a) == "reads"


def test_who_comes_after_the_others_have_a_state_is_told_so_and_costs_them_no_step() -> None:
    job, a, b = Job.of("ab", 1, least=2)
    a.asks(), b.asks()
    a.hears(), b.hears()
    c = job.join("c")
    assert says(c) == "heals step 1"
    a.votes(), b.votes()
    assert (a.hears(), b.hears()) == (["commit"], ["commit"])


def test_who_comes_while_others_ask_with_a_restored_state_heals_from_that() -> None:
    job, a = Job.of("a", least=3)
    a.replica.restore(120)
    a.asks()
    assert says(job.join("c")) == "heals step 120"


def test_who_comes_while_others_ask_with_fresh_weights_reads_and_they_heal_from_it() -> None:
    job, a, b, c = Job.of("abc", least=3)
    a.asks(), b.asks()
    assert says(c) == "reads"
    assert reads(c) == "begins"
    c.asks()
    job.passes(2.0)
    assert [member.replica.version.step for member in (a, b, c)] == [8] * 3


def test_a_lighthouse_that_restarts_is_told_again_and_gives_nobody_away_before_the_others_may_be_back() -> None:
    job, a, b = Job.of("ab", 1, least=2)
    c = job.join("c")
    job.restart()
    they_connect(c, a)
    assert says(c) == "waits"
    b.connects()
    job.passes(60.0)
    assert says(c) == "heals step 1"


def test_a_job_that_is_finished_refuses_who_starts() -> None:
    job, a = Job.of("a", 1, least=1)
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
        ({"holds": NEW}, {"holds": ""}),
        ({"failed": ["x"], "named": NEW}, {"failed": ["x"], "named": NEW}),
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


def test_a_job_that_may_begin_beside_a_named_checkpoint_is_not_kept_from_it_again() -> None:
    """It may die before its own first checkpoint."""
    job, a, b = Job.of("ab", least=1)
    says(a), says(b, "")
    a.dies()
    assert says(b, "") == "begins" and told(b).named == NEW
    job.operator_allows_loss()
    assert says(b, "") == "begins" and told(b).named == ""
    job.step(b)
    b.dies()
    again = job.join("b", life=2)
    assert says(again, "") == "begins" and told(again).named == ""


def test_a_group_says_of_which_ranks_it_waits_for_a_word() -> None:
    group = GroupState(3)
    assert group.waiting_for() == ""
    group.handle(RankMessage(1, RankWord(number=5, words=["b"])))
    assert "group ranks 0, 2 have not come" in group.waiting_for()
