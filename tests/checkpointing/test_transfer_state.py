"""Who is the primary source next, when the one that was is lost: one at a time, whatever happens between two steps of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchft_ckpt.checkpointing.fetching.block_transfer import BlockTransfer
from torchft_ckpt.errors import SourceLostError

MANIFEST: Any = SimpleNamespace(step=7, block_bytes=4096, total_bytes=8192, tensors=[])
OF_B, OF_C = ({0: letter * 16, 1: letter * 16} for letter in (b"b", b"c"))


def begun() -> BlockTransfer:
    """A transfer of two blocks from a, with b beside it, that has lost a; c answers late."""
    state = BlockTransfer(["a", "b", "c"], seed=1)
    assert state.choose_primary("a", MANIFEST)
    destination: Any = SimpleNamespace(
        num_blocks=2, is_equal=lambda: False, manifest=MANIFEST, retarget=lambda _: None, names_of=lambda _: ["t"]
    )
    state.begin("a", destination, {}, {}, (0, 1))
    assert not state.choose_primary("b", MANIFEST)
    state.add_replica("b")
    state.learn_digests("b", OF_B)
    state.fail_source("a", SourceLostError("a is gone", "a"))
    return state


def test_who_answers_while_a_heir_is_being_asked_for_its_digests_is_a_replica():
    state = begun()
    assert state.next_candidate() == "b"
    assert state.next_candidate() is None, "it is named once"
    assert not state.choose_primary("c", MANIFEST)
    state.promote("b", OF_B)
    assert state.primary == "b"


def test_who_comes_late_with_digests_does_not_take_the_place_of_the_primary():
    state = begun()
    assert state.next_candidate() == "b"
    state.promote("b", OF_B)
    state.promote("c", OF_C)
    assert state.primary == "b"
    stream = state.open_stream("b", "b")
    state.arrived(stream, "b", "b", 0, OF_B[0])  # it is not to blame for what it sends
    assert state.arrived_text() == "1 of 2 blocks"


def test_a_heir_that_fails_makes_room_for_the_next():
    state = begun()
    assert state.next_candidate() == "b"
    state.fail_source("b", SourceLostError("b is gone", "b"))
    assert state.choose_primary("c", MANIFEST)
    state.promote("c", OF_C)
    assert state.primary == "c"


def test_a_fetch_that_begins_again_meets_the_receivers_again():
    """The one that began was lost, and the next one's tensors lie otherwise: what others hold of those is another state."""
    state = begun()
    assert state.meet_peers({"peer": 0b11}, 0) == ["peer"]
    assert state.meet_peers({"peer": 0b11}, 0) == []
    first = state.begun()
    assert first is None, "the primary is lost"
    state.fail_source("b", SourceLostError("b is gone", "b"))
    state._manifests["c"] = MANIFEST
    assert state.await_restart("c")
    destination: Any = SimpleNamespace(num_blocks=2, is_equal=lambda: False, manifest=MANIFEST)
    state.begin("c", destination, {}, {}, (0, 1))
    assert state.begun() == ("c", MANIFEST, destination)
    assert state.meet_peers({"peer": 0b01}, 0) == ["peer"]


def test_what_would_be_served_on_of_a_state_that_was_begun_before_is_not():
    state = begun()
    closed: list[bool] = []
    relay: Any = SimpleNamespace(close=lambda: closed.append(True))
    before: Any = SimpleNamespace()
    state.attach(relay, before)
    assert (closed, state.relay) == ([True], None)
