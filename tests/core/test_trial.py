"""Before a quorum forms the lighthouse compares what groups show: who is right, who loads, and what each group has for itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from lighthouse_script import Job, Member, they_ask, they_connect, they_vote

from torchft_ckpt.core.coordination.messages import MAX_NAMES_BYTES, OnReplicasDiffer, Outcome, Role, Shows, size_of
from torchft_ckpt.core.coordination.trial import LEAF_FATES, MAX_IN_A_ROW, Came, Corrections, LeafFate, Moved


def at_work(names: str = "abc", policy: OnReplicasDiffer = OnReplicasDiffer.HEAL) -> tuple[Job, list[Member]]:
    """A job whose groups were found equal after its first step."""
    job = Job(least=1)
    members = [job.join(name, on_replicas_differ=policy) for name in names]
    job.step(*members)
    assert {member.replica.shows for member in members} == {Shows.SAMPLES}
    ask(members, "x" * len(names))
    for member in members:
        member.votes()
        member.hears()
    assert {member.replica.shows for member in members} == {Shows.NOTHING}
    return job, members


def ask(members: list[Member], states: Sequence[str], **leaves: str) -> None:
    for place, (member, state) in enumerate(zip(members, states, strict=True)):
        member.asks(shows=state, **{name: values[place] for name, values in leaves.items()})


def discards(members: list[Member]) -> None:
    for member in members:
        member.asks()
    discards_open(members)


def discards_open(members: Sequence[Member]) -> None:
    members[0].votes(error="a batch was of no use")
    they_vote(*members[1:])
    assert {member.outcomes[-1] for member in members} == {Outcome.DISCARD}


def two_have_come_in(starts_again: str = "") -> tuple[Job, tuple[Member, Member, Member]]:
    """A job of three in which two have died, and come back with a step: the survivor, and these. `starts_again`: when the
    lighthouse does."""
    job, (a, b, c) = at_work()
    b.dies()
    c.dies()
    b, c = job.join("b", life=2), job.join("c", life=2)
    members = (a, b, c)
    job.lets_in(b, c, others=[a])
    if starts_again.startswith("before"):
        starts_anew(job, members)
        ask([b, c, a], "xxx")
    if starts_again == "before an attempt at it":
        discards_open(members)
        ask([b, c, a], "xxx")
    if starts_again.endswith("without the survivor"):
        job.restart()
        for member in (b, c):
            member.connects()
            member.asks(shows="x", can_serve=True)
        job.passes(job.settings.join_timeout_s)
        assert b.formed is not None and b.formed.num_proved == 0, "nobody is there who did not come in"
        discards_open([b, c])
        starts_anew(job, members)
        ask([b, c, a], "xxx")
    for member in members:
        member.votes()
    if starts_again.startswith("after"):
        starts_anew(job, members)
    return job, members


def starts_anew(job: Job, members: Sequence[Member]) -> None:
    """The lighthouse is started again, and the last come first."""
    job.restart()
    for member in reversed(members):
        member.connects()


def told_to_load(members: list[Member]) -> dict[str, set[str]]:
    """Who is told to load before the step, from whom."""
    formed = {m.replica_id[0]: m.formed for m in members if m.formed is not None and m.replica.is_corrected}
    return {name: {source.replica_id[0] for source in f.sources} for name, f in formed.items() if f is not None}


def load(member: Member, state: str, **leaves: str) -> None:
    """It loads, and asks again at once."""
    member.follows()
    member.asks(shows=state, **leaves)


def roles(members: list[Member]) -> list[Role]:
    return [member.formed.role for member in members if member.formed is not None]


def test_after_a_discarded_step_who_differs_from_most_loads_their_state_and_the_others_wait_for_it() -> None:
    job, members = at_work()
    a, b, c = members
    quorum_id = job.lighthouse.quorum_id
    discards(members)
    ask(members, "xyx")
    assert told_to_load(members) == {"b": {"a", "c"}}
    a.hears(), c.hears()
    job.passes(5.0)
    assert not any(words.startswith("quorum") for member in (a, c) for words in member.hears()), "they wait"
    load(b, "x")
    assert roles(members) == [Role.HEALTHY] * 3 and job.lighthouse.quorum_id == quorum_id + 1
    they_vote(*members)
    assert [member.step for member in members] == [3, 3, 3]
    assert {member.replica.shows for member in members} == {Shows.SAMPLES}, "whether it stays so is looked at"


def tried_at(members: list[Member], until: int, differs_at: int = -1) -> list[int]:
    """Train, and return the steps at which the groups are compared; the last one differs at one of them, and loads."""
    found = []
    while members[0].step < until:
        is_tried, step = {member.replica.shows for member in members} == {Shows.SAMPLES}, members[0].step
        found += [step] * is_tried
        ask(members, "x" * len(members)) if is_tried and step != differs_at else None
        if is_tried and step == differs_at:
            ask(members, "x" * (len(members) - 1) + "y")
            load(members[-1], "x")
        elif not is_tried:
            they_ask(*members)
        for member in members:
            member.votes()
            member.hears()
    return found


def test_groups_are_compared_again_ever_seldomer_after_the_job_has_begun() -> None:
    _, members = at_work()
    assert tried_at(members, 100) == [4, 8, 16, 32, 64]


def test_they_are_compared_so_anew_after_one_had_to_load() -> None:
    _, members = at_work()
    assert tried_at(members, 100, differs_at=32) == [4, 8, 16, 32, 33, 36, 40, 48, 64, 96]


def test_they_are_compared_so_anew_after_one_has_come_in() -> None:
    job, (a, b) = at_work("ab")
    tried_at([a, b], 21)
    b.dies()
    back = job.join("b", life=2)
    job.lets_in(back, others=[a])
    a.votes(), back.votes()
    came_in_at = a.step - 1
    assert [step - came_in_at for step in tried_at([a, back], 60)] == [1, 4, 8, 16, 32]


def test_they_are_compared_so_anew_after_the_lighthouse_was_started_again() -> None:
    job, members = at_work("ab")
    job.restart()
    for member in members:
        member.replica.version = msgspec.structs.replace(member.replica.version, step=40_000)
        member.connects()
    assert [step - 40_000 for step in tried_at(members, 40_020)] == [4, 8, 16]


def test_a_group_that_trains_alone_is_compared_with_nobody() -> None:
    _, a = Job.of("a", 1, least=1)
    tried = tried_at([a], 40)
    assert all(step < 4 for step in tried)


@pytest.mark.parametrize(
    "when",
    ["", "before their first step", "after it", "before an attempt at it", "around an attempt without the survivor"],
)
def test_who_came_in_has_no_voice_so_two_newcomers_do_not_outvote_a_survivor(when: str) -> None:
    """Nor if the lighthouse is started again, and has forgotten who came in."""
    _, (a, b, c) = two_have_come_in(when)
    assert a.replica.shows is Shows.SAMPLES
    ask([a, b, c], "xyy")
    assert told_to_load([a, b, c]) == {"b": {"a"}, "c": {"a"}}


@pytest.mark.parametrize("was", ["", "idle in a quorum of one that is lost", "given the state by one that is lost"])
def test_two_that_come_in_before_the_first_step_counts_do_not_outvote_the_one_that_began_the_job(was: str) -> None:
    job = Job(least=1)
    o = job.join("o") if was else None
    if o is not None and was.startswith("idle"):
        o.asks()
        o.votes(error="a batch was of no use")
        a = job.join("a")
        a.asks(allow_heal=False)
        o.asks()
        assert roles([o, a]) == [Role.HEALTHY, Role.IDLE]
    elif o is not None:
        job.step(o)
        a = job.join("a")
        job.lets_in(a, others=[o])
    else:
        a = job.join("a")
    if o is not None:
        o.dies()
    a.asks()
    a.votes(error="a batch was of no use")
    b, c = job.join("b"), job.join("c")
    for member in (b, c):
        member.warms_up()
    a.asks(shows="x")
    for member in (b, c):
        member.comes_in()
        member.asks()
    assert roles([a, b, c]) == [Role.HEALTHY] * 3
    they_vote(a, b, c)
    ask([a, b, c], "xyy")
    assert told_to_load([a, b, c]) == {"b": {"a"}, "c": {"a"}}


def test_two_that_went_on_from_what_they_were_given_do_not_outvote_the_giver_that_is_back_before_a_step_counts() -> (
    None
):
    job, a = Job.of("a", least=1)
    a.asks()
    a.votes(error="a batch was of no use")
    b, c = job.join("b"), job.join("c")
    for member in (b, c):
        member.warms_up()
    a.asks()
    for member in (b, c):
        member.comes_in()
    a.is_cut_off()
    they_ask(b, c)
    assert roles([b, c]) == [Role.HEALTHY] * 2
    discards([b, c])
    a.connects()
    ask([a, b, c], "xxx")
    they_vote(a, b, c)
    ask([a, b, c], "xyy")
    assert told_to_load([a, b, c]) == {"b": {"a"}, "c": {"a"}}


def test_newcomers_are_made_equal_although_the_only_one_with_a_voice_shows_nothing_and_have_no_voice_by_that() -> None:
    """It asked anew in an outer loop's round. They trained a round with states that differed, until it showed its own."""
    job, (a,) = at_work("a")
    others = [job.join(name) for name in "bcde"]
    job.lets_in(*others, others=[a])
    members = [a, *others]
    they_vote(*members)
    a.asks()
    ask(others, "yxxx", ema="1111")
    assert told_to_load(members) == {"b": {"c", "d", "e"}}
    load(others[0], "x", ema="1")
    assert roles(members) == [Role.HEALTHY] * 5
    assert [(m.formed.leaves.common, m.formed.leaves.own) for m in members if m.formed] == [([], [])] * 5
    assert not any("nobody is left" in line for line in job.log)
    they_vote(*members)
    ask(members, "wxxxx")
    assert told_to_load(members) == {name: {"a"} for name in "bcde"}


def test_two_newcomers_alone_do_not_prove_each_other() -> None:
    """Their loops may have made the same of what both had read before: the job goes on from that, and it is said."""
    job, (a, b, c) = two_have_come_in()
    a.dies()
    ask([b, c], "yy")
    assert roles([b, c]) == [Role.HEALTHY] * 2
    said = "nobody is left who was found equal after a step, so the job goes on from the state of step 3 of b:2, c:2"
    assert sum(said in line for line in job.log) == 1


def test_without_a_majority_the_state_of_the_longest_in_the_job_is_taken_and_that_is_said() -> None:
    job, members = at_work("ab")
    discards(members)
    ask(members, "xy")
    assert told_to_load(members) == {"b": {"a"}}
    assert any("No state has a majority" in line for line in job.log)


@pytest.mark.parametrize("policy", [OnReplicasDiffer.WARN, OnReplicasDiffer.STOP])
def test_what_becomes_of_groups_that_were_equal_is_as_they_wish(policy: OnReplicasDiffer) -> None:
    job, members = at_work("abc", policy)
    discards(members)
    late = job.join("late")
    ask(members, "xyx")
    assert late.hears() == []
    assert not told_to_load(members)
    if policy is OnReplicasDiffer.WARN:
        assert roles(members) == [Role.HEALTHY] * 3
    else:
        assert all(any(words.startswith("stop: ") for words in member.hears()) for member in members)
    assert any("b:1 came to another state of step 2 than a:1, c:1" in line for line in job.log)


def test_a_newcomer_loads_whatever_becomes_of_those_that_were_equal() -> None:
    job, members = at_work("ab", OnReplicasDiffer.WARN)
    c = job.join("c", on_replicas_differ=OnReplicasDiffer.WARN)
    job.lets_in(c, others=members)
    they_vote(*members, c)
    ask([*members, c], "xxy")
    assert told_to_load([*members, c]) == {"c": {"a", "b"}}


def test_who_differs_although_it_has_just_loaded_trains_on_and_is_looked_at_again() -> None:
    job, members = at_work()
    discards(members)
    ask(members, "xyx")
    load(members[1], "y")
    assert roles(members) == [Role.HEALTHY] * 3
    assert any("cannot load it before this step" in line for line in job.log)
    they_vote(*members)
    assert members[0].replica.shows is Shows.ALL


def test_who_is_to_load_goes_on_with_its_own_state_if_nobody_is_left_who_holds_the_other() -> None:
    """Else the death of one of two groups would stop the job, though the other one lives and holds a whole state."""
    job, (a, b) = at_work("ab")
    discards([a, b])
    ask([a, b], "xy")
    assert told_to_load([a, b]) == {"b": {"a"}}
    a.dies()
    b.follows(load=False)
    b.asks(shows="y")
    b.votes()
    assert b.outcomes[-1] is Outcome.COMMIT
    assert sum("nobody is left who holds" in line for line in job.log) == 1


def test_who_is_to_load_goes_on_from_its_own_state_only_while_no_later_step_was_committed() -> None:
    job, (a, b) = at_work("ab")
    discards([a, b])
    ask([a, b], "xy")
    assert told_to_load([a, b]) == {"b": {"a"}}
    b.follows(load=False)
    b.says(b.replica.locate())  # and the other one makes a step alone
    a.votes()
    assert a.outcomes[-1] is Outcome.COMMIT
    a.dies()
    b.asks(shows="y")
    job.passes(300.0)
    assert b.outcomes[-1] is not Outcome.COMMIT and "was committed, but the newest whole state here" in b.hears()[-1]


def test_groups_that_go_on_from_an_older_state_as_the_operator_allows_it_are_compared_too() -> None:
    job, (a, b, c) = at_work()
    ask([a, b, c], "xxx")
    b.is_stopped = c.is_stopped = True
    for member in (a, b, c):
        member.votes()
    a.dies()
    b.is_stopped = c.is_stopped = False  # their loops have given up the step that counts
    ask([b, c], "xy")
    b.ends()
    ask([b], "x")
    assert a.outcomes[-1] is Outcome.COMMIT and {b.step, c.step} == {a.step - 1}
    job.operator_allows_loss()
    assert told_to_load([b, c]) == {"c": {"b"}}
    load(c, "x")
    assert roles([b, c]) == [Role.HEALTHY] * 2


def test_who_is_to_load_and_could_not_gets_the_state_as_all_do_while_others_hold_it() -> None:
    _, (a, b) = at_work("ab")
    discards([a, b])
    ask([a, b], "xy")
    b.follows(load=False)
    b.asks(shows="y")
    assert b.replica.warms_up and a.formed.role is Role.HEALTHY


def test_who_loads_before_a_step_writes_no_checkpoint_until_it_is_compared_after_that() -> None:
    _, (a, b) = at_work("ab")
    discards([a, b])
    ask([a, b], "xy")
    assert told_to_load([a, b]) == {"b": {"a"}}
    load(b, "x")
    assert (b.replica.is_on_trial, a.replica.is_on_trial, a.replica.num_writers) == (True, False, 1)
    they_vote(a, b)
    assert b.outcomes[-1] is Outcome.COMMIT and b.replica.is_on_trial
    ask([a, b], "zz")
    assert (b.replica.is_on_trial, a.replica.num_writers) == (False, 2)


def test_who_differs_and_asks_not_to_heal_takes_no_part_in_the_step() -> None:
    job, members = at_work()
    a, b, c = members
    discards(members)
    a.asks(shows="x")
    b.asks(shows="y", allow_heal=False)
    c.asks(shows="x")
    assert roles(members) == [Role.HEALTHY, Role.IDLE, Role.HEALTHY]
    assert any("B:1 asked for a quorum without healing, and takes no part in this step" in line for line in job.log)
    they_vote(*members)
    assert (a.step, b.step, c.step) == (3, 2, 3)
    assert not b.replica.version.proven, "it comes in as all do that lack the state"


def test_a_leaf_that_differs_after_a_step_that_all_began_alike_is_each_groups_own_and_the_others_are_common() -> None:
    _, *members = Job.of("ab", 1, least=1)
    ask(members, "xx", mean="12", ema="33")
    assert [(m.formed.leaves.common, m.formed.leaves.own) for m in members if m.formed] == [(["ema"], ["mean"])] * 2
    assert roles(members) == [Role.HEALTHY] * 2


def test_who_receives_the_state_of_another_life_is_not_told_what_was_found_in_the_one_before() -> None:
    """The source does not know it, and the two would be compared by different leaves: one loaded what was equal."""
    job, *members = Job.of("ab", 1, least=2)
    ask(members, "xx", mean="12", ema="33")
    they_vote(*members)
    for member in members:
        member.dies()
    job.gives_first = False
    a, b = (job.join(name, life=2) for name in "ab")
    for member in (a, b):
        member.replica.restore(1)
        member.asks(can_serve=True)
    assert b.formed is not None and b.formed.held and [s.replica_id for s in b.formed.sources] == ["a:2"]
    assert (b.formed.leaves.common, b.formed.leaves.own) == ([], [])


def wide(num: int = 1000) -> list[str]:
    """Names of so many leaves, of which two thirds have no room in a message."""
    return [f"{number:04}" + "experts." * 14 for number in range(num)]


@pytest.mark.parametrize("policy", OnReplicasDiffer)
def test_more_names_than_have_room_in_a_message_are_told_after_the_steps_that_follow(policy: OnReplicasDiffer) -> None:
    """A thousand members are sent so much of them. The names that had no room were not told before a step was discarded."""
    _, *members = Job.of("ab", 1, least=1, on_replicas_differ=policy)
    names = [f"{number:04}" + "\x01" * 110 for number in range(100)] + wide()
    while {member.replica.shows for member in members} == {Shows.SAMPLES}:
        ask(members, "xx", **dict.fromkeys(names, "11"))
        assert members[0].formed is not None
        told = set(members[0].formed.leaves.common)
        assert told <= set(names) and 0 < size_of([*told]) <= MAX_NAMES_BYTES, "nothing is told twice"
        names = [name for name in names if name not in told]
        for member in members:
            member.votes()
            member.hears()
    assert not names
    assert {member.replica.shows for member in members} == {Shows.NOTHING}


def test_a_leaf_that_was_found_equal_and_had_no_room_is_not_each_groups_own_when_one_has_other_bits() -> None:
    """It was taken for one of those that each group has for itself, was never compared again, and the groups trained on so."""
    job, *members = Job.of("abc", 1, least=1)
    names = wide()
    ask(members, "xxx", **dict.fromkeys(names, "111"))
    assert members[0].formed is not None
    left = [name for name in names if name not in members[0].formed.leaves.common]
    they_vote(*members)
    ask(members, "xxx", **(dict.fromkeys(left, "111") | {left[-1]: "112"}))
    assert told_to_load(members) == {"c": {"a", "b"}}
    load(members[2], "x", **dict.fromkeys(left, "1"))
    assert [m.formed.leaves.own for m in members if m.formed] == [[]] * 3
    assert any("c:1 came to another state of step 2 than a:1, b:1" in line for line in job.log)


def test_who_does_not_show_a_leaf_that_was_found_equal_neither_loads_it_nor_makes_it_each_groups_own() -> None:
    _, *members = Job.of("abc", 1, least=1)
    names = wide()
    ask(members, "xxx", **dict.fromkeys(names, "111"))
    assert members[0].formed is not None
    left = [name for name in names if name not in members[0].formed.leaves.common]
    they_vote(*members)
    ask(members[:2], "xx", **dict.fromkeys(left, "11"))
    members[2].asks(shows="x", **dict.fromkeys(left[:-1], "1"))
    assert not told_to_load(members)
    assert [(m.formed.leaves.own, left[-1] in m.formed.leaves.common) for m in members if m.formed] == [([], False)] * 3


def test_leaves_that_are_equal_after_a_discarded_step_are_not_common_before_one_has_counted() -> None:
    """Nobody has moved them since all began with the same."""
    _, *members = Job.of("ab", least=1)
    discards(members)
    ask(members, "xx", mean="11", ema="11")
    assert [(m.formed.leaves.common, m.formed.leaves.own) for m in members if m.formed] == [([], [])] * 2
    they_vote(*members)
    ask(members, "xx", mean="12", ema="33")
    assert [(m.formed.leaves.common, m.formed.leaves.own) for m in members if m.formed] == [(["ema"], ["mean"])] * 2


def test_who_is_equal_before_its_first_step_has_no_voice_yet() -> None:
    """So an outer loop's groups are compared, before their loops have made anything of what they have loaded."""
    job = Job(least=1)
    a, b = members = [job.join(name) for name in "ab"]
    a.replica.restore(5)
    they_ask(*members)
    b.loads()
    ask(members, "xx")
    assert roles(members) == [Role.HEALTHY] * 2
    they_vote(*members)
    ask(members, "xx", n="12")
    assert told_to_load(members) == {"b": {"a"}}, "its loop may have read another step before it had the state"


def test_of_a_leaf_that_has_moved_nowhere_nothing_is_found_out_before_it_has() -> None:
    """BatchNorm that is frozen at first, a best loss that is looked for later: equal in all groups, and then each group's own."""
    _, *members = Job.of("ab", 1, least=1)
    they_ask(*members, shows="x", mean="1", ema="1", still=["mean"])
    assert [(m.formed.leaves.common, m.formed.leaves.own) for m in members if m.formed] == [(["ema"], [])] * 2
    they_vote(*members)
    discards(members)
    ask(members, "xx", mean="23")
    assert [(m.formed.leaves.common, m.formed.leaves.own) for m in members if m.formed] == [([], ["mean"])] * 2
    assert not told_to_load(members)


def test_a_group_in_which_a_leaf_has_moved_that_stood_still_in_the_others_loads_theirs_each_time() -> None:
    job, members = at_work("abc")
    discards(members)
    for member, n in zip(members, "112", strict=True):
        member.asks(shows="x", n=n, still=["n"] * (n == "1"))
    assert told_to_load(members) == {"c": {"a", "b"}}
    load(members[2], "x", n="1")
    for member in members:
        member.votes()
    for member, n in zip(members, "113", strict=True):
        member.asks(shows="x", n=n, still=["n"] * (n == "1"))
    assert told_to_load(members) == {"c": {"a", "b"}}
    assert sum("c:1 came to another state of step" in line for line in job.log) == 2
    assert not any(member.formed.leaves.own for member in members if member.formed)


def look(members: list[Member], codebook: str) -> tuple[list[str], list[str]]:
    """They are compared, and each has this of a codebook that was found to be its own; return what is found."""
    goes_on(members[0].job, members)
    for member, value in zip(members, codebook, strict=True):
        member.asks(shows="x", codebook=value, own=["codebook"])
    return learnt(members[0])


def test_a_leaf_that_was_each_groups_own_and_moves_alike_in_all_of_them_is_common_from_the_second_look_on() -> None:
    """A codebook made of each group's first batch, and averaged later: a group that came back kept its own for ever."""
    _, members = at_work("ab")
    assert [look(members, of)[0] for of in ("12", "33", "44")] == [[], [], ["codebook"]]
    assert not told_to_load(members)


@pytest.mark.parametrize(
    "looks",
    [("33", "33", "33"), ("00", "12", "00", "34", "00"), ("12", "33", "45", "66")],
    ids=["stands still", "is set back to zero now and then", "was equal by chance"],
)
def test_what_is_equal_without_having_moved_alike_stays_each_groups_own(looks: tuple[str, ...]) -> None:
    _, members = at_work("ab")
    assert [look(members, of) for of in looks] == [([], [])] * len(looks)


def test_one_that_came_in_and_has_another_codebook_than_most_loads_theirs_after_the_next_step() -> None:
    _, members = at_work("abc")
    assert [look(members, of)[0] for of in ("335", "446")] == [[], ["codebook"]]
    they_vote(*members)
    assert members[0].replica.shows is Shows.SAMPLES
    ask(members, "xxy")
    assert told_to_load(members) == {"c": {"a", "b"}}


def test_a_group_whose_data_are_its_own_beside_two_with_the_same_loads_twice_and_keeps_its_own_from_then_on() -> None:
    """Two had BatchNorm's statistics alike, so the third had to load theirs in each step, and ended at the third in a row."""
    job, members = at_work("abc")
    assert [look(members, of)[0] for of in ("335", "446")] == [[], ["codebook"]]
    for _ in range(2):  # it is compared with what has to be equal, and moves it at once to its own
        they_vote(*members)
        ask(members, ("x", "x", "x/y"))
        assert told_to_load(members) == {"c": {"a", "b"}}
        load(members[2], "x")
    assert {learnt(member)[1][0] for member in members} == {"codebook"}
    assert sum("codebook changes in other steps" in line for line in job.log) == 1
    for of in ("778", "996"):
        assert look(members, of) == ([], []) and not told_to_load(members)


def test_a_leaf_that_is_equal_in_the_first_step_and_follows_what_is_own_from_then_on_is_own_and_no_group_ends() -> None:
    """Fake quantisation's scales follow BatchNorm's statistics a step later. All but one group ended at the third in a row."""
    job = Job(least=1)
    members = [job.join(name, on_replicas_differ=OnReplicasDiffer.HEAL) for name in "abc"]
    job.step(*members)
    ask(members, "xxx", scale="111", codebook="222")
    assert {*map(str, map(learnt, members))} == {"(['codebook', 'scale'], [])"}
    for member in members:
        member.votes()
    discards(members)
    for _ in range(2):
        ask(members, ("x", "x/y", "x/z"))
        assert told_to_load(members) == {"b": {"a"}, "c": {"a"}}
        load(members[1], "x")
        load(members[2], "x")
        for member in members:
            member.votes()
    assert {*map(str, map(learnt, members))} == {"([], ['codebook', 'scale'])"}, (
        "which of the two differs nobody has said"
    )
    assert sum("codebook, scale changes in other steps" in line for line in job.log) == 1
    assert [look(members, of)[0] for of in ("777", "888")] == [[], ["codebook"]]


def test_what_was_found_common_once_stays_so_if_a_group_differs_again_in_what_optimizers_own() -> None:
    """A rate of its own, say: an average of the weights was given up with that, and nobody compared it from then on."""
    job = Job(least=1)
    members = [job.join(name, on_replicas_differ=OnReplicasDiffer.HEAL) for name in "ab"]
    job.step(*members)
    ask(members, "xx", ema="11")
    for member in members:
        member.votes()
    discards(members)
    for _ in range(3):
        ask(members, "xy")
        assert told_to_load(members) == {"b": {"a"}}
        load(members[1], "x")
        assert {*map(str, map(learnt, members))} == {"([], [])"}
        for member in members:
            member.votes()
    assert not any("changes in other steps" in line for line in job.log)


def test_a_quorum_that_is_tried_twice_is_one_look_at_what_each_group_has_of_its_own() -> None:
    """What was found at the first was forgotten by the second, as nothing had moved since."""
    job, members = at_work("ab")
    look(members, "33")
    goes_on(job, members)
    newcomer = job.join("c")
    newcomer.warms_up()
    they_ask(*members, shows="x", codebook="4", own=["codebook"], can_serve=True)
    newcomer.comes_in()
    newcomer.asks()
    assert {member.formed.leaves.common[0] for member in members if member.formed} == {"codebook"}


def test_two_groups_that_differ_and_one_alone_say_nothing_of_an_own_leaf() -> None:
    _, members = at_work("ab")
    assert [look(members, of) for of in ("12", "34", "56")] == [([], [])] * 3
    _, members = at_work("a")
    assert [look(members, of) for of in "123"] == [([], [])] * 3


def test_a_leaf_of_which_it_was_said_that_it_is_not_compared_any_more_is_not() -> None:
    job, a, b = one_has_come_in()
    show([a, b], "21", moved="a")
    b.follows()
    show([b], "2", moved="")
    goes_on(job, [a, b])
    show([a, b], "32", moved="a")
    assert learnt(a) == ([], ["ema"])
    for value in "456":
        goes_on(job, [a, b])
        they_ask(a, b, shows="x", ema=value, own=["ema"])
        assert learnt(a) == ([], [])


def one_has_come_in(steps: int = 1) -> tuple[Job, Member, Member]:
    """A job that one group has begun, and another has come into; it was found equal, and both are compared after these steps."""
    job, (a,) = at_work("a")
    b = job.join("b")
    job.lets_in(b, others=[a])
    they_vote(a, b)
    for _ in range(steps):
        ask([a, b], "xx")
        they_vote(a, b)
    discards([a, b])
    return job, a, b


def test_who_came_in_and_cannot_load_yet_trains_on_and_is_given_what_differs_after_the_next_step() -> None:
    """Its loop goes back through what it has computed in its first step. It took no part in its second."""
    job, (a,) = at_work("a")
    b = job.join("b")
    job.lets_in(b, others=[a])
    goes_on(job, [a, b])
    a.asks(shows="x", mean="1")
    b.asks(shows="x", mean="2", allow_heal=False)
    assert (roles([a, b]), learnt(a)) == ([Role.HEALTHY] * 2, ([], []))
    goes_on(job, [a, b])
    ask([a, b], "xx", mean="34")
    assert told_to_load([a, b]) == {"b": {"a"}}
    load(b, "x", mean="3")
    goes_on(job, [a, b])
    ask([a, b], "xx", mean="56")
    assert (roles([a, b]), learnt(a)) == ([Role.HEALTHY] * 2, ([], ["mean"]))


def test_what_follows_from_a_leaf_that_differs_is_said_of_each_case() -> None:
    assert LEAF_FATES.keys() == {*Moved} and {len(fates) for fates in LEAF_FATES.values()} == {len(Came)}
    assert not any(fate in (LeafFate.OPEN, LeafFate.COMMON) for fates in LEAF_FATES.values() for fate in fates)


def show(members: list[Member], ema: str, moved: str) -> None:
    """They ask, and show one leaf besides: what each has of it, and where it has moved."""
    for member, value in zip(members, ema, strict=True):
        still = [] if member.replica_id[0] in moved else ["ema"]
        member.asks(shows="x", ema=value, still=still)


def learnt(member: Member) -> tuple[list[str], list[str]]:
    assert member.formed is not None
    return member.formed.leaves.common, member.formed.leaves.own


def goes_on(job: Job, members: list[Member]) -> None:
    """The step counts, and what is seen after it is compared."""
    they_vote(*members)
    if members[0].replica.shows is Shows.NOTHING:
        discards(members)


def test_a_leaf_that_has_moved_in_the_eldest_alone_is_given_to_who_came_in_and_nothing_is_found_out() -> None:
    """An average that begins to move by a count of the loop's own. It was each group's own, and differed from then on."""
    job, a, b = one_has_come_in()
    show([a, b], "11", moved="")
    assert (learnt(a), told_to_load([a, b])) == (([], []), {})
    goes_on(job, [a, b])
    show([a, b], "21", moved="a")
    assert told_to_load([a, b]) == {"b": {"a"}}
    b.follows()
    show([b], "2", moved="")
    assert learnt(a) == ([], [])
    goes_on(job, [a, b])
    show([a, b], "22", moved="a")
    assert (learnt(a), told_to_load([a, b])) == (([], []), {}), "as it was given is no proof"
    goes_on(job, [a, b])
    show([a, b], "33", moved="ab")
    assert learnt(a) == (["ema"], [])
    assert not any("came to another state" in line for line in job.log)


def test_a_leaf_that_has_moved_in_who_came_in_alone_is_that_of_the_eldest() -> None:
    job, a, b = one_has_come_in()
    show([a, b], "12", moved="b")
    assert told_to_load([a, b]) == {"b": {"a"}}
    assert any("b:1 came to another state of step 4 than a:1" in line for line in job.log)


def test_two_that_came_in_and_moved_a_leaf_alike_do_not_outvote_the_eldest_in_which_it_stands() -> None:
    _, (a, b, c) = two_have_come_in()
    ask([a, b, c], "xxx")
    they_vote(a, b, c)
    discards([a, b, c])
    show([a, b, c], "122", moved="bc")
    assert told_to_load([a, b, c]) == {"b": {"a"}, "c": {"a"}}


def test_a_leaf_that_moves_late_and_differs_in_all_is_own_to_each_group_and_nobody_is_given_it() -> None:
    job, a, b = one_has_come_in()
    show([a, b], "11", moved="")
    goes_on(job, [a, b])
    show([a, b], "23", moved="ab")
    assert (learnt(a), told_to_load([a, b])) == (([], ["ema"]), {})
    assert not any("not compared any more" in line for line in job.log)


@pytest.mark.parametrize("moved", ["a", "b"])
@pytest.mark.parametrize("what", ["is cut off", "the lighthouse is started again"])
def test_the_eldest_keeps_its_leaf_although_the_lighthouse_has_forgotten_who_came_in(what: str, moved: str) -> None:
    job, a, b = one_has_come_in()
    if what == "is cut off":
        a.is_cut_off()
        a.connects()
    else:
        job.restart()
        they_connect(b, a)
    ask([b, a], "xx")
    goes_on(job, [b, a])
    show([b, a], "21", moved=moved)
    assert told_to_load([a, b]) == {"b": {"a"}}


def test_who_came_in_is_given_what_its_first_step_has_moved_also_if_the_lighthouse_was_started_again() -> None:
    job, (a,) = at_work("a")
    b = job.join("b")
    job.lets_in(b, others=[a])
    they_vote(a, b)
    job.restart()
    they_connect(b, a)
    show([b, a], "32", moved="ab")
    assert told_to_load([a, b]) == {"b": {"a"}}


def test_who_was_given_a_leaf_and_stands_still_again_has_its_own_and_that_is_said() -> None:
    """One that speaks keeps a list of its losses. Nobody waits for that in each step."""
    job, a, b = one_has_come_in()
    show([a, b], "21", moved="a")
    assert told_to_load([a, b]) == {"b": {"a"}}
    b.follows()
    show([b], "2", moved="")
    goes_on(job, [a, b])
    show([a, b], "32", moved="a")
    assert (learnt(a), told_to_load([a, b])) == (([], ["ema"]), {})
    said = "ema changes in other steps in some groups than in others: from step 5 on each has its own, and it is not compared any"
    assert sum(said in line for line in job.log) == 1


def test_a_leaf_that_who_came_in_moves_at_another_place_than_the_eldest_is_said_when_it_becomes_its_own() -> None:
    """A target network that is copied by a count of the loop's own, each 100 steps."""
    job, a, b = one_has_come_in()
    show([a, b], "21", moved="a")
    b.follows()
    show([b], "2", moved="")
    goes_on(job, [a, b])
    show([a, b], "22", moved="a")
    goes_on(job, [a, b])
    show([a, b], "34", moved="ab")
    assert learnt(a) == ([], ["ema"])
    assert sum("ema changes in other steps" in line for line in job.log) == 1


def test_who_came_in_is_given_what_the_eldest_moves_now_and_then_alone_once_and_not_for_ever() -> None:
    """A list of losses to which who speaks adds each second step: it was loaded at each comparison, as long as the job ran."""
    job, a, b = one_has_come_in()
    num_given, there, here = 0, "1", "1"
    for n in "223344556677":
        there = n
        show([a, b], there + here, moved="a")
        if "b" in told_to_load([a, b]):
            num_given, here = num_given + 1, there
            b.follows()
            show([b], here, moved="")
        if learnt(a)[1]:
            break
        goes_on(job, [a, b])
    assert (num_given, learnt(a)[1]) == (1, ["ema"])
    assert sum("ema changes in other steps" in line for line in job.log) == 1


def test_each_group_that_comes_in_is_given_what_its_first_step_has_moved_while_nobody_knows_of_it() -> None:
    """A target network that moves seldom: the second group that came in, and made of it what the first had, kept that."""
    job, (a,) = at_work("a")
    members = [a]
    for name in "bc":
        members.append(job.join(name))
        job.lets_in(members[-1], others=members[:-1])
        they_vote(*members)
        show(members, "1" * (len(members) - 1) + "2", moved=f"a{name}")
        assert told_to_load(members) == {name: {m.replica_id[0] for m in members[:-1]}}
        members[-1].follows()
        show(members[-1:], "1", moved="")
        they_vote(*members)
        show(members, "1" * len(members), moved="a")
        assert learnt(a) == ([], [])
        they_vote(*members)
        discards(members) if a.replica.shows is Shows.NOTHING else None


def test_who_says_that_it_came_in_with_a_later_step_than_this_is_not_given_a_leaf_again_and_again() -> None:
    job, a, b = one_has_come_in()
    b.replica._given_at = 1 << 40
    num_given = 0
    for n in "2345678":
        show([a, b], n + "1", moved="a")
        if "b" in told_to_load([a, b]):
            num_given += 1
            b.follows()
            show([b], n, moved="")
        if learnt(a)[1]:
            break
        goes_on(job, [a, b])
    assert num_given <= 1 and learnt(a)[1] == ["ema"]


def test_who_lacks_a_leaf_that_stands_still_in_the_others_is_not_told_to_load_it() -> None:
    """It came into being there. The eldest loaded in three steps in a row, and ended."""
    _, members = at_work("abc")
    discards(members)
    members[0].asks(shows="x")
    they_ask(*members[1:], shows="x", late="1", still=["late"])
    assert not told_to_load(members)
    assert [m.formed.leaves.own for m in members if m.formed] == [["late"]] * 3


def test_leaves_that_differ_and_were_seen_to_move_nowhere_are_each_groups_own() -> None:
    """A queue, of which only a sample is looked at."""
    _, a, b = one_has_come_in()
    show([a, b], "12", moved="")
    assert (learnt(a), told_to_load([a, b])) == (([], ["ema"]), {})


def test_leaves_that_one_group_shows_by_itself_are_compared_when_all_have_shown_theirs() -> None:
    _, members = at_work("ab")
    members[0].asks(shows="x", late="1")
    members[1].asks()
    they_vote(*members)
    assert {member.replica.shows for member in members} == {Shows.SAMPLES}
    ask(members, "xx", late="11")
    assert [member.formed.leaves.common for member in members if member.formed] == [["late"]] * 2


def test_a_group_that_came_in_is_given_an_unknown_leaf_once() -> None:
    job, a = Job.of("a", 1, least=1)
    a.asks(shows="x", mean="1", ema="3")
    a.votes()
    b = job.join("b")
    job.lets_in(b, others=[a])
    they_vote(a, b)
    ask([a, b], "xx", mean="12", ema="34")
    assert told_to_load([a, b]) == {"b": {"a"}}, "its loop may have read another step before it came in"
    load(b, "x", mean="1", ema="3")
    assert a.formed is not None and (a.formed.leaves.common, a.formed.leaves.own) == ([], []), "it has just loaded them"
    they_vote(a, b)
    ask([a, b], "xx", mean="12", ema="33")
    assert a.formed is not None and (a.formed.leaves.common, a.formed.leaves.own) == (["ema"], ["mean"])
    assert not told_to_load([a, b])
    assert not any("changes in other steps" in line for line in job.log)


def test_a_rank_ends_when_the_same_leaf_differs_at_three_boundaries_in_a_row() -> None:
    seen = Corrections()
    assert [seen.note(step, ["w", "v"]) for step in (5, 6)] == ["", ""]
    assert seen.note(7, ["w"]) == "w" and MAX_IN_A_ROW == 3
    apart = Corrections()
    assert not any(apart.note(step, ["w"]) for step in (5, 6, 9, 10, 20))
    other = Corrections()
    assert not any(other.note(step, [f"w{step}"]) for step in range(5))
    assert [other.count(names) for names in (["w"], ["w", "v"], ["w", "v"], ["w"], [])] == [1, 1, 2, 4, 1]


def test_nobody_is_asked_for_a_leaf_that_those_who_are_right_do_not_show() -> None:
    """One that came in named leaves of its own: all waited while it loaded what nobody has, and all kept the names for good."""
    _, (a, b, c) = two_have_come_in()
    they_ask(a, b, shows="x", ema="1")
    c.asks(shows="x", ema="1", nobodys="7")
    assert not told_to_load([a, b, c])
    assert [(m.formed.leaves.common, m.formed.leaves.own) for m in (a, b, c) if m.formed] == [(["ema"], [])] * 3


def test_one_of_those_who_are_right_neither_hides_a_leaf_nor_adds_one() -> None:
    _, (a, b, c) = at_work()
    discards([a, b, c])
    ask([a, b, c], "xxx")
    they_vote(a, b, c)
    discards([a, b, c])
    a.asks(shows="x", only_his="1", mean="0")
    they_ask(b, c, shows="x", ema="1", mean="5")
    assert [(m.formed.leaves.common, m.formed.leaves.own) for m in (a, b, c) if m.formed] == [([], ["ema", "mean"])] * 3


def test_a_leaf_that_half_of_those_who_are_right_have_is_own_to_each_group() -> None:
    _, members = at_work("abcd")
    discards(members)
    ask(members, "xxxx")
    for member in members:
        member.votes()
    discards(members)
    for number, member in enumerate(members):
        member.asks(shows="x", **({"best": str(number)} if number < 2 else {}))
    assert [m.formed.leaves.own for m in members if m.formed] == [["best"]] * 4


def test_one_group_alone_says_nothing_of_what_is_common() -> None:
    _, a = Job.of("a", 1, least=1)
    a.asks(shows="x", mean="1")
    assert a.formed is not None and (a.formed.leaves.common, a.formed.leaves.own) == ([], [])


def test_a_group_that_loads_again_on_the_same_connection_is_compared_again_and_has_no_voice_meanwhile() -> None:
    job, (a, b) = at_work("ab")
    b.replica.load_torn()
    job.lets_in(b, others=[a])
    they_vote(a, b)
    assert a.replica.shows is Shows.SAMPLES
    ask([a, b], "xy")
    assert told_to_load([a, b]) == {"b": {"a"}}


def test_who_trained_before_the_lighthouse_was_started_again_is_right_whoever_comes_in_then() -> None:
    job, (a,) = at_work("a")
    job.restart()
    a.connects()
    b, c = job.join("b"), job.join("c")
    job.lets_in(b, c, others=[a])
    they_vote(a, b, c)
    ask([a, b, c], "xyy")
    assert told_to_load([a, b, c]) == {"b": {"a"}, "c": {"a"}}


@pytest.mark.parametrize("what", ["its connection breaks", "the lighthouse is started again"])
def test_who_was_given_the_state_and_has_made_no_step_has_no_voice_whatever_connection_it_asks_on(what: str) -> None:
    job, (a,) = at_work("a")
    b, c = job.join("b"), job.join("c")
    for member in (b, c):
        member.asks()
        member.ends()
        member.asks(at_end=True)
    a.asks(shows="x", can_serve=True)
    for member in (b, c):
        member.comes_in()
    if what == "its connection breaks":
        b.is_cut_off()
        b.connects()
        ask([b, c], "xx")
    else:
        job.restart()
        they_connect(a, b, c)
        ask([a, b, c], "xxx")
    they_vote(a, b, c)
    assert a.replica.shows is not Shows.NOTHING
    ask([a, b, c], "xyy")
    assert told_to_load([a, b, c]) == {"b": {"a"}, "c": {"a"}}


@pytest.mark.parametrize("is_restarted", [False, True], ids=["as it was", "the lighthouse is started again"])
def test_who_has_caught_up_between_two_rounds_has_no_voice_before_it_was_equal_after_a_step(is_restarted: bool) -> None:
    job, (a,) = at_work("a")
    others = b, c = job.join("b"), job.join("c")
    for member in others:
        member.says(member.replica.locate())
        member.replica.caught_up(a.replica.version)
    if is_restarted:
        job.restart()
        they_connect(a, b, c)
    they_ask(*others, a, shows="x", can_serve=True)
    assert a.formed is not None and (a.formed.replica_world_size, a.formed.num_proved) == (3, 1)
    assert [m.replica.is_on_trial for m in (a, b, c)] == [False, True, True]
    they_vote(a, b, c)
    ask([a, b, c], "xyy")
    assert told_to_load([a, b, c]) == {"b": {"a"}, "c": {"a"}}


@pytest.mark.parametrize("starts_again", [False, True], ids=["", "the lighthouse is started again after it"])
def test_two_that_come_in_before_the_first_step_and_make_it_do_not_outvote_the_one_that_began(
    starts_again: bool,
) -> None:
    job = Job(least=1)
    a = job.join("a")
    a.asks()
    a.votes(error="a batch was of no use")
    b, c = job.join("b"), job.join("c")
    job.lets_in(b, c, others=[a])
    members = [a, b, c]
    assert [member.last_request.given_at for member in members if member.last_request] == [0, 1, 1]
    for member in members:
        member.votes()
    if starts_again:
        starts_anew(job, members)
    ask(members, "xyy")
    assert told_to_load(members) == {"b": {"a"}, "c": {"a"}}


def test_who_has_computed_alone_before_the_lighthouse_was_started_again_has_no_voice_before_it_was_equal_after_a_step() -> (
    None
):
    job, members = at_work()
    a, b, c = members
    ask(members, "xxx")
    for member in members:
        member.is_stopped = True
        member.votes()
    for member in (b, c):  # their loops have given the step up, and nobody takes what has counted
        member.is_stopped = False
        member.asks()
        assert member.replica.warms_up
        member.ends()
    job.restart()
    a.is_stopped = False
    for member in members:
        member.connects()
        member.asks(shows="x", can_serve=True)
    job.passes(job.settings.join_timeout_s)
    for member in (b, c):
        member.goes_on()
    job.operator_allows_loss()
    ask(members, "xxx")
    assert roles(members) == [Role.HEALTHY] * 3 and {member.step for member in members} == {2}
    discards_open(members)
    ask(members, "xxx")
    for member in members:
        member.votes()
    ask(members, "xyy")
    assert told_to_load(members) == {"b": {"a"}, "c": {"a"}}


def test_who_began_the_job_and_has_caught_up_since_counts_as_one_that_came_in() -> None:
    job, a, c = Job.of("ac", least=1)
    they_ask(a, c)
    c.replica.load_torn()
    c.says(c.replica.locate())
    a.votes()
    job.step(a)
    b = job.join("b")
    for member in (b, c):
        member.says(member.replica.locate())
        member.replica.caught_up(a.replica.version)
    they_ask(b, c, a, can_serve=True)
    assert a.formed is not None and a.formed.replica_world_size == 3
    they_vote(a, b, c)
    a.dies()
    ask([b, c], "yz")
    print("\n".join(job.log[-12:]), b.hears(), c.hears(), b.formed)
    assert told_to_load([b, c]) == {"c": {"b"}}


def test_who_was_given_the_state_for_an_attempt_that_the_others_made_without_it_begins_no_other_with_that() -> None:
    _, (a, b, c) = at_work()
    discards([a, b, c])
    ask([a, b, c], "xxy")
    assert told_to_load([a, b, c]) == {"c": {"a", "b"}}
    c.is_cut_off()
    assert a.formed is not None and a.formed.num_contributors == 2, "they wait for it no longer"
    they_vote(a, b, error="a loss that is not a number")
    c.follows()
    c.connects()
    c.asks(shows="x")
    assert c.replica.warms_up, "what the others have moved since is part of the state"


def test_who_was_given_the_state_of_an_attempt_that_its_source_has_left_comes_in_as_all_do() -> None:
    _, (a, b, c) = at_work()
    discards([a, b, c])
    ask([a, b, c], "xxy")
    assert told_to_load([a, b, c]) == {"c": {"a", "b"}}
    a.asks(shows="x")  # a quorum took too long, or its loss was not a number: it has gone on to its next batch
    load(c, "x")
    assert c.replica.warms_up, "a has moved what no step changes, its place in the data say"
    assert roles([a, b]) == [Role.HEALTHY] * 2
