"""Every drill under every policy, beside three controls: does the run recover, and what does it cost?

*plain* is the Accelerate loop that one would write by hand, with clipping; *skip only* is the same loop with the line
everybody adds first: no step where loss or gradient norm is not finite; *rewind only* is our engine with a ladder of
nothing but rewinds. The same drill strikes all of them at the same places.

    python benchmarks/recovery.py
    python benchmarks/recovery.py --recipe mlp --drill hot_lr --policy balanced --seed 3 --told
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from recovery_controls import by_hand

from resilient_train.command.build import Run, assemble, evaluate
from resilient_train.command.config.compose import load
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.ground.errors import GaveUp
from resilient_train.ground.types import Incident
from resilient_train.loop.reporter import Place
from resilient_train.processes.world import World

DRILLS = ("nan_batch", "nan_grad", "inf_loss", "loss_spike", "bit_flip", "bad_moments", "bad_row", "hot_lr", "gauntlet")
POLICIES = ("balanced", "conservative", "aggressive", "palm", "skip", "off")
CONTROLS = ("plain", "skip only", "rewind only")
REWIND_ONLY = {
    "ladders": {"default": [{"do": ["rewind"], "strikes": None}]},
    "budget": {"incidents": 50},
}
SEEDS = 5  # healthy runs that tell how much the end varies by itself
ENDLESS = 10  # attempts per wanted update

_DIGITS = ("data=digits", "objective=classification")
_TEXT = ("data=python_source", "data.train.context=32", "data.train.max_bytes=100000", "data.batch_size=8")
_SMALL_GPT = ("model=gpt", "model.layers=1", "model.width=48", "model.heads=2", "model.context=32")


@dataclass(frozen=True)
class Recipe:
    """What is trained, for how long, and the drills that make no sense for it."""

    about: str
    overrides: Sequence[str]
    steps: int
    without: Sequence[str] = ()  # token ids cannot be NaN


RECIPES = {
    "mlp": Recipe("MLP on digits, AdamW", ("model=mlp", *_DIGITS, "optimizer.lr=3e-3"), 300),
    "sgd": Recipe(
        "MLP on digits, SGD with momentum",
        ("model=mlp", "model.hidden=[64]", *_DIGITS, "optimizer=sgd"),
        250,
    ),
    "resnet": Recipe(
        "ResNet with BatchNorm on digits, AdamW",
        ("model=resnet", "model.depth=8", "model.width=4", *_DIGITS, "optimizer.lr=1e-2"),
        160,
    ),
    "gpt": Recipe(
        "GPT on Python source, AdamW",
        (*_SMALL_GPT, *_TEXT, "optimizer.lr=3e-3"),
        200,
        without=("nan_batch", "bad_row"),
    ),
}


# --------------------------------------------------------------------------------------------------------------- cells


@dataclass
class Cell:
    """How one run ended."""

    step: int
    tick: int
    loss: float = math.nan  # of the evaluation at its end
    is_finite: bool = False  # weights and buffers
    incidents: list[Incident] = field(default_factory=list)
    why: str = ""  # it ended before its last step
    gave_up: bool = False
    ratio: float = math.nan  # to the loss of the drill-free run of the same seed
    word: str = ""

    def judge(self, healthy: float, bound: float) -> Cell:
        self.ratio = self.loss / healthy
        is_within = self.is_finite and self.ratio <= 1 + bound  # a NaN is not
        if self.gave_up:
            self.word = "gave up"
        elif self.why or not is_within:
            self.word = "broken"
        else:
            self.word = "recovered" if self.incidents or self.tick > self.step else "harmless"
        return self

    def __str__(self) -> str:
        ratio = f"{self.ratio:.2f}" if self.ratio < 100 else "> 99" if math.isfinite(self.ratio) else "not finite"
        counts = f" ({len(self.incidents)} inc., {self.tick - self.step} lost)" if self.word != "harmless" else ""
        where = f" at {self.step}" if self.gave_up else f" {ratio}"
        return f"{self.word}{where}{counts}"


@functools.cache
def composed(recipe: str, drill: str, seed: int, steps: int) -> Any:
    here = RECIPES[recipe].overrides
    run = (f"drill={drill}", f"run.seed={seed}", f"run.steps={steps}", "accelerate.cpu=true", "tracking=none")
    return load([*here, *run]).config


def cell(recipe: str, drill: str, policy: str, seed: int, steps: int) -> Cell:
    """Train once."""
    config = composed(recipe, drill, seed, steps)
    recovery: Any = REWIND_ONLY if policy == "rewind only" else "off" if policy in CONTROLS else policy
    config = dataclasses.replace(config, recovery=recovery)
    run = assemble(config, World.joined(config.accelerate), Place(IncidentLog(None)))
    run.model.train()
    made = guarded(run) if policy not in CONTROLS[:2] else Cell(*by_hand(run, skips=policy == "skip only"))
    made.loss = evaluate(run)["loss"]
    state = [*run.bare_model.parameters(), *run.bare_model.buffers()]
    made.is_finite = all(bool(tensor.isfinite().all()) for tensor in state)
    run.close()
    return made


def guarded(run: Run) -> Cell:
    """Our loop, as `train.py` has it."""
    guard, clock, steps = run.guard, run.guard.clock, run.config.run.steps
    why, gave_up = "", False
    try:
        for batch in guard.batches():
            guard.step(batch)
            if clock.tick > ENDLESS * steps:
                why = "does not come to an end"
                break
    except GaveUp as error:
        why, gave_up = str(error), True
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return Cell(clock.step, clock.tick, incidents=guard.incidents, why=why, gave_up=gave_up)


# ------------------------------------------------------------------------------------------------------------ promises

TRANSIENT = DRILLS[:6]
GOOD = ("recovered", "harmless")


def promised(policy: str, drill: str) -> Sequence[str]:
    """Which ends of a run are as its policy says; of a control there is no promise."""
    if policy == "off":
        return ("gave up", "harmless")
    if policy == "skip":
        return GOOD if drill in (*TRANSIENT[:4], "bad_row") else (*GOOD, "gave up", "broken")
    if policy == "conservative" and drill not in TRANSIENT:
        return (*GOOD, "gave up")
    return ("recovered", "harmless", "gave up", "broken") if policy in CONTROLS else GOOD


@dataclass
class Table:
    """One recipe: drills down, policies and controls across."""

    title: str
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)

    def markdown(self) -> str:
        columns = list(dict.fromkeys(column for _, column in self.cells))
        rows = list(dict.fromkeys(row for row, _ in self.cells))
        lines = [f"**{self.title}**", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for row in rows:
            told = [str(self.cells[row, column]) if (row, column) in self.cells else "" for column in columns]
            lines.append(f"| {row} | {' | '.join(told)} |")
        return "\n".join(lines)

    def failures(self) -> list[str]:
        return [
            f"{self.title}: {drill} under {policy}: {one} {one.why}".strip()
            for (drill, policy), one in self.cells.items()
            if one.word not in promised(policy, drill)
        ]


def matrix(name: str, drills: Sequence[str], policies: Sequence[str], seed: int, steps: int | None) -> Table:
    """Fill the table of one recipe."""
    recipe = RECIPES[name]
    steps = steps or recipe.steps
    others = [one for one in range(SEEDS) if one != seed][: SEEDS - 1]
    losses = [cell(name, "none", "rewind only", one, steps) for one in (seed, *others)]
    if any(one.incidents for one in losses):
        say(f"{name}: FALSE ALARM in a healthy run")
    healthy = losses[0].loss
    spread = 2 * statistics.stdev(one.loss for one in losses) / statistics.fmean(one.loss for one in losses)
    bound = max(0.02, spread)
    table = Table(f"{recipe.about}, {steps} steps, within {100 * bound:.1f} % of {healthy:.4g}")
    for drill in (one for one in drills if one not in recipe.without):
        for policy in policies:
            started = time.monotonic()
            twice = 2 if drill in ("hot_lr", "gauntlet") else 1
            table.cells[drill, policy] = one = cell(name, drill, policy, seed, steps).judge(healthy, twice * bound)
            say(f"{name} {drill} {policy}: {one} [{time.monotonic() - started:.1f} s] {one.why}")
    return table


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", nargs="+", default=[*RECIPES], choices=[*RECIPES])
    parser.add_argument("--drill", nargs="+", default=DRILLS, choices=DRILLS)
    parser.add_argument("--policy", nargs="+", default=[*POLICIES, *CONTROLS], choices=[*POLICIES, *CONTROLS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="instead of the recipe's own")
    parser.add_argument("--told", action="store_true", help="show each incident as it is handled")
    parser.add_argument("--json", type=Path, default=None, help="write every cell there")
    return parser.parse_args()


def main() -> None:
    """Fill the tables, print them, and name every cell that does not hold what its policy promises."""
    given, started = arguments(), time.monotonic()
    logging.basicConfig(format="    %(message)s", level=logging.INFO if given.told else logging.CRITICAL)
    torch.set_num_threads(1)
    tables = {}
    for name in given.recipe:
        tables[name] = matrix(name, given.drill, given.policy, given.seed, given.steps)
        print(f"\n{tables[name].markdown()}\n", flush=True)
    cells = [one for table in tables.values() for one in table.cells.values()]
    failures = [line for table in tables.values() for line in table.failures()]
    print(f"{len(cells) - len(failures)} of {len(cells)} cells end as promised, in {time.monotonic() - started:.0f} s")
    print("\n".join(f"FAILS {line}" for line in failures))
    if given.json is not None:
        rows = [
            {"recipe": name, "drill": drill, "policy": policy, **dataclasses.asdict(one)}
            for name, table in tables.items()
            for (drill, policy), one in table.cells.items()
        ]
        given.json.write_text(json.dumps(rows, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
