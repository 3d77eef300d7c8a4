"""A stranger who can write to the store where members meet for a cold start tries to give one of them other weights.

It does not know the token. Four attempts, each against a member that reads a checkpoint together with another:

- `poses`: it takes the part of the other member, and serves 666 in place of its share.
- `leads`: it takes the part of the first member, names an older checkpoint, and serves 666 in place of its share.
- `replays`: it puts what the other member said at an earlier start into the store again, and listens at the address in it.
- `relays`: the other member is there; the stranger stands on the way to it, and puts 666 at the beginning of every part, with
  the digest that belongs to it.

An attempt succeeds where the victim sends the token, or begins from other values than were saved: one that raises does not
begin. `PYTHONPATH` has to name `tests`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import xxhash
from support.relay import Passing, Relay
from torch.distributed import PrefixStore, TCPStore

from torchft_ckpt import Checkpointer, HTTPTransport
from torchft_ckpt.checkpointing.durable.cooperative_read import shared_read
from torchft_ckpt.checkpointing.durable.cooperative_read.cold_start import ColdStart, MeetingPlace
from torchft_ckpt.checkpointing.durable.cooperative_read.rendezvous import KeyValueStore
from torchft_ckpt.checkpointing.durable.storage.local_storage import LocalStorage
from torchft_ckpt.checkpointing.serving import handlers
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.errors import SourceLostError, SourceRefusedError

TOKEN = "the job's secret"
POISON = 666.0
OLDER = 4
HOST = "127.0.0.1"
LIMIT = timedelta(seconds=120)
Attempt = Callable[[str, timedelta], "tuple[dict[str, torch.Tensor], bool]"]
"""Given the checkpoints' directory and the patience, returns what the victim got, and whether it sent the token."""


def connect(port: int) -> TCPStore:
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=LIMIT)


def host_store() -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=LIMIT)


def read_as_member(
    number: int,
    place: str,
    store: TCPStore,
    start: str,
    patience: timedelta,
    *,
    token: str | None = TOKEN,
    advertised: Callable[[int], int] = lambda port: port,
    step: int | None = None,
) -> dict[str, torch.Tensor]:
    """Take part in a cold start of two members; return the values, none where it does not begin.

    Args:
        number: 0 or 1.
        start: a name that each start has of its own.
        advertised: given the port that it serves at, returns the one that others are led to.
    """
    transport: HTTPTransport[Any] = HTTPTransport(hostname=HOST, bind=HOST, token=token)
    transport._metadata = f"http://{HOST}:{advertised(transport._server.port)}"
    try:
        place_to_meet = MeetingPlace(
            store=PrefixStore(start, store),
            run=start,
            member=number,
            num_members=2,
            transport=transport,
            has_gathered=True,
        )
        cold_start = ColdStart([LocalStorage(place)], step=step, place=place_to_meet, patience=patience)
        for reading in cold_start.attempts():
            with reading as attempt:
                tensors = attempt.reader.tensors
                targets = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
                attempt.fill([Want(name, whole(tuple(target.shape)), target) for name, target in targets.items()])
        return targets
    except (SourceLostError, SourceRefusedError) as error:
        print(f"member {number} does not begin: {error}", file=sys.stderr)
        return {}
    finally:
        transport.shutdown()


# A stranger in the other member's place


def poses(place: str, patience: timedelta, stranger_is: int = 1) -> tuple[dict[str, torch.Tensor], bool]:
    """A process without the token takes the part of a member."""
    store = host_store()
    arguments = ["--stranger", place, str(store.port), str(patience.total_seconds()), str(stranger_is)]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHFT_CKPT_TOKEN"}
    stranger = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        store.wait(["posing"], LIMIT)
        got = read_as_member(1 - stranger_is, place, store, "cold", patience)
        told, _ = stranger.communicate(timeout=LIMIT.total_seconds())
    finally:
        stranger.kill()
        stranger.wait()
    return got, TOKEN in told


def leads(place: str, patience: timedelta) -> tuple[dict[str, torch.Tensor], bool]:
    """A process without the token takes the part of the first member."""
    return poses(place, patience, stranger_is=0)


def pose(place: str, port: int, patience: timedelta, number: int) -> None:
    """Be that process: serve 666 to everybody who asks, whatever he shows, and print that."""
    honest, matches = shared_read._read_share, handlers.bearer_matches

    def poisoned(*arguments: Any) -> Any:
        state = honest(*arguments)
        for boxed in state.values():
            for _, data in boxed.pieces:
                data.fill_(POISON)
        return state

    def spy(header: str | None, token: str) -> bool:
        print("the victim sent", header, flush=True)
        return matches(header, "")

    shared_read._read_share = poisoned
    handlers.bearer_matches = spy
    store = connect(port)
    store.set("posing", "")
    read_as_member(number, place, store, "cold", patience, token=None, step=None if number else OLDER)


# What was said before


def replays(place: str, patience: timedelta) -> tuple[dict[str, torch.Tensor], bool]:
    """What member 1 said at an earlier start is said again, and at its old address somebody listens."""
    store = host_store()
    ports: list[int] = []
    keys: set[str] = set()
    put = KeyValueStore.put

    def puts(client: KeyValueStore, key: str, data: bytes) -> None:
        keys.update((client._key(key), client._key(key, 0)))
        put(client, key, data)

    KeyValueStore.put = puts  # type: ignore[method-assign]

    def noted(port: int) -> int:
        ports.append(port)
        return port

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(read_as_member, 0, place, connect(store.port), "earlier", LIMIT)
        pool.submit(read_as_member, 1, place, connect(store.port), "earlier", LIMIT, advertised=noted).result()
        first.result()
    KeyValueStore.put = put  # type: ignore[method-assign]
    for key in keys:
        if key.removesuffix("/chunk0").endswith("/1") and store.check([f"earlier/{key}"]):
            store.set(f"cold/{key}", store.get(f"earlier/{key}"))  # type: ignore[arg-type]
    heard = bytearray()
    listener = socket.create_server((HOST, ports[0]))

    def listen() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(patience.total_seconds())
                try:
                    heard.extend(connection.recv(65536))
                except OSError:
                    continue

    threading.Thread(target=listen, daemon=True).start()
    try:
        got = read_as_member(0, place, connect(store.port), "cold", patience)
    finally:
        listener.close()
    return got, TOKEN.encode() in heard


# On the way between two members


def relays(place: str, patience: timedelta) -> tuple[dict[str, torch.Tensor], bool]:
    """Who connects to member 1 is led to a relay that alters what it answers."""
    store = host_store()
    relay: list[Relay] = []

    def poison(passing: Passing) -> None:
        if passing.path.endswith("/parts") and passing.status == 200:
            passing.body = with_poison(passing.body, json.loads(passing.request_body)["parts"])

    def led_to_the_relay(port: int) -> int:
        relay.append(Relay(port, answer=poison))
        return relay[0].port

    with ThreadPoolExecutor(2) as pool:
        victim = pool.submit(read_as_member, 0, place, connect(store.port), "cold", patience)
        other = pool.submit(
            read_as_member, 1, place, connect(store.port), "cold", patience, advertised=led_to_the_relay
        )
        got = victim.result(LIMIT.total_seconds())
        other.result(LIMIT.total_seconds())
    with relay[0]:
        passed = relay[0].passed
    if not any(passing.path.endswith("/parts") for passing in passed):
        raise RuntimeError("the victim asked for no part: the attack did not reach its line")
    return got, any(TOKEN in str(passing.request_headers) for passing in passed)


def with_poison(data: bytes, parts: list[list[Any]]) -> bytes:
    """Return an answer of parts of float32 in which each begins with 666, with the digests that belong to that."""
    altered, at = bytearray(data), 0
    for _, _, seed, _, sizes in parts:
        stop = at + 4 * math.prod(sizes)
        struct.pack_into("<f", altered, at, POISON)
        altered[stop : stop + 16] = xxhash.xxh3_128_digest(bytes(altered[at:stop]), seed=seed)
        at = stop + 16
    return bytes(altered)


# All of them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attempt", choices=["poses", "leads", "replays", "relays"], help="only this one")
    parser.add_argument("--patience", type=float, default=3.0, help="seconds that a member waits for another")
    parser.add_argument("--stranger", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stranger:
        place, port, patience_s, number = options.stranger
        pose(place, int(port), timedelta(seconds=float(patience_s)), int(number))
        return 0
    attempts: dict[str, Attempt] = {"poses": poses, "leads": leads, "replays": replays, "relays": relays}
    torch.manual_seed(0)
    saved = {f"w{number}": torch.randn(300, 300) for number in range(8)}
    seen: list[str] = []
    is_vulnerable = False
    with tempfile.TemporaryDirectory() as place:
        checkpointer = Checkpointer(place)
        older = {name: torch.full_like(tensor, POISON) for name, tensor in saved.items()}
        for step, state in ((OLDER, older), (5, saved)):
            checkpointer.save(state, step=step)
            checkpointer.wait()
        checkpointer.shutdown()
        for name, attempt in attempts.items():
            if options.attempt in (None, name):
                got, is_token_sent = attempt(place, timedelta(seconds=options.patience))
                wrong = [tensor for tensor in got if not torch.equal(saved[tensor], got[tensor])]
                seen.append(
                    f"{name}: {len(wrong)} of {len(saved)} tensors wrong, token {'' if is_token_sent else 'not '}sent"
                )
                is_vulnerable |= bool(wrong) or is_token_sent
    print(f"{'VULNERABLE' if is_vulnerable else 'held'}: {'; '.join(seen)}")
    return int(is_vulnerable)


if __name__ == "__main__":
    sys.exit(main())
