#!/usr/bin/env python3
"""What benches/gpu/run has found, as one table and one JSON: `record.py FOUND OUT`.

FOUND has a line per part in `parts` (name, state, seconds, why, between tabs), and a JSON file of each that wrote one. Without a
GPU no file is written to OUT: there would be nothing in it.
"""

import datetime
import json
import pathlib
import re
import sys

SIDES = ["eager", "compiled", "gapless", "gapless_in_0.7"]


def main():
    found, out = map(pathlib.Path, sys.argv[1:])
    lines = (found / "parts").read_text(encoding="utf-8").splitlines()
    parts = [
        {"part": part, "state": state, "seconds": int(seconds), "why": why}
        for part, state, seconds, why in (line.split("\t") for line in lines)
    ]
    figures = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(found.glob("*.json"))}
    figures = {name: value for name, value in figures.items() if "skipped" not in value}
    models = [name.removesuffix("-gapless") for name in figures if name.endswith("-gapless")]
    compared = {model: compare(model, figures) for model in models}

    print(f"\n{'part':30} state     seconds")
    for part in parts:
        why = f"   {part['why']}" if part["why"] else ""
        print(f"{part['part']:30} {part['state']:8} {part['seconds']:>8}{why}")
    for model, sides in compared.items():
        print(table(model, sides))

    if "device" in figures:
        device = figures["device"]["device"]
        now = datetime.datetime.now(datetime.timezone.utc)
        driver = (found / "driver").read_text(encoding="utf-8").strip()
        record = {
            "date": now.isoformat(timespec="seconds"),
            "device": device,
            "driver": driver or None,
            "commit": (found / "commit").read_text(encoding="utf-8").strip(),
            "parts": parts,
            "compared": compared,
            "figures": figures,
        }
        out.mkdir(parents=True, exist_ok=True)
        path = free_path(out, f"{now:%Y-%m-%d}-{file_name(device)}")
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten to {path}")
    return 1 if any(part["state"] == "failed" for part in parts) else 0


def compare(model, figures):
    """Each side's figures beside those of compiled PyTorch."""
    sides = {side: figures.get(f"{model}-{side}") for side in SIDES}
    flops_per_token, peak = (sides["gapless"][name] for name in ["flops_per_token", "peak_flops"])
    compiled = sides["compiled"]
    rows = {}
    for side, value in sides.items():
        if value is None:
            continue
        tokens, taken = value["tokens_per_second"], held(value)
        rows[side] = {
            "micro_batch": value["micro_batch"],
            "tokens_per_second": tokens,
            # The same arithmetic per token on every side.
            "mfu": tokens * flops_per_token / peak if peak else None,
            "held_bytes": taken,
            "allocated_bytes": value.get("allocated_bytes"),
            "tokens_of_compiled": tokens / compiled["tokens_per_second"] if compiled else None,
            "bytes_of_compiled": taken / held(compiled) if compiled else None,
        }
    return rows


def held(side):
    """What a side keeps from others: PyTorch's allocator what it has reserved at most, gapless its arena in whole pages."""
    return side["reserved_bytes"] if "reserved_bytes" in side else side["memory"]["arena"]


def table(model, sides):
    lines = [f"\n{model:16} micro-batch    tokens/s     MFU        bytes held   tokens/s and bytes, of compiled"]
    for side, row in sides.items():
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        of = [row["tokens_of_compiled"], row["bytes_of_compiled"]]
        of = "unknown" if None in of else f"{of[0]:.2f}× in {of[1]:.2f}×"
        tokens, taken = row["tokens_per_second"], row["held_bytes"]
        lines.append(f"{side:16} {row['micro_batch']:11} {tokens:11.0f} {mfu:>7} {taken:17}   {of}")
    lines.append("goal: at least 1.10× in at most 0.70×")
    return "\n".join(lines)


def free_path(folder, name):
    """A file for each run of a day."""
    path, number = folder / f"{name}.json", 2
    while path.exists():
        path, number = folder / f"{name}-{number}.json", number + 1
    return path


def file_name(device):
    """`GPU 0 (NVIDIA H200)` as `nvidia-h200`."""
    name = re.sub(r"^GPU \d+ \((.*)\)$", r"\1", device)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
