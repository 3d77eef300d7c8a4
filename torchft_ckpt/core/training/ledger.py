"""Where the training thread of a rank spends its time: at each moment in one account. It does not know threads or the clock.

| account         | the training thread is                                                                        |
|-----------------|-----------------------------------------------------------------------------------------------|
| productive      | in a step that counts, with its waits for others' gradients and votes, or takes it            |
| lost            | in a step that counted, and from whose state the job went back later                          |
| discarded       | in a step that does not count; what a `StepLoader` keeps of it is productive later            |
| between         | between two steps: data, logs, evaluation, the script's own work                              |
| quorum          | waiting for the quorum, and nothing below is said to be why: that takes up to a second        |
| below minimum   | waiting for more groups, as fewer are there than have to train; or in a step discarded for it |
| lighthouse away | waiting for a quorum without a connection to the lighthouse                                   |
| held            | standing still for a group that comes in, or takes the state over                             |
| connecting      | waiting until the groups' process group is connected                                          |
| loading         | loading a state: that of others who wait for it, or a checkpoint                              |
| comparing       | reading the state to compare it with the others', or loading what differs                     |
| saving          | held up by a save: the state is captured, or copied aside                                     |
| outside         | beside the quorum: in an iteration for itself alone, or receiving while the others train      |
| spare           | a spare's, which stands by, or trains along and adds nothing                                  |
| starting        | between `Manager(...)` and the first step                                                     |
| down            | not there: from a group's loss until its next life speaks; who left or finished has none      |
| unaccounted     | at something that was not told                                                                |

A moment is a pair: the `State` that the rank is in, and what the thread `Waits` for. `ACCOUNTS` has the account of each pair. The
time of a step stands open until that is decided, and then goes where `decide_fate` says. No account is what the others leave.

What a thread beside it does for a step (it asks for the quorum, it connects) is counted apart. `LOST` and `DOWN` are seen only by
who knows what came later, and the other groups: `core.training.goodput`.

By phase it is counted, besides, how long the thread computed while no collective was open, and how long one was, or it waited:
the first is a rank's own, and in the others it may have waited for other groups (`core.coordination.waiting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from torchft_ckpt.core.coordination.messages import Outcome
from torchft_ckpt.core.coordination.waiting import Phase


class Account(Enum):
    """What a second was spent on, as the table above says. The value is its name in events and files."""

    PRODUCTIVE = "productive"
    LOST = "lost"
    DISCARDED = "discarded"
    BETWEEN = "between"
    QUORUM = "quorum"
    BELOW_MINIMUM = "below minimum"
    LIGHTHOUSE_AWAY = "lighthouse away"
    HELD = "held"
    CONNECTING = "connecting"
    LOADING = "loading"
    COMPARING = "comparing"
    SAVING = "saving"
    OUTSIDE = "outside"
    SPARE = "spare"
    STARTING = "starting"
    DOWN = "down"
    UNACCOUNTED = "unaccounted"


class State(Enum):
    """What a rank is in."""

    STARTING = "starting"
    BETWEEN = "between"
    STEP = "step"
    """A step is open, and it is not known whether it counts."""
    TAKING = "taking"
    """The step counts, and the optimizers take it."""
    OUTSIDE = "outside"
    """It has no part in the step of the others, and asks for their state."""
    SPARE = "spare"
    """As that, of a spare."""


class Waits(Enum):
    """What the training thread waits for."""

    NOTHING = "nothing"
    """It computes, or the script does."""
    MICROBATCH = "microbatch"
    """It computes what is kept if the step does not count."""
    COLLECTIVE = "collective"
    VOTE = "vote"
    QUORUM = "quorum"
    MINIMUM = "minimum"
    LIGHTHOUSE = "lighthouse"
    NEWCOMER = "newcomer"
    CONNECTION = "connection"
    STATE = "state"
    STATE_BESIDE = "state beside"
    """One that is received while the others train."""
    COMPARISON = "comparison"
    SAVE = "save"
    CALL = "call"
    """As a spare, to be called."""


_OF_STEP = {Waits.NOTHING, Waits.MICROBATCH, Waits.COLLECTIVE, Waits.VOTE}
_FOR = {
    Waits.QUORUM: Account.QUORUM,
    Waits.MINIMUM: Account.BELOW_MINIMUM,
    Waits.LIGHTHOUSE: Account.LIGHTHOUSE_AWAY,
    Waits.NEWCOMER: Account.HELD,
    Waits.CONNECTION: Account.CONNECTING,
    Waits.STATE: Account.LOADING,
    Waits.STATE_BESIDE: Account.OUTSIDE,
    Waits.COMPARISON: Account.COMPARING,
    Waits.SAVE: Account.SAVING,
    Waits.CALL: Account.SPARE,
}
"""Of one that has a part in the steps."""
_BESIDE = {Waits.QUORUM, Waits.MINIMUM, Waits.NEWCOMER, Waits.CONNECTION, Waits.STATE_BESIDE}
"""What one who has no part in the steps waits for, and is beside them meanwhile."""

_ALONE = {
    State.STARTING: Account.STARTING,
    State.BETWEEN: Account.BETWEEN,
    State.TAKING: Account.PRODUCTIVE,
    State.OUTSIDE: Account.OUTSIDE,
    State.SPARE: Account.SPARE,
}
"""The account of a state in which nothing is waited for."""

ACCOUNTS: Mapping[tuple[State, Waits], Account | None] = {
    **{(state, waits): _FOR.get(waits, Account.UNACCOUNTED) for state in State for waits in Waits},
    **{(state, Waits.NOTHING): account for state, account in _ALONE.items()},
    # A metric may be averaged after the decision, and between two steps.
    **{(state, Waits.COLLECTIVE): _ALONE[state] for state in (State.BETWEEN, State.TAKING)},
    **{(state, waits): _ALONE[state] for state in (State.OUTSIDE, State.SPARE) for waits in _BESIDE},
    **{(State.STEP, waits): None for waits in _OF_STEP},
}
"""The account of each pair; None: that of the open step, which is not known yet."""


def decide_fate(
    outcome: Outcome, *, is_learner: bool, contributes: bool, has_enough: bool, is_spare: bool = False
) -> Account:
    """Return the account of a step that has ended.

    Args:
        outcome: how it ended here.
        is_learner: this group was beside the quorum.
        contributes: what it computed went into the step, if that counts.
        has_enough: so many groups contributed as have to.
        is_spare: whoever contributes nothing does so as a spare.
    """
    beside = Account.SPARE if is_spare else Account.OUTSIDE
    if is_learner:
        return beside
    if outcome is Outcome.COMMIT:
        return Account.PRODUCTIVE if contributes else beside
    return Account.DISCARDED if has_enough else Account.BELOW_MINIMUM


class Ledger:
    """The accounts of one training thread. Not thread-safe: the caller serialises. `now`: seconds on one monotonic clock."""

    def __init__(self, now: float) -> None:
        self.state = State.STARTING
        self.seconds = dict.fromkeys(Account, 0.0)
        """What is settled. None of it falls."""
        self.beside = dict.fromkeys(Waits, 0.0)
        """For so long the quorum's thread did this while the training thread did not wait for it."""
        self._began = self._at = now
        self._waits: list[tuple[object, Waits]] = []
        """What is waited for, by whom; the last one is the innermost."""
        self._quorum: Waits | None = None
        """What the quorum's thread is at."""
        self._open = 0.0
        self._kept = 0.0
        """Spent on microbatches of the open step, or of attempts at it that did not count."""
        self._told = dict(self.seconds)
        self.phases = dict.fromkeys(Phase, 0.0)
        """What of it was spent in which phase of steps, whether they counted or not. None of it falls."""
        self._before = dict(self.phases)
        """As it was when the last step was settled."""
        self._reduces = False
        """A collective is open, beside what the thread is at."""

    def passes(self, now: float) -> None:
        """Put the time since the last event into its account."""
        past, self._at = max(now - self._at, 0.0), max(now, self._at)
        waits = self._waits[-1][1] if self._waits else Waits.NOTHING
        if waits is Waits.QUORUM:
            self.phases[Phase.QUORUM] += past
            waits = self._quorum or waits
        elif self._quorum is not None:
            self.beside[self._quorum] += past
        account = ACCOUNTS[self.state, waits]
        if account is not None:
            self.seconds[account] += past
            return
        reduces = waits is Waits.COLLECTIVE or self._reduces
        self.phases[Phase.VOTE if waits is Waits.VOTE else Phase.ALLREDUCE if reduces else Phase.COMPUTE] += past
        if waits is Waits.MICROBATCH:
            self._kept += past
        else:
            self._open += past

    def goes(self, state: State, now: float) -> None:
        """Go to another state. An open step that is left so was abandoned, or was none, if this rank is outside from now on."""
        if self.state is State.STEP and state is not State.STEP:
            is_none = state in (State.OUTSIDE, State.SPARE)
            self.settles(_ALONE[state] if is_none else Account.DISCARDED, now)
        self.passes(now)
        self.state = state

    def waits(self, who: object, what: Waits, now: float) -> None:
        """Somebody begins to wait, within what was waited for before; it ends with `ends`."""
        self.passes(now)
        self._waits.append((who, what))

    def ends(self, who: object, now: float) -> None:
        """He does not wait any more. The order among several does not matter."""
        self.passes(now)
        self._waits = [(other, what) for other, what in self._waits if other is not who]

    def quorum_is_at(self, what: Waits | None, now: float) -> None:
        """Say what the quorum's thread is at: who waits for the quorum waits for that. None: it has ended."""
        self.passes(now)
        self._quorum = what

    def reduces(self, is_open: bool, now: float) -> None:
        """A collective is open from now on, or none is any more."""
        self.passes(now)
        self._reduces = is_open

    def settles(self, fate: Account, now: float) -> None:
        """The open step ends with this account: the next state is between two steps, or outside."""
        self.passes(now)
        self.seconds[fate] += self._open
        self._open, self._before = 0.0, dict(self.phases)
        if fate is Account.PRODUCTIVE:
            self.seconds[fate] += self._kept
            self._kept = 0.0
        self.state = State.BETWEEN

    def phases_of_step(self) -> dict[Phase, float]:
        """Return how long the open step has been in each phase."""
        return {phase: spent - self._before[phase] for phase, spent in self.phases.items()}

    def keeps(self, part: float) -> None:
        """Of the microbatches of attempts that did not count this part is used on, and the rest is let go."""
        gone = self._kept * (1.0 - min(max(part, 0.0), 1.0))
        self._kept -= gone
        self.seconds[Account.DISCARDED] += gone

    def closes(self, now: float) -> None:
        """This life ends: what is open was for nothing."""
        self.goes(State.BETWEEN, now)
        self.keeps(0.0)

    def take(self) -> dict[str, float]:
        """Return what was settled since the last time, by the accounts' names, to the microsecond."""
        news = {account.value: round(at - self._told[account], 6) for account, at in self.seconds.items()}
        self._told = dict(self.seconds)
        return {name: seconds for name, seconds in news.items() if seconds}

    @property
    def open_s(self) -> float:
        """How much is not settled."""
        return self._open + self._kept

    @property
    def age_s(self) -> float:
        """How long this ledger is kept."""
        return self._at - self._began

    def validate(self) -> None:
        """Check what holds between two events, for tests; a `RuntimeError` says what does not."""
        total, age = sum(self.seconds.values()) + self.open_s, self.age_s
        wrong = {
            "the accounts do not add up": abs(total - age) > 1e-6 * max(age, 1.0),
            "an account is negative": min(*self.seconds.values(), self._open, self._kept) < -1e-9,
            "something is open, and no step is": self._open > 0.0 and self.state is not State.STEP,
            "another group's business is in it": self.seconds[Account.LOST] + self.seconds[Account.DOWN] > 0.0,
        }
        for what, is_so in wrong.items():
            if is_so:
                raise RuntimeError(f"{what}: {self}, {vars(self)}")

    def __repr__(self) -> str:
        return f"Ledger(state={self.state.value}, age={self.age_s:.3f}, open={self.open_s:.3f})"
