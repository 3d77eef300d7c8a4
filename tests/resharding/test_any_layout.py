"""A state comes from any layout onto any other one: every wanted element arrives exactly once, with the right bits.

Meshes, placements, shapes and dtypes are random on both sides. Most cases move bytes by hand, from the memory of imagined
ranks, and check each part and each rank that is said to hold it; some go over real transports.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from support.resharding import (
    LONG,
    PLAIN,
    Group,
    Layout,
    Model,
    bits,
    imagined_rank,
    lookup,
    make_transport,
    overwrite,
    same_bits,
)
from support.thoroughness import by_default

from torchft_ckpt.checkpointing.fetching import streams
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.protocol import BoxRequest
from torchft_ckpt.checkpointing.resharding import plan as plan_module
from torchft_ckpt.checkpointing.resharding.plan import Plan, SourceGroup, plan_parts
from torchft_ckpt.checkpointing.serving import sending as sending_module
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.sending import regions_of
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.state.blocks import digest_of, start_blake3
from torchft_ckpt.checkpointing.state.local_state import LocalState
from torchft_ckpt.checkpointing.state.regions import gather, scatter, slices
from torchft_ckpt.checkpointing.state.space import memory_at
from torchft_ckpt.checkpointing.state.target import StateTarget, Want
from torchft_ckpt.core.boxes.geometry import Box

STEP = 7


class Imagined:
    """A source group without sockets: the snapshots of its ranks."""

    def __init__(self, number: int, states: Sequence[object]) -> None:
        self.snapshots = {
            f"group {number} rank {rank}": Snapshot(
                state, step=STEP, lock=StateDictLock(), pool=BufferPool(4096), num_expected=1
            )
            for rank, state in enumerate(states)
        }
        self.group = SourceGroup(list(self.snapshots), [snapshot.manifest for snapshot in self.snapshots.values()])


def index(box: Box) -> tuple[object, ...]:
    return (*(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)), ...)


def check_each_element_is_had_once(wants: Sequence[Want], plan: Plan, shapes: dict[str, torch.Size]) -> None:
    """By counting every element of every global tensor."""
    wanted = {want.name: torch.zeros(shapes[want.name], dtype=torch.int16) for want in wants}
    arriving = {name: torch.zeros_like(counts) for name, counts in wanted.items()}
    for want in wants:
        wanted[want.name][index(want.box)] += 1
    for part in plan.parts:
        arriving[part.name][index(part.box)] += 1
    for name, counts in wanted.items():
        assert torch.equal(counts, arriving[name]), name
        assert counts.numel() == 0 or int(counts.max()) <= 1, f"{name} is asked for twice"


def bytes_at(snapshot: Snapshot, part: BoxRequest) -> memoryview:
    (region,) = regions_of(snapshot.manifest, [part])
    out = memoryview(bytearray(region.num_bytes))
    gather(memoryview(snapshot.read(region.start, region.stop)), region, out)
    return out


def move(plan: Plan, groups: Sequence[Imagined], fulls: dict[str, torch.Tensor], chance: random.Random) -> None:
    """Copy each part from one of the ranks that hold it, having looked at what every one of them would send."""
    snapshots = {name: snapshot for group in groups for name, snapshot in group.snapshots.items()}
    for number, planned in enumerate(plan.parts):
        expected = bytes(bits(fulls[planned.name][index(planned.box)]).numpy())
        sent = {}
        for name, places in plan.holders.items():
            if number in places:
                place = places[number]
                assert list(snapshots)[list(snapshots).index(name)].endswith(f"rank {place.rank}")
                offsets, sizes = list(planned.box.offsets), list(planned.box.sizes)
                asked = BoxRequest(tensor=place.tensor, chunk=place.chunk, seed=number, offsets=offsets, sizes=sizes)
                sent[name] = bytes_at(snapshots[name], asked)
                assert bytes(sent[name]) == expected, f"{name} holds other bits of {planned.name} {planned.box}"
        data = sent[chance.choice(sorted(sent))]
        for piece in slices(planned.region, chance.choice([16, 64, 4096]), 1 << 62):
            memory = memory_at(planned.target.data_ptr() + piece.start, piece.stop - piece.start)
            scatter(data[: piece.num_bytes], memory, piece)
            data = data[piece.num_bytes :]
        assert not data


def test_small_parts_that_lie_side_by_side_are_read_together_and_each_has_its_own_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a thousand small replicas, each was read by itself, which cost ten times as much as to digest it."""
    dice = random.Random(3)
    state = {str(number): torch.randn(dice.randint(1, 60), 3) for number in range(200)}
    snapshot = Imagined(0, [state]).snapshots["group 0 rank 0"]
    asked = [
        BoxRequest(tensor=number, chunk=0, seed=0, offsets=[0, 0], sizes=[*entry.shape])
        for number, entry in enumerate(snapshot.manifest.tensors)
    ]
    columns = [BoxRequest(tensor=n, chunk=0, seed=0, offsets=[0, 1], sizes=[asked[n].sizes[0], 1]) for n in range(5)]
    mixed = [*asked[:50], *columns, *asked[50:], asked[7], asked[7], *dice.sample(asked, 20)]
    lent = mock.Mock(wraps=snapshot.lend)
    monkeypatch.setattr(snapshot, "lend", lent)
    for slice_bytes in (100, 4096, sending_module.SLICE_BYTES):
        monkeypatch.setattr(sending_module, "SLICE_BYTES", slice_bytes)
        lent.reset_mock()
        regions = regions_of(snapshot.manifest, mixed)
        digests = [digest for digest in sending_module.digest_parts(snapshot, regions) if digest is not None]
        num_lent = lent.call_count
        expected = [start_blake3() for _ in mixed]
        for hasher, part in zip(expected, mixed, strict=True):
            hasher.update(bytes_at(snapshot, part))
        assert digests == [hasher.digest() for hasher in expected]
        lent.reset_mock()
        body, sent = sending_module.body_of_parts(snapshot, regions, range(len(mixed))), bytearray()
        while not body.done:
            body.advance(lambda views, sent=sent: (sent.extend(views[0][:70]), min(len(views[0]), 70))[1])  # type: ignore[misc]
        parts = [bytes(bytes_at(snapshot, part)) for part in mixed]
        assert sent == b"".join(data + digest_of(seed, data) for seed, data in enumerate(parts))
    assert max(num_lent, lent.call_count - len(mixed)) < 40, (
        "but for what is asked for out of its order it is one slice"
    )


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, by_default(20, thorough=60), 10))
def test_every_wanted_element_arrives_exactly_once(first_seed, monkeypatch):
    """Models of some 30 tensors, each received by some ranks of another layout."""
    for seed in range(first_seed, first_seed + 10):
        print("seed", seed)
        chance = random.Random(seed)
        monkeypatch.setattr(plan_module, "PART_BYTES", chance.choice([16, 48, 256, 1 << 22]))
        model = Model.random(chance, 20)
        groups = []
        for number in range(chance.choice([1, 1, 2, 3])):
            world_size = chance.randint(1, 8)
            groups.append(Imagined(number, model.states(model.layouts(chance, world_size), world_size)))
        world_size = chance.randint(1, 8)
        layouts = model.layouts(chance, world_size)
        for rank in chance.sample(range(world_size), min(world_size, 2)):
            in_place = chance.random() < 0.5
            with imagined_rank(rank, world_size):
                local = model.state(layouts, rank, lr=0.1)
            overwrite(local)
            target = StateTarget(LocalState(local), in_place=in_place)
            wants = target.wants(groups[0].group.description(rank))
            plan = plan_parts(wants, [group.group for group in groups])
            shapes = {path: full.shape for path, full in model.fulls.items()}
            shapes |= {path: shapes[other] for path, other in model.tied.items()}
            check_each_element_is_had_once(wants, plan, shapes)
            num_bytes = sum(part.region.num_bytes for part in plan.parts)
            assert num_bytes == model.num_bytes(layouts, rank), "a byte more or less than needed"
            fulls = model.fulls | {path: model.fulls[other] for path, other in model.tied.items()}
            move(plan, groups, fulls, chance)
            received = target.finish(groups[0].group.description(rank))
            assert model.wrong(received, layouts, rank) == []
            assert received["optim"]["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0]}]
            if in_place:
                assert model.wrong(local, layouts, rank) == []
                assert all(lookup(received, path) is lookup(local, path) for path in fulls)


@pytest.mark.parametrize("seed", range(by_default(8, thorough=24)))
def test_a_state_comes_over_real_transports_onto_another_layout(seed, monkeypatch):
    print("seed", seed)
    chance = random.Random(1000 + seed)
    monkeypatch.setattr(plan_module, "PART_BYTES", chance.choice([64, 512, 1 << 22]))
    slice_bytes = chance.choice([64, 1 << 20])
    for module in (streams, plan_module):
        monkeypatch.setattr(module, "SLICE_BYTES", slice_bytes)
    slice_bytes = chance.choice([64, 1 << 20])
    monkeypatch.setattr(sending_module, "SLICE_BYTES", slice_bytes)
    model = Model.random(chance, 15)
    groups = []
    for _ in range(chance.choice([1, 2])):
        world_size = chance.randint(1, 4)
        groups.append(Group(model.states(model.layouts(chance, world_size), world_size), STEP))
    world_size = chance.randint(1, 4)
    layouts = model.layouts(chance, world_size)
    receiver = make_transport()
    try:
        for rank in chance.sample(range(world_size), min(world_size, 2)):
            in_place = chance.random() < 0.5
            seen: list[TransferProgress] = []
            with imagined_rank(rank, world_size):
                local = model.state(layouts, rank, lr=0.1)
            overwrite(local)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                received = receiver.fetch_sharded(
                    [group.urls for group in groups],
                    rank,
                    world_size,
                    STEP,
                    LONG,
                    local_state=local,
                    in_place=in_place,
                    on_progress=seen.append,
                )
            assert model.wrong(received, layouts, rank) == []
            needed = model.num_bytes(layouts, rank)
            last = seen[-1]
            assert (last.received_bytes, last.total_bytes, last.resent_bytes) == (needed, needed, 0)
            assert received["optim"]["param_groups"][0]["lr"] == 0.5
            assert not in_place or model.wrong(local, layouts, rank) == []
    finally:
        receiver.shutdown()
        for group in groups:
            group.__exit__()


def test_from_one_plain_process_to_shards_and_back():
    """DDP to FSDP and back; the last state has every bit of the first."""
    chance = random.Random(3)
    model = Model.random(chance, 12)
    sharded = {
        path: Layout((4,), ((0, full.dim() - 1),)) if full.dim() else Layout((4,)) for path, full in model.fulls.items()
    }
    with Group(model.states(dict.fromkeys(model.fulls, PLAIN), 1), STEP) as plain_group:
        states = [receive(model, sharded, rank, 4, plain_group) for rank in range(4)]
    assert [model.wrong(state, sharded, rank) for rank, state in enumerate(states)] == [[]] * 4
    with Group(states, STEP) as group:
        back = receive(model, dict.fromkeys(model.fulls, PLAIN), 0, 1, group)
    assert model.wrong(back, dict.fromkeys(model.fulls, PLAIN), 0) == []


def receive(model: Model, layouts: dict[str, Layout], rank: int, world_size: int, group: Group) -> dict[str, object]:
    receiver = make_transport()
    try:
        with imagined_rank(rank, world_size):
            local = model.state(layouts, rank)
            overwrite(local)
            return receiver.fetch_sharded([group.urls], rank, world_size, STEP, LONG, local_state=local)
    finally:
        receiver.shutdown()


def test_a_received_state_is_the_receivers_own():
    model = Model({"model.w": torch.arange(24.0).view(6, 4)}, {})
    layouts = {"model.w": Layout((2,), ((0, 0),))}
    with Group(model.states({"model.w": PLAIN}, 1), STEP) as group:
        received = receive(model, layouts, 1, 2, group)
        lookup(received, "model.w").to_local().zero_()
        assert same_bits(group.states[0]["model"]["w"], model.fulls["model.w"])


@pytest.mark.parametrize("in_place", [False, True])
def test_local_memory_of_any_strides_is_received_into(in_place):
    """A transposed tensor, a column of one, a conjugated and an expanded view."""
    full = torch.arange(24.0).view(6, 4)
    value = torch.tensor([1 + 2j, 3 - 4j, 5 + 0j])
    source = {
        "t": full.clone(),
        "column": full[:, 1].clone(),
        "conj": value.clone(),
        "conj_there": value.clone().conj(),
    }
    local = {
        "t": torch.zeros(4, 6).t(),
        "column": torch.zeros(6, 4)[:, 2],
        "conj": torch.zeros(3, dtype=torch.complex64).conj(),
        "conj_there": torch.zeros(3, dtype=torch.complex64),
    }
    receiver = make_transport()
    with Group([source], STEP) as group:
        received = receiver.fetch_sharded([group.urls], 0, 1, STEP, LONG, local_state=local, in_place=in_place)
    receiver.shutdown()
    for state in (received, local) if in_place else (received,):
        assert [name for name in source if not same_bits(state[name], source[name])] == []


def test_what_is_not_a_tensor_comes_from_the_rank_of_the_same_number():
    states = [{"w": torch.ones(2), "who": rank, "array": torch.arange(3).numpy()} for rank in range(3)]
    receiver = make_transport()
    with Group(states, STEP) as group:
        found = [
            receiver.fetch_sharded(
                [group.urls],
                rank,
                5,
                STEP,
                LONG,
                local_state={"w": torch.zeros(2), "who": 9, "array": torch.zeros(3).long().numpy()},
            )
            for rank in range(5)
        ]
    receiver.shutdown()
    assert [state["who"] for state in found] == [0, 1, 2, 0, 1]
    assert [state["array"].tolist() for state in found] == [[0, 1, 2]] * 5


def test_optimizer_state_that_is_not_here_yet_comes_whole():
    """It is made by the first step: the source has it, the receiver has not."""
    source = {
        "optim": {"state": {0: {"exp_avg": torch.arange(6.0)}}, "param_groups": [{"lr": 1.0}]},
        "w": torch.ones(2),
    }
    local = {"optim": {"state": {}, "param_groups": [{"lr": 0.0}]}, "w": torch.zeros(2)}
    receiver = make_transport()
    with Group([source], STEP) as group:
        received = receiver.fetch_sharded([group.urls], 0, 1, STEP, LONG, local_state=local, in_place=True)
        local["optim"]["state"] = {0: {"exp_avg": torch.zeros(6)}}
        source_without = {"optim": {"state": {}, "param_groups": [{"lr": 2.0}]}, "w": torch.ones(2)}
        with Group([source_without], STEP) as other:
            fresh = receiver.fetch_sharded([other.urls], 0, 1, STEP, LONG, local_state=local, in_place=True)
    receiver.shutdown()
    assert torch.equal(received["optim"]["state"][0]["exp_avg"], torch.arange(6.0))
    assert fresh["optim"] == {"state": {}, "param_groups": [{"lr": 2.0}]}
