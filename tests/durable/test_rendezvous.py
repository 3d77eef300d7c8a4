"""What members tell each other is checked: blobs that are none, too long, or not what they say are nobody's word."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable

import msgspec
import pytest
from support.ports import reserved_port
from torch.distributed import PrefixStore, TCPStore

from torchft_ckpt.checkpointing.durable.cooperative_read import plan, rendezvous
from torchft_ckpt.checkpointing.durable.cooperative_read.rendezvous import MAX_BLOB_BYTES, KeyValueStore, Rendezvous
from torchft_ckpt.errors import ConfigError, SourceLostError, SourceRefusedError


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Word(msgspec.Struct, forbid_unknown_fields=True):
    word: str


decode = msgspec.json.Decoder(Word).decode


def test_blobs_of_any_length_arrive_as_they_were(store: TCPStore) -> None:
    client = KeyValueStore(PrefixStore("a", store), "round1/")
    for data in (b"", b"x", os.urandom(9 << 20), b"0" * (20 << 20)):
        client.put(f"blob{len(data)}", data)
        assert client.get(f"blob{len(data)}", 1.0) == data
    assert KeyValueStore(PrefixStore("a", store), "round2/").get("blob1", 0.0) is None


def test_a_blob_is_waited_for(store: TCPStore) -> None:
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    timer = threading.Timer(0.2, lambda: KeyValueStore(store).put("late", b"here"))
    timer.start()
    assert KeyValueStore(client).get("late", 10.0) == b"here"
    assert KeyValueStore(client).get("never", 0.05) is None
    timer.join()


def test_who_waits_keeps_no_other_thread_from_its_word(store: TCPStore) -> None:
    """Else the first member, which waits for the others, could not show them that it lives: they gave it up, under load."""
    client = KeyValueStore(store)
    waiting = threading.Thread(target=client.get, args=("last", 60.0))
    waiting.start()
    started_at = time.monotonic()
    for number in range(30):  # each would wait for the end of the store's own wait: seconds
        client.put("beat", str(number).encode())
        time.sleep(0.02)
    took_s = time.monotonic() - started_at
    client.put("last", b"")
    waiting.join(60)
    assert not waiting.is_alive()
    assert took_s < 20


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
    assert KeyValueStore(store).get("key", 0.1) is None


def test_the_first_members_word_holds_for_all(store: TCPStore) -> None:
    members = [Rendezvous(KeyValueStore(store), number, 3, 0.1) for number in range(3)]
    with pytest.raises(
        SourceLostError, match="member 0, which leads the cold start, has said nothing about who in time"
    ):
        members[2].agree("who", decode)
    assert members[0].agree("who", decode, Word("all")) == Word("all")
    assert [member.agree("who", decode) for member in members[1:]] == [Word("all")] * 2


def test_a_first_member_that_is_gone_is_not_waited_for_and_its_last_word_still_holds(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "WAIT_SLICE_S", 0.1)
    members = [Rendezvous(KeyValueStore(store), number, 2, 0.2) for number in range(2)]
    members[0].start_leading()
    members[0].publish("last", Word("all"))
    members[0].stop_leading()
    for _ in range(2):  # whenever it is looked for
        assert members[1].agree("last", decode, patience_s=600.0) == Word("all")
        with pytest.raises(SourceLostError, match="member 0, which leads the cold start, is gone"):
            members[1].agree("next", decode, patience_s=600.0)


def test_a_first_member_that_lives_is_waited_for_however_long_one_did_not_look(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    leader, other = (Rendezvous(KeyValueStore(store), number, 2, 30.0) for number in range(2))
    assert not other.is_gone(0), "it has not come"
    leader.store.put("beat/0", b"1")
    assert not other.is_gone(0)
    now[0] = 31.0
    assert other.is_gone(0)
    leader.store.put("beat/0", b"2")
    assert not other.is_gone(0), "it was only slow"
    now[0] = 900.0  # this one reads its share
    assert other.collect("topic", decode, [0], patience_s=0.0) == {}
    assert not other.is_gone(0), "it is looked for since now"
    now[0] = 931.0
    assert other.is_gone(0)
    assert not Rendezvous(KeyValueStore(store), 1, 2, 30.0).is_gone(0), "this one looks for the first time"


@pytest.mark.slow
def test_a_first_member_that_has_failed_is_not_waited_for(store: TCPStore) -> None:
    leader, other = (Rendezvous(KeyValueStore(store), number, 2, 600.0) for number in range(2))
    leader.start_leading()
    leader.publish("last", Word("all"))
    leader.fail("no descriptors at /data/\udcff")
    assert other.agree("last", decode) == Word("all")
    with pytest.raises(SourceLostError, match=r"which leads the cold start, failed: no descriptors at /data/\?"):
        other.agree("next", decode)
    leader.stop_leading()


def test_one_failed_probe_after_a_long_time_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(socket, "create_connection", lambda *args, **kwargs: socket.socket())
    member = Rendezvous(None, 0, 2, 30.0)  # type: ignore[arg-type]
    member.addresses[1] = "http://127.0.0.1:1"
    assert not member.is_gone(1)

    def fails(*args: object, **kwargs: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", fails)
    now[0] = 60.0
    assert not member.is_gone(1)
    now[0] = 91.0
    assert member.is_gone(1)


def test_what_a_member_says_last_is_heard_though_it_is_gone_when_it_is_looked_for(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It publishes, and ends, after it was heard for the last time and before it is looked for at its address."""
    first, second = (Rendezvous(KeyValueStore(store), number, 2, 0.2) for number in range(2))

    def ends(member: int) -> bool:
        first.publish("last", Word("all"))
        return True

    monkeypatch.setattr(second, "is_gone", ends)
    assert second.agree("last", decode) == Word("all")


def test_a_word_that_cannot_be_read_is_as_if_it_were_not_said(store: TCPStore) -> None:
    members = [Rendezvous(KeyValueStore(store), member, 4, 0.1) for member in range(4)]
    members[1].publish("topic", Word("yes"))
    KeyValueStore(store).put("topic/2", b'{"word": 1}')
    assert {member: word.word for member, word in members[0].collect("topic", decode, range(4)).items()} == {1: "yes"}


@pytest.mark.slow
def test_who_listens_no_more_is_not_waited_for(store: TCPStore) -> None:
    member = Rendezvous(KeyValueStore(store), 0, 2, 600.0)
    with reserved_port() as port:
        member.addresses[1] = f"http://127.0.0.1:{port}"
        assert member.collect("topic", decode, [0, 1]) == {}


def test_a_store_that_is_gone_is_a_lost_source(store: TCPStore) -> None:
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = KeyValueStore(TCPStore("127.0.0.1", own.port, is_master=False, wait_for_workers=False))
    client.put("a", b"b")
    del own
    for act in (
        lambda: client.get("a", 1.0),
        lambda: client.put("c", b"d"),
        lambda: client.settle("e", b"f"),
    ):
        with pytest.raises(SourceLostError, match="the store at which the members meet"):
            act()


def test_words_that_would_fill_the_memory_are_refused_when_they_are_read() -> None:
    contact = '"contact":{"address":"","identity":"%s","nonce":""}' % ("0" * 32)
    for num_checkpoints, num_parts in ((plan.MAX_CANDIDATES + 1, 0), (1, (1 << 16) + 1)):
        seen = {f"step-{number}": ["part"] * num_parts for number in range(num_checkpoints)}
        hello = f'{{{contact},"checkpoints":{msgspec.json.encode(seen).decode()}}}'
        with pytest.raises(msgspec.ValidationError, match="length <="):
            plan._decode_hello(hello.encode())
    with pytest.raises(msgspec.ValidationError, match="num_batches"):
        plan._decode_word(b'{"type":"plan","checkpoint":"","num_batches":33,"readers":{}}')


def test_a_member_has_a_number_of_the_job(store: TCPStore) -> None:
    with pytest.raises(ConfigError):
        Rendezvous(KeyValueStore(store), 2, 2, 1.0)


def sealed(store: TCPStore, *, token: str = "secret", run: str = "run", prefix: str = "") -> KeyValueStore:
    return KeyValueStore(store, prefix, token=token, run=run)


@pytest.mark.parametrize(
    "stranger",
    [
        lambda store: KeyValueStore(store).put("seen/1", b"mine"),
        lambda store: sealed(store, token="guess").put("seen/1", b"mine"),
        lambda store: copied(store, "seen/2", "seen/1"),
        lambda store: copied(store, "earlier/seen/1", "seen/1"),
        lambda store: sealed(store, run="earlier run").put("seen/1", b"old"),
        lambda store: copied(store, "wants/1", "seen/1"),
        lambda store: store.set("seen/1/chunk0", zlib.compress(b"altered")),
        lambda store: store.set("seen/1", store.get("seen/1").replace(b'"proof"', b'"Proof"')),
    ],
    ids=[
        "no token",
        "another token",
        "another member",
        "another start",
        "another run",
        "another topic",
        "bytes",
        "form",
    ],
)
def test_what_no_member_said_here_and_now_is_not_believed(
    store: TCPStore, stranger: Callable[[TCPStore], object], caplog: pytest.LogCaptureFixture
) -> None:
    member = sealed(store)
    for key in ("seen/1", "seen/2", "wants/1"):
        member.put(key, f"of {key}".encode())
    sealed(store, prefix="earlier/").put("seen/1", b"old")
    assert member.get("seen/1", 0.0) == b"of seen/1"
    stranger(store)
    assert sealed(store).get("seen/1", 0.0) is None
    member.put("seen/1", b"of seen/1")
    assert sealed(store).get("seen/1", 0.0) == b"of seen/1", "what takes its place is believed again"


def copied(store: TCPStore, source: str, target: str) -> None:
    for suffix in ("", "/chunk0"):
        store.set(target + suffix, store.get(source + suffix))  # type: ignore[arg-type]


def test_a_member_says_its_word_over_what_a_stranger_wrote(store: TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    KeyValueStore(store).put("topic/1", b'{"word": "false"}')
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    timer = threading.Timer(0.2, lambda: Rendezvous(sealed(client), 1, 2, 9.0).publish("topic", Word("true")))
    timer.start()
    listening = sealed(store)
    assert listening.get("topic/1", 9.0) == b'{"word":"true"}', "what was there before is not the last word"
    timer.join()
    assert Rendezvous(listening, 0, 2, 9.0).collect("topic", decode, [1]) == {1: Word("true")}
    assert [record.getMessage() for record in caplog.records if "topic/1" in record.getMessage()] == [
        "what is in the store about topic/1 is not believed: it was not put there in this run by who knows our token"
    ], "it was said once"


@pytest.mark.parametrize("settled", [b"{}", b"\xff", b"x" * 64, b"0" * 64 + b"mine", "é".encode() * 64])
def test_what_a_stranger_settled_binds_nobody(store: TCPStore, settled: bytes) -> None:
    store.set("who", settled)  # type: ignore[arg-type]
    with pytest.raises(SourceRefusedError, match="not put into the store in this run by who knows our token"):
        sealed(store).settle("who", b"mine")
    assert sealed(store).settle("other", b"mine") == b"mine" == sealed(store).settle("other", b"later")
    with pytest.raises(SourceRefusedError):
        sealed(store, run="later run").settle("other", b"mine")
    assert KeyValueStore(store).settle("open", b"mine") == b"mine" == KeyValueStore(store).settle("open", b"later")


def test_what_was_said_before_the_members_met_is_said_to_nobody(store: TCPStore) -> None:
    """The run may have the name of an earlier one: who can write to the store may have chosen it."""
    members = [Rendezvous(sealed(store), member, 2, 0.1) for member in range(2)]
    members[1].publish("topic", Word("old"))
    for member in members:
        member.bind({0: "a", 1: "b"})
    assert members[0].collect("topic", decode, [1]) == {}
    members[1].publish("topic", Word("new"))
    assert members[0].collect("topic", decode, [1]) == {1: Word("new")}
    members[0].bind({0: "a", 1: "c"})
    assert members[0].collect("topic", decode, [1]) == {}
