"""The quantised allreduce: near the mean, the same bits for all, a quarter of the bytes, and an end whatever happens."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.rings import Ring
from support.waiting import wait_until
from torch.distributed import Work

from torchft_ckpt.errors import CollectiveFailedError, ProcessGroupAbortedError, ProcessGroupError
from torchft_ckpt.process_group import ProcessGroup, ProcessGroupDummy, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.process_group.quantization import (
    ERROR_SLACK,
    FP8,
    INT8,
    Codec,
    allreduce_quantized,
    chunk_layout,
)
from torchft_ckpt.process_group.sockets import GlooSockets

LONG = timedelta(seconds=30)
SIZES = [1, 2, 5, 511, 513, 4097, 300_001]
both = pytest.mark.parametrize("codec", [INT8, FP8], ids=lambda codec: codec.name)


@pytest.fixture(params=["gloo", "fake"])
def make_ring(request: pytest.FixtureRequest, new_address: Callable[[], str]) -> Iterator[Callable[[int], Ring]]:
    rings = []

    def make(num_members: int) -> Ring:
        fabric = FakeFabric()
        members: list[ProcessGroup] = [
            ProcessGroupGloo(LONG) if request.param == "gloo" else FakeProcessGroup(fabric, LONG)
            for _ in range(num_members)
        ]
        rings.append(Ring(members, new_address))
        rings[-1].configure()
        return rings[-1]

    yield make
    for ring in rings:
        ring.close()


def average(
    ring: Ring, tensors: list[torch.Tensor], codec: Codec = INT8, divisor: int | None = -1
) -> list[torch.Tensor]:
    """Reduce one tensor of each rank, in place; by default divided by the number of ranks."""

    def reduce(rank: int, group: ProcessGroup) -> None:
        by = len(tensors) if divisor == -1 else divisor
        allreduce_quantized(group, tensors[rank], codec, divisor=by, timeout=LONG)

    assert ring.each(reduce) == [None] * len(tensors)
    return tensors


def bits(tensor: torch.Tensor) -> list[int]:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8).tolist()


def scales_of(codec: Codec, tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Each element's scale, in fp64."""
    block = chunk_layout(tensor.numel(), num_ranks).block
    largest = [part.abs().max().item() for part in tensor.double().split(block)]
    scales = torch.tensor([max(value / codec.largest, 2.0**-126) for value in largest], dtype=torch.float64)
    return scales.repeat_interleave(block)[: tensor.numel()]


def assert_within_the_bound(
    inputs: list[torch.Tensor], result: torch.Tensor, codec: Codec, divisor: int, num_ranks: int
) -> None:
    exact = torch.stack([tensor.double() for tensor in inputs]).sum(0) / divisor
    slack = num_ranks * ERROR_SLACK
    scales_in = sum(scales_of(codec, tensor, num_ranks) for tensor in inputs) / divisor
    if codec is INT8:
        from_inputs = scales_in * (0.5 + slack)
    else:
        from_inputs = sum(
            torch.maximum(tensor.double().abs() / 16, scales_of(codec, tensor, num_ranks) / 1024) for tensor in inputs
        )
        from_inputs = from_inputs / divisor + scales_in * slack
    # What the owner quantised lies within `from_inputs` of the mean, so its scale is at most that of the mean and this.
    scale_out = scales_of(codec, exact.abs() + from_inputs, num_ranks)
    if codec is INT8:
        from_output = scale_out * (0.5 + slack)
    else:
        from_output = torch.maximum((exact.abs() + from_inputs) / 16, scale_out / 1024) + scale_out * slack
    excess = (result.double() - exact).abs() - from_inputs - from_output
    assert (excess <= 0).all(), f"element {excess.argmax()} is off by {excess.max()} more than it may"


@both
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_ranks_get_the_same_bits_near_the_mean(
    make_ring: Callable[[int], Ring], num_ranks: int, codec: Codec
) -> None:
    ring = make_ring(num_ranks)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    for size in [*SIZES, *(random.Random(seed).randrange(1, 50_000) for _ in range(5))]:
        inputs = [torch.randn(size, generator=generator) * 10.0 ** (rank % 3) for rank in range(num_ranks)]
        results = average(ring, [tensor.clone() for tensor in inputs], codec)
        assert all(torch.equal(result.view(torch.int32), results[0].view(torch.int32)) for result in results)
        assert_within_the_bound(inputs, results[0], codec, num_ranks, num_ranks)


@pytest.fixture(scope="module")
def three_fakes() -> Iterator[Ring]:
    fabric = FakeFabric()
    addresses = iter(range(1000))
    ring = Ring([FakeProcessGroup(fabric, LONG) for _ in range(3)], lambda: f"fake/{next(addresses)}")
    ring.configure()
    yield ring
    ring.close()


@pytest.mark.slow
@both
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_error_bound_holds_for_any_values(three_fakes: Ring, codec: Codec, data: st.DataObject) -> None:
    values = st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-1, 1, width=32)
    size = data.draw(st.integers(1, 40))
    inputs = [torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size))) for _ in range(3)]
    divisor = data.draw(st.integers(1, 3))
    results = average(three_fakes, [tensor.clone() for tensor in inputs], codec, divisor)
    assert [bits(result) for result in results] == [bits(results[0])] * 3
    assert_within_the_bound(inputs, results[0], codec, divisor, 3)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (5, 33), (2, 3, 4, 5)], ids=str)
def test_any_dtype_and_shape_comes_back_as_it_went(
    three_fakes: Ring, codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    results = average(three_fakes, [tensor.clone() for tensor in inputs], codec)
    assert all(result.dtype is dtype and result.shape == shape for result in results)
    assert [bits(result) for result in results] == [bits(results[0])] * 3
    exact = torch.stack(inputs).double().mean(0)
    # Two roundings to a 28th of the largest value (fp8's; int8 has a 254th), and the dtype's own.
    largest = max((tensor.abs().max().item() for tensor in inputs if tensor.numel()), default=0.0)
    assert ((results[0].double() - exact).abs() <= largest * (2.1 / 28 + torch.finfo(dtype).eps)).all()


def test_a_tensor_that_is_not_contiguous_is_reduced_like_its_copy(three_fakes: Ring) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn((30, 20, 2), generator=generator).permute(1, 0, 2)[..., 0] for _ in range(3)]
    expected = average(three_fakes, [tensor.contiguous() for tensor in inputs])
    assert not inputs[0].is_contiguous()
    results = average(three_fakes, inputs)
    assert [bits(result) for result in results] == [bits(tensor) for tensor in expected]


def test_a_parameter_can_be_reduced(three_fakes: Ring) -> None:
    parameters = [torch.nn.Parameter(torch.full((3,), float(rank))) for rank in range(3)]
    average(three_fakes, parameters)  # type: ignore[arg-type]
    assert [parameter.tolist() for parameter in parameters] == [[1.0] * 3] * 3


@pytest.mark.slow
@both
def test_who_gives_zeros_adds_no_error_and_is_not_in_the_divisor(
    make_ring: Callable[[int], Ring], codec: Codec
) -> None:
    ring = make_ring(3)
    values = torch.tensor([4.0, -2.0, 0.25])
    tensors = [values.clone(), torch.zeros(3), values.clone()]
    results = average(ring, tensors, codec, divisor=2)
    assert_within_the_bound([values, torch.zeros(3), values], results[0], codec, 2, 3)
    assert results[1].tolist() == results[0].tolist()


def test_without_a_divisor_it_is_the_sum(make_ring: Callable[[int], Ring]) -> None:
    results = average(make_ring(2), [torch.full((4,), 127.0), torch.full((4,), 127.0)], divisor=None)
    assert [result.tolist() for result in results] == [[254.0] * 4] * 2


@both
def test_a_value_that_is_not_finite_makes_its_block_nan_on_all_ranks(
    make_ring: Callable[[int], Ring], codec: Codec
) -> None:
    ring = make_ring(2)
    tensors = [torch.ones(4096), torch.ones(4096)]
    tensors[1][1000] = float("inf")
    first, second = average(ring, tensors, codec)
    assert first.isnan().nonzero().flatten().tolist() == list(range(512, 1024))
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


def test_a_group_of_one_can_do_it_too() -> None:
    tensor = torch.tensor([127.0, 3.0, -0.4])
    allreduce_quantized(ProcessGroupDummy(0, 1), tensor, INT8, divisor=1, timeout=LONG)
    assert tensor.tolist() == [127.0, 3.0, 0.0]


def received_bytes(group: ProcessGroup) -> int:
    """What the connections of a Gloo group have received, as the kernel counts it."""
    assert isinstance(group, ProcessGroupGloo)
    assert group._session is not None
    owners = [getattr(close, "__self__", None) for close in group._session._closers]
    total = 0
    for _, _, sock in next(owner for owner in owners if isinstance(owner, GlooSockets))._open():
        with sock:
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += struct.unpack_from("<Q", info, 128)[0]  # tcpi_bytes_received
    return total


@pytest.mark.skipif(not os.path.isdir("/proc/self/fdinfo"), reason="needs Linux's /proc")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_quarter_of_the_bytes_of_fp32_cross_the_wire(gloo_ring: Callable[[int], Ring], num_ranks: int) -> None:
    ring = gloo_ring(num_ranks)
    ring.configure()
    numel = 2**20

    def crossed(act: Callable[[int, ProcessGroup], object]) -> float:
        before = sum(received_bytes(group) for group in ring.members)
        outcomes = ring.each(act)
        assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        return (sum(received_bytes(group) for group in ring.members) - before) / num_ranks

    plain = crossed(lambda rank, group: group.allreduce([torch.ones(numel)]).wait())  # type: ignore[call-arg]
    quantised = crossed(
        lambda rank, group: allreduce_quantized(group, torch.ones(numel), INT8, divisor=None, timeout=LONG)
    )
    print(f"{num_ranks} ranks: {plain:.0f} bytes a rank in fp32, {quantised:.0f} in int8: {quantised / plain:.4f}")
    assert quantised <= 0.255 * plain
    assert quantised <= 1.02 * 2 * (num_ranks - 1) / num_ranks * numel


# ---------------------------------------------------------------------------------------------------- what goes wrong


def start_on(ring: Ring, rank: int, timeout: timedelta = LONG) -> tuple[threading.Thread, list[Exception]]:
    """Begin on one rank; the list has its error when the thread has ended."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            allreduce_quantized(ring.members[rank], torch.ones(5000), INT8, divisor=2, timeout=timeout)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


class Stages:
    """Sees which collectives a group starts; `hold` is called before each."""

    def __init__(self, group: ProcessGroup, hold: Callable[[str], None]) -> None:
        self.started: list[str] = []
        for name in ("alltoall_base", "allgather"):
            setattr(group, name, self._wrap(name, getattr(group, name), hold))

    def _wrap(self, name: str, operation: Callable[..., Work], hold: Callable[[str], None]) -> Callable[..., Work]:
        def start(*arguments: object) -> Work:
            hold(name)
            self.started.append(name)
            return operation(*arguments)

        return start


@pytest.mark.parametrize("stage", ["alltoall_base", "allgather"])
@pytest.mark.parametrize("who", ["own", "other"])
def test_an_abort_ends_it_at_either_stage(make_ring: Callable[[int], Ring], stage: str, who: str) -> None:
    ring = make_ring(2)
    is_there, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == stage:
            is_there.set()
            assert go_on.wait(2 * LONG.total_seconds())

    # The other rank never starts this stage, so that ours waits for it.
    Stages(ring.members[1], hold)
    ours = Stages(ring.members[0], lambda name: None)
    thread, errors = start_on(ring, 0)
    other, other_errors = start_on(ring, 1)
    assert is_there.wait(120)
    wait_until(lambda: stage in ours.started, "our rank is in that stage")
    ring.members[0 if who == "own" else 1].abort()
    # Gloo forgets an operation that starts in the moment in which it notices the end of the connection, until its timeout.
    thread.join(20 + LONG.total_seconds())
    go_on.set()
    other.join(20 + LONG.total_seconds())
    assert [type(error) for error in errors] == [ProcessGroupAbortedError if who == "own" else CollectiveFailedError]
    assert [isinstance(error, ProcessGroupError) for error in other_errors] == [True]


def test_a_timeout_ends_it_though_each_stage_had_its_time(gloo_ring: Callable[[int], Ring]) -> None:
    ring = gloo_ring(2)
    ring.configure()
    release = threading.Event()

    def hold(name: str) -> None:
        if name == "allgather":
            assert release.wait(120)

    Stages(ring.members[1], hold)
    thread, errors = start_on(ring, 0, timedelta(seconds=0.3))
    other, other_errors = start_on(ring, 1)
    thread.join(60)
    release.set()
    other.join(60)
    assert [isinstance(error, ProcessGroupError) for error in errors + other_errors] == [True, True]


def test_a_rank_that_fails_between_the_stages_is_not_waited_for(
    make_ring: Callable[[int], Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make_ring(2)

    def fail(name: str) -> None:
        if name == "allgather":
            raise MemoryError("no memory for the rest")

    Stages(ring.members[1], fail)
    outcomes = ring.each(
        lambda rank, group: allreduce_quantized(group, torch.ones(5000), INT8, divisor=2, timeout=LONG)
    )
    assert [type(outcome) for outcome in outcomes] == [CollectiveFailedError, MemoryError]
    assert [isinstance(group.errored(), ProcessGroupError) for group in ring.members] == [True, True]


# -------------------------------------------------------------------------------------------------------------- on a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@gpu
@both
def test_gloo_reduces_gpu_tensors_to_the_bits_of_cpu_tensors(gloo_ring: Callable[[int], Ring], codec: Codec) -> None:
    ring = gloo_ring(2)
    ring.configure()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(100_003, generator=generator) for _ in range(2)]
    expected = average(ring, [tensor.clone() for tensor in inputs], codec)
    results = average(ring, [tensor.cuda() for tensor in inputs], codec)
    assert [torch.equal(result.cpu(), expected[0]) for result in results] == [True, True]


@pytest.mark.gpu
@gpu
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_takes_both_stages_without_waiting_for_the_gpu(
    new_address: Callable[[], str], codec: Codec, dtype: torch.dtype
) -> None:
    # NCCL takes one rank a GPU: a group of one shows that its operations are called rightly.
    group = ProcessGroupNCCL(LONG)
    group.configure(new_address(), "r0", 0, 1, 1)
    tensor = torch.randn(100_003, device="cuda", dtype=dtype)
    before = tensor.float()
    allreduce_quantized(group, tensor.clone(), codec, divisor=1, timeout=LONG)  # connects, allocates
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of GPU time
    busy = torch.cuda.Event()
    busy.record()
    allreduce_quantized(group, tensor, codec, divisor=1, timeout=LONG)
    was_busy = not busy.query()
    torch.cuda.synchronize()
    assert was_busy
    assert group.errored() is None
    assert ((tensor.float() - before).abs() <= before.abs().max() * (2.1 / 28)).all()
    group.shutdown()
