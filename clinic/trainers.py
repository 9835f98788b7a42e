"""Programs with a fault in the trainers that people have: Hugging Face, TRL, Lightning, a loop over a DataLoader.

    python -m clinic trainers [--only NAME] [--seeds 3] [--arms plain,skip,guarded,twin-plain,twin-guarded]
                                  [--jobs 2] [--out FILE.jsonl] [--tree DIR]

The programs are the files of clinic/in_trainers, written by people who had not seen the engine. Each has a mended twin,
which says what a healthy run comes to. With --tree another checkout of the library is measured: its records stand next
to those of this one in the same file, and the table is of the tree that was asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from clinic import paired
from clinic.paired import Record
from clinic.program import guilty_lines
from clinic.runs import statement
from clinic.score import Yardstick

PLACE = Path(__file__).parent / "in_trainers"
ARMS = ("plain", "skip", "guarded", "twin-plain", "twin-guarded")
IMPORTS = ("transformers", "trl", "lightning", "torchmetrics", "datasets")
LIKE = {"rate": "explosion"}  # causes that are the same for this purpose


class Case:
    """What a program says of itself."""

    def __init__(self, file: Path) -> None:
        self.module: Any = paired.load(file)
        self.file, text = str(file), file.read_text()
        marked = guilty_lines(self.module)
        self.lines = {line for one in marked for line in statement(text, one)}

    def names(self, record: Record) -> bool:
        """Say whether an incident names the line, the rows, or where none is to blame the cause."""
        found, module = record["incidents"], self.module
        if rows := set(module.bad_rows(record["seed"])):
            blamed = {row for one in found if one["cause"] == "data" for row in one["rows"]}
            return bool(blamed) and blamed <= rows
        if module.OPS:
            return any(self._is_it(one["culprit"]) for one in found if one["culprit"])
        return any(LIKE.get(one["cause"], one["cause"]) == module.CAUSE for one in found)

    def _is_it(self, culprit: dict[str, Any]) -> bool:
        if self.module.LIBRARY:
            return bool(culprit["file"].endswith(self.module.LIBRARY)) and culprit["op"] in self.module.OPS
        return culprit["file"] == self.file and culprit["line"] in self.lines

    def accuses_another(self, record: Record) -> bool:
        """Say whether a line is accused that is innocent."""
        named = [
            one["culprit"]
            for one in record["incidents"]
            if one["culprit"] and one["cause"] in ("operation", "overflow")
        ]
        return any(not (self.module.OPS and self._is_it(culprit)) for culprit in named)


def verdict(record: Record) -> str:
    """What the run says at its end."""
    if record["error"]:
        return str(record["error"]["type"])
    return str((record["summary"] or {}).get("verdict", ""))


def table(records: list[Record], cases: dict[str, Case]) -> str:
    """Write a row for each program, and the sums by kind of loop."""
    arms = [arm for arm in ARMS if any(record["arm"] == arm for record in records)]
    about = "| program | kind | cause | " + " | ".join(f"good: {arm}" for arm in arms) + " | named | says |"
    lines, sums = (
        [about, "|---" * (about.count("|") - 1) + "|"],
        {kind: Counter[str]() for kind in ("hf", "trl", "lightning", "loader", "all")},
    )
    for name in dict.fromkeys(record["program"] for record in records):
        case, mine = cases[name], [record for record in records if record["program"] == name]
        sticks = {
            one["seed"]: Yardstick(one["best"], one["measure"])
            for one in mine
            if one["arm"] == "twin-plain" and one["measure"] is not None
        }
        count, cells = Counter[str](), [name, case.module.KIND, case.module.CAUSE]
        for arm in arms:
            runs = [one for one in mine if one["arm"] == arm and one["seed"] in sticks]
            good = [one for one in runs if not one["error"] and is_near(sticks[one["seed"]], one)]
            cells.append(f"{len(good)}/{len(runs)}")
            count.update({f"good {arm}": len(good), f"runs {arm}": len(runs)})
            if arm == "guarded":
                count["named"] = sum(case.names(one) for one in runs)
                count["innocent"] = sum(case.accuses_another(one) for one in runs)
                count["false"] = sum(verdict(one) in ("well", "recovered") for one in runs if one not in good)
            if arm == "twin-guarded":
                count["alarms"] = sum(bool(one["incidents"]) for one in runs)
        guarded = [one for one in mine if one["arm"] == "guarded"]
        cells += [f"{count['named']}/{len(guarded)}", paired.counted([verdict(one) for one in guarded])]
        lines.append("| " + " | ".join(cells) + " |")
        for kind in (case.module.KIND, "all"):
            sums[kind].update(count)
    names = [key for key in sums["all"] if not key.startswith("runs")]
    lines += ["", "| loop | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, count in sums.items():
        runs = {name: count[f"runs {name.removeprefix('good ')}"] or count["runs guarded"] for name in names}
        lines.append(f"| {kind} | " + " | ".join(f"{count[name]} of {runs[name]}" for name in names) + " |")
    return "\n".join(lines)


def is_near(stick: Yardstick, record: Record) -> bool:
    return record["measure"] is not None and math.isfinite(record["measure"]) and stick.is_near(record["measure"])


def main() -> None:
    """Run what the command line asks for."""
    files = {file.stem: file for file in sorted(PLACE.glob("*.py")) if not file.name.startswith("_")}

    def told(records: list[Record]) -> str:
        return table(records, {name: Case(file) for name, file in files.items()})

    paired.main("Programs with a fault, in trainers.", files, told, seeds=3, arms=ARMS, preload=IMPORTS)
