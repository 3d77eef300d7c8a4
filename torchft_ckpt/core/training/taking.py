"""Says when a step that counts is taken: when all optimizers that step for it have ended.

From the decision to that moment the state is not the one that the new step names, and nobody may save it under that name. Wrapped
optimizers have joined the step by `zero_grad`. Of others, those that took the last step together are expected to do so again.

    the next step begins, and     the last one
    ----------------------------  ------------------------------------------------------------------------------------
    somebody is inside            was broken off: by an interrupt, by an error that the script caught. The state is torn
    nobody is, and not all ended  was left out by the loop, in part or as a whole, as loops do that skip what has overflowed. All
                                  groups find the same averages, so they leave out the same. If one group alone did so (an error
                                  between `should_commit` and the optimizer's step, caught), a comparison of the groups finds it
    all have ended                was taken
"""

from __future__ import annotations

from collections.abc import Collection, Hashable


class StepTaking:
    """The optimizers, or whoever else is on the way to take a step, each any hashable that identifies it."""

    def __init__(self) -> None:
        self._inside: set[Hashable] = set()
        self._ended: set[Hashable] = set()
        self._together: dict[Hashable, set[Hashable]] = {}
        """Who ended the last step of each, with it."""

    @property
    def is_inside(self) -> bool:
        """Somebody has begun and not ended."""
        return bool(self._inside)

    def is_taken(self, joined: Collection[Hashable] = ()) -> bool:
        """Whether all have ended that began, and all that take this step; where these are not known, those of the last step.

        `joined`: who is known to take it.
        """
        expected = set(joined) or {other for one in self._ended for other in self._together.get(one, ())}
        return bool(self._ended) and not self._inside and expected <= self._ended

    def enters(self, who: Hashable) -> None:
        """Somebody begins what he does for the step, the vote perhaps included."""
        self._inside.add(who)

    def ends(self, who: Hashable) -> None:
        """He has done it to the end; of one who has not begun it means nothing."""
        if who in self._inside:
            self._inside.discard(who)
            self._ended.add(who)

    def leaves(self, who: Hashable) -> None:
        """He has done nothing for it that an optimizer would have to end."""
        self._inside.discard(who)

    def closes(self) -> None:
        """The step is over, however it was taken: the next one begins."""
        self._together.update(dict.fromkeys(self._ended, self._ended))
        self._inside, self._ended = set(), set()
