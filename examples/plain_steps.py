"""What a `StepLoader` computes, in torch alone and in one process. It imports nothing of this library.

The page docs/guides/exact-steps.md says the same in words. A test compares the two, bit by bit.
"""

import hashlib
import random

import numpy
import torch


def key(seed, step, what):
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{what}".encode(), digest_size=8).digest(), "little") >> 1


def seed_all(number):
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)


def sample(position, size, seed):
    epoch, place = divmod(position, size)
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask, turns, word = 2**half - 1, key(seed, epoch, "epoch"), 2**64 - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(6):
            mixed = (right + (turns >> turn) + turn * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & word
            mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EB & word
            left, right = right, left ^ ((mixed >> 29) & mask)
        place = (left << half) | right
        if place < size:
            return place


def tree(leaves):
    if len(leaves) == 1:
        return leaves[0]
    half = 2 ** ((len(leaves) - 1).bit_length() - 1)
    return tree(leaves[:half]) + tree(leaves[half:])


def train(model, loss_of, dataset, optimizer, scheduler, *, steps, global_batch_size, microbatch_size, seed, clip):
    """Train; return the mean losses of the steps."""
    count, losses = global_batch_size // microbatch_size, []
    parameters, buffers = list(model.parameters()), list(model.buffers())
    for step in range(steps):
        before, gradients, after, logged = [b.clone() for b in buffers], [], [], []
        for number in range(count):
            start = step * global_batch_size + number * microbatch_size
            seed_all(key(seed, step, f"read {number}"))
            indices = [sample(start + place, len(dataset), seed) for place in range(microbatch_size)]
            batch = torch.utils.data.default_collate([dataset[index] for index in indices])
            for buffer, saved in zip(buffers, before, strict=True):
                buffer.copy_(saved)
            optimizer.zero_grad()
            seed_all(key(seed, step, number))
            loss = loss_of(model, batch)
            loss.backward()
            gradients.append([p.grad for p in parameters])
            after.append([b.clone() for b in buffers])
            logged.append(loss.item())
        for place, parameter in enumerate(parameters):
            found = [one[place] for one in gradients]
            if any(one is not None for one in found):
                found = [torch.zeros_like(parameter) if one is None else one for one in found]
                parameter.grad = tree(found) / count
        for place, buffer in enumerate(buffers):
            if buffer.is_floating_point():
                wide = torch.promote_types(buffer.dtype, torch.float32)
                total = tree([one[place].to(wide) for one in after])
                unmoved = tree([before[place].to(wide)] * count)
                buffer.copy_(torch.where(total == unmoved, before[place], total / count))
            else:
                moved = sum(float(one[place] - before[place]) for one in after) / count
                buffer.copy_(before[place] + round(moved))
        losses.append(tree(logged) / count)
        seed_all(key(seed, step, "after"))
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        scheduler.step()
    return losses
