"""`PGTransport`, under torchft's name and with its constructor: our format over HTTP.

torchft's sends pickles over the process group, so the process group has to be connected first, and both sides wait until all of
it is through. Here it is `HTTPTransport`, in all that it does: live weights are served beside the training step, several sources
at once, digests, nothing unpickled. The bytes go over TCP, whatever the process group uses.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from torchft_ckpt.checkpointing.http_transport import HTTPTransport

T = TypeVar("T")


class PGTransport(HTTPTransport[T]):
    """An `HTTPTransport` for scripts that construct torchft's `PGTransport`.

    Args:
        pg: not used: no state travels over it.
        timeout: as for `HTTPTransport`.
        device: not used: what is received is on the CPU, or in the tensors that `state_dict` returns, wherever these are.
        state_dict: returns the state that is here, as it would be sent: a receive for which no other is given fills its tensors.
            A Manager of this library gives its own.
    """

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], T] | None = None,
    ) -> None:
        super().__init__(timeout, state_dict=state_dict)
        self._receives_in_place = state_dict is not None
