"""The state that threads of a re-sharded fetch share, under one condition: the ledger, what is held, the outcome.

The primary group's state counts. What another group's rank sends is taken when it has the BLAKE3 digest that the primary
announces for it. When the primary can give no longer what is missing, another group is adopted: what is held is compared with
its digests first, so that what is held belongs to one group's state at every moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from torchft_ckpt.checkpointing.resharding.plan import Plan
from torchft_ckpt.core.parts import PartLedger
from torchft_ckpt.core.paths import Path, Paths
from torchft_ckpt.errors import CheckpointError

_GRAIN_BYTES = 1024 * 1024
"""So much is received at a time."""
_FIRST_BYTES = 8 * 1024 * 1024
_MAX_BYTES = 64 * 1024 * 1024
_RUN_S = 0.5
_CUT_AFTER_S = 1.0
_CUT_FACTOR = 3.0


class PartTransfer:
    """The state of one fetch, once its plan is made. Every method may be called from any thread.

    Args:
        plan: the parts, and who can give each.
        heirs: the groups that may become the primary where it is lost.
    """

    def __init__(self, plan: Plan, heirs: Iterable[int]) -> None:
        self.plan = plan
        self.changed = threading.Condition()
        self.primary = 0
        self._usable = set(heirs)
        self._sizes = [part.region.num_bytes for part in plan.parts]
        self._ledger = PartLedger(self._sizes, {name: places.keys() for name, places in plan.holders.items()})
        self._held: set[int] = set()
        self._is_adopting = False
        self._failures: dict[str, CheckpointError] = {}
        self._cut: dict[str, CheckpointError] = {}
        self._divergent: dict[str, list[int]] = {}
        self._outcome: CheckpointError | None = None
        self._over = not plan.parts
        self._paths = Paths(_GRAIN_BYTES)
        self._source_of: dict[str, str] = {}
        # These by path: each has one thread that asks for parts.
        self._rates: dict[str, float] = {}
        self._in_flight: dict[str, tuple[list[int], float]] = {}
        self._idle: set[str] = set()
        self.total_bytes = sum(self._sizes)
        self.received_bytes = 0
        self.wasted_bytes = 0
        self.brought_bytes = 0
        """Came from sources, verified or not."""

    # How it ends

    @property
    def over(self) -> bool:
        """Whether there is an outcome."""
        return self._over

    @property
    def outcome(self) -> CheckpointError | None:
        """Why it failed, once it is over; None where all is here."""
        return self._outcome

    def end(self, outcome: CheckpointError | None) -> None:
        """Set the outcome; the first one counts."""
        with self.changed:
            if not self._over:
                self._over, self._outcome = True, outcome
                self.changed.notify_all()

    def fail(self, name: str, error: CheckpointError) -> None:
        """Ask a source for nothing more; end the fetch where what is missing cannot be had any more."""
        with self.changed:
            if self._over or name in self._failures:
                return
            self._failures[name] = error
            self._ledger.drop(name)
            self._check_sources()
            self.changed.notify_all()

    def cut(self, name: str, error: CheckpointError) -> None:
        """Have the threads of a source end: only then what they are about is asked for elsewhere, as they may be writing."""
        with self.changed:
            for path in {name, *(path for path, source in self._source_of.items() if source == name)}:
                self.cut_path(path, error)

    def cut_path(self, path: str, error: CheckpointError) -> None:
        """Have the thread of a path end, as above."""
        with self.changed:
            self._cut.setdefault(path, error)
            self.changed.notify_all()

    def raise_if_cut(self, path: str) -> None:
        """In the thread of a path: raise why it was cut, if it was."""
        with self.changed:
            if path in self._cut:
                raise self._cut[path]

    def failures(self) -> dict[str, CheckpointError]:
        """Why sources were dropped."""
        with self.changed:
            return dict(self._failures)

    def _check_sources(self) -> None:
        """With `changed` held: adopt another group where the primary cannot give what is missing, or give up."""
        if self._over or self._ledger.is_done:
            return
        if self._covers_missing(self.primary):
            return
        self._usable.discard(self.primary)
        heir = next((group for group in sorted(self._usable) if self._covers_all(group)), None)
        if heir is None:
            self.end(self._why_hopeless())
            return
        self.primary = heir
        self._is_adopting = True
        for name, parts in self._divergent.items():  # from a group that does not count any more
            self._ledger.allow(name, parts)
        self._divergent.clear()

    def _why_hopeless(self) -> CheckpointError:
        (first, error), *others = self._failures.items()
        also = "".join(f"; {name}: {str(other)[:300]}" for name, other in others)
        names = sorted({self.plan.parts[part].name for part in self._missing()})[:5]
        what = f"no source is left for {', '.join(name[:120] for name in names)}. {first}: {error}{also}"
        return type(error)(what, party=error.party)

    def _missing(self) -> list[int]:
        return [part for part in range(len(self._sizes)) if part not in self._held]

    def _covers_missing(self, group: int) -> bool:
        return self._covers(group, self._missing())

    def _covers_all(self, group: int) -> bool:
        return self._covers(group, range(len(self._sizes)))

    def _covers(self, group: int, parts: Iterable[int]) -> bool:
        given: set[int] = set()
        for name, places in self.plan.holders.items():
            if self.plan.group_of[name] == group and name not in self._failures:
                given |= places.keys()
        return all(part in given for part in parts)

    # Adopting another group

    def to_confirm(self) -> list[int] | None:
        """Return what is held where a group has been adopted and is to be compared; else None."""
        with self.changed:
            return sorted(self._held) if self._is_adopting and not self._over else None

    def adopted(self, differing: Sequence[int], group: int) -> None:
        """Note that what is held is what a group has, but for these parts; without effect where it is not the primary now."""
        with self.changed:
            if group != self.primary or not self._is_adopting:
                return
            self._is_adopting = False
            for part in differing:
                self._held.remove(part)
                self.received_bytes -= self._sizes[part]
                self.wasted_bytes += self._sizes[part]
            self._ledger.invalidate(differing)
            self._check_sources()
            if self._ledger.is_done and not self._is_adopting:
                self.end(None)
            self.changed.notify_all()

    def primary_holder(self, part: int) -> str | None:
        """Return a source of the primary group that can give a part."""
        with self.changed:
            for name, places in self.plan.holders.items():
                if part in places and self.plan.group_of[name] == self.primary and name not in self._failures:
                    return name
            return None

    # Moving

    def next_batch(self, name: str, max_parts: int, path: str = "") -> list[int] | None:
        """Wait for something to ask a source for over a path, which where none is named has the source's name.

        None where it is over, or the source or path was dropped.
        """
        path = path or name
        with self.changed:
            self._source_of[path] = name
            while not self._over and name not in self._failures and self._paths.is_used(path):
                self.raise_if_cut(path)
                rate = self._rates.get(path)
                limit = _FIRST_BYTES if rate is None else min(max(int(rate * _RUN_S), 1), _MAX_BYTES)
                batch = [] if self._is_adopting else self._ledger.next_batch(name, limit, max_parts)
                if batch:
                    self._idle.discard(path)
                    self._in_flight[path] = (batch, time.monotonic())
                    return batch
                self._idle.add(path)
                self.changed.wait(1.0)
            self._idle.discard(path)
            return None

    def took(self, path: str, num_bytes: int, seconds: float) -> None:
        """Note how fast a path is."""
        with self.changed:
            rate = num_bytes / max(seconds, 1e-6)
            known = self._rates.get(path)
            self._rates[path] = rate if known is None else 0.5 * known + 0.5 * rate

    def arrived(self, path: str, parts: Iterable[int], group: int) -> bool:
        """Note parts that have been received whole, and are what a group has; False where that is not the primary (any more)."""
        with self.changed:
            if group != self.primary:
                return False
            for part in parts:
                if part not in self._held:
                    self.received_bytes += self._sizes[part]
                else:
                    self.wasted_bytes += self._sizes[part]
                self._held.add(part)
                self._ledger.arrived(part)
                flying = self._in_flight.get(path)
                if flying is not None:
                    self._in_flight[path] = ([other for other in flying[0] if other != part], time.monotonic())
            if self._ledger.is_done and not self._is_adopting:
                self.end(None)
            return True  # nobody is woken: others have no more to ask for than before

    def return_batch(self, path: str, parts: Iterable[int]) -> None:
        """Note that parts were asked for and are not held, and that nobody writes them any more."""
        with self.changed:
            self._in_flight.pop(path, None)
            self._ledger.give_back(parts)
            self.changed.notify_all()

    def diverged(self, name: str, parts: Sequence[int], group: int) -> None:
        """Note that what a source has is not what a group has; without effect where that is not the primary (any more)."""
        with self.changed:
            if group != self.primary:
                return
            self._divergent.setdefault(name, []).extend(parts)
            for part in parts:
                self.wasted_bytes += self._sizes[part]
                self._ledger.forbid(name, part)
            self.changed.notify_all()

    def divergences(self) -> dict[str, list[str]]:
        """Return the names of the tensors that differ from the primary's, by source."""
        with self.changed:
            return {
                name: sorted({self.plan.parts[part].name for part in parts}) for name, parts in self._divergent.items()
            }

    def overdue(self) -> list[str]:
        """Return the paths to cut: others that wait for nothing else could give what they are long about."""
        with self.changed:
            if self._over or not self._idle or any(self._ledger.queued_bytes(name) for name in self.plan.holders):
                return []
            now = time.monotonic()
            cut = []
            for path, (parts, since) in self._in_flight.items():
                if not parts or path in self._cut:
                    continue
                idle = self._idle - {path}
                able = [
                    {other for other in idle if self._source_of[other] in holders}
                    for holders in map(self._ledger.holders_of, parts)
                ]
                if not all(able):
                    continue
                rate = min((self._rates.get(other, 1e6) for of_part in able for other in of_part), default=1e6)
                patience_s = max(_CUT_AFTER_S, _CUT_FACTOR * sum(self._sizes[part] for part in parts) / rate)
                if now - since > patience_s:
                    cut.append(path)
            return cut

    def source_of(self, path: str) -> str:
        """Return the source that a path leads to."""
        with self.changed:
            return self._source_of[path]

    # Paths

    def add_path(self, name: str, path: str) -> None:
        """Measure a path to a source from now on, and drop it where others are much faster."""
        with self.changed:
            self._source_of[path] = name
            self._paths.add(name, path, time.monotonic())

    def is_used(self, path: str) -> bool:
        """Whether more is to come over a path."""
        with self.changed:
            return self._paths.is_used(path)

    def await_use(self, name: str, path: str) -> bool:
        """Wait until more is to come over a path; False where the source or the fetch is over before."""
        with self.changed:
            while not self._over and name not in self._failures and not self._paths.is_used(path):
                self.changed.wait(1.0)
            return not self._over and name not in self._failures

    def gave(self, path: str, num_bytes: int) -> None:
        """Count what has come over a path, as it comes."""
        with self.changed:
            self.brought_bytes += num_bytes
            self._paths.gave(path, num_bytes, time.monotonic())

    def judge_paths(self) -> tuple[list[str], list[str]]:
        """Return the paths that are used no longer, and those that are used again."""
        with self.changed:
            idle = {self._source_of[path] for path in self._idle}
            slow, again = self._paths.judge(time.monotonic(), idle)
            self.changed.notify_all()
            return slow, again

    def lose_path(self, path: str) -> list[str] | None:
        """Note that a path is broken; return those to use again instead. None: it was the last to its source."""
        with self.changed:
            self.changed.notify_all()
            return self._paths.lose(path)

    def paths_to(self, name: str) -> dict[str, Path]:
        """The paths to a source, with what came over each."""
        with self.changed:
            return self._paths.to(name)

    def num_sources(self) -> int:
        """Sources that have not been dropped."""
        with self.changed:
            return sum(name not in self._failures for name in self.plan.holders)

    def is_held(self, part: int) -> bool:
        """Whether a part is here."""
        return part in self._held
