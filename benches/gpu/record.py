"""What benches/gpu/run has found: a JSON file that grows by every part that ends, and a table of it.

Each entry has the part, its command, how it ended, its figures, the date, and the card, driver and commit that they are of. An entry
counts for a call of the same commit on the same kind of card.
"""

import datetime
import json
import os

GOAL = "goal: at least 1.10× in at most 0.70×"


class Record:
    """The file, with what it has of this call's commit and card."""

    def __init__(self, path, commit, driver):
        self.path, self.commit, self.driver = path, commit, driver
        # As the engine names it; known once it has found it.
        self.card = None
        self.entries = (self.read(path) or {}).get("parts", [])

    @staticmethod
    def read(path):
        """A JSON file, if there is a whole one."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def note(self, part, command, state, seconds, why, figures):
        self.put({"part": part, "command": command, "state": state, "seconds": seconds, "why": why, "figures": figures})

    def begin(self, part, command):
        """Notes that a part begins, so that a call that is cut off leaves a trace; false if two were."""
        before = self.find(part, command)
        cuts = before.get("begun", 0) if before and before["state"] == "begun" else 0
        if cuts >= 2:
            return False
        self.put({"part": part, "command": command, "state": "begun", "begun": cuts + 1, "seconds": 0, "why": "", "figures": None})
        return True

    def put(self, entry):
        """Adds an entry in the place of what it repeats, and writes the file as one."""
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
        """Whether an entry takes the place of another. When the part began that finds the card, there was none."""
        is_same = all(other[key] == entry[key] for key in ["part", "commit"])
        return is_same and (other["card"] == entry["card"] or other["state"] == "begun")

    def find(self, part, command=None):
        """This commit's entry of a part on this card; of this command alone, if one is given."""
        for entry in self.entries:
            is_of = entry["part"] == part and entry["commit"] == self.commit and entry["card"] == self.card
            if is_of and (command is None or entry["command"] == command):
                return entry
        return None

    def is_finished(self, part, command, again):
        """Whether it need not be done again. What was skipped may be possible by now, and what failed may be done again."""
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
        """All parts of this commit on this card, and gapless beside PyTorch."""
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
    """Each side's tokens and bytes beside those of compiled PyTorch; the arithmetic of a token is the same on every side."""
    ours = next((figures for _, figures in sides if "flops_per_token" in figures), {})
    flops, peak = ours.get("flops_per_token"), ours.get("peak_flops")
    peer = dict(sides).get("PyTorch compiled")
    lines = [f"\n{model or 'gpt2, one micro-batch':40} micro-batch    tokens/s     MFU        bytes held   tokens/s and bytes, of compiled"]
    for side, figures in sides:
        tokens, taken = figures["tokens_per_second"], held(figures)
        mfu = f"{tokens * flops / peak:.1%}" if flops and peak else "unknown"
        of = f"{tokens / peer['tokens_per_second']:.2f}× in {taken / held(peer):.2f}×" if peer else "unknown"
        lines.append(f"{side:40} {figures['micro_batch']:11} {tokens:11.0f} {mfu:>7} {taken:17}   {of}")
    return lines + ([GOAL] if model else [])


def held(figures):
    """What a side keeps from others: PyTorch's allocator what it has reserved at most, gapless its arena in whole pages."""
    return figures["reserved_bytes"] if "reserved_bytes" in figures else figures["memory"]["arena"]
