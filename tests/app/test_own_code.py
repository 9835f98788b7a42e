"""A stranger's package, trained from the wheel by command line alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

PACKAGE = {
    "network.py": """
        import torch

        class Two(torch.nn.Module):
            def __init__(self, hidden, activation="relu"):
                super().__init__()
                self.one, self.two = torch.nn.Linear(2, hidden), torch.nn.Linear(hidden, 2)
                self.activation = getattr(torch, activation)

            def forward(self, points):
                return self.two(self.activation(self.one(points)))
        """,
    "points.py": """
        import random, torch

        class Rings(torch.utils.data.Dataset):
            def __init__(self, count):
                self.count = count

            def __len__(self):
                return self.count

            def __getitem__(self, index):
                ring = index % 2
                way = torch.nn.functional.normalize(torch.randn(2), dim=0)
                return {"where": way * (0.4 + 0.6 * ring + random.gauss(0, 0.05)), "ring": ring}
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


def test_a_package_that_knows_nothing_of_us_trains_from_the_wheel(tmp_path: Path, installed_wheel: Path) -> None:
    """From the wheel and from the user's folder, by the installed command; `examine` finds their modules, too."""
    elsewhere = tmp_path / "a place of their own"
    (elsewhere / "rings").mkdir(parents=True)
    for name, text in PACKAGE.items():
        (elsewhere / "rings" / name).write_text(dedent(text))
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
