"""Training loops beside each other, a block of steps at a time, on a machine that others use too.

Each loop lives in a process of its own and gets leave for one block of steps at a time, in the order A, B, C, C, B, A.
Those that wait are stopped with all of their threads, so they never compete, and whatever else the machine does hits
all alike. Fresh sets of processes share out the blocks, since where memory happens to lie makes a process some per
cent faster or slower for all of its life. The wall's time is the figure; CPU time beside it tells what is left of it
when others use the machine. Last come the same loops' counts, over steps that are not timed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from counts import COUNTED, KINDS, counting

OnStep = Callable[[int], None]
CLOCKS = ("wall", "cpu")


@dataclass(frozen=True)
class Job:
    """What a process is to train."""

    workload: str
    warm_up: int
    steps: int  # the warm-up's, and those that are counted, included
    log_every: int
    tracking: str = "none"


# Trains; says first what it works on, by its third argument, and then calls the second one after every step.
Loop = Callable[[Job, OnStep, Callable[[Any], None]], None]


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step of every loop, by clock and by round of fresh processes."""

    work: Any
    blocks: int
    steps_per_block: int
    ms: Mapping[str, Mapping[str, Sequence[np.ndarray]]]  # by clock, by loop: [round][block]
    counts: Mapping[str, Mapping[str, float]]  # by loop, by kind: of each step

    def median(self, loop: str, clock: str = "wall") -> float:
        return float(np.median(np.concatenate(self.ms[clock][loop])))

    def ratio(self, loop: str, beside: str, clock: str = "wall") -> tuple[float, float, float]:
        """The paired median of one loop beside another, and its 95 % interval."""
        pairs = zip(self.ms[clock][loop], self.ms[clock][beside], strict=True)
        return median_with_interval([mine / other for mine, other in pairs])

    def as_dict(self) -> dict[str, Any]:
        ms = {
            clock: {loop: [one.tolist() for one in rounds] for loop, rounds in loops.items()}
            for clock, loops in self.ms.items()
        }
        return {"work": self.work, "blocks": self.blocks, "steps_per_block": self.steps_per_block, "ms": ms} | {
            "counts": self.counts
        }


def time_blocks(loops: Mapping[str, Loop], job: Job, *, blocks: int, steps_per_block: int, rounds: int) -> Timing:
    """Time all loops block by block, in fresh processes each round; `job.steps` is set to what that takes."""
    measured: list[np.ndarray] = []  # of each round: [block, loop, clock]
    work: Any = None
    counts: dict[str, dict[str, float]] = {}
    for fresh in np.array_split(np.arange(blocks), rounds):
        whole = replace(job, steps=job.warm_up + len(fresh) * steps_per_block + COUNTED)
        runners = [_Runner(name, loop, whole, steps_per_block) for name, loop in loops.items()]
        try:
            works = {runner.name: runner.warm_up() for runner in runners}
            work = works[runners[0].name]
            if any(other != work for other in works.values()):
                told = "\n".join(f"  {name}: {other}" for name, other in works.items())
                raise SystemExit(f"the loops do different work:\n{told}")
            rows = []
            for number in fresh:
                order = runners if number % 2 == 0 else runners[::-1]  # a drift favours none
                seconds = {runner: runner.block() for runner in order}
                rows.append([seconds[runner] for runner in runners])
            measured.append(1e3 * np.array(rows) / steps_per_block)
            counts = {runner.name: runner.finish() for runner in runners}
        finally:
            for runner in runners:
                runner.abandon()
    ms = {
        clock: {name: [one[:, place, number] for one in measured] for place, name in enumerate(loops)}
        for number, clock in enumerate(CLOCKS)
    }
    return Timing(work, blocks, steps_per_block, ms, counts)


def median_with_interval(groups: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval, from a bootstrap that draws groups and then values within them."""
    random = np.random.default_rng(0)

    def drawn() -> np.ndarray:
        chosen = [groups[number] for number in random.integers(len(groups), size=len(groups))]
        return np.concatenate([random.choice(group, len(group)) for group in chosen])

    low, high = np.quantile([np.median(drawn()) for _ in range(5000)], (0.025, 0.975))
    return float(np.median(np.concatenate(groups))), float(low), float(high)


def with_interval(figures: tuple[float, float, float]) -> str:
    """Write a median and its interval."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*figures)


def table(title: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table for a terminal: the first column to the left, the others to the right."""
    widths = [max(len(row[place]) for row in [title, *rows]) for place in range(len(title))]
    lines = [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in [title, *rows])
    ]
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def compared(timing: Timing, beside: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table: every loop, its ratio to those it stands beside, and its counts."""
    title = ["loop", "step ms", *(f"beside {name}" for name in beside), "cpu ms", f"cpu beside {beside[0]}", *KINDS[:2]]
    rows = []
    for loop, counts in timing.counts.items():
        ratios = ["1" if loop == other else with_interval(timing.ratio(loop, other)) for other in beside]
        on_cpu = "1" if loop == beside[0] else with_interval(timing.ratio(loop, beside[0], "cpu"))
        ms = [f"{timing.median(loop, clock):.3f}" for clock in CLOCKS]
        rows.append([loop, ms[0], *ratios, ms[1], on_cpu, *(f"{counts[kind]:g}" for kind in KINDS[:2])])
    return title, rows


def machine() -> dict[str, Any]:
    """Say where the figures come from."""
    load_before = round(os.getloadavg()[0], 1)
    return {"cpus": os.cpu_count(), "load_before": load_before, "torch": torch.__version__, "threads": 1}


def begin() -> dict[str, Any]:
    """Prepare this process to measure, and say where."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a timeout leaves no stopped process behind
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    here = machine()
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    return here


# ---------------------------------------------------------------------------------------------------------- in a child


def in_child(loop: Loop, job: Job, steps_per_block: int, pipe: Connection) -> None:
    """Run blocks of steps, each when told to, and answer with the seconds it took; then count the last steps."""
    quiet()
    counts = Counter[str]()
    counted = ExitStack()
    timed = job.steps - COUNTED
    started = _clocks()

    def on_step(step: int) -> None:
        nonlocal started
        if job.warm_up <= step <= timed and (step - job.warm_up) % steps_per_block == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            pipe.send(_clocks() - started)
            pipe.recv()
            started = _clocks()
        if step == timed:
            counted.enter_context(counting(counts))
        elif step == job.steps:
            counted.close()
            pipe.send({kind: counts[kind] / COUNTED for kind in KINDS})

    loop(job, on_step, pipe.send)


def quiet() -> None:
    """One thread, and nothing on the terminal but errors."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _clocks() -> np.ndarray:
    """Return the time of the wall, and the time that all threads of this process had on a CPU."""
    return np.array([time.perf_counter(), time.process_time()])


# -------------------------------------------------------------------------------------------------------- in the parent


class _Runner:
    """A loop in a process of its own that moves only while it has leave."""

    def __init__(self, name: str, loop: Loop, job: Job, steps_per_block: int) -> None:
        self.name = name
        self.process, self.pipe = spawn(in_child, loop, job, steps_per_block)

    def warm_up(self) -> Any:
        """Wait until it stands before its first block; return what it works on."""
        work = answer(self.pipe, self.name)
        answer(self.pipe, self.name)
        self._signal(signal.SIGSTOP)
        return work

    def block(self) -> np.ndarray:
        """Let it run one block; return the seconds that took, by both clocks."""
        seconds: np.ndarray = self._asked()
        self._signal(signal.SIGSTOP)
        return seconds

    def finish(self) -> dict[str, float]:
        """Let it run to its end; return its counts for each step."""
        counts: dict[str, float] = self._asked()
        self.process.join()
        if self.process.exitcode:
            raise SystemExit(f"the {self.name} loop ended with {self.process.exitcode}: its error is above")
        return counts

    def abandon(self) -> None:
        """End it wherever it is."""
        if self.process.is_alive():
            self.process.terminate()
            self._signal(signal.SIGCONT)
        self.process.join()

    def _asked(self) -> Any:
        self._signal(signal.SIGCONT)
        self.pipe.send(None)
        return answer(self.pipe, self.name)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def group(processes: int) -> list[dict[str, str]]:
    """What the environment of each process has to say so that they find each other, on this machine's CPUs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    same = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    same["ACCELERATE_USE_CPU"] = "true"
    return [{**same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


IMPORTED = ["torch", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "accelerate"]  # takes seconds


def spawn(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Start a process in which nothing was done yet; its last argument is the other end of the pipe."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*args, there), daemon=True)
    process.start()
    there.close()  # else a child that dies would not end what we read
    return process, here


def answer(pipe: Connection, name: str) -> Any:
    """What a child says next."""
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"the {name} loop ended early: its error is above") from None
