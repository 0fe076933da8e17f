#!/usr/bin/env python3
"""One slice of benches/gpu/run: the parts that are still to be done (parts.py), as far as this call's time allows.

Every part has a time limit, and only starts if that much time is left. Its results are in OUT/found.json as soon as it has ended
(record.py), so a call that is cut off loses at most one part. OUT also has the log and the compiled kernels. Results and kernels of
earlier calls are read from OUT or, on a machine that keeps no files, from the folder of binaries.
"""

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

from parts import OURS, parts
from record import Record

HERE = pathlib.Path(__file__).resolve().parent
# Seconds of a call's time that are reserved for ending the call.
MARGIN = 10


def main():
    begin = time.monotonic()
    options = parse()
    # If this call is terminated, it exits normally, so that the program that it runs is ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.list:
        for part in wanted(options):
            print(f"{part.limit:4} s at most   {part.group:10} {part.name}")
        return 0
    out, binaries = pathlib.Path(options.out), pathlib.Path(os.environ["GAPLESS_BINARIES"])
    out.mkdir(parents=True, exist_ok=True)
    for name in ["found.json", "cache.tgz"]:
        if (binaries / name).is_file() and not (out / name).exists():
            shutil.copy(binaries / name, out / name)
    with tempfile.TemporaryDirectory() as work, open(out / "log", "a", encoding="utf-8") as log:
        call = Call(out, binaries, pathlib.Path(work), log, begin + options.seconds)
        call.run(wanted(options), options.again)
    return 1 if call.has_failed else 0


def parse():
    parser = argparse.ArgumentParser(prog="benches/gpu/run", description="One slice of what is measured on a GPU.")
    parser.add_argument("--out", default=os.environ.get("OUT", "target/gpu-found"), help="where found.json, log and cache.tgz are kept")
    parser.add_argument("--seconds", type=int, default=540, help="what this call may take")
    parser.add_argument("--parts", nargs="+", metavar="GROUP", help="only those of these groups; the GPU is always asked for")
    parser.add_argument("--again", action="store_true", help="do what has failed once more")
    parser.add_argument("--list", action="store_true", help="say which parts there are")
    parser.add_argument("--models", nargs="+", default=["gpt2", "gpt2-medium"], help="whose largest micro-batches are measured")
    parser.add_argument("--budget", type=int, default=20 << 30, metavar="BYTES", help="for these")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--parity-steps", type=int, default=200)
    options = parser.parse_args()
    unknown = set(options.parts or []) - {part.group for part in parts(options)}
    if unknown:
        parser.error(f"there is no group {', '.join(sorted(unknown))}")
    return options


def wanted(options):
    return [part for part in parts(options) if not options.parts or part.name == "GPU" or part.group in options.parts]


class Call:
    """A call with its record, its log and its deadline."""

    def __init__(self, out, binaries, work, log, deadline):
        self.out, self.binaries, self.work, self.log, self.deadline = out, binaries, work, log, deadline
        commit = (binaries / "commit").read_text(encoding="utf-8").strip() if (binaries / "commit").exists() else "unknown"
        self.record = Record(out / "found.json", commit, driver())
        self.cache = Cache(out / "cache.tgz", work)
        self.has_failed = False

    def say(self, text):
        print(text, flush=True)
        print(text, file=self.log, flush=True)

    def run(self, wanted, again):
        self.say(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')}, commit {self.record.commit}, {self.record.driver or 'no driver'}")
        left = []
        for part in wanted:
            missing = [name for name in part.needs if self.record.state(name) != "ok"]
            if any(self.is_to_come(name, left) for name in missing):
                left.append(part)
                continue
            if missing:
                why = self.record.why(missing[0]) or "it did not end well"
                self.note(part, [], "skipped", 0, f"{missing[0]}: {why}" if missing[0] != "GPU" else why)
                continue
            command = part.command(self.record) if callable(part.command) else part.command
            if part.name != "GPU" and self.record.is_finished(part.name, command, again):
                continue
            if part.limit > self.deadline - MARGIN - time.monotonic():
                left.append(part)
                continue
            self.do(part, command)
        self.say(self.record.table())
        if left:
            self.say(f"{len(left)} parts are left for the next call: {', '.join(part.name for part in left)}")

    @staticmethod
    def is_to_come(name, left):
        return any(part.name == name for part in left)

    def do(self, part, command):
        """Runs a part and records its outcome."""
        if not self.record.begin(part.name, command) and part.name != "GPU":
            self.note(part, command, "failed", 0, "two calls were cut off in it")
            return
        self.say(f"\n== {part.name}, {part.limit} s at most")
        begin = time.monotonic()
        state, why, figures = self.outcome(part, command)
        self.note(part, command, state, round(time.monotonic() - begin), why, figures)
        self.cache.save()

    def note(self, part, command, state, seconds, why, figures=None):
        if part.name == "GPU" and figures:
            self.record.card = figures.get("card")
        self.record.note(part.name, command, state, seconds, why, figures)
        self.has_failed |= state == "failed"
        self.say(f"-- {part.name}: {state} after {seconds} s{': ' + why if why else ''}")

    def outcome(self, part, command):
        """Runs a command. Returns its state, the reason and the figures."""
        found = self.work / "figures.json"
        found.unlink(missing_ok=True)
        line = self.line(command, found)
        if isinstance(line, str):
            return "skipped", line, None
        environment = os.environ | {"GAPLESS_CACHE": str(self.cache.folder), "PYTHONUNBUFFERED": "1", "RUST_BACKTRACE": "1"}
        code, output = self.execute(line, environment | part.environment, part.limit)
        figures = Record.read(found) or from_output(output)
        last = next((line for line in reversed(output) if line.strip()), "it said nothing")
        if code is None:
            return "failed", f"took longer than {part.limit} s", figures
        if code != 0:
            return "failed", f"{last.strip()} (exit code {code})", figures
        if figures and "skipped" in figures:
            return "skipped", figures["skipped"], None
        skipped = next((line for line in output if line.startswith("skipped: ")), None)
        return ("skipped", skipped.removeprefix("skipped: ").strip(), None) if skipped else ("ok", "", figures)

    def line(self, command, found):
        """The program and arguments of a command; or, as a string, the reason why it cannot run."""
        program, *arguments = command
        if program == "sanitizer":
            if not shutil.which("compute-sanitizer"):
                return "compute-sanitizer is not installed"
            tool, *inner = arguments
            # Kernels of cuBLAS are excluded. They cannot be fixed here, and would take most of the sanitizer's time. Only
            # initcheck has to see them, because memory that they write is not uninitialized.
            names = [] if tool == "initcheck" else ["--kernel-name", f"regex=^({OURS})"]
            return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *names, *self.line(inner, found)]
        if program == "pytorch":
            return [sys.executable, str(HERE / "pytorch.py"), *arguments, "--json", str(found)]
        if program == "gpu":
            # If a GPU was found before, or nvidia-smi lists one, a missing GPU is an error. In all other cases the
            # part is skipped.
            require = ["--require-gpu"] if self.record.driver or self.record.state("GPU") == "ok" else []
            return [str(self.binaries / "gpu"), *arguments, *require, "--json", str(found)]
        return [str(self.binaries / program), *arguments]

    def execute(self, line, environment, limit):
        """Runs a program and shows its output. Returns the exit code (None if it took too long) and the lines."""
        try:
            child = subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, start_new_session=True
            )
        except OSError as error:
            return 127, [f"{line[0]} cannot be run: {error.strerror}"]
        is_late = threading.Event()

        def end():
            is_late.set()
            # This also ends all processes that the program has started.
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        output = []
        try:
            for text in child.stdout:
                output.append(text)
                self.say(text.rstrip("\n"))
            code = child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        return (None if is_late.is_set() else code), output


class Cache:
    """Compiled kernels: a folder for this call, and an archive that is kept."""

    def __init__(self, archive, work):
        self.archive, self.folder = archive, work / "cache"
        self.folder.mkdir()
        if archive.is_file():
            with tarfile.open(archive) as tar:
                for member in filter(tarfile.TarInfo.isfile, tar):
                    path = (self.folder / member.name).resolve()
                    if path.is_relative_to(self.folder.resolve()):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(tar.extractfile(member).read())
        self.known = self.files()

    def files(self):
        return {path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file()}

    def save(self):
        """Archives the folder if it has new files."""
        if self.files() == self.known:
            return
        new = self.archive.with_suffix(".new")
        with tarfile.open(new, "w:gz") as tar:
            for path in sorted(self.files()):
                tar.add(self.folder / path, arcname=str(path))
        new.replace(self.archive)
        self.known = self.files()


def driver():
    """The first GPU, as nvidia-smi lists it; None without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), "").strip() or None


def from_output(output):
    """Figures from the output of programs that write none: tests and NVIDIA's sanitizer."""
    text = "".join(output)
    figures = {}
    tests = re.search(r"^test result: \w+\. (\d+) passed; (\d+) failed", text, re.MULTILINE)
    if tests:
        figures |= {"passed": int(tests[1]), "failed": int(tests[2])}
    summary = re.findall(r"^========= (.*SUMMARY: .*)$", text, re.MULTILINE)
    if summary:
        figures["sanitizer"] = summary[-1]
    return figures or None


if __name__ == "__main__":
    sys.exit(main())
