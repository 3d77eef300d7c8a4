"""This file decides for how long those who train wait for one that joins, and who has to wait outside instead.

A replica group that has to receive the state says how long it needs (`reach_s`): an estimate when it asks for a quorum, and
what it measures while it receives. The others wait for it in two places: when all have approved the step (a joiner that
receives beside its forward pass), and in their collectives (one that receives before it). Both are taken from one allowance of
the job (`JoinAllowance`). A need that does not fit is not waited for: who asks stays outside, and who is in the step is left
behind at once.

Who fails to come in stays outside for longer each time it costs them something, and is tried alone: see `JoinAllowance`.

What the others would wait for anyway costs nothing: the usual length of a step, which is that of the steps that nobody joined;
and the quorum that could not train without the joiner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from torchft_ckpt.core.coordination.commit import CommitDecision
from torchft_ckpt.core.coordination.lighthouse_records import Member, Reach, Round
from torchft_ckpt.core.coordination.messages import Receives, Role, group_name
from torchft_ckpt.core.coordination.patience import Debt, JoinAllowance

RETRY_S = 300.0
"""A group that has waited outside for so long is admitted once more: its link may have become faster."""
LONGEST_S = 600.0
"""Without a limit a step waits for joiners for so long at most: those who train may wait for a lighthouse that is gone."""
SILENT_S = 1.0
"""A joiner that has said how far it is, and then nothing for so long, is left behind."""
FOLLOW_FROM_S = 0.25
"""A state that comes sooner is waited for, where a step is not known to take longer: see `replica.FIRST_WAIT_S`."""
FIRST_RATE = 1e9
"""Bytes a second that are expected of a transfer before one was measured."""
STANDSTILL_S = 5.0
"""A transfer for a step that is over is given up when nothing has come for so long."""
_WINDOW_S = 2.0
_SOONEST_S = 0.3
_SOONEST_LOADED_S = 0.5
_LOOK_AGAIN_S = 0.25
_ROUNDING_S = 0.001
"""So much after a limit it is over, however its sum is rounded."""
_WEIGHT = 0.25
_LONGEST_PAUSE_S = 300.0


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
        self._seen: deque[tuple[float, int]] = deque()

    def begin(self) -> None:
        """A transfer begins. What the one before told is believed until this one tells."""
        self._seen.clear()
        self._at_first = None
        self.is_measured = False

    def progress(self, *, left_bytes: int, done_bytes: int, elapsed_s: float) -> float:
        """Take how far the transfer is since it began; return how many seconds it still needs.

        Args:
            left_bytes: are not known to be here and right yet.
            done_bytes: came, verified or not, or were found to be here already.
        """
        self._at_first = left_bytes if self._at_first is None else self._at_first
        self._left = left_bytes or self._at_first  # the next state is another one
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

    def measured(self, bytes_per_s: float) -> None:
        """A probe of the way was received so fast. A transfer says more."""
        self._rate = self._rate or bytes_per_s

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


class Standstill:
    """Finds a transfer that brings nothing any more, for a step that is over. Not thread-safe.

    The sources may serve that state in the next quorum alone, and that quorum may wait for the receiver.
    """

    def __init__(self) -> None:
        self._done_bytes = -1
        self._since = 0.0

    def lasts(self, *, done_bytes: int, has_all: bool, now: float) -> bool:
        """Take how far the transfer is; return whether nothing has come for so long that the receiver gives it up.

        Args:
            done_bytes: as of `Reception.progress`.
            has_all: nothing more has to come.
        """
        if done_bytes != self._done_bytes or has_all:
            self._done_bytes, self._since = done_bytes, now
        return now - self._since >= STANDSTILL_S


class Joining:
    """The cost of those who join: what it was, what it may be, and how they failed. One for each job; not thread-safe."""

    def __init__(self) -> None:
        self._allowance = JoinAllowance()
        self._usual_s = 0.0
        """How long a step takes that nobody joins."""
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
        """How long a step takes that nobody joins; 0: not known yet."""
        return self._usual_s

    def stood(self, members: Iterable[Member], now: float) -> None:
        """A quorum forms of those who train. Before it they captured and showed their state, and stood still meanwhile."""
        if stood_s := max((member.asked.stood_s for member in members), default=0.0):
            self._stands_s = stood_s
            self._allowance.spend(stood_s, now)

    def stood_for_hold(self, seconds: float, now: float) -> None:
        """A quorum was held for so long: see `hold`."""
        self._allowance.spend(seconds, now)

    def why_out(self, member: Member, budget_s: float, now: float) -> str:
        """Say why a member that has to load the state is not admitted now, and until when; empty: it is.

        One that asks at the end of its iteration loads while the others do nothing else.
        """
        debt = self._debt(member)
        if debt is not None and now < debt.out_until:
            return f"{debt.reason}; it is tried again in {_in_words(debt.out_until - now)}"
        reach_s = member.asked.reach_s
        if now - member.asked_at >= RETRY_S and self._allowance.fits(0.0, budget_s, now):
            return ""
        beside_s = 0.0 if member.asked.heal_inline or member.asked.at_end else self._usual_s

        def needs_s(factor: float) -> float:
            return max(0.0, factor * (reach_s or 0.0) - beside_s) + factor * member.asked.load_s + self._stands_s

        need_s = needs_s(1.0)
        if debt is not None:
            # One that expects a little less than it then measures would cost a step again and again.
            need_s = max(need_s, min(needs_s(debt.factor_of_need), self._allowance.limit_s))
        return self.why_not(need_s, budget_s, now)

    def _debt(self, member: Member) -> Debt | None:
        return self._allowance.debts.get(group_name(member.replica_id))

    def why_failed(self, member: Member) -> str:
        """Say why a member did not come in when it was last tried; empty: it did, or was not tried."""
        debt = self._debt(member)
        return "" if debt is None else debt.reason

    def in_debt(self, members: Iterable[Member]) -> list[Member]:
        """Return those that could not come in, in the order in which they are tried."""
        debts = {m.replica_id: (debt.refusals, m) for m in members if (debt := self._debt(m)) is not None}
        return [m for refusals, m in sorted(debts.values(), key=lambda one: (one[0], one[1].replica_id)) if refusals]

    def hold(self, members: Iterable[Member], now: float) -> tuple[str, float] | None:
        """Say why not even those who need these members try them now, and until when; None: they may be tried."""
        for member in self.in_debt(members):
            if (debt := self._debt(member)) is not None and now < debt.hold_until:
                return f"{member.replica_id} is needed, and could not come in: {debt.reason}", debt.hold_until
        return None

    def refused(self, current: Round, replica_id: str, cost_s: float, reason: str, now: float, *, is_sure: bool) -> str:
        """A member could not come in, and the others stood still for so long. Returns what to say. `is_sure`: see `Debt`."""
        if current.is_needed or current.assignment.is_first:
            cost_s = 0.0  # there was nothing else to do
        self._allowance.spend(cost_s, now)
        debt = self._allowance.debt(group_name(replica_id), now)
        debt.refused(cost_s, reason, now, is_sure=is_sure)
        cost, pause = _in_words(cost_s), _in_words(debt.out_until - now)
        return f"{replica_id} could not come in, which cost the others {cost}: {reason}; it is tried again in {pause}"

    def why_not(self, need_s: float, budget_s: float, now: float) -> str:
        """Say why the others do not stand still for so long; empty: they do."""
        after_s = self._allowance.fits_in_s(need_s, budget_s, now)
        if after_s == 0.0:
            return ""
        needs = f"receiving and loading the state may keep the others waiting for {_in_words(need_s)}"
        limit_s = self._allowance.limit_s
        if after_s is None:
            longer = "give the groups that train a longer one (None: no limit)"
            return f"{needs}, and join_stall_limit allows {limit_s:g} s at most: {longer}"
        has_s = max(0.0, self._allowance.purse_s(now))
        return f"{needs}, and {_in_words(has_s)} are left of join_stall_limit ({limit_s:g} s): enough in {_in_words(after_s)}"

    # ---------------------------------------------------------------------------------------------------- in the step

    def begin(self, current: Round, holding: Iterable[Member], healing: Collection[Member], now: float) -> None:
        """A step begins: note for how long those who hold the state may wait for those who load it, and what these expect."""
        current.join_budget_s = min((member.asked.join_budget_s for member in holding), default=0.0)
        most_s = LONGEST_S if current.is_needed else self._allowance.most_s(current.join_budget_s, now)
        current.join_wait_s = min(most_s, LONGEST_S)
        current.may_follow = frozenset(
            m.replica_id for m in healing if m.asked.can_follow and m.asked.gains and m.asked.guesses
        )
        current.reach = {
            member.replica_id: Reach(member.asked.reach_s + member.asked.load_s, now, is_measured=False)
            for member in healing
            if member.asked.reach_s is not None
        }

    def keeps_waiting(self, current: Round, now: float) -> bool:
        """Whether one of those who join is waited for, when all others have approved. Else `current.gave_up` says why not."""
        approved_at = now if current.all_approved_at is None else current.all_approved_at
        waited_for = current.tally.joiners_waited_for()
        stood_s = self._first_s(current, now) + now - approved_at
        reasons = [self._why_given_up(current, replica_id, approved_at, stood_s, now) for replica_id in waited_for]
        return self._may_wait(current, reasons, approved_at, stood_s, now)

    def keeps_waiting_in_collective(self, current: Round, members: Iterable[str], now: float) -> bool:
        """Whether those who hold the state may wait in a collective for these members, because these receive it."""
        stands_since = current.formed_at + self._usual_s
        # One that receives and loads beside its forward pass is late for another reason.
        receiving = [replica_id for replica_id in members if self._comes_first(current, replica_id)]
        stood_s = {m: _has_since(current, m, now) - current.formed_at for m in receiving}
        reasons = [self._why_given_up(current, m, stands_since, stood_s[m], now) for m in receiving]
        return self._may_wait(current, reasons, stands_since, max(stood_s.values(), default=0.0), now)

    @staticmethod
    def _comes_first(current: Round, replica_id: str) -> bool:
        reach = current.reach.get(replica_id)
        loads_first = reach is not None and reach.does is Receives.LOAD_FIRST
        return loads_first or current.tally.roles[replica_id] is Role.INLINE

    def _may_wait(self, current: Round, reasons: list[str], stands_since: float, stood_s: float, now: float) -> bool:
        """Take why each of those who join is given up, or that it is not. Whether one of them is waited for.

        It is looked at again now and then, and when a budget or the allowance is over: nobody stands still for longer.
        """
        current.gave_up = "; ".join(reason for reason in reasons if reason)
        if all(reasons):
            current.look_again_at = None
            return False
        budget_s = current.join_budget_s or 0.0
        limits = (stands_since + budget_s, now + self._allowance.most_s(budget_s, now) - stood_s)
        over_at = [limit + _ROUNDING_S for limit in limits]  # a limit that is reached now may not be over yet
        current.look_again_at = min([at for at in over_at if at > now] + [now + _LOOK_AGAIN_S])
        return True

    def _why_given_up(self, current: Round, replica_id: str, stands_since: float, stood_s: float, now: float) -> str:
        """Say why a joiner is not waited for any longer; empty: it is, as is one that nobody can train without.

        Args:
            stands_since: since when the others have nothing else to do.
            stood_s: how much longer the step takes for joiners, by now.
        """
        if current.is_needed:
            return ""
        budget_s = current.join_budget_s or 0.0
        waited_s = max(0.0, now - stands_since)
        reach = current.reach.get(replica_id)
        if reach is None:  # its transport does not tell
            fits = self._allowance.fits(waited_s, budget_s, now)
            return "" if fits and waited_s < budget_s else f"{replica_id} took longer than join_budget ({budget_s:g} s)"
        since_s, loads = now - max(reach.at, stands_since), reach.does is not Receives.TRANSFER
        # What loads may hold Python's lock; the heartbeat tells who is dead.
        if reach.seconds > 0 and reach.is_measured and since_s >= (max(SILENT_S, budget_s) if loads else SILENT_S):
            what = "loads" if loads else "receives"
            return f"{replica_id} {what} the state, and has not said for {since_s:.1f} s how far it is{reach.takes}"
        goes_on_s = 0.0 if current.all_approved_at is not None else self._usual_s
        if reach.seconds == 0 and now >= max(reach.at + goes_on_s, stands_since) + budget_s:
            return (
                f"{replica_id} has the state, and took longer than join_budget ({budget_s:g} s) to go on{reach.takes}"
            )
        need_s = max(0.0, reach.seconds - (now - reach.at))
        if not reach.is_measured and need_s == 0.0 and waited_s >= budget_s:
            return f"{replica_id} has not begun to receive the state within join_budget ({budget_s:g} s)"
        is_far = reach.is_measured and reach.does is Receives.TRANSFER and need_s > FOLLOW_FROM_S
        if replica_id in current.may_follow and is_far and current.all_approved_at is not None:
            current.to_follow.add(replica_id)
            return f"{replica_id} needs {_in_words(need_s)} more to receive the state, and does so outside of the quorum first"
        why = self.why_not(need_s + stood_s, budget_s, now)
        if not why:
            return ""
        current.underestimated.add(replica_id)
        return f"{replica_id}: {why}{reach.takes}"

    # ------------------------------------------------------------------------------------------------- after the step

    def ended(self, current: Round, now: float) -> None:
        """A step is decided: take what its joiners cost from the allowance, and no more than they were granted."""
        if current.join_budget_s is None:
            if current.tally.verdict is CommitDecision.COMMIT:
                self._usual_s += (now - current.formed_at - self._usual_s) * (_WEIGHT if self._usual_s else 1.0)
        elif not current.is_needed:
            self._allowance.spend(min(self._stood_s(current, now), current.join_wait_s), now)

    def _stood_s(self, current: Round, now: float) -> float:
        at_the_vote_s = 0.0 if current.all_approved_at is None else now - current.all_approved_at
        return self._first_s(current, now) + at_the_vote_s

    def _first_s(self, current: Round, now: float) -> float:
        """Return how much later all approve because the state comes before the forward pass of some, as far as is known."""
        first = [replica_id for replica_id in current.tally.roles if self._comes_first(current, replica_id)]
        if not first and not current.stalled:
            return 0.0  # whatever else took long is not their doing
        until = max((_has_since(current, replica_id, now) for replica_id in first), default=now)
        approved_at = now if current.all_approved_at is None else current.all_approved_at
        return max(0.0, min(until, approved_at - self._usual_s) - current.formed_at)

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

    def trained(self, replica_ids: Iterable[str]) -> None:
        """These members have committed a step together: they have come in."""
        for replica_id in replica_ids:
            self._allowance.debts.pop(group_name(replica_id), None)


def _has_since(current: Round, replica_id: str, now: float) -> float:
    """Return since when a joiner has the state; now, where it has not."""
    reach = current.reach.get(replica_id)
    return now if reach is None or reach.seconds else reach.at


def _in_words(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
