"""Makes what a rank shows of its state, by which the lighthouse compares replica groups: see `core.coordination.trial`.

Before a quorum that is a trial (`shown`): one digest of what optimizers own, with their settings; one of all other leaves that
are known to be common; and one each of the leaves of which that is not known yet. Of large tensors only samples are read, unless
all is to be shown.

With every vote (`Glance`): a digest of optimizers' settings, and one of some samples of parameters and of optimizer state.
Each step takes other samples, so all of them have their turn. They are read as the step begins, on a device without a wait.
In an outer loop it is a digest of the common leaves that no optimizer owns, as they are captured for each exchange anyhow.

Where a sample lies follows from the step alone, so that all groups take the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash

from torchft_ckpt.checkpointing.state.containers import SEQUENCES, is_one_leaf, rebuilt
from torchft_ckpt.checkpointing.state.samples import add_sample, marks, place_of, sample_of
from torchft_ckpt.checkpointing.state.shards import adapter_of, memory_of
from torchft_ckpt.core.coordination.messages import MAX_LEAF_CHARS, MAX_LEAVES, Leaf, Shows, StateShown
from torchft_ckpt.errors import UnsupportedValueError
from torchft_ckpt.manager.comparing import bits_of

NUM_SAMPLES = 8
"""Of a large tensor in a trial; of all of them together in a vote."""
MAX_WHOLE_BYTES = 1 << 16
"""A tensor that is not larger is shown as a whole."""
MAX_STATE_BYTES = 256 << 20
"""So is a state: it takes some 20 ms."""
_DIGEST_CHARS = 16
_NUM_FIRST = 1024
_COMMON = "common "
_PLAIN = (bool, int, float, str, type(None))
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class CheckedLeaf(NamedTuple):
    """A tensor, or a value in words, of a state."""

    place: str
    """The same in all groups, however their state dicts are laid out."""
    name: str
    """For people."""
    value: torch.Tensor | str
    is_owned: bool = True
    """It has to be equal in all groups; else it is to be found out whether it has."""

    @property
    def key(self) -> str:
        """Its place, as long as a message takes it."""
        return leaf_key(self.place)


def leaf_key(place: str) -> str:
    """Return the name under which the lighthouse knows a leaf at this place of the state."""
    if len(place) <= MAX_LEAF_CHARS and place.isprintable():
        return place
    return f"{ascii(place)[: MAX_LEAF_CHARS - 20]}... {xxhash.xxh3_64_hexdigest(place.encode(errors='surrogatepass'))}"


def keeping(received: Any, here: Any, own: Collection[str], place: str) -> Any:
    """Return a received state with what is here in place of each group's own leaves, as far as that is here."""
    if leaf_key(place) in own:
        # A load function may clear its own tensors before it reads.
        return here.detach().clone() if isinstance(here, torch.Tensor) else here
    if not own or is_one_leaf(received):
        return received
    if isinstance(received, Mapping) and isinstance(here, Mapping):
        items = iter([keeping(v, here.get(k, v), own, f"{place}.{k}") for k, v in received.items()])
    elif isinstance(received, SEQUENCES) and isinstance(here, SEQUENCES) and len(received) == len(here):
        items = iter([keeping(*both, own, f"{place}.{n}") for n, both in enumerate(zip(received, here, strict=True))])
    else:
        return received
    return rebuilt(received, lambda _: next(items))


@dataclass(slots=True)
class KnownLeaves:
    """Which leaves that no optimizer owns have to be equal in all groups. Served with the state."""

    common: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    """Each group has its own."""
    moved: set[str] = field(default_factory=set)
    """Those that were seen to move here since a state was loaded. In an outer loop: that moved with its rounds, wherever, and
    stood still in their inner steps. What moves in these is a group's own."""
    by_rounds: bool = False
    """Groups train apart, in an outer loop: of what has never moved (a loss scale) nothing is shown."""
    still: set[str] = field(default_factory=set)
    """In an outer loop: those that stood still in the inner steps before the last exchange. Else: that have not moved here since
    they were looked at first, or loaded."""
    late: set[str] = field(default_factory=set)
    """Those that have moved here since a state was loaded, in another step than the first."""
    is_replay: bool = False
    """There is one group, in which nobody finds what is common: what has moved is taken to be, and what a checkpoint says."""
    has_news: bool = False
    """One has moved of which nobody has found out whether it has to be equal: the next exchange shows it."""
    _loose: set[str] = field(default_factory=set)
    """Those that have moved in inner steps here."""
    has_looked: bool = False
    _asked: dict[str, str | bytes] = field(default_factory=dict)
    _began: dict[str, str | bytes] = field(default_factory=dict)
    """The leaves as they were looked at last, as a round was asked for; and as the first inner step after it was over."""
    _whole: dict[str, str] = field(default_factory=dict)
    """Digests of all of each leaf that was shown so first since a state was loaded."""

    def learn(self, common: Collection[str], own: Iterable[str]) -> tuple[list[str], list[str]]:
        """Take what the lighthouse has found; return which leaves are known to be each group's own since, and which no more."""
        news, no_more = sorted(set(own) - self.own), sorted(self.own.intersection(common))
        self.own = (self.own | set(news)).difference(common)
        self.common = (self.common | set(common)) - self.own
        return news, no_more

    def saved(self) -> dict[str, int]:
        """Return what a checkpoint says of it, for who replays the steps after that."""
        return {f"{_COMMON}{key}": 1 for key in sorted(self.common)}

    def take_saved(self, saved: Iterable[str]) -> None:
        if self.is_replay:
            self.moved |= {key.removeprefix(_COMMON) for key in saved if key.startswith(_COMMON)}

    def counts(self, leaf: CheckedLeaf) -> bool:
        """Whether a leaf has to be equal in all groups, as far as is known."""
        return leaf.is_owned or leaf.key in (self.moved if self.is_replay else self.common)

    def may_count(self, leaf: CheckedLeaf) -> bool:
        """Whether a leaf has to be equal in all groups, or it may turn out that it has to be."""
        return self.counts(leaf) or (leaf.key not in self.own and (not self.by_rounds or leaf.key in self.moved))

    def watch(self, leaves: Iterable[CheckedLeaf], *, came_in: bool = False) -> None:
        """See which leaves have moved since they were looked at last, where groups train together.

        `came_in`: this group has just done so, and its loop may have moved by mistake what it moves in no other step.
        """
        now = _marks_of(leaves)
        new = {key for key in now if now[key] != self._asked.get(key, now[key])}
        self.has_news = self.has_news or not new <= self.moved | self.common | self.own
        self.late |= set() if came_in else new - self.moved
        self.moved |= new
        self.still = now.keys() & (self._asked.keys() | self.still) - self.moved
        self._asked, self.has_looked = now, True

    def saw(self, key: str, digest: str) -> None:
        """See by a digest of all of a leaf whether it has moved, where groups train together: a look takes a sample of it."""
        if self._whole.setdefault(key, digest) != digest and not self.by_rounds:
            self.moved.add(key)
            self.still.discard(key)

    def look(self, leaves: Iterable[CheckedLeaf], *, asks: bool) -> None:
        """See which leaves move with the rounds of an outer loop: as one is asked for, or as its first inner step is over."""
        now, self.by_rounds = _marks_of(leaves), True
        if not asks:
            self._began = now
            return
        moved = self.moved
        if self._began:  # else the round is tried again
            self.still = {key for key in now if now[key] == self._began.get(key)}
            self._loose |= self._began.keys() - self.still
            new = {key for key in self.still - self._loose if now[key] != self._asked.get(key, now[key])}
            self.has_news = self.has_news or not new <= moved | self.common | self.own
            moved = (moved | new) - self._loose
        self.moved = now.keys() & moved
        self._asked, self._began = now, {}

    def loaded(self) -> None:
        """A state is loaded: what differs in it has not moved by that."""
        if not self.by_rounds:
            self.still |= self._asked.keys() | self.moved
            self.moved, self.has_looked = set(), False
        self._began, self._asked, self._whole, self.late = {}, {}, {}, set()


def _marks_of(leaves: Iterable[CheckedLeaf]) -> dict[str, str | bytes]:
    """Return, by key, by what it is seen whether the leaves that no optimizer owns have moved."""
    looked_at = [leaf for leaf in leaves if not leaf.is_owned]
    sampled = iter(marks(leaf.value for leaf in looked_at if isinstance(leaf.value, torch.Tensor)))
    return {leaf.key: leaf.value if isinstance(leaf.value, str) else next(sampled) for leaf in looked_at}


def shown(
    leaves: Sequence[CheckedLeaf], known: KnownLeaves, step: int, shows: Shows, *, group_world_size: int
) -> StateShown:
    """Return what this rank shows of the state of a step. On the thread that may change it."""
    num_bytes = sum(leaf.value.nbytes for leaf in leaves if isinstance(leaf.value, torch.Tensor))
    sampled_at = step if shows is Shows.SAMPLES and num_bytes > MAX_STATE_BYTES else None
    owned, common = xxhash.xxh3_128(), xxhash.xxh3_128()
    open_leaves: tuple[list[Leaf], list[Leaf]] = [], []
    own, num_own_bytes = [], 0
    for leaf in leaves:
        if not known.may_count(leaf):
            # What is made of own data may be averaged later. Numbers are equal by chance, and samples lie elsewhere each time.
            if not known.by_rounds and isinstance(leaf.value, torch.Tensor) and leaf.value.numel() > 1:
                num_own_bytes += leaf.value.nbytes
                if num_own_bytes <= MAX_STATE_BYTES and _varies(leaf.value):
                    own.append(Leaf(name=leaf.key, digest=digest_of(leaf.value)))
            continue
        digest = digest_of(leaf.value, sampled_at)
        if leaf.is_owned:
            owned.update(f"{leaf.key} {digest};".encode())
        elif leaf.key in known.common:
            common.update(f"{leaf.key} {digest};".encode())
        else:
            if sampled_at is None:
                known.saw(leaf.key, digest)
            open_leaves[leaf.key in known.still and not known.by_rounds].append(Leaf(name=leaf.key, digest=digest))
    most = max(16, MAX_LEAVES // group_world_size)  # the others are shown when these are known
    moved, still = open_leaves[0][:most], open_leaves[1][: max(0, most - len(open_leaves[0]))]
    return StateShown(
        is_sampled=sampled_at is not None,
        owned=owned.hexdigest(),
        common=common.hexdigest(),
        open=[*moved, *still],
        num_still=len(still),
        own=own[: most - len(moved) - len(still)],
    )


def _varies(tensor: torch.Tensor) -> bool:
    """Whether not all values that are here are the same. Else they say as little as a number: counts, flags that are set."""
    for part in memory_of(tensor):
        for some in (part.reshape(-1)[:_NUM_FIRST], part):
            values = bits_of(some).view(torch.uint8).view(-1, part.element_size())
            if (values != values[0]).any():
                return True
    return False


def digest_of(value: torch.Tensor | str, step: int | None = None) -> str:
    """Return a digest of a tensor's dtype, shape and bits, of those that are here of a sharded one; or of a value in words.

    `step`: of a large tensor samples count, which lie elsewhere in each step.
    """
    if isinstance(value, str):
        return xxhash.xxh3_64_hexdigest(value.encode(errors="surrogatepass"))
    adapter = adapter_of(value)
    try:
        boxes, data = ([], [value]) if adapter is None else adapter.boxes_and_data(value, "")
    except UnsupportedValueError:  # who serves it says so; a survivor does not end by that
        boxes, data = [], memory_of(value)
    hasher = xxhash.xxh3_64(f"{value.dtype} {tuple(value.shape)} {boxes}".encode())
    for part in data:
        if step is None or part.nbytes <= MAX_WHOLE_BYTES:
            hasher.update(bits_of(part).numpy().data)
        else:
            for number in range(NUM_SAMPLES):
                add_sample(hasher, part, place_of(part, step, number))
    return hasher.hexdigest()


class Glance:
    """What the open step's vote shows of the state with which it began. The training thread takes it, and votes."""

    def __init__(self) -> None:
        self._words = ""
        self._digest = ""
        """Of the samples, if they are not on their way from a device until `_is_copied`."""
        self._pinned: torch.Tensor | None = None
        self._is_copied: torch.cuda.Event | None = None

    def take(self, step: int, parameters: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Look at the state with which a step begins.

        Args:
            step: of its name.
            parameters: of the optimizers, each once.
            optimizers: whose settings count.
        """
        self._words = f"{[*_settings(optimizers)]}"
        parts = _chosen(step, parameters, optimizers)
        self._is_copied, self._digest = None, ""
        if parts and all(part.is_cuda for part in parts):
            together = torch.cat([sample_of(part, place_of(part, step, number)) for number, part in enumerate(parts)])
            if self._pinned is None or self._pinned.shape != together.shape:
                self._pinned = torch.empty(together.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._pinned.copy_(together, non_blocking=True)
            self._is_copied = torch.cuda.Event()
            self._is_copied.record()
        else:
            hasher = xxhash.xxh3_64()
            for number, part in enumerate(parts):
                add_sample(hasher, part, place_of(part, step, number))
            self._digest = hasher.hexdigest()

    def take_leaves(self, step: int, leaves: Sequence[CheckedLeaf]) -> None:
        """Look at what a script moves with the rounds of an outer loop, and all groups have alike as they exchange."""
        self._words = "".join(f"{leaf.key} {digest_of(leaf.value, step)};" for leaf in leaves)
        self._is_copied, self._digest = None, ""

    def forget(self) -> None:
        """The step begins with a state that is not compared."""
        self._words = ""

    def digest(self) -> str:
        """Return the digests; empty where nothing was looked at."""
        if not self._words:
            return ""
        if self._is_copied is not None and self._pinned is not None:
            self._is_copied.synchronize()
            self._digest = xxhash.xxh3_64_hexdigest(self._pinned.numpy().data)
        words = xxhash.xxh3_64_hexdigest(self._words.encode(errors="surrogatepass"))
        return f"{words[: _DIGEST_CHARS // 2]}{self._digest[: _DIGEST_CHARS // 2]}"


def _chosen(
    step: int, parameters: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Return the memory of some parameters, or of what an optimizer keeps of them, in turn."""
    found: list[torch.Tensor] = []
    for number in range(min(NUM_SAMPLES, len(parameters))):
        turn, place = divmod(step * NUM_SAMPLES + number, len(parameters))
        parameter = parameters[place]
        kept = next((optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state), None)
        tensors = [parameter]
        if isinstance(kept, Mapping):
            tensors += [kept[key] for key in sorted(kept, key=str) if isinstance(kept[key], torch.Tensor)]
        tensor = tensors[turn % len(tensors)]
        is_plain = type(tensor) in _PLAIN_TENSORS and tensor.is_cpu and tensor.layout is torch.strided
        found += [tensor] if is_plain and tensor.numel() else memory_of(tensor)[:1]
    return found


def _settings(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield {key: value for key, value in group.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, (list, tuple)) and all(type(item) in _PLAIN for item in value)
    )
