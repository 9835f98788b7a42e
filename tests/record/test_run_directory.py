"""What others do to a directory while a run is at work there, and what a run says of what lies in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command import SAVING, command, train
from fork_server import Forked
from kills import Nursery, incidents
from paused_run import held_at, is_held

from resilient_train.command import incidents as shown
from resilient_train.durable.store import Store
from resilient_train.extensions.best_weights import Best

RUN = ["model=mlp", "data=digits", "objective=custom", "objective._target_=paused_run.cross_entropy", "tracking=none"]
RUN += ["checkpoint.disk.every=5", "checkpoint.memory.every=5", "checkpoint.verify_after=5", "run.dir=run"]

Said = pytest.CaptureFixture[str]


@contextlib.contextmanager
def at_work(nursery: Nursery, *more: str, step: int = 12) -> Iterator[tuple[Path, Forked]]:
    """A run of 30 updates that waits in one of them for as long as the block lasts."""
    shutil.rmtree(nursery.place / "run", ignore_errors=True)
    with held_at(nursery.place, step):
        started = nursery.start(*RUN, "run.steps=30", *more)
        assert started.until(lambda: is_held(nursery.place)), started.output
        yield nursery.place / "run", started


def test_a_progress_that_is_cut_short_ends_nothing_and_the_crash_after_it_is_reported(nursery: Nursery) -> None:
    """A memory map of it would end the process with SIGBUS, and the next one would know of no crash."""
    with at_work(nursery) as (run_dir, started):
        os.truncate(run_dir / "progress", 0)
        with held_at(nursery.place, 20):
            assert started.until(lambda: is_held(nursery.place)), started.output
            started.strike(signal.SIGKILL)
            assert started.wait() == -signal.SIGKILL
    assert nursery.run(*RUN, "run.steps=30").code == 0
    assert [(one["signal"], one["step"]) for one in incidents(run_dir)] == [("crash", 21)]


def test_the_best_evaluation_is_known_again_also_by_a_whole_number(tmp_path: Path) -> None:
    best = Best(tmp_path)
    best.take(5, {"loss": 3}, {"weight": torch.ones(2)})
    best.write()
    resumed = Best(tmp_path)
    assert resumed.step == 5
    assert not resumed.is_better({"loss": 4.0})
    assert resumed.is_better({"loss": 2.0})


def test_the_last_good_state_is_one_that_is_verified(here: Path, run_command: command, capsys: Said) -> None:
    """Not the last one by its name: that one may be demoted, or damaged."""
    drilled = [*SAVING, "run.steps=40", "run.dir=run", "drill=nan_grad", "drill.at=[33]", "recovery=off"]
    outcome = run_command(drilled)
    assert outcome.code == 3, outcome.stderr
    store = Store(here / "run")
    newest, good, *_ = (one.path for one in store.entries())
    good_step = store.entries()[1].step
    store.demote(good_step)
    capsys.readouterr()
    assert shown.main(["run"]) == 0
    line = capsys.readouterr().out
    assert good.name in line
    assert newest.name not in line
    again = run_command(drilled)
    assert again.code == 3
    assert good.name in again.stderr + again.stdout
    assert newest.name not in again.stderr + again.stdout


def test_what_is_wrong_with_a_directory_is_said(here: Path, run_command: command) -> None:
    train(run_command, Path("run"), 5)
    (here / "run/config.yaml").unlink()
    outcome = run_command([*SAVING, "run.steps=5", "run.dir=run"])
    assert outcome.code == 2
    assert "config.yaml is missing" in outcome.stderr
