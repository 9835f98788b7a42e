"""All checks of the loss that a run has."""

from __future__ import annotations

from dataclasses import dataclass

from resilient_train.core.checks import Checks
from resilient_train.core.config import ChecksConfig
from resilient_train.core.loss import Level
from resilient_train.watch.best import BestLevel
from resilient_train.watch.purpose import Experiment
from resilient_train.watch.rate import Creep, EarlyDivergence, NoProgress, RateRise


@dataclass(frozen=True)
class Panel:
    """The checks, and those of them that others ask as well."""

    checks: Checks
    best: BestLevel
    early_divergence: EarlyDivergence
    no_progress: NoProgress
    experiment: Experiment

    @classmethod
    def of(cls, config: ChecksConfig) -> Panel:
        level, best = Level(config.jump), BestLevel(config.jump)
        early_divergence, no_progress = EarlyDivergence(config.overshoot), NoProgress(config.no_progress)
        experiment = Experiment(config.limit)
        checks = Checks(
            config,
            level,
            best=best,
            experiment=experiment,
            early_divergence=early_divergence,
            no_progress=no_progress,
            rate=RateRise(config.rate),
            creep=Creep(config.creep, level),
        )
        return cls(checks, best, early_divergence, no_progress, experiment)
