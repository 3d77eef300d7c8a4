"""The names of dtypes on the wire: torch's own, without `torch.`. Quantized dtypes are not carried."""

from __future__ import annotations

import functools

import torch

from torchft_ckpt.errors import StateFormatError

_QUANTIZED = frozenset({"qint8", "qint32", "quint8", "quint4x2", "quint2x4"})


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a dtype, for example `bfloat16`."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {
    dtype_name(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and dtype_name(value) not in _QUANTIZED
}
"""Every dtype that this torch has and the format carries, by wire name."""

CARRIED_DTYPES = frozenset(DTYPES.values())


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a wire name.

    Raises:
        StateFormatError: this torch has no such dtype.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise StateFormatError(
            f"unknown dtype {name[:64]!r}: the source may run a newer torch", party="source"
        ) from None
