"""A replica group of a loop on Fabric with two optimizers for one model, each stepped and cleared before the other."""

from __future__ import annotations

import argparse
import logging
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchft_ckpt import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

SEED, BATCH_SIZE = 3, 8


def make_data() -> TensorDataset:
    features = torch.randn(640, 16, generator=torch.Generator().manual_seed(SEED))
    return TensorDataset(features, features.sum(1, keepdim=True).tanh())


def make_training() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Return a model, and the optimizers of its matrices and of its other parameters."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return model, [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=1e-2)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    fabric = Fabric(accelerator="cpu", devices=1)
    group = int(os.environ["REPLICA_GROUP_ID"])
    manager = Manager(ProcessGroupGloo(), None, None, min_replica_size=1, replica_id=f"group_{group}")
    torch.manual_seed(SEED)
    plain_model, plain_optimizers = make_training()
    for name, part in zip(("model", "matrices", "others"), (plain_model, *plain_optimizers), strict=True):
        manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
    model = fabric.setup(DistributedDataParallel(manager, plain_model))
    optimizers = [fabric.setup_optimizers(Optimizer(manager, optimizer)) for optimizer in plain_optimizers]
    data = make_data()
    sampler = DistributedSampler(data, replica_rank=group, num_replica_groups=2, seed=SEED)
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH_SIZE, sampler=sampler))
    for optimizer in optimizers:
        optimizer.zero_grad()
    while manager.current_step() < options.steps:
        for features, targets in loader:
            fabric.backward(nn.functional.mse_loss(model(features), targets))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if manager.current_step() >= options.steps:
                break
    manager.shutdown(finished=True)


if __name__ == "__main__":
    main()
