"""What groups have computed of a step that was discarded: all members of the next quorum are told, and nobody decides by it."""

from __future__ import annotations

import json

import msgspec
import pytest
from lighthouse_script import Job, they_ask, they_vote
from test_group_state import request
from test_lighthouse_scenarios import trained

from torchft_ckpt.core.coordination.group import GroupState, RankMessage, SendToLighthouse
from torchft_ckpt.core.coordination.messages import (
    MAX_GROUPS,
    MAX_NODES,
    MAX_NODES_TOLD,
    Outcome,
    QuorumFormed,
    decode_from_lighthouse,
    decode_to_lighthouse,
    encode,
)
from torchft_ckpt.errors import ProtocolError


def test_a_step_in_which_nobody_has_computed_anything_tells_nothing() -> None:
    _, (a, b) = trained("a", "b")
    they_ask(a, b)
    assert a.formed is not None and b.formed is not None
    assert a.formed.nodes == b.formed.nodes == []


def test_those_who_try_a_step_again_are_all_told_what_each_has_of_it() -> None:
    _, (a, b, c) = trained("a", "b", "c")
    they_ask(a, b, c)
    c.dies()
    they_vote(a, b, error="a collective failed")
    a.asks(nodes=[(0, 4)])
    b.asks(nodes=[(8, 10), (4, 8)])
    assert a.formed is not None and b.formed is not None
    assert a.formed.nodes == b.formed.nodes == [[(0, 4)], [(4, 8), (8, 10)]]
    they_vote(a, b)
    assert [member.outcomes[-1] for member in (a, b)] == [Outcome.COMMIT] * 2


def test_who_asks_for_a_state_and_for_no_step_has_computed_nothing_of_it() -> None:
    _, (a, b) = trained("a", "b")
    a.asks(nodes=[(0, 1)], at_end=True)
    assert a.replica.quorum is not None
    b.asks()
    assert b.formed is None or b.formed.nodes == []


def test_a_group_has_what_all_of_its_ranks_have() -> None:
    group = GroupState(2)
    asked = [msgspec.structs.replace(request(), nodes=nodes) for nodes in ([(0, 2), (4, 5)], [(0, 2), (2, 3), (4, 6)])]
    said = [one for rank in (0, 1) for one in group.handle(RankMessage(rank, asked[rank]))]
    sent = [one.message for one in said if isinstance(one, SendToLighthouse)]
    assert [message.nodes for message in sent] == [[(0, 2)]]


@pytest.mark.parametrize(
    "nodes",
    [
        [[0, 2], [1, 3]],
        [[2, 3], [0, 1]],
        [[1, 1]],
        [[3, 1]],
        [[-1, 1]],
        [[0, 1 << 60]],
        [[0, 65537]],
        [[0]],
        MAX_NODES + 1,
        1_000_000,
    ],
)
def test_nodes_that_overlap_or_are_too_many_or_too_large_are_refused_where_they_are_read(nodes: object) -> None:
    if isinstance(nodes, int):  # made here, and not by each process that collects the tests
        nodes = [[n, n + 1] for n in range(nodes)]
    text = json.dumps({**json.loads(encode(request())), "nodes": nodes})
    with pytest.raises(ProtocolError):
        decode_to_lighthouse(text, "g")


def test_a_lighthouse_that_tells_of_others_than_the_members_or_of_too_much_is_not_believed() -> None:
    _, a = Job.of("a", least=1)
    a.asks()
    assert a.formed is not None
    plain = json.loads(encode(a.formed))
    for nodes in ([[], []], [[[0, 2], [1, 3]]], [None, None]):
        with pytest.raises(ProtocolError):
            decode_from_lighthouse(json.dumps({**plain, "nodes": nodes}), "lighthouse")
    many = {**plain, "replica_world_size": 1000, "num_contributors": 1000}
    full = [[n, n + 1] for n in range(MAX_NODES)]
    told = decode_from_lighthouse(json.dumps({**many, "nodes": [full] * 256 + [[]] * 744}), "lighthouse")
    assert isinstance(told, QuorumFormed) and told == decode_from_lighthouse(encode(told), "lighthouse")
    assert MAX_NODES * 257 > MAX_NODES_TOLD and MAX_GROUPS > 1000
    with pytest.raises(ProtocolError, match="nodes"):
        decode_from_lighthouse(json.dumps({**many, "nodes": [full] * 257 + [[]] * 743}), "lighthouse")


def test_where_more_was_computed_than_can_be_told_nobodys_counts() -> None:
    names = [f"g{number}" for number in range(4)]
    _, members = trained(*names)
    they_ask(*members)
    members[0].dies()
    they_vote(*members[1:], error="a collective failed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchft_ckpt.core.coordination.lighthouse.MAX_NODES_TOLD", 2)
        they_ask(*members[1:], nodes=[(0, 1)])
    assert {member.formed is not None and member.formed.nodes == [] for member in members[1:]} == {True}


def test_what_all_begin_with_is_told_only_if_the_quorum_is_another_one() -> None:
    _, (a, b, c) = trained("a", "b", "c")
    for _ in range(2):  # steps that count
        for place, member in enumerate((a, b, c)):
            member.asks(nodes=[(4 * place, 4 * place + 1)])
        assert a.formed is not None and a.formed.nodes == []
        they_vote(a, b, c)
    b.dies()
    a.asks(nodes=[(0, 1)])
    c.asks(nodes=[(8, 9)])
    assert a.formed.nodes == [[(0, 1)], [(8, 9)]]
    they_vote(a, c, error="an error of its own")
    a.asks(nodes=[(0, 2)])
    c.asks(nodes=[(8, 9)])
    assert a.formed.nodes == [[(0, 2)], [(8, 9)]]  # the same quorum, and a step that is tried again
