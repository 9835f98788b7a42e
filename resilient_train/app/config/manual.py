"""The manual of the command line: what each key and each option means, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from resilient_train.app.config.meanings import Entry, Node, nodes
from resilient_train.app.config.sources import CONF
from resilient_train.app.page import Page
from resilient_train.errors import unusable
from resilient_train.imports import similar

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
    "--config-dir DIR adds a folder of your own, laid out like conf; a file there is another option.",
    '`eval "$(resilient-train -sc install=bash)"` in ~/.bashrc completes keys and options by TAB; for fish '
    "`resilient-train -sc install=fish | source`. Both complete `resilient-train`, not `python -m resilient_train`.",
)


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
    asked = {option for _, option in wanted if option is not None}
    if not wanted and node.chosen is not None:
        asked = {node.chosen}
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
        if asked and option.name not in asked:
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
