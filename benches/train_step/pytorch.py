#!/usr/bin/env python3
"""PyTorch's side of `cargo bench -p gapless --bench train_step -- --pytorch PYTHON`: a line in, a training step, its measurement out.

The model is that of benches/gpu/pytorch.py; the bytes are those of side.rs, as on the other sides."""

import argparse
import importlib.util
import itertools
import json
import pathlib
import resource
import sys
import time

import torch

HERE = pathlib.Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ["layers", "heads", "width", "sequence", "batch", "threads"]:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--autocast", action="store_true", help="bf16 in the forward, with f32 parameters")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = peer().gpt(256, options.sequence, options.layers, options.heads, options.width)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)
    count = options.batch * options.sequence
    text = list(itertools.islice(itertools.cycle((HERE / "side.rs").read_bytes()), count + 1))
    tokens, targets = (torch.tensor(ids).view(options.batch, -1) for ids in (text[:-1], text[1:]))
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.autocast):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.item()
        ms, cpu_ms = (time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"ms": ms, "cpu_ms": cpu_ms, "loss": loss, "peak_rss_bytes": peak}), flush=True)


def peer():
    """benches/gpu/pytorch.py, whose name is this one's."""
    spec = importlib.util.spec_from_file_location("peer", HERE.parent / "gpu" / "pytorch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
