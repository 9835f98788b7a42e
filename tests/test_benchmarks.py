"""The benchmarks start and print their tables. What they measure is not asserted here: a machine may be busy."""

from __future__ import annotations

from pathlib import Path

from group import launch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def output(place: Path, script: str, *arguments: str) -> str:
    """Start a script there, and return what it prints."""
    done = launch(place, 1, str(BENCHMARKS / script), *arguments)
    assert done.is_well, done.stderr
    return done.stdout


def test_step_cost_prints_ratio_and_counts(tmp_path: Path) -> None:
    """Both loops do the same work, block by block, and are counted."""
    tiny = "--workload mlp --loops plain ours --blocks 2 --steps-per-block 2 --warm-up 2 --rounds 1 --processes 1"
    printed = output(tmp_path, "step_cost.py", *tiny.split(), "--json", str(tmp_path / "figures.json"))
    head, plain, ours = [line.split() for line in printed.splitlines() if line.startswith("  ")][:3]
    assert head[:3] == ["loop", "step", "ms"]
    assert [plain[0], ours[0]] == ["plain", "ours"]
    assert "target: ours beside plain" in printed
    assert (tmp_path / "figures.json").exists()


def test_snapshot_prints_every_way(tmp_path: Path) -> None:
    """A snapshot is taken and restored in turn with plain copies."""
    printed = output(tmp_path, "snapshot.py", "--size", "4M", "--blocks", "2", "--rounds", "1")
    for way in ("flat", "per tensor", "take", "restore"):
        assert f"  {way} " in printed


def test_agreement_is_one_small_collective_an_update(tmp_path: Path) -> None:
    """Counted in two processes, beside DDP without a guard: an update in which nothing else is due sends one more."""
    printed = output(tmp_path, "agreement.py", "--counts", "--processes", "2", "--tensors", "4")
    (row,) = [line for line in printed.splitlines() if line.startswith("  2 ")]
    assert row.split("  ")[-1].strip().startswith("88 with 1, ")  # scans, replicas and snapshots are due in twelve
    assert row.count("1.19, 60.32") == 2  # as the model says: else it would have ended with 1


def test_rivals_tell_their_options(tmp_path: Path) -> None:
    """The others need a network to be installed, so this is all that is tried of them."""
    assert "--venv DIR" in output(tmp_path, "rivals.py", "--help")


def test_the_clinic_judges_a_case_and_keeps_its_runs(tmp_path: Path) -> None:
    """A loop by hand and ours get a count each; what has been run is not run again."""
    asked = ["--only", "where_branch", "--seeds", "1", "--json", str(tmp_path / "runs.jsonl"), "--arms", "plain"]
    printed = output(tmp_path, "clinic", *asked, "balanced")
    head, row = [line.split(" | ") for line in printed.splitlines() if line.startswith(("| case", "| `where"))]
    assert head[1:3] == ["plain", "balanced"]
    assert row[1] == "0/1"  # what a case is: a plain loop does not get over it
    assert "3 runs in " in printed
    assert "\n0 runs in " in (again := output(tmp_path, "clinic", *asked))
    assert "| `where_branch` | 0/1 |" in again
