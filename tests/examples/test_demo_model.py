"""The demo's model and data: they can learn, and a digest sees every bit of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from demo import corpus
from demo.digest import digest_state
from demo.model import CharGPT, GPTConfig, loss_of, sample_batch, write_on

SMALL = GPTConfig(context=16, width=32, num_heads=2, num_blocks=2)
TOKENS = torch.tensor(list(corpus.encode(b"for index in range(10):\n    print(index)\n" * 40)), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads that wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_model() -> CharGPT:
    torch.manual_seed(0)
    return CharGPT(SMALL)


def test_a_fresh_model_guesses_blindly() -> None:
    inputs, targets = sample_batch(TOKENS, seed=1, group=0, step=0, batch_size=8, context=16)

    loss = loss_of(make_model()(inputs), targets).item()

    assert loss == pytest.approx(math.log(corpus.VOCABULARY_SIZE), abs=0.2)


def test_the_model_learns_a_text_that_repeats_itself() -> None:
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        inputs, targets = sample_batch(TOKENS, seed=1, group=0, step=step, batch_size=8, context=16)
        loss = loss_of(model(inputs), targets)
        adamw.zero_grad()
        loss.backward()
        adamw.step()

    assert loss.item() < 2.0


def test_no_character_sees_the_ones_after_it() -> None:
    model = make_model()
    inputs, _ = sample_batch(TOKENS, seed=1, group=0, step=0, batch_size=1, context=16)
    changed = inputs.clone()
    changed[0, 9] = (changed[0, 9] + 1) % corpus.VOCABULARY_SIZE

    difference = (model(inputs) - model(changed)).abs().amax(dim=-1)[0] > 1e-6

    assert difference.tolist() == [False] * 9 + [True] * 7


def test_targets_are_the_inputs_one_character_later() -> None:
    inputs, targets = sample_batch(TOKENS, seed=1, group=0, step=3, batch_size=4, context=16)

    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_batch_follows_from_seed_group_and_step_alone() -> None:
    def batch(seed: int, group: int, step: int) -> list[list[int]]:
        return sample_batch(TOKENS, seed=seed, group=group, step=step, batch_size=4, context=16)[0].tolist()

    others = [batch(2, 0, 3), batch(1, 1, 3), batch(1, 0, 4)]
    assert batch(1, 0, 3) == batch(1, 0, 3)
    assert batch(1, 0, 3) not in others


def test_writing_on_keeps_the_prompt_and_adds_characters_past_the_context() -> None:
    prompt = torch.tensor(list(corpus.encode(b"for ")))

    written = write_on(make_model(), prompt, num_characters=30, seed=0)

    assert (written[:4].tolist(), len(written)) == (prompt.tolist(), 34)


def make_state() -> dict[str, object]:
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model(TOKENS[None, :16].long()), TOKENS[None, 1:17].long()).backward()
    adamw.step()
    return {"model": model.state_dict(), "optimizer": adamw.state_dict()}


def test_equal_states_have_equal_digests() -> None:
    assert digest_state(make_state()) == digest_state(make_state())


@pytest.mark.parametrize("path", ["model/norm.bias", "optimizer/state/3/exp_avg_sq", "optimizer/state/0/step"])
def test_one_flipped_bit_changes_the_digest(path: str) -> None:
    state = make_state()
    before = digest_state(state)
    leaf: object = state
    for key in path.split("/"):
        assert isinstance(leaf, dict)
        leaf = leaf[int(key) if key.isdigit() else key]
    assert isinstance(leaf, torch.Tensor)
    leaf.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)

    assert digest_state(state) != before


def test_a_changed_learning_rate_changes_the_digest() -> None:
    state = make_state()
    before = digest_state(state)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, dict)
    optimizer["param_groups"][0]["lr"] = 0.02

    assert digest_state(state) != before


def test_minus_zero_is_not_zero() -> None:
    assert digest_state({"x": torch.tensor(0.0)}) != digest_state({"x": torch.tensor(-0.0)})


def test_a_value_that_has_no_bytes_is_refused() -> None:
    with pytest.raises(TypeError):
        digest_state({"x": object()})
