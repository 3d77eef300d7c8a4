"""Saves a state as one safetensors file, whole or not at all.

Tensors are named by their path in the tree. Everything that safetensors has no place for goes into its metadata, as JSON:
`torchft_ckpt.step`, `torchft_ckpt.values` (path to value, in the state format's nodes), `torchft_ckpt.tied` (name to the
name of the tensor that it was the same memory as; both are stored, as readers look for either), `torchft_ckpt.arrays` (names
that were numpy arrays).
`__metadata__` is safetensors' own name: a tensor of that path gets a number, as the second of two of one path does.
Views that share only some memory are stored each for itself. Tensors are written in the order of `in_file_order`, as their
bytes come: a state need not be all in memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from torchft_ckpt.checkpointing.state.dtypes import dtype_name
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.cli.output import leaves
from torchft_ckpt.errors import CheckpointError, ConfigError, UnsupportedValueError

RESERVED = "__metadata__"
"""The name that the header of a safetensors file keeps for itself: readers refuse a file with a tensor of that name."""
MAX_HEADER_BYTES = 90_000_000
"""Readers of safetensors refuse a header of more than 100 MB; some is left for the tensors' own entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a file."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    arrays: list[str] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    """Names in the file, and the paths of those that could not keep theirs because it is `RESERVED`."""


class PendingTensor(NamedTuple):
    """A tensor whose elements are not here yet."""

    name: str
    """In the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str | None = None
    """The name that it is read by, if that is another one."""

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_file_order(outlines: Iterable[PendingTensor]) -> list[PendingTensor]:
    """Return them as they lie in a file: larger elements first, so that each is aligned."""
    return sorted(outlines, key=lambda outline: (-outline.dtype.itemsize, outline.name))


def flatten(state: object) -> Content:
    """Return a state as named tensors, and the rest."""
    content = Content()
    taken: dict[str, int] = {}
    found: list[tuple[str, torch.Tensor]] = []
    for path, leaf in leaves(state):
        name = unused_name(path, taken)
        if isinstance(leaf, (np.ndarray, torch.Tensor)):
            name = name_of_tensor(name, taken, content.renamed)
        if isinstance(leaf, np.ndarray):
            content.arrays.append(name)
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, torch.Tensor):
            found.append((name, leaf))
        else:
            content.values[name] = TreeEncoder().encode(leaf, name)
    _note_tied(found, content.tied)
    content.tensors.update(found)
    return content


class SafetensorsFile:
    """The file to be, under a temporary name beside its place until it is whole. A context manager.

    Made first and written last, so that a place that cannot be written to is known before the state is fetched. Within it
    SIGTERM ends the process as `SystemExit` does (status 143), so that no temporary file is left; on the main thread, and
    unless somebody handles it already. What others put in its place meanwhile is not written to.

    Args:
        path: its place.
        force: whether what is there may be replaced.

    Raises:
        ConfigError: the place is taken or cannot be written to.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        self._path = path
        self._force = force
        self._temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:8]}.part")
        if path.is_dir():
            raise ConfigError(f"{path} is a directory; name a file in it", party=str(path))
        if not force and os.path.lexists(path):
            raise self._is_taken()
        self._handles_sigterm = _handle_sigterm()
        try:
            descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            self._leave_sigterm()
            raise ConfigError(f"{path} cannot be written: {error.strerror}", party=str(path)) from error
        self._file = os.fdopen(descriptor, "wb")

    def write(self, content: Content, step: int) -> int:
        """Write it all, put it in its place, and return its length in bytes. Raises as `write_stream`."""
        shapes = (PendingTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in content.tensors.items())
        outlines = in_file_order(shapes)
        chunks = (as_bytes(content.tensors[outline.name].contiguous()).numpy().data for outline in outlines)
        return self.write_stream(outlines, chunks, content, step)

    def write_stream(
        self, outlines: Sequence[PendingTensor], chunks: Iterable[memoryview], content: Content, step: int | None
    ) -> int:
        """Write tensors as their bytes come, put the file in its place, and return its length in bytes.

        Args:
            outlines: the tensors, `in_file_order`.
            chunks: their bytes, one tensor after the other, in C order; cut anywhere.
            content: the rest.
            step: of the state, where it is known.

        Raises:
            CheckpointError: it could not be written, for example because the disk is full; nothing is left behind.
            ConfigError: another file has come to its place meanwhile.
            UnsupportedValueError: safetensors cannot hold the dtype of a tensor, or so many values in a header.
            Also what `chunks` raises.
        """
        for outline in outlines:
            if _name_of(outline.dtype) is None:
                raise UnsupportedValueError(
                    f"tensor {outline.name!r}: safetensors cannot hold dtype {dtype_name(outline.dtype)}; nothing was written",
                    outline.name,
                )
        header = _header(outlines, self._metadata(content, step))
        try:
            file = self._file
            file.write(header)
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            num_bytes = file.tell()
            self._check_is_ours(self._temporary)
            self._put_in_place()
            self._check_is_ours(self._path)
        except CheckpointError:  # of what was to be written; some are OSErrors as well
            raise
        except FileExistsError as error:
            raise self._is_taken() from error
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be written: {error}", party=str(self._path)) from error
        return num_bytes

    def _metadata(self, content: Content, step: int | None) -> dict[str, str]:
        metadata = {
            "format": "pt",
            "torchft_ckpt.values": json.dumps(content.values, separators=(",", ":")),
            "torchft_ckpt.tied": json.dumps(content.tied),
            "torchft_ckpt.arrays": json.dumps(content.arrays),
        }
        if step is not None:
            metadata["torchft_ckpt.step"] = str(step)
        if sum(map(len, metadata.values())) > MAX_HEADER_BYTES:
            raise UnsupportedValueError(
                f"{self._path}: the values that are no tensors take more than {MAX_HEADER_BYTES} bytes of JSON, "
                "which is more than a safetensors header holds",
                party=str(self._path),
            )
        return metadata

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # of the disk, which was said before
            self._file.close()
        with contextlib.suppress(FileNotFoundError):  # it is in its place
            self._temporary.unlink()
        self._leave_sigterm()

    def _leave_sigterm(self) -> None:
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _put_in_place(self) -> None:
        if self._force:
            os.replace(self._temporary, self._path)
        else:
            self._rename_to_new()
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _rename_to_new(self) -> None:
        """Rename, but not over another file, as a rename does."""
        try:
            os.link(self._temporary, self._path)
        except FileExistsError:
            raise
        except OSError as error:  # a file system without links
            if os.path.lexists(self._path):
                raise FileExistsError(error.errno, "is there already", str(self._path)) from error
            os.replace(self._temporary, self._path)
        else:
            self._temporary.unlink()

    def _check_is_ours(self, path: Path) -> None:
        if not os.path.samestat(os.lstat(path), os.fstat(self._file.fileno())):
            raise OSError(f"somebody else has replaced {path}, and may write to this directory")

    def _is_taken(self) -> ConfigError:
        return ConfigError(f"{self._path} is there already; --force replaces it", party=str(self._path))


def _handle_sigterm() -> bool:
    """Have SIGTERM raise `SystemExit`, where nobody else handles it; return whether that is so now."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    return True


def unused_name(path: str, taken: dict[str, int]) -> str:
    """Return the path, numbered where two leaves have the same one (`{1: a, "1": b}`).

    Args:
        path: of a leaf.
        taken: names that there are, each with the number that was last looked at for it; 1 to begin with. Changed.
    """
    name, number = path, taken.get(path, 0)
    while name in taken:
        number += 1
        name = f"{path}#{number}"
    taken[path] = max(number, 1)
    taken[name] = 1
    return name


def name_of_tensor(name: str, taken: dict[str, int], renamed: dict[str, str]) -> str:
    """Return the name that a tensor can have in a file: a number is added to `RESERVED`, and noted in `renamed`."""
    if name != RESERVED:
        return name
    other = unused_name(name, taken)
    renamed[other] = name
    return other


def describe_renamed(content: Content) -> list[str]:
    """Return a sentence for each tensor that is called otherwise in the file than in the state."""
    return [
        f"{path} is called {name} in the file: {path} is safetensors' own name"
        for name, path in content.renamed.items()
    ]


@functools.cache
def _name_of(dtype: torch.dtype) -> str | None:
    """Return what safetensors calls a dtype; None where it does not take it, or gives back another.

    It is asked itself, because versions differ.
    """
    try:
        data = save({"x": torch.empty(2, dtype=dtype, device="cpu")})
        name: str = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"]
        return name if load(data)["x"].dtype == dtype else None
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError):
        return None


def _header(outlines: Sequence[PendingTensor], metadata: dict[str, str]) -> bytes:
    """Return the beginning of a file: the length of what follows in 8 bytes, and JSON, filled up so that data are aligned."""
    members: dict[str, object] = {RESERVED: metadata}
    end = 0
    for name, dtype, shape, _ in outlines:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        members[name] = {"dtype": _name_of(dtype), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(members, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _note_tied(tensors: Sequence[tuple[str, torch.Tensor]], tied: dict[str, str]) -> None:
    """Note in `tied` which tensors are the same view of the same memory as one before them."""
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors:
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and view in first:
            tied[name] = first[view]
        else:
            first[view] = name
