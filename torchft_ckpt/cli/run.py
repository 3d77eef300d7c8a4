"""The command `run`: a lighthouse and the replica groups of a job on this machine, each by torchrun."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchft_ckpt import config
from torchft_ckpt.cli.options import add_tls, add_token, tls_of
from torchft_ckpt.core.services.launching import LaunchPlan
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.network import is_loopback

_log = logging.getLogger(__name__)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run`; it sets `run`, which returns the exit status."""
    run = commands.add_parser(
        "run",
        help="run a lighthouse and the replica groups of a job on this machine",
        usage="%(prog)s --groups N [--nproc R] [options] -- SCRIPT [arguments]",
        description="Runs SCRIPT in R ranks of each of N replica groups, and a lighthouse. A group that fails starts again. Exit"
        " status: 0 if all groups ended with 0, else that of the first group that has no restart left. --left-status is for a"
        " launcher that was told to stop.",
    )
    run.add_argument("--groups", type=int, required=True, metavar="N", help="replica groups to start here")
    run.add_argument("--nproc", type=int, default=1, metavar="R", help="ranks of each group (default: %(default)s)")
    run.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often a group that failed starts again, after 1, 2, 4, ... 30 s (default: %(default)s)",
    )
    run.add_argument(
        "--min-replicas",
        type=int,
        metavar="N",
        help="the fewest groups that may train; once fewer are left, all end (default: all but one)",
    )
    run.add_argument(
        "--left-status",
        type=int,
        default=0,
        metavar="N",
        help="exit status if this command got a signal and its groups then ended with 0: one other than 0 tells a cluster that"
        " they have left and are to come back (default: %(default)s)",
    )
    run.add_argument(
        "--bind",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where the lighthouse listens; for groups on other machines, [::]:29510, say (default: %(default)s)",
    )
    run.add_argument("--log-dir", type=Path, metavar="DIR", help="keep what each rank says in files here")
    more = run.add_argument_group("a job on several machines")
    more.add_argument("--lighthouse", metavar="HOST:PORT", help="the first machine's lighthouse, to start none here")
    more.add_argument("--first-group", type=int, default=0, metavar="K", help="number of the first group here")
    more.add_argument(
        "--all-groups", type=int, metavar="N", help="groups on all machines (default: up to the last here)"
    )
    more.add_argument("--job", help="the job's name, the same on each machine (default: a new one)")
    add_token(run)
    add_tls(run)
    run.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the training script and its arguments"
    )
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from torchft_ckpt.launcher.supervisor import Launch, Supervisor

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigError(
            "no training script: name it behind the options, as in `run --groups 2 -- train.py`", "command"
        )
    plan = _plan(options)
    devices = _devices()
    plan.devices_of(plan.first_group, devices)  # too few are an error before anything is started
    job = _job(options)
    if options.token:
        os.environ.update(config.environment_of(options.token))
    tls = tls_of(options)
    if tls is not None:
        os.environ.update(tls.environment())
    with _lighthouse(options, plan) as address, _log_folder(options.log_dir) as log_folder:
        _log.info(
            "lighthouse at %s, job %s: groups %d to %d of %d, ranks of each: %d",
            address,
            job,
            plan.groups[0],
            plan.groups[-1],
            plan.num_all_groups,
            plan.ranks_per_group,
        )
        launch = Launch(plan=plan, command=command, lighthouse=address, job=job, log_folder=log_folder, devices=devices)
        return asyncio.run(Supervisor(launch).run())


def _plan(options: argparse.Namespace) -> LaunchPlan:
    num_all_groups = options.first_group + options.groups if options.all_groups is None else options.all_groups
    return LaunchPlan(
        first_group=options.first_group,
        num_groups=options.groups,
        num_all_groups=num_all_groups,
        ranks_per_group=options.nproc,
        min_replicas=max(num_all_groups - 1, 1) if options.min_replicas is None else options.min_replicas,
        max_restarts=options.restarts,
        left_status=options.left_status,
    )


def _job(options: argparse.Namespace) -> str:
    job: str = options.job or (os.environ.get(config.JOB[0], "") if options.lighthouse else "")
    if options.lighthouse and not job:
        raise ConfigError("--lighthouse needs --job: the name that the first machine's `run` printed", "job")
    return job or f"run-{secrets.token_hex(4)}"


def _devices() -> list[str]:
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@contextlib.contextmanager
def _lighthouse(options: argparse.Namespace, plan: LaunchPlan) -> Iterator[str]:
    if options.lighthouse:
        yield options.lighthouse
        return
    from torchft_ckpt.coordination.lighthouse_server import LighthouseServer

    host, _ = config.parse_host_port(options.bind, what="lighthouse bind address", default_host="0.0.0.0")
    has_token = options.token or config.resolve(None, config.TOKEN, "", str)
    own_token = None if has_token or not is_loopback(host) else secrets.token_hex(32)
    server = LighthouseServer(bind=options.bind, min_replicas=plan.min_replicas, token=own_token or options.token)
    with contextlib.ExitStack() as stack:
        stack.callback(server.shutdown)
        if own_token is not None:
            stack.enter_context(_token_file(server.address().partition("://")[2], own_token))
        yield server.address()


@contextlib.contextmanager
def _token_file(address: str, token: str) -> Iterator[None]:
    """Give a token to all groups, and keep it in a file for what else this user starts on this machine: both ends are ours."""
    path = config.token_file_of_run(address)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a `run` that was killed
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
    except OSError as error:
        raise ConfigError(
            f"the file {path} cannot be made ({error.strerror}); set TORCHFT_CKPT_TOKEN", "token"
        ) from error
    os.environ[config.TOKEN[0]] = token  # whoever cleans the folder of the file takes it from no group
    _log.info("who reads its state by URL on this machine needs the token in %s", path)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def _log_folder(folder: Path | None) -> Iterator[Path]:
    """Yield a folder for what the ranks say: the one that was named, or one that is removed after the block."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="torchft_ckpt_run_") as temporary:
        yield Path(temporary)
