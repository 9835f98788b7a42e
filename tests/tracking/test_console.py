"""What a person sees in the morning: MLflow's own pages, in a real browser.

Pictures of all of them are left in build/screenshots, to be looked at.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import Console, chromium, console
from kills import incidents, summary

pytestmark = [pytest.mark.skipif(chromium() is None, reason="chromium is not installed"), pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screenshots"
RUN = ["drill=gauntlet", "drill.faults=[{nan_grad: {at: [20]}}, {bit_flip: {at: [31]}}]"]
RUN += ["model=custom", "model._target_=night.Net", "data=custom", "data.train._target_=night.rows"]
RUN += ["data.eval._target_=night.rows", "+data.eval.bad=[]"]
RUN += ["objective=custom", "objective._target_=night.loss"]
RUN += ["run.steps=80", "run.log_every=5", "run.eval_every=40"]
BAD = (44, 78, 106)
NIGHT = f"""
import torch

Net = lambda: torch.nn.Linear(8, 1)

def rows(bad={BAD}):
    x = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    x[list(bad), 2] = float("nan")
    return torch.utils.data.TensorDataset(x, y)

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@dataclass(frozen=True)
class Shown:
    run_dir: Path
    address: str
    experiment_id: str
    run_id: str

    @property
    def incidents(self) -> list[dict[str, object]]:
        return incidents(self.run_dir)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, server: str) -> Shown:
    place = tmp_path_factory.mktemp("console")
    (place / "runs").mkdir()
    (place / "night.py").write_text(NIGHT)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{place}", "OMP_NUM_THREADS": "1"}
    words = ["-m", "resilient_train", *RUN, "run.name=troubled", "tracking.drain_s=600", f"tracking.uri={server}"]
    done = subprocess.run([sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    known = summary(place / "runs/troubled")["mlflow"]
    experiment = re.search(r"experiments/(\d+)/", known["url"])
    assert experiment is not None
    return Shown(place / "runs/troubled", server, experiment[1], known["run_id"])


@pytest.fixture(scope="module")
def person(shown: Shown) -> Iterator[Console]:
    with console(shown.address, shown.experiment_id, shown.run_id) as one:
        yield one


@pytest.fixture(autouse=True)
def no_complaints(person: Console) -> Iterator[None]:
    person.errors.clear()
    yield
    assert person.errors == []


def test_the_first_screen_has_the_verdict_and_what_to_do(person: Console, shown: Shown) -> None:
    """On a laptop, with MLflow's assistant open as it is at first, and nothing pressed or scrolled."""
    words = person.first_screen(SHOTS / "first-screen.png")
    assert "Recovered. Do: Rows 44, 78 and 106: element 0 at [2] is NaN; fix or remove them." in words


def test_the_overview_tells_the_story(person: Console, shown: Shown) -> None:
    lines = person.overview()
    person.alone()
    person.picture(SHOTS / "overview.png")
    assert lines.count() == len(shown.incidents)
    assert person.page.get_by_text("newest checkpoint").count() == 1
