"""The commands about a live peer: `inspect` prints what it serves, `pull` saves its state. torch is imported when they run."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from torchft_ckpt.cli.options import add_file, add_tls, add_token, count, seconds, tls_of
from torchft_ckpt.errors import ConfigError, SourceRefusedError

if TYPE_CHECKING:
    from torchft_ckpt.checkpointing.protocol import Index
    from torchft_ckpt.checkpointing.resharding.peers import JobPeers

_URL_HELP = "http://HOST:PORT of the peer's transport, as its HTTPTransport.metadata() returns it"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inspect` and `pull`; each sets `run`, which returns the exit status."""
    inspect = commands.add_parser("inspect", help="print what a live peer serves")
    _add_peer(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON, with every tensor")
    inspect.add_argument(
        "--tensors",
        type=count,
        default=None,
        metavar="N",
        help="how many of the largest tensors to print (default: 5)",
    )
    inspect.add_argument(
        "--wait",
        type=seconds,
        default=None,
        metavar="SECONDS",
        help="where nothing is served, ask the peer to serve its next step, and wait so long for it",
    )
    inspect.set_defaults(run=_run_inspect)

    pull = commands.add_parser(
        "pull", help="save the state of a live peer, or of all ranks of a replica group, to a safetensors file"
    )
    _add_peer(pull, all_ranks=True)
    add_file(pull)
    pull.add_argument("--step", type=count, default=None, help="the step wanted (default: the newest)")
    pull.add_argument(
        "--timeout",
        type=seconds,
        default=timedelta(seconds=300),
        metavar="SECONDS",
        help="give up after so long (default: 300)",
    )
    pull.add_argument(
        "--root",
        metavar="PATH",
        help="dotted path in the state where names begin (default: what the Manager's state_dict returned; '' for all)",
    )
    pull.set_defaults(run=_run_pull)


def _add_peer(parser: argparse.ArgumentParser, *, all_ranks: bool = False) -> None:
    more = "; of a model that is sharded over several ranks, of each of them" if all_ranks else ""
    parser.add_argument("url", metavar="URL", nargs="*" if all_ranks else "?", help=f"{_URL_HELP}{more}; or --job")
    parser.add_argument("--job", help="in place of URLs: the job, whose groups its lighthouse names")
    parser.add_argument("--lighthouse", metavar="HOST:PORT", help="of that job (default: TORCHFT_LIGHTHOUSE)")
    add_token(parser)
    add_tls(parser, "--ca")
    parser.set_defaults(log_level=logging.WARNING)


def _run_inspect(options: argparse.Namespace) -> int:
    from torchft_ckpt.cli import summary

    peer = _peers(options, [options.url] if options.url else [])
    index = peer.index()
    # What it only passes on while it receives it has no manifest here.
    step = next((entry.step for entry in index.snapshots if entry.phase != "relay"), None)
    manifest = None
    if step is not None:
        with contextlib.suppress(SourceRefusedError):  # the peer may have gone on since
            manifest = peer.manifest(step)
    if manifest is None:
        if options.wait is None:
            print(_nothing_served(peer.urls, index, options))
            return 0
        manifest, index = peer.manifest(None, timeout=options.wait), peer.index()
    if options.json:
        print(json.dumps(summary.as_json(peer.urls, index, manifest, options.tensors), indent=2))
    else:
        print(summary.as_text(peer.urls, index, manifest, 5 if options.tensors is None else options.tensors))
    return 0


def _nothing_served(url: str, index: Index, options: argparse.Namespace) -> str:
    if options.json:
        return json.dumps({"url": url, "newest_step": index.newest_step, "snapshots": []}, indent=2)
    newest = (
        "it has served none yet" if index.newest_step is None else f"the newest it served was step {index.newest_step}"
    )
    return (
        f"{url} serves no state now; {newest}.\n"
        "A peer serves its state while another replica heals from it. `pull`, and `inspect` with `--wait SECONDS`, "
        "ask it to serve its next step."
    )


def _run_pull(options: argparse.Namespace) -> int:
    from torchft_ckpt.checkpointing.progress import ProgressBar
    from torchft_ckpt.checkpointing.state.containers import below_root
    from torchft_ckpt.cli.safetensors_file import SafetensorsFile, flatten

    peers = _peers(options, options.url)
    with SafetensorsFile(options.output, force=options.force) as file:
        if not options.quiet:
            wanted = "the newest state" if options.step is None else f"step {options.step}"
            print(f"asking {peers.urls or 'the groups of the job'} for {wanted}", file=sys.stderr)
        with contextlib.ExitStack() as stack:
            on_progress = None if options.quiet else stack.enter_context(ProgressBar())
            pulled = peers.pull(options.step, timeout=options.timeout, on_progress=on_progress)
        is_one_leaf = options.root is None and not isinstance(pulled.state, dict)
        content = flatten(pulled.state if is_one_leaf else below_root(pulled.state, options.root))
        num_bytes = file.write(content, pulled.step)
    content.tell(options.output, f"step {pulled.step}", num_bytes, quiet=options.quiet)
    return 0


def _peers(options: argparse.Namespace, urls: list[str]) -> JobPeers:
    from torchft_ckpt.checkpointing.resharding.peers import JobPeers
    from torchft_ckpt.coordination.asking import Lighthouse

    if urls and (options.job is not None or options.lighthouse is not None):
        raise ConfigError("name the peer by its URL, or the job by --job, not both", "job")
    tls = tls_of(options)
    if tls is not None and (plain := [url for url in urls if url.startswith("http://")]):
        raise ConfigError(f"{plain[0]} is plain http, and TLS is set up here; use https://HOST:PORT", "url")
    if urls:
        return JobPeers([urls], token=options.token, ssl_context=tls)
    asked = Lighthouse(options.lighthouse, options.token, tls)
    return JobPeers(functools.partial(asked.urls, options.job), token=asked.token, ssl_context=tls)
