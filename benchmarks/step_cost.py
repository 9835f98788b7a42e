"""What a step of ours costs beside a step of the plain loop, as a ratio from one interleaved run.

Each loop lives in a process of its own and gets leave for one block of steps at a time, in the order plain, ours,
ours, plain. The one that waits is stopped with all of its threads, so the two never compete, and whatever else the
machine does hits both alike. Fresh pairs of processes share out the blocks, since where memory happens to lie makes a
process some per cent faster or slower for all of its life. The wall's time is the figure; CPU time beside it tells
what is left of it when others use the machine.

Then come counts, which do not vary from run to run: torch calls and host reads of 20 steps.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --workload mlp --tracking mlflow --json figures.json
    python benchmarks/step_cost.py --ours plain                       (what the method sees where nothing differs)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import plain_loop
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from resilient_train.assemble import assemble
from resilient_train.config.compose import load
from resilient_train.events import Vitals
from resilient_train.ranks.world import World
from resilient_train.record import tracking
from resilient_train.record.console import Display, Terminal
from resilient_train.train import train

OVERRIDES = {
    "gpt": "model=gpt model.layers=5 model.width=256 model.context=128 data=python_source data.batch_size=2",
    "mlp": "model=mlp data=digits objective=classification",
}
# Short blocks pair best on a machine that is not ours alone. But MLflow's thread sends every 1.5 s: a shorter block
# than that would leave the sending out of the median.
STEPS_PER_BLOCK = {"none": {"gpt": 5, "mlp": 200}, "mlflow": {"gpt": 20, "mlp": 2000}}
BLOCKS = {"none": 60, "mlflow": 30}
WARM_UP = {"gpt": 20, "mlp": 600}
COUNTED = 20
NEVER = 10**9
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What a process is to train."""

    workload: str
    warm_up: int
    steps: int  # the warm-up's included
    log_every: int
    tracking: str


# ------------------------------------------------------------------------------------------------------- the two loops


def plain(job: Job, on_step: OnStep, tell: Callable[[Any], None]) -> None:
    """Train with the hand-written loop."""
    workload = plain_loop.WORKLOADS[job.workload]
    prepared = plain_loop.prepare(workload, job.steps)
    tell(_work(prepared.model, [prepared.optimizer], workload.batch_size))
    plain_loop.train(workload, prepared, steps=job.steps, log_every=job.log_every, on_step=on_step)


def ours(job: Job, on_step: OnStep, tell: Callable[[Any], None]) -> None:
    """Train as `python -m resilient_train` does, its lines and its log file included."""
    with TemporaryDirectory(prefix="step_cost-") as scratch:
        settings = [f"run.steps={job.steps}", f"run.log_every={job.log_every}", "data.eval._target_=null"]
        shown = [f"tracking={job.tracking}", f"tracking.uri=sqlite:///{scratch}/mlflow.db"]
        config = load([*OVERRIDES[job.workload].split(), *settings, *shown]).config
        world = World(config.accelerate)
        terminal = Terminal(is_main=True)
        terminal.log_to(Path(scratch, "train.log"))
        tracker = tracking.build(config.tracking, "step_cost", Path(scratch))
        run = assemble(config, world)
        tell(_work(run.model, run.updater.optimizers, run.slicing.samples))

        def settled(step: int) -> None:
            while step == job.warm_up and job.tracking == "mlflow" and tracker.run is None:
                time.sleep(0.1)  # MLflow's import and its new database belong to the start, not to a step
            on_step(step)

        train(run, _Counted(terminal.display(steps=job.steps, done=0), settled), tracker)
        tracker.finish("completed")
        terminal.close()


class _Counted:
    """A display that also tells the benchmark of every step."""

    def __init__(self, display: Display, on_step: OnStep) -> None:
        self.display, self.on_step = display, on_step

    def step(self, step: int) -> None:
        self.display.step(step)
        self.on_step(step)

    def show(self, vitals: Vitals) -> None:
        self.display.show(vitals)

    def close(self) -> None:
        self.display.close()


LOOPS = {"plain": plain, "ours": ours}


def _work(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], samples: int) -> dict[str, Any]:
    """Say what a loop works on, so that nobody compares different work."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    same = ("weight_decay", "betas", "eps", "fused")
    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "samples": samples,
        "device": str(next(model.parameters()).device),
        "groups": [{"weights": len(group["params"]), **{key: group[key] for key in same}} for group in groups],
    }


# ---------------------------------------------------------------------------------------------------------- in a child


def child(loop: str, job: Job, steps_per_block: int, pipe: Connection) -> None:
    """Run blocks of steps, each when told to, and answer with the seconds it took."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    started = _clocks()

    def on_step(step: int) -> None:
        nonlocal started
        if step >= job.warm_up and (step - job.warm_up) % steps_per_block == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            pipe.send(_clocks() - started)
            pipe.recv()
            started = _clocks()

    LOOPS[loop](job, on_step, pipe.send)


def _clocks() -> np.ndarray:
    """Return the time of the wall, and the time that all threads of this process had on a CPU."""
    return np.array([time.perf_counter(), time.process_time()])


def counting_child(loop: str, job: Job, pipe: Connection) -> None:
    """Count what the last steps of a short run ask of torch."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    counts = Counter[str]()
    counting = ExitStack()

    def on_step(step: int) -> None:
        if step == job.warm_up:
            counting.enter_context(_Calls(counts))
            counting.enter_context(_Reads(counts))
        elif step == job.steps:
            counting.close()

    LOOPS[loop](job, on_step, pipe.send)
    calls = counts.pop("call")
    pipe.send({"torch_calls": calls / (job.steps - job.warm_up), "host_reads": dict(counts)})


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own says nothing of types
    """Counts what reaches torch's kernels, forward, backward and optimizer alike, and the reads among it."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["call"] += 1
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero") and _lives_on_device(args[0]):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Counts the reads that reach no kernel on a CPU; on a GPU they wait like the others."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "cpu", "__array__") and _lives_on_device(args[0]):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _lives_on_device(tensor: Any) -> bool:
    """Tell what a GPU run keeps there from the whole numbers of the host: orders of rows, states of generators."""
    return not tensor.is_cpu or tensor.is_floating_point() or tensor.dtype == torch.bool


# -------------------------------------------------------------------------------------------------------- in the parent


class Runner:
    """A loop in a process of its own that moves only while it has leave."""

    def __init__(self, loop: str, job: Job, steps_per_block: int) -> None:
        self.loop = loop
        self.process, self.pipe = _spawn(child, loop, job, steps_per_block)

    def warm_up(self) -> Any:
        """Wait until it stands before its first block; return what it works on."""
        work = self._answer()
        self._answer()
        self._signal(signal.SIGSTOP)
        return work

    def block(self) -> np.ndarray:
        """Let it run one block; return the seconds that took, by both clocks."""
        self._signal(signal.SIGCONT)
        self.pipe.send(None)
        seconds: np.ndarray = self._answer()
        self._signal(signal.SIGSTOP)
        return seconds

    def finish(self) -> None:
        """Let it run to its end."""
        self._signal(signal.SIGCONT)
        self.pipe.send(None)
        self.process.join()

    def abandon(self) -> None:
        """End it wherever it is."""
        if self.process.is_alive():
            self.process.terminate()
            self._signal(signal.SIGCONT)
            self.process.join()

    def _answer(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit(f"the {self.loop} loop ended early: its error is above") from None

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def _spawn(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*args, there), daemon=True)
    process.start()
    there.close()  # else a child that dies would not end what we read
    return process, here


def time_blocks(options: Options, workload: str) -> dict[str, Any]:
    """Time both loops block by block, in fresh pairs of processes."""
    blocks = options.blocks or BLOCKS[options.tracking]
    steps_per_block = options.steps_per_block or STEPS_PER_BLOCK[options.tracking][workload]
    rounds: list[list[list[np.ndarray]]] = []
    for fresh in np.array_split(np.arange(blocks), options.rounds):
        rounds.append([])
        steps = WARM_UP[workload] + len(fresh) * steps_per_block
        job = Job(workload, WARM_UP[workload], steps, options.log_every, options.tracking)
        runners = [Runner(loop, job, steps_per_block) for loop in ("plain", options.ours)]
        try:
            plain_work, our_work = (runner.warm_up() for runner in runners)
            if plain_work != our_work:
                raise SystemExit(f"the loops do different work:\n  plain {plain_work}\n  ours  {our_work}")
            for number in fresh:
                order = runners if number % 2 == 0 else runners[::-1]  # ABBA: a drift favours neither
                seconds = {runner: runner.block() for runner in order}
                rounds[-1].append([seconds[runner] for runner in runners])
            for runner in runners:
                runner.finish()
        finally:
            for runner in runners:
                runner.abandon()
    step_ms = [1e3 * np.array(pairs) / steps_per_block for pairs in rounds]  # of each: [block, loop, clock]
    figures: dict[str, Any] = {"work": plain_work, "blocks": blocks, "steps_per_block": steps_per_block}
    for number, clock in enumerate(("wall", "cpu")):
        ratios = [ms[:, 1, number] / ms[:, 0, number] for ms in step_ms]
        figures[clock] = {
            "ratio": median_with_interval(ratios),
            "rounds": [float(np.median(one)) for one in ratios],
            "plain_ms": [ms[:, 0, number].tolist() for ms in step_ms],
            "ours_ms": [ms[:, 1, number].tolist() for ms in step_ms],
        }
    return figures


def median_with_interval(groups: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval, from a bootstrap that draws groups and then values within them."""
    random = np.random.default_rng(0)

    def drawn() -> np.ndarray:
        chosen = [groups[number] for number in random.integers(len(groups), size=len(groups))]
        return np.concatenate([random.choice(group, len(group)) for group in chosen])

    low, high = np.quantile([np.median(drawn()) for _ in range(5000)], (0.025, 0.975))
    return float(np.median(np.concatenate(groups))), float(low), float(high)


def count_calls(options: Options, workload: str) -> dict[str, Any]:
    """Count torch calls and host reads of steady steps, without any logging and with the usual."""
    spawned = {
        (loop, log_every): _spawn(counting_child, loop, Job(workload, 40, 40 + COUNTED, log_every, "none"))
        for loop in sorted({"plain", options.ours}, reverse=True)
        for log_every in (NEVER, 10)
    }
    counts: dict[str, Any] = {}
    for (loop, log_every), (process, pipe) in spawned.items():
        pipe.recv()  # what it works on
        counts[f"{loop}, log_every={'never' if log_every == NEVER else log_every}"] = pipe.recv()
        process.join()
    return counts


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    workload: Sequence[str]
    blocks: int | None
    steps_per_block: int | None
    rounds: int
    log_every: int
    tracking: str
    ours: str
    json: Path | None


def _options() -> Options:
    parser = argparse.ArgumentParser(
        description="Compare the cost of a step: ours beside a hand-written Accelerate loop.",
        epilog="Both workloads take about 3 minutes; with --tracking mlflow, whose blocks are longer, about 7.",
    )
    parser.add_argument("--workload", action="append", choices=sorted(OVERRIDES), help="gpt or mlp (default: both)")
    parser.add_argument("--blocks", type=int, metavar="N", help="of each loop (default: 60; 30 with mlflow)")
    parser.add_argument("--steps-per-block", type=int, metavar="N", help="default: 0.2 to 0.5 s; 2 s with mlflow")
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=6, help="fresh pairs of processes (default: %(default)s)"
    )
    parser.add_argument(
        "--log-every", type=int, metavar="N", default=10, help="steps between two lines (default: %(default)s)"
    )
    tracks = "where ours shows the run; mlflow: a new SQLite database (default: %(default)s)"
    parser.add_argument("--tracking", choices=sorted(STEPS_PER_BLOCK), default="none", help=tracks)
    itself = "plain: the plain loop against itself, to see what the method makes of no difference"
    parser.add_argument("--ours", choices=sorted(LOOPS), default="ours", help=itself)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = vars(parser.parse_args())
    return Options(**{**given, "workload": given["workload"] or sorted(OVERRIDES)})


def machine() -> dict[str, Any]:
    """Say where the figures come from."""
    load_before = round(os.getloadavg()[0], 1)
    return {"cpus": os.cpu_count(), "load_before": load_before, "torch": torch.__version__, "threads": 1}


def main() -> None:
    """Measure, print, and write the figures if asked to."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a timeout leaves no stopped process behind
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: dict[str, Any] = {"machine": machine(), "tracking": options.tracking, "log_every": options.log_every}
    print(", ".join(f"{name} {value}" for name, value in figures["machine"].items()), flush=True)
    for workload in options.workload:
        timed = figures[workload] = time_blocks(options, workload)
        blocks = f"{timed['blocks']} blocks of {timed['steps_per_block']} steps"
        print(f"\n{workload}: {timed['work']['weights'] / 1e6:.2f} M weights, {blocks}, tracking {options.tracking}")
        for clock in ("wall", "cpu"):
            all_ms = {loop: np.concatenate(timed[clock][f"{loop}_ms"]) for loop in ("plain", "ours")}
            medians = "  ".join(f"{loop} {np.median(values):.3f} ms" for loop, values in all_ms.items())
            ratio, low, high = timed[clock]["ratio"]
            print(f"  {clock:4}  {medians}  ratio {ratio:.3f} [{low:.3f}, {high:.3f}]", flush=True)
        timed["counts"] = count_calls(options, workload)
        for name, counted in timed["counts"].items():
            reads = ", ".join(f"{what} {many}" for what, many in counted["host_reads"].items()) or "none"
            print(f"  {name}: {counted['torch_calls']:g} torch calls a step; host reads in {COUNTED} steps: {reads}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
