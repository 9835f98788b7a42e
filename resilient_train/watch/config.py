"""What is watched, how often, and how strictly. The defaults are in `conf/checks/`, each next to its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resilient_train.reader import limited, option, read


@dataclass
class LimitConfig:
    """An update far above anything recent does not land."""

    every: int = limited(at_least=0)
    window: int = limited(at_least=8)
    warmup: int = limited(at_least=2)
    grad_factor: float = limited(above=1)
    early_factor: float = limited(above=1)
    loss_factor: float = limited(above=1)
    regime: int = limited(at_least=2)
    regime_of: int = limited(at_least=2)


@dataclass
class OvershootConfig:
    """The first updates threw the loss far above where it began."""

    every: int = limited(at_least=0)
    window: int = limited(at_least=1)
    watched: int = limited(at_least=1)
    updates: int = limited(at_least=1)
    times: float = limited(above=1)


@dataclass
class JumpConfig:
    """The loss leaves its recent range and stays out of it."""

    every: int = limited(at_least=0)
    window: int = limited(at_least=16)
    warmup: int = limited(at_least=8)
    sigmas: float = limited(above=0)
    share: float = limited(above=0)
    flagged: int = limited(at_least=1)
    flagged_of: int = limited(at_least=1)


@dataclass
class CreepConfig:
    """The loss climbs block by block, no block being a jump."""

    every: int = limited(at_least=0)
    blocks: int = limited(at_least=4)
    lag: int = limited(at_least=0)
    share: float = limited(above=0)
    slack: float = limited(above=0)
    alarm: float = limited(above=0)


@dataclass
class SlowConfig:
    """The loss has risen from its best by more than noise explains, however slowly."""

    every: int = limited(at_least=0)
    window: int = limited(at_least=20)
    share: float = limited(above=0)
    sigmas: float = limited(above=0)
    times: int = limited(at_least=1)


@dataclass
class ProbationConfig:
    """After damage the loss is not back where it was."""

    every: int = limited(at_least=0)
    window: int = limited(at_least=8)
    share: float = limited(above=0)
    sigmas: float = limited(above=0)


@dataclass
class RateConfig:
    """The learning rate rose, and the loss is worse since."""

    every: int = limited(at_least=0)
    times: float = limited(above=1)
    earlier: int = limited(at_least=1)
    lately: int = limited(at_least=8)
    first: int = limited(at_least=3)
    look: int = limited(at_least=3)
    window: int = limited(at_least=8)
    share: float = limited(above=0)
    sigmas: float = limited(above=0)


@dataclass
class ScaleConfig:
    """The loss scale of half precision falls without end."""

    every: int = limited(at_least=0)
    in_a_row: int = limited(at_least=1)
    lowest: float = limited(at_least=0)


@dataclass
class WeightsConfig:
    """The weights themselves: finite, and moved no further than an optimizer can move them."""

    every: int = limited(at_least=0)
    margin: float = limited(at_least=1)
    jump: float = limited(above=1)


@dataclass
class OptimizerConfig:
    """The state of the optimizer: finite, second moments not negative and grown as they must."""

    every: int = limited(at_least=0)
    margin: float = limited(at_least=1)
    recursion: float = limited(above=0)


@dataclass
class ReplicasConfig:
    """The replicas of several processes: the same to the last bit."""

    every: int = limited(at_least=0)


@dataclass
class NormsConfig:
    """The running statistics of normalization layers: in the range of the batches they are made from."""

    every: int = limited(at_least=0)
    factor: float = limited(above=1)


@dataclass
class EvaluationConfig:
    """The loss of a batch in evaluation mode beside that in training mode: reported, never treated."""

    every: int = limited(at_least=0)
    times: float = limited(above=1)


@dataclass
class ChecksConfig:
    limit: LimitConfig
    overshoot: OvershootConfig
    jump: JumpConfig
    creep: CreepConfig
    slow: SlowConfig
    rate: RateConfig
    probation: ProbationConfig
    scale: ScaleConfig
    weights: WeightsConfig
    optimizer: OptimizerConfig
    replicas: ReplicasConfig
    norms: NormsConfig
    evaluation: EvaluationConfig
    expect: list[int]


def named(name: str) -> ChecksConfig:
    """Read one of the sets of checks that come with the package."""
    return checks_from(option("checks", name))


def checks_from(values: Any) -> ChecksConfig:
    """Build the checks from plain values, every one of them given."""
    return read(ChecksConfig, values, "checks")
