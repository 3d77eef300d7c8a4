"""The transport benchmark's arithmetic and tools, on made-up numbers and small states."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import transport_figures, transport_links, transport_states
from bench.stats import Verdict
from bench.transport_memory import PeakMemory
from bench.transport_raw import RawReceiver, RawSource
from bench.transport_reader import SlowReader

from torchft_ckpt.checkpointing import HTTPTransport

MIB = 1 << 20


@pytest.fixture
def transport() -> Iterator[HTTPTransport[dict[str, list[torch.Tensor]]]]:
    made: HTTPTransport[dict[str, list[torch.Tensor]]] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    yield made
    made.shutdown()


@pytest.mark.parametrize(("value", "expected"), [(2.7, Verdict.MET), (2.699, Verdict.MISSED), (None, Verdict.NOT_RUN)])
def test_a_figure_where_more_is_better_keeps_its_bar_from_the_bar_on(value: float | None, expected: Verdict) -> None:
    assert transport_figures.judge_at_least(value, 2.7) is expected


def test_the_best_setting_is_the_one_with_the_smallest_median_and_not_the_luckiest() -> None:
    assert transport_figures.best_setting({0: [0.1, 3.0, 3.0], 4: [2.0, 2.0, 9.0], 8: []}) == 4


def test_the_payload_of_a_link_is_its_bytes_less_one_set_of_headers_a_packet() -> None:
    assert transport_figures.payload_bytes(3 * 1448 + 3 * 66, 3) == 3 * 1448


def test_buffers_are_dealt_to_all_streams_and_none_twice() -> None:
    assert transport_figures.deal(range(7), 3) == [[0, 3, 6], [1, 4], [2, 5]]


def test_with_another_seed_no_element_keeps_its_bits() -> None:
    model = transport_states.Model(3, 4096)
    transport_states.fill(model.tensors(), 1)
    before = [tensor.view(torch.int32).clone() for tensor in model.tensors()]
    transport_states.fill(model.tensors(), 2)
    kept = [tensor.view(torch.int32).eq(old).any().item() for tensor, old in zip(model.tensors(), before, strict=True)]
    assert kept == [False, False, False]


def test_the_digest_sees_a_single_bit() -> None:
    tensors = transport_states.Model(3, 4096).tensors()
    transport_states.fill(tensors, 1)
    before = transport_states.digest(tensors)
    tensors[2].view(torch.int32)[-1] ^= 1
    assert transport_states.digest(tensors) != before


def test_a_state_with_one_element_of_another_step_is_torn() -> None:
    tensors = transport_states.Model(3, 4096).tensors()
    transport_states.fill_uniform(tensors, 7)
    tensors[1][500] = 8.0
    assert transport_states.values_in(tensors) == [7, 8]


def test_raw_sockets_bring_every_byte_to_its_place() -> None:
    sent, got = (transport_states.Model(5, 4 * MIB).tensors() for _ in range(2))
    transport_states.fill(sent, 1)
    transport_states.fill(got, 2)
    source = RawSource([transport_states.byte_view(tensor) for tensor in sent], 2)
    RawReceiver(source.port, [transport_states.byte_view(tensor) for tensor in got], 2).receive()
    assert transport_states.digest(got) == transport_states.digest(sent)


def test_the_slow_reader_gets_the_bytes_that_are_served(
    transport: HTTPTransport[dict[str, list[torch.Tensor]]],
) -> None:
    tensors = transport_states.Model(9, MIB).tensors()
    transport_states.fill(tensors, 1)
    transport.send_checkpoint([1], 5, {"weights": tensors}, timedelta(seconds=60))
    reader = SlowReader(transport.metadata(), 5, is_ours=True, bytes_per_s=1e9)
    assert (reader.finish(), reader.num_bytes()) == (transport_states.digest(tensors), 9 * MIB)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_peak_of_memory_is_seen_after_it_is_over() -> None:
    watch = PeakMemory()
    memory = mmap.mmap(-1, 32 * MIB)  # memory that was freed before, and is still there, would be none that is added
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    memory.close()
    assert 30 * MIB < watch.growth_bytes() < 64 * MIB


def test_only_namespaces_of_dead_runs_are_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    removed: list[str] = []
    for name in (f"tftb-{os.getpid()}-0", "tftb-99999999-0", "others-99999999-0", "tftb-x"):
        (tmp_path / name).touch()
    monkeypatch.setattr(transport_links, "_FOLDER", tmp_path)
    monkeypatch.setattr(transport_links.subprocess, "run", lambda command, **_: removed.append(command[-1]))
    transport_links._remove_left_behind()
    assert removed == ["tftb-99999999-0"]
