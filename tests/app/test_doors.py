"""The doors to a run that is not at work in this process: where it stands, and what a resume would take."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command import MINE, command
from fork_server import ENVIRONMENT
from kills import COMMAND, Nursery, stand, summary
from launched import Launched, never_imported

from resilient_train.command import checkpoints, examine, incidents, status, sync

FOR_EVER = "run.steps=10000000"

Said = pytest.CaptureFixture[str]


def told(said: Said, run_dir: Path) -> tuple[int, str]:
    """The exit code of `status`, and its one line without the name of the directory."""
    said.readouterr()
    code = status.main([str(run_dir)])
    (line,) = "".join(said.readouterr()).splitlines()
    return code, line.removeprefix(f"{run_dir}: ")


# -------------------------------------------------------------------------------------------------------------- status


def test_status_follows_a_run_through_kills_and_stops(nursery: Nursery, capsys: Said) -> None:
    """Whatever the process before left behind, it is the newest one that is spoken of."""
    run_dir = nursery.place / "runs" / "followed"
    command = [*MINE, "run.name=followed", "checkpoint.disk.every=10", "checkpoint.verify_after=2"]
    assert told(capsys, run_dir)[0] == 2

    first = nursery.start(*command, FOR_EVER)
    assert first.until(lambda: any((run_dir / "checkpoints").glob("step-*")) and stand(run_dir).step >= 30)
    code, line = told(capsys, run_dir)
    assert code == 0
    assert re.fullmatch(rf"All is well so far: at step .* of 10,000,000; .* Running, process {first.pid} on \S+", line)
    first.strike(signal.SIGKILL)
    first.wait()
    at = stand(run_dir).step
    code, line = told(capsys, run_dir)
    assert code == 1
    assert line.startswith(f"Killed (no exit message): at step {at:,} of 10,000,000; ")

    second = nursery.start(*command, FOR_EVER)
    second.until(lambda: stand(run_dir).step > at + 20)
    second.strike(signal.SIGTERM)
    assert second.wait() == 75
    at = summary(run_dir)["steps"]
    code, line = told(capsys, run_dir)
    assert code == 75
    assert line.startswith(f"Stopped on request: at step {at:,} of 10,000,000; 1 incident (1 process)")

    last = nursery.run(*command, f"run.steps={at + 500}")
    assert last.code == 0
    code, line = told(capsys, run_dir)
    assert code == 0
    assert line.startswith(f"Recovered: {at + 500:,} steps; 1 incident (1 process)")


def test_a_refused_start_is_told_until_one_goes_well(nursery: Nursery, capsys: Said) -> None:
    """A launcher makes 1 of a 2, so what a wrong configuration was told stays in the directory that it meant."""
    run_dir, launched = nursery.place / "runs" / "kept", {"WORLD_SIZE": "1", "RANK": "0"}
    command = [*MINE, "run.dir=runs/kept", "run.steps=5"]
    assert nursery.run(*command).code == 0
    for wrong in ("optimizer.lr=0.5", "optimizer.lrr=1"):
        assert nursery.run(*command, wrong, **launched).code == 2
        code, line = told(capsys, run_dir)
        assert code == 2
        assert line.startswith("The last start failed: ")
        assert "optimizer.lr" in line
    assert nursery.run(*command).code == 0
    assert told(capsys, run_dir)[1].startswith("All is well: 5 steps; no incidents.")


@pytest.mark.parametrize("content", [None, '{"exit_code": true}', "\x00"])
def test_status_of_what_is_no_run_is_2_and_of_nonsense_1(content: str | None, tmp_path: Path, capsys: Said) -> None:
    for name in ("summary.json", "refused.json", "progress", ".lock", "train.log"):
        if content is not None:
            (tmp_path / name).write_text(content)
    assert told(capsys, tmp_path)[0] == 2
    if content is not None:
        (tmp_path / "config.yaml").write_text("run: !!python/object/apply:os.abort []\n")
        assert told(capsys, tmp_path)[1].startswith("Killed (no exit message): at step 0; ")


# --------------------------------------------------------------------------------------------------------- checkpoints


OFTEN = ["checkpoint.disk.every=10", "checkpoint.memory.every=10", "checkpoint.verify_after=2"]


@pytest.fixture(scope="module")
def original(nursery: Nursery) -> Path:
    assert nursery.run(*MINE, "run.name=saved", "run.steps=40", *OFTEN).code == 0
    return nursery.place / "runs" / "saved"


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def listed(said: Said, run_dir: Path) -> tuple[int, str | None, dict[str, str]]:
    """The exit code of `checkpoints`, what a resume would take, and the kind of each, the newest first."""
    said.readouterr()
    code = checkpoints.main([str(run_dir)])
    *rows, last = said.readouterr().out.splitlines()
    resume = re.match(r"a resume would load (\S+-\d+)", last)
    return code, resume[1] if resume else None, dict(row.split()[:2] for row in rows)


def test_checkpoints_are_listed_and_the_newest_that_verifies_is_taken(
    saved: Path, run_command: command, capsys: Said
) -> None:
    """One bit is enough for this list, and for a resume, to pass a checkpoint over."""
    names = sorted((one.name for one in (saved / "checkpoints").iterdir()), reverse=True)
    newest, second, *_ = names
    assert listed(capsys, saved) == (0, newest, dict.fromkeys(names, "verified"))
    file = saved / "checkpoints" / newest / "tensors.safetensors"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    assert listed(capsys, saved) == (0, second, dict.fromkeys(names, "verified") | {newest: "damaged"})
    assert checkpoints.main([str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"{newest} +damaged +step 40 +[\d.]+ MB +tensors.safetensors (is not what|does not say) .*",
        lines[0],
    )
    assert re.fullmatch(rf"{second} +verified +step {int(second[5:])} +[\d.]+ MB", lines[1])
    assert lines[-1] == f"a resume would load {second}"
    again = run_command([*MINE, f"run.dir={saved}", "run.name=saved", "run.steps=45", *OFTEN])
    assert again.code == 0, again.stderr
    assert f"resumes from step {int(second[5:])}\n" in (saved / "train.log").read_text()


def test_checkpoints_of_which_none_verifies_end_with_1(saved: Path, capsys: Said) -> None:
    for manifest in (saved / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("\x1b[2J")
    assert checkpoints.main([str(saved)]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "none of those that were written; run.resume=never starts a new run" in said
    shutil.rmtree(saved / "checkpoints")
    assert checkpoints.main([str(saved)]) == 1
    assert "none of those that were written" in capsys.readouterr().out


def test_checkpoints_that_are_not_there(tmp_path: Path, capsys: Said) -> None:
    """A run without any begins at its first step, which is no trouble; where no run is, all verbs say the same."""
    for verb in (checkpoints, incidents, status, sync, examine):
        for path in (tmp_path, tmp_path / "nowhere"):
            assert verb.main([str(path)]) == 2
            said = capsys.readouterr().err.removeprefix("error: ")
            assert said == f"{path}: no run there; expected the directory of a run, such as runs/NAME\n"
    (tmp_path / "config.yaml").touch()
    assert listed(capsys, tmp_path) == (0, None, {})


# ------------------------------------------------------------------------------------------------- ends of a process


def test_ctrl_c_while_everything_is_imported_ends_it_quietly(tmp_path: Path) -> None:
    """Nothing was begun, so there is nothing to say and nothing to leave: here something is imported for ever."""
    never_imported(tmp_path)
    process = subprocess.Popen([*COMMAND, *MINE], cwd=tmp_path, env=ENVIRONMENT, stdout=-1, stderr=-1)
    while not list(tmp_path.glob("imports.*")):
        assert process.poll() is None
        time.sleep(0.01)
    while process.poll() is None:  # Python drops an error that is raised while it frees something: a person asks again
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    assert (process.returncode, *process.communicate()) == (1, b"", b"")
    assert not (tmp_path / "runs").exists()


def test_an_agent_does_not_restart_what_would_end_the_same_way(tmp_path: Path, capsys: Said) -> None:
    """For the agent it went well; `status` has the true exit code."""
    own = [*MINE, "run.dir=run", "drill=nan_grad", "recovery=off", "run.steps=20"]
    with Launched(tmp_path, 1, *own, restarts=2) as launched:
        assert launched.wait() == 0
    assert (tmp_path / "run/train.log").read_text().count(" resilient_train 0.") == 1
    code, line = told(capsys, tmp_path / "run")
    assert (code, line.startswith("Gave up")) == (3, True)
