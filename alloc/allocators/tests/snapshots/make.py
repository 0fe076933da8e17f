"""Writes the small memory snapshots of this folder, in the layout of torch.cuda.memory._dump_snapshot."""

import pickle

MIB = 1 << 20
BASE = 0x7F0000000000


def event(action, offset, size, stream=0, **more):
    """One entry of a device trace; all share one list of frames, as PyTorch's do."""
    address = {"device_free": offset} if action == "oom" else {"addr": BASE + offset}
    return {"action": action, **address, "size": size, "stream": stream, "time_us": 1, "frames": FRAMES, **more}


FRAMES = [{"name": "step", "filename": "train.py", "line": 7}]


def block(size, state, requested=0):
    return {"address": BASE, "size": size, "requested_size": requested, "state": state, "frames": FRAMES}


def segment(offset, blocks):
    total = sum(b["size"] for b in blocks)
    return {"device": 0, "address": BASE + offset, "total_size": total, "stream": 0, "segment_type": "large",
            "allocated_size": 0, "active_size": 0, "blocks": blocks, "is_expandable": False}


STEP = [
    event("free_requested", 0, 100),  # allocated before the recording
    event("free_completed", 0, 100),
    event("segment_alloc", 4 * MIB, 20 * MIB),
    event("alloc", 4 * MIB, 3 * MIB),
    event("alloc", 7 * MIB, 5 * MIB, stream=94),
    event("free_requested", 4 * MIB, 3 * MIB),
    event("alloc", 0, 200),
    event("free_completed", 4 * MIB, 3 * MIB),  # another stream was still using it
    event("snapshot", 0, 0),
    event("oom", 0, 1 << 40),
    event("alloc", 4 * MIB, 1),
    event("free_requested", 4 * MIB, 1),
]
SEGMENTS = [
    segment(0, [block(512, "active_allocated", 200), block(1024, "active_allocated", 1000),
                block(2 * MIB - 1536, "inactive")]),
    segment(4 * MIB, [block(512, "active_pending_free", 1), block(20 * MIB - 512, "inactive")]),
]
STEP_FILE = {"segments": SEGMENTS, "device_traces": [STEP, []], "allocator_settings": {"expandable_segments": False}}


def trace(*events):
    return {"segments": [], "device_traces": [list(events)]}


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def repeated(levels):
    """A few hundred bytes that stand for 10 ** levels values."""
    value = [0] * 10
    for _ in range(levels):
        value = [value] * 10
    return value


class Call:
    """Unpickling it would run a command."""

    def __reduce__(self):
        import os
        return os.system, ("touch called",)


LOOP = []
LOOP.append(LOOP)

FILES = {
    "step": STEP_FILE,
    "two_devices": {"segments": [], "device_traces": [STEP, STEP]},
    "no_trace": {"segments": SEGMENTS, "device_traces": [[], []]},
    "not_a_snapshot": [1, 2, 3],
    "double_free": trace(event("alloc", 0, 9), event("free_requested", 0, 9), event("free_completed", 0, 9),
                         event("free_requested", 0, 9)),
    "double_alloc": trace(event("alloc", 0, 9), event("alloc", 0, 9)),
    "negative_size": trace(event("alloc", 0, -9)),
    "call": {"device_traces": Call()},
    "loop": {"device_traces": LOOP},
    "hostile": {**STEP_FILE, "loop": LOOP, "nested": nested(200), "repeated": repeated(12)},
}

for name, value in FILES.items():
    with open(f"{name}.pickle", "wb") as file:
        pickle.dump(value, file)
for protocol in (2, 3, 5):
    with open(f"step_protocol{protocol}.pickle", "wb") as file:
        pickle.dump(STEP_FILE, file, protocol=protocol)
