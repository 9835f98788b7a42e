"""The loops of `matrix.py`: one written by hand, and one with a guard, each struck by the same fault."""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from clinic.matrix_faults import Fault, Injector, columns_with, is_stream
from clinic.matrix_programs import ODD, RECIPES, Recipe, Rows, optimizers
from resilient_train import GaveUp, Guard

PATIENCE = 120.0  # seconds for one loop
ENDLESS = 10  # attempts per wanted update
TOLD = 14  # lines of the log that are kept of a run


class OutOfTime(BaseException):
    """A loop took too long; not an `Exception`, so that nothing on the way treats it as one."""


@dataclass(frozen=True)
class Job:
    """One loop: which program, which fault, and by which arm."""

    number: int  # of the run; below 0 for the clean ones
    recipe: str
    optimizer: str
    seed: int
    arm: str  # "clean", "twin" (clean, with the seed of a run), "plain", "again", "skip" or "guarded"
    fault: Fault | None = None
    hands_over: bool = False  # makes its loss itself, instead of giving the guard an objective
    with_log: bool = False
    recovery: str = "balanced"

    def program(self) -> Recipe:
        return (RECIPES | ODD)[self.recipe]


@dataclass
class Ended:
    """How a loop ended."""

    loss: float = math.nan  # held out
    first: float = math.nan  # with the first weights
    late: float = math.nan  # at two thirds, of a hand-written loop
    said: str = "well"
    why: str = ""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    ticks: int = 0
    steps_lost: int = 0
    seconds: float = 0.0
    log: list[str] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------------- arms


class Kit:
    """What a loop is made of: model, optimizers, schedule, data and the fault that strikes it."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.recipe = recipe = job.program()
        seed = job.seed + 500 * (job.arm == "again")
        torch.manual_seed(seed)
        train, self.held = recipe.data()
        rate = recipe.rates[job.optimizer]
        self.model = recipe.model()
        self.optimizers = optimizers(job.optimizer, rate, self.model)
        self.injector = Injector(job.fault, recipe, self.model, self.optimizers)
        single = self.optimizers[0] if len(self.optimizers) == 1 else None
        self.schedule = LambdaLR(single, self.injector.rate) if single is not None else None
        self.first = self.held_out()
        data = Rows(columns_with(job.fault, train, recipe, order=seed))
        common: dict[str, Any]
        common = {"data": data, "batch_size": recipe.batch_size, "seed": seed, "shuffle": not is_stream(job.fault)}
        self.accelerator = Accelerator(cpu=True)
        self.prepared: Any = self.model
        if job.arm != "guarded":  # a guard of nothing, that the order of the data is the same
            nothing = nn.Linear(1, 1)
            self.guard = Guard(self.accelerator, nothing, torch.optim.SGD(nothing.parameters()), **common)
            return
        schedules = [] if self.schedule is None else [self.schedule]
        self.prepared, *rest = self.accelerator.prepare(self.model, *self.optimizers, *schedules)
        self.guard = Guard(
            self.accelerator,
            self.prepared,
            rest if single is None else rest[0],
            schedule=None if single is None else rest[1],
            objective=None if job.hands_over else self.injector.objective,
            steps=recipe.steps,
            run_dir=run_dir,
            recovery=job.recovery,
            clip=1.0,
            **common,
        )

    @torch.no_grad()
    def held_out(self) -> float:
        """Evaluate, without a fault, and leave the state of training as it was."""
        state = torch.get_rng_state()
        torch.manual_seed(0)
        self.model.eval()
        loss = self.recipe.criterion(self.model(self.held[0]), self.held).item()
        self.model.train()
        torch.set_rng_state(state)
        return loss


def by_hand(kit: Kit, *, skips: bool) -> float:
    """Train as one does without a guard; return the held-out loss at two thirds."""
    weights, late = list(kit.model.parameters()), math.nan
    for attempt in range(1, kit.recipe.steps + 1):
        (batch,) = kit.guard.samples.next_update().batches
        batch = kit.injector.on_batch(batch)
        loss = kit.injector.objective(kit.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in kit.optimizers:
            if not skips or (math.isfinite(loss.item()) and math.isfinite(norm.item())):
                optimizer.step()
            optimizer.zero_grad()
        if kit.schedule is not None:
            kit.schedule.step()
        kit.injector.after()
        if attempt == 2 * kit.recipe.steps // 3:
            late = kit.held_out()
    return late


def guarded(kit: Kit, *, hands_over: bool) -> None:
    """Train with the guard."""
    guard, injector = kit.guard, kit.injector
    for given in guard.batches():
        batch: Any = injector.on_batch(given)
        if hands_over:
            loss: Tensor = injector.objective(kit.prepared, batch)
            kit.accelerator.backward(loss)
            guard.update(loss)
        else:
            guard.step(batch)
        injector.after()
        if injector.attempt > ENDLESS * kit.recipe.steps:
            raise RuntimeError("does not come to an end")
    guard.close()


def ended(job: Job, kit: Kit, run_dir: Path) -> Ended:
    """Run a loop to its end, whatever that is."""
    end, started = Ended(first=kit.first), time.monotonic()
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        if job.arm == "guarded":
            guarded(kit, hands_over=job.hands_over)
        else:
            end.late = by_hand(kit, skips=job.arm == "skip")
    except GaveUp as error:
        end.said, end.why = "gave up", str(error)
    except (Exception, OutOfTime) as error:
        end.said, end.why = "failed", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        kit.guard.let_go()
    end.seconds = time.monotonic() - started
    end.loss, end.ticks = kit.held_out(), kit.injector.attempt
    if job.arm == "guarded":
        _tell(end, kit.guard, run_dir)
    return end


def _out_of_time(number: int, frame: Any) -> None:
    raise OutOfTime(f"{PATIENCE:.0f} s are over")


def _tell(end: Ended, guard: Guard, run_dir: Path) -> None:
    """Note what the guard says of its run: in its incidents, and in its summary where there is one."""
    for one in guard.incidents:
        actions = [str(getattr(action, "remedy", action)) for action in getattr(one.decision, "actions", [])]
        told: dict[str, Any] = {
            "signal": str(one.anomaly.signal),
            "cause": str(one.diagnosis.cause),
            "outcome": str(one.outcome),
        }
        told |= {"step": one.anomaly.step, "steps_lost": one.steps_lost, "actions": actions}
        end.incidents.append(told)
        end.steps_lost += one.steps_lost
    summary_file = run_dir / "summary.json"
    summary = json.loads(summary_file.read_text("utf-8")) if summary_file.exists() else {}
    if end.said == "well" and summary.get("status") == "gave_up":
        end.said = "gave up"
    elif end.said == "well" and summary.get("status") != "completed":
        end.said, end.why = "failed", f"summary.json says {summary.get('status')}"
    doubted = summary.get("verdict") not in (None, "well", "recovered", "no_progress")
    if end.said == "well" and (doubted or any(one["outcome"] == "unrecovered" for one in end.incidents)):
        end.said = "not recovered"
    if end.said == "well" and summary.get("verdict") == "no_progress":
        end.said = "no progress"


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def work(job: Job) -> Ended:
    """Do one job in a worker process; nothing that it raises is lost or ends the others."""
    torch.set_num_threads(1)
    log, handler = logging.getLogger("resilient_train"), _Lines()
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    with TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True) as folder:
        try:
            end = ended(job, Kit(job, Path(folder, "run")), Path(folder, "run"))
        except Exception as error:
            end = Ended(said="failed", why=f"harness: {type(error).__name__}: {error}")
    end.log = [line.replace(folder, "") for line in handler.lines]
    if not job.with_log:
        end.log = end.log[-TOLD:]
    return end


def started_worker() -> None:
    torch.set_num_threads(1)
