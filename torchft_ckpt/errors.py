"""Every error that this library raises on purpose, in one tree.

    TorchftCkptError
    |-- ConfigError                     an argument or environment variable cannot be used (a ValueError)
    |-- CoordinationError               lighthouse, manager service, or a rank of this group (a RuntimeError)
    |   |-- LighthouseUnreachableError  nobody answered at the lighthouse's address (a ConnectionError)
    |   |-- AddressInUseError           the port that a service was told to bind is taken (an OSError)
    |   |-- AuthenticationError         the other side refused our token, or we refused theirs
    |   |   `-- TlsError                no TLS session: a certificate does not verify, or one side speaks plain HTTP
    |   |-- ProtocolVersionError        the two sides speak different versions
    |   |-- ProtocolError               a peer sent something that the protocol does not allow
    |   |-- RefusedError                the lighthouse will not have this group; the message says why
    |   |   `-- JobFinishedError        the job was over when this group asked for a step
    |   |-- QuorumTimeoutError          no quorum was formed in the time allowed (a TimeoutError)
    |   |-- NoQuorumError               a call that needs a quorum came before the first `start_quorum`
    |   |-- GroupBrokenError            a rank of this group is gone: restart the whole group
    |   |-- GroupLeftError              this group has left its job, as asked (a SystemExit of status 0)
    |   |-- ReplicasDifferError         groups hold different states of a step, and have to stop
    |   `-- CommitUnknownError          the vote was sent, its outcome is not known
    |-- CheckpointError                 moving or holding state (a RuntimeError)
    |   |-- LockTimeoutError            the state dict lock was not free in time (a TimeoutError)
    |   |-- StateFormatError            received bytes break a rule of the state format
    |   |-- UnsupportedValueError       our own state dict holds a value of no known type (a TypeError)
    |   |-- StateMismatchError          a whole and correct state that does not fit this replica
    |   |   `-- LayoutMismatchError     the same tensors, but in other shards than here
    |   |-- StateDictLoadError          the user's load_state_dict function raised, or did not take what it was given
    |   |-- StorageError                a file system or object store failed (an OSError)
    |   |-- CheckpointDamagedError      a durable checkpoint is not whole, or has other bytes than written
    |   |-- CheckpointNotFoundError     there is no whole durable checkpoint (a FileNotFoundError)
    |   |-- RanksDifferError            a checkpoint is whole, but ranks of a group hold different replicas in it
    |   |-- SaveInFlightError           a save was not begun, because the one before it has not ended
    |   |-- StateChangedError           a tensor changed, not under the lock, while it was served or saved
    |   `-- TransferError               a transfer did not finish; nothing was applied
    |       |-- SourceLostError         the source is gone or out of reach (a ConnectionError)
    |       |-- SourceRefusedError      the source refused (other step, no token, not serving)
    |       |   `-- LeaseRevokedError   it freed blocks that this slow receiver still needed
    |       |-- TransferStalledError    no byte arrived for the stall timeout (a TimeoutError)
    |       |-- TransferTimeoutError    the overall deadline passed (a TimeoutError)
    |       |-- TransferCancelledError  this side gave the transfer up
    |       `-- DigestMismatchError     a block arrived whose digest is not the announced one
    |-- ProcessGroupError               (a RuntimeError, as torch's own)
    |   |-- ProcessGroupAbortedError    a collective ended because the group was aborted
    |   |-- CollectiveFailedError       a peer was lost, or did not answer in time
    |   |-- CollectivesDifferError      the groups issued different collectives in a step
    |   `-- ProcessGroupConfigureError  the members of a quorum could not connect to each other
    |-- SampleError                     a StepLoader cannot read a microbatch (a RuntimeError)
    |-- AbsentNameError                 a name of torchft's that is not here (a NotImplementedError)
    |-- AliasError                      torchft itself had been imported before (an ImportError)
    `-- MaxRetriesExceededError         more than `max_retries` steps in a row were discarded (a RuntimeError)

In brackets is the error that Python or torch raises in such a case. The error here is also that, and so are those below it.

`ReplicaDivergenceWarning` is no error: the state that was received is that of the primary source, but another source of the
same step holds other bits.

Each message names the party (which peer, which address, which argument) and what may be concluded. `party` repeats the
name for programs. All of them survive pickling, because they cross processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class TorchftCkptError(Exception):
    """Base of the tree.

    Args:
        message: one or two sentences that name the party, and what to do where there is something to do.
        party: the peer, address or argument at fault, for programs.
    """

    def __init__(self, message: str, party: str | None = None) -> None:
        super().__init__(message)
        self.party = party

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return type(self), (self.args[0], self.party)


class ConfigError(TorchftCkptError, ValueError):
    """An argument or an environment variable cannot be used; nothing was started."""


class CoordinationError(TorchftCkptError, RuntimeError):
    """Base of what goes wrong between this process and its lighthouse or group."""


class LighthouseUnreachableError(CoordinationError, ConnectionError):
    """Nobody answered at the lighthouse's address within the connect timeout."""


class AddressInUseError(CoordinationError, OSError):
    """The address that a service was told to bind is taken by another process."""


class AuthenticationError(CoordinationError):
    """One side refused the other's token; no message was exchanged."""


class TlsError(AuthenticationError):
    """There is no TLS session with the other side: a certificate does not verify, or one side speaks plain HTTP; neither token
    nor message was sent.
    """


class ProtocolVersionError(CoordinationError):
    """The two sides speak different protocol versions; no message was exchanged."""


class ProtocolError(CoordinationError):
    """A peer sent something that the protocol does not allow; its connection was closed."""


class RefusedError(CoordinationError):
    """The lighthouse will not have this replica group; trying again unchanged cannot help."""


class JobFinishedError(RefusedError):
    """The job was over when this replica group asked for a step: there is nothing left to train. Scripts end well on it.

    Args:
        step: at which it was finished.
    """

    def __init__(self, message: str, party: str | None = None, step: int = 0) -> None:
        super().__init__(message, party)
        self.step = step

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return type(self), (self.args[0], self.party, self.step)


class QuorumTimeoutError(CoordinationError, TimeoutError):
    """No quorum was formed in the time that the caller allowed; no state was changed."""


class NoQuorumError(CoordinationError):
    """A call that needs a quorum came before the first `start_quorum`; nothing was sent."""


class GroupBrokenError(CoordinationError):
    """A rank of this replica group is gone; the group has left and must be restarted as a whole."""


class GroupLeftError(CoordinationError, SystemExit):
    """This replica group has left its job, because it was asked to (`Manager.leave_on`, `drain`). Scripts end well on it.

    It is a `SystemExit` as well: a script that does not catch it ends with status 0.
    """

    def __init__(self, message: str, party: str | None = None) -> None:
        super().__init__(message, party)
        self.code = 0


class ReplicasDifferError(CoordinationError):
    """Replica groups hold different states of one step: it names the groups and what differs first.

    All groups get it that were told to stop then; the step that was open is discarded, so each holds the state that was compared.
    Or a group gets it that had to load what differs twice already, at the two steps before; the others train on.
    """


class CommitUnknownError(CoordinationError):
    """The vote was sent but its outcome is not known; the replica heals at the next quorum if others committed."""


class CheckpointError(TorchftCkptError, RuntimeError):
    """Base of errors in holding or moving state.

    A receive or a load in place writes into a state that is in use here. If it does not finish, `state_overwritten` is true and
    the message says "torn": then that state is no state of any step, and must be loaded again before it is used.
    """

    state_overwritten: bool = False

    def mark_torn(self) -> None:
        """Say, in the message too, that a part of the state that is here was overwritten. Once; a second call changes nothing."""
        if not self.state_overwritten:
            self.state_overwritten = True
            self.args = (
                f"{self.args[0]}; the state that was here is torn: it is partly overwritten and must not be used before it is"
                " loaded again",
            )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _restore_checkpoint_error, (type(self), self.args[0], self.party, self.state_overwritten)


@contextlib.contextmanager
def torn_where_it_raises(doing: str, party: str, has_written: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Around code that writes into a state that is in use here: what it raises says that the state is torn.

    Args:
        doing: said if it raises something that is no `CheckpointError`; that becomes one, with its cause.
        party: of that error.
        has_written: whether something was written; asked when it has raised. If not, the error is left as it is.

    Raises:
        CheckpointError: with `state_overwritten`.
    """
    try:
        yield
    except CheckpointError as error:
        if has_written():
            error.mark_torn()
        raise
    except Exception as error:
        if not has_written():
            raise
        failure = CheckpointError(f"{doing} failed: {type(error).__name__}: {error}", party)
        failure.mark_torn()
        raise failure from error


def _restore_checkpoint_error(
    kind: type[CheckpointError], message: str, party: str | None, overwritten: bool
) -> CheckpointError:
    error = kind(message, party)
    error.state_overwritten = overwritten
    return error


class LockTimeoutError(CheckpointError, TimeoutError):
    """The state dict lock was not free within the caller's timeout; it was not taken and stays usable."""


class StateFormatError(CheckpointError):
    """Received bytes break a rule of the state format; nothing was applied."""

    @classmethod
    def of(cls, error: Exception, party: str) -> CheckpointError:
        """Return what reading a peer's bytes raised as an error of ours: no other peer pays for it."""
        what = f"what {party} sent cannot be read: {type(error).__name__}: {error}"
        return error if isinstance(error, CheckpointError) else cls(what, party)


class UnsupportedValueError(CheckpointError, TypeError):
    """Our own state dict holds a value that the format cannot carry; the message has its path in the tree."""


class StateMismatchError(CheckpointError):
    """A whole and correct state that does not fit this replica (names, shapes or dtypes); nothing was applied."""


class LayoutMismatchError(StateMismatchError):
    """The source's tensors are those of this replica, but its ranks hold other parts of them: they have to be re-sharded."""


class StateDictLoadError(CheckpointError):
    """The user's `load_state_dict` function raised, or twice in a row did not take what it was given; the state is undefined."""

    @classmethod
    def of(cls, key: str, error: Exception, lacks: str = "") -> StateDictLoadError:
        """Return the error for what the function of a key raised. The state counts as torn: nobody knows how far it came.

        `lacks`: what is in the state, and was not here.
        """
        grown = f"; the state has {lacks}, and this group has not"
        helps = ": if its loop adds that as it trains, let load_state_dict add it first"
        raised = f"load_state_dict of {key!r} raised {type(error).__name__}: {error}"
        failure = cls(f"{raised}{grown}{helps}" if lacks else raised, party=key)
        failure.mark_torn()
        return failure


class StorageError(CheckpointError, OSError):
    """A file system or object store failed; the message names the path. Checkpoints that were whole before still are."""


class CheckpointDamagedError(CheckpointError):
    """A durable checkpoint is not whole, or its bytes are not those that were written; nothing of it was applied."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no whole durable checkpoint, or none of the step that was asked for; the message says what was skipped."""


class RanksDifferError(CheckpointError):
    """A save is done and its checkpoint whole, but ranks of a group do not hold alike what their optimizers own and each of them
    should: the message names tensors and ranks. All of the group that have such replicas get it. They may go on: it comes again.
    """


class SaveInFlightError(CheckpointError):
    """A save was not begun, because the one before it has not ended; that one goes on."""


class StateChangedError(CheckpointError):
    """A tensor was written to in place while its state was being served or saved, and not under the write side of the state dict
    lock: what is left of that state cannot be had. `party` is the tensor's path. Training goes on.
    """


class TransferError(CheckpointError):
    """A transfer did not finish; nothing was applied and it may be tried again."""


class SourceLostError(TransferError, ConnectionError):
    """The source closed the connection early or could not be reached."""


class SourceRefusedError(TransferError):
    """The source answered with a refusal: it serves another step, wants another token, or serves nothing."""


class LeaseRevokedError(SourceRefusedError):
    """The source's budget for copies was exceeded, and this receiver was the slowest: what it still needed was freed."""


class TransferStalledError(TransferError, TimeoutError):
    """No byte arrived for the stall timeout."""


class TransferTimeoutError(TransferError, TimeoutError):
    """The overall deadline of the transfer passed."""


class TransferCancelledError(TransferError):
    """This side gave the transfer up, because the step it was for is over."""


class DigestMismatchError(TransferError):
    """A block arrived whose digest is not the announced one; it was thrown away."""


class ProcessGroupError(TorchftCkptError, RuntimeError):
    """Base of what goes wrong in the training process group."""


class ProcessGroupAbortedError(ProcessGroupError):
    """A collective ended because the group was aborted; its tensors must not be used."""


class CollectiveFailedError(ProcessGroupError):
    """A collective failed by itself (a peer was lost, aborted, or did not answer in time); its tensors must not be used."""


class CollectivesDifferError(ProcessGroupError):
    """Another replica group issued another collective than this one: the step is discarded, and no tensor was touched."""


class ProcessGroupConfigureError(ProcessGroupError):
    """The members of a quorum could not connect to each other in time."""


class SampleError(TorchftCkptError, RuntimeError):
    """A `StepLoader` cannot read a microbatch: what the data set raised is its cause, and the message says for which sample."""


class AbsentNameError(TorchftCkptError, NotImplementedError):
    """A name of torchft's that does not exist here was used; the message says what to use instead."""


class AliasError(TorchftCkptError, ImportError):
    """torchft itself was imported in this process before this package took its place; nothing was changed."""


class MaxRetriesExceededError(TorchftCkptError, RuntimeError):
    """More than `max_retries` steps in a row were discarded."""


class ReplicaDivergenceWarning(UserWarning):
    """Two replicas that should hold the same state hold other bits; the message names the tensors."""
