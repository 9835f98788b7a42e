"""The harness of hostile inputs: a handful goes through it, and what it looks for it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm import ENVIRONMENT, HERE

sys.path.append(str(HERE.parent / "benchmarks"))

from attacks_place import SECRETS, Failed, Place, judged

ATTACKS = str(HERE.parent / "benchmarks" / "attacks.py")
HANDFUL = ["files: summary.json as a directory", "checkpoints: custom_checkpoint_0.pkl"]
HANDFUL += ["secrets: HF_TOKEN"]


def test_a_handful_holds(tmp_path: Path) -> None:
    """One command tries them, prints a table and the count, and keeps what became of each; there are a hundred."""
    command = [sys.executable, ATTACKS, "--json", "tried.json", "--only", *HANDFUL]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert rows[0] == ["group", "tried", "held", "failed"]
    assert [row[1:] for row in rows[1:]] == [["1", "1", "0"]] * 3
    assert done.stdout.splitlines()[-1] == "3 inputs, 0 failed"
    tried = json.loads((tmp_path / "tried.json").read_text())
    assert tried == dict.fromkeys(HANDFUL, "")
    command = [sys.executable, ATTACKS, "--list"]
    listed = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len({*listed}) == len(listed) >= 100


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("canary", "", "executed what it was given"),
        ("run/deep/train.log", f"token={SECRETS[0]}", "a secret is in run/deep/train.log"),
        ("out-1.txt", SECRETS[1], "a secret is in out-1.txt"),
    ],
)
def test_what_got_in_or_out_is_found(tmp_path: Path, name: str, text: str, why: str) -> None:
    """In whatever file of the place, and in what its processes printed; nothing is found where nothing is."""
    place = Place(tmp_path / "place", tmp_path)
    place.audit()
    (place.path / name).parent.mkdir(parents=True, exist_ok=True)
    (place.path / name).write_text(text)
    with pytest.raises(Failed, match=why):
        place.audit()


def test_what_hangs_dies_or_shows_a_traceback_is_a_failure(tmp_path: Path) -> None:
    """Of the input, not of the harness."""
    place = Place(tmp_path / "place", tmp_path)
    with pytest.raises(Failed, match="hangs: it has not ended after 1 s"):
        place.start(time.sleep, 600).end("it", 1.0)
    with pytest.raises(Failed, match="died of signal 6"):
        place.start(os.abort).end("it", 60.0)
    (said := place.path / "said").write_text("Traceback (most recent call last):\n  ...\nKeyError: 5\n")
    with pytest.raises(Failed, match="shows a traceback: KeyError: 5"):
        judged("it", 1, said, said, 0.0)
