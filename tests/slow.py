"""Which tests only `scripts/test --all` runs, and which files it begins with: slow.txt, written from a run's durations.

    scripts/test -n 2 --dist loadfile --no-loadscope-reorder --durations=0 --durations-min=0.05 tests | tee run.log
    python tests/slow.py run.log

Tests stay in the short suite in the order of what they cost, until its share of the whole is used up.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
_SHARE = 0.3  # of the time of the tests that the log lists
_SETUP_S = 5.0  # in the set-up of a file, such as ranks that are trained first: then all of it is left out


def listed() -> list[str]:
    """Return the files of the list, and the functions, as `tests/FOLDER/test_x.py::test_name`."""
    return [line for line in LIST.read_text().splitlines() if not line.startswith("#")]


def is_slow(node: str, names: Collection[str]) -> bool:
    return function_of(node) in names or file_of(node) in names


def file_of(node: str) -> str:
    return node.partition("::")[0]


def function_of(node: str) -> str:
    """Return the function of a test, without its parameters."""
    return node.partition("[")[0]


def slow_ones(log: str) -> list[str]:
    """Return the files and functions that do not fit into the share of the short suite, by the time of their files.

    Those of the file that takes longest come first, as it has to begin first: at the end no process works alone.
    """
    seconds, cases, setups = dict[str, float](), dict[str, set[str]](), dict[str, float]()
    for took, path in re.findall(r"^([\d.]+)s setup +(tests/[^:\s]+)", log, re.MULTILINE):
        setups[path] = setups.get(path, 0.0) + float(took)
    for took, node in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(tests/\S+)", log, re.MULTILINE):
        seconds[function_of(node)] = seconds.get(function_of(node), 0.0) + float(took)
        cases.setdefault(function_of(node), set()).add(node)
    left = _SHARE * sum(seconds.values())
    slow = [path for path, took in setups.items() if took > _SETUP_S]
    for name in sorted(seconds, key=lambda name: seconds[name] / len(cases[name])):
        if file_of(name) in slow:
            continue
        left -= seconds[name]
        if left < 0:
            slow.append(name)
    of_files = defaultdict[str, float](float)
    for name, took in seconds.items():
        of_files[file_of(name)] += took
    return sorted(slow, key=lambda name: (-of_files[file_of(name)], name))


def is_there(name: str) -> bool:
    """Say whether a function of the list is still in its file."""
    path, _, function = name.partition("::")
    file = LIST.parents[1] / path
    if not function:
        return file.exists()
    return file.exists() and f"def {function.rpartition('::')[2]}(" in file.read_text()


if __name__ == "__main__":
    names = list(filter(is_there, slow_ones(Path(sys.argv[1]).read_text())))
    head = "# Files and functions that only `scripts/test --all` runs; written by tests/slow.py.\n"
    LIST.write_text(head + "".join(f"{name}\n" for name in names))
    print(f"{len(names)} are listed", file=sys.stderr)
