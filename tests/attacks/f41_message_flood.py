"""Heartbeats as fast as they go, on connections that are opened again and again: one stopped all jobs at a lighthouse.

They are sent to the lighthouse in a job of their own, then to a manager service (which is in a trainer) before any RankHello. A
job trains meanwhile. Who attacks has the token.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from livejob import Job

from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Heartbeat, Hello, encode
from torchft_ckpt.core.services.proofs import RankProof

TOKEN = "a token of this job"
NUM_CONNECTIONS = 20
LEAST_SHARE = 0.8
SECONDS = 15.0


def frame(text: str) -> bytes:
    """One masked message, by a mask of zeros."""
    data = text.encode()
    length = bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0x80 | 126]) + len(data).to_bytes(2, "big")
    return b"\x81" + length + bytes(4) + data


def flood(address: str, path: str, replica_id: str, number: int) -> None:
    """Open a connection, say hello, send heartbeats until it is closed; again, for ever."""
    host, _, port = address.rpartition(":")
    beats = frame(encode(Heartbeat())) * 4096
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=30) as sock:
            is_rank = path == "/v1/ranks"
            shown = RankProof(TOKEN, replica_id, secrets.token_hex(16)).authorization if is_rank else f"Bearer {TOKEN}"
            key = base64.b64encode(secrets.token_bytes(16)).decode()
            lines = [f"GET {path} HTTP/1.1", "Host: h", f"Authorization: {shown}", "Connection: Upgrade"]
            lines += ["Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}"]
            sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
            if not sock.recv(65536).startswith(b"HTTP/1.1 101"):
                continue
            if not is_rank:
                sock.sendall(frame(encode(Hello(protocol=PROTOCOL_VERSION, replica_id=f"flood{number}:1"))))
            while True:
                sock.sendall(beats)


def attack(address: str, path: str, replica_id: str) -> None:
    for number in range(NUM_CONNECTIONS):
        threading.Thread(target=flood, args=(address, path, replica_id, number), daemon=True).start()
    threading.Event().wait()


def steps_per_s(job: Job, seconds: float) -> float:
    name = job.ranks[0]
    first, began = job.last(name)["step"], time.monotonic()
    time.sleep(seconds)
    return (job.last(name)["step"] - first) / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack(*options.attack)
    wrong, shares = [], []
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), TOKEN)
        try:
            service = job.addresses["g0r0"]
            targets = {
                "the lighthouse": (job.lighthouse, "/v1/groups?job=another", "g"),
                "a manager service": (service["service"], "/v1/ranks", service["replica_id"]),
            }
            for what, arguments in targets.items():
                before = steps_per_s(job, SECONDS)
                process = subprocess.Popen([sys.executable, __file__, "--attack", *arguments])
                try:
                    time.sleep(2.0)
                    during = steps_per_s(job, SECONDS)
                finally:
                    process.kill()
                    process.wait()
                after = steps_per_s(job, 5.0)
                quiet = max(min(before, after), 1e-9)
                shares.append(during / quiet)
                print(
                    f"{what}: {before:.1f} steps/s before, {during:.1f} in the flood, {after:.1f} in the 5 s after it"
                )
                if during < LEAST_SHARE * quiet or after < LEAST_SHARE * before / 2:
                    wrong.append(f"a flood at {what} leaves a job {during / quiet:.2f} of its steps")
            if any(job.last(name)["discarded"] for name in job.ranks):
                wrong.append("steps were discarded")
        finally:
            job.stop()
    if wrong:
        print("VULNERABLE: " + "; ".join(wrong))
        return 1
    print(f"held: while {NUM_CONNECTIONS} connections flood, the job makes {min(shares):.2f} of its steps at least")
    return 0


if __name__ == "__main__":
    sys.exit(main())
