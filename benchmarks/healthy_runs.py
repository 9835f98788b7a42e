"""Real runs without any fault: what is reported there is a false alarm.

python benchmarks/healthy_runs.py --seeds 3 --steps 600
"""

from __future__ import annotations

import argparse
import sys
import time

from resilient_train.app.build import assemble
from resilient_train.app.config.compose import load
from resilient_train.app.train import evaluate
from resilient_train.ranks.world import World

SMALL_GPT = ["model=gpt", "data=python_source", "objective=language_model", "model.layers=2", "model.width=64"]
SMALL_GPT += ["model.heads=4", "data.train.context=64", "data.eval.context=64", "data.eval.max_bytes=20000"]
DIGITS = ["data=digits", "objective=classification"]
OWN = "optimizer=custom"

RECIPES: dict[str, list[str]] = {
    "gpt, AdamW": [*SMALL_GPT, "data.batch_size=8"],
    "gpt, warm restarts": [
        *(*SMALL_GPT, "data.batch_size=8", "schedule=custom", "+schedule.T_0=150"),
        "schedule._target_=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts",
    ],
    "gpt, no clipping, high rate": [*SMALL_GPT, "data.batch_size=4", "optimizer.lr=5e-3", "clip.max_norm=null"],
    "mlp, AdamW": ["model=mlp", *DIGITS],
    "mlp, batches of 4, SGD": ["model=mlp", *DIGITS, "data.batch_size=4", "optimizer=sgd", "optimizer.lr=0.02"],
    "mlp, RMSprop": [
        *("model=mlp", *DIGITS, OWN, "optimizer._target_=torch.optim.RMSprop", "+optimizer.lr=1e-3"),
    ],
    "resnet, AdamW": ["model=resnet", *DIGITS, "data.batch_size=16"],
    "resnet, SGD, high rate": ["model=resnet", *DIGITS, "data.batch_size=16", "optimizer=sgd", "optimizer.lr=0.2"],
    "mlp, Adagrad, accumulation": [
        *("model=mlp", *DIGITS, OWN, "optimizer._target_=torch.optim.Adagrad", "+optimizer.lr=0.02"),
        *("accelerate.gradient_accumulation_steps=2", "data.batch_size=8"),
    ],
}


def run(recipe: str, seed: int, steps: int) -> tuple[list[str], int, int, float]:
    """Train one run to its end; return what was reported, its updates, those of trials, and its evaluation loss."""
    overrides = [*RECIPES[recipe], f"run.steps={steps}", f"run.seed={seed}", "tracking=none", "accelerate.cpu=true"]
    config = load(overrides).config
    assembled = assemble(config, World.joined(config.accelerate))
    for batch in assembled.guard.batches():
        assembled.guard.step(batch)
    loss = evaluate(assembled)["loss"]
    reported = [f"{one.anomaly.signal} at {one.anomaly.step}" for one in assembled.guard.incidents]
    assembled.close()
    return reported, assembled.guard.clock.tick, assembled.guard._controls.trials.updates, loss


def main() -> None:
    """Train all recipes and print what was reported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="updates of each run (default: %(default)s)")
    parser.add_argument("--recipe", choices=sorted(RECIPES), help="only this one")
    given = parser.parse_args()
    total = steps = in_trials = 0
    print(
        "| recipe | runs | updates | in trials | incidents | evaluation loss |\n| --- | --- | --- | --- | --- | --- |"
    )
    for recipe in [given.recipe] if given.recipe else RECIPES:
        incidents: list[str] = []
        losses: list[float] = []
        ticks, tried, started = 0, 0, time.perf_counter()
        for seed in range(given.seeds):
            reported, made, of_trials, loss = run(recipe, seed, given.steps)
            incidents += [f"{one} (seed {seed})" for one in reported]
            losses.append(loss)
            ticks, tried = ticks + made, tried + of_trials
        told = ", ".join(incidents) or "none"
        spread = f"{min(losses):.3g} to {max(losses):.3g}"
        print(f"| {recipe} | {given.seeds} | {ticks:,} | {tried} | {told} | {spread} |", flush=True)
        print(f"{recipe}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        total, steps, in_trials = total + len(incidents), steps + ticks, in_trials + tried
    print(f"\n{total} false alarms in {steps:,} updates; trials took {in_trials / steps:.2%} as many")


if __name__ == "__main__":
    main()
