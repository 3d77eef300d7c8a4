"""Notes what the guarded optimizers of a healthy replica see in each committed step, while a learner follows.

An entry is opened when a step counts, gets what each optimizer sees that steps then, and is closed when the next step begins.
So a discarded step leaves none, and optimizers that share a step share an entry. On the training thread.

Gradients are referred to and not copied: `zero_grad` drops them, and no optimizer of torch changes them. They are copied where
their memory is used again: where it is that of the step before, or nothing is known of that (the first step that is noted); and
where the optimizer writes to them. What is found to have been changed too late to be copied ends the log, and the
next one begins with copies.

A step that cannot be noted ends the log with a reason, which the learner hears. Training goes on in any case.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchft_ckpt.checkpointing.state.redo_entry import ATTRIBUTES, OptimizerStep, RedoEntry, num_bytes_of, scalars_of
from torchft_ckpt.checkpointing.state.shards import is_dtensor, memory_of
from torchft_ckpt.checkpointing.state.space import is_stageable
from torchft_ckpt.checkpointing.state.versions import Counted, StateVersions, count_writes, is_changed
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.manager.optimizer_settings import NO_SETTINGS, with_inner

logger = logging.getLogger(__name__)


class RedoSink(Protocol):
    """Takes what was noted: `checkpointing/serving/redo.py`."""

    @property
    def is_kept(self) -> bool:
        """Whether somebody still follows."""

    def begin(self, version: StateVersion, num_followers: int, now: float) -> None:
        """Keep what follows on a version for so many more followers."""

    def append(self, entry: RedoEntry, versions: StateVersions) -> None:
        """Keep an entry."""

    def end(self, reason: str) -> None:
        """No entry follows on the last one."""


class _RefusedError(Exception):
    """A step cannot be noted, for this reason."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer and those in it, each once: in this order an entry has their gradients."""
    groups = [group for member in with_inner([optimizer]) for group in member.param_groups]
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


class RedoRecorder:
    """See the module.

    Args:
        sink: takes entries.
        optimizers: returns those that are guarded, in the order in which all replicas guard them.
        is_apart: whether a step of now is no training, as in a state dict function.

    Attributes:
        is_noting: whether steps are noted. All that is read of this object in a step that is not.
    """

    def __init__(
        self,
        sink: RedoSink,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        is_apart: Callable[[], object] = lambda: False,
    ) -> None:
        self.is_noting = False
        self._sink = sink
        self._optimizers = optimizers
        self._is_apart = is_apart
        self._open: RedoEntry | None = None
        self._referred: list[Counted] = []
        """The tensors that the open entry refers to, as they were when it was noted."""
        self._storages: dict[int, StorageWeakRef] = {}
        """By the id of a parameter, where its last gradient was. The storage itself may be gone."""
        self._writers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that were seen to write to their gradients."""
        self.copied_bytes = 0
        self.noted_bytes = 0

    def announce(self, version: StateVersion, num_followers: int, now: float) -> None:
        """Note for so many more followers what follows on the version that is here, whose step is open. Any thread.

        The step before has been closed.
        """
        self._sink.begin(version, num_followers, now)

    def step_counts(self, after: StateVersion, version: StateVersion, batches_committed: int) -> None:
        """A step counts, and the optimizers are about to take it. Without effect where nobody follows."""
        self.close()
        self.is_noting = self._sink.is_kept
        if self.is_noting:
            self._open = RedoEntry(after=after, version=version, batches_committed=batches_committed, steps=[])

    def close(self) -> None:
        """The optimizers have taken the step that counted last: its entry is whole. When the next one begins, at the latest."""
        if not self.is_noting:
            return
        entry, self._open = self._open, None
        referred, self._referred = self._referred, []
        if not self._sink.is_kept:  # those who followed have left
            self._stop()
            return
        if entry is None:
            return
        if is_changed(referred):
            self.end("gradients were written to after their step, before the next one began")
            return
        gradients = [tensor for step in entry.steps for tensor in step.gradients if tensor is not None]
        try:
            self._sink.append(entry, StateVersions(gradients))
        except Exception as error:
            logger.exception("step %d was not noted for those who follow", entry.version.step)
            self.end(f"step {entry.version.step} cannot be kept: {type(error).__name__}: {error}")

    def end(self, reason: str) -> None:
        """Note no more, and say why."""
        if self.is_noting:
            self._stop()
            self._sink.end(reason)

    def _stop(self) -> None:
        self.is_noting = False
        self._open = None
        self._referred = []
        self._storages = {}

    @contextlib.contextmanager
    def noting(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Around a step of a guarded optimizer, and all of its hooks."""
        if self._is_apart():
            yield
            return
        name = type(optimizer).__name__
        try:
            self._refuse_closure(name, args, kwargs)
            seen, referred = self._note(optimizer)
        except _RefusedError as refused:
            self.end(str(refused))
            yield
            return
        except Exception as error:
            logger.exception("a step of %s was not noted for those who follow", name)
            self.end(f"what {name} sees cannot be noted: {type(error).__name__}: {error}")
            yield
            return
        try:
            yield
        except BaseException as error:
            self.end(f"a step of {name} raised {type(error).__name__}")
            raise
        if is_changed(seen):
            self._writers.add(optimizer)
            if is_changed(referred):
                self.end(f"{name} writes to gradients in its step: the next log begins with copies of them")

    def _refuse_closure(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if any(value is not None for value in (*args, *kwargs.values())):
            raise _RefusedError(f"{name} steps with a closure or other arguments, and what these do cannot be replayed")

    def _note(self, optimizer: torch.optim.Optimizer) -> tuple[list[Counted], list[Counted]]:
        """Add a step to the open entry; return all gradients, and those that it refers to, with their versions."""
        name = type(optimizer).__name__
        number = next((at for at, guarded in enumerate(self._optimizers()) if guarded is optimizer), None)
        if number is None or self._open is None:
            raise _RefusedError(f"{name} stepped outside of a step that the job has committed")
        attributes = {key: getattr(optimizer, key) for key in ATTRIBUTES if getattr(optimizer, key, None) is not None}
        gradients: list[torch.Tensor | None] = []
        seen: list[Counted] = []
        referred: list[Counted] = []
        before = set(self._storages.values())
        copies_all = bool(attributes) or optimizer in self._writers
        with torch.no_grad():
            for place, parameter in enumerate(parameters_of(optimizer)):
                gradient = parameter.grad
                if gradient is None:
                    gradients.append(None)
                    continue
                if not gradient.is_cpu and not is_stageable(gradient.device):
                    raise _RefusedError(f"gradients of {name} are on {gradient.device}, whose memory cannot be copied")
                _refuse_unusual(parameter, gradient, f"the gradient of parameter {place} of {name}")
                is_known = id(parameter) in self._storages
                storage = self._note_storage(parameter, gradient)
                num_bytes = num_bytes_of([gradient])
                self.noted_bytes += num_bytes
                counted = count_writes(gradient)
                seen += counted
                if copies_all or not is_known or storage in before:
                    gradients.append(gradient.detach().clone())
                    self.copied_bytes += num_bytes
                else:
                    gradients.append(gradient.detach())
                    referred += counted
        members = with_inner([optimizer])
        step = OptimizerStep(
            optimizer=number,
            settings=[scalars_of(member.param_groups, NO_SETTINGS) for member in members],
            attributes=scalars_of([attributes], ())[0],
            gradients=gradients,
        )
        self._open.steps.append(step)
        self._referred += referred
        return seen, referred

    def _note_storage(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> StorageWeakRef | None:
        """Note where a gradient is, and return that; None of one that has no memory here."""
        if gradient is None or gradient.layout is not torch.strided:
            return None
        data = memory_of(gradient)
        if not data:
            return None
        storage = self._storages[id(parameter)] = StorageWeakRef(data[0].untyped_storage())
        return storage


def _refuse_unusual(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    if gradient.layout is not torch.strided:
        raise _RefusedError(f"{name} is sparse ({gradient.layout})")
    if is_dtensor(gradient) != is_dtensor(parameter):
        raise _RefusedError(f"{name} is sharded, or its parameter is, and not both")
    if is_dtensor(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        raise _RefusedError(f"{name} is sharded otherwise than the parameter")
