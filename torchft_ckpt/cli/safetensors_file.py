"""Saves a state as one safetensors file, whole or not at all.

Tensors are named by their path in the tree. Everything that safetensors has no place for goes into its metadata, as JSON:
`torchft_ckpt.step`, `torchft_ckpt.values` (path to value, in the state format's nodes), `torchft_ckpt.tied` (name to the
name of the tensor that it was the same memory as; both are stored, as readers look for either), `torchft_ckpt.arrays` (names
that were numpy arrays).
`__metadata__` is safetensors' own name: a tensor of that path gets a number, as the second of two of one path does.
Views that share only some memory are stored each for itself. Tensors are written in the order of `in_file_order`, as their
bytes come: `safetensors.torch.save_file` would need all of a state in memory.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from torchft_ckpt.checkpointing.durable.storage.local_storage import OsSystem
from torchft_ckpt.checkpointing.state.dtypes import dtype_name
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.checkpointing.state.tree import TreeEncoder
from torchft_ckpt.cli.output import format_bytes, format_count, leaves
from torchft_ckpt.core.text import one_line
from torchft_ckpt.errors import CheckpointError, ConfigError, UnsupportedValueError

RESERVED = "__metadata__"
"""The name that the header of a safetensors file keeps for itself: readers refuse a file with a tensor of that name."""
_MAX_HEADER_BYTES = 100_000_000
"""Readers of safetensors refuse a longer one."""
_VALUE_BYTES = 90_000_000
"""Of a header, for what is added; some is left for tensors that are read later."""
_ENTRY_BYTES = 100
"""Of a tensor in the header, beside its name."""
_MAX_REPEATED_BYTES = 1024**3
"""Of a tensor inside of a value: what is expanded is written out in full."""


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


class Content:
    """The content of a file, leaf by leaf.

    Args:
        pending: tensors that are read later; they may be among the leaves that are added as well, by their paths.
    """

    def __init__(self, pending: Iterable[PendingTensor] = ()) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Those that are in memory, by their names in the file."""
        self.tied: dict[str, str] = {}
        self.arrays: list[str] = []
        self.values: dict[str, object] = {}
        self.renamed: dict[str, str] = {}
        """Names in the file, and the paths of those that could not keep theirs because it is `RESERVED`."""
        pending = [*pending]
        self._taken = {outline.name: 1 for outline in pending}
        self.pending = [one._replace(name=self._not_reserved(one.name), path=one.name) for one in pending]
        self._room = _VALUE_BYTES
        self._known = {one.path: one.name for one in self.pending}

    def add(self, path: str, leaf: object) -> None:
        """Add a leaf.

        Raises:
            UnsupportedValueError: no file can hold it, or this one has no room left for it. Nothing was added.
        """
        encoder = TreeEncoder()
        node = encoder.encode(leaf, path)
        # The values are a JSON text inside of one.
        num_bytes = _ENTRY_BYTES + len(path) if encoder.tensors else len(json.dumps(json.dumps({path: node})))
        if num_bytes > self._room:
            raise UnsupportedValueError(
                f"{path[:120]}: it takes more than what is left of {_VALUE_BYTES} bytes that a header holds of values",
                path[:120],
            )
        if not encoder.tensors:
            self.values[unused_name(path, self._taken)] = node
            self._room -= num_bytes
            return
        name, tensor = self._known.get(path), encoder.tensors[0][1]
        if name is None:
            repeated = tensor.nbytes - tensor.untyped_storage().nbytes()
            if repeated > _MAX_REPEATED_BYTES:
                raise UnsupportedValueError(
                    f"{path}: it repeats {repeated} bytes, more than {_MAX_REPEATED_BYTES}", path
                )
            name = self._not_reserved(unused_name(path, self._taken))
            self.tensors[name] = tensor.detach()
        if encoder.arrays:
            self.arrays.append(name)
        self._room -= num_bytes

    def outlines(self) -> list[PendingTensor]:
        """Return all tensors, in the order of the file."""
        here = (PendingTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items())
        return in_file_order([*self.pending, *here])

    def tell(self, path: Path, what: str, num_bytes: int, *, quiet: bool) -> None:
        """Say on standard error what is called otherwise in the file than in the state, and, unless `quiet`, what it has."""
        for name, own in self.renamed.items():
            print(one_line(f"{own} is called {name} in the file: {own} is safetensors' own name"), file=sys.stderr)
        if not quiet:
            tied = f" ({len(self.tied)} of them tied to another)" if self.tied else ""
            print(
                f"{path}: {what}, {format_count(len(self.pending) + len(self.tensors), 'tensor')}{tied}, "
                f"{format_count(len(self.values), 'value')}, {format_bytes(num_bytes)}",
                file=sys.stderr,
            )

    def metadata(self, step: int) -> dict[str, str]:
        """Return what goes into the header beside the tensors."""
        return {
            "format": "pt",
            "torchft_ckpt.step": str(step),
            "torchft_ckpt.values": json.dumps(self.values, separators=(",", ":")),
            "torchft_ckpt.tied": json.dumps(self.tied),
            "torchft_ckpt.arrays": json.dumps(self.arrays),
        }

    def _not_reserved(self, name: str) -> str:
        if name != RESERVED:
            return name
        other = unused_name(name, self._taken)
        self.renamed[other] = name
        return other


def flatten(state: object) -> Content:
    """Return a state as named tensors, and the rest."""
    content = Content()
    for path, leaf in leaves(state):
        content.add(path, leaf)
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in content.tensors.items():
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(view, name) != name:
            content.tied[name] = first[view]
    return content


class SafetensorsFile:
    """The file to be, under a temporary name beside its place until it is whole. A context manager.

    Made first and written last, so that a place that cannot be written to is known before the state is fetched. Within it
    SIGTERM ends the process as `SystemExit` does (status 143), so that no temporary file is left; on the main thread, and
    unless somebody handles it already. What others put in its place meanwhile is not written to.

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
        is_main = threading.current_thread() is threading.main_thread()
        self._handles_sigterm = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            self._file = self._temporary.open("xb")
        except OSError as error:
            self._leave_sigterm()
            raise ConfigError(f"{path} cannot be written: {error.strerror}", party=str(path)) from error

    def write(self, content: Content, step: int, chunks: Iterable[memoryview] | None = None) -> int:
        """Write it all, put the file in its place, and return its length in bytes.

        Args:
            step: of the state.
            chunks: the bytes of the tensors of `content.outlines()`, one after the other, in C order; cut anywhere. Default: all
                of them are in memory.

        Raises:
            CheckpointError: it could not be written, for example because the disk is full; nothing is left behind.
            ConfigError: another file has come to its place meanwhile.
            UnsupportedValueError: safetensors cannot hold the dtype of a tensor, or so many values in a header.
            Also what `chunks` raises.
        """
        outlines = content.outlines()
        header = _header(outlines, content.metadata(step))
        if chunks is None:
            chunks = (as_bytes(content.tensors[one.name].contiguous()).numpy().data for one in outlines)
        try:
            self._file.write(header)
            for chunk in chunks:
                self._file.write(chunk)
            self._file.flush()
            os.fsync(self._file.fileno())
            num_bytes = self._file.tell()
            self._check_is_ours(self._temporary)
            self._put_in_place()
            self._check_is_ours(self._path)
            OsSystem().fsync_directory(str(self._path.parent))
        except CheckpointError:  # of what was to be written; some are OSErrors as well
            raise
        except FileExistsError as error:
            raise self._is_taken() from error
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be written: {error}", party=str(self._path)) from error
        return num_bytes

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # of the disk, which was said before
            self._file.close()
        self._temporary.unlink(missing_ok=True)
        self._leave_sigterm()

    def _leave_sigterm(self) -> None:
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _put_in_place(self) -> None:
        """Rename, but not over another file unless that was asked for: a link fails if there is one."""
        try:
            if not self._force:
                os.link(self._temporary, self._path)
                return
        except FileExistsError:
            raise
        except OSError as error:  # a file system without links
            if os.path.lexists(self._path):
                raise self._is_taken() from error
        os.replace(self._temporary, self._path)

    def _check_is_ours(self, path: Path) -> None:
        if not os.path.samestat(os.lstat(path), os.fstat(self._file.fileno())):
            raise OSError(f"somebody else has replaced {path}, and may write to this directory")

    def _is_taken(self) -> ConfigError:
        return ConfigError(f"{self._path} is there already; --force replaces it", party=str(self._path))


def unused_name(path: str, taken: dict[str, int]) -> str:
    """Return the path, numbered where two leaves have the same one (`{1: a, "1": b}`).

    Args:
        taken: names that there are, each with the number that was last looked at for it; 1 to begin with. Changed.
    """
    name, number = path, taken.get(path, 0)
    while name in taken:
        number += 1
        name = f"{path}#{number}"
    taken[path] = max(number, 1)
    taken[name] = 1
    return name


@functools.cache
def _name_of(dtype: torch.dtype) -> str | None:
    """Return what safetensors calls a dtype; None if it does not take it, or gives back another.

    It is asked itself, because versions differ.
    """
    try:
        data = save({"x": torch.empty(2, dtype=dtype, device="cpu")})
        name: str = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"]
        return name if load(data)["x"].dtype == dtype else None
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError):
        return None


def _header(outlines: Sequence[PendingTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a file: the length of what follows in 8 bytes, and JSON, filled up so that data are aligned."""
    members: dict[str, object] = {RESERVED: metadata}
    end = 0
    for outline in outlines:
        if _name_of(outline.dtype) is None:
            raise UnsupportedValueError(
                f"tensor {outline.name!r}: safetensors cannot hold dtype {dtype_name(outline.dtype)}; nothing was written",
                outline.name,
            )
        start, end = end, end + outline.num_bytes
        members[outline.name] = {
            "dtype": _name_of(outline.dtype),
            "shape": list(outline.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(members, separators=(",", ":")).encode()
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedValueError(
            f"the names take {len(text)} bytes of JSON, more than the {_MAX_HEADER_BYTES} that a safetensors header holds; "
            "nothing was written",
            "names",
        )
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
