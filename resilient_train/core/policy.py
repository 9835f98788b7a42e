"""A policy is data: ladders by cause, rungs of remedies, strikes and a budget. It is read and checked here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from resilient_train.core.remedies import KNOWN
from resilient_train.ground.errors import ConfigError, unusable
from resilient_train.ground.reader import is_list, limited, mapping, no_such, read
from resilient_train.ground.types import Action, Cause

_COUNT = {"at_least": 1, "null": sys.maxsize}  # null: no limit but the budget


def _each_of(read_one: Callable[[str, Any], Any], key: str, nodes: Any, what: str) -> tuple[Any, ...]:
    if not is_list(nodes):
        raise ConfigError(key, nodes, what)
    return tuple(read_one(f"{key}[{place}]", node) for place, node in enumerate(nodes))


def _action(key: str, node: Any) -> Action:
    """Read one remedy of a rung: a name, or a name with settings. The remedy itself checks its settings."""
    name, settings = next(iter(node.items())) if isinstance(node, Mapping) and len(node) == 1 else (node, {})
    if not isinstance(name, str):
        raise ConfigError(key, node, "must be the name of a remedy, or {name: {setting: value}}")
    settings = {} if settings is None else settings
    if name not in KNOWN:
        raise no_such("remedy", name, KNOWN, at=key, value=name, hint="an extension may add others")
    remedy: Any = read(KNOWN[name], settings, f"{key}.{name}")
    every = {one.name: (getattr(remedy, one.name), one.default) for one in dataclasses.fields(remedy) if one.init}
    return Action(name, {name: value for name, (value, default) in every.items() if value or value != default})


def _actions_of(key: str, nodes: Any) -> tuple[Action, ...]:
    """Read the remedies of a rung, and sort them into the order in which they are applied."""
    shape = "a rung is a list of remedies, such as [skip], or {do: [skip], strikes: 3, within: 10}"
    actions = _each_of(_action, key, nodes, shape)
    if not actions:
        raise unusable(key, "a rung needs a remedy; to leave things as they are, say [report]")
    return tuple(sorted(actions, key=lambda one: KNOWN[one.remedy].order))


@dataclass(frozen=True, slots=True)
class Rung:
    """Remedies that are applied together, in this order."""

    do: tuple[Action, ...] = field(metadata={"read": _actions_of})
    strikes: int | None = limited(None, **_COUNT)  # None: those of the policy
    within: int | None = limited(None, at_least=1)  # count strikes of so many ticks; None: since it was forgiven
    landed: bool = False  # only for what reached the weights
    at_start: bool = False  # taken first while only the initial state is verified, then until it is forgiven


def _ladders(key: str, tree: Any) -> dict[str, tuple[Rung, ...]]:
    tree = mapping(tree, key, ["default", *Cause], "cause")
    if "default" not in tree:
        raise unusable(f"{key}.default", "has to be given: the ladder of every cause that has no other")
    shape = "a ladder is a list of rungs, such as [[skip], [rewind, skip]]"
    return {cause: _each_of(_rung, f"{key}.{cause}", rungs, shape) for cause, rungs in tree.items()}


def _rung(key: str, node: Any) -> Rung:
    has_keys = isinstance(node, Mapping) and ("do" in node or len(node) != 1)
    return read(Rung, node, key) if has_keys else Rung(_actions_of(key, node))


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits at which the run gives up, whatever the ladders say."""

    # Those whose fault came again within the window, unless they only skipped, repeated, reported or quarantined rows.
    incidents: int = limited(10, at_least=0)
    refused: int = limited(500, at_least=0)  # updates skipped or retried, the same within the window
    in_a_row: int = limited(50, at_least=0)  # updates refused with no accepted one between them
    window: int = limited(1000, at_least=1)  # ticks
    rows: int = limited(1000, at_least=0)  # in quarantine
    share: float = limited(0.05, at_least=0, at_most=1)  # of the data set in quarantine, at least one row
    trials: float = limited(0.05, at_least=0, at_most=1)  # updates made in trials, as a share of the steps of the run
    trials_at_least: int = limited(200, at_least=0)  # the same, where that share is less, until a race was in vain

    def rows_of(self, count: int) -> int:
        return min(self.rows, max(int(self.share * count), 1) if self.share else 0)

    def trial_updates(self, steps: int, *, in_vain: bool = False) -> int:
        return max(int(self.trials * steps), 0 if in_vain else self.trials_at_least) if self.trials else 0


@dataclass(frozen=True, slots=True)
class Policy:
    """Which remedies are applied for which cause, how often, and when the run gives up."""

    ladders: Mapping[str, tuple[Rung, ...]] = field(metadata={"read": _ladders})  # by cause; `default` for all others
    strikes: int = limited(1, **_COUNT)  # incidents that a rung may treat before the next rung is tried
    forgive_after: int = limited(200, at_least=1)  # steps beyond its last incident until a cause is forgiven
    relax_after: int = limited(100, at_least=1)  # healthy steps between two steps of relaxing the knobs
    crashes: int = limited(2, **_COUNT)  # the process ended so often at the same samples: then they are skipped
    halvings: int = limited(4, at_least=0)  # of the micro-batch, when the device is out of memory
    budget: Budget = field(default_factory=Budget)
    rates: tuple[float, ...] = ()  # factors of the learning rate to try where the loss stands
    observe: bool = False  # report only, and let every update land: ladders and budget do not matter

    def ladder(self, cause: Cause) -> tuple[Rung, ...]:
        return self.ladders.get(cause, self.ladders["default"])


def parse(tree: Any) -> Policy:
    """Turn plain data into a policy. Raises ConfigError with the position of what is wrong."""
    return read(Policy, tree, "recovery")
