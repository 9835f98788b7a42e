"""From a command line to a checked configuration, with a name and an identity; complaints of Hydra's in one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from resilient_train.command.config import CONF, Config
from resilient_train.durable.endings import CONFIG
from resilient_train.ground import reader
from resilient_train.ground.errors import ConfigError, TrainError, in_one_line, text_of, unusable
from resilient_train.ground.files import digest_of, read_yaml
from resilient_train.ground.reader import no_such
from resilient_train.ground.secrets import masked_tree

VERSION_BASE = "1.3"


def composed_raw(overrides: Sequence[str]) -> DictConfig:
    """Compose a configuration without a command line; it includes Hydra's own node."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
            return compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise explained(error, overrides) from error


def explained(error: Exception, overrides: Sequence[str] = ()) -> TrainError:
    """Turn an error of Hydra or OmegaConf into one line that names the key, the value and what is allowed."""
    if isinstance(error, TrainError):
        return error
    if isinstance(error, yaml.YAMLError | RecursionError | UnicodeDecodeError):  # of levels without end, or no text
        return unusable("configuration", f"a file cannot be read: {' '.join(text_of(error).split())}")
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return TrainError(in_one_line(error))
    if isinstance(error, OverrideParseException):
        why = "neither a verb nor key=value; quote special characters: 'key=\"a[b]\"'"
        return unusable(error.override, why)
    text = text_of(error)
    no_option = r"Could not find '([^']+)'\s*(?:Available options in '[^']+':\s*(.*?))?(?:Config search path|$)"
    if missing := re.search(no_option, text, re.DOTALL):
        group, _, option = missing[1].rpartition("/")
        return no_such("option", option, (missing[2] or "").split(), at=group or "config", value=option)
    if override := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(override[1].partition("@")[0], overrides)
    return unusable("configuration", " ".join(text.split()))


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values that overrides give, by key."""
    pairs = (one.lstrip("+~").partition("=") for one in overrides)
    return {name.partition("@")[0]: value for name, equals, value in pairs if equals}


def _unknown_key(key: str, overrides: Sequence[str]) -> ConfigError:
    """Suggest what a misspelt key may mean, among the keys of the options that the command line chooses."""
    names = [one.partition("=")[0] for one in overrides]
    chosen = [one for one, name in zip(overrides, names, strict=True) if "." not in name and name != key]
    parent, _, name = key.rpartition(".")
    known: list[str] = []
    with suppress(TrainError, OmegaConfBaseException):  # without them only a hint is missing
        root = composed_raw(chosen)
        node = OmegaConf.select(root, parent) if parent else root
        if node is None:
            return _unknown_key(parent, overrides)
        known = [str(one) for one in node if one != "hydra"] if isinstance(node, DictConfig) else []
    known += [] if parent else ["experiment"]  # which has no node unless one of its options is chosen
    hint = f"+{key}=... adds an argument of its _target_" if "_target_" in known else ""
    return no_such("key", name, known, at=key, value=values_of(overrides).get(key, ...), hint=hint)


Node = Mapping[str, Any]

_HYDRAS_OWN = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}


def check_target(key: str, node: Node, *, given: int = 0) -> Any:
    """Import a node's target and check its keys against the signature; the caller passes `given` arguments itself."""
    path = node.get("_target_")
    target = reader.find(f"{key}._target_", path)
    if not callable(target):
        raise ConfigError(f"{key}._target_", path, f"is a {type(target).__name__}, not a class or function")
    known = inspect.signature(target).parameters
    of = target.__init__ if inspect.isclass(target) else target if inspect.isroutine(target) else type(target).__call__
    hints = reader.hints(of)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    named = [one for one in known.values() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    free = {one.name: one for one in named[given:] if one.kind is not one.POSITIONAL_ONLY}
    for name, value in node.items():
        if isinstance(value, Mapping) and "_target_" in value:
            check_target(f"{key}.{name}", value)
        elif name in free:
            kind = hints.get(name, Any)
            if value is not None or free[name].default is not None:  # `x: int = None` is a usual way to write it
                reader.checked(f"{key}.{name}", value, kind, {"as_is": True})  # it is passed on as it is
        elif name not in _HYDRAS_OWN and not takes_any:
            takes = f"it takes {', '.join(free) or 'no arguments'}"
            raise ConfigError(f"{key}.{name}", value, f"{path} has no such argument; {takes}")
    return target


def build(key: str, node: Node, *given: Any) -> Any:
    """Call a node's target with `given` and its keys; lists and dicts are passed as plain ones."""
    check_target(key, node, given=len(given))
    try:
        built = instantiate(OmegaConf.create(dict(node)), *given, _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        raise ConfigError(f"{key}._target_", node["_target_"], f"failed with {in_one_line(cause)}") from cause
    if node.get("_partial_") and isinstance(built, partial):
        # Hydra's own partial checks a policy at every call: 0.2 ms, twice a step, for the objective and the schedule.
        return partial(built.func, *built.args, **built.keywords)
    return built


def wrong_kind(key: str, node: Node, thing: Any, expected: str) -> ConfigError:
    return ConfigError(f"{key}._target_", node["_target_"], f"returned a {type(thing).__name__}; expected {expected}")


# What makes it another run, next to the faults of a drill.
_IDENTITY = ("model.", "data.", "objective.", "optimizer.", "schedule.", "run.seed")
# What may not change when a run resumes.
FIXED = ("model._target_", "data.train.", "data.shuffle", "optimizer._target_", "run.seed")

_PLACE = ("run.name", "run.dir", "run.resume")  # where the run is

_NEVER = ("hydra.", "tracking.", *_PLACE)  # no parameters in MLflow: where it is, and how it is shown


def other_run(changes: Mapping[str, str]) -> list[str]:
    """Describe the changes that make it another run; more steps do not, nor a schedule with them."""
    parts = (*_IDENTITY, "drill.", "accelerate.gradient_accumulation_steps", CONFIG)
    same = [key for key, how in changes.items() if key.startswith("schedule.") and how == changes.get("run.steps")]
    return [f"{key}: {how}" for key, how in changes.items() if key.startswith(parts) and key not in same]


@dataclass(frozen=True)
class Composed:
    """A checked configuration, and the same as it is written to config.yaml: without its secrets."""

    config: Config
    resolved: dict[str, Any]
    params: dict[str, Any]  # for a tracker

    def yaml(self, directory: Path) -> str:
        """Return the text of the config.yaml of `directory`, which may differ from the configured one."""
        run = {**self.resolved["run"], "name": directory.name, "dir": str(directory)}
        return OmegaConf.to_yaml(OmegaConf.create({**self.resolved, "run": run}))

    def changes(self, written: Path) -> dict[str, str]:
        """Describe by key how these settings differ from a config.yaml, wherever the run is."""
        tree = read_yaml(written)
        if not isinstance(tree, dict):
            return {written.name: "cannot be read"}
        there, here = _settings(masked_tree(tree)), _settings(self.resolved)
        keys = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
        return {key: f"{there.get(key, 'absent')} there, {here.get(key, 'absent')} here" for key in keys}


def composed(
    raw: DictConfig, choices: Mapping[str, Any], *, given: Sequence[str] = (), sweep: str | None = None
) -> Composed:
    """Name the run, resolve interpolations, check types and limits; `given` are the overrides."""
    swept = [*given] if sweep is not None else []
    unresolved: Any = OmegaConf.to_container(raw, resolve=False)
    raw = OmegaConf.create(unresolved)  # not read-only
    for key, node in {"run": raw.run, "data.train": raw.data.train}.items():
        if not isinstance(node, Mapping):  # before other keys refer to its own
            raise ConfigError(key, node, "must be a mapping")
    if raw.run.name is None:
        words = []  # what a person recognises the run by; a custom model or data set is named after its target
        for group, node in (("model", raw.model), ("data", raw.data.train)):
            choice, target = str(choices.get(group, "custom")), node.get("_target_")
            is_custom = choice == "custom" and target
            words.append(re.sub(r"\W+", "_", str(target).rpartition(".")[2]) if is_custom else choice)
        # Masked, as another token makes no other run; unresolved, as `steps: ${run.steps}` of a schedule makes none.
        digest = digest_of([_identity(masked_tree(unresolved)), swept])[:6]
        raw.run.name = "-".join([*words, str(choices.get("recovery", "custom")), digest])
    elif swept:
        raw.run.name = f"{raw.run.name}-{digest_of([swept])[:6]}"
    if swept and "${run.name}" not in str(unresolved["run"]["dir"]):
        raw.run.dir = f"{raw.run.dir}/{raw.run.name}"  # each job of a sweep has a directory of its own
    try:
        resolved: Any = OmegaConf.to_container(raw, resolve=True)
    except OmegaConfBaseException as error:
        raise explained(error, given) from error
    if missing := sorted(OmegaConf.missing_keys(OmegaConf.create(resolved))):
        raise unusable(missing[0], f"has to be given: {missing[0]}=...")
    config = reader.read(Config, resolved, "")
    hidden = masked_tree(resolved)
    chosen = {group: option for group, option in choices.items() if option is not None and "/" not in group}
    params = {key: value for key, value in _flat(hidden).items() if not key.startswith(_NEVER)}
    return Composed(config, hidden, chosen | params | ({"sweep": sweep} if sweep else {}))


def load(overrides: Sequence[str] = ()) -> Composed:
    """Compose a configuration without a command line: for scripts, benchmarks and tests."""
    raw = composed_raw(overrides)
    ours = OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])
    return composed(ours, raw.hydra.runtime.choices, given=overrides)


def _identity(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat = _flat(tree)
    parts = (*_IDENTITY, "drill.") if flat.get("drill.fault") or flat.get("drill.faults") else _IDENTITY
    return {key: value for key, value in flat.items() if key.startswith(parts)}


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _flat(tree).items() if key not in _PLACE}


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found
