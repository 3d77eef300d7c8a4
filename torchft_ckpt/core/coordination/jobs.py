"""The jobs at one lighthouse: each has its own state, and no word of one reaches another. It knows no sockets and no clock.

    jobs = Jobs(settings, epoch="5f0c")
    jobs.handle(Opened("conn-1", "gpt"), now=12.0)
    for instruction in jobs.handle(Received("conn-1", Hello(...)), now=12.0): ...
    jobs.next_deadline()  # call handle(Tick(), now) then

A job begins with the first group that is welcomed under its name, and is remembered when its groups are gone: they may come
back. Of a finished one only its step stays. A job that has not begun in this life of the lighthouse is forgotten with its last
group, whatever its groups said of earlier ones: they say it again.

All jobs share bounds on the addresses that groups give, and on what is kept of their last requests and votes. Above one of them
the group that gives most is dropped. Each job has a rate of lines in the log.

Names are no secrets, and no boundary between users: who has the lighthouse's token may name any job.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    Event,
    Instruction,
    LighthouseSettings,
    Log,
    Opened,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.messages import (
    AllowStepLoss,
    Done,
    Drain,
    Dropped,
    ForgetJob,
    Number,
    QuorumRequest,
    Refused,
    StateShown,
    ToLighthouse,
    clip,
    name_some,
)
from torchft_ckpt.core.coordination.restart import NOTHING_UNTOLD, Untold
from torchft_ckpt.core.services.rate import RateLimiter
from torchft_ckpt.core.text import printable

DEFAULT_JOB = "default"
JOB_NAME_RULE = "1 to 64 characters of A-Z, a-z, 0-9, '.', '_' and '-'"
MAX_JOBS = 256
"""Jobs that are not over."""
MAX_FINISHED = 4096
"""Jobs that are over."""
MAX_LASTING = 1024
"""Of those, the latest, which other lighthouses know of, too: with what lasts of others some 300 KiB in the store."""
MAX_ADDRESS_BYTES = 16 << 20
"""Of memory, for the addresses of all groups together: a thousand groups of 64 ranks take some 7 MiB."""
MAX_SAID_BYTES, LEAST_COUNTED_BYTES = 2 << 30, 16 << 10
"""Of memory, for what all groups show of their states: a thousand groups show 4,096 leaves each, of some 200 bytes. And for what
they say of each rank when they ask and vote, if it is not less."""
LINES_PER_S, LINES_AT_ONCE = 20.0, 5000.0
"""Of a job in the log, and as many warnings. Names cost nothing: while `MAX_JOBS` such rates are in use, all jobs of new names
have one together until they have begun."""


def _kept_bytes(message: ToLighthouse) -> int:
    """Return how much memory what a message says of each rank takes, some 40 bytes for each thing besides its texts."""
    shown: list[StateShown] = getattr(message, "shown", [])
    texts = [text for of_rank in shown for leaf in (*of_rank.open, *of_rank.own) for text in (leaf.name, leaf.digest)]
    texts += getattr(message, "state_digests", ())
    numbers = 6 * len(shown) + len(getattr(message, "issued", ()))
    numbers += 4 * len(getattr(message, "nodes", ()))
    return sum(map(str.__sizeof__, texts)) + 20 * len(texts) + 40 * numbers


def is_job_name(name: str) -> bool:
    """Whether a job may have this name: see `JOB_NAME_RULE`."""
    return re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) is not None


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """The rest of a job that is over, when its groups are gone."""

    step: int
    finished_at: float
    """On the clock of `now`."""


class _Lasting(msgspec.Struct):
    """What is in the store of several lighthouses."""

    finished: dict[str, tuple[Number, float]] = {}
    """By job: its last step, and when it was over, in Unix time."""
    untold: dict[str, Untold] = {}


_lasting_decoder = msgspec.json.Decoder(_Lasting)


class Jobs:
    """All that the lighthouse knows, with the arguments of `LighthouseState`. Not thread-safe: one caller at a time."""

    def __init__(self, settings: LighthouseSettings, epoch: str) -> None:
        self.settings = settings
        self.states: dict[str, LighthouseState] = {}
        """By name, those that have begun and are not over."""
        self.finished: OrderedDict[str, FinishedJob] = OrderedDict()
        """By name, those that are over and whose groups are gone, the latest last."""
        self._untold: OrderedDict[str, Untold] = OrderedDict()
        """By name, `LighthouseState.untold` of jobs that are not over, also of those that no group has named in this life."""
        self._lasting: bytes | None = None
        """`what_lasts`; None: it is something else by now."""
        self._epoch = epoch
        self._num_begun = 0
        self._job_of: dict[str, str | None] = {}
        """By connection; None: it named none."""
        self._deadlines: dict[str, float] = {}
        self._address_bytes: dict[str, int] = {}
        """By connection, of those that have given addresses."""
        self._said_bytes: dict[str, int] = {}
        """By connection, of those whose last request, and votes since, say something of each rank."""
        self._lines = RateLimiter(LINES_PER_S, LINES_AT_ONCE)
        self._num_left_out: dict[str, int] = {}

    def handle(self, event: Opened | Event, now: float) -> list[Instruction]:
        """Take an event, return what to do, in order. `now` in seconds, never falling."""
        if isinstance(event, Opened):
            return list(self._open(event))
        if isinstance(event, Tick):
            due = [name for name, deadline in self._deadlines.items() if deadline <= now]
            return [instruction for name in due for instruction in self._tell(name, event, now)]
        job = self._job_of.get(event.connection)
        if isinstance(event, ConnectionClosed):
            self._job_of.pop(event.connection, None)
            self._address_bytes.pop(event.connection, None)
            self._said_bytes.pop(event.connection, None)
            name = job or DEFAULT_JOB
            return self._tell(name, event, now) if name in self.states else []
        if event.connection not in self._job_of:
            return []  # it was closed
        if isinstance(event.message, AllowStepLoss | ForgetJob | Drain):
            return list(self._obey(event.connection, event.message, job, now))
        name = job or DEFAULT_JOB
        if name not in self.states:
            if len(self.states) >= MAX_JOBS and name not in self.finished:
                return list(self._refuse(event.connection, self._why_full(name)))
            self._begin(name)
        return [*self._tell(name, event, now), *self._bound_memory(event.connection, event.message)]

    def next_deadline(self) -> float | None:
        """Return when `Tick` is due, if nothing else happens before."""
        return min(self._deadlines.values(), default=None)

    def what_lasts(self, zero: float) -> bytes:
        """Return what members may not be there to tell the next lighthouse. `zero`: of the clock, in Unix time, always the same.

        One of several lighthouses says nothing before this is in their store.
        """
        if self._lasting is None:
            latest = list(self.finished.items())[-MAX_LASTING:]
            finished = {job: (over.step, round(over.finished_at + zero, 3)) for job, over in latest}
            self._lasting = msgspec.json.encode(_Lasting(finished=finished, untold=self._untold))
        return self._lasting

    def remember(self, data: bytes, zero: float, now: float) -> bool:
        """Take what another lighthouse has written so; False: it is something else, and nothing was taken."""
        try:
            found = _lasting_decoder.decode(data or b"{}")
        except (msgspec.MsgspecError, UnicodeError):
            return False
        jobs = ((job, FinishedJob(step, min(at - zero, now))) for job, (step, at) in found.finished.items())
        self.finished.update((job, over) for job, over in jobs if is_job_name(job))
        self._untold.update((job, untold) for job, untold in found.untold.items() if is_job_name(job))
        self._lasting = None
        return True

    def _tell(self, name: str, event: Event, now: float) -> list[Instruction]:
        """Hand an event to a job, and put the job away where that was the last of it."""
        state = self.states[name]
        instructions: list[Instruction] = []
        for done in state.handle(event, now):
            if not isinstance(done, Log):
                instructions.append(done)
            elif self._lines.take((of := self._pays_for_lines(name, now), done.is_warning), now) > 0:
                self._num_left_out[of] = self._num_left_out.get(of, 0) + 1
            else:
                num = self._num_left_out.pop(of, 0)
                more = f" ({num} lines of {of} were left out before)" if num else ""
                instructions.append(Log(printable(f"job {name}: {done.line}{more}"), done.is_warning))
        if name in self.finished and self.finished[name].step != state.newest_step:
            del self.finished[name]  # it went on
            self._lasting = None
        if state.untold is not self._untold.get(name, NOTHING_UNTOLD):
            self._untold.pop(name, None)
            self._untold[name] = state.untold
            while len(self._untold) > MAX_JOBS:
                self._untold.popitem(last=False)
            self._lasting = None
        deadline = state.next_deadline()
        if deadline is None:
            self._deadlines.pop(name, None)
        else:
            self._deadlines[name] = deadline
        if state.is_deserted and name not in (job or DEFAULT_JOB for job in self._job_of.values()):
            step = state.finished_step
            if step is not None or not state.has_begun:
                self._drop(name)
            if step is not None:
                self.finished.setdefault(name, FinishedJob(step, now))
                self._untold.pop(name, None)
                self._lasting = None
                while len(self.finished) > MAX_FINISHED:
                    self.finished.popitem(last=False)
        return instructions

    def _pays_for_lines(self, name: str, now: float) -> str:
        of = f"job {name}"
        is_known = self.states[name].has_begun or any(self._lines.knows((of, warns), now) for warns in (False, True))
        return of if is_known or len(self._lines) < MAX_JOBS else "new jobs"

    def _begin(self, name: str) -> None:
        self._num_begun += 1
        over = self.finished.get(name)
        self.states[name] = LighthouseState(
            self.settings,
            epoch=f"{self._epoch}.{self._num_begun}",
            finished_step=over.step if over is not None else None,
            untold=self._untold.get(name, NOTHING_UNTOLD),
        )

    def _drop(self, name: str) -> None:
        del self.states[name]
        self._deadlines.pop(name, None)

    def _open(self, opened: Opened) -> Iterator[Instruction]:
        if opened.job is not None and not is_job_name(opened.job):
            yield from self._refuse(
                opened.connection, f"{clip(opened.job, 80)!r} is not a valid job name: {JOB_NAME_RULE}"
            )
        else:
            self._job_of[opened.connection] = opened.job

    def _refuse(self, connection: str, reason: str) -> Iterator[Instruction]:
        self._job_of.pop(connection, None)
        yield Send(connection, Refused(code="job", reason=reason))
        yield Close(connection)

    def _bound_memory(self, connection: str, message: ToLighthouse) -> Iterator[Instruction]:
        addresses = getattr(message, "checkpoint_addresses", None)
        if addresses:
            self._address_bytes[connection] = sum(map(str.__sizeof__, addresses))
            yield from self._bound(self._address_bytes, MAX_ADDRESS_BYTES, "addresses take {} bytes")
        if isinstance(message, QuorumRequest):
            self._said_bytes.pop(connection, None)
        if (num_bytes := _kept_bytes(message)) > LEAST_COUNTED_BYTES:
            self._said_bytes[connection] = self._said_bytes.get(connection, 0) + num_bytes
            yield from self._bound(self._said_bytes, MAX_SAID_BYTES, "ranks show {} bytes of their states")

    def _bound(self, given: dict[str, int], most: int, what: str) -> Iterator[Instruction]:
        """Drop those that give the most, until what is left has room."""
        while sum(given.values()) > most:
            greatest = max(given, key=given.__getitem__)
            its = what.format(given.pop(greatest))
            reason = f"its {its}, more than those of any other group, and all have {most}"
            yield Send(greatest, Dropped(reason=reason))
            yield Close(greatest)

    def _why_full(self, name: str) -> str:
        deserted = [other for other, state in self.states.items() if state.is_deserted]
        return (
            f"this lighthouse remembers {MAX_JOBS} jobs at most, and {name} would be one more. Jobs without a group now:"
            f" {name_some(deserted) or 'none'}. `python -m torchft_ckpt forget-job --job NAME` makes room"
        )

    # --------------------------------------------------------------------------------------------- the operator's word

    def _obey(
        self, connection: str, message: AllowStepLoss | ForgetJob | Drain, job: str | None, now: float
    ) -> Iterator[Instruction]:
        here = sorted(self.states)
        if job is None and len(here) != 1:
            known = f"there are several: {name_some(here)}" if here else "no job is known here"
            yield from self._refuse(connection, f"which job? {known}; name one by --job")
            return
        name = job or here[0]
        state = self.states.get(name)
        if state is None and name in self.finished and isinstance(message, AllowStepLoss):
            over = f"job {name} is finished at step {self.finished[name].step}; to start it over, run forget-job first"
            yield from self._refuse(connection, over)
        elif state is None and name not in self.finished:
            known = f"known jobs: {name_some(here)}" if here else "no job is known"
            yield from self._refuse(connection, f"no job {name} is here; {known}")
        elif state is not None and isinstance(message, AllowStepLoss) and state.has_lost_nothing:
            reason = (
                f"job {name} has lost no step: all groups that are here hold step {state.newest_step}, the newest"
                f" ({name_some(sorted(state.members))}). Nothing was allowed"
            )
            yield from self._refuse(connection, reason)
        elif isinstance(message, AllowStepLoss):
            told = self._tell(name, Received(connection, message), now)
            yield Send(
                connection, Done(text=f"job {name}: the next quorum may go on from an older step than the newest")
            )
            yield from told
        elif isinstance(message, Drain):
            yield from self._drain(connection, message, name, now)
        elif state is not None and not state.is_deserted:
            groups = name_some(sorted(state.members))
            yield from self._refuse(
                connection, f"job {name} is not forgotten: groups of it are connected ({groups}); end them first"
            )
        else:
            if state is not None:
                self._drop(name)
            self.finished.pop(name, None)
            self._untold.pop(name, None)
            self._lasting = None
            yield Log(f"job {name}: forgotten, because the operator asked for it", is_warning=True)
            yield Send(connection, Done(text=f"job {name} is forgotten: its next group starts it over"))

    def _drain(self, connection: str, drain: Drain, name: str, now: float) -> Iterator[Instruction]:
        state = self.states.get(name)
        here = [] if state is None else [member.replica_id for member in state.named(drain.replica_id)]
        if not here:
            groups = name_some(sorted(state.members)) if state is not None else ""
            reason = (
                f"job {name} has no replica group {clip(drain.replica_id, 200)} here now; groups: {groups or 'none'}"
            )
            yield from self._refuse(connection, reason)
            return
        told = self._tell(name, Received(connection, drain), now)
        yield Send(connection, Done(text=f"job {name}: {name_some(here)} is to leave at the end of its step"))
        yield from told
