"""The command `run` with torchrun itself: what a script sees, a rank that is killed, a launcher that is killed, wrong options."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import trustme
from support.certificates import Files
from support.processes import lives, run, start
from support.waiting import wait_until

from torchft_ckpt import config
from torchft_ckpt.__main__ import main

REPO = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "torchft_ckpt", "run"]

SAYS = """
import os

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
"""Begins the scripts of ranks: torchrun copies what it finds of a line, and marks it, when a rank has written a part of one."""


@pytest.mark.processes
def test_a_rank_is_killed_and_its_group_starts_again_whole(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SAYS
        + f"""
import os, signal, sys, time
from pathlib import Path
group, rank = os.environ["REPLICA_GROUP_ID"], os.environ["RANK"]
life = Path({str(tmp_path)!r}) / f"{{group}}_{{rank}}"
is_first = not life.exists()
life.touch()
say("job", os.environ["TORCHFT_CKPT_JOB"], "of", os.environ["NUM_REPLICA_GROUPS"], sys.argv[1:])
if group == "1" and is_first:
    if rank == "1":
        while not life.with_name("1_0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
"""
    )
    done = run(
        [*RUN, "--groups", "2", "--nproc", "2", "--", str(script), "--groups", "7"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    said = sorted((mark, words[2:]) for mark, *words in lines)
    assert len({words[1] for _, *words in lines}) == 1, "one job, whatever starts again"
    of_all = ["of", "2", "['--groups',", "'7']"]
    marks = [mark for mark, words in said if words == of_all]
    assert set(marks) == {"[g0/r0]", "[g0/r1]", "[g1/r0]", "[g1/r1]"}
    assert marks.count("[g0/r0]") == marks.count("[g0/r1]") == 1
    assert "group 1 ended with status 137; it starts again in 1 s" in done.stderr
    assert "lighthouse at http://127.0.0.1:" in done.stderr


@pytest.mark.processes
@pytest.mark.skipif(os.name != "posix", reason="a shell closes the streams")
@pytest.mark.parametrize("streams", ["nobody reads them", "they are closed"])
def test_the_status_is_that_of_the_ranks_though_nobody_reads_what_they_say(tmp_path: Path, streams: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print('unheard'); sys.exit(7)")
    readable, writable = os.pipe()
    os.close(readable)
    close = [] if streams == "nobody reads them" else ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"]
    try:
        done = run(
            [*close, *RUN, "--groups", "1", "--restarts", "0", "--", str(script)],
            stdout=writable,
            stderr=writable,
            timeout=300,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
    finally:
        os.close(writable)
    assert done.returncode == 7


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a process of its parent's death on Linux alone")
@pytest.mark.parametrize("killed", ["the launcher", "its torchrun"])
def test_a_launcher_or_torchrun_that_is_killed_leaves_no_rank_behind(tmp_path: Path, killed: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}} '); time.sleep(1000)"
    )
    launcher = start(
        [*RUN, "--groups", "1", "--restarts", "0", "--", str(script)],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith(" "), "the rank runs")
    rank, torchrun = pid.read_text().split()
    os.kill(launcher.pid if killed == "the launcher" else int(torchrun), signal.SIGKILL)
    launcher.wait(120)
    wait_until(lambda: not lives(int(rank)), "the rank is gone")


@pytest.mark.processes
@pytest.mark.parametrize("given", ["", "ours", "in a file"])
def test_a_job_on_one_machine_has_a_token_that_the_commands_there_find(tmp_path: Path, given: str) -> None:
    """Both ends are ours: nobody is warned of others, and nobody else comes in."""
    script = tmp_path / "train.py"
    script.write_text(
        SAYS
        + """
import os, stat, subprocess, sys
from torchft_ckpt import config
say("token", os.environ.get("TORCHFT_CKPT_TOKEN") or None, os.environ.get("TORCHFT_CKPT_TOKEN_FILE"))
path = config.token_file_of_run(os.environ["TORCHFT_LIGHTHOUSE"].removeprefix("http://"))
if os.path.exists(path):
    say("file", path, oct(stat.S_IMODE(os.stat(path).st_mode)), open(path).read())
shell = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
for option in ([], ["--token", "guess"]):
    asked = [sys.executable, "-m", "torchft_ckpt", "status", "--lighthouse", os.environ["TORCHFT_LIGHTHOUSE"], *option]
    say("status", subprocess.run(asked, env=shell, stdout=subprocess.DEVNULL).returncode)
"""
    )
    environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": ""}
    environment |= {"TORCHFT_CKPT_TOKEN": "ours"} if given else {}
    options = []
    if given == "in a file":
        (tmp_path / "secret").touch(mode=0o600)
        (tmp_path / "secret").write_text("in-a-file\n")
        options = ["--token-file", "secret"]
    done = run(
        [*RUN, "--groups", "1", *options, "--", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | {"PYTHONPATH": str(REPO)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (_, token, file), *said = (line.split()[1:] for line in done.stdout.splitlines())
    if given:
        # A token of a file may change while the groups train: they read it there.
        by_whom = ("None", str(tmp_path / "secret")) if options else ("ours", "None")
        assert ((token, file), said) == (by_whom, [["status", "1"], ["status", "1"]])
        return
    (_, path, mode, kept), *statuses = said
    # The groups have it themselves: the file may be cleaned away.
    assert (kept, file, mode, statuses) == (token, "None", "0o600", [["status", "0"], ["status", "1"]])
    assert path in done.stderr and not Path(path).exists()


@pytest.mark.processes
def test_groups_have_the_certificates_that_run_was_told_wherever_they_are_started(tmp_path: Path) -> None:
    """The options' paths are those of the launcher's folder, and a script may go to another one."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, subprocess, sys
from torchft_ckpt import HTTPTransport, Manager, ProcessGroupGloo
os.chdir("/")
manager = Manager(ProcessGroupGloo(), None, None, 1)
transport = manager.hooks.transport.metadata()
print("at", os.environ["TORCHFT_LIGHTHOUSE"].partition("//")[0], transport.partition("//")[0], flush=True)
done = subprocess.run([sys.executable, "-m", "torchft_ckpt", "status"], stdout=subprocess.DEVNULL)
print("status", done.returncode, flush=True)
manager.shutdown()
"""
    )
    Files(tmp_path / "tls", trustme.CA())
    options = ["--tls-cert", "tls/host.pem", "--tls-key", "tls/host.key", "--tls-ca", "tls/ca.pem"]
    done = run(
        [*RUN, "--groups", "1", *options, "--", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = [line.split()[1:] for line in done.stdout.splitlines()]
    assert said == [["at", "https:", "https:"], ["status", "0"]]


def test_a_token_is_kept_where_the_session_has_no_folder_and_a_place_that_is_taken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TORCHFT_CKPT_TOKEN", "TORCHFT_CKPT_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "of-nobody"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Path(config.token_file_of_run("127.0.0.1:29510")).parent == tmp_path
    monkeypatch.setattr(config, "token_file_of_run", lambda lighthouse: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["run", "--groups", "1", "--", "train.py"]) == 2
    assert f"the file {tmp_path} cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "2"], "no training script: name it behind the options"),
        (["--groups", "0", "--", "train.py"], "--groups is 0"),
        (["--groups", "1", "--lighthouse", "host:1", "--", "train.py"], "--lighthouse needs --job"),
    ],
)
def test_options_that_cannot_be_used_are_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options]) == 2
    assert message in capsys.readouterr().err


def test_too_few_gpus_are_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert main(["run", "--groups", "2", "--nproc", "2", "--", "train.py"]) == 2
    assert "2 groups of 2 ranks need 4 GPUs, and this machine has 3" in capsys.readouterr().err


@pytest.mark.processes
def test_a_second_machine_adds_its_groups_to_the_job_of_the_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SAYS
        + """
say(*(os.environ[name] for name in ("NUM_REPLICA_GROUPS", "REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE", "TORCHFT_CKPT_JOB")))
"""
    )
    place = ["--groups", "1", "--first-group", "2", "--all-groups", "4", "--lighthouse", "first:29510", "--job", "big"]
    done = run(
        [*RUN, *place, "--", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert (done.returncode, done.stdout) == (0, "[g2/r0] 4 2 first:29510 big\n")
    assert "lighthouse at first:29510, job big: groups 2 to 2 of 4" in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("is_asked", ["a rank", "its torchrun"])
def test_a_group_that_leaves_is_not_started_again(tmp_path: Path, is_asked: str) -> None:
    """As one whose ranks call `Manager.leave_on` does, this one ends with 0 when it gets SIGTERM."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import os, signal, sys, time
from pathlib import Path
has_left = Path({str(tmp_path)!r}) / "left"
def leave(*_):
    has_left.touch()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
life = Path({str(tmp_path)!r}) / (os.environ["REPLICA_GROUP_ID"] + os.environ["RANK"])
with life.open("x") as file:
    file.write(f"{{os.getpid()}} {{os.getppid()}} ")
gets_a_signal = {is_asked != "a rank"} and os.environ["REPLICA_GROUP_ID"] == "1"
while gets_a_signal or not has_left.exists():
    time.sleep(0.01)
"""
    )
    launcher = start(
        [*RUN, "--groups", "2", "--nproc", "2", "--min-replicas", "1", "--", str(script)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    lives = [tmp_path / name for name in ("00", "01", "10", "11")]
    wait_until(lambda: all(life.exists() and life.read_text().endswith(" ") for life in lives), "all ranks run")
    rank, torchrun = (int(number) for number in lives[2].read_text().split())
    os.kill(rank if is_asked == "a rank" else torchrun, signal.SIGTERM)
    _, said = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, said
    assert "group 1 has finished" in said
    assert "starts again" not in said
