"""Decides with which pages fresh memory is touched. It knows no clock and no memory.

A huge page costs a fraction of the small ones in its place, as a rule: one fault, and one entry in a table. Not where the
system has to make it first: where free memory is in pieces, or where a hypervisor takes back free memory by huge pages and has
to give each one again (measured: 0.4 GB/s, beside 7 to 15 GB/s of huge and 2.3 GB/s of small pages that it had not taken back).
Nothing says so beforehand, so what each kind has cost lately decides.
"""

from __future__ import annotations

_WEIGHT = 0.5
_FORGET = 0.97
_MAX_CHANGES = 1000


class PageChoice:
    """Takes the kind of pages that is cheaper here, and now and then tries the other one again.

    It changes its mind a thousand times at most: each place where kinds of pages meet is one more of the 65,530 mappings that a
    process may have.
    """

    def __init__(self) -> None:
        self._cost_s = {True: 0.0, False: 0.0}
        self._is_huge = True
        self._num_changes = 0

    def is_huge(self) -> bool:
        """Whether the next piece is to be touched as a huge page."""
        is_huge = self._cost_s[True] <= self._cost_s[False]
        if is_huge != self._is_huge and self._num_changes < _MAX_CHANGES:
            self._is_huge = is_huge
            self._num_changes += 1
        return self._is_huge

    def took(self, is_huge: bool, seconds: float) -> None:
        """Note what a piece has cost, of the length of a huge page in both cases."""
        known = self._cost_s[is_huge]
        self._cost_s[is_huge] = seconds if not known else known + _WEIGHT * (seconds - known)
        if self._num_changes < _MAX_CHANGES // 2:
            self._cost_s[not is_huge] *= _FORGET
