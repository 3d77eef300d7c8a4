"""Our `HTTPTransport` as the `checkpoint_transport` of torchft's own Manager: the released wheel, its lighthouse, two groups.

`scripts/test-torchft` runs this in an environment that has torchft; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ports import reserved_port
from support.processes import note

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft is not installed; scripts/test-torchft runs this", allow_module_level=True)

pytestmark = [pytest.mark.processes, pytest.mark.slow]
GROUP = Path(__file__).with_name("group.py")
Event = dict[str, Any]


class Group:
    """A process that trains; its reports are collected on a thread."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.events: list[Event] = []
        name = f"group_{options['group']}_{options.get('rank', 0)}"
        self.result = directory / f"{name}.pt"
        self._log = directory / f"{name}.log"
        self._news: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        with self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(GROUP), json.dumps({**options, "result": str(self.result)})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        note(self._log.stem, self.process, self._log)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append(event)
            self._news.put(event)
        self._news.put(None)

    def wait_for(self, condition: Callable[[Event], bool], timeout_s: float = 150.0) -> Event:
        """Return the first event, of those not waited for yet, that fulfils the condition."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"nothing of that kind within {timeout_s} s\n{self.log()}") from None
            if event is None:
                raise AssertionError(f"the group ended with {self.process.wait()}\n{self.log()}")
            if condition(event):
                return event

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def digests(self) -> dict[int, str]:
        """Digest of the state after each committed step."""
        return {event["step"]: event["digest"] for event in self.of("step")}

    def end(self, timeout_s: float = 120.0) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(5)
            self.process.stdout.close()

    def log(self) -> str:
        return self._log.read_text()[-4000:]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    # Longer than a group may be slow for: it would be left out, and heal once more.
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    # It advertises the host's name, which need not resolve.
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def differing_bits(left: object, right: object, path: str = "state") -> list[str]:
    """Return the paths at which two states differ in any bit: tensors by integer views, all else by equality."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return [path]
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        return [] if torch.equal(left.view(integers), right.view(integers)) else [path]
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return [path]
        return [found for key in left for found in differing_bits(left[key], right[key], f"{path}.{key}")]
    return [] if left == right else [path]


@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["heals beside its step", "heals before its step"])
def test_a_group_of_torchft_heals_through_our_transport_and_goes_on(
    tmp_path: Path, lighthouse: str, use_async_quorum: bool
) -> None:
    options = {"lighthouse": lighthouse, "use_async_quorum": use_async_quorum, "steps_together": 10}
    first = Group(tmp_path, group=0, **options)
    groups = [first]
    try:
        first.wait_for(lambda event: event["event"] == "step" and event["step"] >= 3)
        late = Group(tmp_path, group=1, **options)
        groups.append(late)
        done = [group.wait_for(lambda event: event["event"] == "done") for group in groups]
    finally:
        codes = [group.end() for group in groups]
    assert codes == [0, 0], "\n".join(group.log() for group in groups)

    # The state went through our transport, once, and what arrived is what the source held at that step.
    (sent,), (received,) = first.of("sending"), late.of("received")
    assert (received["step"], received["metadata"]) == (sent["step"], done[0]["metadata"])
    assert received["step"] >= 3
    assert received["digest"] == sent["digest"] == first.digests()[sent["step"]]

    # From there on both take the same steps, to the same bits.
    common = late.digests()
    assert {step: first.digests()[step] for step in common} == common
    assert len(common) >= 10
    assert done[0]["step"] == done[1]["step"]
    left, right = (torch.load(group.result, weights_only=True) for group in groups)
    assert differing_bits(left, right) == []


def test_a_sharded_model_heals_to_dtensors_inside_torchfts_manager(tmp_path: Path, lighthouse: str) -> None:
    """torchft's Manager hands no state of its own to the transport: what arrives lies on the mesh of the default group."""
    options = {"lighthouse": lighthouse, "use_async_quorum": False, "steps_together": 5, "world_size": 2}
    started: list[list[Group]] = []
    with ExitStack() as ports:
        try:
            for group in range(2):
                port = ports.enter_context(reserved_port())
                started.append([Group(tmp_path, group=group, rank=rank, port=port, **options) for rank in range(2)])
                started[0][0].wait_for(lambda event: event["event"] == "step" and event["step"] >= 3)
            done = [[rank.wait_for(lambda event: event["event"] == "done") for rank in ranks] for ranks in started]
        finally:
            codes = [rank.end() for ranks in started for rank in ranks]
    assert codes == [0] * 4, "\n".join(rank.log() for ranks in started for rank in ranks)
    assert len({event["step"] for ranks in done for event in ranks}) == 1
    for one, other in zip(*started, strict=True):
        (sent,), (received,) = one.of("sending"), other.of("received")
        assert sent["digest"] == received["digest"]
        left, right = (torch.load(rank.result, weights_only=True) for rank in (one, other))
        assert differing_bits(left, right) == []
