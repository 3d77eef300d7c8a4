"""A loop in the order of timm's train.py, in replica groups that may die and come back.

    pip install ".[timm]"
    python -m torchft_ckpt run --groups 2 -- examples/train_timm.py --steps 600 --pause 0.2

The task: say which quarter of a small image is the brightest. The images are made on the spot, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import time
from typing import Any

import torch
from PIL import Image
from timm import create_model
from timm.data import create_loader
from timm.models import load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler, random_seed
from torch import nn
from torch.utils.data import Dataset, Subset

from torchft_ckpt import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.errors import JobFinishedError

SEED, ACCUMULATE, BATCH_SIZE, SIZE = 42, 2, 4, 32
"""Batches of a step, images of a batch, and pixels of an image in each direction."""


class Quarters(Dataset):
    """Item i is (an image, or what `transform` makes of it, and which of its quarters is the brightest)."""

    transform = None

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> tuple[Any, int]:
        random = torch.Generator().manual_seed(index)
        pixels = torch.randint(0, 200, (2, SIZE // 2, 2, SIZE // 2, 3), generator=random, dtype=torch.uint8)
        pixels[index % 4 // 2, :, index % 2] += 40
        image = Image.fromarray(pixels.reshape(SIZE, SIZE, 3).numpy())
        return image if self.transform is None else self.transform(image), index % 4


def make_model() -> nn.Module:
    return create_model("test_vit", img_size=SIZE, num_classes=4)


def make_training(model: nn.Module, num_steps: int, device: torch.device) -> tuple[Any, Any, Any, Any]:
    """Return optimizer, schedule, averaged weights and scaler, as timm's script makes them."""
    optimizer = create_optimizer_v2(model, "adamw", lr=2e-3, weight_decay=0.05)
    lr_scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=num_steps, warmup_epochs=5, updates_per_epoch=1, step_on_epochs=False
    )
    model_ema = ModelEmaV3(model, decay=0.999, use_warmup=True)
    return optimizer, lr_scheduler, model_ema, NativeScaler(device=device.type)


def make_loader(shard: Dataset, device: torch.device) -> Any:
    return create_loader(
        shard,
        (3, SIZE, SIZE),
        BATCH_SIZE,
        is_training=True,
        no_aug=True,
        use_prefetcher=False,
        num_workers=0,
        device=device,
    )


def loss_of(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
        return nn.functional.cross_entropy(model(images.to(device)), targets.to(device)) / ACCUMULATE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of the job")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to have time to watch")
    parser.add_argument("--output", default="train-timm-out", help="for checkpoints, the same of all groups")
    parser.add_argument("--resume", help="a checkpoint to go on from, the same of all groups")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    os.makedirs(options.output, exist_ok=True)

    group, num_groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])  # of the launcher
    manager = Manager(
        pg=ProcessGroupNCCL() if device.type == "cuda" else ProcessGroupGloo(),
        load_state_dict=None,  # registered below
        state_dict=None,
        min_replica_size=1,
        replica_id=f"group_{group}",
    )
    random_seed(SEED)  # another one in each group is as good: the first weights are those of one of them
    model = make_model().to(device)
    optimizer, lr_scheduler, model_ema, loss_scaler = make_training(model, options.steps, device)
    saver = CheckpointSaver(
        model, optimizer, model_ema=model_ema, amp_scaler=loss_scaler, checkpoint_dir=options.output
    )
    if options.resume:
        num_updates = resume_checkpoint(model, options.resume, optimizer, loss_scaler) - 1  # it returns the next one
        load_checkpoint(model_ema.module, options.resume, use_ema=True)
        manager.load_state_dict({"step": num_updates, "batches_committed": 0})

    for name, part in {"model": model, "optimizer": optimizer, "model_ema": model_ema}.items():
        manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
    manager.grad_scaler(loss_scaler._scaler)  # timm's NativeScaler has torch's in it
    optimizer.register_step_post_hook(lambda *_: model_ema.update(model, step=manager.current_step()))
    optimizer = Optimizer(manager, optimizer)
    ddp = DistributedDataParallel(manager, model)
    dataset = Quarters()
    shard = Subset(dataset, range(group, len(dataset) // num_groups * num_groups, num_groups))
    loader = make_loader(shard, device)
    dataset.transform = shard.transform  # create_loader sets it at what it is given

    num_updates = manager.current_step()
    while num_updates < options.steps:
        for batch_idx, (images, targets) in enumerate(loader):
            need_update = (batch_idx + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if need_update else ddp.no_sync():
                loss = loss_of(ddp, images, targets, device)
                loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=need_update)
            if not need_update:
                continue
            optimizer.zero_grad()
            num_updates = manager.current_step()  # was: num_updates += 1; and model_ema.update(model, step=num_updates)
            lr_scheduler.step_update(num_updates=num_updates)
            if manager.speaks and num_updates % 20 == 0:  # was: if saver is not None, at rank 0
                saver.save_checkpoint(num_updates)
            if num_updates >= options.steps:
                break
            time.sleep(options.pause)
    digest = hashlib.sha256()
    for value in [*model.state_dict().values(), *model_ema.state_dict().values()]:
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(f"[{group}] finished at step {manager.current_step()} with state {digest.hexdigest()}", flush=True)
    manager.shutdown(finished=True)


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
