"""A job that outlives the loss of everything: all of its processes are killed, and it goes on from its newest checkpoint.

    python examples/resume.py --demo

starts a lighthouse and replica groups, trains, kills all of them with SIGKILL between two checkpoints, starts them again, and
compares what they do then with a run that nobody killed: the losses have to be equal bit for bit. By hand, in as many shells as
there are groups, and again after whatever you do to them:

    python -m torchft_ckpt lighthouse --min-replicas 2 --bind 127.0.0.1:29510
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 NUM_REPLICA_GROUPS=2
    REPLICA_GROUP_ID=0 python examples/resume.py --checkpoints /tmp/resume &
    REPLICA_GROUP_ID=1 python examples/resume.py --checkpoints /tmp/resume

The task is that of train_ddp.py, with dropout. Every group takes part in every step (`min_replica_size` is their number) and a
step that was discarded is repeated with its batch, so a step is the same whatever happened on the way to it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from torchdata.stateful_dataloader import StatefulDataLoader
from train_ddp import CONTEXT, NextCharacter, digest_of

from torchft_ckpt import (
    Checkpointer,
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    checkpoints_in,
)
from torchft_ckpt.launcher.agent import signal_at_parents_death

NUM_CHARACTERS = 200_000
PATIENCE_S = 120.0
BLOCK_BYTES = 65536
"""Digests are of blocks of this size: one that lies in the shares of two groups is read by both."""


# ---------------------------------------------------------------------------------------------------- one replica group


class Batches:
    """A group's batches, one for each committed step; where it stands can be saved."""

    def __init__(self, group: int, num_groups: int, batch_size: int) -> None:
        text = NextCharacter(Path(os.__file__).parent)
        data = Subset(text, range(min(NUM_CHARACTERS, len(text))))
        self._sampler = DistributedSampler(data, group, num_groups, group_rank=0, num_replicas=1, shuffle=True, seed=0)
        # A generator of its own: else each new iterator takes a number from the one that dropout uses.
        self._loader = StatefulDataLoader(
            data, batch_size=batch_size, sampler=self._sampler, drop_last=True, generator=torch.Generator()
        )
        self._batches: Iterator[list[Tensor]] | None = None
        self._now: list[Tensor] | None = None

    def now(self) -> list[Tensor]:
        """Return the batch of this step: the same until `advance`."""
        while self._now is None:
            self._batches = iter(self._loader) if self._batches is None else self._batches
            self._now = next(self._batches, None)
            if self._now is None:  # the epoch is over
                self.seek(self._sampler.epoch + 1, 0)
        return self._now

    def advance(self) -> None:
        """The step counts."""
        self._now = None

    def seek(self, epoch: int, batch: int) -> None:
        """Go to a batch of an epoch."""
        self._sampler.set_epoch(epoch)
        self._batches = itertools.islice(iter(self._loader), batch, None)
        self._now = None

    def seek_step(self, step: int) -> None:
        """Go to where a group is after so many committed steps."""
        self.seek(*divmod(step, len(self._loader)))

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands, after `advance`."""
        return {"epoch": self._sampler.epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was called."""
        self._sampler.set_epoch(state["epoch"])
        self._loader.load_state_dict(state["loader"])
        self._batches = self._now = None


def make_model() -> nn.Module:
    """That of train_ddp.py with dropout, so that the random numbers matter: about 220,000 parameters."""
    return nn.Sequential(
        nn.Embedding(256, 24),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(24 * CONTEXT, 256),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(256, 256),
    )


class Diary:
    """What a group did, a JSON object a line; each is written at once, so a kill tears none."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        if self._file is not None:
            os.write(self._file, (json.dumps({"event": event, **fields}) + "\n").encode())


def train(options: argparse.Namespace) -> None:
    """Be one replica group until the job has committed its steps."""
    group = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    num_groups = int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{group}] %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    diary = Diary(options.diary)

    torch.manual_seed(options.seed)
    module = make_model()
    torch.manual_seed(options.seed + 1 + group)  # each group leaves out others
    adamw = torch.optim.AdamW(module.parameters(), lr=2e-3)
    batches = Batches(group, num_groups, options.batch_size)
    loss_function = nn.CrossEntropyLoss()

    def state_dict() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": adamw.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    def all_tensors() -> dict[str, Tensor]:
        moments = {
            f"{index}.{name}": value
            for index, values in adamw.state_dict()["state"].items()
            for name, value in values.items()
        }
        return module.state_dict() | moments

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=num_groups,
        replica_id=f"resume_{group}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
    )
    # What the groups have in common is the Manager's; the position in the data is each group's own, as are random numbers.
    checkpointer = Checkpointer(
        options.checkpoints, manager=manager, keep_last=2, fill_after=timedelta(seconds=options.fill_after)
    )
    restored = checkpointer.restore()
    if restored.rank_state is not None:
        batches.load_state_dict(restored.rank_state)
    is_to_seek = restored.rank_state is None
    diary.write(
        "restored",
        source=restored.source.value,
        step=restored.step,
        reason=restored.reason,
        has_own=restored.rank_state is not None,
        bytes_from_storage=restored.bytes_from_storage,
        bytes_from_peers=restored.bytes_from_peers,
        state_bytes=sum(tensor.nbytes for tensor in all_tensors().values()),
        pid=os.getpid(),
    )

    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, adamw)
    loss = torch.tensor(float("nan"))
    while manager.current_step() < options.steps:
        started_s = time.monotonic()
        random_state = torch.get_rng_state()
        optimizer.zero_grad()  # starts the quorum
        if is_to_seek:
            # Whose state comes from peers, or is new, finds its place by the step from which all go on.
            batches.seek_step(manager.quorum_step())
            is_to_seek = False
        inputs, targets = batches.now()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        num_committed = manager.statistics().num_committed
        optimizer.step()  # commits, or discards the step on every group alike
        if manager.statistics().num_committed == num_committed:
            torch.set_rng_state(random_state)
            continue
        batches.advance()
        step = manager.current_step()
        diary.write("step", step=step, loss=loss.item().hex())
        if step % options.save_every == 0:
            checkpointer.wait()  # steps are tiny here; a real job saves so rarely that the save before has long ended
            checkpointer.save(rank_state=batches.state_dict())
            print(f"[{group}] step {step} loss {loss.item():.3f}: saving", flush=True)
        time.sleep(max(0.0, started_s + options.pace - time.monotonic()))

    checkpointer.shutdown()
    digest = digest_of(all_tensors())
    diary.write("finished", step=manager.current_step(), digest=digest)
    print(f"[{group}] finished at step {manager.current_step()} with state {digest}", flush=True)
    manager.shutdown(finished=True)


# ------------------------------------------------------------------------------------------------------------- the demo


class StoryError(Exception):
    """The demo cannot be told to its end; the message says why."""


class Life:
    """A lighthouse and its replica groups, as processes, from their start to their end. It ends what it started, and no more."""

    def __init__(self, options: argparse.Namespace, folder: Path, name: str, checkpoints: Path) -> None:
        self.name = name
        self.folder = folder / name.replace(" ", "_")
        self.folder.mkdir()
        self._num_groups = options.groups
        self._num_steps, self._until = 0, time.monotonic() + PATIENCE_S
        self._processes: list[tuple[str, subprocess.Popen[Any]]] = []
        command = [sys.executable, "-m", "torchft_ckpt", "lighthouse", f"--min-replicas={options.groups}"]
        lighthouse = self._start("lighthouse", [*command, "--bind=127.0.0.1:0"], {})
        address = self._address(lighthouse)
        for group in range(options.groups):
            variables = {
                "TORCHFT_LIGHTHOUSE": address,
                "TORCHFT_CKPT_JOB": f"resume-{os.getpid()}",
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": str(options.groups),
            }
            kept = ("steps", "save_every", "batch_size", "pace", "fill_after", "seed")
            arguments = [f"--{option.replace('_', '-')}={getattr(options, option)}" for option in kept]
            arguments += [f"--checkpoints={checkpoints}", f"--diary={self.folder / f'group_{group}.jsonl'}"]
            self._start(f"group_{group}", [sys.executable, str(Path(__file__).resolve()), *arguments], variables)

    def _start(self, name: str, command: list[str], variables: dict[str, str]) -> subprocess.Popen[Any]:
        common = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=os.environ | common | variables,
                stdout=log,
                stderr=log,
                preexec_fn=partial(signal_at_parents_death, signal.SIGKILL),
            )
        self._processes.append((name, process))
        return process

    def _address(self, lighthouse: subprocess.Popen[Any]) -> str:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and lighthouse.poll() is None:
            match = re.search(r"https?://[\w.:\[\]]+", (self.folder / "lighthouse.log").read_text())
            if match:
                return match[0]
            time.sleep(0.02)
        raise StoryError(f"the lighthouse did not start\n{self.last_lines('lighthouse')}")

    def events(self, group: int, event: str) -> list[dict[str, Any]]:
        """Return what a group has noted of one kind so far."""
        path = self.folder / f"group_{group}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def losses(self, group: int) -> dict[int, str]:
        """Return a group's own loss in each committed step, with all its bits."""
        return {entry["step"]: entry["loss"] for entry in self.events(group, "step")}

    def step_of(self, group: int) -> int:
        """Return the last step that a group has committed, 0 if none."""
        return max(self.losses(group), default=0)

    def check(self) -> None:
        """See that nobody ended by itself before it was through, and that steps are made: on a busy machine these take long."""
        for name, process in self._processes:
            if process.poll() not in (None, 0) or (name == "lighthouse" and process.poll() is not None):
                raise StoryError(f"{name} ended with status {process.poll()}\n{self.last_lines(name)}")
        num_steps = sum(self.step_of(group) for group in range(self._num_groups))
        if num_steps > self._num_steps:
            self._num_steps, self._until = num_steps, time.monotonic() + PATIENCE_S
        if time.monotonic() > self._until:
            raise StoryError(f"{self.name}: no step within {PATIENCE_S:g} s\n{self.last_lines('group_0')}")

    def wait(self) -> None:
        """Wait until all groups have finished."""
        while any(process.poll() is None for name, process in self._processes if name != "lighthouse"):
            self.check()
            time.sleep(0.05)
        self.check()

    def kill(self) -> list[tuple[str, int, int]]:
        """SIGKILL everything at once; return the name, pid and exit status of each that was alive."""
        alive = [(name, process) for name, process in self._processes if process.poll() is None]
        for _, process in alive:
            process.kill()
        return [(name, process.pid, process.wait()) for name, process in alive]

    def last_lines(self, name: str) -> str:
        """Return the end of a process's log."""
        return "\n".join((self.folder / f"{name}.log").read_text().splitlines()[-15:])


@contextlib.contextmanager
def life(options: argparse.Namespace, folder: Path, name: str, checkpoints: Path) -> Iterator[Life]:
    """Start a job; whatever is left of it at the end is ended."""
    alive: list[Life] = []
    try:
        alive.append(Life(options, folder, name, checkpoints))
        yield alive[0]
    finally:
        for one in alive:
            one.kill()


def wait_to_kill(job: Life, options: argparse.Namespace, checkpoints: Path) -> None:
    """Wait until all groups are past `kill_at`, and the save before it has ended."""
    saved = options.kill_at // options.save_every * options.save_every
    while True:
        job.check()
        steps = [job.step_of(group) for group in range(options.groups)]
        if min(steps) >= options.kill_at and saved in checkpoints_in(checkpoints):
            return
        if min(steps) >= options.steps:
            raise StoryError(f"no whole checkpoint of step {saved} at steps {steps}\n{job.last_lines('group_0')}")
        time.sleep(0.01)


def show_losses(groups: int, before: Life, after: Life, never: Life, saved: int) -> None:
    """Print group 0's losses around the kill."""
    first, second, reference = before.losses(0), after.losses(0), never.losses(0)
    killed = max(first)
    shown = [saved - 1, saved, saved + 1, saved + 2, killed - 1, killed, killed + 1, max(second)]
    print("\n   losses of group 0   first life   second life   never killed")
    last = 0
    for step in sorted({step for step in shown if step > 0}):
        if last and step > last + 1:
            print(f"   {'...':>12}")
        last = step
        cells = [f"{float.fromhex(life[step]):.6f}" if step in life else "-" for life in (first, second, reference)]
        what = {saved: "  <- checkpoint", killed: "  <- SIGKILL"}.get(step, "")
        print(f"   step {step:>7} {cells[0]:>17} {cells[1]:>13} {cells[2]:>14}{what}")


def tell(options: argparse.Namespace, folder: Path) -> bool:
    """Run the story and print it; return whether all held that was promised."""
    groups = range(options.groups)
    checkpoints = folder / "checkpoints"
    held: list[tuple[bool, str]] = []
    print(f"{options.groups} replica groups, {options.steps} steps, a checkpoint every {options.save_every}")
    print(f"files: {folder}\n", flush=True)

    with life(options, folder, "first life", checkpoints) as before:
        wait_to_kill(before, options, checkpoints)
        dead = before.kill()
    saved = checkpoints_in(checkpoints)
    at = {f"group_{group}": f" after step {before.step_of(group)}" for group in groups}
    print(f"1  first life: trained; whole checkpoints are those of steps {sorted(saved)}")
    for name, pid, status in dead:
        print(f"   SIGKILL to {name} (pid {pid}){at.get(name, '')}: status {status}")
    everybody = {"lighthouse", *(f"group_{group}" for group in groups)}
    killed = {name for name, _, status in dead if status == -9}
    held.append((killed == everybody, "every process was killed"))

    with life(options, folder, "second life", checkpoints) as after:
        after.wait()
    restored = [entry for group in groups for entry in after.events(group, "restored")]
    print("\n2  second life")
    for group, entry in enumerate(restored):
        print(f"   group_{group}: {entry['reason']}")
        read, fetched = entry["bytes_from_storage"] / 1e6, entry["bytes_from_peers"] / 1e6
        print(f"            {read:.2f} MB read from storage, {fetched:.2f} MB from the other groups")
    read_bytes = sum(entry["bytes_from_storage"] for entry in restored)
    unique_bytes = max((entry["state_bytes"] for entry in restored), default=0)
    ratio = read_bytes / max(unique_bytes, 1)
    print(
        f"   read from storage, all groups together: {read_bytes} bytes; the state has {unique_bytes} ({ratio:.3f} x)"
    )
    places = {(entry["source"], entry["step"], entry["has_own"]) for entry in restored}
    # One that was whole but not closed yet when its writers died is newer than those that are seen to be whole.
    newest = max([*saved, *(entry["step"] or 0 for entry in restored)], default=0)
    held.append((places == {("storage", newest, True)}, f"all groups went on from step {newest}, the newest whole one"))
    is_read_once = 0 < read_bytes <= 1.02 * unique_bytes + options.groups * BLOCK_BYTES
    held.append((is_read_once, "each byte was read once in the whole job, but for blocks in which shares meet"))

    with life(options, folder, "never killed", folder / "checkpoints_of_the_other_job") as never:
        never.wait()
    show_losses(options.groups, before, after, never, newest)
    held += verdicts(before, after, never, newest, options)
    digests = {entry["digest"] for job in (after, never) for group in groups for entry in job.events(group, "finished")}
    num_finished = sum(len(job.events(group, "finished")) for job in (after, never) for group in groups)
    print(f"\n3  final state: {', '.join(sorted(digests))}")
    is_equal = len(digests) == 1 and num_finished == 2 * options.groups
    held.append(
        (is_equal, "final weights and moments are bit-equal on all groups, and to those of the job never killed")
    )
    print()
    for is_true, claim in held:
        print(f"   {'ok    ' if is_true else 'FAILED'}  {claim}")
    return all(is_true for is_true, _ in held)


def verdicts(before: Life, after: Life, never: Life, saved: int, options: argparse.Namespace) -> list[tuple[bool, str]]:
    """Compare the losses of all groups, bit for bit."""
    num_repeated = num_new = 0
    is_same_again = is_as_never = is_complete = True
    for group in range(options.groups):
        first, second, reference = (job.losses(group) for job in (before, after, never))
        is_complete &= sorted(second) == list(range(saved + 1, options.steps + 1))
        repeated = first.keys() & second.keys()
        is_same_again &= all(first[step] == second[step] for step in repeated)
        is_as_never &= all(second[step] == reference.get(step) for step in second)
        num_repeated, num_new = num_repeated + len(repeated), num_new + len(second)
    return [
        (is_complete, f"the second life began with step {saved + 1}, and left out none"),
        (is_same_again and num_repeated > 0, f"the steps that were lost gave the same losses again ({num_repeated})"),
        (is_as_never and num_new > 0, f"all losses are, bit for bit, those of a job that nobody killed ({num_new})"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="committed steps to train")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a group in a step")
    parser.add_argument(
        "--checkpoints", default="checkpoints", help="a directory, or a URL of fsspec, that all groups see"
    )
    parser.add_argument("--fill-after", type=float, default=10.0, help="seconds until a lost writer's share is written")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--seed", type=int, default=0, help="of weights and dropout")
    parser.add_argument("--diary", type=Path, help="note here what this group does, as lines of JSON")
    parser.add_argument("--demo", action="store_true", help="run the whole story")
    parser.add_argument("--groups", type=int, default=3, help="of the demo")
    parser.add_argument(
        "--kill-at", type=int, default=34, help="of the demo: kill when all groups have committed this step"
    )
    parser.add_argument("--folder", type=Path, help="of the demo: keep its files here, in a directory that is new")
    options = parser.parse_args()
    if not options.demo:
        train(options)
        return 0
    if not options.save_every <= options.kill_at < options.steps or options.groups < 1:
        parser.error("--kill-at lies between the first checkpoint and the last step, and there is at least one group")
    options.pace = options.pace or 0.05  # slow enough to be killed between two checkpoints
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resume-")))
        folder.mkdir(parents=True, exist_ok=options.folder is None)
        try:
            held = tell(options, folder)
        except StoryError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    print("\nOK: killed as a whole, it went on as if nothing had been" if held else "\nFAILED")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
