#!/usr/bin/env python3
"""PyTorch's side of `cargo bench -p gapless --bench train_step -- --pytorch PYTHON`: a line in, a training step, its measurement out.

The GPT is that of benches/gpu/pytorch.py; Llama and Mixtral are those of the package `transformers`, as they are without options. The
tokens are those of side.rs, as on the other sides."""

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
    parser.add_argument("--model", choices=["gpt", "llama", "mixtral"], required=True)
    for name in ["vocabulary", "layers", "heads", "kv-heads", "width", "hidden", "sequence", "batch", "threads"]:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--autocast", action="store_true", help="bf16 in the forward, with f32 parameters")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = made(options)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)
    count = options.batch * options.sequence
    text = list(itertools.islice(itertools.cycle((HERE / "side.rs").read_bytes()), count + 2))
    ids = [(first + 256 * second) % options.vocabulary for first, second in itertools.pairwise(text)]
    tokens, targets = (torch.tensor(ids).view(options.batch, -1) for ids in (ids[:-1], ids[1:]))
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


def made(options):
    """Returns a model that computes the loss of (tokens, targets)."""
    if options.model == "gpt":
        return peer().gpt(options.vocabulary, options.sequence, options.layers, options.heads, options.width)
    import transformers

    extents = dict(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.sequence,
        use_cache=False,
    )
    if options.model == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**extents))
    else:
        routing = dict(num_local_experts=8, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.02)
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**extents, **routing))
    model.train()

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens, targets):
            return self.model(input_ids=tokens, labels=tokens, shift_labels=targets).loss

    return Loss()


def peer():
    """Imports benches/gpu/pytorch.py, which has the same name as this file."""
    spec = importlib.util.spec_from_file_location("peer", HERE.parent / "gpu" / "pytorch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
