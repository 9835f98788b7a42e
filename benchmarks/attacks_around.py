"""The inputs of `attacks.py` that come from around a run: its environment, secrets, signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attacks_inputs import Attack
from attacks_place import GOAL, OFFLINE, RUN, TRAIN_S, Failed, Place, Said, Skipped, Started, judged, kill_group
from kills import SAVING, incidents, stand
from warm import python

# --------------------------------------------------------------------------------------------------------- environment


def _in_a_setting(setting: Callable[[], object], *words: str) -> None:
    setting()
    python("-m", "resilient_train", *words)


def within(setting: Callable[[], object], *words: str, codes: tuple[int, ...] = (1, 2), **environment: Any) -> Attack:
    """Go on with a run in a process that the setting was made for."""

    def attack(place: Place) -> None:
        place.copy()
        own = [*RUN, OFFLINE, f"run.dir={place.run_dir}", f"run.steps={GOAL}", *words]
        around = place.environment(**environment)
        said = place.start(_in_a_setting, setting, *own, environment=around).end("the run", TRAIN_S)
        ends_well(place, said, codes)

    return attack


def ends_well(place: Place, said: Said, codes: tuple[int, ...], run_dir: Path | None = None, steps: int = GOAL) -> None:
    if said.code == 0:
        place.unharmed(said, run_dir, steps=steps)
    else:
        place.refused(said, *codes)


def interpreter(place: Place, *words: str, flags: Sequence[str] = (), limit_s: float = TRAIN_S, **more: Any) -> Said:
    """Train by a Python of its own, which has imported nothing, with the environment and streams that are given."""
    environment = place.environment(**more.pop("environment", {}))
    for name in more.pop("without", ()):
        environment.pop(name, None)
    command = [sys.executable, *flags, "-m", "resilient_train", *RUN, "run.dir=run", OFFLINE, *words]
    command += [] if any(word.startswith("run.steps=") for word in words) else [f"run.steps={GOAL}"]
    out, err = place.path / "out-0.txt", place.path / "err-0.txt"
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr, **more}
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=place.path, env=environment, start_new_session=True, **streams)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"hangs: the run has not ended after {limit_s:.0f} s") from None
        finally:
            kill_group(process.pid)
    return judged("the run", code, out, err, time.monotonic() - began)


@contextlib.contextmanager
def mounted(at: Path, options: str) -> Iterator[None]:
    """A file system of its own, in memory, which only processes of this group see."""
    at.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    private = libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0
    if not private or libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", 0, options.encode()) != 0:
        raise Skipped("nothing can be mounted here")
    try:
        yield
    finally:
        libc.umount2(str(at).encode(), 2)


def python_of_its_own(*words: str, **given: Any) -> Attack:
    def attack(place: Place) -> None:
        place.copy()
        ends_well(place, interpreter(place, *words, **given), (1, 2))

    return attack


def to_nowhere(stream: str) -> Attack:
    """Nobody can read what it says: it says so by its exit code."""

    def attack(place: Place) -> None:
        place.copy()
        with open("/dev/full", "wb") as full:
            given: dict[str, Any] = {stream: full}
            said = interpreter(place, **given)
        if said.code not in (0, 1):
            place.fails(f"ended with {said.code}")
        if said.code == 0:
            place.unharmed(said)

    return attack


def _closed(*streams: int) -> Callable[[], None]:
    def close() -> None:
        for stream in streams:
            os.close(stream)

    return close


def at(make: Callable[[Place], Path], *words: str, codes: tuple[int, ...] = (1, 2)) -> Attack:
    """Train in an odd place; `make` says where the run is then."""

    def attack(place: Place) -> None:
        run_dir = make(place)
        quoted = "'" + str(run_dir).replace("'", "\\'") + "'"
        ends_well(place, place.train(f"run.dir={quoted}", *words), codes, run_dir)

    return attack


def linked(place: Place) -> Path:
    (place.path / "theirs").mkdir()
    (place.path / "run").symlink_to("theirs")
    return place.run_dir


def working_directory_gone(place: Place) -> None:
    """Without a working directory a relative path means nothing, and that is said."""

    def gone() -> None:
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")

    said = interpreter(place, "run.steps=9", preexec_fn=gone)
    place.refused(said, 1, 2)
    if "directory" not in said.text:
        place.fails(f"does not say that the working directory is gone: {said.last}")


def small(options: str, *words: str) -> Attack:
    """On a file system of its own: the run completes, or says in one line why not."""

    def attack(place: Place) -> None:
        with mounted(place.path / "disk", options):
            run_dir = place.path / "disk" / "run"
            ends_well(place, place.train(f"run.dir={run_dir}", *words), (1, 2), run_dir)

    return attack


def read_only(place: Place) -> None:
    with mounted(place.path / "disk", "size=8m"):
        pass
    with mounted(place.path / "disk", "size=8m,ro"):
        place.refused(place.train("run.dir=disk/run"), 1, 2)


def clock(days: float) -> Callable[[], None]:
    """From now on the clock is off by so much."""

    def setting() -> None:
        now, now_ns = time.time, time.time_ns
        vars(time)["time"] = lambda: now() + days * 86400
        vars(time)["time_ns"] = lambda: now_ns() + int(days * 86400e9)

    return setting


def _limit(what: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


ENVIRONMENT: dict[str, Attack] = {
    "-OO": python_of_its_own(flags=["-OO"]),
    "an ASCII locale": python_of_its_own(
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    ),
    "warnings are errors in ours": python_of_its_own(
        environment={"PYTHONWARNINGS": "error::UserWarning:resilient_train"}
    ),
    "no HOME, no USER, no PATH": python_of_its_own(without=["HOME", "USER", "LOGNAME", "PATH"]),
    "stdin closed": python_of_its_own(preexec_fn=_closed(0)),
    "stdout closed": python_of_its_own(preexec_fn=_closed(1)),
    "all streams closed": python_of_its_own(preexec_fn=_closed(0, 1, 2)),
    "/dev/full for stdout": to_nowhere("stdout"),
    "/dev/full for stderr": to_nowhere("stderr"),
    "HOME that is not there": within(int, HOME="/nonexistent/home"),
    "HOME that is a device": within(int, HOME="/dev/null"),
    "TMPDIR that is not there": within(int, TMPDIR="/nonexistent"),
    "a terminal one column wide": within(int, COLUMNS="1", TERM="dumb"),
    "a Turkish locale": within(int, LC_ALL="tr_TR.UTF-8", LANG="tr_TR.UTF-8"),
    "RANK of text": within(int, RANK="first", WORLD_SIZE="many"),
    "RANK beyond the world": within(int, RANK="5", WORLD_SIZE="1", LOCAL_RANK="5"),
    "an address for MLflow that is none": within(int, MLFLOW_TRACKING_URI="gopher://[::1"),
    "umask 077": within(lambda: os.umask(0o077)),
    "umask 777": within(lambda: os.umask(0o777)),
    "24 descriptors": within(_limit(resource.RLIMIT_NOFILE, 24)),
    "12 descriptors": within(_limit(resource.RLIMIT_NOFILE, 12)),
    "files of 10 kB at most": within(_limit(resource.RLIMIT_FSIZE, 10_000)),
    "no core, no stack to speak of": within(_limit(resource.RLIMIT_STACK, 256 * 1024)),
    "the clock a day behind": within(clock(-1)),
    "the clock a year ahead": within(clock(365)),
    "the clock in 1970": within(clock(-time.time() / 86400 + 0.01)),
    "the working directory is gone": working_directory_gone,
    "a link as run.dir": at(linked),
    "a path with odd letters": at(lambda place: place.path / "rün \U0001f525 'x' $(touch canary) ;&"),
    "a path with a line break": at(lambda place: place.path / "a\nb"),
    "a path of 240 letters": at(lambda place: place.path / ("x" * 240)),
    "a name of 300 letters": at(lambda place: place.path / ("x" * 300)),
    "a file as run.dir": at(lambda place: place.path / "precious"),
    "a read-only disk": read_only,
    "a disk of 64 kB": small("size=64k"),
    "a disk of 200 kB": small("size=200k"),
    "a disk of 20 inodes": small("size=8m,nr_inodes=20"),
    "a disk of 6 inodes": small("size=8m,nr_inodes=6"),
}


# ------------------------------------------------------------------------------------------------------------- signals


PACE = {"ATTACK_PAUSE": "0.003"}  # seconds a row: 24 ms an update


def started(place: Place, *words: str, step: int = 40, **environment: Any) -> Started:
    """A long run that has come to a step."""
    run = place.training("run.steps=120", *words, **{**PACE, **environment})
    run.until(lambda: stand(place.run_dir).tick > step)
    return run


def goes_on(place: Place, *words: str) -> Said:
    said = place.train("run.steps=120", *words)
    place.unharmed(said, steps=120)
    return said


def struck(strike: Callable[[Place, Started], object], codes: tuple[int, ...], *words: str, step: int = 40) -> Attack:
    """Do something to a run at work: it ends with one of these codes, and the same command completes it."""

    def attack(place: Place) -> None:
        run = started(place, *words, step=step)
        strike(place, run)
        if -signal.SIGKILL in codes:
            run.forked.ended(60.0)
            goes_on(place, *words)
            return
        said = run.end("the run", 120.0)
        if said.code not in codes:
            place.fails(f"ended with {said.code} instead of {codes}: {said.last}")
        if said.code == 0:
            place.unharmed(said, steps=120)
        elif said.code != 75:
            place.refused(said, *codes)
        if (again := goes_on(place, *words)) and said.code == 75 and "resumes from step" not in again.text:
            place.fails(f"stopped with 75, and began again: {again.last}")

    return attack


def sends(*numbers: signal.Signals, pause_s: float = 0.0) -> Callable[[Place, Started], None]:
    def strike(place: Place, run: Started) -> None:
        for number in numbers:
            run.strike(number)
            time.sleep(pause_s)

    return strike


def stops(seconds: float, times: int = 1) -> Callable[[Place, Started], None]:
    def strike(place: Place, run: Started) -> None:
        for _ in range(times):
            run.strike(signal.SIGSTOP)
            time.sleep(seconds)
            run.strike(signal.SIGCONT)
            time.sleep(0.05)

    return strike


def at_save(place: Place, run: Started) -> None:
    run.until(lambda: (place.run_dir / SAVING).exists() or stand(place.run_dir).step > 100)
    run.strike(signal.SIGKILL)


def twice_at_first(place: Place) -> None:
    """Two kills in the first update after a resume: a long compile, a preemption. No samples are to blame."""
    run = started(place)
    run.kill()
    for _ in range(2):
        before = stand(place.run_dir).number
        slow = place.training("run.steps=120", ATTACK_PAUSE="0.4")
        slow.until(lambda before=before: stand(place.run_dir).number > before)  # type: ignore[misc]
        time.sleep(1.5)
        slow.kill()
    goes_on(place)


def started_at_once(place: Place) -> None:
    runs = [place.training("run.steps=120", **PACE) for _ in range(3)]
    said = [run.end("a run", 120.0) for run in runs]
    for one in said:
        if one.code:
            place.refused(one, 1)
    if [one.code for one in said].count(0) != 1:
        place.fails(f"three starts at once ended with {[one.code for one in said]}")
    place.unharmed(next(one for one in said if one.code == 0), steps=120)


def lock_removed(place: Place) -> None:
    """Two never write to one directory, and no crash is told that was none."""
    run = started(place, step=10)
    (place.run_dir / ".lock").unlink()
    second = place.train("run.steps=120", limit_s=120.0)
    first = run.end("the first run", 120.0)
    if first.code == second.code == 0 and "is complete" not in second.text:
        place.fails("two runs wrote to one directory at once, and both ended with 0")
    goes_on(place)
    if any(one["signal"] == "crash" for one in incidents(place.run_dir)):
        place.fails("tells of a crash that was none")


def grace_runs_out(place: Place) -> None:
    """Asked to stop in an update that takes too long: what was proven is on disk, or it says where it begins."""
    run = place.training("run.steps=120", "run.grace=3", "checkpoint.disk.every=1000", ATTACK_PAUSE="0.6")
    run.until(lambda: stand(place.run_dir).step >= 1)
    time.sleep(1.0)
    run.strike(signal.SIGTERM)
    said = run.end("the run", 60.0)
    if said.code not in (1, 75):
        place.fails(f"ended with {said.code}: {said.last}")
    again = goes_on(place, "checkpoint.disk.every=1000")
    if said.code == 75 and "resumes from step" not in again.text:
        place.fails("ended with 75, and the next start begins at 0")


def gone(*names: str) -> Callable[[Place, Started], None]:
    def strike(place: Place, run: Started) -> None:
        for name in names:
            path = place.run_dir / name
            path.unlink(missing_ok=True) if not path.is_dir() else None
            while path.is_dir():  # the run may write into it meanwhile
                shutil.rmtree(path, ignore_errors=True)

    return strike


def without_its_configuration(place: Place) -> None:
    """The run is completed; the next start goes on, or says which file is missing."""
    run = started(place)
    gone("config.yaml", "train.log")(place, run)
    ends_well(place, run.end("the run", 120.0), (1,), steps=120)
    again = place.train("run.steps=125")
    if again.code:
        place.refused(again, 2)
        if "config.yaml" not in again.text:
            place.fails(f"does not say which file is missing: {again.last}")


TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL
SIGNALS: dict[str, Attack] = {
    "SIGTERM": struck(sends(TERM), (75,)),
    "SIGINT": struck(sends(INT), (75,)),
    "SIGUSR1": struck(sends(USR1), (75,)),
    "SIGHUP": struck(sends(signal.SIGHUP), (0, 75, -KILL)),
    "SIGTERM in the first update": struck(sends(TERM), (75,), step=0),
    "fifty SIGTERM": struck(sends(*[TERM] * 50), (75,)),
    "fifty of three kinds": struck(sends(*[TERM, USR1] * 25, pause_s=0.002), (75,)),
    "SIGKILL at 3": struck(sends(KILL), (-KILL,), step=3),
    "SIGKILL at 40": struck(sends(KILL), (-KILL,)),
    "SIGKILL at 97": struck(sends(KILL), (-KILL,), step=97),
    "SIGKILL in a save": struck(at_save, (-KILL,)),
    "SIGTERM and SIGKILL": struck(sends(TERM, KILL, pause_s=0.02), (-KILL,)),
    "two kills in the first update after a resume": twice_at_first,
    "SIGSTOP for a moment": struck(stops(0.5), (0,)),
    "SIGSTOP and SIGCONT in turn": struck(stops(0.02, times=30), (0,)),
    "SIGSTOP beyond step_timeout": struck(stops(9.0), (0,), "run.step_timeout=3"),
    "SIGSTOP, then SIGTERM": struck(sends(signal.SIGSTOP, TERM, signal.SIGCONT, pause_s=1.0), (75,)),
    "three starts at once": started_at_once,
    "the lock removed": lock_removed,
    "grace runs out": grace_runs_out,
    "progress cut short": struck(lambda place, run: os.truncate(place.run_dir / "progress", 0), (0, 1)),
    "progress removed": struck(gone("progress"), (0, 1)),
    "journal and incidents removed": struck(gone("journal.jsonl", "incidents.jsonl"), (0, 1)),
    "checkpoints removed": struck(gone("checkpoints"), (0, 1)),
    "config.yaml and train.log removed": without_its_configuration,
    "the run directory removed": struck(gone("."), (0, 1)),
    "the run directory moved away": struck(lambda place, run: place.run_dir.rename(place.path / "away"), (0, 1)),
}
