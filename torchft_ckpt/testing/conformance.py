"""What the checks of a contract share: the error that names the broken promise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchft_ckpt.errors import TorchftCkptError


class ConformanceError(TorchftCkptError):
    """A part of your own broke a promise of its contract; the message says which, `party` what kind of part it is."""


def require(party: str, holds: bool, sentence: str) -> None:
    """See that a promise holds.

    Raises:
        ConformanceError: it does not.
    """
    if not holds:
        raise ConformanceError(sentence, party=party)


def require_raises(party: str, kind: type[Exception], action: Callable[[], object], what: str) -> None:
    """See that an action raises an error of a kind.

    Raises:
        ConformanceError: it raises another one, or none.
    """
    try:
        action()
    except kind:
        return
    except Exception as error:
        raise ConformanceError(f"{what} raised {error!r} instead of {kind.__name__}", party=party) from error
    raise ConformanceError(f"{what} did not raise {kind.__name__}", party=party)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor, so that NaN and -0.0 compare."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, device="cpu")
