"""One replica group: an ordinary training loop. Nothing here knows of kills; recovery is the library's work.

    python -m torchft_ckpt run --groups 3 -- examples/demo worker --events FOLDER --tokens tokens.bin ...

It writes what happens (see `events`) into a folder, and ends after the step that the supervisor orders there.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from datetime import timedelta
from pathlib import Path

from demo import corpus, events

_SLOW_BYTES_PER_S = 1_750_000.0
"""Of each group that serves, with a slow link: the state has 11.4 MB, of which a step changes 2.7 MB."""
_SLOW_STEP_S = 1.0
"""So long a step takes with the slow link: most of it is slept, so that cores are not the limit."""
_SLOW_JOIN_LIMIT = timedelta(seconds=3)
"""So long the others stand still at most for a newcomer, with the slow link: enough for what a step changes, not for all."""


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the options that the supervisor passes."""
    parser = argparse.ArgumentParser(prog="demo worker", description=__doc__)
    parser.add_argument("--events", type=Path, required=True, help="the folder for what happens")
    parser.add_argument("--tokens", type=Path, required=True, help="the corpus, one byte a token")
    parser.add_argument("--min-replica-size", type=int, default=1)
    parser.add_argument("--slow-link", action="store_true", help="fine-tune a larger model, and serve its state slowly")
    parser.add_argument("--global-batch-size", type=int, default=36, help="samples in a step, of all groups together")
    parser.add_argument("--microbatch-size", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Train until told to stop; the exit code."""
    options = parse_arguments(arguments)
    group = int(os.environ["REPLICA_GROUP_ID"])
    recorder = events.Recorder(options.events, group)
    recorder.tell(events.Started(at_s=time.monotonic(), pid=os.getpid()))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s group_{group} %(levelname)s %(message)s")

    import torch

    from demo import model as gpt
    from demo.digest import digest_state
    from torchft_ckpt import HTTPTransport, Manager, Optimizer, ProcessGroupGloo, StepLoader
    from torchft_ckpt.events import Event, Healed

    torch.set_num_threads(1)
    # A life that follows on a kill starts from other weights: that all end equal is recovery's doing, not the seed's.
    torch.manual_seed(options.seed + 1_000 * recorder.number)
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
            recorder.tell(events.StateReceived(at_s=time.monotonic(), took_s=event.took_s))

    recorder.tell(events.Imported(at_s=time.monotonic()))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=options.min_replica_size,
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=(
            HTTPTransport(timedelta(seconds=30), max_serve_bytes_per_s=_SLOW_BYTES_PER_S) if options.slow_link else None
        ),
        join_stall_limit=_SLOW_JOIN_LIMIT if options.slow_link else timedelta(seconds=60),
        on_event=tell,
    )
    recorder.tell(events.Connected(at_s=time.monotonic()))
    windows = gpt.Windows(tokens, config.context)
    sizes = {"global_batch_size": options.global_batch_size, "microbatch_size": options.microbatch_size}
    steps = StepLoader(manager, windows, seed=options.seed, **sizes)
    optimizer = Optimizer(manager, adamw)

    for step in steps:
        if (last := events.stop_step(options.events)) is not None and step.number >= last:
            break
        started_s, samples = time.monotonic(), list[int]()
        optimizer.zero_grad()
        for indices, inputs, targets in step:
            loss = gpt.loss_of(module(inputs), targets)
            loss.backward()
            step.log(loss=loss)
            samples += indices.tolist()
        if options.slow_link:
            time.sleep(max(started_s + _SLOW_STEP_S - time.monotonic(), 0.0))
        if manager.is_participating():
            recorder.tell(events.Computed(at_s=time.monotonic(), after=step.number, samples=samples))
        is_committed = optimizer.step()
        recorder.tell(
            events.StepEnded(
                at_s=time.monotonic(),
                started_s=started_s,
                step=manager.current_step(),
                committed=is_committed,
                contributed=manager.is_participating(),
                participants=manager.num_participants(),
                quorum_id=manager.statistics().quorum_id,
                loss=step.means["loss"] if is_committed else None,
            )
        )

    digest = digest_state({"module": dict(module.named_parameters()), **state_dict()})
    sample = ""
    if group == 0 and not options.slow_link:  # a few steps teach no language
        prompt = torch.tensor(list(corpus.encode(b"def ")))
        written = gpt.write_on(module, prompt, num_characters=240, seed=options.seed)
        sample = corpus.decode(bytes(written.tolist()))
    end = {"step": manager.current_step(), "num_samples": len(windows)}
    recorder.tell(events.Finished(at_s=time.monotonic(), digest=digest, sample=sample, **end))
    manager.shutdown(finished=True)
    return 0
