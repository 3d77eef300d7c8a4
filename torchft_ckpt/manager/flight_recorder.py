"""Dumps of torch's flight recorder: a folder for each quorum, so that those of a later one do not overwrite an earlier one's.

`TORCH_FR_DUMP_TEMP_FILE` names the file; the folder is named as torchft names it. With `TORCH_FR_DUMP_DYNAMIC_FILE_NAME` torch
looks at that name at each dump, and takes it as it is.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_FILE = "TORCH_FR_DUMP_TEMP_FILE"
_IS_READ_AT_EACH_DUMP = "TORCH_FR_DUMP_DYNAMIC_FILE_NAME"


@functools.cache
def _base() -> str | None:
    """Return the name that the script was started with; later ones are of this file."""
    return os.environ.get(_FILE)


def name_dumps(quorum_id: int, rank: int) -> None:
    """From now on the flight recorder dumps into `<TORCH_FR_DUMP_TEMP_FILE>_quorum_<quorum_id>/<rank>`, if that variable is set.

    Args:
        quorum_id: of the quorum that begins.
        rank: of this process among all ranks of all groups in the quorum.
    """
    base = _base()
    if not base:
        return
    folder = Path(f"{base}_quorum_{quorum_id}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("dumps of the flight recorder stay in %s: %s", os.environ.get(_FILE), error)
        return
    os.environ[_IS_READ_AT_EACH_DUMP] = "1"
    os.environ[_FILE] = str(folder / str(rank))
