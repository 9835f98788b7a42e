"""The loop, read from top to bottom."""

from __future__ import annotations

import math

import torch

from resilient_train.app.build import Run
from resilient_train.core.randomness import preserved
from resilient_train.wording import PROGRESS, duration, log


def train(run: Run) -> None:
    """Make updates until `run.steps` of them are accepted, or a request to stop; evaluate meanwhile and at the end."""
    settings, guard = run.config.run, run.guard
    run.model.train()
    step = guard.clock.step
    if step > 0 and run.evaluates_at(step) and run.evaluated_at != step:  # the previous process ended before it
        evaluate_and_report(run)
    for batch in guard.batches():
        attempted = guard.step(batch)
        run.beat()
        if not attempted:
            continue  # gradients accumulate, or an incident dropped the update
        guard.reporter.tracker.begin()  # MLflow may load now; before, it would have delayed the first update
        if guard.newest and guard.newest.accepted and guard.newest.step % settings.log_every == 0:
            report(run)
        if run.evaluates_at(guard.attempted_step) and guard.settle():
            report(run)
            evaluate_and_report(run)
    report(run)
    if not guard.stopped and run.evaluated_at != guard.clock.step:
        evaluate_and_report(run)


def report(run: Run) -> None:
    if (values := run.guard.report()) is None:
        return
    step, steps = values["step"], run.config.run.steps
    own = {name.removeprefix("train/"): one for name, one in values.items() if name.startswith("train/")}
    more = "".join(f"  {name} {one:.4g}" for name, one in own.items() if math.isfinite(one))
    left_s = 1e-3 * values.get("step_ms", 0.0) * (steps - step)
    numbers = f"loss {values['loss']:.4f}{more}  grad {values['grad_norm']:.3g}  lr {values['lr']:.2e}"
    log.info("step %d/%d  %s  %s left", step, steps, numbers, duration(left_s), extra=PROGRESS)
    run.guard.reporter.show(values)


def evaluate_and_report(run: Run) -> None:
    """Evaluate, if there is an evaluation set; a request to stop may end it early."""
    if run.evaluation is None or not (found := evaluate(run)):
        return
    run.evaluated_at = run.guard.clock.step
    run.guard.evaluated(found)
    results = "  ".join(f"{name} {value:.4g}" for name, value in found.items())
    log.info("evaluation after step %d: %s", run.guard.clock.step, results)


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Return the mean over all rows and ranks of the loss and of the objective's metrics; {} if it was stopped."""
    assert run.evaluation is not None
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    run.model.eval()
    with preserved(run.world.device):  # training continues with the random numbers as if there was no evaluation
        for batch, weight in run.evaluation.batches(run.beat):
            run.beat()
            if run.world.size == 1 and run.stop():  # several processes would each stop at another batch
                run.model.train()
                run.guard.stop_now()  # the run is not complete without its evaluation
                return {}
            loss, metrics = run.objective(run.model, run.world.on_device(batch))
            for name, value in {"loss": loss, **metrics}.items():
                part = torch.as_tensor(value, dtype=torch.float32, device=run.world.device) * weight
                sums[name] = sums.get(name, 0) + part
                rows[name] = rows.get(name, 0) + weight
    run.model.train()
    run.guard.reporter.start_lap()  # the time of a step does not include an evaluation
    known = set[str]().union(*run.world.all_of(list(sums)))  # each rank may know other ones
    names = sorted(known, key=lambda name: (name != "loss", name))
    cells = [cell for name in names for cell in (sums.get(name, 0.0), rows.get(name, 0))]
    totals = run.world.sum(torch.stack([torch.as_tensor(cell, device=run.world.device).float() for cell in cells]))
    pairs = totals.view(-1, 2).tolist()
    return {name: total / count if count else math.nan for name, (total, count) in zip(names, pairs, strict=True)}
