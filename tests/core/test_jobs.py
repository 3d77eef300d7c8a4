"""Many jobs at one lighthouse: none hears of another, one that is over says so, and there is an end to how many there may be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchft_ckpt.core.coordination import jobs as jobs_module
from torchft_ckpt.core.coordination.jobs import FinishedJob, Jobs
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    Instruction,
    LighthouseSettings,
    Log,
    Opened,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    AllowStepLoss,
    Answer,
    CommitDecided,
    CommitVote,
    Done,
    Dropped,
    ForgetJob,
    Heartbeat,
    Hello,
    Leaf,
    Leave,
    LocateState,
    Outcome,
    QuorumFormed,
    QuorumRequest,
    Refused,
    StateGiven,
    StateLocated,
    StateShown,
    StateVersion,
    ToLighthouse,
)

ONE = LighthouseSettings(min_replicas=1)


class Lighthouse:
    """A lighthouse, and what it said on each connection."""

    def __init__(self, lighthouse_settings: LighthouseSettings = ONE) -> None:
        self.jobs = Jobs(lighthouse_settings, epoch="now")
        self.now = 0.0
        self.said: dict[str, list[object]] = {}
        self.closed: set[str] = set()
        self.log: list[str] = []

    def open(self, connection: str, job: str | None = None) -> None:
        self.take(self.jobs.handle(Opened(connection, job), self.now))

    def hear(self, connection: str, message: ToLighthouse) -> list[object]:
        """Returns what it answers on this connection."""
        self.said[connection] = []
        self.take(self.jobs.handle(Received(connection, message), self.now))
        return self.said[connection]

    def close(self, connection: str) -> None:
        self.take(self.jobs.handle(ConnectionClosed(connection), self.now))

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.jobs.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.take(self.jobs.handle(Tick(), self.now))
        self.now = until

    def take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                self.said.setdefault(instruction.connection, []).append(instruction.message)
            elif isinstance(instruction, Close):
                self.closed.add(instruction.connection)
            elif isinstance(instruction, Log):
                self.log.append(instruction.line)


class Group:
    """A replica group of one rank at a lighthouse, on a connection of its own."""

    def __init__(self, lighthouse: Lighthouse, job: str | None, name: str = "g:1") -> None:
        self.lighthouse, self.job, self.name = lighthouse, job, name
        self.connection = f"{job}/{name}"
        self.version = StateVersion()
        self.formed: QuorumFormed | None = None
        self.number = 0
        lighthouse.open(self.connection, job)
        self.says(Hello(protocol=PROTOCOL_VERSION, replica_id=name, init_sync=False))

    def says(self, message: ToLighthouse) -> list[object]:
        return self.lighthouse.hear(self.connection, message)

    def asks(self, *, at_end: bool = False) -> None:
        self.number += 1
        self.says(QuorumRequest(request_id=self.number, version=self.version, at_end=at_end))

    def warms_up(self) -> None:
        """It asks, computes an iteration alone, and asks again at its end."""
        self.asks()
        self.asks(at_end=True)

    def hears(self, kind: type) -> list[object]:
        return [message for message in self.lighthouse.said[self.connection] if isinstance(message, kind)]

    def votes(self, *, approve: bool = True) -> None:
        (formed,) = self.hears(QuorumFormed)
        assert isinstance(formed, QuorumFormed)
        self.formed, self.version = formed, formed.version
        step = formed.version.step
        self.says(CommitVote(quorum_id=formed.quorum_id, epoch=formed.epoch, step=step, approve=approve))

    def commits(self) -> None:
        (decided,) = self.hears(CommitDecided)
        assert isinstance(decided, CommitDecided) and decided.outcome is Outcome.COMMIT
        self.version = StateVersion(step=decided.step + 1, quorum_id=decided.quorum_id, epoch=decided.epoch)

    def trains(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.asks()
            self.votes()
            self.commits()

    def finishes(self) -> bool:
        self.number += 1
        answers = self.says(LocateState(request_id=self.number, version=self.version, has_finished=True))
        (located,) = [answer for answer in answers if isinstance(answer, StateLocated)]
        return located.is_finished

    def leaves(self) -> None:
        self.says(Leave("it was shut down"))
        self.lighthouse.close(self.connection)

    def dies(self) -> None:
        self.lighthouse.close(self.connection)


def refusal(answers: list[object]) -> Refused:
    (refused,) = [answer for answer in answers if isinstance(answer, Refused)]
    return refused


# ----------------------------------------------------------------------------------------------------------------- apart


def test_a_script_that_is_started_again_under_another_name_begins_anew() -> None:
    lighthouse = Lighthouse()
    first = Group(lighthouse, "run-1")
    first.trains(3)
    first.dies()
    again = Group(lighthouse, "run-2")
    again.trains()
    assert again.version.step == 1
    assert (lighthouse.jobs.states["run-1"].newest_step, lighthouse.jobs.states["run-2"].newest_step) == (3, 1)


def test_a_job_without_a_group_is_remembered() -> None:
    lighthouse = Lighthouse()
    first = Group(lighthouse, "gpt")
    first.trains(3)
    first.dies()
    late = Group(lighthouse, "gpt", "g:2")
    late.asks()
    lighthouse.pass_time(3.0)
    assert not late.hears(Answer)
    assert "set another TORCHFT_CKPT_JOB" in lighthouse.jobs.states["gpt"].reason


@pytest.mark.parametrize("finished_at", [0, 100])
def test_a_job_whose_groups_are_all_lost_while_its_first_state_is_given_is_remembered(finished_at: int) -> None:
    lighthouse = Lighthouse()
    if finished_at:
        lighthouse.jobs.finished["gpt"] = FinishedJob(finished_at, 0.0)
    a, b = Group(lighthouse, "gpt", "a:1"), Group(lighthouse, "gpt", "b:1")
    a.says(QuorumRequest(request_id=1, version=StateVersion(step=120), restored=True))
    b.says(QuorumRequest(request_id=1, version=StateVersion(), waits_for_quorum=True))
    (formed,) = b.hears(StateGiven)
    assert isinstance(formed, StateGiven) and formed.held and formed.version.step == 120
    a.dies()
    b.dies()
    late = Group(lighthouse, "gpt", "c:1")
    late.asks()
    assert not late.hears(Answer), "it would begin again at step 0"
    assert f"step {finished_at or 120} was committed" in lighthouse.jobs.states["gpt"].reason


def test_a_job_that_was_never_more_than_a_hello_leaves_nothing() -> None:
    lighthouse = Lighthouse(LighthouseSettings(min_replicas=2))
    group = Group(lighthouse, "gpt")
    group.asks()
    group.leaves()
    lighthouse.open("c", "other")
    assert refusal(lighthouse.hear("c", Hello(protocol=99, replica_id="g:1"))).code == "version"
    lighthouse.close("c")
    assert not lighthouse.jobs.states
    assert lighthouse.jobs.next_deadline() is None


def test_claims_of_earlier_lives_fill_no_names_once_the_claimers_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_JOBS", 4)
    lighthouse = Lighthouse()
    for number in range(9):
        lighthouse.open("c", f"claimed-{number}")
        claim = StateVersion(step=7, quorum_id=3, epoch="old")
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            replica_id="g:1",
            version=claim,
            newest_step=9,
            last_quorum_id=3,
            last_quorum_size=2,
            last_epoch="old",
        )
        lighthouse.hear("c", hello)
        lighthouse.close("c")
    assert not lighthouse.jobs.states
    Group(lighthouse, "honest").trains()


def test_who_gives_the_most_addresses_is_dropped_where_all_together_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs_module, "MAX_ADDRESS_BYTES", 4300)
    lighthouse = Lighthouse()
    honest = Group(lighthouse, "gpt")
    honest.says(QuorumRequest(request_id=1, version=honest.version, checkpoint_addresses=["http://10.0.0.1:29600"]))
    for number in range(5):
        lighthouse.open(f"c{number}", f"job-{number}")
        addresses = ["aa"] * (15 + number)
        lighthouse.hear(
            f"c{number}", Hello(protocol=PROTOCOL_VERSION, replica_id="g:1", checkpoint_addresses=addresses)
        )
    assert lighthouse.closed == {"c4"}
    (said,) = [message for message in lighthouse.said["c4"] if isinstance(message, Dropped)]
    assert "more than those of any other group" in said.reason
    lighthouse.close("c3")
    lighthouse.open("c5", "job-5")
    lighthouse.hear("c5", Hello(protocol=PROTOCOL_VERSION, replica_id="g:1", checkpoint_addresses=["aa"] * 20))
    assert lighthouse.closed == {"c4"}


def test_who_shows_the_most_leaves_is_dropped_where_all_together_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves were counted, however long their names: 8,000,000 of them could be 6 GiB."""
    of_leaf = sum(text.__sizeof__() + 20 for text in ("00", "b"))
    monkeypatch.setattr(jobs_module, "MAX_SAID_BYTES", 100 * of_leaf)
    monkeypatch.setattr(jobs_module, "LEAST_COUNTED_BYTES", 0)
    lighthouse = Lighthouse()

    def shows(connection: str, num_ranks: int, num_leaves: int, name: str = "00") -> None:
        of_rank = StateShown(owned="a", open=[Leaf(name=name, digest="b")] * num_leaves)
        lighthouse.hear(connection, QuorumRequest(request_id=1, version=StateVersion(), shown=[of_rank] * num_ranks))

    for number in range(6):
        lighthouse.open(f"c{number}", f"job-{number}")
        lighthouse.hear(f"c{number}", Hello(protocol=PROTOCOL_VERSION, replica_id="g:1"))
    for number in range(4):
        shows(f"c{number}", 2, 9 + number % 2)
    assert not lighthouse.closed
    shows("c0", 1, 1)  # what went before does not count
    shows("c4", 1, 10)
    assert not lighthouse.closed
    shows("c5", 1, 9, "\N{PILE OF POO}" * 120)
    assert lighthouse.closed == {"c5"}
    (said,) = [message for message in lighthouse.said["c5"] if isinstance(message, Dropped)]
    assert "bytes of their states, more than those of any other group" in said.reason
    lighthouse.close("c1")
    vote = CommitVote(quorum_id=1, epoch="now", step=0, approve=True, state_digests=["b"] * 60)
    lighthouse.hear("c4", vote)
    assert lighthouse.closed == {"c5"}
    lighthouse.hear("c4", vote)
    assert lighthouse.closed == {"c5", "c4"}


def test_what_is_kept_of_a_member_for_long_has_no_addresses() -> None:
    lighthouse = Lighthouse()
    lighthouse.open("c", "gpt")
    lighthouse.hear("c", Hello(protocol=PROTOCOL_VERSION, replica_id="g:1", checkpoint_addresses=["http://a:1"]))
    (member,) = lighthouse.jobs.states["gpt"].members.values()
    assert (member.hello.checkpoint_addresses, member.checkpoint_addresses) == ([], ["http://a:1"])


def test_a_job_whose_groups_come_and_go_fills_no_log_and_hides_no_line_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs_module, "LINES_AT_ONCE", 10.0)
    lighthouse = Lighthouse()
    honest = Group(lighthouse, "gpt")
    honest.trains()
    for number in range(100):
        Group(lighthouse, "noisy", f"x{number}:1").dies()
    honest.trains()
    Group(lighthouse, "new")
    assert lighthouse.log[-1].startswith("job new: "), "one that ends before its first quorum takes no line of another"
    honest.dies()
    noisy = [line for line in lighthouse.log if line.startswith("job noisy: ")]
    assert len(noisy) == 10
    assert "g:1 is gone" in lighthouse.log[-1]
    lighthouse.pass_time(1.0)
    Group(lighthouse, "noisy", "y:1")
    assert lighthouse.log[-1].endswith("(190 lines of job noisy were left out before)")


def test_any_number_of_names_fills_no_log_and_hides_no_line_of_a_job_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs_module, "LINES_AT_ONCE", 10.0)
    monkeypatch.setattr(jobs_module, "MAX_JOBS", 8)
    lighthouse = Lighthouse()
    honest, early = Group(lighthouse, "gpt"), Group(lighthouse, "early")
    honest.trains()
    for number in range(1000):
        Group(lighthouse, f"noisy{number}", "x:1").dies()
    assert sum(line.startswith("job noisy") for line in lighthouse.log) <= 8 * 2 + 10
    for member in (honest, early):
        member.dies()
        assert "g:1 is gone" in lighthouse.log[-1]
    lighthouse.pass_time(1.0)
    Group(lighthouse, "late")
    assert lighthouse.log[-1].endswith(" lines of new jobs were left out before)")


def test_two_lives_of_one_name_do_not_share_an_epoch() -> None:
    lighthouse = Lighthouse()
    first = Group(lighthouse, "gpt")
    first.trains()
    first.dies()
    lighthouse.open("operator", "gpt")
    lighthouse.hear("operator", ForgetJob())
    second = Group(lighthouse, "gpt", "g:2")
    second.trains()
    assert second.version.step == first.version.step
    assert second.version.epoch != first.version.epoch


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "ä", "a/b", "a\n"])
def test_what_is_no_name_is_refused(name: str) -> None:
    lighthouse = Lighthouse()
    lighthouse.open("c", name)
    (refused,) = lighthouse.said["c"]
    assert isinstance(refused, Refused) and "not a valid job name" in refused.reason
    assert lighthouse.closed == {"c"}
    assert lighthouse.hear("c", Hello(protocol=PROTOCOL_VERSION, replica_id="g:1")) == []


def test_no_more_jobs_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_JOBS", 2)
    lighthouse = Lighthouse()
    groups = [Group(lighthouse, f"job-{number}") for number in range(2)]
    for group in groups:
        group.trains()
    groups[0].dies()
    lighthouse.open("c", "one-more")
    reason = refusal(lighthouse.hear("c", Hello(protocol=PROTOCOL_VERSION, replica_id="g:1"))).reason
    assert "remembers 2 jobs" in reason and "job-0" in reason and "forget-job" in reason
    groups[1].trains()
    lighthouse.open("operator", "job-0")
    lighthouse.hear("operator", ForgetJob())
    Group(lighthouse, "one-more").trains()


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, str, float]]:
    """What happens: to which job, what, and after how long."""
    deeds = ("connect", "ask", "vote", "finish", "leave", "die", "beat")
    return draw(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.sampled_from(deeds), st.sampled_from((0.0, 0.4, 2.0, 6.0))),
            max_size=60,
        )
    )


@settings(deadline=None)
@given(stories())
def test_each_job_hears_what_it_would_hear_alone(story: list[tuple[str, str, float]]) -> None:
    """The oracle: a lighthouse for each job, which no other job ever spoke to."""
    together = Jobs(ONE, epoch="now")
    alone: dict[str, Jobs] = {name: Jobs(ONE, epoch="now") for name in "abc"}
    numbers = dict.fromkeys("abc", 0)
    formed: dict[str, Answer] = {}
    version = dict.fromkeys("abc", StateVersion())
    now = 0.0

    def words(job: str, instructions: list[Instruction]) -> list[object]:
        """What was said to a job; its epoch depends on how many jobs began before it."""
        said = [i for i in instructions if not isinstance(i, Log) and i.connection.startswith(job)]
        return [repr(i).replace(epoch_of(together, job), "E").replace(epoch_of(alone[job], job), "E") for i in said]

    def epoch_of(jobs: Jobs, job: str) -> str:
        state = jobs.states.get(job)
        return f"'{state.epoch}'" if state is not None else "'no epoch'"

    for job, deed, pause_s in story:
        until = now + pause_s
        while True:
            deadlines = [jobs.next_deadline() for jobs in (together, *alone.values())]
            due = min((d for d in deadlines if d is not None), default=until)
            if due > until:
                break
            if due <= now and not any(d is not None and d <= now for d in deadlines):
                break
            now = max(now, due)
            told = together.handle(Tick(), now)
            for name, jobs in alone.items():
                apart = jobs.handle(Tick(), now) if (d := jobs.next_deadline()) is not None and d <= now else []
                assert words(name, told) == words(name, apart)
            if now >= until:
                break
        now = max(now, until)
        connection = f"{job}{numbers[job]}"
        events: list[object] = []
        if deed == "connect":
            numbers[job] += 1
            connection = f"{job}{numbers[job]}"
            hello = Hello(protocol=PROTOCOL_VERSION, replica_id=f"g:{numbers[job]}", version=version[job])
            events = [Opened(connection, job), Received(connection, hello)]
        elif deed == "ask":
            events = [Received(connection, QuorumRequest(request_id=1, version=version[job]))]
        elif deed == "finish":
            events = [Received(connection, LocateState(request_id=1, version=version[job], has_finished=True))]
        elif deed == "vote" and job in formed:
            vote = formed[job]
            events = [
                Received(
                    connection,
                    CommitVote(quorum_id=vote.quorum_id, epoch=vote.epoch, step=vote.version.step, approve=True),
                )
            ]
        elif deed == "leave":
            events = [Received(connection, Leave()), ConnectionClosed(connection)]
        elif deed == "die":
            events = [ConnectionClosed(connection)]
        elif deed == "beat":
            events = [Received(connection, Heartbeat())]
        for event in events:
            told = together.handle(event, now)  # type: ignore[arg-type]
            mine = _in_epoch(event, epoch_of(together, job).strip("'"), epoch_of(alone[job], job).strip("'"))
            apart = alone[job].handle(mine, now)  # type: ignore[arg-type]
            assert words(job, told) == words(job, apart)
            assert all(isinstance(i, Log) or i.connection.startswith(job) for i in told), "another job heard of it"
            for instruction in told:
                if isinstance(instruction, Send) and isinstance(instruction.message, Answer):
                    formed[job] = instruction.message
                    version[job] = instruction.message.version
                if isinstance(instruction, Send) and isinstance(instruction.message, CommitDecided):
                    decided = instruction.message
                    if decided.outcome is Outcome.COMMIT:
                        version[job] = StateVersion(
                            step=decided.step + 1, quorum_id=decided.quorum_id, epoch=decided.epoch
                        )


def _in_epoch(event: object, ours: str, theirs: str) -> object:
    """The same event as it is in the life of the other lighthouse."""
    import msgspec

    if not isinstance(event, Received):
        return event
    message = event.message
    if isinstance(message, CommitVote):
        message = msgspec.structs.replace(message, epoch=theirs if message.epoch == ours else message.epoch)
    version = getattr(message, "version", None)
    if version is not None and version.epoch == ours:
        message = msgspec.structs.replace(message, version=msgspec.structs.replace(version, epoch=theirs))
    return Received(event.connection, message)


# --------------------------------------------------------------------------------------------------------------- the end


def test_a_late_group_is_told_that_the_job_is_finished() -> None:
    lighthouse = Lighthouse()
    first = Group(lighthouse, "gpt")
    first.trains(3)
    assert first.finishes()
    late = Group(lighthouse, "gpt", "late:1")
    late.asks()
    lighthouse.pass_time(1.0)
    refused = refusal(lighthouse.said[late.connection])
    assert (refused.code, refused.step) == ("finished", 3)
    assert "forget-job" in refused.reason and late.connection in lighthouse.closed
    first.leaves()
    late.dies()
    assert lighthouse.jobs.finished == {"gpt": FinishedJob(3, lighthouse.now)}
    assert not lighthouse.jobs.states


def test_who_comes_when_only_the_step_is_remembered_is_told_so_too() -> None:
    lighthouse = Lighthouse()
    first = Group(lighthouse, "gpt")
    first.trains(3)
    first.finishes()
    first.leaves()
    late = Group(lighthouse, "gpt", "late:1")
    late.asks()
    lighthouse.pass_time(1.0)
    assert refusal(lighthouse.said[late.connection]).step == 3
    late.dies()
    assert lighthouse.jobs.finished["gpt"].step == 3


def test_all_that_wait_when_the_job_ends_are_told() -> None:
    lighthouse = Lighthouse(LighthouseSettings(min_replicas=1, join_timeout_s=1000.0))
    first = Group(lighthouse, "gpt")
    first.trains(3)
    late = [Group(lighthouse, "gpt", f"late-{number}:1") for number in range(3)]
    for group in late:
        group.warms_up()
    lighthouse.pass_time(2.0)
    first.finishes()
    lighthouse.pass_time(1.0)
    assert [refusal(lighthouse.said[group.connection]).step for group in late] == [3, 3, 3]


@pytest.mark.parametrize("is_over", [False, True])
def test_who_was_in_no_quorum_of_a_job_says_nothing_of_its_end(is_over: bool) -> None:
    """A job that crashed was over by a word of anybody, and its groups, with a checkpoint of an older step, were sent away."""
    lighthouse = Lighthouse()
    first = Group(lighthouse, "gpt")
    first.trains(3)
    if is_over:
        first.finishes()
        first.leaves()
    else:
        first.dies()
    lighthouse.pass_time(100.0)
    later = StateVersion(step=9 if is_over else 3, quorum_id=1, epoch="old")
    liar = Group(lighthouse, "gpt", "liar:1")
    liar.version = later
    liar.says(LocateState(request_id=1, version=later, has_finished=True))
    liar.dies()
    assert {name: job.step for name, job in lighthouse.jobs.finished.items()} == ({"gpt": 3} if is_over else {})


def test_a_restarted_lighthouse_takes_such_a_word_while_who_says_it_is_there() -> None:
    lighthouse = Lighthouse()
    liar, late = Group(lighthouse, "gpt", "liar:1"), Group(lighthouse, "gpt", "late:1")
    liar.version = StateVersion(step=9, quorum_id=1, epoch="old")
    assert liar.finishes()
    liar.dies()
    assert lighthouse.jobs.states["gpt"].finished_step is None
    late.dies()
    assert not lighthouse.jobs.finished


def two_groups() -> tuple[Lighthouse, Group, Group]:
    lighthouse = Lighthouse(LighthouseSettings(min_replicas=2, heartbeat_timeout_s=1000.0))
    a, b = Group(lighthouse, "gpt", "a:1"), Group(lighthouse, "gpt", "b:1")
    for _ in range(2):
        a.asks()
        b.asks()
        a_said = lighthouse.said[a.connection]
        b.votes()
        lighthouse.said[a.connection] = a_said
        a.votes()
        lighthouse.said[b.connection] = [m for m in lighthouse.said[b.connection] if isinstance(m, CommitDecided)]
        a.commits()
        b.commits()
    return lighthouse, a, b


def test_a_job_is_finished_when_the_holder_that_had_not_said_so_is_gone_for_good() -> None:
    lighthouse, a, b = two_groups()
    b.dies()
    a.finishes()
    assert lighthouse.jobs.states["gpt"].finished_step is None
    late = Group(lighthouse, "gpt", "late:1")
    late.warms_up()
    late.asks()
    lighthouse.pass_time(4.0)
    assert not late.hears(Refused), "it may be on its way back"
    lighthouse.pass_time(60.0)
    assert refusal(lighthouse.said[late.connection]).step == 2


def test_a_group_that_comes_back_when_only_the_step_is_remembered_does_not_train_on_alone() -> None:
    lighthouse, a, b = two_groups()
    b.dies()
    a.finishes()
    a.leaves()
    lighthouse.pass_time(100.0)
    lighthouse.open("again", "gpt")
    lighthouse.hear("again", Hello(protocol=PROTOCOL_VERSION, replica_id="b:1", version=b.version))
    assert refusal(lighthouse.hear("again", QuorumRequest(request_id=9, version=b.version))).step == 2


@pytest.mark.parametrize("step", [3, 7])
def test_a_group_that_was_restored_from_the_end_trains_on(step: int) -> None:
    lighthouse = Lighthouse()
    first = Group(lighthouse, "gpt")
    first.trains(3)
    first.finishes()
    first.leaves()
    restored = Group(lighthouse, "gpt", "restored:1")
    late = Group(lighthouse, "gpt", "late:1")
    restored.says(QuorumRequest(request_id=1, version=StateVersion(step=step), restored=True))
    late.asks()
    (formed,) = restored.hears(QuorumFormed)
    assert isinstance(formed, QuorumFormed) and formed.version.step == step
    assert not late.hears(Refused)


def test_the_end_of_a_job_that_never_made_a_step_is_none() -> None:
    lighthouse = Lighthouse()
    group = Group(lighthouse, "gpt")
    group.asks()
    assert not group.finishes()
    group.leaves()
    again = Group(lighthouse, "gpt", "g:2")
    again.trains()


def test_late_groups_do_not_change_when_the_job_ended() -> None:
    lighthouse = Lighthouse()
    first = Group(lighthouse, "gpt")
    first.trains(3)
    first.finishes()
    first.leaves()
    before = dict(lighthouse.jobs.finished)
    lighthouse.pass_time(100.0)
    late = Group(lighthouse, "gpt", "late:1")
    late.asks()
    lighthouse.pass_time(1.0)
    assert refusal(lighthouse.said[late.connection]).step == 3
    late.dies()
    assert dict(lighthouse.jobs.finished) == before
    lighthouse.open("operator", "gpt")
    assert "finished at step 3" in refusal(lighthouse.hear("operator", AllowStepLoss())).reason


def test_a_holder_that_asks_again_is_served_and_its_commit_takes_the_end_back() -> None:
    lighthouse = Lighthouse()
    group = Group(lighthouse, "gpt")
    group.trains(2)
    assert group.finishes()
    group.trains()
    assert lighthouse.jobs.states["gpt"].finished_step is None
    late = Group(lighthouse, "gpt", "late:1")
    late.asks()
    lighthouse.pass_time(1.0)
    assert not late.hears(Refused)


def test_nobody_waits_for_a_group_that_has_finished() -> None:
    lighthouse = Lighthouse()
    a = Group(lighthouse, "gpt", "a:1")
    a.trains()
    a.finishes()
    b = Group(lighthouse, "gpt", "b:1")
    b.asks()
    lighthouse.pass_time(1.0)
    assert refusal(lighthouse.said[b.connection]).step == 1


def test_where_nobody_said_so_the_late_group_learns_that_the_holders_left_on_purpose() -> None:
    lighthouse = Lighthouse(LighthouseSettings(min_replicas=2))
    lighthouse, a, b = two_groups()
    a.leaves()
    b.leaves()
    late = Group(lighthouse, "gpt", "late:1")
    late.asks()
    lighthouse.pass_time(3.0)
    reason = lighthouse.jobs.states["gpt"].reason
    assert "left on purpose" in reason and "Manager.finish()" in reason


def test_the_newest_finished_jobs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_FINISHED", 2)
    lighthouse = Lighthouse()
    for name in ("first", "second", "third"):
        group = Group(lighthouse, name)
        group.trains()
        group.finishes()
        group.leaves()
    assert list(lighthouse.jobs.finished) == ["second", "third"]


def test_the_next_one_of_several_lighthouses_knows_what_lasts_of_each_job() -> None:
    first = Lighthouse()
    over, going_on, other = Group(first, "over"), Group(first, "going-on"), Group(first, "other")
    for group in (over, going_on, other):
        group.trains()
    before = first.jobs.what_lasts(100.0)
    going_on.trains()
    assert first.jobs.what_lasts(100.0) is before  # a step that all approved costs no write
    over.finishes()
    over.leaves()
    going_on.asks()
    going_on.votes(approve=False)
    lasts = first.jobs.what_lasts(100.0)
    assert lasts != before
    second = Lighthouse()
    assert second.jobs.remember(lasts, 100.0, now=7.0)
    assert not second.jobs.remember(b"nonsense", 100.0, now=7.0)
    assert second.jobs.finished["over"].step == 1
    assert second.jobs.what_lasts(100.0) == lasts  # also of jobs that nobody has named there yet
    Group(second, "going-on")
    assert [counts for _, counts in second.jobs.states["going-on"].untold.decided] == [False]


# ------------------------------------------------------------------------------------------------------ the operator's word


def test_of_several_jobs_the_operator_names_one() -> None:
    lighthouse = Lighthouse()
    groups = [Group(lighthouse, name) for name in ("a", "b")]
    for group in groups:
        group.trains()
        group.dies()
    lighthouse.open("operator")
    assert "several: a, b" in refusal(lighthouse.hear("operator", AllowStepLoss())).reason
    lighthouse.open("again", "b")
    (done,) = lighthouse.hear("again", AllowStepLoss())
    assert isinstance(done, Done) and "job b" in done.text
    assert [lighthouse.jobs.states[name].allow_step_loss for name in "ab"] == [False, True]


def test_with_one_job_it_need_not_be_named() -> None:
    lighthouse = Lighthouse()
    group = Group(lighthouse, "gpt")
    group.trains()
    group.dies()
    lighthouse.open("operator")
    (done,) = lighthouse.hear("operator", AllowStepLoss())
    assert isinstance(done, Done) and lighthouse.jobs.states["gpt"].allow_step_loss


def test_a_job_that_has_lost_no_step_is_not_allowed_to_lose_one() -> None:
    """It would stay allowed until the next quorum, which may be weeks away."""
    lighthouse = Lighthouse()
    group = Group(lighthouse, "gpt")
    group.trains(3)
    lighthouse.open("operator")
    assert (
        "lost no step: all groups that are here hold step 3, the newest (g:1)"
        in refusal(lighthouse.hear("operator", AllowStepLoss())).reason
    )
    assert not lighthouse.jobs.states["gpt"].allow_step_loss
    group.dies()
    Group(lighthouse, "gpt", "late:1").asks()
    lighthouse.open("again")
    assert isinstance(lighthouse.hear("again", AllowStepLoss())[0], Done)


@pytest.mark.parametrize("word", [AllowStepLoss(), ForgetJob()])
@pytest.mark.parametrize("job", [None, "gpt"])
def test_a_word_about_no_job_is_refused(word: ToLighthouse, job: str | None) -> None:
    lighthouse = Lighthouse()
    lighthouse.open("operator", job)
    refusal(lighthouse.hear("operator", word))
    assert not lighthouse.jobs.states


def test_a_job_is_forgotten_only_without_a_group() -> None:
    lighthouse = Lighthouse()
    group = Group(lighthouse, "gpt")
    group.trains()
    lighthouse.open("operator", "gpt")
    assert "g:1" in refusal(lighthouse.hear("operator", ForgetJob())).reason
    group.dies()
    lighthouse.open("again", "gpt")
    (done,) = lighthouse.hear("again", ForgetJob())
    assert isinstance(done, Done)
    assert not lighthouse.jobs.states


def test_a_finished_job_may_be_forgotten_and_begin_anew() -> None:
    lighthouse = Lighthouse()
    group = Group(lighthouse, "gpt")
    group.trains(2)
    group.finishes()
    group.leaves()
    lighthouse.open("operator", "gpt")
    lighthouse.hear("operator", ForgetJob())
    again = Group(lighthouse, "gpt", "g:2")
    again.trains()
    assert again.version.step == 1


def test_each_job_is_a_lighthouse_of_its_own() -> None:
    lighthouse = Lighthouse()
    Group(lighthouse, "a").trains(2)
    assert isinstance(lighthouse.jobs.states["a"], LighthouseState)
    assert all(line.startswith("job a: ") for line in lighthouse.log)
