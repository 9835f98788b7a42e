"""notify.command: who is alerted, with what, and what a broken alert costs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from command import command
from group import launch

from resilient_train.command.config.compose import load
from resilient_train.ground.errors import ConfigError
from resilient_train.report.story import read_story

pytestmark = pytest.mark.usefixtures("here")

SMALL = ["model=mlp", "data=digits", "objective=classification", "run.steps=12", "run.name=one", "tracking=none"]
NOTE = shlex.join([sys.executable, "-c", "import sys; open('alert.json', 'a').write(sys.stdin.read())"])


def quoted(words: str) -> str:
    """Write a command as Hydra reads it."""
    return "notify.command='" + words.replace("'", "\\'") + "'"


@pytest.mark.parametrize(
    ("more", "code", "event", "status"),
    [
        (["drill=nan_grad", "recovery=off"], 3, "gave_up", "gave_up"),
        (["objective=custom", "objective._target_=mine.broken"], 1, "error", "failed"),
    ],
    ids=["gave up", "error"],
)
def test_a_run_that_needs_attention_runs_the_command(
    more: list[str], code: int, event: str, status: str, monkeypatch: pytest.MonkeyPatch, run_command: command
) -> None:
    """With one line of JSON on its standard input, in which secrets are masked; a run that is complete does not."""
    monkeypatch.setenv("ALERT_TOKEN", "s3cret-of-mine")
    monkeypatch.syspath_prepend(Path.cwd())
    Path("mine.py").write_text("def broken(model, batch):\n    raise RuntimeError('s3cret-of-mine is not here')\n")
    outcome = run_command([*SMALL, *more, quoted(NOTE)])
    assert outcome.code == code, outcome.stderr
    (line,) = Path("alert.json").read_text().splitlines()
    about = json.loads(line)
    assert (about["event"], about["status"], about["exit_code"]) == (event, status, code)
    assert Path(about["run_dir"]) == Path("runs/one").absolute()
    assert about["message"]
    assert "s3cret" not in line
    Path("alert.json").unlink()
    assert run_command([*SMALL, "run.name=other", quoted(NOTE)]).code == 0
    assert not Path("alert.json").exists()


def test_a_hang_before_the_first_update_is_reported_like_any_other() -> None:
    """With an incident, a summary and an alert, from the thread of the watchdog: the user's code does not even return
    the model."""
    code = ["import time", "def model():", "    time.sleep(3600)", "def rows():", "    return [(0.0, 1)] * 64"]
    Path("mine.py").write_text("\n".join(code))
    words = ["model=custom", "model._target_=mine.model", "data=custom", "data.train._target_=mine.rows"]
    words += [*SMALL[2:], "run.start_timeout=10", quoted(NOTE)]
    done = launch(Path.cwd(), 1, "-m", "resilient_train", *words)
    about = json.loads(Path("alert.json").read_text())
    assert (done.codes, about["event"], about["exit_code"]) == ([1], "hang", 1), done.stderr
    assert "mine.py:3, in model" in Path("runs/one/journal.jsonl").read_text()
    found = read_story(Path("runs/one"))
    assert (found.state, found.step) == ("failed", 0)
    assert "mine.py:3, in model" in str(found.why)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("no-such-program --now", "notify.command could not be run"),
        (f"{sys.executable} -c 'import os; exit(os.write(2, bytes([255])))'", "notify.command exited with 1: \ufffd"),
    ],
    ids=["not there", "fails, not in UTF-8"],
)
def test_a_failing_command_is_a_warning(words: str, said: str, run_command: command) -> None:
    """It changes neither the exit code nor what the run leaves."""
    outcome = run_command([*SMALL, "drill=nan_grad", "recovery=off", quoted(words)])
    assert outcome.code == 3
    assert said in outcome.stderr + outcome.stdout
    assert outcome.summary("runs/one")["status"] == "gave_up"


def test_a_command_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"notify\.command"):
        load([*SMALL, quoted('a "b')])
