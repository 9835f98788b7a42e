"""What is watched, how often, and how strictly. The defaults are in `conf/checks/`, each beside its meaning."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import yaml

from resilient_train.files import conf

_FOLDER = conf() / "checks"


@dataclass
class LimitConfig:
    """An update far above anything recent does not land."""

    every: int = field(metadata={"at_least": 0})
    window: int = field(metadata={"at_least": 8})
    warmup: int = field(metadata={"at_least": 2})
    grad_factor: float = field(metadata={"above": 1})
    early_factor: float = field(metadata={"above": 1})
    loss_factor: float = field(metadata={"above": 1})
    regime: int = field(metadata={"at_least": 2})
    regime_of: int = field(metadata={"at_least": 2})


@dataclass
class OvershootConfig:
    """The first updates threw the loss far above where it began."""

    every: int = field(metadata={"at_least": 0})
    window: int = field(metadata={"at_least": 1})
    watched: int = field(metadata={"at_least": 1})
    updates: int = field(metadata={"at_least": 1})
    times: float = field(metadata={"above": 1})


@dataclass
class JumpConfig:
    """The loss leaves its recent range and stays out of it."""

    every: int = field(metadata={"at_least": 0})
    window: int = field(metadata={"at_least": 16})
    warmup: int = field(metadata={"at_least": 8})
    sigmas: float = field(metadata={"above": 0})
    share: float = field(metadata={"above": 0})
    flagged: int = field(metadata={"at_least": 1})
    flagged_of: int = field(metadata={"at_least": 1})


@dataclass
class CreepConfig:
    """The loss climbs block by block, no block being a jump."""

    every: int = field(metadata={"at_least": 0})
    blocks: int = field(metadata={"at_least": 4})
    lag: int = field(metadata={"at_least": 0})
    share: float = field(metadata={"above": 0})
    slack: float = field(metadata={"above": 0})
    alarm: float = field(metadata={"above": 0})


@dataclass
class SlowConfig:
    """The loss has risen from its best by more than noise explains, however slowly."""

    every: int = field(metadata={"at_least": 0})
    window: int = field(metadata={"at_least": 20})
    share: float = field(metadata={"above": 0})
    sigmas: float = field(metadata={"above": 0})
    times: int = field(metadata={"at_least": 1})


@dataclass
class ProbationConfig:
    """After damage the loss is not back where it was."""

    every: int = field(metadata={"at_least": 0})
    window: int = field(metadata={"at_least": 8})
    share: float = field(metadata={"above": 0})
    sigmas: float = field(metadata={"above": 0})


@dataclass
class RateConfig:
    """The learning rate rose, and the loss is worse since."""

    every: int = field(metadata={"at_least": 0})
    times: float = field(metadata={"above": 1})
    earlier: int = field(metadata={"at_least": 1})
    lately: int = field(metadata={"at_least": 8})
    first: int = field(metadata={"at_least": 3})
    look: int = field(metadata={"at_least": 3})
    window: int = field(metadata={"at_least": 8})
    share: float = field(metadata={"above": 0})
    sigmas: float = field(metadata={"above": 0})


@dataclass
class StallConfig:
    """The loss has not improved for long: reported, never treated."""

    every: int = field(metadata={"at_least": 0})
    share: float = field(metadata={"above": 0})


@dataclass
class OutlierConfig:
    """A single loss far outside of its range: reported, never treated."""

    every: int = field(metadata={"at_least": 0})
    sigmas: float = field(metadata={"above": 0})


@dataclass
class ScaleConfig:
    """The loss scale of half precision falls without end."""

    every: int = field(metadata={"at_least": 0})
    in_a_row: int = field(metadata={"at_least": 1})
    lowest: float = field(metadata={"at_least": 0})


@dataclass
class WeightsConfig:
    """The weights themselves: finite, and moved no further than an optimizer can move them."""

    every: int = field(metadata={"at_least": 0})
    margin: float = field(metadata={"at_least": 1})
    jump: float = field(metadata={"above": 1})


@dataclass
class OptimizerConfig:
    """The state of the optimizer: finite, second moments not negative and grown as they must."""

    every: int = field(metadata={"at_least": 0})
    margin: float = field(metadata={"at_least": 1})
    recursion: float = field(metadata={"above": 0})


@dataclass
class ReplicasConfig:
    """The replicas of several processes: the same to the last bit."""

    every: int = field(metadata={"at_least": 0})


@dataclass
class ActivationsConfig:
    """What the modules put out: finite."""

    every: int = field(metadata={"at_least": 0})


@dataclass
class NormsConfig:
    """The running statistics of normalization layers: in the range of the batches they are made from."""

    every: int = field(metadata={"at_least": 0})
    factor: float = field(metadata={"above": 1})


@dataclass
class EvaluationConfig:
    """The loss of a batch in evaluation mode beside that in training mode: reported, never treated."""

    every: int = field(metadata={"at_least": 0})
    times: float = field(metadata={"above": 1})


@dataclass
class BatchConfig:
    """What goes in: no value far above all that went in before."""

    every: int = field(metadata={"at_least": 0})
    factor: float = field(metadata={"above": 1})


@dataclass
class ChecksConfig:
    limit: LimitConfig
    overshoot: OvershootConfig
    jump: JumpConfig
    creep: CreepConfig
    slow: SlowConfig
    rate: RateConfig
    probation: ProbationConfig
    stall: StallConfig
    outlier: OutlierConfig
    scale: ScaleConfig
    weights: WeightsConfig
    optimizer: OptimizerConfig
    replicas: ReplicasConfig
    activations: ActivationsConfig
    norms: NormsConfig
    evaluation: EvaluationConfig
    batch: BatchConfig
    expect: list[int]


def named(name: str) -> ChecksConfig:
    """Read one of the sets of checks that come with the package."""
    known = sorted(file.stem for file in _FOLDER.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"checks={name} is none of {', '.join(known)}")
    return checks_from(yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))


def checks_from(values: dict[str, Any]) -> ChecksConfig:
    """Build the checks from plain values, every one of them given."""
    built: ChecksConfig = _built(ChecksConfig, values, "checks")
    return built


def _built(kind: Any, values: Any, path: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{path}={values!r} has to have keys: {', '.join(one.name for one in fields(kind))}")
    types = typing.get_type_hints(kind)
    if strangers := sorted(values.keys() - types.keys()):
        raise ValueError(f"{path}.{strangers[0]} is none of {', '.join(sorted(types))}")
    if missing := sorted(types.keys() - values.keys()):
        raise ValueError(f"{path}.{missing[0]} is missing")
    return kind(**{name: _value(types[name], value, f"{path}.{name}") for name, value in values.items()})


def _value(kind: Any, value: Any, path: str) -> Any:
    if is_dataclass(kind):
        return _built(kind, value, path)
    if kind is float and type(value) in (int, float):
        return float(value)
    if (kind is int and type(value) is int) or (kind == list[int] and _are_steps(value)):
        return value
    raise ValueError(f"{path}={value!r} is not {'a list of steps' if kind == list[int] else kind.__name__}")


def _are_steps(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
