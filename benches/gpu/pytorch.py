#!/usr/bin/env python3
"""Models in PyTorch, as its users train them: the peer of gapless on the same GPU, in the same run (docs/gpu.md).

- GPT-2 is that of models/src/gpt.rs: learned positions, layer norm before each part, GELU in its tanh form, no dropout.
- Llama and the mixture are those of models/src/llama.rs and moe.rs: RMS norm, rotary positions by halves, grouped queries, SwiGLU.
  The mixture has Mixtral's routing and balance loss, and drops no token. Its experts' products are grouped_mm over sorted tokens.

Heads are tied to embeddings. Attention is scaled_dot_product_attention. AdamW is fused and only decays matrices, and gradients are
clipped by their global norm, as in gapless. On both sides, ids are uniform over the vocabulary, because speed depends on the number
of distinct ids.

    pytorch.py train --model gpt2 --budget 20000000000 --mode compiled --precision autocast
    pytorch.py train --model gpt2 --micro-batch 16 --mode compiled --vocabulary 50304 --attention cudnn
    pytorch.py train --model gpt2 --micro-batch 16 --mode compiled --budget 8000000000 --expect-out-of-memory
    pytorch.py rates

In a search, every micro-batch that is tried is a process of its own, so that one that ran out of memory leaves nothing behind.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time

SIZES = {
    "small": {"vocabulary": 512, "layers": 2, "heads": 2, "width": 64},
    "gpt2": {"vocabulary": 50257, "layers": 12, "heads": 12, "width": 768},
    "gpt2-medium": {"vocabulary": 50257, "layers": 24, "heads": 16, "width": 1024},
    "gpt2-xl": {"vocabulary": 50257, "layers": 48, "heads": 25, "width": 1600},
    "gpt6.7b": {"vocabulary": 50257, "layers": 32, "heads": 32, "width": 4096},
    "llama1b": {"vocabulary": 128256, "layers": 16, "heads": 32, "kv_heads": 8, "width": 2048, "hidden": 8192, "theta": 5e5},
    "llama8b": {
        "vocabulary": 128256,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "width": 4096,
        "hidden": 14336,
        "theta": 5e5,
        "tied": False,
    },
    "mixture": {
        "vocabulary": 32000,
        "layers": 8,
        "heads": 16,
        "kv_heads": 4,
        "width": 1024,
        "hidden": 2816,
        "theta": 1e6,
        "experts": 8,
        "top_k": 2,
    },
    "small-mixture": {
        "vocabulary": 512,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "width": 64,
        "hidden": 128,
        "theta": 1e6,
        "experts": 8,
        "top_k": 2,
    },
}
# The weight of the mixture's balance loss.
BALANCE = 0.02
# Members of SDPBackend.
ATTENTIONS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
# Exit code of a measuring process that ran out of memory.
OUT_OF_MEMORY = 17


def main():
    options = parse()
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return skipped(options, f"PyTorch cannot be loaded: {error}")
    if options.command == "rates":
        found = rates(options)
    elif options.micro_batch is not None:
        found = measure(options, options.micro_batch)
    else:
        found = largest(options)
    if found is None:
        print(f"out of memory with micro-batch {options.micro_batch}", file=sys.stderr)
        return OUT_OF_MEMORY
    if "skipped" in found:
        return skipped(options, found["skipped"])
    write(options, found)
    return 1 if options.command == "train" and options.expect_out_of_memory and "does_not_fit" not in found else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="tokens per second of the largest micro-batch that fits a budget")
    train.add_argument("--model", choices=SIZES, default="gpt2")
    train.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    train.add_argument(
        "--precision",
        choices=["f32", "autocast", "bf16"],
        default="autocast",
        help="autocast: f32 parameters, bf16 in the forward; bf16: model.to(bfloat16), without f32 masters",
    )
    train.add_argument("--budget", type=positive, metavar="BYTES", help="what the allocator may reserve")
    train.add_argument("--micro-batch", type=positive, metavar="SEQUENCES", help="measure this one; nothing is searched")
    train.add_argument(
        "--expect-out-of-memory",
        action="store_true",
        help="report the micro-batch under does_not_fit if it runs out of memory, and fail if it does not",
    )
    train.add_argument("--start", type=positive, default=1, help="the micro-batch that is tried first")
    train.add_argument("--fineness", type=positive, default=16, help="search no further once it is less than 1/this too small")
    train.add_argument("--limit", type=positive, metavar="SECONDS", help="try no other micro-batch that may end later than this")
    train.add_argument("--sequence", type=positive, default=1024)
    train.add_argument(
        "--attention",
        choices=["default", *ATTENTIONS],
        default="default",
        help="what scaled_dot_product_attention uses: as PyTorch chooses, or this alone",
    )
    train.add_argument(
        "--experts", choices=["grouped", "loop"], default="grouped", help="a mixture's products: by grouped_mm in bf16, or one by one"
    )
    train.add_argument("--checkpoint", action="store_true", help="keep only the inputs of blocks for the backward")
    train.add_argument("--vocabulary", type=positive, help="other than the model's, e.g. 50304")
    train.add_argument("--steps", type=positive, default=20)
    train.add_argument("--warmup", type=positive, default=5, help="steps before those that are measured")
    common(train)
    common(commands.add_parser("rates", help="what a copy and a matrix product reach"))
    options = parser.parse_args()
    if options.command == "train" and options.micro_batch is None and options.budget is None:
        if options.device != "cpu":
            parser.error("give --budget or --micro-batch")
        options.micro_batch = 2
    return options


def common(parser):
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to see that it all works")
    parser.add_argument("--json", metavar="FILE", help="also write what was found to this file")


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def skipped(options, why):
    print(f"skipped: {why}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"skipped": why}, file)
    return 0


def write(options, found):
    print(json.dumps(found))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


def without_device(device):
    """The reason why the device cannot be used; None if it can."""
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    return None


def largest(options):
    """Measures the (almost) largest micro-batch that does not run out of memory, as far as time allows."""
    why = without_device(options.device)
    if why:
        return {"skipped": why}
    search = Search(options.start, options.budget, options.fineness)
    begin, longest = time.monotonic(), 0.0
    while not search.is_over():
        left = None if options.limit is None else options.limit - (time.monotonic() - begin)
        # The next measurement is expected to take about as long as the longest one so far.
        if left is not None and left < longest * 1.1:
            break
        tried = time.monotonic()
        try:
            search.tried(search.next(), measure_apart(options, search.next(), left))
        except subprocess.TimeoutExpired:
            break
        longest = max(longest, time.monotonic() - tried)
    if search.best is None:
        raise SystemExit(f"nothing that fits {options.budget} bytes was found")
    # `does_not_fit` is the smallest micro-batch that is known not to fit, or None if there is none.
    return search.best | {"does_not_fit": search.too_large, "is_largest": search.is_over()}


class Search:
    """Chooses the micro-batches to try. The bytes reserved by those that fit predict how much larger the next one can be."""

    def __init__(self, start, budget, fineness):
        self.start, self.budget, self.fineness = start, budget, fineness
        self.best, self.fitting, self.too_large = None, 0, None
        # The micro-batch that fitted before the last one, and its bytes.
        self.before = (0, 0)

    def is_over(self):
        if self.too_large is None:
            return False
        return self.too_large - self.fitting <= max(1, self.fitting // self.fineness) or self.too_large == 1

    def next(self):
        if self.best is None:
            return self.start if self.too_large is None else max(1, self.too_large // 2)
        taken = self.best.get("reserved_bytes")
        guess = self.fitting * 2
        if taken and taken > self.before[1]:
            each = (taken - self.before[1]) / (self.fitting - self.before[0])
            guess = self.fitting + int((self.budget - taken) / each)
        above = self.fitting * (1 + 1 / self.fineness)
        if self.too_large is None:
            return max(int(above), guess, self.fitting + 1)
        # If the guess is not between the known bounds, the middle between them is tried instead.
        is_between = self.fitting < guess < self.too_large
        return guess if is_between else (self.fitting + self.too_large) // 2

    def tried(self, micro_batch, found):
        if found is None:
            self.too_large = micro_batch
            return
        if self.best is not None:
            self.before = (self.fitting, self.best.get("reserved_bytes", 0))
        self.best, self.fitting = found, micro_batch


def measure_apart(options, micro_batch, seconds):
    """Measures in a separate process; None if it ran out of memory."""
    command = [sys.executable, os.path.abspath(__file__), "train", "--micro-batch", str(micro_batch)]
    for name in ["model", "mode", "precision", "attention", "experts", "budget", "sequence", "vocabulary", "steps", "warmup", "device"]:
        value = getattr(options, name)
        if value is not None:
            command += [f"--{name}", str(value)]
    command += ["--checkpoint"] * options.checkpoint
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=seconds)
    if done.returncode == OUT_OF_MEMORY:
        return None
    if done.returncode != 0:
        raise SystemExit(f"micro-batch {micro_batch} ended with {done.returncode}: {' '.join(command)}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(options, micro_batch):
    import torch

    why = without_device(options.device)
    if why:
        return {"skipped": why}
    try:
        return train(options, micro_batch)
    except RuntimeError as error:
        # When memory is missing, libraries raise other errors than the allocator. The allocator's error is also a
        # RuntimeError.
        if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error) or "ALLOC_FAILED" in str(error):
            if not options.expect_out_of_memory:
                return None
            return described(options, micro_batch) | {"does_not_fit": micro_batch, "why": str(error).splitlines()[0]}
        raise


def described(options, micro_batch):
    """The options of a measurement, and the device."""
    import torch

    return {
        "pytorch": torch.__version__,
        "device": "cpu" if options.device == "cpu" else torch.cuda.get_device_name(options.device),
        "model": options.model,
        "mode": options.mode,
        "precision": options.precision,
        "attention": options.attention,
        "checkpoint": options.checkpoint,
        "budget_bytes": options.budget,
        "micro_batch": micro_batch,
        "sequence": options.sequence,
        "vocabulary": options.vocabulary or SIZES[options.model]["vocabulary"],
    }


def train(options, micro_batch):
    import torch

    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
        if options.budget is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.budget / total), device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if options.precision != "f32" else "highest")
    found = described(options, micro_batch)
    vocabulary, sequence = found["vocabulary"], found["sequence"]
    with device:
        model = built(options.model, vocabulary, sequence, options.experts == "grouped", options.checkpoint)
    if options.precision == "bf16":
        model = model.to(torch.bfloat16)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=3e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=is_gpu,
    )
    step_model = torch.compile(model) if options.mode == "compiled" else model
    attention = attention_of(options.attention)
    ids = torch.randint(vocabulary, (micro_batch, sequence + 1), device=device)
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.precision == "autocast")

    def step():
        with autocast, attention():
            loss = step_model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # The loss is read in every step, as in gapless.
        return loss.item()

    def wait():
        if is_gpu:
            torch.cuda.synchronize(device)

    first_loss = [step() for _ in range(options.warmup)][0]
    step_ms, losses = [], []
    for _ in range(options.steps):
        wait()
        start = time.perf_counter()
        losses.append(step())
        wait()
        step_ms.append((time.perf_counter() - start) * 1e3)
    found |= {
        "parameters": sum(p.numel() for p in parameters),
        "tokens_per_second": micro_batch * sequence / statistics.median(step_ms) * 1e3,
        "step_ms": step_ms,
        "first_loss": first_loss,
        "losses": losses,
    }
    if is_gpu:
        free, total = torch.cuda.mem_get_info(device)
        # These maxima are counted from the start of the process, so they include compilation.
        found |= {
            "allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "in_use_bytes": total - free,
        }
    return found


def attention_of(name):
    """A context in which scaled_dot_product_attention uses this implementation."""
    if name == "default":
        return contextlib.nullcontext
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return lambda: sdpa_kernel(getattr(SDPBackend, ATTENTIONS[name]))


def rates(options):
    """The rates of copies and of bf16 matrix products, each the best of several runs."""
    import torch

    why = without_device(options.device)
    if why:
        return {"skipped": why}
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    bytes_copied, width = (1 << 30, 8192) if is_gpu else (1 << 24, 256)
    source = torch.ones(bytes_copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    b = torch.randn(width, width, device=device, dtype=torch.bfloat16)

    def seconds(work):
        times = []
        for _ in range(20):
            if is_gpu:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            work()
            if is_gpu:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    # A copy reads and writes every byte.
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "copy_gbs": 2 * bytes_copied / seconds(lambda: target.copy_(source)) / 1e9,
        "product_tflops": 2 * width**3 / seconds(lambda: a @ b) / 1e12,
    }


def built(name, vocabulary, sequence, is_grouped=True, is_checkpointed=False):
    """The model with this name, on the current device. If it is checkpointed, only the inputs of blocks are kept for the backward."""
    from torch.utils.checkpoint import checkpoint

    def repeat(block, *inputs):
        return checkpoint(block, *inputs, use_reentrant=False) if is_checkpointed else block(*inputs)

    size = SIZES[name] | {"vocabulary": vocabulary}
    if "kv_heads" in size:
        return llama(sequence, is_grouped, repeat, **size)
    return gpt(sequence if name == "small" else max(sequence, 1024), **size, repeat=repeat)


def gpt(positions, vocabulary, layers, heads, width, repeat=lambda block, *inputs: block(*inputs)):
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn = nn.Linear(width, 3 * width)
            self.c_proj = nn.Linear(width, width)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = (part.view(b, t, heads, c // heads).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(b, t, c))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc = nn.Linear(width, 4 * width)
            self.c_proj = nn.Linear(4 * width, width)

        def forward(self, x):
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1 = nn.LayerNorm(width, eps=1e-5)
            self.attn = Attention()
            self.ln_2 = nn.LayerNorm(width, eps=1e-5)
            self.mlp = Mlp()

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(vocabulary, width)
            self.wpe = nn.Embedding(positions, width)
            self.h = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f = nn.LayerNorm(width, eps=1e-5)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.wte.weight
            self.apply(self.fill)
            for name, parameter in self.named_parameters():
                if name.endswith("c_proj.weight"):
                    nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

        @staticmethod
        def fill(module):
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

        def forward(self, tokens, targets):
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.wte(tokens) + self.wpe(places)
            for block in self.h:
                x = repeat(block, x)
            logits = self.head(self.ln_f(x))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Gpt()


def llama(sequence, is_grouped, repeat, vocabulary, layers, heads, kv_heads, width, hidden, theta, tied=True, experts=0, top_k=0):
    """A Llama or, with experts, a mixture with Mixtral's routing."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    head = width // heads
    grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

    def linear(inputs, outputs):
        return nn.Linear(inputs, outputs, bias=False)

    def rotated(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return F.rms_norm(x, (width,), self.weight, 1e-5)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = linear(width, heads * head)
            self.k_proj = linear(width, kv_heads * head)
            self.v_proj = linear(width, kv_heads * head)
            self.o_proj = linear(heads * head, width)

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            q, k, v = (part(x).view(b, t, -1, head).transpose(1, 2) for part in [self.q_proj, self.k_proj, self.v_proj])
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != heads)
            return self.o_proj(y.transpose(1, 2).reshape(b, t, heads * head))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = linear(width, hidden)
            self.up_proj = linear(width, hidden)
            self.down_proj = linear(hidden, width)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), None

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = linear(width, experts)
            # The matrices are stored as the products read them: [experts, inputs, outputs].
            self.w1 = nn.Parameter(torch.empty(experts, width, hidden))
            self.w3 = nn.Parameter(torch.empty(experts, width, hidden))
            self.w2 = nn.Parameter(torch.empty(experts, hidden, width))
            for weight in [self.w1, self.w2, self.w3]:
                nn.init.normal_(weight, std=0.02)

        def forward(self, x):
            b, t, _ = x.shape
            flat = x.reshape(b * t, width)
            scores = self.gate(flat).float().softmax(dim=-1)
            weights, ids = scores.topk(top_k, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            is_chosen = ids.flatten()[:, None] == torch.arange(experts, device=x.device)
            # A token's rows lie in the order of its choices; sorted, those of an expert are next to each other.
            order = ids.flatten().argsort(stable=True)
            rows = flat[order // top_k].to(self.product_dtype(x))
            y = self.products(rows, is_chosen.sum(dim=0))
            y = y * weights.flatten()[order, None].to(y.dtype)
            y = torch.zeros_like(flat, dtype=y.dtype).index_add(0, order // top_k, y)
            shares = is_chosen.view(b, t * top_k, experts).float().mean(dim=1)
            balance = experts * (shares * scores.view(b, t, experts).mean(dim=1)).sum(dim=-1).mean()
            return y.view(b, t, width), BALANCE * balance

        @staticmethod
        def product_dtype(x):
            """The type of the experts' products, which autocast does not know."""
            kind = x.device.type
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

        def products(self, rows, counts):
            w1, w3, w2 = (weight.to(rows.dtype) for weight in [self.w1, self.w3, self.w2])
            if is_grouped and grouped_mm is not None and rows.dtype == torch.bfloat16:
                ends = counts.cumsum(dim=0, dtype=torch.int32)
                inner = F.silu(grouped_mm(rows, w1, offs=ends)) * grouped_mm(rows, w3, offs=ends)
                return grouped_mm(inner, w2, offs=ends)
            each = zip(rows.split(counts.tolist()), w1, w3, w2, strict=True)
            return torch.cat([(F.silu(x @ gate) * (x @ up)) @ down for x, gate, up, down in each])

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm = Norm()
            self.self_attn = Attention()
            self.post_attention_layernorm = Norm()
            self.mlp = Experts() if experts else Mlp()

        def forward(self, x, cos, sin):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin)
            y, loss = self.mlp(self.post_attention_layernorm(x))
            return x + y, loss

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Block() for _ in range(layers))
            self.norm = Norm()
            self.head = linear(width, vocabulary)
            if tied:
                self.head.weight = self.embed_tokens.weight
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)
            frequencies = theta ** (-torch.arange(0, head, 2).float() / head)
            angles = torch.outer(torch.arange(sequence).float(), frequencies)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, tokens, targets):
            x = self.embed_tokens(tokens)
            losses = []
            for block in self.layers:
                x, loss = repeat(block, x, self.cos, self.sin)
                losses += [loss] if loss is not None else []
            logits = self.head(self.norm(x))
            return sum(losses, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    return Llama()


if __name__ == "__main__":
    sys.exit(main())
