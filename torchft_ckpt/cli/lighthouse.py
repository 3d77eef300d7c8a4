"""The commands about the lighthouse: run one, ask one, let a job go on. None of them imports torch.

`lighthouse` takes its options in torchft's spelling too, with underscores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import threading

from torchft_ckpt import config
from torchft_ckpt.errors import AuthenticationError, ConfigError, LighthouseUnreachableError
from torchft_ckpt.network import join_host_port


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `lighthouse`, `status` and `allow-step-loss`; each sets `run`, which returns the exit status."""
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
        help="how long those who ask for a quorum wait for living groups that have not asked (default: %(default)s)",
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
    _add_token(lighthouse)
    lighthouse.set_defaults(run=_run_lighthouse)

    status = commands.add_parser("status", help="print what a lighthouse knows, as JSON")
    _add_lighthouse(status)
    status.set_defaults(run=_run_status)

    allow = commands.add_parser(
        "allow-step-loss", help="let a job whose newest state is lost go on from an older one, this once"
    )
    _add_lighthouse(allow)
    allow.set_defaults(run=_run_allow_step_loss)


def _add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token", help="shared secret of the job (default: TORCHFT_CKPT_TOKEN)")


def _add_lighthouse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lighthouse", help="HOST:PORT (default: TORCHFT_LIGHTHOUSE)")
    _add_token(parser)


def _run_lighthouse(options: argparse.Namespace) -> int:
    from torchft_ckpt.coordination.lighthouse_server import LighthouseServer

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
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
    stop.wait()
    server.shutdown()
    return 0


def _run_status(options: argparse.Namespace) -> int:
    print(json.dumps(asyncio.run(_get_status(*_lighthouse(options))), indent=2))
    return 0


def _run_allow_step_loss(options: argparse.Namespace) -> int:
    asyncio.run(_send_allow_step_loss(*_lighthouse(options)))
    print("the next quorum may go on from an older step than the newest that was committed")
    return 0


def _lighthouse(options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    address = config.resolve(options.lighthouse, config.LIGHTHOUSE, "", str)
    if not address:
        raise ConfigError("no lighthouse address: pass --lighthouse or set TORCHFT_LIGHTHOUSE", "lighthouse")
    token = config.resolve(options.token, config.TOKEN, "", str)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return join_host_port(*config.parse_host_port(address, what="lighthouse address")), headers


async def _get_status(address: str, headers: dict[str, str]) -> object:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            async with session.get(f"http://{address}/") as response:
                _check_status(response.status, address)
                return await response.json()
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise LighthouseUnreachableError(f"no lighthouse answers at {address}: {error}", address) from error


async def _send_allow_step_loss(address: str, headers: dict[str, str]) -> None:
    import aiohttp

    from torchft_ckpt.core.messages import AllowStepLoss, encode

    try:
        async with aiohttp.ClientSession(headers=headers) as session:
            socket = await asyncio.wait_for(session.ws_connect(f"http://{address}/v1/groups"), 10)
            await socket.send_str(encode(AllowStepLoss()))
            await socket.close()
    except aiohttp.WSServerHandshakeError as error:
        _check_status(error.status, address)
        raise LighthouseUnreachableError(f"what answers at {address} is no lighthouse of ours", address) from error
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise LighthouseUnreachableError(f"no lighthouse answers at {address}: {error}", address) from error


def _check_status(status: int, address: str) -> None:
    if status in (401, 403):
        raise AuthenticationError(
            f"the lighthouse at {address} refused our token; pass --token or set TORCHFT_CKPT_TOKEN", address
        )
    if status != 200:
        raise LighthouseUnreachableError(f"what answers at {address} is no lighthouse of ours (HTTP {status})", address)
