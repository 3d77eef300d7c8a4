"""The options of the demo, and the order of things: text, training with kills, report, exit code."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from demo import corpus
from demo.chaos import plan_kills
from demo.display import Display
from demo.report import build_report, compare, print_report, write_json
from demo.supervisor import RunFailedError, RunOptions, Supervisor
from demo.timeline import Timeline, judge
from torchft_ckpt.cli.goodput import read_accounts

_INTERRUPTED = 130


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="demo",
        description="Trains a small GPT on Python's own source text as several replica groups, kills them at random "
        "with SIGKILL, starts them again, and shows what each kill cost. Then it trains once more without a kill. Exit code 0 "
        "only if all groups end bit-equal, and both runs too.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=6, metavar="N", help="how many times a group is killed")
    parser.add_argument("--groups", type=int, default=3, metavar="N", help="how many replica groups train")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="committed steps to train, at least")
    parser.add_argument(
        "--seed", type=int, default=None, help="decides the kills, the weights and the batches; random if left out"
    )
    parser.add_argument(
        "--slow-link",
        action="store_true",
        help="slow transfers of the state down, not the collectives: the state takes several steps of 1 s, and nobody may wait "
        "more than 3 s for it; the picture shows how long each step took; 5 kills in 100 steps unless told otherwise, and no run "
        "without them",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="where picture and log go")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures here too")
    parser.add_argument("--lighthouse-port", type=int, default=0, metavar="PORT", help="0 takes a free one")
    if "--slow-link" in arguments:
        parser.set_defaults(kills=5, steps=100)
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1_000_000)
    try:
        options.plan = plan_kills(
            seed=options.seed, num_kills=options.kills, num_groups=options.groups, num_steps=options.steps
        )
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str]) -> int:
    """Run the demo; the exit code."""
    options = parse_arguments(arguments)
    console = Console(width=None if os.isatty(1) else 120)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # as Ctrl-C, also where a shell has it ignored
        signal.signal(number, signal.default_int_handler)
    started_s = time.monotonic()
    num_characters = corpus.write_tokens(out / "tokens.bin")
    console.print(
        f"{options.groups} replica groups, {options.kills} kill{'' if options.kills == 1 else 's'}, seed {options.seed}; "
        f"text: Python's standard library, {num_characters / 1e6:.1f} million characters; log: {out / 'log.txt'}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        run = _run_options(options, out)
        timeline = _train(run, console)
        (goodput,) = read_accounts([run.goodput])
        verdict, plain = judge(timeline, num_planned_kills=options.kills), None
        if verdict.is_bit_equal and options.kills and not options.slow_link:
            console.print(f"the same {verdict.step} steps once more, without a kill", highlight=False)
            folder = out / "without-kills"
            folder.mkdir(exist_ok=True)
            plain = _train(replace(run, plan=(), stop_step=verdict.step, folder=folder), console)
    except KeyboardInterrupt:
        console.print("interrupted; every group was ended", style="bold red")
        return _INTERRUPTED
    except RunFailedError as error:
        console.print(
            f"FAILED: {error} (seed {options.seed})", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    duration_s = time.monotonic() - started_s
    picture = out / "demo.png"
    report = build_report(
        timeline,
        seed=options.seed,
        num_planned_kills=options.kills,
        num_in_step=run.global_batch_size,
        duration_s=duration_s,
        picture=picture,
        without_kills=plain,
        goodput=goodput,
    )
    if options.json is not None:
        write_json(report, options.json)

    from demo.plot import draw  # matplotlib takes a second to import: not before the groups are started

    draw(timeline, report, picture, shows_step_times=options.slow_link)
    print_report(report, goodput, console)
    return 0 if report.verdict.is_bit_equal and compare(report) is None else 1


def _run_options(options: argparse.Namespace, out: Path) -> RunOptions:
    return RunOptions(
        num_groups=options.groups,
        num_steps=options.steps,
        seed=options.seed,
        plan=options.plan,
        lighthouse_port=options.lighthouse_port,
        slow_link=options.slow_link,
        tokens=out / "tokens.bin",
        folder=out,
    )


def _train(run: RunOptions, console: Console) -> Timeline:
    """Run the groups until all have finished."""
    with Display(console, num_steps=run.stop_step or run.num_steps) as display:
        return Supervisor(run, display).run()
