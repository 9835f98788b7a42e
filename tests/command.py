"""Our command line, called as a person would, inside the process of the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    def summary(self, directory: str | Path) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((Path(directory) / "summary.json").read_text())
        return summary


command = Callable[[Sequence[str]], Outcome]

MINE = ["model=custom", "model._target_=user_programs.Plain", "data=custom", "data.train._target_=user_programs.Fixed"]
MINE += ["objective=custom", "objective._target_=user_programs.mse", "accelerate.cpu=true", "tracking=none"]

SAVING = ["model=mlp", "data=digits", "objective=classification", "schedule=constant", "tracking=none"]
SAVING += ["checkpoint.disk.every=5", "checkpoint.memory.every=5", "checkpoint.verify_after=5"]


def train(run_command: command, directory: Path, steps: int) -> Outcome:
    """A small run, in a directory of its own, that saves often."""
    return run_command([*SAVING, f"run.steps={steps}", f"run.dir={directory}"])
