"""This file decides how long to wait before trying again. It knows no clock and no randomness of its own."""

from __future__ import annotations

from dataclasses import dataclass


def reconnect_delay_s(attempt: int, jitter: float) -> float:
    """Return the pause before connection attempt number `attempt` (0: the first retry).

    Doubles from 50 ms to 2 s. `jitter` in [0, 1) spreads the groups over the second half of the pause, so that a thousand
    of them do not come back in one instant.
    """
    base = min(2.0, 0.05 * 2.0 ** min(attempt, 16))
    return base * (0.5 + 0.5 * jitter)


@dataclass(slots=True)
class JoinBackoff:
    """How long a joiner that was left behind stays out, so that a hopeless one cannot tax the others at every step.

    An attempt costs the others what they waited, or the step that they discarded. It stays out for `factor` times that:
    failing again and again, it costs them about a tenth of their time. A failure that cost nobody anything (the source
    refused, say) is tried again soon, less and less often.
    """

    failures: int = 0
    out_until: float = float("-inf")
    factor: float = 8.0
    shortest_s: float = 0.2
    longest_s: float = 300.0

    def failed(self, cost_s: float, now: float) -> None:
        """Note an attempt that cost the others `cost_s` seconds."""
        pause_s = max(self.factor * cost_s, self.shortest_s * 2.0 ** min(self.failures, 5))
        self.failures += 1
        self.out_until = now + min(self.longest_s, pause_s)

    def is_out(self, now: float) -> bool:
        return now < self.out_until


@dataclass(slots=True)
class StallWatch:
    """Whether a collective has waited too long for a joiner, where joiners are in the quorum.

    What a collective takes when nobody joins is not the joiner's fault: the longest that was seen lately is allowed on top
    of the budget. Lateness of a whole step is not judged, only of a collective that this member itself has entered.
    """

    usual_s: float = 0.0
    _entered_at: float | None = None
    _budget_s: float | None = None

    def begin_step(self, budget_s: float | None) -> None:
        """A step begins; `budget_s` None: nobody joins, learn what is usual."""
        self._entered_at = None
        self._budget_s = budget_s

    def entered(self, now: float) -> None:
        """This member issued a collective."""
        self._entered_at = now

    def finished(self, now: float) -> None:
        """All collectives issued so far have finished."""
        if self._entered_at is not None and self._budget_s is None:
            self.usual_s = max(now - self._entered_at, 0.9 * self.usual_s)
        self._entered_at = None

    def deadline(self) -> float | None:
        """When to report a stall, unless `finished` comes first."""
        if self._budget_s is None or self._entered_at is None:
            return None
        return self._entered_at + self._budget_s + self.usual_s
