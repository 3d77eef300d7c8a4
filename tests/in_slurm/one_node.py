"""A Slurm of one node, in a folder of its own, all on loopback; the jobs are root's."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from support import waiting
from support.processes import start

wait_until = partial(waiting.wait_until, timeout_s=300.0, look_every_s=0.2)  # Slurm itself takes its time

REPO = Path(__file__).resolve().parents[2]

# Cores are counted that are not there, so that all groups run at once. A task that is queued again waits for `cred_expire`.
SLURM_CONF = """
ClusterName=torchft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerParameters=sched_min_interval=0
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """What a user does with it, and what is to be seen of it; `folder` is where jobs are submitted."""

    def __init__(self, folder: Path, configuration: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {
            "SLURM_CONF": str(configuration),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPO}:{REPO / 'tests'}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }

    def call(self, *command: str, **variables: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment | variables, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def field(self, task: str, name: str) -> str:
        """Return a field of what `scontrol show job` says of a task, `Restarts` say."""
        said = self.call("scontrol", "--oneliner", "show", "job", task)
        return dict(word.partition("=")[::2] for word in said.split())[name]


@contextmanager
def one_node(folder: Path) -> Iterator[Slurm]:
    """Run Slurm in an empty folder; when the block ends, all jobs and daemons have."""
    jobs = folder / "jobs"
    for path in (jobs, folder / "state", folder / "spool"):
        path.mkdir()
    ctld_port, slurmd_port = free_ports(2)
    host = socket.gethostname().partition(".")[0]
    configuration = folder / "slurm.conf"
    configuration.write_text(SLURM_CONF.format(host=host, ctld_port=ctld_port, slurmd_port=slurmd_port, folder=folder))
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    munge = [f"--{name}-file={folder / 'munge'}.{name}" for name in ("key", "pid", "log", "seed")]
    slurm = Slurm(jobs, configuration)
    with ExitStack() as daemons:
        run_daemon(daemons, "munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}", *munge)
        wait_until(lambda: (folder / "munge.socket").exists(), "munged listens")
        run_daemon(daemons, "slurmctld", "-D", "-f", str(configuration))
        run_daemon(daemons, "slurmd", "-D", "-f", str(configuration))
        wait_until(lambda: is_idle(slurm), "the node is idle")
        daemons.callback(end_all_jobs, slurm)
        yield slurm


def run_daemon(daemons: ExitStack, *command: str) -> None:
    """Start a daemon of Slurm in the foreground; it ends with `daemons`."""
    daemon = start([shutil.which(command[0], path="/usr/sbin:/sbin") or command[0], *command[1:]], name=command[0])

    def end() -> None:
        daemon.terminate()
        daemon.wait(30)

    daemons.callback(end)


def is_idle(slurm: Slurm) -> bool:
    try:
        return "idle" in slurm.call("sinfo", "--noheader", "--format=%t")
    except AssertionError:  # slurmctld does not answer yet
        return False


def end_all_jobs(slurm: Slurm) -> None:
    slurm.call("scancel", "--user=root")
    wait_until(lambda: not slurm.call("squeue", "--noheader"), "all jobs have ended")


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
