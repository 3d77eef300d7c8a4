"""The Manager's own part of the state: it is served, saved and loaded together with what the user has registered."""

from __future__ import annotations

from typing import Any

from torchft_ckpt.core.messages import StateVersion
from torchft_ckpt.errors import ConfigError


class OwnState:
    """What a Manager counts besides its steps. The training thread changes it."""

    def __init__(self) -> None:
        self.batches_committed = 0
        """Batches that went into committed steps, over all replica groups."""

    def served(self, version: StateVersion) -> dict[str, Any]:
        """Return it as it travels with the state of that name."""
        return {
            "step": version.step,
            "batches_committed": self.batches_committed,
            "quorum_id": version.quorum_id,
            "epoch": version.epoch,
        }

    def saved(self, step: int) -> dict[str, int]:
        """Return it as it is saved with the state of a step."""
        return {"step": step, "batches_committed": self.batches_committed}

    def take_served(self, own: dict[str, Any]) -> None:
        """Take what `served` returned at the source; `Healing.wait` has checked the count."""
        self.batches_committed = own.get("batches_committed", 0)

    def take_saved(self, state_dict: dict[str, int]) -> int:
        """Take what `saved` returned, and return the step.

        Raises:
            ConfigError: it is no Manager's state.
        """
        try:
            step, batches = int(state_dict["step"]), int(state_dict["batches_committed"])
        except (KeyError, TypeError, ValueError) as error:
            message = f"this is no Manager's state dict (keys step, batches_committed): {state_dict!r}"
            raise ConfigError(message, party="state_dict") from error
        if step < 0 or batches < 0:
            raise ConfigError(f"a Manager's state dict holds no negative counts: {state_dict!r}", party="state_dict")
        self.batches_committed = batches
        return step
