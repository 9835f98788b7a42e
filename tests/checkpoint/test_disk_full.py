"""A disk that fills up, or that may only be read, costs checkpoints and nothing else; with room again all goes on."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import command
from kills import incidents as listed
from kills import left_overs

from resilient_train.durable import manifest as manifests
from resilient_train.durable.journal import read
from resilient_train.durable.store import Store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")

RUN = ["model=mlp", "data=digits", "objective=classification", "schedule=constant", "tracking=none"]
RUN += ["checkpoint.disk.every=10", "checkpoint.memory.every=5", "checkpoint.verify_after=5", "checkpoint.disk.keep=1"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of 3 MiB; a checkpoint of the run here takes about 0.35."""
    (path := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", path], check=False).returncode:
        pytest.skip("a disk cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(disk: Path, leave: int = 0) -> None:
    """Take all room but so many bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with open(disk / "ballast", "ab") as file:
        file.write(bytes(max(0, free - leave)))


class At:
    """Does things when training comes to an update, in another thread, while the loop waits: `{step: do}`.

    What the writer is at is waited for before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: dict[int, Callable[[], Any]]) -> None:
        from resilient_train.loop.guard import Guard

        begin = Guard._begin

        def begun(guard: Guard, update: Any) -> Any:
            if (do := what.pop(guard.clock.step, None)) is not None:
                guard._keeper.wait()
                (thread := threading.Thread(target=do)).start()
                thread.join()
            time.sleep(0.005)  # so that the writer has its turn
            return begin(guard, update)

        monkeypatch.setattr(Guard, "_begin", begun)


def incidents(run_dir: Path) -> list[tuple[str, str]]:
    return [(one["signal"], one["outcome"]) for one in listed(run_dir)]


def saved(run_dir: Path) -> list[int]:
    """The steps of the checkpoints there, each of which verifies."""
    return [manifests.verify(entry.path).step for entry in Store(run_dir).entries()]


def test_a_disk_that_fills_in_the_middle_of_a_save(
    monkeypatch: pytest.MonkeyPatch, run_command: command, disk: Path
) -> None:
    """The run goes on and says so, the checkpoint before is whole, and with room again it is saved as before.

    Incidents meanwhile are in the journal, which stays readable, and in incidents.jsonl, each once.
    """
    seen: dict[str, Any] = {}
    journal = disk / "run/journal.jsonl"

    def full() -> None:
        seen["before"] = saved(disk / "run")
        fill(disk, 150_000)

    def free() -> None:
        seen["during"], seen["left"] = saved(disk / "run"), left_overs(disk / "run")
        seen["journal"] = [entry["n"] for entry in read(journal)]
        (disk / "ballast").unlink()

    At(monkeypatch, {40: full, 42: lambda: fill(disk), 100: free, 150: lambda: None})
    words = ["run.steps=200", f"run.dir={disk}/run", "drill=nan_batch", "drill.at=[45]"]
    outcome = run_command([*RUN, *words])
    assert outcome.code == 0, outcome.stderr
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert seen["before"] == seen["during"] != []
    assert seen["left"] == []
    assert seen["journal"] == [*range(1, len(seen["journal"]) + 1)]
    assert sorted(incidents(disk / "run")) == [("disk_full", "recovered"), ("nonfinite_batch", "recovered")]
    told = [line for line in (outcome.stdout + outcome.stderr).splitlines() if "No space left" in line]
    assert len([line for line in told if "could not be written" in line]) == 1
    assert ": recovered" in outcome.stdout + outcome.stderr
    assert saved(disk / "run") == [200]
    assert left_overs(disk / "run") == []
    entries = read(journal)
    assert [entry["n"] for entry in entries] == [*range(1, len(entries) + 1)]
    kinds = [entry["kind"] for entry in entries]
    assert [kinds.count(kind) for kind in ("incident_opened", "incident_treated", "incident_closed")] == [2, 2, 2]
    assert any(100 < entry["step"] < 200 for entry in entries if entry["kind"] == "checkpoint_saved")
