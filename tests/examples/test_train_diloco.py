"""examples/train_diloco.py as a user starts it: real processes, limited links, a SIGKILL; and its figures, on made-up records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from diloco import figures, job, links, options, records
from diloco.job import JobRecord, Kill
from diloco.records import Finished, Step
from support.processes import note, run

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "examples" / "train_diloco.py"


def run_script(out: Path, *arguments: str, timeout_s: float = 480) -> subprocess.CompletedProcess[str]:
    return run(
        [sys.executable, str(SCRIPT), "--quick", f"--out={out}", *arguments],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        cwd=out,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def note_logs(script: subprocess.Popen[str], folder: Path) -> None:
    """Show all logs in a folder if the test fails."""
    note(
        "the script, with all that it started",
        script,
        lambda: "\n".join(log.read_text()[-1000:] for log in sorted(folder.glob("*.log"))),
    )


def need_links() -> None:
    try:
        with links.Links(1, rate_mbit=50.0):
            pass
    except links.LinksUnavailableError as error:
        pytest.skip(f"no network namespaces: {error}")


def rows_of(output: str) -> dict[str, list[str]]:
    """Return the table's cells by the names of its rows."""
    rows = [[cell for cell in line.split("  ") if cell.strip()] for line in output.splitlines()]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in rows if len(row) > 1}


@pytest.mark.longest
@pytest.mark.processes
@pytest.mark.slow
def test_a_group_is_killed_on_a_limited_link_and_all_send_a_tenth_of_what_data_parallel_training_sends(
    tmp_path: Path,
) -> None:
    need_links()

    result = run_script(tmp_path, "--groups=2", "--inner-steps=50")

    assert result.returncode == 0, result.stdout
    rows = rows_of(result.stdout)
    assert rows["groups ended bit-equal"] == ["yes", "yes"]
    assert rows["SIGKILLs"] == ["1", "0"]
    diloco_kb, ddp_kb = (float(cell) for cell in rows["kB sent by a group in an inner step"][:2])
    assert diloco_kb < ddp_kb / 5  # a tenth, and what connecting and the state of the one that came back take
    assert (tmp_path / "diloco.png").stat().st_size > 10_000
    assert not list(Path("/var/run/netns").glob(f"{links._PREFIX}-*"))


@pytest.mark.processes
@pytest.mark.slow
def test_a_group_that_dies_by_itself_ends_the_run_with_its_name(tmp_path: Path) -> None:
    plan = job.JobPlan(name="broken", script=tmp_path / "none.py", arguments=[], num_groups=1, num_planned=1)

    with (
        job.Job(plan, links.Loopback(), tmp_path, print) as broken,
        pytest.raises(job.JobFailedError, match=r"(?s)group 0 ended by itself.*none\.py"),
    ):
        broken.run()


@pytest.mark.processes
@pytest.mark.slow
def test_without_namespaces_it_says_so_and_trains_on_loopback_until_an_interrupt_ends_every_process(
    tmp_path: Path,
) -> None:
    arguments = [
        "--quick",
        "--no-throttle",
        "--no-ddp",
        "--kills=0",
        "--groups=2",
        "--quantize",
        "--inner-steps=100000",
    ]
    script = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments, f"--out={tmp_path}"],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    note_logs(script, tmp_path)
    assert script.stdout is not None
    begun = script.stdout.readline()
    lines = tmp_path / "diloco_0.jsonl"
    while script.poll() is None and '"round":4,' not in (lines.read_text() if lines.exists() else ""):
        time.sleep(0.05)
    children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()

    script.send_signal(signal.SIGTERM)
    output, _ = script.communicate(timeout=200)

    assert "not throttled, on loopback (--no-throttle)" in begun
    assert '"round":4,' in lines.read_text(), output
    assert (len(children), [child for child in children if Path(f"/proc/{child}").exists()]) == (3, []), output


def a_step(at_s: float, *, sent: int, loss: float = 1.0, contributed: bool = True) -> Step:
    return Step(
        at_s=at_s,
        took_s=0.5,
        round=1,
        num_counted=8,
        participants=2,
        contributed=contributed,
        loss=loss,
        sent_bytes=sent,
    )


def the_end(at_s: float, *, sent: int, digest: str = "a", loss: float = 2.0) -> Finished:
    return Finished(at_s=at_s, round=4, num_counted=40, digest=digest, held_out_loss=loss, sent_bytes=sent)


def test_the_curve_has_the_mean_of_what_the_groups_had_sent_by_then() -> None:
    record = JobRecord(
        name="x", num_groups=2, started_s=10.0, records=[[a_step(11, sent=100)], [a_step(12, sent=40, loss=3.0)]]
    )

    points = [(point.at_s, point.sent_bytes, point.loss) for point in figures.curve(record)]

    assert points == [(1.0, 50.0, 1.0), (2.0, 70.0, 3.0)]


def test_on_a_shared_interface_its_count_is_divided_and_begins_at_the_job() -> None:
    record = JobRecord(
        name="x",
        num_groups=2,
        started_s=10.0,
        records=[[a_step(11, sent=1100)], [a_step(12, sent=1400)]],
        sent_before=1000,
        num_sharing=2,
    )

    assert [point.sent_bytes for point in figures.curve(record)] == [50.0, 200.0]


def test_what_a_group_learned_while_it_healed_is_not_in_the_curve() -> None:
    record = JobRecord(
        name="x", num_groups=1, started_s=0.0, records=[[a_step(1, sent=1, contributed=False), a_step(2, sent=2)]]
    )

    assert [point.sent_bytes for point in figures.curve(record)] == [2.0]


@pytest.mark.parametrize(("digests", "is_equal"), [(["a", "a"], True), (["a", "b"], False)])
def test_groups_are_equal_only_if_all_digests_are(digests: list[str], is_equal: bool) -> None:
    record = JobRecord(
        name="x",
        num_groups=2,
        started_s=0.0,
        records=[[a_step(1, sent=0), the_end(5, sent=10, digest=digest)] for digest in digests],
        kills=[Kill(at_s=2.0, group=1)],
    )

    summary = figures.summarize(record)

    assert (summary.is_equal, summary.took_s, summary.num_kills, summary.sent_bytes) == (is_equal, 4.5, 1, 10)


def test_a_group_that_did_not_end_is_not_equal() -> None:
    record = JobRecord(
        name="x", num_groups=2, started_s=0.0, records=[[a_step(1, sent=0), the_end(5, sent=1)], [a_step(1, sent=0)]]
    )

    assert not figures.summarize(record).is_equal


def test_records_are_read_while_they_are_written_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    reader = records.Reader(path)
    with records.Recorder(path, "lo") as recorder:
        recorder.step(round=0, num_counted=0, participants=0, loss=4.0)
        with path.open("ab") as file:
            file.write(b'{"type":"St')
        first = reader.read_on()

        assert [type(record) for record in first] == [Step]
        assert reader.read_on() == []


def test_the_sent_bytes_are_those_of_the_interface_or_of_all_but_loopback(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    line = "  {}: 1 2 3 4 5 6 7 8 {} 10 11 12 13 14 15 16\n"
    table.write_text("head\nhead\n" + line.format("lo", 5) + line.format("eth0", 70) + line.format("eth1", 600))

    sent = [records.sent_bytes(interface, table) for interface in ("lo", "eth0", None)]

    assert sent == [5, 70, 670]


@pytest.mark.parametrize("arguments", [["--groups=1"], ["--fragments=3"], ["--inner-steps=0"]])
def test_what_cannot_be_run_is_refused_before_anything_starts(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        options.parse(arguments, "")

    assert error.value.code == 2
