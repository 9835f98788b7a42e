"""The commands that a person is told to type next."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def command(door: str, directory: Path) -> str:
    """Return the command line of one of our doors to a run directory, as it works from here."""
    return f"{python()} -m resilient_train {door} {shlex.quote(near(directory))}"


def near(path: Path) -> str:
    """Name a place as short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def python() -> str:
    """What runs Python here: the environment may not be activated."""
    beside = os.environ.get("PATH", "").split(os.pathsep)
    return "python" if str(Path(sys.executable).parent) in beside else shlex.quote(sys.executable)


def to_see_it(command: str, url: str | None) -> list[str]:
    """Say how to see a run in MLflow: the command that shows its database, where it is one, and the address."""
    lines = [f"to see it, start\n  {command}"] if command else []
    if url:
        lines.append(f"{'and' if lines else 'to see it,'} open\n  {url}")
    return lines
