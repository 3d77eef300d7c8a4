"""What the checks of a contract share: the error that names the broken promise, and how two states are compared."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchft_ckpt.errors import TorchftCkptError

_NUM_NAMED = 3


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


def require_equal(party: str, left: object, right: object, sentence: str) -> None:
    """See that two states are equal in every bit; the error says after the sentence where they differ.

    Raises:
        ConformanceError: they are not.
    """
    found = differences(left, right)
    require(party, found == [], f"{sentence}: {'; '.join(found[:_NUM_NAMED])}")


def differences(left: object, right: object, path: str = "state") -> list[str]:
    """Return the paths at which two states differ in type, dtype, shape or any bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return [f"{path}: {left.dtype}{tuple(left.shape)} != {right.dtype}{tuple(right.shape)}"]
        return [] if torch.equal(bits_of(left), bits_of(right)) else [f"{path}: bits differ"]
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return [f"{path}: keys {list(left)} != {list(right)}"]
        return [found for key in left for found in differences(left[key], right[key], f"{path}.{key}")]
    if isinstance(left, (list, tuple)) and type(left) is type(right) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: lengths {len(left)} != {len(right)}"]
        pairs = zip(left, right, strict=True)
        return [found for i, (a, b) in enumerate(pairs) for found in differences(a, b, f"{path}.{i}")]
    return [] if type(left) is type(right) and repr(left) == repr(right) else [f"{path}: {left!r} != {right!r}"]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor, so that NaN and -0.0 compare."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, device="cpu")
