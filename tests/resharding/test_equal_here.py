"""What is equal here already does not travel onto another layout: frozen layers, or what an earlier fetch brought."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping

import pytest
import torch
from support.resharding import LONG, PLAIN, Group, Layout, Model, State, imagined_rank, make_transport
from torch._subclasses.fake_tensor import FakeTensorMode

from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.resharding import plan as plan_module
from torchft_ckpt.checkpointing.resharding.fetch import ShardedFetch
from torchft_ckpt.checkpointing.resharding.transfer import BoxTransfer
from torchft_ckpt.errors import SourceLostError, SourceRefusedError

STEP = 7
ROWS = Layout((4,), ((0, 0),))
COLUMNS = Layout((2,), ((0, 1),))
NAMES = ("model.base", "model.adapter")
HALF = 64 * 96 * 4 // 2


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "PART_BYTES", 1024)
    monkeypatch.setattr(plan_module, "_COMPARED_FROM_BYTES", 64)


@pytest.fixture
def here_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sources give parts when all that may be equal here has been compared."""
    next_batch, take_from_here = BoxTransfer.next_batch, ShardedFetch._take_from_here
    has_compared = threading.Event()

    def after_here(transfer: BoxTransfer, stream: int, source: str, path: str) -> list[int] | None:
        assert has_compared.wait(60)
        return next_batch(transfer, stream, source, path)

    def then(fetch: ShardedFetch, copies: Mapping[str, int]) -> None:
        take_from_here(fetch, copies)
        has_compared.set()

    monkeypatch.setattr(BoxTransfer, "next_batch", after_here)
    monkeypatch.setattr(ShardedFetch, "_take_from_here", then)
    yield
    has_compared.set()


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model({name: torch.randn(64, 96, generator=generator).to(dtype) for name in NAMES}, {})


def here_of(base: torch.Tensor, adapter: torch.Tensor | None = None) -> State:
    """Rank 1 of two that hold columns."""
    fulls = {"model.base": base.clone(), "model.adapter": torch.zeros_like(base) if adapter is None else adapter}
    with imagined_rank(1, 2):
        return Model(fulls, {}).state(dict.fromkeys(NAMES, COLUMNS), 1)


def fetch(model: Model, local: State, *, in_place: bool) -> tuple[State, TransferProgress]:
    seen: list[TransferProgress] = []
    receiver = make_transport()
    with Group(model.states(dict.fromkeys(NAMES, ROWS), 4), STEP) as group:
        received = receiver.fetch_sharded(
            [group.urls], 1, 2, STEP, LONG, local_state=local, in_place=in_place, on_progress=seen.append
        )
    receiver.shutdown()
    assert model.wrong(received, dict.fromkeys(NAMES, COLUMNS), 1) == []
    assert not in_place or model.wrong(local, dict.fromkeys(NAMES, COLUMNS), 1) == []
    assert seen[-1].skipped_bytes + seen[-1].received_bytes == seen[-1].total_bytes
    return received, seen[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_frozen_base_does_not_travel(in_place: bool, dtype: torch.dtype, here_first: None) -> None:
    model = model_of(0, dtype)
    local = here_of(model.fulls["model.base"])
    received, progress = fetch(model, local, in_place=in_place)
    assert progress.skipped_bytes == progress.received_bytes == progress.total_bytes // 2
    if not in_place:
        local["model"]["base"].to_local().zero_()
        assert model.wrong(received, dict.fromkeys(NAMES, COLUMNS), 1) == [], "it is the receiver's own"


def test_a_part_of_which_only_the_sample_is_equal_is_fetched(here_first: None) -> None:
    model = model_of(1)
    differing = model.fulls["model.base"].clone()
    differing[0, 48] += 1  # the first element of the first part
    _, progress = fetch(model, here_of(differing), in_place=True)
    assert HALF - 1024 <= progress.skipped_bytes < HALF


def test_where_no_sample_is_equal_nothing_is_compared(monkeypatch: pytest.MonkeyPatch, here_first: None) -> None:
    monkeypatch.setattr(BoxTransfer, "claim", None)
    _, progress = fetch(model_of(2), here_of(torch.zeros(64, 96)), in_place=True)
    assert progress.skipped_bytes == 0


def test_what_is_here_is_used_beside_the_sources() -> None:
    """Whatever comes first: each part counts once."""
    model = model_of(3)
    fetch(model, here_of(model.fulls["model.base"]), in_place=False)


@pytest.mark.parametrize("num_answers", [0, 1, 2, 3])
def test_a_source_that_does_not_say_what_is_equal_gives_all(
    monkeypatch: pytest.MonkeyPatch, here_first: None, num_answers: int
) -> None:
    """It may have freed what it would have to read for that. The question is for speed alone, and costs no source."""
    ask, asked = SourceClient.fetch_part_digests, []

    def refuses(client: SourceClient, *arguments: object) -> list[bytes]:
        asked.append(client)
        if len(asked) > num_answers:
            raise SourceRefusedError("410 gone", client.name)
        return ask(client, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SourceClient, "fetch_part_digests", refuses)
    model = model_of(4)
    _, progress = fetch(model, here_of(model.fulls["model.base"]), in_place=True)
    assert progress.skipped_bytes < HALF


def test_a_tensor_whose_storage_was_freed_is_fetched_whole() -> None:
    model = model_of(5)
    local = here_of(model.fulls["model.base"])
    local["model"]["base"].to_local().untyped_storage().resize_(0)
    _, progress = fetch(model, local, in_place=False)
    assert progress.skipped_bytes == 0


def test_a_tensor_that_only_says_what_is_wanted_has_no_memory_to_look_at() -> None:
    model = Model({"model.base": torch.randn(64, 96), "model.adapter": torch.randn(64, 96)}, {})
    with FakeTensorMode():
        local = {"model": {"base": torch.empty(64, 96), "adapter": torch.empty(64, 96)}}
    receiver = make_transport()
    with Group(model.states(dict.fromkeys(NAMES, ROWS), 4), STEP) as group:
        received = receiver.fetch_sharded([group.urls], 0, 1, STEP, LONG, local_state=local)
    receiver.shutdown()
    assert model.wrong(received, dict.fromkeys(NAMES, PLAIN), 0) == []


def test_what_was_equal_to_a_group_that_does_not_count_any_more_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of the first group is lost when its others have told their digests. The second group holds other bits."""
    first, second = model_of(7), model_of(8)
    is_lost = threading.Event()
    groups = [Group(model.states(dict.fromkeys(NAMES, ROWS), 4), STEP) for model in (first, second)]
    next_batch, claim = BoxTransfer.next_batch, BoxTransfer.claim

    def after_the_loss(transfer: BoxTransfer, stream: int, source: str, path: str) -> list[int] | None:
        assert is_lost.wait(60)
        return next_batch(transfer, stream, source, path)

    def when_the_second_counts(transfer: BoxTransfer, parts: list[int], number: int) -> list[int]:
        if not is_lost.is_set():
            name = next(name for name in transfer.plan.group_of if name.endswith(groups[0].urls[3].rpartition(":")[2]))
            transfer.fail_source(name, SourceLostError("it was killed", name))
            transfer.adopted([], 1)
            is_lost.set()
        return claim(transfer, parts, number)

    monkeypatch.setattr(BoxTransfer, "next_batch", after_the_loss)
    monkeypatch.setattr(BoxTransfer, "claim", when_the_second_counts)
    local = here_of(first.fulls["model.base"], first.fulls["model.adapter"].clone())
    receiver = make_transport()
    with groups[0], groups[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        received = receiver.fetch_sharded([group.urls for group in groups], 1, 2, STEP, LONG, local_state=local)
    receiver.shutdown()
    assert second.wrong(received, dict.fromkeys(NAMES, COLUMNS), 1) == []


def test_tensors_that_were_looked_at_can_be_freed_and_made_again() -> None:
    model = model_of(6)
    local = here_of(model.fulls["model.base"])
    fetch(model, local, in_place=True)
    assert local["model"]["base"].to_local().untyped_storage().resizable()
