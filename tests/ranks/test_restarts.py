"""Processes that are killed or stopped under an elastic agent: the run goes on by itself, and nothing stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from group import launch
from kills import in_journal, incidents, left_overs, stand, summary
from launched import Launched
from paused_run import held_at

from resilient_train.zoo.data import digits
from resilient_train.zoo.models import MLP

OWN = ["model=mlp", "data=digits", "objective=classification", "tracking=none", "run.log_every=1000"]
OWN += ["accelerate.cpu=true", "checkpoint.disk.every=20", "checkpoint.memory.every=10", "checkpoint.verify_after=12"]
UPDATING = 1  # in the file `progress`
PATIENCE_S = 100.0  # with what takes a second


def at_step(launched: Launched, run_dir: Path, step: int) -> None:
    assert launched.until(lambda: stand(run_dir).step >= step and stand(run_dir).doing == UPDATING)


def restarted(launched: Launched, ranks: dict[int, int]) -> None:
    """Wait until there are other processes in the place of all of these."""

    def are_others() -> bool:
        now = launched.ranks()
        return len(now) == len(ranks) and not set(now.values()) & set(ranks.values())

    assert launched.until(are_others)


# ---------------------------------------------------------------------------------------------------------------- kills


def test_killed_ranks_are_started_again_and_the_run_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Rank 0, and a rank that has just been started: an incident for the end of a training, the same weights."""
    run_dir, own = tmp_path / "killed", [*OWN, "run.steps=60"]
    unharmed = launch(tmp_path, 2, "-m", "resilient_train", *own, "run.dir=unharmed")
    assert unharmed.is_well, unharmed
    with held_at(tmp_path, 50) as let_go, Launched(tmp_path, 2, *own, "run.dir=killed", restarts=2) as launched:
        at_step(launched, run_dir, 30)
        for rank in (0, 1):
            ranks = launched.ranks()
            os.kill(ranks[rank], signal.SIGKILL)
            restarted(launched, ranks)
        let_go()
        assert launched.wait() == 0, launched.output
    done, plain = summary(run_dir), summary(tmp_path / "unharmed")
    assert done["weights_sha256"] == plain["weights_sha256"]
    assert done["state_sha256"] == plain["state_sha256"]
    assert [one["signal"] for one in incidents(run_dir)] == ["crash"]
    assert left_overs(run_dir) == []


# ----------------------------------------------------------------------------------------------------------- no orphans


class Greedy:
    """Digits, of which one is never read, by code that keeps Python's lock, in the process or in a worker of its."""

    def __init__(self) -> None:
        self.rows: Any = digits("train")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == 700:
            Path("greedy").touch()
            ctypes.PyDLL(None).sleep(3600)
        return self.rows[index]


def gone(is_there: Callable[[], Any]) -> bool:
    """Wait until what would stay for an hour is not there any more."""
    deadline = time.monotonic() + PATIENCE_S
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_there()


def test_an_agent_that_is_killed_leaves_nobody_behind(tmp_path: Path) -> None:
    """A worker of one rank keeps Python's lock; the other waits in a collective."""
    arguments = [*OWN, "data=custom", "data.train._target_=test_restarts.Greedy", "data.num_workers=1"]
    arguments += ["data.shuffle=false", "run.dir=run", "run.steps=90", "run.step_timeout=0"]
    with Launched(tmp_path, 2, *arguments) as launched:
        assert launched.until((tmp_path / "greedy").exists)
        assert len(launched.all()) == 5
        launched.kill()
        assert gone(launched.all)


# ------------------------------------------------------------------------------------------------------------ failing


class Fails(MLP):
    """Fails on rank 1 at its twentieth forward."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count >= 20 and os.environ["RANK"] == "1":
            raise ValueError("a mistake of mine")
        return super().forward(x)


def test_a_rank_that_fails_is_no_request_to_stop(tmp_path: Path) -> None:
    """The agent asks the others to end, in the words of somebody who wants to go on later."""
    own = ["model._target_=test_restarts.Fails", "run.dir=run", "run.steps=60"]
    with Launched(tmp_path, 2, *OWN, *own) as launched:
        assert launched.wait() != 0
        assert "a mistake of mine" in launched.output
    found = summary(tmp_path / "run")
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert not in_journal(tmp_path / "run", "incident_treated")
