"""The manual of the command line: what each key and each option means, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resilient_train.app import VERBS
from resilient_train.app.config import CONF
from resilient_train.app.config.meanings import Entry, Node, nodes
from resilient_train.app.page import Page
from resilient_train.errors import unusable
from resilient_train.imports import similar

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
