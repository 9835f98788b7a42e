"""The command as people use it: directories, own code, own configurations, sweeps, switches of the loop."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import command, train
from group import Group
from kills import stand
from safetensors.torch import load_file
from warm import ENVIRONMENT, Forked, python

from resilient_train.app.status import status_of

MINE = ["model=custom", "model._target_=strangers.Plain", "data=custom", "data.train._target_=strangers.Fixed"]
MINE += ["objective=custom", "objective._target_=strangers.mse_and_more", "accelerate.cpu=true", "tracking=none"]

LR = "torch.optim.lr_scheduler"
FIELDS = {"status", "exit_code", "steps", "ticks", "steps_lost", "final_loss", "eval", "incidents", "seconds"}
FIELDS |= {"step_ms", "trial_updates", "weights_sha256", "state_sha256", "mlflow", "first_loss", "verdict"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder as working directory."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.use_deterministic_algorithms(False)


def runs() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir() if path.is_dir())


def test_a_run_leaves_its_configuration_log_weights_and_summary(run_command: command) -> None:
    """Everything is in one directory, and the summary has the fields that scripts rely on."""
    outcome = run_command([*MINE, "run.steps=30", "run.name=first", "data.eval._target_=strangers.Fixed"])
    assert outcome.code == 0
    assert "completed 30 steps" in outcome.stdout
    files = {"config.yaml", "incidents.jsonl", "journal.jsonl", "summary.json", "train.log", "weights.safetensors"}
    assert files | {".lock", "best", "checkpoints", "progress"} == set(os.listdir("runs/first"))
    summary = outcome.summary("runs/first")
    assert set(summary) == FIELDS
    assert (summary["status"], summary["exit_code"], summary["steps"], summary["ticks"]) == ("completed", 0, 30, 30)
    assert summary["incidents"] == {"total": 0, "recovered": 0, "by_cause": {}}
    assert set(summary["eval"]) == {"loss", "rmse"}
    assert summary["mlflow"] is None
    assert "step 10/30  loss" in Path("runs/first/train.log").read_text()
    assert set(load_file("runs/first/weights.safetensors")) == {
        f"body.{n}.{w}" for n in (0, 2) for w in ("weight", "bias")
    }


def test_the_same_command_twice_says_that_the_run_is_complete(run_command: command) -> None:
    """Nothing is trained again, nothing is written, and the exit code is 0."""
    first = run_command([*MINE, "run.steps=5"])
    (name,) = runs()
    assert name.startswith("Plain-Fixed-")
    before = (Path("runs") / name / "summary.json").read_bytes()
    second = run_command([*MINE, "run.steps=5", "run.log_every=2"])
    assert (first.code, second.code) == (0, 0)
    assert "is complete: 5 steps" in second.stdout
    assert "differs from this command: run.log_every: 10 there, 2 here" in second.stdout
    assert (Path("runs") / name / "summary.json").read_bytes() == before


def test_a_complete_run_says_what_mlflow_lacks_of_it(run_command: command) -> None:
    """A server that was dead to the end is no reason to be silent about it the next morning."""
    told = [*MINE[:-1], "tracking.uri=http://127.0.0.1:9", "tracking.drain_s=0", "run.steps=5", "run.name=lacking"]
    assert run_command(told).code == 0
    again = run_command(told)
    assert again.code == 0
    assert "is complete: 5 steps" in again.stdout
    assert re.search(r"MLflow lacks \d+ entries of it; to upload them:\n  .*sync runs/lacking", again.stdout)


def test_a_configuration_that_is_refused_leaves_no_directory(run_command: command, place: Path) -> None:
    """Found before the first update, by building what it names; a directory that was there stays, and so does a run."""
    wrong = "+model.widht=3"
    assert run_command([*MINE, "run.steps=5", wrong]).code == 2
    assert runs() == []
    Path("mine").mkdir()
    assert run_command([*MINE, "run.steps=5", "run.dir=mine", wrong]).code == 2
    assert os.listdir("mine") == []
    assert run_command([*MINE, "run.steps=5", "run.dir=mine"]).code == 0
    before = sorted(os.listdir("mine"))
    assert run_command([*MINE, "run.steps=6", "run.dir=mine", wrong]).code == 2
    assert sorted(os.listdir("mine")) == before


def test_a_refused_command_works_in_its_own_directory_once_it_is_mended(
    run_command: command, place: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path
) -> None:
    """Whatever the refused one had left there by then, also as a job of a scheduler."""
    shutil.copy(empty_store, "mlflow.db")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    told = [*MINE, "tracking=mlflow", "run.steps=3", "run.dir=mine"]
    assert run_command([*told, "+model.widht=3"]).code == 2
    assert not Path("mine").exists()
    assert run_command([*told, "objective._target_=strangers.no_scalar"]).code == 2
    assert run_command(told).code == 0


def test_another_experiment_never_meets_the_directory(run_command: command) -> None:
    """The name tells runs apart by what makes them different, faults on purpose included, and by nothing else."""
    same = ["run.log_every=1", "tracking=none", "drill=none"]
    for overrides in ([], ["run.seed=1"], ["model.width=8"], ["optimizer=sgd"], ["drill=nan_grad"], same):
        assert run_command([*MINE, "run.steps=2", *["+" * o.startswith("model.") + o for o in overrides]]).code == 0
    assert len(runs()) == 5


@pytest.mark.parametrize("why", ["own code", "no checkpoint"])
def test_a_resume_that_fails_keeps_the_counts_of_the_run(
    why: str, run_command: command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made no update, so the status is its error, at the step that the run has reached."""
    assert train(run_command, place / "run", 10).code == 0
    if why == "own code":
        monkeypatch.setattr("resilient_train.app.build.data.samples", lambda *_, **__: 1 // 0)
    else:
        shutil.rmtree(place / "run" / "checkpoints")
    for _ in range(2):
        failed = train(run_command, place / "run", 20)
        assert failed.code == 1
        kept = failed.summary(place / "run")
        assert (kept["status"], kept["steps"], kept["ticks"]) == ("failed", 10, 10)
        assert kept["final_loss"] is not None
        assert status_of(place / "run").step == 10


def test_a_name_given_by_hand_does_not_cover_another_configuration(run_command: command) -> None:
    """The refusal shows what differs."""
    run_command([*MINE, "run.steps=2", "run.name=mine"])
    other = run_command([*MINE, "run.steps=2", "run.name=mine", "optimizer.lr=0.5"])
    assert other.code == 2
    assert "optimizer.lr: 0.001 there, 0.5 here" in other.stderr
    fewer = run_command([*MINE, "run.steps=1", "run.name=mine", "tracking=none", "run.eval_every=1"])
    assert fewer.code == 0


def test_every_job_of_a_sweep_has_its_own_directory(run_command: command) -> None:
    """Swept keys that do not make another run, and a name given by hand, are no exception."""
    assert run_command([*MINE, "--multirun", "run.steps=2,3", "run.seed=0,1"]).code == 0
    assert run_command([*MINE, "--multirun", "run.steps=2,3", "run.name=named"]).code == 0
    names = [name for name in runs() if name != "sweeps"]
    assert len(names) == 6
    steps = sorted(json.loads((Path("runs") / name / "summary.json").read_text())["steps"] for name in names)
    assert steps == [2, 2, 2, 3, 3, 3]


def test_a_sweep_in_a_directory_given_by_hand(run_command: command) -> None:
    """It holds the directories of the jobs."""
    assert run_command([*MINE, "--multirun", "run.steps=2", "run.seed=0,1", "run.dir=swept"]).code == 0
    assert len(list(Path("swept").glob("*/summary.json"))) == 2


def test_one_bad_job_does_not_end_a_sweep(run_command: command) -> None:
    """The others run, and the exit code is that of the worst."""
    outcome = run_command([*MINE, "--multirun", "run.steps=2", "+model.width=-1,4"])
    assert outcome.code == 2
    assert len(outcome.stderr.strip().splitlines()) == 1
    assert sorted(path.parent.name[:12] for path in Path("runs").glob("*/weights.safetensors")) == ["Plain-Fixed-"]


def test_a_folder_of_configurations_of_ones_own(run_command: command) -> None:
    """--config-dir adds options to our groups, experiments included; hydra.searchpath does the same."""
    for name, text in {
        "model/tiny.yaml": "_target_: strangers.Plain\nwidth: 4\n",
        "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /model: tiny\nrun:\n  steps: 3\n",
    }.items():
        file = Path("conf") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    rest = [one for one in MINE if not one.startswith("model")]
    assert run_command(["--config-dir", "conf", "experiment=mine", *rest, "run.name=one"]).code == 0
    here = f"hydra.searchpath=[file://{Path('conf').absolute()}]"
    outcome = run_command([here, "experiment=mine", *rest, "run.name=two"])
    assert (outcome.code, outcome.summary("runs/two")["steps"]) == (0, 3)
    assert outcome.summary("runs/one")["state_sha256"] == outcome.summary("runs/two")["state_sha256"]


@pytest.mark.parametrize(
    "switches",
    [
        ["accelerate.mixed_precision=bf16"],
        ["clip.max_norm=null", "clip.max_value=0.1"],
        ["clip.max_norm=0.01"],
        ["schedule=constant", "schedule.warmup_steps=10"],
        ["schedule=linear"],
        ["schedule=custom", "schedule._target_=transformers.get_inverse_sqrt_schedule", "+schedule.num_warmup_steps=5"],
        ["schedule=custom", f"schedule._target_={LR}.OneCycleLR", "+schedule.max_lr=0.05", "+schedule.total_steps=60"],
        ["optimizer=custom", "optimizer._target_=torch.optim.NAdam", "+optimizer.lr=0.01"],
        ["data.train._target_=strangers.Counting", "run.eval_every=20", "data.eval._target_=strangers.Counting"],
        ["data.num_workers=2"],
        ["data.shuffle=false", "accelerate.gradient_accumulation_steps=3"],
        ["run.deterministic=true"],
    ],
    ids=lambda switches: " ".join(one.split("=", 1)[1] if one.startswith("schedule._t") else one for one in switches),
)
def test_every_switch_of_the_loop_still_learns(switches: list[str], run_command: command) -> None:
    """60 steps bring the loss well below that of the start."""
    learn = ["run.steps=60", "run.log_every=1", "optimizer.lr=0.02", "run.name=switched"]
    own_rate = any(one.startswith("optimizer=custom") for one in switches)
    outcome = run_command([*MINE, *[one for one in learn if not (own_rate and one.startswith("optimizer"))], *switches])
    assert outcome.code == 0, outcome.stderr
    losses = [
        float(line.split("loss ")[1].split()[0]) for line in outcome.stdout.splitlines() if line.startswith("step ")
    ]
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_switch_reaches_the_forward(run_command: command) -> None:
    """The user's model sees it, and does not see it when it is off."""
    watched = ["model._target_=strangers.Witness", "objective._target_=strangers.witnessed", "run.steps=2"]
    switches = {"autocast": "accelerate.mixed_precision=bf16", "compiled": "accelerate.compile=true"}
    switches |= {"deterministic": "run.deterministic=true"}
    for name, switch in [("off", []), *((witness, [switch]) for witness, switch in switches.items())]:
        outcome = run_command([*MINE, *watched, *switch, f"run.name={name}", "run.log_every=1"])
        assert outcome.code == 0, outcome.stderr
        for witness in switches if name == "off" else [name]:
            assert f"{witness} {int(witness == name)}" in outcome.stdout


@pytest.mark.filterwarnings("default:.*does not have a deterministic implementation")
def test_deterministic_says_what_torch_cannot_do(run_command: command) -> None:
    """An operation without a deterministic form is named once, and the run goes on."""
    outcome = run_command([*MINE, "run.steps=3", "run.deterministic=true", "model._target_=strangers.Undeterministic"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("no deterministic form") == 1


@pytest.mark.parametrize("train", ["BatchEncodings", "NestedRows"])
def test_batches_of_any_shape_reach_the_objective_as_they_are(train: str, run_command: command) -> None:
    """HF's BatchEncoding and nests of tuples and dicts, made by a collate function of the user's."""
    overrides = [f"data.train._target_=strangers.{train}", f"objective._target_=strangers.{train.lower()}_loss"]
    outcome = run_command([*MINE, "run.steps=3", *overrides, f"data.collate=strangers.{train.lower()}_collate"])
    assert outcome.code == 0, outcome.stderr


def test_an_iterable_evaluation_set_is_read_again_each_time(run_command: command) -> None:
    """Every evaluation sees all of it, with the same random numbers: the same weights would get the same value."""
    overrides = ["data.train._target_=strangers.Lengthy", "data.eval._target_=strangers.Counting", "run.eval_every=1"]
    outcome = run_command([*MINE, *overrides, "run.steps=3", "optimizer.lr=0", "run.name=read"])
    assert outcome.code == 0, outcome.stderr
    said = [line.split(": ")[1] for line in outcome.stdout.splitlines() if line.startswith("evaluation after")]
    assert len(said) == 3
    assert len(set(said)) == 1
    assert "loss" in said[0]


def test_noise_that_a_data_set_keeps_depends_on_the_seed(run_command: command) -> None:
    """What is drawn once and cached is no constant of ours."""
    losses: set[str] = set()
    for seed in (1, 1, 2):
        overrides = ["data.train._target_=strangers.Caching", "optimizer.lr=0", f"run.seed={seed}", "run.steps=1"]
        run_command([*MINE, *overrides, f"run.name=cached{len(losses)}", "run.resume=never"])
        losses.add(run_command([*MINE, *overrides, "run.name=other", "run.resume=never"]).stdout.split("loss ")[1][:8])
    assert len(losses) == 2


def test_a_data_file_of_ones_own_names_what_it_needs(run_command: command) -> None:
    """Evaluation, workers, shuffling and collate function may be left out."""
    Path("conf/data").mkdir(parents=True)
    Path("conf/data/mine.yaml").write_text("train:\n  _target_: strangers.Fixed\nbatch_size: 8\n")
    rest = [one for one in MINE if not one.startswith("data")]
    assert run_command(["--config-dir", "conf", "data=mine", *rest, "run.steps=2"]).code == 0


def test_a_password_is_written_down_nowhere(run_command: command) -> None:
    """Neither in the run directory nor on the terminal."""
    tracked = [one for one in MINE if one != "tracking=none"]
    uri = "http://user:hunter2@127.0.0.1:9/?token=hunter2"
    outcome = run_command([*tracked, "run.steps=2", "run.name=secret", f"tracking.uri='{uri}'", "tracking.drain_s=1"])
    assert outcome.code == 0, outcome.stderr
    assert "hunter2" not in outcome.stdout + outcome.stderr
    for file in Path("runs/secret").rglob("*"):
        assert file.is_dir() or b"hunter2" not in file.read_bytes()


def test_training_starts_from_given_weights(run_command: command) -> None:
    """run.init_from takes the weights of another run and nothing else of it."""
    run_command([*MINE, "run.steps=40", "run.name=first", "optimizer.lr=0.02"])
    outcome = run_command([*MINE, "run.steps=1", "run.name=second", "run.init_from=runs/first", "run.log_every=1"])
    assert outcome.summary("runs/second")["final_loss"] < outcome.summary("runs/first")["final_loss"] * 1.5
    assert outcome.summary("runs/second")["steps"] == 1


def test_a_seed_makes_a_run(run_command: command) -> None:
    """The same seed gives the same weights to the last bit, another one does not."""
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        outcome = run_command([*MINE, "run.steps=5", f"run.name={name}", f"run.seed={seed}"])
        digests.append(outcome.summary(f"runs/{name}")["weights_sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_a_gpt_learns_to_write_python(run_command: command) -> None:
    """Its loss falls well under that of a uniform guess over 256 bytes."""
    small = ["model.width=64", "model.layers=2", "data.batch_size=8", "data.train.context=48"]
    small += ["data.train.max_bytes=300000"]
    outcome = run_command(["model=gpt", "data=python_source", "run.steps=100", "tracking=none", "run.name=gpt", *small])
    assert outcome.code == 0, outcome.stderr
    assert outcome.summary("runs/gpt")["eval"]["loss"] < 0.65 * math.log(256)


def test_a_resnet_reads_digits(run_command: command) -> None:
    """More than 95 of 100 held-out digits are read correctly."""
    what = ["model=resnet", "model.depth=8", "data=digits", "objective=classification", "run.steps=250"]
    what += ["optimizer.lr=3e-3"]
    outcome = run_command([*what, "tracking=none", "run.name=resnet"])
    assert outcome.summary("runs/resnet")["eval"]["accuracy"] > 0.95


def test_mlflow_shows_the_run_by_tick(
    run_command: command, place: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path
) -> None:
    """Parameters, curves over the tick, and files arrive in the database beside the runs."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (place / "runs").mkdir()
    shutil.copy(empty_store, "runs/mlflow.db")
    tracked = [one for one in MINE if one != "tracking=none"]
    tracked += ["run.name=tracked", "data.eval._target_=strangers.Fixed", "tracking.drain_s=600"]
    outcome = run_command([*tracked, "run.steps=30"])
    assert outcome.code == 0, outcome.stderr
    told = outcome.summary("runs/tracked")["mlflow"]
    assert told["tracking_uri"] == f"sqlite:///{place}/runs/mlflow.db"
    assert f"mlflow ui --backend-store-uri {told['tracking_uri']}" in outcome.stdout
    assert told["url"] in outcome.stdout
    from mlflow.tracking import MlflowClient

    client = MlflowClient(told["tracking_uri"])
    run = client.get_run(told["run_id"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tracked")
    assert run.data.params["model._target_"] == "strangers.Plain"
    assert [point.step for point in client.get_metric_history(told["run_id"], "train/loss")] == [10, 20, 30]
    assert {"train/grad_norm", "train/lr", "train/step", "train/rmse", "validation/loss"} <= set(run.data.metrics)
    assert {"config.yaml", "train.log"} <= {file.path for file in client.list_artifacts(told["run_id"])}


def test_a_terminal_shows_one_live_line(tmp_path: Path) -> None:
    """Step, loss, gradient norm, rate, speed and time left renew themselves in place; the log file has plain lines."""
    environment = ENVIRONMENT | {"TERM": "xterm-256color", "COLUMNS": "160"}
    master, slave = pty.openpty()
    words = ["-m", "resilient_train", *MINE, "run.steps=600", "run.name=live"]
    run = Forked(python, *words, place=tmp_path, out=Path(os.ttyname(slave)), environment=environment)
    seen = read_all(master, run)
    assert run.ended(100) == 0, seen
    os.close(slave)
    os.close(master)
    assert "\x1b[2K" in seen or "\x1b[1A" in seen  # the line is drawn over
    for words_in_it in ("/600", "loss", "grad", "lr", "/s", "left", "completed 600 steps"):
        assert words_in_it in seen
    assert "step 10/600  loss" not in seen
    assert "step 10/600  loss" in Path("runs/live/train.log").read_text()


def test_an_interrupted_run_says_so_and_is_not_in_the_way(tmp_path: Path) -> None:
    """Ctrl-C ends with one line, a summary, and a state that the same command goes on from."""
    run_dir = tmp_path / "runs/cut"
    with Group(tmp_path, 1, "-m", "resilient_train", *MINE, "run.name=cut", "run.steps=10000000") as run:
        run.until(lambda: stand(run_dir).step > 10)
        run.ranks[0].strike(signal.SIGINT)
        done = run.wait()
    assert done.codes == [75]
    assert not done.stderr
    assert "asked by SIGINT: the state is in" in done.stdout
    step = re.search(
        r"^stopped at step ([\d,]+), .*\nmade \1 of 10,000,000 steps in \d+ s; no incidents\.\nnewest checkpoint: ",
        done.stdout,
        re.M,
    )
    assert step
    assert done.stdout.splitlines()[-1] == f"the same command resumes from step {step[1]}"
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("preempted", 75)
    assert summary["steps"] > 0


def read_all(descriptor: int, run: Forked) -> str:
    """Read a terminal until its run has ended."""
    seen, deadline = b"", time.monotonic() + 240
    while time.monotonic() < deadline:
        has_ended = run.ended() is not None
        if select.select([descriptor], [], [], 0.1)[0]:
            seen += os.read(descriptor, 65536)
        elif has_ended:
            break
    return seen.decode(errors="replace")
