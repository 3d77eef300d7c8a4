"""Who catches what Python or torch raise in such a case catches ours; and an error is the same in another process."""

from __future__ import annotations

import builtins
import pickle
import subprocess
import sys

import pytest

from torchft_ckpt import errors
from torchft_ckpt.errors import CheckpointError, TorchftCkptError


def tree(root: type[TorchftCkptError]) -> list[type[TorchftCkptError]]:
    return [root, *(kind for below in root.__subclasses__() for kind in tree(below))]


OURS = [kind for kind in tree(TorchftCkptError)[1:] if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", OURS)
def test_an_error_is_also_one_of_pythons_and_survives_pickling(kind: type[TorchftCkptError]) -> None:
    usual = {base for base in kind.__mro__ if vars(builtins).get(base.__name__) is base} - {
        Exception,
        BaseException,
        object,
    }
    assert usual, "nobody but our own users would catch it"
    error = kind("what happened", party="who")
    if isinstance(error, CheckpointError):
        error.state_overwritten = True
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (type(again), str(again), vars(again)) == (kind, "what happened", vars(error))


@pytest.mark.parametrize(
    ("kind", "usual"),
    [
        (errors.CollectiveFailedError, RuntimeError),
        (errors.CollectivesDifferError, RuntimeError),
        (errors.ProcessGroupAbortedError, RuntimeError),
        (errors.ProcessGroupConfigureError, RuntimeError),
        (errors.GroupBrokenError, RuntimeError),
        (errors.GroupLeftError, SystemExit),
        (errors.NoQuorumError, RuntimeError),
        (errors.QuorumTimeoutError, TimeoutError),
        (errors.LockTimeoutError, TimeoutError),
        (errors.TransferStalledError, TimeoutError),
        (errors.TransferTimeoutError, TimeoutError),
        (errors.LighthouseUnreachableError, ConnectionError),
        (errors.SourceLostError, ConnectionError),
        (errors.AddressInUseError, OSError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.UnsupportedValueError, TypeError),
        (errors.ConfigError, ValueError),
    ],
)
def test_it_is_what_one_expects_in_such_a_case(kind: type[TorchftCkptError], usual: type[Exception]) -> None:
    assert issubclass(kind, usual)


@pytest.mark.processes
def test_a_script_that_knows_nothing_of_a_group_that_left_ends_well() -> None:
    script = "from torchft_ckpt.errors import GroupLeftError; raise GroupLeftError('it left')"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=200).returncode == 0
