"""What each key and each option means: read from the comments in `conf/`.

Nothing is composed and torch is not imported, so that `--help` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import yaml

from resilient_train.app.config import CONF
from resilient_train.app.config.schema import Config

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
