"""This file decides how long to wait before trying again. It knows no clock and no randomness of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_RECONNECT_PAUSE_S = 2.0
PENDING_NOTICE_S = 1.0
"""How often the lighthouse looks at those who wait for a quorum, and whether to tell them why."""
NOTICE_AGAIN_S = 5.0
"""How often it tells them the same again."""
SHARE_OF_REFUSALS = 0.03
_MAX_DEBTORS = 4096


def reconnect_delay_s(attempt: int, jitter: float) -> float:
    """Return the pause before connection attempt number `attempt` (0: the first retry).

    Doubles from 50 ms to 2 s. `jitter` in [0, 1) spreads the groups over the second half of the pause, so that a thousand
    of them do not come back in one instant.
    """
    base = min(LONGEST_RECONNECT_PAUSE_S, 0.05 * 2.0 ** min(attempt, 16))
    return base * (0.5 + 0.5 * jitter)


def restart_patience_s(join_timeout_s: float, heartbeat_timeout_s: float) -> float:
    """Return how long a restarted lighthouse waits for the members of the last quorum.

    As long as for a silent member, but never so short that one which lives has not tried to connect again.
    """
    return min(join_timeout_s, max(heartbeat_timeout_s, 1.5 * LONGEST_RECONNECT_PAUSE_S))


@dataclass(slots=True)
class Debt:
    """Keeps a group outside that failed to come in, so that a hopeless one cannot tax the others at every step.

    An attempt costs the others what they waited, or the step that they discarded. One that came too late stays out for eight
    times that, so that it costs them about a tenth of their time; one that could not come in, for the second time if it was
    waited for, until it is about a thirtieth. A failure that cost nobody anything is tried again soon, less and less often.
    """

    failures: int = 0
    refusals: int = 0
    """So often of these it could not come in, rather than not in time: it is tried alone then."""
    owed_s: float = 0.0
    """Of the first of them, which may be chance or another's fault: it did not wait for that."""
    out_until: float = float("-inf")
    hold_until: float = float("-inf")
    """Until then not even those try it who cannot train without it."""
    reason: str = ""
    was_excused: bool = False
    """It has failed once as nobody could know better, which counts for nothing."""
    times_underestimated: int = 0
    """So often it was let in, and then needed longer than it had said and than the others wait."""

    def failed(self, pause_s: float, reason: str, now: float) -> None:
        """Note an attempt; it stays out for so long at least."""
        self.hold_until = now + 0.2 * 2.0 ** min(self.failures, 5)
        self.out_until = max(now + pause_s, self.hold_until)
        self.failures += 1
        self.reason = reason or "it was left behind"

    def could_not(
        self, cost_s: float, reason: str, now: float, *, first_pause_s: float | None, is_alone: bool = False
    ) -> None:
        """It could not come in.

        Args:
            first_pause_s: for so long it stays out the first time, which may be another's fault; None: it is not.
            is_alone: it is tried alone from now on, and at once by those who need it, if that was the first time.
        """
        is_first = first_pause_s is not None and not (self.refusals if is_alone else self.failures)
        pause_s = (first_pause_s or 0.0) if is_first else (cost_s + self.owed_s) / SHARE_OF_REFUSALS
        self.failed(pause_s, reason, now)
        self.owed_s = cost_s if is_first else 0.0
        self.refusals += is_alone
        self.hold_until = now if is_alone and is_first else self.hold_until

    @property
    def factor_of_need(self) -> float:
        """The others expect it to need so many times what it says: more for each time that it said too little."""
        return min(1.0 + 0.5 * self.times_underestimated, 4.0)


@dataclass(slots=True)
class JoinAllowance:
    """The time that the survivors of a job may stand still for those who come in: a purse of seconds, one for the job.

    It is full at first, a share of the time that passes fills it, and each second that survivors stand still empties it. A need
    fits where the purse holds it. So in any T seconds survivors stand still for at most the limit and that share of T.

    Each group that failed to come in has a debt besides. Of those that could not come in one at a time is tried, so that none
    pays for another.

    Args:
        limit_s: what the purse holds at most; infinite: there is no limit.
    """

    limit_s: float = float("inf")
    share: float = 0.05
    _used_s: float = 0.0
    """At `_at`; nothing while there is no limit."""
    _spared_s: float = 0.0
    """Of that, what was used under a higher limit, and does not count under this one."""
    _at: float = 0.0
    debts: dict[str, Debt] = field(default_factory=dict)
    """By group: of those that failed and have not come in since."""

    def set_limit(self, limit_s: float, now: float) -> None:
        """Change the limit. Under a lower one the purse holds what it held, if there is room, and under the old one again what it
        would hold without the change. So one that says a low limit leaves nothing behind, and does not fill the purse."""
        self.spend(0.0, now)
        self._spared_s = max(0.0, min(self._spared_s + self.limit_s - limit_s, self._used_s))
        self.limit_s = limit_s

    def purse_s(self, now: float) -> float:
        """Return how many seconds there are; below zero where a hold took longer than was said."""
        return self.limit_s - max(0.0, self._used(now) - self._spared_s)

    def spend(self, seconds: float, now: float) -> None:
        """Survivors have stood still for so long until now."""
        used_s = self._used(now)
        self._spared_s = min(self._spared_s, used_s)
        self._used_s, self._at = used_s + seconds if self.limit_s != float("inf") else 0.0, now

    def _used(self, now: float) -> float:
        return max(0.0, self._used_s - self.share * max(0.0, now - self._at))

    def debt(self, group: str, now: float) -> Debt:
        """Return the debt of a group, which is about to grow."""
        if len(self.debts) >= _MAX_DEBTORS:
            self.debts = {other: debt for other, debt in self.debts.items() if debt.out_until > now}
        return self.debts.setdefault(group, Debt())

    def fits_in_s(self, need_s: float, now: float) -> float | None:
        """Return after how many seconds without holds survivors may stand still for so long; 0.0: now; None: never."""
        lacks_s = need_s - self.purse_s(now)
        if lacks_s <= 0.0:
            return 0.0
        return None if need_s > self.limit_s else lacks_s / self.share
