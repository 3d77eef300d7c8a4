"""What a Manager asks and tells of what computes its steps by microbatches: a `StepLoader`. All on the training thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchft_ckpt.core.coordination.messages import StateVersion


class Microbatches(Protocol):
    """Computes the steps of a Manager by microbatches."""

    @property
    def in_words(self) -> str:
        """What has to be the same in all groups, beside the parameters."""
        ...

    def held(self, version: StateVersion) -> Sequence[tuple[int, int]]:
        """Return what is computed of the step that begins with a state: see `QuorumRequest.nodes`."""
        ...

    def refuse(self, what: str) -> None:
        """Raise `ConfigError` if that cannot be now."""
        ...

    def votes(self) -> None:
        """The step is about to be voted on. Raises `ConfigError` if it is not whole."""
        ...

    def decided(self, *, counts: bool) -> None:
        """The step was decided."""
        ...
