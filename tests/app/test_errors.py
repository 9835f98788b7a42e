"""What goes wrong before or at the first update: one line, an exit code, and nothing in the way of the next start."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import MINE, Outcome, command

from resilient_train.durable.lock import DirectoryLock

LR = "torch.optim.lr_scheduler"
OWN = [*MINE, "run.steps=3"]

# What is typed, and what the line has to say; the exit code is 2.
REFUSED = [
    ("run.stesp=5", "error: run.stesp=5: no such key; there are name, "),
    ("model=gpt model.widht=3", "model.widht=3: no such key; there are _target_, "),
    ("+model.widht=3", "model.widht=3: ", "; it takes width"),
    ("model=gtp", "model=gtp: no such option; there are custom, gpt, "),
    ("run.steps=2.5", "run.steps=2.5: must be a whole number (at least 1)"),
    ("data.collate=5 accelerate.ddp=5", "accelerate.ddp=5: must be a mapping"),
    ("optimzer.lr=1", "error: optimzer: no such key; there are run, "),
    ("run=3", "error: run=3: must be a mapping"),
    ("modl=gpt", "modl=gpt: no such key; there are run, ", ", experiment"),
    ("optimizer.lr=-1", "error: optimizer._target_=torch.optim.AdamW: failed with ", "Invalid learning rate: -1"),
    ("optimizer.betas=[0.9,nan]", "optimizer.betas=[0.9, nan]: must be a list, each a finite number"),
    ("clip.max_norm=-1", "clip.max_norm=-1: must be a finite number (greater than 0)"),
    ("run.resume=perhaps", "run.resume=perhaps", "auto", "never"),
    ("tracking=mlflow tracking.uri=htp://x", "tracking.uri=htp://x", "http://"),
    ("accelerate.mixed_precision=fp16", "accelerate.mixed_precision=fp16", "GPU"),
    ("+accelerate.ddp.speed=9", "accelerate.ddp", "speed"),
    ("run.init_from=other.safetensors", "run.init_from=other.safetensors", "body.0.bias"),
    ("run.dir=a_file/run", "run.dir", "a_file", "cannot be written"),
    ("run.dir=occupied", "run.dir", "thesis.txt"),
    ("model._target_=nowhere.Net", "model._target_=nowhere.Net", "No module named 'nowhere'"),
    ("model._target_=user_programs.Plian", "model._target_=user_programs.Plian", "has no attribute 'Plian'"),
    ("model._target_=broken.Net", "model._target_=broken.Net", "SyntaxError", "broken.py, line 1"),
    ("model._target_=needy.Net", "No module named 'not_installed_anywhere'"),
    ("model._target_=user_programs.nothing", "model._target_", "returned a list; expected a torch.nn.Module"),
    ("model._target_=user_programs.frozen", "optimizer._target_", "empty parameter list"),
    ("data.train._target_=user_programs.number", "data.train._target_", "int", "__len__"),
    ("data.train._target_=user_programs.Forgetful", "data.train._target_", "state_dict", "load_state_dict"),
    ("data.train._target_=user_programs.Counting data.num_workers=2", "Counting: an iterable", "use num_workers=0"),
    ("objective._target_=user_programs.one_argument", "objective._target_", "(model, batch)"),
    ("data.collate=json.__name__", "data.collate=json.__name__", "is no callable"),
    ("objective._target_=user_programs.no_scalar", "objective._target_", "[32, 1]", "scalar"),
    ("objective._target_=user_programs.no_graph", "objective._target_", "graph"),
    ("objective._target_=user_programs.with_a_vector", "the metric each", "one element"),
    ("objective._target_=user_programs.with_a_loss", "objective._target_", "no name being loss"),
    ("objective._target_=user_programs.Weighed", "objective._target_", "weights of its own"),
    ("objective._target_=resilient_train.zoo.objectives.language_model", "language_model needs integer token ids"),
    ("optimizer=custom optimizer._target_=builtins.list", "optimizer._target_", "Optimizer"),
    ("optimizer=custom optimizer._target_=user_programs.without_a_rate", "schedule._target_", "lr"),
    (f"schedule=custom schedule._target_={LR}.ReduceLROnPlateau", "schedule._target_", "metric"),
    (f"schedule=custom schedule._target_={LR}.StepLR", "schedule", "step_size"),
    ("\"recovery.ladders.default=[[{os.system:{command:'touch called'}}]]\"", "os.system: no such remedy"),
]
# The same with exit code 1.
FAILS = [
    ("run.dir=crooked", "IsADirectoryError", "train.log"),
    ("data.train._target_=user_programs.Rotten", "ValueError: row ", "is rotten", "user_programs.py"),
    ("data.train._target_=user_programs.Rotten data.num_workers=1", "ValueError: row ", "is rotten"),
    ("objective._target_=user_programs.leaves", "SystemExit", "user_programs.py"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "broken.py").write_text("def Net(:\n")
    (tmp_path / "needy.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "a_file").touch()
    (tmp_path / "crooked" / "train.log").mkdir(parents=True)
    (tmp_path / "crooked" / "config.yaml").touch()
    (tmp_path / "crooked" / "summary.json").write_text('{"exit_code": 1, "steps": 0, "ticks": 0}')
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.txt").touch()
    save_file({"something.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("broken", "needy"):
        sys.modules.pop(name, None)


def only_line(outcome: Outcome) -> str:
    lines = outcome.stderr.strip().splitlines()
    assert len(lines) == 1, outcome.stderr
    assert "Traceback" not in outcome.stdout
    return lines[0]


@pytest.mark.parametrize("case", [*REFUSED, *FAILS], ids=lambda case: case[0])
def test_each_mistake_is_told_in_one_line(case: tuple[str, ...], place: Path, run_command: command) -> None:
    typed, *said = case
    outcome = run_command([*OWN, *shlex.split(typed)])
    line = only_line(outcome)
    assert outcome.code == (2 if case in REFUSED else 1), line
    assert line.startswith("error: ")
    for words in said:
        assert words in line
    assert not (place / "called").exists(), "what a policy names was called to see what it is"


def test_a_file_that_is_no_configuration_is_named(place: Path, run_command: command) -> None:
    Path("own/checks").mkdir(parents=True)
    Path("own/checks/odd.yaml").write_text("a: !!python/name:os.system")
    outcome = run_command(["--config-dir=own", *OWN, "checks=odd"])
    assert outcome.code == 2, outcome.stderr
    assert re.search(r"error: configuration: a file .* constructor for .*own/checks/odd\.yaml", only_line(outcome))


def test_what_failed_before_its_first_update_is_no_obstacle(place: Path, run_command: command) -> None:
    """The traceback is in the log, the summary says that it failed, and the mended command trains in that directory."""
    broken = run_command([*OWN, "run.name=same", "objective._target_=user_programs.raises"])
    assert broken.code == 1
    assert "RuntimeError: the loss function of the user broke" in only_line(broken)
    assert "Traceback" in Path("runs/same/train.log").read_text()
    summary = broken.summary("runs/same")
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 1, 0)
    mended = run_command([*OWN, "run.name=same"])
    assert mended.code == 0, mended.stderr
    assert mended.summary("runs/same")["steps"] == 3


def test_a_directory_in_use_by_a_live_process_is_left_alone(place: Path, run_command: command) -> None:
    """The second run names the first one's process and ends with 1: the same command works later."""
    Path("runs/same").mkdir(parents=True)
    hold = "import os, sys, time; from pathlib import Path; from resilient_train.durable.lock import DirectoryLock\n"
    hold += "lock = DirectoryLock(Path('runs/same')); child = os.fork()\n"  # as a data worker, who outlives a kill
    hold += "child and print(f'held {child}', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held, child = holder.stdout.readline().split()
        assert held == "held"
        outcome = run_command([*OWN, "run.name=same"])
        assert outcome.code == 1
        assert f"process {holder.pid}" in only_line(outcome)
        beside = run_command([*OWN, "run.name=same", "run.resume=never"])
        assert beside.summary("runs/same-2")["steps"] == 3
        holder.kill()
        holder.wait()
        DirectoryLock(Path("runs/same")).release()  # the kernel let go with the process, whatever its child does
        os.kill(int(child), signal.SIGKILL)
