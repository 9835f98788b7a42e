"""The shop window: every command in it is one that works."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from command import command

from resilient_train.config.compose import load

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", README, re.S))
COMMANDS = [line.split("#")[0].strip() for line in CONSOLE.splitlines() if line.strip()]
TRAINING = [line.split("-m resilient_train", 1)[1] for line in COMMANDS if "-m resilient_train" in line]


def test_there_is_something_to_check() -> None:
    """The patterns above find what they are looking for."""
    assert len(TRAINING) >= 7
    assert len(COMMANDS) > len(TRAINING)


@pytest.mark.parametrize("line", TRAINING)
def test_every_training_command_is_valid(line: str) -> None:
    """Its overrides compose into a checked configuration."""
    words = [word for word in shlex.split(line) if not word.startswith("--")]
    assert load([word.replace("0,1,2", "0") for word in words]).config.run.steps > 0


def test_scripts_that_are_named_exist() -> None:
    """So do the folders and files."""
    for path in re.findall(r"`?((?:scripts|tests|constraints|benchmarks|resilient_train)/[\w./]*\w)", README):
        assert (ROOT / path).exists(), path
    for name in ("Dockerfile", "CONTRIBUTING.md", "pyproject.toml"):
        assert (ROOT / name).exists()


def test_the_own_code_of_the_readme_trains_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: command
) -> None:
    """The module and the command are taken from the page to the letter."""
    (module,) = re.findall(r"```python\n# mine.py\n(.*?)```", README, re.S)
    (tmp_path / "mine.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = [line for line in TRAINING if "mine.Net" in line]
    outcome = run_command([*shlex.split(line), "run.steps=60", "run.name=own", "tracking=none"])
    assert outcome.code == 0, outcome.stderr
    assert outcome.summary("runs/own")["final_loss"] < 8


def test_install_lines_name_extras_that_exist() -> None:
    """pip would only warn about a misspelt one."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r'-e "\.\[(\w+)\]"', README)) <= set(extras)


def test_the_table_of_files_is_what_a_run_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: command
) -> None:
    """Every file of the table is there after a run."""
    monkeypatch.chdir(tmp_path)
    what = ["model=mlp", "data=digits", "objective=classification", "run.steps=1", "tracking=none", "run.name=one"]
    assert run_command(what).code == 0
    table = README.split("| in the run directory")[1].split("\n\n")[0]
    named = set(re.findall(r"^\| `([\w.]+)`", table, re.M))
    assert named == {path.name for path in (tmp_path / "runs/one").iterdir()} - {".lock"}


def test_scripts_answer_to_help_or_run() -> None:
    """The two commands of the first screen are there and can be executed."""
    for name in ("demo", "test"):
        assert subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)], check=False).returncode == 0
