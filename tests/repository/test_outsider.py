"""A wheel of somebody else's with a check, a remedy and a sink, which docs/extend.md prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDER = ROOT / "tests" / "outsider"

# A NaN loss at update 30, in the hands of a policy of the user's own that freezes a layer.
POLICY = """
ladders:
  default: [[rewind, {{freeze_layer: {{layer: "{layer}", steps: 20}}}}], [skip]]
"""
GUARD = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resilient_train import Guard

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
rows = torch.randn(256, 4)
calls = []

def objective(model, batch):
    calls.append(1)
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    return loss * float("nan") if len(calls) == 30 else loss

guard = Guard(
    None, model, torch.optim.AdamW(model.parameters(), lr=1e-2), data=TensorDataset(rows, 100 * rows[:, :1]), steps=120,
    batch_size=16, objective=objective, recovery="policy.yaml", run_dir="run", clip=1.0,
    checks={"clipped_share": {"window": 20, "share": 0.5}},
)
frozen = []
for batch in guard.batches():
    guard.step(batch)
    frozen.append(not model[0].weight.requires_grad)
guard.close()
print(sum(frozen), [action.remedy for one in guard.incidents for action in one.decision.actions])
"""
TRAINER = """
import torch
from transformers import Trainer, TrainingArguments
import resilient_train

class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.add_module("0", torch.nn.Linear(4, 4))
        self.add_module("1", torch.nn.Linear(4, 1))

    def forward(self, x, labels):
        self.calls += self.training
        loss = ((self.get_submodule("1")(self.get_submodule("0")(x))[:, 0] - labels) ** 2).mean()
        return {"loss": loss * float("nan") if self.calls == 30 else loss}

torch.manual_seed(0)
rows = torch.randn(256, 4)
data = [{"x": row, "labels": row.sum()} for row in rows]
asked = TrainingArguments("out", max_steps=60, per_device_train_batch_size=16, report_to="none", use_cpu=True,
                          disable_tqdm=True, save_strategy="no")
trainer = Trainer(Regression(), asked, train_dataset=data)
trainer = resilient_train.hf.guard(trainer, recovery="policy.yaml", checks={"clipped_share": {"window": 20}})
trainer.train()
"""


def test_the_page_prints_its_code() -> None:
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    for file in (OUTSIDER / "outsider").glob("[a-z]*.py"):
        assert f"```python\n{file.read_text(encoding='utf-8').rstrip()}\n```" in page, file.name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, installed_wheel: Path) -> Path:
    """A folder to work in, with both wheels installed next to it."""
    folder = tmp_path_factory.mktemp("outsider")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(OUTSIDER), "--outdir", str(folder)]
    subprocess.run(build, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), "--target"]
    subprocess.run([*install, str(folder / "installed")], check=True)
    (folder / "policy.yaml").write_text(POLICY.format(layer="0"))
    return folder


def run(place: Path, installed: Path, *command: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what a command printed, and the events that the sink got."""
    events = place / "events.jsonl"
    events.unlink(missing_ok=True)
    paths = os.pathsep.join([str(place / "installed"), str(installed)])
    environment = {**os.environ, "PYTHONPATH": paths, "OUTSIDER_EVENTS": str(events)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr, [json.loads(line) for line in events.read_text().splitlines()]


def kinds(events: list[dict[str, Any]]) -> set[str]:
    return {event["kind"] for event in events}


def test_it_works_in_a_loop(place: Path, installed_wheel: Path) -> None:
    """The remedy freezes for as long as it says, the check warns once, the sink gets numbers, incident and end."""
    said, events = run(place, installed_wheel, sys.executable, "-c", GUARD)
    assert "21 ['rewind', 'freeze_layer']" in said  # the verdict on an update comes after the next one
    assert said.count("of the last updates were clipped") == 1
    assert kinds(events) >= {"metrics", "incident_opened", "incident_treated", "incident_closed", "end"}
    (closed,) = (event["incident"] for event in events if event["kind"] == "incident_closed")
    assert closed["outcome"] == "recovered"


def test_it_works_with_the_command(place: Path, installed_wheel: Path) -> None:
    """Its settings are checked as ours are, and its remedy is one that a policy can name."""
    words = ["model=mlp", "data=synthetic", "objective=classification", "accelerate.cpu=true", "tracking=none"]
    words += ["run.steps=80", "drill=nan_grad", "run.name=mine", "recovery=mine", "--config-dir=conf"]
    (place / "conf" / "recovery").mkdir(parents=True)
    (place / "conf" / "recovery" / "mine.yaml").write_text(POLICY.format(layer="layers.0"))
    start = (sys.executable, "-m", "resilient_train", *words)
    said, events = run(place, installed_wheel, *start, "+checks.clipped_share.share=0.01")
    assert "freeze_layer" in said
    assert kinds(events) >= {"metrics", "incident_closed", "end"}
    paths = os.pathsep.join([str(place / "installed"), str(installed_wheel)])
    environment = {**os.environ, "PYTHONPATH": paths}
    wrong = [*start, "+checks.clipped_share.share=2", "run.name=wrong"]
    refused = subprocess.run(wrong, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "checks.clipped_share.share=2: must be a finite number (greater than 0, at most 1)" in refused.stderr


def test_it_works_in_a_trainer(place: Path, installed_wheel: Path) -> None:
    said, events = run(place, installed_wheel, sys.executable, "-W", "ignore", "-c", TRAINER)
    assert said.count("of the last updates were clipped") == 1
    (closed,) = (event["incident"] for event in events if event["kind"] == "incident_closed")
    assert [action["remedy"] for action in closed["actions"]] == ["rewind", "freeze_layer"]
    assert kinds(events) >= {"metrics", "end"}
