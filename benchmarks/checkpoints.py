"""What checkpoints on disk cost a run: the time that a save keeps training waiting, and what a whole run is slower.

The state is that of a GPT of 4 M weights with both moments of AdamW. Of a save only the part that training waits for
is timed: of ours the snapshot in memory and the offer to the thread that writes, of Accelerate's `save_state` and of
torch's `async_save` (DCP) their calls. `memcpy` copies one tensor of as many bytes. All take turns, block by block, and
what is written in the background is waited for between two turns.

A whole run is timed as blocks of 50 steps of the same training, once with `checkpoint.disk.every=50` and once without,
in two processes that take turns (see interleaved.py): so a block has one checkpoint in it, its writing included.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --only run --blocks 20 --json figures.json
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from interleaved import (
    Job,
    Loop,
    OnStep,
    answer,
    begin,
    compared,
    median_with_interval,
    quiet,
    spawn,
    table,
    time_blocks,
    with_interval,
)
from loops import OVERRIDES, work

WAYS = ("memcpy", "ours", "of that the offer", "save_state", "async_save")
EVERY = 50
TARGETS = {"blocking": 1.5, "run": 1.05}  # times a copy; times the run without


# ---------------------------------------------------------------------------------------------- what training waits for


Way = Callable[
    [], tuple[float, Callable[[], Any]]
]  # returns the seconds it kept training, and how to wait for the rest


def ways(place: Path) -> tuple[dict[str, Way], int]:
    """Every way to save by its name, and the bytes of the state."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
    from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

    from resilient_train.app.build import assemble
    from resilient_train.app.config.compose import load
    from resilient_train.ranks.world import World
    from resilient_train.record.incident_log import IncidentLog
    from resilient_train.state.tree import nbytes

    once = "run.steps=1 data.eval._target_=null tracking=none checkpoint.memory.every=1 checkpoint.disk.every=1"
    config = load([*OVERRIDES["gpt"].split(), *once.split()]).config
    run = assemble(config, World.joined(config.accelerate), IncidentLog(place))
    guard = run.guard
    for batch in guard.batches(steps=1):
        guard.step(batch)  # the moments come to be
    keeper, writer = guard._keeper, guard._keeper._writer
    assert writer is not None
    bytes_held = nbytes(guard.state.live())
    source = torch.ones(bytes_held // 4)
    copies = cycle([torch.empty_like(source) for _ in range(4)])  # as many as the ring has slots
    steps = iter(range(2, 10**9))

    def snapshot() -> None:
        guard.clock.step = next(steps)
        assert guard._controls.snapshot(guard.clock.step, verified=True) is not None

    def offer() -> None:
        keeper.verified(any_busy=False)
        assert not writer.is_free

    def snapshot_and_offer() -> None:
        snapshot()
        offer()

    def only_offer() -> tuple[float, Callable[[], Any]]:
        snapshot()
        return seconds_of(offer), writer.wait

    def memcpy() -> tuple[float, Callable[[], Any]]:
        return seconds_of(lambda: next(copies).copy_(source)), lambda: None

    def save_state() -> tuple[float, Callable[[], Any]]:
        folder = place / "accelerate"
        return seconds_of(lambda: guard.world.accelerator.save_state(str(folder))), lambda: shutil.rmtree(folder)

    def async_save() -> tuple[float, Callable[[], Any]]:
        saving: Any = None

        def save() -> None:
            nonlocal saving
            weights, optimizer = get_state_dict(run.model, guard.state.optimizers)
            state = {"weights": weights, "optimizer": optimizer}
            saving = dcp_async_save(state, checkpoint_id=place / "dcp", no_dist=True)

        def rest() -> None:
            (saving.upload_completion if isinstance(saving, AsyncSaveResponse) else saving).result()
            shutil.rmtree(place / "dcp")

        return seconds_of(save), rest

    ours = {"ours": lambda: (seconds_of(snapshot_and_offer), writer.wait), "of that the offer": only_offer}
    return {"memcpy": memcpy, **ours, "save_state": save_state, "async_save": async_save}, bytes_held


def seconds_of(act: Callable[[], Any]) -> float:
    """Time one call."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def child(blocks: int, pipe: Connection) -> None:
    """Time every way once a block, forth and back; answer with [block, way] milliseconds and the bytes of the state."""
    quiet()
    logging.disable()
    warnings.simplefilter("ignore")
    with TemporaryDirectory(prefix="checkpoints-") as place:
        by_name, bytes_held = ways(Path(place))
        ms = np.zeros((blocks, len(WAYS)))
        for block in range(-5, blocks):  # in the first ones memory is touched for the first time
            order = range(len(WAYS)) if block % 2 == 0 else reversed(range(len(WAYS)))
            for number in order:
                seconds, rest = by_name[WAYS[number]]()
                if block >= 0:
                    ms[block, number] = 1e3 * seconds
                rest()
        pipe.send((ms, bytes_held))


def measure_blocking(blocks: int, rounds: int) -> dict[str, Any]:
    """Time what training waits for, in fresh processes, and print the table."""
    measured = []
    for fresh in np.array_split(np.arange(blocks), rounds):
        process, pipe = spawn(child, len(fresh))
        ms, bytes_held = answer(pipe, "checkpoints")
        measured.append(ms)
        process.join()
    print(f"\nwhat training waits for, {bytes_held / 1e6:.0f} MB of state, {blocks} blocks,", end=" ")
    print(f"load now {os.getloadavg()[0]:.1f}")
    figures: dict[str, Any] = {"bytes": bytes_held, "ms": {}, "beside_memcpy": {}}
    rows = []
    for place, way in enumerate(WAYS):
        mine = np.concatenate([ms[:, place] for ms in measured])
        ratio = median_with_interval([ms[:, place] / ms[:, 0] for ms in measured])
        figures["ms"][way], figures["beside_memcpy"][way] = mine.tolist(), ratio
        rows.append([way, f"{np.median(mine):.2f}", "1" if place == 0 else with_interval(ratio)])
    print(table(["way", "ms", "beside memcpy"], rows))
    told("blocking part beside a memory copy", figures["beside_memcpy"]["ours"][2], TARGETS["blocking"])
    return figures


# ---------------------------------------------------------------------------------------------------------- a whole run


def training(job: Job, on_step: OnStep, tell: Callable[[Any], None], *, every: int) -> None:
    """Train as `python -m resilient_train` does, with a checkpoint on disk every so many steps."""
    from resilient_train.app.build import assemble
    from resilient_train.app.config.compose import load
    from resilient_train.app.train import train
    from resilient_train.ranks.world import World
    from resilient_train.record.incident_log import IncidentLog
    from resilient_train.tracking.tracker import Tracker

    with TemporaryDirectory(prefix="checkpoints-") as place:
        settings = [f"run.steps={job.steps}", f"checkpoint.disk.every={every}", "data.eval._target_=null"]
        config = load([*OVERRIDES[job.workload].split(), *settings, "tracking=none"]).config
        world = World.joined(config.accelerate)
        run = assemble(config, world, IncidentLog(Path(place)))
        tell(work(run.model, run.guard.state.optimizers, run.guard.samples.slicing.samples))
        train(run, _Steps(on_step), Tracker())
        run.close()
        written = len(list(Path(place, "checkpoints").glob("step-*")))
        if run.guard.incidents or bool(every) != bool(written):
            raise SystemExit(
                f"{len(run.guard.incidents)} incidents and {written} checkpoints: no figure would be right"
            )


class _Steps:
    """A display that shows nothing, and tells the benchmark of every update that went to the gate."""

    def __init__(self, on_step: OnStep) -> None:
        self.on_step, self.attempted = on_step, 0

    def step(self, step: int) -> None:
        self.attempted += 1
        self.on_step(self.attempted)

    def show(self, vitals: Any, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def measure_run(blocks: int, rounds: int, steps_per_block: int) -> dict[str, Any]:
    """Time the same training with checkpoints and without, block by block, and print the table."""
    loops: dict[str, Loop] = {
        "without": functools.partial(training, every=0),
        f"every {EVERY}": functools.partial(training, every=EVERY),
    }
    job = Job("gpt", 125, 125, log_every=10)
    timing = time_blocks(loops, job, blocks=blocks, steps_per_block=steps_per_block, rounds=rounds)
    print(f"\na whole run, {timing.blocks} blocks of {timing.steps_per_block} steps,", end=" ")
    print(f"load now {os.getloadavg()[0]:.1f}")
    print(table(*compared(timing, ["without"])))
    ratio = timing.ratio(f"every {EVERY}", "without")
    told("run with checkpoints beside one without", ratio[2], TARGETS["run"])
    return {**timing.as_dict(), "beside_without": ratio}


def told(what: str, high: float, target: float) -> None:
    """Say whether a target is met."""
    met = "met" if high <= target else "missed"
    print(f"  target: {what} at most {target:.2f}, upper bound: {met} with {high:.3f}")


def main() -> None:
    """Measure, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description="Measure what checkpoints on disk cost a run.")
    parser.add_argument("--only", choices=["blocking", "run"], help="default: both, in about 15 minutes")
    parser.add_argument("--blocks", type=int, metavar="N", default=30, help="turns of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", default=3, help="fresh processes (default: %(default)s)")
    length = "of a whole run; a multiple of 50, so that every block has its checkpoints (default: %(default)s)"
    parser.add_argument("--steps-per-block", type=int, metavar="N", default=EVERY, help=length)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    figures: dict[str, Any] = {"machine": begin()}
    if given.only != "run":
        figures["blocking"] = measure_blocking(given.blocks, given.rounds)
    if given.only != "blocking":
        figures["run"] = measure_run(given.blocks, given.rounds, given.steps_per_block)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
