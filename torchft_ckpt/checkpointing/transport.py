"""The contract of everything that carries a state from one replica to another.

This file says what a transport promises; it does not know how bytes travel. The methods and their meanings are those of
torchft 0.2.0, so a transport written for either library works in the other. `torchft_ckpt.testing` has a conformance
check that any implementation can be put through.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Generic, TypeVar

from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.progress import ProgressCallback
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.errors import (
    CheckpointError,
    StateFormatError,
    StateMismatchError,
    TransferCancelledError,
    TransferError,
)

T = TypeVar("T")


class CheckpointTransport(Generic[T], ABC):
    """Carries a state, named by its step, from a replica that holds it to replicas that need it.

    `send_checkpoint`, `disallow_checkpoint` and `metadata` are called by one thread at a time; `recv_checkpoint` may run on
    another thread meanwhile; `cancel_recv` and `shutdown` may be called from any thread.
    """

    @property
    def uses_memory_of_state(self) -> bool:
        """Whether it sends from the memory of the state, may receive into it, and gives a state no more that was retired.

        By default not: each send copies all of the state. `Manager` then offers no state between two steps, receives none in
        place, and waits for a receive that stands still as long as it may take.
        """
        return False

    @property
    def state_lock(self) -> StateDictLock | None:
        """The lock whose writers this transport sees, and so needs no `disallow_checkpoint` from. By default there is none.

        `Manager` takes it for the lock of the state.
        """
        return None

    @abstractmethod
    def metadata(self) -> str:
        """Return what a peer must hand to its `recv_checkpoint` to reach this transport. It does not change."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Make the state available to the destinations, and return without waiting for them.

        The caller keeps the state unchanged from this call until `disallow_checkpoint` has returned (or changes it only
        under the write side of a lock that the transport knows).

        Args:
            dst_ranks: replica ranks that were told to fetch this state.
            step: the step that names this state; not negative.
            state_dict: the state. It is referred to, and need not be copied.
            timeout: the lease: how long the state is kept available for destinations that have not finished.

        Raises:
            UnsupportedValueError: the state holds something that cannot be carried; nothing is served.
            CheckpointError: the transport was shut down.
        """

    def send_captured(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta,
        *,
        versions: StateVersions,
        outlives_step: bool = False,
    ) -> None:
        """As `send_checkpoint`, of a state that was captured before this call. By default the rest is ignored.

        Args:
            dst_ranks, step, state_dict, timeout: as in `send_checkpoint`.
            versions: of the tensors when they were captured: a tensor that was written to since must not be sent.
            outlives_step: some of the destinations receive it while later steps are made: `withdraw_checkpoint` keeps it.

        Raises: as `send_checkpoint`.
        """
        self.send_checkpoint(dst_ranks, step, state_dict, timeout)

    def advance_to(self, step: int) -> None:
        """Say which step the live state is of. By default nobody is told."""

    def has_pending_request(self, step: int) -> bool:
        """Return whether somebody has asked for the state of this step, and it is not served. By default nobody has."""
        return False

    def disallow_checkpoint(self) -> None:
        """Return once the state may be mutated; what is received afterwards is still the state of its step or an error.

        Never waits for a peer or the network. May be called when nothing is served, and more than once.
        """

    def retire_checkpoint(self, *, keeps_awaited: bool = False) -> bool:
        """Give nothing that is served now to receivers that come from now on: its name will be that of another send.

        Those who were sent to and have not received it are not waited for. Others, who have begun, go on. Returns at once. By
        default nothing happens.

        Args:
            keeps_awaited: leave alone what somebody receives, or was sent and has not come for.

        Returns:
            whether anything was left alone.
        """
        return False

    def withdraw_checkpoint(self) -> None:
        """Return once the state may be mutated; whoever has not received it by now gets an error.

        Not those whom `send_captured` was told to keep it for. For a state that nobody can use any more. By default as
        `disallow_checkpoint`, which keeps it for the late.
        """
        self.disallow_checkpoint()

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state of a step; return it whole or raise.

        A source that does not serve the step yet is waited for, within the timeout.

        Args:
            src_rank: replica rank of the source, for messages.
            metadata: what the source's `metadata()` returned.
            step: the step wanted.
            timeout: the overall deadline, counted from this call.

        Raises:
            TransferError: a subclass says why nothing was received.
            StateFormatError: the source sent something that is not a state.
        """

    def fetch_checkpoint(
        self,
        sources: Sequence[str],
        step: int,
        timeout: timedelta,
        *,
        local_state: T | None = None,
        in_place: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> T:
        """Fetch the state of a step from whichever of several sources can give it; return it whole or raise.

        A transport that knows no better asks one source after another, and ignores what is here already.

        Args:
            sources: what the sources' `metadata()` returned. The first is the primary: the state received is its own.
            step: the step wanted.
            timeout: the overall deadline, counted from this call.
            local_state: the state that is here; what is equal in it need not be sent.
            in_place: allow to receive into the tensors of `local_state`, which is then undefined if this raises an error
                whose `state_overwritten` is true. What is returned has those tensors in it.
            on_progress: called now and then, on any thread; it should return at once.

        Raises:
            TransferError: a subclass says why nothing was received.
            StateFormatError: a source sent something that is not a state.
            StateMismatchError: the state does not fit `local_state`.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        failure: CheckpointError = TransferError("no source to fetch from was named", party="sources")
        for rank, metadata in enumerate(sources):
            remaining = timedelta(seconds=max(deadline - time.monotonic(), 0.0))
            try:
                return self.recv_checkpoint(rank, metadata, step, remaining)
            except TransferCancelledError:
                raise
            except (TransferError, StateFormatError) as error:
                failure = error
        raise failure

    def fetch_sharded(
        self,
        groups: Sequence[Sequence[str]],
        rank: int,
        world_size: int,
        step: int,
        timeout: timedelta,
        *,
        local_state: T | None = None,
        in_place: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> T:
        """Fetch the state of a step from groups whose ranks hold other parts of the tensors than this one; whole, or raise.

        What `local_state` holds of each tensor is put together from all ranks that hold some of it. A transport that knows
        no better refuses.

        Args:
            groups: for each source group, what the `metadata()` of its ranks returned, in the order of their ranks; an empty
                one is not known. The first is the primary: the state received is its own.
            rank: of this process in its own group: values that are no tensors come from the rank of that number, modulo
                the size of the source group.
            world_size: ranks of this process's group, all of which come for the state.
            step, timeout, local_state, in_place, on_progress: as in `fetch_checkpoint`.

        Raises:
            StateMismatchError: no rank holds some part of what is here, or a tensor has another shape or dtype. Before anything
                was received.
            TransferError, StateFormatError: as `fetch_checkpoint`.
        """
        raise StateMismatchError(
            f"{type(self).__name__} cannot receive from a group that holds its tensors in other shards",
            party="transport",
        )

    def cancel_recv(self) -> None:
        """Give up the receives in progress: each raises `TransferCancelledError` soon. From any thread.

        A receive that starts after this call is not affected. Transports that cannot cancel do nothing.
        """

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and receiving, and free what is held. May be called more than once.

        Args:
            wait: return only once threads and sockets are gone.
        """
