"""The loop, read from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from resilient_train.assemble import Run
from resilient_train.objective import Metrics
from resilient_train.record.console import Display, log
from resilient_train.record.tracking import Tracker
from resilient_train.state.randomness import Purpose, mix, preserved, seed_all


def train(run: Run, display: Display, tracker: Tracker) -> None:
    """Make updates until `run.steps` of them are accepted; evaluate on the way and at the end."""
    settings, clock, world = run.config.run, run.clock, run.world
    run.model.train()
    run.tally.start_lap()
    while clock.step < settings.steps:
        update = run.samples.next_update()
        # Training randomness is a function of the place in the stream: a repeated update repeats its dropout.
        seed_all(mix(Purpose.UPDATE, settings.seed, update.start, world.rank), world.device)
        loss, metrics = forward_backward(run, update.batches)
        applied = run.updater.apply(clock.step)
        clock.tick += 1
        clock.step += applied.accepted
        run.vitals.record(
            tick=clock.tick,
            step=clock.step,
            accepted=applied.accepted,
            lr=applied.lr,
            loss=loss,
            grad_norm=applied.grad_norm,
            metrics=metrics,
        )
        display.step(clock.step)
        if clock.tick == 1:
            tracker.begin()  # MLflow may load now; before, it would have kept the first update waiting
        if clock.tick % settings.log_every == 0 or run.vitals.is_full:
            report(run, display, tracker)
        if applied.accepted and settings.eval_every and clock.step % settings.eval_every == 0:
            evaluate_and_report(run, tracker)
    report(run, display, tracker)
    if not settings.eval_every or clock.step % settings.eval_every:
        evaluate_and_report(run, tracker)


def forward_backward(run: Run, batches: Sequence[Any]) -> tuple[torch.Tensor, Metrics]:
    """Leave the gradients of an update's micro-batches in the weights; return the means of what they measured."""
    accelerator = run.world.accelerator
    measured = []
    for number, batch in enumerate(batches, start=1):
        stays_here = run.world.size > 1 and number < len(batches)  # gradients travel once an update
        with accelerator.no_sync(run.model) if stays_here else nullcontext():
            loss, metrics = run.objective.for_training(run.model, run.on_device(batch))
            accelerator.backward(loss)
        measured.append((loss.detach(), metrics))
    if len(measured) == 1:
        return measured[0]
    names = sorted({name for _, metrics in measured for name in metrics})
    means = {name: _mean([metrics[name] for _, metrics in measured if name in metrics]) for name in names}
    return _mean([loss for loss, _ in measured]), means


def report(run: Run, display: Display, tracker: Tracker) -> None:
    """Read the vitals back and tell the newest. The one place of a healthy step where the host waits for the device."""
    vitals = run.vitals.read()
    run.tally.add(vitals)
    if not vitals:
        return
    newest = vitals[-1]
    display.show(newest)
    seconds = run.tally.lap(len(vitals))
    values = {"loss": newest.loss, "grad_norm": newest.grad_norm, "lr": newest.lr, "step": newest.step}
    values |= {f"train/{name}": value for name, value in newest.metrics.items()}
    tracker.metrics(
        newest.tick, values | {"step_ms": 1e3 * seconds, "samples_per_second": run.slicing.samples / seconds}
    )


def evaluate_and_report(run: Run, tracker: Tracker) -> None:
    """Evaluate, if there is something to evaluate on."""
    if run.evaluation is None:
        return
    run.evaluated = evaluate(run)
    told = "  ".join(f"{name} {value:.4g}" for name, value in run.evaluated.items())
    log.info("evaluation after step %d: %s", run.clock.step, told)
    tracker.metrics(run.clock.tick, {f"eval/{name}": value for name, value in run.evaluated.items()})


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Return the mean over all rows and ranks of the loss and of what the objective reports."""
    assert run.evaluation is not None
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    run.model.eval()
    with preserved(run.world.device):  # whatever evaluation draws, training goes on as if it had not happened
        for batch, weight in run.evaluation:
            loss, metrics = run.objective(run.model, run.on_device(batch))
            for name, value in {"loss": loss, **metrics}.items():
                part = torch.as_tensor(value, dtype=torch.float32, device=run.world.device) * weight
                sums[name] = sums[name] + part if name in sums else part
                rows[name] = rows.get(name, 0) + weight
    run.model.train()
    run.tally.start_lap()  # a step's time has no evaluation in it
    names = sorted(run.world.union(sums), key=lambda name: (name != "loss", name))
    cells = [cell for name in names for cell in (sums.get(name, 0.0), rows.get(name, 0))]
    totals = run.world.sum(torch.stack([torch.as_tensor(cell, device=run.world.device).float() for cell in cells]))
    pairs = totals.view(-1, 2).tolist()
    return {name: total / count if count else math.nan for name, (total, count) in zip(names, pairs, strict=True)}


def _mean(values: Sequence[torch.Tensor | float]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(value, dtype=torch.float32) for value in values]).mean()
