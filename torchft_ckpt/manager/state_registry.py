"""The state that replicas have in common: what the user has registered, and the Manager's own part of it.

The users' `state_dict` functions run on the training thread, or while it waits; their `load_state_dict` functions on the
training thread alone. What is loaded is checked against what is registered before the first of them is called.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.checkpointing.state.containers import not_here
from torchft_ckpt.checkpointing.state.local_state import tensors_but_optimizer_state
from torchft_ckpt.checkpointing.state.optimizer_state import dtypes_kept, with_optimizer_state
from torchft_ckpt.checkpointing.state.parameters import (
    Names,
    StateHere,
    StatePlaces,
    group_keys,
    names_of,
    note_returned,
    returned_by,
)
from torchft_ckpt.checkpointing.state.samples import marks
from torchft_ckpt.checkpointing.state.shards import memory_of
from torchft_ckpt.checkpointing.state.tree import in_words
from torchft_ckpt.checkpointing.state.versions import Counted, count_writes
from torchft_ckpt.core.coordination.messages import StateVersion, name_some
from torchft_ckpt.core.training.outer_schedule import OuterSchedule, RoundPlace
from torchft_ckpt.errors import ConfigError, StateDictLoadError, StateMismatchError
from torchft_ckpt.manager.checking import ParameterLayout, frozen_in_words, layout_of, leaves_to_compare
from torchft_ckpt.manager.comparing import Differences, compare_states, fixed, not_returned
from torchft_ckpt.manager.left_out import left_out_of
from torchft_ckpt.manager.optimizer_settings import settings_of, take_settings, with_inner
from torchft_ckpt.manager.showing import CheckedLeaf, Glance, KnownLeaves, keeping
from torchft_ckpt.manager.volatile import (
    StateToSave,
    StateToServe,
    Unsteady,
    capture_for_save,
    copy_volatile,
    owned_by,
    tensors_in,
)

if TYPE_CHECKING:
    from torchft_ckpt.exact import StepLoader

logger = logging.getLogger(__name__)

_NUM_SOME = 4


class _Call:
    """A call of users' functions, while it lasts."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class PlainLoop:
    """What a Manager asks and tells instead of a `StepLoader` if there is none."""

    in_words = ""

    def held(self, _: StateVersion) -> list[tuple[int, int]]:
        return []

    def geometry(self) -> dict[str, int]:
        return {}

    def _takes_no_part(self, *_: object, **__: object) -> None:
        return

    refuse = votes = decided = check_restored = _takes_no_part


class StateRegistry:
    """The users' pairs of functions.

    Args:
        lock: held for writing while a state is loaded.
    """

    def __init__(self, lock: StateDictLock) -> None:
        self.lock = lock
        self.microbatches: StepLoader | PlainLoop = PlainLoop()
        self.num_changes = 0
        """How often it was registered, guarded or loaded, or optimizers got other parameters: then what is known of the loop's
        objects is to be looked for again."""
        self._load: dict[str, Callable[[Any], None]] = {}
        self._get: dict[str, Callable[[], Any]] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self.outer_optimizers: list[torch.optim.Optimizer] = []
        """They step when groups that train apart agree, and only then."""
        self._moving: set[str] = set()
        self._unguarded: list[torch.optim.Optimizer] = []
        self._placed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Those whose state the functions have returned."""
        self._let_go: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        """Those that are guarded no more: whether the loop has cleared their gradients since."""
        self._layout: tuple[list[torch.Tensor], ParameterLayout] | None = None
        """Of these parameters."""
        self._marks: list[tuple[int, int, int]] | None = None
        self._last_known: list[torch.optim.Optimizer] = []
        self._cached: list[torch.Tensor] = []
        """The parameters of all optimizers that are known, while `_marks` stay the same."""
        self._has_state = self._has_warned_of_left_out = False
        """Optimizers remember something of what they train."""
        self._in_function = threading.local()
        self._unsteady = Unsteady()
        self._groups: list[list[str]] = []
        """Of the parameter groups of all optimizers that are known, which parameters they have."""
        self._agreed_on: set[str] = set()
        self._not_returned: Differences | None = None
        self._returned: dict[str, Any] | None = None
        self._others_bytes = 0
        """What no optimizer owned of the state when its size was last asked for."""
        self._frozen_for_rounds: str | None = None
        self._after_restore: list[Callable[[], None]] = []
        self._has_unannounced = False
        """Something that moves belongs to optimizers that are not guarded."""

    def register(
        self,
        key: str,
        load: Callable[[Any], None],
        get: Callable[[], Any],
        *,
        explicitly_locked: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        local_between_syncs: bool = False,
        after_restore: Callable[[], None] | None = None,
    ) -> None:
        """Add a pair; `explicitly_locked`: optimizer steps do not change it. Raises `ConfigError` where the key is taken.

        `optimizers`: whose state is in it, where they are not guarded. `local_between_syncs`: between two changes of it every
        group trains by itself; it is loaded after all others. `after_restore`: called when a restore is over.
        """
        if key in self._load:
            raise ConfigError(f"state dict functions are registered under {key!r} already", party=key)
        self.num_changes += 1
        self._load[key] = load
        self._get[key] = get
        self._layout = None
        self._unguarded += optimizers
        self._after_restore += [] if after_restore is None else [after_restore]
        if local_between_syncs:
            self.outer_optimizers += optimizers
            self._agreed_on.add(key)
            self._frozen_for_rounds = self.frozen()
        if not explicitly_locked:
            self._moving.add(key)
            self._has_unannounced = self._has_unannounced or bool(optimizers)

    def agree_on(self, key: str) -> None:
        """What is registered under a key changes only where groups that train apart agree, under the lock."""
        self._moving.discard(key)
        self._agreed_on.add(key)

    def keys(self) -> Collection[str]:
        """Return the keys of the pairs."""
        return self._get.keys()

    @property
    def is_empty(self) -> bool:
        return not self._get

    @property
    def is_explicitly_locked(self) -> bool:
        """Whether guarded optimizers change nothing of the state."""
        return not self._moving

    @property
    def trains_apart(self) -> bool:
        """Whether every group trains by itself between two steps of the Manager, as in an outer loop."""
        return bool(self._agreed_on)

    def capture(self) -> dict[str, Any]:
        """Call all `state_dict` functions. What they return refers to live tensors."""
        note_returned(self._known())
        with self._noted("get"):
            return {key: get() for key, get in self._get.items()}

    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Return the modules whose `state_dict()` the functions return, with their keys, in the order in which they ask."""
        found: list[tuple[str, torch.nn.Module]] = []
        plain, thread, key = torch.nn.Module.state_dict, threading.get_ident(), ""

        def state_dict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                found.append((key, self))
            return plain(self, *args, **kwargs)

        torch.nn.Module.state_dict = state_dict  # type: ignore[method-assign]
        try:
            with self._noted("get"):
                for key, get in self._get.items():  # noqa: B007 - `state_dict` reads it
                    get()
        finally:
            torch.nn.Module.state_dict = plain  # type: ignore[method-assign]
        return found

    @contextlib.contextmanager
    def _noted(self, kind: str) -> Iterator[None]:
        before, call = getattr(self._in_function, "call", None), _Call(kind)
        try:
            self._in_function.call = weakref.ref(
                call
            )  # an interrupt at the end may leave it there: it is gone with this frame
            yield
        finally:
            self._in_function.call = before

    @property
    def in_function(self) -> str:
        """Which of the users' functions the calling thread is in: "get", "load", or "" for none."""
        call = getattr(self._in_function, "call", lambda: None) or (lambda: None)
        return getattr(call(), "kind", "")

    @property
    def knows_optimizers(self) -> bool:
        """Whether there are optimizers whose state is made where they have none yet."""
        return bool(self._optimizers or self._unguarded)

    @property
    def is_sharded(self) -> bool:
        """Whether there are parameters of which this process holds parts, as far as is known."""
        return self._layout is not None and self._layout[1].is_sharded

    def layout(self, captured: dict[str, Any] | None = None) -> ParameterLayout:
        """Return what has to be alike in all groups of the parameters that are here.

        Parameters are those of guarded optimizers, in their order; without one, all sharded tensors that are registered, but
        state of optimizers. On the training thread. `captured`: as `capture` has just returned it.

        Raises:
            UnsupportedValueError: what is here of a parameter is no box.
        """
        parameters = self._parameters()
        known = self._last_known
        remembers = not self._has_state and any(optimizer.state for optimizer in known)
        if self._layout is None or self._layout[0] is not parameters or remembers:
            self._has_state, captured = self._has_state or remembers, captured or self.capture()
            places = self._number(captured)
            parameters, known = self._parameters(), self._last_known
            names = _names_of(parameters, known, places)
            named = [(names[id(p)], p) for p in parameters] if known else tensors_but_optimizer_state(captured)
            self._layout = parameters, layout_of(named, only_sharded=not known, beside=self.microbatches.in_words)
            self._warn_of_left_out(captured, known)
        return self._layout[1]

    def _number(self, captured: dict[str, Any]) -> StatePlaces:
        """Number the optimizers by where their parameters and their state are in the state, not by the order of guarding.

        One whose state the functions have returned, and that they return another one in place of, is guarded no more: the loop
        has made a new one, and a group that comes in has never had it.
        """
        places = StatePlaces(captured)
        owned = places.owned(returned_by(self._known()))
        paths = {id(one.owner): path for path, one in owned.items()}
        if any(one.owner not in self._placed for one in owned.values()):
            for one in [one for one in self._optimizers if id(one) not in paths and one in self._placed]:
                self._optimizers.remove(one)
                self._let_go[one] = False
            self._placed.update(one.owner for one in owned.values())

        def place(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
            names = [name for group in places.names(optimizer) for name in group if name]
            return min(names, default="\uffff"), paths.get(id(optimizer), "")

        self._optimizers[:] = sorted(self._optimizers, key=place)
        self._unguarded[:] = sorted(self._unguarded, key=place)
        self._groups = group_keys(
            [(optimizer, paths.get(id(optimizer), ""), places.names(optimizer)) for optimizer in self._known()]
        )
        return places

    def _warn_of_left_out(self, captured: dict[str, Any], known: Sequence[torch.optim.Optimizer]) -> None:
        is_wanted = self.is_used_by_loops and not self.is_empty and not self._has_warned_of_left_out
        if is_wanted and (left_out := left_out_of(captured, leaves_to_compare(captured, known))):
            self._has_warned_of_left_out = True
            logger.warning(
                "optimizers change what no registered state_dict returns: %s. A replica group that comes back has its own values"
                " there, and all that is trained with them differs from then on: return it in a state_dict function",
                name_some(left_out),
            )

    def frozen(self) -> str:
        """Say which parameters of the optimizers need no gradient now; empty where no optimizer is known.

        Groups that train apart exchange what needed one when that was registered, whatever they train later.
        """
        if self._frozen_for_rounds is not None:
            return self._frozen_for_rounds
        return frozen_in_words([parameter.requires_grad for parameter in self._parameters()])

    def _parameters(self) -> list[torch.Tensor]:
        known = self._last_known = self._known()
        groups = [group["params"] for optimizer in known for group in optimizer.param_groups]
        marks = [(len(group), id(group[0]), id(group[-1])) for group in groups if group]
        if marks != self._marks:  # a pass over thousands takes as long as all else that each step does
            self._marks, self._cached = marks, _parameters_of(known)
            self.num_changes += 1
        return self._cached

    def state_functions(self) -> list[Callable[[], Any]]:
        return list(self._get.values())

    def known_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return those that are guarded, or belong to what is registered, with those that they hold."""
        return self._known()

    def has_gradients(self) -> bool:
        """Whether a parameter of a guarded optimizer has a gradient."""
        return any(parameter.grad is not None for parameter in _parameters_of(self._optimizers))

    def _known(self) -> list[torch.optim.Optimizer]:
        return with_inner([*self._optimizers, *self._unguarded])

    def capture_to_receive(self, *, also_frozen: bool = False) -> StateHere:
        """Capture the state that another one is received for: what arrives takes the layout of the tensors that are here.

        Optimizer state that does not exist yet is there for it, where parameters are sharded. On the training thread, or while
        it waits.
        """
        self.layout()
        with with_optimizer_state(self._known() if self.is_sharded else (), also_frozen=also_frozen):
            return StateHere(self.capture(), self._known())

    def guarded(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that change what they own under the write lock alone, in an order that all groups have."""
        return self._optimizers

    def _owned_and_still(self) -> tuple[dict[int, torch.Tensor], dict[int, int]]:
        """Return what optimizers own, by address; and the bytes of what of it no step changes."""
        still = {
            part.data_ptr(): part.nbytes
            for parameter in self._parameters()
            if not parameter.requires_grad and parameter.grad is None
            for part in memory_of(parameter)
        }
        return owned_by(self._known()), still

    def _trained(self) -> set[int]:
        """Return where the storages begin that a step of an optimizer may write to."""
        owned, still = self._owned_and_still()
        return {tensor.untyped_storage().data_ptr() for address, tensor in owned.items() if address not in still}

    @property
    def announces_steps(self) -> bool:
        """Whether all that changes the registered state says so: guarded optimizers, or an owner under the lock."""
        knows_all_steps = bool(self._optimizers) and not self._unguarded and self.is_used_by_loops
        return (knows_all_steps or not self.is_used_by_loops) and not self.is_empty

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that changes what it owns under the write lock alone."""
        self.num_changes += 1
        self._optimizers.append(optimizer)
        self._layout = None

    def clears(self, optimizer: torch.optim.Optimizer) -> None:
        """The loop clears an optimizer's gradients. One that was let go is guarded again as it does so twice: it trains on.

        Once it may do so at the end of the iteration in which the new one was made.
        """
        if self._let_go.get(optimizer):
            del self._let_go[optimizer]
            self.guard(optimizer)
        elif optimizer in self._let_go:
            self._let_go[optimizer] = True

    def capture_to_serve(self, captured: dict[str, Any] | None = None) -> StateToServe:
        """Capture the state with copies of the small tensors that a forward pass may change while they are served.

        These are the ones that belong to no guarded optimizer: BatchNorm's running statistics, for example. Whatever changed
        without the lock while it was served before is copied as well. `captured`: as `capture` has just returned it.
        """
        captured = captured or self.capture()
        optimizers = [] if self.is_explicitly_locked else with_inner(self._optimizers)
        held = copy_volatile(captured, optimizers, self._unsteady, self._trained if optimizers else None)
        own: dict[str, Any] = {"owners": self.owners({"user": captured})}
        if not self._agreed_on and not self.is_explicitly_locked:
            own |= {"settings": settings_of(self._known()), "groups": self._groups}
        return held._replace(own=own)

    def owners(self, state: dict[str, Any]) -> dict[str, Names]:
        """Return which parameters the optimizers in a state have that was just captured; see `parameters.names_of`."""
        return names_of(StatePlaces(state).owned(returned_by(self._known())))

    def count_writes(self) -> list[Counted]:
        """Return the versions of the guarded optimizers' parameters. On the training thread."""
        return [counted for parameter in _parameters_of(self._optimizers) for counted in count_writes(parameter)]

    def some_parameters(self) -> list[torch.Tensor]:
        """Return a few of the guarded optimizers' parameters."""
        return _parameters_of(self._optimizers)[:_NUM_SOME]

    def sizes(self, captured: Any = None) -> tuple[int, int]:
        """Return the bytes of the state here, and of what training changes in it.

        An optimizer that has made no step has no state yet: it is taken to have two values for each that it trains, as Adam has.
        Without what was `captured`, what no optimizer owns is taken to be as large as it was when that was known.
        """
        owned, still = self._owned_and_still()
        if captured is not None:
            parts = (part for tensor in tensors_in(captured) for part in memory_of(tensor))
            others = {part.data_ptr(): part.nbytes for part in parts if part.data_ptr() not in owned}
            self._others_bytes = sum(others.values())
        changing_bytes = sum(part.nbytes for address, part in owned.items() if address not in still)
        changing_bytes += sum(2 * _trained_bytes([optimizer]) for optimizer in self._known() if not optimizer.state)
        return changing_bytes + sum(still.values()) + self._others_bytes, changing_bytes

    @property
    def is_used_by_loops(self) -> bool:
        """Whether a training loop uses the state between two quorums. Where groups train apart it is the outer loop's."""
        return not self.is_explicitly_locked and not self._agreed_on

    def comparison_with(self, captured: dict[str, Any]) -> Callable[[object, bool], Differences]:
        """Return what says how a state that is received differs from this one, which `capture_to_serve` has just returned.

        It is to be called before the next step of an optimizer ends, on any thread.
        """
        return functools.partial(compare_states, fixed(captured))

    def leaves_to_compare(self, captured: dict[str, Any] | None = None) -> list[CheckedLeaf]:
        """Return the leaves of the state of now by which groups are compared. On the training thread.

        Of groups that train apart it is what they agreed on, and what the script has of its own: nothing of the optimizers that
        they train with, nor what outer optimizers are set to, as a round is applied with the same settings everywhere.

        Args:
            captured: as `capture` has just returned it.
        """
        captured = self.capture() if captured is None else captured
        still = captured.keys() - self._moving
        if self._agreed_on:
            agreed = leaves_to_compare({key: captured[key] for key in still}, (), still=still)
            own = leaves_to_compare({key: captured[key] for key in captured.keys() - still}, self._known())
            leaves = [*agreed, *(leaf for leaf in own if not leaf.is_owned)]
            return [leaf for leaf in leaves if ".param_groups." not in leaf.place]
        return leaves_to_compare(captured, self._known(), still=still)

    def glance(self, glance: Glance, step: int) -> None:
        """Look at the state with which a step begins, as far as that costs next to nothing; call it after `layout`."""
        if self.knows_optimizers and self.is_used_by_loops:
            glance.take(step, self._cached, self._last_known)
        else:
            glance.forget()

    def keeping_own(
        self, user: dict[str, Any], differing: Sequence[str], known: KnownLeaves
    ) -> tuple[dict[str, Any], list[str], list[str], list[str]]:
        """Return a received state with this group's own leaves in place of the source's; what differs but for these; what of that
        has to be equal, as far as is known; and which plain values of its own differ.
        """
        here = self.capture()
        kept = {key: keeping(item, here[key], known.own, key) for key, item in user.items()}
        compared = self.leaves_to_compare(here)
        leaves = {leaf.name: leaf for leaf in compared if known.may_count(leaf) or leaf.key in known.still - known.own}
        found = {path: leaves.get(path) or leaves.get(path.rpartition(".")[0]) for path in differing}
        there = {path: leaf for path, leaf in found.items() if leaf is not None}
        # The settings of optimizers are owned, and in what the functions return as well, under other names.
        has_settings = self.knows_optimizers and not self._agreed_on
        of_all = [
            path
            for path, leaf in there.items()
            if known.counts(leaf) or leaf.key in known.late or (has_settings and ".param_groups." in path)
        ]
        own = [leaf.name for leaf in compared if leaf.key in known.own and isinstance(leaf.value, str)]
        return kept, list(there), of_all, sorted({*own}.intersection(differing))

    def take_settings(self, own: Mapping[str, Any]) -> list[str]:
        """Give optimizers the settings of the source for the same parameters, and say what differed. On the training thread."""
        if self._layout is None or self._layout[0] is not self._parameters():
            self.layout()  # the load functions have given them more parameters
        return take_settings(self._known(), own.get("settings"), here=self._groups, there=own.get("groups"))

    def not_returned(self, user: dict[str, Any], *, twice: bool = False) -> Differences:
        """Say what the functions do not return of what has just been loaded, large tensors apart. On the training thread.
        `twice`: see `comparing.not_returned`.

        Where groups train apart it is what they did not return before the global parameters came into the model.
        """
        if self._not_returned is not None:
            return self._not_returned
        self._returned = self.capture()
        return not_returned(self._returned, user, twice=twice)

    def take_returned(self) -> dict[str, Any]:
        """Return what the functions returned when they were last asked for `not_returned`, once; else what they return now."""
        returned, self._returned = self._returned, None
        return self.capture() if returned is None else returned

    def forget_returned(self) -> None:
        """Nobody takes what the functions returned: it may be a copy of the state."""
        self._returned = None

    def capture_for_save(self, state: dict[str, Any], *, by_key: bool) -> StateToSave:
        """Return a state as it is to be saved while training goes on.

        What every group has its own of is what a forward pass may change, all that no optimizer owns (BatchNorm's running
        statistics), or, where the groups train apart between two rounds, all that moves.

        Args:
            state: as `capture` returned it, or a state dict of the caller's.
            by_key: it is the former.
        """
        if by_key and self.is_explicitly_locked:
            return StateToSave(state, frozenset(), False)
        held = capture_for_save(state, with_inner(self._optimizers))
        if self._agreed_on:
            own = {key: held.state[key] for key in self._moving} if by_key else held.state
            held = held._replace(group_local_ids=frozenset(map(id, tensors_in(own))))
        # Guarded optimizers leave the lock alone where all that is registered is explicitly locked.
        return held._replace(
            unannounced_changes=held.unannounced_changes or self.is_explicitly_locked or self._has_unannounced
        )

    def end_restore(self) -> None:
        """Tell those who want to know that a checkpoint was restored, or that the state is to come from others."""
        for tell in self._after_restore:
            tell()

    def check(self, user: object) -> dict[str, Any]:
        """Return what was received, if each registered key is in it and no other.

        Raises:
            StateMismatchError: it names the keys; nothing was loaded.
        """
        if not isinstance(user, dict) or set(user) != set(self._load):
            have = sorted(map(in_words, user)) if isinstance(user, dict) else type(user).__name__
            raise StateMismatchError(
                f"the source's state has the keys {have}, this replica registered {sorted(self._load)}; register the"
                " same state dict functions on all replicas",
            )
        return user

    def load(self, user: dict[str, Any], keys: Collection[str] | None = None, *, in_place: bool = False) -> bool:
        """Call the `load_state_dict` functions of these keys, or all: last those of what the groups agreed on, where they train
        apart.

        Returns:
            whether they have loaded what they were given. If that lies in the memory of what is registered (`in_place`), one
            that clears this before it reads (`w.zero_(); w.add_(s)`) has not: it is to be given another copy.

        It is to be in the model then, whatever the others have loaded into it of one group's own. Optimizers that are known
        get their state in its own dtypes, which torch would cast to those of their parameters.

        Raises:
            StateDictLoadError: one of them raised; what is loaded now is undefined.
        """
        self.num_changes += 1
        given = list(tensors_in(user)) if in_place else []
        before = marks(given)
        own = [key for key in self._load if key not in self._agreed_on and (keys is None or key in keys)]
        with self.lock.write(), self._noted("load"), dtypes_kept(self._known()):
            self._load_keys(user, own)
            if self._agreed_on:
                returned = {key: self._get[key]() for key in own}
                self._not_returned = not_returned(returned, {key: user[key] for key in own})
                self._load_keys(user, [key for key in self._load if key in self._agreed_on])
        return marks(given) == before

    def _load_keys(self, user: dict[str, Any], keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self._load[key](user[key])
            except Exception as error:
                lacks: list[str] = []
                with contextlib.suppress(Exception):  # it may return nothing in this state
                    lacks += not_here(self._get[key](), user[key], key)
                raise StateDictLoadError.of(key, error, name_some(lacks)) from error


class OwnState:
    """The Manager's own part of the state, besides its steps. The training thread changes it."""

    def __init__(self) -> None:
        self.known = KnownLeaves()
        self.found: tuple[Sequence[str], Sequence[str]] = (), ()
        """Which leaves are common and which own, as the lighthouse found before the last quorum."""
        self.batches_committed = 0
        """Batches that went into committed steps, over all replica groups."""
        self.batches_before = 0
        """The same before the step that was voted on last."""
        self.place = RoundPlace()
        """Of an outer loop: where the script is in its round. It is served, and not saved."""
        self.outer_schedule: OuterSchedule | None = None
        """Of an outer loop: says which places there are."""
        self.restored: dict[str, int] | None = None
        """What was restored last, of what `saved` had returned."""

    def served(self, version: StateVersion) -> dict[str, Any]:
        """Return it as it travels with the state of that name."""
        return {
            "step": version.step,
            "batches_committed": self.batches_committed,
            "quorum_id": version.quorum_id,
            "epoch": version.epoch,
            "place": [self.place.num_ends_left, self.place.retries_left],
            "common": "\n".join(sorted(self.known.common)),
            "own": "\n".join(sorted(self.known.own)),
            "moved": "\n".join(sorted(self.known.moved - self.known.common - self.known.own) * self.known.by_rounds),
        }

    def saved(self, step: int, *, is_before: bool = False) -> dict[str, int]:
        """Return it as it is saved with the state of a step; `is_before`: of the one before the last vote."""
        return {"step": step, "batches_committed": self.batches_before if is_before else self.batches_committed}

    def complaint_about(self, own: dict[str, Any]) -> str:
        """Say what no source can have returned by `served`, as the end of a sentence; empty where all is well."""
        batches = own.get("batches_committed", 0)
        if type(batches) is not int or not 0 <= batches < 2**63:
            return "a number of committed batches that is none"
        if not all(isinstance(own.get(names, ""), str) for names in ("common", "own", "moved")):
            return "names of what groups have in common that are none"
        place = own.get("place", [0, 0])
        if not isinstance(place, list) or len(place) != 2 or not all(type(n) is int and 0 <= n < 2**63 for n in place):
            return "a place in its round that is none"
        return "" if self.outer_schedule is None else self.outer_schedule.complaint_about(RoundPlace(*place))

    def take_served(self, own: dict[str, Any]) -> None:
        """Take what `served` returned at the source; `Healing.wait` has checked it by `complaint_about`."""
        self.batches_committed = own.get("batches_committed", 0)
        self.place = RoundPlace(*own.get("place", ()))
        self.known.common, self.known.own, moved = (
            set(filter(None, own.get(names, "").split("\n"))) for names in ("common", "own", "moved")
        )
        self.known.loaded()
        self.known.moved |= moved

    def take_saved(self, state_dict: dict[str, int]) -> int:
        """Take what `saved` returned, and return the step.

        Raises:
            ConfigError: it is no Manager's state.
        """
        try:
            step, batches = int(state_dict["step"]), int(state_dict["batches_committed"])
        except (KeyError, TypeError, ValueError) as error:
            message = f"this is no Manager's state dict (keys step, batches_committed): {state_dict!r}"
            raise ConfigError(message, party="state_dict") from error
        if step < 0 or batches < 0:
            raise ConfigError(f"a Manager's state dict holds no negative counts: {state_dict!r}", party="state_dict")
        self.batches_committed, self.restored = batches, state_dict
        self.known.take_saved(state_dict)
        return step


def _trained_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    trained = (parameter for parameter in _parameters_of(optimizers) if parameter.requires_grad)
    return sum(part.nbytes for parameter in trained for part in memory_of(parameter))


def _names_of(
    parameters: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer], places: StatePlaces
) -> dict[int, str]:
    """Call parameters by their number, and by their place in the state, or else as their optimizers call them; by `id`."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    at = [name for optimizer in optimizers for names in places.names(optimizer) for name in names]
    names = {id(p): name for g in groups for name, p in zip(g.get("param_names") or (), g["params"], strict=False)}
    names |= {id(p): name for p, name in zip((p for g in groups for p in g["params"]), at, strict=True) if name}
    return {
        id(p): f"parameter {n}, {names[id(p)]}" if id(p) in names else f"parameter {n}"
        for n, p in enumerate(parameters)
    }


def _parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    parameters = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return list({id(parameter): parameter for parameter in parameters}.values())
