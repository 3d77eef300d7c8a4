"""Strangers crowd a source: idle connections from four addresses, receivers that never read, garbage where TLS is spoken.

An honest receiver has to come through all the same, and the source may not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import trustme

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.certificates import client_context, server_context
from support.ports import is_open

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.state.blocks import DEFAULT_BLOCK_BYTES
from torchft_ckpt.errors import CheckpointError

LONG = timedelta(seconds=300)
TOKEN = "secret"
MOST_GROWN_MIB = 256
Transport = HTTPTransport[dict[str, torch.Tensor]]


def memory_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def squat(port: int, host: str, stop: threading.Event) -> None:
    """Keep 64 idle connections from one address open; open each again that is cut."""
    mine: list[socket.socket] = []
    while not stop.is_set():
        mine = [sock for sock in mine if is_open(sock)]
        while len(mine) < 64 and not stop.is_set():
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=1, source_address=(host, 0))
            except OSError:
                break
            sock.setblocking(False)
            mine.append(sock)
        time.sleep(0.02)
    for sock in mine:
        sock.close()


def slots(source: Transport, state: dict[str, torch.Tensor], num: int) -> list[str]:
    source.send_checkpoint([1], 3, state, LONG)
    port, stop = int(source.metadata().rsplit(":", 1)[1]), threading.Event()
    squatters = [threading.Thread(target=squat, args=(port, f"127.0.0.{last}", stop)) for last in (2, 3, 4, 5)]
    for squatter in squatters:
        squatter.start()
    time.sleep(2)
    receiver = Transport(hostname="127.0.0.1", bind="127.0.0.1", token=TOKEN)
    num_came, errors = 0, []
    for _ in range(num):
        try:
            receiver.recv_checkpoint(0, source.metadata(), 3, timedelta(seconds=20))
            num_came += 1
            source.send_checkpoint([1], 3, state, LONG)
        except CheckpointError as error:
            errors.append(f"{type(error).__name__}: {str(error)[-160:]}")
    stop.set()
    for squatter in squatters:
        squatter.join()
    receiver.shutdown()
    print(f"  four addresses squat on 256 idle connections: {num_came} of {num} recoveries came through {errors[:1]}")
    return [] if num_came == num else [f"{num - num_came} of {num} recoveries did not come through"]


def never_read(source: Transport, state: dict[str, torch.Tensor], wait_s: float) -> list[str]:
    source.send_checkpoint([1], 4, state, LONG)
    port, before, socks = int(source.metadata().rsplit(":", 1)[1]), memory_mib(), []
    blocks = f"0-{state['w'].nbytes // DEFAULT_BLOCK_BYTES - 1}"
    for number in range(60):
        sock = socket.create_connection(("127.0.0.1", port))
        name = f"X-Ckpt-Receiver: never{number}\r\n" if number % 2 else ""
        head = (
            f"GET /v1/checkpoint/4/blocks/{blocks} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\n{name}\r\n"
        )
        sock.sendall(head.encode())
        socks.append(sock)
    time.sleep(wait_s)
    started = time.monotonic()
    source.disallow_checkpoint()
    held_s, grown = time.monotonic() - started, memory_mib() - before
    for sock in socks:
        sock.close()
    print(f"  60 receivers that never read: {grown} MiB more, the trainer was held for {1000 * held_s:.0f} ms")
    return [f"the source grew by {grown} MiB, held for {held_s:.1f} s"] if grown > MOST_GROWN_MIB or held_s > 5 else []


def garbage(num: int) -> list[str]:
    authority = trustme.CA()
    source = Transport(
        hostname="127.0.0.1", bind="127.0.0.1", token=TOKEN, ssl_context=server_context(authority, "127.0.0.1")
    )
    source.send_checkpoint([1], 3, {"w": torch.ones(1000)}, LONG)
    port, rng, before = int(source.metadata().rsplit(":", 1)[1]), random.Random(1), memory_mib()
    threads = threading.active_count()
    hello = bytes.fromhex("16030100c8010000c40303")
    kinds = [
        lambda: rng.randbytes(rng.randint(1, 500)),
        lambda: hello + rng.randbytes(rng.randint(0, 400)),
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: b"\x16",
        lambda: b"\x16\x03\x01\xff\xff" + bytes(70000),
        lambda: b"",
    ]
    for _ in range(num):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
            sock.sendall(rng.choice(kinds)())
            if rng.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
            sock.settimeout(0.02)
            sock.recv(300)
    receiver = Transport(
        hostname="127.0.0.1", bind="127.0.0.1", token=TOKEN, client_ssl_context=client_context(authority)
    )
    received = receiver.recv_checkpoint(0, source.metadata(), 3, timedelta(seconds=20))
    wrong = [] if torch.equal(received["w"], torch.ones(1000)) else ["an honest receiver got another state"]
    grown, more = memory_mib() - before, threading.active_count() - threads
    print(f"  {num} pieces of garbage where TLS is spoken: {grown} MiB and {more} threads more")
    if grown > MOST_GROWN_MIB:
        wrong.append(f"garbage where TLS is spoken: {grown} MiB more")
    stranger = Transport(
        hostname="127.0.0.1", bind="127.0.0.1", token=TOKEN, client_ssl_context=client_context(trustme.CA())
    )
    for label, url, transport in (
        ("a certificate of an unknown authority", source.metadata(), stranger),
        ("https asked by http", source.metadata().replace("https", "http"), receiver),
    ):
        with contextlib.suppress(CheckpointError):
            transport.recv_checkpoint(0, url, 3, timedelta(seconds=5))
            wrong.append(f"{label} was accepted")
    for transport in (stranger, receiver, source):
        transport.shutdown()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--full", action="store_true", help="as many recoveries and pieces of garbage as the first time"
    )
    is_full = parser.parse_args().full
    source = Transport(hostname="127.0.0.1", bind="127.0.0.1", token=TOKEN)
    state = {"w": torch.zeros((64 if is_full else 4) << 18)}
    wrong = slots(source, state, 10 if is_full else 4)
    wrong += never_read(source, state, 10 if is_full else 2)
    source.shutdown()
    wrong += garbage(3000 if is_full else 200)
    if wrong:
        print("VULNERABLE: " + "; ".join(wrong))
        return 1
    print("held: every recovery came through, and the source did not grow")
    return 0


if __name__ == "__main__":
    sys.exit(main())
