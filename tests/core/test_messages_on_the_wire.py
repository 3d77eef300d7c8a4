"""Messages survive the wire, and whatever else comes from it is a `ProtocolError` that names the peer."""

from __future__ import annotations

from functools import cache
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import answers
from support.thoroughness import by_default

from torchft_ckpt.core.coordination import messages
from torchft_ckpt.core.coordination.messages import (
    MAX_MESSAGE_BYTES,
    CommitVote,
    FromLighthouse,
    GroupToRank,
    Hello,
    LocateState,
    QuorumFormed,
    QuorumRequest,
    RankHello,
    RankToGroup,
    Source,
    StateVersion,
    ToLighthouse,
    clip,
    decode_from_lighthouse,
    decode_group_to_rank,
    decode_rank_to_group,
    decode_to_lighthouse,
    encode,
    group_name,
    name_some,
)
from torchft_ckpt.errors import ProtocolError

COUNTS = st.integers(0, (1 << 53) - 1)
RANKS = st.integers(0, 999)
GROUPS = st.integers(1000, 65536)
PRINTABLE = st.characters(codec="utf-8", exclude_categories=("C", "Z"))
TEXTS = st.text(PRINTABLE, max_size=20)
PLACES = st.sampled_from(["", "host:1", "[::1]:65535", "127.0.0.1:29500"])
SECONDS = st.floats(0, 1e9)
DIGESTS = st.text("0123456789abcdef", max_size=32)
VERSIONS = st.builds(StateVersion, step=COUNTS, quorum_id=COUNTS, epoch=TEXTS)
NAMES = st.text(PRINTABLE.filter(lambda one: not "\U000e0000" <= one <= "\U000e0fff"), min_size=1, max_size=20)
SOURCES = st.builds(Source, replica_id=NAMES, replica_rank=RANKS, checkpoint_addresses=st.lists(TEXTS, max_size=3))
SHOWN = st.builds(
    messages.StateShown,
    owned=DIGESTS,
    common=DIGESTS,
    open=st.lists(st.builds(messages.Leaf, name=TEXTS, digest=DIGESTS), max_size=3),
    own=st.lists(st.builds(messages.Leaf, name=TEXTS, digest=DIGESTS), max_size=3),
)
NODES = st.lists(st.integers(0, messages.MAX_MICROBATCHES), max_size=8, unique=True).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


DAMAGED = st.dictionaries(st.sampled_from(["", "step-7", "schön"]), TEXTS, max_size=2)
STARTS = st.builds(
    messages.Starts,
    damaged=DAMAGED,
    failed=st.lists(NAMES, max_size=2),
    checkpoint_addresses=st.lists(TEXTS, max_size=2),
)
TOLD = st.builds(messages.StartTold, does=st.sampled_from(messages.Start), damaged=DAMAGED)


@cache
def any_of(union: object) -> st.SearchStrategy[object]:
    """Made once: to make and look through the strategies of all fields takes longer than to draw from them."""
    return st.one_of([strategy(kind) for kind in get_args(union)])


def strategy(message: type) -> st.SearchStrategy[object]:
    special: dict[str, st.SearchStrategy[object]] = {
        "replica_id": NAMES,
        "version": VERSIONS,
        "rolled_back_to": VERSIONS,
        "names": VERSIONS,
        "group_rank": st.integers(0, 65535),
        "group_world_size": st.integers(1, 65536),
        "heartbeat_timeout_s": st.floats(messages.MIN_HEARTBEAT_TIMEOUT_S, 1e9),
        "store_address": PLACES.filter(bool) if message is messages.ConnectBeside else PLACES,
        "metrics_address": PLACES,
        "replica_rank": RANKS,
        "replica_world_size": GROUPS,
        "num_contributors": GROUPS,
        "num_proved": RANKS,
        "num_held": GROUPS,
        "num_voters": COUNTS if message is CommitVote else GROUPS,
        "patience_s": SECONDS,
        "waited_s": SECONDS,
        "leads_for_s": st.none() | SECONDS,
        "checkpoint_addresses": (st.nothing() if message is messages.Hello else st.none())
        | st.lists(TEXTS, max_size=3),
        "destinations": st.lists(RANKS, max_size=3),
        "issued": st.lists(COUNTS, max_size=3),
        "need": st.builds(messages.Need, reach_s=st.none() | SECONDS, load_s=SECONDS),
        "layout": st.builds(messages.Layout, digest=TEXTS, text=st.none() | TEXTS, frozen=TEXTS),
        "on_replicas_differ": st.sampled_from(messages.OnReplicasDiffer),
        "state_digests": st.lists(DIGESTS, max_size=3),
        "shows": st.sampled_from(messages.Shows),
        "shown": st.lists(SHOWN, max_size=2),
        "kinds": st.lists(st.sampled_from(["", "0", "0,1"]), max_size=messages.MAX_TURNS),
        "group_names": st.lists(NAMES, max_size=3),
        "leaves": st.lists(st.builds(messages.Leaf, name=TEXTS, digest=DIGESTS), max_size=3)
        if message is messages.LeafDigests
        else st.builds(messages.LeavesFound, common=st.lists(TEXTS, max_size=3), own=st.lists(TEXTS, max_size=3)),
        "meets": st.builds(messages.Meeting, store_address=PLACES, place=TEXTS, standby_store_address=PLACES),
        "why": st.sampled_from(messages.Given),
        "contributor_rank": st.none() | RANKS,
        "contributors": st.lists(RANKS, max_size=3),
        "role": st.sampled_from([messages.Role.HEALTHY, messages.Role.IDLE]),
        "outcome": st.sampled_from(messages.Outcome),
        "does": st.sampled_from(messages.Receives),
        "last_outcome": st.none() | st.sampled_from(messages.Outcome),
        "sources": st.lists(SOURCES, max_size=2),
        "nodes": NODES if message is QuorumRequest else st.just([]),
        "starts": st.none() | (TOLD if message is messages.StateLocated else STARTS),
        "words": st.lists(TEXTS, max_size=3),
    }
    fields: dict[str, st.SearchStrategy[object]] = {}
    for field in msgspec.structs.fields(message):
        if field.name in special:
            fields[field.name] = special[field.name]
        elif field.name == "join_stall_limit_s":
            fields[field.name] = st.none() | SECONDS
        elif field.name in ("reach_s", "stood_s", "top_s", "held_s", "computed_s", "reduced_s"):
            fields[field.name] = SECONDS
        elif field.type is bool:
            fields[field.name] = st.booleans()
        elif "Count" in str(field.type) or str(field.type).find("int") >= 0:
            fields[field.name] = COUNTS
        else:
            fields[field.name] = TEXTS
    if message is messages.StateGiven:
        fields["sources"] = st.lists(SOURCES, min_size=1, max_size=2)
    return st.builds(message, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("union", "decode"),
    [
        (ToLighthouse, decode_to_lighthouse),
        (FromLighthouse, decode_from_lighthouse),
        (RankToGroup, decode_rank_to_group),
        (GroupToRank, decode_group_to_rank),
    ],
    ids=["to lighthouse", "from lighthouse", "rank to group", "group to rank"],
)
@settings(max_examples=by_default(40, thorough=100), deadline=None)
@given(data=st.data())
def test_every_message_comes_out_as_it_went_in(union: object, decode: object, data: st.DataObject) -> None:
    message = data.draw(any_of(union))
    assert decode(encode(message), "peer") == message  # type: ignore[operator]


@pytest.mark.parametrize(
    "name", ["train_ddp_0:6d1f4c1e-9a65-4c2c-8d8c-0f6f5f1f9f58", "group 7", "grüße:1", "日本:1", "a" * 512]
)
def test_names_that_people_give_to_groups_are_taken(name: str) -> None:
    hello = Hello(protocol=1, replica_id=name)
    assert decode_to_lighthouse(encode(hello), "peer") == hello


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        (
            Hello(protocol=1, replica_id="a", last_quorum_id=2**53 - 1),
            Hello(protocol=1, replica_id="a", last_quorum_id=2**53),
        ),
        (
            Hello(protocol=1, replica_id="a", newest_step=2**53 - 1),
            Hello(protocol=1, replica_id="a", newest_step=2**53),
        ),
        (
            LocateState(request_id=1, version=StateVersion(step=2**53 - 1)),
            LocateState(request_id=1, version=StateVersion(step=2**53)),
        ),
        (
            Hello(protocol=1, replica_id="a", rolled_back_to=StateVersion(quorum_id=2**53 - 1)),
            Hello(protocol=1, replica_id="a", rolled_back_to=StateVersion(quorum_id=2**53)),
        ),
        (
            Hello(protocol=1, replica_id="a", checkpoint_addresses=["http://[2001:db8::1]:65535," * 140] * 64),
            Hello(protocol=1, replica_id="a", checkpoint_addresses=["a" * 4096] * 64),
        ),
        (
            Hello(protocol=1, replica_id="a", checkpoint_addresses=["\x01" * 600] * 64),
            Hello(protocol=1, replica_id="a", checkpoint_addresses=["\x01" * 700] * 64),
        ),
        (
            Hello(protocol=1, replica_id="a", store_address="[::1]:65535"),
            Hello(protocol=1, replica_id="a", store_address="host:65536"),
        ),
    ],
    ids=["quorum id", "newest step", "version", "went back to", "addresses", "addresses as JSON", "store"],
)
def test_less_is_taken_than_a_message_can_carry(taken: ToLighthouse, refused: ToLighthouse) -> None:
    """So that what is made of it, or said of four groups at once, can be sent."""
    assert decode_to_lighthouse(encode(taken), "peer") == taken
    with pytest.raises(ProtocolError, match="peer sent"):
        decode_to_lighthouse(encode(refused), "peer")


FORMED = QuorumFormed(
    request_id=1,
    quorum_id=1,
    epoch="e",
    version=StateVersion(),
    role=messages.Role.HEALTHY,
    replica_rank=1,
    replica_world_size=2,
    contributor_rank=1,
    num_contributors=2,
    num_voters=2,
    meets=messages.Meeting(store_address="host:1"),
)
GIVEN = answers.given(1, StateVersion())
WELCOME = messages.Welcome(protocol=1, epoch="e", heartbeat_timeout_s=5.0)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (FORMED, {"replica_world_size": 1 << 61}),
        (FORMED, {"replica_world_size": 65537}),
        (FORMED, {"replica_rank": 7}),
        (FORMED, {"contributor_rank": 2}),
        (FORMED, {"num_contributors": 1 << 61}),
        (FORMED, {"role": "learner"}),
        (FORMED, {"meets": {"store_address": "no port here"}}),
        (FORMED, {"meets": {"store_address": "127.0.0.1:1/../../x"}}),
        (FORMED, {"meets": {"store_address": "host:1", "standby_store_address": "https://host:1"}}),
        (FORMED, {"destinations": [1 << 61]}),
        (GIVEN, {"sources": []}),
        (GIVEN, {"why": "to see it"}),
        (WELCOME, {"heartbeat_timeout_s": 0.0}),
        (WELCOME, {"store_address": "host"}),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_lighthouse_that_says_what_cannot_be_is_named_and_nothing_is_made_of_it(
    message: FromLighthouse, wrong: dict[str, object]
) -> None:
    assert decode_from_lighthouse(encode(message), "the lighthouse") == message
    text = msgspec.json.encode({**msgspec.to_builtins(message), **wrong})
    with pytest.raises(ProtocolError, match="the lighthouse sent a message that cannot be read") as raised:
        decode_from_lighthouse(text, "the lighthouse")
    assert "regex" not in str(raised.value)


HOSTILE = "g\x1b]0;owned\x07\x1b[2J\x9b1m\u202e\n2026-01-01 INFO forged"


def test_no_escape_sequence_and_no_forged_line_gets_past_the_door() -> None:
    """A name is refused, because it is compared and may not be altered. A text is taken with its escapes written out."""
    for name in HOSTILE, "a\n", "\x7f", "\u200b":
        with pytest.raises(ProtocolError) as raised:
            decode_to_lighthouse(encode(Hello(protocol=1, replica_id=name)), "peer")
        assert str(raised.value).isprintable()
    with pytest.raises(ProtocolError) as raised:
        decode_to_lighthouse('{"type":"\\u001b[31mHello"}', "peer")
    assert str(raised.value).isprintable()
    left = decode_to_lighthouse(encode(messages.Leave(HOSTILE)), "peer")
    assert isinstance(left, messages.Leave)
    assert left.reason == r"g\x1b]0;owned\x07\x1b[2J\x9b1m\u202e\n2026-01-01 INFO forged"
    asked = QuorumRequest(request_id=1, version=StateVersion(), layout=messages.Layout(text=HOSTILE, frozen="\x1b"))
    assert decode_to_lighthouse(encode(asked), "peer").layout == messages.Layout(text=left.reason, frozen=r"\x1b")
    refused = decode_from_lighthouse(encode(messages.Refused(code="x", reason="\x1b" * 4096)), "the lighthouse")
    assert isinstance(refused, messages.Refused)
    assert (refused.reason.isprintable(), len(refused.reason)) == (True, 4096)
    assert clip("a\nb") == r"a\nb"


GOOD = encode(Hello(protocol=1, replica_id="a"))


@settings(max_examples=by_default(100, thorough=300), deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200))
@example(b"")
@example(b"\xff\xfe")
@example("\ud800")
@example("[" * 100_000)
@example('{"type":"Hello"')
@example('{"type":"NoSuchMessage"}')
@example('{"type":"Hello","protocol":1}')
@example('{"type":"Hello","protocol":-1,"replica_id":"a"}')
@example('{"type":"Hello","protocol":99999999999999999999999,"replica_id":"a"}')
@example('{"type":"Hello","protocol":1.5,"replica_id":"a"}')
@example('{"type":"Hello","protocol":1,"replica_id":""}')
@example('{"type":"Hello","protocol":1,"replica_id":"' + "a" * 513 + '"}')
@example('{"type":"Hello","protocol":1,"replica_id":"a","group_world_size":0}')
@example('{"type":"Hello","protocol":1,"replica_id":"a","last_outcome":"maybe"}')
@example('{"type":"QuorumRequest","request_id":1,"version":{},"top_s":-1}')
@example('{"type":"QuorumRequest","request_id":1,"version":{},"top_s":1e300}')
@example('{"type":"QuorumRequest","request_id":1,"version":{},"top_s":NaN}')
@example('{"type":"Leave","reason":"' + "a" * 5000 + '"}')
@example('{"type":"Leave","reason":"\\ud800"}')
@example('{"type":"Hello","protocol":1,"replica_id":"a","on_replicas_differ":"explode"}')
@example('{"type":"CommitVote","quorum_id":1,"epoch":"","step":1,"approve":true,"state_digests":["' + "a" * 33 + '"]}')
@example(
    '{"type":"LeafDigests","version":{},"leaves":[' + '{"name":"","digest":""},' * 4096 + '{"name":"","digest":""}]}'
)
@example("{" + " " * (MAX_MESSAGE_BYTES + 1) + "}")
def test_hostile_input_is_a_protocol_error_that_names_the_peer(data: str | bytes) -> None:
    for decode in (decode_to_lighthouse, decode_from_lighthouse, decode_rank_to_group, decode_group_to_rank):
        error = None
        try:
            decode(data, "peer 7")
        except ProtocolError as raised:
            error = raised
        assert error is None or (error.party == "peer 7" and "peer 7" in str(error))


@pytest.mark.parametrize("num_still", [0, 1, 2, 2**31])
def test_no_more_leaves_stood_still_than_are_shown(num_still: int) -> None:
    shown = f'{{"owned":"x","open":[{{"name":"ema","digest":"1"}}],"num_still":{num_still}}}'
    data = f'{{"type":"QuorumRequest","request_id":1,"version":{{}},"shown":[{shown}]}}'
    if num_still <= 1:
        assert decode_to_lighthouse(data, "peer 7").shown[0].num_still == num_still
        return
    with pytest.raises(ProtocolError, match=f"`num_still` is {num_still} of 1"):
        decode_to_lighthouse(data, "peer 7")


@pytest.mark.parametrize("character", '"{}:,x0\\')
def test_a_flipped_character_is_a_protocol_error_or_changes_one_field(character: str) -> None:
    good = decode_to_lighthouse(GOOD, "peer")
    for position in range(len(GOOD)):
        text = GOOD[:position] + character + GOOD[position + 1 :]
        try:
            message = decode_to_lighthouse(text, "peer")
        except ProtocolError:
            continue
        assert isinstance(message, Hello), text
        changed = [name for name in Hello.__struct_fields__ if getattr(message, name) != getattr(good, name)]
        assert len(changed) <= 1, (text, changed)
        assert decode_to_lighthouse(encode(message), "peer") == message, text


def test_a_message_that_is_not_for_this_side_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_to_lighthouse(encode(RankHello(protocol=1, group_rank=0)), "peer")


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    text = GOOD[:-1] + ',"later":[1,2,3]}'
    assert decode_to_lighthouse(text, "peer") == Hello(protocol=1, replica_id="a")


def test_versions_of_one_step_are_ordered_by_quorum_and_steps_come_first() -> None:
    versions = [
        StateVersion(step=2, quorum_id=1),
        StateVersion(step=1, quorum_id=9),
        StateVersion(step=1, quorum_id=2),
    ]
    assert sorted(versions) == [versions[2], versions[1], versions[0]]


def test_a_quoted_text_stays_short_enough_to_be_sent_on() -> None:
    assert clip("a" * 600) == "a" * 600
    assert len(clip("a" * 601)) == 600
    assert len(name_some(["n" * 512] * 100)) < 600
    assert name_some(["a", "b"]) == "a, b"


def test_a_group_keeps_its_name_over_its_incarnations() -> None:
    assert [group_name(i) for i in ("g:uuid", "host:1:uuid", "plain", ":x")] == ["g", "host:1", "plain", ":x"]


def test_votes_say_by_default_that_they_count() -> None:
    assert CommitVote(quorum_id=1, epoch="e", step=0, approve=True).counts
    assert QuorumFormed.__struct_config__.frozen


def test_the_addresses_of_a_group_are_encoded_once_for_all_who_are_told_them() -> None:
    lists = [[f"http://10.0.0.{number}:1"] for number in range(20)]
    for addresses in lists:
        assert messages._encoded(addresses) is messages._encoded(addresses)
        assert msgspec.json.decode(messages._encoded(addresses)) == addresses
    assert len(messages._latest_encoded) <= 8


def test_names_of_leaves_are_encoded_once_for_all_who_are_told_them() -> None:
    """A thousand members were told 360 MiB of names, which a lighthouse encoded for each: 0.8 s, in which all jobs stood."""
    names = [f"layer {number}" for number in range(4000)]
    leaves = messages.LeavesFound(common=names, own=names)
    formed = [msgspec.structs.replace(FORMED, replica_rank=rank, leaves=leaves) for rank in range(2)]
    for message in formed:
        assert messages.decode_from_lighthouse(messages.encode(message), "it") == message
    assert messages._latest_encoded[id(leaves)][0] is leaves
