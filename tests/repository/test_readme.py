"""The shop window and the pages behind it: what they print works, and what they list is what there is."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from command import command
from group import launch
from guarded import is_finite
from kills import incidents, summary
from torch.nn.functional import mse_loss

from resilient_train.command import VERBS
from resilient_train.command.config.compose import load
from resilient_train.core.policy import Budget, Policy, parse
from resilient_train.core.remedies import KNOWN
from resilient_train.durable.run_history import in_words
from resilient_train.ground.types import Cause

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md") if path.stem != "README"}
README, POLICIES, DRILLS = (ROOT / "README.md").read_text(), PAGES["policies"], PAGES["drills"]
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", "\n".join([README, *PAGES.values()]), re.S))
COMMANDS = [line.split("#")[0].strip() for line in CONSOLE.splitlines() if line.strip()]
CALLS = [
    call[1] for line in COMMANDS if (call := re.match(r"(?:.*-m resilient_train|resilient-train)(?: (.*))?$", line))
]
TRAINING = sorted({line or "" for line in CALLS if ((line or "").split() or [""])[0] not in (*VERBS, "-sc")})


def block(page: str, language: str, start: str = "") -> str:
    """Return the one block of code of a page that begins like this."""
    (found,) = re.findall(rf"```{language}\n({re.escape(start)}.*?)```", page, re.S)
    return str(found)


def table(page: str, head: str) -> list[list[str]]:
    """Return what stands in backticks in the first column of the table with this head, row by row."""
    (body,) = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in body.splitlines()]


def names(page: str, head: str) -> set[str]:
    """Return all of them together."""
    return {name for row in table(page, head) for name in row}


def options(group: str) -> set[str]:
    """Return the names of a group's files."""
    return {path.stem for path in (CONF / group).glob("*.yaml")}


def test_every_training_command_is_valid() -> None:
    """Its overrides compose into a checked configuration."""
    assert len(COMMANDS) > len(TRAINING) >= 7, "the patterns above find what they are looking for"
    for line in TRAINING:
        words = [word for word in shlex.split(line) if not word.startswith("--")]
        words = [re.sub("^run.resume=.*", "run.resume=auto", word.replace("0,1,2", "0")) for word in words]
        assert load(words).config.run.steps > 0, line


def test_scripts_that_are_named_exist() -> None:
    """So do the folders and files."""
    folders = "scripts|tests|constraints|benchmarks|resilient_train|docs|examples"
    pages = [page for name, page in PAGES.items() if name != "scripts"]  # it names those of others
    for path in re.findall(rf"`?((?:{folders})/[\w./]*\w)", "\n".join([README, *pages])):
        assert (ROOT / path).exists(), path
    for name in ("Dockerfile", "CONTRIBUTING.md", "pyproject.toml"):
        assert (ROOT / name).exists()


def test_the_own_code_of_the_readme_trains_as_printed(tmp_path: Path, installed_wheel: Path) -> None:
    """Module and command are taken from the page to the letter; the installed command finds them."""
    (tmp_path / "mine.py").write_text(block(PAGES["command"], "python", "# mine.py"))
    (line,) = [line for line in TRAINING if "mine.Net" in line]
    environment = {**os.environ, "PYTHONPATH": str(installed_wheel), "OMP_NUM_THREADS": "1"}
    own = [*shlex.split(line), "run.steps=60", "run.name=own", "tracking=none", "accelerate.cpu=true"]
    start = [sys.executable, str(installed_wheel / "bin/resilient-train"), *own]
    done = subprocess.run(start, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "runs/own")["final_loss"] < 8


def test_the_table_of_files_is_what_runs_leave(here: Path, run_command: command) -> None:
    """Every file of the table is there after a run that recovered or one that gave up, and no other."""
    what = ["model=mlp", "data=digits", "objective=classification", "run.steps=3", "tracking=none", "drill=nan_grad"]
    assert run_command([*what, "run.name=recovered"]).code == 0
    gave_up = run_command([*what, "run.name=stopped", "recovery=off"])
    assert gave_up.code == 3
    assert "runs/stopped/checkpoints/step-" in gave_up.stderr
    recovered, stopped = ({file.name for file in Path("runs", name).iterdir()} for name in ("recovered", "stopped"))
    # Others are written where rows are guilty, a start is refused and so on: other tests look at those.
    elsewhere = {"quarantine.json", "mlflow.json", "outbox.jsonl", "refused.json", "failed.rank1"}
    assert names(PAGES["command"], "in the run directory") == (recovered | stopped | elsewhere) - {".lock"}
    assert recovered ^ stopped == {"weights.safetensors"}
    assert len(list((here / "runs/stopped/checkpoints").glob("*/weights.safetensors"))) == 1


def test_exit_codes_are_those_of_the_errors() -> None:
    """A code that no error has is not promised."""
    from resilient_train.ground import errors

    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.TrainError)]
    promised = re.findall(r"^\| (\d+) \| ", PAGES["command"], re.M)
    assert sorted(map(int, promised)) == sorted({0, errors.Stopped.exit_code, *(kind.exit_code for kind in kinds)})


def test_tables_name_exactly_the_options_there_are() -> None:
    """A policy, drill or check that comes or goes has to come or go on the page as well."""
    for group, page, head, elsewhere in (
        ("recovery", POLICIES, "policy", set()),
        ("drill", DRILLS, "drill", {"none", "gauntlet", "demo"}),
    ):
        listed = [row[0] for row in table(page, head)]
        assert len(listed) == len(set(listed))
        assert {*listed} | elsewhere == options(group)
        assert all(f"`{name}`" in page or f"{group}={name}" in page for name in elsewhere)
    checks = set(yaml.safe_load((CONF / "checks" / "default.yaml").read_text()))
    assert names(PAGES["checks"], "check") == checks - {"expect"}
    assert all(f"`{name}`" in PAGES["checks"] for name in options("checks"))


@pytest.mark.usefixtures("here")
def test_the_incident_that_is_shown_is_one_of_the_demo(run_command: command) -> None:
    """As the demo prints and records it. What machines compute differently may differ: times, and digits of weights.

    The GPT of the demo learns to write Python meanwhile: its loss falls well under that of a uniform guess."""
    outcome = run_command(["experiment=demo", "tracking=none"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.summary("runs/demo")["eval"]["loss"] < 0.65 * math.log(256)
    shown = json.loads(block(README, "json"))
    (met,) = [one for one in incidents(Path("runs/demo")) if one["id"] == shown["id"]]
    for one in (shown, met):
        assert one.pop("seconds") > 0
        one |= {key: re.sub(r"\d\.[\de+]+", "#", one[key]) for key in ("advice", "evidence")}
    assert shown == met
    (printed,) = [one for one in re.findall(r"^```text\n(.+?)^```", README, re.S | re.M) if "bit_flip" in one]
    plain = [re.sub(r"[\d.]+ s;|\d\.[\de+]+", "#", text) for text in (printed, outcome.stderr + outcome.stdout)]
    assert plain[0] in plain[1]


def test_the_culprits_that_are_shown_are_named_so(tmp_path: Path) -> None:
    """The example names its line and its rows in the words of the page; the numbers may be others elsewhere."""
    done = launch(tmp_path / "place", 1, str(ROOT / "examples" / "culprits.py"))
    assert done.is_well, done.stderr
    (shown,) = [
        one for one in re.findall(r"^```text\n(.+?)^```", PAGES["diagnosis"], re.S | re.M) if "culprits.py" in one
    ]
    said = done.stderr.replace(f"{ROOT}/", "").replace("resilient_train: ", "")
    for line in shown.splitlines():
        if not line.startswith("  loss"):
            assert line in said


def test_pages_that_are_linked_exist() -> None:
    """The README and the index link every page, and no link leads nowhere."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([\w./-]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
    index = (ROOT / "docs" / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == set(PAGES)
    assert README.count("\n") <= 170


def loop_of_a_stranger() -> dict[str, Any]:
    """What the snippets take for given, with one row that is NaN."""
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = x.sum(1, keepdim=True)
    x[100] = math.nan
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "accelerator": Accelerator(cpu=True),
        "dataset": torch.utils.data.TensorDataset(x, y),
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200),
        "mse_loss": mse_loss,
    }


SNIPPET = block(README, "python", "from resilient_train import Guard")
SAME_BY_STEP = block(PAGES["library"], "python", "def objective")


def test_the_snippets_for_a_loop_of_ones_own_recover(here: Path) -> None:
    """Printed as it is executed: at most ten lines more, a row that is NaN and is named, and weights that are not.

    With an objective it does the same; without a run directory it writes nothing."""
    assert 0 < SNIPPET.count("# +") <= 10
    handed_over, stepped = loop_of_a_stranger(), loop_of_a_stranger()
    exec(SNIPPET, handed_over)
    assert float(handed_over["loss"].detach()) < 0.5
    assert incidents(here / "runs/mine") == [in_words(incident) for incident in handed_over["guard"].incidents]
    (prepare,) = [line for line in SNIPPET.splitlines() if "accelerator.prepare" in line]
    before = set(here.rglob("*"))
    exec(f"from resilient_train import Guard\n{prepare}\n{SAME_BY_STEP}", stepped)
    assert set(here.rglob("*")) == before
    for space in (handed_over, stepped):
        diagnoses = {(one.diagnosis.cause, one.diagnosis.rows) for one in space["guard"].incidents}
        assert diagnoses == {(Cause.DATA, (100,))}
        assert is_finite(space["model"])


def test_the_snippet_that_draws_its_batches_recovers() -> None:
    """Updates that drew the row that is NaN are skipped, 4 micro-batches of 32 rows in each of the others."""
    space = {**loop_of_a_stranger(), "scaler": torch.amp.GradScaler("cpu"), "torch": torch}
    exec(f"from resilient_train import Guard\n{block(PAGES['library'], 'python', 'def get_batch')}", space)
    guard = space["guard"]
    assert guard.clock.step == 200
    assert guard.clock.tick > 200
    assert is_finite(space["model"])
    assert float(space["loss"].detach()) < 0.5


# docs/policies.md


@pytest.mark.usefixtures("here")
def test_a_policy_of_ones_own_recovers(run_command: command) -> None:
    """From a folder of one's own; a typo is told with its position, as the page says."""
    Path("mine/recovery").mkdir(parents=True)
    file = Path("mine/recovery/mine.yaml")
    file.write_text(block(POLICIES, "yaml", f"# {file}"))
    what = ["--config-dir", "mine", "model=mlp", "data=digits", "objective=classification", "run.steps=40"]
    what += ["tracking=none", "run.name=one"]
    outcome = run_command([*what, "recovery=mine", "drill=bit_flip", "drill.at=[30]"])
    assert outcome.code == 0, outcome.stderr
    (incident,) = incidents(Path("runs/one"))
    assert (incident["outcome"], incident["cause"]) == ("recovered", "corruption")
    file.write_text(file.read_text().replace("lower_lr", "lower_rl"))
    outcome = run_command([*what, "recovery=mine", "run.name=other"])
    (line,) = [line for line in block(POLICIES, "text").splitlines() if line.startswith("error:")]
    assert outcome.code == 2
    assert line.removesuffix("...") in outcome.stderr


def test_the_page_of_policies_lists_what_there_is() -> None:
    """Every remedy in the order in which they are applied, its settings, every cause, every key and its default."""
    assert [row[0] for row in table(POLICIES, "remedy")] == sorted(KNOWN, key=lambda name: KNOWN[name].order)
    for name, kind in KNOWN.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*\|(.*)\|$", POLICIES.split("## Remedies")[1], re.M)
        settings = {field.name for field in dataclasses.fields(typing.cast(Any, kind))}
        assert set(re.findall(r"`(\w+)`", row)) == settings, name
    assert names(POLICIES, "cause") == {*Cause}
    defaults = {**vars_of(Policy), **{f"budget.{name}": value for name, value in vars_of(Budget).items()}}
    assert names(POLICIES, "key") == {*defaults} - {"budget"}
    for key, value in defaults.items():
        if isinstance(value, int):
            assert re.search(rf"^\| `{key}` \|.*\| {str(value).lower()} \|$", POLICIES, re.M), key
    tree = yaml.safe_load(block(POLICIES, "yaml", "# mine/recovery/mine.yaml"))
    assert parse({"ladders": tree["ladders"]}).ladders == parse(tree).ladders, "only the ladders have to be given"


def vars_of(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(kind)}
