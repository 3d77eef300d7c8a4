"""Attacks a job that trains: random bytes and hostile requests at its transports, lighthouse and manager services, in turns.

A lighthouse, two groups of two ranks and a token; each is a process. Each kind of attack has its share of the time: malformed
requests at a transport; well-formed requests of hostile content at a transport, with the token, while the trainer mutates the
state under its lock; malformed requests, and WebSocket frames with and without the token, at the lighthouse; the same at a
manager service. Who has the token may train in a job: valid messages go to jobs of their own, and to ranks that do not exist.

Prints a row for each `target | what | count | result`, rows for what was watched, and `held` (0) or `VULNERABLE` (1): a step
was discarded, a group stopped, an answer was 5xx, a log has a traceback that no malformed request explains or grew without
limit, memory, threads or descriptors were not given back.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
from livejob import Job, Sample

from torchft_ckpt.core.coordination.messages import (
    PROTOCOL_VERSION,
    AllowStepLoss,
    CollectiveWait,
    CommitVote,
    ForgetJob,
    Heartbeat,
    Hello,
    JoinProgress,
    Leave,
    LocateState,
    QuorumRequest,
    RankHello,
    StateVersion,
    encode,
)
from torchft_ckpt.core.services.proofs import RankProof

TOKEN = "a token of this job"
NUM_THREADS = 8
READ_TIMEOUT_S = 0.25
MAX_GAP_S = 15.0
MAX_GROWN_MIB = 64.0
MAX_MORE_THREADS = 4
MAX_MORE_DESCRIPTORS = 4
MAX_LOG_BYTES_PER_S = 64 * 1024
SETTLE_S = 15.0
NUM_HELD_OPEN = 12
HOSTILE_NUMBERS = (0, -1, 2**31, 2**53, 2**62 - 1, 2**63, 2**64, 10**30, 1e308, 0.5)
HOSTILE_TEXTS = ("", "\x00", "\x1b[2J", "../" * 20, "a" * 5000, "\u202e", "null", "'\"\\", "%s%n", "\ud7ff")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_CLIENTS_FAULT = re.compile(
    r"^(aiohttp\.http_exceptions\.|aiohttp\.\w*\.?HttpProcessingError|ConnectionResetError|TimeoutError)"
)


class Attack:
    """One kind of attack on one address; `one` makes one connection, by many threads at once.

    Args:
        target: for the table.
        address: `HOST:PORT`.
        one: makes one connection, and returns what it tried and what came of it.
    """

    def __init__(self, target: str, address: str, one: Callable[[Attack, random.Random], tuple[str, str]]) -> None:
        self.target = target
        host, _, port = address.rpartition(":")
        self._where = (host, int(port))
        self._one = one
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.num_5xx = 0

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self._where, timeout=5)
        sock.settimeout(READ_TIMEOUT_S)
        return sock

    def keep_open(self, sock: socket.socket) -> None:
        """Let a connection lie, and close an older one."""
        with self._lock:
            self._open.append(sock)
            oldest = self._open.pop(0) if len(self._open) > NUM_HELD_OPEN else None
        if oldest is not None:
            oldest.close()

    def read(self, sock: socket.socket) -> str:
        """Return the statuses of the answers that come, or how the connection ended without one."""
        received = b""
        try:
            while len(received) < 1 << 20 and (data := sock.recv(65536)):
                received += data[: 1 << 16]
            ended = "closed"
        except TimeoutError:
            ended = "open"
        except OSError:
            ended = "reset"
        statuses = sorted({int(status) for status in _STATUS.findall(received)})
        with self._lock:
            self.num_5xx += sum(status >= 500 for status in statuses)
        return "+".join(map(str, statuses)) or ended

    def run(self, seconds: float, seed: str) -> None:
        """Attack for some time, on a few threads."""
        until = time.monotonic() + seconds

        def attacks(number: int) -> None:
            chance = random.Random(f"{seed} {self.target} {number}")
            while time.monotonic() < until:
                try:
                    outcome = self._one(self, chance)
                except OSError as error:
                    outcome = ("any", f"not connected ({type(error).__name__})")
                    time.sleep(0.02)
                with self._lock:
                    self.outcomes[outcome] += 1

        threads = [threading.Thread(target=attacks, args=(number,), daemon=True) for number in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
        for sock in self._open:
            sock.close()

    def rows(self) -> list[str]:
        """Return the table's rows."""
        found = []
        for what in sorted({what for what, _ in self.outcomes}):
            results = Counter({result: count for (of, result), count in self.outcomes.items() if of == what})
            told = ", ".join(f"{result}: {count}" for result, count in results.most_common(8))
            found.append(f"{self.target} | {what} | {results.total()} | {told}")
        return found


# -------------------------------------------------------------------------------------------------- malformed requests


def request(chance: random.Random, paths: list[str], *, has_token: bool) -> bytes:
    """Return a well-formed request."""
    method, path = chance.choice(["GET", "GET", "POST", "HEAD"]), chance.choice(paths)
    body = b'{"parts": [[0, 0, 0, [0, 0], [1, 1]]]}' if method == "POST" else b""
    head = [f"{method} {path} HTTP/1.1", "Host: h", "X-Ckpt-Receiver: fuzz", "Accept: */*"]
    if has_token:
        head.append(f"Authorization: Bearer {TOKEN}")
    if body:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def flipped(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 12)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def with_header(data: bytes, *lines: bytes) -> bytes:
    head, _, body = data.partition(b"\r\n\r\n")
    return b"\r\n".join([head, *lines]) + b"\r\n\r\n" + body


def length_lie(chance: random.Random, data: bytes) -> bytes:
    lies = [b"-1", b"0", b"1", b"99999999999999999999", b"4294967296", b"0x10", b"+5", b"5, 6", b"\xb2", b" "]
    lines = [b"Content-Length: " + chance.choice(lies) for _ in range(chance.randint(1, 2))]
    return with_header(data, *lines) + b"x" * chance.choice([0, 1, 100])


def chunked(chance: random.Random, data: bytes) -> bytes:
    sizes = [b"5", b"ffffffffffffffffff", b"-1", b"g", b"0", b"5;" + b"a" * 3000, b"", b"00000000000000000000005"]
    chunks = b"".join(chance.choice(sizes) + b"\r\nhello\r\n" for _ in range(chance.randint(1, 20)))
    return (
        with_header(data, b"Transfer-Encoding: " + chance.choice([b"chunked", b"chunked, chunked", b"gzip, x"]))
        + chunks
    )


def duplicated(chance: random.Random, data: bytes) -> bytes:
    lines = [
        b"Host: other",
        b"Authorization: Bearer x",
        b"Content-Length: 3",
        b"Upgrade: websocket",
        b"Connection: upgrade",
    ]
    return with_header(data, *(chance.choice(lines) for _ in range(chance.randint(1, 40))))


def long_head(chance: random.Random, data: bytes) -> bytes:
    junk = bytes(chance.choice(b"a\x00\n\xff:") for _ in range(16)) * chance.choice([10, 500, 4000])
    return data.replace(b"Host: h", b"X-" + junk.replace(b"\n", b"\n" if chance.random() < 0.5 else b"b") + b": 1", 1)


def noise(chance: random.Random, data: bytes) -> bytes:
    return chance.randbytes(chance.choice([1, 16, 300, 5000]))


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "flipped bytes": flipped,
    "length lie": length_lie,
    "chunked": chunked,
    "duplicate headers": duplicated,
    "long or broken head": long_head,
    "noise": noise,
    "pipelined": lambda chance, data: b"".join(
        flipped(chance, data) if chance.random() < 0.2 else data for _ in range(chance.randint(2, 30))
    ),
}


def malformed(paths: list[str]) -> Callable[[Attack, random.Random], tuple[str, str]]:
    """Return an attack that sends a mutated request in one of several ways."""

    def one(attack: Attack, chance: random.Random) -> tuple[str, str]:
        what = chance.choice([*MUTATIONS, "cut", "half-open", "reset", "open"])
        data = request(chance, paths, has_token=chance.random() < 0.5)
        sock = attack.connect()
        if what == "open":
            attack.keep_open(sock)
            return what, "kept open"
        if what in MUTATIONS:
            data = MUTATIONS[what](chance, data)
        elif chance.random() < 0.3:
            data = flipped(chance, data)
        try:
            if what in ("cut", "half-open"):
                data = data[: chance.randrange(len(data))]
            sock.sendall(data)
            if what == "half-open":
                sock.shutdown(socket.SHUT_WR)
                attack.keep_open(sock)
                return what, "kept open"
            if what == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return what, "reset"
            return what, attack.read(sock)
        except OSError as error:
            return what, type(error).__name__
        finally:
            if what != "half-open":
                sock.close()

    return one


# ---------------------------------------------------------------------------------------- well-formed, hostile content


def hostile_content(attack: Attack, chance: random.Random) -> tuple[str, str]:
    """Ask a transport for one thing after another over one connection, with the token."""
    sock = attack.connect()
    sock.settimeout(5)
    prefix, step, snapshot = "/v1/checkpoint", "latest", ""
    results: set[str] = set()
    receiver = chance.choice(
        [f"fuzz-{chance.randrange(10**6)}", "fuzz", chance.choice(HOSTILE_TEXTS).strip("\x00\x1b") or "x"]
    )
    try:
        for _ in range(chance.randint(1, 8)):
            number = lambda: chance.choice([0, 1, 2, 5, chance.randrange(200), 10**17, *map(str, HOSTILE_NUMBERS)])  # noqa: E731
            runs = ",".join(f"{number()}-{number()}" for _ in range(chance.choice([1, 1, 3, 200])))
            where = f"{prefix}/{step if chance.random() < 0.8 and step != 'latest' else number()}"
            parts = [
                [number(), number(), number(), [number(), number()], [number(), number()]]
                for _ in range(chance.choice([1, 3, 128]))
            ]
            good = [
                [0, 0, seed, [0, 0], [chance.randint(1, 256), chance.randint(1, 64)]]
                for seed in range(chance.choice([1, 128]))
            ]
            method, path, body = chance.choice(
                [
                    (
                        "GET",
                        f"{prefix}/latest/manifest?wait_s={chance.choice(['0.2', 'nan', '-1', '1e999', '1'])}",
                        None,
                    ),
                    ("GET", f"{where}/manifest?wait_s=0.1", None),
                    ("GET", prefix, None),
                    ("GET", f"{prefix}/proof?nonce={chance.choice(['0' * 32, 'x', ''])}", None),
                    ("GET", f"{where}/blocks/{number()}-{number()}", None),
                    ("GET", f"{where}/blocks/0-0", None),
                    ("GET", f"{where}/{chance.choice(['digests', 'samples'])}?blocks={runs}", None),
                    ("GET", f"{where}/{chance.choice(['digests', 'samples'])}?blocks=0-0", None),
                    (
                        "POST",
                        f"{where}/{chance.choice(['parts', 'parts/digests'])}",
                        json.dumps({"parts": parts})[:30000],
                    ),
                    ("POST", f"{where}/{chance.choice(['parts', 'parts/digests'])}", json.dumps({"parts": good})),
                    ("GET", f"{where}/peers", None),
                    ("POST", f"{where}/done", None),
                ]
            )
            headers = {
                "Host": "h",
                "Authorization": f"Bearer {TOKEN}",
                "X-Ckpt-Receiver": receiver,
                "X-Ckpt-Received": chance.choice(["", "0-0", runs, "x"]),
                "X-Ckpt-Address": chance.choice(
                    ["http://127.0.0.1:1", "x", "http://[::1]:99999", "file:///etc/passwd"]
                ),
                "X-Ckpt-Group": str(number()),
            }
            if snapshot and chance.random() < 0.7:
                headers["If-Match"] = snapshot
            if body is not None:
                headers["Content-Length"] = str(len(body))
            lines = [
                f"{method} {path.replace(' ', '')} HTTP/1.1",
                *(f"{key}: {value}" for key, value in headers.items()),
            ]
            sock.sendall(("\r\n".join(lines) + "\r\n\r\n" + (body or "")).encode("utf-8", "replace"))
            head, is_open = answer_head(sock)
            status = int(head.split(b" ")[1]) if head else 0
            results.add(str(status) if head else "closed")
            if status >= 500:
                attack.num_5xx += 1
            if match := re.search(rb'(?im)^etag: ("[0-9a-f]+")', head):
                snapshot = match[1].decode()
            if match := re.search(rb'"step":(\d+)', head):
                step = match[1].decode()
            if not is_open:
                break
    except OSError as error:
        results.add(type(error).__name__)
    finally:
        sock.close()
    return "requests of hostile content, with the token", "+".join(sorted(results))


def answer_head(sock: socket.socket) -> tuple[bytes, bool]:
    """Read one answer; return its head with the beginning of its body, and whether another request may follow."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = sock.recv(65536)
        if not data:
            return received, False
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    match = re.search(rb"(?im)^content-length: (\d+)", head)
    left = (int(match[1]) if match else 0) - len(body)
    while left > 0:
        data = sock.recv(min(left, 1 << 20))
        if not data:
            return head + b"\r\n" + body[:4096], False
        left -= len(data)
    return head + b"\r\n" + body[:4096], b"connection: close" not in head.lower()


# ------------------------------------------------------------------------------------------------------------ WebSocket


def group_messages() -> list[str]:
    """Return messages as a group sends them."""
    version = StateVersion(step=1, quorum_id=1, epoch="e")
    hello = Hello(protocol=PROTOCOL_VERSION, replica_id="fuzz", checkpoint_addresses=["http://127.0.0.1:1"])
    messages = [
        hello,
        Heartbeat(),
        QuorumRequest(request_id=1, version=version),
        JoinProgress(quorum_id=1, step=1, reach_s=1.0),
        LocateState(request_id=1, version=version),
        CommitVote(quorum_id=1, epoch="e", step=1, approve=True),
        CollectiveWait(quorum_id=1, step=1, index=1, digest="0"),
        Leave(reason="gone"),
        AllowStepLoss(),
        ForgetJob(),
    ]
    return [text for message in messages if (text := _encoded(message))]


def rank_messages() -> list[str]:
    """Return messages as a rank sends them; of a rank that does not exist, as others would be taken for one that does."""
    return [_encoded(RankHello(protocol=PROTOCOL_VERSION, group_rank=77)), *group_messages()[2:10]]


def _encoded(message: object) -> str:
    text = encode(message)  # type: ignore[arg-type]
    return text if isinstance(text, str) else text.decode()


def mutated_message(chance: random.Random, text: str) -> bytes:
    how = chance.randrange(8)
    if how == 0:
        return flipped(chance, text.encode())
    if how == 1:
        return text.encode()[: chance.randrange(len(text))]
    if how == 2:
        return b"[" * chance.choice([10, 100_000])
    if how == 3:
        return text.encode()[:-1] + b"," + text.encode()[1:]
    content = msgspec.json.decode(text)
    for key in chance.sample(sorted(content), min(len(content), chance.randint(1, 4))):
        if key == "type" and chance.random() < 0.8:
            continue
        value: object = chance.choice([*HOSTILE_NUMBERS, *HOSTILE_TEXTS, None, True, [], {}, [[]] * 1000])
        content[key] = value if chance.random() < 0.7 else [value] * chance.choice([1, 500])
    return json.dumps(content).encode("utf-8", "surrogatepass")


def frame(chance: random.Random, payload: bytes, opcode: int = 1, *, lies: bool = False) -> bytes:
    """Return a WebSocket frame (RFC 6455, 5.2); one that lies has a length, bits or a mask that are none."""
    first = 0x80 | opcode
    length: int = len(payload)
    masked = 0x80
    if lies:
        first = chance.choice([first, chance.randrange(256), first | 0x40, opcode])
        length = chance.choice([length, length + 1, 126, 65536, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
        masked = chance.choice([0x80, 0x80, 0])
    if length < 126 and chance.random() < 0.9:
        head = bytes([first, masked | length])
    elif length < 65536 and chance.random() < 0.9:
        head = bytes([first, masked | 126]) + struct.pack("!H", length)
    else:
        head = bytes([first, masked | 127]) + struct.pack("!Q", length)
    if not masked:
        return head + payload
    key = chance.randbytes(4)
    return head + key + bytes(byte ^ key[place % 4] for place, byte in enumerate(payload))


def websocket(
    path: str, messages: list[str], show_token: Callable[[random.Random], str] = lambda chance: f"Bearer {TOKEN}"
) -> Callable[[Attack, random.Random], tuple[str, str]]:
    """Return an attack that opens a WebSocket and sends frames. `show_token` makes the header of one who knows the token."""

    def one(attack: Attack, chance: random.Random) -> tuple[str, str]:
        has_token = chance.random() < 0.75
        key = base64.b64encode(chance.randbytes(16)).decode()
        lines = [
            f"GET {path}?job=fuzz-{chance.randrange(16)} HTTP/1.1",
            "Host: h",
            f"Upgrade: {chance.choice(['websocket'] * 9 + ['h2c'])}",
            "Connection: Upgrade",
            f"Sec-WebSocket-Version: {chance.choice(['13'] * 9 + ['0'])}",
            f"Sec-WebSocket-Key: {chance.choice([key] * 8 + ['x', 'é'])}",
            *chance.choice([[], [], ["Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=99"]]),
        ]
        if has_token:
            lines.append(f"Authorization: {show_token(chance)}")
        sock = attack.connect()
        what = f"WebSocket, {'with' if has_token else 'without'} the token"
        try:
            sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
            frames = []
            for number in range(chance.randint(1, 10)):
                payload = (
                    messages[0].encode() if not number and chance.random() < 0.6 else chance.choice(messages).encode()
                )
                if chance.random() < 0.6:
                    payload = mutated_message(chance, payload.decode())
                opcode = chance.choice([1, 1, 1, 1, 0, 2, 8, 9, 10, 3, 15])
                frames.append(frame(chance, payload[:200_000], opcode, lies=chance.random() < 0.3))
            sock.sendall(b"".join(frames))
            return what, attack.read(sock)
        except OSError as error:
            return what, type(error).__name__
        finally:
            sock.close()

    return one


# ----------------------------------------------------------------------------------------------------------- what came of it


def tracebacks(text: str) -> list[str]:
    """Return the last lines of the tracebacks in a log that no malformed request explains."""
    found = []
    for part in text.split("Traceback (most recent call last):\n")[1:]:
        last = next((line for line in part.splitlines() if line and not line.startswith((" ", "\t"))), "")
        if not _CLIENTS_FAULT.match(last):
            found.append(last[:200])
    return found


def settled(job: Job, before: dict[str, Sample]) -> dict[str, Sample]:
    """Wait until threads and descriptors are given back, some seconds at most; return what is used then."""
    until = time.monotonic() + SETTLE_S
    while True:
        after = {name: job.sample(name) for name in job.processes}
        is_back = all(
            after[name].num_threads <= before[name].num_threads + MAX_MORE_THREADS
            and after[name].num_descriptors <= before[name].num_descriptors + MAX_MORE_DESCRIPTORS
            for name in after
        )
        if is_back or time.monotonic() > until:
            return after
        time.sleep(0.5)


def judge(
    job: Job, attacks: list[Attack], before: dict[str, Sample], began: float, seen: dict[str, dict[str, int]]
) -> list[str]:
    """Print what was watched; return what is wrong."""
    wrong = []
    ended = job.ended()
    if ended:
        return [f"processes ended: {ended}"]
    attack_s = time.monotonic() - began
    first = {name: job.last(name)["step"] for name in job.ranks}
    after = settled(job, before)
    time.sleep(3)
    now = time.monotonic()
    for name in job.ranks:
        last = job.last(name)
        gap_s = job.longest_gap_s(name, began, now)
        discarded = last["discarded"] - seen[name]["discarded"]
        print(
            f"{name} | steps | {last['step'] - seen[name]['step']} | {discarded} discarded, longest gap {gap_s:.2f} s"
        )
        if discarded:
            wrong.append(f"{name} discarded {discarded} steps")
        if last["step"] <= first[name] or gap_s > MAX_GAP_S:
            wrong.append(f"{name} stopped: step {last['step']}, longest gap {gap_s:.1f} s")
    for name, sample in after.items():
        log = job.log(name)
        found = tracebacks(log)
        grown = len(log.encode()) - seen[name]["log"]
        mib = sample.resident_mib - before[name].resident_mib
        print(
            f"{name} | log, memory, threads, descriptors | {grown} bytes | {mib:+.1f} MiB, "
            f"{before[name].num_threads} to {sample.num_threads}, {before[name].num_descriptors} to {sample.num_descriptors}"
        )
        for line, count in Counter(found).most_common(5):
            wrong.append(f"{name} wrote a traceback {count} times: {line}")
        if grown > MAX_LOG_BYTES_PER_S * (attack_s + 4):
            wrong.append(f"{name} wrote {grown} bytes to its log in {attack_s:.0f} s")
        if mib > MAX_GROWN_MIB:
            wrong.append(f"{name} grew by {mib:.0f} MiB")
        if sample.num_threads > before[name].num_threads + MAX_MORE_THREADS:
            wrong.append(f"{name} kept {sample.num_threads - before[name].num_threads} threads more")
        if sample.num_descriptors > before[name].num_descriptors + MAX_MORE_DESCRIPTORS:
            wrong.append(f"{name} kept {sample.num_descriptors - before[name].num_descriptors} descriptors more")
    wrong += [f"{attack.target} gave {attack.num_5xx} answers of 5xx" for attack in attacks if attack.num_5xx]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of attack, after which the job is watched")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--keep", type=Path, help="directory for logs, which are kept")
    options = parser.parse_args()
    directory = options.keep or Path(tempfile.mkdtemp(prefix="fuzz-live-"))
    directory.mkdir(parents=True, exist_ok=True)
    job = Job(directory, TOKEN)
    try:
        transport, service = (job.addresses["g0r0"][key].removeprefix("http://") for key in ("transport", "service"))
        group = job.addresses["g0r0"]["replica_id"]
        step_paths = ["", "/latest/manifest", "/1/manifest", "/1/blocks/0-0", "/1/parts", "/1/peers", "/1/done"]
        attacks = [
            Attack("transport", transport, malformed([f"/v1/checkpoint{path}" for path in step_paths])),
            Attack("transport", transport, hostile_content),
            Attack("lighthouse", job.lighthouse, malformed(["/", "/v1/groups", "/v1/groups?job=fuzz-1", "/?job=x"])),
            Attack("lighthouse", job.lighthouse, websocket("/v1/groups", group_messages())),
            Attack("manager service", service, malformed(["/", "/v1/ranks", "/v1/ranks?x=1"])),
            Attack(
                "manager service",
                service,
                websocket(
                    "/v1/ranks",
                    rank_messages(),
                    lambda chance: RankProof(TOKEN, group, chance.randbytes(16).hex()).authorization,
                ),
            ),
        ]
        time.sleep(2)
        before = {name: job.sample(name) for name in job.processes}
        seen = {name: {"log": len(job.log(name).encode()), **_counts(job, name)} for name in job.processes}
        began = time.monotonic()
        for attack in attacks:
            attack.run(options.seconds / len(attacks), options.seed)
        print("target | what | count | result")
        for attack in attacks:
            print("\n".join(attack.rows()))
        wrong = judge(job, attacks, before, began, seen)
    finally:
        job.stop()
        if options.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    num = sum(attack.outcomes.total() for attack in attacks)
    if wrong:
        print(f"VULNERABLE: {num} connections, seed {options.seed}: {'; '.join(wrong)}")
        return 1
    print(f"held: {num} connections in {options.seconds:.0f} s, seed {options.seed}; no step was discarded")
    return 0


def _counts(job: Job, name: str) -> dict[str, int]:
    if name not in job.ranks:
        return {}
    last = job.last(name)
    return {"step": last["step"], "discarded": last["discarded"]}


if __name__ == "__main__":
    sys.exit(main())
