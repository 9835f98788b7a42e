"""What people bring to a guard, fitted to what the rooms take."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, default_collate

from resilient_train.data import build
from resilient_train.data.foreign import ForeignSamples
from resilient_train.data.rows import Collate
from resilient_train.data.samples import Samples, Slicing
from resilient_train.ranks.world import World
from resilient_train.record.incidents import IncidentBook
from resilient_train.record.journal import JOURNAL, Journal
from resilient_train.recover import policy as policies
from resilient_train.recover.policy import Policy
from resilient_train.update.clip import ClipConfig
from resilient_train.update.schedule import CurveSchedule, Schedule, ShadowSchedule, constant
from resilient_train.watch import config as checks_config
from resilient_train.watch.config import ChecksConfig


def optimizers(given: Any) -> list[Optimizer]:
    """Take one optimizer or several, out of Accelerate's wrappers: in those a gate is ignored without a word."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    bare = [one.optimizer if isinstance(one, AcceleratedOptimizer) else one for one in several]
    for one in bare:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer: a torch.optim.Optimizer or a list of them is wanted, not a {type(one).__name__}")
    return bare


def schedules(given: Any, steppers: list[Optimizer]) -> list[Schedule]:
    """Take nothing, a curve `step -> factor`, a torch scheduler, or a list with one of them for each optimizer."""
    several = list(given) if isinstance(given, list | tuple) else [given] * len(steppers)
    if len(several) != len(steppers):
        raise ValueError(f"schedule: {len(several)} schedules for {len(steppers)} optimizers")
    return [_schedule(one, stepper) for one, stepper in zip(several, steppers, strict=True)]


def _schedule(given: Any, optimizer: Optimizer) -> Schedule:
    given = given.scheduler if isinstance(given, AcceleratedScheduler) else given
    if isinstance(given, ReduceLROnPlateau):
        raise TypeError("schedule: ReduceLROnPlateau follows a metric, not the step, and is not supported")
    if isinstance(given, LRScheduler):
        return ShadowSchedule.of(given, optimizer)
    if hasattr(given, "settings") and hasattr(given, "state_dict"):
        return given  # type: ignore[no-any-return]
    curve = constant if given is None else given
    if not callable(curve):
        raise TypeError(f"schedule: a torch scheduler or a callable (step) -> factor is wanted, not a {type(given).__name__}")
    return CurveSchedule([group["lr"] for group in optimizer.param_groups], curve, 0)


def samples(
    given: Any, slicing: Slicing, *, seed: int, shuffle: bool, num_workers: int, collate: Collate | None, pin_memory: bool
) -> tuple[Samples, str | None]:
    """Put a cursor into a data set, or take a loader as it is and say what that costs."""
    if hasattr(given, "next_update"):
        return given, None
    if isinstance(given, DataLoader) or not (hasattr(given, "__getitem__") or hasattr(given, "state_dict")):
        if not isinstance(given, Iterable):
            raise TypeError(f"data: a data set or a loader is wanted, not a {type(given).__name__}")
        told = "data: this loader is not ours and does not rewind: after a rewind the run goes on with the batches that come next"
        return ForeignSamples(given, slicing), told
    name = type(given).__name__
    config = build.DataConfig({"_target_": name}, slicing.batch_size, None, shuffle, num_workers)
    return build.samples(given, config, slicing, seed=seed, collate=collate or default_collate, pin_memory=pin_memory), None


def clipping(given: ClipConfig | float | None) -> ClipConfig:
    """Take a whole configuration, a norm, or nothing: no clipping."""
    return given if isinstance(given, ClipConfig) else ClipConfig(max_norm=given, max_value=None)


def book(run_dir: str | Path | None, world: World) -> IncidentBook:
    """Begin a journal in a run directory: the named one, or beside it if that holds a journal already."""
    if run_dir is None or not world.is_main:
        return IncidentBook(None, None)
    path = Path(run_dir).absolute()
    for number in itertools.count(2):
        if not (path / JOURNAL).exists():
            break
        path = path.with_name(f"{Path(run_dir).name}-{number}")
    path.mkdir(parents=True, exist_ok=True)
    return IncidentBook(path, Journal(path / JOURNAL))


def policy(given: Policy | Mapping[str, Any] | str | Path) -> Policy:
    """Take a policy, its tree, the name of one that comes with the package, or a YAML file."""
    if isinstance(given, Policy):
        return given
    return policies.parse(given) if isinstance(given, Mapping) else policies.named(str(given))


def checks(given: ChecksConfig | str) -> ChecksConfig:
    """Take checks, or the name of a set that comes with the package."""
    return checks_config.named(given) if isinstance(given, str) else given


