"""The pictures of the README: what a person sees of the demo, in MLflow's pages and on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from browser import chromium, console
from flaky_mlflow import mlflow_server
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS = 110
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def main() -> None:
    if chromium() is None:
        sys.exit("chromium is not installed")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="screenshots-") as scratch:
        place = Path(scratch)
        if sys.argv[1:]:
            run_dir = Path(sys.argv[1]).absolute()
        else:
            command = [sys.executable, "-m", "resilient_train", "experiment=demo", "tracking.drain_s=600"]
            environment = {name: value for name, value in ENVIRONMENT.items() if name != "MLFLOW_TRACKING_URI"}
            subprocess.run(command, cwd=place, env=environment, check=True)
            run_dir = place / "runs" / "demo"
        in_mlflow(run_dir, place)
        on_a_terminal(run_dir)
    print(f"to be looked at: {', '.join(str(one.relative_to(ROOT)) for one in sorted(IMAGES.iterdir()))}")


def in_mlflow(run_dir: Path, place: Path) -> None:
    known = json.loads((run_dir / "summary.json").read_text())["mlflow"]
    experiment = re.search(r"experiments/(\d+)/", known["url"])
    assert experiment is not None
    with (
        mlflow_server(place, known["tracking_uri"]) as address,
        console(address, experiment[1], known["run_id"]) as person,
    ):
        person.first_screen(IMAGES / "first-screen.png")
        person.overview()
        person.alone()
        person.picture(IMAGES / "overview.png")


def on_a_terminal(run_dir: Path) -> None:
    """What `python -m resilient_train incidents` prints, in its colours."""
    wide = {**ENVIRONMENT, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "resilient_train", "incidents", str(run_dir)]
    said = subprocess.run(command, env=wide, check=True, capture_output=True, text=True).stdout
    terminal = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    terminal.print(Text.from_ansi(said.replace(str(run_dir), "runs/demo")))
    terminal.save_svg(str(IMAGES / "incidents.svg"), title="python -m resilient_train incidents runs/demo")


if __name__ == "__main__":
    main()
