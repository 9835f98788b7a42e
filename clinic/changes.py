"""Healthy programs that change on purpose in mid-training, and their twins, which suffer damage there instead.

    python -m clinic changing [--only NAME] [--seeds 3] [--arms plain,guarded,twin-plain,twin-guarded]
                                 [--jobs 2] [--out FILE.jsonl] [--tree DIR]

The programs are the files of clinic/changing. A guard should leave the change alone,
and heal the damage of the twin.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path
from typing import Any

from clinic import paired
from clinic.paired import Record

PLACE = Path(__file__).parent / "changing"
ARMS = ("plain", "guarded", "twin-plain", "twin-guarded")
IMPORTS = {"hf": ["transformers"], "lightning": ["lightning"]}


def constants(file: Path) -> dict[str, Any]:
    """Read KIND, STEPS, CHANGE and DAMAGE without running the file."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id in {"KIND", "STEPS", "CHANGE", "DAMAGE"}:
            try:
                found[target.id] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except ValueError:  # computed from other names
                found[target.id] = None
    return found


def twins(records: list[Record], about: dict[str, dict[str, Any]]) -> str:
    """Write when the damage was noticed, and what the incidents came to."""
    lines = ["| program | damage | at step | first alarm, after | outcomes |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(record["program"] for record in records):
        mine = [r for r in records if r["program"] == name and r["arm"] == "twin-guarded"]
        change = (about[name].get("CHANGE") or [None])[0]
        firsts = [r["incidents"][0]["step"] or 0 for r in mine if r["incidents"]]
        known = change is not None and bool(firsts)
        late = f"{statistics.median(int(step) - change for step in firsts):+g} updates" if known else ""
        outcomes = paired.counted([str(incident["outcome"]) for r in mine for incident in r["incidents"]])
        cells = [name, str(about[name].get("DAMAGE")), str(change), f"{len(firsts)} of {len(mine)} {late}", outcomes]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what the command line asks for."""
    files = {file.stem: file for file in sorted(PLACE.glob("*.py")) if not file.name.startswith("_")}
    about = {name: constants(file) for name, file in files.items()}
    kinds = sorted({str(constant.get("KIND")) for constant in about.values()})
    preload = [module for kind in kinds for module in IMPORTS.get(kind, [])]

    def table(records: list[Record]) -> str:
        parts = []
        if any(record["arm"] in ("plain", "guarded") for record in records):
            parts += ["Changes on purpose:", paired.pairs(records)]
        if any(record["arm"].startswith("twin") for record in records):
            parts += ["Twins, with damage instead:", paired.pairs(records, "twin-plain", "twin-guarded")]
            parts.append(twins(records, about))
        return "\n\n".join(parts)

    title = "Programs that change on purpose, and twins that are damaged."
    paired.main(title, files, table, seeds=3, arms=ARMS, preload=preload)
