"""Which checkpoint members read together: the first member chooses it from what all of them see, and publishes one plan.

Each member says which manifests it sees. The first member goes through the checkpoints, the newest first: it reads the
manifests that it can read, and asks the others for those that only they can, as those on their disks. The first checkpoint
that is whole is the plan. It carries all manifests, so the others have the same ones without reading them, and says who can
read which part.

It reads manifests; no tensor is read here.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from torchft_ckpt.checkpointing.durable.cooperative_read.rendezvous import LEADER, MAX_REASON, Rendezvous, told
from torchft_ckpt.checkpointing.durable.format.manifest import PartManifest, decode_part, encode_part
from torchft_ckpt.checkpointing.durable.names import CheckpointName, PartName, parse_checkpoint, parse_part
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    Checkpoint,
    SavedPart,
    list_checkpoints,
    read_checkpoint,
    why_not_whole,
)
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    SourceLostError,
    SourceRefusedError,
    StorageError,
)

logger = logging.getLogger(__name__)
MAX_CANDIDATES = 64
"""Checkpoints that a member speaks of, the newest; retention keeps fewer."""
_BATCH_BYTES = 64 * 1024 * 1024
_MAX_BATCHES = 32
_MAX_PARTS = 1 << 16
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Member = Annotated[int, msgspec.Meta(ge=0)]


class Contact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address at which a member serves the values that it reads."""

    address: Annotated[str, msgspec.Meta(max_length=300)]
    identity: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """Of the server there: a server that does not prove the token under this name is another."""
    nonce: Annotated[str, msgspec.Meta(max_length=64)]
    """Made up for this start."""


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member is here."""

    contact: Contact
    checkpoints: Annotated[
        dict[_Name, Annotated[list[_Name], msgspec.Meta(max_length=_MAX_PARTS)]],
        msgspec.Meta(max_length=MAX_CANDIDATES),
    ]
    """The manifests that it sees, by name, under the name of their checkpoint. The first member lists none."""


class _Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the first member: who takes part."""

    members: dict[_Member, Contact]


class _PlanQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="question"):
    """Of the first member: manifests that it cannot read and others see."""

    checkpoint: _Name
    files: list[_Name]


class _Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="plan"):
    """Of the first member: what all read. The manifests follow, in batches."""

    checkpoint: _Name
    num_batches: Annotated[int, msgspec.Meta(ge=0, le=_MAX_BATCHES)]
    readers: dict[_Name, list[_Member]]
    """The members that can read a part, by its manifest's name; parts that all can read are not in it."""


class _NoPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="no plan"):
    """Of the first member: there is nothing to read, or it cannot go on."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    is_not_found: bool


class _Manifests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    texts: dict[_Name, str]


_decode_hello = msgspec.json.Decoder(_Hello).decode
_decode_start = msgspec.json.Decoder(_Start).decode
_decode_word = msgspec.json.Decoder(_PlanQuestion | _Plan | _NoPlan).decode
_decode_manifests = msgspec.json.Decoder(_Manifests).decode


@dataclass(frozen=True, slots=True)
class Agreement:
    """A checkpoint that members read together."""

    checkpoint: Checkpoint
    """All of its parts; without a storage those that cannot be read from here."""
    members: tuple[int, ...]
    """The members that take part, ascending."""
    readers: Mapping[PartName, frozenset[int]] | None
    """The members that can read each part; None where all of them can read everything."""
    identities: Mapping[int, str]
    """Of the servers of the others."""


class Planner:
    """One member's part in choosing a checkpoint. `meet` once, then `choose`, again where the chosen one is damaged.

    Args:
        rendezvous: with the others; it knows their addresses from then on.
        address: where this member will serve what it reads.
        step: only checkpoints of this step.
    """

    def __init__(
        self, storages: Sequence[Storage], rendezvous: Rendezvous, *, address: str, identity: str, step: int | None
    ) -> None:
        self._storages = storages
        self._rendezvous = rendezvous
        self._step = step
        self._contact = Contact(address, identity, secrets.token_hex(16))
        self._contacts: Mapping[int, Contact] = {}
        self._seen: dict[int, Mapping[str, Sequence[str]]] = {}
        """Of the first member alone: what each sees."""
        self._failure: StorageError | None = None
        """Why none of the storages here could be listed."""
        self._num_words = 0

    def meet(self) -> bool:
        """Say that this member is here; return whether the first member has counted it in, and said so in time.

        Raises:
            SourceLostError: the first member is gone, or the store.
        """
        meeting = self._rendezvous
        seen = {} if meeting.leads else self._look()
        meeting.publish("hello", _Hello(self._contact, seen))
        if meeting.leads:
            own = self._look()
            hellos = meeting.collect("hello", _decode_hello, range(meeting.num_members))
            self._seen = {LEADER: own, **{member: hello.checkpoints for member, hello in hellos.items()}}
            start = _Start({LEADER: self._contact, **{member: hello.contact for member, hello in hellos.items()}})
            meeting.publish("start", start)
            self._begin(start)
            return True
        leader = meeting.ask_leader("hello", _decode_hello)
        if leader is None:
            return False
        start_of_all = meeting.ask_leader("start", _decode_start)
        if start_of_all is not None:
            self._begin(start_of_all)
        return self._is_counted_in()

    def learn_start(self, *, patience_s: float | None = None) -> None:
        """Learn from the first member who takes part, where that is not known yet.

        Args:
            patience_s: see `Rendezvous.ask_leader`.

        Raises:
            SourceLostError: the first member is gone, or has not said so in time a second time.
        """
        if not self._contacts:
            self._begin(self._rendezvous.agree("start", _decode_start, patience_s=patience_s))

    def choose(self, damaged: Collection[str]) -> Agreement | None:
        """Choose the newest checkpoint that is whole over all members together. All of them call it.

        Args:
            damaged: names of checkpoints that are known to be damaged; the same for all members.

        Returns:
            what to read; None where the first member has said nothing in time.

        Raises:
            CheckpointNotFoundError: there is none; the message says what was skipped, and why. All members come to the same.
            SourceLostError: the first member is gone or cannot go on, or the store is gone.
            SourceRefusedError: the first member has said something that cannot be used.
            StorageError: this is the first member, none of its storages could be listed, and nobody sees a checkpoint.
        """
        if not self._rendezvous.leads:
            return self._follow()
        try:
            return self._lead(damaged)
        except BaseException as error:
            is_not_found = isinstance(error, CheckpointNotFoundError)
            with contextlib.suppress(SourceLostError):
                self._publish_word(_NoPlan(told(str(error)), is_not_found))
            raise

    def _look(self) -> dict[str, list[str]]:
        found: dict[str, set[str]] = {}
        failures: list[StorageError] = []
        for storage in self._storages:
            try:
                wanted = [name for name in list_checkpoints(storage) if self._step in (None, name.step)]
                for name in wanted[:MAX_CANDIDATES]:
                    parts = {entry for entry in storage.names(str(name)) if parse_part(entry) is not None}
                    found.setdefault(str(name), set()).update(parts)
            except StorageError as error:
                failures.append(error)
                logger.warning("storage %s is left aside: %s", storage.location, error)
        if failures and len(failures) == len(self._storages):
            self._failure = failures[0]
        newest = sorted(found, reverse=True)[:MAX_CANDIDATES]
        return {name: sorted(found[name]) for name in newest}

    def _is_counted_in(self) -> bool:
        return self._contacts.get(self._rendezvous.member) == self._contact

    def _begin(self, start: _Start) -> None:
        self._contacts = {
            member: contact
            for member, contact in sorted(start.members.items())
            if member < self._rendezvous.num_members
        }
        self._rendezvous.addresses.update({member: contact.address for member, contact in self._contacts.items()})
        self._rendezvous.bind({member: contact.nonce for member, contact in self._contacts.items()})

    def _publish_word(self, word: _PlanQuestion | _Plan | _NoPlan) -> None:
        self._rendezvous.publish(f"word {self._num_words}", word)
        self._num_words += 1

    # The first member

    def _lead(self, damaged: Collection[str]) -> Agreement:
        num_members = len(self._contacts)
        absent = [str(member) for member in range(self._rendezvous.num_members) if member not in self._contacts]
        if absent and not damaged:
            logger.warning(
                "members %s of %d did not come in time; the others read without them",
                ", ".join(absent),
                self._rendezvous.num_members,
            )
        skipped: list[str] = []
        names = {
            parsed for seen in self._seen.values() for name in seen if (parsed := parse_checkpoint(name)) is not None
        }
        if not names and self._failure is not None:
            raise self._failure
        for name in sorted(names, reverse=True):
            if str(name) in damaged or self._step not in (None, name.step):
                continue
            checkpoint, readers = self._put_together(name)
            reason = why_not_whole(checkpoint)
            if reason is None:
                return self._publish(checkpoint, readers)
            logger.warning("checkpoint %s is skipped: over all %d members %s", name, num_members, reason)
            skipped.append(f"{name}: {reason}")
        what = "no whole checkpoint" if self._step is None else f"no whole checkpoint of step {self._step}"
        where = ", ".join(storage.location for storage in self._storages) or "no storage"
        why = f" (skipped: {'; '.join(skipped[:5])})" if skipped else ""
        raise CheckpointNotFoundError(
            f"there is {what} over {num_members} members together; at member {LEADER} {where}{why}", where
        )

    def _put_together(self, name: CheckpointName) -> tuple[Checkpoint, dict[PartName, set[int]]]:
        """Return the parts of a checkpoint that anybody can read, and who can read which."""
        mine = read_checkpoint(self._storages, name)
        left_aside = [*mine.left_aside]
        readers = {part.name: {LEADER} for part in mine.parts}
        only_others: dict[PartName, set[int]] = {}
        for member, seen in self._seen.items():
            for file in seen.get(str(name), ()):
                part = parse_part(file)
                if member != LEADER and part is not None and part.manifest == file:
                    (readers if part in readers else only_others).setdefault(part, set()).add(member)
        elsewhere: dict[PartName, PartManifest] = {}
        for member, text, part in self._ask_for(name, only_others):
            try:
                manifest = decode_part(text.encode(), name, part)
            except CheckpointDamagedError as error:
                left_aside.append(f"as member {member} shows it: {error}")
                continue
            if elsewhere.setdefault(part, manifest) == manifest:
                readers.setdefault(part, set()).add(member)
        parts = [*mine.parts, *(SavedPart(manifest, None) for manifest in elsewhere.values())]
        return Checkpoint(name, parts, left_aside), readers

    def _ask_for(self, name: CheckpointName, parts: Mapping[PartName, set[int]]) -> Iterator[tuple[int, str, PartName]]:
        if not parts:
            return
        topic = f"shown {self._num_words}"
        self._publish_word(_PlanQuestion(str(name), [part.manifest for part in sorted(parts)]))
        asked = set().union(*parts.values())
        for member, shown in sorted(self._rendezvous.collect(topic, _decode_manifests, sorted(asked)).items()):
            for part in sorted(parts):
                if part.manifest in shown.texts:
                    yield member, shown.texts[part.manifest], part

    def _publish(self, checkpoint: Checkpoint, readers: Mapping[PartName, set[int]]) -> Agreement:
        everybody = {*self._contacts}
        batches: list[dict[str, str]] = [{}]
        num_bytes = 0
        for part in checkpoint.parts:
            text = encode_part(part.manifest).decode()
            num_bytes += len(text)
            if num_bytes > _BATCH_BYTES and batches[-1]:
                batches.append({})
                num_bytes = len(text)
            batches[-1][part.name.manifest] = text
        if len(batches) > _MAX_BATCHES:
            raise CheckpointError(f"the manifests of {checkpoint.name} are too long to be told", str(checkpoint.name))
        for number, batch in enumerate(batches):
            self._rendezvous.publish(f"manifests {self._num_words} {number}", _Manifests(batch))
        partial = {part.manifest: sorted(able) for part, able in readers.items() if not able >= everybody}
        plan = _Plan(str(checkpoint.name), len(batches), partial)
        self._publish_word(plan)
        return self._agreement(checkpoint, plan)

    # The others

    def _follow(self) -> Agreement | None:
        while True:
            number = self._num_words
            word = self._rendezvous.ask_leader(f"word {number}", _decode_word)
            self._num_words += 1
            if word is None:
                return None
            if isinstance(word, _NoPlan):
                if word.is_not_found:
                    raise CheckpointNotFoundError(word.reason, f"member {LEADER}")
                raise SourceLostError(f"member {LEADER}, which leads the cold start, failed: {word.reason}", "member 0")
            name = parse_checkpoint(word.checkpoint)
            if name is None:
                raise SourceRefusedError(f"member {LEADER} names no checkpoint: {word.checkpoint[:80]!r}", "member 0")
            if isinstance(word, _Plan):
                return self._take(word, name, number)
            self._show(word, name, number)

    def _show(self, question: _PlanQuestion, name: CheckpointName, number: int) -> None:
        wanted = {*question.files}
        parts = read_checkpoint(self._storages, name).parts
        texts = {
            part.name.manifest: encode_part(part.manifest).decode() for part in parts if part.name.manifest in wanted
        }
        self._rendezvous.publish(f"shown {number}", _Manifests(texts))

    def _take(self, plan: _Plan, name: CheckpointName, number: int) -> Agreement | None:
        parts: list[SavedPart] = []
        where = _where(self._storages, name)
        for batch in range(plan.num_batches):
            manifests = self._rendezvous.ask_leader(f"manifests {number} {batch}", _decode_manifests)
            if manifests is None:
                return None
            for file, text in manifests.texts.items():
                part = parse_part(file)
                if part is None:
                    raise SourceRefusedError(f"member {LEADER} names no part: {file!r}", "member 0")
                try:
                    manifest = decode_part(text.encode(), name, part)
                except CheckpointDamagedError as error:
                    raise SourceRefusedError(f"as member {LEADER} publishes it: {error}", "member 0") from error
                parts += [SavedPart(manifest, storage) for storage in where.get(file, [None])]
        return self._agreement(Checkpoint(name, parts), plan)

    # Both

    def _agreement(self, checkpoint: Checkpoint, plan: _Plan) -> Agreement:
        everybody = frozenset(self._contacts)
        readers = {part.name: frozenset(plan.readers.get(part.name.manifest, everybody)) for part in checkpoint.parts}
        return Agreement(
            checkpoint,
            tuple(sorted(everybody)),
            readers if plan.readers else None,
            {member: contact.identity for member, contact in self._contacts.items()},
        )


def _where(storages: Sequence[Storage], name: CheckpointName) -> dict[str, list[Storage | None]]:
    found: dict[str, list[Storage | None]] = {}
    for storage in storages:
        try:
            for entry in storage.names(str(name)):
                found.setdefault(entry, []).append(storage)
        except StorageError as error:
            logger.warning("storage %s is left aside: %s", storage.location, error)
    return found
