"""States on a device that is faked: copies in the order of streams, bytes as they are asked for, faults that are named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator, fake_accelerator

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.sending import sample_blocks
from torchft_ckpt.checkpointing.serving.snapshot import BlockGoneError, Snapshot
from torchft_ckpt.checkpointing.serving.staging import Staging
from torchft_ckpt.checkpointing.state import device_memory
from torchft_ckpt.checkpointing.state.blocks import digest_of, sample_range
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.space import plan_space
from torchft_ckpt.errors import CheckpointError, StateChangedError, TransferError
from torchft_ckpt.threads import Thread

LIMIT = timedelta(seconds=60)
MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[FakeAccelerator]:
    with fake_accelerator() as fake:
        yield fake
        for thread in threading.enumerate():
            if thread.name.startswith("torchft_ckpt-staging"):
                thread.join(60)  # the next test has another device


def transport() -> Iterator[HTTPTransport[Any]]:
    made: HTTPTransport[Any] = HTTPTransport(timeout=LIMIT, hostname="127.0.0.1", block_bytes=MIB)
    yield made
    made.shutdown()


source, receiver = (pytest.fixture(transport, name=name) for name in ("source", "receiver"))


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(seed))


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().contiguous().view(torch.uint8), other.detach().contiguous().view(torch.uint8))


def snapshot_of(state: dict[str, torch.Tensor], num_expected: int = 1) -> Snapshot:
    return Snapshot(state, step=1, lock=StateDictLock(), pool=BufferPool(MIB), num_expected=num_expected)


class Held:
    """Copies to the host stop until they are let go, each by itself; it tells what they are of."""

    def __init__(self, device: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        """The first byte of each copy, in its tensor's memory."""
        self._allowed = threading.Semaphore(0)
        self._has_begun = threading.Semaphore(0)
        copy_to_host = device.copy_to_host

        def copy(pieces: list[tuple[torch.Tensor, memoryview]], after: object) -> None:
            self.begun.append(int(pieces[0][0].storage_offset()))
            self._has_begun.release()
            assert self._allowed.acquire(timeout=60)
            copy_to_host(pieces, after)

        monkeypatch.setattr(device, "copy_to_host", copy)

    def await_begun(self, number: int) -> None:
        for _ in range(number):
            assert self._has_begun.acquire(timeout=60)

    def let(self, number: int) -> None:
        self._allowed.release(number)


# ------------------------------------------------------------------------------------------------ what is staged


def test_what_was_overwritten_before_anybody_wanted_it_is_not_staged_any_more(device: FakeAccelerator) -> None:
    staging = Staging(plan_space([("w", device.tensor(noise(MIB)))]).memories, starts_now=False)
    staging.order_mutation_after(LIMIT)
    with pytest.raises(CheckpointError, match="overwritten before anybody wanted it"):
        staging.wait(LIMIT)
    assert device.num_copied == {True: 0, False: 0}


def test_who_asks_for_bytes_starts_the_copies_and_what_is_written_afterwards_changes_nothing(
    device: FakeAccelerator,
) -> None:
    weight = device.tensor(noise(MIB))
    before = weight.clone()
    staging = Staging(plan_space([("w", weight)]).memories, starts_now=False)
    assert not staging.ready()
    staging.start()
    staging.order_mutation_after(LIMIT)
    assert staging.ready()
    device.write(weight, 9.0)
    device.synchronize()
    assert staging.get(0, 0, MIB, LIMIT) == before.numpy().tobytes()
    assert staging.get(0, 0, MIB + 1, LIMIT) is None


@pytest.mark.parametrize("is_strided", [False, True])
def test_copies_come_after_what_the_current_stream_was_told_to_write(device: FakeAccelerator, is_strided: bool) -> None:
    weight = device.tensor(torch.zeros(8, 9).t() if is_strided else torch.zeros(72))
    device.write(weight, 1.0)
    assert bool((weight == 0).all()), "the stream has not got to it"
    snapshot = snapshot_of({"w": weight, "c": torch.tensor(3.0)})
    snapshot.detach()
    device.write(weight, 9.0)
    device.synchronize()
    staged = [
        torch.frombuffer(bytearray(snapshot.read(at, at + length)), dtype=torch.float32)
        for at, length in snapshot.manifest.segments
    ]
    assert [(one.numel(), float(one.unique().item())) for one in staged] == [(1, 3.0), (72, 1.0)]


def test_bytes_are_waited_for_alone_and_what_is_asked_for_is_copied_next(
    device: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.staging.NUM_COPY_THREADS", 1)
    held = Held(device, monkeypatch)
    weight = device.tensor(noise(20 * MIB))
    snapshot = snapshot_of({"w": weight})
    held.await_begun(1)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(snapshot.read(9 * MIB, 10 * MIB)))
    reader.start()
    with snapshot._changed:  # nobody who waits holds it
        pass
    staging = snapshot._staging
    assert staging is not None
    with staging._changed:
        assert staging._changed.wait_for(lambda: bool(staging._asked), 60)
    held.let(2)
    reader.join(60)
    assert read == [weight.numpy().tobytes()[9 * MIB : 10 * MIB]]
    held.let(3)
    staging.wait(LIMIT)
    assert held.begun == [0, 8 * MIB, 12 * MIB, 16 * MIB, 4 * MIB]
    snapshot.close()


def test_samples_are_copied_alone_while_all_the_rest_waits(
    device: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = device.tensor(noise(40 * MIB))
    snapshot = snapshot_of({"w": weight}, num_expected=0)
    ends = threading.Event()

    def take_none(_: Staging) -> None:
        """No part is copied by itself, and the copying is not over before this test is: the memory is let go then."""
        ends.wait(LIMIT.total_seconds())

    monkeypatch.setattr(Staging, "_take", take_none)
    found = sample_blocks(snapshot, range(40))
    whole = weight.numpy().tobytes()
    assert found == {n: digest_of(n, whole[slice(*sample_range(n, 40 * MIB, MIB))]) for n in range(40)}
    assert device.num_copied[True] == 40 * 256
    snapshot.close()
    ends.set()


def test_a_closed_snapshot_keeps_nobody_waiting(device: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(device, monkeypatch)
    snapshot = snapshot_of({"w": device.tensor(noise(8 * MIB))})
    held.await_begun(1)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            snapshot.read(0, MIB)
        except BlockGoneError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    snapshot.close()
    reader.join(60)
    assert len(failed) == 1
    held.let(2)


def test_what_was_written_without_the_lock_while_it_was_staged_is_not_given(
    device: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.staging.NUM_COPY_THREADS", 1)
    held = Held(device, monkeypatch)
    weight, other = device.tensor(noise(8 * MIB)), device.tensor(noise(MIB))
    snapshot = snapshot_of({"w": weight, "o": other})
    held.await_begun(1)
    held.let(1)
    assert snapshot.read(0, MIB) == weight.numpy().tobytes()[:MIB]
    device.write(weight, 9.0)
    held.let(2)
    with pytest.raises(StateChangedError, match="'w' was written to in place"):
        snapshot.read(4 * MIB, 5 * MIB)
    start = snapshot.manifest.segments[1][0]
    assert snapshot.read(start, start + MIB) == other.numpy().tobytes()
    snapshot.close()


def test_what_is_written_once_it_was_let_go_is_no_change(device: FakeAccelerator) -> None:
    weight = device.tensor(noise(8 * MIB))
    before = weight.numpy().tobytes()
    snapshot = snapshot_of({"w": weight})
    snapshot.stage()
    device.write(weight, 9.0)
    device.synchronize()
    assert snapshot.read(0, 8 * MIB) == before


@pytest.mark.parametrize("fault", ["the device fails", "it has no room", "nothing can be pinned"])
def test_a_state_that_cannot_be_staged_is_named_to_its_readers_and_the_trainer_goes_on(
    device: FakeAccelerator, fault: str
) -> None:
    weight = device.tensor(noise(30 * MIB).view(-1, 4).t())
    if fault == "the device fails":
        device.copies_left = 3
    elif fault == "nothing can be pinned":
        device.refuses_pinned = True
    else:
        device.tensor(noise(20 * MIB))  # no room is left to make it contiguous
    snapshot = snapshot_of({"w": weight})
    with pytest.raises(CheckpointError, match="the state was not copied to the host: CUDA"):
        snapshot.read(0, MIB)
    snapshot.stage()
    assert snapshot.closed
    snapshot.detach()


def test_where_one_buffer_alone_can_be_pinned_all_goes_through_that(
    device: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, local, pinned = device.tensor(noise(12 * MIB)), device.tensor(noise(4 * MIB, 2)), device.pinned
    made, is_refused = list[int](), threading.Event()

    def pinned_once(num_bytes: int) -> torch.Tensor:
        if num_bytes in made:
            is_refused.set()
            raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")
        made.append(num_bytes)
        return pinned(num_bytes)

    monkeypatch.setattr(device, "pinned", pinned_once)
    with device._to_host.buffer():
        snapshot = snapshot_of({"w": weight})  # its threads find that buffer in use
        assert is_refused.wait(60)
    assert snapshot.read(0, 12 * MIB) == weight.numpy().tobytes()
    device.begin_copy_to_device(weight.view(torch.uint8)[: 4 * MIB].numpy().data, local.view(torch.uint8), None)
    device.finish(local.device)
    assert is_equal(local, weight[:MIB])
    snapshot.close()


def test_a_part_that_was_on_its_way_when_another_failed_is_not_given_as_the_trainer_may_have_overwritten_it(
    device: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.staging.NUM_COPY_THREADS", 2)
    copy, has_begun, goes_on, is_done = Staging._copy, threading.Event(), threading.Event(), threading.Event()

    def copy_one_late(self: Staging, segment: int, wanted: range) -> None:
        if segment == 0:
            assert has_begun.wait(60)
            raise RuntimeError("CUDA out of memory")
        has_begun.set()
        assert goes_on.wait(60)
        copy(self, segment, wanted)

    run = Staging._run
    monkeypatch.setattr(Staging, "_copy", copy_one_late)
    monkeypatch.setattr(Staging, "_run", lambda self: (run(self), is_done.set()))
    other = device.tensor(noise(MIB))
    staging = Staging(plan_space([("w", device.tensor(noise(MIB))), ("o", other)]).memories)
    staging.order_mutation_after(LIMIT)  # it has failed, so nobody waits
    other.fill_(9.0)
    goes_on.set()
    assert is_done.wait(60)
    with pytest.raises(CheckpointError, match="not copied to the host: CUDA out of memory"):
        staging.get(1, 0, MIB, LIMIT)


# ------------------------------------------------------------------------------------------------ what is received


def state_of(device: FakeAccelerator, seed: int) -> dict[str, Any]:
    base = device.tensor(noise(64 * 33, seed).view(16, 33))
    return {
        "big": device.tensor(noise(5 * MIB + 12, seed)),
        "small": device.tensor(noise(40, seed)),
        "strided": device.tensor(noise(64 * 33, seed).view(16, 33).t()),
        "tied": base,
        "view": base[2:5],
        "half": device.tensor(noise(MIB, seed).to(torch.bfloat16)),
        "host": noise(MIB, seed),
    }


def fetch(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any], state: Any, **how: Any
) -> tuple[Any, TransferProgress]:
    seen: list[TransferProgress] = []
    source.send_checkpoint([], 1, state, LIMIT)
    try:
        received = receiver.fetch_checkpoint([source.metadata()], 1, LIMIT, on_progress=seen.append, **how)
    finally:
        source.disallow_checkpoint()
    return received, seen[-1]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_state_arrives_to_the_last_bit(device: FakeAccelerator, source: Any, receiver: Any, in_place: bool) -> None:
    state, local = state_of(device, 1), state_of(device, 2)
    device.num_copied = {True: 0, False: 0}
    received, _ = fetch(source, receiver, state, local_state=local, in_place=in_place)
    assert all(is_equal(device.read(received[name]), state[name]) for name in state)
    if in_place:
        assert all(received[name] is local[name] for name in local)
        assert device.num_copied[False] >= 5 * MIB + 12, "through the ring, not at the end"


def test_what_has_come_goes_to_the_device_while_the_source_still_copies_the_rest(
    device: FakeAccelerator, source: Any, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.staging.NUM_COPY_THREADS", 3)  # one for each part
    copy, begin_copy = Staging._copy, device.begin_copy
    came, goes_on = threading.Semaphore(0), threading.Event()

    def copy_last_one_late(self: Staging, segment: int, wanted: range) -> None:
        assert wanted.start < 8 * MIB or goes_on.wait(60)
        copy(self, segment, wanted)

    def note(target: torch.Tensor, source: torch.Tensor, after: Any, *, is_to_host: bool) -> Any:
        if not is_to_host:
            came.release()
        return begin_copy(target, source, after, is_to_host=is_to_host)

    monkeypatch.setattr(Staging, "_copy", copy_last_one_late)
    monkeypatch.setattr(device, "begin_copy", note)
    state, local = {"w": device.tensor(noise(12 * MIB, 1))}, {"w": device.tensor(noise(12 * MIB, 2))}
    fetching = threading.Thread(
        target=fetch, args=(source, receiver, state), kwargs={"local_state": local, "in_place": True}
    )
    fetching.start()
    has_come = [came.acquire(timeout=60) for _ in range(4)]
    goes_on.set()
    fetching.join(60)
    assert all(has_come) and is_equal(device.read(local["w"]), state["w"])


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_equal_here_is_not_fetched(device: FakeAccelerator, source: Any, receiver: Any, in_place: bool) -> None:
    state, local = state_of(device, 1), state_of(device, 1)
    local["host"] += 1
    received, progress = fetch(source, receiver, state, local_state=local, in_place=in_place)
    assert all(is_equal(device.read(received[name]), state[name]) for name in state)
    assert progress.received_bytes <= 3 * MIB < progress.skipped_bytes
    assert not progress.is_equal


def test_a_state_that_is_equal_here_is_said_to_be_and_not_what_an_attempt_before_has_left(
    device: FakeAccelerator, source: Any, receiver: Any
) -> None:
    state, local = {"w": device.tensor(noise(4 * MIB, 1))}, {"w": device.tensor(noise(4 * MIB, 1))}
    assert fetch(source, receiver, state, local_state=local)[1].is_equal
    receiver._buffer_cache.keep([state["w"].view(torch.uint8).numpy().copy()])
    device.write(local["w"], 1.0)
    device.synchronize()
    _, progress = fetch(source, receiver, state, local_state=local)
    assert progress.skipped_bytes == progress.total_bytes and not progress.is_equal


def test_a_state_is_not_said_to_be_equal_where_weights_are_tied_there_alone(
    device: FakeAccelerator, source: Any, receiver: Any
) -> None:
    one, drifted = device.tensor(noise(2 * MIB, 1)), noise(2 * MIB, 1)
    drifted[7] += 1.0
    local = {"a": device.tensor(noise(2 * MIB, 1)), "b": device.tensor(drifted)}
    received, progress = fetch(source, receiver, {"a": one, "b": one}, local_state=local)
    assert progress.skipped_bytes == progress.total_bytes == 2 * MIB and not progress.is_equal
    assert is_equal(received["b"], one)
    local["b"] = local["a"]
    assert fetch(source, receiver, {"a": one, "b": one}, local_state=local)[1].is_equal


def test_what_another_stream_still_writes_is_awaited_before_anything_is_received_in_place(
    device: FakeAccelerator, source: Any, receiver: Any
) -> None:
    state, local = {"w": noise(2 * MIB, 1)}, {"w": device.tensor(noise(2 * MIB, 1))}
    device.write(local["w"], 5.0, is_aside=True)
    fetch(source, receiver, state, local_state=local, in_place=True)
    device.finish(local["w"].device)
    assert is_equal(local["w"], state["w"])


def test_what_is_received_is_written_after_what_the_current_stream_still_writes(device: FakeAccelerator) -> None:
    weight, wanted = device.tensor(noise(MIB, 2)), noise(MIB, 1)
    device.write(weight, 5.0)
    (memory,) = LocalState({"w": weight}).memories("w")
    assert isinstance(memory, device_memory.DeviceMemory)
    memory[0:MIB] = wanted.numpy().data.cast("B")
    assert memory[8:16] == wanted.numpy().tobytes()[8:16], "what is read comes after what was written"
    memory.settle()
    assert is_equal(device.read(weight), wanted)


def test_tied_weights_are_received_into_tied_weights_and_not_into_those_that_are_tied_here_alone(
    device: FakeAccelerator, source: Any, receiver: Any
) -> None:
    one, other = device.tensor(noise(MIB, 1)), device.tensor(noise(MIB, 2))
    both = device.tensor(noise(MIB, 3))
    fetch(source, receiver, {"a": one, "b": one}, local_state={"a": both, "b": both}, in_place=True)
    assert is_equal(device.read(both), one)
    with pytest.raises(CheckpointError, match="share memory here"):
        fetch(source, receiver, {"a": one, "b": other}, local_state={"a": both, "b": both}, in_place=True)
    assert is_equal(device.read(both), one)


@pytest.mark.parametrize("copies", [0, 3])
def test_a_device_that_fails_while_it_is_received_into_leaves_a_state_that_says_it_is_torn(
    device: FakeAccelerator, source: Any, receiver: Any, copies: int
) -> None:
    local = {"w": device.tensor(noise(8 * MIB, 2))}
    state = {"w": noise(8 * MIB, 1)}
    device.copies_left = 8 + copies  # the samples of what is here come first
    with pytest.raises(TransferError, match="was not copied to the device: CUDA error") as caught:
        fetch(source, receiver, state, local_state=local, in_place=True)
    assert caught.value.state_overwritten
    device.copies_left = None
    received, _ = fetch(source, receiver, state, local_state=local, in_place=True)
    assert is_equal(device.read(received["w"]), state["w"])


def test_no_pinned_memory_at_the_receiver_is_named(device: FakeAccelerator, source: Any, receiver: Any) -> None:
    local = {"w": device.tensor(noise(2 * MIB, 2))}
    device.refuses_pinned = True
    with pytest.raises(TransferError, match="cudaHostAlloc"):
        fetch(source, receiver, {"w": noise(2 * MIB, 1)}, local_state=local, in_place=True)


# ------------------------------------------------------------------------------------------------ by torch's own streams


class TorchStream:
    """Notes what torch is told, and is of one thread at a time, as torch's are."""

    said: list[str] = []

    def __init__(self, device: torch.device) -> None:
        self.is_current = False

    def __enter__(self) -> TorchStream:
        assert not self.is_current, "another thread is in it"
        self.is_current = True
        self.said.append("enter")
        return self

    def __exit__(self, *_: object) -> None:
        self.is_current = False
        self.said.append("leave")

    def wait_event(self, event: object) -> None:
        self.said.append("wait")


class TorchEvent:
    def __init__(self, device: torch.device, *, blocking: bool = False) -> None:
        self.is_blocking = blocking

    def record(self, stream: TorchStream) -> None:
        TorchStream.said.append(f"record in {stream.is_current}")


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> device_memory.Accelerator:
    monkeypatch.setattr(torch, "Stream", TorchStream)
    monkeypatch.setattr(torch, "Event", TorchEvent)
    monkeypatch.setattr(TorchStream, "said", [])
    return device_memory.Accelerator()


def test_a_copy_waits_for_what_was_written_and_its_event_comes_after_it(real: device_memory.Accelerator) -> None:
    source, target = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    done = real.begin_copy(target, source, TorchEvent(source.device), is_to_host=True)
    assert TorchStream.said == ["enter", "wait", "record in True", "leave"] and done.is_blocking
    assert torch.equal(source, target)


def test_threads_that_copy_on_one_stream_are_never_in_it_at_once(real: device_memory.Accelerator) -> None:
    """Torch keeps what was current before in the stream itself: a second thread is refused, or given the first one's."""
    source, failed = torch.arange(8), list[BaseException]()

    def copy() -> None:
        try:
            real.begin_copy(torch.zeros_like(source), source, None, is_to_host=True)
        except AssertionError as error:
            failed.append(error)

    class Slow(torch.Tensor):
        """Another thread has all the time to come in while the first one copies it."""

        def copy_(self, *_: Any, **__: Any) -> Any:
            second.start()
            second.join(0.2)
            return self

    second = threading.Thread(target=copy)
    real.begin_copy(torch.zeros(8).as_subclass(Slow), source, None, is_to_host=True)
    second.join(60)
    assert second.ident is not None, "it ran"
    assert not failed and TorchStream.said == ["enter", "record in True", "leave"] * 2


def test_a_thread_of_the_library_stays_on_the_device_that_it_copies_from_and_the_callers_is_left_where_it_is(
    real: device_memory.Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch goes back to the device that was current before: to the first one, in a new thread, where that costs memory."""
    went: list[tuple[str, int]] = []
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: went.append((threading.current_thread().name, index))
    )
    monkeypatch.setattr(torch.accelerator, "current_stream", TorchStream)
    of_library = Thread(lambda: (real.now(torch.device("cuda", 1)), real.after_writes(torch.device("cuda", 2))), "ours")
    of_library.start()
    of_library.join(60)
    real.now(torch.device("cuda", 3))
    assert went == [("ours", 1), ("ours", 2)]
