"""Cut the power before every call of a save, a demotion, a journal entry and a summary, with many fates each.

The suite does the same with five fates; here what was not synced is torn in as many ways as are asked for. Ends with 1
as soon as anything is found that is neither the old state nor the new one.

    python benchmarks/power_cut.py
    python benchmarks/power_cut.py --fates 200
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "checkpoint"))

import test_power_cut as short
from interleaved import table


def main() -> None:
    """Cut, look, and print how often."""
    parser = argparse.ArgumentParser(description="Cut the power before every call that reaches the disk.")
    parser.add_argument("--fates", type=int, metavar="N", default=40, help="ways to tear (default: %(default)s)")
    fates = ["kept", "dropped", "half", *(f"torn {number}" for number in range(parser.parse_args().fates))]
    logging.disable()
    rows = []
    is_good = True
    for what, (before, act, look, allowed, new) in short.CASES.items():
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
            cut, whole, calls = short.cuts(monkeypatch, Path(folder), before, act, look, fates)
        is_right = {str(one) for one in cut} <= allowed and {str(one) for one in whole} == {new}
        is_good &= is_right
        rows.append([what, str(calls), str(len(cut) + len(whole)), "one of the two" if is_right else "NEITHER"])
    print(table(["what", "calls", "starts", "found"], rows))
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
