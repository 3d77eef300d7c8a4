"""Whatever ranks hold under one name: who loads gets what some rank held, whole, or a warning or an error that names it.

Trees are random: groups of 1 to 4 ranks in FSDP2, HSDP, tensor parallelism, pipelines, experts and DDP, equal names, other
orders, optimizers with partial state, replicas that drifted, damaged files. The oracle remembers who held what, element by
element, and knows nothing of how it is saved.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.name_twins import Job, State, cut, made, on_mesh
from support.resharding import LONG, Group, imagined_rank, make_transport
from support.thoroughness import by_default
from torch.distributed.tensor import DTensor

from torchft_ckpt.checkpointing.durable.saving.saver import SaveMode
from torchft_ckpt.checkpointing.state import local_state
from torchft_ckpt.checkpointing.state.containers import flattened
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError, RanksDifferError, StateMismatchError

SHAPES = [(3,), (5, 2), (1, 4), (7, 6), (300,), (200, 3)]
LARGE = [(310, 130), (40_000,)]
"""Of more than what is written as a whole by one rank."""
Place = tuple[Sequence[Any] | None, tuple[int | None, ...]]
"""The ranks of a mesh, and what is cut in which of its dimensions; no ranks: a plain tensor."""


@dataclass
class Thing:
    """Something that some ranks of a group hold under a name, which others may have for something else."""

    name: str
    shape: tuple[int, ...]
    team: list[int]
    place: Place
    is_owned: bool = True
    is_each_ranks: bool = False
    """Each rank has other bits in it."""
    drifts: int | None = None


@dataclass
class Tree:
    """What a group of so many ranks holds."""

    num_ranks: int
    kind: str
    is_replicated: bool
    things: list[Thing]
    values: dict[str, list[Any]]
    """By name, of each rank; ... where it has none."""
    arrays: list[str]
    knows_optimizers: bool
    orders: list[int]
    held: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """By name, of each rank: all elements, those that are not there NaN."""


def place_of(dice: random.Random, kind: str, team: list[int], shape: tuple[int, ...]) -> Place:
    """Where a tensor of this shape lies on a team's ranks."""
    last = len(shape) - 1
    if kind == "plain":
        return None, ()
    if kind == "hsdp" and len(team) > 1 and not len(team) % 2:
        return [team[: len(team) // 2], team[len(team) // 2 :]], (None, 0)
    if kind == "tp":
        return team, (dice.choice([0, last, None]),)
    return team, (0,) if dice.random() < 0.9 else (None,)


def random_tree(dice: random.Random) -> Tree:
    num_ranks = dice.choice([1, 2, 2, 3, 4, 4])
    kind = dice.choice(["fsdp", "hsdp", "tp", "ddp", "stages", "stages", "experts"])
    ranks = [*range(num_ranks)]
    teams = [ranks]
    if kind == "stages":
        dice.shuffle(ranks)
        ends = sorted({num_ranks, *(dice.randint(1, num_ranks) for _ in range(dice.randint(0, 3)))})
        if num_ranks == 4 and dice.random() < 0.5:
            ends = [2, 4]  # each of them may have replicas inside
        teams = [sorted(ranks[low:high]) for low, high in itertools.pairwise([0, *ends])]
    elif kind == "experts":
        teams = [[rank] for rank in ranks]
    is_replicated = kind not in ("stages", "experts") or dice.random() < 0.1
    of_kind = {"ddp": ["plain"], "experts": ["plain"], "stages": ["fsdp", "hsdp", "tp", "plain"]}.get(kind, [kind])
    counts_from_0 = dice.random() < 0.7
    shapes = [dice.choice(LARGE if dice.random() < 0.1 else SHAPES) for _ in range(dice.randint(1, 4))]
    things: list[Thing] = []
    for number, team in enumerate(teams):
        style = dice.choice(of_kind)
        for layer, shape in enumerate(shapes if dice.random() < 0.9 else shapes[:1]):
            at = layer if counts_from_0 else number * len(shapes) + layer
            place = place_of(dice, style, team, shape)
            things.append(Thing(f"model.{at}.weight", shape, team, place))
            things += [
                Thing(f"optim.state.{at}.{key}", shape, team, place) for key in ("a", "b") if dice.random() < 0.6
            ]
    for name in ("bn.mean", "bn.large")[: dice.choice([0, 0, 1, 2])]:
        shape = (4,) if name == "bn.mean" else dice.choice(LARGE)
        things.append(Thing(name, shape, [*range(num_ranks)], (None, ()), False, dice.random() < 0.6))
    with_replicas = [
        thing for thing in things if len(thing.team) > 1 and (thing.place[0] is None or None in thing.place[1])
    ]
    if with_replicas and dice.random() < 0.4:
        drifted = dice.choice(with_replicas)
        drifted.drifts = dice.choice(drifted.team)
    values: dict[str, list[Any]] = {"lr": [0.5] * num_ranks, "cursor": [10 + rank for rank in range(num_ranks)]}
    if not is_replicated:
        for owner in range(num_ranks):
            values[f"loader.rank_{owner}"] = [owner if rank == owner else ... for rank in range(num_ranks)]
    arrays = ["seen"] if dice.random() < 0.4 else []
    orders = [dice.randrange(2**31)] * num_ranks
    if dice.random() < 0.2:  # a rank has them in another order than its neighbours: they do not divide them alike
        orders[-1] += 1
    return Tree(num_ranks, kind, is_replicated, things, values, arrays, dice.random() < 0.5, orders)


def nested(flat: dict[str, Any], order: int) -> State:
    """A nested state of these leaves, its keys in some order."""
    names = sorted(flat)
    random.Random(order).shuffle(names)
    state: State = {}
    for name in names:
        *parents, last = name.split(".")
        inner = state
        for parent in parents:
            inner = inner.setdefault(int(parent) if parent.isdigit() else parent, {})
        inner[last] = flat[name]
    return state


def build(tree: Tree) -> tuple[list[State], list[list[torch.optim.Optimizer]]]:
    """The states of all ranks, and their optimizers; the oracle takes down who holds what."""
    for name, shape in {thing.name: thing.shape for thing in tree.things}.items():
        tree.held[name] = [np.full(shape, np.nan) for _ in range(tree.num_ranks)]
    tree.held |= {name: [np.full((3,), 7.0 + rank) for rank in range(tree.num_ranks)] for name in tree.arrays}
    owned: list[list[torch.Tensor]] = [[] for _ in range(tree.num_ranks)]

    def state_of(rank: int) -> State:
        flat: dict[str, Any] = {name: of[rank] for name, of in tree.values.items() if of[rank] is not ...}
        flat |= {name: tree.held[name][rank].copy() for name in tree.arrays}
        for number, thing in enumerate(tree.things):
            if rank not in thing.team:
                continue
            full = torch.arange(float(math.prod(thing.shape))).reshape(thing.shape) + 100_000 * number
            full += 0.5 * (rank if thing.is_each_ranks else rank == thing.drifts)
            ranks, dims = thing.place
            tensor = full if ranks is None else on_mesh(full, rank, ranks, *dims)
            flat[thing.name] = tensor
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            mine = tree.held[thing.name][rank]
            mine.reshape(-1)[indexes(thing.shape, rank, thing.place).reshape(-1)] = local.reshape(-1).numpy()
            if thing.is_owned and local.numel():
                owned[rank].append(local)
        return nested(flat, tree.orders[rank])

    states = made(state_of, tree.num_ranks)
    known = [
        [torch.optim.SGD([*map(torch.nn.Parameter, tensors)], lr=0.1)] if tree.knows_optimizers and tensors else []
        for tensors in owned
    ]
    return states, known


def indexes(shape: tuple[int, ...], rank: int, place: Place) -> np.ndarray:
    """Which elements of a tensor a rank has, in the order of its memory."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    ranks, dims = place
    return (numbers if ranks is None else cut(numbers, rank, ranks, *dims)).numpy().astype(int)


@contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(handler)


def check(seed: int, directory: Path) -> str:
    """Save a random tree and load it on the layout that it had and on another; return in a word how it went."""
    dice = random.Random(seed)
    tree = random_tree(dice)
    states, known = build(tree)
    num_replicas = dice.choice([1, 1, 2])
    job = Job(
        directory,
        tree.num_ranks,
        num_replicas=num_replicas,
        is_replicated=tree.is_replicated,
        mode=dice.choice([*SaveMode]),
    )
    with warnings_of("torchft_ckpt") as said_at_save:
        errors = job.save(states.__getitem__, optimizers_of=known.__getitem__)
    drifted = {} if any(not isinstance(error, RanksDifferError) for error in errors) else job.checkpoint.drifted()
    apart = {thing.name: ranks for thing in tree.things if thing.is_owned and (ranks := apart_in(tree, thing.name))}
    if drifted or not errors:
        hold = {*itertools.chain(*apart.values())}  # a rank without any replica is not told
        assert (len(hold) * num_replicas if tree.knows_optimizers else 0) <= len(errors) <= len(job.members), errors
        assert bool(errors) is (bool(apart) and tree.knows_optimizers)
        assert all(any(name in str(error) for name in apart) for error in errors)
        assert not tree.knows_optimizers or apart.keys() <= drifted.keys()
    else:
        assert all(isinstance(error, CheckpointError) for error in errors), errors
        assert any(name in str(error) for error in errors for name in (*tree.held, *tree.values)), errors
        return "refused at the save"
    assert bool(drifted) is any("do not hold alike" in said for said in said_at_save)
    is_damaged = dice.random() < 0.2
    if is_damaged:
        file = dice.choice(sorted(directory.glob("*/*.distcp")))
        content = bytearray(file.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        file.write_bytes(content)
    outcomes = [*map(_load_again, [tree] * 2, [job] * 2, [dice] * 2, [True, False], [is_damaged] * 2)]
    outcomes += [*map(_receive, [tree] * 2, [states] * 2, [dice] * 2, [True, False])]
    return "; ".join(sorted({*outcomes}))


def is_shared(tree: Tree, place: Place, num_ranks: int) -> bool:
    """Whether ranks of a group say that others hold the same of something, which lies there."""
    ranks, dims = place
    if ranks is None:
        return tree.is_replicated
    return None in dims and (tree.is_replicated or np.size(ranks) == num_ranks)


def apart_in(tree: Tree, name: str) -> set[int]:
    """The ranks that say to hold the same of something as others do, and do not."""
    things = [thing for thing in tree.things if thing.name == name and is_shared(tree, thing.place, tree.num_ranks)]
    ranks = [rank for thing in things for rank in thing.team if len(thing.team) > 1 or thing.place[0] is None]
    held = {rank: tree.held[name][rank].reshape(-1) for rank in ranks}
    return {
        rank
        for rank, other in itertools.permutations(held, 2)
        if np.array_equal(np.isnan(held[rank]), np.isnan(held[other]))
        and not np.array_equal(held[rank], held[other], equal_nan=True)
    }


@dataclass
class Layout:
    """Where a group of so many ranks has what, if they load what another group holds."""

    tree: Tree
    num_ranks: int
    is_same: bool
    order: int
    places: dict[str, Place]

    @classmethod
    def random(cls, tree: Tree, dice: random.Random, is_same: bool) -> Layout:
        num_ranks = tree.num_ranks if is_same else dice.randint(1, 4)
        style = dice.choice(["fsdp", "hsdp", "tp", "plain"])
        places = {
            thing.name: place_of(dice, style, [*range(num_ranks)], thing.shape) if thing.is_owned else (None, ())
            for thing in tree.things
        }
        return cls(tree, num_ranks, is_same, dice.randrange(2**31), places)

    def at(self, rank: int) -> dict[str, Place]:
        things = self.tree.things
        return {thing.name: thing.place for thing in things if rank in thing.team} if self.is_same else self.places

    def empty(self, rank: int) -> State:
        tree = self.tree
        flat: dict[str, Any] = {
            name: None for name, of in tree.values.items() if not self.is_same or of[rank] is not ...
        }
        flat |= {name: np.zeros(3) for name in tree.arrays}
        for name, (ranks, dims) in self.at(rank).items():
            zeros = torch.zeros(held_shape(tree, name))
            flat[name] = zeros if ranks is None else on_mesh(zeros, rank, ranks, *dims)
        return nested(flat, self.order)


def _load_again(tree: Tree, job: Job, dice: random.Random, is_same: bool, is_damaged: bool) -> str:
    here = Layout.random(tree, dice, is_same)
    restores = dice.random() < 0.5
    with warnings_of("torchft_ckpt") as said:
        try:
            loaded = job.load(here.empty, here.num_ranks, restores=restores)
        except CheckpointDamagedError:
            if not is_damaged:
                raise
            return "refused, as it is damaged"
    checkpoint = job.checkpoint
    told = {*checkpoint.several, *checkpoint.drifted()}
    assert not told or any("those who saved it" in one or "do not hold alike" in one for one in said)
    if restores and not is_same and any("it is not restored" in one for one in said):
        told |= LEFT_OUT
    return _compare(here, loaded, told, is_damaged)


LEFT_OUT = {"what is here and is not restored"}


def _receive(tree: Tree, states: list[State], dice: random.Random, is_same: bool) -> str:
    """Receive it from ranks that go on, as a group on another layout that joins them does."""
    here = Layout.random(tree, dice, is_same)
    loaded = []
    receiver = make_transport()
    with (
        Group(states, 1, num_receivers=here.num_ranks) as group,
        warnings_of("torchft_ckpt") as said,
        mock.patch.object(local_state, "_NAMED", 100),
    ):
        try:
            for rank in range(here.num_ranks):
                with imagined_rank(rank, here.num_ranks):
                    state = here.empty(rank)
                    loaded.append(
                        receiver.fetch_sharded([group.urls], rank, here.num_ranks, 1, LONG, local_state=state)
                    )
        except StateMismatchError as error:
            return "refused by a peer" if any(name in str(error) for name in tree.held) else f"WRONG: {error}"
        finally:
            receiver.shutdown()
    words = "".join(one for one in said if "do not hold alike" in one)
    told = {name for name in tree.held if f"{name} (" in words}
    return _compare(here, loaded, told, False)


def _compare(here: Layout, loaded: list[State], told: set[str], is_damaged: bool) -> str:
    """Compare what was loaded with what each rank held; `told` are names of which it was said that they are not one thing."""
    tree = here.tree
    is_told = False
    for rank, state in enumerate(loaded):
        flat, _ = flattened(state)
        mine = tree.num_ranks == here.num_ranks
        for name, place in ({**here.at(rank), **{name: (None, ()) for name in tree.arrays}}).items():
            if name not in flat:
                assert told >= LEFT_OUT, name
                is_told = True
                continue
            got = flat[name]
            assert got is not None, name
            local = got.to_local() if isinstance(got, DTensor) else torch.as_tensor(got)
            held = np.stack(tree.held[name]).reshape(tree.num_ranks, -1)
            at = indexes(held_shape(tree, name), rank, place).reshape(-1)
            is_any = held[:, at] == local.reshape(-1).numpy()
            assert is_any.any(0).all(), f"{name}: rank {rank} got what nobody held"
            if mine and is_any[rank].all():
                continue  # its own
            is_in_shards = place[0] is not None and None not in place[1]
            is_alone = is_in_shards or not (tree.is_replicated or is_shared(tree, place, here.num_ranks))
            assert not (here.is_same and is_alone) or is_damaged, f"{name}: rank {rank} has it all, and got another's"
            differs = ~np.isnan(held[:, at]) & (held[:, at] != np.nanmax(held[:, at], 0, initial=-1))
            if differs.any():
                is_told = True
                assert name in told, f"{name}: rank {rank} got another's, and nobody said so"
        for name, of in tree.values.items():
            if name in flat:
                mine_is_there = mine and of[rank] is not ...
                assert flat[name] == of[rank] if mine_is_there else flat[name] in of, name
    return "mixed, and told" if is_told else "right"


def held_shape(tree: Tree, name: str) -> tuple[int, ...]:
    return tree.held[name][0].shape


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(by_default(24, thorough=300)))
def test_nothing_is_mixed_without_a_word(seed: int, tmp_path: Path) -> None:
    outcome = check(seed, tmp_path)
    print(f"seed {seed}: {outcome}")
    assert "WRONG" not in outcome
