"""Checks the Python package over a simulated driver. `package.py CASE FOLDER`; prints `ok` at the end."""

import json
import os
import pathlib
import sys

import gapless_torch
import torch

case, folder = sys.argv[1], pathlib.Path(sys.argv[2])


def refused(error, text, call):
    try:
        call()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__}")


class Job:
    """A model, its optimizer, and an iteration."""

    def __init__(self):
        layers = [torch.nn.Linear(512, 512) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def train(self, rows=64):
        self.model(torch.ones(rows, 512, device="cuda")).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def before_install():
    refused(RuntimeError, "install() first", gapless_torch.step)
    refused(RuntimeError, "install() first", gapless_torch.report)
    library = os.environ.pop("GAPLESS_TORCH_LIBRARY")
    refused(FileNotFoundError, "cargo build --release -p gapless-torch", gapless_torch.install)
    os.environ["GAPLESS_TORCH_LIBRARY"] = library
    torch.ones(1, device="cuda")
    refused(RuntimeError, "", gapless_torch.install)


def capture():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.empty(1000, device="cuda")


def plays():
    # Without a C++ compiler.
    os.environ |= {"CXX": "false", "XDG_CACHE_HOME": str(folder / "cache")}
    gapless_torch.install(plans=folder / "plans", key="a job", check=True)
    gapless_torch.install()  # has no effect
    job = Job()
    for number in range(6):
        try:
            with gapless_torch.iteration():
                job.train()
                if number == 5:
                    raise KeyError
        except KeyError:
            pass
    (figures,) = gapless_torch.report()
    assert figures["iterations"] == 6, figures
    assert figures["exact_iterations"] >= 4, figures
    assert figures["planned"] == figures["lower_bound"] and figures["later_device_calls"] == 0, figures
    table = folder / "table.csv"
    gapless_torch.write_table(table)
    assert table.read_text().startswith("id,lower,upper,size,offset\n")
    refused(RuntimeError, "device 7 is not in use", lambda: gapless_torch.write_table(table, device=7))
    refused(RuntimeError, "out of memory on CUDA device 0", lambda: torch.empty(1 << 40, device="cuda"))
    refused(RuntimeError, "private pools", capture)
    handle = gapless_torch.follow(job.optimizer)
    job.train()
    assert gapless_torch.report()[0]["iterations"] == 7
    handle.remove()
    job.train()
    assert gapless_torch.report()[0]["iterations"] == 7
    # An evaluation, a kept tensor, another batch, and the cache.
    kept = torch.empty(123_456, device="cuda")
    with torch.no_grad():
        job.model(torch.ones(7, 512, device="cuda"))
    gapless_torch.step()
    job.train(rows=32)
    torch.cuda.empty_cache()
    gapless_torch.step()
    side = torch.cuda.Stream()
    kept.record_stream(side)
    del kept
    for _ in range(6):
        with gapless_torch.iteration():
            job.train()
    more = gapless_torch.report()[0]
    assert more["exact_iterations"] >= figures["exact_iterations"] + 2, more
    print(json.dumps({"exact": figures["exact_iterations"]}))


def out_of_memory():
    gapless_torch.install()
    torch.ones(1, device="cuda")
    refused(torch.OutOfMemoryError, "bytes were requested", lambda: torch.empty(1 << 40, device="cuda"))


{"before_install": before_install, "plays": plays, "out_of_memory": out_of_memory}[case]()
print("ok")
