"""From Hydra's configuration to a checked one, with a name and an identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from resilient_train.app.config.explain import composed_raw, explained, typed
from resilient_train.app.config.options import name_of
from resilient_train.app.config.schema import Config
from resilient_train.errors import ConfigError, require_finite, unusable
from resilient_train.files import read_yaml_text
from resilient_train.intervals import AUTO
from resilient_train.reader import check
from resilient_train.secrets import learn, masked_tree

# What makes it another run, next to the faults of a drill.
_IDENTITY = ("model.", "data.", "objective.", "optimizer.", "schedule.", "run.seed")
# What may not change when a run resumes.
_FIXED = ("model._target_", "data.train.", "data.shuffle", "optimizer._target_", "run.seed")

_FEW, _LONG = 3, 200  # lines, characters

# Parameters for a tracker: what people compare runs by.
_GROUPS = ("model", "data", "objective", "optimizer", "schedule", "recovery", "checks", "drill", "experiment")
_ALWAYS = (
    *("run.steps", "run.seed", "data.batch_size", "clip.max_norm"),
    *("accelerate.gradient_accumulation_steps", "accelerate.mixed_precision"),
)
_TARGETS = ("model._target_", "data.train._target_", "objective._target_", "optimizer._target_", "schedule._target_")
_NEVER = ("hydra.", "tracking.", "run.name", "run.dir", "run.resume")  # the place of a run and how it is shown
_PLUMBING = ("optimizer.fused", "optimizer.no_decay")
_MOST = 12  # settings of a model, an optimizer or a schedule; of a larger one only those that were given


def is_fixed(key: str) -> bool:
    """Say whether a setting may not change when a run resumes."""
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in _FIXED)


def describe_changes(changes: Mapping[str, str]) -> list[str]:
    """Describe each change in a line; of a whole policy or set of checks, which has pages, only that it changed."""
    lines = []
    for node, what in (("recovery", "another policy"), ("checks", "other checks")):
        below = {key: how for key, how in changes.items() if key.startswith(f"{node}.")}
        if len(below) > _FEW or any(len(how) > _LONG for how in below.values()):
            lines.append(f"{node}: {what}")
            changes = {key: how for key, how in changes.items() if key not in below}
    return [f"{key}: {how}" for key, how in changes.items()] + lines


@dataclass(frozen=True)
class Composed:
    """A checked configuration, and the same as it is written to config.yaml: without its secrets."""

    config: Config
    resolved: dict[str, Any]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # for a tracker
    sweep: dict[str, str] | None = None  # the sweep that this is a job of, and the name of the job

    def yaml(self, directory: Path) -> str:
        """Return the text of the config.yaml of `directory`, which may differ from the configured one."""
        run = {**self.resolved["run"], "name": directory.name, "dir": str(directory)}
        return OmegaConf.to_yaml(OmegaConf.create({**self.resolved, "run": run}))

    def is_unchanged(self, written: Path) -> bool:
        """Say whether a config.yaml holds exactly these settings, wherever the run is."""
        return _without_place(_read(written)) == _without_place(self.resolved)

    def changes(self, written: Path) -> dict[str, str]:
        """Describe by key how these settings differ from a config.yaml; nothing if that cannot be read."""
        before = _flat(_without_place(_read(written)))
        return _differences(before, _flat(_without_place(self.resolved))) if before else {}

    @property
    def digest(self) -> str:
        """A digest of all the settings."""
        text = json.dumps(_without_place(self.resolved), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def other_run(self, written: Path) -> list[str]:
        """Describe what makes a config.yaml another run than this one; more steps do not."""
        both = []
        for tree in (_read(written), self.resolved):
            both.append(_identity(tree))
            if both[-1].get("schedule.steps", "") == _flat(tree).get("run.steps"):
                both[-1]["schedule.steps"] = "run.steps"
        return [f"{key}: {how}" for key, how in _differences(*both).items()]


def composed(
    raw: DictConfig, choices: Mapping[str, Any], *, swept: Sequence[str] = (), given: Sequence[str] = ()
) -> Composed:
    """Name the run, resolve interpolations, check types and limits.

    `swept` are the overrides of one job of a sweep, `given` those of a command line.
    """
    raw = OmegaConf.create(OmegaConf.to_container(raw, resolve=False))  # type: ignore[assignment]  # not read-only
    unresolved: Any = OmegaConf.to_container(raw, resolve=False)
    if raw.run.name is None:
        # Masked, as another token makes no other run; unresolved, as `steps: ${run.steps}` of a schedule makes none.
        digest = _short_digest(_identity(masked_tree(unresolved)), list(swept))
        raw.run.name = f"{_label(raw, choices)}-{digest}"
    elif swept:
        raw.run.name = f"{raw.run.name}-{_short_digest(list(swept))}"
    if swept and "${run.name}" not in str(unresolved["run"]["dir"]):
        raw.run.dir = f"{raw.run.dir}/{raw.run.name}"  # each job of a sweep has a directory of its own
    try:
        resolved: Any = OmegaConf.to_container(raw, resolve=True)
        checked = OmegaConf.merge(OmegaConf.structured(Config), resolved)
        if missing := sorted(OmegaConf.missing_keys(checked)):
            raise unusable(missing[0], f"has to be given: {missing[0]}=...")
        config = OmegaConf.to_object(checked)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "")
        value: Any = OmegaConf.to_container(raw)
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        raise explained(error, [f"{key}={_shown(value)}"]) from error
    assert isinstance(config, Config)
    require_finite("", OmegaConf.to_container(checked))
    check(config)
    if config.run.deterministic and AUTO in (config.checkpoint.memory.every, config.checkpoint.disk.every):
        raise ConfigError("run.deterministic", True, "cannot be with an interval of auto, which follows from a clock")
    learn(resolved)
    hidden = masked_tree(resolved)
    return Composed(config, hidden, _compared(_flat(hidden), choices, [*given, *swept]))


def from_hydra(raw: DictConfig) -> Composed:
    """Check the configuration that Hydra passes to its job."""
    hydra = HydraConfig.get()
    given = typed(hydra.overrides.task)
    if hydra.mode != RunMode.MULTIRUN:
        return composed(raw, hydra.runtime.choices, given=given)
    made = composed(raw, hydra.runtime.choices, swept=given, given=given)
    return dataclasses.replace(made, sweep=_sweep(Path(hydra.sweep.dir), given))


def _sweep(directory: Path, given: Sequence[str]) -> dict[str, str]:
    """Name the sweep and its job. Sweeps that start in the same second elsewhere are others."""
    place = f"{platform.node()}:{directory.absolute()}"
    return {"sweep": directory.name, "sweep_place": place, "job": name_of(given)}


def load(overrides: Sequence[str] = ()) -> Composed:
    """Compose a configuration without a command line: for scripts, benchmarks and tests."""
    raw = composed_raw(overrides)
    ours = OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])
    return composed(ours, raw.hydra.runtime.choices, given=overrides)


def _label(raw: DictConfig, choices: Mapping[str, Any]) -> str:
    """Return what a person recognises the run by; a custom model or data set is named after its target."""
    words = []
    for group, target in (("model", raw.model.get("_target_")), ("data", raw.data.train.get("_target_"))):
        choice = str(choices.get(group, "custom"))
        is_custom = choice == "custom" and target
        words.append(re.sub(r"\W+", "_", str(target).rpartition(".")[2]) if is_custom else choice)
    return "-".join([*words, str(choices.get("recovery", "custom"))])


def _identity(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat = _flat(tree)
    parts = (*_IDENTITY, "drill.") if flat.get("drill.fault") or flat.get("drill.faults") else _IDENTITY
    return {key: value for key, value in flat.items() if key.startswith(parts)}


def _without_place(tree: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tree.get("run"), Mapping):
        return {}
    run = {name: value for name, value in tree["run"].items() if name not in ("name", "dir", "resume")}
    return {**tree, "run": run}


def _read(file: Path) -> dict[str, Any]:
    """Read a config.yaml; nothing if it cannot be read."""
    try:
        tree = OmegaConf.to_container(OmegaConf.create(read_yaml_text(file)))
    except (OSError, ValueError, RecursionError, OmegaConfBaseException, yaml.YAMLError):
        return {}
    return masked_tree(tree) if isinstance(tree, dict) else {}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{_shown(before.get(key, 'absent'))} there, {_shown(now.get(key, 'absent'))} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of a nested mapping under dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def _short_digest(*things: Any) -> str:
    return hashlib.sha256(json.dumps(things, sort_keys=True, default=str).encode()).hexdigest()[:6]


def _compared(settings: Mapping[str, Any], choices: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Choose from `settings`, the leaves of a configuration. What a command line or a sweep gave is always included."""
    chosen = {name: choices[name] for name in _GROUPS if choices.get(name) is not None}
    given = [word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides]
    found = {}
    for key, value in settings.items():
        node = key.partition(".")[0]
        is_given = not key.startswith(_NEVER) and any(f"{key}.".startswith(f"{one}.") for one in given if "." in one)
        if key in _TARGETS:
            is_shown = chosen.get(node) == "custom"  # else the option implies it
        elif node in ("model", "optimizer", "schedule") and key not in _PLUMBING:
            is_shown = sum(one.startswith(f"{node}.") for one in settings) <= _MOST
        else:
            is_shown = key in _ALWAYS
        if is_given or is_shown:
            found[key] = value
    return chosen | dict(sorted(found.items()))
