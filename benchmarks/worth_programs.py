"""The programs that worth.py runs, each under the guard: what came of it, and whether that is good."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import worth_names

worth_names.install()  # before the first import of the library

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]
NEAR = 0.1  # of the loss, or of the way to it
Record = dict[str, Any]


def clinic(of: str, case: str, seed: int) -> Record:
    """A program of the clinic: cured, and whom it accuses."""
    from clinic.runs import carried_out
    from clinic.score import Run

    run = carried_out(Run(of, case, seed, "ours", ""))
    facts = [[one.signal, one.cause, one.op, one.line, [*one.rows], [*one.did], one.outcome] for one in run.incidents]
    named = "right" in (run.culprit, run.rows)
    wrong = run.accuses_another or run.rows == "wrong"
    return {"value": run.loss, "ended": run.why, "named": named, "wrong": wrong, "facts": facts, "lost": run.lost}


def clinic_goal(of: str, case: str, seed: int) -> float | None:
    from clinic.runs import carried_out
    from clinic.score import TWIN, Run

    run = carried_out(Run(of, case, seed, TWIN, ""))
    return None if run.loss is None or run.start is None else run.loss + NEAR * (run.start - run.loss)


def paired(file: str, name: str, arm: str, seed: int) -> Record:
    """A program of noisy.py, climbing.py or changes.py."""
    from clinic import paired

    folder = Path(tempfile.mkdtemp())  # a child of paired.py ends as a process does, with all that is temporary
    try:
        paired.child(HERE.parent / "clinic" / file, name, seed, arm, folder, None)
        record: Record = json.loads((folder / "result.json").read_text())
        summary = next(iter(sorted(folder.glob("run*/summary.json"))), None)
        said = json.loads(summary.read_text()) if summary else {}
        facts = []
        for lines in sorted(folder.glob("run*/incidents.jsonl"))[:1]:
            for one in map(json.loads, lines.read_text().splitlines()):
                did = [action["remedy"] for action in one["actions"]]
                facts.append([one["signal"], one["cause"], None, None, one["rows"], did, one["outcome"]])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ended = record["error"]["type"] if record["error"] else ""
    best, verdict = record["best"], said.get("verdict")
    return {"value": record["measure"], "ended": ended, "said": verdict, "facts": facts, "best": best}


def paired_goal(file: str, name: str, arm: str, seed: int) -> float | None:
    record = paired(file, name, arm, seed)
    value = record["best"] if record["best"] is not None else record["value"]
    return None if value is None else value + NEAR * abs(value)


def matrix(number: int, seed: int) -> Record:
    from clinic import matrix as drawn
    from clinic import matrix_loops

    run = drawn.drawn(0)[number]
    jobs = {job.arm: job for job in run.jobs(False)}
    end = matrix_loops.work(jobs["guarded"])
    facts = [[one["signal"], one["cause"], None, None, [], one["actions"], one["outcome"]] for one in end.incidents]
    ended = end.why if end.said in ("failed", "gave up") else ""
    return {"value": end.loss, "ended": ended, "said": end.said, "facts": facts}


def matrix_goal(number: int, seed: int) -> float | None:
    from clinic import matrix as drawn
    from clinic import matrix_loops

    run = drawn.drawn(0)[number]
    if not run.is_faulty:
        return math.inf
    jobs = [*drawn.cleaned([(run.recipe, run.optimizer)], 0), *(job for job in run.jobs(False) if job.arm == "twin")]
    ends = [matrix_loops.work(job) for job in jobs]
    clean = drawn.clean_of(ends[:-1])
    return float(max(clean.loss, ends[-1].loss) + NEAR * clean.way)


def hot(number: int, seed: int) -> Record:
    from clinic import hot_stretch
    from clinic import hot_stretch_letters as letters

    draw = hot_stretch.draws(0)[number]
    end = letters.arm("guarded", draw, draw.seed)
    return {"value": end.held_out, "ended": end.why, "said": end.said, "facts": [end.incidents]}


def hot_goal(number: int, seed: int) -> float | None:
    from clinic import hot_stretch
    from clinic import hot_stretch_letters as letters

    draw = hot_stretch.draws(0)[number]
    ends = letters.clean_runs(draw.optimizer, draw.seed, [draw.steps])
    return 1.05 * ends[draw.steps].held_out


def rates(number: int, seed: int) -> Record:
    from clinic import hot_rates

    drawn = hot_rates.Drawn.of(number)
    _, best = min((drawn.plain(lr), lr) for lr in hot_rates.OPTIMIZERS[drawn.optimizer][1])
    loss, incidents = drawn.guarded(best * drawn.factor)
    facts = [[str(one.anomaly.signal), str(one.diagnosis.cause)] for one in incidents]
    wrong = any(one.diagnosis.cause in ("operation", "overflow") for one in incidents)
    return {"value": loss, "ended": "", "wrong": wrong, "facts": facts}


def rates_goal(number: int, seed: int) -> float | None:
    from clinic import hot_rates

    drawn = hot_rates.Drawn.of(number)
    untrained = drawn.program(0.0)
    start = untrained.evaluate(untrained.model.state_dict())
    healthy, best = min((drawn.plain(lr), lr) for lr in hot_rates.OPTIMIZERS[drawn.optimizer][1])
    if not healthy < start - (1 - hot_rates.LEARNED) * abs(start):
        return None
    if (drawn.plain(best * drawn.factor) - healthy) / (start - healthy) <= hot_rates.AWAY:
        return None
    return float(healthy + NEAR * (start - healthy))


def drill(recipe: str, name: str, policy: str, seed: int) -> Record:
    import recovery

    made = recovery.cell(recipe, name, policy, seed, recovery.RECIPES[recipe].steps)
    facts = [[str(one.anomaly.signal), str(one.diagnosis.cause), str(one.outcome)] for one in made.incidents]
    return {"value": made.loss if made.is_finite else None, "ended": made.why, "facts": facts}


def drill_goal(recipe: str, name: str, policy: str, seed: int) -> float | None:
    import recovery

    loss = recovery.cell(recipe, "none", "rewind only", seed, recovery.RECIPES[recipe].steps).loss
    return loss + NEAR * abs(loss)


def trainer(program: str, fault: str, seed: int) -> Record:
    import trainers

    loss, named = trainers.ended(program, fault, "guarded")
    return {"value": loss, "ended": "", "named": bool(named), "facts": [named]}


def trainer_goal(program: str, fault: str, seed: int) -> float | None:
    import trainers

    own = "mended" if fault == "operation" and program != "lightning" else ""
    return trainers.NEAR * trainers.ended(program, own, "plain")[0]


Made = Callable[..., Any]
KINDS: dict[str, tuple[Made, Made]] = {
    "clinic": (clinic, clinic_goal),
    "paired": (paired, paired_goal),
    "matrix": (matrix, matrix_goal),
    "hot": (hot, hot_goal),
    "rates": (rates, rates_goal),
    "drill": (drill, drill_goal),
    "trainer": (trainer, trainer_goal),
}
ONE_SEED = ("matrix", "hot", "rates", "trainer")  # they draw their own


def units() -> Iterator[tuple[str, list[Any]]]:
    """Yield the kind and the arguments of every program."""
    from clinic.program import SETS, names

    for of in SETS:
        yield from (("clinic", [of, case]) for case in names(of))
    for file in sorted((HERE.parent / "clinic" / "changing").glob("[a-z]*.py")):
        for arm in ("guarded", "twin-guarded"):
            yield "paired", [f"changing/{file.name}", file.stem, arm]
    from clinic import climbing, noisy

    yield from (("paired", ["climbing.py", name, "guarded"]) for name in climbing.FAMILIES)
    yield from (("paired", ["noisy.py", one.name, "guarded"]) for one in noisy.programs())
    yield from (("matrix", [number]) for number in range(122))
    yield from (("hot", [number]) for number in range(0, 72, 2))
    yield from (("rates", [number]) for number in range(60))
    import recovery

    for recipe, about in recovery.RECIPES.items():
        for name in recovery.DRILLS:
            if name not in about.without:
                yield from (("drill", [recipe, name, policy]) for policy in ("balanced", "conservative", "aggressive"))
    import hf_programs
    import trainers

    programs = [*hf_programs.PROGRAMS, "lightning"]
    yield from (("trainer", [program, fault]) for program in programs for fault in ("", *trainers.FAULTS))


def made(kind: str, arguments: list[Any], seed: int, is_goal: bool) -> Any:
    """Make one run in this process."""
    os.environ["CLINIC_DEVICE"] = "cpu"
    logging.getLogger("resilient_train").setLevel(logging.INFO if kind == "paired" else logging.CRITICAL)
    if is_goal and kind == "paired":
        arguments = [*arguments[:2], "plain"]
    return KINDS[kind][is_goal](*arguments, seed)
