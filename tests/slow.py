"""Which tests only `scripts/test --all` runs: those of slow.txt, which this writes from the durations of a whole run.

    scripts/test -n 2 --dist loadgroup --durations=0 --durations-min=0.05 tests | tee run.log
    python tests/slow.py run.log

Tests stay in the short suite in the order of what they cost, until its share of the whole is used up.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
_SHARE = 0.25  # of the whole suite's time: five minutes of twenty
_LEAST_S = 0.3  # a test this fast is always in the short suite


def listed() -> set[str]:
    """Return the functions of the list, as `tests/FOLDER/test_x.py::test_name`."""
    return {line for line in LIST.read_text().splitlines() if line and not line.startswith("#")}


def function_of(node: str) -> str:
    """Return the function of a test, without its parameters."""
    return node.partition("[")[0]


def slow_ones(log: str) -> list[str]:
    """Return the functions that do not fit into the share of the short suite."""
    seconds, cases = dict[str, float](), dict[str, set[str]]()
    for took, node in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(tests/\S+)", log, re.MULTILINE):
        seconds[function_of(node)] = seconds.get(function_of(node), 0.0) + float(took)
        cases.setdefault(function_of(node), set()).add(node)
    left = _SHARE * sum(seconds.values())
    slow = []
    for name in sorted(seconds, key=lambda name: seconds[name] / len(cases[name])):
        left -= seconds[name]
        if left < 0 and seconds[name] / len(cases[name]) > _LEAST_S:
            slow.append(name)
    return sorted(slow)


if __name__ == "__main__":
    names = slow_ones(Path(sys.argv[1]).read_text())
    head = "# Functions that only `scripts/test --all` runs; written by tests/slow.py.\n"
    LIST.write_text(head + "".join(f"{name}\n" for name in names))
    print(f"{len(names)} functions are slow", file=sys.stderr)
