"""Curves to judge detectors on: synthetic healthy ones, synthetic faults, and the recorded runs in `curves/`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np

RECORDED = Path(__file__).with_name("curves")
Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


@dataclass(frozen=True)
class Curve:
    """Loss and gradient norm of every attempted update; trouble begins at index `onset`, if it does."""

    name: str
    losses: Sequence[float]
    norms: Sequence[float]
    onset: int | None = None
    harmful: bool = False
    declared: tuple[int, ...] = ()  # steps at which a change is declared

    @property
    def recipe(self) -> str:
        return self.name.partition("/")[0]

    @property
    def fault(self) -> str:
        return self.name.partition("/")[2]


def _norms(random: np.random.Generator, base: Array, spread: float = 0.25) -> Array:
    """Gradient norms as recorded ones look: skewed, and falling more slowly than the loss."""
    return base * np.exp(spread * random.standard_normal(len(base)))


def decay(random: np.random.Generator, steps: int) -> Curve:
    at = np.arange(steps)
    level = 2 + 6 / np.sqrt(1 + at / 200)
    losses = level * (1 + 0.05 * random.standard_normal(steps))
    return Curve("decay with noise", losses.tolist(), _norms(random, 0.5 + 4 / np.sqrt(1 + at / 100)).tolist())


def heavy_tails(random: np.random.Generator, steps: int) -> Curve:
    """Squares and slopes of residuals with three degrees of freedom, eight to a batch."""
    residuals = random.standard_t(3, size=(steps, 8))
    level = 1 + 4 / np.sqrt(1 + np.arange(steps) / 100)
    losses = level * np.mean(residuals**2, axis=1) / 3
    norms = level * np.sqrt(np.sum(residuals**2, axis=1)) * np.exp(0.2 * random.standard_normal(steps))
    return Curve("heavy-tailed noise", losses.tolist(), norms.tolist())


def periodic(random: np.random.Generator, steps: int) -> Curve:
    """A data set in an order that repeats: the same hard stretches once an epoch."""
    at = np.arange(steps)
    wave = 1 + 0.2 * np.sin(2 * np.pi * at / 400) + 0.1 * np.sin(2 * np.pi * at / 37)
    losses = (0.5 + 2 / np.sqrt(1 + at / 300)) * wave * (1 + 0.1 * random.standard_normal(steps))
    return Curve("periodic", losses.tolist(), _norms(random, (1 + 1 / np.sqrt(1 + at / 300)) * wave**2).tolist())


def restarts(random: np.random.Generator, steps: int, rise: float = 0.25, declared: bool = False) -> Curve:
    """The learning rate jumps back to its peak every 5,000 steps: the loss rises and falls again."""
    at = np.arange(steps)
    phase = at % 5000
    risen = np.where(at < 5000, 0.0, rise * (1 - np.exp(-phase / 10)) * np.exp(-phase / 800))
    losses = (1 + 2 / np.sqrt(1 + at / 300)) * (1 + risen) * (1 + 0.06 * random.standard_normal(steps))
    norms = _norms(random, (1 + 2 / np.sqrt(1 + at / 300)) * (1 + 2 * risen))
    steps_of_change = tuple(range(5001, steps, 5000)) if declared else ()
    name = f"warm restarts +{rise:.0%}{', declared' if declared else ''}"
    return Curve(name, losses.tolist(), norms.tolist(), declared=steps_of_change)


def negative(random: np.random.Generator, steps: int) -> Curve:
    """A negative log likelihood that crosses zero on its way."""
    at = np.arange(steps)
    level = -45 + 125 * np.exp(-at / 700) + 10 / np.sqrt(1 + at / 2000)
    skewed = random.gamma(4, 1, steps) - 4
    return Curve("negative likelihood", (level + 1.5 * skewed).tolist(), _norms(random, 50 + 0.0 * at).tolist())


def fitted(random: np.random.Generator, steps: int) -> Curve:
    """A classifier that knows nearly every row by heart: losses next to nothing, and now and then a hard row."""
    sure = 4 * np.log1p(np.arange(steps) / 300)[:, None] ** 0.7 + 2.5 * random.standard_normal((steps, 16))
    wrong = 1 / (1 + np.exp(sure))
    losses = np.mean(np.log1p(np.exp(-sure)), axis=1)
    norms = 3 * np.sqrt(np.mean(wrong**2, axis=1)) * np.exp(0.2 * random.standard_normal(steps))
    return Curve("fitted", losses.tolist(), norms.tolist())


FAMILIES: dict[str, Callable[[np.random.Generator, int], Curve]] = {
    "decay with noise": decay,
    "heavy-tailed noise": heavy_tails,
    "periodic": periodic,
    "warm restarts +150 %, declared": lambda random, steps: restarts(random, steps, 1.5, declared=True),
    "negative likelihood": negative,
    "fitted: rows known by heart": fitted,
    "warm restarts +10 %, not declared": lambda random, steps: restarts(random, steps, 0.1),
    "warm restarts +25 %, not declared": lambda random, steps: restarts(random, steps, 0.25),
}


def risen(seed: int, *, low: float, high: float, over: int, noise: float, after: int = 1500, then: int = 1200) -> Curve:
    """A level that climbs from `low` to `high` in `over` steps and stays."""
    random = np.random.default_rng(seed)
    at = np.arange(after + then)
    level = low + 3 * np.exp(-at / 150) + (high - low) * np.clip((at - after + 1) / over, 0, 1)
    losses = level * (1 + noise * random.standard_normal(len(at)))
    return Curve("risen", losses.tolist(), _norms(random, np.ones(len(at))).tolist(), onset=after)


def recorded(switched: Mapping[str, int], folder: Path = RECORDED) -> Iterator[Curve]:
    """The recorded runs; a faulty one is what came before it and then itself. `switched`: declared, by recipe."""
    entries = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    arrays = np.load(folder / "curves.npz")
    evals = {entry["id"]: entry["eval"] for entry in entries}
    healthy: dict[str, list[float]] = {}
    for entry in entries:
        if entry["fault"] is None:
            healthy.setdefault(entry["recipe"], []).append(entry["eval"])
    for entry in entries:
        declared = (switched[entry["recipe"]],) if entry["recipe"] in switched else ()
        losses, norms = (arrays[f"{entry['id'].replace('/', '|')}|{kind}"].tolist() for kind in ("loss", "grad_norm"))
        if entry["fault"] is None:
            yield Curve(entry["id"], losses, norms, declared=declared)
            continue
        base, start = entry["base"], entry["starts_at"]
        before = [arrays[f"{base.replace('/', '|')}|{kind}"][:start].tolist() for kind in ("loss", "grad_norm")]
        harmful = _is_harmful(entry["eval"], evals[base], healthy[entry["recipe"]])
        yield Curve(entry["id"], before[0] + losses, before[1] + norms, onset=start, harmful=harmful, declared=declared)


def _is_harmful(outcome: float | None, base: float, healthy: Sequence[float]) -> bool:
    if outcome is None:
        return True
    return outcome - base > 0.05 * abs(base) and outcome - base > 3 * stdev(healthy)
