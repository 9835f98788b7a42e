"""What references.py takes down of a run is the same each time, and what changes is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import references


def test_a_run_has_the_same_facts_twice_and_a_changed_one_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is made again, and against a file in which an incident has another cause."""
    for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED", "HF_HUB_OFFLINE"):  # which it sets
        monkeypatch.setenv(name, "1")
    kept, only = tmp_path / "kept.json", ["--only", "drawn"]
    assert references.main([*only, "--twice", "--out", str(kept)]) == 0
    assert "0 of 1 runs differ" in capsys.readouterr().out
    facts = json.loads(kept.read_text())
    assert facts["drawn"]["incident 1"]["signal"] == "nonfinite_batch"
    facts["drawn"]["incident 1"]["cause"] = "corruption"
    kept.write_text(json.dumps(facts))
    assert references.main([*only, "--against", str(kept)]) == 1
    differs = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERS")]
    assert differs == ['DIFFERS drawn: incident 1, cause: "corruption" -> "data"']
