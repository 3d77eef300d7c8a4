"""Which checkpoint several members read together: the newest that is whole over all that they can see, each its own disks.

Each says which parts it sees; of a part that not all can read, it hands its manifest on. So every member comes to the same
manifests, and finds by itself whether they are whole. Who is there is settled after each of these steps, so that one that dies
in between is left out by all others alike, and what only it could read does not count.

It reads and compares manifests; no tensor is read here.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash

from torchft_ckpt.checkpointing.durable.format.manifest import PartManifest, decode_part, encode_part
from torchft_ckpt.checkpointing.durable.names import CheckpointName, PartName, parse_checkpoint, parse_part
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    Part,
    list_checkpoints,
    read_checkpoint,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.durable.together.exchange import Meeting
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, SourceRefusedError, StorageError

logger = logging.getLogger(__name__)
MAX_CANDIDATES = 64
"""Checkpoints that a member speaks of, the newest; retention keeps fewer."""
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member sees of checkpoints, and where it serves what it reads."""

    address: Annotated[str, msgspec.Meta(max_length=300)]
    identity: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """Of the server there: who does not prove the token under this name is another."""
    nonce: Annotated[str, msgspec.Meta(max_length=64)]
    """Made up for this meeting."""
    checkpoints: dict[_Name, list[_Name]]
    """By the name of the directory, the names of the manifests in it."""


class _Shown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of one checkpoint that a member can read."""

    parts: list[_Name]
    manifests: dict[_Name, str]
    """Of those that not all members see: the files of their manifests."""


_decode_seen = msgspec.json.Decoder(Seen).decode
_decode_shown = msgspec.json.Decoder(_Shown).decode


@dataclass(frozen=True, slots=True)
class Agreement:
    """A checkpoint that members read together."""

    checkpoint: Checkpoint
    """All of its parts; without a storage those that cannot be read from here."""
    members: tuple[int, ...]
    """Who takes part, ascending."""
    readers: Mapping[PartName, frozenset[int]] | None
    """Who can read which part; None where all of them can read everything."""
    identities: Mapping[int, str]
    """Of the servers of the others."""


def agree(
    storages: Sequence[Storage],
    meeting: Meeting,
    *,
    address: str,
    identity: str,
    step: int | None = None,
    but: Collection[str] = (),
) -> Agreement:
    """Find the newest checkpoint that is whole over all members together. All of them call it.

    Args:
        storages: what this member can read.
        meeting: with the others; it knows their addresses from then on.
        address: where this member will serve what it reads.
        identity: of the server there.
        step: only checkpoints of this step.
        but: names of checkpoints that are known to be damaged; the same for all members.

    Raises:
        CheckpointNotFoundError: there is none; the message says what was skipped, and why. All members come to the same.
        SourceLostError, SourceRefusedError: this member is not with the others any more.
    """
    own = Seen(address, identity, secrets.token_hex(16), _look(storages, step))
    meeting.say("seen", own)
    heard = meeting.hear("seen", _decode_seen, range(meeting.num_members))
    members, _ = meeting.settle("seen settled", heard)
    heard.update(meeting.hear("seen", _decode_seen, [member for member in members if member not in heard]))
    meeting.addresses.update({member: one.address for member, one in heard.items()})
    seen = {member: one for member, one in {**heard, meeting.member: own}.items() if member in members}
    meeting.bind({member: one.nonce for member, one in seen.items()})
    _say_who_is_absent(meeting, members)
    skipped: list[str] = []
    for name in _candidates(seen.values(), step):
        if str(name) in but:
            continue
        mine = read_checkpoint(storages, name)
        union = _Union(mine, meeting.member, _show(mine, _seen_by_all(seen.values(), name), meeting, members))
        members, reason = _settle_whole(meeting, members, union)
        if reason is None:
            identities = {member: one.identity for member, one in seen.items()}
            return Agreement(union.checkpoint, members, union.readers_of(members), identities)
        logger.warning("checkpoint %s is skipped: over all %d members %s", name, len(members), reason)
        skipped.append(f"{name}: {reason}")
    what = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
    where = ", ".join(storage.location for storage in storages) or "no storage"
    why = f" (skipped: {'; '.join(skipped[:5])})" if skipped else ""
    raise CheckpointNotFoundError(f"there is {what} over {len(members)} members together; here {where}{why}", where)


class _Union:
    """The parts of one checkpoint that anybody can read: those of this member, and what others show.

    Args:
        mine: what this member can read.
        member: its number.
        others: what others show, by member.
    """

    def __init__(self, mine: Checkpoint, member: int, others: Mapping[int, _Shown]) -> None:
        self.others = dict(others)
        self._mine = mine
        self._member = member
        self._put_together()

    def keep(self, members: Sequence[int], late: Mapping[int, _Shown]) -> None:
        """Count only what these members can read, with what some of them have shown since."""
        self.others = {member: shown for member, shown in {**self.others, **late}.items() if member in members}
        self._put_together()

    def readers_of(self, members: Sequence[int]) -> Mapping[PartName, frozenset[int]] | None:
        """Return who can read which part; None where all members can read all of them."""
        everybody = frozenset(members)
        return None if all(able >= everybody for able in self._readers.values()) else self._readers

    def word(self) -> str:
        """Return a digest of what all members have to come to alike, and whether it is whole."""
        hasher = xxhash.xxh3_128()
        for part in {part.name: part for part in self.checkpoint.parts}.values():
            hasher.update(encode_part(part.manifest))
        return f"{hasher.hexdigest()} {'whole' if self.reason is None else 'not whole'}"

    def _put_together(self) -> None:
        readers: dict[PartName, set[int]] = {}
        for part in self._mine.parts:
            readers.setdefault(part.name, set()).add(self._member)
        left_aside = [*self._mine.left_aside]
        elsewhere: dict[PartName, PartManifest] = {}
        for other, shown in sorted(self.others.items()):
            for file in shown.parts:
                name = parse_part(file)
                if name is None:
                    continue
                text = shown.manifests.get(file)
                if name not in readers and text is not None:
                    try:
                        elsewhere[name] = decode_part(text.encode(), self._mine.name, name)
                    except CheckpointDamagedError as error:
                        left_aside.append(f"as member {other} shows it: {error}")
                if name in readers or name in elsewhere:
                    readers.setdefault(name, set()).add(other)
        parts = [*self._mine.parts, *(Part(manifest, None) for manifest in elsewhere.values())]
        self.checkpoint = Checkpoint(self._mine.name, parts, left_aside)
        self.reason = why_not_whole(self.checkpoint)
        self._readers = {part: frozenset(able) for part, able in readers.items()}


def _show(mine: Checkpoint, seen_by_all: frozenset[str], meeting: Meeting, members: Sequence[int]) -> dict[int, _Shown]:
    """Show the others what can be read here; return what they show, those that do."""
    manifests = {part.name.manifest: part.manifest for part in mine.parts}
    handed_on = {
        file: encode_part(manifest).decode() for file, manifest in manifests.items() if file not in seen_by_all
    }
    topic = f"shown {mine.name}"
    meeting.say(topic, _Shown([*manifests], handed_on))
    return meeting.hear(topic, _decode_shown, members)


def _settle_whole(meeting: Meeting, members: Sequence[int], union: _Union) -> tuple[tuple[int, ...], str | None]:
    """Settle who is still there and whether the checkpoint is whole over these; returns why not, if not.

    Raises:
        SourceRefusedError: this member comes to another answer than the others.
    """
    name = union.checkpoint.name
    word = union.word()
    present = [member for member in members if member in union.others]
    members, settled = meeting.settle(f"settled {name}", present, word)
    if settled != word:
        # Somebody died meanwhile, and not all have heard of it, or from it.
        late = [member for member in members if member not in union.others]
        union.keep(members, meeting.hear(f"shown {name}", _decode_shown, late))
        word = union.word()
        if settled != word:
            raise SourceRefusedError(
                f"the others see {name} to be {settled.partition(' ')[2] or 'something'}, with other parts than here: {word}",
                str(name),
            )
    return members, union.reason


def _look(storages: Sequence[Storage], step: int | None) -> dict[str, list[str]]:
    """Return, by the name of a checkpoint, the names of the manifests that can be read here."""
    found: dict[str, set[str]] = {}
    for storage in storages:
        try:
            wanted = [name for name in list_checkpoints(storage) if step is None or name.step == step]
            for name in wanted[:MAX_CANDIDATES]:
                parts = {entry for entry in storage.names(str(name)) if parse_part(entry) is not None}
                found.setdefault(str(name), set()).update(parts)
        except StorageError as error:
            logger.warning("storage %s is left aside: %s", storage.location, error)
    newest = sorted(found, reverse=True)[:MAX_CANDIDATES]
    return {name: sorted(found[name]) for name in newest}


def _candidates(seen: Iterable[Seen], step: int | None) -> list[CheckpointName]:
    names = {parsed for one in seen for name in one.checkpoints if (parsed := parse_checkpoint(name)) is not None}
    return sorted((name for name in names if step is None or name.step == step), reverse=True)


def _seen_by_all(seen: Iterable[Seen], name: CheckpointName) -> frozenset[str]:
    return frozenset.intersection(*(frozenset(one.checkpoints.get(str(name), ())) for one in seen))


def _say_who_is_absent(meeting: Meeting, members: Sequence[int]) -> None:
    absent = [str(member) for member in range(meeting.num_members) if member not in members]
    if absent:
        logger.warning(
            "members %s of %d did not come in time; the others read without them",
            ", ".join(absent),
            meeting.num_members,
        )
