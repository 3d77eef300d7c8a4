"""One member of a Gloo group as a process, told what to do by lines in a named pipe; answers with JSON lines on stdout.

`configure ADDRESS RANK WORLD`, `reduce NUM SEED` (answers with the bits' digest), `reduce_forever NUM`, `ping`, `abort`, `exit`.
Operations run on a worker thread, so that an abort is heard at any moment.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from datetime import timedelta

import torch
import xxhash
from torch.distributed import ReduceOp

from torchft_ckpt.process_group import ProcessGroupGloo

group = ProcessGroupGloo(timedelta(seconds=300))
commands: queue.Queue[list[str]] = queue.Queue()


def answer(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def carry_out(words: list[str]) -> None:
    if words[0] == "configure":
        group.configure(words[1], f"r{words[2]}", int(words[2]), int(words[3]), 7)
        answer(configured=True)
    elif words[0] == "ping":
        answer(pong=True)
    elif words[0] == "reduce":
        tensor = torch.randn(int(words[1]), generator=torch.Generator().manual_seed(int(words[2])))
        group.allreduce([tensor], ReduceOp.SUM).wait()
        answer(digest=xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes()))
    elif words[0] == "reduce_forever":
        tensor = torch.zeros(int(words[1]))
        answer(started=True)
        while True:
            group.allreduce([tensor], ReduceOp.SUM).wait()


def work() -> None:
    while True:
        words = commands.get()
        try:
            carry_out(words)
        except Exception as error:
            answer(error=type(error).__name__, errored=type(group.errored()).__name__, time_s=time.monotonic())


torch.set_num_threads(1)
threading.Thread(target=work, daemon=True).start()
answer(ready=True)
for line in open(sys.argv[1]):  # noqa: SIM115
    if line.split() == ["abort"]:
        started = time.monotonic()
        group.abort()
        print(f"abort returned in {time.monotonic() - started:.4f} s", file=sys.stderr)
    elif line.split() == ["exit"]:
        break
    else:
        commands.put(line.split())
group.shutdown()
