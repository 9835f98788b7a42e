"""Benchmarks whose breaking nothing else would show: one is for a machine that we rarely have, one for a promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from group import launch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from attacks_inputs import INPUTS  # noqa: E402


def test_one_of_a_hundred_hostile_inputs_holds(tmp_path: Path) -> None:
    """The command tries it, prints the count, and keeps what became of it."""
    assert sum(map(len, INPUTS.values())) >= 100
    name = "secrets: password="
    words = ["--json", "tried.json", "--only", name]
    done = launch(tmp_path / "place", 1, str(BENCHMARKS / "attacks.py"), *words)
    assert done.is_well, done.stderr
    assert done.stdout.splitlines()[-1] == "1 inputs, 0 failed"
    assert json.loads((tmp_path / "place/tried.json").read_text()) == {name: ""}


def test_what_a_gpu_has_to_show_runs_on_a_cpu_too(tmp_path: Path) -> None:
    """Tiny, without the part that only CUDA has."""
    words = ["--tiny", "--blocks=1", "--steps=4", "--parts", "waits", "snapshot"]
    done = launch(tmp_path / "gpu", 1, str(BENCHMARKS / "gpu.py"), *words)
    assert done.is_well, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("waits ("))
    assert lines[at + 2] == "not measured                  needs CUDA"
    for figure in ("take beside copy", "a step with a snapshot every 2"):
        assert any(line.startswith(figure) for line in lines)


def test_agreement_is_one_small_collective_an_update(tmp_path: Path) -> None:
    """Counted in two processes, beside DDP without a guard: an update in which nothing else is due sends one more."""
    words = ["--processes=2", "--tensors=4"]
    done = launch(tmp_path / "agreement", 1, str(BENCHMARKS / "agreement.py"), *words)
    assert done.is_well, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("  2 ")]
    assert row.split("  ")[-1].strip().startswith("86 with 1, ")  # scans, replicas, snapshots and looks are due in 14
    assert row.count("1.16, 34.48") == 2  # as the model says: else it would have ended with 1
