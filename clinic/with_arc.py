"""ARC (`arc-training` 5.2), the one package that promises to roll back, around the tutorial's loop.

Its README has one way to use it with rollback, `arc.Controller` with its defaults, and this is that: `step(loss)` comes
behind the backward and before `optimizer.step()`; where it says `should_skip` it has rolled back already, and the loop
goes on with the next batch. A user's clipping comes after it, because ARC judges the true norm ("a finite exploding
gradient is clipped before ARC sees it", among its known limitations). Under bfloat16 there is no scaler to hand over.
When it calls a run unrecoverable, the loop goes on nevertheless: its quick start does, and it can only gain by that.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clinic.by_hand import autocast, batches
from clinic.program import Program
from clinic.score import Run

PACKAGE = "arc-training"


def arc(program: Program, seed: int, run: Run) -> None:
    run.lost = train(program, seed)


def train(program: Program, seed: int) -> int:
    """Train as by hand, with ARC; return the number of batches that left nothing behind: skipped or rolled back."""
    torch.manual_seed(seed)
    model, source = program.model.train(), batches(program, seed)
    weights = list(model.parameters())
    optimizer = program.optimizer(weights)
    controller: Any = importlib.import_module("arc").Controller(model, optimizer)
    landed: list[int] = []
    for step in range(1, program.steps + 1):
        batch = next(source)
        optimizer.zero_grad()
        with autocast(program):
            loss = program.loss(model, batch)
        torch.autograd.backward(loss)
        action = controller.step(loss)
        if action.rolled_back:
            kept = controller.intervention_log[-1]["restored_step"]
            landed = [one for one in landed if one <= kept]
        if action.should_skip:
            continue
        torch.nn.utils.clip_grad_norm_(weights, program.clip or math.inf)
        optimizer.step()
        landed.append(step)
    controller.summary()
    return program.steps - len(landed)


def is_here() -> bool:
    """Say whether ARC can be imported."""
    try:
        importlib.import_module("arc")
    except Exception:  # whatever keeps it from being imported
        return False
    return True


def begin_again_in(
    folder: Path, packages: Sequence[str] = (PACKAGE,), command: Sequence[str] = ("-m", "clinic")
) -> None:
    """Make an environment that sees what is installed here, install packages in it, and start the command there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        here = sysconfig.get_path("purelib")
        there = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (there / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    for package in packages:  # one by one: where one cannot be had, the others may
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            print(f"{package} could not be installed: {done.stderr.strip().splitlines()[-1]}", flush=True)
    words = sys.argv[1:]
    rest = [word for place, word in enumerate(words) if "--venv" not in (word, words[place - 1] if place else "")]
    os.execv(python, [str(python), *command, *[word for word in rest if not word.startswith("--venv=")]])
