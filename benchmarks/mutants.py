"""Which mistakes in the engine does the suite notice? Makes them one at a time, and runs the tests.

A mutant is the package with one place changed: a comparison flipped, `and` and `or` exchanged, a condition negated, a
constant changed, or a statement that only calls something dropped. The places are drawn by a seeded generator from the
modules that decide (guard, recovery, update, state, checkpoint, recover, watch). Each mutant is made in a copy, and
first meets the tests of its room, stopped at the first failure and after 60 seconds. Those that survive meet the short
suite (or all of it), one at a time. Before, the same tests have to pass without a mutant. What survives is printed with
its line, to be looked at.

    python benchmarks/mutants.py                         # 60 mutants: half an hour on two cores, 6 minutes a survivor
    python benchmarks/mutants.py --whole                 # survivors meet the whole suite: 16 minutes each
    python benchmarks/mutants.py --count 10 --seed 3     # ten others
    python benchmarks/mutants.py --list                  # what would be changed, without running anything
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "resilient_train"
ROOMS = ("guard", "recovery", "update", "state", "checkpoint", "recover", "watch")
TESTS = {"guard": ("tests/guard", "tests/adapters"), "recovery": ("tests/recovery", "tests/guard")}  # else by its name
ROOM_S, SUITE_S = 60, 5400
SHORT, WHOLE = "not slow and not long", "not long"
ENOUGH = 0.9  # of the mutants have to be noticed

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_SILENT = ("log", "logging", "warnings")  # calls that only print are no decisions


@dataclass(frozen=True)
class Mutant:
    """One changed place."""

    room: str
    file: str  # below the package
    line: int
    kind: str
    before: str
    after: str
    start: int  # of what is replaced, in bytes of the file
    stop: int


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a node may become, with the kind of change."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in _OPPOSITE:
            new.ops = [_OPPOSITE[type(op)]()]
            yield "comparison", new
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
            yield "and/or", new
        case ast.UnaryOp(op=ast.Not()):
            yield "not", new.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not new.value)
        case ast.Constant(value=(int() | float()) as number):
            yield "constant", ast.Constant(number + 1 if number == 0 else number * 2)
        case ast.Expr(value=ast.Call(func=function)) if not ast.unparse(function).startswith(_SILENT):
            yield "call", ast.Pass()


def places(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = path.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    file = path.relative_to(PACKAGE)
    room = file.parts[0].removesuffix(".py")
    tree = ast.parse(source)
    left_out = {id(node) for part in ast.walk(tree) for node in _left_out(part)}
    for node in ast.walk(tree):
        if id(node) in left_out or not isinstance(node, ast.expr | ast.stmt):
            continue
        start = lines[node.lineno - 1] + node.col_offset
        stop = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for kind, new in changed(node):
            before, after = source[start:stop].decode(), ast.unparse(new)
            after = after if kind == "call" else f"({after})"  # keeps its place among other operators
            yield Mutant(room, str(file), node.lineno, kind, before, after, start, stop)


def _left_out(node: ast.AST) -> Iterator[ast.AST]:
    """What changes no decision: annotations, f-strings, and the arguments of dataclass fields."""
    for name in ("annotation", "returns"):
        if (part := getattr(node, name, None)) is not None:
            yield from ast.walk(part)
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "field"):
        yield from ast.walk(node)
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        for decorator in node.decorator_list:
            yield from ast.walk(decorator)


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw mutants, as many from each room as its share of the places."""
    files = [path for room in ROOMS for path in [PACKAGE / f"{room}.py", *sorted((PACKAGE / room).glob("*.py"))]]
    every = [one for path in files if path.exists() for one in places(path)]
    return sorted(random.Random(seed).sample(every, count), key=lambda one: (one.room, one.file, one.line))


@contextmanager
def copied(mutant: Mutant | None) -> Iterator[Path]:
    """A copy of the checkout with the mutant in it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        left_out = shutil.ignore_patterns(
            ".git", ".venv", "runs", "outputs", "multirun", ".*_cache", "__pycache__", "build"
        )
        shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
        if mutant is not None:
            path = tree / "resilient_train" / mutant.file
            source = path.read_bytes()
            path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
        yield tree


def verdict(mutant: Mutant | None, tests: Sequence[str], marks: str, seconds: float, workers: int = 0) -> str:
    """Run tests in a copy: whether they `pass`, `fail`, or are `late`."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    words += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers else []
    with copied(mutant) as tree:
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        env.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".pytest_cache" / "bytecode"))  # tests/compiled.py says why
        process = subprocess.Popen(
            words, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return "fail" if process.wait(seconds) else "pass"
        except subprocess.TimeoutExpired:
            return "late"
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait()


def room_tests(room: str) -> tuple[str, ...]:
    return TESTS.get(room, (f"tests/{room}",))


def main() -> None:
    """Draw, run, print; exit with 1 where too many survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=60, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="rooms' tests at a time (default: %(default)s)")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these of the drawn ones, from 0")
    parser.add_argument("--whole", action="store_true", help="let survivors meet the whole suite, not the short one")
    parser.add_argument("--list", action="store_true", help="only say what would be changed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every mutant there")
    given = parser.parse_args()
    mutants = drawn(given.count, given.seed)
    mutants = [mutants[number] for number in given.only] if given.only else mutants
    results: list[dict[str, object]] = []

    def show(number: int, end: str) -> None:
        one = mutants[number]
        change = f"{_short(one.before)} -> {_short(one.after)}"
        print(f"{number:3} {one.file}:{one.line} {one.kind}: {change}  {end}", flush=True)

    if given.list:
        for number in range(len(mutants)):
            show(number, "")
        return
    with ThreadPoolExecutor(given.jobs) as pool:
        rooms = sorted({one.room for one in mutants})
        for why in pool.map(lambda room: _refused(room_tests(room), SHORT), rooms):
            if why:
                sys.exit(why)
        first = pool.map(lambda one: verdict(one, room_tests(one.room), SHORT, ROOM_S), mutants)
        for number, found in enumerate(first):
            show(number, f"the tests of its room {found}")
            results.append({**asdict(mutants[number]), "by": "room" if found == "fail" else "none"})
    marks = WHOLE if given.whole else SHORT
    survivors = [number for number, one in enumerate(results) if one["by"] == "none"]
    if survivors and (why := _refused(("tests",), marks, workers=2)):
        sys.exit(why)
    for number in survivors:
        found = verdict(mutants[number], ("tests",), marks, SUITE_S, workers=2)
        results[number]["by"] = {"fail": "suite", "pass": "none", "late": "late"}[found]
        show(number, f"the suite {found}")
    counts = Counter(str(one["by"]) for one in results)
    print(f"{counts['room']} noticed by the tests of their room, {counts['suite']} by others, {counts['none']} by none")
    if counts["late"]:
        print(f"{counts['late']} not judged: the suite took more than {SUITE_S} s")
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(counts["room"] + counts["suite"] < ENOUGH * len(results))


def _refused(tests: Sequence[str], marks: str, workers: int = 0) -> str:
    """Say that tests do not pass without a mutant: then they notice nothing."""
    found = verdict(None, tests, marks, SUITE_S, workers)
    return "" if found == "pass" else f"without a mutant {' '.join(tests)} {found}"


def _short(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) < 50 else line[:47] + "..."


if __name__ == "__main__":
    main()
