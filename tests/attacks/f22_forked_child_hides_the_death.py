"""A source is killed while a child that it forked lives on, as a data loader's worker does.

Its connections must end and its port must be free at once: what the child keeps open, the kernel does not close.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import torch

from torchft_ckpt import HTTPTransport
from torchft_ckpt.errors import CheckpointError, ConfigError

AT_ONCE_S = 5.0
CHILD_LIVES_S = 60


def source() -> None:
    """Serve a state; once told that the transfer has begun, fork a child, and say its process id."""
    transport: HTTPTransport[object] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    transport.send_checkpoint([1], 3, {"w": torch.zeros(64 << 18)}, timedelta(seconds=600))
    print(transport.metadata(), flush=True)
    sys.stdin.readline()
    child = os.fork()
    if child == 0:
        time.sleep(CHILD_LIVES_S)
        os._exit(0)
    print(child, flush=True)
    time.sleep(600)


def main() -> int:
    if sys.argv[1:] == ["--source"]:
        source()
        return 0
    wrong = []
    process = subprocess.Popen(
        [sys.executable, __file__, "--source"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    url = process.stdout.readline().strip()
    port = int(url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /v1/checkpoint/3/blocks/0-15 HTTP/1.1\r\nHost: h\r\n\r\n")
        slow.recv(1000)
        time.sleep(0.5)  # the source waits for this side to read
        process.stdin.write("\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        killed_at = time.monotonic()
        slow.settimeout(AT_ONCE_S)
        try:
            with contextlib.suppress(ConnectionError):
                while slow.recv(1 << 20):
                    pass
            seen = f"a transfer in flight ended after {time.monotonic() - killed_at:.2f} s"
        except TimeoutError:
            wrong.append(f"a transfer in flight has not ended {AT_ONCE_S:g} s after its source was killed")
    receiver: HTTPTransport[object] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    started = time.monotonic()
    try:
        receiver.recv_checkpoint(0, url, 3, timedelta(seconds=30))
    except CheckpointError as error:
        took_s = time.monotonic() - started
        seen_by = f"a new receiver learnt it after {took_s:.2f} s"
        if took_s > AT_ONCE_S:
            wrong.append(f"{seen_by}: {error}")
    receiver.shutdown()
    try:
        HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", port=port).shutdown()
    except ConfigError as error:
        wrong.append(f"a restarted source cannot listen on its port: {error}")
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    if wrong:
        print("VULNERABLE: " + "; ".join(wrong))
        return 1
    print(f"held: {seen}, {seen_by}, and its port was free")
    return 0


if __name__ == "__main__":
    sys.exit(main())
