"""The outer loop: counts inner steps, exchanges fragments when the schedule says so, and finds its way into a running job.

It hangs on the inner optimizer's step. What it does there, and what becomes of a round, is decided in
`core.training.outer_schedule`; this file carries it out. It begins, and waits for the others, in the first forward pass of
what it trains (in the first inner step, if no forward pass is seen), not where it is entered: a script's own state
functions may use the name that `as` binds.

- A replica that comes to a running job, or fell behind, catches up beside the others' inner steps: global parameters and
  outer optimizers come from the others' backups. Then it waits for their next round, the quorum of which is held for it while
  it lacks what that begins with. It adds nothing to that round, and takes its outcome:
  it is bit-equal then, and at the same place of the schedule. If the script has registered state of its own (a learning-rate
  schedule, say), the first inner steps here change nothing: they bring the script to where the others are.
- A round that fails is tried again at once with those who are left, `round_retries` times; nothing is lost then. If that
  does not help it is discarded: the fragment's parameters, and the inner optimizer's state of them, go back to where the
  round began, in all replicas. Other fragments, and what comes after, are not touched.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.core.training.outer_schedule import (
    Action,
    OuterSchedule,
    RoundOutcome,
    RoundPlace,
    after_vote,
)
from torchft_ckpt.errors import ConfigError, StateMismatchError, TransferError, torn_where_it_raises
from torchft_ckpt.manager.optimizer_settings import guard_steps
from torchft_ckpt.outer.averaging import RoundAverager, RoundSettings
from torchft_ckpt.outer.fragment import Fragment
from torchft_ckpt.outer.memory import buckets_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchft_ckpt.outer.manager import OuterManager
    from torchft_ckpt.process_group.quantization import Quantization

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Fragment)


class OuterLoop(Generic[F]):
    """A context manager around a training loop that steps the inner optimizer. All on the training thread.

    Args:
        manager: of this rank.
        inner_optimizer: each call of its `step` is an inner step, also if that calls the `step` of its base class.
        fragments: in the order in which they are exchanged.
        schedule: when.
        key: under which the state is registered with the manager.
        outer_optimizers: whose state belongs to that which all replicas have in common; each once.
        should_quantize: as for `Manager.allreduce`.
        bucket_cap_bytes: exchange buckets of at most so many bytes; None: a collective for each parameter.
        round_retries: how often a failed round is tried again before it is discarded.
    """

    def __init__(
        self,
        manager: OuterManager,
        inner_optimizer: torch.optim.Optimizer,
        fragments: Sequence[F],
        schedule: OuterSchedule,
        *,
        key: str,
        outer_optimizers: Sequence[torch.optim.Optimizer],
        should_quantize: bool | Quantization,
        bucket_cap_bytes: int | None,
        round_retries: int,
    ) -> None:
        if round_retries < 0:
            raise ConfigError(f"round_retries={round_retries} cannot be negative", party="round_retries")
        self._manager = manager
        self._inner_optimizer = inner_optimizer
        self._fragments = list(fragments)
        self._schedule = schedule
        self._outer_optimizers = list(outer_optimizers)
        self._bucket_cap_bytes = bucket_cap_bytes
        self._round_retries = round_retries
        self._exchange = RoundAverager(manager, should_quantize)
        self._outer_settings = RoundSettings(manager, outer_optimizers)
        self._hooks: list[RemovableHandle] = []
        self._num_open = 0
        """Calls of `step` that are open, each within the one before: torch runs the hooks in all of them."""
        self._inner_step = 0
        self._is_in_job = False
        self._has_begun = False
        self._was_loaded = False
        """The global parameters came from others: inner work of before, the inner optimizer's memory too, is of no use."""
        self._first_forward: RemovableHandle | None = None
        """Entered, and not begun since: what waits for the first forward pass."""
        self._thread = threading.get_ident()
        """Which trains."""
        self._num_loads = 0
        """How often what was local gave way to global parameters that came from others."""
        self._left_over: RoundPlace | None = None
        """Of a state of others that was loaded in an attempt to enter the job which raised."""
        self._is_made = False
        """The state of others has the next followed inner step already, and what the optimizer counts in its settings."""
        self._settings: list[dict[str, Any]] = []
        """Of the inner optimizer, to be put back after that step."""
        self._num_to_follow = 0
        """Inner steps whose iterations the others have ended since they handed out the script's own state, which was loaded here.

        The script makes them here as well, as it steps its schedule after them. They change nothing, and are not counted.
        """
        self._is_in_step = False
        """In the hook of an inner step, after which the script still ends its iteration."""
        self._has_applied = self._round_counted = False
        """A round is applied; and the script has come to the end of the iteration in which the others applied it."""
        self._began_at = time.monotonic()
        self._patience_s = 0.0
        _refuse_shared_parameters(self._fragments)
        self._left_out = LeftOut(self._fragments, inner_optimizer)
        self._left_out.warn()
        manager.hooks.outer_schedule = schedule
        manager.guard_optimizer(inner_optimizer)
        guard_steps(inner_optimizer, lambda: None, self._forget_open_steps)
        manager.register_state_dict_fn(
            key,
            self._load_state,
            self.state_dict,
            explicitly_locked=True,
            optimizers=self._outer_optimizers,
            local_between_syncs=True,
            after_restore=self._after_restore,
        )

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        if not self._hooks:
            self._hooks.append(self._inner_optimizer.register_step_pre_hook(self._before_inner_step))
            self._hooks.append(self._inner_optimizer.register_step_post_hook(self._after_inner_step))
        if self._first_forward is None:
            # Of any module, as a script may call one that holds the fragments; and before its own hooks, in which FSDP gathers.
            self._first_forward = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop counting inner steps. A round that is in flight stays so until the loop is entered again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._forget_first_forward()
        self._manager.allow_state_dict_read()  # an inner step that raised did not

    def restore_parameters(self) -> None:
        """Put the global parameters into the model, in place of this replica's: what all groups agreed on last.

        For evaluating or saving them. Training goes on from them; what was local, and not exchanged yet, is lost.
        """
        with self._changing_model():
            for fragment in self._fragments:
                fragment.restore_parameters()

    def round_counted(self) -> bool:
        """Return whether a round has counted since this was asked last: `if loop.round_counted(): ...` after each inner step.

        It is True once for each round that this group takes the outcome of, in the iteration in which the others do. That is so
        for the round that it comes in with too, which a script cannot tell from `Manager.current_step`.
        """
        counted, self._round_counted = self._round_counted, False
        return counted

    def state_dict(self) -> dict[str, Any]:
        """Return what all replicas have in common: global parameters and outer optimizers. It refers to live tensors.

        It is registered with the manager already, and so in every checkpoint of a `Checkpointer` that has one.
        """
        return {
            "original_parameters": [fragment.global_parameters() for fragment in self._fragments],
            "outer_optimizers": [optimizer.state_dict() for optimizer in self._outer_optimizers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of a checkpoint: the global parameters are in the model then as well.

        For scripts that load a checkpoint by hand, in all groups alike, before their first inner step, together with
        `Manager.load_state_dict`: `load_checkpoint(directory, {"diloco": loop, "torchft": manager})` ("local_sgd" of LocalSGD),
        where nothing is sharded. What `Checkpointer.restore` loads, and what comes from other groups, needs no call.

        Raises:
            StateMismatchError: it is that of other fragments; nothing was loaded.
        """
        self._manager.disallow_state_dict_read()
        try:
            self._load_state(state_dict)
        finally:
            self._manager.allow_state_dict_read()
        self._was_loaded = False

    # The inner loop

    def _before_forward(self, module: torch.nn.Module, _: object) -> None:
        """Begin with the first forward pass of what is trained here, on the thread that trains."""
        if threading.get_ident() != self._thread or torch.is_inference_mode_enabled():
            return
        trained = {id(param) for fragment in self._fragments for param in fragment.trained.values()}
        if any(id(param) in trained for param in module.parameters()):
            self._begin_late()

    def _before_inner_step(
        self, _: object, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin, if no forward pass was seen; begin anew with a checkpoint that the script loaded within the loop, by hand.

        Where the step has to change nothing, return its arguments with a closure that leaves no gradients.
        """
        self._num_open += 1
        if self._num_open > 1:
            return None
        is_replaced = False
        if self._first_forward is not None:
            with self._guard_let_go():
                is_replaced = self._begin_late()
        elif self._manager.hooks.is_restored:
            with self._guard_let_go():
                self._begin()
        if is_replaced or self._num_to_follow:  # the gradients are those of other parameters, or of no step
            self._forget_gradients()
        if not self._num_to_follow:
            return None
        self._settings = [dict(group) for group in self._inner_optimizer.param_groups] if self._is_made else []
        return (
            tuple(self._without_gradients(value) for value in arguments),
            {name: self._without_gradients(value) for name, value in options.items()},
        )

    def _without_gradients(self, argument: Any) -> Any:
        """Return a closure that forgets the gradients that it computes; any other argument as it is."""
        if not callable(argument):
            return argument

        def closure() -> Any:
            loss = argument()
            self._forget_gradients()
            return loss

        return closure

    def _begin_late(self) -> bool:
        loads_before = self._num_loads
        if not self._has_begun or self._manager.hooks.is_restored:
            self._begin()
        elif not self._exchange.in_flight and (not self._is_in_job or self._manager.is_behind):
            self._enter_job()
        self._forget_first_forward()  # not where it raised: the next one tries again
        return self._num_loads != loads_before

    def _forget_first_forward(self) -> None:
        if self._first_forward is not None:
            self._first_forward.remove()
            self._first_forward = None

    def _forget_gradients(self) -> None:
        """Let the inner step change nothing, not even what is in no fragment."""
        for fragment in self._fragments:
            for param in fragment.trained.values():
                param.grad = None
        for group in self._inner_optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    @contextmanager
    def _guard_let_go(self) -> Iterator[None]:
        """Let others read the state while this waits for them: the inner optimizer's guard holds the lock over its hooks."""
        if not self._manager.hooks.has_live_state or not self._manager.state_dict_lock.held_for_write():
            yield
            return
        self._manager.allow_state_dict_read()
        yield
        self._manager.disallow_state_dict_read()  # other hooks of the step may change what is registered

    def _after_restore(self) -> None:
        """Within the loop the state takes its place in the job at once; before it, `__enter__` sees to that."""
        if not self._hooks:
            return
        if self._manager.hooks.is_restored:
            self._begin()
        elif self._manager.is_behind:
            self._exchange.abandon()
            self._enter_job()
        else:
            return
        self._forget_first_forward()

    def _begin(self) -> None:
        """Begin with what is in the model now, from a checkpoint maybe: these are the global parameters."""
        self._has_begun = True
        self._is_in_job = self._was_loaded = False
        self._exchange.abandon()
        self._manager.disallow_state_dict_read()
        try:
            with self._writing("taking the model's parameters for the global ones"):
                for fragment in self._fragments:
                    fragment.save_parameters()
                    fragment.begin_round()
                _synchronize()
        finally:
            self._manager.allow_state_dict_read()
        self._enter_job()

    def _forget_open_steps(self) -> None:
        """The outermost one is over; where it raised, torch ran no hook after it."""
        self._num_open = 0

    def _after_inner_step(self, *_: object) -> None:
        self._num_open = max(self._num_open - 1, 0)
        if self._num_open:
            return
        try:
            self._end_inner_step()
        finally:
            self._note_counted()

    def _note_counted(self) -> None:
        if not self._num_to_follow:
            self._round_counted, self._has_applied = self._round_counted or self._has_applied, False

    def _end_inner_step(self) -> None:
        if self._num_to_follow:
            self._num_to_follow -= 1
            for group, before in zip(self._inner_optimizer.param_groups, self._settings, strict=False):
                group.update(before)  # some optimizers count their steps here, also those without a gradient
            self._settings, self._is_made = [], False
            return
        self._inner_step += 1
        actions = self._schedule.actions(self._inner_step)
        if self._inner_step == 1 and not actions:
            with self._guard_let_go():
                self._manager.hooks.first_inner_step()
        if actions:
            self._is_in_step = True
            try:
                with self._guard_let_go():
                    self._carry_out(actions)
            finally:
                self._is_in_step = False

    def _sync_now(self) -> None:
        """A round between two inner steps; of a schedule without delay."""
        if not self._hooks:
            raise RuntimeError("the outer loop is not entered: call sync() within its `with` block")
        if self._first_forward is not None:
            self._begin_late()
        self._carry_out([Action.PREPARE, Action.SYNC])
        self._note_counted()

    def _carry_out(self, actions: Sequence[Action]) -> None:
        try:
            for action in actions:
                if action is Action.PREPARE:
                    self._patience_s = self._schedule.patience_s(time.monotonic() - self._began_at)
                    self._prepare(self._round_retries)
                else:
                    self._sync()
                    self._begin_round()
        except BaseException:
            self._begin_round()  # a script that goes on takes part in a later round
            raise

    def _begin_round(self) -> None:
        self._inner_step = 0
        self._manager.hooks.place = RoundPlace()
        self._began_at = time.monotonic()

    def _prepare(self, retries_left: int) -> None:
        """Take the values of now and begin to average them."""
        with record_function("torchft::local_sgd::prepare_sync"):
            self._take_values(retries_left)

    def _take_values(self, retries_left: int) -> None:
        if self._exchange.in_flight:
            self._exchange.wait()  # an exception came in the way of its end; its values are in the same memory
        self._left_out.warn()
        fragment = self._fragment_of(self._manager.current_step())
        fragment.check_inner_state()
        fragment.prepare()
        self._outer_settings.note()
        self._manager.hooks.place = self._place(retries_left)
        self._manager.start_quorum(patience=timedelta(seconds=self._patience_s), wait=False)
        if self._was_loaded:  # the others held another state: of what was trained from ours nothing is added
            self._go_to_backup()
            fragment.prepare()
            self._outer_settings.note()
        self._exchange.start(lambda: self._tensors_of(fragment))

    def _place(self, retries_left: int = 0) -> RoundPlace:
        """Return where the script is: in an iteration, or between two of them where it called `sync`."""
        return RoundPlace(self._schedule.num_ends_left(self._inner_step) if self._is_in_step else 0, retries_left)

    def _tensors_of(self, prepared: Fragment | None) -> Iterable[torch.Tensor]:
        """Return what is averaged, once the quorum is known: of a round that this replica is not in, nothing of its own."""
        fragment = self._fragment_of(self._manager.quorum_step())
        if fragment is not prepared or not self._manager.is_participating():
            fragment.prepare_nothing()
        values = [value for value in fragment.values() if value.numel()]
        settings = self._outer_settings.rows(values[0].device) if values else []
        if self._bucket_cap_bytes is None:
            return [*values, *settings]
        return [*buckets_of(fragment.flat_values(), self._bucket_cap_bytes), *settings]

    def _sync(self) -> None:
        with record_function("torchft::local_sgd::perform_sync"):
            self._end_round()

    def _end_round(self) -> None:
        manager, retries_left, loads_before = self._manager, self._round_retries, self._num_loads
        while True:
            verdict = self._finish(retries_left, merge=True)
            if self._was_loaded and manager.hooks.has_live_state and verdict is not RoundOutcome.REJOIN:
                # It was found behind in this round, which is discarded: its script is at the others' place, not at its own.
                self._enter_job(self._schedule.after_discard(manager.hooks.place, self._round_retries))
                return
            if verdict is not RoundOutcome.RETRY:
                break
            retries_left -= 1
            logger.info("%s: round %d is tried again", self._manager.replica_id(), self._manager.current_step())
            self._prepare(retries_left)
        if verdict is RoundOutcome.REJOIN:
            self._enter_job()
        elif manager.hooks.has_live_state and self._num_loads != loads_before:
            self._follow(manager.hooks.place)

    def _finish(self, retries_left: int, *, merge: bool) -> RoundOutcome:
        self._exchange.wait()
        fragment = self._fragment_of(self._manager.quorum_step())
        with self._manager.taking_step():
            committed = self._manager.should_commit()
            if committed:
                self._apply(fragment, merge=merge and not self._was_loaded)
        if self._manager.is_leaving:  # there is no other round
            retries_left = 0
        verdict = after_vote(committed=committed, is_behind=self._manager.is_behind, retries_left=retries_left)
        if verdict is RoundOutcome.RESTORE:
            logger.info("%s: a round is discarded, its fragment goes back", self._manager.replica_id())
            with self._changing_model():
                fragment.restore()
        if verdict in (RoundOutcome.APPLY, RoundOutcome.RESTORE):
            fragment.begin_round()
            self._manager.offer_state()
        return verdict

    def _apply(self, fragment: Fragment, *, merge: bool) -> None:
        """A round is committed: from here on the state is the next one's, or torn."""
        if self._was_loaded:
            self._go_to_backup()
        self._manager.disallow_state_dict_read()
        self._outer_settings.take()
        fragment.apply(merge=merge)
        if fragment.outer_optimizer is not None:
            self._manager.hooks.took_step(fragment.outer_optimizer)
        _synchronize()
        self._has_applied = True
        self._outer_settings.num_rounds += 1

    # Into the job

    def _enter_job(self, place: RoundPlace | None = None) -> None:
        """Get the state that the others hold, and the next round's outcome with them; or be one of those who begin.

        What the script has registered of its own is of their PREPARE, in the middle of an iteration. When the round is decided
        they are in the iteration of their SYNC, and what the script does in each of these after the inner step is still to be
        done here: step a schedule, say. `RoundPlace` says how often.
        """
        manager, loads_before = self._manager, self._num_loads
        left_over, self._left_over = self._left_over, None
        manager.hooks.place = place or left_over or self._place()
        self._num_to_follow = 0
        try:
            while True:
                if manager.is_behind:
                    self._catch_up()
                manager.offer_state()  # to others that come: this may be the only one that holds it
                manager.start_quorum(contributes=False, wait=True)
                if self._was_loaded:
                    self._go_to_backup()
                    self._begin_rounds()  # one that is discarded goes back to here
                if manager.hooks.is_counted():
                    if self._begins_here():
                        break
                    continue
                logger.info("%s: in the job, takes part from the next round on", manager.replica_id())
                self._exchange.start(lambda: self._tensors_of(None))
                if self._finish(retries_left=0, merge=False) is RoundOutcome.APPLY:
                    if manager.hooks.has_live_state and (self._num_loads != loads_before or left_over is not None):
                        self._follow(manager.hooks.place)
                    break
                manager.hooks.place = self._schedule.after_discard(manager.hooks.place, self._round_retries)
        except BaseException:
            if self._num_loads != loads_before or left_over is not None:
                self._left_over = manager.hooks.place  # the state is the others', and the next attempt may load nothing
            raise
        self._begin_rounds()
        self._is_in_job = True
        self._outer_settings.num_rounds = 0
        self._begin_round()
        manager.offer_state()

    def _begin_rounds(self) -> None:
        for fragment in self._fragments:
            fragment.begin_round()

    def _follow(self, place: RoundPlace) -> None:
        """Bring the script to where the others are, from the place at which they handed out its state."""
        self._num_to_follow = place.num_ends_left - self._is_in_step
        if self._num_to_follow > 0:
            logger.info(
                "%s: the next %d inner steps change nothing: they bring the script to where the other groups are",
                self._manager.replica_id(),
                self._num_to_follow,
            )
        self._is_made = place.num_ends_left > 0 and not self._is_in_step
        if self._num_to_follow < 0:
            self._num_to_follow = 0
            logger.warning(
                "%s came back in the middle of an iteration, with a state of between two of them: what the script does after its"
                " inner step is done once more here than in the other groups, a learning-rate schedule is one step ahead",
                self._manager.replica_id(),
            )

    def _begins_here(self) -> bool:
        """Nobody trains yet: the round begins here, once all ranks of this group hold the state that it begins from.

        It is asked for anew when there is something to average.
        """
        return self._manager.is_participating() if self._manager.hooks.has_live_state else self._catch_up()

    def _catch_up(self) -> bool:
        """Return whether all ranks of this group hold the newest state now; then the model is there as well."""
        try:
            is_held = self._manager.catch_up()
        except TransferError as error:
            # The next round names sources as well, and whoever is there then.
            logger.warning("%s: %s; asks for a round instead", self._manager.replica_id(), error)
            return False
        if is_held:
            self._go_to_backup()
        return is_held

    def _go_to_backup(self) -> None:
        """Replace the local parameters, which belong to no round that counts."""
        self._was_loaded = False
        self._num_loads += 1
        with self._changing_model():
            for fragment in self._fragments:
                if self._manager.hooks.has_live_state:  # the inner optimizer's state may have come with it
                    fragment.restore_parameters()
                else:
                    fragment.restore()

    @contextmanager
    def _changing_model(self) -> Iterator[None]:
        """Hold the lock where the model is state that is served and saved, as it is where the script has registered it."""
        with contextlib.ExitStack() as stack:
            if self._manager.hooks.has_live_state:
                stack.enter_context(self._manager.state_dict_lock.write())
            with self._writing("putting the global parameters into the model"):
                yield

    @contextmanager
    def _writing(self, doing: str) -> Iterator[None]:
        """Around what writes into model and backups: where it raises the state is torn, and has to heal before it is trained."""
        try:
            with torn_where_it_raises(f"{self._manager.replica_id()}: {doing}", self._manager.replica_id()):
                yield
        except BaseException:
            self._manager.report_torn_state()
            raise

    # The state that all replicas have in common

    def _load_state(self, state: dict[str, Any]) -> None:
        backups, optimizers = state["original_parameters"], state["outer_optimizers"]
        if len(backups) != len(self._fragments) or len(optimizers) != len(self._outer_optimizers):
            raise StateMismatchError(
                f"the source has {len(backups)} fragments and {len(optimizers)} outer optimizers, this replica"
                f" {len(self._fragments)} and {len(self._outer_optimizers)}"
            )
        for number, (fragment, backup) in enumerate(zip(self._fragments, backups, strict=True)):
            if complaint := fragment.complain_about(backup):
                raise StateMismatchError(f"the source's fragment {number} is another one: {complaint}")
        with self._writing("loading the state of the outer loop"):
            for fragment, backup in zip(self._fragments, backups, strict=True):
                fragment.load_backup(backup)
            for optimizer, received in zip(self._outer_optimizers, optimizers, strict=True):
                optimizer.load_state_dict(received)
            for fragment in self._fragments:  # after a restore nothing else is done before the next forward pass
                fragment.restore_parameters()
            _synchronize()
        self._was_loaded = True

    def _fragment_of(self, num_committed: int) -> F:
        return self._fragments[self._schedule.fragment_of(num_committed)]


def _synchronize() -> None:
    """Wait for the device: other threads read what is served."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _refuse_shared_parameters(fragments: Sequence[Fragment]) -> None:
    seen: dict[int, int] = {}
    for number, fragment in enumerate(fragments):
        for name, param in fragment.params.items():
            other = seen.setdefault(id(param), number)
            if other != number:
                raise ConfigError(
                    f"{name} of fragment {number} is a parameter of fragment {other} as well: it would be exchanged twice",
                    party="model_fragments",
                )


class LeftOut:
    """Names the parameters that are trained here and never exchanged: the replica groups come apart in them.

    An outer loop exchanges the parameters of its modules that need a gradient when it is made. Others can be trained beside
    these: the inner optimizer has some that are in none of the modules, or some that were frozen are unfrozen later.
    """

    def __init__(self, fragments: Sequence[Fragment], inner_optimizer: torch.optim.Optimizer) -> None:
        self._fragments = list(fragments)
        self._inner_optimizer = inner_optimizer
        self._exchanged = {id(param) for fragment in fragments for param in fragment.trained.values()}
        self._named: set[int] = set()
        """Parameters that were written to, or are unfrozen, so far."""
        self._unfrozen: set[int] = set()
        self._foreign: set[int] = set()

    def warn(self) -> None:
        """Name in the log what is trained and not exchanged, as far as that was not so when it was called last."""
        unfrozen = dict(self._find_unfrozen())
        foreign = dict(self._find_foreign())
        if new := [name for key, name in unfrozen.items() if key not in self._unfrozen]:
            logger.warning(
                "parameters that needed no gradient when the outer loop was made need one now (%d: %s): they are not exchanged,"
                " no other replica group gets what is trained of them; make the loop before they are frozen",
                len(new),
                some_of(new),
            )
        if new := [name for key, name in foreign.items() if key not in self._foreign]:
            logger.warning(
                "the inner optimizer trains parameters that are in no module of the outer loop (%d: %s): they are not exchanged,"
                " each replica group keeps its own",
                len(new),
                some_of(new),
            )
        self._unfrozen, self._foreign = set(unfrozen), set(foreign)
        self._named |= self._unfrozen
        named = [(one, name, id(param)) for one in self._fragments for name, param in one.params.items()]
        written = {key: name for one, name, key in named if key not in self._named and one.is_written(name)}
        if written:
            self._named |= written.keys()
            logger.warning(
                "parameters that need no gradient were written to (%d: %s): they are not exchanged, and the global values of when"
                " the loop began are put back (DiLoCo: in each round); make buffers of them, or leave them out of its modules",
                len(written),
                some_of(written.values()),
            )

    def _find_unfrozen(self) -> Iterator[tuple[int, str]]:
        for number, fragment in enumerate(self._fragments):
            for name, param in fragment.params.items():
                if param.requires_grad and id(param) not in self._exchanged:
                    yield id(param), name if len(self._fragments) == 1 else f"{name} of fragment {number}"

    def _find_foreign(self) -> Iterator[tuple[int, str]]:
        held = {id(param) for fragment in self._fragments for param in fragment.params.values()}
        for number, group in enumerate(self._inner_optimizer.param_groups):
            names = group.get("param_names") or [f"{place} of group {number}" for place in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                if param.requires_grad and id(param) not in held:
                    yield id(param), f"{name}, of shape {tuple(param.shape)}"
