"""A loop of somebody's own, seen from outside: where it stands, how it ended, what it says last, what MLflow gets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from group import Group, launch
from warm import ENVIRONMENT

from resilient_train import incidents, status

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from resilient_train import GaveUp, Guard

how, more = sys.argv[1], eval(sys.argv[2]) if len(sys.argv) > 2 else {}
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
x = torch.randn(256, 4)
x[5] = float("nan")
data = torch.utils.data.TensorDataset(x, x.nan_to_num().sum(1, keepdim=True))


def main():
    guard = Guard(accelerator, model, optimizer, data=data, batch_size=16, run_dir="mine",
                  objective=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
                  stop=lambda: how == "stop" and guard.clock.step >= 70, **more)
    for batch in guard.batches(steps=120):
        guard.step(batch)
        if guard.clock.step >= 70 and how in ACTS:
            ACTS[how]()
            break
    if how in ("close", "stop"):
        guard.leave() if how == "stop" else guard.close()
    print("behind the loop", flush=True)
    while how == "stay":
        time.sleep(0.01)


def wait():
    while not Path("mine/go").exists():
        time.sleep(0.01)


def fail():
    raise ValueError("of mine")


ACTS = {"break": int, "close": int, "fail": fail, "kill": lambda: os.kill(os.getpid(), 9), "wait": wait,
        "exit": sys.exit}
try:
    main()
except GaveUp:
    print("gave up, and lived on")
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/own.py").write_text(PROGRAM)
    return tmp_path / "here"


def said(capsys: pytest.CaptureFixture[str], place: Path) -> tuple[int, str]:
    """What `status` answers."""
    capsys.readouterr()
    code = status.main([str(place / "mine")])
    return code, capsys.readouterr().out.strip().removeprefix(f"{place / 'mine'}: ")


ANEW = "; the same command begins anew, in a directory beside it"


@pytest.mark.parametrize(
    ("how", "more", "ends", "code", "line", "verdict"),
    [
        ("end", {}, 0, 0, "completed, 120 steps", "120 steps"),
        ("close", {}, 0, 0, "completed, 71 steps", "71 steps"),
        (
            *("break", {}, 0, 0, f"its process ended in order at step 70 of 120, before the last one{ANEW}"),
            "left at step 70 of 120",
        ),
        ("fail", {}, 1, 1, r"failed at step 70 of 120: ValueError: of mine \(.*own.py:\d+\)", "Failed: at step 70"),
        ("kill", {}, -9, 1, f"killed without a word at step [67]. of 120{ANEW}", "Killed without a word"),
        (
            *("stop", {"resume": True, "disk": 20}, 0, 75, r"stopped on request at step 71 of 120; the same command"),
            "Stopped on request: at step 71 of 120",
        ),
        ("end", {"recovery": "off"}, 0, 3, "gave up at step .*; the last good state is in .*step-00000000", "Gave up"),
    ],
)
def test_the_end_of_a_loop_is_known_by_its_directory(
    how: str,
    more: dict[str, object],
    ends: int,
    code: int,
    line: str,
    verdict: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`status` and `incidents` say it, summary.json has the contract's form, and the last words are a review."""
    done = launch(place, 1, "own.py", how, repr(more))
    assert done.codes == [ends], done.stderr
    found, told = said(capsys, place)
    assert found == code
    assert re.match(line, told), told
    assert incidents.main([str(place / "mine")]) == 0
    assert verdict in capsys.readouterr().out.splitlines()[0]
    if how == "kill":
        return
    review = [words.removeprefix("resilient_train: ") for words in done.stderr.splitlines()]
    assert sum("tells all of it" in words for words in review) == 1, done.stderr
    assert any("met 1 incident (1 data)" in words for words in review)
    summary = json.loads((place / "mine/summary.json").read_text())
    assert summary["exit_code"] == code
    assert summary["incidents"]["by_cause"] == {"data": 1}
    assert (summary["weights_sha256"] is not None) == (summary["status"] == "completed" and how == "end")
    assert summary["step_ms"] is None or summary["step_ms"] > 0


def test_a_loop_is_at_work_until_it_says_otherwise(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process may be at other things behind the loop; one that is still in it is at work."""
    where = r"step (69|70) of 120"
    with Group(place, 1, "own.py", "wait") as group:
        group.until(lambda: re.search(where, said(capsys, place)[1]) is not None)
        code, line = said(capsys, place)
        assert code == 0
        assert re.match(rf"running, {where}, process {group.ranks[0].pid} on ", line)
        (place / "mine/go").touch()
        assert group.wait().is_well
    assert said(capsys, place)[1].startswith("its process ended in order at step 70 of 120")
    with Group(place, 1, "own.py", "stay") as group:
        group.until(lambda: "behind the loop" in place.with_name("here.out").read_text())
        capsys.readouterr()
        assert status.main([str(place / "mine-2")]) == 0
        assert "completed, 120 steps" in capsys.readouterr().out
        group.ranks[0].kill()


def test_a_loop_that_is_run_again_takes_back_what_it_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped, then completed by the same command."""
    more = repr({"resume": True, "disk": 20})
    for how, told in (("stop", "stopped on request"), ("kill", "killed"), ("end", "completed, 120 steps")):
        launch(place, 1, "own.py", how, more)
        assert said(capsys, place)[1].startswith(told)


def test_an_interpreter_of_its_own_knows_of_the_error_that_ended_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server that forked it: a plain `python own.py`."""
    done = subprocess.run(
        [sys.executable, "own.py", "fail"], cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert "ValueError: of mine" in done.stderr
    assert said(capsys, place)[1].startswith("failed at step 70 of 120: ValueError: of mine")
