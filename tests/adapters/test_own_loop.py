"""A loop of somebody's own, seen from outside: where it stands, how it ended, what it says last, what MLflow gets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fork_server import ENVIRONMENT
from group import Group, launch
from guarded import guard_over, mse, sums
from kills import summary

from resilient_train.command import incidents, status, sync
from resilient_train.durable.lock import DirectoryLock
from resilient_train.ground.errors import GaveUp
from resilient_train.loop.guard import Guard

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from resilient_train import GaveUp, Guard
from resilient_train.loop import reporter

reporter._DRAIN_S = 240.0  # a busy machine is no failure
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
how, more = sys.argv[1], eval(sys.argv[2]) if len(sys.argv) > 2 else {}
model = accelerator.prepare(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
x = torch.randn(256, 4)
x[5] = float("nan")
data = torch.utils.data.TensorDataset(x, x.nan_to_num().sum(1, keepdim=True))


def main():
    guard = Guard(accelerator, model, optimizer, data=data, batch_size=16, steps=120, run_dir="mine",
                  objective=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
                  stop=lambda: how == "stop" and guard.clock.step >= 70, **more)
    for end in (35, 64, 1000) if how == "again" else (1000,):
        for batch in guard.batches():
            guard.step(batch)
            if guard.clock.step >= 70 and how in ACTS:
                ACTS[how]()
                break
            if guard.clock.step >= end:
                break
    if how == "again":
        guard.evaluated({"loss": 0.25})
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
        "exit": lambda: sys.exit(1)}
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


def guard_of(run_dir: Path, **more: Any) -> Guard:
    return guard_over(**{"data": sums(64), "batch_size": 8, "objective": mse, "run_dir": run_dir, **more})


def said(capsys: pytest.CaptureFixture[str], place: Path) -> tuple[int, str]:
    capsys.readouterr()
    code = status.main([str(place / "mine")])
    return code, capsys.readouterr().out.strip().removeprefix(f"{place / 'mine'}: ")


@pytest.mark.parametrize(
    ("how", "more", "ends", "code", "verdict"),
    [
        ("end", {}, 0, 0, "120 steps"),
        ("close", {}, 0, 0, "closed at step 71 of 120"),
        ("break", {}, 0, 1, "left without guard.close() at step 70 of 120"),
        ("exit", {}, 1, 1, "left without guard.close() at step 70 of 120"),
        ("kill", {}, -9, 1, "Killed (no exit message)"),
        ("stop", {"resume": True, "disk": 20}, 0, 75, "Stopped on request: at step 71 of 120"),
        ("end", {"recovery": "off"}, 0, 3, "Gave up"),
    ],
)
def test_the_end_of_a_loop_is_known_by_its_directory(
    how: str,
    more: dict[str, object],
    ends: int,
    code: int,
    verdict: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`status` and `incidents` say it, summary.json has the contract's form, and the last words are a review."""
    done = launch(place, 1, "own.py", how, repr(more))
    assert done.codes == [ends], done.stderr
    found, told = said(capsys, place)
    assert found == code
    assert verdict in told
    assert incidents.main([str(place / "mine")]) == 0
    assert told.startswith(capsys.readouterr().out.splitlines()[0])
    if how == "kill":
        return
    review = [words.removeprefix("resilient_train: ") for words in done.stderr.splitlines()]
    assert sum("for the full report" in words for words in review) == 1, done.stderr
    assert any("1 incident (1 data)" in words for words in review)
    assert done.stderr.count("resilient_train: ! incident ") == (code != 3)
    written = summary(place / "mine")
    assert written["exit_code"] == code
    assert written["incidents"]["by_cause"] == {"data": 1}
    assert (written["weights_sha256"] is not None) == (written["status"] == "completed" and how == "end")
    assert written["step_ms"] is None or written["step_ms"] > 0


def test_a_loop_is_at_work_until_it_says_otherwise(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process may be at other things behind the loop; one that is still in it is at work."""
    where = r"step (69|70) of 120"
    with Group(place, 1, "own.py", "wait") as group:
        group.until(lambda: re.search(where, said(capsys, place)[1]) is not None)
        code, line = said(capsys, place)
        assert code == 0
        assert f" Running, process {group.ranks[0].pid} on " in line
        (place / "mine/go").touch()
        assert group.wait().is_well
    assert "left without guard.close() at step 70 of 120" in said(capsys, place)[1]
    with Group(place, 1, "own.py", "stay") as group:
        group.until(lambda: "behind the loop" in place.with_name("here.out").read_text())
        capsys.readouterr()
        assert status.main([str(place / "mine-2")]) == 0
        assert "Recovered: 120 steps" in capsys.readouterr().out
        group.ranks[0].kill()


def test_an_interpreter_of_its_own_knows_of_the_error_that_ended_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server that forked it: a plain `python own.py`."""
    done = subprocess.run(
        [sys.executable, "own.py", "fail"], cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert "ValueError: of mine" in done.stderr
    code, line = said(capsys, place)
    assert code == 1
    assert re.match(r"Failed: at step 70 of 120: ValueError: of mine \(.*own.py:\d+\)", line), line
    assert summary(place / "mine")["exit_code"] == 1


AT_WORK = """
import torch
from torch.nn.functional import mse_loss
from resilient_train import Guard
from resilient_train.ground.reader import MemoryConfig

model = torch.nn.Linear(2000, 2000)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
guard = Guard(
    *(None, model, optimizer), data=torch.randn(64, 2000), batch_size=2, steps=100, verify_after=2,
    objective=lambda model, x: mse_loss(model(x), x), run_dir="mine", disk=40, memory=MemoryConfig(20, 3, None),
)
for batch in guard.batches(43):
    guard.step(batch)
"""


def test_a_program_that_ends_waits_for_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    """Its thread would be stopped in the middle of torch's code, which aborts the process."""
    (tmp_path / "work.py").write_text(AT_WORK)
    done = launch(tmp_path, 1, "work.py")
    assert done.is_well, done.stderr
    assert "mine/checkpoints/step-00000040 (step 40)" in done.stderr


# -------------------------------------------------------------------------------------------------------------- MLflow


def shown(place: Path) -> dict[str, Any]:
    """What MLflow has of all runs: one run, or this fails."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place}/live.db")
    experiments = [one.experiment_id for one in client.search_experiments(filter_string="name != 'Default'")]
    (run,) = client.search_runs(experiments)
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "tags": run.data.tags,
        "files": {one.path for one in client.list_artifacts(run.info.run_id)},
        "losses": [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")],
    }


# MLflow 3.17 declares a mapping in a way that SQLAlchemy 2.1 is going to drop.
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
@pytest.mark.timeout(400)
def test_a_loop_is_shown_as_a_run_of_ours_is(place: Path, empty_store: Path) -> None:
    """As one run, though it is left twice by a break; every tenth update, what it evaluates when it is over, its
    incidents and its end. Asked for on one rank alone, and all take part.
    """
    shutil.copy(empty_store, place / "live.db")
    uri = f"f'sqlite:///{place}/live.db' if accelerator.is_main_process else None"
    done = launch(place, 2, "own.py", "again", f"{{'tracking': {uri}}}")
    assert done.is_well, done.stderr
    assert "another process is uploading" not in done.stderr
    assert done.stderr.count("for the full report") == done.stderr.count("to see it, start") == 1
    found = shown(place)
    assert (found["name"], found["status"], found["tags"]["resilience.incidents"]) == ("mine", "FINISHED", "1")
    assert found["losses"] == [tick for tick in found["losses"] if tick % 10 in (0, 1)]
    assert len(found["losses"]) == 12
    assert {"loop.json", "incidents.jsonl"} <= found["files"]
    written = summary(place / "mine")
    assert (written["status"], written["eval"]) == ("completed", {"loss": 0.25})
    assert written["mlflow"]["tracking_uri"] == f"sqlite:///{place}/live.db"
    assert sync.main([str(place / "mine")]) == 0
    assert shown(place) == found


def test_a_guard_that_could_not_be_made_leaves_its_directory_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever raised: a notebook has no guard to close, and its cell is run again."""
    more: dict[str, Any] = {"disk": 0, "resume": True}
    for culprit in ("guard.Controls", "guard.EngineGuard.__init__", "reporter.IncidentLog"):
        with monkeypatch.context() as patched:
            patched.setattr(f"resilient_train.loop.{culprit}", lambda *_, **__: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                guard_of(tmp_path / "cell", **more)
    guard_of(tmp_path / "cell", **more).close()


@pytest.mark.parametrize("error", [GaveUp("no more", None), RuntimeError("a lost disk")])
def test_a_close_that_raises_still_lets_go(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lock, the patches and the workers; and the summary says what it raised."""
    guard = guard_of(tmp_path / "run", steps=3)
    for batch in guard.batches(2):
        guard.step(batch)
    monkeypatch.setattr(guard, "settle", Mock(side_effect=error))
    let_go = []
    monkeypatch.setattr(guard.samples, "close", lambda: let_go.append(True))
    with pytest.raises(type(error)):
        guard.close()
    assert let_go
    DirectoryLock(tmp_path / "run").release()
    assert str(error) in summary(tmp_path / "run")["why"]


def test_an_error_right_after_a_rewind_leaves_the_incident_open(tmp_path: Path) -> None:
    """Nothing has shown that the run recovered; the process that resumes goes on with it."""
    with pytest.raises(RuntimeError, match="right after"), closing(guard_of(tmp_path / "run", steps=90)) as guard:  # noqa: PT012
        for batch in guard.batches():
            guard.step(batch)
            if guard.clock.tick == 60:
                next(guard.model.parameters()).data.fill_(1e30)
            if guard.incidents:
                raise RuntimeError("right after the rewind")
    written = summary(tmp_path / "run")
    assert (written["status"], written["incidents"]["total"], written["incidents"]["recovered"]) == ("failed", 1, 0)
    assert (tmp_path / "run/incidents.jsonl").read_text() == ""
    assert not [one for one in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(one)]


EXITS = """
import atexit, threading
import torch
from resilient_train import Guard

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def made(name):
    model = torch.nn.Linear(2, 1)
    guard = Guard(None, model, torch.optim.SGD(model.parameters(), 0.1), data=[torch.ones(2)] * 8, batch_size=4,
                  steps=9, run_dir=name, objective=lambda model, batch: model(batch).mean(), tracking="http://127.0.0.1:9")
    for batch in guard.batches():
        guard.step(batch)
        return guard

guards = [made(name) for name in ("one", "two", "three")]
guards[1].reporter.left = lambda error: 1 / 0
atexit.register(setattr, threading.Thread, "start", refuse)
"""


def test_each_loop_is_reported_at_the_exit_where_no_thread_can_be_started(tmp_path: Path) -> None:
    """As in Python 3.12: what is to be uploaded is left on disk, and how to upload it is printed."""
    (tmp_path / "exits.py").write_text(EXITS)
    done = launch(tmp_path, 1, "exits.py")
    assert done.is_well, done.stderr
    for name in ("one", "three"):
        assert summary(tmp_path / name)["status"] == "ended"
        assert '"kind": "began"' in (tmp_path / name / "outbox.jsonl").read_text()
    assert done.stderr.count("to upload the rest") == 2
    assert "two could not be reported: ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr
