"""Which kind of place a path or a URL is."""

from __future__ import annotations

import os

from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import FsspecStorage
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.errors import ConfigError


def open_storage(location: str | os.PathLike[str], **storage_options: object) -> Storage:
    """Return a directory of this machine, or for `scheme://...` what fsspec knows under that scheme.

    Args:
        location: a path, of which a leading `~` is the user's home, or a URL of fsspec. Need not be there yet.
        storage_options: of fsspec's file system (credentials, endpoint).

    Raises:
        ConfigError: fsspec does not know the scheme, what it needs is not installed, or it refuses the options.
        StorageError: fsspec connects at once to such a place, and could not.
    """
    text = os.fspath(location)
    if "://" in text or "::" in text:
        return FsspecStorage(text, **storage_options)
    if storage_options:
        raise ConfigError(
            f"location={text!r} is a local path: it takes no options ({', '.join(sorted(storage_options))})", "location"
        )
    if not text:
        raise ConfigError("location='': a path or a URL was expected", "location")
    return LocalStorage(os.path.expanduser(text))
