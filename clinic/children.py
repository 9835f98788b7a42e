"""Every run in a fresh process of its own: armor patches code until its process ends, and a crash is a result too."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from clinic.runs import carried_out
from clinic.score import Run

# Before the fork: it takes longer than most of the runs. The first optimizer of a process imports torch._dynamo.
IMPORTED = ["torch", "torch._dynamo", "accelerate"]
TOLD = 20_000  # characters that are kept of what a run prints


class Children:
    """Carries out runs, a few at a time, each for so many seconds at most."""

    def __init__(self, jobs: int, limit_s: int) -> None:
        self.jobs, self.limit_s = jobs, limit_s
        self._alive: list[BaseProcess] = []
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)

    def carry_out(self, runs: Sequence[Run]) -> Iterator[Run]:
        """Yield them as they end."""
        pool = ThreadPoolExecutor(self.jobs)
        try:
            for done in as_completed([pool.submit(self._one, run) for run in runs]):
                yield done.result()
        finally:  # also where it is interrupted: those that have begun would go on by themselves
            pool.shutdown(wait=False, cancel_futures=True)
            for child in self._alive:
                child.kill()

    def _one(self, run: Run) -> Run:
        receiver, sender = self._context.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile(suffix=".told") as file:
            child = self._context.Process(target=_in_child, args=(run, self.limit_s, file.name, sender), daemon=True)
            child.start()
            self._alive.append(child)
            sender.close()
            try:
                done: Run = receiver.recv()
            except EOFError:
                done = run
            child.join()
            self._alive.remove(child)
            receiver.close()
            done.told = Path(file.name).read_text(encoding="utf-8", errors="replace")[-TOLD:]
        if child.exitcode:
            done.why = self._ending(child.exitcode, done.told)
        return done

    def _ending(self, code: int, told: str) -> str:
        if code == -signal.SIGALRM:
            return f"has not ended in {self.limit_s} s"
        return f"its process has ended with code {code}: {''.join(told.splitlines()[-1:])}"


def _in_child(run: Run, limit_s: int, told: str, sender: Connection) -> None:
    signal.alarm(limit_s)  # nobody catches it, so it ends what hangs, in C as well
    to = os.open(told, os.O_WRONLY | os.O_APPEND)
    os.dup2(to, 1)
    os.dup2(to, 2)
    sender.send(carried_out(run))


def kept(file: Path | None) -> Iterator[Run]:
    """Runs of an earlier call, a line of JSON each."""
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            yield Run.read(json.loads(line))


def keeper(file: Path | None) -> Callable[[Run], None]:
    """Append each run as it ends: what is interrupted keeps what it has."""

    def keep(run: Run) -> None:
        if file is not None:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(dataclasses.asdict(run)) + "\n")

    return keep


def missing(wanted: Sequence[Run], had: Iterable[Run]) -> tuple[list[Run], list[Run]]:
    """What has to be carried out, and what need not be: the same run of the same source."""
    by_key = {_key(run): run for run in had}
    todo = [run for run in wanted if _key(run) not in by_key]
    return todo, [by_key[_key(run)] for run in wanted if _key(run) in by_key]


def _key(run: Run) -> tuple[object, ...]:
    return run.of, run.case, run.seed, run.arm, run.made_by
