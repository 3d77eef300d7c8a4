"""The names of the directories and files of durable checkpoints. This file reads and writes names, no files.

    step-000000000120.q3-1a2b3c4d/      the checkpoint of step 120, as saved in quorum 3
        __r0_g1_f0.distcp               what replica 0's rank 1 wrote: DCP's records, with digests between them
        part-r0-g1-f0.json              its manifest, written last
        part-r1-g1-f1.json              replica 1's rank 1 wrote a share that it backs up, as the first of its backups
        differs-r1.txt                  in words: what ranks of replica 1 do not hold alike; written before
        .metadata                       DCP's, written by who found all parts there

A name that ends in `.tmp-` and digits is of a file that is being written, or never was.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import NamedTuple, SupportsIndex

from torchft_ckpt.errors import ConfigError

METADATA = ".metadata"
TEMPORARY = ".tmp-"
_ID = r"[0-9A-Za-z_-]{1,64}"
_DIRECTORY = re.compile(rf"\Astep-([0-9]{{12,18}})\.({_ID})\Z")
_PART = re.compile(r"\Apart-r([0-9]{1,7})-g([0-9]{1,7})-f([0-9]{1,4})\.json\Z")
_WRITTEN = re.compile(
    r"\A(?:\.metadata|differs-r[0-9]{1,7}\.txt|part-r[0-9]{1,7}-g[0-9]{1,7}-f[0-9]{1,4}\.json|__r[0-9]{1,7}_g[0-9]{1,7}_f[0-9]{1,4}\.distcp)"
    r"(?:\.tmp-[0-9]{1,12})?\Z"
)
_OF_WRITER = re.compile(r"\A(?:part-|__)r([0-9]{1,7})[-_]g([0-9]{1,7})[-_]f[0-9]{1,4}\.")


class CheckpointName(NamedTuple):
    """The step, and what tells this save of it from another one. Sorts as checkpoints do."""

    step: int
    save_id: str

    def __str__(self) -> str:
        return f"step-{self.step:012d}.{self.save_id}"

    def differs(self, replica: int) -> str:
        """The path of what says how ranks of a replica differ."""
        return f"{self}/differs-r{replica}.txt"


class PartName(NamedTuple):
    """The writer of a part, and its number among the holders of the share: 0 is the owner, others are its backups.

    In a checkpoint of an earlier version parts from 1 on are the holes that their writer has filled, in their order.
    """

    replica: int
    rank: int
    fill: int

    @property
    def manifest(self) -> str:
        """The name of its manifest."""
        return f"part-r{self.replica}-g{self.rank}-f{self.fill}.json"

    @property
    def data(self) -> str:
        """The name of its file of records."""
        return f"__r{self.replica}_g{self.rank}_f{self.fill}.distcp"


def parts_in(names: Iterable[str]) -> list[PartName]:
    """Return the parts whose manifests are among the files of a checkpoint."""
    return [part for name in names if (part := parse_part(name)) is not None and part.manifest == name]


def checkpoint_name(step: int, save_id: str) -> CheckpointName:
    """Return a checkpoint's name.

    Raises:
        ConfigError: it would be none.
    """
    name = CheckpointName(step, save_id)
    if parse_checkpoint(str(name)) != name:
        raise ConfigError(
            f"step={step}, save_id={save_id!r}: a step of 0 to 18 digits, and 1 to 64 of 0-9A-Za-z_- were expected",
            "save_id",
        )
    return name


def parse_checkpoint(name: str) -> CheckpointName | None:
    """Return what the name of a directory says; None where it is no checkpoint's."""
    match = _DIRECTORY.match(name)
    return None if match is None else CheckpointName(int(match[1]), match[2])


def parse_part(name: str) -> PartName | None:
    """Return what the name of a file says; None where it is no manifest's."""
    match = _PART.match(name)
    return None if match is None else PartName(int(match[1]), int(match[2]), int(match[3]))


def writer_in(name: str) -> tuple[int, int] | None:
    """Return the replica and the rank of whoever wrote a file, or is writing it; None where its name does not say."""
    match = _OF_WRITER.match(name)
    return None if match is None else (int(match[1]), int(match[2]))


def may_be_removed(name: str) -> bool:
    """Whether this library writes files of this name into a checkpoint's directory. Nothing else there is ever removed."""
    return _WRITTEN.match(name) is not None


def plain_step(step: SupportsIndex | None) -> int | None:
    """Return a step as a plain int: numpy's go into no manifest.

    Raises:
        ConfigError: it is no whole number, or negative.
    """
    if step is None:
        return None
    try:
        number = operator.index(step)
    except TypeError as error:
        raise ConfigError(f"step={step!r:.80}: a whole number was expected", "step") from error
    if number < 0:
        raise ConfigError(f"step={number}: a step is not negative", "step")
    return number
