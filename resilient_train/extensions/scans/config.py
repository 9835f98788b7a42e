"""The settings of the scans. `conf/checks/default.yaml` has the default of each key, its unit and its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from resilient_train.core.loss import Every
from resilient_train.ground.reader import limited


@dataclass
class ScanConfig(Every):
    margin: float = limited(at_least=1)


@dataclass
class NormsConfig(Every):
    factor: float = limited(above=1)
