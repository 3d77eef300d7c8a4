"""Connections that drip one byte a second, without the token, against the manager service and the lighthouse.

The manager service is in the trainer's process: each connection that it keeps costs the trainer a descriptor. This process is the
trainer, and may have 256 descriptors. The lighthouse is another one that may have as many; it is asked for its status meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import a_lighthouse
from support.services import make_group_service

DESCRIPTORS = 256
TOKEN = "secret"


def drip(host: str, port: int, num: int) -> None:
    """Open connections and send the head of a request on each that never ends, until this process is ended."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    opened = []
    for _ in range(num):
        try:
            sock = socket.create_connection((host, port), timeout=2)
            sock.sendall(b"GET /v1/ranks HTTP/1.1\r\nHost: h\r\nX-Slow: ")
            opened.append(sock)
        except OSError:
            break
    print(f"  attacker: {len(opened)} connections opened", flush=True)
    while True:
        time.sleep(1)
        for sock in opened:
            try:
                sock.send(b"a")
            except OSError:
                continue


@contextlib.contextmanager
def attack(address: str, num: int) -> Iterator[None]:
    """An attacker is at work."""
    command = [sys.executable, __file__, "--drip", *address.rsplit(":", 1), str(num)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    print(process.stdout.readline().rstrip())
    time.sleep(1)  # the connections are accepted
    try:
        yield
    finally:
        process.kill()
        process.wait()


def what_fails() -> list[str]:
    """Return what this process cannot do any more."""
    failed = []
    try:
        with open(os.devnull):
            pass
    except OSError as error:
        failed.append(f"open a file ({error})")
    try:
        for end in socket.socketpair():
            end.close()
    except OSError as error:
        failed.append(f"make a socket ({error})")
    try:
        subprocess.run(["true"], check=True)
    except OSError as error:
        failed.append(f"start a process ({error})")
    return failed


def status_of(address: str) -> tuple[int, float, str]:
    """Ask a lighthouse with the right token; return the exit status, the seconds that it took, and the last line said."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torchft_ckpt", "status", "--lighthouse", address, "--token", TOKEN],
        capture_output=True,
        text=True,
    )
    said = (done.stderr or done.stdout).strip().splitlines()
    return done.returncode, time.monotonic() - started, said[-1][:140] if said else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drip", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drip:
        drip(options.drip[0], int(options.drip[1]), int(options.drip[2]))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS if hard == resource.RLIM_INFINITY else hard))
    wrong = []
    with a_lighthouse.running("--min-replicas=1", f"--token={TOKEN}") as lighthouse:
        address = lighthouse.address.removeprefix("http://")
        service = make_group_service(address, token=TOKEN)
        try:
            with attack(service.address, 300):
                failed = what_fails()
            if failed:
                wrong.append("the trainer cannot " + ", nor ".join(failed))
            while what_fails():  # until it has noticed that the attacker is gone
                time.sleep(0.1)
            with attack(address, 400):
                code, took_s, said = status_of(address)
            if code != 0:
                wrong.append(f"`status` with the right token fails after {took_s:.1f} s: {said}")
        finally:
            service.shutdown("done")
    if wrong:
        print("VULNERABLE: " + "; ".join(wrong))
        return 1
    print(
        f"held: with {DESCRIPTORS} descriptors and 300 connections that drip the trainer opens files and sockets; "
        f"the lighthouse beside 400 of them tells its status after {took_s:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
