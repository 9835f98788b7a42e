"""What a case is trained by: our guard as a user would put it around the program, loops written by hand, and ARC."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import by_hand
import clips
import torch
import with_arc
from accelerate import Accelerator
from program import Program, guilty_lines
from score import OURS, TWIN, Expected, Run, Said
from sound import yardstick
from torch import Tensor, nn
from torch.optim import Optimizer

import resilient_train
from resilient_train.adapters.guard import Guard
from resilient_train.errors import TrainError, in_one_line
from resilient_train.types import Incident

ENDLESS = 10  # attempts per wanted update
REWIND_ONLY = {  # the budget is that of `benchmarks/recovery.py`
    "ladders": {"default": [{"do": ["rewind"], "strikes": None}]},
    "budget": {"incidents": 50, "run": 100},
}
Recovery = str | Mapping[str, Any]
Arm = Callable[[Program, int, Run], None]  # trains, and notes in the run what cannot be seen from outside

HERE, PACKAGE = Path(__file__).parent, Path(resilient_train.__file__).parent


def on_cuda() -> bool:
    """Whether ours trains there; the other arms and the twin train on the CPU."""
    return os.environ.get("CLINIC_DEVICE") == "cuda"


# ---------------------------------------------------------------------------------------------------------------- arms


def guarded(program: Program, seed: int, run: Run, recovery: Recovery) -> None:
    """Train as our README says."""
    accelerator = Accelerator(cpu=not on_cuda(), mixed_precision="bf16" if program.bf16 else "no")

    def under_autocast(model: nn.Module, batch: Any) -> Tensor:
        with accelerator.autocast():  # as the user has it: the loss as well, not only the forward
            return loss(model, batch)

    def on_device(model: nn.Module, batch: Any) -> Tensor:
        with torch.device("cuda"):  # the constants that a loss makes are there, too
            return program.loss(model, batch)

    loss = on_device if on_cuda() else program.loss

    torch.manual_seed(seed)
    model = accelerator.prepare(program.model.train())
    guard = Guard(
        accelerator,
        model,
        program.optimizer(model.parameters()),
        data=program.rows,
        batch_size=program.batch_size,
        steps=program.steps,
        objective=under_autocast if program.bf16 else loss,
        collate=program.collate,
        recovery=recovery,
        clip=program.clip,
        seed=seed,
    )
    try:
        for batch in guard.batches():
            guard.step(batch)
            if guard.clock.tick > ENDLESS * program.steps:
                run.why = f"is at step {guard.clock.step} after {guard.clock.tick} attempts"
                break
    finally:
        run.lost = guard.clock.tick - guard.clock.step
        run.incidents = [said(incident) for incident in guard.incidents]


def by_itself(program: Program, seed: int, run: Run, *, skips: bool, clip: type[clips.Clip] | None = None) -> None:
    """Train as a tutorial does, and count the updates that landed."""
    landed = 0

    def counted(weights: Iterable[nn.Parameter]) -> Optimizer:
        def count(*_: Any) -> None:
            nonlocal landed
            landed += 1

        made = program.optimizer(weights)
        made.register_step_post_hook(count)
        return made

    by_hand.train(dataclasses.replace(program, optimizer=counted), seed, skips=skips, clip=clip() if clip else None)
    run.lost = program.steps - landed


def arc(program: Program, seed: int, run: Run) -> None:
    run.lost = with_arc.train(program, seed)


ARMS: dict[str, Arm] = {
    "balanced": partial(guarded, recovery="balanced"),
    "aggressive": partial(guarded, recovery="aggressive"),
    "conservative": partial(guarded, recovery="conservative"),
    "plain": partial(by_itself, skips=False),
    "skip only": partial(by_itself, skips=True),
    "skip, clip 1.0": partial(by_itself, skips=True, clip=clips.GlobalNorm),
    "skip, AdaGC": partial(by_itself, skips=True, clip=clips.AdaGC),
    "skip, ZClip": partial(by_itself, skips=True, clip=clips.ZClip),
    "rewind only": partial(guarded, recovery=REWIND_ONLY),
    "arc": arc,
}


# ------------------------------------------------------------------------------------------------------------- one run


def carried_out(run: Run) -> Run:
    """Train, and note what became of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begun, case = time.perf_counter(), importlib.import_module(f"{run.of}.{run.case}")
    if run.arm == TWIN:
        stick = yardstick(case, run.seed)
        run.start, run.loss, run.is_finite = finite(stick.start), finite(stick.healthy), True
    else:
        program = case.program(run.seed)
        run.expected = expected(case, program)
        try:
            ARMS[run.arm](program, run.seed, run)
        except Exception as error:  # whatever ends a user's run
            run.why = str(error) if isinstance(error, TrainError) else in_one_line(error)
        try:
            run.is_finite = all(bool(weight.isfinite().all()) for weight in program.model.parameters())
        except torch.AcceleratorError:  # the GPU is lost, and the weights with it
            run.is_finite = False
        run.loss = evaluated(case, run.seed, program.model.state_dict())
    run.seconds = round(time.perf_counter() - begun, 2)
    return run


def evaluated(case: Any, seed: int, weights: dict[str, Tensor]) -> float | None:
    """The loss that the mended twin has with these weights."""
    try:
        return finite(case.program(seed, mended=True).evaluate(weights))
    except Exception:  # some operations raise where a weight is NaN
        return None


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def said(incident: Incident) -> Said:
    """What an incident says, as plain data."""
    diagnosis, culprit = incident.diagnosis, incident.diagnosis.culprit
    return Said(
        signal=incident.anomaly.signal,
        cause=diagnosis.cause,
        file=str(Path(culprit.file).resolve()) if culprit else None,
        line=culprit.line if culprit else None,
        op=culprit.op if culprit else None,
        rows=[int(row) for row in diagnosis.rows],
        advice=diagnosis.advice,
        did=[action.remedy for action in incident.decision.actions],
        outcome=incident.outcome,
    )


def expected(case: ModuleType, program: Program) -> Expected:
    """What the incidents should say."""
    guilty, file = program.guilty, str(Path(str(case.__file__)).resolve())
    lines = sorted(line for marked in guilty_lines(case) for line in statement(inspect.getsource(case), marked))
    return Expected(guilty.cause, guilty.ops, guilty.rows, file, lines)


def statement(source: str, line: int) -> range:
    """The lines of the innermost statement that a line belongs to; of one with a body only its head."""
    spans = [head(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return min((span for span in spans if line in span), key=len, default=range(line, line + 1))


def head(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    return range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)


# ------------------------------------------------------------------------------------------------ where it comes from


def made_by(of: str, case: str, arm: str) -> str:
    """A digest of the source that a run comes from: where it is the same, the run need not be made again."""
    files = [
        HERE / of / f"{case}.py",
        *(HERE / f"{name}.py" for name in ("arms", "by_hand", "clips", "program", "sound")),
    ]
    if arm == "arc":
        files.append(HERE / "with_arc.py")
    made = digest((*files, *(sources() if arm in OURS else ())))
    return f"{made} on cuda" if arm in OURS and on_cuda() else made


@cache
def digest(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


@cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(file for ending in ("py", "yaml") for file in PACKAGE.rglob(f"*.{ending}")))
