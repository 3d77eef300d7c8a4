"""Plain and quantised allreduces of a step: in one order on all ranks, ended whatever happens, counted until then."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.stores import hosted_store
from torch.distributed import ReduceOp, TCPStore, Work

from torchft_ckpt.core.coordination.sequence import Clearance
from torchft_ckpt.errors import CollectiveFailedError, ProcessGroupAbortedError
from torchft_ckpt.manager.clearing import Clearing, Issued
from torchft_ckpt.manager.collectives import Collectives, ManagedWork
from torchft_ckpt.process_group import ProcessGroup, ProcessGroupDummy, ProcessGroupGloo
from torchft_ckpt.process_group.quantization import FP8, INT8, Codec

LONG = timedelta(seconds=30)
STAGES = ["alltoall_base", "allgather"]


class Cleared(Clearing):
    """Takes every collective for known: what is compared before one starts is not the subject here."""

    def issue(self, *args: Any) -> Issued:
        return dataclasses.replace(super().issue(*args), clearance=Clearance.KNOWN)


class Member:
    """One rank: its group, which notes what is started on it, and the collectives of its manager."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.started: list[str] = []
        self.errors: list[Exception] = []
        self.before: Callable[[str], None] = lambda name: None
        for name in ("allreduce", *STAGES):
            setattr(group, name, self._noted(name, getattr(group, name)))
        self.collectives = Collectives(
            group,
            Cleared(group, name="this group", ask=lambda issued, timeout: None),
            on_error=self.errors.append,
            schedule=lambda delay_s, function: None,
            on_wait=lambda issued: None,
        )

    def _noted(self, name: str, operation: Callable[..., Work]) -> Callable[..., Work]:
        def start(*arguments: object) -> Work:
            self.before(name)
            self.started.append(name)
            return operation(*arguments)

        return start

    def allreduce(self, tensor: torch.Tensor, codec: Codec | None = None, timeout: timedelta = LONG) -> ManagedWork:
        return self.collectives.allreduce(
            tensor,
            op=ReduceOp.SUM,
            divisor=self.group.size(),
            timeout=timeout,
            failed=lambda: bool(self.errors),
            way=codec,
        )


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return hosted_store()


@pytest.fixture(params=["gloo", "fake"])
def connect(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[Callable[[int], list[Member]]]:
    groups: list[ProcessGroup] = []
    numbers = itertools.count()

    def make(num_ranks: int) -> list[Member]:
        fabric = FakeFabric()
        members: list[ProcessGroup] = [
            ProcessGroupGloo(LONG) if request.param == "gloo" else FakeProcessGroup(fabric, LONG)
            for _ in range(num_ranks)
        ]
        groups.extend(members)
        address = f"127.0.0.1:{store.port}/{request.node.name}/{next(numbers)}"
        with ThreadPoolExecutor(num_ranks) as pool:
            list(pool.map(lambda r: members[r].configure(address, f"r{r}", r, num_ranks, 1), range(num_ranks)))
        return [Member(member) for member in members]

    yield make
    for group in groups:
        group.shutdown()


def expected_of(program: list[Codec | None]) -> list[str]:
    return [name for codec in program for name in (["allreduce"] if codec is None else STAGES)]


def test_a_slow_rank_and_a_fast_one_start_the_same_collectives_in_the_same_order(
    connect: Callable[[int], list[Member]],
) -> None:
    slow, fast = connect(2)
    program = [INT8, None, INT8, FP8, None, None, INT8]
    tensors = [[torch.full((600,), 127.0 * (rank + index)) for index in range(len(program))] for rank in range(2)]

    def one_by_one() -> None:  # so that nothing is ahead of a plain one when it is called
        for tensor, codec in zip(tensors[0], program, strict=True):
            assert slow.allreduce(tensor, codec).wait()

    thread = threading.Thread(target=one_by_one)
    thread.start()
    for work in [fast.allreduce(tensor, codec) for tensor, codec in zip(tensors[1], program, strict=True)]:
        assert work.wait()
    thread.join(30)
    assert slow.started == fast.started == expected_of(program)
    means = [127.0 * (index + 0.5) for index in range(len(program))]
    assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    assert [tensor.mean().item() for tensor in tensors[0]] == pytest.approx(means, rel=1e-3)


def test_what_is_called_while_a_quantised_one_is_between_its_stages_waits_for_it(
    connect: Callable[[int], list[Member]],
) -> None:
    first, second = connect(2)
    is_between, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "allgather":
            is_between.set()
            assert go_on.wait(120)

    first.before = hold
    program = [INT8, None, INT8]
    works = [member.allreduce(torch.ones(10), codec) for codec in program for member in (first, second)]
    assert is_between.wait(120)
    assert first.started == ["alltoall_base"]
    assert [work.get_future().done() for work in works] == [False] * 6
    go_on.set()
    assert [work.wait() for work in works] == [True] * 6
    assert first.started == second.started == expected_of(program)


def test_random_programs_meet_whatever_each_rank_waits_for(connect: Callable[[int], list[Member]]) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    members = connect(3)
    program = [rng.choice([None, None, INT8, FP8]) for _ in range(40)]
    sizes = [rng.randrange(1, 3000) for _ in program]
    waits = [[rng.random() < 0.3 for _ in program] for _ in members]
    results: list[list[torch.Tensor]] = [[] for _ in members]

    def run(rank: int) -> None:
        works = []
        for index, codec in enumerate(program):
            tensor = torch.full((sizes[index],), float(index))  # all give the same: the mean is near it
            results[rank].append(tensor)
            works.append(members[rank].allreduce(tensor, codec))
            if waits[rank][index]:
                works[rng.randrange(len(works))].wait()
        members[rank].collectives.wait_all()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    assert [member.errors for member in members] == [[], [], []]
    assert [member.started for member in members] == [expected_of(program)] * 3
    for index, tensors in enumerate(zip(*results, strict=True)):
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        assert tensors[0].tolist() == pytest.approx([index] * sizes[index], rel=1e-5)


def test_a_call_returns_before_the_others_have_made_theirs(connect: Callable[[int], list[Member]]) -> None:
    first, second = connect(2)
    tensors = [torch.zeros(3), torch.full((3,), 254.0)]
    work = first.allreduce(tensors[0], INT8)
    assert first.collectives.has_open()
    second.allreduce(tensors[1], INT8)
    assert work.get_future().wait() is tensors[0]
    assert tensors[0].tolist() == [127.0] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_at_either_stage_is_noted_and_ends_what_queues_behind(
    connect: Callable[[int], list[Member]], stage: str
) -> None:
    first, second = connect(2)
    is_there, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == stage:
            is_there.set()
            assert go_on.wait(120)

    second.before = hold
    program = [INT8, None, FP8, None]
    works = {member: [member.allreduce(torch.ones(9), codec) for codec in program] for member in (first, second)}
    assert is_there.wait(120)
    first.group.abort()
    assert [work.wait() for work in works[first]] == [False] * 4
    go_on.set()
    assert [work.wait() for work in works[second]] == [False] * 4
    assert {type(error) for error in first.errors} == {ProcessGroupAbortedError}
    assert {type(error) for error in second.errors} == {CollectiveFailedError}
    first.collectives.wait_all()
    second.collectives.wait_all()
    assert [member.collectives._num_unfinished for member in (first, second)] == [0, 0]


def test_who_never_comes_is_waited_for_until_the_timeout(connect: Callable[[int], list[Member]]) -> None:
    first, _ = connect(2)
    first.group.set_timeout(timedelta(seconds=0.1))
    work = first.allreduce(torch.ones(4), INT8, timedelta(seconds=0.1))
    assert not work.wait()
    assert [type(error) for error in first.errors] == [CollectiveFailedError]


def test_a_rank_that_fails_on_its_own_ends_it_for_the_others_at_once(connect: Callable[[int], list[Member]]) -> None:
    first, second = connect(2)

    def fail(name: str) -> None:
        if name == "allgather":
            raise MemoryError("no memory for the rest")

    second.before = fail
    works = [member.allreduce(torch.ones(4), INT8) for member in (first, second)]
    assert [work.wait() for work in works] == [False, False]
    assert [type(error) for error in second.errors] == [MemoryError]
    assert [type(error) for error in first.errors] == [CollectiveFailedError]


def test_an_error_and_a_later_connection_do_not_disturb_the_lane(connect: Callable[[int], list[Member]]) -> None:
    first, second = connect(2)
    first.group.abort()
    assert [member.allreduce(torch.ones(4), INT8).wait() for member in (first, second)] == [False, False]
    again = connect(2)
    first.collectives._process_group, second.collectives._process_group = again[0].group, again[1].group
    first.errors.clear()
    second.errors.clear()
    works = [member.allreduce(torch.full((4,), 127.0), INT8) for member in (first, second)]
    assert [work.wait() for work in works] == [True, True]


def test_it_is_unfinished_until_its_last_stage(connect: Callable[[int], list[Member]]) -> None:
    first, second = connect(2)
    first.collectives.begin_step(is_new_quorum=False)
    work = first.allreduce(torch.ones(4), INT8)
    assert first.collectives._num_unfinished == 1
    second.allreduce(torch.ones(4), INT8)
    assert work.wait()
    assert first.collectives._num_unfinished == 0


@pytest.mark.parametrize("codec", [INT8, FP8], ids=lambda codec: codec.name)
def test_in_a_group_of_one_nothing_is_rounded(codec: Codec) -> None:
    member = Member(ProcessGroupDummy(0, 1))
    tensor = torch.tensor([127.0, 0.3, float("inf")])
    assert member.allreduce(tensor, codec).wait()
    assert tensor.view(torch.int32).tolist() == torch.tensor([127.0, 0.3, float("inf")]).view(torch.int32).tolist()


def test_the_thread_is_gone_when_there_is_nothing_to_do(connect: Callable[[int], list[Member]]) -> None:
    members = connect(2)
    for work in [member.allreduce(torch.ones(4), INT8) for member in members]:
        assert work.wait()
    for thread in threading.enumerate():
        if thread.name == "torchft_ckpt-collectives":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_starts_after_what_the_callers_stream_was_given_and_is_waited_for_there(store: TCPStore) -> None:
    groups = [ProcessGroupGloo(LONG) for _ in range(2)]
    address = f"127.0.0.1:{store.port}/gpu"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda r: groups[r].configure(address, f"r{r}", r, 2, 1), range(2)))
    members = [Member(group) for group in groups]
    stream = torch.cuda.Stream()
    program = [INT8, None, FP8, None]
    with torch.cuda.stream(stream):
        tensors = [[torch.zeros(10_000, device="cuda") for _ in program] for _ in members]
        torch.cuda._sleep(500_000_000)
        for rank, index in itertools.product(range(2), range(len(program))):
            tensors[rank][index].add_(127.0 * (rank + index))
        works = [
            member.allreduce(tensor, codec)
            for member, given in zip(members, tensors, strict=True)
            for tensor, codec in zip(given, program, strict=True)
        ]
        assert [work.wait() for work in works] == [True] * 8
        doubled = [[tensor * 2 for tensor in given] for given in tensors]
    stream.synchronize()
    assert [member.started for member in members] == [expected_of(program)] * 2
    means = [[tensor.mean().item() for tensor in given] for given in doubled]
    assert means[0] == means[1] == pytest.approx([254.0 * (index + 0.5) for index in range(4)], rel=1e-3)
    for group in groups:
        group.shutdown()
