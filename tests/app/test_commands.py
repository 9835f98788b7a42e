"""The command as people use it: directories, own code, own configurations, sweeps, switches of the loop."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from command import MINE, command
from kills import incidents
from safetensors.torch import load_file

from resilient_train.command import examine
from resilient_train.command.config.compose import load

pytestmark = pytest.mark.usefixtures("here")

RMSE = "objective._target_=user_programs.mse_and_more"
LR = "torch.optim.lr_scheduler"
FIELDS = {"status", "exit_code", "steps", "ticks", "steps_lost", "final_loss", "eval", "incidents", "seconds"}
FIELDS |= {"step_ms", "trial_updates", "weights_sha256", "state_sha256", "mlflow", "first_loss", "verdict"}


def runs() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir() if path.is_dir())


def test_a_run_leaves_its_configuration_log_weights_and_summary(run_command: command) -> None:
    outcome = run_command([*MINE, "run.steps=30", "run.name=first", "data.eval._target_=user_programs.Fixed", RMSE])
    assert outcome.code == 0
    assert "completed 30 steps" in outcome.stdout
    files = {"config.yaml", "incidents.jsonl", "journal.jsonl", "summary.json", "train.log", "weights.safetensors"}
    assert files | {".lock", "checkpoints", "progress"} == set(os.listdir("runs/first"))
    summary = outcome.summary("runs/first")
    assert set(summary) == {*FIELDS, "best_level", "why"}
    assert (summary["status"], summary["exit_code"], summary["steps"], summary["ticks"]) == ("completed", 0, 30, 30)
    assert summary["incidents"] == {"total": 0, "recovered": 0, "by_cause": {}}
    assert set(summary["eval"]) == {"loss", "rmse"}
    assert summary["mlflow"] is None
    assert "step 10/30  loss" in Path("runs/first/train.log").read_text()
    assert set(load_file("runs/first/weights.safetensors")) == {
        f"body.{n}.{w}" for n in (0, 2) for w in ("weight", "bias")
    }


def test_the_same_command_twice_says_that_the_run_is_complete(run_command: command) -> None:
    """Nothing is trained again or written, and the exit code is 0; with another configuration it is refused."""
    first = run_command([*MINE, "run.steps=5"])
    (name,) = runs()
    assert name.startswith("Plain-Fixed-")
    before = (Path("runs") / name / "summary.json").read_bytes()
    second = run_command([*MINE, "run.steps=5", "run.log_every=2"])
    assert (first.code, second.code) == (0, 0)
    assert "is complete: 5 steps" in second.stdout
    assert "differs from this command: run.log_every: 10 there, 2 here" in second.stdout
    other = run_command([*MINE, "run.steps=5", f"run.name={name}", "optimizer.lr=0.5"])
    assert other.code == 2
    assert "another configuration (optimizer.lr: 0.001 there, 0.5 here)" in other.stderr
    assert (Path("runs") / name / "summary.json").read_bytes() == before


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_configuration_that_is_refused_is_in_nobodys_way(
    resume: str, run_command: command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run stays as it was, and the mended command works, also a scheduler's."""
    mine = [*MINE, "run.steps=5", "run.dir=mine", f"run.resume={resume}"]
    assert run_command([*mine, "+model.widht=3"]).code == 2
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert run_command([*mine, "objective._target_=user_programs.no_scalar"]).code == 2
    assert run_command(mine).code == 0
    assert os.listdir() == ["mine"]
    before = sorted(os.listdir("mine"))
    assert run_command([*mine, "run.steps=6", "+model.widht=3"]).code == 2
    assert sorted(os.listdir("mine")) == before


def test_another_experiment_never_meets_the_directory() -> None:
    """The name tells runs apart by what makes them different, faults on purpose included, and by nothing else."""
    same = ["run.log_every=1", "tracking=none", "drill=none", "run.steps=7"]
    different: list[list[str]] = [[], ["run.seed=1"], ["+model.width=8"], ["optimizer=sgd"], ["drill=nan_grad"], same]
    names = [load([*MINE, *overrides]).config.run.name for overrides in different]
    assert len({*names}) == 5
    assert names[0] == names[-1]


def test_every_job_of_a_sweep_has_its_own_directory(run_command: command) -> None:
    """Also in a place given by hand, and where what is swept makes no other run; a bad job does not end a sweep."""
    outcome = run_command(["--multirun", *MINE, "run.steps=2,-1,3", "run.dir=swept", "hydra.sweep.dir=."])
    assert (outcome.code, outcome.stderr.count("\n")) == (2, 1)
    summaries = Path("swept").glob("*/summary.json")
    assert sorted(json.loads(one.read_text())["steps"] for one in summaries) == [2, 3]
    left_open = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
    assert not [one for one in left_open if one.startswith(str(Path.cwd()))], "a long sweep runs out of descriptors"


def test_a_folder_of_configurations_of_ones_own(run_command: command) -> None:
    """--config-dir adds options to our groups, experiments included, as hydra.searchpath does; a data file of one's
    own may leave out evaluation, workers, shuffling and collate function."""
    for name, text in {
        "model/tiny.yaml": "_target_: user_programs.Plain\nwidth: 4\n",
        "data/mine.yaml": "train:\n  _target_: user_programs.Fixed\nbatch_size: 8\n",
        "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /model: tiny\nrun:\n  steps: 3\n",
    }.items():
        file = Path("conf") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    rest = ["data=mine", *[one for one in MINE if not one.startswith(("model", "data"))]]
    assert run_command(["--config-dir", "conf", "experiment=mine", *rest, "run.name=one"]).code == 0
    here = f"hydra.searchpath=[file://{Path('conf').absolute()}]"
    outcome = run_command([here, "experiment=mine", *rest, "run.name=two"])
    assert (outcome.code, outcome.summary("runs/two")["steps"]) == (0, 3)
    assert outcome.summary("runs/one")["state_sha256"] == outcome.summary("runs/two")["state_sha256"]


SWITCHES = {
    "workers": "accelerate.mixed_precision=bf16 clip.max_norm=null clip.max_value=0.1 data.num_workers=2",
    "accumulation": "schedule=linear data.shuffle=false accelerate.gradient_accumulation_steps=3",
    "transformers": "schedule=custom schedule._target_=transformers.get_inverse_sqrt_schedule "
    "+schedule.num_warmup_steps=5 data.train._target_=user_programs.Counting",
    "torch": f"schedule=custom schedule._target_={LR}.OneCycleLR +schedule.max_lr=0.05 "
    "+schedule.total_steps=60 optimizer=custom optimizer._target_=torch.optim.NAdam",
}


@pytest.mark.parametrize("switches", SWITCHES)
def test_every_switch_of_the_loop_still_learns(switches: str, run_command: command) -> None:
    learn = ["run.steps=60", "run.log_every=1", "++optimizer.lr=0.02", "run.name=switched"]
    outcome = run_command([*MINE, *learn, *SWITCHES[switches].split()])
    assert outcome.code == 0, outcome.stderr
    losses = [
        float(line.split("loss ")[1].split()[0]) for line in outcome.stdout.splitlines() if line.startswith("step ")
    ]
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_switch_reaches_the_forward(run_command: command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's model sees it, and does not see it when it is off. What a compiler of C++ does is not of interest."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    watched = ["model._target_=user_programs.Witness", "objective._target_=user_programs.witnessed", "run.steps=2"]
    switches = ["accelerate.mixed_precision=bf16", "accelerate.compile=true", "run.deterministic=true"]
    for is_on, words in enumerate(([], switches)):
        outcome = run_command([*MINE, *watched, *words, f"run.name={is_on}", "run.log_every=1"])
        assert outcome.code == 0, outcome.stderr
        for witness in ("autocast", "compiled", "deterministic"):
            assert f"{witness} {is_on}" in outcome.stdout


@pytest.mark.parametrize("train", ["BatchEncodings", "NestedRows"])
def test_batches_of_any_shape_reach_the_objective_as_they_are(train: str, run_command: command) -> None:
    overrides = [f"data.train._target_=user_programs.{train}", f"objective._target_=user_programs.{train.lower()}_loss"]
    outcome = run_command([*MINE, "run.steps=3", *overrides, f"data.collate=user_programs.{train.lower()}_collate"])
    assert outcome.code == 0, outcome.stderr


def test_training_starts_from_given_weights(run_command: command) -> None:
    """run.init_from takes the weights of another run and nothing else of it."""
    run_command([*MINE, "run.steps=40", "run.name=first", "optimizer.lr=0.02"])
    outcome = run_command([*MINE, "run.steps=1", "run.name=second", "run.init_from=runs/first", "run.log_every=1"])
    assert outcome.summary("runs/second")["final_loss"] < outcome.summary("runs/first")["final_loss"] * 1.5
    assert outcome.summary("runs/second")["steps"] == 1
    assert "completed 1 step; " in outcome.stdout


def test_examine_takes_the_newest_checkpoint(run_command: command, capsys: pytest.CaptureFixture[str]) -> None:
    """And not the file of an earlier end, unless there is no checkpoint."""
    told = [*MINE, "run.steps=2", "run.name=first"]
    run_command(told)
    Path("runs/first/weights.safetensors").write_bytes(b"of an earlier end")
    assert examine.main(["runs/first", *told]) == 0
    shutil.rmtree("runs/first/checkpoints")
    assert examine.main(["runs/first", *told]) == 2
    assert "error: RUN_DIR=runs/first: has no weights that can be read" in capsys.readouterr().err


def test_parameters_are_what_runs_are_compared_by() -> None:
    """The options chosen and all settings, without where the run is and how it is shown; secrets are masked."""
    params = load(["run.name=mine", "checks.weights.every=50", "+data.train.password=hunter22"]).params
    there = {"model": "gpt", "recovery": "balanced", "checks.weights.every": 50, "data.train.password": "***"}
    assert there.items() <= params.items()
    assert not params.keys() & {"tracking.uri", "run.name", "hydra.mode"}


def test_a_drilled_run_writes_its_incidents_down(run_command: command) -> None:
    """Exit code 0, one line of incidents.jsonl, and the count in the summary."""
    learn = ["model=mlp", "data=synthetic", "objective=classification", "accelerate.cpu=true", "tracking=none"]
    outcome = run_command([*learn, "drill=nan_grad", "run.steps=100", "run.name=drilled"])
    assert outcome.code == 0, outcome.stderr
    (told,) = incidents(Path("runs/drilled"))
    assert (told["step"], told["tick"], told["signal"]) == (50, 50, "nonfinite_grad")
    assert (told["actions"], told["rewound_to"], told["steps_lost"]) == ([{"remedy": "repeat"}], None, 1)
    assert told["outcome"] == "recovered"
    summary = outcome.summary("runs/drilled")
    assert summary["incidents"] == {"total": 1, "recovered": 1, "by_cause": {told["cause"]: 1}}
    assert (summary["status"], summary["steps"], summary["ticks"], summary["steps_lost"]) == ("completed", 100, 101, 1)
    assert "nonfinite_grad" in outcome.stdout


def test_evaluation_changes_nothing(run_command: command) -> None:
    """A run that evaluates every third step ends where one ends that never does, although its rows and dropout draw."""
    words = [
        *MINE,
        "model._target_=user_programs.Jittery",
        "data.train._target_=user_programs.Augmented",
        "run.steps=28",
    ]
    evaluates = ["data.eval._target_=user_programs.Augmented", "run.eval_every=3"]
    ended = []
    for name, more in (("never", []), ("often", evaluates)):
        outcome = run_command([*words, *more, f"run.name={name}", "data.batch_size=4"])
        assert outcome.code == 0, outcome.stderr
        ended.append(outcome.summary(f"runs/{name}"))
    assert ended[0]["state_sha256"] == ended[1]["state_sha256"]
    assert ended[1]["eval"]
