"""The manual of the command line: what each key and each option means, for a terminal of any width."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException, ValidationError

from resilient_train.app import VERBS
from resilient_train.app.config import CONF
from resilient_train.app.config.schema import Config
from resilient_train.app.terminal import Page
from resilient_train.errors import ConfigError, TrainError, in_one_line, text_of, unusable
from resilient_train.files import read_yaml_text
from resilient_train.reader import similar

_LONG = 40  # characters; a longer default is not shown


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, its default as written, and what it means."""

    key: str
    default: str | None  # None for a key that only holds others
    meaning: str


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of a config group: a file."""

    group: str
    name: str
    meaning: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A node at the root of the configuration: keys, or a config group with options to choose from."""

    name: str
    entries: tuple[Entry, ...] = ()
    options: tuple[Option, ...] = ()
    chosen: str | None = None


def nodes(folders: Sequence[Path] = (CONF,)) -> list[Node]:
    """Return everything that can be configured, in the order of `schema.Config`."""
    root = _File(CONF / "config.yaml")
    found = []
    for key, value in root.pairs:
        if key.value == "defaults":
            groups = [pair for one in value.value if isinstance(one, yaml.MappingNode) for pair in one.value]
            chosen = {group.value: str(option.value) for group, option in groups if " " not in group.value}
            found += [Node(group, (), _options(group, folders, option), option) for group, option in chosen.items()]
        elif key.value != "hydra":
            found.append(Node(key.value, tuple(root.entries(value.value, key.value))))
    order = [field.name for field in fields(Config)]
    return sorted(found, key=lambda node: order.index(node.name))


@cache
def meanings() -> dict[str, str]:
    """Return what words of the command line mean, as they are completed: `run.steps=`, `model=gpt`, `checks.jump.`."""
    found: dict[str, str] = {}
    for node in nodes():
        found |= {f"{node.name}={option.name}": option.meaning for option in node.options}
        chosen = [entry for option in node.options if option.name == node.chosen for entry in option.entries]
        found |= {f"{one.key}{'.' if one.default is None else '='}": one.meaning for one in (*node.entries, *chosen)}
    return found


_Pair = tuple[yaml.Node, yaml.Node]  # a key and its value


class _File:
    """A YAML file, with the comments next to its keys."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.lines = [*self.text.splitlines(), ""]
        tree = yaml.compose(self.text, yaml.SafeLoader)
        self.pairs: list[_Pair] = tree.value if isinstance(tree, yaml.MappingNode) else []

    def entries(self, pairs: Sequence[_Pair], path: str) -> Iterator[Entry]:
        """Yield the keys of `pairs`, which are below `path`, and all keys below them."""
        for key, value in pairs:
            name = f"{path}.{key.value}"
            if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                yield Entry(name, None, self._comment(key, value))
                yield from self.entries(value.value, name)
            else:
                default = self.text[value.start_mark.index : value.end_mark.index].strip()
                is_short = "\n" not in default and len(default) <= _LONG
                yield Entry(name, default if is_short else "...", self._comment(key, value))

    def header(self) -> str:
        """Return the first sentence of the comment at the top of the file."""
        comment = re.match(r"\s*((?:#.*\n)*)", self.text)
        lines = [line[1:].strip() for line in comment[1].splitlines() if not line.startswith("# @")] if comment else []
        return _first_sentence(" ".join(lines).split("  ")[0])

    def _comment(self, key: yaml.Node, value: yaml.Node) -> str:
        """Return the comment behind a key on its line, else the one above it."""
        mark = key.end_mark
        if value.start_mark.line == mark.line and (
            isinstance(value, yaml.ScalarNode) or getattr(value, "flow_style", False)
        ):
            mark = value.end_mark
        if behind := re.search(r"\s#\s?(.*)", self.lines[mark.line][mark.column :]):
            return behind[1].strip()
        above: list[str] = []
        for line in reversed(self.lines[: key.start_mark.line]):
            if not line.strip().startswith("#"):
                return _first_sentence(" ".join(above))
            above.insert(0, line.strip().removeprefix("#").strip())
        return ""  # a comment that begins a file describes all of it


def _options(group: str, folders: Sequence[Path], chosen: str) -> tuple[Option, ...]:
    """Read the files of a config group. A key without a comment means what it means in another of the files."""
    files = {file.stem: file for folder in reversed(folders) for file in sorted((folder / group).glob("*.yaml"))}
    options = []
    for name, path in sorted(files.items()):
        file = _File(path)
        is_whole_run = "# @package _global_" in file.lines
        pairs = [pair for pair in file.pairs if pair[0].value != "defaults" and not is_whole_run]
        entries = tuple(file.entries(pairs, group))
        meaning = file.header() or next((one.meaning for one in entries if one.key.endswith("._target_")), "")
        options.append(Option(group, name, meaning.removeprefix(f"{name}: "), entries))
    known: dict[str, str] = {}
    for option in sorted(options, key=lambda one: one.name == chosen):
        known |= {entry.key: entry.meaning for entry in option.entries if entry.meaning}

    def explained(entry: Entry) -> Entry:
        return replace(entry, meaning=entry.meaning or known.get(entry.key, ""))

    return tuple(replace(option, entries=tuple(map(explained, option.entries))) for option in options)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


_EXAMPLES = """\
python -m resilient_train  # a small GPT on Python source text
python -m resilient_train experiment=demo  # the same, with faults on purpose
python -m resilient_train model=resnet data=digits objective=classification run.steps=500
python -m resilient_train model=custom model._target_=mine.Net +model.width=64 \\
    data=custom data.train._target_=mine.rows objective=custom objective._target_=mine.loss
python -m resilient_train --multirun run.seed=0,1,2  # several runs, one after the other
torchrun --nproc_per_node 2 -m resilient_train accelerate.cpu=true"""

_FOOTER = (
    "--help NAME explains one of them with all its options: --help checks, --help model=mlp, --help checkpoint.disk.",
    "--cfg job prints the whole configuration with its current values.",
    "--config-dir DIR adds a folder of your own, laid out like conf; a file there is another option.",
    '`eval "$(resilient-train -sc install=bash)"` in ~/.bashrc completes keys and options by TAB; for fish '
    "`resilient-train -sc install=fish | source`. Both complete `resilient-train`, not `python -m resilient_train`.",
)


def show(names: Sequence[str], folder: str | None, page: Page) -> None:
    """Print the manual, or what it says about `names`, such as `checks.jump` or `model=mlp`.

    `folder` is the user's own folder of configurations. Raises ConfigError for an unknown name.
    """
    known = nodes([Path(folder), CONF] if folder else [CONF])
    asked = [_asked(word, known) for word in names]
    if not asked:
        page.line("Trains a model and looks after the run.")
        page.line()
        for line in _EXAMPLES.splitlines():
            command, _, comment = line.partition("  # ")
            page.line((command, "bold"), f"  # {comment}" if comment else "", indent=2, hang=8)
        page.line()
        for verb, meaning in VERBS.items():
            _show(f"resilient-train {verb} RUN_DIR", "", meaning, page)
        page.line()
        page.line("Choose with group=option, set with key=value; +key=value adds an argument of a _target_.")
    is_first = bool(asked)
    for node in known:
        below = [key for key, _ in asked if key.split(".")[0] == node.name]
        if asked and not below:
            continue
        if not is_first:
            page.line()
        is_first = False
        if asked:
            options = {option for key, option in asked if option is not None and key == node.name}
        else:
            options = {node.chosen} if node.chosen is not None else set()
        _show_node(node, below or [node.name], options, page)
    if not asked:
        page.line()
        for line in _FOOTER:
            page.line(line, hang=2)


def _asked(word: str, known: Sequence[Node]) -> tuple[str, str | None]:
    """Return the key of a name, and the option if it has one. Raises ConfigError for an unknown name."""
    key, equals, option = word.lstrip("+~").partition("=")
    node = next((one for one in known if one.name == key.split(".")[0]), None)
    if node is None:
        names = [one.name for one in known]
        hint = similar(key, names, f"there are {', '.join(names)}")
        raise unusable(f"--help {word}", f"nothing is called {key}{hint}")
    options = {one.name: one.entries for one in node.options}
    keys = [one.key for entries in (node.entries, *options.values()) for one in entries]
    if "." in key:
        if not any(f"{one}.".startswith(f"{key}.") for one in keys):
            hint = similar(key, keys) or f"; --help {node.name} lists all of them"
            raise unusable(f"--help {word}", f"no such key{hint}")
        return key, None
    if options and equals and option not in options:
        hint = similar(option, options, f"there are {', '.join(options)}")
        raise unusable(f"--help {word}", f"no such option{hint}")
    return key, option if options and equals else None


def _show_node(node: Node, below: Sequence[str], options: set[str], page: Page) -> None:
    """Show the keys below some keys of a node, of these options or of all; the options are listed with a whole node."""
    title = f"{node.name}: {', '.join(option.name for option in node.options)}" if node.options else node.name
    page.line((title, "bold"), hang=2)
    if node.name in below:
        for option in node.options:
            mark = " (default)" if option.name == node.chosen else ""
            _show(f"{node.name}=", f"{option.name}{mark}", option.meaning, page)
    shown: set[Entry] = set()
    keys_of = [("", node.entries)]
    keys_of += [(one.name, one.entries) for one in sorted(node.options, key=lambda one: one.name != node.chosen)]
    for option_name, entries in keys_of:
        new = [one for one in entries if any(f"{one.key}.".startswith(f"{key}.") for key in below)]
        new = [one for one in new if one not in shown and (not options or option_name in options)]
        shown.update(new)
        if new and option_name:
            page.line((f"with {node.name}={option_name}:", "italic"), indent=2)
        for entry in new:
            _show(entry.key + ("" if entry.default is None else "="), entry.default or "", entry.meaning, page)


def _show(name: str, value: str, meaning: str, page: Page) -> None:
    """Show a name, its value and what it means, in two columns if the page is wide enough."""
    if page.width is not None and page.width < 70:
        page.line((name, "cyan"), (value, "green"), indent=2, hang=4)
        page.line(meaning, indent=6, hang=6)
    else:
        column = 36 if page.width is None or page.width >= 100 else 30
        space = " " * max(2, column - 2 - len(name) - len(value))
        page.line((name, "cyan"), (value, "green"), space, meaning, indent=2, hang=column)


VERSION_BASE = "1.3"
_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
_TYPES |= {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


_PARSED: dict[Path, ConfigResult] = {}  # files of the package, which do not change


class FileConfigSource(file_config_source.FileConfigSource):
    """Checks a file of the user's before Hydra loads it: a few lines of YAML may expand to more than fits in memory.

    It has the name of Hydra's own class, under which Hydra registers it.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a file, or raise ConfigError with one line that says why it is no configuration."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        if file.is_relative_to(CONF):  # Hydra composes twice, once to learn its mode: half of the time is parsing
            if file not in _PARSED:
                _PARSED[file] = super().load_config(config_path)
            return copy.deepcopy(_PARSED[file])
        if not file.exists():
            return super().load_config(config_path)
        try:
            read_yaml_text(file)
            return super().load_config(config_path)
        except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            raise unusable(str(file), f"is no configuration: {' '.join(str(error).split())[:300]}") from error


def check_files_first() -> None:
    """Let Hydra check files before it loads them, in this process."""
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = FileConfigSource


def composed_raw(overrides: Sequence[str]) -> DictConfig:
    """Compose a configuration without a command line; it includes Hydra's own node."""
    GlobalHydra.instance().clear()
    check_files_first()
    try:
        with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
            return compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, overrides) from error


def typed(overrides: Sequence[str]) -> list[str]:
    """Return Hydra's overrides as they were typed: reading one by one would resolve them, which may fail."""
    found = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(found, list)
    return found


def explained(error: Exception, overrides: Sequence[str] = ()) -> TrainError:
    """Turn an error of Hydra or OmegaConf into one line that names the key, the value and what is allowed.

    Any other error is not about the configuration, and becomes a TrainError with its own message.
    """
    if isinstance(error, TrainError):
        return error
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return TrainError(in_one_line(error))
    text = text_of(error)
    if isinstance(error, OverrideParseException):
        if error.override.isidentifier():
            why = f"neither a verb nor key=value{similar(error.override, VERBS)}"
            return unusable(error.override, why)
        why = f"cannot be read ({text.splitlines()[0]}); quote special characters: 'key=\"a[b]\"'"
        return unusable(error.override, why)
    if key := str(getattr(error, "full_key", None) or ""):
        if isinstance(error, ValidationError):
            return _at(key, overrides, _wrong_type(text))
        if isinstance(error, ConfigKeyError):
            return _unknown_key(key, overrides)
        if isinstance(error, InterpolationResolutionError):
            return _at(key, overrides, f"cannot be resolved: {text.splitlines()[0]}")
    no_option = r"Could not find '([^']+)'\s*(?:Available options in '[^']+':\s*(.*?))?(?:Config search path|$)"
    if missing := re.search(no_option, text, re.DOTALL):
        group, _, option = missing[1].rpartition("/")
        options = (missing[2] or "").split()
        hint = similar(option, options, f"there are {', '.join(options)}" if options else "")
        return unusable(f"{group or 'config'}={option}", f"no such option{hint}")
    if override := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(override[1].split("@")[0], overrides)
    if missing_value := re.search(r"Missing mandatory value: (\S+)", text):
        return unusable(missing_value[1], "has to be given")
    return unusable("configuration", " ".join(text.split()))


def _wrong_type(text: str) -> str:
    expected = re.search(r"could not be converted to (\w+)|for field of type '(\w+)'", text)
    if expected is None:
        return " ".join(text.split("full_key")[0].split())
    kind = expected[1] or expected[2]
    return f"is not {_TYPES.get(kind, kind)}"


def _unknown_key(key: str, overrides: Sequence[str]) -> ConfigError:
    parent, name, known = _unknown_part(key, overrides)
    if name in known:
        return _at(key, overrides, f"no such key; {f'{parent}.' * bool(parent)}{name} has no keys of its own")
    hint = similar(name, known, f"there are {', '.join(known)}{f' in {parent}' * bool(parent)}" if known else "")
    if parent and "_target_" in known:
        hint += f" (+{key}=... adds an argument of its _target_)"
    return _at(key, overrides, f"no such key{hint}")


def _at(key: str, overrides: Iterable[str], why: str) -> ConfigError:
    """Build the error for a key, with its value if an override has it."""
    for override in overrides:
        name, equals, value = override.lstrip("+~").partition("=")
        if equals and name.split("@")[0] == key:
            return ConfigError(key, value, why)
    return unusable(key, why)


def _unknown_part(key: str, overrides: Sequence[str]) -> tuple[str, str, list[str]]:
    """Split a misspelt key: the node that exists, the first name that does not, and the keys that the node has.

    With the options that were chosen on the same command line.
    """
    chosen = [one for one in overrides if (CONF / one.partition("=")[0]).is_dir() and one.partition("=")[0] != key]
    try:
        node: Any = composed_raw(chosen)
    except Exception:  # without it only a hint is missing
        node = None
    names = key.split(".")
    place = 0
    while place < len(names) - 1 and isinstance(node, DictConfig) and isinstance(node.get(names[place]), DictConfig):
        node, place = node.get(names[place]), place + 1
    known = [str(one) for one in node if one != "hydra"] if isinstance(node, DictConfig) else []
    return ".".join(names[:place]), names[place], known
