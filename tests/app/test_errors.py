"""What goes wrong before or at the first update: one line, an exit code, and nothing in the way of the next start."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command import Outcome, command

from resilient_train.app.config.compose import load
from resilient_train.ranks.lock import DirectoryLock, holder_of

OWN = ["model=custom", "model._target_=strangers.Plain", "data=custom", "data.train._target_=strangers.Fixed"]
OWN += ["objective=custom", "objective._target_=strangers.mse", "run.steps=3", "tracking=none", "accelerate.cpu=true"]

# What is typed, and what the line has to say.
REFUSED: dict[str, tuple[str, list[str]]] = {
    "misspelt key": ("run.stesp=5", ["run.stesp=5", "steps", "log_every"]),
    "misspelt key with a plus": ("+run.stesp=5", ["run.stesp=5", "steps", "log_every"]),
    "misspelt group of a key": (
        "optimzer.lr=3e-3",
        ["optimzer.lr=3e-3: no such key; did you mean optimizer? There are run, "],
    ),
    "a key of a value": ("run.steps.most=3", ["run.steps.most=3: no such key; run.steps has no keys of its own"]),
    "misspelt group": ("modle=gpt", ["modle=gpt", "model"]),
    "misspelt group with a plus": ("+modle=gpt", ["modle=gpt", "model"]),
    "misspelt key deep down": ("accelerate.gradient_acumulation_steps=2", ["gradient_accumulation_steps"]),
    "misspelt argument of a target": ("model=gpt model.widht=3", ["model.widht=3", "width"]),
    "misspelt argument with a plus": ("+model.widht=3", ["model.widht=3", "; did you mean width? It takes width"]),
    "unlike any argument": ("+model.heads=3", ["model.heads=3", "no such argument; it takes width"]),
    "unlike any option": ("model=zz", ["model=zz: no such option; there are custom, gpt, "]),
    "unknown option": ("model=gtp", ["model=gtp", "gpt", "resnet"]),
    "unknown experiment": ("experiment=dmeo", ["experiment=dmeo", "demo"]),
    "no value": ("run.steps", ["run.steps"]),
    "wrong type": ("run.steps=many", ["run.steps=many", "whole number"]),
    "a fraction for a count": ("run.steps=2.5", ["run.steps=2.5", "whole number"]),
    "null for a count": ("run.steps=null", ["run.steps", "null"]),
    "wrong type for a target": ("optimizer.lr=fast", ["optimizer.lr=fast", "number"]),
    "wrong type for a model": ("+model.width=wide", ["model.width=wide", "whole number"]),
    "negative steps": ("run.steps=-1", ["run.steps=-1", "at least 1"]),
    "batch size 0": ("data.batch_size=0", ["data.batch_size=0", "at least 1"]),
    "negative warm-up": ("schedule.warmup_steps=-1", ["schedule.warmup_steps=-1", "at least 0"]),
    "negative clip": ("clip.max_norm=-1", ["clip.max_norm=-1", "greater than 0"]),
    "negative rate": ("optimizer.lr=-1", ["optimizer", "-1"]),
    "not one of the allowed": ("run.resume=perhaps", ["run.resume=perhaps", "auto", "never"]),
    "unknown tracking": ("tracking=mlflow tracking.kind=wandb", ["tracking.kind=wandb", "mlflow", "none"]),
    "unknown precision": ("accelerate.mixed_precision=fp17", ["accelerate.mixed_precision=fp17", "bf16"]),
    "half precision on a CPU": ("accelerate.mixed_precision=fp16", ["accelerate.mixed_precision=fp16", "GPU"]),
    "unknown argument of DDP": ("+accelerate.ddp.speed=9", ["accelerate.ddp", "speed"]),
    "no target": ("model=custom model._target_=???", ["model._target_", "has to be given"]),
    "no such module": ("model._target_=nowhere.Net", ["model._target_=nowhere.Net", "nowhere"]),
    "no such class": ("model._target_=strangers.Plian", ["model._target_=strangers.Plian", "Plain"]),
    "a broken module": ("model._target_=broken.Net", ["model._target_=broken.Net", "SyntaxError", "broken.py:1"]),
    "a module that lacks another": ("model._target_=needy.Net", ["needy", "not_installed_anywhere"]),
    "not a function": ("model._target_=strangers.__name__", ["model._target_", "str"]),
    "a model that is none": ("model._target_=strangers.nothing", ["model._target_", "list", "Module"]),
    "a frozen model": ("model._target_=strangers.frozen", ["model._target_", "trainable"]),
    "a data set that is none": ("data.train._target_=strangers.number", ["data.train._target_", "int", "__len__"]),
    "an evaluation set that is none": ("data.eval._target_=strangers.number", ["data.eval._target_", "int"]),
    "an empty data set": ("data.train._target_=strangers.nothing", ["data.train._target_", "empty"]),
    "an iterable that cannot rewind": (
        "data.train._target_=strangers.Forgetful",
        ["data.train._target_", "state_dict", "load_state_dict"],
    ),
    "an iterable that rewinds to other rows": (
        "data.train._target_=strangers.Unrepeatable",
        ["data.train._target_", "other rows"],
    ),
    "an iterable with workers": (
        "data.train._target_=strangers.Counting data.num_workers=2",
        ["data.num_workers=2", "use 0"],
    ),
    "a collate function that is none": ("data.collate=strangers.__doc__", ["data.collate", "callable"]),
    "an objective with other arguments": (
        "objective._target_=strangers.one_argument",
        ["objective._target_", "(model, batch)"],
    ),
    "an objective without a scalar": (
        "objective._target_=strangers.no_scalar",
        ["objective._target_", "[32, 1]", "scalar"],
    ),
    "an objective without a tensor": ("objective._target_=strangers.no_tensor", ["objective._target_", "float"]),
    "a loss without a graph": ("objective._target_=strangers.no_graph", ["objective._target_", "graph"]),
    "an objective for other data": (
        "objective._target_=resilient_train.zoo.objectives.language_model",
        ["objective", "language_model", "integer token ids"],
    ),
    "an optimizer that is none": (
        "optimizer=custom optimizer._target_=builtins.list",
        ["optimizer._target_", "Optimizer"],
    ),
    "a scheduler that needs a metric": (
        "schedule=custom schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
        ["schedule._target_", "metric"],
    ),
    "a scheduler with a missing argument": (
        "schedule=custom schedule._target_=torch.optim.lr_scheduler.StepLR",
        ["schedule", "step_size"],
    ),
    "weights of another model": (
        "run.init_from=other.safetensors",
        ["run.init_from=other.safetensors", "body.0.weight"],
    ),
    "weights that are not there": ("run.init_from=absent", ["run.init_from=absent"]),
    "a directory that cannot be made": ("run.dir=a_file/run", ["run.dir", "a_file", "cannot be written"]),
    "a directory of somebody else": ("run.dir=occupied", ["run.dir", "thesis.txt"]),
    "a plain folder as tracking store": ("tracking=mlflow tracking.uri=./mlruns", ["tracking.uri=./mlruns"]),
    "a metric that is no scalar": ("objective._target_=strangers.with_a_vector", ["each", "[32]", "scalar"]),
    "a metric named loss": ("objective._target_=strangers.with_a_loss", ["objective._target_", "named loss"]),
    "an objective with weights": ("objective._target_=strangers.Weighed", ["objective._target_", "weights of its own"]),
    "an optimizer without a rate": (
        "optimizer=custom optimizer._target_=strangers.without_a_rate",
        ["schedule._target_", "lr"],
    ),
    "a scheduler that fails": (
        "schedule=custom schedule._target_=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts +schedule.T_0=0",
        ["schedule._target_", "ValueError"],
    ),
    "a rate of nan": ("optimizer.lr=nan", ["optimizer.lr=nan", "finite"]),
    "an infinite rate": ("optimizer.lr=inf", ["optimizer.lr=inf", "finite"]),
    "a beta of nan": ("optimizer.betas=[0.9,nan]", ["optimizer.betas[1]=nan", "finite"]),
    "a clip of nan": ("clip.max_norm=nan", ["clip.max_norm=nan", "finite"]),
    "a timeout of nan": ("run.step_timeout=nan", ["run.step_timeout=nan", "finite"]),
    "an endless timeout": ("run.save_timeout=inf", ["run.save_timeout=inf", "finite"]),
    "a grace of nan": ("run.grace=nan", ["run.grace=nan", "finite"]),
    "nan hours": ("run.max_hours=nan", ["run.max_hours=nan", "finite"]),
    "an interval of a clock": ("run.deterministic=true checkpoint.disk.every=auto", ["run.deterministic", "auto"]),
    "an interval of a word": ("checkpoint.disk.every=often", ["checkpoint.disk.every=often", "auto"]),
    "nan gigabytes": ("checkpoint.memory.max_gib=nan", ["checkpoint.memory.max_gib=nan", "finite"]),
    "an endless wait": ("tracking.drain_s=inf", ["tracking.drain_s=inf", "finite"]),
    "a threshold of nan": ("checks.jump.sigmas=nan", ["checks.jump.sigmas=nan", "finite"]),
    "a factor of nan": ("schedule=cosine schedule.final_factor=nan", ["schedule.final_factor=nan", "finite"]),
    "a budget of nan": ("recovery.budget.share=nan", ["recovery.budget.share=nan", "finite"]),
    "a drill of nan": ("drill=nan_batch drill.rate=nan", ["drill.rate=nan", "finite"]),
    "a rate below zero": ("optimizer.lr=-1e-3", ["error: optimizer.lr=-0.001: ", "AdamW", "learning rate"]),
    "a beta above one": ("optimizer.betas=[1.5,0.9]", ["error: optimizer.betas=[1.5, 0.9]: ", "AdamW"]),
    "an address of no kind": ("tracking=mlflow tracking.uri=htp://x", ["tracking.uri=htp://x", "http://"]),
    "a function for a remedy": (
        "\"recovery.ladders.default=[[{os.system:{command:'touch called'}}]]\"",
        ["recovery.ladders.default[0][0]=os.system: is not a remedy"],
    ),
    "a class for a remedy": (
        "recovery.ladders.default=[[{subprocess.Popen:{args:[touch,called]}}]]",
        ["recovery.ladders.default[0][0]=subprocess.Popen: is not a remedy"],
    ),
}
FAILS: dict[str, tuple[str, list[str]]] = {
    "a log file that is none": ("run.dir=crooked", ["IsADirectoryError", "train.log"]),
    "rows that cannot be read": (
        "data.train._target_=strangers.Rotten",
        ["ValueError: row ", "is rotten", "strangers.py"],
    ),
    "rows that a worker cannot read": (
        "data.train._target_=strangers.Rotten data.num_workers=1",
        ["ValueError: row ", "is rotten", "strangers.py"],
    ),
    "an objective that leaves the program": ("objective._target_=strangers.leaves", ["SystemExit", "strangers.py"]),
    "an error of the user's own": (
        "objective._target_=strangers.raises",
        ["RuntimeError", "the user broke", "strangers.py"],
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what the table speaks of in it, as working directory."""
    import torch
    from safetensors.torch import save_file

    (tmp_path / "broken.py").write_text("def Net(:\n")
    (tmp_path / "needy.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "a_file").touch()
    (tmp_path / "crooked" / "train.log").mkdir(parents=True)
    (tmp_path / "crooked" / "config.yaml").touch()
    (tmp_path / "crooked" / "summary.json").write_text('{"steps": 0, "ticks": 0}')
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


@pytest.mark.parametrize("case", REFUSED | FAILS)
def test_each_mistake_is_told_in_one_line(case: str, place: Path, run_command: command) -> None:
    """The line names the key, the value and what is allowed; the exit code tells a script what to do."""
    words, said = (REFUSED | FAILS)[case]
    outcome = run_command([*OWN, *shlex.split(words)])
    line = only_line(outcome)
    assert outcome.code == (2 if case in REFUSED else 1), line
    assert line.startswith("error: ")
    for words in said:
        assert words in line
    assert not (place / "called").exists(), "what a policy names was called to see what it is"


def test_a_complete_run_excuses_no_mistake(place: Path, run_command: command) -> None:
    """What a start would refuse is refused where nothing is left to do as well, and the run stays complete."""
    mistakes = {
        "recovery.budget.window=-1": "recovery.budget.window=-1: must be a whole number (at least 1)",
        "recovery.ladders.default=[[rewnd]]": "recovery.ladders.default[0][0]=rewnd: no such remedy",
        "tracking=mlflow tracking.uri=htp://x": "tracking.uri=htp://x: ",
        "run.init_from=absent": "run.init_from=absent: ",
        "run.resume=absent": "run.resume=absent: ",
        "run.grace=nan": "run.grace=nan: must be a finite number",
    }
    assert run_command([*OWN, "run.name=done"]).code == 0
    before = Path("runs/done/summary.json").read_bytes()
    for overrides, said in mistakes.items():
        wrong = run_command([*OWN, "run.name=done", *overrides.split()])
        assert wrong.code == 2, wrong.stdout
        assert only_line(wrong).startswith(f"error: {said}")
        assert Path("runs/done/summary.json").read_bytes() == before
    assert run_command([*OWN, "run.name=done"]).code == 0


@pytest.mark.parametrize("group", ["recovery", "checks"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &a [x,x]\n" + "".join(f"{n}: &{n} [*{o},*{o}]\n" for o, n in pairwise("abcdefghijklmnopqrst")), "unfolds"),
        ("a: &a {b: *a}", "an alias inside of what it names"),
        ("a: " + "[" * 5000, "levels"),
        ("a: !!python/name:os.system", "constructor"),
        ("\0\1", "special characters"),
        ("7", "Invalid loaded object type"),
    ],
    ids=lambda one: one[:10],
)
def test_a_file_that_is_no_configuration_is_named(
    group: str, text: str, why: str, place: Path, run_command: command
) -> None:
    """Whatever lies in it is told in one line, before it unfolds."""
    Path(f"own/{group}").mkdir(parents=True)
    Path(f"own/{group}/odd.yaml").write_text(text)
    outcome = run_command(["--config-dir=own", *OWN, f"{group}=odd"])
    assert outcome.code == 2, outcome.stderr
    assert re.search(rf"own/{group}/odd\.yaml: is no configuration: .*{why}", only_line(outcome))


def test_what_help_offers_can_be_typed(run_command: command) -> None:
    """A slice of a split, brackets and all, goes through a shell and Hydra as it stands there."""
    told = run_command(["--help", "data=hf_dataset"]).stdout
    (offered,) = re.findall(r"slices work too.*: (\S+)$", told, re.MULTILINE)
    (word,) = shlex.split(offered if "=" in offered else f"data.train.split={offered}")
    assert load(["data=hf_dataset", "data.train.path=json", word]).config.data.train["split"] == "train[:90%]"


def test_what_failed_before_its_first_update_is_no_obstacle(place: Path, run_command: command) -> None:
    """The mended command trains in the very directory in which the broken one ended."""
    broken = run_command([*OWN, "run.name=same", "objective._target_=strangers.no_scalar"])
    assert broken.code == 2
    assert broken.summary("runs/same")["status"] == "failed"
    mended = run_command([*OWN, "run.name=same"])
    assert mended.code == 0, mended.stderr
    assert mended.summary("runs/same")["steps"] == 3


def test_the_traceback_of_a_users_error_is_in_the_log(place: Path, run_command: command) -> None:
    """One line on the terminal, everything in train.log, and a summary that says it failed."""
    outcome = run_command([*OWN, "run.name=mine", "objective._target_=strangers.raises"])
    assert "Traceback" in Path("runs/mine/train.log").read_text()
    summary = outcome.summary("runs/mine")
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 1, 0)


class Mute(RuntimeError):
    """An error whose message needs what its constructor was not given."""

    def __str__(self) -> str:
        return f"{self.missing}"  # type: ignore[attr-defined]


def raises_mute(model: Any, batch: Any) -> Any:
    raise Mute


def test_an_error_that_cannot_be_put_into_words_is_told_all_the_same(place: Path, run_command: command) -> None:
    """By its class and line; the summary says that the run failed."""
    outcome = run_command([*OWN, "run.name=mute", "objective._target_=test_errors.raises_mute"])
    assert outcome.code == 1
    assert f"Mute: <its __str__ raises> ({__file__}:" in outcome.stderr
    assert "AttributeError" not in outcome.stderr
    assert outcome.summary("runs/mute")["status"] == "failed"


def test_a_directory_in_use_by_a_live_process_is_left_alone(place: Path, run_command: command) -> None:
    """The second run names the first one's process and ends with 1: the same command works later."""
    Path("runs/same").mkdir(parents=True)
    hold = "import os, sys, time; from pathlib import Path; from resilient_train.ranks.lock import DirectoryLock\n"
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


def test_a_lock_that_is_released_twice_lets_go_of_no_other(tmp_path: Path) -> None:
    """Its descriptors may be those of the next one by then."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one = DirectoryLock(tmp_path / "one")
    one.release()
    other = DirectoryLock(tmp_path / "other")
    one.release()
    assert holder_of(tmp_path / "one") is None
    assert holder_of(tmp_path / "other") is not None
    other.release()


def test_a_kill_before_the_first_file_is_no_obstacle(place: Path, run_command: command) -> None:
    """A half-written file in an otherwise empty directory is swept away."""
    Path("runs/same").mkdir(parents=True)
    Path("runs/same/.lock").touch()
    Path("runs/same/.config.yaml.resilient-tmp").write_text("run:\n  na")
    assert run_command([*OWN, "run.name=same"]).code == 0
    assert not list(Path("runs/same").glob("*tmp"))


def test_a_real_process_ends_with_the_code_and_the_line(place: Path) -> None:
    """The same from outside, without a traceback of Hydra's."""
    command = [sys.executable, "-m", "resilient_train", "model=gtp"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: model=gtp: no such option; did you mean gpt?")
    assert not list(place.glob("runs/*"))
