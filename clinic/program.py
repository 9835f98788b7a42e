"""What a case of the clinic is: a small training program with a fault in it, and the same program mended by hand.

A case is a module with a docstring that says what goes wrong, and where people have met it, and one function:

    def program(seed: int, *, mended: bool = False) -> Program

Everything that may vary (sizes, the place and time of the fault, weights, data) is drawn from the seed, and from
nothing else. The faulty program knows nothing of this project: a plain module, data set and loss. Its mended twin has
weights of the same names and shapes, and is what a person would make of the program once the fault is understood.
The line that is to blame ends with the comment `# guilty`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SETS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
)

SMOKE = (  # of several sets and causes, a second each at seed 0: what the tests of the repository run
    "first.outlier_inputs",
    "first.where_branch",
    "second.gaussian_process_repeated_runs",
    "second.half_precision_adam",
    "second.linear_flow_determinant",
    "third.lars_by_hand",
    "fourth.muon_rare_market",
    "fifth.tensor_factors_of_scans",
    "seventh.species_counts_zero_truncated",
    "eighth.galaxy_clusters_by_deep_sets",
    "twelfth.pose_refined_from_identity",
)


@dataclass(frozen=True)
class Guilty:
    """Who did it: what a diagnosis should say. Empty where nobody can know better."""

    cause: str  # one of: data, operation, overflow, explosion, optimizer, corruption, transient
    ops: tuple[str, ...] = ()  # names of the operation, as torch calls the function, any of which is right
    rows: tuple[int, ...] = ()  # of the data set


@dataclass(frozen=True)
class Program:
    """A user's training program: what an ordinary script has in its variables before the loop begins."""

    model: nn.Module
    rows: Any  # a map-style data set: __len__ and __getitem__
    loss: Callable[[nn.Module, Any], Tensor]  # (model, batch) -> a scalar
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    evaluation: Any  # one batch of healthy rows that are not trained on, judged by the mended twin's model and loss
    guilty: Guilty
    batch_size: int = 32
    steps: int = 240
    collate: Callable[[list[Any]], Any] | None = None
    clip: float | None = None  # the largest gradient norm, where the user clips
    bf16: bool = False  # the user trains under autocast to bfloat16

    @torch.no_grad()
    def evaluate(self, weights: dict[str, Tensor]) -> float:
        """The loss on healthy rows that these weights reach."""
        self.model.load_state_dict(weights)
        self.model.eval()
        return float(self.loss(self.model, self.evaluation))


class Case(Protocol):
    """A module that holds one case."""

    __name__: str

    def program(self, seed: int, *, mended: bool = False) -> Program: ...


def names(of: str) -> list[str]:
    """The names of all cases of a set. None of them is imported: one that is half written stops no other."""
    package = importlib.import_module(f"clinic.{of}")
    found = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in found if not name.startswith("_")]


def cases(of: str) -> Iterator[tuple[str, Any]]:
    """All cases of a set, by name."""
    for name in names(of):
        yield name, importlib.import_module(f"clinic.{of}.{name}")


def guilty_lines(case: ModuleType) -> tuple[int, ...]:
    """The lines that are to blame."""
    lines = inspect.getsource(case).splitlines()
    return tuple(number for number, line in enumerate(lines, start=1) if line.rstrip().endswith("# guilty"))
