"""Training loops of `models.py` with disturbances at random, every request checked against all living ones.

`disturbances.py LOOP SEED ITERATIONS`, where LOOP is gpt2, moe, pipe or interleaved, with `-checkpoint` if activations are
recomputed. Prints the report of the device.
"""

import json
import os
import random
import sys

import gapless_torch
import torch
from torch import nn

sys.path.insert(0, os.environ["GAPLESS_TORCH_LOOPS"])
import models

name, seed, iterations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loop, checkpoint = name.removesuffix("-checkpoint"), name.endswith("-checkpoint")
gapless_torch.install(check=True)
random.seed(seed)
options = dict(device="cuda", dtype=torch.bfloat16)
WIDTH, HEADS, SEQUENCE = 128, 4, 64


def ids(rows):
    return torch.zeros((rows, SEQUENCE), dtype=torch.int64, device="cuda")


if loop == "gpt2":
    model = models.GPT(2, HEADS, WIDTH, V=1024, T=SEQUENCE, ckpt=checkpoint, **options)
    forward = lambda rows: model(ids(rows), ids(rows))
elif loop == "moe":
    routing = models.Routing(4, seed, 0.3)
    model = models.MoEModel(2, WIDTH, HEADS, 256, 4, "seq", routing, V=1024, ckpt=checkpoint, **options)
    cos, sin = models.rope(SEQUENCE, WIDTH // HEADS, torch.bfloat16)
    forward = lambda rows: model(ids(rows), ids(rows), cos, sin)
else:
    chunks = 1 if loop == "pipe" else 2
    model = nn.ModuleList(models.Chunk(2 // chunks, WIDTH, HEADS, 256, checkpoint, **options) for _ in range(chunks))
    cos, sin = models.rope(SEQUENCE, WIDTH // HEADS, torch.bfloat16)
    forward = None
update = torch.optim.AdamW(model.parameters(), fused=True)
side = torch.cuda.Stream()
kept = []
# A run of fewer iterations has no disturbances.
CALM = 8


def chance(probability):
    # The first iterations and the last ones are calm.
    return 3 <= number < iterations - 4 and random.random() < probability


def pipeline(rows):
    """A rank of 1F1B or of an interleaved schedule, with two micro-batches more alive than in a plain loop."""
    waiting = []
    for tick in range(4 * len(model) + 2):
        if tick < 4 * len(model):
            x = torch.empty((rows, SEQUENCE, WIDTH), requires_grad=True, **options)
            waiting.append((x, model[tick // 2 % len(model)](x, cos, sin)))
        if tick >= 2:
            if chance(0.01):
                raise ValueError("an exception")
            x, y = waiting.pop(0)
            torch.autograd.backward(y, torch.empty_like(y))
            del x, y


def train(rows):
    if loop == "moe":
        routing.new_step()
        for block in model.blocks:
            block.mlp.cache.clear()  # evaluations and exceptions leave routing behind
    for _ in range(2):
        if forward is None:
            pipeline(rows)
            continue
        loss = forward(rows)
        if chance(0.05):
            raise ValueError("an exception")
        loss.backward()
    update.step()
    update.zero_grad()


def evaluate():
    with torch.no_grad():
        if forward is None:
            model[0](torch.empty((5, SEQUENCE, WIDTH), **options), cos, sin)
        else:
            forward(5)


disturbed = 0
for number in range(iterations):
    with gapless_torch.iteration():
        try:
            train(random.choice([1, 3, 4]) if chance(0.1) else 2)
        except (ValueError, torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, ValueError) and "out of memory" not in str(error):
                raise
            update.zero_grad()
        if chance(0.1):
            evaluate()
        if chance(0.1):
            kept.append(torch.empty(random.randrange(1, 1 << 20), device="cuda"))
        if chance(0.05) or number == iterations - 5:
            kept.clear()
        if chance(0.05):
            torch.cuda.empty_cache()
        if chance(0.05):
            shared = torch.empty(1 << 18, device="cuda")
            with torch.cuda.stream(side):
                other = torch.empty(1 << 16, device="cuda")
            shared.record_stream(side)
            del shared, other
print(json.dumps(gapless_torch.report()[0]), flush=True)
# Rarely, a normal exit after disturbances ends in "terminate called without an active exception". This very probably is
# PyTorch's known race: autograd threads re-acquire the GIL while Python finalizes (pytorch issues 38228 and 38230). So
# Python is finalized only after a run that is too short for disturbances.
if iterations >= CALM:
    os._exit(0)
