"""The harness of hostile inputs: one goes through it, and what it looks for it finds."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from fork_server import HERE
from group import launch

sys.path.append(str(HERE.parent / "benchmarks"))

from attacks_inputs import INPUTS
from attacks_place import SECRETS, Failed, Place, judged

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
