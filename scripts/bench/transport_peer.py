"""The benchmark's end of one `transport_worker` process: a call for each command, and what a whole transfer consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import sides
from bench.processes import Child, Children, Event

_START_TIMEOUT_S = 180.0
_COMMAND_TIMEOUT_S = 150.0
_RAW_STREAMS = 2
"""Without digests more of them are faster, where there are two cores."""


class CommandFailedError(RuntimeError):
    """A worker could not do what it was told."""


class Peer:
    """One worker process. Starts on construction; `ready` waits until it can be used.

    Args:
        children: where it is started, and ended.
        name: of the process, in messages and logs.
        shape: number and length in bytes of the model's tensors.
        side: which library.
        num_chunks: the reference's setting.
        host: address to advertise.
        namespace: network namespace to run in.
    """

    def __init__(
        self,
        children: Children,
        name: str,
        shape: tuple[int, int],
        *,
        side: str = sides.OURS,
        num_chunks: int = 0,
        host: str = "127.0.0.1",
        namespace: str = "",
    ) -> None:
        options = {
            "side": side,
            "num_chunks": num_chunks,
            "host": host,
            "namespace": namespace,
            "num_tensors": shape[0],
            "tensor_bytes": shape[1],
        }
        self.name = name
        self._child: Child = children.start("bench.transport_worker", options, name)
        self._num_asked = 1
        self.metadata = ""
        self.num_streams = 0

    def ready(self) -> Peer:
        """Wait until it listens."""
        answer = self._child.wait_for("answer", _START_TIMEOUT_S, count=1)
        self.metadata, self.num_streams = str(answer["metadata"]), int(answer["num_streams"])
        return self

    def begin(self, do: str, **arguments: Any) -> None:
        """Give a command and don't wait for its answer; `answer` does."""
        self._num_asked += 1
        self._child.tell(do=do, **arguments)

    def answer(self, timeout_s: float = _COMMAND_TIMEOUT_S) -> Event:
        """Wait for the answer to the latest command.

        Raises:
            CommandFailedError: it could not be done.
            ChildEndedError, TimeoutError: there is none.
        """
        answer = self._child.wait_for("answer", timeout_s, count=self._num_asked)
        if "error" in answer:
            raise CommandFailedError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, do: str, **arguments: Any) -> Event:
        """Give a command and wait for its answer."""
        self.begin(do, **arguments)
        return self.answer()

    def wait_for(self, kind: str, count: int) -> Event:
        """Wait for the `count`-th report of a kind that comes between the answers."""
        return self._child.wait_for(kind, _COMMAND_TIMEOUT_S, count=count)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._child.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one recovery took, in seconds: serving, receiving, loading."""

    send_s: float
    receive_s: float
    load_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.send_s + self.receive_s + self.load_s


def transfer(source: Peer, receiver: Peer, step: int, *, in_place: bool = True) -> Transfer:
    """Let one process recover from another, once; the source has just been filled."""
    send_s = source.ask("send", step=step)["seconds"]
    answer = receiver.ask("receive", sources=[source.metadata], step=step, in_place=in_place)
    return Transfer(send_s=send_s, receive_s=answer["receive_s"], load_s=answer["load_s"])


def raw_transfer(source: Peer, receiver: Peer) -> float:
    """Let raw sockets carry what the source's model holds now, over two streams; return the seconds it took."""
    port = source.ask("raw_listen", num_streams=_RAW_STREAMS)["port"]
    receiver.ask("raw_connect", port=port, num_streams=_RAW_STREAMS)
    took_s: float = receiver.ask("raw_receive")["seconds"]
    return took_s


def check_equal(source: Peer, receivers: Sequence[Peer]) -> None:
    """Check that the models have the same bits.

    Raises:
        CommandFailedError: one has not; a time without the right state is no figure.
    """
    for peer in (source, *receivers):
        peer.begin("digest")
    wanted = source.answer()["digest"]
    wrong = [receiver.name for receiver in receivers if receiver.answer()["digest"] != wanted]
    if wrong:
        raise CommandFailedError(f"{', '.join(wrong)}: the state is not that of {source.name}")
