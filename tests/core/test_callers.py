"""Quorums of those who call for them: who is in, what they learn of each other, and which kind of job a lighthouse has."""

from __future__ import annotations

import json

import pytest

from torchft_ckpt.core.coordination.callers import MAX_CALLERS, MAX_MEMBERS_BYTES
from torchft_ckpt.core.coordination.lighthouse import LighthouseState
from torchft_ckpt.core.coordination.lighthouse_events import (
    Close,
    ConnectionClosed,
    LighthouseSettings,
    Received,
    Send,
    Tick,
)
from torchft_ckpt.core.coordination.messages import (
    MAX_DATA_BYTES,
    MAX_DATA_DEPTH,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    CallerHeartbeat,
    CallerHello,
    CallGivenUp,
    Hello,
    Leave,
    QuorumCall,
    QuorumCalled,
    QuorumMember,
    QuorumPending,
    Refused,
    ToLighthouse,
    Welcome,
    decode_from_lighthouse,
    decode_to_lighthouse,
    encode,
    size_of,
)
from torchft_ckpt.errors import ProtocolError


class Job:
    """A lighthouse; what is said on a connection, and what is heard there, in short words."""

    def __init__(self, least: int = 1, *, epoch: str = "life1") -> None:
        settings = LighthouseSettings(min_replicas=least, join_timeout_s=60.0, heartbeat_timeout_s=5.0)
        self.lighthouse = LighthouseState(settings, epoch, unix_time_of_zero=1_000_000.0)
        self.now = 0.0
        self.heard: dict[str, list[str]] = {}
        self.quorums: list[QuorumCalled] = []

    def says(self, connection: str, message: ToLighthouse) -> None:
        self.handle(Received(connection, decode_to_lighthouse(encode(message), connection)))

    def calls(self, *names: str, request_id: int = 1, **member: object) -> None:
        """Each on a connection of its own, which has its name."""
        for name in names:
            if not self.lighthouse.callers.speaks_on(name):
                self.says(name, CallerHello(protocol=PROTOCOL_VERSION))
            self.says(name, call(name, request_id, **member))

    def handle(self, event: Received | ConnectionClosed | Tick) -> None:
        for instruction in self.lighthouse.handle(event, self.now):
            if isinstance(instruction, Close):
                self.heard.setdefault(instruction.connection, []).append("close")
            elif isinstance(instruction, Send):
                message = decode_from_lighthouse(encode(instruction.message), "lighthouse")
                if isinstance(message, QuorumCalled):
                    self.quorums.append(message)
                    names = " ".join(member.replica_id for member in message.quorum.participants)
                    text = f"quorum {message.quorum.quorum_id} of {names} for {message.request_id}"
                elif isinstance(message, QuorumPending | Refused):
                    text = message.reason
                else:
                    text = type(message).__name__
                self.heard.setdefault(instruction.connection, []).append(text)

    def hears(self, name: str) -> list[str]:
        return [text for text in self.heard.pop(name, []) if text != Welcome.__name__]

    def passes(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.lighthouse.next_deadline()) is not None and deadline <= until:
            self.now = deadline
            self.handle(Tick())
        self.now = until


def call(name: str, request_id: int = 1, **member: object) -> QuorumCall:
    last = {key: member.pop(key) for key in ("last_quorum_id", "last_epoch") if key in member}
    return QuorumCall(request_id=request_id, member=QuorumMember(replica_id=name, **member), **last)  # type: ignore[arg-type]


def test_all_learn_of_all_with_what_they_say_of_themselves() -> None:
    job = Job(least=2)
    job.now = 3.5
    job.calls("b", step=4, store_address="b:1", data={"loss": [1, None]})
    assert job.hears("b") == ["1 of at least 2 replica groups are here (b)"]
    job.calls("a", address="a:2", world_size=8)
    assert job.hears("a") == job.hears("b") == ["quorum 1 of a b for 1"]
    first, second = job.quorums
    assert first.quorum == second.quorum
    assert first.quorum.participants == [
        QuorumMember(replica_id="a", address="a:2", world_size=8),
        QuorumMember(replica_id="b", step=4, store_address="b:1", data={"loss": [1, None]}),
    ]
    assert (first.quorum.created.seconds, first.quorum.created.nanos) == (1_000_003, 500_000_000)


def test_the_same_callers_keep_their_quorum_id_and_others_get_a_new_one() -> None:
    job = Job()
    job.calls("a")
    job.calls("a", request_id=2)
    assert job.hears("a") == ["quorum 1 of a for 1", "quorum 1 of a for 2"]
    job.calls("b")
    assert job.hears("b") == []  # a lives, and is waited for
    job.calls("a", request_id=3)
    assert job.hears("a") == ["quorum 2 of a b for 3"]
    job.calls("a", "b", request_id=4, commit_failures=1)
    assert job.hears("a") == ["quorum 3 of a b for 4"]


def test_one_whose_connection_closes_is_out_at_once_and_comes_back_in_another_quorum() -> None:
    job = Job()
    job.calls("a", "b")
    job.calls("a", request_id=2)
    assert job.hears("a")[-1] == "quorum 2 of a b for 2"
    job.calls("a", request_id=3)
    job.handle(ConnectionClosed("b"))
    assert job.hears("a") == ["quorum 3 of a for 3"]
    job.hears("b")
    job.calls("b")
    job.calls("a", request_id=4)
    assert job.hears("b") == ["quorum 4 of a b for 1"]
    job.says("b", Leave("done"))
    assert job.hears("b") == ["close"]


def test_one_who_was_gone_between_two_quorums_of_the_same_callers_makes_it_another() -> None:
    job = Job()
    job.calls("a")
    job.handle(ConnectionClosed("a"))
    job.calls("a")
    assert job.hears("a") == ["quorum 1 of a for 1", "quorum 2 of a for 1"]


def test_a_caller_lives_by_what_names_it() -> None:
    job = Job()
    job.calls("a", "b")
    job.calls("a", request_id=2)
    job.calls("a", request_id=3)
    for alive in ("ab", "ab", "ab", "a"):
        assert "quorum 3 of a for 3" not in job.heard["a"]
        for name in alive:  # any connection may say so
            job.says("a", CallerHeartbeat(request_id=0, replica_id=name))
        job.passes(4)
    assert job.hears("a")[-1] == "quorum 3 of a for 3"


def test_one_that_falls_silent_while_it_waits_is_told_to_connect_again() -> None:
    job = Job(least=2)
    job.calls("a")
    job.hears("a")
    job.passes(4)
    assert job.hears("a") == []
    job.passes(1)
    assert job.hears("a") == ["Dropped", "close"]
    job.handle(ConnectionClosed("a"))
    job.calls("a", "b")
    assert job.hears("a") == ["1 of at least 2 replica groups are here (a)", "quorum 1 of a b for 1"]


def test_who_gave_up_waiting_is_in_no_quorum() -> None:
    job = Job(least=2)
    job.calls("a")
    job.says("a", CallGivenUp(request_id=1, replica_id="a"))
    job.calls("b")
    assert job.hears("b") == []
    job.calls("a", request_id=2)
    job.says("a", CallGivenUp(request_id=1, replica_id="a"))  # of the earlier call
    assert job.hears("b") == ["quorum 1 of a b for 1"]


def test_one_that_calls_on_two_connections_is_where_it_called_last_and_the_other_is_told() -> None:
    job = Job(least=2)
    job.calls("a")
    job.says("other", CallerHello(protocol=PROTOCOL_VERSION))
    job.says("other", call("a"))
    assert job.hears("a")[-1] == "another connection calls as a now"
    job.handle(ConnectionClosed("a"))
    job.calls("b")
    assert job.hears("other")[-1] == "quorum 1 of a b for 1"


def test_quorum_ids_go_on_above_those_of_an_earlier_life() -> None:
    job = Job(epoch="life2")
    job.calls("a", last_quorum_id=7, last_epoch="life1")
    assert job.hears("a") == ["quorum 1000 of a for 1"]
    job.calls("a", request_id=2, last_quorum_id=1000, last_epoch="life2")
    assert job.hears("a") == ["quorum 1000 of a for 2"]


def test_a_lighthouse_that_slept_takes_nobody_for_dead() -> None:
    job = Job()
    job.calls("a")
    job.now = 30.0
    job.calls("b")
    assert job.hears("b") == []
    job.calls("a", request_id=2)
    assert job.hears("b") == ["quorum 2 of a b for 1"]


def test_a_caller_is_refused_by_name_in_a_job_of_managers() -> None:
    job = Job()
    job.says("m", Hello(protocol=PROTOCOL_VERSION, replica_id="group:1"))
    for message in (call("a"), CallerHeartbeat(request_id=1, replica_id="a")):
        job.says("a", CallerHello(protocol=PROTOCOL_VERSION))
        job.says("a", message)
        refusal, closed = job.hears("a")
        assert "a is a caller of LighthouseClient" in refusal and "Managers run this job (group:1)" in refusal
        assert closed == "close"
        job.handle(ConnectionClosed("a"))
    assert not job.lighthouse.callers.members


def test_a_manager_is_refused_by_name_in_a_job_of_callers_and_also_after_they_are_gone() -> None:
    job = Job()
    job.calls("a")
    for connection in ("m", "n"):
        job.says(connection, Hello(protocol=PROTOCOL_VERSION, replica_id="group:1"))
        refusal, closed = job.hears(connection)
        assert "group:1 is a Manager's" in refusal and "LighthouseClient.quorum run this job (a)" in refusal
        assert closed == "close"
        job.handle(ConnectionClosed("a"))


def test_those_who_left_before_any_quorum_leave_the_lighthouse_to_any_job() -> None:
    job = Job(least=2)
    job.calls("a")
    job.handle(ConnectionClosed("a"))
    job.says("m", Hello(protocol=PROTOCOL_VERSION, replica_id="group:1"))
    assert job.heard["m"] == [Welcome.__name__]


@pytest.mark.parametrize(
    "message",
    [Hello(protocol=PROTOCOL_VERSION, replica_id="group:1"), CallerHello(protocol=PROTOCOL_VERSION - 1)],
)
def test_a_connection_of_callers_is_of_nobody_else(message: ToLighthouse) -> None:
    job = Job()
    job.says("a", CallerHello(protocol=PROTOCOL_VERSION))
    job.says("a", message)
    assert job.hears("a")[-1] == "close"


def test_callers_say_hello_first() -> None:
    job = Job()
    job.says("a", call("a"))
    assert job.hears("a") == ["the first message has to be Hello", "close"]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"a": "x" * MAX_DATA_BYTES}, f"at most {MAX_DATA_BYTES} are sent"),
        (json.loads('{"a":' * (MAX_DATA_DEPTH + 1) + "1" + "}" * (MAX_DATA_DEPTH + 1)), "levels deep"),
    ],
)
def test_data_beyond_its_limits_is_refused_where_it_is_made_and_where_it_arrives(data: dict, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        QuorumMember(replica_id="a", data=data)
    text = encode(call("a", data={"here": 1})).replace('{"here":1}', json.dumps(data))
    with pytest.raises(ProtocolError, match=f"a trainer sent .*{what}"):
        decode_to_lighthouse(text, "a trainer")
    QuorumMember(replica_id="a", data={"a": "x" * (MAX_DATA_BYTES - 8)})
    QuorumMember(replica_id="a", data=json.loads('{"a":' * MAX_DATA_DEPTH + "1" + "}" * MAX_DATA_DEPTH))


def test_what_does_not_fit_into_the_message_of_a_quorum_is_refused_by_name() -> None:
    job = Job(least=1000)
    fits = MAX_MEMBERS_BYTES // (MAX_DATA_BYTES + 200)
    job.calls(*(f"caller{number}" for number in range(fits)), data={"a": "x" * (MAX_DATA_BYTES - 8)})
    job.calls("caller0", request_id=2, data={"a": "x" * (MAX_DATA_BYTES - 8)})  # in the place of its first call
    job.calls("big", data={"a": "x" * (MAX_DATA_BYTES - 8)})
    refusal, closed = job.hears("big")
    assert refusal.startswith("big brings ") and closed == "close"
    members = [caller.call.member for caller in job.lighthouse.callers.members.values() if caller.call]
    assert len(members) == fits
    assert sum(map(size_of, members)) < MAX_MESSAGE_BYTES


def test_callers_beyond_a_number_are_refused_by_name() -> None:
    job = Job()
    job.says("a", CallerHello(protocol=PROTOCOL_VERSION))
    job.lighthouse.callers.members.update(dict.fromkeys(map(str, range(MAX_CALLERS))))  # type: ignore[arg-type]
    refused = list(job.lighthouse.callers.received("a", CallerHeartbeat(request_id=1, replica_id="more"), 0.0))
    assert isinstance(refused[0], Send) and "more would exceed the" in refused[0].message.reason  # type: ignore[union-attr]
