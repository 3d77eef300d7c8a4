"""Who keeps a connection where not all can: whoever showed the token, and of the strangers those who came last."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from torchft_ckpt.core.services.admission import Admission, ConnectionLimits, ConnectionVerdict, client_of_address


def places(
    *, total: int = 8, strangers: int = 4, per_client: int = 2, binds_known: bool = False, known_per_client: int = 4096
) -> ConnectionLimits:
    return ConnectionLimits(
        total=total,
        strangers=strangers,
        per_client=per_client,
        binds_known=binds_known,
        known_per_client=known_per_client,
    )


def test_a_thousand_groups_behind_one_address_come_in_among_strangers_that_come_again_and_again() -> None:
    """The places are a lighthouse's. Ten strangers come between two groups; a group shows the token when ten others have come."""
    admission = Admission(places(total=4096, strangers=2048, per_client=4096))
    for group in range(1000):
        admission.admit(("group", group), "nat")
        for number in range(10):
            admission.admit((group, number), "squatter")
        admission.show(("group", group - 10))
    for group in range(990, 1000):
        admission.show(("group", group))
    assert all(admission.knows(("group", group)) for group in range(1000))


@dataclass
class Oracle:
    """Does the same by looking through one list, oldest first."""

    places: ConnectionLimits
    open: list[tuple[int, str, bool]] = field(default_factory=list)

    def admit(self, connection: int, client: str) -> ConnectionVerdict:
        strangers = [each for each in self.open if not each[2]]
        own = [each for each in self.open if each[1] == client and (self.places.binds_known or not each[2])]
        if len(own) >= self.places.per_client:
            candidates, reason = [each for each in own if not each[2]], f"{client} has {len(own)} connections already"
        elif len(strangers) >= self.places.strangers or len(self.open) >= self.places.total:
            candidates, reason = strangers, f"{len(self.open)} connections are open"
        else:
            self.open.append((connection, client, False))
            return ConnectionVerdict(True)
        if not candidates:
            return ConnectionVerdict(False, reason=reason)
        self.open.remove(candidates[0])
        self.open.append((connection, client, False))
        return ConnectionVerdict(True, candidates[0][0], reason)

    def show(self, connection: int) -> None:
        clients = [client for number, client, _ in self.open if number == connection]
        if sum(known and client in clients for _, client, known in self.open) < self.places.known_per_client:
            self.open = [(number, client, known or number == connection) for number, client, known in self.open]

    def leave(self, connection: int) -> None:
        self.open = [each for each in self.open if each[0] != connection]


@pytest.mark.parametrize("seed", range(20))
def test_it_decides_as_one_who_looks_through_a_list(seed: int) -> None:
    rng = random.Random(seed)
    given = places(
        total=rng.randint(1, 9),
        strangers=rng.randint(1, 6),
        per_client=rng.randint(1, 4),
        binds_known=bool(seed % 2),
        known_per_client=rng.randint(1, 9),
    )
    admission, oracle = Admission(given), Oracle(given)
    for number in range(400):
        client = rng.choice("abc")
        assert admission.admit(number, client) == oracle.admit(number, client)
        for act in rng.choices(["show", "leave"], k=rng.randint(0, 2)):
            one = rng.randint(max(0, number - 6), number)
            getattr(admission, act)(one)
            getattr(oracle, act)(one)
        known = {connection for connection, _, is_known in oracle.open if is_known}
        assert {one for one in range(number + 1) if admission.knows(one)} == known
    for number in range(400):
        admission.leave(number)
    assert (admission._strangers, admission._strangers_of, admission._known, admission._num_known_of) == (
        {},
        {},
        {},
        {},
    )


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("::1", "::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("not an address: really", "not an address: really"),
    ],
)
def test_one_host_of_ipv6_has_many_addresses_and_counts_once(address: str, client: str) -> None:
    assert client_of_address(address) == client
