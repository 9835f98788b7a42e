"""Random faults for `matrix.py`: what is drawn, and how it strikes.

A fault strikes by the *attempt* (what happens in time, and does not come again when a run goes back), by the *step* of
the schedule, or by the *rows* of the data (both are met again). Attempts are counted by the loop, in the hand-written
one as in the guarded one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clinic.matrix_programs import Columns, Denoiser, Recipe

BLANK = ("div", "log", "sqrt")  # what meets 0 in the objective, at rows that are all 0


@dataclass(frozen=True)
class Fault:
    """What goes wrong, when, and how badly."""

    family: str
    how: str = ""  # which of the ways that the family has
    by: str = "attempt"  # or "step", or "rows"
    start: int = 0
    length: int = 1  # in attempts, steps or batches
    size: float = 0.0  # a factor, a value or a share of the rows
    times: int = 1
    every: int = 0  # attempts between two times
    seed: int = 0

    def __str__(self) -> str:
        usual = asdict(Fault(self.family, by="", start=-1, seed=self.seed))
        parts = {key: value for key, value in asdict(self).items() if value != usual[key]}
        told: dict[str, Callable[[Any], str]]
        told = {"how": str, "by": "by {}".format, "start": "from {}".format, "length": "for {}".format}
        told |= {"size": "size {:.3g}".format, "times": "{} times".format, "every": "every {}".format}
        shown = [told[key](value) for key, value in parts.items() if key in told]
        return f"{self.family}: {', '.join(shown)}"

    def strikes(self, attempt: int) -> bool:
        """Say whether a fault that is not of a stretch strikes at this attempt."""
        since = attempt - self.start
        if self.by != "attempt" or since < 0:
            return False
        return since == 0 if not self.every else since % self.every == 0 and since // self.every < self.times

    def holds(self, place: int) -> bool:
        """Say whether this attempt, step or batch is within the stretch."""
        return self.start <= place < self.start + self.length


# --------------------------------------------------------------------------------------------------------------- draws

MIXED = (0, 1, 1, 0, 0, 1)  # which of two ways, by turn: as often with classics, which every other turn has, as without
Draw = Callable[[random.Random, Recipe, int], Fault]


@dataclass(frozen=True)
class Family:
    """A kind of fault: how one is drawn, and whether it makes sense for a recipe and an optimizer."""

    draw: Draw
    fits: Callable[[Recipe, str], bool] = lambda recipe, optimizer: True


def _log(dice: random.Random, low: float, high: float) -> float:
    return math.exp(dice.uniform(math.log(low), math.log(high)))


def _place(dice: random.Random, recipe: Recipe) -> int:
    return dice.randint(15, 2 * recipe.steps // 3)


def _leap(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    by, length = ("step", "attempt")[MIXED[turn]], dice.randint(5, 40)
    start = dice.randint(15, max(16, 2 * recipe.steps // 3 - length))
    return Fault("leap", by=by, start=start, length=length, size=_log(dice, 10, 1000))


def _for_good(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    return Fault("rise for good", by="step", start=_place(dice, recipe), length=10**6, size=_log(dice, 10, 100))


def _early(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    by, start, length = ("step", "attempt")[MIXED[turn]], dice.randint(15, 50), dice.randint(5, 40)
    return Fault("early leap", by=by, start=start, length=length, size=_log(dice, 10, 1000))


def _weights(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    how = ("values", "times ten", "zeroed", "values", "values", "times ten")[turn % 6]
    twice = dice.random() < 0.5
    start = dice.randint(15, recipe.steps // 2) if twice else _place(dice, recipe)
    size = _log(dice, 1e2, 1e30) if how == "values" else 0.0
    every = dice.randint(20, recipe.steps // 6 + 10) if twice else 0
    return Fault("weights", how=how, start=start, size=size, times=1 + twice, every=every)


def _tampered(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    how, start = ("values", "times ten", "noise")[turn % 3], dice.randint(20, 60)
    times = (4 * recipe.steps // 5 - start) // 50 + 1  # the end is left in peace
    return Fault("tampered", how=how, start=start, size=_log(dice, 1e2, 1e8), times=times, every=50)


def _moments(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    return Fault("moments", start=_place(dice, recipe), size=dice.choice((0.0, 1e-8, 1e-4)))


def _nan_gradient(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    every, start = dice.randint(20, 40), dice.randint(15, 60)
    return Fault("NaN gradient", start=start, times=(recipe.steps - start) // every, every=every)


def _nan_rows(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    return Fault("NaN rows", by="rows", size=(0.01, 0.03, 0.1)[turn % 3])


def _outliers(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    return Fault("outliers", how="targets" if recipe.targets == "value" else "inputs", by="rows", size=1000.0)


def _labels(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    by = ("rows", "attempt")[turn in (1, 2, 3)]
    if turn % 3 == 2:  # late enough that the state before it is nearly as good as the end
        return Fault("labels", how="for good", by=by, start=int(recipe.steps * dice.uniform(0.68, 0.8)), length=10**6)
    return Fault("labels", how="a stretch", by=by, start=_place(dice, recipe), length=dice.randint(30, 60))


def _scaled(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    by, length = ("rows", "attempt")[MIXED[turn]], dice.randint(1, 20)
    return Fault("scaled inputs", by=by, start=_place(dice, recipe), length=length, size=_log(dice, 1e2, 1e4))


def _norms(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    size = (1e6, math.nan)[MIXED[turn]]
    return Fault("norm statistics", start=_place(dice, recipe), size=size)


def _nan_loss(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    return Fault("NaN loss", start=_place(dice, recipe), times=dice.randint(1, 5), every=dice.randint(5, 20))


def _same_batch(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    return Fault("same batch", by=("attempt", "rows")[MIXED[turn]], start=_place(dice, recipe), length=50)


def _creep(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    start = dice.randint(15, recipe.steps // 2)
    return Fault("creeping rate", by=("step", "attempt")[MIXED[turn]], start=start, length=150, size=30.0)


def _operation(dice: random.Random, recipe: Recipe, turn: int) -> Fault:
    return Fault("operation", how=BLANK[turn % 3], by="rows", size=(0.002, 0.01, 0.02)[(turn // 2) % 3])


def _has_floats(recipe: Recipe, optimizer: str) -> bool:
    return recipe.has_floats


FAMILIES = {
    "leap": Family(_leap),
    "rise for good": Family(_for_good),
    "early leap": Family(_early),
    "weights": Family(_weights),
    "tampered": Family(_tampered),
    "moments": Family(_moments),
    "NaN gradient": Family(_nan_gradient),
    "NaN rows": Family(_nan_rows, _has_floats),
    "outliers": Family(_outliers, lambda recipe, _: recipe.has_floats or recipe.targets == "value"),
    "labels": Family(_labels, lambda recipe, _: bool(recipe.targets)),
    "scaled inputs": Family(_scaled, _has_floats),
    "norm statistics": Family(_norms, lambda recipe, _: recipe.has_norm),
    "NaN loss": Family(_nan_loss),
    "same batch": Family(_same_batch),
    "creeping rate": Family(_creep),
    "operation": Family(_operation, lambda recipe, _: recipe.has_floats and recipe.has_tensor),
}


# ---------------------------------------------------------------------------------------------------------------- data


def is_stream(fault: Fault | None) -> bool:
    """Say whether the rows are read in their own order, so that a stretch of them is a stretch of the run."""
    return fault is not None and fault.by == "rows" and fault.family in ("labels", "scaled inputs", "same batch")


def columns_with(fault: Fault | None, clean: Columns, recipe: Recipe, order: int) -> Columns:
    """Make the data that a run trains on: as it is, with rows that are rotten, or as one long stream of rows."""
    if fault is None or fault.by != "rows":
        return clean
    numbers = torch.Generator().manual_seed(fault.seed)
    if is_stream(fault):
        return _stream(fault, clean, recipe, torch.Generator().manual_seed(order))
    columns = [column.clone() for column in clean]
    rows = len(columns[0])
    share = 0.03 if fault.family == "outliers" else fault.size
    struck = torch.randperm(rows, generator=numbers)[: max(2, round(share * rows))]
    if fault.family == "NaN rows":
        columns[0][struck] = math.nan
    elif fault.family == "operation":
        columns[0][struck] = 0.0
    else:
        columns[-1 if fault.how == "targets" else 0][struck] *= fault.size
    return tuple(columns)


def _stream(fault: Fault, clean: Columns, recipe: Recipe, numbers: torch.Generator) -> Columns:
    """Lay out more rows than a run can use in a row, each epoch in an order of its own, with the fault in its place."""
    size, rows = recipe.batch_size, len(clean[0])
    wanted = 2 * recipe.steps * size
    order = torch.cat([torch.randperm(rows, generator=numbers) for _ in range(wanted // rows + 1)])[:wanted]
    begin, end = (fault.start - 1) * size, min(wanted, (fault.start - 1 + fault.length) * size)
    if fault.family == "same batch":
        order[begin:end] = order[begin : begin + size].repeat(fault.length)
    columns = [column[order] for column in clean]
    if fault.family == "labels":
        columns[-1][begin:end] = columns[-1][begin:end][torch.randperm(end - begin, generator=numbers)]
    elif fault.family == "scaled inputs":
        columns[0][begin:end] *= fault.size
    return tuple(columns)


# ------------------------------------------------------------------------------------------------------------ injector


class Injector:
    """Lets one fault strike in a loop, which calls it at its places; without a fault it changes nothing."""

    def __init__(self, fault: Fault | None, recipe: Recipe, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self.fault = fault or Fault("none", by="none")
        self.recipe, self.model, self.optimizers = recipe, model, optimizers
        self.attempt = 0
        self.numbers = torch.Generator().manual_seed(self.fault.seed)
        self._stuck: list[Tensor] | None = None
        self._spoils_loss = self._spoils_gradient = False
        if self.fault.family == "NaN gradient":
            next(model.parameters()).register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def rate(self, step: int) -> float:
        """Give the factor of the learning rate: warm up, then fall along a cosine, and what the fault makes of it."""
        fault, steps = self.fault, self.recipe.steps
        usual = min(1.0, (step + 1) / 10) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps))))
        place = step if fault.by == "step" else self.attempt + 1
        if fault.family in ("leap", "early leap", "rise for good") and fault.holds(place):
            return usual * fault.size
        if fault.family == "creeping rate" and place >= fault.start:
            usual *= math.pow(fault.size, min(1.0, (place - fault.start) / fault.length))
        return usual

    def on_batch(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Begin an attempt with its batch."""
        self.attempt += 1
        if isinstance(self.model, Denoiser):
            self.model.step = self.attempt
        fault, columns = self.fault, list(batch)
        self._spoils_loss = fault.family == "NaN loss" and fault.strikes(self.attempt)
        self._spoils_gradient = fault.family == "NaN gradient" and fault.strikes(self.attempt)
        if fault.by != "attempt" or not fault.holds(self.attempt):
            return columns
        if fault.family == "labels":
            columns[-1] = columns[-1][torch.randperm(len(columns[-1]), generator=self.numbers)]
        elif fault.family == "scaled inputs":
            columns[0] = columns[0] * fault.size
        elif fault.family == "same batch":
            self._stuck = self._stuck or columns
            return list(self._stuck)
        return columns

    def objective(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Make the loss, as the program of the user does."""
        out = model(batch[0])
        loss = self.recipe.criterion(out, batch)
        if self.fault.family == "operation":
            loss = loss + 1e-3 * _penalty(self.fault.how, out, batch[0])
        if self._spoils_loss:
            self._spoils_loss = False  # once: a replay is healthy
            loss = loss * math.nan
        return loss

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        spoils, self._spoils_gradient = self._spoils_gradient, False
        return gradient * math.nan if spoils else gradient

    @torch.no_grad()
    def after(self) -> None:
        """Do to the state what the loop does between two updates."""
        fault = self.fault
        if not fault.strikes(self.attempt):
            return
        if fault.family in ("weights", "tampered"):
            self._hit_weights(fault.how)
        elif fault.family == "moments":
            self._hit_moments()
        elif fault.family == "norm statistics":
            for module in self.model.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    module.running_mean.fill_(fault.size)  # type: ignore[union-attr]
                    module.running_var.fill_(fault.size)  # type: ignore[union-attr]

    def _hit_weights(self, how: str) -> None:
        matrices = [weight for weight in self.model.parameters() if weight.dim() > 1]
        struck = matrices[int(torch.randint(len(matrices), (1,), generator=self.numbers))]
        if how == "times ten":
            struck.mul_(10)
        elif how == "zeroed":
            struck.zero_()
        elif how == "noise":
            struck.add_(torch.randn(struck.shape, generator=self.numbers) * struck.std() * 3)
        else:
            count = int(torch.randint(1, 4, (1,), generator=self.numbers))
            struck.view(-1)[torch.randint(struck.numel(), (count,), generator=self.numbers)] = self.fault.size

    def _hit_moments(self) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                if "exp_avg_sq" in state:
                    state["exp_avg_sq"].mul_(self.fault.size)
                elif state.get("momentum_buffer") is not None:
                    state["momentum_buffer"].mul_(1e3)


def _penalty(how: str, out: Tensor, x: Tensor) -> Tensor:
    """Punish large outputs, by a measure of the inputs that a blank row breaks."""
    rows, power = x.flatten(1), out.flatten(1).square().mean(1)
    if how == "div":
        return (power * rows.abs().mean(1) / rows.square().mean(1).sqrt()).mean()
    if how == "log":
        return (power * rows.abs().sum(1).log()).mean()
    shown = (rows.abs().sum(1, keepdim=True) > 0).float()
    return (out.flatten(1) * shown).square().sum(1).sqrt().mean()  # no slope where nothing is shown
