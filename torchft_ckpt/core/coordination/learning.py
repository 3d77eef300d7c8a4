"""This file decides who follows the others for a while before it comes in, and what may be said of how far it is.

A group that has to receive a state, and needs longer for that than a step takes, would hold the others up. If they are
enough without it, and it comes closer by that, it *follows*: it receives their state of now outside of the quorum
(`Role.LEARNER`), while they train on, and asks again. Then it lacks only what has changed since. It is a learner until it asks:
it is in no quorum, has no vote and counts in no majority, and nobody waits for it. When those who train become too few they
wait until it has come (`hold`). A spare that follows is called (`Needed`) when one of those who train is lost.

    member     event                                     next       what follows
    ---------  ----------------------------------------  ---------  ---------------------------------------------------------
    asks       quorum formed, `should_follow`            follows    StateGiven(TO_FOLLOW, sources); its sources serve it
    asks       quorum formed, and another one follows    asks       it waits: the sources keep one state at a time for learners
    asks       quorum formed, within reach               held       see `hold`
    follows    it has the state, or cannot have it       asks       QuorumRequest, with a shorter `reach_s`; it has the name of
                                                                    that state, or none. A spare keeps it for a while before
    follows    it is a spare, and one of them is lost    follows    Needed, once: it asks when it has the state
    follows    it dies, hangs, is cut off                -          nothing: the others do not notice
    follows    a source dies                             follows    it goes on from another one; when none is left it asks
    follows    the lighthouse restarts                   follows    Hello(is_beside): nobody waits for it
"""

from __future__ import annotations

from torchft_ckpt.core.coordination.joining import FIRST_RATE, FOLLOW_FROM_S
from torchft_ckpt.core.coordination.lighthouse_records import Member, MemberPhase
from torchft_ckpt.core.coordination.messages import JoinProgress, QuorumRequest, Receives

GUESSED = FIRST_RATE / 125e6
"""Before a transfer was measured the link may be one of 1 Gbit/s. Who follows for nothing is in a step later; who does not
follow may keep all others waiting."""
SAY_EVERY_S = 10.0
"""So often the operator hears how far a learner is."""
CLOSER = 0.75
"""Following pays where not more than this part of what is lacking now will be lacking then."""
RESTS = 19.0
"""A spare that has received a state keeps it for so many times as long as that took: that is a twentieth of its sources' time."""
MAX_ATTEMPTS = 2
"""A group follows so often in vain; then the quorum is held for it, as for one that cannot follow."""


def should_follow(request: QuorumRequest, usual_s: float, *, stays: bool = False) -> bool:
    """Whether a group that is behind receives a state outside of the quorum first.

    Args:
        request: what it asks for.
        usual_s: a step takes so long; 0: not known yet.
        stays: it is a spare, so the others do without it however soon it would be there.
    """
    is_able = request.at_end and request.allow_heal and request.can_load and not request.shrink_only
    need = request.need
    if not is_able or not need.can_follow or need.reach_s is None:
        return False
    needs_s = need.reach_s * (GUESSED if need.guesses else 1.0)
    return stays or (need.gains and needs_s > max(usual_s, FOLLOW_FROM_S))


class Distance:
    """How many bytes of the newest state a rank lacks, by what it has followed. Not thread-safe."""

    def __init__(self) -> None:
        self._has_followed = False
        self._num_failed = 0

    def followed(self) -> None:
        """A state was received while the others trained on: only what they change is lacking from now on."""
        self._has_followed, self._num_failed = True, 0

    def lost(self) -> None:
        """The state that is here is not whole: all of it is lacking."""
        self._has_followed = False

    def joined(self) -> None:
        """The newest state is here, compared with that of the others."""
        self._num_failed = 0

    def failed(self) -> None:
        """A state could not be received outside of the quorum."""
        self._num_failed += 1

    def lacking_bytes(self, num_bytes: int, changing_bytes: int) -> int:
        """Return how many bytes have to be received.

        Args:
            num_bytes: of the state.
            changing_bytes: of what training changes in it.
        """
        return changing_bytes if self._has_followed else num_bytes

    def gains(self, num_bytes: int, changing_bytes: int) -> bool:
        """Whether following brings this rank closer, as a part of the state stays as it is. Arguments as in `lacking_bytes`."""
        pays = changing_bytes <= CLOSER * self.lacking_bytes(num_bytes, changing_bytes)
        return pays and self._num_failed < MAX_ATTEMPTS


def in_words(progress: JoinProgress) -> str:
    """Say how far a learner is."""
    if progress.does is Receives.NOTHING:
        return f"has received the state of step {progress.step}, and keeps it"
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
    if member.phase is MemberPhase.WARMS_UP:
        return "warms up: it computes its first step outside of the quorum"
    if member.progress is None:
        return "follows: it is outside of the quorum, and has not said yet how far it is"
    behind = max(newest_step - member.progress.step, 0)
    what = "is a spare, and follows" if member.hello.spare else "follows"
    return f"{what}: it {in_words(member.progress)}, {behind} steps behind"
