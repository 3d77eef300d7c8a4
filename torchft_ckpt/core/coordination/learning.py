"""This file decides who follows the others for a while before it joins them, and what may be said of how far it is.

A group that has to receive a state, and needs longer for that than a step takes, would hold the others up. If they are
enough without it, and it comes closer by that, it *follows*: it receives their state of now outside of the quorum
(`Role.LEARNER`), while they train on, and asks again. Then it lacks only what has changed since. It is a learner until it asks:
it is in no quorum, has no vote and counts in no majority, and nobody waits for it. When those who train become too few it is
called (`Needed`).

    member     event                                     next       what follows
    ---------  ----------------------------------------  ---------  ---------------------------------------------------------
    asks       quorum formed, `should_follow`            follows    QuorumFormed(LEARNER, follows, sources); its sources serve it
    asks       quorum formed, and another one follows    asks       it waits: the sources keep one state at a time for learners
    warms up   it wishes to follow; quorum formed        warms up   StateKept: its sources keep that state; it receives some of it
    warms up   it has computed its step                  follows    QuorumFormed(LEARNER, follows), at once, if it is still kept
    asks       quorum formed, within reach               joins      as ever: JOINER or INLINE
    follows    it has the state, or cannot have it       asks       QuorumRequest, with a shorter `reach_s`; it has the name of
                                                                    that state, or none
    follows    the others are too few                    follows    Needed, once: it stops, and asks
    follows    it dies, hangs, is cut off                -          nothing: the others do not notice
    follows    a source dies                             follows    it goes on from another one; when none is left it asks
    follows    the lighthouse restarts                   follows    Hello(is_beside): nobody waits for it
"""

from __future__ import annotations

from torchft_ckpt.core.coordination.joining import FIRST_RATE, FOLLOW_FROM_S
from torchft_ckpt.core.coordination.lighthouse_records import Member
from torchft_ckpt.core.coordination.messages import FollowWish, JoinProgress, QuorumRequest, Receives

GUESSED = FIRST_RATE / 125e6
"""Before a transfer was measured the link may be one of 1 Gbit/s. Who follows for nothing is in a step later; who does not
follow may keep all others waiting."""
SAY_EVERY_S = 10.0
"""So often the operator hears how far a learner is."""
_KEEPS_UP = 0.85
"""A learner whose entries take more than this part of a step to arrive catches up too late, or never."""
_HOPELESS = 2.0
"""So much longer than a step entries may seem to take, as the rate may be one of a transfer beside collectives."""
CLOSER = 0.75
"""Following pays where not more than this part of what is lacking now will be lacking then."""


def should_follow(request: QuorumRequest, usual_s: float, *, stays: bool = False) -> bool:
    """Whether a group that is behind receives a state outside of the quorum first.

    Args:
        request: what it asks for.
        usual_s: a step takes so long; 0: not known yet.
        stays: it is a spare, so the others do without it however soon it would be there.
    """
    is_able = request.can_follow and request.allow_heal and request.can_load and not request.shrink_only
    if not is_able or request.reach_s is None:
        return False
    if stays:
        return True
    return _is_worth_it(request.reach_s * (GUESSED if request.guesses else 1.0), request.entry_s, usual_s)


def should_receive_early(wish: FollowWish, usual_s: float) -> bool:
    """Whether a learner receives a state while it warms up. Arguments as in `should_follow`."""
    return _is_worth_it(wish.reach_s, wish.entry_s, usual_s)


def _is_worth_it(reach_s: float, entry_s: float, usual_s: float) -> bool:
    if usual_s and entry_s > _HOPELESS * usual_s:
        return False
    return reach_s > max(usual_s, FOLLOW_FROM_S)


MAX_ATTEMPTS = 2
"""A group follows so often without coming close; then it joins as one that cannot follow."""
_CHASE_FACTOR = 6.0
_CHASE_LEAST_S = 30.0


def chase_limit_s(took_s: float) -> float:
    """Return how long a learner replays steps at most.

    A learner has caught up after T0 / (1 - rho), where T0 is the time of the transfer, and rho the part of a step in which an
    entry arrives. So this gives up where rho is more than six sevenths.

    Args:
        took_s: T0.
    """
    return _CHASE_FACTOR * took_s + _CHASE_LEAST_S


def keeps_up(entry_s: float, step_s: float) -> bool:
    """Whether a learner catches up by replaying steps: T0 / (1 - rho) is how long it takes, rho = `entry_s` / `step_s`.

    Args:
        entry_s: receiving what is replayed of one step takes so long.
        step_s: a step of those who train takes so long; 0: not known yet.
    """
    return step_s == 0.0 or entry_s <= _KEEPS_UP * step_s


def is_received_in_vain(entry_s: float, step_s: float, left_s: float) -> bool:
    """Whether a learner should give up a state that it receives, as it could not bring it forward.

    Not where the rest comes within a step: so little was measured of it that the rate says nothing, and the replay tells soon.

    Args:
        entry_s, step_s: as of `keeps_up`.
        left_s: the rest of the state takes so long.
    """
    return left_s > step_s and not keeps_up(entry_s, step_s)


class Distance:
    """How many bytes of the newest state a rank lacks, by what it has followed. Not thread-safe."""

    def __init__(self) -> None:
        self._has_followed = False
        self._entry_bytes: int | None = None
        self._num_failed = 0

    def followed(self) -> None:
        """A state was received while the others trained on: only what they change is lacking from now on."""
        self._has_followed, self._entry_bytes = True, None

    def lost(self) -> None:
        """What is here is no state, or too old a one."""
        self._has_followed, self._entry_bytes = False, None

    def replayed(self, entry_bytes: int) -> None:
        """What the others have changed since was replayed: what one step changes is lacking, and it comes as an entry."""
        self._entry_bytes, self._num_failed = entry_bytes, 0

    def joined(self) -> None:
        """The newest state is here, compared with that of the others."""
        self._entry_bytes, self._num_failed = None, 0

    def failed(self, *, for_good: bool) -> None:
        """The steps that were made since cannot be replayed; what is here has no name any more.

        Args:
            for_good: there is no use in trying again.
        """
        self._entry_bytes = None
        self._num_failed = MAX_ATTEMPTS if for_good else self._num_failed + 1

    def lacking_bytes(self, num_bytes: int, changing_bytes: int) -> int:
        """Return how many bytes have to be received.

        Args:
            num_bytes: of the state.
            changing_bytes: of what training changes in it.
        """
        if self._entry_bytes is not None:
            return min(self._entry_bytes, num_bytes)
        return changing_bytes if self._has_followed else num_bytes

    def can_follow(self, num_bytes: int, changing_bytes: int, *, replays: bool = False, stays: bool = False) -> bool:
        """Whether following brings this rank closer: a part of the state stays as it is, or the changes can be replayed.

        Args:
            num_bytes, changing_bytes: as in `lacking_bytes`.
            replays: this rank can replay steps.
            stays: its group is a spare, which follows also where it is close.
        """
        if self._num_failed >= MAX_ATTEMPTS:
            return False
        if replays:
            return stays or self._entry_bytes is None
        return changing_bytes <= CLOSER * self.lacking_bytes(num_bytes, changing_bytes)


def in_words(progress: JoinProgress) -> str:
    """Say how far a learner is."""
    if progress.does is Receives.REPLAY:
        return f"replays the steps that the others have made since, and is at step {progress.step}"
    if progress.does is not Receives.TRANSFER:
        return f"loads the state of step {progress.step}, {progress.reach_s:.1f} s are expected"
    left = progress.total_bytes - progress.done_bytes
    rate = f" at {left / progress.reach_s / 1e6:.1f} MB/s" if progress.reach_s and left > 0 else ""
    return (
        f"receives the state of step {progress.step}: {progress.done_bytes / 1e6:.1f} of {progress.total_bytes / 1e6:.1f} MB"
        f"{rate}, {progress.reach_s:.1f} s are expected"
    )


def learner_in_words(member: Member, newest_step: int) -> str:
    """Say what a learner does, and how far it is; empty: the member is none.

    Args:
        newest_step: at which the others are.
    """
    if not member.is_beside:
        return ""
    if member.warms_up:
        return "warms up: it computes its first step outside of the quorum"
    if member.progress is None:
        return "follows: it is outside of the quorum, and has not said yet how far it is"
    behind = max(newest_step - member.progress.step, 0)
    what = "is a spare, and follows" if member.hello.spare else "follows"
    return f"{what}: it {in_words(member.progress)}, {behind} steps behind"
