"""One replica group: an ordinary training loop. Nothing here knows of kills; recovery is the library's work.

    python examples/demo worker --group 0 --lighthouse 127.0.0.1:29510 --tokens tokens.bin ...

Writes events (see `events`) to standard output and takes `StopAt` on standard input; when that closes, the supervisor
is gone and the worker leaves too.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from io import FileIO
from pathlib import Path

import msgspec

from demo import corpus, events

_SLOW_BYTES_PER_S = 1_750_000.0
"""Of each group that serves, with a slow link. Two send the state's 11.4 MB in 3.2 s. One sends the 0.9 MB of a step's gradients
in half a step."""
_SLOW_STEP_S = 1.0
"""So long a step takes with the slow link: most of it is slept, so that cores are not the limit."""
_SLOW_JOIN_LIMIT = timedelta(seconds=1)
"""So long the others wait at most for a group that joins, with the slow link. The state takes longer, so no group could join."""


class _Commands:
    """The supervisor's side of the conversation, read by a thread of its own."""

    def __init__(self, lines: FileIO, replies: FileIO) -> None:
        self.stop_step: int | None = None
        self.last_step = 0
        self._lines = lines
        self._replies = replies
        threading.Thread(target=self._listen, name="demo-commands", daemon=True).start()

    def _listen(self) -> None:
        for line in self._lines:
            try:
                self.stop_step = events.decode_command(line).stop_step
            except msgspec.DecodeError:
                logging.exception("standard input: %r is no command; ignored", line)
                continue
            send(
                self._replies, events.StopAccepted(at_s=time.monotonic(), step=self.last_step, stop_step=self.stop_step)
            )
        logging.error("standard input was closed: the supervisor is gone, leaving")
        os._exit(3)


def send(pipe: FileIO, event: events.Event) -> None:
    """Write one event in one call: shorter than PIPE_BUF, so lines of threads never mix and no kill tears one."""
    os.write(pipe.fileno(), events.encode_line(event))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the options that the supervisor passes."""
    parser = argparse.ArgumentParser(prog="demo worker", description=__doc__)
    parser.add_argument("--group", type=int, required=True, help="which replica group this is, from 0")
    parser.add_argument(
        "--life", type=int, default=0, help="how often it was started before; seeds its initial weights"
    )
    parser.add_argument("--lighthouse", required=True, metavar="HOST:PORT")
    parser.add_argument("--tokens", type=Path, required=True, help="the corpus, one byte a token")
    parser.add_argument("--min-replica-size", type=int, default=1)
    parser.add_argument("--slow-link", action="store_true", help="fine-tune a larger model, and serve its state slowly")
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Train until told to stop; the exit code."""
    # Events go where standard output went; whatever else is printed goes to standard error.
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s group_{options.group} %(levelname)s %(message)s")
    # Unbuffered: a thread that waits in a buffered reader holds its lock, on which the interpreter's own end would fail.
    commands = _Commands(os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0), pipe)

    import torch

    from demo import model as gpt
    from demo.digest import digest_state
    from torchft_ckpt import DistributedDataParallel, HTTPTransport, Manager, Optimizer, ProcessGroupGloo
    from torchft_ckpt.events import Event, Healed

    torch.set_num_threads(1)
    # Every life starts from other weights: that all end equal is recovery's doing, not the seed's.
    # With the slow link the first lives are equal, so that the start needs no transfer.
    starts_equal = options.slow_link and options.life == 0
    torch.manual_seed(options.seed + 1_000 * options.life + (0 if starts_equal else options.group))
    config = gpt.GPTConfig(num_blocks=12) if options.slow_link else gpt.GPTConfig()
    module = gpt.CharGPT(config)
    if options.slow_link:  # as in fine-tuning, the state is much larger than what a step changes
        module.blocks[:-1].requires_grad_(False)
    adamw = torch.optim.AdamW(module.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.from_file(str(options.tokens), shared=False, size=options.tokens.stat().st_size, dtype=torch.uint8)

    def state_dict() -> dict[str, object]:
        return {"model": module.state_dict(), "optimizer": adamw.state_dict()}

    def load_state_dict(state: dict) -> None:
        module.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    def tell(event: Event) -> None:
        if isinstance(event, Healed):
            send(pipe, events.StateReceived(at_s=time.monotonic(), took_s=event.took_s))

    send(pipe, events.Imported(at_s=time.monotonic()))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=options.min_replica_size,
        replica_id=f"group_{options.group}",
        lighthouse_addr=options.lighthouse,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
        checkpoint_transport=(
            HTTPTransport(timedelta(seconds=30), max_serve_bytes_per_s=_SLOW_BYTES_PER_S) if options.slow_link else None
        ),
        follow=options.slow_link,
        join_budget=_SLOW_JOIN_LIMIT if options.slow_link else None,
        join_stall_limit=_SLOW_JOIN_LIMIT if options.slow_link else timedelta(seconds=60),
        on_event=tell,
    )
    send(pipe, events.Connected(at_s=time.monotonic()))
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, adamw)

    while commands.stop_step is None or manager.current_step() < commands.stop_step:
        started_s, step_before = time.monotonic(), manager.current_step()
        inputs, targets = gpt.sample_batch(
            tokens,
            seed=options.seed,
            group=options.group,
            step=step_before,
            batch_size=options.batch_size // (6 if options.slow_link else 1),
            context=config.context,
        )
        optimizer.zero_grad()
        loss = gpt.loss_of(model(inputs), targets)
        if options.slow_link:
            time.sleep(max(started_s + _SLOW_STEP_S - time.monotonic(), 0.0))
        loss.backward()
        optimizer.step()
        commands.last_step = manager.current_step()
        send(
            pipe,
            events.StepEnded(
                at_s=time.monotonic(),
                started_s=started_s,
                step=manager.current_step(),
                committed=manager.current_step() > step_before,
                contributed=manager.is_participating(),
                participants=manager.num_participants(),
                quorum_id=manager.statistics().quorum_id,
                loss=loss.item(),
            ),
        )

    digest = digest_state({"module": dict(module.named_parameters()), **state_dict()})
    sample = ""
    if options.group == 0 and not options.slow_link:  # a few steps teach no language
        prompt = torch.tensor(list(corpus.encode(b"def ")))
        written = gpt.write_on(module, prompt, num_characters=240, seed=options.seed)
        sample = corpus.decode(bytes(written.tolist()))
    send(pipe, events.Finished(at_s=time.monotonic(), step=manager.current_step(), digest=digest, sample=sample))
    manager.shutdown(finished=True)
    return 0
