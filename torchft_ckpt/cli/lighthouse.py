"""The commands about the lighthouse: run one, ask one, have a group leave, let a job go on, forget one. None imports torch.

`lighthouse` takes its options in torchft's spelling too, with underscores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import signal
import time
from typing import TYPE_CHECKING

from torchft_ckpt import config
from torchft_ckpt.cli.options import add_token
from torchft_ckpt.errors import AuthenticationError, ConfigError, LighthouseUnreachableError, RefusedError
from torchft_ckpt.network import join_host_port, max_descriptors

if TYPE_CHECKING:
    from torchft_ckpt.core.coordination.messages import AllowStepLoss, Drain, ForgetJob

_DESCRIPTORS = 8192  # twice as many as a lighthouse takes connections
_SIGNALS_APART_S = 0.5
"""What ends a whole job, as Slurm and Kubernetes do, sends SIGTERM to the lighthouse and to its groups within this time."""
_LEAVE_PATIENCE_S = 28.0
"""Beyond the deadline of `Manager.leave_on`, and before SIGKILL comes."""
MAX_STATUS_BYTES = 64 << 20
"""Ten times what one needs of a job with 20,000 groups."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `lighthouse`, `status`, `drain`, `allow-step-loss` and `forget-job`; each sets `run`, which returns the exit status."""
    lighthouse = commands.add_parser("lighthouse", help="run a lighthouse until SIGTERM or Ctrl-C")
    lighthouse.add_argument(
        "--min-replicas", "--min_replicas", type=int, required=True, help="the fewest replica groups that may train"
    )
    lighthouse.add_argument(
        "--bind", default="[::]:29510", help="HOST:PORT, port 0 for any; [::] is IPv6 and IPv4 (default: %(default)s)"
    )
    lighthouse.add_argument(
        "--join-timeout-ms",
        "--join_timeout_ms",
        type=int,
        default=60_000,
        help="how long those who ask for a quorum wait for living groups that have not asked, once they are more than half of the"
        " living (default: %(default)s)",
    )
    lighthouse.add_argument(
        "--heartbeat-timeout-ms",
        "--heartbeat_timeout_ms",
        type=int,
        default=5_000,
        help="a group that is silent for so long is dead (default: %(default)s)",
    )
    lighthouse.add_argument(
        "--quorum-tick-ms", "--quorum_tick_ms", type=int, default=100, help="accepted for torchft's sake, not used"
    )
    lighthouse.add_argument("--hostname", help="address to advertise")
    lighthouse.add_argument(
        "--allow-step-loss",
        action="store_true",
        help="go on from an older state when every group that held the newest committed step is gone",
    )
    add_token(lighthouse)
    lighthouse.set_defaults(run=_run_lighthouse)

    status = commands.add_parser("status", help="print what a lighthouse knows of its jobs, or of one, as JSON")
    _add_lighthouse(status)
    _add_job(status, "print all of this job (default: all jobs in short)")
    status.set_defaults(run=_run_status)

    drain = commands.add_parser(
        "drain",
        help="have a replica group leave its job at the end of its step, as after SIGTERM with Manager.leave_on",
    )
    drain.add_argument("group", metavar="GROUP", help="its replica id, or what stands before the last colon of it")
    _add_lighthouse(drain)
    _add_job(drain, "the job; needed where there are several")
    drain.set_defaults(run=_run_drain)

    allow = commands.add_parser(
        "allow-step-loss", help="let a job whose newest state is lost go on from an older one, this once"
    )
    _add_lighthouse(allow)
    _add_job(allow, "the job; needed where there are several")
    allow.set_defaults(run=_run_allow_step_loss)

    forget = commands.add_parser(
        "forget-job", help="have a lighthouse forget a job none of whose groups is connected; its name may be used anew"
    )
    _add_lighthouse(forget)
    _add_job(forget, "the job; needed where there are several")
    forget.set_defaults(run=_run_forget_job)


def _add_lighthouse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lighthouse", help="HOST:PORT (default: TORCHFT_LIGHTHOUSE)")
    add_token(parser)


def _add_job(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--job", help=text)


def _run_lighthouse(options: argparse.Namespace) -> int:
    from torchft_ckpt.coordination.lighthouse_server import LighthouseServer

    signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # unlike an Event, it may be used in a handler
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.put(number))
    max_descriptors(_DESCRIPTORS)
    server = LighthouseServer(
        bind=options.bind,
        min_replicas=options.min_replicas,
        join_timeout_ms=options.join_timeout_ms,
        heartbeat_timeout_ms=options.heartbeat_timeout_ms,
        token=options.token,
        hostname=options.hostname,
        allow_step_loss=options.allow_step_loss,
    )
    print(f"lighthouse at {server.address()}", flush=True)
    signals.get()
    until = time.monotonic() + _LEAVE_PATIENCE_S
    hurries = _comes_within(signals, _SIGNALS_APART_S)
    while not hurries and server.groups_leaving() and time.monotonic() < until:
        hurries = _comes_within(signals, 0.05)  # they are on their way out, and need its word
    server.shutdown()
    return 0


def _comes_within(signals: queue.SimpleQueue[int], seconds: float) -> bool:
    try:
        signals.get(timeout=seconds)
    except queue.Empty:
        return False
    return True


def _run_status(options: argparse.Namespace) -> int:
    print(asyncio.run(_get_status(*_lighthouse(options), options.job)))
    return 0


def _run_allow_step_loss(options: argparse.Namespace) -> int:
    from torchft_ckpt.core.coordination.messages import AllowStepLoss

    print(asyncio.run(_tell(*_lighthouse(options), options.job, AllowStepLoss())))
    return 0


def _run_drain(options: argparse.Namespace) -> int:
    import msgspec

    from torchft_ckpt.core.coordination.messages import Drain

    try:
        word = msgspec.convert({"type": "Drain", "replica_id": options.group}, Drain)
    except msgspec.ValidationError as error:
        raise ConfigError(f"GROUP {options.group[:80]!r} is no name of a replica group: {error}", "group") from error
    print(asyncio.run(_tell(*_lighthouse(options), options.job, word)))
    return 0


def _run_forget_job(options: argparse.Namespace) -> int:
    from torchft_ckpt.core.coordination.messages import ForgetJob

    print(asyncio.run(_tell(*_lighthouse(options), options.job, ForgetJob())))
    return 0


def _lighthouse(options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    address = config.resolve(options.lighthouse, config.LIGHTHOUSE, "", str)
    if not address:
        raise ConfigError("no lighthouse address: pass --lighthouse or set TORCHFT_LIGHTHOUSE", "lighthouse")
    token = config.resolve(options.token, config.TOKEN, "", str)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return join_host_port(*config.parse_host_port(address, what="lighthouse address")), headers


def _query(job: str | None) -> dict[str, str]:
    from torchft_ckpt.coordination.lighthouse_connection import resolve_job

    return {} if job is None else {"job": resolve_job(job)}


async def _get_status(address: str, headers: dict[str, str], job: str | None) -> str:
    """Return the status in JSON, for people. Another server than a lighthouse may answer, with a body without end, or no JSON."""
    import aiohttp

    from torchft_ckpt.coordination.channel import cause_of, client_session

    timeout = aiohttp.ClientTimeout(total=10)
    body = bytearray()
    try:
        async with client_session(headers | {"Accept-Encoding": "identity"}) as session:
            async with session.get(f"http://{address}/", params=_query(job), timeout=timeout) as response:
                if response.status == 404 and job is not None:
                    raise ConfigError(f"the lighthouse at {address} knows no job {job}; `status` lists them", "job")
                _check_status(response.status, address)
                if "Content-Encoding" in response.headers:
                    raise _no_lighthouse(address, "it compresses its answer, and was asked not to")
                async for chunk in response.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > MAX_STATUS_BYTES:
                        raise _no_lighthouse(address, f"its status is longer than {MAX_STATUS_BYTES >> 20} MiB")
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        why = cause_of(error) if str(error) else "the status was not there after 10 s"
        raise LighthouseUnreachableError(f"no lighthouse answers at {address}: {why}", address) from error
    try:
        status = json.loads(body)
        if not isinstance(status, dict):
            raise ValueError("it is no JSON object")
        return json.dumps(status, indent=2)
    except (ValueError, RecursionError) as error:
        raise _no_lighthouse(address, f"its status cannot be read: {error}") from error


async def _tell(address: str, headers: dict[str, str], job: str | None, word: AllowStepLoss | Drain | ForgetJob) -> str:
    """Say the operator's word; return what follows from it."""
    import aiohttp

    from torchft_ckpt.coordination.channel import cause_of, client_session
    from torchft_ckpt.core.coordination.messages import Done, Refused, decode_from_lighthouse, encode

    party = f"the lighthouse at {address}"
    try:
        async with client_session(headers) as session:
            url = f"http://{address}/v1/groups"
            socket = await asyncio.wait_for(session.ws_connect(url, params=_query(job)), 10)
            await socket.send_str(encode(word))
            answer = await socket.receive(timeout=10)
            await socket.close()
    except aiohttp.WSServerHandshakeError as error:
        _check_status(error.status, address)
        raise _no_lighthouse(address, f"HTTP {error.status}") from error
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise LighthouseUnreachableError(f"no lighthouse answers at {address}: {cause_of(error)}", address) from error
    if answer.type is not aiohttp.WSMsgType.TEXT:
        raise LighthouseUnreachableError(f"{party} closed the connection without an answer", address)
    said = decode_from_lighthouse(answer.data, party)
    if isinstance(said, Refused):
        raise RefusedError(f"{party} did not do it: {said.reason}", address)
    return said.text if isinstance(said, Done) else ""


def _check_status(status: int, address: str) -> None:
    if status in (401, 403):
        raise AuthenticationError(
            f"the lighthouse at {address} refused our token; set TORCHFT_CKPT_TOKEN, or pass --token-file", address
        )
    if status != 200:
        raise _no_lighthouse(address, f"HTTP {status}")


def _no_lighthouse(address: str, why: str) -> LighthouseUnreachableError:
    return LighthouseUnreachableError(f"what answers at {address} is no lighthouse of ours: {why}", address)
