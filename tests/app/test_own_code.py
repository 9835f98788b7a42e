"""A stranger's package, trained from the wheel by command line alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = {
    "__init__.py": "",
    "network.py": """
        import torch

        class Two(torch.nn.Module):
            def __init__(self, hidden, activation="relu"):
                super().__init__()
                self.one = torch.nn.Linear(2, hidden)
                self.two = torch.nn.Linear(hidden, 2)
                self.activation = getattr(torch, activation)

            def forward(self, points):
                return self.two(self.activation(self.one(points)))
        """,
    "points.py": """
        import random, torch

        class Rings(torch.utils.data.Dataset):
            def __init__(self, count, jitter=0.05):
                self.count, self.jitter = count, jitter

            def __len__(self):
                return self.count

            def __getitem__(self, index):
                ring = index % 2
                angle, radius = random.uniform(0, 6.2832), 0.4 + 0.6 * ring + random.gauss(0, self.jitter)
                x = torch.tensor([radius, 0.0]) @ torch.tensor(
                    [[torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))], [0.0, 0.0]]
                )
                return {"where": x, "ring": ring}
        """,
    "judge.py": """
        import torch

        def loss(net, batch):
            scores = net(batch["where"])
            right = (scores.argmax(1) == batch["ring"]).float().mean()
            return torch.nn.functional.cross_entropy(scores, batch["ring"]), {"right": right}
        """,
}

COMMAND = ["model=custom", "model._target_=rings.network.Two", "+model.hidden=32", "+model.activation=tanh"]
COMMAND += ["data=custom", "data.train._target_=rings.points.Rings", "+data.train.count=500"]
COMMAND += ["data.eval._target_=rings.points.Rings", "+data.eval.count=200"]
COMMAND += ["objective=custom", "objective._target_=rings.judge.loss"]
COMMAND += ["run.steps=200", "optimizer.lr=0.02", "accelerate.cpu=true", "tracking=none"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with the stranger's package in it, far from our checkout."""
    package = tmp_path / "a place of their own" / "rings"
    package.mkdir(parents=True)
    for name, text in PACKAGE.items():
        lines = [line.removeprefix(" " * 8) for line in text.strip("\n").splitlines()]
        (package / name).write_text("\n".join(lines) + "\n")
    return package.parent


def test_a_package_that_knows_nothing_of_us_trains_from_the_wheel(elsewhere: Path, installed_wheel: Path) -> None:
    """From the wheel and from the user's folder, by the installed command; `examine` finds their modules, too."""
    environment = {**os.environ, "PYTHONPATH": str(installed_wheel), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, str(installed_wheel / "bin/resilient-train")]

    def run(*words: str) -> str:
        done = subprocess.run(
            [*start, *words], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(*COMMAND)
    (folder,) = (elsewhere / "runs").glob("Two-Rings-*")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["eval"]["right"] > 0.95
    assert "two" in run("examine", str(folder), *COMMAND)
