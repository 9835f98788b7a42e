"""Our guard around a program, as a user would put it there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import resilient_train
from clinic.program import Program
from clinic.score import Run, Said
from resilient_train.ground.files import conf
from resilient_train.ground.types import Incident
from resilient_train.ground.wording import say
from resilient_train.loop.guard import Guard

ENDLESS = 10  # attempts per wanted update
PACKAGE = Path(resilient_train.__file__).parent
SOURCES = (*sorted(PACKAGE.rglob("*.py")), *sorted(conf().rglob("*.yaml")))


def on_cuda() -> bool:
    """Whether ours trains there; the other arms and the twin train on the CPU."""
    return os.environ.get("CLINIC_DEVICE") == "cuda"


def guarded(program: Program, seed: int, run: Run, recovery: str | Mapping[str, Any]) -> None:
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


def balanced(program: Program, seed: int, run: Run) -> None:
    """Train with the default policy."""
    guarded(program, seed, run, "balanced")


def aggressive(program: Program, seed: int, run: Run) -> None:
    guarded(program, seed, run, "aggressive")


def conservative(program: Program, seed: int, run: Run) -> None:
    guarded(program, seed, run, "conservative")


def rewind_only(program: Program, seed: int, run: Run) -> None:
    """Train with a ladder of nothing but rewinds."""
    ladders = {"default": [{"do": ["rewind"], "strikes": None}]}
    guarded(program, seed, run, {"ladders": ladders, "budget": {"incidents": 50}})


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
        advice=say(diagnosis.advice),
        did=[action.remedy for action in incident.decision.actions],
        outcome=incident.outcome,
    )
