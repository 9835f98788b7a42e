"""From a node of the configuration to faults.

Two forms: one fault, `{fault: nan_batch, at: [100]}`, or several, `{faults: [{nan_batch: {at: [100]}}, hot_lr]}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from resilient_train.drills.corruption import BadMoments, BitFlip
from resilient_train.drills.fault import Fault, TickFault
from resilient_train.drills.faults import HotLr, InfLoss, LossSpike, NanBatch, NanGrad
from resilient_train.drills.process import Crash, Hang
from resilient_train.drills.rows import BadRow
from resilient_train.errors import ConfigError, unusable
from resilient_train.imports import similar

FAULTS: dict[str, type[Fault]] = {
    kind.name: kind for kind in (NanBatch, NanGrad, InfLoss, LossSpike, HotLr, BitFlip, BadMoments, BadRow, Crash, Hang)
}
_HALF_WAY = (0.5,)  # where a fault strikes that is told neither ticks nor a rate


def parse(node: Mapping[str, Any], *, steps: int, world: int | None = None) -> list[Fault]:
    """Read a drill; ticks may be fractions of `steps`. `world`: how many ranks there are, if that is known."""
    if "fault" in node:
        if "faults" in node:
            raise unusable("drill.faults", "give either drill.fault, for one, or drill.faults, for several")
        settings = {key: value for key, value in node.items() if key != "fault"}
        return [_fault("drill", "drill.fault", node["fault"], settings, steps, world)]
    if unknown := node.keys() - {"faults", "seed"}:
        raise _no_such_key("drill", min(unknown), node[min(unknown)], ("fault", "faults", "seed"))
    entries = node.get("faults") or []
    if not isinstance(entries, list):
        raise ConfigError("drill.faults", entries, "must be a list, such as [{nan_batch: {at: [50]}}]")
    faults = []
    for number, entry in enumerate(entries):
        path = f"drill.faults[{number}]"
        name, settings = _entry(path, entry)
        shared = {"seed": node["seed"]} if "seed" in node else {}
        faults.append(_fault(f"{path}.{name}", path, name, {**shared, **settings}, steps, world))
    return faults


def _entry(path: str, entry: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, settings),) = entry.items()
        if settings is None or isinstance(settings, Mapping):
            return name, dict(settings or {})
    raise ConfigError(path, entry, "must be one fault with its settings, such as {nan_batch: {at: [50]}}")


def _fault(path: str, key: str, name: Any, settings: dict[str, Any], steps: int, world: int | None) -> Fault:
    """Build one fault. `path` is where its settings are, `key` where its name is."""
    kind = FAULTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(
            key, name, f"no such fault{similar(name, FAULTS) or ';'} There are {', '.join(sorted(FAULTS))}"
        )
    known = [field.name for field in dataclasses.fields(kind)]
    for setting, value in settings.items():
        if setting not in known:
            raise _no_such_key(path, setting, value, known, kind.name)
    given = {setting: value for setting, value in settings.items() if value is not None}
    if issubclass(kind, TickFault):
        given["at"] = _ticks(f"{path}.at", given.get("at", () if given.get("rate") else _HALF_WAY), steps)
    if "value" in given:
        given["value"] = str(given["value"])  # Hydra reads nan and inf as numbers
    try:
        fault = kind(**given)
    except ConfigError as error:
        raise type(error)(f"{path}.{error.key}", error.value, error.why) from error
    rank = fault.rank if isinstance(fault, TickFault) else "all"
    if world is not None and isinstance(rank, int) and rank >= world:
        raise ConfigError(f"{path}.rank", rank, f"there is no such rank: they are 0 to {world - 1}")
    return fault


def _ticks(key: str, at: Any, steps: int) -> tuple[int, ...]:
    """Turn ticks and fractions of the run into ticks."""
    if isinstance(at, str) or not isinstance(at, Iterable):
        at = [at]
    ticks = set()
    for one in at:
        if isinstance(one, float) and 0 < one < 1:
            ticks.add(max(1, round(one * steps)))
        elif isinstance(one, bool) or not isinstance(one, int) or one < 1:
            why = f"{one} is neither a tick (1, 2, ...) nor a fraction of the run between 0 and 1"
            raise ConfigError(key, at, why)
        elif one > steps:
            raise ConfigError(key, at, f"the run has only {steps} steps: nothing would strike at tick {one}")
        else:
            ticks.add(one)
    return tuple(sorted(ticks))


def _no_such_key(path: str, name: Any, value: Any, known: Iterable[str], owner: str = "") -> ConfigError:
    why = f"no such key{similar(name, known) or ';'} {owner or path} has {', '.join(known)}"
    return ConfigError(f"{path}.{name}", value, why)
