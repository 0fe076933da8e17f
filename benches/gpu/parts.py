"""The parts of benches/gpu/run, in order: the command, time limit and requirements of each.

A part's command is a program (`gpu` or `engine-tests` from the binaries, `pytorch` for pytorch.py, or `sanitizer` for one of these under
compute-sanitizer) and its arguments. If arguments depend on the results of an earlier part, the command is a function of the record.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable

# Prefixes of the names of this project's kernels. The name of no cuBLAS kernel begins with one of them.
OURS = "adafactor|adamw|attention|column_sums|combine|copy|cross_entropy|dispatch|elementwise|embedding|expert_load|fill|fold_pieces|fused|galore|gather|global_norm|grouped_linear|head|layer_norm|load_bias|log_sum_exp|norm_grad|rms_norm|rope|route|run_lengths|run_starts|scaled_sum|side_by_side|softmax|squared_norm|sum|to_bf16|to_f32|top_k|unplaced"  # noqa: E501

# Test modules of kernels in engine/src/tests/cuda. Modules for kernels that every model uses come first.
JUDGES = ["norm", "rows", "optim", "elementwise", "products", "attention", "fused"]
MORE_JUDGES = [
    "experts",
    "grouped",
    "cache",
    "optimizers",
    "storage",
    "rounding",
    "routing",
    "vocabulary",
    "warpgroups",
    "model",
    "step",
    "mixture",
    "trainer",
    "ranks",
]
# Modules that run under a sanitizer, because a small GPT does not launch all of their kernels.
SANITIZED_JUDGES = ["attention", "elementwise", "experts", "grouped", "norm", "optim", "rows"]

# The models that are compared at one micro-batch, on each side. With it, both sides fit into 80 GB.
MICRO_BATCHES = {"gpt2": 16, "gpt2-medium": 16, "llama1b": 8, "mixture": 16}
# The models whose bytes in use are broken down.
IN_MEMORY = ["gpt2", "llama1b", "mixture", "deepseek", "gpt2-lora"]
# The models whose losses are compared with the CPU's, with steps, sequences of a micro-batch and ids of a sequence.
PARITY = {
    "small-mixture": (40, 2, 64),
    "small-deepseek": (40, 2, 64),
    "gpt2-lora": (40, 2, 64),
    "mixture": (10, 1, 64),
    "deepseek": (10, 1, 64),
}


@dataclasses.dataclass
class Part:
    """A part. --parts selects parts by `group`; `needs` names the parts that must have succeeded."""

    name: str
    group: str
    limit: int
    command: list[str] | Callable[[object], list[str]]
    needs: tuple[str, ...] = ("GPU",)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def parts(options):
    """All parts, the most informative first."""
    steps = ["--steps", str(options.steps)]
    fixed = ["--micro-batch", str(MICRO_BATCHES["gpt2"])]
    yield Part("GPU", "device", 90, ["gpu", "device"], needs=())
    yield Part(
        "compile", "device", 180, lambda found: ["gpu", "compile", "--architectures", found.figure("GPU", "architecture")]
    )
    small = ["--model", "small", "--micro-batch", "2", "--sequence", "64"]
    yield Part("parity, small", "parity", 90, ["gpu", "parity", *small, "--steps", "5"])
    yield Part("speed", "speed", 90, ["gpu", "speed", *fixed, *steps])
    yield Part("rates", "speed", 60, ["pytorch", "rates"])
    yield Part("kernels", "speed", 90, lambda found: ["gpu", "kernels", *fixed, *peak(found)])
    yield Part("products", "variants", 60, ["gpu", "products"])
    # The same step without what was added for Hopper, and with cuBLASLt's first algorithms.
    for name, variable in [("without wgmma", "GAPLESS_WGMMA"), ("without timed algorithms", "GAPLESS_TUNE")]:
        yield Part(f"speed {name}", "variants", 90, ["gpu", "speed", *fixed, *steps], environment={variable: "off"})
    yield from map(judge, JUDGES)
    for model, micro_batch in MICRO_BATCHES.items():
        yield from at_one_micro_batch(model, micro_batch, steps)
    for model in IN_MEMORY:
        yield Part("memory" if model == "gpt2" else f"memory, {model}", "memory", 60, ["gpu", "memory", "--model", model])
    yield parity("gpt2", options.parity_steps, 2, 64)
    yield from (parity(model, *setting) for model, setting in PARITY.items())
    yield from map(judge, MORE_JUDGES)
    for model in options.models:
        yield from within_budget(model, options.budget, steps)
    yield from sanitizers(small)


def judge(module):
    command = ["engine-tests", "--test-threads", "1", f"tests::cuda::{module}::"]
    # The module "fused" takes longer, because every random function has kernels of its own to compile.
    limit = 150 if module == "fused" else 75
    return Part(f"judge: {module}", "judges", limit, command, environment={"GAPLESS_TEST_DEVICE": "cuda"})


def peak(found):
    """The arguments for the measured rate of a copy, if it was measured."""
    gbs = found.figure("rates", "copy_gbs")
    return [] if gbs is None else ["--peak-gbs", str(gbs)]


def parity(model, steps, micro_batch, sequence):
    setting = ["--steps", str(steps), "--micro-batch", str(micro_batch), "--sequence", str(sequence)]
    command = ["gpu", "parity", "--model", model, *setting, "--tolerance-f32", "1e-4"]
    # Losses of the CPU that were computed beforehand.
    reference = pathlib.Path(os.environ.get("GAPLESS_BINARIES", "."), f"reference-{model}.json")
    if reference.is_file():
        command += ["--reference", str(reference)]
    return Part("parity" if model == "gpt2" else f"parity, {model}", "parity", 420 if model == "gpt2" else 180, command)


def at_one_micro_batch(model, micro_batch, steps):
    """PyTorch in all its variants, and gapless: alone, and in 0.7 of the bytes that the fastest PyTorch reserved (the goal), in which
    PyTorch is expected to run out of memory."""
    group = f"{model} × {micro_batch}"
    arguments = ["--model", model, "--micro-batch", str(micro_batch), *steps]
    # With default settings, with a vocabulary whose products are aligned, and with the fastest attention on Hopper.
    aligned = ["--vocabulary", "50304"] if model.startswith("gpt2") else []
    variants = {"": [], ", aligned ids": aligned, ", aligned ids, cuDNN attention": [*aligned, "--attention", "cudnn"]}
    compiled = f"{group}: PyTorch compiled"
    sides = {}
    for mode, limit in [("compiled", 150), ("eager", 75)]:
        for variant, more in variants.items():
            if variant == ", aligned ids" and not aligned:
                continue
            side = f"{group}: PyTorch {mode}{variant}"
            sides[side] = ["pytorch", "train", "--mode", mode, *more, *arguments]
            yield Part(side, "compared", limit, sides[side])
    speed = ["gpu", "speed", *arguments]
    yield Part(f"{group}: gapless", "compared", 120, speed)

    def best(found):
        """The fastest of PyTorch's sides, and the budget."""
        side = max(sides, key=lambda side: found.figure(side, "tokens_per_second") or 0)
        return side, ["--budget", str(int(found.figure(side, "reserved_bytes")) * 7 // 10)]

    needs = ("GPU", compiled)
    yield Part(f"{group}: gapless in 0.7", "compared", 180, lambda found: [*speed, *best(found)[1]], needs=needs)

    def in_budget(found):
        side, budget = best(found)
        return [*sides[side], *budget, "--expect-out-of-memory"]

    yield Part(f"{group}: PyTorch in 0.7", "compared", 150, in_budget, needs=needs)


def within_budget(model, budget, steps):
    """Each side's largest micro-batch within a budget, and gapless in 0.7 of the bytes that compiled PyTorch reserved (the goal)."""
    eager, compiled = f"{model}: PyTorch eager", f"{model}: PyTorch compiled"
    search = ["pytorch", "train", "--model", model, "--budget", str(budget), *steps]
    yield Part(eager, "budget", 330, [*search, "--mode", "eager", "--start", "16", "--limit", "300"])
    # Every micro-batch that is tried has to be compiled, so the search starts at the result of eager mode.
    start = lambda found: str(found.figure(eager, "micro_batch") or 16)  # noqa: E731
    yield Part(
        compiled,
        "budget",
        520,
        lambda found: [*search, "--mode", "compiled", "--start", start(found), "--limit", "490"],
        needs=("GPU", eager),
    )
    speed = ["gpu", "speed", "--model", model, *steps, "--budget"]
    yield Part(f"{model}: gapless", "budget", 180, [*speed, str(budget)])
    yield Part(
        f"{model}: gapless in 0.7",
        "budget",
        180,
        lambda found: [*speed, str(int(found.figure(compiled, "reserved_bytes")) * 7 // 10)],
        needs=("GPU", compiled),
    )


def sanitizers(small):
    """A small training under each tool, and the tests of kernels (without initcheck, which does not see that the host writes operands)."""
    judges = ["engine-tests", "--test-threads", "1", *(f"tests::cuda::{module}::" for module in SANITIZED_JUDGES)]
    for tool in ["memcheck", "racecheck", "initcheck", "synccheck"]:
        training = ["sanitizer", tool, "gpu", "parity", *small, "--steps", "2"]
        yield Part(f"sanitizer: {tool}", "sanitizer", 300, training)
        if tool in ["memcheck", "racecheck"]:
            yield Part(
                f"sanitizer: {tool}, judges",
                "sanitizer",
                500,
                ["sanitizer", tool, *judges],
                environment={"GAPLESS_TEST_DEVICE": "cuda"},
            )
