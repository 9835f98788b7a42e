"""What each key and each option means: it stands beside them, in the files under `conf/`.

Nothing is composed and nothing of torch is imported, so it is there at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import yaml

from resilient_train.app.config.sources import CONF

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


_Pair = tuple[yaml.Node, yaml.Node]  # a key and its value


class _Commented:
    """The keys of a YAML file with the comments beside them."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        tree = yaml.compose(text, yaml.SafeLoader)
        self.tree: list[_Pair] = tree.value if isinstance(tree, yaml.MappingNode) else []
        self.names = [str(key.value) for key, _ in self.tree]

    def entries(self, name: str | None = None, path: str = "") -> Iterator[Entry]:
        """All keys below the root, or below one key of it, but not the files that it builds on."""
        for key, value in self.tree:
            if key.value != "defaults" and (name is None or key.value == name):
                yield from self._entries(key, value, f"{path}.{key.value}" if path else str(key.value), name is None)

    def header(self) -> str:
        """What the comment at the top says first."""
        top: list[str] = []
        for line in self.lines:
            if not line.startswith("#") and not (line.strip() == "" and not top):
                break
            if not line.startswith("# @"):
                top.append(line.removeprefix("#").strip())
        return _first_sentence(" ".join(top).split("  ")[0])

    def _entries(self, key: yaml.Node, value: yaml.Node, path: str, tells: bool = True) -> Iterator[Entry]:
        is_parent = isinstance(value, yaml.MappingNode) and bool(value.value) and not value.flow_style
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
        if is_inline and (isinstance(value, yaml.ScalarNode) or getattr(value, "flow_style", False)):
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


def _defaults(root: Iterable[_Pair]) -> dict[str, str]:
    """The groups, and the option of each that is taken unless another is chosen."""
    found: dict[str, str] = {}
    for key, value in root:
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
