"""PyTorch plays gapless's plans.

    import gapless_torch

    gapless_torch.install()            # before the first CUDA request
    for batch in batches:
        with gapless_torch.iteration():
            loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

The first iteration is recorded, and the next ones are served from a plan for it. If they ask for something else, the plan
is made when two in a row have asked for the same.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

__all__ = ["install", "iteration", "step", "follow", "report", "write_table"]

_FOLDER = pathlib.Path(__file__).resolve().parent
_library = None
_allocator = None


def install(plans=None, key=None, check=False):
    """Makes PyTorch use the allocator. Must be called before the first CUDA request.

    plans: a folder of saved plans. A plan that an earlier run saved there is played from the first request on.
    key: what tells this job's plan from others in the folder. By default PyTorch's version, the command line, the
        working folder, and the environment's RANK and WORLD_SIZE.
    check: whether every request is checked against all living ones, which takes time.

    Raises RuntimeError if PyTorch is older than 2.3 or has already used its own allocator, and FileNotFoundError if the
    library is missing.
    """
    global _library, _allocator
    if _library is not None:
        return
    path = os.environ.get("GAPLESS_TORCH_LIBRARY") or str(_FOLDER / "libgapless_torch.so")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path}: the library is missing. Install the package with pip, or build it with "
            "`cargo build --release -p gapless-torch` and set GAPLESS_TORCH_LIBRARY to libgapless_torch.so"
        )
    if check:
        os.environ["GAPLESS_TORCH_CHECK"] = "1"
    if plans is not None:
        plans = os.path.abspath(plans)
        os.makedirs(plans, exist_ok=True)
    library = ctypes.CDLL(path)
    library.gapless_torch_error.restype = ctypes.c_char_p
    library.gapless_torch_report.restype = ctypes.c_size_t
    library.gapless_torch_report.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.gapless_torch_raise_with.argtypes = [ctypes.c_void_p]
    library.gapless_torch_write_table.argtypes = [ctypes.c_int, ctypes.c_char_p]
    library.gapless_torch_save_plans.argtypes = [ctypes.c_char_p]
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "gapless_torch_alloc", "gapless_torch_free")
    inner = allocator.allocator()
    if not hasattr(inner, "set_begin_allocate_to_pool"):
        # Without it, a CUDA graph would record addresses that the plan gives to others.
        raise RuntimeError(f"gapless_torch needs PyTorch 2.3 or later, and this is {torch.__version__}")
    inner.set_record_stream_fn(_address(library.gapless_torch_record_stream))
    inner.set_reset_fn(_address(library.gapless_torch_empty_cache))
    inner.set_begin_allocate_to_pool(_address(library.gapless_torch_refuse_pool))
    library.gapless_torch_raise_with(_thrower())
    torch.cuda.memory.change_current_allocator(allocator)
    if plans is not None:
        # Not by the environment, which child processes inherit.
        library.gapless_torch_save_plans(os.fsencode(os.path.join(plans, _key(key))))
    _library, _allocator = library, allocator


def step():
    """Ends an iteration."""
    _installed().gapless_torch_step()


@contextlib.contextmanager
def iteration():
    """An iteration, which ends with the block, also by an exception."""
    try:
        yield
    finally:
        step()


def follow(optimizer):
    """Ends an iteration after each of the optimizer's steps. Returns a handle whose remove() undoes that.

    Gradients that are freed later (`zero_grad` after the step) belong to the next iteration, and are not planned; call
    step() after zero_grad instead where that matters.
    """
    return optimizer.register_step_post_hook(lambda *_: step())


def report():
    """The figures of each device in use, as a list of dictionaries. Sizes are in bytes."""
    library = _installed()
    text = ctypes.create_string_buffer(1 << 16)
    library.gapless_torch_report(text, len(text))
    return json.loads(text.value)


def write_table(path, device=0):
    """Writes the iteration that is played, or else the last one recorded, as a table for `gapless plan` and `gapless compare`."""
    library = _installed()
    if library.gapless_torch_write_table(device, os.fsencode(path)):
        raise RuntimeError(library.gapless_torch_error().decode())


def _installed():
    if _library is None:
        raise RuntimeError("call gapless_torch.install() first")
    return _library


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


def _key(key):
    if key is None:
        # Not the device's name: to ask for it would initialize PyTorch's own allocator.
        rank = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
        key = repr((torch.__version__, sys.argv, os.getcwd(), rank))
    return hashlib.sha256(str(key).encode()).hexdigest()[:32]


def _thrower():
    """The address of a function that throws a text: as torch.OutOfMemoryError, or without a C++ compiler as RuntimeError."""
    try:
        return _address(ctypes.CDLL(str(_compiled())).gapless_torch_out_of_memory)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"gapless_torch: out of memory will be a RuntimeError: {error}", file=sys.stderr)
        return _address(getattr(ctypes.CDLL("libc10.so"), "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"))


def _compiled():
    """The library of out_of_memory.cpp for this PyTorch, compiled on first use."""
    source = _FOLDER / "out_of_memory.cpp"
    name = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "gapless_torch"
    library = cache / f"out_of_memory-{name}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        torch_folder = pathlib.Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = pathlib.Path(folder) / library.name
            subprocess.check_call(
                [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-std=c++20", "-O1", f"-I{torch_folder}/include"]
                + [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", str(source), "-o", str(made)]
                + [f"-L{torch_folder}/lib", "-lc10"],
                stderr=subprocess.DEVNULL,
            )
            os.replace(made, library)
    return library
