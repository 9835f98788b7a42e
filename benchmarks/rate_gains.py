"""What a cut of the learning rate gains in healthy runs: a trial has to find more before it lowers a rate.

At some steps of each recipe of `healthy_runs.py` the run is continued from the same state with the rate as it is and
with lower ones. Each is judged by its mean loss on the same later samples. Printed is the largest gain, as a share of
the loss of the run as it is, for each cut and each number of updates.

    python benchmarks/rate_gains.py                    # on 2 cores of a Xeon: 20 minutes
    python benchmarks/rate_gains.py --recipe "gpt, AdamW"
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

import torch
from healthy_runs import RECIPES

from resilient_train.app.build import Run, assemble
from resilient_train.app.config.compose import load
from resilient_train.ranks.world import World
from resilient_train.recover.knobs import KnobValues
from resilient_train.state.tree import put_together, taken_apart

FACTORS, STEPS, LENGTHS = (0.3, 0.1, 0.03, 0.01), (60, 150, 400), (20, 50, 200)
JUDGED = 16  # later updates, on whose samples no arm is trained


def update(run: Run, step: int, start: int, factor: float) -> None:
    """Make one update as training makes it, at a position of the stream."""
    guard = run.guard
    guard.seeds.for_update(start)
    losses = []
    for keys in guard.samples.keys_at(start):
        loss, _ = run.objective.for_training(run.model, guard.samples.collated(keys))
        run.guard.world.accelerator.backward(loss)
        losses.append(loss.detach())
    guard._updater.apply(step, torch.stack(losses).mean(), KnobValues(lr=factor))
    guard._updater.accept(step + 1)


def judged(run: Run, starts: list[int]) -> float:
    samples = run.guard.samples
    found = []
    for start in starts:
        run.guard.seeds.for_update(start)
        found += [
            float(run.objective(run.model, samples.collated(keys))[0].detach()) for keys in samples.keys_at(start)
        ]
    return fmean(found)


def gains(recipe: str, seed: int) -> dict[tuple[float, int], float]:
    """Return the largest gain of a recipe, by cut and updates."""
    overrides = [*RECIPES[recipe], "run.steps=600", f"run.seed={seed}", "tracking=none", "accelerate.cpu=true"]
    config = load(overrides).config
    run = assemble(config, World.joined(config.accelerate))
    state, each, found, step = run.guard.state, run.guard.samples.slicing.samples, dict[Any, float](), 0
    for stop in STEPS:
        while step < stop:
            update(run, step, step * each, 1.0)
            step += 1
        plain, sources = taken_apart(state.live())
        copies = [one.detach().clone() for one in sources]
        later = [(step + max(LENGTHS) + 8 + number) * each for number in range(JUDGED)]
        losses: dict[tuple[float, int], float] = {}
        for factor in (1.0, *FACTORS):
            state.restore(put_together(plain, copies))
            for made in range(max(LENGTHS)):
                update(run, step + made, (step + made) * each, factor)
                if made + 1 in LENGTHS:
                    losses[factor, made + 1] = judged(run, later)
        state.restore(put_together(plain, copies))
        for factor in FACTORS:
            for length in LENGTHS:
                gain = 1 - losses[factor, length] / losses[1.0, length]
                found[factor, length] = max(gain, found.get((factor, length), gain))
    run.close()
    return found


def main() -> None:
    """Print a row for each recipe, and the largest gain of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=sorted(RECIPES), help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    head = [f"x{factor:g}, {length}" for factor in FACTORS for length in LENGTHS]
    print(f"| recipe | {' | '.join(head)} |\n|{' --- |' * (1 + len(head))}")
    every: list[dict[tuple[float, int], float]] = []
    for recipe in [given.recipe] if given.recipe else RECIPES:
        every.append(gains(recipe, given.seed))
        row = [f"{every[-1][factor, length]:+.3f}" for factor in FACTORS for length in LENGTHS]
        print(f"| {recipe} | {' | '.join(row)} |", flush=True)
    most = max(one[factor, length] for one in every for factor in FACTORS for length in LENGTHS if length >= 200)
    print(f"\nLargest gain over 200 updates: {most:.3f}")


if __name__ == "__main__":
    main()
