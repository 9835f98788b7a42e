"""The benchmarks start and print their tables. What they measure is not asserted here: a machine may be busy."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from group import alone

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

TINY = "--workload mlp --loops plain ours --blocks 2 --steps-per-block 2 --warm-up 2 --rounds 1"
CLINIC = "../clinic run --only where_branch --seeds 1 --json runs.jsonl --tool plain"
COMMANDS = {
    "step cost": f"step_cost.py {TINY} --json figures.json",
    "snapshot": "snapshot.py --size 4M --blocks 2 --rounds 1",
    "agreement": "agreement.py --processes 2 --tensors 4",
    "gpu": "gpu.py --tiny --blocks 2 --steps 5",
    "clinic": f"{CLINIC} ours",
    "clinic again": CLINIC,
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of them prints. What their processes have in common is imported once: they are started by one."""
    place = tmp_path_factory.mktemp("benchmarks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        code, told = alone(all_printed)
    assert code == 0
    assert (place / "figures.json").exists()
    assert isinstance(told, dict)
    return told


def all_printed() -> dict[str, str]:
    told = {}
    sys.path[:0] = [str(BENCHMARKS), str(ROOT)]
    for name, command in COMMANDS.items():
        script, *arguments = command.split()
        sys.argv = [str(BENCHMARKS / script), *arguments]
        with redirect_stdout(io.StringIO()) as out:
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as ended:
                if ended.code:
                    raise
        told[name] = out.getvalue()
    return told


def test_what_a_gpu_has_to_show_runs_on_a_cpu_too(printed: dict[str, str]) -> None:
    """Tiny, without the part that only CUDA has."""
    lines = [line.strip() for line in printed["gpu"].splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("waits ("))
    assert lines[at + 2] == "not measured                  needs CUDA"
    for figure in ("eager, fused AdamW", "take beside copy", "a step with a snapshot every 2"):
        assert any(line.startswith(figure) for line in lines)
    assert "failed" not in printed["gpu"]


def test_tables_have_a_row_for_each_loop_and_way(printed: dict[str, str]) -> None:
    """Both loops do the same work, block by block; a snapshot is taken and restored in turn with plain copies."""
    head, plain, ours = [line.split() for line in printed["step cost"].splitlines() if line.startswith("  ")][:3]
    assert (head[:3], plain[0], ours[0]) == (["loop", "step", "ms"], "plain", "ours")
    assert "target: ours beside plain" in printed["step cost"]
    for way in ("flat", "per tensor", "take", "restore"):
        assert f"  {way} " in printed["snapshot"]


def test_agreement_is_one_small_collective_an_update(printed: dict[str, str]) -> None:
    """Counted in two processes, beside DDP without a guard: an update in which nothing else is due sends one more."""
    (row,) = [line for line in printed["agreement"].splitlines() if line.startswith("  2 ")]
    assert row.split("  ")[-1].strip().startswith("86 with 1, ")  # scans, replicas, snapshots and looks are due in 14
    assert row.count("1.21, 62.08") == 2  # as the model says: else it would have ended with 1


def test_the_clinic_judges_a_case_and_keeps_its_runs(printed: dict[str, str]) -> None:
    """A loop by hand and ours get a count each; what has been run is not run again."""
    lines = printed["clinic"].splitlines()
    head, row = [line.split(" | ") for line in lines if line.startswith(("| case", "| `where"))]
    assert head[1:3] == ["plain", "ours"]
    assert row[1] == "0/1"  # what a case is: a plain loop does not get over it
    assert "3 runs in " in printed["clinic"]
    assert "\n0 runs in " in printed["clinic again"]
    assert "| `where_branch` | 0/1 |" in printed["clinic again"]
