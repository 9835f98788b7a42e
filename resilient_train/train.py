"""The loop, read from top to bottom."""

from __future__ import annotations

import math

import torch

from resilient_train.assemble import Run
from resilient_train.ranks.interrupt import Interrupt
from resilient_train.record.console import Display, log
from resilient_train.record.incidents import tags
from resilient_train.record.tracking import Tracker
from resilient_train.state.randomness import preserved


def train(run: Run, display: Display, tracker: Tracker, interrupt: Interrupt) -> None:
    """Make updates until `run.steps` of them are accepted; evaluate on the way and at the end."""
    settings, guard = run.config.run, run.guard
    run.model.train()
    run.tally.start_lap()
    for batch in guard.batches(settings.steps):
        interrupt.check()
        if not guard.step(batch):
            continue  # gradients accumulate, or the update was dropped for the sake of an incident
        display.step(guard.clock.step)
        if guard.clock.tick == 1:
            tracker.begin()  # MLflow may load now; before, it would have kept the first update waiting
        run.tally.add(guard.newest)
        if guard.newest and guard.newest.accepted and guard.newest.step % settings.log_every == 0:
            report(run, display, tracker)
        if settings.eval_every and guard.attempted_step % settings.eval_every == 0 and guard.settle():
            run.tally.add(guard.newest)
            report(run, display, tracker)
            evaluate_and_report(run, tracker)
    run.tally.add(guard.newest)
    report(run, display, tracker)
    if not settings.eval_every or guard.clock.step % settings.eval_every:
        evaluate_and_report(run, tracker)


def report(run: Run, display: Display, tracker: Tracker) -> None:
    """Tell the newest vitals that have been heard, and all that an objective reported beside its loss."""
    newest, guard = run.guard.newest, run.guard
    if newest is None or newest.tick == run.told_tick:
        return
    run.told_tick = newest.tick
    metrics = guard.metrics.read()  # waits for the device
    display.show(newest, metrics)
    values = {"loss": newest.loss, "grad_norm": newest.grad_norm, "lr": newest.lr, "step": newest.step}
    values |= {f"train/{name}": value for name, value in metrics.items()}
    if seconds := run.tally.lap(guard.clock.tick):
        values |= {"step_ms": 1e3 * seconds, "samples_per_second": guard.slicing.samples / seconds}
    if len(guard.incidents) != run.told_incidents:
        run.told_incidents = len(guard.incidents)
        tracker.tags(tags(guard.incidents))
    tracker.metrics(newest.tick, values | {"incidents_total": len(guard.incidents)})


def evaluate_and_report(run: Run, tracker: Tracker) -> None:
    """Evaluate, if there is something to evaluate on."""
    if run.evaluation is None:
        return
    run.evaluated = evaluate(run)
    told = "  ".join(f"{name} {value:.4g}" for name, value in run.evaluated.items())
    log.info("evaluation after step %d: %s", run.guard.clock.step, told)
    tracker.metrics(run.guard.clock.tick, {f"eval/{name}": value for name, value in run.evaluated.items()})


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Return the mean over all rows and ranks of the loss and of what the objective reports."""
    assert run.evaluation is not None
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    run.model.eval()
    with preserved(run.world.device):  # whatever evaluation draws, training goes on as if it had not happened
        for batch, weight in run.evaluation:
            loss, metrics = run.objective(run.model, run.guard.on_device(batch))
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
