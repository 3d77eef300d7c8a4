"""A script for accelerate in the shape of diffusers' `train_unconditional`, as a replica group of a job.
It is `accelerate_plain.py`, whose parts it uses, with seven lines changed.

It prints a line each: `READ [numbers]` for each batch that the model trains on, `STEP n digest` for each optimizer step, with a
digest of all that is trained, `SAVED n`. `--wait STEP FILE`: it stands still after that step until the file exists.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from accelerate_plain import Average, Numbered, digest_of, loss_of, make_model, make_optimizers, options_of, schedule
from fingerprints import say
from torch.utils.data import DataLoader, SubsetRandomSampler

from torchft_ckpt import Manager, ProcessGroupGloo
from torchft_ckpt.integrations.accelerate import FaultTolerantAccelerator


def main(options: argparse.Namespace) -> None:
    manager = Manager(ProcessGroupGloo(), None, None, min_replica_size=1, replica_id=options.name)
    accelerator = FaultTolerantAccelerator(
        manager,
        gradient_accumulation_steps=options.accumulate,
        cpu=True,
        dynamo_backend=options.dynamo,
        dataloader_config=DataLoaderConfiguration(split_batches=options.split_batches),
        project_config=ProjectConfiguration(
            project_dir=str(options.folder), automatic_checkpoint_naming=options.automatic, total_limit=options.limit
        ),
    )
    if options.fp16:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**options.fp16, growth_interval=5)
    set_seed(options.seed)
    model = make_model()
    ema_model = Average(list(model.parameters()))
    accelerator.register_for_checkpointing(ema_model)
    optimizers = make_optimizers(model, options.optimizers)
    sampler = SubsetRandomSampler(range(options.samples)) if options.subset else None
    train_dataloader = DataLoader(
        Numbered(options.samples), batch_size=4, shuffle=sampler is None, sampler=sampler, num_workers=options.workers
    )
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[0], schedule)
    model, train_dataloader, *optimizers, lr_scheduler = accelerator.prepare(
        model, train_dataloader, *optimizers, lr_scheduler
    )
    if options.fp16:  # accelerate has it on a GPU alone
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / options.accumulate)
    if options.resume:
        accelerator.load_state(options.resume)
        global_step = int(options.resume.rpartition("_")[2])
        first_epoch = global_step // num_update_steps_per_epoch
    global_step, first_epoch = accelerator.job_step, accelerator.job_epoch
    for _ in range(first_epoch, options.epochs):
        model.train()
        for batch in train_dataloader:
            say(f"READ {batch['number'].tolist()}")
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                for part in [loss / 4, 3 * loss / 4] if options.two_losses else [loss]:
                    accelerator.backward(part, retain_graph=options.two_losses)
                if accelerator.sync_gradients:
                    clip = torch.nn.utils.clip_grad_norm_ if options.torch_clip else accelerator.clip_grad_norm_
                    clip(model.parameters(), 0.5)
                for optimizer in optimizers:
                    optimizer.step()
                lr_scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.step(list(model.parameters()))
                global_step = accelerator.job_step
                trained = accelerator.unwrap_model(model, keep_torch_compile=False)
                say(f"STEP {global_step} {digest_of(trained, optimizers, lr_scheduler, ema_model)}")
                for step, file in options.wait:
                    while global_step >= int(step) and not Path(file).exists():
                        time.sleep(0.05)
                if accelerator.is_main_process and global_step % options.save_steps == 0:
                    accelerator.save_state(str(options.folder / f"step_{global_step}"))
                    say(f"SAVED {global_step}")
            accelerator.log({"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}, step=global_step)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), options.folder / "final.pt")
    accelerator.end_training()
    say(f"ENDED {global_step}")


if __name__ == "__main__":
    main(options_of())
