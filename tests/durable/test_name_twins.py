"""One name for several things: what each rank, stage and expert saves under it comes back to it on the same ranks."""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from support.name_twins import Job, State, StateOf, local, made, on_mesh
from support.reading_ranks import Group, Member
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointer import Checkpointer
from torchft_ckpt.checkpointing.durable.format.manifest import encode_part, replicas_of, with_replicas
from torchft_ckpt.checkpointing.durable.reading.checkpoint import Checkpoint, SavedPart
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.durable.saving import capture
from torchft_ckpt.checkpointing.durable.saving.holdings import HoldingsIndex, Layout
from torchft_ckpt.checkpointing.durable.saving.saver import SaveMode
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.state import samples
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, whole
from torchft_ckpt.errors import RanksDifferError, StorageError
from torchft_ckpt.manager.saving import SaveIdentity
from torchft_ckpt.manager.volatile import capture_for_save


def empty(state_of: StateOf) -> StateOf:
    """The same state with zeros in it."""

    def zeroed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                return value.zero_()
        if isinstance(value, dict):
            return {key: zeroed(item) for key, item in value.items()}
        return None if isinstance(value, (int, float)) else value

    return lambda rank: zeroed(state_of(rank))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return local(value) if isinstance(value, torch.Tensor) else value


def stages(*teams: list[int], size: int = 6) -> StateOf:
    """Stages of a pipeline, each on a mesh of its own, whose optimizers count their parameters from 0."""

    def state_of(rank: int) -> State:
        (stage,) = (number for number, team in enumerate(teams) if rank in team)
        full = torch.arange(float(size)) + 100 * stage
        return {
            "optim": {
                "state": {0: {"exp_avg": on_mesh(full, rank, teams[stage], 0), "step": torch.tensor(stage + 1.0)}},
                "param_groups": [{"lr": 0.1 * stage, "params": [0]}],
            },
            f"layer{stage}": {"weight": on_mesh(full + 1000, rank, teams[stage], 0)},
        }

    return state_of


def experts(rank: int) -> State:
    """Experts that each rank counts from 0."""
    return {"experts": {"0.weight": torch.full((3,), 100.0 + rank)}, "seen": 10 + rank}


def statistics(rank: int) -> State:
    """FSDP2 with BatchNorm: parameters in shards, plain statistics and a random state of each rank."""
    return {
        "linear": on_mesh(torch.arange(8.0), rank, range(2), 0),
        "mean": torch.full((5,), 10.0 + rank),
        "rng": torch.tensor([rank, 7], dtype=torch.uint8),
    }


def guard(*states: State) -> list[torch.optim.Optimizer]:
    """An optimizer that owns something else than all of the state."""
    return [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)]


@pytest.mark.parametrize("mode", [*SaveMode])
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("teams", [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 3], [1, 2]], [[0], [1], [2], [3]]])
def test_each_stage_of_a_pipeline_gets_its_own_state_back(
    tmp_path: Path, teams: list[list[int]], num_replicas: int, restores: bool, mode: SaveMode
) -> None:
    """Stage 1 once got the moments of stage 0, because both call them 0."""
    job = Job(tmp_path, 4, num_replicas=num_replicas, is_replicated=False, mode=mode)
    assert not job.save(stages(*teams))
    loaded = job.load(empty(stages(*teams)), restores=restores)
    assert [plain(state) for state in loaded] == [plain(was) for was in made(stages(*teams), 4)]


def replicated_inside(kind: str, owners: dict[int, list[torch.optim.Optimizer]] | None = None) -> StateOf:
    """Stages of TP x 2, stages of HSDP 2 x 2, or experts by local number with two copies each: one name on meshes apart.

    `owners`: where the optimizer of each rank goes to.
    """
    meshes: dict[str, list[Any]] = {
        "tp": [[0, 1], [2, 3]],
        "hsdp": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        "experts": [[0, 2], [1, 3]],
    }

    def state_of(rank: int) -> State:
        (stage,) = (at for at, mesh in enumerate(meshes[kind]) if (torch.tensor(mesh) == rank).any())
        mesh, state = meshes[kind][stage], {}
        for number, dims in enumerate({"tp": [(0,), (None,)], "hsdp": [(None, 0)], "experts": [(None,)]}[kind]):
            weight = on_mesh(torch.arange(8.0) + 100 * stage, rank, mesh, *dims)
            moment = on_mesh(torch.arange(8.0) + 1000 * (stage + 1), rank, mesh, *dims)
            state |= {f"layer{0 if kind == 'experts' else stage}.{number}": weight, f"optim.{number}": moment}
        if owners is not None:
            held = [torch.nn.Parameter(one.to_local()) for one in state.values()]
            owners[rank] = [torch.optim.SGD(held, lr=0.1)]
        return state

    return state_of


@pytest.mark.parametrize("mode", [*SaveMode])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", ["tp", "hsdp", "experts"])
def test_stages_and_experts_that_have_copies_of_one_name_inside_get_each_its_own(
    tmp_path: Path, kind: str, num_replicas: int, mode: SaveMode, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 of stage 0 and rank 1 of stage 1 once wrote half of a norm's moments each."""
    num_ranks = 8 if kind == "hsdp" else 4
    owners: dict[int, list[torch.optim.Optimizer]] = {}
    states = made(replicated_inside(kind, owners), num_ranks)
    job = Job(tmp_path, num_ranks, num_replicas=num_replicas, is_replicated=False, mode=mode)
    assert not job.save(states.__getitem__, optimizers_of=owners.__getitem__)
    for restores in (False, True):
        loaded = job.load(empty(replicated_inside(kind)), restores=restores)
        assert [plain(state) for state in loaded] == [plain(state) for state in states]
    assert not job.save(loaded.__getitem__, optimizers_of=owners.__getitem__), "saved again"
    assert "do not hold alike" not in caplog.text
    names = {name for state in states for name in state}
    for fewer in (1, 2):
        caplog.clear()
        for state in job.load(lambda _: {name: torch.zeros(8) for name in names}, fewer):
            assert {name: one[0] for name, one in plain(state).items() if "optim" in name} == {
                name: 1000.0 for name in names if "optim" in name
            }, "stage 0's"
            assert all(one == [one[0] + more for more in range(8)] for one in plain(state).values()), "of one stage"
        assert caplog.text.count("all others get the first copies (rank 0 of replica 0") == fewer


@pytest.mark.parametrize("kind", ["tp", "hsdp", "experts"])
def test_stages_that_are_said_to_be_replicated_are_told_what_to_say_instead(tmp_path: Path, kind: str) -> None:
    num_ranks = 8 if kind == "hsdp" else 4
    owners: dict[int, list[torch.optim.Optimizer]] = {}
    states = made(replicated_inside(kind, owners), num_ranks)
    errors = Job(tmp_path, num_ranks).save(states.__getitem__, optimizers_of=owners.__getitem__)
    told = "else of this name (stages of a pipeline, experts by local number), save it with is_replicated=False"
    assert len(errors) == num_ranks
    assert all(isinstance(error, RanksDifferError) and told in str(error) for error in errors)


@pytest.mark.parametrize("restores", [False, True])
def test_experts_by_local_number_are_each_ranks_own(
    tmp_path: Path, restores: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, 2, is_replicated=False)
    assert not job.save(experts)
    loaded = job.load(empty(experts), restores=restores)
    assert [plain(state) for state in loaded] == [plain(experts(rank)) for rank in range(2)]
    with caplog.at_level(logging.WARNING):
        (alone,) = job.load(empty(experts), 1, restores=restores)
    assert plain(alone) == plain(experts(0)), "on another layout it is the first rank's, and nobody is refused"
    assert "did not hold the same bytes of experts.0.weight" in caplog.text
    assert "all others get the first copies (rank 0 of replica 0)" in caplog.text, "it says whose"


def test_who_looks_or_exports_is_told_whose_copies_differ_and_gets_the_first_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not Job(tmp_path, 2, is_replicated=False).save(experts)
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert "did not hold the same bytes of experts.0.weight" in capsys.readouterr().out
    assert main(["checkpoints", "export", str(tmp_path), "-o", str(tmp_path / "state.safetensors")]) == 0
    assert "left out: all but the first copies: those who saved it did not hold" in capsys.readouterr().err
    assert load_file(tmp_path / "state.safetensors")["experts.0.weight"].tolist() == [100.0] * 3


def test_names_by_parameter_make_a_whole_checkpoint_that_any_layout_reads(tmp_path: Path) -> None:
    """As torchtitan has them (`flatten_optimizer_state_dict`): no rank knows the names of the others."""

    def state_of(*teams: list[int]) -> StateOf:
        def of_rank(rank: int) -> State:
            state: State = {"optim": {}, "loader": {f"dp_rank_{rank}": rank}}
            for stage in range(2):
                team = teams[stage % len(teams)]
                if rank in team:
                    full = torch.arange(6.0) + 100 * stage
                    state["optim"][f"state.layer{stage}.exp_avg"] = on_mesh(full, rank, team, 0)
                    state["optim"][f"param_groups.layer{stage}.lr"] = 0.1 * (stage + 1)
            return state

        return of_rank

    job = Job(tmp_path, 4, num_replicas=2, is_replicated=False)
    assert not job.save(state_of([0, 1], [2, 3]))
    two = empty(state_of([0, 1]))
    loaded = job.load(lambda rank: {"optim": two(rank)["optim"]}, 2)
    assert loaded[1]["optim"]["param_groups.layer1.lr"] == 0.2
    assert local(loaded[1]["optim"]["state.layer1.exp_avg"]) == [103.0, 104.0, 105.0]
    name = str(job.checkpoint.name)
    here = {"optim": {"param_groups.layer1.lr": None}, "loader": {f"dp_rank_{rank}": None for rank in range(4)}}
    dcp.load(here, checkpoint_id=tmp_path / name, no_dist=True)
    assert here == {"optim": {"param_groups.layer1.lr": 0.2}, "loader": {f"dp_rank_{rank}": rank for rank in range(4)}}


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_statistics_and_random_state_come_back_to_their_rank_or_all_of_them_from_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restores: bool, num_replicas: int
) -> None:
    job = Job(tmp_path, 2, num_replicas=num_replicas)
    assert not job.save(statistics, guard())
    loaded = job.load(empty(statistics), restores=restores)
    assert [plain(state) for state in loaded] == [plain(was) for was in made(statistics, 2)]

    def alone(rank: int) -> State:
        return {**statistics(0), "linear": torch.zeros(8)}

    with caplog.at_level(logging.WARNING):
        (state,) = job.load(empty(alone), 1, restores=restores)
    assert plain(state) == {**plain(statistics_of_first()), "linear": [*range(8)]}
    assert "did not hold the same bytes of mean; rng; in groups of 2 ranks" in caplog.text


def statistics_of_first() -> State:
    return {"mean": torch.full((5,), 10.0), "rng": torch.tensor([0, 7], dtype=torch.uint8)}


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_large_or_owned_or_of_nobody_knows_whom_is_written_once(tmp_path: Path, is_known: bool) -> None:
    large = torch.ones(40_000)
    weight = torch.nn.Parameter(torch.ones(300))

    def state_of(rank: int) -> State:
        return {"large": large, "weight": weight} | ({} if is_known else {"small": torch.ones(300)})

    job = Job(tmp_path, 2)
    assert not job.save(state_of, [torch.optim.SGD([weight], lr=0.1)] if is_known else [])
    written = {
        name: sum(piece.box.volume for piece in tensor.pieces) for name, tensor in job.checkpoint.tensors.items()
    }
    assert written == {name: tensor.numel() for name, tensor in state_of(0).items()}


def test_a_save_is_whole_if_ranks_do_not_agree_on_what_their_optimizers_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with an optimizer that each rank has a part of."""
    weights = [torch.nn.Parameter(torch.full((size,), float(size))) for size in (30_000, 20_000, 9_000, 100, 7)]

    def state_of(rank: int) -> State:
        return {str(number): weight for number, weight in enumerate(weights)}

    job = Job(tmp_path, 3)
    owned = {rank: [torch.optim.SGD(weights[rank::3], lr=0.1)] for rank in range(3)}
    assert not job.save(state_of, optimizers_of=owned.__getitem__)
    zeros: StateOf = lambda rank: {name: torch.zeros(weight.shape) for name, weight in state_of(rank).items()}  # noqa: E731
    for num_ranks in (3, 2):
        for state in job.load(zeros, num_ranks):
            assert plain(state) == plain(state_of(0))
    assert "do not hold alike" not in caplog.text


# Replicas that drifted


def replicas(drifts: int | None, *, layout: str, size: int) -> StateOf:
    """Parameters that each rank of a group of four should hold alike, and what Adam keeps of them; one rank drifted."""

    def state_of(rank: int) -> State:
        ranks, dims = ([[0, 1], [2, 3]], (None, 0)) if layout == "hsdp" else ([0, 1, 2, 3], (None,))
        more = 0.5 if rank == drifts else 0.0

        def tensor(first: float) -> torch.Tensor:
            full = torch.arange(float(size)) + first + more
            return full if layout == "ddp" else on_mesh(full, rank, ranks, *dims)

        return {
            name: tensor(10.0 * number) for number, name in enumerate(("ln.weight", "ln.bias", "ln.weight.exp_avg"))
        }

    return state_of


@pytest.mark.parametrize(("layout", "size"), [("ddp", 900), ("ddp", 50_000), ("hsdp", 7), ("replicated", 50_000)])
@pytest.mark.parametrize("drifts", [None, 0, 3])
def test_a_save_names_what_replicas_of_a_group_do_not_hold_alike(
    tmp_path: Path,
    layout: str,
    size: int,
    drifts: int | None,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is put together from several ranks, and once nobody said so."""
    job = Job(tmp_path, 4, num_replicas=2)
    told = "ranks of a group do not hold alike, or not in one order, what each of them should: ln.weight ("
    for _ in range(2):
        caplog.clear()
        assert not job.save(replicas(drifts, layout=layout, size=size))
        assert (told in caplog.text) is (drifts is not None), "at the save"
    if drifts is not None:
        whose = {0: {"ddp": "1", "replicated": "1", "hsdp": "2"}, 3: dict.fromkeys(("ddp", "replicated", "hsdp"), "3")}
        assert f"{told}rank {whose[drifts][layout]} of replica 0" in caplog.text
    caplog.clear()
    job.load(empty(replicas(None, layout=layout, size=size)))
    assert (told in caplog.text) is (drifts is not None), "at a load"
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert (told in capsys.readouterr().out) is (drifts is not None), "and to who looks"
    assert main(["checkpoints", "export", str(tmp_path), "-o", str(tmp_path / "state.safetensors")]) == 0
    assert (f"left out: what one rank alone had: {told}" in capsys.readouterr().err) is (drifts is not None)


def trained(*drifted: str, optimizers: list[Any] | None = None) -> StateOf:
    """FSDP2 x 2 with BatchNorm, a replicated DTensor, a plain parameter, and what their optimizer keeps of them.

    In rank 1 some have drifted; `optimizers`: where the optimizer of each rank goes to, else it is known to nobody.
    """

    def state_of(rank: int) -> State:
        state: State = {}
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        for name, size, dims in (("linear", 8, (0,)), ("norm", 900, (None,)), ("bias", 5, ())):
            for key in (name, f"optim.{name}"):
                full = torch.arange(float(size))
                state[key] = on_mesh(full, rank, range(2), *dims) if dims else full
            weight, moment = (
                one.to_local() if isinstance(one, DTensor) else one for one in (state[name], state[f"optim.{name}"])
            )
            weight[-1] += 0.5 * (rank and name in drifted)
            moment[-1] += 0.5 * (rank and f"optim.{name}" in drifted)
            optimizer.add_param_group({"params": [torch.nn.Parameter(weight)]})
            optimizer.state[optimizer.param_groups[-1]["params"][0]] = {"exp_avg": moment}
        if optimizers is not None:
            optimizers.append([optimizer])
        return {**state, "mean": torch.full((5,), 10.0 + rank), "large": torch.full((50_000,), 10.0 + rank)}

    return state_of


@pytest.mark.slow
@pytest.mark.parametrize("drifted", ["norm", "bias", "optim.norm", "optim.bias"])
@pytest.mark.parametrize("mode", [*SaveMode])
def test_a_save_fails_by_name_if_ranks_differ_in_what_their_optimizers_own_and_the_checkpoint_stays(
    tmp_path: Path, drifted: str, mode: SaveMode, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, 2, mode=mode)
    optimizers: list[Any] = []
    states = made(trained(drifted, optimizers=optimizers), 2)
    for _ in range(2):  # it stays an error
        errors = job.save(states.__getitem__, optimizers_of=optimizers.__getitem__)
        assert [type(error) for error in errors] == [RanksDifferError] * 2
        for error in errors:
            told = f"ranks of a group do not hold alike, or not in one order, what each of them should: {drifted}"
            assert (
                f"checkpoint {job.checkpoint.name} is whole and stays, but {told} (rank 1 of replica 0); what is saved"
                in str(error)
            )
            assert "copy one rank's to the others" in str(error)
            assert str(error).endswith("They are compared again at the next step's save")
    assert "was not saved by this rank" not in caplog.text
    for state in job.load(empty(trained())):
        assert plain(state)["linear"] in ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0])
    (whole,) = job.load(lambda rank: {"norm": torch.zeros(900)}, 1)
    assert whole["norm"][:400].tolist() == [*range(400)]
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert f"what each of them should: {drifted} (rank 1" in " ".join(
        capsys.readouterr().out.replace("; large", "").split()
    )


def test_what_no_optimizer_owns_or_nobody_knows_never_fails_a_save(tmp_path: Path) -> None:
    """BatchNorm's statistics are each rank's own, and a large buffer's difference is a warning."""
    optimizers: list[Any] = []
    states = made(trained(optimizers=optimizers), 2)
    job = Job(tmp_path, 2)
    assert not job.save(states.__getitem__, optimizers_of=optimizers.__getitem__)
    assert [*job.checkpoint.drifted()] == ["large"]
    assert not job.save(trained("norm", "bias"))
    assert {"norm", "bias"} <= job.checkpoint.drifted().keys()


def test_only_the_group_in_which_ranks_differ_gets_the_error(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, num_replicas=2)
    optimizers: list[Any] = []
    states = made(trained(optimizers=optimizers), 2) + made(trained("norm", optimizers=optimizers), 2)
    of_members, owners = iter(states), iter(optimizers)
    errors = job.save(lambda _: next(of_members), optimizers_of=lambda _: next(owners))
    assert len(errors) == 2
    assert all("norm (rank 1 of replica 1)" in str(error) for error in errors)
    assert [path.name for path in tmp_path.glob("*/differs-*")] == ["differs-r1.txt"]


def test_a_save_is_done_if_whether_ranks_differ_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, 2)
    optimizers: list[Any] = []
    states = made(trained("norm", optimizers=optimizers), 2)
    read = LocalStorage.read

    def fails(storage: LocalStorage, path: str, *arguments: Any) -> Any:
        if "differs" in path:
            raise StorageError(f"{path}: nobody answers", path)
        return read(storage, path, *arguments)

    with mock.patch.object(LocalStorage, "read", fails):
        assert not job.save(states.__getitem__, optimizers_of=optimizers.__getitem__)
    assert caplog.text.count("it is not known whether ranks differ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "hsdp", "replicated"])
def test_drift_anywhere_in_large_replicas_is_found_within_so_many_saves(tmp_path: Path, layout: str) -> None:
    """Of more than 16 MiB each save compares 4 MiB, and the next one the next ones; here it is less."""
    dice = random.Random(layout)
    size = 20_000
    with mock.patch.multiple(samples, WHOLE_BYTES=64 * 1024, WINDOW_BYTES=32 * 1024):
        num_saves = -(-3 * size * 4 // (2 if layout == "hsdp" else 1) // (32 * 1024))
        for number in range(3):
            states = made(replicas(None, layout=layout, size=size), 4)
            optimizers = [[torch.optim.SGD([*map(torch.nn.Parameter, state.values())], lr=0.1)] for state in states]
            job = Job(tmp_path / str(number), 4)
            assert not job.save(states.__getitem__, optimizers_of=optimizers.__getitem__)
            name = dice.choice([*states[3]])
            drifts = states[3][name].to_local() if isinstance(states[3][name], DTensor) else states[3][name]
            place = dice.choice([0, len(drifts) - 1, dice.randrange(len(drifts))])
            drifts[place] += 1.0
            found = [job.save(states.__getitem__, optimizers_of=optimizers.__getitem__) for _ in range(num_saves)]
            assert any(found), f"{name}[{place}] of rank 3 was never compared"
            assert not all(found), "not all of it is compared each time"
            assert all(name in str(error) for errors in found for error in errors)


def test_ranks_that_have_saved_another_number_of_times_are_not_taken_for_ranks_that_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = made(replicas(None, layout="ddp", size=20_000), 2)
    optimizers = [[torch.optim.SGD([*map(torch.nn.Parameter, state.values())], lr=0.1)] for state in states]
    job = Job(tmp_path, 2)
    turns = iter([3, 4])
    real = samples.windows
    with (
        mock.patch.multiple(samples, WHOLE_BYTES=64 * 1024, WINDOW_BYTES=32 * 1024),
        mock.patch(
            "torchft_ckpt.checkpointing.durable.saving.capture.windows", lambda tensors, _: real(tensors, next(turns))
        ),
    ):
        assert not job.save(states.__getitem__, optimizers_of=optimizers.__getitem__)
    assert "do not hold alike" not in caplog.text
    assert not job.checkpoint.drifted()


@pytest.mark.slow
def test_a_rank_whose_save_failed_once_still_compares_the_same_windows_as_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others return what became of theirs when the step is saved again, and it counted one more than they."""
    steps = [10]

    def rank_of(rank: int) -> tuple[Checkpointer, torch.Tensor]:
        checkpointer = Checkpointer(tmp_path, redundancy=1, timeout=timedelta(seconds=20))
        weight = torch.nn.Parameter(torch.arange(60_000.0))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        manager = mock.MagicMock()
        manager.view.side_effect = lambda: mock.MagicMock(**{"held.step": steps[-1]})
        stubs: dict[str, Any] = {
            "_manager": manager,
            "_index": HoldingsIndex(rank, 2),
            "_identity": lambda _: SaveIdentity(steps[-1], "q1", 0, 1, rank, 2, "group"),
            "_is_in_step": lambda: False,
            "_who_is_lost": lambda _: None,
            "_group_names": lambda _: tuple,
            "_note_saved": lambda *_: None,
            "_state_of": lambda _: capture_for_save({"weight": weight}, [optimizer]),
        }
        vars(checkpointer).update(stubs)
        return checkpointer, weight

    create = LocalStorage.create

    def fails(storage: LocalStorage, path: str) -> Any:
        if "r0_g1" in path:
            raise StorageError(f"{path}: nobody answers", path)
        return create(storage, path)

    with mock.patch.multiple(samples, WHOLE_BYTES=64 * 1024, WINDOW_BYTES=32 * 1024):
        (first, _), (second, weight) = rank_of(0), rank_of(1)
        with mock.patch.object(LocalStorage, "create", fails):
            futures = first.save(), second.save()
            assert isinstance(futures[1].exception(20), StorageError)
        assert first.save() is futures[0]
        assert [one.exception(20) for one in (futures[0], second.save())] == [None, None]
        with torch.no_grad():
            weight[50_000] += 1
        found = []
        while len(steps) < 9:
            steps.append(steps[-1] + 10)
            errors = [one.exception(20) for one in [first.save(), second.save()]]
            assert errors[0] is errors[1] is None or {*map(type, errors)} == {RanksDifferError}
            found.append(errors[0] is not None)
    assert 1 <= sum(found) <= 2, "once in eight saves"
    assert caplog.text.count("do not hold alike") >= sum(found)


def test_tensors_that_other_ranks_share_with_this_one_do_not_change_where_windows_lie(tmp_path: Path) -> None:
    """An adapter names the holders of each: rank 0 holds two tensors, rank 1 one of these."""
    both, alone = [(Box((0,), (20_000,)), (0, 1))], [(Box((0,), (20_000,)), (0,))]
    shown: list[list[bytes]] = []
    real = samples.windows
    with (
        mock.patch.multiple(samples, WHOLE_BYTES=64 * 1024, WINDOW_BYTES=32 * 1024),
        mock.patch.object(capture, "windows", lambda *of: (shown.append(real(*of)), shown[-1])[1]),
        mock.patch.object(capture, "layout_of", lambda name, one, **_: layouts[name]),
    ):
        layouts = {
            name: Layout(name, (20_000,), 4, False, declared=said) for name, said in (("one", both), ("two", alone))
        }
        for rank, names in enumerate((["one", "two"], ["one"])):
            captured = capture.CapturedState(
                {name: torch.ones(20_000) for name in names},
                step=1,
                own={},
                lock=StateDictLock(),
                pool=BufferPool(64 * 1024),
                index=HoldingsIndex(rank, 2),
                turn=5,
            )
            captured.close()
    assert shown[0][0] == shown[1][0]


def test_a_step_that_lags_in_a_rank_without_tokens_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts in shards: Adam counts for each parameter how often it had a gradient, in a plain tensor."""
    owners: list[list[torch.optim.Optimizer]] = []

    def state_of(rank: int) -> State:
        weight, moment = (on_mesh(torch.arange(8.0), rank, [0, 1], 0) for _ in range(2))
        state = {"exp_avg": moment, "step": torch.tensor(7.0 - 2 * rank)}
        parameter = torch.nn.Parameter(weight)
        owners.append([torch.optim.SGD([parameter], lr=0.1)])
        owners[-1][0].state[parameter] = state
        return {"experts": weight, "optim": state}

    states = made(state_of, 2)
    job = Job(tmp_path, 2)
    assert not job.save(states.__getitem__, optimizers_of=owners.__getitem__)
    assert "what each of them should: optim.step (rank 1" in caplog.text
    assert not job.checkpoint.drifted(owned=True)


def as_of_earlier_versions(job: Job, directory: Path, table_of: Callable[[list[bytes]], bytes]) -> None:
    """Have the manifests of a checkpoint show less of what ranks hold alike."""
    for part in job.checkpoint.parts:
        own = part.manifest.own
        assert isinstance(own.node, dict)
        bare = msgspec.structs.replace(own, node={"d": [item for item in own.node["d"] if item[0] != "replicas"]})
        table = base64.b64encode(table_of(replicas_of(part.manifest))).decode()
        early = msgspec.structs.replace(part.manifest, own=with_replicas(bare, table))
        (directory / str(job.checkpoint.name) / part.name.manifest).write_bytes(encode_part(early))


def test_manifests_of_earlier_versions_show_8_bytes_of_each_tensor_and_are_compared(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.save(replicas(1, layout="ddp", size=900))
    as_of_earlier_versions(job, tmp_path, lambda digests: b"".join(one[:7] + one[-1:] for one in digests))
    assert [*job.checkpoint.drifted()] == ["ln.weight", "ln.bias", "ln.weight.exp_avg"]
    assert not job.checkpoint.drifted(owned=True), "these do not say what optimizers own"


@pytest.mark.parametrize("mode", [*SaveMode])
def test_a_load_says_what_earlier_versions_have_put_together_of_several_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], mode: SaveMode
) -> None:
    """They divided BatchNorm's statistics over the ranks, which differ in them, and showed nothing of it."""
    job = Job(tmp_path, 2, num_replicas=2, mode=mode)
    job.save(statistics)  # no optimizer is known: as all was divided then
    as_of_earlier_versions(job, tmp_path, lambda _: b"")
    caplog.clear()
    job.load(empty(statistics))
    told = "an earlier version saved it, which did not compare what several ranks of a group hold: mean; rng."
    assert caplog.text.count(told) == 2
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert told in capsys.readouterr().out
    caplog.clear()
    assert not job.save(statistics, guard())  # here each rank has written its own
    as_of_earlier_versions(job, tmp_path, lambda _: b"")
    job.load(empty(statistics))
    assert "an earlier version" not in caplog.text


@pytest.mark.parametrize("layout", ["ddp", "hsdp", "replicated"])
@pytest.mark.parametrize("drifts", [None, 3])
def test_what_the_backups_of_a_lost_group_write_is_taken_for_no_earlier_versions(
    tmp_path: Path,
    layout: str,
    drifts: int | None,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody compares by a backup's part, so it shows nothing."""
    job = Job(tmp_path, 4, num_replicas=2)
    states = made(replicas(drifts, layout=layout, size=50_000), 4)
    held = [[one.to_local() if isinstance(one, DTensor) else one for one in state.values()] for state in states]
    owners = [[torch.optim.SGD([*map(torch.nn.Parameter, tensors)], lr=0.1)] for tensors in held]
    errors = job.save(states.__getitem__, optimizers_of=owners.__getitem__, lost=[1])
    assert [type(error) for error in errors] == [RanksDifferError] * (0 if drifts is None else 4)
    assert any(part.name.fill for part in job.checkpoint.parts)
    job.load(empty(replicas(None, layout=layout, size=50_000)))
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert "an earlier version" not in caplog.text + capsys.readouterr().out
    assert ("do not hold alike" in caplog.text) is (drifts is not None)


def test_what_ranks_have_of_their_own_is_no_drift(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for state_of, optimizers, is_replicated in (
        (statistics, guard(), True),
        (experts, [], False),
        (stages([0, 1], [2, 3]), [], False),
    ):
        job = Job(
            tmp_path / state_of.__name__, 4 if not optimizers and not is_replicated else 2, is_replicated=is_replicated
        )
        assert not job.save(state_of, optimizers)
    assert "do not hold alike" not in caplog.text


# Ranks of a group that read together


@pytest.fixture
def group_of() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(num_ranks: int, *storages: LocalStorage) -> Group:
        """`storages`: one that all see, or one of each rank."""
        groups.append(Group(num_ranks, lambda rank: [storages[rank % len(storages)]]))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def mixed(rank: int) -> State:
    """What is equal, and what is not, under one name on both ranks."""
    return {"equal": torch.arange(500_000.0), "own": torch.full((100_000,), 1.0 + rank)}


def read_in(group: Group) -> list[State]:
    """Have the ranks of a group read, each as that rank; return what each has."""

    def fill(member: Member) -> None:
        member.reader.read_as(member.rank, group.num_ranks)
        member.fills()

    for outcome in group.do(lambda member: member.reads(fill)):
        if isinstance(outcome, Exception):
            raise outcome
    return [{name: tensor for (name, _), tensor in member.got.items()} for member in group.members]


def have(states: list[State], *ranks: int) -> bool:
    """Whether these are the states of those ranks, whole."""
    pairs = zip(states, ranks, strict=True)
    return all(torch.equal(state[name], tensor) for state, rank in pairs for name, tensor in mixed(rank).items())


PARTLY = "several copies of own, and what cannot be read of one comes from another, which may differ"


def test_ranks_that_read_together_share_what_is_equal_and_nothing_else(
    tmp_path: Path, group_of: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    saved = Job(tmp_path, 2, is_replicated=False)
    assert not saved.save(mixed)
    caplog.clear()
    group = group_of(2, saved.storage)
    with caplog.at_level(logging.WARNING):
        assert have(read_in(group), 0, 1)
    equal, own = (tensor.nbytes for tensor in mixed(0).values())
    assert sum(member.num_read for member in group.members) <= 1.02 * (equal + 2 * own) + 4 * 64 * 1024
    assert sum(member.bytes_from_peers for member in group.members) == equal
    assert caplog.text.count("did not hold the same bytes of own") == 2, "it says so in each rank"
    assert PARTLY not in caplog.text


def test_a_rank_whose_own_copy_nobody_can_read_gets_the_first_one_and_is_told(
    tmp_path: Path, group_of: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    saved = Job(tmp_path, 2, is_replicated=False)
    assert not saved.save(mixed)
    (data,) = tmp_path.glob("*/__r0_g1_f0.distcp")
    content = bytearray(data.read_bytes())
    at = content.find(torch.full((100_000,), 2.0).numpy().tobytes())
    content[at] ^= 1
    data.write_bytes(content)
    assert have(read_in(group_of(2, saved.storage)), 0, 0)
    assert caplog.text.count(PARTLY) == 1


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_of_another_layout_get_one_ranks_copies_and_are_told_whose(
    tmp_path: Path, num_ranks: int, group_of: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    saved = Job(tmp_path, 2, is_replicated=False)
    assert not saved.save(mixed)
    caplog.clear()
    group = group_of(num_ranks, saved.storage)
    assert have(read_in(group), *[0] * num_ranks)
    unique = sum(tensor.nbytes for tensor in mixed(0).values())
    assert sum(member.num_read for member in group.members) <= 1.02 * unique + num_ranks * 64 * 1024
    assert caplog.text.count("all others get the first copies (rank 0 of replica 0") == num_ranks


def test_who_can_read_anothers_copies_alone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = Job(tmp_path, 2, is_replicated=False)
    assert not saved.save(mixed)
    (disk,) = disks_of(saved, tmp_path, 0)
    manifests = [part.manifest for part in saved.checkpoint.parts]
    parts = [SavedPart(manifest, None if number else disk) for number, manifest in enumerate(manifests)]
    reader = CheckpointReader(Checkpoint(saved.checkpoint.name, parts, []))
    reader.read_as(1, 2)
    target = torch.zeros(100_000)
    reader.read_own([Want("own", whole((100_000,)), target)])
    assert torch.equal(target, mixed(0)["own"])
    assert caplog.text.count(PARTLY) == 1


def disks_of(saved: Job, directory: Path, *ranks: int) -> list[LocalStorage]:
    """Disks, each with the part that one rank has saved."""
    disks = []
    for number, rank in enumerate(ranks):
        disks.append(LocalStorage(directory / f"disk{number}"))
        place = directory / f"disk{number}" / str(saved.checkpoint.name)
        place.mkdir(parents=True)
        for file in (directory / str(saved.checkpoint.name)).iterdir():
            if f"r0-g{rank}-" in file.name or f"r0_g{rank}_" in file.name:
                (place / file.name).write_bytes(file.read_bytes())
    return disks


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_ranks_whose_disks_hold_their_own_or_each_others_copies_get_each_its_own(
    tmp_path: Path, ranks: tuple[int, int], group_of: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    """Once the hosts of a group came back in another order, and each rank got the first one's."""
    saved = Job(tmp_path, 2, is_replicated=False)
    assert not saved.save(mixed)
    states = read_in(group_of(2, *disks_of(saved, tmp_path, *ranks)))
    assert have(states, 0, 1)
    assert PARTLY not in caplog.text


# Input that has no right answer


@pytest.mark.parametrize("is_replicated", [True, False])
def test_ranks_whose_names_are_one_only_when_they_are_flattened_are_refused_at_the_save(
    tmp_path: Path, is_replicated: bool
) -> None:
    def state_of(rank: int) -> State:
        return {"a.b": torch.ones(3)} if rank else {"a": {"b": torch.zeros(3)}}

    errors = Job(tmp_path, 2, is_replicated=is_replicated).save(state_of)
    assert errors
    assert (
        "a.b is torch.float32[3] at ('a', 'b') in one part, torch.float32[3] at ('a.b',) in part-r0-g1-f0.json"
        in str(errors[0])
    )
    assert ("(stages of a pipeline need is_replicated=False)" in str(errors[0])) is is_replicated, "else it is said"


def layers(*numbers: list[int]) -> StateOf:
    """Stages of a pipeline with one name for each layer in all stages."""
    return lambda rank: {"model": {f"layer{number}": torch.full((3,), 10.0 + number) for number in numbers[rank]}}


def test_four_stages_become_two_by_name_and_a_restore_says_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, 4, is_replicated=False)
    assert not job.save(layers([0], [1], [2], [3]))
    two = layers([0, 1], [2, 3])
    assert [plain(state) for state in job.load(empty(two), 2)] == [plain(was) for was in made(two, 2)]
    assert not caplog.text.count("not restored")
    job.load(empty(two), 2, restores=True)
    assert (
        "rank 0 of the 4 ranks that saved it, whose state this rank is given, did not have model.layer1" in caplog.text
    )
    assert "did not have model.layer2, model.layer3" in caplog.text
    assert caplog.text.count("it is not restored. load_checkpoint reads by name") == 2
