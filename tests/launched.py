"""Runs of several processes under torchrun, whose processes a signal strikes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fork_server import ENVIRONMENT, Forked, torchrun

_LOOK_S = 0.02


@dataclass(frozen=True)
class Process:
    pid: int
    rank: int | None  # None: the agent
    is_worker_of_data: bool  # a child of a rank


class Launched:
    _count = 0

    def __init__(self, place: Path, processes: int, *arguments: str, restarts: int = 0, **environment: str) -> None:
        """Start torchrun with a rendezvous of its own, forked from where everything is imported already."""
        words = ["--standalone", f"--nproc_per_node={processes}", f"--max-restarts={restarts}", "-m", "resilient_train"]
        words += arguments
        place.mkdir(parents=True, exist_ok=True)
        Launched._count += 1
        self.mark = f"{os.getpid()}-{Launched._count}"  # the name of its processes, however they lost their parents
        self._out = place / f"launch-{self.mark}.txt"
        own = ENVIRONMENT | environment
        self._agent = Forked(torchrun, self.mark, *words, place=place, out=self._out, environment=own)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.all():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.kill_agent()

    def kill_agent(self) -> None:
        self._agent.kill()
        self.ended(30.0)

    def ended(self, seconds: float = 0.0) -> int | None:
        """The exit code of the launcher, if it has ended or does so in time."""
        return self._agent.ended(seconds)

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    def all(self) -> list[Process]:
        """Every process of it that is there, zombies aside."""
        return list(_marked(self.mark))

    def ranks(self) -> dict[int, int]:
        return {one.rank: one.pid for one in self.all() if one.rank is not None and not one.is_worker_of_data}

    def wait(self, seconds: float = 240.0) -> int:
        if (code := self.ended(seconds)) is None:
            raise TimeoutError(f"still there after {seconds:.0f} s:\n{self.output[-3000:]}")
        return code

    def until(self, holds: Callable[[], bool], seconds: float = 240.0) -> float:
        """Wait until something holds; return how long that took. An end of the launcher before is an error."""
        began = time.monotonic()
        while not holds():
            if (code := self.ended()) is not None and not holds():
                raise AssertionError(f"the launcher ended with {code}:\n{self.output[-3000:]}")
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not within {seconds:.0f} s:\n{self.output[-3000:]}")
            time.sleep(_LOOK_S)
        return time.monotonic() - began


def never_imported(place: Path) -> None:
    """Let what a run imports first take for ever in `place`; a file imports.RANK tells that it is at that."""
    text = "import os, time\nopen('imports.' + os.environ.get('RANK', '0'), 'w').close()\ntime.sleep(3600)\n"
    (place / "hydra.py").write_text(text)


def _marked(mark: str) -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent = _stat(int(name))
                if state not in "ZX" and (own := _place(int(name), mark)) != _NOWHERE:
                    is_child = own is not None and parent > 1 and _place(parent, mark) == own
                    yield Process(int(name), own, is_child)


_NOWHERE = -1


def _place(pid: int, mark: str) -> int | None:
    """The rank of a process, None for the agent, by its name."""
    name, _, rank = Path(f"/proc/{pid}/comm").read_text().strip().partition(".")
    if name != mark:
        return _NOWHERE
    return int(rank) if rank else None


def _stat(pid: int) -> tuple[str, int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1])
