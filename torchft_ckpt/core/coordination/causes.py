"""This file names the cause of a discarded step, of a few: by the lighthouse's reason for it, or a rank's."""

from __future__ import annotations

from collections.abc import Mapping

CAUSES: Mapping[str, tuple[str, ...]] = {
    "loops differ": ("the loops of the groups differ", "gave step", "gave the step up"),
    "group lost": ("nothing heard from it for", "its connection closed"),
    "not connected": ("ProcessGroupConfigureError",),
    "collective failed": ("CollectiveFailedError", "ProcessGroupError", "broke:", "the decision"),
    "too few groups": ("min_replica_size is",),
    "other": ("",),
}
"""Each with texts of which one is in the reason. The first that fits is the cause."""


def cause_of(reason: str) -> str:
    """Return the cause of a step that was discarded for this reason."""
    return next(cause for cause, texts in CAUSES.items() if any(text in reason for text in texts))
