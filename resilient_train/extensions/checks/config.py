"""The configuration of the checks. `conf/checks/default.yaml` has the default of each key, its unit and its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from resilient_train.core.episode import ReferenceConfig
from resilient_train.core.loss import Every
from resilient_train.ground.reader import limited


@dataclass
class CreepConfig(Every):
    blocks: int = limited(at_least=4)
    lag: int = limited(at_least=0)
    share: float = limited(above=0)
    slack: float = limited(above=0)
    alarm: float = limited(above=0)


@dataclass
class RateConfig(ReferenceConfig):
    times: float = limited(above=1)
    earlier: int = limited(at_least=1)
    lately: int = limited(at_least=8)
    first: int = limited(at_least=3)
    look: int = limited(at_least=3)


@dataclass
class ScaleConfig(Every):
    lowest: float = limited(at_least=0)
