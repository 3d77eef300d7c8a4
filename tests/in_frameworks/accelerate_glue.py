"""A script for accelerate in the shape of transformers' `run_glue_no_trainer`, before it is changed: a loop that counts itself,
with `skip_first_batches`, a bar, checkpoints, and an evaluation after each epoch. `accelerate_changes` makes a group's of it.

It prints what `accelerate_plain` does, and `EVALUATED epoch [numbers]`.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate_plain import (
    Numbered,
    digest_of,
    loss_of,
    make_model,
    make_optimizers,
    num_groups_of,
    options_of,
    schedule,
)
from fingerprints import say
from gates import Gates
from torch.utils.data import DataLoader
from tqdm.auto import tqdm


def main(options: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(options.seed)
    model = make_model()
    train_dataloader = DataLoader(Numbered(options.samples), shuffle=True, batch_size=4)
    eval_dataloader = DataLoader(Numbered(10), batch_size=4)
    (optimizer,) = make_optimizers(model, "one")
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / options.accumulate)
    max_train_steps = options.epochs * num_update_steps_per_epoch
    progress_bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
    gates = Gates(options.wait)
    completed_steps = 0
    starting_epoch = 0
    if options.resume:
        accelerator.load_state(options.resume)
        resume_step = int(options.resume.rpartition("_")[2]) * options.accumulate
        starting_epoch = resume_step // len(train_dataloader)
        completed_steps = resume_step // options.accumulate
        resume_step -= starting_epoch * len(train_dataloader)
    progress_bar.update(completed_steps)
    for epoch in range(starting_epoch, options.epochs):
        model.train()
        if options.resume and epoch == starting_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for step, batch in enumerate(active_dataloader):
            say(f"READ {batch['number'].tolist()}")
            while completed_steps >= options.hold:
                time.sleep(1)
            loss = loss_of(model, batch) / options.accumulate
            accelerator.backward(loss)
            if step % options.accumulate == 0 or step == len(train_dataloader) - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                progress_bar.update(1)
                completed_steps += 1
            if accelerator.sync_gradients:
                say(f"STEP {completed_steps} {digest_of(accelerator.unwrap_model(model), [optimizer], lr_scheduler)}")
                gates.go_on(completed_steps, num_groups_of(accelerator))
            if completed_steps % options.save_steps == 0 and accelerator.sync_gradients:
                accelerator.save_state(str(options.folder / f"step_{completed_steps}"))
            if completed_steps >= max_train_steps:
                break
        model.eval()
        seen: list[int] = []
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                loss_of(model, batch)
            numbers = accelerator.gather(batch["number"])
            if accelerator.num_processes > 1 and step == len(eval_dataloader) - 1:  # the last batch has duplicates
                numbers = numbers[: len(eval_dataloader.dataset) - len(seen)]
            seen += numbers.tolist()
        say(f"EVALUATED {epoch} {seen}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), options.folder / "final.pt")
    accelerator.end_training()
    say(f"ENDED {completed_steps}")


if __name__ == "__main__":
    main(options_of())
