"""The settings of all checks, which each extension declares next to its own."""

from __future__ import annotations

from dataclasses import dataclass

from resilient_train.extensions.checks.config import FurtherChecksConfig
from resilient_train.extensions.scans.config import ScansConfig
from resilient_train.ground.reader import option, read


@dataclass
class ChecksConfig(ScansConfig, FurtherChecksConfig):
    """The node `checks`."""


def named(name: str) -> ChecksConfig:
    return read(ChecksConfig, option("checks", name), "checks")
