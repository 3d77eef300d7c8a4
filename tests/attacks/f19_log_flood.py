"""Requests without the token that try to fill the log of the lighthouse, and the trainer's, where the manager service is."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import time

import a_lighthouse
from support.services import make_group_service

REQUESTS = {
    "a wrong token": b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer x\r\n\r\n",
    "a wrong token for a rank": b"GET /v1/ranks HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer x\r\n\r\n",
    "a malformed head": b"GET / HTTP/1.1\r\nHost\x00: " + b"A" * 8000 + b"\r\n\r\n",
    "a path of 8000 zeros": b"GET /" + b"\x00" * 8000 + b" HTTP/1.1\r\n\r\n",
}
ALLOWED_BYTES_A_SECOND = 1000


def flood(address: str, log: str, num: int) -> list[str]:
    """Send each kind of request; return what wrote too much."""
    host, port = address.rsplit(":", 1)
    found = []
    for label, request in REQUESTS.items():
        before, started = os.path.getsize(log), time.monotonic()
        for _ in range(num):
            try:
                with socket.create_connection((host, int(port)), timeout=2) as sock:
                    sock.sendall(request)
                    sock.recv(100)
            except OSError:
                continue
        time.sleep(0.3)
        took_s = time.monotonic() - started
        grown = os.path.getsize(log) - before
        print(f"  {label}: {num} requests in {took_s:.1f} s, the log grew by {grown} bytes ({grown / num:.0f} each)")
        if grown > ALLOWED_BYTES_A_SECOND * (took_s + 1):
            found.append(f"{label}: {grown / num:.0f} bytes of log each")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num", type=int, nargs="?", default=300, help="requests of each kind (default: %(default)d)")
    num = parser.parse_args().num
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        trainer_log = os.path.join(folder, "trainer.log")
        logging.basicConfig(filename=trainer_log)
        with a_lighthouse.running("--min-replicas=1", "--token=s") as lighthouse:
            address = lighthouse.address.removeprefix("http://")
            service = make_group_service(address, token="s")
            try:
                for name, where, log in (
                    ("lighthouse", address, lighthouse.log.name),
                    ("manager service", service.address, trainer_log),
                ):
                    print(name)
                    wrong += [f"{name}, {what}" for what in flood(where, log, num)]
            finally:
                service.shutdown("done")
        logging.shutdown()
    if wrong:
        print("VULNERABLE: " + "; ".join(wrong))
        return 1
    print(
        f"held: {num} requests of each kind without the token, at most {ALLOWED_BYTES_A_SECOND} bytes of log a second"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
