"""Runs of several processes under torchrun, whose processes a signal strikes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fork_server import ENVIRONMENT, Forked, torchrun


@dataclass(frozen=True)
class Process:
    pid: int
    rank: int | None  # None: the agent
    is_worker_of_data: bool  # a child of a rank


class Launched(Forked):
    _count = 0

    def __init__(self, place: Path, processes: int, *arguments: str, restarts: int = 0, **environment: str) -> None:
        """Start torchrun with a rendezvous of its own, forked from where everything is imported already."""
        words = ["--standalone", f"--nproc_per_node={processes}", f"--max-restarts={restarts}", "-m", "resilient_train"]
        words += arguments
        place.mkdir(parents=True, exist_ok=True)
        Launched._count += 1
        self.mark = f"{os.getpid()}-{Launched._count}"  # the name of its processes, however they lost their parents
        out = place / f"launch-{self.mark}.txt"
        super().__init__(torchrun, self.mark, *words, place=place, out=out, environment=ENVIRONMENT | environment)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.all():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.kill()

    def all(self) -> list[Process]:
        """Every process of it that is there, zombies aside."""
        return list(_marked(self.mark))

    def ranks(self) -> dict[int, int]:
        return {one.rank: one.pid for one in self.all() if one.rank is not None and not one.is_worker_of_data}


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
