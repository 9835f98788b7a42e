"""What becomes of a run, and of a command that tells of one, when nobody reads what it says any more."""

from __future__ import annotations

import os
import pty
import select
import signal
import time
from pathlib import Path

from command import MINE
from flaky_mlflow import Door
from fork_server import ENVIRONMENT, Forked, python

LONG = [*MINE, "run.steps=300", "run.log_every=1", "run.name=run", "checkpoint.disk.every=0"]


def its_log(place: Path) -> str:
    return (place / "runs/run/train.log").read_text()


def test_a_run_whose_pipe_is_closed_goes_on_to_its_end(tmp_path: Path) -> None:
    """As with `| head -3`: train.log has all of it, the exit code is the run's own."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = ["-m", "resilient_train", *LONG, "objective._target_=user_programs.RaisesLater"]
    run = Forked(python, *words, place=tmp_path, out=pipe, errors=tmp_path / "errors.txt")
    with pipe.open() as said:
        head = [said.readline() for _ in range(3)]
    assert head[0].startswith("resilient_train ")
    assert run.ended(240) == 1
    assert " ERROR error: " in its_log(tmp_path)
    errors = (tmp_path / "errors.txt").read_text()
    assert [line.split()[0] for line in errors.splitlines()] == ["error:"]


def test_a_run_whose_terminal_is_closed_goes_on_to_its_end(tmp_path: Path) -> None:
    """As when an ssh session ends: both streams are gone, and its shell hangs up."""
    master, slave = pty.openpty()
    name = Path(os.ttyname(slave))
    environment = {**ENVIRONMENT, "TERM": "xterm-256color"}
    run = Forked(python, "-m", "resilient_train", *LONG, place=tmp_path, out=name, environment=environment)
    heard = b""
    while b"/300" not in heard and run.ended() is None:
        if select.select([master], [], [], 1.0)[0]:
            heard += os.read(master, 4096)
    os.close(slave)
    os.close(master)
    if run.ended() is None:
        run.strike(signal.SIGHUP)
    assert run.ended(240) == 0
    told = its_log(tmp_path)
    assert "step 300/300" in told
    assert "INFO completed 300 steps;" in told


# ------------------------------------------------------------------------------------------------ MLflow at the end


def test_who_waits_for_mlflow_is_told_why_and_may_leave(tmp_path: Path) -> None:
    """A server that never answers, and time for it: Ctrl-C leaves the rest, says how to upload it, harms nothing."""
    door = Door("http://127.0.0.1:1")
    door.mood = "hang"
    out = tmp_path / "out.txt"
    more = ["tracking=mlflow", f"tracking.uri={door.address}", "tracking.drain_s=600", "run.steps=3"]
    run = Forked(python, "-m", "resilient_train", *[*LONG, *more], place=tmp_path, out=out)
    try:
        why = "uploading to MLflow, for up to 600 s; Ctrl-C leaves the rest to "
        deadline = time.monotonic() + 200
        while not out.exists() or why not in out.read_text():
            assert time.monotonic() < deadline
            assert run.ended(0.1) is None, out.read_text()
        run.strike(signal.SIGINT)
        assert run.ended(60) == 0
    finally:
        run.kill()
        door.close()
    told = out.read_text().splitlines()
    assert told[-2].endswith("; to upload the rest, from any machine:")
    assert told[-1].endswith(f" -m resilient_train sync {tmp_path}/runs/run")
