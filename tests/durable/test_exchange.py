"""What members tell each other is checked: blobs that are none, too long, or not what they say are nobody's word."""

from __future__ import annotations

import os
import threading
import zlib

import msgspec
import pytest
from support.ports import reserved_port
from torch.distributed import PrefixStore, TCPStore

from torchft_ckpt.checkpointing.durable.together.exchange import MAX_BLOB_BYTES, Meeting, StoreExchange
from torchft_ckpt.errors import ConfigError, SourceLostError, SourceRefusedError


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Word(msgspec.Struct, forbid_unknown_fields=True):
    word: str


decode = msgspec.json.Decoder(Word).decode


def test_blobs_of_any_length_arrive_as_they_were(store: TCPStore) -> None:
    exchange = StoreExchange(PrefixStore("a", store), "round1/")
    for data in (b"", b"x", os.urandom(9 << 20), b"0" * (20 << 20)):
        exchange.put(f"blob{len(data)}", data)
        assert exchange.get(f"blob{len(data)}", 1.0) == data
    assert StoreExchange(PrefixStore("a", store), "round2/").get("blob1", 0.0) is None


def test_a_blob_is_waited_for(store: TCPStore) -> None:
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    timer = threading.Timer(0.2, lambda: StoreExchange(store).put("late", b"here"))
    timer.start()
    assert StoreExchange(client).get("late", 10.0) == b"here"
    assert StoreExchange(client).get("never", 0.05) is None
    timer.join()


@pytest.mark.parametrize(
    "head",
    [
        b"\xff\xfe",
        b"[]",
        b'{"num_chunks": 1, "num_bytes": 4, "digest": "00"}',
        b'{"num_chunks": 99999999, "num_bytes": 4, "digest": "%s"}' % (b"0" * 64),
        b'{"num_chunks": 1, "num_bytes": %d, "digest": "%s"}' % (MAX_BLOB_BYTES + 1, b"0" * 64),
        b'{"num_chunks": 2, "num_bytes": 4, "digest": "%s"}' % (b"0" * 64),
        b'{"num_chunks": 1, "num_bytes": 4, "digest": "%s"}' % (b"0" * 64),
        b'{"num_chunks": 1, "num_bytes": 100000000, "digest": "%s"}' % (b"0" * 64),
    ],
)
def test_what_is_no_blob_is_nobodys_word(store: TCPStore, head: bytes) -> None:
    store.set("key", head)  # type: ignore[arg-type]
    store.set("key/chunk0", zlib.compress(b"0" * 1_000_000))  # type: ignore[arg-type]
    assert StoreExchange(store).get("key", 0.1) is None


def test_the_first_proposal_holds_for_all(store: TCPStore) -> None:
    meetings = [Meeting(StoreExchange(store), member, 4, 0.1) for member in range(4)]
    assert meetings[2].settle("who", [0, 1], "whole") == ((0, 1, 2), "whole")
    assert meetings[0].settle("who", [3], "not whole") == ((0, 1, 2), "whole")
    with pytest.raises(SourceRefusedError, match="did not wait for member 3"):
        meetings[3].settle("who", [0, 1, 2])


@pytest.mark.parametrize("settled", [b"{}", b"\xff", b'{"members": [-1], "word": ""}', b'{"members": [7]}'])
def test_what_was_settled_is_checked_too(store: TCPStore, settled: bytes) -> None:
    store.set("who", settled)  # type: ignore[arg-type]
    with pytest.raises(SourceRefusedError):
        Meeting(StoreExchange(store), 0, 2, 0.1).settle("who", [0, 1])


def test_a_word_that_cannot_be_read_is_as_if_it_were_not_said(store: TCPStore) -> None:
    meetings = [Meeting(StoreExchange(store), member, 4, 0.1) for member in range(4)]
    meetings[1].say("topic", Word("yes"))
    StoreExchange(store).put("topic/2", b'{"word": 1}')
    assert {member: word.word for member, word in meetings[0].hear("topic", decode, range(4)).items()} == {1: "yes"}


def test_who_listens_no_more_is_not_waited_for(store: TCPStore) -> None:
    meeting = Meeting(StoreExchange(store), 0, 2, 600.0)
    with reserved_port() as port:
        meeting.addresses[1] = f"http://127.0.0.1:{port}"
        assert meeting.hear("topic", decode, [0, 1]) == {}


def test_a_store_that_is_gone_is_a_lost_source(store: TCPStore) -> None:
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    exchange = StoreExchange(TCPStore("127.0.0.1", own.port, is_master=False, wait_for_workers=False))
    exchange.put("a", b"b")
    del own
    for act in (
        lambda: exchange.get("a", 1.0),
        lambda: exchange.put("c", b"d"),
        lambda: exchange.settle("e", b"f"),
    ):
        with pytest.raises(SourceLostError, match="the store at which the members meet"):
            act()


def test_a_member_has_a_number_of_the_job(store: TCPStore) -> None:
    with pytest.raises(ConfigError):
        Meeting(StoreExchange(store), 2, 2, 1.0)
