"""Jobs of `examples/train_diloco.py` for the benchmark: what is measured is what the example runs.

The example's packages lie in `examples/`, which `scripts/bench_diloco` puts on the path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.job import Job, JobPlan, JobRecord
from diloco.links import Links, Loopback, Network
from diloco.options import Options, parse
from diloco.records import Step

from bench.diloco_figures import InnerStep
from bench.run import Run

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DILOCO = _EXAMPLES / "train_diloco.py"
DEMO_GPT = {"width": 128, "blocks": 3, "context": 64}
"""The demo's model: 0.6 M fp32 parameters."""
DDP = _EXAMPLES / "diloco" / "baseline.py"


def arguments_of(**options: Any) -> list[str]:
    """Write options as a command line of the example; True is a flag, False is nothing."""
    arguments = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value is not False:
            arguments.append(f"{flag}={value}")
    return arguments


def options_of(arguments: Sequence[str]) -> Options:
    """Read a command line as the example does."""
    return parse(list(arguments), "")


@contextmanager
def network(num_groups: int, *, rate_mbit: float | None, is_counted: bool) -> Iterator[Network]:
    """Provide the groups' network: a namespace each where their bytes are counted or their links limited.

    Raises:
        LinksUnavailableError: namespaces are needed and cannot be had.
    """
    if rate_mbit is None and not is_counted:
        yield Loopback()
        return
    with Links(num_groups, rate_mbit=rate_mbit) as links:
        yield links


def run_job(
    run: Run,
    name: str,
    script: Path,
    arguments: Sequence[str],
    *,
    rate_mbit: float | None = None,
    is_counted: bool = False,
    kill_every_s: float | None = None,
) -> JobRecord:
    """Run a job of the example to its end, and return what its groups wrote down.

    Args:
        run: how to measure.
        name: of the job, for its files.
        script: `DILOCO` or `DDP`.
        arguments: the example's command line.
        rate_mbit: of each group's link; None: not limited.
        is_counted: whether each group has an interface of its own, so that its bytes can be told.
        kill_every_s: SIGKILL one group after the other, each so many seconds.

    Raises:
        LinksUnavailableError: namespaces are needed and cannot be had.
        JobFailedError: the job did not reach its end.
    """
    options = options_of(arguments)
    plan = JobPlan(
        name=name,
        script=script,
        arguments=arguments,
        num_groups=options.groups,
        num_planned=options.num_planned,
        kill_every_s=kill_every_s,
    )
    with network(options.groups, rate_mbit=rate_mbit, is_counted=is_counted) as where:
        with Job(plan, where, run.log_dir, run.say) as job:
            return job.run()


def inner_steps(record: JobRecord) -> list[list[InnerStep]]:
    """Return the inner steps of each group."""
    return [
        [
            InnerStep(took_s=step.took_s, round=step.round, sent_bytes=step.sent_bytes)
            for step in records
            if isinstance(step, Step)
        ]
        for records in record.records
    ]
