"""The durable benchmark's arithmetic and tools, on made-up names and small states."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench.durable_counting import CountingReader, counting_ours
from bench.durable_model import WHOLE, Model
from bench.durable_save import Stored, written_by

from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(WHOLE, dim=0, quick=True)


def test_files_of_ours_are_those_of_the_rank_in_their_name_and_what_bears_none_is_the_first_ranks() -> None:
    sizes = {"__r0_g1_f0.distcp": 10, "part-r0-g1-f0.json": 1, "__r1_g0_f0.distcp": 20, ".metadata": 5}
    assert written_by(sizes, 2) == {1: 11, 2: 20, 0: 5}


def test_files_of_dcp_are_those_of_the_rank_in_their_name() -> None:
    assert written_by({"__3_0.distcp": 10, "__3.metadata": 2, ".metadata": 5}, 4) == {3: 12, 0: 5}


def test_a_rank_that_wrote_nothing_counts_in_the_mean() -> None:
    assert Stored(unique_bytes=10, file_bytes=12, by_rank={0: 6, 2: 6}).most_loaded == 2.0


def test_a_step_is_the_next_version_of_every_tensor_and_value(model: Model) -> None:
    model.fill(1)
    model.optimizer().step()
    assert model.wrong(2, model.state_dict()) == []
    assert len(model.wrong(1, model.state_dict())) == len(model.held) + len(
        ["scheduler", "tokens_seen", "param_groups"]
    )


def test_a_single_bit_is_seen(model: Model) -> None:
    model.fill(3)
    model.held[-1].local.view(torch.int32)[-1] ^= 1
    assert model.wrong(3, model.state_dict()) == [model.held[-1].name]


def test_every_byte_that_is_read_of_a_file_is_counted_and_none_twice(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(100_000))
    with counting_ours() as count:
        LocalStorage(tmp_path).read("data", 10, 50_010)
    reader = CountingReader(str(tmp_path))
    with reader.fs.create_stream(tmp_path / "data", "rb") as stream:
        stream.read(-1)
    assert (count.num_bytes, reader.count.num_bytes) == (50_000, 100_000)
