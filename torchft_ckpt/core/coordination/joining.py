"""This file decides whether those who train wait for one that comes in, and who has to wait outside instead.

A replica group that lacks the newest state says how long it needs to receive it (`reach_s`): an estimate when it asks, and what
it measures while it receives. The others wait for it before they begin a step (`hold`). That is taken from one allowance of the
job (`JoinAllowance`). A need that does not fit is not waited for: the group stays outside.

Who fails to come in stays outside for longer each time it costs them something, and is tried alone: see `JoinAllowance`.

What the others would wait for anyway costs nothing: a quorum that could not train without the newcomer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from torchft_ckpt.core.coordination.commit import CommitDecision
from torchft_ckpt.core.coordination.lighthouse_records import Member, Round
from torchft_ckpt.core.coordination.messages import group_name
from torchft_ckpt.core.coordination.patience import Debt, JoinAllowance

RETRY_S = 300.0
"""A group that has waited outside for so long is admitted once more: its link may have become faster."""
SILENT_S = 5.0
"""One that is waited for, and says nothing for so long, is not waited for any more."""
FOLLOW_FROM_S = 0.25
"""A state that comes sooner is waited for, where a step is not known to take longer."""
FIRST_RATE = 1e9
"""Bytes a second that are expected of a transfer before one was measured."""
_WINDOW_S = 2.0
_SOONEST_S = 0.3
_SOONEST_LOADED_S = 0.5
_WEIGHT = 0.25
_LONGEST_PAUSE_S = 300.0
_SOONEST_MET_S, _LONGEST_MET_S = 1.0, 60.0


class Reception:
    """Estimates how long a rank needs to receive and to load the state, by how long it took lately. Not thread-safe."""

    def __init__(self) -> None:
        self.load_s = 0.0
        """Seconds that loading took the last time; 0: hardly any."""
        self.is_measured = False
        """The rate is that of the transfer that runs now, or ran last."""
        self._rate: float | None = None
        self._left: int | None = None
        self._at_first: int | None = None
        """What the transfer had to bring, as far as was known when it first told."""
        self._done_at_first: int | None = None
        self._seen: deque[tuple[float, int]] = deque()

    def begin(self) -> None:
        """A transfer begins. What the one before told is believed until this one tells."""
        self._seen.clear()
        self._at_first = self._done_at_first = None
        self.is_measured = False

    def progress(self, *, left_bytes: int, done_bytes: int, elapsed_s: float) -> float:
        """Take how far the transfer is since it began; return how many seconds it still needs.

        Args:
            left_bytes: are not known to be here and right yet.
            done_bytes: came, verified or not, or were found to be here already.
        """
        self._at_first = left_bytes if self._at_first is None else self._at_first
        self._left = left_bytes or self._at_first  # the next state is another one
        self._done_at_first = done_bytes if self._done_at_first is None else self._done_at_first
        if done_bytes == self._done_at_first and elapsed_s <= SILENT_S:
            self._seen.clear()  # the source makes ready, which says nothing of the rate
        self._seen.append((elapsed_s, done_bytes))
        while len(self._seen) > 2 and elapsed_s - self._seen[1][0] >= _WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        took_s, grew = elapsed_s - since_s, done_bytes - before
        if took_s >= _WINDOW_S or (took_s >= _SOONEST_S and grew):
            self._rate = max(grew, 1) / took_s
            self.is_measured = True
        return left_bytes / (self._rate or FIRST_RATE) + self.load_s

    def loading(self, elapsed_s: float) -> float:
        """Take for how long the state has been loaded; return how many seconds that still needs.

        As long as the last time, and then half as long again as it has taken beyond that.
        """
        beyond_s = elapsed_s - self.load_s
        return max(-beyond_s, beyond_s / 2, _SOONEST_LOADED_S)

    def loaded(self, elapsed_s: float) -> None:
        """The state is loaded, which took so long."""
        self.load_s = elapsed_s if elapsed_s >= _SOONEST_LOADED_S else 0.0

    def forget_left(self) -> None:
        """What the last transfer had to bring says nothing of the next one."""
        self._left = None

    @property
    def has_measured(self) -> bool:
        """Whether a transfer has shown how fast transfers are."""
        return self._rate is not None

    def expected_s(self, num_bytes: int) -> float:
        """Return how long the next transfer takes.

        Args:
            num_bytes: of the state; of one that began before, what it left is known.
        """
        return (num_bytes if self._left is None else self._left) / (self._rate or FIRST_RATE)


class Joining:
    """The cost of those who join: what it was, what it may be, and how they failed. One for each job; not thread-safe."""

    def __init__(self) -> None:
        self._allowance = JoinAllowance()
        self._usual_s = 0.0
        """How long a step takes."""
        self._stands_s = 0.0
        """How long those who train stood still the last time to capture and show their state."""

    # ------------------------------------------------------------------------------------------------ before a quorum

    def set_limit(self, members: Iterable[Member], now: float) -> None:
        """Take the least limit of those who train."""
        limit_s = min((member.join_stall_limit_s for member in members), default=self._allowance.limit_s)
        if limit_s != self._allowance.limit_s:
            self._allowance.set_limit(limit_s, now)

    @property
    def usual_s(self) -> float:
        """How long a step takes; 0: not known yet."""
        return self._usual_s

    def stood(self, members: Collection[Member], since_s: float, now: float) -> None:
        """A quorum forms of these, who trained already. Before it they captured and showed their state, and stood still.

        For as long as one of them says and another one, if there is one, confirms: by so much it asked after that one. And no
        longer than by our clock: so long ago the last quorum formed (`since_s`). It leaves a debt of one limit at most.
        """
        if not members:
            return
        longest, *others = sorted(members, key=lambda member: member.asked.stood_s, reverse=True)
        if others:
            late_s = max(0.0, longest.asked_at - min(member.asked_at for member in others))
            since_s = min(since_s, others[0].asked.stood_s + late_s)
        if stood_s := min(longest.asked.stood_s, since_s):
            self._stands_s = stood_s
            self._allowance.spend(min(stood_s, max(0.0, self._allowance.purse_s(now) + self._allowance.limit_s)), now)

    def stood_for_hold(self, seconds: float, now: float) -> None:
        """A quorum was held for so long: see `hold`."""
        self._allowance.spend(seconds, now)

    def why_out(self, member: Member, now: float) -> str:
        """Say why those who train do not wait now for a member that has to load the state, and until when; empty: they do."""
        if why := self.why_owes(member, now):
            return why
        debt, reach_s = self._debt(member), member.asked.need.reach_s
        if now - member.asked_at >= RETRY_S and self._allowance.purse_s(now) >= 0.0:
            return ""

        def needs_s(factor: float) -> float:
            return factor * ((reach_s or 0.0) + member.asked.need.load_s) + self._stands_s

        need_s = needs_s(1.0)
        if debt is not None:
            # One that expects a little less than it then measures would cost a step again and again.
            need_s = max(need_s, min(needs_s(debt.factor_of_need), self._allowance.limit_s))
        return self.why_not(need_s, now)

    def why_owes(self, member: Member, now: float) -> str:
        """Say why a member that could not come in is not tried now, and until when; empty: it may be."""
        debt = self._debt(member)
        if debt is None or now >= debt.out_until:
            return ""
        return f"{debt.reason}; it is tried again in {_in_words(debt.out_until - now)}"

    def _debt(self, member: Member) -> Debt | None:
        return self._allowance.debts.get(group_name(member.replica_id))

    def why_failed(self, member: Member) -> str:
        """Say why a member did not come in when it was last tried; empty: it did, or was not tried."""
        debt = self._debt(member)
        return "" if debt is None else debt.reason

    def in_debt(self, members: Iterable[Member]) -> list[Member]:
        """Return those that could not come in, in the order in which they are tried: of those that were refused as often, who was
        just given its state, and would give it to others, comes after those that had it."""
        owing = [
            (debt.refusals, m.asked.came_in, m.replica_id, m) for m in members if (debt := self._debt(m)) is not None
        ]
        return [member for refusals, _, _, member in sorted(owing) if refusals]

    def hold(self, members: Iterable[Member], now: float) -> tuple[str, float] | None:
        """Say why not even those who need these members try them now, and until when; None: they may be tried."""
        for member in self.in_debt(members):
            if (debt := self._debt(member)) is not None and (why := self.why_paused(member, now)):
                return why, debt.hold_until
        return None

    def why_paused(self, member: Member, now: float) -> str:
        """Say why not even those who need a member try it now; empty: they do."""
        debt = self._debt(member)
        if debt is None or now >= debt.hold_until:
            return ""
        return f"{member.replica_id} is needed, and could not come in: {debt.reason}"

    def refused(self, current: Round, replica_id: str, cost_s: float, reason: str, now: float, *, is_sure: bool) -> str:
        """A member could not come in, and the others stood still for so long. Returns what to say. `is_sure`: see `Debt`."""
        if current.is_needed or current.assignment.is_first:
            cost_s = 0.0  # there was nothing else to do
        self._allowance.spend(cost_s, now)
        debt = self._allowance.debt(group_name(replica_id), now)
        debt.could_not(cost_s, reason, now, first_pause_s=None if is_sure else cost_s, is_alone=True)
        cost, pause = _in_words(cost_s), _in_words(debt.out_until - now)
        return f"{replica_id} could not come in, which cost the others {cost}: {reason}; it is tried again in {pause}"

    def why_not(self, need_s: float, now: float) -> str:
        """Say why the others do not stand still for so long; empty: they do."""
        after_s = self._allowance.fits_in_s(need_s, now)
        if after_s == 0.0:
            return ""
        needs = f"receiving and loading the state may keep the others waiting for {_in_words(need_s)}"
        limit_s = self._allowance.limit_s
        if after_s is None:
            longer = "give the groups that train a longer one (None: no limit)"
            return f"{needs}, and join_stall_limit allows {limit_s:g} s at most: {longer}"
        has_s = max(0.0, self._allowance.purse_s(now))
        return f"{needs}, and {_in_words(has_s)} are left of join_stall_limit ({limit_s:g} s): enough in {_in_words(after_s)}"

    # ------------------------------------------------------------------------------------------------- after the step

    def ended(self, current: Round, now: float) -> None:
        """A step is decided: learn how long steps take."""
        if current.tally.verdict is CommitDecision.COMMIT:
            self._usual_s += (now - current.formed_at - self._usual_s) * (_WEIGHT if self._usual_s else 1.0)

    def failed(
        self,
        replica_ids: Iterable[str],
        cost_s: float,
        now: float,
        reason: str = "",
        underestimated: Collection[str] = (),
    ) -> None:
        """An attempt to join failed, and has cost the others so long. Some needed longer than they had expected."""
        for replica_id in replica_ids:
            debt = self._allowance.debt(group_name(replica_id), now)
            debt.failed(min(8.0 * cost_s, _LONGEST_PAUSE_S), reason, now)
            debt.times_underestimated += replica_id in underestimated

    def could_not(self, replica_id: str, cost_s: float, now: float, reason: str) -> None:
        """A member was waited for, and could not come in: its source may be why once, a firewall each time."""
        debt = self._allowance.debt(group_name(replica_id), now)
        debt.could_not(cost_s, reason, now, first_pause_s=min(8.0 * cost_s, _LONGEST_PAUSE_S))

    def cannot_be_connected(self, replica_id: str, reason: str, now: float) -> str:
        """A member could not be connected with those who train, which cost them nothing. Returns what to say."""
        debt = self._allowance.debt(group_name(replica_id), now)
        debt.failed(min(_SOONEST_MET_S * 2.0 ** min(debt.failures, 8), _LONGEST_MET_S), reason, now)
        return f"{replica_id}: {reason}; it is tried again in {_in_words(debt.out_until - now)}"

    def excuses(self, replica_id: str, now: float) -> bool:
        """Whether a member is excused that has failed as nobody could know better: once until it has come in."""
        debt = self._allowance.debt(group_name(replica_id), now)
        was_excused, debt.was_excused = debt.was_excused, True
        return not was_excused

    def trained(self, replica_ids: Iterable[str]) -> None:
        """These members have committed a step together: they have come in."""
        for replica_id in replica_ids:
            self._allowance.debts.pop(group_name(replica_id), None)


def _in_words(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
