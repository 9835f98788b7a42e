"""From Hydra's configuration to a checked one, with a name and an identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from resilient_train.app.config.compared import compared
from resilient_train.app.config.explain import composed_raw, explained, typed
from resilient_train.app.config.schema import Config
from resilient_train.errors import require_finite, unusable
from resilient_train.files import read_yaml_text
from resilient_train.reader import check
from resilient_train.secrets import learn, masked_tree

_IDENTITY = ("model", "data", "objective", "optimizer", "schedule", "run.seed")  # what makes it another run
_DRILL = "drill"  # and faults on purpose do; to have none is what every run has

_FEW, _LONG = 3, 200  # lines, characters
_FIXED = (
    "model._target_",
    "data.train.",
    "data.shuffle",
    "optimizer._target_",
    "run.seed",
)  # for as long as a run lasts


def is_fixed(key: str) -> bool:
    """Say whether a setting may not change while a run goes on."""
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in _FIXED)


def told_changes(changes: Mapping[str, str]) -> list[str]:
    """Tell what has changed, a line each; of a whole policy or set of checks, which is pages long, only that it did."""
    told = []
    for node, what in (("recovery", "another policy"), ("checks", "other checks")):
        lines = {key: how for key, how in changes.items() if key.startswith(f"{node}.")}
        if len(lines) > _FEW or any(len(how) > _LONG for how in lines.values()):
            told.append(f"{node}: {what}")
            changes = {key: how for key, how in changes.items() if key not in lines}
    return [f"{key}: {how}" for key, how in changes.items()] + told


@dataclass(frozen=True)
class Composed:
    """A checked configuration, and the same as it goes into config.yaml: without its secrets."""

    config: Config
    resolved: dict[str, Any]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # what a person compares it by

    def yaml(self, directory: Path) -> str:
        """Write it down as what runs in `directory`, which may be another one than was asked for."""
        run = {**self.resolved["run"], "name": directory.name, "dir": str(directory)}
        return OmegaConf.to_yaml(OmegaConf.create({**self.resolved, "run": run}))

    def is_unchanged(self, written: Path) -> bool:
        """Say whether a config.yaml holds the very same settings, wherever the run lies."""
        return _anywhere(_written(written)) == _anywhere(self.resolved)

    def changes(self, written: Path) -> dict[str, str]:
        """Tell by key where the settings of a config.yaml are others than these, wherever the run lies."""
        mine, theirs = dict(_flat(_anywhere(self.resolved))), dict(_flat(_anywhere(_written(written))))
        if not theirs:
            return {}
        return {
            key: f"{_shown(theirs.get(key, 'absent'))} there, {_shown(mine.get(key, 'absent'))} here"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        }

    @property
    def digest(self) -> str:
        """What all of it comes to."""
        text = json.dumps(_anywhere(self.resolved), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, written: Path) -> list[str]:
        """Tell where a config.yaml is another run than this; more steps do not make it one."""
        mine, theirs = _identity(self.resolved), _identity(_written(written))
        return [
            f"{key}: {theirs.get(key, 'absent')} there, {mine.get(key, 'absent')} here"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]


def composed(
    raw: DictConfig, choices: Mapping[str, Any], *, swept: Sequence[str] = (), given: Sequence[str] = ()
) -> Composed:
    """Name the run, resolve interpolations, check types and limits.

    `swept`: the overrides of one job of a sweep; `given`: those of a command line.
    """
    raw = OmegaConf.create(OmegaConf.to_container(raw, resolve=False))  # type: ignore[assignment]  # drops read-only flags
    if raw.run.name is None:
        raw.run.name = f"{_label(raw, choices)}-{_digest(_identity_unresolved(raw), list(swept))}"
    elif swept:
        raw.run.name = f"{raw.run.name}-{_digest(list(swept))}"
    if swept and "${run.name}" not in str(OmegaConf.to_container(raw.run, resolve=False)["dir"]):  # type: ignore[index,call-overload]
        raw.run.dir = f"{raw.run.dir}/{raw.run.name}"  # each job of a sweep has a directory of its own
    try:
        resolved = OmegaConf.to_container(raw, resolve=True)
        checked = OmegaConf.merge(OmegaConf.structured(Config), resolved)
        if missing := sorted(OmegaConf.missing_keys(checked)):
            raise unusable(missing[0], f"has to be given: {missing[0]}=...")
        config = OmegaConf.to_object(checked)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "")
        raise explained(error, [f"{key}={_shown(_at(OmegaConf.to_container(raw), key))}"]) from error  # type: ignore[arg-type]
    assert isinstance(config, Config)
    assert isinstance(resolved, dict)
    require_finite("", OmegaConf.to_container(checked))
    check(config)
    learn(resolved)
    hidden = masked_tree(resolved)
    return Composed(config, hidden, compared(flattened(hidden), choices, [*given, *swept]))


def from_hydra(raw: DictConfig) -> Composed:
    """Check what Hydra hands to its job."""
    hydra = HydraConfig.get()
    given = typed(hydra.overrides.task)
    return composed(raw, hydra.runtime.choices, swept=given if hydra.mode == RunMode.MULTIRUN else [], given=given)


def load(overrides: Sequence[str] = ()) -> Composed:
    """Compose a configuration without a command line: for scripts, benchmarks and tests."""
    raw = composed_raw(overrides)
    return composed(
        OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"]),
        raw.hydra.runtime.choices,
        given=overrides,
    )


def _label(raw: DictConfig, choices: Mapping[str, Any]) -> str:
    """What a person recognises the run by; code of one's own goes by the name of its target."""

    def word(group: str, target: Any) -> str:
        choice = str(choices.get(group, "custom"))
        return re.sub(r"\W+", "_", str(target).rpartition(".")[2]) if choice == "custom" and target else choice

    words = [word("model", raw.model.get("_target_")), word("data", raw.data.train.get("_target_"))]
    return "-".join([*words, str(choices.get("recovery", "custom"))])


def _identity_unresolved(raw: DictConfig) -> dict[str, Any]:
    """`steps: ${run.steps}` of a schedule stays what it is written as: more steps continue the same run."""
    plain = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(plain, dict)
    return flattened(masked_tree(_parts(plain)))  # type: ignore[arg-type]  # another token makes no other run


def _parts(tree: Mapping[str, Any]) -> dict[str, Any]:
    drill = _at(tree, _DRILL)
    has_faults = isinstance(drill, Mapping) and (drill.get("fault") or drill.get("faults"))
    return {name: _at(tree, name) for name in _IDENTITY} | ({_DRILL: drill} if has_faults else {})


def _identity(resolved: Mapping[str, Any]) -> dict[str, Any]:
    flat = flattened(_parts(resolved))
    steps = _at(resolved, "run.steps")
    return {key: "run.steps" if key == "schedule.steps" and value == steps else value for key, value in flat.items()}


def _written(file: Path) -> dict[str, Any]:
    """What a config.yaml holds; nothing where it cannot be read."""
    try:
        tree = OmegaConf.to_container(OmegaConf.create(read_yaml_text(file)))
    except (OSError, ValueError, RecursionError, OmegaConfBaseException, yaml.YAMLError):
        return {}
    return masked_tree(tree) if isinstance(tree, dict) else {}


def _anywhere(resolved: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(resolved.get("run"), Mapping):
        return {}
    run = {name: value for name, value in resolved["run"].items() if name not in ("name", "dir", "resume")}
    return {**resolved, "run": run}


def _at(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def flattened(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a nested mapping under dotted names."""
    return dict(_flat(tree))


def _digest(*things: Any) -> str:
    return hashlib.sha256(json.dumps(things, sort_keys=True, default=str).encode()).hexdigest()[:6]
