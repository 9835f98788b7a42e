"""The manual of the command line: what each key and each option means, for a terminal of any width."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import yaml

from resilient_train.app import VERBS
from resilient_train.app.config import CONF, Config
from resilient_train.app.terminal import Page
from resilient_train.errors import unusable
from resilient_train.reader import no_such, similar

_LONG = 40  # characters; a longer default is not shown


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, its default as written, and what it means."""

    key: str
    default: str | None  # None for a key that only holds others
    meaning: str


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of a config group: a file. Its name is empty if the group is a node with nothing to choose from."""

    group: str
    name: str
    meaning: str
    entries: tuple[Entry, ...]


def nodes(folders: Sequence[Path] = (CONF,)) -> dict[str, list[Option]]:
    """Return everything that can be configured, in the order of `Config`; of each group the default option first."""
    text, pairs = _read(CONF / "config.yaml")
    found: dict[str, list[Option]] = {}
    for key, value in pairs:
        if key.value == "defaults":
            groups = [pair for one in value.value if isinstance(one, yaml.MappingNode) for pair in one.value]
            chosen = {group.value: str(option.value) for group, option in groups if " " not in group.value}
            found |= {group: _options(group, folders, option) for group, option in chosen.items()}
        elif key.value != "hydra":
            found[key.value] = [Option(key.value, "", "", tuple(_entries(text, value.value, key.value)))]
    return {field.name: found[field.name] for field in fields(Config)}


@cache
def meanings() -> dict[str, str]:
    """Return what words of the command line mean, as they are completed: `run.steps=`, `model=gpt`, `checks.jump.`."""
    found: dict[str, str] = {}
    for group, options in nodes().items():
        found |= {f"{group}={option.name}": option.meaning for option in options if option.name}
        found |= {f"{one.key}{'.' if one.default is None else '='}": one.meaning for one in options[0].entries}
    return found


def _read(path: Path) -> tuple[str, list[tuple[yaml.Node, yaml.Node]]]:
    """Return the text of a YAML file, and its keys and values with their places in it."""
    text = path.read_text(encoding="utf-8")
    tree = yaml.compose(text, yaml.SafeLoader)
    return text, tree.value if isinstance(tree, yaml.MappingNode) else []


def _entries(text: str, pairs: Sequence[tuple[yaml.Node, yaml.Node]], path: str) -> Iterator[Entry]:
    """Yield the keys of `pairs`, which are below `path`, and all keys below them."""
    for key, value in pairs:
        name, default = f"{path}.{key.value}", text[value.start_mark.index : value.end_mark.index].strip()
        has_keys = isinstance(value, yaml.MappingNode) and bool(value.value) and not value.flow_style
        is_on_its_line = value.start_mark.line == key.end_mark.line and not has_keys and "\n" not in default
        end = (value if is_on_its_line else key).end_mark.index
        # The comment behind a key on its line, else the one above it; one that begins a file describes all of it.
        comment = re.match(r"[^\n]*?\s#\s?(.*)", text[end:])
        above = re.search(r"\n((?:[ ]*#.*\n)+)[ ]*$", text[: key.start_mark.index])
        meaning = comment[1].strip() if comment else _first_sentence(above[1]) if above else ""
        if has_keys:
            yield Entry(name, None, meaning)
            yield from _entries(text, value.value, name)
        else:
            yield Entry(name, default if "\n" not in default and len(default) <= _LONG else "...", meaning)


def _options(group: str, folders: Sequence[Path], chosen: str) -> list[Option]:
    """Read the files of a config group. A key without a comment means what it means in another of the files."""
    files = {file.stem: file for folder in reversed(folders) for file in sorted((folder / group).glob("*.yaml"))}
    options = [] if chosen in files else [Option(group, "", "", ())]  # nothing is chosen, such as of experiments
    for name, path in sorted(files.items(), key=lambda item: (item[0] != chosen, item[0])):
        text, pairs = _read(path)
        pairs = [pair for pair in pairs if pair[0].value != "defaults" and "# @package _global_" not in text]
        entries = tuple(_entries(text, pairs, group))
        header = re.match(r"(?:# @.*\n)*((?:#.*\n)*)", text)
        meaning = _first_sentence(header[1]) if header else ""
        meaning = meaning or next((one.meaning for one in entries if one.key.endswith("._target_")), "")
        options.append(Option(group, name, meaning.removeprefix(f"{name}: "), entries))
    known = {entry.key: entry.meaning for option in reversed(options) for entry in option.entries if entry.meaning}
    return [
        replace(
            option, entries=tuple(replace(one, meaning=one.meaning or known.get(one.key, "")) for one in option.entries)
        )
        for option in options
    ]


def _first_sentence(comment: str) -> str:
    """Return the first sentence of a block of comments, or its first paragraph if that is shorter."""
    lines = [line.strip().removeprefix("#").strip() for line in comment.splitlines()]
    return re.split(r"(?<=[.!?])\s|\s\s", " ".join(lines).strip(), maxsplit=1)[0]


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
    asked = dict(_asked(word, known) for word in names)
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
    for group, options in known.items():
        keys = [key for key in asked if key.partition(".")[0] == group] if asked else [group]
        if keys and not is_first:
            page.line()
        if keys:
            _show_node(options, keys, asked.get(group, "") if asked else options[0].name, page)
            is_first = False
    if not asked:
        page.line()
        for line in _FOOTER:
            page.line(line, hang=2)


def _asked(word: str, known: Mapping[str, Sequence[Option]]) -> tuple[str, str]:
    """Return the key of a name, and the option if it has one. Raises ConfigError for an unknown name."""
    key, _, name = word.lstrip("+~").partition("=")
    group, where = key.partition(".")[0], f"--help {word}"
    if group not in known:
        raise no_such("key", key, known, at=where, value=...)
    names = sorted(option.name for option in known[group] if option.name)
    keys = [entry.key for option in known[group] for entry in option.entries]
    if "." in key and not any(f"{one}.".startswith(f"{key}.") for one in keys):
        raise unusable(where, f"no such key{similar(key, keys)}; --help {group} lists all of them")
    if key in known and name and names and name not in names:
        raise no_such("option", name, names, at=where, value=...)
    return key, name if key in known and names else ""


def _show_node(options: Sequence[Option], below: Sequence[str], name: str, page: Page) -> None:
    """Show the keys below some keys of a node, of one option or of all; the options are listed with a whole node."""
    group, listed = options[0].group, sorted((one for one in options if one.name), key=lambda one: one.name)
    page.line((f"{group}: {', '.join(one.name for one in listed)}" if listed else group, "bold"), hang=2)
    for option in listed if group in below else ():
        mark = " (default)" if option is options[0] else ""
        _show(f"{group}=", f"{option.name}{mark}", option.meaning, page)
    shown: set[Entry] = set()
    for option in options:
        new = [one for one in option.entries if any(f"{one.key}.".startswith(f"{key}.") for key in below)]
        new = [one for one in new if one not in shown and name in ("", option.name)]
        shown.update(new)
        if new and option.name:
            page.line((f"with {group}={option.name}:", "italic"), indent=2)
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
