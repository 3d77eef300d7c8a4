"""This file decides, before a quorum forms, whether the groups that ask for it hold one state, and what those load that do not.

A state arrives bit-equal; then a group's own training loop runs, which may have read something before that arrived, or may move
something in a place of its own. So groups are *tried* at the boundary after each event that a loop may answer in its own way: a
group came in, a step was discarded, the job began, votes differed. A loop may answer later, as it counts by itself: so they are
tried again 4, 8, 16, ... steps after somebody has come in, or loaded. Whoever is told to (`CommitDecided.shows`), or knows it by
itself, shows its state with its next request, and serves it. Here the requests are compared:

- All show the same: the quorum forms. Nothing was sent, and nobody has waited.
- A group shows something else than those that are right: it is told to load their state *of this very step*, and asks again,
  while the others wait. It adds nothing to that step, unless too few would be left for it to count: its loop may have computed
  something already (a teacher's outputs, a weight of the loss). The boundary after the next step is one of a trial, too. A group
  that asks not to heal takes no part in the step.

Who is right: only groups that were found equal since they joined have a voice, and one that was given its state by others only
once it has gone on from that (`came_in`); if none has, as when the job begins, all have, but for those that say that they have
made one step at most since they were given theirs: a lighthouse that was started again knows of no voice. A strict majority of
the voices is right; without one, those that show the same as the longest in the job. If those with a voice show nothing, the
others are made equal among themselves, and have no voice by that. A group with a voice is told to load as `on_replicas_differ`
says.

What optimizers own has to be equal everywhere. Of all other leaves of a state it is found out once. One that has moved, and is
equal in all groups after a step, is *common* from then on; of one that has not moved in all of them nothing is found out. What
follows from one that differs, although all groups began the step with the same, is in `LEAF_FATES`. It is *own* to each group, as
BatchNorm's running statistics are, unless a group that came in may have computed with what it had read before, or the leaf has
moved in some groups alone. Each group says itself when it came in, and what has moved in it since: a lighthouse forgets that.
Both lists are kept by the groups, and travel with the state.

A codebook that each group makes of its own data in its first step, and all move alike later, is own to each group at first. So
own leaves are looked at whenever groups are compared: one that most groups with a voice have alike at two looks in a row, with
another value at the second one, is common from then on. One look says little: what is set back to zero is equal now and then.
It may have been by chance, or by the same data in some groups, or the leaf follows what is own a step later, as scales of fake
quantisation follow BatchNorm's statistics. So if a group that has loaded differs again at once, before what was found common was
found so once more, it is own again; but if it differs in what optimizers own, that is it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import accumulate

from torchft_ckpt.core.coordination.equality import alike, strictest
from torchft_ckpt.core.coordination.layouts import without_places
from torchft_ckpt.core.coordination.lighthouse_records import Member
from torchft_ckpt.core.coordination.messages import (
    MAX_LEAVES,
    MAX_NAMES_BYTES,
    OnReplicasDiffer,
    Role,
    Shows,
    StateShown,
    name_some,
    size_of,
)
from torchft_ckpt.core.coordination.recovery import MAX_SOURCES, Assignment

_FIRST_AGAIN = 4
MAX_IN_A_ROW = 3
"""So often a rank differs in the same leaf at boundaries in a row until its group ends."""
NOWHERE = "something that no state_dict function returns"


class LeafFate(Enum):
    """The verdict on a leaf that no optimizer owns."""

    OPEN = "nothing"
    COMMON = "it has to be equal in all groups"
    OWN = "each group has its own"
    PARTED = "each group has its own from now on, with a warning"
    GIVEN = "who came in loads it, and it is looked at again after a step"
    LOADED = "who has moved it loads that of the eldest"


class Moved(Enum):
    """The groups in which a leaf that differs has moved. What a newcomer has made of it in its first step says nothing."""

    NOWHERE = "nowhere"
    ELDEST = "in the longest in the job alone"
    OTHERS = "in others alone"
    APART = "to several values"


class Came(IntEnum):
    """Which newcomer, of those in which the leaf did not move, has another one; the last of these that there is."""

    NOBODY = 0
    GIVEN = 1
    """It was given the leaf before, since it came in."""
    STOOD = 2
    NEW = 3
    """It has made its first step, or could not load at the boundary after that."""


LEAF_FATES: Mapping[Moved, tuple[LeafFate, LeafFate, LeafFate, LeafFate]] = {
    # which newcomer differs:  nobody          was given it     stood still     is new
    Moved.NOWHERE: (LeafFate.OWN, LeafFate.OWN, LeafFate.OWN, LeafFate.GIVEN),
    Moved.ELDEST: (LeafFate.OWN, LeafFate.PARTED, LeafFate.GIVEN, LeafFate.GIVEN),
    Moved.OTHERS: (LeafFate.LOADED,) * 4,
    Moved.APART: (LeafFate.OWN,) * 4,
}
"""The verdict on a leaf that differs, by where it has moved, and by `Came`."""


@dataclass(slots=True)
class Verdict:
    """The result of one comparison. Members that are not named were not compared."""

    equal: set[str] = field(default_factory=set)
    """They hold the state of those that are right."""
    loads: dict[str, list[str]] = field(default_factory=dict)
    """By replica id: the members whose state it loads before it asks again."""
    idle: set[str] = field(default_factory=set)
    """These hold another state and do not wish to load one now: they take no part in the step."""
    stops: list[str] = field(default_factory=list)
    """These were compared, and none of them trains on."""
    common: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """What the operator is warned of."""
    noted: list[str] = field(default_factory=list)
    """What is no fault, as far as is known."""


class Trials:
    """What one job's trials have shown so far. Not thread-safe."""

    def __init__(self) -> None:
        self._voices: dict[str, None] = {}
        """Members that were found equal since they joined, the longest in the job first. If who gave one its state is gone, that
        is the job's as soon as it has gone on from it: those that get it from there do not outvote it."""
        self._joined: dict[str, bool] = {}
        """Members that take part and were not found equal yet: whether their loops may have read another step before that."""
        self._joined_at: dict[str, int] = {}
        """The steps with which members came in that were not found equal after a step since: they may be compared before they
        have made one. That says nothing of those whose loops may have read another step; and none of them has drifted yet."""
        self._loaded: dict[str, int] = {}
        """Members that were told to load, and at which step, the last time."""
        self._corrected: set[str] = set()
        """Of these, who was in no quorum since."""
        self._given: dict[str, tuple[int, bool]] = {}
        """Leaves that groups that came in were given, the latest last: at which step, and whether they had ever stood still there
        in another step than a group's first."""
        self._own: dict[str, object] = {}
        """What most have of an own leaf, as it was looked at last, if most have the same."""
        self._own_before: dict[str, object] = {}
        self._own_at = -1
        """The step at which it was looked at last. `_own_before`: as it was at the look before."""
        self._young: dict[str, bool] = {}
        """Leaves that were found common, and that were not found so once more, as it may have been by chance: whether each was
        own to each group before."""
        self._given_up: set[str] = set()
        """Of these, which are each group's own again, and the next quorum is to be told so."""
        self._parted: set[str] = set()
        """Leaves of which the operator was told that they are not compared any more."""
        self._left_out: set[str] = set()
        """Leaves that were found common, and were not told yet, as there was no room: they are compared as such."""
        self._same_at = -1
        """The step at which somebody last came in, or loaded: all began it with the same."""
        self._differed: tuple[int, Shows] = (-1, Shows.NOTHING)
        """The step in which something was last found that the boundary after it has to look into, and how closely."""

    # ------------------------------------------------------------------------------------------------ what happens

    def begins(self, assignment: Assignment, members: Sequence[Member], beginners: Mapping[str, bool]) -> None:
        """A quorum forms, of these members in the order of their parts. `beginners`: as in `JobRecord`."""
        self._given_up.clear()
        is_new_life = not self._voices and not assignment.is_first
        for member, part in zip(members, assignment.parts, strict=True):
            replica_id = part.replica_id
            if part.role is not Role.HEALTHY:
                self.lost(replica_id)  # it comes in anew, also if its connection has held
            elif is_new_life and _has_trained(member, assignment.version.step):
                self._voices[replica_id] = None  # it trained before this lighthouse was started again
                self._same_at = assignment.version.step
                self._joined.pop(replica_id, None)
            self._corrected.discard(replica_id)
            began = assignment.is_first and part.role is Role.HEALTHY and beginners.get(replica_id, False)
            if replica_id not in self._voices and (began or replica_id not in self._joined):
                began = began or (is_new_life and _holds_first(member))
                self._joined[replica_id], self._same_at = not began, assignment.version.step
                self._joined_at[replica_id] = assignment.version.step

    def ended(self, step: int, approvers: Collection[str], others: Collection[str], *, differs: bool) -> None:
        """A step counts for these members, and not for others of its quorum. `differs`: their votes show different states."""
        for replica_id in others:
            self.lost(replica_id)
        if differs:
            self._differed = step, Shows.ALL
        elif self._differed[0] != step:
            is_new = step in self._loaded.values() or any(
                m not in self._voices or m in self._joined_at for m in approvers
            )
            if is_new or (len(approvers) > 1 and _is_tried_again(step + 1 - self._same_at)):
                self._differed = step, Shows.SAMPLES

    def shows_after(self, step: int) -> Shows:
        """Return what members show at the boundary after a step that counts."""
        return self._differed[1] if self._differed[0] == step else Shows.NOTHING

    def lost(self, replica_id: str) -> None:
        """A member is gone, or was left behind: it is compared anew when it is back."""
        self._voices.pop(replica_id, None)
        self._joined.pop(replica_id, None)
        self._joined_at.pop(replica_id, None)
        self._loaded.pop(replica_id, None)
        self._corrected.discard(replica_id)

    def is_corrected(self, replica_id: str) -> bool:
        """Whether a member has loaded before the quorum that forms: its loop may have computed something before that."""
        return replica_id in self._corrected

    def is_to_load(self, member: Member) -> bool:
        """Whether a member was told to load the state of its step, and has not: it holds a whole one of its own."""
        return not member.version.proven and self._loaded.get(member.replica_id) == member.version.step

    # -------------------------------------------------------------------------------------------------- the verdict

    def judge(self, members: Sequence[Member], step: int, *, goes_back: bool = False) -> Verdict:
        """Compare what these members, which ask for one quorum with the state of a step, show of it. `goes_back`: the job was
        at a later one, so that they are equal gives nobody a voice: some may have computed something since."""
        verdict = Verdict()
        if not self._voices:
            self._left_out.clear()
            self._own.clear()
            self._parted.clear()
            self._young.clear()
        by_kind: dict[tuple[str, int], list[Member]] = {}
        silent = {member.replica_id for member in members if not member.asked.shown}
        for member in members:
            if len(member.asked.shown) == member.hello.group_world_size:
                by_kind.setdefault((without_places(member.layout), member.hello.group_world_size), []).append(member)
        for those in by_kind.values():
            if len({of_rank.is_sampled for member in those for of_rank in member.asked.shown}) > 1:
                self._differed = step, Shows.ALL  # all show all after this step
            else:
                self._judge_alike({member.replica_id: member for member in those}, silent, step, verdict)
        if silent and self._differed[0] != step and any(s.open for m in members for s in m.asked.shown):
            self._differed = step, Shows.SAMPLES  # the leaves of which nobody knows are compared when all show theirs
        verdict.own += sorted(self._given_up)
        found = {*verdict.common, *verdict.own}
        self._left_out |= {*verdict.common}
        verdict.common, verdict.own = _told(verdict.common), _told(verdict.own)
        self._left_out -= (told := {*verdict.common, *verdict.own})
        if told != found and self._differed[0] != step:
            self._differed = step, Shows.SAMPLES  # the others are found again, and told, after this step
        if not (verdict.loads or verdict.stops or goes_back):
            by_name = {member.replica_id: member for member in members}
            may_speak = [
                m for m in sorted(verdict.equal) if not (by_name[m].asked.came_in or self._loaded.get(m, -1) >= step)
            ]
            have_gone_on = [
                m for m in may_speak if self._joined_at.get(m, -1) < step and _given_at(by_name[m], step) < step
            ]
            able = [m for m in may_speak if m in have_gone_on or self._joined.get(m) is False]
            for replica_id in able or ([] if self._voices else may_speak):
                self._voices.setdefault(replica_id)
                self._joined.pop(replica_id, None)
            for replica_id in have_gone_on:
                self._joined_at.pop(replica_id, None)
        return verdict

    def _judge_alike(self, members: dict[str, Member], silent: set[str], step: int, verdict: Verdict) -> None:
        """Compare members whose ranks hold the same parts of the state. If only `silent` ones have a voice, these are equal among
        themselves from now on, which proves nothing: they are compared with those after the next step."""
        judges = [m for m in self._voices if m in members]
        is_proof = bool(judges) or not silent & self._voices.keys()
        if not judges:
            # A lighthouse that was started again knows of nobody that it came in: each says so itself.
            proved = [m for m in members if self._joined.get(m) is False or not _is_new(members[m], step)]
            judges = sorted(proved or members, key=lambda m: (self._joined.get(m, False), m))
            has_come_in = step > self._same_at and self._joined.get(judges[0], False)
            if has_come_in and is_proof:  # all came in, and have made a step since
                here = f"the job goes on from the state of step {step} of {name_some(judges)}"
                verdict.said.append(f"nobody is left who was found equal after a step, so {here}")
        shown = self._compared(members)
        groups = alike({m: shown[m] for m in judges})
        most = groups[0] if 2 * len(groups[0]) > len(judges) else next(those for those in groups if judges[0] in those)
        right = [m for m in judges if m in most]
        wrong = [m for m in members if shown[m] != shown[right[0]]]
        verdict.equal.update(members.keys() - wrong if is_proof else ())
        if wrong:
            self._decide(members, right, wrong, step, verdict)
        elif is_proof and len(members) > 1 and step > self._same_at:  # what was just loaded is equal, and says nothing
            self._young.clear()
            self._learn(members, right, step, verdict)
            for name in verdict.common:
                self._young.setdefault(name, False)

    def _decide(
        self, members: dict[str, Member], right: Sequence[str], wrong: list[str], step: int, verdict: Verdict
    ) -> None:
        policy = strictest(members.values())
        proved = self._voices.keys() - self._joined_at.keys()
        drifted = [m for m in wrong if m in proved and _owned(members[m]) != _owned(members[right[0]])]
        if drifted and policy is not OnReplicasDiffer.HEAL:
            verdict.stops = list(members) if policy is OnReplicasDiffer.STOP else []
            what = f"{name_some(wrong)} came to another state of step {step} than {name_some(right)}"
            verdict.said.append(f"{what}. on_replicas_differ is {policy.value!r}")
            wrong = [m for m in wrong if m not in drifted]
        # What optimizers own follows from averaged gradients alone, so if that differs it is none of these.
        again = [m for m in wrong if self._loaded.get(m, -1) >= step - 1]
        if self._young and any(_owned(members[m]) == _owned(members[right[0]]) for m in again):
            self._part(sorted(self._young), step, verdict)
            # Another one may have differed.
            self._parted -= {name for name, was_own in self._young.items() if not was_own}
            self._given_up, self._young = {*self._young}, {}
        if wrong and not verdict.stops:
            what = self._what(wrong, right, members, step)
            verdict.said.append(self._give(members, right, wrong, step, verdict, what, is_known=True))
            values = _by_leaf(members, right)
            given = (name for name, of in values.items() if len({of.get(m) for m in members}) > 1)
            self._note_given(dict.fromkeys(given, False), step)

    def _give(
        self,
        members: dict[str, Member],
        right: Sequence[str],
        wrong: Sequence[str],
        step: int,
        verdict: Verdict,
        what: str,
        *,
        is_known: bool = False,
    ) -> str:
        """Have those load that can, and say so; the others are looked at once more after the next step.

        `is_known`: what differs has to be equal, so those that ask not to heal take no part in the step.
        """
        sources = [m for m in right if members[m].asked.can_serve and m not in wrong][:MAX_SOURCES]
        for replica_id in wrong:
            asked = members[replica_id].asked
            has_loaded = self._loaded.get(replica_id) == step  # and holds another state nevertheless
            is_able = asked.can_load and asked.allow_heal and asked.waits_for_quorum
            if sources and is_able and not has_loaded:
                verdict.loads[replica_id] = sources
                self._loaded[replica_id] = self._same_at = step
                self._corrected.add(replica_id)
                if replica_id not in self._voices:  # of a quorum of an earlier life
                    self._joined.setdefault(replica_id, True)
        late = [m for m in wrong if m not in verdict.loads]
        if late:
            self._differed = step, Shows.ALL
            if idle := sorted(m for m in late if is_known and not members[m].asked.allow_heal):
                verdict.idle.update(idle)
                why = f"{name_some(idle)} asked for a quorum without healing, and takes no part in this step"
            elif sources:
                why = f"{name_some(late)} cannot load it before this step"
            else:
                why = "nobody can serve it in this step"
            return f"{what}. {why[0].upper()}{why[1:]}"
        return f"{what}. The others wait until it is loaded"

    def _learn(self, members: dict[str, Member], right: Sequence[str], step: int, verdict: Verdict) -> None:
        """Find out which of the leaves that are shown by themselves have to be equal."""
        order = dict.fromkeys([*right, *members])
        given_at = {m: _given_at(members[m], step) for m in order}
        came = {m for m in order if given_at[m] > min(given_at.values())}
        # The first step of those that came in proves nothing; who was only cut off has made others.
        fresh = {m for m in order if self._joined.get(m, False) and (given_at[m] >= 0 or step <= 1)}
        fresh |= {m for m in order if given_at[m] >= 0 and step - given_at[m] <= 1}
        stood = {m: _stood(members[m]) for m in order}
        found: dict[LeafFate, list[str]] = {fate: [] for fate in LeafFate}
        given: dict[str, bool] = {}
        late: set[str] = set()
        wrong: set[str] = set()
        apart: set[str] = set()
        for name, by_member in _by_leaf(members, right).items():
            eldest = [m for m in order if m in by_member and m not in came] or [m for m in right if m in by_member]
            usual, _ = Counter(by_member[m] for m in eldest).most_common(1)[0]
            differing = [m for m in order if by_member.get(m) != usual]
            if not differing:
                found[LeafFate.OPEN if any(name in stood[m] for m in by_member) else LeafFate.COMMON].append(name)
                continue
            last, was_late = self._given.get(name, (-1, False))
            had = {m for m in order if given_at[m] < last <= self._loaded.get(m, -1)}
            new = fresh - had
            quiet = {m for m in order if name in stood[m]} | new
            newcomers = quiet.intersection(differing) & (came | fresh)
            moves = _moves({of for m, of in by_member.items() if m not in quiet}, usual)
            kinds = (Came.NEW if m in new else Came.GIVEN if m in had else Came.STOOD for m in newcomers)
            fate = LEAF_FATES[moves][max(kinds, default=Came.NOBODY)]
            if fate is LeafFate.GIVEN:
                given[name] = newcomers.isdisjoint(new)
                late.update(newcomers)
                apart.update(differing)
            elif fate is LeafFate.LOADED:
                wrong.update(by_member.keys() & differing)
                apart.update(differing)
            elif name not in self._left_out:
                found[LeafFate.PARTED if was_late else fate].append(name)
        if given or wrong:
            others = [m for m in order if m not in apart] or right[:1]
            if those := sorted(wrong - {*others}):
                what = self._what(those, others, members, step)
                verdict.said.append(self._give(members, others, those, step, verdict, what))
            self._note_given(given, step)
            if late := late - verdict.loads.keys():
                those, leaves = sorted(late), name_some(sorted(given))
                what = f"{name_some(those)} has come in, and differs from {name_some(others)} in {leaves}"
                verdict.noted.append(self._give(members, others, those, step, verdict, what))
            # Who cannot load now, as it owes a backward pass say, is given it after the next step, as if that were its first.
            verdict.equal -= (late | wrong) - verdict.loads.keys()
            return
        if strange := sorted(found[LeafFate.PARTED]):
            self._part(strange, step, verdict)
        verdict.common += found[LeafFate.COMMON]
        verdict.own += found[LeafFate.OWN] + strange
        self._look_at_own({m: members[m] for m in self._voices if m in members}, step, verdict)
        for name in (*verdict.common, *verdict.own):
            self._given.pop(name, None)

    def _part(self, names: list[str], step: int, verdict: Verdict) -> None:
        what = f"{name_some(names)} changes in other steps in some groups than in others"
        verdict.said.append(f"{what}: from step {step} on each has its own, and it is not compared any more")
        self._parted.update(names[: MAX_LEAVES - len(self._parted)])

    def _look_at_own(self, voices: dict[str, Member], step: int, verdict: Verdict) -> None:
        """Find which of the leaves that were each group's own most of all with a voice, of which these show theirs, have alike by
        now. A quorum may be tried more than once: that is one look."""
        if step != self._own_at:
            self._own_at, self._own_before, self._own = step, self._own, {}
        for name, by_member in _by_leaf(voices, voices, own=True).items():
            value, num_alike = Counter(by_member.values()).most_common(1)[0]
            if num_alike == 1 or 2 * num_alike <= len(self._voices) or name in self._parted:
                continue
            self._own[name] = value
            if self._own_before.get(name, value) != value:
                verdict.common.append(name)
                self._young[name] = True
                if num_alike < len(self._voices) and self._differed[0] != step:
                    self._differed = step, Shows.SAMPLES  # those in which it differs load it after this step

    def _what(self, wrong: Sequence[str], right: Sequence[str], members: Collection[str], step: int) -> str:
        what = f"{name_some(wrong)} came to another state of step {step} than {name_some(right)}"
        if self._voices.keys() & wrong and 2 * len(right) <= sum(m in self._voices for m in members):
            what += ". No state has a majority, so that of the longest in the job is taken"
        return what

    def _note_given(self, given: Mapping[str, bool], step: int) -> None:
        for name, is_late in given.items():
            _, was_late = self._given.pop(name, (-1, False))
            self._given[name] = step, is_late or was_late
        while len(self._given) > MAX_LEAVES:
            del self._given[next(iter(self._given))]

    def _compared(self, members: dict[str, Member]) -> dict[str, list[str]]:
        """Return what each member shows, by rank, that has to be equal as far as is known."""
        known = {m: [_known(of_rank) for of_rank in member.asked.shown] for m, member in members.items()}
        if self._left_out:
            for rank, those in enumerate(zip(*(member.asked.shown for member in members.values()), strict=True)):
                digests = [{leaf.name: leaf.digest for leaf in of_rank.open} for of_rank in those]
                names = sorted(self._left_out.intersection(*digests))  # of others nobody knows whether they differ
                for m, of in zip(members, digests, strict=True):
                    known[m][rank] += "".join(f" {name} {of[name]}" for name in names)
        return known

    def validate(self) -> None:
        """Check the invariants, for tests; a `RuntimeError` says which one is broken."""
        if both := self._voices.keys() & self._joined.keys():
            raise RuntimeError(f"{both} were found equal since they joined, and were not")
        if strangers := self._loaded.keys() - self._voices.keys() - self._joined.keys():
            raise RuntimeError(f"{strangers} were told to load, and take no part")


class Corrections:
    """What one rank had to load of others' states at the beginning of a step, so that it does not go on so for ever."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        """By leaf: at which step it was loaded last, and for how many boundaries in a row."""
        self._times: Counter[str] = Counter()

    def count(self, leaves: Iterable[str]) -> int:
        """These leaves are loaded. Return how often that one of them was by now that was so the seldomest."""
        self._times.update(names := list(leaves) or [""])
        return min(self._times[name] for name in names)

    def note(self, step: int, leaves: Iterable[str]) -> str:
        """These leaves differ at a step. Return the first that does so for the third time in a row; empty: none does."""
        names = list(leaves) or [""]
        before, self._last = self._last, {}
        for name in names:
            last, times = before.get(name, (-1, 0))
            self._last[name] = step, times + 1 if step <= last + 1 else 1
        again = [name for name, (_, times) in self._last.items() if times >= MAX_IN_A_ROW]
        return (again[0] or NOWHERE) if again else ""


def _is_tried_again(num_steps: int) -> bool:
    """Whether groups are compared so many steps after all began one with the same, as the longer ago it is the seldomer."""
    return num_steps >= _FIRST_AGAIN and num_steps.bit_count() == 1


def _given_at(member: Member, step: int) -> int:
    """Return with the state of which step a member came in, as it says itself; -1: it did not, or says that of a later one."""
    given_at = member.asked.given_at - 1
    return given_at if given_at <= step else -1


def _has_trained(member: Member, step: int) -> bool:
    """Whether a member held the state of a quorum that it was in when it connected, and has gone on since it came in."""
    hello, has_gone_on = member.hello, not member.asked.came_in and _given_at(member, step) < step
    return has_gone_on and hello.was_in_quorum and hello.version.proven


def _holds_first(member: Member) -> bool:
    """Whether a member held the job's first state when it connected, and had heard of no quorum: it has computed nothing."""
    return not member.asked.came_in and member.hello.version.proven and not member.hello.last_quorum_id


def _is_new(member: Member, step: int) -> bool:
    """Whether a member was given its state by others, and has made one step since at most, as it says itself."""
    given_at = _given_at(member, step)
    return member.asked.came_in or (given_at >= 0 and step - given_at <= 1)


def _known(shown: StateShown) -> str:
    return f"{shown.owned} {shown.common}"


def _moves(values: Collection[object], usual: object) -> Moved:
    """Say where a leaf has moved, by the values that it has there, and by that of the eldest."""
    if len(values) > 1:
        return Moved.APART
    return Moved.NOWHERE if not values else Moved.ELDEST if usual in values else Moved.OTHERS


def _stood(member: Member) -> set[str]:
    """Return the leaves that have not moved in a member since it saw them first, or received them."""
    return {
        leaf.name for of_rank in member.asked.shown for leaf in of_rank.open[len(of_rank.open) - of_rank.num_still :]
    }


def _owned(member: Member) -> list[str]:
    return [of_rank.owned for of_rank in member.asked.shown]


def _told(names: Iterable[str]) -> list[str]:
    """Return those that have room in a message."""
    listed = sorted({*names})
    sizes = accumulate(size_of([name]) for name in listed)
    return [name for name, size in zip(listed, sizes, strict=True) if size <= MAX_NAMES_BYTES]


def _by_leaf(
    members: Mapping[str, Member], right: Collection[str], *, own: bool = False
) -> dict[str, dict[str, tuple[tuple[int, str], ...]]]:
    """Return, by name, what each member shows of a leaf by itself: its digests, with the ranks that have it. Only of leaves that
    half of those that are right show: nobody could load another one. `own`: of those that are each group's own."""
    values: dict[str, dict[str, list[tuple[int, str]]]] = {}
    for replica_id, member in members.items():
        for rank, of_rank in enumerate(member.asked.shown):
            for leaf in of_rank.own if own else of_rank.open:
                values.setdefault(leaf.name, {}).setdefault(replica_id, []).append((rank, leaf.digest))
    return {
        name: {m: tuple(found) for m, found in by_member.items()}
        for name, by_member in values.items()
        if 2 * sum(m in by_member for m in right) >= len(right)
    }
