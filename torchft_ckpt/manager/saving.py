"""A Manager's part in a durable checkpoint: the name of its state, the ranks that save it, and the state itself.

Nobody is asked: all of it follows from the quorum in which the last step was committed, which every member knows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from torchft_ckpt.checkpointing.durable.names import CheckpointName
from torchft_ckpt.checkpointing.durable.saving.saver import SavedCheckpoint
from torchft_ckpt.checkpointing.state.containers import flattened, optimizer_states
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.parameters import StateHere
from torchft_ckpt.checkpointing.state.tree import in_words
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    StateDictLoadError,
    StateFormatError,
    StateMismatchError,
    UnsupportedValueError,
)
from torchft_ckpt.manager.comparing import Differences
from torchft_ckpt.manager.volatile import StateToSave

if TYPE_CHECKING:
    from torchft_ckpt.manager.manager import Manager

logger = logging.getLogger(__name__)
IN_STEP = (
    "it was called in the middle of a step, from a signal handler, perhaps, or from a hook of an optimizer; use Manager.leave_on,"
    " or set a flag there and save between two steps"
)


class SaveIdentity(NamedTuple):
    """The state that this rank holds, and its place among those that save it."""

    step: int
    save_id: str
    """Different for another run, and for another quorum: a directory of that name is never used twice."""
    replica: int
    num_replicas: int
    rank: int
    num_ranks: int
    replica_id: str
    """Name of the group, without its incarnation."""
    state: StateVersion | None = None
    """The state's name, if the lighthouse knows the writers by the numbers of this save; None without a Manager."""
    is_alone: bool = False
    """This group writes all of it: the others do not save this step."""


class Onlooking(NamedTuple):
    """This rank holds a state that others save: it writes nothing of it, and nobody counts on it."""

    step: int
    save_id: str
    """As those who write it name it."""
    state: StateVersion | None = None
    """The state's name, if the lighthouse knows who writes it; else None."""


class NotSaving(NamedTuple):
    """This rank holds nothing that anybody could save."""

    reason: str


class LaterSave(Future[SavedCheckpoint]):
    """A save that was asked for in the middle of a step. Who waits for it begins it; in that step he gets an error instead."""

    def __init__(self, is_too_early: Callable[[], bool], save: Callable[[], Future[SavedCheckpoint]]) -> None:
        super().__init__()
        self._is_too_early = is_too_early
        self._save: Callable[[], Future[SavedCheckpoint]] | None = save

    def begin(self) -> None:
        """Save, on the training thread; whatever goes wrong is in this future. Again, it does nothing."""
        save, self._save = self._save, None
        if save is None:
            return
        try:
            if self._is_too_early():
                raise CheckpointError(f"nothing was saved: {IN_STEP}", "save")
            save().add_done_callback(self._take)
        except Exception as error:  # noqa: BLE001 - it is in the future
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        logger.warning("a save that was asked for in the middle of a step: %s", error)
        self.set_exception(error)

    def _take(self, saved: Future[SavedCheckpoint]) -> None:
        error = saved.exception()
        self.set_result(saved.result()) if error is None else self._fail(error)

    def result(self, timeout: float | None = None) -> SavedCheckpoint:
        if self._save is not None and self._is_too_early():
            raise CheckpointError(
                f"the save is made when the step is over, so it cannot be waited for here: {IN_STEP}", "save"
            )
        self.begin()
        return super().result(timeout)


def save_identity(manager: Manager) -> SaveIdentity | Onlooking | NotSaving:
    """Return who this rank is in a save of the state of now. On the training thread, between two steps."""
    now = manager.view()
    version = now.held
    if now.is_behind or not version.proven:
        return NotSaving("its state is not one that a quorum has committed")
    epoch = hashlib.sha256(version.epoch.encode()).hexdigest()[:12]
    if manager.hooks.saves_alone:
        if now.is_on_trial:
            return NotSaving(
                "it has received its state from others, who have not compared yet what its first step made of that, and who"
                " do not save this step"
            )
        who = hashlib.sha256(manager.replica_id().encode()).hexdigest()[:8]
        return SaveIdentity(
            step=version.step,
            save_id=f"q{version.quorum_id:08d}--{epoch}-{who}",  # sorts before that of all groups, which holds more
            replica=0,
            num_replicas=1,
            rank=manager.group_rank,
            num_ranks=manager.group_world_size,
            replica_id=group_name(manager),
            is_alone=True,
        )
    save_id = f"q{version.quorum_id:08d}-{epoch}"
    is_known = now.quorum is not None and now.quorum.quorum_id == version.quorum_id
    state = version if is_known else None  # else the lighthouse numbers who writes it otherwise
    if now.quorum is None or now.writer_number is None:
        return Onlooking(version.step, save_id, state)
    return SaveIdentity(
        step=version.step,
        save_id=save_id,
        replica=now.writer_number,
        num_replicas=now.num_writers,
        rank=manager.group_rank,
        num_ranks=manager.group_world_size,
        replica_id=group_name(manager),
        state=state,
    )


def group_name(manager: Manager) -> str:
    """Return the name of the replica group, the same after a restart; empty where it was given none."""
    name, _, incarnation = manager.replica_id().rpartition(":")
    return name if incarnation else ""


def state_to_save(manager: Manager, state_dict: dict[str, Any] | None = None) -> StateToSave:
    """Return the state that replicas heal from, and the Manager's own under `torchft`. On the training thread.

    What was registered under `default` is at the root, where it is a dict: names are those that the script's `state_dict` gave.

    Args:
        manager: of this rank.
        state_dict: save this in its place.

    Raises:
        ConfigError: the state has something of its own under `torchft`.
    """
    registry = manager.hooks.registry
    if state_dict is None:
        captured = registry.capture()
        held = registry.capture_for_save(captured, by_key=True)
        held = held._replace(state=_at_root(held.state), owners=registry.owners(_at_root(captured)))
    else:
        held = registry.capture_for_save(state_dict, by_key=False)._replace(owners=registry.owners(state_dict))
    return held._replace(state=with_managers_state(held.state, manager))


def with_managers_state(state: dict[str, Any], manager: Manager) -> dict[str, Any]:
    """Return a state with the Manager's own beside it.

    Raises:
        ConfigError: the state has something of its own under that name.
    """
    if MANAGERS_KEY in state:
        raise ConfigError(
            f"the state has the key {MANAGERS_KEY!r}, which is the Manager's in a checkpoint", "state_dict"
        )
    return {**state, MANAGERS_KEY: manager.state_dict()}


MANAGERS_KEY = "torchft"
_DEFAULT = "default"


def _at_root(captured: dict[str, Any]) -> dict[str, Any]:
    default = captured.get(_DEFAULT)
    others = {key: value for key, value in captured.items() if key != _DEFAULT}
    if type(default) is dict and not default.keys() & {*others, MANAGERS_KEY, _DEFAULT}:
        return {**default, **others}
    return captured


def template_to_load(manager: Manager) -> StateHere:
    """Return the state that is here, laid out as `state_to_save` lays it out; what is loaded takes its layout and memory."""
    here = manager.hooks.registry.capture_to_receive()
    return here.laid_out(with_managers_state(_at_root({**here}), manager))


def check_state(manager: Manager) -> None:
    """See that the state that is here could be saved, by its names and kinds. On the training thread; nothing is copied.

    Raises:
        UnsupportedValueError: it holds something that cannot be carried, or two things of one name; the message has its path.
    """
    state = with_managers_state(_at_root(manager.hooks.registry.capture()), manager)
    try:
        flattened(state)
    except StateFormatError as error:
        raise UnsupportedValueError(f"state dict: {error}", "state_dict") from error
    if doubled := LocalState(state).doubled:
        raise UnsupportedValueError(f"state dict: two tensors are named {doubled[0]!r}", doubled[0])


def check_optimizers_known(manager: Manager) -> None:
    """See that what is restored can take the layout of what is here. On the training thread, before the first step.

    Where parameters are sharded the state of an optimizer that has not stepped is made for it, by what the Manager knows of the
    optimizer; else it would be loaded whole on each rank, as plain tensors.

    Raises:
        ConfigError: such state is registered, and no optimizer is known.
    """
    registry = manager.hooks.registry
    if (
        registry.layout().is_sharded
        and not registry.knows_optimizers
        and any(not of_optimizer["state"] for _, of_optimizer in optimizer_states(registry.capture()))
    ):
        raise ConfigError(
            "parameters are sharded and an optimizer without state is registered, but the Manager knows no optimizer: call"
            " Optimizer(manager, ...), Manager.guard_optimizer or register_state_dict_fn(optimizers=...) before restore",
            "optimizer",
        )


def check_keys(manager: Manager, keys: Collection[object], checkpoint: CheckpointName) -> None:
    """See that `load_saved` can take the state of a checkpoint apart, before anything of it is read.

    Raises:
        StateMismatchError: it was saved without a Manager, or other state was registered where it was saved.
    """
    if MANAGERS_KEY not in keys:
        raise StateMismatchError(
            f"checkpoint {checkpoint} was saved without a Manager, so it does not say how far the job had come: load it by"
            f" load_checkpoint(directory, state_dict), and then call Manager.load_state_dict({{'step': {checkpoint.step},"
            " 'batches_committed': ...}) before the first step; nothing was read",
            party=str(checkpoint),
        )
    registered, saved = set(manager.hooks.registry.keys()), {*keys} - {MANAGERS_KEY}
    is_at_root = _DEFAULT in registered and _DEFAULT not in saved
    if not saved >= registered - {_DEFAULT} if is_at_root else saved != registered:
        raise StateMismatchError(
            f"checkpoint {checkpoint} has the keys {sorted(map(in_words, saved))}, and {sorted(registered)} are registered here:"
            " register the same state dict functions as where it was saved; nothing was read",
            party=str(checkpoint),
        )


def load_saved(manager: Manager, state: dict[str, Any], read_again: Callable[[], dict[str, Any]]) -> None:
    """Load what `state_to_save` returned. On the training thread, before the first step.

    `state` lies in the memory of what is registered. It is read into other memory (`read_again`) for a function that wrote to
    what it was given before it had copied it.

    Raises:
        StateMismatchError: other state is registered here than was saved; nothing was loaded.
        StateDictLoadError: a `load_state_dict` function raised, or adds what it is given to what is here, and was called twice.
        ConfigError: the Manager's own part is none.
    """
    registry = manager.hooks.registry
    if not registry.load(registry.check(_of_user(manager, state)), in_place=True):
        once = registry.not_returned(_of_user(manager, state)).paths
        registry.load(user := _of_user(manager, read_again()))
        twice = Differences(tuple(path for path in registry.not_returned(user, twice=True).paths if path not in once))
        registry.forget_returned()
        if twice.paths:
            raise StateDictLoadError(
                "load_state_dict wrote to what it was given before it had copied it, and was called once more with another copy:"
                f" state_dict returns something else since ({twice}). Let it set what it is given, and add nothing",
                party=twice.paths[0],
            )
    manager.load_state_dict(state[MANAGERS_KEY])


def _of_user(manager: Manager, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a saved state that the registered functions load, by their keys."""
    user = {key: value for key, value in state.items() if key != MANAGERS_KEY}
    registered = manager.hooks.registry.keys()
    if _DEFAULT in registered and _DEFAULT not in user:
        others = {key: user.pop(key) for key in registered if key != _DEFAULT and key in user}
        user = {_DEFAULT: user, **others}
    return user


def end_restore(manager: Manager, *, from_peers: bool) -> None:
    """A restore is over: what is registered may have to take its place in the job. On the training thread.

    `from_peers`: other groups hold the state to go on from. If this group has begun a job meanwhile, its fresh weights have a
    name, and would count as much as a checkpoint that others have restored: they are given up.
    """
    if from_peers and not manager.is_behind and not manager.current_step():
        manager.report_torn_state()
    manager.hooks.registry.end_restore()
