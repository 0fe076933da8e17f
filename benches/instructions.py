"""Prints the innermost loops of a product, of attention's softmax and of AdamW in the compiler's assembly for 64-bit Arm.

Arguments: assembly of gapless-kernels and gapless-graph (`.ci/platforms instructions` makes it).
"""

import re
import sys


def loops(path):
    """Yields each loop that no branch enters in the middle, as (function, instructions)."""
    labels, function = {}, ""
    lines = open(path).read().splitlines()
    for at, line in enumerate(lines):
        if start := re.match(r"(_\w\S*):$", line):
            labels, function = {}, start[1]
        elif label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = at
        elif (branch := re.search(r"\tb\.\w+\s+(\.L\w+)", line)) and branch[1] in labels:
            body = lines[labels[branch[1]] + 1 : at + 1]
            if not any(line.startswith(".L") for line in body):
                yield function, body


def count(body, pattern):
    return sum(bool(re.search(pattern, line)) for line in body)


every = [loop for path in sys.argv[1:] for loop in loops(path)]
shown = {
    "product, 12 rows by 8 columns": [b for f, b in every if "4neon5micro" in f],
    "attention, exponentials of scores and their sums": [b for f, b in every if "rows8portable7softmax" in f],
    # Loads four elements each of the parameter, the gradient and two moments. Stores parameter and moments; only the
    # parameter is the result of a subtraction.
    "AdamW in f32": [
        b
        for f, b in every
        if count(b, r"\tfsqrt\tv.*4s") == 1 and count(b, r"\tfsub\tv.*4s") == 1 and count(b, r"\tstr\tq") == 3
        and count(b, r"\tldr\tq") == 4
    ],
}
for name, bodies in shown.items():
    if not bodies:
        sys.exit(f"{name}: no such loop: it is not vectorized, or its function has another name")
    body = max(bodies, key=lambda body: count(body, r"\tfmla\t.*4s"))
    four, one, stack = (count(body, pattern) for pattern in (r"\tfmla\t.*4s", r"\tfmadd\t", r"\[sp"))
    print(f"\n{name}: {len(body)} instructions; {four} fmla of four lanes, {one} of one; {stack} go to the stack")
    print("\n".join(body))
