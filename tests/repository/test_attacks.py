"""The harness of hostile inputs: one goes through it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fork_server import HERE
from group import launch

sys.path.append(str(HERE.parent / "benchmarks"))

from attacks_inputs import INPUTS

ATTACKS = str(HERE.parent / "benchmarks" / "attacks.py")


def test_one_of_a_hundred_holds(tmp_path: Path) -> None:
    """The command tries it, prints a table and the count, and keeps what became of it."""
    assert sum(map(len, INPUTS.values())) >= 100
    name = "secrets: HF_TOKEN"
    done = launch(tmp_path / "place", 1, ATTACKS, "--json", "tried.json", "--only", name)
    assert done.is_well, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert rows == [["group", "tried", "held", "failed"], ["secrets", "1", "1", "0"]]
    assert done.stdout.splitlines()[-1] == "1 inputs, 0 failed"
    assert json.loads((tmp_path / "place/tried.json").read_text()) == {name: ""}
