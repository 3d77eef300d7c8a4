"""A child that is forked while states are served and received keeps nothing of that open."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from datetime import timedelta

import pytest
import torch
from support.services import make_group_service
from support.waiting import wait_until

from torchft_ckpt import HTTPTransport, LighthouseServer
from torchft_ckpt.checkpointing.fetching.connection import SourceConnection
from torchft_ckpt.checkpointing.protocol import SourceAddress
from torchft_ckpt.config import parse_host_port

LONG = timedelta(seconds=90)


def inet_sockets() -> dict[int, int]:
    """Return the descriptors of this process that are connections or listeners of TCP, with their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        found[fd] = os.fstat(fd).st_ino
    return found


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_a_forked_child_keeps_no_connection_and_no_listener() -> None:
    """While a data loader's worker has a connection open, its peer does not hear that the worker's parent was killed."""
    before = inet_sockets()
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    service = make_group_service(lighthouse.address(), connect_timeout=LONG)
    source: HTTPTransport[object] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1")
    source.send_checkpoint([1], 3, {"w": torch.zeros(16 << 18)}, LONG)
    address = SourceAddress(*parse_host_port(source.metadata(), what="address"))
    link = SourceConnection(address, headers={}, connect_timeout_s=20, stall_timeout_s=60)
    link.get("/v1/checkpoint/3/blocks/0-3")
    # Three listeners, both ends of the group's connection to the lighthouse and of the transfer's, and the descriptor by which
    # its bytes are sent.
    wait_until(lambda: len(inet_sockets().items() - before.items()) == 8)
    here = inet_sockets().items() - before.items()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        kept = [fd for fd, inode in here if os.fstat(fd).st_ino == inode]
        os.write(writable, b"%d" % len(kept))
        os._exit(0)
    os.waitpid(child, 0)
    num_kept = os.read(readable, 10)
    for fd in (readable, writable):
        os.close(fd)
    link.release()
    source.shutdown()
    service.shutdown("the test is over")
    lighthouse.shutdown()
    assert num_kept == b"0"
