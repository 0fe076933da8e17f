"""The time of a request and its free through PyTorch: its own allocator in two modes, and gapless.

    FAKECUDA_LIBDIR=FOLDER python request_time.py LIBRARY [ROUNDS]

FOLDER has a simulated CUDA driver, or is empty where there is a GPU. LIBRARY is libgapless_torch.so. The modes run in
turns, each in a process of its own; each process repeats an iteration of 3,000 requests and keeps the fastest. Prints
the median of the rounds, in nanoseconds of a request with its free, with Python's own share, which all modes have.
"""

import os
import random
import statistics
import subprocess
import sys
import time

MODES = ["default", "expandable", "gapless, planned", "gapless, without a plan"]


def environment(mode):
    changed = dict(os.environ)
    folder = os.environ.get("FAKECUDA_LIBDIR")
    if folder:
        names = [name for name in os.listdir(folder) if name.startswith("lib")]
        changed["LD_PRELOAD"] = ":".join(os.path.join(os.path.abspath(folder), name) for name in sorted(names))
        changed["FAKECUDA_MEM_BYTES"] = str(40 << 30)
    if mode == "expandable":
        changed["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return changed


def measure(mode, library):
    import ctypes

    import torch

    step = lambda: None
    if mode.startswith("gapless"):
        functions = torch.cuda.memory.CUDAPluggableAllocator(library, "gapless_torch_alloc", "gapless_torch_free")
        torch.cuda.memory.change_current_allocator(functions)
        step = ctypes.CDLL(library).gapless_torch_step
    allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
    free = torch._C._cuda_cudaCachingAllocator_raw_delete
    torch.cuda.init()
    stream = torch.cuda.current_stream().cuda_stream
    numbers = random.Random(1)
    sizes = [numbers.choice([1000, 5000, 100_000, 4 << 20, 9 << 20]) for _ in range(3000)]
    fastest = float("inf")
    for iteration in range(40):
        # Without a plan: no two iterations ask for the same.
        numbers.shuffle(sizes) if mode.endswith("without a plan") else None
        living = []
        begin = time.perf_counter()
        for number, bytes_ in enumerate(sizes):
            living.append(allocate(bytes_, stream))
            if number % 3 == 2:
                free(living.pop(number // 6))
                free(living.pop())
        for address in living:
            free(address)
        fastest = min(fastest, time.perf_counter() - begin)
        step()
    print(fastest / len(sizes) * 1e9)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[3] in MODES:
        measure(sys.argv[3], sys.argv[1])
        sys.exit()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    times = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            command = [sys.executable, "-B", __file__, sys.argv[1], "0", mode]
            run = subprocess.run(command, env=environment(mode), check=True, capture_output=True, text=True)
            times[mode].append(float(run.stdout))
    for mode in MODES:
        print(f"{mode:<24}{statistics.median(times[mode]):8.0f} ns")
