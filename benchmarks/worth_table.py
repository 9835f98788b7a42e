"""Makes docs/worth.md: each rule of the library, the programs it acted in, and what is won and lost with it.

    python benchmarks/worth_table.py worth.jsonl    # after worth.py: pass, without NAME ..., goals

A rule is a function that may return nothing. A program is won by a rule if it is good with it only: it ended, and its
loss is at most its goal; lost is the other way round. In brackets: those that were committed after the rule was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import worth_names

PAGE = Path(__file__).parent.parent / "docs" / "worth.md"
BEGINS = "<!-- made by benchmarks/worth_table.py -->\n"
ROOMS = ("watch", "diagnose", "numerics", "recover", "trials", "recovery", "computation", "adapters", "data")
FILES = {  # where the programs of a kind were written down
    "clinic": "*clinic/{0}/{1}.py",
    "paired": "*{0}",
    "matrix": "*matrix_programs.py",
    "hot": "*hot_stretch_letters.py",
    "rates": "*hot_rates.py",
    "drill": "*benchmarks/recovery.py",
    "trainer": "*benchmarks/trainers.py",
}
Record = dict[str, Any]


def first_commit(*arguments: str) -> str:
    """When what the arguments of `git log` select was first committed; "" if never."""
    log = ["git", "log", "--reverse", "--format=%cI", *arguments]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.partition("\n")[0]


@cache
def written(unit: tuple[Any, ...]) -> str:
    """When a program was committed."""
    return first_commit("--diff-filter=A", "--", FILES[unit[0]].format(*unit[1:]))


@cache
def ruled(name: str) -> str:
    """When a rule was committed: the class of a method, else the function."""
    *_, owner, function = name.partition(" ")[0].split(".")
    defined = f"class {owner}" if owner[:1].isupper() else f"def {function}("
    return first_commit(f"-S{defined}", "--", "*.py")


def is_good(record: Record, goal: float) -> bool:
    """Whether a run ended, near enough to where it can, without naming a wrong line or row."""
    value = record.get("value")
    return value is not None and not record.get("ended") and not record.get("wrong") and value <= goal


class Worth:
    """The runs of a file, by program, and what they say of a name."""

    def __init__(self, lines: str) -> None:
        self.passed: dict[tuple[Any, ...], Record] = {}
        self.goals: dict[tuple[Any, ...], float] = {}
        self.without: dict[str, list[Record]] = defaultdict(list)
        for record in map(json.loads, lines.splitlines()):
            unit = tuple(record["unit"])
            if record["arm"] == "goal":
                self.goals[unit] = float("inf") if record.get("goal") is None else record["goal"]
            elif not record["without"]:
                self.passed[unit] = record
            elif len(record["without"]) == 1:
                self.without[record["without"][0]].append(record)

    def acted(self, name: str) -> list[tuple[Any, ...]]:
        return [unit for unit, record in self.passed.items() if name in record["acted"]]

    def rare(self, most: int) -> list[str]:
        """Return the names that acted in a few programs."""
        counts = Counter(name for record in self.passed.values() for name in record["acted"])
        return [name for name, count in counts.items() if count <= most]

    def changed(self, name: str) -> list[tuple[tuple[Any, ...], int]]:
        """The programs that are good in one of both only: 1 where they are won by the name, -1 where they are lost."""
        found = []
        for record in self.without[name]:
            unit = tuple(record["unit"])
            goal = self.goals.get(unit, float("inf"))
            by = is_good(self.passed[unit], goal) - is_good(record, goal)
            found += [(unit, by)] if by else []
        return found

    def differing(self) -> list[tuple[Any, ...]]:
        """The programs that end otherwise without some name: those whose goals have to be known."""
        keys = ("value", "ended", "wrong")
        return sorted(
            {
                tuple(one["unit"])
                for some in self.without.values()
                for one in some
                if any(one.get(key) != self.passed[tuple(one["unit"])].get(key) for key in keys)
            }
        )

    def row(self, name: str) -> str:
        acted = self.acted(name)
        cells = [f"`{name.removeprefix('resilient_train.')}`", worth_names.LINES.get(name, "gone"), len(acted)]
        for sign in (1, -1) if name in self.without else ():
            units = [unit for unit, by in self.changed(name) if by == sign]
            blind = sum(ruled(name) < written(unit) for unit in units)
            cells.append(f"{len(units)} ({blind})" if units else "0")
        return f"| {' | '.join(map(str, cells))} |{'  |  |' * (name not in self.without)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="FILE.jsonl")
    given = parser.parse_args()
    worth_names.install()
    worth_names.load_all()
    worth = Worth(given.runs.read_text())
    rules = [name for name in worth_names.LINES if name.split(".")[1] in ROOMS and ":" not in name]
    rules = sorted(
        {*rules, *worth.without}, key=lambda name: (name not in worth.without, -len(worth.acted(name)), name)
    )
    lines = [
        f"{len(worth.passed)} programs; {len(worth.without)} of {len(rules)} names were tried without.",
        "",
        "| rule | lines | acted in | won (blind) | lost (blind) |",
        "|---|---|---|---|---|",
        *map(worth.row, rules),
    ]
    head = PAGE.read_text().partition(BEGINS)[0]
    PAGE.write_text(head + BEGINS + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
