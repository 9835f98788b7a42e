"""All checks of a run, for tests that feed them losses."""

from __future__ import annotations

from typing import Any

from resilient_train.extensions import load
from resilient_train.extensions.on_purpose import Experiment
from resilient_train.extensions.trials.arithmetic import NoProgress
from resilient_train.loop.arguments import all_checks
from resilient_train.loop.arguments import checks as named


class Panel:
    """The checks, and those of them that others ask as well."""

    def __init__(self, config: Any = None) -> None:
        self.checks, self.best = all_checks(config or named("default"), [kind() for kind in load()])
        no_progress, experiment = self.checks.more["no_progress"], self.checks.more["experiment"]
        assert isinstance(no_progress, NoProgress)
        assert isinstance(experiment, Experiment)
        self.no_progress, self.experiment = no_progress, experiment
