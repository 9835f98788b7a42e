"""The settings of all checks, as extensions declare them. `conf/checks/default.yaml` has units and meanings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any

from resilient_train.core.checks import Check, Checks, ChecksConfig
from resilient_train.core.loss import Level
from resilient_train.extensions import Extension, load
from resilient_train.ground.reader import option, read
from resilient_train.parts.best import BestLevel


def checks_config() -> type[ChecksConfig]:
    """Return the dataclass of `checks`: what the core has, and what extensions add."""
    further: list[Any] = []
    for kind in load():
        for name, settings in kind.settings.items():
            has_defaults = all(
                one.default is not MISSING or one.default_factory is not MISSING for one in fields(settings)
            )
            further.append((name, settings, *([field(default_factory=settings)] if has_defaults else [])))
    further.sort(key=len)  # dataclasses have fields without a default first
    return make_dataclass("ChecksConfig", further, bases=(ChecksConfig,))


def read_checks(tree: Any, key: str = "checks") -> Any:
    """Read the settings of all checks. Those that are shipped for an extension that is not there are left out."""
    config = checks_config()
    known = {one.name for one in fields(config)}
    if isinstance(tree, Mapping):
        shipped = option("checks", "default").keys() - known
        tree = {name: value for name, value in tree.items() if name not in shipped}
    return read(config, tree, key)


def all_checks(config: Any, extensions: Sequence[Extension]) -> tuple[Checks, BestLevel]:
    """Make the checks of a run. The best level is asked by others, too."""
    best, level = BestLevel(config.jump), Level(config.jump)
    further: dict[str, Check] = {"best": best}
    for one in extensions:
        further |= one.checks(config, level)
    return Checks(config, level, **further), best


def named(name: str) -> Any:
    return read_checks(option("checks", name))
