"""Faults on one rank only: cured as in one process with the same samples to an update, on every rank alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command import command
from group import launch
from kills import incidents, summary

# What rounding makes of another order of adding up, grown over so many updates. One update more or less, or another
# remedy, leaves a hundred times as much.
ROUNDING = 1e-3


# --------------------------------------------------------------------------------------------------------- the command

OWN = ["model=mlp", "data=digits", "objective=classification", "optimizer.lr=3e-3", "accelerate.cpu=true"]
OWN += ["tracking=none", "run.steps=240", "run.dir=run"]


def struck(rank: int) -> str:
    """Nearly one of each drill, on one rank; `bad_row` strikes whoever meets the rows."""
    faults = [f"{name}:{{at:[{tick}],rank:{rank}}}" for name, tick in STRUCK.items()]
    return "drill.faults=[{bad_row:{rows:[17,230]}}," + ",".join(f"{{{one}}}" for one in faults) + "]"


STRUCK = {"nan_batch": 40, "nan_grad": 70, "inf_loss": 100, "loss_spike": 150, "bit_flip": 175, "bad_moments": 205}


def met(folder: Path) -> list[dict[str, Any]]:
    return sorted(incidents(folder / "run"), key=lambda one: one["id"])


def cures(folder: Path) -> list[Any]:
    return [
        (one["cause"], [action["remedy"] for action in one["actions"]], one["culprit"], one["rows"])
        for one in met(folder)
    ]


def digests(folder: Path) -> list[str]:
    logs = [folder / "run" / name for name in ("train.log", "train.rank1.log")]
    return [sha for log in logs for sha in re.findall(r"weights_sha256 ([0-9a-f]{64})", log.read_text())]


def test_two_processes_are_cured_as_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: command
) -> None:
    """Same causes, remedies, rows and loss; the guilty rank is named, and both end with the same weights."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    monkeypatch.chdir(one)
    done = run_command([*OWN, "data.batch_size=64", struck(0)])
    assert done.code == 0, done.stderr
    both = launch(two, 2, "-m", "resilient_train", *OWN, "data.batch_size=32", struck(1))
    assert both.is_well, both.stderr[-3000:]
    assert cures(two) == cures(one)
    losses = [summary(folder / "run")["final_loss"] for folder in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=ROUNDING)
    causes = [cause for cause, *_ in cures(one)]
    expected = ["data", "data", "transient", "transient", "transient", "corruption", "optimizer"]
    assert causes == expected
    named = {found["signal"]: found["ranks"] for found in met(two)[2:]}
    assert named.pop("loss_spike") == []  # both see the mean
    assert set(map(tuple, named.values())) == {(1,)}
    first, second = digests(two)
    assert first == second
