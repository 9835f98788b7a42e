"""Runs of several processes under torchrun, whose processes a signal strikes: for tests, benchmark and two hosts.

All that is looked at is what any other program could look at: /proc, the file `progress`, the journal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_MARK = "RESILIENT_TEST_LAUNCH"  # in the environment of every process of a launch, however it lost its parents
_LOOK_S = 0.02


@dataclass(frozen=True)
class Process:
    """One that is there now."""

    pid: int
    rank: int | None  # None: the agent
    is_worker_of_data: bool  # a child of a rank

    @property
    def state(self) -> str:
        """As the kernel has it: R, S, T and so on; X where it has gone."""
        return _stat(self.pid)[0]


class Launched:
    """A launcher and all that it started."""

    _count = 0

    def __init__(self, place: Path, processes: int, *arguments: str, restarts: int = 0, **environment: str) -> None:
        """Start torchrun with its own rendezvous on a free port."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        launcher += [f"--max-restarts={restarts}", "-m", "resilient_train"]
        place.mkdir(parents=True, exist_ok=True)
        Launched._count += 1
        self.mark = f"{os.getpid()}-{Launched._count}"
        self._out = place / f"launch-{self.mark}.txt"
        own = {"PYTHONPATH": f"{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1", _MARK: self.mark}
        with self._out.open("wb") as out:
            self.agent = subprocess.Popen(
                [*launcher, *arguments], cwd=place, env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing of it is left behind."""
        for process in self.all():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.agent.kill()
        self.agent.wait(30)

    @property
    def output(self) -> str:
        """What all its processes have said so far, on both streams."""
        return self._out.read_text(errors="replace")

    def all(self) -> list[Process]:
        """Every process of it that is there, zombies aside."""
        return list(_marked(self.mark))

    def ranks(self) -> dict[int, int]:
        """The process of every rank."""
        return {one.rank: one.pid for one in self.all() if one.rank is not None and not one.is_worker_of_data}

    def wait(self, seconds: float = 180.0) -> int:
        """The exit code of the launcher."""
        try:
            return self.agent.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still there after {seconds:.0f} s:\n{self.output[-3000:]}") from None

    def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> float:
        """Wait until something holds; return how long that took. An end of the launcher before is an error."""
        began = time.monotonic()
        while not holds():
            if self.agent.poll() is not None and not holds():
                raise AssertionError(f"the launcher ended with {self.agent.returncode}:\n{self.output[-3000:]}")
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not within {seconds:.0f} s:\n{self.output[-3000:]}")
            time.sleep(_LOOK_S)
        return time.monotonic() - began


def _marked(mark: str) -> Iterator[Process]:
    wanted = f"{_MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            state, parent = _stat(pid)
            if wanted not in words or state in "ZX":
                continue
            rank = next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
            parents = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0") if parent > 1 else []
            is_child = rank is not None and f"RANK={rank}".encode() in parents and wanted in parents
            yield Process(pid, rank, is_child)


def _stat(pid: int) -> tuple[str, int]:
    """State and parent of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])
