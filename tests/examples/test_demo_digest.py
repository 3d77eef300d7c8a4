"""The digest by which the demo says that groups ended bit-equal: it sees every bit of a state."""

from __future__ import annotations

import pytest
import torch
from demo import corpus
from demo.digest import digest_state
from demo.model import CharGPT, GPTConfig, loss_of

SMALL = GPTConfig(context=16, width=32, num_heads=2, num_blocks=2)
TOKENS = torch.tensor(list(corpus.encode(b"for index in range(10):\n    print(index)\n" * 40)), dtype=torch.uint8)


def make_model() -> CharGPT:
    torch.manual_seed(0)
    return CharGPT(SMALL)


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
