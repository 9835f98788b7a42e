"""The loop, read from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from resilient_train.app.build import Run
from resilient_train.app.terminal import Display
from resilient_train.state.randomness import preserved
from resilient_train.tracking.uploads import Tracker
from resilient_train.wording import log


def _unwatched() -> None:
    """Nobody looks at the clock."""


def train(run: Run, display: Display, tracker: Tracker, beat: Callable[[], None] = _unwatched) -> None:
    """Make updates until `run.steps` of them are accepted, or it is asked to stop; evaluate on the way and at the end.

    `beat` is called whenever the run has got on.
    """
    settings, guard = run.config.run, run.guard
    run.model.train()
    if run.owes_evaluation(guard.clock.step):
        evaluate_and_report(run, tracker, beat)
    run.guard.reporter.times.start_lap()
    for batch in guard.batches():
        attempted = guard.step(batch)
        beat()
        if not attempted:
            continue  # gradients accumulate, or the update was dropped for the sake of an incident
        display.step(guard.clock.step)
        if not run.has_begun:
            run.has_begun = True
            tracker.begin()  # MLflow may load now; before, it would have kept the first update waiting
        if guard.newest and guard.newest.accepted and guard.newest.step % settings.log_every == 0:
            report(run, display, tracker)
        if run.evaluates_at(guard.attempted_step) and guard.settle():
            report(run, display, tracker)
            evaluate_and_report(run, tracker, beat)
    report(run, display, tracker)
    if not guard.stopped and run.evaluated_at != guard.clock.step:
        evaluate_and_report(run, tracker, beat)


def report(run: Run, display: Display, tracker: Tracker) -> None:
    """Show the newest vitals that were read back, and what the objective reported next to its loss."""
    if (newest := run.guard.report()) is not None:
        display.show(newest.vitals, newest.metrics)
        tracker.metrics(newest.vitals.tick, newest.values)


def evaluate_and_report(run: Run, tracker: Tracker, beat: Callable[[], None]) -> None:
    """Evaluate, if there is something to evaluate on, and nobody asks to stop meanwhile."""
    if run.evaluation is None or not (found := evaluate(run, beat)):
        return
    run.evaluated, run.evaluated_at = found, run.guard.clock.step
    run.guard.evaluated(found)
    told = "  ".join(f"{name} {value:.4g}" for name, value in run.evaluated.items())
    log.info("evaluation after step %d: %s", run.guard.clock.step, told)
    tracker.metrics(run.guard.clock.tick, {f"eval/{name}": value for name, value in run.evaluated.items()})


@torch.no_grad()
def evaluate(run: Run, beat: Callable[[], None] = _unwatched) -> dict[str, float]:
    """Return the mean over all rows and ranks of the loss and of what the objective reports.

    Nothing where it was left because the run is to stop: it is made up for when the run goes on. Several processes, of
    which each would leave at another batch, finish it first.
    """
    assert run.evaluation is not None
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    run.model.eval()
    with preserved(run.world.device):  # whatever evaluation draws, training goes on as if it had not happened
        for batch, weight in run.evaluation.batches(beat):
            beat()
            if run.world.size == 1 and run.stop():
                run.model.train()
                run.guard.stop_now()  # the end, too, is not reached without it
                return {}
            loss, metrics = run.objective(run.model, run.guard.on_device(batch))
            for name, value in {"loss": loss, **metrics}.items():
                part = torch.as_tensor(value, dtype=torch.float32, device=run.world.device) * weight
                sums[name] = sums[name] + part if name in sums else part
                rows[name] = rows.get(name, 0) + weight
    run.model.train()
    run.guard.reporter.times.start_lap()  # a step's time has no evaluation in it
    names = sorted(run.world.union(sums), key=lambda name: (name != "loss", name))
    cells = [cell for name in names for cell in (sums.get(name, 0.0), rows.get(name, 0))]
    totals = run.world.sum(torch.stack([torch.as_tensor(cell, device=run.world.device).float() for cell in cells]))
    pairs = totals.view(-1, 2).tolist()
    return {name: total / count if count else math.nan for name, (total, count) in zip(names, pairs, strict=True)}
