"""From Hydra's configuration to a checked one, and from Hydra's errors to one line."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from resilient_train.config.schema import Config, broken_limit
from resilient_train.errors import ConfigError, TrainError, unusable

CONF = Path(__file__).parent.parent / "conf"
VERSION_BASE = "1.3"

_IDENTITY = ("model", "data", "objective", "optimizer", "schedule", "run.seed")  # what makes it another run


@dataclass(frozen=True)
class Composed:
    """A checked configuration, and the same as it goes into config.yaml."""

    config: Config
    resolved: dict[str, Any]

    @property
    def yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.resolved))

    def differences(self, written: Path) -> list[str]:
        """Tell where a config.yaml is another run than this; more steps do not make it one."""
        other = OmegaConf.to_container(OmegaConf.load(written))
        mine, theirs = _identity(self.resolved), _identity(other if isinstance(other, dict) else {})  # type: ignore[arg-type]
        return [
            f"{key}: {theirs.get(key, 'absent')} there, {mine.get(key, 'absent')} here"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]


def composed(raw: DictConfig, choices: Mapping[str, Any], *, swept: Sequence[str] = ()) -> Composed:
    """Name the run, resolve interpolations, check types and limits. `swept`: the overrides of one job of a sweep."""
    raw = OmegaConf.create(OmegaConf.to_container(raw, resolve=False))  # type: ignore[assignment]  # drops read-only flags
    if raw.run.name is None:
        raw.run.name = f"{_label(raw, choices)}-{_digest(_identity_unresolved(raw), list(swept))}"
    elif swept:
        raw.run.name = f"{raw.run.name}-{_digest(list(swept))}"
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
    _check_limits(config)
    return Composed(config, resolved)  # type: ignore[arg-type]  # keys are strings


def from_hydra(raw: DictConfig) -> Composed:
    """Check what Hydra hands to its job."""
    hydra = HydraConfig.get()
    swept = list(hydra.overrides.task) if hydra.mode == RunMode.MULTIRUN else []
    return composed(raw, hydra.runtime.choices, swept=swept)


def load(overrides: Sequence[str] = ()) -> Composed:
    """Compose a configuration without a command line: for scripts, benchmarks and tests."""
    raw = _compose(overrides)
    return composed(OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"]), raw.hydra.runtime.choices)


def explained(error: Exception, overrides: Sequence[str] = ()) -> TrainError:
    """Turn an error of Hydra or OmegaConf into one line that names the key, the value and what is allowed."""
    if isinstance(error, TrainError):
        return error
    text = str(error)
    key = getattr(error, "full_key", None)
    if isinstance(error, ValidationError) and key:
        return _wrong_type(str(key), _value_of(str(key), overrides), text)
    if isinstance(error, ConfigKeyError) and key:
        return _unknown_key(str(key), _value_of(str(key), overrides), _fields_beside(str(key)))
    if missing := re.search(
        r"Could not find '([^']+)'\s*(?:Available options in '[^']+':\s*(.*?))?(?:Config search path|$)", text, re.S
    ):
        group, _, option = missing[1].rpartition("/")
        options = (missing[2] or "").split()
        return unusable(
            f"{group or 'config'}={option}", f"no such option{_similar(option, options)}{_allowed(options)}"
        )
    if override := re.search(r"Could not override '([^']+)'", text):
        name = override[1].split("@")[0]
        return _unknown_key(name, _value_of(name, overrides), _keys_beside(name, overrides))
    if missing_value := re.search(r"Missing mandatory value: (\S+)", text):
        return unusable(missing_value[1], "has to be given")
    return unusable("configuration", " ".join(text.split()))


def _wrong_type(key: str, value: str | None, text: str) -> ConfigError:
    wanted = re.search(r"could not be converted to (\w+)|for field of type '(\w+)'", text)
    spoken = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
    spoken |= {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    kind = (wanted[1] or wanted[2]) if wanted else ""
    why = f"is not {spoken.get(kind, kind)}" if wanted else " ".join(text.split("full_key")[0].split())
    return ConfigError(key, value, why) if value is not None else unusable(key, why)


def _unknown_key(key: str, value: str | None, known: Sequence[str]) -> ConfigError:
    parent, _, name = key.rpartition(".")
    why = f"no such key{_similar(name, known) or ';'}"
    if known:
        why += f" {parent or 'the configuration'} has {', '.join(known)}"
    if parent and "_target_" in known:
        why += f" (+{key}=... hands its target one argument more)"
    return ConfigError(key, value, why) if value is not None else unusable(key, why)


def _value_of(key: str, overrides: Iterable[str]) -> str | None:
    for override in overrides:
        name, equals, value = override.lstrip("+~").partition("=")
        if equals and name.split("@")[0] == key:
            return value
    return None


def _keys_beside(key: str, overrides: Sequence[str]) -> list[str]:
    """Name the keys next to a misspelt one, with the options that were chosen on the same command line."""
    chosen = [one for one in overrides if "." not in one.partition("=")[0] and one.partition("=")[0].lstrip("+") != key]
    try:
        node: Any = _compose([one for one in chosen if (CONF / one.partition("=")[0]).is_dir()])
    except Exception:  # only a hint hangs on this
        return []
    for name in key.split(".")[:-1]:
        node = node.get(name) if isinstance(node, DictConfig) else None
    return [str(one) for one in node if one != "hydra"] if isinstance(node, DictConfig) else []


def _fields_beside(key: str) -> list[str]:
    kind: Any = Config
    for name in key.split(".")[:-1]:
        by_name = {field.name: _resolved(kind, field) for field in dataclasses.fields(kind)}
        kind = by_name.get(name)
        if not dataclasses.is_dataclass(kind):
            return []
    return [field.name for field in dataclasses.fields(kind)]


def _resolved(owner: Any, field: dataclasses.Field[Any]) -> Any:
    return typing.get_type_hints(owner)[field.name]


def _check_limits(config: Any, path: str = "") -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            _check_limits(value, f"{path}{field.name}.")
        elif why := broken_limit(value, field):
            raise ConfigError(f"{path}{field.name}", value, why)


def _compose(overrides: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
            return compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, overrides) from error


def _label(raw: DictConfig, choices: Mapping[str, Any]) -> str:
    """What a person recognises the run by; code of one's own goes by the name of its target."""

    def word(group: str, target: Any) -> str:
        choice = str(choices.get(group, "custom"))
        return re.sub(r"\W+", "_", str(target).rpartition(".")[2]) if choice == "custom" and target else choice

    return f"{word('model', raw.model.get('_target_'))}-{word('data', raw.data.train.get('_target_'))}"


def _identity_unresolved(raw: DictConfig) -> dict[str, Any]:
    """`steps: ${run.steps}` of a schedule stays what it is written as: more steps continue the same run."""
    plain = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in _flat({name: _at(plain, name) for name in _IDENTITY})}  # type: ignore[arg-type]


def _identity(resolved: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(_flat({name: _at(resolved, name) for name in _IDENTITY}))
    steps = _at(resolved, "run.steps")
    return {key: "run.steps" if key == "schedule.steps" and value == steps else value for key, value in flat.items()}


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


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _allowed(options: Sequence[str]) -> str:
    return f" There are {', '.join(options)}" if options else ""
