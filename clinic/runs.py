"""One run of the clinic: a tool trains a program, and what became of it is noted."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from clinic.program import Program, guilty_lines
from clinic.score import TWIN, Expected, Run
from clinic.sound import yardstick

# Trains a program with a seed, and notes in the run what cannot be seen from outside: attempts that were lost, and what
# was said. Whatever it raises ends the run.
Tool = Callable[[Program, int, Run], None]

HERE = Path(__file__).parent
KNOWN = {
    "ours": "clinic.ours:balanced",
    "aggressive": "clinic.ours:aggressive",
    "conservative": "clinic.ours:conservative",
    "rewind only": "clinic.ours:rewind_only",
    "plain": "clinic.by_hand:plain",
    "skip": "clinic.by_hand:skip",
    "skip, clip 1.0": "clinic.by_hand:skip_and_clip",
    "skip, AdaGC": "clinic.by_hand:skip_and_adagc",
    "skip, ZClip": "clinic.by_hand:skip_and_zclip",
    "arc": "clinic.with_arc:arc",
}


def tool(name: str) -> Tool:
    """Return a known tool, or one at `package.module:function`."""
    module, _, function = KNOWN.get(name, name).partition(":")
    found: Tool = getattr(importlib.import_module(module), function)
    return found


def carried_out(run: Run) -> Run:
    """Train, and note what became of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begun, case = time.perf_counter(), importlib.import_module(f"clinic.{run.of}.{run.case}")
    if run.arm == TWIN:
        stick = yardstick(case, run.seed)
        run.start, run.loss, run.is_finite = finite(stick.start), finite(stick.healthy), True
    else:
        program = case.program(run.seed)
        try:
            tool(run.arm)(program, run.seed, run)
        except Exception as error:  # whatever ends a user's run
            run.why = f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            run.is_finite = all(bool(weight.isfinite().all()) for weight in program.model.parameters())
        except torch.AcceleratorError:  # the GPU is lost, and the weights with it
            run.is_finite = False
        run.loss = evaluated(case, run.seed, program.model.state_dict())
        run.expected = expected(case, program)  # not before: a tool has no answers to look at
    run.seconds = round(time.perf_counter() - begun, 2)
    return run


def evaluated(case: Any, seed: int, weights: dict[str, Tensor]) -> float | None:
    """The loss that the mended twin has with these weights."""
    try:
        return finite(case.program(seed, mended=True).evaluate(weights))
    except Exception:  # some operations raise where a weight is NaN
        return None


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def expected(case: ModuleType, program: Program) -> Expected:
    """What the incidents should say."""
    guilty, file = program.guilty, str(Path(str(case.__file__)).resolve())
    lines = sorted(line for marked in guilty_lines(case) for line in statement(inspect.getsource(case), marked))
    return Expected(guilty.cause, guilty.ops, guilty.rows, file, lines)


def statement(source: str, line: int) -> range:
    """The lines of the innermost statement that a line belongs to; of one with a body only its head."""
    spans = [head(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return min((span for span in spans if line in span), key=len, default=range(line, line + 1))


def head(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    return range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)


# What a run comes from: where that is the same, it need not be made again.


def made_by(of: str, case: str, name: str) -> str:
    """Return a digest of the source of a run; a module of tools may add files in `SOURCES`."""
    files = [HERE / of / f"{case}.py", *(HERE / f"{one}.py" for one in ("runs", "by_hand", "program", "sound"))]
    where = ""
    if name != TWIN:
        module: Any = importlib.import_module(KNOWN.get(name, name).partition(":")[0])
        files += [Path(module.__file__), *getattr(module, "SOURCES", ())]
        where = " on cuda" if os.environ.get("CLINIC_DEVICE") == "cuda" else ""
    return digest(tuple(files)) + where


@cache
def digest(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
