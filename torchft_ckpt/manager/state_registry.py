"""The state that replicas have in common: what the user has registered, and the Manager's own part of it.

The users' `state_dict` functions run on the training thread, or while it waits; their `load_state_dict` functions on the
training thread alone. What is loaded is checked against what is registered before the first of them is called.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.checkpointing.state.local_state import tensors_but_optimizer_state
from torchft_ckpt.checkpointing.state.optimizer_state import dtypes_kept, with_optimizer_state
from torchft_ckpt.checkpointing.state.shards import memory_of
from torchft_ckpt.checkpointing.state.tree import in_words
from torchft_ckpt.checkpointing.state.versions import Counted, count_writes
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.core.training.outer_schedule import OuterSchedule, RoundPlace
from torchft_ckpt.errors import ConfigError, StateDictLoadError, StateMismatchError
from torchft_ckpt.manager.checking import CheckedLeaf, ParameterLayout, frozen_in_words, layout_of, leaves_to_compare
from torchft_ckpt.manager.comparing import Differences, compare_states, fixed, not_returned
from torchft_ckpt.manager.optimizer_settings import settings_of, take_settings, with_inner
from torchft_ckpt.manager.volatile import (
    StateToSave,
    StateToServe,
    Unsteady,
    capture_for_save,
    copy_volatile,
    owned_by,
    tensors_in,
)


class StateRegistry:
    """The users' pairs of functions.

    Args:
        lock: held for writing while a state is loaded.
    """

    def __init__(self, lock: StateDictLock) -> None:
        self._lock = lock
        self._load: dict[str, Callable[[Any], None]] = {}
        self._get: dict[str, Callable[[], Any]] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._moving: set[str] = set()
        self._unguarded: list[torch.optim.Optimizer] = []
        self._layout: tuple[int, ParameterLayout] | None = None
        self._in_function = threading.local()
        self._unsteady = Unsteady()
        self._agreed_on: set[str] = set()
        self._not_returned: Differences | None = None
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
        self._load[key] = load
        self._get[key] = get
        self._unguarded += optimizers
        self._after_restore += [] if after_restore is None else [after_restore]
        if local_between_syncs:
            self._agreed_on.add(key)
            self._frozen_for_rounds = self.frozen()
        if not explicitly_locked:
            self._moving.add(key)
            self._has_unannounced = self._has_unannounced or bool(optimizers)

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
        with self._noted("get"):
            return {key: get() for key, get in self._get.items()}

    @contextlib.contextmanager
    def _noted(self, kind: str) -> Iterator[None]:
        before, self._in_function.kind = self.in_function, kind
        try:
            yield
        finally:
            self._in_function.kind = before

    @property
    def in_function(self) -> str:
        """Which of the users' functions the calling thread is in: "get", "load", or "" for none."""
        return getattr(self._in_function, "kind", "")

    @property
    def knows_optimizers(self) -> bool:
        """Whether there are optimizers whose state is made where they have none yet."""
        return bool(self._optimizers or self._unguarded)

    @property
    def is_sharded(self) -> bool:
        """Whether there are parameters of which this process holds parts, as far as is known."""
        return self._layout is not None and self._layout[1].is_sharded

    def layout(self) -> ParameterLayout:
        """Return what has to be alike in all groups of the parameters that are here.

        Parameters are those of guarded optimizers; without one, all sharded tensors that are registered, but state of
        optimizers. On the training thread.

        Raises:
            UnsupportedValueError: what is here of a parameter is no box.
        """
        parameters = self._parameters()
        if self._layout is None or self._layout[0] != len(parameters):
            named = (
                [(f"parameter {number}", parameter) for number, parameter in enumerate(parameters)]
                if self.knows_optimizers
                else tensors_but_optimizer_state(self.capture())
            )
            self._layout = len(parameters), layout_of(named, only_sharded=not self.knows_optimizers)
        return self._layout[1]

    def frozen(self) -> str:
        """Say which parameters of the optimizers need no gradient now; empty where no optimizer is known.

        Groups that train apart exchange what needed one when that was registered, whatever they train later.
        """
        if self._frozen_for_rounds is not None:
            return self._frozen_for_rounds
        return frozen_in_words([parameter.requires_grad for parameter in self._parameters()])

    def _parameters(self) -> list[torch.Tensor]:
        return _parameters_of(self._known())

    def _known(self) -> list[torch.optim.Optimizer]:
        return with_inner([*self._optimizers, *self._unguarded])

    def capture_to_receive(self, *, beside_steps: bool = False, also_frozen: bool = False) -> dict[str, Any]:
        """Capture the state that another one is received for: what arrives takes the layout of the tensors that are here.

        Optimizer state that does not exist yet is there for it, where parameters are sharded. On the training thread, or while
        it waits; `beside_steps`: it does not, so guarded optimizers, which it may be stepping, are left alone.
        """
        if not beside_steps:
            self.layout()
        if not self.is_sharded:
            return self.capture()
        optimizers = with_inner(self._unguarded) if beside_steps else self._known()
        with with_optimizer_state(optimizers, also_frozen=also_frozen):
            return self.capture()

    def guarded(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that change what they own under the write lock alone, in the order in which they were guarded."""
        return self._optimizers

    def gradient_bytes(self) -> int:
        """Return the size of the gradients of a step here, of guarded optimizers."""
        return _trained_bytes(with_inner(self._optimizers))

    @property
    def announces_steps(self) -> bool:
        """Whether all that changes the registered state says so: guarded optimizers, or an owner under the lock."""
        return (self.knows_all_steps or not self.is_used_by_loops) and not self.is_empty

    @property
    def knows_all_steps(self) -> bool:
        """Whether nothing changes the registered state but guarded optimizers, as far as was said."""
        return bool(self._optimizers) and not self._unguarded and self.is_used_by_loops

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that changes what it owns under the write lock alone."""
        self._optimizers.append(optimizer)
        self._layout = None

    def capture_to_serve(self) -> StateToServe:
        """Capture the state with copies of the small tensors that a forward pass may change while they are served.

        These are the ones that belong to no guarded optimizer: BatchNorm's running statistics, for example. Whatever changed
        without the lock while it was served before is copied as well.
        """
        held = copy_volatile(
            self.capture(), [] if self.is_explicitly_locked else with_inner(self._optimizers), self._unsteady
        )
        return (
            held if self._agreed_on or self.is_explicitly_locked else held._replace(settings=settings_of(self._known()))
        )

    def count_writes(self) -> list[Counted]:
        """Return the versions of the guarded optimizers' parameters. On the training thread."""
        return [counted for parameter in _parameters_of(self._optimizers) for counted in count_writes(parameter)]

    def sizes(self, captured: Any = None) -> tuple[int, int]:
        """Return the bytes of the state here, and of what training changes in it.

        An optimizer that has made no step has no state yet: it is taken to have two values for each that it trains, as Adam has.
        Without what was `captured`, only what optimizers own is known.
        """
        owned = owned_by(self._known())
        still = {
            part.data_ptr(): part.nbytes
            for parameter in self._parameters()
            if not parameter.requires_grad
            for part in memory_of(parameter)
        }
        others = {
            part.data_ptr(): part.nbytes
            for tensor in tensors_in(captured)
            for part in memory_of(tensor)
            if part.data_ptr() not in owned
        }
        changing_bytes = sum(part.nbytes for address, part in owned.items() if address not in still)
        changing_bytes += sum(2 * _trained_bytes([optimizer]) for optimizer in self._known() if not optimizer.state)
        return changing_bytes + sum(still.values()) + sum(others.values()), changing_bytes

    @property
    def is_used_by_loops(self) -> bool:
        """Whether a training loop uses the state between two quorums. Where groups train apart it is the outer loop's."""
        return not self.is_explicitly_locked and not self._agreed_on

    def comparison_with(self, captured: dict[str, Any]) -> Callable[[object], Differences]:
        """Return what says how a state that is received differs from this one, which `capture_to_serve` has just returned.

        It is to be called before the next step of an optimizer ends, on any thread.
        """
        here = fixed(captured)
        return lambda received: compare_states(here, received, self._known())

    def addresses_of_optimizers(self) -> Collection[int]:
        """Return where the memory begins of what optimizers change."""
        return owned_by(self._known()).keys()

    def leaves_to_compare(self) -> list[CheckedLeaf]:
        """Return what has to be equal in all groups of the state of now. On the training thread.

        Of groups that train apart it is what they agreed on, and nothing of the optimizers that they train with.
        """
        captured = self.capture()
        still = captured.keys() - self._moving
        if self._agreed_on:
            return leaves_to_compare({key: captured[key] for key in still}, (), still=still)
        return leaves_to_compare(captured, self._known(), still=still)

    def take_settings(self, settings: object) -> list[str]:
        """Give optimizers the settings of the source, and say what differed. On the training thread."""
        return take_settings(self._known(), settings)

    def not_returned(self, user: dict[str, Any]) -> Differences:
        """Say what the functions do not return of what has just been loaded, large tensors apart. On the training thread.

        Where groups train apart it is what they did not return before the global parameters came into the model.
        """
        return not_returned(self.capture(), user) if self._not_returned is None else self._not_returned

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

    def load(self, user: dict[str, Any]) -> None:
        """Call all `load_state_dict` functions: last those of what the groups agreed on, where they train apart.

        It is to be in the model then, whatever the others have loaded into it of one group's own. Optimizers that are known
        get their state in its own dtypes, which torch would cast to those of their parameters.

        Raises:
            StateDictLoadError: one of them raised; what is loaded now is undefined.
        """
        own = [key for key in self._load if key not in self._agreed_on]
        with self._lock.write(), self._noted("load"), dtypes_kept(self._known()):
            self._load_keys(user, own)
            if self._agreed_on:
                returned = {key: self._get[key]() for key in own}
                self._not_returned = not_returned(returned, {key: user[key] for key in own})
                self._load_keys(user, [key for key in self._load if key in self._agreed_on])

    def _load_keys(self, user: dict[str, Any], keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self._load[key](user[key])
            except Exception as error:
                raise StateDictLoadError.of(key, error) from error


class OwnState:
    """The Manager's own part of the state, besides its steps. The training thread changes it."""

    def __init__(self) -> None:
        self.batches_committed = 0
        """Batches that went into committed steps, over all replica groups."""
        self.batches_before = 0
        """The same before the step that was voted on last."""
        self.place = RoundPlace()
        """Of an outer loop: where the script is in its round. It is served, and not saved."""
        self.outer_schedule: OuterSchedule | None = None
        """Of an outer loop: says which places there are."""

    def served(self, version: StateVersion) -> dict[str, Any]:
        """Return it as it travels with the state of that name."""
        return {
            "step": version.step,
            "batches_committed": self.batches_committed,
            "quorum_id": version.quorum_id,
            "epoch": version.epoch,
            "place": [self.place.num_ends_left, self.place.retries_left],
        }

    def saved(self, step: int, *, is_before: bool = False) -> dict[str, int]:
        """Return it as it is saved with the state of a step; `is_before`: of the one before the last vote."""
        return {"step": step, "batches_committed": self.batches_before if is_before else self.batches_committed}

    def complaint_about(self, own: dict[str, Any]) -> str:
        """Say what no source can have returned by `served`, as the end of a sentence; empty where all is well."""
        batches = own.get("batches_committed", 0)
        if type(batches) is not int or not 0 <= batches < 2**63:
            return "a number of committed batches that is none"
        place = own.get("place", [0, 0])
        if not isinstance(place, list) or len(place) != 2 or not all(type(n) is int and 0 <= n < 2**63 for n in place):
            return "a place in its round that is none"
        return "" if self.outer_schedule is None else self.outer_schedule.complaint_about(RoundPlace(*place))

    def take_served(self, own: dict[str, Any]) -> None:
        """Take what `served` returned at the source; `Healing.wait` has checked it by `complaint_about`."""
        self.batches_committed = own.get("batches_committed", 0)
        self.place = RoundPlace(*own.get("place", ()))

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
        self.batches_committed = batches
        return step


def _trained_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    trained = (parameter for parameter in _parameters_of(optimizers) if parameter.requires_grad)
    return sum(part.nbytes for parameter in trained for part in memory_of(parameter))


def _parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    parameters = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return list({id(parameter): parameter for parameter in parameters}.values())
