"""Further checks of the losses, of the learning rate and of the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from resilient_train.core.checks import Check
from resilient_train.core.loss import Level
from resilient_train.extensions import Extension
from resilient_train.extensions.checks.config import CreepConfig, RateConfig, ScaleConfig
from resilient_train.extensions.checks.rate import Creep, RateRise, ScaleCollapse


class LossChecks(Extension):
    settings = MappingProxyType({"rate": RateConfig, "creep": CreepConfig, "scale": ScaleConfig})

    def checks(self, settings: Any, level: Level) -> Mapping[str, Check]:
        return {
            "rate": RateRise(settings.rate),
            "creep": Creep(settings.creep, level),
            "scale": ScaleCollapse(settings.scale),
        }
