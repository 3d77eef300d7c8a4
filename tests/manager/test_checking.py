"""What is compared between replica groups, and what is each group's own."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.core.coordination.messages import MAX_LEAVES, LeavesWanted, Shows, StateVersion
from torchft_ckpt.errors import UnsupportedValueError
from torchft_ckpt.manager import showing
from torchft_ckpt.manager.checking import (
    MOST_PARTS,
    PART_BYTES,
    EqualityCheck,
    ParameterLayout,
    digest_of,
    layout_of,
    leaves_to_compare,
)
from torchft_ckpt.manager.showing import CheckedLeaf, KnownLeaves, shown
from torchft_ckpt.manager.state_registry import OwnState, StateRegistry


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def names(leaves: Iterable[CheckedLeaf]) -> set[str]:
    """Of those that have to be equal."""
    return {leaf.name for leaf in leaves if leaf.is_owned}


def test_parameters_and_optimizers_state_and_settings_have_to_be_equal_and_of_buffers_that_is_found_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    adam = trained(model)
    leaves = leaves_to_compare({"model": model.state_dict(), "adam": adam.state_dict()}, [adam])
    found = names(leaves)
    assert {"model.0.weight", "model.1.bias", "adam.state.0.exp_avg"} <= found
    assert "optimizer 0.param_groups.0.lr" in found  # as it is, whatever the state dict says
    others = {leaf.name for leaf in leaves} - found
    assert {"model.1.running_mean", "model.1.num_batches_tracked", "adam.param_groups.0.lr"} <= others


def test_what_the_state_dict_leaves_out_of_an_optimizer_is_compared_too() -> None:
    model = nn.Linear(4, 4)
    found = names(leaves_to_compare({}, [trained(model)]))
    assert {"optimizer 0.parameter 0", "optimizer 0.parameter 1", "optimizer 0.state.1.exp_avg_sq"} <= found


@pytest.mark.parametrize(
    "state",
    [
        random.Random(3).getstate(),
        list(random.Random(3).getstate()),
        np.random.RandomState(3).get_state(),
        np.random.RandomState(3).get_state(legacy=False),
        np.random.default_rng(3).bit_generator.state,
        np.arange(3),
        object(),
    ],
    ids=["python", "python as a list", "numpy", "numpy's dict", "numpy's generator", "array", "no value"],
)
def test_random_states_and_what_has_no_value_are_not_compared(state: Any) -> None:
    assert leaves_to_compare({"a": {"own": state, "scale": 2.0}}, []) == [
        CheckedLeaf("a.scale", "a.scale", "2.0", is_owned=False)
    ]


def test_a_list_of_values_is_one_leaf_and_its_order_counts() -> None:
    (one,) = leaves_to_compare({"a": {"order": [1, 2, 3]}}, [])
    (other,) = leaves_to_compare({"a": {"order": [1, 3, 2]}}, [])
    assert one.name == "a.order" and digest_of(one.value) != digest_of(other.value)


def test_of_groups_that_train_apart_nothing_that_the_inner_optimizer_owns_is_compared() -> None:
    model, agreed = nn.Linear(4, 4), torch.zeros(3)
    registry = StateRegistry(StateDictLock())
    registry.register("model", lambda _: None, lambda: {**model.state_dict(), "epoch": 1})
    registry.register(
        "outer",
        lambda _: None,
        lambda: {"globals": agreed, "round": 2},
        explicitly_locked=True,
        local_between_syncs=True,
    )
    registry.guard(trained(model))
    leaves, known = registry.leaves_to_compare(), KnownLeaves()
    known.look(leaves, asks=True)
    assert {leaf.name for leaf in leaves} == {"outer.globals", "outer.round", "model.epoch"}
    assert names(leaves) == {leaf.name for leaf in leaves if known.may_count(leaf)} == {"outer.globals", "outer.round"}


def test_of_a_scripts_own_leaves_those_may_count_that_move_with_rounds_and_stand_still_within_one() -> None:
    known = KnownLeaves()
    state = {"scale": 2.0, "average": torch.zeros(3), "num_batches": torch.zeros(()), "best": 3.0}

    def look(*, asks: bool) -> set[str]:
        known.look(leaves_to_compare(state, []), asks=asks)
        return set(known.moved)

    for _ in range(2):
        assert look(asks=True) == set(), "what is only seen as rounds are asked for may move in inner steps"
        state["average"].add_(1)
        state["num_batches"].add_(1)
    look(asks=False)
    state["num_batches"].add_(1)
    assert look(asks=True) == {"average"}
    assert look(asks=True) == {"average"}, "the round is tried again"
    state["best"] = 1.0
    look(asks=False)
    assert look(asks=True) == {"average", "best"}, "and one of them has not moved in this round"
    known.learn(["average"], ["best"])
    of = {leaf.name: leaf for leaf in leaves_to_compare(state, [])}
    assert [name for name in sorted(of) if known.may_count(of[name])] == ["average"]


def test_a_leaf_that_moves_with_each_third_round_is_news_once_and_one_that_moves_in_inner_steps_never() -> None:
    known, state, news = KnownLeaves(), {"average": 0, "best": 9.0}, []
    for number in range(1, 8):
        known.look(leaves_to_compare(state, []), asks=False)
        state["best"] -= number % 2  # in the inner steps of each second round
        known.look(leaves_to_compare(state, []), asks=True)
        news.append(known.has_news)
        known.has_news = False  # it is shown
        state["average"] += number % 3 == 0
        state["best"] -= number == 6  # as the round ends
    assert news == [False, False, False, True, False, False, False]
    assert known.moved == {"average"}
    known.look(leaves_to_compare(state, []), asks=False)
    known.loaded()
    state["average"] = 9  # a state is loaded
    known.look(leaves_to_compare(state, []), asks=True)
    assert known.moved == {"average"} and not known.has_news


def test_what_has_stood_still_since_it_was_looked_at_first_is_shown_last_and_is_news_when_it_moves() -> None:
    known, state = KnownLeaves(), {"average": 0, "frozen": torch.zeros(3), "best": 9.0}

    def look() -> list[str]:
        leaves = leaves_to_compare(state, [])
        known.watch(leaves)
        said = shown(leaves, known, 1, Shows.SAMPLES, group_world_size=1)
        return [leaf.name for leaf in said.open[len(said.open) - said.num_still :]]

    assert look() == [], "nobody knows what moves"
    state["average"] = 1
    assert look() == ["best", "frozen"] and known.has_news
    known.has_news = False
    known.learn(["average"], [])
    state["average"] = 2
    assert look() == ["best", "frozen"] and not known.has_news, "what is known is no news"
    state["best"] = 1.0
    assert look() == ["frozen"] and known.has_news
    known.loaded()
    state["frozen"], state["best"] = torch.ones(3), 9.0
    assert look() == ["best", "frozen"], "what stood still in the others was loaded"


def test_own_tensors_are_shown_whole_until_they_are_common_and_own_numbers_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers, and flags that are all the same, are equal by chance; what moves in inner steps is equal as a round begins."""
    known = KnownLeaves()
    state = {"codebook": torch.arange(1 << 16), "mean": torch.arange(3.0), "count": torch.zeros(()), "best": 1.0}
    state |= {"counts": torch.full((4096,), 5), "used": torch.ones(8, dtype=torch.bool)}
    assert known.learn([], state) == (sorted(state), [])

    def own() -> dict[str, str]:
        said = shown(leaves_to_compare(state, []), known, 1, Shows.SAMPLES, group_world_size=1)
        assert not said.open
        return {leaf.name: leaf.digest for leaf in said.own}

    before = own()
    assert list(before) == ["codebook", "mean"]
    state["codebook"][-1] = 1
    state["counts"][-1] = 6
    assert list(own()) == ["codebook", "counts", "mean"]
    del state["counts"]
    with monkeypatch.context() as patch:
        patch.setattr(
            showing, "MAX_STATE_BYTES", state["codebook"].nbytes
        )  # samples of the others; and no room for two
        after = own()
    assert list(after) == ["codebook"] and after != before
    assert known.learn(["codebook"], []) == ([], ["codebook"])
    assert list(own()) == ["mean"] and known.common == {"codebook"}
    known.by_rounds = True
    assert own() == {}


def test_a_tensor_that_cannot_be_carried_is_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient's norm is a DTensor of partial sums, say: who serves it says so, and nobody who trains ends by that."""

    class Refuses:
        def boxes_and_data(self, _: torch.Tensor, path: str) -> None:
            raise UnsupportedValueError("no box", path)

    monkeypatch.setattr(showing, "adapter_of", lambda _: Refuses())
    assert (
        showing.digest_of(torch.ones(2))
        == showing.digest_of(torch.ones(2), step=3)
        != showing.digest_of(torch.zeros(2))
    )


def test_what_was_received_has_not_moved_here_before_it_does_whatever_samples_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(showing, "MAX_STATE_BYTES", 0)
    state = {"target": torch.zeros(1 << 16), "count": 0}
    source, here = OwnState(), OwnState()

    def look(own: OwnState, step: int) -> list[str]:
        leaves = leaves_to_compare(state, [])
        own.known.watch(leaves)
        said = shown(leaves, own.known, step, Shows.SAMPLES, group_world_size=1)
        assert said.is_sampled
        return [leaf.name for leaf in said.open[len(said.open) - said.num_still :]]

    look(source, 1), look(here, 1)
    state["target"] = torch.ones(1 << 16)
    assert look(source, 2) == ["count"]
    here.take_served(source.served(StateVersion(step=2)))
    assert not here.known.has_looked, "what is here is looked at again before the first step"
    assert [look(here, step) for step in (2, 3, 7)] == [["count", "target"]] * 3
    state["target"] = torch.full((1 << 16,), 2.0)
    assert look(here, 8) == ["count"] and here.known.has_news


def test_a_queue_of_which_another_part_moves_than_is_looked_at_is_seen_to_move_by_what_is_shown_of_it() -> None:
    """MoCo's, in a group that came in: it loaded the others' a second time, and a warning was said."""
    state = {"queue": torch.zeros(1 << 16)}
    here = OwnState()

    def num_still() -> int:
        leaves = leaves_to_compare(state, [])
        here.known.watch(leaves)
        return shown(leaves, here.known, 1, Shows.SAMPLES, group_world_size=1).num_still

    here.take_served(here.served(StateVersion(step=1)))
    num_still()
    for part in state["queue"].split(2048)[:3]:
        part.add_(1.0)
        looked_at = here.known._asked
        assert num_still() == 0 and here.known._asked == looked_at
    here.take_served(here.served(StateVersion(step=2)))
    assert [num_still(), num_still()] == [1, 1], "what was received has not moved here"


def test_digests_tell_dtypes_shapes_and_signs_of_zero_apart() -> None:
    ones = torch.ones(4)
    others = [ones.double(), ones.view(2, 2), ones.int(), -ones, torch.zeros(4), -torch.zeros(4), ones.bfloat16()]
    assert len({digest_of(tensor) for tensor in [ones, *others]}) == 1 + len(others)
    assert digest_of(torch.arange(6).view(2, 3).t()) == digest_of(torch.arange(6).view(2, 3).t().contiguous())


def test_an_answer_is_of_the_version_that_was_digested_and_of_no_other() -> None:
    check, version = EqualityCheck(StateDictLock(), KnownLeaves()), StateVersion(step=3, quorum_id=1)
    leaves = [CheckedLeaf(f"{number:05}", f"w{number:05}", f"{number}") for number in range(MAX_LEAVES + 1)]
    check.begin(version, leaves)
    digest = check.digest()
    assert len(digest) == 32 and check.digest() == ""
    answer = check.answer(LeavesWanted(version=version, group_rank=2))
    assert (len(answer.leaves), answer.leaves[0].name, answer.group_rank) == (2049, "w00000 to w00001", 2)
    assert check.answer(LeavesWanted(version=StateVersion(step=6, quorum_id=1), group_rank=2)).leaves == []
    check.shutdown(5.0)


def test_a_very_large_state_is_looked_for_in_few_steps() -> None:
    check = EqualityCheck(StateDictLock(), KnownLeaves())
    value = torch.empty(20 * PART_BYTES, dtype=torch.uint8, device="meta")
    check.begin(StateVersion(step=0, quorum_id=1), [CheckedLeaf("a", "weight", value)], is_new=True)
    check.forget()
    assert [check.is_due(step) for step in (MOST_PARTS - 1, MOST_PARTS)] == [True, False]
    check.shutdown(5.0)


def test_a_large_state_is_compared_in_parts_until_each_byte_of_it_was() -> None:
    """All groups compare the same part in a step, also one that begins with it later; each piece has its own name."""

    class Group:
        def __init__(self) -> None:
            self.check = EqualityCheck(StateDictLock(), KnownLeaves())
            self.weight = torch.zeros(2 * PART_BYTES + 100, dtype=torch.uint8)
            self.leaves = [
                CheckedLeaf("a", "lr", "0.1"),
                CheckedLeaf("b", "weight", self.weight),
                CheckedLeaf("c", "n", "3"),
            ]

        def digest(self, step: int, *, is_new: bool = False) -> tuple[str, list[str]]:
            version = StateVersion(step=step, quorum_id=1)
            self.check.begin(version, self.leaves, is_new=is_new)
            digest = self.check.digest()
            answer = self.check.answer(LeavesWanted(version=version, group_rank=0))
            return digest, [leaf.name for leaf in answer.leaves]

    a, b = Group(), Group()
    assert not a.check.is_due(5)
    seen = [a.digest(5, is_new=True)]
    assert [a.check.is_due(step) for step in (6, 7, 8)] == [True, True, False]
    seen += [a.digest(step) for step in (6, 7)]
    assert sorted(names for _, names in seen) == [
        ["lr", "weight (part 0)"],
        ["weight (part 1)"],
        ["weight (part 2)", "n"],
    ]
    for flipped in (0, PART_BYTES, 2 * PART_BYTES + 99):
        b.weight[flipped] = 1
        assert [b.digest(step)[0] != one[0] for step, one in zip((5, 6, 7), seen, strict=True)].count(True) == 1
        b.weight[flipped] = 0
    assert [b.digest(step) for step in (5, 6, 7)] == seen
    for group in (a, b):
        group.check.shutdown(5.0)


def test_a_large_tensor_is_compared_in_the_same_parts_however_it_lies_in_memory() -> None:
    """As the moments of a transposed weight, which are contiguous where they were received."""
    here = torch.arange(PART_BYTES // 2).view(-1, 1024).t()
    votes = []
    for value in (here, here.contiguous()):
        check, parts = EqualityCheck(StateDictLock(), KnownLeaves()), []
        for step in range(4):
            check.begin(StateVersion(step=step, quorum_id=1), [CheckedLeaf("a", "exp_avg", value)])
            parts.append(check.digest())
        votes.append(parts)
        check.shutdown(5.0)
    assert votes[0] == votes[1] and len(set(votes[0])) == 4


def test_a_layout_tells_the_first_parameters_by_their_places_and_counts_the_places_of_all() -> None:
    def layout(*places: str) -> ParameterLayout:
        named = [(f"parameter {n}, {place}", torch.zeros(2, 2)) for n, place in enumerate(places)]
        return layout_of(named, only_sharded=False)

    places = [f"default.model.layers.{number}.attention.weight" for number in range(60)]
    here = layout(*places)
    assert here.text.startswith("parameter 0, default.model.layers.0.attention.weight: 2x2 float32; parameter 1, ")
    assert here.text.endswith("; parameter 59: 2x2 float32") and len(here.text) < 4000
    assert here == layout(*places)
    assert here.digest != layout(*places[:-2], places[-1], places[-2]).digest
