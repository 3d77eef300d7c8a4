"""A transfer of boxes from all ranks of several source groups: whose state counts, and who takes a lost group's place.

The primary group's state counts. What another group's rank sends is taken when it has the BLAKE3 digest that the primary
announces for it. When the primary can give no longer what is missing, another group is adopted: what is held is compared with
its digests first, so that what is held belongs to one group's state at every moment.

What several ranks of the primary group hold comes from one, and from others once they are known to hold the same (`allow`).
Else a state would be put together of ranks that have drifted from each other.

What is here already may be equal. Parts are `claimed` to be compared, so that nobody asks for them meanwhile. They count where
they have the digest that the primary announces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from torchft_ckpt.checkpointing.fetching.transfer_state import WAIT_S, TransferState
from torchft_ckpt.checkpointing.resharding.plan import Plan
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.core.transfer.scheduler import Batches, TransferLedger, mask_of_each, units_of

_FIRST_BYTES = 8 * 1024 * 1024
_MAX_BYTES = 64 * 1024 * 1024
_RUN_S = 0.5


class BoxTransfer(TransferState):
    """The state of one fetch of boxes. Every method may be called from any thread."""

    def __init__(self, step: int = 0) -> None:
        super().__init__()
        self.step = step
        self.plan = Plan([], {}, {})
        self._all = 0
        self.primary = 0
        self._usable: set[int] = set()
        self._givable: dict[str, int] = {}
        """What each source could give, as a bit set."""
        self._is_promoting = False
        self._divergent: dict[str, list[int]] = {}
        self._copies: dict[str, int] = {}
        """By source of the primary group, a bit set of what another rank gives, until it is known to hold the same."""
        self._is_comparing_copies = False
        self._claimed = 0
        """A bit set: held in the ledger, and being compared with what is here."""

    def join(self, name: str, manifest: Manifest) -> bool:
        """Note what a source holds and wait for the plan; return whether parts are to come from it.

        None are where there will be no plan, or it was made without this source.
        """
        with self.changed:
            self._manifests[name] = manifest
            is_late = self._ready
            self.changed.notify_all()
            while not self._ready and not self._over:
                self.changed.wait(WAIT_S)
            return not is_late and name in self._givable

    def have_settled(self, names: Iterable[str]) -> bool:
        """Whether each of some sources has sent its manifest, or failed."""
        with self.changed:
            return all(name in self._manifests or name in self._failures for name in names)

    def begin(self, plan: Plan, candidates: Iterable[int], *, max_units: int, ranks: Sequence[str] = ()) -> None:
        """Have parts come from who is there.

        Args:
            candidates: the groups that may become the primary where it is lost.
            max_units: how many parts are asked for at once, at most.
            ranks: of the primary group: what several hold comes from the first of these alone, before `allow`.
        """
        with self.changed:
            sizes = [part.region.num_bytes for part in plan.parts]
            batches = Batches(first_bytes=_FIRST_BYTES, seconds=_RUN_S, max_bytes=_MAX_BYTES, max_units=max_units)
            self.plan = plan
            self._all = (1 << len(plan.parts)) - 1
            self._usable = set(candidates)
            self._failures = {name: error for name, error in self._failures.items() if name in plan.holders}
            self._ledger = TransferLedger(sizes, batches=batches, pick=self._pick)
            self._givable = {name: mask_of_each(places) for name, places in plan.holders.items()}
            for name, parts in self._givable.items():
                if name not in self._failures:
                    self._ledger.add_source(name, parts)
            self._take_from_first(ranks)
            self.total_bytes = sum(sizes)
            self._ready = True
            self._end_if_done()
            self._check_sources()
            self.changed.notify_all()

    def _end_if_done(self) -> None:
        if self._ledger.is_done and not (self._is_promoting or self._claimed or self._is_comparing_copies):
            self.end(None)

    def allow(self, equal: Mapping[str, Iterable[int]], group: int) -> None:
        """Have copies come from those ranks too that hold the same as who gives them; nothing is compared any more.

        Without effect where their group is not the primary (any more).
        """
        with self.changed:
            if group != self.primary:
                return
            for name, parts in equal.items():
                known = mask_of_each(parts)
                self._copies[name] = self._copies.get(name, 0) & ~known
                self._ledger.allow(name, known)
            self._is_comparing_copies = False
            self._check_sources()
            self._end_if_done()
            self.changed.notify_all()

    def _take_from_first(self, ranks: Iterable[str]) -> None:
        self._copies = self.plan.copies(name for name in ranks if name not in self._failures)
        self._is_comparing_copies = bool(self._copies)
        for name, parts in self._copies.items():
            self._ledger.forbid(name, parts)

    # Adopting another group

    def _check_sources(self) -> None:
        """With `changed` held: adopt another group where the primary cannot give what is missing, or give up."""
        if self._over or not self._ready or self._covers(self.primary, 0):
            return
        self._usable.discard(self.primary)
        candidate = next((group for group in sorted(self._usable) if self._covers(group, -1)), None)
        if candidate is None:
            names = sorted({self.plan.parts[part].name for part in self.missing()})
            self.end(self.why_hopeless(f" for {', '.join(name[:120] for name in names[:5])}"))
            return
        self.primary = candidate
        self._is_promoting = True
        for name, parts in self._divergent.items():  # from a group that does not count any more
            self._ledger.allow(name, mask_of_each(parts))
        self._divergent.clear()
        self._take_from_first(filter(self.is_primary, self._givable))

    def _covers(self, group: int, parts: int) -> bool:
        """Whether a group can give what is missing, and of what is held these parts as well."""
        given = 0
        for name, places in self._givable.items():
            if self.plan.group_of[name] == group and name not in self._failures:
                given |= places if self._is_comparing_copies else places & ~self._copies.get(name, 0)
        return not self._all & ~given & (parts | ~self._ledger.held)

    def to_confirm(self) -> list[int] | None:
        """Return what is held where a group has been adopted and is to be compared; else None."""
        with self.changed:
            is_wanted = self._is_promoting and not self._over and not self._claimed
            return [*units_of(self._ledger.held)] if is_wanted else None

    def adopted(self, differing: Iterable[int], group: int) -> None:
        """Note that what is held is what a group has, but for these parts; without effect if it is not the primary now."""
        with self.changed:
            if group != self.primary or not self._is_promoting:
                return
            self._is_promoting = False
            self._invalidate(mask_of_each(differing))
            self._check_sources()
            self._end_if_done()
            self.changed.notify_all()

    def primary_holder(self, part: int) -> str | None:
        """Return a source of the primary group that gives a part."""
        with self.changed:
            for name, places in self.plan.holders.items():
                is_copy = self._copies.get(name, 0) >> part & 1
                if part in places and self.is_primary(name) and name not in self._failures and not is_copy:
                    return name
            return None

    # Parts

    def _next_batch(self, stream: int) -> list[int]:
        if self._is_promoting:
            self._ledger.give_back(stream)
            return []
        return super()._next_batch(stream)

    def is_primary(self, name: str) -> bool:
        """Whether a source is of the group whose state counts."""
        return self.plan.group_of[name] == self.primary

    def name_of(self, unit: int) -> str:
        return f"{self.plan.parts[unit].box} of {self.plan.parts[unit].name[:120]}"

    def arrived(
        self, stream: int, source: str, path: str, unit: int, digest: bytes, blake3: bytes | None = None
    ) -> bool:
        """Note a part that has come whole. One of another group than the primary counts only when it is `confirmed`."""
        with self.changed:
            now = time.monotonic()
            self._ledger.came(stream, unit, now)
            if self.is_primary(source) and not self._over:
                self._note_arrival(stream, path, unit, now)
                self._end_if_done()
            return True  # nobody is woken: others have no more to ask for than before

    def confirmed(self, stream: int, path: str, agreed: Iterable[int], group: int) -> None:
        """Note parts that are what a group has; without effect if that is not the primary (any more)."""
        with self.changed:
            if group != self.primary or self._over:
                return
            now = time.monotonic()
            for part in agreed:
                self._note_arrival(stream, path, part, now)
            self._end_if_done()

    def missing_of(self, parts: Iterable[int]) -> list[int]:
        """Return those parts that are missing, and that nobody is asked for."""
        with self.changed:
            return [*units_of(mask_of_each(parts) & self._ledger.missing)]

    def claim(self, parts: Iterable[int], group: int) -> list[int]:
        """Have nobody asked for those parts that are missing until what is here is `compared` with a group's; return them.

        None if that group is not the primary.
        """
        with self.changed:
            if not self._over and not self._is_promoting and group == self.primary:
                self._claimed = mask_of_each(parts) & self._ledger.missing
                self._ledger.hold(self._claimed)
            return [*units_of(self._claimed)]

    def compared(self, equal: Iterable[int], group: int) -> None:
        """Note which of the claimed parts are here, equal to a group's; the others are missing again.

        All are where that group is not the primary (any more).
        """
        with self.changed:
            here = self._claimed & mask_of_each(equal if group == self.primary else ())
            self._ledger.invalidate(self._claimed & ~here)
            self._claimed = 0
            self._note_skipped(here)
            self._check_sources()
            self._end_if_done()
            self.changed.notify_all()

    def diverged(self, name: str, parts: list[int], group: int) -> None:
        """Note that what a source has is not what a group has; without effect if that is not the primary (any more)."""
        with self.changed:
            if group != self.primary:
                return
            self._divergent.setdefault(name, []).extend(parts)
            self.wasted_bytes += self._ledger.num_bytes(parts)
            self._ledger.forbid(name, mask_of_each(parts))
            self.changed.notify_all()

    def divergences(self) -> dict[str, str]:
        """Return the names of the tensors that differ from the primary's, by source."""
        with self.changed:
            named = {
                name: sorted({self.plan.parts[part].name for part in parts}) for name, parts in self._divergent.items()
            }
            return {name: f"differences in {', '.join(tensors[:5])}" for name, tensors in named.items()}

    def missing(self) -> list[int]:
        """Return the parts that are not here."""
        with self.changed:
            return [*units_of(self._all & ~self._ledger.held | self._claimed)]

    def arrived_text(self) -> str:
        """How much is here, for messages."""
        return f"{self.received_bytes + self.skipped_bytes} of {self.total_bytes} bytes"
