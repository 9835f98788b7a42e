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
