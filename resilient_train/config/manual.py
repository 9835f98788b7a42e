"""The manual of the command line, made of the files under `conf/`: what each key and each option means stands there.

Nothing is composed and nothing of torch is imported, so it is there at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import yaml

from resilient_train.config.explain import CONF
from resilient_train.errors import unusable
from resilient_train.imports import similar
from resilient_train.record.page import Page

_EXAMPLES = """\
python -m resilient_train  # a small GPT on Python source text
python -m resilient_train experiment=demo  # the same with faults on purpose on its way
python -m resilient_train model=resnet data=digits objective=classification run.steps=500
python -m resilient_train model=custom model._target_=mine.Net +model.width=64 \\
    data=custom data.train._target_=mine.rows objective=custom objective._target_=mine.loss
python -m resilient_train --multirun run.seed=0,1,2  # several runs, one after the other
torchrun --nproc_per_node 2 -m resilient_train accelerate.cpu=true"""

_FOOTER = (
    "--help NAME explains one of them with all its options: --help checks, --help model=mlp, --help checkpoint.disk.",
    "--cfg job prints the whole configuration with the values in force.",
    "--config-dir DIR adds a folder of your own, laid out like resilient_train/conf; a file there is another option.",
    '`eval "$(resilient-train -sc install=bash)"` in ~/.bashrc completes keys and options by TAB; for fish '
    "`resilient-train -sc install=fish | source`. Both complete `resilient-train`, not `python -m resilient_train`.",
)

_LONG = 40  # characters of a default; what is longer is left to the file


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, its default as it is written, and what it means."""

    key: str
    default: str | None  # None where it only holds others
    meaning: str


@dataclass(frozen=True, slots=True)
class Option:
    """A choice for a group of keys: a file."""

    group: str
    name: str
    meaning: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """What stands at the root: keys of its own, or a group with options to choose from."""

    name: str
    entries: tuple[Entry, ...] = ()
    options: tuple[Option, ...] = field(default=())
    chosen: str | None = None


def show(words: Sequence[str], page: Page) -> None:
    """Print the manual, or what it says of the names among `words`. Raises ConfigError where there is no such name."""
    known = nodes(_folders(words))
    wanted = [_choice(word, known) for word in _names_in(words)]
    if not wanted:
        _show_head(page)
    asked = [(node, [one for one in wanted if one[0].split(".")[0] == node.name]) for node in known]
    for number, (node, names) in enumerate([one for one in asked if one[1] or not wanted]):
        if number or not wanted:
            page.blank()
        _show_node(node, names, page)
    if not wanted:
        page.blank()
        for line in _FOOTER:
            page.line(line, hang=2)


def nodes(folders: Sequence[Path] = (CONF,)) -> list[Node]:
    """Everything that can be configured, in the order of `schema.Config`."""
    root = _Commented((CONF / "config.yaml").read_text(encoding="utf-8"))
    chosen = _defaults(root.tree)
    found = [Node(group, (), _alike(_options(group, folders), option), option) for group, option in chosen.items()]
    found += [Node(name, tuple(root.entries(name))) for name in root.names if name not in ("defaults", "hydra")]
    order = _order()
    return sorted(found, key=lambda node: order.index(node.name) if node.name in order else len(order))


@cache
def meanings() -> dict[str, str]:
    """What a word of the command line means, as far as it is typed: `run.steps=`, `model=gpt`, `checks.jump.`."""
    found: dict[str, str] = {}
    for node in nodes():
        for option in node.options:
            found[f"{node.name}={option.name}"] = option.meaning
        chosen = [option.entries for option in node.options if option.name == node.chosen]
        for entry in (*node.entries, *(one for entries in chosen for one in entries)):
            found[entry.key + ("." if entry.default is None else "=")] = entry.meaning
    return found


# Reading.


class _Commented:
    """The keys of a YAML file with the comments beside them."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.tree = yaml.compose(text, yaml.SafeLoader)
        assert isinstance(self.tree, yaml.MappingNode)
        self.names = [str(key.value) for key, _ in self.tree.value]

    def entries(self, name: str | None = None, path: str = "") -> Iterator[Entry]:
        """All keys below the root, or below one key of it."""
        for key, value in self.tree.value:
            if name is None or key.value == name:
                yield from self._entries(key, value, f"{path}.{key.value}" if path else str(key.value), name is None)

    def header(self) -> str:
        """What the comment at the top says first."""
        top = []
        for line in self.lines:
            if not line.startswith("#") and not (line.strip() == "" and not top):
                break
            if not line.startswith("# @"):
                top.append(line.removeprefix("#").strip())
        return _first_sentence(" ".join(top).split("  ")[0])

    def _entries(self, key: yaml.Node, value: yaml.Node, path: str, tells: bool = True) -> Iterator[Entry]:
        is_parent = isinstance(value, yaml.MappingNode) and value.value and not value.flow_style
        if tells or not is_parent:
            yield Entry(path, None if is_parent else self._default(value), self._comment(key, value))
        if is_parent:
            for inner, one in value.value:
                yield from self._entries(inner, one, f"{path}.{inner.value}")

    def _default(self, value: yaml.Node) -> str:
        text = "\n".join(self.lines)[value.start_mark.index : value.end_mark.index].strip()
        return text if "\n" not in text and len(text) <= _LONG else "..."

    def _comment(self, key: yaml.Node, value: yaml.Node) -> str:
        """What stands behind it on its line, else what stands above it."""
        number, column = key.end_mark.line, key.end_mark.column
        is_inline = value.start_mark.line == number and value.end_mark.line >= number
        if is_inline and (isinstance(value, yaml.ScalarNode) or value.flow_style):
            number, column = value.end_mark.line, value.end_mark.column
        if number < len(self.lines) and (behind := re.search(r"\s#\s?(.*)", self.lines[number][column:])):
            return behind[1].strip()
        above: list[str] = []
        number = key.start_mark.line - 1
        while number >= 0 and (line := self.lines[number].strip()).startswith("#"):
            above.insert(0, line.removeprefix("#").strip())
            number -= 1
        return _first_sentence(" ".join(above)) if number >= 0 else ""  # what begins a file is about all of it


def _options(group: str, folders: Sequence[Path]) -> Iterator[Option]:
    files = {file.stem: file for folder in reversed(folders) for file in sorted((folder / group).glob("*.yaml"))}
    for name, file in sorted(files.items()):
        read = _Commented(file.read_text(encoding="utf-8"))
        is_whole_run = "# @package _global_" in read.lines
        entries = () if is_whole_run else tuple(read.entries(path=group))
        told = read.header() or next((one.meaning for one in entries if one.key.endswith("._target_")), "")
        yield Option(group, name, told.removeprefix(f"{name}: "), entries)


def _alike(options: Iterable[Option], chosen: str) -> tuple[Option, ...]:
    """A key that a file does not explain means what it means elsewhere, as the ladders of a policy do."""
    several = list(options)
    known: dict[str, str] = {}
    for option in sorted(several, key=lambda one: one.name == chosen):
        known |= {entry.key: entry.meaning for entry in option.entries if entry.meaning}
    filled = (
        tuple(replace(one, meaning=one.meaning or known.get(one.key, "")) for one in option.entries)
        for option in several
    )
    return tuple(replace(option, entries=entries) for option, entries in zip(several, filled, strict=True))


def _defaults(root: yaml.Node) -> dict[str, str]:
    """The groups, and the option of each that is taken unless another is chosen."""
    found = {}
    for key, value in root.value:
        for one in value.value if key.value == "defaults" else ():
            if isinstance(one, yaml.MappingNode):
                found |= {str(group.value): str(option.value) for group, option in one.value}
    return {group: option for group, option in found.items() if not group.startswith("override ")}


def _order() -> list[str]:
    """The fields of `schema.Config`, read and not imported: that would bring torch along."""
    schema = ast.parse(Path(__file__).with_name("schema.py").read_text(encoding="utf-8"))
    (config,) = [one for one in schema.body if isinstance(one, ast.ClassDef) and one.name == "Config"]
    return [one.target.id for one in config.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


# What was asked for.


def _names_in(words: Sequence[str]) -> list[str]:
    """The words that are no options, nor the values of those."""
    names, left = [], list(words)
    while left:
        word = left.pop(0)
        if word in ("--config-dir", "-cd"):
            del left[:1]
        elif not word.startswith("-"):
            names.append(word)
    return names


def _folders(words: Sequence[str]) -> list[Path]:
    given = [Path(value) for word, value in pairwise(words) if word in ("--config-dir", "-cd")]
    given += [Path(word.partition("=")[2]) for word in words if word.startswith("--config-dir=")]
    return [*given, CONF]


def _choice(word: str, known: Sequence[Node]) -> tuple[str, str | None]:
    """A name, and the option that was asked for with it."""
    name, equals, option = word.lstrip("+~").partition("=")
    node = next((one for one in known if one.name == name.split(".")[0]), None)
    if node is None:
        names = [one.name for one in known]
        raise unusable(
            f"--help {word}", f"nothing is called {name}{similar(name, names) or ';'} There is {_listed(names)}"
        )
    keys = [entry.key for entry in (*node.entries, *(one for option in node.options for one in option.entries))]
    if "." in name and not any(key == name or key.startswith(f"{name}.") for key in keys):
        raise unusable(
            f"--help {word}", f"no such key{similar(name, keys) or '; --help ' + node.name + ' has all of them'}"
        )
    options = [one.name for one in node.options]
    if "." not in name and options and equals and option not in options:
        raise unusable(f"--help {word}", f"no such option{similar(option, options) or ';'} There is {_listed(options)}")
    return name, option if equals and "." not in name and options else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


# Showing.


def _show_head(page: Page) -> None:
    page.line("Trains a model and looks after the run.")
    page.blank()
    for line in _EXAMPLES.splitlines():
        command, _, told = line.partition("  # ")
        page.line((command, "bold"), f"  # {told}" if told else "", indent=2, hang=8)
    page.blank()
    page.line("Choose with group=option, set with key=value; +key=value hands a target one argument more.")


def _show_node(node: Node, wanted: Sequence[tuple[str, str | None]], page: Page) -> None:
    """All that is wanted of it: everything without names, else what is below them, of all its options or one."""
    title = f"{node.name}: {_listed([option.name for option in node.options])}" if node.options else node.name
    page.line((title, "bold"), hang=2)
    asked = {option for _, option in wanted if option} or ({None} if wanted else {node.chosen})
    names = [name for name, _ in wanted]
    column = _column(page)
    if any("." not in name for name in names) or not names:
        for option in node.options:
            mark = " (default)" if option.name == node.chosen else ""
            _show(f"{node.name}=", f"{option.name}{mark}", option.meaning, column, page)
    told: set[Entry] = set()
    for entry in node.entries:
        _show_entry(entry, names, column, page)
    for option in sorted(node.options, key=lambda one: one.name != node.chosen):
        if asked not in ({None}, {option.name}) and option.name not in asked:
            continue
        new = [one for one in option.entries if one not in told and _is_of(one, names)]
        told |= {*new}
        if new:
            page.line((f"with {node.name}={option.name}:", "italic"), indent=2)
        for entry in new:
            _show_entry(entry, names, column, page)


def _is_of(entry: Entry, names: Sequence[str]) -> bool:
    return not names or any(f"{entry.key}.".startswith(f"{name}.") for name in names)


def _show_entry(entry: Entry, names: Sequence[str], column: int, page: Page) -> None:
    if _is_of(entry, names):
        value = "" if entry.default is None else entry.default
        _show(entry.key + ("" if entry.default is None else "="), value, entry.meaning, column, page)


def _column(page: Page) -> int:
    """Where meanings begin."""
    return 36 if page.width is None or page.width >= 100 else 30 if page.width >= 70 else 6


def _show(name: str, value: str, meaning: str, column: int, page: Page) -> None:
    said = len(name) + len(value) + 4
    if column < 10:  # too narrow for two columns
        page.line((name, "cyan"), (value, "green"), indent=2, hang=4)
        page.line(meaning, indent=column, hang=column)
        return
    page.line((name, "cyan"), (value, "green"), " " * max(2, column - said + 2), meaning, indent=2, hang=column)
