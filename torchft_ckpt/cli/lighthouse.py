"""The commands about the lighthouse: run one, ask one, drain, let a job go on, forget one. `status --stacks` alone imports torch.

`lighthouse` takes its options in torchft's spelling too, with underscores.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchft_ckpt import config
from torchft_ckpt.cli.options import add_tls, add_token, tls_of
from torchft_ckpt.core.text import printable
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.network import max_descriptors

if TYPE_CHECKING:
    from torchft_ckpt.coordination.asking import Lighthouse
    from torchft_ckpt.core.coordination.leadership import LeaseStore

_DESCRIPTORS = 8192  # twice as many as a lighthouse takes connections
_SIGNALS_APART_S = 0.5
"""What ends a whole job, as Slurm and Kubernetes do, sends SIGTERM to the lighthouse and to its groups within this time."""
_LEAVE_PATIENCE_S = 28.0
"""Beyond the deadline of `Manager.leave_on`, and before SIGKILL comes."""


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
    lighthouse.add_argument(
        "--no-group-label",
        action="store_true",
        help="do not tell groups apart at /metrics; for jobs of more than some hundred",
    )
    add_token(lighthouse)
    add_tls(lighthouse)
    etcd = lighthouse.add_argument_group("several lighthouses, of which one leads by a lease in etcd")
    etcd.add_argument("--etcd", metavar="URL,URL...", help="where etcd is: http://HOST:PORT or https://HOST:PORT")
    etcd.add_argument(
        "--etcd-prefix", metavar="TEXT", default="torchft_ckpt", help="of its keys (default: %(default)s)"
    )
    etcd.add_argument("--etcd-ca", metavar="FILE", help="authorities that etcd's certificate is of, PEM")
    etcd.add_argument("--etcd-cert", metavar="FILE", help="certificate to show to etcd, PEM")
    etcd.add_argument("--etcd-key", metavar="FILE", help="its private key, PEM")
    etcd.add_argument("--etcd-user", metavar="NAME", default="", help="a user that may read and write below the prefix")
    etcd.add_argument("--etcd-password-file", metavar="FILE", help="file that holds its password")
    lighthouse.set_defaults(run=_run_lighthouse)

    status = commands.add_parser("status", help="print what a lighthouse knows of its jobs, or of one, as JSON")
    _add_lighthouse(status, "print all of this job (default: all jobs in short)")
    status.add_argument(
        "--stacks",
        metavar="GROUP",
        help="print where the Python threads of each rank of this replica group are, as the ranks say: it may stand, or be slow",
    )
    status.set_defaults(run=_run_status)

    drain = commands.add_parser(
        "drain",
        help="have a replica group leave its job at the end of its step, as after SIGTERM with Manager.leave_on",
    )
    drain.add_argument("group", metavar="GROUP", help="its replica id, or what stands before the last colon of it")
    _add_lighthouse(drain)
    drain.set_defaults(run=_run_drain)

    allow = commands.add_parser(
        "allow-step-loss", help="let a job whose newest state is lost go on from an older one, this once"
    )
    _add_lighthouse(allow)
    allow.set_defaults(run=_run_word, word="AllowStepLoss")

    forget = commands.add_parser(
        "forget-job", help="have a lighthouse forget a job none of whose groups is connected; its name may be used anew"
    )
    _add_lighthouse(forget)
    forget.set_defaults(run=_run_word, word="ForgetJob")


def _add_lighthouse(parser: argparse.ArgumentParser, of_job: str = "the job; needed where there are several") -> None:
    parser.add_argument("--lighthouse", help="HOST:PORT, several with commas between (default: TORCHFT_LIGHTHOUSE)")
    add_token(parser)
    add_tls(parser)
    parser.add_argument("--job", help=of_job)


def _run_lighthouse(options: argparse.Namespace) -> int:
    from torchft_ckpt.coordination.lighthouse_server import LighthouseServer

    tls = tls_of(options)
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
        store=_store_of(options),
        ssl_context=None if tls is None else tls.server,
        has_group_label=not options.no_group_label,
    )
    print(f"lighthouse at {server.address()}", flush=True)
    signals.get()
    until = time.monotonic() + _LEAVE_PATIENCE_S
    hurries = _comes_within(signals, _SIGNALS_APART_S)
    while not hurries and server.groups_leaving() and time.monotonic() < until:
        hurries = _comes_within(signals, 0.05)  # they are on their way out, and need its word
    server.shutdown()
    return 0


def _store_of(options: argparse.Namespace) -> Callable[[str], LeaseStore] | None:
    if not options.etcd:
        return None
    from torchft_ckpt.coordination.etcd_store import EtcdStore

    file = options.etcd_password_file
    password = config.read_secret(file, "--etcd-password-file") if file else ""
    return lambda address: EtcdStore(
        options.etcd,
        leader=address,
        prefix=options.etcd_prefix,
        authority=options.etcd_ca,
        certificate=options.etcd_cert,
        key=options.etcd_key,
        user=options.etcd_user,
        password=password,
    )


def _comes_within(signals: queue.SimpleQueue[int], seconds: float) -> bool:
    try:
        signals.get(timeout=seconds)
    except queue.Empty:
        return False
    return True


def _run_status(options: argparse.Namespace) -> int:
    if options.stacks is not None:
        return _print_stacks(options)
    print(json.dumps(_lighthouse(options).status(options.job), indent=2))
    return 0


def _print_stacks(options: argparse.Namespace) -> int:
    from torchft_ckpt.checkpointing.resharding.peers import JobPeers
    from torchft_ckpt.coordination.lighthouse_connection import resolve_job
    from torchft_ckpt.core.coordination.messages import group_name

    lighthouse, job = _lighthouse(options), resolve_job(options.job)
    urls = {member["replica_id"]: member["urls"] for member in lighthouse.status(job).get("members", ())}
    name = next((name for name in urls if urls[name] and options.stacks in (name, group_name(name))), "")
    if not name:
        known = ", ".join(map(printable, urls)) or "none"
        raise ConfigError(
            f"job {job} has no group {options.stacks[:80]} that has told its addresses, of {known}", "group"
        )
    peers = JobPeers([urls[name]], token=lighthouse.token, ssl_context=tls_of(options))
    for rank, (url, stacks) in enumerate(peers.stacks()):
        print(*map(printable, [f"{name} rank {rank} at {url}", *stacks.splitlines()]), sep="\n", flush=True)
    return 0


def _run_word(options: argparse.Namespace) -> int:
    from torchft_ckpt.core.coordination import messages

    print(_lighthouse(options).tell(options.job, getattr(messages, options.word)()))
    return 0


def _run_drain(options: argparse.Namespace) -> int:
    import msgspec

    from torchft_ckpt.core.coordination.messages import Drain

    try:
        word = msgspec.convert({"type": "Drain", "replica_id": options.group}, Drain)
    except msgspec.ValidationError as error:
        raise ConfigError(f"GROUP {options.group[:80]!r} is no name of a replica group: {error}", "group") from error
    print(_lighthouse(options).tell(options.job, word))
    return 0


def _lighthouse(options: argparse.Namespace) -> Lighthouse:
    from torchft_ckpt.coordination.asking import Lighthouse

    return Lighthouse(options.lighthouse, options.token, tls_of(options))
