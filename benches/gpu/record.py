"""The results of benches/gpu/run: a JSON file to which every finished part is added, and a table of it.

Each entry has the part, its command, its outcome and figures, the date, and the card, driver and commit. An entry is valid for calls
with the same commit on the same kind of card.
"""

import datetime
import json
import os

GOAL = "goal: at least 1.10× in at most 0.70×"


class Record:
    """The file, and its entries for this call's commit and card."""

    def __init__(self, path, commit, driver):
        self.path, self.commit, self.driver = path, commit, driver
        # The engine's name of the card; None until the part "GPU" has found the card.
        self.card = None
        self.entries = (self.read(path) or {}).get("parts", [])

    @staticmethod
    def read(path):
        """The content of a JSON file; None if it is missing or incomplete."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def note(self, part, command, state, seconds, why, figures):
        self.put({"part": part, "command": command, "state": state, "seconds": seconds, "why": why, "figures": figures})

    def begin(self, part, command):
        """Records that a part begins, so that a call that is cut off leaves a trace. Returns False if two calls were cut off in it."""
        before = self.find(part, command)
        cuts = before.get("begun", 0) if before and before["state"] == "begun" else 0
        if cuts >= 2:
            return False
        self.put({"part": part, "command": command, "state": "begun", "begun": cuts + 1, "seconds": 0, "why": "", "figures": None})
        return True

    def put(self, entry):
        """Adds an entry, replacing the ones that it repeats, and writes the file in one step."""
        entry |= {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "card": self.card,
            "driver": self.driver,
            "commit": self.commit,
        }
        self.entries = [other for other in self.entries if not self.is_repeated(other, entry)] + [entry]
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"parts": self.entries}, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path)

    @staticmethod
    def is_repeated(other, entry):
        """True if an entry replaces another one. An entry of the part that finds the card may have been begun before the card was known."""
        is_same = all(other[key] == entry[key] for key in ["part", "commit"])
        return is_same and (other["card"] == entry["card"] or other["state"] == "begun")

    def find(self, part, command=None):
        """The entry of a part for this commit and card; only if it has this command, if one is given."""
        for entry in self.entries:
            is_of = entry["part"] == part and entry["commit"] == self.commit and entry["card"] == self.card
            if is_of and (command is None or entry["command"] == command):
                return entry
        return None

    def is_finished(self, part, command, again):
        """True if the part need not run again. Skipped parts do run again, and failed ones do if `again` is set."""
        entry = self.find(part, command)
        return entry is not None and entry["state"] in (["ok"] if again else ["ok", "failed"])

    def state(self, part):
        entry = self.find(part)
        return entry and entry["state"]

    def why(self, part):
        entry = self.find(part)
        return entry["why"] if entry else ""

    def figure(self, part, name):
        entry = self.find(part)
        return (entry["figures"] or {}).get(name) if entry and entry["state"] == "ok" else None

    def table(self):
        """A table of all parts of this commit on this card, and a comparison of gapless with PyTorch."""
        lines = [f"\n{'part':44} state     seconds"]
        of_this = [entry for entry in self.entries if (entry["commit"], entry["card"]) == (self.commit, self.card)]
        for entry in of_this:
            why = f"   {entry['why']}" if entry["why"] else ""
            lines.append(f"{entry['part']:44} {entry['state']:8} {entry['seconds']:>8}{why}")
        measured = [entry for entry in of_this if entry["state"] == "ok" and "tokens_per_second" in (entry["figures"] or {})]
        groups = {}
        for entry in measured:
            model, colon, side = entry["part"].partition(": ")
            groups.setdefault(model if colon else "", []).append((side if colon else entry["part"], entry["figures"]))
        for model, sides in groups.items():
            lines += compared(model, sides)
        return "\n".join(lines)


def compared(model, sides):
    """Lines that compare each side's speed and bytes with the fastest PyTorch. All sides have the same arithmetic per token."""
    ours = next((figures for _, figures in sides if "flops_per_token" in figures), {})
    flops, peak = ours.get("flops_per_token"), ours.get("peak_flops")
    peers = [figures for _, figures in sides if "reserved_bytes" in figures]
    peer = max(peers, key=lambda figures: figures["tokens_per_second"], default=None)
    lines = [f"\n{model or 'gpt2':40} micro-batch    tokens/s     MFU        bytes held   tokens/s and bytes, of PyTorch's best"]
    for side, figures in sides:
        tokens, taken = figures["tokens_per_second"], held(figures)
        mfu = f"{tokens * flops / peak:.1%}" if flops and peak else "unknown"
        of = f"{tokens / peer['tokens_per_second']:.2f}× in {taken / held(peer):.2f}×" if peer else "unknown"
        lines.append(f"{side:40} {figures['micro_batch']:11} {tokens:11.0f} {mfu:>7} {taken:17}   {of}")
    return lines + ([GOAL] if model else [])


def held(figures):
    """The memory that a side occupies: the maximum that PyTorch's allocator has reserved, or gapless' arena in whole pages."""
    return figures["reserved_bytes"] if "reserved_bytes" in figures else figures["memory"]["arena"]
