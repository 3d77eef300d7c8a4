"""A group whose inner group is made anew by each configure: what Gloo and NCCL share.

It lets the members meet at a store before their backend connects them, as backends that wait for each other cannot be interrupted
in it, and do not say who was absent. It decides which session a collective goes to and what `errored()` says. `session.py` rules
the life and the end of an inner group; a subclass's `_connect` makes one.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import HashStore, Store, Work
from torch.distributed import ProcessGroup as TorchProcessGroup

from torchft_ckpt.errors import (
    ConfigError,
    ProcessGroupAbortedError,
    ProcessGroupConfigureError,
    ProcessGroupError,
)
from torchft_ckpt.process_group.session import Session, SessionPhase
from torchft_ckpt.process_group.sockets import shutdown_awaited_connection
from torchft_ckpt.process_group.store import StoreAddress, StorePool, enter_store, wait_for_keys
from torchft_ckpt.process_group.wrapper import ProcessGroupWrapper

_CONNECT_TIMEOUT_MAX = timedelta(seconds=10)
_PREPARE_TIMEOUT_S = 30.0

# One for the process: a connection serves one configure after the other.
_stores = StorePool()


class Meeting(NamedTuple):
    """The members of a group have met at a store, and are to be connected by their backend."""

    session: Session
    store: Store
    """A fresh one below a prefix of its own."""
    local_host: str
    """The numeric address of ours that routes to the store."""
    rank: int
    world_size: int
    global_ranks: list[int] | None
    deadline: float
    """Of configure, on `time.monotonic`'s clock."""


def set_default_timeout(group: TorchProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of operations of torch's group whose options give none."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
        return
    for kind in group._device_types:  # an older torch, which does it for each backend
        group._get_backend(kind)._set_default_timeout(timeout)


class SessionProcessGroup(ProcessGroupWrapper):
    """A process group that owns sessions, one for each configure. It is a wrapper because torchft's Gloo and NCCL are.

    Args:
        timeout: of each operation whose options give none.
        connect_timeout: of configure as a whole; by default `timeout`, but at most 10 s.
    """

    def __init__(self, timeout: timedelta, connect_timeout: timedelta | None) -> None:
        super().__init__()
        self._timeout = timeout
        self._connect_timeout = min(timeout, _CONNECT_TIMEOUT_MAX) if connect_timeout is None else connect_timeout
        self._rank = 0
        self._world_size = 1
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._beside: tuple[str, Session] | None = None
        """With its store's address: what `connect_beside` makes, or has made."""
        self._is_shut_down = False
        self._last_error: ProcessGroupError | None = None

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        name = self.getBackendName()
        label = f"{name} group of quorum {quorum_id}, rank {rank} of {world_size} ({replica_id}), store {store_addr}"
        self._is_shut_down = False
        made = self._take_beside(store_addr)
        session = made or self._session_of(label, store_addr, rank, world_size, global_ranks, _accelerators())
        self._end(ProcessGroupAbortedError(f"{name} group left for quorum {quorum_id}"), successor=session)
        if made is None:
            # The connecting thread keeps its own deadline; the second more is for its better worded error.
            session.connect(self._connect_timeout.total_seconds() + 1.0)
        with self._lock:
            if self._session is session:
                self._rank = rank
                self._world_size = world_size

    def connect_beside(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> Callable[[], None]:
        label = f"{self.getBackendName()} group beside a quorum, rank {rank} of {world_size} ({replica_id}), store {store_addr}"
        session = self._session_of(label, store_addr, rank, world_size, None)
        self._give_up_beside((store_addr, session))
        if self._is_shut_down:  # meanwhile, by another thread
            self._give_up_beside()
        return lambda: session.connect(self._connect_timeout.total_seconds() + 1.0)

    def _take_beside(self, store_addr: str) -> Session | None:
        """Return the session that was connected there beside the one in use; None: there is none.

        Raises:
            ProcessGroupConfigureError: it has ended since. None can be made at that place again.
        """
        with self._lock:
            if self._beside is None or self._beside[0] != store_addr:
                return None
            (_, session), self._beside = self._beside, None
        if session.phase is not SessionPhase.LIVE:
            raise ProcessGroupConfigureError(f"{session.label} has ended since: {session.error}", party=store_addr)
        session.apply(lambda inner: set_default_timeout(inner, self._timeout))
        session.devices = [*_accelerators()]
        return session

    def _give_up_beside(self, successor: tuple[str, Session] | None = None) -> None:
        with self._lock:
            before, self._beside = self._beside, successor
        if before is not None:
            before[1].end(ProcessGroupAbortedError(f"{before[1].label} is not taken by a quorum"))

    def _session_of(
        self,
        label: str,
        store_addr: str,
        rank: int,
        world_size: int,
        global_ranks: list[int] | None,
        devices: Sequence[torch.device] = (),
    ) -> Session:
        """Return a session that connects when it is told to."""
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not in a group of {world_size}", party="rank")
        address = StoreAddress.parse(store_addr)
        timeout_s = self._connect_timeout.total_seconds()

        def connect(session: Session) -> TorchProcessGroup:
            with _meeting(session, address, rank, world_size, global_ranks, timeout_s) as meeting:
                try:
                    return self._connect(meeting)
                except ProcessGroupError:  # the session has ended meanwhile
                    raise
                except RuntimeError as error:
                    if world_size == 1:
                        raise
                    first_line = str(error).partition("\n")[0][:300]
                    raise ProcessGroupConfigureError(
                        f"all ranks came to the store, but {self._why_apart(meeting)}: {first_line}", party=str(address)
                    ) from error.with_traceback(None)

        return Session(label, connect, devices)

    def _connect(self, meeting: Meeting) -> TorchProcessGroup:
        """Connect to the other members; runs on the session's thread and ends within the connect timeout."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _connect")

    def _why_apart(self, meeting: Meeting) -> str:
        """Say what to think of where `_connect` raised; torch's own words follow."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _why_apart")

    def _start_collective(self, collective: str, *arguments: Any) -> Work:
        with self._lock:
            session, error = self._session, self._last_error
        if session is not None:
            return session.run(lambda inner: getattr(inner, collective)(*arguments))
        if error is not None:
            raise copy.copy(error)
        raise ProcessGroupError(f"{self!r} was not configured yet")

    def abort(self, errored: bool = True) -> None:
        if not self._is_inherited():
            self._end(ProcessGroupAbortedError(f"{self.getBackendName()} group was aborted"), successor=None)

    def shutdown(self) -> None:
        if self._is_inherited():
            return
        with self._lock:
            session = self._session
        self._is_shut_down = True
        self._give_up_beside()
        self._end(ProcessGroupAbortedError(f"{self.getBackendName()} group was shut down"), successor=None)
        if session is not None:
            session.join(5.0)

    def _is_inherited(self) -> bool:
        # Without the lock, which a thread of the parent may have held.
        beside = self._beside
        session = self._session or (beside and beside[1])
        return session is not None and session.is_inherited

    def errored(self) -> Exception | None:
        with self._lock:
            if self._session is None or self._session.phase is SessionPhase.CONNECTING:
                return self._last_error
            return self._session.error

    def prepare_store(self, store_addr: str) -> threading.Event:
        return _stores.prepare(StoreAddress.parse(store_addr), _PREPARE_TIMEOUT_S)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        with self._lock:
            session = self._session
        if session is not None:
            session.apply(lambda inner: set_default_timeout(inner, timeout))

    def use_hostname(self, hostname: str) -> None:
        """Do nothing, unless a subclass listens at an address of its choice."""

    def _end(self, error: ProcessGroupError, successor: Session | None) -> None:
        """End the current session and put another in its place; `error` is what `errored()` says meanwhile."""
        with self._lock:
            session, self._session = self._session, successor
            # Before the session ends: whoever it lets go may ask errored() at once.
            if session is not None:
                self._last_error = session.error or error
            elif successor is None:
                self._last_error = self._last_error or error
        if session is not None:
            session.end(error)

    def size(self) -> int:
        return self._world_size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} does not implement getBackendName")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank()}, size={self.size()})"

    def __del__(self) -> None:
        # Operations in flight keep the session alive; it must not be left to end on one of the backend's threads.
        beside = self.__dict__.get("_beside")
        for session in (self.__dict__.get("_session"), beside and beside[1]):
            try:
                if session is not None:
                    session.end(ProcessGroupAbortedError("the process group was dropped without a shutdown"))
            except RuntimeError as error:  # no thread can be started any more: the interpreter exits
                warnings.warn(f"process group dropped at exit: {error}", ResourceWarning, stacklevel=1)


@contextlib.contextmanager
def _meeting(
    session: Session,
    address: StoreAddress,
    rank: int,
    world_size: int,
    global_ranks: list[int] | None,
    timeout_s: float,
) -> Iterator[Meeting]:
    """Announce this rank, wait for all others, and lend the store to the backend; on the session's connecting thread.

    Args:
        session: its end gives up the waiting.
        address: of the store; the prefix must never have been used before.
        rank, world_size, global_ranks: as of `configure`.
        timeout_s: for all of it.

    Raises:
        ProcessGroupConfigureError: the store cannot be reached, or somebody did not come; the message says who.
        ProcessGroupAbortedError: the session ended.
    """
    deadline = time.monotonic() + timeout_s
    if world_size == 1:
        yield Meeting(session, HashStore(), "127.0.0.1", rank, world_size, global_ranks, deadline)
        return
    thread = threading.current_thread()

    def is_wanted() -> bool:
        return session.error is None

    def key(member: int) -> str:
        return f"torchft_ckpt/came/{member}"

    with enter_store(_stores, address, key(rank), "", timeout_s, is_wanted) as (connection, store):

        def interrupt() -> None:
            # Afterwards its id may be another thread's.
            if thread.is_alive() and thread.native_id is not None:
                shutdown_awaited_connection(thread.native_id, connection.peers)

        session.on_end(interrupt)
        others = {key(member): f"rank {member}" for member in range(world_size) if member != rank}
        wait_for_keys(store, others, deadline, is_wanted)
        yield Meeting(session, store, connection.local_host, rank, world_size, global_ranks, deadline)


def _accelerators() -> list[torch.device]:
    return [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
